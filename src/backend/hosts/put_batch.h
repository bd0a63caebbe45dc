/* SPDX-License-Identifier: Apache-2.0 */
/* Joins the pieces that kernels post into fewer and larger puts.
 *
 * A *put* copies words from this rank's outbox into the inbox of a peer (net/net.h). A *piece*
 * is a range of words of 8 bytes in the outbox that a kernel wants to send to the same offset
 * of one host's inbox. Outbox and inbox have the layout of a heap, the receive buffer of a rank
 * in device memory. The layout is divided into *blocks* of the size that the network engine
 * prefers. A *batch* collects the pieces of one block for one host. It waits until it has all
 * words of the block, until no more pieces are expected, or until the net has little to do.
 * Then each range of adjacent words in the batch is sent as one put.
 *
 * The first blocks of a heap are urgent and are sent first. They contain announcements and
 * counts, for which all ranks wait. The other blocks contain rows.
 *
 * A *batcher* holds the batches of one rank. Only the proxy thread uses it. */
#ifndef EPIC_HOSTS_PUT_BATCH_H
#define EPIC_HOSTS_PUT_BATCH_H

#include <stdbool.h>
#include <stdint.h>

typedef struct put_batcher put_batcher;

/* The words that one put sends: `words` words of the heap, starting at word `word`. */
typedef struct put_range {
    int host;
    uint64_t word;
    uint32_t words;
} put_range;

/* The kinds of batches. Lower values are posted first. */
typedef enum put_batch_kind {
    BATCH_URGENT, /* a batch of an urgent block, complete or not */
    /* a batch of rows that is complete, or for which no more pieces are expected */
    BATCH_COMPLETE,
    BATCH_PARTIAL /* a batch of rows that may get more pieces */
} put_batch_kind;

/* A function of the caller that returns whether a batch of this kind may be sent to the host
 * now. The batch needs at most `puts` puts. `self` is the argument `self` of
 * put_batcher_next(). */
typedef bool put_batch_may_go(const void *self, int host, put_batch_kind kind, int puts);

/* Creates an empty batcher for heaps of `heap_words` words, of which the first `urgent_words`
 * are urgent. batch_words is the number of words in a block. Returns NULL if out of memory. */
put_batcher *put_batcher_new(int num_hosts, uint64_t heap_words, uint64_t urgent_words,
                             uint32_t batch_words);
void put_batcher_free(put_batcher *all); /* NULL is allowed */

/* Returns whether there are enough free batches to add a piece of `words` words. */
bool put_batcher_has_room(const put_batcher *all, uint32_t words);

/* Returns whether all added pieces have been posted. */
bool put_batcher_is_empty(const put_batcher *all);

bool put_batcher_is_urgent(const put_batcher *all, uint64_t word);

/* Adds a piece for a host: `words` words of the heap, starting at word `word`. Requires that
 * put_batcher_has_room() has returned true for this number of words. Pieces for one host that
 * are not posted yet must not overlap. */
void put_batcher_add(put_batcher *all, int host, uint64_t word, uint32_t words);

/* Writes the next put to *out. Considers only batches for which may() returns true: first
 * urgent batches, then complete batches of rows, then partial batches of rows. Within each
 * kind, older batches come first. Returns false if may() allows no batch. If this function
 * returns true, the caller must next call put_batcher_mark_posted() or
 * put_batcher_put_back(). */
bool put_batcher_next(put_batcher *all, put_batch_may_go *may, const void *self,
                      put_range *out);

/* Removes from the batch the words of the put that put_batcher_next() returned. Called after
 * the put was posted. */
void put_batcher_mark_posted(put_batcher *all);

/* Keeps the words of the put that put_batcher_next() returned. Called if the net did not accept
 * the put. The batch becomes the next batch of its kind to be posted. */
void put_batcher_put_back(put_batcher *all);

#endif
