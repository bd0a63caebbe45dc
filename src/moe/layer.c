/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a layer, and cutting up the memory that its caller brings. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "api/config.h"
#include "base/error.h"
#include "base/sized.h"
#include "moe/moe.h"
#include "plan/plan.h"
#include "rules/convert.h"
#include "rules/gate_layout.h"

#define KNOWN_FLAGS (EPIC_SUM_DENSE | EPIC_RECOMPUTE | EPIC_DISPATCH_AGAIN)

static epic_result read_parts(moe_job *j, const epic_config *config, const epic_moe *moe,
                              size_t size)
{
    TRY(READ_SIZED(&j->moe, moe, size, "moe"));
    const epic_moe *m = &j->moe;
    TRY(layer_read(&j->layer, m->layer, sizeof *m->layer, (int32_t)config->num_ranks));
    TRY(READ_SIZED(&j->router, m->router, sizeof *m->router, "moe.router"));
    TRY(READ_SIZED(&j->experts, m->experts, sizeof *m->experts, "moe.experts"));
    j->has_shared = m->shared != NULL;
    if (j->has_shared) TRY(READ_SIZED(&j->shared, m->shared, sizeof *m->shared, "moe.shared"));
    layer_options_fill(&j->options, m, &j->router, &j->experts,
                       j->has_shared ? &j->shared : NULL);
    return EPIC_OK;
}

static epic_result differ(const char *a, int64_t value, const char *b, int64_t other)
{
    return epic_fail(EPIC_EINVAL, "moe.%s is %lld, moe.%s is %lld: make them equal", a,
                     (long long)value, b, (long long)other);
}

static epic_result check_scaled(const moe_job *j)
{
    if (j->has_shared && j->shared.weight_type == EPIC_E4M3)
        return epic_fail(EPIC_EINVAL,
                         "moe.shared.weight_type is E4M3: only moe.experts may be");
    if (!j->scaled) return EPIC_OK;
    if (!(j->moe.flags & EPIC_DISPATCH_AGAIN))
        return epic_fail(EPIC_EINVAL, "moe.experts.weight_type is E4M3: moe.flags must have "
                                      "EPIC_DISPATCH_AGAIN, as rows of e4m3 are not saved");
    if (j->experts.gemm)
        return epic_fail(EPIC_ENOTSUP, "moe.experts.gemm is given, but weight_type is E4M3: "
                                       "leave gemm NULL for our product");
    return EPIC_OK;
}

static epic_result check_parts(const moe_job *j, const epic_config *config)
{
    const epic_layer *layer = &j->layer;
    const epic_router *router = &j->router;
    if (layer->layout != EPIC_EXPERT_MAJOR)
        return epic_fail(EPIC_EINVAL, "moe.layer.layout is %u: EPIC_EXPERT_MAJOR is needed",
                         layer->layout);
    if (router->num_experts != layer_num_ids(layer))
        return differ("router.num_experts", router->num_experts,
                      layer->num_logical ? "layer.num_logical" : "layer.num_experts",
                      layer_num_ids(layer));
    if (router->top_k != layer->top_k)
        return differ("router.top_k", router->top_k, "layer.top_k", layer->top_k);
    TRY(check_scaled(j));
    if (j->has_shared && j->shared.num_local_experts != 1)
        return epic_fail(EPIC_EINVAL, "moe.shared.num_local_experts is %u: it is one expert",
                         j->shared.num_local_experts);
    if (j->has_shared && j->shared.hidden != j->experts.hidden)
        return differ("shared.hidden", j->shared.hidden, "experts.hidden", j->experts.hidden);
    if (j->has_shared && j->shared.row_type != j->experts.row_type)
        return differ("shared.row_type", j->shared.row_type, "experts.row_type",
                      j->experts.row_type);
    if (j->has_shared && j->shared.weighting != EPIC_WEIGHT_LATE)
        return epic_fail(EPIC_EINVAL, "moe.shared.weighting is %u: EPIC_WEIGHT_LATE is needed",
                         j->shared.weighting);
    if (j->row_bytes > config->max_row_bytes)
        return epic_fail(EPIC_EINVAL,
                         "moe.experts.hidden is %lld: a row takes %lld bytes, "
                         "config.max_row_bytes is %lld",
                         (long long)j->hidden, (long long)j->row_bytes,
                         (long long)config->max_row_bytes);
    if (j->wide && j->top_k * 8 > config->max_row_bytes)
        return epic_fail(EPIC_EINVAL,
                         "moe.layer.top_k is %u: beside a row of F64 as many float64 weights "
                         "travel, %lld bytes, and config.max_row_bytes is %lld",
                         layer->top_k, (long long)j->top_k * 8,
                         (long long)config->max_row_bytes);
    return EPIC_OK;
}

static bool is_coeff(double x)
{
    return isfinite(x) && x >= 0;
}

static epic_result check_moe(const moe_job *j)
{
    const epic_moe *m = &j->moe;
    if (!is_coeff(m->balance_coeff) || !is_coeff(m->z_coeff))
        return epic_fail(EPIC_EINVAL,
                         "moe.balance_coeff is %g, moe.z_coeff is %g: 0 (no loss) or more is "
                         "needed; less would be a reward",
                         m->balance_coeff, m->z_coeff);
    if (m->sequence_tokens < 0)
        return epic_fail(EPIC_EINVAL,
                         "moe.sequence_tokens is %lld: a length, or 0 for the plain loss",
                         (long long)m->sequence_tokens);
    if (m->flags & ~(uint32_t)KNOWN_FLAGS)
        return epic_fail(EPIC_EINVAL,
                         "moe.flags is 0x%x: only EPIC_SUM_DENSE, EPIC_RECOMPUTE and "
                         "EPIC_DISPATCH_AGAIN are known",
                         m->flags);
    if (m->reserved)
        return epic_fail(EPIC_EINVAL, "moe.reserved is %u: it must be 0", m->reserved);
    if (m->capacity < 0 || m->capacity > INT32_MAX)
        return epic_fail(EPIC_EINVAL,
                         "moe.capacity is %lld: 1 to 2147483647 slots are possible "
                         "(epic_capacity_bound never overflows), or EPIC_CAPACITY_EXACT",
                         (long long)m->capacity);
    if (j->wide && m->flags & EPIC_SUM_DENSE)
        return epic_fail(EPIC_EINVAL, "moe.flags has EPIC_SUM_DENSE: gradients of F64 rows are "
                                      "float64, which epic_allreduce_sum does not add");
    return EPIC_OK;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t levels_of(int64_t blocks)
{
    int64_t levels = 1;
    while (blocks > 1) {
        blocks = (blocks + 1) / 2;
        levels++;
    }
    return levels;
}

static epic_result measure_experts(const char *name, const epic_experts *experts, int64_t slots,
                                   epic_experts_memory_info *out)
{
    if (epic_experts_memory(experts, slots, out) == EPIC_OK) return EPIC_OK;
    char why[512];
    snprintf(why, sizeof why, "%s", epic_sentence());
    return epic_fail(EPIC_EINVAL, "moe.%s: %s", name, why);
}

static void take_device_sizes(epic_experts_memory_info *info)
{
    info->saved_bytes = info->cuda_saved_bytes;
    info->forward_bytes = info->cuda_forward_bytes;
    info->backward_bytes = info->cuda_backward_bytes;
}

/* Backward has rows of row_type whatever forward had, and weights of either. */
static epic_result measure_scaled(moe_job *j)
{
    epic_experts_memory_info scaled_info;
    epic_experts scaled = j->experts;
    scaled.weight_type = EPIC_E4M3;
    TRY(measure_experts("experts", &scaled, j->capacity, &scaled_info));
    j->experts_memory.cuda_forward_bytes = scaled_info.cuda_forward_bytes;
    j->experts_memory.cuda_backward_bytes =
        larger(j->experts_memory.cuda_backward_bytes, scaled_info.cuda_backward_bytes);
    return EPIC_OK;
}

static epic_result measure(moe_job *j, const epic_config *config)
{
    TRY(measure_experts("experts", &j->experts, j->capacity, &j->experts_memory));
    if (j->scaled) TRY(measure_scaled(j));
    if (j->has_shared) TRY(measure_experts("shared", &j->shared, j->block, &j->shared_memory));
    if (j->device) take_device_sizes(&j->experts_memory);
    if (j->device) take_device_sizes(&j->shared_memory);
    j->shared_memory.saved_bytes = round_up(j->shared_memory.saved_bytes, 64);
    j->router_bytes = epic_router_workspace(&j->router);
    if (!j->router_bytes) return EPIC_EINVAL;
    j->plan_bytes = epic_plan_bytes(config, &j->layer);
    if (!j->plan_bytes) return EPIC_EINVAL;
    const bool apart = !j->device || j->moe.flags & EPIC_SUM_DENSE || j->blocks > 1;
    j->dense_levels = apart ? levels_of(j->blocks) : 0;
    j->dense_count = moe_dense_parts(j).end;
    return EPIC_OK;
}

epic_result moe_read(moe_job *j, const epic_config *config, const epic_moe *moe, size_t size,
                     int64_t tokens)
{
    TRY(read_parts(j, config, moe, size));
    j->wide = j->experts.row_type == EPIC_F64;
    j->scaled = j->experts.weight_type == EPIC_E4M3 && !j->wide;
    if (j->scaled) j->experts.weight_type = j->experts.row_type;
    if (j->wide && j->experts.weighting == EPIC_WEIGHT_LATE)
        j->experts.weighting = EPIC_WEIGHT_EARLY; /* combine's weights are float32 */
    j->real_type = j->wide ? EPIC_F64 : EPIC_F32;
    j->real_bytes = convert_bytes(j->real_type);
    j->hidden = j->experts.hidden;
    j->row_bytes = j->hidden * convert_bytes(j->experts.row_type);
    j->columns = (int64_t)j->router.num_experts + j->router.zero_experts;
    j->top_k = j->layer.top_k;
    j->capacity = j->moe.capacity;
    j->blocks = j->layer.sum_order == EPIC_TREE ? j->layer.leaves / config->num_ranks : 1;
    j->block = (tokens + j->blocks - 1) / j->blocks;
    j->tokens = j->block * j->blocks;
    TRY(check_moe(j));
    TRY(measure(j, config));
    return check_parts(j, config);
}

dense_parts moe_dense_parts(const moe_job *j)
{
    dense_parts p = {0};
    p.b_gate = j->hidden * j->columns;
    p.scale = p.b_gate + j->columns;
    p.gate_up = p.scale + j->columns;
    p.down = p.b_gate_up = p.b_down = p.w_shared_gate = p.end = p.gate_up;
    if (!j->has_shared) return p;
    const int64_t inner = j->shared.inner, width = inner * (j->shared.ungated ? 1 : 2);
    p.down = p.gate_up + j->hidden * width;
    p.b_gate_up = p.down + inner * j->hidden;
    p.b_down = p.b_gate_up + width;
    p.w_shared_gate = p.b_down + j->hidden;
    p.end = p.w_shared_gate + j->hidden;
    return p;
}

/* ------------------------------------------------------------------------ cutting ---- */

static void *take(unsigned char *base, int64_t *used, int64_t bytes)
{
    void *at = base ? base + *used : NULL;
    *used += round_up(bytes, 64);
    return at;
}

static void cut_saved(moe_job *j, unsigned char *base)
{
    int64_t used = 0;
    const int64_t choices = j->tokens * j->top_k, slots = j->capacity;
    const int64_t experts = j->layer.num_experts;
    const int64_t local = j->device ? larger(j->experts.num_local_experts, experts)
                                    : j->experts.num_local_experts; /* whatever a table says */
    moe_saved *s = &j->saved;
    s->plan = take(base, &used, j->plan_bytes); /* from here: what epic_moe_plan leaves */
    s->logits = take(base, &used, j->tokens * j->columns * j->real_bytes);
    s->topk_idx = take(base, &used, choices * 4);
    s->weights = take(base, &used, choices * j->real_bytes);
    s->expert_rows = take(base, &used, local * 4);
    s->expert_tokens = take(base, &used, local * 4);
    s->load = take(base, &used, (int64_t)j->layer.num_experts * 4);
    s->logical_load = take(base, &used, (int64_t)j->layer.num_logical * 4);
    s->total_tokens = take(base, &used, 8); /* to here: whatever the capacity is */
    const bool keeps = !(j->moe.flags & EPIC_RECOMPUTE);
    const bool keeps_rows = !(j->moe.flags & EPIC_DISPATCH_AGAIN);
    s->shared = take(base, &used, keeps ? j->blocks * j->shared_memory.saved_bytes : 0);
    s->recv = take(base, &used, keeps_rows ? slots * j->row_bytes : 0);
    s->slot_weights = take(base, &used, slots * j->real_bytes);
    s->slot_k = take(base, &used, j->wide ? slots * 4 : 0);
    s->experts = take(base, &used, keeps ? j->experts_memory.saved_bytes : 0);
    j->saved_bytes = used;
}

/* What is saved without these flags, and made again here. */
static void cut_unsaved(moe_job *j, unsigned char *base, int64_t *used, bool backward)
{
    const bool scaled = j->scaled && !backward;
    if (j->moe.flags & EPIC_RECOMPUTE) {
        j->saved.shared = take(base, used, j->shared_memory.saved_bytes);
        j->saved.experts = take(base, used, j->experts_memory.saved_bytes);
    }
    if (j->moe.flags & EPIC_DISPATCH_AGAIN)
        j->saved.recv = take(base, used, j->capacity * (scaled ? j->hidden : j->row_bytes));
    if (scaled)
        j->work.recv_scales = take(base, used, j->capacity * experts_blocks(j->hidden) * 4);
}

static void cut_work(moe_job *j, unsigned char *base, bool backward)
{
    int64_t used = 0;
    const int64_t weights_bytes = j->wide ? j->capacity * j->top_k * 8 : 0;
    moe_work *w = &j->work;
    cut_unsaved(j, base, &used, backward);
    w->experts =
        take(base, &used,
             backward ? j->experts_memory.backward_bytes : j->experts_memory.forward_bytes);
    w->shared =
        take(base, &used,
             backward ? j->shared_memory.backward_bytes : j->shared_memory.forward_bytes);
    w->router = take(base, &used, j->router_bytes);
    const int64_t rows = j->device ? 0 : backward ? j->block + 1 : 2;
    w->tile = take(base, &used, j->device ? 0 : j->block * GATE_TILE * j->real_bytes);
    w->rows = take(base, &used, rows * j->hidden * j->real_bytes);
    w->gate =
        take(base, &used,
             j->device ? gate_bytes(j->tokens, j->block, j->hidden, j->columns, backward) : 0);
    const bool adds_rows = j->has_shared || (j->device && j->router.zero_experts);
    w->shared_y = take(base, &used, adds_rows ? j->block * j->row_bytes : 0);
    w->shared_weights = take(base, &used, j->has_shared ? j->block * j->real_bytes : 0);
    w->losses = take(base, &used, 2 * j->blocks * j->real_bytes);
    const bool picks = !backward && (!j->device || j->router.zero_experts);
    w->plan_idx = take(base, &used, picks ? j->tokens * j->top_k * 4 : 0);
    if (j->wide && !backward) {
        w->choice_k = take(base, &used, j->tokens * j->top_k * 4);
        w->recv_weights = take(base, &used, weights_bytes);
    }
    w->y = take(base, &used, backward ? 0 : j->capacity * j->row_bytes);
    if (backward) {
        const int64_t rows_bytes = larger(j->capacity, j->tokens) * j->row_bytes;
        w->d_y = take(base, &used, larger(rows_bytes, weights_bytes));
        w->d_recv = take(base, &used, j->capacity * j->row_bytes);
        w->d_slot_weights = take(base, &used, j->capacity * j->real_bytes);
        w->d_weights = take(base, &used, j->tokens * j->top_k * j->real_bytes);
        w->d_shared_weights = take(base, &used, j->has_shared ? j->block * j->real_bytes : 0);
        w->d_logits = take(base, &used, j->block * j->columns * j->real_bytes);
        w->d_scale = take(base, &used, j->device ? j->columns * 4 : 0);
        w->dense = take(base, &used, j->dense_levels * j->dense_count * j->real_bytes);
    }
    j->work_bytes = used;
}

void moe_cut(moe_job *j, const void *saved, void *workspace, bool backward)
{
    cut_saved(j, (unsigned char *)(uintptr_t)saved);
    cut_work(j, workspace, backward);
}

static void count(moe_job *j, int64_t *saved, int64_t *forward, int64_t *backward)
{
    moe_cut(j, NULL, NULL, false);
    *saved = j->saved_bytes;
    *forward = j->work_bytes;
    moe_cut(j, NULL, NULL, true);
    *backward = j->work_bytes;
}

epic_result epic_moe_memory_v1(const epic_config *config, size_t config_size,
                               const epic_moe *moe, size_t moe_size, epic_moe_memory_info *out,
                               size_t size)
{
    epic_config c;
    TRY(CHECK_PLACE(out, size));
    TRY(config_read_sizes(&c, config, config_size));
    moe_job j = {0};
    TRY(moe_read(&j, &c, moe, moe_size, c.max_tokens));
    epic_moe_memory_info info = {0};
    if (!j.scaled) count(&j, &info.saved_bytes, &info.forward_bytes, &info.backward_bytes);
    if (!j.wide) {
        j = (moe_job){.device = true};
        TRY(moe_read(&j, &c, moe, moe_size, c.max_tokens));
        count(&j, &info.cuda_saved_bytes, &info.cuda_forward_bytes, &info.cuda_backward_bytes);
    }
    WRITE_SIZED(out, &info, size);
    return EPIC_OK;
}
