/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces device.c in builds without CUDA: every function reports an error. */
#include "device.h"

bool device_choose(int rank)
{
    return rank == 0 && complain("--device cuda: this program was built without CUDA");
}

device *device_open(model *m, int64_t tokens)
{
    (void)m;
    (void)tokens;
    return NULL;
}

void device_close(device *d)
{
    (void)d;
}

bool device_store(model *m)
{
    return m->device == NULL;
}

bool device_fetch(model *m)
{
    return m->device == NULL;
}

bool device_loss(model *m, const unsigned char *const *at, int64_t tokens, float *loss)
{
    (void)at;
    (void)tokens;
    (void)loss;
    return m->device == NULL;
}

bool device_gradients(model *m, const unsigned char *const *at, int64_t tokens)
{
    (void)at;
    (void)tokens;
    return m->device == NULL;
}

bool device_predict(model *m, const unsigned char *const *at, int64_t tokens, float *out)
{
    (void)at;
    (void)tokens;
    (void)out;
    return m->device == NULL;
}

bool device_optimize(model *m, const parameter *p, const float factors[3], const float betas[3])
{
    (void)p;
    (void)factors;
    (void)betas;
    return m->device == NULL;
}

bool device_sum(const group *g, float *data, int64_t count)
{
    (void)data;
    (void)count;
    return !g->cuda;
}

bool device_sum_gradients(model *m)
{
    return m->device == NULL;
}
