/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW, with a rate that rises from 0 and falls along a cosine. */
#ifndef TRAIN_OPTIMISER_H
#define TRAIN_OPTIMISER_H

#include "model.h"

/* The rate of step `step` of `steps`, both counted from 1. */
double optimiser_rate(double most, int64_t step, int64_t steps);

/* Moves all values of this rank along their gradients. */
void optimiser_step(model *m, double rate, int64_t step);

#endif
