/* SPDX-License-Identifier: Apache-2.0 */
/* Decides whether a waiting rank first spins or sleeps at once.
 *
 * A rank that waits for a peer usually spins for a short time with sched_yield(), because
 * sleeping and waking up takes longer than a short operation. But if another thread computes on
 * the same core, sched_yield() may return only after milliseconds, while a sleeping rank would
 * be woken at once. So after a sched_yield() that returns late, the next N waits sleep at once.
 * N is LEAST_SLEEPS after the first late return, and doubles with each further late return, up
 * to MOST_SLEEPS. Each return that is not late reduces N by two. */
#ifndef EPIC_PATIENCE_H
#define EPIC_PATIENCE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define LATE_NS 500000 /* a sched_yield() that takes longer than this counts as late */
/* number of waits that sleep without spinning after the first late return of sched_yield() */
#define LEAST_SLEEPS 8
#define MOST_SLEEPS 1024

/* State of all waits of a rank. The threads of the rank share it. All fields are initially
 * zero. All accesses have relaxed memory order, because a lost update only means that a few
 * more or fewer waits sleep. */
typedef struct patience {
    _Atomic int sleeps; /* the next `sleeps` waits sleep without spinning */
    /* Half of the number N of waits that will sleep after the next late return. A value below
     * LEAST_SLEEPS / 2 counts as LEAST_SLEEPS / 2. Each return that is not late reduces it by
     * one. */
    _Atomic int last;
} patience;

/* Returns whether the new wait must sleep without spinning. Decrements `sleeps`. */
static inline bool patience_is_over(patience *p)
{
    const int sleeps = atomic_load_explicit(&p->sleeps, memory_order_relaxed);
    if (sleeps == 0) return false;
    atomic_store_explicit(&p->sleeps, sleeps - 1, memory_order_relaxed);
    return true;
}

/* Records that sched_yield() returned after `ns` nanoseconds. */
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
