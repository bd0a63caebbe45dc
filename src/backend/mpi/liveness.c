/* SPDX-License-Identifier: Apache-2.0 */
/* Finds peers whose process has exited without a close message. MPI may not report such an
 * exit. If mpirun does not kill the job either, the other ranks would wait until their
 * deadline.
 *
 * A pidfd (a Linux descriptor for a process) shows that a process on this host and in this PID
 * namespace has exited. The rank that finds a dead peer breaks the group, so that ranks on
 * other hosts return the error too. If a rank is alone on its host, no rank detects its death.
 * A lost MPI connection does not count as death, because the process may still run. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "backend/mpi/group.h"
#include "base/process.h"

#define PACE_NS 5000000 /* time between two polls of the pidfds */

void liveness_watch(epic_group *group, const epic_peer *peers)
{
    const epic_peer *mine = &peers[group->rank];
    for (int r = 0; r < group->num_ranks; r++) {
        const bool near = memcmp(peers[r].host, mine->host, sizeof mine->host) == 0;
        if (r == group->rank || !near) continue;
        errno = 0;
        group->pidfds[r].fd = process_watch(peers[r].pid);
        if (group->pidfds[r].fd < 0 && errno == ESRCH) group->peers[r].dead = true;
    }
}

static void mark_dead(epic_group *group, int peer)
{
    group->peers[peer].dead = true;
    close(group->pidfds[peer].fd);
    group->pidfds[peer].fd = -1;
}

/* Polls the pidfds, at most once per PACE_NS. Marks peers whose process has exited as dead. */
void liveness_check(epic_group *group, int64_t now)
{
    if (now - group->liveness_checked_ns < PACE_NS) return;
    group->liveness_checked_ns = now;
    if (poll(group->pidfds, (nfds_t)group->num_ranks, 0) <= 0) return;
    for (int r = 0; r < group->num_ranks; r++)
        if (group->pidfds[r].fd >= 0 && group->pidfds[r].revents) mark_dead(group, r);
}

/* Returns whether the peer has closed its context or its process has exited. Messages that the
 * peer sent before may not be handled yet, so src/exchange checks a peer twice. */
bool liveness_is_gone(const epic_group *group, int peer)
{
    return group->peers[peer].closed || group->peers[peer].dead;
}

void liveness_unwatch(epic_group *group)
{
    for (int r = 0; r < group->num_ranks; r++) {
        if (group->pidfds[r].fd >= 0) close(group->pidfds[r].fd);
        group->pidfds[r].fd = -1;
    }
}
