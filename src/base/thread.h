/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPIC_THREAD_H
#define EPIC_THREAD_H

#include <pthread.h>
#include <signal.h>

/* Starts a thread that runs run(self), with all signals blocked, so that the program's signal
 * handlers never run on it. Returns 0 or an errno. */
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
