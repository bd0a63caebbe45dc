/* SPDX-License-Identifier: Apache-2.0 */
/* Liveness connections of a test; each host has one rank. */
#ifndef NET_SUITE_LIVENESS_H
#define NET_SUITE_LIVENESS_H

#include "net/liveness.h"
#include "run.h"

net_liveness_setup suite_liveness_setup(const epic_bootstrap *bootstrap, const char *interface);

/* Opens and connects them. Returns NULL after a failed check. */
net_liveness *suite_liveness(const epic_bootstrap *bootstrap, const char *interface);
net_liveness *suite_liveness_with(const epic_bootstrap *bootstrap,
                                  const net_liveness_setup *setup);

/* Checks that the host gets this state within ten seconds, and was alive until then. */
void suite_check_becomes(const net_liveness *l, int host, net_peer_state wanted);

/* Waits until all ranks have called it. */
void suite_wait_for_ranks(const epic_bootstrap *bootstrap);

#endif
