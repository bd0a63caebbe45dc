/* SPDX-License-Identifier: Apache-2.0 */
/* The small step. Its experts copy their rows, so a combined token is top_k times itself. */
#include "step.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

static epic_config sizes_of(const step *s)
{
    return (epic_config){.max_tokens = STEP_MAX_TOKENS,
                         .max_row_bytes = STEP_MAX_ROW_BYTES,
                         .num_ranks = (uint32_t)s->num_ranks};
}

static int num_experts_of(const step *s)
{
    return (STEP_EXPERTS + s->num_ranks - 1) / s->num_ranks * s->num_ranks;
}

/* The values are small enough that the sum of a row of 1,024 is exact. */
static float token_value(const step *s, int64_t token, int64_t i)
{
    return (float)((s->rank * 64 + token) % 1009 * 16 + i % 16);
}

static float *floats(int64_t count)
{
    return calloc((size_t)count + 1, sizeof(float));
}

static void choose_experts(step *s)
{
    for (int64_t i = 0; i < s->tokens * STEP_TOP_K; i++)
        s->topk_idx[i] =
            (int32_t)((i * 7 + s->rank * 5 + i % STEP_TOP_K * 11) % num_experts_of(s));
}

void step_open(step *s, epic_context *ctx, int64_t tokens, int64_t hidden)
{
    *s = (step){.ctx = ctx,
                .rank = epic_rank(ctx),
                .num_ranks = epic_num_ranks(ctx),
                .tokens = tokens,
                .hidden = hidden,
                .count = 3000,
                .layer = {.top_k = STEP_TOP_K, .alignment = 4}};
    const uint32_t experts = s->layer.num_experts = (uint32_t)num_experts_of(s);
    const epic_config sizes = sizes_of(s);
    epic_layer flat = s->layer; /* FLAT plans are larger; allocate for both */
    flat.layout = EPIC_FLAT;
    CHECK(epic_plan_bytes(&sizes, &flat, &s->plan_bytes) == EPIC_OK);
    CHECK(epic_capacity_bound(&sizes, &s->layer, &s->slots) == EPIC_OK);
    CHECK(s->plan_bytes > 0 && s->slots > 0);
    s->plan = aligned_alloc(64, (s->plan_bytes + 127) / 64 * 64);
    memset(s->plan, 0, s->plan_bytes);
    s->topk_idx = calloc((size_t)(tokens * STEP_TOP_K) + 1, sizeof *s->topk_idx);
    s->expert_rows = calloc(experts, sizeof *s->expert_rows);
    s->expert_tokens = calloc(experts, sizeof *s->expert_tokens);
    s->load = calloc(experts, sizeof *s->load);
    s->demand = calloc(1, sizeof *s->demand);
    float **const of_tokens[] = {&s->x, &s->out, &s->d_out, &s->d_tokens};
    float **const of_slots[] = {&s->recv, &s->d_rows};
    for (int i = 0; i < 4; i++) *of_tokens[i] = floats(tokens * hidden);
    for (int i = 0; i < 2; i++) *of_slots[i] = floats(s->slots * hidden);
    s->weights = floats(tokens * STEP_TOP_K);
    s->d_weights = floats(tokens * STEP_TOP_K);
    s->slot_weights = floats(s->slots * STEP_TOP_K);
    s->d_slot_weights = floats(s->slots * STEP_TOP_K);
    s->sum = floats(s->count);
    choose_experts(s);
    for (int64_t i = 0; i < tokens * hidden; i++) {
        s->x[i] = token_value(s, i / hidden, i % hidden);
        s->d_out[i] = 1;
    }
    for (int64_t i = 0; i < tokens * STEP_TOP_K; i++) s->weights[i] = 1;
}

void step_close(step *s)
{
    void *const arrays[] = {
        s->plan,    s->topk_idx,     s->expert_rows, s->expert_tokens,  s->load,   s->demand,
        s->x,       s->recv,         s->out,         s->d_out,          s->d_rows, s->d_tokens,
        s->weights, s->slot_weights, s->d_weights,   s->d_slot_weights, s->sum};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
}

/* ------------------------------------------------------------------------- arguments ---- */

static epic_rows of_tokens(const step *s, float *data)
{
    return (epic_rows){data, s->tokens, s->hidden * 4};
}

static epic_rows of_slots(const step *s, float *data)
{
    return (epic_rows){data, s->slots, s->hidden * 4};
}

epic_plan_args step_plan(step *s, uint64_t tag)
{
    return (epic_plan_args){.call.tag = tag,
                            .layer = &s->layer,
                            .plan = s->plan,
                            .plan_bytes = s->plan_bytes,
                            .topk_idx = s->topk_idx,
                            .num_tokens = s->tokens,
                            .capacity = s->slots,
                            .expert_rows = s->expert_rows,
                            .expert_tokens = s->expert_tokens,
                            .load = s->load,
                            .demand = s->demand};
}

epic_dispatch_args step_dispatch(step *s, uint64_t tag)
{
    return (epic_dispatch_args){.call.tag = tag,
                                .layer = &s->layer,
                                .plan = s->plan,
                                .plan_bytes = s->plan_bytes,
                                .tokens = epic_rows_as_const(of_tokens(s, s->x)),
                                .recv = of_slots(s, s->recv),
                                .weights = s->weights,
                                .slot_weights = s->slot_weights};
}

static bool is_flat(const step *s)
{
    return s->layer.layout == EPIC_FLAT;
}

epic_combine_args step_combine(step *s, uint64_t tag)
{
    return (epic_combine_args){.call.tag = tag,
                               .layer = &s->layer,
                               .plan = s->plan,
                               .plan_bytes = s->plan_bytes,
                               .rows = epic_rows_as_const(of_slots(s, s->recv)),
                               .out = of_tokens(s, s->out),
                               .slot_weights = is_flat(s) ? NULL : s->slot_weights,
                               .type = EPIC_F32};
}

epic_dispatch_backward_args step_dispatch_backward(step *s, uint64_t tag)
{
    return (epic_dispatch_backward_args){.call.tag = tag,
                                         .layer = &s->layer,
                                         .plan = s->plan,
                                         .plan_bytes = s->plan_bytes,
                                         .d_recv = epic_rows_as_const(of_slots(s, s->d_rows)),
                                         .d_tokens = of_tokens(s, s->d_tokens),
                                         .d_slot_weights = s->d_slot_weights,
                                         .d_weights = s->d_weights,
                                         .type = EPIC_F32};
}

epic_combine_backward_args step_combine_backward(step *s, uint64_t tag)
{
    return (epic_combine_backward_args){
        .call.tag = tag,
        .layer = &s->layer,
        .plan = s->plan,
        .plan_bytes = s->plan_bytes,
        .d_out = epic_rows_as_const(of_tokens(s, s->d_out)),
        .rows = epic_rows_as_const(is_flat(s) ? (epic_rows){0} : of_slots(s, s->recv)),
        .d_rows = of_slots(s, s->d_rows),
        .slot_weights = is_flat(s) ? NULL : s->slot_weights,
        .d_slot_weights = is_flat(s) ? NULL : s->d_slot_weights,
        .type = EPIC_F32};
}

epic_allreduce_sum_args step_sum(step *s, uint64_t tag)
{
    return (epic_allreduce_sum_args){.call.tag = tag, .data = s->sum, .count = s->count};
}

/* ------------------------------------------------------------------------------ calls ---- */

static epic_result call_plan(step *s, const epic_call *call, enum step_change change)
{
    epic_plan_args a = step_plan(s, 0);
    epic_layer layer = s->layer;
    a.call = *call;
    a.layer = &layer;
    if (change == STEP_OTHER_SHAPE) layer.top_k = 1;
    if (change == STEP_EMPTY) a.num_tokens = 0;
    return epic_plan(s->ctx, &a);
}

static epic_result call_dispatch(step *s, const epic_call *call, enum step_change change)
{
    epic_dispatch_args a = step_dispatch(s, 0);
    a.call = *call;
    if (change == STEP_OTHER_SHAPE) a.recv.row_bytes = a.tokens.row_bytes = s->hidden * 2;
    return epic_dispatch(s->ctx, &a);
}

static epic_result call_combine(step *s, const epic_call *call, enum step_change change)
{
    epic_combine_args a = step_combine(s, 0);
    a.call = *call;
    if (change == STEP_OTHER_SHAPE) a.rows.row_bytes = a.out.row_bytes = s->hidden * 2;
    return epic_combine(s->ctx, &a);
}

static epic_result call_dispatch_backward(step *s, const epic_call *call,
                                          enum step_change change)
{
    epic_dispatch_backward_args a = step_dispatch_backward(s, 0);
    a.call = *call;
    if (change == STEP_OTHER_SHAPE) a.d_slot_weights = a.d_weights = NULL;
    return epic_dispatch_backward(s->ctx, &a);
}

static epic_result call_combine_backward(step *s, const epic_call *call,
                                         enum step_change change)
{
    epic_combine_backward_args a = step_combine_backward(s, 0);
    a.call = *call;
    if (change == STEP_OTHER_SHAPE) a.type = EPIC_F64;
    return epic_combine_backward(s->ctx, &a);
}

static epic_result call_sum(step *s, const epic_call *call, enum step_change change)
{
    epic_allreduce_sum_args a = step_sum(s, 0);
    a.call = *call;
    if (change == STEP_OTHER_SHAPE) a.count--;
    return epic_allreduce_sum(s->ctx, &a);
}

epic_result step_call(step *s, uint32_t operation, const epic_call *call,
                      enum step_change change)
{
    switch (operation) {
    case EPIC_OP_PLAN:
        return call_plan(s, call, change);
    case EPIC_OP_DISPATCH:
        return call_dispatch(s, call, change);
    case EPIC_OP_COMBINE:
        return call_combine(s, call, change);
    case EPIC_OP_DISPATCH_BACKWARD:
        return call_dispatch_backward(s, call, change);
    case EPIC_OP_COMBINE_BACKWARD:
        return call_combine_backward(s, call, change);
    default:
        return call_sum(s, call, change);
    }
}

static bool call_one(step *s, uint32_t operation, uint64_t tag)
{
    const epic_call call = {.tag = tag};
    const epic_result result = step_call(s, operation, &call, STEP_SAME);
    return CHECK_SAY(result == EPIC_OK, "rank %d, operation %u: %s: %s", s->rank, operation,
                     epic_result_name(result), epic_error(s->ctx));
}

static bool right_values(const step *s)
{
    for (int64_t i = 0; i < s->tokens * s->hidden; i++)
        if (s->out[i] != STEP_TOP_K * s->x[i] || s->d_tokens[i] != STEP_TOP_K) return false;
    for (int64_t c = 0; c < s->tokens * STEP_TOP_K; c++) {
        float right = 0;
        for (int64_t i = 0; i < s->hidden; i++) right += s->x[c / STEP_TOP_K * s->hidden + i];
        if (s->d_weights[c] != right) return false;
    }
    for (int64_t i = 0; i < s->count; i++)
        if (s->sum[i] != (float)(s->num_ranks * (s->num_ranks + 1) / 2 + i * s->num_ranks))
            return false;
    return true;
}

bool step_all(step *s, uint64_t tag)
{
    for (int64_t i = 0; i < s->count; i++) s->sum[i] = (float)(s->rank + 1 + i);
    bool all = call_one(s, EPIC_OP_PLAN, tag) && call_one(s, EPIC_OP_DISPATCH, tag) &&
               call_one(s, EPIC_OP_COMBINE, tag) &&
               call_one(s, EPIC_OP_COMBINE_BACKWARD, tag) &&
               call_one(s, EPIC_OP_DISPATCH_BACKWARD, tag) && call_one(s, EPIC_OP_SUM, tag);
    return all && CHECK_SAY(right_values(s), "rank %d: a step gave wrong values", s->rank);
}

bool step_works(epic_context *ctx, uint64_t tag)
{
    step s;
    step_open(&s, ctx, 5 + epic_rank(ctx) % 32, 32);
    const bool right = step_all(&s, tag);
    step_close(&s);
    return right;
}
