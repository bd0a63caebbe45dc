/* SPDX-License-Identifier: Apache-2.0 */
/* Makes sure that a rank unmaps its windows (memory into which peers store rows directly) only
 * when no peer is storing into them.
 *
 * A rank that stores into a window first increments its num_storing and then loads the flag
 * `closed` of the window's owner. An owner that closes its context first sets `closed` and then
 * loads num_storing of each peer. These accesses are sequentially consistent. So either the
 * storing rank finds `closed` set and does not store, or the owner finds that a peer is storing
 * and waits. */
#include <time.h>

#include "backend/shared/shared.h"
#include "base/clock.h"

#define NAP_NS 50000

void shared_begin_stores(epic_group *g)
{
    add_ordered(&shared_rank_state_of(g, g->rank)->num_storing, 1);
}

void shared_end_stores(epic_group *g)
{
    add_ordered(&shared_rank_state_of(g, g->rank)->num_storing, (uint32_t)-1);
}

bool shared_may_store(epic_group *g, int peer)
{
    return !load_ordered(&shared_rank_state_of(g, peer)->closed);
}

/* Returns whether a peer may be storing into a window of this rank. A peer that has closed its
 * context cannot be storing, because it has finished its calls. */
static bool is_storing(epic_group *g, int peer)
{
    return load_ordered(&shared_rank_state_of(g, peer)->num_storing) &&
           !shared_is_gone(g, peer);
}

bool shared_close_windows(epic_group *g)
{
    const int64_t stop = clock_ns() + g->timeout_ns;
    shared_group_close(g);
    for (int r = 0; r < g->num_ranks; r++)
        while (r != g->rank && is_storing(g, r)) {
            if (clock_ns() >= stop) return false;
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        }
    return true;
}
