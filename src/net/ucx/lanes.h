/* SPDX-License-Identifier: Apache-2.0 */
/* Which networks UCX has, and takes to a peer: its endpoint's *lanes*. */
#ifndef EPIC_NET_UCX_LANES_H
#define EPIC_NET_UCX_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <ucp/api/ucp.h>

/* A context, and the size of its segments of TCP as UCX_TCP_RX_SEG_SIZE says it, "" without TCP.  A
 * message larger than the segments of its receiver ends that process: they must be the same on all
 * hosts.  NULL: the context is only to be asked what there is.  honest: where a network has no remote
 * writes they fail, if UCX can be told so; else UCX sends messages in their place. */
ucs_status_t ucx_create_context(ucp_context_h *out, const char **segment, bool no_emulation);

/* Does it know memory of GPUs, and has it a network whose devices could reach that?  Whether they do is
 * said by ucx_can_reach.  Without such a network UCX prints errors for memory that it is given. */
bool ucx_can_reach_gpus(ucp_context_h context);

/* Is there a network whose devices move the bytes? */
bool ucx_has_rdma(ucp_context_h context);

/* Is every one of them RDMA, whose writes keep words whole?  Of a context that is honest. */
bool ucx_keeps_words(ucp_ep_h endpoint);

/* Do remote writes to the peer find its memory, and start from memory here, by the device that makes
 * them?  Of the domains that keys of both are of.  What no device reaches, UCX sends in messages. */
bool ucx_can_reach(ucp_ep_h endpoint, uint64_t own, uint64_t theirs);

/* The domains that a packed key is of, a bit for each; 0: of none. */
uint64_t ucx_domains(const void *key, size_t bytes);

/* Writes ", tcp/eth0 + ... by WAY", and returns its length as snprintf does. */
int ucx_describe_lanes(ucp_ep_h endpoint, char *to, size_t size, const char *way);

#endif
