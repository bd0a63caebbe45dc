/* SPDX-License-Identifier: Apache-2.0 */
/* Copies the records that ranks send about their tokens into the plan. A record contains the
 * slots of a token on this rank or, with layout FLAT, the token's local experts on this rank.
 * Its words arrive in this rank's heap. A word is valid if its stamp is the running epoch, so
 * each word is its own flag, and no other memory order is needed. */
#ifndef EPIC_STORE_RECORDS_CUH
#define EPIC_STORE_RECORDS_CUH

#include "cuda/plan/planner.cuh"

/* Waits for the records that rank `source` sends about some of its tokens, and copies them to
 * the plan, one word per lane. Called by one warp, which handles the next 32 / top_k tokens
 * from first_token on (at least one). `num_tokens`: number of tokens of rank `source`.
 * `records`: the plan's array of records. Returns false if the group has failed. */
static __device__ bool store_records(const OpState &op, const p2p_plan_job &job,
                                     int32_t *records, int source, int32_t first_token,
                                     int32_t num_tokens)
{
    const int top_k = job.layer.top_k;
    const TokenLanes lanes(top_k);
    const int32_t token = first_token + lanes.token;
    const bool in = lanes.has_choice && token < num_tokens;
    const uint64_t *words = record_address(job.self, op, source, in ? token : 0, top_k);
    bool has_ended = false;
    for (int chunk = 0; chunk < lanes.num_chunks; chunk++) {
        const int k = lanes.k + chunk * WARP;
        const bool reads = in && k < top_k && !has_ended;
        uint64_t word = 0;
        uint32_t last_words = 0;
        const bool ok = wait_warp(op, record_sender(job.self, source), P2P_PHASE_RECORD, [&] {
            word = reads ? load_relaxed(words + k) : 0;
            const bool has_arrived = reads && is_stamped(op, word);
            last_words =
                __ballot_sync(ALL_LANES, has_arrived && ((uint32_t)word & RECORD_LAST)) &
                lanes.token_lanes;
            /* In backend `hosts` with top_k up to 32, records have all top_k words, except in
             * groups with lists (plan/record_lists.cuh). Wait for all of them, because a late
             * word could overwrite a word of a later operation. */
            const bool is_whole = lanes.num_chunks == 1 && !relays_words(job.self);
            if (HOSTS && !__all_sync(ALL_LANES, !is_whole || !reads || has_arrived))
                return false;
            /* In all other cases, the word with RECORD_LAST is the last word of a record. So a
             * lane waits for its word only if no lower lane of its token has this flag. */
            const bool needed = reads && !(last_words & lanes_below());
            /* true: the record has at most 32 words, and its last word has not arrived yet */
            const bool is_open = !last_words && lanes.num_chunks == 1;
            return __all_sync(ALL_LANES, !needed || (has_arrived && !(reads && is_open))) != 0;
        });
        if (!ok) return false;
        const bool is_past_end = has_ended || (last_words & lanes_below());
        const uint32_t value = (uint32_t)word & ~RECORD_LAST;
        const bool none = is_past_end || value == RECORD_ABSENT || value == RECORD_DISCARD;
        if (in && k < top_k)
            records[((int64_t)source * job.self.max_tokens + token) * top_k + k] =
                none ? -1 : (int32_t)value;
        has_ended = has_ended || last_words;
    }
    return true;
}

/* Calls keep(source, first, stop) for each group of tokens that this warp handles, among the
 * tokens [begin, end) of all ranks. A group has 32 / top_k tokens (at least one) of one rank.
 * keep() copies the records of the group. source: rank of the tokens. first: first token of the
 * group. stop: the tokens of rank `source` in [begin, end) end before this token. `tokens_of`:
 * number of tokens of each rank. `warps`: number of warps that share the work. `warp`: index of
 * the calling warp among these warps. If keep() returns false, stops and returns false. */
template <class Keep>
__device__ __forceinline__ bool
for_each_token_group(const p2p_plan_job &job, const RankNumbers &tokens_of, int warp, int warps,
                     int32_t begin, int32_t end, Keep keep)
{
    const int per_group = job.layer.top_k <= WARP ? WARP / job.layer.top_k : 1;
    for (int q = 0; q < job.self.num_ranks; q++) {
        const int source = (job.self.rank + q) % job.self.num_ranks;
        const int32_t stop = min(number_of_rank(tokens_of, source), end);
        for (int32_t group = warp; begin + (int64_t)group * per_group < stop; group += warps)
            if (!keep(source, begin + group * per_group, stop)) return false;
    }
    return true;
}

#endif
