/* SPDX-License-Identifier: Apache-2.0 */
/* Counts the rows that are sent. Every token of every rank chooses experts, and its row is sent
 * once to each host that has one of them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define MAX_PUT_ROWS 16 /* maximum number of rows in one put */
/* number of rejected draws after which choose_experts() calls draw_free() */
#define MAX_TRIES 64

/* Counts of one rank (struct traffic). */
typedef struct counts {
    int64_t net_out, net_in, by_rank_out, by_rank_in, inside_out, inside_in, slots, puts;
} counts;

/* Rows of consecutive tokens that a rank sends to one host or rank: the last token, and the
 * number of rows. */
typedef struct run {
    int64_t last, length;
} run;

typedef struct counting {
    const routing *r;
    const shape *s;
    double *below;  /* [experts], cumulative weights */
    int32_t *order; /* [experts], the experts in a random order */
    counts *of;     /* [ranks]: the counts of each rank */
    run *runs;     /* [hosts] or [ranks] current run of the sending rank to each host or rank */
    int64_t hosts; /* number of hosts to which a token is sent, summed over the tokens */
    uint64_t state;
} counting;

static uint64_t next_random(counting *c)
{
    uint64_t x = c->state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static double next_fraction(counting *c)
{
    return (double)(next_random(c) >> 11) * 0x1p-53;
}

/* Shuffles the experts, and sets the weight of each expert by its position in the new order. */
static void make_weights(counting *c)
{
    const int64_t n = c->r->experts;
    double sum = 0;
    for (int64_t i = 0; i < n; i++) c->order[i] = (int32_t)i;
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = (int64_t)(next_random(c) % (uint64_t)(i + 1));
        const int32_t expert = c->order[i];
        c->order[i] = c->order[j];
        c->order[j] = expert;
    }
    for (int64_t i = 0; i < n; i++) c->below[i] = sum += pow((double)(i + 1), -c->r->skew);
    for (int64_t i = 0; i < n; i++) c->below[i] /= sum;
}

static int32_t draw_expert(counting *c)
{
    if (c->r->skew == 0) return (int32_t)(next_random(c) % (uint64_t)c->r->experts);
    const double at = next_fraction(c);
    int64_t low = 0, high = c->r->experts - 1;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (c->below[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return c->order[low];
}

static bool list_has(const int32_t *list, int count, int32_t value)
{
    for (int i = 0; i < count; i++)
        if (list[i] == value) return true;
    return false;
}

/* Draws the groups from which a token may choose experts. Returns their number. */
static int draw_groups(counting *c, int32_t *out)
{
    int count = 0;
    while (count < c->r->limit) {
        const int32_t group = (int32_t)(next_random(c) % (uint64_t)c->r->groups);
        if (!list_has(out, count, group)) out[count++] = group;
    }
    return count;
}

/* Returns true if a token may choose expert `id`. The token has already chosen the k experts
 * `ids`, and `id` must be another one. If the experts have groups, `id` must be in one of the
 * token's groups. */
static bool is_free(const routing *r, int32_t id, const int32_t *ids, int k,
                    const int32_t *groups, int num_groups)
{
    if (list_has(ids, k, id)) return false;
    return !num_groups ||
           list_has(groups, num_groups, (int32_t)(id / (r->experts / r->groups)));
}

/* Draws one of the experts that the token may still choose, with the same probabilities as
 * calling draw_expert() until it returns such an expert. That would take too long if few such
 * experts are left, or if their weights are small. */
static int32_t draw_free(counting *c, const int32_t *ids, int k, const int32_t *groups,
                         int num_groups)
{
    const int64_t n = c->r->experts;
    double sum = 0;
    int32_t last = 0;
    for (int pass = 0, i = 0; pass < 2; pass++) {
        double left = pass ? next_fraction(c) * sum : 0;
        for (i = 0; i < n; i++) {
            const double weight = c->below[i] - (i ? c->below[i - 1] : 0);
            if (!is_free(c->r, c->order[i], ids, k, groups, num_groups)) continue;
            last = c->order[i];
            if (!pass)
                sum += weight;
            else if ((left -= weight) < 0)
                break;
        }
    }
    return last;
}

/* Chooses the experts of a token: from the trace, or at random without repetition. */
static void choose_experts(counting *c, int64_t token, int32_t *ids)
{
    const routing *r = c->r;
    if (r->trace) {
        const int64_t row = token % r->num_traced;
        memcpy(ids, r->trace + row * r->top_k, (size_t)r->top_k * sizeof *ids);
        return;
    }
    int32_t groups[MAX_TOP_K];
    const int num_groups = r->groups ? draw_groups(c, groups) : 0;
    for (int k = 0; k < r->top_k; k++) {
        int tries = 0;
        do {
            ids[k] =
                ++tries > MAX_TRIES ? draw_free(c, ids, k, groups, num_groups) : draw_expert(c);
        } while (!is_free(r, ids[k], ids, k, groups, num_groups));
    }
}

/* Adds a token's row to the current put from rank `from` to `to`, or starts a new put. A put
 * has up to 16 rows of consecutive tokens. */
static void extend_run(counting *c, int from, int to, int64_t token)
{
    run *a = &c->runs[to];
    const bool goes_on = a->length > 0 && a->length < MAX_PUT_ROWS && a->last == token - 1;
    c->of[from].puts += !goes_on;
    a->length = goes_on ? a->length + 1 : 1;
    a->last = token;
}

/* Counts the rows of a token to another host without relays: one row goes to each rank there that
 * has one of the token's experts. */
static void reach_ranks(counting *c, int from, int host, const int32_t *ranks, int count,
                        int64_t token)
{
    for (int i = 0; i < count; i++) {
        if (ranks[i] / c->s->ranks_per_host != host) continue;
        c->of[from].by_rank_out++;
        c->of[ranks[i]].by_rank_in++;
        c->of[from].net_out++;
        c->of[ranks[i]].net_in++;
        extend_run(c, from, ranks[i], token);
    }
}

/* Counts the row of a token to a host: one row to the relay, a rank of that host, which
 * forwards it to the other ranks there. */
static void reach_host(counting *c, int from, int host, const int32_t *ranks, int count,
                       int64_t token)
{
    const int ranks_per_host = c->s->ranks_per_host, here = from / ranks_per_host;
    if (host != here && !has_relays(c->s)) {
        reach_ranks(c, from, host, ranks, count, token);
        return;
    }
    const int relay = host == here ? from : host * ranks_per_host + from % ranks_per_host;
    if (host != here) {
        c->of[from].net_out++;
        c->of[relay].net_in++;
        extend_run(c, from, host, token);
    }
    for (int i = 0; i < count; i++) {
        if (ranks[i] / ranks_per_host != host) continue;
        c->of[from].by_rank_out += host != here;
        c->of[ranks[i]].by_rank_in += host != here;
        c->of[relay].inside_out += ranks[i] != relay;
        c->of[ranks[i]].inside_in += ranks[i] != relay;
    }
}

/* Counts the slots and rows of one token. */
static void route_token(counting *c, int from, int64_t token, const int32_t *ids)
{
    int32_t ranks[MAX_TOP_K], hosts[MAX_TOP_K];
    int num_ranks = 0, num_hosts = 0;
    for (int k = 0; k < c->r->top_k; k++) {
        const int32_t rank = (int32_t)((int64_t)ids[k] * c->s->ranks / c->r->experts);
        c->of[rank].slots++;
        if (list_has(ranks, num_ranks, rank)) continue;
        ranks[num_ranks++] = rank;
        const int32_t host = rank / c->s->ranks_per_host;
        if (!list_has(hosts, num_hosts, host)) hosts[num_hosts++] = host;
    }
    c->hosts += num_hosts;
    for (int i = 0; i < num_hosts; i++) reach_host(c, from, hosts[i], ranks, num_ranks, token);
}

static load load_of(const counting *c, size_t offset)
{
    load out = {0, 0};
    for (int r = 0; r < c->s->ranks; r++) {
        const double n =
            (double)*(const int64_t *)(const void *)((const char *)&c->of[r] + offset);
        if (n > out.most) out.most = n;
        out.mean += n / c->s->ranks;
    }
    return out;
}

#define LOAD(name) load_of(&c, offsetof(counts, name))

bool traffic_count(const routing *r, const shape *s, traffic *out)
{
    counting c = {.r = r, .s = s, .state = r->seed};
    c.below = calloc((size_t)r->experts, sizeof *c.below);
    c.order = calloc((size_t)r->experts, sizeof *c.order);
    c.of = calloc((size_t)s->ranks, sizeof *c.of);
    c.runs = calloc((size_t)s->ranks, sizeof *c.runs);
    const bool good = c.below && c.order && c.of && c.runs;
    if (good) make_weights(&c);
    for (int from = 0; good && from < s->ranks; from++) {
        memset(c.runs, 0, (size_t)s->ranks * sizeof *c.runs);
        for (int64_t t = 0; t < s->tokens; t++) {
            int32_t ids[MAX_TOP_K];
            choose_experts(&c, from * s->tokens + t, ids);
            route_token(&c, from, t, ids);
        }
    }
    if (good)
        *out = (traffic){LOAD(net_out),    LOAD(net_in),     LOAD(by_rank_out),
                         LOAD(by_rank_in), LOAD(inside_out), LOAD(inside_in),
                         LOAD(slots),      LOAD(puts),       (double)c.hosts / s->ranks};
    free(c.below);
    free(c.order);
    free(c.of);
    free(c.runs);
    return good;
}
