/* SPDX-License-Identifier: Apache-2.0 */
/* Lays out `saved` and `workspace`. Offsets and sizes depend only on the configuration and the
 * number of tokens, so the same functions compute the sizes for epic_moe_memory and the
 * addresses for forward and backward. */
#include "experts/blas.h"
#include "moe/moe.h"
#include "plan/plan.h"
#include "rules/experts_layout.h"
#include "rules/gate_layout.h"

static int64_t larger_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Reserves `bytes` bytes at offset *used of `base`. Adds `bytes`, rounded up to a multiple of
 * 64, to *used. Returns the address of the bytes, or NULL if `base` is NULL. */
static void *place_buffer(unsigned char *base, int64_t *used, int64_t bytes)
{
    void *at = base ? base + *used : NULL;
    *used += round_up(bytes, 64);
    return at;
}

/* Lays out `saved`.
 *
 * The buffers that epic_moe_plan writes come first, so their offsets do not depend on the
 * capacity. After epic_moe_plan has counted the slots, the caller sets the capacity and
 * enlarges `saved`, and these buffers must keep their contents.
 *
 * On devices expert_rows and expert_tokens have room for all experts, because the placement
 * table is in device memory, where the host cannot count the experts of a rank. */
static void layout_saved(moe_job *j, unsigned char *base)
{
    int64_t used = 0;
    const int64_t choices = j->tokens * j->top_k, slots = j->capacity;
    const int64_t experts = j->layer.num_experts;
    const int64_t local = j->is_device ? larger_of(j->experts.num_local_experts, experts)
                                       : j->experts.num_local_experts;
    moe_saved *s = &j->saved;
    /* the first buffer that epic_moe_plan writes */
    s->plan = place_buffer(base, &used, j->plan_bytes);
    s->logits = place_buffer(base, &used, j->tokens * j->columns * j->real_bytes);
    s->topk_idx = place_buffer(base, &used, choices * 4);
    s->weights = place_buffer(base, &used, choices * j->real_bytes);
    s->expert_rows = place_buffer(base, &used, local * 4);
    s->expert_tokens = place_buffer(base, &used, local * 4);
    s->load = place_buffer(base, &used, (int64_t)j->layer.num_experts * 4);
    s->logical_load = place_buffer(base, &used, (int64_t)j->layer.num_logical * 4);
    /* the last buffer that epic_moe_plan writes */
    s->total_tokens = place_buffer(base, &used, 8);
    const bool keeps = !(j->moe.flags & EPIC_RECOMPUTE);
    const bool keeps_rows = !(j->moe.flags & EPIC_DISPATCH_AGAIN);
    s->shared = place_buffer(base, &used, keeps ? j->blocks * j->shared_memory.saved_bytes : 0);
    s->recv = place_buffer(base, &used, keeps_rows ? slots * j->row_bytes : 0);
    s->slot_weights = place_buffer(base, &used, slots * j->real_bytes);
    s->slot_k = place_buffer(base, &used, j->is_f64 ? slots * 4 : 0);
    s->experts = place_buffer(base, &used, keeps ? j->experts_memory.saved_bytes : 0);
    j->saved_bytes = used;
}

/* Adds to the workspace the buffers that are not in `saved` because of EPIC_RECOMPUTE or
 * EPIC_DISPATCH_AGAIN. In forward also adds the scales of E4M3 rows. */
static void layout_unsaved(moe_job *j, unsigned char *base, int64_t *used, bool backward)
{
    const bool scaled = j->is_e4m3 && !backward;
    if (j->moe.flags & EPIC_RECOMPUTE) {
        j->saved.shared = place_buffer(base, used, j->shared_memory.saved_bytes);
        j->saved.experts = place_buffer(base, used, j->experts_memory.saved_bytes);
    }
    if (j->moe.flags & EPIC_DISPATCH_AGAIN)
        j->saved.recv =
            place_buffer(base, used, j->capacity * (scaled ? j->hidden : j->row_bytes));
    if (scaled)
        j->work.recv_scales =
            place_buffer(base, used, j->capacity * experts_blocks(j->hidden) * 4);
}

/* Returns the size in bytes of the workspace of the gate's kernels, for all tokens in forward
 * and for one batch in backward. */
static int64_t measure_gate(const moe_job *j, bool backward)
{
    const gate_tokens all = {j->tokens, j->block, 1, j->deciding_tokens};
    const gate_tokens batch = {j->batch, j->block,
                               j->blocks < GATE_BLOCKS ? j->blocks : GATE_BLOCKS,
                               j->deciding_tokens};
    return backward ? gate_backward_bytes(&batch, j->hidden, j->columns, j->is_invariant)
                    : gate_forward_bytes(&all, j->hidden, j->columns, j->is_invariant);
}

static void layout_workspace(moe_job *j, unsigned char *base, bool backward)
{
    int64_t used = 0;
    const int64_t weights_bytes = j->is_f64 ? j->capacity * j->top_k * 8 : 0;
    moe_work *w = &j->work;
    layout_unsaved(j, base, &used, backward);
    w->experts = place_buffer(base, &used,
                              backward ? j->experts_memory.backward_bytes
                                       : j->experts_memory.forward_bytes);
    w->shared = place_buffer(base, &used,
                             backward ? j->shared_memory.backward_bytes
                                      : j->shared_memory.forward_bytes);
    w->router = place_buffer(base, &used, j->router_bytes);
    const int64_t rows = j->is_device ? 0 : backward ? j->block + 1 : 2;
    w->tile =
        place_buffer(base, &used, j->is_device ? 0 : j->block * GATE_TILE * j->real_bytes);
    w->rows = place_buffer(base, &used, rows * j->hidden * j->real_bytes);
    w->product = place_buffer(
        base, &used, j->is_invariant && !j->is_device ? gemm_invariant_bytes(j->is_f64) : 0);
    w->gate = place_buffer(base, &used, j->is_device ? measure_gate(j, backward) : 0);
    const bool adds_rows = j->has_shared || (j->is_device && j->router.zero_experts);
    w->shared_y = place_buffer(base, &used,
                               adds_rows ? (backward ? j->batch : j->block) * j->row_bytes : 0);
    w->shared_weights = place_buffer(base, &used, j->has_shared ? j->block * j->real_bytes : 0);
    w->losses = place_buffer(base, &used, 2 * j->blocks * j->real_bytes);
    const bool picks = !backward && (!j->is_device || j->router.zero_experts);
    w->plan_idx = place_buffer(base, &used, picks ? j->tokens * j->top_k * 4 : 0);
    if (j->is_f64 && !backward) {
        w->choice_k = place_buffer(base, &used, j->tokens * j->top_k * 4);
        w->recv_weights = place_buffer(base, &used, weights_bytes);
    }
    w->y = place_buffer(base, &used, backward ? 0 : j->capacity * j->row_bytes);
    if (backward) {
        const int64_t rows_bytes = larger_of(j->capacity, j->tokens) * j->row_bytes;
        w->d_y = place_buffer(base, &used, larger_of(rows_bytes, weights_bytes));
        w->d_recv = place_buffer(base, &used, j->capacity * j->row_bytes);
        w->d_slot_weights = place_buffer(base, &used, j->capacity * j->real_bytes);
        w->d_weights = place_buffer(base, &used, j->tokens * j->top_k * j->real_bytes);
        w->d_shared_weights =
            place_buffer(base, &used, j->has_shared ? j->block * j->real_bytes : 0);
        w->d_logits = place_buffer(base, &used, j->batch * j->columns * j->real_bytes);
        const int64_t scales = j->blocks < GATE_BLOCKS ? j->blocks : GATE_BLOCKS;
        w->d_scale = place_buffer(base, &used, j->is_device ? scales * j->columns * 4 : 0);
        w->dense_grads =
            place_buffer(base, &used, j->num_dense_levels * j->num_dense_grads * j->real_bytes);
    }
    j->work_bytes = used;
}

void moe_layout_buffers(moe_job *j, const void *saved, void *workspace, bool backward)
{
    layout_saved(j, (unsigned char *)(uintptr_t)saved);
    layout_workspace(j, workspace, backward);
}

token_block moe_get_blocks(const moe_job *j, int64_t first_block, int64_t count)
{
    const int64_t first = moe_block_begin(j, first_block);
    const int64_t tokens = moe_block_begin(j, first_block + count) - first;
    return (token_block){.job = j,
                         .x = {moe_row_at(j, j->x.data, first), tokens, j->row_bytes},
                         .first = first,
                         .tokens = tokens,
                         .logits =
                             (const char *)j->saved.logits + first * j->columns * j->real_bytes,
                         .topk_idx = j->saved.topk_idx + first * j->top_k,
                         .weights = moe_real_at(j, j->saved.weights, first * j->top_k)};
}

token_block moe_get_block(const moe_job *j, int64_t b)
{
    return moe_get_blocks(j, b, 1);
}
