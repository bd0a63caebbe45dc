/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the ranks of a test, as threads of this process or as processes of this host. */
#ifndef RUN_H
#define RUN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "epic/epic.h"

#define RUN_MAX_RANKS 256

/* The code of one rank. */
typedef void run_body(const epic_bootstrap *bootstrap, void *self);

/* Runs the ranks as threads that meet through epic_bootstrap_threads(). */
void run_threads(int num_ranks, run_body *body, void *self);

/* Runs the ranks as forked processes. A rank that does not exit with 0 within `seconds` is a
 * failed check. */
void run_processes(int num_ranks, run_body *body, void *self, unsigned seconds);

/* A bootstrap in memory that forked processes share. Make it before the fork. */
typedef struct run_rendezvous run_rendezvous;
run_rendezvous *run_rendezvous_new(int num_ranks);
epic_bootstrap run_rendezvous_seat(run_rendezvous *rendezvous, int rank);
void run_rendezvous_free(run_rendezvous *rendezvous);

/* Allocates zeroed memory that forked processes share. */
void *run_share(size_t bytes);
void run_unshare(void *memory, size_t bytes);

/* Forks a child that is killed when the forking thread ends. So a failed check leaves no
 * process behind that would keep the test's output open. */
pid_t run_fork(void);

/* Returns a TCP port of loopback that no program uses now. */
uint32_t run_free_port(void);

/* SIGALRM ends this process as hung after `seconds`, or three times as long on a busy
 * machine. */
void run_alarm(unsigned seconds);

bool run_is_sanitized(void);       /* true if a sanitizer checks this program */
double run_scale(void);            /* EPIC_TEST_SCALE; default: 1, less with a sanitizer */
int64_t run_scaled(int64_t count); /* count times run_scale(), but at least 1 */
uint64_t run_seed(void);           /* EPIC_TEST_SEED, or 1; 0: a new seed in every run */
uint64_t run_now_ns(void);         /* monotonic */
void run_nap_us(long us);

/* Random numbers that depend on the arguments only. */
uint64_t run_mix(uint64_t a, uint64_t b);
typedef struct run_random {
    uint64_t state;
} run_random;
uint64_t run_next(run_random *random);
/* returns a number from 0 to limit - 1 */
int64_t run_below(run_random *random, int64_t limit);
/* returns a number from first to last, both included */
int64_t run_between(run_random *random, int64_t first, int64_t last);
bool run_chance(run_random *random, int percent);

#endif
