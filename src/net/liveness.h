/* SPDX-License-Identifier: Apache-2.0 */
/* Liveness connections: one TCP connection between every two ranks that exchange rows. A
 * network library may never notice that a peer's host or process is gone, so these
 * connections run next to it.
 *
 * Each end sends one byte ten times a second and reads from the kernel (TCP_INFO) whether
 * the other end has acknowledged it. The kernel acknowledges bytes even if the process is
 * stopped or busy, so such a rank is never reported as dead. A process that ended, or a host
 * that cannot be reached, is reported within about one second.
 *
 * A forked child inherits the sockets and must call net_liveness_forget(). Until then the
 * end of its parent stays unnoticed. */
#ifndef EPIC_NET_LIVENESS_H
#define EPIC_NET_LIVENESS_H

#include "net/net.h"

#define NET_LIVENESS_HANDLE_BYTES 192

typedef struct net_liveness net_liveness;

/* Arguments of net_liveness_listen(). Copied. */
typedef struct net_liveness_setup {
    int32_t host, num_hosts;
    int32_t rail, ranks_per_host; /* errors print rank host * ranks_per_host + rail */
    uint32_t timeout_ms;          /* time limit of net_liveness_connect() */
    uint32_t silence_ms; /* a host is dead after this long without an acknowledgement; 0: 800 */
    uint64_t group_id;
    const char *interface; /* network interface to listen on; NULL: all that are up */
} net_liveness_setup;

/* Opens the listening socket and writes what the peers need to connect into `handle`
 * (NET_LIVENESS_HANDLE_BYTES bytes, zeroed by the caller). Local; does not wait for peers.
 * Errors: EPIC_ENOMEM, EPIC_EDEVICE. */
epic_result net_liveness_listen(net_liveness **out, const net_liveness_setup *setup,
                                void *handle);

/* Connects to every peer. Collective; `handles` holds the handles of all hosts, in host
 * order. Also starts the thread that sends and checks the bytes. Errors: EPIC_ETIMEOUT names
 * the ranks that could not be connected; EPIC_EDEVICE. */
epic_result net_liveness_connect(net_liveness *liveness, const void *handles);

/* CLOSED: the peer called net_liveness_close(). DEAD: its process ended without that, or its
 * host cannot be reached. */
typedef enum net_peer_state { NET_PEER_ALIVE, NET_PEER_CLOSED, NET_PEER_DEAD } net_peer_state;

/* Returns the state of a host; for this rank's own host always NET_PEER_ALIVE. Any thread
 * may call it. */
net_peer_state net_liveness_state(const net_liveness *liveness, int host);

/* Stops the thread, sends a close byte to every peer and frees everything. The peers then
 * see NET_PEER_CLOSED. NULL is allowed. */
void net_liveness_close(net_liveness *liveness);

/* For a forked child: closes its copies of the sockets and frees its memory. The peers
 * notice nothing. */
void net_liveness_forget(net_liveness *liveness);

#endif
