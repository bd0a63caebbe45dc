/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for the gradients of the gate's weights in calls with several blocks of tokens
 * (moe/moe.h). One grouped GEMM (experts/grouped.h) computes a gradient for each block, or for
 * each slice of a block. The GEMM treats each block or slice like a slab (the rows of one
 * expert). These kernels run before and after the GEMM:
 *
 *   blocks_kernel  -> tiles of all tokens, slabs of blocks and slices    one CTA
 *   leaves_kernel  sums of all slices and components -> gradient [rows, columns]
 *                                                                        one thread per element
 *
 * leaves_kernel adds the terms of one block in the same order as slices_kernel and fold_kernel.
 * Then it adds the blocks in a binary tree. So the result has the same bits as if the caller
 * computed each block in a call of its own and added the results in the tree. */
#include "cuda/common/launch.cuh"
#include "cuda/experts/grouped.h"

#define THREADS 256

/* Returns the first token of block `index` of the call. Token 0 is the call's first token. */
static __device__ __forceinline__ int64_t begin_of(const gate_blocks &b, int64_t index)
{
    return ((b.first + index) * b.units / b.total - b.first * b.units / b.total) * b.unit;
}

/* Writes one slab for each block, one slab for each slice of a block, and the tiles of all
 * tokens. */
static __global__ void __launch_bounds__(THREADS)
    blocks_kernel(const __grid_constant__ p2p_gate_blocks_job job)
{
    wait_for_previous_kernel();
    const int count = (int)job.blocks.count, slices = job.slices;
    const int64_t tokens = job.all.num_slots;
    const int tiles = (int)((tokens + EXPERTS_TILE_ROWS - 1) / EXPERTS_TILE_ROWS);
    for (int i = threadIdx.x; i < count * slices; i += THREADS) {
        const int b = i / slices, slice = i % slices;
        const int64_t row = begin_of(job.blocks, b);
        const int64_t depth = begin_of(job.blocks, b + 1) - row;
        const int64_t each = experts_plain_slice(depth, slices);
        const int64_t begin = min(slice * each, depth), end = min(begin + each, depth);
        job.cuts[i] = {(int32_t)(row + begin), (int32_t)(end - begin)};
        if (slice == 0) job.slabs[b] = {(int32_t)row, (int32_t)depth};
    }
    for (int i = threadIdx.x; i < tiles; i += THREADS) {
        const int64_t done = (int64_t)i * EXPERTS_TILE_ROWS;
        const int32_t rows = (int32_t)min(tokens - done, (int64_t)EXPERTS_TILE_ROWS);
        job.all.tiles[i] = {(int32_t)done, 0, rows, rows};
    }
    if (threadIdx.x == 0) {
        *job.all.num_tiles = tiles;
        job.all.slabs[0] = {0, (int32_t)tokens};
    }
}

/* A leaf is one block of tokens (not a CTA). Adds the terms of each leaf in order. Then adds
 * the leaves in a binary tree: adds x[b + distance] to x[b], for distances 1, 2, 4 and so on.
 * Loads term t of all leaves together, so that the loads overlap. */
static __global__ void __launch_bounds__(THREADS)
    leaves_kernel(const __grid_constant__ p2p_leaves_job job)
{
    wait_for_previous_kernel();
    const int64_t step = (int64_t)gridDim.x * THREADS, count = job.rows * job.columns;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const float *const from =
            job.from + i + i / job.columns * (job.row_stride - job.columns);
        float x[GATE_BLOCKS] = {};
        for (int t = 0; t < job.terms; t++) {
#pragma unroll
            for (int leaf = 0; leaf < GATE_BLOCKS; leaf++)
                if (leaf < job.leaves)
                    x[leaf] += from[leaf * job.leaf_stride + t * job.term_stride];
        }
#pragma unroll
        for (int distance = 1; distance < GATE_BLOCKS; distance *= 2)
#pragma unroll
            for (int leaf = 0; leaf < GATE_BLOCKS; leaf += 2 * distance)
                if (leaf + distance < job.leaves) x[leaf] += x[leaf + distance];
        job.to[i] = job.accumulate ? job.to[i] + x[0] : x[0];
    }
}

extern "C" cudaError_t p2p_launch_gate_blocks(const p2p_gate_blocks_job *job,
                                              cudaStream_t stream)
{
    return launch_kernel(blocks_kernel, 1, THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_launch_leaves(const p2p_leaves_job *job, cudaStream_t stream)
{
    const int64_t ctas = (job->rows * job->columns + THREADS - 1) / THREADS;
    const int64_t most = 8 * (int64_t)job->sms;
    return launch_kernel(leaves_kernel, (int)(ctas < most ? ctas : most), THREADS, 0, stream,
                         *job);
}

extern "C" cudaError_t p2p_load_gate_blocks(void)
{
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, blocks_kernel);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, leaves_kernel) : error;
}
