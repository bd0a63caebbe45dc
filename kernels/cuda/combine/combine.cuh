/* SPDX-License-Identifier: Apache-2.0 */
/* Code that both paths of combine (stream.cuh and plain.cuh) use: the type of partial sums, and
 * the arguments of a unit (one piece of one token's row, see combine.cu). */
#ifndef EPIC_COMBINE_CUH
#define EPIC_COMBINE_CUH

#include "cuda/combine/slots.cuh"
#include "cuda/net/relay.cuh"

/* Partial sums of rows whose elements have type ROW. They are sent and added as type PART,
 * which is ROW, or F32 for more precision. VECTORS vectors of PART hold as many elements as one
 * vector of ROW. */
template <class ROW, class PART> struct PartialSum {
    static constexpr int VECTORS = ROW::N / PART::N;

    /* Converts VECTORS vectors of PART to floats. */
    static __device__ __forceinline__ void unpack_floats(const uint4 *q, float *x)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) PART::unpack_floats(q[i], x + i * PART::N);
    }
    /* Rounds floats to PART and packs them into VECTORS vectors. */
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

struct CombineState { /* Arguments of every unit of the running round. */
    const p2p_combine_job &job;
    const OpState &op;
    const PlanView &plan;
    const Stride &expert, &source; /* how expert and source units are dealt to warps */
    uint4 *stack; /* this warp's stack of nodes (LeafStack), in shared memory */
    RowShape shape;
    uint64_t policy;
    int32_t first; /* first token of the running round */
    int32_t top_k;
#ifdef EPIC_HOSTS
    bool adds_by_host; /* one rank of each host adds the partial sums of its host (relay.cuh) */
#endif
};

/* Returns in lane n the slot of the n-th of a token's choices that go to this rank, or -1.
 * `rank`: rank that owns the token. `half`: 0 for the first 32 of these choices; 1 for the next
 * 32, and n then starts at 32. */
__device__ __forceinline__ int32_t read_slot(const CombineState &c, int rank, int32_t token,
                                             int half)
{
    const int n = half * WARP + lane_id();
    int32_t slot = -1;
    if (token < c.plan.header.tokens_of[rank] && n < c.top_k)
        slot = __ldg(c.plan.records + record_index(c.job.self, rank, token, c.top_k) + n);
    return slot;
}

/* Returns in lane k the rank to which choice k of this rank's token goes, or -1. `half`: 0 for
 * choices 0 to 31; 1 for choices 32 to 63, and k then starts at 32. */
__device__ __forceinline__ int32_t rank_of_choice(const CombineState &c, int32_t token,
                                                  int half)
{
    const int k = half * WARP + lane_id();
    int32_t rank = -1;
    if (token < c.job.num_tokens && k < c.top_k)
        rank = __ldg(c.plan.rank_of + (int64_t)token * c.top_k + k);
    return rank;
}

/* Returns the peer that owns the token of an expert unit. Role 0 is the next higher rank, role
 * 1 the rank after it, and so on. If adds_by_host is set, the mates of this rank
 * (net/relay.cuh) have the last roles. */
__device__ __forceinline__ int peer_of_role(const CombineState &c, int role)
{
#ifdef EPIC_HOSTS
    const int local = c.job.self.local, ranks = c.job.self.num_ranks;
    const int others =
        c.adds_by_host ? ranks - ranks / local : ranks; /* number of ranks that are not mates */
    if (role >= others)
        role = (role - others + 1) * local - 1;
    else if (c.adds_by_host)
        role += role / (local - 1);
#endif
    return wrap_rank(c.job.self.rank + 1 + role, c.job.self.num_ranks);
}

/* Sets sums to -0, because -0 + x is exactly x, also for x = -0. */
template <int V, int N> __device__ __forceinline__ void clear_sums(float (&acc)[V][N])
{
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < N; i++) acc[v][i] = -0.0f;
}

#endif
