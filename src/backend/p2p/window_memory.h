/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the memory of a window accessible to other ranks. Peers in other processes map memory
 * from cudaMalloc with a CUDA IPC handle, and memory from cuMemCreate by importing its chunks
 * (chunks.h). */
#ifndef EPIC_P2P_WINDOW_MEMORY_H
#define EPIC_P2P_WINDOW_MEMORY_H

#include "backend/p2p/chunk_socket.h"
#include "backend/p2p/heap_memory.h"

/* Allocates memory on the group's device for a window, sets it to zeros, and sets *data to its
 * address. Errors: EPIC_ENOMEM, EPIC_EDEVICE. */
epic_result p2p_memory_allocate(epic_group *group, int64_t bytes, uint8_t **data);

/* Describes the memory [data, data + bytes) of this rank in *message, so that peers can map it.
 * If the memory has chunks and the group has ranks in other processes, exports the chunks to
 * *chunks. The caller must close these chunks. Returns EPIC_ENOTSUP if the memory is not on the
 * group's device, or if peers cannot map it. */
epic_result p2p_memory_export(const epic_group *group, const uint8_t *data, int64_t bytes,
                              p2p_window_message *message, p2p_exported_chunks *chunks);

/* Maps chunks that a rank of another process has exported. Checks that the chunks contain the
 * window that the rank describes in *its, the message from that rank. Errors: EPIC_ENOTSUP. */
epic_result p2p_memory_map_chunks(const epic_group *group, const p2p_window_message *its,
                                  const p2p_exported_chunks *chunks, p2p_mapping *out);

/* Sets *at to the address at which this rank can access the window of a peer. *its is the
 * message from the peer. Maps the memory if necessary. Chunks of another process must already
 * be mapped (p2p_memory_map_chunks()). Errors: EPIC_ENOTSUP. */
epic_result p2p_memory_map(const epic_group *group, int peer, const p2p_window_message *its,
                           p2p_mapping *mapping, uint8_t **at);
#endif
