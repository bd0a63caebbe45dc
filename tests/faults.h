/* SPDX-License-Identifier: Apache-2.0 */
/* Fault tests: one rank of a group goes wrong on purpose. The other ranks check which error
 * they get, which rank it names and how soon it comes, and that a new group opens
 * afterwards. */
#ifndef FAULTS_H
#define FAULTS_H

#include <stdbool.h>
#include <sys/types.h>

#include "epic/epic.h"

/* How the ranks of a fault run. */
typedef struct faults_way {
    const char *backend;
    bool processes; /* false: the ranks are threads of one process */
    bool deaths;    /* true: the end of one process does not end the others */
    /* A launcher, {program, argument, ..., NULL}, that starts the ranks with "-n RANKS
     * COMMAND". NULL: the test forks them. */
    const char *const *launcher;
    int num_ranks; /* number of ranks of each fault, at most 64; 0: 2 to 4 */
} faults_way;

/* The main function of a fault test. Runs `faults` faults, times EPIC_TEST_SCALE, `width` at
 * a time. */
int faults_main(const faults_way *way, int faults, int width);

/* Functions for a rank that `launcher` started: the test's own program calls them with the
 * arguments that faults_main passed on. */
typedef struct faults_rank faults_rank;
faults_rank *faults_rank_of(const faults_way *way, char **arguments);
bool faults_rank_dies(const faults_rank *seat, int rank);

/* Runs the rank. `first` is the bootstrap of all ranks; `again` is that of the ranks that
 * survive. Returns when all surviving ranks have finished. */
void faults_be_rank(const faults_rank *seat, const epic_bootstrap *first,
                    const epic_bootstrap *again);

#endif
