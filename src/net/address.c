/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the addresses of this host to which other hosts can connect, and opens sockets.
 * liveness_connect.c uses these functions. */
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "net/liveness_inner.h"

/* maximum number of pending connections, including those of other programs */
#define LISTEN_BACKLOG 128
#define SOCKET_TYPE (SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK)

void liveness_close_socket(int *socket)
{
    if (*socket >= 0) close(*socket);
    *socket = -1;
}

/* Copies an IPv4 or IPv6 address to *out. Returns false for other kinds of addresses, and for
 * link-local IPv6 addresses, because other hosts can connect to these only with the name of an
 * interface. */
static bool read_address(const struct sockaddr *from, liveness_address *out)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (from && from->sa_family == AF_INET) {
        memcpy(out->bytes, mapped, sizeof mapped);
        memcpy(out->bytes + 12, &((const struct sockaddr_in *)(const void *)from)->sin_addr, 4);
        return true;
    }
    if (!from || from->sa_family != AF_INET6) return false;
    const struct in6_addr *ipv6 = &((const struct sockaddr_in6 *)(const void *)from)->sin6_addr;
    memcpy(out->bytes, ipv6, 16);
    return !IN6_IS_ADDR_LINKLOCAL(ipv6);
}

int liveness_find_addresses(liveness_address out[LIVENESS_MAX_ADDRESSES], const char *interface)
{
    struct ifaddrs *all;
    int count = 0;
    if (getifaddrs(&all) != 0) return 0;
    for (int loopback = 0; loopback < 2; loopback++)
        for (struct ifaddrs *i = all; i && count < LIVENESS_MAX_ADDRESSES; i = i->ifa_next) {
            const bool local = i->ifa_flags & IFF_LOOPBACK;
            if (!(i->ifa_flags & IFF_UP) || local != (loopback == 1)) continue;
            if (interface && strcmp(interface, i->ifa_name) != 0) continue;
            count += read_address(i->ifa_addr, &out[count]);
        }
    freeifaddrs(all);
    return count;
}

/* Returns true if the address is an IPv4 address in IPv6 form (IPv4-mapped). */
static bool is_ipv4(const liveness_address *a)
{
    return IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)(const void *)a->bytes);
}

static socklen_t socket_address(const liveness_address *a, uint32_t port,
                                struct sockaddr_storage *out)
{
    memset(out, 0, sizeof *out);
    if (is_ipv4(a)) {
        struct sockaddr_in *ipv4 = (struct sockaddr_in *)(void *)out;
        ipv4->sin_family = AF_INET;
        ipv4->sin_port = htons((uint16_t)port);
        memcpy(&ipv4->sin_addr, a->bytes + 12, 4);
        return sizeof *ipv4;
    }
    struct sockaddr_in6 *ipv6 = (struct sockaddr_in6 *)(void *)out;
    ipv6->sin6_family = AF_INET6;
    ipv6->sin6_port = htons((uint16_t)port);
    memcpy(&ipv6->sin6_addr, a->bytes, 16);
    return sizeof *ipv6;
}

/* Opens a listening socket on a free port. `any` is the wildcard address of IPv4 or IPv6.
 * Writes the port to *port. Returns the socket, or -1 with errno set. */
static int listen_on(const liveness_address *any, uint32_t *port)
{
    struct sockaddr_storage at;
    socklen_t bytes = socket_address(any, 0, &at);
    int fd = socket(at.ss_family, SOCKET_TYPE, 0);
    if (fd < 0) return -1;
    if (at.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &(int){0}, sizeof(int));
    if (bind(fd, (struct sockaddr *)&at, bytes) != 0 || listen(fd, LISTEN_BACKLOG) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &bytes) != 0) {
        const int error = errno;
        liveness_close_socket(&fd);
        errno = error;
        return -1;
    }
    *port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)(void *)&at)->sin6_port
                                           : ((struct sockaddr_in *)(void *)&at)->sin_port);
    return fd;
}

int liveness_open_listener(uint32_t *port)
{
    const liveness_address ipv6 = {{0}}, ipv4 = {{[10] = 0xff, [11] = 0xff}};
    const int fd = listen_on(&ipv6, port);
    return fd >= 0 ? fd : listen_on(&ipv4, port); /* IPv4 if the system has no IPv6 */
}

int liveness_begin_connect(const liveness_address *address, uint32_t port)
{
    struct sockaddr_storage at;
    const socklen_t bytes = socket_address(address, port, &at);
    int fd = socket(at.ss_family, SOCKET_TYPE, 0);
    if (fd < 0) return -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    if (connect(fd, (struct sockaddr *)&at, bytes) == 0 || errno == EINPROGRESS) return fd;
    const int error = errno;
    liveness_close_socket(&fd);
    errno = error;
    return -1;
}
