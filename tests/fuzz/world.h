/* SPDX-License-Identifier: Apache-2.0 */
/* Included before all fuzzed code. It replaces the library's clock, waits and random bytes. A
 * wait without an event ends at once and advances the clock. So deadlines take no time, and the
 * fuzzer finds a deadline that is not kept. */
#ifndef FUZZ_WORLD_H
#define FUZZ_WORLD_H

#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <time.h>

int fuzz_clock_gettime(clockid_t clock, struct timespec *now);
int fuzz_nanosleep(const struct timespec *length, struct timespec *rest);
int fuzz_poll(struct pollfd *polls, nfds_t count, int ms);
int fuzz_epoll_wait(int epoll, struct epoll_event *events, int most, int ms);
ssize_t fuzz_getrandom(void *to, size_t bytes, unsigned flags);

/* Resets the clock to 0. It is a finding if the clock passes most_ms. */
void fuzz_begin(int64_t most_ms);

/* Called if no descriptor is ready. Returns true if one may be ready now. NULL: no other side
 * exists. */
extern int (*fuzz_turn)(void);

#ifndef FUZZ_WORLD
#define clock_gettime(clock, now) fuzz_clock_gettime(clock, now)
#define nanosleep(length, rest) fuzz_nanosleep(length, rest)
#define poll(polls, count, ms) fuzz_poll(polls, count, ms)
#define epoll_wait(epoll, events, most, ms) fuzz_epoll_wait(epoll, events, most, ms)
#define getrandom(to, bytes, flags) fuzz_getrandom(to, bytes, flags)
#endif

#endif
