/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the budget of SMs of one GPU, which all contexts of the process share, whichever groups
 * they belong to. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "epic/epic.h"

static int failed;

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            failed = 1;                                                             \
        }                                                                           \
    } while (0)

static epic_result open_with_flags(epic_context **ctx, uint32_t max_sms, uint32_t flags)
{
    const epic_config config = {.max_tokens = 16,
                                .max_row_bytes = 64,
                                .max_sms = max_sms,
                                .backend = "p2p",
                                .flags = flags};
    return epic_open(ctx, NULL, &config);
}

static epic_result open_with(epic_context **ctx, uint32_t max_sms)
{
    return open_with_flags(ctx, max_sms, 0);
}

/* Checks that groups with and without EPIC_CAN_REGROUP share the SMs, although their kernels
 * are in different libraries. */
static void test_two_libraries(uint32_t all)
{
    epic_context *first, *second;
    const epic_result result = open_with_flags(&first, all - 10, EPIC_CAN_REGROUP);
    if (result == EPIC_ENOTSUP && strstr(epic_error(first), "cannot be loaded")) {
        printf("left out: %s\n", epic_error(first));
        epic_close(first);
        return;
    }
    CHECK(result == EPIC_OK && open_with(&second, 11) == EPIC_EINVAL);
    epic_close(second);
    CHECK(open_with(&second, 0) == EPIC_OK && epic_max_sms(second) == 10);
    epic_close(first);
    epic_close(second);
}

/* Returns the number of SMs that a group of one rank uses by default. */
static uint32_t default_sms_of(int64_t max_tokens, int64_t max_row_bytes)
{
    const epic_config config = {
        .max_tokens = max_tokens, .max_row_bytes = max_row_bytes, .backend = "p2p"};
    epic_context *ctx;
    CHECK(epic_open(&ctx, NULL, &config) == EPIC_OK);
    const uint32_t sms = epic_max_sms(ctx);
    epic_close(ctx);
    return sms;
}

static uint32_t min_of(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* With few rows a group uses fewer SMs, depending on tokens and bytes. */
static void test_default_sms(uint32_t all)
{
    const uint32_t few = min_of(all, 32), many = min_of(all, 64);
    CHECK(default_sms_of(1, 14336) == few && default_sms_of(16, 14336) == few);
    CHECK(default_sms_of(16, 16384) == few && default_sms_of(16, 16400) == many);
    CHECK(default_sms_of(32, 4096) == few && default_sms_of(33, 4096) == many);
    CHECK(default_sms_of(512, 16) == many && default_sms_of(1, 4 << 20) == many);
}

/* Runs a sum of a group with one rank. */
static void run_sum(epic_context *ctx, uint32_t max_sms)
{
    float *data, back = 0;
    const float three = 3;
    CHECK(cudaMalloc((void **)&data, sizeof *data) == cudaSuccess);
    CHECK(cudaMemcpy(data, &three, sizeof three, cudaMemcpyDefault) == cudaSuccess);
    const epic_allreduce_sum_args args = {.call.max_sms = max_sms, .data = data, .count = 1};
    CHECK(epic_allreduce_sum(ctx, &args) == EPIC_OK);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(epic_check(ctx) == EPIC_OK);
    CHECK(cudaMemcpy(&back, data, sizeof back, cudaMemcpyDefault) == cudaSuccess &&
          back == three);
    cudaFree(data);
}

int main(void)
{
    epic_context *first, *second, *third;
    int sms = 0;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess);
    const uint32_t all = (uint32_t)sms;
    test_default_sms(all);
    test_two_libraries(all);

    CHECK(open_with(&first, all - 10) == EPIC_OK && epic_max_sms(first) == all - 10);
    CHECK(open_with(&second, 11) == EPIC_EINVAL);
    CHECK(strstr(epic_error(second), "config.max_sms") != NULL);
    epic_close(second);
    /* the remaining SMs */
    CHECK(open_with(&second, 0) == EPIC_OK && epic_max_sms(second) == 10);
    CHECK(open_with(&third, 0) == EPIC_EINVAL && epic_max_sms(third) == 0);
    run_sum(first, 0);
    run_sum(second, 3);
    run_sum(second, 1000); /* no more than the context has */
    epic_close(third);
    epic_close(second);
    CHECK(open_with(&second, 10) == EPIC_OK);
    epic_close(second);
    epic_close(first);

    CHECK(open_with(&first, all + 1) == EPIC_EINVAL);
    epic_close(first);
    CHECK(open_with(&first, 0) == EPIC_OK && epic_max_sms(first) > 0);
    printf("SM budgets: a context uses %u of %d SMs by itself: %s\n", epic_max_sms(first), sms,
           failed ? "WRONG" : "good");
    epic_close(first);
    return failed;
}
