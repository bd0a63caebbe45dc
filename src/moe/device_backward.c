/* SPDX-License-Identifier: Apache-2.0 */
/* Runs epic_moe_backward on a device. The stages are those of host_backward.c. Each stage
 * launches kernels on the caller's stream. */
#include "base/error.h"
#include "experts/config.h"
#include "moe/device.h"

/* Device addresses to which kernels write the gradients of the gate and the shared expert. A
 * gradient whose address is NULL is not computed. `flags` is 0 or EPIC_ACCUMULATE. */
typedef struct gradient_addresses {
    float *w_gate, *b_gate, *scale, *gate_up, *down, *b_gate_up, *b_down, *w_shared_gate;
    uint32_t flags;
} gradient_addresses;

/* Returns true if the gradients of the gate and the shared expert are first written to
 * work.dense_grads, because they are then summed over blocks or ranks. Otherwise kernels write
 * them directly to the caller's arrays. */
static bool is_dense_staged(const moe_job *j)
{
    return j->num_dense_levels > 0;
}

/* Returns the addresses of the caller's arrays. */
static gradient_addresses caller_targets(const epic_moe_gradients *g, uint32_t flags)
{
    return (gradient_addresses){g->w_gate,         g->b_gate,        g->scale_of_expert,
                                g->shared_gate_up, g->shared_down,   g->shared_b_gate_up,
                                g->shared_b_down,  g->w_shared_gate, flags};
}

/* One gradient in a row of work.dense_grads: where it is, the caller's array for it, and whether
 * kernels compute it. */
typedef struct dense_part {
    float *to; /* NULL: the caller does not want the gradient */
    int64_t begin, end;
    bool is_computed;
} dense_part;

enum { DENSE_PARTS = 8 };

/* Lists the gradients in a row of work.dense_grads, in the order of dense_grad_offsets. Without
 * EPIC_SUM_DENSE, a gradient that the caller does not want is not computed. With it, other
 * ranks may want it. */
static void list_dense_parts(const moe_job *j, const epic_moe_gradients *g,
                             dense_part parts[DENSE_PARTS])
{
    const dense_grad_offsets p = moe_dense_grad_offsets(j);
    const bool all = j->moe.flags & EPIC_SUM_DENSE;
    const dense_part list[DENSE_PARTS] = {
        {g->w_gate, p.w_gate, p.b_gate, true},
        {g->b_gate, p.b_gate, p.scale, true},
        {g->scale_of_expert, p.scale, p.gate_up, j->weights.scale_of_expert != NULL},
        {g->shared_gate_up, p.gate_up, p.down, true},
        {g->shared_down, p.down, p.b_gate_up, true},
        {g->shared_b_gate_up, p.b_gate_up, p.b_down, true},
        {g->shared_b_down, p.b_down, p.w_shared_gate, true},
        {g->w_shared_gate, p.w_shared_gate, p.end, j->weights.w_shared_gate != NULL}};
    for (int i = 0; i < DENSE_PARTS; i++) {
        parts[i] = list[i];
        parts[i].is_computed = list[i].is_computed && (all || list[i].to);
    }
}

/* Sets those gradients in `dense_grads` to zero that no kernel writes. Otherwise the sums over the
 * blocks and ranks would read uninitialized memory. */
static epic_result zero_missing_gradients(moe_job *j, const dense_part parts[DENSE_PARTS],
                                          float *dense_grads)
{
    for (int i = 0; i < DENSE_PARTS; i++) {
        const int64_t begin = parts[i].begin;
        if (parts[i].is_computed) continue;
        while (i + 1 < DENSE_PARTS && !parts[i + 1].is_computed) i++;
        TRY(CONTEXT_OP(j->ctx, add_array, j->call.stream, dense_grads + begin, NULL,
                       parts[i].end - begin, EPIC_F32, true));
    }
    return EPIC_OK;
}

/* Returns addresses in `dense_grads`, which is one row of work.dense_grads. */
static gradient_addresses staged_targets(const dense_part parts[DENSE_PARTS],
                                         float *dense_grads)
{
    float *at[DENSE_PARTS];
    for (int i = 0; i < DENSE_PARTS; i++)
        at[i] = parts[i].is_computed ? dense_grads + parts[i].begin : NULL;
    return (gradient_addresses){at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], 0};
}

/* ---------------------------------------------------------------- one block of tokens ---- */

/* Returns the arguments of the kernels for zero-experts and for the shared expert's gate, with
 * the arrays for gradients. */
static layer_tokens backward_token_args(const moe_job *j, const epic_moe_backward_args *a,
                                        const token_block *block)
{
    layer_tokens tokens = moe_device_token_args(j, block);
    tokens.d_out = (const char *)a->d_out.data + block->first * j->row_bytes;
    tokens.d_weights = moe_real_at(j, j->work.d_weights, block->first * j->top_k);
    tokens.d_shared_weights = j->work.d_shared_weights;
    return tokens;
}

/* Adds the gradients of both losses to work.d_logits. */
static epic_result losses_backward(moe_job *j, const token_block *block)
{
    const float *incoming = j->work.losses;
    epic_loss_args balance = moe_device_loss_args(j, block, j->moe.balance_coeff);
    epic_loss_args z = moe_device_loss_args(j, block, j->moe.z_coeff);
    balance.d_loss = incoming;
    z.d_loss = incoming + 1;
    z.sequence_tokens = 0;
    balance.d_logits = z.d_logits = j->work.d_logits;
    balance.flags = z.flags = EPIC_ACCUMULATE;
    if (balance.coeff != 0)
        TRY(CONTEXT_OP(j->ctx, balance_loss_backward, &balance, moe_device_balance_factor(j)));
    return z.coeff != 0 ? CONTEXT_OP(j->ctx, z_loss_backward, &z, z.coeff) : EPIC_OK;
}

/* Called instead of router_backward() if the caller forced the weights (topk_weights_in).
 * Forced weights do not depend on the logits. So the function writes zeros to work.d_logits and
 * to the gradient of scale_of_expert. If the caller wants the gradients of the weights, copies
 * them to the caller's array. */
static epic_result forced_weights_backward(moe_job *j, const epic_moe_backward_args *a,
                                           const token_block *block, const layer_tokens *tokens,
                                           const gradient_addresses *to)
{
    const int64_t choices = block->tokens * j->top_k;
    float *d_weights = a->d_topk_weights_in;
    if (j->router.zero_experts)
        TRY(CONTEXT_OP(j->ctx, zero_experts_backward, j->call.stream, tokens));
    if (d_weights && choices)
        TRY(CONTEXT_OP(j->ctx, add_array, j->call.stream, d_weights + block->first * j->top_k,
                       tokens->d_weights, choices, EPIC_F32, true));
    if (j->weights.scale_of_expert && to->scale && !(to->flags & EPIC_ACCUMULATE))
        TRY(CONTEXT_OP(j->ctx, add_array, j->call.stream, to->scale, NULL, j->columns, EPIC_F32,
                       true));
    if (!block->tokens) return EPIC_OK;
    return CONTEXT_OP(j->ctx, add_array, j->call.stream, j->work.d_logits, NULL,
                      block->tokens * j->columns, EPIC_F32, true);
}

/* Computes work.d_logits of one block from the gradients of its weights.
 *
 * epic_router_backward must overwrite work.d_logits. With EPIC_ACCUMULATE it would add to
 * work.d_logits, so this flag is not passed on. If the caller has set EPIC_ACCUMULATE, this
 * function computes the gradient of scale_of_expert in work.d_scale, and then adds it to the
 * caller's gradient. */
static epic_result router_backward(moe_job *j, const token_block *block,
                                   const layer_tokens *tokens, const gradient_addresses *to)
{
    const bool adds = to->scale && to->flags & EPIC_ACCUMULATE;
    const bool scaled = j->weights.scale_of_expert && to->scale;
    const epic_router_backward_args how = {.call = j->call,
                                           .router = &j->router,
                                           .logits = block->logits,
                                           .num_tokens = block->tokens,
                                           .topk_idx = block->topk_idx,
                                           .scale_of_expert = j->weights.scale_of_expert,
                                           .d_weights = tokens->d_weights,
                                           .workspace = j->work.router,
                                           .workspace_bytes = j->router_bytes,
                                           .d_logits = j->work.d_logits,
                                           .d_scale_of_expert = !scaled ? NULL
                                                                : adds  ? j->work.d_scale
                                                                        : to->scale,
                                           .type = EPIC_F32,
                                           .weights_type = EPIC_F32};
    if (j->router.zero_experts)
        TRY(CONTEXT_OP(j->ctx, zero_experts_backward, j->call.stream, tokens));
    TRY(epic_router_backward(j->ctx, &how));
    if (scaled && adds)
        TRY(CONTEXT_OP(j->ctx, add_array, j->call.stream, to->scale, j->work.d_scale,
                       j->columns, EPIC_F32, false));
    return EPIC_OK;
}

/* Runs the backward of the shared expert on one block. Unless d_x is NULL, writes the part of
 * the gradient of x that comes from the shared expert to d_x. */
static epic_result shared_expert_backward(moe_job *j, int64_t b, const token_block *block,
                                          const layer_tokens *tokens, void *d_x,
                                          const gradient_addresses *to)
{
    const bool gated = tokens->w_shared_gate != NULL;
    experts_job shared = {0};
    TRY(experts_read_config(&shared, &j->shared, sizeof j->shared));
    const epic_experts_backward_args how = {
        .call = j->call,
        .experts = &shared.experts,
        .x = block->x.data,
        .num_slots = block->tokens,
        .slot_weights = gated ? tokens->shared_weights : NULL,
        .w_gate_up = j->weights.shared_gate_up,
        .w_down = j->weights.shared_down,
        .b_gate_up = j->weights.shared_b_gate_up,
        .b_down = j->weights.shared_b_down,
        .saved = moe_shared_saved(j, b),
        .saved_bytes = j->shared_memory.saved_bytes,
        .workspace = j->work.shared,
        .workspace_bytes = j->shared_memory.backward_bytes,
        .d_y = tokens->d_out,
        .d_x = d_x,
        .d_w_gate_up = to->gate_up,
        .d_w_down = to->down,
        .d_b_gate_up = to->b_gate_up,
        .d_b_down = to->b_down,
        .d_slot_weights = gated ? tokens->d_shared_weights : NULL,
        .flags = to->flags,
        .grad_type = EPIC_F32};
    if (j->moe.flags & EPIC_RECOMPUTE)
        TRY(moe_device_shared(j, block, b, EPIC_RECOMPUTE));
    else
        TRY(moe_device_shared_gate(j, block));
    TRY(CONTEXT_OP(j->ctx, experts_backward, &how));
    if (!gated) return EPIC_OK;
    return CONTEXT_OP(j->ctx, shared_gate_backward, j->call.stream, tokens, to->w_shared_gate,
                      (to->flags & EPIC_ACCUMULATE) != 0, j->work.gate);
}

/* Adds two parts of d_x to work.shared_y: those that come from the zero-experts and from the
 * shared expert's gate. If the layer has a shared expert, work.shared_y already contains the
 * part that comes from that expert. */
static epic_result add_local_d_x(moe_job *j, const layer_tokens *tokens)
{
    const layer_rows sum = {j->work.shared_y, j->has_shared ? j->work.shared_y : NULL, NULL};
    if (!j->router.zero_experts && !tokens->w_shared_gate) return EPIC_OK;
    return CONTEXT_OP(j->ctx, add_local_rows, j->call.stream, tokens, &sum);
}

/* Computes the gradients of the gate's weights. Also completes d_x of the block: adds the part
 * that comes from the gate, and work.shared_y. d_x already contains the part that dispatch
 * backward has written. */
static epic_result gate_backward(moe_job *j, const token_block *block, const epic_rows *d_x,
                                 const gradient_addresses *to)
{
    const bool more = j->has_shared || j->router.zero_experts;
    epic_gate_args gate = moe_device_gate_args(j, block, j->work.d_logits);
    gate.d_x = d_x->data;
    gate.addend = more && d_x->data ? j->work.shared_y : NULL;
    gate.d_w_gate = to->w_gate;
    gate.d_b_gate = to->b_gate;
    gate.accumulate = (to->flags & EPIC_ACCUMULATE) != 0;
    return CONTEXT_OP(j->ctx, gate_backward, &gate);
}

/* Runs the stages of backward for block b. Writes the gradients of the gate and the shared
 * expert to the addresses in `to`. */
static epic_result block_backward(moe_job *j, const epic_moe_backward_args *a, int64_t b,
                                  const gradient_addresses *to)
{
    const token_block block = moe_get_block(j, b);
    const layer_tokens tokens = backward_token_args(j, a, &block);
    const bool wanted = a->d_x.data != NULL;
    const epic_rows d_x = wanted ? moe_block_out_rows(j, &a->d_x, b) : (epic_rows){0};
    if (a->flags & EPIC_FORCED_WEIGHTS)
        TRY(forced_weights_backward(j, a, &block, &tokens, to));
    else
        TRY(router_backward(j, &block, &tokens, to));
    TRY(losses_backward(j, &block));
    if (j->has_shared)
        TRY(shared_expert_backward(j, b, &block, &tokens, wanted ? j->work.shared_y : NULL,
                                   to));
    if (wanted) TRY(add_local_d_x(j, &tokens));
    return gate_backward(j, &block, &d_x, to);
}

/* Computes the gradients of the gate and the shared expert for `count` blocks of tokens, from
 * block `first` on, and adds them in a binary tree. Writes the sum to row `level` of
 * work.dense_grads. The rows after row `level` are scratch memory. */
static epic_result blocks_backward(moe_job *j, const epic_moe_backward_args *a,
                                   const dense_part parts[DENSE_PARTS], int64_t first,
                                   int64_t count, int64_t level)
{
    float *here = moe_real_at(j, j->work.dense_grads, level * j->num_dense_grads);
    if (count == 1) {
        const gradient_addresses to = staged_targets(parts, here);
        TRY(zero_missing_gradients(j, parts, here));
        return block_backward(j, a, first, &to);
    }
    TRY(blocks_backward(j, a, parts, first, count / 2, level));
    TRY(blocks_backward(j, a, parts, first + count / 2, count - count / 2, level + 1));
    return CONTEXT_OP(j->ctx, add_array, j->call.stream, here, here + j->num_dense_grads,
                      j->num_dense_grads, EPIC_F32, false);
}

/* Copies the summed gradients of the gate and the shared expert to the caller's arrays. With
 * EPIC_ACCUMULATE adds them instead. */
static epic_result store_dense_gradients(moe_job *j, const dense_part parts[DENSE_PARTS],
                                         uint32_t flags)
{
    for (int i = 0; i < DENSE_PARTS; i++) {
        if (!parts[i].to) continue;
        TRY(CONTEXT_OP(j->ctx, add_array, j->call.stream, parts[i].to,
                       (float *)(void *)j->work.dense_grads + parts[i].begin,
                       parts[i].end - parts[i].begin, EPIC_F32, !(flags & EPIC_ACCUMULATE)));
    }
    return EPIC_OK;
}

epic_result moe_device_dense_backward(moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g)
{
    if (j->moe.balance_coeff != 0 || j->moe.z_coeff != 0)
        TRY(CONTEXT_OP(j->ctx, read_d_losses, j->call.stream, j->work.losses, a));
    if (!is_dense_staged(j)) {
        const gradient_addresses to = caller_targets(g, a->flags & EPIC_ACCUMULATE);
        return block_backward(j, a, 0, &to);
    }
    dense_part parts[DENSE_PARTS];
    list_dense_parts(j, g, parts);
    TRY(blocks_backward(j, a, parts, 0, j->blocks, 0));
    TRY(moe_sum_dense(j));
    return store_dense_gradients(j, parts, a->flags);
}

epic_result moe_device_backward(moe_job *j, const epic_moe_backward_args *a,
                                const epic_moe_gradients *g)
{
    TRY(moe_combine_backward(j, &a->d_out, NULL));
    TRY(moe_dispatch_again(j));
    epic_result result = moe_recompute_experts(j);
    if (result == EPIC_OK) result = moe_experts_backward(j, g, a->flags & EPIC_ACCUMULATE);
    if (result != EPIC_OK) return moe_abort_call(j, result);
    TRY(moe_dispatch_backward(j, &a->d_x));
    return moe_device_dense_backward(j, a, g);
}
