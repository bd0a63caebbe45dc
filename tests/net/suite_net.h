/* SPDX-License-Identifier: Apache-2.0 */
/* Hosts of a test: network namespaces, joined by a bridge. No packet leaves them. */
#ifndef NET_SUITE_NET_H
#define NET_SUITE_NET_H

#include <stdbool.h>

#include "run.h"

/* Makes the hosts and moves this process into a namespace without another network. Call it
 * before any thread starts. Returns false and prints why if that is not possible; tests then
 * use loopback. */
bool net_open(int num_hosts);
void net_close(void);

/* Forks a process for each host, in its namespace after net_open(). Only hosts in the bit mask
 * `victims` may be killed. A host that ends otherwise than with status 0 in time is a failed
 * check. */
void net_run(int num_hosts, run_body *body, void *self, unsigned victims, unsigned seconds);

/* Sets the host's link down. Any process of the test may call it. */
bool net_cut(int host);
bool net_mend(int host); /* Sets it up again. */

/* Like net_open(), but the network delays and loses packets as relay_open() describes. No link
 * can be cut. */
bool net_open_lossy(int num_hosts, int delay_us, uint32_t losses);

#endif
