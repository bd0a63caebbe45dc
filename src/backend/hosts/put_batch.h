/* SPDX-License-Identifier: Apache-2.0 */
/* Joins the pieces that kernels post into fewer and larger puts.
 *
 * The heap of a host is cut into batches of the size that the net prefers. The pieces of a
 * batch are kept until the batch is complete, until no more pieces of it are expected, or until
 * the net has nothing to do. Then adjacent pieces go in one put. The first batches of a heap
 * are urgent: they hold announcements and counts, for which everything else waits, so they
 * overtake rows. */
#ifndef EPIC_HOSTS_PUT_BATCH_H
#define EPIC_HOSTS_PUT_BATCH_H

#include <stdbool.h>
#include <stdint.h>

typedef struct put_batcher put_batcher;

typedef struct put_range { /* what one put sends */
    int host;
    uint64_t word;
    uint32_t words;
} put_range;

/* The kinds of batches, from the first to go to the last. */
typedef enum put_batch_kind {
    BATCH_URGENT,   /* one of the urgent batches, complete or not */
    BATCH_COMPLETE, /* complete, or no more pieces are expected */
    BATCH_PARTIAL
} put_batch_kind;

/* Returns whether a batch of this kind, in so many puts, may go to the host now. */
typedef bool put_batch_may_go(const void *self, int host, put_batch_kind kind, int puts);

/* Makes an empty batcher for heaps of `heap_words` words, of which the first `urgent_words` are
 * urgent. Returns NULL without memory. */
put_batcher *put_batcher_new(int num_hosts, uint64_t heap_words, uint64_t urgent_words,
                             uint32_t parcel_words);
void put_batcher_free(put_batcher *all); /* NULL is allowed */

/* Returns whether a piece of so many words fits. An empty batcher has room for 4 MB. */
bool put_batcher_has_room(const put_batcher *all, uint32_t words);

/* Returns whether everything added has been posted. */
bool put_batcher_is_empty(const put_batcher *all);

/* Returns whether a word of the heap belongs to an urgent batch. */
bool put_batcher_is_urgent(const put_batcher *all, uint64_t word);

/* Adds a piece. The caller has checked the room. No word is in two pieces. */
void put_batcher_add(put_batcher *all, int host, uint64_t word, uint32_t words);

/* Returns the next put of those that `may` allows: urgent batches first, then complete ones,
 * then the oldest of the others. Returns false if no batch may go. After a put the caller calls
 * one of the next two functions. */
bool put_batcher_next(put_batcher *all, put_batch_may_go *may, const void *self,
                      put_range *out);

/* The put that put_batcher_next() returned was posted. */
void put_batcher_mark_posted(put_batcher *all);

/* The put that put_batcher_next() returned could not be posted. Its batch becomes the first
 * that may go. */
void put_batcher_put_back(put_batcher *all);

#endif
