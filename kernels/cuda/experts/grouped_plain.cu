/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products over slabs (the rows of one expert each) by plain loops, for every GPU, type
 * and shape. p2p_gemm (experts/grouped.h) describes the products. Sums are float32, in
 * registers.
 *
 *     FORWARD  out [slots, n] = a [slots, k] b[e]             + bias
 *     INPUT    out [slots, k] = a [slots, n] b[e]^T
 *     WEIGHT   out[e] [k, n]  = a [slots, k]^T b [slots, n]   over the tokens of slab e
 *
 * A CTA computes tiles of BM x BN elements of out. Each of its 128 threads computes 8 x 8
 * elements of a tile, as four blocks of 4 x 4. The *summed dimension* is K of a GEMM: k in
 * FORWARD, n in INPUT, the tokens of the slab in WEIGHT. A CTA advances along the summed
 * dimension by BK elements per step. In each step, the threads read parts of matrices a and b
 * from shared memory as float32, and multiply them. Meanwhile they load the parts for the next
 * step into registers.
 *
 * The kernel does not read rows without a token. If a row without a token is inside a slab, the
 * kernel writes zeros to the same row of out. An e4m3 matrix has one scale per block of
 * elements: 1 x 128 elements in matrix a, 128 x 128 elements in matrix b. Every e4m3 product
 * runs as the pass INPUT (p2p_as_input), which reads both matrices contiguously along the
 * summed dimension.
 *
 * A product with few tiles and long sums would leave most SMs idle. For such a product, the
 * host sets p2p_gemm.slices. Each sum is then cut into slices (split-K), which different CTAs
 * compute. plain_kernel, or few_rows_kernel (experts/grouped_few.cu), stores the partial sum of
 * each slice, and slices_kernel adds the partial sums in order. */
#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/experts/grouped.h"

#define BM EXPERTS_TILE_ROWS
#define BN 64
#define BK EXPERTS_PLAIN_STEP
#define THREADS 128
/* number of partial sums that slices_kernel loads before it adds them */
#define SLICES_AT_ONCE 8
#define THREAD_TILE 8 /* a thread computes THREAD_TILE x THREAD_TILE elements of a tile */
/* number of unused floats after each row in shared memory; this padding avoids bank
 * conflicts */
#define ROW_PADDING 4
/* number of groups of four elements of matrix a that each thread loads per step */
#define A_FOURS (BM * BK / 4 / THREADS)
/* number of groups of four elements of matrix b that each thread loads per step */
#define B_FOURS (BN * BK / 4 / THREADS)

/* The work that a CTA does at a time: one tile of out, or one slice of the sums of a tile. */
struct TileSlice {
    /* first row of the tile in a and out; in WEIGHT: first row of the slab in a and b */
    int64_t row;
    int64_t first;  /* in WEIGHT: the tile's first row in out[expert]; otherwise 0 */
    int64_t column; /* the tile's first column in out */
    /* expert: local expert of the tile. depth: number of terms of a sum, in all slices
     * together. columns: number of columns of out. */
    int64_t expert, depth, columns;
    int64_t begin, end; /* the slice consists of terms begin to end - 1 of each sum */
    /* rows: number of rows of the tile to store. tokens: number of these rows that hold a
     * token, so that they must be computed. */
    int rows, tokens;
};

static __device__ __forceinline__ int64_t slices_of(const p2p_gemm &g)
{
    return g.slices > 1 ? g.slices : 1;
}

/* Returns tile slice `index`. The order of tile slices: all tiles of the first row of tiles
 * from left to right, then the second row of tiles, and so on. All slices of a tile come one
 * after the other. */
template <int PASS>
static __device__ TileSlice find_tile_slice(const p2p_gemm &g, int64_t index)
{
    TileSlice p;
    p.columns = PASS == EPIC_GEMM_INPUT ? g.k : g.n;
    const int64_t across = (p.columns + BN - 1) / BN;
    const int64_t slice = index % slices_of(g);
    index /= slices_of(g);
    const int64_t line = index / across;
    p.column = index % across * BN;
    if (PASS == EPIC_GEMM_WEIGHT) {
        const int64_t down = (g.k + BM - 1) / BM;
        p.expert = line / down;
        p.first = line % down * BM;
        const slab_range slab = g.slabs.slabs[p.expert];
        p.row = slab.row;
        p.depth = slab.tokens;
        p.rows = p.tokens = (int)min(g.k - p.first, (int64_t)BM);
    } else {
        const slab_tile tile = g.slabs.tiles[line];
        p.expert = tile.expert;
        p.row = tile.row;
        p.first = 0;
        p.depth = PASS == EPIC_GEMM_FORWARD ? g.k : g.n;
        p.rows = g.leave_padding ? tile.tokens : tile.rows;
        p.tokens = tile.tokens;
    }
    const int64_t each = experts_plain_slice(p.depth, slices_of(g));
    p.begin = min(slice * each, p.depth);
    p.end = min(p.begin + each, p.depth);
    return p;
}

template <int PASS> static __device__ int64_t num_tile_slices(const p2p_gemm &g)
{
    const int64_t columns = PASS == EPIC_GEMM_INPUT ? g.k : g.n;
    const int64_t lines = PASS == EPIC_GEMM_WEIGHT ? (g.k + BM - 1) / BM * g.slabs.num_experts
                                                   : *g.slabs.num_tiles;
    return lines * ((columns + BN - 1) / BN) * slices_of(g);
}

static __device__ uint32_t y_type(const p2p_gemm &g)
{
    return g.y_type ? g.y_type : g.row_type;
}

/* Returns elements at, ..., at + 3 of the e4m3 array p, multiplied by *scale. Only the first
 * num_valid of these elements are inside the matrix. For the others, returns 0. */
static __device__ __forceinline__ float4 load_four_e4m3(const void *p, int64_t at,
                                                        int num_valid, const float *scale)
{
    const uint8_t *const from = (const uint8_t *)p + at;
    if (num_valid <= 0) return make_float4(0, 0, 0, 0);
    const float s = *scale;
    return make_float4(e4m3_value(from[0]) * s, num_valid > 1 ? e4m3_value(from[1]) * s : 0,
                       num_valid > 2 ? e4m3_value(from[2]) * s : 0,
                       num_valid > 3 ? e4m3_value(from[3]) * s : 0);
}

/* Like load_four_e4m3(), but for an array p of type `type`, without a scale. */
static __device__ __forceinline__ float4 load_four(const void *p, uint32_t type, int64_t at,
                                                   int num_valid)
{
    float x[4] = {0, 0, 0, 0};
    const int size = type == EPIC_F32 ? 4 : 2;
    const uint8_t *const from = (const uint8_t *)p + at * size;
    if (num_valid >= 4 && (uintptr_t)from % (4 * size) == 0) {
        if (type == EPIC_F32) return *(const float4 *)from;
        const uint2 q = *(const uint2 *)from;
        float eight[8];
        if (type == EPIC_BF16)
            Bf16::unpack_floats(make_uint4(q.x, q.y, 0, 0), eight);
        else
            F16::unpack_floats(make_uint4(q.x, q.y, 0, 0), eight);
        return make_float4(eight[0], eight[1], eight[2], eight[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < num_valid) x[i] = load_number(p, type, at + i);
    return make_float4(x[0], x[1], x[2], x[3]);
}

/* Stores the first `num_valid` elements of x (at most four) to the array p, from index `at`
 * on. */
static __device__ __forceinline__ void store_numbers_at(void *p, uint32_t type, int64_t at,
                                                        int num_valid, const float *x)
{
    const int size = type == EPIC_F32 ? 4 : 2;
    uint8_t *const to = (uint8_t *)p + at * size;
    if (num_valid < 4 || (uintptr_t)to % (4 * size)) {
        for (int i = 0; i < num_valid; i++) store_number(p, type, at + i, x[i]);
        return;
    }
    if (type == EPIC_F32)
        *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
    else if (type == EPIC_BF16)
        *(uint2 *)to = make_uint2(Bf16::pack_pair(x[0], x[1]), Bf16::pack_pair(x[2], x[3]));
    else
        *(uint2 *)to = make_uint2(F16::pack_pair(x[0], x[1]), F16::pack_pair(x[2], x[3]));
}

/* Writes four elements to a matrix [BK][PITCH] in shared memory, the first one to position
 * [s][line]. If TRANSPOSED is true, writes the next ones below it in the same column, otherwise
 * next to it in the same row. */
template <bool TRANSPOSED, int PITCH>
static __device__ __forceinline__ void put_four_shared(float *to, int s, int line, float4 x)
{
    if (TRANSPOSED) {
        to[s * PITCH + line] = x.x;
        to[(s + 1) * PITCH + line] = x.y;
        to[(s + 2) * PITCH + line] = x.z;
        to[(s + 3) * PITCH + line] = x.w;
    } else {
        *(float4 *)(to + s * PITCH + line) = x;
    }
}

/* Returns the number of blocks of 128 elements (rounded up) in `numbers` elements. Each block
 * has one scale. */
static __device__ __forceinline__ int64_t num_blocks(int64_t numbers)
{
    return (numbers + 127) / 128;
}

/* Returns how many of the four indices at, ..., at + 3 are below `end`. */
static __device__ __forceinline__ int count_four(int64_t end, int64_t at)
{
    return (int)max((int64_t)0, min((int64_t)4, end - at));
}

/* The elements of matrices a and b that one thread copies to shared memory in one step. The
 * thread first loads them into registers. A_TRANSPOSED and B_TRANSPOSED are true if the summed
 * dimension is contiguous in the caller's matrix. */
template <int PASS, bool SCALED> struct StepTiles {
    static constexpr bool A_TRANSPOSED = PASS != EPIC_GEMM_WEIGHT;
    static constexpr bool B_TRANSPOSED = PASS == EPIC_GEMM_INPUT;
    static constexpr int A_PITCH = BM + ROW_PADDING, B_PITCH = BN + ROW_PADDING;
    float4 a[A_FOURS], b[B_FOURS];

    /* In each step, a thread loads several groups of four elements of a tile. For the n-th
     * group of this thread, step_in_tile() returns the group's first index along the summed
     * dimension, and line_in_tile() returns its row of matrix a or column of matrix b. `lines`:
     * number of rows or columns of the tile. */
    static __device__ __forceinline__ int step_in_tile(bool transposed, int lines, int n)
    {
        const int i = n * THREADS + (int)threadIdx.x;
        return transposed ? i % (BK / 4) * 4 : i / (lines / 4);
    }
    static __device__ __forceinline__ int line_in_tile(bool transposed, int lines, int n)
    {
        const int i = n * THREADS + (int)threadIdx.x;
        return transposed ? i / (BK / 4) : i % (lines / 4) * 4;
    }
    /* Loads this thread's elements for the step that begins at index `first` of the summed
     * dimension. */
    __device__ __forceinline__ void load_step(const p2p_gemm &g, const TileSlice &p,
                                              int64_t first)
    {
        const uint32_t a_type = PASS == EPIC_GEMM_INPUT ? y_type(g) : g.row_type;
        const uint32_t b_type = PASS == EPIC_GEMM_WEIGHT ? y_type(g) : g.weight_type;
#pragma unroll
        for (int n = 0; n < A_FOURS; n++) {
            const int m = line_in_tile(A_TRANSPOSED, BM, n);
            const int64_t s = first + step_in_tile(A_TRANSPOSED, BM, n);
            const int64_t at =
                A_TRANSPOSED ? (p.row + m) * p.depth + s : (p.row + s) * g.k + p.first + m;
            const int num_valid = A_TRANSPOSED ? (m < p.tokens ? count_four(p.depth, s) : 0)
                                               : (s < p.depth ? count_four(p.tokens, m) : 0);
            if (SCALED)
                a[n] = load_four_e4m3(g.a, at, num_valid,
                                      g.a_scales + (p.row + m) * num_blocks(p.depth) + s / 128);
            else
                a[n] = load_four(g.a, a_type, at, num_valid);
        }
#pragma unroll
        for (int n = 0; n < B_FOURS; n++) {
            const int64_t c = p.column + line_in_tile(B_TRANSPOSED, BN, n);
            const int64_t s = first + step_in_tile(B_TRANSPOSED, BN, n);
            const int64_t at = PASS == EPIC_GEMM_WEIGHT ? (p.row + s) * g.n + c
                               : B_TRANSPOSED           ? (p.expert * g.k + c) * g.n + s
                                                        : (p.expert * g.k + s) * g.n + c;
            const int num_valid = B_TRANSPOSED ? (c < p.columns ? count_four(p.depth, s) : 0)
                                               : (s < p.depth ? count_four(p.columns, c) : 0);
            if (SCALED)
                b[n] = load_four_e4m3(g.b, at, num_valid,
                                      g.b_scales +
                                          (p.expert * num_blocks(p.columns) + c / 128) *
                                              num_blocks(p.depth) +
                                          s / 128);
            else
                b[n] = load_four(g.b, b_type, at, num_valid);
        }
    }
    /* Writes the loaded elements to shared memory at `to`: the tile of a, and then the tile of
     * b. */
    __device__ __forceinline__ void store_step(float *to) const
    {
        float *const to_a = to, *const to_b = to + BK * A_PITCH;
#pragma unroll
        for (int n = 0; n < A_FOURS; n++)
            put_four_shared<A_TRANSPOSED, A_PITCH>(to_a, step_in_tile(A_TRANSPOSED, BM, n),
                                                   line_in_tile(A_TRANSPOSED, BM, n), a[n]);
#pragma unroll
        for (int n = 0; n < B_FOURS; n++)
            put_four_shared<B_TRANSPOSED, B_PITCH>(to_b, step_in_tile(B_TRANSPOSED, BN, n),
                                                   line_in_tile(B_TRANSPOSED, BN, n), b[n]);
    }
};

/* Returns the index in the tile of the i-th row that a thread computes. A thread computes eight
 * rows: two blocks of four adjacent rows. `first`: index of the first block among the tile's
 * blocks of four rows. `block_distance`: distance in rows between the two blocks (half of the
 * tile's rows). Also used for columns. */
static __device__ __forceinline__ int thread_line(int first, int i, int block_distance)
{
    return first * 4 + i % 4 + (i < 4 ? 0 : block_distance);
}

/* Reads the eight elements of a row in shared memory that a thread needs. They are at the
 * positions that thread_line() returns. */
static __device__ __forceinline__ void load_eight(const float *from, int block_distance,
                                                  float (&x)[THREAD_TILE])
{
    const float4 low = *(const float4 *)from, high = *(const float4 *)(from + block_distance);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

/* Stores four results x to row m of the tile, from column `column` of out on. If the row has no
 * token, the results become zeros. If the row has a token, first adds the bias and g.addend to
 * the results, if they are set. If g.accumulate is set, also adds the old values of out, with
 * or without a token. */
template <int PASS, bool SCALED>
static __device__ __forceinline__ void store_four(const p2p_gemm &g, const TileSlice &p, int m,
                                                  int64_t column, float *x)
{
    const int64_t line = PASS == EPIC_GEMM_WEIGHT ? p.expert * g.k + p.first + m : p.row + m;
    const int64_t at = line * p.columns + column;
    const uint32_t type = PASS == EPIC_GEMM_WEIGHT              ? g.out_type
                          : PASS == EPIC_GEMM_FORWARD || SCALED ? y_type(g)
                                                                : g.row_type;
    const uint32_t bias_type = SCALED ? type : g.weight_type;
    const int num_valid = count_four(p.columns, column);
    const bool has_token = m < p.tokens;
    if (m >= p.rows || !num_valid) return;
    const auto add = [&](float4 more, float factor) {
        x[0] += more.x * factor, x[1] += more.y * factor;
        x[2] += more.z * factor, x[3] += more.w * factor;
    };
    if (!has_token) x[0] = x[1] = x[2] = x[3] = 0;
    if ((PASS == EPIC_GEMM_FORWARD || SCALED) && g.bias && has_token)
        add(load_four(g.bias, bias_type, p.expert * p.columns + column, num_valid),
            g.bias_weights ? g.bias_weights[line] : 1.0f);
    if (PASS == EPIC_GEMM_INPUT && g.addend && has_token)
        add(load_four(g.addend, type, at, num_valid), 1);
    if (PASS != EPIC_GEMM_FORWARD && g.accumulate)
        add(load_four(g.out, type, at, num_valid), 1);
    store_numbers_at(g.out, type, at, num_valid, x);
}

/* Returns the number of rows of out. Only for products with split-K (sums in slices), which
 * have a single slab. */
template <int PASS> static __device__ __forceinline__ int64_t lines_of(const p2p_gemm &g)
{
    return PASS == EPIC_GEMM_WEIGHT ? g.k : g.slabs.num_slots;
}

/* Stores four partial sums of one slice to g.slice_sums. `m`, `column`: as in store_four(). */
template <int PASS>
static __device__ __forceinline__ void store_partial_four(const p2p_gemm &g, const TileSlice &p,
                                                          int64_t slice, int m, int64_t column,
                                                          const float *x)
{
    const int64_t line = PASS == EPIC_GEMM_WEIGHT ? p.first + m : p.row + m;
    const int64_t at = (slice * lines_of<PASS>(g) + line) * p.columns + column;
    if (m < p.rows)
        store_numbers_at(g.slice_sums, EPIC_F32, at, count_four(p.columns, column), x);
}

/* Computes the products. Each CTA computes every gridDim.x-th tile slice. Shared memory has two
 * buffers: while the CTA multiplies the data of one step from one buffer, it writes the data of
 * the next step to the other buffer. */
template <int PASS, bool SCALED>
static __global__ void __launch_bounds__(THREADS)
    plain_kernel(const __grid_constant__ p2p_gemm g)
{
    wait_for_previous_kernel();
    typedef StepTiles<PASS, SCALED> Tiles;
    __shared__ float4 fours[2][BK * (Tiles::A_PITCH + Tiles::B_PITCH) / 4];
    const int down = threadIdx.x / (BN / THREAD_TILE),
              across = threadIdx.x % (BN / THREAD_TILE);
    const int64_t num_slices = num_tile_slices<PASS>(g);
    Tiles step_tiles;
    for (int64_t index = blockIdx.x; index < num_slices; index += gridDim.x) {
        const TileSlice p = find_tile_slice<PASS>(g, index);
        float sum[THREAD_TILE][THREAD_TILE] = {};
        int buffer = 0;
        step_tiles.load_step(g, p, p.begin);
        step_tiles.store_step((float *)fours[0]);
        __syncthreads();
        for (int64_t first = p.begin; first < p.end; first += BK) {
            const bool has_next = first + BK < p.end;
            const float *const a = (const float *)fours[buffer];
            const float *const b = a + BK * Tiles::A_PITCH;
            if (has_next) step_tiles.load_step(g, p, first + BK);
#pragma unroll
            for (int s = 0; s < BK; s++) {
                float x[THREAD_TILE], y[THREAD_TILE];
                load_eight(a + s * Tiles::A_PITCH + down * 4, BM / 2, x);
                load_eight(b + s * Tiles::B_PITCH + across * 4, BN / 2, y);
#pragma unroll
                for (int i = 0; i < THREAD_TILE; i++)
#pragma unroll
                    for (int j = 0; j < THREAD_TILE; j++) sum[i][j] += x[i] * y[j];
            }
            buffer = 1 - buffer;
            if (has_next) step_tiles.store_step((float *)fours[buffer]);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < THREAD_TILE; i++)
#pragma unroll
            for (int j = 0; j < THREAD_TILE; j += 4) {
                const int m = thread_line(down, i, BM / 2);
                const int64_t column = p.column + thread_line(across, j, BN / 2);
                if (!SCALED && g.slices > 1)
                    store_partial_four<PASS>(g, p, index % g.slices, m, column, sum[i] + j);
                else
                    store_four<PASS, SCALED>(g, p, m, column, sum[i] + j);
            }
    }
}

/* Adds the partial sums of all slices in order, and stores the results. A thread processes four
 * elements at a time. Runs after plain_kernel or few_rows_kernel. */
template <int PASS>
static __global__ void __launch_bounds__(THREADS)
    slices_kernel(const __grid_constant__ p2p_gemm g)
{
    wait_for_previous_kernel();
    TileSlice p = {};
    p.columns = PASS == EPIC_GEMM_INPUT ? g.k : g.n;
    p.rows = p.tokens = (int)lines_of<PASS>(g);
    const int64_t fours = (p.columns + 3) / 4, stride = (int64_t)gridDim.x * THREADS;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (; i < p.rows * fours; i += stride) {
        const int64_t line = i / fours, column = i % fours * 4;
        float sum[4] = {0, 0, 0, 0};
        for (int32_t first = 0; first < g.slices; first += SLICES_AT_ONCE) {
            float4 more[SLICES_AT_ONCE];
#pragma unroll
            for (int s = 0; s < SLICES_AT_ONCE; s++)
                if (first + s < g.slices)
                    more[s] =
                        load_four(g.slice_sums, EPIC_F32,
                                  ((int64_t)(first + s) * p.rows + line) * p.columns + column,
                                  count_four(p.columns, column));
#pragma unroll
            for (int s = 0; s < SLICES_AT_ONCE; s++)
                if (first + s < g.slices)
                    sum[0] += more[s].x, sum[1] += more[s].y, sum[2] += more[s].z,
                        sum[3] += more[s].w;
        }
        store_four<PASS, false>(g, p, (int)line, column, sum);
    }
}

/* Returns the number of CTAs to launch: the maximum number of tile slices of the product, but
 * at most four CTAs per SM. Only the device knows how many rows the slabs have, so the host
 * must assume the maximum number of tiles. */
static int ctas_of(const p2p_gemm *g)
{
    const int64_t columns = g->pass == EPIC_GEMM_INPUT ? g->k : g->n;
    const int64_t lines = g->pass == EPIC_GEMM_WEIGHT
                              ? (g->k + BM - 1) / BM * g->slabs.num_experts
                              : g->slabs.most_tiles;
    const int64_t slices = g->slices > 1 ? g->slices : 1;
    const int64_t num_slices = lines * ((columns + BN - 1) / BN) * slices;
    const int64_t most = 4 * (int64_t)g->sms;
    return (int)(num_slices < most ? num_slices : most);
}

template <int PASS, bool SCALED>
static cudaError_t launch_pass(const p2p_gemm &g, cudaStream_t stream)
{
    const cudaError_t error =
        p2p_gemm_has_few_rows(&g)
            ? p2p_launch_few_rows(&g, stream)
            : launch_kernel(plain_kernel<PASS, SCALED>, ctas_of(&g), THREADS, 0, stream, g);
    if (SCALED || g.slices <= 1 || error != cudaSuccess) return error;
    const int64_t columns = PASS == EPIC_GEMM_INPUT ? g.k : g.n;
    const int64_t lines = PASS == EPIC_GEMM_WEIGHT ? g.k : g.slabs.num_slots;
    const int64_t ctas = (lines * ((columns + 3) / 4) + THREADS - 1) / THREADS;
    const int64_t most = 4 * (int64_t)g.sms;
    return launch_kernel(slices_kernel<PASS>, (int)(ctas < most ? ctas : most), THREADS, 0,
                         stream, g);
}

extern "C" cudaError_t p2p_launch_plain_gemm(const p2p_gemm *g, cudaStream_t stream)
{
    if (g->row_type == EPIC_E4M3)
        return launch_pass<EPIC_GEMM_INPUT, true>(p2p_as_input(*g), stream);
    if (g->pass == EPIC_GEMM_WEIGHT) return launch_pass<EPIC_GEMM_WEIGHT, false>(*g, stream);
    if (g->pass == EPIC_GEMM_INPUT) return launch_pass<EPIC_GEMM_INPUT, false>(*g, stream);
    return launch_pass<EPIC_GEMM_FORWARD, false>(*g, stream);
}

template <int PASS, bool SCALED> static cudaError_t load_pass(cudaError_t before)
{
    cudaFuncAttributes attributes;
    if (before != cudaSuccess) return before;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, slices_kernel<PASS>);
    if (error != cudaSuccess) return error;
    return cudaFuncGetAttributes(&attributes, plain_kernel<PASS, SCALED>);
}

extern "C" cudaError_t p2p_load_plain_gemm(void)
{
    cudaError_t error = load_pass<EPIC_GEMM_FORWARD, false>(cudaSuccess);
    error = load_pass<EPIC_GEMM_INPUT, false>(error);
    error = load_pass<EPIC_GEMM_WEIGHT, false>(error);
    return load_pass<EPIC_GEMM_INPUT, true>(error);
}
