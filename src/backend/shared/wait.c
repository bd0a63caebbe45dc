/* SPDX-License-Identifier: Apache-2.0 */
/* Sleeping and waking.
 *
 * A bell is quiet, armed or asleep.  wait() on a quiet bell arms it and returns, so that its
 * caller asks once more; wait() on an armed bell, which nobody has rung since, sleeps.  Whoever
 * changes something stores first and then looks at the bell, both ordered: it sees the bell
 * armed, or the questions that follow the arming see the change. */
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "backend/shared/shared.h"
#include "base/clock.h"

#define WATCH_NS 50000
#define SPINS 1000 /* about a microsecond */

static void futex_sleep(const epic_group *g, _Atomic uint32_t *word, uint32_t seen, int64_t ns)
{
    const struct timespec limit = {.tv_sec = (time_t)(ns / 1000000000),
                                   .tv_nsec = (long)(ns % 1000000000)};
    const int op = g->across ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE;
    syscall(SYS_futex, word, op, seen, &limit, NULL, 0);
}

static void show_wait(const epic_group *g, shared_wait *wait, uint32_t phase,
                      const uint64_t *waits_for)
{
    for (int w = 0; w < (g->num_ranks + 63) / 64; w++)
        store_relaxed(&wait->waits_for[w], waits_for[w]);
    store_relaxed(&wait->phase, phase);
    store_release(&wait->heartbeat_ns, clock_ns());
}

static bool awaits_the_gone(epic_group *g, const uint64_t *waits_for)
{
    for (int r = 0; r < g->num_ranks; r++)
        if (waits_for[r / 64] >> (r % 64) & 1 && shared_is_gone(g, r)) return true;
    return false;
}

/* Shows a sign of life between two slices of sleep.  False: enough slept. */
static bool sleeps_on(epic_group *g, shared_wait *wait, const uint64_t *waits_for,
                      int64_t deadline)
{
    const int64_t now = clock_ns();
    store_release(&wait->heartbeat_ns, now);
    return now < deadline && load_ordered(&g->header->failure_state) == GROUP_WHOLE &&
           !awaits_the_gone(g, waits_for);
}

static void sleep_slice(epic_group *g, _Atomic uint32_t *word, uint32_t seen, int64_t deadline)
{
    const int64_t now = clock_ns();
    if (now >= deadline) return;
    const int64_t left = deadline - now;
    futex_sleep(g, word, seen, left < g->slice_ns ? left : g->slice_ns);
}

/* Could every rank have a core of its own?  All peers have joined. */
static bool has_cores(const epic_group *g)
{
    core_set any = {{0}};
    for (int r = 0; r < g->num_ranks; r++)
        for (int w = 0; w < CORE_WORDS; w++)
            any.words[w] |= load_relaxed(&head_of(g, r)->cores[w]);
    return cores_count(&any) >= g->num_ranks;
}

static bool have_own_cores(epic_group *g)
{
    int known = load_relaxed(&g->own_cores);
    if (!known) {
        known = 1 + has_cores(g);
        store_relaxed(&g->own_cores, known);
    }
    return known == 2;
}

/* Who has a core of its own keeps it; else the rank that will ring may need it. */
static bool watch_bell(epic_group *g, const shared_cell *cell)
{
    const bool spins = have_own_cores(g);
    const int64_t begin = clock_ns();
    int64_t now = begin;
    if (!spins && patience_is_over(&g->patience)) return false;
    for (bool rung = false; !rung && now - begin < WATCH_NS; now = clock_ns()) {
        for (int i = 0; spins && i < SPINS; i++)
            if (load_acquire(&cell->bell) == BELL_QUIET) return true;
        if (!spins) sched_yield();
        rung = load_acquire(&cell->bell) == BELL_QUIET;
    }
    if (!spins) patience_learn(&g->patience, now - begin);
    return load_acquire(&cell->bell) == BELL_QUIET;
}

static void sleep_on_bell(epic_group *g, shared_cell *cell, const uint64_t *waits_for,
                          int64_t deadline)
{
    uint32_t armed = BELL_ARMED;
    if (watch_bell(g, cell) || !compare_swap(&cell->bell, &armed, BELL_ASLEEP)) return;
    do sleep_slice(g, &cell->bell, BELL_ASLEEP, deadline);
    while (load_acquire(&cell->bell) == BELL_ASLEEP &&
           sleeps_on(g, &cell->wait, waits_for, deadline));
}

static bool any_cell_free(epic_group *g)
{
    for (int i = 0; i < g->layout.num_cells; i++)
        if (shared_cell_is_free(g, &g->exchanges[i])) return true;
    return false;
}

/* Several threads may stand at the door; each asks for itself after it has been counted. */
static void sleep_at_door(epic_group *g, const uint64_t *waits_for, int64_t deadline)
{
    shared_head *head = head_of(g, g->rank);
    add_ordered(&head->sleepers, 1);
    do {
        const uint32_t seen = load_ordered(&head->door);
        if (any_cell_free(g)) break;
        sleep_slice(g, &head->door, seen, deadline);
    } while (sleeps_on(g, &head->wait, waits_for, deadline));
    add_ordered(&head->sleepers, (uint32_t)-1);
}

void shared_sleep(epic_group *g, int index, uint32_t phase, const uint64_t *waits_for,
                  uint32_t ms)
{
    const int64_t deadline = clock_ns() + ms * 1000000ll;
    if (index < 0) {
        show_wait(g, &head_of(g, g->rank)->wait, phase, waits_for);
        sleep_at_door(g, waits_for, deadline);
        return;
    }
    shared_cell *cell = g->exchanges[index].cell;
    show_wait(g, &cell->wait, phase, waits_for);
    if (load_relaxed(&cell->bell) != BELL_QUIET) sleep_on_bell(g, cell, waits_for, deadline);
    store_ordered(&cell->bell, BELL_ARMED);
}
