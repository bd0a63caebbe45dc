/* SPDX-License-Identifier: Apache-2.0 */
/* The second operation of dispatch_backward, which runs only if the plan is FLAT (each token
 * has at most one row per rank). It returns the gradients of the choices' weights ("floats") to
 * the tokens' ranks. The kernels of combine cannot do this, because in a FLAT plan each row has
 * top_k floats.
 *
 *   slot_floats    [num_rows, top_k] input: one for each choice that the row's token has on
 *                  this rank
 *   choice_floats  [num_tokens, top_k]  output: one per choice of this rank's tokens
 *
 * All warps of all CTAs do the same work. If there are W warps, warp w handles tokens w, w + W,
 * ..., in two steps:
 *
 *   1. send     for each token of a peer: sends the token's floats to the peer
 *   2. receive  for each token of this rank: receives its floats from the ranks of its choices
 *
 * Memory order: each float is its own flag, because its word is poison (the mark of a word that
 * has not arrived) until it arrives. A warp sends all its floats before it waits for the first
 * float, so ranks cannot wait for each other in a circle.
 *
 * In libraries for many ranks, the array of floats has space for the tokens of one round, so
 * the operation has rounds (combine/slots.cuh). */
#include "cuda/combine/combine.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/plan/flat.cuh"

#define BLOCK 512

struct FlatFloats {
    const p2p_combine_job &job;
    const OpState &op;
    const PlanView &plan;
    int32_t top_k;
    int32_t round_begin; /* the first token of the running round */

    /* Returns the float of the n-th choice that a token of `rank` has on this rank. If there is
     * no such choice, sets `has_float` to false and returns 0. */
    __device__ __forceinline__ uint32_t read_float(int rank, int32_t token, int n,
                                                   bool &has_float) const
    {
        const int64_t at = record_index(job.self, rank, token, top_k);
        has_float = n < top_k;
        int64_t row = has_float ? __ldg(plan.records + at) : -1;
        if (has_float && __ldg(local_experts_of(plan, job.self) + at + n) < 0) row = -1;
        has_float = row >= 0;
        /* If the caller's buffer has too few rows, read row 0. The error is reported later. */
        if (row >= job.num_rows) row = 0;
        return has_float ? __float_as_uint(job.slot_floats[row * top_k + n]) : 0;
    }
};

/* Sends the floats (gradients of weights) of `token`, a token of `rank`, to `rank`. `source`:
 * index of this rank among the sources of `rank` (floats_base()). Called by a whole warp. */
static __device__ void send_floats(const FlatFloats &f, int rank, int source, int32_t token)
{
    uint32_t *to = floats_base(f.job.self, f.op, f.job.self.heap[rank], source) +
                   (int64_t)TOKEN_INDEX(f, token) * float_stride(f.top_k);
    for (int n = lane_id(); n < f.top_k; n += WARP) {
        bool has_float;
        const uint32_t word = f.read_float(rank, token, n, has_float);
        if (has_float) store_relaxed(to + n, replace_poison(word, F32::NAN_WORD));
    }
    int count = 0;
    for (int n = lane_id(); HOSTS && n - lane_id() < f.top_k; n += WARP) {
        bool has_float;
        (void)f.read_float(rank, token, n, has_float);
        count += __popc(__ballot_sync(ALL_LANES, has_float));
    }
    post_put_floats(f.op, rank, to, count);
}

/* Receives the floats for up to 32 choices of `token`, a token of this rank, one choice per
 * lane, and stores them to choice_floats. `chunk`: 0 for the first 32 choices, 1 for the other
 * choices. `rank`: the rank to which this lane's choice goes. `rank_before`: if chunk is 1, the
 * rank to which this lane's choice of chunk 0 goes. Called by a whole warp. Returns false if
 * the group has failed. */
static __device__ bool receive_chunk(const FlatFloats &f, int32_t token, int chunk,
                                     int32_t rank, int32_t rank_before)
{
    const p2p_self &self = f.job.self;
    const int k = chunk * WARP + lane_id();
    int n = __popc(__match_any_sync(ALL_LANES, rank) & lanes_below());
    for (int q = 0; chunk && q < self.num_ranks; q++) {
        const int count = __popc(__ballot_sync(ALL_LANES, rank_before == q));
        if (rank == q) n += count;
    }
    uint32_t word = 0, *from = NULL;
    bool has_float;
    if (rank == self.rank) word = f.read_float(rank, token, n, has_float);
    if (rank >= 0 && rank != self.rank)
        from = floats_base(self, f.op, inbox_base(f.op, rank),
                           wrap_rank(rank + self.num_ranks - self.rank - 1, self.num_ranks)) +
               (int64_t)TOKEN_INDEX(f, token) * float_stride(f.top_k) + n;
    int missing = -1;
    const bool ok = wait_warp(f.op, missing, P2P_PHASE_FLOAT, [&] {
        if (from) word = load_relaxed(from);
        missing = from && word == POISON ? rank : -1;
        return __all_sync(ALL_LANES, missing < 0) != 0;
    });
    if (!ok) return false;
    if (from) *from = POISON;
    if (k < f.top_k) f.job.choice_floats[(int64_t)token * f.top_k + k] = __uint_as_float(word);
    return true;
}

/* Sends the floats of the peers' tokens [f.round_begin, end). Warp number `warp` of `warps` warps
 * does its share. */
static __device__ void send_all_floats(const FlatFloats &f, int32_t end, int warp, int warps)
{
    const p2p_self &self = f.job.self;
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        /* index of this rank among the peer's sources (dispatch/dispatch.cuh) */
        const int source = self.num_ranks - 1 - distance;
        for (int32_t t = f.round_begin + warp; t < min(f.plan.header.tokens_of[rank], end);
             t += warps)
            send_floats(f, rank, source, t);
    }
}

/* Like send_all_floats(), for many ranks, where most tokens of a peer have no row on this rank.
 * The lanes of a warp look for the rows of 32 tokens at a time. */
static __device__ void find_and_send_floats(const FlatFloats &f, int32_t end, int warp,
                                            int warps)
{
    const p2p_self &self = f.job.self;
    const int groups = (min(end, f.plan.most_tokens) - f.round_begin + WARP - 1) / WARP;
    for (int i = warp; i < (self.num_ranks - 1) * groups; i += warps) {
        const int distance = 1 + i / groups;
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        const int32_t first = f.round_begin + i % groups * WARP, token = first + lane_id();
        const bool exists = token < min(f.plan.header.tokens_of[rank], end);
        const bool has_row =
            exists && __ldg(f.plan.records + record_index(self, rank, token, f.top_k)) >= 0;
        for (uint32_t rows = __ballot_sync(ALL_LANES, has_row); rows; rows &= rows - 1)
            send_floats(f, rank, self.num_ranks - 1 - distance, first + __ffs(rows) - 1);
    }
}

/* Sends the floats of the peers' tokens, then receives the floats of this rank's tokens. Moves
 * the tokens [f.round_begin, end) of every rank. Called by all warps. Returns false if the
 * group has failed. */
static __device__ bool move_floats(const FlatFloats &f, int32_t end)
{
    const int warp = (int)(grid_thread() / WARP), warps = (int)(grid_threads() / WARP);
    if (MANY_RANKS)
        find_and_send_floats(f, end, warp, warps);
    else
        send_all_floats(f, end, warp, warps);
    for (int32_t t = f.round_begin + warp; t < min(f.job.num_tokens, end); t += warps) {
        int32_t rank_before = -1;
        for (int chunk = 0; chunk * WARP < f.top_k; chunk++) {
            const int k = chunk * WARP + lane_id();
            const int32_t rank =
                k < f.top_k ? __ldg(f.plan.rank_of + (int64_t)t * f.top_k + k) : -1;
            if (!receive_chunk(f, t, chunk, rank, rank_before)) return false;
            rank_before = rank;
        }
    }
    return true;
}

/* Moves the floats of all tokens. Called by all threads of all CTAs. Returns false if the group
 * has failed. */
static __device__ bool move_all_floats(FlatFloats &f, OpState &op)
{
    if (!MANY_RANKS) return move_floats(f, INT32_MAX);
    /* 16 bytes per token: with so few bytes, p2p_round_tokens() is what `floats` has space
     * for */
    return for_each_round(f, op, 16, [&](int32_t end) { return move_floats(f, end); });
}

/* Returns true if slot_floats of every rank has at least as many rows as the plan has slots on
 * that rank. Reads the numbers of rows that the ranks have announced. Reports no error, because
 * the first operation of dispatch_backward has already reported it. Called by the CTA that
 * finishes last. */
static __device__ bool rows_were_enough(const p2p_self &self, const OpState &op,
                                        const device_plan_header &h)
{
    bool enough = true;
    for (int q = 0; q < self.num_ranks; q++)
        enough &= h.slots_of[q] <=
                  (int32_t)(uint32_t)load_relaxed(announcement_words(op, word_base(op, q), q) +
                                                  P2P_ANNOUNCED_ROWS);
    return enough;
}

/* Moves the floats. If the plan is invalid, or slot_floats of a rank has too few rows, the
 * kernel zeroes the output. */
__global__ void __launch_bounds__(BLOCK, 1)
    floats_kernel(const __grid_constant__ p2p_combine_job job)
{
    wait_for_previous_kernel();
    __shared__ OpState op;
    __shared__ PlanView plan;
    /* reports = false, because the first operation of dispatch_backward has already reported a
     * bad plan */
    read_plan(plan, job.plan, job.plan_bytes, job.self, job.num_tokens, false);
    const device_plan_header &h = plan.header;
    if (!begin_operation(op, job.self, (uint32_t)h.id, job.num_tokens, 0, job.num_rows)) return;
    const bool moves = plan.is_valid && h.result == EPIC_OK;
    FlatFloats f = {job, op, plan, (int32_t)h.top_k, 0};
    const bool ok = !moves || move_all_floats(f, op);
    if (!finish_operation(op) || !ok || (moves && rows_were_enough(job.self, op, h))) return;
    zero_floats(job.choice_floats, 0, (int64_t)job.num_tokens * job.top_k, threadIdx.x, BLOCK);
}

extern "C" cudaError_t p2p_load_flat_floats(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, (const void *)floats_kernel);
}

extern "C" cudaError_t p2p_launch_flat_floats(const p2p_combine_job *job, int num_sms,
                                              cudaStream_t stream)
{
    return launch_kernel(floats_kernel, num_sms, BLOCK, 0, stream, *job);
}
