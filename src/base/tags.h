/* SPDX-License-Identifier: Apache-2.0 */
/* The place of each tag's next operation, and which tags have one in flight. */
#ifndef EPIC_TAGS_H
#define EPIC_TAGS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

typedef struct tag_entry {
    uint64_t tag;
    uint64_t next; /* place of the next operation, plus one; 0: the entry is empty */
    bool is_busy;
} tag_entry;

typedef struct tag_table { /* open addressing, a power of two; entries are never removed */
    pthread_mutex_t mutex;
    tag_entry *entries;
    size_t size;
    size_t used;
    uint32_t in_flight;
    uint32_t max_in_flight;
} tag_table;

#define TAGS_AT_FIRST 1024
#define TAGS_BYTES ((int64_t)(TAGS_AT_FIRST * sizeof(tag_entry))) /* before it grows */

epic_result tags_open(tag_table *table, uint32_t max_in_flight);
void tags_close(tag_table *table);

/* Claims the tag's next place.  EPIC_EINVAL: the tag has an operation in flight on this rank, or
 * there are max_in_flight already; nothing is changed then. */
epic_result tags_begin(tag_table *table, uint64_t tag, uint64_t *place);

/* The tag's next place, for the operation that goes on where the one in flight has ended. */
uint64_t tags_continue(tag_table *table, uint64_t tag);

void tags_end(tag_table *table, uint64_t tag);

#endif
