/* SPDX-License-Identifier: Apache-2.0 */
/* Where a TCP meeting takes place: names to addresses, and listening on them. */
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "meet/tcp.h"

#define PAUSE_MS 50
#define PORT_PATIENCE_MS 2000 /* a port may be free again in a moment */

epic_result epic_tcp_resolve(struct addrinfo **out, const epic_tcp *tcp, int64_t end)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    char port[16];
    snprintf(port, sizeof port, "%u", tcp->port);
    for (;;) {
        /* has no deadline of its own; the resolver's is some seconds */
        const int wrong = getaddrinfo(tcp->address, port, &hints, out);
        if (wrong == 0) return EPIC_OK;
        if (wrong != EAI_AGAIN || epic_meet_left(end) == 0)
            return epic_fail(EPIC_EINVAL, "address \"%.200s\" (tcp.address or MASTER_ADDR): %s",
                             tcp->address, gai_strerror(wrong));
        poll(NULL, 0, PAUSE_MS);
    }
}

/* A listening socket, or -1 and errno. */
static int listen_on(const struct addrinfo *address)
{
    const int one = 1;
    const int listener =
        socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0) return -1;
    (void)setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (address->ai_family == AF_INET6)
        (void)setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
    if (bind(listener, address->ai_addr, address->ai_addrlen) == 0 &&
        listen(listener, SOMAXCONN) == 0)
        return listener;
    const int wrong = errno;
    close(listener);
    errno = wrong;
    return -1;
}

/* The same, with patience while the port is taken. */
static int listen_patiently(const struct addrinfo *address, int64_t end)
{
    for (;;) {
        const int listener = listen_on(address);
        if (listener >= 0 || errno != EADDRINUSE || epic_meet_left(end) == 0) return listener;
        poll(NULL, 0, PAUSE_MS);
    }
}

static epic_result refuse_address(const epic_tcp *tcp, int wrong)
{
    if (wrong == EADDRNOTAVAIL || wrong == EAFNOSUPPORT)
        return epic_fail(EPIC_EINVAL,
                         "address \"%.200s\" (tcp.address or MASTER_ADDR) is not one of this "
                         "host's, and rank 0 must listen on it: name the host of rank 0",
                         tcp->address);
    if (wrong == EADDRINUSE)
        return epic_fail(
            EPIC_EDEVICE,
            "rank 0 cannot listen on %.200s, port %u: another program does.  Choose "
            "another port (tcp.port or MASTER_PORT)",
            tcp->address, tcp->port);
    return epic_fail(EPIC_EDEVICE, "rank 0 cannot listen on %.200s, port %u: %s", tcp->address,
                     tcp->port, strerror(wrong));
}

epic_result epic_tcp_listen(int listeners[TCP_MAX_LISTENERS], int *num_listeners,
                            const epic_tcp *tcp, int64_t end)
{
    struct addrinfo *addresses = NULL;
    int wrong = EADDRNOTAVAIL;
    const int64_t patience = epic_meet_now() + PORT_PATIENCE_MS;
    *num_listeners = 0;
    TRY(epic_tcp_resolve(&addresses, tcp, end));

    for (const struct addrinfo *at = addresses; at != NULL; at = at->ai_next) {
        if (*num_listeners == TCP_MAX_LISTENERS) break;
        const int listener = listen_patiently(at, patience < end ? patience : end);
        if (listener >= 0) {
            listeners[(*num_listeners)++] = listener;
        } else if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) {
            wrong = errno; /* ours, but refused: peers may come to just this one */
            while (*num_listeners > 0) close(listeners[--*num_listeners]);
            break;
        }
    }
    freeaddrinfo(addresses);
    return *num_listeners > 0 ? EPIC_OK : refuse_address(tcp, wrong);
}
