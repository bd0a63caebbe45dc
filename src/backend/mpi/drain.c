/* SPDX-License-Identifier: Apache-2.0 */
/* A rank that has finished an exchange may compute for long, or never call us again, while MPI
 * still needs it to move rows that a slow peer has not fetched.  This thread lends MPI a moment
 * every millisecond while there are such rows, and sleeps otherwise. */
#include <signal.h>

#include "backend/mpi/group.h"
#include "base/error.h"

#define PACE_NS 1000000

static void *drain(void *self)
{
    epic_group *group = self;
    pthread_mutex_lock(group->mutex);
    while (!group->leaving) {
        if (!group->num_draining || is_broken(group)) {
            pthread_cond_wait(&group->wake_drainer, group->mutex);
            continue;
        }
        pthread_mutex_unlock(group->mutex);
        nap_ns(PACE_NS);
        pthread_mutex_lock(group->mutex);
        if (!is_broken(group)) cells_drain(group);
    }
    pthread_mutex_unlock(group->mutex);
    return NULL;
}

/* The caller's signal handlers never run on our thread. */
epic_result drain_start(epic_group *group)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    group->drainer_runs = pthread_create(&group->drainer, NULL, drain, group) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (group->drainer_runs) return EPIC_OK;
    return epic_fail(EPIC_ENOMEM, "backend mpi: the system refused one more thread");
}

void drain_wake(epic_group *group)
{
    pthread_cond_signal(&group->wake_drainer);
}

void drain_stop(epic_group *group)
{
    if (!group->drainer_runs) return;
    pthread_mutex_lock(group->mutex);
    group->leaving = true;
    drain_wake(group);
    pthread_mutex_unlock(group->mutex);
    pthread_join(group->drainer, NULL);
    group->drainer_runs = false;
}
