/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a layer runs the kernels that it would run alone, whatever other layers share its
 * context. Each kind of layer makes its calls in a context of its own; then all of them take
 * turns in one context. Every call must launch the same kernels with the same shapes both
 * times.
 *
 *   emulated_layers [RANKS] */
#include <stdio.h>
#include <stdlib.h>

#include "copies.h"
#include "emulator.h"
#include "team.h"

enum {
    MAX_RANKS = 16,
    TOKENS = 136, /* more tokens than the low-latency kernels support */
    FEW = 16,
    MAX_TOP_K = 40,
    ROW = 128,
    SLOTS = MAX_RANKS * TOKENS * MAX_TOP_K / 4,
    MOST_LAUNCHES = 24
};

static const epic_layer layers[] = {
    {.num_experts = 64, .top_k = 2},
    {.num_experts = 64, .top_k = 2, .layout = EPIC_FLAT},
    {.num_experts = 64, .top_k = 4, .sum_order = EPIC_TREE},
    {.num_experts = 128, .top_k = 40},
    {.num_experts = 64, .top_k = 2, .partial_type = EPIC_F32},
    {.num_experts = 64, .top_k = 2, .sum_order = EPIC_TREE, .leaves = 32},
    {.num_experts = 32, .top_k = 8, .alignment = 8, .overflow = EPIC_OVERFLOW_DROP},
};
enum { NUM_LAYERS = sizeof layers / sizeof *layers };

typedef struct round { /* the launches of one layer's calls */
    int count;
    emulator_launch launches[MOST_LAUNCHES];
} round;

typedef struct memory {
    int32_t *ids;
    float *weights, *slot_weights, *d_weights;
    uint8_t *plan, *tokens, *slots;
    int64_t plan_bytes;
} memory;

static round alone[NUM_LAYERS][2][MAX_RANKS];
static int only; /* the layer that a team runs alone; NUM_LAYERS: all */
static bool bad;

static void *allocate_zeroed(size_t bytes)
{
    void *p;
    CHECK_CUDA(cudaMalloc(&p, bytes));
    CHECK_CUDA(fill_in(p, 0, bytes));
    return p;
}

static memory allocate_memory(const team_rank *me)
{
    memory m = {0};
    for (int i = 0; i < NUM_LAYERS; i++) {
        const int64_t bytes = device_layer_bytes(me->num_ranks, TOKENS, &layers[i]);
        if (bytes > m.plan_bytes) m.plan_bytes = bytes;
    }
    m.ids = allocate_zeroed(sizeof(int32_t) * TOKENS * MAX_TOP_K);
    m.weights = allocate_zeroed(sizeof(float) * TOKENS * MAX_TOP_K);
    m.d_weights = allocate_zeroed(sizeof(float) * TOKENS * MAX_TOP_K);
    m.slot_weights = allocate_zeroed(sizeof(float) * SLOTS * 2);
    m.plan = allocate_zeroed((size_t)m.plan_bytes);
    m.tokens = allocate_zeroed((size_t)TOKENS * ROW);
    m.slots = allocate_zeroed((size_t)SLOTS * ROW);
    return m;
}

static void free_all(const memory *m)
{
    void *const parts[] = {m->ids,  m->weights, m->d_weights, m->slot_weights,
                           m->plan, m->tokens,  m->slots};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) CHECK_CUDA(cudaFree(parts[i]));
}

static void must_succeed(const team_rank *me, epic_result result, const char *call, int layer)
{
    epic_failure_info failure;
    if (result == EPIC_OK) CHECK_CUDA(cudaStreamSynchronize(me->stream));
    if (result == EPIC_OK && p2p_ops.poll_failure(me->group, &failure) == EPIC_OK &&
        p2p_ops.next_data_error(me->group) == EPIC_OK)
        return;
    fprintf(stderr, "layer %d, rank %d: %s fails\n", layer, me->rank, call);
    team_stop();
}

static void make_calls(const team_rank *me, const memory *m, int which, int64_t tokens)
{
    const epic_layer *layer = &layers[which];
    const bool flat = layer->layout == EPIC_FLAT;
    const epic_call call = {.stream = me->stream};
    const epic_rows out = {m->tokens, tokens, ROW}, slots = {m->slots, SLOTS, ROW};
    const epic_plan_args plan = {.call = call,
                                 .layer = layer,
                                 .plan = m->plan,
                                 .plan_bytes = m->plan_bytes,
                                 .topk_idx = m->ids,
                                 .num_tokens = tokens,
                                 .capacity = SLOTS};
    const epic_dispatch_args dispatch = {.call = call,
                                         .layer = layer,
                                         .plan = m->plan,
                                         .plan_bytes = m->plan_bytes,
                                         .tokens = epic_rows_as_const(out),
                                         .recv = slots,
                                         .weights = m->weights,
                                         .slot_weights = m->slot_weights};
    const epic_combine_args combine = {.call = call,
                                       .layer = layer,
                                       .plan = m->plan,
                                       .plan_bytes = m->plan_bytes,
                                       .rows = epic_rows_as_const(slots),
                                       .out = out,
                                       .slot_weights = flat ? NULL : m->slot_weights,
                                       .type = EPIC_BF16};
    const epic_combine_backward_args spread = {.call = call,
                                               .layer = layer,
                                               .plan = m->plan,
                                               .plan_bytes = m->plan_bytes,
                                               .d_out = epic_rows_as_const(out),
                                               .d_rows = slots,
                                               .type = EPIC_BF16};
    const epic_dispatch_backward_args home = {.call = call,
                                              .layer = layer,
                                              .plan = m->plan,
                                              .plan_bytes = m->plan_bytes,
                                              .d_recv = epic_rows_as_const(slots),
                                              .d_tokens = out,
                                              .d_slot_weights = m->slot_weights,
                                              .d_weights = m->d_weights,
                                              .type = EPIC_BF16};
    must_succeed(me, p2p_ops.plan(me->group, &plan), "plan", which);
    must_succeed(me, p2p_ops.dispatch(me->group, &dispatch), "dispatch", which);
    must_succeed(me, p2p_ops.combine(me->group, &combine), "combine", which);
    must_succeed(me, p2p_ops.combine_backward(me->group, &spread), "combine_backward", which);
    must_succeed(me, p2p_ops.dispatch_backward(me->group, &home), "dispatch_backward", which);
    must_succeed(me, p2p_ops.plan_dispatch(me->group, &plan, &dispatch), "plan_dispatch",
                 which);
}

/* Fills in distinct experts for each token. */
static void fill_ids(const memory *m, const epic_layer *layer)
{
    static _Thread_local int32_t ids[TOKENS * MAX_TOP_K];
    for (uint32_t i = 0; i < TOKENS * layer->top_k; i++)
        ids[i] = (int32_t)((i / layer->top_k * 7 + i % layer->top_k) % layer->num_experts);
    CHECK_CUDA(copy_in(m->ids, ids, TOKENS * layer->top_k * sizeof *ids));
}

static round run_layer(team_rank *me, const memory *m, int which, bool few)
{
    round r = {0};
    fill_ids(m, &layers[which]);
    (void)emulator_launches(r.launches, MOST_LAUNCHES);
    make_calls(me, m, which, few ? FEW : TOKENS);
    r.count = emulator_launches(r.launches, MOST_LAUNCHES);
    if (r.count < 6) {
        fprintf(stderr, "layer %d: only %d launches were seen\n", which, r.count);
        bad = true;
    }
    return r;
}

static bool is_same(const round *a, const round *b)
{
    bool same = a->count == b->count;
    for (int i = 0; same && i < a->count; i++) {
        const emulator_launch *x = &a->launches[i], *y = &b->launches[i];
        same = x->kernel == y->kernel && x->ctas == y->ctas && x->threads == y->threads &&
               x->shared_bytes == y->shared_bytes;
    }
    return same;
}

static void compare_kernels(const team_rank *me, int which, bool few, const round *r)
{
    if (is_same(r, &alone[which][few][me->rank])) return;
    fprintf(stderr, "layer %d, %s tokens, rank %d: not the kernels that it runs alone\n", which,
            few ? "few" : "many", me->rank);
    bad = true;
}

static int run_rank(team_rank *me)
{
    const memory m = allocate_memory(me);
    for (int few = 0; few < 2 && only < NUM_LAYERS; few++)
        alone[only][few][me->rank] = run_layer(me, &m, only, few);
    for (int i = 0; i < 2 * NUM_LAYERS && only == NUM_LAYERS; i++) {
        /* first ascending, then descending */
        const int which = i < NUM_LAYERS ? i : 2 * NUM_LAYERS - 1 - i;
        const round r = run_layer(me, &m, which, i & 1);
        compare_kernels(me, which, i & 1, &r);
    }
    team_barrier(me);
    free_all(&m);
    return 0;
}

/* Returns whether all launches are equal. Then the test could notice nothing. */
static bool all_alike(void)
{
    for (int i = 1; i < NUM_LAYERS; i++)
        for (int few = 0; few < 2; few++)
            if (!is_same(&alone[i][few][0], &alone[0][few][0])) return false;
    return true;
}

int main(int argc, char **argv)
{
    const int num_ranks = argc > 1 ? atoi(argv[1]) : 2;
    const team t = {.num_ranks = num_ranks,
                    .num_gpus = 1,
                    .max_tokens = TOKENS,
                    .max_row_bytes = ROW,
                    .lowlat_tokens = TEAM_LOWLAT_TOKENS,
                    .timeout_ms = TEAM_LONG_MS,
                    .work = run_rank};
    int failed = 0;
    for (only = 0; only <= NUM_LAYERS; only++) failed |= team_run(&t) != 0;
    failed |= bad || all_alike();
    printf("emulated_layers, %d ranks: %s\n", num_ranks, failed ? "WRONG" : "good");
    return failed;
}
