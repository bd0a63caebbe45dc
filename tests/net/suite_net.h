/* SPDX-License-Identifier: Apache-2.0 */
/* Hosts of a test: network namespaces of its own, joined by a bridge; nothing leaves them. */
#ifndef NET_SUITE_NET_H
#define NET_SUITE_NET_H

#include <stdbool.h>

#include "run.h"

/* Before any thread.  Moves this process to a namespace where no network is but that of the hosts.
 * False, and why not is told: tests go over loopback then. */
bool net_open(int num_hosts);
void net_close(void);

/* Forks a process for each host, in its namespace after net_open.  Those of `victims`, a bit for
 * each host, may be killed; that another does not exit with 0 in time is a failed check. */
void net_run(int num_hosts, run_body *body, void *self, unsigned victims, unsigned seconds);

/* Takes the host's link away, from wherever this process is. */
bool net_cut(int host);
bool net_mend(int host); /* and gives it back */

/* As net_open, and the network delays and loses packets, as relay_open does; no link can be cut. */
bool net_open_lossy(int num_hosts, int delay_us, uint32_t losses);

#endif
