/* SPDX-License-Identifier: Apache-2.0 */
/* --device cuda: the whole model on a GPU, rows and the experts' weights in bf16, everything else
 * in float32.  The host draws the text, knows parameters where it begins, saves or ends, and learns
 * the sums of each step.  A build without CUDA has device_none.c, which says so. */
#ifndef TRAIN_DEVICE_H
#define TRAIN_DEVICE_H

#include "model.h"

/* This process's GPU, for its rank; complains if there is none. */
bool device_choose(int rank);

/* Sets the layer up for it and takes its memory; NULL, having complained. */
device *device_open(model *m, int64_t tokens);
void device_close(device *d);

/* Parameters and moments, from the host's arrays or to them. */
bool device_store(model *m);
bool device_fetch(model *m);

/* As the functions of model.h, optimizer.h and group.h without the word. */
bool device_loss(model *m, const unsigned char *const *at, int64_t tokens, float *loss);
bool device_gradients(model *m, const unsigned char *const *at, int64_t tokens);
bool device_predict(model *m, const unsigned char *const *at, int64_t tokens, float *out);
bool device_optimize(model *m, const parameter *p, const float factors[3],
                     const float betas[3]);
bool device_sum(const group *g, float *data, int64_t count);

/* Adds gradients and m->sums over the ranks; the sums come back. */
bool device_sum_gradients(model *m);

#endif
