/* SPDX-License-Identifier: Apache-2.0 */
/* epic_moe_backward on a device: the steps of forward, from the last to the first. */
#include "base/error.h"
#include "experts/job.h"
#include "moe/device.h"

typedef struct dense_places { /* where gradients of the dense part go; NULL: not wanted */
    float *w_gate, *b_gate, *gate_up, *down, *b_gate_up, *b_down;
    uint32_t flags;
} dense_places;

static dense_places places_of(const moe_job *j, const epic_moe_gradients *g, uint32_t flags)
{
    const dense_parts p = moe_dense_parts(j);
    float *dense = (float *)(void *)j->work.dense;
    if (!(j->moe.flags & EPIC_SUM_DENSE))
        return (dense_places){g->w_gate,      g->b_gate,           g->shared_gate_up,
                              g->shared_down, g->shared_b_gate_up, g->shared_b_down,
                              flags};
    return (dense_places){dense + p.w_gate,
                          dense + p.b_gate,
                          dense + p.gate_up,
                          dense + p.down,
                          dense + p.b_gate_up,
                          dense + p.b_down,
                          0};
}

static epic_result losses_backward(moe_job *j, const epic_moe_backward_args *a)
{
    float *incoming = j->work.losses;
    epic_loss balance = moe_device_loss(j, j->moe.balance_coeff);
    epic_loss z = moe_device_loss(j, j->moe.z_coeff);
    balance.d_loss = incoming;
    z.d_loss = incoming + 1;
    z.sequence_tokens = 0;
    balance.d_logits = z.d_logits = j->work.d_logits;
    balance.flags = z.flags = EPIC_ACCUMULATE;
    if (balance.coeff == 0 && z.coeff == 0) return EPIC_OK;
    TRY(DEVICE_STEP(j, take_losses, j->call.stream, incoming, a));
    if (balance.coeff != 0)
        TRY(DEVICE_STEP(j, balance_loss_backward, &balance, moe_device_balance_factor(j)));
    return z.coeff != 0 ? DEVICE_STEP(j, z_loss_backward, &z, z.coeff) : EPIC_OK;
}

static epic_result route_backward(moe_job *j)
{
    const epic_router_backward_args how = {.call = j->call,
                                           .router = &j->router,
                                           .logits = j->saved.logits,
                                           .num_tokens = j->tokens,
                                           .topk_idx = j->saved.topk_idx,
                                           .d_weights = j->work.d_weights,
                                           .workspace = j->work.router,
                                           .workspace_bytes = j->router_bytes,
                                           .d_logits = j->work.d_logits,
                                           .type = EPIC_F32,
                                           .weights_type = EPIC_F32};
    return epic_router_backward(j->ctx, &how);
}

static epic_result shared_backward(moe_job *j, const epic_moe_backward_args *a,
                                   const dense_places *to)
{
    experts_job shared = {0};
    TRY(experts_take(&shared, &j->shared, sizeof j->shared));
    const epic_experts_backward_args how = {.call = j->call,
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
                                            .workspace_bytes = j->shared_memory.backward_bytes,
                                            .d_y = a->d_out.data,
                                            .d_x = a->d_x.data ? j->work.shared_y : NULL,
                                            .d_w_gate_up = to->gate_up,
                                            .d_w_down = to->down,
                                            .d_b_gate_up = to->b_gate_up,
                                            .d_b_down = to->b_down,
                                            .flags = to->flags,
                                            .grad_type = EPIC_F32};
    return DEVICE_STEP(j, experts_backward, &how);
}

static epic_result gate_backward(moe_job *j, const epic_moe_backward_args *a,
                                 const dense_places *to)
{
    epic_gate gate = moe_device_gate(j, j->work.d_logits);
    gate.d_x = a->d_x.data;
    gate.also = j->has_shared && a->d_x.data ? j->work.shared_y : NULL;
    gate.d_w_gate = to->w_gate;
    gate.d_b_gate = to->b_gate;
    gate.accumulate = (to->flags & EPIC_ACCUMULATE) != 0;
    return DEVICE_STEP(j, gate_backward, &gate);
}

/* Summed gradients, from work to where they are wanted. */
static epic_result give_dense(moe_job *j, const epic_moe_gradients *g, uint32_t flags)
{
    const dense_parts p = moe_dense_parts(j);
    const struct {
        void *to;
        int64_t begin, end;
    } parts[] = {{g->w_gate, p.w_gate, p.b_gate},
                 {g->b_gate, p.b_gate, p.gate_up},
                 {g->shared_gate_up, p.gate_up, p.down},
                 {g->shared_down, p.down, p.b_gate_up},
                 {g->shared_b_gate_up, p.b_gate_up, p.b_down},
                 {g->shared_b_down, p.b_down, p.w_shared_gate}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i].to)
            TRY(DEVICE_STEP(
                j, add, j->call.stream, parts[i].to, moe_real(j, j->work.dense, parts[i].begin),
                parts[i].end - parts[i].begin, EPIC_F32, !(flags & EPIC_ACCUMULATE)));
    return EPIC_OK;
}

epic_result moe_device_dense_backward(moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g)
{
    const dense_places to = places_of(j, g, a->flags);
    TRY(route_backward(j));
    TRY(losses_backward(j, a));
    if (j->has_shared) TRY(shared_backward(j, a, &to));
    TRY(gate_backward(j, a, &to));
    if (!(j->moe.flags & EPIC_SUM_DENSE)) return EPIC_OK;
    TRY(moe_sum_dense(j));
    return give_dense(j, g, a->flags);
}

epic_result moe_device_backward(moe_job *j, const epic_moe_backward_args *a,
                                const epic_moe_gradients *g)
{
    TRY(moe_combine_backward(j, &a->d_out, NULL));
    const epic_result result = moe_transform_backward(j, g, a->flags);
    if (result != EPIC_OK) return moe_abandon(j, result);
    TRY(moe_dispatch_backward(j, &a->d_x));
    return moe_device_dense_backward(j, a, g);
}
