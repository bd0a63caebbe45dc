/* SPDX-License-Identifier: Apache-2.0 */
/* Runs epic_moe_forward and epic_moe_plan on a device, in the stages of host_forward.c. In
 * epic_moe_forward the host never reads results. If the data of one rank is invalid, the plan's
 * kernels on every rank find the error, and epic_check returns it. */
#include "base/error.h"
#include "moe/device.h"
#include "rules/experts_layout.h"

/* Copies `count` elements of int32 or float32, unless `to` is NULL. */
static epic_result copy_words(moe_job *j, void *to, const void *from, int64_t count)
{
    if (!to || !count) return EPIC_OK;
    return CONTEXT_OP(j->ctx, add_array, j->call.stream, to, from, count, EPIC_F32, true);
}

static epic_result copy_routing(moe_job *j, const epic_moe_args *a)
{
    const int64_t choices = j->tokens * j->top_k;
    TRY(copy_words(j, a->topk_idx_out, j->saved.topk_idx, choices));
    return copy_words(j, a->topk_weights_out, j->saved.weights, choices);
}

static epic_result copy_loads(moe_job *j, const epic_moe_args *a)
{
    TRY(copy_words(j, a->load, j->saved.load, j->layer.num_experts));
    return copy_words(j, a->logical_load, j->saved.logical_load, j->layer.num_logical);
}

/* Runs gate and router on all tokens at once, because the results of a token do not depend on
 * other tokens. */
epic_result moe_device_route(moe_job *j, const epic_moe_args *a)
{
    token_block all = moe_get_block(j, 0);
    all.x = j->x;
    const epic_gate_args gate = moe_device_gate_args(j, &all, j->saved.logits);
    const epic_router_args how = {.call = j->call,
                                  .router = &j->router,
                                  .logits = j->saved.logits,
                                  .num_tokens = j->tokens,
                                  .bias = j->weights.bias,
                                  .scale_of_expert = j->weights.scale_of_expert,
                                  .token_ids = a->token_ids,
                                  .table = a->table,
                                  .table_rows = a->table_rows,
                                  .workspace = j->work.router,
                                  .workspace_bytes = j->router_bytes,
                                  .topk_idx = j->saved.topk_idx,
                                  .weights = j->saved.weights,
                                  .type = EPIC_F32,
                                  .weights_type = EPIC_F32,
                                  .token_id_type = a->token_id_type,
                                  .topk_idx_in = a->topk_idx_in};
    const int64_t choices = j->tokens * j->top_k;
    TRY(CONTEXT_OP(j->ctx, gate_forward, &gate));
    TRY(epic_router_forward(j->ctx, &how));
    if (a->topk_weights_in) TRY(copy_words(j, j->saved.weights, a->topk_weights_in, choices));
    TRY(copy_routing(j, a));
    if (!j->router.zero_experts) return EPIC_OK;
    layer_tokens tokens = moe_device_token_args(j, &all);
    return CONTEXT_OP(j->ctx, mask_zero_experts, j->call.stream, &tokens, j->work.plan_idx);
}

/* Zeroes the counts of all local experts, because the plan may write the counts of only some of
 * them. */
static epic_result zero_counts(moe_job *j)
{
    const int32_t *end = j->saved.expert_tokens + j->experts.num_local_experts;
    return CONTEXT_OP(j->ctx, add_array, j->call.stream, j->saved.expert_rows, NULL,
                      end - j->saved.expert_rows, EPIC_F32, true);
}

/* If the layer is E4M3, makes dispatch send E4M3 rows with scales. */
static void quantize_dispatch(const moe_job *j, epic_dispatch_args *dispatch)
{
    if (!j->is_e4m3) return;
    dispatch->type = j->experts.row_type;
    dispatch->quantize = EPIC_QUANTIZE_1X128;
    dispatch->recv.row_bytes = j->hidden;
    dispatch->recv_scales =
        (epic_rows){j->work.recv_scales, j->capacity, experts_blocks(j->hidden) * 4};
}

/* Fills in the arguments of the plan. Zeroes expert_rows and expert_tokens if the plan might
 * leave some of their elements unwritten. */
static epic_result prepare_plan(moe_job *j, const epic_moe_args *a, epic_plan_args *plan)
{
    const uint32_t local = j->experts.num_local_experts, ranks = (uint32_t)j->ctx->num_ranks;
    *plan =
        moe_make_plan_args(j, a, j->router.zero_experts ? j->work.plan_idx : j->saved.topk_idx);
    if (a->rank_of_expert || local * ranks != j->layer.num_experts) return zero_counts(j);
    return EPIC_OK;
}

/* Checks that no rank owns more than num_local_experts experts. If rank_of_expert is NULL,
 * check_placement() has already checked this on the host. If not, launches a kernel that checks
 * it. */
static epic_result check_fits(moe_job *j, const epic_moe_args *a, const epic_plan_args *plan)
{
    if (!a->rank_of_expert) return EPIC_OK;
    return CONTEXT_OP(j->ctx, check_plan_fits, plan, j->experts.num_local_experts);
}

epic_result moe_device_plan_dispatch(moe_job *j, const epic_moe_args *a)
{
    epic_dispatch_args dispatch = {.call = j->call,
                                   .layer = j->moe.layer,
                                   .plan = j->saved.plan,
                                   .plan_bytes = j->plan_bytes,
                                   .tokens = j->x,
                                   .recv = {j->saved.recv, j->capacity, j->row_bytes},
                                   .weights = j->saved.weights,
                                   .slot_weights = j->saved.slot_weights,
                                   .flags = moe_padding_flag(j)};
    const op_header_extra extra = {.options = &j->options};
    epic_plan_args plan;
    quantize_dispatch(j, &dispatch);
    if (a->flags & EPIC_PLANNED) {
        TRY(api_dispatch(j->ctx, &dispatch, &extra));
    } else {
        TRY(prepare_plan(j, a, &plan));
        TRY(api_plan_dispatch(j->ctx, &plan, &dispatch, &extra));
        TRY(check_fits(j, a, &plan));
    }
    return copy_loads(j, a);
}

epic_result moe_device_add_local_experts(moe_job *j, const epic_rows *out)
{
    if (!j->has_shared && !j->router.zero_experts) return EPIC_OK;
    for (int64_t b = 0; b < j->blocks; b++) {
        const token_block block = moe_get_block(j, b);
        const layer_tokens tokens = moe_device_token_args(j, &block);
        void *rows = moe_block_out_rows(j, out, b).data;
        const layer_rows sum = {rows, rows, j->has_shared ? j->work.shared_y : NULL};
        if (j->has_shared) TRY(moe_device_shared(j, &block, b, 0));
        TRY(CONTEXT_OP(j->ctx, add_local_rows, j->call.stream, &tokens, &sum));
    }
    return EPIC_OK;
}

/* Computes the losses of each block, and sums them over the blocks in a binary tree and, with
 * EPIC_SUM_DENSE, over the ranks. */
static epic_result compute_losses(moe_job *j, const epic_moe_args *a)
{
    float *both = j->work.losses; /* [2, blocks]: balance loss and z-loss of each block */
    const bool none = j->moe.balance_coeff == 0 && j->moe.z_coeff == 0;
    if (none) return CONTEXT_OP(j->ctx, write_losses, j->call.stream, NULL, a);
    for (int64_t b = 0; b < j->blocks; b++) {
        const token_block block = moe_get_block(j, b);
        epic_loss_args balance = moe_device_loss_args(j, &block, j->moe.balance_coeff);
        epic_loss_args z = moe_device_loss_args(j, &block, j->moe.z_coeff);
        balance.loss = both + b;
        z.loss = both + j->blocks + b;
        z.sequence_tokens = 0;
        TRY(CONTEXT_OP(j->ctx, balance_loss_forward, &balance, moe_device_balance_factor(j)));
        TRY(CONTEXT_OP(j->ctx, z_loss_forward, &z, j->moe.z_coeff));
    }
    if (j->blocks > 1) TRY(CONTEXT_OP(j->ctx, sum_trees, j->call.stream, both, j->blocks));
    if (j->moe.flags & EPIC_SUM_DENSE) {
        const epic_allreduce_sum_args sum = {
            .call = j->call, .data = both, .count = 2, .order = j->layer.sum_order};
        TRY(epic_allreduce_sum(j->ctx, &sum));
    }
    return CONTEXT_OP(j->ctx, write_losses, j->call.stream, both, a);
}

/* Waits for the counts of the plan, and adds up the slots of this rank's experts. */
static epic_result count_slots(moe_job *j, int64_t *slots)
{
    enum { PIECE = 512 };
    const int64_t experts = j->experts.num_local_experts;
    int32_t rows[PIECE];
    for (int64_t first = 0; first < experts; first += PIECE) {
        const int64_t count = experts - first < PIECE ? experts - first : PIECE;
        TRY(CONTEXT_OP(j->ctx, read_counts, j->call.stream, j->saved.expert_rows + first, count,
                       rows));
        for (int64_t e = 0; e < count; e++) *slots += rows[e];
    }
    return EPIC_OK;
}

epic_result moe_device_plan(moe_job *j, const epic_moe_args *a, int64_t *slots)
{
    const op_header_extra extra = {.options = &j->options};
    epic_plan_args plan;
    int64_t count = 0;
    *slots = 0;
    TRY(CONTEXT_OP(j->ctx, read_counts, j->call.stream, NULL, 0, NULL));
    TRY(moe_device_route(j, a));
    TRY(prepare_plan(j, a, &plan));
    TRY(api_plan(j->ctx, &plan, &extra));
    TRY(check_fits(j, a, &plan));
    TRY(copy_loads(j, a));
    TRY(count_slots(j, &count));
    /* the counts are valid only if the data of every rank is valid */
    TRY(epic_check(j->ctx));
    *slots = count;
    return EPIC_OK;
}

epic_result moe_device_forward(moe_job *j, const epic_moe_args *a)
{
    if (a->flags & EPIC_PLANNED)
        TRY(copy_routing(j, a));
    else
        /* no peer waits for this rank yet, so only this rank returns an error of this call */
        TRY(moe_device_route(j, a));
    TRY(moe_device_plan_dispatch(j, a));
    epic_result result = moe_run_experts(j);
    if (result != EPIC_OK) return moe_abort_call(j, result);
    TRY(moe_combine(j, &a->out));
    TRY(moe_device_add_local_experts(j, &a->out));
    return compute_losses(j, a);
}
