/* SPDX-License-Identifier: Apache-2.0 */
/* Clock, waits and random bytes of the fuzzed code. */
#define FUZZ_WORLD
#include "fuzz/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int (*fuzz_turn)(void);

static int64_t now_ns, most_ns;

void fuzz_begin(int64_t most_ms)
{
    now_ns = 0;
    most_ns = most_ms * 1000000;
}

static void pass(int64_t ns)
{
    now_ns += ns;
    if (now_ns <= most_ns) return;
    fprintf(stderr, "a deadline was not kept: %lld ms have passed\n",
            (long long)(now_ns / 1000000));
    abort();
}

int fuzz_clock_gettime(clockid_t clock, struct timespec *now)
{
    (void)clock;
    now_ns += 100; /* so that a loop that only reads the clock ends */
    *now = (struct timespec){.tv_sec = now_ns / 1000000000, .tv_nsec = now_ns % 1000000000};
    return 0;
}

int fuzz_nanosleep(const struct timespec *length, struct timespec *rest)
{
    (void)rest;
    pass((int64_t)length->tv_sec * 1000000000 + length->tv_nsec);
    return 0;
}

/* Ends a wait for `ms` milliseconds in which `ready` descriptors were found. Returns true if
 * the caller must look again, because another side may have made a descriptor ready. */
static int looks_again(int ready, int ms)
{
    if (ready == 0 && fuzz_turn && fuzz_turn()) return 1;
    if (ready != 0)
        pass(1000);
    else
        pass(ms < 0 ? most_ns : (int64_t)ms * 1000000);
    return 0;
}

int fuzz_poll(struct pollfd *polls, nfds_t count, int ms)
{
    int ready;
    do ready = poll(polls, count, 0);
    while (looks_again(ready, ms));
    return ready;
}

int fuzz_epoll_wait(int epoll, struct epoll_event *events, int most, int ms)
{
    int ready;
    do ready = epoll_wait(epoll, events, most, 0);
    while (looks_again(ready, ms));
    return ready;
}

ssize_t fuzz_getrandom(void *to, size_t bytes, unsigned flags)
{
    (void)flags;
    memset(to, 0x11, bytes);
    return (ssize_t)bytes;
}
