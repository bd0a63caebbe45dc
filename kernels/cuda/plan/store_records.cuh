/* SPDX-License-Identifier: Apache-2.0 */
/* Copies the records that the ranks send about their tokens into the plan. */
#ifndef EPIC_STORE_RECORDS_CUH
#define EPIC_STORE_RECORDS_CUH

#include "cuda/plan/planner.cuh"

/* Copies the records of a group of tokens of one source; a lane copies one word of one token. One
 * warp calls it. Returns false if the group of ranks is broken. */
static __device__ bool store_records(const OpState &op, const p2p_plan_job &job,
                                     int32_t *records, int source, int32_t first_token,
                                     int32_t num_tokens)
{
    const int top_k = job.layer.top_k;
    const TokenLanes lanes(top_k);
    const int32_t token = first_token + lanes.token;
    const bool in = lanes.on && token < num_tokens;
    const uint64_t *words = record_address(job.self, op, source, in ? token : 0, top_k);
    bool over = false; /* the record has ended in an earlier half */
    for (int half = 0; half < lanes.halves; half++) {
        const int k = lanes.k + half * WARP;
        const bool reads = in && k < top_k && !over;
        uint64_t word = 0;
        uint32_t lasts = 0;
        const bool ok = wait_warp(op, source, P2P_PHASE_RECORD, [&] {
            word = reads ? load_relaxed(words + k) : 0;
            const bool come = reads && is_stamped(op, word);
            lasts =
                __ballot_sync(ALL_LANES, come && ((uint32_t)word & RECORD_LAST)) & lanes.mates;
            /* backend hosts: every word that was put must be waited for */
            const bool whole = lanes.halves == 1;
            if (HOSTS && !__all_sync(ALL_LANES, !whole || !reads || come)) return false;
            /* every lane up to the token's last word must have its word */
            const bool needed = reads && !(lasts & lanes_below());
            const bool open = !lasts && lanes.halves == 1; /* the last word has not arrived */
            return __all_sync(ALL_LANES, !needed || (come && !(reads && open))) != 0;
        });
        if (!ok) return false;
        const bool beyond = over || (lasts & lanes_below());
        const uint32_t value = (uint32_t)word & ~RECORD_LAST;
        const bool none = beyond || value == RECORD_ABSENT || value == RECORD_DISCARD;
        if (in && k < top_k)
            records[((int64_t)source * job.self.max_tokens + token) * top_k + k] =
                none ? -1 : (int32_t)value;
        over = over || lasts;
    }
    return true;
}

/* Calls keep(source, first token, tokens of the source) for the groups of tokens of warp `warp`
 * of `warps`. tokens_of: lane = rank. false: the group is broken. */
template <class Keep>
__device__ __forceinline__ bool for_each_group(const p2p_plan_job &job, int32_t tokens_of,
                                               int warp, int warps, Keep keep)
{
    const int per_group = job.layer.top_k <= WARP ? WARP / job.layer.top_k : 1;
    for (int q = 0; q < job.self.num_ranks; q++) {
        const int source = (job.self.rank + q) % job.self.num_ranks;
        const int32_t tokens = __shfl_sync(ALL_LANES, tokens_of, source);
        for (int32_t group = warp; (int64_t)group * per_group < tokens; group += warps)
            if (!keep(source, group * per_group, tokens)) return false;
    }
    return true;
}

#endif
