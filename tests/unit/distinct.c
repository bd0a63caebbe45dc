/* SPDX-License-Identifier: Apache-2.0 */
/* Tests EPIC_DISTINCT. A duplicate id is the same error on every rank, and the group stays
 * usable. Distinct ids fit into the smaller capacity, also in the worst case. Ranks that set
 * the flag differently get an error. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

enum { TOKENS = 5, TOP_K = 4, EXPERTS = 6, RANKS = 3, LOCAL = EXPERTS / RANKS };

typedef struct plans {
    epic_layer layer;
    void *plan;
    int64_t plan_bytes;
    int64_t capacity;
    int32_t demand;
} plans;

static epic_result plan(epic_context *ctx, plans *p, int32_t ids[TOKENS][TOP_K])
{
    const epic_plan_args args = {.layer = &p->layer,
                                 .plan = p->plan,
                                 .plan_bytes = p->plan_bytes,
                                 .topk_idx = ids,
                                 .num_tokens = TOKENS,
                                 .capacity = p->capacity,
                                 .demand = &p->demand};
    return epic_plan(ctx, &args);
}

/* Sends every token to both experts of rank 1, and to two others. */
static void fill(int32_t ids[TOKENS][TOP_K])
{
    for (int t = 0; t < TOKENS; t++) {
        const int32_t row[TOP_K] = {2, 3, t % 2, 4 + t % 2};
        memcpy(ids[t], row, sizeof row);
    }
}

static void check_duplicate(epic_context *ctx, plans *p, int rank)
{
    int32_t ids[TOKENS][TOP_K];
    fill(ids);
    if (rank == 2) ids[3][2] = 3;
    CHECK(plan(ctx, p, ids) == EPIC_EINVAL);
    const char *said = epic_error(ctx);
    CHECK_SAY(strstr(said, "rank 2, token 3, k 2 has expert 3 a second time"), "%s", said);
    if (rank == 2) ids[3][1] = ids[3][2] = -1; /* two choices of no expert are no duplicates */
    CHECK_SAY(plan(ctx, p, ids) == EPIC_OK, "%s", epic_error(ctx));
}

static void work(const epic_bootstrap *bootstrap, void *self)
{
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = 4};
    epic_context *ctx;
    epic_layer_info wide, info;
    int32_t ids[TOKENS][TOP_K];
    plans p = {.layer = {.num_experts = EXPERTS, .top_k = TOP_K}};
    (void)self;
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    CHECK(epic_layer_sizes(ctx, &p.layer, &wide) == EPIC_OK);
    p.layer.flags = EPIC_DISTINCT;
    CHECK(epic_layer_sizes(ctx, &p.layer, &info) == EPIC_OK);
    CHECK_EQ(wide.capacity, RANKS * TOKENS * TOP_K);
    CHECK_EQ(info.capacity, RANKS * TOKENS * LOCAL);
    CHECK_EQ(info.capacity_any_placement, RANKS * TOKENS * TOP_K);
    CHECK_EQ(info.num_local_experts, LOCAL);
    CHECK_EQ(info.first_expert, LOCAL * epic_rank(ctx));
    p.plan_bytes = info.plan_bytes;
    p.plan = aligned_alloc(64, ((size_t)p.plan_bytes + 63) / 64 * 64);
    p.capacity = info.capacity;
    fill(ids);
    CHECK(plan(ctx, &p, ids) == EPIC_OK);
    CHECK_EQ(p.demand, epic_rank(ctx) == 1 ? info.capacity : RANKS * TOKENS);
    check_duplicate(ctx, &p, epic_rank(ctx));
    /* A fast rank breaks the group while others are still in the previous call, so this call is
     * not a plan. */
    float one = 1;
    const epic_allreduce_sum_args sum = {.data = &one, .count = 1};
    (void)epic_allreduce_sum(ctx, &sum);
    if (epic_rank(ctx) == 1) p.layer.flags = 0;
    CHECK(plan(ctx, &p, ids) == EPIC_EMISMATCH);
    CHECK_SAY(strstr(epic_error(ctx), "layer.flags"), "%s", epic_error(ctx));
    free(p.plan);
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(50);
    run_threads(RANKS, work, NULL);
    run_processes(RANKS, work, NULL, 40);
    return check_end();
}
