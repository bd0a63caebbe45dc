/* SPDX-License-Identifier: Apache-2.0 */
/* Products of float32 matrices on tensor cores that multiply bf16. split_kernel splits a
 * float32 value x into three bf16 values, its components: high = bf16(x), middle = bf16(x -
 * high), and low = bf16(x - high - middle). Together they have all 24 significant bits of x.
 *
 * If only one matrix is float32, the three components of a value are stored in three separate
 * columns of the value's row. One GEMM computes three sums for each result, and fold_kernel
 * adds these sums. If both matrices are float32, the components of both matrices are stored one
 * after the other along the k dimension, which becomes GATE_PAIRS times as long. One GEMM then
 * adds the products of GATE_PAIRS pairs of components. All other pairs have products that are
 * too small to change the result.
 *
 *   split_kernel  from [rows, columns]    -> to  [rows, places, columns] one thread per element
 *   fold_kernel   sums [rows, 3, columns] -> out [rows, columns]         one thread per element
 *   fold_slices_kernel  sums [slices, rows, 3, columns] -> out [rows, columns]
 *                                                             one thread per four elements
 *
 * src/backend/p2p/gate.c defines the order of the components. */
#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/experts/grouped.h"

#define THREADS 256

/* Stores job.places components of each value, in the order that job.order defines. */
static __global__ void __launch_bounds__(THREADS)
    split_kernel(const __grid_constant__ p2p_components_job job)
{
    wait_for_previous_kernel();
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

/* Adds the sum of the low components, the sum of the middle components and the sum of the high
 * components in this order, and then adds the bias. */
static __global__ void __launch_bounds__(THREADS)
    fold_kernel(const __grid_constant__ p2p_components_job job)
{
    wait_for_previous_kernel();
    const int64_t step = (int64_t)gridDim.x * THREADS, count = job.rows * job.columns;
    float *const out = (float *)job.to;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const float *sums =
            job.from + i + i / job.columns * (GATE_COMPONENTS - 1) * job.columns;
        float x = 0;
#pragma unroll
        for (int p = GATE_COMPONENTS - 1; p >= 0; p--) x += sums[p * job.columns];
        if (job.bias) x += job.bias[i % job.columns];
        out[i] = job.accumulate ? out[i] + x : x;
    }
}

/* Adds the slices of the low components of each result in order, then the slices of the middle
 * components, then the slices of the high components, and then the bias. The order depends only
 * on `slices`. */
static __global__ void __launch_bounds__(THREADS)
    fold_slices_kernel(const __grid_constant__ p2p_components_job job, int slices)
{
    wait_for_previous_kernel();
    const int64_t step = (int64_t)gridDim.x * THREADS, fours = job.columns / 4;
    const int64_t count = job.rows * fours, slice = count * GATE_COMPONENTS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const int64_t row = i / fours, column = i - row * fours;
        const float4 *sums = (const float4 *)job.from + row * GATE_COMPONENTS * fours + column;
        float4 x = {0, 0, 0, 0};
#pragma unroll
        for (int p = GATE_COMPONENTS - 1; p >= 0; p--) {
#pragma unroll
            for (int s = 0; s < GATE_SLICES; s++) {
                /* The loop always has GATE_SLICES iterations, so that the compiler unrolls
                 * it. */
                const float4 more =
                    s < slices ? sums[s * slice + p * fours] : make_float4(0, 0, 0, 0);
                x.x += more.x, x.y += more.y, x.z += more.z, x.w += more.w;
            }
        }
        if (job.bias) {
            const float *const bias = job.bias + column * 4;
            x.x += bias[0], x.y += bias[1], x.z += bias[2], x.w += bias[3];
        }
        ((float4 *)job.to)[i] = x;
    }
}

/* Returns the number of CTAs to launch if `count` threads are needed. Returns at most 8 CTAs
 * per SM. */
static int ctas_for(const p2p_components_job *job, int64_t count)
{
    const int64_t ctas = (count + THREADS - 1) / THREADS;
    return (int)(ctas < 8 * (int64_t)job->sms ? ctas : 8 * (int64_t)job->sms);
}

static int ctas_of(const p2p_components_job *job)
{
    return ctas_for(job, job->rows * job->columns);
}

extern "C" cudaError_t p2p_launch_split(const p2p_components_job *job, cudaStream_t stream)
{
    return launch_kernel(split_kernel, ctas_of(job), THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_launch_fold(const p2p_components_job *job, cudaStream_t stream)
{
    return launch_kernel(fold_kernel, ctas_of(job), THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_launch_fold_slices(const p2p_components_job *job, int32_t slices,
                                              cudaStream_t stream)
{
    return launch_kernel(fold_slices_kernel, ctas_for(job, job->rows * job->columns / 4),
                         THREADS, 0, stream, *job, (int)slices);
}

extern "C" cudaError_t p2p_load_components(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, split_kernel);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, fold_slices_kernel);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, fold_kernel) : error;
}
