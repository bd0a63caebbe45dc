/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency kernels, for few tokens: the functions that all of them share.
 *
 * Low-latency kernels send rows in the same way as the general kernels (net/staging.cuh). So
 * one rank can run a low-latency kernel for an operation while a peer with more tokens runs the
 * general kernel. Only the begin and the end of an operation differ.
 *
 * A CTA has LOWLAT_WORKERS workers, which are warps that move rows, and one control warp, its
 * last warp. To announce an operation, a rank stores its sizes (tokens, capacity, rows) and its
 * signature (a hash of the arguments) to every rank. Sizes and signature are stamped words:
 * they contain the epoch, which is the number of the operation. "Last CTA" is the CTA with the
 * highest blockIdx. Work that is done once per CTA or once per operation:
 *
 *   every CTA   control warp   counts that the CTA has started
 *   last CTA    worker 0       executes a system fence, then announces the operation to every
 *                              rank. Because of the fence, a peer that sees the announcement
 *                              also sees the poison that earlier operations have stored back
 *   last CTA    control warp   waits for the peers' announcements and for all CTAs to start,
 *                              then counts the operation as done
 *
 * Only the announcement needs a memory order. Each word of a row, weight or id is its own flag:
 * the reader polls it until it is not poison (the mark of a word that has not arrived) or, for
 * ids, until it has the stamp of this epoch. Every warp sends everything before it waits for
 * anything, so warps cannot wait for each other in a circle. */
#ifndef EPIC_LOWLAT_CUH
#define EPIC_LOWLAT_CUH

#include "cuda/net/staging.cuh"
#include "cuda/plan/view.cuh"

#ifndef LOWLAT_WORKERS
/* Number of workers (warps that move rows) per CTA. With the control warp, a CTA has 17 warps.
 * This leaves 96 registers per thread. */
#define LOWLAT_WORKERS 16
#endif
#define LOWLAT_BLOCK ((LOWLAT_WORKERS + 1) * WARP)

__device__ __forceinline__ bool is_control_warp()
{
    return threadIdx.x >= LOWLAT_WORKERS * WARP;
}

/* A range of CTAs, [first, first + ctas), whose workers share units of work: unit u goes to the
 * worker with the index u % num_workers(). Workers with consecutive indices are in different
 * CTAs, so that a small number of units is spread over many SMs. */
struct CtaRange {
    int first, ctas;

    __device__ __forceinline__ bool contains_this_cta() const
    {
        return (uint32_t)((int)blockIdx.x - first) < (uint32_t)ctas;
    }
    /* Index of this warp among the workers of all CTAs of the range. */
    __device__ __forceinline__ int worker_index() const
    {
        return worker_index_of((int)(threadIdx.x / WARP));
    }
    __device__ __forceinline__ int worker_index_of(int warp) const
    {
        return warp * ctas + (int)blockIdx.x - first;
    }
    __device__ __forceinline__ int num_workers() const
    {
        return LOWLAT_WORKERS * ctas;
    }
    /* Index of this thread among all threads of the range, including those of control warps. */
    __device__ __forceinline__ int64_t thread_index() const
    {
        return ((int64_t)blockIdx.x - first) * LOWLAT_BLOCK + threadIdx.x;
    }
    __device__ __forceinline__ int64_t num_threads() const
    {
        return (int64_t)ctas * LOWLAT_BLOCK;
    }
};

/* Prefetches the kernel's parameters, one line of 64 bytes per warp. Called at the start of a
 * kernel, so that the loads of all lines overlap. Without this call, the first use of each line
 * would wait for memory. */
template <class Job> __device__ __forceinline__ void prefetch_params(const Job &job)
{
    const int at = (int)(threadIdx.x / WARP) * 16;
    uint32_t word = 0;
    if (at < (int)sizeof job / 4) word = ((const uint32_t *)&job)[at];
    keep_in_registers(word);
}

/* Returns the number of bits that an index below n needs. Requires n >= 1. */
__device__ __forceinline__ int bits_of(int n)
{
    return 32 - __clz(n - 1);
}

/* The words that the control warp loads first when a kernel starts. */
struct StartState {
    uint32_t epoch; /* epoch of the last operation that this rank has finished */
    /* In lane 0: 1 if another operation of this rank still runs, which is an error
     * (mark_running()). */
    uint32_t overlaps;
    /* The word `broken`, the failure of the group, or 0. In backend `hosts`, `broken` is a copy
     * in device memory. If a kernel of this rank finds a failure in the net inbox
     * (net/net.cuh), it sets the copy. */
    uint64_t broken;
    /* Only in backend `hosts`. epochs: number of operations that this rank has finished. freed:
     * the net has read all data of this many operations from the outbox, so these data may be
     * overwritten. */
    uint64_t epochs, freed;
    /* Only in the last CTA of backend `hosts`: the word `broken` of the net inbox. If it is not
     * 0, finish_lowlat() does not count the operation as done. */
    uint64_t net_broken;
};

/* Reads StartState at the start of a kernel. Only control warps read it; other warps get
 * zeros. */
__device__ __forceinline__ StartState read_start_state(const p2p_self &self)
{
    StartState start = {};
    if (!is_control_warp()) return start;
    if (lane_id() == 0) start.overlaps = mark_running(self);
    start.epoch = load_relaxed(&control_of(self)->epoch);
    start.broken = read_broken(self);
    if (HOSTS) {
        start.epochs = load_relaxed(&control_of(self)->net->ended_epochs);
        start.freed = load_relaxed(&control_of(self)->net->freed);
        if (is_last_cta()) start.net_broken = read_net_broken(self);
    }
    return start;
}

/* Only in backend `hosts`: waits until the net has read all data of the last operation that
 * used the same half of the outbox. Called by the control warp. Returns false if the group has
 * failed. */
__device__ __forceinline__ bool wait_outbox_ready(const OpState &op, const StartState &start)
{
    if (!HOSTS) return true;
    const bool is_free = start.freed + 1 >= start.epochs || start.broken;
    return __all_sync(ALL_LANES, is_free || lane_id() || wait_outbox_free(op)) != 0;
}

/* Sends the sizes, a part of the announcement, to every rank: this rank's number of tokens, its
 * capacity in slots (0: no limit), and the number of rows of its receive buffer. Called by all
 * warps, but only the control warp of the last CTA sends. Does nothing in backend `hosts`,
 * where announce_start() sends the whole announcement with one put. */
__device__ __forceinline__ void announce_sizes(const p2p_self &self, const OpState &op,
                                               int32_t tokens, int32_t capacity, int32_t rows)
{
    if (HOSTS || !is_last_cta() || !is_control_warp() || !is_member(self, op, lane_id()))
        return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    store_relaxed(to + P2P_ANNOUNCED_TOKENS, stamp_word(op, (uint32_t)tokens));
    store_relaxed(to + P2P_ANNOUNCED_CAPACITY, stamp_word(op, (uint32_t)capacity));
    store_relaxed(to + P2P_ANNOUNCED_ROWS, stamp_word(op, (uint32_t)rows));
}

/* Returns whether this warp announces the operation. The announcing warp is worker 0 of the
 * last CTA. Exception: in backend `hosts`, if the kernel makes a plan (`plans` is true), the
 * announcing warp is the control warp of the last CTA. The announcing warp must execute a
 * system fence before announce_start(). It executes the fence at the start of the kernel,
 * because a fence takes long. */
__device__ __forceinline__ bool is_announcer(bool plans)
{
    return is_last_cta() && (HOSTS && plans ? is_control_warp() : threadIdx.x < WARP);
}

/* Sends the signature, the last word of the announcement, to every rank. Called by the
 * announcing warp (is_announcer()) after its system fence. Without the fence, a peer could read
 * the signature before it can see the poison that this rank stored in earlier operations. */
__device__ __forceinline__ void announce_start(const p2p_self &self, const OpState &op)
{
    if (!is_member(self, op, lane_id())) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    if (HOSTS) store_announced_sizes(op, to);
    store_relaxed(to + P2P_ANNOUNCED_SIGNATURE, stamp_word(op, op.signature));
    post_put(op, lane_id(), to, P2P_ANNOUNCE_WORDS * 8);
}

/* Initializes op, the state of the operation, except the signature (a hash of the arguments)
 * and the addresses in staging. `tokens`, `capacity` and `rows` are as in announce_sizes().
 * Called by the control warp. Returns false if the group had failed before this kernel. */
__device__ __forceinline__ bool open_lowlat(OpState &op, const p2p_self &self,
                                            const StartState &start, int32_t tokens,
                                            int32_t capacity, int32_t rows)
{
    bool is_intact = true;
    if (lane_id() == 0) {
        const uint64_t members = read_members(self);
        op.self = &self;
        op.heap = self.heap[self.rank];
        op.tokens = tokens;
        op.capacity = capacity;
        op.rows = rows;
        op.deadline = timer_ns() + self.timeout_ns;
        op.last = op.aborted_wait = 0;
        op.epoch = epoch_after(start.epoch);
        op.overlaps = start.overlaps;
        is_intact = set_members(op, members, start.broken);
        find_host_inbox(self, op);
    }
    return __all_sync(ALL_LANES, is_intact) != 0;
}

/* Stores in op where each peer's rows arrive in this rank's staging, and where this rank stores
 * rows for the peer. Called by the control warp. */
__device__ __forceinline__ void find_lowlat_boxes(OpState &op, const p2p_self &self)
{
    if (lane_id() < self.num_ranks) find_boxes(self, op, lane_id());
}

/* Waits until all ranks have announced their sizes. Lane q gets the sizes of rank q; lanes
 * without a rank get zeros. Called by one warp. Returns false if the group has failed. */
__device__ __forceinline__ bool wait_sizes(const p2p_self &self, const OpState &op,
                                           int32_t &tokens, int32_t &capacity, int32_t &rows)
{
    const int q = lane_id();
    const bool mine = is_member(self, op, q);
    const uint64_t *from = announcement_words(self, op, self.heap[self.rank], mine ? q : 0);
    uint64_t announced[P2P_ANNOUNCE_WORDS] = {};
    const bool ok = wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        bool all = true;
#pragma unroll
        for (int i = P2P_ANNOUNCED_TOKENS; i < P2P_ANNOUNCE_WORDS; i++)
            announced[i] = load_relaxed(from + i);
#pragma unroll
        for (int i = P2P_ANNOUNCED_TOKENS; i < P2P_ANNOUNCE_WORDS; i++)
            all &= is_stamped(op, announced[i]);
        return __all_sync(ALL_LANES, !mine || all) != 0;
    });
    tokens = mine ? (int32_t)(uint32_t)announced[P2P_ANNOUNCED_TOKENS] : 0;
    capacity = mine ? (int32_t)(uint32_t)announced[P2P_ANNOUNCED_CAPACITY] : 0;
    rows = mine ? (int32_t)(uint32_t)announced[P2P_ANNOUNCED_ROWS] : 0;
    return ok;
}

/* Counts this CTA as started. The last CTA advances the epoch only after all CTAs have started,
 * because each of them must read the old epoch. (In backend `hosts`, count_posted_warp() counts
 * warps instead.) Also reports an error if another operation of this rank is still running.
 * Called by all threads after the first barrier. One thread of the control warp does the work,
 * because the workers have rows to send. */
__device__ __forceinline__ void count_started_cta(const p2p_self &self, const OpState &op)
{
    if (threadIdx.x != LOWLAT_WORKERS * WARP) return;
    if (!HOSTS) atomicAdd(&control_of(self)->done, 1u);
    count_operation(self);
    report_overlap(op);
}

/* Only in backend `hosts`: counts this warp as one that has posted all its puts. Must be called
 * after the last put of the warp, because finish_lowlat() ends the operation after all warps
 * have been counted. */
__device__ __forceinline__ void count_posted_warp(const p2p_self &self)
{
    if (!HOSTS || lane_id() != 0) return;
    __threadfence();
    atomicAdd(&control_of(self)->done, 1u);
}

/* Ends the operation: advances the epoch, so that the next operation can start. Called by the
 * control warp of the last CTA. Before the warp advances the epoch, it does the following:
 *
 *   p2p    waits until all peers have announced the operation, and until all CTAs of this rank
 *          have started, because a CTA that starts later would read the new epoch
 *   hosts  waits until all warps of this rank have posted their puts (copies by the net),
 *          reports to the proxy thread that the epoch has no more puts, and waits until all
 *          peers have announced the operation
 *
 * are_copied: true if poll_inbox() has copied the peers' announcements from the net inbox to
 * the heap. */
__device__ __forceinline__ void finish_lowlat(const p2p_self &self, OpState &op,
                                              const StartState &start, bool are_copied)
{
    p2p_control *control = control_of(self);
    const auto all_begun = [&] {
        return __all_sync(ALL_LANES, load_relaxed(&control->done) ==
                                         gridDim.x * (HOSTS ? blockDim.x / WARP : 1)) != 0;
    };
    /* the group had failed before this kernel started */
    if (HOSTS && start.net_broken) {
        op.aborted_wait = WAIT_ABORTED(-1, P2P_PHASE_ARRIVE);
        return;
    }
    if (!HOSTS && !wait_announcements(self, op)) return;
    if (!wait_warp(op, -1, P2P_PHASE_GRID, all_begun)) return;
    if (HOSTS) {
        if (lane_id() == 0) post_epoch_end(op);
        refresh_freed(op);
        if (!wait_announcements_unfenced(self, op, are_copied)) return;
    }
    if (lane_id() == 0) complete_operation(control, op);
}

/* If a wait in this CTA was aborted, reports the cause to the host. Called by all threads at
 * the end of the kernel. */
__device__ __forceinline__ void end_lowlat(OpState &op)
{
    __syncthreads();
    if (threadIdx.x == 0 && op.aborted_wait) report_aborted_wait(op);
}

#endif
