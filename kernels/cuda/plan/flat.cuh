/* SPDX-License-Identifier: Apache-2.0 */
/* Layout FLAT: a token has one row on each rank that owns at least one of its experts. Kernels
 * that move rows treat this row as the token's only slot on that rank. Two more output arrays
 * of dispatch contain, for each received row, the token's local experts on that rank and the
 * weights of these choices.
 *
 * While the plan is made, each rank sends a row word and a record to every rank, for each of
 * its tokens. Both consist of stamped words, which contain the epoch (the number of the
 * operation) and are valid only in this epoch:
 *
 *   row word  the index of the token's row on that rank
 *   record    up to top_k words: the token's local experts on that rank. (With layout
 *             EXPERT_MAJOR, a record has the token's slots there.) */
#ifndef EPIC_FLAT_CUH
#define EPIC_FLAT_CUH

#include "cuda/plan/view.cuh"

/* Returns the address in `heap` of the row word of `token` (the word with the index of its
 * row). A heap has one array of row words for each rank that writes row words to the heap.
 * `source`: index of the array to which the token's rank writes (source_number()). */
__device__ __forceinline__ uint64_t *row_word_address(const p2p_self &self, const OpState &op,
                                                      uint8_t *heap, int source, int64_t token)
{
    return (uint64_t *)(heap + self.at.flat_rows) +
           ((int64_t)epoch_parity(op) * self.num_ranks + source) *
               p2p_index_tokens(&self.at, self.max_tokens) +
           RECORD_INDEX(op, token);
}

/* Returns the address in this rank's memory at which rank `source` stores the row word of its
 * token `token`. */
__device__ __forceinline__ uint64_t *row_word_from(const p2p_self &self, const OpState &op,
                                                   int source, int64_t token)
{
    return row_word_address(self, op, word_base(op, source),
                            source_number(self, self.rank, source), token);
}

/* Returns true if `value` is the index of a row. The other values are RECORD_ABSENT (the token
 * has no row here) and RECORD_DISCARD (the plan is invalid). */
__device__ __forceinline__ bool is_valid_row(uint32_t value)
{
    return value < RECORD_DISCARD;
}

/* Returns the table of a FLAT plan that contains the local experts of each token on this rank,
 * [num_ranks, max_tokens, top_k]. record_index() returns the index of a token's first
 * element. */
__device__ __forceinline__ const int32_t *local_experts_of(const PlanView &plan,
                                                           const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.records + (device_locals(&at) - at.records) / 4;
}

#endif
