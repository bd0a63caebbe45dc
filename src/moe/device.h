/* SPDX-License-Identifier: Apache-2.0 */
/* The layer on a device: device_forward.c and device_backward.c, and what they share
 * (device.c). Every function enqueues work on the stream of the call and returns. The host
 * reads no number of it. */
#ifndef EPIC_MOE_DEVICE_H
#define EPIC_MOE_DEVICE_H

#include "api/api.h"
#include "moe/stages.h"

/* Returns the arguments of the gate's kernels for a block, without gradients. `logits`:
 * [block, columns], written by forward, gradient of the logits in backward. */
epic_gate_args moe_device_gate_args(const moe_job *j, const dense_block *block, void *logits);

/* Returns the arguments of the kernels for zero-experts and the shared expert's gate. */
layer_tokens moe_device_token_args(const moe_job *j, const dense_block *block);

/* Computes the gate value of the shared expert on a block. Does nothing if it has no gate. */
epic_result moe_device_shared_gate(moe_job *j, const dense_block *block);
/* Computes the gate value of the shared expert and the expert itself on block b, into
 * work.shared_y. `flags`: 0, or EPIC_RECOMPUTE to compute only what backward reads. */
epic_result moe_device_shared(moe_job *j, const dense_block *block, int64_t b, uint32_t flags);

/* Runs the gate and the router on all tokens. */
epic_result moe_device_route(moe_job *j, const epic_moe_args *a);
/* Makes the plan and dispatches the rows. Collective. */
epic_result moe_device_plan_dispatch(moe_job *j, const epic_moe_args *a);
/* Adds the zero-experts' and the shared expert's parts to the combined rows `out`. */
epic_result moe_device_add_local_experts(moe_job *j, const epic_rows *out);
/* Runs what is left of backward after dispatch backward: the gradients of the router, the
 * losses, the shared expert and the gate, and their sum over blocks and ranks. */
epic_result moe_device_dense_backward(moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g);

/* Runs epic_moe_forward on checked arguments. Collective. */
epic_result moe_device_forward(moe_job *j, const epic_moe_args *a);
/* Runs epic_moe_backward on checked arguments. Collective. */
epic_result moe_device_backward(moe_job *j, const epic_moe_backward_args *a,
                                const epic_moe_gradients *g);

/* Returns the arguments of a loss of a block, without outputs and gradients. */
epic_loss_args moe_device_loss_args(const moe_job *j, const dense_block *block, double coeff);

/* Returns the factor of the balance loss without the division by the tokens of all ranks,
 * which only the plan in device memory knows. router/losses.c has the formula. */
double moe_device_balance_factor(const moe_job *j);

#endif
