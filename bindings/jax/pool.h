/* SPDX-License-Identifier: Apache-2.0 */
/* Threads for operations that wait for peers: one thread for each operation in flight. */
#ifndef EPIC_JAX_POOL_H
#define EPIC_JAX_POOL_H

#include <stdbool.h>

/* A task. The struct of the caller begins with it. */
typedef struct pool_task {
    void (*run)(struct pool_task *task);
    struct pool_task *next; /* next in the queue of pool.c */
} pool_task;

/* Runs task->run on a thread of its own, which is an idle thread or a new one. Returns false if
 * the system cannot create a thread; the task does not run then. */
bool pool_run(pool_task *task);

#endif
