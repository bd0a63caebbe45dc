/* SPDX-License-Identifier: Apache-2.0 */
/* A baseline to which the model is compared: an interpolated n-gram (Witten and Bell), which
 * only counts.  p(c | h) is the probability of byte c after the bytes h:
 *
 *     p(c | h) = (times(h c) + kinds(h) p(c | h')) / (times(h) + kinds(h))
 *
 *     times(s)   how often the bytes s occur in the training text
 *     kinds(h)   how many different bytes follow h there
 *     h'         h without its first byte; if h is empty, p(c | h') is 1/256 */
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
