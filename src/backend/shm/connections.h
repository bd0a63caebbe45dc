/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: one UNIX socket between every two ranks. When the group opens, rank 0 sends the
 * descriptor of the shared memory over its sockets. Later the connections carry only
 * descriptors of windows (windows.c) and messages of epic_regroup (generations.c). A closed
 * connection shows that the peer's process has exited. A forked child of the peer may keep the
 * connection open, so each rank also watches the process with a pidfd, a Linux descriptor that
 * becomes readable when the process exits. */
#ifndef EPIC_SHM_CONNECTIONS_H
#define EPIC_SHM_CONNECTIONS_H

#include <sys/epoll.h>

#include "backend/backend.h"
#include "backend/seat_set.h"
#include "backend/shared/atomics.h"

typedef struct shm_connections {
    int num_ranks;
    int rank;
    int *sockets; /* [num_ranks]; -1: no connection */
    /* epoll descriptor that watches all connections; connections_rank_of() reads its events */
    int epoll;
    /* [num_ranks]: pidfd of each peer; -1: no pidfd, so only the peer's socket is watched */
    int *processes;
    _Atomic bool *dead; /* [num_ranks] peers that were found dead; never reset */
    /* the watcher of this rank (watch.h); NULL: this rank has no watcher */
    struct shm_watch *watch;
    struct shm_generations *generations; /* the state for epic_regroup */
    uint64_t num_offers; /* number of windows that this rank has offered to its peers */
} shm_connections;

/* Allocates the tables of *connections. After an error, connections_close() frees what was
 * allocated. */
epic_result connections_alloc(shm_connections *connections, int rank, int num_ranks);

/* Connects to all ranks. Collective: a rank that has failed calls this function with `ready`
 * false, so that its peers return an error instead of waiting. Rank 0 passes the descriptor of
 * the shared memory in *memory. The other ranks pass -1 in *memory and receive the descriptor
 * in it. The caller closes the descriptor. Errors: EPIC_EPEER, EPIC_ETIMEOUT, EPIC_EDEVICE,
 * EPIC_ENOMEM. */
epic_result connections_open(shm_connections *connections, const epic_join *join, bool ready,
                             int *memory);

/* A rank that could not allocate its connections calls this function instead of
 * connections_open(). It takes part in the gather, so that the peers do not wait for this rank.
 * Returns `result` and keeps the error text. */
epic_result connections_decline(const epic_join *join, epic_result result);

/* Closes and frees everything in *connections. Pointers in *connections may be NULL. */
void connections_close(shm_connections *connections);

/* Closes the connections to the peers that were found dead and are not in `members`. */
void connections_close_dead(shm_connections *connections, const seat_set *members);

/* Returns the rank from whose connection an event of connections->epoll comes. */
int connections_rank_of(const struct epoll_event *event);

/* Makes connections->epoll stop watching the connection to a peer. */
void connections_ignore(const shm_connections *connections, int peer);

/* Returns whether the peer's process has exited. Any thread may call this function. */
bool connections_is_dead(shm_connections *connections, int peer);

#endif
