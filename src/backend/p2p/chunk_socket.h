/* SPDX-License-Identifier: Apache-2.0 */
/* Sends exported chunks (chunks.h) to other processes of the host. Each rank binds a datagram
 * socket of the Unix domain to a name that the system chooses, and publishes the name. A
 * message carries the file descriptors of the chunks. */
#ifndef EPIC_P2P_CHUNK_SOCKET_H
#define EPIC_P2P_CHUNK_SOCKET_H

#include "backend/p2p/chunks.h"

/* The beginning of each message. The receiver ignores a message if its header has unexpected
 * values, because any process of the host may send to the socket. */
typedef struct p2p_chunk_header {
    uint64_t group_id;
    /* If the message contains a window: number of the exchange of messages in which the ranks
     * add the window (windows.c). 0: the message contains the heap of the sender. */
    uint64_t sequence;
    int32_t rank; /* the rank that has sent the message */
    uint32_t reserved;
} p2p_chunk_header;

/* Opens a socket and writes its name to `name`. Returns the socket, or -1 with errno set. */
int p2p_chunk_socket(char name[8]);

/* Sends chunks to rank `to`, whose socket has the name `name`. Sets *is_sent to false if the
 * receiver's queue is full. In this case the caller must call again later. Errors:
 * EPIC_ENOTSUP. */
epic_result p2p_chunk_send(int socket, int to, const char name[8],
                           const p2p_chunk_header *header, const p2p_exported_chunks *chunks,
                           bool *is_sent);

/* Receives one message without waiting. Sets *pid to the id of the process that sent it, or to
 * 0 if no message has arrived. The caller closes the received descriptors with
 * p2p_chunks_close(). If the message does not have the format of p2p_chunk_send(), sets
 * header->rank to -1. Errors: EPIC_ENOTSUP, EPIC_EDEVICE. */
epic_result p2p_chunk_receive(int socket, p2p_chunk_header *header, p2p_exported_chunks *chunks,
                              int64_t *pid);

#endif
