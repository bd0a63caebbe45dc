/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/operations.h"
#include "backend/p2p/ranges.h"
#include "base/error.h"

/* number of tokens that combine sends before it begins to receive (measured in
 * docs/lab/cuda.md) */
#define COMBINE_LAG 48

static epic_result check_type(uint32_t type)
{
    if (type == EPIC_F32 || type == EPIC_BF16 || type == EPIC_F16) return EPIC_OK;
    return epic_fail(EPIC_ENOTSUP,
                     "type is %u: must be EPIC_F32, EPIC_BF16 or EPIC_F16 in CUDA contexts",
                     type);
}

/* Returns the memory that kernels get instead of a caller's array that has no rows. For a row
 * that does not exist, kernels read row 0 of the array (kernels/cuda/combine/slots.cuh), so the
 * array must have at least one row. */
static void *scratch_of(const epic_group *g)
{
    return g->self.heap[g->rank] + g->self.at.scratch;
}

typedef struct plan_argument {
    const epic_layer *layer;
    const void *plan;
    int64_t plan_bytes;
} plan_argument;

/* A leaf of the sum tree is a block of consecutive experts, whose rows are summed first. If
 * each rank has several leaves, and the fast kernel for several leaves supports the layer,
 * returns the number of leaves per rank. If not, returns 0. */
static int32_t leaves_to_stream(const epic_group *g, const epic_layer *layer)
{
    const uint32_t leaves = layer->leaves / (uint32_t)p2p_num_members(g);
    const bool streams = WITH_WINDOWS && layer->sum_order == EPIC_TREE && g->num_ranks <= 8 &&
                         leaves > 1 && leaves <= P2P_STREAM_LEAVES && layer->top_k <= 32 &&
                         layer->layout != EPIC_FLAT && !layer->partial_type;
    return streams ? (int32_t)leaves : 0;
}

static epic_result fill_combine_plan(const epic_group *g, p2p_combine_job *job,
                                     epic_layer *layer, const plan_argument *given)
{
    TRY(p2p_read_plan_layer(g, layer, given->layer, given->plan_bytes));
    const device_plan_layout at = p2p_plan_layout(g, layer);
    job->plan = given->plan;
    job->plan_bytes = given->plan_bytes;
    job->rank_of_at = at.rank_of;
    job->records_at = at.records;
    job->top_k = (int32_t)layer->top_k;
    job->tree = layer->sum_order == EPIC_TREE;
    job->flat = layer->layout == EPIC_FLAT;
    job->leaves = leaves_to_stream(g, layer);
    return EPIC_OK;
}

/* Returns the maximum number of tokens of this rank for which combine uses its low-latency
 * kernel on num_sms SMs. Assumes that all ranks have equally many tokens. Each token has one
 * unit of work per P2P_LOWLAT_UNIT_BYTES bytes of its row. */
static int32_t max_lowlat_tokens(const epic_group *g, int64_t row_bytes, int num_sms)
{
    const int64_t pieces = (row_bytes + P2P_LOWLAT_UNIT_BYTES - 1) / P2P_LOWLAT_UNIT_BYTES;
    const int64_t units_per_token = pieces > 0 ? pieces * g->num_ranks : 1;
    const int64_t tokens = (int64_t)num_sms * P2P_LOWLAT_COMBINE_UNITS / units_per_token;
    if (tokens <= P2P_LOWLAT_COMBINE_TOKENS) return P2P_LOWLAT_COMBINE_TOKENS;
    return tokens < P2P_LOWLAT_TOKENS ? (int32_t)tokens : P2P_LOWLAT_TOKENS;
}

static epic_result launch_combine(const epic_group *g, p2p_combine_job *job,
                                  const epic_layer *layer, const epic_call *call,
                                  epic_const_rows rows, epic_rows out, signature a,
                                  epic_operation operation)
{
    TRY(check_type(job->type));
    TRY(p2p_check_row(g, "rows", rows.row_bytes));
    job->rows = rows.data;
    job->out = out.data;
    job->row_bytes = rows.row_bytes ? rows.row_bytes : out.row_bytes;
    job->num_tokens = p2p_clamp_rows(out.num_rows);
    job->num_rows = p2p_clamp_rows(rows.num_rows);
    if (!job->num_rows) {
        job->rows = scratch_of(g);
        if (job->slot_weights) job->slot_weights = scratch_of(g);
        if (job->slot_floats) job->slot_floats = scratch_of(g);
    }
    job->aligned = p2p_is_aligned(rows) && p2p_is_aligned(epic_rows_as_const(out));
    job->lag = COMBINE_LAG;
    signature_mix(&a, (uint64_t)job->row_bytes);
    signature_mix(&a, job->type);
    p2p_fill_self(&job->self, g, call, operation, a);
    p2p_expect_layer(&job->self, layer);
    const bool is_lowlat =
        !HOSTS && !MANY_RANKS && !p2p_needs_general_combine(g, layer) &&
        p2p_fits_lowlat(g, layer, job->num_tokens,
                        max_lowlat_tokens(g, job->row_bytes, p2p_sms_of(g, call)),
                        job->row_bytes);
    /* Do not use windows if the rows fit into the staging memory at once, because staging is
     * then faster (docs/lab/cuda.md). */
    if (WITH_WINDOWS && job->aligned && job->row_bytes && layer->top_k == 1 &&
        !p2p_fits_staging(g, job->row_bytes))
        job->out_place = p2p_window_place(g, out);
    if (job->out_place) job->windows = p2p_window_table(g);
    cudaError_t (*const launch)(const p2p_combine_job *, int, cudaStream_t) =
        !MANY_RANKS && is_lowlat       ? p2p_launch_lowlat_combine
        : WITH_WINDOWS && job->windows ? p2p_launch_combine_windows
                                       : p2p_launch_combine;
    return p2p_cuda(launch(job, p2p_sms_of(g, call), p2p_stream_of(call)), "launching combine");
}

/* Implements epic_ops.combine: sends the rows of each token back to the token's rank, which
 * sums them. */
epic_result p2p_combine(epic_group *g, const epic_combine_args *args)
{
    P2P_RANGE("epic_combine");
    p2p_combine_job job = {0};
    signature a = {EPIC_OP_COMBINE};
    epic_layer layer;
    TRY(p2p_check_group(g));
    TRY(fill_combine_plan(g, &job, &layer,
                          &(plan_argument){args->layer, args->plan, args->plan_bytes}));
    job.slot_weights = args->slot_weights;
    job.type = args->type;
    signature_mix(&a, args->slot_weights != NULL);
    return launch_combine(g, &job, &layer, &args->call, args->rows, args->out, a,
                          EPIC_OP_COMBINE);
}

/* For an EPIC_FLAT plan: launches a separate operation that sends the gradients of the weights
 * (d_slot_weights) back to the tokens' ranks. */
static epic_result launch_flat_floats(const epic_group *g,
                                      const epic_dispatch_backward_args *args,
                                      const p2p_combine_job *rows, const epic_layer *layer,
                                      signature a)
{
    p2p_combine_job job = *rows;
    job.slot_floats = args->d_slot_weights;
    job.choice_floats = args->d_weights;
    if (!job.num_rows) job.slot_floats = scratch_of(g);
    signature_mix(&a, 1);
    p2p_fill_self(&job.self, g, &args->call, EPIC_OP_DISPATCH_BACKWARD, a);
    p2p_expect_layer(&job.self, layer);
    return p2p_cuda(
        p2p_launch_flat_floats(&job, p2p_sms_of(g, &args->call), p2p_stream_of(&args->call)),
        "launching dispatch_backward");
}

/* Implements epic_ops.dispatch_backward as a combine without weights. Except for EPIC_FLAT
 * plans, the same combine sends the gradients of the weights back, too. For EPIC_FLAT plans, a
 * second operation does so. */
epic_result p2p_dispatch_backward(epic_group *g, const epic_dispatch_backward_args *args)
{
    P2P_RANGE("epic_dispatch_backward");
    p2p_combine_job job = {0};
    signature a = {EPIC_OP_DISPATCH_BACKWARD};
    epic_layer layer;
    TRY(p2p_check_group(g));
    TRY(fill_combine_plan(g, &job, &layer,
                          &(plan_argument){args->layer, args->plan, args->plan_bytes}));
    const bool separate = job.flat && args->d_weights;
    job.slot_floats = separate ? NULL : args->d_slot_weights;
    job.choice_floats = separate ? NULL : args->d_weights;
    job.type = args->type;
    signature_mix(&a, args->d_weights != NULL);
    TRY(launch_combine(g, &job, &layer, &args->call, args->d_recv, args->d_tokens, a,
                       EPIC_OP_DISPATCH_BACKWARD));
    return separate ? launch_flat_floats(g, args, &job, &layer, a) : EPIC_OK;
}

static void fill_quantized(p2p_combine_backward_job *job,
                           const epic_combine_backward_args *args)
{
    const epic_rows *rows = &args->d_rows, *scales = &args->d_rows_scales;
    /* number of bytes (e4m3 values) that each lane of a warp stores at a time */
    const int lane_bytes = args->type == EPIC_F32 ? 4 : 8;
    if (!args->quantize) return;
    if (!args->d_out.row_bytes)
        job->row_bytes = rows->row_bytes * (args->type == EPIC_F32 ? 4 : 2);
    job->quantize = args->quantize;
    job->d_rows_scales = scales->data;
    job->scale_bytes = scales->row_bytes;
    job->quantized_bytes = rows->row_bytes;
    job->quantized_whole =
        ((uintptr_t)rows->data | (uint64_t)rows->row_bytes) % (uint64_t)lane_bytes == 0;
    job->scales_in_words = ((uintptr_t)scales->data | (uint64_t)scales->row_bytes) % 4 == 0;
}

/* Implements epic_ops.combine_backward: sends the gradient of each token to the ranks of the
 * token's experts. */
epic_result p2p_combine_backward(epic_group *g, const epic_combine_backward_args *args)
{
    P2P_RANGE("epic_combine_backward");
    p2p_combine_backward_job job = {0};
    signature a = {EPIC_OP_COMBINE_BACKWARD};
    epic_layer layer;
    TRY(p2p_check_group(g));
    TRY(check_type(args->type));
    TRY(p2p_check_row(g, "d_out", args->d_out.row_bytes));
    TRY(p2p_read_plan_layer(g, &layer, args->layer, args->plan_bytes));
    job.plan = args->plan;
    job.plan_bytes = args->plan_bytes;
    job.d_out = args->d_out.data;
    job.rows = args->rows.data;
    job.d_rows = args->d_rows.data;
    job.slot_weights = args->slot_weights;
    job.d_slot_weights = args->d_slot_weights;
    job.row_bytes = args->d_out.row_bytes ? args->d_out.row_bytes : args->d_rows.row_bytes;
    fill_quantized(&job, args);
    job.num_tokens = p2p_clamp_rows(args->d_out.num_rows);
    job.top_k = (int32_t)layer.top_k;
    job.num_rows = p2p_clamp_rows(args->d_rows.num_rows);
    if (args->d_slot_weights && args->rows.num_rows < job.num_rows)
        job.num_rows = p2p_clamp_rows(args->rows.num_rows);
    if (!job.num_rows) {
        job.d_rows = job.d_rows_scales = scratch_of(g);
        if (job.rows) job.rows = scratch_of(g);
        if (job.slot_weights) job.slot_weights = scratch_of(g);
        if (job.d_slot_weights) job.d_slot_weights = scratch_of(g);
    }
    job.type = args->type;
    job.aligned = p2p_is_aligned(args->d_out) &&
                  (args->quantize || p2p_is_aligned(epic_rows_as_const(args->d_rows))) &&
                  (!args->d_slot_weights || p2p_is_aligned(args->rows));
    job.zero_tail = (args->flags & EPIC_ZERO_TAIL) != 0;
    job.leave_padding = (args->flags & EPIC_LEAVE_PADDING) != 0;
    signature_mix(&a, (uint64_t)job.row_bytes);
    signature_mix(&a, args->type);
    signature_mix(&a, args->quantize);
    signature_mix(&a,
                  (uint64_t)(args->slot_weights != NULL) << 1 | (args->d_slot_weights != NULL));
    p2p_fill_self(&job.self, g, &args->call, EPIC_OP_COMBINE_BACKWARD, a);
    p2p_expect_layer(&job.self, &layer);
    const bool only_moves = !args->quantize && !args->slot_weights && !args->d_slot_weights;
    const bool has_single_slots = layer.top_k == 1 || layer.layout == EPIC_FLAT;
    if (WITH_WINDOWS && only_moves && has_single_slots && job.aligned && job.row_bytes &&
        !p2p_fits_staging(g, job.row_bytes))
        job.d_rows_place = p2p_window_place(g, args->d_rows);
    if (job.d_rows_place) job.windows = p2p_window_table(g);
    cudaError_t (*const launch)(const p2p_combine_backward_job *, int, cudaStream_t) =
        WITH_WINDOWS && job.windows ? p2p_launch_backward_windows : p2p_launch_combine_backward;
    return p2p_cuda(launch(&job, p2p_sms_of(g, &args->call), p2p_stream_of(&args->call)),
                    "launching combine_backward");
}
