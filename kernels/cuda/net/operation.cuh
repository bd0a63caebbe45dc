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
__device__ __forceinline__ void refuse_overlap(const Now &now)
{
    const p2p_self &self = *now.self;
    if (now.overlaps)
        report(now,
               P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, P2P_PHASE_OVERLAP,
                          1u << self.rank),
               0);
}

/* One thread, when no CTA reads the epoch any more. */
__device__ __forceinline__ void count_operation(p2p_control *control, const Now &now)
{
    control->done = 0;
    store_relaxed(&control->epoch, now.epoch);
    store_relaxed(&control->running, 0u); /* who finds that, finds the epoch */
}

/* What else an announcement says. */
__device__ __forceinline__ void store_sizes(const Now &now, uint64_t *to)
{
    store_relaxed(to + P2P_SAYS_TOKENS, stamp(now, (uint32_t)now.tokens));
    store_relaxed(to + P2P_SAYS_CAPACITY, stamp(now, (uint32_t)now.capacity));
    store_relaxed(to + P2P_SAYS_ROWS, stamp(now, (uint32_t)now.rows));
}

/* One warp: tells every rank, this one too, that the operation has begun here. */
static __device__ void announce(const p2p_self &self, const Now &now)
{
    if (lane_id() >= self.num_ranks) return;
    uint64_t *to = announcement(self, now, self.heap[lane_id()], self.rank);
    store_sizes(now, to);
    __threadfence_system(); /* what the operations before restored must be seen first */
    store_relaxed(to + P2P_SAYS_SIGNATURE, stamp(now, now.signature));
    ship(now, lane_id(), to, P2P_ANNOUNCE_WORDS * 8);
}

/* What this rank and rank q stage for each other in the running epoch. */
__device__ __forceinline__ void find_boxes(const p2p_self &self, Now &now, int q)
{
    const int peers = self.num_ranks - 1, first = parity(now) * peers;
    const int its = wrap(q + self.num_ranks - self.rank - 1, self.num_ranks);
    const int mine = wrap(self.rank + self.num_ranks - q - 1, self.num_ranks);
    now.inbox[q] = rows_by(self, q) + self.at.staging + (first + its) * self.at.source_bytes;
    now.outbox[q] = self.heap[q] + self.at.staging + (first + mine) * self.at.source_bytes;
#ifdef EPIC_HOSTS
    now.slow_box[q] = self.inbox + self.at.staging + (first + its) * self.at.source_bytes;
    now.brings[q] = (uint8_t)q;
    if (rows_by(self, q) == heap_by(self, q)) return;
    const int relay = self.rank - self.rank % self.local + q % self.local; /* of this host */
    if (relay != self.rank) now.brings[q] = (uint8_t)relay;
#endif
}

/* Every thread of every CTA.  `mark` is what the ranks must agree on beyond the signature (a
 * plan's id).  false: the group is broken, nothing is to be done; or the launch only loads the
 * kernel (operation EPIC_OP_NONE). */
static __device__ bool begin(Now &now, const p2p_self &self, uint32_t mark, int32_t tokens,
                             int32_t capacity, int32_t rows)
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
        now.tokens = tokens;
        now.capacity = capacity;
        now.rows = rows;
        now.self = &self;
        now.heap = self.heap[self.rank];
        const uint32_t overlaps = mark_running(self);
        const uint32_t ended = load_relaxed(&control_of(self)->epoch);
        now.overlaps = overlaps;
        now.epoch = epoch_after(ended);
        now.signature = self.signature ^ (mark & 0x0fffffffu);
        now.deadline = timer_ns() + self.timeout_ns;
        now.last = now.lost = 0;
        find_slow(self, now);
    }
    if (!__syncthreads_and(broken == 0)) {
        if (threadIdx.x == 0) tell_end(now);
        return false;
    }
    if (threadIdx.x < self.num_ranks) find_boxes(self, now, threadIdx.x);
    __syncthreads();
    if (HOSTS && !begin_shipping(now)) return false;
    /* nobody here waits for the warp that announces, and the last CTA does not plan */
    if (is_last_cta() && threadIdx.x < WARP) announce(self, now);
    if (threadIdx.x == 0) refuse_overlap(now);
    return true;
}

/* One warp: waits until every rank has announced, and called the same; who called another is found
 * while this waits.  What this kernel does afterwards may come before that for the peers.  `ported`:
 * all of it comes to the heap (lowlat/plan.cuh). */
__device__ __forceinline__ bool hear_all(const p2p_self &self, const Now &now,
                                         bool ported = false)
{
    const bool mine = lane_id() < self.num_ranks;
    const int q = mine ? lane_id() : 0;
    const uint64_t *from = announcement(self, now, ported ? now.heap : heap_by(self, q), q);
    return wait_until(now, -1, P2P_PHASE_ARRIVE, [&] {
        uint64_t said = load_relaxed(from + P2P_SAYS_SIGNATURE);
        /* nobody is two operations ahead: a word of this parity is at most this one's */
        INVARIANT(said == 0 || (int32_t)((uint32_t)(said >> 32) - now.epoch) <= 0);
        if (HOSTS && mine && !is_whole(now, from)) said = 0;
        return __all_sync(ALL_LANES, !mine || said == stamp(now, now.signature)) != 0;
    });
}

/* The same, and everything afterwards is behind it. */
__device__ __forceinline__ bool hear(const p2p_self &self, const Now &now)
{
    const bool ok = hear_all(self, now);
    fence_system(); /* once: a poll that acquires takes twice as long */
    return ok;
}

static __device__ bool hear(const Now &now)
{
    return hear(*now.self, now);
}

/* One warp, lane = rank: word `which` of that rank's announcement; 0 past the ranks. */
__device__ __forceinline__ bool heard(const p2p_self &self, const Now &now, int which,
                                      int32_t &value)
{
    const bool mine = lane_id() < self.num_ranks;
    const int q = mine ? lane_id() : 0;
    const uint64_t *from = announcement(self, now, heap_by(self, q), q) + which;
    uint64_t said = 0;
    const bool ok = wait_until(now, -1, P2P_PHASE_ARRIVE, [&] {
        said = HOSTS ? hear_for_all(now, from, which, q) : load_relaxed(from);
        return __all_sync(ALL_LANES, !mine || stamped(now, said)) != 0;
    });
    value = mine ? (int32_t)(uint32_t)said : 0;
    return ok;
}

static __device__ bool heard(const Now &now, int which, int32_t &value)
{
    return heard(*now.self, now, which, value);
}

/* Every thread of every CTA, at the end, where CTA `hears` hears the peers.  true in the CTA that was the
 * last to come, which may read what they have announced, if that is `read`. */
__device__ __forceinline__ bool finish(const p2p_self &self, Now &now, int hears, bool read)
{
    if ((int)blockIdx.x == hears && threadIdx.x / WARP == 1) look_freed(now);
    if ((int)blockIdx.x == hears && threadIdx.x < WARP)
        (void)(read ? hear(self, now) : hear_all(self, now));
    __syncthreads();
    if (threadIdx.x == 0) {
        p2p_control *control = control_of(self);
        if (now.lost) tell_end(now);
        __threadfence();
        now.last = atomicAdd(&control->done, 1u) == gridDim.x - 1;
        if (now.last) {
            end_shipping(now);
            count_operation(control, now);
        }
    }
    __syncthreads();
    return now.last != 0;
}

static __device__ bool finish(Now &now)
{
    return finish(*now.self, now, 0, true);
}

/* One warp of the grid. */
static __device__ void begin_round(Now &now)
{
    if (threadIdx.x == 0) now.epoch = epoch_after(now.epoch);
    __syncwarp();
    announce(*now.self, now);
    __syncwarp();
    if (threadIdx.x == 0) {
        __threadfence();
        store_release(&control_of(now)->round, now.epoch);
    }
}

/* Every thread of every CTA: ends a round of an operation that is larger than the staging, and
 * begins the next one, an epoch of its own.  false: the group is broken, in the round that was. */
static __device__ bool next_round(Now &now)
{
    __syncthreads();
    p2p_control *control = control_of(now);
    bool ok = true;
    if (threadIdx.x == 0) {
        __threadfence();
        now.last = atomicAdd(&control->done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (now.last && threadIdx.x < WARP) {
        ok = hear(now);
        if (threadIdx.x == 0) control->done = 0;
        if (HOSTS && ok) ok = turn_over(now);
        if (ok) begin_round(now);
    } else if (!now.last && threadIdx.x == 0) {
        const uint32_t next = epoch_after(now.epoch);
        ok = wait_alone(now, -1, P2P_PHASE_GRID,
                        [&] { return load_acquire(&control->round) == next; });
        if (ok) now.epoch = next;
    }
    if (threadIdx.x == 0)
        for (int q = 0; q < now.self->num_ranks; q++) find_boxes(*now.self, now, q);
    return __syncthreads_and(ok);
}

#endif
