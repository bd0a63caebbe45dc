/* SPDX-License-Identifier: Apache-2.0 */
/* Implements functions such as exp(), from which host code and CUDA kernels compute scores.
 *
 * The float32 functions use only additions, multiplications and divisions, in a fixed order and
 * without fused operations. So every compiler and device computes the same bits, and chooses
 * the same experts. Their error is below 2 units in the last place. The float64 functions call
 * the C library, because they are used only to check gradients. */
#ifndef EPIC_SCALAR_H
#define EPIC_SCALAR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define SCALAR __device__ __forceinline__
#else
#define SCALAR static inline
#endif

#define LOWEST_F32 (-104.0f) /* below this x, e^x is 0 in float32 */

SCALAR uint32_t word_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

SCALAR float power_of_two(int32_t n)
{
    const uint32_t bits = word_of(1) + ((uint32_t)n << 23);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns e^(x + low) for x up to 88. `low` is the part of the argument that was lost when it
 * was rounded to x. Writes x as n log 2 + r, computes e^r by its Taylor series, and multiplies
 * by 2^n. */
SCALAR float exp_f32(float x, float low)
{
    /* adding and subtracting this constant rounds to an integer */
    const float near = 0x1.8p23f;
    const float t = x < LOWEST_F32 ? LOWEST_F32 : x;
    const float sum = t * 0x1.715476p0f + near;
    const float n = sum - near;
    /* log 2 in two parts; the first has so few bits that its product with n is exact */
    const float r =
        ((t - n * 0x1.62ep-1f) - n * 0x1.0bfbe8p-15f) + (x < LOWEST_F32 ? 0.0f : low);
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    /* two factors, because power_of_two() cannot return a subnormal value */
    const int32_t whole = (int32_t)(word_of(sum) - word_of(near));
    const int32_t half = whole >> 1;
    return ((p + 1.0f) * power_of_two(half)) * power_of_two(whole - half);
}

/* Returns a / b, correctly rounded. Requires 0 <= a <= 1 <= b <= 2, and b = 1 if a < 2^-60. */
SCALAR float part_of_f32(float a, float b)
{
#if defined(__CUDACC__)
    /* One Newton step improves the approximation of 1 / b, and one correction improves the
     * quotient. If the first approximation has an error of at most 2 units in the last place,
     * the result is correctly rounded for a = 1 and for b = 1 + a. Only the largest b below 2
     * needs an exact first approximation, which is a constant. */
    const float start = b == 0x1.fffffep0f ? 0x1.000002p-1f : reciprocal_approx(b);
    const float y = fmaf(fmaf(-b, start, 1), start, start);
    const float q = a * y;
    return a < 0x1p-60f ? a : fmaf(fmaf(-b, q, a), y, q);
#else
    return a / b;
#endif
}

SCALAR double part_of_f64(double a, double b)
{
    return a / b;
}

SCALAR double exp_f64(double x, double low)
{
    return x > -746 ? exp(x) * (1 + low) : x != x ? x : 0;
}

/* Returns log(1 + x) for x in [0, 1]: 2 atanh(x / (2 + x)), with the Taylor series of atanh. */
SCALAR float log1p_f32(float x)
{
    const float t = x / (2.0f + x);
    const float u = t * t;
    float p = 1.0f / 15;
    p = p * u + 1.0f / 13;
    p = p * u + 1.0f / 11;
    p = p * u + 1.0f / 9;
    p = p * u + 1.0f / 7;
    p = p * u + 1.0f / 5;
    p = p * u + 1.0f / 3;
    return 2.0f * (t + t * (u * p));
}

SCALAR double log1p_f64(double x)
{
    return log1p(x);
}

/* in template files OF(sqrt) becomes sqrt_f32 or sqrt_f64 */
SCALAR float sqrt_f32(float x)
{
    return sqrtf(x);
}

SCALAR double sqrt_f64(double x)
{
    return sqrt(x);
}

#endif
