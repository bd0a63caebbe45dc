/* SPDX-License-Identifier: Apache-2.0 */
/* Traces: a file with the plans and operations of one rank, for epic-trace. The structs below
 * are the file format, little-endian (docs/reference/trace-format.md). A context creates a
 * trace when it is opened, in the folder that EPIC_TRACE names.
 *
 * Each record is written to the file immediately, so the trace of a killed rank is complete up
 * to its last record. Nothing is allocated after open. If a write fails, the trace contains no
 * later records, and the context continues without a trace. */
#ifndef EPIC_TRACE_H
#define EPIC_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

#define TRACE_MAGIC "EPICTRC\n"
#define TRACE_VERSION 1
#define TRACE_BYTES (1 << 16) /* memory of an open trace */

typedef struct trace_header {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    int32_t rank;
    int32_t num_ranks;
    uint64_t group_id;
    int64_t opened_ns; /* CLOCK_REALTIME, like all times in a trace */
    char name[64];     /* name of the group */
    uint64_t zero[3];
} trace_header;

enum { TRACE_PLAN = 1, TRACE_OPERATION = 2 };

typedef struct trace_record {
    uint32_t kind;     /* kind of the record; readers skip unknown kinds */
    uint32_t id_bytes; /* in TRACE_PLAN: size of an id in bytes (1, 2 or 4); else 0 */
    /* In a TRACE_PLAN record: number of bytes that follow this record. These bytes are the
     * expert ids, then zeros up to a multiple of 8. An id with all bits set means "no
     * expert". */
    uint64_t payload;
    uint64_t tag;
    uint64_t sequence;
    /* In a TRACE_PLAN record: time at which the record was written. In a TRACE_OPERATION
     * record: time at which the operation began. */
    int64_t time_ns;
    union {
        struct {
            int64_t num_tokens; /* the ids after this record are [num_tokens, top_k] */
            uint32_t top_k;
            /* every expert id is below this; in a layer with replicas this is num_logical */
            uint32_t num_experts;
            uint32_t alignment;
            uint32_t zero;
        } plan;
        struct {
            int64_t end_ns;
            uint64_t bytes;
            uint32_t operation; /* an epic_operation */
            uint32_t result;    /* an epic_result */
        } done;
    };
} trace_record;

_Static_assert(sizeof(trace_header) == 128, "trace_header has holes");
_Static_assert(sizeof(trace_record) == 64, "trace_record has holes");

typedef struct epic_trace epic_trace; /* every function below accepts NULL and does nothing */

/* Creates the file NAME-GROUPID-RANK.epictrace in `folder`, and creates the folder (but not its
 * parents) if it does not exist. NAME is the group's name, with "_" for all characters except
 * letters, digits and ".-_". Errors: EPIC_EINVAL (the file cannot be written), EPIC_ENOMEM. */
epic_result trace_open(epic_trace **out, const char *folder, const trace_header *header);
/* Closes the file. Returns false if a write has failed. */
bool trace_close(epic_trace *trace);

/* Append a record of a plan or of an operation. Any thread may call these functions. ids is
 * [num_tokens, top_k] of type EPIC_I32 or EPIC_I64. Each id is less than
 * record.plan.num_experts, or negative for no expert. */
void trace_plan(epic_trace *trace, trace_record record, const void *ids, uint32_t type);
void trace_operation(epic_trace *trace, trace_record record);

/* Returns the size in bytes of an id in a trace with num_experts experts. One value is reserved
 * for "no expert". */
static inline uint32_t trace_id_bytes(uint32_t num_experts)
{
    return num_experts <= 0xff ? 1 : num_experts <= 0xffff ? 2 : 4;
}

#endif
