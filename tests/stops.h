/* SPDX-License-Identifier: Apache-2.0 */
/* All ranks of a group are stopped together for longer than their deadline, as Ctrl-Z or a frozen
 * container stops them, and go on: no rank may be blamed.  In some groups one rank has left the
 * calls before: the others must still name it, and no other rank. */
#ifndef STOPS_H
#define STOPS_H

#include <stdbool.h>

#include "epic/epic.h"

typedef struct stops_way {
    const char *backend;
    bool processes;       /* false: the ranks are threads of one process */
    const char *launcher; /* a program that starts ranks with "-n RANKS COMMAND"; NULL: fork */
    int groups, width;    /* number of groups, scaled, and how many run at a time */
    int most_ranks;       /* of a group; 0: 8 */
    /* Called by a rank before it opens its context; NULL: nothing to do. */
    void (*prepare)(int rank);
    /* Adds in place, as epic_allreduce_sum, and returns when the sums are there; NULL: epic_allreduce_sum. */
    epic_result (*sum)(epic_context *ctx, const epic_allreduce_sum_args *args);
} stops_way;

/* The main of a stop test. */
int stops_main(const stops_way *way);

/* The main of a rank that `launcher` started, with the arguments of its program. */
void stops_be_launched_rank(const stops_way *way, char **arguments,
                            const epic_bootstrap *bootstrap);

#endif
