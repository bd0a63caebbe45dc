/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of a test's hosts, a rank on each. */
#ifndef WIRE_SUITE_LINES_H
#define WIRE_SUITE_LINES_H

#include "run.h"
#include "wire/lines.h"

wire_lines_setup suite_lines_setup(const epic_meet *meet, const char *interface);

/* NULL: a check has failed. */
wire_lines *suite_lines(const epic_meet *meet, const char *interface);
wire_lines *suite_lines_of(const epic_meet *meet, const wire_lines_setup *setup);

/* A check that the line comes to be so, in ten seconds at most, and was alive until then. */
void suite_line_becomes(const wire_lines *l, int host, wire_line wanted);

/* All ranks are here. */
void suite_gather(const epic_meet *meet);

#endif
