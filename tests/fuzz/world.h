/* SPDX-License-Identifier: Apache-2.0 */
/* Included before everything that is fuzzed: the library's clock, waits and random bytes are the
 * fuzzer's.  A wait with nothing to wait for is over at once and the clock goes on; so deadlines
 * cost nothing, and one that is not kept is found. */
#ifndef FUZZ_WORLD_H
#define FUZZ_WORLD_H

#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/random.h>
#include <time.h>

int fuzz_clock_gettime(clockid_t clock, struct timespec *now);
int fuzz_nanosleep(const struct timespec *length, struct timespec *rest);
int fuzz_poll(struct pollfd *polls, nfds_t count, int ms);
ssize_t fuzz_getrandom(void *to, size_t bytes, unsigned flags);

/* Begins anew: the clock is at 0, and going on past most_ms is a finding. */
void fuzz_begin(int64_t most_ms);

/* Called when nothing is ready; true: something may be now.  NULL: nobody else acts. */
extern int (*fuzz_turn)(void);

#ifndef FUZZ_WORLD
#define clock_gettime(clock, now) fuzz_clock_gettime(clock, now)
#define nanosleep(length, rest) fuzz_nanosleep(length, rest)
#define poll(polls, count, ms) fuzz_poll(polls, count, ms)
#define getrandom(to, bytes, flags) fuzz_getrandom(to, bytes, flags)
#endif

#endif
