/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the lists in which records go to other hosts (kernels/cuda/plan/record_lists.cuh), with
 * routings that random cases rarely contain. Checks what plan, dispatch and the call that does
 * both return against plain loops, and counts what each plan passes to the net.
 *
 *   many_hosts_lists HOSTS RANKS_PER_HOST [rounds]   rounds: little staging, so that records
 *                                                 are sent in several rounds */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/proxy.h"
#include "case.h"

enum {
    TOKENS = 100, /* more than 64, so that a rank has several planner CTAs */
    ROUND = 32,   /* tokens of a round, with the argument `rounds` */
    EXPERTS = 4,  /* per rank */
    ROW = 16,
    ANNOUNCEMENT = 32,
    ENTRY_MOST_WORDS = 4096 /* largest number of words of an entry of the ring */
};

typedef enum pattern {
    SPREAD, /* each choice goes to any expert, or to none */
    ONE,    /* all choices go to the last rank */
    SPARSE, /* only one token of four has a choice */
    NONE    /* no choice has an expert */
} pattern;

typedef struct scenario {
    const char *name;
    pattern pattern;
    uint32_t top_k, layout, overflow;
    int quarter;   /* 1: each rank has slots for a quarter of its rows */
    int only_rank; /* the only rank with tokens, or -1: all ranks have different numbers */
} scenario;

static const scenario scenarios[] = {
    {"top_k 1", SPREAD, 1, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_ERROR, 0, -1},
    {"top_k 8", SPREAD, 8, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_ERROR, 0, -1},
    {"top_k 40", SPREAD, 40, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_ERROR, 0, -1},
    {"all to one rank", ONE, 8, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_ERROR, 0, -1},
    {"few choices", SPARSE, 2, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_ERROR, 0, -1},
    {"no choices", NONE, 4, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_ERROR, 0, -1},
    {"one rank has tokens", SPREAD, 3, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_ERROR, 0, 1},
    {"dropped", SPREAD, 8, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_DROP, 1, -1},
    {"too many slots", SPREAD, 8, EPIC_EXPERT_MAJOR, EPIC_OVERFLOW_ERROR, 1, -1},
    {"flat, top_k 8", SPREAD, 8, EPIC_FLAT, EPIC_OVERFLOW_ERROR, 0, -1},
    {"flat, top_k 33", SPREAD, 33, EPIC_FLAT, EPIC_OVERFLOW_ERROR, 0, -1},
    {"flat, all to one rank", ONE, 8, EPIC_FLAT, EPIC_OVERFLOW_ERROR, 0, -1},
    {"flat, few choices", SPARSE, 2, EPIC_FLAT, EPIC_OVERFLOW_ERROR, 0, -1},
    {"flat, no choices", NONE, 4, EPIC_FLAT, EPIC_OVERFLOW_ERROR, 0, -1},
    {"flat, too many rows", SPREAD, 8, EPIC_FLAT, EPIC_OVERFLOW_ERROR, 1, -1},
    {"flat, dropped", SPREAD, 8, EPIC_FLAT, EPIC_OVERFLOW_DROP, 1, -1},
};
enum { NUM_SCENARIOS = sizeof scenarios / sizeof *scenarios };

typedef struct traffic { /* what a rank passes to the net */
    uint64_t bytes, entries;
} traffic;

static int hosts, local;
static bool rounds;

static int64_t draw_id(const scenario *s, uint64_t *state, int64_t token, uint32_t k)
{
    const int64_t experts = (int64_t)hosts * local * EXPERTS;
    const int64_t any = draw_between(state, 0, experts - 1);
    if (s->pattern == ONE) return experts - 1 - k % EXPERTS;
    if (s->pattern == SPARSE) return token % 4 || k ? -1 : any;
    return s->pattern == NONE || draw_between(state, 0, 9) == 0 ? -1 : any;
}

/* Makes the case of a scenario. All ranks make the same case. */
static void make_case(test_case *c, const scenario *s, int number)
{
    uint64_t state = (uint64_t)number * 1000;
    routing *r = &c->r;
    memset(c, 0, sizeof *c);
    c->seed = (uint64_t)number * 3 + 1; /* not a multiple of 3: FLAT experts are checked */
    c->type = EPIC_F32;
    c->hidden = ROW / 4;
    c->row_bytes = c->recv_bytes = ROW;
    c->weighted = true;
    c->sample = 1;
    r->num_ranks = hosts * local;
    r->layer = (epic_layer){.num_experts = (uint32_t)(r->num_ranks * EXPERTS),
                            .top_k = s->top_k,
                            .layout = s->layout,
                            .overflow = s->overflow,
                            .alignment = 1,
                            .leaves = (uint32_t)r->num_ranks};
    r->owner = malloc(r->layer.num_experts * sizeof *r->owner);
    for (uint32_t e = 0; e < r->layer.num_experts; e++) r->owner[e] = (int32_t)e / EXPERTS;
    for (int q = 0; q < r->num_ranks; q++) {
        /* one rank has all tokens, and one only those of the first round */
        r->tokens_of[q] = q % 3 == 0 ? TOKENS : q % 3 == 1 ? ROUND - 10 : TOKENS - 3 * q;
        if (s->only_rank >= 0 && q != s->only_rank) r->tokens_of[q] = 0;
        r->ids[q] = malloc(TOKENS * s->top_k * sizeof **r->ids);
        for (int64_t t = 0; t < r->tokens_of[q]; t++)
            for (uint32_t k = 0; k < s->top_k; k++)
                r->ids[q][t * s->top_k + k] = draw_id(s, &state, t, k);
    }
    solve_routing(r);
    for (int q = 0; q < r->num_ranks; q++) {
        c->recv_rows[q] = r->plan->num_slots[q];
        if (s->quarter) r->capacity_of[q] = 1 + r->plan->num_slots[q] / 4;
    }
    if (s->quarter) solve_routing(r);
}

/* ------------------------------------------------------------------------ the messages ---- */

static uint64_t round_tokens(void)
{
    return rounds ? ROUND : TOKENS;
}

/* Returns the number of epochs of a plan: one for the plan and, if records have rounds, one for
 * each round. */
static uint64_t num_epochs(const routing *r)
{
    uint64_t most = 0;
    for (int q = 0; q < r->num_ranks; q++)
        if ((uint64_t)r->tokens_of[q] > most) most = (uint64_t)r->tokens_of[q];
    return most <= round_tokens() ? 1 : 1 + (most + round_tokens() - 1) / round_tokens();
}

/* Returns the rank to which the record of a choice is sent, or -1. If the plan is invalid and
 * its kernel sends the records, all choices that have an expert are sent. */
static int rank_of_choice(const routing *r, int q, int64_t i)
{
    if (r->result == EPIC_OK || num_epochs(r) > 1) return r->rank[q][i];
    return r->ids[q][i] < 0 ? -1 : r->owner[r->ids[q][i]];
}

static void add_list(traffic *t, uint64_t entries)
{
    const uint64_t words = 1 + 2 * entries;
    t->bytes += words * 8;
    t->entries += (words + ENTRY_MOST_WORDS - 1) / ENTRY_MOST_WORDS;
}

/* Adds the lists of rank q for a host in the round of the tokens [begin, end). */
static void add_lists(traffic *t, const routing *r, int q, int host, int64_t begin, int64_t end)
{
    const int64_t top_k = r->layer.top_k;
    uint64_t choices = 0, rows = 0;
    for (int64_t token = begin; token < end; token++)
        for (int to = host * local; to < (host + 1) * local; to++) {
            uint64_t here = 0;
            for (int64_t i = token * top_k; i < (token + 1) * top_k; i++)
                here += rank_of_choice(r, q, i) == to;
            choices += here;
            rows += here > 0;
        }
    add_list(t, choices);
    if (r->layer.layout == EPIC_FLAT) add_list(t, rows);
}

/* Returns what rank q must pass to the net: as a relay the announcements of each epoch and the
 * counts of the ranks of its host, and its own lists. */
static traffic expect_traffic(const routing *r, int q)
{
    traffic t = {0, 0};
    const int own = q / local;
    const uint64_t epochs = num_epochs(r);
    const uint64_t counts =
        r->layer.num_experts + (r->layer.layout == EPIC_FLAT ? (uint64_t)r->num_ranks : 0);
    for (int host = 0; host < hosts; host++) {
        if (host == own) continue;
        if ((own + host) % local == q % local) {
            t.bytes += (uint64_t)local * (epochs * ANNOUNCEMENT + counts * 8);
            t.entries += (uint64_t)local * (epochs + 1);
        }
        for (int64_t begin = 0; begin < r->tokens_of[q]; begin += (int64_t)round_tokens()) {
            const int64_t end = begin + (int64_t)round_tokens();
            add_lists(&t, r, q, host, begin, end < r->tokens_of[q] ? end : r->tokens_of[q]);
        }
    }
    return t;
}

static traffic read_traffic(team_rank *me)
{
    uint64_t all[3];
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    team_barrier(me);
    epic_backend_hosts_counts(me->group, all);
    const traffic t = {all[0], all[2]};
    team_barrier(me);
    return t;
}

/* Checks what the plan has passed to the net. In FLAT layers that drop choices, the exchange of
 * keep limits adds other words. */
static void check_traffic(bench *b, const scenario *s, traffic before, traffic after)
{
    const traffic want = expect_traffic(&b->c.r, b->me->rank);
    const traffic got = {after.bytes - before.bytes, after.entries - before.entries};
    if (s->layout == EPIC_FLAT && s->overflow == EPIC_OVERFLOW_DROP) return;
    if (got.bytes == want.bytes && got.entries == want.entries) return;
    report_wrong(b, "%llu bytes in %llu entries, not %llu in %llu",
                 (unsigned long long)got.bytes, (unsigned long long)got.entries,
                 (unsigned long long)want.bytes, (unsigned long long)want.entries);
}

/* --------------------------------------------------------------------------- the calls ---- */

static void check_failure(bench *b)
{
    epic_failure_info failure;
    CHECK_CUDA(cudaStreamSynchronize(b->me->stream));
    const epic_result result = p2p_ops.poll_failure(b->me->group, &failure);
    if (result == EPIC_OK || result == (epic_result)b->c.r.result) return;
    report_wrong(b, "%s", failure.sentence);
}

static void run_scenario(bench *b, const scenario *s, int number)
{
    arrays a;
    make_case(&b->c, s, number);
    b->used = 0;
    b->call = (epic_call){.stream = b->me->stream, .tag = b->c.seed};
    make_inputs(b, &a);
    const traffic before = read_traffic(b->me);
    if (!call_plan(b, &a)) team_stop();
    check_traffic(b, s, before, read_traffic(b->me));
    check_plan(b, &a);
    b->c.fused = number % 2 == 1;
    if (b->c.fused ? !call_plan_dispatch(b, &a) : !call_dispatch(b, &a)) team_stop();
    check_plan(b, &a);
    check_dispatch(b, &a, b->c.fused ? "plan_dispatch" : "dispatch");
    check_failure(b);
    if (b->wrong) {
        fprintf(stderr, "scenario: %s\n", s->name);
        team_stop();
    }
    free_routing(&b->c.r);
}

static int run_rank(team_rank *me)
{
    bench b = {.me = me, .arena_bytes = 64 << 20};
    CHECK_CUDA(cudaMalloc((void **)&b.arena, b.arena_bytes));
    const int64_t tokens = p2p_index_tokens(&me->group->self.at, TOKENS);
    if (tokens != (int64_t)round_tokens()) {
        fprintf(stderr, "a round has %lld tokens\n", (long long)tokens);
        team_stop();
    }
    for (int i = 0; i < NUM_SCENARIOS; i++) run_scenario(&b, &scenarios[i], i);
    team_barrier(me);
    CHECK_CUDA(cudaFree(b.arena));
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    hosts = atoi(argv[1]);
    local = atoi(argv[2]);
    rounds = argc > 3;
    const int peers = hosts * local - 1;
    const team t = {.num_ranks = hosts * local,
                    .num_gpus = 1,
                    .max_tokens = TOKENS,
                    .max_row_bytes = ROW,
                    .staging_bytes = rounds ? 2 * peers * ROUND * ROW : 0,
                    .timeout_ms = 60000,
                    .work = run_rank};
    setenv("EPIC_TEST_RANKS_PER_HOST", argv[2], 1);
    if (team_run(&t) != 0) return 1;
    printf("many_hosts_lists %d x %d: %d scenarios good\n", hosts, local, NUM_SCENARIOS);
    return 0;
}
