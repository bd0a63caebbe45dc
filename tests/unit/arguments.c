/* SPDX-License-Identifier: Apache-2.0 */
/* Tests wrong arguments of the exchange. The result and the sentence name the argument and its
 * value, outputs stay unchanged, and the peers notice nothing. Then tests wrong data (class b),
 * which every rank reports. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"
#include "step.h"

#define TOKENS 6
#define HIDDEN 32
#define ROW (HIDDEN * 4)
#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* The argument structs of all calls. */
typedef struct calls {
    epic_layer layer;
    epic_plan_args plan;
    epic_dispatch_args dispatch;
    epic_combine_args combine;
    epic_dispatch_backward_args dispatch_backward;
    epic_combine_backward_args combine_backward;
    epic_allreduce_sum_args sum;
} calls;

enum which { PLAN, DISPATCH, BOTH, COMBINE, DISPATCH_BACKWARD, COMBINE_BACKWARD, SUM };

/* A field that a test sets to another value. */
typedef struct setting {
    size_t at, size;
    int64_t value;
} setting;

typedef struct wrong {
    enum which which;
    epic_result result;
    const char *name, *value; /* words that the error must contain */
    setting set[3];
} wrong;

static int32_t somewhere[4096];

#define SET(field, value)                                          \
    {                                                              \
        offsetof(calls, field), sizeof(((calls *)0)->field), value \
    }
#define BAD EPIC_EINVAL

/* In these calls rows have ROW bytes, and token arrays have TOKENS rows. */
static const wrong wrongs[] = {
    {PLAN, BAD, "layer", "NULL", {SET(plan.layer, 0)}},
    {PLAN, BAD, "num_experts", "0", {SET(layer.num_experts, 0)}},
    {PLAN, BAD, "num_experts", "65537", {SET(layer.num_experts, 65537)}},
    {PLAN, BAD, "num_experts", "23", {SET(layer.num_experts, 23)}},
    {PLAN, BAD, "top_k", "0", {SET(layer.top_k, 0)}},
    {PLAN, BAD, "top_k", "65", {SET(layer.top_k, 65)}},
    {PLAN, BAD, "alignment", "16777216", {SET(layer.alignment, 1 << 24)}},
    {PLAN, BAD, "layout", "2", {SET(layer.layout, 2)}},
    {PLAN, BAD, "overflow", "2", {SET(layer.overflow, 2)}},
    {PLAN, BAD, "expert_capacity", "5", {SET(layer.expert_capacity, 5)}},
    {PLAN, BAD, "priority", "2", {SET(layer.overflow, 1), SET(layer.priority, 2)}},
    {PLAN, BAD, "priority", "1", {SET(layer.priority, 1)}},
    {PLAN, BAD, "sum_order", "3", {SET(layer.sum_order, 3)}},
    {PLAN, BAD, "leaves", "8", {SET(layer.leaves, 8)}},
    {PLAN, BAD, "leaves", "2", {SET(layer.sum_order, 2), SET(layer.leaves, 2)}},
    {PLAN, BAD, "leaves", "3", {SET(layer.sum_order, 1), SET(layer.leaves, 3)}},
    {PLAN, BAD, "leaves", "16", {SET(layer.sum_order, 1), SET(layer.leaves, 16)}},
    {PLAN, BAD, "leaves", "1", {SET(layer.sum_order, 1), SET(layer.leaves, 1)}},
    {PLAN, BAD, "partial_type", "2", {SET(layer.partial_type, 2)}},
    {PLAN, BAD, "flags", "4", {SET(layer.flags, 4)}},
    {PLAN, BAD, "plan", "", {SET(plan.plan, 0)}},
    {PLAN, BAD, "plan", "16", {SET(plan.plan, 0x1008)}},
    {PLAN, BAD, "plan_bytes", "100", {SET(plan.plan_bytes, 100)}},
    {PLAN, BAD, "topk_idx", "NULL", {SET(plan.topk_idx, 0)}},
    {PLAN, BAD, "num_tokens", "-1", {SET(plan.num_tokens, -1)}},
    {PLAN, BAD, "num_tokens", "65", {SET(plan.num_tokens, STEP_MAX_TOKENS + 1)}},
    {PLAN, BAD, "index_type", "3", {SET(plan.index_type, 3)}},
    {PLAN, BAD, "capacity", "-1", {SET(plan.capacity, -1)}},
    {PLAN, BAD, "capacity", "1099511627776", {SET(plan.capacity, 1ll << 40)}},
    {PLAN, BAD, "flags", "1", {SET(plan.flags, 1)}},
    {PLAN, BAD, "topk_idx", "0x1002", {SET(plan.topk_idx, 0x1002)}},
    {PLAN,
     BAD,
     "topk_idx",
     "0x1004",
     {SET(plan.topk_idx, 0x1004), SET(plan.index_type, EPIC_I64)}},
    {PLAN, BAD, "rank_of_expert", "0x1001", {SET(plan.rank_of_expert, 0x1001)}},
    {PLAN, BAD, "capacity_limit", "0x1001", {SET(plan.capacity_limit, 0x1001)}},
    {PLAN, BAD, "load", "0x1001", {SET(plan.load, 0x1001)}},
    {PLAN, BAD, "expert_rows_i64", "0x1004", {SET(plan.expert_rows_i64, 0x1004)}},
    {PLAN, BAD, "expert_tokens_i64", "0x1004", {SET(plan.expert_tokens_i64, 0x1004)}},

    {DISPATCH, BAD, "layer", "NULL", {SET(dispatch.layer, 0)}},
    {DISPATCH, BAD, "layer.num_experts", "must be 24", {SET(layer.num_experts, 12)}},
    {DISPATCH, BAD, "layer.num_logical", "must be 0", {SET(layer.num_logical, 12)}},
    {DISPATCH, BAD, "layer.top_k", "must be 2", {SET(layer.top_k, 4)}},
    {DISPATCH, BAD, "layer.alignment", "must be 4", {SET(layer.alignment, 0)}},
    {DISPATCH, BAD, "layer.layout", "must be EPIC_EXPERT", {SET(layer.layout, EPIC_FLAT)}},
    {DISPATCH, BAD, "layer.overflow", "must be EPIC_OVER", {SET(layer.overflow, 1)}},
    {DISPATCH, BAD, "layer.partial_type", "must be 0", {SET(layer.partial_type, EPIC_F32)}},
    {DISPATCH, BAD, "layer.sum_order", "must be EPIC_BY_RANK", {SET(layer.sum_order, 1)}},
    {DISPATCH, BAD, "layer.flags", "must be 0", {SET(layer.flags, EPIC_DISTINCT)}},
    {DISPATCH, BAD, "top_k", "65", {SET(layer.top_k, 65)}},
    {DISPATCH, BAD, "plan", "", {SET(dispatch.plan, 0)}},
    {DISPATCH, BAD, "plan", "16", {SET(dispatch.plan, 0x1008)}},
    {DISPATCH, BAD, "tokens.num_rows", "-1", {SET(dispatch.tokens.num_rows, -1)}},
    {DISPATCH, BAD, "tokens.num_rows", "5", {SET(dispatch.tokens.num_rows, 5)}},
    {DISPATCH, BAD, "tokens.row_bytes", "0", {SET(dispatch.tokens.row_bytes, 0)}},
    {DISPATCH, BAD, "tokens.row_bytes", "9000", {SET(dispatch.tokens.row_bytes, 9000)}},
    {DISPATCH, BAD, "tokens.data", "NULL", {SET(dispatch.tokens.data, 0)}},
    {DISPATCH, BAD, "recv.num_rows", "-1", {SET(dispatch.recv.num_rows, -1)}},
    {DISPATCH, BAD, "recv.row_bytes", "64", {SET(dispatch.recv.row_bytes, 64)}},
    {DISPATCH, BAD, "recv.data", "NULL", {SET(dispatch.recv.data, 0)}},
    {DISPATCH, BAD, "weights", "NULL", {SET(dispatch.weights, 0)}},
    {DISPATCH, BAD, "slot_weights", "NULL", {SET(dispatch.slot_weights, 0)}},
    {DISPATCH, BAD, "recv_expert", "", {SET(dispatch.recv_expert, (intptr_t)somewhere)}},
    {DISPATCH, BAD, "quantize", "3", {SET(dispatch.quantize, 3), SET(dispatch.type, EPIC_F32)}},
    {DISPATCH, BAD, "type", "0", {SET(dispatch.quantize, 1)}},
    {DISPATCH, BAD, "type", "4", {SET(dispatch.quantize, 1), SET(dispatch.type, EPIC_F64)}},
    {DISPATCH,
     BAD,
     "recv.row_bytes",
     "128",
     {SET(dispatch.quantize, 1), SET(dispatch.type, EPIC_F32)}},
    {DISPATCH,
     BAD,
     "recv_scales.row_bytes",
     "0",
     {SET(dispatch.quantize, 1), SET(dispatch.type, EPIC_F32),
      SET(dispatch.recv.row_bytes, HIDDEN)}},
    {DISPATCH,
     BAD,
     "tokens.row_bytes",
     "126",
     {SET(dispatch.quantize, 1), SET(dispatch.type, EPIC_F32),
      SET(dispatch.tokens.row_bytes, 126)}},
    {DISPATCH,
     BAD,
     "scales",
     "",
     {SET(dispatch.quantize, 1), SET(dispatch.type, EPIC_F32),
      SET(dispatch.scales.row_bytes, 4)}},
    {DISPATCH, BAD, "scales", "", {SET(dispatch.scales.row_bytes, 4)}},
    {DISPATCH, BAD, "scales", "0", {SET(dispatch.recv_scales.row_bytes, 4)}},
    {DISPATCH,
     BAD,
     "scales.row_bytes",
     "4",
     {SET(dispatch.scales.row_bytes, 4), SET(dispatch.recv_scales.row_bytes, 8)}},
    {DISPATCH,
     BAD,
     "scales.num_rows",
     "0",
     {SET(dispatch.scales.row_bytes, 4), SET(dispatch.recv_scales.row_bytes, 4)}},
    {DISPATCH, BAD, "flags", "2", {SET(dispatch.flags, 2)}},
    {DISPATCH, BAD, "reserved", "1", {SET(dispatch.reserved, 1)}},
    {DISPATCH, BAD, "type", "99", {SET(dispatch.type, 99)}},
    {DISPATCH, BAD, "weights", "0x1002", {SET(dispatch.weights, 0x1002)}},
    {DISPATCH, BAD, "slot_weights", "0x1002", {SET(dispatch.slot_weights, 0x1002)}},

    {BOTH, BAD, "capacity", "EXACT", {SET(plan.capacity, 0)}},
    {BOTH, BAD, "top_k", "65", {SET(layer.top_k, 65)}},
    {BOTH, BAD, "num_tokens", "-1", {SET(plan.num_tokens, -1)}},
    {BOTH, BAD, "tokens.num_rows", "5", {SET(dispatch.tokens.num_rows, 5)}},
    {BOTH, BAD, "recv.num_rows", "3", {SET(dispatch.recv.num_rows, 3)}},
    {BOTH, BAD, "recv_expert", "", {SET(dispatch.recv_expert, (intptr_t)somewhere)}},
    {BOTH, BAD, "flags", "2", {SET(dispatch.flags, 2)}},
    {BOTH, BAD, "weights", "NULL", {SET(dispatch.weights, 0)}},
    {BOTH, BAD, "slot_weights", "NULL", {SET(dispatch.slot_weights, 0)}},

    {COMBINE, BAD, "layer", "NULL", {SET(combine.layer, 0)}},
    {COMBINE, BAD, "layer.top_k", "must be 2", {SET(layer.top_k, 4)}},
    {COMBINE, BAD, "layer.num_experts", "must be 24", {SET(layer.num_experts, 12)}},
    {COMBINE,
     BAD,
     "layer.layout",
     "must be EPIC_EXPERT",
     {SET(layer.layout, EPIC_FLAT), SET(combine.slot_weights, 0)}},
    {COMBINE, BAD, "layer.sum_order", "must be EPIC_BY_RANK", {SET(layer.sum_order, 1)}},
    {COMBINE, BAD, "plan", "", {SET(combine.plan, 0)}},
    {COMBINE, BAD, "plan", "16", {SET(combine.plan, 0x1008)}},
    {COMBINE, BAD, "type", "0", {SET(combine.type, 0)}},
    {COMBINE, BAD, "type", "5", {SET(combine.type, EPIC_E4M3)}},
    {COMBINE, BAD, "type", "99", {SET(combine.type, 99)}},
    {COMBINE, BAD, "rows.num_rows", "-1", {SET(combine.rows.num_rows, -1)}},
    {COMBINE, BAD, "rows.row_bytes", "64", {SET(combine.rows.row_bytes, 64)}},
    {COMBINE, BAD, "rows.data", "NULL", {SET(combine.rows.data, 0)}},
    {COMBINE, BAD, "out.num_rows", "5", {SET(combine.out.num_rows, 5)}},
    {COMBINE, BAD, "out.num_rows", "7", {SET(combine.out.num_rows, 7)}},
    {COMBINE, BAD, "out.data", "NULL", {SET(combine.out.data, 0)}},
    {COMBINE,
     BAD,
     "row_bytes",
     "126",
     {SET(combine.out.row_bytes, 126), SET(combine.rows.row_bytes, 126)}},
    {COMBINE,
     BAD,
     "row_bytes",
     "0",
     {SET(combine.out.row_bytes, 0), SET(combine.rows.row_bytes, 0)}},
    {COMBINE, BAD, "flags", "1", {SET(combine.flags, 1)}},
    {COMBINE, BAD, "rows", "0x1002", {SET(combine.rows.data, 0x1002)}},
    {COMBINE, BAD, "out", "0x1001", {SET(combine.out.data, 0x1001)}},
    {COMBINE, BAD, "slot_weights", "0x1002", {SET(combine.slot_weights, 0x1002)}},

    {DISPATCH_BACKWARD, BAD, "layer", "NULL", {SET(dispatch_backward.layer, 0)}},
    {DISPATCH_BACKWARD, BAD, "layer.top_k", "must be 2", {SET(layer.top_k, 4)}},
    {DISPATCH_BACKWARD, BAD, "layer.num_experts", "must be 24", {SET(layer.num_experts, 12)}},
    {DISPATCH_BACKWARD,
     BAD,
     "layer.layout",
     "must be EPIC_EXPERT",
     {SET(layer.layout, EPIC_FLAT)}},
    {DISPATCH_BACKWARD,
     BAD,
     "layer.sum_order",
     "must be EPIC_BY_RANK",
     {SET(layer.sum_order, 1)}},
    {DISPATCH_BACKWARD, BAD, "plan", "", {SET(dispatch_backward.plan, 0)}},
    {DISPATCH_BACKWARD, BAD, "type", "0", {SET(dispatch_backward.type, 0)}},
    {DISPATCH_BACKWARD,
     BAD,
     "d_recv.num_rows",
     "-1",
     {SET(dispatch_backward.d_recv.num_rows, -1)}},
    {DISPATCH_BACKWARD,
     BAD,
     "d_recv.row_bytes",
     "64",
     {SET(dispatch_backward.d_recv.row_bytes, 64)}},
    {DISPATCH_BACKWARD, BAD, "d_recv.data", "NULL", {SET(dispatch_backward.d_recv.data, 0)}},
    {DISPATCH_BACKWARD,
     BAD,
     "d_tokens.num_rows",
     "5",
     {SET(dispatch_backward.d_tokens.num_rows, 5)}},
    {DISPATCH_BACKWARD,
     BAD,
     "d_tokens.data",
     "NULL",
     {SET(dispatch_backward.d_tokens.data, 0)}},
    {DISPATCH_BACKWARD,
     BAD,
     "row_bytes",
     "126",
     {SET(dispatch_backward.d_tokens.row_bytes, 126),
      SET(dispatch_backward.d_recv.row_bytes, 126)}},
    {DISPATCH_BACKWARD,
     BAD,
     "d_slot_weights",
     "NULL",
     {SET(dispatch_backward.d_slot_weights, 0)}},
    {DISPATCH_BACKWARD, BAD, "d_weights", "NULL", {SET(dispatch_backward.d_weights, 0)}},
    {DISPATCH_BACKWARD, BAD, "flags", "1", {SET(dispatch_backward.flags, 1)}},

    {COMBINE_BACKWARD, BAD, "layer", "NULL", {SET(combine_backward.layer, 0)}},
    {COMBINE_BACKWARD, BAD, "layer.top_k", "must be 2", {SET(layer.top_k, 4)}},
    {COMBINE_BACKWARD, BAD, "layer.num_experts", "must be 24", {SET(layer.num_experts, 12)}},
    {COMBINE_BACKWARD, BAD, "layer.alignment", "must be 4", {SET(layer.alignment, 0)}},
    {COMBINE_BACKWARD,
     BAD,
     "layer.sum_order",
     "must be EPIC_BY_RANK",
     {SET(layer.sum_order, 1)}},
    {COMBINE_BACKWARD, BAD, "plan", "", {SET(combine_backward.plan, 0)}},
    {COMBINE_BACKWARD, BAD, "type", "6", {SET(combine_backward.type, EPIC_E8M0)}},
    {COMBINE_BACKWARD, BAD, "d_out.num_rows", "5", {SET(combine_backward.d_out.num_rows, 5)}},
    {COMBINE_BACKWARD, BAD, "d_out.data", "NULL", {SET(combine_backward.d_out.data, 0)}},
    {COMBINE_BACKWARD,
     BAD,
     "d_out.row_bytes",
     "126",
     {SET(combine_backward.d_out.row_bytes, 126)}},
    {COMBINE_BACKWARD, BAD, "rows.row_bytes", "64", {SET(combine_backward.rows.row_bytes, 64)}},
    {COMBINE_BACKWARD, BAD, "rows", "must be zero", {SET(combine_backward.d_slot_weights, 0)}},
    {COMBINE_BACKWARD, BAD, "rows.data", "NULL", {SET(combine_backward.rows.data, 0)}},
    {COMBINE_BACKWARD, BAD, "d_rows.data", "NULL", {SET(combine_backward.d_rows.data, 0)}},
    {COMBINE_BACKWARD,
     BAD,
     "d_rows.row_bytes",
     "64",
     {SET(combine_backward.d_rows.row_bytes, 64)}},
    {COMBINE_BACKWARD,
     BAD,
     "d_rows.num_rows",
     "-1",
     {SET(combine_backward.d_rows.num_rows, -1)}},
    {COMBINE_BACKWARD, BAD, "quantize", "3", {SET(combine_backward.quantize, 3)}},
    {COMBINE_BACKWARD, BAD, "d_rows.row_bytes", "128", {SET(combine_backward.quantize, 1)}},
    {COMBINE_BACKWARD,
     BAD,
     "d_rows_scales.row_bytes",
     "0",
     {SET(combine_backward.quantize, 2), SET(combine_backward.d_rows.row_bytes, HIDDEN)}},
    {COMBINE_BACKWARD,
     BAD,
     "d_rows_scales",
     "",
     {SET(combine_backward.d_rows_scales.row_bytes, 4)}},
    {COMBINE_BACKWARD, BAD, "flags", "2", {SET(combine_backward.flags, 2)}},
    {COMBINE_BACKWARD, BAD, "reserved", "1", {SET(combine_backward.reserved, 1)}},

    {SUM, BAD, "count", "-1", {SET(sum.count, -1)}},
    {SUM, BAD, "count", "4611686018427387904", {SET(sum.count, 1ll << 62)}},
    {SUM, BAD, "data", "NULL", {SET(sum.data, 0)}},
    {SUM, BAD, "data", "0x1002", {SET(sum.data, 0x1002)}},
    {SUM, BAD, "order", "2", {SET(sum.order, 2)}},
    {SUM, BAD, "flags", "1", {SET(sum.flags, 1)}},
};

/* ----------------------------------------------------------------------------- calls ---- */

static calls right_calls(step *s, uint64_t tag)
{
    return (calls){.layer = s->layer,
                   .plan = step_plan(s, tag),
                   .dispatch = step_dispatch(s, tag),
                   .combine = step_combine(s, tag),
                   .dispatch_backward = step_dispatch_backward(s, tag),
                   .combine_backward = step_combine_backward(s, tag),
                   .sum = step_sum(s, tag)};
}

static epic_result make_call(epic_context *ctx, enum which which, calls *c)
{
    const epic_layer **const layers[] = {&c->plan.layer, &c->dispatch.layer, &c->combine.layer,
                                         &c->dispatch_backward.layer,
                                         &c->combine_backward.layer};
    for (size_t i = 0; i < COUNT_OF(layers); i++)
        if (*layers[i]) *layers[i] = &c->layer;
    switch (which) {
    case PLAN:
        return epic_plan(ctx, &c->plan);
    case DISPATCH:
        return epic_dispatch(ctx, &c->dispatch);
    case BOTH:
        return epic_plan_dispatch(ctx, &c->plan, &c->dispatch);
    case COMBINE:
        return epic_combine(ctx, &c->combine);
    case DISPATCH_BACKWARD:
        return epic_dispatch_backward(ctx, &c->dispatch_backward);
    case COMBINE_BACKWARD:
        return epic_combine_backward(ctx, &c->combine_backward);
    default:
        return epic_allreduce_sum(ctx, &c->sum);
    }
}

static void spoil(calls *c, const wrong *w)
{
    for (int i = 0; i < 3; i++) {
        const setting *set = &w->set[i];
        if (set->size == 4)
            memcpy((char *)c + set->at, &(int32_t){(int32_t)set->value}, 4);
        else
            memcpy((char *)c + set->at, &set->value, set->size);
    }
}

/* --------------------------------------------------- arguments that the host can check ---- */

/* Returns a hash of all memory that a call could have written. */
static uint64_t outputs_of(const step *s)
{
    const struct {
        const void *data;
        int64_t bytes;
    } arrays[] = {{s->plan, (int64_t)s->plan_bytes},
                  {s->expert_rows, STEP_EXPERTS * 4},
                  {s->expert_tokens, STEP_EXPERTS * 4},
                  {s->load, STEP_EXPERTS * 4},
                  {s->demand, 4},
                  {s->recv, s->slots * ROW},
                  {s->slot_weights, s->slots * 4},
                  {s->out, TOKENS * ROW},
                  {s->d_rows, s->slots * ROW},
                  {s->d_slot_weights, s->slots * 4},
                  {s->d_tokens, TOKENS * ROW},
                  {s->d_weights, TOKENS * STEP_TOP_K * 4},
                  {s->sum, s->count * 4}};
    uint64_t digest = 0;
    for (size_t i = 0; i < COUNT_OF(arrays); i++)
        for (int64_t b = 0; b < arrays[i].bytes; b++)
            digest = digest * 1099511628211u + ((const unsigned char *)arrays[i].data)[b];
    return digest;
}

static void try_wrong(step *s, const wrong *w)
{
    calls c = right_calls(s, 1);
    spoil(&c, w);
    const uint64_t before = outputs_of(s);
    const epic_result result = make_call(s->ctx, w->which, &c);
    const char *said = epic_error(s->ctx);
    CHECK_SAY(result == w->result, "%s %s, call %d: %s instead of %s: %s", w->name, w->value,
              w->which, epic_result_name(result), epic_result_name(w->result), said);
    CHECK_SAY(strstr(said, w->name) && strstr(said, w->value),
              "the sentence does not name %s %s: %s", w->name, w->value, said);
    CHECK_SAY(outputs_of(s) == before, "%s %s: something was written", w->name, w->value);
}

/* Rank 0 makes wrong calls. Then all ranks make a correct call, which must still succeed. */
static void try_all(step *s)
{
    for (size_t i = 0; i < COUNT_OF(wrongs); i++) {
        check_seed = i;
        if (s->rank == 0) try_wrong(s, &wrongs[i]);
        calls c = right_calls(s, 1);
        const epic_result result = make_call(s->ctx, wrongs[i].which, &c);
        CHECK_SAY(result == EPIC_OK, "the right call after %s %s: %s: %s", wrongs[i].name,
                  wrongs[i].value, epic_result_name(result), epic_error(s->ctx));
        if (result != EPIC_OK) return;
    }
}

/* A longer struct is accepted only if the additional bytes are zero. sized.c tests the sizes
 * that are refused. */
static void try_sizes(step *s)
{
    struct {
        epic_allreduce_sum_args args;
        unsigned char more[32];
    } longer = {.args = step_sum(s, 1)};
    CHECK(epic_allreduce_sum_v1(s->ctx, &longer.args, sizeof longer) == EPIC_OK);
    longer.more[7] = 1;
    CHECK(epic_allreduce_sum_v1(s->ctx, &longer.args, sizeof longer) == EPIC_EINVAL);
    CHECK(epic_allreduce_sum_v1(s->ctx, &longer.args, 0) == EPIC_EINVAL);
    CHECK(epic_allreduce_sum(s->ctx, NULL) == EPIC_EINVAL);
    CHECK(epic_plan_v1(s->ctx, NULL, 8) == EPIC_EINVAL);
    CHECK(epic_dispatch_v1(s->ctx, NULL, 8) == EPIC_EINVAL);
    CHECK(epic_combine_v1(s->ctx, NULL, 8) == EPIC_EINVAL);
    CHECK(epic_dispatch_backward_v1(s->ctx, NULL, 8) == EPIC_EINVAL);
    CHECK(epic_combine_backward_v1(s->ctx, NULL, 8) == EPIC_EINVAL);
    CHECK(epic_plan_dispatch_v1(s->ctx, NULL, 8, NULL, 8) == EPIC_EINVAL);
}

static void try_flat(step *s)
{
    calls c = right_calls(s, 1);
    c.layer.layout = EPIC_FLAT;
    const epic_result result = make_call(s->ctx, PLAN, &c);
    CHECK_SAY(result == EPIC_OK, "a FLAT plan: %s", epic_error(s->ctx));
    CHECK(make_call(s->ctx, COMBINE, &c) == EPIC_EINVAL);
    CHECK(strstr(epic_error(s->ctx), "slot_weights") != NULL);
    CHECK(make_call(s->ctx, COMBINE_BACKWARD, &c) == EPIC_EINVAL);
    CHECK(strstr(epic_error(s->ctx), "slot_weights") != NULL);
    c.combine_backward.slot_weights = NULL;
    CHECK(make_call(s->ctx, COMBINE_BACKWARD, &c) == EPIC_EINVAL);
    CHECK(strstr(epic_error(s->ctx), "d_slot_weights") != NULL);
}

/* ------------------------------------------------------------------ data that is wrong ---- */

static bool all_zero(const void *data, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++)
        if (((const unsigned char *)data)[i]) return false;
    return true;
}

static void poison(step *s)
{
    memset(s->recv, 0xab, (size_t)(s->slots * ROW));
    memset(s->slot_weights, 0xab, (size_t)s->slots * 4);
    memset(s->out, 0xab, TOKENS * ROW);
    memset(s->expert_rows, 0xab, STEP_EXPERTS * 4);
    memset(s->expert_tokens, 0xab, STEP_EXPERTS * 4);
}

/* The plan failed on every rank, so calls that use it move nothing and return zeros. */
static void check_moves_nothing(step *s)
{
    calls c = right_calls(s, 1);
    epic_plan_info info;
    const int64_t local = STEP_EXPERTS / s->num_ranks;
    CHECK(all_zero(s->expert_rows, local * 4) && all_zero(s->expert_tokens, local * 4));
    CHECK(epic_plan_read(s->plan, s->plan_bytes, &info) == EPIC_OK);
    CHECK(info.result != EPIC_OK && info.num_slots == 0);
    CHECK(make_call(s->ctx, DISPATCH, &c) == EPIC_OK);
    CHECK(all_zero(s->recv, s->slots * ROW) && all_zero(s->slot_weights, s->slots * 4));
    CHECK(make_call(s->ctx, COMBINE, &c) == EPIC_OK);
    CHECK(all_zero(s->out, TOKENS * ROW));
    CHECK(make_call(s->ctx, COMBINE_BACKWARD, &c) == EPIC_OK);
    CHECK(make_call(s->ctx, DISPATCH_BACKWARD, &c) == EPIC_OK);
    CHECK(epic_check(s->ctx) == EPIC_OK);
}

static void check_error(step *s, epic_result result, epic_result expected, const char *said[5])
{
    const char *sentence = epic_error(s->ctx);
    CHECK_SAY(result == expected, "rank %d: %s instead of %s: %s", s->rank,
              epic_result_name(result), epic_result_name(expected), sentence);
    for (int i = 0; i < 5 && said[i]; i++)
        CHECK_SAY(strstr(sentence, said[i]) != NULL, "rank %d: no \"%s\" in: %s", s->rank,
                  said[i], sentence);
}

static void bad_expert(step *s, int victim, int64_t value, enum which which)
{
    int64_t wide[TOKENS * STEP_TOP_K];
    for (int i = 0; i < TOKENS * STEP_TOP_K; i++) wide[i] = s->topk_idx[i];
    if (s->rank == victim) wide[3 * STEP_TOP_K + 1] = value;
    calls c = right_calls(s, 1);
    c.plan.topk_idx = wide;
    c.plan.index_type = EPIC_I64;
    char number[32], rank[32];
    snprintf(number, sizeof number, "%lld", (long long)value);
    snprintf(rank, sizeof rank, "rank %d", victim);
    poison(s);
    const char *said[5] = {"topk_idx", rank, "token 3", "k 1", number};
    check_error(s, make_call(s->ctx, which, &c), EPIC_EINVAL, said);
    if (which == BOTH) CHECK(all_zero(s->recv, s->slots * ROW));
    check_moves_nothing(s);
}

static void overflow(step *s, int victim)
{
    calls c = right_calls(s, 1);
    if (s->rank == victim) c.plan.capacity = 3;
    char rank[32];
    snprintf(rank, sizeof rank, "rank %d", victim);
    poison(s);
    const char *said[5] = {"capacity", rank, "3 slots"};
    check_error(s, make_call(s->ctx, PLAN, &c), EPIC_EOVERFLOW, said);
    CHECK(*s->demand > 3 || s->rank != victim);
    check_moves_nothing(s);
}

static void bad_placement(step *s, int victim)
{
    int32_t table[STEP_EXPERTS];
    for (int e = 0; e < STEP_EXPERTS; e++) table[e] = e % s->num_ranks;
    if (s->rank == victim) table[9] = s->num_ranks;
    calls c = right_calls(s, 1);
    c.plan.rank_of_expert = table;
    poison(s);
    const char *said[5] = {"rank_of_expert", "expert 9"};
    check_error(s, make_call(s->ctx, PLAN, &c), EPIC_EINVAL, said);
    check_moves_nothing(s);
    if (s->rank == victim) table[9] = -1;
    check_error(s, make_call(s->ctx, PLAN, &c), EPIC_EINVAL, said);
}

/* One rank uses a plan of rank 0, or bytes that are not a plan. */
static void bad_plan(step *s)
{
    calls c = right_calls(s, 1);
    CHECK(make_call(s->ctx, PLAN, &c) == EPIC_OK);
    unsigned char *zeros = aligned_alloc(64, (s->plan_bytes + 63) / 64 * 64);
    memset(zeros, 0, s->plan_bytes);
    for (int which = COMBINE; which <= COMBINE_BACKWARD; which++) {
        calls d = right_calls(s, 1);
        if (s->rank == s->num_ranks - 1)
            d.combine.plan = d.dispatch_backward.plan = d.combine_backward.plan = zeros;
        char rank[32];
        snprintf(rank, sizeof rank, "rank %d", s->num_ranks - 1);
        const char *said[5] = {"plan", rank};
        check_error(s, make_call(s->ctx, (enum which)which, &d), EPIC_EINVAL, said);
    }
    CHECK(all_zero(s->out, TOKENS * ROW) && all_zero(s->d_tokens, TOKENS * ROW));
    CHECK(all_zero(s->d_rows, s->slots * ROW));
    free(zeros);
}

static void try_data(step *s)
{
    for (int victim = 0; victim < s->num_ranks; victim++) {
        bad_expert(s, victim, STEP_EXPERTS, PLAN);
        bad_expert(s, victim, 1ll << 40, PLAN);
        bad_expert(s, victim, INT64_MAX, BOTH);
        overflow(s, victim);
        bad_placement(s, victim);
        CHECK(step_all(s, 1));
    }
    bad_plan(s);
    CHECK(step_all(s, 1));
}

static void ranks(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 20000};
    epic_context *ctx;
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    step s;
    step_open(&s, ctx, TOKENS, HIDDEN);
    CHECK(step_all(&s, 1));
    if (bootstrap->num_ranks == 2) try_all(&s);
    if (epic_check(ctx) == EPIC_OK) try_sizes(&s);
    if (epic_check(ctx) == EPIC_OK) try_flat(&s);
    if (epic_check(ctx) == EPIC_OK) try_data(&s);
    step_close(&s);
    CHECK(epic_check(ctx) == EPIC_OK);
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(200);
    run_threads(1, ranks, NULL);
    run_threads(2, ranks, NULL);
    run_threads(3, ranks, NULL);
    return check_end();
}
