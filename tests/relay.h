/* SPDX-License-Identifier: Apache-2.0 */
/* A network between hosts that delays and loses packets, without netem, which not every system has:
 * each host is a namespace with one interface, whose other end a process of the test holds.  What a
 * host sends comes to that process as packets; it hands them on later, or not at all.  So TCP is the
 * system's own, and repeats what is lost. */
#ifndef RELAY_H
#define RELAY_H

#include <stdbool.h>
#include <stdint.h>

#define RELAY_MOST_HOSTS 80
#define RELAY_INTERFACE "net"

typedef struct relay_count { /* of packets */
    uint64_t passed, lost;
} relay_count;

/* Who is not root may be so in a namespace of users.  Before any thread. */
bool relay_become_root(void);

/* Before any thread.  Makes num_hosts hosts, and this process the last of them; nothing leaves them.
 * Every packet is `delay_us` on its way; of a million `losses` do not come.  False, and why not is
 * told: namespaces or such interfaces may not be made here. */
bool relay_open(int num_hosts, int delay_us, uint32_t losses);

/* What setns() takes to get to a host: a descriptor of this process, until relay_close; and the file
 * by which other processes find it. */
int relay_space(int host);
void relay_name(int host, char *to, int size);

relay_count relay_counted(void);
/* Packets were lost, or so few passed that this may be chance. */
bool relay_did_lose(relay_count counted, uint32_t losses);
void relay_close(void);

#endif
