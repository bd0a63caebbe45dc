/* SPDX-License-Identifier: Apache-2.0 */
/* All waiting: how an operation begins and ends, and how every spin ends when a peer does not
 * come.
 *
 * Operations are numbered by the epoch, which lives on the device so that a captured graph counts
 * on.  A rank announces epoch n when its kernel begins and ends it only after all peers have
 * announced n.  So in epoch n + 1 everything of parity (n + 1) & 1 that belongs to a peer is
 * free: the peer's operation n - 1, the last one to use it, had ended before it announced n.
 * Nothing else orders the ranks: data is its own flag.
 *
 * A group breaks once: who finds out (a deadline, a peer that calls something else) ends its CTA,
 * which writes the reason into the word `broken` of every rank; every spin looks at its rank's own.
 */
#ifndef EPIC_WAIT_CUH
#define EPIC_WAIT_CUH

#include "cuda/cuda_kernels.h"
#include "cuda/ptx.cuh"
#include "rules/invariant.h"

#define WARP 32
#define ALL_LANES 0xffffffffu
#define GRACE_NS 20000000ull /* after the deadline, for who knows the culprit to say so first */
#define TIME_TO_ASK 50u      /* between two reads of the host's memory, units of 1024 ns */

/* A wait that was given up: for whom, or -1, and where. */
#define LOST(peer, phase) ((uint32_t)((peer) + 1) << 8 | (uint32_t)(phase))

struct Now { /* the running operation, in shared memory */
    const p2p_self *self;
    uint8_t *heap;             /* this rank's */
    mutable uint64_t deadline; /* of this CTA's waits, unless something moves on this rank */
    uint32_t epoch, signature;
    int32_t tokens, capacity, rows;    /* what this rank announces */
    uint32_t last;                     /* this CTA is the last to finish */
    uint32_t overlaps;                 /* as mark_running says */
    mutable uint32_t lost;             /* LOST of a wait that was given up, 0: none */
    uint8_t *inbox[DEVICE_MAX_RANKS];  /* staging of this rank that another writes */
    uint8_t *outbox[DEVICE_MAX_RANKS]; /* staging of another that this rank writes */
#ifdef EPIC_HOSTS
    const uint8_t *slow;                 /* host memory where peers' words come, if they do, */
    int64_t slow_bytes;                  /* so much, */
    uint8_t *slow_box[DEVICE_MAX_RANKS]; /* and where there another's staging is */
    uint8_t brings[DEVICE_MAX_RANKS];    /* who brings another's rows */
#endif
};

__device__ __forceinline__ int lane_id()
{
    return threadIdx.x % WARP;
}

__device__ __forceinline__ bool is_last_cta()
{
    return blockIdx.x == gridDim.x - 1;
}

/* A rank counted past the last one. */
__device__ __forceinline__ int wrap(int rank, int num_ranks)
{
    return rank >= num_ranks ? rank - num_ranks : rank;
}

/* Epochs are 1 to 2^32 - 1 and then from 2 again, so that parities alternate; 0 is none: memory
 * that nobody has written yet is stamped with it. */
__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch)
{
    return epoch == 0xffffffffu ? 2 : epoch + 1;
}

__device__ __forceinline__ uint32_t parity(const Now &now)
{
    return now.epoch & 1;
}

/* What follows reads the self that it is given: through now.self each word is a load, some 500 ns. */
__device__ __forceinline__ p2p_control *control_of(const p2p_self &self)
{
    return (p2p_control *)(self.heap[self.rank] + self.at.control);
}

__device__ __forceinline__ p2p_control *control_of(const Now &now)
{
    return (p2p_control *)(now.heap + now.self->at.control);
}

__device__ __forceinline__ uint64_t stamp(const Now &now, uint32_t value)
{
    return (uint64_t)now.epoch << 32 | value;
}

__device__ __forceinline__ bool stamped(const Now &now, uint64_t word)
{
    return (uint32_t)(word >> 32) == now.epoch;
}

/* Where rank q stores what it tells this one.  hosts: ranks of this host store into the heap, this
 * one too; the net writes the inbox, which is laid out alike. */
__device__ __forceinline__ uint8_t *heap_by(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    if (!(self.near >> q & 1)) return self.inbox;
#endif
    return self.heap[self.rank];
}

__device__ __forceinline__ uint8_t *heap_by(const Now &now, int q)
{
#ifdef EPIC_HOSTS
    if (!(now.self->near >> q & 1)) return now.self->inbox;
#endif
    return now.heap;
}

/* Where rank q says what is no data but is so now (waits, broken, gone).  hosts: that goes by the
 * net to every rank. */
#ifdef EPIC_HOSTS
__device__ __forceinline__ uint8_t *told_by(const Now &now, int q)
{
    return q == now.self->rank ? now.heap : now.self->inbox;
}
#else
#define told_by(now, q) now.heap
#endif

/* The same in words of 8 bytes from this rank's heap, of what the first CTA keeps there for the others:
 * keep_counts. */
__device__ __forceinline__ int64_t words_apart(const Now &now, int q)
{
    return HOSTS && blockIdx.x == 0 ? (heap_by(now, q) - now.heap) / 8 : 0;
}

/* The same of rows: what comes by relays (relay.cuh), neighbours store. */
__device__ __forceinline__ uint8_t *rows_by(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    const bool relayed =
        self.operation == EPIC_OP_DISPATCH || self.operation == EPIC_OP_COMBINE_BACKWARD;
    if (self.local && relayed) return self.heap[self.rank];
#endif
    return heap_by(self, q);
}

/* For whom a wait for rank q's rows is: of what a relay has and does not hand on, q knows nothing. */
__device__ __forceinline__ int who_brings(const Now &now, int q)
{
#ifdef EPIC_HOSTS
    return now.brings[q];
#else
    return q;
#endif
}

/* hosts: is that host memory?  Each of its polls takes microseconds, and bandwidth from rows. */
__device__ __forceinline__ bool is_slow(const Now &now, const void *at)
{
#ifdef EPIC_HOSTS
    return (uint64_t)((const uint8_t *)at - now.slow) < (uint64_t)now.slow_bytes;
#else
    return false;
#endif
}

/* One thread. */
__device__ __forceinline__ void find_slow(const p2p_self &self, Now &now)
{
#ifdef EPIC_HOSTS
    now.slow = self.inbox;
    now.slow_bytes = self.slow;
#endif
}

/* What `rank` said to the rank that owns the heap. */
__device__ __forceinline__ uint64_t *announcement(const p2p_self &self, const Now &now,
                                                  uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + self.at.announce) +
           (parity(now) * DEVICE_MAX_RANKS + rank) * P2P_ANNOUNCE_WORDS;
}

__device__ __forceinline__ uint64_t *announcement(const Now &now, uint8_t *heap, int rank)
{
    return announcement(*now.self, now, heap, rank);
}

/* ------------------------------------------------------------------------------ failure ---- */

/* hosts: reads of one place of host memory by many warps are served one after the other, 1.1 us
 * each.  So one asks for all: is it this thread's turn, `pause` units of 1024 ns after the last? */
__device__ __forceinline__ bool may_ask(uint32_t *asked, uint32_t pause)
{
    const uint32_t time = (uint32_t)(timer_ns() >> 10), before = load_relaxed(asked);
    return time - before >= pause && atomicCAS(asked, before, time) == before;
}

/* hosts: so that all here know. */
__device__ __forceinline__ void keep_broken(const Now &now, uint64_t word)
{
#ifdef EPIC_HOSTS
    if (word) store_relaxed(&control_of(now)->broken, word);
#endif
}

/* Writes the status, once, and tells the peers if it was this rank that found out. */
static __device__ __noinline__ void report(const Now &now, uint64_t word, uint32_t theirs)
{
    const p2p_self &self = *now.self;
    if (atomicCAS(&control_of(now)->claim, 0u, 1u) != 0) return;
    p2p_status *status = self.status;
    status->operation = self.operation;
    status->epoch = now.epoch;
    status->phase = word >> 8 & 15;
    status->reporter = word >> 12 & 0xff;
    status->culprits = (uint32_t)(word >> 32);
    status->own_signature = now.signature;
    status->peer_signature = theirs;
    status->deadline_ms = (uint32_t)(self.timeout_ns / 1000000);
    __threadfence_system();
    *(volatile uint32_t *)&status->result = word & 15;
    keep_broken(now, word);
#pragma unroll 1
    for (int q = 0; q < self.num_ranks; q++)
        if (q == self.rank || (!HOSTS && (int)(word >> 12 & 0xff) == self.rank))
            store_relaxed((uint64_t *)(self.heap[q] + self.at.broken), word);
}

/* Tells the host of an error in the data, which ends nothing. */
static __device__ __noinline__ void notify(const p2p_self &self, const p2p_notice &said)
{
#pragma unroll 1
    for (int i = 0; i < P2P_NOTICES; i++) {
        volatile p2p_notice *to = &self.status->notices[i];
        if (to->result) continue;
        to->epoch = said.epoch;
        to->fault = said.fault;
        to->rank = said.rank;
        for (int j = 0; j < 4; j++) to->about[j] = said.about[j];
        __threadfence_system();
        to->result = said.result;
        return;
    }
}

/* hosts: the thread tells the peers. */
__device__ __forceinline__ void mirror_waits(const Now &now, uint64_t said)
{
#ifdef EPIC_HOSTS
    store_relaxed(&now.self->ring.words->waits, said);
#endif
}

/* For whom a rank says that it waits, as the rank that owns the heap has heard. */
__device__ __forceinline__ uint64_t *waits_of(const Now &now, uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + now.self->at.waits) + rank;
}

/* The same as bits; 0: it has not said so in this epoch. */
__device__ __forceinline__ uint32_t told_waits(const Now &now, int rank)
{
    const uint64_t said = load_relaxed(waits_of(now, told_by(now, rank), rank));
    return stamped(now, said) ? (uint32_t)said : 0;
}

/* Tells every rank for whom this one, late in the operation, waits: it is not at fault itself.
 * 0: for nobody any more. */
static __device__ void tell_waits(const Now &now, uint32_t peers)
{
    const p2p_self &self = *now.self;
#pragma unroll 1
    for (int q = 0; q < self.num_ranks; q++)
        if (!HOSTS || q == self.rank)
            store_relaxed(waits_of(now, self.heap[q], self.rank), stamp(now, peers));
    mirror_waits(now, stamp(now, peers));
}

/* Who keeps the group waiting: every rank that has not announced this epoch; or of those that were
 * waited for, those they wait for, and so on, the ones that wait for nobody. */
static __device__ uint32_t culprits(const Now &now, uint32_t awaited)
{
    const int num_ranks = now.self->num_ranks, own = now.self->rank;
    uint32_t missing = 0, waiting = 0, late = awaited;
#pragma unroll 1
    for (int q = 0; q < num_ranks; q++)
        if (q != own && !stamped(now, load_relaxed(announcement(now, heap_by(now, q), q))))
            missing |= 1u << q;
    if (missing) return missing;
#pragma unroll 1
    for (int i = 0; i < num_ranks * num_ranks; i++) {
        const int q = i % num_ranks;
        const uint32_t its = late >> q & 1 ? told_waits(now, q) : 0;
        if (its) waiting |= 1u << q;
        late |= its;
    }
    const uint32_t guilty = late & ~waiting & ~(1u << own);
    return guilty ? guilty : awaited;
}

/* Ranks whose processes have died, as the host tells.  A read of its memory takes microseconds, and a
 * thousand warps that wait for a late peer take milliseconds for theirs: so one reads for all. */
static __device__ uint32_t dead_ranks(const Now &now)
{
    p2p_control *control = control_of(now);
    const uint32_t time = (uint32_t)(timer_ns() >> 10), asked = load_relaxed(&control->asked);
    if (time - asked > TIME_TO_ASK && atomicCAS(&control->asked, asked, time) == asked)
        store_relaxed(&control->dead, load_relaxed(&now.self->status->dead));
    return load_relaxed(&control->dead);
}

/* What has ended the operation but its deadline, as a word of `broken`; 0: nothing. */
__device__ __forceinline__ uint64_t find_end(const Now &now, int phase, uint32_t &theirs)
{
    const p2p_self &self = *now.self;
    uint64_t word = load_relaxed((const uint64_t *)(now.heap + self.at.broken));
#ifdef EPIC_HOSTS
    if (!word) word = load_relaxed((const uint64_t *)(self.inbox + self.at.broken));
#endif
#pragma unroll 1
    for (int q = 0; q < self.num_ranks && !word; q++) {
        const uint64_t said = load_relaxed(announcement(now, heap_by(now, q), q));
        if (!stamped(now, said) || (uint32_t)said == now.signature) continue;
        theirs = (uint32_t)said;
        word = P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, phase, 1u << q);
    }
    const uint32_t dead = dead_ranks(now);
#pragma unroll 1
    for (int q = 0; q < self.num_ranks && !word; q++) {
        const uint64_t gone =
            load_relaxed((const uint64_t *)(told_by(now, q) + self.at.gone) + q);
        if (gone ? (int32_t)(now.epoch - (uint32_t)gone) > 0 : dead >> q & 1)
            word = P2P_BROKEN(EPIC_EPEER, self.operation, self.rank, phase, 1u << q);
    }
    return word;
}

#ifndef SPINS_TO_ASK
#define SPINS_TO_ASK 256u /* between two questions of a spin */
#endif

/* The clock of a device goes on while the host's process is stopped (Ctrl-Z, a frozen container), and
 * with it often all others, which then launch nothing.  So a deadline ends only when the host has shown
 * that it ran after it.  If the host was stopped meanwhile, the deadline starts anew: `moved` is now.
 * Returns true if deadlines up to `deadline` have passed.  One thread of the rank asks for all, as
 * reads of host memory take microseconds. */
static __device__ bool host_ran_after(const Now &now, uint64_t deadline, uint64_t time)
{
    p2p_control *control = control_of(now);
    if (may_ask(&control->late_asked, TIME_TO_ASK)) {
        const uint64_t awake = load_relaxed(&now.self->status->awake);
        const uint32_t beat = (uint32_t)awake, stops = (uint32_t)(awake >> 32);
        const uint64_t due = load_relaxed(&control->due);
        if (!awake) { /* no thread beats: the device's clock alone counts */
            store_relaxed(&control->overdue, time);
        } else if (stops != load_relaxed(&control->stops)) {
            const uint32_t put_off = load_relaxed(&control->put_off);
            store_relaxed(&control->stops, stops);
            store_relaxed(&control->due, (uint64_t)0);
            store_relaxed(&control->put_off, put_off + 1);
            if (put_off < P2P_PUT_OFF_LIMIT) store_relaxed(&control->moved, time);
        } else if (!due) {
            store_relaxed(&control->due_beat, beat);
            store_relaxed(&control->due, time);
        } else if (beat != load_relaxed(&control->due_beat)) {
            store_relaxed(&control->overdue, due);
            store_relaxed(&control->due, (uint64_t)0);
        }
    }
    return load_relaxed(&control->overdue) > deadline;
}

/* Late, as this CTA knows: is it too late?  What has moved elsewhere on this rank puts the deadline
 * off. */
static __device__ __noinline__ bool too_late(const Now &now, int peer)
{
    const p2p_self &self = *now.self;
    const uint64_t time = timer_ns(), moved = load_relaxed(&control_of(now)->moved);
    const uint64_t deadline = max(now.deadline, moved + self.timeout_ns);
    const uint32_t told = told_waits(now, self.rank);
    now.deadline = deadline;
    if (time > deadline) return host_ran_after(now, deadline, time);
    if (time <= deadline - self.timeout_ns / 4) {
        if (told) tell_waits(now, 0);
    } else if (peer >= 0 && peer != self.rank && !(told >> peer & 1)) {
        tell_waits(now, told | 1u << peer);
    }
    return false;
}

/* The same, for a spin: it has time. */
__device__ __forceinline__ bool has_ended(const Now &now, int phase)
{
    uint32_t theirs;
#ifdef EPIC_HOSTS
    p2p_control *control = control_of(now);
    if (load_relaxed(&control->broken)) return true;
    if (!may_ask(&control->asked_end, TIME_TO_ASK)) return false;
    const uint64_t word = find_end(now, phase, theirs);
    keep_broken(now, word);
    return word != 0;
#else
    return find_end(now, phase, theirs) != 0;
#endif
}

/* Polled by a spin from time to time: has the group failed, or the deadline passed?  `fresh`: the
 * first poll of a wait, so the wait before it has ended and something has moved, unless one was given
 * up here.  The diagnosis is left to the end of the CTA, so that spinning warps need few registers. */
static __device__ __noinline__ bool hopeless(const Now &now, int peer, int phase, bool fresh)
{
    const p2p_self &self = *now.self;
    const uint64_t time = timer_ns();
    if (fresh && !now.lost) {
        store_relaxed(&control_of(now)->moved, time);
        store_relaxed(&control_of(now)->put_off, 0u);
    }
    const bool late = time > now.deadline - self.timeout_ns / 4;
    const bool over = (late && too_late(now, peer)) || has_ended(now, phase);
    if (over) atomicMax(&now.lost, LOST(peer, phase));
    return over;
}

/* One thread: what ended the operation.  If it is the deadline and this wait was for no peer, who
 * knows the culprit may say so first; then those count that others here have waited for. */
static __device__ __noinline__ void tell_end(const Now &now)
{
    const p2p_self &self = *now.self;
    const int peer = (int)(now.lost >> 8) - 1, phase = now.lost & 255;
    for (;;) {
        const bool late = timer_ns() > now.deadline + GRACE_NS;
        uint32_t theirs = 0, awaited = late ? told_waits(now, self.rank) : 0;
        if (peer >= 0 && peer != self.rank) awaited = 1u << peer;
        uint64_t word = find_end(now, phase, theirs);
        const uint32_t guilty = word ? 0 : culprits(now, awaited);
        if (guilty || (late && !word))
            word = P2P_BROKEN(EPIC_ETIMEOUT, self.operation, self.rank, phase, guilty);
        if (word) return report(now, word, theirs);
    }
}

#ifndef EAGER
#define EAGER 0 /* 1: latency is all, and nothing else wants the memory */
#endif
#ifndef SPINS_TO_SLEEP
#define SPINS_TO_SLEEP (EAGER ? 64u : 4u)
#endif

/* Spins until `ready`, which is the same on all lanes of the warp.  false: the group is broken.
 * `peer`: each lane's, for whom it waits as `ready` may say, or -1. */
template <class Ready>
__device__ __forceinline__ bool wait_until(const Now &now, const int &peer, int phase,
                                           Ready ready)
{
    for (uint32_t spins = 1; !ready(); spins++) {
        if (spins > SPINS_TO_SLEEP) __nanosleep(min(spins * 20, 400u));
        if (spins % SPINS_TO_ASK == 0 &&
            __any_sync(ALL_LANES, hopeless(now, peer, phase, spins == SPINS_TO_ASK)))
            return false;
    }
    return true;
}

/* The same for one thread. */
template <class Ready>
__device__ __forceinline__ bool wait_alone(const Now &now, const int &peer, int phase,
                                           Ready ready)
{
    for (uint32_t spins = 1; !ready(); spins++) {
        if (spins > SPINS_TO_SLEEP) __nanosleep(min(spins * 20, 400u));
        if (spins % SPINS_TO_ASK == 0 && hopeless(now, peer, phase, spins == SPINS_TO_ASK))
            return false;
    }
    return true;
}

#include "cuda/net.cuh" /* it waits, and what follows ships */

/* ------------------------------------------------------------------------- begin and end ---- */

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
 * all of it comes to the heap (few_plan.cuh). */
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
