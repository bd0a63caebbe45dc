/* SPDX-License-Identifier: Apache-2.0 */
/* Lines: a connected UNIX socket between every two ranks.  They carry the memory's descriptor
 * once; after that they stay silent, and a line that hangs up is a process that has ended.  Children
 * that it forked may keep its end open, so the process itself is watched, too. */
#ifndef EPIC_SHM_LINES_H
#define EPIC_SHM_LINES_H

#include "backend/backend.h"
#include "backend/shared/atomics.h"

typedef struct shm_lines {
    int num_ranks;
    int rank;
    int *sockets;       /* [num_ranks]; -1: none */
    int *processes;     /* [num_ranks] pidfds; -1: none, the socket must do */
    _Atomic bool *dead; /* [num_ranks] */
} shm_lines;

epic_result lines_alloc(shm_lines *lines, int rank, int num_ranks);

/* Collective; also a rank that has failed before comes, with `ready` false, so that the others
 * hear of it.  Rank 0 brings the memory's descriptor, the others get theirs; all keep what
 * lines_close closes. */
epic_result lines_open(shm_lines *lines, const epic_join *join, bool ready, int *memory);

/* In place of lines_open, for a rank that could not even make lines; returns `result`, and its
 * sentence stays. */
epic_result lines_decline(const epic_join *join, epic_result result);

/* NULL members are allowed. */
void lines_close(shm_lines *lines);

bool lines_is_dead(shm_lines *lines, int peer);

#endif
