/* SPDX-License-Identifier: Apache-2.0 */
/* Stores the failure of a context, and implements queries about a context. */
#include "context/context.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/transport.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/process.h"
#include "base/sized.h"
#include "base/text.h"

uint64_t now_ns(void)
{
    return (uint64_t)clock_ns();
}

static bool is_ours(const epic_context *ctx)
{
    return ctx->generation == process_generation();
}

epic_result backend_copy_error(const epic_backend *backend, epic_result result)
{
    if (result == EPIC_OK || !backend->sentence) return result;
    return epic_fail(result, "%s", backend->sentence());
}

epic_result context_break(epic_context *ctx, const epic_failure_info *failure)
{
    pthread_mutex_lock(&ctx->mutex);
    if (!atomic_load_explicit(&ctx->broken, memory_order_relaxed)) {
        ctx->failure = *failure;
        text_clean(ctx->failure.sentence);
        atomic_store_explicit(&ctx->broken, true, memory_order_release);
    }
    pthread_mutex_unlock(&ctx->mutex);
    return epic_fail((epic_result)ctx->failure.result, "%s", ctx->failure.sentence);
}

void context_mend(epic_context *ctx)
{
    pthread_mutex_lock(&ctx->mutex);
    ctx->failure = (epic_failure_info){0};
    atomic_store_explicit(&ctx->broken, false, memory_order_release);
    pthread_mutex_unlock(&ctx->mutex);
}

/* If the group has failed, copies the failure from the backend to *failure and returns true. */
static bool new_failure(const epic_context *ctx, epic_failure_info *failure)
{
    const epic_backend *backend = ctx->backend;
    const bool found = backend->transport
                           ? backend->transport->failure(ctx->group, failure)
                           : backend->ops->poll_failure(ctx->group, failure) != EPIC_OK;
    text_clean(failure->sentence); /* the text is from a peer, or from a caller of epic_abort */
    return found;
}

/* Returns EPIC_ECLOSED in a forked child of the process that opened ctx. */
static epic_result check_ours(const epic_context *ctx)
{
    if (is_ours(ctx)) return EPIC_OK;
    return epic_fail(EPIC_ECLOSED,
                     "ctx was opened by process %lld, of which this one, %lld, is a fork: a "
                     "context does not outlive fork; open a new one here",
                     (long long)ctx->pid, (long long)getpid());
}

epic_result context_check_open(const epic_context *ctx)
{
    TRY(check_ours(ctx));
    if (ctx->backend) return EPIC_OK;
    return epic_fail(EPIC_ECLOSED, "ctx never opened, open a new one: %s",
                     ctx->failure.sentence);
}

epic_result context_check(epic_context *ctx)
{
    epic_failure_info failure = {0};
    TRY(context_check_open(ctx));
    if (atomic_load_explicit(&ctx->broken, memory_order_acquire))
        return epic_fail((epic_result)ctx->failure.result, "%s", ctx->failure.sentence);
    return new_failure(ctx, &failure) ? context_break(ctx, &failure) : EPIC_OK;
}

static epic_result no_context(void)
{
    return epic_fail(EPIC_EINVAL, "ctx is NULL: must be a context from epic_open");
}

epic_result epic_check(epic_context *ctx)
{
    if (!ctx) return no_context();
    TRY(context_check(ctx));
    return context_on_device(ctx)
               ? backend_copy_error(ctx->backend,
                                    ctx->backend->ops->next_data_error(ctx->group))
               : EPIC_OK;
}

epic_result epic_failure_v1(const epic_context *ctx, epic_failure_info *out, size_t size)
{
    epic_failure_info info = {0};
    if (!ctx) return no_context();
    TRY(CHECK_PLACE(out, size));
    TRY(check_ours(ctx));
    if (atomic_load_explicit(&ctx->broken, memory_order_acquire))
        info = ctx->failure;
    else
        new_failure(ctx, &info);
    WRITE_SIZED(out, &info, size);
    return EPIC_OK;
}

static epic_result check_waits(const epic_context *ctx, uint32_t operation, epic_wait_info *out,
                               int32_t num_ranks, size_t size)
{
    if (!ctx) return no_context();
    TRY(CHECK_PLACE(out, size));
    TRY(check_ours(ctx));
    if (operation >= RECORDER_OPERATIONS)
        return epic_fail(EPIC_EINVAL,
                         "operation is %u: must be an epic_operation, or 0 for all", operation);
    if (num_ranks != ctx->num_ranks)
        return epic_fail(EPIC_EINVAL, "num_ranks is %d: must be %d, the ranks of the group",
                         num_ranks, ctx->num_ranks);
    return EPIC_OK;
}

/* Adds to infos[r] the time that this rank has waited for rank r in the operations from `first`
 * to `last`. The entries must be zero before. Host contexts read the times from the flight
 * recorder, CUDA contexts from the device. */
static epic_result add_waits(const epic_context *ctx, uint32_t first, uint32_t last,
                             epic_wait_info *infos)
{
    if (context_on_device(ctx))
        return backend_copy_error(
            ctx->backend, ctx->backend->ops->read_waits(ctx->group, first, last, infos));
    const recorder_page *page = recorder_get_page(ctx->recorder);
    if (!page)
        return epic_fail(
            EPIC_ENOTSUP,
            "ctx has no waiting times, because the system refused the memory of its "
            "flight recorder in epic_open; raise the limit on memory or open files");
    for (int32_t peer = 0; peer < ctx->num_ranks; peer++)
        for (uint32_t i = first; i <= last; i++)
            recorder_read_wait(page, ctx->num_ranks, i, peer, &infos[peer]);
    return EPIC_OK;
}

epic_result epic_waits_v1(const epic_context *ctx, uint32_t operation, epic_wait_info *out,
                          int32_t num_ranks, size_t size)
{
    epic_wait_info infos[EPIC_MAX_RANKS] = {{0}};
    TRY(check_waits(ctx, operation, out, num_ranks, size));
    TRY(add_waits(ctx, operation ? operation : EPIC_OP_NONE + 1,
                  operation ? operation : RECORDER_OPERATIONS - 1, infos));
    for (int32_t peer = 0; peer < num_ranks; peer++)
        sized_write((char *)out + (size_t)peer * size, &infos[peer], SIZED_TYPE(&infos[peer]),
                    size);
    return EPIC_OK;
}

void epic_abort(epic_context *ctx, uint64_t tag, const char *why)
{
    if (!ctx || context_check(ctx) != EPIC_OK) return;
    if (context_on_device(ctx)) {
        ctx->backend->ops->abort(ctx->group, tag, why);
        return;
    }
    char part[401]; /* the text `why`, shortened so that it fits into the error text */
    epic_failure_info failure = {.result = EPIC_EPEER,
                                 .tag = tag,
                                 .rank = ctx->rank,
                                 .num_culprits = 1,
                                 .culprits = {ctx->rank}};
    epic_fit_text(part, sizeof part, why ? why : "it gave no reason");
    snprintf(failure.sentence, sizeof failure.sentence, "rank %d aborted tag %llu: %s",
             ctx->rank, (unsigned long long)tag, part);
    ctx->backend->transport->break_group(ctx->group, &failure);
    context_check(ctx);
}

/* Combine can sum in two steps only on several hosts and without rank_of_expert (context.h).
 * Summing in two steps also needs relays (ranks that forward rows to the other ranks of their
 * host), which only the device backends with a network have. In an NVLink domain, ranks of
 * different hosts store directly into each other's memory, so there are no relays. */
bool context_relays(const epic_context *ctx, const int32_t *rank_of_expert)
{
    return ctx->backend->ops && ctx->backend->describe_net && ctx->num_hosts > 1 &&
           !rank_of_expert;
}

epic_result context_set_members(epic_context *ctx, const seat_set *members)
{
    const epic_backend *backend = ctx->backend;
    void (*set)(epic_group *, const seat_set *) =
        backend->ops ? backend->ops->set_members : backend->transport->set_members;
    seat_set all = {{0}};
    seat_set_add_all(&all, ctx->num_ranks);
    if (!seat_set_contains(&all, members) || !seat_set_has(members, ctx->rank))
        return epic_fail(EPIC_EINVAL,
                         "members has %d seats: it must contain rank %d, and only ranks below "
                         "num_ranks %d",
                         seat_set_count(members), ctx->rank, ctx->num_ranks);
    if (!set)
        return epic_fail(EPIC_ENOTSUP, "backend %s does not support vacant seats",
                         ctx->backend_name);
    set(ctx->group, members);
    ctx->members = *members;
    ctx->num_members = seat_set_count(members);
    return EPIC_OK;
}

int32_t epic_rank(const epic_context *ctx)
{
    return ctx ? ctx->rank : -1;
}

int32_t epic_num_ranks(const epic_context *ctx)
{
    return ctx ? ctx->num_ranks : 0;
}

const char *epic_backend_name(const epic_context *ctx)
{
    return ctx ? ctx->backend_name : "";
}

uint32_t epic_max_sms(const epic_context *ctx)
{
    if (!context_on_device(ctx) || !is_ours(ctx)) return 0;
    return ctx->backend->ops->max_sms(ctx->group);
}

int32_t epic_num_hosts(const epic_context *ctx)
{
    return ctx ? ctx->num_hosts : 0;
}

const char *epic_net_name(const epic_context *ctx)
{
    return ctx ? ctx->net : "";
}

uint64_t epic_context_bytes_sent(const epic_context *ctx)
{
    return atomic_load_explicit(&ctx->bytes_sent, memory_order_relaxed);
}
