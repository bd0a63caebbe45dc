/* SPDX-License-Identifier: Apache-2.0 */
/* A network between hosts that delays and loses packets. It needs no netem, which some
 * systems lack. Each host is a network namespace with one interface, and a process of the
 * test holds the other end. That process receives every packet that a host sends and
 * forwards it later, or drops it. So the system's own TCP repeats lost packets. */
#ifndef RELAY_H
#define RELAY_H

#include <stdbool.h>
#include <stdint.h>

#define RELAY_MOST_HOSTS 80
#define RELAY_INTERFACE "net"

typedef struct relay_count { /* numbers of packets */
    uint64_t passed, lost;
} relay_count;

/* Becomes root in a new user namespace if this process is not root. Call it before any
 * thread starts. */
bool relay_become_root(void);

/* Makes num_hosts hosts and moves this process into the last one. Packets stay within these
 * hosts. Every packet takes delay_us; `losses` of a million packets are dropped. Returns
 * false, after printing the reason, if namespaces or interfaces cannot be made. Call it
 * before any thread starts. */
bool relay_open(int num_hosts, int delay_us, uint32_t losses);

/* Returns a descriptor of a host's namespace for setns(), valid until relay_close(), and the
 * file by which other processes find it. */
int relay_space(int host);
void relay_name(int host, char *to, int size);

relay_count relay_counted(void);
/* Returns whether packets were lost, or so few passed that none lost may be chance. */
bool relay_did_lose(relay_count counted, uint32_t losses);
void relay_close(void);

#endif
