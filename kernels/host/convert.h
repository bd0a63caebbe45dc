/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that convert one element between float32 and narrower types, by integer operations
 * on its bits. T_of_float() converts a float32 to type T, and float_of_T() converts it back.
 * They round to nearest even and keep subnormals and -0. A NaN becomes a quiet NaN. */
#ifndef EPIC_HOST_CONVERT_H
#define EPIC_HOST_CONVERT_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* bits of infinity in float32; larger values, without the sign, are those of a NaN */
#define INFINITY_BITS 0x7f800000u
#define E4M3_MAX 448.0f
#define E4M3_NAN 0x7fu

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns the bits of a finite value without the lowest `dropped` bits, rounded to nearest
 * even. A carry from the mantissa into the exponent gives the correct result. */
INLINE uint32_t round_bits(uint32_t bits, unsigned dropped)
{
    return (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
}

INLINE float float_of_bf16(uint16_t x)
{
    return float_of((uint32_t)x << 16);
}

INLINE uint16_t bf16_of_float(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t quiet = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > INFINITY_BITS ? quiet : round_bits(bits, 16));
}

INLINE float float_of_f16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    const uint32_t size = x & 0x7fff;
    if (size > 0x7c00) return float_of(sign | 0x7fc00000 | (size & 0x3ff) << 13);
    if (size == 0x7c00) return float_of(sign | INFINITY_BITS);
    if (size < 0x400) return float_of(sign | bits_of((float)size * 0x1p-24f));
    return float_of(sign | ((size << 13) + (112u << 23)));
}

INLINE uint16_t f16_of_float(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t size = bits & 0x7fffffff;
    if (size > INFINITY_BITS) return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff));
    if (size >= bits_of(65520.0f)) return (uint16_t)(sign | 0x7c00);
    /* Values below 2^-14 are subnormal in float16: multiples of 2^-24. Adding 1/2 rounds to
     * such a multiple, because float32 values next to 1/2 are 2^-24 apart. */
    if (size < bits_of(0x1p-14f))
        return (uint16_t)(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));
    return (uint16_t)(sign | (round_bits(size, 13) - (112u << 10)));
}

/* Converts to e4m3 with saturation: infinity and values above 448 become 448. */
INLINE uint8_t e4m3_of_float(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t sign = bits >> 24 & 0x80;
    const uint32_t size = bits & 0x7fffffff;
    const uint32_t clamped = size < bits_of(E4M3_MAX) ? size : bits_of(E4M3_MAX);
    const uint32_t normal = round_bits(clamped, 20) - (120u << 3);
    /* Values below 2^-6 are subnormal in e4m3: multiples of 2^-9. Adding 2^14 rounds to such a
     * multiple, because float32 values next to 2^14 are 2^-9 apart. */
    const uint32_t small = bits_of(float_of(clamped) + 0x1p14f) - bits_of(0x1p14f);
    const uint32_t code = clamped < bits_of(0x1p-6f) ? small : normal;
    return (uint8_t)(size > INFINITY_BITS ? E4M3_NAN : sign | code);
}

INLINE float float_of_e4m3(uint8_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x80) << 24;
    const uint32_t size = x & 0x7f;
    if (size == E4M3_NAN) return float_of(0x7fc00000);
    if (size < 8) return float_of(sign | bits_of((float)size * 0x1p-9f));
    return float_of(sign | ((size << 20) + (120u << 23)));
}

INLINE double double_of_e8m0(uint8_t x)
{
    const uint64_t bits = x == 255 ? 0x7ff8000000000000u : (uint64_t)(1023 - 127 + x) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
