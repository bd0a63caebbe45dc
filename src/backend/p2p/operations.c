/* SPDX-License-Identifier: Apache-2.0 */
/* The operations plan and dispatch, the all-reduce operations, and the table of all operations.
 * Each call turns checked arguments into a kernel launch. No call waits or allocates, so a CUDA
 * graph can capture it. */
#include "backend/p2p/operations.h"
#include "backend/p2p/ranges.h"
#include "base/error.h"

/* number of bytes that NVLink can send while a kernel makes the plan */
#define EARLY_BYTES (5 << 20)

/* Returns the number of CTAs that make the plan: one per 64 tokens, at least 1, and at most
 * P2P_MAX_PLANNERS and num_sms. */
static int planners_of(int64_t num_tokens, int num_sms)
{
    const int64_t wanted = (num_tokens + 63) / 64;
    int planners = wanted < 1 ? 1 : wanted > P2P_MAX_PLANNERS ? P2P_MAX_PLANNERS : (int)wanted;
    return planners > num_sms ? num_sms : planners;
}

/* Returns the number of tokens per rank for which the tables of a low-latency plan kernel have
 * room. `most` is the maximum that the kernel supports. `alone`: see fill_plan(). Larger tables
 * make calls with few tokens up to 3 % slower, so contexts with more than P2P_LOWLAT_TOKENS
 * tokens use smaller tables. */
static int32_t most_planned_tokens(const epic_group *g, bool alone, int32_t most)
{
    const int64_t max_tokens = g->config.max_tokens;
    const bool is_small = alone || max_tokens > P2P_LOWLAT_TOKENS;
    if (is_small && most > P2P_LOWLAT_OTHER_TOKENS) most = P2P_LOWLAT_OTHER_TOKENS;
    return most < max_tokens ? most : (int32_t)max_tokens;
}

/* Fills in *job, the arguments of the plan kernel. Mixes the arguments that must be equal on
 * all ranks into the signature *a. If `alone` is true, the kernel only makes the plan. If
 * `alone` is false, the kernel also sends rows, and a low-latency kernel is used only for at
 * most max_lowlat_tokens tokens. */
static epic_result fill_plan(const epic_group *g, p2p_plan_job *job, const epic_plan_args *args,
                             bool alone, int32_t max_lowlat_tokens, signature *a)
{
    TRY(p2p_read_plan_layer(g, &job->layer, args->layer, args->plan_bytes));
    job->plan = args->plan;
    job->topk_idx = args->topk_idx;
    job->rank_of_expert = args->rank_of_expert;
    job->logical_of_expert = args->logical_of_expert;
    job->expert_rows = args->expert_rows;
    job->expert_tokens = args->expert_tokens;
    job->expert_rows_i64 = args->expert_rows_i64;
    job->expert_tokens_i64 = args->expert_tokens_i64;
    job->load = args->load;
    job->logical_load = args->logical_load;
    job->demand = args->demand;
    job->num_tokens = (int32_t)args->num_tokens;
    job->block = (int32_t)(job->layer.num_experts / (uint32_t)g->num_ranks);
    job->capacity = args->capacity > P2P_MOST_ROWS ? P2P_MOST_ROWS : (int32_t)args->capacity;
    job->capacity_limit = args->capacity_limit;
    job->has_int64_ids = args->index_type == EPIC_I64;
    job->planners = planners_of(args->num_tokens, p2p_sms_of(g, &args->call));
    const bool flat = job->layer.layout == EPIC_FLAT;
    job->by_k = p2p_keeps_by_k(&job->layer);
    job->resolves = job->layer.num_logical && (flat || job->by_k);
    const bool searches = flat && job->layer.overflow == EPIC_OVERFLOW_DROP;
    /* a single CTA makes these two kinds of plans (kernels/cuda/plan/flat_drop.cuh,
     * resolve.cuh) */
    if (searches || job->resolves) job->planners = 1;
    job->at = p2p_plan_layout(g, &job->layer);
    job->max_lowlat_tokens =
        p2p_can_use_lowlat(g) && !args->rank_of_expert
            ? p2p_lowlat_plan_tokens(g->num_ranks,
                                     most_planned_tokens(g, alone, max_lowlat_tokens),
                                     &job->layer, alone)
            : 0;
    /* Backend `hosts` has no mixed plans (lowlat/plan.cuh). So all ranks must use the same kind of
     * kernel, also if one of them has max_tokens tokens. */
    if (HOSTS && job->max_lowlat_tokens < g->config.max_tokens) job->max_lowlat_tokens = 0;
    job->is_lowlat = job->max_lowlat_tokens > 0 && job->num_tokens <= job->max_lowlat_tokens;
    if (job->is_lowlat) job->planners = 1;
    p2p_sign_layer(a, &job->layer);
    signature_mix(a, args->rank_of_expert != NULL);
    return EPIC_OK;
}

static epic_result p2p_plan(epic_group *g, const epic_plan_args *args)
{
    P2P_RANGE("epic_plan");
    p2p_plan_job job = {0};
    signature a = {EPIC_OP_PLAN};
    TRY(p2p_check_group(g));
    TRY(fill_plan(g, &job, args, true, g->lowlat_tokens, &a));
    p2p_fill_self(&job.self, g, &args->call, EPIC_OP_PLAN, a);
    p2p_expect_layer(&job.self, &job.layer);
    const int sms = p2p_sms_of(g, &args->call);
    return p2p_cuda(!MANY_RANKS && job.is_lowlat
                        ? p2p_launch_lowlat_plan(&job, sms, p2p_stream_of(&args->call))
                        : p2p_launch_plan(&job, sms, p2p_stream_of(&args->call)),
                    "launching plan");
}

/* Fills in those arguments of a dispatch kernel that concern scales. If args->quantize is set,
 * dispatch computes the scales; if not, the caller passes them. Does nothing if the rows have
 * no scales. */
static epic_result fill_scales(const epic_group *g, p2p_dispatch_job *job,
                               const epic_dispatch_args *args, signature *a)
{
    const epic_const_rows in = args->scales;
    const epic_rows out = args->recv_scales;
    const int64_t bytes = out.row_bytes ? out.row_bytes : in.row_bytes;
    if (!bytes) return EPIC_OK;
    TRY(p2p_check_row(g, args->quantize ? "recv_scales" : "scales",
                      args->quantize ? out.row_bytes : in.row_bytes));
    job->scales = in.data;
    job->recv_scales = out.data;
    job->scale_bytes = bytes;
    job->type = args->type;
    job->quantize = args->quantize;
    job->scales_aligned =
        p2p_is_aligned(epic_rows_as_const(out)) && (args->quantize || p2p_is_aligned(in));
    job->scales_in_words = (uintptr_t)out.data % 4 == 0 && bytes % 4 == 0;
    signature_mix(a, (uint64_t)bytes);
    signature_mix(a, args->quantize);
    if (args->quantize) signature_mix(a, args->type);
    return EPIC_OK;
}

/* Returns whether dispatch stores rows into windows if all ranks have windows. It does so only
 * if a token has at most one slot on each rank, as in top-1 and EPIC_FLAT layers. With top-1,
 * windows are faster than staging. With EPIC_FLAT and a larger top_k windows are slower, so
 * dispatch uses them only if staging would need several rounds (docs/lab/cuda.md). */
static bool uses_windows(const epic_group *g, const p2p_dispatch_job *job)
{
    const epic_layer *layer = &job->plan.layer;
    if (!WITH_WINDOWS || !job->aligned || !job->row_bytes) return false;
    return layer->top_k == 1 ||
           (layer->layout == EPIC_FLAT && !p2p_fits_staging(g, job->row_bytes));
}

/* Fills in *job, the arguments of a dispatch kernel. Mixes the arguments that must be equal on
 * all ranks into the signature *a. Requires that job->plan.layer is set. */
static epic_result fill_dispatch(const epic_group *g, p2p_dispatch_job *job,
                                 const epic_dispatch_args *args, signature *a)
{
    TRY(p2p_check_row(g, "tokens", args->tokens.row_bytes));
    job->tokens = args->tokens.data;
    job->recv = args->recv.data;
    job->weights = args->weights;
    job->slot_weights = args->slot_weights;
    job->recv_expert = args->recv_expert;
    job->top_k = (int32_t)job->plan.layer.top_k;
    job->token_bytes = args->tokens.row_bytes ? args->tokens.row_bytes : args->recv.row_bytes;
    job->row_bytes = args->quantize ? args->recv.row_bytes : job->token_bytes;
    job->num_tokens = p2p_clamp_rows(args->tokens.num_rows);
    job->recv_rows = p2p_clamp_rows(args->recv.num_rows);
    job->aligned =
        p2p_is_aligned(args->tokens) && p2p_is_aligned(epic_rows_as_const(args->recv));
    job->bulk = g->bulk;
    job->zero_tail = (args->flags & EPIC_ZERO_TAIL) != 0;
    job->leave_padding = (args->flags & EPIC_LEAVE_PADDING) != 0;
    if (uses_windows(g, job)) job->recv_place = p2p_window_place(g, args->recv);
    if (job->recv_place) job->windows = p2p_window_table(g);
    signature_mix(a, (uint64_t)job->row_bytes);
    signature_mix(a, args->slot_weights != NULL);
    return fill_scales(g, job, args, a);
}

typedef cudaError_t launcher(const p2p_dispatch_job *, int, cudaStream_t);

/* Returns the function that launches the dispatch kernel for *job. Separate kernels exist for
 * packed rows (rows with scales), for rows that the GPU can send with bulk stores, for rows
 * that may go into windows, and for low latency. */
static launcher *launcher_of(const p2p_dispatch_job *job, bool is_lowlat)
{
    const bool is_packed = job->scale_bytes != 0;
    if (MANY_RANKS) return is_packed ? p2p_launch_dispatch_packed : p2p_launch_dispatch;
    if (!HOSTS && !MANY_RANKS && !is_lowlat && p2p_can_dispatch_bulk(job))
        return p2p_launch_dispatch_bulk;
    if (is_packed)
        return !MANY_RANKS && is_lowlat ? p2p_launch_lowlat_dispatch_packed
                                        : p2p_launch_dispatch_packed;
    if (!MANY_RANKS && is_lowlat) return p2p_launch_lowlat_dispatch;
    return WITH_WINDOWS && job->windows ? p2p_launch_dispatch_windows : p2p_launch_dispatch;
}

/* Returns whether a dispatch with the arguments *job needs the kernel for EPIC_FLAT. Some
 * dispatches with an existing EPIC_FLAT plan do not need it. The usual kernel can send them,
 * because an EPIC_FLAT plan stores the slot of the token's row where other plans store the slot
 * of a choice (a token and one of its experts). */
static bool is_flat(const p2p_dispatch_job *job)
{
    return job->plan.layer.layout == EPIC_FLAT &&
           (job->plan.planners || job->recv_expert || job->weights);
}

/* Returns whether, in measurements with up to P2P_LOWLAT_TOKENS tokens, the low-latency
 * dispatch was faster than the general kernel (docs/lab/cuda.md). The result is equal on all
 * ranks. */
static bool is_measured_lowlat(const epic_group *g, const p2p_dispatch_job *job)
{
    return !job->scale_bytes && job->row_bytes <= 16384 && g->num_ranks <= 4;
}

/* Returns the maximum number of tokens per rank for which a low-latency dispatch kernel may be
 * used, or -1 if no such kernel supports the arguments *job. The result is equal on all
 * ranks. */
static int32_t max_lowlat_rows(const epic_group *g, const p2p_dispatch_job *job)
{
    /* the backend `hosts` has no low-latency kernel for rows with scales */
    if (HOSTS && job->scale_bytes) return -1;
    const int32_t most = job->quantize                ? P2P_LOWLAT_QUANTIZED_TOKENS
                         : is_measured_lowlat(g, job) ? P2P_LOWLAT_TOKENS
                                                      : P2P_LOWLAT_OTHER_TOKENS;
    return most < g->lowlat_tokens ? most : g->lowlat_tokens;
}

static epic_result launch_dispatch(const epic_group *g, p2p_dispatch_job *job,
                                   const epic_call *call, const char *what)
{
    job->flat = is_flat(job);
    const int64_t bytes = p2p_packed_bytes(job->row_bytes, job->scale_bytes);
    const bool is_lowlat =
        job->plan.planners ? job->plan.is_lowlat
                           : !job->flat && p2p_fits_lowlat(g, &job->plan.layer, job->num_tokens,
                                                           max_lowlat_rows(g, job), bytes);
    return p2p_cuda(launcher_of(job, is_lowlat)(job, p2p_sms_of(g, call), p2p_stream_of(call)),
                    what);
}

static epic_result p2p_dispatch(epic_group *g, const epic_dispatch_args *args)
{
    P2P_RANGE("epic_dispatch");
    p2p_dispatch_job job = {0};
    signature a = {EPIC_OP_DISPATCH};
    TRY(p2p_check_group(g));
    TRY(p2p_read_plan_layer(g, &job.plan.layer, args->layer, args->plan_bytes));
    TRY(fill_dispatch(g, &job, args, &a));
    p2p_fill_self(&job.plan.self, g, &args->call, EPIC_OP_DISPATCH, a);
    p2p_expect_layer(&job.plan.self, &job.plan.layer);
    job.plan.at = p2p_plan_layout(g, &job.plan.layer);
    job.plan.plan = (uint8_t *)(uintptr_t)args->plan;
    job.plan_bytes = args->plan_bytes;
    return launch_dispatch(g, &job, &args->call, "launching dispatch");
}

/* Returns whether one kernel may make the plan and already send rows before the plan is
 * complete. This requires three things. No choice (a token and one of its experts) can be
 * dropped, neither for lack of capacity nor by EPIC_DROP_ABSENT. The rank of a choice depends
 * only on its expert id. All rows fit into the staging memory. */
static bool can_overlap(const epic_group *g, const p2p_dispatch_job *job)
{
    const int64_t row = p2p_packed_bytes(job->row_bytes, job->scale_bytes);
    if (HOSTS && job->plan.layer.layout == EPIC_FLAT)
        /* in the backend `hosts`, a kernel that both makes an EPIC_FLAT plan and sends rows
         * would not wait for every word that peers put into the inbox (net.cuh) */
        return false;
    return job->plan.layer.overflow == EPIC_OVERFLOW_ERROR && !job->plan.layer.num_logical &&
           !(job->plan.layer.flags & EPIC_DROP_ABSENT) && p2p_fits_staging(g, row);
}

/* Returns the number of early tokens: tokens whose rows are sent while the plan is made. With
 * uniform routing, NVLink can send EARLY_BYTES bytes of rows in that time. At most a fifth of
 * the tokens are sent early. Receiving starts only when the plan is complete. With more early
 * tokens, receiving would not catch up with sending. */
static int32_t early_tokens_of(const epic_group *g, const p2p_dispatch_job *job)
{
    const int64_t ranks = g->num_ranks, top_k = job->plan.layer.top_k;
    const int64_t quarters = top_k < ranks ? 4 * top_k * (ranks - 1) / ranks : 4 * (ranks - 1);
    const int64_t token_bytes = job->row_bytes * quarters / 4 + 1;
    const int64_t by_time = EARLY_BYTES / token_bytes, most = job->num_tokens / 5;
    return (int32_t)(by_time < most ? by_time : most);
}

/* Implements epic_ops.plan_dispatch. Launches one kernel if can_overlap() returns true. If not,
 * launches a plan kernel and then a dispatch kernel. */
static epic_result p2p_plan_dispatch(epic_group *g, const epic_plan_args *plan_args,
                                     const epic_dispatch_args *args)
{
    P2P_RANGE("epic_plan_dispatch");
    p2p_dispatch_job job = {0};
    signature a = {EPIC_OP_PLAN * 16 + EPIC_OP_DISPATCH};
    TRY(p2p_check_group(g));
    TRY(p2p_read_layer(g, &job.plan.layer, plan_args->layer));
    TRY(fill_dispatch(g, &job, args, &a));
    TRY(fill_plan(g, &job.plan, plan_args, false, max_lowlat_rows(g, &job), &a));
    if (!can_overlap(g, &job)) {
        epic_dispatch_args second = *args;
        second.call = plan_args->call;
        second.layer = plan_args->layer;
        second.plan = plan_args->plan;
        second.plan_bytes = plan_args->plan_bytes;
        TRY(p2p_plan(g, plan_args));
        return p2p_dispatch(g, &second);
    }
    job.num_early_tokens = early_tokens_of(g, &job);
    p2p_fill_self(&job.plan.self, g, &plan_args->call, EPIC_OP_DISPATCH, a);
    p2p_expect_layer(&job.plan.self, &job.plan.layer);
    job.plan_bytes = plan_args->plan_bytes;
    return launch_dispatch(g, &job, &plan_args->call, "launching plan and dispatch");
}

/* Implements epic_ops.allreduce_sum: an all-reduce of `count` floats per rank. Each launch sums
 * as many floats as fit into the staging memory. */
static epic_result p2p_sum(epic_group *g, const epic_allreduce_sum_args *args)
{
    P2P_RANGE("epic_allreduce_sum");
    /* maximum number of floats that one launch can sum */
    const int64_t most = g->self.at.source_bytes / 16 * 4;
    signature a = {EPIC_OP_SUM};
    TRY(p2p_check_group(g));
    signature_mix(&a, (uint64_t)args->count);
    signature_mix(&a, args->order);
    int64_t done = 0;
    do {
        const int64_t left = args->count - done;
        p2p_sum_job job = {.data = args->data + done,
                           .count = left < most ? left : most,
                           .order = args->order};
        p2p_fill_self(&job.self, g, &args->call, EPIC_OP_SUM, a);
        TRY(p2p_cuda(
            p2p_launch_sum(&job, p2p_sms_of(g, &args->call), p2p_stream_of(&args->call)),
            "launching sum"));
        done += job.count;
    } while (done < args->count);
    return EPIC_OK;
}

/* Implements epic_ops.sum_replicas. The plan lists the replicas of each logical expert, so one
 * launch computes the sums of all logical experts. */
static epic_result p2p_sum_replicas(epic_group *g, const epic_sum_replicas_args *args)
{
    P2P_RANGE("epic_sum_replicas");
    signature a = {EPIC_OP_SUM * 16 + 1};
    TRY(p2p_check_group(g));
    signature_mix(&a, (uint64_t)args->data.row_bytes);
    p2p_sum_replicas_job job = {.plan = args->plan,
                                .plan_bytes = args->plan_bytes,
                                .data = args->data.data,
                                .count = args->data.row_bytes / (int64_t)sizeof(float),
                                .num_rows = p2p_clamp_rows(args->data.num_rows)};
    p2p_fill_self(&job.self, g, &args->call, EPIC_OP_SUM, a);
    return p2p_cuda(
        p2p_launch_sum_replicas(&job, p2p_sms_of(g, &args->call), p2p_stream_of(&args->call)),
        "launching sum_replicas");
}

static uint32_t p2p_max_sms(const epic_group *g)
{
    return (uint32_t)g->num_sms;
}

const epic_ops p2p_ops = {
    .plan = p2p_plan,
    .dispatch = p2p_dispatch,
    .plan_dispatch = p2p_plan_dispatch,
    .combine = p2p_combine,
    .dispatch_backward = p2p_dispatch_backward,
    .combine_backward = p2p_combine_backward,
    .allreduce_sum = p2p_sum,
    .sum_replicas = p2p_sum_replicas,
    .add_window = p2p_add_window,
#if WITH_VACANT_SEATS
    .set_members = p2p_set_members,
    .regroup = &p2p_regroup,
#endif
    .router_forward = p2p_router_forward,
    .router_backward = p2p_router_backward,
    .balance_loss_forward = p2p_balance_loss_forward,
    .balance_loss_backward = p2p_balance_loss_backward,
    .z_loss_forward = p2p_z_loss_forward,
    .z_loss_backward = p2p_z_loss_backward,
    .bias_update = p2p_bias_update,
    .experts_forward = p2p_experts_forward,
    .experts_backward = p2p_experts_backward,
    .gate_forward = p2p_gate,
    .gate_backward = p2p_gate_backward,
    .mask_zero_experts = p2p_mask_zero_experts,
    .shared_gate_forward = p2p_shared_gate,
    .shared_gate_backward = p2p_shared_gate_backward,
    .zero_experts_backward = p2p_zero_weights,
    .add_local_rows = p2p_add_local_rows,
    .check_plan_fits = p2p_check_plan_fits,
    .add_array = p2p_add,
    .read_counts = p2p_read_counts,
    .sum_trees = p2p_sum_trees,
    .write_losses = p2p_write_losses,
    .read_d_losses = p2p_read_d_losses,
    .poll_failure = p2p_check,
    .next_data_error = p2p_next_data_error,
    .read_waits = p2p_read_waits,
    .record_waits = p2p_record_waits,
    .max_sms = p2p_max_sms,
    .abort = p2p_abort,
};
