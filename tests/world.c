/* SPDX-License-Identifier: Apache-2.0 */
/* Makes random cases. */
#include "world.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

int64_t world_most_choices = 384;

static int64_t pick(run_random *random, const int64_t *from, int64_t count)
{
    return from[run_below(random, count)];
}

#define PICK(random, ...)                        \
    pick(random, (const int64_t[]){__VA_ARGS__}, \
         (int64_t)(sizeof(int64_t[]){__VA_ARGS__} / sizeof(int64_t)))

static bool power_of_two(int64_t n)
{
    return (n & (n - 1)) == 0;
}

static void shuffle(run_random *random, int32_t *list, int64_t count)
{
    for (int64_t i = count - 1; i > 0; i--) {
        const int64_t j = run_below(random, i + 1);
        const int32_t held = list[i];
        list[i] = list[j];
        list[j] = held;
    }
}

/* ----------------------------------------------------------------------------- layer ---- */

static void choose_experts(world *w, run_random *random)
{
    epic_layer *l = &w->layer;
    l->num_experts =
        (uint32_t)PICK(random, 1, 2, 3, 5, 7, 8, 8, 16, 16, 60, 64, 64, 100, 256, 1000, 4096);
    if (run_chance(random, 60)) /* contiguous blocks of experts */
        l->num_experts = (l->num_experts + (uint32_t)w->num_ranks - 1) /
                         (uint32_t)w->num_ranks * (uint32_t)w->num_ranks;
    l->top_k = (uint32_t)PICK(random, 1, 1, 2, 2, 2, 3, 4, 6, 8, 8, 16, 63, 64);
    if (l->num_experts <= 64 && run_chance(random, 12)) l->top_k = l->num_experts;
}

static void choose_order(world *w, run_random *random)
{
    epic_layer *l = &w->layer;
    const uint32_t ranks = (uint32_t)w->num_ranks;
    if (run_chance(random, 30)) l->partial_type = EPIC_F32;
    if (!power_of_two(w->num_ranks) || !run_chance(random, 40)) return;
    l->sum_order = EPIC_TREE;
    const uint32_t leaves = ranks << run_below(random, 5);
    l->num_experts = leaves * (uint32_t)run_between(random, 1, 6);
    if (leaves != ranks || run_chance(random, 50)) l->leaves = leaves;
}

int64_t world_num_ids(const world *w)
{
    return w->layer.num_logical ? w->layer.num_logical : w->layer.num_experts;
}

/* Draws which expert copies which logical expert: each logical expert has at least one copy,
 * some have many. */
static void choose_replicas(world *w, run_random *random)
{
    epic_layer *l = &w->layer;
    if (l->num_experts > 64 || !run_chance(random, 25)) return;
    l->num_logical = (uint32_t)run_between(random, 1, l->num_experts);
    w->logical_of = malloc(l->num_experts * sizeof *w->logical_of);
    const int64_t busy = run_between(random, 1, l->num_logical);
    for (uint32_t e = 0; e < l->num_experts; e++)
        w->logical_of[e] = e < l->num_logical ? (int32_t)e : (int32_t)run_below(random, busy);
    shuffle(random, w->logical_of, l->num_experts);
}

static void choose_layer(world *w, run_random *random)
{
    epic_layer *l = &w->layer;
    choose_experts(w, random);
    choose_order(w, random);
    l->alignment = (uint32_t)PICK(random, 0, 1, 16, 128, 5);
    if (run_chance(random, 25)) l->layout = EPIC_FLAT;
    if (run_chance(random, 40)) {
        l->overflow = EPIC_OVERFLOW_DROP;
        if (run_chance(random, 50)) l->expert_capacity = (uint32_t)run_between(random, 1, 12);
        if (run_chance(random, 40)) l->priority = EPIC_BY_K;
    }
    choose_replicas(w, random);
}

/* ------------------------------------------------------------------------- placement ---- */

/* Tree order: whole blocks, in any order of the ranks. Otherwise any placement, also all
 * experts on one rank. */
static void choose_placement(world *w, run_random *random)
{
    const int64_t num_experts = w->layer.num_experts, ranks = w->num_ranks;
    const int style = (int)run_below(random, 4);
    int32_t order[RUN_MAX_RANKS];
    w->rank_of = malloc((size_t)num_experts * sizeof *w->rank_of);
    w->table = num_experts % ranks != 0 || run_chance(random, 35);
    for (int r = 0; r < w->num_ranks; r++) order[r] = r;
    if (w->table) shuffle(random, order, ranks);
    const bool blocks = w->layer.sum_order == EPIC_TREE || !w->table;
    for (int64_t e = 0; e < num_experts; e++)
        w->rank_of[e] = blocks       ? order[e / (num_experts / ranks)]
                        : style == 0 ? order[0]
                        : style == 1 ? order[run_below(random, (ranks + 1) / 2)]
                                     : (int32_t)run_below(random, ranks);
}

static world_seats seats_of(int num_ranks)
{
    world_seats seats = {.num_seats = num_ranks, .num_members = num_ranks};
    for (int r = 0; r < num_ranks; r++) seats.of[r] = r;
    return seats;
}

static int member_on(const world_seats *seats, int64_t seat)
{
    for (int m = 0; m < seats->num_members; m++)
        if (seats->of[m] == seat) return m;
    return -1;
}

/* Returns a vacant seat, which there must be. */
static int vacant_seat(const world_seats *seats, run_random *random)
{
    int seat = (int)run_below(random, seats->num_seats);
    while (member_on(seats, seat) >= 0) seat = (seat + 1) % seats->num_seats;
    return seat;
}

void world_take_seats(world *w, const world_seats *seats)
{
    run_random random = {run_mix(w->seed, 3)};
    w->seats = *seats;
    free(w->owner_of);
    w->owner_of = malloc(w->layer.num_experts * sizeof *w->owner_of);
    if (seats->num_members < seats->num_seats && w->layer.sum_order == EPIC_TREE)
        w->table = true;
    for (uint32_t e = 0; e < w->layer.num_experts; e++)
        w->owner_of[e] =
            w->rank_of[e] < 0 ? vacant_seat(seats, &random) : seats->of[w->rank_of[e]];
}

/* Returns whether some id names no expert on a member. */
static bool has_absent(const world *w)
{
    for (int64_t id = 0; id < world_num_ids(w); id++) {
        bool found = false;
        for (uint32_t e = 0; e < w->layer.num_experts; e++)
            found |=
                w->rank_of[e] >= 0 && (w->logical_of ? w->logical_of[e] : (int32_t)e) == id;
        if (!found) return true;
    }
    return false;
}

/* Makes each replica lose its logical expert with a probability of `percent`. */
static void lose_replicas(world *w, int percent, run_random *random)
{
    for (uint32_t e = 0; w->logical_of && e < w->layer.num_experts; e++)
        if (run_chance(random, percent)) w->logical_of[e] = EPIC_ABSENT;
}

/* Draws whether the layer drops the choices of absent experts. It must if there are any. */
static void choose_flag(world *w, run_random *random)
{
    if (has_absent(w) || run_chance(random, 20)) w->layer.flags |= EPIC_DROP_ABSENT;
}

/* Draws absent experts in a group without vacant seats. */
static void choose_lost(world *w)
{
    run_random random = {run_mix(w->seed, 4)};
    if (!w->logical_of || run_chance(&random, 50)) return;
    lose_replicas(w, (int)run_between(&random, 0, 60), &random);
    choose_flag(w, &random);
}

/* Places experts on vacant seats: by contiguous blocks of all seats, or some of a table. Some
 * replicas lose their logical expert. */
static void choose_absent(world *w, const world_seats *seats, run_random *random)
{
    epic_layer *l = &w->layer;
    const bool tree = l->sum_order == EPIC_TREE;
    const uint32_t ranks = (uint32_t)seats->num_seats;
    w->table = tree || l->num_experts % ranks || run_chance(random, 60);
    const int part = run_chance(random, 50) ? (int)run_between(random, 1, 60) : 0;
    const int lost = run_chance(random, 40) ? (int)run_between(random, 1, 60) : 0;
    for (uint32_t e = 0; e < l->num_experts; e++) {
        if (!w->table) w->rank_of[e] = member_on(seats, e / (l->num_experts / ranks));
        if (w->table && !tree && run_chance(random, part)) w->rank_of[e] = -1;
    }
    lose_replicas(w, lost, random);
    choose_flag(w, random);
}

/* --------------------------------------------------------------------------- routing ---- */

static void choose_tokens(world *w, run_random *random)
{
    int64_t most = world_most_choices / w->layer.top_k;
    if (most > WORLD_MAX_TOKENS) most = WORLD_MAX_TOKENS;
    const int style = (int)run_below(random, 10);
    const int64_t same = run_between(random, 1, most);
    const int only = (int)run_below(random, w->num_ranks);
    for (int r = 0; r < w->num_ranks; r++)
        w->tokens_of[r] = style == 0   ? 0
                          : style == 1 ? (r == only ? most : 0)
                          : style < 5  ? same
                          : style < 7  ? (run_chance(random, 50) ? 0 : run_below(random, most))
                                       : run_below(random, most + 1);
}

static int64_t choose_id(run_random *random, int style, int64_t favourite, int64_t num_experts)
{
    const double u = (double)run_below(random, 1 << 20) / (1 << 20);
    switch (style) {
    case 0: /* one expert gets all choices */
        return favourite;
    case 1:
        return -1;
    case 2: /* skewed */
    case 3:
        return (favourite + (int64_t)(u * u * u * u * (double)num_experts)) % num_experts;
    case 4: /* many choices without an expert */
        return run_chance(random, 60) ? -1 : run_below(random, num_experts);
    default:
        return run_chance(random, 4) ? -1 : run_below(random, num_experts);
    }
}

int64_t world_twin(const world *w, int64_t first, int64_t end)
{
    const int64_t top_k = w->layer.top_k;
    for (int64_t c = first; c < end; c++)
        for (int64_t b = c - c % top_k; b < c; b++)
            if (w->named[b] >= 0 && w->named[b] == w->named[c]) return c;
    return -1;
}

static void choose_ids(world *w, run_random *random, int64_t total_tokens)
{
    const int64_t top_k = w->layer.top_k, num_experts = world_num_ids(w);
    const int style = (int)run_below(random, 14);
    const int64_t favourite = run_below(random, num_experts);
    const bool different = style > 8 && top_k <= num_experts;
    w->named = malloc(((size_t)(total_tokens * top_k) + 1) * sizeof *w->named);
    w->ids = malloc(((size_t)(total_tokens * top_k) + 1) * sizeof *w->ids);
    for (int64_t t = 0; t < total_tokens; t++)
        for (int64_t k = 0; k < top_k; k++) {
            int64_t *id = &w->named[t * top_k + k];
            bool again = true;
            for (int tries = 0; again && tries < 50; tries++) {
                *id = choose_id(random, style, favourite, num_experts);
                again = false;
                for (int64_t j = 1; different && *id >= 0 && j <= k; j++)
                    again |= id[-j] == *id;
            }
        }
    if (run_chance(random, 70) && world_twin(w, 0, total_tokens * top_k) < 0)
        w->layer.flags |= EPIC_DISTINCT;
    oracle_choose_replicas(&w->layer, w->rank_of, w->logical_of, w->named, total_tokens * top_k,
                           w->ids);
}

/* ------------------------------------------------------------------------- capacity ---- */

static oracle_plan *ask_oracle(const world *w)
{
    const oracle_input in = {.num_ranks = w->num_ranks,
                             .layer = w->layer,
                             .tokens_of = w->tokens_of,
                             .capacity = w->capacity,
                             .ids = w->ids,
                             .rank_of = w->rank_of,
                             .logical_of = w->logical_of};
    return oracle_plan_new(&in);
}

static int64_t bound_of(const world *w)
{
    const epic_config config = {.max_tokens = WORLD_MAX_TOKENS,
                                .max_row_bytes = 16,
                                .num_ranks = (uint32_t)w->num_ranks};
    int64_t slots;
    CHECK(epic_capacity_bound(&config, &w->layer, &slots) == EPIC_OK);
    return slots;
}

/* Draws a capacity near the need: exactly the need, the bound, a little more, or too little. */
static void choose_capacity(world *w, run_random *random)
{
    w->plan = ask_oracle(w);
    const bool drops = w->layer.overflow == EPIC_OVERFLOW_DROP;
    const bool bounded = !w->table || w->layer.num_experts % (uint32_t)w->num_ranks;
    const int style = (int)run_below(random, 8);
    for (int r = 0; r < w->num_ranks && style > 1; r++) {
        const int64_t needed = w->plan->demand[r];
        const int64_t least = needed > 1 ? needed : 1;
        int64_t capacity = least;
        if (style == 2 && bounded) capacity = bound_of(w);
        if (style == 3 || style == 4) capacity = least + run_below(random, 40);
        const bool little = style > 4 && (drops || (style == 5 && run_chance(random, 30)));
        if (little && needed > 1) capacity = run_between(random, 1, needed - 1);
        if (style == 7 && run_chance(random, 30)) capacity = EPIC_CAPACITY_EXACT;
        w->capacity[r] = capacity;
    }
    oracle_plan_free(w->plan);
    w->plan = ask_oracle(w);
}

world *world_new_vacant(uint64_t seed, const world_seats *seats)
{
    run_random random = {run_mix(seed, 1)};
    const int num_ranks = seats->num_members;
    world *w = calloc(1, sizeof *w);
    w->seed = seed;
    w->num_ranks = num_ranks;
    w->wild = run_chance(&random, 25);
    choose_layer(w, &random);
    choose_placement(w, &random);
    if (seats->num_seats > num_ranks)
        choose_absent(w, seats, &random);
    else
        choose_lost(w);
    choose_tokens(w, &random);
    int64_t total = 0;
    for (int r = 0; r < num_ranks; r++) total += w->tokens_of[r];
    choose_ids(w, &random, total);
    choose_capacity(w, &random);
    world_take_seats(w, seats);
    return w;
}

world *world_new(uint64_t seed, int num_ranks)
{
    const world_seats seats = seats_of(num_ranks);
    return world_new_vacant(seed, &seats);
}

bool world_has_tree(int num_ranks)
{
    return power_of_two(num_ranks);
}

/* Here the routing must not depend on num_ranks, so everything that depends on it draws from
 * another source. */
world *world_new_tree(uint64_t seed, int num_ranks)
{
    run_random random = {run_mix(seed, 2)}, own = {run_mix(seed, 100 + (uint64_t)num_ranks)};
    world *w = calloc(1, sizeof *w);
    w->seed = seed;
    w->num_ranks = num_ranks;
    const uint32_t parts = num_ranks > 8 ? (uint32_t)num_ranks : 8;
    w->wild = run_chance(&random, 15);
    w->layer = (epic_layer){.num_experts = parts * (uint32_t)run_between(&random, 2, 6),
                            .top_k = (uint32_t)run_between(&random, 1, 8),
                            .alignment = (uint32_t)PICK(&random, 1, 16),
                            .sum_order = EPIC_TREE,
                            .leaves = parts << run_below(&random, 2),
                            .partial_type = run_chance(&random, 30) ? EPIC_F32 : 0};
    if (w->layer.num_experts % w->layer.leaves) w->layer.leaves = parts;
    if (run_chance(&random, 50)) {
        w->layer.overflow = EPIC_OVERFLOW_DROP;
        w->layer.expert_capacity = (uint32_t)run_between(&random, 3, 20);
        if (run_chance(&random, 40)) w->layer.priority = EPIC_BY_K;
    }
    choose_replicas(w, &random);
    const int64_t total = parts * run_between(&random, 1, 5);
    choose_ids(w, &random, total);
    w->num_ranks = 1;
    choose_placement(w, &own);
    w->tokens_of[0] = total;
    for (uint32_t e = 0; e < w->layer.num_experts; e++) w->rank_of[e] = 0;
    w->alone = ask_oracle(w);
    w->alone->in.rank_of = calloc(w->layer.num_experts, sizeof(int32_t));
    free(w->rank_of);
    w->num_ranks = num_ranks;
    choose_placement(w, &own);
    for (int r = 0; r < num_ranks; r++) w->tokens_of[r] = total / num_ranks;
    w->plan = ask_oracle(w);
    const world_seats seats = seats_of(num_ranks);
    world_take_seats(w, &seats);
    return w;
}

void world_free(world *w)
{
    if (w->alone) free((void *)w->alone->in.rank_of);
    oracle_plan_free(w->alone);
    oracle_plan_free(w->plan);
    free(w->named);
    free(w->ids);
    free(w->rank_of);
    free(w->owner_of);
    free(w->logical_of);
    free(w);
}

void world_report(const world *w, const char *what)
{
    const epic_layer *l = &w->layer;
    fprintf(
        stderr,
        "%s: seed %llx: %d ranks of %d, %u experts%s, replicas of %u, top_k %u, alignment %u, "
        "layout %u, "
        "overflow %u, expert_capacity %u, priority %u, sum_order %u, leaves %u, "
        "partial_type %u, flags %u%s\n",
        what, (unsigned long long)w->seed, w->num_ranks, w->seats.num_seats, l->num_experts,
        w->table ? " by a table" : "", l->num_logical, l->top_k, l->alignment, l->layout,
        l->overflow, l->expert_capacity, l->priority, l->sum_order, l->leaves, l->partial_type,
        l->flags, w->wild ? ", wild rows" : "");
    for (int r = 0; r < w->num_ranks; r++)
        fprintf(stderr, "%s: rank %d: %lld tokens, capacity %lld, %lld slots\n", what, r,
                (long long)w->tokens_of[r], (long long)w->capacity[r],
                (long long)w->plan->num_slots[r]);
}

/* ------------------------------------------------------------------------------ data ---- */

void *world_topk_idx(const world *w, int rank, uint32_t index_type)
{
    const int64_t top_k = w->layer.top_k, count = w->tokens_of[rank] * top_k;
    const int64_t *ids = w->named + w->plan->first_token[rank] * top_k;
    const bool wide = index_type == EPIC_I64;
    run_random random = {run_mix(w->seed, 3)};
    void *list = malloc((size_t)count * (wide ? 8 : 4) + 1);
    for (int64_t i = 0; i < count; i++) {
        int64_t id = ids[i];
        if (id < 0)
            id = wide ? PICK(&random, -1, -7, INT64_MIN, -4294967296)
                      : PICK(&random, -1, -7, INT32_MIN);
        if (wide)
            ((int64_t *)list)[i] = id;
        else
            ((int32_t *)list)[i] = (int32_t)id;
    }
    return list;
}

static double plain_number(uint64_t bits)
{
    return ldexp((double)(int64_t)bits, -62); /* a number in [-2, 2) */
}

/* Sets some words to the patterns that mean "nothing has arrived" in memory that a peer writes,
 * and to the pattern that replaces them on the way. All are NaN as float32 and as smaller
 * types. */
static void put_reserved_words(run_random *random, unsigned char *row, int64_t bytes)
{
    static const uint32_t words[] = {0xffffffff, 0x7fffffff, 0x7fff7fff};
    const bool all = run_chance(random, 25);
    for (int64_t i = 0; i + 4 <= bytes; i += 4)
        if (all || run_chance(random, 10))
            memcpy(row + i, &words[all ? 0 : run_below(random, 3)], 4);
}

static double wild_number(uint64_t bits)
{
    static const double special[] = {0.0,     -0.0,  1e-44, -1e-41,   6e-8, 1.0,
                                     1.7e308, -3e38, 65504, INFINITY, NAN};
    const int64_t kind = (int64_t)(bits >> 8 & 255);
    if (kind < 11) return special[kind];
    return ldexp(plain_number(bits), (int)(bits & 31) - 16);
}

void world_row(const world *w, enum world_stream stream, int64_t ident, uint32_t type,
               int64_t n, void *row)
{
    run_random random = {run_mix(run_mix(w->seed, 10 + stream), (uint64_t)ident)};
    const bool wild = w->wild && run_chance(&random, 20); /* otherwise only NaN would remain */
    for (int64_t i = 0; i < n; i++) {
        const uint64_t bits = run_next(&random);
        if (type == EPIC_BYTES)
            ((unsigned char *)row)[i] = (unsigned char)bits;
        else
            oracle_put(row, type, i, wild ? wild_number(bits) : plain_number(bits));
    }
    if (wild && run_chance(&random, 30))
        put_reserved_words(&random, row, n * oracle_type_bytes(type));
}

float world_weight(const world *w, enum world_stream stream, int64_t choice)
{
    run_random random = {run_mix(run_mix(w->seed, 20 + stream), (uint64_t)choice)};
    if (run_chance(&random, 10)) return 0;
    const double x = plain_number(run_next(&random));
    return (float)(w->wild ? x * 1e3 : fabs(x) / 2);
}
