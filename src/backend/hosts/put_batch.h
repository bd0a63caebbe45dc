/* SPDX-License-Identifier: Apache-2.0 */
/* Joins the pieces that kernels post into fewer and larger puts.
 *
 * A piece is a range of words in the outbox, for one host. Inbox and outbox have the layout of
 * a heap. Each host's heap is divided into blocks of the size that the net prefers. A *batch*
 * collects the pieces of one block. It waits until the block is complete, until no more pieces
 * are expected, or until the net has little to do. Then each sequence of adjacent pieces is
 * sent as one put. The first blocks of a heap are urgent, and their batches are sent before
 * rows. They contain announcements and counts, for which all ranks wait.
 *
 * Only the proxy thread uses a batcher. */
#ifndef EPIC_HOSTS_PUT_BATCH_H
#define EPIC_HOSTS_PUT_BATCH_H

#include <stdbool.h>
#include <stdint.h>

typedef struct put_batcher put_batcher;

typedef struct put_range { /* the words that one put sends */
    int host;
    uint64_t word;
    uint32_t words;
} put_range;

/* The kinds of batches. Lower values are posted first. */
typedef enum put_batch_kind {
    BATCH_URGENT,   /* an urgent batch, complete or not */
    BATCH_COMPLETE, /* a batch of rows: complete, or no more pieces are expected */
    BATCH_PARTIAL   /* a batch of rows that may get more pieces */
} put_batch_kind;

/* The caller's decision: returns whether a batch of this kind may be sent to the host now.
 * Sending it takes `puts` puts. */
typedef bool put_batch_may_go(const void *self, int host, put_batch_kind kind, int puts);

/* Creates an empty batcher for heaps of `heap_words` words, of which the first `urgent_words`
 * are urgent. A batch has at most batch_words words. Returns NULL if memory is short. */
put_batcher *put_batcher_new(int num_hosts, uint64_t heap_words, uint64_t urgent_words,
                             uint32_t batch_words);
void put_batcher_free(put_batcher *all); /* NULL is allowed */

/* Returns whether a piece of `words` words can be added. */
bool put_batcher_has_room(const put_batcher *all, uint32_t words);

/* Returns whether all added pieces have been posted. */
bool put_batcher_is_empty(const put_batcher *all);

/* Returns whether a word of the heap belongs to an urgent batch. */
bool put_batcher_is_urgent(const put_batcher *all, uint64_t word);

/* Adds a piece of `words` words, which begins at `word` of the heap. The caller has checked
 * put_batcher_has_room(). No two pieces contain the same word. */
void put_batcher_add(put_batcher *all, int host, uint64_t word, uint32_t words);

/* Writes the next put that `may` allows to *out: urgent batches first, then complete ones, then
 * the oldest partial ones. Returns false if no batch may be sent. After each put the caller
 * calls one of the next two functions. */
bool put_batcher_next(put_batcher *all, put_batch_may_go *may, const void *self,
                      put_range *out);

/* Removes the put that put_batcher_next() returned from its batch, because the caller has
 * posted it. */
void put_batcher_mark_posted(put_batcher *all);

/* Keeps the put that put_batcher_next() returned, because the net had no room for it. Its batch
 * becomes the first of the ready list. */
void put_batcher_put_back(put_batcher *all);

#endif
