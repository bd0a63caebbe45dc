/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the memory that groups of several sizes need, and tests how it grows with the number
 * of ranks. Also tests that a plan has space for the header of a large group, that max_top_k
 * limits the memory of backend p2p, and that groups which no backend can have get an error. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "emulator.h"
#include "epic/epic.h"

#define MIB(bytes) ((double)(bytes) / (1 << 20))
#define STAGING (1ll << 30)

static const uint32_t ranks[] = {8, 32, 64, 128, 256};
#define NUM_SIZES (sizeof ranks / sizeof *ranks)

static epic_memory_info memory_of(const char *backend, uint32_t num_ranks, uint32_t num_experts,
                                  int64_t staging_bytes)
{
    epic_memory_info info = {0};
    const epic_config config = {.max_tokens = 4096,
                                .max_row_bytes = 14336,
                                .staging_bytes = staging_bytes,
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
        const epic_memory_info info = memory_of(backend, ranks[i], 256, STAGING),
                               many = memory_of(backend, ranks[i], 2048, STAGING);
        printf("%5u %7.0f %8.0f %7.0f %18.1f %19.1f\n", ranks[i], MIB(info.device_bytes),
               MIB(info.staging_bytes), MIB(info.host_bytes), MIB(info.plan_bytes),
               MIB(many.plan_bytes));
        CHECK(info.staging_bytes <= STAGING + (int64_t)ranks[i] * 1024);
        CHECK(info.plan_bytes > 0 && many.plan_bytes > info.plan_bytes);
        if (ranks[i] == 64) first = info;
    }
    /* staging_bytes also limits the words for rows and the records. So each further rank adds
     * only counts to a heap, which are less than 256 KiB. In the backend hosts, the inbox and
     * the outbox have the same size as the heap. */
    const int64_t heaps = strcmp(backend, "hosts") ? 1 : 3;
    const int64_t last = memory_of(backend, 256, 256, STAGING).device_bytes;
    CHECK_SAY(last - first.device_bytes < heaps * 192 << 18, "%lld bytes",
              (long long)(last - first.device_bytes));
}

/* Checks that nothing grows with the square of the number of ranks, even by one byte per pair
 * of ranks. The second difference of the sizes is the part that does not grow linearly. */
static void check_growth(const char *backend)
{
    int64_t bytes[3];
    for (uint32_t i = 0; i < 3; i++)
        bytes[i] = memory_of(backend, 64 * (i + 1), 256, 0).device_bytes;
    CHECK_SAY(llabs(bytes[2] - 2 * bytes[1] + bytes[0]) < 2 * 64 * 64, "%lld bytes",
              (long long)(bytes[2] - 2 * bytes[1] + bytes[0]));
}

/* Checks the result of epic_memory. `text`: part of the error text; NULL: no error. */
static void check_limit(const char *backend, uint32_t num_ranks, int64_t max_tokens,
                        int64_t max_row_bytes, const char *text)
{
    epic_memory_info info;
    const epic_config config = {.max_tokens = max_tokens,
                                .max_row_bytes = max_row_bytes,
                                .num_ranks = num_ranks,
                                .backend = backend};
    const epic_result result = epic_memory(&config, NULL, &info);
    CHECK_SAY(text ? result == EPIC_ENOTSUP && strstr(epic_error(NULL), text)
                   : result == EPIC_OK,
              "%s with %u ranks: %s", backend, num_ranks, epic_error(NULL));
}

static void check_limits(void)
{
    check_limit("p2p", 257, 64, 64, "num_ranks is 257: must be at most 256 in backend p2p;");
    check_limit("gpu", 1024, 64, 64, "num_ranks is 1024: must be at most 256 in backend p2p;");
    check_limit("hosts", 257, 64, 64,
                "num_ranks is 257: must be at most 256 in backend hosts;");
    for (int i = 0; i < 2; i++) {
        const char *backend = i ? "p2p" : "hosts";
        check_limit(backend, 256, 64, 64, NULL);
        check_limit(backend, 8, 1 << 20, 64, NULL);
        check_limit(backend, 8, (1 << 20) + 1, 64,
                    "config.max_tokens is 1048577: must be at most 1048576 in CUDA contexts;");
    }
    check_limit("hosts", 32, 64, (1 << 20) - 16, NULL);
    check_limit(
        "hosts", 32, 64, 1 << 20,
        "config.max_row_bytes is 1048576: must be at most 1048560 in groups of up to 32");
    check_limit("hosts", 33, 64, 1 << 20, NULL);
    check_limit("p2p", 32, 64, 1 << 20, NULL);
    check_limit("hosts", 8, 1 << 20, 8192, "is too large, it must be less than 64 GB; lower");
    check_limit("p2p", 8, 1 << 20, 8192, NULL);
}

/* Checks that epic_open returns the error of epic_memory, with the same text. */
static void check_open(void)
{
    epic_context *ctx;
    const epic_config config = {
        .max_tokens = 1 << 30, .max_row_bytes = 64, .num_ranks = 1, .backend = "p2p"};
    check_limit("p2p", 1, 1 << 30, 64, "config.max_tokens is 1073741824: must be");
    char text[512];
    snprintf(text, sizeof text, "%s", epic_error(NULL));
    CHECK(epic_open(&ctx, NULL, &config) == EPIC_ENOTSUP);
    CHECK_SAY(strstr(epic_error(ctx), text), "no %s in: %s", text, epic_error(ctx));
    epic_close(ctx);
}

/* ----------------------------------------------------------------- config.max_top_k ---- */

enum { TOP_K = 3, TOKENS = 1024, ROW_BYTES = 5000, BLOCKS = 3 }; /* BLOCKS of 2 KB per row */

static epic_config small_config(uint32_t max_top_k)
{
    return (epic_config){.max_tokens = TOKENS,
                         .max_row_bytes = ROW_BYTES,
                         .num_ranks = 2,
                         .max_top_k = max_top_k,
                         .backend = "p2p"};
}

static int64_t device_bytes(uint32_t max_top_k)
{
    epic_memory_info info = {0};
    const epic_config config = small_config(max_top_k);
    CHECK_SAY(epic_memory(&config, NULL, &info) == EPIC_OK, "%s", epic_error(NULL));
    return info.device_bytes;
}

/* Checks that a plan with a larger top_k than max_top_k is refused. */
static void check_refused(epic_context *ctx)
{
    const epic_layer layer = {.num_experts = 8, .top_k = TOP_K + 1};
    static _Alignas(256) uint8_t plan[4096];
    const epic_plan_args args = {.layer = &layer, .plan = plan, .plan_bytes = sizeof plan};
    CHECK(epic_plan(ctx, &args) == EPIC_EINVAL);
    CHECK_SAY(!strcmp(epic_error(ctx),
                      "layer.top_k is 4: must be at most config.max_top_k 3; open the context "
                      "with more, or 0 for 64"),
              "%s", epic_error(ctx));
}

static pthread_barrier_t barrier;

/* Opens a context, and checks that both ranks have allocated what epic_memory computes. */
static void *open_rank(void *bootstrap)
{
    epic_context *ctx;
    const epic_config config = small_config(TOP_K);
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(ctx));
    pthread_barrier_wait(&barrier);
    const int64_t each = (int64_t)emulator_bytes(false) / 2, reported = device_bytes(TOP_K);
    CHECK_SAY(each >= reported && each < reported + 65536, "%lld bytes, reported %lld",
              (long long)each, (long long)reported);
    check_refused(ctx);
    pthread_barrier_wait(&barrier);
    epic_close(ctx);
    return NULL;
}

/* Per choice a rank has a record of 8 bytes for each rank, and a float of 4 bytes for its peer,
 * for even and for odd epochs. It also has a dot product of 4 bytes per rank and block of
 * a row. */
static void check_max_top_k(void)
{
    const int64_t choice = 2 * 2 * 8 + 2 * 1 * 4 + 2 * BLOCKS * 4;
    CHECK(device_bytes(0) == device_bytes(64));
    CHECK(device_bytes(64) - device_bytes(8) == TOKENS * (64 - 8) * choice);
    CHECK(device_bytes(8) - device_bytes(TOP_K + 1) == TOKENS * (8 - (TOP_K + 1)) * choice);
    CHECK(device_bytes(TOP_K + 1) == device_bytes(TOP_K));
    epic_bootstrap bootstraps[2];
    pthread_t threads[2];
    CHECK(epic_bootstrap_threads(bootstraps, 2, 60000) == EPIC_OK);
    CHECK(pthread_barrier_init(&barrier, NULL, 2) == 0);
    for (int r = 0; r < 2; r++)
        CHECK(pthread_create(&threads[r], NULL, open_rank, &bootstraps[r]) == 0);
    for (int r = 0; r < 2; r++) CHECK(pthread_join(threads[r], NULL) == 0);
    for (int r = 0; r < 2; r++) epic_bootstrap_close(&bootstraps[r]);
}

int main(void)
{
    check_begin();
    check_growth("p2p");
    check_growth("hosts");
    check_max_top_k();
    check_limits();
    check_open();
    print_backend("p2p");
    print_backend("hosts");
    return check_end();
}
