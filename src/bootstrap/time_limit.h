/* SPDX-License-Identifier: Apache-2.0 */
/* The time limit of a wait in a bootstrap.
 *
 * A limit counts only the time in which this process ran: base/deadline.h says how a stop of
 * the process (SIGSTOP, a suspended machine) is noticed.  That needs a look at the limit before
 * each sleep, and short sleeps.  So every loop that waits has the same form:
 *
 *     int ms = time_limit_look(limit);   how long the next sleep may take; 0: the limit has passed
 *     poll(..., ms);
 *
 * A limit may lie within an outer one, as that of one connection lies within that of the whole
 * bootstrap.  It passes when either has passed, and a look at it looks at both. */
#ifndef EPIC_BOOTSTRAP_TIME_LIMIT_H
#define EPIC_BOOTSTRAP_TIME_LIMIT_H

#include <poll.h>

#include "base/deadline.h"

#define TIME_LIMIT_LOOK_MS 50 /* longest sleep between two looks */

typedef struct time_limit {
    deadline own;
    struct time_limit *outer; /* NULL: none */
} time_limit;

/* Starts a limit of `ms` milliseconds now, within `outer`, which may be NULL. */
static inline time_limit time_limit_begin(uint64_t ms, time_limit *outer)
{
    return (time_limit){.own = deadline_begin_ms(ms), .outer = outer};
}

/* Returns how many milliseconds the sleep that follows may take, at most TIME_LIMIT_LOOK_MS; 0
 * if the limit has passed.  A limit starts anew if this process was stopped since the last
 * look. */
static inline int time_limit_look(time_limit *limit)
{
    uint64_t ns = TIME_LIMIT_LOOK_MS * 1000000ull;
    const uint64_t now = (uint64_t)clock_ns();
    for (time_limit *at = limit; at; at = at->outer) {
        if (deadline_look(&at->own, now)) return 0;
        ns = deadline_sleep_ns(&at->own, now, ns);
    }
    return (int)((ns + 999999) / 1000000);
}

/* Returns the milliseconds that are left, rounded up; 0 if the limit has passed.  This is no
 * look: a stop since the last look counts as time that has passed. */
static inline uint32_t time_limit_left_ms(const time_limit *limit)
{
    uint64_t ns = UINT32_MAX * 1000000ull;
    const uint64_t now = (uint64_t)clock_ns();
    for (const time_limit *at = limit; at; at = at->outer) {
        const uint64_t left = now < at->own.end_ns ? at->own.end_ns - now : 0;
        if (left < ns) ns = left;
    }
    return (uint32_t)((ns + 999999) / 1000000);
}

/* Lets the limit pass `ms` milliseconds from now, if that is earlier.  A limit that starts anew
 * later is shorter by the same time. */
static inline void time_limit_shorten(time_limit *limit, uint32_t ms)
{
    deadline *own = &limit->own;
    const uint64_t end = (uint64_t)clock_ns() + ms * 1000000ull;
    if (end >= own->end_ns) return;
    own->end_ns = end;
    if (end - own->start_ns < own->timeout_ns) own->timeout_ns = end - own->start_ns;
}

/* Sleeps for `ms` milliseconds, or until the limit has passed. */
static inline void time_limit_nap(time_limit *limit, int ms)
{
    while (ms > 0) {
        const int longest = time_limit_look(limit), nap = ms < longest ? ms : longest;
        if (nap == 0) return;
        poll(NULL, 0, nap);
        ms -= nap;
    }
}

#endif
