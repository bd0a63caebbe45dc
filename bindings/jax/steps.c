/* SPDX-License-Identifier: Apache-2.0 */
/* The collective operations as custom calls: plan, dispatch, combine, their gradients, sum.
 *
 * Each table lists the arrays in the order in which epic/jax/steps.py passes them.  Slots past the
 * last slab are always written as zeros: an XLA result has no memory of its own to be left
 * alone. */
#include "job.h"
#include "read.h"

/* The core's arguments of whichever operation it is. */
typedef struct step_job {
    job job;
    epic_layer layer;
    moe_options whole; /* of a composed layer, for the ranks to compare */
    epic_plan_args plan;
    epic_dispatch_args dispatch;
    epic_combine_args combine;
    epic_dispatch_backward_args dispatch_backward;
    epic_combine_backward_args combine_backward;
    epic_sum_args sum;
    epic_sum_replicas_args sum_replicas;
    int64_t num_local; /* most experts of a rank, as the caller reckons */
    int64_t from_count;
    const float *from;
} step_job;

/* clang-format off */
#define AT(member) offsetof(step_job, member)
#define ROWS(flags, name, type, member) JOB_ROWS(flags, name, type, AT(member))
#define TYPED_ROWS(text, member, element_member) \
    {.flags = JOB_LEADS, .name = text, .type = FFI_OTHER, .rows = AT(member), \
     .element = AT(element_member)}
#define DATA(flags, name, type, member) JOB_DATA(flags, name, type, AT(member))
#define PLAN(step) \
    {.kind = JOB_PLAN, .name = "plan", .type = FFI_U8, .data = AT(step.plan), \
     .count = AT(step.plan_bytes)}
#define SITE {.kind = JOB_SITE}
#define CHANNEL {.kind = JOB_CHANNEL}
#define OPERATION(name, text, role, first, read) \
    static const job_operation name##_operation = { \
        text, role, sizeof(step_job), AT(first.call), name##_arrays, \
        JOB_LENGTH(name##_arrays), read, run_##name}; \
    JOB_HANDLERS(name)

/* ------------------------------------------------------------------------------ plan ---- */

#define PLAN_INPUTS \
    {.name = "topk_idx", .type = FFI_OTHER, .data = AT(plan.topk_idx), \
     .element = AT(plan.index_type), .num_rows = AT(plan.num_tokens), .count = AT(from_count)}, \
    DATA(JOB_OPTIONAL, "rank_of_expert", EPIC_I32, plan.rank_of_expert), \
    DATA(JOB_OPTIONAL, "logical_of_expert", EPIC_I32, plan.logical_of_expert)
#define PLAN_RESULTS \
    {.kind = JOB_NEW_PLAN, .flags = JOB_RESULT, .name = "plan", .type = FFI_U8, \
     .data = AT(plan.plan), .count = AT(plan.plan_bytes)}, \
    DATA(JOB_RESULT, "expert_rows", EPIC_I32, plan.expert_rows), \
    DATA(JOB_RESULT, "expert_tokens", EPIC_I32, plan.expert_tokens), \
    DATA(JOB_RESULT, "load", EPIC_I32, plan.load), \
    DATA(JOB_RESULT, "demand", EPIC_I32, plan.demand), \
    DATA(JOB_RESULT | JOB_OPTIONAL, "logical_load", EPIC_I32, plan.logical_load)
/* clang-format on */

enum { MOST_RANKS = 1024 };

/* A table that the program computes says only here how many experts a rank has: those past the
 * caller's number would have slots that nobody computes.  What is no rank the core says. */
static void check_table(ffi_reader *reader, const step_job *job)
{
    const int32_t *rank_of = job->plan.rank_of_expert;
    if (reader->error != NULL || reader->on_device || rank_of == NULL) return;
    int64_t counts[MOST_RANKS] = {0};
    for (uint32_t e = 0; e < job->layer.num_experts; e++) {
        if (rank_of[e] < 0 || rank_of[e] >= MOST_RANKS) continue;
        if (++counts[rank_of[e]] <= job->num_local) continue;
        reader->error = ffi_fail(reader->frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                                 "rank_of_expert: rank %d has more than num_local_experts %lld",
                                 rank_of[e], (long long)job->num_local);
        return;
    }
}

static void read_plan(ffi_reader *reader, job *base)
{
    step_job *job = (step_job *)base;
    job->layer = read_layer(reader);
    job->plan.layer = &job->layer;
    if (ffi_uint(reader, "has_moe") != 0) {
        read_moe(reader, &job->whole);
        job->plan.moe = &job->whole.moe;
    }
    job->plan.capacity = ffi_int(reader, "capacity");
    job->num_local = ffi_int(reader, "num_local_experts");
    job->dispatch.flags = EPIC_ZERO_TAIL;
    if (reader->error == NULL && job->from_count != job->plan.num_tokens * job->layer.top_k)
        reader->error = ffi_fail(reader->frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                                 "topk_idx: %lld choices of %lld tokens are not [num_tokens, "
                                 "top_k %u]",
                                 (long long)job->from_count, (long long)job->plan.num_tokens,
                                 job->layer.top_k);
    check_table(reader, job);
}

/* The tail comes first, so that a plan that fails has it too. */
static epic_result run_plan(job *base)
{
    step_job *job = (step_job *)base;
    job_put_channel(base, job->plan.plan, job->plan.plan_bytes);
    return epic_plan(base->use.ctx, &job->plan);
}

static const job_array plan_arrays[] = {PLAN_INPUTS, SITE, CHANNEL, PLAN_RESULTS};
OPERATION(plan, "plan", ROLE_PLAN, plan, read_plan)

/* -------------------------------------------------------------------------- dispatch ---- */

/* clang-format off */
#define DISPATCH_INPUTS \
    ROWS(JOB_LEADS, "tokens", FFI_OTHER, dispatch.tokens), \
    DATA(JOB_OPTIONAL, "weights", EPIC_F32, dispatch.weights)
#define DISPATCH_RESULTS \
    ROWS(JOB_RESULT, "recv", JOB_SAME_TYPE, dispatch.recv), \
    DATA(JOB_RESULT | JOB_OPTIONAL, "slot_weights", EPIC_F32, dispatch.slot_weights)
/* clang-format on */

static void read_dispatch(ffi_reader *reader, job *base)
{
    (void)reader;
    ((step_job *)base)->dispatch.flags = EPIC_ZERO_TAIL;
}

static epic_result run_dispatch(job *base)
{
    step_job *job = (step_job *)base;
    return epic_dispatch(base->use.ctx, &job->dispatch);
}

static const job_array dispatch_arrays[] = {PLAN(dispatch), DISPATCH_INPUTS, SITE,
                                            DISPATCH_RESULTS};
OPERATION(dispatch, "dispatch", ROLE_DISPATCH, dispatch, read_dispatch)

/* One row for each (token, rank), and which of this rank's experts it is for. */
static const job_array dispatch_flat_arrays[] = {
    PLAN(dispatch), DISPATCH_INPUTS, SITE, DISPATCH_RESULTS,
    DATA(JOB_RESULT, "recv_expert", EPIC_I32, dispatch.recv_expert)};
#define run_dispatch_flat run_dispatch
OPERATION(dispatch_flat, "dispatch_flat", ROLE_DISPATCH, dispatch, read_dispatch)

static void read_dispatch_quantized(ffi_reader *reader, job *base)
{
    read_dispatch(reader, base);
    ((step_job *)base)->dispatch.quantize = ffi_uint(reader, "quantize");
}

/* Rows of a float type leave as e4m3 with scales; those of 1x32 are bytes. */
static const job_array dispatch_quantized_arrays[] = {
    PLAN(dispatch),
    TYPED_ROWS("tokens", dispatch.tokens, dispatch.type),
    DATA(JOB_OPTIONAL, "weights", EPIC_F32, dispatch.weights),
    SITE,
    ROWS(JOB_RESULT, "recv", EPIC_E4M3, dispatch.recv),
    ROWS(JOB_RESULT, "recv_scales", FFI_OTHER, dispatch.recv_scales),
    DATA(JOB_RESULT | JOB_OPTIONAL, "slot_weights", EPIC_F32, dispatch.slot_weights)};
#define run_dispatch_quantized run_dispatch
OPERATION(dispatch_quantized, "dispatch_quantized", ROLE_DISPATCH, dispatch,
          read_dispatch_quantized)

/* Rows of bytes that come with scales of their own, which are bytes here too. */
static const job_array dispatch_scaled_arrays[] = {
    PLAN(dispatch),
    ROWS(JOB_ARG, "tokens", FFI_U8, dispatch.tokens),
    ROWS(JOB_ARG, "scales", FFI_U8, dispatch.scales),
    DATA(JOB_OPTIONAL, "weights", EPIC_F32, dispatch.weights),
    SITE,
    ROWS(JOB_RESULT, "recv", FFI_U8, dispatch.recv),
    ROWS(JOB_RESULT, "recv_scales", FFI_U8, dispatch.recv_scales),
    DATA(JOB_RESULT | JOB_OPTIONAL, "slot_weights", EPIC_F32, dispatch.slot_weights)};
#define run_dispatch_scaled run_dispatch
OPERATION(dispatch_scaled, "dispatch_scaled", ROLE_DISPATCH, dispatch, read_dispatch)

static epic_result run_plan_dispatch(job *base)
{
    step_job *job = (step_job *)base;
    job_put_channel(base, job->plan.plan, job->plan.plan_bytes);
    return epic_plan_dispatch(base->use.ctx, &job->plan, &job->dispatch);
}

static const job_array plan_dispatch_arrays[] = {PLAN_INPUTS,  DISPATCH_INPUTS, SITE, CHANNEL,
                                                 PLAN_RESULTS, DISPATCH_RESULTS};
OPERATION(plan_dispatch, "plan_dispatch", ROLE_PLAN, plan, read_plan)

static epic_result run_dispatch_backward(job *base)
{
    step_job *job = (step_job *)base;
    return epic_dispatch_backward(base->use.ctx, &job->dispatch_backward);
}

static const job_array dispatch_backward_arrays[] = {
    PLAN(dispatch_backward),
    TYPED_ROWS("d_recv", dispatch_backward.d_recv, dispatch_backward.type),
    DATA(JOB_OPTIONAL, "d_slot_weights", EPIC_F32, dispatch_backward.d_slot_weights),
    SITE,
    ROWS(JOB_RESULT, "d_tokens", JOB_SAME_TYPE, dispatch_backward.d_tokens),
    DATA(JOB_RESULT | JOB_OPTIONAL, "d_weights", EPIC_F32, dispatch_backward.d_weights)};
OPERATION(dispatch_backward, "dispatch (backward)", ROLE_DISPATCH_BACKWARD, dispatch_backward,
          NULL)

/* --------------------------------------------------------------------------- combine ---- */

static epic_result run_combine(job *base)
{
    step_job *job = (step_job *)base;
    return epic_combine(base->use.ctx, &job->combine);
}

static const job_array combine_arrays[] = {
    PLAN(combine), TYPED_ROWS("rows", combine.rows, combine.type),
    DATA(JOB_OPTIONAL, "slot_weights", EPIC_F32, combine.slot_weights), SITE,
    ROWS(JOB_RESULT, "out", JOB_SAME_TYPE, combine.out)};
OPERATION(combine, "combine", ROLE_COMBINE, combine, NULL)

static void read_combine_backward(ffi_reader *reader, job *base)
{
    (void)reader;
    ((step_job *)base)->combine_backward.flags = EPIC_ZERO_TAIL;
}

static epic_result run_combine_backward(job *base)
{
    step_job *job = (step_job *)base;
    return epic_combine_backward(base->use.ctx, &job->combine_backward);
}

static const job_array combine_backward_arrays[] = {
    PLAN(combine_backward),
    TYPED_ROWS("d_out", combine_backward.d_out, combine_backward.type),
    ROWS(JOB_OPTIONAL, "rows", JOB_SAME_TYPE, combine_backward.rows),
    DATA(JOB_OPTIONAL, "slot_weights", EPIC_F32, combine_backward.slot_weights),
    SITE,
    ROWS(JOB_RESULT, "d_rows", JOB_SAME_TYPE, combine_backward.d_rows),
    DATA(JOB_RESULT | JOB_OPTIONAL, "d_slot_weights", EPIC_F32,
         combine_backward.d_slot_weights)};
OPERATION(combine_backward, "combine (backward)", ROLE_COMBINE_BACKWARD, combine_backward,
          read_combine_backward)

/* ------------------------------------------------------------------------------- sum ---- */

/* The core adds in place: XLA has been told that x and the sum are one array. */
static void check_in_place(ffi_reader *reader, const step_job *job, const void *to,
                           int64_t count)
{
    if (reader->error == NULL && (job->from != to || job->from_count != count))
        reader->error = ffi_fail(reader->frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                                 "sum: x and the result are not one array");
}

static void read_sum(ffi_reader *reader, job *base)
{
    step_job *job = (step_job *)base;
    job->sum.order = ffi_uint(reader, "order");
    check_in_place(reader, job, job->sum.data, job->sum.count);
}

static epic_result run_sum(job *base)
{
    step_job *job = (step_job *)base;
    return epic_sum(base->use.ctx, &job->sum);
}

static const job_array sum_arrays[] = {
    {.name = "x", .type = EPIC_F32, .data = AT(from), .count = AT(from_count)},
    SITE,
    CHANNEL,
    {.flags = JOB_RESULT,
     .name = "sum",
     .type = EPIC_F32,
     .data = AT(sum.data),
     .count = AT(sum.count)}};
OPERATION(sum, "sum", ROLE_SUM, sum, read_sum)

static void read_sum_replicas(ffi_reader *reader, job *base)
{
    step_job *job = (step_job *)base;
    const epic_rows rows = job->sum_replicas.data;
    check_in_place(reader, job, rows.data,
                   rows.num_rows * rows.row_bytes / (int64_t)sizeof(float));
}

static epic_result run_sum_replicas(job *base)
{
    step_job *job = (step_job *)base;
    return epic_sum_replicas(base->use.ctx, &job->sum_replicas);
}

static const job_array sum_replicas_arrays[] = {
    PLAN(sum_replicas),
    {.name = "x", .type = EPIC_F32, .data = AT(from), .count = AT(from_count)},
    SITE,
    ROWS(JOB_RESULT, "sum", EPIC_F32, sum_replicas.data),
    DATA(JOB_RESULT, "workspace", EPIC_F32, sum_replicas.workspace)};
OPERATION(sum_replicas, "sum_replicas", ROLE_SUM_REPLICAS, sum_replicas, read_sum_replicas)
