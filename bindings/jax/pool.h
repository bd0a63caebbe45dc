/* SPDX-License-Identifier: Apache-2.0 */
/* Threads for operations that wait for peers: one thread for each operation in flight. */
#ifndef EPIC_JAX_POOL_H
#define EPIC_JAX_POOL_H

#include <stdbool.h>

/* A task. The caller's own struct for a task begins with this one. */
typedef struct pool_task {
    void (*run)(struct pool_task *task);
    struct pool_task *next; /* next in the queue of pool.c */
} pool_task;

/* Runs task->run on a thread that no other task uses: an idle thread or a new one. If the
 * system cannot create a thread, returns false, and the task does not run. */
bool pool_run(pool_task *task);

#endif
