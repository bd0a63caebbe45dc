/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy thread of a rank. It passes what kernels have posted (kernels/cuda/net/net.cuh) to
 * the net, reports to the kernels what the net has read and which ranks are dead, and sends
 * this rank's state to the peers. */
#ifndef EPIC_HOSTS_PROXY_H
#define EPIC_HOSTS_PROXY_H

#include "backend/backend.h"
#include "backend/p2p/beats.h"
#include "cuda/common/cuda_kernels.h"
#include "net/liveness.h"
#include "net/net.h"

typedef struct hosts_proxy hosts_proxy;

typedef struct hosts_proxy_setup { /* must stay valid until the proxy is closed */
    int32_t host, num_hosts;
    const net_engine *engine;
    net *net;
    net_liveness *liveness;
    const uint8_t *outbox;
    p2p_heap at;
    p2p_status *status;
    p2p_beats *beats;
    p2p_ring ring; /* its addresses on the host */
} hosts_proxy_setup;

/* Starts the thread. Errors: EPIC_ENOMEM; EPIC_EDEVICE: no thread. */
epic_result hosts_proxy_open(hosts_proxy **out, const hosts_proxy_setup *setup);

/* Sends bytes of the outbox to the same offset of a host's heap, after everything posted for
 * that host before. Returns when the net has read them, or after MESSAGE_TIMEOUT_MS. Any
 * thread; one call at a time. */
void hosts_proxy_send(hosts_proxy *proxy, int host, uint64_t at, uint32_t bytes);

/* Ends the sleep of the thread because a call has been made. Any thread. */
void hosts_proxy_wake(hosts_proxy *proxy);

/* Writes bytes, puts and pieces (entries of the ring) that kernels have sent so far. Any
 * thread. */
void hosts_proxy_counts(const hosts_proxy *proxy, uint64_t counts[3]);
/* Like hosts_proxy_counts(), for tests and benchmarks that load libepic_hosts.so. */
EPIC_API void epic_backend_hosts_counts(const epic_group *group, uint64_t counts[3]);

/* Stops and joins the thread. NULL is allowed. */
void hosts_proxy_close(hosts_proxy *proxy);

#endif
