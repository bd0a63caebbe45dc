/* SPDX-License-Identifier: Apache-2.0 */
/* epic_moe_forward on a device: the same steps, launched one after the other on the caller's
 * stream.  The host sees no number of them; what is wrong with the data every rank's plan
 * finds, and epic_check tells it. */
#include "base/error.h"
#include "experts/job.h"
#include "moe/device.h"
#include "router/device.h"

static epic_result not_yet(const char *what)
{
    return epic_fail(EPIC_ENOTSUP,
                     "%s is not there yet in the layer on CUDA contexts; use a host context",
                     what);
}

epic_result moe_device_ready(const moe_job *j)
{
    const epic_steps *steps = j->ctx->backend->steps;
    const uint32_t ranks = (uint32_t)j->ctx->num_ranks, experts = j->layer.num_experts;
    if (!steps->gate)
        return epic_fail(EPIC_ENOTSUP,
                         "the layer is not there yet on backend \"%s\"; use a host context",
                         j->ctx->backend_name);
    if (j->wide) return not_yet("moe.experts.row_type F64");
    if (j->router.zero_experts) return not_yet("moe.router.zero_experts");
    if (j->layer.sum_order == EPIC_TREE) return not_yet("moe.layer.sum_order EPIC_TREE");
    if (j->layer.num_logical) return not_yet("moe.layer.num_logical");
    if (j->weights.scale_of_expert) return not_yet("weights.scale_of_expert");
    if (j->weights.w_shared_gate) return not_yet("weights.w_shared_gate");
    if (j->has_shared && j->shared.gemm) return not_yet("moe.shared.gemm");
    if (experts % ranks || j->experts.num_local_experts != experts / ranks)
        return epic_fail(EPIC_ENOTSUP,
                         "moe.experts.num_local_experts is %u: on CUDA contexts it must be "
                         "moe.layer.num_experts %u / num_ranks %u yet",
                         j->experts.num_local_experts, experts, ranks);
    return EPIC_OK;
}

epic_gate moe_device_gate(const moe_job *j, void *logits)
{
    return (epic_gate){.stream = j->call.stream,
                       .x = j->x.data,
                       .tokens = j->tokens,
                       .hidden = j->hidden,
                       .columns = j->columns,
                       .w_gate = j->weights.w_gate,
                       .b_gate = j->weights.b_gate,
                       .logits = logits,
                       .workspace = j->work.gate,
                       .row_type = j->experts.row_type};
}

epic_loss moe_device_loss(const moe_job *j, double coeff)
{
    return (epic_loss){.router = &j->router,
                       .logits = j->saved.logits,
                       .num_tokens = j->tokens,
                       .plan = j->saved.plan,
                       .sequence_tokens = j->moe.sequence_tokens,
                       .load = j->saved.load,
                       .topk_idx = j->saved.topk_idx,
                       .coeff = coeff,
                       .workspace = j->work.router,
                       .workspace_bytes = j->router_bytes,
                       .type = EPIC_F32,
                       .loss_type = EPIC_F32,
                       .grad_type = EPIC_F32,
                       .stream = j->call.stream};
}

double moe_device_balance_factor(const moe_job *j)
{
    const int64_t sequence = j->moe.sequence_tokens;
    return j->router.num_experts * j->moe.balance_coeff / j->router.top_k /
           (sequence ? (double)sequence : 1.0);
}

epic_result moe_device_route(moe_job *j, const epic_moe_args *a)
{
    const epic_gate gate = moe_device_gate(j, j->saved.logits);
    const epic_router_args how = {.call = j->call,
                                  .router = &j->router,
                                  .logits = j->saved.logits,
                                  .num_tokens = j->tokens,
                                  .bias = j->weights.bias,
                                  .token_ids = a->token_ids,
                                  .table = a->table,
                                  .table_rows = a->table_rows,
                                  .workspace = j->work.router,
                                  .workspace_bytes = j->router_bytes,
                                  .topk_idx = j->saved.topk_idx,
                                  .weights = j->saved.weights,
                                  .type = EPIC_F32,
                                  .weights_type = EPIC_F32,
                                  .token_id_type = a->token_id_type};
    TRY(DEVICE_STEP(j, gate, &gate));
    return epic_router_forward(j->ctx, &how);
}

epic_result moe_device_send(moe_job *j, const epic_moe_args *a)
{
    const epic_dispatch_args dispatch = {.call = j->call,
                                         .plan = j->saved.plan,
                                         .plan_bytes = j->plan_bytes,
                                         .tokens = j->x,
                                         .recv = {j->saved.recv, j->capacity, j->row_bytes},
                                         .weights = j->saved.weights,
                                         .slot_weights = j->saved.slot_weights};
    const epic_plan_args plan = {.call = j->call,
                                 .layer = &j->layer,
                                 .plan = j->saved.plan,
                                 .plan_bytes = j->plan_bytes,
                                 .topk_idx = j->saved.topk_idx,
                                 .num_tokens = j->tokens,
                                 .capacity = j->capacity,
                                 .expert_rows = j->saved.expert_rows,
                                 .expert_tokens = j->saved.expert_tokens,
                                 .load = j->saved.load,
                                 .demand = a->demand};
    TRY(api_plan_dispatch(j->ctx, &plan, &dispatch, NULL));
    if (!a->load) return EPIC_OK;
    return DEVICE_STEP(j, add, j->call.stream, a->load, j->saved.load, j->layer.num_experts,
                       EPIC_F32, true); /* bits of any four bytes */
}

static epic_result run_shared(moe_job *j, const epic_rows *out)
{
    experts_job shared = {0};
    TRY(experts_take(&shared, &j->shared, sizeof j->shared));
    const epic_experts_args how = {.call = j->call,
                                   .experts = &shared.experts,
                                   .x = j->x.data,
                                   .num_slots = j->tokens,
                                   .w_gate_up = j->weights.shared_gate_up,
                                   .w_down = j->weights.shared_down,
                                   .b_gate_up = j->weights.shared_b_gate_up,
                                   .b_down = j->weights.shared_b_down,
                                   .saved = j->saved.shared,
                                   .saved_bytes = j->shared_memory.saved_bytes,
                                   .workspace = j->work.shared,
                                   .workspace_bytes = j->shared_memory.forward_bytes,
                                   .y = j->work.shared_y};
    TRY(DEVICE_STEP(j, experts_forward, &how));
    return DEVICE_STEP(j, add, j->call.stream, out->data, j->work.shared_y,
                       j->tokens * j->hidden, j->experts.row_type, false);
}

static epic_result losses(moe_job *j, const epic_moe_args *a)
{
    float *both = j->work.losses;
    const bool none = j->moe.balance_coeff == 0 && j->moe.z_coeff == 0;
    if (none) return DEVICE_STEP(j, give_losses, j->call.stream, NULL, a);
    epic_loss balance = moe_device_loss(j, j->moe.balance_coeff);
    epic_loss z = moe_device_loss(j, j->moe.z_coeff);
    balance.loss = both;
    z.loss = both + 1;
    z.sequence_tokens = 0;
    TRY(DEVICE_STEP(j, balance_loss_forward, &balance, moe_device_balance_factor(j)));
    TRY(DEVICE_STEP(j, z_loss_forward, &z, j->moe.z_coeff));
    if (j->moe.flags & EPIC_SUM_DENSE) {
        const epic_sum_args sum = {
            .call = j->call, .data = both, .count = 2, .order = j->layer.sum_order};
        TRY(epic_sum(j->ctx, &sum));
    }
    return DEVICE_STEP(j, give_losses, j->call.stream, both, a);
}

epic_result moe_device_forward(moe_job *j, const epic_moe_args *a)
{
    TRY(moe_device_route(j, a)); /* local: nobody waits yet */
    TRY(moe_device_send(j, a));
    epic_result result = moe_transform(j);
    if (result != EPIC_OK) return moe_abandon(j, result);
    TRY(moe_bring_home(j, &a->out));
    if (j->has_shared) TRY(run_shared(j, &a->out));
    return losses(j, a);
}
