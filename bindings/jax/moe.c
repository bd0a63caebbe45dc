/* SPDX-License-Identifier: Apache-2.0 */
/* The whole layer as two custom calls, forward and backward, over the core's own layer.  Each
 * table lists the arrays in the order in which epic/jax/moe.py passes them. */
#include "job.h"
#include "read.h"

/* What the core is given in both directions, then either one's. */
typedef struct moe_job {
    job job;
    moe_options options;
    epic_moe_weights weights;
    epic_moe_gradients gradients;
    epic_moe_args forward;
    epic_moe_backward_args backward;
} moe_job;

/* clang-format off */
#define AT(member) offsetof(moe_job, member)
#define IN(name, types, member, ...) JOB_DATA(JOB_ARG, name, types, AT(member), __VA_ARGS__)
#define IN_OR_NONE(name, types, member, ...) \
    JOB_DATA(JOB_OPTIONAL, name, types, AT(member), __VA_ARGS__)
#define OUT(name, types, member, ...) \
    JOB_DATA(JOB_RESULT, name, types, AT(member), __VA_ARGS__)
#define OUT_OR_NONE(name, types, member, ...) \
    JOB_DATA(JOB_RESULT | JOB_OPTIONAL, name, types, AT(member), __VA_ARGS__)
#define MEMORY(how, text, member, size) \
    {.flags = how, .name = text, .types = FFI_SET_U8, .dims = {DIM_ANY}, .data = AT(member), \
     .count = AT(size)}
#define WEIGHTS \
    IN("w_gate", JOB_WIDE_TYPE, weights.w_gate, DIM_HIDDEN, DIM_COLUMNS), \
    IN_OR_NONE("b_gate", JOB_WIDE_TYPE, weights.b_gate, DIM_COLUMNS), \
    IN_OR_NONE("bias", FFI_SET_F32, weights.bias, DIM_COLUMNS), \
    IN("w_gate_up", JOB_WEIGHT_TYPE, weights.w_gate_up, DIM_LOCAL, DIM_HIDDEN, DIM_WIDTH), \
    IN("w_down", JOB_WEIGHT_TYPE, weights.w_down, DIM_LOCAL, DIM_INNER, DIM_HIDDEN), \
    IN_OR_NONE("b_gate_up", JOB_WEIGHT_TYPE, weights.b_gate_up, DIM_LOCAL, DIM_WIDTH), \
    IN_OR_NONE("b_down", JOB_WEIGHT_TYPE, weights.b_down, DIM_LOCAL, DIM_HIDDEN), \
    IN_OR_NONE("shared_gate_up", JOB_WEIGHT_TYPE, weights.shared_gate_up, DIM_HIDDEN, \
               DIM_SHARED_WIDTH), \
    IN_OR_NONE("shared_down", JOB_WEIGHT_TYPE, weights.shared_down, DIM_SHARED_INNER, \
               DIM_HIDDEN), \
    IN_OR_NONE("shared_b_gate_up", JOB_WEIGHT_TYPE, weights.shared_b_gate_up, \
               DIM_SHARED_WIDTH), \
    IN_OR_NONE("shared_b_down", JOB_WEIGHT_TYPE, weights.shared_b_down, DIM_HIDDEN)
#define X(member) \
    {.flags = JOB_ARG, .name = "x", .types = JOB_SAME_TYPE, .sets_rows = DIM_TOKENS, \
     .dims = {DIM_TOKENS, DIM_HIDDEN}, .rows = AT(member)}
/* clang-format on */

static int64_t width_of(const epic_experts *experts)
{
    return experts->ungated ? experts->inner : 2 * (int64_t)experts->inner;
}

/* Reads the options of the layer, and sets the sizes that its arrays must have. */
static void read_options(ffi_reader *reader, moe_job *job)
{
    moe_options *options = &job->options;
    read_moe(reader, options);
    int64_t *sizes = job->job.sizes;
    sizes[DIM_TOP_K] = options->layer.top_k;
    sizes[DIM_EXPERTS] = options->layer.num_experts;
    sizes[DIM_LOGICAL] = options->layer.num_logical;
    sizes[DIM_COLUMNS] = (int64_t)options->router.num_experts + options->router.zero_experts;
    sizes[DIM_LOCAL] = options->experts.num_local_experts;
    sizes[DIM_HIDDEN] = options->experts.hidden;
    sizes[DIM_INNER] = options->experts.inner;
    sizes[DIM_WIDTH] = width_of(&options->experts);
    sizes[DIM_SHARED_INNER] = options->shared.inner;
    sizes[DIM_SHARED_WIDTH] = width_of(&options->shared);
    job->job.row_type = options->experts.row_type;
    job->job.weight_type =
        options->experts.weight_type ? options->experts.weight_type : options->experts.row_type;
}

/* --------------------------------------------------------------------------- forward ---- */

static void read_forward(ffi_reader *reader, job *base)
{
    moe_job *job = (moe_job *)base;
    read_options(reader, job);
    job->forward.moe = &job->options.moe;
    job->forward.weights = &job->weights;
}

static epic_result run_forward(job *base)
{
    moe_job *job = (moe_job *)base;
    return epic_moe_forward(base->use.ctx, &job->forward);
}

/* clang-format off */
static const job_array forward_arrays[] = {
    X(forward.x),
    WEIGHTS,
    {JOB_ARRAY, JOB_OPTIONAL, "token_ids", FFI_SET_INDICES, {DIM_TOKENS},
     .data = AT(forward.token_ids), .element = AT(forward.token_id_type)},
    {JOB_ARRAY, JOB_OPTIONAL, "table", FFI_SET_I32, {DIM_TABLE_ROWS, DIM_TOP_K},
     .sets_rows = DIM_TABLE_ROWS, .data = AT(forward.table), .num_rows = AT(forward.table_rows)},
    IN_OR_NONE("rank_of_expert", FFI_SET_I32, forward.rank_of_expert, DIM_EXPERTS),
    IN_OR_NONE("logical_of_expert", FFI_SET_I32, forward.logical_of_expert, DIM_EXPERTS),
    {.kind = JOB_SITE},
    {.kind = JOB_CHANNEL},
    JOB_ROWS(JOB_RESULT, "out", JOB_SAME_TYPE, AT(forward.out), DIM_TOKENS, DIM_HIDDEN),
    OUT("loss", FFI_SET_F32, forward.loss, DIM_ONE),
    OUT("load", FFI_SET_I32, forward.load, DIM_EXPERTS),
    OUT("demand", FFI_SET_I32, forward.demand, DIM_ONE),
    OUT_OR_NONE("logical_load", FFI_SET_I32, forward.logical_load, DIM_LOGICAL),
    MEMORY(JOB_RESULT, "saved", forward.saved, forward.saved_bytes),
    MEMORY(JOB_RESULT, "workspace", forward.workspace, forward.workspace_bytes)};
/* clang-format on */

static const job_operation moe_operation = {"moe",           ROLE_MOE,
                                            sizeof(moe_job), AT(forward.call),
                                            forward_arrays,  JOB_LENGTH(forward_arrays),
                                            read_forward,    NULL,
                                            run_forward};

JOB_HANDLERS(moe)

/* -------------------------------------------------------------------------- backward ---- */

static void read_backward(ffi_reader *reader, job *base)
{
    moe_job *job = (moe_job *)base;
    read_options(reader, job);
    job->backward.moe = &job->options.moe;
    job->backward.weights = &job->weights;
    job->backward.gradients = &job->gradients;
}

static epic_result run_backward(job *base)
{
    moe_job *job = (moe_job *)base;
    return epic_moe_backward(base->use.ctx, &job->backward);
}

/* Gradients of experts have the type of d_w_gate_up, which leads them. */
/* clang-format off */
#define GRADIENT(name, member, ...) \
    OUT(name, JOB_WIDE_TYPE, gradients.member, __VA_ARGS__)
#define GRADIENT_OR_NONE(name, member, ...) \
    OUT_OR_NONE(name, JOB_WIDE_TYPE, gradients.member, __VA_ARGS__)

static const job_array backward_arrays[] = {
    X(backward.x),
    WEIGHTS,
    MEMORY(JOB_ARG, "saved", backward.saved, backward.saved_bytes),
    JOB_ROWS(JOB_ARG, "d_out", JOB_SAME_TYPE, AT(backward.d_out), DIM_TOKENS, DIM_HIDDEN),
    IN("d_loss", FFI_SET_F32, backward.d_loss, DIM_ONE),
    {.kind = JOB_SITE},
    {.kind = JOB_CHANNEL},
    JOB_ROWS(JOB_RESULT, "d_x", JOB_SAME_TYPE, AT(backward.d_x), DIM_TOKENS, DIM_HIDDEN),
    GRADIENT("d_w_gate", w_gate, DIM_HIDDEN, DIM_COLUMNS),
    GRADIENT_OR_NONE("d_b_gate", b_gate, DIM_COLUMNS),
    {.flags = JOB_RESULT | JOB_LEADS, .name = "d_w_gate_up", .types = FFI_SET_FLOATS,
     .dims = {DIM_LOCAL, DIM_HIDDEN, DIM_WIDTH}, .data = AT(gradients.w_gate_up),
     .element = AT(backward.grad_type)},
    OUT("d_w_down", JOB_SAME_TYPE, gradients.w_down, DIM_LOCAL, DIM_INNER, DIM_HIDDEN),
    OUT_OR_NONE("d_b_gate_up", JOB_SAME_TYPE, gradients.b_gate_up, DIM_LOCAL, DIM_WIDTH),
    OUT_OR_NONE("d_b_down", JOB_SAME_TYPE, gradients.b_down, DIM_LOCAL, DIM_HIDDEN),
    GRADIENT_OR_NONE("d_shared_gate_up", shared_gate_up, DIM_HIDDEN, DIM_SHARED_WIDTH),
    GRADIENT_OR_NONE("d_shared_down", shared_down, DIM_SHARED_INNER, DIM_HIDDEN),
    GRADIENT_OR_NONE("d_shared_b_gate_up", shared_b_gate_up, DIM_SHARED_WIDTH),
    GRADIENT_OR_NONE("d_shared_b_down", shared_b_down, DIM_HIDDEN),
    MEMORY(JOB_RESULT, "workspace", backward.workspace, backward.workspace_bytes)};
/* clang-format on */

static const job_operation moe_backward_operation = {
    "moe (backward)", ROLE_MOE_BACKWARD,           sizeof(moe_job), AT(backward.call),
    backward_arrays,  JOB_LENGTH(backward_arrays), read_backward,   NULL,
    run_backward};

JOB_HANDLERS(moe_backward)
