/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's place in the run, and how it reports errors. */
#ifndef TRAIN_GROUP_H
#define TRAIN_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

typedef struct group {
    epic_context *ctx;
    int rank, num_ranks;
    bool cuda; /* the context is on a GPU */
} group;

/* Prints an error to stderr. Returns false, so that callers can return it. */
bool complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Returns true if a call of the library succeeded. Else prints its error. */
bool works(const group *g, epic_result result, const char *what);

/* Returns zeroed memory, aligned to 64 bytes. Ends the program if there is no memory. */
void *memory(int64_t bytes);

/* Sums floats over the ranks in a fixed tree of leaves, so that the bits are the same for
 * every number of ranks. */
bool sum_over_ranks(const group *g, float *data, int64_t count);

/* Returns false on all ranks if `number` differs between ranks, and prints an error on rank
 * 0. */
bool all_equal(const group *g, uint64_t number, const char *what);

/* Returns true on all ranks if `good` is true on all of them. */
bool all_good(const group *g, bool good);

#endif
