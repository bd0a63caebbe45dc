/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW, with a learning rate that rises from 0 and then falls along a cosine. */
#ifndef TRAIN_OPTIMIZER_H
#define TRAIN_OPTIMIZER_H

#include "model.h"

/* Returns the learning rate of step `step` of `steps`, both counted from 1. */
double optimizer_rate(double most, int64_t step, int64_t steps);

/* Updates all values of this rank by their gradients. */
bool optimizer_step(model *m, double rate, int64_t step);

#endif
