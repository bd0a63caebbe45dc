/* SPDX-License-Identifier: Apache-2.0 */
/* The grouped expert MLP as custom calls.  It waits for nobody, so it runs on XLA's thread. */
#include <string.h>

#include "place.h"
#include "read.h"

/* Zeros past the last slab: an XLA result has no memory of its own to be left alone.  On a GPU,
 * where the counts cannot be read here, epic/jax/experts.py does it. */
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

/* What both directions read first, in this order. */
typedef struct inputs {
    epic_experts experts;
    ffi_array x, rows, tokens, slot_weights;
    ffi_array w_gate_up, w_down, b_gate_up, b_down;
} inputs;

static inputs read_inputs(ffi_reader *reader)
{
    inputs in = {.experts = read_experts(reader, "experts_")};
    in.x = ffi_arg(reader, "x", FFI_OTHER);
    in.rows = ffi_arg(reader, "expert_rows", EPIC_I32);
    in.tokens = ffi_arg(reader, "expert_tokens", EPIC_I32);
    in.slot_weights = ffi_arg_or_none(reader, "slot_weights", EPIC_F32);
    in.w_gate_up = ffi_arg(reader, "w_gate_up", FFI_OTHER);
    in.w_down = ffi_arg(reader, "w_down", FFI_OTHER);
    in.b_gate_up = ffi_arg_or_none(reader, "b_gate_up", FFI_OTHER);
    in.b_down = ffi_arg_or_none(reader, "b_down", FFI_OTHER);
    return in;
}

/* The fields of the core's arguments, alike in both directions. */
#define INPUTS(in)                                                            \
    .experts = &(in).experts, .x = (in).x.data, .num_slots = (in).x.rows,     \
    .expert_rows = (in).rows.data, .expert_tokens = (in).tokens.data,         \
    .slot_weights = (in).slot_weights.data, .w_gate_up = (in).w_gate_up.data, \
    .w_down = (in).w_down.data, .b_gate_up = (in).b_gate_up.data, .b_down = (in).b_down.data

static ffi_error *experts_forward(ffi_frame *frame, bool on_device)
{
    if (place_is_query(frame, on_device)) return NULL;
    place place = {0};
    ffi_reader reader = place_begin(frame, on_device, &place);
    const inputs in = read_inputs(&reader);
    epic_experts_args args = {INPUTS(in), .call.stream = place.stream};
    const ffi_array y = ffi_result(&reader, "y", in.x.type);
    const ffi_array saved = ffi_result(&reader, "saved", FFI_U8);
    const ffi_array workspace = ffi_result(&reader, "workspace", FFI_U8);
    args.y = y.data;
    args.saved = saved.data;
    args.saved_bytes = (size_t)saved.bytes;
    args.workspace = workspace.data;
    args.workspace_bytes = (size_t)workspace.bytes;
    if (reader.error == NULL) zero_tail(&reader, y, in.rows);
    return place_end(&reader, &place, "experts",
                     reader.error ? EPIC_OK : epic_experts_forward(place.use.ctx, &args));
}

PLACE_HANDLERS(experts, experts_forward(frame, on_device))

static void read_gradients(ffi_reader *reader, ffi_array rows, uint32_t type,
                           epic_experts_backward_args *args)
{
    const ffi_array d_x = ffi_result(reader, "d_x", type);
    const ffi_array d_slot_weights = ffi_result_or_none(reader, "d_slot_weights", EPIC_F32);
    args->d_x = d_x.data;
    args->d_slot_weights = d_slot_weights.data;
    const ffi_array d_w_gate_up = ffi_result(reader, "d_w_gate_up", FFI_OTHER);
    const uint32_t grads = d_w_gate_up.type;
    args->grad_type = grads;
    args->d_w_gate_up = d_w_gate_up.data;
    args->d_w_down = ffi_result(reader, "d_w_down", grads).data;
    args->d_b_gate_up = ffi_result_or_none(reader, "d_b_gate_up", grads).data;
    args->d_b_down = ffi_result_or_none(reader, "d_b_down", grads).data;
    const ffi_array workspace = ffi_result(reader, "workspace", FFI_U8);
    args->workspace = workspace.data;
    args->workspace_bytes = (size_t)workspace.bytes;
    if (reader->error != NULL) return;
    zero_tail(reader, d_x, rows);
    zero_tail(reader, d_slot_weights, rows);
}

static ffi_error *experts_backward(ffi_frame *frame, bool on_device)
{
    if (place_is_query(frame, on_device)) return NULL;
    place place = {0};
    ffi_reader reader = place_begin(frame, on_device, &place);
    const inputs in = read_inputs(&reader);
    epic_experts_backward_args args = {INPUTS(in), .call.stream = place.stream};
    const ffi_array saved = ffi_arg(&reader, "saved", FFI_U8);
    args.saved = saved.data;
    args.saved_bytes = (size_t)saved.bytes;
    args.d_y = ffi_arg(&reader, "d_y", in.x.type).data;
    read_gradients(&reader, in.rows, in.x.type, &args);
    return place_end(&reader, &place, "experts (backward)",
                     reader.error ? EPIC_OK : epic_experts_backward(place.use.ctx, &args));
}

PLACE_HANDLERS(experts_backward, experts_backward(frame, on_device))
