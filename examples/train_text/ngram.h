/* SPDX-License-Identifier: Apache-2.0 */
/* The baseline of the model: an interpolated n-gram, which only counts.  With h the
 * bytes before c, and h' all of them but the farthest,
 *
 *     p(c | h) = (times(h c) + kinds(h) p(c | h')) / (times(h) + kinds(h))
 *
 * (Witten and Bell), where times counts in the training text and kinds(h) is how many different
 * bytes follow h there; for h without bytes, p is 1/256. */
#ifndef TRAIN_NGRAM_H
#define TRAIN_NGRAM_H

#include "text.h"

/* Number of bytes, including the predicted one; at most CONTEXT + 1. */
enum { NGRAM_ORDER = 6 };

typedef struct ngram_entry ngram_entry;

typedef struct ngram {
    ngram_entry *entries;
    uint64_t num_entries, num_used;
    int64_t num_trained; /* counted positions: fewer than the text has if the table is full */
} ngram;

/* Counts the training text of t. */
void ngram_open(ngram *g, const text *t);
void ngram_close(ngram *g);

/* Returns the cost of a byte in bits: -log2 of its probability. */
double ngram_bits(const ngram *g, const unsigned char *at);

#endif
