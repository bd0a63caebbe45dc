/* SPDX-License-Identifier: Apache-2.0 */
/* What making lines and listening to them share. */
#ifndef EPIC_NET_LINES_INNER_H
#define EPIC_NET_LINES_INNER_H

#include <pthread.h>

#include "net/lines.h"

#define LINE_ADDRESSES 8

/* Addresses as IPv6 has them, IPv4's as ::ffff:a.b.c.d. */
typedef struct line_address {
    uint8_t bytes[16];
} line_address;

typedef struct line_card {
    uint64_t secret[2]; /* proves that a caller was at the bootstrap */
    uint32_t num_addresses;
    uint32_t port;
    line_address addresses[LINE_ADDRESSES];
} line_card;
_Static_assert(sizeof(line_card) <= NET_LINES_CARD_BYTES,
               "a card is what the bootstrap carries");

struct net_lines {
    net_lines_setup setup;
    line_card card;                  /* our own */
    int listener;                    /* -1: none */
    int sockets[NET_MAX_HOSTS];      /* -1: none */
    int state[NET_MAX_HOSTS];        /* net_line; written by the thread alone */
    int64_t asked_ms[NET_MAX_HOSTS]; /* the first beat that may lack its acknowledgement */
    int end;                         /* an eventfd: the thread leaves; -1: there is none */
    pthread_t thread;
};

static inline int line_rank(const net_lines *l, int host)
{
    return host * l->setup.ranks_per_host + l->setup.rail;
}

/* Addresses of this host's interfaces that are up, those that leave the host first.  Returns how
 * many. */
int line_addresses(line_address out[LINE_ADDRESSES], const char *interface);

/* A listening socket on any address, and its port; -1 and errno. */
int line_listen(uint32_t *port);

/* A socket that is being connected, or is; -1 and errno. */
int line_call(const line_address *address, uint32_t port);

void line_hang_up(int *socket);

/* Every socket is there: begins to beat. */
epic_result line_start(net_lines *lines);

#endif
