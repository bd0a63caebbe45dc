/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that combine and its gradient share: slots and rounds. M is the type of their
 * state. */
#ifndef EPIC_SLOTS_CUH
#define EPIC_SLOTS_CUH

#include "cuda/plan/view.cuh"

/* A slot within the rows: row 0, which always exists, stands in for slots past the end. Too few
 * rows are an error in the data, which all ranks find at the end of the operation. Until then
 * every row that a peer waits for must be sent. */
template <class M> __device__ __forceinline__ int32_t clamp_slot(const M &m, int32_t slot)
{
    return slot < m.job.num_rows ? slot : 0;
}

/* The weight of a slot; 1 without weights. */
template <class M> __device__ __forceinline__ float read_slot_weight(const M &m, int32_t slot)
{
    float weight = 1.0f;
    if (slot >= 0 && m.job.slot_weights) weight = __ldg(m.job.slot_weights + slot);
    return weight;
}

/* Runs all rounds of an operation with row_bytes per token: round(end) does the tokens
 * [m.first, end) of every rank. false: the group is broken. */
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
