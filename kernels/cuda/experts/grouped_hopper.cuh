/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products over slabs on the tensor cores of sm_90a (Hopper).  The products are those of
 * experts/grouped.h, with factors of 16 bits or e4m3, float32 sums, and k and n multiples of 8.
 *
 * A tile of out is 128 x 256.  A CTA has three warpgroups: one thread of the first copies
 * (producer), and the other two multiply, 64 rows each (consumers).  They share a ring of
 * STAGES stages in shared memory, each with a barrier "full" and a barrier "empty":
 *
 *     producer   waits for empty[s]; copies a 128 x 64 and b 64 x 256 into stage s -> full[s]
 *     consumers  wait for full[s]; run 4 wgmma of 64 x 256 x 16; arrive at empty[s] one later
 *     consumers  add the bias, zero the padding, round; write out by tensor copies of 64 rows
 *                x 128 bytes (boxes) through shared memory
 *
 * Producer and consumers go through the same list of tiles.  The grid is persistent: CTA i
 * computes the tiles i, i + grid, ...  Two CTAs form a cluster and compute neighbouring tiles.
 * If both tiles belong to one expert, each CTA copies half of b, and the multicast copy reaches
 * both.  This is decided for each tile, so slabs of very different sizes lose nothing.
 *
 * The factors stay in memory as the caller has them.  wgmma reads a transposed factor across
 * its rows.
 *     pass     a                          b                           the sum runs over
 *     FORWARD  x   [slot, k]              w [k, n] transposed         k
 *     INPUT    d_y [slot, n]              w [k, n]                    n
 *     WEIGHT   x   [slot, k] transposed   d_y [slot, n] transposed    slots of the slab
 * WEIGHT begins with the last block of slots, which may be incomplete.  Its rows after the
 * slab's tokens are zeroed in shared memory, so that neither padding nor the next slab reaches
 * a sum.  FORWARD and INPUT compute whole tiles and store the rows that carry a token. */
#ifndef EPIC_GROUPED_HOPPER_CUH
#define EPIC_GROUPED_HOPPER_CUH

#include "cuda/common/ptx.cuh"
#include "cuda/experts/grouped.h"
#include "cuda/experts/tensor.cuh"

#define BM EXPERTS_TILE_ROWS
#define BN 256
#define BK 64 /* 16-bit numbers of a sum in one stage */
#define STAGES 4
#define GROUP_BYTES (64 * 128) /* 64 lines of 128 bytes, the unit of the 128-byte swizzle */
#define A_BYTES (2 * GROUP_BYTES)
#define B_BYTES (4 * GROUP_BYTES)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define STORE_BYTES (2 * GROUP_BYTES) /* of a consumer warpgroup: two boxes, alternately */
#define SHARED_BYTES (STAGES * STAGE_BYTES + 2 * STORE_BYTES + 1024)
#define THREADS 384
#define CONSUMERS 256

/* Numbers of named barriers of the CTA; __syncthreads uses 0. */
#define BARRIER_OWN 1 /* 1 and 2: of one consumer warpgroup each */
#define BARRIER_BOTH 3

/* An e4m3 number: type of factors with scales. */
struct E4m3 {
    uint8_t bits;
};

/* Descriptors of the three matrices for tensor copies. */
struct Maps {
    CUtensorMap a, b, out;
};

/* Arguments of the kernel, from p2p_gemm. */
struct Job {
    slab_place *slabs;
    slab_tile *tiles;
    const int32_t *num_tiles;
    const void *bias;
    const float *bias_weights;
    const float *a_scales, *b_scales; /* e4m3 */
    void *out;
    const void *also; /* INPUT */
    int64_t columns;  /* of out */
    int64_t lines;    /* WEIGHT: of out of one expert */
    int num_experts;
    int tiles_down; /* WEIGHT: rows of tiles of one expert */
    int tiles_across;
    int steps; /* FORWARD, INPUT: blocks of BK (e4m3: 128) numbers of a sum */
    int group; /* pairs of rows of tiles that are computed together, column by column, for L2 */
    int accumulate;
};

/* One tile of out. */
struct Work {
    int row; /* of a, and of out; WEIGHT: of out alone */
    int column, expert, steps;
    int first;  /* WEIGHT: first slot of the slab */
    int tokens; /* FORWARD, INPUT: rows that carry a token; WEIGHT: tokens of the slab */
    int rows;   /* FORWARD, INPUT: rows to store, with padding */
    bool store; /* false: a duplicate that only keeps the cluster in step */
    bool share; /* the cluster copies b once for both CTAs */
};

/* Fills in tile number t of this cluster, for the CTA `rank` of it.  Returns false after the
 * last. */
template <int PASS, int CTAS>
static __device__ __forceinline__ bool find_tile(Work &w, const Job &job, int num_tiles, int t,
                                                 int rank)
{
    int down = num_tiles, rest = t;
    if (PASS == EPIC_GEMM_WEIGHT) {
        down = job.tiles_down;
        const int each = (down + CTAS - 1) / CTAS * job.tiles_across;
        w.expert = t / each;
        if (w.expert >= job.num_experts) return false;
        rest = t - w.expert * each;
    }
    const int pairs = (down + CTAS - 1) / CTAS;
    if (rest >= pairs * job.tiles_across) return false;
    const int turn = rest / (job.group * job.tiles_across);
    rest -= turn * job.group * job.tiles_across;
    const int in_turn = min(job.group, pairs - turn * job.group);
    const int pair = turn * job.group + rest % in_turn;
    w.column = rest / in_turn * BN;
    int line = pair * CTAS + rank;
    w.store = line < down; /* an odd last row of tiles is computed twice */
    if (!w.store) line = down - 1;
    w.share = CTAS == 2;
    if (PASS == EPIC_GEMM_WEIGHT) {
        const slab_place slab = job.slabs[w.expert];
        w.row = line * BM;
        w.first = slab.row;
        w.tokens = slab.tokens;
        w.rows = BM;
        w.steps = (slab.tokens + BK - 1) / BK;
        w.store = w.store && !(job.accumulate && w.steps == 0);
    } else {
        const slab_tile tile = job.tiles[line];
        w.row = tile.row;
        w.expert = tile.expert;
        w.first = 0;
        w.tokens = tile.tokens;
        w.rows = tile.rows;
        w.steps = job.steps;
        if (CTAS == 2)
            w.share = job.tiles[min(pair * 2 + 1 - rank, down - 1)].expert == w.expert;
    }
    return true;
}

/* A position in the ring of stages: index, and the parity that its barriers wait for. */
struct Stage {
    int index, parity;

    __device__ __forceinline__ void advance()
    {
        if (++index == STAGES) {
            index = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ int previous_index() const
    {
        return (index + STAGES - 1) % STAGES;
    }
};

/* Addresses in shared memory. */
struct Places {
    uint32_t stages, stores, full, empty;
};

/* ---------------------------------------------------------------------------- producer ---- */

/* Starts the copy of 128 x 64 numbers of a into a stage; `full` counts its bytes. */
template <int PASS>
static __device__ __forceinline__ void load_a(uint32_t to, const Maps &maps, uint32_t full,
                                              const Work &w, int step)
{
    if (PASS == EPIC_GEMM_WEIGHT) {
        load_box(to, &maps.a, full, w.row, step);
        load_box(to + GROUP_BYTES, &maps.a, full, w.row + 64, step);
    } else {
        load_box(to, &maps.a, full, step, w.row);
    }
}

/* Starts the copy of b into a stage.  With `share` this CTA copies its half into both CTAs. */
template <int PASS>
static __device__ __forceinline__ void load_b(uint32_t to, const Maps &maps, uint32_t full,
                                              const Work &w, int step, bool share, int rank)
{
    constexpr int BOXES = PASS == EPIC_GEMM_INPUT ? 2 : 4;
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        const uint32_t at = to + i * (B_BYTES / BOXES);
        const int column = w.column + i * (BN / BOXES);
        const int x = PASS == EPIC_GEMM_INPUT ? step : column;
        const int y = PASS == EPIC_GEMM_INPUT ? column : step;
        const int z = PASS == EPIC_GEMM_WEIGHT ? 0 : w.expert;
        if (!share)
            load_box(at, &maps.b, full, x, y, z);
        else if (i / (BOXES / 2) == rank)
            load_box_multicast(at, &maps.b, full, x, y, z);
    }
}

/* The producer thread: fills the ring for all tiles of the CTA. */
template <class T, int PASS, int CTAS>
static __device__ __forceinline__ void run_producer(const Maps &maps, const Job &job,
                                                    const Places &at, int rank)
{
    const int num_tiles = PASS == EPIC_GEMM_WEIGHT ? 0 : *job.num_tiles;
    const int grid = gridDim.x / CTAS;
    Stage s = {0, 0};
    Work w;
    for (int t = blockIdx.x / CTAS; find_tile<PASS, CTAS>(w, job, num_tiles, t, rank);
         t += grid) {
        for (int k = 0; k < w.steps; k++) {
            const int block = PASS != EPIC_GEMM_WEIGHT ? k : k == 0 ? w.steps - 1 : k - 1;
            const int step = w.first + block * (128 / (int)sizeof(T));
            const uint32_t a = at.stages + s.index * STAGE_BYTES, full = at.full + 8 * s.index;
            barrier_wait(at.empty + 8 * s.index, s.parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_a<PASS>(a, maps, full, w, step);
            load_b<PASS>(a + A_BYTES, maps, full, w, step, w.share, rank);
            s.advance();
        }
    }
}

/* --------------------------------------------------------------------------- consumers ---- */

/* Reports that this warpgroup has read a stage: the producers of both CTAs may fill it
 * again. */
template <int CTAS>
static __device__ __forceinline__ void release_stage(const Places &at, int stage, int thread)
{
    const uint32_t empty = at.empty + 8 * stage;
    if (CTAS == 2) {
        if (thread < 2) barrier_arrive_at(empty, thread);
    } else if (thread == 0) {
        barrier_arrive(empty);
    }
}

/* WEIGHT: zeroes the lines of a stage from `first` on.  Each of the two warpgroups zeroes a
 * half. */
static __device__ __forceinline__ void zero_lines(uint32_t stage, int first, int half,
                                                  int thread)
{
    const uint32_t a = stage + half * GROUP_BYTES, b = stage + A_BYTES + 2 * half * GROUP_BYTES;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (int i = thread; i < (64 - first) * 8; i += 128) {
        const uint32_t line = first * 128 + i * 16;
        write_shared(a + line, zero);
        write_shared(b + line, zero);
        write_shared(b + GROUP_BYTES + line, zero);
    }
    fence_async_proxy();
    named_barrier_sync(BARRIER_BOTH, CONSUMERS);
}

/* Computes the 64 rows of this warpgroup of a tile, for factors of 16 bits.  A stage is
 * released when the products of the next stage have been issued. */
template <class T, int PASS, int CTAS>
static __device__ __forceinline__ void
multiply_tile(float (&d)[128], const Work &w, const Places &at, Stage &s, int half, int thread)
{
    constexpr int TRANSPOSE_A = PASS == EPIC_GEMM_WEIGHT, TRANSPOSE_B = PASS != EPIC_GEMM_INPUT;
    constexpr int STEP_A = TRANSPOSE_A ? 128 : 2,
                  STEP_B = TRANSPOSE_B ? 128 : 2; /* descriptor step of 16 numbers of the sum */
    if (PASS == EPIC_GEMM_WEIGHT && w.tokens % BK != 0) {
        barrier_wait(at.full + 8 * s.index, s.parity);
        zero_lines(at.stages + s.index * STAGE_BYTES, w.tokens % BK, half, thread);
    }
    if (w.steps == 0) {
#pragma unroll
        for (int i = 0; i < 128; i++) d[i] = 0;
    }
    for (int k = 0; k < w.steps; k++) {
        const uint32_t stage = at.stages + s.index * STAGE_BYTES;
        barrier_wait(at.full + 8 * s.index, s.parity);
        const uint64_t a =
            describe_factor(stage + half * GROUP_BYTES, TRANSPOSE_A ? 512 : 1, 64);
        const uint64_t b = describe_factor(stage + A_BYTES, TRANSPOSE_B ? 512 : 1, 64);
        fence_wgmma();
#pragma unroll
        for (int i = 0; i < 4; i++)
            issue_wgmma<TRANSPOSE_A, TRANSPOSE_B>(d, a + i * STEP_A, b + i * STEP_B,
                                                  (k | i) != 0, T());
        commit_wgmma();
        if (k > 0) {
            wait_wgmma<1>();
            release_stage<CTAS>(at, s.previous_index(), thread);
        }
        s.advance();
    }
    wait_wgmma<0>(); /* on every path: else ptxas serializes wgmma (C7518) */
    if (w.steps > 0) release_stage<CTAS>(at, s.previous_index(), thread);
}

/* Position of a thread's results in its warpgroup's 64 rows: number d[4 * j + i] is in row
 * `row` (i < 2) or row + 8 (i >= 2), column 8 * j + column + i % 2. */
struct Lane {
    int row, column;

    __device__ __forceinline__ explicit Lane(int thread)
    {
        row = thread / 32 * 16 + thread % 32 / 4;
        column = thread % 4 * 2;
    }
};

/* Returns the numbers i and i + 1 of an array as float32. */
static __device__ __forceinline__ float2 pair_at(const void *p, int64_t i, __nv_bfloat16)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)((const __nv_bfloat16 *)p + i));
}

static __device__ __forceinline__ float2 pair_at(const void *p, int64_t i, __half)
{
    return __half22float2(*(const __half2 *)((const __half *)p + i));
}

/* Rounds two numbers to 16 bits and packs them into a word. */
static __device__ __forceinline__ uint32_t pack_pair(float x, float y, __nv_bfloat16)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *(const uint32_t *)&pair;
}

static __device__ __forceinline__ uint32_t pack_pair(float x, float y, __half)
{
    const __half2 pair = __floats2half2_rn(x, y);
    return *(const uint32_t *)&pair;
}

/* Adds the bias of the expert, times the weight of the row if there are bias_weights. */
template <class T>
static __device__ __forceinline__ void add_bias(float (&d)[128], const Job &job, const Work &w,
                                                int half, const Lane &lane)
{
    const int row = half * 64 + lane.row;
    float low = 1, high = 1;
    if (job.bias_weights) {
        low = row < w.tokens ? job.bias_weights[w.row + row] : 0;
        high = row + 8 < w.tokens ? job.bias_weights[w.row + row + 8] : 0;
    }
#pragma unroll
    for (int j = 0; j < 32; j++) {
        const int column = w.column + 8 * j + lane.column;
        if (column >= job.columns) continue;
        const float2 b = pair_at(job.bias, w.expert * job.columns + column, T());
        d[4 * j] += low * b.x;
        d[4 * j + 1] += low * b.y;
        d[4 * j + 2] += high * b.x;
        d[4 * j + 3] += high * b.y;
    }
}

/* Adds rows of `from` to the result before it is rounded.  `row` is this thread's first row,
 * and `there` rows exist from it on.  float32 results use add_box() instead, which adds in
 * memory; in 16 bits that would round the product first and the sum again. */
template <class Out>
static __device__ __forceinline__ void add_rows(float (&d)[128], const void *from,
                                                const Job &job, const Work &w, int64_t row,
                                                int64_t there, const Lane &lane)
{
    const int64_t at = row * job.columns;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        const int column = w.column + 8 * j + lane.column;
        if (column >= job.columns) continue;
        float2 before = {0, 0}, below = {0, 0};
        if (there > 0) before = pair_at(from, at + column, Out());
        if (there > 8) below = pair_at(from, at + 8 * job.columns + column, Out());
        d[4 * j] += before.x;
        d[4 * j + 1] += before.y;
        d[4 * j + 2] += below.x;
        d[4 * j + 3] += below.y;
    }
}

/* Adds what accumulate and `also` ask for: the old values of out, and the rows `also`. */
template <class Out, int PASS>
static __device__ __forceinline__ void add_existing(float (&d)[128], const Job &job,
                                                    const Work &w, int half, const Lane &lane)
{
    const int64_t line = half * 64 + lane.row;
    if (PASS == EPIC_GEMM_WEIGHT) {
        const int64_t row = w.expert * job.lines + w.row + line;
        add_rows<Out>(d, job.out, job, w, row, job.lines - w.row - line, lane);
        return;
    }
    if (job.also) add_rows<Out>(d, job.also, job, w, w.row + line, w.tokens - line, lane);
    if (job.accumulate) add_rows<Out>(d, job.out, job, w, w.row + line, w.tokens - line, lane);
}

/* Zeroes the results of rows without a token. */
static __device__ __forceinline__ void zero_padding(float (&d)[128], int tokens,
                                                    const Lane &lane)
{
    const bool low = lane.row >= tokens, high = lane.row + 8 >= tokens;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        if (low) d[4 * j] = d[4 * j + 1] = 0;
        if (high) d[4 * j + 2] = d[4 * j + 3] = 0;
    }
}

/* Writes box q of the warpgroup's 64 rows to shared memory in the order that a tensor copy
 * expects: lines of 128 bytes, in which vector v of line r is stored at v ^ r % 8. */
template <class T>
static __device__ __forceinline__ void write_box(uint32_t box, const float (&d)[128], int q,
                                                 int thread, T)
{
    const int lane = thread % 32;
    const int row = thread / 32 * 16 + lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float *x = d + q * 32 + j * 8;
        const int vector = (2 * j + lane / 16) ^ row % 8;
        write_matrices(box + row * 128 + vector * 16, pack_pair(x[0], x[1], T()),
                       pack_pair(x[2], x[3], T()), pack_pair(x[4], x[5], T()),
                       pack_pair(x[6], x[7], T()));
    }
}

static __device__ __forceinline__ void write_box(uint32_t box, const float (&d)[128], int q,
                                                 int thread, float)
{
    const Lane lane(thread);
    const int high = lane.row + 8;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float *x = d + q * 16 + j * 4;
        const int vector = (2 * j + lane.column / 4) ^ lane.row % 8; /* of high, too */
        const uint32_t at = box + vector * 16 + lane.column % 4 * 4;
        write_shared(at + lane.row * 128, x[0], x[1]);
        write_shared(at + high * 128, x[2], x[3]);
    }
}

/* Stores the first `rows` lines of a box that reaches beyond the slab, by ordinary stores. */
static __device__ __forceinline__ void
store_lines(uint8_t *out, int64_t line_bytes, uint32_t box, int rows, int vectors, int thread)
{
    for (int i = thread; i < rows * 8; i += 128) {
        const int row = i / 8, vector = i % 8;
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(box + row * 128 + ((vector ^ row % 8) << 4))
                     : "memory");
        if (vector < vectors) *(uint4 *)(out + row * line_bytes + vector * 16) = v;
    }
}

/* Rounds the results to Out and stores them, box by box. */
template <class Out, int PASS>
static __device__ __forceinline__ void store_tile(const float (&d)[128], const Maps &maps,
                                                  const Job &job, const Work &w, uint32_t boxes,
                                                  int half, int thread)
{
    constexpr int WIDE = 128 / sizeof(Out), COUNT = BN / WIDE; /* columns of a box, number of
                                                                  boxes */
    const int rows = w.rows - half * 64; /* rows of this warpgroup that belong to the slab */
#pragma unroll
    for (int q = 0; q < COUNT; q++) {
        const uint32_t box = boxes + q % 2 * GROUP_BYTES;
        const int column = w.column + q * WIDE;
        if (thread == 0) wait_boxes_read<1>();
        named_barrier_sync(BARRIER_OWN + half, 128);
        write_box(box, d, q, thread, Out());
        fence_async_proxy();
        named_barrier_sync(BARRIER_OWN + half, 128);
        if (PASS == EPIC_GEMM_WEIGHT || rows >= 64) {
            const int z = PASS == EPIC_GEMM_WEIGHT ? w.expert : 0;
            if (thread == 0 && w.store && sizeof(Out) == 4 && job.accumulate)
                add_box(&maps.out, box, column, w.row + half * 64, z);
            else if (thread == 0 && w.store)
                store_box(&maps.out, box, column, w.row + half * 64, z);
        } else if (w.store && rows > 0 && column < job.columns) {
            const int64_t at = (int64_t)(w.row + half * 64) * job.columns + column;
            store_lines((uint8_t *)job.out + at * (int)sizeof(Out),
                        job.columns * (int)sizeof(Out), box, rows,
                        (int)(job.columns - column) / (16 / (int)sizeof(Out)), thread);
        }
        if (thread == 0) commit_boxes();
    }
}

/* ------------------------------------------------------------------------- scaled e4m3 ---- */

/* Scales of a tile: those of a thread's two rows, and those of the left and the right 128
 * columns of weights.  Four lanes have the same rows, so they share the loads: lane i loads the
 * blocks i, i + 4, ...  of the sum, four blocks ahead. */
struct Scales {
    const float *low, *high, *b; /* low, high: NULL for a row without a token */
    int steps, right;            /* right: distance of the right block of weights from the left
                                    one */
    float next_low, next_high, next_b[2];
    float now_low[2], now_high[2]; /* scale of a row times scale of the weights */

    __device__ __forceinline__ Scales(const Job &job, const Work &w, const Lane &lane, int half)
    {
        const int row = half * 64 + lane.row;
        const int block = w.column / 128, blocks = (int)((job.columns + 127) / 128);
        const float *const rows = job.a_scales + (int64_t)(w.row + row) * job.steps;
        steps = job.steps;
        low = row < w.tokens ? rows : NULL;
        high = row + 8 < w.tokens ? rows + (int64_t)8 * steps : NULL;
        b = job.b_scales + ((int64_t)w.expert * blocks + block) * steps;
        right = block + 1 < blocks ? steps : 0;
        fetch_blocks(lane.column / 2);
    }
    __device__ __forceinline__ void fetch_blocks(int step)
    {
        next_low = next_high = next_b[0] = next_b[1] = 0;
        if (step >= steps) return;
        if (low) next_low = __ldg(low + step);
        if (high) next_high = __ldg(high + step);
        next_b[0] = __ldg(b + step);
        next_b[1] = __ldg(b + right + step);
    }
    /* Makes the four loaded blocks the current ones and starts loading the next; `step` is this
     * lane's block of the next four. */
    __device__ __forceinline__ void use_next_blocks(int step)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            now_low[h] = next_low * next_b[h];
            now_high[h] = next_high * next_b[h];
        }
        fetch_blocks(step);
    }
};

/* Like multiply_tile(), for e4m3.  The tensor cores add only one block of 128 products, because
 * they keep fewer bits than float32.  Each block's sum is then scaled and added to d in
 * float32.  This takes as many clocks as a quarter of the products and does not overlap with
 * them; only the waits for copies are hidden. */
template <int CTAS>
static __device__ __forceinline__ void multiply_tile_e4m3(float (&d)[128], const Job &job,
                                                          const Work &w, const Places &at,
                                                          Stage &s, int half, int thread)
{
    const Lane lane(thread);
    const uint64_t a = describe_factor(at.stages + half * GROUP_BYTES, 1, 64);
    const uint64_t b = describe_factor(at.stages + A_BYTES, 1, 64);
    Scales scales(job, w, lane, half);
    float sum[64];
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    barrier_wait(at.full + 8 * s.index, s.parity);
    for (int k = 0; k < w.steps; k++) {
        if (k % 4 == 0) scales.use_next_blocks(k + 4 + lane.column / 2);
        const uint32_t place = s.index * (STAGE_BYTES / 16);
        const int stage = s.index;
        s.advance();
#pragma unroll
        for (int h = 0; h < 2; h++) { /* 128 columns */
            fence_wgmma();
#pragma unroll
            for (int i = 0; i < 4; i++)
                issue_wgmma(sum, a + place + i * 2, b + place + h * (B_BYTES / 32) + i * 2,
                            i != 0);
            commit_wgmma();
            float scale[2] = {__shfl_sync(0xffffffffu, scales.now_low[h], k % 4, 4),
                              __shfl_sync(0xffffffffu, scales.now_high[h], k % 4, 4)};
            keep_in_registers(scale); /* so that the shuffles come before the wait */
            if (h == 1 && k + 1 < w.steps) barrier_wait(at.full + 8 * s.index, s.parity);
            wait_wgmma<0>();
            keep_in_registers(sum);
            if (h == 1) release_stage<CTAS>(at, stage, thread);
#pragma unroll
            for (int i = 0; i < 64; i++) d[64 * h + i] += scale[i % 4 / 2] * sum[i];
        }
    }
}

/* A consumer warpgroup: computes and stores its half of every tile of the CTA. */
template <class T, class Out, int PASS, int CTAS>
static __device__ __forceinline__ void run_consumer(const Maps &maps, const Job &job,
                                                    const Places &at, int half, int rank)
{
    const int num_tiles = PASS == EPIC_GEMM_WEIGHT ? 0 : *job.num_tiles;
    const int grid = gridDim.x / CTAS, thread = threadIdx.x % 128;
    const uint32_t boxes = at.stores + half * STORE_BYTES;
    const Lane lane(thread);
    Stage s = {0, 0};
    Work w;
    float d[128];
    for (int t = blockIdx.x / CTAS; find_tile<PASS, CTAS>(w, job, num_tiles, t, rank);
         t += grid) {
        if constexpr (sizeof(T) == 1)
            multiply_tile_e4m3<CTAS>(d, job, w, at, s, half, thread);
        else
            multiply_tile<T, PASS, CTAS>(d, w, at, s, half, thread);
        if constexpr ((PASS == EPIC_GEMM_FORWARD || sizeof(T) == 1) && sizeof(Out) == 2)
            if (job.bias) add_bias<Out>(d, job, w, half, lane);
        if constexpr (PASS == EPIC_GEMM_WEIGHT && sizeof(Out) == 2)
            if (job.accumulate && w.store) add_existing<Out, PASS>(d, job, w, half, lane);
        if constexpr (PASS == EPIC_GEMM_INPUT && sizeof(T) == 2 && CTAS == 1)
            if (w.store) add_existing<Out, PASS>(d, job, w, half, lane);
        if (PASS != EPIC_GEMM_WEIGHT && w.tokens < BM)
            zero_padding(d, w.tokens - half * 64, lane);
        store_tile<Out, PASS>(d, maps, job, w, boxes, half, thread);
    }
    if (thread == 0) wait_boxes();
}

/* ------------------------------------------------------------------------------ kernel ---- */

/* The kernel.  T is the type of the factors, Out that of the result, CTAS the size of a
 * cluster.  Its body is compiled for sm_90a only. */
template <class T, class Out, int PASS, int CTAS>
static __global__ void __launch_bounds__(THREADS, 1)
    hopper_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Job job)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t memory[];
    __shared__ uint64_t barriers[2 * STAGES]; /* the host sees by its size whether the kernel
                                                 has a body */
    const int group = threadIdx.x / 128, rank = CTAS == 2 ? cluster_rank() : 0;
    Places at;
    at.stages = ((uint32_t)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    at.stores = at.stages + STAGES * STAGE_BYTES;
    at.full = (uint32_t)__cvta_generic_to_shared(barriers);
    at.empty = at.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(at.full + 8 * i, 1);
            barrier_init(at.empty + 8 * i, 2 * CTAS); /* consumer warpgroups of all CTAs of the
                                                         cluster */
        }
        barrier_init_done();
    }
    __syncthreads();
    if (CTAS == 2) cluster_sync();
    if (group == 0) {
        shrink_registers<40>();
        if (threadIdx.x == 0) run_producer<T, PASS, CTAS>(maps, job, at, rank);
    } else {
        grow_registers<232>();
        /* The shuffle shows ptxas that the value is equal in the whole warp.  It then keeps the
         * descriptors of wgmma in uniform registers, which makes e4m3 4 % faster. */
        const int half = __shfl_sync(0xffffffffu, group - 1, 0);
        run_consumer<T, Out, PASS, CTAS>(maps, job, at, half, rank);
    }
    __syncwarp();
    if (CTAS == 2) cluster_sync(); /* the other CTA may still copy into this CTA's memory */
#endif
}

#endif
