/* SPDX-License-Identifier: Apache-2.0 */
/* Joins and leaves a group. When joining, every rank allocates a heap, sends its handle through
 * the bootstrap, and maps the heaps of its peers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/p2p/fabric.h"
#include "backend/p2p/mailbox.h"
#include "base/deadline.h"
#include "base/error.h"
#include "net/liveness.h"

#define LEAVE_NAP_NS 200000

/* The data that a rank sends to all ranks through the bootstrap. */
typedef struct join_handle {
    uint32_t result; /* EPIC_OK, or the first error of this rank */
    p2p_gpu gpu;
    int32_t alive_fd; /* alive.fd of this rank (base/alive.h) */
    p2p_heap_handle heap_handle;
    char sentence[256];
    /* handle of net_liveness_listen(); zeros if all ranks are on one host */
    _Alignas(8) unsigned char liveness[NET_LIVENESS_HANDLE_BYTES];
} join_handle;

/* Returns true if the group does not have EPIC_CAN_REGROUP, or if all its ranks are on one
 * host. Otherwise writes the reason to `why`. Several hosts are not supported, because a host
 * that cannot be reached may still run. */
static bool may_regroup(const epic_peer *peers, int num_ranks, const epic_config *config,
                        char *why)
{
    if (!(config->flags & EPIC_CAN_REGROUP)) return true;
    for (int q = 1; q < num_ranks; q++) {
        if (p2p_same(peers[q].host, peers[0].host)) continue;
        snprintf(
            why, 256,
            "config.flags is EPIC_CAN_REGROUP: must be 0 for ranks on several hosts; ranks 0 "
            "and %d are on different hosts",
            q);
        return false;
    }
    return true;
}

/* Implements epic_backend.can_join: all ranks must be on one host or in one NVLink domain. */
static bool p2p_can_join(const epic_peer *peers, int num_ranks, const epic_config *config,
                         char *why)
{
    return p2p_any_device(why) && may_regroup(peers, num_ranks, config, why) &&
           p2p_fabric_joins(peers, num_ranks, why) && p2p_share_library(peers, num_ranks, why);
}

static epic_result make_heap(epic_group *g)
{
    const int64_t bytes = p2p_heap_bytes(&g->self.at) + p2p_mailbox_bytes(g->num_ranks);
    uint8_t *heap = NULL;
    TRY(p2p_heap_allocate(g, bytes, &heap));
    g->self.heap[g->rank] = heap;
    TRY(p2p_mailbox_clear(g));
    return p2p_heap_clear(g, heap);
}

/* Prepares the connections that show the death of ranks of other hosts; connect_liveness()
 * opens them. Ranks of this host need none, because the watcher watches their processes. */
static epic_result listen_for_liveness(epic_group *g, join_handle *mine)
{
    net_liveness_setup setup = {.host = g->rank,
                                .num_hosts = g->num_ranks,
                                .ranks_per_host = 1,
                                .timeout_ms = g->config.timeout_ms,
                                .group_id = g->self.group_id};
    for (int q = 0; q < g->num_ranks; q++)
        setup.is_local[q] = p2p_same(g->peers[q].host, g->peers[g->rank].host);
    return net_liveness_listen(&g->liveness, &setup, mine->liveness);
}

static epic_result connect_liveness(epic_group *g, const join_handle *handles)
{
    unsigned char all[DEVICE_MAX_RANKS][NET_LIVENESS_HANDLE_BYTES];
    for (int q = 0; q < g->num_ranks; q++)
        memcpy(all[q], handles[q].liveness, NET_LIVENESS_HANDLE_BYTES);
    return net_liveness_connect(g->liveness, all);
}

/* Creates the parts of the group that need no peer: device, heap, kernels, and handles. */
static epic_result make_own_part(epic_group *g, join_handle *mine)
{
    TRY(p2p_group_device(g, &mine->gpu));
    TRY(make_heap(g));
    TRY(p2p_load(g));
    alive_create(&g->alive, g->self.group_id, g->rank);
    mine->alive_fd = g->alive.fd;
    TRY(p2p_heap_export(g, g->self.heap[g->rank], &mine->heap_handle));
    return p2p_spans_hosts(g) ? listen_for_liveness(g, mine) : EPIC_OK;
}

/* Returns the error that a rank has sent in its handle, or EPIC_OK. First checks the values of
 * the handle, because any program that can connect to the bootstrap may have sent it. */
static epic_result check_join_handle(const join_handle *c, int rank)
{
    if (!epic_is_result(c->result) || !p2p_gpu_fits(&c->gpu) ||
        !memchr(c->sentence, 0, sizeof c->sentence))
        return epic_fail(
            EPIC_EPEER,
            "backend p2p: what the bootstrap returned for rank %d was not written by "
            "EPIC",
            rank);
    if (c->result == EPIC_OK) return EPIC_OK;
    return epic_fail((epic_result)c->result, "rank %d: %s", rank, c->sentence);
}

/* Checks all handles, reserves SMs, connects the heaps, and starts the watcher thread. */
static epic_result connect_peers(epic_group *g, const join_handle *handles)
{
    p2p_gpu gpus[DEVICE_MAX_RANKS];
    int alive_fds[DEVICE_MAX_RANKS];
    p2p_heap_handle heaps[DEVICE_MAX_RANKS];
    for (int q = 0; q < g->num_ranks; q++) TRY(check_join_handle(&handles[q], q));
    for (int q = 0; q < g->num_ranks; q++) {
        gpus[q] = handles[q].gpu;
        heaps[q] = handles[q].heap_handle;
        alive_fds[q] = handles[q].alive_fd;
    }
    /* In this order: other ranks wait for the liveness connection of this rank, or, on one host,
     * for the descriptor of its heap. */
    if (g->liveness) TRY(connect_liveness(g, handles));
    TRY(p2p_heap_connect(g, heaps));
    TRY(p2p_budget_share(g, gpus));
    return p2p_watch_open(g, alive_fds);
}

/* Implements p2p_hooks.write. A copy engine of the GPU copies the bytes, so the copies make
 * progress while kernels occupy all SMs. */
static void write_to_ranks(epic_group *g, const seat_set *ranks, int64_t at, const void *bytes,
                           size_t count)
{
    for (int q = 0; q < g->num_ranks; q++)
        if (seat_set_has(ranks, q))
            (void)cudaMemcpyAsync(g->self.heap[q] + at, bytes, count, cudaMemcpyDefault,
                                  g->side);
    (void)cudaStreamSynchronize(g->side);
}

/* Implements p2p_hooks.wake. Does nothing: backend p2p has no proxy thread, because its kernels
 * store directly into the memory of peers. */
static void skip_wake(const epic_group *g)
{
    (void)g;
}

static const p2p_hooks hooks = {.write = write_to_ranks, .wake = skip_wake};

/* Frees a group that this rank leaves or has failed to join. */
static void release_group(epic_group *g)
{
    p2p_watch_close(g);
    alive_free(&g->alive);
    net_liveness_close(g->liveness);
    p2p_free_windows(g);
    p2p_heap_disconnect(g);
    p2p_heap_free(g, g->self.heap[g->rank]);
    p2p_group_free(g);
}

/* Implements epic_backend.join. A rank that has failed still takes part in the gather. So the
 * other ranks return the error of this rank and do not wait for it. */
static epic_result p2p_join(epic_group **out, const epic_join *join)
{
    epic_group *g = p2p_group_new(join, &hooks);
    join_handle mine = {0}, handles[DEVICE_MAX_RANKS];
    mine.result = g ? (uint32_t)make_own_part(g, &mine) : EPIC_ENOMEM;
    if (mine.result != EPIC_OK)
        snprintf(mine.sentence, sizeof mine.sentence, "%.255s",
                 g ? epic_error(NULL) : "no host memory");
    epic_result result =
        join->bootstrap->gather
            ? join->bootstrap->gather(join->bootstrap->self, &mine, handles, sizeof mine)
            : EPIC_OK;
    if (!join->bootstrap->gather) handles[0] = mine;
    if (!g) return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    if (result == EPIC_OK) result = connect_peers(g, handles);
    if (result == EPIC_OK)
        *out = g;
    else
        release_group(g);
    return result;
}

/* Returns whether a peer may still write into this rank's heap. `gone` is the result of
 * p2p_gone(). A peer that has left the group may still write if the other ranks have continued
 * without it. If such a peer is in another process, this rank need not wait for it, because the
 * peer's mapping keeps the memory alive. */
static bool may_write(const epic_group *g, int peer, const uint64_t *gone)
{
    const bool is_here = p2p_same(g->peers[peer].process, g->peers[g->rank].process);
    const bool has_closed =
        g->liveness && net_liveness_state(g->liveness, peer) == NET_PEER_CLOSED;
    return peer != g->rank && !gone[peer] && !p2p_is_dead(g, peer) && !has_closed &&
           !p2p_has_released(g, peer) && (is_here || !p2p_is_vacant(g, peer));
}

/* Returns true if no peer for which this rank must wait can still write into this rank's heap,
 * or if p2p_gone() fails. */
static bool all_gone(epic_group *g)
{
    const uint64_t *gone = p2p_gone(g);
    for (int q = 0; gone && q < g->num_ranks; q++)
        if (may_write(g, q, gone)) return false;
    return true;
}

/* Announces to every living member that this rank has closed: writes the number of this rank's
 * last operation (its epoch) into this rank's element of the array `gone` in the member's
 * heap. */
static void announce_close(epic_group *g)
{
    const seat_set ranks = p2p_ranks_with_heaps(g);
    *g->word = P2P_GONE((uint64_t)p2p_epoch(g));
    write_to_ranks(g, &ranks, g->self.at.gone + 8 * g->rank, g->word, sizeof *g->word);
}

/* Implements epic_backend.leave. Announces to all peers that this rank closes. Waits until
 * every peer has closed or died, but not longer than the timeout, because a peer that has not
 * closed may write into this rank's heap. Frees the heap last. */
static void p2p_leave(epic_group *g)
{
    int device = -1;
    (void)cudaGetDevice(&device);
    (void)cudaSetDevice(g->device);
    if (g->ranks_here == 1) (void)cudaDeviceSynchronize();
    announce_close(g);
    deadline end = deadline_begin_ms(g->config.timeout_ms);
    while (!all_gone(g) && !deadline_before_nap(&end, LEAVE_NAP_NS))
        nanosleep(&(struct timespec){.tv_nsec = LEAVE_NAP_NS}, NULL);
    release_group(g);
    if (device >= 0) (void)cudaSetDevice(device);
}

/* Implements epic_backend.forget: closes the liveness connections in a forked child. */
static void p2p_forget(epic_group *g)
{
    net_liveness_forget(g->liveness);
    g->liveness = NULL;
}

/* Implements epic_backend.memory: computes the memory of a context before it is opened. */
static epic_result p2p_memory(const epic_config *config, epic_memory_info *out)
{
    TRY(p2p_check_config(config));
    const p2p_heap at = p2p_heap_for(config);
    out->host_bytes = (int64_t)sizeof(epic_group) + 4096;
    out->device_bytes = p2p_heap_bytes(&at) + p2p_mailbox_bytes(config->num_ranks);
    out->staging_bytes = p2p_staging_bytes(&at, config->num_ranks);
    return EPIC_OK;
}

const epic_backend epic_backend_p2p = {
    .name = "p2p",
    .can_join = p2p_can_join,
    .identify = p2p_identify,
    .join = p2p_join,
    .leave = p2p_leave,
    .forget = p2p_forget,
    .memory = p2p_memory,
    .fetch = p2p_fetch,
    .allocate = p2p_allocate,
    .release = p2p_release,
    .describe = p2p_describe,
    .ops = &p2p_ops,
    .sentence = epic_sentence,
    .bootstrap = p2p_bootstrap_nccl,
};
