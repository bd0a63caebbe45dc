/* SPDX-License-Identifier: Apache-2.0 */
/* Beats, and what their acknowledgements tell. */
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
#include "net/lines_inner.h"

#define BEAT_MS 100
#define BEAT 'b'
#define END 'e' /* the last byte of a line that is closed: without it, its process has died */

static void set_state(net_lines *l, int host, net_line state)
{
    __atomic_store_n(&l->state[host], (int)state, __ATOMIC_RELEASE);
}

net_line net_lines_look(const net_lines *l, int host)
{
    return (net_line)__atomic_load_n(&l->state[host], __ATOMIC_ACQUIRE);
}

static bool listens(const net_lines *l, int host)
{
    return l->sockets[host] >= 0 && net_lines_look(l, host) == LINE_ALIVE;
}

/* Takes the peer's beats.  What ends a line is told once, in the order in which it came. */
static void take(net_lines *l, int host)
{
    char bytes[256];
    for (;;) {
        const ssize_t count = recv(l->sockets[host], bytes, sizeof bytes, 0);
        if (count > 0 && bytes[count - 1] != END) continue;
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
        set_state(l, host, count > 0 ? LINE_CLOSED : LINE_DEAD);
        return;
    }
}

/* Judges by earlier beats, then sends one.  A host is gone when nothing that was sent since
 * `asked_ms` is acknowledged, and nothing else came from there.  Time for which this thread was late
 * does not count: it may have stood still between the clock and its beat, which then seems older than
 * it is, and what kept it may have kept the system from taking what came. */
static void beat(net_lines *l, int host, int64_t now)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    if (getsockopt(l->sockets[host], IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0) {
        if (info.tcpi_unacked == 0)
            l->asked_ms[host] = now;
        else if (now - l->asked_ms[host] > l->setup.silence_ms &&
                 info.tcpi_last_ack_recv > l->setup.silence_ms) {
            set_state(l, host, LINE_DEAD);
            return;
        }
    }
    const ssize_t sent = send(l->sockets[host], &(char){BEAT}, 1, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) take(l, host); /* its last byte counts */
}

static void *listen_to_all(void *self)
{
    net_lines *l = self;
    int64_t next = 0;
    for (;;) {
        struct pollfd polls[NET_MAX_HOSTS + 1];
        const int n = l->setup.num_hosts;
        for (int h = 0; h < n; h++)
            polls[h] =
                (struct pollfd){.fd = listens(l, h) ? l->sockets[h] : -1, .events = POLLIN};
        polls[n] = (struct pollfd){.fd = l->end, .events = POLLIN};
        const int got = poll(polls, (nfds_t)n + 1, epic_bootstrap_left(next));
        if (got > 0 && polls[n].revents) return NULL;
        for (int h = 0; h < n && got > 0; h++)
            if (polls[h].revents) take(l, h);
        const int64_t now = epic_bootstrap_now(), late = now - next;
        if (late < 0) continue;
        for (int h = 0; h < n; h++) {
            if (next && late > BEAT_MS) l->asked_ms[h] += late;
            if (listens(l, h)) beat(l, h, now);
        }
        next = now + BEAT_MS;
    }
}

/* Signals of the program are not for this thread. */
epic_result line_start(net_lines *l)
{
    const int64_t now = epic_bootstrap_now();
    for (int h = 0; h < l->setup.num_hosts; h++) l->asked_ms[h] = now;
    l->end = eventfd(0, EFD_CLOEXEC);
    if (l->end < 0) return epic_fail(EPIC_EDEVICE, "lines: eventfd: %s", strerror(errno));
    const int error = thread_start(&l->thread, listen_to_all, l);
    if (error) {
        line_hang_up(&l->end);
        return epic_fail(EPIC_EDEVICE, "lines: no thread for them: %s", strerror(error));
    }
    return EPIC_OK;
}

static void stop(net_lines *l)
{
    if (l->end < 0) return;
    const ssize_t written = write(l->end, &(uint64_t){1}, sizeof(uint64_t));
    if (written == sizeof(uint64_t)) pthread_join(l->thread, NULL);
}

void net_lines_forget(net_lines *l)
{
    if (!l) return;
    for (int h = 0; h < NET_MAX_HOSTS; h++) line_hang_up(&l->sockets[h]);
    line_hang_up(&l->listener);
    line_hang_up(&l->end);
    free(l);
}

/* What has not been read when a socket is closed makes the system send a reset, which may overtake
 * the last byte: so nothing is left unread. */
void net_lines_close(net_lines *l)
{
    if (!l) return;
    stop(l);
    for (int h = 0; h < l->setup.num_hosts; h++) {
        if (!listens(l, h)) continue;
        const ssize_t sent = send(l->sockets[h], &(char){END}, 1, MSG_NOSIGNAL);
        if (sent == 1) shutdown(l->sockets[h], SHUT_WR);
        take(l, h);
    }
    net_lines_forget(l);
}
