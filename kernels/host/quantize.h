/* SPDX-License-Identifier: Apache-2.0 */
/* Quantizes rows to e4m3 with one scale per block of 128 or 32 elements.
 *
 * These rules complete those of epic.h:
 * - 1x128: max|x| / 448 is rounded to float32, and 0 becomes scale 1. x / scale is rounded
 *   to float32, then to e4m3.
 * - 1x32: the scale is the smallest 2^s with max|x| <= 448 * 2^s exactly, and s is at least
 *   -127. The code computes s from the bits of max|x|, because the exponent of a rounded
 *   quotient could be wrong by one.
 * - A block with a NaN or an infinity has the scale 0x7fc00000 (1x128) or 255 (1x32), and
 *   all its bytes are 0x7f. */
#ifndef EPIC_HOST_QUANTIZE_H
#define EPIC_HOST_QUANTIZE_H

#include "lanes.h"

#define MAX_BLOCK 128
#define NAN_BITS 0x7fc00000u
#define E8M0_ONE 127
#define E8M0_NAN 255

/* Returns the bits of the largest |x| of a block. Compares bits, whose order is that of the
 * floats, with NaN as the largest. */
INLINE uint32_t largest_bits(const float *x, int block)
{
    lanes max = lanes_of(0.0f);
    for (int i = 0; i < block; i += LANES) max = lanes_max_size(max, load_f32(x + i));
    return lanes_largest_bits(max);
}

/* Returns the scale of a block of 128 elements. `max`: bits of the block's largest |x|. */
INLINE float scale_1x128(uint32_t max)
{
    if (max >= INFINITY_BITS) return float_of(NAN_BITS);
    const float scale = float_of(max) / E4M3_MAX;
    return scale == 0.0f ? 1.0f : scale;
}

/* Returns the scale of a block of 32 elements as an e8m0 byte, an exponent. `max`: bits of the
 * block's largest |x|. The largest e4m3 value is 448 = 1.75 * 2^8. So the exponent of the scale
 * is the exponent of `max` minus 8, plus 1 if the mantissa of `max` is above 1.75. */
INLINE int scale_1x32(uint32_t max)
{
    if (max >= INFINITY_BITS) return E8M0_NAN;
    if (max == 0) return E8M0_ONE;
    const int scale = (int)(max >> 23) - 8 + ((max & 0x7fffff) > 0x600000);
    return scale < 0 ? 0 : scale;
}

/* Returns 1 / scale for an e8m0 scale. The scale is a power of two, so multiplying by 1 / scale
 * gives the same bits as dividing by the scale. */
INLINE float inverse_of_e8m0(int scale)
{
    return scale == E8M0_NAN ? float_of(NAN_BITS) : float_of((uint32_t)(254 - scale) << 23);
}

/* The next three functions quantize one whole block of a row: the 128 or 32 elements x, which
 * begin at index `at` of the row. They store the bytes to q, and the block's scale to its
 * element of `scales`, which has the scales of the whole row. */
INLINE void quantize_block_1x128(uint8_t *q, void *scales, int64_t at, const float *x)
{
    const float scale = scale_1x128(largest_bits(x, 128));
    memcpy((char *)scales + at / 128 * (int64_t)sizeof scale, &scale, sizeof scale);
    for (int i = 0; i < 128; i += LANES)
        store_e4m3(q + i, lanes_div(load_f32(x + i), lanes_of(scale)));
}

INLINE void quantize_block_1x32(uint8_t *q, void *scales, int64_t at, const float *x)
{
    const int scale = scale_1x32(largest_bits(x, 32));
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

/* Quantizes w times the last `count` elements of a row, which begin at index `at` and do not
 * fill a block of `block` elements. The block is filled up with zeros, which do not change its
 * scale. Some of them are computed as w * 0, which is NaN if w is not finite; in this case the
 * scale is NaN anyway. */
INLINE void quantize_short_block(uint8_t *q, void *scales, const void *row, float w,
                                 epic_type type, int64_t at, int64_t count, int block)
{
    float x[MAX_BLOCK] = {0.0f};
    uint8_t whole[MAX_BLOCK];
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = count - i < LANES ? count - i : LANES;
        store_f32(x + i, lanes_mul(lanes_of(w), load_tail(row, type, at + i, left)));
    }
    quantize_block(whole, scales, at, x, block);
    memcpy(q, whole, (size_t)count);
}

/* Quantizes w times each of the n elements of a row, in blocks of `block` elements. Stores n
 * bytes to q, and one scale per block to `scales`. */
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
