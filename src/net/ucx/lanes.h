/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out which networks UCX has, and which of them it uses for a peer. UCX calls a network
 * that it uses for a peer a lane of the peer's endpoint. */
#ifndef EPIC_NET_UCX_LANES_H
#define EPIC_NET_UCX_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <ucp/api/ucp.h>

/* Opens a UCX context.
 *
 * *segment receives the size of its TCP segments in the format of UCX_TCP_RX_SEG_SIZE, or ""
 * without TCP. All hosts must use the same size, because a message that is larger than its
 * receiver's segments ends the receiving process. Pass NULL as segment for a context that only
 * answers questions.
 *
 * With no_emulation, remote writes fail on networks that do not have them, if this UCX supports
 * that. Otherwise UCX sends messages instead. */
ucs_status_t ucx_create_context(ucp_context_h *out, const char **segment, bool no_emulation);

/* Returns true if UCX supports GPU memory and has a network whose devices may reach it. Without
 * such a network UCX prints errors when GPU memory is registered. Whether a certain peer can be
 * reached, ucx_can_reach() decides. */
bool ucx_can_reach_gpus(ucp_context_h context);

/* Returns true if the context has a network whose devices move the bytes (RDMA). */
bool ucx_has_rdma(ucp_context_h context);

/* Returns true if all lanes of the endpoint are RDMA, which keeps words of 8 bytes whole. The
 * context must have been opened with no_emulation. */
bool ucx_keeps_words(ucp_ep_h endpoint);

/* Returns true if the device that makes remote writes to this peer reaches memory on both
 * sides. Otherwise UCX would send messages. `own` and `theirs` are the ucx_domains() of the
 * keys of both sides. */
bool ucx_can_reach(ucp_ep_h endpoint, uint64_t own, uint64_t theirs);

/* Returns the memory domains of a packed key, one bit for each domain. 0: unknown. */
uint64_t ucx_domains(const void *key, size_t bytes);

/* Writes the networks of an endpoint, such as ", tcp/eth0 by messages". `method` is the last
 * word, "messages" here. Returns the length, as snprintf does. */
int ucx_describe_lanes(ucp_ep_h endpoint, char *to, size_t size, const char *method);

#endif
