/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the memory that groups of several sizes need, and tests how it grows with the number of
 * ranks. Also tests that a plan has space for the header of a large group. */
#include <stdio.h>

#include "check.h"
#include "epic/epic.h"

#define MIB(bytes) ((double)(bytes) / (1 << 20))
#define STAGING (1ll << 30)

static const uint32_t ranks[] = {8, 32, 64, 128, 256};
#define NUM_SIZES (sizeof ranks / sizeof *ranks)

static epic_memory_info memory_of(const char *backend, uint32_t num_ranks, uint32_t num_experts)
{
    epic_memory_info info = {0};
    const epic_config config = {.max_tokens = 4096,
                                .max_row_bytes = 14336,
                                .staging_bytes = STAGING,
                                .max_top_k = 8,
                                .num_ranks = num_ranks,
                                .backend = backend};
    const epic_layer layer = {.num_experts = num_experts, .top_k = 8};
    CHECK_SAY(epic_memory(&config, &layer, &info) == EPIC_OK, "%s", epic_error(NULL));
    return info;
}

/* Prints the memory of one backend. Checks that staging_bytes limits the staging. */
static void print_backend(const char *backend)
{
    epic_memory_info first = {0};
    printf("%s: 4096 tokens of 14336 bytes, top_k 8, staging_bytes 1 GiB; MiB per rank\n",
           backend);
    printf("ranks  device  staging    host  plan, 256 experts  plan, 2048 experts\n");
    for (size_t i = 0; i < NUM_SIZES; i++) {
        const epic_memory_info info = memory_of(backend, ranks[i], 256),
                               many = memory_of(backend, ranks[i], 2048);
        printf("%5u %7.0f %8.0f %7.0f %18.1f %19.1f\n", ranks[i], MIB(info.device_bytes),
               MIB(info.staging_bytes), MIB(info.host_bytes), MIB(info.plan_bytes),
               MIB(many.plan_bytes));
        CHECK(info.staging_bytes <= STAGING + (int64_t)ranks[i] * 1024);
        CHECK(info.plan_bytes > 0 && many.plan_bytes > info.plan_bytes);
        if (ranks[i] == 64) first = info;
    }
    /* Without its staging, a rank of 256 needs at most eight times as much as one of 64. */
    const epic_memory_info last = memory_of(backend, 256, 256);
    CHECK(last.device_bytes - STAGING < 8 * (first.device_bytes - STAGING));
}

int main(void)
{
    check_begin();
    print_backend("p2p");
    print_backend("hosts");
    return check_end();
}
