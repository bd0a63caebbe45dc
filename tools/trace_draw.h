/* SPDX-License-Identifier: Apache-2.0 */
/* The commands of epic-trace that draw, convert and replay a trace. If a command fails, it
 * prints an error text and ends the program. */
#ifndef EPIC_TRACE_DRAW_H
#define EPIC_TRACE_DRAW_H

#include "epic/placement.h"
#include "trace_read.h"

/* Draws the load of each expert over the steps as a heat map, in SVG or PNG. The ending of the
 * file name selects the format. */
void trace_draw(const trace *t, const char *path);

/* Writes the operations of all ranks as JSON for Perfetto or chrome://tracing. */
void trace_chrome(const trace *t, const char *path);

/* trace_metrics() prints one line of JSON for each step. trace_prometheus() prints totals in
 * the text format of Prometheus. */
void trace_metrics(const trace *t);
void trace_prometheus(const trace *t);

/* Options of a replay through plan, dispatch and combine. */
typedef struct replay {
    int32_t ranks;
    int64_t hidden;              /* number of float32 elements of a row */
    const epic_placement *place; /* NULL: experts in contiguous blocks */
    bool balanced;               /* true: replace the expert ids by others with an even load */
    bool json;
} replay;

/* Replays the trace with ranks as threads, and prints times, load and traffic. */
void trace_replay(const trace *t, const replay *how);

#endif
