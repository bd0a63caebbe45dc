/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products over slabs on the tensor cores of sm_90a (Hopper). p2p_gemm
 * (experts/grouped.h) describes the products. Matrices a and b have 16-bit or e4m3 elements,
 * sums are float32, and k and n are multiples of 8.
 *
 * A tile of out has 128 x 256 elements. A CTA has three warpgroups. In the first warpgroup, one
 * thread (the producer) copies parts of the matrices a and b to shared memory. The other two
 * warpgroups (the consumers) multiply these parts. `warpgroup` is the index of a consumer:
 * consumer 0 computes the first 64 rows of the tile, and consumer 1 the last 64. A thread keeps
 * its 128 results in registers, in the array `d`. Producer and consumers share a ring of STAGES
 * stages in shared memory. Each stage has two barriers, "full" and "empty":
 *
 *   producer   waits for empty[s]; copies 128 x 64 elements of matrix a and 64 x 256 elements
 *              of matrix b into stage s; the copies complete full[s]
 *   consumers  wait for full[s]; issue 4 wgmma of 64 x 256 x 16; arrive at empty[s] after
 *              the wgmma of the next stage have been issued
 *   consumers  add the bias, zero the padding, round; write out by TMA copies of 64 rows
 *              x 128 bytes (boxes) through shared memory
 *
 * The grid is persistent, and producer and consumers process the same tiles in the same order.
 * The two CTAs of a cluster compute a pair of tiles that are neighbours in a column. Then they
 * continue with the next pair. If both tiles belong to one expert, they need the same part of
 * matrix b. Each CTA then copies half of this part, and its multicast copy writes this half to
 * the shared memory of both CTAs. If the two tiles of a pair belong to different experts, each
 * CTA copies the parts of its own tile only.
 *
 * The kernel reads a and b in the caller's layout. The *summed dimension* is K of a GEMM; the
 * last column of the table names it. "Transposed" marks a matrix in which the summed dimension
 * is not contiguous, so that wgmma has to read the matrix transposed.
 *     pass     a                          b                           the sum runs over
 *     FORWARD  x   [slot, k]              w [k, n] transposed         k
 *     INPUT    d_y [slot, n]              w [k, n]                    n
 *     WEIGHT   x   [slot, k] transposed   d_y [slot, n] transposed    slots of the slab
 * The sums of WEIGHT must contain only the slab's tokens, not its padding or the next slab. A
 * stage has a block of 64 slots. WEIGHT starts with the last block of the slab, which can be
 * incomplete, and the consumers zero the lines after the slab's last token in shared memory.
 * FORWARD and INPUT compute 64 rows if at least one of them holds a token, and store only rows
 * of the slab. */
#ifndef EPIC_GROUPED_HOPPER_CUH
#define EPIC_GROUPED_HOPPER_CUH

#include "cuda/common/launch.cuh"
#include "cuda/experts/hopper_tiles.cuh"

/* --------------------------------------------------------------------------- consumers ---- */

/* Releases a stage of the ring to the producer: arrives at the barrier `empty`. With clusters,
 * also arrives at the same barrier of the other CTA, because the producer of that CTA also
 * writes into this stage. Called after the warpgroup's wgmma have read the stage. */
template <int CTAS>
static __device__ __forceinline__ void release_stage(const SharedLayout &at, int stage,
                                                     int thread)
{
    const uint32_t empty = at.empty + 8 * stage;
    if (CTAS == 2) {
        if (thread < 2) barrier_arrive_at(empty, thread);
    } else if (thread == 0) {
        barrier_arrive(empty);
    }
}

/* Only in the pass WEIGHT: zeroes lines `first` to 63 of both matrices in a stage. These lines
 * are slots without a token of the slab, so they must add nothing to the sums. Each consumer
 * zeroes half of the columns. `stage`: shared-memory address of the stage. */
static __device__ __forceinline__ void zero_lines(uint32_t stage, int first, int warpgroup,
                                                  int thread)
{
    const uint32_t a = stage + warpgroup * GROUP_BYTES,
                   b = stage + A_BYTES + 2 * warpgroup * GROUP_BYTES;
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

/* Returns x. Requires that x is equal in all lanes of a warp. The warp vote shows ptxas that x
 * is uniform. So in a branch on x, ptxas keeps the wgmma descriptors in uniform registers.
 * Without the vote, ptxas computes the descriptors again before each wgmma, and products of
 * many tokens were 4 to 6 % slower. */
static __device__ __forceinline__ bool uniform_in_warp(bool x)
{
    return __any_sync(0xffffffffu, x);
}

/* Replaces multiply_tile() if none of this warpgroup's 64 rows holds a token. The first warp
 * waits for each stage of the tile and releases it. The other warps do not wait for stages
 * here, but at the barrier in store_tile(). So no warp can fall a whole round of the ring
 * behind. A warp that is so far behind would misread the parity of a stage's barrier. */
template <int CTAS>
static __device__ __forceinline__ void skip_tile(const Tile &w, const SharedLayout &at,
                                                 Stage &s, int thread)
{
    for (int k = 0; k < w.steps; k++) {
        if (uniform_in_warp(thread < 32)) {
            barrier_wait(at.full + 8 * s.index, s.parity);
            release_stage<CTAS>(at, s.index, thread);
        }
        s.next_stage();
    }
}

/* Computes this warpgroup's 64 rows of a tile from 16-bit elements. Issues the wgmma of each
 * stage before it waits for the wgmma of the previous stage, so that the tensor cores stay
 * busy. */
template <class T, int PASS, int CTAS>
static __device__ __forceinline__ void multiply_tile(float (&d)[128], const Tile &w,
                                                     const SharedLayout &at, Stage &s,
                                                     int warpgroup, int thread)
{
    constexpr int TRANSPOSE_A = PASS == EPIC_GEMM_WEIGHT, TRANSPOSE_B = PASS != EPIC_GEMM_INPUT;
    /* distance between two blocks of 16 elements along the summed dimension, in units of 16
     * bytes */
    constexpr int STEP_A = TRANSPOSE_A ? 128 : 2, STEP_B = TRANSPOSE_B ? 128 : 2;
    if (PASS == EPIC_GEMM_WEIGHT && w.tokens % BK != 0) {
        barrier_wait(at.full + 8 * s.index, s.parity);
        zero_lines(at.stages + s.index * STAGE_BYTES, w.tokens % BK, warpgroup, thread);
    }
    if (w.steps == 0) {
#pragma unroll
        for (int i = 0; i < 128; i++) d[i] = 0;
    }
    for (int k = 0; k < w.steps; k++) {
        const uint32_t stage = at.stages + s.index * STAGE_BYTES;
        barrier_wait(at.full + 8 * s.index, s.parity);
        const uint64_t a =
            describe_factor(stage + warpgroup * GROUP_BYTES, TRANSPOSE_A ? 512 : 1, 64);
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
        s.next_stage();
    }
    /* Every path through this function must wait here. Otherwise ptxas would serialize the
     * wgmma (warning C7518). */
    wait_wgmma<0>();
    if (w.steps > 0) release_stage<CTAS>(at, s.previous_index(), thread);
}

/* The positions of a thread's results in the 64 rows of its warpgroup. wgmma defines these
 * positions. The result d[4 * j + i] is in row `row` if i < 2, otherwise in row `row` + 8. Its
 * column is 8 * j + column + i % 2. */
struct Lane {
    int row, column;

    __device__ __forceinline__ explicit Lane(int thread)
    {
        row = thread / 32 * 16 + thread % 32 / 4;
        column = thread % 4 * 2;
    }
};

/* Returns elements i and i + 1 of the array p as float32. The type of the elements is the type
 * of the last argument. */
static __device__ __forceinline__ float2 pair_at(const void *p, int64_t i, __nv_bfloat16)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)((const __nv_bfloat16 *)p + i));
}

static __device__ __forceinline__ float2 pair_at(const void *p, int64_t i, __half)
{
    return __half22float2(*(const __half2 *)((const __half *)p + i));
}

/* Rounds x and y to the 16-bit type of the last argument, and packs both values into one word:
 * x in the low half, y in the high half. */
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

/* Adds the expert's bias to each row. If job.bias_weights is set, first multiplies the bias by
 * the row's weight. */
template <class T>
static __device__ __forceinline__ void add_bias(float (&d)[128], const Job &job, const Tile &w,
                                                int warpgroup, const Lane &lane)
{
    const int row = warpgroup * 64 + lane.row;
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

/* Adds rows of `from` to the results before the results are rounded. Each thread has results in
 * the rows `row` and row + 8, and adds to a row only if its index is below num_rows. Not used
 * for float32 results, which add_box() adds in memory. */
template <class Out>
static __device__ __forceinline__ void add_rows(float (&d)[128], const void *from,
                                                const Job &job, const Tile &w, int64_t row,
                                                int64_t num_rows, const Lane &lane)
{
    const int64_t at = row * job.columns;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        const int column = w.column + 8 * j + lane.column;
        if (column >= job.columns) continue;
        float2 before = {0, 0}, below = {0, 0};
        if (num_rows > 0) before = pair_at(from, at + column, Out());
        if (num_rows > 8) below = pair_at(from, at + 8 * job.columns + column, Out());
        d[4 * j] += before.x;
        d[4 * j + 1] += before.y;
        d[4 * j + 2] += below.x;
        d[4 * j + 3] += below.y;
    }
}

/* Adds job.addend (if it is set) and the old values of out (if job.accumulate is set) to the
 * results, before the results are rounded. In WEIGHT, the callers check job.accumulate. */
template <class Out, int PASS>
static __device__ __forceinline__ void
add_existing(float (&d)[128], const Job &job, const Tile &w, int warpgroup, const Lane &lane)
{
    const int64_t line = warpgroup * 64 + lane.row;
    if (PASS == EPIC_GEMM_WEIGHT) {
        const int64_t row = w.expert * job.lines + w.row + line;
        add_rows<Out>(d, job.out, job, w, row, job.lines - w.row - line, lane);
        return;
    }
    if (job.addend) add_rows<Out>(d, job.addend, job, w, w.row + line, w.tokens - line, lane);
    if (job.accumulate) add_rows<Out>(d, job.out, job, w, w.row + line, w.tokens - line, lane);
}

/* Zeroes the results in rows without a token. `tokens`: the first `tokens` rows of this
 * warpgroup hold a token, the others do not. */
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

/* Writes box q of this warpgroup's results to shared memory for a TMA copy. Box 0 is the
 * leftmost box. A box has 64 rows of 64 columns (with float32: 32 columns). With the 128-byte
 * swizzle of TMA copies, 16-byte vector v of line r is at position v ^ r % 8. */
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
        /* The swizzle is equal for both lines, because high % 8 == lane.row % 8. */
        const int vector = (2 * j + lane.column / 4) ^ lane.row % 8;
        const uint32_t at = box + vector * 16 + lane.column % 4 * 4;
        write_shared(at + lane.row * 128, x[0], x[1]);
        write_shared(at + high * 128, x[2], x[3]);
    }
}

/* Copies the first `rows` lines of a box to out by ordinary stores. Used at the end of a slab,
 * because a TMA copy of a whole box would overwrite the first rows of the next slab.
 * `line_bytes`: size in bytes of a row of out. `vectors`: number of 16-byte vectors of a line
 * that are inside out. */
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

/* Returns the first row of a tile in the tensor map of out. */
template <int PASS> static __device__ __forceinline__ int out_row(const Job &job, const Tile &w)
{
    return PASS == PASS_SLICES ? w.expert * (int)job.lines + w.row : w.row;
}

/* Rounds the results of a tile to type Out and stores them, one box of 64 rows after the other.
 * If the tile ends inside the box, stores only `rows` rows: as smaller boxes of FEW_LINES rows
 * or, if `rows` is not a multiple of FEW_LINES, by store_lines(). While a TMA copy reads one
 * box from shared memory, the warpgroup writes the next box to a second buffer. */
template <class Out, int PASS>
static __device__ __forceinline__ void store_tile(const float (&d)[128], const Maps &maps,
                                                  const Job &job, const Tile &w, uint32_t boxes,
                                                  int warpgroup, int thread)
{
    /* WIDE: number of columns of a box. COUNT: number of boxes next to each other in the
     * tile. */
    constexpr int WIDE = 128 / sizeof(Out), COUNT = BN / WIDE;
    /* number of rows to store, from this warpgroup's first row on */
    const int rows = w.rows - warpgroup * 64;
#pragma unroll
    for (int q = 0; q < COUNT; q++) {
        const uint32_t box = boxes + q % 2 * GROUP_BYTES;
        const int column = w.column + q * WIDE;
        if (thread == 0) wait_boxes_read<1>();
        named_barrier_sync(BARRIER_OWN + warpgroup, 128);
        write_box(box, d, q, thread, Out());
        fence_async_proxy();
        named_barrier_sync(BARRIER_OWN + warpgroup, 128);
        if (PASS == EPIC_GEMM_WEIGHT || rows >= 64) {
            const int z = PASS == EPIC_GEMM_WEIGHT ? w.expert : 0;
            if (thread == 0 && w.store && sizeof(Out) == 4 && job.accumulate)
                add_box(&maps.out, box, column, out_row<PASS>(job, w) + warpgroup * 64, z);
            else if (thread == 0 && w.store)
                store_box(&maps.out, box, column, out_row<PASS>(job, w) + warpgroup * 64, z);
        } else if (w.store && rows > 0 && rows % FEW_LINES == 0) {
            const int row = out_row<PASS>(job, w) + warpgroup * 64;
            for (int line = 0; thread == 0 && line < rows; line += FEW_LINES)
                store_box(&maps.out_few, box + line * 128, column, row + line, 0);
        } else if (w.store && rows > 0 && column < job.columns) {
            const int64_t at =
                (int64_t)(out_row<PASS>(job, w) + warpgroup * 64) * job.columns + column;
            store_lines((uint8_t *)job.out + at * (int)sizeof(Out),
                        job.columns * (int)sizeof(Out), box, rows,
                        (int)(job.columns - column) / (16 / (int)sizeof(Out)), thread);
        }
        if (thread == 0) commit_boxes();
    }
}

/* ------------------------------------------------------------------------- scaled e4m3 ---- */

/* The scales that a thread needs for an e4m3 tile. The thread has results in two rows: `first`,
 * and `second`, which is 8 rows below. Index 0 of the arrays is for the left 128 columns of the
 * tile, and index 1 is for the right 128 columns. Each block of 128 elements along the summed
 * dimension has its own scales. Four lanes have results in the same rows, and share the loads
 * of the scales: lane i of these four lanes loads the scales of blocks i, i + 4, i + 8 and so
 * on. It loads the scales of a block four blocks before this block is used. */
struct Scales {
    /* first, second: scales of the two rows of matrix a (NULL: the row has no token). b: scales
     * of matrix b for the left 128 columns. */
    const float *first, *second, *b;
    /* steps: number of blocks along the summed dimension. right: the scales of the right 128
     * columns are at b + right. */
    int steps, right;
    float next_first, next_second, next_b[2];
    /* products of the scales of a and b for the four blocks in use */
    float now_first[2], now_second[2];

    __device__ __forceinline__ Scales(const Job &job, const Tile &w, const Lane &lane,
                                      int warpgroup)
    {
        const int row = warpgroup * 64 + lane.row;
        const int block = w.column / 128, blocks = (int)((job.columns + 127) / 128);
        const float *const rows = job.a_scales + (int64_t)(w.row + row) * job.steps;
        steps = job.steps;
        first = row < w.tokens ? rows : NULL;
        second = row + 8 < w.tokens ? rows + (int64_t)8 * steps : NULL;
        b = job.b_scales + ((int64_t)w.expert * blocks + block) * steps;
        right = block + 1 < blocks ? steps : 0;
        fetch_blocks(lane.column / 2);
    }
    /* Starts to load the scales of block `step`. If there is no such block, they become 0. */
    __device__ __forceinline__ void fetch_blocks(int step)
    {
        next_first = next_second = next_b[0] = next_b[1] = 0;
        if (step >= steps) return;
        if (first) next_first = __ldg(first + step);
        if (second) next_second = __ldg(second + step);
        next_b[0] = __ldg(b + step);
        next_b[1] = __ldg(b + right + step);
    }
    /* Called once per four blocks. Each of the four lanes has loaded the scales of one of the
     * next four blocks. The lane multiplies the scales of matrix a by the scales of matrix b.
     * Then it starts to load the scales of block `step`, which are used four blocks later. */
    __device__ __forceinline__ void use_next_blocks(int step)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            now_first[h] = next_first * next_b[h];
            now_second[h] = next_second * next_b[h];
        }
        fetch_blocks(step);
    }
};

/* Computes this warpgroup's 64 rows of a tile from e4m3 elements. The tensor cores keep fewer
 * bits of a sum than float32 has, so they add only the 128 products of one block. Then each
 * thread multiplies its sums by the scale of the block and adds them to d. The multiplication
 * by the scale takes a quarter as many clock cycles as the wgmma. It overlaps with the copies
 * of the producer, but not with the wgmma of this warpgroup. */
template <int CTAS>
static __device__ __forceinline__ void multiply_tile_e4m3(float (&d)[128], const Job &job,
                                                          const Tile &w, const SharedLayout &at,
                                                          Stage &s, int warpgroup, int thread)
{
    const Lane lane(thread);
    const uint64_t a = describe_factor(at.stages + warpgroup * GROUP_BYTES, 1, 64);
    const uint64_t b = describe_factor(at.stages + A_BYTES, 1, 64);
    Scales scales(job, w, lane, warpgroup);
    float sum[64];
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    barrier_wait(at.full + 8 * s.index, s.parity);
    for (int k = 0; k < w.steps; k++) {
        if (k % 4 == 0) scales.use_next_blocks(k + 4 + lane.column / 2);
        const uint32_t place = s.index * (STAGE_BYTES / 16);
        const int stage = s.index;
        s.next_stage();
        /* h: 0 for the left 128 columns of the tile, 1 for the right */
#pragma unroll
        for (int h = 0; h < 2; h++) {
            fence_wgmma();
#pragma unroll
            for (int i = 0; i < 4; i++)
                issue_wgmma(sum, a + place + i * 2, b + place + h * (B_BYTES / 32) + i * 2,
                            i != 0);
            commit_wgmma();
            float scale[2] = {__shfl_sync(0xffffffffu, scales.now_first[h], k % 4, 4),
                              __shfl_sync(0xffffffffu, scales.now_second[h], k % 4, 4)};
            /* keeps the shuffles before the wait, so that the shuffles run while the wgmma
             * runs */
            keep_in_registers(scale);
            if (h == 1 && k + 1 < w.steps) barrier_wait(at.full + 8 * s.index, s.parity);
            wait_wgmma<0>();
            keep_in_registers(sum);
            if (h == 1) release_stage<CTAS>(at, stage, thread);
#pragma unroll
            for (int i = 0; i < 64; i++) d[64 * h + i] += scale[i % 4 / 2] * sum[i];
        }
    }
}

/* Computes and stores 64 rows of each tile that the CTA processes. Warpgroup 0 has the first 64
 * rows of a tile, warpgroup 1 the last 64 rows. */
template <class T, class Out, int PASS, int CTAS>
static __device__ __forceinline__ void
run_consumer(const Maps &maps, const Job &job, const SharedLayout &at, int warpgroup, int rank)
{
    const int num_tiles = PASS == EPIC_GEMM_WEIGHT ? 0 : *job.num_tiles;
    const int grid = gridDim.x / CTAS, thread = threadIdx.x % 128;
    const uint32_t boxes = at.stores + warpgroup * STORE_BYTES;
    const Lane lane(thread);
    Stage s = {0, 0};
    Tile w;
    float d[128];
    for (int t = blockIdx.x / CTAS; find_tile<PASS, CTAS>(w, job, num_tiles, t, rank);
         t += grid) {
        if (PASS != EPIC_GEMM_WEIGHT && uniform_in_warp(warpgroup * 64 >= w.tokens))
            skip_tile<CTAS>(w, at, s, thread);
        else if constexpr (sizeof(T) == 1)
            multiply_tile_e4m3<CTAS>(d, job, w, at, s, warpgroup, thread);
        else
            multiply_tile<T, PASS, CTAS>(d, w, at, s, warpgroup, thread);
        if constexpr ((PASS == EPIC_GEMM_FORWARD || sizeof(T) == 1) && sizeof(Out) == 2)
            if (job.bias) add_bias<Out>(d, job, w, warpgroup, lane);
        if constexpr (PASS == EPIC_GEMM_WEIGHT && sizeof(Out) == 2)
            if (job.accumulate && w.store) add_existing<Out, PASS>(d, job, w, warpgroup, lane);
        if constexpr (PASS == EPIC_GEMM_INPUT && sizeof(T) == 2 && CTAS == 1)
            if (w.store) add_existing<Out, PASS>(d, job, w, warpgroup, lane);
        if (PASS != EPIC_GEMM_WEIGHT && w.tokens < BM)
            zero_padding(d, w.tokens - warpgroup * 64, lane);
        store_tile<Out, PASS>(d, maps, job, w, boxes, warpgroup, thread);
    }
    if (thread == 0) wait_boxes();
}

/* ------------------------------------------------------------------------------ kernel ---- */

/* The kernel of all products. T: type of matrices a and b. Out: type of the result. PASS: an
 * epic_gemm_pass, or PASS_SLICES. CTAS: number of CTAs in a cluster. The body is compiled only
 * for sm_90a. */
template <class T, class Out, int PASS, int CTAS>
static __global__ void __launch_bounds__(THREADS, 1)
    hopper_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Job job)
{
    wait_for_previous_kernel();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t memory[];
    /* This array is in static shared memory. Because its size is not 0, load_hopper() detects
     * that the body was compiled. */
    __shared__ uint64_t barriers[2 * STAGES];
    const int group = threadIdx.x / 128, rank = CTAS == 2 ? cluster_rank() : 0;
    SharedLayout at;
    at.stages = ((uint32_t)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    at.stores = at.stages + STAGES * STAGE_BYTES;
    at.full = (uint32_t)__cvta_generic_to_shared(barriers);
    at.empty = at.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(at.full + 8 * i, 1);
            /* both consumer warpgroups of each CTA of the cluster arrive in each phase */
            barrier_init(at.empty + 8 * i, 2 * CTAS);
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
        /* The shuffle shows ptxas that `warpgroup` is equal in all lanes, so that the wgmma
         * descriptors stay in uniform registers. This makes e4m3 products faster. */
        const int warpgroup = __shfl_sync(0xffffffffu, group - 1, 0);
        run_consumer<T, Out, PASS, CTAS>(maps, job, at, warpgroup, rank);
    }
    __syncwarp();
    /* The other CTA may still copy into this CTA's shared memory, so this CTA must not exit
     * yet. */
    if (CTAS == 2) cluster_sync();
#endif
}

#endif
