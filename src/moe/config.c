/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and checks the configuration of a layer, which is epic_moe and the structs to which it
 * points. Computes the sizes that depend on the configuration. */
#include <math.h>
#include <stdio.h>

#include "api/check.h"
#include "api/config.h"
#include "base/error.h"
#include "base/sized.h"
#include "experts/config.h"
#include "moe/moe.h"
#include "plan/plan.h"
#include "rules/convert.h"
#include "rules/device_layout.h"

#define KNOWN_FLAGS                                                                \
    (EPIC_SUM_DENSE | EPIC_RECOMPUTE | EPIC_DISPATCH_AGAIN | EPIC_LOSS_BY_CALLER | \
     EPIC_INVARIANT)

/* Sets j->is_invariant if the flag EPIC_INVARIANT is set. With this flag, returns EPIC_EINVAL
 * for options that make the results of a token depend on other tokens or on the number of
 * ranks. */
static epic_result read_invariant(moe_job *j)
{
    if (j->experts.flags || (j->has_shared && j->shared.flags))
        return epic_fail(EPIC_EINVAL,
                         "moe.%s.flags is %u: it must be 0; set EPIC_INVARIANT in moe.flags",
                         j->experts.flags ? "experts" : "shared",
                         j->experts.flags ? j->experts.flags : j->shared.flags);
    j->is_invariant = (j->moe.flags & EPIC_INVARIANT) != 0;
    if (!j->is_invariant) return EPIC_OK;
    j->experts.flags = j->shared.flags = EPIC_INVARIANT;
    if (j->layer.sum_order != EPIC_TREE || !j->moe.layer->leaves)
        return epic_fail(EPIC_EINVAL,
                         "moe.layer.sum_order is %s and leaves is %u: with EPIC_INVARIANT "
                         "sum_order must be EPIC_TREE, and leaves must be set, because its "
                         "default is the number of ranks",
                         epic_sum_order_name(j->layer.sum_order), j->moe.layer->leaves);
    if (j->layer.overflow != EPIC_OVERFLOW_ERROR)
        return epic_fail(EPIC_EINVAL,
                         "moe.layer.overflow is %s: with EPIC_INVARIANT it must be "
                         "EPIC_OVERFLOW_ERROR, because which choices are dropped depends on "
                         "other tokens",
                         epic_overflow_name(j->layer.overflow));
    if (j->experts.gemm || (j->has_shared && j->shared.gemm))
        return epic_fail(EPIC_EINVAL,
                         "moe.%s.gemm is not NULL: with EPIC_INVARIANT it must be "
                         "NULL",
                         j->experts.gemm ? "experts" : "shared");
    return EPIC_OK;
}

/* Copies the caller's structs into *j, and checks each struct separately. check_shapes() later
 * checks that the structs match. */
static epic_result read_configs(moe_job *j, int32_t num_members, const epic_moe *moe,
                                size_t size)
{
    TRY(READ_SIZED(&j->moe, moe, size, "moe"));
    const epic_moe *m = &j->moe;
    TRY(layer_read(&j->layer, m->layer, sizeof *m->layer, num_members));
    TRY(READ_SIZED(&j->router, m->router, sizeof *m->router, "moe.router"));
    TRY(READ_SIZED(&j->experts, m->experts, sizeof *m->experts, "moe.experts"));
    j->has_shared = m->shared != NULL;
    if (j->has_shared) TRY(READ_SIZED(&j->shared, m->shared, sizeof *m->shared, "moe.shared"));
    TRY(read_invariant(j));
    layer_options_fill(&j->options, m, &j->router, &j->experts,
                       j->has_shared ? &j->shared : NULL);
    return EPIC_OK;
}

static epic_result fail_unequal(const char *a, int64_t value, const char *b, int64_t other)
{
    return epic_fail(EPIC_EINVAL, "moe.%s is %lld, moe.%s is %lld: make them equal", a,
                     (long long)value, b, (long long)other);
}

static epic_result check_e4m3(const moe_job *j)
{
    if (j->has_shared && j->shared.weight_type == EPIC_E4M3)
        return epic_fail(EPIC_EINVAL,
                         "moe.shared.weight_type is E4M3: only moe.experts supports it");
    if (!j->is_e4m3) return EPIC_OK;
    if (!(j->moe.flags & EPIC_DISPATCH_AGAIN))
        return epic_fail(EPIC_EINVAL, "moe.experts.weight_type is E4M3: moe.flags must have "
                                      "EPIC_DISPATCH_AGAIN, as rows of e4m3 are not saved");
    if (j->experts.gemm)
        return epic_fail(EPIC_ENOTSUP, "moe.experts.gemm is not NULL: it must be NULL if "
                                       "weight_type is E4M3");
    if (!j->is_device)
        return epic_fail(EPIC_ENOTSUP,
                         "moe.experts.weight_type is E4M3: the layer supports it on CUDA "
                         "contexts only");
    return EPIC_OK;
}

/* Checks that the shapes and types of layer, router, experts and shared expert match, and that
 * a row is not larger than max_row_bytes of the context. */
static epic_result check_shapes(const moe_job *j, const epic_config *config)
{
    const epic_layer *layer = &j->layer;
    const epic_router *router = &j->router;
    if (layer->layout != EPIC_EXPERT_MAJOR)
        return epic_fail(EPIC_EINVAL, "moe.layer.layout is %u: it must be EPIC_EXPERT_MAJOR",
                         layer->layout);
    if (router->num_experts != layer_num_ids(layer))
        return fail_unequal("router.num_experts", router->num_experts,
                            layer->num_logical ? "layer.num_logical" : "layer.num_experts",
                            layer_num_ids(layer));
    if (router->top_k != layer->top_k)
        return fail_unequal("router.top_k", router->top_k, "layer.top_k", layer->top_k);
    if (j->has_shared && j->shared.num_local_experts != 1)
        return epic_fail(EPIC_EINVAL, "moe.shared.num_local_experts is %u: it must be 1",
                         j->shared.num_local_experts);
    if (j->has_shared && j->shared.hidden != j->experts.hidden)
        return fail_unequal("shared.hidden", j->shared.hidden, "experts.hidden",
                            j->experts.hidden);
    if (j->has_shared && j->shared.row_type != j->experts.row_type)
        return fail_unequal("shared.row_type", j->shared.row_type, "experts.row_type",
                            j->experts.row_type);
    if (j->has_shared && j->shared.weighting != EPIC_WEIGHT_LATE)
        return epic_fail(EPIC_EINVAL, "moe.shared.weighting is %u: it must be EPIC_WEIGHT_LATE",
                         j->shared.weighting);
    if (j->row_bytes > config->max_row_bytes)
        return epic_fail(EPIC_EINVAL,
                         "moe.experts.hidden is %lld: a row takes %lld bytes, which must be at "
                         "most config.max_row_bytes %lld; open with more",
                         (long long)j->hidden, (long long)j->row_bytes,
                         (long long)config->max_row_bytes);
    if (j->is_f64 && j->top_k * 8 > config->max_row_bytes)
        return epic_fail(
            EPIC_EINVAL,
            "moe.layer.top_k is %u: with F64 rows its float64 weights take %lld bytes, "
            "which must be at most config.max_row_bytes %lld; open with more",
            layer->top_k, (long long)j->top_k * 8, (long long)config->max_row_bytes);
    return EPIC_OK;
}

static bool is_coeff(double x)
{
    return isfinite(x) && x >= 0;
}

/* Checks the options that are fields of epic_moe itself: the coefficients of the losses, the
 * flags and the reserved fields. */
static epic_result check_options(const moe_job *j)
{
    const epic_moe *m = &j->moe;
    if (!is_coeff(m->balance_coeff) || !is_coeff(m->z_coeff))
        return epic_fail(
            EPIC_EINVAL,
            "moe.balance_coeff is %g, moe.z_coeff is %g: both must be finite and 0 (no "
            "loss) or more",
            m->balance_coeff, m->z_coeff);
    if (m->sequence_tokens < 0)
        return epic_fail(EPIC_EINVAL,
                         "moe.sequence_tokens is %lld: it must be a length, or 0 for the loss "
                         "over all tokens",
                         (long long)m->sequence_tokens);
    if (m->flags & ~(uint32_t)KNOWN_FLAGS)
        return epic_fail(EPIC_EINVAL,
                         "moe.flags is 0x%x: it must have no bits except EPIC_SUM_DENSE, "
                         "EPIC_RECOMPUTE, EPIC_DISPATCH_AGAIN, EPIC_LOSS_BY_CALLER and "
                         "EPIC_INVARIANT",
                         m->flags);
    if (m->reserved)
        return epic_fail(EPIC_EINVAL, "moe.reserved is %u: it must be 0", m->reserved);
    if (m->capacity < 0 || m->capacity > INT32_MAX)
        return epic_fail(EPIC_EINVAL,
                         "moe.capacity is %lld: it must be 1 to 2147483647 slots "
                         "(epic_capacity_bound always suffices), or EPIC_CAPACITY_EXACT",
                         (long long)m->capacity);
    if (j->is_f64 && j->is_device)
        return epic_fail(EPIC_ENOTSUP, "moe.experts.row_type is F64: the layer supports it on "
                                       "host contexts only");
    return EPIC_OK;
}

static int64_t larger_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Returns the number of levels of a binary tree with `blocks` leaves. */
static int64_t num_levels(int64_t blocks)
{
    int64_t levels = 1;
    while (blocks > 1) {
        blocks = (blocks + 1) / 2;
        levels++;
    }
    return levels;
}

/* Computes how much memory the experts or the shared expert need. Error texts begin with
 * `name`, the name of the field that contains their options. */
static epic_result measure_experts(const char *name, const epic_experts *experts, int64_t slots,
                                   bool on_device, epic_experts_memory_info *out)
{
    if (experts_memory(experts, sizeof *experts, slots, on_device, out) == EPIC_OK)
        return EPIC_OK;
    char why[512];
    snprintf(why, sizeof why, "%s", epic_sentence());
    return epic_fail(EPIC_EINVAL, "moe.%s: %s", name, why);
}

/* Computes how much memory the experts of an E4M3 layer need. The weights are E4M3 in forward.
 * In backward they may be E4M3 or of type row_type, so the workspace must suffice for each of
 * these types. */
static epic_result measure_e4m3_experts(moe_job *j)
{
    epic_experts_memory_info scaled_info;
    epic_experts scaled = j->experts;
    scaled.weight_type = EPIC_E4M3;
    TRY(measure_experts("experts", &scaled, j->capacity, true, &scaled_info));
    j->experts_memory.forward_bytes = scaled_info.forward_bytes;
    j->experts_memory.backward_bytes =
        larger_of(j->experts_memory.backward_bytes, scaled_info.backward_bytes);
    return EPIC_OK;
}

static epic_result measure_memory(moe_job *j, const epic_config *config)
{
    TRY(measure_experts("experts", &j->experts, j->capacity, j->is_device, &j->experts_memory));
    if (j->is_e4m3) TRY(measure_e4m3_experts(j));
    if (j->has_shared)
        TRY(measure_experts("shared", &j->shared, j->block, j->is_device, &j->shared_memory));
    j->shared_memory.saved_bytes = round_up(j->shared_memory.saved_bytes, 64);
    TRY(epic_router_workspace(&j->router, &j->router_bytes));
    TRY(check_plan_size(config, &j->layer, &j->plan_bytes));
    const bool apart = !j->is_device || j->moe.flags & EPIC_SUM_DENSE ||
                       j->blocks > GATE_BLOCKS || (j->has_shared && j->blocks > 1);
    j->num_dense_levels = apart ? num_levels(j->blocks) : 0;
    j->num_dense_grads = moe_dense_grad_offsets(j).end;
    return EPIC_OK;
}

/* Sets `batch` and deciding_tokens. The gate's kernels choose their method of computing as if
 * they had deciding_tokens tokens. In tree order, deciding_tokens must not depend on the number
 * of ranks, because the bits of the results depend on the method. So deciding_tokens is
 * computed from the number of leaves, limited to GATE_BLOCKS because a batch has at most
 * GATE_BLOCKS blocks. */
static void set_batch(moe_job *j)
{
    const int64_t most = j->blocks < GATE_BLOCKS ? j->blocks : GATE_BLOCKS;
    const int64_t leaves = j->layer.leaves < GATE_BLOCKS ? j->layer.leaves : GATE_BLOCKS;
    const bool is_tree = j->layer.sum_order == EPIC_TREE;
    j->batch = !j->is_device                 ? j->block
               : most * j->block < j->tokens ? most * j->block
                                             : j->tokens;
    j->deciding_tokens = is_tree ? leaves * j->block : j->block;
}

/* Reads the configuration of a layer (moe.h). In a float64 layer, replaces EPIC_WEIGHT_LATE by
 * EPIC_WEIGHT_EARLY: then the experts multiply by the weights instead of combine, because
 * combine supports only float32 weights. */
epic_result moe_read_config(moe_job *j, const epic_config *config, int32_t num_members,
                            const epic_moe *moe, size_t size, int64_t tokens)
{
    TRY(read_configs(j, num_members, moe, size));
    j->is_f64 = j->experts.row_type == EPIC_F64;
    j->is_e4m3 = j->experts.weight_type == EPIC_E4M3 && !j->is_f64;
    if (j->is_e4m3) j->experts.weight_type = j->experts.row_type;
    if (j->is_f64 && j->experts.weighting == EPIC_WEIGHT_LATE)
        j->experts.weighting = EPIC_WEIGHT_EARLY;
    j->real_type = j->is_f64 ? EPIC_F64 : EPIC_F32;
    j->real_bytes = convert_bytes(j->real_type);
    j->hidden = j->experts.hidden;
    j->row_bytes = j->hidden * convert_bytes(j->experts.row_type);
    j->columns = (int64_t)j->router.num_experts + j->router.zero_experts;
    j->top_k = j->layer.top_k;
    j->capacity = j->moe.capacity;
    j->blocks = j->layer.sum_order == EPIC_TREE ? j->layer.leaves / (uint32_t)num_members : 1;
    j->tokens = tokens;
    TRY(check_options(j));
    /* j->options keeps the caller's coefficients, so the ranks still compare them */
    if (j->moe.flags & EPIC_LOSS_BY_CALLER) j->moe.balance_coeff = j->moe.z_coeff = 0;
    j->sequence_unit =
        j->moe.balance_coeff != 0 && j->moe.sequence_tokens ? j->moe.sequence_tokens : 1;
    j->block = ceil_div(ceil_div(tokens, j->sequence_unit), j->blocks) * j->sequence_unit;
    set_batch(j);
    TRY(check_e4m3(j));
    TRY(measure_memory(j, config));
    return check_shapes(j, config);
}

dense_grad_offsets moe_dense_grad_offsets(const moe_job *j)
{
    dense_grad_offsets p = {0};
    p.b_gate = j->hidden * j->columns;
    p.scale = p.b_gate + j->columns;
    p.gate_padding = p.scale + j->columns;
    p.gate_up = device_round_up(p.gate_padding, DENSE_GRAD_ALIGNMENT);
    p.down = p.b_gate_up = p.b_down = p.w_shared_gate = p.shared_padding = p.end = p.gate_up;
    if (!j->has_shared) return p;
    const int64_t inner = j->shared.inner, width = inner * (j->shared.ungated ? 1 : 2);
    p.down = p.gate_up + j->hidden * width;
    p.b_gate_up = p.down + inner * j->hidden;
    p.b_down = p.b_gate_up + width;
    p.w_shared_gate = p.b_down + j->hidden;
    p.shared_padding = p.w_shared_gate + j->hidden;
    p.end = device_round_up(p.shared_padding, DENSE_GRAD_ALIGNMENT);
    return p;
}
