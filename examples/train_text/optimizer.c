/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW. It works element by element, so every rank computes the same bits for its elements. */
#include "optimizer.h"

#include <math.h>

#include "device.h"

static const double least_share = 0.1, warm_up_share = 0.05, decay = 0.01;
static const float beta1 = 0.9f, beta2 = 0.98f, epsilon = 1e-8f;

double optimizer_rate(double most, int64_t step, int64_t steps)
{
    const double warm_up = ceil(warm_up_share * (double)steps), pi = acos(-1);
    if ((double)step <= warm_up) return most * (double)step / warm_up;
    const double way = ((double)step - warm_up) / ((double)steps - warm_up);
    return most * (least_share + (1 - least_share) * 0.5 * (1 + cos(pi * way)));
}

static void move(float *restrict value, float *restrict first, float *restrict second,
                 const float *restrict gradient, int64_t count, const float factors[3])
{
    const float keep = factors[0], rate = factors[1], unbias2 = factors[2];
    for (int64_t i = 0; i < count; i++) {
        const float g = gradient[i];
        first[i] = beta1 * first[i] + (1 - beta1) * g;
        second[i] = beta2 * second[i] + (1 - beta2) * (g * g);
        value[i] = keep * value[i] - rate * first[i] / (sqrtf(second[i] * unbias2) + epsilon);
    }
}

bool optimizer_step(model *m, double rate, int64_t step)
{
    const double unbias1 = 1 / (1 - pow(beta1, (double)step));
    const double unbias2 = 1 / (1 - pow(beta2, (double)step));
    const float betas[3] = {beta1, beta2, epsilon};
    for (int n = 0; n < NUM_PARAMETERS; n++) {
        const parameter *p = &m->parameters[n];
        const float factors[3] = {p->decays ? (float)(1 - rate * decay) : 1,
                                  (float)(rate * unbias1), (float)unbias2};
        if (p->offset < 0) continue;
        if (!m->device)
            move(m->value + p->offset, m->first + p->offset, m->second + p->offset,
                 m->gradient + p->offset, p->count, factors);
        else if (!device_optimize(m, p, factors, betas))
            return false;
    }
    return true;
}
