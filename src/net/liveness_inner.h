/* SPDX-License-Identifier: Apache-2.0 */
/* What making lines and listening to them share. */
#ifndef EPIC_NET_LIVENESS_INNER_H
#define EPIC_NET_LIVENESS_INNER_H

#include <pthread.h>

#include "net/liveness.h"

#define LIVENESS_MAX_ADDRESSES 8

/* Addresses as IPv6 has them, IPv4's as ::ffff:a.b.c.d. */
typedef struct liveness_address {
    uint8_t bytes[16];
} liveness_address;

typedef struct liveness_handle {
    uint64_t secret[2]; /* proves that a caller was at the bootstrap */
    uint32_t num_addresses;
    uint32_t port;
    liveness_address addresses[LIVENESS_MAX_ADDRESSES];
} liveness_handle;
_Static_assert(sizeof(liveness_handle) <= NET_LIVENESS_HANDLE_BYTES,
               "a card is what the bootstrap carries");

struct net_liveness {
    net_liveness_setup setup;
    liveness_handle handle;          /* our own */
    int listener;                    /* -1: none */
    int sockets[NET_MAX_HOSTS];      /* -1: none */
    int state[NET_MAX_HOSTS];        /* net_peer_state; written by the thread alone */
    int64_t acked_ms[NET_MAX_HOSTS]; /* the first beat that may lack its acknowledgement */
    int stop_event;                  /* an eventfd: the thread leaves; -1: there is none */
    pthread_t thread;
};

static inline int liveness_rank_of(const net_liveness *l, int host)
{
    return host * l->setup.ranks_per_host + l->setup.rail;
}

/* Addresses of this host's interfaces that are up, those that leave the host first.  Returns how
 * many. */
int liveness_find_addresses(liveness_address out[LIVENESS_MAX_ADDRESSES],
                            const char *interface);

/* A listening socket on any address, and its port; -1 and errno. */
int liveness_open_listener(uint32_t *port);

/* A socket that is being connected, or is; -1 and errno. */
int liveness_begin_connect(const liveness_address *address, uint32_t port);

void liveness_close_socket(int *socket);

/* Every socket is there: begins to beat. */
epic_result liveness_start_thread(net_liveness *lines);

#endif
