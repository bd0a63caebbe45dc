/* SPDX-License-Identifier: Apache-2.0 */
/* Types that both paths of combine share: partial sums and the arguments of a unit. */
#ifndef EPIC_COMBINE_CUH
#define EPIC_COMBINE_CUH

#include "cuda/combine/slots.cuh"
#include "cuda/net/relay.cuh"

/* A vector of a partial sum of ROW rows that travels and is added as PART. */
template <class ROW, class PART> struct PartialSum {
    static constexpr int VECTORS = ROW::N / PART::N; /* vectors of PART per vector of ROW */

    /* The numbers of a partial vector as floats. */
    static __device__ __forceinline__ void unpack_floats(const uint4 *q, float *x)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) PART::unpack_floats(q[i], x + i * PART::N);
    }
    /* Rounds the floats to PART. */
    static __device__ __forceinline__ void pack_floats(uint4 *q, const float *x)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) q[i] = PART::pack_floats(x + i * PART::N);
    }
    /* a = a + b, rounded to PART. */
    static __device__ __forceinline__ void add_partials(uint4 *a, const uint4 *b)
    {
        float x[ROW::N], y[ROW::N];
        unpack_floats(a, x);
        unpack_floats(b, y);
#pragma unroll
        for (int i = 0; i < ROW::N; i++) x[i] += y[i];
        pack_floats(a, x);
    }
};

struct CombineState { /* arguments of every unit of the running round */
    const p2p_combine_job &job;
    const OpState &op;
    const PlanView &plan;
    const Stride &expert, &source; /* of the two kinds of units */
    uint4 *stack;                  /* of this warp, for leaves */
    RowShape shape;
    uint64_t policy;
    int32_t first; /* first token of the round */
    int32_t top_k;
#ifdef EPIC_HOSTS
    bool adds_by_host; /* one rank of each host adds the partials of the others */
#endif
};

/* Lane n: the n-th slot here of a token of `rank`, as the plan has it; -1: none. */
__device__ __forceinline__ int32_t read_slot(const CombineState &c, int rank, int32_t token,
                                             int half)
{
    const int n = half * WARP + lane_id();
    int32_t slot = -1;
    if (token < c.plan.header.tokens_of[rank] && n < c.top_k)
        slot = __ldg(c.plan.records + record_index(c.job.self, rank, token, c.top_k) + n);
    return slot;
}

/* Lane k: the rank of choice k of this rank's token; -1: none. */
__device__ __forceinline__ int32_t rank_of_choice(const CombineState &c, int32_t token,
                                                  int half)
{
    const int k = half * WARP + lane_id();
    int32_t rank = -1;
    if (token < c.job.num_tokens && k < c.top_k)
        rank = __ldg(c.plan.rank_of + (int64_t)token * c.top_k + k);
    return rank;
}

/* The peer of an expert unit with this role; with sums by host the mates come last. */
__device__ __forceinline__ int peer_of_role(const CombineState &c, int role)
{
#ifdef EPIC_HOSTS
    const int local = c.job.self.local, ranks = c.job.self.num_ranks;
    const int others =
        c.adds_by_host ? ranks - ranks / local : ranks; /* ranks that are not mates */
    if (role >= others)
        role = (role - others + 1) * local - 1;
    else if (c.adds_by_host)
        role += role / (local - 1);
#endif
    return wrap_rank(c.job.self.rank + 1 + role, c.job.self.num_ranks);
}

/* Sets sums to -0: adding the first product to -0 keeps it exactly. */
template <int V, int N> __device__ __forceinline__ void clear_sums(float (&acc)[V][N])
{
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < N; i++) acc[v][i] = -0.0f;
}

#endif
