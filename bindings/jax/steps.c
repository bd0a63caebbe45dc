/* SPDX-License-Identifier: Apache-2.0 */
/* The collective operations as custom calls: plan, dispatch, combine, their gradients, sum.
 *
 * Each handler reads its arrays in the order in which epic/jax/steps.py passes them, copies what
 * it needs into a job and returns; the job's thread makes the core's call.  Slots past the last
 * slab are always written as zeros: an XLA result has no memory of its own to be left alone. */
#include <string.h>

#include "job.h"
#include "read.h"

/* ------------------------------------------------------------------------------ plan ---- */

typedef struct plan_job {
    job job;
    epic_layer layer;
    epic_plan_args plan;
    epic_dispatch_args dispatch; /* plan_dispatch only */
    job_channel channel;
    uint64_t tag;
} plan_job;

static void read_plan_inputs(ffi_reader *reader, plan_job *job)
{
    const ffi_array chosen = ffi_arg(reader, "topk_idx", FFI_OTHER);
    job->plan.topk_idx = chosen.data;
    job->plan.index_type = chosen.type;
    job->plan.num_tokens = chosen.rows;
    job->plan.rank_of_expert = ffi_arg_or_none(reader, "rank_of_expert", EPIC_I32).data;
    job->layer = read_layer(reader);
    job->plan.layer = &job->layer;
    job->plan.layer_size = sizeof job->layer;
    job->plan.capacity = ffi_int(reader, "capacity");
    if (reader->error == NULL && chosen.columns != job->layer.top_k)
        reader->error =
            ffi_fail(reader->frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                     "topk_idx: [%lld, %lld] is not [num_tokens, top_k %u]",
                     (long long)chosen.rows, (long long)chosen.columns, job->layer.top_k);
}

static void read_plan_results(ffi_reader *reader, plan_job *job)
{
    const ffi_array plan = ffi_result(reader, "plan", FFI_U8);
    job->plan.plan = plan.data;
    job->plan.plan_bytes = plan.bytes < JOB_PLAN_TAIL ? 0 : (size_t)plan.bytes - JOB_PLAN_TAIL;
    job->plan.expert_rows = ffi_result(reader, "expert_rows", EPIC_I32).data;
    job->plan.expert_tokens = ffi_result(reader, "expert_tokens", EPIC_I32).data;
    job->plan.load = ffi_result(reader, "load", EPIC_I32).data;
    job->plan.demand = ffi_result(reader, "demand", EPIC_I32).data;
}

static void read_plan_tag(ffi_reader *reader, plan_job *job)
{
    uint32_t site;
    job->channel = job_read_channel(reader, &site);
    job->tag = job_tag(job->channel, site, ROLE_PLAN);
    job->plan.call.tag = job->tag;
}

/* The tail comes first, so that a plan that fails has it too. */
static epic_result run_plan(job *base)
{
    plan_job *job = (plan_job *)base;
    job_put_channel(job->plan.plan, job->plan.plan_bytes, job->channel);
    return epic_plan(base->use.ctx, &job->plan, sizeof job->plan);
}

FFI_EXPORT ffi_error *epic_jax_plan(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    plan_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "plan";
    job->job.run = run_plan;
    read_plan_inputs(&reader, job);
    read_plan_tag(&reader, job);
    read_plan_results(&reader, job);
    return job_start(frame, &reader, &job->job, job->tag);
}

/* -------------------------------------------------------------------------- dispatch ---- */

static void read_dispatch(ffi_reader *reader, epic_dispatch_args *args)
{
    const ffi_array tokens = ffi_arg(reader, "tokens", FFI_OTHER);
    args->tokens = ffi_rows(tokens);
    args->weights = ffi_arg_or_none(reader, "weights", EPIC_F32).data;
    args->recv = ffi_rows(ffi_result(reader, "recv", tokens.type));
    args->recv_weight = ffi_result_or_none(reader, "recv_weight", EPIC_F32).data;
    args->flags = EPIC_ZERO_TAIL;
}

static epic_result run_plan_dispatch(job *base)
{
    plan_job *job = (plan_job *)base;
    job_put_channel(job->plan.plan, job->plan.plan_bytes, job->channel);
    return epic_plan_dispatch(base->use.ctx, &job->plan, sizeof job->plan, &job->dispatch,
                              sizeof job->dispatch);
}

FFI_EXPORT ffi_error *epic_jax_plan_dispatch(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    plan_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "plan_dispatch";
    job->job.run = run_plan_dispatch;
    read_plan_inputs(&reader, job);
    read_plan_results(&reader, job);
    read_dispatch(&reader, &job->dispatch);
    read_plan_tag(&reader, job);
    return job_start(frame, &reader, &job->job, job->tag);
}

/* What all operations with a finished plan begin and end with. */
typedef struct plan_use {
    const void *plan;
    size_t plan_bytes;
    job_channel channel;
} plan_use;

static plan_use read_plan(ffi_reader *reader)
{
    ffi_array plan = ffi_arg(reader, "plan", FFI_U8);
    const job_channel channel = job_plan_channel(reader, &plan);
    return (plan_use){plan.data, (size_t)plan.bytes, channel};
}

static uint64_t read_tag(ffi_reader *reader, plan_use plan, job_role role)
{
    return job_tag(plan.channel, (uint32_t)ffi_arg_int(reader, "site"), role);
}

typedef struct dispatch_job {
    job job;
    epic_dispatch_args args;
} dispatch_job;

static epic_result run_dispatch(job *base)
{
    dispatch_job *job = (dispatch_job *)base;
    return epic_dispatch(base->use.ctx, &job->args, sizeof job->args);
}

FFI_EXPORT ffi_error *epic_jax_dispatch(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    dispatch_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "dispatch";
    job->job.run = run_dispatch;
    const plan_use plan = read_plan(&reader);
    job->args.plan = plan.plan;
    job->args.plan_bytes = plan.plan_bytes;
    read_dispatch(&reader, &job->args);
    job->args.call.tag = read_tag(&reader, plan, ROLE_DISPATCH);
    return job_start(frame, &reader, &job->job, job->args.call.tag);
}

typedef struct dispatch_backward_job {
    job job;
    epic_dispatch_backward_args args;
} dispatch_backward_job;

static epic_result run_dispatch_backward(job *base)
{
    dispatch_backward_job *job = (dispatch_backward_job *)base;
    return epic_dispatch_backward(base->use.ctx, &job->args, sizeof job->args);
}

FFI_EXPORT ffi_error *epic_jax_dispatch_backward(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    dispatch_backward_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "dispatch (backward)";
    job->job.run = run_dispatch_backward;
    const plan_use plan = read_plan(&reader);
    const ffi_array d_recv = ffi_arg(&reader, "d_recv", FFI_OTHER);
    job->args = (epic_dispatch_backward_args){
        .plan = plan.plan,
        .plan_bytes = plan.plan_bytes,
        .type = d_recv.type,
        .d_recv = ffi_rows(d_recv),
        .d_recv_weight = ffi_arg_or_none(&reader, "d_recv_weight", EPIC_F32).data,
        .d_tokens = ffi_rows(ffi_result(&reader, "d_tokens", d_recv.type)),
        .d_weights = ffi_result_or_none(&reader, "d_weights", EPIC_F32).data,
    };
    job->args.call.tag = read_tag(&reader, plan, ROLE_DISPATCH_BACKWARD);
    return job_start(frame, &reader, &job->job, job->args.call.tag);
}

/* --------------------------------------------------------------------------- combine ---- */

typedef struct combine_job {
    job job;
    epic_combine_args args;
} combine_job;

static epic_result run_combine(job *base)
{
    combine_job *job = (combine_job *)base;
    return epic_combine(base->use.ctx, &job->args, sizeof job->args);
}

FFI_EXPORT ffi_error *epic_jax_combine(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    combine_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "combine";
    job->job.run = run_combine;
    const plan_use plan = read_plan(&reader);
    const ffi_array rows = ffi_arg(&reader, "rows", FFI_OTHER);
    job->args = (epic_combine_args){
        .plan = plan.plan,
        .plan_bytes = plan.plan_bytes,
        .type = rows.type,
        .rows = ffi_rows(rows),
        .slot_weights = ffi_arg_or_none(&reader, "slot_weights", EPIC_F32).data,
        .out = ffi_rows(ffi_result(&reader, "out", rows.type)),
    };
    job->args.call.tag = read_tag(&reader, plan, ROLE_COMBINE);
    return job_start(frame, &reader, &job->job, job->args.call.tag);
}

typedef struct combine_backward_job {
    job job;
    epic_combine_backward_args args;
} combine_backward_job;

static epic_result run_combine_backward(job *base)
{
    combine_backward_job *job = (combine_backward_job *)base;
    return epic_combine_backward(base->use.ctx, &job->args, sizeof job->args);
}

FFI_EXPORT ffi_error *epic_jax_combine_backward(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    combine_backward_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "combine (backward)";
    job->job.run = run_combine_backward;
    const plan_use plan = read_plan(&reader);
    const ffi_array d_out = ffi_arg(&reader, "d_out", FFI_OTHER);
    job->args = (epic_combine_backward_args){
        .plan = plan.plan,
        .plan_bytes = plan.plan_bytes,
        .type = d_out.type,
        .d_out = ffi_rows(d_out),
        .rows = ffi_rows(ffi_arg_or_none(&reader, "rows", d_out.type)),
        .slot_weights = ffi_arg_or_none(&reader, "slot_weights", EPIC_F32).data,
        .d_rows = ffi_rows(ffi_result(&reader, "d_rows", d_out.type)),
        .d_slot_weights = ffi_result_or_none(&reader, "d_slot_weights", EPIC_F32).data,
        .flags = EPIC_ZERO_TAIL,
    };
    job->args.call.tag = read_tag(&reader, plan, ROLE_COMBINE_BACKWARD);
    return job_start(frame, &reader, &job->job, job->args.call.tag);
}

/* ------------------------------------------------------------------------------- sum ---- */

typedef struct sum_job {
    job job;
    epic_sum_args args;
    const void *from;
} sum_job;

static epic_result run_sum(job *base)
{
    sum_job *job = (sum_job *)base;
    if (job->from != job->args.data)
        memcpy(job->args.data, job->from, (size_t)job->args.count * sizeof(float));
    return epic_sum(base->use.ctx, &job->args, sizeof job->args);
}

FFI_EXPORT ffi_error *epic_jax_sum(ffi_frame *frame)
{
    if (ffi_is_query(frame)) return NULL;
    ffi_reader reader = ffi_read(frame);
    sum_job *job = job_new(&reader, sizeof *job);
    if (job == NULL) return reader.error;
    job->job.what = "sum";
    job->job.run = run_sum;
    const ffi_array from = ffi_arg(&reader, "x", EPIC_F32);
    const ffi_array out = ffi_result(&reader, "sum", EPIC_F32);
    uint32_t site;
    const job_channel channel = job_read_channel(&reader, &site);
    job->from = from.data;
    job->args = (epic_sum_args){.call.tag = job_tag(channel, site, ROLE_SUM),
                                .data = out.data,
                                .count = out.count,
                                .order = ffi_uint(&reader, "order")};
    if (reader.error == NULL && from.count != out.count)
        reader.error = ffi_fail(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                                "sum: %lld elements in, %lld out", (long long)from.count,
                                (long long)out.count);
    return job_start(frame, &reader, &job->job, job->args.call.tag);
}
