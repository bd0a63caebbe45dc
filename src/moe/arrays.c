/* SPDX-License-Identifier: Apache-2.0 */
/* Where the arrays of a layer's call lie.  The steps inside look at their own again; what only
 * they looked at would be refused when the peers are called on already. */
#include "base/arrays.h"
#include "moe/args.h"
#include "rules/convert.h"
#include "rules/experts_layout.h"

#define MOST_ARRAYS 40

typedef struct places {
    call_array list[MOST_ARRAYS];
    size_t num;
} places;

static void add(places *p, const char *name, const void *data, int64_t count, int64_t unit,
                bool out)
{
    p->list[p->num++] = (call_array){name, data, count * unit, (size_t)unit, out};
}

static int64_t weight_bytes(const epic_experts *experts)
{
    return convert_bytes(experts->weight_type ? experts->weight_type : experts->row_type);
}

static int64_t width_of(const epic_experts *experts)
{
    return (int64_t)experts->inner * (experts->ungated ? 1 : 2);
}

static void add_scales(places *p, const moe_job *j)
{
    const int64_t hidden = experts_blocks(j->hidden), inner = experts_blocks(j->experts.inner);
    const int64_t local = j->experts.num_local_experts;
    const int64_t width = experts_blocks(width_of(&j->experts));
    add(p, "weights.w_gate_up_scales", j->weights.w_gate_up_scales, local * width * hidden, 4,
        false);
    add(p, "weights.w_down_scales", j->weights.w_down_scales, local * hidden * inner, 4, false);
}

static void add_weights(places *p, const moe_job *j, bool scaled)
{
    const epic_moe_weights *w = &j->weights;
    const int64_t local = j->experts.num_local_experts, width = width_of(&j->experts);
    const int64_t of_bias = weight_bytes(&j->experts), number = scaled ? 1 : of_bias;
    add(p, "weights.w_gate", w->w_gate, j->hidden * j->columns, j->real_bytes, false);
    add(p, "weights.b_gate", w->b_gate, j->columns, j->real_bytes, false);
    add(p, "weights.bias", w->bias, j->columns, 4, false);
    add(p, "weights.scale_of_expert", w->scale_of_expert, j->columns, j->real_bytes, false);
    add(p, "weights.w_gate_up", w->w_gate_up, local * j->hidden * width, number, false);
    add(p, "weights.w_down", w->w_down, local * j->experts.inner * j->hidden, number, false);
    add(p, "weights.b_gate_up", w->b_gate_up, local * width, of_bias, false);
    add(p, "weights.b_down", w->b_down, local * j->hidden, of_bias, false);
    if (scaled) add_scales(p, j);
    if (!j->has_shared) return;
    const int64_t shared = width_of(&j->shared), element = weight_bytes(&j->shared);
    add(p, "weights.shared_gate_up", w->shared_gate_up, j->hidden * shared, element, false);
    add(p, "weights.shared_down", w->shared_down, j->shared.inner * j->hidden, element, false);
    add(p, "weights.shared_b_gate_up", w->shared_b_gate_up, shared, element, false);
    add(p, "weights.shared_b_down", w->shared_b_down, j->hidden, element, false);
    add(p, "weights.w_shared_gate", w->w_shared_gate, j->hidden, j->real_bytes, false);
}

static void add_rows(places *p, const moe_job *j, const char *name, const epic_rows *rows,
                     bool out)
{
    const int64_t element = convert_bytes(j->experts.row_type);
    add(p, name, rows->data, j->tokens * j->hidden, element, out);
}

static void add_memory(places *p, const moe_job *j, const void *saved, const void *workspace,
                       bool forward)
{
    add(p, "saved", saved, j->saved_bytes / 64, 64, forward);
    add(p, "workspace", workspace, j->work_bytes / 64, 64, true);
}

epic_result moe_forward_places(const moe_job *j, const epic_moe_args *a)
{
    places p = {.num = 0};
    const int64_t experts = j->layer.num_experts;
    const int64_t number = a->loss_type == EPIC_F64 ? 8 : 4;
    add_weights(&p, j, j->scaled);
    add_rows(&p, j, "x.data", &a->x, false);
    add(&p, "token_ids", a->token_ids, j->tokens, a->token_id_type == EPIC_I64 ? 8 : 4, false);
    add(&p, "table", a->table, a->table_rows > 0 ? j->top_k : 0, 4, false);
    add(&p, "rank_of_expert", a->rank_of_expert, experts, 4, false);
    add(&p, "logical_of_expert", a->logical_of_expert, experts, 4, false);
    add_rows(&p, j, "out.data", &a->out, true);
    add(&p, "loss", a->loss, 1, number, true);
    add(&p, "balance_loss", a->balance_loss, 1, number, true);
    add(&p, "z_loss", a->z_loss, 1, number, true);
    add(&p, "load", a->load, experts, 4, true);
    add(&p, "logical_load", a->logical_load, j->layer.num_logical, 4, true);
    add(&p, "demand", a->demand, 1, 4, true);
    add_memory(&p, j, a->saved, a->workspace, true);
    return check_arrays(p.list, p.num);
}

epic_result moe_backward_places(const moe_job *j, const epic_moe_backward_args *a,
                                const epic_moe_gradients *g)
{
    places p = {.num = 0};
    const dense_parts d = moe_dense_parts(j);
    const int64_t local = j->experts.num_local_experts, width = width_of(&j->experts);
    const int64_t real = j->real_bytes, number = a->loss_type == EPIC_F64 ? 8 : 4;
    const int64_t of_expert = convert_bytes(j->grad_type);
    add_weights(&p, j, j->scaled_back);
    add_rows(&p, j, "x.data", &a->x, false);
    add_rows(&p, j, "d_out.data", &a->d_out, false);
    add(&p, "d_loss", a->d_loss, 1, number, false);
    add(&p, "d_balance_loss", a->d_balance_loss, 1, number, false);
    add(&p, "d_z_loss", a->d_z_loss, 1, number, false);
    add_rows(&p, j, "d_x.data", &a->d_x, true);
    add(&p, "gradients.w_gate", g->w_gate, d.b_gate, real, true);
    add(&p, "gradients.b_gate", g->b_gate, d.scale - d.b_gate, real, true);
    add(&p, "gradients.scale_of_expert", g->scale_of_expert, d.gate_up - d.scale, real, true);
    add(&p, "gradients.w_gate_up", g->w_gate_up, local * j->hidden * width, of_expert, true);
    add(&p, "gradients.w_down", g->w_down, local * j->experts.inner * j->hidden, of_expert,
        true);
    add(&p, "gradients.b_gate_up", g->b_gate_up, local * width, of_expert, true);
    add(&p, "gradients.b_down", g->b_down, local * j->hidden, of_expert, true);
    add(&p, "gradients.shared_gate_up", g->shared_gate_up, d.down - d.gate_up, real, true);
    add(&p, "gradients.shared_down", g->shared_down, d.b_gate_up - d.down, real, true);
    add(&p, "gradients.shared_b_gate_up", g->shared_b_gate_up, d.b_down - d.b_gate_up, real,
        true);
    add(&p, "gradients.shared_b_down", g->shared_b_down, d.w_shared_gate - d.b_down, real,
        true);
    add(&p, "gradients.w_shared_gate", g->w_shared_gate, d.end - d.w_shared_gate, real, true);
    add_memory(&p, j, a->saved, a->workspace, false);
    return check_arrays(p.list, p.num);
}
