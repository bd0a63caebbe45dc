/* SPDX-License-Identifier: Apache-2.0 */
/* A deadline that counts only the time in which this process ran.
 *
 * A process can be stopped as a whole: Ctrl-Z, `scontrol suspend`, a frozen container, a paused
 * virtual machine.  The clock of deadlines goes on meanwhile.  If all ranks were stopped
 * together, a rank that looks at the clock first after the stop would find its peers silent and
 * blame one of them.  So every wait looks at its deadline again and again, and announces before
 * each sleep how long it will take.  If the next look comes much later, this process was
 * stopped, in the sleep or between two instructions.  The deadline then starts anew, so that
 * the peers have the whole timeout to show that they run again.
 *
 * On a machine that is always overloaded a deadline must end, too.  So after RESTART_LIMIT
 * timeouts of running time a stop only adds its own length. */
#ifndef EPIC_DEADLINE_H
#define EPIC_DEADLINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

#define DEADLINE_RESTART_LIMIT 4 /* timeouts of running time, for one wait */
#define DEADLINE_SLACK_NS \
    100000000ull /* longest delay that the scheduler may cause in a running process */

typedef struct deadline {
    uint64_t timeout_ns;
    uint64_t start_ns;    /* when it last started; 0: it starts at the next look */
    uint64_t end_ns;      /* when it is reached */
    uint64_t expected_ns; /* latest time of the next look if this process is not stopped */
    uint64_t ran_ns;      /* running time of this wait before start_ns */
} deadline;

/* Starts a wait at `now`, a time of clock_ns(). */
static inline void deadline_start(deadline *d, uint64_t timeout_ns, uint64_t now)
{
    *d = (deadline){.timeout_ns = timeout_ns,
                    .start_ns = now,
                    .end_ns = now + timeout_ns,
                    .expected_ns = now};
}

/* Lets the next look start the deadline anew, since data has moved. */
static inline void deadline_renew(deadline *d)
{
    d->start_ns = 0;
}

/* Returns how long this process was stopped since the last look and the sleep announced after
 * it.  It returns 0 for a delay that is usual on a busy machine. */
static inline uint64_t deadline_stopped_ns(const deadline *d, uint64_t now)
{
    const uint64_t quarter = d->timeout_ns / 4;
    const uint64_t slack = quarter < DEADLINE_SLACK_NS ? quarter : DEADLINE_SLACK_NS;
    return now > d->expected_ns + slack ? now - d->expected_ns : 0;
}

/* Looks at the deadline.  Returns true if it has passed.  After a stop the deadline starts
 * anew. */
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

/* Returns how long a sleep after a look at `now` may take, at most `longest` nanoseconds, and
 * announces that sleep. */
static inline uint64_t deadline_sleep_ns(deadline *d, uint64_t now, uint64_t longest)
{
    const uint64_t left = now < d->end_ns ? d->end_ns - now : 0;
    const uint64_t sleep = left < longest ? left : longest;
    d->expected_ns = now + sleep;
    return sleep;
}

/* Returns a deadline that starts now. */
static inline deadline deadline_begin_ms(uint64_t timeout_ms)
{
    deadline d;
    deadline_start(&d, timeout_ms * 1000000, (uint64_t)clock_ns());
    return d;
}

/* Looks at the deadline before a sleep of `nap_ns`, and announces that sleep.  Returns true if
 * the deadline has passed. */
static inline bool deadline_before_nap(deadline *d, uint64_t nap_ns)
{
    const uint64_t now = (uint64_t)clock_ns();
    const bool late = deadline_look(d, now);
    d->expected_ns = now + nap_ns;
    return late;
}

#endif
