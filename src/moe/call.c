/* SPDX-License-Identifier: Apache-2.0 */
/* Checking a call of the layer. */
#include "moe/call.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/sized.h"
#include "plan/plan.h"
#include "rules/convert.h"

epic_result moe_take_rows(const moe_job *j, const char *name, epic_rows *rows)
{
    if (!rows->data && !rows->num_rows && !rows->row_bytes) rows->row_bytes = j->row_bytes;
    if (rows->num_rows != j->x.num_rows)
        return epic_fail(EPIC_EINVAL,
                         "%s.num_rows is %lld, x.num_rows is %lld: make them equal", name,
                         (long long)rows->num_rows, (long long)j->x.num_rows);
    if (rows->row_bytes != j->row_bytes)
        return epic_fail(
            EPIC_EINVAL, "%s.row_bytes is %lld: hidden %lld of that type takes %lld", name,
            (long long)rows->row_bytes, (long long)j->hidden, (long long)j->row_bytes);
    if (!rows->data && rows->num_rows)
        return epic_fail(EPIC_EINVAL, "%s.data is NULL with %lld rows: memory is needed", name,
                         (long long)rows->num_rows);
    return EPIC_OK;
}

static epic_result check_memory(const char *name, const void *memory, int64_t bytes,
                                int64_t needed)
{
    if (!memory || (uintptr_t)memory % 64)
        return epic_fail(EPIC_EINVAL, "%s is at %p: an address that 64 divides is needed", name,
                         memory);
    if (bytes < needed)
        return epic_fail(EPIC_EINVAL, "%s_bytes is %lld: %lld are needed (epic_moe_memory)",
                         name, (long long)bytes, (long long)needed);
    return EPIC_OK;
}

static epic_result check_weight(const char *name, const void *weight, bool wanted)
{
    if (weight || !wanted) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "weights.%s is NULL: the layer needs it", name);
}

/* E4M3 has scales, other types have none. */
static epic_result check_scales(const char *name, const float *scales, bool scaled)
{
    if (!scales == !scaled) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     scaled
                         ? "weights.%s is NULL: weights of E4M3 need it"
                         : "weights.%s is given: only moe.experts.weight_type E4M3 has scales",
                     name);
}

/* Backward has weights of E4M3 if they come with scales.  What it has to make again wants them
 * turned. */
static epic_result take_scaled_back(moe_job *j)
{
    j->scaled_back = j->scaled && j->weights.w_gate_up_scales;
    if (!j->scaled_back || !(j->moe.flags & EPIC_RECOMPUTE)) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "weights.w_gate_up_scales is given, and moe.flags has "
                                  "EPIC_RECOMPUTE: that wants weights of moe.experts.row_type");
}

static epic_result check_weights(const moe_job *j, bool scaled)
{
    const epic_moe_weights *w = &j->weights;
    TRY(check_weight("w_gate", w->w_gate, true));
    TRY(check_weight("w_gate_up", w->w_gate_up, true));
    TRY(check_weight("w_down", w->w_down, true));
    TRY(check_scales("w_gate_up_scales", w->w_gate_up_scales, scaled));
    TRY(check_scales("w_down_scales", w->w_down_scales, scaled));
    TRY(check_weight("shared_gate_up", w->shared_gate_up, j->has_shared));
    TRY(check_weight("shared_down", w->shared_down, j->has_shared));
    if (w->w_shared_gate && !j->has_shared)
        return epic_fail(EPIC_EINVAL, "weights.w_shared_gate is given: it belongs to a shared "
                                      "expert, and moe.shared is NULL");
    return EPIC_OK;
}

/* How the rank's tokens are cut. */
static epic_result check_tokens(const moe_job *j, int64_t tokens)
{
    const int64_t sequence = j->moe.sequence_tokens;
    if (j->tokens != tokens)
        return epic_fail(
            EPIC_EINVAL,
            "x.num_rows is %lld: with EPIC_TREE a multiple of leaves / num_ranks = "
            "%lld is needed",
            (long long)tokens, (long long)j->blocks);
    if (j->moe.balance_coeff != 0 && sequence && j->block % sequence)
        return epic_fail(
            EPIC_EINVAL, "moe.sequence_tokens is %lld: it must divide the %lld tokens of %s",
            (long long)sequence, (long long)j->block,
            j->blocks > 1 ? "each block (x.num_rows * num_ranks / leaves)" : "x.num_rows");
    return EPIC_OK;
}

/* Which weights there are must be equal on all ranks and, where EPIC_CHECK_WEIGHTS asks for it, what
 * is in those that all ranks have.  On a device the host does not see that. */
static void set_weights(moe_job *j)
{
    const epic_moe_weights *w = &j->weights;
    const bool checked = j->ctx->checks_weights && !j->device;
    const int64_t gate = j->columns * j->real_bytes, hidden = j->hidden,
                  inner = j->shared.inner;
    const int64_t width = inner * (j->shared.ungated ? 1 : 2);
    const int64_t shared =
        convert_bytes(j->shared.weight_type ? j->shared.weight_type : j->experts.row_type);
    const struct {
        const void *data;
        int64_t bytes;
    } all[NUM_LAYER_WEIGHTS] = {
        [WEIGHT_W_GATE] = {w->w_gate, hidden * gate},
        [WEIGHT_B_GATE] = {w->b_gate, gate},
        [WEIGHT_BIAS] = {w->bias, j->columns * (int64_t)sizeof *w->bias},
        [WEIGHT_SCALE_OF_EXPERT] = {w->scale_of_expert, gate},
        [WEIGHT_SHARED_GATE_UP] = {w->shared_gate_up, hidden * width * shared},
        [WEIGHT_SHARED_DOWN] = {w->shared_down, inner * hidden * shared},
        [WEIGHT_SHARED_B_GATE_UP] = {w->shared_b_gate_up, width * shared},
        [WEIGHT_SHARED_B_DOWN] = {w->shared_b_down, hidden * shared},
        [WEIGHT_W_SHARED_GATE] = {w->w_shared_gate, hidden * j->real_bytes},
        [WEIGHT_B_GATE_UP] = {w->b_gate_up, 0},
        [WEIGHT_B_DOWN] = {w->b_down, 0}};
    uint32_t words[NUM_LAYER_WEIGHTS];
    for (int i = 0; i < NUM_LAYER_WEIGHTS; i++)
        words[i] = options_weight_word(all[i].data, all[i].bytes, checked && all[i].bytes > 0);
    options_set_weights(&j->options, checked, words);
}

epic_result moe_begin(moe_job *j, epic_context *ctx, const epic_call *call, const moe_call *c)
{
    if (!ctx) return epic_fail(EPIC_EINVAL, "ctx is NULL: a context from epic_open is needed");
    TRY(context_check(ctx));
    *j = (moe_job){
        .ctx = ctx, .call = *call, .x = *c->x, .device = ctx->backend->transport == NULL};
    TRY(READ_SIZED(&j->weights, c->weights, sizeof *c->weights, "weights"));
    if (c->x->num_rows < 0 || c->x->num_rows > ctx->config.max_tokens)
        return epic_fail(EPIC_EINVAL,
                         "x.num_rows is %lld: 0 to config.max_tokens %lld are possible",
                         (long long)c->x->num_rows, (long long)ctx->config.max_tokens);
    TRY(moe_read(j, &ctx->config, c->moe, sizeof *c->moe, c->x->num_rows));
    j->any_order = j->layer.sum_order == EPIC_BY_HOSTS; /* either has one block */
    layer_choose_order(&j->layer, ctx->num_ranks, context_relays(ctx, c->rank_of_expert));
    TRY(moe_take_rows(j, "x", c->x));
    TRY(moe_take_rows(j, c->y_name, c->y));
    j->x = *c->x;
    TRY(check_tokens(j, c->x->num_rows));
    if (j->scaled && !j->device)
        return epic_fail(EPIC_ENOTSUP,
                         "moe.experts.weight_type is E4M3: the layer of E4M3 wants "
                         "a CUDA context");
    if (c->backward) TRY(take_scaled_back(j));
    TRY(check_weights(j, c->backward ? j->scaled_back : j->scaled));
    if (j->weights.w_shared_gate) j->shared.weighting = EPIC_WEIGHT_EARLY;
    if (j->device) TRY(moe_device_ready(j));
    moe_cut(j, c->saved, c->workspace, c->backward);
    set_weights(j);
    TRY(check_memory("saved", c->saved, c->saved_bytes, j->saved_bytes));
    return check_memory("workspace", c->workspace, c->workspace_bytes, j->work_bytes);
}

dense_block moe_block(const moe_job *j, int64_t b)
{
    const int64_t first = b * j->block;
    return (dense_block){.job = j,
                         .x = moe_rows(j, &j->x, b),
                         .logits =
                             (const char *)j->saved.logits + first * j->columns * j->real_bytes,
                         .topk_idx = j->saved.topk_idx + first * j->top_k,
                         .weights = moe_real(j, j->saved.weights, first * j->top_k)};
}

epic_plan_args moe_plan_args(const moe_job *j, const epic_moe_args *a, const int32_t *topk_idx)
{
    return (epic_plan_args){.call = j->call,
                            .layer = &j->layer,
                            .plan = j->saved.plan,
                            .plan_bytes = j->plan_bytes,
                            .topk_idx = topk_idx,
                            .num_tokens = j->tokens,
                            .rank_of_expert = a->rank_of_expert,
                            .logical_of_expert = a->logical_of_expert,
                            .capacity = j->capacity,
                            .expert_rows = j->saved.expert_rows,
                            .expert_tokens = j->saved.expert_tokens,
                            .load = j->saved.load,
                            .logical_load = j->layer.num_logical ? j->saved.logical_load : NULL,
                            .demand = a->demand};
}

void moe_clear(const moe_job *j, const epic_rows *rows)
{
    if (j->tokens) memset(rows->data, 0, (size_t)(j->tokens * j->row_bytes));
}

epic_result moe_abandon(moe_job *j, epic_result result)
{
    char why[512];
    snprintf(why, sizeof why, "%s", epic_sentence());
    epic_abort(j->ctx, j->call.tag, why); /* does nothing to a group that is broken already */
    return epic_fail(result, "%s", why);
}
