/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints. A file has a header, then every parameter with its moments. Experts are in the
 * order of their global numbers, so the file does not depend on the number of ranks. */
#ifndef TRAIN_CHECKPOINT_H
#define TRAIN_CHECKPOINT_H

#include "model.h"

typedef struct checkpoint_header {
    char magic[8];
    uint32_t version, byte_order;
    int64_t hidden, inner, tokens, seed, steps;
    int64_t step;  /* number of steps done */
    int64_t drawn; /* number of positions drawn from the text */
    uint64_t text; /* fingerprint of the text */
    double rate;
    int64_t num_bytes; /* size of the file */
    uint32_t pad;
    uint32_t sum; /* CRC-32 of the fields above */
} checkpoint_header;

/* Reads the header. Verifies its fields, and the length and checksums of the whole file. Never
 * allocates memory of a size that the file contains. Prints an error if it returns false. */
bool checkpoint_look(const char *path, checkpoint_header *out);

/* Reads this rank's parameters. Collective. Returns the same on all ranks. */
bool checkpoint_load(const char *path, model *m);

/* Tests whether the file can be written. If not, prints an error on rank 0 and returns false.
 * Collective. */
bool checkpoint_test(const char *path, const group *g);

/* Writes to a temporary name and renames the file, so that a complete file exists at any
 * time. Fills in the header's sizes and sums. Collective. */
bool checkpoint_save(const char *path, model *m, checkpoint_header header);

#endif
