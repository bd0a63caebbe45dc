/* SPDX-License-Identifier: Apache-2.0 */
/* Adding four floats of every rank: what sum and sum_replicas share. */
#ifndef EPIC_SUM_CUH
#define EPIC_SUM_CUH

#include "cuda/net/staging.cuh"

#define FEW_RANKS 8   /* whose arrays fit a thread's registers side by side */
#define RANK_LEVELS 6 /* of a tree of all ranks, the root too */

/* Elements [i, i + 4) of an array; past its end zeros. */
__device__ __forceinline__ uint4 load_floats(const float *data, int64_t i, int64_t count)
{
    uint32_t w[4];
    if (i + 4 <= count && (uintptr_t)(data + i) % 16 == 0) return *(const uint4 *)(data + i);
#pragma unroll
    for (int e = 0; e < 4; e++) w[e] = i + e < count ? __float_as_uint(data[i + e]) : 0;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void store_floats(float *data, int64_t i, int64_t count,
                                             const float *x)
{
    if (i + 4 <= count && (uintptr_t)(data + i) % 16 == 0) {
        *(uint4 *)(data + i) = F32::pack(x);
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (i + e < count) data[i + e] = x[e];
}

__device__ __forceinline__ void add_left(const float (&left)[4], float (&x)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = left[e] + x[e];
}

__device__ __forceinline__ void copy_floats(const float (&from)[4], float (&to)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) to[e] = from[e];
}

/* A binary tree, whose leaves come one after the other: what waits for its right half. */
template <int LEVELS> struct Tree {
    float left[LEVELS][4];

    __device__ __forceinline__ void put(int leaf, float (&x)[4])
    {
        bool rises = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!rises) continue;
            rises = leaf >> level & 1;
            if (rises)
                add_left(left[level], x);
            else
                copy_floats(x, left[level]);
        }
    }
    /* The sum of so many leaves. */
    __device__ __forceinline__ void take(int leaves, float (&x)[4]) const
    {
        bool some = false;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!(leaves >> level & 1)) continue;
            if (some)
                add_left(left[level], x);
            else
                copy_floats(left[level], x);
            some = true;
        }
    }
};

struct Summing { /* four floats of each rank, of a thread that has some */
    const Now &now;
    const p2p_self &self;
    uint32_t order;
    int64_t at; /* the first one's place in staging */
    bool in;
    uint4 own;

    __device__ __forceinline__ uint4 *staged(int rank) const
    {
        return (uint4 *)(now.inbox[rank] + at * 4);
    }
    __device__ __forceinline__ void send() const
    {
        const uint4 q = other_nans(own, F32::NAN_WORD);
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int rank = wrap(self.rank + distance, self.num_ranks);
            store_relaxed((uint4 *)(now.outbox[rank] + at * 4), q);
        }
    }
};

/* hosts, one warp: all vectors that its lanes have sent, of so many. */
static __device__ void ship_vectors(const Now &now, int64_t vectors)
{
    const p2p_self &self = *now.self;
    for (int64_t v = grid_thread() - lane_id(); HOSTS && v < vectors; v += grid_threads())
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int rank = wrap(self.rank + distance, self.num_ranks);
            ship_together(now, rank, (const uint4 *)now.outbox[rank] + v,
                          (uint32_t)min((int64_t)WARP, vectors - v) * 16);
        }
}

/* The floats by rank, from wherever they are. */
__device__ __forceinline__ bool take_floats(const Summing &s, uint4 (&q)[FEW_RANKS])
{
    const p2p_self &self = s.self;
    int missing = -1;
    const bool ok = wait_until(s.now, missing, P2P_PHASE_ROW, [&] {
        missing = -1;
#pragma unroll
        for (int r = 0; r < FEW_RANKS; r++) {
            q[r] = make_uint4(0, 0, 0, 0);
            if (s.in && r < self.num_ranks)
                q[r] = r == self.rank ? s.own : load_relaxed(s.staged(r));
        }
#pragma unroll
        for (int r = 0; r < FEW_RANKS; r++)
            if (r != self.rank && has_poison(q[r])) missing = r;
        return __all_sync(ALL_LANES, missing < 0) != 0;
    });
    for (int r = 0; r < self.num_ranks && ok && s.in; r++)
        if (r != self.rank) store_here(s.staged(r), poisoned());
    return ok;
}

/* One rank's floats. */
__device__ __forceinline__ bool take_rank(const Summing &s, int rank, float (&x)[4])
{
    const bool own = rank == s.self.rank;
    uint4 q = own && s.in ? s.own : make_uint4(0, 0, 0, 0);
    const bool ok = own || wait_until(s.now, rank, P2P_PHASE_ROW, [&] {
                        if (s.in) q = load_relaxed(s.staged(rank));
                        return __any_sync(ALL_LANES, has_poison(q)) == 0;
                    });
    if (ok && s.in && !own) store_here(s.staged(rank), poisoned());
    F32::unpack(q, x);
    return ok;
}

/* The sum of many ranks, one after the other. */
static __device__ bool add_many(const Summing &s, float (&x)[4])
{
    const int ranks = s.self.num_ranks;
    const bool tree = s.order == EPIC_TREE;
    Tree<RANK_LEVELS> sums;
    float sum[4];
#pragma unroll 1
    for (int r = 0; r < ranks; r++) {
        if (!take_rank(s, r, x)) return false;
        if (tree) {
            sums.put(r, x);
            continue;
        }
        if (r) add_left(sum, x);
        copy_floats(x, sum);
    }
    if (tree) sums.take(ranks, x);
    return true;
}

static __device__ __forceinline__ bool add_few(const Summing &s, float (&sum)[4])
{
    uint4 q[FEW_RANKS];
    float x[FEW_RANKS][4];
    if (!take_floats(s, q)) return false;
#pragma unroll
    for (int r = 0; r < FEW_RANKS; r++) F32::unpack(q[r], x[r]);
    if (s.order == EPIC_TREE) {
#pragma unroll
        for (int d = 1; d < FEW_RANKS; d *= 2)
#pragma unroll
            for (int r = 0; r < FEW_RANKS; r += 2 * d)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (r + d < s.self.num_ranks) x[r][e] += x[r + d][e];
    } else {
#pragma unroll
        for (int r = 1; r < FEW_RANKS; r++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (r < s.self.num_ranks) x[0][e] += x[r][e];
    }
    copy_floats(x[0], sum);
    return true;
}

/* All lanes: waits for the ranks' floats and adds them.  false: the group is broken. */
template <bool MANY> __device__ __forceinline__ bool add_ranks(const Summing &s, float (&x)[4])
{
    return MANY ? add_many(s, x) : add_few(s, x);
}

#endif
