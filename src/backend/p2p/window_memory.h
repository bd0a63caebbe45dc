/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of windows: how other ranks can access it. Peers of other processes map memory of
 * cudaMalloc by cudaIpc, and memory of cuMemCreate by its chunks (chunks.h). */
#ifndef EPIC_P2P_WINDOW_MEMORY_H
#define EPIC_P2P_WINDOW_MEMORY_H

#include "backend/p2p/chunk_socket.h"

/* Returns whether the rank is in another process. */
static inline bool p2p_is_elsewhere(const epic_group *g, int rank)
{
    return !p2p_same(g->peers[rank].process, g->peers[g->rank].process);
}

/* Allocates zeroed memory on the group's device. Errors: EPIC_ENOMEM, EPIC_EDEVICE. */
epic_result p2p_memory_allocate(epic_group *group, int64_t bytes, uint8_t **data);

/* Describes memory of this rank in `message`, from which peers map it. If the memory has chunks and
 * there are other processes, exports the chunks; the caller closes them. Errors: EPIC_ENOTSUP, if
 * it is no memory of the group's device or if peers cannot map it. */
epic_result p2p_memory_export(const epic_group *group, const uint8_t *data, int64_t bytes,
                              p2p_window_message *message, p2p_exported_chunks *chunks);

/* Maps chunks that a rank of another process has exported, and checks that they contain its
 * window. Errors: EPIC_ENOTSUP. */
epic_result p2p_memory_map_chunks(const epic_group *group, const p2p_window_message *its,
                                  const p2p_exported_chunks *chunks, p2p_mapping *out);

/* Sets *at to the address at which this rank can access the window of a peer. Maps the memory if
 * this is necessary; the chunks of another process are already mapped. Errors: EPIC_ENOTSUP. */
epic_result p2p_memory_map(const epic_group *group, int peer, const p2p_window_message *its,
                           p2p_mapping *mapping, uint8_t **at);
void p2p_memory_unmap(p2p_mapping *mapping);

#endif
