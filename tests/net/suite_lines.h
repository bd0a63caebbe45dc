/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of a test's hosts, a rank on each. */
#ifndef NET_SUITE_LINES_H
#define NET_SUITE_LINES_H

#include "net/lines.h"
#include "run.h"

net_lines_setup suite_lines_setup(const epic_bootstrap *bootstrap, const char *interface);

/* NULL: a check has failed. */
net_lines *suite_lines(const epic_bootstrap *bootstrap, const char *interface);
net_lines *suite_lines_of(const epic_bootstrap *bootstrap, const net_lines_setup *setup);

/* A check that the line comes to be so, in ten seconds at most, and was alive until then. */
void suite_line_becomes(const net_lines *l, int host, net_line wanted);

/* All ranks are here. */
void suite_gather(const epic_bootstrap *bootstrap);

#endif
