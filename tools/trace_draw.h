/* SPDX-License-Identifier: Apache-2.0 */
/* What epic-trace makes of a trace; each ends the program with a sentence where it cannot. */
#ifndef EPIC_TRACE_DRAW_H
#define EPIC_TRACE_DRAW_H

#include "epic/placement.h"
#include "trace_read.h"

/* A heat map: SVG or PNG by the ending of the name. */
void trace_draw(const trace *t, const char *path);

/* Operations of all ranks for Perfetto or chrome://tracing. */
void trace_chrome(const trace *t, const char *path);

/* A line of JSON for each step; or totals as Prometheus reads them. */
void trace_metrics(const trace *t);
void trace_prometheus(const trace *t);

/* Through plan, dispatch and combine. */
typedef struct replay {
    int32_t ranks;
    int64_t hidden;              /* float32 elements of a row */
    const epic_placement *place; /* NULL: contiguous blocks */
    bool balanced;               /* ids are replaced by those of an even load */
    bool json;
} replay;

void trace_replay(const trace *t, const replay *how);

#endif
