/* SPDX-License-Identifier: Apache-2.0 */
/* A rank that closes says so.  One whose process is killed says nothing, and MPI may not notice:
 * where the launcher lets the others live, they would wait for it until their deadline.  The
 * system tells of processes of this host and PID namespace; whoever sees that one of them is gone
 * breaks the group for the ranks elsewhere.  Of the only rank on another host nobody tells: that a
 * connection is lost is no proof that a process has ended. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "backend/mpi/group.h"
#include "base/process.h"

#define PACE_NS 5000000 /* between two looks */

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

void liveness_check(epic_group *group, int64_t now)
{
    if (now - group->liveness_checked_ns < PACE_NS) return;
    group->liveness_checked_ns = now;
    if (poll(group->pidfds, (nfds_t)group->num_ranks, 0) <= 0) return;
    for (int r = 0; r < group->num_ranks; r++)
        if (group->pidfds[r].fd >= 0 && group->pidfds[r].revents) mark_dead(group, r);
}

/* What it sent before it died is on this host already; the exchange looks twice. */
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
