/* SPDX-License-Identifier: Apache-2.0 */
/* Creates a communicator with some of the ranks of another communicator, within a deadline.
 *
 * Of the MPI calls that create a communicator, only MPI_Comm_create_group is collective over
 * the ranks of the new communicator alone. It waits forever if one of these ranks dies. So if
 * MPI allows several threads, a separate thread calls it. At the deadline create_comm()
 * *abandons* the thread: it returns an error and no longer waits. If the MPI call returns
 * later, the thread itself frees its `creation`. */
#include <stdlib.h>

#include "backend/mpi/group.h"
#include "base/deadline.h"
#include "base/error.h"
#include "base/thread.h"

#define NAP_NS 50000

/* Arguments and result of MPI_Comm_create_group. The thread that calls it shares this struct
 * with create_comm(). */
typedef struct creation {
    pthread_mutex_t mutex; /* guards done and is_abandoned */
    MPI_Comm parent, comm;
    MPI_Group ranks;
    int tag, code;
    bool done, is_abandoned;
} creation;

static void free_creation(creation *c)
{
    pthread_mutex_destroy(&c->mutex);
    free(c);
}

/* The main function of the thread: calls MPI_Comm_create_group and stores the result. Frees *c
 * if create_comm() has abandoned this thread. */
static void *run_creation(void *self)
{
    creation *c = self;
    const int code = MPI_Comm_create_group(c->parent, c->ranks, c->tag, &c->comm);
    pthread_mutex_lock(&c->mutex);
    c->code = code;
    c->done = true;
    const bool is_abandoned = c->is_abandoned;
    pthread_mutex_unlock(&c->mutex);
    if (is_abandoned) free_creation(c);
    return NULL;
}

/* Returns whether MPI_Comm_create_group has returned. If it has not and `abandon` is set, marks
 * *c as abandoned, so that the thread will free *c. */
static bool is_done(creation *c, bool abandon)
{
    pthread_mutex_lock(&c->mutex);
    const bool done = c->done;
    c->is_abandoned = abandon && !done;
    pthread_mutex_unlock(&c->mutex);
    return done;
}

static int find_dead_peer(epic_group *group)
{
    const int64_t now = clock_ns();
    liveness_check(group, now);
    for (int r = 0; r < group->num_ranks; r++)
        if (liveness_is_gone(group, r)) return r;
    return -1;
}

/* Waits until the thread is done, the deadline has passed, or a rank of this host has died. */
static epic_result wait_for_creation(epic_group *group, creation *c)
{
    deadline end = deadline_begin_ms((uint64_t)(group->timeout_ns / 1000000));
    while (!is_done(c, false)) {
        const int dead = find_dead_peer(group);
        if (dead >= 0)
            return epic_fail(EPIC_EPEER,
                             "backend mpi: rank %d's process ended while the group was joined; "
                             "open a new group",
                             dead);
        if (deadline_before_nap(&end, NAP_NS))
            return epic_fail(
                EPIC_ETIMEOUT,
                "backend mpi: MPI_Comm_create_group did not return within %lld ms: "
                "a rank is gone or stopped; open a new group",
                (long long)(group->timeout_ns / 1000000));
        runtime_nap(NAP_NS);
    }
    return EPIC_OK;
}

/* Creates group->comm, a communicator of the ranks in `ranks`, which must all be ranks of
 * `parent`. Collective over these ranks. If MPI allows only one thread, or no thread can be
 * started, calls MPI directly, without a deadline. Errors: EPIC_ETIMEOUT, EPIC_EPEER (a rank of
 * this host died), EPIC_EDEVICE, EPIC_ENOMEM. */
epic_result create_comm(epic_group *group, MPI_Comm parent, MPI_Group ranks, int tag)
{
    pthread_t thread;
    creation *c = calloc(1, sizeof *c);
    if (!c) return epic_fail(EPIC_ENOMEM, "no memory for a communicator");
    *c = (creation){.parent = parent, .comm = MPI_COMM_NULL, .ranks = ranks, .tag = tag};
    pthread_mutex_init(&c->mutex, NULL);
    if (runtime_mutex() || thread_start(&thread, run_creation, c) != 0) {
        run_creation(c);
    } else {
        const epic_result result = wait_for_creation(group, c);
        if (!is_done(c, result != EPIC_OK)) {
            pthread_detach(thread);
            lifecycle_mark_broken();
            return result;
        }
        pthread_join(thread, NULL);
    }
    group->comm = c->comm;
    const int code = c->code;
    free_creation(c);
    return code == MPI_SUCCESS ? EPIC_OK : runtime_fail(code, "MPI_Comm_create_group");
}
