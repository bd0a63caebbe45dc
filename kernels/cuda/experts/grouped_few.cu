/* SPDX-License-Identifier: Apache-2.0 */
/* GEMM for few rows and float32 weights, with split-K: each sum is cut into slices. It is used
 * for the gate of a layer in decoding, where a call has few tokens.
 *
 *     out [slots, n] = a [slots, k] b [k, n]      slots <= EXPERTS_FEW_ROWS
 *
 * The tiles of plain_kernel (experts/grouped_plain.cu) have 128 rows, so with few rows they
 * would be mostly empty. In this kernel, a CTA computes one slice of the sums of ROWS rows and
 * COLUMNS columns. A thread computes one column of ROWS_EACH rows. It loads BATCH weights of
 * its column before it uses the first one. It adds the terms of a slice in the same order as
 * plain_kernel, and slices_kernel then adds the slices. So a row has the same bits whichever
 * kernel computes it. */
#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/experts/grouped.h"

#define ROWS 16
#define COLUMNS 64
#define THREADS 128
#define ROWS_EACH (ROWS * COLUMNS / THREADS)
#define TERMS 128 /* number of terms of each row that are in shared memory at a time */
#define BATCH 32  /* number of weights that a thread loads at a time */
/* with more than ROWS rows and more multiplications than this, plain_kernel is faster */
#define MOST_PRODUCTS (INT64_C(1) << 26)

static __host__ __device__ __forceinline__ int64_t count_blocks(int64_t count, int64_t size)
{
    return (count + size - 1) / size;
}

/* Adds `terms` products to each of ROWS_EACH sums: one column of out, in ROWS_EACH rows.
 * `rows`: the elements of matrix a for these rows. `weights`: the weights of the column; they
 * are `stride` elements apart. */
static __device__ __forceinline__ void add_terms(float (&sum)[ROWS_EACH],
                                                 const float (*rows)[TERMS],
                                                 const float *weights, int64_t stride,
                                                 int terms)
{
    for (int begin = 0; begin < terms; begin += BATCH) {
        float b[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            b[i] = begin + i < terms ? weights[(begin + i) * stride] : 0;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
#pragma unroll
            for (int r = 0; r < ROWS_EACH; r++)
                if (begin + i < terms) sum[r] += rows[r][begin + i] * b[i];
    }
}

/* Computes the sums of all slices. CTAs with the same slice and columns have consecutive
 * indices, so that they share weights in the L2 cache. */
static __global__ void __launch_bounds__(THREADS)
    few_rows_kernel(const __grid_constant__ p2p_gemm g)
{
    wait_for_previous_kernel();
    __shared__ float rows[ROWS][TERMS];
    const int row_blocks = (int)count_blocks(g.slabs.num_slots, ROWS);
    const int64_t first_row = (int64_t)(blockIdx.x % row_blocks) * ROWS;
    const int num_rows = (int)min((int64_t)ROWS, g.slabs.num_slots - first_row);
    const int64_t slice = blockIdx.x / row_blocks % g.slices;
    const int64_t column =
        (int64_t)(blockIdx.x / row_blocks / g.slices) * COLUMNS + threadIdx.x % COLUMNS;
    const int first = (int)threadIdx.x / COLUMNS * ROWS_EACH;
    const int64_t each = experts_plain_slice(g.k, g.slices);
    const int64_t slice_end = min((slice + 1) * each, g.k);
    float sum[ROWS_EACH] = {};
    for (int64_t begin = slice * each; begin < slice_end; begin += TERMS) {
        const int terms = (int)min((int64_t)TERMS, slice_end - begin);
        __syncthreads(); /* wait until all threads have read the previous terms */
        for (int i = threadIdx.x; i < ROWS * terms; i += THREADS) {
            const int row = i / terms, term = i % terms;
            rows[row][term] =
                row < num_rows
                    ? load_number(g.a, g.row_type, (first_row + row) * g.k + begin + term)
                    : 0;
        }
        __syncthreads();
        if (column < g.n && first < num_rows)
            add_terms(sum, rows + first, (const float *)g.b + begin * g.n + column, g.n, terms);
    }
#pragma unroll
    for (int r = 0; r < ROWS_EACH; r++)
        if (column < g.n && first + r < num_rows)
            g.slice_sums[(slice * g.slabs.num_slots + first_row + first + r) * g.n + column] =
                sum[r];
}

extern "C" bool p2p_gemm_has_few_rows(const p2p_gemm *g)
{
    return g->pass == EPIC_GEMM_FORWARD && g->row_type != EPIC_E4M3 &&
           g->weight_type == EPIC_F32 && g->slices > 1 &&
           g->slabs.num_slots <= EXPERTS_FEW_ROWS &&
           (g->slabs.num_slots <= ROWS || g->slabs.num_slots * g->n * g->k <= MOST_PRODUCTS);
}

extern "C" cudaError_t p2p_launch_few_rows(const p2p_gemm *g, cudaStream_t stream)
{
    const int64_t ctas =
        count_blocks(g->slabs.num_slots, ROWS) * count_blocks(g->n, COLUMNS) * g->slices;
    return launch_kernel(few_rows_kernel, (int)ctas, THREADS, 0, stream, *g);
}

extern "C" cudaError_t p2p_load_few_rows(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, few_rows_kernel);
}
