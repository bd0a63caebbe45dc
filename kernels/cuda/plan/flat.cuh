/* SPDX-License-Identifier: Apache-2.0 */
/* Layout FLAT: a token has one row on each rank that owns at least one of its experts. Kernels
 * that move rows treat this row as the token's only slot on that rank. Two more arrays of the
 * receive buffer hold, for each row, the token's local experts there and their weights.
 *
 * While the plan is made, each rank stores stamped words (valid only in this epoch) for each of
 * its tokens in the heap of every rank:
 *
 *   rows     one word: the number of the token's row on that rank
 *   records  up to top_k words: the token's local experts there (other layouts: its slots) */
#ifndef EPIC_FLAT_CUH
#define EPIC_FLAT_CUH

#include "cuda/plan/view.cuh"

/* Returns the address, in `heap`, of the word in which a rank stores the row number of its
 * token. `source`: number of that rank among the sources of the rank that owns the heap
 * (source_number()). */
__device__ __forceinline__ uint64_t *row_word_address(const p2p_self &self, const OpState &op,
                                                      uint8_t *heap, int source, int64_t token)
{
    return (uint64_t *)(heap + self.at.flat_rows) +
           ((int64_t)epoch_parity(op) * self.num_ranks + source) * self.max_tokens + token;
}

/* Returns the address, on this rank, of the word in which rank `source` stores which row its
 * token has on this rank. */
__device__ __forceinline__ uint64_t *row_word_from(const p2p_self &self, const OpState &op,
                                                   int source, int64_t token)
{
    return row_word_address(self, op, inbox_base(op, source),
                            source_number(self, self.rank, source), token);
}

/* Returns whether a received value is a row number, not RECORD_ABSENT or RECORD_DISCARD. */
__device__ __forceinline__ bool is_valid_row(uint32_t value)
{
    return value < RECORD_DISCARD;
}

/* Returns the array `locals` of a FLAT plan: the local experts of each token on this rank,
 * [num_ranks, max_tokens, top_k]. It is indexed like the records. */
__device__ __forceinline__ const int32_t *local_experts_of(const PlanView &plan,
                                                           const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.records + (device_locals(&at) - at.records) / 4;
}

#endif
