/* SPDX-License-Identifier: Apache-2.0 */
/* The run of one rank, from opening its context to closing it. */
#ifndef TRAIN_TRAIN_H
#define TRAIN_TRAIN_H

#include "model.h"
#include "options.h"
#include "text.h"

enum { EXIT_GOOD = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

/* Results by which two runs are compared. */
typedef struct outcome {
    float *losses;   /* losses of each step; the caller frees them */
    float *balances; /* [LAYERS] of each step; the caller frees them */
    int64_t num_steps;
    float *dense; /* dense parameters at the end; the caller frees them */
    int64_t dense_count;
} outcome;

/* Trains as a rank of the bootstrap (NULL: as the only rank). With `out`, trains without
 * printing. Otherwise prints progress, samples and pictures. Returns the exit status. */
int train(const options *o, const text *t, const epic_bootstrap *bootstrap, outcome *out);
void outcome_free(outcome *out);

/* Trains with all ranks, then with rank 0 alone, and compares the results. Returns the exit
 * status. */
int check(const options *o, const text *t, const epic_bootstrap *bootstrap);

/* Returns how often Ctrl-C was pressed. */
int num_interrupts(void);

/* Prints samples of text that the model writes after step `step`, on rank 0's stdout. */
bool write_samples(model *m, const text *t, int64_t seed, int64_t num_bytes);

#endif
