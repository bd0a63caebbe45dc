/* SPDX-License-Identifier: Apache-2.0 */
/* How a TCP bootstrap begins: rank 0 listens and accepts, the others connect.  Afterwards rank 0
 * has a link to every other rank, and they have one to rank 0.
 *
 * `tcp` is checked and has every default filled in; `limit` is that of the whole
 * bootstrap. */
#ifndef EPIC_TCP_H
#define EPIC_TCP_H

#include <netdb.h>
#include <sys/socket.h>

#include "bootstrap/link.h"

#define TCP_MAX_ENDPOINTS 8

typedef struct epic_endpoint {
    struct sockaddr_storage address;
    socklen_t bytes;
} epic_endpoint;

typedef struct epic_endpoints {
    epic_endpoint at[TCP_MAX_ENDPOINTS];
    int count;
} epic_endpoints;

/* The addresses that tcp->address stands for; freeaddrinfo them.  Errors: EPIC_EINVAL,
 * EPIC_ETIMEOUT (no name server answered), EPIC_EDEVICE. */
epic_result epic_tcp_resolve(struct addrinfo **out, const epic_tcp *tcp, time_limit *limit);

/* Where to listen, or to connect to: those, or loopback in place of this host's where there is no
 * secret.  Errors: as above; EPIC_EINVAL also where another host would take a secret. */
epic_result epic_tcp_endpoints(epic_endpoints *out, const epic_tcp *tcp, time_limit *limit);

/* Listens on those of them that are this host's.  Errors: EPIC_EINVAL (none is), EPIC_EDEVICE
 * (the port is taken). */
epic_result epic_tcp_listen(int listeners[TCP_MAX_ENDPOINTS], int *num_listeners,
                            const epic_tcp *tcp, time_limit *limit);

/* Rank 0.  links[r], for r from 1 to num_ranks - 1, come out connected; on failure every rank
 * that came was told why, and nothing is left open. */
epic_result epic_tcp_accept(epic_link *links, const epic_tcp *tcp, const epic_secret *secret,
                            time_limit *limit);

/* The other ranks. */
epic_result epic_tcp_connect(epic_link *out, const epic_tcp *tcp, const epic_secret *secret,
                             time_limit *limit);

/* Shortens rank 0's limit so that its answer reaches a peer in time, which has said that it waits
 * for left_ms milliseconds more. */
void epic_tcp_answer_earlier(time_limit *limit, uint32_t left_ms);

/* What a rank says that got no socket of its own: EPIC_EDEVICE. */
epic_result epic_tcp_no_socket(int wrong);

#endif
