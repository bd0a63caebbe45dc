/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the calls that add windows to CUDA contexts: results, errors that all ranks return, and
 * a rank that does not make the call. gpu_check tests operations whose outputs lie in windows.
 *
 *   usage: windows [RANKS]    ranks are threads, assigned to the GPUs in turn */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "copies.h"
#include "epic/epic.h"

enum { MAX_RANKS = 8, BYTES = 5000 };
#define MOST_BYTES (((int64_t)1 << 48) - 4096) /* more than any GPU, or address space, has */

static int num_ranks = 2, num_gpus, failed;
static epic_bootstrap bootstraps[MAX_RANKS];
static pthread_barrier_t all;

#define CHECK(condition, ctx)                                                           \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, \
                    epic_error(ctx));                                                   \
            failed = 1;                                                                 \
        }                                                                               \
    } while (0)

/* A window of new memory is zero, and every rank can write its own. */
static void test_alloc(epic_context *ctx, int rank)
{
    unsigned char bytes[BYTES], zeros[BYTES] = {0};
    const epic_window_args args = {.bytes = rank ? BYTES + 16 * rank : BYTES};
    epic_window_info window = {0};
    CHECK(epic_window_alloc(ctx, &args, &window) == EPIC_OK, ctx);
    CHECK(window.data && window.bytes == args.bytes && window.is_direct, ctx);
    CHECK(cudaMemcpy(bytes, window.data, BYTES, cudaMemcpyDeviceToHost) == cudaSuccess, ctx);
    CHECK(!memcmp(bytes, zeros, BYTES), ctx);
    CHECK(fill_in(window.data, rank, BYTES) == cudaSuccess, ctx);
}

/* One rank has no window. */
static void test_empty(epic_context *ctx, int rank)
{
    const epic_window_args args = {.bytes = rank == 1 ? 0 : BYTES};
    epic_window_info window = {.data = &window};
    CHECK(epic_window_alloc(ctx, &args, &window) == EPIC_OK, ctx);
    CHECK((window.data != NULL) == (rank != 1) && window.bytes == args.bytes, ctx);
}

static void check_refused(epic_context *ctx, epic_result result, epic_result expected,
                          const char *text)
{
    CHECK(result == expected && strstr(epic_error(ctx), text), ctx);
    CHECK(epic_check(ctx) == EPIC_OK, ctx); /* the group is not broken */
}

/* If the memory of one rank cannot be a window, all ranks return its error. */
static void test_refused(epic_context *ctx, int rank, unsigned char *memory)
{
    static unsigned char host[BYTES];
    epic_window_info window = {0};
    epic_window_args args = {.bytes = BYTES, .data = rank == 1 ? host : memory};
    check_refused(ctx, epic_window_register(ctx, &args, &window), EPIC_ENOTSUP,
                  "rank 1: data is ");
    args = (epic_window_args){.bytes = rank == 1 ? MOST_BYTES : BYTES};
    check_refused(ctx, epic_window_alloc(ctx, &args, &window), EPIC_ENOMEM,
                  "rank 1: bytes is 281474976706560: ");
    CHECK(!window.data, ctx);
    if (num_gpus > 1) {
        unsigned char *elsewhere = NULL;
        (void)cudaSetDevice((rank + 1) % num_gpus);
        CHECK(cudaMalloc((void **)&elsewhere, BYTES) == cudaSuccess, ctx);
        (void)cudaSetDevice(rank % num_gpus);
        args = (epic_window_args){.bytes = BYTES, .data = rank ? memory : elsewhere};
        check_refused(ctx, epic_window_register(ctx, &args, &window), EPIC_ENOTSUP,
                      "rank 0: data is on device 1: must be on device 0");
        CHECK(cudaFree(elsewhere) == cudaSuccess, ctx);
    }
}

static void test_register(epic_context *ctx, unsigned char *memory)
{
    const epic_window_args args = {.bytes = BYTES - 48, .data = memory + 48};
    epic_window_info window = {0};
    CHECK(epic_window_register(ctx, &args, &window) == EPIC_OK, ctx);
    CHECK(window.data == memory + 48 && window.bytes == BYTES - 48 && window.is_direct, ctx);
}

/* A rank that does not make the call is named, and the group is broken. */
static void test_absent(epic_context *ctx, int rank)
{
    const epic_window_args args = {.bytes = BYTES, .call.timeout_ms = 2000};
    epic_window_info window = {0};
    epic_failure_info failure;
    if (rank != num_ranks - 1) {
        char who[48];
        const epic_result result = epic_window_alloc(ctx, &args, &window);
        snprintf(who, sizeof who, "for rank %d to begin it", num_ranks - 1);
        /* another rank may have found it first and broken the group */
        CHECK((result == EPIC_ETIMEOUT && strstr(epic_error(ctx), who)) ||
                  (result == EPIC_EPEER && num_ranks > 2),
              ctx);
        CHECK(epic_failure(ctx, &failure) == EPIC_OK &&
                  (failure.operation == EPIC_OP_WINDOW || num_ranks > 2),
              ctx);
        CHECK(epic_check(ctx) != EPIC_OK, ctx);
    }
    pthread_barrier_wait(&all);
}

static void *run_rank(void *self)
{
    const epic_bootstrap *bootstrap = self;
    const int rank = bootstrap->rank;
    const epic_config config = {.max_tokens = 16,
                                .max_row_bytes = 64,
                                .max_sms = 2,
                                .timeout_ms = 100000,
                                .backend = "p2p"};
    epic_context *ctx;
    unsigned char *memory = NULL;
    (void)cudaSetDevice(rank % num_gpus);
    if (epic_open(&ctx, bootstrap, &config) != EPIC_OK ||
        cudaMalloc((void **)&memory, BYTES) != cudaSuccess) {
        fprintf(stderr, "windows: open: %s\n", epic_error(ctx));
        _exit(1); /* peers would wait for this rank */
    }
    test_alloc(ctx, rank);
    test_empty(ctx, rank);
    if (num_ranks > 1) test_refused(ctx, rank, memory);
    test_register(ctx, memory);
    test_alloc(ctx, rank);
    if (num_ranks > 1) test_absent(ctx, rank);
    epic_close(ctx);
    CHECK(cudaFree(memory) == cudaSuccess, NULL);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[MAX_RANKS];
    if (argc > 1) num_ranks = atoi(argv[1]);
    if (num_ranks < 1 || num_ranks > MAX_RANKS) return 2;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || !num_gpus) return 77;
    pthread_barrier_init(&all, NULL, (unsigned)num_ranks);
    if (epic_bootstrap_threads(bootstraps, num_ranks, 20000) != EPIC_OK) return 1;
    for (int r = 0; r < num_ranks; r++)
        pthread_create(&threads[r], NULL, run_rank, &bootstraps[r]);
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
    printf("windows of %d ranks: %s\n", num_ranks, failed ? "WRONG" : "good");
    return failed;
}
