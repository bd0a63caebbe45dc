/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the arguments of the public calls. A check that fails writes one error text, which
 * contains the field, its value and the rule. */
#include "api/check.h"

#include "base/arrays.h"
#include "base/error.h"
#include "kernels/kernels.h"
#include "plan/plan.h"
#include "rules/sentences.h"

static epic_result check_flags(uint32_t flags, uint32_t allowed)
{
    if (!(flags & ~allowed)) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "flags is 0x%x: must have no bits other than 0x%x", flags,
                     allowed);
}

static epic_result check_reserved(uint32_t pad)
{
    return pad ? epic_fail(EPIC_EINVAL, "reserved fields must be zero: one is %u", pad)
               : EPIC_OK;
}

epic_result check_plan_bytes(const void *plan, int64_t plan_bytes)
{
    if (plan_bytes < 0)
        return epic_fail(EPIC_EINVAL,
                         "plan_bytes is %lld: must be the value of epic_plan_bytes",
                         (long long)plan_bytes);
    if (!plan) return epic_fail(EPIC_EINVAL, "plan is NULL: must point to the bytes of a plan");
    const call_array arrays[] = {{"plan", plan, 1, 16, false}};
    return CHECK_ARRAYS(arrays);
}

/* Checks a matrix: its row count, its memory, and that row_bytes is at most max_row_bytes. */
static epic_result check_rows(const epic_context *ctx, const char *name, epic_const_rows rows)
{
    if (rows.num_rows < 0 || rows.num_rows > INT32_MAX)
        return epic_fail(EPIC_EINVAL, "%s.num_rows is %lld: must be 0 to 2147483647", name,
                         (long long)rows.num_rows);
    if (rows.row_bytes < 1 || rows.row_bytes > ctx->config.max_row_bytes)
        return epic_fail(EPIC_EINVAL,
                         "%s.row_bytes is %lld: must be 1 to config.max_row_bytes %lld", name,
                         (long long)rows.row_bytes, (long long)ctx->config.max_row_bytes);
    if (!rows.data && rows.num_rows)
        return epic_fail(EPIC_EINVAL, "%s.data is NULL: must point to %lld rows", name,
                         (long long)rows.num_rows);
    return EPIC_OK;
}

/* Checks that all fields of an unused matrix are zero. `why` is the last part of the error
 * text. */
static epic_result check_absent(const char *name, epic_const_rows rows, const char *why)
{
    if (!rows.data && !rows.num_rows && !rows.row_bytes) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s has %lld rows of %lld bytes: must be zero; %s", name,
                     (long long)rows.num_rows, (long long)rows.row_bytes, why);
}

/* Checks that two matrices have rows of the same size. */
static epic_result check_equal(const char *a, epic_const_rows rows_a, const char *b,
                               epic_const_rows rows_b)
{
    if (rows_a.row_bytes == rows_b.row_bytes) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s.row_bytes is %lld, %s.row_bytes is %lld: make them equal",
                     a, (long long)rows_a.row_bytes, b, (long long)rows_b.row_bytes);
}

static epic_result check_whole(const char *name, epic_const_rows rows, uint32_t type)
{
    const int64_t size = (int64_t)epic_type_bytes(type);
    if (rows.row_bytes % size == 0) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s.row_bytes is %lld: elements of type %s have %lld bytes",
                     name, (long long)rows.row_bytes, epic_type_name(type), (long long)size);
}

/* Checks that the backend can add rows of this type. Only host backends can add EPIC_F64. */
static epic_result check_summed(const epic_context *ctx, uint32_t type)
{
    const bool host = ctx->backend->transport != NULL;
    if (type == EPIC_F32 || type == EPIC_BF16 || type == EPIC_F16) return EPIC_OK;
    if (type == EPIC_F64 && host) return EPIC_OK;
    if (type == EPIC_F64)
        return epic_fail(EPIC_ENOTSUP,
                         "type is EPIC_F64: only host contexts add it, this one is %s",
                         ctx->backend_name);
    return epic_fail(EPIC_EINVAL,
                     "type is %u: EPIC_F32, EPIC_BF16, EPIC_F16 and EPIC_F64 can be added",
                     type);
}

/* Checks that the arrays named `a` and `b` are either both set or both NULL. */
static epic_result check_pair(const char *a, const void *given_a, const char *b,
                              const void *given_b)
{
    if (!given_a == !given_b) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s is NULL and %s is not: pass both or neither",
                     given_a ? b : a, given_a ? a : b);
}

/* Checks the row sizes of a quantization. A row of `in` has n elements of `type`, and a row of
 * `out` has n bytes. A row of `scales` has 4 bytes for every 128 elements (EPIC_QUANTIZE_1X128)
 * or 1 byte for every 32 elements (EPIC_QUANTIZE_1X32). */
static epic_result check_quantized(const epic_context *ctx, uint32_t quantize, uint32_t type,
                                   const char *in_name, epic_const_rows in,
                                   const char *out_name, epic_const_rows out,
                                   const char *scales_name, epic_const_rows scales)
{
    if (quantize > EPIC_QUANTIZE_1X32)
        return epic_fail(EPIC_EINVAL, "quantize is %u: must be an epic_quantize", quantize);
    if (type != EPIC_F32 && type != EPIC_BF16 && type != EPIC_F16)
        return epic_fail(EPIC_EINVAL,
                         "type is %u with quantize %u: EPIC_F32, EPIC_BF16 and EPIC_F16 can be "
                         "quantized",
                         type, quantize);
    TRY(check_whole(in_name, in, type));
    const int64_t n = in.row_bytes / (int64_t)epic_type_bytes(type);
    const int64_t wide = quantize == EPIC_QUANTIZE_1X128 ? (n + 127) / 128 * 4 : (n + 31) / 32;
    if (out.row_bytes != n)
        return epic_fail(EPIC_EINVAL, "%s.row_bytes is %lld: %lld elements make as many bytes",
                         out_name, (long long)out.row_bytes, (long long)n);
    TRY(check_rows(ctx, scales_name, scales));
    if (scales.row_bytes != wide)
        return epic_fail(
            EPIC_EINVAL, "%s.row_bytes is %lld: the scales of %lld elements take %lld",
            scales_name, (long long)scales.row_bytes, (long long)n, (long long)wide);
    if (scales.num_rows < out.num_rows)
        return epic_fail(EPIC_EINVAL, "%s.num_rows is %lld: must be at least %s.num_rows %lld",
                         scales_name, (long long)scales.num_rows, out_name,
                         (long long)out.num_rows);
    return EPIC_OK;
}

/* Describes the memory of a matrix for check_arrays(). The address of the matrix must be a
 * multiple of `unit` bytes. `out` is true if the call writes the matrix. */
static call_array of_rows(const char *name, epic_const_rows rows, size_t unit, bool out)
{
    return (call_array){name, rows.data, rows.num_rows * rows.row_bytes, unit, out};
}

#define ROWS_IN(args, rows, unit) of_rows(#rows ".data", (args)->rows, unit, false)
#define ROWS_OUT(args, rows, unit) \
    of_rows(#rows ".data", epic_rows_as_const((args)->rows), unit, true)

epic_result check_plan_size(const epic_config *config, const epic_layer *layer, int64_t *bytes)
{
    *bytes = 0;
    if (layer->top_k > config->max_top_k)
        return epic_fail(EPIC_EINVAL,
                         "layer.top_k is %u: must be at most config.max_top_k %u; open the "
                         "context with more, or 0 for 64",
                         layer->top_k, config->max_top_k);
    *bytes = plan_bytes_bound(layer, (int32_t)config->num_ranks, config->max_tokens);
    if (*bytes) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "config.max_tokens %lld * num_ranks %u * top_k %u, with padding, is more "
                     "than 2147483647 slots; lower max_tokens",
                     (long long)config->max_tokens, config->num_ranks, layer->top_k);
}

/* Checks the tables of replicas. If the layer has replicas, logical_of_expert must be set. If
 * the layer has no replicas, logical_of_expert and logical_load must be NULL. */
static epic_result check_replicas(const epic_plan_args *a, const epic_layer *layer)
{
    if (layer->num_logical && !a->logical_of_expert)
        return epic_fail(EPIC_EINVAL,
                         "logical_of_expert is NULL: must be set because layer.num_logical is "
                         "%u; pass the logical expert of each expert",
                         layer->num_logical);
    if (!layer->num_logical && (a->logical_of_expert || a->logical_load))
        return epic_fail(EPIC_EINVAL,
                         "%s is given: layer.num_logical is 0, the layer has no replicas; "
                         "leave it NULL",
                         a->logical_of_expert ? "logical_of_expert" : "logical_load");
    return EPIC_OK;
}

epic_result check_plan_args(const epic_context *ctx, const epic_plan_args *a,
                            const epic_layer *layer)
{
    TRY(check_plan_bytes(a->plan, a->plan_bytes));
    TRY(check_flags(a->flags, 0));
    if (a->num_tokens < 0 || a->num_tokens > ctx->config.max_tokens)
        return epic_fail(EPIC_EINVAL,
                         "num_tokens is %lld: must be 0 to config.max_tokens %lld; open with "
                         "more",
                         (long long)a->num_tokens, (long long)ctx->config.max_tokens);
    if (!a->topk_idx && a->num_tokens)
        return epic_fail(EPIC_EINVAL, "topk_idx is NULL: must point to the ids of %lld tokens",
                         (long long)a->num_tokens);
    if (a->index_type && a->index_type != EPIC_I32 && a->index_type != EPIC_I64)
        return epic_fail(EPIC_EINVAL,
                         "index_type is %u: EPIC_I32 (or 0) and EPIC_I64 are "
                         "possible",
                         a->index_type);
    if (a->capacity < 0 || a->capacity > INT32_MAX)
        return epic_fail(EPIC_EINVAL,
                         "capacity is %lld: must be 1 to 2147483647, or "
                         "EPIC_CAPACITY_EXACT",
                         (long long)a->capacity);
    if (!a->rank_of_expert && layer->num_experts % (uint32_t)ctx->num_ranks)
        return epic_fail(EPIC_EINVAL,
                         "layer.num_experts is %u: must be a multiple of num_ranks %d; or pass "
                         "rank_of_expert",
                         layer->num_experts, ctx->num_ranks);
    TRY(check_replicas(a, layer));
    int64_t needed;
    TRY(check_plan_size(&ctx->config, layer, &needed));
    if (a->plan_bytes < needed)
        return epic_fail(
            EPIC_EINVAL,
            "plan_bytes is %lld: must be at least %lld, the result of epic_plan_bytes",
            (long long)a->plan_bytes, (long long)needed);
    const int64_t experts = layer->num_experts, choices = a->num_tokens * layer->top_k;
    /* `local` is a lower bound of num_local_experts. With a placement table in a group that
     * ranks may have left, it is 0, because all experts of the table may be on ranks that have
     * left. */
    const bool any_empty = a->rank_of_expert && context_members(ctx);
    const int64_t local = any_empty ? 0 : (experts + ctx->num_ranks - 1) / ctx->num_ranks;
    const call_array arrays[] = {
        {"plan", a->plan, needed, 16, true},
        ARRAY_IN(a, topk_idx, choices, a->index_type == EPIC_I64 ? 8 : 4),
        ARRAY_IN(a, rank_of_expert, experts, 4),
        ARRAY_IN(a, logical_of_expert, experts, 4),
        ARRAY_IN(a, capacity_limit, 1, 4),
        ARRAY_OUT(a, expert_rows, local, 4),
        ARRAY_OUT(a, expert_tokens, local, 4),
        ARRAY_OUT(a, load, experts, 4),
        ARRAY_OUT(a, logical_load, layer->num_logical, 4),
        ARRAY_OUT(a, demand, 1, 4),
        ARRAY_OUT(a, expert_rows_i64, local, 8),
        ARRAY_OUT(a, expert_tokens_i64, local, 8)};
    return CHECK_ARRAYS(arrays);
}

static epic_result check_dispatch_arrays(const epic_dispatch_args *a)
{
    const size_t unit = a->quantize ? epic_type_bytes(a->type) : 1;
    const call_array arrays[] = {{"plan", a->plan, a->plan_bytes, 16, false},
                                 ROWS_IN(a, tokens, unit),
                                 ROWS_IN(a, scales, 1),
                                 ARRAY_IN(a, weights, a->tokens.num_rows, 4),
                                 ROWS_OUT(a, recv, 1),
                                 ROWS_OUT(a, recv_scales, 1),
                                 ARRAY_OUT(a, slot_weights, a->recv.num_rows, 4),
                                 ARRAY_OUT(a, recv_expert, a->recv.num_rows, 4)};
    return CHECK_ARRAYS(arrays);
}

static epic_result check_scales(const epic_context *ctx, const epic_dispatch_args *a)
{
    if (!a->scales.data && !a->recv_scales.data && !a->scales.row_bytes &&
        !a->recv_scales.row_bytes)
        return EPIC_OK;
    TRY(check_rows(ctx, "scales", a->scales));
    TRY(check_rows(ctx, "recv_scales", epic_rows_as_const(a->recv_scales)));
    TRY(check_equal("scales", a->scales, "recv_scales", epic_rows_as_const(a->recv_scales)));
    if (a->scales.num_rows != a->tokens.num_rows)
        return epic_fail(EPIC_EINVAL, "scales.num_rows is %lld: tokens has %lld rows",
                         (long long)a->scales.num_rows, (long long)a->tokens.num_rows);
    if (a->recv_scales.num_rows < a->recv.num_rows)
        return epic_fail(EPIC_EINVAL,
                         "recv_scales.num_rows is %lld: recv has %lld rows, pass "
                         "as many",
                         (long long)a->recv_scales.num_rows, (long long)a->recv.num_rows);
    return EPIC_OK;
}

/* Returns EPIC_EINVAL if the layer is EPIC_FLAT and the caller has set an array with an element
 * per slot, such as slot_weights. In a FLAT layer all choices of a token on this rank share one
 * slot, so the slot has no single weight. */
static epic_result check_by_slot(const epic_layer *layer, const char *name, const void *given)
{
    if (!given || layer->layout != EPIC_FLAT) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, SENTENCE_BY_SLOT, name);
}

epic_result check_dispatch_args(const epic_context *ctx, const epic_dispatch_args *a)
{
    TRY(check_plan_bytes(a->plan, a->plan_bytes));
    TRY(check_flags(a->flags, EPIC_ZERO_TAIL | EPIC_LEAVE_PADDING));
    TRY(check_reserved(a->reserved));
    if (a->type > EPIC_I64)
        return epic_fail(EPIC_EINVAL, "type is %u: must be an epic_type", a->type);
    TRY(check_rows(ctx, "tokens", a->tokens));
    TRY(check_rows(ctx, "recv", epic_rows_as_const(a->recv)));
    TRY(check_pair("weights", a->weights, "slot_weights", a->slot_weights));
    if (a->recv_expert && a->layer->layout != EPIC_FLAT)
        return epic_fail(EPIC_EINVAL, SENTENCE_RECV_EXPERT);
    if (a->quantize) {
        TRY(check_absent("scales", a->scales,
                         "dispatch computes the scales of quantized rows"));
        TRY(check_quantized(ctx, a->quantize, a->type, "tokens", a->tokens, "recv",
                            epic_rows_as_const(a->recv), "recv_scales",
                            epic_rows_as_const(a->recv_scales)));
    } else {
        TRY(check_equal("tokens", a->tokens, "recv", epic_rows_as_const(a->recv)));
        TRY(check_scales(ctx, a));
    }
    return check_dispatch_arrays(a);
}

epic_result check_combine_args(const epic_context *ctx, const epic_combine_args *a)
{
    TRY(check_plan_bytes(a->plan, a->plan_bytes));
    TRY(check_flags(a->flags, 0));
    TRY(check_summed(ctx, a->type));
    TRY(check_rows(ctx, "rows", a->rows));
    TRY(check_rows(ctx, "out", epic_rows_as_const(a->out)));
    TRY(check_equal("rows", a->rows, "out", epic_rows_as_const(a->out)));
    TRY(check_whole("rows", a->rows, a->type));
    TRY(check_by_slot(a->layer, "slot_weights", a->slot_weights));
    const size_t unit = epic_type_bytes(a->type);
    const call_array arrays[] = {{"plan", a->plan, a->plan_bytes, 16, false},
                                 ROWS_IN(a, rows, unit),
                                 ARRAY_IN(a, slot_weights, a->rows.num_rows, 4),
                                 ROWS_OUT(a, out, unit)};
    return CHECK_ARRAYS(arrays);
}

epic_result check_dispatch_backward_args(const epic_context *ctx,
                                         const epic_dispatch_backward_args *a)
{
    TRY(check_plan_bytes(a->plan, a->plan_bytes));
    TRY(check_flags(a->flags, 0));
    TRY(check_summed(ctx, a->type));
    TRY(check_rows(ctx, "d_recv", a->d_recv));
    TRY(check_rows(ctx, "d_tokens", epic_rows_as_const(a->d_tokens)));
    TRY(check_equal("d_recv", a->d_recv, "d_tokens", epic_rows_as_const(a->d_tokens)));
    TRY(check_pair("d_slot_weights", a->d_slot_weights, "d_weights", a->d_weights));
    TRY(check_whole("d_recv", a->d_recv, a->type));
    const size_t unit = epic_type_bytes(a->type);
    const call_array arrays[] = {{"plan", a->plan, a->plan_bytes, 16, false},
                                 ROWS_IN(a, d_recv, unit),
                                 ARRAY_IN(a, d_slot_weights, a->d_recv.num_rows, 4),
                                 ROWS_OUT(a, d_tokens, unit),
                                 ARRAY_OUT(a, d_weights, a->d_tokens.num_rows, 4)};
    return CHECK_ARRAYS(arrays);
}

static epic_result check_combine_backward_arrays(const epic_combine_backward_args *a)
{
    const size_t unit = epic_type_bytes(a->type);
    const call_array arrays[] = {{"plan", a->plan, a->plan_bytes, 16, false},
                                 ROWS_IN(a, d_out, unit),
                                 ROWS_IN(a, rows, unit),
                                 ARRAY_IN(a, slot_weights, a->d_rows.num_rows, 4),
                                 ROWS_OUT(a, d_rows, a->quantize ? 1 : unit),
                                 ROWS_OUT(a, d_rows_scales, 1),
                                 ARRAY_OUT(a, d_slot_weights, a->d_rows.num_rows, 4)};
    return CHECK_ARRAYS(arrays);
}

epic_result check_combine_backward_args(const epic_context *ctx,
                                        const epic_combine_backward_args *a)
{
    TRY(check_plan_bytes(a->plan, a->plan_bytes));
    TRY(check_flags(a->flags, EPIC_ZERO_TAIL | EPIC_LEAVE_PADDING));
    TRY(check_reserved(a->reserved));
    TRY(check_summed(ctx, a->type));
    TRY(check_rows(ctx, "d_out", a->d_out));
    TRY(check_whole("d_out", a->d_out, a->type));
    TRY(check_rows(ctx, "d_rows", epic_rows_as_const(a->d_rows)));
    TRY(check_by_slot(a->layer, "slot_weights", a->slot_weights));
    TRY(check_by_slot(a->layer, "d_slot_weights", a->d_slot_weights));
    if (a->d_slot_weights) {
        TRY(check_rows(ctx, "rows", a->rows));
        TRY(check_equal("rows", a->rows, "d_out", a->d_out));
        TRY(check_whole("rows", a->rows, a->type));
    } else {
        TRY(check_absent("rows", a->rows, "only d_slot_weights needs it"));
    }
    if (a->quantize) {
        TRY(check_quantized(ctx, a->quantize, a->type, "d_out", a->d_out, "d_rows",
                            epic_rows_as_const(a->d_rows), "d_rows_scales",
                            epic_rows_as_const(a->d_rows_scales)));
    } else {
        TRY(check_absent("d_rows_scales", epic_rows_as_const(a->d_rows_scales),
                         "only quantize needs it"));
        TRY(check_equal("d_rows", epic_rows_as_const(a->d_rows), "d_out", a->d_out));
    }
    return check_combine_backward_arrays(a);
}

static epic_result check_numbers(const char *name, const float *data, int64_t count)
{
    if (data || !count) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s is NULL: must point to %lld numbers", name,
                     (long long)count);
}

/* Checks the arguments of epic_sum_replicas. data->row_bytes may exceed config.max_row_bytes,
 * because a row of `data` holds the weights of an expert, not a token. */
epic_result check_sum_replicas_args(const epic_sum_replicas_args *a)
{
    const epic_rows *data = &a->data;
    TRY(check_plan_bytes(a->plan, a->plan_bytes));
    TRY(check_flags(a->flags, 0));
    TRY(check_reserved(a->reserved));
    if (data->num_rows < 0 || data->num_rows > MAX_EXPERTS)
        return epic_fail(EPIC_EINVAL, "data.num_rows is %lld: must be 0 to %d experts",
                         (long long)data->num_rows, MAX_EXPERTS);
    if (data->row_bytes < 0 || data->row_bytes > INT64_MAX / MAX_EXPERTS)
        return epic_fail(EPIC_EINVAL, "data.row_bytes is %lld: must be 0 to %lld",
                         (long long)data->row_bytes, (long long)(INT64_MAX / MAX_EXPERTS));
    TRY(check_whole("data", epic_rows_as_const(a->data), EPIC_F32));
    const call_array arrays[] = {{"plan", a->plan, a->plan_bytes, 16, false},
                                 ROWS_OUT(a, data, 4),
                                 ARRAY_OUT(a, workspace, data->row_bytes / 4, 4)};
    TRY(CHECK_ARRAYS(arrays));
    TRY(check_numbers("data.data", data->data, data->num_rows * data->row_bytes / 4));
    return check_numbers("workspace", a->workspace, data->row_bytes / 4);
}

epic_result check_sum_args(const epic_context *ctx, const epic_allreduce_sum_args *a)
{
    TRY(check_flags(a->flags, 0));
    if (a->count < 0 || a->count > INT64_MAX / 8)
        return epic_fail(EPIC_EINVAL, "count is %lld: must be 0 to %lld", (long long)a->count,
                         (long long)(INT64_MAX / 8));
    const call_array arrays[] = {ARRAY_OUT(a, data, a->count, 4)};
    TRY(CHECK_ARRAYS(arrays));
    TRY(check_numbers("data", a->data, a->count));
    if (a->order > EPIC_TREE)
        return epic_fail(EPIC_EINVAL, "order is %u: must be EPIC_BY_RANK or EPIC_TREE",
                         a->order);
    if (a->order == EPIC_TREE && ctx->num_members & (ctx->num_members - 1))
        return epic_fail(
            EPIC_EINVAL, "order is EPIC_TREE: %s %d is no power of two; use EPIC_BY_RANK",
            context_members(ctx) ? "the number of members" : "num_ranks", ctx->num_members);
    return EPIC_OK;
}

epic_result check_window_args(const epic_window_args *a, bool registers)
{
    /* window_place() packs a window's index and a 48-bit offset into 64 bits, so `bytes` must
     * fit into 48 bits */
    const int64_t most = (INT64_C(1) << 48) - 1;
    TRY(check_reserved(a->reserved));
    if (a->bytes < 0 || a->bytes > most)
        return epic_fail(EPIC_EINVAL, "bytes is %lld: must be 0 to %lld", (long long)a->bytes,
                         (long long)most);
    if (a->fd_offset < 0)
        return epic_fail(
            EPIC_EINVAL,
            "fd_offset is %lld: must be the offset of data in the file, at least 0",
            (long long)a->fd_offset);
    if (!registers && (a->data || a->fd > 0 || a->fd_offset))
        return epic_fail(EPIC_EINVAL,
                         "%s is given: must be zero, because the call allocates the memory; "
                         "epic_window_register takes memory of the caller",
                         a->data     ? "data"
                         : a->fd > 0 ? "fd"
                                     : "fd_offset");
    if (registers && a->bytes && !a->data)
        return epic_fail(EPIC_EINVAL, "data is NULL: must point to %lld bytes",
                         (long long)a->bytes);
    return EPIC_OK;
}
