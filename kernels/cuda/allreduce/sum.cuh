/* SPDX-License-Identifier: Apache-2.0 */
/* Adding four floats of every rank, for sum.cu and replicas.cu. */
#ifndef EPIC_SUM_CUH
#define EPIC_SUM_CUH

#include "cuda/net/staging.cuh"

#define MAX_UNROLLED_RANKS 8 /* ranks whose floats fit the registers of a thread at once */
#define RANK_LEVELS 6        /* levels of a tree of all ranks, the root included */

/* Loads elements [i, i + 4) of an array; zeros past its end. */
__device__ __forceinline__ uint4 load_floats(const float *data, int64_t i, int64_t count)
{
    uint32_t w[4];
    if (i + 4 <= count && (uintptr_t)(data + i) % 16 == 0) return *(const uint4 *)(data + i);
#pragma unroll
    for (int e = 0; e < 4; e++) w[e] = i + e < count ? __float_as_uint(data[i + e]) : 0;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Stores elements [i, i + 4) of an array, up to its end. */
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

/* Adds `left`, the earlier sum, to x. */
__device__ __forceinline__ void add_to_left(const float (&left)[4], float (&x)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = left[e] + x[e];
}

/* Copies four floats. */
__device__ __forceinline__ void copy_floats(const float (&from)[4], float (&to)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) to[e] = from[e];
}

/* A binary tree whose leaves arrive in order: sums that wait for their right half. */
template <int LEVELS> struct Tree {
    float left[LEVELS][4];

    /* Adds the next leaf: merges it with its complete left siblings, level by level. x is
     * overwritten. */
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
    /* The sum of the first `leaves` leaves. */
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

struct RankSum { /* four floats of each rank; `in`: this thread has some */
    const OpState &op;
    const p2p_self &self;
    uint32_t order;
    int64_t at; /* index of the first float in staging */
    bool in;
    uint4 own;

    /* The vector that `rank` sends to this rank. */
    __device__ __forceinline__ uint4 *staged_vector(int rank) const
    {
        return (uint4 *)(op.inbox[rank] + at * 4);
    }
    /* Stores this thread's four floats to the staging of every peer. */
    __device__ __forceinline__ void send_floats() const
    {
        const uint4 q = replace_poisons(own, F32::NAN_WORD);
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int rank = wrap_rank(self.rank + distance, self.num_ranks);
            store_relaxed((uint4 *)(op.outbox[rank] + at * 4), q);
        }
    }
};

/* backend hosts: posts the puts of the vectors that the lanes of a warp have sent. */
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

/* Waits for the floats of all ranks. One warp. */
__device__ __forceinline__ bool receive_floats(const RankSum &s, uint4 (&q)[MAX_UNROLLED_RANKS])
{
    const p2p_self &self = s.self;
    int missing = -1;
    const bool ok = wait_warp(s.op, missing, P2P_PHASE_ROW, [&] {
        missing = -1;
#pragma unroll
        for (int r = 0; r < MAX_UNROLLED_RANKS; r++) {
            q[r] = make_uint4(0, 0, 0, 0);
            if (s.in && r < self.num_ranks)
                q[r] = r == self.rank ? s.own : load_relaxed(s.staged_vector(r));
        }
#pragma unroll
        for (int r = 0; r < MAX_UNROLLED_RANKS; r++)
            if (r != self.rank && has_poison(q[r])) missing = r;
        return __all_sync(ALL_LANES, missing < 0) != 0;
    });
    for (int r = 0; r < self.num_ranks && ok && s.in; r++)
        if (r != self.rank) store_in_place(s.staged_vector(r), poison_vector());
    return ok;
}

/* Waits for the floats of one rank. One warp. */
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

/* Adds up the ranks one after the other. */
static __device__ bool add_ranks_looped(const RankSum &s, float (&x)[4])
{
    const int ranks = s.self.num_ranks;
    const bool tree = s.order == EPIC_TREE;
    Tree<RANK_LEVELS> sums;
    float sum[4];
#pragma unroll 1
    for (int r = 0; r < ranks; r++) {
        if (!receive_rank(s, r, x)) return false;
        if (tree) {
            sums.push_leaf(r, x);
            continue;
        }
        if (r) add_to_left(sum, x);
        copy_floats(x, sum);
    }
    if (tree) sums.sum_leaves(ranks, x);
    return true;
}

/* Adds up at most MAX_UNROLLED_RANKS ranks in registers. */
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

/* Waits for the floats of all ranks and adds them. All lanes. false: the group is broken. */
template <bool MANY> __device__ __forceinline__ bool add_ranks(const RankSum &s, float (&x)[4])
{
    return MANY ? add_ranks_looped(s, x) : add_ranks_unrolled(s, x);
}

#endif
