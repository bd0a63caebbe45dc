/* SPDX-License-Identifier: Apache-2.0 */
/* The gradients of the experts' biases: out[e] is the sum of weight * row over all rows of
 * expert e that hold a token.
 *
 *   rows  [slots, n]    input
 *   out   [experts, n]  output: overwritten, or added to
 *
 *   CTA   adds 64 columns of one expert
 *   warp  adds every WARPS-th row of the expert's slab (its rows in the receive buffer); each
 *         lane adds two columns
 *   the first 64 threads   add the sums of the warps in a fixed order, one column each
 *
 * An earlier kernel on the stream has written the slabs, so no fence is needed. */
#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/experts/grouped.h"

#define THREADS 256
#define WARPS (THREADS / 32)
/* number of rows that a warp loads before it adds the first one, so that the loads overlap */
#define BIAS_AHEAD 8

/* Adds weight * row to `sum`, for the rows with the indices `warp`, warp + WARPS, ... of an
 * expert's slab. Each lane adds column `column` of these rows to sum[0], and column `column` +
 * 32 to sum[1]. */
template <class T>
static __device__ __forceinline__ void add_rows(const p2p_bias_job &job, const slab_range &slab,
                                                int64_t column, int warp, float (&sum)[2])
{
    for (int64_t r = warp; r < slab.tokens; r += WARPS * BIAS_AHEAD) {
        float w[BIAS_AHEAD], x[BIAS_AHEAD][2];
#pragma unroll
        for (int i = 0; i < BIAS_AHEAD; i++) {
            const bool is_row = r + i * WARPS < slab.tokens;
            const int64_t slot = slab.row + r + i * WARPS;
            w[i] = is_row && job.weights ? job.weights[slot] : 1;
#pragma unroll
            for (int h = 0; h < 2; h++)
                x[i][h] =
                    is_row && column + h * 32 < job.n
                        ? load_number(job.rows, NUMBER_TYPE<T>, slot * job.n + column + h * 32)
                        : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BIAS_AHEAD; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (r + i * WARPS < slab.tokens) sum[h] += w[i] * x[i][h];
    }
}

static __global__ void __launch_bounds__(THREADS)
    bias_kernel(const __grid_constant__ p2p_bias_job job)
{
    wait_for_previous_kernel();
    __shared__ float parts[WARPS][64];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t across = (job.n + 63) / 64, expert = blockIdx.x / across;
    const int64_t first = blockIdx.x % across * 64;
    const slab_range slab = job.slabs.slabs[expert];
    float sum[2] = {0, 0};
    if (job.row_type == EPIC_BF16)
        add_rows<Bf16>(job, slab, first + lane, warp, sum);
    else if (job.row_type == EPIC_F16)
        add_rows<F16>(job, slab, first + lane, warp, sum);
    else
        add_rows<F32>(job, slab, first + lane, warp, sum);
    parts[warp][lane] = sum[0];
    parts[warp][32 + lane] = sum[1];
    __syncthreads();
    const int64_t column = first + threadIdx.x;
    if (threadIdx.x >= 64 || column >= job.n) return;
    const int64_t at = expert * job.n + column;
    float total = job.accumulate ? load_number(job.out, job.out_type, at) : 0;
    for (int i = 0; i < WARPS; i++) total += parts[i][threadIdx.x];
    store_number(job.out, job.out_type, at, total);
}

extern "C" cudaError_t p2p_launch_bias(const p2p_bias_job *job, cudaStream_t stream)
{
    const int64_t ctas = (job->n + 63) / 64 * job->slabs.num_experts;
    return launch_kernel(bias_kernel, (int)ctas, THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_load_bias(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, bias_kernel);
}
