/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and closes a context. epic_open runs three allgathers over all ranks: of the
 * configurations, of the chosen backends, and of the results of joining. If ranks on several
 * hosts request the backend gpu or p2p, it runs one more after the first: of the NVLink domains
 * of their GPUs. After each allgather, either all ranks return the same error, or all ranks
 * continue. See docs/internals/architecture.md. */
#include "context/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "api/config.h"
#include "api/rank_info.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/process.h"
#include "base/sized.h"
#include "exchange/windows.h"
#include "host_ops/host_ops.h"

/* Returns the host memory of a context in bytes: the struct, the table of tags, the flight
 * recorder and, for a host context (`host`), the trace and the exchanges. Does not include the
 * memory of the backend. */
static int64_t context_bytes(const epic_config *config, bool host)
{
    const int64_t recorder = (int64_t)recorder_bytes((int32_t)config->num_ranks);
    const int64_t own = (int64_t)sizeof(epic_context) + TAGS_BYTES + recorder;
    const int64_t trace = config_trace() ? TRACE_BYTES : 0;
    return host ? own + trace + config->max_in_flight * exchange_bytes(config) : own;
}

epic_result context_memory(epic_memory_info *out, const epic_config *config,
                           const epic_backend *backend)
{
    *out = (epic_memory_info){0};
    TRY(backend_copy_error(backend, backend->memory(config, out)));
    out->host_bytes += context_bytes(config, backend->transport != NULL);
    return EPIC_OK;
}

/* Implements epic_bootstrap.gather for a group of one rank: copies `mine` to element 0 of
 * `all`. */
static epic_result gather_alone(void *self, const void *mine, void *all, int64_t bytes)
{
    (void)self;
    memcpy(all, mine, bytes);
    return EPIC_OK;
}

static epic_result check_bootstrap(const epic_bootstrap *bootstrap)
{
    if (!bootstrap->gather)
        return epic_fail(EPIC_EINVAL, "bootstrap.gather is NULL: must be a function");
    if (bootstrap->num_ranks < 1 || bootstrap->num_ranks > EPIC_MAX_RANKS)
        return epic_fail(EPIC_EINVAL, "bootstrap.num_ranks is %d: must be 1 to %d",
                         bootstrap->num_ranks, EPIC_MAX_RANKS);
    if (bootstrap->rank < 0 || bootstrap->rank >= bootstrap->num_ranks)
        return epic_fail(EPIC_EINVAL, "bootstrap.rank is %d: must be 0 to num_ranks - 1 = %d",
                         bootstrap->rank, bootstrap->num_ranks - 1);
    return EPIC_OK;
}

/* Checks that config.num_ranks, if set, equals the bootstrap's number of ranks. If the numbers
 * differ, open_with() sends the error to all ranks in the first allgather. */
static epic_result check_num_ranks(uint32_t num_ranks, const epic_bootstrap *bootstrap)
{
    if (num_ranks == 0 || num_ranks == (uint32_t)bootstrap->num_ranks) return EPIC_OK;
    return epic_fail(bootstrap->num_ranks > 1 ? EPIC_EMISMATCH : EPIC_EINVAL,
                     "config.num_ranks is %u, the bootstrap has %d ranks: must be equal, or 0",
                     num_ranks, bootstrap->num_ranks);
}

/* Chooses the backend that the config names. If the config names no backend, chooses the first
 * backend in epic_backends that supports config->flags and can join these ranks. If there is
 * none, chooses mpi. If mpi cannot join the ranks either, the error text lists the reason of
 * each backend. */
static epic_result choose_backend(const epic_backend **out, const epic_peer *peers,
                                  int num_hosts, const epic_config *config)
{
    char why[256] = "", reasons[1024] = "";
    const int num_ranks = (int)config->num_ranks;
    const bool is_near = num_hosts == 1 || peers_share_domain(peers, num_ranks);
    const char *name = backend_resolve_name(config->backend, is_near);
    if (name) {
        TRY(backend_find(out, name, num_ranks, config->flags));
        if ((*out)->can_join(peers, num_ranks, config, why)) return EPIC_OK;
        return epic_fail(EPIC_ENOTSUP, "backend \"%s\" cannot join these ranks: %s", name, why);
    }
    for (int i = 0; epic_backends[i]; i++) {
        *out = epic_backends[i];
        if (!backend_supports(*out, config->flags))
            strcpy(why, "does not support EPIC_CAN_REGROUP");
        else if ((*out)->can_join(peers, num_ranks, config, why))
            return EPIC_OK;
        const size_t used = strlen(reasons);
        snprintf(reasons + used, sizeof reasons - used, "%s%s: %s", used ? "; " : "",
                 epic_backends[i]->name, why);
    }
    const bool loaded = backend_find(out, "mpi", num_ranks, config->flags) == EPIC_OK;
    if (loaded && (*out)->can_join(peers, num_ranks, config, why)) return EPIC_OK;
    if (!loaded) epic_fit_text(why, sizeof why, epic_sentence());
    return epic_fail(
        EPIC_ENOTSUP,
        "no backend joins these ranks: %s; %s%s; on GPUs config.backend \"gpu\" does", reasons,
        loaded ? "mpi: " : "", why);
}

/* Calls a bootstrap's gather function, which may be a function of the user, and checks its
 * results: the return value must be an epic_result, and element `rank` of `all` must equal
 * `mine`. If gather fails without an error text, writes an error text. On success, restores
 * this thread's previous error text. */
static epic_result gather_checked(void *self, const void *mine, void *all, int64_t bytes)
{
    const epic_bootstrap *bootstrap = self;
    char before[512];
    snprintf(before, sizeof before, "%s", epic_sentence());
    epic_fail(EPIC_OK, "%s", "");
    epic_result result = bootstrap->gather(bootstrap->self, mine, all, bytes);
    const int code = (int)result;
    if (!epic_is_result(code)) result = EPIC_EPEER;
    if (result != EPIC_OK && *epic_sentence()) return result;
    if (result != EPIC_OK)
        return epic_fail(result, "open: bootstrap.gather failed on rank %d with %s (%d)",
                         bootstrap->rank, epic_result_name((epic_result)code), code);
    if (memcmp((char *)all + (size_t)bootstrap->rank * bytes, mine, bytes) != 0)
        return epic_fail(
            EPIC_EPEER,
            "open: bootstrap.gather did not store the bytes of rank %d in their place: it "
            "must store those of all ranks, in rank order",
            bootstrap->rank);
    return epic_fail(EPIC_OK, "%s", before);
}

/* Returns a bootstrap whose gather function is gather_checked() of `bootstrap`. The result
 * points to `bootstrap`. Requires that `bootstrap` lives at least as long as the result. */
static epic_bootstrap wrap_bootstrap(const epic_bootstrap *bootstrap)
{
    return (epic_bootstrap){bootstrap->rank, bootstrap->num_ranks, gather_checked, NULL,
                            (void *)(uintptr_t)bootstrap};
}

/* Gathers the results of all ranks. If any result is an error, all ranks return the same error,
 * so epic_open succeeds either on all ranks or on no rank. */
static epic_result agree_on_result(const epic_bootstrap *bootstrap, rank_info *mine,
                                   rank_info *all, epic_result result)
{
    mine->refused = result;
    epic_fit_text(mine->sentence, sizeof mine->sentence,
                  result == EPIC_OK ? "" : epic_sentence());
    TRY(bootstrap->gather(bootstrap->self, mine, all, sizeof *mine));
    return rank_info_compare(all, bootstrap->num_ranks);
}

static int32_t count_hosts(const epic_peer *peers, int num_ranks)
{
    int32_t hosts = 0;
    for (int r = 0; r < num_ranks; r++) {
        int q = 0;
        while (memcmp(peers[q].host, peers[r].host, sizeof peers[r].host) != 0) q++;
        hosts += q == r; /* adds 1 if r is the first rank on its host */
    }
    return hosts;
}

/* If the ranks are on several hosts and request the backend gpu or p2p, gathers the NVLink
 * domains of their GPUs. All ranks have the same configuration, so all or none call gather. */
static epic_result gather_domains(const epic_context *ctx, const epic_bootstrap *bootstrap,
                                  rank_info *mine, rank_info *all, epic_peer *peers)
{
    const epic_backend *p2p;
    const char *name = ctx->config.backend;
    if (ctx->num_hosts == 1 || !name || (strcmp(name, "gpu") != 0 && strcmp(name, "p2p") != 0))
        return EPIC_OK;
    if (backend_find(&p2p, "p2p", ctx->num_ranks, ctx->config.flags) == EPIC_OK &&
        p2p->identify)
        p2p->identify(&mine->peer);
    TRY(agree_on_result(bootstrap, mine, all, EPIC_OK));
    for (int r = 0; r < ctx->num_ranks; r++) peers[r] = all[r].peer;
    return EPIC_OK;
}

/* Chooses a backend and checks that it supports the configuration. Then gathers the choices of
 * all ranks and checks that they are equal. Without this allgather, a rank whose host has not
 * installed a plugin would fail alone, and all other ranks would wait for it in
 * epic_backend.join. */
static epic_result agree_on_backend(const epic_backend **out, const epic_context *ctx,
                                    const epic_bootstrap *bootstrap, rank_info *mine,
                                    rank_info *all, const epic_peer *peers)
{
    epic_memory_info memory;
    epic_result found = choose_backend(out, peers, ctx->num_hosts, &ctx->config);
    if (found == EPIC_OK) found = context_memory(&memory, &ctx->config, *out);
    if (found == EPIC_OK) snprintf(mine->backend, sizeof mine->backend, "%s", (*out)->name);
    return agree_on_result(bootstrap, mine, all, found);
}

static epic_sm_budget sm_budget = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static epic_result join_group(epic_context *ctx, const epic_backend *backend,
                              const epic_bootstrap *bootstrap, const epic_peer *peers)
{
    const epic_join how = {.bootstrap = bootstrap,
                           .config = &ctx->config,
                           .peers = peers,
                           .group_id = ctx->group_id,
                           .sm_budget = &sm_budget};
    TRY(backend_copy_error(backend, backend->join(&ctx->group, &how)));
    ctx->backend = backend;
    return EPIC_OK;
}

/* Opens the trace file if EPIC_TRACE is set. Returns EPIC_ENOTSUP for a device context, because
 * its expert ids are in device memory, where the trace writer cannot read them. */
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

/* Sets up the parts of a context that its backend does not own: flight recorder, trace, table
 * of tags and, in a host context, exchanges. */
static epic_result set_up_context(epic_context *ctx)
{
    snprintf(ctx->backend_name, sizeof ctx->backend_name, "%s", ctx->backend->name);
    ctx->config.backend = ctx->backend_name;
    ctx->checks_weights = config_checks_weights();
    if (ctx->backend->describe_net)
        ctx->backend->describe_net(ctx->group, ctx->net, sizeof ctx->net);
    recorder_open(&ctx->recorder, ctx->name, ctx->group_id, ctx->rank, ctx->num_ranks,
                  ctx->backend_name, ctx->net);
    if (ctx->backend->ops)
        ctx->backend->ops->record_waits(ctx->group, recorder_get_page(ctx->recorder));
    TRY(start_trace(ctx));
    TRY(tags_open(&ctx->tags, ctx->config.max_in_flight));
    return ctx->backend->transport ? exchange_open_all(ctx) : EPIC_OK;
}

static bool is_ours(const epic_context *ctx)
{
    return ctx->generation == process_generation();
}

/* Releases everything that a context holds. In a forked child, releases only the copies of the
 * child, because its parent continues to use the group. */
static void release_context(epic_context *ctx)
{
    const bool ours = is_ours(ctx);
    exchange_close_all(ctx);
    tags_close(&ctx->tags);
    free(ctx->decision);
    ctx->decision = NULL;
    if (ctx->backend) windows_close(ctx, ours);
    if (ctx->backend && ours) ctx->backend->leave(ctx->group);
    if (ctx->backend && !ours && ctx->backend->forget) ctx->backend->forget(ctx->group);
    ctx->backend = NULL;
    /* close the recorder only now, because a thread of the backend may write to the recorder
     * until this rank has left the group */
    (ours ? recorder_close : recorder_forget)(ctx->recorder);
    ctx->recorder = NULL;
    trace_close(ctx->trace);
    ctx->trace = NULL;
}

/* Opens a group. The ranks first compare their configurations, then their choices of a backend,
 * then their results of joining. Each of these three parts ends with an allgather. `num_ranks`
 * is the caller's config.num_ranks. `all` and `peers` have one element per rank. */
static epic_result open_with(epic_context *ctx, const epic_bootstrap *bootstrap, rank_info *all,
                             epic_peer *peers, uint32_t num_ranks)
{
    rank_info mine;
    const epic_backend *backend;
    epic_result own = rank_info_fill(&mine, bootstrap, &ctx->config);
    if (own == EPIC_OK) own = check_num_ranks(num_ranks, bootstrap);
    TRY(agree_on_result(bootstrap, &mine, all, own));
    for (int r = 0; r < bootstrap->num_ranks; r++) {
        peers[r] = all[r].peer;
        ctx->group_id = hash_join(ctx->group_id, all[r].random);
    }
    ctx->num_hosts = count_hosts(peers, bootstrap->num_ranks);
    TRY(gather_domains(ctx, bootstrap, &mine, all, peers));
    TRY(agree_on_backend(&backend, ctx, bootstrap, &mine, all, peers));
    epic_result result = join_group(ctx, backend, bootstrap, peers);
    if (result == EPIC_OK) result = set_up_context(ctx);
    result = agree_on_result(bootstrap, &mine, all, result);
    if (result != EPIC_OK) release_context(ctx);
    return result;
}

/* Allocates the arrays with a rank_info and an epic_peer for each rank, and opens the group. */
static epic_result open_bootstrap(epic_context *ctx, const epic_bootstrap *bootstrap)
{
    TRY(check_bootstrap(bootstrap));
    const uint32_t wished = ctx->config.num_ranks;
    snprintf(ctx->name, sizeof ctx->name, "%s", ctx->config.name);
    ctx->config.name = ctx->name;
    ctx->config.num_ranks = (uint32_t)bootstrap->num_ranks;
    ctx->rank = bootstrap->rank;
    ctx->num_ranks = ctx->num_members = bootstrap->num_ranks;
    seat_set_add_all(&ctx->members, ctx->num_ranks);
    const size_t ranks = (size_t)bootstrap->num_ranks;
    rank_info *all = calloc(ranks, sizeof *all);
    epic_peer *peers = calloc(ranks, sizeof *peers);
    const epic_bootstrap asked = wrap_bootstrap(bootstrap);
    const epic_result result = all && peers
                                   ? open_with(ctx, &asked, all, peers, wished)
                                   : epic_fail(EPIC_ENOMEM, "no memory for %zu ranks", ranks);
    free(peers);
    free(all);
    return result;
}

/* Creates a bootstrap for a caller that passed no bootstrap: from the MPI communicator
 * config->native if it is set, and from the environment if not. Fails if the environment
 * describes no job. Opening a group of one rank instead would be wrong: each process of a job
 * would silently get a group of its own. */
static epic_result make_default_bootstrap(epic_bootstrap *out, const epic_config *config)
{
    return config->native ? epic_bootstrap_mpi(out, config->native, config->timeout_ms)
                          : epic_bootstrap_env(out);
}

/* Reads the config, makes a bootstrap if the caller passed none, and opens the group. */
static epic_result open_context(epic_context *ctx, const epic_bootstrap *bootstrap,
                                const epic_config *config, size_t size)
{
    epic_bootstrap own = {0};
    TRY(config_read(&ctx->config, config, size));
    if (bootstrap)
        own = *bootstrap;
    else
        TRY(make_default_bootstrap(&own, &ctx->config));
    if (own.num_ranks == 1 && !own.gather) own.gather = gather_alone;
    const epic_result result = open_bootstrap(ctx, &own);
    if (!bootstrap) epic_bootstrap_close(&own);
    return result;
}

epic_result epic_open_v1(epic_context **out, const epic_bootstrap *bootstrap,
                         const epic_config *config, size_t size)
{
    if (!out) return epic_fail(EPIC_EINVAL, "out is NULL: must point to a context pointer");
    epic_context *ctx = *out = calloc(1, sizeof *ctx);
    if (!ctx) return epic_fail(EPIC_ENOMEM, "no memory for a context");
    ctx->pid = getpid();
    ctx->generation = process_generation();
    pthread_mutex_init(&ctx->mutex, NULL);
    const epic_result result = process_count_forks()
                                   ? open_context(ctx, bootstrap, config, size)
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
    release_context(ctx);
    pthread_mutex_destroy(&ctx->mutex);
    free(ctx);
}
