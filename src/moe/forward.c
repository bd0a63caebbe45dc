/* SPDX-License-Identifier: Apache-2.0 */
/* epic_moe_forward: router, plan, dispatch, experts, combine. */
#include <string.h>

#include "api/api.h"
#include "base/error.h"
#include "base/sized.h"
#include "experts/blas.h"
#include "moe/call.h"
#include "plan/plan.h"
#include "router/job.h"
#include "rules/sentences.h"

/* Token ids or a table that cannot be used are told to every rank by the plan: nothing is chosen
 * here then. */
static epic_result route(moe_job *j, const epic_moe_args *a, data_fault *fault)
{
    for (int64_t b = 0; j->block && b < j->blocks; b++) {
        const dense_block block = moe_block(j, b);
        moe_ops(j)->gate(&block, (void *)(uintptr_t)block.logits);
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
                                  .token_id_type = a->token_id_type};
    router_job router;
    TRY(router_prepare(&router, &how));
    *fault = router_fault(&router, &how);
    if (fault->error != DATA_GOOD) {
        memset(j->work.plan_idx, 0xff, (size_t)(j->tokens * j->top_k) * sizeof(int32_t));
        return EPIC_OK;
    }
    TRY(epic_router_forward(NULL, &how));
    for (int64_t i = 0; i < j->tokens * j->top_k; i++) /* zero-experts stay at home */
        j->work.plan_idx[i] =
            j->saved.topk_idx[i] < (int32_t)j->router.num_experts ? j->saved.topk_idx[i] : -1;
    return EPIC_OK;
}

/* The promise of EPIC_TREE needs equal blocks; every rank sees the same numbers here. */
static epic_result check_tokens(const moe_job *j)
{
    const plan_view plan = plan_view_of(j->saved.plan);
    if (j->layer.sum_order != EPIC_TREE) return EPIC_OK;
    for (int32_t r = 1; r < j->ctx->num_ranks; r++)
        if (plan.tokens_of[r] != plan.tokens_of[0])
            return epic_fail(EPIC_EINVAL, SAYS_UNEQUAL, (long long)plan.tokens_of[0],
                             (long long)plan.tokens_of[r], r);
    return EPIC_OK;
}

static void clear_counts(const moe_job *j)
{
    memset(j->saved.expert_rows, 0, j->experts.num_local_experts * sizeof(int32_t));
    memset(j->saved.expert_tokens, 0, j->experts.num_local_experts * sizeof(int32_t));
    memset(j->saved.load, 0, j->layer.num_experts * sizeof(int32_t));
    memset(j->saved.logical_load, 0, j->layer.num_logical * sizeof(int32_t));
}

static void tell_load(const moe_job *j, const epic_moe_args *a)
{
    const epic_layer *layer = &j->layer;
    if (a->load) memcpy(a->load, j->saved.load, layer->num_experts * sizeof *a->load);
    if (a->logical_load)
        memcpy(a->logical_load, j->saved.logical_load,
               layer->num_logical * sizeof *a->logical_load);
}

static epic_result send(moe_job *j, const epic_moe_args *a, const note_extra *extra)
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
    if (j->wide) moe_weights_send(j, &dispatch);
    if (a->flags & EPIC_PLANNED) {
        result = api_dispatch(j->ctx, &dispatch, extra);
    } else {
        const epic_plan_args plan = moe_plan_args(j, a, j->work.plan_idx);
        clear_counts(j);
        result = api_plan_dispatch(j->ctx, &plan, &dispatch, extra);
    }
    tell_load(j, a);
    TRY(result);
    if (j->wide) moe_weights_take(j);
    return check_tokens(j);
}

/* All of it, or with EPIC_RECOMPUTE what is saved alone. */
static epic_result run_experts(moe_job *j, uint32_t flags)
{
    const bool scaled = j->scaled && !flags; /* what is recomputed has weights of row_type */
    epic_experts experts = j->experts;
    if (scaled) experts.weight_type = EPIC_E4M3;
    const epic_experts_args how = {.call = j->call,
                                   .experts = &experts,
                                   .x = j->saved.recv,
                                   .x_scales = scaled ? j->work.recv_scales : NULL,
                                   .num_slots = j->capacity,
                                   .expert_rows = j->saved.expert_rows,
                                   .expert_tokens = j->saved.expert_tokens,
                                   .slot_weights =
                                       moe_is_late(j) ? NULL : j->saved.slot_weights,
                                   .w_gate_up = j->weights.w_gate_up,
                                   .w_down = j->weights.w_down,
                                   .w_gate_up_scales = j->weights.w_gate_up_scales,
                                   .w_down_scales = j->weights.w_down_scales,
                                   .b_gate_up = j->weights.b_gate_up,
                                   .b_down = j->weights.b_down,
                                   .saved = j->saved.experts,
                                   .saved_bytes = j->experts_memory.saved_bytes,
                                   .workspace = j->work.experts,
                                   .workspace_bytes = flags ? j->experts_memory.backward_bytes
                                                            : j->experts_memory.forward_bytes,
                                   .y = j->work.y,
                                   .flags = flags,
                                   .weights_type = j->real_type};
    return epic_experts_forward(moe_where(j), &how);
}

epic_result moe_transform(moe_job *j)
{
    return run_experts(j, 0);
}

epic_result moe_recompute(moe_job *j)
{
    return j->moe.flags & EPIC_RECOMPUTE ? run_experts(j, EPIC_RECOMPUTE) : EPIC_OK;
}

epic_result moe_bring_home(moe_job *j, const epic_rows *out)
{
    const epic_combine_args how = {.call = j->call,
                                   .layer = j->moe.layer,
                                   .plan = j->saved.plan,
                                   .plan_bytes = j->plan_bytes,
                                   .rows = {j->work.y, j->capacity, j->row_bytes},
                                   .out = *out,
                                   .slot_weights =
                                       moe_is_late(j) ? j->saved.slot_weights : NULL,
                                   .type = j->experts.row_type};
    return epic_combine(j->ctx, &how);
}

epic_result moe_shared(moe_job *j, int64_t b, uint32_t flags)
{
    const dense_block block = moe_block(j, b);
    const int32_t rows = (int32_t)j->block;
    const bool gated = j->weights.w_shared_gate != NULL;
    if (gated) moe_ops(j)->shared_gate(&block, j->work.shared_weights);
    const epic_experts_args how = {.experts = &j->shared,
                                   .x = block.x.data,
                                   .num_slots = j->block,
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

static epic_result finish(moe_job *j, const epic_rows *out)
{
    for (int64_t b = 0; j->block && b < j->blocks; b++) {
        if (j->has_shared) TRY(moe_shared(j, b, 0));
        const dense_block block = moe_block(j, b);
        const epic_rows rows = moe_rows(j, out, b);
        moe_ops(j)->finish(&block, &rows, j->has_shared ? j->work.shared_y : NULL);
    }
    return EPIC_OK;
}

static void put_loss(void *out, uint32_t type, double loss)
{
    if (out && type == EPIC_F64)
        *(double *)out = loss;
    else if (out)
        *(float *)out = (float)loss;
}

static void put_losses(const epic_moe_args *a, double balance, double z)
{
    put_loss(a->loss, a->loss_type, balance + z);
    put_loss(a->balance_loss, a->loss_type, balance);
    put_loss(a->z_loss, a->loss_type, z);
}

static epic_result losses(moe_job *j, const epic_moe_args *a)
{
    void *balance = j->work.losses, *z = moe_real(j, balance, j->blocks);
    memset(balance, 0, (size_t)(2 * j->blocks * j->real_bytes));
    for (int64_t b = 0; j->block && b < j->blocks; b++) {
        const dense_block block = moe_block(j, b);
        TRY(moe_losses(j, &block, moe_real(j, balance, b), moe_real(j, z, b)));
    }
    double both[2] = {moe_ops(j)->tree(balance, j->blocks), moe_ops(j)->tree(z, j->blocks)};
    if (j->moe.flags & EPIC_SUM_DENSE) {
        float sums[2] = {(float)both[0], (float)both[1]}; /* they are: F64 is not summed */
        const epic_allreduce_sum_args sum = {
            .call = j->call, .data = sums, .count = 2, .order = j->layer.sum_order};
        TRY(epic_allreduce_sum(j->ctx, &sum));
        both[0] = sums[0];
        both[1] = sums[1];
    }
    put_losses(a, both[0], both[1]);
    return EPIC_OK;
}

/* A rank that owns more experts than the layer has room for would write past expert_rows.  Ranks
 * out of range are epic_plan's to name, on every rank. */
static epic_result check_placement(const moe_job *j, const int32_t *rank_of_expert)
{
    const uint32_t experts = j->layer.num_experts, ranks = (uint32_t)j->ctx->num_ranks;
    uint32_t most = (experts + ranks - 1) / ranks;
    if (!rank_of_expert && experts % ranks)
        return epic_fail(EPIC_EINVAL,
                         "rank_of_expert is NULL: num_ranks %u does not divide "
                         "moe.layer.num_experts %u, so a table is needed",
                         ranks, experts);
    for (uint32_t r = 0; rank_of_expert && r < ranks; r++) {
        uint32_t count = 0;
        for (uint32_t e = 0; e < experts; e++) count += rank_of_expert[e] == (int32_t)r;
        if (count > most) most = count;
    }
    if (j->experts.num_local_experts >= most) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, SAYS_ROOM, (long long)j->experts.num_local_experts,
                     (long long)most);
}

/* A planned call finds the routes in `saved`.  What is wrong there is this rank's own mistake. */
static epic_result begin(moe_job *j, const epic_moe_args *a, data_fault *fault)
{
    if (!(a->flags & EPIC_PLANNED)) return route(j, a, fault);
    TRY(moe_check_saved(j, fault));
    if (fault->error == DATA_GOOD) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "flags has EPIC_PLANNED, but saved does not begin with what a "
                     "successful epic_moe_plan left there");
}

static epic_result run(moe_job *j, const epic_moe_args *a)
{
    data_fault fault;
    TRY(begin(j, a, &fault)); /* local: nobody waits yet */
    const note_extra extra = {&fault, &j->options};
    *j->saved.total_tokens = -1;
    epic_result result = send(j, a, &extra);
    if (result != EPIC_OK) { /* the same on every rank */
        moe_clear(j, &a->out);
        put_losses(a, 0, 0);
        return result;
    }
    *j->saved.total_tokens = plan_view_of(j->saved.plan).header->total_tokens;
    result = moe_transform(j);
    if (result != EPIC_OK) return moe_abandon(j, result);
    TRY(moe_bring_home(j, &a->out));
    TRY(finish(j, &a->out));
    result = losses(j, a);
    return result == EPIC_OK ? EPIC_OK : moe_abandon(j, result);
}

static epic_result check_device(const epic_moe_args *a, bool planning)
{
    if (planning || a->flags & EPIC_PLANNED)
        return epic_fail(EPIC_ENOTSUP,
                         "epic_moe_plan is not there yet on CUDA contexts, where the host does "
                         "not see how many slots there are: give moe.capacity "
                         "(epic_capacity_bound)");
    return EPIC_OK;
}

/* What both entries check; `planning`: of epic_moe_plan. */
static epic_result take(moe_job *j, epic_context *ctx, epic_moe_args *a, bool planning)
{
    const uint32_t known = planning ? 0 : EPIC_PLANNED;
    const moe_call c = {.moe = a->moe,
                        .weights = a->weights,
                        .x = &a->x,
                        .y = planning ? &a->x : &a->out,
                        .y_name = "out",
                        .saved = a->saved,
                        .saved_bytes = a->saved_bytes,
                        .workspace = a->workspace,
                        .workspace_bytes = a->workspace_bytes,
                        .rank_of_expert = a->rank_of_expert};
    TRY(moe_begin(j, ctx, &a->call, &c));
    TRY(moe_forward_places(j, a));
    if (a->flags & ~known)
        return epic_fail(EPIC_EINVAL, "flags is 0x%x: only 0x%x is known here", a->flags,
                         known);
    if (a->reserved)
        return epic_fail(EPIC_EINVAL, "reserved fields must be zero: one is %u", a->reserved);
    if (planning && j->capacity != EPIC_CAPACITY_EXACT)
        return epic_fail(EPIC_EINVAL,
                         "moe.capacity is %lld: epic_moe_plan counts the slots itself, with "
                         "EPIC_CAPACITY_EXACT",
                         (long long)j->capacity);
    if (!planning && !(a->flags & EPIC_PLANNED) && j->capacity == EPIC_CAPACITY_EXACT)
        return epic_fail(EPIC_EINVAL, "moe.capacity is 0, EPIC_CAPACITY_EXACT: call "
                                      "epic_moe_plan first, then with EPIC_PLANNED");
    TRY(moe_check_loss_type(j, a->loss_type));
    if (j->device) TRY(check_device(a, planning));
    if (j->device && a->rank_of_expert) return EPIC_OK; /* in its memory: the plan will tell */
    return check_placement(j, a->rank_of_expert);
}

epic_result epic_moe_forward_v1(epic_context *ctx, const epic_moe_args *args, size_t size)
{
    epic_moe_args a;
    moe_job j;
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(take(&j, ctx, &a, false));
    if (j.device) return moe_device_forward(&j, &a);
    experts_blas_enter();
    const epic_result result = run(&j, &a);
    experts_blas_leave();
    return result;
}

static epic_result run_plan(moe_job *j, const epic_moe_args *a, int64_t *slots)
{
    data_fault fault;
    TRY(route(j, a, &fault));
    const epic_plan_args plan = moe_plan_args(j, a, j->work.plan_idx);
    const note_extra extra = {&fault, &j->options};
    clear_counts(j);
    *j->saved.total_tokens = -1;
    const epic_result result = api_plan(j->ctx, &plan, &extra);
    tell_load(j, a);
    TRY(result);
    TRY(check_tokens(j));
    *j->saved.total_tokens = plan_view_of(j->saved.plan).header->total_tokens;
    for (uint32_t l = 0; l < j->experts.num_local_experts; l++)
        *slots += j->saved.expert_rows[l];
    return EPIC_OK;
}

epic_result epic_moe_plan_v1(epic_context *ctx, const epic_moe_args *args, size_t size,
                             int64_t *slots)
{
    epic_moe_args a;
    moe_job j;
    TRY(READ_SIZED(&a, args, size, "args"));
    if (!slots) return epic_fail(EPIC_EINVAL, "slots is NULL: the number of slots goes there");
    TRY(take(&j, ctx, &a, true));
    *slots = 0;
    experts_blas_enter();
    const epic_result result = run_plan(&j, &a, slots);
    experts_blas_leave();
    return result;
}
