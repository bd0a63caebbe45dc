/* SPDX-License-Identifier: Apache-2.0 */
/* Replays a trace: runs plan, dispatch and combine with the choices of the trace, on any number
 * of ranks, which are threads. Assigns the tokens to the ranks in their order, the same number
 * to each rank. The experts return the rows that they receive, so the correct result is known:
 * the row of the token times the sum of its weights. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "trace_draw.h"

#define WEIGHT 0.0625f /* weight of each choice; sums of up to 64 such weights are exact */

enum { PLAN, DISPATCH, COMBINE, NUM_TIMED };

/* State that all ranks share. */
typedef struct replay_state {
    const trace *t;
    const replay *how;
    uint32_t num_experts, num_logical;
    int64_t *slots; /* [num_steps, ranks] number of slots in use */
    /* [ranks, ranks] number of rows that are sent from a token's rank to an expert's rank in
     * all steps */
    int64_t *rows;
    double *seconds;            /* [num_steps, NUM_TIMED] times of rank 0 */
    epic_bootstrap *bootstraps; /* [ranks] */
} replay_state;

/* State of one rank's thread. */
typedef struct rank_state {
    replay_state *s;
    int32_t rank;
    epic_context *ctx;
    void *plan;
    int64_t plan_bytes;
} rank_state;

static void check_result(const epic_context *ctx, epic_result result, const char *what)
{
    if (result != EPIC_OK) tool_fail("%s: %s", what, epic_error(ctx));
}

static double now_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int64_t begin_of(const replay_state *s, const trace_step *step, int32_t rank)
{
    return step->num_tokens * rank / s->how->ranks;
}

static float value_of(int64_t token, int64_t h)
{
    return (float)((token * 7 + h) % 29);
}

/* Returns the expert ids of a rank's tokens. With the option `balanced`, replaces the expert of
 * choice i of the step by expert i modulo the number of experts. */
static int32_t *ids_of(const replay_state *s, const trace_step *step, int64_t first,
                       int64_t num)
{
    const int64_t k = step->top_k;
    int32_t *ids = tool_alloc((size_t)(num * k) * sizeof *ids);
    memcpy(ids, step->ids + first * k, (size_t)(num * k) * sizeof *ids);
    for (int64_t i = 0; s->how->balanced && i < num * k; i++)
        if (ids[i] >= 0) ids[i] = (int32_t)((first * k + i) % step->num_experts);
    return ids;
}

/* Counts the rows that are sent: one for each pair of a token and a rank to which the token is
 * sent. */
static void count_rows(rank_state *self, int64_t num, int64_t top_k)
{
    replay_state *s = self->s;
    epic_plan_info info;
    check_result(self->ctx, epic_plan_read(self->plan, self->plan_bytes, &info), "plan_read");
    const int32_t *rank_of = (const int32_t *)((const char *)self->plan + info.rank_offset);
    for (int64_t t = 0; t < num; t++)
        for (int64_t k = 0; k < top_k; k++) {
            const int32_t rank = rank_of[t * top_k + k];
            bool seen = rank < 0;
            for (int64_t j = 0; j < k; j++) seen |= rank_of[t * top_k + j] == rank;
            if (!seen) s->rows[(int64_t)self->rank * s->how->ranks + rank]++;
        }
}

/* Checks every row that combine returned. */
static void check_home(const rank_state *self, const trace_step *step, const int32_t *ids,
                       const float *out, int64_t first, int64_t num)
{
    const int64_t hidden = self->s->how->hidden, k = step->top_k;
    for (int64_t t = 0; t < num; t++) {
        int live = 0;
        for (int64_t c = 0; c < k; c++) live += ids[t * k + c] >= 0;
        for (int64_t h = 0; h < hidden; h++)
            if (out[t * hidden + h] != WEIGHT * (float)live * value_of(first + t, h))
                tool_fail("tag %" PRIu64 " sequence %" PRIu64 ": token %" PRId64
                          " returned as %g, not %g",
                          step->tag, step->sequence, first + t, out[t * hidden + h],
                          WEIGHT * (float)live * value_of(first + t, h));
    }
}

static int64_t make_plan(rank_state *self, const trace_step *step, const epic_layer *layer,
                         const int32_t *ids, int64_t num)
{
    const epic_placement *place = self->s->how->place;
    int32_t demand;
    const epic_plan_args args = {.layer = layer,
                                 .plan = self->plan,
                                 .plan_bytes = self->plan_bytes,
                                 .topk_idx = ids,
                                 .num_tokens = num,
                                 .rank_of_expert = place ? place->rank_of_expert : NULL,
                                 .logical_of_expert = place ? place->logical_of_expert : NULL,
                                 .capacity = EPIC_CAPACITY_EXACT,
                                 .demand = &demand};
    check_result(self->ctx, epic_plan(self->ctx, &args), "plan");
    count_rows(self, num, step->top_k);
    return demand;
}

/* Runs plan, dispatch and combine of one step, and times them on rank 0. */
static void run_step(rank_state *self, int64_t index)
{
    replay_state *s = self->s;
    const trace_step *step = &s->t->steps[index];
    const int64_t first = begin_of(s, step, self->rank), hidden = s->how->hidden;
    const int64_t num = begin_of(s, step, self->rank + 1) - first;
    const epic_layer layer = {
        .num_experts = s->num_experts, .num_logical = s->num_logical, .top_k = step->top_k};
    int32_t *ids = ids_of(s, step, first, num);
    const double planning = now_seconds();
    const int64_t slots = make_plan(self, step, &layer, ids, num);
    const double planned = now_seconds();
    s->slots[index * s->how->ranks + self->rank] = slots;

    const int64_t choices = num * step->top_k, row = hidden * (int64_t)sizeof(float);
    float *x = tool_alloc((size_t)(num * row)), *recv = tool_alloc((size_t)(slots * row));
    float *weights = tool_alloc((size_t)choices * sizeof(float));
    float *slot_weights = tool_alloc((size_t)slots * sizeof(float));
    for (int64_t i = 0; i < choices; i++) weights[i] = WEIGHT;
    for (int64_t i = 0; i < num * hidden; i++) x[i] = value_of(first + i / hidden, i % hidden);
    const epic_dispatch_args dispatch = {.layer = &layer,
                                         .plan = self->plan,
                                         .plan_bytes = self->plan_bytes,
                                         .tokens = {x, num, row},
                                         .recv = {recv, slots, row},
                                         .weights = weights,
                                         .slot_weights = slot_weights};
    const epic_combine_args combine = {.layer = &layer,
                                       .plan = self->plan,
                                       .plan_bytes = self->plan_bytes,
                                       .rows = {recv, slots, row},
                                       .out = {x, num, row},
                                       .slot_weights = slot_weights,
                                       .type = EPIC_F32};
    const double sending = now_seconds();
    check_result(self->ctx, epic_dispatch(self->ctx, &dispatch), "dispatch");
    const double sent = now_seconds();
    check_result(self->ctx, epic_combine(self->ctx, &combine), "combine");
    const double home = now_seconds();
    check_home(self, step, ids, x, first, num);
    if (self->rank == 0) {
        double *seconds = s->seconds + index * NUM_TIMED;
        seconds[PLAN] = planned - planning;
        seconds[DISPATCH] = sent - sending;
        seconds[COMBINE] = home - sent;
    }
    void *all[] = {ids, x, recv, weights, slot_weights};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* The main function of a rank's thread: opens a context and runs all steps. */
static void *run_rank(void *argument)
{
    rank_state *self = argument;
    replay_state *s = self->s;
    int64_t tokens = 1;
    uint32_t top_k = 1;
    for (int64_t i = 0; i < s->t->num_steps; i++) {
        const int64_t most = s->t->steps[i].num_tokens / s->how->ranks + 1;
        if (most > tokens) tokens = most;
        if (s->t->steps[i].top_k > top_k) top_k = s->t->steps[i].top_k;
    }
    const epic_config config = {.max_tokens = tokens,
                                .max_row_bytes = s->how->hidden * (int64_t)sizeof(float),
                                .num_ranks = (uint32_t)s->how->ranks};
    const epic_layer layer = {
        .num_experts = s->num_experts, .num_logical = s->num_logical, .top_k = top_k};
    check_result(NULL, epic_open(&self->ctx, &s->bootstraps[self->rank], &config), "open");
    check_result(self->ctx, epic_plan_bytes(&config, &layer, &self->plan_bytes), "plan");
    self->plan = aligned_alloc(64, (size_t)(self->plan_bytes + 63) / 64 * 64);
    if (!self->plan) tool_fail("no memory for a plan of %" PRId64 " bytes", self->plan_bytes);
    for (int64_t i = 0; i < s->t->num_steps; i++) run_step(self, i);
    free(self->plan);
    epic_close(self->ctx);
    return NULL;
}

static void run_ranks(replay_state *s)
{
    const int32_t n = s->how->ranks;
    pthread_t *threads = tool_alloc((size_t)n * sizeof *threads);
    rank_state *seats = tool_alloc((size_t)n * sizeof *seats);
    s->bootstraps = tool_alloc((size_t)n * sizeof *s->bootstraps);
    check_result(NULL, epic_bootstrap_threads(s->bootstraps, n, 0), "bootstrap");
    for (int32_t r = 0; r < n; r++) {
        seats[r] = (rank_state){.s = s, .rank = r};
        if (pthread_create(&threads[r], NULL, run_rank, &seats[r]))
            tool_fail("rank %d of %d: cannot start a thread", r, n);
    }
    for (int32_t r = 0; r < n; r++) pthread_join(threads[r], NULL);
    for (int32_t r = 0; r < n; r++) epic_bootstrap_close(&s->bootstraps[r]);
    free(s->bootstraps), free(seats), free(threads);
}

/* ---------------------------------------------------------------------------- report ---- */

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_us(const replay_state *s, int what)
{
    const int64_t num = s->t->num_steps;
    double *all = tool_alloc((size_t)num * sizeof *all);
    for (int64_t i = 0; i < num; i++) all[i] = s->seconds[i * NUM_TIMED + what];
    qsort(all, (size_t)num, sizeof *all, compare_doubles);
    const double median = all[num / 2] * 1e6;
    free(all);
    return median;
}

typedef struct summary {
    /* number of slots of all ranks and steps; number of slots of the busiest rank of each step,
     * summed over the steps */
    int64_t total, busiest;
    double worst; /* the largest imbalance of a step */
} summary;

static summary make_summary(const replay_state *s)
{
    summary out = {0};
    for (int64_t i = 0; i < s->t->num_steps; i++) {
        int64_t most = 0, all = 0;
        for (int32_t r = 0; r < s->how->ranks; r++) {
            const int64_t slots = s->slots[i * s->how->ranks + r];
            all += slots;
            if (slots > most) most = slots;
        }
        const double imbalance = all ? (double)(most * s->how->ranks) / (double)all : 1;
        out.total += all;
        out.busiest += most;
        if (imbalance > out.worst) out.worst = imbalance;
    }
    return out;
}

static double imbalance_of(const replay_state *s, const summary *sum)
{
    return sum->total ? (double)(sum->busiest * s->how->ranks) / (double)sum->total : 1;
}

static void print_text(const replay_state *s, const summary *sum)
{
    const int32_t n = s->how->ranks;
    const int64_t row = s->how->hidden * (int64_t)sizeof(float);
    printf("%" PRId64 " steps on %d ranks, %u experts: all rows returned correctly\n",
           s->t->num_steps, n, s->num_experts);
    printf("slots           %" PRId64 "; busiest rank of each step, summed: %" PRId64 "\n",
           sum->total, sum->busiest);
    printf("imbalance       %.4f over all steps, %.4f in the worst step (1: even)\n",
           imbalance_of(s, sum), sum->worst);
    printf("us per step     plan %.1f, dispatch %.1f, combine %.1f (rank 0, median)\n",
           median_us(s, PLAN), median_us(s, DISPATCH), median_us(s, COMBINE));
    printf("bytes of rows from token's rank (line) to expert's rank (column); combine returns "
           "as many:\n");
    for (int32_t from = 0; from < n; from++) {
        printf("rank %3d", from);
        for (int32_t to = 0; to < n; to++)
            printf(" %12" PRId64, from == to ? 0 : s->rows[(int64_t)from * n + to] * row);
        printf("\n");
    }
}

static void print_json(const replay_state *s, const summary *sum)
{
    const int32_t n = s->how->ranks;
    const int64_t row = s->how->hidden * (int64_t)sizeof(float);
    printf("{\"steps\": %" PRId64 ", \"ranks\": %d, \"experts\": %u, \"slots\": %" PRId64
           ", \"busiest\": %" PRId64 ", \"imbalance\": %.6f, \"worst_imbalance\": %.6f, "
           "\"plan_us\": %.2f, \"dispatch_us\": %.2f, \"combine_us\": %.2f, \"link_bytes\": [",
           s->t->num_steps, n, s->num_experts, sum->total, sum->busiest, imbalance_of(s, sum),
           sum->worst, median_us(s, PLAN), median_us(s, DISPATCH), median_us(s, COMBINE));
    for (int32_t from = 0; from < n; from++) {
        printf(from ? ", [" : "[");
        for (int32_t to = 0; to < n; to++)
            printf("%s%" PRId64, to ? ", " : "",
                   from == to ? 0 : s->rows[(int64_t)from * n + to] * row);
        printf("]");
    }
    printf("]}\n");
}

void trace_replay(const trace *t, const replay *how)
{
    const uint32_t ranks = (uint32_t)how->ranks;
    replay_state s = {.t = t, .how = how};
    if (!t->num_steps) tool_fail("the trace has no step to replay");
    if (how->place && how->place->num_ranks != ranks)
        tool_fail("the placement is for %u ranks, not %u", how->place->num_ranks, ranks);
    s.num_experts =
        how->place ? how->place->num_experts : (t->num_experts + ranks - 1) / ranks * ranks;
    s.num_logical = how->place ? how->place->num_logical : 0;
    if ((s.num_logical ? s.num_logical : s.num_experts) < t->num_experts)
        tool_fail("the placement has fewer experts than the %u of the trace", t->num_experts);
    s.slots = tool_alloc((size_t)t->num_steps * ranks * sizeof *s.slots);
    s.rows = tool_alloc((size_t)ranks * ranks * sizeof *s.rows);
    s.seconds = tool_alloc((size_t)t->num_steps * NUM_TIMED * sizeof *s.seconds);
    run_ranks(&s);
    const summary sum = make_summary(&s);
    (how->json ? print_json : print_text)(&s, &sum);
    free(s.slots), free(s.rows), free(s.seconds);
}
