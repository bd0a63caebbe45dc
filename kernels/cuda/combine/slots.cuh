/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that combine and combine_backward share. A round moves as many tokens of each rank
 * as fit in the staging memory. M is the type of the kernel's state: CombineState or
 * BackwardMove. */
#ifndef EPIC_SLOTS_CUH
#define EPIC_SLOTS_CUH

#include "cuda/common/rows.cuh"
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

/* Returns whether all tokens fit into one round, so that the operation can end with
 * end_single_round(). If they fit, also counts this CTA as started. All CTAs get the same
 * result. Called by all threads of a CTA after read_plan_and_begin(). */
__device__ __forceinline__ bool start_single_round(const OpState &op, const PlanView &plan,
                                                   const RowShape &shape)
{
    const int64_t row_bytes = (int64_t)shape.vectors * 16;
    if (HOSTS || MANY_RANKS || op.self->at.source_bytes < plan.most_tokens * row_bytes)
        return false;
    if (threadIdx.x == 0) atomicAdd(&control_of(op)->done, 1u);
    return true;
}

/* Ends an operation that has one round. CTA 0 stores the new epoch when all peers have
 * announced the operation and all CTAs of this rank have started: a CTA that started later
 * would read the new epoch. No CTA waits until its last stores are complete. Returns true only
 * if the receive buffer of a rank has too few rows, and only in the CTA that calls this
 * function last. Called by all threads of all CTAs, after their last store. */
__device__ __forceinline__ bool end_single_round(OpState &op, const device_plan_header &h)
{
    const p2p_self &self = *op.self;
    p2p_control *control = control_of(op);
    const auto have_all_started = [&] {
        return __all_sync(ALL_LANES, load_relaxed(&control->done) == gridDim.x) != 0;
    };
    bool enough = true;
    if (threadIdx.x / WARP == 1) {
        enough = have_all_rows(self, op, h);
    } else if (blockIdx.x == 0 && threadIdx.x < WARP) {
        if (wait_announcements(self, op) &&
            wait_warp(op, -1, P2P_PHASE_GRID, have_all_started) && lane_id() == 0)
            complete_operation(control, op);
    }
    enough = __syncthreads_and(enough) != 0;
    if (threadIdx.x == 0 && op.aborted_wait) report_aborted_wait(op);
    return !enough && is_last_cta_of_overflow(op, h);
}

/* Ends the operation. is_single: the result of start_single_round(), or false if it was not
 * called. `moves`: true if the plan is valid, so that rows were moved. `ok`: false if the group
 * has failed. The outputs must be zeroed if the plan is invalid or the receive buffer of a rank
 * has too few rows. In this case returns true in the CTA that calls this function last. Called
 * by all threads of all CTAs, after their last store. */
__device__ __forceinline__ bool end_rounds(OpState &op, const device_plan_header &h,
                                           bool is_single, bool moves, bool ok)
{
    if (is_single) return end_single_round(op, h);
    return finish_operation(op) && ok &&
           !(moves && check_rows(*op.self, op, &h, threadIdx.x == 0));
}

/* Calls round(end) once for each round of the operation. A round moves the tokens
 * [m.round_begin, end) of every rank. row_bytes: number of bytes of staging per token. Called
 * by all threads of all CTAs. Returns false if the group has failed. */
template <class M, class Round>
__device__ __forceinline__ bool for_each_round(M &m, OpState &op, int64_t row_bytes,
                                               Round round)
{
    const int64_t round_tokens = P2P_ROUND_TOKENS(m.job.self.at, row_bytes);
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
