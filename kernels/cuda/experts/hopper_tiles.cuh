/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles and producer of the matrix products on Hopper's tensor cores.
 * experts/grouped_hopper.cuh has the consumers, and describes the whole kernel.
 *
 * The producer thread copies parts of matrices a and b to a ring of STAGES *stages* in shared
 * memory. A stage contains one part of each matrix. A *tile* is BM x BN elements of the result
 * `out`. A *slab* is the rows of one expert. PASS selects one of three GEMMs (epic_gemm_pass).
 * The *summed dimension* is K of a GEMM:
 *
 *   product   result                                       summed dimension
 *   FORWARD   output of the experts' matrix product        k
 *   INPUT     gradient of the input                        n
 *   WEIGHT    gradient of the weights; out[expert] [k, n]  slots of the expert's slab
 *
 * PASS_SLICES is FORWARD with one slab, in which each sum is cut into slices of equal length
 * (split-K). In the code, slices take the place of experts: job.num_experts is the number of
 * slices, and `out` is [slices, slots, n]. The last slice may extend past the end of k, where
 * TMA copies read zeros.
 *
 *   find_tile      rows, columns and expert of tile t
 *   Stage          position in the ring of stages, with the parity of its barriers
 *   run_producer   one thread per CTA: waits for barrier empty[s], then starts TMA copies of
 *                  128 x 64 elements of matrix a and 64 x 256 of matrix b into stage s. The
 *                  copies complete barrier full[s]. (e4m3: 128 x 128 and 128 x 256 elements.)
 *                  If a tile has few tokens, it can copy only the rows with a token. */
#ifndef EPIC_HOPPER_TILES_CUH
#define EPIC_HOPPER_TILES_CUH

#include "cuda/common/ptx.cuh"
#include "cuda/experts/grouped.h"
#include "cuda/experts/tensor.cuh"

#define BM EXPERTS_TILE_ROWS
#define BN 256
/* number of 16-bit elements along the summed dimension in a stage; with e4m3 it is 128 */
#define BK 64
#define STAGES 4
/* size in bytes of one box of a TMA copy: 64 lines of 128 bytes, with 128-byte swizzle */
#define GROUP_BYTES (64 * 128)
#define A_BYTES (2 * GROUP_BYTES)
#define B_BYTES (4 * GROUP_BYTES)
#define STAGE_BYTES (A_BYTES + B_BYTES)
/* number of rows of the smaller boxes for parts of tiles; the swizzle repeats after 8 rows */
#define FEW_LINES 16
/* Size in bytes of the memory for results of one consumer warpgroup: two boxes. */
#define STORE_BYTES (2 * GROUP_BYTES)
#define SHARED_BYTES (STAGES * STAGE_BYTES + 2 * STORE_BYTES + 1024)
#define THREADS 384
#define CONSUMERS 256

/* The next two values are ids of named barriers. Id 0 is not free, because __syncthreads() uses
 * it. */
/* barrier of consumer warpgroup 0; the barrier of warpgroup 1 has the next id */
#define BARRIER_OWN 1
/* barrier of both consumer warpgroups together */
#define BARRIER_BOTH 3

/* value of PASS for FORWARD with sums that are cut into slices (see the top of this file) */
#define PASS_SLICES 3
static_assert(PASS_SLICES > EPIC_GEMM_WEIGHT, "PASS_SLICES is another value than each pass");

/* An e4m3 element. As the template argument T, this type selects the code for matrices with
 * scales. */
struct E4m3 {
    uint8_t bits;
};

/* Tensor maps, which describe three matrices to the hardware of TMA copies. */
struct Maps {
    CUtensorMap a, b, out;
    /* maps of the matrices a and out for copies of boxes of FEW_LINES rows; not set in
     * WEIGHT */
    CUtensorMap a_few, out_few;
};

/* Arguments of the kernel. p2p_gemm and p2p_slabs (experts/grouped.h) explain the fields that
 * have no comment here. */
struct Job {
    slab_range *slabs;
    slab_tile *tiles;
    const int32_t *num_tiles;
    const void *bias;
    const float *bias_weights;
    /* e4m3: the scales of matrices a and b */
    const float *a_scales, *b_scales;
    void *out;
    const void *addend; /* only in INPUT: an array that is added to the result; NULL: none */
    int64_t columns;    /* number of columns of out */
    int64_t lines;      /* only in WEIGHT and PASS_SLICES: number of rows of out[expert] */
    int num_experts;    /* in PASS_SLICES: number of slices of each sum */
    int tiles_down;     /* only in WEIGHT: number of rows of tiles of out[expert] */
    /* number of tiles in one row of tiles of out */
    int tiles_across;
    /* not in WEIGHT: number of stages of a tile; each stage adds BK (e4m3: 128) products to
     * every sum */
    int steps;
    /* number of rows of tiles in a group; with clusters, number of pairs of rows of tiles in a
     * group (p2p_gemm.group) */
    int group;
    int accumulate;
    int leave_padding;
};

/* One tile of the result matrix `out`, from find_tile(). */
struct Tile {
    /* FORWARD, INPUT: first row in matrices a and out. WEIGHT: first row in out[expert].
     * PASS_SLICES: first row in matrix a and in out[slice]. */
    int row;
    /* column: first column in out. expert: local expert (PASS_SLICES: slice). steps: number of
     * stages. */
    int column, expert, steps;
    /* WEIGHT: first slot of the slab. PASS_SLICES: first term of the slice. Otherwise 0. */
    int first;
    /* number of rows of the tile (WEIGHT: of the slab) that hold a token */
    int tokens;
    /* FORWARD, INPUT: number of rows of the tile that are stored (rows_to_store()) */
    int rows;
    /* false: this CTA does not store the tile, for one of two reasons. Either the other CTA of
     * the cluster stores it, or the expert has no token and the results, all 0, would be added
     * to out (job.accumulate). */
    bool store;
    /* true: both CTAs of the cluster need the same part of matrix b, so each CTA copies half of
     * this part to both CTAs */
    bool share;
};

/* Returns the number of rows of a tile that are stored. Usually all rows are stored, including
 * the padding. With job.leave_padding, only the rows with a token are stored: their number,
 * rounded up to whole boxes of FEW_LINES rows, but at most tile.rows. */
static __device__ __forceinline__ int rows_to_store(const Job &job, const slab_tile &tile)
{
    const int whole_boxes = (tile.tokens + FEW_LINES - 1) / FEW_LINES * FEW_LINES;
    return job.leave_padding ? min(tile.rows, whole_boxes) : tile.rows;
}

/* Sets w to tile t. With clusters, t is the index of a pair of tiles, and w becomes the tile of
 * CTA `rank` of the cluster. `num_tiles`: number of rows of tiles; not used in WEIGHT. Returns
 * false if t is after the last tile.
 *
 * Tiles are ordered group by group (job.group), and column by column in a group, so that the
 * part of matrix b that is in use stays in the L2 cache. In WEIGHT, all tiles of one expert
 * come before the tiles of the next expert. In PASS_SLICES, all tiles of one slice come before
 * the tiles of the next slice. */
template <int PASS, int CTAS>
static __device__ __forceinline__ bool find_tile(Tile &w, const Job &job, int num_tiles, int t,
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
    if constexpr (PASS == PASS_SLICES) down = num_tiles * job.num_experts;
    const int pairs = (down + CTAS - 1) / CTAS;
    if (rest >= pairs * job.tiles_across) return false;
    const int turn = rest / (job.group * job.tiles_across);
    rest -= turn * job.group * job.tiles_across;
    const int in_turn = min(job.group, pairs - turn * job.group);
    const int pair = turn * job.group + rest % in_turn;
    w.column = rest / in_turn * BN;
    int line = pair * CTAS + rank;
    /* If the number of rows of tiles is odd, the last pair has only one tile to store. */
    w.store = line < down;
    if (!w.store) line = down - 1;
    w.share = CTAS == 2;
    if (PASS == EPIC_GEMM_WEIGHT) {
        const slab_range slab = job.slabs[w.expert];
        w.row = line * BM;
        w.first = slab.row;
        w.tokens = slab.tokens;
        w.rows = BM;
        w.steps = (slab.tokens + BK - 1) / BK;
        w.store = w.store && !(job.accumulate && w.steps == 0);
    } else if constexpr (PASS == PASS_SLICES) {
        const int slice = line / num_tiles;
        const slab_tile tile = job.tiles[line - slice * num_tiles];
        w.row = tile.row;
        w.expert = slice;
        w.first = slice * job.steps * BK;
        w.tokens = tile.tokens;
        w.rows = tile.rows;
        w.steps = job.steps;
        w.share = CTAS == 2 && min(pair * 2 + 1 - rank, down - 1) / num_tiles == slice;
    } else {
        const slab_tile tile = job.tiles[line];
        w.row = tile.row;
        w.expert = tile.expert;
        w.first = 0;
        w.tokens = tile.tokens;
        w.rows = rows_to_store(job, tile);
        w.steps = job.steps;
        if (CTAS == 2)
            w.share = job.tiles[min(pair * 2 + 1 - rank, down - 1)].expert == w.expert;
    }
    return true;
}

/* The position of a thread in the ring of stages. `index` is the stage. `parity` is an argument
 * for waits at the barriers of this stage: the parity (0 or 1) of the phase that must complete.
 * The parity changes each time the thread comes back to stage 0. */
struct Stage {
    int index, parity;

    __device__ __forceinline__ void next_stage()
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

/* Shared-memory addresses of the ring of stages, of the boxes for results, and of the stages'
 * barriers. */
struct SharedLayout {
    uint32_t stages, stores, full, empty;
};

/* ---------------------------------------------------------------------------- producer ---- */

/* Starts to copy the part of matrix a for one stage to shared memory. `step`: the part's first
 * index along the summed dimension. The barrier `full` counts the copied bytes. If FEW is true,
 * copies only rows with a token, in boxes of FEW_LINES rows. The other rows in shared memory
 * then keep old values. The old values do no harm, because they change only results of rows
 * without a token. */
template <int PASS, bool FEW>
static __device__ __forceinline__ void load_a(uint32_t to, const Maps &maps, uint32_t full,
                                              const Tile &w, int step)
{
    if constexpr (FEW) {
#pragma unroll 1
        for (int line = 0; line < w.tokens; line += FEW_LINES)
            load_box(to + line * 128, &maps.a_few, full, step, w.row + line);
    } else if constexpr (PASS == EPIC_GEMM_WEIGHT) {
        load_box(to, &maps.a, full, w.row, step);
        load_box(to + GROUP_BYTES, &maps.a, full, w.row + 64, step);
    } else {
        load_box(to, &maps.a, full, step, w.row);
    }
}

/* Starts to copy the part of matrix b for one stage. `step`: as in load_a(). If `share` is
 * true, CTA `rank` of the cluster copies only half of the part, but copies this half to both
 * CTAs. The barrier `full` counts the copied bytes. */
template <int PASS>
static __device__ __forceinline__ void load_b(uint32_t to, const Maps &maps, uint32_t full,
                                              const Tile &w, int step, bool share, int rank)
{
    constexpr int BOXES = PASS == EPIC_GEMM_INPUT ? 2 : 4;
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        const uint32_t at = to + i * (B_BYTES / BOXES);
        const int column = w.column + i * (BN / BOXES);
        const int x = PASS == EPIC_GEMM_INPUT ? step : column;
        const int y = PASS == EPIC_GEMM_INPUT ? column : step;
        const int z = PASS >= EPIC_GEMM_WEIGHT ? 0 : w.expert;
        if (!share)
            load_box(at, &maps.b, full, x, y, z);
        else if (i / (BOXES / 2) == rank)
            load_box_multicast(at, &maps.b, full, x, y, z);
    }
}

/* Copies the parts of matrices a and b that a tile needs into the ring. Waits before each stage
 * until the consumers have released it. FEW: as in load_a(). */
template <class T, int PASS, bool FEW>
static __device__ __forceinline__ void copy_tile(const Maps &maps, const SharedLayout &at,
                                                 const Tile &w, Stage &s, int rank)
{
    const int boxes = (w.tokens + FEW_LINES - 1) / FEW_LINES;
    const uint32_t bytes_of_a = FEW ? boxes * FEW_LINES * 128 : A_BYTES;
    for (int k = 0; k < w.steps; k++) {
        const int block = PASS != EPIC_GEMM_WEIGHT ? k : k == 0 ? w.steps - 1 : k - 1;
        const int step = w.first + block * (128 / (int)sizeof(T));
        const uint32_t a = at.stages + s.index * STAGE_BYTES, full = at.full + 8 * s.index;
        barrier_wait(at.empty + 8 * s.index, s.parity ^ 1);
        barrier_expect(full, bytes_of_a + B_BYTES);
        load_a<PASS, FEW>(a, maps, full, w, step);
        load_b<PASS>(a + A_BYTES, maps, full, w, step, w.share, rank);
        s.next_stage();
    }
}

/* Main loop of the producer thread. If most experts have only one row of tiles, the kernel
 * mostly waits for memory. In this case, if a tile is at most half full, the producer copies
 * only the rows with a token. */
template <class T, int PASS, int CTAS>
static __device__ __forceinline__ void run_producer(const Maps &maps, const Job &job,
                                                    const SharedLayout &at, int rank)
{
    constexpr bool ROWS = PASS == EPIC_GEMM_FORWARD || PASS == EPIC_GEMM_INPUT;
    const int num_tiles = PASS == EPIC_GEMM_WEIGHT ? 0 : *job.num_tiles;
    const int grid = gridDim.x / CTAS;
    Stage s = {0, 0};
    Tile w;
    for (int t = blockIdx.x / CTAS; find_tile<PASS, CTAS>(w, job, num_tiles, t, rank);
         t += grid) {
        if (ROWS && num_tiles < 2 * job.num_experts && w.tokens <= BM / 2)
            copy_tile<T, PASS, ROWS>(maps, at, w, s, rank);
        else
            copy_tile<T, PASS, false>(maps, at, w, s, rank);
    }
}

#endif
