/* SPDX-License-Identifier: Apache-2.0 */
/* Code that both paths of combine (stream.cuh and plain.cuh) use: the type of partial sums, and
 * the state of a running round. A partial sum is the sum of one rank's rows for one token. A
 * unit is the work of one warp at a time, on one piece of one token's row (combine.cu). */
#ifndef EPIC_COMBINE_CUH
#define EPIC_COMBINE_CUH

#include "cuda/combine/slots.cuh"
#include "cuda/net/relay.cuh"

/* Conversions and addition of partial sums. Rows have elements of type ROW. Partial sums are
 * sent and added as type PART, which is ROW, or F32 for more precision. One vector of ROW
 * becomes VECTORS vectors of PART, which hold the same number of elements. */
template <class ROW, class PART> struct PartialSum {
    static constexpr int VECTORS = ROW::N / PART::N;

    /* Converts VECTORS vectors of PART to ROW::N floats. */
    static __device__ __forceinline__ void unpack_floats(const uint4 *q, float *x)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) PART::unpack_floats(q[i], x + i * PART::N);
    }
    /* Rounds ROW::N floats to PART and packs them into VECTORS vectors. */
    static __device__ __forceinline__ void pack_floats(uint4 *q, const float *x)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) q[i] = PART::pack_floats(x + i * PART::N);
    }
    /* Adds the partial sum `b` to `a`, and rounds the result to PART. */
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

struct CombineState { /* What a warp needs to process its units of the running round. */
    const p2p_combine_job &job;
    const OpState &op;
    const PlanView &plan;
    /* how the lists of expert units and of source units (combine.cu) are divided among the
     * warps */
    const Stride &expert, &source;
    uint4 *stack; /* shared memory of this warp for a LeafStack (leaf_stack.cuh) */
    RowShape shape;
    uint64_t policy;
    int32_t round_begin; /* number of the first token of the running round */
    int32_t top_k;
    /* only in backend hosts (hosts.h): the result of adds_by_host() */
    __extension__ bool adds_by_host[HOSTS];
};

/* Returns true if one rank of each host adds the partial sums of its host before they are sent
 * to another host (combine/relay.cuh). */
__device__ __forceinline__ bool adds_by_host(const CombineState &c)
{
    return HOSTS && *c.adds_by_host;
}

/* Returns in lane n the slot, on this rank, of the n-th choice of a token of `rank`, or -1.
 * Only choices that go to this rank are counted. `half`: 0 for the first 32 of them, 1 for the
 * next 32. */
__device__ __forceinline__ int32_t read_slot(const CombineState &c, int rank, int32_t token,
                                             int half)
{
    const int n = half * WARP + lane_id();
    int32_t slot = -1;
    if (token < c.plan.header.tokens_of[rank] && n < c.top_k)
        slot = __ldg(c.plan.records + record_index(c.job.self, rank, token, c.top_k) + n);
    return slot;
}

/* Returns in lane k the rank to which choice k of this rank's token goes, or -1 if it goes to
 * no rank. `half`: 0 for choices 0 to 31, 1 for choices 32 to 63. */
__device__ __forceinline__ int32_t rank_of_choice(const CombineState &c, int32_t token,
                                                  int half)
{
    const int k = half * WARP + lane_id();
    int32_t rank = -1;
    if (token < c.job.num_tokens && k < c.top_k)
        rank = __ldg(c.plan.rank_of + (int64_t)token * c.top_k + k);
    return rank;
}

/* Returns the peer whose token an expert unit processes, from the unit's role. Role 0 is the
 * next higher rank, role 1 the rank after it, and so on (modulo num_ranks). If adds_by_host()
 * is true, the mates of this rank come last, because units for them wait for other ranks. A
 * mate is the rank of another host that has the same index within its host (net/relay.cuh). */
__device__ __forceinline__ int peer_of_role(const CombineState &c, int role)
{
    const int local = ranks_per_host(c.job.self), ranks = c.job.self.num_ranks;
    /* number of roles for peers that are not this rank's mates */
    const int others = adds_by_host(c) ? ranks - ranks / local : ranks;
    if (HOSTS && role >= others)
        role = (role - others + 1) * local - 1;
    else if (adds_by_host(c))
        role += role / (local - 1);
    return wrap_rank(c.job.self.rank + 1 + role, c.job.self.num_ranks);
}

/* Sets all sums to -0, the neutral element of addition: -0 + x is exactly x, also for x =
 * -0. */
template <int V, int N> __device__ __forceinline__ void clear_sums(float (&acc)[V][N])
{
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < N; i++) acc[v][i] = -0.0f;
}

#endif
