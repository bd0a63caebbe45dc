/* SPDX-License-Identifier: Apache-2.0 */
/* Runs epic_moe_forward and epic_moe_plan on the host.
 *
 * The stages of forward:
 *
 * 1. The gate computes logits, and the router chooses experts and weights.
 * 2. The plan counts slots, and dispatch sends rows to the ranks of their experts.
 * 3. The experts run, and combine sends their results back and sums them.
 * 4. The outputs of the shared expert and the zero-experts are added.
 * 5. The losses are computed.
 *
 * An error of stage 1 is returned only on the rank that has it, because this rank has sent
 * nothing yet. Invalid expert ids or token ids are handled differently: stage 2 reports them,
 * and every rank returns that error. From stage 2 on, peers wait for this rank, so an error
 * that only this rank has aborts the context. */
#include <string.h>

#include "api/api.h"
#include "base/error.h"
#include "moe/host.h"
#include "plan/plan.h"
#include "router/config.h"

/* Copies the ids and weights of the choices to the caller's arrays that are not NULL. If
 * is_valid is false, writes ids of -1 and weights of 0. */
static void copy_routing(const moe_job *j, const epic_moe_args *a, bool is_valid)
{
    const size_t choices = (size_t)(j->tokens * j->top_k);
    const size_t idx_bytes = choices * sizeof(int32_t);
    const size_t weights_bytes = choices * (size_t)j->real_bytes;
    if (!choices) return;
    if (a->topk_idx_out && is_valid) memcpy(a->topk_idx_out, j->saved.topk_idx, idx_bytes);
    if (a->topk_idx_out && !is_valid) memset(a->topk_idx_out, 0xff, idx_bytes);
    if (a->topk_weights_out && is_valid)
        memcpy(a->topk_weights_out, j->saved.weights, weights_bytes);
    if (a->topk_weights_out && !is_valid) memset(a->topk_weights_out, 0, weights_bytes);
}

/* Runs the gate and the router. If a token id, an entry of the caller's table of experts or a
 * forced id is invalid, chooses no expert for any token and stores the error in *fault. The
 * plan then makes every rank return this error. */
static epic_result route_tokens(moe_job *j, const epic_moe_args *a, data_fault *fault)
{
    for (int64_t b = 0; b < j->blocks; b++) {
        const token_block block = moe_get_block(j, b);
        if (!block.tokens) continue;
        moe_dense_ops(j)->gate_forward(&block, (void *)(uintptr_t)block.logits);
    }
    const epic_router_args how = {.router = &j->router,
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
                                  .type = j->real_type,
                                  .weights_type = j->real_type,
                                  .token_id_type = a->token_id_type,
                                  .topk_idx_in = a->topk_idx_in};
    router_job router;
    TRY(router_prepare_forward(&router, &how));
    *fault = router_find_fault(&router, &how);
    if (fault->error != DATA_OK) {
        memset(j->work.plan_idx, 0xff, (size_t)(j->tokens * j->top_k) * sizeof(int32_t));
        return EPIC_OK;
    }
    TRY(epic_router_forward(NULL, &how));
    if (a->topk_weights_in && j->tokens)
        memcpy(j->saved.weights, a->topk_weights_in,
               (size_t)(j->tokens * j->top_k * j->real_bytes));
    /* no rows are sent to zero-experts */
    for (int64_t i = 0; i < j->tokens * j->top_k; i++)
        j->work.plan_idx[i] =
            j->saved.topk_idx[i] < (int32_t)j->router.num_experts ? j->saved.topk_idx[i] : -1;
    return EPIC_OK;
}

static void zero_counts(const moe_job *j)
{
    memset(j->saved.expert_rows, 0, j->experts.num_local_experts * sizeof(int32_t));
    memset(j->saved.expert_tokens, 0, j->experts.num_local_experts * sizeof(int32_t));
    memset(j->saved.load, 0, j->layer.num_experts * sizeof(int32_t));
    memset(j->saved.logical_load, 0, j->layer.num_logical * sizeof(int32_t));
}

static void copy_load(const moe_job *j, const epic_moe_args *a)
{
    const epic_layer *layer = &j->layer;
    if (a->load) memcpy(a->load, j->saved.load, layer->num_experts * sizeof *a->load);
    if (a->logical_load)
        memcpy(a->logical_load, j->saved.logical_load,
               layer->num_logical * sizeof *a->logical_load);
}

/* Makes the plan, or uses the plan of epic_moe_plan (EPIC_PLANNED), and dispatches the rows.
 * Copies to the caller's arrays how many choices each expert has, even after an error. */
static epic_result plan_and_dispatch(moe_job *j, const epic_moe_args *a,
                                     const op_header_extra *extra)
{
    epic_dispatch_args dispatch = {.call = j->call,
                                   .layer = j->moe.layer,
                                   .plan = j->saved.plan,
                                   .plan_bytes = j->plan_bytes,
                                   .tokens = j->x,
                                   .recv = {j->saved.recv, j->capacity, j->row_bytes},
                                   .weights = j->saved.weights,
                                   .slot_weights = j->saved.slot_weights};
    epic_result result;
    if (j->is_f64) moe_attach_f64_weights(j, &dispatch);
    if (a->flags & EPIC_PLANNED) {
        result = api_dispatch(j->ctx, &dispatch, extra);
    } else {
        const epic_plan_args plan = moe_make_plan_args(j, a, j->work.plan_idx);
        zero_counts(j);
        result = api_plan_dispatch(j->ctx, &plan, &dispatch, extra);
    }
    copy_load(j, a);
    TRY(result);
    if (j->is_f64) moe_select_slot_weights(j);
    return EPIC_OK;
}

epic_result moe_host_shared_expert(moe_job *j, int64_t b, uint32_t flags)
{
    const token_block block = moe_get_block(j, b);
    const int32_t rows = (int32_t)block.tokens;
    const bool gated = j->weights.w_shared_gate != NULL;
    if (gated) moe_dense_ops(j)->shared_gate_forward(&block, j->work.shared_weights);
    const epic_experts_args how = {.experts = &j->shared,
                                   .x = block.x.data,
                                   .num_slots = block.tokens,
                                   .expert_rows = &rows,
                                   .w_gate_up = j->weights.shared_gate_up,
                                   .w_down = j->weights.shared_down,
                                   .b_gate_up = j->weights.shared_b_gate_up,
                                   .b_down = j->weights.shared_b_down,
                                   .saved = moe_shared_saved(j, b),
                                   .saved_bytes = j->shared_memory.saved_bytes,
                                   .workspace = j->work.shared,
                                   .workspace_bytes = j->shared_memory.forward_bytes,
                                   .y = j->work.shared_y,
                                   .slot_weights = gated ? j->work.shared_weights : NULL,
                                   .flags = flags,
                                   .weights_type = j->real_type};
    return epic_experts_forward(NULL, &how);
}

static epic_result add_local_experts(moe_job *j, const epic_rows *out)
{
    for (int64_t b = 0; b < j->blocks; b++) {
        const token_block block = moe_get_block(j, b);
        if (!block.tokens) continue;
        if (j->has_shared) TRY(moe_host_shared_expert(j, b, 0));
        const epic_rows rows = moe_block_out_rows(j, out, b);
        moe_dense_ops(j)->add_local_experts(&block, &rows,
                                            j->has_shared ? j->work.shared_y : NULL);
    }
    return EPIC_OK;
}

/* Stores a loss as float64 or float32. Does nothing if `out` is NULL. */
static void store_loss(void *out, uint32_t type, double loss)
{
    if (out && type == EPIC_F64)
        *(double *)out = loss;
    else if (out)
        *(float *)out = (float)loss;
}

static void store_losses(const epic_moe_args *a, double balance, double z)
{
    store_loss(a->loss, a->loss_type, balance + z);
    store_loss(a->balance_loss, a->loss_type, balance);
    store_loss(a->z_loss, a->loss_type, z);
}

/* Computes the losses of each block, and sums them over the blocks in a binary tree and, with
 * EPIC_SUM_DENSE, over the ranks. */
static epic_result compute_losses(moe_job *j, const epic_moe_args *a)
{
    if (j->moe.balance_coeff == 0 && j->moe.z_coeff == 0) {
        store_losses(a, 0, 0);
        return EPIC_OK;
    }
    void *balance = j->work.losses, *z = moe_real_at(j, balance, j->blocks);
    memset(balance, 0, (size_t)(2 * j->blocks * j->real_bytes));
    for (int64_t b = 0; b < j->blocks; b++) {
        const token_block block = moe_get_block(j, b);
        if (!block.tokens) continue;
        TRY(moe_losses_forward(j, &block, moe_real_at(j, balance, b), moe_real_at(j, z, b)));
    }
    double both[2] = {moe_dense_ops(j)->sum_in_tree(balance, j->blocks),
                      moe_dense_ops(j)->sum_in_tree(z, j->blocks)};
    if (j->moe.flags & EPIC_SUM_DENSE) {
        /* this conversion is exact: unless the rows are F64, both losses are float32 values */
        float narrow[2] = {(float)both[0], (float)both[1]};
        TRY(moe_sum_over_ranks(j, j->is_f64 ? (void *)both : narrow, 2));
        for (int i = 0; i < 2 && !j->is_f64; i++) both[i] = narrow[i];
    }
    store_losses(a, both[0], both[1]);
    return EPIC_OK;
}

/* Chooses the experts and weights of all tokens or, with EPIC_PLANNED, checks the choices that
 * epic_moe_plan has stored in `saved`. If `saved` is damaged, only this rank returns an error,
 * because no peer waits yet. */
static epic_result prepare_routes(moe_job *j, const epic_moe_args *a, data_fault *fault)
{
    if (!(a->flags & EPIC_PLANNED)) return route_tokens(j, a, fault);
    TRY(moe_check_saved(j, fault));
    if (fault->error == DATA_OK) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "flags has EPIC_PLANNED: saved must begin with what a "
                                  "successful epic_moe_plan left there");
}

void moe_zero_rows(const moe_job *j, const epic_rows *rows)
{
    if (j->tokens) memset(rows->data, 0, (size_t)(j->tokens * j->row_bytes));
}

epic_result moe_host_forward(moe_job *j, const epic_moe_args *a)
{
    data_fault fault;
    TRY(prepare_routes(j, a, &fault));
    copy_routing(j, a, fault.error == DATA_OK);
    const op_header_extra extra = {&fault, &j->options};
    *j->saved.total_tokens = -1;
    epic_result result = plan_and_dispatch(j, a, &extra);
    if (result != EPIC_OK) { /* every rank returns this error */
        moe_zero_rows(j, &a->out);
        store_losses(a, 0, 0);
        return result;
    }
    *j->saved.total_tokens = plan_view_of(j->saved.plan).header->total_tokens;
    result = moe_run_experts(j);
    if (result != EPIC_OK) return moe_abort_call(j, result);
    TRY(moe_combine(j, &a->out));
    TRY(add_local_experts(j, &a->out));
    result = compute_losses(j, a);
    return result == EPIC_OK ? EPIC_OK : moe_abort_call(j, result);
}

epic_result moe_host_plan(moe_job *j, const epic_moe_args *a, int64_t *slots)
{
    data_fault fault;
    *slots = 0;
    TRY(route_tokens(j, a, &fault));
    copy_routing(j, a, fault.error == DATA_OK);
    const epic_plan_args plan = moe_make_plan_args(j, a, j->work.plan_idx);
    const op_header_extra extra = {&fault, &j->options};
    zero_counts(j);
    *j->saved.total_tokens = -1;
    const epic_result result = api_plan(j->ctx, &plan, &extra);
    copy_load(j, a);
    TRY(result);
    *j->saved.total_tokens = plan_view_of(j->saved.plan).header->total_tokens;
    for (uint32_t l = 0; l < j->experts.num_local_experts; l++)
        *slots += j->saved.expert_rows[l];
    return EPIC_OK;
}
