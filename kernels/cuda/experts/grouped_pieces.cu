/* SPDX-License-Identifier: Apache-2.0 */
/* Factors of float32 for tensor cores that take bf16: a number is three bf16, the nearest, the
 * nearest of what is left, and again, which is all of its 24 bits.  They lie side by side, so one
 * product brings three sums, which are added, the small ones first.  Where both factors are float32 the
 * pieces of one lie beside those of the other that they are multiplied by, and one sum runs over all.
 *
 *     from [rows, columns] -> to   [rows, places, columns]     split
 *     sums [rows, 3, columns] -> out [rows, columns]           fold */
#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/experts/grouped.h"

#define THREADS 256

static __global__ void __launch_bounds__(THREADS)
    split_kernel(const __grid_constant__ p2p_pieces_job job)
{
    const int64_t step = (int64_t)gridDim.x * THREADS, count = job.rows * job.columns;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const int64_t first = i + i / job.columns * (job.places - 1) * job.columns;
        const float all = job.from[i];
        const __nv_bfloat16 high = __float2bfloat16_rn(all);
        const float rest = all - __bfloat162float(high);
        const __nv_bfloat16 middle = __float2bfloat16_rn(rest);
        const __nv_bfloat16 low = __float2bfloat16_rn(rest - __bfloat162float(middle));
        for (int p = 0; p < job.places; p++) {
            const uint32_t which = job.order >> 2 * p & 3;
            ((__nv_bfloat16 *)job.to)[first + p * job.columns] = which == 0   ? high
                                                                 : which == 1 ? middle
                                                                              : low;
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
    return launch_kernel(split_kernel, ctas_of(job), THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_launch_fold(const p2p_pieces_job *job, cudaStream_t stream)
{
    return launch_kernel(fold_kernel, ctas_of(job), THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_load_pieces(void)
{
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, split_kernel);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, fold_kernel) : error;
}
