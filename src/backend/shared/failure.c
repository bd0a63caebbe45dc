/* SPDX-License-Identifier: Apache-2.0 */
/* The failure of a group, which is the first one that any rank reports, and whether a peer is
 * gone. */
#include <time.h>

#include "backend/shared/shared.h"
#include "base/clock.h"

#define PATIENCE_NS 100000000 /* wait this long for a rank that is writing its failure */

/* Returns whether the peer has closed its context or its process has ended. */
bool shared_is_gone(epic_group *g, int peer)
{
    return load_acquire(&shared_rank_state_of(g, peer)->closed) ||
           (g->is_dead && g->is_dead(g, peer));
}

/* Makes this rank the writer of the failure, also in place of a rank that ended while writing.
 * Returns false if the group is broken already. */
static bool become_writer(epic_group *g)
{
    const int64_t stop = clock_ns() + PATIENCE_NS;
    for (;;) {
        uint32_t state = load_ordered(&g->header->failure_state);
        if (state == GROUP_BROKEN) return false;
        const bool open = state == GROUP_HEALTHY || shared_is_gone(g, (int)state - 1);
        if (open && compare_swap(&g->header->failure_state, &state, (uint32_t)g->rank + 1))
            return true;
        if (clock_ns() >= stop) return false;
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

/* Records a failure, unless there is one, and wakes all ranks. */
void shared_break_group(epic_group *g, const epic_failure_info *failure)
{
    if (!become_writer(g)) return;
    g->header->failure = *failure;
    store_ordered(&g->header->failure_state, GROUP_BROKEN);
    shared_wake_all(g);
}

/* Copies the failure of the group to *out. Returns false if the group is healthy. */
bool shared_failure(epic_group *g, epic_failure_info *out)
{
    if (load_ordered(&g->header->failure_state) != GROUP_BROKEN) return false;
    *out = g->header->failure;
    return true;
}
