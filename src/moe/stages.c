/* SPDX-License-Identifier: Apache-2.0 */
/* The stages of the layer that are the same on the host and on a device: the collective
 * operations, and the experts. host_*.c and device_*.c call these functions. */
#include "moe/stages.h"

#include <stdio.h>
#include <string.h>

#include "api/api.h"
#include "base/error.h"
#include "host_ops/host_ops.h"

epic_plan_args moe_make_plan_args(const moe_job *j, const epic_moe_args *a,
                                  const int32_t *topk_idx)
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
                            .demand = a->demand,
                            .capacity_limit = a->capacity_limit};
}

uint32_t moe_padding_flag(const moe_job *j)
{
    return j->is_device ? EPIC_LEAVE_PADDING : 0;
}

/* Calls epic_experts_forward for all slots. Computes work.y or, with `recompute`, only the data
 * that backward reads, with weights of type row_type. */
static epic_result call_experts(moe_job *j, bool recompute)
{
    const bool scaled = j->is_e4m3 && !recompute;
    epic_experts experts = j->experts;
    if (scaled) experts.weight_type = EPIC_E4M3;
    const epic_experts_args how = {
        .call = j->call,
        .experts = &experts,
        .x = j->saved.recv,
        .x_scales = scaled ? j->work.recv_scales : NULL,
        .num_slots = j->capacity,
        .expert_rows = j->saved.expert_rows,
        .expert_tokens = j->saved.expert_tokens,
        .slot_weights = moe_is_weighted_late(j) ? NULL : j->saved.slot_weights,
        .w_gate_up = j->weights.w_gate_up,
        .w_down = j->weights.w_down,
        .w_gate_up_scales = j->weights.w_gate_up_scales,
        .w_down_scales = j->weights.w_down_scales,
        .b_gate_up = j->weights.b_gate_up,
        .b_down = j->weights.b_down,
        .saved = j->saved.experts,
        .saved_bytes = j->experts_memory.saved_bytes,
        .workspace = j->work.experts,
        .workspace_bytes =
            recompute ? j->experts_memory.backward_bytes : j->experts_memory.forward_bytes,
        .y = j->work.y,
        .flags = moe_padding_flag(j) | (recompute ? EPIC_RECOMPUTE : 0),
        .weights_type = j->real_type};
    return epic_experts_forward(moe_local_context(j), &how);
}

epic_result moe_run_experts(moe_job *j)
{
    return call_experts(j, false);
}

epic_result moe_recompute_experts(moe_job *j)
{
    return j->moe.flags & EPIC_RECOMPUTE ? call_experts(j, true) : EPIC_OK;
}

epic_result moe_combine(moe_job *j, const epic_rows *out)
{
    const epic_combine_args how = {.call = j->call,
                                   .layer = j->moe.layer,
                                   .plan = j->saved.plan,
                                   .plan_bytes = j->plan_bytes,
                                   .rows = {j->work.y, j->capacity, j->row_bytes},
                                   .out = *out,
                                   .slot_weights =
                                       moe_is_weighted_late(j) ? j->saved.slot_weights : NULL,
                                   .type = j->experts.row_type};
    return epic_combine(j->ctx, &how);
}

/* Sends d_out without multiplying it by the weights, even if combine multiplied by weights in
 * forward. The backward of combine would need the outputs of the experts to compute the
 * gradients of the weights, and forward does not save these outputs. So moe_experts_backward()
 * multiplies by the weights, and computes the gradients of the weights from the activations. */
epic_result moe_combine_backward(moe_job *j, const epic_const_rows *d_out, data_fault *fault)
{
    const epic_rows slots = {j->work.d_y, j->capacity, j->row_bytes};
    const epic_combine_backward_args how = {.call = j->call,
                                            .layer = j->moe.layer,
                                            .plan = j->saved.plan,
                                            .plan_bytes = j->plan_bytes,
                                            .d_out = *d_out,
                                            .d_rows = slots,
                                            .flags = moe_padding_flag(j),
                                            .type = j->experts.row_type};
    const op_header_extra extra = {fault, &j->options};
    return api_combine_backward(j->ctx, &how, &extra);
}

epic_result moe_dispatch_again(moe_job *j)
{
    const epic_dispatch_args how = {.call = j->call,
                                    .layer = j->moe.layer,
                                    .plan = j->saved.plan,
                                    .plan_bytes = j->plan_bytes,
                                    .tokens = j->x,
                                    .recv = {j->saved.recv, j->capacity, j->row_bytes},
                                    .flags = moe_padding_flag(j)};
    return j->moe.flags & EPIC_DISPATCH_AGAIN ? epic_dispatch(j->ctx, &how) : EPIC_OK;
}

epic_result moe_experts_backward(moe_job *j, const epic_moe_gradients *g, uint32_t flags)
{
    epic_experts experts = j->experts;
    if (moe_is_weighted_late(j)) experts.weighting = EPIC_WEIGHT_EARLY;
    if (j->is_e4m3_backward) experts.weight_type = EPIC_E4M3;
    const epic_experts_backward_args how = {.call = j->call,
                                            .experts = &experts,
                                            .x = j->saved.recv,
                                            .num_slots = j->capacity,
                                            .expert_rows = j->saved.expert_rows,
                                            .expert_tokens = j->saved.expert_tokens,
                                            .slot_weights = j->saved.slot_weights,
                                            .w_gate_up = j->weights.w_gate_up,
                                            .w_down = j->weights.w_down,
                                            .w_gate_up_scales = j->weights.w_gate_up_scales,
                                            .w_down_scales = j->weights.w_down_scales,
                                            .b_gate_up = j->weights.b_gate_up,
                                            .b_down = j->weights.b_down,
                                            .saved = j->saved.experts,
                                            .saved_bytes = j->experts_memory.saved_bytes,
                                            .workspace = j->work.experts,
                                            .workspace_bytes = j->experts_memory.backward_bytes,
                                            .d_y = j->work.d_y,
                                            .d_x = j->work.d_recv,
                                            .d_w_gate_up = g->w_gate_up,
                                            .d_w_down = g->w_down,
                                            .d_b_gate_up = g->b_gate_up,
                                            .d_b_down = g->b_down,
                                            .d_slot_weights = j->work.d_slot_weights,
                                            .flags = flags | moe_padding_flag(j),
                                            .weights_type = j->real_type,
                                            .grad_type = j->grad_type};
    return epic_experts_backward(moe_local_context(j), &how);
}

/* Runs epic_dispatch_backward. A rank whose caller does not want d_x takes part too, because
 * its peers wait for its rows. Such a rank writes d_x to work.d_y. */
epic_result moe_dispatch_backward(moe_job *j, const epic_rows *d_x)
{
    const epic_rows spare = {j->work.d_y, j->tokens, j->row_bytes};
    const epic_dispatch_backward_args how = {
        .call = j->call,
        .layer = j->moe.layer,
        .plan = j->saved.plan,
        .plan_bytes = j->plan_bytes,
        .d_recv = {j->work.d_recv, j->capacity, j->row_bytes},
        .d_tokens = d_x->data ? *d_x : spare,
        .d_slot_weights = j->is_f64 ? NULL : j->work.d_slot_weights,
        .d_weights = j->is_f64 ? NULL : j->work.d_weights,
        .type = j->experts.row_type};
    /* comes before epic_dispatch_backward, because both use work.d_y */
    if (j->is_f64) TRY(moe_combine_weight_gradients(j));
    return epic_dispatch_backward(j->ctx, &how);
}

epic_result moe_sum_over_ranks(moe_job *j, void *data, int64_t count)
{
    const epic_allreduce_sum_args sum = {
        .call = j->call, .data = data, .count = count, .order = j->layer.sum_order};
    return j->is_f64 ? host_sum_of_type(j->ctx, &sum, EPIC_F64)
                     : epic_allreduce_sum(j->ctx, &sum);
}

epic_result moe_sum_dense(moe_job *j)
{
    if (!(j->moe.flags & EPIC_SUM_DENSE)) return EPIC_OK;
    return moe_sum_over_ranks(j, j->work.dense_grads, j->num_dense_grads);
}

epic_result moe_abort_call(moe_job *j, epic_result result)
{
    char why[512];
    snprintf(why, sizeof why, "%s", epic_sentence());
    epic_abort(j->ctx, j->call.tag, why); /* no effect if the context has already failed */
    return epic_fail(result, "%s", why);
}
