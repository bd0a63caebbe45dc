/* SPDX-License-Identifier: Apache-2.0 */
/* Which networks UCX takes to a peer: its endpoint's *lanes*. */
#ifndef EPIC_WIRE_UCX_LANES_H
#define EPIC_WIRE_UCX_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <ucp/api/ucp.h>

/* Is every one of them RDMA, whose writes keep words whole? */
bool ucx_keeps_words(ucp_ep_h endpoint);

/* Writes ", tcp/eth0 + ... by WAY", and returns its length as snprintf does. */
int ucx_say_lanes(ucp_ep_h endpoint, char *to, size_t size, const char *way);

#endif
