/* SPDX-License-Identifier: Apache-2.0 */
/* A peer that closes its context and ends, both between two questions of one look: it closed, it
 * did not die. */
#include "backend/shared/shared.h"
#include "check.h"
#include "context/context.h"
#include "run.h"

/* The process has ended by the time it is asked for; it closed before. */
static bool closed_and_ended(epic_group *g, int peer)
{
    atomic_store(&shared_rank_state_of(g, peer)->closed, 1);
    return true;
}

static void look(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const epic_config config = {.max_tokens = 4, .max_row_bytes = 64, .timeout_ms = 20000};
    epic_context *ctx;
    float one = 1;
    const epic_allreduce_sum_args sum = {.data = &one, .count = 1};
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    if (bootstrap->rank == 0) {
        epic_sight sight;
        shared_look_at_peer(ctx->group, 1, 7, 0, &sight);
        CHECK(!sight.gone && !sight.closed);
        ctx->group->is_dead = closed_and_ended;
        shared_look_at_peer(ctx->group, 1, 7, 0, &sight);
        CHECK(sight.gone && sight.closed);
        ctx->group->is_dead = NULL;
        atomic_store(&shared_rank_state_of(ctx->group, 1)->closed, 0);
    }
    CHECK(epic_allreduce_sum(ctx, &sum) == EPIC_OK);
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    run_threads(2, look, NULL);
    return check_end();
}
