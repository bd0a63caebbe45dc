/* SPDX-License-Identifier: Apache-2.0 */
/* The text to learn from. It is cut into chunks. Every tenth chunk is held out and never
 * trained on. A position is a byte to predict from the CONTEXT bytes before it, all of them
 * in one chunk. */
#ifndef TRAIN_TEXT_H
#define TRAIN_TEXT_H

#include <stdbool.h>
#include <stdint.h>

enum { CONTEXT = 16, CHUNK = 4096 };

typedef struct text {
    unsigned char *bytes;
    int64_t num_bytes;
    int num_files;
    int64_t num_training, num_held_out; /* numbers of positions */
    uint64_t fingerprint;               /* hash of all bytes */
} text;

/* Reads files and, recursively, the text files of folders. Without paths: this repository's
 * documentation and sources. Prints an error if there is too little text. */
bool text_read(text *out, const char *const *paths, int num_paths);
void text_free(text *t);

/* Returns the byte to predict at a position. Its context lies before it. */
const unsigned char *text_training(const text *t, int64_t position);
const unsigned char *text_held_out(const text *t, int64_t position);

#endif
