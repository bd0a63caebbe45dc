/* SPDX-License-Identifier: Apache-2.0 */
/* Traces: what a rank has planned and done, in a file for epic-trace.  These structs are the
 * format, little-endian; docs/reference/trace-format.md describes it.  EPIC_TRACE, a folder,
 * switches it on when a context is opened.
 *
 * Each record is written at once, so that the file of a rank that was killed is good up to its
 * last record.  Nothing is allocated after open; a write that fails ends the trace and nothing
 * else. */
#ifndef EPIC_TRACE_H
#define EPIC_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

#define TRACE_MAGIC "EPICTRC\n"
#define TRACE_VERSION 1
#define TRACE_BYTES (1 << 16) /* of memory, while it is open */

typedef struct trace_header {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    int32_t rank;
    int32_t num_ranks;
    uint64_t group_id;
    int64_t opened_ns; /* CLOCK_REALTIME, as all times */
    char name[64];     /* of the group */
    uint64_t zero[3];
} trace_header;

enum { TRACE_PLAN = 1, TRACE_OPERATION = 2 };

typedef struct trace_record {
    uint32_t kind;     /* a reader skips kinds that it does not know */
    uint32_t id_bytes; /* PLAN: of an id: 1, 2 or 4; one with all bits set is no expert */
    uint64_t payload;  /* bytes behind the record: ids and zeros up to a multiple of 8 */
    uint64_t tag;
    uint64_t place;
    int64_t time_ns; /* PLAN: now.  OPERATION: when it began */
    union {
        struct {
            int64_t num_tokens; /* ids are [num_tokens, top_k] */
            uint32_t top_k;
            uint32_t num_experts; /* ids are below it: with replicas the logical ones */
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

typedef struct epic_trace epic_trace; /* NULL: every function below does nothing */

/* Makes the folder, if only itself is missing, and in it NAME-GROUPID-RANK.epictrace; of the name
 * all but letters, digits and ".-_" become "_".  Errors: EPIC_EINVAL, EPIC_ENOMEM. */
epic_result trace_open(epic_trace **out, const char *folder, const trace_header *header);
bool trace_close(epic_trace *trace); /* false: something could not be written */

/* ids: [num_tokens, top_k] of EPIC_I32 or EPIC_I64, below record.plan.num_experts. */
void trace_plan(epic_trace *trace, trace_record record, const void *ids, uint32_t type);
void trace_operation(epic_trace *trace, trace_record record);

/* Bytes of an id that is below num_experts, or none. */
static inline uint32_t trace_id_bytes(uint32_t num_experts)
{
    return num_experts <= 0xff ? 1 : num_experts <= 0xffff ? 2 : 4;
}

#endif
