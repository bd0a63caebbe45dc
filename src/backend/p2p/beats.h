/* SPDX-License-Identifier: Apache-2.0 */
/* Beats are the heartbeat of a process: a CPU thread regularly increments a counter. Waiting
 * kernels read the counter to see that the process is running.
 *
 * A process can be suspended, for example by SIGSTOP, but the clock of its device continues. If
 * all processes were suspended for a long time, a waiting kernel would find that its deadline
 * has passed and would report that its peers have not answered. So a kernel ends a wait only if
 * the counter was incremented after its deadline. If the counters show that the process was
 * suspended, the kernel restarts its time limit (kernels/cuda/common/wait.cuh). */
#ifndef EPIC_P2P_BEATS_H
#define EPIC_P2P_BEATS_H

#include "base/clock.h"
#include "cuda/common/cuda_kernels.h"

typedef struct p2p_beats {
    uint32_t timeout_ms; /* shortest time limit, in ms, of all calls so far; 0: no call yet */
    uint32_t beats;      /* number of beats (increments of the counter) so far */
    /* number of beats that were so late that the process must have been suspended */
    uint32_t stops;
    int64_t next_ns; /* time at which the next beat is due; 0: no beat yet */
    /* page of the flight recorder to which each beat copies the waiting times; NULL: no
     * recorder */
    struct recorder_page *page;
} p2p_beats;

/* Makes the beats frequent enough for calls with the time limit timeout_ms: sets b->timeout_ms
 * to timeout_ms if timeout_ms is the shortest time limit so far. Any thread may call this
 * function. */
static inline void p2p_beats_expect(p2p_beats *b, uint32_t timeout_ms)
{
    uint32_t current = __atomic_load_n(&b->timeout_ms, __ATOMIC_RELAXED);
    while ((!current || timeout_ms < current) &&
           !__atomic_compare_exchange_n(&b->timeout_ms, &current, timeout_ms, true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

/* Returns the time between two beats in milliseconds. A wait may end later than its deadline by
 * up to this time. */
static inline int p2p_beats_ms(const p2p_beats *b)
{
    const uint32_t ms = __atomic_load_n(&b->timeout_ms, __ATOMIC_RELAXED) / 16;
    return ms < 10 ? 10 : ms > 100 ? 100 : (int)ms;
}

/* Copies the waiting times in *status to `page`, a page of the flight recorder. Does nothing if
 * `page` is NULL. Defined in group.c. */
void p2p_copy_waits(struct recorder_page *page, const p2p_status *status);

/* If the next beat is due, increments the counter `beats` and copies the waiting times. One
 * thread calls this function, about every p2p_beats_ms() milliseconds. If a call is late by
 * more than a quarter of the time limit (at least 30 ms, at most 100 ms), the process was
 * suspended, and the function also increments `stops`. One release store publishes `beats` and
 * `stops` in one word. */
static inline void p2p_beat(p2p_beats *b, p2p_status *status)
{
    const int64_t now = clock_ns(), ms = 1000000, period = p2p_beats_ms(b) * ms;
    const int64_t quarter = b->timeout_ms / 4 * ms;
    const int64_t slack = quarter < 30 * ms ? 30 * ms : quarter > 100 * ms ? 100 * ms : quarter;
    if (now < b->next_ns) return;
    if (b->next_ns && now - b->next_ns > slack) b->stops++;
    if (++b->beats == 0) b->beats = 1; /* 0 is reserved: it means that there are no beats */
    b->next_ns = now + period;
    __atomic_store_n(&status->awake, P2P_AWAKE(b->stops, b->beats), __ATOMIC_RELEASE);
    p2p_copy_waits(__atomic_load_n(&b->page, __ATOMIC_ACQUIRE), status);
}

/* Ends the heartbeat: from now on kernels use only the clock of their device. */
static inline void p2p_beats_end(p2p_status *status)
{
    __atomic_store_n(&status->awake, (uint64_t)0, __ATOMIC_RELEASE);
}

#endif
