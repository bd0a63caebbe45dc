/* SPDX-License-Identifier: Apache-2.0 */
/* Few tokens: what the kernels of small operations share, in which latency is all.
 *
 * Rows travel as always (staging.cuh), so a rank may take such a kernel where a peer takes another.
 * What is different is how an operation begins and ends.  Whatever can be loaded at once is loaded
 * at once; one warp of each CTA, the speaker, does what concerns the whole operation beside the
 * others: in the last CTA it announces, waits until all peers have announced, and counts the
 * operation once every CTA has begun.  So nobody waits at the end for what is known earlier.  There
 * is no list of units: every warp sends what it has to send, and waits for nothing before that. */
#ifndef EPIC_FEW_CUH
#define EPIC_FEW_CUH

#include "cuda/plan.cuh"
#include "cuda/staging.cuh"

#define FEW_WORKERS 16
#define FEW_BLOCK ((FEW_WORKERS + 1) * WARP)

__device__ __forceinline__ bool is_speaker()
{
    return threadIdx.x >= FEW_WORKERS * WARP;
}

/* The CTAs [first, first + ctas), which share some work: units of it go to them in turn, then to
 * their warps. */
struct Crew {
    int first, ctas;

    __device__ __forceinline__ bool has_me() const
    {
        return (uint32_t)((int)blockIdx.x - first) < (uint32_t)ctas;
    }
    __device__ __forceinline__ int worker() const
    {
        return (int)(threadIdx.x / WARP) * ctas + (int)blockIdx.x - first;
    }
    __device__ __forceinline__ int workers() const
    {
        return FEW_WORKERS * ctas;
    }
    __device__ __forceinline__ int64_t thread() const
    {
        return ((int64_t)blockIdx.x - first) * FEW_BLOCK + threadIdx.x;
    }
    __device__ __forceinline__ int64_t threads() const
    {
        return (int64_t)ctas * FEW_BLOCK;
    }
};

/* The speaker: the running operation, but for what its plan adds to the signature. */
__device__ __forceinline__ void open_few(Now &now, const p2p_self &self, int32_t tokens,
                                         int32_t capacity, int32_t rows)
{
    const uint32_t epoch =
        load_relaxed(&((const p2p_control *)(self.heap[self.rank] + self.at.control))->epoch);
    if (lane_id() == 0) {
        now.self = &self;
        now.heap = self.heap[self.rank];
        now.signature = self.signature;
        now.tokens = tokens;
        now.capacity = capacity;
        now.rows = rows;
        now.deadline = timer_ns() + self.timeout_ns;
        now.last = now.lost = 0;
        now.epoch = epoch_after(epoch);
    }
    __syncwarp();
    if (lane_id() < self.num_ranks) find_boxes(now, lane_id());
}

/* Has nothing broken the group so far? */
__device__ __forceinline__ bool is_whole(const p2p_self &self)
{
    return load_relaxed((const uint64_t *)(self.heap[self.rank] + self.at.broken)) == 0;
}

/* Every thread, when the CTA has met: this CTA has begun. */
__device__ __forceinline__ void count_begun(const Now &now)
{
    if (threadIdx.x == 0) atomicAdd(&control_of(now)->done, 1u);
}

/* The speaker of the last CTA, once it has announced: waits for the peers' announcements, then
 * counts the operation when no CTA reads the epoch any more. */
static __device__ void finish_few(Now &now)
{
    p2p_control *control = control_of(now);
    if (!hear(now)) return;
    if (!wait_until(now, -1, P2P_PHASE_GRID, [&] {
            return __all_sync(ALL_LANES, load_relaxed(&control->done) == gridDim.x) != 0;
        }))
        return;
    if (lane_id() == 0) {
        control->done = 0;
        store_relaxed(&control->epoch, now.epoch);
    }
}

/* The speaker: has every rank rows for the slots that the plan gives it?  true too if the group is
 * broken. */
static __device__ bool hear_rows(const Now &now, const device_plan_header &h)
{
    int32_t rows = 0;
    const int q = lane_id(), num_ranks = now.self->num_ranks;
    return !heard(now, P2P_SAYS_ROWS, rows) ||
           __all_sync(ALL_LANES, q >= num_ranks || h.slots_of[q] <= rows) != 0;
}

/* Every thread, at the end, when somebody has too few rows: tells of it, in the CTA that was the
 * last to come; all others have stored all they will. */
static __device__ bool is_last_of_short(Now &now, const device_plan_header &h)
{
    if (threadIdx.x == 0) {
        __threadfence();
        now.last = atomicAdd(&control_of(now)->ended, 1u) == gridDim.x - 1;
        if (now.last) control_of(now)->ended = 0;
    }
    __syncthreads();
    if (now.last) (void)rows_suffice(*now.self, now, &h);
    return now.last != 0;
}

/* Every thread, at the end. */
__device__ __forceinline__ void end_few(Now &now)
{
    __syncthreads();
    if (threadIdx.x == 0 && now.lost) tell_end(now);
}

#endif
