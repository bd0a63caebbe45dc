/* SPDX-License-Identifier: Apache-2.0 */
/* The operators of the expert MLP. They involve no other rank, so tracers such as torch.compile
 * need not keep them in order. */
#include <string.h>

#include "ops.h"
#include "options.h"

/* Sets the slots after the last slab (the slots of one expert) to zero, because the core does
 * not write them. On GPUs the host cannot read the counts, so these slots keep any contents
 * there: dispatch and combine never read them. */
static void zero_tail(const torch_call *call, call_array slots, call_array expert_rows)
{
    if (call->failed || slots.data == NULL || slots.rows == 0 || call_on_gpu(call)) return;
    int64_t occupied = 0;
    for (int64_t e = 0; e < expert_rows.count; e++)
        occupied += ((const int32_t *)expert_rows.data)[e];
    if (occupied < 0 || occupied >= slots.rows) return;
    const int64_t row_bytes = slots.bytes / slots.rows;
    memset((char *)slots.data + occupied * row_bytes, 0,
           (size_t)((slots.rows - occupied) * row_bytes));
}

/* Returns the number of blocks of 128 elements. Each block has one scale. */
static int64_t blocks_of(int64_t length)
{
    return (length + 127) / 128;
}

/* The inputs of forward and backward, in the order of the schema. The scales are for e4m3
 * weights. */
typedef struct experts_inputs {
    call_array x, rows, tokens, slot_weights;
    call_array w_gate_up, w_down, b_gate_up, b_down;
    call_array w_gate_up_scales, w_down_scales;
} experts_inputs;

static experts_inputs read_inputs(torch_call *call)
{
    experts_inputs in = {.x = call_arg(call, "x", CALL_MATRIX, 2)};
    in.rows = call_arg(call, "expert_rows", EPIC_I32, 1);
    in.tokens = call_arg(call, "expert_tokens", EPIC_I32, 1);
    in.slot_weights = call_arg_or_none(call, "slot_weights", EPIC_F32, 1);
    in.w_gate_up = call_arg(call, "w_gate_up", CALL_MATRIX, 3);
    in.w_down = call_arg(call, "w_down", in.w_gate_up.type, 3);
    in.b_gate_up = call_arg_or_none(call, "b_gate_up", CALL_ROWS, 2);
    in.b_down = call_arg_or_none(call, "b_down", CALL_ROWS, 2);
    in.w_gate_up_scales = call_arg_or_none(call, "w_gate_up_scales", EPIC_F32, 3);
    in.w_down_scales = call_arg_or_none(call, "w_down_scales", EPIC_F32, 3);
    return in;
}

/* Checks types and shapes of the inputs. */
static void check_inputs(torch_call *call, const experts_inputs *in,
                         const epic_experts *experts, bool is_backward)
{
    const int64_t local = experts->num_local_experts, hidden = experts->hidden;
    const int64_t inner = experts->inner, width = experts->ungated ? inner : 2 * inner;
    const int64_t in_blocks = blocks_of(inner), of_hidden = blocks_of(hidden);
    const call_array weights[] = {in->w_gate_up, in->w_down, in->b_gate_up, in->b_down};
    check_mlp(call, experts, weights, expert_names, experts->row_type, is_backward);
    call_check_count(call, "x", in->x, in->x.rows * hidden);
    call_check_count(call, "expert_rows", in->rows, local);
    call_check_count(call, "expert_tokens", in->tokens, local);
    call_check_count(call, "slot_weights", in->slot_weights, in->x.rows);
    call_check_count(call, "w_gate_up_scales", in->w_gate_up_scales,
                     local * blocks_of(width) * of_hidden);
    call_check_count(call, "w_down_scales", in->w_down_scales, local * in_blocks * of_hidden);
}

/* Initializes the fields that the argument structs of forward and backward have in common. */
#define INPUTS(in)                                                                            \
    .x = (in).x.data, .num_slots = (in).x.rows, .expert_rows = (in).rows.data,                \
    .expert_tokens = (in).tokens.data, .slot_weights = (in).slot_weights.data,                \
    .w_gate_up = (in).w_gate_up.data, .w_down = (in).w_down.data,                             \
    .w_gate_up_scales = (in).w_gate_up_scales.data, .w_down_scales = (in).w_down_scales.data, \
    .b_gate_up = (in).b_gate_up.data, .b_down = (in).b_down.data

/* Returns the sizes of `saved` and of the workspaces. */
static epic_experts_memory_info sizes_of(torch_call *call, const epic_experts *experts,
                                         int64_t num_slots)
{
    epic_experts_memory_info sizes = {0};
    if (!call->failed)
        call_check_result(call,
                          epic_experts_memory(call->use.ctx, NULL, experts, num_slots, &sizes));
    return sizes;
}

static void op_experts(torch_value *stack, uint64_t num_arguments, uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("experts", stack, num_results);
    const experts_inputs in = read_inputs(&call);
    const call_array x_scales = call_arg_or_none(&call, "x_scales", EPIC_F32, 2);
    const int64_t saved_bytes = call_int(&call);
    const epic_call where = call_enter_local(&call);
    mlp_types types = {.row = in.x.type, .weight = in.w_gate_up.type};
    const epic_experts options = read_experts(&call, &types);
    check_inputs(&call, &in, &options, false);
    call_check_count(&call, "x_scales", x_scales, in.x.rows * blocks_of(options.hidden));
    const epic_experts_memory_info sizes = sizes_of(&call, &options, in.x.rows);
    const call_array y = call_result_like(&call, "y", options.row_type, in.x);
    const call_array saved = call_memory(&call, "saved", saved_bytes);
    const call_array workspace = call_workspace(&call, sizes.forward_bytes);
    const epic_experts_args args = {INPUTS(in),
                                    .call = where,
                                    .experts = &options,
                                    .x_scales = x_scales.data,
                                    .y = y.data,
                                    .saved = saved.data,
                                    .saved_bytes = saved.bytes,
                                    .workspace = workspace.data,
                                    .workspace_bytes = workspace.bytes};
    zero_tail(&call, y, in.rows);
    if (!call.failed) call_check_result(&call, epic_experts_forward(call.use.ctx, &args));
    call_end(&call);
}

/* Creates the results of backward. grad_type 0 means float32, or float64 if the rows are
 * float64. */
static void gradient_results(torch_call *call, const experts_inputs *in, uint32_t grad_type,
                             epic_experts_backward_args *args)
{
    const uint32_t wide = in->x.type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
    const uint32_t type = grad_type != 0 ? grad_type : wide;
    args->grad_type = type;
    const call_array d_x = call_result_like(call, "d_x", in->x.type, in->x);
    const call_array d_slots =
        call_result_like(call, "d_slot_weights", EPIC_F32, in->slot_weights);
    args->d_x = d_x.data;
    args->d_slot_weights = d_slots.data;
    args->d_w_gate_up = call_result_like(call, "d_w_gate_up", type, in->w_gate_up).data;
    args->d_w_down = call_result_like(call, "d_w_down", type, in->w_down).data;
    args->d_b_gate_up = call_result_like(call, "d_b_gate_up", type, in->b_gate_up).data;
    args->d_b_down = call_result_like(call, "d_b_down", type, in->b_down).data;
    zero_tail(call, d_x, in->rows);
    zero_tail(call, d_slots, in->rows);
}

static void op_experts_backward(torch_value *stack, uint64_t num_arguments,
                                uint64_t num_results)
{
    (void)num_arguments;
    torch_call call = call_begin("experts_backward", stack, num_results);
    const experts_inputs in = read_inputs(&call);
    const call_array saved = call_arg(&call, "saved", CALL_U8, 1);
    const call_array d_y = call_arg(&call, "d_y", in.x.type, 2);
    const epic_call where = call_enter_local(&call);
    mlp_types types = {.row = in.x.type, .weight = in.w_gate_up.type};
    const epic_experts options = read_experts(&call, &types);
    check_inputs(&call, &in, &options, true);
    call_check_count(&call, "d_y", d_y, in.x.count);
    const epic_experts_memory_info sizes = sizes_of(&call, &options, in.x.rows);
    epic_experts_backward_args args = {INPUTS(in),
                                       .call = where,
                                       .experts = &options,
                                       .saved = saved.data,
                                       .saved_bytes = saved.bytes,
                                       .d_y = d_y.data};
    gradient_results(&call, &in, types.grad, &args);
    const call_array workspace = call_workspace(&call, sizes.backward_bytes);
    args.workspace = workspace.data;
    args.workspace_bytes = workspace.bytes;
    if (!call.failed) call_check_result(&call, epic_experts_backward(call.use.ctx, &args));
    call_end(&call);
}

#define INPUT_SCHEMA                                                              \
    "(Tensor x, Tensor expert_rows, Tensor expert_tokens, Tensor? slot_weights, " \
    "Tensor w_gate_up, Tensor w_down, Tensor? b_gate_up, Tensor? b_down, "        \
    "Tensor? w_gate_up_scales, Tensor? w_down_scales"

static const torch_op ops[] = {
    OP(experts, INPUT_SCHEMA ", Tensor? x_scales, SymInt saved_bytes, int group" EXPERTS_SCHEMA
                             ") -> (Tensor y, Tensor saved)"),
    OP(experts_backward, INPUT_SCHEMA
       ", Tensor saved, Tensor d_y, int group" EXPERTS_SCHEMA
       ") -> (Tensor d_x, Tensor d_slot_weights, Tensor d_w_gate_up, Tensor d_w_down, "
       "Tensor d_b_gate_up, Tensor d_b_down)"),
};

torch_ops experts_ops(void)
{
    return OPS_OF(ops);
}
