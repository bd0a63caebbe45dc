/* SPDX-License-Identifier: Apache-2.0 */
/* Small kernels of a layer's dense part: the gate, the shared expert and the losses.
 * experts/grouped.h describes their arguments.
 *
 *   rows_kernel       to = from, or to += from           one thread per element
 *   trees_kernel      values [2, n] -> two sums          one warp
 *   losses_kernel     balance loss, z-loss -> their sum  one thread
 *   incoming_kernel   gradients of the two losses        one thread
 *
 * The GEMMs of the dense part are grouped GEMMs (experts/grouped.h) with all rows in one
 * slab. */
#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/experts/grouped.h"

#define THREADS 256

/* Computes to += from. If job.replace is set, computes to = from. If `from` is NULL, it counts
 * as zeros. */
static __global__ void __launch_bounds__(THREADS)
    rows_kernel(const __grid_constant__ p2p_rows_job job)
{
    wait_for_previous_kernel();
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < job.count; i += step) {
        float x = job.from ? load_number(job.from, job.type, i) : 0;
        if (!job.replace) x += load_number(job.to, job.type, i);
        store_number(job.to, job.type, i, x);
    }
}

/* Adds the n elements of each of the two rows of values [2, n] in a binary tree, and writes the
 * sums to values[0] and values[1]. n must be a power of two. One warp processes both rows as
 * one array. */
static __global__ void trees_kernel(float *values, int64_t n)
{
    wait_for_previous_kernel();
    for (int64_t distance = 1; distance < n; distance *= 2) {
        for (int64_t i = threadIdx.x * 2 * distance; i < 2 * n; i += 32 * 2 * distance)
            values[i] += values[i + distance];
        __syncwarp();
    }
    if (threadIdx.x == 0) values[1] = values[n];
}

static __global__ void losses_kernel(const __grid_constant__ p2p_sum_losses_job job)
{
    wait_for_previous_kernel();
    if (threadIdx.x != 0) return;
    const float first = job.first ? *job.first : 0, second = job.second ? *job.second : 0;
    if (job.sum) *job.sum = first + second;
    if (job.to_first) *job.to_first = first;
    if (job.to_second) *job.to_second = second;
}

static __global__ void incoming_kernel(const __grid_constant__ p2p_loss_gradients_job job)
{
    wait_for_previous_kernel();
    if (threadIdx.x != 0) return;
    const float all = job.all ? *job.all : 1;
    job.to[0] = all + (job.balance ? *job.balance : 0);
    job.to[1] = all + (job.z ? *job.z : 0);
}

extern "C" cudaError_t p2p_launch_rows(const p2p_rows_job *job, int sms, cudaStream_t stream)
{
    const int64_t ctas = (job->count + THREADS - 1) / THREADS, most = 8 * (int64_t)sms;
    if (job->count == 0) return cudaSuccess;
    return launch_kernel(rows_kernel, (int)(ctas < most ? ctas : most), THREADS, 0, stream,
                         *job);
}

extern "C" cudaError_t p2p_launch_trees(float *values, int64_t n, cudaStream_t stream)
{
    return launch_kernel(trees_kernel, 1, 32, 0, stream, values, n);
}

extern "C" cudaError_t p2p_launch_losses(const p2p_sum_losses_job *job, cudaStream_t stream)
{
    return launch_kernel(losses_kernel, 1, 32, 0, stream, *job);
}

extern "C" cudaError_t p2p_launch_incoming(const p2p_loss_gradients_job *job,
                                           cudaStream_t stream)
{
    return launch_kernel(incoming_kernel, 1, 32, 0, stream, *job);
}

extern "C" cudaError_t p2p_load_dense(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, rows_kernel);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, trees_kernel);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, losses_kernel);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, incoming_kernel) : error;
}
