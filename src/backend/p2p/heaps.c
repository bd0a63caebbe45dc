/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the heap of each rank accessible to the ranks near it (p2p_is_near()). Each rank sends
 * a handle of its heap through the bootstrap (heap_memory.h). But ranks of one process look
 * up each other's addresses in a global list. They do not send addresses through the bootstrap,
 * because another program that can connect to the bootstrap could send a false address. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/p2p/heap_exchange.h"
#include "base/error.h"

/* An entry of the list of all heaps in this process. */
typedef struct exported_heap {
    struct exported_heap *next;
    const epic_group *group;
    uint8_t *heap;
} exported_heap;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the list */
static exported_heap *list;

bool p2p_share_library(const epic_peer *peers, int num_ranks, char *why)
{
    for (int q = 1; q < num_ranks; q++)
        for (int r = 0; r < q; r++) {
            if (!p2p_same(peers[q].process, peers[r].process)) continue;
            if (peers[q].library == peers[r].library) continue;
            snprintf(
                why, 256,
                "ranks %d and %d are in one process and have loaded two copies of libepic; "
                "load one",
                r, q);
            return false;
        }
    return true;
}

/* Returns the list's entry for the heap of rank `rank` of a group, or NULL if the list has
 * none. The caller must hold the mutex. */
static const exported_heap *find_exported(uint64_t group_id, int rank)
{
    const exported_heap *at = list;
    while (at && (at->group->self.group_id != group_id || at->group->rank != rank))
        at = at->next;
    return at;
}

/* Adds this rank's heap to the list. Returns EPIC_EPEER if the list already has it. */
static epic_result export_here(const epic_group *group, uint8_t *heap)
{
    exported_heap *mine = malloc(sizeof *mine);
    if (!mine) return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    pthread_mutex_lock(&mutex);
    const bool taken = find_exported(group->self.group_id, group->rank) != NULL;
    if (!taken) {
        *mine = (exported_heap){list, group, heap};
        list = mine;
    }
    pthread_mutex_unlock(&mutex);
    if (!taken) return EPIC_OK;
    free(mine);
    return epic_fail(EPIC_EPEER,
                     "rank %d of this group is in it already: the bootstrap has mixed "
                     "two groups; open one from each bootstrap",
                     group->rank);
}

epic_result p2p_heap_export(epic_group *g, uint8_t *heap, p2p_heap_handle *handle)
{
    bool others = false;
    TRY(export_here(g, heap));
    handle->kind = (uint32_t)g->heap_kind;
    handle->bytes = g->heap_memory ? (int64_t)g->heap_memory->mapping.bytes : 0;
    for (int q = 0; q < g->num_ranks; q++)
        others |= p2p_is_near(g, q) && p2p_is_elsewhere(g, q);
    return others ? p2p_heap_describe(g, heap, handle) : EPIC_OK;
}

static void withdraw_here(const epic_group *group)
{
    pthread_mutex_lock(&mutex);
    for (exported_heap **link = &list; *link; link = &(*link)->next) {
        exported_heap *at = *link;
        if (at->group != group) continue;
        *link = at->next;
        free(at);
        break;
    }
    pthread_mutex_unlock(&mutex);
}

uint8_t *p2p_heap_find(uint64_t group_id, int rank)
{
    pthread_mutex_lock(&mutex);
    const exported_heap *peer = find_exported(group_id, rank);
    uint8_t *heap = peer ? peer->heap : NULL;
    pthread_mutex_unlock(&mutex);
    return heap;
}

/* Sets *device to the device of a heap of this process. `bytes`: size of the heap, or 0 if the
 * heap is memory of cudaMalloc(). */
static epic_result find_device(const uint8_t *heap, size_t bytes, int *device)
{
    struct cudaPointerAttributes attributes;
    if (bytes) return p2p_chunk_device(heap, device);
    TRY(p2p_cuda(cudaPointerGetAttributes(&attributes, heap), "a peer's heap"));
    *device = attributes.device;
    return EPIC_OK;
}

/* Sets g->self.heap[peer] to the heap of a rank of this process. If that heap is on another
 * device, lets this rank's device access it. `bytes`: as in find_device(). Memory of
 * cuMemCreate() needs p2p_chunks_allow(), because peer access does not include it. */
static epic_result connect_local_heap(epic_group *g, int peer, size_t bytes)
{
    int can = 0, device = 0;
    uint8_t *heap = p2p_heap_find(g->self.group_id, peer);
    if (!heap)
        return epic_fail(
            EPIC_EPEER,
            "rank %d has no memory in the process of rank %d: its open has failed (see "
            "its error), or it only claims to be in this process",
            peer, g->rank);
    g->self.heap[peer] = heap;
    TRY(find_device(heap, bytes, &device));
    if (device == g->device) return EPIC_OK;
    TRY(p2p_cuda(cudaDeviceCanAccessPeer(&can, g->device, device), "peer access"));
    if (!can)
        return epic_fail(EPIC_ENOTSUP,
                         "ranks %d and %d: device %d cannot access the memory of device %d",
                         g->rank, peer, g->device, device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled)
        (void)cudaGetLastError();
    else
        TRY(p2p_cuda(error, "peer access"));
    return bytes ? p2p_chunks_allow(heap, bytes, g->device) : EPIC_OK;
}

/* Checks that all handles are valid, and that the ranks have the same value of EPIC_HEAP. */
static epic_result check_handles(const epic_group *g, const p2p_heap_handle *handles)
{
    for (int q = 0; q < g->num_ranks; q++) {
        const p2p_heap_handle *its = &handles[q];
        if (its->kind > P2P_HEAP_FABRIC ||
            (its->kind != P2P_HEAP_IPC && its->bytes < g->self.at.bytes))
            return epic_fail(EPIC_EPEER, "EPIC did not write the handle of the heap of rank %d",
                             q);
        if (its->kind != handles[0].kind)
            return epic_fail(EPIC_EMISMATCH,
                             "rank %d: EPIC_HEAP=%s, and =%s on rank 0: set the same on every "
                             "rank, or unset it",
                             q, p2p_heap_kind_name(its->kind),
                             p2p_heap_kind_name(handles[0].kind));
    }
    return EPIC_OK;
}

/* Processes may share a GPU. The GPU then runs their kernels in time slices, which is slow but
 * works. */
epic_result p2p_heap_connect(epic_group *g, const p2p_heap_handle *handles)
{
    TRY(check_handles(g, handles));
    if (g->heap_kind == P2P_HEAP_DESCRIPTOR) TRY(p2p_heap_exchange(g, handles));
    for (int q = 0; q < g->num_ranks; q++) {
        if (q == g->rank || !p2p_is_near(g, q)) continue;
        if (!p2p_is_elsewhere(g, q))
            TRY(connect_local_heap(g, q, (size_t)handles[q].bytes));
        else if (g->heap_kind != P2P_HEAP_DESCRIPTOR)
            TRY(p2p_heap_map(g, q, &handles[q], NULL));
    }
    return EPIC_OK;
}

void p2p_heap_unmap(epic_group *group, int peer)
{
    p2p_memory_unmap(&group->mappings[peer]);
}

void p2p_heap_disconnect(epic_group *group)
{
    withdraw_here(group);
    /* cuMemUnmap() does not wait for kernels that use the memory */
    if (group->heap_kind != P2P_HEAP_IPC) (void)cudaDeviceSynchronize();
    for (int q = 0; q < group->num_ranks; q++) p2p_heap_unmap(group, q);
}

bool p2p_has_released(const epic_group *g, int peer)
{
    return p2p_same(g->peers[peer].process, g->peers[g->rank].process) &&
           p2p_heap_find(g->self.group_id, peer) != g->self.heap[peer];
}

seat_set p2p_ranks_with_heaps(const epic_group *g)
{
    seat_set ranks = {0};
    for (int q = 0; q < g->num_ranks; q++)
        if (!p2p_is_vacant(g, q) && !p2p_is_dead(g, q) && !p2p_has_released(g, q))
            seat_set_add(&ranks, q);
    return ranks;
}
