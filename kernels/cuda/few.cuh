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

#ifndef FEW_WORKERS
#define FEW_WORKERS 16 /* and the speaker: 96 registers for each thread */
#endif
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

__device__ __forceinline__ bool is_last_cta()
{
    return blockIdx.x == gridDim.x - 1;
}

/* Every warp, first of all: its share of the parameters, which come from memory line after line if
 * they are only read where they are used. */
template <class Job> __device__ __forceinline__ void touch(const Job &job)
{
    const int at = (int)(threadIdx.x / WARP) * 16;
    uint32_t word = 0;
    if (at < (int)sizeof job / 4) word = ((const uint32_t *)&job)[at];
    keep(word);
}

/* How many bits a number below n has. */
__device__ __forceinline__ int bits_of(int n)
{
    return 32 - __clz(n - 1);
}

/* What the speaker reads before all else. */
struct Opening {
    uint32_t epoch; /* that has ended */
    bool whole;     /* nothing has broken the group so far; true for the workers */
};

__device__ __forceinline__ Opening read_opening(const p2p_self &self)
{
    const uint8_t *heap = self.heap[self.rank];
    Opening o = {0, true};
    if (!is_speaker()) return o;
    o.epoch = load_relaxed(&((const p2p_control *)(heap + self.at.control))->epoch);
    o.whole = load_relaxed((const uint64_t *)(heap + self.at.broken)) == 0;
    return o;
}

/* The speaker: what the last CTA tells all ranks of the operation at once. */
__device__ __forceinline__ void announce_sizes(const Now &now)
{
    const p2p_self &self = *now.self;
    if (!is_last_cta() || lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement(now, self.heap[lane_id()], self.rank);
    store_relaxed(to + P2P_SAYS_TOKENS, stamp(now, (uint32_t)now.tokens));
    store_relaxed(to + P2P_SAYS_CAPACITY, stamp(now, (uint32_t)now.capacity));
    store_relaxed(to + P2P_SAYS_ROWS, stamp(now, (uint32_t)now.rows));
}

/* The speaker of the last CTA: that it has begun, and so that what the operations before restored can
 * be written again.  A fence takes a microsecond, so nobody waits for this but who ends. */
__device__ __forceinline__ void announce_begun(const Now &now)
{
    const p2p_self &self = *now.self;
    fence_system();
    if (lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement(now, self.heap[lane_id()], self.rank);
    store_relaxed(to + P2P_SAYS_SIGNATURE, stamp(now, now.signature));
}

/* The speaker: the running operation, but for its signature; and its sizes are told, if the group
 * is whole. */
__device__ __forceinline__ void open_few(Now &now, const p2p_self &self, const Opening &opening,
                                         int32_t tokens, int32_t capacity, int32_t rows)
{
    if (lane_id() == 0) {
        now.self = &self;
        now.heap = self.heap[self.rank];
        now.tokens = tokens;
        now.capacity = capacity;
        now.rows = rows;
        now.deadline = timer_ns() + self.timeout_ns;
        now.last = now.lost = 0;
        now.epoch = epoch_after(opening.epoch);
    }
    __syncwarp();
    if (opening.whole) announce_sizes(now);
    if (lane_id() < self.num_ranks) find_boxes(now, lane_id());
}

/* One warp, lane = rank: all that the announcements say beside; zeros past the ranks. */
static __device__ bool hear_sizes(const Now &now, int32_t &tokens, int32_t &capacity,
                                  int32_t &rows)
{
    const int q = lane_id();
    const bool mine = q < now.self->num_ranks;
    const uint64_t *from = announcement(now, now.heap, mine ? q : 0);
    uint64_t said[P2P_ANNOUNCE_WORDS] = {};
    const bool ok = wait_until(now, -1, P2P_PHASE_ARRIVE, [&] {
        bool all = true;
#pragma unroll
        for (int i = P2P_SAYS_TOKENS; i < P2P_ANNOUNCE_WORDS; i++)
            said[i] = load_relaxed(from + i);
#pragma unroll
        for (int i = P2P_SAYS_TOKENS; i < P2P_ANNOUNCE_WORDS; i++) all &= stamped(now, said[i]);
        return __all_sync(ALL_LANES, !mine || all) != 0;
    });
    tokens = mine ? (int32_t)(uint32_t)said[P2P_SAYS_TOKENS] : 0;
    capacity = mine ? (int32_t)(uint32_t)said[P2P_SAYS_CAPACITY] : 0;
    rows = mine ? (int32_t)(uint32_t)said[P2P_SAYS_ROWS] : 0;
    return ok;
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
    if (now.last) (void)rows_suffice(*now.self, now, &h, threadIdx.x == 0);
    return now.last != 0;
}

/* Every thread, at the end. */
__device__ __forceinline__ void end_few(Now &now)
{
    __syncthreads();
    if (threadIdx.x == 0 && now.lost) tell_end(now);
}

#endif
