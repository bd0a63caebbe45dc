/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_waits in a group on GPUs. Rank 1 begins each operation only when the waiting times
 * of all other ranks show that they wait for it alone. So the times are read while kernels
 * wait.
 *
 *   usage: waits [RANKS [TOKENS [EPIC_INFO]]]
 *     TOKENS     at most 1,024 tokens use the low-latency kernels
 *     EPIC_INFO  path of the program epic-info, which must then print these times, too */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "copies.h"
#include "epic/epic.h"

enum { MAX_RANKS = 8, TOP_K = 2, EXPERTS = 24, ROW = 2048, ROUNDS = 3, SLOW = 1 };
#ifndef BACKEND
#define BACKEND "p2p"
#endif
#define NAP_NS 10000000
#define TRIES 20000 /* milliseconds within which the slow rank must be found */
#define DEADLINE_MS 60000

static const uint32_t operations[] = {EPIC_OP_PLAN, EPIC_OP_DISPATCH, EPIC_OP_COMBINE,
                                      EPIC_OP_SUM};
enum { NUM_OPERATIONS = sizeof operations / sizeof *operations };
static int num_ranks = 3, num_tokens = 24, failed;
static epic_bootstrap bootstraps[MAX_RANKS];
static pthread_barrier_t all;
static const char *epic_info;
static char group[64];

static void must_succeed(int good, const char *what, const epic_context *ctx)
{
    if (good) return;
    fprintf(stderr, "waits: %s: %s\n", what, epic_error(ctx));
    _exit(1); /* peers would wait for this rank, and threads must not meet in exit handlers */
}

typedef struct seat {
    epic_context *ctx;
    int rank;
    cudaStream_t stream;
    unsigned char *tokens, *recv, *plan;
    int32_t *ids;
    float *sums;
    int64_t plan_bytes, slots;
    epic_layer layer;
} seat;

static void launch_operation(seat *s, uint32_t operation)
{
    const epic_call call = {.stream = s->stream};
    const epic_plan_args plan = {.call = call,
                                 .layer = &s->layer,
                                 .plan = s->plan,
                                 .plan_bytes = s->plan_bytes,
                                 .topk_idx = s->ids,
                                 .num_tokens = num_tokens,
                                 .capacity = s->slots};
    const epic_dispatch_args dispatch = {.tokens = {s->tokens, num_tokens, ROW},
                                         .recv = {s->recv, s->slots, ROW},
                                         .type = EPIC_BF16};
    const epic_combine_args combine = {.call = call,
                                       .layer = &s->layer,
                                       .plan = s->plan,
                                       .plan_bytes = s->plan_bytes,
                                       .rows = {s->recv, s->slots, ROW},
                                       .out = {s->tokens, num_tokens, ROW},
                                       .type = EPIC_BF16};
    const epic_allreduce_sum_args sum = {.call = call, .data = s->sums, .count = 100};
    const epic_result result =
        operation == EPIC_OP_PLAN       ? epic_plan(s->ctx, &plan)
        : operation == EPIC_OP_DISPATCH ? epic_plan_dispatch(s->ctx, &plan, &dispatch)
        : operation == EPIC_OP_COMBINE  ? epic_combine(s->ctx, &combine)
                                        : epic_allreduce_sum(s->ctx, &sum);
    must_succeed(result == EPIC_OK, epic_operation_name(operation), s->ctx);
}

/* Returns whether the time for which this rank waited for the slow rank alone has grown by
 * NAP_NS since `first`, and more than the time for any other rank. */
static int is_slow_rank_found(const epic_wait_info *first, const epic_wait_info *now)
{
    const uint64_t growth = now[SLOW].alone_ns - first[SLOW].alone_ns;
    int good = growth >= NAP_NS;
    for (int q = 0; q < num_ranks; q++)
        good &= q == SLOW || now[q].alone_ns - first[q].alone_ns < growth;
    return good;
}

/* The slow rank launches its kernel only after the kernels of all other ranks have waited for
 * it, and epic_waits has returned these times. */
static void run_operation(seat *s, uint32_t operation)
{
    epic_wait_info first[MAX_RANKS], now[MAX_RANKS];
    must_succeed(!epic_waits(s->ctx, operation, first, num_ranks), "epic_waits", NULL);
    if (s->rank == SLOW) pthread_barrier_wait(&all);
    launch_operation(s, operation);
    if (s->rank != SLOW) {
        for (int i = 0;; i++) {
            must_succeed(!epic_waits(s->ctx, operation, now, num_ranks), "epic_waits", NULL);
            if (is_slow_rank_found(first, now)) break;
            must_succeed(i < TRIES, "epic_waits does not find the slow rank", NULL);
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        pthread_barrier_wait(&all);
    }
    must_succeed(cudaStreamSynchronize(s->stream) == cudaSuccess, "synchronize", NULL);
    must_succeed(!epic_check(s->ctx), "check", s->ctx);
}

/* Checks the times of one kind of operation after all rounds, and adds them to `sums`. */
static void check_times(const seat *s, uint32_t operation, epic_wait_info *sums)
{
    epic_wait_info out[MAX_RANKS];
    must_succeed(!epic_waits(s->ctx, operation, out, num_ranks), "epic_waits", NULL);
    for (int q = 0; q < num_ranks; q++) {
        const int good = out[q].num_operations == ROUNDS && out[q].alone_ns <= out[q].wait_ns &&
                         (q != s->rank || out[q].wait_ns == 0);
        if (!good)
            fprintf(stderr, "%s, rank %d, %llu operations: %llu ns for rank %d, %llu alone\n",
                    epic_operation_name(operation), s->rank,
                    (unsigned long long)out[q].num_operations,
                    (unsigned long long)out[q].wait_ns, q, (unsigned long long)out[q].alone_ns);
        failed |= !good;
        sums[q].num_operations += out[q].num_operations;
        sums[q].wait_ns += out[q].wait_ns;
        sums[q].alone_ns += out[q].alone_ns;
    }
}

static void *allocate_memory(size_t bytes)
{
    void *p = NULL;
    must_succeed(cudaMalloc(&p, bytes) == cudaSuccess && fill_in(p, 0, bytes) == cudaSuccess,
                 "memory", NULL);
    return p;
}

static void open_seat(seat *s)
{
    const epic_config config = {.max_tokens = num_tokens,
                                .max_row_bytes = ROW,
                                .timeout_ms = DEADLINE_MS,
                                .name = group,
                                .backend = BACKEND};
    epic_layer_info sizes;
    s->layer = (epic_layer){.num_experts = EXPERTS, .top_k = TOP_K};
    must_succeed(!epic_open(&s->ctx, &bootstraps[s->rank], &config), "open", s->ctx);
    must_succeed(!epic_layer_sizes(s->ctx, &s->layer, &sizes), "sizes", s->ctx);
    must_succeed(!cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "stream", NULL);
    s->plan_bytes = sizes.plan_bytes;
    s->slots = sizes.capacity_any_placement;
    s->plan = allocate_memory((size_t)s->plan_bytes);
    s->tokens = allocate_memory((size_t)num_tokens * ROW);
    s->recv = allocate_memory((size_t)s->slots * ROW);
    s->ids = allocate_memory((size_t)num_tokens * TOP_K * sizeof *s->ids);
    s->sums = allocate_memory(100 * sizeof *s->sums);
    int32_t *ids = malloc((size_t)num_tokens * TOP_K * sizeof *ids);
    for (int i = 0; i < num_tokens * TOP_K; i++) ids[i] = i * 7 % EXPERTS;
    must_succeed(copy_in(s->ids, ids, (size_t)num_tokens * TOP_K * sizeof *ids) == cudaSuccess,
                 "copy", NULL);
    free(ids);
}

/* Returns whether epic-info prints that ranks of this group have waited for the slow rank. */
static int is_slow_rank_printed(void)
{
    char command[4096], output[16384] = "", expected[64];
    snprintf(command, sizeof command, "'%s' --group %s", epic_info, group);
    snprintf(expected, sizeof expected, "for rank %d", SLOW);
    FILE *pipe = popen(command, "r");
    must_succeed(pipe != NULL, "epic-info", NULL);
    (void)!fread(output, 1, sizeof output - 1, pipe);
    pclose(pipe);
    const char *together = strstr(output, "all ranks together waited ");
    return together && strstr(together, expected);
}

/* epic-info prints copies of the times, which a thread of the group makes from time to time. */
static void check_epic_info(void)
{
    int printed = 0;
    for (int i = 0; !printed && i < TRIES / 100; i++) {
        printed = is_slow_rank_printed();
        if (!printed) nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    if (!printed) fprintf(stderr, "epic-info does not print the slow rank\n");
    failed |= !printed;
}

static void *run_rank(void *self)
{
    seat s = {.rank = (int)((epic_bootstrap *)self - bootstraps)};
    epic_wait_info sums[MAX_RANKS] = {{0}}, total[MAX_RANKS];
    open_seat(&s);
    pthread_barrier_wait(&all);
    for (int i = 0; i < ROUNDS * NUM_OPERATIONS; i++)
        run_operation(&s, operations[i % NUM_OPERATIONS]);
    for (int i = 0; i < NUM_OPERATIONS; i++) check_times(&s, operations[i], sums);
    must_succeed(!epic_waits(s.ctx, EPIC_OP_NONE, total, num_ranks), "epic_waits", NULL);
    if (memcmp(total, sums, (size_t)num_ranks * sizeof *sums) != 0) failed = 1;
    if (s.rank == 0 && epic_info) check_epic_info();
    pthread_barrier_wait(&all);
    void *const parts[] = {s.plan, s.recv, s.tokens, s.ids, s.sums};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) cudaFree(parts[i]);
    cudaStreamDestroy(s.stream);
    epic_close(s.ctx);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[MAX_RANKS];
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* no kernel waits behind another rank's */
    if (argc > 1) num_ranks = atoi(argv[1]);
    if (argc > 2) num_tokens = atoi(argv[2]);
    if (argc > 3) epic_info = argv[3];
    snprintf(group, sizeof group, "waits-%d", (int)getpid());
    if (num_ranks < 2 || num_ranks > MAX_RANKS || num_tokens < 1) return 2;
    must_succeed(!epic_bootstrap_threads(bootstraps, num_ranks, 20000), "bootstrap", NULL);
    pthread_barrier_init(&all, NULL, (unsigned)num_ranks);
    for (int r = 0; r < num_ranks; r++)
        pthread_create(&threads[r], NULL, run_rank, &bootstraps[r]);
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < num_ranks; r++) epic_bootstrap_close(&bootstraps[r]);
    printf("waiting times, %d ranks on one GPU, %d tokens: %s\n", num_ranks, num_tokens,
           failed ? "WRONG" : "good");
    return failed;
}
