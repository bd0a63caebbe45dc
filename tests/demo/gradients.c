/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the gradients of examples/train_text with differences of its loss, one parameter at
 * a time: a step of length e along gradient g changes the loss by e |g|. Losses are float32. A
 * long step may move a choice to another expert, where the loss jumps. Few tokens and a gate
 * with clear preferences make this rare. The test tries several e, and the best must be correct
 * within 1 %. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../examples/train_text/model.h"
#include "../../examples/train_text/product.h"
#include "../../examples/train_text/random.h"

enum { TOKENS = 16, HIDDEN = 32, INNER = 48, TRIES = 6 };

static unsigned char bytes[TOKENS * CONTEXT + CONTEXT];
static const unsigned char *at[TOKENS];

/* Returns the whole loss: that of the text plus the balance loss. */
static double loss_of(model *m)
{
    if (!model_gradients(m, at, TOKENS)) exit(1);
    double loss = m->sums[SUM_LOSS];
    for (int layer = 0; layer < LAYERS; layer++) loss += m->sums[SUM_BALANCE + layer];
    return loss;
}

static double loss_along(model *m, const parameter *p, const float *value,
                         const float *gradient, double step)
{
    for (int64_t i = p->offset; i < p->offset + p->count; i++)
        m->value[i] = (float)(value[i] + step * gradient[i]);
    const double loss = loss_of(m);
    memcpy(m->value + p->offset, value + p->offset, (size_t)p->count * sizeof *value);
    return loss;
}

static int check_parameter(model *m, int number, const float *value, const float *gradient)
{
    const parameter *p = &m->parameters[number];
    double square = 0, best = INFINITY;
    for (int64_t i = p->offset; i < p->offset + p->count; i++)
        square += (double)gradient[i] * gradient[i];
    if (square == 0 && number >= UP) return 0; /* no token has chosen the expert */
    for (int t = 0; t < TRIES; t++) {
        const double step = 0.3 / pow(3, t) / (sqrt(square) + 1e-30);
        const double change =
            loss_along(m, p, value, gradient, step) - loss_along(m, p, value, gradient, -step);
        const double off = fabs(change / (2 * step * square) - 1);
        if (off < best) best = off;
    }
    if (best <= 0.01) return 0;
    fprintf(stderr, "%s: |gradient|^2 %g, off by %g\n", p->name, square, best);
    return 1;
}

int main(void)
{
    group s = {.num_ranks = 1};
    const epic_config config = model_config(1, HIDDEN, TOKENS);
    int bad = 0;
    if (!works(&s, epic_open(&s.ctx, NULL, &config), "open")) return 1;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(random_at(1, 1, i) % 7 + i % 3);
    for (int t = 0; t < TOKENS; t++) at[t] = bytes + CONTEXT * (t + 1);
    product_start();
    model *m = model_open(&s, HIDDEN, INNER, TOKENS, 1);
    if (!m) return 1;
    for (int n = GATE; n < GATE + LAYERS; n++)
        for (int64_t i = 0; i < m->parameters[n].count; i++)
            m->value[m->parameters[n].offset + i] *= 20;
    float *value = memory(m->count * 4), *gradient = memory(m->count * 4);
    loss_of(m);
    memcpy(value, m->value, (size_t)m->count * sizeof *value);
    memcpy(gradient, m->gradient, (size_t)m->count * sizeof *gradient);
    for (int n = 0; n < NUM_PARAMETERS; n++) bad += check_parameter(m, n, value, gradient);
    free(value);
    free(gradient);
    model_close(m);
    epic_close(s.ctx);
    return bad > 0;
}
