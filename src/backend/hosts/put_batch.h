/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels have shipped, in fewer and larger puts.  A heap is cut into *parcels*, of the size that
 * the net likes best.  Pieces of one are kept until all of it is there, or no more of it is expected,
 * or the net has nothing to do: then those that lie one after the other go in one put.  What lies at
 * the beginning of a heap is no row but what all else waits for, and overtakes rows. */
#ifndef EPIC_HOSTS_PUT_BATCH_H
#define EPIC_HOSTS_PUT_BATCH_H

#include <stdbool.h>
#include <stdint.h>

typedef struct put_batcher put_batcher;

typedef struct put_range { /* what a put takes */
    int host;
    uint64_t word;
    uint32_t words;
} put_range;

typedef enum put_batch_kind {
    BATCH_URGENT,   /* at the beginning of a heap, all of it or a part */
    BATCH_COMPLETE, /* a complete one, or as much of it as there will be */
    BATCH_PARTIAL
} put_batch_kind;

/* May a parcel of this kind, in so many puts, go to the host now? */
typedef bool put_batch_may_go(const void *self, int host, put_batch_kind kind, int puts);

/* Of heaps of so many words, the first `urgent_words` of them urgent.  NULL: no memory. */
put_batcher *put_batcher_new(int num_hosts, uint64_t heap_words, uint64_t urgent_words,
                             uint32_t parcel_words);
void put_batcher_free(put_batcher *all); /* NULL is allowed */

/* Is there room for a piece of so many words more?  Where all has been given there is room for 4 MB. */
bool put_batcher_has_room(const put_batcher *all, uint32_t words);

/* Has all been given? */
bool put_batcher_is_empty(const put_batcher *all);

bool put_batcher_is_urgent(const put_batcher *all, uint64_t word);

/* A piece more.  No word is in two of them. */
void put_batcher_add(put_batcher *all, int host, uint64_t word, uint32_t words);

/* What should go now, of what may: what is urgent, then complete parcels, then the oldest of the
 * others.  False: nothing. */
bool put_batcher_next(put_batcher *all, put_batch_may_go *may, const void *self,
                      put_range *out);

/* That one has been given. */
void put_batcher_mark_posted(put_batcher *all);

/* That one could not be given: it is the first again of those that may go. */
void put_batcher_put_back(put_batcher *all);

#endif
