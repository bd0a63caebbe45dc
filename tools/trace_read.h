/* SPDX-License-Identifier: Apache-2.0 */
/* A trace in memory, as epic-trace and epic-place look at it. */
#ifndef EPIC_TRACE_READ_H
#define EPIC_TRACE_READ_H

#include <stdbool.h>
#include <stdint.h>

#include "base/trace.h"
#include "tool.h"

#define MAX_RANKS 65536
#define MAX_TOP_K 64
#define MAX_EXPERTS 65536

/* The choices of all ranks in one plan, rank by rank; or a row of a table of loads. */
typedef struct trace_step {
    uint64_t tag, place;
    int64_t time_ns; /* of the first rank that planned */
    uint32_t top_k, num_experts, alignment;
    int64_t num_tokens; /* of all ranks */
    int64_t *tokens_of; /* [num_ranks] */
    int32_t *ids;       /* [num_tokens, top_k]; -1: none; NULL with load */
    int64_t *load; /* [num_experts] choices of each expert, of a table of loads; else NULL */
} trace_step;

typedef struct trace_event { /* an operation of a rank */
    int32_t rank;
    trace_record record;
} trace_event;

typedef struct trace {
    char name[64];
    uint64_t group_id;
    int32_t num_ranks;
    uint32_t num_experts; /* the most of any step */
    int64_t num_steps, num_events;
    bool has_loads;         /* every step has a load, and no tokens */
    int64_t num_incomplete; /* plans that are not there for every rank; they are left out */
    trace_step *steps;      /* by time */
    trace_event *events;    /* by time */
} trace;

/* What of it is wanted; zero: all. */
typedef struct trace_choice {
    const char *group;    /* a group's name or the 16 digits of its id; NULL: there is one */
    const char *values;   /* what an .npy file holds: "--ids", "--loads"; NULL: ids, unless they
                             look like loads */
    uint32_t num_experts; /* of an .npy file, where it says nothing; 0: the largest id + 1 */
    int64_t turn, of;     /* every of-th step, beginning with turn: one layer of several */
    int64_t first, num;   /* then steps first to first + num - 1; num 0: all */
} trace_choice;

/* --group, --layer, --steps and --experts; false: it is none of them. */
bool trace_read_option(trace_choice *choice, const char *name, const char *value);

/* Reads --loads and --ids, which have no value; false: the name is another. */
bool trace_read_flag(trace_choice *choice, const char *name);

/* A folder that EPIC_TRACE named, or an .npy file of ids or loads.  Ends the program with a sentence where
 * that cannot be. */
void trace_load(trace *out, const char *path, const trace_choice *choice);
void trace_load_npy(trace *out, const char *path, const trace_choice *choice);
void trace_free(trace *t);

/* Counts the choices of each expert in a step, load [num_experts]; returns how many choices name no
 * expert. */
int64_t trace_count_load(const trace_step *s, int64_t *load);

/* Ends the program where the file is a table of loads, which `what` has no use for. */
void trace_need_choices(const trace *t, const char *what);

#endif
