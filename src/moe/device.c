/* SPDX-License-Identifier: Apache-2.0 */
/* The parts that forward and backward of the layer on a device have in common: the arguments of
 * the kernels for one block of tokens, and the shared expert. */
#include "moe/device.h"

#include "base/error.h"
#include "experts/config.h"

epic_gate_args moe_device_gate_args(const moe_job *j, const token_block *block, void *logits)
{
    return (epic_gate_args){.stream = j->call.stream,
                            .x = block->x.data,
                            .tokens = block->x.num_rows,
                            .hidden = j->hidden,
                            .columns = j->columns,
                            .block = j->block,
                            .deciding_tokens = j->deciding_tokens,
                            .w_gate = j->weights.w_gate,
                            .b_gate = j->weights.b_gate,
                            .logits = logits,
                            .workspace = j->work.gate,
                            .is_invariant = j->is_invariant,
                            .row_type = j->experts.row_type};
}

layer_tokens moe_device_token_args(const moe_job *j, const token_block *block)
{
    return (layer_tokens){.num_tokens = block->x.num_rows,
                          .hidden = j->hidden,
                          .top_k = j->top_k,
                          .num_experts = (int32_t)j->router.num_experts,
                          .num_columns = (int32_t)j->columns,
                          .row_type = j->experts.row_type,
                          .x = block->x.data,
                          .topk_idx = j->router.zero_experts ? block->topk_idx : NULL,
                          .weights = block->weights,
                          .w_shared_gate = j->weights.w_shared_gate,
                          .shared_weights = j->work.shared_weights};
}

epic_loss_args moe_device_loss_args(const moe_job *j, const token_block *block, double coeff)
{
    return (epic_loss_args){.router = &j->router,
                            .logits = block->logits,
                            .num_tokens = block->x.num_rows,
                            .plan = j->saved.plan,
                            .sequence_tokens = j->moe.sequence_tokens,
                            .load = moe_router_load(j),
                            .topk_idx = block->topk_idx,
                            .coeff = coeff,
                            .workspace = j->work.router,
                            .workspace_bytes = j->router_bytes,
                            .type = EPIC_F32,
                            .loss_type = EPIC_F32,
                            .grad_type = EPIC_F32,
                            .stream = j->call.stream};
}

double moe_device_balance_factor(const moe_job *j)
{
    const int64_t sequence = j->moe.sequence_tokens;
    return j->router.num_experts * j->moe.balance_coeff / j->router.top_k /
           (sequence ? (double)sequence : 1.0);
}

epic_result moe_device_shared_gate(moe_job *j, const token_block *block)
{
    const layer_tokens tokens = moe_device_token_args(j, block);
    if (!tokens.w_shared_gate) return EPIC_OK;
    return CONTEXT_OP(j->ctx, shared_gate_forward, j->call.stream, &tokens);
}

epic_result moe_device_shared(moe_job *j, const token_block *block, int64_t b, uint32_t flags)
{
    experts_job shared = {0};
    TRY(experts_read_config(&shared, &j->shared, sizeof j->shared));
    const epic_experts_args how = {.call = j->call,
                                   .experts = &shared.experts,
                                   .x = block->x.data,
                                   .num_slots = block->tokens,
                                   .slot_weights =
                                       j->weights.w_shared_gate ? j->work.shared_weights : NULL,
                                   .w_gate_up = j->weights.shared_gate_up,
                                   .w_down = j->weights.shared_down,
                                   .b_gate_up = j->weights.shared_b_gate_up,
                                   .b_down = j->weights.shared_b_down,
                                   .saved = moe_shared_saved(j, b),
                                   .saved_bytes = j->shared_memory.saved_bytes,
                                   .workspace = j->work.shared,
                                   .workspace_bytes = j->shared_memory.forward_bytes,
                                   .y = j->work.shared_y,
                                   .flags = flags};
    TRY(moe_device_shared_gate(j, block));
    return CONTEXT_OP(j->ctx, experts_forward, &how);
}
