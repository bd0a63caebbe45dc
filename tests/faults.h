/* SPDX-License-Identifier: Apache-2.0 */
/* Things that go wrong on purpose, one in a group: what the others are told, when, and that a new
 * group works afterwards. */
#ifndef FAULTS_H
#define FAULTS_H

#include <stdbool.h>
#include <sys/types.h>

#include "epic/epic.h"

/* How the ranks of a fault run. */
typedef struct faults_way {
    const char *backend;
    bool processes; /* else threads */
    bool deaths;    /* a process may end without the others being ended too */
    /* {program, argument, ..., NULL} that starts the ranks with "-n RANKS COMMAND"; NULL: the
     * test forks them. */
    const char *const *launcher;
} faults_way;

/* The main of a fault test.  `faults` of them, scaled, several at a time. */
int faults_main(const faults_way *way, int faults, int width);

/* What the test's own program does with the arguments that faults_main gave it, as a rank that
 * `launcher` started. */
typedef struct faults_rank faults_rank;
faults_rank *faults_rank_of(const faults_way *way, char **arguments);
bool faults_rank_dies(const faults_rank *seat, int rank);

/* `first` is the bootstrap of all ranks; `again` of those that do not die.  Returns when all of
 * these have finished. */
void faults_be_rank(const faults_rank *seat, const epic_bootstrap *first,
                    const epic_bootstrap *again);

#endif
