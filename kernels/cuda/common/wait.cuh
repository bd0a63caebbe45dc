/* SPDX-License-Identifier: Apache-2.0 */
/* How device code waits: polling, deadlines, and finding the rank at fault when a wait fails.
 *
 * A waiting warp polls a word until it has the expected value. Every SPINS_PER_CHECK polls it
 * calls wait_should_abort(), which checks the deadline and looks for a failure of the group. If
 * the wait is aborted, the CTA exits, and one of its threads calls report_aborted_wait(). This
 * thread finds the cause and reports it in this order:
 *
 *   1. set control.claim, so that only one thread of the rank reports
 *   2. write the fields of p2p_status (host memory), then a system fence, then
 *      status.result. A host that reads `result` sees all fields.
 *   3. store `broken` into the heap of every rank. Waits on all ranks check it.
 *
 * From then on the group is *broken*: functions return false, every later operation finds
 * `broken` and returns at once, and the host reports the error. The group stays broken until
 * its next generation begins (docs/internals/members.md).
 *
 * Every SPINS_PER_COUNT polls, a waiting warp of the first or last CTA also adds its waiting
 * time to counters (count_wait()), so that the host can find a slow rank. A wait with fewer
 * polls adds nothing and has no such cost. */
#ifndef EPIC_WAIT_CUH
#define EPIC_WAIT_CUH

#include "cuda/common/addressing.cuh"
#include "rules/invariant.h"

/* If a rank does not know the culprit of its timeout, it waits for this time before it reports
 * the timeout. So a rank that knows the culprit can report first. */
#define REPORT_GRACE_NS 20000000ull
/* Words in host memory are slow to read, so a rank waits at least this time between two reads.
 * Unit: 1024 ns. */
#define POLL_PAUSE 50u

/* Encodes a wait that was aborted. `peer`: the rank for which the thread waited, or -1 if it is
 * not known. `phase`: a p2p_phase. */
#define WAIT_ABORTED(peer, phase) ((uint32_t)((peer) + 1) << 8 | (uint32_t)(phase))

/* ----------------------------------------------------------------------------- failure ---- */

/* Limits how often a slow word (in host memory or in the net inbox) is read. This is necessary
 * because the reads of many warps are served one after the other. Returns true if this thread
 * may read the word now: at most one thread of the rank gets true in `pause` units of 1024 ns.
 * This thread must store a copy of the word in control memory. The other threads read the copy.
 * *asked: the time of the last call that returned true. */
__device__ __forceinline__ bool poll_permit(uint32_t *asked, uint32_t pause)
{
    const uint32_t time = (uint32_t)(timer_ns() >> 10), before = load_unawaited(asked);
    return time - before >= pause && atomicCAS(asked, before, time) == before;
}

/* Only in backend `hosts`: copies `word` to control memory, where all warps of this rank check
 * it. `word`: a value of the word `broken` (the failure of the group). Does nothing if `word`
 * is 0. */
__device__ __forceinline__ void cache_broken(const OpState &op, uint64_t word)
{
    if (HOSTS && word) store_relaxed(&control_of(op)->net->broken, word);
}

/* Reports a failure of the group, unless this rank has already reported one. Writes p2p_status
 * for the host, and stores `broken` into this rank's heap. If this rank has found the failure
 * itself, also stores `broken` into the heaps of the peers (in the backend `hosts`, the proxy
 * thread sends it instead). `word`: P2P_BROKEN() of the failure. `theirs`: the signature (hash
 * of arguments) of a peer that called another operation, or 0 if no peer did so. */
static __device__ __noinline__ void report_failure(const OpState &op, uint64_t word,
                                                   uint32_t theirs)
{
    const p2p_self &self = *op.self;
    word |= P2P_BROKEN_IN(op.generation);
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
        if (q == self.rank ||
            (!HOSTS && (int)(word >> 12 & 0xff) == self.rank && !is_vacant(op, q)))
            store_relaxed((uint64_t *)(self.heap[q] + self.at.broken), word);
}

/* Reports an error in the data to the host by a notice in host memory. The group does not fail.
 * If all P2P_NOTICES entries for notices are still unread, the error is not reported. */
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

/* Only in backend `hosts`: passes `published`, the word `waits` of this rank, to the proxy
 * thread, which sends it to the peers. */
__device__ __forceinline__ void publish_waits(const OpState &op, uint64_t published)
{
    if (HOSTS) store_relaxed(&op.self->net->ring.words->waits, published);
}

/* Returns the address, in the heap at `heap`, of the word `waits` that `rank` writes. The word
 * lists the ranks for which `rank` waits. */
__device__ __forceinline__ uint64_t *waits_address(const OpState &op, uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + op.self->at.waits) + rank;
}

/* Returns the ranks for which `rank` waits (pack_ranks()), or 0 if `rank` has published no wait
 * in this epoch. */
__device__ __forceinline__ uint32_t read_waits(const OpState &op, int rank)
{
    const uint64_t published = load_relaxed(waits_address(op, status_base(op, rank), rank));
    return is_stamped(op, published) ? (uint32_t)published : 0;
}

/* Publishes to all ranks that this rank waits for `peers` (pack_ranks()), so that other ranks
 * do not report this rank as the culprit. Called in the last quarter of the time limit. If the
 * deadline then moves to a later time, the caller calls this again with peers = 0. */
static __device__ void write_waits(const OpState &op, uint32_t peers)
{
    const p2p_self &self = *op.self;
#pragma unroll 1
    for (int q = 0; q < self.num_ranks; q++) {
        /* For a vacant seat, stores to this rank's heap again. With a branch instead, this
         * function would need more registers, and kernels that wait would spill them. */
        uint8_t *heap = self.heap[is_vacant(op, q) ? self.rank : q];
        if (!HOSTS || q == self.rank)
            store_relaxed(waits_address(op, heap, self.rank), stamp_word(op, peers));
    }
    publish_waits(op, stamp_word(op, peers));
}

/* Returns true if this rank has received the announcement of rank q for this epoch. */
__device__ __forceinline__ bool has_announced(const OpState &op, int q)
{
    return is_stamped(op, load_relaxed(announcement_words(op, word_base(op, q), q)));
}

/* Requires that the announcement of rank q has not arrived. Returns the rank that delays this
 * announcement: q, or a relay between q and this rank. Returns a relay if the relay's own
 * announcement has not arrived either, because q may have announced the operation to this
 * relay. */
__device__ __forceinline__ int late_announcer(const OpState &op, int q)
{
    const p2p_self &self = *op.self;
    if (!relays_words(self) || !is_remote(self, q)) return q;
    const int near = word_relay(self, self.rank, q), far = word_relay(self, q, self.rank);
    if (near != self.rank && !has_announced(op, near)) return near;
    return has_announced(op, far) ? q : far;
}

/* Returns a bit mask of the culprits, which are the ranks that delay the group. If
 * announcements of this epoch are missing, the culprits are the ranks that delay them.
 * Otherwise starts with the ranks in `awaited`, for which this rank waits, and follows the
 * published waits from rank to rank. Of the ranks found in this way, the culprits are those
 * that wait for no other rank. If there are no such ranks, returns `awaited`. */
static __device__ RankMask find_culprits(const OpState &op, RankMask awaited)
{
    const int num_ranks = op.self->num_ranks, own = op.self->rank;
    RankMask missing = no_ranks(), waiting = no_ranks(), late = awaited;
#pragma unroll 1
    for (int q = 0; q < num_ranks; q++)
        if (q != own && !is_vacant(op, q) &&
            !is_stamped(op, load_relaxed(announcement_words(op, word_base(op, q), q))))
            add_rank(missing, late_announcer(op, q));
    if (has_any(missing)) return missing;
#pragma unroll 1
    for (int i = 0; i < num_ranks * num_ranks; i++) {
        const int q = i % num_ranks;
        const uint32_t its = has_rank(late, q) ? read_waits(op, q) : 0;
        if (its) add_rank(waiting, q);
        add_ranks_of(late, unpack_ranks(its));
    }
    remove_ranks_of(late, waiting);
    remove_rank(late, own);
    return has_any(late) ? late : awaited;
}

/* Returns a bit mask of the ranks whose processes have died, as the host has found. The
 * original mask is in host memory, where reads by many warps would be slow. So from time to
 * time one thread copies it to control memory, and all other threads read the copy. */
static __device__ RankMask read_dead_ranks(const OpState &op)
{
    p2p_control *control = control_of(op);
    const uint32_t time = (uint32_t)(timer_ns() >> 10),
                   asked = load_relaxed(&control->dead_polled_at);
    if (time - asked > POLL_PAUSE && atomicCAS(&control->dead_polled_at, asked, time) == asked)
        for (int w = 0; w < DEVICE_RANK_WORDS; w++)
            store_relaxed(&control->dead[w], load_relaxed(&op.self->status->dead[w]));
#if MANY_RANKS
    RankMask dead;
    for (int w = 0; w < DEVICE_RANK_WORDS; w++) dead.words[w] = load_relaxed(&control->dead[w]);
    return dead;
#else
    return load_relaxed(control->dead);
#endif
}

/* Returns true if `word`, a value of `broken`, describes a failure of this generation of the
 * group. Returns false if `word` is 0 or describes a failure of another generation. */
__device__ __forceinline__ bool is_broken_in(uint64_t word, uint32_t generation)
{
    return word &&
           (!WITH_VACANT_SEATS || ((word ^ P2P_BROKEN_IN(generation)) >> 20 & 0xfff) == 0);
}

/* Returns P2P_BROKEN() of a failure that ends the operation, or 0 if no failure is found. Looks
 * for these causes in this order:
 *
 *   1. a rank has published a failure
 *   2. a peer has announced another operation; `theirs` then becomes its signature
 *   3. a peer has closed its context, or its process has died
 *
 * Does not check the deadline. */
__device__ __forceinline__ uint64_t find_failure(const OpState &op, int phase, uint32_t &theirs)
{
    const p2p_self &self = *op.self;
    uint64_t word = load_relaxed((const uint64_t *)(op.heap + self.at.broken));
    if (HOSTS && !word)
        word = load_relaxed((const uint64_t *)(net_inbox(self) + self.at.broken));
    if (!is_broken_in(word, op.generation)) word = 0;
#pragma unroll 1
    for (int q = 0; q < self.num_ranks && !word; q++) {
        if (is_vacant(op, q)) continue;
        const uint64_t announced = load_relaxed(announcement_words(op, word_base(op, q), q));
        if (!is_stamped(op, announced) || (uint32_t)announced == op.signature) continue;
        theirs = (uint32_t)announced;
        word = P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, phase,
                          pack_ranks(rank_bit(q)));
    }
    const RankMask dead = read_dead_ranks(op);
#pragma unroll 1
    for (int q = 0; q < self.num_ranks && !word; q++) {
        if (is_vacant(op, q)) continue;
        const uint64_t gone =
            load_relaxed((const uint64_t *)(status_base(op, q) + self.at.gone) + q);
        if (gone ? (int32_t)(op.epoch - (uint32_t)gone) > 0 : has_rank(dead, q))
            word = P2P_BROKEN(EPIC_EPEER, self.operation, self.rank, phase,
                              pack_ranks(rank_bit(q)));
    }
    return word;
}

#ifndef LOW_LATENCY
/* 1 in files with low-latency kernels, whose waits poll more often. This does not slow down the
 * transfer of rows, because low-latency kernels move only few rows. */
#define LOW_LATENCY 0
#endif
#ifndef SPINS_TO_SLEEP
/* number of polls after which a wait begins to sleep between two polls */
#define SPINS_TO_SLEEP (LOW_LATENCY ? 64u : 4u)
#endif
#ifndef SPINS_PER_CHECK
/* number of polls after which a wait checks the deadline and looks for a failure */
#define SPINS_PER_CHECK 256u
#endif
#ifndef SPINS_PER_COUNT
/* Number of polls after which a wait adds its time to the counters. These polls take about 20
 * to 30 microseconds. With only 10 microseconds, a plan of 1,024 tokens was 8 % slower. */
#define SPINS_PER_COUNT (SPINS_PER_CHECK / 8u)
#endif

/* Called by a wait whose deadline has passed. Returns true if the host process has run after
 * the deadline, so that the wait may fail. `time`: current device time.
 *
 * The process may be suspended, for example by Ctrl-Z or in a frozen container. This must not
 * cause a timeout: the device's clock continues, but the peers' processes are usually also
 * suspended, and launch no kernels. So a wait fails only after a host thread has run later than
 * the deadline. That thread counts its runs (beats, P2P_AWAKE). Two calls are needed:
 *
 *   1. The first call after the deadline stores its time in control->due.
 *   2. A later call finds that the count of beats has changed, so the host thread has run after
 *      the time `due`. It copies this time to control->overdue, and sets `due` to 0.
 *
 * A wait may fail if its deadline is earlier than control->overdue.
 *
 * The host thread also counts how often the process was suspended (stops). If that count has
 * changed, the time limit of all waits restarts. It restarts at most P2P_POSTPONE_LIMIT times
 * if no wait of this rank succeeds in the meantime. Only one thread of the rank at a time reads
 * the word `awake` in host memory. */
static __device__ bool has_host_run_after(const OpState &op, uint64_t deadline, uint64_t time)
{
    p2p_control *control = control_of(op);
    if (poll_permit(&control->awake_polled_at, POLL_PAUSE)) {
        const uint64_t awake = load_relaxed(&op.self->status->awake);
        const uint32_t beat = (uint32_t)awake, stops = (uint32_t)(awake >> 32);
        const uint64_t due = load_relaxed(&control->due);
        /* If no host thread counts beats, the device's clock alone decides. */
        if (!awake) {
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

/* Returns true if this rank should publish that it also waits for `peer`. `published`: the word
 * `waits` that this rank has published. With MANY_RANKS, the word has space for only MOST_NAMED
 * ranks. If the word is full, returns false. */
__device__ __forceinline__ bool can_publish(uint32_t published, int peer)
{
#if MANY_RANKS
    return published >> 30 < MOST_NAMED && !has_rank(unpack_ranks(published), peer);
#else
    return !(published >> peer & 1);
#endif
}

/* Returns true if a wait for `peer` has timed out: its deadline has passed, and the process has
 * run after the deadline (has_host_run_after()). If another wait of this rank has succeeded
 * since the deadline was set, first moves the deadline to a later time. In the last quarter of
 * the time limit, also publishes that this rank waits for `peer`. */
static __device__ __noinline__ bool is_too_late(const OpState &op, int peer)
{
    const p2p_self &self = *op.self;
    const uint64_t time = timer_ns(), moved = load_relaxed(&control_of(op)->progress_ns);
    const uint64_t deadline = max(op.deadline, moved + self.timeout_ns);
    const uint32_t published = read_waits(op, self.rank);
    op.deadline = deadline;
    if (time > deadline) return has_host_run_after(op, deadline, time);
    RankMask awaited = unpack_ranks(published);
    if (time <= deadline - self.timeout_ns / 4)
        awaited = no_ranks();
    else if (peer >= 0 && peer != self.rank && can_publish(published, peer))
        add_rank(awaited, peer);
    if (pack_ranks(awaited) != published) write_waits(op, pack_ranks(awaited));
    return false;
}

/* Returns true if the group has failed. In the backend `hosts`, polls of the net inbox are
 * slow, so only one thread at a time reads it. The other threads read the result of that thread
 * in control memory. `phase`: a p2p_phase. */
__device__ __forceinline__ bool has_failed(const OpState &op, int phase)
{
    uint32_t theirs;
    p2p_control *control = control_of(op);
    if (HOSTS && load_relaxed(&control->net->broken)) return true;
    if (HOSTS && !poll_permit(&control->net->failure_polled_at, POLL_PAUSE)) return false;
    const uint64_t word = find_failure(op, phase, theirs);
    cache_broken(op, word);
    return word != 0;
}

/* Returns true if a wait for `peer` must be aborted, because the group has failed or the
 * deadline has passed. A waiting warp calls it every SPINS_PER_CHECK polls. `fresh`: true in
 * the first call of a wait. In this case the previous wait has succeeded, so the deadline moves
 * to a later time. This function does not report the cause of a failure, because waiting warps
 * have few registers. Instead, report_aborted_wait() reports the cause at the end of the
 * CTA. */
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

/* The times at which waits are counted have the unit 1024 ns. They have 32 bits and overflow,
 * so only the difference of two such times has a meaning. */
#define COUNT_PAUSE 2u /* minimum time between two counts of waits for one rank */
/* approximate age of a wait when it is counted for the first time */
#define FIRST_COUNT 24u
#ifndef RECENT_COUNT
/* If a wait for a peer was counted less than this time ago, the rank is assumed to be still
 * waiting for this peer. */
#define RECENT_COUNT 64u
#endif

/* Returns the time for which this rank has waited for `peer` since a wait for `peer` was last
 * counted. Time before this operation does not count. If is_first is true, time before this
 * wait does not count either. Many warps can wait for the same peer at the same time, but this
 * time must be counted only once. So one warp gets the time, and the other warps get 0. */
static __device__ __noinline__ uint32_t uncounted_time(const OpState &op, uint32_t peer,
                                                       bool is_first)
{
    uint32_t *counted_at = &control_of(op)->waits.counted_at[peer];
    const uint64_t time = timer_ns();
    const uint32_t now = (uint32_t)(time >> 10), before = load_relaxed(counted_at);
    uint32_t age = (uint32_t)((time - op.deadline + op.self->timeout_ns) >> 10);
    /* The clocks of two SMs differ by less than one unit. */
    if (now - before + 1 <= COUNT_PAUSE || peer == (uint32_t)op.self->rank) return 0;
    age = min(age, now - before);
    if (is_first) age = min(age, FIRST_COUNT);
    return atomicCAS(counted_at, before, now) == before ? age : 0;
}

/* Adds `age` to a sum in control memory, and stores the result to `copy` in host memory. */
static __device__ void add_and_copy(uint64_t *sum, uint64_t *copy, uint64_t age)
{
    store_relaxed(
        copy, (uint64_t)atomicAdd((unsigned long long *)sum, (unsigned long long)age) + age);
}

/* Adds `age` to the time in which this rank waited for `peer`. If no wait for another rank was
 * counted recently in this epoch, also adds `age` to the time in which this rank waited only
 * for `peer`. */
static __device__ __noinline__ void add_wait_time(const OpState &op, uint32_t peer,
                                                  uint32_t age)
{
    const uint32_t operation = op.self->operation;
    p2p_waits *waits = &control_of(op)->waits;
    p2p_wait_time *time = &waits->times[operation][peer],
                  *copy = &op.self->status->waits[operation][peer];
    store_relaxed(&op.self->status->num_operations[operation],
                  load_relaxed(&waits->num_operations[operation]));
    add_and_copy(&time->wait, &copy->wait, age);
    const uint32_t epoch = op.epoch << 16, latest = load_relaxed(&waits->latest);
    const uint32_t last = latest & 255;
    uint32_t other = last == peer ? latest >> 8 & 255 : last;
    if ((latest ^ epoch) >> 16) other = peer;
    store_relaxed(&waits->latest, epoch | other << 8 | peer);
    if (other == peer ||
        load_relaxed(&waits->counted_at[peer]) - load_relaxed(&waits->counted_at[other]) >
            RECENT_COUNT)
        add_and_copy(&time->alone, &copy->alone, age);
}

/* Returns the rank for which a wait for `peer` must be counted. If announcements are missing,
 * this is a rank that delays one of them, because `peer` may itself be waiting for that rank.
 * Otherwise it is `peer`, which may be -1 (not known). Each lane checks the announcements of
 * different ranks. is_warp: true if a whole warp calls the function. Returns -1 in all CTAs
 * except the first and the last, whose waits are enough to find a slow rank. If all CTAs
 * counted, plan + dispatch of 4,096 tokens would be 5 % slower. */
static __device__ __noinline__ int rank_to_count(const OpState &op, int peer, bool is_warp)
{
    int missing = -1;
    if (blockIdx.x != 0 && !is_last_cta()) return -1;
    for (int q = lane_id(); q < op.self->num_ranks && missing < 0; q += WARP)
        if (!is_vacant(op, q) &&
            !is_stamped(op, load_relaxed(announcement_words(op, word_base(op, q), q))))
            missing = late_announcer(op, q);
    const bool has_missing = is_warp ? __any_sync(ALL_LANES, missing >= 0) : missing >= 0;
    return has_missing ? missing : peer;
}

/* Counts the time of a wait for `peer`, which is -1 if the rank is not known. is_warp: as in
 * rank_to_count(). is_first: as in uncounted_time(). */
static __device__ void count_wait(const OpState &op, int peer, bool is_warp, bool is_first)
{
    peer = rank_to_count(op, peer, is_warp);
    const uint32_t age = peer < 0 ? 0 : uncounted_time(op, (uint32_t)peer, is_first);
    if (age) add_wait_time(op, (uint32_t)peer, age);
}

/* A waiting warp or thread calls this every SPINS_PER_COUNT polls. In most calls, counts the
 * time of the wait and returns false. Every SPINS_PER_CHECK polls, instead returns whether the
 * wait must be aborted. The loop of each wait contains this call. With one call for counting
 * and one for aborting, the low-latency kernels were up to 9 % slower (docs/lab/cuda.md). */
static __device__ __noinline__ bool wait_slow_path(const OpState &op, int peer, int phase,
                                                   uint32_t spins, bool is_warp)
{
    if (spins % SPINS_PER_CHECK) {
        count_wait(op, peer, is_warp, spins == SPINS_PER_COUNT);
        return false;
    }
    const bool over = wait_should_abort(op, peer, phase, spins == SPINS_PER_CHECK);
    return is_warp ? __any_sync(ALL_LANES, over) : over;
}

/* Counts an operation that begins. Called by one thread of each CTA, but only CTA 0 counts. */
__device__ __forceinline__ void count_operation(const p2p_self &self)
{
    if (blockIdx.x == 0)
        atomicAdd((unsigned long long *)&control_of(self)->waits.num_operations[self.operation],
                  1ull);
}

/* Finds out why a wait was aborted, and reports the cause. Called by one thread of the CTA. If
 * the peer of the wait is not known, first waits for REPORT_GRACE_NS, so that other ranks can
 * report, and then looks for the culprit among all ranks for which this rank waits, as its
 * threads have published (write_waits()). */
static __device__ __noinline__ void report_aborted_wait(const OpState &op)
{
    const p2p_self &self = *op.self;
    const int peer = (int)(op.aborted_wait >> 8) - 1, phase = op.aborted_wait & 255;
    for (;;) {
        const bool late = timer_ns() > op.deadline + REPORT_GRACE_NS;
        uint32_t theirs = 0;
        RankMask awaited = late ? unpack_ranks(read_waits(op, self.rank)) : no_ranks();
        if (peer >= 0 && peer != self.rank) awaited = rank_bit(peer);
        uint64_t word = find_failure(op, phase, theirs);
        const RankMask guilty = word ? no_ranks() : find_culprits(op, awaited);
        if (has_any(guilty) || (late && !word))
            word =
                P2P_BROKEN(EPIC_ETIMEOUT, self.operation, self.rank, phase, pack_ranks(guilty));
        if (word) return report_failure(op, word, theirs);
    }
}

/* Polls ready() until it returns true. ready() must return the same value in all lanes. `peer`:
 * the rank for which this lane waits, or -1; `peer` is a reference, because ready() may change
 * it. `phase`: a p2p_phase, for error reports. Called by a whole warp. Returns false if the
 * wait was aborted because the group has failed. */
template <class Ready>
__device__ __forceinline__ bool wait_warp(const OpState &op, const int &peer, int phase,
                                          Ready ready)
{
    for (uint32_t spins = 1; begin_poll(), !ready(); spins++) {
        if (spins > SPINS_TO_SLEEP) __nanosleep(min(spins * 20, 400u));
        if (spins % SPINS_PER_COUNT == 0 && wait_slow_path(op, peer, phase, spins, true))
            return false;
    }
    return true;
}

/* Like wait_warp(), but for one thread instead of a warp. Returns false if the wait was aborted
 * because the group has failed. */
template <class Ready>
__device__ __forceinline__ bool wait_thread(const OpState &op, const int &peer, int phase,
                                            Ready ready)
{
    for (uint32_t spins = 1; begin_poll(), !ready(); spins++) {
        if (spins > SPINS_TO_SLEEP) __nanosleep(min(spins * 20, 400u));
        if (spins % SPINS_PER_COUNT == 0 && wait_slow_path(op, peer, phase, spins, false))
            return false;
    }
    return true;
}

#endif
