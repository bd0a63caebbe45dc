/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the slabs and tiles of the local experts (experts/grouped.h) from the row and token
 * counts, for the later kernels on the stream.
 *
 *     in   expert_rows, expert_tokens  [num_experts]
 *     out  slabs  [num_experts]        first row and token count of each slab
 *     out  tiles  [num_tiles]          the slabs, cut after every EXPERTS_TILE_ROWS rows
 *
 * One CTA runs, with one expert per thread. A prefix sum over the threads computes each
 * expert's first row and first tile. The counts that the caller passes can be wrong, so rows
 * after num_slots are ignored. Otherwise a later kernel could access memory outside of the
 * buffers. */
#include "cuda/common/launch.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/experts/grouped.h"

#define THREADS 256

/* Returns the sum of x over all threads with a lower index (an exclusive prefix sum). Sets
 * *total to the sum over all threads. Called by all threads of the CTA. `memory`: THREADS
 * elements in shared memory. */
static __device__ int64_t sum_before(int64_t x, int64_t *memory, int64_t *total)
{
    const int i = threadIdx.x;
    memory[i] = x;
    __syncthreads();
    for (int distance = 1; distance < THREADS; distance *= 2) {
        const int64_t other = i >= distance ? memory[i - distance] : 0;
        __syncthreads();
        memory[i] += other;
        __syncthreads();
    }
    const int64_t before = memory[i] - x;
    *total = memory[THREADS - 1];
    __syncthreads();
    return before;
}

/* Returns counts[e], limited to [0, most], because the caller may have passed a wrong count. */
static __device__ int64_t count_at(const int32_t *counts, int e, int64_t most)
{
    const int64_t count = counts[e];
    return count < 0 ? 0 : count < most ? count : most;
}

/* Computes slabs and tiles. Each iteration of the outer loop handles THREADS experts. The rows
 * of these experts begin at first_row, and their tiles begin at first_tile. */
static __global__ void __launch_bounds__(THREADS)
    slabs_kernel(const __grid_constant__ p2p_slabs s)
{
    wait_for_previous_kernel();
    __shared__ int64_t memory[THREADS];
    int64_t first_row = 0, first_tile = 0, total;
    for (int first = 0; first < s.num_experts; first += THREADS) {
        const int e = first + (int)threadIdx.x;
        const bool here = e < s.num_experts;
        int64_t rows = !here           ? 0
                       : s.expert_rows ? count_at(s.expert_rows, e, s.num_slots)
                                       : s.num_slots;
        int64_t row = first_row + sum_before(rows, memory, &total);
        first_row += total;
        if (row > s.num_slots) row = s.num_slots;
        if (rows > s.num_slots - row) rows = s.num_slots - row;
        const int64_t tokens =
            here && s.expert_tokens ? count_at(s.expert_tokens, e, rows) : rows;

        const int64_t tiles = (rows + EXPERTS_TILE_ROWS - 1) / EXPERTS_TILE_ROWS;
        const int64_t tile = first_tile + sum_before(tiles, memory, &total);
        first_tile += total;
        if (here) s.slabs[e] = {(int32_t)row, (int32_t)tokens};
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t done = i * EXPERTS_TILE_ROWS;
            const int64_t left = tokens > done ? tokens - done : 0;
            s.tiles[tile + i] = {
                (int32_t)(row + done), e,
                (int32_t)(left < EXPERTS_TILE_ROWS ? left : EXPERTS_TILE_ROWS),
                (int32_t)(rows - done < EXPERTS_TILE_ROWS ? rows - done : EXPERTS_TILE_ROWS)};
        }
    }
    if (threadIdx.x == 0) *s.num_tiles = (int32_t)first_tile;
}

extern "C" cudaError_t p2p_launch_slabs(const p2p_slabs *slabs, cudaStream_t stream)
{
    return launch_kernel(slabs_kernel, 1, THREADS, 0, stream, *slabs);
}

extern "C" cudaError_t p2p_load_slabs(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, slabs_kernel);
}
