/* SPDX-License-Identifier: Apache-2.0 */
/* The thread of a rank that speaks to other hosts.  It gives to the net what kernels have shipped
 * (kernels/cuda/net/net.cuh), tells kernels what the net has read, tells peers what a rank has to say
 * beside its data, and tells kernels who is dead. */
#ifndef EPIC_HOSTS_PROXY_H
#define EPIC_HOSTS_PROXY_H

#include "backend/backend.h"
#include "backend/p2p/beats.h"
#include "cuda/common/cuda_kernels.h"
#include "net/liveness.h"
#include "net/net.h"

typedef struct hosts_proxy hosts_proxy;

typedef struct hosts_proxy_setup { /* borrowed until the ring is closed */
    int32_t host, num_hosts;
    const net_engine *engine;
    net *net;
    net_liveness *liveness;
    const uint8_t *outbox;
    p2p_heap at;
    p2p_status *status;
    p2p_beats *beats;
    p2p_ring ring; /* as the host sees it */
} hosts_proxy_setup;

epic_result hosts_proxy_open(hosts_proxy **out, const hosts_proxy_setup *setup);

/* Takes bytes of the outbox to the same place of a host's heap, after all that was given to the net
 * for it before; returns when they are there, or after a moment. */
void hosts_proxy_send(hosts_proxy *proxy, int host, uint64_t at, uint32_t bytes);

/* A call is made: the thread looks at once.  Any thread. */
void hosts_proxy_wake(hosts_proxy *proxy);

/* Bytes that kernels have had given to the net so far, in how many puts, made of how many pieces:
 * entries of the ring.  Any thread. */
void hosts_proxy_counts(const hosts_proxy *proxy, uint64_t counts[3]);
EPIC_API void epic_backend_hosts_counts(const epic_group *group, uint64_t counts[3]);

/* NULL is allowed. */
void hosts_proxy_close(hosts_proxy *proxy);

#endif
