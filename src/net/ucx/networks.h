/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out which networks UCX has, and which of these networks it uses for a peer.
 *
 * UCX's terms: an endpoint is one end of the connection to a peer. An endpoint uses one or more
 * networks, which UCX calls lanes. A key allows remote writes into registered memory of a peer,
 * and a packed key is the form in which the key is sent. A memory domain is a device, or a part
 * of UCX, that registers memory. */
#ifndef EPIC_NET_UCX_NETWORKS_H
#define EPIC_NET_UCX_NETWORKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <ucp/api/ucp.h>

/* Opens a UCX context, UCX's state of this process.
 *
 * Sets *segment to the size of the context's TCP segments, such as "256K" (the format of
 * UCX_TCP_RX_SEG_SIZE), or to "" without TCP. All hosts must use the same size, because UCX
 * aborts a process that receives a message larger than its segments. `segment` may be NULL for
 * a context that sends no data.
 *
 * Some networks do not support remote writes. If no_emulation is true and UCX is 1.22 or later,
 * a remote write over such a network fails. If no_emulation is false or UCX is older, UCX
 * emulates the remote write with messages.
 *
 * `port` is the port of an RDMA NIC, such as "mlx5_0:1" (nics.h), and the context uses no other
 * RDMA NIC. UCX chooses the devices if `port` is "" or not supported, or if the user has set
 * UCX_NET_DEVICES. */
ucs_status_t ucx_create_context(ucp_context_h *out, const char **segment, bool no_emulation,
                                const char *port);

/* Returns true if UCX supports GPU memory and has a network whose devices may access it.
 * Without such a network UCX prints errors when GPU memory is registered. ucx_can_reach()
 * checks a particular peer. */
bool ucx_can_reach_gpus(ucp_context_h context);

/* Returns true if the context has an RDMA network, whose devices move the bytes. */
bool ucx_has_rdma(ucp_context_h context);

/* Returns true if all networks of the endpoint are RDMA, so that remote writes keep words of 8
 * bytes whole (write them atomically). The context must have been opened with no_emulation. */
bool ucx_keeps_words(ucp_ep_h endpoint);

/* Returns true if the network device for remote writes to this peer can access the registered
 * memory of both ranks. If it cannot, UCX sends messages. `own` is the result of ucx_domains()
 * for this rank's packed key, and `theirs` the result for the peer's packed key. */
bool ucx_can_reach(ucp_ep_h endpoint, uint64_t own, uint64_t theirs);

/* Returns the memory domains of a packed key as a bit mask, or 0 if unknown. */
uint64_t ucx_domains(const void *key, size_t bytes);

/* Writes to `to` the networks of an endpoint, for example ", tcp/eth0 by messages" if `method`
 * is "messages". Returns the length of the text, as snprintf does. */
int ucx_describe_networks(ucp_ep_h endpoint, char *to, size_t size, const char *method);

#endif
