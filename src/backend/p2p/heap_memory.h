/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of heaps: allocates this rank's heap, exports it for other processes, and maps the
 * heaps of other processes. The variable EPIC_HEAP selects the kind of memory and of handles
 * (p2p_heap_kind). */
#ifndef EPIC_P2P_HEAP_MEMORY_H
#define EPIC_P2P_HEAP_MEMORY_H

#include "backend/p2p/chunks.h"

/* This rank's heap in memory of cuMemCreate(). */
typedef struct p2p_heap_memory {
    p2p_mapping mapping;
    p2p_chunks chunks; /* one chunk */
    /* the chunk in its exported form; contains no chunk if all ranks are in this process */
    p2p_exported_chunks exported;
    int socket; /* receives the descriptors of other ranks; -1: not open */
} p2p_heap_memory;

/* Returns whether `rank` is in another process than the calling rank. */
static inline bool p2p_is_elsewhere(const epic_group *g, int rank)
{
    return !p2p_same(g->peers[rank].process, g->peers[g->rank].process);
}

/* Returns whether EPIC_HEAP is unset or "fabric". */
bool p2p_heap_may_be_fabric(void);

/* Returns the name of a p2p_heap_kind, which is also the value of EPIC_HEAP. */
const char *p2p_heap_kind_name(uint32_t kind);

/* Writes to handle->handle the data with which other processes can map this rank's heap.
 * Errors: EPIC_ENOTSUP, EPIC_EDEVICE. */
epic_result p2p_heap_describe(epic_group *group, uint8_t *heap, p2p_heap_handle *handle);
/* Closes this rank's socket and the descriptor of its heap. Only joining needs the two. */
void p2p_heap_close_sockets(epic_group *group);

/* Maps the heap of a rank of another process, and sets group->self.heap[peer] to its address.
 * `exported`: the chunk that has arrived at the socket, used only if the kind of the heap is
 * P2P_HEAP_DESCRIPTOR. Errors: EPIC_ENOTSUP. */
epic_result p2p_heap_map(epic_group *group, int peer, const p2p_heap_handle *handle,
                         const p2p_exported_chunks *exported);

/* Maps memory of another process. A mutex lets only one thread at a time do so, because CUDA
 * returns cudaErrorAlreadyMapped if two threads open the same handle at the same time. */
cudaError_t p2p_open_handle(void **memory, cudaIpcMemHandle_t handle);

/* Unmaps memory of another process. Does nothing if nothing is mapped. If the memory is of
 * cuMemCreate(), no kernel may still use it. */
void p2p_memory_unmap(p2p_mapping *mapping);

#endif
