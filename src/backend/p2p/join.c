/* SPDX-License-Identifier: Apache-2.0 */
/* Joining: every rank makes a heap, tells the others where it is, and maps theirs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/p2p/p2p.h"
#include "base/error.h"

#define LEAST_HEAP (4 << 20) /* an allocation of its own */
#define MOST_SMS 65536       /* more than any device has */

/* What a rank tells the others. */
typedef struct card {
    uint32_t result; /* of its own part so far */
    int32_t device_sms;
    int32_t taken_sms;  /* by other contexts of its process */
    uint8_t device[16]; /* uuid */
    cudaIpcMemHandle_t handle;
    char sentence[256];
} card;

static p2p_heap heap_of(const epic_config *config)
{
    return p2p_heap_of(config->num_ranks, config->max_tokens, config->max_row_bytes,
                       config->staging_bytes);
}

static int64_t heap_bytes(const p2p_heap *at)
{
    return at->bytes > LEAST_HEAP ? at->bytes : LEAST_HEAP;
}

static bool same(const uint64_t a[2], const uint64_t b[2])
{
    return a[0] == b[0] && a[1] == b[1];
}

static bool can_join(const epic_peer *peers, int num_ranks, const epic_config *config,
                     char *why)
{
    int count = 0;
    (void)config;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        (void)cudaGetLastError();
        snprintf(why, 256, "no CUDA device can be used here");
        return false;
    }
    if (num_ranks > DEVICE_MAX_RANKS) {
        snprintf(why, 256, "%d ranks: backend p2p has at most %d", num_ranks, DEVICE_MAX_RANKS);
        return false;
    }
    for (int q = 1; q < num_ranks; q++)
        if (!same(peers[q].host, peers[0].host)) {
            const bool here = peers[q].host[0] == peers[0].host[0];
            snprintf(why, 256, "ranks 0 and %d are %s", q,
                     here ? "in different PID namespaces (containers)" : "on different hosts");
            return false;
        }
    return true;
}

/* ------------------------------------------------------------------------- own part ---- */

static epic_result make_heap(epic_group *g)
{
    const p2p_heap *at = &g->self.at;
    const int64_t zeros = p2p_heap_poison(at);
    uint8_t *heap = NULL;
    char what[96];
    snprintf(what, sizeof what, "allocating a heap of %lld bytes", (long long)heap_bytes(at));
    TRY(p2p_cuda(cudaMalloc((void **)&heap, (size_t)heap_bytes(at)), what));
    g->self.heap[g->rank] = heap;
    TRY(p2p_cuda(cudaMemsetAsync(heap, 0, (size_t)zeros, g->side), "clearing the heap"));
    TRY(p2p_cuda(cudaMemsetAsync(heap + zeros, 0xff, (size_t)(at->bytes - zeros), g->side),
                 "clearing the heap"));
    return p2p_cuda(cudaStreamSynchronize(g->side), "clearing the heap");
}

static epic_result make_status(epic_group *g)
{
    void *device = NULL;
    TRY(p2p_cuda(cudaHostAlloc((void **)&g->status, 4096, cudaHostAllocMapped), "host memory"));
    memset(g->status, 0, 4096);
    _Static_assert(sizeof(p2p_status) <= 1024, "the status runs into the words");
    g->word = (uint64_t *)(void *)((char *)g->status + 1024);
    TRY(p2p_cuda(cudaHostGetDevicePointer(&device, g->status, 0), "host memory"));
    g->self.status = device;
    return EPIC_OK;
}

static epic_result own_part(epic_group *g, card *mine)
{
    struct cudaDeviceProp properties;
    TRY(p2p_cuda(cudaGetDevice(&g->device), "the current device"));
    TRY(p2p_cuda(cudaGetDeviceProperties(&properties, g->device), "the current device"));
    if (properties.major < 8)
        return epic_fail(EPIC_ENOTSUP,
                         "device %d (%s): compute capability %d.%d; 8.0 is needed", g->device,
                         properties.name, properties.major, properties.minor);
    if (g->config.max_tokens > 1 << 20)
        return epic_fail(EPIC_ENOTSUP,
                         "config.max_tokens is %lld: backend p2p takes at most 1048576",
                         (long long)g->config.max_tokens);
    TRY(p2p_cuda(cudaStreamCreateWithFlags(&g->side, cudaStreamNonBlocking), "a stream"));
    TRY(make_status(g));
    TRY(make_heap(g));
    TRY(p2p_load(g));
    memcpy(mine->device, properties.uuid.bytes, sizeof mine->device);
    mine->device_sms = properties.multiProcessorCount;
    mine->taken_sms = p2p_budget_taken(g->device);
    TRY(p2p_heap_show(g));
    bool others = false;
    for (int q = 0; q < g->num_ranks; q++)
        others |= !same(g->peers[q].process, g->peers[g->rank].process);
    if (!others) return EPIC_OK;
    return p2p_cuda(cudaIpcGetMemHandle(&mine->handle, g->self.heap[g->rank]),
                    "an IPC handle of the heap");
}

/* ----------------------------------------------------------------------------- peers ---- */

static epic_result reach_device(epic_group *g, int peer)
{
    struct cudaPointerAttributes attributes;
    int can = 0;
    uint8_t *heap = p2p_heap_find(g->self.group_id, peer);
    if (!heap)
        return epic_fail(EPIC_EPEER,
                         "rank %d says that it is in the process of rank %d, and is "
                         "not",
                         peer, g->rank);
    g->self.heap[peer] = heap;
    TRY(p2p_cuda(cudaPointerGetAttributes(&attributes, heap), "a peer's heap"));
    if (attributes.device == g->device) return EPIC_OK;
    TRY(p2p_cuda(cudaDeviceCanAccessPeer(&can, g->device, attributes.device), "peer access"));
    if (!can)
        return epic_fail(EPIC_ENOTSUP,
                         "ranks %d and %d: device %d cannot access the memory of device %d",
                         g->rank, peer, g->device, attributes.device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(attributes.device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
        return EPIC_OK;
    }
    return p2p_cuda(error, "peer access");
}

static epic_result map_heap(epic_group *g, int peer, const card *theirs)
{
    void *heap = NULL;
    const cudaError_t error =
        cudaIpcOpenMemHandle(&heap, theirs->handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return epic_fail(
            EPIC_ENOTSUP,
            "ranks %d and %d: the peer's device memory cannot be mapped here: CUDA "
            "says \"%s\"",
            g->rank, peer, cudaGetErrorString(error));
    }
    g->self.heap[peer] = heap;
    g->mapped[peer] = true;
    return EPIC_OK;
}

/* Processes that share a GPU take turns on it: slow, but right. */
static epic_result reach(epic_group *g, int peer, const card *theirs)
{
    if (peer == g->rank) return EPIC_OK;
    if (same(g->peers[peer].process, g->peers[g->rank].process)) return reach_device(g, peer);
    return map_heap(g, peer, theirs);
}

/* Kernels of all ranks on a GPU must be resident at once.  Ranks that share one reckon alike. */
static epic_result share_sms(epic_group *g, const card *cards)
{
    const card *mine = &cards[g->rank];
    int taken = mine->taken_sms;
    g->ranks_here = 0;
    for (int q = 0; q < g->num_ranks; q++) {
        if (memcmp(cards[q].device, mine->device, sizeof mine->device) != 0) continue;
        g->ranks_here++;
        if (cards[q].taken_sms > taken) taken = cards[q].taken_sms;
    }
    const int spare = g->ranks_here > 1 ? P2P_SPARE_SMS : 0;
    int sms = (mine->device_sms - spare - taken) / g->ranks_here;
    if (sms > P2P_DEFAULT_SMS) sms = P2P_DEFAULT_SMS;
    if (g->config.max_sms) sms = (int)g->config.max_sms;
    if (sms < 1 || sms * g->ranks_here > mine->device_sms)
        return epic_fail(
            EPIC_EINVAL,
            "config.max_sms is %u: ranks of this group on device %d: %d, SMs that "
            "other contexts of this process have taken: %d of %d; give each context "
            "a smaller config.max_sms, or close one",
            g->config.max_sms, g->device, g->ranks_here, taken, mine->device_sms);
    return p2p_budget_take(g, sms, mine->device_sms);
}

/* Nothing in a card is trusted: it may come from anybody who reached the meeting. */
static epic_result check_card(const card *c, int rank)
{
    if (c->result > EPIC_ECLOSED || c->taken_sms < 0 || c->taken_sms > MOST_SMS ||
        !memchr(c->sentence, 0, sizeof c->sentence))
        return epic_fail(
            EPIC_EPEER,
            "backend p2p: what the meeting brought from rank %d was not written by "
            "EPIC",
            rank);
    if (c->result == EPIC_OK) return EPIC_OK;
    return epic_fail((epic_result)c->result, "rank %d: %s", rank, c->sentence);
}

static epic_result connect_peers(epic_group *g, const card *cards)
{
    for (int q = 0; q < g->num_ranks; q++) TRY(check_card(&cards[q], q));
    TRY(share_sms(g, cards));
    for (int q = 0; q < g->num_ranks; q++) TRY(reach(g, q, &cards[q]));
    return p2p_watch_open(g);
}

/* --------------------------------------------------------------------- join and leave ---- */

static void release(epic_group *g)
{
    p2p_heap_hide(g);
    p2p_watch_close(g);
    p2p_budget_give_back(g);
    for (int q = 0; q < g->num_ranks; q++)
        if (g->mapped[q]) (void)cudaIpcCloseMemHandle(g->self.heap[q]);
    if (g->self.heap[g->rank]) (void)cudaFree(g->self.heap[g->rank]);
    if (g->status) (void)cudaFreeHost(g->status);
    if (g->side) (void)cudaStreamDestroy(g->side);
    (void)cudaGetLastError();
    free(g);
}

static epic_group *new_group(const epic_join *join)
{
    epic_group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->rank = join->meet->rank;
    g->num_ranks = join->meet->num_ranks;
    g->config = *join->config;
    g->config.num_ranks = (uint32_t)g->num_ranks;
    memcpy(g->peers, join->peers, (size_t)g->num_ranks * sizeof *g->peers);
    g->self.at = heap_of(&g->config);
    g->self.group_id = join->group_id;
    g->self.max_tokens = g->config.max_tokens;
    g->self.rank = g->rank;
    g->self.num_ranks = g->num_ranks;
    return g;
}

static epic_result join(epic_group **out, const epic_join *join)
{
    if (join->meet->num_ranks > DEVICE_MAX_RANKS)
        return epic_fail(EPIC_ENOTSUP, "backend p2p: %d ranks are too many, it has at most %d",
                         join->meet->num_ranks, DEVICE_MAX_RANKS);
    epic_group *g = new_group(join);
    card mine = {0}, cards[DEVICE_MAX_RANKS];
    mine.result = g ? (uint32_t)own_part(g, &mine) : EPIC_ENOMEM;
    if (mine.result != EPIC_OK)
        snprintf(mine.sentence, sizeof mine.sentence, "%.255s",
                 g ? epic_error(NULL) : "no host memory");
    epic_result result = join->meet->gather
                             ? join->meet->gather(join->meet->self, &mine, cards, sizeof mine)
                             : EPIC_OK;
    if (!join->meet->gather) cards[0] = mine;
    if (!g) return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    if (result == EPIC_OK) result = connect_peers(g, cards);
    if (result == EPIC_OK)
        *out = g;
    else
        release(g);
    return result;
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* A peer of this process whose join failed has freed its heap already, and says no goodbye. */
static bool has_released(const epic_group *g, int peer)
{
    return same(g->peers[peer].process, g->peers[g->rank].process) &&
           p2p_heap_find(g->self.group_id, peer) != g->self.heap[peer];
}

/* Has every peer closed, or died? */
static bool all_gone(epic_group *g)
{
    uint64_t *gone = g->word + 16;
    if (cudaMemcpyAsync(gone, g->self.heap[g->rank] + g->self.at.gone,
                        DEVICE_MAX_RANKS * sizeof *gone, cudaMemcpyDeviceToHost,
                        g->side) != cudaSuccess ||
        cudaStreamSynchronize(g->side) != cudaSuccess)
        return true;
    for (int q = 0; q < g->num_ranks; q++)
        if (q != g->rank && !gone[q] && !p2p_is_dead(g, q) && !has_released(g, q)) return false;
    return true;
}

static void say_goodbye(epic_group *g)
{
    uint32_t *epoch = (uint32_t *)(void *)(g->word + 8);
    (void)cudaMemcpyAsync(epoch, g->self.heap[g->rank] + g->self.at.control, sizeof *epoch,
                          cudaMemcpyDeviceToHost, g->side);
    (void)cudaStreamSynchronize(g->side);
    *g->word = P2P_GONE((uint64_t)*epoch);
    for (int q = 0; q < g->num_ranks; q++)
        if (!p2p_is_dead(g, q) && !has_released(g, q))
            (void)cudaMemcpyAsync(g->self.heap[q] + g->self.at.gone + 8 * g->rank, g->word,
                                  sizeof *g->word, cudaMemcpyDefault, g->side);
    (void)cudaStreamSynchronize(g->side);
}

/* The heap may be freed once no peer can write into it: it has closed too, or is dead. */
static void leave(epic_group *g)
{
    int device = -1;
    (void)cudaGetDevice(&device);
    (void)cudaSetDevice(g->device);
    if (g->ranks_here == 1) (void)cudaDeviceSynchronize();
    say_goodbye(g);
    const uint64_t end = now_ms() + g->config.timeout_ms;
    while (!all_gone(g) && now_ms() < end)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    release(g);
    if (device >= 0) (void)cudaSetDevice(device);
}

static void memory(const epic_config *config, epic_memory_info *out)
{
    const p2p_heap at = heap_of(config);
    out->host_bytes = (int64_t)sizeof(epic_group) + 4096;
    out->shared_bytes = 0;
    out->device_bytes = heap_bytes(&at);
}

static bool fetch(void *to, const void *from, size_t bytes, bool *good)
{
    struct cudaPointerAttributes where;
    const bool known =
        cudaPointerGetAttributes(&where, from) == cudaSuccess &&
        (where.type == cudaMemoryTypeDevice || where.type == cudaMemoryTypeManaged);
    if (known)
        *good = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cudaStreamPerThread) ==
                    cudaSuccess &&
                cudaStreamSynchronize(cudaStreamPerThread) == cudaSuccess;
    (void)cudaGetLastError();
    return known;
}

/* The context's device need not be the current one. */
static void *allocate(epic_group *g, size_t bytes)
{
    int before;
    void *memory = NULL;
    if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(g->device) != cudaSuccess)
        return NULL;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) memory = NULL;
    (void)cudaGetLastError();
    (void)cudaSetDevice(before);
    return memory;
}

/* Work that still reads the memory is waited for: cudaFree does. */
static void release_memory(epic_group *g, void *memory)
{
    (void)g;
    (void)cudaFree(memory);
}

static void describe(char *to, size_t size)
{
    struct cudaDeviceProp properties;
    int count = 0, used = 0;
    *to = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
        snprintf(to, size, "no CUDA device can be used here");
    for (int i = 0; i < count && used < (int)size; i++)
        if (cudaGetDeviceProperties(&properties, i) == cudaSuccess)
            used += snprintf(to + used, size - (size_t)used,
                             "%sGPU %d: %s, %d SMs, of which a context uses %d", i ? "; " : "",
                             i, properties.name, properties.multiProcessorCount,
                             properties.multiProcessorCount < P2P_DEFAULT_SMS
                                 ? properties.multiProcessorCount
                                 : P2P_DEFAULT_SMS);
    (void)cudaGetLastError();
}

const epic_backend epic_backend_p2p = {
    .name = "p2p",
    .can_join = can_join,
    .join = join,
    .leave = leave,
    .memory = memory,
    .fetch = fetch,
    .allocate = allocate,
    .release = release_memory,
    .describe = describe,
    .steps = &p2p_steps,
    .sentence = epic_sentence,
};
