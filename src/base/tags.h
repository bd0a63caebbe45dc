/* SPDX-License-Identifier: Apache-2.0 */
/* The table of tags: the sequence number of each tag's next operation, and whether one is in
 * flight. All functions may be called from any thread. */
#ifndef EPIC_TAGS_H
#define EPIC_TAGS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

typedef struct tag_entry {
    uint64_t tag;
    uint64_t next; /* sequence number of the next operation, plus one; 0: the entry is empty */
    bool is_busy;
} tag_entry;

/* A hash table with open addressing; `size` is a power of two, and entries are never
 * removed. */
typedef struct tag_table {
    pthread_mutex_t mutex;
    tag_entry *entries;
    size_t size;
    size_t used;
    uint32_t in_flight;
    uint32_t max_in_flight;
} tag_table;

#define TAGS_AT_FIRST 1024
#define TAGS_BYTES ((int64_t)(TAGS_AT_FIRST * sizeof(tag_entry))) /* before it grows */

/* Opens an empty table.  Errors: EPIC_ENOMEM.  tags_close() accepts a table of zeros. */
epic_result tags_open(tag_table *table, uint32_t max_in_flight);
void tags_close(tag_table *table);

/* Begins an operation of the tag and returns its sequence number in *place.  Errors, which
 * change nothing: EPIC_EINVAL (the tag has an operation in flight on this rank, or
 * max_in_flight operations are in flight), EPIC_ENOMEM. */
epic_result tags_begin(tag_table *table, uint64_t tag, uint64_t *place);

/* Returns the tag's next sequence number, for an operation that follows the one in flight at
 * once. */
uint64_t tags_continue(tag_table *table, uint64_t tag);

/* Ends the operation that is in flight. */
void tags_end(tag_table *table, uint64_t tag);

#endif
