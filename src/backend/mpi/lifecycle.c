/* SPDX-License-Identifier: Apache-2.0 */
/* From the start of MPI to its end. A process has one MPI, so this file keeps the state of the
 * process: whether EPIC started MPI, and the groups that this rank has left.
 *
 * A group that this rank has left keeps its communicator until all peers have left, too. MPI
 * reuses the number of a freed communicator, and a late message would then reach the wrong
 * group. Such groups are freed when another group is opened or left, or when MPI ends. The
 * communicator of a broken group is never freed. */
#include <unistd.h>

#include "backend/mpi/group.h"
#include "base/error.h"

#define LAST_CALL_NS 1000000000 /* how long MPI_Finalize waits for peers that are leaving */

static struct {
    pthread_mutex_t mutex; /* guards the members below */
    bool ours;             /* EPIC started MPI, in process `pid` */
    bool watched;          /* before_finalize() is attached */
    bool any_broken;
    int num_open;
    pid_t pid;
    epic_group *left;
} lifecycle = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* ------------------------------------------------------------------ groups that were left */

static bool all_closed(const epic_group *group)
{
    for (int r = 0; r < group->num_ranks; r++)
        if (r != group->rank && !group->peers[r].closed) return false;
    return true;
}

/* Frees a group that all peers have left. Returns whether it did. */
static bool free_if_all_closed(epic_group *group)
{
    if (is_broken(group)) return false;
    pthread_mutex_lock(group->mutex);
    progress_control(group);
    const bool over = all_closed(group) && !is_broken(group);
    if (over) {
        control_stop(group);
        MPI_Comm_free(&group->comm);
    }
    pthread_mutex_unlock(group->mutex);
    if (over) tables_free(group);
    return over;
}

/* Frees the groups that all peers have left. Returns how many groups that are not broken
 * remain. */
static int free_left_groups(void)
{
    int whole = 0;
    for (epic_group **at = &lifecycle.left; *at;) {
        epic_group *group = *at, *next = group->next;
        if (free_if_all_closed(group)) {
            *at = next;
        } else {
            whole += !is_broken(group);
            lifecycle.any_broken |= is_broken(group);
            at = &group->next;
        }
    }
    return whole;
}

void lifecycle_add_open(void)
{
    pthread_mutex_lock(&lifecycle.mutex);
    lifecycle.num_open++;
    pthread_mutex_unlock(&lifecycle.mutex);
}

void lifecycle_mark_broken(void)
{
    pthread_mutex_lock(&lifecycle.mutex);
    lifecycle.any_broken = true;
    pthread_mutex_unlock(&lifecycle.mutex);
}

void lifecycle_retire(epic_group *group)
{
    pthread_mutex_lock(&lifecycle.mutex);
    lifecycle.num_open--;
    lifecycle.any_broken |= is_broken(group);
    group->next = lifecycle.left;
    lifecycle.left = group;
    if (runtime_is_up()) free_left_groups();
    pthread_mutex_unlock(&lifecycle.mutex);
}

/* ------------------------------------------------------------------------ start and end ---- */

/* MPI calls this at the beginning of MPI_Finalize, whoever calls that. */
static int before_finalize(MPI_Comm comm, int key, void *value, void *state)
{
    (void)comm, (void)key, (void)value, (void)state;
    pthread_mutex_lock(&lifecycle.mutex);
    const int64_t end = clock_ns() + LAST_CALL_NS;
    while (free_left_groups() && clock_ns() < end) runtime_nap(1000000);
    for (epic_group *group = lifecycle.left; group; group = group->next) {
        pthread_mutex_lock(group->mutex);
        control_stop(group);
        pthread_mutex_unlock(group->mutex);
    }
    pthread_mutex_unlock(&lifecycle.mutex);
    return MPI_SUCCESS;
}

/* Ends MPI at the end of the process if EPIC started it, unless MPI_Finalize could wait forever
 * for a peer. Then mpirun notices a rank that did not end MPI, and ends the job. */
__attribute__((destructor)) static void end(void)
{
    if (!lifecycle.ours || lifecycle.pid != getpid() || !runtime_is_up()) return;
    if (!lifecycle.any_broken && !lifecycle.num_open) MPI_Finalize();
}

static int attach_finalize_hook(void)
{
    int key = MPI_KEYVAL_INVALID;
    int code = MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_finalize, &key, NULL);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
    return code;
}

/* Starts MPI if necessary and hooks MPI_Finalize once. The caller holds the mutex. */
static epic_result start_locked(void)
{
    bool ours = false;
    const epic_result result = runtime_start(&ours);
    if (ours) {
        lifecycle.ours = true;
        lifecycle.pid = getpid();
    }
    TRY(result);
    if (lifecycle.watched) return EPIC_OK;
    const int code = attach_finalize_hook();
    if (code != MPI_SUCCESS) return runtime_fail(code, "MPI_Comm_set_attr");
    lifecycle.watched = true;
    return EPIC_OK;
}

epic_result lifecycle_start(void)
{
    pthread_mutex_lock(&lifecycle.mutex);
    const epic_result result = start_locked();
    if (result == EPIC_OK) free_left_groups();
    pthread_mutex_unlock(&lifecycle.mutex);
    return result;
}
