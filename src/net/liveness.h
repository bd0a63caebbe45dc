/* SPDX-License-Identifier: Apache-2.0 */
/* Liveness connections: one TCP connection between every two ranks that exchange rows over the
 * net. They exist next to the network library, because such a library may never notice that a
 * peer's host or process is gone.
 *
 * Each end sends one byte ten times a second. It asks its own kernel (TCP_INFO) whether the
 * other end's kernel has acknowledged the bytes. A kernel acknowledges bytes even while the
 * process is stopped or busy, so such a process is never reported as dead. The end of a
 * process, or a host that cannot be reached, is reported within about one second.
 *
 * A forked child inherits the sockets and must call net_liveness_forget(). Until it does, the
 * connections stay open, and peers cannot see the end of its parent. */
#ifndef EPIC_NET_LIVENESS_H
#define EPIC_NET_LIVENESS_H

#include "net/net.h"

#define NET_LIVENESS_HANDLE_BYTES 192 /* size of a handle */

/* The liveness connections of one rank (opaque). */
typedef struct net_liveness net_liveness;

/* Arguments of net_liveness_listen(), which copies them. */
typedef struct net_liveness_setup {
    int32_t host, num_hosts; /* this rank's host, and the number of hosts */
    /* rail: position of this rank on its host. In errors the number of a rank is host *
     * ranks_per_host + rail. */
    int32_t rail, ranks_per_host;
    uint32_t timeout_ms; /* time limit of net_liveness_connect() */
    uint32_t silence_ms; /* a host that acknowledges nothing for this long is dead; 0: 800 */
    uint64_t group_id;
    const char *interface; /* listen on this network interface; NULL: on all that are up */
} net_liveness_setup;

/* Opens the listening socket, and writes to `handle` the data that peers need to connect. The
 * handle has NET_LIVENESS_HANDLE_BYTES bytes, which the caller has zeroed. Local: does not wait
 * for peers. Errors: EPIC_ENOMEM, EPIC_EDEVICE. */
epic_result net_liveness_listen(net_liveness **out, const net_liveness_setup *setup,
                                void *handle);

/* Connects to all peers, then starts the thread that sends and checks the bytes. `handles`
 * holds the handles of all hosts, in the order of hosts. Collective. Errors: EPIC_ETIMEOUT
 * names the ranks that could not be connected; EPIC_EDEVICE. */
epic_result net_liveness_connect(net_liveness *liveness, const void *handles);

/* State of a peer. CLOSED: the peer called net_liveness_close(). DEAD: its process ended
 * without this call, or its host cannot be reached. */
typedef enum net_peer_state { NET_PEER_ALIVE, NET_PEER_CLOSED, NET_PEER_DEAD } net_peer_state;

/* Returns the state of the peer on a host. For this rank's own host it is always
 * NET_PEER_ALIVE. Any thread may call it. */
net_peer_state net_liveness_state(const net_liveness *liveness, int host);

/* Stops the thread, sends a close byte to every peer and frees everything. The peers then
 * report NET_PEER_CLOSED. Accepts NULL. */
void net_liveness_close(net_liveness *liveness);

/* For a forked child: closes its copies of the sockets and frees its memory. Sends nothing, so
 * the peers' connections to the parent continue. Accepts NULL. */
void net_liveness_forget(net_liveness *liveness);

#endif
