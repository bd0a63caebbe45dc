/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of a test's hosts, a rank on each. */
#ifndef NET_SUITE_LIVENESS_H
#define NET_SUITE_LIVENESS_H

#include "net/liveness.h"
#include "run.h"

net_liveness_setup suite_liveness_setup(const epic_bootstrap *bootstrap, const char *interface);

/* NULL: a check has failed. */
net_liveness *suite_liveness(const epic_bootstrap *bootstrap, const char *interface);
net_liveness *suite_liveness_with(const epic_bootstrap *bootstrap,
                                  const net_liveness_setup *setup);

/* A check that the line comes to be so, in ten seconds at most, and was alive until then. */
void suite_check_becomes(const net_liveness *l, int host, net_peer_state wanted);

/* All ranks are here. */
void suite_gather(const epic_bootstrap *bootstrap);

#endif
