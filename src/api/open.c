/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a context. */
#include "context/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "api/config.h"
#include "api/device.h"
#include "api/hello.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/process.h"
#include "base/sized.h"
#include "exchange/exchange.h"
#include "steps/steps.h"

int64_t context_bytes(const epic_config *config, bool host)
{
    const int64_t own = sizeof(epic_context) + TAGS_BYTES + sizeof(recorder_page);
    const int64_t trace = config_trace() ? TRACE_BYTES : 0;
    return host ? own + trace + config->max_in_flight * exchange_bytes(config) : own;
}

/* --------------------------------------------------------------------------- opening ---- */

static epic_result gather_alone(void *self, const void *mine, void *all, int64_t bytes)
{
    (void)self;
    memcpy(all, mine, bytes);
    return EPIC_OK;
}

static epic_result check_meet(const epic_meet *meet)
{
    if (!meet->gather)
        return epic_fail(EPIC_EINVAL, "meet.gather is NULL: a callback is needed");
    if (meet->num_ranks < 1 || meet->num_ranks > EPIC_MAX_RANKS)
        return epic_fail(EPIC_EINVAL, "meet.num_ranks is %d: 1 to %d are possible",
                         meet->num_ranks, EPIC_MAX_RANKS);
    if (meet->rank < 0 || meet->rank >= meet->num_ranks)
        return epic_fail(EPIC_EINVAL, "meet.rank is %d: 0 to num_ranks - 1 = %d are possible",
                         meet->rank, meet->num_ranks - 1);
    return EPIC_OK;
}

/* Has the meeting as many ranks as the caller's config says?  Told to all ranks. */
static epic_result check_num_ranks(uint32_t num_ranks, const epic_meet *meet)
{
    if (num_ranks == 0 || num_ranks == (uint32_t)meet->num_ranks) return EPIC_OK;
    return epic_fail(meet->num_ranks > 1 ? EPIC_EMISMATCH : EPIC_EINVAL,
                     "config.num_ranks is %u, the meeting has %d ranks; give the same, or 0",
                     num_ranks, meet->num_ranks);
}

/* The backend asked for, or the first that can join; mpi is tried last. */
static epic_result choose(const epic_backend **out, const epic_peer *peers, int num_hosts,
                          const epic_config *config)
{
    char why[256] = "", reasons[1024] = "";
    const char *name = backend_meant(config->backend, num_hosts);
    if (name) {
        TRY(backend_find(out, name));
        if ((*out)->can_join(peers, (int)config->num_ranks, config, why)) return EPIC_OK;
        return epic_fail(EPIC_ENOTSUP, "backend \"%s\" cannot join these ranks: %s", name, why);
    }
    for (int i = 0; epic_backends[i]; i++) {
        *out = epic_backends[i];
        if ((*out)->can_join(peers, (int)config->num_ranks, config, why)) return EPIC_OK;
        const size_t used = strlen(reasons);
        snprintf(reasons + used, sizeof reasons - used, "%s%s: %s", used ? "; " : "",
                 epic_backends[i]->name, why);
    }
    const bool loaded = backend_find(out, "mpi") == EPIC_OK;
    if (loaded && (*out)->can_join(peers, (int)config->num_ranks, config, why)) return EPIC_OK;
    if (!loaded) epic_fit(why, sizeof why, epic_sentence());
    return epic_fail(
        EPIC_ENOTSUP,
        "no backend joins these ranks: %s; %s%s; on GPUs config.backend \"gpu\" does", reasons,
        loaded ? "mpi: " : "", why);
}

/* A meeting may be the caller's own.  What it returns is checked, for core and backends alike:
 * a result that is one, a sentence (a caller's own says nothing to epic_error), and our bytes in
 * our place.  A sentence from before stays, unless the meeting fails. */
static epic_result gather_checked(void *self, const void *mine, void *all, int64_t bytes)
{
    const epic_meet *meet = self;
    char before[512];
    snprintf(before, sizeof before, "%s", epic_sentence());
    epic_fail(EPIC_OK, "%s", "");
    epic_result result = meet->gather(meet->self, mine, all, bytes);
    const int code = (int)result;
    if (code < EPIC_OK || code > EPIC_ECLOSED) result = EPIC_EPEER;
    if (result != EPIC_OK && *epic_sentence()) return result;
    if (result != EPIC_OK)
        return epic_fail(result, "open: meet.gather failed on rank %d with %s (%d)", meet->rank,
                         epic_result_name((epic_result)code), code);
    if (memcmp((char *)all + (size_t)meet->rank * bytes, mine, bytes) != 0)
        return epic_fail(
            EPIC_EPEER,
            "open: meet.gather did not leave the bytes of rank %d in its place: it "
            "must give those of all ranks, in rank order",
            meet->rank);
    return epic_fail(EPIC_OK, "%s", before);
}

static epic_meet checked(const epic_meet *meet)
{
    return (epic_meet){meet->rank, meet->num_ranks, gather_checked, NULL,
                       (void *)(uintptr_t)meet};
}

/* Tells all ranks how this one fared: open succeeds everywhere or nowhere. */
static epic_result agree(const epic_meet *meet, hello *mine, hello *all, epic_result result)
{
    mine->refused = result;
    epic_fit(mine->sentence, sizeof mine->sentence, result == EPIC_OK ? "" : epic_sentence());
    TRY(meet->gather(meet->self, mine, all, sizeof *mine));
    return hello_compare(all, meet->num_ranks);
}

static int32_t count_hosts(const epic_peer *peers, int num_ranks)
{
    int32_t hosts = 0;
    for (int r = 0; r < num_ranks; r++) {
        int q = 0;
        while (memcmp(peers[q].host, peers[r].host, sizeof peers[r].host) != 0) q++;
        hosts += q == r; /* the first one there */
    }
    return hosts;
}

/* Joining is collective, so nobody begins before all have found the same backend: a library may
 * be missing on one host only. */
static epic_result find(const epic_backend **out, const epic_context *ctx,
                        const epic_meet *meet, hello *mine, hello *all, const epic_peer *peers)
{
    const epic_result found = choose(out, peers, ctx->num_hosts, &ctx->config);
    if (found == EPIC_OK) snprintf(mine->backend, sizeof mine->backend, "%s", (*out)->name);
    return agree(meet, mine, all, found);
}

static epic_result join(epic_context *ctx, const epic_backend *backend, const epic_meet *meet,
                        const epic_peer *peers)
{
    const epic_join how = {
        .meet = meet, .config = &ctx->config, .peers = peers, .group_id = ctx->group_id};
    TRY(backend_said(backend, backend->join(&ctx->group, &how)));
    ctx->backend = backend;
    return EPIC_OK;
}

/* On device contexts ids lie where the host does not see them: to say so is better than a trace
 * that is not there. */
static epic_result start_trace(epic_context *ctx)
{
    const char *folder = config_trace();
    if (!folder) return EPIC_OK;
    if (!ctx->backend->transport)
        return epic_fail(EPIC_ENOTSUP,
                         "EPIC_TRACE is \"%.200s\": backend \"%s\" records nothing, its ids "
                         "lie on the GPU; unset it, and save topk_idx as .npy",
                         folder, ctx->backend_name);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    trace_header header = {.magic = {TRACE_MAGIC},
                           .version = TRACE_VERSION,
                           .header_bytes = sizeof header,
                           .rank = ctx->rank,
                           .num_ranks = ctx->num_ranks,
                           .group_id = ctx->group_id,
                           .opened_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec};
    snprintf(header.name, sizeof header.name, "%s", ctx->name);
    TRY(trace_open(&ctx->trace, folder, &header));
    recorder_trace(ctx->recorder, ctx->trace);
    return EPIC_OK;
}

static epic_result prepare(epic_context *ctx)
{
    snprintf(ctx->backend_name, sizeof ctx->backend_name, "%s", ctx->backend->name);
    ctx->config.backend = ctx->backend_name;
    ctx->steps = ctx->backend->steps ? &device_steps : &host_steps;
    ctx->checks_weights = config_checks_weights();
    if (ctx->backend->say) ctx->backend->say(ctx->group, ctx->wire, sizeof ctx->wire);
    recorder_open(&ctx->recorder, ctx->name, ctx->group_id, ctx->rank, ctx->num_ranks,
                  ctx->backend_name, ctx->wire);
    TRY(start_trace(ctx));
    TRY(tags_open(&ctx->tags, ctx->config.max_in_flight));
    return ctx->backend->transport ? exchanges_open(ctx) : EPIC_OK;
}

static bool is_ours(const epic_context *ctx)
{
    return ctx->generation == process_generation();
}

static void give_back(epic_context *ctx)
{
    const bool ours = is_ours(ctx);
    exchanges_close(ctx);
    tags_close(&ctx->tags);
    (ours ? recorder_close : recorder_forget)(ctx->recorder);
    ctx->recorder = NULL;
    trace_close(ctx->trace);
    ctx->trace = NULL;
    if (ctx->backend && ours) ctx->backend->leave(ctx->group);
    if (ctx->backend && !ours && ctx->backend->forget) ctx->backend->forget(ctx->group);
    ctx->backend = NULL;
}

static epic_result open_with(epic_context *ctx, const epic_meet *meet, hello *all,
                             epic_peer *peers, uint32_t num_ranks)
{
    hello mine;
    const epic_backend *backend;
    epic_result own = hello_fill(&mine, meet, &ctx->config);
    if (own == EPIC_OK) own = check_num_ranks(num_ranks, meet);
    TRY(agree(meet, &mine, all, own));
    for (int r = 0; r < meet->num_ranks; r++) {
        peers[r] = all[r].peer;
        ctx->group_id = hash_join(ctx->group_id, all[r].random);
    }
    ctx->num_hosts = count_hosts(peers, meet->num_ranks);
    TRY(find(&backend, ctx, meet, &mine, all, peers));
    epic_result result = join(ctx, backend, meet, peers);
    if (result == EPIC_OK) result = prepare(ctx);
    result = agree(meet, &mine, all, result);
    if (result != EPIC_OK) give_back(ctx);
    return result;
}

static epic_result open_meeting(epic_context *ctx, const epic_meet *meet)
{
    TRY(check_meet(meet));
    const uint32_t wished = ctx->config.num_ranks;
    snprintf(ctx->name, sizeof ctx->name, "%s", ctx->config.name);
    ctx->config.name = ctx->name;
    ctx->config.num_ranks = (uint32_t)meet->num_ranks;
    ctx->rank = meet->rank;
    ctx->num_ranks = meet->num_ranks;
    const size_t ranks = (size_t)meet->num_ranks;
    hello *all = calloc(ranks, sizeof *all);
    epic_peer *peers = calloc(ranks, sizeof *peers);
    const epic_meet asked = checked(meet);
    const epic_result result = all && peers
                                   ? open_with(ctx, &asked, all, peers, wished)
                                   : epic_fail(EPIC_ENOMEM, "no memory for %zu ranks", ranks);
    free(peers);
    free(all);
    return result;
}

/* Without a meeting the communicator is one, or the environment says who meets: a job of several
 * processes must not become as many groups of one. */
static epic_result meet_somehow(epic_meet *out, const epic_config *config)
{
    return config->native ? epic_meet_mpi(out, config->native, config->timeout_ms)
                          : epic_meet_env(out);
}

static epic_result open_context(epic_context *ctx, const epic_meet *meet,
                                const epic_config *config, size_t size)
{
    epic_meet own = {0};
    TRY(config_read(&ctx->config, config, size));
    if (meet)
        own = *meet;
    else
        TRY(meet_somehow(&own, &ctx->config));
    if (own.num_ranks == 1 && !own.gather) own.gather = gather_alone;
    const epic_result result = open_meeting(ctx, &own);
    if (!meet) epic_meet_close(&own);
    return result;
}

epic_result epic_open_v1(epic_context **out, const epic_meet *meet, const epic_config *config,
                         size_t size)
{
    if (!out) return epic_fail(EPIC_EINVAL, "out is NULL: a place for the context is needed");
    epic_context *ctx = *out = calloc(1, sizeof *ctx);
    if (!ctx) return epic_fail(EPIC_ENOMEM, "no memory for a context");
    ctx->pid = getpid();
    ctx->generation = process_generation();
    pthread_mutex_init(&ctx->mutex, NULL);
    const epic_result result = process_count_forks()
                                   ? open_context(ctx, meet, config, size)
                                   : epic_fail(EPIC_ENOMEM, "no memory to notice forks");
    if (result == EPIC_OK) return EPIC_OK;
    epic_failure_info failure = {
        .result = (uint32_t)result, .operation = EPIC_OP_OPEN, .rank = ctx->rank};
    snprintf(failure.sentence, sizeof failure.sentence, "%s", epic_sentence());
    return context_break(ctx, &failure);
}

void epic_close(epic_context *ctx)
{
    if (!ctx) return;
    give_back(ctx);
    pthread_mutex_destroy(&ctx->mutex);
    free(ctx);
}
