/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy thread of a rank. Kernels post *pieces*, ranges of words to send (put_batch.h),
 * into the *proxy ring* (kernels/cuda/net/net.cuh). The proxy thread reads the pieces, joins
 * them into puts (net/net.h) and passes the puts to the net. It reports to the kernels which
 * operations are completely sent and which ranks are dead. It also sends two state words to all
 * peers: the ranks that this rank waits for, and the failure that this rank has reported. The
 * net treats each rank as a host of its own, so `host` is a rank. */
#ifndef EPIC_HOSTS_PROXY_H
#define EPIC_HOSTS_PROXY_H

#include "backend/backend.h"
#include "backend/p2p/beats.h"
#include "backend/seat_set.h"
#include "cuda/common/cuda_kernels.h"
#include "net/liveness.h"
#include "net/net.h"

typedef struct hosts_proxy hosts_proxy;

/* Arguments of hosts_proxy_open(), which copies this struct. The objects to which it points
 * must stay valid until the proxy is closed. */
typedef struct hosts_proxy_setup {
    int32_t host, num_hosts;
    const net_engine *engine;
    net *net;
    net_liveness *liveness;
    const uint8_t *outbox;
    p2p_heap at;
    p2p_status *status;
    p2p_beats *beats;
    p2p_ring ring; /* the proxy ring, at the addresses that the CPU uses */
} hosts_proxy_setup;

/* Starts the proxy thread, which from then on is the only caller of the engine. Errors:
 * EPIC_ENOMEM, or EPIC_EDEVICE if the thread cannot be started. */
epic_result hosts_proxy_open(hosts_proxy **out, const hosts_proxy_setup *setup);

/* Sends `bytes` bytes from offset `at` of the outbox to the same offset of the inboxes of other
 * hosts: to all at the same time, and to each host after all earlier puts to it are done.
 * Returns when the bytes are sent, or after about MESSAGE_TIMEOUT_MS (proxy.c). Any thread may
 * call this function. Concurrent calls run one after the other. */
void hosts_proxy_send(hosts_proxy *proxy, const seat_set *hosts, uint64_t at, uint32_t bytes);

/* Wakes the proxy thread. Called when an operation starts, by any thread. */
void hosts_proxy_wake(hosts_proxy *proxy);

/* Sets counts[0] to the number of bytes posted so far, counts[1] to the number of puts, and
 * counts[2] to the number of pieces. Any thread may call this function. */
void hosts_proxy_counts(const hosts_proxy *proxy, uint64_t counts[3]);
/* Calls hosts_proxy_counts(). For tests and benchmarks that load libepic_hosts.so. */
EPIC_API void epic_backend_hosts_counts(const epic_group *group, uint64_t counts[3]);

/* Stops the proxy thread, waits until it has returned, and frees the proxy. Accepts NULL. */
void hosts_proxy_close(hosts_proxy *proxy);

#endif
