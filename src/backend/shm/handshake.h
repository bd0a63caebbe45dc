/* SPDX-License-Identifier: Apache-2.0 */
/* The first messages on a connection of two ranks. */
#ifndef EPIC_SHM_HANDSHAKE_H
#define EPIC_SHM_HANDSHAKE_H

#include "backend/backend.h"

/* The only message of a connection. */
typedef struct handshake {
    uint64_t group_id;
    uint64_t secret[2]; /* the secret of the receiver */
    int64_t rank;       /* of the sender */
} handshake;

/* Sends a handshake. memory: a descriptor to send with it; -1: none. Errors name rank `to`. */
epic_result handshake_send(int fd, const handshake *hello, int to, int memory);

#define HANDSHAKE_NO_ROOM (-2) /* a descriptor arrived, but this process may have no more */

/* Receives a handshake without waiting. `*memory` gets the descriptor that came with it, or
 * HANDSHAKE_NO_ROOM; NULL: none is accepted. Returns false if nothing or something else
 * arrived. */
bool handshake_receive(int fd, handshake *hello, int *memory);

/* Returns whether the process at the other end belongs to the same user. */
bool handshake_is_same_user(int fd);

/* Set an error and return it: a system call `what` failed with errno; a peer closed its
 * connection. */
epic_result shm_fail_with_errno(const char *what);
/* Sets the error that a peer closed its connection. Returns EPIC_EPEER. */
epic_result shm_fail_with_left(int peer);

#endif
