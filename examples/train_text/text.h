/* SPDX-License-Identifier: Apache-2.0 */
/* The text to learn from.  It is cut into chunks; every tenth is held out: nothing in it is ever
 * trained on.  A position is a byte to predict from the CONTEXT bytes before it, all of them in
 * one chunk. */
#ifndef TRAIN_TEXT_H
#define TRAIN_TEXT_H

#include <stdbool.h>
#include <stdint.h>

enum { CONTEXT = 16, CHUNK = 4096 };

typedef struct text {
    unsigned char *bytes;
    int64_t num_bytes;
    int num_files;
    int64_t num_training, num_held_out; /* positions */
    uint64_t fingerprint;               /* of all bytes */
} text;

/* Reads files and, recursively, the text files of folders.  No paths: this repository's own
 * documentation and sources.  Complains if there is too little. */
bool text_read(text *out, const char *const *paths, int num_paths);
void text_free(text *t);

/* The byte to predict; its context lies before it. */
const unsigned char *text_training(const text *t, int64_t position);
const unsigned char *text_held_out(const text *t, int64_t position);

#endif
