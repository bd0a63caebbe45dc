/* SPDX-License-Identifier: Apache-2.0 */
/* Waking the threads that sleep on a bell or at a door; wait.c has the rules. */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/shared/shared.h"

static void futex_wake(const epic_group *g, _Atomic uint32_t *word)
{
    const int op = g->across ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE;
    syscall(SYS_futex, word, op, INT_MAX, NULL, NULL, 0);
}

void shared_ring(const epic_group *g, shared_cell *cell)
{
    if (load_ordered(&cell->bell) == BELL_QUIET) return;
    if (swap_ordered(&cell->bell, BELL_QUIET) == BELL_ASLEEP) futex_wake(g, &cell->bell);
}

void shared_ring_door(const epic_group *g, int rank)
{
    shared_head *head = head_of(g, rank);
    if (load_ordered(&head->sleepers) == 0) return;
    add_ordered(&head->door, 1);
    futex_wake(g, &head->door);
}

void shared_ring_all(const epic_group *g)
{
    for (int r = 0; r < g->num_ranks; r++) {
        shared_ring_door(g, r);
        const int used = (int)load_ordered(&head_of(g, r)->used_cells);
        for (int i = 0; i < used && i < g->layout.num_cells; i++)
            shared_ring(g, cell_of(g, r, i));
    }
}
