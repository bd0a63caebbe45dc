/* SPDX-License-Identifier: Apache-2.0 */
/* Stores the first failure that any rank reports in the segment (shared memory), so that all
 * ranks return this failure. Also determines whether a peer is gone (has closed its context or
 * has died). */
#include <time.h>

#include "backend/shared/shared.h"
#include "base/clock.h"

#define PATIENCE_NS 100000000 /* maximum wait for a rank that is writing a failure */

/* Returns whether the segment shows that the peer has closed its context or has died. */
bool shared_is_known_gone(const epic_group *g, int peer)
{
    const shared_rank_state *state = shared_rank_state_of(g, peer);
    return load_acquire(&state->closed) || load_acquire(&state->ended);
}

/* Returns whether the peer has closed its context or has died. If the segment shows neither,
 * checks the peer's process. */
bool shared_is_gone(epic_group *g, int peer)
{
    return shared_is_known_gone(g, peer) || (g->is_dead && g->is_dead(g, peer));
}

/* Implements epic_transport.any_gone. A rank that closes, or that finds that a peer has exited,
 * stores any_gone and then loads the futexes. A rank that goes to sleep stores its futex and
 * then loads any_gone (wait.c). All these accesses are sequentially consistent, so at least one
 * of the two ranks sees the store of the other. */
bool shared_any_gone(const epic_group *g)
{
    return load_ordered(&g->header->any_gone) != 0;
}

/* Records in the segment that the process of a peer has exited, and wakes all ranks. */
void shared_report_end(epic_group *g, int peer)
{
    store_release(&shared_rank_state_of(g, peer)->ended, 1);
    store_ordered(&g->header->any_gone, 1);
    shared_wake_all(g);
}

/* Claims failure_state, so that this rank may write the failure. If another rank has claimed
 * it, waits until that rank has written its failure; if that rank has died, takes over its
 * claim. Returns false if the group already has a failure, or if the wait exceeds
 * PATIENCE_NS. */
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

/* Stores the first failure of the group in shared memory, and wakes all ranks. The ordered
 * store of GROUP_BROKEN comes after the stores of the failure's fields, so a rank that has
 * loaded GROUP_BROKEN reads the complete failure. */
void shared_break_group(epic_group *g, const epic_failure_info *failure)
{
    if (!become_writer(g)) return;
    g->header->failure = *failure;
    store_ordered(&g->header->failure_state, GROUP_BROKEN);
    shared_wake_all(g);
}

bool shared_failure(epic_group *g, epic_failure_info *out)
{
    if (load_ordered(&g->header->failure_state) != GROUP_BROKEN) return false;
    *out = g->header->failure;
    return true;
}
