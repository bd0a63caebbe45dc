/* SPDX-License-Identifier: Apache-2.0 */
/* Layout FLAT: one row for each token and rank, which the kernels that move rows take for a token's
 * only slot here.  What else there is of a token, its local experts and their weights, lies by row.
 *
 * On its way a plan says of each token two things to each rank: a stamped word with the row, and
 * where other plans send slots, the local experts. */
#ifndef EPIC_FLAT_CUH
#define EPIC_FLAT_CUH

#include "cuda/plan/view.cuh"

/* What a source says of its token to the rank that owns the heap: the row there. */
__device__ __forceinline__ uint64_t *row_word_address(const p2p_self &self, const OpState &op,
                                                      uint8_t *heap, int place, int64_t token)
{
    return (uint64_t *)(heap + self.at.rows) +
           ((int64_t)epoch_parity(op) * self.num_ranks + place) * self.max_tokens + token;
}

/* The same that this rank is told by `source`. */
__device__ __forceinline__ uint64_t *row_word_from(const p2p_self &self, const OpState &op,
                                                   int source, int64_t token)
{
    return row_word_address(self, op, inbox_base(op, source),
                            source_number(self, self.rank, source), token);
}

__device__ __forceinline__ bool is_valid_row(uint32_t value)
{
    return value < RECORD_DISCARD;
}

/* The local experts of a FLAT plan, [num_ranks, max_tokens, top_k] as the records. */
__device__ __forceinline__ const int32_t *local_experts_of(const PlanView &plan,
                                                           const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.records + (device_locals(&at) - at.records) / 4;
}

#endif
