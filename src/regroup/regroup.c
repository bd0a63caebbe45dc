/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the decision on the next generation (src/members) over the messages of a transport
 * (backend/regroup.h), and then lets the context enter the new generation. */
#include "regroup/regroup.h"

#include <stdlib.h>

#include "backend/transport.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/process.h"
#include "members/members.h"

#define MS 1000000
#define TICK_MS 5 /* how often to look for ranks that are gone */

static const epic_regroup_transport *transport_of(const epic_context *ctx)
{
    const epic_transport *transport = ctx->backend->transport;
    return transport ? transport->regroup : NULL;
}

/* Returns EPIC_OK if the members of this context can change. */
static epic_result check_context(const epic_context *ctx)
{
    if (!ctx->backend || ctx->generation != process_generation())
        return epic_fail(EPIC_ECLOSED, "ctx is not open in this process: open a new one");
    if (!transport_of(ctx))
        return epic_fail(EPIC_ENOTSUP, "backend %s: the members of its groups cannot change",
                         ctx->backend_name);
    if (atomic_load(&ctx->windows))
        return epic_fail(EPIC_ENOTSUP,
                         "ctx has windows: the members of such a group cannot change");
    return EPIC_OK;
}

static void send_message(void *self, int to, const members_message *message)
{
    const epic_context *ctx = self;
    transport_of(ctx)->send(ctx->group, to, message, sizeof *message);
}

/* Allocates the state of the decisions at the first call. */
static epic_result get_decision(epic_context *ctx)
{
    if (ctx->decision) return EPIC_OK;
    members *m = calloc(1, sizeof *m);
    if (!m)
        return epic_fail(EPIC_ENOMEM, "no memory for the members of %d seats", ctx->num_ranks);
    members_init(m, ctx->rank, ctx->num_ranks, 0, &ctx->members);
    m->send = send_message;
    m->self = ctx;
    ctx->decision = m;
    return EPIC_OK;
}

static bool is_running(const members *m)
{
    return m->state == MEMBERS_DECIDING || m->state == MEMBERS_PREPARING;
}

static void report_gone(epic_context *ctx, members *m)
{
    for (int s = 0; s < ctx->num_ranks; s++)
        if (seat_set_has(&m->current, s) && !seat_set_has(&m->dead, s) && s != ctx->rank &&
            transport_of(ctx)->is_gone(ctx->group, s))
            members_report_dead(m, s, (int64_t)now_ns());
}

/* Exchanges messages until the members are decided or the call fails. Reports deaths only when no
 * message is left: a decision that has arrived counts, even if its sender has died since. */
static void decide_members(epic_context *ctx, members *m)
{
    const epic_regroup_transport *t = transport_of(ctx);
    uint32_t ms = 0;
    while (is_running(m)) {
        members_message message;
        int from;
        if (m->state == MEMBERS_PREPARING) {
            const epic_result result = t->prepare(ctx->group, m->pending.group_id);
            members_answer(m, result == EPIC_OK, (int64_t)now_ns());
            continue;
        }
        if (t->receive(ctx->group, &from, &message, sizeof message, ms)) {
            members_receive(m, from, &message, (int64_t)now_ns());
            ms = 0;
            continue;
        }
        report_gone(ctx, m);
        if (is_running(m)) members_tick(m, (int64_t)now_ns());
        ms = TICK_MS;
    }
}

/* Lets the context enter the decided generation. */
static void enter_generation(epic_context *ctx, const members *m)
{
    transport_of(ctx)->enter(ctx->group, &m->current);
    pthread_mutex_lock(&ctx->mutex);
    ctx->members = m->current;
    ctx->num_members = seat_set_count(&m->current);
    ctx->group_id = m->last.group_id;
    ctx->failure = (epic_failure_info){0};
    atomic_store(&ctx->broken, false);
    pthread_mutex_unlock(&ctx->mutex);
}

/* Returns the result of the call. */
static epic_result outcome_of(const members *m, const regroup_args *args)
{
    switch (m->state) {
    case MEMBERS_ENTERED:
        return EPIC_OK;
    case MEMBERS_OUT:
        if (args->is_leaving) return EPIC_OK;
        return epic_fail(EPIC_EPEER, "the other members have gone on without this rank; close "
                                     "the context");
    case MEMBERS_TOO_FEW:
        return epic_fail(EPIC_EPEER, "fewer members came than min_members %u; call again",
                         args->min_members);
    case MEMBERS_NO_QUORUM:
        return epic_fail(
            EPIC_EPEER, "no quorum: %d members may live and did not come; call again",
            seat_set_count(&m->current) - seat_set_count(&m->dead) - seat_set_count(&m->came));
    default:
        return epic_fail(EPIC_ETIMEOUT,
                         "the members did not decide in four times the patience; "
                         "call again");
    }
}

epic_result regroup_run(epic_context *ctx, const regroup_args *args, regroup_info *out)
{
    TRY(check_context(ctx));
    TRY(get_decision(ctx));
    TRY(tags_pause(&ctx->tags));
    members *m = ctx->decision;
    const int64_t patience = args->patience_ms ? args->patience_ms : ctx->config.timeout_ms;
    const uint64_t seed = hash_join(hash_join(ctx->group_id, now_ns()), (uint64_t)ctx->rank);
    const members_call call = {.patience_ns = patience * MS,
                               .step = args->step,
                               .min_members = args->min_members ? args->min_members : 1,
                               .leaving = args->is_leaving,
                               .group_id = seed | 1};
    members_begin(m, &call, (int64_t)now_ns());
    decide_members(ctx, m);
    const bool has_entered = m->state == MEMBERS_ENTERED;
    if (has_entered) enter_generation(ctx, m);
    tags_restart(&ctx->tags, m->state == MEMBERS_OUT ? 0 : ctx->config.max_in_flight,
                 has_entered);
    *out = (regroup_info){m->generation, ctx->group_id, ctx->members, m->last.least_step,
                          m->last.greatest_step};
    return outcome_of(m, args);
}
