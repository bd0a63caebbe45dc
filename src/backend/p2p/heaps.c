/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the heap of each rank accessible to the other ranks of its host. Ranks of different
 * processes send CUDA IPC handles through the bootstrap. Ranks of one process look up each
 * other's addresses in a global list. They do not send addresses through the bootstrap, because
 * another program that can connect to the bootstrap could send a false address. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/p2p/p2p.h"
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

epic_result p2p_heap_export(const epic_group *group, uint8_t *heap, cudaIpcMemHandle_t *handle)
{
    const epic_peer *me = &group->peers[group->rank];
    bool others = false;
    TRY(export_here(group, heap));
    for (int q = 0; q < group->num_ranks; q++)
        others |= p2p_same(group->peers[q].host, me->host) &&
                  !p2p_same(group->peers[q].process, me->process);
    if (!others) return EPIC_OK;
    return p2p_cuda(cudaIpcGetMemHandle(handle, heap), "an IPC handle of the heap");
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

/* Sets g->self.heap[peer] to the heap of a rank of this process. If that heap is on another
 * device, enables access to that device from this rank's device. */
static epic_result connect_local_heap(epic_group *g, int peer)
{
    struct cudaPointerAttributes attributes;
    int can = 0;
    uint8_t *heap = p2p_heap_find(g->self.group_id, peer);
    if (!heap)
        return epic_fail(
            EPIC_EPEER,
            "rank %d has no memory in the process of rank %d: its open has failed (see "
            "its error), or it only claims to be in this process",
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

cudaError_t p2p_open_handle(void **memory, cudaIpcMemHandle_t handle)
{
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&opening);
    const cudaError_t error =
        cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess);
    pthread_mutex_unlock(&opening);
    if (error == cudaSuccess) return error;
    *memory = NULL;
    (void)cudaGetLastError();
    return error;
}

static epic_result map_remote_heap(epic_group *g, int peer, cudaIpcMemHandle_t handle)
{
    void *heap;
    const cudaError_t error = p2p_open_handle(&heap, handle);
    if (error != cudaSuccess)
        return epic_fail(
            EPIC_ENOTSUP,
            "ranks %d and %d: the peer's device memory cannot be mapped here: CUDA "
            "reports \"%s\"",
            g->rank, peer, cudaGetErrorString(error));
    g->self.heap[peer] = heap;
    g->mapped[peer] = true;
    return EPIC_OK;
}

/* Sets g->self.heap[peer] to the heap of a peer. If two processes share a GPU, the GPU runs
 * their kernels in time slices, which is slow but works. */
epic_result p2p_heap_connect(epic_group *g, int peer, const cudaIpcMemHandle_t *handle)
{
    if (peer == g->rank) return EPIC_OK;
    if (p2p_same(g->peers[peer].process, g->peers[g->rank].process))
        return connect_local_heap(g, peer);
    return map_remote_heap(g, peer, *handle);
}

void p2p_heap_unmap(epic_group *group, int peer)
{
    if (group->mapped[peer]) (void)cudaIpcCloseMemHandle(group->self.heap[peer]);
    group->mapped[peer] = false;
}

void p2p_heap_disconnect(epic_group *group)
{
    withdraw_here(group);
    for (int q = 0; q < group->num_ranks; q++) p2p_heap_unmap(group, q);
}

bool p2p_has_released(const epic_group *g, int peer)
{
    return p2p_same(g->peers[peer].process, g->peers[g->rank].process) &&
           p2p_heap_find(g->self.group_id, peer) != g->self.heap[peer];
}
