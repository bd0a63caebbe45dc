/* SPDX-License-Identifier: Apache-2.0 */
/* Counter-based random numbers: number n of a stream is the same on every rank. */
#ifndef TRAIN_RANDOM_H
#define TRAIN_RANDOM_H

#include <stdint.h>

static inline uint64_t random_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint64_t random_at(uint64_t seed, uint64_t stream, uint64_t n)
{
    const uint64_t step = 0x9e3779b97f4a7c15u;
    return random_mix(random_mix(random_mix(seed + step) + (stream + 1) * step) +
                      (n + 1) * step);
}

/* Returns a number in [0, 1). */
static inline double random_unit(uint64_t seed, uint64_t stream, uint64_t n)
{
    return (double)(random_at(seed, stream, n) >> 11) * 0x1p-53;
}

/* Streams. Those of parameters begin at STREAM_PARAMETERS. */
enum { STREAM_TEXT = 0, STREAM_SAMPLES = 1, STREAM_PARAMETERS = 16 };

#endif
