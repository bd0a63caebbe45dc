/* SPDX-License-Identifier: Apache-2.0 */
/* Starting of EPIC's own threads. */
#ifndef EPIC_THREAD_H
#define EPIC_THREAD_H

#include <pthread.h>
#include <signal.h>

/* Starts a thread with all signals blocked, so that no signal handler of the program runs on
 * it. Returns 0 or an errno. */
static inline int thread_start(pthread_t *out, void *(*run)(void *), void *self)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(out, NULL, run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

#endif
