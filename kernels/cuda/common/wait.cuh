/* SPDX-License-Identifier: Apache-2.0 */
/* Every wait on the device: polling, deadlines, and the diagnosis when a peer does not come.
 *
 * A waiting warp polls its word. Every SPINS_PER_CHECK polls it calls wait_should_abort(),
 * which looks for a failure of the group and for the deadline. If the wait is given up, the CTA
 * ends, and one of its threads finds the cause (report_aborted_wait) and reports it:
 *
 *   1. it claims `control.claim`, so that one thread of the rank reports
 *   2. it writes the fields of `status`, then a system fence, then status.result:
 *      the host reads result first and so sees all fields
 *   3. it stores `broken` into the heap of every rank; every check of a wait reads its own
 *
 * A group breaks once. All later operations find `broken` and return at once. */
#ifndef EPIC_WAIT_CUH
#define EPIC_WAIT_CUH

#include "cuda/common/addressing.cuh"
#include "rules/invariant.h"

/* Time after the deadline in which a rank that knows the culprit may report first. */
#define REPORT_GRACE_NS 20000000ull
#define POLL_PAUSE 50u /* least time between two reads of host memory, in units of 1024 ns */

/* Encodes a wait that was given up: the peer that it was for, or -1, and a p2p_phase. */
#define WAIT_ABORTED(peer, phase) ((uint32_t)((peer) + 1) << 8 | (uint32_t)(phase))

/* ----------------------------------------------------------------------------- failure ---- */

/* Returns true to one thread per `pause` units of 1024 ns; `polled_at` holds the time of the
 * last permit. Reads of one host address by many warps are served one after the other, 1.1 us
 * each, so one thread reads for all. */
__device__ __forceinline__ bool poll_permit(uint32_t *asked, uint32_t pause)
{
    const uint32_t time = (uint32_t)(timer_ns() >> 10), before = load_relaxed(asked);
    return time - before >= pause && atomicCAS(asked, before, time) == before;
}

/* backend hosts: copies a failure into control memory, where all warps of this rank look. */
__device__ __forceinline__ void cache_broken(const OpState &op, uint64_t word)
{
#ifdef EPIC_HOSTS
    if (word) store_relaxed(&control_of(op)->broken, word);
#endif
}

/* Writes the status for the host, once per rank, and stores `broken` into the heaps of all
 * ranks if this rank found the failure. `theirs`: the signature of a peer that called something
 * else, or 0. */
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

/* Adds an error in the data to the notices that the host reads; it does not break the group.
 * Drops it if all P2P_NOTICES are unread. */
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

/* backend hosts: gives the word to the proxy thread, which sends it to the peers. */
__device__ __forceinline__ void publish_waits(const OpState &op, uint64_t said)
{
#ifdef EPIC_HOSTS
    store_relaxed(&op.self->ring.words->waits, said);
#endif
}

/* The word in a heap in which `rank` publishes for which ranks it waits. */
__device__ __forceinline__ uint64_t *waits_address(const OpState &op, uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + op.self->at.waits) + rank;
}

/* The ranks for which `rank` waits, as bits; 0 if it has not published any in this epoch. */
__device__ __forceinline__ uint32_t read_waits(const OpState &op, int rank)
{
    const uint64_t said = load_relaxed(waits_address(op, status_base(op, rank), rank));
    return is_stamped(op, said) ? (uint32_t)said : 0;
}

/* Publishes to every rank that this rank waits for `peers` (bits; 0: for none), so that it is
 * not blamed. Called late in the time limit. */
static __device__ void write_waits(const OpState &op, uint32_t peers)
{
    const p2p_self &self = *op.self;
#pragma unroll 1
    for (int q = 0; q < self.num_ranks; q++)
        if (!HOSTS || q == self.rank)
            store_relaxed(waits_address(op, self.heap[q], self.rank), stamp_word(op, peers));
    publish_waits(op, stamp_word(op, peers));
}

/* The ranks that keep the group waiting: those that have not announced this epoch. If all have,
 * follows the published waits from `awaited` to the ranks that wait for no other. */
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

/* Ranks whose processes have died, as bits. The host writes them into its memory. A read there
 * takes microseconds, and milliseconds if a thousand warps read, so one thread reads for all.
 */
static __device__ uint32_t read_dead_ranks(const OpState &op)
{
    p2p_control *control = control_of(op);
    const uint32_t time = (uint32_t)(timer_ns() >> 10),
                   asked = load_relaxed(&control->dead_polled_at);
    if (time - asked > POLL_PAUSE && atomicCAS(&control->dead_polled_at, asked, time) == asked)
        store_relaxed(&control->dead, load_relaxed(&op.self->status->dead));
    return load_relaxed(&control->dead);
}

/* The failure that has ended the operation, as a word of `broken`; 0: none but perhaps the
 * deadline. `theirs` is set to the signature of a rank that called something else. */
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
#define SPINS_PER_CHECK 256u /* polls between two checks */
#endif

/* Returns true if deadlines up to `deadline` have passed in the time of the host.
 *
 * The clock of a device continues while the process is stopped (Ctrl-Z, a frozen container),
 * and then often all peers are stopped, too, and launch nothing. So a deadline ends only after
 * the host has shown, by a beat, that it ran after it. If the host was stopped meanwhile, the
 * deadline starts again. One thread of the rank reads host memory for all. */
static __device__ bool has_host_run_after(const OpState &op, uint64_t deadline, uint64_t time)
{
    p2p_control *control = control_of(op);
    if (poll_permit(&control->awake_polled_at, POLL_PAUSE)) {
        const uint64_t awake = load_relaxed(&op.self->status->awake);
        const uint32_t beat = (uint32_t)awake, stops = (uint32_t)(awake >> 32);
        const uint64_t due = load_relaxed(&control->due);
        if (!awake) { /* no thread of the host beats: the clock of the device decides */
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

/* Has the deadline passed? Progress of other waits on this rank moves the deadline. In the last
 * quarter of the time it publishes that this rank waits for `peer`. */
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

/* Has the group failed? backend hosts: one thread reads the net inbox for all. */
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

/* Called by a wait every SPINS_PER_CHECK polls; returns true if the wait must be given up: the
 * group has failed, or the deadline has passed. `fresh`: this is the first check of the wait,
 * so an earlier wait has succeeded since, which counts as progress. The diagnosis is left to
 * the end of the CTA, so that waiting warps need few registers. */
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

/* Finds out what ended the operation and reports it. One thread. If the deadline ended a wait
 * for no peer in particular, ranks that know the culprit get REPORT_GRACE_NS to report first;
 * then the peers count for which other threads of this rank have waited. */
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
#define LOW_LATENCY 0 /* 1: latency matters most, and nothing else needs the memory bandwidth */
#endif
#ifndef SPINS_TO_SLEEP
#define SPINS_TO_SLEEP (LOW_LATENCY ? 64u : 4u)
#endif

/* A warp polls until ready() is true, which must have the same value on all lanes. Returns
 * false if the wait was given up because the group is broken. `peer`: the rank that this lane
 * waits for, or -1; ready() may change it. */
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

/* Like wait_warp(), for one thread. */
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
