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
#define IN(name, type, member) JOB_DATA(JOB_ARG, name, type, AT(member))
#define IN_OR_NONE(name, type, member) JOB_DATA(JOB_OPTIONAL, name, type, AT(member))
#define OUT(name, type, member) JOB_DATA(JOB_RESULT, name, type, AT(member))
#define OUT_OR_NONE(name, type, member) \
    JOB_DATA(JOB_RESULT | JOB_OPTIONAL, name, type, AT(member))
#define MEMORY(how, text, member, size) \
    {.flags = how, .name = text, .type = FFI_U8, .data = AT(member), .count = AT(size)}
#define WEIGHTS \
    IN("w_gate", FFI_OTHER, weights.w_gate), \
    IN_OR_NONE("b_gate", FFI_OTHER, weights.b_gate), \
    IN_OR_NONE("bias", EPIC_F32, weights.bias), \
    IN("w_gate_up", FFI_OTHER, weights.w_gate_up), \
    IN("w_down", FFI_OTHER, weights.w_down), \
    IN_OR_NONE("b_gate_up", FFI_OTHER, weights.b_gate_up), \
    IN_OR_NONE("b_down", FFI_OTHER, weights.b_down), \
    IN_OR_NONE("shared_gate_up", FFI_OTHER, weights.shared_gate_up), \
    IN_OR_NONE("shared_down", FFI_OTHER, weights.shared_down), \
    IN_OR_NONE("shared_b_gate_up", FFI_OTHER, weights.shared_b_gate_up), \
    IN_OR_NONE("shared_b_down", FFI_OTHER, weights.shared_b_down)
/* clang-format on */

/* --------------------------------------------------------------------------- forward ---- */

static void read_forward(ffi_reader *reader, job *base)
{
    moe_job *job = (moe_job *)base;
    read_moe(reader, &job->options);
    job->forward.moe = &job->options.moe;
    job->forward.weights = &job->weights;
}

static epic_result run_forward(job *base)
{
    moe_job *job = (moe_job *)base;
    return epic_moe_forward(base->use.ctx, &job->forward);
}

static const job_array forward_arrays[] = {
    JOB_ROWS(JOB_LEADS, "x", FFI_OTHER, AT(forward.x)),
    WEIGHTS,
    {JOB_ARRAY, JOB_OPTIONAL, "token_ids", FFI_OTHER, .data = AT(forward.token_ids),
     .element = AT(forward.token_id_type)},
    {JOB_ARRAY, JOB_OPTIONAL, "table", EPIC_I32, .data = AT(forward.table),
     .num_rows = AT(forward.table_rows)},
    IN_OR_NONE("rank_of_expert", EPIC_I32, forward.rank_of_expert),
    IN_OR_NONE("logical_of_expert", EPIC_I32, forward.logical_of_expert),
    {.kind = JOB_SITE},
    {.kind = JOB_CHANNEL},
    JOB_ROWS(JOB_RESULT, "out", JOB_SAME_TYPE, AT(forward.out)),
    OUT("loss", EPIC_F32, forward.loss),
    OUT("load", EPIC_I32, forward.load),
    OUT("demand", EPIC_I32, forward.demand),
    OUT_OR_NONE("logical_load", EPIC_I32, forward.logical_load),
    MEMORY(JOB_RESULT, "saved", forward.saved, forward.saved_bytes),
    MEMORY(JOB_RESULT, "workspace", forward.workspace, forward.workspace_bytes)};

static const job_operation moe_operation = {"moe",           ROLE_MOE,
                                            sizeof(moe_job), AT(forward.call),
                                            forward_arrays,  JOB_LENGTH(forward_arrays),
                                            read_forward,    run_forward};

JOB_HANDLERS(moe)

/* -------------------------------------------------------------------------- backward ---- */

static void read_backward(ffi_reader *reader, job *base)
{
    moe_job *job = (moe_job *)base;
    read_moe(reader, &job->options);
    job->backward.moe = &job->options.moe;
    job->backward.weights = &job->weights;
    job->backward.gradients = &job->gradients;
}

static epic_result run_backward(job *base)
{
    moe_job *job = (moe_job *)base;
    return epic_moe_backward(base->use.ctx, &job->backward);
}

/* Of experts: of any type that the core knows there, all of one. */
#define OF_EXPERT(name, member) OUT(name, FFI_OTHER, gradients.member)
#define OF_EXPERT_OR_NONE(name, member) OUT_OR_NONE(name, FFI_OTHER, gradients.member)
#define GRADIENT(name, member) OUT(name, JOB_GRADIENT_TYPE, gradients.member)
#define GRADIENT_OR_NONE(name, member) OUT_OR_NONE(name, JOB_GRADIENT_TYPE, gradients.member)

static const job_array backward_arrays[] = {
    JOB_ROWS(JOB_LEADS, "x", FFI_OTHER, AT(backward.x)),
    WEIGHTS,
    MEMORY(JOB_ARG, "saved", backward.saved, backward.saved_bytes),
    JOB_ROWS(JOB_ARG, "d_out", JOB_SAME_TYPE, AT(backward.d_out)),
    IN("d_loss", EPIC_F32, backward.d_loss),
    {.kind = JOB_SITE},
    {.kind = JOB_CHANNEL},
    JOB_ROWS(JOB_RESULT, "d_x", JOB_SAME_TYPE, AT(backward.d_x)),
    GRADIENT("d_w_gate", w_gate),
    GRADIENT_OR_NONE("d_b_gate", b_gate),
    {.flags = JOB_RESULT,
     .name = "d_w_gate_up",
     .type = FFI_OTHER,
     .data = AT(gradients.w_gate_up),
     .element = AT(backward.grad_type)},
    OF_EXPERT("d_w_down", w_down),
    OF_EXPERT_OR_NONE("d_b_gate_up", b_gate_up),
    OF_EXPERT_OR_NONE("d_b_down", b_down),
    GRADIENT_OR_NONE("d_shared_gate_up", shared_gate_up),
    GRADIENT_OR_NONE("d_shared_down", shared_down),
    GRADIENT_OR_NONE("d_shared_b_gate_up", shared_b_gate_up),
    GRADIENT_OR_NONE("d_shared_b_down", shared_b_down),
    MEMORY(JOB_RESULT, "workspace", backward.workspace, backward.workspace_bytes)};

static const job_operation moe_backward_operation = {
    "moe (backward)", ROLE_MOE_BACKWARD,           sizeof(moe_job), AT(backward.call),
    backward_arrays,  JOB_LENGTH(backward_arrays), read_backward,   run_backward};

JOB_HANDLERS(moe_backward)
