/* SPDX-License-Identifier: Apache-2.0 */
/* Records in rounds, for libraries for many ranks. There, the arrays `records` and `flat_rows`
 * of a heap have space for the tokens of one round. If any rank has more tokens, the kernel of
 * the operation "plan" first makes the plan without sending records. Then each round sends and
 * receives the records of as many tokens of each rank as the arrays have space for:
 *
 *   planner CTAs   send the records of this rank's tokens [b, e), which they read in the plan's
 *                  arrays `fate` and `rank_of`
 *   all receivers  copy the records of the tokens [b, e) of all ranks into the plan, as without
 *                  rounds (plan.cu)
 *
 * next_round() before each round is also a barrier for the CTAs: after it, each planner CTA
 * sees what the others have stored in the plan. A kernel that makes a plan and dispatches has
 * no rounds, because it runs only if all tokens fit into one round. */
#ifndef EPIC_RECORD_ROUNDS_CUH
#define EPIC_RECORD_ROUNDS_CUH

#include "cuda/plan/store_records.cuh"

/* Sets the first token of a round of records. Called by all threads of the CTA. */
__device__ __forceinline__ void set_record_begin(OpState &op, int32_t begin)
{
    if (threadIdx.x == 0) *op.record_begin = begin;
    __syncthreads();
}

/* Decides by the announced numbers of tokens whether this operation has rounds of records, and
 * sets op.record_begin, which SENDS_RECORDS() reads. All ranks get the same result. If the
 * group has failed, the result does not matter. Called by all threads of all CTAs. */
static __device__ void choose_record_rounds(const p2p_self &self, OpState &op)
{
    const int64_t tokens = p2p_index_tokens(&self.at, self.max_tokens);
    RankNumbers announced = {};
    if (tokens >= self.max_tokens) return;
    (void)read_announcement(self, op, P2P_ANNOUNCED_TOKENS, announced);
    set_record_begin(op, largest_number(announced) > tokens ? -1 : 0);
}

/* Reads a choice from the plan. `choice`: its index, or -1. */
__device__ __forceinline__ PlacedChoice read_placed(const p2p_plan_job &job, int64_t choice,
                                                    const int32_t *fate, const int32_t *rank_of)
{
    if (choice < 0) return {-1, 0};
    return {rank_of[choice], (uint32_t)fate[choice]};
}

/* Sends the records of the tokens in this warp's lanes: `token` is this lane's token, valid
 * only if `in` is true. Reads them in the plan. Called by one warp of a planner CTA. */
template <int FEATURES>
static __device__ void send_planned(const Planner &p, const p2p_plan_job &job,
                                    const OpState &op, const TokenLanes &lanes, int32_t token,
                                    bool in)
{
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    const int32_t *fate = (const int32_t *)(job.plan + at.fate);
    const int32_t *rank_of = (const int32_t *)(job.plan + at.rank_of);
    PlacedChoice placed[2];
    FlatChoice flat[2];
    for (int h = 0; h < 2; h++) {
        const int k = lanes.k + h * WARP;
        const bool has_choice =
            in && lanes.has_choice && k < (int)job.layer.top_k && h < lanes.num_chunks;
        const int64_t choice = has_choice ? (int64_t)token * job.layer.top_k + k : -1;
        placed[h] = read_placed(job, choice, fate, rank_of);
        flat[h] = {choice, placed[h].rank, 0, (int32_t)placed[h].slot, 0};
        if (FEATURES & PLAN_FLAT && placed[h].rank >= 0)
            flat[h].local = p.local_expert[planned_id<FEATURES>(job, choice)];
    }
    if (FEATURES & PLAN_FLAT)
        send_row_words(op, job, lanes, token, in, false, flat);
    else
        send_records(op, job, lanes, token, in, placed);
}

/* Sends the records of this rank's tokens [*op.record_begin, end). Each planner CTA sends an
 * equal part of them. Then expands the lists of mates. Called by all threads of the planner
 * CTAs. Returns false if the group has failed. */
template <int FEATURES>
static __device__ bool send_round_records(Planner &p, const p2p_plan_job &job,
                                          const OpState &op, int32_t end)
{
    const TokenLanes lanes(job.layer.top_k);
    const int32_t first = *op.record_begin, last = min(end, job.num_tokens);
    const int32_t per_cta = (max(last - first, 0) + job.planners - 1) / job.planners;
    const int32_t begin = first + (int)blockIdx.x * per_cta, stop = min(begin + per_cta, last);
    const int warps = (int)(blockDim.x / WARP), warp = (int)(threadIdx.x / WARP);
    for (int32_t t = begin + warp * lanes.tokens_at_once; t < stop;
         t += warps * lanes.tokens_at_once)
        send_planned<FEATURES>(p, job, op, lanes, t + lanes.token, t + lanes.token < stop);
    if (HOSTS) post_put_tokens(job, op, (FEATURES & PLAN_FLAT) != 0, begin, stop - begin);
    return expand_lists<(FEATURES & PLAN_FLAT) != 0>(p, job, op);
}

/* Moves the records of all tokens. ok: false if this thread has found that the group has
 * failed. most_tokens: the largest number of tokens of a rank. receive(begin, end) receives the
 * records of the tokens [begin, end) of all ranks. It returns false if the group has failed.
 * Called by all threads of all CTAs. */
template <int FEATURES, class Receive>
__device__ __forceinline__ void move_record_rounds(Planner &p, const p2p_plan_job &job,
                                                   OpState &op, bool ok, int32_t most_tokens,
                                                   Receive receive)
{
    const int32_t tokens = (int32_t)p2p_index_tokens(&job.self.at, job.self.max_tokens);
    ok = __syncthreads_and(ok) != 0;
    for (int32_t begin = 0; ok && begin < most_tokens; begin += tokens) {
        if (!next_round(op)) return;
        set_record_begin(op, begin);
        if ((int)blockIdx.x < job.planners)
            ok = send_round_records<FEATURES>(p, job, op, begin + tokens);
        ok = __syncthreads_and(ok && receive(begin, begin + tokens)) != 0;
    }
}

#endif
