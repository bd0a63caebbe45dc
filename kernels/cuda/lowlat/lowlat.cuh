/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency kernels: what the kernels of operations with few tokens share.
 *
 * Rows travel as in the other kernels (net/staging.cuh), so a rank may use a low-latency kernel
 * while a peer uses another one. What differs is how an operation begins and ends. Everything
 * that can be loaded at once is loaded at once. One warp of each CTA, the control warp, does
 * the work for the whole operation while the workers move rows:
 *
 *   every CTA   control warp   counts that the CTA has started
 *   last CTA    worker 0       announces, after a system fence
 *   last CTA    control warp   waits for the peers' announcements; when all CTAs have started,
 *                              counts the operation
 *
 * So no warp waits at the end for something that was known earlier. There is no list of units:
 * every warp sends what it has to send before it waits. */
#ifndef EPIC_LOWLAT_CUH
#define EPIC_LOWLAT_CUH

#include "cuda/net/staging.cuh"
#include "cuda/plan/view.cuh"

#ifndef LOWLAT_WORKERS
#define LOWLAT_WORKERS 16 /* with the control warp 96 registers per thread */
#endif
#define LOWLAT_BLOCK ((LOWLAT_WORKERS + 1) * WARP)

/* Is this thread in the control warp, the last one of the CTA? */
__device__ __forceinline__ bool is_control_warp()
{
    return threadIdx.x >= LOWLAT_WORKERS * WARP;
}

/* The CTAs [first, first + ctas), which share some work. Units go to the CTAs in turn, then to
 * their warps. */
struct CtaRange {
    int first, ctas;

    /* Does this CTA take part? */
    __device__ __forceinline__ bool contains_this_cta() const
    {
        return (uint32_t)((int)blockIdx.x - first) < (uint32_t)ctas;
    }
    /* The index of this warp among all workers. */
    __device__ __forceinline__ int worker_index() const
    {
        return worker_index_of((int)(threadIdx.x / WARP));
    }
    /* The index among all workers of warp number `warp` of this CTA. */
    __device__ __forceinline__ int worker_index_of(int warp) const
    {
        return warp * ctas + (int)blockIdx.x - first;
    }
    /* Workers of all CTAs. */
    __device__ __forceinline__ int num_workers() const
    {
        return LOWLAT_WORKERS * ctas;
    }
    /* The index of this thread among all threads of the CTAs, control warps included. */
    __device__ __forceinline__ int64_t thread_index() const
    {
        return ((int64_t)blockIdx.x - first) * LOWLAT_BLOCK + threadIdx.x;
    }
    /* Threads of all CTAs, control warps included. */
    __device__ __forceinline__ int64_t num_threads() const
    {
        return (int64_t)ctas * LOWLAT_BLOCK;
    }
};

/* Reads this warp's share of the kernel's parameters first of all. Otherwise they come from
 * memory line by line where they are used. */
template <class Job> __device__ __forceinline__ void prefetch_params(const Job &job)
{
    const int at = (int)(threadIdx.x / WARP) * 16;
    uint32_t word = 0;
    if (at < (int)sizeof job / 4) word = ((const uint32_t *)&job)[at];
    keep_in_registers(word);
}

/* Bits of numbers below n. */
__device__ __forceinline__ int bits_of(int n)
{
    return 32 - __clz(n - 1);
}

/* State that the control warp reads first of all. */
struct StartState {
    uint32_t epoch;    /* the epoch that has ended */
    uint32_t overlaps; /* lane 0: result of mark_running() */
    /* P2P_BROKEN of a failed group, else 0. backend hosts: as far as this GPU knows; waits find
     * what only the net inbox knows. */
    uint64_t broken;
#ifdef EPIC_HOSTS
    /* epochs that have ended, and those of which the net has read all */
    uint64_t epochs, freed;
    uint64_t said; /* in the last CTA: `broken` in the net inbox; no warp waits for it */
#endif
};

/* Reads the state at the start of a kernel. All warps; workers get zeros. */
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

/* backend hosts: waits until this rank's outbox may be written. The control warp. */
__device__ __forceinline__ bool wait_outbox_ready(const OpState &op, const StartState &opening)
{
#ifdef EPIC_HOSTS
    const bool known = opening.freed + 1 >= opening.epochs || opening.broken;
    return __all_sync(ALL_LANES, known || lane_id() || wait_outbox_free(op)) != 0;
#else
    return true;
#endif
}

/* Stores the sizes of the announcement, in the last CTA. backend hosts announces everything at
 * once, with one put. The control warp. */
__device__ __forceinline__ void announce_sizes(const p2p_self &self, const OpState &op,
                                               int32_t tokens, int32_t capacity, int32_t rows)
{
    if (HOSTS || !is_last_cta() || !is_control_warp() || lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    store_relaxed(to + P2P_ANNOUNCED_TOKENS, stamp_word(op, (uint32_t)tokens));
    store_relaxed(to + P2P_ANNOUNCED_CAPACITY, stamp_word(op, (uint32_t)capacity));
    store_relaxed(to + P2P_ANNOUNCED_ROWS, stamp_word(op, (uint32_t)rows));
}

/* Does this warp announce? The announcement means that the rank has begun and that what earlier
 * operations restored may be written again. A system fence comes before it and takes a
 * microsecond, so it is issued first of all. Only the end of an operation waits for the
 * announcement. With backend hosts a plan waits for it, too; there the control warp announces,
 * before the barrier of the CTA. */
__device__ __forceinline__ bool is_announcer(bool plans)
{
    return is_last_cta() && (HOSTS && plans ? is_control_warp() : threadIdx.x < WARP);
}

/* Stores the signature to every rank. The announcing warp, after the fence. */
__device__ __forceinline__ void announce_start(const p2p_self &self, const OpState &op)
{
    if (lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    if (HOSTS) store_announced_sizes(op, to);
    store_relaxed(to + P2P_ANNOUNCED_SIGNATURE, stamp_word(op, op.signature));
    post_put(op, lane_id(), to, P2P_ANNOUNCE_WORDS * 8);
}

/* backend hosts: announces a plan, whose signature contains nothing else. The control warp. */
__device__ __forceinline__ void announce_plan_start(const p2p_self &self, OpState &op)
{
    if (!HOSTS || !is_announcer(true)) return;
    if (lane_id() == 0) op.signature = self.signature;
    __syncwarp();
    announce_start(self, op);
}

/* Sets the state of the operation, except signature and staging. The control warp. */
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

/* Sets the staging. The control warp. */
__device__ __forceinline__ void find_lowlat_boxes(OpState &op, const p2p_self &self)
{
    if (lane_id() < self.num_ranks) find_boxes(self, op, lane_id());
}

/* Waits for the sizes that the ranks announce; lane = rank. One warp. Lanes past the ranks get
 * zeros. */
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

/* Counts that this CTA has started, after its barrier. The control warp does it, because
 * workers have rows to send. */
__device__ __forceinline__ void count_started_cta(const p2p_self &self, const OpState &op)
{
    if (threadIdx.x != LOWLAT_WORKERS * WARP) return;
    if (!HOSTS) atomicAdd(&control_of(self)->done, 1u);
    report_overlap(op);
}

/* backend hosts, in place of that: a warp counts itself when it has posted all its puts. Every
 * warp. */
__device__ __forceinline__ void count_posted_warp(const p2p_self &self)
{
    if (!HOSTS || lane_id() != 0) return;
    __threadfence();
    atomicAdd(&control_of(self)->done, 1u);
}

/* Ends the operation: waits for the peers' announcements and until no CTA reads the epoch any
 * more, then counts the operation. backend hosts: when all warps have posted their puts, posts
 * the end of the epoch. The control warp of the last CTA. `are_copied`: announcements have been
 * copied to the heap. */
__device__ __forceinline__ void finish_lowlat(const p2p_self &self, OpState &op,
                                              const StartState &opening, bool are_copied)
{
    p2p_control *control = control_of(self);
    const auto all_begun = [&] {
        return __all_sync(ALL_LANES, load_relaxed(&control->done) ==
                                         gridDim.x * (HOSTS ? blockDim.x / WARP : 1)) != 0;
    };
#ifdef EPIC_HOSTS
    /* a late rank may find that everything has arrived and the group is broken */
    if (opening.said) {
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

/* Does every rank have rows for the slots that the plan gives it? Returns true if the group is
 * broken. The control warp. */
__device__ __forceinline__ bool have_all_rows(const p2p_self &self, const OpState &op,
                                              const device_plan_header &h)
{
    int32_t rows = 0;
    const int q = lane_id(), num_ranks = self.num_ranks;
    return !read_announcement(self, op, P2P_ANNOUNCED_ROWS, rows) ||
           __all_sync(ALL_LANES, q >= num_ranks || h.slots_of[q] <= rows) != 0;
}

/* Returns true in the CTA that ends last among `ctas` CTAs. All their threads, after their last
 * store. */
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

/* Like is_last_cta_to_end(), for all CTAs if a rank has too few rows; reports which one. */
static __device__ bool is_last_cta_of_overflow(OpState &op, const device_plan_header &h)
{
    if (is_last_cta_to_end(op, (int)gridDim.x))
        (void)check_rows(*op.self, op, &h, threadIdx.x == 0);
    return op.last != 0;
}

/* Reports a wait that was given up. All threads, at the end. */
__device__ __forceinline__ void end_lowlat(OpState &op)
{
    __syncthreads();
    if (threadIdx.x == 0 && op.aborted_wait) report_aborted_wait(op);
}

#endif
