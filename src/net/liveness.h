/* SPDX-License-Identifier: Apache-2.0 */
/* Through liveness connections a rank detects that the process or the host of a peer is gone. A
 * network library such as UCX may never detect this, so a rank has these TCP connections in
 * addition.
 *
 * Hosts are numbered from 0. A group has the same number of ranks on every host. The index of a
 * rank on its host is its rail. The peers of a rank are the ranks with the same rail on all
 * other hosts, and the rank has one liveness connection to each peer. The backends `hosts` and
 * `p2p` treat every rank as a separate host, so in them all other ranks are peers.
 *
 * Each end sends one byte (a heartbeat) ten times a second, and reads from the operating system
 * (TCP_INFO) whether the peer's host has acknowledged the bytes. A host acknowledges bytes even
 * while the peer's process is suspended or busy, so such a process is never reported as dead.
 * If a process exits or a host cannot be reached, this is reported within about one second.
 *
 * A forked child inherits the sockets and must call net_liveness_forget(). Until the child has
 * called it, the connections stay open even if the parent exits, so peers do not notice that
 * the parent has exited. */
#ifndef EPIC_NET_LIVENESS_H
#define EPIC_NET_LIVENESS_H

#include "net/net.h"

#define NET_LIVENESS_HANDLE_BYTES 192

/* The liveness connections of one rank. The struct is in liveness_inner.h. */
typedef struct net_liveness net_liveness;

/* Arguments of net_liveness_listen(), which copies them. */
typedef struct net_liveness_setup {
    int32_t host, num_hosts; /* this rank's host, and the number of hosts */
    /* rail: this rank's rail, from 0 to ranks_per_host - 1. Error texts show the rank as host *
     * ranks_per_host + rail. */
    int32_t rail, ranks_per_host;
    uint32_t timeout_ms; /* time limit of net_liveness_connect() */
    /* a peer is dead if its host acknowledges nothing for this time; 0: use 800 ms */
    uint32_t silence_ms;
    uint64_t group_id;
    /* name of the network interface to which peers connect; NULL: any interface that is up */
    const char *interface;
    /* by host; true: no connection to the peer on that host is needed, and its state is always
     * NET_PEER_ALIVE. The peer is a rank of this process or, in backend p2p, of this host. */
    bool is_local[NET_MAX_HOSTS];
} net_liveness_setup;

/* Opens the listening socket. Writes to `handle` the data with which peers can connect. The
 * caller has zeroed the NET_LIVENESS_HANDLE_BYTES bytes of `handle`. Not collective. Errors:
 * EPIC_ENOMEM, and EPIC_EDEVICE if the system refuses a socket or random bytes, or if no
 * network interface has an address. */
epic_result net_liveness_listen(net_liveness **out, const net_liveness_setup *setup,
                                void *handle);

/* Connects to all peers, then starts the thread. `handles` [num_hosts,
 * NET_LIVENESS_HANDLE_BYTES] contains the handles of this rank and its peers, by host. All
 * these ranks must call this function. Errors: EPIC_ETIMEOUT if some peers are not connected
 * after timeout_ms (the error text lists them), EPIC_EDEVICE if the system refuses poll() or a
 * thread. */
epic_result net_liveness_connect(net_liveness *liveness, const void *handles);

/* State of a peer. NET_PEER_CLOSED means that the peer called net_liveness_close().
 * NET_PEER_DEAD means that the peer's process exited without this call, or that its host cannot
 * be reached. */
typedef enum net_peer_state { NET_PEER_ALIVE, NET_PEER_CLOSED, NET_PEER_DEAD } net_peer_state;

/* Returns the state of the peer on a host, and NET_PEER_ALIVE for this rank's own host. Any
 * thread may call this function. */
net_peer_state net_liveness_state(const net_liveness *liveness, int host);

/* Stops the thread, sends the close byte to every peer, and frees the connections. The peers'
 * net_liveness_state() then returns NET_PEER_CLOSED for this rank. Accepts NULL. */
void net_liveness_close(net_liveness *liveness);

/* For a forked child: closes the child's copies of the sockets and frees the child's copy of
 * the connections. Sends nothing, so the parent's connections continue. Accepts NULL. */
void net_liveness_forget(net_liveness *liveness);

#endif
