/* SPDX-License-Identifier: Apache-2.0 */
/* Limits the time of a wait in a bootstrap.
 *
 * A limit counts only the time in which this process ran, because it is a deadline
 * (base/deadline.h). A deadline detects that the process was suspended, for example by SIGSTOP,
 * only if it is checked before each sleep and sleeps are short. So every loop that waits calls
 * `ms = time_limit_look(limit)`, stops if ms is 0 (the limit has passed), and sleeps for at
 * most ms, for example in poll().
 *
 * A limit may have an outer limit. For example, the limit of the whole bootstrap is the outer
 * limit of the limit of one connection. A limit has passed if its own time or its outer limit
 * has passed. time_limit_look() checks both. */
#ifndef EPIC_BOOTSTRAP_TIME_LIMIT_H
#define EPIC_BOOTSTRAP_TIME_LIMIT_H

#include <poll.h>

#include "base/deadline.h"

#define TIME_LIMIT_LOOK_MS 50 /* maximum sleep between two checks */

typedef struct time_limit {
    deadline own;
    struct time_limit *outer; /* NULL: no outer limit */
} time_limit;

/* Starts a limit of `ms` milliseconds now, within `outer`, which may be NULL. */
static inline time_limit time_limit_begin(uint64_t ms, time_limit *outer)
{
    return (time_limit){.own = deadline_begin_ms(ms), .outer = outer};
}

/* Checks the limit before a sleep. Returns the maximum duration of the sleep in milliseconds,
 * at most TIME_LIMIT_LOOK_MS, or 0 if the limit has passed. If this process was suspended since
 * the last check, the limit restarts with its full timeout (base/deadline.h). */
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

/* Returns the remaining milliseconds, rounded up, or 0 if the limit has passed. Unlike
 * time_limit_look(), does not detect a suspension of the process. */
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

/* Makes the limit pass in `ms` milliseconds, unless it passes earlier anyway. Also shortens the
 * timeout with which the limit restarts after a suspension of the process. */
static inline void time_limit_shorten(time_limit *limit, uint32_t ms)
{
    deadline *own = &limit->own;
    const uint64_t end = (uint64_t)clock_ns() + ms * 1000000ull;
    if (end >= own->end_ns) return;
    own->end_ns = end;
    if (end - own->start_ns < own->timeout_ns) own->timeout_ns = end - own->start_ns;
}

/* Sleeps for `ms` milliseconds. If the limit passes earlier, returns then. */
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
