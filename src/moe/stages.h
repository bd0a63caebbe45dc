/* SPDX-License-Identifier: Apache-2.0 */
/* Stages of the layer that several files use: forward and backward, or the host and a device. A
 * function handles all tokens of this rank, unless it has a parameter for a block. A collective
 * function must be called on all ranks, and returns the same error on all ranks. Functions that
 * are not collective do not communicate. */
#ifndef EPIC_MOE_STAGES_H
#define EPIC_MOE_STAGES_H

#include "exchange/op_header.h"
#include "moe/moe.h"

/* Checks on the host that `saved` still contains the data that forward wrote. Stores the first
 * error in *fault and returns EPIC_OK. The caller passes *fault to the next collective
 * operation, so that every rank returns the error. That operation also checks the plan in
 * `saved`. Returns EPIC_EINVAL only if the number of tokens in x differs from the number in
 * forward. */
epic_result moe_check_saved(const moe_job *j, data_fault *fault);

/* Returns the memory in which the shared expert's forward saves what backward needs for block
 * b. With EPIC_RECOMPUTE all blocks use the same memory. */
static inline void *moe_shared_saved(const moe_job *j, int64_t b)
{
    const int64_t block = j->moe.flags & EPIC_RECOMPUTE ? 0 : b;
    return (char *)j->saved.shared + block * j->shared_memory.saved_bytes;
}

/* Returns true if combine multiplies the rows by their weights, and false if the experts do. */
static inline bool moe_is_weighted_late(const moe_job *j)
{
    return j->experts.weighting == EPIC_WEIGHT_LATE;
}

/* Returns the arguments of epic_plan for the expert ids topk_idx [tokens, top_k]. They make
 * epic_plan write the plan and its counts to j->saved. */
epic_plan_args moe_make_plan_args(const moe_job *j, const epic_moe_args *a,
                                  const int32_t *topk_idx);

/* Returns the number of choices of each expert, for the balance loss. In a layer with replicas,
 * these are the choices of each logical expert, because the router chooses among logical
 * experts. */
static inline const int32_t *moe_router_load(const moe_job *j)
{
    return j->layer.num_logical ? j->saved.logical_load : j->saved.load;
}

/* Returns EPIC_LEAVE_PADDING or 0, as a flag for operations and experts. On a device no stage
 * of the layer reads padding slots. On the host the experts multiply whole slabs, so padding
 * slots must be zero. */
uint32_t moe_padding_flag(const moe_job *j);

/* Weights of float64 layers (f64_weights.c).
 *
 * Dispatch sends one float32 with each choice, usually its weight, and optional scales with
 * each row. In a float64 layer the float32 is k, the index of the choice among the token's
 * top_k choices, and the scales are the token's top_k float64 weights. The receiver selects
 * weight k for each slot. For the gradients of the weights, the receiver makes a row of top_k
 * elements for each slot, with the gradient at index k and zeros elsewhere. Combine adds these
 * rows for each token.
 *
 * moe_attach_f64_weights() sets the arrays for k and for the weights in *how, the arguments of
 * dispatch. */
void moe_attach_f64_weights(moe_job *j, epic_dispatch_args *how);
/* Writes the weight of each slot to saved.slot_weights. Called after dispatch. */
void moe_select_slot_weights(moe_job *j);
/* Sends the gradients in work.d_slot_weights to the ranks that own the tokens. Those ranks
 * write the gradients to their work.d_weights. Collective. */
epic_result moe_combine_weight_gradients(moe_job *j);

/* Computes the losses of one block on the host, and writes them as reals to *balance and *z.
 * Does not compute a loss whose coefficient is 0. */
epic_result moe_losses_forward(const moe_job *j, const token_block *block, void *balance,
                               void *z);
/* Adds the gradients of the balance loss and of the z-loss of one block to j->work.d_logits, on
 * the host. */
epic_result moe_losses_backward(const moe_job *j, const token_block *block);

/* Returns the context to pass to calls that do not communicate, such as epic_experts_forward.
 * It is NULL if the layer runs on the host. */
static inline epic_context *moe_local_context(const moe_job *j)
{
    return j->is_device ? j->ctx : NULL;
}

/* Runs the local experts on the rows in saved.recv. Writes their outputs to work.y. Local. */
epic_result moe_run_experts(moe_job *j);
/* Sends the rows in work.y back to the ranks of their tokens, and writes each token's sum to
 * `out`. Collective. */
epic_result moe_combine(moe_job *j, const epic_rows *out);
/* Sends each token's row of d_out to its slots, in work.d_y. *fault (may be NULL) is an error
 * in this rank's data, which all ranks return. Collective. */
epic_result moe_combine_backward(moe_job *j, const epic_const_rows *d_out, data_fault *fault);
/* With EPIC_DISPATCH_AGAIN, dispatches x again, because forward did not save the received rows.
 * Does nothing without this flag. Collective. */
epic_result moe_dispatch_again(moe_job *j);
/* With EPIC_RECOMPUTE, computes the first GEMM of the experts again, because forward did not
 * save its result. Does nothing without this flag. Local. */
epic_result moe_recompute_experts(moe_job *j);

/* Runs the experts' backward. Reads work.d_y, and writes work.d_recv, work.d_slot_weights and
 * the weight gradients in `g`. flags is 0 or EPIC_ACCUMULATE. */
epic_result moe_experts_backward(moe_job *j, const epic_moe_gradients *g, uint32_t flags);
/* Sends the rows in work.d_recv back to the ranks of their tokens, and writes each token's sum
 * to d_x [tokens, hidden]. The home rank of a token stores the gradients of the slots' weights
 * in its work.d_weights. Collective: called even if the caller does not want d_x (d_x->data is
 * NULL). */
epic_result moe_dispatch_backward(moe_job *j, const epic_rows *d_x);
/* All-reduces reals over the ranks, in place and in the order of the layer. Collective. */
epic_result moe_sum_over_ranks(moe_job *j, void *data, int64_t count);
/* With EPIC_SUM_DENSE, all-reduces work.dense_grads over the ranks. Does nothing without this
 * flag. Collective. */
epic_result moe_sum_dense(moe_job *j);

/* Called after an error that only this rank has, when its peers already wait for it. Aborts the
 * context, so that the peers return an error with the same text. Returns `result`. */
epic_result moe_abort_call(moe_job *j, epic_result result);

#endif
