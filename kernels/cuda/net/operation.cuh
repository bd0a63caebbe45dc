/* SPDX-License-Identifier: Apache-2.0 */
/* How an operation begins and ends on the device, and how its rounds follow each other.
 *
 * Operations are numbered by the epoch, which lives on the device so that a captured graph counts
 * on.  A rank announces epoch n when its kernel begins and ends it only after all peers have
 * announced n.  So in epoch n + 1 everything of parity (n + 1) & 1 that belongs to a peer is
 * free: the peer's operation n - 1, the last one to use it, had ended before it announced n.
 * Nothing else orders the ranks: data is its own flag. */
#ifndef EPIC_OPERATION_CUH
#define EPIC_OPERATION_CUH

#include "cuda/net/net.cuh"

/* One thread of each CTA, before it reads the epoch: the first CTA marks that an operation runs.
 * 1: one does already, on a stream that has not waited.  CTAs begin in order, where those of that one
 * end and leave room: the last ones may find that it has ended. */
__device__ __forceinline__ uint32_t mark_running(const p2p_self &self)
{
    return blockIdx.x == 0 ? atomicOr(&control_of(self)->running, 1u) : 0;
}

/* One thread of each CTA: two at once break the group. */
__device__ __forceinline__ void report_overlap(const OpState &op)
{
    const p2p_self &self = *op.self;
    if (op.overlaps)
        report_failure(op,
                       P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, P2P_PHASE_OVERLAP,
                                  1u << self.rank),
                       0);
}

/* One thread, when no CTA reads the epoch any more. */
__device__ __forceinline__ void complete_operation(p2p_control *control, const OpState &op)
{
    control->done = 0;
    store_relaxed(&control->epoch, op.epoch);
    store_relaxed(&control->running, 0u); /* who finds that, finds the epoch */
}

/* What else an announcement says. */
__device__ __forceinline__ void store_announced_sizes(const OpState &op, uint64_t *to)
{
    store_relaxed(to + P2P_ANNOUNCED_TOKENS, stamp_word(op, (uint32_t)op.tokens));
    store_relaxed(to + P2P_ANNOUNCED_CAPACITY, stamp_word(op, (uint32_t)op.capacity));
    store_relaxed(to + P2P_ANNOUNCED_ROWS, stamp_word(op, (uint32_t)op.rows));
}

/* One warp: tells every rank, this one too, that the operation has begun here. */
static __device__ void announce_operation(const p2p_self &self, const OpState &op)
{
    if (lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement_words(self, op, self.heap[lane_id()], self.rank);
    store_announced_sizes(op, to);
    __threadfence_system(); /* what the operations before restored must be seen first */
    store_relaxed(to + P2P_ANNOUNCED_SIGNATURE, stamp_word(op, op.signature));
    post_put(op, lane_id(), to, P2P_ANNOUNCE_WORDS * 8);
}

/* What this rank and rank q stage for each other in the running epoch. */
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
    const int relay = self.rank - self.rank % self.local + q % self.local; /* of this host */
    if (relay != self.rank) op.relay[q] = (uint8_t)relay;
#endif
}

/* Every thread of every CTA.  `mark` is what the ranks must agree on beyond the signature (a
 * plan's id).  false: the group is broken, nothing is to be done; or the launch only loads the
 * kernel (operation EPIC_OP_NONE). */
static __device__ bool begin_operation(OpState &op, const p2p_self &self, uint32_t mark,
                                       int32_t tokens, int32_t capacity, int32_t rows)
{
    if (self.operation == EPIC_OP_NONE) return false;
#ifdef EPIC_HOSTS
    const p2p_control *control = (const p2p_control *)(self.heap[self.rank] + self.at.control);
    uint64_t broken = load_relaxed(&control->broken);
    if (!broken && blockIdx.x == 0 && threadIdx.x == 0) /* by the net; one asks for all */
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
    /* nobody here waits for the warp that announces, and the last CTA does not plan */
    if (is_last_cta() && threadIdx.x < WARP) announce_operation(self, op);
    if (threadIdx.x == 0) report_overlap(op);
    return true;
}

/* One warp: waits until every rank has announced, and called the same; who called another is found
 * while this waits.  What this kernel does afterwards may come before that for the peers.  `are_copied`:
 * all of it comes to the heap (lowlat/plan.cuh). */
__device__ __forceinline__ bool
wait_announcements_unfenced(const p2p_self &self, const OpState &op, bool are_copied = false)
{
    const bool mine = lane_id() < self.num_ranks;
    const int q = mine ? lane_id() : 0;
    const uint64_t *from =
        announcement_words(self, op, are_copied ? op.heap : inbox_base(self, q), q);
    return wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        uint64_t said = load_relaxed(from + P2P_ANNOUNCED_SIGNATURE);
        /* nobody is two operations ahead: a word of this parity is at most this one's */
        INVARIANT(said == 0 || (int32_t)((uint32_t)(said >> 32) - op.epoch) <= 0);
        if (HOSTS && mine && !is_announcement_complete(op, from)) said = 0;
        return __all_sync(ALL_LANES, !mine || said == stamp_word(op, op.signature)) != 0;
    });
}

/* The same, and everything afterwards is behind it. */
__device__ __forceinline__ bool wait_announcements(const p2p_self &self, const OpState &op)
{
    const bool ok = wait_announcements_unfenced(self, op);
    fence_system(); /* once: a poll that acquires takes twice as long */
    return ok;
}

static __device__ bool wait_announcements(const OpState &op)
{
    return wait_announcements(*op.self, op);
}

/* One warp, lane = rank: word `which` of that rank's announcement; 0 past the ranks. */
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

static __device__ bool read_announcement(const OpState &op, int which, int32_t &value)
{
    return read_announcement(*op.self, op, which, value);
}

/* Every thread of every CTA, at the end, where CTA `hears` hears the peers.  true in the CTA that was the
 * last to come, which may read what they have announced, if that is `read`. */
__device__ __forceinline__ bool finish_operation(const p2p_self &self, OpState &op, int hears,
                                                 bool read)
{
    if ((int)blockIdx.x == hears && threadIdx.x / WARP == 1) refresh_freed(op);
    if ((int)blockIdx.x == hears && threadIdx.x < WARP)
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

static __device__ bool finish_operation(OpState &op)
{
    return finish_operation(*op.self, op, 0, true);
}

/* One warp of the grid. */
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

/* Every thread of every CTA: ends a round of an operation that is larger than the staging, and
 * begins the next one, an epoch of its own.  false: the group is broken, in the round that was. */
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
