/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the backend `hosts`: ranks with GPUs on several hosts. The backend uses the
 * kernels and operations of backend p2p, compiled again with EPIC_HOSTS. This file joins and
 * leaves groups.
 *
 * Each rank has a heap, its receive buffer in device memory. Ranks of one host store rows
 * directly into each other's heaps. Between hosts, the net copies words from the outbox of the
 * sender into the inbox of the receiver (net/net.h). Inbox and outbox, here called boxes, have
 * the layout of a heap and are in GPU memory or in host memory. The net treats each rank as a
 * separate host, so this file passes a rank wherever the net expects a host. Liveness
 * connections (net/liveness.h) show which ranks are dead. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/env.h"
#include "backend/hosts/proxy.h"
#include "backend/p2p/p2p.h"
#include "base/deadline.h"
#include "base/error.h"

#define LEAVE_NAP_NS 200000

/* Data that each rank sends to all ranks through the bootstrap while it joins the group. */
typedef struct peer_info {
    uint32_t result; /* EPIC_OK, or the first error of this rank */
    p2p_gpu gpu;
    p2p_heap_handle heap_handle; /* handle of the heap, for ranks of this host */
    uint32_t relays;             /* value of EPIC_NET_RELAY on this rank */
    /* value of EPIC_NET_MEMORY on this rank (a hosts_memory) */
    uint32_t requested_memory;
    uint32_t on_gpu; /* 1: this rank's inbox and outbox are in GPU memory */
    /* if `result` is an error: its error text; otherwise the reason why this rank's boxes are
     * not in GPU memory */
    char sentence[256];
    _Alignas(8) unsigned char liveness[NET_LIVENESS_HANDLE_BYTES];
    _Alignas(8) unsigned char net[NET_HANDLE_BYTES];
} peer_info;

/* The part of a group that only the backend `hosts` has. */
typedef struct hosts_part {
    hosts_env env;
    net *net;
    net_liveness *liveness;
    hosts_proxy *proxy;
    bool on_gpu; /* true: inbox and outbox are in GPU memory; false: in host memory */
    /* The heap, into which the ranks of this host write rows. This rank's partial sums, which
     * no other rank uses, follow the heap in the same allocation. */
    uint8_t *heap;
    /* memory into which the net copies words from other hosts; it has the layout of a heap */
    uint8_t *inbox;
    uint8_t *outbox;        /* memory from which the net sends; it has the layout of a heap */
    uint8_t *outbox_on_gpu; /* the address at which kernels access the outbox */
    p2p_ring host_ring;     /* the proxy ring, at the addresses that the CPU uses */
    char net_text[256];     /* describes the connected net, for epic-info and errors */
} hosts_part;

_Static_assert(NET_MAX_HOSTS >= DEVICE_MAX_RANKS, "each rank may be a host of its own");

/* Largest config.max_row_bytes with few ranks: 16 bytes less than 1 MiB. There one entry of the
 * proxy ring must describe a whole row (post_put_row() in kernels/cuda/net/net.cuh). combine also
 * sends float32 sums, which have twice as many bytes as the rows if these have 16-bit elements. */
#define MOST_ROW_BYTES ((8 << P2P_ENTRY_WORDS_BITS) / 2 - 16)

/* Implements epic_backend.can_join. The ranks can join if this process finds a GPU and the
 * network engine is available. */
static bool can_join(const epic_peer *peers, int num_ranks, const epic_config *config,
                     char *why)
{
    (void)config;
    if (!p2p_any_device(why) || !p2p_share_library(peers, num_ranks, why)) return false;
    const net_engine *engine = hosts_env_engine(why);
    return engine && engine->is_available(why);
}

static epic_result alloc_host(uint8_t **out, int64_t bytes)
{
    char what[96];
    snprintf(what, sizeof what, "%lld bytes of pinned host memory", (long long)bytes);
    return p2p_cuda(cudaHostAlloc((void **)out, (size_t)bytes, cudaHostAllocMapped), what);
}

static epic_result map_to_gpu(void *out, void *memory)
{
    return p2p_cuda(cudaHostGetDevicePointer(out, memory, 0), "host memory");
}

static epic_result alloc_gpu(uint8_t **out, int64_t bytes)
{
    return p2p_cuda(cudaMalloc((void **)out, (size_t)bytes), "memory of the device");
}

/* Allocates an inbox or outbox. Sets *out to its address for the net, and *seen to its address
 * for kernels. */
static epic_result alloc_for_net(uint8_t **out, uint8_t **seen, bool on_gpu, int64_t bytes)
{
    TRY(on_gpu ? alloc_gpu(out, bytes) : alloc_host(out, bytes));
    if (!on_gpu) return map_to_gpu(seen, *out);
    *seen = *out;
    return EPIC_OK;
}

static int64_t partial_sums_bytes(const p2p_heap *at, int64_t num_ranks)
{
    return num_ranks * at->part_words * 4;
}

/* Allocates the heap. Sets self.net->host_ranks, the bit mask of the ranks on this host, and
 * writes the heap's handle to mine->heap_handle. */
static epic_result make_heap(epic_group *g, hosts_part *h, peer_info *mine)
{
    p2p_heap *at = &g->self.at;
    const int64_t parts = partial_sums_bytes(at, g->num_ranks);
    at->parts = p2p_heap_bytes(at);
    for (int q = 0; q < g->num_ranks; q++)
        if (p2p_same(g->peers[q].host, g->peers[g->rank].host))
            g->self.net->host_ranks[q / 32] |= 1u << q % 32;
    TRY(p2p_heap_allocate(g, at->parts + parts, &h->heap));
    TRY(p2p_cuda(cudaMemsetAsync(h->heap + at->parts, 0xff, (size_t)parts, g->side),
                 "clearing the heap"));
    TRY(p2p_heap_clear(g, h->heap));
    g->self.heap[g->rank] = h->heap;
    return p2p_heap_export(g, h->heap, &mine->heap_handle);
}

/* Returns the allocation size in bytes of an inbox or outbox. In GPU memory it may be larger
 * than the layout's at->bytes (p2p_heap_bytes()). */
static int64_t box_bytes(const p2p_heap *at, bool on_gpu)
{
    return on_gpu ? p2p_heap_bytes(at) : at->bytes;
}

/* Allocates inbox and outbox, and fills the inbox with poison (the value that marks a word that
 * has not arrived yet). Sets self.heap[q] to the outbox for every other rank q: kernels write
 * the words for rank q there, and the net sends them. If rank q is on this host,
 * p2p_heap_connect() later sets self.heap[q] to the heap of rank q. */
static epic_result make_boxes(epic_group *g, hosts_part *h)
{
    const int64_t bytes = box_bytes(&g->self.at, h->on_gpu);
    TRY(alloc_for_net(&h->inbox, &g->self.net->inbox, h->on_gpu, bytes));
    TRY(alloc_for_net(&h->outbox, &h->outbox_on_gpu, h->on_gpu, bytes));
    for (int q = 0; q < g->num_ranks; q++)
        if (q != g->rank) g->self.heap[q] = h->outbox_on_gpu;
    g->self.net->host_inbox_bytes = h->on_gpu ? 0 : g->self.at.bytes;
    return p2p_heap_clear(g, g->self.net->inbox);
}

static void free_memory(uint8_t **memory, bool on_gpu)
{
    if (*memory && on_gpu) (void)cudaFree(*memory);
    if (*memory && !on_gpu) (void)cudaFreeHost(*memory);
    *memory = NULL;
}

static void free_boxes(hosts_part *h)
{
    free_memory(&h->inbox, h->on_gpu);
    free_memory(&h->outbox, h->on_gpu);
}

/* Allocates the ring through which kernels post puts to the proxy (pinned host memory). */
static epic_result make_proxy_ring(epic_group *g, hosts_part *h)
{
    uint8_t *memory = NULL;
    const int64_t words = P2P_RING_ENTRIES * 8, bytes = words + (int64_t)sizeof(p2p_ring_words);
    TRY(alloc_host(&memory, bytes));
    memset(memory, 0, (size_t)bytes);
    h->host_ring.entries = (uint64_t *)(void *)memory;
    h->host_ring.words = (p2p_ring_words *)(void *)(memory + words);
    TRY(map_to_gpu(&g->self.net->ring.entries, h->host_ring.entries));
    return map_to_gpu(&g->self.net->ring.words, h->host_ring.words);
}

static bool is_near(const epic_group *g, int rank)
{
    return g->self.net->host_ranks[rank / 32] >> rank % 32 & 1;
}

static int num_near_ranks(const epic_group *g)
{
    int count = 0;
    for (int q = 0; q < g->num_ranks; q++) count += is_near(g, q);
    return count;
}

static epic_result open_net(epic_group *g, hosts_part *h, peer_info *mine)
{
    char why[NET_WHY_BYTES];
    net_setup setup = {.host = g->rank,
                       .num_hosts = g->num_ranks,
                       .rdma = h->env.rdma,
                       .threads = hosts_env_threads(&h->env, num_near_ranks(g)),
                       .on_gpu = h->on_gpu,
                       .inbox = h->inbox,
                       .inbox_bytes = (uint64_t)g->self.at.bytes,
                       .urgent_bytes = (uint64_t)p2p_heap_poison(&g->self.at),
                       .outbox = h->outbox,
                       .outbox_bytes = (uint64_t)g->self.at.bytes};
    if (cudaDeviceGetPCIBusId(setup.gpu, sizeof setup.gpu, g->device) != cudaSuccess) {
        *setup.gpu = 0;
        (void)cudaGetLastError(); /* clears the error, which the next launch would report */
    }
    memset(mine->net, 0, sizeof mine->net);
    const epic_result result = h->env.engine->open(&h->net, &setup, mine->net, why);
    return result == EPIC_OK ? EPIC_OK : epic_fail(result, "%s", why);
}

static void close_net(hosts_part *h)
{
    if (h->env.engine) h->env.engine->close(h->net);
    h->net = NULL;
}

/* Allocates inbox and outbox, in GPU memory if on_gpu is true, and opens the net with them. */
static epic_result open_boxes(epic_group *g, hosts_part *h, peer_info *mine, bool on_gpu)
{
    h->on_gpu = on_gpu;
    mine->on_gpu = on_gpu;
    TRY(make_boxes(g, h));
    return open_net(g, h, mine);
}

/* Moves inbox and outbox from GPU memory to host memory, and opens the net again. */
static epic_result move_to_host(epic_group *g, hosts_part *h, peer_info *mine)
{
    close_net(h);
    free_boxes(h);
    return open_boxes(g, h, mine, false);
}

/* Adds to the error text that EPIC_NET_MEMORY=gpu forbids host memory. Returns `result`. */
static epic_result fail_on_gpu(epic_result result)
{
    char why[160];
    epic_fit_text(why, sizeof why, epic_sentence());
    return epic_fail(result,
                     "EPIC_NET_MEMORY=gpu: %s; without it rows go by way of host memory", why);
}

/* Allocates inbox and outbox and opens the net. Uses host memory if EPIC_NET_MEMORY is host or
 * the engine cannot access GPU memory, and GPU memory if not. Later connect_boxes() may move
 * the boxes to host memory, because all ranks must use the same kind of memory. */
static epic_result open_own_boxes(epic_group *g, hosts_part *h, peer_info *mine)
{
    mine->requested_memory = h->env.memory;
    if (h->env.memory == HOSTS_MEMORY_HOST) return open_boxes(g, h, mine, false);
    const epic_result result =
        h->env.engine->can_reach_gpu()
            ? open_boxes(g, h, mine, true)
            : epic_fail(EPIC_ENOTSUP, "net \"%s\" cannot reach memory of a GPU here",
                        h->env.engine->name);
    if (result == EPIC_OK) return EPIC_OK;
    if (h->env.memory == HOSTS_MEMORY_GPU) return fail_on_gpu(result);
    epic_fit_text(mine->sentence, sizeof mine->sentence, epic_sentence());
    return move_to_host(g, h, mine);
}

/* Returns whether two ranks are threads of one process. With EPIC_HOST, ranks of one process may
 * be on different hosts, so that their identities of the process differ. But one process has one
 * copy of libepic, whose identity is random. */
static bool is_same_process(const epic_peer *a, const epic_peer *b)
{
    return p2p_same(a->process, b->process) ||
           (a->library && a->library == b->library && a->pid == b->pid);
}

static epic_result listen_for_liveness(epic_group *g, hosts_part *h, peer_info *mine)
{
    net_liveness_setup setup = {.host = g->rank,
                                .num_hosts = g->num_ranks,
                                .ranks_per_host = 1,
                                .timeout_ms = g->config.timeout_ms,
                                .group_id = g->self.group_id};
    /* With MANY_RANKS, ranks of one process have no liveness connection to each other, because
     * the connections would need too many sockets. These ranks exit together, so they need not
     * watch each other. */
    for (int q = 0; MANY_RANKS && q < g->num_ranks; q++)
        setup.is_local[q] = is_same_process(&g->peers[q], &g->peers[g->rank]);
    return net_liveness_listen(&h->liveness, &setup, mine->liveness);
}

/* Performs the part of joining that needs no peer, and fills in *mine, the info to send. */
static epic_result prepare_rank(epic_group *g, hosts_part *h, peer_info *mine)
{
    TRY(p2p_group_device(g, &mine->gpu));
    TRY(hosts_read_env(&h->env));
    mine->relays = h->env.relays;
    TRY(make_heap(g, h, mine));
    TRY(make_proxy_ring(g, h));
    TRY(p2p_load(g));
    TRY(open_own_boxes(g, h, mine));
    return listen_for_liveness(g, h, mine);
}

/* Passes the net handles of all ranks to the engine, which connects to these ranks. */
static epic_result connect_net(epic_group *g, hosts_part *h, const peer_info *infos)
{
    char why[NET_WHY_BYTES];
    unsigned char *all = malloc((size_t)g->num_ranks * NET_HANDLE_BYTES);
    if (!all) return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    for (int q = 0; q < g->num_ranks; q++)
        memcpy(all + (size_t)q * NET_HANDLE_BYTES, infos[q].net, NET_HANDLE_BYTES);
    const epic_result result = h->env.engine->connect(h->net, all, why);
    free(all);
    if (result != EPIC_OK) return epic_fail(result, "%s", why);
    /* the last call here that uses the net; from now on only the proxy thread uses it */
    h->env.engine->describe(h->net, h->net_text, sizeof h->net_text);
    return EPIC_OK;
}

static epic_result connect_liveness(epic_group *g, hosts_part *h, const peer_info *infos)
{
    unsigned char all[DEVICE_MAX_RANKS][NET_LIVENESS_HANDLE_BYTES];
    for (int q = 0; q < g->num_ranks; q++)
        memcpy(all[q], infos[q].liveness, NET_LIVENESS_HANDLE_BYTES);
    return net_liveness_connect(h->liveness, all);
}

static epic_result start_proxy(epic_group *g, hosts_part *h)
{
    const hosts_proxy_setup setup = {.host = g->rank,
                                     .num_hosts = g->num_ranks,
                                     .engine = h->env.engine,
                                     .net = h->net,
                                     .liveness = h->liveness,
                                     .outbox = h->outbox,
                                     .at = g->self.at,
                                     .status = g->status,
                                     .beats = g->beats,
                                     .ring = h->host_ring};
    p2p_beats_expect(g->beats, g->config.timeout_ms);
    return hosts_proxy_open(&h->proxy, &setup);
}

/* Returns the error that a rank has sent in its info, or EPIC_OK. First checks the values of
 * the info, because another program may have written it. */
static epic_result check_peer(const peer_info *c, int rank)
{
    if (!epic_is_result(c->result) || !p2p_gpu_fits(&c->gpu) ||
        !memchr(c->sentence, 0, sizeof c->sentence))
        return epic_fail(
            EPIC_EPEER,
            "backend hosts: the info of rank %d is not valid: it must be written by the same "
            "EPIC",
            rank);
    if (c->result == EPIC_OK) return EPIC_OK;
    return epic_fail((epic_result)c->result, "rank %d: %s", rank, c->sentence);
}

static epic_result check_peers(const peer_info *infos, int num_ranks)
{
    for (int q = 0; q < num_ranks; q++) TRY(check_peer(&infos[q], q));
    return EPIC_OK;
}

/* Sends this rank's info to all ranks and receives theirs. infos[r] is the info of rank r.
 * infos[num_ranks] is this rank's own copy, from which it sends. All ranks receive the same
 * infos, so they make the same decisions and call gather the same number of times. */
static epic_result gather_peers(const epic_join *join, peer_info *infos, epic_result result)
{
    peer_info *mine = &infos[join->bootstrap->num_ranks];
    mine->result = (uint32_t)result;
    if (result != EPIC_OK)
        epic_fit_text(mine->sentence, sizeof mine->sentence, epic_sentence());
    infos[join->bootstrap->rank] = *mine;
    if (!join->bootstrap->gather) return EPIC_OK;
    return join->bootstrap->gather(join->bootstrap->self, mine, infos, sizeof *mine);
}

static int num_on_gpu(const peer_info *infos, int num_ranks)
{
    int count = 0;
    for (int q = 0; q < num_ranks; q++) count += infos[q].on_gpu != 0;
    return count;
}

static int first_that_wants(const peer_info *infos, int num_ranks, hosts_memory memory)
{
    for (int q = 0; q < num_ranks; q++)
        if (infos[q].requested_memory == (uint32_t)memory) return q;
    return -1;
}

/* Checks the memory that ranks request with EPIC_NET_MEMORY. All requests must be equal. If a
 * rank requests GPU memory, the inboxes and outboxes of all ranks must already be in GPU
 * memory. */
static epic_result check_wanted_memory(const peer_info *infos, int num_ranks)
{
    const int gpu = first_that_wants(infos, num_ranks, HOSTS_MEMORY_GPU);
    const int host = first_that_wants(infos, num_ranks, HOSTS_MEMORY_HOST);
    if (gpu < 0) return EPIC_OK;
    if (host >= 0)
        return epic_fail(EPIC_EMISMATCH,
                         "rank %d: EPIC_NET_MEMORY=host, and =gpu on rank %d: set the same on "
                         "every rank, or unset it",
                         host, gpu);
    for (int q = 0; q < num_ranks; q++)
        if (!infos[q].on_gpu)
            return epic_fail(EPIC_ENOTSUP,
                             "rank %d: %.160s; EPIC_NET_MEMORY=gpu on rank %d: "
                             "without it rows go by way of host memory",
                             q, infos[q].sentence, gpu);
    return EPIC_OK;
}

/* Connects the net, with the same kind of memory on all ranks: GPU memory if every rank can
 * connect with boxes in GPU memory. If not, all ranks move their boxes to host memory, or fail
 * if a rank has set EPIC_NET_MEMORY=gpu.
 *
 * The ranks exchange their infos before the second attempt, so that no rank frees its boxes
 * while another rank still connects to them. */
static epic_result connect_boxes(epic_group *g, const epic_join *join, peer_info *infos)
{
    hosts_part *h = g->hosts;
    const int on_gpu = num_on_gpu(infos, g->num_ranks);
    const bool asked = first_that_wants(infos, g->num_ranks, HOSTS_MEMORY_GPU) >= 0;
    TRY(check_wanted_memory(infos, g->num_ranks));
    if (on_gpu == g->num_ranks) {
        epic_result result = connect_net(g, h, infos);
        if (result != EPIC_OK && asked) result = fail_on_gpu(result);
        TRY(gather_peers(join, infos, result));
        result = check_peers(infos, g->num_ranks);
        if (result == EPIC_OK || asked) return result;
    }
    if (on_gpu > 0) {
        peer_info *mine = &infos[g->num_ranks];
        TRY(gather_peers(join, infos, h->on_gpu ? move_to_host(g, h, mine) : EPIC_OK));
        TRY(check_peers(infos, g->num_ranks));
    }
    return connect_net(g, h, infos);
}

/* Returns the number of ranks per host if relays can be used, and 0 if not. A relay is a rank
 * that receives a row for its host and forwards it to the other ranks there
 * (kernels/cuda/net/relay.cuh). Relays need several hosts with the same number of ranks each,
 * from two to P2P_MAX_RELAYS. The ranks must be numbered host by host, and every rank must allow
 * relays (EPIC_NET_RELAY). */
static int32_t ranks_per_host(const epic_group *g, const peer_info *infos)
{
    int32_t local = 1;
    while (local < g->num_ranks && p2p_same(g->peers[local].host, g->peers[0].host)) local++;
    if (local == 1 || local == g->num_ranks || g->num_ranks % local || local > P2P_MAX_RELAYS)
        return 0;
    for (int q = 0; q < g->num_ranks; q++)
        for (int p = 0; p < g->num_ranks; p++)
            if (!infos[q].relays ||
                p2p_same(g->peers[p].host, g->peers[q].host) != (p / local == q / local))
                return 0;
    return local;
}

/* The last step of joining. Connects to the heaps of the ranks on this host, sets the options
 * that depend on all ranks, makes the liveness connections, and starts the proxy thread. */
static epic_result connect_peers(epic_group *g, hosts_part *h, const peer_info *infos)
{
    p2p_gpu gpus[DEVICE_MAX_RANKS];
    p2p_heap_handle heaps[DEVICE_MAX_RANKS];
    for (int q = 0; q < g->num_ranks; q++) {
        gpus[q] = infos[q].gpu;
        heaps[q] = infos[q].heap_handle;
    }
    TRY(p2p_heap_connect(g, heaps));
    TRY(p2p_budget_share(g, gpus));
    g->self.net->ranks_per_host = ranks_per_host(g, infos);
    if (num_near_ranks(g) < g->num_ranks) g->self.net->window_tokens = h->env.window;
    TRY(connect_liveness(g, h, infos));
    return start_proxy(g, h);
}

static void free_group(epic_group *g)
{
    hosts_part *h = g->hosts;
    if (h) {
        hosts_proxy_close(h->proxy);
        close_net(h);
        net_liveness_close(h->liveness);
        p2p_heap_disconnect(g);
        p2p_heap_free(g, h->heap);
        free_boxes(h);
        if (h->host_ring.entries) (void)cudaFreeHost(h->host_ring.entries);
        free(h);
    }
    p2p_group_free(g);
}

static void copy_to_gpu(const epic_group *g, uint8_t *to, const void *bytes, size_t count)
{
    (void)cudaMemcpyAsync(to, bytes, count, cudaMemcpyDefault, g->side);
    (void)cudaStreamSynchronize(g->side);
}

/* Implements p2p_hooks.write: writes bytes to offset `at` of the inboxes of ranks that are not
 * dead, and returns when the bytes are sent. */
static void write_to_ranks(epic_group *g, const seat_set *ranks, int64_t at, const void *bytes,
                           size_t count)
{
    seat_set peers = {0};
    if (seat_set_has(ranks, g->rank)) copy_to_gpu(g, g->self.net->inbox + at, bytes, count);
    for (int q = 0; q < g->num_ranks; q++)
        if (q != g->rank && seat_set_has(ranks, q) && !p2p_is_dead(g, q))
            seat_set_add(&peers, q);
    if (seat_set_count(&peers) == 0) return;
    copy_to_gpu(g, g->hosts->outbox_on_gpu + at, bytes, count);
    hosts_proxy_send(g->hosts->proxy, &peers, (uint64_t)at, (uint32_t)count);
}

static void wake_proxy(const epic_group *g)
{
    hosts_proxy_wake(g->hosts->proxy);
}

static const p2p_hooks hooks = {.write = write_to_ranks, .wake = wake_proxy};

static epic_group *new_group(const epic_join *join)
{
    epic_group *g = p2p_group_new(join, &hooks);
    if (!g) return NULL;
    g->hosts = calloc(1, sizeof *g->hosts);
    if (g->hosts) return g;
    p2p_group_free(g);
    return NULL;
}

/* Implements epic_backend.join. A rank that has failed still sends its info, so that all ranks
 * return an error and no rank waits for the failed rank. */
static epic_result hosts_join(epic_group **out, const epic_join *join)
{
    const int num_ranks = join->bootstrap->num_ranks;
    peer_info *infos = calloc((size_t)num_ranks + 1, sizeof *infos);
    if (!infos) return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    epic_group *g = new_group(join);
    const epic_result own = g ? prepare_rank(g, g->hosts, &infos[num_ranks])
                              : epic_fail(EPIC_ENOMEM, "no host memory for a context");
    epic_result result = gather_peers(join, infos, own);
    if (result == EPIC_OK) result = check_peers(infos, num_ranks);
    if (result == EPIC_OK) result = connect_boxes(g, join, infos);
    if (result == EPIC_OK) result = connect_peers(g, g->hosts, infos);
    free(infos);
    if (result == EPIC_OK)
        *out = g;
    else if (g)
        free_group(g);
    return result;
}

static bool are_all_gone(epic_group *g)
{
    const uint64_t *gone = p2p_gone(g);
    for (int q = 0; gone && q < g->num_ranks; q++)
        if (q != g->rank && !gone[q] && !p2p_is_dead(g, q) &&
            net_liveness_state(g->hosts->liveness, q) == NET_PEER_ALIVE)
            return false;
    return true;
}

/* Implements epic_backend.leave. Announces to all peers that this rank leaves. Waits until
 * every peer has left or died, at most until the timeout, because a peer may write into this
 * rank's memory until then. Frees the memory last. */
static void hosts_leave(epic_group *g)
{
    seat_set ranks = {0};
    int device = -1;
    (void)cudaGetDevice(&device);
    (void)cudaSetDevice(g->device);
    if (g->ranks_here == 1) (void)cudaDeviceSynchronize();
    seat_set_add_all(&ranks, g->num_ranks);
    *g->word = P2P_GONE((uint64_t)p2p_epoch(g));
    write_to_ranks(g, &ranks, g->self.at.gone + 8 * g->rank, g->word, sizeof *g->word);
    deadline end = deadline_begin_ms(g->config.timeout_ms);
    while (!are_all_gone(g) && !deadline_before_nap(&end, LEAVE_NAP_NS))
        nanosleep(&(struct timespec){.tv_nsec = LEAVE_NAP_NS}, NULL);
    free_group(g);
    if (device >= 0) (void)cudaSetDevice(device);
}

void epic_backend_hosts_counts(const epic_group *g, uint64_t counts[3])
{
    hosts_proxy_counts(g->hosts->proxy, counts);
}

/* Implements epic_backend.forget: closes the liveness connections in a forked child, so that
 * peers notice when the parent exits even if the child still runs. */
static void hosts_forget(epic_group *g)
{
    net_liveness_forget(g->hosts->liveness);
    g->hosts->liveness = NULL;
}

static void hosts_describe_net(const epic_group *g, char *to, size_t size)
{
    epic_fit_text(to, size, g->hosts->net_text);
}

/* Returns EPIC_ENOTSUP if entries of the proxy ring cannot describe the rows or the heap. */
static epic_result check_sizes(const epic_config *config, const p2p_heap *at)
{
    if (!MANY_RANKS && config->max_row_bytes > MOST_ROW_BYTES)
        return epic_fail(EPIC_ENOTSUP,
                         "config.max_row_bytes is %lld: must be at most %d in groups of up to "
                         "%d ranks; split the rows, or use backend p2p",
                         (long long)config->max_row_bytes, MOST_ROW_BYTES, DEVICE_MAX_RANKS);
    if (at->bytes / 8 >= (int64_t)P2P_EPOCH_ENDS)
        return epic_fail(
            EPIC_ENOTSUP,
            "backend hosts: a heap of %lld bytes is too large, it must be less than "
            "64 GB; lower config.max_tokens or set config.staging_bytes",
            (long long)at->bytes);
    return EPIC_OK;
}

/* Implements epic_backend.memory. If EPIC_NET_MEMORY is not set, it is unknown before joining
 * whether the boxes are in GPU memory or in host memory, so both host_bytes and device_bytes
 * include them. */
static epic_result hosts_memory_info(const epic_config *config, epic_memory_info *out)
{
    TRY(p2p_check_config(config));
    const p2p_heap at = p2p_heap_for(config);
    TRY(check_sizes(config, &at));
    const hosts_memory asked = hosts_env_memory();
    const int64_t on_gpu = asked == HOSTS_MEMORY_HOST ? 0 : 2 * box_bytes(&at, true);
    const int64_t in_host = asked == HOSTS_MEMORY_GPU ? 0 : 2 * box_bytes(&at, false);
    out->host_bytes = (int64_t)(sizeof(epic_group) + sizeof(hosts_part)) + 4096 + in_host +
                      P2P_RING_ENTRIES * 8 + (int64_t)sizeof(p2p_ring_words);
    out->device_bytes =
        p2p_heap_bytes(&at) + partial_sums_bytes(&at, config->num_ranks) + on_gpu;
    out->staging_bytes = p2p_staging_bytes(&at, config->num_ranks);
    return EPIC_OK;
}

const epic_backend epic_backend_hosts = {
    .name = "hosts",
    .can_join = can_join,
    .join = hosts_join,
    .leave = hosts_leave,
    .forget = hosts_forget,
    .memory = hosts_memory_info,
    .fetch = p2p_fetch,
    .allocate = p2p_allocate,
    .release = p2p_release,
    .describe = p2p_describe,
    .describe_net = hosts_describe_net,
    .ops = &p2p_ops,
    .sentence = epic_sentence,
};
