/* SPDX-License-Identifier: Apache-2.0 */
/* Tests placements of epic-place. They must be optimal if all placements can be tried, and
 * otherwise never worse than round robin and greedy. */
#include "place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "run.h"

/* ---------------------------------------------------------------------- all placements ---- */

typedef struct hunt {
    const place_problem *p;
    int32_t at[16], count[16];
    int64_t best;
} hunt;

/* Tries all experts at position i and all later positions. */
static void try_all(hunt *h, int32_t i)
{
    const place_problem *p = h->p;
    const int32_t places = p->ranks * p->slots;
    int32_t missing = 0;
    for (int32_t e = 0; e < p->logical; e++) missing += h->count[e] == 0;
    if (missing > places - i) return;
    if (i == places) {
        const int64_t cost = place_cost(p, h->at);
        if (cost < h->best) h->best = cost;
        return;
    }
    /* The order of experts within a rank does not matter, so try only ascending ones. */
    for (int32_t e = i % p->slots ? h->at[i - 1] : 0; e < p->logical; e++) {
        h->at[i] = e;
        h->count[e]++;
        try_all(h, i + 1);
        h->count[e]--;
    }
}

static void near_the_optimum(int32_t logical, int32_t ranks, int32_t slots, uint64_t seed)
{
    enum { STEPS = 4 };
    int32_t load[STEPS * 16], at[16];
    run_random random = {seed};
    const place_problem p = {
        .ranks = ranks, .slots = slots, .logical = logical, .num_steps = STEPS, .load = load};
    for (int i = 0; i < STEPS * logical; i++)
        load[i] = (int32_t)(run_below(&random, 20) * run_below(&random, 20));
    hunt h = {.p = &p, .best = INT64_MAX};
    try_all(&h, 0);
    place_search(&p, at, seed);
    CHECK_EQ(place_cost(&p, at), h.best);
    CHECK(place_bound(&p) <= h.best);
}

/* ------------------------------------------------------------------------ many experts ---- */

/* Returns loads in which a few experts have most of the load, and other experts in each step.
 */
static int32_t *skewed(int32_t logical, int64_t steps, uint64_t seed)
{
    int32_t *load = calloc((size_t)(logical * steps), sizeof *load);
    int32_t *rank = calloc((size_t)logical, sizeof *rank);
    run_random random = {seed};
    for (int32_t e = 0; e < logical; e++) rank[e] = e;
    for (int32_t e = logical - 1; e > 0; e--) {
        const int32_t other = (int32_t)run_below(&random, e + 1), keep = rank[e];
        rank[e] = rank[other];
        rank[other] = keep;
    }
    for (int64_t s = 0; s < steps; s++)
        for (int32_t e = 0; e < logical; e++)
            load[s * logical + e] =
                (int32_t)(20000 / (rank[e] + 4) + run_below(&random, 1 + 4000 / (rank[e] + 4)));
    free(rank);
    return load;
}

/* Returns whether the placement contains every expert and no other. */
static bool is_placement(const place_problem *p, const int32_t *at)
{
    int32_t count[256] = {0};
    for (int32_t i = 0; i < p->ranks * p->slots; i++) {
        if (at[i] < 0 || at[i] >= p->logical) return false;
        count[at[i]]++;
    }
    for (int32_t e = 0; e < p->logical; e++)
        if (!count[e]) return false;
    return true;
}

static void better_than_simple(int32_t logical, int32_t ranks, int32_t slots)
{
    int32_t at[512];
    int32_t *load = skewed(logical, 24, (uint64_t)logical + (uint64_t)slots);
    const place_problem p = {
        .ranks = ranks, .slots = slots, .logical = logical, .num_steps = 24, .load = load};
    place_round_robin(&p, at);
    CHECK(is_placement(&p, at));
    const int64_t round_robin = place_cost(&p, at);
    place_greedy(&p, at);
    CHECK(is_placement(&p, at));
    const int64_t greedy = place_cost(&p, at);
    place_search(&p, at, 1);
    CHECK(is_placement(&p, at));
    const int64_t found = place_cost(&p, at), bound = place_bound(&p);
    printf(
        "%d experts, %d ranks of %d: bound %lld, found %lld, greedy %lld, round robin %lld\n",
        logical, ranks, slots, (long long)bound, (long long)found, (long long)greedy,
        (long long)round_robin);
    CHECK(bound <= found && found <= greedy && found < round_robin);
    CHECK(found * 100 < bound * 105);
    free(load);
}

/* ------------------------------------------------------------------------------- hosts ---- */

/* Tokens go to ranks 0 and 2, or to 1 and 3. If ranks are exchanged, no row crosses between
 * hosts. */
static void hosts(void)
{
    enum { TOKENS = 100 };
    const int32_t load[4] = {1, 1, 1, 1};
    int32_t at[4] = {0, 1, 2, 3};
    uint64_t seen[TOKENS];
    const place_problem p = {
        .ranks = 4, .slots = 1, .logical = 4, .num_steps = 1, .load = load};
    for (int i = 0; i < TOKENS; i++) seen[i] = i % 2 ? 5 : 10;
    CHECK_EQ(place_crossings(4, 2, seen, TOKENS), TOKENS);
    place_hosts(&p, at, 2, seen, TOKENS);
    CHECK_EQ(place_crossings(4, 2, seen, TOKENS), 0);
    CHECK(at[0] + at[1] == 2 || at[0] + at[1] == 4);
    CHECK_EQ(place_cost(&p, at), 1);
}

int main(void)
{
    check_begin();
    for (uint64_t seed = 1; seed <= 4; seed++) {
        near_the_optimum(6, 2, 3, seed);
        near_the_optimum(6, 3, 2, seed);
        near_the_optimum(5, 3, 2, seed);
        near_the_optimum(4, 2, 3, seed);
    }
    better_than_simple(64, 8, 8);
    better_than_simple(64, 8, 9);
    better_than_simple(256, 16, 16);
    better_than_simple(256, 16, 18);
    hosts();
    return check_end();
}
