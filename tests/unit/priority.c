/* SPDX-License-Identifier: Apache-2.0 */
/* Tests EPIC_BY_K. A full expert keeps the first choices of all ranks before any second choice,
 * on whatever ranks the tokens are. Slots keep the order of the tokens. Ranks with different
 * priorities get an error. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

enum { TOKENS = 12, TOP_K = 2, EXPERTS = 4, LIMIT = 5 };

/* Expert 0 is the first choice of tokens 2, 3, 8 and 11, and the second choice of 0, 1, 4, 5
 * and 9. */
static const int32_t ids[TOKENS][TOP_K] = {{1, 0}, {2, 0}, {0, 3}, {0, 1}, {3, 0}, {1, 0},
                                           {2, 3}, {3, 2}, {0, 2}, {1, 0}, {2, 1}, {0, 1}};

typedef struct seat {
    epic_context *ctx;
    epic_layer layer;
    void *plan;
    int64_t plan_bytes;
    int first, num_tokens;
} seat;

static seat open_seat(const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = 4};
    seat s = {.layer = {.num_experts = EXPERTS,
                        .top_k = TOP_K,
                        .overflow = EPIC_OVERFLOW_DROP,
                        .expert_capacity = LIMIT,
                        .priority = EPIC_BY_K}};
    epic_layer_info info;
    CHECK_SAY(epic_open(&s.ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(epic_layer_sizes(s.ctx, &s.layer, &info) == EPIC_OK);
    s.plan_bytes = info.plan_bytes;
    s.plan = aligned_alloc(64, ((size_t)s.plan_bytes + 63) / 64 * 64);
    s.num_tokens = TOKENS / epic_num_ranks(s.ctx);
    s.first = epic_rank(s.ctx) * s.num_tokens;
    return s;
}

static void close_seat(seat *s)
{
    free(s->plan);
    epic_close(s->ctx);
}

static epic_result plan(seat *s, int64_t capacity)
{
    const epic_plan_args args = {.layer = &s->layer,
                                 .plan = s->plan,
                                 .plan_bytes = s->plan_bytes,
                                 .topk_idx = ids[s->first],
                                 .num_tokens = s->num_tokens,
                                 .capacity = capacity};
    return epic_plan(s->ctx, &args);
}

/* Checks that the fates of expert 0's choices are `want` [TOKENS], where EPIC_FATE_NONE means
 * that the token has not chosen it. */
static void check_fates(const seat *s, const int32_t *want)
{
    epic_plan_info info;
    CHECK(epic_plan_read(s->plan, s->plan_bytes, &info) == EPIC_OK);
    const int32_t *fate =
        (const int32_t *)(const void *)((const char *)s->plan + info.fate_offset);
    for (int t = 0; t < s->num_tokens; t++)
        for (int k = 0; k < TOP_K; k++)
            if (ids[s->first + t][k] == 0)
                CHECK_SAY(fate[t * TOP_K + k] == want[s->first + t],
                          "token %d, k %d: fate %d, not %d", s->first + t, k,
                          fate[t * TOP_K + k], want[s->first + t]);
}

#define FULL EPIC_FATE_EXPERT_FULL
#define OVER EPIC_FATE_RANK_FULL
#define NONE EPIC_FATE_NONE

/* The slab of expert 0 begins at slot 0 of rank 0. */
static void expert_is_full(const epic_bootstrap *bootstrap, void *self)
{
    static const int32_t by_k[TOKENS] = {0,    FULL, 1, 2,    FULL, FULL,
                                         NONE, NONE, 3, FULL, NONE, 4};
    static const int32_t by_token[TOKENS] = {0,    1,    2,    3,    4,    FULL,
                                             NONE, NONE, FULL, FULL, NONE, FULL};
    seat s = open_seat(bootstrap);
    (void)self;
    CHECK_SAY(plan(&s, EPIC_CAPACITY_EXACT) == EPIC_OK, "%s", epic_error(s.ctx));
    check_fates(&s, by_k);
    s.layer.priority = EPIC_BY_TOKEN;
    CHECK_SAY(plan(&s, EPIC_CAPACITY_EXACT) == EPIC_OK, "%s", epic_error(s.ctx));
    check_fates(&s, by_token);
    close_seat(&s);
}

/* With two ranks, experts 0 and 1 share four slots and get two each. */
static void rank_is_full(const epic_bootstrap *bootstrap, void *self)
{
    static const int32_t want[TOKENS] = {OVER, FULL, 0,    1,    FULL, FULL,
                                         NONE, NONE, OVER, FULL, NONE, OVER};
    seat s = open_seat(bootstrap);
    (void)self;
    CHECK_SAY(plan(&s, 4) == EPIC_OK, "%s", epic_error(s.ctx));
    check_fates(&s, want);
    close_seat(&s);
}

static void ranks_differ(const epic_bootstrap *bootstrap, void *self)
{
    seat s = open_seat(bootstrap);
    (void)self;
    if (bootstrap->rank == 1) s.layer.priority = EPIC_BY_TOKEN;
    CHECK(plan(&s, EPIC_CAPACITY_EXACT) == EPIC_EMISMATCH);
    const char *said = epic_error(s.ctx);
    CHECK_SAY(strstr(said, "priority EPIC_BY_K") && strstr(said, "EPIC_BY_TOKEN"), "%s", said);
    close_seat(&s);
}

int main(void)
{
    check_begin();
    run_alarm(50);
    for (int ranks = 1; ranks <= 4; ranks *= 2) run_threads(ranks, expert_is_full, NULL);
    run_threads(2, rank_is_full, NULL);
    run_threads(2, ranks_differ, NULL);
    return check_end();
}
