/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints: a header, then every parameter, the experts by their global numbers, with its
 * moments.  Nothing in them depends on the number of ranks. */
#ifndef TRAIN_CHECKPOINT_H
#define TRAIN_CHECKPOINT_H

#include "model.h"

typedef struct checkpoint_header {
    char magic[8];
    uint32_t version, byte_order;
    int64_t hidden, inner, tokens, seed, steps;
    int64_t step;  /* steps done */
    int64_t drawn; /* positions drawn from the text */
    uint64_t text; /* its fingerprint */
    double rate;
    int64_t num_bytes; /* of the file */
    uint32_t pad;
    uint32_t sum; /* CRC-32 of all before */
} checkpoint_header;

/* Reads the header and verifies its fields, and lengths and checksums of the whole file; takes no
 * memory for what the file says; complains. */
bool checkpoint_look(const char *path, checkpoint_header *out);

/* Reads this rank's parameters.  Collective: true on all ranks, or false. */
bool checkpoint_load(const char *path, model *m);

/* Complains on rank 0 if the file could not be written.  Collective. */
bool checkpoint_test(const char *path, const group *g);

/* Writes to a temporary name, then renames: there is always a whole file.  Fills in what the
 * caller cannot know of the header.  Collective. */
bool checkpoint_save(const char *path, model *m, checkpoint_header header);

#endif
