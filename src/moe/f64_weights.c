/* SPDX-License-Identifier: Apache-2.0 */
/* Float64 layers: sends the weights of each token with its row in dispatch, and returns the
 * gradients of the weights by a combine (stages.h). */
#include <string.h>

#include "moe/stages.h"

static epic_rows weight_rows(const moe_job *j, void *data, int64_t num_rows)
{
    return (epic_rows){data, num_rows, j->top_k * j->real_bytes};
}

void moe_attach_f64_weights(moe_job *j, epic_dispatch_args *how)
{
    for (int64_t i = 0; i < j->tokens * j->top_k; i++)
        j->work.choice_k[i] = (float)(i % j->top_k);
    how->weights = j->work.choice_k;
    how->slot_weights = j->saved.slot_k;
    how->scales = epic_rows_as_const(weight_rows(j, j->saved.weights, j->tokens));
    how->recv_scales = weight_rows(j, j->work.recv_weights, j->capacity);
}

/* Returns the number of used slots. They are at the beginning of the receive buffer. */
static int64_t count_slots(const moe_job *j)
{
    int64_t slots = 0;
    for (uint32_t l = 0; l < j->experts.num_local_experts; l++)
        slots += j->saved.expert_rows[l];
    return slots;
}

/* Returns the index of a slot's own weight in an array with top_k weights per slot. Uses k = 0
 * if k is out of range, which means that `saved` is damaged. */
static int64_t weight_index(const moe_job *j, int64_t slot)
{
    const float k = j->saved.slot_k[slot];
    return slot * j->top_k + (k > 0 && k < (float)j->top_k ? (int64_t)k : 0);
}

void moe_select_slot_weights(moe_job *j)
{
    double *weights = j->saved.slot_weights;
    const int64_t slots = count_slots(j);
    for (int64_t s = 0; s < slots; s++) weights[s] = j->work.recv_weights[weight_index(j, s)];
}

epic_result moe_combine_weight_gradients(moe_job *j)
{
    const double *gradients = j->work.d_slot_weights;
    double *rows = j->work.d_y;
    const int64_t slots = count_slots(j);
    memset(rows, 0, (size_t)(slots * j->top_k) * sizeof *rows);
    for (int64_t s = 0; s < slots; s++) rows[weight_index(j, s)] = gradients[s];
    const epic_combine_args how = {.call = j->call,
                                   .layer = j->moe.layer,
                                   .plan = j->saved.plan,
                                   .plan_bytes = j->plan_bytes,
                                   .rows =
                                       epic_rows_as_const(weight_rows(j, rows, j->capacity)),
                                   .out = weight_rows(j, j->work.d_weights, j->tokens),
                                   .type = EPIC_F64};
    return epic_combine(j->ctx, &how);
}
