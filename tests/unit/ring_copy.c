/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that copies to rings, through the caches or past them, have the same bytes.  Timed rows
 * decide between the two. */
#include "exchange/ring_copy.h"

#include <string.h>

#include "check.h"
#include "run.h"
#include "step.h"

#define RANKS 3
#define TOKENS 64
#define HIDDEN 1024 /* float32 rows of 4 KiB, which are timed */
#define ROW 4096
#define NEAR_NS 250
#define FAR_NS 1700

static ring_path next_path(ring_write_time *measured, int64_t bytes)
{
    exchange x = {.ring_write_times = measured};
    return ring_choose_path(&x, 0, bytes);
}

/* The first row is timed, then few rows. Short rows are never timed. */
static void test_turns(void)
{
    ring_write_time measured = {0};
    CHECK_EQ(next_path(&measured, ROW), RING_TIMED);
    int timed = 0;
    for (int i = 0; i < 1000; i++) timed += next_path(&measured, ROW) == RING_TIMED;
    CHECK(timed > 5 && timed < 50);
    for (int i = 0; i < 1000; i++) CHECK_EQ(next_path(&measured, 512), RING_CACHED);
}

static ring_path path_after(ring_write_time *measured, int rows, uint64_t ns)
{
    for (int i = 0; i < rows; i++) ring_record_time(measured, ns, ROW);
    const ring_path path = next_path(measured, ROW);
    return path == RING_TIMED ? next_path(measured, ROW) : path;
}

/* The choice follows cores that move apart and together, but ignores a single late clock. */
static void test_learning(void)
{
    ring_write_time measured = {0};
    CHECK_EQ(path_after(&measured, 10, NEAR_NS), RING_CACHED);
    CHECK_EQ(path_after(&measured, 1, FAR_NS), RING_CACHED);
    CHECK_EQ(path_after(&measured, 10, FAR_NS), RING_STREAMED);
    CHECK_EQ(path_after(&measured, 1, NEAR_NS), RING_STREAMED);
    CHECK_EQ(path_after(&measured, 10, NEAR_NS), RING_CACHED);
    CHECK_EQ(path_after(&measured, 1, UINT32_MAX),
             RING_CACHED); /* another program used the core */
}

/* Sets the costs of all rings of all op slots. The next step times no row. */
static void set_costs(epic_context *ctx, int32_t line_ps)
{
    for (uint32_t i = 0; i < ctx->config.max_in_flight; i++)
        for (int r = 0; r < ctx->num_ranks; r++)
            ctx->exchanges[i].ring_write_times[r] =
                (ring_write_time){.line_ps = line_ps, .rows = 1};
}

static void keep_results(const step *s, float *kept)
{
    const size_t rows = (size_t)(s->tokens * s->hidden);
    memcpy(kept, s->out, rows * sizeof *kept);
    memcpy(kept + rows, s->d_tokens, rows * sizeof *kept);
}

static void run_paths(const epic_bootstrap *bootstrap, void *self)
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
        set_costs(ctx, 0);
        CHECK(step_all(&s, 1));
        keep_results(&s, near);
        set_costs(ctx, INT32_MAX / 2);
        CHECK(step_all(&s, 1));
        keep_results(&s, far);
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
    run_threads(RANKS, run_paths, NULL);
    return check_end();
}
