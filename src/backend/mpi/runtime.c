/* SPDX-License-Identifier: Apache-2.0 */
/* Starts MPI, determines whether several threads may call MPI, and reports MPI errors. */
#include <time.h>

#include "backend/mpi/group.h"
#include "base/error.h"

void runtime_nap(int64_t ns)
{
    const struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    nanosleep(&t, NULL);
}

/* If only one thread at a time may call MPI, all groups of the process use this mutex. */
static pthread_mutex_t one_thread = PTHREAD_MUTEX_INITIALIZER;

/* Returns the mutex that every MPI call of this process must hold, or NULL if several threads
 * may call MPI at the same time. */
pthread_mutex_t *runtime_mutex(void)
{
    int level = MPI_THREAD_MULTIPLE;
    MPI_Query_thread(&level);
    return level < MPI_THREAD_MULTIPLE ? &one_thread : NULL;
}

epic_result runtime_fail(int code, const char *what)
{
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, reason, &length);
    return epic_fail(EPIC_EDEVICE, "backend mpi: %s was refused: %.300s", what, reason);
}

/* Returns whether MPI is initialized and not finalized. */
bool runtime_is_up(void)
{
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    return initialized && !finalized;
}

/* Starts MPI with MPI_THREAD_MULTIPLE, unless the program has started MPI. Sets *ours to true
 * if this call started MPI. Returns EPIC_ENOTSUP if MPI was finalized or does not allow calls
 * from several threads. */
epic_result runtime_start(bool *ours)
{
    int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE, code;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (finalized)
        return epic_fail(EPIC_ENOTSUP, "backend mpi: MPI_Finalize was called; open contexts "
                                       "before it");
    if (!initialized) {
        code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
        if (code != MPI_SUCCESS) return runtime_fail(code, "MPI_Init_thread");
        *ours = true;
    }
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED)
        return epic_fail(EPIC_ENOTSUP,
                         "backend mpi: MPI was initialized with %s; it needs "
                         "MPI_THREAD_MULTIPLE (or MPI_THREAD_SERIALIZED): call "
                         "MPI_Init_thread with that level",
                         level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE"
                                                    : "MPI_THREAD_FUNNELED");
    return EPIC_OK;
}
