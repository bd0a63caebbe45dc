/* SPDX-License-Identifier: Apache-2.0 */
/* How device code waits: polling, deadlines, and finding the rank at fault when a wait fails.
 *
 * A waiting warp polls a word until it has the expected value. Every SPINS_PER_CHECK polls it
 * calls wait_should_abort(), which checks the deadline and looks for a failure of the group. If
 * the wait is given up, the CTA ends, and one of its threads calls report_aborted_wait(). It
 * finds the cause and reports it:
 *
 *   1. set control.claim, so that only one thread of the rank reports
 *   2. write the fields of p2p_status (host memory), then a system fence, then
 *      status.result. A host that reads `result` sees all fields.
 *   3. store `broken` into the heap of every rank. Waits on all ranks check it.
 *
 * From then on the group is *broken*: functions return false, every later operation finds
 * `broken` and returns at once, and the host reports the error. A group never recovers. */
#ifndef EPIC_WAIT_CUH
#define EPIC_WAIT_CUH

#include "cuda/common/addressing.cuh"
#include "rules/invariant.h"

/* Time after a deadline in which a rank that does not know the culprit lets other ranks report
 * first. */
#define REPORT_GRACE_NS 20000000ull
/* least time between two reads of a word in host memory, in units of 1024 ns */
#define POLL_PAUSE 50u

/* Encodes a wait that was given up: the rank that it waited for, or -1, and a p2p_phase. */
#define WAIT_ABORTED(peer, phase) ((uint32_t)((peer) + 1) << 8 | (uint32_t)(phase))

/* ----------------------------------------------------------------------------- failure ---- */

/* Limits reads of a slow word (in host memory or the net inbox): in `pause` units of 1024 ns,
 * at most one thread of the rank gets a permit. Returns true if this thread gets it. *asked is
 * the time of the last permit. Reads of one host address by many warps are served one after the
 * other, so one thread reads for all. */
__device__ __forceinline__ bool poll_permit(uint32_t *asked, uint32_t pause)
{
    const uint32_t time = (uint32_t)(timer_ns() >> 10), before = load_relaxed(asked);
    return time - before >= pause && atomicCAS(asked, before, time) == before;
}

/* backend hosts: copies the word `broken` to control memory, where all warps of this rank look.
 * Does nothing if it is 0. */
__device__ __forceinline__ void cache_broken(const OpState &op, uint64_t word)
{
#ifdef EPIC_HOSTS
    if (word) store_relaxed(&control_of(op)->broken, word);
#endif
}

/* Reports a failure of the group, once per rank: writes p2p_status for the host and, if this
 * rank found the failure, stores `broken` into the heaps of all ranks. `word`: P2P_BROKEN().
 * `theirs`: signature of a rank that called another operation, or 0. */
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

/* Reports to the host an error in the data. Such an error does not break the group. Does
 * nothing if all P2P_NOTICES notices are unread. */
static __device__ __noinline__ void report_data_error(const p2p_self &self,
                                                      const p2p_notice &notice)
{
#pragma unroll 1
    for (int i = 0; i < P2P_NOTICES; i++) {
        volatile p2p_notice *to = &self.status->notices[i];
        if (to->result) continue;
        to->epoch = notice.epoch;
        to->fault = notice.fault;
        to->rank = notice.rank;
        for (int j = 0; j < 4; j++) to->about[j] = notice.about[j];
        __threadfence_system();
        to->result = notice.result;
        return;
    }
}

/* backend hosts: passes the word `waits` of this rank to the proxy thread, which sends it to
 * the peers. */
__device__ __forceinline__ void publish_waits(const OpState &op, uint64_t published)
{
#ifdef EPIC_HOSTS
    store_relaxed(&op.self->ring.words->waits, published);
#endif
}

/* Returns the address of the word in a heap in which `rank` publishes the ranks that it waits
 * for. `heap`: base address of that heap. */
__device__ __forceinline__ uint64_t *waits_address(const OpState &op, uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + op.self->at.waits) + rank;
}

/* Returns a bit mask of the ranks for which `rank` waits; 0 if it has published none in this
 * epoch. */
__device__ __forceinline__ uint32_t read_waits(const OpState &op, int rank)
{
    const uint64_t published = load_relaxed(waits_address(op, status_base(op, rank), rank));
    return is_stamped(op, published) ? (uint32_t)published : 0;
}

/* Publishes that this rank waits for `peers` (bit mask; 0: for none), so that other ranks do
 * not take it for the culprit. Called in the last quarter of the time limit, and with 0 if the
 * deadline moves afterwards. */
static __device__ void write_waits(const OpState &op, uint32_t peers)
{
    const p2p_self &self = *op.self;
#pragma unroll 1
    for (int q = 0; q < self.num_ranks; q++)
        if (!HOSTS || q == self.rank)
            store_relaxed(waits_address(op, self.heap[q], self.rank), stamp_word(op, peers));
    publish_waits(op, stamp_word(op, peers));
}

/* Returns a bit mask of the ranks that hold up the group. These are the ranks that have not
 * announced this epoch. If all have announced it, the function starts at the ranks in `awaited`
 * and follows the published waits, until it reaches ranks that wait for no other rank. */
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

/* Returns a bit mask of the ranks whose processes have died. The host writes it into host
 * memory, where reads by many warps are slow. So one thread reads it there now and then and
 * copies it to control memory for all. */
static __device__ uint32_t read_dead_ranks(const OpState &op)
{
    p2p_control *control = control_of(op);
    const uint32_t time = (uint32_t)(timer_ns() >> 10),
                   asked = load_relaxed(&control->dead_polled_at);
    if (time - asked > POLL_PAUSE && atomicCAS(&control->dead_polled_at, asked, time) == asked)
        store_relaxed(&control->dead, load_relaxed(&op.self->status->dead));
    return load_relaxed(&control->dead);
}

/* Returns P2P_BROKEN() of the failure that has ended the operation, or 0. It checks in this
 * order: a published failure, a peer that announced another operation, a closed or dead peer.
 * It does not check the deadline. Sets `theirs` to the signature of a peer that announced
 * another operation. */
__device__ __forceinline__ uint64_t find_failure(const OpState &op, int phase, uint32_t &theirs)
{
    const p2p_self &self = *op.self;
    uint64_t word = load_relaxed((const uint64_t *)(op.heap + self.at.broken));
    if (HOSTS && !word)
        word = load_relaxed((const uint64_t *)(net_inbox(self) + self.at.broken));
#pragma unroll 1
    for (int q = 0; q < self.num_ranks && !word; q++) {
        const uint64_t announced = load_relaxed(announcement_words(op, inbox_base(op, q), q));
        if (!is_stamped(op, announced) || (uint32_t)announced == op.signature) continue;
        theirs = (uint32_t)announced;
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
#define SPINS_PER_CHECK 256u /* polls between two checks of a wait */
#endif

/* Returns true if the wait may end at `deadline`, because the host has run after it, too.
 * `time`: current device time.
 *
 * A stop of the process (Ctrl-Z, a frozen container) must not cause a timeout. The clock of the
 * device continues during a stop, but often all peers are stopped, too, and launch nothing. So
 * a wait ends only after a host thread has run later than the deadline (a beat, P2P_AWAKE). If
 * the host finds that the process was stopped, it counts a stop, and the time limit starts
 * again, at most P2P_POSTPONE_LIMIT times. One thread of the rank reads the word `awake` in
 * host memory for all. */
static __device__ bool has_host_run_after(const OpState &op, uint64_t deadline, uint64_t time)
{
    p2p_control *control = control_of(op);
    if (poll_permit(&control->awake_polled_at, POLL_PAUSE)) {
        const uint64_t awake = load_relaxed(&op.self->status->awake);
        const uint32_t beat = (uint32_t)awake, stops = (uint32_t)(awake >> 32);
        const uint64_t due = load_relaxed(&control->due);
        if (!awake) { /* No host thread beats, so the clock of the device alone decides. */
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

/* Returns true if the deadline of a wait for `peer` has passed. Each wait of this rank that
 * ends well moves the deadline. In the last quarter of the time limit, publishes that this rank
 * waits for `peer`. */
static __device__ __noinline__ bool is_too_late(const OpState &op, int peer)
{
    const p2p_self &self = *op.self;
    const uint64_t time = timer_ns(), moved = load_relaxed(&control_of(op)->progress_ns);
    const uint64_t deadline = max(op.deadline, moved + self.timeout_ns);
    const uint32_t published = read_waits(op, self.rank);
    op.deadline = deadline;
    if (time > deadline) return has_host_run_after(op, deadline, time);
    if (time <= deadline - self.timeout_ns / 4) {
        if (published) write_waits(op, 0);
    } else if (peer >= 0 && peer != self.rank && !(published >> peer & 1)) {
        write_waits(op, published | 1u << peer);
    }
    return false;
}

/* Returns true if the group has failed. In backend hosts only one thread at a time reads the
 * net inbox, where polls are slow; the others read its result in control memory. */
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

/* Returns true if a wait for `peer` must be given up: the group has failed, or the deadline has
 * passed. A wait calls it every SPINS_PER_CHECK polls. `fresh`: this is the first check of this
 * wait. Then the wait before it has ended well, which counts as progress and moves the
 * deadline. report_aborted_wait() finds the cause later, at the end of the CTA, because waiting
 * warps have few registers. */
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

/* Finds the cause of a wait that was given up and reports it. Called by one thread. A thread
 * that does not know which rank it waited for gives other ranks REPORT_GRACE_NS to report
 * first. After that it looks for the culprit among the ranks for which other threads of this
 * rank have published waits. */
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
/* 1 in low-latency kernels, which poll more often, because few rows compete for memory
 * bandwidth */
#define LOW_LATENCY 0
#endif
#ifndef SPINS_TO_SLEEP
#define SPINS_TO_SLEEP (LOW_LATENCY ? 64u : 4u)
#endif

/* Polls until ready() is true; ready() must return the same value in all lanes. Called by a
 * whole warp. Returns false if the wait was given up because the group is broken. `peer`: the
 * rank that this lane waits for, or -1; ready() may change it. */
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

/* Like wait_warp(), but called by one thread. */
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
