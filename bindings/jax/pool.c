/* SPDX-License-Identifier: Apache-2.0 */
/* Threads for operations that wait for peers.
 *
 * When an operation is complete, its thread completes the operation's future. XLA may then run
 * the rest of the program on that same thread, and the program may wait in another collective.
 * So a queued task must never wait for a thread that runs another task: that thread may itself
 * wait for the queued task. Therefore there are always at least as many idle threads as queued
 * tasks. A thread that was idle for IDLE_SECONDS exits. */
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

enum { IDLE_SECONDS = 30, STACK_BYTES = 8 << 20 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t task_ready = PTHREAD_COND_INITIALIZER;
static pool_task *first_task; /* queued tasks, in any order */
/* number of tasks in the queue, and of idle threads that wait for a task */
static int num_tasks, num_waiting;

/* Returns the time at which a thread exits that is idle from now on. */
static struct timespec idle_deadline(void)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += IDLE_SECONDS;
    return end;
}

/* Waits for a task and returns it. Returns NULL if none arrives within IDLE_SECONDS. */
static pool_task *next_task(void)
{
    const struct timespec end = idle_deadline();
    pthread_mutex_lock(&mutex);
    num_waiting++;
    int error = 0;
    while (first_task == NULL && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&task_ready, &mutex, &end);
    num_waiting--;
    pool_task *task = first_task;
    if (task != NULL) {
        first_task = task->next;
        num_tasks--;
    }
    pthread_mutex_unlock(&mutex);
    return task;
}

/* A thread of the pool: runs `task`, then further tasks. */
static void *run_tasks(void *task)
{
    for (; task != NULL; task = next_task()) ((pool_task *)task)->run(task);
    return NULL;
}

/* Starts a detached thread whose first task is `task`. Returns false if that fails. */
static bool start_thread(pool_task *task)
{
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes)) return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    const bool started = pthread_create(&thread, &attributes, run_tasks, task) == 0;
    pthread_attr_destroy(&attributes);
    return started;
}

bool pool_run(pool_task *task)
{
    pthread_mutex_lock(&mutex);
    const bool waits = num_waiting > num_tasks; /* true: an idle thread is free for this task */
    if (waits) {
        task->next = first_task;
        first_task = task;
        num_tasks++;
        pthread_cond_signal(&task_ready);
    }
    pthread_mutex_unlock(&mutex);
    return waits || start_thread(task);
}
