/* SPDX-License-Identifier: Apache-2.0 */
/* The suite that every backend must pass. */
#ifndef SUITE_H
#define SUITE_H

#include "world.h"

/* The main function of a backend's test. Runs the suite for each number of ranks in argv, or
 * in `counts`, which ends with 0. Ranks are threads (self, threads) or forked processes
 * (shm). */
int suite_main(const char *backend, const int *counts, int argc, char **argv);

/* Runs the suite with one number of ranks and counts its checks (check.h). */
void suite_run(const char *backend, int num_ranks);

/* Runs the suite in groups with vacant seats. set_members() makes the seats the members of a
 * group that is open on all seats. */
typedef void suite_set_members(epic_context *ctx, const world_seats *seats);
void suite_run_vacant(const char *backend, const world_seats *seats,
                      suite_set_members *set_members);

/* Runs one rank of the suite in the calling process. */
void suite_rank(const char *backend, const epic_bootstrap *bootstrap, void *native);

#endif
