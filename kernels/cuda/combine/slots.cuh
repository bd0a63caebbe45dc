/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that combine and combine_backward share: slots and rounds. M is the type of their
 * first argument: CombineState or BackwardMove. */
#ifndef EPIC_SLOTS_CUH
#define EPIC_SLOTS_CUH

#include "cuda/plan/view.cuh"

/* Returns the slot, or 0 if it is not below num_rows. A call with too few rows is an error in
 * the data, which all ranks find at the end of the operation. Until then every row that a peer
 * waits for must be sent, so row 0 is sent in place of a missing row. */
template <class M> __device__ __forceinline__ int32_t clamp_slot(const M &m, int32_t slot)
{
    return slot < m.job.num_rows ? slot : 0;
}

/* Returns the weight of a slot; 1 if there are no weights or the slot is negative. */
template <class M> __device__ __forceinline__ float read_slot_weight(const M &m, int32_t slot)
{
    float weight = 1.0f;
    if (slot >= 0 && m.job.slot_weights) weight = __ldg(m.job.slot_weights + slot);
    return weight;
}

/* Runs all rounds of an operation. A round has as many tokens of each rank as fit the staging.
 * row_bytes: bytes of staging per token. round(end) does the work for tokens [m.first, end) of
 * every rank. Called by all threads of all CTAs. Returns false if the group is broken. */
template <class M, class Round>
__device__ __forceinline__ bool for_each_round(M &m, OpState &op, int64_t row_bytes,
                                               Round round)
{
    const int64_t round_tokens = m.job.self.at.source_bytes / row_bytes;
    const int32_t most = m.plan.most_tokens;
    for (m.first = 0;; m.first += (int32_t)round_tokens) {
        const bool last = m.first + round_tokens >= most;
        const int32_t end = last ? most : m.first + (int32_t)round_tokens;
        if (!round(end)) return false;
        if (last) return true;
        if (!next_round(op)) return false;
    }
}

#endif
