/* SPDX-License-Identifier: Apache-2.0 */
/* MPI itself.  There is one in a process, so here, and only here, are variables of the process:
 * did we start MPI, how many threads may call it, and the groups that were left.
 *
 * A group that this rank has left keeps its communicator until all peers have left: MPI gives the
 * number of a freed one to the next, and a late message would reach the wrong group.  Those are
 * freed when another group is opened or left, or when MPI ends.  A broken group keeps its own for
 * good. */
#include <stdlib.h>
#include <unistd.h>

#include "backend/mpi/group.h"
#include "base/error.h"

#define LAST_CALL_NS 1000000000 /* how long MPI_Finalize waits for peers that are leaving */

static struct {
    pthread_mutex_t mutex; /* guards all of this */
    bool ours;             /* we started MPI, in process `pid` */
    bool watched;          /* before_finalize is attached */
    bool any_broken;
    int num_open;
    pid_t pid;
    epic_group *left;
} runtime = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* Where MPI takes one thread at a time. */
static pthread_mutex_t one_thread = PTHREAD_MUTEX_INITIALIZER;

pthread_mutex_t *runtime_mutex(void)
{
    int level = MPI_THREAD_MULTIPLE;
    MPI_Query_thread(&level);
    return level < MPI_THREAD_MULTIPLE ? &one_thread : NULL;
}

epic_result runtime_sentence(int code, const char *what)
{
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, reason, &length);
    return epic_fail(EPIC_EDEVICE, "backend mpi: %s was refused: %.300s", what, reason);
}

bool runtime_is_up(void)
{
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    return initialized && !finalized;
}

/* ------------------------------------------------------------------ groups that were left */

static bool all_closed(const epic_group *group)
{
    for (int r = 0; r < group->num_ranks; r++)
        if (r != group->rank && !group->peers[r].closed) return false;
    return true;
}

static bool try_bury(epic_group *group)
{
    if (is_broken(group)) return false;
    pthread_mutex_lock(group->mutex);
    control_progress(group);
    const bool over = all_closed(group) && !is_broken(group);
    if (over) {
        control_stop(group);
        MPI_Comm_free(&group->comm);
    }
    pthread_mutex_unlock(group->mutex);
    if (over) tables_free(group);
    return over;
}

/* How many whole ones stay. */
static int sweep(void)
{
    int whole = 0;
    for (epic_group **at = &runtime.left; *at;) {
        epic_group *group = *at, *next = group->next;
        if (try_bury(group)) {
            *at = next;
        } else {
            whole += !is_broken(group);
            runtime.any_broken |= is_broken(group);
            at = &group->next;
        }
    }
    return whole;
}

void runtime_sweep(void)
{
    pthread_mutex_lock(&runtime.mutex);
    sweep();
    pthread_mutex_unlock(&runtime.mutex);
}

void runtime_opened(void)
{
    pthread_mutex_lock(&runtime.mutex);
    runtime.num_open++;
    pthread_mutex_unlock(&runtime.mutex);
}

void runtime_broke(void)
{
    pthread_mutex_lock(&runtime.mutex);
    runtime.any_broken = true;
    pthread_mutex_unlock(&runtime.mutex);
}

void runtime_retire(epic_group *group)
{
    pthread_mutex_lock(&runtime.mutex);
    runtime.num_open--;
    runtime.any_broken |= is_broken(group);
    group->next = runtime.left;
    runtime.left = group;
    if (runtime_is_up()) sweep();
    pthread_mutex_unlock(&runtime.mutex);
}

/* ------------------------------------------------------------------------ start and end ---- */

/* MPI calls this first thing in MPI_Finalize, whoever makes that call. */
static int before_finalize(MPI_Comm comm, int key, void *value, void *state)
{
    (void)comm, (void)key, (void)value, (void)state;
    pthread_mutex_lock(&runtime.mutex);
    const int64_t end = clock_ns() + LAST_CALL_NS;
    while (sweep() && clock_ns() < end) nap_ns(1000000);
    for (epic_group *group = runtime.left; group; group = group->next) {
        pthread_mutex_lock(group->mutex);
        control_stop(group);
        pthread_mutex_unlock(group->mutex);
    }
    pthread_mutex_unlock(&runtime.mutex);
    return MPI_SUCCESS;
}

/* MPI ends with the process if we started it, unless the end could wait for a peer for ever: then
 * mpirun sees a rank that did not end MPI, and ends the job. */
__attribute__((destructor)) static void end(void)
{
    if (!runtime.ours || runtime.pid != getpid() || !runtime_is_up()) return;
    if (!runtime.any_broken && !runtime.num_open) MPI_Finalize();
}

static int watch(void)
{
    int key = MPI_KEYVAL_INVALID;
    int code = MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_finalize, &key, NULL);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
    return code;
}

static epic_result start(void)
{
    int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE, code;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (finalized)
        return epic_fail(EPIC_ENOTSUP, "backend mpi: MPI_Finalize was called; open contexts "
                                       "before it");
    if (!initialized) {
        code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
        if (code != MPI_SUCCESS) return runtime_sentence(code, "MPI_Init_thread");
        runtime.ours = true;
        runtime.pid = getpid();
    }
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED)
        return epic_fail(EPIC_ENOTSUP,
                         "backend mpi: MPI was initialized with %s; it needs "
                         "MPI_THREAD_MULTIPLE (or MPI_THREAD_SERIALIZED): call "
                         "MPI_Init_thread with that level",
                         level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE"
                                                    : "MPI_THREAD_FUNNELED");
    if (runtime.watched) return EPIC_OK;
    code = watch();
    if (code != MPI_SUCCESS) return runtime_sentence(code, "MPI_Comm_set_attr");
    runtime.watched = true;
    return EPIC_OK;
}

epic_result runtime_start(void)
{
    pthread_mutex_lock(&runtime.mutex);
    const epic_result result = start();
    if (result == EPIC_OK) sweep();
    pthread_mutex_unlock(&runtime.mutex);
    return result;
}
