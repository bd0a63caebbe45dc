/* SPDX-License-Identifier: Apache-2.0 */
/* What forward and backward, on hosts and on devices, have in common. */
#ifndef EPIC_MOE_STAGES_H
#define EPIC_MOE_STAGES_H

#include "exchange/op_header.h"
#include "moe/moe.h"

/* Damage of `saved`, for the first step to tell every rank (that of the plan in it the step finds
 * itself).  EPIC_EINVAL for another number of tokens. */
epic_result moe_check_saved(const moe_job *j, data_fault *fault);

/* What the shared expert has saved of block b. */
static inline void *moe_shared_saved(const moe_job *j, int64_t b)
{
    const int64_t block = j->moe.flags & EPIC_RECOMPUTE ? 0 : b;
    return (char *)j->saved.shared + block * j->shared_memory.saved_bytes;
}

/* Are the weights multiplied in combine?  Else the experts get them. */
static inline bool moe_is_weighted_late(const moe_job *j)
{
    return j->experts.weighting == EPIC_WEIGHT_LATE;
}

/* The plan of these choices [tokens, top_k], in what is saved. */
epic_plan_args moe_make_plan_args(const moe_job *j, const epic_moe_args *a,
                                  const int32_t *topk_idx);

/* The load of what the router chooses among. */
static inline const int32_t *moe_router_load(const moe_job *j)
{
    return j->layer.num_logical ? j->saved.logical_load : j->saved.load;
}

/* Wide layers carry their weights themselves: all that dispatch carries with a choice is a
 * float32.  That is then the choice's k, the weights of all of a token's choices travel beside its
 * row, and each slot takes the k-th.  The other way a slot's gradient is number k in a row of
 * zeros, and combine adds these rows.  f64_weights.c. */
void moe_attach_f64_weights(moe_job *j, epic_dispatch_args *how);
void moe_select_slot_weights(moe_job *j);
epic_result moe_combine_weight_gradients(moe_job *j);

/* The losses of a block, and their gradients, added to j->work.d_logits; losses.c. */
epic_result moe_losses_forward(const moe_job *j, const dense_block *block, void *balance,
                               void *z);
epic_result moe_losses_backward(const moe_job *j, const dense_block *block);

/* The context of what needs no peer: NULL on the host. */
static inline epic_context *moe_local_context(const moe_job *j)
{
    return j->is_device ? j->ctx : NULL;
}

/* Stages that hosts and devices run alike; stages.c. */
epic_result moe_run_experts(moe_job *j);
epic_result moe_combine(moe_job *j, const epic_rows *out);
epic_result moe_combine_backward(moe_job *j, const epic_rows *d_out, data_fault *fault);
/* What forward was told not to save; nothing to do if it did. */
epic_result moe_dispatch_again(moe_job *j);
epic_result moe_recompute_experts(moe_job *j);

epic_result moe_experts_backward(moe_job *j, const epic_moe_gradients *g, uint32_t flags);
epic_result moe_dispatch_backward(moe_job *j, const epic_rows *d_x);
epic_result moe_sum_dense(moe_job *j);

/* Gives up after peers have been called on: they get `result`'s sentence. */
epic_result moe_abort_call(moe_job *j, epic_result result);

#endif
