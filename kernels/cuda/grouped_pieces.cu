/* SPDX-License-Identifier: Apache-2.0 */
/* Factors of float32 for tensor cores that take bf16: a number is three bf16, the nearest, the
 * nearest of what is left, and again, which is all of its 24 bits.  They lie side by side, so one
 * product brings three sums, which are added, the small ones first.
 *
 *     from [rows, columns] -> to   [rows, 3, columns]     split
 *     sums [rows, 3, columns] -> out [rows, columns]      fold */
#include "cuda/grouped.h"
#include "cuda/launch.cuh"
#include "cuda/numbers.cuh"

#define THREADS 256

static __global__ void __launch_bounds__(THREADS)
    split_kernel(const __grid_constant__ p2p_pieces_job job)
{
    const int64_t step = (int64_t)gridDim.x * THREADS, count = job.rows * job.columns;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const int64_t first = i + i / job.columns * (GATE_PIECES - 1) * job.columns;
        float rest = job.from[i];
#pragma unroll
        for (int p = 0; p < GATE_PIECES; p++) {
            const __nv_bfloat16 piece = __float2bfloat16_rn(rest);
            ((__nv_bfloat16 *)job.to)[first + p * job.columns] = piece;
            rest -= __bfloat162float(piece);
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    fold_kernel(const __grid_constant__ p2p_pieces_job job)
{
    const int64_t step = (int64_t)gridDim.x * THREADS, count = job.rows * job.columns;
    float *const out = (float *)job.to;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const float *sums = job.from + i + i / job.columns * (GATE_PIECES - 1) * job.columns;
        float x = 0;
#pragma unroll
        for (int p = GATE_PIECES - 1; p >= 0; p--) x += sums[p * job.columns];
        if (job.bias) x += job.bias[i % job.columns];
        out[i] = job.accumulate ? out[i] + x : x;
    }
}

static int ctas_of(const p2p_pieces_job *job)
{
    const int64_t ctas = (job->rows * job->columns + THREADS - 1) / THREADS;
    return (int)(ctas < 8 * (int64_t)job->sms ? ctas : 8 * (int64_t)job->sms);
}

extern "C" cudaError_t p2p_launch_split(const p2p_pieces_job *job, cudaStream_t stream)
{
    return enqueue(split_kernel, ctas_of(job), THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_launch_fold(const p2p_pieces_job *job, cudaStream_t stream)
{
    return enqueue(fold_kernel, ctas_of(job), THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_load_pieces(void)
{
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, split_kernel);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, fold_kernel) : error;
}
