/* SPDX-License-Identifier: Apache-2.0 */
/* Placements by round robin, by a greedy rule, and by local search (place.h). */
#include "place.h"

#include <stdlib.h>
#include <string.h>

#include "tool.h"

#define MAX_SAMPLED_STEPS 48 /* maximum number of steps that the search uses */
#define NUM_STARTS 6         /* number of placements from which the search starts */
/* climb_hill() ends after this many failures in a row, times the number of places (slots for
 * experts) */
#define MAX_FAILED_PROPOSALS 24
#define MAX_POLISHED_PLACES 48 /* maximum number of places for polish_placement() */
/* maximum number of tokens with which place_hosts() compares placements */
#define MAX_TOKENS 8192

static int32_t num_places(const place_problem *p)
{
    return p->ranks * p->slots;
}

/* -------------------------------------------------------------------------------- cost ---- */

/* Writes the number of places (replicas) of each expert to count [logical]. */
static void count_places(const place_problem *p, const int32_t *at, int32_t *count)
{
    memset(count, 0, (size_t)p->logical * sizeof *count);
    for (int32_t i = 0; i < num_places(p); i++) count[at[i]]++;
}

/* Returns the number of choices that go to replica n of an expert with r replicas
 * (round-robin): choice n, n + r, n + 2 r and so on. */
static int64_t part_of(int64_t choices, int32_t n, int32_t r)
{
    return (choices + r - 1 - n) / r;
}

/* Returns the number of choices of the busiest rank in one step. turn [logical] is scratch
 * memory. */
static int64_t busiest_rank(const place_problem *p, const int32_t *at, const int32_t *count,
                            const int32_t *load, int32_t *turn)
{
    int64_t most = 0;
    memset(turn, 0, (size_t)p->logical * sizeof *turn);
    for (int32_t rank = 0; rank < p->ranks; rank++) {
        int64_t sum = 0;
        for (int32_t i = rank * p->slots; i < (rank + 1) * p->slots; i++) {
            const int32_t e = at[i];
            sum += count[e] == 1 ? load[e] : part_of(load[e], turn[e]++, count[e]);
        }
        if (sum > most) most = sum;
    }
    return most;
}

int64_t place_cost(const place_problem *p, const int32_t *at)
{
    int32_t *count = tool_alloc((size_t)p->logical * 2 * sizeof *count),
            *turn = count + p->logical;
    int64_t cost = 0;
    count_places(p, at, count);
    for (int64_t s = 0; s < p->num_steps; s++)
        cost += busiest_rank(p, at, count, p->load + s * p->logical, turn);
    free(count);
    return cost;
}

int64_t place_total(const place_problem *p)
{
    int64_t total = 0;
    for (int64_t i = 0; i < p->num_steps * p->logical; i++) total += p->load[i];
    return total;
}

static int compare_int32(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

int64_t place_bound(const place_problem *p)
{
    const int32_t spare = num_places(p) - p->logical;
    const int32_t most_replicas = spare + 1 < p->ranks ? spare + 1 : p->ranks;
    int32_t *sorted = tool_alloc((size_t)p->logical * sizeof *sorted);
    int64_t bound = 0;
    for (int64_t s = 0; s < p->num_steps; s++) {
        int64_t sum = 0;
        memcpy(sorted, p->load + s * p->logical, (size_t)p->logical * sizeof *sorted);
        qsort(sorted, (size_t)p->logical, sizeof *sorted, compare_int32);
        for (int32_t e = 0; e < p->logical; e++) sum += sorted[e];
        const int64_t mean = (sum + p->ranks - 1) / p->ranks, most = sorted[p->logical - 1];
        int64_t share = (most + most_replicas - 1) / most_replicas;
        for (int32_t e = 0; spare == 0 && e < p->slots - 1; e++) share += sorted[e];
        bound += mean > share ? mean : share;
    }
    free(sorted);
    return bound;
}

/* ---------------------------------------------------------------- round robin, greedy ---- */

void place_round_robin(const place_problem *p, int32_t *at)
{
    for (int32_t i = 0; i < num_places(p); i++)
        at[i % p->ranks * p->slots + i / p->ranks] = i % p->logical;
}

/* One replica to place. */
typedef struct piece {
    int32_t expert;
    double load;
} piece;

static int compare_pieces(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    if (x->load != y->load) return x->load > y->load ? -1 : 1;
    return (x->expert > y->expert) - (x->expert < y->expert);
}

/* Makes the list of all replicas to place, those with the largest loads first. Each expert has
 * one replica. Each spare place becomes one more replica of the expert whose replicas have the
 * largest load at that moment. */
static void make_pieces(const place_problem *p, piece *out)
{
    double *load = tool_alloc((size_t)p->logical * sizeof *load);
    int32_t *count = tool_alloc((size_t)p->logical * sizeof *count);
    for (int64_t i = 0; i < p->num_steps * p->logical; i++) load[i % p->logical] += p->load[i];
    for (int32_t e = 0; e < p->logical; e++) count[e] = 1;
    for (int32_t more = num_places(p) - p->logical; more > 0; more--) {
        int32_t best = 0;
        for (int32_t e = 1; e < p->logical; e++)
            if (load[e] / count[e] > load[best] / count[best]) best = e;
        count[best]++;
    }
    for (int32_t e = 0, n = 0; e < p->logical; e++)
        for (int32_t i = 0; i < count[e]; i++) out[n++] = (piece){e, load[e] / count[e]};
    qsort(out, (size_t)num_places(p), sizeof *out, compare_pieces);
    free(load), free(count);
}

/* Returns true if the expert already has a replica on the rank. place_greedy() avoids two
 * replicas on one rank while another rank has room, because they do not spread the load. */
static bool has_expert(const place_problem *p, const int32_t *at, int32_t rank, int32_t filled,
                       int32_t expert)
{
    for (int32_t i = 0; i < filled; i++)
        if (at[rank * p->slots + i] == expert) return true;
    return false;
}

void place_greedy(const place_problem *p, int32_t *at)
{
    piece *pieces = tool_alloc((size_t)num_places(p) * sizeof *pieces);
    double *sum = tool_alloc((size_t)p->ranks * sizeof *sum);
    int32_t *filled = tool_alloc((size_t)p->ranks * sizeof *filled);
    make_pieces(p, pieces);
    for (int32_t n = 0; n < num_places(p); n++) {
        int32_t best = -1, any = -1;
        for (int32_t r = 0; r < p->ranks; r++) {
            if (filled[r] == p->slots) continue;
            if (any < 0 || sum[r] < sum[any]) any = r;
            if (has_expert(p, at, r, filled[r], pieces[n].expert)) continue;
            if (best < 0 || sum[r] < sum[best]) best = r;
        }
        if (best < 0) best = any;
        at[best * p->slots + filled[best]++] = pieces[n].expert;
        sum[best] += pieces[n].load;
    }
    free(pieces), free(sum), free(filled);
}

/* ------------------------------------------------------------------------------ search ---- */

static uint64_t draw_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Returns the problem with at most MAX_SAMPLED_STEPS steps, spread evenly over the trace. */
static place_problem sample_steps(const place_problem *p, int32_t *load)
{
    place_problem out = *p;
    if (p->num_steps > MAX_SAMPLED_STEPS) out.num_steps = MAX_SAMPLED_STEPS;
    for (int64_t s = 0; s < out.num_steps; s++)
        memcpy(load + s * p->logical, p->load + s * p->num_steps / out.num_steps * p->logical,
               (size_t)p->logical * sizeof *load);
    out.load = load;
    return out;
}

/* Loads of the ranks during the search. Each replica has an equal part of its expert's load.
 * The true parts may differ by one choice. */
typedef struct sums {
    const place_problem *p;
    int32_t *at, *count;
    double *load; /* [num_steps, ranks]: load of each rank in each step */
    double cost;
} sums;

static double load_part(const sums *s, int64_t step, int32_t expert)
{
    return (double)s->p->load[step * s->p->logical + expert] / s->count[expert];
}

/* Computes the loads and the cost from the placement. */
static void add_up(sums *s)
{
    const place_problem *p = s->p;
    count_places(p, s->at, s->count);
    s->cost = 0;
    for (int64_t step = 0; step < p->num_steps; step++) {
        double *load = s->load + step * p->ranks, most = 0;
        for (int32_t r = 0; r < p->ranks; r++) {
            load[r] = 0;
            for (int32_t i = r * p->slots; i < (r + 1) * p->slots; i++)
                load[r] += load_part(s, step, s->at[i]);
            if (load[r] > most) most = load[r];
        }
        s->cost += most;
    }
}

/* Returns the cost after an exchange of the experts of places i and j. */
static double cost_exchanged(const sums *s, int32_t i, int32_t j)
{
    const int32_t ranks = s->p->ranks, a = i / s->p->slots, b = j / s->p->slots;
    double cost = 0;
    for (int64_t step = 0; step < s->p->num_steps && cost <= s->cost; step++) {
        const double *load = s->load + step * ranks;
        const double more = load_part(s, step, s->at[j]) - load_part(s, step, s->at[i]);
        double most = load[a] + more > load[b] - more ? load[a] + more : load[b] - more;
        for (int32_t r = 0; r < ranks; r++)
            if (r != a && r != b && load[r] > most) most = load[r];
        cost += most;
    }
    return cost;
}

static void exchange_places(sums *s, int32_t i, int32_t j)
{
    const int32_t ranks = s->p->ranks, a = i / s->p->slots, b = j / s->p->slots;
    for (int64_t step = 0; step < s->p->num_steps; step++) {
        const double more = load_part(s, step, s->at[j]) - load_part(s, step, s->at[i]);
        s->load[step * ranks + a] += more;
        s->load[step * ranks + b] -= more;
    }
    const int32_t keep = s->at[i];
    s->at[i] = s->at[j];
    s->at[j] = keep;
}

/* Makes place i a replica of another expert, unless this increases the cost. Returns true if it
 * reduces the cost. */
static bool try_replica(sums *s, int32_t i, int32_t expert)
{
    const int32_t before = s->at[i];
    const double cost = s->cost;
    s->at[i] = expert;
    add_up(s);
    if (s->cost <= cost) return s->cost < cost;
    s->at[i] = before;
    add_up(s);
    return false;
}

/* Tries a random change, and keeps it unless it increases the cost. Keeps changes with equal
 * cost, because they may make later improvements possible. Returns true if the change reduces
 * the cost. */
static bool try_proposal(sums *s, uint64_t *state)
{
    const place_problem *p = s->p;
    const int32_t i = (int32_t)(draw_random(state) % (uint64_t)num_places(p));
    const int32_t j = (int32_t)(draw_random(state) % (uint64_t)num_places(p));
    if (num_places(p) > p->logical && draw_random(state) % 8 == 0 && s->count[s->at[i]] > 1 &&
        s->at[i] != s->at[j])
        return try_replica(s, i, s->at[j]);
    if (i / p->slots == j / p->slots || s->at[i] == s->at[j]) return false;
    const double cost = cost_exchanged(s, i, j);
    if (cost > s->cost) return false;
    exchange_places(s, i, j);
    const bool better = cost < s->cost * (1 - 1e-9);
    s->cost = cost;
    return better;
}

/* Tries random changes until many changes in a row have not reduced the cost. */
static void climb_hill(const place_problem *p, int32_t *at, uint64_t *state)
{
    sums s = {.p = p, .at = at};
    s.count = tool_alloc((size_t)p->logical * sizeof *s.count);
    s.load = tool_alloc((size_t)(p->num_steps * p->ranks) * sizeof *s.load);
    add_up(&s);
    for (int64_t tries = 0; tries < (int64_t)MAX_FAILED_PROPOSALS * num_places(p); tries++)
        if (try_proposal(&s, state)) tries = 0;
    free(s.count), free(s.load);
}

/* Improves a placement: tries all single changes, and keeps those that reduce the cost, until
 * no change reduces it. Uses place_cost(), which is exact, while `sums` ignores that the
 * replicas of one expert may differ by one choice. */
static void polish_placement(const place_problem *p, int32_t *at)
{
    int32_t *count = tool_alloc((size_t)p->logical * sizeof *count);
    int64_t cost = place_cost(p, at);
    for (int32_t i = 0; i < num_places(p); i++)
        for (int32_t j = 0; j < num_places(p); j++) {
            const int32_t at_i = at[i], at_j = at[j];
            count_places(p, at, count);
            for (int kind = 0; kind < 2 && at_i != at_j; kind++) {
                if (kind && count[at_i] == 1) break;
                at[i] = at_j;
                if (!kind) at[j] = at_i;
                const int64_t found = place_cost(p, at);
                if (found < cost) {
                    cost = found;
                    i = j = 0;
                    break;
                }
                at[i] = at_i;
                at[j] = at_j;
            }
        }
    free(count);
}

/* Exchanges places at random, to create a start for the search. */
static void shuffle_places(const place_problem *p, int32_t *at, uint64_t *state)
{
    for (int32_t i = num_places(p) - 1; i > 0; i--) {
        const int32_t j = (int32_t)(draw_random(state) % (uint64_t)(i + 1)), keep = at[i];
        at[i] = at[j];
        at[j] = keep;
    }
}

void place_search(const place_problem *p, int32_t *at, uint64_t seed)
{
    const size_t bytes = (size_t)num_places(p) * sizeof *at;
    int32_t *load =
        tool_alloc((size_t)(MAX_SAMPLED_STEPS * (int64_t)p->logical) * sizeof *load);
    int32_t *next = tool_alloc(bytes);
    const place_problem some = sample_steps(p, load);
    int64_t best = INT64_MAX;
    for (int beginning = 0; beginning < NUM_STARTS; beginning++) {
        uint64_t state = seed + (uint64_t)beginning * 7919 + 1;
        (beginning == 1 ? place_round_robin : place_greedy)(p, next);
        if (beginning > 1) shuffle_places(p, next, &state);
        climb_hill(&some, next, &state);
        if (num_places(p) <= MAX_POLISHED_PLACES) polish_placement(&some, next);
        const int64_t cost = place_cost(p, next);
        if (cost >= best) continue;
        best = cost;
        memcpy(at, next, bytes);
    }
    void (*const simple[])(const place_problem *, int32_t *) = {place_greedy,
                                                                place_round_robin};
    /* the search used only a sample of the steps, so a simple placement may be better over all
     * steps */
    for (int i = 0; i < 2; i++) {
        simple[i](p, next);
        const int64_t cost = place_cost(p, next);
        if (cost >= best) continue;
        best = cost;
        memcpy(at, next, bytes);
    }
    free(load), free(next);
}

/* ---------------------------------------------------------- placement on several hosts ---- */

int64_t place_crossings(int32_t ranks, int32_t hosts, const uint64_t *seen, int64_t num)
{
    const int32_t each = ranks / hosts;
    const uint64_t host = each == 64 ? UINT64_MAX : (UINT64_C(1) << each) - 1;
    int64_t crossings = 0;
    for (int64_t i = 0; i < num; i++) {
        int touched = 0;
        for (int32_t h = 0; h < hosts; h++) touched += (seen[i] >> (h * each) & host) != 0;
        crossings += touched > 1 ? touched - 1 : 0;
    }
    return crossings;
}

static void exchange_bits(uint64_t *seen, int64_t num, int32_t a, int32_t b)
{
    for (int64_t i = 0; i < num; i++) {
        const uint64_t differ = (seen[i] >> a ^ seen[i] >> b) & 1;
        seen[i] ^= differ << a | differ << b;
    }
}

static void exchange_ranks(const place_problem *p, int32_t *at, int32_t a, int32_t b)
{
    for (int32_t i = 0; i < p->slots; i++) {
        const int32_t keep = at[a * p->slots + i];
        at[a * p->slots + i] = at[b * p->slots + i];
        at[b * p->slots + i] = keep;
    }
}

void place_hosts(const place_problem *p, int32_t *at, int32_t hosts, uint64_t *seen,
                 int64_t num)
{
    const int64_t some = num < MAX_TOKENS ? num : MAX_TOKENS;
    const int32_t each = p->ranks / hosts;
    int64_t best = place_crossings(p->ranks, hosts, seen, some);
    for (bool better = true; better;) {
        better = false;
        for (int32_t a = 0; a < p->ranks; a++)
            for (int32_t b = (a / each + 1) * each; b < p->ranks; b++) {
                exchange_bits(seen, some, a, b);
                const int64_t found = place_crossings(p->ranks, hosts, seen, some);
                if (found >= best) {
                    exchange_bits(seen, some, a, b);
                    continue;
                }
                best = found;
                better = true;
                exchange_bits(seen + some, num - some, a, b);
                exchange_ranks(p, at, a, b);
            }
    }
}
