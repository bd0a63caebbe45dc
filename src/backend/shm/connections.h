/* SPDX-License-Identifier: Apache-2.0 */
/* Lines: a connected UNIX socket between every two ranks.  They carry the memory's descriptor
 * once; after that they stay silent, and a line that hangs up is a process that has ended.  Children
 * that it forked may keep its end open, so the process itself is watched, too. */
#ifndef EPIC_SHM_CONNECTIONS_H
#define EPIC_SHM_CONNECTIONS_H

#include "backend/backend.h"
#include "backend/shared/atomics.h"

typedef struct shm_connections {
    int num_ranks;
    int rank;
    int *sockets;       /* [num_ranks]; -1: none */
    int *processes;     /* [num_ranks] pidfds; -1: none, the socket must do */
    _Atomic bool *dead; /* [num_ranks] */
} shm_connections;

epic_result connections_alloc(shm_connections *connections, int rank, int num_ranks);

/* Collective; also a rank that has failed before comes, with `ready` false, so that the others
 * hear of it.  Rank 0 brings the memory's descriptor, the others get theirs; all keep what
 * connections_close closes. */
epic_result connections_open(shm_connections *connections, const epic_join *join, bool ready,
                             int *memory);

/* In place of connections_open, for a rank that could not even make lines; returns `result`, and its
 * sentence stays. */
epic_result connections_decline(const epic_join *join, epic_result result);

/* NULL members are allowed. */
void connections_close(shm_connections *connections);

bool connections_is_dead(shm_connections *connections, int peer);

#endif
