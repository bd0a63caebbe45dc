/* SPDX-License-Identifier: Apache-2.0 */
/* What both directions of the layer on a device have in common. */
#ifndef EPIC_MOE_DEVICE_H
#define EPIC_MOE_DEVICE_H

#include "api/api.h"
#include "moe/stages.h"

/* The gate of a block of tokens; the gradients are not asked for. */
epic_gate moe_device_gate_args(const moe_job *j, const dense_block *block, void *logits);

/* A block of tokens, as zero-experts and the shared expert's gate see it in forward. */
layer_tokens moe_device_token_args(const moe_job *j, const dense_block *block);

/* What the shared expert of a block is multiplied by, nothing to do if it is not gated; and this
 * with the expert itself, flags: 0, or EPIC_RECOMPUTE for what it saves alone. */
epic_result moe_device_shared_gate(moe_job *j, const dense_block *block);
epic_result moe_device_shared(moe_job *j, const dense_block *block, int64_t b, uint32_t flags);

/* The parts of forward and backward beside those that hosts have, too (call.h): gate and
 * router; plan and dispatch; what is no expert's of some rank, added to what has come home; what
 * is left of backward when the rows are home. */
epic_result moe_device_route(moe_job *j, const epic_moe_args *a);
epic_result moe_device_plan_dispatch(moe_job *j, const epic_moe_args *a);
epic_result moe_device_add_local_experts(moe_job *j, const epic_rows *out);
epic_result moe_device_dense_backward(moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g);

/* The whole of both directions; device_forward.c, device_backward.c. */
epic_result moe_device_forward(moe_job *j, const epic_moe_args *a);
epic_result moe_device_backward(moe_job *j, const epic_moe_backward_args *a,
                                const epic_moe_gradients *g);

/* A loss of a block of tokens, without what goes out. */
epic_loss moe_device_loss_args(const moe_job *j, const dense_block *block, double coeff);

/* As epic_balance_loss has it, but for the division by the tokens of all ranks, which the plan
 * counts on the device. */
double moe_device_balance_factor(const moe_job *j);

#endif
