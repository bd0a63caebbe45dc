/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: one UNIX socket between every two ranks. Rank 0 sends the descriptor of the
 * shared memory over them. Later nothing is sent, and a connection that closes is a process
 * that has ended. A forked child may keep its end open, so the process itself is watched, too.
 */
#ifndef EPIC_SHM_CONNECTIONS_H
#define EPIC_SHM_CONNECTIONS_H

#include "backend/backend.h"
#include "backend/shared/atomics.h"

/* The connections of one rank. */
typedef struct shm_connections {
    int num_ranks;
    int rank;
    int *sockets;       /* [num_ranks]; -1: none */
    int *processes;     /* [num_ranks] pidfds; -1: none, only the socket is watched */
    _Atomic bool *dead; /* [num_ranks] */
} shm_connections;

/* Allocates the tables. On an error connections_close() frees what was allocated. */
epic_result connections_alloc(shm_connections *connections, int rank, int num_ranks);

/* Connects to all ranks. Collective: a rank that has failed before also calls it, with `ready`
 * false, so that the others learn it. Rank 0 passes the descriptor of the memory in `*memory`;
 * the others receive theirs there. */
epic_result connections_open(shm_connections *connections, const epic_join *join, bool ready,
                             int *memory);

/* Replaces connections_open() on a rank that has no memory for the connections. Returns
 * `result` with its error text. */
epic_result connections_decline(const epic_join *join, epic_result result);

/* Closes and frees everything. Members may be NULL. */
void connections_close(shm_connections *connections);

/* Returns whether the peer's process has ended. Any thread may call it. */
bool connections_is_dead(shm_connections *connections, int peer);

#endif
