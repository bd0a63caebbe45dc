/* SPDX-License-Identifier: Apache-2.0 */
/* Decides whether a rank that waits first spins or sleeps at once.
 *
 * A waiting rank spins for a moment with sched_yield(), since to sleep and be woken takes
 * longer than a short operation.  But if another thread computes on the core, the rank gets it
 * back only after milliseconds, while a sleeping rank would be woken at once.  So after each
 * late return from sched_yield() the next waits sleep at once: 8 of them at first, twice as
 * many each time.  After returns in time the number falls again.  So the compute between short
 * operations delays few waits. */
#ifndef EPIC_PATIENCE_H
#define EPIC_PATIENCE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define LATE_NS 500000 /* a return that took longer is late */
#define LEAST_SLEEPS 8 /* waits that sleep after the first late return */
#define MOST_SLEEPS 1024

/* State shared by all threads of a rank; zeros at first. */
typedef struct patience {
    _Atomic int sleeps; /* waits that still sleep at once */
    _Atomic int last;   /* number of sleeps after the last late return */
} patience;

/* Returns true if the wait that begins now must sleep at once. */
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
