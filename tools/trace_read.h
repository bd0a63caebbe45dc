/* SPDX-License-Identifier: Apache-2.0 */
/* A trace in memory, as epic-trace and epic-place read it: the choices of all ranks in each
 * plan, and the operations of each rank. If a function fails, it prints an error text and ends
 * the program. */
#ifndef EPIC_TRACE_READ_H
#define EPIC_TRACE_READ_H

#include <stdbool.h>
#include <stdint.h>

#include "base/trace.h"
#include "tool.h"

#define MAX_RANKS 65536
#define MAX_TOP_K 64
#define MAX_EXPERTS 65536

/* One step of a trace: the choices (a token and one of its top_k experts) of all ranks in one
 * plan, in the order of ranks, or one row of a table of loads. */
typedef struct trace_step {
    uint64_t tag, sequence;
    int64_t time_ns; /* time at which the first rank made the plan */
    uint32_t top_k, num_experts, alignment;
    int64_t num_tokens; /* number of tokens of all ranks */
    int64_t *tokens_of; /* [num_ranks] number of tokens of each rank */
    int32_t *ids;  /* [num_tokens, top_k] expert ids; -1: no expert; NULL if `load` is set */
    int64_t *load; /* [num_experts] loads, if the trace is a table of loads; else NULL */
} trace_step;

typedef struct trace_event {
    int32_t rank;
    trace_record record;
} trace_event;

typedef struct trace {
    char name[64];
    uint64_t group_id;
    int32_t num_ranks;
    uint32_t num_experts; /* maximum number of experts of any step */
    int64_t num_steps, num_events;
    bool has_loads; /* true: steps are rows of a table of loads, without tokens */
    /* number of plans that some rank did not record; they are not in `steps` */
    int64_t num_incomplete;
    trace_step *steps;   /* sorted by time */
    trace_event *events; /* sorted by time */
} trace;

/* The part of a trace that the options select: the whole trace if all fields are zero. */
typedef struct trace_choice {
    const char *group; /* name of a group, or the 16 digits of its id; NULL: the only group */
    const char *
        /* what an .npy file contains: "--ids" or "--loads"; NULL: ids, unless they look like
         * loads */
        values;
    uint32_t num_experts; /* number of experts in an .npy file; 0: the largest id + 1 */
    /* use the steps of one layer: layer_index, layer_index + num_layers, layer_index + 2 *
     * num_layers and so on */
    int64_t layer_index, num_layers;
    /* of these steps, use `num` steps, starting at step `first`; num 0: all */
    int64_t first, num;
} trace_choice;

/* Reads the option --group, --layer, --steps or --experts with its value. Returns false for any
 * other name. */
bool trace_read_option(trace_choice *choice, const char *name, const char *value);

/* Reads the option --loads or --ids, which have no value. Returns false for any other name. */
bool trace_read_flag(trace_choice *choice, const char *name);

/* Load a trace: a folder that EPIC_TRACE named, or an .npy file of ids or loads.
 * trace_load_npy() reads only an .npy file, and ignores the options that select steps. */
void trace_load(trace *out, const char *path, const trace_choice *choice);
void trace_load_npy(trace *out, const char *path, const trace_choice *choice);
void trace_free(trace *t);

/* Writes the number of choices of each expert in a step to load [num_experts]. Returns the
 * number of choices without an expert. */
int64_t trace_count_load(const trace_step *s, int64_t *load);

/* Ends the program if the trace is a table of loads, which `what` cannot use. */
void trace_need_choices(const trace *t, const char *what);

#endif
