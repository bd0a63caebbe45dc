/* SPDX-License-Identifier: Apache-2.0 */
/* The operators plan, dispatch and combine, their gradients, and the all-reduce operators. Each
 * function reads its arguments in the order of the operator's schema, at the end of this file.
 * A `!` in a schema marks a tensor that the operator may write. */
#include <string.h>

#include "ops.h"
#include "options.h"

/* ------------------------------------------------------------------------------ plan ---- */

/* Inputs of one call of plan or plan_dispatch. */
typedef struct plan_job {
    group_layer stored; /* the layer that the group stores */
    epic_plan_args args;
    /* top_k: number of columns of topk_idx; the others: lengths of the two tables */
    int64_t top_k, table_length, logical_length;
    /* options of the whole MoE layer, if the program composes the layer of single operators */
    compared_options compared;
} plan_job;

/* Reads topk_idx, the expert ids of all choices. */
static call_array read_choices(torch_call *call, plan_job *job)
{
    const call_array chosen = call_arg(call, "topk_idx", CALL_INDEX, 2);
    job->args.topk_idx = chosen.data;
    job->args.num_tokens = chosen.rows;
    job->args.index_type = chosen.type;
    job->top_k = chosen.columns;
    return chosen;
}

/* Reads the layer, the capacity, the tag and the placement tables. If the capacity is negative,
 * uses the capacity that always suffices. */
static void read_layout(torch_call *call, plan_job *job)
{
    job->args.call = call_enter_layer(call, &job->stored);
    const int64_t capacity = call_int(call);
    job->args.capacity = capacity < 0 ? job->stored.capacity : capacity;
    job->args.call.tag = call_tag(call);
    const call_array table = call_arg_or_none(call, "rank_of_expert", EPIC_I32, 1);
    const call_array logical = call_arg_or_none(call, "logical_of_expert", EPIC_I32, 1);
    job->args.layer = &job->stored.layer;
    job->args.rank_of_expert = table.data;
    job->args.logical_of_expert = logical.data;
    job->table_length = table.count;
    job->logical_length = logical.count;
}

/* Checks the lengths of the arrays. The core cannot check them, because its arguments contain
 * only the addresses of arrays. */
static void check_lengths(torch_call *call, const plan_job *job)
{
    if (call->failed) return;
    const int64_t experts = job->stored.layer.num_experts;
    if (job->top_k != job->stored.layer.top_k)
        call_fail(call, EPIC_EINVAL, "topk_idx has %lld columns: must have top_k = %u",
                  (long long)job->top_k, job->stored.layer.top_k);
    if (job->args.rank_of_expert != NULL && job->table_length != experts)
        call_fail(call, EPIC_EINVAL,
                  "rank_of_expert has %lld elements: must have num_experts = %lld",
                  (long long)job->table_length, (long long)experts);
    if (job->args.logical_of_expert != NULL && job->logical_length != experts)
        call_fail(call, EPIC_EINVAL,
                  "logical_of_expert has %lld elements: must have num_experts = %lld",
                  (long long)job->logical_length, (long long)experts);
}

/* Creates the result of plan: one tensor that contains the plan and, after it, its counts. With
 * several tensors the call would need more host time. The counts are expert_rows,
 * expert_tokens, load, demand and logical_load. With a placement table, expert_rows and
 * expert_tokens have room for all experts of the layer. They are int64 if the layer was stored
 * with this option. All other counts are int32. */
static void plan_results(torch_call *call, plan_job *job)
{
    check_lengths(call, job);
    if (call->failed) {
        call_no_result(call, "plan"); /* so that call_end() deletes the caller's tensor */
        return;
    }
    const int64_t experts = job->stored.layer.num_experts,
                  logical = job->stored.layer.num_logical;
    const int64_t ranks = epic_num_ranks(call->use.ctx), even = (experts + ranks - 1) / ranks;
    const int64_t local = job->args.rank_of_expert != NULL ? experts : even;
    const bool has_int64 = job->stored.has_int64_counts;
    const int64_t local_words = (has_int64 ? 4 : 2) * local; /* words have 32 bits */
    const int64_t count_bytes =
        (local_words + experts + 1 + logical) * (int64_t)sizeof(int32_t);
    const call_array memory = call_memory(call, "plan", job->stored.plan_bytes + count_bytes);
    if (call->failed) return;
    job->args.plan = memory.data;
    job->args.plan_bytes = job->stored.plan_bytes;
    void *counts = (char *)memory.data + job->stored.plan_bytes;
    if (has_int64) {
        job->args.expert_rows_i64 = counts;
        job->args.expert_tokens_i64 = (int64_t *)counts + local;
    } else {
        job->args.expert_rows = counts;
        job->args.expert_tokens = (int32_t *)counts + local;
    }
    job->args.load = (int32_t *)counts + local_words;
    job->args.demand = job->args.load + experts;
    if (logical != 0) job->args.logical_load = job->args.demand + 1;
}

/* Reads the last arguments of plan and plan_dispatch: capacity_limit and, in the overload
 * `compared`, the options of the whole layer. */
static void read_limit_and_options(torch_call *call, plan_job *job, bool is_compared)
{
    job->args.capacity_limit = call_arg_or_none(call, "capacity_limit", EPIC_I32, 0).data;
    if (!is_compared) return;
    read_compared(call, &job->compared, &job->stored.layer);
    job->args.moe = &job->compared.moe;
}

static void make_plan(torch_value *stack, uint64_t num_results, bool is_compared)
{
    torch_call call = call_begin("plan", stack, num_results);
    plan_job job = {0};
    call_order_token(&call);
    (void)read_choices(&call, &job);
    read_layout(&call, &job);
    read_limit_and_options(&call, &job, is_compared);
    plan_results(&call, &job);
    if (!call.failed) call_check_result(&call, epic_plan(call.use.ctx, &job.args));
    call_end(&call);
}

/* Defines the function `name`, which runs make(stack, num_results, is_compared). */
#define DEFINE_OVERLOAD(name, make, is_compared)                                       \
    static void name(torch_value *stack, uint64_t num_arguments, uint64_t num_results) \
    {                                                                                  \
        (void)num_arguments;                                                           \
        make(stack, num_results, is_compared);                                         \
    }

DEFINE_OVERLOAD(op_plan, make_plan, false)
DEFINE_OVERLOAD(op_plan_compared, make_plan, true)

/* -------------------------------------------------------------------------- dispatch ---- */

/* Reads the plan's layer id and the tag. Marks the group as in use, and copies the layer to
 * *layer. */
static epic_call enter_layer(torch_call *call, epic_layer *layer)
{
    group_layer stored = {0};
    epic_call out = call_enter_layer(call, &stored);
    *layer = stored.layer;
    out.tag = call_tag(call);
    return out;
}

static void read_plan(torch_call *call, const void **plan, int64_t *bytes)
{
    const call_array array = call_arg(call, "plan", CALL_U8, 1);
    *plan = array.data;
    *bytes = array.bytes;
}

/* Reads the weights [tokens, top_k], which may be absent. */
static void read_weights(torch_call *call, call_array tokens, epic_dispatch_args *args)
{
    const call_array weights = call_arg_or_none(call, "weights", EPIC_F32, 2);
    args->weights = weights.data;
    if (weights.data != NULL && weights.rows != tokens.rows)
        call_fail(call, EPIC_EINVAL, "weights has %lld rows, tokens %lld: make them equal",
                  (long long)weights.rows, (long long)tokens.rows);
}

/* Reads the tokens and weights of an operator that accepts only row types that the core can
 * add. */
static call_array read_tokens(torch_call *call, epic_dispatch_args *args)
{
    const call_array tokens = call_arg(call, "tokens", CALL_ROWS, 2);
    args->tokens = call_const_rows(tokens);
    read_weights(call, tokens, args);
    return tokens;
}

/* Creates the result slot_weights. It has no elements if the call has no weights. */
static void slot_weights_result(torch_call *call, epic_dispatch_args *args)
{
    if (args->weights != NULL)
        args->slot_weights =
            call_result(call, "slot_weights", EPIC_F32, args->recv.num_rows, -1).data;
    else
        call_no_result(call, "slot_weights");
}

/* Creates the results recv and slot_weights. */
static void dispatch_results(torch_call *call, call_array tokens, int64_t capacity,
                             epic_dispatch_args *args)
{
    args->recv = call_rows(call_result(call, "recv", tokens.type, capacity, tokens.columns));
    slot_weights_result(call, args);
}

static void op_dispatch(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("dispatch", stack, num_results);
    epic_layer layer;
    epic_dispatch_args args = {.layer = &layer};
    call_order_token(&call);
    read_plan(&call, &args.plan, &args.plan_bytes);
    const call_array tokens = read_tokens(&call, &args);
    const int64_t capacity = call_int(&call);
    args.call = enter_layer(&call, &layer);
    args.flags = call_uint(&call, "flags");
    dispatch_results(&call, tokens, capacity, &args);
    if (!call.failed) call_check_result(&call, epic_dispatch(call.use.ctx, &args));
    call_end(&call);
}

/* Reads the tokens and weights of plan_dispatch. Checks that all their dimensions except the
 * last are those of topk_idx. */
static call_array read_chosen(torch_call *call, call_array chosen, epic_dispatch_args *args)
{
    const call_array tokens = call_arg(call, "tokens", CALL_ROWS, 2);
    const call_array weights = call_arg_or_none(call, "weights", CALL_WEIGHTS, 2);
    if (call->failed) return tokens;
    const bool both_lead = tokens.dim > 2 && weights.dim > 2;
    const size_t lead_bytes = (size_t)(tokens.dim - 1) * sizeof *tokens.sizes;
    if (both_lead &&
        (weights.dim != tokens.dim || memcmp(weights.sizes, tokens.sizes, lead_bytes) != 0))
        call_fail(call, EPIC_EINVAL,
                  "weights has the shape %s: must have the leading dimensions of tokens, whose "
                  "shape is %s",
                  call_shape(weights.dim, weights.sizes).text,
                  call_shape(tokens.dim, tokens.sizes).text);
    const bool leads = tokens.dim > 2 && chosen.dim > 2;
    const size_t bytes = (size_t)(chosen.dim - 1) * sizeof *chosen.sizes;
    if (leads && (tokens.dim != chosen.dim || memcmp(tokens.sizes, chosen.sizes, bytes) != 0))
        call_fail(call, EPIC_EINVAL,
                  "tokens has the shape %s: must have the leading dimensions of topk_idx, %s",
                  call_shape(tokens.dim, tokens.sizes).text,
                  call_shape(chosen.dim - 1, chosen.sizes).text);
    if (tokens.rows != chosen.rows)
        call_fail(call, EPIC_EINVAL,
                  "tokens has the shape %s: must have %lld rows, as the plan, not %lld",
                  call_shape(tokens.dim, tokens.sizes).text, (long long)chosen.rows,
                  (long long)tokens.rows);
    if (weights.data != NULL &&
        (weights.dim < 2 || weights.count != chosen.count || weights.columns != chosen.columns))
        call_fail(call, EPIC_EINVAL, "weights has the shape %s: must be [%lld, %lld]",
                  call_shape(weights.dim, weights.sizes).text, (long long)chosen.rows,
                  (long long)chosen.columns);
    args->tokens = call_const_rows(tokens);
    args->weights = weights.data;
    return tokens;
}

static void make_plan_dispatch(torch_value *stack, uint64_t num_results, bool is_compared)
{
    torch_call call = call_begin("plan_dispatch", stack, num_results);
    plan_job job = {0};
    epic_dispatch_args args = {0};
    call_order_token(&call);
    const call_array chosen = read_choices(&call, &job);
    const call_array tokens = read_chosen(&call, chosen, &args);
    read_layout(&call, &job);
    args.flags = call_uint(&call, "flags");
    read_limit_and_options(&call, &job, is_compared);
    plan_results(&call, &job);
    dispatch_results(&call, tokens, job.args.capacity, &args);
    if (!call.failed)
        call_check_result(&call, epic_plan_dispatch(call.use.ctx, &job.args, &args));
    call_end(&call);
}

DEFINE_OVERLOAD(op_plan_dispatch, make_plan_dispatch, false)
DEFINE_OVERLOAD(op_plan_dispatch_compared, make_plan_dispatch, true)

/* Implements the operator epic::dispatch_flat, which sends each token once to each rank that
 * has experts for it, and returns these experts in recv_expert. */
static void op_dispatch_flat(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("dispatch_flat", stack, num_results);
    epic_layer layer;
    epic_dispatch_args args = {.layer = &layer};
    call_order_token(&call);
    read_plan(&call, &args.plan, &args.plan_bytes);
    const call_array tokens = read_tokens(&call, &args);
    const int64_t capacity = call_int(&call), top_k = call_int(&call);
    args.call = enter_layer(&call, &layer);
    args.flags = call_uint(&call, "flags");
    args.recv = call_rows(call_result(&call, "recv", tokens.type, capacity, tokens.columns));
    if (args.weights != NULL)
        args.slot_weights = call_result(&call, "slot_weights", EPIC_F32, capacity, top_k).data;
    else
        call_no_result(&call, "slot_weights");
    args.recv_expert = call_result(&call, "recv_expert", EPIC_I32, capacity, top_k).data;
    if (!call.failed) call_check_result(&call, epic_dispatch(call.use.ctx, &args));
    call_end(&call);
}

/* Creates the results for quantized rows: e4m3 rows, and a scale for each block of 128 or 32
 * columns. */
static void quantized_results(torch_call *call, const char *name, uint32_t quantize,
                              int64_t slots, int64_t columns, epic_rows *rows,
                              epic_rows *scales)
{
    const bool wide = quantize == EPIC_QUANTIZE_1X128;
    const int64_t block = wide ? 128 : 32, blocks = (columns + block - 1) / block;
    *rows = call_rows(call_result(call, name, EPIC_E4M3, slots, columns));
    *scales = call_rows(call_result(call, "scales", wide ? EPIC_F32 : CALL_U8, slots, blocks));
}

static void op_dispatch_quantized(torch_value *stack, uint64_t num_arguments,
                                  uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("dispatch_quantized", stack, num_results);
    epic_layer layer;
    epic_dispatch_args args = {.layer = &layer};
    call_order_token(&call);
    read_plan(&call, &args.plan, &args.plan_bytes);
    const call_array tokens = read_tokens(&call, &args);
    const int64_t capacity = call_int(&call);
    args.type = tokens.type;
    args.quantize = call_uint(&call, "quantize");
    args.call = enter_layer(&call, &layer);
    args.flags = call_uint(&call, "flags");
    quantized_results(&call, "recv", args.quantize, capacity, tokens.columns, &args.recv,
                      &args.recv_scales);
    slot_weights_result(&call, &args);
    if (!call.failed) call_check_result(&call, epic_dispatch(call.use.ctx, &args));
    call_end(&call);
}

/* Implements the operator epic::dispatch_bytes, which sends rows of an 8-bit type as bytes. A
 * second array of rows, the scales, may be sent with them. */
static void op_dispatch_bytes(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("dispatch_bytes", stack, num_results);
    epic_layer layer;
    epic_dispatch_args args = {.layer = &layer};
    call_order_token(&call);
    read_plan(&call, &args.plan, &args.plan_bytes);
    const call_array tokens = call_arg(&call, "tokens", CALL_U8, 2);
    const call_array scales = call_arg_or_none(&call, "scales", CALL_U8, 2);
    args.tokens = call_const_rows(tokens);
    read_weights(&call, tokens, &args);
    const int64_t capacity = call_int(&call);
    args.call = enter_layer(&call, &layer);
    args.flags = call_uint(&call, "flags");
    args.recv = call_rows(call_result(&call, "recv", CALL_U8, capacity, tokens.columns));
    if (scales.data != NULL) {
        args.scales = call_const_rows(scales);
        args.recv_scales =
            call_rows(call_result(&call, "recv_scales", CALL_U8, capacity, scales.columns));
    } else {
        call_no_result(&call, "recv_scales");
    }
    slot_weights_result(&call, &args);
    if (!call.failed) call_check_result(&call, epic_dispatch(call.use.ctx, &args));
    call_end(&call);
}

static void op_dispatch_backward(torch_value *stack, uint64_t num_arguments,
                                 uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("dispatch_backward", stack, num_results);
    epic_layer layer;
    epic_dispatch_backward_args args = {.layer = &layer};
    call_order_token(&call);
    read_plan(&call, &args.plan, &args.plan_bytes);
    const call_array d_recv = call_arg(&call, "d_recv", CALL_ROWS, 2);
    const call_array slots = call_arg_or_none(&call, "d_slot_weights", EPIC_F32, 1);
    const int64_t num_tokens = call_int(&call), top_k = call_int(&call);
    args.call = enter_layer(&call, &layer);
    args.type = d_recv.type;
    args.d_recv = call_const_rows(d_recv);
    args.d_slot_weights = slots.data;
    args.d_tokens =
        call_rows(call_result(&call, "d_tokens", d_recv.type, num_tokens, d_recv.columns));
    if (slots.data != NULL)
        args.d_weights = call_result(&call, "d_weights", EPIC_F32, num_tokens, top_k).data;
    else
        call_no_result(&call, "d_weights");
    if (!call.failed) call_check_result(&call, epic_dispatch_backward(call.use.ctx, &args));
    call_end(&call);
}

/* --------------------------------------------------------------------------- combine ---- */

static call_array read_rows(torch_call *call, epic_combine_args *args)
{
    const call_array rows = call_arg(call, "rows", CALL_ROWS, 2);
    const call_array slots = call_arg_or_none(call, "slot_weights", EPIC_F32, 1);
    args->rows = call_const_rows(rows);
    args->type = rows.type;
    args->slot_weights = slots.data;
    if (slots.data != NULL && slots.count != rows.rows)
        call_fail(call, EPIC_EINVAL, "slot_weights has %lld slots, rows %lld: make them equal",
                  (long long)slots.count, (long long)rows.rows);
    return rows;
}

static void op_combine(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("combine", stack, num_results);
    epic_layer layer;
    epic_combine_args args = {.layer = &layer};
    call_order_token(&call);
    read_plan(&call, &args.plan, &args.plan_bytes);
    const call_array rows = read_rows(&call, &args);
    const int64_t num_tokens = call_int(&call);
    args.call = enter_layer(&call, &layer);
    args.out = call_rows(call_result(&call, "out", rows.type, num_tokens, rows.columns));
    if (!call.failed) call_check_result(&call, epic_combine(call.use.ctx, &args));
    call_end(&call);
}

/* Inputs of the two operators for the gradient of combine. */
typedef struct gradient_job {
    epic_layer layer;
    epic_combine_backward_args args;
    int64_t slots, columns; /* shape of d_rows */
} gradient_job;

static void read_gradient(torch_call *call, gradient_job *job)
{
    epic_combine_backward_args *args = &job->args;
    call_order_token(call);
    read_plan(call, &args->plan, &args->plan_bytes);
    const call_array d_out = call_arg(call, "d_out", CALL_ROWS, 2);
    const call_array rows = call_arg_or_none(call, "rows", d_out.type, 2);
    const call_array slots = call_arg_or_none(call, "slot_weights", EPIC_F32, 1);
    args->type = d_out.type;
    args->d_out = call_const_rows(d_out);
    args->rows = call_const_rows(rows);
    args->slot_weights = slots.data;
    job->slots = call_int(call);
    job->columns = d_out.columns;
}

/* Creates the result d_slot_weights. It has no elements if the call has no rows. */
static void d_slot_weights_result(torch_call *call, gradient_job *job)
{
    if (job->args.rows.data != NULL)
        job->args.d_slot_weights =
            call_result(call, "d_slot_weights", EPIC_F32, job->slots, -1).data;
    else
        call_no_result(call, "d_slot_weights");
}

static void op_combine_backward(torch_value *stack, uint64_t num_arguments,
                                uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("combine_backward", stack, num_results);
    gradient_job job = {0};
    read_gradient(&call, &job);
    job.args.layer = &job.layer;
    job.args.call = enter_layer(&call, &job.layer);
    job.args.flags = call_uint(&call, "flags");
    job.args.d_rows =
        call_rows(call_result(&call, "d_rows", job.args.type, job.slots, job.columns));
    d_slot_weights_result(&call, &job);
    if (!call.failed) call_check_result(&call, epic_combine_backward(call.use.ctx, &job.args));
    call_end(&call);
}

static void op_combine_backward_quantized(torch_value *stack, uint64_t num_arguments,
                                          uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("combine_backward_quantized", stack, num_results);
    gradient_job job = {0};
    read_gradient(&call, &job);
    job.args.quantize = call_uint(&call, "quantize");
    job.args.layer = &job.layer;
    job.args.call = enter_layer(&call, &job.layer);
    job.args.flags = call_uint(&call, "flags");
    quantized_results(&call, "d_rows", job.args.quantize, job.slots, job.columns,
                      &job.args.d_rows, &job.args.d_rows_scales);
    d_slot_weights_result(&call, &job);
    if (!call.failed) call_check_result(&call, epic_combine_backward(call.use.ctx, &job.args));
    call_end(&call);
}

/* ------------------------------------------------------------------------------- sum ---- */

/* Implements the operator epic::sum_, an all-reduce of x in place. */
static void op_sum_(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("sum", stack, num_results);
    call_order_token(&call);
    const call_array x = call_arg_written(&call, "x", EPIC_F32, 1);
    const uint32_t order = call_uint(&call, "order");
    epic_allreduce_sum_args args = {.data = x.data, .count = x.count, .order = order};
    args.call = call_enter(&call);
    if (!call.failed) call_check_result(&call, epic_allreduce_sum(call.use.ctx, &args));
    call_end(&call);
}

/* Implements the operator epic::sum_replicas_: all-reduces the rows of the replicas of each
 * logical expert, in place. x has one row for each local expert. */
static void op_sum_replicas_(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("sum_replicas", stack, num_results);
    epic_sum_replicas_args args = {0};
    call_order_token(&call);
    read_plan(&call, &args.plan, &args.plan_bytes);
    const call_array x = call_arg_written(&call, "x", EPIC_F32, 2);
    args.call = call_enter(&call);
    args.data = call_rows(x);
    args.workspace = call_workspace(&call, args.data.row_bytes).data;
    if (!call.failed) call_check_result(&call, epic_sum_replicas(call.use.ctx, &args));
    call_end(&call);
}

/* --------------------------------------------------------------------------- schemas ---- */

/* torch needs host time for each argument of an operator, even if the caller leaves it out. So
 * the group stores the options of a layer, and operators take only the layer's id. */
#define GROUP_ARGS ", int group, int tag=0"
#define PLANNED_BY ", int layer, int tag=0" /* the layer of the plan */
#define FLAGS ", int flags=1"
#define LAYOUT                                     \
    ", int layer, SymInt capacity=-1, int tag=0, " \
    "Tensor? rank_of_expert=None, Tensor? logical_of_expert=None"
#define PLANNED ") -> (Tensor plan)"
#define PLANNED_SENT ") -> (Tensor plan, Tensor recv, Tensor slot_weights)"
#define CHOSEN "(Tensor(a!) order_token, Tensor topk_idx"
#define SENT CHOSEN ", Tensor tokens, Tensor? weights"

#define LIMIT ", Tensor? capacity_limit=None"

/* The overload "compared", for programs that compose a layer of single operators. Its last
 * arguments are the 26 options of the whole layer, which the ranks compare. They are not
 * arguments with defaults of the other overload, because these would cost 1.5 us of host time
 * per call (torch 2.15, see docs/lab/torch.md). */
#define COMPARED_LAYOUT                       \
    ", int layer, SymInt capacity, int tag, " \
    "Tensor? rank_of_expert, Tensor? logical_of_expert"
#define COMPARED(name, schema)                                            \
    {                                                                     \
#name ".compared", #name ".compared" schema, op_##name##_compared \
    }
#define COMPARED_OPTIONS ", Tensor? capacity_limit" COMPARED_SCHEMA

static const torch_op ops[] = {
    COMPARED(plan, CHOSEN COMPARED_LAYOUT COMPARED_OPTIONS PLANNED),
    COMPARED(plan_dispatch,
             SENT COMPARED_LAYOUT ", int dispatch_flags" COMPARED_OPTIONS PLANNED_SENT),
    OP(plan, CHOSEN LAYOUT LIMIT PLANNED),
    OP(dispatch, "(Tensor(a!) order_token, Tensor plan, Tensor tokens, Tensor? weights, "
                 "SymInt capacity" PLANNED_BY FLAGS ") -> (Tensor recv, Tensor slot_weights)"),
    OP(plan_dispatch, SENT LAYOUT FLAGS LIMIT PLANNED_SENT),
    OP(dispatch_quantized,
       "(Tensor(a!) order_token, Tensor plan, Tensor tokens, Tensor? weights, "
       "SymInt capacity, int quantize" PLANNED_BY FLAGS
       ") -> (Tensor recv, Tensor scales, Tensor slot_weights)"),
    OP(dispatch_bytes, "(Tensor(a!) order_token, Tensor plan, Tensor tokens, Tensor? scales, "
                       "Tensor? weights, SymInt capacity" PLANNED_BY FLAGS
                       ") -> (Tensor recv, Tensor recv_scales, Tensor slot_weights)"),
    OP(dispatch_flat, "(Tensor(a!) order_token, Tensor plan, Tensor tokens, Tensor? weights, "
                      "SymInt capacity, SymInt top_k" PLANNED_BY FLAGS
                      ") -> (Tensor recv, Tensor slot_weights, Tensor recv_expert)"),
    OP(dispatch_backward, "(Tensor(a!) order_token, Tensor plan, Tensor d_recv, "
                          "Tensor? d_slot_weights, SymInt num_tokens, SymInt top_k" PLANNED_BY
                          ") -> (Tensor d_tokens, Tensor d_weights)"),
    OP(combine, "(Tensor(a!) order_token, Tensor plan, Tensor rows, Tensor? slot_weights, "
                "SymInt num_tokens" PLANNED_BY ") -> (Tensor out)"),
    OP(combine_backward, "(Tensor(a!) order_token, Tensor plan, Tensor d_out, Tensor? rows, "
                         "Tensor? slot_weights, SymInt capacity" PLANNED_BY FLAGS
                         ") -> (Tensor d_rows, Tensor d_slot_weights)"),
    OP(combine_backward_quantized,
       "(Tensor(a!) order_token, Tensor plan, Tensor d_out, Tensor? rows, Tensor? "
       "slot_weights, "
       "SymInt capacity, int quantize" PLANNED_BY FLAGS
       ") -> (Tensor d_rows, Tensor scales, Tensor d_slot_weights)"),
    OP(sum_, "(Tensor(a!) order_token, Tensor(b!) x, int order" GROUP_ARGS ") -> ()"),
    OP(sum_replicas_,
       "(Tensor(a!) order_token, Tensor plan, Tensor(b!) x" GROUP_ARGS ") -> ()"),
};

torch_ops steps_ops(void)
{
    return OPS_OF(ops);
}
