/* SPDX-License-Identifier: Apache-2.0 */
/* The whole layer as two custom calls, forward and backward, over the core's own layer. */
#include "job.h"
#include "read.h"

/* What both directions are given: the layer's description and its parameters. */
typedef struct moe_layer {
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared;
    epic_moe moe;
    epic_moe_weights weights;
} moe_layer;

static void read_moe(ffi_reader *reader, moe_layer *out)
{
    out->layer = read_layer(reader);
    out->router = read_router(reader);
    out->experts = read_experts(reader, "experts_");
    const bool has_shared = ffi_uint(reader, "has_shared") != 0;
    if (has_shared) out->shared = read_experts(reader, "shared_");
    out->moe = (epic_moe){.layer = &out->layer,
                          .layer_size = sizeof out->layer,
                          .router = &out->router,
                          .router_size = sizeof out->router,
                          .experts = &out->experts,
                          .experts_size = sizeof out->experts,
                          .shared = has_shared ? &out->shared : NULL,
                          .shared_size = has_shared ? sizeof out->shared : 0,
                          .balance_coeff = ffi_float(reader, "balance_coeff"),
                          .z_coeff = ffi_float(reader, "z_coeff"),
                          .sequence_tokens = ffi_int(reader, "sequence_tokens"),
                          .capacity = ffi_int(reader, "capacity")};
}

static void read_weights(ffi_reader *reader, epic_moe_weights *out)
{
    out->w_gate = ffi_arg(reader, "w_gate", FFI_OTHER).data;
    out->b_gate = ffi_arg_or_none(reader, "b_gate", FFI_OTHER).data;
    out->bias = ffi_arg_or_none(reader, "bias", EPIC_F32).data;
    out->w_gate_up = ffi_arg(reader, "w_gate_up", FFI_OTHER).data;
    out->w_down = ffi_arg(reader, "w_down", FFI_OTHER).data;
    out->b_gate_up = ffi_arg_or_none(reader, "b_gate_up", FFI_OTHER).data;
    out->b_down = ffi_arg_or_none(reader, "b_down", FFI_OTHER).data;
    out->shared_gate_up = ffi_arg_or_none(reader, "shared_gate_up", FFI_OTHER).data;
    out->shared_down = ffi_arg_or_none(reader, "shared_down", FFI_OTHER).data;
    out->shared_b_gate_up = ffi_arg_or_none(reader, "shared_b_gate_up", FFI_OTHER).data;
    out->shared_b_down = ffi_arg_or_none(reader, "shared_b_down", FFI_OTHER).data;
}

/* --------------------------------------------------------------------------- forward ---- */

typedef struct moe_job {
    job job;
    moe_layer layer;
    epic_moe_args args;
} moe_job;

static epic_result run_moe(job *base)
{
    moe_job *job = (moe_job *)base;
    return epic_moe_forward(base->use.ctx, &job->args, sizeof job->args);
}

static void read_routes(ffi_reader *reader, epic_moe_args *args)
{
    const ffi_array ids = ffi_arg_or_none(reader, "token_ids", FFI_OTHER);
    const ffi_array table = ffi_arg_or_none(reader, "table", EPIC_I32);
    args->token_ids = ids.data;
    args->token_id_type = ids.type;
    args->table = table.data;
    args->table_rows = table.rows;
    args->rank_of_expert = ffi_arg_or_none(reader, "rank_of_expert", EPIC_I32).data;
}

static void read_forward_results(ffi_reader *reader, uint32_t type, epic_moe_args *args)
{
    args->out = ffi_rows(ffi_result(reader, "out", type));
    args->loss = ffi_result(reader, "loss", EPIC_F32).data;
    args->load = ffi_result(reader, "load", EPIC_I32).data;
    args->demand = ffi_result(reader, "demand", EPIC_I32).data;
    const ffi_array saved = ffi_result(reader, "saved", FFI_U8);
    const ffi_array workspace = ffi_result(reader, "workspace", FFI_U8);
    args->saved = saved.data;
    args->saved_bytes = saved.bytes;
    args->workspace = workspace.data;
    args->workspace_bytes = workspace.bytes;
}

FFI_EXPORT ffi_error *epic_jax_moe(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    moe_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "moe";
    job->job.run = run_moe;
    read_moe(&reader, &job->layer);
    const ffi_array x = ffi_arg(&reader, "x", FFI_OTHER);
    read_weights(&reader, &job->layer.weights);
    job->args = (epic_moe_args){.moe = &job->layer.moe,
                                .moe_size = sizeof job->layer.moe,
                                .weights = &job->layer.weights,
                                .weights_size = sizeof job->layer.weights,
                                .x = ffi_rows(x)};
    read_routes(&reader, &job->args);
    read_forward_results(&reader, x.type, &job->args);
    uint32_t site;
    const job_channel channel = job_read_channel(&reader, &site);
    job->args.call.tag = job_tag(channel, site, ROLE_MOE);
    return job_start(frame, &reader, &job->job, job->args.call.tag);
}

/* -------------------------------------------------------------------------- backward ---- */

typedef struct moe_backward_job {
    job job;
    moe_layer layer;
    epic_moe_gradients gradients;
    epic_moe_backward_args args;
} moe_backward_job;

static epic_result run_moe_backward(job *base)
{
    moe_backward_job *job = (moe_backward_job *)base;
    return epic_moe_backward(base->use.ctx, &job->args, sizeof job->args);
}

static void read_gradients(ffi_reader *reader, uint32_t type, epic_moe_gradients *out)
{
    out->w_gate = ffi_result(reader, "d_w_gate", type).data;
    out->b_gate = ffi_result_or_none(reader, "d_b_gate", type).data;
    out->w_gate_up = ffi_result(reader, "d_w_gate_up", type).data;
    out->w_down = ffi_result(reader, "d_w_down", type).data;
    out->b_gate_up = ffi_result_or_none(reader, "d_b_gate_up", type).data;
    out->b_down = ffi_result_or_none(reader, "d_b_down", type).data;
    out->shared_gate_up = ffi_result_or_none(reader, "d_shared_gate_up", type).data;
    out->shared_down = ffi_result_or_none(reader, "d_shared_down", type).data;
    out->shared_b_gate_up = ffi_result_or_none(reader, "d_shared_b_gate_up", type).data;
    out->shared_b_down = ffi_result_or_none(reader, "d_shared_b_down", type).data;
}

static void read_backward(ffi_reader *reader, moe_backward_job *job)
{
    epic_moe_backward_args *args = &job->args;
    const ffi_array x = ffi_arg(reader, "x", FFI_OTHER);
    read_weights(reader, &job->layer.weights);
    const ffi_array saved = ffi_arg(reader, "saved", FFI_U8);
    args->x = ffi_rows(x);
    args->saved = saved.data;
    args->saved_bytes = saved.bytes;
    args->d_out = ffi_rows(ffi_arg(reader, "d_out", x.type));
    args->d_loss = ffi_arg(reader, "d_loss", EPIC_F32).data;
    args->d_x = ffi_rows(ffi_result(reader, "d_x", x.type));
    read_gradients(reader, x.type == EPIC_F64 ? EPIC_F64 : EPIC_F32, &job->gradients);
    const ffi_array workspace = ffi_result(reader, "workspace", FFI_U8);
    args->workspace = workspace.data;
    args->workspace_bytes = workspace.bytes;
}

FFI_EXPORT ffi_error *epic_jax_moe_backward(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    moe_backward_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "moe (backward)";
    job->job.run = run_moe_backward;
    read_moe(&reader, &job->layer);
    job->args = (epic_moe_backward_args){.moe = &job->layer.moe,
                                         .moe_size = sizeof job->layer.moe,
                                         .weights = &job->layer.weights,
                                         .weights_size = sizeof job->layer.weights,
                                         .gradients = &job->gradients,
                                         .gradients_size = sizeof job->gradients};
    read_backward(&reader, job);
    uint32_t site;
    const job_channel channel = job_read_channel(&reader, &site);
    job->args.call.tag = job_tag(channel, site, ROLE_MOE_BACKWARD);
    return job_start(frame, &reader, &job->job, job->args.call.tag);
}
