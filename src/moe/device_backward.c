/* SPDX-License-Identifier: Apache-2.0 */
/* Runs epic_moe_backward on a device, in the stages of host_backward.c. Each stage launches
 * kernels on the caller's stream. */
#include "base/error.h"
#include "experts/config.h"
#include "moe/device.h"

/* The device addresses to which kernels write the gradients of the gate and the shared expert.
 * A gradient whose address is NULL is not computed. `flags` is 0 or EPIC_ACCUMULATE. */
typedef struct gradient_addresses {
    float *w_gate, *b_gate, *scale, *gate_up, *down, *b_gate_up, *b_down, *w_shared_gate;
    uint32_t flags;
} gradient_addresses;

/* Returns true if the gradients of the gate and the shared expert are first summed over blocks
 * or ranks, in work.dense_grads. If not, kernels write them directly to the caller's arrays. */
static bool is_dense_staged(const moe_job *j)
{
    return j->num_dense_levels > 0;
}

static gradient_addresses caller_targets(const epic_moe_gradients *g, uint32_t flags)
{
    return (gradient_addresses){g->w_gate,         g->b_gate,        g->scale_of_expert,
                                g->shared_gate_up, g->shared_down,   g->shared_b_gate_up,
                                g->shared_b_down,  g->w_shared_gate, flags};
}

/* One gradient. It is at the elements [begin, end) of each row of work.dense_grads, and is
 * finally stored in the caller's array `to`. */
typedef struct dense_part {
    float *to; /* NULL: the caller does not want the gradient */
    int64_t begin, end;
    bool is_computed;
} dense_part;

/* A row of work.dense_grads has DENSE_PARTS parts. The first GATE_PARTS parts are the gradients
 * of the gate and the router, and padding. The other parts are the gradients of the shared
 * expert, and padding. */
enum { DENSE_PARTS = 10, GATE_PARTS = 4 };

/* Lists the gradients in a row of work.dense_grads, in the order of dense_grad_offsets. A
 * gradient that the caller does not want is computed only with EPIC_SUM_DENSE, because other
 * ranks may want it. */
static void list_dense_parts(const moe_job *j, const epic_moe_gradients *g,
                             dense_part parts[DENSE_PARTS])
{
    const dense_grad_offsets p = moe_dense_grad_offsets(j);
    const bool all = j->moe.flags & EPIC_SUM_DENSE;
    const dense_part list[DENSE_PARTS] = {
        {g->w_gate, p.w_gate, p.b_gate, true},
        {g->b_gate, p.b_gate, p.scale, true},
        {g->scale_of_expert, p.scale, p.gate_padding, j->weights.scale_of_expert != NULL},
        {NULL, p.gate_padding, p.gate_up, false},
        {g->shared_gate_up, p.gate_up, p.down, true},
        {g->shared_down, p.down, p.b_gate_up, true},
        {g->shared_b_gate_up, p.b_gate_up, p.b_down, true},
        {g->shared_b_down, p.b_down, p.w_shared_gate, true},
        {g->w_shared_gate, p.w_shared_gate, p.shared_padding, j->weights.w_shared_gate != NULL},
        {NULL, p.shared_padding, p.end, false}};
    for (int i = 0; i < DENSE_PARTS; i++) {
        parts[i] = list[i];
        parts[i].is_computed = list[i].is_computed && (all || list[i].to);
    }
}

/* Zeroes the gradients in `dense_grads` that no kernel writes, so that sums do not read
 * uninitialized memory. Looks only at the gradients `first` to `end` - 1. */
static epic_result zero_missing_gradients(moe_job *j, const dense_part parts[DENSE_PARTS],
                                          float *dense_grads, int first, int end)
{
    for (int i = first; i < end; i++) {
        const int64_t begin = parts[i].begin;
        if (parts[i].is_computed) continue;
        while (i + 1 < end && !parts[i + 1].is_computed) i++;
        if (parts[i].end == begin) continue;
        TRY(CONTEXT_OP(j->ctx, add_array, j->call.stream, dense_grads + begin, NULL,
                       parts[i].end - begin, EPIC_F32, true));
    }
    return EPIC_OK;
}

static gradient_addresses staged_targets(const dense_part parts[DENSE_PARTS],
                                         float *dense_grads)
{
    float *at[DENSE_PARTS];
    for (int i = 0; i < DENSE_PARTS; i++)
        at[i] = parts[i].is_computed ? dense_grads + parts[i].begin : NULL;
    return (gradient_addresses){at[0], at[1], at[2], at[4], at[5], at[6], at[7], at[8], 0};
}

/* A range of the blocks of a batch: `count` blocks, starting at block `first`. Their gradients
 * of the gate and the shared expert are added in a binary tree, in row `level` of
 * work.dense_grads. */
typedef struct block_range {
    int64_t first, count, level;
} block_range;

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

/* Adds the gradients of the balance loss and of the z-loss to work.d_logits. */
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

/* Replaces router_backward() if the caller forced the weights (topk_weights_in). Forced weights
 * do not depend on the logits, so sets work.d_logits and the gradient of scale_of_expert to
 * zero. If the caller wants the gradients of the weights, copies these gradients to the
 * caller's array. */
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

/* Runs epic_router_backward for one block. Outputs: d_logits, and d_scale, the block's gradient
 * of scale_of_expert (NULL: not computed). Does not pass EPIC_ACCUMULATE, which would make
 * epic_router_backward add to d_logits. */
static epic_result call_router_backward(moe_job *j, const token_block *block,
                                        const float *d_weights, float *d_logits, float *d_scale)
{
    const epic_router_backward_args how = {.call = j->call,
                                           .router = &j->router,
                                           .logits = block->logits,
                                           .num_tokens = block->tokens,
                                           .topk_idx = block->topk_idx,
                                           .scale_of_expert = j->weights.scale_of_expert,
                                           .d_weights = d_weights,
                                           .workspace = j->work.router,
                                           .workspace_bytes = j->router_bytes,
                                           .d_logits = d_logits,
                                           .d_scale_of_expert = d_scale,
                                           .type = EPIC_F32,
                                           .weights_type = EPIC_F32};
    return epic_router_backward(j->ctx, &how);
}

/* Like router_backward(), for calls that want the gradient of scale_of_expert. This gradient is
 * a sum over tokens, so the function runs block by block: it computes the gradient of each
 * block in work.d_scale, and adds the gradients of the blocks in a binary tree. */
static epic_result router_backward_scaled(moe_job *j, const block_range *range,
                                          const gradient_addresses *to)
{
    const int64_t begin = moe_block_begin(j, range->first), count = range->count;
    float *d_scale = j->work.d_scale, *d_logits = j->work.d_logits;
    for (int64_t b = 0; b < count; b++) {
        const token_block block = moe_get_block(j, range->first + b);
        TRY(call_router_backward(
            j, &block, moe_real_at(j, j->work.d_weights, block.first * j->top_k),
            d_logits + (block.first - begin) * j->columns, d_scale + b * j->columns));
    }
    for (int64_t distance = 1; distance < count; distance *= 2)
        for (int64_t b = 0; b < count; b += 2 * distance)
            TRY(CONTEXT_OP(j->ctx, add_array, j->call.stream, d_scale + b * j->columns,
                           d_scale + (b + distance) * j->columns, j->columns, EPIC_F32, false));
    return CONTEXT_OP(j->ctx, add_array, j->call.stream, to->scale, d_scale, j->columns,
                      EPIC_F32, !(to->flags & EPIC_ACCUMULATE));
}

/* Computes work.d_logits of a batch from the gradients with respect to the choices' weights. */
static epic_result router_backward(moe_job *j, const block_range *range,
                                   const token_block *batch, const layer_tokens *tokens,
                                   const gradient_addresses *to)
{
    const bool scaled = j->weights.scale_of_expert && to->scale;
    if (j->router.zero_experts)
        TRY(CONTEXT_OP(j->ctx, zero_experts_backward, j->call.stream, tokens));
    if (scaled && (range->count > 1 || to->flags & EPIC_ACCUMULATE))
        return router_backward_scaled(j, range, to);
    return call_router_backward(j, batch, tokens->d_weights, j->work.d_logits,
                                scaled ? to->scale : NULL);
}

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

/* Adds to `rows` (rows of work.shared_y) the parts of d_x that come from the zero-experts and
 * from the shared expert's gate. `rows` already contains the part of the shared expert, if
 * there is one. */
static epic_result add_local_d_x(moe_job *j, const layer_tokens *tokens, void *rows)
{
    const layer_rows sum = {rows, j->has_shared ? rows : NULL, NULL};
    if (!j->router.zero_experts && !tokens->w_shared_gate) return EPIC_OK;
    return CONTEXT_OP(j->ctx, add_local_rows, j->call.stream, tokens, &sum);
}

/* Runs the backward of the shared expert on one block of a batch, and adds the block's parts of
 * d_x to the block's rows of work.shared_y. `begin` is the first token of the batch. */
static epic_result shared_block_backward(moe_job *j, const epic_moe_backward_args *a, int64_t b,
                                         int64_t begin, const gradient_addresses *to)
{
    const token_block block = moe_get_block(j, b);
    const layer_tokens tokens = backward_token_args(j, a, &block);
    void *rows = (char *)j->work.shared_y + (block.first - begin) * j->row_bytes;
    const bool wanted = a->d_x.data != NULL;
    TRY(shared_expert_backward(j, b, &block, &tokens, wanted ? rows : NULL, to));
    return wanted ? add_local_d_x(j, &tokens, rows) : EPIC_OK;
}

/* Computes the gradients of the shared expert for the blocks in `range`. Adds the gradients in
 * a binary tree, and writes the sum to row range->level of work.dense_grads. May overwrite the
 * rows after this row. */
static epic_result shared_tree_backward(moe_job *j, const epic_moe_backward_args *a,
                                        const dense_part parts[DENSE_PARTS],
                                        const block_range *range, int64_t begin)
{
    const dense_grad_offsets p = moe_dense_grad_offsets(j);
    const int64_t count = range->count / 2, numbers = p.end - p.gate_up;
    float *here =
        moe_real_at(j, j->work.dense_grads, range->level * j->num_dense_grads + p.gate_up);
    if (range->count == 1) {
        const gradient_addresses to = staged_targets(parts, here - p.gate_up);
        TRY(zero_missing_gradients(j, parts, here - p.gate_up, GATE_PARTS, DENSE_PARTS));
        return shared_block_backward(j, a, range->first, begin, &to);
    }
    const block_range left = {range->first, count, range->level};
    const block_range right = {range->first + count, range->count - count, range->level + 1};
    TRY(shared_tree_backward(j, a, parts, &left, begin));
    TRY(shared_tree_backward(j, a, parts, &right, begin));
    return CONTEXT_OP(j->ctx, add_array, j->call.stream, here, here + j->num_dense_grads,
                      numbers, EPIC_F32, false);
}

/* Computes the gradients of the gate's weights. Adds to d_x the part that comes from the gate,
 * and the parts that are in work.shared_y. */
static epic_result gate_backward(moe_job *j, const block_range *range, const token_block *batch,
                                 void *d_x, const gradient_addresses *to)
{
    const bool more = j->has_shared || j->router.zero_experts;
    epic_gate_args gate = moe_device_gate_args(j, batch, j->work.d_logits);
    gate.d_x = d_x;
    gate.addend = more && d_x ? j->work.shared_y : NULL;
    gate.d_w_gate = to->w_gate;
    gate.d_b_gate = to->b_gate;
    gate.accumulate = (to->flags & EPIC_ACCUMULATE) != 0;
    gate.blocks = (gate_blocks){range->first, range->count, j->blocks,
                                j->tokens / j->sequence_unit, j->sequence_unit};
    return CONTEXT_OP(j->ctx, gate_backward, &gate);
}

/* Runs the stages of backward for a batch. Writes the gradients of the gate to the addresses in
 * *to. If the batch is one block, writes the gradients of the shared expert to the addresses in
 * *to, too. If not, writes them to row range->level of work.dense_grads.
 *
 * Each stage handles all tokens or blocks of the batch with one launch. Only the shared
 * expert's backward runs block by block, because its gradients are large. */
static epic_result batch_backward(moe_job *j, const epic_moe_backward_args *a,
                                  const dense_part parts[DENSE_PARTS], const block_range *range,
                                  const gradient_addresses *to)
{
    const token_block batch = moe_get_blocks(j, range->first, range->count);
    const layer_tokens tokens = backward_token_args(j, a, &batch);
    char *d_x = a->d_x.data;
    if (a->flags & EPIC_FORCED_WEIGHTS)
        TRY(forced_weights_backward(j, a, &batch, &tokens, to));
    else
        TRY(router_backward(j, range, &batch, &tokens, to));
    TRY(losses_backward(j, &batch));
    if (j->has_shared && range->count > 1)
        TRY(shared_tree_backward(j, a, parts, range, batch.first));
    else if (j->has_shared)
        TRY(shared_block_backward(j, a, range->first, batch.first, to));
    else if (d_x)
        TRY(add_local_d_x(j, &tokens, j->work.shared_y));
    return gate_backward(j, range, &batch, d_x ? d_x + batch.first * j->row_bytes : NULL, to);
}

/* Computes the gradients of the gate and the shared expert for the blocks in `range`. Adds the
 * gradients in a binary tree, and writes the sum to row range->level of work.dense_grads. May
 * overwrite the rows after this row. */
static epic_result blocks_backward(moe_job *j, const epic_moe_backward_args *a,
                                   const dense_part parts[DENSE_PARTS],
                                   const block_range *range)
{
    const int64_t count = range->count / 2;
    float *here = moe_real_at(j, j->work.dense_grads, range->level * j->num_dense_grads);
    if (range->count <= GATE_BLOCKS) {
        const gradient_addresses to = staged_targets(parts, here);
        TRY(zero_missing_gradients(j, parts, here, 0,
                                   range->count == 1 ? DENSE_PARTS : GATE_PARTS));
        return batch_backward(j, a, parts, range, &to);
    }
    const block_range left = {range->first, count, range->level};
    const block_range right = {range->first + count, range->count - count, range->level + 1};
    TRY(blocks_backward(j, a, parts, &left));
    TRY(blocks_backward(j, a, parts, &right));
    return CONTEXT_OP(j->ctx, add_array, j->call.stream, here, here + j->num_dense_grads,
                      j->num_dense_grads, EPIC_F32, false);
}

/* Copies the summed gradients of the gate and the shared expert to the caller's arrays. With
 * EPIC_ACCUMULATE, adds the gradients to these arrays. */
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
    const block_range all = {0, j->blocks, 0};
    dense_part parts[DENSE_PARTS];
    list_dense_parts(j, g, parts);
    if (!is_dense_staged(j)) {
        const gradient_addresses to = caller_targets(g, a->flags & EPIC_ACCUMULATE);
        return batch_backward(j, a, parts, &all, &to);
    }
    TRY(blocks_backward(j, a, parts, &all));
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
