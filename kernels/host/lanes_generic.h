/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes of float32 for any processor: one; the compiler makes of it what it can.  fma may be a
 * call into libm: right, but slow. */
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

/* The larger of |a| and |b| by their bits: a NaN is above all. */
INLINE lanes lanes_max_size(lanes a, lanes b)
{
    const uint32_t size_a = bits_of(a) & 0x7fffffff, size_b = bits_of(b) & 0x7fffffff;
    return float_of(size_a > size_b ? size_a : size_b);
}

/* The largest bits of lanes without sign. */
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
