/* SPDX-License-Identifier: Apache-2.0 */
/* Text that the model writes: LEAVES samples at once, equally many on each rank. Every block
 * of a pass then has one token, and the samples are the same for every number of ranks. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"
#include "train.h"

static const double temperature = 0.7;

enum { NUM_SHOWN = 4 };

/* Draws a byte with the probabilities softmax(logits / temperature). u: a random number in [0,
 * 1). */
static int choose(const float *logits, double u)
{
    double sum = 0, most = logits[0], weights[BYTES];
    for (int i = 1; i < BYTES; i++) most = logits[i] > most ? logits[i] : most;
    for (int i = 0; i < BYTES; i++) sum += weights[i] = exp((logits[i] - most) / temperature);
    int i = 0;
    for (double left = u * sum - weights[0]; left >= 0 && i < BYTES - 1; left -= weights[i])
        i++;
    return i;
}

static void print_bytes(const float *bytes, int64_t num)
{
    for (int64_t i = 0; i < num; i++) {
        const int c = (int)bytes[i];
        if (c == '\n')
            printf("\n      ");
        else
            putchar(c == '\t' || (c >= 32 && c < 127) ? c : '?');
    }
}

static void print_samples(const float *samples, int64_t length)
{
    printf("\nsamples: held-out text, then │ and what the model writes\n");
    for (int i = 0; i < NUM_SHOWN; i++) {
        const float *sample = samples + i * (LEAVES / NUM_SHOWN) * length;
        printf("\n  %d.  ", i + 1);
        print_bytes(sample, CONTEXT);
        printf("│");
        print_bytes(sample + CONTEXT, length - CONTEXT);
        printf("\n");
    }
}

/* Writes this rank's samples, from number `first` on. */
static bool write_all(model *m, uint64_t seed, int64_t first, int64_t here,
                      unsigned char *bytes, int64_t length)
{
    const unsigned char *at[LEAVES];
    float logits[LEAVES * BYTES];
    for (int64_t i = CONTEXT; i < length; i++) {
        for (int64_t s = 0; s < here; s++) at[s] = bytes + s * length + i;
        if (!model_predict(m, at, here, logits)) return false;
        for (int64_t s = 0; s < here; s++) {
            const uint64_t n = (uint64_t)((first + s) * length + i);
            bytes[s * length + i] =
                (unsigned char)choose(logits + s * BYTES, random_unit(seed, STREAM_SAMPLES, n));
        }
    }
    return true;
}

bool write_samples(model *m, const text *t, int64_t seed, int64_t num_bytes)
{
    const int64_t length = CONTEXT + num_bytes, here = LEAVES / m->group.num_ranks;
    const int64_t first = m->group.rank * here;
    unsigned char *bytes = memory(here * length);
    float *all = memory(LEAVES * length * 4);
    for (int64_t s = 0; s < here; s++) {
        const int64_t position = (2 * (first + s) + 1) * t->num_held_out / (2 * LEAVES);
        memcpy(bytes + s * length, text_held_out(t, position) - CONTEXT, CONTEXT);
    }
    bool good = write_all(m, (uint64_t)seed, first, here, bytes, length);
    for (int64_t i = 0; i < here * length; i++) all[first * length + i] = bytes[i];
    good = good && sum_over_ranks(&m->group, all, LEAVES * length);
    if (good && m->group.rank == 0) print_samples(all, length);
    free(bytes);
    free(all);
    return good;
}
