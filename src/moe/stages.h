/* SPDX-License-Identifier: Apache-2.0 */
/* Declares the parts of the layer that forward and backward, or the host and the device
 * path, share. Each call moves the rows of the whole call unless it names a block. Functions
 * that send return an error that is the same on every rank. */
#ifndef EPIC_MOE_STAGES_H
#define EPIC_MOE_STAGES_H

#include "exchange/op_header.h"
#include "moe/moe.h"

/* Checks on the host that `saved` still holds what forward left, and stores the first damage
 * found in *fault. The caller passes *fault to the next collective call, which reports it on
 * every rank. That call checks the plan inside `saved` itself. Returns EPIC_EINVAL if x has
 * another number of tokens than in forward. */
epic_result moe_check_saved(const moe_job *j, data_fault *fault);

/* Returns the memory in which the shared expert saves block b. */
static inline void *moe_shared_saved(const moe_job *j, int64_t b)
{
    const int64_t block = j->moe.flags & EPIC_RECOMPUTE ? 0 : b;
    return (char *)j->saved.shared + block * j->shared_memory.saved_bytes;
}

/* Does combine multiply rows by their weights? Otherwise the experts do. */
static inline bool moe_is_weighted_late(const moe_job *j)
{
    return j->experts.weighting == EPIC_WEIGHT_LATE;
}

/* Returns the arguments of epic_plan for these choices [tokens, top_k]. The plan and its
 * counts go to j->saved. */
epic_plan_args moe_make_plan_args(const moe_job *j, const epic_moe_args *a,
                                  const int32_t *topk_idx);

/* Returns the number of choices of each expert that the router sees: logical experts if the
 * layer has replicas. Used by the balance loss. */
static inline const int32_t *moe_router_load(const moe_job *j)
{
    return j->layer.num_logical ? j->saved.logical_load : j->saved.load;
}

/* Weights of float64 layers (f64_weights.c). Dispatch carries only one float32 with a
 * choice. A float64 layer therefore sends k, the position of the choice in its token's
 * top_k, as that number, and all top_k weights of the token as scales next to its row. Each
 * slot then picks its k-th weight. For gradients, each slot sends a row of top_k zeros with
 * its gradient at position k, and combine adds the rows of a token.
 *
 * moe_attach_f64_weights() adds these arrays to the arguments of dispatch. */
void moe_attach_f64_weights(moe_job *j, epic_dispatch_args *how);
/* Fills saved.slot_weights after dispatch. */
void moe_select_slot_weights(moe_job *j);
/* Sends work.d_slot_weights to the tokens' ranks, into work.d_weights. Collective. */
epic_result moe_combine_weight_gradients(moe_job *j);

/* Compute the losses of a block into *balance and *z (reals). Host only. */
epic_result moe_losses_forward(const moe_job *j, const dense_block *block, void *balance,
                               void *z);
/* Adds the gradients of both losses of a block to j->work.d_logits, on the host. */
epic_result moe_losses_backward(const moe_job *j, const dense_block *block);

/* Returns the context for calls that involve no peer: NULL on the host. */
static inline epic_context *moe_local_context(const moe_job *j)
{
    return j->is_device ? j->ctx : NULL;
}

/* Runs the local experts on the received rows, from saved.recv to work.y. No peer is
 * involved. */
epic_result moe_run_experts(moe_job *j);
/* Sends the experts' rows back and sums them into `out` [tokens, hidden]. Collective. */
epic_result moe_combine(moe_job *j, const epic_rows *out);
/* Sends d_out to the slots of its tokens, into work.d_y. Collective. *fault (NULL: none):
 * damage that this rank found, reported on every rank. */
epic_result moe_combine_backward(moe_job *j, const epic_const_rows *d_out, data_fault *fault);
/* Dispatches x again if forward did not save the received rows (EPIC_DISPATCH_AGAIN).
 * Collective. */
epic_result moe_dispatch_again(moe_job *j);
/* Runs the first product of the experts again if forward did not save it (EPIC_RECOMPUTE). */
epic_result moe_recompute_experts(moe_job *j);

/* Runs the experts' backward: from work.d_y to work.d_recv, work.d_slot_weights and the
 * weight gradients in `g`. `flags`: 0 or EPIC_ACCUMULATE. */
epic_result moe_experts_backward(moe_job *j, const epic_moe_gradients *g, uint32_t flags);
/* Sends work.d_recv back and sums it into d_x [tokens, hidden], and the slots' weight
 * gradients into work.d_weights. Collective, also if d_x->data is NULL because this rank
 * does not want d_x. */
epic_result moe_dispatch_backward(moe_job *j, const epic_rows *d_x);
/* Sums work.dense over the ranks if the layer has EPIC_SUM_DENSE. Collective. */
epic_result moe_sum_dense(moe_job *j);

/* Aborts the context after a local error, because peers already wait for this rank. They get
 * the sentence of this error. Returns `result`. */
epic_result moe_abort_call(moe_job *j, epic_result result);

#endif
