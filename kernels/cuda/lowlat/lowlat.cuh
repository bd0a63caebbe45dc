/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency kernels, for few tokens: the functions that all of them share.
 *
 * These kernels send rows like the general kernels (net/staging.cuh). So one rank can run a
 * low-latency kernel for an operation while a peer with more tokens runs the general one. Only
 * the begin and the end of an operation differ.
 *
 * A CTA has LOWLAT_WORKERS workers, which are warps that move rows, and one control warp, its
 * last warp. To announce an operation, a rank stores its sizes (tokens, capacity, rows) and its
 * signature to every rank. These are stamped words: they contain the epoch, which is the number
 * of the operation. "Last CTA" is the CTA with the highest blockIdx. Work that is done once per
 * CTA or once per operation:
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
/* Number of workers (warps that move rows) per CTA. With the control warp there are 17 warps,
 * which leaves 96 registers per thread. */
#define LOWLAT_WORKERS 16
#endif
#define LOWLAT_BLOCK ((LOWLAT_WORKERS + 1) * WARP)

/* Returns whether this thread is in the control warp, which is the last warp of the CTA. */
__device__ __forceinline__ bool is_control_warp()
{
    return threadIdx.x >= LOWLAT_WORKERS * WARP;
}

/* The CTAs [first, first + ctas), which share work of numbered units. Worker number u %
 * num_workers() does unit u. Workers with consecutive numbers are in different CTAs, so that
 * few units are spread over many SMs. */
struct CtaRange {
    int first, ctas;

    /* Returns whether this CTA is in the range. */
    __device__ __forceinline__ bool contains_this_cta() const
    {
        return (uint32_t)((int)blockIdx.x - first) < (uint32_t)ctas;
    }
    /* Returns the number of this warp among the workers of all CTAs of the range. */
    __device__ __forceinline__ int worker_index() const
    {
        return worker_index_of((int)(threadIdx.x / WARP));
    }
    /* Returns the number that warp `warp` of this CTA has among the workers of all CTAs of the
     * range. */
    __device__ __forceinline__ int worker_index_of(int warp) const
    {
        return warp * ctas + (int)blockIdx.x - first;
    }
    /* Returns how many workers the CTAs of the range have. */
    __device__ __forceinline__ int num_workers() const
    {
        return LOWLAT_WORKERS * ctas;
    }
    /* Returns the number of this thread among all threads of the CTAs of the range, control
     * warps included. */
    __device__ __forceinline__ int64_t thread_index() const
    {
        return ((int64_t)blockIdx.x - first) * LOWLAT_BLOCK + threadIdx.x;
    }
    /* Returns how many threads the CTAs of the range have, control warps included. */
    __device__ __forceinline__ int64_t num_threads() const
    {
        return (int64_t)ctas * LOWLAT_BLOCK;
    }
};

/* Prefetches the kernel's parameters: each warp loads one line of 64 bytes. Called first in a
 * kernel, so that all lines are loaded at the same time. Otherwise the first use of each line
 * would wait for memory. */
template <class Job> __device__ __forceinline__ void prefetch_params(const Job &job)
{
    const int at = (int)(threadIdx.x / WARP) * 16;
    uint32_t word = 0;
    if (at < (int)sizeof job / 4) word = ((const uint32_t *)&job)[at];
    keep_in_registers(word);
}

/* Returns how many bits are needed to write the numbers 0 to n - 1. */
__device__ __forceinline__ int bits_of(int n)
{
    return 32 - __clz(n - 1);
}

/* The words that the control warp (the last warp of a CTA) loads first when a kernel starts. */
struct StartState {
    uint32_t epoch; /* number of the last operation that has ended on this rank */
    /* In lane 0: 1 if another operation of this rank is already running, which is an error
     * (mark_running()). */
    uint32_t overlaps;
    /* The failure of the group (P2P_BROKEN()), or 0. In backend `hosts`, this is a copy of a
     * word in the net inbox, with only those failures that a kernel of this rank has already
     * seen. Waits also poll the original. */
    uint64_t broken;
    /* Only in backend `hosts`. epochs: number of operations of this rank that have ended.
     * freed: number of those of which the net has read all data from the outbox, so that their
     * part may be written again. */
    uint64_t epochs, freed;
    /* Only in backend `hosts` and in the last CTA: the original of `broken`, in the net inbox.
     * If it is set, finish_lowlat() does not count the operation as done. */
    uint64_t net_broken;
};

/* Reads the words of StartState. Called by all warps at the start of a kernel; all but the
 * control warp get zeros. */
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

/* Only in backend `hosts`: waits until this rank may write to its outbox, that is, until the
 * net has read all data of the last operation that used this half. Called by the control warp.
 * Returns false if the group has failed. */
__device__ __forceinline__ bool wait_outbox_ready(const OpState &op, const StartState &start)
{
    if (!HOSTS) return true;
    const bool is_free = start.freed + 1 >= start.epochs || start.broken;
    return __all_sync(ALL_LANES, is_free || lane_id() || wait_outbox_free(op)) != 0;
}

/* Sends the sizes in this rank's announcement to every rank. `tokens`: number of this rank's
 * tokens. `capacity`: number of slots of its receive buffer; 0: no limit. `rows`: number of
 * rows of its receive buffer. Called by all warps; the control warp of the last CTA sends. Does
 * nothing in backend `hosts`, where announce_start() sends the whole announcement with one put.
 */
__device__ __forceinline__ void announce_sizes(const p2p_self &self, const OpState &op,
                                               int32_t tokens, int32_t capacity, int32_t rows)
{
    if (HOSTS || !is_last_cta() || !is_control_warp() || lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    store_relaxed(to + P2P_ANNOUNCED_TOKENS, stamp_word(op, (uint32_t)tokens));
    store_relaxed(to + P2P_ANNOUNCED_CAPACITY, stamp_word(op, (uint32_t)capacity));
    store_relaxed(to + P2P_ANNOUNCED_ROWS, stamp_word(op, (uint32_t)rows));
}

/* Returns whether this warp announces the operation. That is worker 0 of the last CTA or, if
 * the kernel makes a plan (`plans`) in backend `hosts`, its control warp, because the plan
 * waits for the announcement. The warp must execute a system fence before announce_start(). It
 * does so when the kernel starts, because a fence takes long. */
__device__ __forceinline__ bool is_announcer(bool plans)
{
    return is_last_cta() && (HOSTS && plans ? is_control_warp() : threadIdx.x < WARP);
}

/* Sends the operation's signature, the last word of the announcement, to every rank. Called by
 * the announcing warp, after its system fence. Without the fence, a peer could read the
 * signature but not yet see the poison that this rank's earlier operations have stored. */
__device__ __forceinline__ void announce_start(const p2p_self &self, const OpState &op)
{
    if (lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    if (HOSTS) store_announced_sizes(op, to);
    store_relaxed(to + P2P_ANNOUNCED_SIGNATURE, stamp_word(op, op.signature));
    post_put(op, lane_id(), to, P2P_ANNOUNCE_WORDS * 8);
}

/* Sets the fields of op, the state of the operation, except the signature (a hash of the
 * arguments) and the addresses in staging. `tokens`, `capacity`, `rows`: the sizes that this
 * rank announces. Called by the control warp. */
__device__ __forceinline__ void open_lowlat(OpState &op, const p2p_self &self,
                                            const StartState &start, int32_t tokens,
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
        op.epoch = epoch_after(start.epoch);
        op.overlaps = start.overlaps;
        find_host_inbox(self, op);
    }
    __syncwarp();
}

/* Sets in op, for each peer, where its rows arrive in this rank's staging, and where this
 * rank's rows go in the peer's staging. Called by the control warp. */
__device__ __forceinline__ void find_lowlat_boxes(OpState &op, const p2p_self &self)
{
    if (lane_id() < self.num_ranks) find_boxes(self, op, lane_id());
}

/* Waits for the sizes that all ranks announce. Lane q gets the sizes of rank q; a lane without
 * a rank gets zeros. Called by one warp. Returns false if the group has failed. */
__device__ __forceinline__ bool wait_sizes(const p2p_self &self, const OpState &op,
                                           int32_t &tokens, int32_t &capacity, int32_t &rows)
{
    const int q = lane_id();
    const bool mine = q < self.num_ranks;
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

/* Counts this CTA as started, because the last CTA may advance the epoch (operation number)
 * only after all CTAs have read it. (In backend `hosts`, count_posted_warp() counts warps
 * instead.) Also reports a failure if another operation of this rank runs at the same time.
 * Called by all threads after the first barrier. A thread of the control warp does the work,
 * because the workers have rows to send. */
__device__ __forceinline__ void count_started_cta(const p2p_self &self, const OpState &op)
{
    if (threadIdx.x != LOWLAT_WORKERS * WARP) return;
    if (!HOSTS) atomicAdd(&control_of(self)->done, 1u);
    count_operation(self);
    report_overlap(op);
}

/* Only in backend `hosts`: counts this warp, after its last put. finish_lowlat() waits until
 * all warps are counted. */
__device__ __forceinline__ void count_posted_warp(const p2p_self &self)
{
    if (!HOSTS || lane_id() != 0) return;
    __threadfence();
    atomicAdd(&control_of(self)->done, 1u);
}

/* Ends the operation by advancing the epoch. Called by the control warp of the last CTA. Before
 * the epoch advances, the function does this:
 *
 *   p2p    waits until all peers have announced the operation, and until all CTAs of this rank
 *          have started; otherwise a CTA that starts late would read the new epoch
 *   hosts  waits until all warps of this rank have posted their puts, reports to the proxy thread
 *          that the epoch has no more puts, and waits until all peers have announced the operation
 *
 * are_copied: true if poll_inbox() has copied the peers' announcements to the heap. */
__device__ __forceinline__ void finish_lowlat(const p2p_self &self, OpState &op,
                                              const StartState &start, bool are_copied)
{
    p2p_control *control = control_of(self);
    const auto all_begun = [&] {
        return __all_sync(ALL_LANES, load_relaxed(&control->done) ==
                                         gridDim.x * (HOSTS ? blockDim.x / WARP : 1)) != 0;
    };
    /* The group had already failed when this kernel started, so the operation must not count as
     * done. */
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

/* Returns whether the receive buffer of every rank has a row for each of its slots in the plan.
 * Also returns true if the group has failed, which is reported elsewhere. Called by the control
 * warp. */
__device__ __forceinline__ bool have_all_rows(const p2p_self &self, const OpState &op,
                                              const device_plan_header &h)
{
    int32_t rows = 0;
    const int q = lane_id(), num_ranks = self.num_ranks;
    return !read_announcement(self, op, P2P_ANNOUNCED_ROWS, rows) ||
           __all_sync(ALL_LANES, q >= num_ranks || h.slots_of[q] <= rows) != 0;
}

/* Returns true in the CTA that calls it last. Called by all threads of `ctas` CTAs, after their
 * last store. The last CTA can then safely overwrite the stores of the others. */
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

/* Called by all threads of all CTAs if the receive buffer of any rank has too few rows. Returns
 * true in the CTA that calls it last, which also reports the rank to the host. */
static __device__ bool is_last_cta_of_overflow(OpState &op, const device_plan_header &h)
{
    if (is_last_cta_to_end(op, (int)gridDim.x))
        (void)check_rows(*op.self, op, &h, threadIdx.x == 0);
    return op.last != 0;
}

/* Reports the cause to the host if a wait in this CTA was given up. Called by all threads at
 * the end of the kernel. */
__device__ __forceinline__ void end_lowlat(OpState &op)
{
    __syncthreads();
    if (threadIdx.x == 0 && op.aborted_wait) report_aborted_wait(op);
}

#endif
