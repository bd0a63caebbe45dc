/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the status that a rank sees of a peer that leaves. A peer that closes its context and
 * ends, both between two checks, has closed and not died. A peer that looks dead once is not
 * named yet, because data that it sent before may still arrive. */
#include "backend/shared/shared.h"
#include "check.h"
#include "context/context.h"
#include "exchange/exchange.h"
#include "run.h"

/* The process has ended by the time its status is read, but it closed before. */
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
        epic_peer_status status;
        shared_look_at_peer(ctx->group, 1, 7, 0, &status);
        CHECK(!status.is_gone && !status.has_closed);
        ctx->group->is_dead = closed_and_ended;
        shared_look_at_peer(ctx->group, 1, 7, 0, &status);
        CHECK(status.is_gone && status.has_closed);
        ctx->group->is_dead = NULL;
        atomic_store(&shared_rank_state_of(ctx->group, 1)->closed, 0);
    }
    CHECK(epic_allreduce_sum(ctx, &sum) == EPIC_OK);
    epic_close(ctx);
}

/* ------------------------------------------------------------ a peer that is seen gone ---- */

static const epic_transport *real;
static _Atomic int was_seen; /* 1: rank 0 has seen that rank 1 is gone */

/* Rank 1 looks dead at the first check. Data that it sent before arrives right after. */
static void look_once_gone(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                           epic_peer_status *out)
{
    real->look(group, peer, tag, sequence, out);
    if (!atomic_exchange(&was_seen, 1)) out->is_gone = true;
}

static void announce_late(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const epic_config config = {.max_tokens = 4,
                                .max_row_bytes = 64,
                                .timeout_ms = 20000,
                                .max_in_flight = 1,
                                .backend = "threads"};
    epic_context *ctx;
    float one = 1;
    const epic_allreduce_sum_args sum = {.data = &one, .count = 1};
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    epic_transport watched = *ctx->backend->transport;
    if (bootstrap->rank == 0) {
        real = ctx->backend->transport;
        watched.look = look_once_gone;
        ctx->exchanges[0].transport = &watched;
    } else {
        while (!atomic_load(&was_seen)) run_nap_us(1000);
    }
    const epic_result result = epic_allreduce_sum(ctx, &sum);
    CHECK_SAY(result == EPIC_OK, "rank %d: %s", bootstrap->rank, epic_error(ctx));
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    run_threads(2, look, NULL);
    run_threads(2, announce_late, NULL);
    return check_end();
}
