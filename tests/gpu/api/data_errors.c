/* SPDX-License-Identifier: Apache-2.0 */
/* Tests errors in the data and damaged plans by the public calls. A CUDA context reports by
 * epic_check what a host context returns at once, with the same text on every rank; the group
 * stays usable.
 *
 *   usage: api_data_errors [RANKS] */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "epic/epic.h"

/* Few enough for the low-latency kernels; another program uses more. */
#ifndef TOKENS
#define TOKENS 40
#endif
enum { MAX_RANKS = 8, TOP_K = 3, EXPERTS = 24, ROW = 64, SLOTS = 4000, PLAN = 1 << 20 };
enum {
    LONG_K = 40,
    NUM_LOGICAL = 10,
    LONG_TOKENS = TOKENS * TOP_K / LONG_K
}; /* more choices than a warp has lanes */
enum {
    GOOD,
    EXPERT,
    WIDE_EXPERT,
    PLACEMENT,
    CAPACITY,
    ROWS,
    COMBINE_ROWS,
    D_RECV_ROWS,
    D_ROWS,
    NO_ROWS, /* no rows in combine_backward */
    DROP,
    TREE,
    TREE_TWO_BLOCKS,  /* EPIC_TREE, and a rank that owns two blocks of experts */
    TREE_SPLIT_BLOCK, /* EPIC_TREE, and a block of experts that two ranks own */
    DISTINCT,
    TWIN,
    LONG_DISTINCT,
    LONG_TWIN,   /* a duplicate id with one choice in each half of the choices */
    SECOND_TWIN, /* a duplicate id with both choices in the second half */
    REPLICAS,
    REPLICA,      /* an invalid entry of the table of replicas */
    NO_REPLICA,   /* a logical expert without replicas */
    LOGICAL,      /* a logical id that is too large */
    REPLICA_ROWS, /* fewer rows than experts, on the last rank */
    BY_K,
    REPLICAS_BY_K,
    FLAT_DROP,
    FLAT_BY_K,
    FLAT_REPLICAS,
    FLAT_LOGICAL,
    FLAT_DISTINCT,
    FLAT_TWIN,
    FLAT_WEIGHTS, /* weights by slot, which FLAT refuses */
    FLAT_LAYER,   /* from here on: a layer other than the plan's */
    LAYER_OF_DISPATCH,
    LAYER_OF_COMBINE,
    ORDER_OF_COMBINE,
    LAYER_OF_D_DISPATCH,
    LAYER_OF_D_COMBINE,
    DAMAGED,
    NUM_CASES
};
static const char *const names[] = {"good",
                                    "expert",
                                    "wide expert",
                                    "placement",
                                    "capacity",
                                    "rows of dispatch",
                                    "rows of combine",
                                    "rows of dispatch_backward",
                                    "rows of combine_backward",
                                    "no rows",
                                    "dropping",
                                    "tree",
                                    "two blocks of a tree on a rank",
                                    "a block of a tree on two ranks",
                                    "distinct ids",
                                    "an id twice",
                                    "distinct ids, many of a token",
                                    "an id twice, in different halves",
                                    "an id twice, in the second half",
                                    "replicas",
                                    "an entry of replicas",
                                    "no replica",
                                    "logical expert",
                                    "rows of replicas",
                                    "dropping by k",
                                    "replicas, dropping by k",
                                    "flat, dropping",
                                    "flat, dropping by k",
                                    "flat, replicas",
                                    "flat, logical expert",
                                    "flat, distinct ids",
                                    "flat, an id twice",
                                    "flat, weights by slot",
                                    "flat, another layer",
                                    "another layer in dispatch",
                                    "another layer in combine",
                                    "another order in combine",
                                    "another layer in dispatch_backward",
                                    "another layer in combine_backward",
                                    "damaged plan"};

typedef struct observed { /* results of one case on one rank */
    int result;
    char sentence[512];
    epic_plan_info info;
    int32_t fate[TOKENS * TOP_K], rank[TOKENS * TOP_K];
} observed;

static int num_ranks = 2;
static epic_bootstrap bootstraps[MAX_RANKS];
static pthread_barrier_t all;
static observed host[NUM_CASES][MAX_RANKS], device[NUM_CASES][MAX_RANKS];

static void must_succeed(int good, const char *what, const epic_context *ctx)
{
    if (good) return;
    fprintf(stderr, "data_errors: %s: %s\n", what, epic_error(ctx));
    _exit(1); /* peers would wait for this rank, and threads must not meet in exit handlers */
}

typedef struct seat { /* context and memory of a rank, on a host or a device */
    epic_context *ctx;
    epic_layer layer; /* layer of the running case */
    int rank, on_device;
    cudaStream_t stream;
    unsigned char *plan, *recv, *tokens, *d_rows;
    int64_t *ids;
    int32_t *owner, *logical;
    float *floats; /* [SLOTS] */
} seat;

static void copy_memory(const seat *s, void *to, const void *from, size_t bytes)
{
    if (!s->on_device) {
        memcpy(to, from, bytes);
        return;
    }
    must_succeed(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s->stream) == cudaSuccess,
                 "copy", NULL);
    must_succeed(cudaStreamSynchronize(s->stream) == cudaSuccess, "copy", NULL);
}

static void *allocate_memory(const seat *s, size_t bytes)
{
    void *p = NULL;
    if (!s->on_device) return aligned_alloc(64, (bytes + 63) / 64 * 64);
    must_succeed(cudaMalloc(&p, bytes) == cudaSuccess, "cudaMalloc", NULL);
    return p;
}

static void free_memory(const seat *s, void *p)
{
    if (s->on_device)
        cudaFree(p);
    else
        free(p);
}

static int is_long(int which)
{
    return which >= LONG_DISTINCT && which <= SECOND_TWIN;
}

static int are_distinct(int which)
{
    return (which >= DISTINCT && which <= SECOND_TWIN) || which == FLAT_DISTINCT ||
           which == FLAT_TWIN;
}

static int has_replicas(int which)
{
    return (which >= REPLICAS && which <= REPLICA_ROWS) || which == REPLICAS_BY_K ||
           which == FLAT_REPLICAS || which == FLAT_LOGICAL;
}

static int is_misplaced_tree(int which)
{
    return which == TREE_TWO_BLOCKS || which == TREE_SPLIT_BLOCK;
}

static int has_tree(int which)
{
    return which == TREE || is_misplaced_tree(which);
}

static int is_by_k(int which)
{
    return which == BY_K || which == REPLICAS_BY_K || which == FLAT_BY_K;
}

static void fill_replicas(const seat *s, int which)
{
    int32_t logical[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) logical[e] = e * 7 % NUM_LOGICAL;
    if (which == REPLICA && s->rank == num_ranks - 1) logical[17] = NUM_LOGICAL + 3;
    for (int e = 0; e < EXPERTS && which == NO_REPLICA; e++) logical[e] |= 1;
    copy_memory(s, s->logical, logical, sizeof logical);
}

/* Fills in the ids of tokens with many choices, most of which are -1. */
static void fill_long(int which, int64_t *ids)
{
    for (int i = 0; i < TOKENS * TOP_K; i++) ids[i] = i % 5 ? -1 : i % LONG_K / 5 * 3;
    if (which == LONG_TWIN) ids[LONG_K + 36] = ids[LONG_K + 5];
    if (which == LONG_TWIN) ids[LONG_K + 38] = ids[LONG_K + 35];
    if (which == SECOND_TWIN) ids[LONG_K + 37] = ids[LONG_K + 35];
}

/* Fills in valid ids, except the invalid ones of the case. */
static void fill_ids(const seat *s, int which)
{
    int64_t ids[TOKENS * TOP_K];
    int32_t narrow[TOKENS * TOP_K], owner[EXPERTS];
    for (int i = 0; i < TOKENS * TOP_K; i++) ids[i] = (i * 5 + i / 7 + s->rank) % EXPERTS;
    ids[4] = -1;
    if (which == EXPERT && s->rank >= num_ranks / 2) ids[31] = EXPERTS + 7 + s->rank;
    if (which == EXPERT && s->rank >= num_ranks / 2) ids[90] = 1000;
    const int twin = which == TWIN || which == FLAT_TWIN;
    if (twin && s->rank >= num_ranks / 2) ids[31] = ids[30];
    if (twin && s->rank >= num_ranks / 2) ids[33] = 1000;
    if (is_long(which)) fill_long(which, ids);
    for (int i = 0; has_replicas(which) && i < TOKENS * TOP_K; i++)
        if (ids[i] >= 0) ids[i] %= NUM_LOGICAL;
    const int beyond = which == LOGICAL || which == FLAT_LOGICAL;
    if (beyond && s->rank >= num_ranks / 2) ids[31] = NUM_LOGICAL;
    if (has_replicas(which)) fill_replicas(s, which);
    if (which == WIDE_EXPERT && s->rank == 0) ids[TOKENS * TOP_K - 1] = (int64_t)5 << 40 | 3;
    for (int i = 0; i < TOKENS * TOP_K; i++) narrow[i] = (int32_t)ids[i];
    for (int e = 0; e < EXPERTS; e++) owner[e] = e % num_ranks;
    if (which == PLACEMENT) owner[17] = num_ranks + 2;
    for (int e = 0; is_misplaced_tree(which) && e < EXPERTS; e++)
        owner[e] = e / (EXPERTS / num_ranks);
    for (int e = EXPERTS - EXPERTS / num_ranks; which == TREE_TWO_BLOCKS && e < EXPERTS; e++)
        owner[e] = 0;
    if (which == TREE_SPLIT_BLOCK) owner[17] = (owner[17] + 1) % num_ranks;
    copy_memory(s, s->ids, which == WIDE_EXPERT ? (void *)ids : (void *)narrow,
                which == WIDE_EXPERT ? sizeof ids : sizeof narrow);
    copy_memory(s, s->owner, owner, sizeof owner);
}

/* Records the result of a call. On a device this is what epic_check returns, once. */
static void observe_result(seat *s, epic_result result, observed *o)
{
    if (s->on_device) {
        must_succeed(result == EPIC_OK, "a call", s->ctx);
        must_succeed(cudaStreamSynchronize(s->stream) == cudaSuccess, "synchronize", NULL);
        result = epic_check(s->ctx);
    }
    if (o) {
        o->result = result;
        snprintf(o->sentence, sizeof o->sentence, "%s", result ? epic_error(s->ctx) : "");
    }
    must_succeed(epic_check(s->ctx) == EPIC_OK, "the second check", s->ctx);
    pthread_barrier_wait(&all);
}

static void read_back(const seat *s, observed *o)
{
    static _Thread_local _Alignas(64) unsigned char bytes[PLAN];
    epic_plan_info again;
    must_succeed(!epic_plan_read(s->plan, PLAN, &o->info), "plan_read", s->ctx);
    copy_memory(s, bytes, s->plan, PLAN);
    must_succeed(!epic_plan_read(bytes, PLAN, &again), "plan_read of a copy", s->ctx);
    must_succeed(!memcmp(&again, &o->info, sizeof again), "plan_read: a copy says the same",
                 NULL);
    memcpy(o->fate, bytes + o->info.fate_offset, sizeof o->fate);
    memcpy(o->rank, bytes + o->info.rank_offset, sizeof o->rank);
    /* undefined if the table is invalid */
    if (o->result == EPIC_EINVAL) o->info.num_local_experts = 0;
    o->info.id = 0; /* these differ between groups */
    o->info.fate_offset = o->info.rank_offset = 0;
}

static epic_result dispatch_rows(seat *s, const epic_layer *layer, int64_t rows)
{
    const epic_dispatch_args args = {.call.stream = s->stream,
                                     .layer = layer,
                                     .plan = s->plan,
                                     .plan_bytes = PLAN,
                                     .tokens = {s->tokens, TOKENS, ROW},
                                     .recv = {s->recv, rows, ROW}};
    return epic_dispatch(s->ctx, &args);
}

/* Returns the number of rows, which is too small on the last rank. */
static int64_t rows_of(const seat *s, int which)
{
    if (s->rank < num_ranks - 1 || which == FLAT_WEIGHTS) return SLOTS;
    return which == NO_ROWS ? 0 : 5;
}

/* Makes the other calls with too few rows on the last rank. Their results must be zeros. */
static epic_result call_short(seat *s, int which)
{
    const epic_call call = {.stream = s->stream};
    const epic_rows slots = {s->recv, rows_of(s, which), ROW};
    const epic_rows out = {s->tokens, TOKENS, ROW};
    const epic_combine_args combine = {.call = call,
                                       .layer = &s->layer,
                                       .plan = s->plan,
                                       .plan_bytes = PLAN,
                                       .rows = epic_rows_as_const(slots),
                                       .out = out,
                                       .type = EPIC_BF16};
    const epic_dispatch_backward_args d_dispatch = {.call = call,
                                                    .layer = &s->layer,
                                                    .plan = s->plan,
                                                    .plan_bytes = PLAN,
                                                    .d_recv = epic_rows_as_const(slots),
                                                    .d_tokens = out,
                                                    .type = EPIC_BF16};
    const epic_combine_backward_args d_combine = {.call = call,
                                                  .layer = &s->layer,
                                                  .plan = s->plan,
                                                  .plan_bytes = PLAN,
                                                  .d_out = epic_rows_as_const(out),
                                                  .rows = epic_rows_as_const(slots),
                                                  .d_rows = {s->d_rows, slots.num_rows, ROW},
                                                  .slot_weights = (float *)(void *)s->recv,
                                                  .d_slot_weights = s->floats,
                                                  .type = EPIC_BF16};
    if (which == COMBINE_ROWS) return epic_combine(s->ctx, &combine);
    if (which == D_RECV_ROWS) return epic_dispatch_backward(s->ctx, &d_dispatch);
    return epic_combine_backward(s->ctx, &d_combine);
}

static void run_short(seat *s, int which, observed *o)
{
    static _Thread_local unsigned char bytes[SLOTS * ROW];
    const size_t tokens = TOKENS * ROW;
    const int backward = which == D_ROWS || which == NO_ROWS;
    const size_t written = backward ? (size_t)rows_of(s, which) * ROW : tokens;
    memset(bytes, 0x11, sizeof bytes);
    copy_memory(s, s->recv, bytes, sizeof bytes);
    copy_memory(s, s->d_rows, bytes, sizeof bytes);
    copy_memory(s, s->tokens, bytes, tokens);
    observe_result(s, call_short(s, which), o);
    copy_memory(s, bytes, backward ? s->d_rows : s->tokens, written);
    for (size_t i = 0; i < written; i++) must_succeed(bytes[i] == 0, "zeros", NULL);
}

/* On a host context only the rank with too few rows gets the error, at once; the others would
 * wait for it. */
static void run_replicas(seat *s, observed *o)
{
    static _Thread_local float rows[EXPERTS * 5], after[EXPERTS * 5], workspace[5];
    const int last = s->rank == num_ranks - 1, local = EXPERTS / num_ranks;
    for (int i = 0; i < EXPERTS * 5; i++) rows[i] = (float)i;
    if (!s->on_device) {
        o->result = EPIC_EINVAL;
        snprintf(o->sentence, sizeof o->sentence,
                 "data.num_rows: rank %d has %d rows, the plan has %d local experts; pass a "
                 "row for each",
                 num_ranks - 1, local - 1, local);
        return;
    }
    copy_memory(s, s->floats, rows, sizeof rows);
    const epic_sum_replicas_args args = {.call.stream = s->stream,
                                         .plan = s->plan,
                                         .plan_bytes = PLAN,
                                         .data = {s->floats, local - last, 5 * sizeof *rows},
                                         .workspace = workspace};
    observe_result(s, epic_sum_replicas(s->ctx, &args), o);
    copy_memory(s, after, s->floats, sizeof after);
    must_succeed(!memcmp(rows, after, sizeof rows), "rows of replicas as they were", NULL);
}

/* Returns a layer that differs from the plan's in one field. */
static epic_layer other_layer(const seat *s, int which)
{
    epic_layer other = s->layer;
    if (which == LAYER_OF_DISPATCH) other.alignment = 2;
    if (which == LAYER_OF_COMBINE) other.num_experts = 2 * EXPERTS;
    if (which == ORDER_OF_COMBINE) other.sum_order = EPIC_TREE;
    if (which == LAYER_OF_D_DISPATCH) other.layout = EPIC_FLAT;
    if (which == LAYER_OF_D_COMBINE) other.top_k = TOP_K - 1;
    if (which == FLAT_LAYER) other.flags = EPIC_DISTINCT;
    return other;
}

/* Calls dispatch_backward with gradients of the weights, which the layout FLAT sends in an
 * operation of their own. */
static epic_result call_flat_backward(seat *s)
{
    const epic_dispatch_backward_args args = {.call.stream = s->stream,
                                              .layer = &s->layer,
                                              .plan = s->plan,
                                              .plan_bytes = PLAN,
                                              .d_recv = {s->d_rows, SLOTS, ROW},
                                              .d_slot_weights = (float *)(void *)s->recv,
                                              .d_tokens = {s->tokens, TOKENS, ROW},
                                              .d_weights = s->floats,
                                              .type = EPIC_BF16};
    return epic_dispatch_backward(s->ctx, &args);
}

static epic_result call_with_layer(seat *s, int which)
{
    if (which == LAYER_OF_DISPATCH) return dispatch_rows(s, &s->layer, SLOTS);
    if (which == FLAT_LAYER) return call_flat_backward(s);
    if (which == LAYER_OF_D_DISPATCH) return call_short(s, D_RECV_ROWS);
    return call_short(s, which == LAYER_OF_D_COMBINE ? D_ROWS : COMBINE_ROWS);
}

/* Passes a layer other than the plan's to one call. A host context does nothing. A CUDA context
 * writes zeros. */
static void run_other_layer(seat *s, int which, observed *o)
{
    static _Thread_local unsigned char bytes[SLOTS * ROW];
    const size_t tokens = TOKENS * ROW, floats = TOKENS * TOP_K * sizeof(float);
    unsigned char *out = s->tokens;
    size_t written = tokens;
    if (which == LAYER_OF_DISPATCH) out = s->recv, written = sizeof bytes;
    if (which == LAYER_OF_D_COMBINE) out = s->d_rows, written = (size_t)rows_of(s, which) * ROW;
    memset(bytes, 0x11, sizeof bytes);
    copy_memory(s, s->recv, bytes, sizeof bytes);
    copy_memory(s, s->d_rows, bytes, sizeof bytes);
    copy_memory(s, s->tokens, bytes, tokens);
    copy_memory(s, s->floats, bytes, floats);
    s->layer = other_layer(s, which);
    observe_result(s, call_with_layer(s, which), o);
    copy_memory(s, bytes, out, written);
    if (which == FLAT_LAYER) copy_memory(s, bytes + written, s->floats, floats);
    if (which == FLAT_LAYER) written += floats;
    for (size_t i = 0; i < written; i++)
        must_succeed(bytes[i] == (s->on_device ? 0 : 0x11), names[which], NULL);
}

/* Returns false if the case needs a sum tree, which requires a power of two of ranks, or more
 * than one rank. */
static int can_run_case(int which)
{
    if (is_misplaced_tree(which) && num_ranks == 1) return 0;
    return (!has_tree(which) && which != ORDER_OF_COMBINE) || !(num_ranks & (num_ranks - 1));
}

static void run_case(seat *s, int which, observed *o)
{
    const bool flat = which >= FLAT_DROP && which <= FLAT_LAYER;
    const bool flat_drops = which == FLAT_DROP || which == FLAT_BY_K || which == FLAT_REPLICAS;
    const bool drops = which == DROP || which == REPLICAS || (is_by_k(which) && !flat);
    s->layer = (epic_layer){.num_experts = EXPERTS,
                            .num_logical = has_replicas(which) ? NUM_LOGICAL : 0,
                            .top_k = is_long(which) ? LONG_K : TOP_K,
                            .flags = are_distinct(which) ? EPIC_DISTINCT : 0,
                            .alignment = drops ? 8 : 1,
                            .layout = flat ? EPIC_FLAT : EPIC_EXPERT_MAJOR,
                            .overflow = drops || flat_drops ? EPIC_OVERFLOW_DROP : 0,
                            .priority = is_by_k(which) ? EPIC_BY_K : EPIC_BY_TOKEN,
                            .expert_capacity = drops        ? 9 * (uint32_t)num_ranks - 5
                                               : flat_drops ? 4 * (uint32_t)num_ranks
                                                            : 0,
                            .sum_order = has_tree(which) ? EPIC_TREE : EPIC_BY_RANK,
                            .leaves = has_tree(which) ? 8 : 0};
    const int last = s->rank == num_ranks - 1;
    const epic_plan_args args = {
        .call.stream = s->stream,
        .layer = &s->layer,
        .plan = s->plan,
        .plan_bytes = PLAN,
        .topk_idx = s->ids,
        .num_tokens = is_long(which) ? LONG_TOKENS : TOKENS,
        .rank_of_expert = which == PLACEMENT || is_misplaced_tree(which) ? s->owner : NULL,
        .logical_of_expert = has_replicas(which) ? s->logical : NULL,
        .capacity = which == CAPACITY && last ? 17
                    : drops && last           ? 64
                    : flat_drops && last      ? 20
                                              : SLOTS,
        .index_type = which == WIDE_EXPERT ? EPIC_I64 : EPIC_I32};
    fill_ids(s, which);
    const epic_result planned = epic_plan(s->ctx, &args);
    observe_result(s, planned, which == DAMAGED ? NULL : o);
    if (which == DAMAGED) {
        copy_memory(s, s->plan + 40, "damage", 6);
        observe_result(s, dispatch_rows(s, &s->layer, SLOTS), o);
        return;
    }
    read_back(s, o);
    if (is_long(which)) return;
    if (which == REPLICA_ROWS) {
        run_replicas(s, o);
        return;
    }
    /* the arguments show this error, so the call itself returns it */
    if (which == FLAT_WEIGHTS) {
        o->result = call_short(s, which);
        snprintf(o->sentence, sizeof o->sentence, "%s", epic_error(s->ctx));
        return;
    }
    if (which >= FLAT_LAYER && which <= LAYER_OF_D_COMBINE) {
        run_other_layer(s, which, o);
        return;
    }
    if (which >= COMBINE_ROWS && which <= NO_ROWS) {
        run_short(s, which, o);
        return;
    }
    observe_result(s, dispatch_rows(s, &s->layer, which == ROWS && last ? 5 : SLOTS),
                   which == ROWS ? o : NULL);
}

static void run_on(int rank, const char *backend, observed (*out)[MAX_RANKS])
{
    seat s = {.rank = rank, .on_device = !strcmp(backend, "p2p")};
    const epic_config config = {
        .max_tokens = TOKENS, .max_row_bytes = ROW, .timeout_ms = 150000, .backend = backend};
    must_succeed(!epic_open(&s.ctx, &bootstraps[rank], &config), "open", s.ctx);
    must_succeed((epic_max_sms(s.ctx) > 0) == s.on_device, "max_sms", s.ctx);
    if (s.on_device) cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking);
    s.plan = allocate_memory(&s, PLAN);
    s.recv = allocate_memory(&s, SLOTS * ROW);
    s.d_rows = allocate_memory(&s, SLOTS * ROW);
    s.tokens = allocate_memory(&s, TOKENS * ROW);
    s.ids = allocate_memory(&s, TOKENS * TOP_K * sizeof *s.ids);
    s.owner = allocate_memory(&s, EXPERTS * sizeof *s.owner);
    s.logical = allocate_memory(&s, EXPERTS * sizeof *s.logical);
    s.floats = allocate_memory(&s, SLOTS * sizeof *s.floats);
    for (int i = 0; i < NUM_CASES; i++) {
        pthread_barrier_wait(&all);
        if (can_run_case(i)) run_case(&s, i, &out[i][rank]);
    }
    pthread_barrier_wait(&all);
    void *const parts[] = {s.plan, s.recv,  s.d_rows,  s.tokens,
                           s.ids,  s.owner, s.logical, s.floats};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free_memory(&s, parts[i]);
    if (s.stream) cudaStreamDestroy(s.stream);
    epic_close(s.ctx);
}

static void *run_rank(void *self)
{
    const int rank = (int)((epic_bootstrap *)self - bootstraps);
    run_on(rank, num_ranks > 1 ? "threads" : "self", host);
    run_on(rank, "p2p", device);
    return NULL;
}

/* CUDA plans have -1 as the rank of a dropped choice. If the blocks of a tree are misplaced, the
 * ranks have no leaves to compare. */
static int has_same_stats(int which, const observed *a, const observed *b)
{
    epic_plan_info x = a->info, y = b->info;
    if (is_misplaced_tree(which)) {
        x.first_leaf = y.first_leaf;
        x.num_leaves = y.num_leaves;
    }
    int same = !memcmp(&x, &y, sizeof x);
    for (int i = 0; i < TOKENS * TOP_K; i++)
        same &= a->fate[i] == b->fate[i] && (a->fate[i] < 0 || a->rank[i] == b->rank[i]);
    return same;
}

static int judge_case(int which, int rank)
{
    static const int expected[NUM_CASES] = {[EXPERT] = EPIC_EINVAL,
                                            [WIDE_EXPERT] = EPIC_EINVAL,
                                            [PLACEMENT] = EPIC_EINVAL,
                                            [TREE_TWO_BLOCKS] = EPIC_EINVAL,
                                            [TREE_SPLIT_BLOCK] = EPIC_EINVAL,
                                            [CAPACITY] = EPIC_EOVERFLOW,
                                            [ROWS] = EPIC_EOVERFLOW,
                                            [COMBINE_ROWS] = EPIC_EOVERFLOW,
                                            [D_RECV_ROWS] = EPIC_EOVERFLOW,
                                            [D_ROWS] = EPIC_EOVERFLOW,
                                            [NO_ROWS] = EPIC_EOVERFLOW,
                                            [DAMAGED] = EPIC_EINVAL,
                                            [TWIN] = EPIC_EINVAL,
                                            [LONG_TWIN] = EPIC_EINVAL,
                                            [SECOND_TWIN] = EPIC_EINVAL,
                                            [REPLICA] = EPIC_EINVAL,
                                            [NO_REPLICA] = EPIC_EINVAL,
                                            [LOGICAL] = EPIC_EINVAL,
                                            [FLAT_TWIN] = EPIC_EINVAL,
                                            [FLAT_WEIGHTS] = EPIC_EINVAL,
                                            [FLAT_LOGICAL] = EPIC_EINVAL,
                                            [REPLICA_ROWS] = EPIC_EINVAL,
                                            [FLAT_LAYER] = EPIC_EINVAL,
                                            [LAYER_OF_DISPATCH] = EPIC_EINVAL,
                                            [LAYER_OF_COMBINE] = EPIC_EINVAL,
                                            [ORDER_OF_COMBINE] = EPIC_EINVAL,
                                            [LAYER_OF_D_DISPATCH] = EPIC_EINVAL,
                                            [LAYER_OF_D_COMBINE] = EPIC_EINVAL};
    /* A host context names the field. */
    static const char *const fields[NUM_CASES] = {
        [FLAT_LAYER] = "layer.flags is 8",
        [LAYER_OF_DISPATCH] = "layer.alignment is 2",
        [LAYER_OF_COMBINE] = "layer.num_experts is 48",
        [ORDER_OF_COMBINE] = "layer.sum_order is EPIC_TREE",
        [LAYER_OF_D_DISPATCH] = "layer.layout is EPIC_FLAT",
        [LAYER_OF_D_COMBINE] = "layer.top_k is 2"};
    const observed *h = &host[which][rank], *d = &device[which][rank];
    const int right = d->result == expected[which] && h->result == d->result;
    const int other = fields[which] && strstr(h->sentence, fields[which]) &&
                      strstr(d->sentence, "layer is not the plan's");
    /* on the host the end of a sentence can name remedies that CUDA contexts do not support */
    const int words =
        which == DAMAGED || other || !strncmp(h->sentence, d->sentence, strlen(d->sentence));
    const int stats = which == DAMAGED || has_same_stats(which, h, d);
    if (right && words && stats) return 0;
    fprintf(stderr, "%s, rank %d: host %d \"%s\", CUDA %d \"%s\"; routing stats %s\n",
            names[which], rank, h->result, h->sentence, d->result, d->sentence,
            stats ? "equal" : "differ");
    return 1;
}

int main(int argc, char **argv)
{
    pthread_t threads[MAX_RANKS];
    int failed = 0;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* no kernel waits behind another rank's */
    if (argc > 1) num_ranks = atoi(argv[1]);
    if (num_ranks < 1 || num_ranks > MAX_RANKS || EXPERTS % num_ranks) return 2;
    must_succeed(!epic_bootstrap_threads(bootstraps, num_ranks, 20000), "bootstrap", NULL);
    pthread_barrier_init(&all, NULL, (unsigned)num_ranks);
    for (int r = 0; r < num_ranks; r++)
        pthread_create(&threads[r], NULL, run_rank, &bootstraps[r]);
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
    for (int i = 0; i < NUM_CASES; i++)
        for (int r = 0; r < num_ranks && can_run_case(i); r++) failed |= judge_case(i, r);
    for (int r = 0; r < num_ranks; r++) epic_bootstrap_close(&bootstraps[r]);
    printf("data errors and routing stats, %d ranks on one GPU: host and CUDA %s\n", num_ranks,
           failed ? "DIFFER" : "say the same");
    return failed;
}
