/* SPDX-License-Identifier: Apache-2.0 */
/* Which experts should lie where.  docs/guide/traces.md says what is minimized and how. */
#ifndef EPIC_PLACE_H
#define EPIC_PLACE_H

#include <stdbool.h>
#include <stdint.h>

/* ranks * slots places for `logical` experts; each expert has one or more of them. */
typedef struct place_problem {
    int32_t ranks, slots;
    int32_t logical;
    int64_t num_steps;
    const int32_t *load; /* [num_steps, logical] choices of each expert */
} place_problem;

/* A placement is at [ranks * slots]: the logical expert of each place; place p is of rank
 * p / slots.  What it costs: the choices of the busiest rank, added over the steps.  Choices of
 * an expert go to its replicas by turns, as epic.h says, so this is what epic_plan does. */
int64_t place_cost(const place_problem *p, const int32_t *at);

/* Choices of all ranks, over all steps. */
int64_t place_total(const place_problem *p);

/* No placement costs less: the mean of the ranks, and the rank of the busiest expert, which shares
 * its load with replicas or has the least busy experts beside. */
int64_t place_bound(const place_problem *p);

/* By turns: expert e on rank e modulo ranks; places that are left go round likewise. */
void place_round_robin(const place_problem *p, int32_t *at);

/* Replicas to the busiest experts, one by one; then the busiest first, each to the rank with the
 * least so far.  By loads added over the steps. */
void place_greedy(const place_problem *p, int32_t *at);

/* Exchanges of two places, and replicas given to other experts, kept when they do not cost more;
 * from greedy, round robin and beginnings at random.  Never costs more than the two above. */
void place_search(const place_problem *p, int32_t *at, uint64_t seed);

/* Exchanges whole ranks, so that fewer rows cross from host to host; but for the turns of replicas
 * that costs no balance.  Ranks h * ranks / hosts and on are of host h.  seen [num]: the ranks that
 * each token goes to, as bits (at most 64 ranks); they are renumbered too. */
void place_hosts(const place_problem *p, int32_t *at, int32_t hosts, uint64_t *seen,
                 int64_t num);

/* Hosts that the tokens go to, each beyond its first. */
int64_t place_crossings(int32_t ranks, int32_t hosts, const uint64_t *seen, int64_t num);

#endif
