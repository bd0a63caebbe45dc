/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the slots of packed rows (rows with scales, dispatch/packed.cuh), and writes zeros to
 * slots without a row. Shared by packed.cu and bulk.cu. */
#ifndef EPIC_PACKED_SLOTS_CUH
#define EPIC_PACKED_SLOTS_CUH

#include "cuda/dispatch/flat.cuh"
#include "cuda/dispatch/packed.cuh"

/* Waits for the record of `token`, a token of `rank`. In lane n, slot[0] becomes slot n of the
 * token on this rank, and slot[1] becomes slot 32 + n; each becomes -1 if the token has no such
 * slot. With layout FLAT, slot[0] of lane 0 becomes the index of the token's row instead.
 * `word`: the result of peek_record() for chunk 0, or of peek_row() if FLAT. If `keep` is true,
 * also copies the record into the plan that this kernel makes. Called by a whole warp. Returns
 * false if the group has failed. */
template <bool FLAT>
__device__ __forceinline__ bool find_slots(const PackedMove &m, int rank, int32_t token,
                                           bool keep, uint64_t word, int32_t (&slot)[2])
{
    bool more = false;
    slot[0] = slot[1] = -1;
    if (token >= number_of_rank(m.tokens_of, rank)) return true;
    if (FLAT) return read_row(m, rank, token, keep, word, slot[0], more);
    if (!read_record(m, rank, token, 0, keep, word, slot[0], more)) return false;
    if (more) {
        word = peek_record(m, rank, token, 1);
        if (!read_record(m, rank, token, 1, keep, word, slot[1], more)) return false;
    } else if (m.has_new_plan && keep) {
        end_record(m, rank, token, 0);
    }
    return true;
}

/* Zeroes the rows, scales and weights of the receive buffer from row `first` on. With layout
 * FLAT, also sets recv_expert to -1. Each of `threads` threads calls it with its own index
 * `thread`. */
template <bool FLAT>
__device__ __forceinline__ void clear_rows(const PackedMove &m, int64_t first, int64_t thread,
                                           int64_t threads)
{
    zero_packed(m.job, first, thread, threads);
    if (FLAT)
        clear_extras(m, first, thread, threads);
    else
        zero_floats(m.job.slot_weights, first, m.job.recv_rows, thread, threads);
}

/* Zeroes the tail of the receive buffer: the rows after the slots of the last local expert. The
 * caller tests whether job.zero_tail is set. Called by all CTAs. Returns false if the group has
 * failed. */
template <bool FLAT> __device__ __forceinline__ bool clear_tail(const PackedMove &m)
{
    if (m.has_new_plan && !wait_for_plan(m)) return false;
    clear_rows<FLAT>(m, header_of(m)->slots_of[m.job.plan.self.rank], grid_thread(),
                     grid_threads());
    return true;
}

/* Zeroes all outputs if the plan is invalid, or if a receive buffer has too few rows. Called by
 * the CTA that finishes last. */
template <bool FLAT> __device__ __forceinline__ void clear_all(const PackedMove &m)
{
    if (m.plan.is_valid && header_of(m)->result == EPIC_OK &&
        check_rows(m.job.plan.self, m.op, header_of(m), threadIdx.x == 0))
        return;
    clear_rows<FLAT>(m, 0, threadIdx.x, blockDim.x);
}

#endif
