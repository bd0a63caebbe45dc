/* SPDX-License-Identifier: Apache-2.0 */
/* Layout FLAT: a token has one row per rank that it chooses. Kernels that move rows treat this
 * row as the token's only slot. The token's local experts and their weights are arrays by row.
 *
 * While a plan is made, each rank sends two things per token to each rank: a stamped word with
 * the row and, in place of slots, the records with local experts. */
#ifndef EPIC_FLAT_CUH
#define EPIC_FLAT_CUH

#include "cuda/plan/view.cuh"

/* The word in a heap with the row of a token; `place` is the source. */
__device__ __forceinline__ uint64_t *row_word_address(const p2p_self &self, const OpState &op,
                                                      uint8_t *heap, int place, int64_t token)
{
    return (uint64_t *)(heap + self.at.rows) +
           ((int64_t)epoch_parity(op) * self.num_ranks + place) * self.max_tokens + token;
}

/* The word in which `source` sends the row of its token to this rank. */
__device__ __forceinline__ uint64_t *row_word_from(const p2p_self &self, const OpState &op,
                                                   int source, int64_t token)
{
    return row_word_address(self, op, inbox_base(op, source),
                            source_number(self, self.rank, source), token);
}

/* Is it a row's number, and not a mark? */
__device__ __forceinline__ bool is_valid_row(uint32_t value)
{
    return value < RECORD_DISCARD;
}

/* The local experts of a FLAT plan, [num_ranks, max_tokens, top_k] like the records. */
__device__ __forceinline__ const int32_t *local_experts_of(const PlanView &plan,
                                                           const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.records + (device_locals(&at) - at.records) / 4;
}

#endif
