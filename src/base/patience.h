/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for a moment before sleeping: a rank that waits gives its core to others and looks again,
 * since to sleep and be woken costs more than a short operation takes.  Who gives the core to a
 * program that computes, or to a rank that does, has it back after milliseconds, when a sleeper
 * would have been woken at once.  So after each late return more waits sleep at once, and fewer
 * after many that were in time: a layer between short operations spoils few of these. */
#ifndef EPIC_PATIENCE_H
#define EPIC_PATIENCE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define LATE_NS 500000 /* for one return */
#define LEAST_SLEEPS 8
#define MOST_SLEEPS 1024

/* Of all threads of a rank; zeros at first. */
typedef struct patience {
    _Atomic int sleeps; /* waits that still sleep at once */
    _Atomic int last;   /* how many the last late return cost */
} patience;

/* Does the wait that begins now sleep at once? */
static inline bool patience_is_over(patience *p)
{
    const int sleeps = atomic_load_explicit(&p->sleeps, memory_order_relaxed);
    if (sleeps == 0) return false;
    atomic_store_explicit(&p->sleeps, sleeps - 1, memory_order_relaxed);
    return true;
}

/* How long the core was away. */
static inline void patience_learn(patience *p, int64_t ns)
{
    int last = atomic_load_explicit(&p->last, memory_order_relaxed);
    if (ns <= LATE_NS) {
        if (last > 0) atomic_store_explicit(&p->last, last - 1, memory_order_relaxed);
        return;
    }
    last = last < LEAST_SLEEPS / 2 ? LEAST_SLEEPS : 2 * last;
    if (last > MOST_SLEEPS) last = MOST_SLEEPS;
    atomic_store_explicit(&p->last, last, memory_order_relaxed);
    atomic_store_explicit(&p->sleeps, last, memory_order_relaxed);
}

#endif
