/* SPDX-License-Identifier: Apache-2.0 */
/* The messages with which two ranks begin their line. */
#ifndef EPIC_SHM_HANDSHAKE_H
#define EPIC_SHM_HANDSHAKE_H

#include "backend/backend.h"

typedef struct handshake {
    uint64_t group_id;
    uint64_t secret[2]; /* of the rank that receives it */
    int64_t rank;       /* who sends it */
} handshake;

/* memory: a descriptor that goes along; -1: none.  `to` is named in the error. */
epic_result handshake_send(int fd, const handshake *hello, int to, int memory);

#define HANDSHAKE_NO_ROOM (-2) /* a descriptor came, and this process may have no more */

/* What has come, without waiting.  *memory gets the descriptor that came along, or
 * HANDSHAKE_NO_ROOM; NULL: none may.  False: something else, or nothing. */
bool handshake_receive(int fd, handshake *hello, int *memory);

bool handshake_is_same_user(int fd);

/* Errors: the system refused `what`, with errno; a rank hung up. */
epic_result shm_fail_with_errno(const char *what);
epic_result shm_fail_with_left(int peer);

#endif
