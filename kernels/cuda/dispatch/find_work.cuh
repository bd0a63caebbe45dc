/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the units of a dispatch that have work, for a WorkWalk (common/rows.cuh). Only the
 * libraries for many ranks use it. */
#ifndef EPIC_FIND_WORK_CUH
#define EPIC_FIND_WORK_CUH

#include "cuda/dispatch/flat.cuh"

/* Units that send, units that forward, and units that receive this rank's own tokens always
 * have work. A unit that receives from a peer has work if one of its tokens has a slot on this
 * rank. If the kernel makes the plan, the lanes wait for the first words of the records of these
 * tokens. Ranks cannot wait for each other in a circle, because planner CTAs send records before
 * they move rows. */
struct DispatchWork {
    const DispatchMove &m;
    int32_t end; /* the round ends before this token */
    /* true: if the kernel makes the plan, also stores in the plan that a token has no slot on
     * this rank. The units store the slots of the other tokens. */
    bool keeps;
    bool failed; /* true: a wait was aborted, because the group has failed */

    static __device__ __forceinline__ int first_role(int group)
    {
        return first_role_of_group(group);
    }
    /* Waits until the record of this lane's token (with layout FLAT: its row word) has arrived.
     * `exists`: false if this lane has no token. Returns true if the token has a slot on this
     * rank. Called by a whole warp. */
    __device__ __forceinline__ bool wait_record(int rank, int32_t token, bool exists)
    {
        const p2p_self &self = m.job.plan.self;
        const uint64_t *words = m.job.flat ? row_word_from(self, m.op, rank, token)
                                           : record_address(self, m.op, rank, token, m.top_k);
        /* receive_record() says why `hosts` waits for all words of a record */
        const bool all = HOSTS && !m.job.flat && !relays_words(self) && m.top_k <= WARP;
        const int count = all ? m.top_k : 1;
        uint32_t value = RECORD_ABSENT;
        int late = -1;
        failed |= !wait_warp(m.op, late, P2P_PHASE_RECORD, [&] {
            bool has_arrived = true;
            for (int k = 0; k < count && exists; k++) {
                const uint64_t word = load_relaxed(words + k);
                if (k == 0) value = (uint32_t)word & ~RECORD_LAST;
                has_arrived = has_arrived && is_stamped(m.op, word);
            }
            late = has_arrived ? -1 : record_sender(self, rank);
            return __all_sync(ALL_LANES, has_arrived) != 0;
        });
        return exists && value != RECORD_ABSENT;
    }
    /* Stores in the plan that this lane's token has no slot on this rank. */
    __device__ __forceinline__ void store_absent(int rank, int32_t token)
    {
        const p2p_self &self = m.job.plan.self;
        const int64_t at = record_index(self, rank, token, m.top_k);
        for (int k = 0; k < m.top_k; k++) ((int32_t *)m.plan.records)[at + k] = -1;
        for (int k = 0; m.job.flat && k < m.top_k; k++)
            ((int32_t *)local_experts_of(m.plan, self))[at + k] = -1;
    }
    /* Returns true if `token`, a token of `rank`, has a slot on this rank. `exists`: false if
     * this lane has no token. Called by a whole warp. */
    __device__ __forceinline__ bool has_slot(const UnitWalk &walk, int rank, int32_t token,
                                             bool exists)
    {
        if (!m.has_new_plan)
            return exists && __ldg(m.plan.records +
                                   record_index(m.job.plan.self, rank, token, m.top_k)) >= 0;
        const bool has = wait_record(rank, exists ? token : m.round_begin, exists);
        if (keeps && walk.span == 0 && exists && !has && !failed) store_absent(rank, token);
        return has;
    }
    __device__ __forceinline__ uint32_t operator()(const UnitWalk &walk, int group)
    {
        const p2p_self &self = m.job.plan.self;
        const int32_t begin = m.round_begin + received_before(m, walk.step);
        const int32_t stop = min(end, m.round_begin + received_before(m, walk.step + 1));
        if (group == 0 || begin >= end || failed) return 1;
        const int role = first_role(group) + lane_id();
        const int source = HOSTS ? role - *m.num_forward_roles : role;
        const bool is_peer = source > 0 && source < self.num_ranks;
        const int rank = rank_of_role(self, is_peer ? source : 0);
        const int32_t num_tokens = number_of_each(m.tokens_of, rank);
        bool has_work = !is_peer && source <= self.num_ranks && begin < stop;
        for (int32_t token = begin; token < stop; token++)
            has_work |= has_slot(walk, rank, token, is_peer && token < num_tokens);
        return failed ? 1 : __ballot_sync(ALL_LANES, has_work);
    }
};

/* Prepares a round for DispatchWork, which must know how many tokens each rank has: if the
 * kernel makes the plan, waits for the announcements. `end` becomes at most the largest of these
 * numbers. Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool begin_finding(DispatchMove &m, bool &has_token_counts,
                                              int32_t &end)
{
    if (!has_token_counts && !read_token_counts(m)) return false;
    if (!has_token_counts) end = min(end, m.most_tokens);
    has_token_counts = true;
    return true;
}

#endif
