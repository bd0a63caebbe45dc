/* SPDX-License-Identifier: Apache-2.0 */
/* Lines: a TCP connection between every two ranks of a rail, made beside the net, which may never
 * notice that a host or a network has gone.  Each end sends a byte ten times a second, and the
 * system at the other end acknowledges it, whatever the process does there: a rank that is stopped
 * or busy is never called dead, a process that has ended or a host that cannot be reached is,
 * within a second.  A process that was forked meanwhile holds its lines, too: it gives them back
 * with net_liveness_forget, and while it does not, the end of the first process goes unnoticed. */
#ifndef EPIC_NET_LIVENESS_H
#define EPIC_NET_LIVENESS_H

#include "net/net.h"

#define NET_LIVENESS_HANDLE_BYTES 192

typedef struct net_liveness net_liveness;

typedef struct net_liveness_setup {
    int32_t host, num_hosts;
    int32_t rail, ranks_per_host; /* sentences name rank host * ranks_per_host + rail */
    uint32_t timeout_ms;          /* of connect */
    uint32_t silence_ms;          /* after which a host is gone; 0: 800 */
    uint64_t group_id;
    const char *interface; /* through which others reach this host; NULL: any that is up */
} net_liveness_setup;

/* Local.  What the others must know goes to `card` (NET_LIVENESS_HANDLE_BYTES, zeroed). */
epic_result net_liveness_listen(net_liveness **out, const net_liveness_setup *setup,
                                void *handle);

/* Cards of all hosts.  Collective: EPIC_ETIMEOUT names the ranks that did not come. */
epic_result net_liveness_connect(net_liveness *lines, const void *handles);

typedef enum net_peer_state { NET_PEER_ALIVE, NET_PEER_CLOSED, NET_PEER_DEAD } net_peer_state;

/* Of one's own host: NET_PEER_ALIVE.  Any thread. */
net_peer_state net_liveness_state(const net_liveness *lines, int host);

/* NULL is allowed.  The others see NET_PEER_CLOSED. */
void net_liveness_close(net_liveness *lines);

/* In a forked child: closes its copies, of which the others see nothing. */
void net_liveness_forget(net_liveness *lines);

#endif
