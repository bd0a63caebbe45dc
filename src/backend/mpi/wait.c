/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting: looks at MPI, yields at first and then naps, because ranks may outnumber cores. */
#include <sched.h>
#include <string.h>

#include "backend/mpi/group.h"

#define SPIN_NS 50000 /* so long a rank keeps its core if each has one */
#define YIELD_NS \
    1000000 /* so long without naps: the shortest takes three times what is asked */
#define SHORTEST_NAP_NS 20000
#define LONGEST_NAP_NS 200000
#define PATIENCE_NS 1000000 /* with peers that are gone */
#define LOOKS_AT_NOTES 8    /* the first of so many, by who waits for rows */

static void begin_wait(waiting *w, uint32_t phase, const uint64_t *waits_for)
{
    w->now = true;
    w->phase = phase;
    if (waits_for)
        memcpy(w->waits_for, waits_for, sizeof w->waits_for);
    else
        memset(w->waits_for, 0, sizeof w->waits_for);
}

static void end_wait(waiting *w)
{
    w->now = false;
    w->last_ns = clock_ns();
}

/* A wait for a peer that is gone is soon over: the caller judges whether it still owes us. */
static bool awaits_the_gone(epic_group *group, const waiting *w, int64_t now)
{
    lives_look(group, now);
    for (int r = 0; r < group->num_ranks; r++)
        if (has_rank(w->waits_for, r) && lives_is_gone(group, r)) return true;
    return false;
}

/* Has anything changed for the cell since its last wait?  (c NULL: is a cell free?)  Who waits
 * for rows looks at notes and failures now and then. */
static bool look_around(epic_group *group, cell *c)
{
    if (is_broken(group)) return true;
    if (!c) {
        progress_control(group);
        progress_drain(group);
        return cells_find_free(group) != NULL;
    }
    if (c->events == c->seen) progress_cell(group, c);
    if (c->events != c->seen) return true;
    if (c->per_segment && ++c->looks % LOOKS_AT_NOTES == 0) progress_control(group);
    sights_ask(group, c, clock_ns());
    return c->events != c->seen;
}

/* A look may have MPI receive what only the next one finds: so that one comes first. */
static void rest(const epic_group *group, int looks, int64_t waited, int64_t left)
{
    if (waited < YIELD_NS) {
        const bool keeps = waited < SPIN_NS && group->own_cores;
        if (!keeps && looks % 2 == 0) sched_yield();
        return;
    }
    int64_t ns = waited / 8;
    if (ns < SHORTEST_NAP_NS) ns = SHORTEST_NAP_NS;
    if (ns > LONGEST_NAP_NS) ns = LONGEST_NAP_NS;
    nap_ns(ns < left ? ns : left);
}

static void wait_until(epic_group *group, cell *c, waiting *w, int64_t start, int64_t end)
{
    for (int looks = 1; !look_around(group, c); looks++) {
        pthread_mutex_unlock(group->mutex);
        const int64_t now = clock_ns();
        if (now < end) rest(group, looks, now - start, end - now);
        pthread_mutex_lock(group->mutex);
        w->now = true; /* threads that wait for a free cell share it */
        if (now >= end || (now - start >= PATIENCE_NS && awaits_the_gone(group, w, now)))
            return;
    }
    if (!c) return;
    c->seen = c->events;
    c->waiting.quiet_ns = clock_ns();
}

void mpi_wait(epic_group *group, int index, uint32_t phase, const uint64_t *waits_for,
              uint32_t ms)
{
    cell *c = index < 0 ? NULL : &group->cells[index];
    waiting *w = c ? &c->waiting : &group->waiting;
    const int64_t start = clock_ns();
    pthread_mutex_lock(group->mutex);
    begin_wait(w, phase, waits_for);
    wait_until(group, c, w, start, start + 1000000ll * ms);
    end_wait(w);
    pthread_mutex_unlock(group->mutex);
}
