/* SPDX-License-Identifier: Apache-2.0 */
/* Device functions with which each thread sends a vector (four floats) to all ranks, and adds
 * the vectors of all ranks, for sum.cu and replicas.cu. Vectors of peers arrive in staging
 * (net/staging.cuh), where words that have not arrived are poison (0xffffffff). */
#ifndef EPIC_SUM_CUH
#define EPIC_SUM_CUH

#include "cuda/net/staging.cuh"

/* in groups of at most this many ranks, a thread keeps the vectors of all ranks in registers */
#define MAX_UNROLLED_RANKS 8
/* number of levels of a binary tree over up to DEVICE_MAX_RANKS ranks, including the root */
#define RANK_LEVELS (MANY_RANKS ? 9 : 6)
static_assert(1 << (RANK_LEVELS - 1) == DEVICE_MAX_RANKS, "a tree over all ranks");

/* Loads elements [i, i + 4) of an array of `count` floats. Elements after the end of the array
 * are zeros. */
__device__ __forceinline__ uint4 load_floats(const float *data, int64_t i, int64_t count)
{
    uint32_t w[4];
    if (i + 4 <= count && (uintptr_t)(data + i) % 16 == 0) return *(const uint4 *)(data + i);
#pragma unroll
    for (int e = 0; e < 4; e++) w[e] = i + e < count ? __float_as_uint(data[i + e]) : 0;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Stores x to elements [i, i + 4) of an array of `count` floats. Does not store elements after
 * the end of the array. */
__device__ __forceinline__ void store_floats(float *data, int64_t i, int64_t count,
                                             const float *x)
{
    if (i + 4 <= count && (uintptr_t)(data + i) % 16 == 0) {
        *(uint4 *)(data + i) = F32::pack_floats(x);
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (i + e < count) data[i + e] = x[e];
}

/* Computes x = left + x. `left` is the sum of lower ranks or leaves, so it is the first operand
 * of each addition. */
__device__ __forceinline__ void add_to_left(const float (&left)[4], float (&x)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = left[e] + x[e];
}

__device__ __forceinline__ void copy_floats(const float (&from)[4], float (&to)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) to[e] = from[e];
}

/* Adds vectors in a fixed binary tree. The vectors are the leaves, which the caller passes in
 * ascending order. left[level] contains a sum of 2^level leaves that waits for its right
 * sibling. left[level] is in use if bit `level` of the number of leaves passed so far is 1. */
template <int LEVELS> struct Tree {
    float left[LEVELS][4];

    /* Adds a leaf to the tree. `leaf`: index of the leaf. x: on entry the value of the leaf;
     * the function overwrites it. While x is a right child, adds the left sibling left[level]
     * to x, so that x becomes the parent node. When x is a left child, stores x to left[level],
     * where it waits for its right sibling. */
    __device__ __forceinline__ void push_leaf(int leaf, float (&x)[4])
    {
        bool rises = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!rises) continue;
            rises = leaf >> level & 1;
            if (rises)
                add_to_left(left[level], x);
            else
                copy_floats(x, left[level]);
        }
    }
    /* Sets x to the sum of all leaves. `leaves`: number of leaves that were pushed. */
    __device__ __forceinline__ void sum_leaves(int leaves, float (&x)[4]) const
    {
        bool some = false;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!(leaves >> level & 1)) continue;
            if (some)
                add_to_left(left[level], x);
            else
                copy_floats(left[level], x);
            some = true;
        }
    }
};

/* The data with which one thread adds one vector over all ranks. */
struct RankSum {
    const OpState &op;
    const p2p_self &self;
    uint32_t order; /* EPIC_BY_RANK or EPIC_TREE */
    /* Staging has one part for each rank that sends. at: index, within each part, of the first
     * float of the vector. */
    int64_t at;
    /* false: this thread has no vector to add now, because its index is not below the number of
     * vectors */
    bool in;
    /* this rank's own vector */
    uint4 own;

    /* Returns the address in this rank's staging at which the vector of `rank` arrives. */
    __device__ __forceinline__ uint4 *staged_vector(int rank) const
    {
        return (uint4 *)(op.inbox[rank] + at * 4);
    }
    /* Stores this rank's vector to the staging of every peer. A NaN that equals poison is
     * replaced by another NaN, because the receiver would take poison for a word that has not
     * arrived. */
    __device__ __forceinline__ void send_floats() const
    {
        const uint4 q = replace_poisons(own, F32::NAN_WORD);
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int rank = wrap_rank(self.rank + distance, self.num_ranks);
            if (is_vacant(op, rank)) continue;
            store_relaxed((uint4 *)(op.outbox[rank] + at * 4), q);
        }
    }
};

/* Only in backend `hosts`: posts the puts that send the vectors of this warp to other hosts.
 * send_floats() has stored these vectors in the outbox. `vectors`: number of vectors of the
 * whole grid. Called by a whole warp after its last call of send_floats(). */
static __device__ void post_put_vectors(const OpState &op, int64_t vectors)
{
    const p2p_self &self = *op.self;
    for (int64_t v = grid_thread() - lane_id(); HOSTS && v < vectors; v += grid_threads())
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int rank = wrap_rank(self.rank + distance, self.num_ranks);
            post_put_warp(op, rank, (const uint4 *)op.outbox[rank] + v,
                          (uint32_t)min((int64_t)WARP, vectors - v) * 16);
        }
}

/* A vector of -0, the neutral element of the sum: -0 + x and x + -0 are exactly x. */
__device__ __forceinline__ uint4 neutral_vector()
{
    return make_uint4(F32::MINUS_ZERO, F32::MINUS_ZERO, F32::MINUS_ZERO, F32::MINUS_ZERO);
}

/* Waits until the vectors of all ranks have arrived for this thread, and reads the vector of
 * rank r into q[r]. If seat r is vacant (no process has this rank number), q[r] becomes
 * neutral_vector(). Then stores poison in place of the vectors in staging, for the next use.
 * Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool receive_floats(const RankSum &s, uint4 (&q)[MAX_UNROLLED_RANKS])
{
    const p2p_self &self = s.self;
    int missing = -1;
    const bool ok = wait_warp(s.op, missing, P2P_PHASE_ROW, [&] {
        missing = -1;
#pragma unroll
        for (int r = 0; r < MAX_UNROLLED_RANKS; r++) {
            q[r] = is_vacant(s.op, r) ? neutral_vector() : make_uint4(0, 0, 0, 0);
            if (s.in && is_member(self, s.op, r))
                q[r] = r == self.rank ? s.own : load_relaxed(s.staged_vector(r));
        }
#pragma unroll
        for (int r = 0; r < MAX_UNROLLED_RANKS; r++)
            if (r != self.rank && has_poison(q[r])) missing = r;
        return __all_sync(ALL_LANES, missing < 0) != 0;
    });
    for (int r = 0; r < self.num_ranks && ok && s.in; r++)
        if (r != self.rank && !is_vacant(s.op, r))
            store_in_place(s.staged_vector(r), poison_vector());
    return ok;
}

/* Like receive_floats(), but receives only the vector of one rank, and reads it into x. */
__device__ __forceinline__ bool receive_rank(const RankSum &s, int rank, float (&x)[4])
{
    const bool own = rank == s.self.rank;
    uint4 q = own && s.in ? s.own : make_uint4(0, 0, 0, 0);
    const bool ok = own || wait_warp(s.op, rank, P2P_PHASE_ROW, [&] {
                        if (s.in) q = load_relaxed(s.staged_vector(rank));
                        return __any_sync(ALL_LANES, has_poison(q)) == 0;
                    });
    if (ok && s.in && !own) store_in_place(s.staged_vector(rank), poison_vector());
    F32::unpack_floats(q, x);
    return ok;
}

/* Implements add_ranks() for any number of ranks: receives and adds the vector of one rank at a
 * time. Skips vacant seats (rank numbers without a process); they are no leaves of the tree
 * either. */
static __device__ bool add_ranks_looped(const RankSum &s, float (&x)[4])
{
    const int ranks = s.self.num_ranks;
    const bool tree = s.order == EPIC_TREE;
    int added = 0;
    Tree<RANK_LEVELS> sums;
    float sum[4];
#pragma unroll 1
    for (int r = 0; r < ranks; r++) {
        if (is_vacant(s.op, r)) continue;
        if (!receive_rank(s, r, x)) return false;
        const int position = added++;
        if (tree) {
            sums.push_leaf(position, x);
            continue;
        }
        if (position) add_to_left(sum, x);
        copy_floats(x, sum);
    }
    if (tree) sums.sum_leaves(added, x);
    return true;
}

/* Implements add_ranks() for at most MAX_UNROLLED_RANKS ranks: receives all vectors at once and
 * adds them in registers. */
static __device__ __forceinline__ bool add_ranks_unrolled(const RankSum &s, float (&sum)[4])
{
    uint4 q[MAX_UNROLLED_RANKS];
    float x[MAX_UNROLLED_RANKS][4];
    if (!receive_floats(s, q)) return false;
#pragma unroll
    for (int r = 0; r < MAX_UNROLLED_RANKS; r++) F32::unpack_floats(q[r], x[r]);
    if (s.order == EPIC_TREE) {
#pragma unroll
        for (int d = 1; d < MAX_UNROLLED_RANKS; d *= 2)
#pragma unroll
            for (int r = 0; r < MAX_UNROLLED_RANKS; r += 2 * d)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (r + d < s.self.num_ranks) x[r][e] += x[r + d][e];
    } else {
#pragma unroll
        for (int r = 1; r < MAX_UNROLLED_RANKS; r++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (r < s.self.num_ranks) x[0][e] += x[r][e];
    }
    copy_floats(x[0], sum);
    return true;
}

/* Waits for the vectors of all ranks, and sets x to their sum. s.order selects the order of the
 * additions: in ascending order of ranks, or in a binary tree. add_ranks_unrolled() cannot add
 * in a tree if seats are vacant. MANY: true if the group has more than MAX_UNROLLED_RANKS
 * ranks. Called by one warp. Returns false if the group has failed. */
template <bool MANY> __device__ __forceinline__ bool add_ranks(const RankSum &s, float (&x)[4])
{
    const bool loops = MANY || (s.order == EPIC_TREE && vacant_seats(s.op));
    return loops ? add_ranks_looped(s, x) : add_ranks_unrolled(s, x);
}

#endif
