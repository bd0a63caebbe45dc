/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the losses of a block of tokens on the host, with public calls of the router. */
#include "base/error.h"
#include "moe/stages.h"

epic_result moe_losses_forward(const moe_job *j, const token_block *block, void *balance,
                               void *z)
{
    const epic_balance_loss_args balance_args = {.router = &j->router,
                                                 .logits = block->logits,
                                                 .num_tokens = block->tokens,
                                                 .total_tokens = *j->saved.total_tokens,
                                                 .sequence_tokens = j->moe.sequence_tokens,
                                                 .load = moe_router_load(j),
                                                 .topk_idx = block->topk_idx,
                                                 .coeff = j->moe.balance_coeff,
                                                 .workspace = j->work.router,
                                                 .workspace_bytes = j->router_bytes,
                                                 .loss = balance,
                                                 .type = j->real_type,
                                                 .loss_type = j->real_type};
    const epic_z_loss_args z_args = {.router = &j->router,
                                     .logits = block->logits,
                                     .num_tokens = block->tokens,
                                     .total_tokens = *j->saved.total_tokens,
                                     .coeff = j->moe.z_coeff,
                                     .workspace = j->work.router,
                                     .workspace_bytes = j->router_bytes,
                                     .loss = z,
                                     .type = j->real_type,
                                     .loss_type = j->real_type};
    if (balance_args.coeff != 0) TRY(epic_balance_loss_forward(NULL, &balance_args));
    return z_args.coeff != 0 ? epic_z_loss_forward(NULL, &z_args) : EPIC_OK;
}

/* Calls the backward function of each loss. Passes the loss's coefficient times the incoming
 * gradient of the loss (j->d_balance, j->d_z). */
epic_result moe_losses_backward(const moe_job *j, const token_block *block)
{
    const epic_balance_loss_backward_args balance = {.router = &j->router,
                                                     .logits = block->logits,
                                                     .num_tokens = block->tokens,
                                                     .total_tokens = *j->saved.total_tokens,
                                                     .sequence_tokens = j->moe.sequence_tokens,
                                                     .load = moe_router_load(j),
                                                     .topk_idx = block->topk_idx,
                                                     .coeff =
                                                         j->moe.balance_coeff * j->d_balance,
                                                     .workspace = j->work.router,
                                                     .workspace_bytes = j->router_bytes,
                                                     .d_logits = j->work.d_logits,
                                                     .type = j->real_type,
                                                     .flags = EPIC_ACCUMULATE};
    const epic_z_loss_backward_args z = {.router = &j->router,
                                         .logits = block->logits,
                                         .num_tokens = block->tokens,
                                         .total_tokens = *j->saved.total_tokens,
                                         .coeff = j->moe.z_coeff * j->d_z,
                                         .workspace = j->work.router,
                                         .workspace_bytes = j->router_bytes,
                                         .d_logits = j->work.d_logits,
                                         .type = j->real_type,
                                         .flags = EPIC_ACCUMULATE};
    if (balance.coeff != 0) TRY(epic_balance_loss_backward(NULL, &balance));
    return z.coeff != 0 ? epic_z_loss_backward(NULL, &z) : EPIC_OK;
}
