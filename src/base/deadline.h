/* SPDX-License-Identifier: Apache-2.0 */
/* A deadline that counts only the time in which this process ran.
 *
 * A process can be suspended by Ctrl-Z (SIGSTOP), `scontrol suspend`, a frozen container, or a
 * paused virtual machine, while the monotonic clock continues. If all ranks were suspended
 * together, the first rank that continues would find that its own deadline has passed, and
 * would report that its peers did not answer. So before each sleep a waiting rank stores the
 * time of its next check (expected_ns). If that check comes much later, this process was
 * suspended. In this case the deadline restarts with its full timeout, so that peers have this
 * time to continue, too.
 *
 * On a machine that is always overloaded, checks are late without a suspension, and the
 * deadline must not restart forever. So a deadline may restart only while the process has run
 * for less than DEADLINE_RESTART_LIMIT times the timeout since the wait began. After that, a
 * suspension only postpones the deadline by the length of the suspension.
 *
 * A deadline belongs to one thread: the functions take no locks. */
#ifndef EPIC_DEADLINE_H
#define EPIC_DEADLINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

/* A suspension restarts the deadline only while the wait has run for less than this many
 * timeouts. */
#define DEADLINE_RESTART_LIMIT 4
/* If a check is late by more than this, EPIC assumes that the process was suspended, because
 * the scheduler alone does not delay a check so much. */
#define DEADLINE_SLACK_NS 100000000ull

typedef struct deadline {
    uint64_t timeout_ns;
    /* time of the last start; 0: the deadline starts at the next deadline_look() */
    uint64_t start_ns;
    uint64_t end_ns;      /* time at which the deadline has passed */
    uint64_t expected_ns; /* time at which the next deadline_look() is due */
    uint64_t ran_ns;      /* running time of this wait before the last start */
} deadline;

static inline void deadline_start(deadline *d, uint64_t timeout_ns, uint64_t now)
{
    *d = (deadline){.timeout_ns = timeout_ns,
                    .start_ns = now,
                    .end_ns = now + timeout_ns,
                    .expected_ns = now};
}

/* Makes the next deadline_look() restart the deadline with its full timeout. Called after
 * progress, for example after rows have arrived. */
static inline void deadline_renew(deadline *d)
{
    d->start_ns = 0;
}

/* Returns for how many nanoseconds this process was suspended: how much later than expected_ns
 * the check at `now` is. Returns 0 for a delay that is usual on a busy machine. */
static inline uint64_t deadline_stopped_ns(const deadline *d, uint64_t now)
{
    const uint64_t quarter = d->timeout_ns / 4;
    const uint64_t slack = quarter < DEADLINE_SLACK_NS ? quarter : DEADLINE_SLACK_NS;
    return now > d->expected_ns + slack ? now - d->expected_ns : 0;
}

/* Checks the deadline at `now`, a time of clock_ns(). Returns true if the deadline has passed.
 * If this process was suspended since the last check, restarts the deadline with its full
 * timeout. */
static inline bool deadline_look(deadline *d, uint64_t now)
{
    if (!d->start_ns) {
        deadline_start(d, d->timeout_ns, now);
        return false;
    }
    const uint64_t stopped = deadline_stopped_ns(d, now);
    if (stopped && d->ran_ns < DEADLINE_RESTART_LIMIT * d->timeout_ns) {
        d->ran_ns += d->expected_ns - d->start_ns;
        d->start_ns = now;
        d->end_ns = now + d->timeout_ns;
    } else {
        d->end_ns += stopped;
    }
    d->expected_ns = now;
    return now >= d->end_ns;
}

/* Returns the length in nanoseconds of a sleep that starts at `now`: until the deadline, but at
 * most `longest`. Sets expected_ns to the end of that sleep. */
static inline uint64_t deadline_sleep_ns(deadline *d, uint64_t now, uint64_t longest)
{
    const uint64_t left = now < d->end_ns ? d->end_ns - now : 0;
    const uint64_t sleep = left < longest ? left : longest;
    d->expected_ns = now + sleep;
    return sleep;
}

static inline deadline deadline_begin_ms(uint64_t timeout_ms)
{
    deadline d;
    deadline_start(&d, timeout_ms * 1000000, (uint64_t)clock_ns());
    return d;
}

/* Checks the deadline before the caller sleeps for `nap_ns` nanoseconds, and sets expected_ns
 * to the end of that sleep. Returns true if the deadline has passed. */
static inline bool deadline_before_nap(deadline *d, uint64_t nap_ns)
{
    const uint64_t now = (uint64_t)clock_ns();
    const bool late = deadline_look(d, now);
    d->expected_ns = now + nap_ns;
    return late;
}

#endif
