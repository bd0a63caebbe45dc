/* SPDX-License-Identifier: Apache-2.0 */
/* Types and functions that the files of the liveness connections share. liveness_connect.c and
 * address.c make the connections, and liveness.c watches them. liveness.h explains words such
 * as peer and rail. */
#ifndef EPIC_NET_LIVENESS_INNER_H
#define EPIC_NET_LIVENESS_INNER_H

#include <pthread.h>

#include "net/liveness.h"

#define LIVENESS_MAX_ADDRESSES 8

/* An IPv6 address, or an IPv4 address in the form ::ffff:a.b.c.d. */
typedef struct liveness_address {
    uint8_t bytes[16];
} liveness_address;

/* Contents of a handle, which a rank publishes through the bootstrap. */
typedef struct liveness_handle {
    /* random; a connecting peer sends it to prove that it has read this handle */
    uint64_t secret[2];
    uint32_t num_addresses;
    uint32_t port;
    liveness_address addresses[LIVENESS_MAX_ADDRESSES];
} liveness_handle;
_Static_assert(sizeof(liveness_handle) <= NET_LIVENESS_HANDLE_BYTES,
               "a handle must fit into the bytes that the bootstrap carries");

struct net_liveness {
    net_liveness_setup setup;
    liveness_handle handle;
    int listener;               /* listening socket; -1 once all peers are connected */
    int sockets[NET_MAX_HOSTS]; /* by host; -1: not connected, or this rank's own host */
    int state[NET_MAX_HOSTS];   /* a net_peer_state by host; only the thread writes it */
    /* By host: time in ms of the last check that found all bytes acknowledged. If this process
     * was suspended after that check, the duration of the suspension is added, so that it does
     * not count as silence (liveness.c). */
    int64_t acked_ms[NET_MAX_HOSTS];
    int stop_event; /* eventfd: a write to it stops the thread; -1: no thread runs */
    pthread_t thread;
};

static inline int liveness_rank_of(const net_liveness *l, int host)
{
    return host * l->setup.ranks_per_host + l->setup.rail;
}

/* Writes to `out` the addresses of those network interfaces of this host that are up, loopback
 * addresses last. `interface` is the name of the only interface to use, or NULL to use all.
 * Returns the number of addresses. */
int liveness_find_addresses(liveness_address out[LIVENESS_MAX_ADDRESSES],
                            const char *interface);

/* Opens a listening socket on all addresses of this host and a free port. The socket accepts
 * IPv4, and also IPv6 if the system supports it. Writes the port to *port. Returns the socket,
 * or -1 with errno set. */
int liveness_open_listener(uint32_t *port);

/* Starts to connect a new socket, without blocking. Returns it, or -1 with errno set. */
int liveness_begin_connect(const liveness_address *address, uint32_t port);

void liveness_close_socket(int *socket);

/* Starts the thread that sends bytes to the peers and checks their acknowledgements. All
 * sockets must be connected. Errors: EPIC_EDEVICE if the system refuses a thread. */
epic_result liveness_start_thread(net_liveness *liveness);

#endif
