/* SPDX-License-Identifier: Apache-2.0 */
/* Tests groups that make their next generation, on the backend threads: after ranks have closed
 * their contexts, after a planned leave, and without any change. */
#include "regroup/regroup.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "run.h"

#define COUNT 3000 /* more floats than fit into an op header */

static epic_context *open_context(const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = 8,
                                .max_row_bytes = 64,
                                .max_in_flight = 2,
                                .timeout_ms = 20000,
                                .backend = "threads"};
    epic_context *ctx;
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(NULL));
    return ctx;
}

static seat_set set_of(uint64_t seats)
{
    return (seat_set){{seats}};
}

/* Adds 2^rank over the members, so that the sum shows the members. */
static void check_sum(epic_context *ctx, uint64_t members)
{
    float data[COUNT];
    for (int i = 0; i < COUNT; i++) data[i] = (float)(1 << epic_rank(ctx));
    for (int count = 1; count <= COUNT; count += COUNT - 1) {
        const epic_allreduce_sum_args args = {.call.tag = 7, .data = data, .count = count};
        if (count > 1) data[0] = (float)(1 << epic_rank(ctx));
        CHECK_SAY(epic_allreduce_sum(ctx, &args) == EPIC_OK, "%s", epic_error(ctx));
        CHECK_EQ((long long)data[count - 1], (long long)members);
    }
}

/* Makes the next generation and checks its members. */
static void check_regroup(epic_context *ctx, uint64_t members, uint64_t generation)
{
    regroup_info info;
    const regroup_args args = {.step = 100 + epic_rank(ctx)};
    const seat_set want = set_of(members);
    CHECK_SAY(regroup_run(ctx, &args, &info) == EPIC_OK, "rank %d: %s", epic_rank(ctx),
              epic_error(ctx));
    CHECK_SAY(seat_set_equal(&info.members, &want), "members %llx, not %llx",
              (unsigned long long)info.members.words[0], (unsigned long long)members);
    CHECK_EQ(info.generation, generation);
    CHECK_EQ(info.least_step, 100 + __builtin_ctzll(members));
    CHECK_EQ(info.greatest_step, 100 + 63 - __builtin_clzll(members));
}

/* Waits until a sum fails, because a rank has closed its context. */
static void check_broken(epic_context *ctx)
{
    float number = 1;
    const epic_allreduce_sum_args args = {.call.tag = 9, .data = &number, .count = 1};
    epic_result result = EPIC_OK;
    while (result == EPIC_OK) result = epic_allreduce_sum(ctx, &args);
    CHECK_SAY(result == EPIC_EPEER, "%s: %s", epic_result_name(result), epic_error(ctx));
}

/* Waits until all ranks have called it. */
static void meet(const epic_bootstrap *bootstrap)
{
    char mine = 0, all[8];
    CHECK_EQ(bootstrap->gather(bootstrap->self, &mine, all, 1), EPIC_OK);
}

/* Ranks 2, 0 and 4 of five close their contexts one after the other. A rank closes only after
 * all calls have returned, because the first rank that notices it breaks the group for all. */
static void deaths(const epic_bootstrap *bootstrap, void *self)
{
    static const int order[] = {2, 0, 4};
    epic_context *ctx = open_context(bootstrap);
    uint64_t members = 31;
    (void)self;
    check_sum(ctx, members);
    for (int i = 0; i < 3; i++) {
        members &= ~(UINT64_C(1) << order[i]);
        meet(bootstrap);
        if (order[i] == bootstrap->rank) {
            epic_close(ctx);
            ctx = NULL;
        }
        if (!ctx) continue;
        check_broken(ctx);
        check_regroup(ctx, members, (uint64_t)i + 1);
        check_sum(ctx, members);
        check_sum(ctx, members);
    }
    epic_close(ctx);
}

/* Rank 1 of four leaves. No call of the others fails, also if the rank closes late. */
static void leave(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    regroup_info info;
    const regroup_args leaving = {.is_leaving = true};
    check_sum(ctx, 15);
    if (bootstrap->rank == 1) {
        float number = 1;
        const epic_allreduce_sum_args args = {.data = &number, .count = 1};
        CHECK_SAY(regroup_run(ctx, &leaving, &info) == EPIC_OK, "%s", epic_error(ctx));
        CHECK_EQ(epic_allreduce_sum(ctx, &args), EPIC_EINVAL);
        if (self) run_nap_us(20000);
    } else {
        check_regroup(ctx, 13, 1);
        for (int i = 0; i < 50; i++) check_sum(ctx, 13);
        check_regroup(ctx, 13, 2);
    }
    epic_close(ctx);
}

/* One of three members does not come, so the others have a quorum and go on without it. */
static void evicted(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    regroup_info info;
    const regroup_args args = {.patience_ms = 300};
    const seat_set want = set_of(3);
    (void)self;
    if (bootstrap->rank == 2) {
        run_nap_us(1200000);
        CHECK_EQ(regroup_run(ctx, &args, &info), EPIC_EPEER);
        CHECK_SAY(strstr(epic_error(ctx), "have gone on without"), "%s", epic_error(ctx));
    } else {
        CHECK_SAY(regroup_run(ctx, &args, &info) == EPIC_OK, "%s", epic_error(ctx));
        CHECK(seat_set_equal(&info.members, &want));
        check_sum(ctx, 3);
    }
    epic_close(ctx);
}

/* One of four members comes first and alone. It gets an error and may call again. */
static void no_quorum(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    regroup_info info;
    const regroup_args hasty = {.patience_ms = 100};
    (void)self;
    if (bootstrap->rank == 3) {
        const epic_result result = regroup_run(ctx, &hasty, &info);
        CHECK_SAY(result == EPIC_EPEER || result == EPIC_ETIMEOUT, "%s", epic_error(ctx));
    } else {
        run_nap_us(900000);
    }
    check_regroup(ctx, 15, 1);
    check_sum(ctx, 15);
    epic_close(ctx);
}

/* A plan of the generation before is refused on all members, and the group stays whole. */
static void old_plan(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    const epic_layer layer = {.num_experts = 4, .top_k = 1};
    const int32_t ids[2] = {0, 3}, ranks[4] = {0, 0, 1, 1};
    char tokens[2][64] = {{1}}, recv[8][64];
    epic_layer_info info;
    (void)self;
    CHECK(epic_layer_sizes(ctx, &layer, &info) == EPIC_OK);
    void *plan = aligned_alloc(64, ((size_t)info.plan_bytes + 63) / 64 * 64);
    const epic_plan_args args = {.layer = &layer,
                                 .plan = plan,
                                 .plan_bytes = info.plan_bytes,
                                 .topk_idx = ids,
                                 .num_tokens = 2,
                                 .rank_of_expert = ranks};
    const epic_dispatch_args dispatch = {.layer = &layer,
                                         .plan = plan,
                                         .plan_bytes = info.plan_bytes,
                                         .tokens = {tokens, 2, 64},
                                         .recv = {recv, 8, 64}};
    CHECK_SAY(epic_plan(ctx, &args) == EPIC_OK, "%s", epic_error(ctx));
    CHECK_SAY(epic_dispatch(ctx, &dispatch) == EPIC_OK, "%s", epic_error(ctx));
    check_regroup(ctx, 3, 1);
    CHECK_EQ(epic_dispatch(ctx, &dispatch), EPIC_EINVAL);
    CHECK_SAY(strstr(epic_error(ctx), "another group"), "%s", epic_error(ctx));
    CHECK_SAY(epic_plan(ctx, &args) == EPIC_OK, "%s", epic_error(ctx));
    CHECK_SAY(epic_dispatch(ctx, &dispatch) == EPIC_OK, "%s", epic_error(ctx));
    free(plan);
    epic_close(ctx);
}

/* Each rank dies or leaves after a random number of calls. All others make the next generation if
 * a call fails, and after every third sum of a generation. */
static void storm(const epic_bootstrap *bootstrap, void *self)
{
    const uint64_t *seed = self;
    const int rank = bootstrap->rank;
    run_random own = {run_mix(*seed, (uint64_t)rank)};
    epic_context *ctx = open_context(bootstrap);
    regroup_info info = {.members = ctx->members};
    int calls = rank == 0 ? 1000000 : (int)run_between(&own, 1, 16), sums = 0;
    const bool leaves = run_chance(&own, 50);
    while (info.members.words[0] != 1 && (calls-- > 0 || leaves)) {
        float data = (float)(1 << rank);
        const epic_allreduce_sum_args args = {.data = &data, .count = 1};
        const epic_result result = epic_allreduce_sum(ctx, &args);
        CHECK_SAY(result == EPIC_OK || result == EPIC_EPEER, "%s", epic_error(ctx));
        if (result == EPIC_OK) CHECK_EQ((uint64_t)data, info.members.words[0]);
        if (result == EPIC_OK && ++sums < 3) continue;
        const regroup_args call = {.is_leaving = calls <= 0};
        const epic_result made = regroup_run(ctx, &call, &info);
        if (!CHECK_SAY(made == EPIC_OK, "rank %d: %s", rank, epic_error(ctx))) break;
        if (call.is_leaving) break;
        sums = 0;
    }
    epic_close(ctx);
}

static void refused(const epic_bootstrap *bootstrap, void *self)
{
    const epic_config config = {.max_tokens = 1, .max_row_bytes = 4, .backend = "self"};
    epic_context *ctx;
    regroup_info info;
    const regroup_args args = {.step = 1};
    (void)self;
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(NULL));
    CHECK_EQ(regroup_run(ctx, &args, &info), EPIC_ENOTSUP);
    epic_close(ctx);
}

int main(void)
{
    static int late = 1;
    check_begin();
    run_alarm(100);
    for (int i = 0; i < 20; i++) run_threads(5, deaths, NULL);
    for (int i = 0; i < 20; i++) run_threads(4, leave, i % 2 ? &late : NULL);
    run_threads(3, evicted, NULL);
    run_threads(4, no_quorum, NULL);
    run_threads(2, old_plan, NULL);
    run_threads(1, refused, NULL);
    for (uint64_t seed = 1; seed <= (uint64_t)run_scaled(40); seed++)
        run_threads(16, storm, &(uint64_t){run_mix(run_seed(), seed)});
    return check_end();
}
