/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files that make liveness connections (liveness_connect.c, address.c) and the
 * file that watches them (liveness.c). */
#ifndef EPIC_NET_LIVENESS_INNER_H
#define EPIC_NET_LIVENESS_INNER_H

#include <pthread.h>

#include "net/liveness.h"

#define LIVENESS_MAX_ADDRESSES 8

/* An IPv6 address; an IPv4 address is stored as ::ffff:a.b.c.d. */
typedef struct liveness_address {
    uint8_t bytes[16];
} liveness_address;

/* The content of a handle, as one rank publishes it through the bootstrap. */
typedef struct liveness_handle {
    uint64_t secret[2]; /* a peer that knows it took part in the bootstrap */
    uint32_t num_addresses;
    uint32_t port;
    liveness_address addresses[LIVENESS_MAX_ADDRESSES];
} liveness_handle;
_Static_assert(sizeof(liveness_handle) <= NET_LIVENESS_HANDLE_BYTES,
               "a card is what the bootstrap carries");

/* The liveness connections of one rank. */
struct net_liveness {
    net_liveness_setup setup;
    liveness_handle handle;     /* this rank's own */
    int listener;               /* -1 once all peers are connected */
    int sockets[NET_MAX_HOSTS]; /* -1: not connected, or this rank's own */
    int state[NET_MAX_HOSTS];   /* net_peer_state; only the thread writes it */
    /* clock_ms() up to which the peer has acknowledged all bytes */
    int64_t acked_ms[NET_MAX_HOSTS];
    int stop_event; /* an eventfd that ends the thread; -1: no thread runs */
    pthread_t thread;
};

/* Returns the rank that this rank talks to on that host. */
static inline int liveness_rank_of(const net_liveness *l, int host)
{
    return host * l->setup.ranks_per_host + l->setup.rail;
}

/* Writes the addresses of this host's interfaces that are up, loopback last, and returns
 * their number. `interface`: only addresses of that interface; NULL: of all. */
int liveness_find_addresses(liveness_address out[LIVENESS_MAX_ADDRESSES],
                            const char *interface);

/* Opens a listening socket on any address and a free port, IPv6 if the system has it.
 * Returns the socket, or -1 with errno. */
int liveness_open_listener(uint32_t *port);

/* Opens a socket and begins to connect it without blocking. Returns the socket, or -1 with
 * errno. */
int liveness_begin_connect(const liveness_address *address, uint32_t port);

/* Closes the socket, if it is open, and sets it to -1. */
void liveness_close_socket(int *socket);

/* Starts the thread that sends and checks the bytes. Every socket is connected. */
epic_result liveness_start_thread(net_liveness *liveness);

#endif
