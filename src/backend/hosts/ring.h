/* SPDX-License-Identifier: Apache-2.0 */
/* The thread of a rank that speaks to other hosts.  It gives to the net what kernels have shipped
 * (kernels/cuda/net/net.cuh), tells kernels what the net has read, tells peers what a rank has to say
 * beside its data, and tells kernels who is dead. */
#ifndef EPIC_HOSTS_RING_H
#define EPIC_HOSTS_RING_H

#include "backend/backend.h"
#include "backend/p2p/beats.h"
#include "cuda/common/cuda_kernels.h"
#include "net/lines.h"
#include "net/net.h"

typedef struct hosts_ring hosts_ring;

typedef struct hosts_ring_setup { /* borrowed until the ring is closed */
    int32_t host, num_hosts;
    const net_engine *engine;
    net *net;
    net_lines *lines;
    const uint8_t *outbox;
    p2p_heap at;
    p2p_status *status;
    p2p_beats *beats;
    p2p_ring ring; /* as the host sees it */
} hosts_ring_setup;

epic_result hosts_ring_open(hosts_ring **out, const hosts_ring_setup *setup);

/* Takes bytes of the outbox to the same place of a host's heap, after all that was given to the net
 * for it before; returns when they are there, or after a moment. */
void hosts_ring_tell(hosts_ring *ring, int host, uint64_t at, uint32_t bytes);

/* A call is made: the thread looks at once.  Any thread. */
void hosts_ring_wake(hosts_ring *ring);

/* Bytes that kernels have had given to the net so far, in how many puts, made of how many pieces:
 * entries of the ring.  Any thread. */
void hosts_ring_given(const hosts_ring *ring, uint64_t given[3]);
EPIC_API void epic_backend_hosts_given(const epic_group *group, uint64_t given[3]);

/* NULL is allowed. */
void hosts_ring_close(hosts_ring *ring);

#endif
