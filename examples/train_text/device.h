/* SPDX-License-Identifier: Apache-2.0 */
/* --device cuda: the whole model on a GPU. Rows and the experts' weights are bf16,
 * everything else is float32. The host draws the text, has parameters at the beginning, in
 * checkpoints and at the end, and receives the sums of each step. Builds without CUDA use
 * device_none.c, which reports an error. */
#ifndef TRAIN_DEVICE_H
#define TRAIN_DEVICE_H

#include "model.h"

/* Chooses this process's GPU by its rank. Prints an error if there is none. */
bool device_choose(int rank);

/* Sets the layer up for the GPU and allocates memory. Returns NULL after an error, which it
 * prints. */
device *device_open(model *m, int64_t tokens);
void device_close(device *d);

/* Copy parameters and moments from the host's arrays or to them. */
bool device_store(model *m);
bool device_fetch(model *m);

/* These do on the GPU what the functions without "device_" in model.h, optimizer.h and
 * group.h do. */
bool device_loss(model *m, const unsigned char *const *at, int64_t tokens, float *loss);
bool device_gradients(model *m, const unsigned char *const *at, int64_t tokens);
bool device_predict(model *m, const unsigned char *const *at, int64_t tokens, float *out);
bool device_optimize(model *m, const parameter *p, const float factors[3],
                     const float betas[3]);
bool device_sum(const group *g, float *data, int64_t count);

/* Sums gradients and m->sums over the ranks, and copies the sums to the host. */
bool device_sum_gradients(model *m);

#endif
