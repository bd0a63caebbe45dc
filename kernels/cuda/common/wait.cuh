/* SPDX-License-Identifier: Apache-2.0 */
/* All waiting: how every spin ends when a peer does not come.
 *
 * A group breaks once: who finds out (a deadline, a peer that calls something else) ends its CTA,
 * which writes the reason into the word `broken` of every rank; every spin looks at its rank's own.
 */
#ifndef EPIC_WAIT_CUH
#define EPIC_WAIT_CUH

#include "cuda/common/addressing.cuh"
#include "rules/invariant.h"

#define REPORT_GRACE_NS \
    20000000ull        /* after the deadline, for who knows the culprit to say so first */
#define POLL_PAUSE 50u /* between two reads of the host's memory, units of 1024 ns */

/* A wait that was given up: for whom, or -1, and where. */
#define WAIT_ABORTED(peer, phase) ((uint32_t)((peer) + 1) << 8 | (uint32_t)(phase))

/* ------------------------------------------------------------------------------ failure ---- */

/* hosts: reads of one place of host memory by many warps are served one after the other, 1.1 us
 * each.  So one asks for all: is it this thread's turn, `pause` units of 1024 ns after the last? */
__device__ __forceinline__ bool poll_permit(uint32_t *asked, uint32_t pause)
{
    const uint32_t time = (uint32_t)(timer_ns() >> 10), before = load_relaxed(asked);
    return time - before >= pause && atomicCAS(asked, before, time) == before;
}

/* hosts: so that all here know. */
__device__ __forceinline__ void cache_broken(const OpState &op, uint64_t word)
{
#ifdef EPIC_HOSTS
    if (word) store_relaxed(&control_of(op)->broken, word);
#endif
}

/* Writes the status, once, and tells the peers if it was this rank that found out. */
static __device__ __noinline__ void report_failure(const OpState &op, uint64_t word,
                                                   uint32_t theirs)
{
    const p2p_self &self = *op.self;
    if (atomicCAS(&control_of(op)->claim, 0u, 1u) != 0) return;
    p2p_status *status = self.status;
    status->operation = self.operation;
    status->epoch = op.epoch;
    status->phase = word >> 8 & 15;
    status->reporter = word >> 12 & 0xff;
    status->culprits = (uint32_t)(word >> 32);
    status->own_signature = op.signature;
    status->peer_signature = theirs;
    status->deadline_ms = (uint32_t)(self.timeout_ns / 1000000);
    __threadfence_system();
    *(volatile uint32_t *)&status->result = word & 15;
    cache_broken(op, word);
#pragma unroll 1
    for (int q = 0; q < self.num_ranks; q++)
        if (q == self.rank || (!HOSTS && (int)(word >> 12 & 0xff) == self.rank))
            store_relaxed((uint64_t *)(self.heap[q] + self.at.broken), word);
}

/* Tells the host of an error in the data, which ends nothing. */
static __device__ __noinline__ void report_data_error(const p2p_self &self,
                                                      const p2p_notice &said)
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
__device__ __forceinline__ void publish_waits(const OpState &op, uint64_t said)
{
#ifdef EPIC_HOSTS
    store_relaxed(&op.self->ring.words->waits, said);
#endif
}

/* For whom a rank says that it waits, as the rank that owns the heap has heard. */
__device__ __forceinline__ uint64_t *waits_address(const OpState &op, uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + op.self->at.waits) + rank;
}

/* The same as bits; 0: it has not said so in this epoch. */
__device__ __forceinline__ uint32_t read_waits(const OpState &op, int rank)
{
    const uint64_t said = load_relaxed(waits_address(op, status_base(op, rank), rank));
    return is_stamped(op, said) ? (uint32_t)said : 0;
}

/* Tells every rank for whom this one, late in the operation, waits: it is not at fault itself.
 * 0: for nobody any more. */
static __device__ void write_waits(const OpState &op, uint32_t peers)
{
    const p2p_self &self = *op.self;
#pragma unroll 1
    for (int q = 0; q < self.num_ranks; q++)
        if (!HOSTS || q == self.rank)
            store_relaxed(waits_address(op, self.heap[q], self.rank), stamp_word(op, peers));
    publish_waits(op, stamp_word(op, peers));
}

/* Who keeps the group waiting: every rank that has not announced this epoch; or of those that were
 * waited for, those they wait for, and so on, the ones that wait for nobody. */
static __device__ uint32_t find_culprits(const OpState &op, uint32_t awaited)
{
    const int num_ranks = op.self->num_ranks, own = op.self->rank;
    uint32_t missing = 0, waiting = 0, late = awaited;
#pragma unroll 1
    for (int q = 0; q < num_ranks; q++)
        if (q != own &&
            !is_stamped(op, load_relaxed(announcement_words(op, inbox_base(op, q), q))))
            missing |= 1u << q;
    if (missing) return missing;
#pragma unroll 1
    for (int i = 0; i < num_ranks * num_ranks; i++) {
        const int q = i % num_ranks;
        const uint32_t its = late >> q & 1 ? read_waits(op, q) : 0;
        if (its) waiting |= 1u << q;
        late |= its;
    }
    const uint32_t guilty = late & ~waiting & ~(1u << own);
    return guilty ? guilty : awaited;
}

/* Ranks whose processes have died, as the host tells.  A read of its memory takes microseconds, and a
 * thousand warps that wait for a late peer take milliseconds for theirs: so one reads for all. */
static __device__ uint32_t read_dead_ranks(const OpState &op)
{
    p2p_control *control = control_of(op);
    const uint32_t time = (uint32_t)(timer_ns() >> 10),
                   asked = load_relaxed(&control->dead_polled_at);
    if (time - asked > POLL_PAUSE && atomicCAS(&control->dead_polled_at, asked, time) == asked)
        store_relaxed(&control->dead, load_relaxed(&op.self->status->dead));
    return load_relaxed(&control->dead);
}

/* What has ended the operation but its deadline, as a word of `broken`; 0: nothing. */
__device__ __forceinline__ uint64_t find_failure(const OpState &op, int phase, uint32_t &theirs)
{
    const p2p_self &self = *op.self;
    uint64_t word = load_relaxed((const uint64_t *)(op.heap + self.at.broken));
    if (HOSTS && !word)
        word = load_relaxed((const uint64_t *)(net_inbox(self) + self.at.broken));
#pragma unroll 1
    for (int q = 0; q < self.num_ranks && !word; q++) {
        const uint64_t said = load_relaxed(announcement_words(op, inbox_base(op, q), q));
        if (!is_stamped(op, said) || (uint32_t)said == op.signature) continue;
        theirs = (uint32_t)said;
        word = P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, phase, 1u << q);
    }
    const uint32_t dead = read_dead_ranks(op);
#pragma unroll 1
    for (int q = 0; q < self.num_ranks && !word; q++) {
        const uint64_t gone =
            load_relaxed((const uint64_t *)(status_base(op, q) + self.at.gone) + q);
        if (gone ? (int32_t)(op.epoch - (uint32_t)gone) > 0 : dead >> q & 1)
            word = P2P_BROKEN(EPIC_EPEER, self.operation, self.rank, phase, 1u << q);
    }
    return word;
}

#ifndef SPINS_PER_CHECK
#define SPINS_PER_CHECK 256u /* between two questions of a spin */
#endif

/* The clock of a device goes on while the host's process is stopped (Ctrl-Z, a frozen container), and
 * with it often all others, which then launch nothing.  So a deadline ends only when the host has shown
 * that it ran after it.  If the host was stopped meanwhile, the deadline starts anew: `moved` is op.
 * Returns true if deadlines up to `deadline` have passed.  One thread of the rank asks for all, as
 * reads of host memory take microseconds. */
static __device__ bool has_host_run_after(const OpState &op, uint64_t deadline, uint64_t time)
{
    p2p_control *control = control_of(op);
    if (poll_permit(&control->awake_polled_at, POLL_PAUSE)) {
        const uint64_t awake = load_relaxed(&op.self->status->awake);
        const uint32_t beat = (uint32_t)awake, stops = (uint32_t)(awake >> 32);
        const uint64_t due = load_relaxed(&control->due);
        if (!awake) { /* no thread beats: the device's clock alone counts */
            store_relaxed(&control->overdue, time);
        } else if (stops != load_relaxed(&control->host_stops)) {
            const uint32_t num_postponed = load_relaxed(&control->num_postponed);
            store_relaxed(&control->host_stops, stops);
            store_relaxed(&control->due, (uint64_t)0);
            store_relaxed(&control->num_postponed, num_postponed + 1);
            if (num_postponed < P2P_POSTPONE_LIMIT) store_relaxed(&control->progress_ns, time);
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
static __device__ __noinline__ bool is_too_late(const OpState &op, int peer)
{
    const p2p_self &self = *op.self;
    const uint64_t time = timer_ns(), moved = load_relaxed(&control_of(op)->progress_ns);
    const uint64_t deadline = max(op.deadline, moved + self.timeout_ns);
    const uint32_t told = read_waits(op, self.rank);
    op.deadline = deadline;
    if (time > deadline) return has_host_run_after(op, deadline, time);
    if (time <= deadline - self.timeout_ns / 4) {
        if (told) write_waits(op, 0);
    } else if (peer >= 0 && peer != self.rank && !(told >> peer & 1)) {
        write_waits(op, told | 1u << peer);
    }
    return false;
}

/* The same, for a spin: it has time. */
__device__ __forceinline__ bool has_failed(const OpState &op, int phase)
{
    uint32_t theirs;
#ifdef EPIC_HOSTS
    p2p_control *control = control_of(op);
    if (load_relaxed(&control->broken)) return true;
    if (!poll_permit(&control->failure_polled_at, POLL_PAUSE)) return false;
    const uint64_t word = find_failure(op, phase, theirs);
    cache_broken(op, word);
    return word != 0;
#else
    return find_failure(op, phase, theirs) != 0;
#endif
}

/* Polled by a spin from time to time: has the group failed, or the deadline passed?  `fresh`: the
 * first poll of a wait, so the wait before it has ended and something has moved, unless one was given
 * up here.  The diagnosis is left to the end of the CTA, so that spinning warps need few registers. */
static __device__ __noinline__ bool wait_should_abort(const OpState &op, int peer, int phase,
                                                      bool fresh)
{
    const p2p_self &self = *op.self;
    const uint64_t time = timer_ns();
    if (fresh && !op.aborted_wait) {
        store_relaxed(&control_of(op)->progress_ns, time);
        store_relaxed(&control_of(op)->num_postponed, 0u);
    }
    const bool late = time > op.deadline - self.timeout_ns / 4;
    const bool over = (late && is_too_late(op, peer)) || has_failed(op, phase);
    if (over) atomicMax(&op.aborted_wait, WAIT_ABORTED(peer, phase));
    return over;
}

/* One thread: what ended the operation.  If it is the deadline and this wait was for no peer, who
 * knows the culprit may say so first; then those count that others here have waited for. */
static __device__ __noinline__ void report_aborted_wait(const OpState &op)
{
    const p2p_self &self = *op.self;
    const int peer = (int)(op.aborted_wait >> 8) - 1, phase = op.aborted_wait & 255;
    for (;;) {
        const bool late = timer_ns() > op.deadline + REPORT_GRACE_NS;
        uint32_t theirs = 0, awaited = late ? read_waits(op, self.rank) : 0;
        if (peer >= 0 && peer != self.rank) awaited = 1u << peer;
        uint64_t word = find_failure(op, phase, theirs);
        const uint32_t guilty = word ? 0 : find_culprits(op, awaited);
        if (guilty || (late && !word))
            word = P2P_BROKEN(EPIC_ETIMEOUT, self.operation, self.rank, phase, guilty);
        if (word) return report_failure(op, word, theirs);
    }
}

#ifndef LOW_LATENCY
#define LOW_LATENCY 0 /* 1: latency is all, and nothing else wants the memory */
#endif
#ifndef SPINS_TO_SLEEP
#define SPINS_TO_SLEEP (LOW_LATENCY ? 64u : 4u)
#endif

/* Spins until `ready`, which is the same on all lanes of the warp.  false: the group is broken.
 * `peer`: each lane's, for whom it waits as `ready` may say, or -1. */
template <class Ready>
__device__ __forceinline__ bool wait_warp(const OpState &op, const int &peer, int phase,
                                          Ready ready)
{
    for (uint32_t spins = 1; !ready(); spins++) {
        if (spins > SPINS_TO_SLEEP) __nanosleep(min(spins * 20, 400u));
        if (spins % SPINS_PER_CHECK == 0 &&
            __any_sync(ALL_LANES, wait_should_abort(op, peer, phase, spins == SPINS_PER_CHECK)))
            return false;
    }
    return true;
}

/* The same for one thread. */
template <class Ready>
__device__ __forceinline__ bool wait_thread(const OpState &op, const int &peer, int phase,
                                            Ready ready)
{
    for (uint32_t spins = 1; !ready(); spins++) {
        if (spins > SPINS_TO_SLEEP) __nanosleep(min(spins * 20, 400u));
        if (spins % SPINS_PER_CHECK == 0 &&
            wait_should_abort(op, peer, phase, spins == SPINS_PER_CHECK))
            return false;
    }
    return true;
}

#endif
