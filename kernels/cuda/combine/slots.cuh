/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that combine and combine_backward share. A round moves as many tokens of each rank
 * as fit in the staging memory. M is the type of the kernel's state: CombineState or
 * BackwardMove. */
#ifndef EPIC_SLOTS_CUH
#define EPIC_SLOTS_CUH

#include "cuda/plan/view.cuh"

/* Returns `slot`. If the caller's buffer is so small that it has no such row, returns 0. At the
 * end of the operation, all ranks report that the buffer is too small. But until then peers
 * wait for a row, so this rank must send some row. */
template <class M> __device__ __forceinline__ int32_t clamp_slot(const M &m, int32_t slot)
{
    return slot < m.job.num_rows ? slot : 0;
}

/* Returns the caller's weight of a slot. Returns 1 if there are no weights or if `slot` is
 * negative. */
template <class M> __device__ __forceinline__ float read_slot_weight(const M &m, int32_t slot)
{
    float weight = 1.0f;
    if (slot >= 0 && m.job.slot_weights) weight = __ldg(m.job.slot_weights + slot);
    return weight;
}

/* Calls round(end) once for each round of the operation. A round moves the tokens
 * [m.round_begin, end) of every rank. row_bytes: number of bytes of staging per token. Called
 * by all threads of all CTAs. Returns false if the group has failed. */
template <class M, class Round>
__device__ __forceinline__ bool for_each_round(M &m, OpState &op, int64_t row_bytes,
                                               Round round)
{
    const int64_t round_tokens = m.job.self.at.source_bytes / row_bytes;
    const int32_t most = m.plan.most_tokens;
    for (m.round_begin = 0;; m.round_begin += (int32_t)round_tokens) {
        const bool last = m.round_begin + round_tokens >= most;
        const int32_t end = last ? most : m.round_begin + (int32_t)round_tokens;
        if (!round(end)) return false;
        if (last) return true;
        if (!next_round(op)) return false;
    }
}

#endif
