/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_plan_read and the public calls that return sizes and memory needs. */
#include "api/check.h"
#include "api/config.h"
#include "base/error.h"
#include "base/sized.h"
#include "exchange/exchange.h"
#include "plan/device_read.h"
#include "plan/plan.h"

epic_result config_of_query(epic_config *out, bool *on_device, epic_context *ctx,
                            const epic_config *config, size_t size)
{
    if (!ctx) {
        TRY(config_read(out, config, size));
        return backend_place(on_device, out->backend);
    }
    TRY(context_check(ctx));
    *out = ctx->config;
    *on_device = ctx->backend->transport == NULL;
    return EPIC_OK;
}

static epic_result read_config_and_layer(epic_config *c, epic_layer *l,
                                         const epic_config *config, size_t config_size,
                                         const epic_layer *layer, size_t layer_size)
{
    TRY(config_read_sizes(c, config, config_size));
    return layer_read(l, layer, layer_size, (int32_t)c->num_ranks);
}

epic_result epic_plan_bytes_v1(const epic_config *config, size_t config_size,
                               const epic_layer *layer, size_t layer_size, int64_t *bytes)
{
    epic_config c;
    epic_layer l;
    if (!bytes)
        return epic_fail(EPIC_EINVAL, "bytes is NULL: must point to memory for the result");
    *bytes = 0;
    TRY(read_config_and_layer(&c, &l, config, config_size, layer, layer_size));
    return check_plan_size(&c, &l, bytes);
}

static int64_t min_int64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Returns the maximum number of slots that a rank with `local` experts can need.
 *
 * A token has at most top_k choices on one rank, and with EPIC_DISTINCT at most one choice per
 * local expert. A slab (the slots of one expert) holds at most expert_capacity choices, and
 * each slab that is not empty is padded to a multiple of the alignment. An EPIC_FLAT layer has
 * at most one slot for each token. */
static int64_t capacity_bound(const epic_config *c, const epic_layer *l, int64_t local)
{
    const int64_t tokens = c->max_tokens * c->num_ranks;
    const bool distinct = (l->flags & EPIC_DISTINCT) != 0;
    const int64_t choices = tokens * (distinct ? min_int64(l->top_k, local) : l->top_k);
    int64_t slab = distinct ? tokens : choices;
    if (l->expert_capacity) slab = min_int64(slab, l->expert_capacity);
    if (l->layout == EPIC_FLAT) return min_int64(tokens, local * slab);
    const int64_t padding = min_int64(choices, local) * (l->alignment - 1);
    return min_int64((choices + padding) / l->alignment * l->alignment,
                     local * round_up(slab, l->alignment));
}

/* Returns the maximum number of experts that one rank can own. If `placed` is true, the caller
 * may pass any rank_of_expert. If it is false, each rank owns a contiguous block of experts. */
static int64_t max_local_experts(const epic_config *c, const epic_layer *l, bool placed)
{
    const bool blocks = !placed && l->num_experts % c->num_ranks == 0;
    return blocks ? l->num_experts / c->num_ranks : l->num_experts;
}

epic_result epic_capacity_bound_v1(const epic_config *config, size_t config_size,
                                   const epic_layer *layer, size_t layer_size, int64_t *slots)
{
    epic_config c;
    epic_layer l;
    int64_t plan_bytes;
    if (!slots)
        return epic_fail(EPIC_EINVAL, "slots is NULL: must point to memory for the result");
    *slots = 0;
    TRY(read_config_and_layer(&c, &l, config, config_size, layer, layer_size));
    TRY(check_plan_size(&c, &l, &plan_bytes));
    *slots = capacity_bound(&c, &l, max_local_experts(&c, &l, false));
    return EPIC_OK;
}

epic_result epic_layer_sizes_v1(epic_context *ctx, const epic_layer *layer, size_t layer_size,
                                epic_layer_info *out, size_t size)
{
    epic_layer l;
    epic_layer_info info = {0};
    epic_memory_info memory;
    if (!ctx) return epic_fail(EPIC_EINVAL, "ctx is NULL: must be a context from epic_open");
    TRY(context_check(ctx));
    TRY(CHECK_PLACE(out, size));
    TRY(layer_read(&l, layer, layer_size, ctx->num_members));
    TRY(check_plan_size(&ctx->config, &l, &info.plan_bytes));
    TRY(context_memory(&memory, &ctx->config, ctx->backend));
    const uint32_t ranks = (uint32_t)ctx->num_ranks;
    const uint32_t local = (l.num_experts + ranks - 1) / ranks;
    const uint32_t first = local * (uint32_t)ctx->rank;
    info.capacity =
        capacity_bound(&ctx->config, &l, max_local_experts(&ctx->config, &l, false));
    info.capacity_any_placement =
        capacity_bound(&ctx->config, &l, max_local_experts(&ctx->config, &l, true));
    info.host_bytes = memory.host_bytes;
    info.shared_bytes = memory.shared_bytes;
    info.device_bytes = memory.device_bytes;
    info.num_local_experts = local;
    info.first_expert = first < l.num_experts ? first : l.num_experts;
    WRITE_SIZED(out, &info, size);
    return EPIC_OK;
}

epic_result epic_memory_v1(const epic_config *config, size_t config_size,
                           const epic_layer *layer, size_t layer_size, epic_memory_info *out,
                           size_t size)
{
    epic_config c;
    epic_memory_info info;
    TRY(CHECK_PLACE(out, size));
    TRY(config_read_sizes(&c, config, config_size));
    const epic_backend *backend;
    TRY(backend_find(&backend, c.backend ? backend_resolve_name(c.backend, true) : "shm",
                     (int)c.num_ranks, c.flags));
    TRY(context_memory(&info, &c, backend));
    if (layer)
        TRY(epic_plan_bytes_v1(config, config_size, layer, layer_size, &info.plan_bytes));
    WRITE_SIZED(out, &info, size);
    return EPIC_OK;
}

static epic_result read_host_plan(const void *plan, int64_t plan_bytes, epic_plan_info *out)
{
    plan_view view;
    const enum plan_damage damage = plan_check(&view, plan, plan_bytes, 0, 0, 0);
    if (damage) return epic_fail(EPIC_EINVAL, "plan: %s", plan_damage_name(damage));
    const plan_header *h = view.header;
    *out = (epic_plan_info){.id = h->id,
                            .num_tokens = h->num_tokens,
                            .total_tokens = h->total_tokens,
                            .num_slots = h->num_slots,
                            .capacity = h->capacity,
                            .num_kept = h->num_kept,
                            .num_none = h->num_none,
                            .num_expert_full = h->num_expert_full,
                            .num_rank_full = h->num_rank_full,
                            .num_absent = h->num_absent,
                            .result = h->result,
                            .num_local_experts = (uint32_t)h->num_local,
                            .fate_offset = h->fate,
                            .rank_offset = h->rank_to};
    if (h->layer.sum_order == EPIC_TREE) {
        out->num_leaves = h->layer.leaves / (uint32_t)h->num_members;
        out->first_leaf = (uint32_t)view.position_of[h->rank] * out->num_leaves;
    }
    return EPIC_OK;
}

epic_result epic_plan_read_v1(const void *plan, int64_t plan_bytes, epic_plan_info *out,
                              size_t size)
{
    epic_plan_info info = {0};
    epic_result result;
    TRY(check_plan_bytes(plan, plan_bytes));
    TRY(CHECK_PLACE(out, size));
    if (!device_plan_read(plan, plan_bytes, backend_fetch, &info, &result))
        result = read_host_plan(plan, plan_bytes, &info);
    TRY(result);
    WRITE_SIZED(out, &info, size);
    return EPIC_OK;
}
