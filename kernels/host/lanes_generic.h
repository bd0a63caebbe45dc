/* SPDX-License-Identifier: Apache-2.0 */
/* A "vector" of one float32, for any processor. The compiler may vectorize loops over such
 * vectors. On processors without an FMA instruction lanes_fma() calls libm, which is correct
 * but slow. */
#ifndef EPIC_HOST_LANES_H
#define EPIC_HOST_LANES_H

#include "convert.h"

#define LANES 1
#define STRIP_LANES 64

typedef float lanes;

INLINE lanes load_f32(const void *from)
{
    float x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE lanes load_bf16(const void *from)
{
    uint16_t x;
    memcpy(&x, from, sizeof x);
    return float_of_bf16(x);
}

INLINE lanes load_f16(const void *from)
{
    uint16_t x;
    memcpy(&x, from, sizeof x);
    return float_of_f16(x);
}

INLINE void store_f32(void *to, lanes x)
{
    memcpy(to, &x, sizeof x);
}

INLINE void store_bf16(void *to, lanes x)
{
    const uint16_t narrow = bf16_of_float(x);
    memcpy(to, &narrow, sizeof narrow);
}

INLINE void store_f16(void *to, lanes x)
{
    const uint16_t narrow = f16_of_float(x);
    memcpy(to, &narrow, sizeof narrow);
}

INLINE void store_e4m3(void *to, lanes x)
{
    const uint8_t narrow = e4m3_of_float(x);
    memcpy(to, &narrow, sizeof narrow);
}

/* Returns the larger of |a| and |b|, compared by their bits. NaN counts as the largest. */
INLINE lanes lanes_max_size(lanes a, lanes b)
{
    const uint32_t size_a = bits_of(a) & 0x7fffffff, size_b = bits_of(b) & 0x7fffffff;
    return float_of(size_a > size_b ? size_a : size_b);
}

/* Returns the bits of `a`, whose sign bit must not be set. */
INLINE uint32_t lanes_largest_bits(lanes a)
{
    return bits_of(a);
}

INLINE lanes lanes_div(lanes a, lanes b)
{
    return a / b;
}

INLINE lanes lanes_of(float x)
{
    return x;
}

INLINE lanes lanes_add(lanes a, lanes b)
{
    return a + b;
}

INLINE lanes lanes_mul(lanes a, lanes b)
{
    return a * b;
}

INLINE lanes lanes_fma(lanes a, lanes b, lanes sum)
{
    return __builtin_fmaf(a, b, sum);
}

#endif
