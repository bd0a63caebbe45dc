/* SPDX-License-Identifier: Apache-2.0 */
/* The watcher is a thread that sleeps in poll() until the process of a peer exits. Then it
 * records the exit in the segment (the shared memory of the group) and wakes all ranks, so that
 * ranks that wait for the peer return an error at once.
 *
 * A watcher watches only NUM_WATCHED peers: the next higher ranks that are not gone, where rank
 * 0 follows the highest rank. So when a process exits, NUM_WATCHED watchers wake up. If all
 * watchers woke up, they would delay the waiting ranks on a host with few cores. Several
 * watchers watch each rank, because a watcher may be suspended or may exit together with the
 * rank. If all watchers of a rank are suspended, waiting ranks still notice the exit, but later
 * (wait.c). */
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

typedef struct watched {
    int count;
    int ranks[NUM_WATCHED];
} watched;

struct shm_watch {
    pthread_t thread;
    epic_group *group;
    int event;             /* an eventfd; a write to it wakes the thread */
    pthread_mutex_t mutex; /* guards the fields below, and the members of the group */
    bool is_ending;        /* true: the thread must return */
    watched watched;
};

/* Returns the ranks to watch now. */
static watched choose_ranks(const epic_group *g)
{
    watched chosen = {0};
    for (int i = 1; i < g->num_ranks && chosen.count < NUM_WATCHED; i++) {
        const int rank = (g->rank + i) % g->num_ranks;
        if (seat_set_has(&g->members, rank) && !shared_is_known_gone(g, rank))
            chosen.ranks[chosen.count++] = rank;
    }
    return chosen;
}

/* Chooses the ranks to watch, and writes to `polls` [1 + 2 * NUM_WATCHED] the descriptors that
 * the thread must poll. Returns the number of descriptors, or 0 if the watcher must return. The
 * caller holds the mutex. */
static nfds_t list_polls(shm_watch *w, struct pollfd *polls)
{
    const shm_connections *c = w->group->backend_data;
    struct pollfd *p = polls;
    if (w->is_ending) return 0;
    *p++ = (struct pollfd){.fd = w->event, .events = POLLIN};
    w->watched = choose_ranks(w->group);
    for (int i = 0; i < w->watched.count; i++) {
        const int rank = w->watched.ranks[i];
        *p++ = (struct pollfd){.fd = c->sockets[rank], .events = POLLRDHUP};
        *p++ = (struct pollfd){.fd = c->processes[rank], .events = POLLIN};
    }
    return (nfds_t)(p - polls);
}

/* Records in the segment each watched rank whose process has exited. The caller holds the
 * mutex. */
static void report_ends(const shm_watch *w)
{
    epic_group *g = w->group;
    const watched chosen = choose_ranks(g);
    for (int i = 0; i < chosen.count; i++)
        if (connections_is_dead(g->backend_data, chosen.ranks[i]))
            shared_report_end(g, chosen.ranks[i]);
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
    const watched chosen = choose_ranks(w->group);
    const bool must_wake = w->is_ending || memcmp(&chosen, &w->watched, sizeof chosen) != 0;
    pthread_mutex_unlock(&w->mutex);
    if (must_wake) eventfd_write(w->event, 1);
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
