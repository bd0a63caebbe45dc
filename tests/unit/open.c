/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_open if something is wrong on one rank only. All ranks get the same error at once,
 * and the next group opens. */
#include <string.h>

#include "api/rank_info.h"
#include "check.h"
#include "run.h"

static void check_result(epic_result result, epic_result right)
{
    CHECK_SAY(result == right, "%s, not %s: %s", epic_result_name(result),
              epic_result_name(right), epic_error(NULL));
}

static const epic_config good = {.max_tokens = 4, .max_row_bytes = 64, .max_in_flight = 2};

/* A bootstrap that calls another one, and changes one gather of one rank. */
typedef struct spoiled {
    epic_bootstrap inner;
    int gathers;
    int which; /* number of the gather that is changed, from 1 */
    epic_result result;
} spoiled;

static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    spoiled *s = self;
    const epic_result result = s->inner.gather(s->inner.self, mine, all, bytes);
    if (++s->gathers != s->which || s->inner.rank != 1) return result;
    rank_info *infos = all;
    /* rank 1 receives other process ids */
    if (s->result == EPIC_OK) infos[0].peer.process[0]++;
    if (s->result == EPIC_OK) infos[0].peer.host[0]++;
    return s->result;
}

static epic_bootstrap spoil(spoiled *s, const epic_bootstrap *inner)
{
    s->inner = *inner;
    s->gathers = 0;
    return (epic_bootstrap){inner->rank, inner->num_ranks, gather, NULL, s};
}

/* Rank 1 finds no backend that can join, or another backend than the others. No rank may begin
 * to join. */
static void another_backend(const epic_bootstrap *bootstrap, void *self)
{
    const char *backend = self;
    spoiled s = {.which = 1, .result = EPIC_OK};
    const epic_bootstrap spoiled_bootstrap = spoil(&s, bootstrap);
    epic_config config = good;
    config.backend = backend;
    epic_context *ctx = NULL;
    const uint64_t start = run_now_ns();
    const epic_result result = epic_open(&ctx, &spoiled_bootstrap, &config);
    CHECK_SAY(result == EPIC_ENOTSUP || (!backend && result == EPIC_EMISMATCH), "%s: %s",
              epic_result_name(result), epic_error(ctx));
    CHECK(run_now_ns() - start < 5000000000ull);
    epic_failure_info info;
    check_result(epic_failure(ctx, &info), EPIC_OK);
    CHECK_EQ(info.result, result);
    CHECK_EQ(info.operation, EPIC_OP_OPEN);
    check_result(epic_check(ctx), EPIC_ECLOSED);
    /* A long sentence that contains paths is shortened in its middle, so that it fits after the
     * prefix. */
    const char *prefix = "ctx never opened, open a new one: ";
    CHECK(strncmp(epic_error(ctx), prefix, strlen(prefix)) == 0);
    CHECK_SAY(strncmp(epic_error(ctx) + strlen(prefix), info.sentence, 150) == 0, "%s\n%s",
              epic_error(ctx), info.sentence);
    check_result(epic_plan(ctx, &(epic_plan_args){0}), EPIC_ECLOSED);
    epic_abort(ctx, 0, "nothing to abort");
    epic_close(ctx);
}

static epic_result refuse(void *self, const void *mine, void *all, int64_t bytes)
{
    (void)mine, (void)all, (void)bytes;
    return (epic_result) * (int *)self;
}

/* If a bootstrap of the caller fails without a sentence, open reports its result, not an older
 * failure. Numbers that are no epic_result become EPIC_EPEER. */
static void failing_bootstrap(void)
{
    static const struct {
        int returned;
        epic_result result;
        const char *text;
    } cases[] = {
        {EPIC_EPEER, EPIC_EPEER, "bootstrap.gather failed on rank 1 with EPIC_EPEER (8)"},
        {EPIC_EEVICTED, EPIC_EEVICTED, "gather failed on rank 1 with EPIC_EEVICTED (10)"},
        {EPIC_EEVICTED + 1, EPIC_EPEER, "with unknown epic_result (11)"},
        {-1, EPIC_EPEER, "with unknown epic_result (-1)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int returned = cases[i].returned;
        const epic_bootstrap bootstrap = {
            .rank = 1, .num_ranks = 2, .gather = refuse, .self = &returned};
        epic_context *ctx;
        check_result(epic_open(NULL, NULL, NULL), EPIC_EINVAL);
        check_result(epic_open(&ctx, &bootstrap, &good), cases[i].result);
        CHECK_SAY(strstr(epic_error(ctx), cases[i].text), "%s", epic_error(ctx));
        epic_close(ctx);
    }
}

/* The config of rank 1 has another number of ranks than the bootstrap. All ranks get its error.
 */
static void another_num_ranks(const epic_bootstrap *bootstrap, void *self)
{
    epic_config config = good;
    epic_context *ctx = NULL;
    (void)self;
    config.num_ranks = bootstrap->rank == 1 ? 5 : bootstrap->rank == 2 ? 3 : 0;
    check_result(epic_open(&ctx, bootstrap, &config), EPIC_EMISMATCH);
    CHECK_SAY(strcmp(epic_error(ctx),
                     "open: rank 1: config.num_ranks is 5, the bootstrap has 3 "
                     "ranks: must be equal, or 0") == 0,
              "%s", epic_error(ctx));
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    static char threads[] = "threads";
    run_threads(3, another_backend, threads);
    run_threads(3, another_backend, NULL);
    run_threads(3, another_num_ranks, NULL);
    failing_bootstrap();
    return check_end();
}
