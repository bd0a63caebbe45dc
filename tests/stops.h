/* SPDX-License-Identifier: Apache-2.0 */
/* Tests in which all ranks of a group are stopped together for longer than their deadline, for
 * example by Ctrl-Z or a frozen container, and continue. No rank may be named. In some groups
 * one rank has stopped making calls before. The others must still name this rank and no other
 * rank. */
#ifndef STOPS_H
#define STOPS_H

#include <stdbool.h>

#include "epic/epic.h"

typedef struct stops_way {
    const char *backend;
    bool processes;       /* false: the ranks are threads of one process */
    const char *launcher; /* a program that starts ranks with "-n RANKS COMMAND"; NULL: fork */
    int groups, width;    /* number of groups, scaled, and how many run at a time */
    int most_ranks;       /* largest number of ranks of a group; 0: 8 */
    /* Called by a rank before it opens its context; NULL: nothing to do. */
    void (*prepare)(int rank);
    /* Adds in place like epic_allreduce_sum, and returns when the sums are available. NULL:
     * epic_allreduce_sum. */
    epic_result (*sum)(epic_context *ctx, const epic_allreduce_sum_args *args);
} stops_way;

/* The main function of a stop test. */
int stops_main(const stops_way *way);

/* The main function of a rank that `launcher` started, with the arguments of its program. */
void stops_be_launched_rank(const stops_way *way, char **arguments,
                            const epic_bootstrap *bootstrap);

#endif
