/* SPDX-License-Identifier: Apache-2.0 */
/* How a TCP meeting begins: rank 0 listens and accepts, the others connect.  Afterwards rank 0
 * has a socket for every other rank, and they have one for rank 0.
 *
 * `tcp` is checked and has every default filled in; `end` is the deadline. */
#ifndef EPIC_TCP_H
#define EPIC_TCP_H

#include <netdb.h>

#include "meet/secret.h"

#define TCP_MAX_LISTENERS 8

/* The addresses that tcp->address stands for; freeaddrinfo them.  Errors: EPIC_EINVAL. */
epic_result epic_tcp_resolve(struct addrinfo **out, const epic_tcp *tcp, int64_t end);

/* Listens on those of them that are this host's.  Errors: EPIC_EINVAL (none is), EPIC_EDEVICE
 * (the port is taken). */
epic_result epic_tcp_listen(int listeners[TCP_MAX_LISTENERS], int *num_listeners,
                            const epic_tcp *tcp, int64_t end);

/* Rank 0.  sockets[r], for r from 1 to num_ranks - 1, come out connected; on failure every rank
 * that came was told why, and nothing is left open. */
epic_result epic_tcp_accept(int *sockets, const epic_tcp *tcp, const epic_secret *secret,
                            int64_t end);

/* The other ranks. */
epic_result epic_tcp_connect(int *out, const epic_tcp *tcp, const epic_secret *secret,
                             int64_t end);

/* How long a rank that rank 0 has let in waits past its deadline: rank 0, who knows the missing
 * ranks, answers at the earliest deadline of all, and the answer is on its way. */
int64_t epic_tcp_grace(uint32_t timeout_ms);

/* When rank 0 answers at the latest, given what a peer said is left until its deadline. */
int64_t epic_tcp_earlier(int64_t end, uint32_t left_ms);

#endif
