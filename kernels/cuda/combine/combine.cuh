/* SPDX-License-Identifier: Apache-2.0 */
/* Code that both variants of combine (stream.cuh and plain.cuh) use: the type of partial sums,
 * and the state of a round. A partial sum is the sum of one rank's rows for one token. A *unit*
 * is the work that a warp does at a time: one piece of one token's row. combine.cu explains the
 * two lists of units: "expert units" compute partial sums for peers' tokens, and "source units"
 * compute the results of this rank's tokens. */
#ifndef EPIC_COMBINE_CUH
#define EPIC_COMBINE_CUH

#include "cuda/combine/slots.cuh"
#include "cuda/net/relay.cuh"

/* Conversion and addition of partial sums. Rows have elements of type ROW. Partial sums are
 * sent and added in type PART, which is ROW, or F32 for more precision. VECTORS: number of
 * vectors of type PART that contain as many elements as one vector of type ROW. */
template <class ROW, class PART> struct PartialSum {
    static constexpr int VECTORS = ROW::N / PART::N;

    static __device__ __forceinline__ void unpack_floats(const uint4 *q, float *x)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) PART::unpack_floats(q[i], x + i * PART::N);
    }
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

/* Adds the node `b` of a sum tree to the node `a`, and rounds each sum to type ROW, like
 * PartialSum::add_partials(). With nvcc, the functions for Bf16 and F16 below use an
 * instruction that adds two 16-bit elements at once and rounds once. add_partials() rounds
 * twice: first to float32, then to ROW. The bits are equal, because double rounding does no
 * harm if the first type has at least 2 * p + 2 significant bits, where p is the number of
 * significant bits of ROW (8 or 11). This is at most 24, and float32 has 24 significant
 * bits. */
template <class ROW> __device__ __forceinline__ void add_nodes(uint4 &a, const uint4 &b)
{
    PartialSum<ROW, ROW>::add_partials(&a, &b);
}

#if defined(__NVCC__)
/* Adds each of the eight 16-bit elements of `b` to the element of `a` at the same position, and
 * rounds the sums. PAIR: the vector type that contains two elements. */
template <class PAIR> __device__ __forceinline__ void add_pairs(uint4 &a, const uint4 &b)
{
    uint32_t x[4] = {a.x, a.y, a.z, a.w};
    const uint32_t y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const PAIR sum = __hadd2_rn(*(const PAIR *)&x[i], *(const PAIR *)&y[i]);
        x[i] = *(const uint32_t *)&sum;
    }
    a = make_uint4(x[0], x[1], x[2], x[3]);
}

template <> __device__ __forceinline__ void add_nodes<Bf16>(uint4 &a, const uint4 &b)
{
    add_pairs<__nv_bfloat162>(a, b);
}

template <> __device__ __forceinline__ void add_nodes<F16>(uint4 &a, const uint4 &b)
{
    add_pairs<__half2>(a, b);
}
#endif

/* Everything that a warp needs to process its units in the running round. */
struct CombineState {
    const p2p_combine_job &job;
    const OpState &op;
    const PlanView &plan;
    /* How the two lists of units are divided among the warps. expert: units that send partial
     * sums for peers' tokens. source: units that add partial sums for this rank's tokens. */
    const Stride &expert, &source;
    uint4 *stack; /* shared memory of this warp, for sums in tree order (leaf_stack.cuh) */
    RowShape shape;
    uint64_t policy;     /* result of policy_once(), for rows that are read or written once */
    int32_t round_begin; /* the first token of the running round */
    int32_t top_k;
    /* only in backend `hosts`: the result of adds_by_host() */
    __extension__ bool adds_by_host[HOSTS];
};

/* Returns true if one rank of each host adds the partial sums of its host and sends only their
 * sum to the other hosts (combine/relay.cuh). */
__device__ __forceinline__ bool adds_by_host(const CombineState &c)
{
    return HOSTS && *c.adds_by_host;
}

/* Returns one of the slots that a token of `rank` has on this rank. Lane n gets the n-th slot
 * (with chunk 1: slot 32 + n), or -1 if the token has fewer slots. */
__device__ __forceinline__ int32_t read_slot(const CombineState &c, int rank, int32_t token,
                                             int chunk)
{
    const int n = chunk * WARP + lane_id();
    int32_t slot = -1;
    if (token < c.plan.header.tokens_of[rank] && n < c.top_k)
        slot = __ldg(c.plan.records + record_index(c.job.self, rank, token, c.top_k) + n);
    return slot;
}

/* Returns the rank to which a choice of `token`, a token of this rank, goes. Lane k gets the
 * rank for choice k (with chunk 1: for choice 32 + k). Lane k gets -1 if this choice does not
 * exist or goes to no rank. */
__device__ __forceinline__ int32_t rank_of_choice(const CombineState &c, int32_t token,
                                                  int chunk)
{
    const int k = chunk * WARP + lane_id();
    int32_t rank = -1;
    if (token < c.job.num_tokens && k < c.top_k)
        rank = __ldg(c.plan.rank_of + (int64_t)token * c.top_k + k);
    return rank;
}

/* Returns the peer to which an expert unit sends. `role` is the index of this peer: role 0 is
 * the next higher rank, role 1 is the rank after it, and so on, modulo num_ranks. Exception: if
 * adds_by_host() is true, the mates of this rank have the highest roles, because a unit that
 * sends to a mate waits for other ranks. A mate is the rank of another host that has the same
 * index in its host as this rank. */
__device__ __forceinline__ int peer_of_role(const CombineState &c, int role)
{
    const int local = ranks_per_host(c.job.self), ranks = c.job.self.num_ranks;
    /* number of peers that are not mates of this rank */
    const int others = adds_by_host(c) ? ranks - ranks / local : ranks;
    if (HOSTS && role >= others)
        role = (role - others + 1) * local - 1;
    else if (adds_by_host(c))
        role += role / (local - 1);
    return wrap_rank(c.job.self.rank + 1 + role, c.job.self.num_ranks);
}

/* Finds the expert units that have work, for a WorkWalk: those of tokens that have a slot on
 * this rank. If one rank of each host adds the partial sums of its host, more units have work:
 * the word *wants* must be sent for every token, and the rank that adds waits for it.
 * `end`: the round ends before this token. */
struct ExpertWork {
    const CombineState &c;
    int32_t end;

    static __device__ __forceinline__ int first_role(int group)
    {
        return group * WARP;
    }
    __device__ __forceinline__ uint32_t operator()(const UnitWalk &walk, int group) const
    {
        const p2p_self &self = c.job.self;
        const int32_t token = c.round_begin + walk.step;
        const int role = first_role(group) + lane_id();
        bool has_work = false;
        if (token >= end) return 1;
        if (role < self.num_ranks - 1) {
            const int rank = peer_of_role(c, role);
            const bool exists = token < c.plan.header.tokens_of[rank];
            const bool relays = adds_by_host(c) && is_remote(self, rank) &&
                                (walk.span == 0 || mate_of(self, rank, self.rank) == self.rank);
            has_work = exists &&
                       (relays ||
                        __ldg(c.plan.records + record_index(self, rank, token, c.top_k)) >= 0);
        }
        return __ballot_sync(ALL_LANES, has_work);
    }
};

/* Sets all sums to -0, the neutral element of addition: -0 + x is exactly x, even for -0. */
template <int V, int N> __device__ __forceinline__ void clear_sums(float (&acc)[V][N])
{
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < N; i++) acc[v][i] = -0.0f;
}

#endif
