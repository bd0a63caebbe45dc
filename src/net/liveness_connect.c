/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the liveness connections (liveness.h). Of two peers, the peer on the host with the
 * lower number listens, and the peer on the host with the higher number connects. The
 * connecting peer tries the addresses of the listening host one after the other.
 *
 * Each rank has published a handle with its addresses and a random secret through the
 * bootstrap. The handshake of the connecting rank contains the secret of the listening rank,
 * and the reply contains the secret of the connecting rank. So both ranks prove that they took
 * part in the bootstrap.
 *
 * Connections without these secrets are closed. Such a connection comes from another program or
 * from a rank of another group. Such a rank can reach the wrong machine if several machines
 * have the same address (for example an address of a container bridge). */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "base/deadline.h"
#include "base/error.h"
#include "bootstrap/bootstrap.h"
#include "net/liveness_inner.h"

/* Maximum number of accepted connections without a complete handshake. One more connection
 * replaces the oldest of these connections. */
#define MAX_INCOMING 32
/* time limit for connecting to one address */
#define ADDRESS_TRY_MS 1000
#define RETRY_PAUSE_MS 50           /* pause between a refused address and the next address */
#define POLL_MS 50                  /* maximum sleep of one poll() */
#define MAGIC 0x656e696c63697065ull /* "epicline" in memory */

/* The message that each side of a connection sends once. */
typedef struct handshake {
    uint64_t magic, group_id;
    uint64_t secret[2];      /* secret of the receiver, from its handle */
    int32_t host, num_hosts; /* the sender's host, and its number of hosts */
} handshake;

/* A connection whose handshake is not complete. `next` and `until_ms` are used only in outgoing
 * connections, which this rank has begun. */
typedef struct connection {
    int fd;        /* socket; -1: not open */
    bool has_sent; /* true: this rank has sent its handshake */
    int next; /* index of the peer's next address to try, modulo the number of its addresses */
    int64_t until_ms;    /* time at which to try the next address */
    size_t num_received; /* number of bytes of `received` that have arrived */
    handshake received;
} connection;

typedef struct connect_state {
    net_liveness *connections;
    /* [num_hosts, NET_LIVENESS_HANDLE_BYTES]: the handles of all hosts */
    const unsigned char *handles;
    connection outgoing[NET_MAX_HOSTS];
    connection incoming[MAX_INCOMING];
    /* number of connections accepted so far; incoming[next_incoming % MAX_INCOMING] is the
     * oldest connection */
    int next_incoming;
    int error; /* EMFILE or ENFILE if the system has refused a descriptor; 0: it has not */
} connect_state;

static epic_result fail_with_errno(const char *what)
{
    const int error = errno;
    return epic_fail(EPIC_EDEVICE, "liveness connections: %s: %s%s", what, strerror(error),
                     epic_remedy(error));
}

epic_result net_liveness_listen(net_liveness **out, const net_liveness_setup *setup,
                                void *handle)
{
    net_liveness *l = calloc(1, sizeof *l);
    if (!l) return epic_fail(EPIC_ENOMEM, "no host memory for liveness connections");
    l->setup = *setup;
    if (!l->setup.silence_ms) l->setup.silence_ms = 800;
    l->stop_event = -1;
    for (int h = 0; h < NET_MAX_HOSTS; h++) l->sockets[h] = -1;
    l->listener = liveness_open_listener(&l->handle.port);
    l->handle.num_addresses =
        (uint32_t)liveness_find_addresses(l->handle.addresses, setup->interface);
    epic_result result = EPIC_OK;
    if (l->listener < 0)
        result = fail_with_errno("listening");
    else if (getrandom(l->handle.secret, sizeof l->handle.secret, 0) != sizeof l->handle.secret)
        result = fail_with_errno("getrandom");
    else if (l->handle.num_addresses == 0)
        result =
            epic_fail(EPIC_EDEVICE,
                      "liveness connections: no interface%s%.40s of this host has an address",
                      setup->interface ? " " : "", setup->interface ? setup->interface : "");
    if (result == EPIC_OK) {
        memcpy(handle, &l->handle, sizeof l->handle);
        *out = l;
    } else
        net_liveness_forget(l);
    return result;
}

/* Returns the handle of the peer on a host. The bytes may be damaged, so num_addresses is
 * limited to the length of its array. */
static liveness_handle handle_of(const connect_state *o, int host)
{
    liveness_handle handle;
    memcpy(&handle, o->handles + (size_t)host * NET_LIVENESS_HANDLE_BYTES, sizeof handle);
    if (handle.num_addresses > LIVENESS_MAX_ADDRESSES)
        handle.num_addresses = LIVENESS_MAX_ADDRESSES;
    return handle;
}

/* Sends this rank's handshake to the peer on host `to`. Returns false if that fails. */
static bool send_handshake(const connect_state *o, int fd, int to)
{
    const liveness_handle handle = handle_of(o, to);
    const net_liveness_setup *s = &o->connections->setup;
    const handshake mine = {
        MAGIC, s->group_id, {handle.secret[0], handle.secret[1]}, s->host, s->num_hosts};
    return send(fd, &mine, sizeof mine, MSG_NOSIGNAL) == (ssize_t)sizeof mine;
}

/* Reads more bytes of the handshake. Returns false if the other side has closed. */
static bool receive_handshake(connection *t)
{
    const size_t left = sizeof t->received - t->num_received;
    const ssize_t count = recv(t->fd, (char *)&t->received + t->num_received, left, 0);
    if (count > 0) t->num_received += (size_t)count;
    return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

/* Returns the host that sent the handshake, or -1 if the sender is not a rank of this group. */
static int identify_host(const connect_state *o, const connection *t)
{
    const net_liveness *l = o->connections;
    const handshake *g = &t->received;
    const bool ours = t->num_received == sizeof *g && g->magic == MAGIC &&
                      g->group_id == l->setup.group_id &&
                      !memcmp(g->secret, l->handle.secret, sizeof g->secret) &&
                      g->num_hosts == l->setup.num_hosts;
    return ours && g->host >= 0 && g->host < l->setup.num_hosts ? g->host : -1;
}

static void adopt_connection(connect_state *o, connection *t, int host)
{
    o->connections->sockets[host] = t->fd;
    t->fd = -1;
}

/* Stores errno if the system has refused a descriptor for `fd`. Ignores other errors, because
 * other addresses and later connections may work. */
static void record_error(connect_state *o, int fd)
{
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) o->error = errno;
}

static void try_next_address(connect_state *o, int host, int64_t now)
{
    connection *t = &o->outgoing[host];
    const liveness_handle handle = handle_of(o, host);
    liveness_close_socket(&t->fd);
    *t = (connection){.fd = -1, .next = t->next + 1, .until_ms = now + RETRY_PAUSE_MS};
    if (handle.num_addresses == 0) return;
    t->fd = liveness_begin_connect(
        &handle.addresses[(uint32_t)(t->next - 1) % handle.num_addresses], handle.port);
    record_error(o, t->fd);
    if (t->fd >= 0) t->until_ms = now + ADDRESS_TRY_MS;
}

/* Continues the outgoing connection to a host, after poll() reported `events`. If TCP has not
 * established the connection after ADDRESS_TRY_MS, tries the next address. An established
 * connection waits for the reply until net_liveness_connect() times out, because the peer may
 * call net_liveness_connect() later than this rank. */
static void advance_outgoing(connect_state *o, int host, short events, int64_t now)
{
    connection *t = &o->outgoing[host];
    if (t->fd >= 0 && !t->has_sent && events) t->has_sent = send_handshake(o, t->fd, host);
    const bool lost = t->fd >= 0 && events && (!t->has_sent || !receive_handshake(t));
    if (lost) {
        liveness_close_socket(&t->fd);
        *t = (connection){.fd = -1, .next = t->next, .until_ms = now + RETRY_PAUSE_MS};
    }
    const bool answered = t->num_received == sizeof t->received;
    if (answered && identify_host(o, t) == host)
        adopt_connection(o, t, host);
    else if (answered || (!t->has_sent && now >= t->until_ms))
        try_next_address(o, host, now);
}

/* Accepts a connection. If all entries of `incoming` are in use, the new connection replaces
 * the oldest one. */
static void accept_connection(connect_state *o)
{
    const int fd = accept4(o->connections->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    record_error(o, fd);
    if (fd < 0) return;
    connection *t = &o->incoming[o->next_incoming++ % MAX_INCOMING];
    liveness_close_socket(&t->fd);
    *t = (connection){.fd = fd};
}

/* Reads bytes from one incoming connection. When the handshake is complete, replies to it if
 * the sender is a peer on a host with a higher number and is not connected yet. If not, closes
 * the connection. */
static void advance_incoming(connect_state *o, connection *t)
{
    const bool there = receive_handshake(t);
    if (there && t->num_received < sizeof t->received) return;
    const int host = identify_host(o, t);
    const bool wanted = host > o->connections->setup.host && o->connections->sockets[host] < 0;
    if (wanted && send_handshake(o, t->fd, host))
        adopt_connection(o, t, host);
    else
        liveness_close_socket(&t->fd);
}

/* Sets which[rank] to true for each peer that is not connected yet. Returns the number of these
 * peers. */
static int find_missing(const net_liveness *l, bool *which)
{
    int count = 0;
    for (int h = 0; h < l->setup.num_hosts; h++)
        if (h != l->setup.host && !l->setup.is_local[h] && l->sockets[h] < 0) {
            which[liveness_rank_of(l, h)] = true;
            count++;
        }
    return count;
}

/* Returns true if this rank must still connect to the peer on host `host`. Of two hosts, the
 * one with the higher number connects. */
static bool must_connect(const net_liveness *l, int host)
{
    return host < l->setup.host && !l->setup.is_local[host] && l->sockets[host] < 0;
}

/* Adds a connection to the sockets to poll if it is open. There are no entries for closed
 * sockets, because poll() fails if there are more entries than the limit on open files. */
static struct pollfd *add_poll(struct pollfd *p, const connection *t, short events)
{
    if (t->fd < 0) return p;
    *p = (struct pollfd){.fd = t->fd, .events = events};
    return p + 1;
}

static epic_result poll_once(connect_state *o)
{
    net_liveness *l = o->connections;
    struct pollfd polls[1 + NET_MAX_HOSTS + MAX_INCOMING], *p = polls;
    *p++ = (struct pollfd){.fd = l->listener, .events = POLLIN};
    for (int h = 0; h < l->setup.num_hosts; h++)
        p = add_poll(p, &o->outgoing[h], o->outgoing[h].has_sent ? POLLIN : POLLOUT);
    for (int g = 0; g < MAX_INCOMING; g++) p = add_poll(p, &o->incoming[g], POLLIN);
    if (poll(polls, (nfds_t)(p - polls), POLL_MS) < 0 && errno != EINTR)
        return fail_with_errno("poll");
    const int64_t now = epic_bootstrap_now_ms();
    p = polls + 1;
    for (int h = 0; h < l->setup.num_hosts; h++) {
        const short events = o->outgoing[h].fd >= 0 ? (p++)->revents : 0;
        if (must_connect(l, h)) advance_outgoing(o, h, events, now);
    }
    for (int g = 0; g < MAX_INCOMING; g++)
        if (o->incoming[g].fd >= 0 && (p++)->revents) advance_incoming(o, &o->incoming[g]);
    if (polls[0].revents) accept_connection(o);
    errno = o->error;
    return o->error ? fail_with_errno("a socket") : EPIC_OK;
}

/* Returns EPIC_ETIMEOUT with an error text that lists the ranks in `which`. */
static epic_result fail_with_missing(const net_liveness *l, const bool *which)
{
    char names[256];
    const int num_ranks = l->setup.num_hosts * l->setup.ranks_per_host;
    epic_bootstrap_list_ranks(names, sizeof names, which, num_ranks);
    return epic_fail(EPIC_ETIMEOUT,
                     "liveness connections: no TCP connection with %s within %u ms: it did not "
                     "connect, or this host "
                     "cannot reach it; check firewalls and the interface%s%.40s",
                     names, l->setup.timeout_ms, l->setup.interface ? " " : "",
                     l->setup.interface ? l->setup.interface : "");
}

epic_result net_liveness_connect(net_liveness *l, const void *handles)
{
    connect_state o = {.connections = l, .handles = handles};
    deadline end = deadline_begin_ms(l->setup.timeout_ms);
    for (int h = 0; h < NET_MAX_HOSTS; h++) o.outgoing[h].fd = -1;
    for (int g = 0; g < MAX_INCOMING; g++) o.incoming[g].fd = -1;
    epic_result result = EPIC_OK;
    for (;;) {
        bool which[NET_MAX_HOSTS * 64] = {false};
        if (result != EPIC_OK || find_missing(l, which) == 0) break;
        const bool late = deadline_before_nap(&end, POLL_MS * 1000000ull);
        result = late ? fail_with_missing(l, which) : poll_once(&o);
    }
    for (int h = 0; h < NET_MAX_HOSTS; h++) liveness_close_socket(&o.outgoing[h].fd);
    for (int g = 0; g < MAX_INCOMING; g++) liveness_close_socket(&o.incoming[g].fd);
    liveness_close_socket(&l->listener);
    return result == EPIC_OK ? liveness_start_thread(l) : result;
}
