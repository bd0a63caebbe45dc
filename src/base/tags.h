/* SPDX-License-Identifier: Apache-2.0 */
/* The table of tags of a context. For each tag it stores the next sequence number, and whether
 * an operation is in flight. Any thread may call the functions except open and close. */
#ifndef EPIC_TAGS_H
#define EPIC_TAGS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

/* A tag that this rank has used. */
typedef struct tag_entry {
    uint64_t tag;
    uint64_t next; /* next sequence number plus one; 0: the entry is empty */
    bool is_busy;
} tag_entry;

/* A hash table with open addressing. `size` is a power of two. Entries are never removed. */
typedef struct tag_table {
    pthread_mutex_t mutex; /* guards everything below */
    tag_entry *entries;
    size_t size;
    size_t used;        /* number of entries that contain a tag */
    uint64_t first;     /* sequence number of the first operation of a new tag */
    uint32_t in_flight; /* number of operations in flight, over all tags */
    uint32_t max_in_flight;
} tag_table;

#define TAGS_AT_FIRST 1024
/* size in bytes of a table that has not grown */
#define TAGS_BYTES ((int64_t)(TAGS_AT_FIRST * sizeof(tag_entry)))

/* tags_open() opens an empty table for at most max_in_flight operations at a time. Errors:
 * EPIC_ENOMEM. tags_close() frees the table, and does nothing for a table of zeros. */
epic_result tags_open(tag_table *table, uint32_t max_in_flight);
void tags_close(tag_table *table);

/* Begins an operation of the tag and stores its sequence number in *sequence. Errors, which
 * leave the table unchanged: EPIC_EINVAL (the tag has an operation in flight on this rank, or
 * max_in_flight operations are in flight), EPIC_ENOMEM. */
epic_result tags_begin(tag_table *table, uint64_t tag, uint64_t *sequence);

/* Returns the error that tags_begin() would now return for the tag, except EPIC_ENOMEM. */
epic_result tags_check(tag_table *table, uint64_t tag);

/* Ends the operation of the tag that is in flight, and begins the next operation of the tag, in
 * one step. Returns the sequence number of the new operation. */
uint64_t tags_continue(tag_table *table, uint64_t tag);

/* Refuses new operations until tags_restart(): sets max_in_flight to 0. Returns EPIC_EINVAL if
 * an operation is in flight. */
epic_result tags_pause(tag_table *table);
/* Makes every tag begin again at sequence number `first`. Requires that no operation is in
 * flight. */
void tags_forget(tag_table *table, uint64_t first);
/* Ends the effect of tags_pause(): sets the maximum number of operations in flight to
 * max_in_flight. */
void tags_restart(tag_table *table, uint32_t max_in_flight);

void tags_end(tag_table *table, uint64_t tag);

#endif
