/* SPDX-License-Identifier: Apache-2.0 */
/* Rows go to lanes through the caches or past them, as timed rows say; results are the same. */
#include "exchange/ring_copy.h"

#include <string.h>

#include "check.h"
#include "run.h"
#include "step.h"

#define RANKS 3
#define TOKENS 64
#define HIDDEN 1024 /* float32: 4 KiB, rows that are timed */
#define ROW 4096
#define NEAR_NS 250
#define FAR_NS 1700

static lane_way next_way(lane_reach *reach, int64_t bytes)
{
    exchange x = {.reach = reach};
    return lane_way_of(&x, 0, bytes);
}

/* The first row is timed, and then few; short ones never. */
static void test_turns(void)
{
    lane_reach reach = {0};
    CHECK_EQ(next_way(&reach, ROW), LANE_TIMED);
    int timed = 0;
    for (int i = 0; i < 1000; i++) timed += next_way(&reach, ROW) == LANE_TIMED;
    CHECK(timed > 5 && timed < 50);
    for (int i = 0; i < 1000; i++) CHECK_EQ(next_way(&reach, 512), LANE_NEAR);
}

static lane_way way_after(lane_reach *reach, int rows, uint64_t ns)
{
    for (int i = 0; i < rows; i++) lane_learn(reach, ns, ROW);
    const lane_way way = next_way(reach, ROW);
    return way == LANE_TIMED ? next_way(reach, ROW) : way;
}

/* Cores that move apart and together are followed; one late clock is not. */
static void test_learning(void)
{
    lane_reach reach = {0};
    CHECK_EQ(way_after(&reach, 10, NEAR_NS), LANE_NEAR);
    CHECK_EQ(way_after(&reach, 1, FAR_NS), LANE_NEAR);
    CHECK_EQ(way_after(&reach, 10, FAR_NS), LANE_FAR);
    CHECK_EQ(way_after(&reach, 1, NEAR_NS), LANE_FAR);
    CHECK_EQ(way_after(&reach, 10, NEAR_NS), LANE_NEAR);
    CHECK_EQ(way_after(&reach, 1, UINT32_MAX), LANE_NEAR); /* the core was away */
}

/* All lanes of all cells, with no row timed in the next step. */
static void set_reach(epic_context *ctx, int32_t line_ps)
{
    for (uint32_t i = 0; i < ctx->config.max_in_flight; i++)
        for (int r = 0; r < ctx->num_ranks; r++)
            ctx->exchanges[i].reach[r] = (lane_reach){.line_ps = line_ps, .rows = 1};
}

static void keep(const step *s, float *kept)
{
    const size_t rows = (size_t)(s->tokens * s->hidden);
    memcpy(kept, s->out, rows * sizeof *kept);
    memcpy(kept + rows, s->d_tokens, rows * sizeof *kept);
}

static void run_ways(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    static _Thread_local float near[2 * TOKENS * HIDDEN], far[2 * TOKENS * HIDDEN];
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 20000,
                                .max_in_flight = 2};
    epic_context *ctx;
    step s;
    if (CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) {
        step_open(&s, ctx, TOKENS, HIDDEN);
        set_reach(ctx, 0);
        CHECK(step_all(&s, 1));
        keep(&s, near);
        set_reach(ctx, INT32_MAX / 2);
        CHECK(step_all(&s, 1));
        keep(&s, far);
        CHECK(memcmp(near, far, sizeof near) == 0);
        step_close(&s);
    }
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(100);
    test_turns();
    test_learning();
    run_threads(RANKS, run_ways, NULL);
    return check_end();
}
