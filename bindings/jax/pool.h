/* SPDX-License-Identifier: Apache-2.0 */
/* Threads for operations that wait for peers: always one for each. */
#ifndef EPIC_JAX_POOL_H
#define EPIC_JAX_POOL_H

#include <stdbool.h>

typedef struct pool_task {
    void (*run)(struct pool_task *task);
    struct pool_task *next; /* the pool's */
} pool_task;

/* Runs task->run on a thread that does nothing else until it returns; a new thread if all are
 * busy.  false: the system gives no more threads, and the task will not run. */
bool pool_run(pool_task *task);

#endif
