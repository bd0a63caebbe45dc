/* SPDX-License-Identifier: Apache-2.0 */
/* The handshake: the first message that each side sends on a connection of two ranks
 * (connections.h). Also functions for messages of any kind. A message may carry a file
 * descriptor, here called `memory`. */
#ifndef EPIC_SHM_HANDSHAKE_H
#define EPIC_SHM_HANDSHAKE_H

#include <sys/types.h>

#include "backend/backend.h"

/* The message that each side of a connection sends once. */
typedef struct handshake {
    uint64_t group_id;
    uint64_t secret[2]; /* the random secret that the receiver has published */
    int64_t rank;       /* rank of the sender */
} handshake;

/* Sends `size` bytes as one message on the socket `fd`, with the descriptor `memory`; -1: no
 * descriptor. Returns the number of bytes sent, or -1 with errno set. */
ssize_t shm_send_message(int fd, const void *bytes, size_t size, int memory);

/* Receives a message without waiting, and copies at most `size` bytes of it to `bytes`. If a
 * descriptor arrived with the message, sets *memory to the descriptor, or to HANDSHAKE_NO_ROOM.
 * If not, leaves *memory unchanged. If `memory` is NULL, accepts no descriptor. Returns the
 * number of bytes of the whole message, 0 if the peer has closed the connection, or -1 with
 * errno set: EAGAIN if no message has arrived. */
ssize_t shm_receive_any(int fd, void *bytes, size_t size, int *memory);

/* Like shm_receive_any(), but for a message of `size` bytes. Returns false if no message has
 * arrived, or if the message has another size. */
bool shm_receive_message(int fd, void *bytes, size_t size, int *memory);

/* Sends a handshake on the socket `fd` to rank `to`. `memory` is a descriptor to send with it,
 * or -1. Returns EPIC_EPEER if the rank has closed its connection, and EPIC_EDEVICE or
 * EPIC_ENOMEM if the system cannot send the message. */
epic_result handshake_send(int fd, const handshake *message, int to, int memory);

/* value of *memory: the message had a descriptor, but this process has too many open files to
 * receive it */
#define HANDSHAKE_NO_ROOM (-2)

/* Receives a handshake without waiting, like shm_receive_message(). Returns false if no message
 * has arrived, or if the message is not a handshake. */
bool handshake_receive(int fd, handshake *message, int *memory);

bool handshake_is_same_user(int fd);

/* Stores the error text "system call `what` failed" with errno. Returns EPIC_ENOMEM or
 * EPIC_EDEVICE. */
epic_result shm_fail_with_errno(const char *what);
/* Stores an error text that says that a peer closed its connection while joining. Returns
 * EPIC_EPEER. */
epic_result shm_fail_with_left(int peer);

#endif
