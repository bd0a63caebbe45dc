/* SPDX-License-Identifier: Apache-2.0 */
/* Lets the owner of an op slot (called slot here) sleep until a peer wakes it.
 *
 * The futex of a slot has the value idle, armed or asleep. The slot's owner checks whether a
 * peer has changed something (for example sent entries), and calls wait() if not. If the futex
 * is idle, wait() sets it to armed and returns, and the owner checks once more. A peer that
 * changes something sets the futex back to idle. If the next wait() finds the futex still
 * armed, nothing has changed since, and the thread sleeps.
 *
 * No wake-up is lost, because four accesses are sequentially consistent. The peer first stores
 * its change and then loads the futex. The owner first sets the futex to armed and then loads
 * the data that may have changed. So either the peer finds the futex armed and sets it to idle,
 * or the owner finds the change. */
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "backend/shared/shared.h"
#include "base/clock.h"

#define SPIN_NS 50000
#define SPINS 1000 /* polls between two readings of the clock */

/* Sleeps until woken, for at most `ns` nanoseconds. Returns at once if *word is not `seen`. */
static void futex_sleep(const epic_group *g, _Atomic uint32_t *word, uint32_t seen, int64_t ns)
{
    const struct timespec limit = {.tv_sec = (time_t)(ns / 1000000000),
                                   .tv_nsec = (long)(ns % 1000000000)};
    const int op = g->is_shared_by_processes ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE;
    syscall(SYS_futex, word, op, seen, &limit, NULL, 0);
}

/* Publishes the phase in which this rank waits, and the ranks for which it waits. Stores the
 * heartbeat `now` last, with release order, so a peer that loads the new heartbeat also loads
 * the new phase and ranks. */
static void publish_wait(const epic_group *g, shared_wait *wait, uint32_t phase,
                         const uint64_t *waits_for, int64_t now)
{
    for (int w = 0; w < (g->num_ranks + 63) / 64; w++)
        store_relaxed(&wait->waits_for[w], waits_for[w]);
    store_relaxed(&wait->phase, phase);
    store_release(&wait->heartbeat_ns, now);
}

static bool waits_for_gone_peer(epic_group *g, const uint64_t *waits_for)
{
    for (int r = 0; r < g->num_ranks; r++)
        if (waits_for[r / 64] >> (r % 64) & 1 && shared_is_gone(g, r)) return true;
    return false;
}

/* Called after each sleep of at most slice_ns: renews the heartbeat, and returns whether the
 * thread should sleep again. It should not if the deadline has passed, if the group has failed,
 * or if a peer for which this rank waits is gone. */
static bool should_sleep_on(epic_group *g, shared_wait *wait, const uint64_t *waits_for,
                            int64_t deadline)
{
    const int64_t now = clock_ns();
    store_release(&wait->heartbeat_ns, now);
    return now < deadline && load_ordered(&g->header->failure_state) == GROUP_HEALTHY &&
           !waits_for_gone_peer(g, waits_for);
}

/* Sleeps on the futex until a peer wakes it or the deadline passes, but at most slice_ns, so
 * that the caller can renew the heartbeat. */
static void sleep_slice(epic_group *g, _Atomic uint32_t *word, uint32_t seen, int64_t deadline)
{
    const int64_t now = clock_ns();
    if (now >= deadline) return;
    const int64_t left = deadline - now;
    futex_sleep(g, word, seen, left < g->slice_ns ? left : g->slice_ns);
}

/* Returns whether there is at least one core for each member. Counts only the cores on which
 * any member may run. All members must have published their cores (group.c). */
static bool find_core_per_rank(const epic_group *g)
{
    core_set any = {{0}};
    for (int r = 0; r < g->num_ranks; r++)
        for (int w = 0; w < CORE_WORDS && seat_set_has(&g->members, r); w++)
            any.words[w] |= load_relaxed(&shared_rank_state_of(g, r)->cores[w]);
    return cores_count(&any) >= seat_set_count(&g->members);
}

static bool has_core_per_rank(epic_group *g)
{
    int core_per_rank = load_relaxed(&g->core_per_rank);
    if (!core_per_rank) {
        core_per_rank = 1 + find_core_per_rank(g);
        store_relaxed(&g->core_per_rank, core_per_rank);
    }
    return core_per_rank == 2;
}

/* Polls the futex before the thread sleeps, for at most SPIN_NS after `begin`. Returns true if
 * a peer has set the futex to idle. If there is a core for each rank, the thread keeps its core
 * while it polls. If not, the thread yields its core between polls, because the peer that will
 * wake it may need the core. If yielding was slow before, the thread does not poll at all
 * (base/patience.h). */
static bool spin_on_futex(epic_group *g, const shared_op_slot *slot, int64_t begin)
{
    const bool spins = has_core_per_rank(g);
    int64_t now = begin;
    if (!spins && patience_is_over(&g->patience)) return false;
    for (bool rung = false; !rung && now - begin < SPIN_NS; now = clock_ns()) {
        for (int i = 0; spins && i < SPINS; i++)
            if (load_acquire(&slot->futex) == SLOT_FUTEX_IDLE) return true;
        if (!spins) sched_yield();
        rung = load_acquire(&slot->futex) == SLOT_FUTEX_IDLE;
    }
    if (!spins) patience_learn(&g->patience, now - begin);
    return load_acquire(&slot->futex) == SLOT_FUTEX_IDLE;
}

/* Waits until a peer sets the armed futex to idle: polls for a short time after `now`, then
 * sleeps for at most slice_ns at a time. Returns at the deadline at the latest. */
static void sleep_on_slot(epic_group *g, shared_op_slot *slot, const uint64_t *waits_for,
                          int64_t now, int64_t deadline)
{
    uint32_t armed = SLOT_FUTEX_ARMED;
    if (spin_on_futex(g, slot, now) || !compare_swap(&slot->futex, &armed, SLOT_FUTEX_ASLEEP))
        return;
    do sleep_slice(g, &slot->futex, SLOT_FUTEX_ASLEEP, deadline);
    while (load_acquire(&slot->futex) == SLOT_FUTEX_ASLEEP &&
           should_sleep_on(g, &slot->wait, waits_for, deadline));
}

static bool any_slot_is_free(epic_group *g)
{
    for (int i = 0; i < g->layout.num_slots; i++)
        if (shared_slot_is_free(g, &g->exchanges[i])) return true;
    return false;
}

/* Waits until an op slot may be free. Several threads of a rank may wait at once. A waiting
 * thread first increments num_sleepers and then looks for a free slot. A rank that finishes an
 * exchange first frees the slot and then loads num_sleepers. So the waiting thread finds the
 * free slot, or the other rank finds the sleeper and wakes it. */
static void sleep_for_free_slot(epic_group *g, const uint64_t *waits_for, int64_t deadline)
{
    shared_rank_state *head = shared_rank_state_of(g, g->rank);
    add_ordered(&head->num_sleepers, 1);
    for (;;) {
        const uint32_t seen = load_ordered(&head->free_slot_futex);
        if (any_slot_is_free(g) || !should_sleep_on(g, &head->wait, waits_for, deadline)) break;
        sleep_slice(g, &head->free_slot_futex, seen, deadline);
    }
    add_ordered(&head->num_sleepers, (uint32_t)-1);
}

/* Implements epic_transport.wait with the protocol at the top of this file. */
void shared_wait_for_change(epic_group *g, int index, uint32_t phase, const uint64_t *waits_for,
                            uint32_t ms)
{
    const int64_t now = clock_ns(), deadline = now + ms * 1000000ll;
    if (index < 0) {
        publish_wait(g, &shared_rank_state_of(g, g->rank)->wait, phase, waits_for, now);
        sleep_for_free_slot(g, waits_for, deadline);
        return;
    }
    shared_op_slot *slot = g->exchanges[index].slot;
    publish_wait(g, &slot->wait, phase, waits_for, now);
    if (load_relaxed(&slot->futex) != SLOT_FUTEX_IDLE)
        sleep_on_slot(g, slot, waits_for, now, deadline);
    store_ordered(&slot->futex, SLOT_FUTEX_ARMED);
}
