/* SPDX-License-Identifier: Apache-2.0 */
/* The flight recorder: the last operations of one context, in a memfd that another process of
 * the same user finds as epic:GROUP:RANK under /proc/PID/fd and reads while a call is stuck.
 *
 * Writing never blocks and never allocates; any number of threads, one at a time for each
 * record.  An operation in flight keeps its record however many others pass, so a stuck one is
 * never overwritten. */
#ifndef EPIC_RECORDER_H
#define EPIC_RECORDER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/trace.h"
#include "epic/epic.h"

/* ---------------------------------------------------------------------------- writing ---- */

typedef struct epic_recorder epic_recorder;

typedef enum recorder_state {
    RECORDER_ANNOUNCED = 0, /* waits for the peers' notes */
    RECORDER_MOVING = 1,    /* moves rows */
    RECORDER_DONE = 2
} recorder_state;

/* On failure *out is NULL, which every function below accepts: the context works without.
 * Errors: EPIC_ENOMEM, EPIC_EDEVICE (the system refused the memfd). */
epic_result recorder_open(epic_recorder **out, const char *group, uint64_t group_id, int rank,
                          int num_ranks, const char *backend, const char *net);
void recorder_close(epic_recorder *recorder);

/* What ends is told to the trace too, which outlives the recorder. */
void recorder_trace(epic_recorder *recorder, epic_trace *trace);

/* In a forked child: the parent's recorder goes on. */
void recorder_forget(epic_recorder *recorder);

/* Begins a record, for the two below; place is the step among the operations of the tag. */
uint64_t recorder_begin(epic_recorder *recorder, uint32_t operation, uint64_t tag,
                        uint64_t place, uint64_t bytes);

/* waits_for: the first rank that it waits for; -1: nobody. */
void recorder_phase(epic_recorder *recorder, uint64_t record, uint32_t phase,
                    int32_t waits_for);

/* sentence may be NULL; it is kept for failures only. */
void recorder_end(epic_recorder *recorder, uint64_t record, epic_result result,
                  const char *sentence);

/* ---------------------------------------------------------------------------- reading ---- */

#define RECORDER_MAGIC 0x0143455243495045 /* "EPICREC\1" in memory */
#define RECORDER_VERSION 3
#define RECORDER_RECORDS 256
#define RECORDER_SENTENCE 512
#define RECORDER_NET 128 /* bytes */

/* What a record says.  Times are CLOCK_REALTIME nanoseconds; end 0: in flight. */
typedef struct recorder_entry {
    uint64_t number; /* among the operations of the context, from 0 */
    uint64_t tag;
    uint64_t place;
    uint64_t bytes;
    int64_t start_ns;
    int64_t end_ns;
    uint32_t operation; /* an epic_operation */
    uint32_t state;     /* a recorder_state */
    uint32_t result;    /* an epic_result, once done */
    int32_t waits_for;
} recorder_entry;

#define RECORDER_WORDS (sizeof(recorder_entry) / sizeof(uint64_t))

/* An entry as it lies in the memfd.  sequence: 0 never used, odd while it is written. */
typedef struct recorder_record {
    _Atomic uint64_t sequence;
    _Atomic uint64_t in_flight; /* 1 from begin to end: nobody else takes the record */
    _Atomic uint64_t words[RECORDER_WORDS];
    _Atomic uint64_t pad[6];
} recorder_record;

typedef struct recorder_sentence {
    _Atomic uint64_t words[RECORDER_SENTENCE / sizeof(uint64_t)];
} recorder_sentence;

/* The memfd.  All before next is written once, before magic. */
typedef struct recorder_page {
    _Atomic uint64_t magic;
    uint32_t version;
    uint32_t page_bytes; /* sizeof(recorder_page) */
    int32_t rank;
    int32_t num_ranks;
    int64_t pid;
    int64_t opened_ns;
    char group[128]; /* cut at 127 bytes, as the next is at 31 */
    char backend[32];
    _Atomic uint64_t next; /* number of the next operation */
    _Atomic uint64_t closed;
    uint64_t group_id; /* tells groups of one name apart */
    uint64_t pad[4];
    char net[RECORDER_NET]; /* epic_net_name */
    recorder_record records[RECORDER_RECORDS];
    recorder_sentence sentences[RECORDER_RECORDS];
} recorder_page;

_Static_assert(sizeof(recorder_entry) == 64, "recorder_entry has holes");
_Static_assert(sizeof(recorder_record) == 128, "recorder_record has holes");
_Static_assert(offsetof(recorder_page, records) == 384, "recorder_page has holes");

/* Maps the memfd behind fd, read-only.  NULL: not a recorder of this version, or one that could
 * shrink under the reader. */
const recorder_page *recorder_map(int fd);
void recorder_unmap(const recorder_page *page);

/* Copies record i, whole: never half of one operation and half of another.  sentence may be
 * NULL, "" unless the operation failed.  False: never used, or rewritten at every try. */
bool recorder_read(const recorder_page *page, int i, recorder_entry *out,
                   char sentence[RECORDER_SENTENCE]);

#endif
