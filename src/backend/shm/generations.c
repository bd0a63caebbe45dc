/* SPDX-License-Identifier: Apache-2.0 */
/* Changes the members of a group of processes. A *generation* is the group between two changes
 * of its members. Each generation, identified by its group_id, has shared memory of its own.
 * The rank that proposes a generation creates this memory. Every message that contains the
 * proposal carries a descriptor of the memory. So a rank that becomes the leader later, or that
 * receives the decision late, has the memory too.
 *
 * The system frees the memory of a generation when the last process has unmapped it. So a
 * member that was evicted keeps the memory of its old generation, and its late stores reach no
 * other member. */
#include "backend/shm/generations.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/shm/connections.h"
#include "backend/shm/handshake.h"
#include "backend/shm/memory.h"
#include "backend/shm/watch.h"
#include "base/error.h"

#define MAGIC 0x7075727063697065ull /* "epicrpup" in memory */
#define MAX_MEMORIES 8
#define MAX_EVENTS 64 /* maximum number of events that one system call returns */

/* A message of epic_regroup, in the form in which it is sent over a connection. */
typedef struct frame {
    uint64_t magic;
    /* id of a generation; the message carries a descriptor of this generation's memory. 0: no
     * descriptor */
    uint64_t group_id;
    unsigned char message[REGROUP_MESSAGE_BYTES];
} frame;

#define FRAME_BYTES(bytes) (offsetof(frame, message) + (bytes))

/* A descriptor that this rank has created or received, for the memory of a generation. */
typedef struct memory {
    uint64_t group_id; /* 0: this entry is free */
    int fd;
    int from; /* the rank that has sent the descriptor */
} memory;

struct shm_generations {
    memory memories[MAX_MEMORIES];
    /* index of the entry that the next descriptor replaces, if no entry is free */
    unsigned next;
    /* the generation that this rank is in now; 0: the generation that epic_open has created */
    uint64_t current_id;
    uint64_t created_id;  /* last generation for which this rank has created memory */
    uint64_t prepared_id; /* the generation whose memory is prepared; 0: none */
    char *prepared;       /* address of the prepared memory */
    /* number of entries of `events`, and index of the first entry that is not handled yet */
    int num_events, cursor;
    struct epoll_event events[MAX_EVENTS];
};

static shm_generations *generations_of(const epic_group *group)
{
    const shm_connections *c = group->backend_data;
    return c->generations;
}

epic_result shm_generations_new(shm_generations **out, int num_ranks)
{
    *out = calloc(1, sizeof **out);
    if (*out) return EPIC_OK;
    return epic_fail(EPIC_ENOMEM, "shm: no memory for messages of %d ranks", num_ranks);
}

/* ------------------------------------------------------------------------------ memory ---- */

static memory *find_memory(shm_generations *g, uint64_t group_id)
{
    for (int i = 0; i < MAX_MEMORIES; i++)
        if (g->memories[i].group_id == group_id) return &g->memories[i];
    return NULL;
}

static void drop_memory(memory *m)
{
    if (m->group_id) close(m->fd);
    *m = (memory){0};
}

/* Stores the descriptor `fd` for the memory of generation group_id. Rank `from` has sent it. If
 * all entries are in use, it replaces the oldest descriptor that this rank does not need. This
 * happens only in a decision with more than MAX_MEMORIES proposals. */
static void keep_memory(shm_generations *g, uint64_t group_id, int fd, int from)
{
    if (!group_id || find_memory(g, group_id)) {
        close(fd);
        return;
    }
    memory *m;
    do m = &g->memories[g->next++ % MAX_MEMORIES];
    while (m->group_id && (m->group_id == g->current_id || m->group_id == g->created_id ||
                           m->group_id == g->prepared_id));
    drop_memory(m);
    *m = (memory){group_id, fd, from};
}

static epic_result shm_create(epic_group *group, uint64_t group_id)
{
    shm_generations *g = generations_of(group);
    if (find_memory(g, group_id)) return EPIC_OK;
    int fd = -1;
    char *segment = NULL;
    const epic_result result = shm_memory_create(&group->layout, group_id, &fd, &segment);
    if (segment) munmap(segment, (size_t)group->layout.segment_bytes);
    if (result == EPIC_OK) {
        keep_memory(g, group_id, fd, group->rank);
        g->created_id = group_id;
    } else if (fd >= 0) {
        close(fd);
    }
    return result;
}

static void unmap_prepared(shm_generations *g, const shared_layout *layout)
{
    if (g->prepared) munmap(g->prepared, (size_t)layout->segment_bytes);
    g->prepared = NULL;
    g->prepared_id = 0;
}

static epic_result shm_prepare(epic_group *group, uint64_t group_id)
{
    shm_generations *g = generations_of(group);
    if (g->prepared_id == group_id) return EPIC_OK;
    const memory *m = find_memory(g, group_id);
    if (!m)
        return epic_fail(
            EPIC_EDEVICE,
            "shm: the memory of the next generation did not arrive: this process may "
            "have too many open files; raise ulimit -n");
    char *segment = NULL;
    const epic_result result =
        shm_memory_open(&group->layout, group_id, m->from, m->fd, &segment);
    if (result != EPIC_OK) {
        if (segment) munmap(segment, (size_t)group->layout.segment_bytes);
        return result;
    }
    unmap_prepared(g, &group->layout);
    g->prepared = segment;
    g->prepared_id = group_id;
    return EPIC_OK;
}

static epic_result shm_enter(epic_group *group, const seat_set *members)
{
    shm_connections *c = group->backend_data;
    shm_generations *g = c->generations;
    char *old = group->segment;
    shm_watch_lock(c->watch);
    shared_group_enter(group, g->prepared, members);
    connections_close_dead(c, members);
    shm_watch_unlock(c->watch);
    munmap(old, (size_t)group->layout.segment_bytes);
    g->num_events = 0;
    g->current_id = g->prepared_id;
    g->prepared = NULL;
    g->prepared_id = 0;
    for (int i = 0; i < MAX_MEMORIES; i++)
        if (g->memories[i].group_id != g->current_id) drop_memory(&g->memories[i]);
    return EPIC_OK;
}

void shm_generations_free(shm_generations *g, const shared_layout *layout)
{
    if (!g) return;
    unmap_prepared(g, layout);
    for (int i = 0; i < MAX_MEMORIES; i++) drop_memory(&g->memories[i]);
    free(g);
}

/* ---------------------------------------------------------------------------- messages ---- */

/* Implements epic_regroup_transport.send. The send does not block. If the receiver's queue is
 * full, the message is lost. */
static void shm_send(epic_group *group, int to, const void *message, size_t bytes,
                     uint64_t group_id)
{
    const shm_connections *c = group->backend_data;
    const memory *m = group_id ? find_memory(c->generations, group_id) : NULL;
    frame f = {.magic = MAGIC, .group_id = m ? group_id : 0};
    if (c->sockets[to] < 0) return;
    memcpy(f.message, message, bytes);
    shm_send_message(c->sockets[to], &f, FRAME_BYTES(bytes), m ? m->fd : -1);
}

/* Receives the oldest message of epic_regroup from rank `from`. Skips messages of another kind:
 * descriptors of windows that an earlier call has left unread, because it failed. */
static bool receive_from(epic_group *group, int from, void *message, size_t bytes)
{
    const shm_connections *c = group->backend_data;
    for (;;) {
        frame f;
        int fd = -1;
        const ssize_t got = shm_receive_any(c->sockets[from], &f, sizeof f, &fd);
        const bool is_ours = got == (ssize_t)FRAME_BYTES(bytes) && f.magic == MAGIC;
        if (fd >= 0) keep_memory(c->generations, is_ours ? f.group_id : 0, fd, from);
        if (is_ours) memcpy(message, f.message, bytes);
        if (is_ours) return true;
        /* If a peer closes its connection and has not read all messages to it, the system
         * resets the connection, but the peer's own messages can still be received. */
        if (got == 0 || (got < 0 && errno != ECONNRESET)) return false;
    }
}

/* Receives a message from one of the ranks whose connections epoll has reported. If a
 * connection is closed, the rank sends no more messages, so this function stops watching the
 * connection after the last message. Ranks that are not members may send messages too, because
 * they do not know yet that the others have continued without them. */
static bool receive_reported(epic_group *group, int *from, void *message, size_t bytes)
{
    shm_generations *g = generations_of(group);
    for (; g->cursor < g->num_events; g->cursor++) {
        const struct epoll_event *event = &g->events[g->cursor];
        const bool is_closed = event->events & (EPOLLHUP | EPOLLERR);
        *from = connections_rank_of(event);
        if (is_closed) connections_is_dead(group->backend_data, *from);
        if (receive_from(group, *from, message, bytes)) return true;
        if (is_closed) connections_ignore(group->backend_data, *from);
    }
    return false;
}

/* Implements epic_regroup_transport.receive. epoll reports only connections that have something
 * to receive. So the time of a call does not grow with the number of ranks, as it would with
 * poll(). */
static bool shm_receive(epic_group *group, int *from, void *message, size_t bytes, uint32_t ms)
{
    const shm_connections *c = group->backend_data;
    shm_generations *g = c->generations;
    if (receive_reported(group, from, message, bytes)) return true;
    g->cursor = 0;
    g->num_events = epoll_wait(c->epoll, g->events, MAX_EVENTS, (int)ms);
    return receive_reported(group, from, message, bytes);
}

/* Implements epic_regroup_transport.is_gone. Makes no system call. It uses two sources:
 * shm_receive() has found closed connections, and the watchers of all ranks publish which
 * processes have exited although a forked child keeps their connections open. */
static bool shm_is_gone(epic_group *group, int seat)
{
    const shm_connections *c = group->backend_data;
    return load_relaxed(&c->dead[seat]) ||
           (shared_any_gone(group) && shared_is_known_gone(group, seat));
}

const epic_regroup_transport shm_regroup = {.send = shm_send,
                                            .receive = shm_receive,
                                            .is_gone = shm_is_gone,
                                            .create = shm_create,
                                            .prepare = shm_prepare,
                                            .enter = shm_enter};
