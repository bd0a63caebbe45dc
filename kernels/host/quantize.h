/* SPDX-License-Identifier: Apache-2.0 */
/* Rows to e4m3 with a scale for each block.
 *
 * What the notes in epic.h leave open:
 *   - 1x128: max|x| / 448 is rounded to float32; where that gives 0 the scale is 1.  x / scale
 *     is rounded to float32, then to e4m3.
 *   - 1x32: the scale is the smallest 2^s with max|x| <= 448 * 2^s exactly, s no less than -127;
 *     no rounded quotient decides it.
 *   - a block with a NaN or an infinity has the scale 0x7fc00000 or 255, and all its q are 0x7f. */
#ifndef EPIC_HOST_QUANTIZE_H
#define EPIC_HOST_QUANTIZE_H

#include "lanes.h"

#define MAX_BLOCK 128
#define NAN_BITS 0x7fc00000u
#define E8M0_ONE 127
#define E8M0_NAN 255

/* The bits of the largest |x|: the bits of floats without sign are ordered as the floats are,
 * NaNs last. */
INLINE uint32_t max_bits(const float *x, int block)
{
    lanes max = lanes_of(0.0f);
    for (int i = 0; i < block; i += LANES) max = lanes_max_size(max, load_f32(x + i));
    return lanes_largest_bits(max);
}

INLINE float scale_1x128(uint32_t max)
{
    if (max >= INFINITY_BITS) return float_of(NAN_BITS);
    const float scale = float_of(max) / E4M3_MAX;
    return scale == 0.0f ? 1.0f : scale;
}

/* 448 is 1.75 * 2^8: the exponent of max less 8, one more if its mantissa is above 1.75. */
INLINE int scale_1x32(uint32_t max)
{
    if (max >= INFINITY_BITS) return E8M0_NAN;
    if (max == 0) return E8M0_ONE;
    const int scale = (int)(max >> 23) - 8 + ((max & 0x7fffff) > 0x600000);
    return scale < 0 ? 0 : scale;
}

/* 1 / scale, a power of two, so that multiplying by it is dividing by the scale. */
INLINE float inverse_of_e8m0(int scale)
{
    return scale == E8M0_NAN ? float_of(NAN_BITS) : float_of((uint32_t)(254 - scale) << 23);
}

INLINE void quantize_block_1x128(uint8_t *q, void *scales, int64_t at, const float *x)
{
    const float scale = scale_1x128(max_bits(x, 128));
    memcpy((char *)scales + at / 128 * (int64_t)sizeof scale, &scale, sizeof scale);
    for (int i = 0; i < 128; i += LANES)
        store_e4m3(q + i, lanes_div(load_f32(x + i), lanes_of(scale)));
}

INLINE void quantize_block_1x32(uint8_t *q, void *scales, int64_t at, const float *x)
{
    const int scale = scale_1x32(max_bits(x, 32));
    const float inverse = inverse_of_e8m0(scale);
    ((uint8_t *)scales)[at / 32] = (uint8_t)scale;
    for (int i = 0; i < 32; i += LANES)
        store_e4m3(q + i, lanes_mul(load_f32(x + i), lanes_of(inverse)));
}

INLINE void quantize_block(uint8_t *q, void *scales, int64_t at, const float *x, int block)
{
    if (block == 128)
        quantize_block_1x128(q, scales, at, x);
    else
        quantize_block_1x32(q, scales, at, x);
}

/* The last block of a row; what it lacks counts as 0, which decides nothing: an infinite w makes
 * a NaN of it, but then the elements that are there are not finite either. */
INLINE void quantize_short_block(uint8_t *q, void *scales, const void *row, float w,
                                 epic_type type, int64_t at, int64_t count, int block)
{
    float x[MAX_BLOCK] = {0.0f};
    uint8_t whole[MAX_BLOCK];
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = count - i < LANES ? count - i : LANES;
        store_f32(x + i, lanes_mul(lanes_of(w), load_some(row, type, at + i, left)));
    }
    quantize_block(whole, scales, at, x, block);
    memcpy(q, whole, (size_t)count);
}

/* x = w * row, block by block. */
INLINE void quantize_of(uint8_t *q, void *scales, const void *row, float w, epic_type type,
                        int64_t n, int block)
{
    float x[MAX_BLOCK];
    int64_t at = 0;
    for (; at + block <= n; at += block) {
        for (int i = 0; i < block; i += LANES)
            store_f32(x + i, lanes_mul(lanes_of(w), load_lanes(row, type, at + i)));
        quantize_block(q + at, scales, at, x, block);
    }
    if (at < n) quantize_short_block(q + at, scales, row, w, type, at, n - at, block);
}

#endif
