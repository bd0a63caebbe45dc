/* SPDX-License-Identifier: Apache-2.0 */
/* Connects each rank of a group with every other rank. The ranks are processes of one host.
 *
 * Each rank listens on an abstract UNIX address with a random name, and publishes the address
 * and a random secret through the bootstrap. Each rank connects to all lower ranks and accepts
 * connections from all higher ranks. The first message of the connecting rank contains the
 * secret of the accepting rank, and the answer contains the secret of the connecting rank. So
 * each of the two ranks proves that it took part in the bootstrap.
 *
 * A rank first connects to all lower ranks and sends its handshakes to them. Then it accepts
 * and answers higher ranks and receives the answers of lower ranks, in the order in which they
 * arrive. So no two ranks wait for each other. Ranks wait with epoll, because each poll() would
 * examine all connections, and the work of all ranks together would grow with the third power
 * of the number of ranks. */
#include "backend/shm/connections.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
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
/* number of connections without a handshake that can be pending, in addition to one per rank */
#define EXTRA_PENDING 16
#define MAX_EVENTS 64 /* maximum number of events that one system call returns */
/* time between two checks whether the listeners of missing ranks are still open; the listener
 * of a rank whose process exits is closed */
#define CHECK_MS 200

/* The data that a rank publishes through the bootstrap. */
typedef struct handle {
    uint64_t ready;
    uint64_t secret[2];
    char name[NAME_LENGTH + 1];
} handle;

typedef struct connect_state {
    shm_connections *connections;
    const epic_join *join;
    handle *handles;    /* [num_ranks]: the handles of all ranks */
    bool *has_answered; /* [num_ranks]: lower ranks whose answer has arrived */
    /* [num_pending]: accepted sockets whose handshake has not arrived yet; -1: free entry */
    int *pending;
    int num_pending;
    int listener;
    bool is_accepting; /* true: connections->epoll watches the listener */
    int missing;       /* number of higher ranks that have not connected yet */
    int unanswered;    /* number of lower ranks that have not answered yet */
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

/* The kind of socket from which an event comes. */
enum source_kind { FROM_LISTENER, FROM_PENDING, FROM_CONNECTION };

/* Returns the value by which epoll identifies a socket. `index`: index in o->pending, or a
 * rank. */
static uint64_t source_of(enum source_kind kind, int index)
{
    return (uint64_t)kind << 32 | (uint32_t)index;
}

/* Makes connections->epoll report when data arrives at a socket or its connection is closed.
 * `how` is EPOLL_CTL_ADD for a new socket, EPOLL_CTL_MOD for a new source, or EPOLL_CTL_DEL to
 * stop the reports. */
static epic_result watch_socket(const connect_state *o, int how, int fd, uint64_t source)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = source};
    return epoll_ctl(o->connections->epoll, how, fd, &event) == 0
               ? EPIC_OK
               : shm_fail_with_errno("epoll_ctl");
}

/* Makes connections->epoll watch the listener if ranks are missing and `pending` has a free
 * entry, and stops watching it if not. */
static epic_result watch_listener(connect_state *o)
{
    bool accepts = false;
    for (int i = 0; i < o->num_pending && o->missing > 0 && !accepts; i++)
        accepts = o->pending[i] < 0;
    if (accepts == o->is_accepting) return EPIC_OK;
    o->is_accepting = accepts;
    return watch_socket(o, accepts ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, o->listener,
                        source_of(FROM_LISTENER, 0));
}

/* Waits for events, but at most CHECK_MS, so that the caller can check whether missing ranks
 * have died. Returns EPIC_ETIMEOUT at the deadline, with an error text that begins with `what`,
 * for example "rank 1 did not connect". */
static epic_result wait_for_events(connect_state *o, struct epoll_event events[MAX_EVENTS],
                                   int *count, const char *what)
{
    const uint64_t now = (uint64_t)clock_ns();
    if (deadline_look(&o->deadline, now))
        return epic_fail(EPIC_ETIMEOUT, "shm: %s within %u ms", what,
                         o->join->config->timeout_ms);
    const uint64_t ms = deadline_sleep_ns(&o->deadline, now, CHECK_MS * 1000000ull) / 1000000;
    const int got = epoll_wait(o->connections->epoll, events, MAX_EVENTS, (int)ms + 1);
    if (got < 0 && errno != EINTR) return shm_fail_with_errno("epoll_wait");
    *count = got < 0 ? 0 : got;
    return EPIC_OK;
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
    TRY(watch_socket(o, EPOLL_CTL_ADD, *socket_fd, source_of(FROM_CONNECTION, peer)));
    return send_handshake(o, *socket_fd, peer, -1);
}

static bool out_of_room(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

/* Reads the handshake of pending connection number i. If the sender is a higher rank that is
 * not connected yet, answers the handshake; otherwise closes the connection. is_watched is true
 * if connections->epoll already watches the connection. If it is false and the handshake has
 * not arrived yet, adds the connection, so that connections->epoll reports the handshake. */
static epic_result identify_pending(connect_state *o, int i, bool is_watched)
{
    shm_connections *connections = o->connections;
    const int how = is_watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd = o->pending[i];
    errno = 0;
    const int rank = receive_handshake(o, fd, NULL);
    if (rank < 0 && errno == EAGAIN && !is_watched)
        return watch_socket(o, how, fd, source_of(FROM_PENDING, i));
    if (rank <= connections->rank || connections->sockets[rank] >= 0) {
        close_fd(&o->pending[i]);
        return EPIC_OK;
    }
    connections->sockets[rank] = fd;
    o->pending[i] = -1;
    o->missing--;
    TRY(watch_socket(o, how, fd, source_of(FROM_CONNECTION, rank)));
    return send_handshake(o, fd, rank, connections->rank == 0 ? *o->memory : -1);
}

/* Accepts new connections into the free entries of `pending`. If the system has no descriptor
 * or memory left for a connection, joining fails at once, because the connecting peer would
 * otherwise wait until its deadline. */
static epic_result accept_pending(connect_state *o)
{
    for (int i = 0; i < o->num_pending; i++) {
        if (o->pending[i] >= 0) continue;
        o->pending[i] = accept4(o->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (o->pending[i] < 0)
            return out_of_room(errno) ? shm_fail_with_errno("accept") : EPIC_OK;
        if (handshake_is_same_user(o->pending[i]))
            TRY(identify_pending(o, i, false));
        else
            close_fd(&o->pending[i]);
    }
    return EPIC_OK;
}

static int first_missing(const connect_state *o)
{
    int r = o->connections->rank + 1;
    while (r < o->connections->num_ranks && o->connections->sockets[r] >= 0) r++;
    return r;
}

/* Returns whether a peer's listener is open. It is closed when all higher ranks are connected
 * to the peer, or when the peer's process exits. */
static bool is_listening(const connect_state *o, int peer)
{
    socklen_t length;
    const struct sockaddr_un address = address_of(&o->handles[peer], &length);
    int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    /* Without a free socket the listener cannot be tested, so assume that the peer listens. */
    if (probe < 0) return true;
    const bool refused =
        connect(probe, (const struct sockaddr *)&address, length) != 0 && errno == ECONNREFUSED;
    close_fd(&probe);
    return !refused;
}

/* Returns a rank that has not connected and whose listener is closed, or -1 if there is
 * none. */
static int find_gone(const connect_state *o)
{
    for (int r = o->connections->rank + 1; r < o->connections->num_ranks; r++)
        if (o->connections->sockets[r] < 0 && !is_listening(o, r)) return r;
    return -1;
}

/* Receives the answer of a lower rank. The answer of rank 0 carries the descriptor of the
 * shared memory. */
static epic_result receive_answer(connect_state *o, int peer)
{
    const int socket_fd = o->connections->sockets[peer];
    const int speaker = receive_handshake(o, socket_fd, peer == 0 ? o->memory : NULL);
    if (*o->memory == HANDSHAKE_NO_ROOM) {
        *o->memory = -1;
        errno = EMFILE;
        return shm_fail_with_errno("receiving the shared memory");
    }
    if (speaker != peer) return shm_fail_with_left(peer);
    if (*o->memory < 0 && peer == 0)
        return epic_fail(EPIC_EDEVICE, "shm: rank 0 sent no memory");
    o->has_answered[peer] = true;
    o->unanswered--;
    return EPIC_OK;
}

/* Handles an event of one socket. After its handshake a peer sends nothing until its own group
 * is open. So an event on a connection whose handshake is complete means that the peer has
 * closed the connection. */
static epic_result handle_event(connect_state *o, const struct epoll_event *event)
{
    const int index = connections_rank_of(event);
    switch ((enum source_kind)(event->data.u64 >> 32)) {
    case FROM_LISTENER:
        return accept_pending(o);
    case FROM_PENDING:
        return identify_pending(o, index, true);
    default:
        if (index > o->connections->rank || o->has_answered[index])
            return shm_fail_with_left(index);
        return receive_answer(o, index);
    }
}

/* Writes to `what` [40] a text with the rank for which this rank waits. */
static void describe_wait(const connect_state *o, char *what)
{
    int r = 0;
    while (o->missing == 0 && r < o->connections->rank && o->has_answered[r]) r++;
    if (o->missing > 0)
        snprintf(what, 40, "rank %d did not connect", first_missing(o));
    else
        snprintf(what, 40, "rank %d did not answer", r);
}

/* Accepts connections from all higher ranks, and receives the answers of all lower ranks. If a
 * rank dies before it connects, this rank has no connection to it that could show its death. So
 * find_gone() looks for a missing rank whose listener is closed. That rank may have connected
 * just before it closed its listener, so the loop waits for events once more before it reports
 * that the rank is gone. */
static epic_result await_all(connect_state *o)
{
    struct epoll_event events[MAX_EVENTS];
    int gone = -1, count = 0;
    while (o->missing > 0 || o->unanswered > 0) {
        char what[40];
        describe_wait(o, what);
        TRY(watch_listener(o));
        TRY(wait_for_events(o, events, &count, what));
        for (int i = 0; i < count; i++) TRY(handle_event(o, &events[i]));
        if (count > 0) {
            gone = -1;
            continue;
        }
        if (gone >= 0) return shm_fail_with_left(gone);
        gone = find_gone(o);
    }
    return EPIC_OK;
}

/* Connects this rank with all other ranks, in the order that the top of this file describes. */
static epic_result connect_to_all(connect_state *o)
{
    for (int r = 0; r < o->connections->rank; r++) TRY(connect_to_rank(o, r));
    return await_all(o);
}

/* Closes this rank's connections, so that the other ranks notice that this rank has failed. A
 * lower rank may still wait for a connection from this rank, so this function also connects to
 * each lower rank once more and closes that connection. Returns `result` and keeps the error
 * text. */
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

/* Opens a pidfd (a descriptor that shows when a process exits) for every peer. The system
 * reports the peer's pid for each socket. If pidfds are not supported, only the sockets show
 * that a peer has exited. */
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

/* Allocates the tables of *o. If `ready` is false, this rank has already failed: in this case
 * only returns an error, and keeps the earlier error text. */
static epic_result allocate_state(connect_state *o, bool ready)
{
    if (!ready) return EPIC_EDEVICE;
    const int n = o->connections->num_ranks;
    o->num_pending = n + EXTRA_PENDING;
    o->missing = n - 1 - o->connections->rank;
    o->unanswered = o->connections->rank;
    o->has_answered = calloc((size_t)n, sizeof *o->has_answered);
    o->pending = malloc((size_t)o->num_pending * sizeof *o->pending);
    for (int i = 0; o->pending && i < o->num_pending; i++) o->pending[i] = -1;
    if (!o->has_answered || !o->pending)
        return epic_fail(EPIC_ENOMEM, "shm: no memory to connect %d ranks", n);
    o->connections->epoll = epoll_create1(EPOLL_CLOEXEC);
    return o->connections->epoll >= 0 ? EPIC_OK : shm_fail_with_errno("epoll_create1");
}

/* Closes a socket that is not a connection to a rank. A child that was forked meanwhile may
 * keep the socket open, and then epoll would still report its events. So this function first
 * removes the socket from connections->epoll. */
static void forget_socket(const connect_state *o, int *fd)
{
    if (*fd >= 0) epoll_ctl(o->connections->epoll, EPOLL_CTL_DEL, *fd, NULL);
    close_fd(fd);
}

static void release_state(connect_state *o)
{
    for (int i = 0; o->pending && i < o->num_pending; i++) forget_socket(o, &o->pending[i]);
    forget_socket(o, &o->listener);
    free(o->has_answered);
    free(o->pending);
}

/* Returns whether `name` has the form of the names that open_listener() creates. The name comes
 * from another process, so this rank checks it before it connects. */
static bool is_socket_name(const char name[NAME_LENGTH + 1])
{
    return name[NAME_LENGTH] == 0 && strncmp(name, NAME, 5) == 0 &&
           strspn(name + 5, "0123456789abcdef") == NAME_LENGTH - 5;
}

/* Exchanges the handles of all ranks. A rank that has failed passes its error in `result`, and
 * the function returns this error after the gather. Returns EPIC_EPEER if another rank failed
 * or sent an invalid name. */
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
    *connections = (shm_connections){.rank = rank, .num_ranks = num_ranks, .epoll = -1};
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
    if (connections->sockets) close_fd(&connections->epoll);
    free(connections->sockets);
    free(connections->processes);
    free(connections->dead);
    *connections = (shm_connections){0};
}

void connections_close_dead(shm_connections *connections, const seat_set *members)
{
    for (int r = 0; r < connections->num_ranks; r++) {
        if (seat_set_has(members, r) || !load_relaxed(&connections->dead[r])) continue;
        connections_ignore(connections, r);
        close_fd(&connections->sockets[r]);
        close_fd(&connections->processes[r]);
    }
}

int connections_rank_of(const struct epoll_event *event)
{
    return (int)(uint32_t)event->data.u64;
}

void connections_ignore(const shm_connections *connections, int peer)
{
    const int fd = connections->sockets[peer];
    if (fd >= 0) epoll_ctl(connections->epoll, EPOLL_CTL_DEL, fd, NULL);
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
