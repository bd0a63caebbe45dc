/* SPDX-License-Identifier: Apache-2.0 */
/* A trace in memory, as epic-trace and epic-place read it: the choices of all ranks in each
 * plan, and the operations of each rank. Functions end the program with a sentence if they
 * cannot do their work. */
#ifndef EPIC_TRACE_READ_H
#define EPIC_TRACE_READ_H

#include <stdbool.h>
#include <stdint.h>

#include "base/trace.h"
#include "tool.h"

#define MAX_RANKS 65536
#define MAX_TOP_K 64
#define MAX_EXPERTS 65536

/* The choices of all ranks in one plan, rank by rank, or one row of a table of loads. */
typedef struct trace_step {
    uint64_t tag, sequence;
    int64_t time_ns; /* when the first rank planned */
    uint32_t top_k, num_experts, alignment;
    int64_t num_tokens; /* tokens of all ranks */
    int64_t *tokens_of; /* [num_ranks] */
    int32_t *ids;       /* [num_tokens, top_k]; -1: none; NULL with load */
    int64_t *load;      /* [num_experts], from a table of loads; else NULL */
} trace_step;

/* One operation of one rank. */
typedef struct trace_event {
    int32_t rank;
    trace_record record;
} trace_event;

/* A trace of one group. */
typedef struct trace {
    char name[64];
    uint64_t group_id;
    int32_t num_ranks;
    uint32_t num_experts; /* largest number of any step */
    int64_t num_steps, num_events;
    bool has_loads;         /* steps are rows of loads, without tokens */
    int64_t num_incomplete; /* plans that some rank did not record; they are not in `steps` */
    trace_step *steps;      /* sorted by time */
    trace_event *events;    /* sorted by time */
} trace;

/* Which part of a trace the options select. Zeroed: all of it. */
typedef struct trace_choice {
    const char *group; /* name of a group, or the 16 digits of its id; NULL: the only group */
    const char *
        values; /* content of an .npy file: "--ids" or "--loads"; NULL: ids, if they do not look like loads */
    uint32_t num_experts; /* number of experts in an .npy file; 0: the largest id + 1 */
    int64_t turn, of;     /* steps turn, turn + of, turn + 2 of, ...: one of `of` layers */
    /* of the steps that `turn` selects, use first to first + num - 1; num 0: all */
    int64_t first, num;
} trace_choice;

/* Reads --group, --layer, --steps or --experts with its value. Returns false for any other
 * name. */
bool trace_read_option(trace_choice *choice, const char *name, const char *value);

/* Reads --loads or --ids, which have no value. Returns false for any other name. */
bool trace_read_flag(trace_choice *choice, const char *name);

/* Loads a trace: a folder that EPIC_TRACE named, or an .npy file of ids or loads.
 * trace_load_npy() reads an .npy file only and ignores the options that select steps. */
void trace_load(trace *out, const char *path, const trace_choice *choice);
void trace_load_npy(trace *out, const char *path, const trace_choice *choice);
void trace_free(trace *t);

/* Counts the choices of each expert in a step, into load [num_experts]. Returns the number
 * of choices that name no expert. */
int64_t trace_count_load(const trace_step *s, int64_t *load);

/* Ends the program if the trace is a table of loads, which `what` cannot use. */
void trace_need_choices(const trace *t, const char *what);

#endif
