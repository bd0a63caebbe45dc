/* SPDX-License-Identifier: Apache-2.0 */
/* The begin and end of an operation on the device, and of its rounds.
 *
 * Operations are counted by the epoch. It is kept on the device, so that a captured graph
 * continues to count. The protocol of an epoch n on one rank:
 *
 *   begin    read the epoch; all CTAs set op.epoch = n
 *   announce last CTA: store the sizes, system fence, store {n, signature} to all ranks.
 *            Everything that kernel n - 1 restored is visible before the signature.
 *   work     data is its own flag: nothing else orders the ranks
 *   finish   one warp waits for {n, signature} of all ranks, system fence; the last CTA to
 *            come stores the epoch and leaves
 *
 * A rank ends epoch n only after all peers have announced n. So in epoch n + 1 all memory of
 * parity (n + 1) & 1 is free: the last operation to use it was n - 1, and its owner had ended
 * that one before it announced n. */
#ifndef EPIC_OPERATION_CUH
#define EPIC_OPERATION_CUH

#include "cuda/net/net.cuh"

/* Marks that an operation runs; the first CTA does it, one thread of each CTA calls it before
 * it reads the epoch. Returns 1 if another operation runs already, on a stream that has not
 * waited for it. CTAs start in order, so the last CTAs of the second one may find that the
 * first one has ended. */
__device__ __forceinline__ uint32_t mark_running(const p2p_self &self)
{
    return blockIdx.x == 0 ? atomicOr(&control_of(self)->running, 1u) : 0;
}

/* Breaks the group if two operations run at once. One thread of each CTA. */
__device__ __forceinline__ void report_overlap(const OpState &op)
{
    const p2p_self &self = *op.self;
    if (op.overlaps)
        report_failure(op,
                       P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, P2P_PHASE_OVERLAP,
                                  1u << self.rank),
                       0);
}

/* Counts the operation. One thread, when no CTA reads the epoch any more. */
__device__ __forceinline__ void complete_operation(p2p_control *control, const OpState &op)
{
    control->done = 0;
    store_relaxed(&control->epoch, op.epoch);
    store_relaxed(&control->running, 0u); /* a thread that sees 0 also sees the epoch */
}

/* Stores the sizes of an announcement. */
__device__ __forceinline__ void store_announced_sizes(const OpState &op, uint64_t *to)
{
    store_relaxed(to + P2P_ANNOUNCED_TOKENS, stamp_word(op, (uint32_t)op.tokens));
    store_relaxed(to + P2P_ANNOUNCED_CAPACITY, stamp_word(op, (uint32_t)op.capacity));
    store_relaxed(to + P2P_ANNOUNCED_ROWS, stamp_word(op, (uint32_t)op.rows));
}

/* Announces to every rank, this one included, that the operation has begun here. One warp. */
static __device__ void announce_operation(const p2p_self &self, const OpState &op)
{
    if (lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    store_announced_sizes(op, to);
    /* makes what earlier operations restored visible before the announcement */
    __threadfence_system();
    store_relaxed(to + P2P_ANNOUNCED_SIGNATURE, stamp_word(op, op.signature));
    post_put(op, lane_id(), to, P2P_ANNOUNCE_WORDS * 8);
}

/* Sets the staging that this rank and rank q use for each other in the running epoch. */
__device__ __forceinline__ void find_boxes(const p2p_self &self, OpState &op, int q)
{
    const int peers = self.num_ranks - 1, first = epoch_parity(op) * peers;
    const int its = wrap_rank(q + self.num_ranks - self.rank - 1, self.num_ranks);
    const int mine = wrap_rank(self.rank + self.num_ranks - q - 1, self.num_ranks);
    op.inbox[q] =
        row_inbox_base(self, q) + self.at.staging + (first + its) * self.at.source_bytes;
    op.outbox[q] = self.heap[q] + self.at.staging + (first + mine) * self.at.source_bytes;
#ifdef EPIC_HOSTS
    op.host_box[q] = self.inbox + self.at.staging + (first + its) * self.at.source_bytes;
    op.relay[q] = (uint8_t)q;
    if (row_inbox_base(self, q) == inbox_base(self, q)) return;
    /* the rank of this host that relays for q */
    const int relay = self.rank - self.rank % self.local + q % self.local;
    if (relay != self.rank) op.relay[q] = (uint8_t)relay;
#endif
}

/* Begins an operation. All threads of all CTAs. `mark`: what the ranks must agree on besides
 * the signature (the id of a plan). Returns false if the group is broken, or if the launch only
 * loads the kernel (EPIC_OP_NONE). */
static __device__ bool begin_operation(OpState &op, const p2p_self &self, uint32_t mark,
                                       int32_t tokens, int32_t capacity, int32_t rows)
{
    if (self.operation == EPIC_OP_NONE) return false;
#ifdef EPIC_HOSTS
    const p2p_control *control = (const p2p_control *)(self.heap[self.rank] + self.at.control);
    uint64_t broken = load_relaxed(&control->broken);
    /* the net writes it; one thread reads it for all */
    if (!broken && blockIdx.x == 0 && threadIdx.x == 0)
        broken = load_relaxed((const uint64_t *)(self.inbox + self.at.broken));
#else
    const uint64_t broken =
        load_relaxed((const uint64_t *)(self.heap[self.rank] + self.at.broken));
#endif
    if (threadIdx.x == 0) {
        op.tokens = tokens;
        op.capacity = capacity;
        op.rows = rows;
        op.self = &self;
        op.heap = self.heap[self.rank];
        const uint32_t overlaps = mark_running(self);
        const uint32_t ended = load_relaxed(&control_of(self)->epoch);
        op.overlaps = overlaps;
        op.epoch = epoch_after(ended);
        op.signature = self.signature ^ (mark & 0x0fffffffu);
        op.deadline = timer_ns() + self.timeout_ns;
        op.last = op.aborted_wait = 0;
        find_host_inbox(self, op);
    }
    if (!__syncthreads_and(broken == 0)) {
        if (threadIdx.x == 0) report_aborted_wait(op);
        return false;
    }
    if (threadIdx.x < self.num_ranks) find_boxes(self, op, threadIdx.x);
    __syncthreads();
    if (HOSTS && !wait_outbox(op)) return false;
    /* the first warp of the last CTA: no warp waits for it, and that CTA does not plan */
    if (is_last_cta() && threadIdx.x < WARP) announce_operation(self, op);
    if (threadIdx.x == 0) report_overlap(op);
    return true;
}

/* Waits until every rank has announced the same call; a wait finds a rank that announced
 * another one. One warp. Gives no memory order: peers may see later stores of this kernel
 * first. `are_copied`: announcements have been copied to the heap (lowlat/plan.cuh). */
__device__ __forceinline__ bool
wait_announcements_unfenced(const p2p_self &self, const OpState &op, bool are_copied = false)
{
    const bool mine = lane_id() < self.num_ranks;
    const int q = mine ? lane_id() : 0;
    const uint64_t *from =
        announcement_words(self, op, are_copied ? op.heap : inbox_base(self, q), q);
    return wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        uint64_t said = load_relaxed(from + P2P_ANNOUNCED_SIGNATURE);
        /* no rank is two operations ahead, so a word of this parity is at most this old */
        INVARIANT(said == 0 || (int32_t)((uint32_t)(said >> 32) - op.epoch) <= 0);
        if (HOSTS && mine && !is_announcement_complete(op, from)) said = 0;
        return __all_sync(ALL_LANES, !mine || said == stamp_word(op, op.signature)) != 0;
    });
}

/* Like wait_announcements_unfenced(), and orders everything after it behind the announcements.
 */
__device__ __forceinline__ bool wait_announcements(const p2p_self &self, const OpState &op)
{
    const bool ok = wait_announcements_unfenced(self, op);
    fence_system(); /* one fence: polls with acquire take twice as long */
    return ok;
}

/* For kernels that do not keep p2p_self in registers: reads it through the OpState. */
static __device__ bool wait_announcements(const OpState &op)
{
    return wait_announcements(*op.self, op);
}

/* Waits for word `which` of every rank's announcement; lane = rank. One warp. Lanes past the
 * ranks get 0. */
__device__ __forceinline__ bool read_announcement(const p2p_self &self, const OpState &op,
                                                  int which, int32_t &value)
{
    const bool mine = lane_id() < self.num_ranks;
    const int q = mine ? lane_id() : 0;
    const uint64_t *from = announcement_words(self, op, inbox_base(self, q), q) + which;
    uint64_t said = 0;
    const bool ok = wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        said = HOSTS ? read_announcement_cached(op, from, which, q) : load_relaxed(from);
        return __all_sync(ALL_LANES, !mine || is_stamped(op, said)) != 0;
    });
    value = mine ? (int32_t)(uint32_t)said : 0;
    return ok;
}

/* For kernels that do not keep p2p_self in registers: reads it through the OpState. */
static __device__ bool read_announcement(const OpState &op, int which, int32_t &value)
{
    return read_announcement(*op.self, op, which, value);
}

/* Ends an operation. All threads of all CTAs. CTA `waiting_cta` waits for the peers'
 * announcements. Returns true in the CTA that comes last; with `read` it may read what the
 * peers announced. */
__device__ __forceinline__ bool finish_operation(const p2p_self &self, OpState &op,
                                                 int waiting_cta, bool read)
{
    if ((int)blockIdx.x == waiting_cta && threadIdx.x / WARP == 1) refresh_freed(op);
    if ((int)blockIdx.x == waiting_cta && threadIdx.x < WARP)
        (void)(read ? wait_announcements(self, op) : wait_announcements_unfenced(self, op));
    __syncthreads();
    if (threadIdx.x == 0) {
        p2p_control *control = control_of(self);
        if (op.aborted_wait) report_aborted_wait(op);
        __threadfence();
        op.last = atomicAdd(&control->done, 1u) == gridDim.x - 1;
        if (op.last) {
            post_epoch_end(op);
            complete_operation(control, op);
        }
    }
    __syncthreads();
    return op.last != 0;
}

/* For most kernels: CTA 0 waits, and the last CTA may read what peers announced. */
static __device__ bool finish_operation(OpState &op)
{
    return finish_operation(*op.self, op, 0, true);
}

/* Begins the next round: advances the epoch, announces it, and releases the other CTAs. One
 * warp. */
static __device__ void begin_round(OpState &op)
{
    if (threadIdx.x == 0) op.epoch = epoch_after(op.epoch);
    __syncwarp();
    announce_operation(*op.self, op);
    __syncwarp();
    if (threadIdx.x == 0) {
        __threadfence();
        store_release(&control_of(op)->round, op.epoch);
    }
}

/* Ends a round of an operation that needs more staging than there is, and begins the next
 * round, which is an epoch of its own. All threads of all CTAs. false: the group is broken. */
static __device__ bool next_round(OpState &op)
{
    __syncthreads();
    p2p_control *control = control_of(op);
    bool ok = true;
    if (threadIdx.x == 0) {
        __threadfence();
        op.last = atomicAdd(&control->done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (op.last && threadIdx.x < WARP) {
        ok = wait_announcements(op);
        if (threadIdx.x == 0) control->done = 0;
        if (HOSTS && ok) ok = end_round_puts(op);
        if (ok) begin_round(op);
    } else if (!op.last && threadIdx.x == 0) {
        const uint32_t next = epoch_after(op.epoch);
        ok = wait_thread(op, -1, P2P_PHASE_GRID,
                         [&] { return load_acquire(&control->round) == next; });
        if (ok) op.epoch = next;
    }
    if (threadIdx.x == 0)
        for (int q = 0; q < op.self->num_ranks; q++) find_boxes(*op.self, op, q);
    return __syncthreads_and(ok);
}

#endif
