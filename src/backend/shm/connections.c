/* SPDX-License-Identifier: Apache-2.0 */
/* Connects every two ranks of a group, which are processes of one host.
 *
 * Each rank listens on an abstract UNIX address with a random name, and publishes the address
 * and a random secret through the bootstrap. Each rank connects to all lower ranks and accepts
 * connections from all higher ranks. The first message of the connecting rank contains the
 * secret of the accepting rank, and the answer contains the secret of the connecting rank. So
 * both prove that they took part in the bootstrap.
 *
 * A rank first sends its messages to all lower ranks. Then it accepts and answers all higher
 * ranks. Only then it waits for the answers of the lower ranks. In this order no two ranks wait
 * for each other. */
#include "backend/shm/connections.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "backend/shm/handshake.h"
#include "base/deadline.h"
#include "base/error.h"
#include "base/process.h"

#define NAME "epic."
#define NAME_LENGTH 31 /* length of a socket's name: NAME, then hexadecimal digits */
/* how many connections without a handshake can be pending in addition to one per rank */
#define EXTRA_PENDING 16
/* time between two checks whether the listeners of missing ranks are still open; a rank that
 * ends closes its listener */
#define CHECK_MS 200

/* The data that a rank publishes through the bootstrap. */
typedef struct handle {
    uint64_t ready;
    uint64_t secret[2];
    char name[NAME_LENGTH + 1];
} handle;

/* The state of one connections_open(). */
typedef struct connect_state {
    shm_connections *connections;
    const epic_join *join;
    handle *handles; /* [num_ranks]: the handles of all ranks */
    /* The sockets to poll: the listener, then pending [num_pending], then the connections to
     * all ranks [num_ranks]. A second half of equal size is scratch memory of poll_open(). */
    struct pollfd *polls;
    int *pending; /* [num_pending] accepted sockets without a handshake yet; -1: free */
    int num_pending;
    int num_polls;
    int listener;
    int missing; /* number of higher ranks that have not connected yet */
    deadline deadline;
    int *memory;
} connect_state;

static void close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static struct sockaddr_un address_of(const handle *c, socklen_t *length)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    /* an abstract address begins with a zero byte */
    memcpy(address.sun_path + 1, c->name, NAME_LENGTH);
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + NAME_LENGTH);
    return address;
}

/* -------------------------------------------------------------------------- handshakes ---- */

static epic_result send_handshake(const connect_state *o, int fd, int to, int memory)
{
    handshake message = {.group_id = o->join->group_id, .rank = o->connections->rank};
    memcpy(message.secret, o->handles[to].secret, sizeof message.secret);
    return handshake_send(fd, &message, to, memory);
}

/* Receives a handshake. Returns the rank that sent it, or -1 if the sender is not a rank of
 * this group. */
static int receive_handshake(const connect_state *o, int fd, int *memory)
{
    handshake message;
    const handle *mine = &o->handles[o->connections->rank];
    if (!handshake_receive(fd, &message, memory) || message.group_id != o->join->group_id ||
        memcmp(message.secret, mine->secret, sizeof message.secret) != 0 || message.rank < 0 ||
        message.rank >= o->connections->num_ranks)
        return -1;
    return (int)message.rank;
}

/* ----------------------------------------------------------------------------- waiting ---- */

/* Polls the open sockets in o->polls. Leaves out entries whose fd is -1, because poll() fails
 * if there are more entries than the limit on open files. */
static int poll_open(connect_state *o, int ms)
{
    struct pollfd *some = o->polls + o->num_polls;
    nfds_t count = 0;
    for (int i = 0; i < o->num_polls; i++)
        if (o->polls[i].fd >= 0) some[count++] = o->polls[i];
    const int got = poll(some, count, ms);
    for (int i = 0; i < o->num_polls; i++)
        o->polls[i].revents = got > 0 && o->polls[i].fd >= 0 ? (some++)->revents : 0;
    return got;
}

/* Waits until a socket is ready, but at most CHECK_MS, so that the caller can check whether
 * missing ranks have died. Returns EPIC_ETIMEOUT at the deadline, with an error sentence that
 * begins with `what`, for example "rank 1 did not connect". Returns EPIC_EPEER if a peer has
 * closed its connection. */
static epic_result poll_once(connect_state *o, const char *what)
{
    const uint64_t now = (uint64_t)clock_ns();
    if (deadline_look(&o->deadline, now))
        return epic_fail(EPIC_ETIMEOUT, "shm: %s within %u ms", what,
                         o->join->config->timeout_ms);
    const uint64_t ms = deadline_sleep_ns(&o->deadline, now, CHECK_MS * 1000000ull) / 1000000;
    const int got = poll_open(o, (int)ms + 1);
    if (got < 0 && errno != EINTR) return shm_fail_with_errno("poll");
    const struct pollfd *connections = o->polls + 1 + o->num_pending;
    for (int r = 0; got > 0 && r < o->connections->num_ranks; r++)
        if (connections[r].revents & (POLLHUP | POLLERR | POLLNVAL) &&
            !(connections[r].revents & POLLIN))
            return shm_fail_with_left(r);
    return EPIC_OK;
}

/* Fills o->polls. The listener is included only while ranks are missing and `pending` has a
 * free entry. awaited_rank is the lower rank whose answer this rank waits for, or -1. */
static void set_polls(connect_state *o, int awaited_rank)
{
    bool listen = false;
    for (int i = 0; i < o->num_pending && o->missing > 0; i++) listen |= o->pending[i] < 0;
    struct pollfd *p = o->polls;
    *p++ = (struct pollfd){.fd = listen ? o->listener : -1, .events = POLLIN};
    for (int i = 0; i < o->num_pending; i++)
        *p++ = (struct pollfd){.fd = o->pending[i], .events = POLLIN};
    for (int r = 0; r < o->connections->num_ranks; r++)
        *p++ = (struct pollfd){.fd = o->connections->sockets[r],
                               .events = (short)(r == awaited_rank ? POLLIN : 0)};
}

/* ------------------------------------------------------------------ connect and accept ---- */

/* Opens the listening socket with a random name, and creates this rank's random secret. */
static epic_result open_listener(connect_state *o, handle *mine)
{
    unsigned char random[(NAME_LENGTH - 5) / 2];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random ||
        getrandom(mine->secret, sizeof mine->secret, 0) != (ssize_t)sizeof mine->secret)
        return shm_fail_with_errno("getrandom");
    memcpy(mine->name, NAME, 5);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(mine->name + 5 + 2 * i, 3, "%02x", random[i]);
    o->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (o->listener < 0) return shm_fail_with_errno("socket");
    socklen_t length;
    const struct sockaddr_un address = address_of(mine, &length);
    if (bind(o->listener, (const struct sockaddr *)&address, length) != 0)
        return shm_fail_with_errno("bind");
    if (listen(o->listener, o->connections->num_ranks + EXTRA_PENDING) != 0)
        return shm_fail_with_errno("listen");
    return EPIC_OK;
}

/* Connects to a lower rank and sends the handshake. Waits only while the peer's queue of
 * pending connections is full, not until the peer accepts. */
static epic_result connect_to_rank(connect_state *o, int peer)
{
    int *socket_fd = &o->connections->sockets[peer];
    *socket_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*socket_fd < 0) return shm_fail_with_errno("socket");
    socklen_t length;
    const struct sockaddr_un address = address_of(&o->handles[peer], &length);
    while (connect(*socket_fd, (const struct sockaddr *)&address, length) != 0) {
        if (errno == ECONNREFUSED) return shm_fail_with_left(peer);
        if (errno != EAGAIN && errno != EINTR) return shm_fail_with_errno("connect");
        if (deadline_before_nap(&o->deadline, 1000000))
            return epic_fail(EPIC_ETIMEOUT, "shm: rank %d did not answer within %u ms", peer,
                             o->join->config->timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (!handshake_is_same_user(*socket_fd))
        return epic_fail(EPIC_EDEVICE, "shm: rank %d belongs to another user", peer);
    return send_handshake(o, *socket_fd, peer, -1);
}

static bool out_of_room(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

/* Accepts new connections into the free entries of `pending`. If the system lacks a descriptor
 * or memory for one, joining fails at once, because the connecting peer would otherwise wait
 * until its deadline. */
static epic_result accept_pending(connect_state *o)
{
    for (int i = 0; i < o->num_pending; i++) {
        if (o->pending[i] >= 0) continue;
        o->pending[i] = accept4(o->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (o->pending[i] < 0)
            return out_of_room(errno) ? shm_fail_with_errno("accept") : EPIC_OK;
        if (!handshake_is_same_user(o->pending[i])) close_fd(&o->pending[i]);
    }
    return EPIC_OK;
}

/* Reads the handshake of a pending connection. Answers it if the sender is a higher rank that
 * is not connected yet, otherwise closes it. */
static epic_result identify_pending(connect_state *o, int *pending_fd)
{
    shm_connections *connections = o->connections;
    const int rank = receive_handshake(o, *pending_fd, NULL);
    if (rank <= connections->rank || connections->sockets[rank] >= 0) {
        close_fd(pending_fd);
        return EPIC_OK;
    }
    connections->sockets[rank] = *pending_fd;
    *pending_fd = -1;
    o->missing--;
    return send_handshake(o, connections->sockets[rank], rank,
                          connections->rank == 0 ? *o->memory : -1);
}

static int first_missing(const connect_state *o)
{
    int r = o->connections->rank + 1;
    while (r < o->connections->num_ranks && o->connections->sockets[r] >= 0) r++;
    return r;
}

/* Returns whether a peer's listener is open. A peer closes it when all higher ranks are
 * connected, or when its process ends. */
static bool is_listening(const connect_state *o, int peer)
{
    socklen_t length;
    const struct sockaddr_un address = address_of(&o->handles[peer], &length);
    int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    /* Without a socket there is no way to test it, so assume that the peer listens. */
    if (probe < 0) return true;
    const bool refused =
        connect(probe, (const struct sockaddr *)&address, length) != 0 && errno == ECONNREFUSED;
    close_fd(&probe);
    return !refused;
}

/* Returns a missing rank whose listener is closed, or -1. */
static int find_gone(const connect_state *o)
{
    for (int r = o->connections->rank + 1; r < o->connections->num_ranks; r++)
        if (o->connections->sockets[r] < 0 && !is_listening(o, r)) return r;
    return -1;
}

/* Reads the handshakes of pending connections that have data, and accepts new connections.
 * Returns whether there were any such connections. */
static bool handle_incoming(connect_state *o, epic_result *result)
{
    bool any = o->polls[0].revents != 0;
    for (int i = 0; i < o->num_pending && *result == EPIC_OK; i++) {
        if (o->pending[i] < 0 || !o->polls[1 + i].revents) continue;
        *result = identify_pending(o, &o->pending[i]);
        any = true;
    }
    if (*result == EPIC_OK && o->polls[0].revents) *result = accept_pending(o);
    return any;
}

/* Accepts connections from all higher ranks. A rank that dies before it connects has no
 * connection whose end this rank could notice. So find_gone() looks for a missing rank whose
 * listener is closed. That rank may have connected just before, so the loop accepts connections
 * once more before it reports that the rank is gone. */
static epic_result accept_all(connect_state *o)
{
    int gone = -1;
    while (o->missing > 0) {
        epic_result result = EPIC_OK;
        char what[40];
        snprintf(what, sizeof what, "rank %d did not connect", first_missing(o));
        set_polls(o, -1);
        TRY(poll_once(o, what));
        const bool has_call = handle_incoming(o, &result);
        TRY(result);
        if (has_call) {
            gone = -1;
            continue;
        }
        if (gone >= 0) return shm_fail_with_left(gone);
        gone = find_gone(o);
    }
    return EPIC_OK;
}

/* Receives the answer of a lower rank. The answer of rank 0 carries the descriptor of the
 * shared memory. */
static epic_result receive_answer(connect_state *o, int peer)
{
    const int *socket_fd = &o->connections->sockets[peer];
    const struct pollfd *polled = &o->polls[1 + o->num_pending + peer];
    char what[40];
    snprintf(what, sizeof what, "rank %d did not answer", peer);
    do {
        set_polls(o, peer);
        TRY(poll_once(o, what));
    } while (!polled->revents);
    const int speaker = receive_handshake(o, *socket_fd, peer == 0 ? o->memory : NULL);
    if (*o->memory == HANDSHAKE_NO_ROOM) {
        *o->memory = -1;
        errno = EMFILE;
        return shm_fail_with_errno("receiving the shared memory");
    }
    if (speaker != peer) return shm_fail_with_left(peer);
    if (*o->memory < 0 && peer == 0)
        return epic_fail(EPIC_EDEVICE, "shm: rank 0 sent no memory");
    return EPIC_OK;
}

/* Connects to all ranks, in the order that the top of this file describes. */
static epic_result connect_to_all(connect_state *o)
{
    const int rank = o->connections->rank;
    for (int r = 0; r < rank; r++) TRY(connect_to_rank(o, r));
    TRY(accept_all(o));
    for (int r = 0; r < rank; r++) TRY(receive_answer(o, r));
    return EPIC_OK;
}

/* Makes the other ranks notice that this rank failed: closes its connections. A lower rank may
 * still wait for a connection from this rank, so this function also connects to each lower rank
 * once more and closes that connection. Returns `result` and keeps its error sentence. */
static epic_result fail_for_all(connect_state *o, epic_result result)
{
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", epic_sentence());
    close_fd(&o->listener);
    for (int r = 0; r < o->connections->num_ranks; r++) close_fd(&o->connections->sockets[r]);
    for (int r = 0; r < o->connections->rank; r++) {
        connect_to_rank(o, r);
        close_fd(&o->connections->sockets[r]);
    }
    return epic_fail(result, "%s", sentence);
}

/* ---------------------------------------------------------------------- open and close ---- */

/* Opens a pidfd for every peer, whose pid the system reports for each socket. Without pidfds,
 * only the sockets show the end of a peer. */
static epic_result watch_processes(shm_connections *connections)
{
    for (int r = 0; r < connections->num_ranks; r++) {
        struct ucred who;
        socklen_t length = sizeof who;
        if (connections->sockets[r] < 0 ||
            getsockopt(connections->sockets[r], SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
            continue;
        errno = 0;
        connections->processes[r] = process_watch(who.pid);
        if (connections->processes[r] < 0 && out_of_room(errno))
            return shm_fail_with_errno("pidfd_open");
    }
    return EPIC_OK;
}

/* Allocates the tables of *o. If `ready` is false, this rank has failed before: then only
 * returns an error, and keeps the earlier error sentence. */
static epic_result allocate_state(connect_state *o, bool ready)
{
    if (!ready) return EPIC_EDEVICE;
    const int n = o->connections->num_ranks;
    o->num_pending = n + EXTRA_PENDING;
    o->num_polls = 1 + o->num_pending + n;
    o->missing = n - 1 - o->connections->rank;
    o->polls = calloc(2 * (size_t)o->num_polls, sizeof *o->polls);
    o->pending = malloc((size_t)o->num_pending * sizeof *o->pending);
    for (int i = 0; o->pending && i < o->num_pending; i++) o->pending[i] = -1;
    if (o->polls && o->pending) return EPIC_OK;
    return epic_fail(EPIC_ENOMEM, "shm: no memory to connect %d ranks", n);
}

static void release_state(connect_state *o)
{
    for (int i = 0; o->pending && i < o->num_pending; i++) close_fd(&o->pending[i]);
    close_fd(&o->listener);
    free(o->polls);
    free(o->pending);
}

/* Returns whether the name has the form of those that open_listener() creates. It comes from
 * another process, so this rank checks it before it connects. */
static bool is_socket_name(const char name[NAME_LENGTH + 1])
{
    return name[NAME_LENGTH] == 0 && strncmp(name, NAME, 5) == 0 &&
           strspn(name + 5, "0123456789abcdef") == NAME_LENGTH - 5;
}

/* Exchanges the handles of all ranks. A rank that has failed passes its error in `result`, and
 * gets it back after the gather. Returns EPIC_EPEER if another rank failed or sent an invalid
 * name. */
static epic_result gather_handles(const epic_join *join, handle *handles, epic_result result,
                                  handle *mine)
{
    char sentence[512];
    const epic_bootstrap *bootstrap = join->bootstrap;
    snprintf(sentence, sizeof sentence, "%s", epic_sentence());
    mine->ready = result == EPIC_OK;
    const epic_result met = bootstrap->gather(bootstrap->self, mine, handles, sizeof *mine);
    if (result != EPIC_OK) return epic_fail(result, "%s", sentence);
    TRY(met);
    for (int r = 0; r < bootstrap->num_ranks; r++) {
        if (handles[r].ready != 1)
            return epic_fail(EPIC_EPEER, "shm: rank %d could not join", r);
        if (!is_socket_name(handles[r].name))
            return epic_fail(EPIC_EPEER,
                             "shm: the bootstrap returned bytes of rank %d that are not an "
                             "address that EPIC made",
                             r);
    }
    return EPIC_OK;
}

epic_result connections_decline(const epic_join *join, epic_result result)
{
    handle mine = {0}, handles[EPIC_MAX_RANKS];
    return gather_handles(join, handles, result, &mine);
}

epic_result connections_open(shm_connections *connections, const epic_join *join, bool ready,
                             int *memory)
{
    handle mine = {0};
    /* on the stack, so that a rank can take part in the gather even if memory is short */
    handle handles[EPIC_MAX_RANKS];
    connect_state o = {.connections = connections,
                       .join = join,
                       .handles = handles,
                       .listener = -1,
                       .memory = memory,
                       .deadline = deadline_begin_ms(join->config->timeout_ms)};
    epic_result result = allocate_state(&o, ready);
    if (result == EPIC_OK) result = open_listener(&o, &mine);
    result = gather_handles(join, handles, result, &mine);
    if (result == EPIC_OK) {
        result = connect_to_all(&o);
        if (result != EPIC_OK) result = fail_for_all(&o, result);
    }
    if (result == EPIC_OK) result = watch_processes(connections);
    release_state(&o);
    return result;
}

epic_result connections_alloc(shm_connections *connections, int rank, int num_ranks)
{
    *connections = (shm_connections){.rank = rank, .num_ranks = num_ranks};
    connections->sockets = malloc((size_t)num_ranks * sizeof *connections->sockets);
    connections->processes = malloc((size_t)num_ranks * sizeof *connections->processes);
    connections->dead = calloc((size_t)num_ranks, sizeof *connections->dead);
    for (int r = 0; connections->sockets && r < num_ranks; r++) connections->sockets[r] = -1;
    for (int r = 0; connections->processes && r < num_ranks; r++)
        connections->processes[r] = -1;
    if (connections->sockets && connections->processes && connections->dead) return EPIC_OK;
    return epic_fail(EPIC_ENOMEM, "shm: no memory for connections to %d ranks", num_ranks);
}

void connections_close(shm_connections *connections)
{
    for (int r = 0; connections->sockets && r < connections->num_ranks; r++)
        close_fd(&connections->sockets[r]);
    for (int r = 0; connections->processes && r < connections->num_ranks; r++)
        close_fd(&connections->processes[r]);
    free(connections->sockets);
    free(connections->processes);
    free(connections->dead);
    *connections = (shm_connections){0};
}

bool connections_is_dead(shm_connections *connections, int peer)
{
    if (peer == connections->rank) return false;
    if (load_relaxed(&connections->dead[peer])) return true;
    struct pollfd signs[] = {{.fd = connections->sockets[peer], .events = POLLRDHUP},
                             {.fd = connections->processes[peer], .events = POLLIN}};
    if (poll(signs, 2, 0) <= 0) return false;
    store_relaxed(&connections->dead[peer], true);
    return true;
}
