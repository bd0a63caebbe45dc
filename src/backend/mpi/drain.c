/* SPDX-License-Identifier: Apache-2.0 */
/* The drain thread: polls MPI until the rows of finished exchanges are sent.
 *
 * When this rank has finished an exchange, a slow peer may not have received all rows of this
 * rank yet. MPI sends the remaining rows only while this rank calls MPI, but the rank may
 * compute for a long time or never call EPIC again. So while there are unsent rows and no other
 * thread polls, the drain thread polls MPI once per millisecond.
 *
 * After IDLE_LOOKS polls without unsent rows the thread sleeps until mpi_finish() wakes it. It
 * does not sleep at once, because waking it costs more than a short operation. */

#include "backend/mpi/group.h"
#include "base/error.h"
#include "base/thread.h"

#define PACE_NS 1000000
/* the thread sleeps after this many polls (one per ms) without unsent rows */
#define IDLE_LOOKS 20

static void wake_drain(epic_group *group)
{
    if (group->drain_sleeps) pthread_cond_signal(&group->drain_wake_up);
}

/* Sleeps for PACE_NS without the mutex. Polls MPI after that, unless another thread has polled
 * during the sleep. The caller holds the mutex. */
static void drain_once(epic_group *group)
{
    const uint64_t looks = group->num_looks;
    pthread_mutex_unlock(group->mutex);
    do runtime_nap(PACE_NS);
    while (pthread_mutex_trylock(group->mutex) != 0);
    if (looks == group->num_looks && !is_broken(group)) progress_drain(group);
}

/* The main function of the drain thread. The thread sleeps after IDLE_LOOKS milliseconds
 * without unsent rows, and while the group is broken. */
static void *drain_run(void *self)
{
    epic_group *group = self;
    int idle = 0;
    pthread_mutex_lock(group->mutex);
    while (!group->leaving) {
        idle = group->num_draining ? 0 : idle + 1;
        if (idle <= IDLE_LOOKS && !is_broken(group)) {
            drain_once(group);
            continue;
        }
        group->drain_sleeps = true;
        pthread_cond_wait(&group->drain_wake_up, group->mutex);
        group->drain_sleeps = false;
    }
    pthread_mutex_unlock(group->mutex);
    return NULL;
}

epic_result drain_start(epic_group *group)
{
    group->drain_runs = thread_start(&group->drain_thread, drain_run, group) == 0;
    if (group->drain_runs) return EPIC_OK;
    return epic_fail(EPIC_ENOMEM, "backend mpi: the system refused one more thread");
}

void drain_stop(epic_group *group)
{
    if (!group->drain_runs) return;
    pthread_mutex_lock(group->mutex);
    group->leaving = true;
    wake_drain(group);
    pthread_mutex_unlock(group->mutex);
    pthread_join(group->drain_thread, NULL);
    group->drain_runs = false;
}

/* Implements epic_transport.finish. The op slot is in the state SLOT_DRAINING until MPI has
 * sent all its rows. After that it is free. */
void mpi_finish(epic_group *group, int index)
{
    op_slot *slot = &group->slots[index];
    pthread_mutex_lock(group->mutex);
    slot->state = SLOT_DRAINING;
    group->num_draining++;
    wake_drain(group);
    pthread_mutex_unlock(group->mutex);
}
