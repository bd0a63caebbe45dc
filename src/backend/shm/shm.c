/* SPDX-License-Identifier: Apache-2.0 */
/* The backend shm: ranks are processes of one host. Rank 0 creates anonymous memory (a memfd)
 * and sends its descriptor to the other ranks over the connections (connections.h). No file
 * stays behind after a crash, because the memory has no name.
 *
 * A child that a rank forks without exec keeps the rank's sockets open. In this case only a
 * pidfd shows that the rank's process has exited. Pidfds need Linux 5.3 and one PID namespace
 * for all ranks. Without pidfds, peers notice the exit of the rank when the child exits too, or
 * at their deadline. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/shared/shared.h"
#include "backend/shm/connections.h"
#include "backend/shm/generations.h"
#include "backend/shm/memory.h"
#include "backend/shm/watch.h"
#include "backend/shm/windows.h"
#include "base/error.h"

/* Returns whether all ranks are processes of one user on one host that can send descriptors to
 * each other. */
static bool can_join(const epic_peer *peers, int num_ranks, const epic_config *config,
                     char *why)
{
    (void)config;
    const epic_peer *a = &peers[0];
    for (int r = 1; r < num_ranks; r++) {
        const epic_peer *b = &peers[r];
        const char *what = a->host[0] != b->host[0]   ? "on another host"
                           : a->host[1] != b->host[1] ? "in another PID namespace (container)"
                           : a->uid != b->uid         ? "of another user"
                           : a->network_ns != b->network_ns
                               ? "in another network namespace (container)"
                               : NULL;
        if (!what) continue;
        snprintf(why, 256, "rank %d is %s than rank 0", r, what);
        return false;
    }
    return true;
}

static bool is_peer_dead(epic_group *group, int peer)
{
    return connections_is_dead(group->backend_data, peer);
}

/* Does the work of shm_join(). On an error, shm_join() releases everything that *connections,
 * *memory and *segment contain. */
static epic_result join_with(epic_group **out, const epic_join *join, const shared_layout *l,
                             shm_connections *connections, int *memory, char **segment)
{
    const bool first = join->bootstrap->rank == 0;
    epic_result result =
        connections_alloc(connections, join->bootstrap->rank, join->bootstrap->num_ranks);
    if (result == EPIC_OK)
        result = shm_generations_new(&connections->generations, join->bootstrap->num_ranks);
    if (result == EPIC_OK && first)
        result = shm_memory_create(l, join->group_id, memory, segment);
    const epic_result opened = connections_open(connections, join, result == EPIC_OK, memory);
    if (result != EPIC_OK) return result;
    TRY(opened);
    if (!first) TRY(shm_memory_open(l, join->group_id, 0, *memory, segment));
    TRY(shared_group_new(out, join, l, *segment, true));
    (*out)->is_dead = is_peer_dead;
    (*out)->backend_data = connections;
    const epic_result watched = shm_watch_open(*out, &connections->watch);
    if (watched != EPIC_OK) shared_group_free(*out);
    return watched;
}

static epic_result shm_join(epic_group **out, const epic_join *join)
{
    shared_layout l;
    TRY(shared_layout_of(join->config, &l));
    int memory = -1;
    char *segment = NULL;
    shm_connections *connections = calloc(1, sizeof *connections);
    if (!connections)
        return connections_decline(join, epic_fail(EPIC_ENOMEM, "shm: no memory"));
    const epic_result result = join_with(out, join, &l, connections, &memory, &segment);
    /* the mapping keeps the memory alive, so the descriptor can be closed */
    if (memory >= 0) close(memory);
    if (result == EPIC_OK) return EPIC_OK;
    if (segment) munmap(segment, (size_t)l.segment_bytes);
    shm_generations_free(connections->generations, &l);
    connections_close(connections);
    free(connections);
    return result;
}

/* Called in a forked child: closes the child's copies of the descriptors, and unmaps the
 * memory. Closing and unmapping have no effect on the parent and its peers. */
static void shm_forget(epic_group *group)
{
    shm_connections *connections = group->backend_data;
    shm_watch_forget(connections->watch);
    shm_generations_free(connections->generations, &group->layout);
    connections_close(connections);
    free(connections);
    munmap(group->segment, (size_t)group->layout.segment_bytes);
    shared_group_free(group);
}

/* Leaves the group. The memory exists until the last peer unmaps it. */
static void shm_leave(epic_group *group)
{
    shm_connections *connections = group->backend_data;
    shm_watch_close(connections->watch);
    connections->watch = NULL;
    shared_group_close(group);
    shm_forget(group);
}

/* Implements epic_transport.set_members. Holds the lock of the watcher, because the watcher
 * reads the members. */
static void shm_set_members(epic_group *group, const seat_set *members)
{
    const shm_connections *connections = group->backend_data;
    shm_watch_lock(connections->watch);
    shared_set_members(group, members);
    shm_watch_unlock(connections->watch);
}

static const epic_transport transport =
    SHARED_TRANSPORT(&shm_windows, &shm_regroup, shm_set_members);

const epic_backend epic_backend_shm = {
    .name = "shm",
    .can_join = can_join,
    .join = shm_join,
    .leave = shm_leave,
    .forget = shm_forget,
    .memory = shared_memory_info,
    .transport = &transport,
};
