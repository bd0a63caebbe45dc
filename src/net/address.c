/* SPDX-License-Identifier: Apache-2.0 */
/* The addresses by which other hosts reach this one, and sockets. */
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "net/lines_inner.h"

#define CALLERS 128 /* that may wait to be heard, strangers too */
#define KIND (SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK)

void line_hang_up(int *socket)
{
    if (*socket >= 0) close(*socket);
    *socket = -1;
}

/* False: not an address that another host can call. */
static bool read_address(const struct sockaddr *from, line_address *out)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (from && from->sa_family == AF_INET) {
        memcpy(out->bytes, mapped, sizeof mapped);
        memcpy(out->bytes + 12, &((const struct sockaddr_in *)(const void *)from)->sin_addr, 4);
        return true;
    }
    if (!from || from->sa_family != AF_INET6) return false;
    const struct in6_addr *six = &((const struct sockaddr_in6 *)(const void *)from)->sin6_addr;
    memcpy(out->bytes, six, 16);
    return !IN6_IS_ADDR_LINKLOCAL(six);
}

int line_addresses(line_address out[LINE_ADDRESSES], const char *interface)
{
    struct ifaddrs *all;
    int count = 0;
    if (getifaddrs(&all) != 0) return 0;
    for (int loopback = 0; loopback < 2; loopback++)
        for (struct ifaddrs *i = all; i && count < LINE_ADDRESSES; i = i->ifa_next) {
            const bool local = i->ifa_flags & IFF_LOOPBACK;
            if (!(i->ifa_flags & IFF_UP) || local != (loopback == 1)) continue;
            if (interface && strcmp(interface, i->ifa_name) != 0) continue;
            count += read_address(i->ifa_addr, &out[count]);
        }
    freeifaddrs(all);
    return count;
}

static bool is_four(const line_address *a)
{
    return IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)(const void *)a->bytes);
}

static socklen_t address_of(const line_address *a, uint32_t port, struct sockaddr_storage *out)
{
    memset(out, 0, sizeof *out);
    if (is_four(a)) {
        struct sockaddr_in *four = (struct sockaddr_in *)(void *)out;
        four->sin_family = AF_INET;
        four->sin_port = htons((uint16_t)port);
        memcpy(&four->sin_addr, a->bytes + 12, 4);
        return sizeof *four;
    }
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)(void *)out;
    six->sin6_family = AF_INET6;
    six->sin6_port = htons((uint16_t)port);
    memcpy(&six->sin6_addr, a->bytes, 16);
    return sizeof *six;
}

static int listen_on(const line_address *any, uint32_t *port)
{
    struct sockaddr_storage at;
    socklen_t bytes = address_of(any, 0, &at);
    int fd = socket(at.ss_family, KIND, 0);
    if (fd < 0) return -1;
    if (at.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &(int){0}, sizeof(int));
    if (bind(fd, (struct sockaddr *)&at, bytes) != 0 || listen(fd, CALLERS) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &bytes) != 0) {
        const int error = errno;
        line_hang_up(&fd);
        errno = error;
        return -1;
    }
    *port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)(void *)&at)->sin6_port
                                           : ((struct sockaddr_in *)(void *)&at)->sin_port);
    return fd;
}

int line_listen(uint32_t *port)
{
    const line_address six = {{0}}, four = {{[10] = 0xff, [11] = 0xff}};
    const int fd = listen_on(&six, port);
    return fd >= 0 ? fd : listen_on(&four, port); /* a system without IPv6 */
}

int line_call(const line_address *address, uint32_t port)
{
    struct sockaddr_storage at;
    const socklen_t bytes = address_of(address, port, &at);
    int fd = socket(at.ss_family, KIND, 0);
    if (fd < 0) return -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    if (connect(fd, (struct sockaddr *)&at, bytes) == 0 || errno == EINPROGRESS) return fd;
    const int error = errno;
    line_hang_up(&fd);
    errno = error;
    return -1;
}
