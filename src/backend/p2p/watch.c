/* SPDX-License-Identifier: Apache-2.0 */
/* The watcher: a thread that detects when a peer's process dies, and sets the peer's bit in
 * host memory. Running kernels read this memory. The watcher detects the death of a process of
 * another host by a liveness connection (net/liveness.h), whose state it reads at least at each
 * beat. The watcher also writes the heartbeat of this process (beats.h), and registers itself
 * as the thread whose end shows the peers that this process is dead. It makes no CUDA calls.
 *
 * For each process there is a page of memory (base/alive.h), which shows the death of the
 * process early, while its kernels may still run. These kernels can store to the staging of
 * this rank, which does no harm (members.c). They can also store to its windows, which the
 * caller may free after the failure of the group. So in a group with windows, a process counts
 * as dead only when its pidfd shows that it has exited completely. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "backend/p2p/p2p.h"
#include "base/alive.h"
#include "base/error.h"
#include "base/process.h"
#include "base/thread.h"
#include "net/liveness.h"

#define ALIVE_PERIOD_MS 5 /* longest time between two reads of the peers' pages */

struct p2p_watch {
    pthread_t thread;
    epic_group *group;
    p2p_status *status;
    p2p_beats *beats;
    const net_liveness *liveness; /* NULL: all peers are on this host */
    int end; /* eventfd; a write to it ends the thread; -1: there is no thread */
    int num_ranks;
    /* for each peer, a pidfd (Linux descriptor) of its process; -1 if pids[] is 0, or if the
     * system has no pidfds: the thread then checks the pid */
    int processes[DEVICE_MAX_RANKS];
    /* for each peer, the pid of its process; 0 if the peer is dead, in this process, or on
     * another host */
    int64_t pids[DEVICE_MAX_RANKS];
    /* for each peer, the page that shows if its process is dead, or NULL */
    const alive_page *pages[DEVICE_MAX_RANKS];
    bool has_pages; /* true if any element of `pages` is not NULL */
};

static void mark_dead(p2p_watch *w, int rank)
{
    p2p_mark_dead(w->status, rank);
    w->pids[rank] = 0;
}

/* Returns true if the process of peer q is dead. is_ready: true if its pidfd is readable. */
static bool has_died(const p2p_watch *w, int q, bool is_ready)
{
    const bool has_windows = __atomic_load_n(&w->group->windows, __ATOMIC_RELAXED) != NULL;
    if (!has_windows && alive_is_dead(w->pages[q])) return true;
    return (is_ready || w->processes[q] < 0) && process_ended(w->processes[q], w->pids[q]);
}

/* Returns the longest time in milliseconds that poll() may wait. */
static int period_ms(const p2p_watch *w)
{
    const int beats_ms = p2p_beats_ms(w->beats);
    return w->has_pages && beats_ms > ALIVE_PERIOD_MS ? ALIVE_PERIOD_MS : beats_ms;
}

/* Marks the peers of other hosts whose liveness connections show that they are dead. */
static void check_hosts(p2p_watch *w)
{
    for (int q = 0; w->liveness && q < w->num_ranks; q++)
        if (net_liveness_state(w->liveness, q) == NET_PEER_DEAD) p2p_mark_dead(w->status, q);
}

/* The main function of the watcher thread. It waits in poll() until a peer's process exits,
 * until the pages of the peers must be read or the next beat (increment of the heartbeat) is
 * due, or until p2p_watch_close() writes to the eventfd `end` to end the thread. */
static void *watch_processes(void *self)
{
    p2p_watch *w = self;
    alive_register(&w->group->alive);
    for (;;) {
        struct pollfd signs[DEVICE_MAX_RANKS + 1];
        for (int q = 0; q < w->num_ranks; q++) {
            const int fd = w->pids[q] ? w->processes[q] : -1;
            signs[q] = (struct pollfd){.fd = fd, .events = POLLIN};
        }
        signs[w->num_ranks] = (struct pollfd){.fd = w->end, .events = POLLIN};
        p2p_beat(w->beats, w->status);
        const int got = poll(signs, (nfds_t)w->num_ranks + 1, period_ms(w));
        if ((got < 0 && errno != EINTR) || (got > 0 && signs[w->num_ranks].revents)) break;
        for (int q = 0; q < w->num_ranks; q++)
            if (w->pids[q] && has_died(w, q, got > 0 && signs[q].revents)) mark_dead(w, q);
        check_hosts(w);
    }
    alive_unregister(&w->group->alive);
    p2p_beats_end(w->status);
    return NULL;
}

static bool same_process(const epic_peer *a, const epic_peer *b)
{
    return !memcmp(a->process, b->process, sizeof a->process);
}

/* Closes the pidfds, unmaps the pages, and frees w. */
static void free_watch(p2p_watch *w)
{
    for (int q = 0; q < w->num_ranks; q++) {
        if (w->processes[q] >= 0) close(w->processes[q]);
        alive_unmap(w->pages[q]);
    }
    if (w->end >= 0) close(w->end);
    free(w);
}

epic_result p2p_watch_open(epic_group *g, const int *alive_fds)
{
    p2p_watch *w = calloc(1, sizeof *w);
    if (!w) return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    w->group = g;
    w->status = g->status;
    w->num_ranks = g->num_ranks;
    w->liveness = g->liveness;
    for (int q = 0; q < g->num_ranks; q++) {
        w->processes[q] = -1;
        if (same_process(&g->peers[q], &g->peers[g->rank]) ||
            !p2p_same(g->peers[q].host, g->peers[g->rank].host))
            continue;
        w->pids[q] = g->peers[q].pid;
        w->processes[q] = process_watch(w->pids[q]);
        w->pages[q] = alive_map(w->pids[q], alive_fds[q], g->self.group_id, q);
        w->has_pages |= w->pages[q] != NULL;
    }
    w->beats = g->beats;
    p2p_beats_expect(w->beats, g->config.timeout_ms);
    w->end =
        /* with a single rank no thread is needed */
        g->num_ranks > 1 ? eventfd(0, EFD_CLOEXEC) : -1;
    if (g->num_ranks > 1 && (w->end < 0 || thread_start(&w->thread, watch_processes, w) != 0)) {
        const int error = errno;
        free_watch(w);
        return epic_fail(EPIC_EDEVICE, "no thread that watches the peers' processes: %s",
                         strerror(error));
    }
    g->watch = w;
    return EPIC_OK;
}

void p2p_watch_close(epic_group *g)
{
    p2p_watch *w = g->watch;
    if (!w) return;
    if (w->end >= 0) {
        const ssize_t written = write(w->end, &(uint64_t){1}, sizeof(uint64_t));
        if (written == sizeof(uint64_t)) pthread_join(w->thread, NULL);
    }
    free_watch(w);
    g->watch = NULL;
}
