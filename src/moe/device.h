/* SPDX-License-Identifier: Apache-2.0 */
/* The layer on a device: forward (device_forward.c), backward (device_backward.c) and their
 * common parts (device.c). Every function except moe_device_plan() launches kernels on the
 * stream of the call and does not wait for them. A collective function must be called on all
 * ranks. */
#ifndef EPIC_MOE_DEVICE_H
#define EPIC_MOE_DEVICE_H

#include "api/api.h"
#include "moe/stages.h"

/* Returns the arguments of the gate's kernels for one block of tokens, without the arrays for
 * gradients. `logits` [block, columns] is an output in forward, and the gradient of the logits
 * in backward. */
epic_gate_args moe_device_gate_args(const moe_job *j, const token_block *block, void *logits);

/* Returns the arguments of the kernels for zero-experts and the gate of the shared expert. */
layer_tokens moe_device_token_args(const moe_job *j, const token_block *block);

/* Computes the gate of the shared expert for one block. Does nothing if the shared expert has
 * no gate. */
epic_result moe_device_shared_gate(moe_job *j, const token_block *block);
/* Computes the gate of the shared expert for block b, and writes the output of the shared
 * expert to work.shared_y. With EPIC_RECOMPUTE, computes only the data that backward reads. */
epic_result moe_device_shared(moe_job *j, const token_block *block, int64_t b, uint32_t flags);

/* Runs gate and router on all tokens: writes logits, topk_idx and weights to j->saved. */
epic_result moe_device_route(moe_job *j, const epic_moe_args *a);
/* Makes the plan, unless epic_moe_plan has made it (EPIC_PLANNED), and dispatches the rows.
 * Copies to the caller's arrays how many choices each expert has. Collective. */
epic_result moe_device_plan_dispatch(moe_job *j, const epic_moe_args *a);
/* Adds the outputs of the zero-experts and of the shared expert to the combined rows `out`. */
epic_result moe_device_add_local_experts(moe_job *j, const epic_rows *out);
/* Runs the second half of backward, after the gradient rows have returned to their tokens.
 * Computes the gradients of the router, the losses, the shared expert and the gate. Sums the
 * gradients of the shared expert and the gate over the blocks and, with EPIC_SUM_DENSE, over
 * the ranks. */
epic_result moe_device_dense_backward(moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g);

/* Implements epic_moe_plan: waits for the plan, and sets *slots to the number of slots of this
 * rank. Collective. */
epic_result moe_device_plan(moe_job *j, const epic_moe_args *a, int64_t *slots);
epic_result moe_device_forward(moe_job *j, const epic_moe_args *a);
epic_result moe_device_backward(moe_job *j, const epic_moe_backward_args *a,
                                const epic_moe_gradients *g);

/* Returns the arguments for a loss of one block. The addresses of the results are not set. */
epic_loss_args moe_device_loss_args(const moe_job *j, const token_block *block, double coeff);

/* Returns the factor of the balance loss (formula: router/losses.c) before the division by the
 * number of tokens of all ranks. The division is left to the kernel, because only the plan in
 * device memory contains that number. */
double moe_device_balance_factor(const moe_job *j);

#endif
