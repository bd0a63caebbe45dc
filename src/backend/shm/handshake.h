/* SPDX-License-Identifier: Apache-2.0 */
/* The handshake: the first message that each side sends on a connection of two ranks. */
#ifndef EPIC_SHM_HANDSHAKE_H
#define EPIC_SHM_HANDSHAKE_H

#include <sys/types.h>

#include "backend/backend.h"

/* The message that each side of a connection sends once. */
typedef struct handshake {
    uint64_t group_id;
    uint64_t secret[2]; /* the secret of the receiver */
    int64_t rank;       /* rank of the sender */
} handshake;

/* Sends `size` bytes as one message, with the descriptor `memory` unless it is -1. Returns the
 * number of bytes sent, or -1 with errno. */
ssize_t shm_send_message(int fd, const void *bytes, size_t size, int memory);

/* Receives a message of `size` bytes without waiting. *memory is as in handshake_receive().
 * Returns false if no message has arrived, or one of another size. */
bool shm_receive_message(int fd, void *bytes, size_t size, int *memory);

/* Sends a handshake on the socket `fd` to rank `to`. `memory` is a descriptor to send with it,
 * or -1. Returns EPIC_EPEER if the rank has closed its connection, EPIC_EDEVICE or EPIC_ENOMEM
 * if the system refuses. */
epic_result handshake_send(int fd, const handshake *hello, int to, int memory);

#define HANDSHAKE_NO_ROOM (-2) /* a descriptor arrived, but this process has no free one */

/* Receives a handshake without waiting. Stores the descriptor that arrived with it in *memory,
 * or HANDSHAKE_NO_ROOM. If `memory` is NULL, accepts no descriptor. Returns false if no message
 * has arrived, or one that is not a handshake. */
bool handshake_receive(int fd, handshake *hello, int *memory);

/* Returns whether the process at the other end belongs to the same user. */
bool handshake_is_same_user(int fd);

/* Stores the error sentence "system call `what` failed" with errno. Returns EPIC_ENOMEM or
 * EPIC_EDEVICE. */
epic_result shm_fail_with_errno(const char *what);
/* Stores the error sentence that a peer closed its connection while joining. Returns
 * EPIC_EPEER. */
epic_result shm_fail_with_left(int peer);

#endif
