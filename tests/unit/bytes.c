/* SPDX-License-Identifier: Apache-2.0 */
/* Counts what is sent. Combine sends one row for each (token, other rank), whatever top-k is.
 * If memory is shared, dispatch writes each token that any peer needs only once. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "context/context.h"
#include "epic/epic.h"
#include "run.h"

#define EXPERTS 16
#define TOP_K 6
#define TOKENS 40
#define HIDDEN 512
#define ROW (HIDDEN * 2) /* bfloat16 */

typedef struct counted {
    epic_context *ctx;
    int rank, num_ranks;
    epic_layer layer;
    unsigned char *plan;
    int64_t plan_bytes;
    int64_t slots;
    int32_t topk_idx[RUN_MAX_RANKS][TOKENS][TOP_K]; /* expert ids of all ranks */
} counted;

static int owner(const counted *c, int32_t expert)
{
    return expert / (EXPERTS / c->num_ranks);
}

static bool goes_to(const counted *c, int from, int token, int to)
{
    for (int k = 0; k < TOP_K; k++) {
        const int32_t expert = c->topk_idx[from][token][k];
        if (expert >= 0 && owner(c, expert) == to) return true;
    }
    return false;
}

/* Returns how many pairs (token of another rank, this rank) there are. This is the number of
 * rows that this rank sends in combine. */
static int64_t rows_owed(const counted *c)
{
    int64_t rows = 0;
    for (int from = 0; from < c->num_ranks; from++)
        for (int t = 0; t < TOKENS && from != c->rank; t++)
            rows += goes_to(c, from, t, c->rank);
    return rows;
}

/* Returns how many tokens of this rank any other rank needs. */
static int64_t tokens_wanted(const counted *c)
{
    int64_t tokens = 0;
    for (int t = 0; t < TOKENS; t++) {
        bool wanted = false;
        for (int to = 0; to < c->num_ranks; to++)
            wanted |= to != c->rank && goes_to(c, c->rank, t, to);
        tokens += wanted;
    }
    return tokens;
}

static uint64_t sent_since(const counted *c, uint64_t before)
{
    return epic_context_bytes_sent(c->ctx) - before;
}

static void count_plan(counted *c)
{
    const epic_plan_args a = {.layer = &c->layer,
                              .plan = c->plan,
                              .plan_bytes = c->plan_bytes,
                              .topk_idx = c->topk_idx[c->rank],
                              .num_tokens = TOKENS,
                              .capacity = c->slots};
    const uint64_t before = epic_context_bytes_sent(c->ctx);
    CHECK(epic_plan(c->ctx, &a) == EPIC_OK);
    CHECK_EQ(sent_since(c, before), c->num_ranks > 1 ? TOKENS * TOP_K * 4 : 0);
}

static void count_dispatch(counted *c, bool weights)
{
    char *x = calloc(TOKENS, ROW), *recv = calloc((size_t)c->slots, ROW);
    float *w = calloc(TOKENS * TOP_K, 4), *slot_weights = calloc((size_t)c->slots, 4);
    epic_dispatch_args a = {.layer = &c->layer,
                            .plan = c->plan,
                            .plan_bytes = c->plan_bytes,
                            .tokens = {x, TOKENS, ROW},
                            .recv = {recv, c->slots, ROW}};
    if (weights) {
        a.weights = w;
        a.slot_weights = slot_weights;
    }
    const uint64_t before = epic_context_bytes_sent(c->ctx);
    CHECK(epic_dispatch(c->ctx, &a) == EPIC_OK);
    const int64_t each = ROW + (weights ? TOP_K * 4 : 0);
    CHECK_EQ(sent_since(c, before), tokens_wanted(c) * each);
    free(x), free(recv), free(w), free(slot_weights);
}

static void count_combine(counted *c)
{
    char *rows = calloc((size_t)c->slots, ROW), *out = calloc(TOKENS, ROW);
    const epic_combine_args a = {.layer = &c->layer,
                                 .plan = c->plan,
                                 .plan_bytes = c->plan_bytes,
                                 .rows = {rows, c->slots, ROW},
                                 .out = {out, TOKENS, ROW},
                                 .type = EPIC_BF16};
    const uint64_t before = epic_context_bytes_sent(c->ctx);
    CHECK(epic_combine(c->ctx, &a) == EPIC_OK);
    const int64_t each = c->layer.partial_type == EPIC_F32 ? 2 * ROW : ROW;
    CHECK_EQ(sent_since(c, before), rows_owed(c) * each);
    free(rows), free(out);
}

static void count_gradients(counted *c)
{
    char *rows = calloc((size_t)c->slots, ROW), *d_tokens = calloc(TOKENS, ROW);
    const epic_combine_backward_args spread = {.layer = &c->layer,
                                               .plan = c->plan,
                                               .plan_bytes = c->plan_bytes,
                                               .d_out = {d_tokens, TOKENS, ROW},
                                               .d_rows = {rows, c->slots, ROW},
                                               .type = EPIC_BF16};
    uint64_t before = epic_context_bytes_sent(c->ctx);
    CHECK(epic_combine_backward(c->ctx, &spread) == EPIC_OK);
    CHECK_EQ(sent_since(c, before), tokens_wanted(c) * ROW);
    const epic_dispatch_backward_args home = {.layer = &c->layer,
                                              .plan = c->plan,
                                              .plan_bytes = c->plan_bytes,
                                              .d_recv = {rows, c->slots, ROW},
                                              .d_tokens = {d_tokens, TOKENS, ROW},
                                              .type = EPIC_BF16};
    before = epic_context_bytes_sent(c->ctx);
    CHECK(epic_dispatch_backward(c->ctx, &home) == EPIC_OK);
    const int64_t each = c->layer.partial_type == EPIC_F32 ? 2 * ROW : ROW;
    CHECK_EQ(sent_since(c, before), rows_owed(c) * each);
    free(rows), free(d_tokens);
}

/* Tests that a short array is sent inside the op headers. */
static void count_sums(counted *c)
{
    float data[65] = {0};
    for (int64_t n = 64; n <= 65; n++) {
        const epic_allreduce_sum_args a = {.data = data, .count = n};
        const uint64_t before = epic_context_bytes_sent(c->ctx);
        CHECK(epic_allreduce_sum(c->ctx, &a) == EPIC_OK);
        CHECK((sent_since(c, before) > 0) == (n == 65 && c->num_ranks > 1));
    }
}

static void choose_experts(counted *c, uint64_t seed)
{
    run_random random = {seed}; /* all ranks use the same seed */
    for (int r = 0; r < c->num_ranks; r++)
        for (int t = 0; t < TOKENS; t++)
            for (int k = 0; k < TOP_K; k++)
                c->topk_idx[r][t][k] =
                    run_chance(&random, 50) ? -1 : (int32_t)run_below(&random, EXPERTS);
}

static void count_all(const epic_bootstrap *bootstrap, void *self)
{
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = 2 * ROW,
                                .num_ranks = (uint32_t)bootstrap->num_ranks,
                                .timeout_ms = 20000};
    counted *c = calloc(1, sizeof *c);
    if (CHECK(epic_open(&c->ctx, bootstrap, &config) == EPIC_OK)) {
        c->rank = bootstrap->rank;
        c->num_ranks = bootstrap->num_ranks;
        c->layer = (epic_layer){.num_experts = EXPERTS, .top_k = TOP_K};
        c->layer.partial_type = *(const uint32_t *)self;
        CHECK(epic_capacity_bound(&config, &c->layer, &c->slots) == EPIC_OK);
        CHECK(epic_plan_bytes(&config, &c->layer, &c->plan_bytes) == EPIC_OK);
        c->plan = aligned_alloc(64, (c->plan_bytes + 63) / 64 * 64);
        choose_experts(c, run_seed());
        count_plan(c);
        count_dispatch(c, false);
        count_dispatch(c, true);
        count_combine(c);
        count_gradients(c);
        count_sums(c);
        free(c->plan);
    }
    epic_close(c->ctx);
    free(c);
}

int main(void)
{
    check_begin();
    run_alarm(100);
    uint32_t partial_types[] = {0, EPIC_F32};
    for (int i = 0; i < 2; i++)
        for (int ranks = 1; ranks <= 8; ranks *= 2)
            run_threads(ranks, count_all, &partial_types[i]);
    return check_end();
}
