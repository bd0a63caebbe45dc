/* SPDX-License-Identifier: Apache-2.0 */
/* The expert MLP as custom calls of XLA: forward and backward. They are local calls, which do
 * not wait for other ranks. */
#include <string.h>

#include "local.h"
#include "options.h"

/* Sets the rows after the last slab to zero. The core does not write these rows, and XLA does
 * not initialize the memory of a result. On a GPU the host cannot read the counts, so
 * epic/jax/experts.py zeroes the rows instead. */
static void zero_tail(const ffi_reader *reader, ffi_array slots, ffi_array expert_rows)
{
    if (reader->on_device || slots.data == NULL || slots.rows == 0) return;
    int64_t occupied = 0;
    for (int64_t e = 0; e < expert_rows.count; e++)
        occupied += ((const int32_t *)expert_rows.data)[e];
    if (occupied < 0 || occupied >= slots.rows) return;
    const int64_t row_bytes = slots.bytes / slots.rows;
    memset((char *)slots.data + occupied * row_bytes, 0,
           (size_t)((slots.rows - occupied) * row_bytes));
}

/* The options and arrays that forward and backward have in common. The arrays are the first
 * arguments of both calls, in this order. The scales belong to e4m3 weights. */
typedef struct experts_inputs {
    epic_experts experts;
    uint32_t rows_set, weights_set; /* FFI_SET bits: accepted types of rows, and of weights */
    int64_t slots, local, hidden, inner, width;
    ffi_array x, rows, tokens, slot_weights;
    ffi_array w_gate_up, w_down, b_gate_up, b_down;
    ffi_array w_gate_up_scales, w_down_scales;
} experts_inputs;

/* Reads the scales of e4m3 weights: one for each block of 128 x 128 elements. */
static void read_weight_scales(ffi_reader *reader, experts_inputs *in)
{
    const int64_t of_hidden = ffi_num_blocks(in->hidden);
    in->w_gate_up_scales = ffi_read_arg_or_none(
        reader, "w_gate_up_scales", FFI_SET_F32,
        ffi_multiply_sizes(in->local, of_hidden, ffi_num_blocks(in->width)));
    in->w_down_scales = ffi_read_arg_or_none(
        reader, "w_down_scales", FFI_SET_F32,
        ffi_multiply_sizes(in->local, of_hidden, ffi_num_blocks(in->inner)));
}

/* Reads the options and arrays of experts_inputs, and checks their types and sizes. If the
 * weights are e4m3, the rows of forward are e4m3 too, and the biases have the row type of the
 * options. */
static experts_inputs read_inputs(ffi_reader *reader, bool backward)
{
    experts_inputs in = {.experts = options_read_experts(reader, "experts_")};
    const epic_experts *ex = &in.experts;
    in.local = ex->num_local_experts;
    in.hidden = ex->hidden;
    in.inner = ex->inner;
    in.width = ex->ungated ? in.inner : 2 * in.inner;
    in.rows_set = ffi_set_of(ex->row_type) & FFI_SET_FLOATS;
    const bool is_e4m3 = ex->weight_type == EPIC_E4M3;
    const uint32_t accepted = is_e4m3 ? FFI_SET(EPIC_E4M3) : FFI_SET_FLOATS;
    in.weights_set = ffi_set_of(ex->weight_type ? ex->weight_type : ex->row_type) & accepted;
    const uint32_t biases = is_e4m3 ? in.rows_set : in.weights_set;
    in.x = ffi_read_arg(reader, "rows", is_e4m3 && !backward ? FFI_SET(EPIC_E4M3) : in.rows_set,
                        FFI_ANY_COUNT);
    in.slots = in.x.rows;
    ffi_check_count(reader, "rows", in.x, ffi_multiply_sizes(in.slots, in.hidden, 1));
    in.rows = ffi_read_arg(reader, "expert_rows", FFI_SET_I32, in.local);
    in.tokens = ffi_read_arg(reader, "expert_tokens", FFI_SET_I32, in.local);
    in.slot_weights = ffi_read_arg_or_none(reader, "slot_weights", FFI_SET_F32, in.slots);
    in.w_gate_up = ffi_read_arg(reader, "w_gate_up", in.weights_set,
                                ffi_multiply_sizes(in.local, in.hidden, in.width));
    in.w_down = ffi_read_arg(reader, "w_down", in.weights_set,
                             ffi_multiply_sizes(in.local, in.inner, in.hidden));
    in.b_gate_up = ffi_read_arg_or_none(reader, "b_gate_up", biases, in.local * in.width);
    in.b_down = ffi_read_arg_or_none(reader, "b_down", biases, in.local * in.hidden);
    read_weight_scales(reader, &in);
    return in;
}

/* Initializes the fields that the argument structs of forward and backward have in common. */
#define INPUTS(in)                                                                            \
    .experts = &(in).experts, .x = (in).x.data, .num_slots = (in).x.rows,                     \
    .expert_rows = (in).rows.data, .expert_tokens = (in).tokens.data,                         \
    .slot_weights = (in).slot_weights.data, .w_gate_up = (in).w_gate_up.data,                 \
    .w_down = (in).w_down.data, .b_gate_up = (in).b_gate_up.data, .b_down = (in).b_down.data, \
    .w_gate_up_scales = (in).w_gate_up_scales.data, .w_down_scales = (in).w_down_scales.data

static ffi_error *experts_forward(ffi_frame *frame, bool on_device)
{
    if (local_is_query(frame, on_device)) return NULL;
    local_call local = {0};
    ffi_reader reader = local_begin(frame, on_device, &local);
    const experts_inputs in = read_inputs(&reader, false);
    epic_experts_args args = {
        INPUTS(in),
        .call = {.stream = local.stream, .max_sms = ffi_read_uint(&reader, "max_sms")}};
    args.x_scales =
        ffi_read_arg_or_none(&reader, "x_scales", FFI_SET_F32,
                             ffi_multiply_sizes(in.slots, ffi_num_blocks(in.hidden), 1))
            .data;
    const ffi_array y = ffi_read_result(&reader, "y", in.rows_set, in.x.count);
    const ffi_array saved = ffi_read_result(&reader, "saved", FFI_SET_U8, FFI_ANY_COUNT);
    const ffi_array workspace =
        ffi_read_result(&reader, "workspace", FFI_SET_U8, FFI_ANY_COUNT);
    args.y = y.data;
    args.saved = saved.data;
    args.saved_bytes = (size_t)saved.bytes;
    args.workspace = workspace.data;
    args.workspace_bytes = (size_t)workspace.bytes;
    if (reader.error == NULL) zero_tail(&reader, y, in.rows);
    return local_end(&reader, &local, "experts",
                     reader.error ? EPIC_OK : epic_experts_forward(local.use.ctx, &args));
}

LOCAL_EXPORTS(experts, experts_forward(frame, on_device))

/* Reads the results of backward: the gradients and the workspace. e4m3 weights have no
 * gradients. If the layer has no other weights, the gradients of the biases have the type of
 * the rows. */
static void read_gradients(ffi_reader *reader, const experts_inputs *in,
                           epic_experts_backward_args *args)
{
    const ffi_array d_x = ffi_read_result(reader, "d_rows", in->rows_set, in->x.count);
    const ffi_array d_slot_weights =
        ffi_read_result_or_none(reader, "d_slot_weights", FFI_SET_F32, in->slots);
    const ffi_array d_w_gate_up =
        ffi_read_result_or_none(reader, "d_w_gate_up", FFI_SET_FLOATS, in->w_gate_up.count);
    args->grad_type = d_w_gate_up.data ? d_w_gate_up.type : in->experts.row_type;
    const uint32_t grads = ffi_set_of(args->grad_type); /* all gradients have one type */
    args->d_x = d_x.data;
    args->d_slot_weights = d_slot_weights.data;
    args->d_w_gate_up = d_w_gate_up.data;
    args->d_w_down = ffi_read_result_or_none(reader, "d_w_down", grads, in->w_down.count).data;
    args->d_b_gate_up =
        ffi_read_result_or_none(reader, "d_b_gate_up", grads, in->local * in->width).data;
    args->d_b_down =
        ffi_read_result_or_none(reader, "d_b_down", grads, in->local * in->hidden).data;
    const ffi_array workspace = ffi_read_result(reader, "workspace", FFI_SET_U8, FFI_ANY_COUNT);
    args->workspace = workspace.data;
    args->workspace_bytes = (size_t)workspace.bytes;
    if (reader->error != NULL) return;
    zero_tail(reader, d_x, in->rows);
    zero_tail(reader, d_slot_weights, in->rows);
}

static ffi_error *experts_backward(ffi_frame *frame, bool on_device)
{
    if (local_is_query(frame, on_device)) return NULL;
    local_call local = {0};
    ffi_reader reader = local_begin(frame, on_device, &local);
    const experts_inputs in = read_inputs(&reader, true);
    epic_experts_backward_args args = {
        INPUTS(in),
        .call = {.stream = local.stream, .max_sms = ffi_read_uint(&reader, "max_sms")}};
    const ffi_array saved = ffi_read_arg(&reader, "saved", FFI_SET_U8, FFI_ANY_COUNT);
    args.saved = saved.data;
    args.saved_bytes = (size_t)saved.bytes;
    args.d_y = ffi_read_arg(&reader, "d_y", in.rows_set, in.x.count).data;
    read_gradients(&reader, &in, &args);
    return local_end(&reader, &local, "experts (backward)",
                     reader.error ? EPIC_OK : epic_experts_backward(local.use.ctx, &args));
}

LOCAL_EXPORTS(experts_backward, experts_backward(frame, on_device))
