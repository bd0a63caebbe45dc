/* SPDX-License-Identifier: Apache-2.0 */
/* What the model has to beat: an interpolated n-gram, which counts and learns nothing.  With h the
 * bytes before c, and h' all of them but the farthest,
 *
 *     p(c | h) = (times(h c) + kinds(h) p(c | h')) / (times(h) + kinds(h))
 *
 * (Witten and Bell), where times counts in the training text and kinds(h) is how many different
 * bytes follow h there; at the end stands 1/256 for every byte. */
#ifndef TRAIN_NGRAM_H
#define TRAIN_NGRAM_H

#include "text.h"

enum { NGRAM_ORDER = 6 }; /* the byte itself among them; at most CONTEXT + 1 */

typedef struct ngram_entry ngram_entry;

typedef struct ngram {
    ngram_entry *entries;
    uint64_t num_entries, num_used;
    int64_t num_trained; /* positions: fewer than the text has if the table is full */
} ngram;

/* Counts the training text of t. */
void ngram_open(ngram *g, const text *t);
void ngram_close(ngram *g);

/* What it pays for a byte, in bits. */
double ngram_bits(const ngram *g, const unsigned char *at);

#endif
