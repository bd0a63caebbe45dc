/* SPDX-License-Identifier: Apache-2.0 */
/* Collective operations as custom calls: plan, dispatch, combine, their gradients, and the
 * all-reduce operations.
 *
 * Each table lists the arrays in the order in which epic/jax/steps.py, dispatching.py and
 * replicas.py pass them. Dispatch always uses EPIC_ZERO_TAIL, which zeroes the slots after the
 * last slab (the slots of one expert), because XLA does not initialize the memory of a
 * result. */
#include "handler.h"
#include "options.h"

/* One call of any operation in this file. Each operation uses only the arguments of the one or
 * two core functions that it calls. */
typedef struct step_call {
    handler_call call;
    epic_layer layer;
    /* options of a whole layer that the program composes of single operations; the ranks
     * compare them */
    moe_options moe_options;
    epic_plan_args plan;
    epic_dispatch_args dispatch;
    epic_combine_args combine;
    epic_dispatch_backward_args dispatch_backward;
    epic_combine_backward_args combine_backward;
    epic_allreduce_sum_args sum;
    epic_sum_replicas_args sum_replicas;
    int64_t sum_input_count; /* number of elements of sum_input */
    const float *sum_input;  /* input of the all-reduce; must be the same array as the result */
} step_call;

/* clang-format off */
#define AT(member) offsetof(step_call, member)
#define ROWS(flags, name, types, member, ...) \
    HANDLER_ROWS(flags, name, types, AT(member), __VA_ARGS__)
#define DATA(flags, name, types, member, ...) \
    HANDLER_DATA(flags, name, types, AT(member), __VA_ARGS__)
/* An array of rows whose width and type become the hidden size and the row type of the call. */
#define LEADING_ROWS(text, accepted, size, member, element_member) \
    {.flags = HANDLER_SETS_TYPE, .name = text, .types = accepted, .sets_columns = DIM_HIDDEN, \
     .dims = {size, DIM_HIDDEN}, .rows = AT(member), .element = element_member}
#define PLAN(step) \
    {.kind = HANDLER_PLAN, .name = "plan", .types = FFI_SET_U8, .dims = {DIM_ANY}, \
     .data = AT(step.plan), .count = AT(step.plan_bytes)}
#define SITE {.kind = HANDLER_SITE}
#define CHANNEL {.kind = HANDLER_CHANNEL}
#define OPERATION(name, text, role, first, read, check) \
    static const handler_operation name##_operation = { \
        text, role, sizeof(step_call), AT(first.call), name##_arrays, \
        HANDLER_LENGTH(name##_arrays), read, check, run_##name}; \
    HANDLER_EXPORTS(name)

/* ------------------------------------------------------------------------------ plan ---- */

#define PLAN_INPUTS \
    {.name = "topk_idx", .types = FFI_SET_INDICES, .sets_rows = DIM_TOKENS, \
     .dims = {DIM_TOKENS, DIM_TOP_K}, .data = AT(plan.topk_idx), \
     .element = AT(plan.index_type), .num_rows = AT(plan.num_tokens)}, \
    {.flags = HANDLER_OPTIONAL, .name = "rank_of_expert", .types = FFI_SET_I32, \
     .sets_rows = DIM_COUNTED, .dims = {DIM_EXPERTS}, .data = AT(plan.rank_of_expert)}, \
    DATA(HANDLER_OPTIONAL, "logical_of_expert", FFI_SET_I32, plan.logical_of_expert, \
         DIM_EXPERTS), \
    DATA(HANDLER_OPTIONAL, "capacity_limit", FFI_SET_I32, plan.capacity_limit, DIM_ONE)
#define PLAN_RESULTS \
    {.kind = HANDLER_NEW_PLAN, .flags = HANDLER_RESULT, .name = "plan", .types = FFI_SET_U8, \
     .dims = {DIM_ANY}, .data = AT(plan.plan), .count = AT(plan.plan_bytes)}, \
    DATA(HANDLER_RESULT, "expert_rows", FFI_SET_I32, plan.expert_rows, DIM_COUNTED), \
    DATA(HANDLER_RESULT, "expert_tokens", FFI_SET_I32, plan.expert_tokens, DIM_COUNTED), \
    DATA(HANDLER_RESULT, "load", FFI_SET_I32, plan.load, DIM_EXPERTS), \
    DATA(HANDLER_RESULT, "demand", FFI_SET_I32, plan.demand, DIM_ONE), \
    DATA(HANDLER_RESULT | HANDLER_OPTIONAL, "logical_load", FFI_SET_I32, plan.logical_load, \
         DIM_LOGICAL)
/* clang-format on */

/* Maximum number of ranks in check_plan(). */
enum { MOST_RANKS = 1024 };

/* Checks rank_of_expert on the host: no rank may own more than num_local_experts experts,
 * because the program has no memory for more. Does not check that each entry is a valid rank,
 * because the core does. */
static void check_plan(ffi_reader *reader, handler_call *base)
{
    const step_call *call = (step_call *)base;
    const int32_t *rank_of = call->plan.rank_of_expert;
    if (reader->on_device || rank_of == NULL) return;
    int64_t counts[MOST_RANKS] = {0};
    for (uint32_t e = 0; e < call->layer.num_experts; e++) {
        if (rank_of[e] < 0 || rank_of[e] >= MOST_RANKS) continue;
        if (++counts[rank_of[e]] <= base->sizes[DIM_LOCAL]) continue;
        reader->error = ffi_fail(reader->frame, EPIC_EINVAL,
                                 "rank_of_expert: rank %d has more than num_local_experts %lld",
                                 rank_of[e], (long long)base->sizes[DIM_LOCAL]);
        return;
    }
}

/* Reads the attributes of plan and plan_dispatch, and sets the sizes of their arrays. */
static void read_plan(ffi_reader *reader, handler_call *base)
{
    step_call *call = (step_call *)base;
    call->layer = options_read_layer(reader);
    call->plan.layer = &call->layer;
    if (ffi_read_uint(reader, "has_moe") != 0) {
        options_read_moe(reader, &call->moe_options);
        call->plan.moe = &call->moe_options.moe;
    }
    call->plan.capacity = ffi_read_int(reader, "capacity");
    call->dispatch.flags = EPIC_ZERO_TAIL;
    base->sizes[DIM_TOP_K] = call->layer.top_k;
    base->sizes[DIM_EXPERTS] = call->layer.num_experts;
    base->sizes[DIM_LOGICAL] = call->layer.num_logical;
    base->sizes[DIM_SLOTS] = call->plan.capacity;
    base->sizes[DIM_SLOT_COLUMNS] = 1;
    base->sizes[DIM_LOCAL] = base->sizes[DIM_COUNTED] =
        ffi_read_int(reader, "num_local_experts");
}

/* Runs plan. Writes the channel behind the plan first, so that even a plan that failed has
 * one. */
static epic_result run_plan(handler_call *base)
{
    step_call *call = (step_call *)base;
    handler_write_channel(base, call->plan.plan, call->plan.plan_bytes);
    return epic_plan(base->use.ctx, &call->plan);
}

static const handler_array plan_arrays[] = {PLAN_INPUTS, SITE, CHANNEL, PLAN_RESULTS};
OPERATION(plan, "plan", ROLE_PLAN, plan, read_plan, check_plan)

/* -------------------------------------------------------------------------- dispatch ---- */

/* clang-format off */
#define DISPATCH_INPUTS \
    LEADING_ROWS("tokens", FFI_SET_FLOATS | FFI_SET_U8, DIM_TOKENS, dispatch.tokens, 0), \
    DATA(HANDLER_OPTIONAL, "weights", FFI_SET_F32, dispatch.weights, DIM_TOKENS, DIM_TOP_K)
#define DISPATCH_RECV \
    ROWS(HANDLER_RESULT, "recv", HANDLER_ROW_TYPE, dispatch.recv, DIM_SLOTS, DIM_HIDDEN)
#define SLOT_WEIGHTS \
    DATA(HANDLER_RESULT | HANDLER_OPTIONAL, "slot_weights", FFI_SET_F32, \
         dispatch.slot_weights, DIM_SLOTS, DIM_SLOT_COLUMNS)
#define RECV_EXPERT \
    DATA(HANDLER_RESULT, "recv_expert", FFI_SET_I32, dispatch.recv_expert, DIM_SLOTS, DIM_TOP_K)
/* clang-format on */

/* For a call that uses an existing plan: reads the layer of the plan, and sets the sizes that
 * depend on it. */
static const epic_layer *read_plan_sizes(ffi_reader *reader, step_call *call)
{
    int64_t *sizes = call->call.sizes;
    call->layer = options_read_layer(reader);
    sizes[DIM_TOKENS] = ffi_read_int(reader, "num_tokens");
    sizes[DIM_TOP_K] = call->layer.top_k;
    sizes[DIM_SLOTS] = ffi_read_int(reader, "capacity");
    sizes[DIM_SLOT_COLUMNS] = call->layer.layout == EPIC_FLAT ? call->layer.top_k : 1;
    return &call->layer;
}

static void read_dispatch(ffi_reader *reader, handler_call *base)
{
    step_call *call = (step_call *)base;
    call->dispatch.layer = read_plan_sizes(reader, call);
    call->dispatch.flags = EPIC_ZERO_TAIL;
}

static epic_result run_dispatch(handler_call *base)
{
    step_call *call = (step_call *)base;
    return epic_dispatch(base->use.ctx, &call->dispatch);
}

static const handler_array dispatch_arrays[] = {PLAN(dispatch), DISPATCH_INPUTS, SITE,
                                                DISPATCH_RECV, SLOT_WEIGHTS};
OPERATION(dispatch, "dispatch", ROLE_DISPATCH, dispatch, read_dispatch, NULL)

/* The arrays of a dispatch with layout FLAT. Its results are one row for each token that has
 * experts on this rank, and the local experts of each row. */
static const handler_array dispatch_flat_arrays[] = {
    PLAN(dispatch), DISPATCH_INPUTS, SITE, DISPATCH_RECV, SLOT_WEIGHTS, RECV_EXPERT};
#define run_dispatch_flat run_dispatch
OPERATION(dispatch_flat, "dispatch_flat", ROLE_DISPATCH, dispatch, read_dispatch, NULL)

static void read_dispatch_quantized(ffi_reader *reader, handler_call *base)
{
    read_dispatch(reader, base);
    ((step_call *)base)->dispatch.quantize = ffi_read_uint(reader, "quantize");
}

/* Checks that a row of recv_scales has one scale for each block of 128 or 32 columns. */
static void check_quantized(ffi_reader *reader, handler_call *base)
{
    const step_call *call = (step_call *)base;
    const bool is_wide = call->dispatch.quantize == EPIC_QUANTIZE_1X128;
    const int64_t block = is_wide ? 128 : 32, bytes = is_wide ? 4 : 1;
    const int64_t scales = (base->sizes[DIM_HIDDEN] + block - 1) / block;
    if (call->dispatch.recv_scales.row_bytes != scales * bytes)
        reader->error = ffi_fail(
            reader->frame, EPIC_EINVAL, "recv_scales has rows of %lld bytes: must have %lld",
            (long long)call->dispatch.recv_scales.row_bytes, (long long)(scales * bytes));
}

/* Arrays of a dispatch that quantizes: it sends rows of a float type as e4m3, with float32
 * scales (1x128) or scales of one byte (1x32). */
/* clang-format off */
#define QUANTIZED_ARRAYS \
    PLAN(dispatch), \
    LEADING_ROWS("tokens", FFI_SET_FLOATS, DIM_TOKENS, dispatch.tokens, AT(dispatch.type)), \
    DATA(HANDLER_OPTIONAL, "weights", FFI_SET_F32, dispatch.weights, DIM_TOKENS, DIM_TOP_K), \
    SITE, \
    ROWS(HANDLER_RESULT, "recv", FFI_SET(EPIC_E4M3), dispatch.recv, DIM_SLOTS, DIM_HIDDEN), \
    {.flags = HANDLER_RESULT, .name = "recv_scales", .types = FFI_SET_F32 | FFI_SET_U8, \
     .sets_columns = DIM_SCALES, .dims = {DIM_SLOTS, DIM_SCALES}, \
     .rows = AT(dispatch.recv_scales)}, \
    SLOT_WEIGHTS
/* clang-format on */
static const handler_array dispatch_quantized_arrays[] = {QUANTIZED_ARRAYS};
#define run_dispatch_quantized run_dispatch
OPERATION(dispatch_quantized, "dispatch_quantized", ROLE_DISPATCH, dispatch,
          read_dispatch_quantized, check_quantized)

static const handler_array dispatch_flat_quantized_arrays[] = {QUANTIZED_ARRAYS, RECV_EXPERT};
#define run_dispatch_flat_quantized run_dispatch
OPERATION(dispatch_flat_quantized, "dispatch_flat_quantized", ROLE_DISPATCH, dispatch,
          read_dispatch_quantized, check_quantized)

/* Arrays of a dispatch of 8-bit rows with scales that the caller has computed. XLA passes both
 * as bytes. */
/* clang-format off */
#define SCALED_ARRAYS \
    PLAN(dispatch), \
    LEADING_ROWS("tokens", FFI_SET_U8, DIM_TOKENS, dispatch.tokens, 0), \
    {.name = "scales", .types = FFI_SET_U8, .sets_columns = DIM_SCALES, \
     .dims = {DIM_TOKENS, DIM_SCALES}, .rows = AT(dispatch.scales)}, \
    DATA(HANDLER_OPTIONAL, "weights", FFI_SET_F32, dispatch.weights, DIM_TOKENS, DIM_TOP_K), \
    SITE, \
    DISPATCH_RECV, \
    ROWS(HANDLER_RESULT, "recv_scales", FFI_SET_U8, dispatch.recv_scales, DIM_SLOTS, \
         DIM_SCALES), \
    SLOT_WEIGHTS
/* clang-format on */
static const handler_array dispatch_scaled_arrays[] = {SCALED_ARRAYS};
#define run_dispatch_scaled run_dispatch
OPERATION(dispatch_scaled, "dispatch_scaled", ROLE_DISPATCH, dispatch, read_dispatch, NULL)

static const handler_array dispatch_flat_scaled_arrays[] = {SCALED_ARRAYS, RECV_EXPERT};
#define run_dispatch_flat_scaled run_dispatch
OPERATION(dispatch_flat_scaled, "dispatch_flat_scaled", ROLE_DISPATCH, dispatch, read_dispatch,
          NULL)

static epic_result run_plan_dispatch(handler_call *base)
{
    step_call *call = (step_call *)base;
    handler_write_channel(base, call->plan.plan, call->plan.plan_bytes);
    return epic_plan_dispatch(base->use.ctx, &call->plan, &call->dispatch);
}

static const handler_array plan_dispatch_arrays[] = {
    PLAN_INPUTS, DISPATCH_INPUTS, SITE, CHANNEL, PLAN_RESULTS, DISPATCH_RECV, SLOT_WEIGHTS};
OPERATION(plan_dispatch, "plan_dispatch", ROLE_PLAN, plan, read_plan, check_plan)

static void read_dispatch_backward(ffi_reader *reader, handler_call *base)
{
    step_call *call = (step_call *)base;
    call->dispatch_backward.layer = read_plan_sizes(reader, call);
}

static epic_result run_dispatch_backward(handler_call *base)
{
    step_call *call = (step_call *)base;
    return epic_dispatch_backward(base->use.ctx, &call->dispatch_backward);
}

static const handler_array dispatch_backward_arrays[] = {
    PLAN(dispatch_backward),
    LEADING_ROWS("d_recv", FFI_SET_FLOATS, DIM_SLOTS, dispatch_backward.d_recv,
                 AT(dispatch_backward.type)),
    DATA(HANDLER_OPTIONAL, "d_slot_weights", FFI_SET_F32, dispatch_backward.d_slot_weights,
         DIM_SLOTS, DIM_SLOT_COLUMNS),
    SITE,
    ROWS(HANDLER_RESULT, "d_tokens", HANDLER_ROW_TYPE, dispatch_backward.d_tokens, DIM_TOKENS,
         DIM_HIDDEN),
    DATA(HANDLER_RESULT | HANDLER_OPTIONAL, "d_weights", FFI_SET_F32,
         dispatch_backward.d_weights, DIM_TOKENS, DIM_TOP_K)};
OPERATION(dispatch_backward, "dispatch (backward)", ROLE_DISPATCH_BACKWARD, dispatch_backward,
          read_dispatch_backward, NULL)

/* --------------------------------------------------------------------------- combine ---- */

static void read_combine(ffi_reader *reader, handler_call *base)
{
    step_call *call = (step_call *)base;
    call->combine.layer = read_plan_sizes(reader, call);
}

static epic_result run_combine(handler_call *base)
{
    step_call *call = (step_call *)base;
    return epic_combine(base->use.ctx, &call->combine);
}

static const handler_array combine_arrays[] = {
    PLAN(combine),
    LEADING_ROWS("rows", FFI_SET_FLOATS, DIM_SLOTS, combine.rows, AT(combine.type)),
    DATA(HANDLER_OPTIONAL, "slot_weights", FFI_SET_F32, combine.slot_weights, DIM_SLOTS), SITE,
    ROWS(HANDLER_RESULT, "out", HANDLER_ROW_TYPE, combine.out, DIM_TOKENS, DIM_HIDDEN)};
OPERATION(combine, "combine", ROLE_COMBINE, combine, read_combine, NULL)

static void read_combine_backward(ffi_reader *reader, handler_call *base)
{
    step_call *call = (step_call *)base;
    call->combine_backward.layer = read_plan_sizes(reader, call);
    call->combine_backward.flags = EPIC_ZERO_TAIL;
}

static epic_result run_combine_backward(handler_call *base)
{
    step_call *call = (step_call *)base;
    return epic_combine_backward(base->use.ctx, &call->combine_backward);
}

static const handler_array combine_backward_arrays[] = {
    PLAN(combine_backward),
    LEADING_ROWS("d_out", FFI_SET_FLOATS, DIM_TOKENS, combine_backward.d_out,
                 AT(combine_backward.type)),
    ROWS(HANDLER_OPTIONAL, "rows", HANDLER_ROW_TYPE, combine_backward.rows, DIM_SLOTS,
         DIM_HIDDEN),
    DATA(HANDLER_OPTIONAL, "slot_weights", FFI_SET_F32, combine_backward.slot_weights,
         DIM_SLOTS),
    SITE,
    ROWS(HANDLER_RESULT, "d_rows", HANDLER_ROW_TYPE, combine_backward.d_rows, DIM_SLOTS,
         DIM_HIDDEN),
    DATA(HANDLER_RESULT | HANDLER_OPTIONAL, "d_slot_weights", FFI_SET_F32,
         combine_backward.d_slot_weights, DIM_SLOTS)};
OPERATION(combine_backward, "combine (backward)", ROLE_COMBINE_BACKWARD, combine_backward,
          read_combine_backward, NULL)

/* ------------------------------------------------------------------------------- sum ---- */

/* Checks that x and the result are the same array, because the core adds in place. epic/jax
 * makes them the same array with `input_output_aliases`. */
static void check_in_place(ffi_reader *reader, const step_call *call, const void *to,
                           int64_t count)
{
    if (reader->error == NULL && (call->sum_input != to || call->sum_input_count != count))
        reader->error =
            ffi_fail(reader->frame, EPIC_EINVAL, "sum: x and the result are not one array");
}

static void read_sum(ffi_reader *reader, handler_call *base)
{
    ((step_call *)base)->sum.order = ffi_read_uint(reader, "order");
}

static void check_sum(ffi_reader *reader, handler_call *base)
{
    const step_call *call = (step_call *)base;
    check_in_place(reader, call, call->sum.data, call->sum.count);
}

static epic_result run_allreduce_sum(handler_call *base)
{
    step_call *call = (step_call *)base;
    return epic_allreduce_sum(base->use.ctx, &call->sum);
}

/* clang-format off */
#define X \
    {.name = "x", .types = FFI_SET_F32, .dims = {DIM_ANY}, .sets_columns = DIM_HIDDEN, \
     .data = AT(sum_input), .count = AT(sum_input_count)}
/* clang-format on */

static const handler_array allreduce_sum_arrays[] = {X,
                                                     SITE,
                                                     CHANNEL,
                                                     {.flags = HANDLER_RESULT,
                                                      .name = "sum",
                                                      .types = FFI_SET_F32,
                                                      .dims = {DIM_ANY},
                                                      .data = AT(sum.data),
                                                      .count = AT(sum.count)}};
OPERATION(allreduce_sum, "sum", ROLE_SUM, sum, read_sum, check_sum)

/* Implements handler_operation.read for operations without attributes: does nothing. */
static void read_nothing(ffi_reader *reader, handler_call *base)
{
    (void)reader;
    (void)base;
}

static void check_sum_replicas(ffi_reader *reader, handler_call *base)
{
    const step_call *call = (step_call *)base;
    const epic_rows rows = call->sum_replicas.data;
    check_in_place(reader, call, rows.data,
                   rows.num_rows * rows.row_bytes / (int64_t)sizeof(float));
}

static epic_result run_sum_replicas(handler_call *base)
{
    step_call *call = (step_call *)base;
    return epic_sum_replicas(base->use.ctx, &call->sum_replicas);
}

/* The arrays of sum_replicas. x has the shape [local experts, n], and the workspace [n]. */
static const handler_array sum_replicas_arrays[] = {
    PLAN(sum_replicas), X, SITE,
    ROWS(HANDLER_RESULT, "sum", FFI_SET_F32, sum_replicas.data, DIM_ANY),
    DATA(HANDLER_RESULT, "workspace", FFI_SET_F32, sum_replicas.workspace, DIM_HIDDEN)};
OPERATION(sum_replicas, "sum_replicas", ROLE_SUM_REPLICAS, sum_replicas, read_nothing,
          check_sum_replicas)
