/* SPDX-License-Identifier: Apache-2.0 */
/* Computes placements: which rank owns which experts, and which experts have replicas.
 * docs/guide/traces.md explains what is minimized and how. */
#ifndef EPIC_PLACE_H
#define EPIC_PLACE_H

#include <stdbool.h>
#include <stdint.h>

/* The problem: to place `logical` experts in ranks * slots places, `slots` on each rank. Each
 * expert gets one or more places (replicas). */
typedef struct place_problem {
    int32_t ranks, slots;
    int32_t logical;
    int64_t num_steps;
    /* [num_steps, logical] number of choices of each expert in each step */
    const int32_t *load;
} place_problem;

/* Returns the cost of a placement: the number of choices of the busiest rank, summed over the
 * steps. at [ranks * slots] is the logical expert in each place, where place p is on rank p /
 * slots. The choices of an expert are assigned to its replicas round-robin, as in epic_plan. */
int64_t place_cost(const place_problem *p, const int32_t *at);

/* Returns the number of choices of all ranks in all steps. */
int64_t place_total(const place_problem *p);

/* Returns a lower bound of the cost: the sum over the steps of the larger of two numbers. No
 * placement is better than either of them:
 *
 * - The mean number of choices per rank.
 * - The smallest possible load of the rank that has the busiest expert. With replicas it is the
 *   expert's load divided by its largest possible number of replicas. Without replicas it is
 *   the expert's load plus those of the least busy experts, which fill the other places of its
 *   rank. */
int64_t place_bound(const place_problem *p);

/* Places expert e on rank e modulo `ranks`, and replicas in the same way. */
void place_round_robin(const place_problem *p, int32_t *at);

/* First assigns the spare places as replicas, each to the expert that is busiest at that
 * moment. Then places the experts in the order of their load, the busiest first, each on the
 * rank with the smallest load so far. Uses loads summed over the steps. */
void place_greedy(const place_problem *p, int32_t *at);

/* Improves placements by local search: exchanges two places, or changes a replica to another
 * expert, if that does not increase the cost. Starts from greedy, round-robin and random
 * placements, and returns the best result. Its cost is never higher than that of the two
 * functions above. */
void place_search(const place_problem *p, int32_t *at, uint64_t seed);

/* Renumbers the ranks so that fewer rows are sent between hosts. The load of each rank stays
 * almost the same: only the choices that go to replicas may change. Host h has ranks / hosts
 * ranks, starting at rank h * ranks / hosts. seen [num] is a bit mask for each token of the
 * ranks to which it is sent (at most 64 ranks). These bits are renumbered too. */
void place_hosts(const place_problem *p, int32_t *at, int32_t hosts, uint64_t *seen,
                 int64_t num);

/* Returns the number of rows that are sent between hosts: the sum over the tokens of (number of
 * hosts to which the token is sent - 1). */
int64_t place_crossings(int32_t ranks, int32_t hosts, const uint64_t *seen, int64_t num);

#endif
