/* SPDX-License-Identifier: Apache-2.0 */
/* Runs epic_moe_backward on the host: the stages of forward in reverse order.
 *
 * 1. Combine backward sends d_out to the slots.
 * 2. The experts' backward computes weight gradients, and the gradient of each slot's row.
 * 3. Dispatch backward sums the gradients of the rows into d_x.
 * 4. For each block of tokens, the gradients of the router, the losses, the shared expert and
 *   the gate are added.
 * 5. The gradients of the gate and the shared expert are summed over the blocks in a binary
 *   tree and, with EPIC_SUM_DENSE, over the ranks. */
#include <string.h>

#include "base/error.h"
#include "moe/host.h"

/* State of one call of backward. `fault` is an error that this rank has found in `saved`, and
 * that all ranks must return. */
typedef struct backward_call {
    const epic_moe_backward_args *args;
    epic_moe_gradients gradients;
    data_fault fault;
} backward_call;

/* Computes work.d_logits of one block: the sum of the gradients that come from the weights of
 * its choices and from its losses. If is_forced is true, uses only the losses, because forced
 * weights do not depend on the logits. Adds the block's gradient of scale_of_expert to
 * `dense_grads`. */
static epic_result router_backward(moe_job *j, const token_block *block, const void *d_weights,
                                   void *dense_grads, bool is_forced)
{
    if (is_forced) {
        memset(j->work.d_logits, 0, (size_t)(block->tokens * j->columns * j->real_bytes));
        return moe_losses_backward(j, block);
    }
    const void *scale = j->weights.scale_of_expert;
    void *d_scale = moe_real_at(j, dense_grads, moe_dense_grad_offsets(j).scale);
    const epic_router_backward_args how = {.router = &j->router,
                                           .logits = block->logits,
                                           .num_tokens = block->tokens,
                                           .topk_idx = block->topk_idx,
                                           .scale_of_expert = scale,
                                           .d_weights = d_weights,
                                           .workspace = j->work.router,
                                           .workspace_bytes = j->router_bytes,
                                           .d_logits = j->work.d_logits,
                                           .d_scale_of_expert = scale ? d_scale : NULL,
                                           .type = j->real_type,
                                           .weights_type = j->real_type};
    TRY(epic_router_backward(NULL, &how));
    return moe_losses_backward(j, block);
}

/* Runs the backward of the shared expert on one block. If d_x is not NULL, writes the shared
 * expert's part of the gradient of x to d_x. */
static epic_result shared_expert_backward(moe_job *j, int64_t b, const token_block *block,
                                          const epic_const_rows *d_out, void *d_x,
                                          void *dense_grads)
{
    const dense_grad_offsets parts = moe_dense_grad_offsets(j);
    const int32_t rows = (int32_t)block->tokens;
    const epic_moe_weights *w = &j->weights;
    const bool gated = w->w_shared_gate != NULL;
    if (j->moe.flags & EPIC_RECOMPUTE)
        TRY(moe_host_shared_expert(j, b, EPIC_RECOMPUTE));
    else if (gated)
        moe_dense_ops(j)->shared_gate_forward(block, j->work.shared_weights);
    const epic_experts_backward_args how = {
        .experts = &j->shared,
        .x = block->x.data,
        .num_slots = block->tokens,
        .expert_rows = &rows,
        .w_gate_up = w->shared_gate_up,
        .w_down = w->shared_down,
        .b_gate_up = w->shared_b_gate_up,
        .b_down = w->shared_b_down,
        .saved = moe_shared_saved(j, b),
        .saved_bytes = j->shared_memory.saved_bytes,
        .workspace = j->work.shared,
        .workspace_bytes = j->shared_memory.backward_bytes,
        .d_y = d_out->data,
        .d_x = d_x,
        .d_w_gate_up = moe_real_at(j, dense_grads, parts.gate_up),
        .d_w_down = moe_real_at(j, dense_grads, parts.down),
        .d_b_gate_up = moe_real_at(j, dense_grads, parts.b_gate_up),
        .d_b_down = moe_real_at(j, dense_grads, parts.b_down),
        .slot_weights = gated ? j->work.shared_weights : NULL,
        .d_slot_weights = gated ? j->work.d_shared_weights : NULL,
        .weights_type = j->real_type};
    return epic_experts_backward(NULL, &how);
}

/* Writes block b's gradients of the gate and the shared expert to `dense_grads`. Adds the parts
 * of d_x that come from the gate, the zero-experts and the shared expert. d_x already contains
 * the part that comes from the dispatched rows. */
static epic_result block_backward(moe_job *j, const backward_call *c, int64_t b,
                                  void *dense_grads)
{
    memset(dense_grads, 0, (size_t)(j->num_dense_grads * j->real_bytes));
    const token_block block = moe_get_block(j, b);
    if (!block.tokens) return EPIC_OK;
    const epic_const_rows d_out = moe_block_rows(j, &c->args->d_out, b);
    const bool wanted = c->args->d_x.data != NULL;
    const epic_rows d_x = wanted ? moe_block_out_rows(j, &c->args->d_x, b) : (epic_rows){0};
    void *d_shared = wanted && j->has_shared ? j->work.shared_y : NULL;
    void *d_weights = moe_real_at(j, j->work.d_weights, block.first * j->top_k);
    moe_dense_ops(j)->zero_expert_d_weights(&block, &d_out, d_weights);
    TRY(router_backward(j, &block, d_weights, dense_grads,
                        c->args->flags & EPIC_FORCED_WEIGHTS));
    if (j->has_shared) TRY(shared_expert_backward(j, b, &block, &d_out, d_shared, dense_grads));
    moe_dense_ops(j)->gate_backward(&block, j->work.d_logits, &d_out, d_shared,
                                    wanted ? &d_x : NULL, dense_grads);
    return EPIC_OK;
}

/* Computes the gradients of the gate and the shared expert for `count` blocks, starting at
 * block `first`. Adds the gradients in a binary tree, and writes the sum to row `level` of
 * work.dense_grads. May overwrite the rows after this row. */
static epic_result blocks_backward(moe_job *j, const backward_call *c, int64_t first,
                                   int64_t count, int64_t level)
{
    void *here = moe_real_at(j, j->work.dense_grads, level * j->num_dense_grads);
    if (count == 1) return block_backward(j, c, first, here);
    TRY(blocks_backward(j, c, first, count / 2, level));
    TRY(blocks_backward(j, c, first + count / 2, count - count / 2, level + 1));
    moe_dense_ops(j)->add_reals(
        here, moe_real_at(j, j->work.dense_grads, (level + 1) * j->num_dense_grads),
        j->num_dense_grads);
    return EPIC_OK;
}

/* Copies elements [begin, end) of the summed gradients to the caller's array `to`. With
 * EPIC_ACCUMULATE, adds the elements to `to`. Does nothing if `to` is NULL. */
static void store_gradient(const moe_job *j, const backward_call *c, void *to, int64_t begin,
                           int64_t end)
{
    const void *from = moe_real_at(j, j->work.dense_grads, begin);
    if (!to) return;
    if (c->args->flags & EPIC_ACCUMULATE)
        moe_dense_ops(j)->add_reals(to, from, end - begin);
    else
        memcpy(to, from, (size_t)((end - begin) * j->real_bytes));
}

static void store_dense_gradients(const moe_job *j, const backward_call *c)
{
    const dense_grad_offsets p = moe_dense_grad_offsets(j);
    const epic_moe_gradients *g = &c->gradients;
    store_gradient(j, c, g->w_gate, p.w_gate, p.b_gate);
    store_gradient(j, c, g->b_gate, p.b_gate, p.scale);
    store_gradient(j, c, g->scale_of_expert, p.scale, p.gate_padding);
    store_gradient(j, c, g->shared_gate_up, p.gate_up, p.down);
    store_gradient(j, c, g->shared_down, p.down, p.b_gate_up);
    store_gradient(j, c, g->shared_b_gate_up, p.b_gate_up, p.b_down);
    store_gradient(j, c, g->shared_b_down, p.b_down, p.w_shared_gate);
    store_gradient(j, c, g->w_shared_gate, p.w_shared_gate, p.shared_padding);
}

/* Copies the gradients of forced weights (topk_weights_in) to the caller's array, if the caller
 * has passed it. */
static void store_d_weights(const moe_job *j, const backward_call *c)
{
    void *to = c->args->d_topk_weights_in;
    if (to && j->tokens)
        memcpy(to, j->work.d_weights, (size_t)(j->tokens * j->top_k * j->real_bytes));
}

/* Zeroes all gradients, after an error that every rank returns. With EPIC_ACCUMULATE, zeroes
 * only d_x and the gradients of forced weights, because the other arrays contain sums of
 * earlier calls. */
static void zero_gradients(const moe_job *j, const backward_call *c)
{
    const epic_moe_gradients *g = &c->gradients;
    const int64_t local = j->experts.num_local_experts, inner = j->experts.inner;
    const int64_t width = inner * (j->experts.ungated ? 1 : 2);
    const struct {
        void *gradient;
        int64_t numbers;
    } expert_gradients[] = {{g->w_gate_up, local * j->hidden * width},
                            {g->w_down, local * inner * j->hidden},
                            {g->b_gate_up, local * width},
                            {g->b_down, local * j->hidden}};
    if (c->args->d_x.data) moe_zero_rows(j, &c->args->d_x);
    if (c->args->d_topk_weights_in && j->tokens)
        memset(c->args->d_topk_weights_in, 0, (size_t)(j->tokens * j->top_k * j->real_bytes));
    if (c->args->flags & EPIC_ACCUMULATE) return;
    for (size_t i = 0; i < sizeof expert_gradients / sizeof *expert_gradients; i++)
        if (expert_gradients[i].gradient)
            memset(expert_gradients[i].gradient, 0,
                   (size_t)(expert_gradients[i].numbers * j->real_bytes));
    memset(j->work.dense_grads, 0, (size_t)(j->num_dense_grads * j->real_bytes));
    store_dense_gradients(j, c);
}

/* Runs all stages. An error of combine backward or of the repeated dispatch is returned on
 * every rank. A later error may occur on this rank alone, and then this rank aborts the
 * context. */
static epic_result run_backward(moe_job *j, backward_call *c)
{
    epic_result result = moe_combine_backward(j, &c->args->d_out, &c->fault);
    if (result == EPIC_OK) result = moe_dispatch_again(j);
    if (result != EPIC_OK) zero_gradients(j, c);
    TRY(result);
    result = moe_recompute_experts(j);
    if (result == EPIC_OK)
        result = moe_experts_backward(j, &c->gradients, c->args->flags & EPIC_ACCUMULATE);
    if (result != EPIC_OK) return moe_abort_call(j, result);
    TRY(moe_dispatch_backward(j, &c->args->d_x));
    result = blocks_backward(j, c, 0, j->blocks, 0);
    if (result != EPIC_OK) return moe_abort_call(j, result);
    TRY(moe_sum_dense(j));
    store_dense_gradients(j, c);
    store_d_weights(j, c);
    return EPIC_OK;
}

/* Returns *number as a double. `type` is EPIC_F64, EPIC_F32 or 0 (also float32). Returns `none`
 * if `number` is NULL. */
static double read_number_or(const void *number, uint32_t type, double none)
{
    if (!number) return none;
    return type == EPIC_F64 ? *(const double *)number : (double)*(const float *)number;
}

epic_result moe_host_backward(moe_job *j, const epic_moe_backward_args *a,
                              const epic_moe_gradients *g)
{
    backward_call call = {.args = a, .gradients = *g};
    const double d_loss = read_number_or(a->d_loss, a->loss_type, 1);
    j->d_balance = d_loss + read_number_or(a->d_balance_loss, a->loss_type, 0);
    j->d_z = d_loss + read_number_or(a->d_z_loss, a->loss_type, 0);
    TRY(moe_check_saved(j, &call.fault));
    return run_backward(j, &call);
}
