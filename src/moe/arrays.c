/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that all arrays of a layer's call are aligned, and that no output overlaps another
 * array. The layer makes these checks before its first operation, when no peer waits for this
 * rank yet. */
#include "base/arrays.h"
#include "moe/args.h"
#include "rules/convert.h"
#include "rules/experts_layout.h"

#define MAX_ARRAYS 40

typedef struct array_list {
    call_array list[MAX_ARRAYS];
    size_t num;
} array_list;

/* Adds an array of `count` elements, each of `unit` bytes. `out` is true if the call writes the
 * array. */
static void add_array(array_list *p, const char *name, const void *data, int64_t count,
                      int64_t unit, bool out)
{
    p->list[p->num++] = (call_array){name, data, count * unit, (size_t)unit, out};
}

/* Returns the size of a weight in bytes. A weight_type of 0 means row_type. */
static int64_t weight_bytes(const epic_experts *experts)
{
    return convert_bytes(experts->weight_type ? experts->weight_type : experts->row_type);
}

static int64_t gate_up_width(const epic_experts *experts)
{
    return (int64_t)experts->inner * (experts->ungated ? 1 : 2);
}

/* Adds the scales of E4M3 weights, one for each square block of a weight matrix. */
static void add_scales(array_list *p, const moe_job *j)
{
    const int64_t hidden = experts_blocks(j->hidden), inner = experts_blocks(j->experts.inner);
    const int64_t local = j->experts.num_local_experts;
    const int64_t width = experts_blocks(gate_up_width(&j->experts));
    add_array(p, "weights.w_gate_up_scales", j->weights.w_gate_up_scales,
              local * width * hidden, 4, false);
    add_array(p, "weights.w_down_scales", j->weights.w_down_scales, local * hidden * inner, 4,
              false);
}

/* Adds all weights of the layer. `scaled` means that the weights of the experts are E4M3. */
static void add_weights(array_list *p, const moe_job *j, bool scaled)
{
    const epic_moe_weights *w = &j->weights;
    const int64_t local = j->experts.num_local_experts, width = gate_up_width(&j->experts);
    const int64_t of_bias = weight_bytes(&j->experts), number = scaled ? 1 : of_bias;
    add_array(p, "weights.w_gate", w->w_gate, j->hidden * j->columns, j->real_bytes, false);
    add_array(p, "weights.b_gate", w->b_gate, j->columns, j->real_bytes, false);
    add_array(p, "weights.bias", w->bias, j->columns, 4, false);
    add_array(p, "weights.scale_of_expert", w->scale_of_expert, j->columns, j->real_bytes,
              false);
    add_array(p, "weights.w_gate_up", w->w_gate_up, local * j->hidden * width, number, false);
    add_array(p, "weights.w_down", w->w_down, local * j->experts.inner * j->hidden, number,
              false);
    add_array(p, "weights.b_gate_up", w->b_gate_up, local * width, of_bias, false);
    add_array(p, "weights.b_down", w->b_down, local * j->hidden, of_bias, false);
    if (scaled) add_scales(p, j);
    if (!j->has_shared) return;
    const int64_t shared = gate_up_width(&j->shared), element = weight_bytes(&j->shared);
    add_array(p, "weights.shared_gate_up", w->shared_gate_up, j->hidden * shared, element,
              false);
    add_array(p, "weights.shared_down", w->shared_down, j->shared.inner * j->hidden, element,
              false);
    add_array(p, "weights.shared_b_gate_up", w->shared_b_gate_up, shared, element, false);
    add_array(p, "weights.shared_b_down", w->shared_b_down, j->hidden, element, false);
    add_array(p, "weights.w_shared_gate", w->w_shared_gate, j->hidden, j->real_bytes, false);
}

static void add_rows(array_list *p, const moe_job *j, const char *name, const void *data,
                     bool out)
{
    const int64_t element = convert_bytes(j->experts.row_type);
    add_array(p, name, data, j->tokens * j->hidden, element, out);
}

static void add_buffers(array_list *p, const moe_job *j, const void *saved,
                        const void *workspace, bool forward)
{
    add_array(p, "saved", saved, j->saved_bytes / 64, 64, forward);
    add_array(p, "workspace", workspace, j->work_bytes / 64, 64, true);
}

epic_result moe_check_forward_arrays(const moe_job *j, const epic_moe_args *a)
{
    array_list p = {.num = 0};
    const int64_t experts = j->layer.num_experts, choices = j->tokens * j->top_k;
    const int64_t number = a->loss_type == EPIC_F64 ? 8 : 4;
    add_weights(&p, j, j->is_e4m3);
    add_rows(&p, j, "x.data", a->x.data, false);
    add_array(&p, "token_ids", a->token_ids, j->tokens, a->token_id_type == EPIC_I64 ? 8 : 4,
              false);
    add_array(&p, "table", a->table, a->table_rows > 0 ? j->top_k : 0, 4, false);
    add_array(&p, "rank_of_expert", a->rank_of_expert, experts, 4, false);
    add_array(&p, "logical_of_expert", a->logical_of_expert, experts, 4, false);
    add_array(&p, "capacity_limit", a->capacity_limit, 1, 4, false);
    add_rows(&p, j, "out.data", a->out.data, true);
    add_array(&p, "loss", a->loss, 1, number, true);
    add_array(&p, "balance_loss", a->balance_loss, 1, number, true);
    add_array(&p, "z_loss", a->z_loss, 1, number, true);
    add_array(&p, "load", a->load, experts, 4, true);
    add_array(&p, "logical_load", a->logical_load, j->layer.num_logical, 4, true);
    add_array(&p, "demand", a->demand, 1, 4, true);
    add_array(&p, "topk_idx_in", a->topk_idx_in, choices, 4, false);
    add_array(&p, "topk_weights_in", a->topk_weights_in, choices, j->real_bytes, false);
    add_array(&p, "topk_idx_out", a->topk_idx_out, choices, 4, true);
    add_array(&p, "topk_weights_out", a->topk_weights_out, choices, j->real_bytes, true);
    add_buffers(&p, j, a->saved, a->workspace, true);
    return check_arrays(p.list, p.num);
}

epic_result moe_check_backward_arrays(const moe_job *j, const epic_moe_backward_args *a,
                                      const epic_moe_gradients *g)
{
    array_list p = {.num = 0};
    const dense_grad_offsets d = moe_dense_grad_offsets(j);
    const int64_t local = j->experts.num_local_experts, width = gate_up_width(&j->experts);
    const int64_t real = j->real_bytes, number = a->loss_type == EPIC_F64 ? 8 : 4;
    const int64_t of_expert = convert_bytes(j->grad_type);
    add_weights(&p, j, j->is_e4m3_backward);
    add_rows(&p, j, "x.data", a->x.data, false);
    add_rows(&p, j, "d_out.data", a->d_out.data, false);
    add_array(&p, "d_loss", a->d_loss, 1, number, false);
    add_array(&p, "d_balance_loss", a->d_balance_loss, 1, number, false);
    add_array(&p, "d_z_loss", a->d_z_loss, 1, number, false);
    add_array(&p, "d_topk_weights_in", a->d_topk_weights_in, j->tokens * j->top_k, real, true);
    add_rows(&p, j, "d_x.data", a->d_x.data, true);
    add_array(&p, "gradients.w_gate", g->w_gate, d.b_gate, real, true);
    add_array(&p, "gradients.b_gate", g->b_gate, d.scale - d.b_gate, real, true);
    add_array(&p, "gradients.scale_of_expert", g->scale_of_expert, d.gate_padding - d.scale,
              real, true);
    add_array(&p, "gradients.w_gate_up", g->w_gate_up, local * j->hidden * width, of_expert,
              true);
    add_array(&p, "gradients.w_down", g->w_down, local * j->experts.inner * j->hidden,
              of_expert, true);
    add_array(&p, "gradients.b_gate_up", g->b_gate_up, local * width, of_expert, true);
    add_array(&p, "gradients.b_down", g->b_down, local * j->hidden, of_expert, true);
    add_array(&p, "gradients.shared_gate_up", g->shared_gate_up, d.down - d.gate_up, real,
              true);
    add_array(&p, "gradients.shared_down", g->shared_down, d.b_gate_up - d.down, real, true);
    add_array(&p, "gradients.shared_b_gate_up", g->shared_b_gate_up, d.b_down - d.b_gate_up,
              real, true);
    add_array(&p, "gradients.shared_b_down", g->shared_b_down, d.w_shared_gate - d.b_down, real,
              true);
    add_array(&p, "gradients.w_shared_gate", g->w_shared_gate,
              d.shared_padding - d.w_shared_gate, real, true);
    add_buffers(&p, j, a->saved, a->workspace, false);
    return check_arrays(p.list, p.num);
}
