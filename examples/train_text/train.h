/* SPDX-License-Identifier: Apache-2.0 */
/* A run of one rank, from opening its context to closing it. */
#ifndef TRAIN_TRAIN_H
#define TRAIN_TRAIN_H

#include "model.h"
#include "options.h"
#include "text.h"

enum { EXIT_GOOD = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

/* What two runs are compared by. */
typedef struct outcome {
    float *losses;   /* of each step; to be freed */
    float *balances; /* [LAYERS] of each step; to be freed */
    int64_t num_steps;
    float *dense; /* the dense parameters at the end; to be freed */
    int64_t dense_count;
} outcome;

/* Trains as rank of the bootstrap, NULL: as the only one; returns the exit status.  With `out`
 * only trains and says nothing; else tells about it, shows samples and pictures. */
int train(const options *o, const text *t, const epic_bootstrap *bootstrap, outcome *out);
void outcome_free(outcome *out);

/* Trains with all ranks, then rank 0 alone, and compares: the exit status. */
int check(const options *o, const text *t, const epic_bootstrap *bootstrap);

/* Set by Ctrl-C. */
int num_interrupts(void);

/* Samples of text that the model writes, on rank 0's stdout; after step `step` done. */
bool write_samples(model *m, const text *t, int64_t seed, int64_t num_bytes);

#endif
