/* SPDX-License-Identifier: Apache-2.0 */
/* Tests mismatches that only a kernel can find: ranks with different tables of experts, numbers
 * of tokens or bytes of a plan, and a rank that runs two operations at once. All ranks get
 * EPIC_EMISMATCH long before the deadline, and the wrong rank gets the reason. Then a new group
 * opens.
 *
 *   usage: mismatch [RANKS] */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "copies.h"
#include "epic/epic.h"
#include "times.h"

/* Few enough for the low-latency kernels; another program uses more. */
#ifndef TOKENS
#define TOKENS 24
#define LESS 23
#else
#define LESS 1059
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
enum { MAX_RANKS = 8, TOP_K = 2, EXPERTS = 24, ROW = 64, SLOTS = 8192, PLAN = 1 << 18 };
enum {
    TABLE,
    REPLICAS,
    FLAT_REPLICAS,
    OVERLAP,
    TOKENS_OF_PLAN,
    OTHER_LAYER,
    DAMAGED,
    CHANGED,
    NUM_CASES
};
#define DEADLINE_MS 60000
#define TRIES 100

static const char *const names[] = {"tables", "replicas", "flat, replicas", "overlap",
                                    "tokens", "layer",    "damage",         "another capacity"};
static const char *const reasons[] = {
    "rank_of_expert",
    "logical_of_expert",
    "logical_of_expert",
    "began it while another of its operations ran; streams that share a context",
    "here out.num_rows is " TEXT(LESS) ": the plan has " TEXT(TOKENS) " tokens",
    "here layer is not the plan's",
    "here plan: these are not the bytes",
    "here plan: these are not the bytes"};
static int num_ranks = 3, failed;
static epic_bootstrap bootstraps[MAX_RANKS];
static pthread_barrier_t all;

static void must_succeed(int good, const char *what, const epic_context *ctx)
{
    if (good) return;
    fprintf(stderr, "mismatch: %s: %s\n", what, epic_error(ctx));
    _exit(1); /* peers would wait for this rank, and threads must not meet in exit handlers */
}

typedef struct seat {
    epic_context *ctx;
    int rank;
    cudaStream_t stream, second;
    unsigned char *plan, *recv, *out;
    int32_t *ids, *owner, *logical;
} seat;

static void *allocate_memory(size_t bytes)
{
    void *p = NULL;
    must_succeed(cudaMalloc(&p, bytes) == cudaSuccess && fill_in(p, 0, bytes) == cudaSuccess,
                 "memory", NULL);
    return p;
}

static epic_layer layer_of(int which)
{
    const int flat = which == FLAT_REPLICAS, replicas = which == REPLICAS || flat;
    return (epic_layer){.num_experts = EXPERTS,
                        .num_logical = replicas ? EXPERTS / 2 : 0,
                        .top_k = TOP_K,
                        .layout = flat ? EPIC_FLAT : EPIC_EXPERT_MAJOR};
}

static void make_plan(seat *s, int which, cudaStream_t stream)
{
    const epic_layer layer = layer_of(which);
    const int replicas = layer.num_logical != 0;
    int32_t owner[EXPERTS], logical[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) logical[e] = e % (EXPERTS / 2);
    if (replicas && s->rank == 1) logical[EXPERTS - 1] = 0;
    for (int e = 0; e < EXPERTS; e++) owner[e] = e % num_ranks;
    if (which == TABLE && s->rank == 1) owner[7] = (owner[7] + 1) % num_ranks;
    must_succeed(copy_in(s->owner, owner, sizeof owner) == cudaSuccess, "copy", NULL);
    must_succeed(copy_in(s->logical, logical, sizeof logical) == cudaSuccess, "copy", NULL);
    const epic_plan_args args = {.call.stream = stream,
                                 .layer = &layer,
                                 .plan = s->plan,
                                 .plan_bytes = PLAN,
                                 .topk_idx = s->ids,
                                 .num_tokens = TOKENS,
                                 .rank_of_expert = s->owner,
                                 .logical_of_expert = replicas ? s->logical : NULL,
                                 .capacity = SLOTS};
    const epic_result result = epic_plan(s->ctx, &args);
    must_succeed(!result || (which == OVERLAP && result == EPIC_EMISMATCH), "plan", s->ctx);
}

/* Rank 1 plans twice, on streams that do not wait for each other, before its peers plan at all.
 * If the second stream starts late on all ranks, the operations do not overlap. Then the test
 * tries again. */
static void overlap_operations(seat *s)
{
    if (s->rank != 1) pthread_barrier_wait(&all);
    for (int i = 0; i < TRIES && epic_check(s->ctx) == EPIC_OK; i++) {
        make_plan(s, OVERLAP, s->stream);
        make_plan(s, OVERLAP, s->second);
        if (s->rank == 1 && i == 0) pthread_barrier_wait(&all);
        must_succeed(!cudaStreamSynchronize(s->stream), "synchronize", NULL);
        must_succeed(!cudaStreamSynchronize(s->second), "synchronize", NULL);
    }
}

static void provoke_mismatch(seat *s, int which)
{
    const int64_t tokens = TOKENS - (which == TOKENS_OF_PLAN && s->rank == 1);
    if (which == OVERLAP)
        overlap_operations(s);
    else
        make_plan(s, which, s->stream);
    if (which <= OVERLAP) return;
    must_succeed(cudaStreamSynchronize(s->stream) == cudaSuccess, "synchronize", NULL);
    /* this rank is the wrong one, or every rank is if all values fit */
    if (which >= DAMAGED && s->rank == 1) {
        unsigned char *const at = s->plan + (which == DAMAGED ? 40 : 64);
        must_succeed(fill_in(at, 0x77, 4) == cudaSuccess, "damage", NULL);
    }
    epic_layer layer = layer_of(which);
    if (which == OTHER_LAYER && s->rank == 1) layer.flags = EPIC_DISTINCT;
    const epic_combine_args args = {.call.stream = s->stream,
                                    .layer = &layer,
                                    .plan = s->plan,
                                    .plan_bytes = PLAN,
                                    .rows = {s->recv, SLOTS, ROW},
                                    .out = {s->out, tokens, ROW},
                                    .type = EPIC_BF16};
    const epic_result result = epic_combine(s->ctx, &args);
    must_succeed(result == EPIC_OK || result == EPIC_EMISMATCH, "combine",
                 s->ctx); /* a late rank gets the error, too */
}

static void judge_case(seat *s, int which, double took)
{
    const epic_result result = epic_check(s->ctx);
    const int reason = which <= OVERLAP || s->rank == 1;
    if (result == EPIC_EMISMATCH && took < DEADLINE_MS / 2 &&
        (!reason || strstr(epic_error(s->ctx), reasons[which])))
        return;
    fprintf(stderr, "%s, rank %d after %.0f ms: %d \"%s\"\n", names[which], s->rank, took,
            result, epic_error(s->ctx));
    failed = 1;
}

static void run_case(seat *s, int which)
{
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = ROW,
                                .timeout_ms = DEADLINE_MS,
                                .backend = "p2p"};
    must_succeed(!epic_open(&s->ctx, &bootstraps[s->rank], &config), "open", s->ctx);
    pthread_barrier_wait(&all);
    const double begin = now_ms();
    provoke_mismatch(s, which);
    must_succeed(cudaStreamSynchronize(s->stream) == cudaSuccess, "synchronize", NULL);
    judge_case(s, which, now_ms() - begin);
    pthread_barrier_wait(&all);
    epic_close(s->ctx);
}

static void *run_rank(void *self)
{
    seat s = {.rank = (int)((epic_bootstrap *)self - bootstraps)};
    int32_t ids[TOKENS * TOP_K];
    for (int i = 0; i < TOKENS * TOP_K; i++) ids[i] = i % (EXPERTS / 2);
    must_succeed(!cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking), "stream", NULL);
    must_succeed(!cudaStreamCreateWithFlags(&s.second, cudaStreamNonBlocking), "stream", NULL);
    s.plan = allocate_memory(PLAN);
    s.recv = allocate_memory((size_t)SLOTS * ROW);
    s.out = allocate_memory(TOKENS * ROW);
    s.ids = allocate_memory(sizeof ids);
    s.owner = allocate_memory(EXPERTS * sizeof *s.owner);
    s.logical = allocate_memory(EXPERTS * sizeof *s.logical);
    must_succeed(copy_in(s.ids, ids, sizeof ids) == cudaSuccess, "copy", NULL);
    for (int i = 0; i < NUM_CASES; i++) run_case(&s, i);
    void *const parts[] = {s.plan, s.recv, s.out, s.ids, s.owner, s.logical};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) cudaFree(parts[i]);
    cudaStreamDestroy(s.stream);
    cudaStreamDestroy(s.second);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[MAX_RANKS];
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* no kernel waits behind another rank's */
    if (argc > 1) num_ranks = atoi(argv[1]);
    if (num_ranks < 2 || num_ranks > MAX_RANKS) return 2;
    must_succeed(!epic_bootstrap_threads(bootstraps, num_ranks, 20000), "bootstrap", NULL);
    pthread_barrier_init(&all, NULL, (unsigned)num_ranks);
    for (int r = 0; r < num_ranks; r++)
        pthread_create(&threads[r], NULL, run_rank, &bootstraps[r]);
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < num_ranks; r++) epic_bootstrap_close(&bootstraps[r]);
    printf("mismatches that only kernels find, %d ranks on one GPU: %s\n", num_ranks,
           failed ? "WRONG" : "good");
    return failed;
}
