/* SPDX-License-Identifier: Apache-2.0 */
/* The steps that open a TCP bootstrap: rank 0 listens and accepts, the other ranks connect.
 * After that, rank 0 has a link to every other rank, and every other rank has a link to rank 0.
 *
 * All functions require that `tcp` was checked and its defaults are filled in. `limit` is the
 * time limit of the whole bootstrap. */
#ifndef EPIC_TCP_H
#define EPIC_TCP_H

#include <netdb.h>
#include <sys/socket.h>

#include "bootstrap/link.h"

#define TCP_MAX_ENDPOINTS 8

/* A socket address to listen on or to connect to. */
typedef struct epic_endpoint {
    struct sockaddr_storage address;
    socklen_t bytes;
} epic_endpoint;

typedef struct epic_endpoints {
    epic_endpoint at[TCP_MAX_ENDPOINTS];
    int count;
} epic_endpoints;

/* Resolves tcp->address. The caller frees *out with freeaddrinfo(). Errors: EPIC_EINVAL,
 * EPIC_ETIMEOUT (no name server answered), EPIC_EDEVICE (no descriptor), EPIC_ENOMEM. */
epic_result epic_tcp_resolve(struct addrinfo **out, const epic_tcp *tcp, time_limit *limit);

/* Finds the endpoints to listen on (rank 0) or to connect to (other ranks). Without a secret,
 * uses loopback addresses instead of other addresses of this host. Errors: those of
 * epic_tcp_resolve(), and EPIC_EINVAL if the address belongs to another host and there is no
 * secret. */
epic_result epic_tcp_endpoints(epic_endpoints *out, const epic_tcp *tcp, time_limit *limit);

/* Opens a listener on each endpoint whose address belongs to this host. Errors: EPIC_EINVAL (no
 * endpoint belongs to this host), EPIC_EDEVICE (the port is in use). */
epic_result epic_tcp_listen(int listeners[TCP_MAX_ENDPOINTS], int *num_listeners,
                            const epic_tcp *tcp, time_limit *limit);

/* Called on rank 0: accepts all other ranks. Waits until all have joined, or until the limit
 * passes. On success links[r] is connected for r from 1 to num_ranks - 1. On failure every rank
 * that has connected receives the reason, and no link stays open. */
epic_result epic_tcp_accept(epic_link *links, const epic_tcp *tcp, const epic_secret *secret,
                            time_limit *limit);

/* Connects a rank other than 0 to rank 0. Waits until all ranks have joined, or until the limit
 * passes. On success *out is the link to rank 0. */
epic_result epic_tcp_connect(epic_link *out, const epic_tcp *tcp, const epic_secret *secret,
                             time_limit *limit);

/* Called on rank 0 for a peer whose time limit passes in left_ms milliseconds. Shortens rank
 * 0's time limit, so that the answer or error of rank 0 still reaches the peer. */
void epic_tcp_answer_earlier(time_limit *limit, uint32_t left_ms);

/* Returns EPIC_EDEVICE, and stores the error text that this rank cannot open a socket. `wrong`
 * is the errno. */
epic_result epic_tcp_no_socket(int wrong);

#endif
