/* SPDX-License-Identifier: Apache-2.0 */
/* Waits by polling MPI. At first it yields the core between polls, because there may be more
 * ranks than cores. Later it sleeps between polls. */
#include <sched.h>
#include <string.h>

#include "backend/mpi/group.h"

/* a waiting thread first polls this long without yielding, if the host has a core per rank */
#define SPIN_NS 50000
/* A waiting thread yields its core between polls for this long. After that, it sleeps between
 * polls. It does not sleep earlier, because even the shortest sleep takes much longer than
 * requested. */
#define YIELD_NS 1000000
#define SHORTEST_NAP_NS 20000
#define LONGEST_NAP_NS 200000
/* A wait for a peer that is gone ends after this time. It does not end earlier, because rows
 * that the peer has sent may still arrive. */
#define PATIENCE_NS 1000000
/* in a wait for rows, only one of this many polls also polls control messages */
#define POLLS_PER_CONTROL_POLL 8

static void begin_wait(wait_state *w, uint32_t phase, const uint64_t *waits_for)
{
    w->is_waiting = true;
    w->phase = phase;
    if (waits_for)
        memcpy(w->waits_for, waits_for, sizeof w->waits_for);
    else
        memset(w->waits_for, 0, sizeof w->waits_for);
}

static void end_wait(wait_state *w)
{
    w->is_waiting = false;
    w->last_ns = clock_ns();
}

/* Returns whether a peer for which this thread waits is gone. In this case the wait ends after
 * PATIENCE_NS, and the caller of wait() decides whether rows of that peer are missing. */
static bool waits_for_gone_peer(epic_group *group, const wait_state *w, int64_t now)
{
    liveness_check(group, now);
    for (int r = 0; r < group->num_ranks; r++)
        if (has_rank(w->waits_for, r) && liveness_is_gone(group, r)) return true;
    return false;
}

/* Polls MPI, and returns whether the op slot has changed since wait() last found a change. If
 * slot is NULL, returns whether any slot is free. If the group has failed, returns true. If the
 * slot waits for rows, polls for control messages only in one of POLLS_PER_CONTROL_POLL
 * calls. */
static bool has_changed(epic_group *group, op_slot *slot)
{
    if (is_broken(group)) return true;
    if (!slot) {
        progress_control(group);
        progress_drain(group);
        return op_slots_find_free(group) != NULL;
    }
    if (slot->num_events == slot->num_seen_events) progress_slot(group, slot);
    if (slot->num_events != slot->num_seen_events) return true;
    if (slot->per_segment && ++slot->num_looks % POLLS_PER_CONTROL_POLL == 0)
        progress_control(group);
    peer_status_request(group, slot, clock_ns());
    return slot->num_events != slot->num_seen_events;
}

/* Yields the core or sleeps between two polls. Yields only after every second poll, because MPI
 * may receive a message in one poll and report it only in the next. */
static void back_off(const epic_group *group, int looks, int64_t waited, int64_t left)
{
    if (waited < YIELD_NS) {
        const bool keeps = waited < SPIN_NS && group->has_core_per_rank;
        if (!keeps && looks % 2 == 0) sched_yield();
        return;
    }
    int64_t ns = waited / 8;
    if (ns < SHORTEST_NAP_NS) ns = SHORTEST_NAP_NS;
    if (ns > LONGEST_NAP_NS) ns = LONGEST_NAP_NS;
    runtime_nap(ns < left ? ns : left);
}

/* Polls until something has changed, until the time `end`, or until a peer for which the thread
 * waits is gone. Releases the mutex between polls. */
static void wait_until(epic_group *group, op_slot *slot, wait_state *w, int64_t start,
                       int64_t end)
{
    for (int looks = 1; !has_changed(group, slot); looks++) {
        pthread_mutex_unlock(group->mutex);
        const int64_t now = clock_ns();
        if (now < end) back_off(group, looks, now - start, end - now);
        pthread_mutex_lock(group->mutex);
        /* All threads that wait for a free op slot share `w`, so another thread may have
         * cleared is_waiting at the end of its own wait. */
        w->is_waiting = true;
        if (now >= end || (now - start >= PATIENCE_NS && waits_for_gone_peer(group, w, now)))
            return;
    }
    if (!slot) return;
    slot->num_seen_events = slot->num_events;
    slot->wait.unchanged_since_ns = clock_ns();
}

/* Implements epic_transport.wait: polls MPI until something has changed for the op slot. */
void mpi_wait(epic_group *group, int index, uint32_t phase, const uint64_t *waits_for,
              uint32_t ms)
{
    op_slot *slot = index < 0 ? NULL : &group->slots[index];
    wait_state *w = slot ? &slot->wait : &group->wait;
    const int64_t start = clock_ns();
    pthread_mutex_lock(group->mutex);
    begin_wait(w, phase, waits_for);
    wait_until(group, slot, w, start, start + 1000000ll * ms);
    end_wait(w);
    pthread_mutex_unlock(group->mutex);
}
