/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that watches the liveness connections (liveness.h). Ten times a second it sends
 * one byte, the heartbeat BEAT_BYTE, on each connection. TCP on the peer's host acknowledges
 * the bytes, and from these acknowledgements the thread decides whether the peer is dead. This
 * rank has one peer on each other host, so arrays of peers are indexed by host. */
#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "base/thread.h"
#include "bootstrap/bootstrap.h"
#include "net/liveness_inner.h"

#ifndef BEAT_MS     /* tests with many ranks on few cores set a longer one */
#define BEAT_MS 100 /* time between two BEAT_BYTEs on a connection */
#endif
#define BEAT_BYTE 'b'
#define CLOSE_BYTE \
    'e' /* last byte before a regular close; a process that dies does not send it */

static void set_state(net_liveness *l, int host, net_peer_state state)
{
    __atomic_store_n(&l->state[host], (int)state, __ATOMIC_RELEASE);
}

net_peer_state net_liveness_state(const net_liveness *l, int host)
{
    return (net_peer_state)__atomic_load_n(&l->state[host], __ATOMIC_ACQUIRE);
}

/* Returns true while the peer on this host is connected and is neither closed nor dead. */
static bool is_watched(const net_liveness *l, int host)
{
    return l->sockets[host] >= 0 && net_liveness_state(l, host) == NET_PEER_ALIVE;
}

/* Reads the bytes that the peer has sent. If the last byte is CLOSE_BYTE, sets the peer's state
 * to NET_PEER_CLOSED. If the connection was closed without CLOSE_BYTE, or has failed, sets the
 * state to NET_PEER_DEAD. Both states are final. */
static void read_beats(net_liveness *l, int host)
{
    char bytes[256];
    for (;;) {
        const ssize_t count = recv(l->sockets[host], bytes, sizeof bytes, 0);
        if (count > 0 && bytes[count - 1] != CLOSE_BYTE) continue;
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
        set_state(l, host, count > 0 ? NET_PEER_CLOSED : NET_PEER_DEAD);
        return;
    }
}

/* Checks that the peer's host has acknowledged the earlier bytes, then sends the next byte.
 *
 * The peer is dead if a byte is not acknowledged, and no acknowledgement has arrived for longer
 * than silence_ms. While this process is suspended, it cannot check acknowledgements, so
 * run_thread() adds the time of the suspension to acked_ms. */
static void check_and_beat(net_liveness *l, int host, int64_t now)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    if (getsockopt(l->sockets[host], IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0) {
        if (info.tcpi_unacked == 0)
            l->acked_ms[host] = now;
        else if (now - l->acked_ms[host] > l->setup.silence_ms &&
                 info.tcpi_last_ack_recv > l->setup.silence_ms) {
            set_state(l, host, NET_PEER_DEAD);
            return;
        }
    }
    const ssize_t sent = send(l->sockets[host], &(char){BEAT_BYTE}, 1, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR)
        /* sending failed: read_beats() sets the state to closed if it finds the close byte, and
         * to dead if not */
        read_beats(l, host);
}

/* The main function of the thread. Sleeps until bytes arrive or BEAT_MS have passed. Then reads
 * the bytes, or sends the next byte to each peer. Returns when stop_thread() has written to
 * stop_event. */
static void *run_thread(void *self)
{
    net_liveness *l = self;
    int64_t next = 0;
    for (;;) {
        struct pollfd polls[NET_MAX_HOSTS + 1];
        const int n = l->setup.num_hosts;
        for (int h = 0; h < n; h++)
            polls[h] =
                (struct pollfd){.fd = is_watched(l, h) ? l->sockets[h] : -1, .events = POLLIN};
        polls[n] = (struct pollfd){.fd = l->stop_event, .events = POLLIN};
        const int got = poll(polls, (nfds_t)n + 1, epic_bootstrap_left_ms(next));
        /* poll() fails if the process has lowered its limit on open files. In this case the
         * thread checks all sockets after a pause. */
        const bool failed = got < 0 && errno != EINTR;
        if (failed) poll(NULL, 0, BEAT_MS);
        eventfd_t value;
        if ((failed || (got > 0 && polls[n].revents)) && !eventfd_read(l->stop_event, &value))
            return NULL;
        for (int h = 0; h < n; h++)
            if (failed ? is_watched(l, h) : got > 0 && polls[h].revents) read_beats(l, h);
        const int64_t now = epic_bootstrap_now_ms(), late = now - next;
        if (late < 0) continue;
        for (int h = 0; h < n; h++) {
            if (next && late > BEAT_MS) l->acked_ms[h] += late;
            if (is_watched(l, h)) check_and_beat(l, h, now);
        }
        next = now + BEAT_MS;
    }
}

epic_result liveness_start_thread(net_liveness *l)
{
    const int64_t now = epic_bootstrap_now_ms();
    for (int h = 0; h < l->setup.num_hosts; h++) l->acked_ms[h] = now;
    l->stop_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->stop_event < 0)
        return epic_fail(EPIC_EDEVICE, "liveness connections: eventfd: %s", strerror(errno));
    const int error = thread_start(&l->thread, run_thread, l);
    if (error) {
        liveness_close_socket(&l->stop_event);
        return epic_fail(EPIC_EDEVICE, "liveness connections: no thread: %s", strerror(error));
    }
    return EPIC_OK;
}

/* Stops the thread and waits until it has returned. Does nothing if no thread runs. */
static void stop_thread(net_liveness *l)
{
    if (l->stop_event < 0) return;
    const ssize_t written = write(l->stop_event, &(uint64_t){1}, sizeof(uint64_t));
    if (written == sizeof(uint64_t)) pthread_join(l->thread, NULL);
}

void net_liveness_forget(net_liveness *l)
{
    if (!l) return;
    for (int h = 0; h < NET_MAX_HOSTS; h++) liveness_close_socket(&l->sockets[h]);
    liveness_close_socket(&l->listener);
    liveness_close_socket(&l->stop_event);
    free(l);
}

/* Sends the close byte to every peer and closes the sockets (liveness.h). Before that, reads
 * all received bytes: with unread bytes the system would send a TCP reset, which the peer might
 * receive before the close byte. */
void net_liveness_close(net_liveness *l)
{
    if (!l) return;
    stop_thread(l);
    for (int h = 0; h < l->setup.num_hosts; h++) {
        if (!is_watched(l, h)) continue;
        const ssize_t sent = send(l->sockets[h], &(char){CLOSE_BYTE}, 1, MSG_NOSIGNAL);
        if (sent == 1) shutdown(l->sockets[h], SHUT_WR);
        read_beats(l, h);
    }
    net_liveness_forget(l);
}
