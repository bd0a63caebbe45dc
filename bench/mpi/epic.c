/* SPDX-License-Identifier: Apache-2.0 */
/* The step of the benchmark through EPIC. */
#include "ways.h"

#include <stdio.h>
#include <stdlib.h>

void must(const epic_context *ctx, epic_result result, const char *what)
{
    if (result == EPIC_OK) return;
    fprintf(stderr, "bench: %s: %s\n", what, epic_error(ctx));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

epic_way *epic_way_new(const job *j, const epic_layer *layer, const char *backend)
{
    epic_way *w = need(sizeof *w);
    epic_bootstrap bootstrap;
    w->layer = *layer;
    must(NULL, epic_bootstrap_mpi(&bootstrap, NULL, 60000), "bootstrap");
    const epic_config config = {.max_tokens = j->tokens,
                                .max_row_bytes = 2 * (int64_t)j->hidden,
                                .num_ranks = (uint32_t)j->ranks,
                                .timeout_ms = 120000,
                                .backend = backend};
    must(NULL, epic_open(&w->ctx, &bootstrap, &config), backend);
    epic_bootstrap_close(&bootstrap);
    must(w->ctx, epic_plan_bytes(&config, layer, &w->plan_bytes), "plan_bytes");
    w->plan = need((size_t)w->plan_bytes);
    return w;
}

void epic_way_free(epic_way *w)
{
    epic_close(w->ctx);
    free(w->plan);
    free(w);
}

static epic_rows rows_of(const job *j, bf16 *data, int64_t num)
{
    return (epic_rows){data, num, 2 * (int64_t)j->hidden};
}

static epic_const_rows const_rows_of(const job *j, const bf16 *data, int64_t num)
{
    return (epic_const_rows){data, num, 2 * (int64_t)j->hidden};
}

static epic_plan_args plan_args(const epic_way *w, const job *j, int64_t capacity,
                                int32_t *demand)
{
    return (epic_plan_args){.layer = &w->layer,
                            .plan = w->plan,
                            .plan_bytes = w->plan_bytes,
                            .topk_idx = j->ids,
                            .num_tokens = j->tokens,
                            .capacity = capacity,
                            .expert_rows = j->expert_rows,
                            .demand = demand};
}

int64_t epic_way_slots(epic_way *w, const job *j)
{
    int32_t demand;
    job counting = *j;
    counting.expert_rows = NULL;
    const epic_plan_args args = plan_args(w, &counting, EPIC_CAPACITY_EXACT, &demand);
    must(w->ctx, epic_plan(w->ctx, &args), "plan");
    return demand;
}

void epic_way_dispatch(epic_way *w, const job *j)
{
    int32_t demand;
    const epic_plan_args plan = plan_args(w, j, w->slots, &demand);
    const epic_dispatch_args dispatch = {.tokens = const_rows_of(j, j->x, j->tokens),
                                         .recv = rows_of(j, j->slabs, w->slots),
                                         .weights = j->weights,
                                         .slot_weights = j->slot_weights};
    must(w->ctx, epic_plan_dispatch(w->ctx, &plan, &dispatch), "plan and dispatch");
}

void epic_way_combine(epic_way *w, const job *j)
{
    const epic_combine_args args = {.layer = &w->layer,
                                    .plan = w->plan,
                                    .plan_bytes = w->plan_bytes,
                                    .rows = const_rows_of(j, j->slabs, w->slots),
                                    .out = rows_of(j, j->out, j->tokens),
                                    .slot_weights = j->slot_weights,
                                    .type = EPIC_BF16};
    must(w->ctx, epic_combine(w->ctx, &args), "combine");
}

void epic_way_gradients(epic_way *w, const job *j)
{
    const epic_combine_backward_args combine = {.layer = &w->layer,
                                                .plan = w->plan,
                                                .plan_bytes = w->plan_bytes,
                                                .d_out = const_rows_of(j, j->d_out, j->tokens),
                                                .rows = const_rows_of(j, j->slabs, w->slots),
                                                .d_rows = rows_of(j, j->d_slabs, w->slots),
                                                .slot_weights = j->slot_weights,
                                                .d_slot_weights = j->d_slot_weights,
                                                .type = EPIC_BF16};
    const epic_dispatch_backward_args dispatch = {.layer = &w->layer,
                                                  .plan = w->plan,
                                                  .plan_bytes = w->plan_bytes,
                                                  .d_recv =
                                                      const_rows_of(j, j->d_slabs, w->slots),
                                                  .d_tokens = rows_of(j, j->d_x, j->tokens),
                                                  .d_slot_weights = j->d_slot_weights,
                                                  .d_weights = j->d_weights,
                                                  .type = EPIC_BF16};
    must(w->ctx, epic_combine_backward(w->ctx, &combine), "combine_backward");
    must(w->ctx, epic_dispatch_backward(w->ctx, &dispatch), "dispatch_backward");
}

/* ------------------------------------------------------------------------ the experts ---- */

mlp *mlp_new(const job *j, int inner, int64_t slots)
{
    mlp *m = need(sizeof *m);
    epic_experts_memory_info info;
    const size_t up = (size_t)j->local * (size_t)j->hidden * 2 * (size_t)inner;
    m->experts = (epic_experts){.num_local_experts = (uint32_t)j->local,
                                .hidden = (uint32_t)j->hidden,
                                .inner = (uint32_t)inner,
                                .row_type = EPIC_BF16};
    must(NULL, epic_experts_memory(NULL, NULL, &m->experts, slots, &info),
         "memory of the experts");
    m->slots = slots;
    m->saved = need((size_t)(m->saved_bytes = info.saved_bytes));
    m->workspace = need((size_t)(m->workspace_bytes = info.forward_bytes));
    m->up = need(up * sizeof *m->up);
    m->down = need(up / 2 * sizeof *m->down);
    for (size_t i = 0; i < up; i++) m->up[i] = to_bf16((float)(i % 31) / 310 - 0.05f);
    for (size_t i = 0; i < up / 2; i++) m->down[i] = to_bf16((float)(i % 29) / 290 - 0.05f);
    return m;
}

void mlp_free(mlp *m)
{
    free(m->saved), free(m->workspace), free(m->up), free(m->down), free(m);
}

void mlp_run(const mlp *m, const job *j)
{
    const epic_experts_args args = {.experts = &m->experts,
                                    .x = j->slabs,
                                    .num_slots = m->slots,
                                    .expert_rows = j->expert_rows,
                                    .w_gate_up = m->up,
                                    .w_down = m->down,
                                    .saved = m->saved,
                                    .saved_bytes = m->saved_bytes,
                                    .workspace = m->workspace,
                                    .workspace_bytes = m->workspace_bytes,
                                    .y = j->d_slabs};
    must(NULL, epic_experts_forward(NULL, &args), "experts");
}
