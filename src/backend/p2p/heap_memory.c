/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/heap_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/p2p/chunk_socket.h"
#include "base/error.h"

_Static_assert(sizeof(cudaIpcMemHandle_t) <= sizeof((p2p_heap_handle *)0)->handle &&
                   sizeof(CUmemFabricHandle) <= sizeof((p2p_heap_handle *)0)->handle,
               "a p2p_heap_handle has no space for a handle of CUDA");

/* ------------------------------------------------------------------ the kind of a heap ---- */

static const char *const kind_names[] = {"ipc", "descriptor", "fabric"};

const char *p2p_heap_kind_name(uint32_t kind)
{
    return kind <= P2P_HEAP_FABRIC ? kind_names[kind] : "an unknown value";
}

bool p2p_heap_may_be_fabric(void)
{
    const char *text = getenv("EPIC_HEAP");
    return !text || !*text || !strcmp(text, kind_names[P2P_HEAP_FABRIC]);
}

/* Sets *kind to the value of EPIC_HEAP. If the variable is not set, chooses P2P_HEAP_FABRIC if
 * ranks of other hosts map the heap, and P2P_HEAP_IPC otherwise. */
static epic_result read_kind(const epic_group *g, p2p_heap_kind *kind)
{
    const char *text = getenv("EPIC_HEAP");
    *kind = p2p_spans_hosts(g) ? P2P_HEAP_FABRIC : P2P_HEAP_IPC;
    if (!text || !*text) return EPIC_OK;
    for (int i = 0; i <= P2P_HEAP_FABRIC; i++) {
        if (strcmp(text, kind_names[i]) != 0) continue;
        *kind = (p2p_heap_kind)i;
        return EPIC_OK;
    }
    return epic_fail(EPIC_EINVAL,
                     "EPIC_HEAP=%.32s: must be ipc, descriptor or fabric; without it a host "
                     "has IPC handles, and an NVLink domain of several hosts fabric handles",
                     text);
}

/* Returns an error if a rank of this host is in another network namespace, because descriptors
 * are sent over sockets. */
static epic_result check_namespaces(const epic_group *g)
{
    const epic_peer *me = &g->peers[g->rank];
    for (int q = 0; q < g->num_ranks; q++)
        if (p2p_is_near(g, q) && g->peers[q].network_ns != me->network_ns)
            return epic_fail(EPIC_ENOTSUP,
                             "EPIC_HEAP=descriptor: ranks %d and %d are in different network "
                             "namespaces: they must be in one; unset EPIC_HEAP",
                             g->rank, q);
    return EPIC_OK;
}

/* -------------------------------------------------------------------- this rank's heap ---- */

static epic_result allocate_chunk(epic_group *g, int64_t bytes, uint8_t **heap)
{
    p2p_heap_memory *m = g->heap_memory = calloc(1, sizeof *m);
    if (!m) return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    m->socket = -1;
    const CUmemAllocationHandleType type = g->heap_kind == P2P_HEAP_FABRIC
                                               ? CU_MEM_HANDLE_TYPE_FABRIC
                                               : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    TRY(p2p_chunks_create(bytes, g->device, type, &m->chunks));
    TRY(p2p_chunks_map(&m->chunks, g->device, &m->mapping));
    *heap = m->mapping.at;
    return EPIC_OK;
}

epic_result p2p_heap_allocate(epic_group *g, int64_t bytes, uint8_t **heap)
{
    char what[96];
    TRY(read_kind(g, &g->heap_kind));
    if (g->heap_kind == P2P_HEAP_DESCRIPTOR) TRY(check_namespaces(g));
    if (g->heap_kind != P2P_HEAP_IPC) return allocate_chunk(g, bytes, heap);
    snprintf(what, sizeof what, "allocating a heap of %lld bytes", (long long)bytes);
    return p2p_cuda(cudaMalloc((void **)heap, (size_t)bytes), what);
}

void p2p_heap_free(epic_group *g, uint8_t *heap)
{
    p2p_heap_memory *m = g->heap_memory;
    if (!m) {
        if (heap) (void)cudaFree(heap);
        return;
    }
    p2p_heap_close_sockets(g);
    if (m->mapping.at) {
        (void)cudaDeviceSynchronize(); /* cuMemUnmap() does not wait for kernels */
        p2p_chunks_unmap(&m->mapping);
    }
    p2p_chunks_release(&m->chunks);
    free(m);
    g->heap_memory = NULL;
}

static epic_result open_socket(p2p_heap_memory *m, p2p_heap_handle *handle)
{
    char name[8];
    m->socket = p2p_chunk_socket(name);
    if (m->socket < 0)
        return epic_fail(EPIC_EDEVICE,
                         "EPIC_HEAP=descriptor: opening a socket for descriptors: %s%s",
                         strerror(errno), epic_remedy(errno));
    memcpy(handle->handle, name, sizeof name);
    return EPIC_OK;
}

epic_result p2p_heap_describe(epic_group *g, uint8_t *heap, p2p_heap_handle *handle)
{
    p2p_heap_memory *m = g->heap_memory;
    if (!m) {
        cudaIpcMemHandle_t ipc;
        TRY(p2p_cuda(cudaIpcGetMemHandle(&ipc, heap), "an IPC handle of the heap"));
        memcpy(handle->handle, &ipc, sizeof ipc);
        return EPIC_OK;
    }
    TRY(p2p_chunks_export(&m->chunks, heap, &m->exported));
    if (g->heap_kind == P2P_HEAP_DESCRIPTOR) return open_socket(m, handle);
    memcpy(handle->handle, &m->exported.chunks[0].fabric, sizeof(CUmemFabricHandle));
    return EPIC_OK;
}

void p2p_heap_close_sockets(epic_group *g)
{
    p2p_heap_memory *m = g->heap_memory;
    if (!m) return;
    p2p_chunks_close(&m->exported);
    if (m->socket >= 0) close(m->socket);
    m->socket = -1;
}

/* --------------------------------------------------------------- heaps of other ranks ---- */

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

static epic_result map_ipc(epic_group *g, int peer, const p2p_heap_handle *handle)
{
    cudaIpcMemHandle_t ipc;
    memcpy(&ipc, handle->handle, sizeof ipc);
    const cudaError_t error = p2p_open_handle(&g->mappings[peer].at, ipc);
    if (error == cudaSuccess) return EPIC_OK;
    return epic_fail(EPIC_ENOTSUP,
                     "ranks %d and %d: the peer's device memory cannot be mapped here: CUDA "
                     "reports \"%s\"",
                     g->rank, peer, cudaGetErrorString(error));
}

static epic_result map_exported(epic_group *g, int peer, const p2p_exported_chunks *exported)
{
    p2p_chunks chunks;
    char why[256];
    epic_result result = p2p_chunks_import(exported, &chunks);
    if (result == EPIC_OK) result = p2p_chunks_map(&chunks, g->device, &g->mappings[peer]);
    p2p_chunks_release(&chunks);
    if (result == EPIC_OK) return EPIC_OK;
    epic_fit_text(why, sizeof why, epic_sentence());
    return epic_fail(result,
                     "ranks %d and %d: the peer's device memory cannot be mapped here with its "
                     "%s: %s",
                     g->rank, peer,
                     g->heap_kind == P2P_HEAP_FABRIC ? "fabric handle" : "file descriptor",
                     why);
}

static epic_result map_fabric(epic_group *g, int peer, const p2p_heap_handle *handle)
{
    p2p_exported_chunks its = {.num = 1};
    its.chunks[0].bytes = handle->bytes;
    its.chunks[0].type = CU_MEM_HANDLE_TYPE_FABRIC;
    memcpy(&its.chunks[0].fabric, handle->handle, sizeof its.chunks[0].fabric);
    return map_exported(g, peer, &its);
}

epic_result p2p_heap_map(epic_group *g, int peer, const p2p_heap_handle *handle,
                         const p2p_exported_chunks *exported)
{
    TRY(g->heap_kind == P2P_HEAP_IPC      ? map_ipc(g, peer, handle)
        : g->heap_kind == P2P_HEAP_FABRIC ? map_fabric(g, peer, handle)
                                          : map_exported(g, peer, exported));
    g->self.heap[peer] = g->mappings[peer].at;
    return EPIC_OK;
}

void p2p_memory_unmap(p2p_mapping *mapping)
{
    if (mapping->bytes)
        p2p_chunks_unmap(mapping);
    else if (mapping->at)
        (void)cudaIpcCloseMemHandle(mapping->at);
    *mapping = (p2p_mapping){0};
}
