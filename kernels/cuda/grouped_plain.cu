/* SPDX-License-Identifier: Apache-2.0 */
/* plain gemm: products over slabs for every GPU, type and shape.  Float32 sums in registers.
 *   FORWARD  out [slots, n] = a [slots, k] b[e]             + bias
 *   INPUT    out [slots, k] = a [slots, n] b[e]^T
 *   WEIGHT   out[e] [k, n]  = a [slots, k]^T b [slots, n]   over the tokens of slab e
 * A CTA takes tiles of BM x BN numbers of out, each of whose threads keeps 8 x 4.  Both factors go
 * through shared memory as float32, BK steps of the sum at a time.  Rows without a token are not
 * read; those inside slabs are written as zeros. */
#include "cuda/grouped.h"
#include "cuda/launch.cuh"
#include "cuda/numbers.cuh"

#define BM EXPERTS_TILE_ROWS
#define BN 64
#define BK 16
#define THREADS 256
#define ROWS_EACH 8
#define COLUMNS_EACH 4

struct Piece {      /* a tile of out, and the sum that makes it */
    int64_t row;    /* of a's slab in WEIGHT, else of out */
    int64_t first;  /* WEIGHT: row of out[expert] */
    int64_t column; /* of out */
    int64_t expert, depth, columns;
    int rows, tokens; /* of out: there, and to compute */
};

template <int PASS> static __device__ Piece piece_of(const p2p_gemm &g, int64_t index)
{
    Piece p;
    p.columns = PASS == EPIC_GEMM_INPUT ? g.k : g.n;
    const int64_t across = (p.columns + BN - 1) / BN;
    const int64_t line = index / across;
    p.column = index % across * BN;
    if (PASS == EPIC_GEMM_WEIGHT) {
        const int64_t down = (g.k + BM - 1) / BM;
        p.expert = line / down;
        p.first = line % down * BM;
        const slab_place slab = g.slabs.slabs[p.expert];
        p.row = slab.row;
        p.depth = slab.tokens;
        p.rows = p.tokens = (int)min(g.k - p.first, (int64_t)BM);
    } else {
        const slab_tile tile = g.slabs.tiles[line];
        p.expert = tile.expert;
        p.row = tile.row;
        p.first = 0;
        p.depth = PASS == EPIC_GEMM_FORWARD ? g.k : g.n;
        p.rows = tile.rows;
        p.tokens = tile.tokens;
    }
    return p;
}

template <int PASS> static __device__ int64_t num_pieces(const p2p_gemm &g)
{
    const int64_t columns = PASS == EPIC_GEMM_INPUT ? g.k : g.n;
    const int64_t lines = PASS == EPIC_GEMM_WEIGHT ? (g.k + BM - 1) / BM * g.slabs.num_experts
                                                   : *g.slabs.num_tiles;
    return lines * ((columns + BN - 1) / BN);
}

static __device__ uint32_t y_type(const p2p_gemm &g)
{
    return g.y_type ? g.y_type : g.row_type;
}

/* Steps [step, step + BK) of both factors.  Threads walk along what is contiguous in memory. */
template <int PASS>
static __device__ void load_parts(float (*a)[BM + 1], float (*b)[BN + 1], const p2p_gemm &g,
                                  const Piece &p, int64_t step)
{
    const uint32_t a_type = PASS == EPIC_GEMM_INPUT ? y_type(g) : g.row_type;
    const uint32_t b_type = PASS == EPIC_GEMM_WEIGHT ? y_type(g) : g.weight_type;
    for (int i = threadIdx.x; i < BM * BK; i += THREADS) {
        const bool turned = PASS == EPIC_GEMM_WEIGHT;
        const int m = turned ? i % BM : i / BK, s = turned ? i / BM : i % BK;
        const int64_t at =
            turned ? (p.row + step + s) * g.k + p.first + m : (p.row + m) * p.depth + step + s;
        const bool there = m < p.tokens && step + s < p.depth;
        a[s][m] = there ? number_at(g.a, a_type, at) : 0;
    }
    for (int i = threadIdx.x; i < BN * BK; i += THREADS) {
        const bool turned = PASS == EPIC_GEMM_INPUT;
        const int c = turned ? i / BK : i % BN, s = turned ? i % BK : i / BN;
        const int64_t column = p.column + c, line = step + s;
        const int64_t at = PASS == EPIC_GEMM_WEIGHT ? (p.row + line) * g.n + column
                           : turned                 ? (p.expert * g.k + column) * g.n + line
                                                    : (p.expert * g.k + line) * g.n + column;
        const bool there = column < p.columns && line < p.depth;
        b[s][c] = there ? number_at(g.b, b_type, at) : 0;
    }
}

template <int PASS>
static __device__ void store_number(const p2p_gemm &g, const Piece &p, int m, int64_t column,
                                    float x)
{
    const int64_t line = PASS == EPIC_GEMM_WEIGHT ? p.expert * g.k + p.first + m : p.row + m;
    const int64_t at = line * p.columns + column;
    const uint32_t type = PASS == EPIC_GEMM_WEIGHT    ? g.out_type
                          : PASS == EPIC_GEMM_FORWARD ? y_type(g)
                                                      : g.row_type;
    if (m >= p.rows || column >= p.columns) return;
    if (m >= p.tokens) x = 0;
    if (PASS == EPIC_GEMM_FORWARD && g.bias && m < p.tokens)
        x += number_at(g.bias, g.weight_type, p.expert * g.n + column) *
             (g.bias_weights ? g.bias_weights[line] : 1.0f);
    if (PASS == EPIC_GEMM_INPUT && g.also && m < p.tokens) x += number_at(g.also, type, at);
    if (PASS != EPIC_GEMM_FORWARD && g.accumulate) x += number_at(g.out, type, at);
    put_number(g.out, type, at, x);
}

template <int PASS>
static __global__ void __launch_bounds__(THREADS)
    plain_kernel(const __grid_constant__ p2p_gemm g)
{
    __shared__ float a[BK][BM + 1], b[BK][BN + 1];
    const int down = threadIdx.x / (BN / COLUMNS_EACH),
              across = threadIdx.x % (BN / COLUMNS_EACH);
    const int64_t pieces = num_pieces<PASS>(g);
    for (int64_t index = blockIdx.x; index < pieces; index += gridDim.x) {
        const Piece p = piece_of<PASS>(g, index);
        float sum[ROWS_EACH][COLUMNS_EACH] = {};
        for (int64_t step = 0; step < p.depth; step += BK) {
            load_parts<PASS>(a, b, g, p, step);
            __syncthreads();
            for (int s = 0; s < BK; s++)
#pragma unroll
                for (int i = 0; i < ROWS_EACH; i++)
#pragma unroll
                    for (int j = 0; j < COLUMNS_EACH; j++)
                        sum[i][j] +=
                            a[s][down * ROWS_EACH + i] * b[s][across * COLUMNS_EACH + j];
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS_EACH; j++)
                store_number<PASS>(g, p, down * ROWS_EACH + i,
                                   p.column + across * COLUMNS_EACH + j, sum[i][j]);
    }
}

/* CTAs that can have something to do: counts are on the device. */
static int ctas_of(const p2p_gemm *g)
{
    const int64_t columns = g->pass == EPIC_GEMM_INPUT ? g->k : g->n;
    const int64_t lines = g->pass == EPIC_GEMM_WEIGHT
                              ? (g->k + BM - 1) / BM * g->slabs.num_experts
                              : g->slabs.most_tiles;
    const int64_t pieces = lines * ((columns + BN - 1) / BN), most = 4 * (int64_t)g->sms;
    return (int)(pieces < most ? pieces : most);
}

extern "C" cudaError_t p2p_launch_plain_gemm(const p2p_gemm *g, cudaStream_t stream)
{
    const int ctas = ctas_of(g);
    if (g->pass == EPIC_GEMM_WEIGHT)
        return enqueue(plain_kernel<EPIC_GEMM_WEIGHT>, ctas, THREADS, 0, stream, *g);
    if (g->pass == EPIC_GEMM_INPUT)
        return enqueue(plain_kernel<EPIC_GEMM_INPUT>, ctas, THREADS, 0, stream, *g);
    return enqueue(plain_kernel<EPIC_GEMM_FORWARD>, ctas, THREADS, 0, stream, *g);
}

extern "C" cudaError_t p2p_launch_gemm(const p2p_gemm *g, cudaStream_t stream)
{
    return p2p_gemm_is_slow(g) ? p2p_launch_plain_gemm(g, stream)
                               : p2p_launch_hopper_gemm(g, stream);
}

extern "C" cudaError_t p2p_load_plain_gemm(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, plain_kernel<EPIC_GEMM_FORWARD>);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, plain_kernel<EPIC_GEMM_INPUT>);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, plain_kernel<EPIC_GEMM_WEIGHT>);
    return error;
}
