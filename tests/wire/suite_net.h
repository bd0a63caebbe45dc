/* SPDX-License-Identifier: Apache-2.0 */
/* Hosts of a test: network namespaces of its own, joined by a bridge; nothing leaves them. */
#ifndef WIRE_SUITE_NET_H
#define WIRE_SUITE_NET_H

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

/* Delays and loses what goes to the host, by netem's words; false: the system has no netem. */
bool net_disturb(int host, const char *netem);

#endif
