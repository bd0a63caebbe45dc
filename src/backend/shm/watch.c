/* SPDX-License-Identifier: Apache-2.0 */
/* The watcher sleeps in poll() until the process of a peer ends. Then it publishes the end in
 * the segment and wakes all ranks, so that ranks that wait for the peer return an error at
 * once.
 *
 * A watcher watches only NUM_WATCHED peers: the next higher ranks that are not gone, where rank
 * 0 follows the highest rank. So the end of a process wakes NUM_WATCHED watchers. If it woke
 * all of them, they would delay the waiting ranks on a host with few cores. Several watchers
 * watch each rank, because some may be stopped or end together with it. If all of them are
 * stopped, waiting ranks find the end themselves, but later (wait.c). */
#include "backend/shm/watch.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "backend/shm/connections.h"
#include "backend/shm/handshake.h"
#include "base/error.h"
#include "base/thread.h"

#define NUM_WATCHED 3

struct shm_watch {
    pthread_t thread;
    epic_group *group;
    int event;             /* an eventfd; a write to it wakes the thread */
    pthread_mutex_t mutex; /* guards the rest, and the group against changes of its members */
    bool is_ending;        /* true: the thread must end */
};

/* Writes the ranks to watch now to `ranks` [NUM_WATCHED]. Returns their number. */
static int choose_ranks(const epic_group *g, int *ranks)
{
    int count = 0;
    for (int i = 1; i < g->num_ranks && count < NUM_WATCHED; i++) {
        const int rank = (g->rank + i) % g->num_ranks;
        if (seat_set_has(&g->members, rank) && !shared_is_known_gone(g, rank))
            ranks[count++] = rank;
    }
    return count;
}

/* Writes the descriptors to poll to `polls` [1 + 2 * NUM_WATCHED]. Returns their number, or 0 if
 * the watcher must end. The caller holds the mutex. */
static nfds_t list_polls(const shm_watch *w, struct pollfd *polls)
{
    const shm_connections *c = w->group->backend_data;
    struct pollfd *p = polls;
    int ranks[NUM_WATCHED];
    if (w->is_ending) return 0;
    *p++ = (struct pollfd){.fd = w->event, .events = POLLIN};
    const int count = choose_ranks(w->group, ranks);
    for (int i = 0; i < count; i++) {
        *p++ = (struct pollfd){.fd = c->sockets[ranks[i]], .events = POLLRDHUP};
        *p++ = (struct pollfd){.fd = c->processes[ranks[i]], .events = POLLIN};
    }
    return (nfds_t)(p - polls);
}

/* Publishes the ends of the processes of watched ranks. The caller holds the mutex. */
static void report_ends(const shm_watch *w)
{
    epic_group *g = w->group;
    int ranks[NUM_WATCHED];
    const int count = choose_ranks(g, ranks);
    for (int i = 0; i < count; i++)
        if (connections_is_dead(g->backend_data, ranks[i])) shared_report_end(g, ranks[i]);
}

/* The main function of the watcher. A rank that closes its context closes its connections,
 * which wakes the watcher. choose_ranks() then leaves the rank out. */
static void *watch_ranks(void *self)
{
    shm_watch *w = self;
    struct pollfd polls[1 + 2 * NUM_WATCHED];
    eventfd_t events;
    for (;;) {
        pthread_mutex_lock(&w->mutex);
        const nfds_t count = list_polls(w, polls);
        pthread_mutex_unlock(&w->mutex);
        if (!count || (poll(polls, count, -1) < 0 && errno != EINTR)) return NULL;
        if (polls[0].revents) eventfd_read(w->event, &events);
        pthread_mutex_lock(&w->mutex);
        report_ends(w);
        pthread_mutex_unlock(&w->mutex);
    }
}

void shm_watch_lock(shm_watch *w)
{
    if (w) pthread_mutex_lock(&w->mutex);
}

void shm_watch_unlock(shm_watch *w)
{
    if (!w) return;
    pthread_mutex_unlock(&w->mutex);
    eventfd_write(w->event, 1);
}

epic_result shm_watch_open(epic_group *g, shm_watch **out)
{
    *out = NULL;
    if (g->num_ranks == 1) return EPIC_OK;
    shm_watch *w = malloc(sizeof *w);
    if (!w) return epic_fail(EPIC_ENOMEM, "shm: no memory for the watcher");
    *w = (shm_watch){.group = g, .event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    pthread_mutex_init(&w->mutex, NULL);
    if (w->event < 0) {
        free(w);
        return shm_fail_with_errno("eventfd");
    }
    const int error = thread_start(&w->thread, watch_ranks, w);
    if (error) {
        shm_watch_forget(w);
        errno = error;
        return shm_fail_with_errno("pthread_create");
    }
    *out = w;
    return EPIC_OK;
}

void shm_watch_close(shm_watch *w)
{
    if (!w) return;
    shm_watch_lock(w);
    w->is_ending = true;
    shm_watch_unlock(w);
    pthread_join(w->thread, NULL);
    shm_watch_forget(w);
}

void shm_watch_forget(shm_watch *w)
{
    if (w) close(w->event);
    free(w);
}
