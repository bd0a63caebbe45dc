/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_regroup and epic_members. A *generation* is the group between two changes of
 * its members. The state machine in members.c decides on the next generation: a leader
 * proposes it, and the other members prepare its memory and accept it. This file sends the
 * messages of the state machine over a transport (backend/regroup.h), and then lets the context
 * enter the new generation. docs/internals/members.md describes the protocol. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/ops.h"
#include "backend/transport.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/sized.h"
#include "bootstrap/bootstrap.h"
#include "context/context.h"
#include "context/members.h"

#define MS 1000000
/* The sequence numbers of the operations in generation g begin at g << 32. So no two operations
 * with the same tag have the same number in an error, a trace or the flight recorder. */
#define GENERATION_SHIFT 32
#define MAX_TICK_MS 50 /* longest wait for a message, after which deadlines are checked */
/* If a wait for messages takes this much longer than its limit, the process was suspended. */
#define SLACK_NS (100 * MS)

_Static_assert(sizeof(members_message) <= REGROUP_MESSAGE_BYTES, "members_message");
_Static_assert(EPIC_RANK_WORDS == SEAT_SET_WORDS, "EPIC_RANK_WORDS");

/* The state of a context's decisions on its members. Allocated by the first call of
 * epic_regroup. */
struct context_decision {
    members machine;
    /* members of the previous generation that are not in this generation */
    seat_set gone;
    int64_t suspended_ns; /* how long this process was suspended during calls */
    /* the error with which this rank refused to prepare the proposed generation in this call
     * (error code and error text); EPIC_OK: it has refused none */
    epic_result refusal;
    char why[512];
};

static const epic_regroup_transport *transport_of(const epic_context *ctx)
{
    const epic_backend *backend = ctx->backend;
    return backend->ops ? backend->ops->regroup : backend->transport->regroup;
}

/* ----------------------------------------------------------------------- the arguments ---- */

static seat_set set_of_words(const uint64_t *words, int num_ranks)
{
    seat_set set = {{0}};
    for (int w = 0; w < (num_ranks + 63) / 64; w++) set.words[w] = words[w];
    return set;
}

/* Checks args->only, the members that an external authority has chosen. */
static epic_result check_only(const epic_context *ctx, const epic_regroup_args *args)
{
    if (!args->only != !args->authority)
        return epic_fail(
            EPIC_EINVAL,
            "only is %s and authority is %llu: must be NULL and 0, or a set and the "
            "number of the program that names it",
            args->only ? "a set" : "NULL", (unsigned long long)args->authority);
    if (!args->only) return EPIC_OK;
    const seat_set only = set_of_words(args->only, ctx->num_ranks);
    if (seat_set_count(&only) == 0)
        return epic_fail(EPIC_EINVAL, "only is empty: must contain a member");
    for (int s = 0; s < (ctx->num_ranks + 63) / 64 * 64; s++)
        if (seat_set_has(&only, s) && (s >= ctx->num_ranks || !seat_set_has(&ctx->members, s)))
            return epic_fail(EPIC_EINVAL,
                             "only contains rank %d, which is not a member: must be a part of "
                             "the members that epic_members returns",
                             s);
    return EPIC_OK;
}

static epic_result check_args(const epic_context *ctx, const epic_regroup_args *args)
{
    if (args->flags) return epic_fail(EPIC_EINVAL, "flags is %u: must be 0", args->flags);
    if (args->leaving > 1)
        return epic_fail(EPIC_EINVAL, "leaving is %u: must be 0 or 1", args->leaving);
    if (args->min_members > (uint32_t)ctx->num_members)
        return epic_fail(EPIC_EINVAL, "min_members is %u: must be at most %d, the members now",
                         args->min_members, ctx->num_members);
    return check_only(ctx, args);
}

/* Returns EPIC_OK if the members of this context can change. */
static epic_result check_context(const epic_context *ctx)
{
    if (!transport_of(ctx))
        return epic_fail(
            EPIC_ENOTSUP,
            "config.flags is %u, and the backend is \"%s\": only groups with EPIC_CAN_REGROUP, "
            "or of the backends shm and threads, can continue without a rank; open a new group",
            ctx->config.flags, ctx->backend_name);
    if (atomic_load(&ctx->windows))
        return epic_fail(
            EPIC_ENOTSUP,
            "ctx has windows: the members of such a group cannot change; open a new "
            "group");
    return EPIC_OK;
}

/* ---------------------------------------------------------------------------- messages ---- */

/* Returns the current time, minus the periods in which this process was suspended. So the other
 * members have the whole patience_ms to call epic_regroup, also if all ranks were suspended
 * together. */
static int64_t running_ns(const struct context_decision *d)
{
    return (int64_t)now_ns() - d->suspended_ns;
}

/* Creates the memory of the generation group_id if this rank has proposed it. Does nothing if
 * another rank has proposed it. */
static epic_result create_own(const epic_context *ctx, uint64_t group_id)
{
    const epic_regroup_transport *t = transport_of(ctx);
    const bool is_own = group_id == ctx->decision->machine.call.group_id;
    return is_own && t->create ? t->create(ctx->group, group_id) : EPIC_OK;
}

/* Returns the id of the generation that the receiver `to` of the message may have to prepare,
 * or 0 if there is none. For a promise with an accepted proposal, this is the proposal's
 * generation: the receiver may become the leader, and the leader must send a handle to the
 * memory to all members. */
static uint64_t generation_for(int to, const members_message *message)
{
    const bool is_proposal =
        message->kind == MEMBERS_PROPOSE || message->kind == MEMBERS_COMMIT;
    if (message->kind == MEMBERS_PROMISE && message->accepted.round)
        return message->proposal.group_id;
    return is_proposal && seat_set_has(&message->proposal.members, to)
               ? message->proposal.group_id
               : 0;
}

/* Sends a message of the state machine. If this rank cannot create the memory of its proposal,
 * it still sends the proposal: the other members then refuse it. */
static void send_message(void *self, int to, const members_message *message)
{
    const epic_context *ctx = self;
    const uint64_t group_id = generation_for(to, message);
    if (group_id) create_own(ctx, group_id);
    transport_of(ctx)->send(ctx->group, to, message, sizeof *message, group_id);
}

/* Prepares the memory of the generation that is proposed now, and reports to the state machine
 * whether this has succeeded. */
static void prepare_generation(const epic_context *ctx)
{
    struct context_decision *d = ctx->decision;
    const uint64_t group_id = d->machine.pending.group_id;
    const epic_regroup_transport *t = transport_of(ctx);
    epic_result result = create_own(ctx, group_id);
    if (result == EPIC_OK && t->prepare) result = t->prepare(ctx->group, group_id);
    if (result != EPIC_OK) {
        d->refusal = result;
        snprintf(d->why, sizeof d->why, "%s", epic_sentence());
    }
    members_answer(&d->machine, result == EPIC_OK, running_ns(d));
}

/* Allocates the state of the decisions at the first call. */
static epic_result get_decision(epic_context *ctx)
{
    if (ctx->decision) return EPIC_OK;
    struct context_decision *d = calloc(1, sizeof *d);
    if (!d)
        return epic_fail(EPIC_ENOMEM, "no memory for the members of %d ranks", ctx->num_ranks);
    members_init(&d->machine, ctx->rank, ctx->num_ranks, 0, &ctx->members);
    d->machine.send = send_message;
    d->machine.self = ctx;
    ctx->decision = d;
    return EPIC_OK;
}

/* Receives the oldest message. Waits for at most `ms` milliseconds. Detects from the duration
 * of the wait that this process was suspended. */
static bool receive_message(epic_context *ctx, int *from, members_message *message, uint32_t ms)
{
    struct context_decision *d = ctx->decision;
    const int64_t latest = (int64_t)now_ns() + (int64_t)ms * MS;
    const bool received =
        transport_of(ctx)->receive(ctx->group, from, message, sizeof *message, ms);
    const int64_t late = (int64_t)now_ns() - latest;
    if (late > SLACK_NS) d->suspended_ns += late;
    return received;
}

static bool is_running(const members *m)
{
    return m->state == MEMBERS_DECIDING || m->state == MEMBERS_PREPARING;
}

/* Returns the members that have closed or died and that have not been reported to the state
 * machine yet. */
static seat_set find_gone(const epic_context *ctx)
{
    const members *m = &ctx->decision->machine;
    seat_set gone = {{0}};
    for (int s = 0; s < ctx->num_ranks; s++)
        if (seat_set_has(&m->current, s) && !seat_set_has(&m->dead, s) && s != ctx->rank &&
            transport_of(ctx)->is_gone(ctx->group, s))
            seat_set_add(&gone, s);
    return gone;
}

/* Receives a message and returns true. If no message has arrived, reports to the state machine
 * the members that have closed or died, and returns false. A member may have sent messages
 * before it died, and among them may be a decision, which counts. So this function looks for
 * messages once more after it has found a death, and reports the death only if no message has
 * arrived. */
static bool receive_or_report(epic_context *ctx, int *from, members_message *message,
                              uint32_t ms)
{
    struct context_decision *d = ctx->decision;
    if (receive_message(ctx, from, message, ms)) return true;
    const seat_set gone = find_gone(ctx);
    if (seat_set_count(&gone) && receive_message(ctx, from, message, 0)) return true;
    for (int s = 0; s < ctx->num_ranks; s++)
        if (seat_set_has(&gone, s)) members_report_dead(&d->machine, s, running_ns(d));
    return false;
}

/* Exchanges messages until the members of the next generation are decided or the call fails. */
static void decide_members(epic_context *ctx)
{
    struct context_decision *d = ctx->decision;
    members *m = &d->machine;
    const int64_t patience_ms = m->call.patience_ns / MS, tick = 1 + patience_ms / 8;
    uint32_t ms = 0;
    while (is_running(m)) {
        members_message message;
        int from;
        if (m->state == MEMBERS_PREPARING) {
            prepare_generation(ctx);
        } else if (receive_or_report(ctx, &from, &message, ms)) {
            members_receive(m, from, &message, running_ns(d));
            ms = 0;
        } else {
            if (is_running(m)) members_tick(m, running_ns(d));
            ms = (uint32_t)(tick < MAX_TICK_MS ? tick : MAX_TICK_MS);
        }
    }
}

/* ------------------------------------------------------------------------- the outcome ---- */

/* Breaks the old generation, so that a rank that still works in it does not wait for ranks that
 * have entered the new generation. On a device backend, enter() does this. */
static void break_old(epic_context *ctx)
{
    if (!ctx->backend->transport) return;
    epic_failure_info failure = {.result = EPIC_EPEER, .rank = ctx->rank};
    snprintf(failure.sentence, sizeof failure.sentence,
             "rank %d and other members have made the next generation of the group: call "
             "epic_regroup",
             ctx->rank);
    ctx->backend->transport->break_group(ctx->group, &failure);
}

/* Lets the context enter the decided generation. If the rank cannot enter it, breaks the new
 * generation and returns the error. */
static epic_result enter_generation(epic_context *ctx)
{
    const members *m = &ctx->decision->machine;
    seat_set gone = ctx->members;
    seat_set_subtract(&gone, &m->current);
    ctx->decision->gone = gone;
    break_old(ctx);
    const epic_result entered = transport_of(ctx)->enter(ctx->group, &m->current);
    epic_failure_info failure = {.result = entered, .rank = ctx->rank};
    ctx->members = m->current;
    ctx->num_members = seat_set_count(&m->current);
    ctx->group_id = m->last.group_id;
    tags_forget(&ctx->tags, m->generation << GENERATION_SHIFT);
    context_mend(ctx);
    if (entered == EPIC_OK) return EPIC_OK;
    backend_copy_error(ctx->backend, entered);
    snprintf(failure.sentence, sizeof failure.sentence, "%s", epic_sentence());
    return context_break(ctx, &failure);
}

/* Writes to `names` a list of the members that have not called epic_regroup and that may be
 * alive, or "no rank". */
static void list_missing(const epic_context *ctx, char *names, size_t size)
{
    const members *m = &ctx->decision->machine;
    bool missing[EPIC_MAX_RANKS];
    int count = 0;
    for (int s = 0; s < ctx->num_ranks; s++) {
        const bool has_come = m->state == MEMBERS_NO_QUORUM ? seat_set_has(&m->came, s)
                                                            : m->heard_ns[s] != m->begin_ns;
        missing[s] = s != ctx->rank && seat_set_has(&m->current, s) &&
                     !seat_set_has(&m->dead, s) && !has_come;
        count += missing[s];
    }
    if (count)
        epic_bootstrap_list_ranks(names, size, missing, ctx->num_ranks);
    else
        snprintf(names, size, "no rank");
}

/* Breaks the context of a rank that is not in the new generation. */
static epic_result end_membership(epic_context *ctx, bool has_left)
{
    const struct context_decision *d = ctx->decision;
    epic_failure_info failure = {.result = EPIC_EEVICTED, .rank = ctx->rank};
    char *out = failure.sentence;
    if (has_left)
        snprintf(out, sizeof failure.sentence, "rank %d has left the group: close the context",
                 ctx->rank);
    else
        snprintf(out, sizeof failure.sentence,
                 "the other members have gone on without rank %d, because it %.380s: close the "
                 "context",
                 ctx->rank,
                 d->refusal == EPIC_OK ? "did not come in time or was not named" : d->why);
    context_mend(ctx);
    const epic_result result = context_break(ctx, &failure);
    return has_left ? EPIC_OK : result;
}

/* Lets the context enter the new generation or leave the group, if this has been decided.
 * Returns the result of the call. */
static epic_result finish_call(epic_context *ctx, const epic_regroup_args *args)
{
    const struct context_decision *d = ctx->decision;
    const members *m = &d->machine;
    char names[256];
    if (m->state == MEMBERS_ENTERED) return enter_generation(ctx);
    if (m->state == MEMBERS_OUT) return end_membership(ctx, args->leaving);
    if (d->refusal != EPIC_OK) return epic_fail(d->refusal, "%s", d->why);
    list_missing(ctx, names, sizeof names);
    switch (m->state) {
    case MEMBERS_TOO_FEW:
        return epic_fail(EPIC_EPEER,
                         "min_members is %u: fewer would remain; lower it, or close the group",
                         args->min_members ? args->min_members : 1);
    case MEMBERS_NO_QUORUM:
        return epic_fail(EPIC_EPEER,
                         "no quorum: %s did not come and may live; more than half of the %d "
                         "members must come; call again",
                         names, seat_set_count(&m->current));
    default:
        return epic_fail(EPIC_ETIMEOUT,
                         "no decision on the members in four times patience_ms; %s sent no "
                         "message; call again",
                         names);
    }
}

static epic_result run_call(epic_context *ctx, const epic_regroup_args *args)
{
    struct context_decision *d = ctx->decision;
    const int64_t patience = args->patience_ms ? args->patience_ms : ctx->config.timeout_ms;
    const uint64_t seed = hash_join(hash_join(ctx->group_id, now_ns()), (uint64_t)ctx->rank);
    members_call call = {.patience_ns = patience * MS,
                         .step = args->step,
                         .min_members = args->min_members,
                         .leaving = args->leaving,
                         .authority = args->authority,
                         .group_id = seed | 1};
    if (args->only) call.only = set_of_words(args->only, ctx->num_ranks);
    d->refusal = EPIC_OK;
    members_begin(&d->machine, &call, running_ns(d));
    decide_members(ctx);
    const epic_result result = finish_call(ctx, args);
    if (d->machine.state != MEMBERS_OUT) tags_restart(&ctx->tags, ctx->config.max_in_flight);
    return result;
}

/* -------------------------------------------------------------------- the public calls ---- */

static void fill_info(const epic_context *ctx, epic_members_info *out)
{
    const struct context_decision *d = ctx->decision;
    *out = (epic_members_info){.group_id = ctx->group_id,
                               .num_ranks = ctx->num_ranks,
                               .num_members = ctx->num_members};
    for (int w = 0; w < EPIC_RANK_WORDS; w++) out->members[w] = ctx->members.words[w];
    if (!d || !d->machine.generation) return;
    out->generation = d->machine.generation;
    out->least_step = d->machine.last.least_step;
    out->greatest_step = d->machine.last.greatest_step;
    for (int w = 0; w < EPIC_RANK_WORDS; w++) out->gone[w] = d->gone.words[w];
}

/* Refuses new operations, and waits until earlier work on the device has ended. */
static epic_result begin_call(epic_context *ctx)
{
    const epic_regroup_transport *t = transport_of(ctx);
    TRY(tags_pause(&ctx->tags));
    const epic_result result =
        t->begin ? backend_copy_error(ctx->backend, t->begin(ctx->group)) : EPIC_OK;
    if (result != EPIC_OK) tags_restart(&ctx->tags, ctx->config.max_in_flight);
    return result;
}

epic_result epic_regroup_v1(epic_context *ctx, const epic_regroup_args *args, size_t size,
                            epic_members_info *out, size_t out_size)
{
    epic_regroup_args a;
    epic_members_info info;
    if (!ctx) return epic_fail(EPIC_EINVAL, "ctx is NULL: must be a context from epic_open");
    TRY(context_check_open(ctx));
    TRY(READ_SIZED(&a, args, size, "args"));
    if (out) TRY(CHECK_PLACE(out, out_size));
    TRY(check_context(ctx));
    TRY(check_args(ctx, &a));
    TRY(get_decision(ctx));
    if (ctx->decision->machine.state == MEMBERS_OUT) return context_check(ctx);
    TRY(begin_call(ctx));
    TRY(run_call(ctx, &a));
    fill_info(ctx, &info);
    if (out) WRITE_SIZED(out, &info, out_size);
    return EPIC_OK;
}

epic_result epic_members_v1(const epic_context *ctx, epic_members_info *out, size_t size)
{
    epic_members_info info;
    if (!ctx) return epic_fail(EPIC_EINVAL, "ctx is NULL: must be a context from epic_open");
    TRY(CHECK_PLACE(out, size));
    TRY(context_check_open(ctx));
    fill_info(ctx, &info);
    WRITE_SIZED(out, &info, size);
    return EPIC_OK;
}
