/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the results of a case's routing with the oracle of tests/oracles. */
#include <stdlib.h>
#include <string.h>

#include "case.h"

/* Copies the ids that the caller of EPIC passes into one list. An id that is too large becomes
 * -1. Returns false if there was one. */
static bool list_ids(const routing *r, int64_t *list)
{
    const int64_t end = r->logical ? r->layer.num_logical : r->layer.num_experts;
    bool valid = true;
    for (int q = 0; q < r->num_ranks; q++)
        for (int64_t i = 0; i < (int64_t)r->tokens_of[q] * r->layer.top_k; i++) {
            const int64_t id = r->logical ? r->named[q][i] : r->ids[q][i];
            valid &= id < end;
            *list++ = id < end ? id : -1;
        }
    return valid;
}

/* Writes the results of the choices of rank q. */
static void deal_results(routing *r, int q)
{
    const oracle_plan *p = r->plan;
    const int64_t top_k = r->layer.top_k, first = p->first_token[q] * top_k;
    const int64_t choices = r->tokens_of[q] * top_k;
    r->slot[q] = oracle_zeroed(choices, sizeof **r->slot);
    r->rank[q] = oracle_zeroed(choices, sizeof **r->rank);
    for (int64_t i = 0; i < choices; i++) {
        const int64_t e = r->experts[first + i];
        const bool placed = r->result == EPIC_OK && p->fate[first + i] >= 0;
        if (r->logical) r->ids[q][i] = e;
        r->slot[q][i] = r->result == EPIC_OK ? p->fate[first + i] : EPIC_FATE_NONE;
        r->rank[q][i] = placed ? r->owner[e] : -1;
    }
}

static void forget_results(routing *r)
{
    for (int q = 0; q < r->num_ranks; q++) {
        free(r->slot[q]);
        free(r->rank[q]);
    }
    free(r->experts);
    oracle_plan_free(r->plan);
}

void solve_routing(routing *r)
{
    int64_t tokens_of[ORACLE_RANKS], choices = 0;
    forget_results(r);
    for (int q = 0; q < r->num_ranks; q++) {
        tokens_of[q] = r->tokens_of[q];
        choices += tokens_of[q] * r->layer.top_k;
    }
    int64_t *list = oracle_zeroed(choices, sizeof *list);
    const bool valid = list_ids(r, list);
    r->experts = oracle_zeroed(choices, sizeof *r->experts);
    oracle_choose_replicas(&r->layer, NULL, r->logical, list, choices, r->experts);
    free(list);
    const oracle_input in = {.num_ranks = r->num_ranks,
                             .layer = r->layer,
                             .tokens_of = tokens_of,
                             .capacity = r->capacity_of,
                             .ids = r->experts,
                             .rank_of = r->owner,
                             .logical_of = r->logical};
    r->plan = oracle_plan_new(&in);
    r->result = valid ? r->plan->result : EPIC_EINVAL;
    for (int q = 0; q < r->num_ranks; q++) deal_results(r, q);
}

void free_routing(routing *r)
{
    forget_results(r);
    for (int q = 0; q < r->num_ranks; q++) {
        free(r->ids[q]);
        free(r->named[q]);
    }
    free(r->owner);
    free(r->logical);
    memset(r, 0, sizeof *r);
}
