/* SPDX-License-Identifier: Apache-2.0 */
/* The flight recorder: the last operations of one context, and how long they waited for each
 * peer, in a memfd (a file in memory). The program epic-info, run by the same user, finds the
 * memfd by its name epic:GROUP:RANK in /proc/PID/fd. It can read the memfd while a call hangs.
 *
 * Writing never blocks and never allocates. Any number of threads may write, each to its own
 * record. An operation keeps its record until it ends, so the record of an operation that hangs
 * is never overwritten. */
#ifndef EPIC_RECORDER_H
#define EPIC_RECORDER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/trace.h"
#include "epic/epic.h"

/* ----------------------------------------------------------------------------- writing ---- */

typedef struct epic_recorder epic_recorder;

typedef enum recorder_state {
    RECORDER_ANNOUNCED = 0, /* the operation waits for the op headers of its peers */
    RECORDER_MOVING = 1,    /* the operation moves rows */
    RECORDER_DONE = 2
} recorder_state;

/* Opens a recorder for the context of `rank`. On failure sets *out to NULL. Every function
 * below accepts NULL and does nothing, so a context works without a recorder. Errors:
 * EPIC_ENOMEM, EPIC_EDEVICE (the system refused the memfd). */
epic_result recorder_open(epic_recorder **out, const char *group, uint64_t group_id, int rank,
                          int num_ranks, const char *backend, const char *net);
void recorder_close(epic_recorder *recorder);

/* From now on recorder_end() writes each operation to `trace`, too. Requires that `trace` stays
 * open until the recorder is closed. */
void recorder_trace(epic_recorder *recorder, epic_trace *trace);

/* Frees the copy of a recorder in a forked child. The recorder of the parent stays open. */
void recorder_forget(epic_recorder *recorder);

/* Begins a record and returns its id for recorder_phase() and recorder_end(). `operation` is an
 * epic_operation, and epic-info prints `bytes` as the size of the operation. If all records are
 * in flight, the operation is not recorded, and recorder_phase() and recorder_end() ignore the
 * id. */
uint64_t recorder_begin(epic_recorder *recorder, uint32_t operation, uint64_t tag,
                        uint64_t sequence, uint64_t bytes);

/* Sets the state of a record to `phase`, a recorder_state. waits_for is the lowest rank for
 * which the operation waits, or -1. */
void recorder_phase(epic_recorder *recorder, uint64_t record, uint32_t phase,
                    int32_t waits_for);

/* Adds `ns` nanoseconds to the time that operations of this kind (an epic_operation) have
 * waited for each rank in `peers`, a bit mask of ranks. */
void recorder_add_wait(epic_recorder *recorder, uint32_t operation, const uint64_t *peers,
                       uint64_t ns);

/* Ends a record. `sentence` is the error text of a failed operation, or NULL. */
void recorder_end(epic_recorder *recorder, uint64_t record, epic_result result,
                  const char *sentence);

/* ----------------------------------------------------------------------------- reading ---- */

#define RECORDER_MAGIC 0x0143455243495045 /* "EPICREC\1" in memory */
#define RECORDER_VERSION 4
#define RECORDER_RECORDS 256
#define RECORDER_SENTENCE 512
#define RECORDER_NET 128                         /* size in bytes of the description of a net */
#define RECORDER_OPERATIONS (EPIC_OP_WINDOW + 1) /* number of values of epic_operation */

/* A copy of a record. Times are CLOCK_REALTIME nanoseconds. end_ns is 0 until the operation has
 * ended. */
typedef struct recorder_entry {
    uint64_t number; /* running number of the operation in its context, from 0 */
    uint64_t tag;
    uint64_t sequence;
    uint64_t bytes;
    int64_t start_ns;
    int64_t end_ns;
    uint32_t operation; /* an epic_operation */
    uint32_t state;     /* a recorder_state */
    uint32_t result;    /* an epic_result, valid after the operation has ended */
    int32_t waits_for;  /* lowest rank for which the operation waits, or -1 */
} recorder_entry;

#define RECORDER_WORDS (sizeof(recorder_entry) / sizeof(uint64_t))

/* A record in the memfd. `seqlock` is 0 if the record was never used, and odd while a thread
 * writes the record. `words` contains a recorder_entry. */
typedef struct recorder_record {
    _Atomic uint64_t seqlock;
    /* 1 while the operation runs: from recorder_begin() to recorder_end() */
    _Atomic uint64_t in_flight;
    _Atomic uint64_t words[RECORDER_WORDS];
    _Atomic uint64_t pad[6];
} recorder_record;

typedef struct recorder_sentence {
    _Atomic uint64_t words[RECORDER_SENTENCE / sizeof(uint64_t)];
} recorder_sentence;

/* time that the operations of one kind have waited for one peer, in nanoseconds */
typedef struct recorder_wait {
    _Atomic uint64_t wait_ns;
    /* part of wait_ns in which the operations waited for no other peer */
    _Atomic uint64_t alone_ns;
} recorder_wait;

/* The contents of the memfd. The fields up to `net` are written once, except that `next` and
 * `closed` change later. `magic` is stored last, with release order. */
typedef struct recorder_page {
    _Atomic uint64_t magic;
    uint32_t version;
    uint32_t page_bytes; /* size of the memfd: recorder_bytes(num_ranks) */
    int32_t rank;
    int32_t num_ranks;
    int64_t pid;
    int64_t opened_ns;
    char group[128]; /* name of the group, at most 127 bytes */
    char backend[32];
    _Atomic uint64_t next;   /* running number of the next operation */
    _Atomic uint64_t closed; /* 1 after recorder_close() */
    uint64_t group_id;       /* distinguishes groups with the same name */
    uint64_t pad[4];
    char net[RECORDER_NET]; /* the net to other hosts, as epic_net_name returns it */
    _Atomic uint64_t
        num_operations[16]; /* number of operations that have begun, for each epic_operation */
    recorder_record records[RECORDER_RECORDS];
    recorder_sentence sentences[RECORDER_RECORDS];
    recorder_wait waits[]; /* [RECORDER_OPERATIONS, num_ranks] */
} recorder_page;

_Static_assert(sizeof(recorder_entry) == 64, "recorder_entry has holes");
_Static_assert(sizeof(recorder_record) == 128, "recorder_record has holes");
_Static_assert(offsetof(recorder_page, records) == 512, "recorder_page has holes");
_Static_assert(RECORDER_OPERATIONS <= 16, "recorder_page.num_operations is too short");

static inline size_t recorder_bytes(int32_t num_ranks)
{
    return sizeof(recorder_page) +
           (size_t)num_ranks * RECORDER_OPERATIONS * sizeof(recorder_wait);
}

/* Returns the memory of a recorder of this process; NULL if the recorder is NULL. */
recorder_page *recorder_get_page(const epic_recorder *recorder);

/* Sets how long the operations of one kind have waited for one peer. A backend that measures
 * waits itself calls this function. The function is inline, because such a backend is a
 * separate library. */
static inline void recorder_set_wait(recorder_page *page, uint32_t operation, int32_t peer,
                                     uint64_t wait_ns, uint64_t alone_ns)
{
    recorder_wait *wait = &page->waits[operation * (size_t)page->num_ranks + (size_t)peer];
    atomic_store_explicit(&wait->wait_ns, wait_ns, memory_order_relaxed);
    atomic_store_explicit(&wait->alone_ns, alone_ns, memory_order_release);
}

/* Adds to *out how long the operations of one kind have waited for `peer`, and how many of
 * these operations have begun. Limits alone_ns to wait_ns. num_ranks is the number of ranks
 * that the page contained at recorder_map(). num_ranks is an argument, because the process that
 * writes the page may have changed the number in the page after recorder_map(). */
void recorder_read_wait(const recorder_page *page, int32_t num_ranks, uint32_t operation,
                        int32_t peer, epic_wait_info *out);

/* Maps the memfd of a recorder read-only. Returns NULL if the file is not a recorder of this
 * version, or if the file could shrink while it is read. recorder_unmap() accepts NULL. */
const recorder_page *recorder_map(int fd);
void recorder_unmap(const recorder_page *page);

/* Copies record i to *out. If `sentence` is not NULL, copies the error text of the record to
 * `sentence` ("" if the record has no error text). The copy never mixes two writes. Returns
 * false if the record was never used, or if a writer changed it during every attempt. */
bool recorder_read(const recorder_page *page, int i, recorder_entry *out,
                   char sentence[RECORDER_SENTENCE]);

#endif
