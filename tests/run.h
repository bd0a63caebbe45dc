/* SPDX-License-Identifier: Apache-2.0 */
/* Running the ranks of a test: as threads of this process or as processes of this host. */
#ifndef RUN_H
#define RUN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "epic/epic.h"

#define RUN_MAX_RANKS 32

/* One rank's part. */
typedef void run_body(const epic_bootstrap *bootstrap, void *self);

/* Meets with epic_bootstrap_threads. */
void run_threads(int num_ranks, run_body *body, void *self);

/* Forks.  A rank that does not exit with 0 within `seconds` is a failed check, of any rank. */
void run_processes(int num_ranks, run_body *body, void *self, unsigned seconds);

/* A bootstrap in memory that forked processes share; made before the fork. */
typedef struct run_rendezvous run_rendezvous;
run_rendezvous *run_rendezvous_new(int num_ranks);
epic_bootstrap run_rendezvous_seat(run_rendezvous *rendezvous, int rank);
void run_rendezvous_free(run_rendezvous *rendezvous);

/* Memory that forked processes share, zeroed. */
void *run_share(size_t bytes);
void run_unshare(void *memory, size_t bytes);

/* Forks.  The child is killed when the thread that forked it ends, so that a check that ends a test
 * leaves no process behind, which would hold the test's output open. */
pid_t run_fork(void);

/* This process is ended by SIGALRM after so many seconds, on a busy machine three times as many: a
 * hang. */
void run_alarm(unsigned seconds);

double run_scale(void);    /* EPIC_TEST_SCALE; without it 1, with a sanitizer less */
uint64_t run_seed(void);   /* EPIC_TEST_SEED, or 1; 0: another one every time */
uint64_t run_now_ns(void); /* monotonic */
void run_nap_us(long us);

/* Numbers that depend on the arguments alone. */
uint64_t run_mix(uint64_t a, uint64_t b);
typedef struct run_random {
    uint64_t state;
} run_random;
uint64_t run_next(run_random *random);
int64_t run_below(run_random *random, int64_t limit);                 /* 0 to limit - 1 */
int64_t run_between(run_random *random, int64_t first, int64_t last); /* both possible */
bool run_chance(run_random *random, int percent);

#endif
