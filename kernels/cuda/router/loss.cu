/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for the balance loss and the z-loss, for their gradients, and for the update of the
 * router's bias.
 *
 *   loss_kernel<FORWARD>    logits [num_tokens, columns] -> runs [LOSS_RUNS] float64
 *   add_runs_kernel         runs -> loss                                        one CTA
 *   loss_kernel<BACKWARD>   logits, d_loss -> d_logits [num_tokens, columns]
 *   bias_update_kernel      load [num_experts] -> bias [num_experts]            one CTA
 *
 * One warp processes one *run* of consecutive tokens (rules/rule.h). How tokens are divided
 * into runs depends only on the number of tokens, so the order of the additions does not depend
 * on the GPU. For the balance loss by sequences, each CTA counts the choices of each expert in
 * every sequence that has tokens in one of the CTA's runs (a choice is a token and one of its
 * top_k experts). */
#include "cuda/common/launch.cuh"
#include "cuda/router/router.cuh"
#include "rules/device_layout.h"

#define MOST_WARPS 16
#define ADDERS 1024

enum Pass { FORWARD, BACKWARD };

/* Writes the probabilities of a token's experts to p [columns]. A probability is the expert's
 * score divided by the sum of all scores. If this sum is 0, all probabilities are 0. Returns
 * the sum; for a softmax, returns 1. */
__device__ __forceinline__ float compute_probabilities(const p2p_router_rows &rows, float *p,
                                                       int64_t token)
{
    const uint32_t score = rows.router.score;
    load_row<0>(p, rows, token);
    if (score == EPIC_SCORE_SOFTMAX || score == EPIC_SCORE_LOGITS) {
        compute_softmax<0>(p, p, rows.columns);
        return 1;
    }
    make_scores<0>(p, p, score, rows.columns);
    const float sum =
        add_columns<0, float>(rows.columns, [&](int i) { return p[padded_index(i)]; });
    if (sum != 0) each_column<0>(0, rows.columns, [&](int i) { p[padded_index(i)] /= sum; });
    return sum;
}

/* FORWARD: returns the token's term of the balance loss, which is the sum of probability * load
 * over the experts. BACKWARD: writes the gradient of the token's logits. `load` [num_experts]:
 * for each expert, the number of choices that have this expert. `factor` (only BACKWARD): the
 * gradient of the loss, multiplied by factor_of(). p [columns]: output in shared memory, the
 * probabilities. */
template <Pass PASS>
__device__ __forceinline__ double balance_term(const p2p_loss_job &job, const int32_t *load,
                                               float *p, double factor, int64_t token)
{
    const p2p_router_rows &rows = job.rows;
    const uint32_t score = rows.router.score;
    const int experts = (int)rows.router.num_experts;
    const float divisor = compute_probabilities(rows, p, token);
    const double mean = add_columns<0, double>(
        experts, [&](int i) { return (double)p[padded_index(i)] * load[i]; });
    if (PASS == FORWARD) return mean;
    write_logit_gradient<0>(
        job.d_logits, job.grad_type, job.accumulate, token, rows.columns, [&](int i) {
            const double own = i < experts ? load[i] : 0;
            const float d = (float)(factor * (own - mean));
            if (score == EPIC_SCORE_SOFTMAX || score == EPIC_SCORE_LOGITS)
                return d * p[padded_index(i)];
            if (divisor == 0) return 0.0f;
            const float z = load_number(rows.logits, rows.type, token * rows.columns + i);
            return d / divisor * score_slope(p[padded_index(i)] * divisor, z, score);
        });
    return 0;
}

/* FORWARD: returns the token's term of the z-loss, which is the square of the logsumexp of its
 * logits. BACKWARD: writes the gradient of the token's logits. `factor`: as in balance_term().
 * p [columns]: shared memory of the warp. */
template <Pass PASS>
__device__ __forceinline__ double z_term(const p2p_loss_job &job, float *p, double factor,
                                         int64_t token)
{
    load_row<0>(p, job.rows, token);
    const Softmax s = compute_softmax<0>(p, p, job.rows.columns);
    const double l = (double)s.largest + log((double)s.sum);
    if (PASS == FORWARD) return l * l;
    const float slope = (float)(2 * factor * l);
    write_logit_gradient<0>(job.d_logits, job.grad_type, job.accumulate, token,
                            job.rows.columns,
                            [&](int i) { return slope * p[padded_index(i)]; });
    return 0;
}

/* Counts the choices of each expert in the sequence that begins with token `first`. The result
 * is in counts [columns] in shared memory. Called by all threads of the CTA. */
__device__ __forceinline__ void count_sequence(const p2p_loss_job &job, int32_t *counts,
                                               int64_t first)
{
    const int64_t k = job.rows.router.top_k;
    __syncthreads();
    for (int i = threadIdx.x; i < job.rows.columns; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < job.sequence_tokens * k; i += blockDim.x) {
        const int32_t id = job.topk_idx[first * k + i];
        if (id >= 0 && id < job.rows.columns) atomicAdd(counts + id, 1);
    }
    __syncthreads();
}

/* The tokens [begin, end). */
struct TokenInterval {
    int64_t begin, end;
};

/* Returns those tokens of s that are in the sequence that begins with token `first`. If there
 * are no sequences (sequence_tokens is 0), returns all tokens of s. */
__device__ __forceinline__ TokenInterval clip_to_sequence(TokenInterval s, int64_t first,
                                                          int64_t sequence_tokens)
{
    if (sequence_tokens == 0) return s;
    return {max(s.begin, first), min(s.end, first + sequence_tokens)};
}

/* Returns the factor by which the sum over the tokens is multiplied. Without job.plan, the
 * factor is job.factor. With job.plan, divides job.factor by the plan's number of tokens of all
 * ranks, job.num_divisions times (once or twice). */
static __device__ double factor_of(const p2p_loss_job &job)
{
    const device_plan_header *plan = (const device_plan_header *)job.plan;
    if (plan == NULL) return job.factor;
    int64_t tokens = 0;
    for (int q = 0; q < DEVICE_MAX_RANKS; q++)
        tokens += q < plan->num_ranks ? plan->tokens_of[q] : 0;
    if (tokens <= 0) return 0;
    return job.factor / (job.num_divisions == 2 ? (double)tokens : 1.0) / (double)tokens;
}

/* FORWARD: computes the sum of the loss over each run of tokens. BACKWARD: writes the gradient
 * of the tokens' logits. Each warp processes one run. For the balance loss by sequences, the
 * warps of a CTA process the same sequence at the same time, because they count its choices
 * together. Z: true for the z-loss, false for the balance loss. */
template <Pass PASS, bool Z>
__global__ void __launch_bounds__(MOST_WARPS *WARP)
    loss_kernel(const __grid_constant__ p2p_loss_job job)
{
    wait_for_previous_kernel();
    float *const memory = (float *)dynamic_shared();
    const int words = row_words(job.rows.columns), warps = blockDim.x / WARP;
    const int64_t tokens = job.rows.num_tokens, run = loss_run_tokens(tokens);
    const int mine = blockIdx.x * warps + threadIdx.x / WARP;
    const TokenInterval own = {min(tokens, mine * run), min(tokens, (mine + 1) * run)};
    const TokenInterval all = {min(tokens, blockIdx.x * warps * run),
                               min(tokens, (blockIdx.x + 1) * warps * run)};
    const int64_t sequence = Z ? 0 : job.sequence_tokens;
    float *p = memory + threadIdx.x / WARP * words;
    int32_t *counts = (int32_t *)(memory + warps * words);
    const double factor =
        PASS == BACKWARD && job.d_loss ? factor_of(job) * *job.d_loss : factor_of(job);

    double sum = 0;
    int64_t first = sequence ? all.begin / sequence * sequence : all.begin;
    /* The loop bounds are equal in all threads of the CTA, because all threads must reach the
     * barriers in count_sequence(). */
    while (first < all.end) {
        if (sequence) count_sequence(job, counts, first);
        const TokenInterval now = clip_to_sequence(own, first, sequence);
        for (int64_t t = now.begin; t < now.end; t++) {
            sum += Z ? z_term<PASS>(job, p, factor, t)
                     : balance_term<PASS>(job, sequence ? counts : job.load, p, factor, t);
            __syncwarp();
        }
        first = sequence ? first + sequence : all.end;
    }
    if (PASS == FORWARD && lane_id() == 0 && mine < LOSS_RUNS) job.runs[mine] = sum;
}

/* One CTA adds the sums of all runs in a binary tree, and writes the loss. */
__global__ void __launch_bounds__(ADDERS)
    add_runs_kernel(const __grid_constant__ p2p_loss_job job)
{
    wait_for_previous_kernel();
    __shared__ double runs[LOSS_RUNS];
    for (int i = threadIdx.x; i < LOSS_RUNS; i += ADDERS) runs[i] = job.runs[i];
    for (int distance = LOSS_RUNS / 2; distance > 0; distance /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < distance; i += ADDERS) runs[i] += runs[i + distance];
    }
    if (threadIdx.x != 0) return;
    if (job.loss_type == EPIC_F64)
        *(double *)job.loss = factor_of(job) * runs[0];
    else
        *(float *)job.loss = (float)(factor_of(job) * runs[0]);
}

/* Launches loss_kernel. A CTA has as many warps as shared memory and MOST_WARPS permit. */
template <Pass PASS, bool Z>
static cudaError_t launch_pass(const p2p_loss_job *job, cudaStream_t stream)
{
    const int words = row_words(job->rows.columns);
    /* number of warps for which shared memory suffices: one row per warp, and one more row for
     * the counts of a sequence */
    const int left = SHARED_BYTES / 4 / words - 1;
    const int warps = left < MOST_WARPS ? left : MOST_WARPS;
    return launch_kernel(loss_kernel<PASS, Z>, (LOSS_RUNS + warps - 1) / warps, warps * WARP,
                         (warps + 1) * words * 4, stream, *job);
}

extern "C" cudaError_t p2p_launch_loss(const p2p_loss_job *job, cudaStream_t stream)
{
    const cudaError_t error = job->is_z_loss ? launch_pass<FORWARD, true>(job, stream)
                                             : launch_pass<FORWARD, false>(job, stream);
    if (error != cudaSuccess) return error;
    return launch_kernel(add_runs_kernel, 1, ADDERS, 0, stream, *job);
}

extern "C" cudaError_t p2p_launch_loss_backward(const p2p_loss_job *job, cudaStream_t stream)
{
    if (job->rows.num_tokens == 0) return cudaSuccess;
    return job->is_z_loss ? launch_pass<BACKWARD, true>(job, stream)
                          : launch_pass<BACKWARD, false>(job, stream);
}

/* ----------------------------------------------------------------------------- bias ---- */

/* Computes bias += rate * sign(mean load - load). Computes the sign from integers: it is the
 * sign of total load - num_experts * load. So there are no rounding errors. The grid has one
 * CTA. */
__global__ void __launch_bounds__(ADDERS)
    bias_update_kernel(float *bias, const int32_t *load, int64_t num_experts, float rate)
{
    wait_for_previous_kernel();
    __shared__ int64_t sums[ADDERS / WARP];
    int64_t total = 0;
    for (int64_t e = threadIdx.x; e < num_experts; e += ADDERS) total += load[e];
    total = add_lanes(total);
    if (lane_id() == 0) sums[threadIdx.x / WARP] = total;
    __syncthreads();
    total = 0;
    for (int w = 0; w < ADDERS / WARP; w++) total += sums[w];
    for (int64_t e = threadIdx.x; e < num_experts; e += ADDERS) {
        const int64_t below = total - num_experts * load[e];
        bias[e] += rate * (float)((below > 0) - (below < 0));
    }
}

extern "C" cudaError_t p2p_launch_bias_update(float *bias, const int32_t *load,
                                              int64_t num_experts, float rate,
                                              cudaStream_t stream)
{
    return launch_kernel(bias_update_kernel, 1, ADDERS, 0, stream, bias, load, num_experts,
                         rate);
}

extern "C" cudaError_t p2p_load_loss(void)
{
    const void *kernels[] = {
        (const void *)loss_kernel<FORWARD, true>, (const void *)loss_kernel<FORWARD, false>,
        (const void *)loss_kernel<BACKWARD, true>, (const void *)loss_kernel<BACKWARD, false>};
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, add_runs_kernel);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, bias_update_kernel);
    for (int i = 0; i < 4 && error == cudaSuccess; i++)
        error = cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     SHARED_BYTES);
    return error;
}
