/* SPDX-License-Identifier: Apache-2.0 */
/* Wakes threads that sleep on the futex of an op slot, or that wait for a free slot. wait.c
 * describes the protocol. */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/shared/shared.h"

static void futex_wake(const epic_group *g, _Atomic uint32_t *word)
{
    const int op = g->is_shared_by_processes ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE;
    syscall(SYS_futex, word, op, INT_MAX, NULL, NULL, 0);
}

/* Sets the futex of an op slot to idle, and wakes the slot's owner if it sleeps. The caller
 * must have stored its change before. If the futex is idle already, the owner is awake and no
 * system call is needed. */
void shared_wake_slot(const epic_group *g, shared_op_slot *slot)
{
    if (load_ordered(&slot->futex) == SLOT_FUTEX_IDLE) return;
    if (swap_ordered(&slot->futex, SLOT_FUTEX_IDLE) == SLOT_FUTEX_ASLEEP)
        futex_wake(g, &slot->futex);
}

void shared_wake_free_slot(const epic_group *g, int rank)
{
    shared_rank_state *head = shared_rank_state_of(g, rank);
    if (load_ordered(&head->num_sleepers) == 0) return;
    add_ordered(&head->free_slot_futex, 1);
    futex_wake(g, &head->free_slot_futex);
}

void shared_wake_all(const epic_group *g)
{
    for (int r = 0; r < g->num_ranks; r++) {
        shared_wake_free_slot(g, r);
        const int used = (int)load_ordered(&shared_rank_state_of(g, r)->num_used_slots);
        for (int i = 0; i < used && i < g->layout.num_slots; i++)
            shared_wake_slot(g, shared_op_slot_of(g, r, i));
    }
}
