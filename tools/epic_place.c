/* SPDX-License-Identifier: Apache-2.0 */
/* epic-place: reads a trace and proposes which rank owns which experts, and which experts have
 * replicas. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "place.h"
#include "trace_read.h"

static const char help[] =
    "usage: epic-place TRACE --ranks N [--slots N] [--hosts N] [--out FILE] [--seed N] "
    "[--loads]\n"
    "\n"
    "Proposes which rank owns each expert, so that the busiest rank has as few choices as\n"
    "possible, from TRACE: a folder that EPIC_TRACE named, or an .npy file (epic-trace "
    "--help).\n"
    "  --loads        the .npy file has counts [layers, experts]: how often each expert was "
    "chosen.\n"
    "                 One placement serves all rows; --layer I/N takes the row of one layer\n"
    "  --ranks N      ranks of the group that will use the placement\n"
    "  --slots N      experts per rank; those beyond one per expert are replicas of busy "
    "experts.\n"
    "                 Default: no replicas\n"
    "  --hosts N      ranks 0 to R / N - 1 share a host, and so on: the proposal also keeps\n"
    "                 experts of the same tokens on one host (at most 64 ranks)\n"
    "  --out FILE     the placement, for epic/placement.h, epic.read_placement and epic-trace\n"
    "  --group, --layer, --steps, --experts, --ids    as for epic-trace\n"
    "Exit status: 0; 1: an error, printed on stderr; 2: usage.\n";

typedef struct options {
    const char *trace, *out;
    trace_choice choice;
    int32_t ranks, slots, hosts;
    uint64_t seed;
} options;

static int print_usage(const char *why, const char *what)
{
    fprintf(stderr, "epic-place: %s%s\n%s", why, what, help);
    return 2;
}

static int read_options(options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (trace_read_flag(&o->choice, name)) continue;
        if (strncmp(name, "--", 2)) {
            if (o->trace) return print_usage("too many arguments: ", name);
            o->trace = name;
            continue;
        }
        if (!value) return print_usage("a value is missing after ", name);
        i++;
        if (!strcmp(name, "--ranks"))
            o->ranks = (int32_t)tool_parse_number(name, value, 1, 1024);
        else if (!strcmp(name, "--slots"))
            o->slots = (int32_t)tool_parse_number(name, value, 1, 65536);
        else if (!strcmp(name, "--hosts"))
            o->hosts = (int32_t)tool_parse_number(name, value, 1, 64);
        else if (!strcmp(name, "--seed"))
            o->seed = (uint64_t)tool_parse_number(name, value, 0, INT64_MAX);
        else if (!strcmp(name, "--out"))
            o->out = value;
        else if (!trace_read_option(&o->choice, name, value))
            return print_usage("unknown option ", name);
    }
    if (!o->trace) return print_usage("TRACE is missing", "");
    return o->ranks ? 0 : print_usage("--ranks is missing", "");
}

/* --------------------------------------------------------------- the problem to solve ---- */

static int32_t *make_loads(const trace *t)
{
    int32_t *load = tool_alloc((size_t)(t->num_steps * t->num_experts) * sizeof *load);
    int64_t *of_step = tool_alloc((t->num_experts + 1) * sizeof *of_step);
    for (int64_t i = 0; i < t->num_steps; i++) {
        trace_count_load(&t->steps[i], of_step);
        for (uint32_t e = 0; e < t->steps[i].num_experts; e++)
            load[i * t->num_experts + e] = (int32_t)of_step[e];
    }
    free(of_step);
    return load;
}

/* Checks that the options match the trace, and returns the problem to solve. */
static place_problem make_problem(const trace *t, const options *o, const int32_t *load)
{
    const int32_t experts = (int32_t)t->num_experts;
    const int32_t least = (experts + o->ranks - 1) / o->ranks;
    const place_problem p = {.ranks = o->ranks,
                             .slots = o->slots ? o->slots : least,
                             .logical = experts,
                             .num_steps = t->num_steps,
                             .load = load};
    if (!t->num_steps) tool_fail("the trace has no step");
    if (o->hosts > 1) trace_need_choices(t, "--hosts");
    if (p.slots < least)
        tool_fail("--slots is %d: with %d ranks it must be at least %d for %d experts", p.slots,
                  o->ranks, least, experts);
    if ((int64_t)p.slots * p.ranks > 65536)
        tool_fail("--slots is %d: %d ranks would have more than 65536 experts", p.slots,
                  p.ranks);
    if (p.slots > experts)
        tool_fail("--slots is %d: it must be at most %d, one of each expert", p.slots, experts);
    if (o->hosts && o->ranks % o->hosts)
        tool_fail("--hosts is %d: it must divide --ranks %d", o->hosts, o->ranks);
    if (o->hosts && o->ranks > 64)
        tool_fail("--ranks is %d: with --hosts it must be at most 64", o->ranks);
    return p;
}

/* ------------------------------------------------------------------ placement on hosts ---- */

/* Returns for each token a bit mask of the ranks to which it is sent. The choices of an expert
 * are assigned to its replicas round-robin. Sets *num to the number of tokens. The caller frees
 * the result. */
static uint64_t *tokens_seen(const trace *t, const place_problem *p, const int32_t *at,
                             int64_t *num)
{
    const int32_t places = p->ranks * p->slots;
    int32_t *count = tool_alloc((size_t)p->logical * sizeof *count);
    int32_t *turn = tool_alloc((size_t)p->logical * sizeof *turn);
    int32_t *first = tool_alloc((size_t)(p->logical + 1) * sizeof *first);
    int32_t *rank_of = tool_alloc((size_t)places * sizeof *rank_of);
    *num = 0;
    for (int64_t i = 0; i < t->num_steps; i++) *num += t->steps[i].num_tokens;
    uint64_t *seen = tool_alloc((size_t)*num * sizeof *seen), *to = seen;
    for (int32_t i = 0; i < places; i++) first[at[i] + 1]++;
    for (int32_t e = 0; e < p->logical; e++) first[e + 1] += first[e];
    for (int32_t i = 0; i < places; i++) rank_of[first[at[i]] + count[at[i]]++] = i / p->slots;
    for (int64_t i = 0; i < t->num_steps; i++) {
        const trace_step *s = &t->steps[i];
        memset(turn, 0, (size_t)p->logical * sizeof *turn);
        for (int64_t c = 0; c < s->num_tokens * s->top_k; c++) {
            const int32_t e = s->ids[c];
            if (e >= 0)
                to[c / s->top_k] |= UINT64_C(1) << rank_of[first[e] + turn[e]++ % count[e]];
        }
        to += s->num_tokens;
    }
    free(count), free(turn), free(first), free(rank_of);
    return seen;
}

static void arrange_hosts(const trace *t, const place_problem *p, const options *o, int32_t *at)
{
    int64_t num;
    uint64_t *seen = tokens_seen(t, p, at, &num);
    const int64_t before = place_crossings(p->ranks, o->hosts, seen, num);
    place_hosts(p, at, o->hosts, seen, num);
    printf("%d hosts: %" PRId64 " rows beyond a token's first host; %" PRId64
           " before ranks were exchanged\n",
           o->hosts, place_crossings(p->ranks, o->hosts, seen, num), before);
    free(seen);
}

/* ------------------------------------------------------------------- writing the file ---- */

static void write_list(FILE *out, const char *word, const int32_t *list, int32_t num)
{
    fprintf(out, "%s", word);
    for (int32_t i = 0; i < num; i++) fprintf(out, i % 32 ? " %d" : "\n%d", list[i]);
    fprintf(out, "\n");
}

/* Writes the placement to a file. Without replicas the experts keep their ids. */
static void write_file(const place_problem *p, const int32_t *at, const char *path)
{
    const int32_t places = p->ranks * p->slots;
    const bool replicas = places > p->logical;
    int32_t *rank_of = tool_alloc((size_t)places * sizeof *rank_of);
    for (int32_t i = 0; i < places; i++) rank_of[replicas ? i : at[i]] = i / p->slots;
    FILE *out = fopen(path, "w");
    if (!out) tool_fail("%s: %s", path, strerror(errno));
    fprintf(out, "epic-placement 1\nranks %d\nexperts %d\nlogical %d\n", p->ranks, places,
            replicas ? p->logical : 0);
    write_list(out, "rank_of_expert", rank_of, places);
    if (replicas) write_list(out, "logical_of_expert", at, places);
    const bool bad = ferror(out) != 0;
    if (fclose(out) || bad) tool_fail("%s: cannot write the file", path);
    free(rank_of);
}

static void print_cost(const place_problem *p, const char *name, int64_t cost)
{
    const int64_t total = place_total(p);
    printf("%-14s busiest rank %" PRId64 ", imbalance %.4f\n", name, cost,
           total ? (double)(cost * p->ranks) / (double)total : 1);
}

int main(int argc, char **argv)
{
    options o = {.seed = 1};
    if (argc == 2 && !strcmp(argv[1], "--help")) {
        fputs(help, stdout);
        return 0;
    }
    const int bad = read_options(&o, argc, argv);
    if (bad) return bad;
    trace t;
    trace_load(&t, o.trace, &o.choice);
    int32_t *load = make_loads(&t);
    const place_problem p = make_problem(&t, &o, load);
    int32_t *at = tool_alloc((size_t)(p.ranks * p.slots) * sizeof *at);
    printf("%" PRId64 " %s of %d experts, for %d ranks with %d experts each\n", p.num_steps,
           t.has_loads ? "rows of loads" : "steps", p.logical, p.ranks, p.slots);
    print_cost(&p, "bound", place_bound(&p));
    place_round_robin(&p, at);
    print_cost(&p, "round robin", place_cost(&p, at));
    place_greedy(&p, at);
    print_cost(&p, "greedy", place_cost(&p, at));
    place_search(&p, at, o.seed);
    /* this also changes which choices go to which replica */
    if (o.hosts > 1) arrange_hosts(&t, &p, &o, at);
    print_cost(&p, "proposed", place_cost(&p, at));
    if (o.out) write_file(&p, at, o.out);
    free(at), free(load);
    trace_free(&t);
    return 0;
}
