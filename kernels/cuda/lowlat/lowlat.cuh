/* SPDX-License-Identifier: Apache-2.0 */
/* LowlatMove tokens: what the kernels of small operations share, in which latency is all.
 *
 * Rows travel as always (net/staging.cuh), so a rank may take such a kernel where a peer takes another.
 * What is different is how an operation begins and ends.  Whatever can be loaded at once is loaded
 * at once; one warp of each CTA, the speaker, does what concerns the whole operation beside the
 * others: in the last CTA it announces, waits until all peers have announced, and counts the
 * operation once every CTA has begun.  So nobody waits at the end for what is known earlier.  There
 * is no list of units: every warp sends what it has to send, and waits for nothing before that. */
#ifndef EPIC_LOWLAT_CUH
#define EPIC_LOWLAT_CUH

#include "cuda/net/staging.cuh"
#include "cuda/plan/view.cuh"

#ifndef LOWLAT_WORKERS
#define LOWLAT_WORKERS 16 /* and the speaker: 96 registers for each thread */
#endif
#define LOWLAT_BLOCK ((LOWLAT_WORKERS + 1) * WARP)

__device__ __forceinline__ bool is_control_warp()
{
    return threadIdx.x >= LOWLAT_WORKERS * WARP;
}

/* The CTAs [first, first + ctas), which share some work: units of it go to them in turn, then to
 * their warps. */
struct CtaRange {
    int first, ctas;

    __device__ __forceinline__ bool contains_this_cta() const
    {
        return (uint32_t)((int)blockIdx.x - first) < (uint32_t)ctas;
    }
    __device__ __forceinline__ int worker_index() const
    {
        return worker_index_of((int)(threadIdx.x / WARP));
    }
    /* The same, by the number of this warp in its CTA. */
    __device__ __forceinline__ int worker_index_of(int warp) const
    {
        return warp * ctas + (int)blockIdx.x - first;
    }
    __device__ __forceinline__ int num_workers() const
    {
        return LOWLAT_WORKERS * ctas;
    }
    __device__ __forceinline__ int64_t thread_index() const
    {
        return ((int64_t)blockIdx.x - first) * LOWLAT_BLOCK + threadIdx.x;
    }
    __device__ __forceinline__ int64_t num_threads() const
    {
        return (int64_t)ctas * LOWLAT_BLOCK;
    }
};

/* Every warp, first of all: its share of the parameters, which come from memory line after line if
 * they are only read where they are used. */
template <class Job> __device__ __forceinline__ void prefetch_params(const Job &job)
{
    const int at = (int)(threadIdx.x / WARP) * 16;
    uint32_t word = 0;
    if (at < (int)sizeof job / 4) word = ((const uint32_t *)&job)[at];
    keep_in_registers(word);
}

/* How many bits a number below n has. */
__device__ __forceinline__ int bits_of(int n)
{
    return 32 - __clz(n - 1);
}

/* What the speaker reads before all else, as it comes. */
struct StartState {
    uint32_t epoch;    /* that has ended */
    uint32_t overlaps; /* lane 0: as mark_running says */
    /* 0: nothing has broken the group so far; for the workers, too.  hosts: as far as this GPU
     * knows, and what the net says is found by who waits. */
    uint64_t broken;
#ifdef EPIC_HOSTS
    uint64_t epochs, freed; /* that have ended, and those of which the net has read all */
    uint64_t said; /* as `broken`, by the net, to the last CTA: nobody waits for that */
#endif
};

__device__ __forceinline__ StartState read_start_state(const p2p_self &self)
{
    StartState o = {};
    if (!is_control_warp()) return o;
    if (lane_id() == 0) o.overlaps = mark_running(self);
    o.epoch = load_relaxed(&control_of(self)->epoch);
#ifdef EPIC_HOSTS
    o.broken = load_relaxed(&control_of(self)->broken);
    o.epochs = load_relaxed(&control_of(self)->epochs);
    o.freed = load_relaxed(&control_of(self)->freed);
    if (is_last_cta()) o.said = load_relaxed((const uint64_t *)(self.inbox + self.at.broken));
#else
    o.broken = load_relaxed((const uint64_t *)(self.heap[self.rank] + self.at.broken));
#endif
    return o;
}

/* hosts, the speaker, once the operation is open: may this rank's outbox be written? */
__device__ __forceinline__ bool wait_outbox_ready(const OpState &op, const StartState &opening)
{
#ifdef EPIC_HOSTS
    const bool known = opening.freed + 1 >= opening.epochs || opening.broken;
    return __all_sync(ALL_LANES, known || lane_id() || wait_outbox_free(op)) != 0;
#else
    return true;
#endif
}

/* The speaker: what the last CTA tells all ranks of the operation at once; hosts: with the rest, as all
 * of it goes by the net once. */
__device__ __forceinline__ void announce_sizes(const p2p_self &self, const OpState &op,
                                               int32_t tokens, int32_t capacity, int32_t rows)
{
    if (HOSTS || !is_last_cta() || !is_control_warp() || lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    store_relaxed(to + P2P_ANNOUNCED_TOKENS, stamp_word(op, (uint32_t)tokens));
    store_relaxed(to + P2P_ANNOUNCED_CAPACITY, stamp_word(op, (uint32_t)capacity));
    store_relaxed(to + P2P_ANNOUNCED_ROWS, stamp_word(op, (uint32_t)rows));
}

/* One warp of the last CTA, worker 0, announces that the rank has begun, and so that what the
 * operations before restored can be written again: after a fence, which takes a microsecond, so it
 * comes first of all, and nobody waits for the announcement but who ends.  hosts: a plan waits for
 * it, too, so the speaker announces, before the CTA meets. */
__device__ __forceinline__ bool is_announcer(bool plans)
{
    return is_last_cta() && (HOSTS && plans ? is_control_warp() : threadIdx.x < WARP);
}

__device__ __forceinline__ void announce_start(const p2p_self &self, const OpState &op)
{
    if (lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    if (HOSTS) store_announced_sizes(op, to);
    store_relaxed(to + P2P_ANNOUNCED_SIGNATURE, stamp_word(op, op.signature));
    post_put(op, lane_id(), to, P2P_ANNOUNCE_WORDS * 8);
}

/* hosts, the speaker of a plan, which is open: nothing else is signed. */
__device__ __forceinline__ void announce_plan_start(const p2p_self &self, OpState &op)
{
    if (!HOSTS || !is_announcer(true)) return;
    if (lane_id() == 0) op.signature = self.signature;
    __syncwarp();
    announce_start(self, op);
}

/* The speaker: the running operation, but for its signature and boxes. */
__device__ __forceinline__ void open_lowlat(OpState &op, const p2p_self &self,
                                            const StartState &opening, int32_t tokens,
                                            int32_t capacity, int32_t rows)
{
    if (lane_id() == 0) {
        op.self = &self;
        op.heap = self.heap[self.rank];
        op.tokens = tokens;
        op.capacity = capacity;
        op.rows = rows;
        op.deadline = timer_ns() + self.timeout_ns;
        op.last = op.aborted_wait = 0;
        op.epoch = epoch_after(opening.epoch);
        op.overlaps = opening.overlaps;
        find_host_inbox(self, op);
    }
    __syncwarp();
}

/* The speaker: where rows are. */
__device__ __forceinline__ void find_lowlat_boxes(OpState &op, const p2p_self &self)
{
    if (lane_id() < self.num_ranks) find_boxes(self, op, lane_id());
}

/* One warp, lane = rank: all that the announcements say beside; zeros past the ranks. */
__device__ __forceinline__ bool wait_sizes(const p2p_self &self, const OpState &op,
                                           int32_t &tokens, int32_t &capacity, int32_t &rows)
{
    const int q = lane_id();
    const bool mine = q < self.num_ranks;
    const uint64_t *from = announcement_words(self, op, self.heap[self.rank], mine ? q : 0);
    uint64_t said[P2P_ANNOUNCE_WORDS] = {};
    const bool ok = wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        bool all = true;
#pragma unroll
        for (int i = P2P_ANNOUNCED_TOKENS; i < P2P_ANNOUNCE_WORDS; i++)
            said[i] = load_relaxed(from + i);
#pragma unroll
        for (int i = P2P_ANNOUNCED_TOKENS; i < P2P_ANNOUNCE_WORDS; i++)
            all &= is_stamped(op, said[i]);
        return __all_sync(ALL_LANES, !mine || all) != 0;
    });
    tokens = mine ? (int32_t)(uint32_t)said[P2P_ANNOUNCED_TOKENS] : 0;
    capacity = mine ? (int32_t)(uint32_t)said[P2P_ANNOUNCED_CAPACITY] : 0;
    rows = mine ? (int32_t)(uint32_t)said[P2P_ANNOUNCED_ROWS] : 0;
    return ok;
}

/* Every thread, when the CTA has met: this CTA has begun.  The speaker counts: workers have rows to
 * send. */
__device__ __forceinline__ void count_started_cta(const p2p_self &self, const OpState &op)
{
    if (threadIdx.x != LOWLAT_WORKERS * WARP) return;
    if (!HOSTS) atomicAdd(&control_of(self)->done, 1u);
    report_overlap(op);
}

/* hosts, in place of that: every warp, when it has shipped what it has to. */
__device__ __forceinline__ void count_posted_warp(const p2p_self &self)
{
    if (!HOSTS || lane_id() != 0) return;
    __threadfence();
    atomicAdd(&control_of(self)->done, 1u);
}

/* The speaker of the last CTA, once it has announced: waits for the peers' announcements, then
 * counts the operation when no CTA reads the epoch any more.  hosts: when all warps have shipped the
 * net hears of the epoch's end, beside that; `are_copied`: announcements have been brought to the heap. */
__device__ __forceinline__ void finish_lowlat(const p2p_self &self, OpState &op,
                                              const StartState &opening, bool are_copied)
{
    p2p_control *control = control_of(self);
    const auto all_begun = [&] {
        return __all_sync(ALL_LANES, load_relaxed(&control->done) ==
                                         gridDim.x * (HOSTS ? blockDim.x / WARP : 1)) != 0;
    };
#ifdef EPIC_HOSTS
    if (opening.said) { /* who is late may find that all has come, and the group broken */
        op.aborted_wait = WAIT_ABORTED(-1, P2P_PHASE_ARRIVE);
        return;
    }
    if (!wait_warp(op, -1, P2P_PHASE_GRID, all_begun)) return;
    if (lane_id() == 0) post_epoch_end(op);
    refresh_freed(op);
    if (!wait_announcements_unfenced(self, op, are_copied)) return;
#else
    if (!wait_announcements(self, op)) return;
    if (!wait_warp(op, -1, P2P_PHASE_GRID, all_begun)) return;
#endif
    if (lane_id() == 0) complete_operation(control, op);
}

/* The speaker: has every rank rows for the slots that the plan gives it?  true too if the group is
 * broken. */
__device__ __forceinline__ bool have_all_rows(const p2p_self &self, const OpState &op,
                                              const device_plan_header &h)
{
    int32_t rows = 0;
    const int q = lane_id(), num_ranks = self.num_ranks;
    return !read_announcement(self, op, P2P_ANNOUNCED_ROWS, rows) ||
           __all_sync(ALL_LANES, q >= num_ranks || h.slots_of[q] <= rows) != 0;
}

/* Every thread of `ctas` CTAs, at the end of all they store: true in the one that was the last to
 * come. */
static __device__ bool is_last_cta_to_end(OpState &op, int ctas)
{
    if (threadIdx.x == 0) {
        __threadfence();
        op.last = atomicAdd(&control_of(op)->ended, 1u) == (uint32_t)ctas - 1;
        if (op.last) control_of(op)->ended = 0;
    }
    __syncthreads();
    return op.last != 0;
}

/* The same of all CTAs, when somebody has too few rows, of which it tells. */
static __device__ bool is_last_cta_of_overflow(OpState &op, const device_plan_header &h)
{
    if (is_last_cta_to_end(op, (int)gridDim.x))
        (void)check_rows(*op.self, op, &h, threadIdx.x == 0);
    return op.last != 0;
}

/* Every thread, at the end. */
__device__ __forceinline__ void end_lowlat(OpState &op)
{
    __syncthreads();
    if (threadIdx.x == 0 && op.aborted_wait) report_aborted_wait(op);
}

#endif
