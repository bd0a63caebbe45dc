/* SPDX-License-Identifier: Apache-2.0 */
/* Computes placements: which rank owns which experts, and which experts have replicas.
 * docs/guide/traces.md explains what is minimized and how. */
#ifndef EPIC_PLACE_H
#define EPIC_PLACE_H

#include <stdbool.h>
#include <stdint.h>

/* ranks * slots places for `logical` experts. Each expert has one or more places. */
typedef struct place_problem {
    int32_t ranks, slots;
    int32_t logical;
    int64_t num_steps;
    const int32_t *load; /* [num_steps, logical] choices of each expert */
} place_problem;

/* Returns the cost of a placement: the choices of the busiest rank, summed over the steps.
 * at [ranks * slots]: the logical expert of each place; place p is on rank p / slots.
 * Choices of an expert go to its replicas in turn, as epic_plan assigns them. */
int64_t place_cost(const place_problem *p, const int32_t *at);

/* Returns the choices of all ranks in all steps. */
int64_t place_total(const place_problem *p);

/* Returns a lower bound of the cost: in each step the mean over ranks, or the part of the
 * busiest expert's rank if that is larger. That rank has at least the expert's load divided
 * by its replicas, or without replicas the least busy experts next to it. */
int64_t place_bound(const place_problem *p);

/* Puts expert e on rank e modulo ranks, and replicas likewise. */
void place_round_robin(const place_problem *p, int32_t *at);

/* Gives replicas to the busiest experts, one after the other. Then places the busiest first,
 * each on the rank with the smallest load so far. Uses loads summed over the steps. */
void place_greedy(const place_problem *p, int32_t *at);

/* Improves placements by local search: exchanges two places, or gives a replica to another
 * expert, if that does not cost more. Starts from greedy, round robin and random placements,
 * and returns the best. Never costs more than the two functions above. */
void place_search(const place_problem *p, int32_t *at, uint64_t seed);

/* Exchanges whole ranks so that fewer rows are sent between hosts. That keeps the balance,
 * except that replicas take other choices. Host h has ranks h * ranks / hosts and following.
 * seen [num]: the ranks that each token goes to, as bits (at most 64 ranks); they are
 * renumbered too. */
void place_hosts(const place_problem *p, int32_t *at, int32_t hosts, uint64_t *seen,
                 int64_t num);

/* Returns the number of rows sent between hosts: for each token, the hosts it goes to minus
 * 1. */
int64_t place_crossings(int32_t ranks, int32_t hosts, const uint64_t *seen, int64_t num);

#endif
