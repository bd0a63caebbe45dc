/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the public calls that communicate. Each call reads the caller's struct, fills in
 * defaults, checks the arguments, and calls the operation of the device backend or of
 * src/host_ops. */
#include "api/api.h"

#include "api/check.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/sized.h"
#include "exchange/windows.h"
#include "host_ops/host_ops.h"
#include "kernels/kernels.h"
#include "plan/plan.h"

/* Returns EPIC_EINVAL if ctx is NULL. If the group of ctx has failed, returns that failure.
 * Otherwise returns EPIC_OK. */
static epic_result check_context(epic_context *ctx)
{
    if (!ctx) return epic_fail(EPIC_EINVAL, "ctx is NULL: must be a context from epic_open");
    return context_check(ctx);
}

/* Mixes the hash of the layer's options into call->tag. A device backend hashes the tag into
 * the call's signature, which the ranks compare. So if the options differ between ranks, the
 * signatures differ. */
static void add_options_hash(epic_call *call, const op_header_extra *extra)
{
    if (extra && extra->options && extra->options->hash)
        call->tag = hash_join(call->tag, extra->options->hash);
}

/* Sets the row_bytes of a matrix to `bytes` if the caller passed the empty matrix {NULL, 0, 0}.
 * This is a macro, so that it works for both epic_rows and epic_const_rows. */
#define DEFAULT_ROW_BYTES(rows, bytes)                                                         \
    do {                                                                                       \
        if (!(rows).data && !(rows).num_rows && !(rows).row_bytes) (rows).row_bytes = (bytes); \
    } while (0)

/* Reads and checks the arguments of a plan. Copies args->layer to *layer, fills in its
 * defaults, and makes a->layer point to *layer. */
static epic_result read_plan_args(const epic_context *ctx, epic_plan_args *a, epic_layer *layer,
                                  const epic_plan_args *args, size_t size)
{
    TRY(READ_SIZED(a, args, size, "args"));
    TRY(layer_read(layer, a->layer, sizeof *a->layer, ctx->num_members));
    layer_choose_order(layer, ctx->num_ranks, context_relays(ctx, a->rank_of_expert));
    a->layer = layer;
    return check_plan_args(ctx, a, layer);
}

/* Implements epic_plan (extra is NULL) and api_plan. The ranks compare the options of the
 * layer: those in *extra or, if extra is NULL, those of args->moe. */
static epic_result call_plan(epic_context *ctx, const epic_plan_args *args, size_t size,
                             const op_header_extra *extra)
{
    epic_plan_args a;
    epic_layer layer;
    layer_options options;
    TRY(check_context(ctx));
    TRY(read_plan_args(ctx, &a, &layer, args, size));
    TRY(layer_options_read(&options, a.moe));
    const op_header_extra own = {.options = &options};
    if (!extra) extra = &own;
    if (!context_on_device(ctx)) return host_plan(ctx, &a, extra);
    add_options_hash(&a.call, extra);
    return CONTEXT_OP(ctx, plan, &a);
}

epic_result epic_plan_v1(epic_context *ctx, const epic_plan_args *args, size_t size)
{
    return call_plan(ctx, args, size, NULL);
}

epic_result api_plan(epic_context *ctx, const epic_plan_args *args,
                     const op_header_extra *extra)
{
    return call_plan(ctx, args, sizeof *args, extra);
}

/* If `tokens` or `recv` is an empty matrix {NULL, 0, 0}, computes its row_bytes from the
 * row_bytes of the other matrix. Without quantization, does the same for `scales` and
 * `recv_scales`. A quantized row has one byte per element. The sizes have not been checked yet.
 * If the product overflows, sets row_bytes to INT64_MAX, which check_rows() rejects later. */
static void default_dispatch_rows(epic_dispatch_args *a)
{
    const int64_t size = a->quantize ? (int64_t)epic_type_bytes(a->type) : 1;
    int64_t row_bytes;
    if (__builtin_mul_overflow(a->recv.row_bytes, size, &row_bytes)) row_bytes = INT64_MAX;
    DEFAULT_ROW_BYTES(a->tokens, row_bytes);
    DEFAULT_ROW_BYTES(a->recv, size ? a->tokens.row_bytes / size : 0);
    if (a->quantize) return;
    DEFAULT_ROW_BYTES(a->scales, a->recv_scales.row_bytes);
    DEFAULT_ROW_BYTES(a->recv_scales, a->scales.row_bytes);
}

/* Copies the layer of an existing plan to *out, fills in its defaults, and makes *layer point
 * to *out. Replaces the sum order EPIC_BY_HOSTS by EPIC_BY_RANK, except in a group of GPUs on
 * several hosts. In such a group the meaning of EPIC_BY_HOSTS depends on whether the plan was
 * made with a rank_of_expert, which this function does not know. */
static epic_result read_plan_layer(const epic_context *ctx, epic_layer *out,
                                   const epic_layer **layer)
{
    TRY(layer_read(out, *layer, sizeof *out, ctx->num_members));
    if (!context_relays(ctx, NULL)) layer_choose_order(out, ctx->num_ranks, false);
    *layer = out;
    return EPIC_OK;
}

static epic_result call_dispatch(epic_context *ctx, const epic_dispatch_args *args, size_t size,
                                 const op_header_extra *extra)
{
    epic_dispatch_args a;
    epic_layer layer;
    TRY(check_context(ctx));
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(read_plan_layer(ctx, &layer, &a.layer));
    default_dispatch_rows(&a);
    TRY(check_dispatch_args(ctx, &a));
    if (!context_on_device(ctx)) return host_dispatch(ctx, &a, extra);
    add_options_hash(&a.call, extra);
    return CONTEXT_OP(ctx, dispatch, &a);
}

epic_result epic_dispatch_v1(epic_context *ctx, const epic_dispatch_args *args, size_t size)
{
    return call_dispatch(ctx, args, size, NULL);
}

epic_result api_dispatch(epic_context *ctx, const epic_dispatch_args *args,
                         const op_header_extra *extra)
{
    return call_dispatch(ctx, args, sizeof *args, extra);
}

/* Checks that the arguments of the dispatch match the arguments of the plan. Must be called
 * before the plan is made, so that an error leaves the bytes of the plan unchanged. */
static epic_result check_plan_dispatch(const epic_plan_args *p, const epic_dispatch_args *d)
{
    if (p->capacity == EPIC_CAPACITY_EXACT)
        return epic_fail(EPIC_EINVAL,
                         "capacity is EPIC_CAPACITY_EXACT: must be the number of slots of the "
                         "receive buffer, which exists already");
    if (d->tokens.num_rows != p->num_tokens)
        return epic_fail(EPIC_EINVAL, "tokens.num_rows is %lld: num_tokens is %lld",
                         (long long)d->tokens.num_rows, (long long)p->num_tokens);
    if (d->recv.num_rows < p->capacity)
        return epic_fail(EPIC_EINVAL, "recv.num_rows is %lld: must be at least capacity %lld",
                         (long long)d->recv.num_rows, (long long)p->capacity);
    return EPIC_OK;
}

/* Implements epic_plan_dispatch and api_plan_dispatch. Ignores the fields `call`, `layer` and
 * `plan` of *dispatch. Instead uses the fields of *plan with the same names. */
static epic_result call_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                                      size_t plan_size, const epic_dispatch_args *dispatch,
                                      size_t dispatch_size, const op_header_extra *extra)
{
    epic_plan_args p;
    epic_dispatch_args d;
    epic_layer layer;
    layer_options options;
    TRY(check_context(ctx));
    TRY(read_plan_args(ctx, &p, &layer, plan, plan_size));
    TRY(READ_SIZED(&d, dispatch, dispatch_size, "dispatch"));
    d.call = p.call;
    d.layer = p.layer;
    d.plan = p.plan;
    d.plan_bytes = p.plan_bytes;
    default_dispatch_rows(&d);
    TRY(check_dispatch_args(ctx, &d));
    TRY(check_plan_dispatch(&p, &d));
    TRY(layer_options_read(&options, p.moe));
    const op_header_extra own = {.options = &options};
    if (!extra) extra = &own;
    if (!context_on_device(ctx)) return host_plan_dispatch(ctx, &p, &d, extra);
    add_options_hash(&p.call, extra);
    return CONTEXT_OP(ctx, plan_dispatch, &p, &d);
}

epic_result epic_plan_dispatch_v1(epic_context *ctx, const epic_plan_args *plan,
                                  size_t plan_size, const epic_dispatch_args *dispatch,
                                  size_t dispatch_size)
{
    return call_plan_dispatch(ctx, plan, plan_size, dispatch, dispatch_size, NULL);
}

epic_result api_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                              const epic_dispatch_args *dispatch, const op_header_extra *extra)
{
    return call_plan_dispatch(ctx, plan, sizeof *plan, dispatch, sizeof *dispatch, extra);
}

epic_result epic_combine_v1(epic_context *ctx, const epic_combine_args *args, size_t size)
{
    epic_combine_args a;
    epic_layer layer;
    TRY(check_context(ctx));
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(read_plan_layer(ctx, &layer, &a.layer));
    DEFAULT_ROW_BYTES(a.rows, a.out.row_bytes);
    DEFAULT_ROW_BYTES(a.out, a.rows.row_bytes);
    TRY(check_combine_args(ctx, &a));
    if (context_on_device(ctx)) return CONTEXT_OP(ctx, combine, &a);
    return host_combine(ctx, &a);
}

epic_result epic_dispatch_backward_v1(epic_context *ctx,
                                      const epic_dispatch_backward_args *args, size_t size)
{
    epic_dispatch_backward_args a;
    epic_layer layer;
    TRY(check_context(ctx));
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(read_plan_layer(ctx, &layer, &a.layer));
    DEFAULT_ROW_BYTES(a.d_recv, a.d_tokens.row_bytes);
    DEFAULT_ROW_BYTES(a.d_tokens, a.d_recv.row_bytes);
    TRY(check_dispatch_backward_args(ctx, &a));
    if (context_on_device(ctx)) return CONTEXT_OP(ctx, dispatch_backward, &a);
    return host_dispatch_backward(ctx, &a);
}

/* Fills in row_bytes of matrices without rows. All matrices have the row_bytes of d_out, except
 * d_rows if its rows are quantized. */
static void default_combine_backward_rows(epic_combine_backward_args *a)
{
    if (!a->quantize) DEFAULT_ROW_BYTES(a->d_out, a->d_rows.row_bytes);
    if (a->d_slot_weights) DEFAULT_ROW_BYTES(a->d_out, a->rows.row_bytes);
    if (a->d_slot_weights) DEFAULT_ROW_BYTES(a->rows, a->d_out.row_bytes);
    if (!a->quantize) DEFAULT_ROW_BYTES(a->d_rows, a->d_out.row_bytes);
}

static epic_result call_combine_backward(epic_context *ctx,
                                         const epic_combine_backward_args *args, size_t size,
                                         const op_header_extra *extra)
{
    epic_combine_backward_args a;
    epic_layer layer;
    TRY(check_context(ctx));
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(read_plan_layer(ctx, &layer, &a.layer));
    default_combine_backward_rows(&a);
    TRY(check_combine_backward_args(ctx, &a));
    if (!context_on_device(ctx)) return host_combine_backward(ctx, &a, extra);
    add_options_hash(&a.call, extra);
    return CONTEXT_OP(ctx, combine_backward, &a);
}

epic_result epic_combine_backward_v1(epic_context *ctx, const epic_combine_backward_args *args,
                                     size_t size)
{
    return call_combine_backward(ctx, args, size, NULL);
}

epic_result api_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                 const op_header_extra *extra)
{
    return call_combine_backward(ctx, args, sizeof *args, extra);
}

epic_result epic_allreduce_sum_v1(epic_context *ctx, const epic_allreduce_sum_args *args,
                                  size_t size)
{
    epic_allreduce_sum_args a;
    TRY(check_context(ctx));
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(check_sum_args(ctx, &a));
    if (context_on_device(ctx)) return CONTEXT_OP(ctx, allreduce_sum, &a);
    return host_allreduce_sum(ctx, &a);
}

/* Implements epic_window_alloc and epic_window_register. `registers` is true for
 * epic_window_register, where the caller passes the memory, and false for epic_window_alloc. */
static epic_result add_window(epic_context *ctx, const epic_window_args *args, size_t size,
                              epic_window_info *out, size_t out_size, bool registers)
{
    epic_window_args a;
    epic_window_info info = {0};
    TRY(check_context(ctx));
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(CHECK_PLACE(out, out_size));
    TRY(check_window_args(&a, registers));
    TRY(windows_add(ctx, &a, &info));
    WRITE_SIZED(out, &info, out_size);
    return EPIC_OK;
}

epic_result epic_window_alloc_v1(epic_context *ctx, const epic_window_args *args, size_t size,
                                 epic_window_info *out, size_t out_size)
{
    return add_window(ctx, args, size, out, out_size, false);
}

epic_result epic_window_register_v1(epic_context *ctx, const epic_window_args *args,
                                    size_t size, epic_window_info *out, size_t out_size)
{
    return add_window(ctx, args, size, out, out_size, true);
}

epic_result epic_sum_replicas_v1(epic_context *ctx, const epic_sum_replicas_args *args,
                                 size_t size)
{
    epic_sum_replicas_args a;
    TRY(check_context(ctx));
    TRY(READ_SIZED(&a, args, size, "args"));
    TRY(check_sum_replicas_args(&a));
    if (context_on_device(ctx)) return CONTEXT_OP(ctx, sum_replicas, &a);
    return host_sum_replicas(ctx, &a);
}
