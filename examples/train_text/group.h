/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's place in the run, and how it complains. */
#ifndef TRAIN_GROUP_H
#define TRAIN_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

typedef struct group {
    epic_context *ctx;
    int rank, num_ranks;
    bool cuda; /* the context is one of GPUs */
} group;

/* Says on stderr what is wrong.  False, so that callers can return it. */
bool complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* True if a call of the library went well; else complains with its sentence. */
bool works(const group *g, epic_result result, const char *what);

/* Zeroed memory, 64-byte aligned; ends the program if there is none. */
void *memory(int64_t bytes);

/* Adds floats over the ranks: leaf by leaf, in the tree that gives the same bits for every number
 * of ranks. */
bool sum_over_ranks(const group *g, float *data, int64_t count);

/* Complains on rank 0 and returns false on all ranks if `number` is not the same everywhere. */
bool all_equal(const group *g, uint64_t number, const char *what);

/* True on all ranks if `good` is true on all of them. */
bool all_good(const group *g, bool good);

#endif
