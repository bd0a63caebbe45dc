/* SPDX-License-Identifier: Apache-2.0 */
/* Which networks UCX has, and which of them it uses for a peer. UCX calls them the lanes of an
 * endpoint. */
#ifndef EPIC_NET_UCX_LANES_H
#define EPIC_NET_UCX_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <ucp/api/ucp.h>

/* Opens a UCX context. `*segment` receives the size of its TCP segments in the format of
 * UCX_TCP_RX_SEG_SIZE, "" without TCP. All hosts must use the same size, because a message that
 * is larger than the segments of its receiver ends the receiving process. segment NULL: the
 * context is only for questions. no_emulation: remote writes fail on networks that have none,
 * if this UCX can do that; else UCX sends messages instead. */
ucs_status_t ucx_create_context(ucp_context_h *out, const char **segment, bool no_emulation);

/* Returns whether UCX knows GPU memory and has a network whose devices may reach it;
 * ucx_can_reach() decides for a peer. Without such a network UCX prints errors when GPU memory
 * is registered. */
bool ucx_can_reach_gpus(ucp_context_h context);

/* Returns whether there is a network whose devices move the bytes (RDMA). */
bool ucx_has_rdma(ucp_context_h context);

/* Returns whether all lanes of the endpoint are RDMA, which keeps words of 8 bytes whole. The
 * context must have been opened with no_emulation. */
bool ucx_keeps_words(ucp_ep_h endpoint);

/* Returns whether the device that makes remote writes to this peer reaches memory on both
 * sides. `own` and `theirs` are the domains of the keys of both sides. UCX would send messages
 * to memory that no device reaches. */
bool ucx_can_reach(ucp_ep_h endpoint, uint64_t own, uint64_t theirs);

/* Returns the memory domains of a packed key, one bit for each; 0: none. */
uint64_t ucx_domains(const void *key, size_t bytes);

/* Writes ", tcp/eth0 + ... by WAY" and returns its length as snprintf does. */
int ucx_describe_lanes(ucp_ep_h endpoint, char *to, size_t size, const char *way);

#endif
