/* SPDX-License-Identifier: Apache-2.0 */
/* The clock of all deadlines: CLOCK_MONOTONIC, which never goes back and cannot be set. */
#ifndef EPIC_CLOCK_H
#define EPIC_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Return the time of the monotonic clock in nanoseconds, microseconds and milliseconds. */
static inline int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t clock_us(void)
{
    return clock_ns() / 1000;
}

static inline int64_t clock_ms(void)
{
    return clock_ns() / 1000000;
}

/* Returns the monotonic time `ns` nanoseconds from now, as an absolute timeout. */
static inline struct timespec clock_in_ns(int64_t ns)
{
    const int64_t end = clock_ns() + ns;
    return (struct timespec){.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
}

#endif
