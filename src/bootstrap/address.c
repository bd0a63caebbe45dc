/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the socket addresses of a TCP bootstrap, and listens on them.
 *
 * Without a secret a bootstrap uses only loopback addresses, because anyone on the network
 * could connect to any other address. If tcp.address is another address of this host, a
 * loopback address is used instead. If tcp.address is the address of another host, the
 * bootstrap fails. */
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bootstrap/tcp.h"

#define PAUSE_MS 50
#define PORT_PATIENCE_MS 2000 /* time to retry while the port is in use */

static bool is_loopback(const struct sockaddr *at)
{
    if (at->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)at)->sin_addr.s_addr) >> 24 ==
               IN_LOOPBACKNET;
    return at->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)at)->sin6_addr);
}

static void set_port(struct sockaddr *at, uint32_t port)
{
    if (at->sa_family == AF_INET)
        ((struct sockaddr_in *)(void *)at)->sin_port = htons((uint16_t)port);
    if (at->sa_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)at)->sin6_port = htons((uint16_t)port);
}

static void add_endpoint(epic_endpoints *out, const struct sockaddr *at, socklen_t bytes)
{
    if (out->count == TCP_MAX_ENDPOINTS || bytes > sizeof out->at[0].address) return;
    for (int i = 0; i < out->count; i++)
        if (out->at[i].bytes == bytes && memcmp(&out->at[i].address, at, bytes) == 0) return;
    memcpy(&out->at[out->count].address, at, bytes);
    out->at[out->count++].bytes = bytes;
}

static void add_loopback(epic_endpoints *out, uint32_t port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    set_port((struct sockaddr *)&at, port);
    add_endpoint(out, (const struct sockaddr *)&at, sizeof at);
}

/* Adds the wildcard addresses, which stand for all IPv4 and IPv6 addresses of this host. */
static void add_any(epic_endpoints *out, uint32_t port)
{
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT};
    set_port((struct sockaddr *)&four, port);
    set_port((struct sockaddr *)&six, port);
    add_endpoint(out, (const struct sockaddr *)&four, sizeof four);
    add_endpoint(out, (const struct sockaddr *)&six, sizeof six);
}

/* Sets *own to true if `address` belongs to this host, that is, if a socket can be bound to the
 * address. */
static epic_result check_is_own(bool *own, const struct addrinfo *address)
{
    struct sockaddr_storage at = {0};
    *own = false;
    if (address->ai_addrlen > sizeof at) return EPIC_OK;
    memcpy(&at, address->ai_addr, address->ai_addrlen);
    set_port((struct sockaddr *)&at, 0);
    const int s = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s < 0 && errno == EAFNOSUPPORT) return EPIC_OK;
    if (s < 0) return epic_tcp_no_socket(errno);
    *own = bind(s, (const struct sockaddr *)&at, address->ai_addrlen) == 0;
    close(s);
    return EPIC_OK;
}

/* Returns true if `name` is the name of this host, with or without a domain. Callers need this
 * because Debian's /etc/hosts maps a host's own name to 127.0.1.1, while other hosts resolve
 * the name to a real address. */
static bool is_own_name(const char *name)
{
    char own[256] = "";
    if (gethostname(own, sizeof own - 1) != 0 || own[0] == '\0') return false;
    const size_t first = strcspn(own, ".");
    return strcasecmp(name, own) == 0 ||
           (strncasecmp(name, own, first) == 0 && (name[first] == '.' || name[first] == '\0') &&
            (own[first] == '\0' || name[first] == '\0'));
}

/* Chooses the endpoints from the addresses to which the name resolved. Without a secret, uses a
 * loopback address instead of each address of this host, and fails for an address of another
 * host. With a secret, if the name is the name of this host and resolves only to loopback
 * addresses, rank 0 listens on all addresses, because other hosts resolve the name to a real
 * address. */
static epic_result choose_endpoints(epic_endpoints *out, const struct addrinfo *addresses,
                                    const epic_tcp *tcp)
{
    bool all_loopback = true, foreign = false;
    for (const struct addrinfo *at = addresses; at != NULL; at = at->ai_next) {
        bool own = true;
        const bool loopback = is_loopback(at->ai_addr);
        all_loopback &= loopback;
        if (tcp->secret == NULL && !loopback) {
            TRY(check_is_own(&own, at));
            foreign |= !own;
            if (own) add_loopback(out, tcp->port);
        } else {
            add_endpoint(out, at->ai_addr, at->ai_addrlen);
        }
    }
    if (tcp->rank == 0 && tcp->secret != NULL && all_loopback && is_own_name(tcp->address)) {
        out->count = 0;
        add_any(out, tcp->port);
    }
    if (tcp->rank == 0 || out->count > 0 || !foreign) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "address \"%.128s\" (tcp.address or MASTER_ADDR) is another host's, and "
                     "rank %d has no secret: ranks on several hosts need one; set the "
                     "same EPIC_SECRET (tcp.secret) on all ranks",
                     tcp->address, tcp->rank);
}

epic_result epic_tcp_endpoints(epic_endpoints *out, const epic_tcp *tcp, time_limit *limit)
{
    struct addrinfo *addresses = NULL;
    *out = (epic_endpoints){0};
    TRY(epic_tcp_resolve(&addresses, tcp, limit));
    const epic_result result = choose_endpoints(out, addresses, tcp);
    freeaddrinfo(addresses);
    return result;
}

epic_result epic_tcp_no_socket(int wrong)
{
    const bool full = wrong == EMFILE || wrong == ENFILE;
    return epic_fail(EPIC_EDEVICE, "this rank cannot open a socket for the bootstrap: %s%s",
                     strerror(wrong),
                     full ? "; raise the limit on open files (ulimit -n)" : "");
}

/* Returns a listening socket. On failure returns -1 and sets errno. */
static int listen_on(const epic_endpoint *endpoint)
{
    const int one = 1;
    const int family = endpoint->address.ss_family;
    const int listener = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0) return -1;
    (void)setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (family == AF_INET6)
        (void)setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
    if (bind(listener, (const struct sockaddr *)&endpoint->address, endpoint->bytes) == 0 &&
        listen(listener, SOMAXCONN) == 0)
        return listener;
    const int wrong = errno;
    close(listener);
    errno = wrong;
    return -1;
}

/* Returns a listening socket. While the port is in use, tries again until the limit passes. On
 * failure returns -1 and sets errno. */
static int listen_patiently(const epic_endpoint *endpoint, time_limit *limit)
{
    for (;;) {
        const int listener = listen_on(endpoint);
        if (listener >= 0 || errno != EADDRINUSE || time_limit_look(limit) == 0)
            return listener;
        time_limit_nap(limit, PAUSE_MS);
    }
}

static bool is_not_here(int wrong)
{
    return wrong == EADDRNOTAVAIL || wrong == EAFNOSUPPORT;
}

static epic_result refuse_address(const epic_tcp *tcp, int wrong)
{
    if (is_not_here(wrong))
        return epic_fail(EPIC_EINVAL,
                         "address \"%.200s\" (tcp.address or MASTER_ADDR) is not one of this "
                         "host's, and rank 0 must listen on it: name the host of rank 0",
                         tcp->address);
    if (wrong == EADDRINUSE)
        return epic_fail(
            EPIC_EDEVICE,
            "rank 0 cannot listen on %.200s, port %u: another program does; choose "
            "another port (tcp.port or MASTER_PORT)",
            tcp->address, tcp->port);
    if (wrong == EMFILE || wrong == ENFILE) return epic_tcp_no_socket(wrong);
    return epic_fail(EPIC_EDEVICE, "rank 0 cannot listen on %.200s, port %u: %s", tcp->address,
                     tcp->port, strerror(wrong));
}

epic_result epic_tcp_listen(int listeners[TCP_MAX_ENDPOINTS], int *num_listeners,
                            const epic_tcp *tcp, time_limit *limit)
{
    epic_endpoints endpoints;
    int wrong = EADDRNOTAVAIL;
    *num_listeners = 0;
    TRY(epic_tcp_endpoints(&endpoints, tcp, limit));

    time_limit patience = time_limit_begin(PORT_PATIENCE_MS, limit);
    for (int i = 0; i < endpoints.count; i++) {
        const int listener = listen_patiently(&endpoints.at[i], &patience);
        if (listener >= 0) {
            listeners[(*num_listeners)++] = listener;
        } else if (!is_not_here(errno)) {
            /* close all listeners if one endpoint fails, because a peer may try to connect only
             * to this endpoint */
            wrong = errno;
            while (*num_listeners > 0) close(listeners[--*num_listeners]);
            break;
        }
    }
    return *num_listeners > 0 ? EPIC_OK : refuse_address(tcp, wrong);
}
