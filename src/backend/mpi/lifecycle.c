/* SPDX-License-Identifier: Apache-2.0 */
/* Starts and ends MPI. A process can start MPI only once, so this file keeps one state for the
 * whole process: whether EPIC started MPI, and which groups this rank has left.
 *
 * The communicator of a group is freed only after all peers have left the group too. If the
 * communicator were freed earlier, MPI could reuse its id for another group, and that group
 * would receive delayed messages of the first group. Communicators are freed when this rank
 * opens or leaves another group, and in MPI_Finalize. The communicator of a broken group is
 * never freed. */
#include <unistd.h>

#include "backend/mpi/group.h"
#include "base/error.h"

#define LAST_CALL_NS 1000000000 /* maximum time that MPI_Finalize waits for peers to leave */

static struct {
    pthread_mutex_t mutex; /* guards the members below */
    /* true: EPIC started MPI, in the process `pid`. A forked child must not call
     * MPI_Finalize. */
    bool ours;
    bool watched; /* true: before_finalize() is attached to MPI */
    bool any_broken;
    int num_open;
    pid_t pid;
    epic_group *left;
} lifecycle = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static bool all_closed(const epic_group *group)
{
    for (int r = 0; r < group->num_ranks; r++)
        if (r != group->rank && !group->peers[r].closed) return false;
    return true;
}

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

/* Frees the groups that all peers have left. Returns the number of remaining groups that are
 * not broken. The caller holds lifecycle.mutex. */
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

/* Counts one more group that this rank has joined. */
void lifecycle_add_open(void)
{
    pthread_mutex_lock(&lifecycle.mutex);
    lifecycle.num_open++;
    pthread_mutex_unlock(&lifecycle.mutex);
}

/* Records that a group is broken or that an MPI call may hang, so that this process does not
 * call MPI_Finalize when it exits. */
void lifecycle_mark_broken(void)
{
    pthread_mutex_lock(&lifecycle.mutex);
    lifecycle.any_broken = true;
    pthread_mutex_unlock(&lifecycle.mutex);
}

/* Takes ownership of a group that this rank has left. Frees groups that all peers have left. */
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

/* MPI calls this function at the beginning of MPI_Finalize, whether EPIC or the program calls
 * MPI_Finalize. It waits up to LAST_CALL_NS for peers that are leaving, then cancels the posted
 * receives. */
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

/* Runs when the process exits. Calls MPI_Finalize if EPIC started MPI, unless a group is broken
 * or still open, because MPI_Finalize could then wait forever. If a process exits without
 * MPI_Finalize, mpirun kills the whole job. */
__attribute__((destructor)) static void finalize_at_exit(void)
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

/* Starts MPI if necessary. The first call registers before_finalize(), which MPI_Finalize()
 * then calls. Also frees groups that all ranks have left. */
epic_result lifecycle_start(void)
{
    pthread_mutex_lock(&lifecycle.mutex);
    const epic_result result = start_locked();
    if (result == EPIC_OK) free_left_groups();
    pthread_mutex_unlock(&lifecycle.mutex);
    return result;
}
