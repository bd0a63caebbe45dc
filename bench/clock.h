/* SPDX-License-Identifier: Apache-2.0 */
/* The clock and the pause that the benchmarks of host groups use. */
#ifndef EPIC_BENCH_CLOCK_H
#define EPIC_BENCH_CLOCK_H

#include <time.h>

/* Returns the time of a clock that never goes back, in microseconds. */
static inline double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Sleeps for `ns` nanoseconds, less than a second. */
static inline void nap(long ns)
{
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

#endif
