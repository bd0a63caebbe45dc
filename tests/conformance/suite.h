/* SPDX-License-Identifier: Apache-2.0 */
/* The suite that every backend must pass. */
#ifndef SUITE_H
#define SUITE_H

#include "epic/epic.h"

/* The main of a backend's test: runs the suite with ranks as threads (self, threads) or forked
 * processes (shm), for each number of ranks in argv or in `counts`, which ends with 0. */
int suite_main(const char *backend, const int *counts, int argc, char **argv);

/* One number of ranks; checks are counted (check.h). */
void suite_run(const char *backend, int num_ranks);

/* One rank of it, in a process of its own. */
void suite_rank(const char *backend, const epic_bootstrap *bootstrap, void *native);

#endif
