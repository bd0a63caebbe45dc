/* SPDX-License-Identifier: Apache-2.0 */
/* The whole layer as two custom calls, forward and backward, which call epic_moe_forward and
 * epic_moe_backward. Each table lists the arrays in the order in which epic/jax/moe.py passes
 * them. */
#include "handler.h"
#include "options.h"

typedef struct moe_call {
    handler_call call;
    moe_options options;
    epic_moe_weights weights;
    epic_moe_gradients gradients;
    uint32_t gate_up_type, down_type; /* types of w_gate_up and w_down */
    epic_moe_args forward;
    epic_moe_backward_args backward;
} moe_call;

/* clang-format off */
#define AT(member) offsetof(moe_call, member)
#define IN(name, types, member, ...) \
    HANDLER_DATA(HANDLER_ARG, name, types, AT(member), __VA_ARGS__)
#define IN_OR_NONE(name, types, member, ...) \
    HANDLER_DATA(HANDLER_OPTIONAL, name, types, AT(member), __VA_ARGS__)
#define OUT(name, types, member, ...) \
    HANDLER_DATA(HANDLER_RESULT, name, types, AT(member), __VA_ARGS__)
#define OUT_OR_NONE(name, types, member, ...) \
    HANDLER_DATA(HANDLER_RESULT | HANDLER_OPTIONAL, name, types, AT(member), __VA_ARGS__)
#define MEMORY(how, text, member, size) \
    {.flags = how, .name = text, .types = FFI_SET_U8, .dims = {DIM_ANY}, .data = AT(member), \
     .count = AT(size)}
#define WEIGHT(text, member, type_member, rows, columns) \
    {.flags = HANDLER_ARG, .name = text, .types = HANDLER_WEIGHT_TYPE, \
     .dims = {DIM_LOCAL, rows, columns}, .data = AT(member), .element = AT(type_member)}
#define WEIGHTS \
    IN("w_gate", HANDLER_WIDE_TYPE, weights.w_gate, DIM_HIDDEN, DIM_COLUMNS), \
    IN_OR_NONE("b_gate", HANDLER_WIDE_TYPE, weights.b_gate, DIM_COLUMNS), \
    IN_OR_NONE("bias", FFI_SET_F32, weights.bias, DIM_COLUMNS), \
    WEIGHT("w_gate_up", weights.w_gate_up, gate_up_type, DIM_HIDDEN, DIM_WIDTH), \
    WEIGHT("w_down", weights.w_down, down_type, DIM_INNER, DIM_HIDDEN), \
    IN_OR_NONE("b_gate_up", HANDLER_BIAS_TYPE, weights.b_gate_up, DIM_LOCAL, DIM_WIDTH), \
    IN_OR_NONE("b_down", HANDLER_BIAS_TYPE, weights.b_down, DIM_LOCAL, DIM_HIDDEN), \
    IN_OR_NONE("shared_gate_up", HANDLER_SHARED_TYPE, weights.shared_gate_up, DIM_HIDDEN, \
               DIM_SHARED_WIDTH), \
    IN_OR_NONE("shared_down", HANDLER_SHARED_TYPE, weights.shared_down, DIM_SHARED_INNER, \
               DIM_HIDDEN), \
    IN_OR_NONE("shared_b_gate_up", HANDLER_SHARED_TYPE, weights.shared_b_gate_up, \
               DIM_SHARED_WIDTH), \
    IN_OR_NONE("shared_b_down", HANDLER_SHARED_TYPE, weights.shared_b_down, DIM_HIDDEN), \
    IN_OR_NONE("w_gate_up_scales", FFI_SET_F32, weights.w_gate_up_scales, DIM_LOCAL, \
               DIM_GATE_UP_SCALES), \
    IN_OR_NONE("w_down_scales", FFI_SET_F32, weights.w_down_scales, DIM_LOCAL, DIM_DOWN_SCALES)
#define X(member) \
    {.flags = HANDLER_ARG, .name = "x", .types = HANDLER_ROW_TYPE, .sets_rows = DIM_TOKENS, \
     .dims = {DIM_TOKENS, DIM_HIDDEN}, .rows = AT(member)}
/* clang-format on */

/* Returns the number of columns of w_gate_up: the gate and up projections, or only one of them
 * if ungated. */
static int64_t experts_width(const epic_experts *experts)
{
    return experts->ungated ? experts->inner : 2 * (int64_t)experts->inner;
}

/* Reads the options of the layer, and sets the sizes that its arrays must have. */
static void read_layer_options(ffi_reader *reader, moe_call *call)
{
    moe_options *options = &call->options;
    options_read_moe(reader, options);
    int64_t *sizes = call->call.sizes;
    sizes[DIM_TOP_K] = options->layer.top_k;
    sizes[DIM_EXPERTS] = options->layer.num_experts;
    sizes[DIM_LOGICAL] = options->layer.num_logical;
    sizes[DIM_COLUMNS] = (int64_t)options->router.num_experts + options->router.zero_experts;
    sizes[DIM_LOCAL] = options->experts.num_local_experts;
    sizes[DIM_HIDDEN] = options->experts.hidden;
    sizes[DIM_INNER] = options->experts.inner;
    sizes[DIM_WIDTH] = experts_width(&options->experts);
    sizes[DIM_SHARED_INNER] = options->shared.inner;
    sizes[DIM_SHARED_WIDTH] = experts_width(&options->shared);
    sizes[DIM_GATE_UP_SCALES] =
        ffi_num_blocks(sizes[DIM_HIDDEN]) * ffi_num_blocks(sizes[DIM_WIDTH]);
    sizes[DIM_DOWN_SCALES] =
        ffi_num_blocks(sizes[DIM_HIDDEN]) * ffi_num_blocks(sizes[DIM_INNER]);
    const uint32_t row_type = options->experts.row_type;
    const uint32_t weight_type =
        options->experts.weight_type ? options->experts.weight_type : row_type;
    call->call.row_type = row_type;
    call->call.weight_set = ffi_set_of(weight_type);
    call->call.bias_type = weight_type == EPIC_E4M3 ? row_type : weight_type;
    call->call.shared_type =
        options->shared.weight_type ? options->shared.weight_type : options->shared.row_type;
}

/* --------------------------------------------------------------------------- forward ---- */

static void read_forward(ffi_reader *reader, handler_call *base)
{
    moe_call *call = (moe_call *)base;
    read_layer_options(reader, call);
    call->forward.moe = &call->options.moe;
    call->forward.weights = &call->weights;
}

static epic_result run_forward(handler_call *base)
{
    moe_call *call = (moe_call *)base;
    return epic_moe_forward(base->use.ctx, &call->forward);
}

/* clang-format off */
static const handler_array forward_arrays[] = {
    X(forward.x),
    WEIGHTS,
    {HANDLER_ARRAY, HANDLER_OPTIONAL, "token_ids", FFI_SET_INDICES, {DIM_TOKENS},
     .data = AT(forward.token_ids), .element = AT(forward.token_id_type)},
    {HANDLER_ARRAY, HANDLER_OPTIONAL, "table", FFI_SET_I32, {DIM_TABLE_ROWS, DIM_TOP_K},
     .sets_rows = DIM_TABLE_ROWS, .data = AT(forward.table),
     .num_rows = AT(forward.table_rows)},
    IN_OR_NONE("rank_of_expert", FFI_SET_I32, forward.rank_of_expert, DIM_EXPERTS),
    IN_OR_NONE("logical_of_expert", FFI_SET_I32, forward.logical_of_expert, DIM_EXPERTS),
    IN_OR_NONE("forced ids", FFI_SET_I32, forward.topk_idx_in, DIM_TOKENS, DIM_TOP_K),
    IN_OR_NONE("forced weights", HANDLER_WIDE_TYPE, forward.topk_weights_in, DIM_TOKENS,
               DIM_TOP_K),
    IN_OR_NONE("capacity_limit", FFI_SET_I32, forward.capacity_limit, DIM_ONE),
    {.kind = HANDLER_SITE},
    {.kind = HANDLER_CHANNEL},
    HANDLER_ROWS(HANDLER_RESULT, "out", HANDLER_ROW_TYPE, AT(forward.out), DIM_TOKENS,
                 DIM_HIDDEN),
    OUT("loss", FFI_SET_F32, forward.loss, DIM_ONE),
    OUT("load", FFI_SET_I32, forward.load, DIM_EXPERTS),
    OUT("demand", FFI_SET_I32, forward.demand, DIM_ONE),
    OUT_OR_NONE("logical_load", FFI_SET_I32, forward.logical_load, DIM_LOGICAL),
    OUT_OR_NONE("topk_idx", FFI_SET_I32, forward.topk_idx_out, DIM_TOKENS, DIM_TOP_K),
    OUT_OR_NONE("topk_weights", HANDLER_WIDE_TYPE, forward.topk_weights_out, DIM_TOKENS,
                DIM_TOP_K),
    MEMORY(HANDLER_RESULT, "saved", forward.saved, forward.saved_bytes),
    MEMORY(HANDLER_RESULT, "workspace", forward.workspace, forward.workspace_bytes)};
/* clang-format on */

static const handler_operation moe_operation = {"moe",
                                                ROLE_MOE,
                                                sizeof(moe_call),
                                                AT(forward.call),
                                                forward_arrays,
                                                HANDLER_LENGTH(forward_arrays),
                                                read_forward,
                                                NULL,
                                                run_forward};

HANDLER_EXPORTS(moe)

/* -------------------------------------------------------------------------- backward ---- */

static void read_backward(ffi_reader *reader, handler_call *base)
{
    moe_call *call = (moe_call *)base;
    read_layer_options(reader, call);
    call->backward.moe = &call->options.moe;
    call->backward.weights = &call->weights;
    call->backward.gradients = &call->gradients;
    if (call->options.experts.weight_type == EPIC_E4M3)
        base->weight_set |= ffi_set_of(call->options.experts.row_type);
}

/* If the gradient of forced weights is a result, sets EPIC_FORCED_WEIGHTS. Checks the weights
 * of an e4m3 layer: w_gate_up and w_down must both be e4m3 with scales, or both have the row
 * type and no scales. e4m3 weights have no gradients. If the layer has no other weights, the
 * gradients of the biases have the type of the rows. */
static void check_backward(ffi_reader *reader, handler_call *base)
{
    moe_call *call = (moe_call *)base;
    const bool is_e4m3 = call->gate_up_type == EPIC_E4M3;
    const bool has_scales = call->weights.w_gate_up_scales != NULL;
    if (call->gradients.w_gate_up == NULL) call->backward.grad_type = base->row_type;
    if (call->backward.d_topk_weights_in != NULL) call->backward.flags = EPIC_FORCED_WEIGHTS;
    if (call->gate_up_type != call->down_type || is_e4m3 != has_scales)
        reader->error = ffi_fail(reader->frame, EPIC_EINVAL,
                                 "w_gate_up and w_down: both must be e4m3 with scales, or both "
                                 "must have one other type and no scales");
}

static epic_result run_backward(handler_call *base)
{
    moe_call *call = (moe_call *)base;
    return epic_moe_backward(base->use.ctx, &call->backward);
}

/* The gradients of the experts have the type of d_w_gate_up, because that entry has
 * HANDLER_SETS_TYPE. */
/* clang-format off */
#define GRADIENT(name, member, ...) \
    OUT(name, HANDLER_WIDE_TYPE, gradients.member, __VA_ARGS__)
#define GRADIENT_OR_NONE(name, member, ...) \
    OUT_OR_NONE(name, HANDLER_WIDE_TYPE, gradients.member, __VA_ARGS__)

static const handler_array backward_arrays[] = {
    X(backward.x),
    WEIGHTS,
    MEMORY(HANDLER_ARG, "saved", backward.saved, backward.saved_bytes),
    HANDLER_ROWS(HANDLER_ARG, "d_out", HANDLER_ROW_TYPE, AT(backward.d_out), DIM_TOKENS,
                 DIM_HIDDEN),
    IN("d_loss", FFI_SET_F32, backward.d_loss, DIM_ONE),
    {.kind = HANDLER_SITE},
    {.kind = HANDLER_CHANNEL},
    HANDLER_ROWS(HANDLER_RESULT, "d_x", HANDLER_ROW_TYPE, AT(backward.d_x), DIM_TOKENS,
                 DIM_HIDDEN),
    GRADIENT("d_w_gate", w_gate, DIM_HIDDEN, DIM_COLUMNS),
    GRADIENT_OR_NONE("d_b_gate", b_gate, DIM_COLUMNS),
    {.flags = HANDLER_RESULT | HANDLER_OPTIONAL | HANDLER_SETS_TYPE, .name = "d_w_gate_up",
     .types = FFI_SET_FLOATS,
     .dims = {DIM_LOCAL, DIM_HIDDEN, DIM_WIDTH}, .data = AT(gradients.w_gate_up),
     .element = AT(backward.grad_type)},
    OUT_OR_NONE("d_w_down", HANDLER_ROW_TYPE, gradients.w_down, DIM_LOCAL, DIM_INNER,
                DIM_HIDDEN),
    OUT_OR_NONE("d_b_gate_up", HANDLER_ROW_TYPE, gradients.b_gate_up, DIM_LOCAL, DIM_WIDTH),
    OUT_OR_NONE("d_b_down", HANDLER_ROW_TYPE, gradients.b_down, DIM_LOCAL, DIM_HIDDEN),
    GRADIENT_OR_NONE("d_shared_gate_up", shared_gate_up, DIM_HIDDEN, DIM_SHARED_WIDTH),
    GRADIENT_OR_NONE("d_shared_down", shared_down, DIM_SHARED_INNER, DIM_HIDDEN),
    GRADIENT_OR_NONE("d_shared_b_gate_up", shared_b_gate_up, DIM_SHARED_WIDTH),
    GRADIENT_OR_NONE("d_shared_b_down", shared_b_down, DIM_HIDDEN),
    OUT_OR_NONE("d_topk_weights_in", HANDLER_WIDE_TYPE, backward.d_topk_weights_in, DIM_TOKENS,
                DIM_TOP_K),
    MEMORY(HANDLER_RESULT, "workspace", backward.workspace, backward.workspace_bytes)};
/* clang-format on */

static const handler_operation moe_backward_operation = {
    "moe (backward)",  ROLE_MOE_BACKWARD, sizeof(moe_call),
    AT(backward.call), backward_arrays,   HANDLER_LENGTH(backward_arrays),
    read_backward,     check_backward,    run_backward};

HANDLER_EXPORTS(moe_backward)
