/* SPDX-License-Identifier: Apache-2.0 */
/* The messages with which two ranks begin their line. */
#ifndef EPIC_SHM_GREETING_H
#define EPIC_SHM_GREETING_H

#include "backend/backend.h"

typedef struct greeting {
    uint64_t group_id;
    uint64_t secret[2]; /* of the rank that receives it */
    int64_t rank;       /* who sends it */
} greeting;

/* memory: a descriptor that goes along; -1: none.  `to` is named in the error. */
epic_result greeting_send(int fd, const greeting *hello, int to, int memory);

#define GREETING_NO_ROOM (-2) /* a descriptor came, and this process may have no more */

/* What has come, without waiting.  *memory gets the descriptor that came along, or
 * GREETING_NO_ROOM; NULL: none may.  False: something else, or nothing. */
bool greeting_receive(int fd, greeting *hello, int *memory);

bool greeting_is_of_same_user(int fd);

/* Errors: the system refused `what`, with errno; a rank hung up. */
epic_result greeting_refused(const char *what);
epic_result greeting_left(int peer);

#endif
