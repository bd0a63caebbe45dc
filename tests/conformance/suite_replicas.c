/* SPDX-License-Identifier: Apache-2.0 */
/* The phase that adds the gradients of replicas. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "suite_case.h"

/* The values of one expert, or the sum of several experts, [count]. */
typedef struct numbers {
    const world *w;
    int64_t count;
    int32_t logical;
} numbers;

static void read_expert(const numbers *n, int64_t expert, float *out)
{
    world_row(n->w, STREAM_SUM, expert, EPIC_F32, n->count, out);
}

static void add(const numbers *n, float *out, const float *more)
{
    for (int64_t i = 0; i < n->count; i++) out[i] += more[i];
}

static float *zeros(const numbers *n)
{
    return calloc((size_t)n->count + 1, sizeof(float));
}

/* Computes out = 0 + the replicas among experts [first, end) of a rank, in ascending order. */
static void add_experts(const numbers *n, int rank, int64_t first, int64_t end, float *out)
{
    float *more = zeros(n);
    for (int64_t e = first; e < end; e++) {
        if (n->w->rank_of[e] != rank || n->w->logical_of[e] != n->logical) continue;
        read_expert(n, e, more);
        add(n, out, more);
    }
    free(more);
}

/* Computes out = 0 + `count` leaves of `each` experts from `first`, in a binary tree. */
static void add_tree(const numbers *n, int rank, int64_t first, int64_t count, int64_t each,
                     float *out)
{
    if (count == 1) {
        add_experts(n, rank, first, first + each, out);
        return;
    }
    float *more = zeros(n);
    add_tree(n, rank, first, count / 2, each, out);
    add_tree(n, rank, first + count / 2 * each, count / 2, each, more);
    add(n, out, more);
    free(more);
}

/* Computes the sum of a rank's replicas. */
static void add_rank(const numbers *n, int rank, float *out)
{
    const world *w = n->w;
    const int64_t experts = w->layer.num_experts, leaves = w->plan->leaves;
    if (w->layer.sum_order != EPIC_TREE) {
        add_experts(n, rank, 0, experts, out);
        return;
    }
    int64_t first = 0;
    while (w->rank_of[first] != rank) first++;
    add_tree(n, rank, first, leaves / w->num_ranks, experts / leaves, out);
}

/* Adds all ranks: in a tree of ranks, or one after the other. */
static void add_ranks(const numbers *n, int first, int count, float *out)
{
    const bool tree = n->w->layer.sum_order == EPIC_TREE;
    const int low = tree ? count / 2 : count - 1;
    if (count == 1) {
        add_rank(n, first, out);
        return;
    }
    float *more = zeros(n);
    add_ranks(n, first, low, out);
    add_ranks(n, first + low, count - low, more);
    add(n, out, more);
    free(more);
}

static void expect_expert(const seat *s, int64_t expert, int64_t count, float *out)
{
    numbers n = {.w = s->w, .count = count};
    int replicas = 0;
    if (s->w->logical_of) n.logical = s->w->logical_of[expert];
    for (uint32_t e = 0; s->w->logical_of && e < s->w->layer.num_experts; e++)
        replicas += s->w->rank_of[e] >= 0 && s->w->logical_of[e] == n.logical;
    memset(out, 0, (size_t)count * sizeof *out);
    if (replicas > 1 && n.logical >= 0 && s->w->plan->result == EPIC_OK)
        add_ranks(&n, 0, s->w->num_ranks, out);
    else
        read_expert(&n, expert, out);
}

void case_sum_replicas(seat *s, run_random *common)
{
    /* most counts fit into the op header, so the sum needs one round trip */
    static const int64_t counts[] = {0, 1, 5, 63, 63, 300, 3000};
    const oracle_plan *p = s->w->plan;
    const int64_t experts = s->w->layer.num_experts;
    const int64_t count = counts[run_below(common, experts > 64 ? 3 : 7)];
    /* many exchanges, or no replicas */
    if (run_chance(common, s->w->logical_of ? 60 : 85)) return;
    const int64_t bytes = count * (int64_t)sizeof(float);
    epic_rows data = case_rows(s, p->num_local + 1, bytes > 0 ? bytes : 4);
    epic_rows workspace = case_rows(s, 1, bytes > 0 ? bytes : 4);
    const numbers n = {.w = s->w, .count = count};
    float *right = zeros(&n);
    for (int64_t e = 0; e < experts && count; e++)
        if (s->w->rank_of[e] == s->rank)
            read_expert(&n, e, (float *)data.data + p->local_of[e] * count);
    const epic_sum_replicas_args a = {.call = case_call(s),
                                      .plan = case_lend(s, s->plan),
                                      .plan_bytes = s->plan_bytes,
                                      .data = {case_lend(s, data.data), p->num_local, bytes},
                                      .workspace = case_lend(s, workspace.data)};
    case_nap(s);
    case_refused(s, case_return(s, epic_sum_replicas(s->ctx, &a), 0), EPIC_OK);
    int64_t wrong = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (s->w->rank_of[e] != s->rank) continue;
        expect_expert(s, e, count, right);
        wrong +=
            !oracle_same(right, (float *)data.data + p->local_of[e] * count, EPIC_F32, count);
    }
    CHECK_EQ(wrong, 0);
    if (count) CHECK(case_poisoned((float *)data.data + p->num_local * count, bytes));
    free(right);
    case_drop(s);
}
