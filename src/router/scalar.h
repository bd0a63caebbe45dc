/* SPDX-License-Identifier: Apache-2.0 */
/* The few functions of one number that scores are made of.
 *
 * In float32 they are additions, products and quotients only, in a fixed order and never
 * contracted, so that every compiler and every device gets the same bits, and with them the same
 * choice of experts (kernels/cuda includes them too).  Their error is below 2 units in the last place.  In float64, where only
 * gradients are checked, they are the C library's. */
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

#define LOWEST_F32 (-104.0f) /* e to that is 0 in float32 */

/* 2^n for -126 <= n <= 127. */
SCALAR float power_of_two(int32_t n)
{
    const uint32_t bits = (uint32_t)(n + 127) << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* e^(x + low) for x <= 88 and |low| tiny: low is what rounding has cut from x. */
SCALAR float exp_f32(float x, float low)
{
    const float near = 0x1.8p23f; /* added and taken away: rounds to an integer */
    const float t = x > LOWEST_F32 ? x : LOWEST_F32;
    const float n = (t * 0x1.715476p0f + near) - near;
    /* log 2 in two parts; the first has so few bits that its product with n is exact. */
    const float r = ((t - n * 0x1.62ep-1f) - n * 0x1.0bfbe8p-15f) + low;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    /* In two factors, as 2^n may be subnormal. */
    const int32_t whole = (int32_t)n;
    const int32_t half = whole / 2;
    const float y = ((p + 1.0f) * power_of_two(half)) * power_of_two(whole - half);
    return x > LOWEST_F32 ? y : x != x ? x : 0.0f;
}

SCALAR double exp_f64(double x, double low)
{
    return x > -746 ? exp(x) * (1 + low) : x != x ? x : 0;
}

/* log(1 + x) for 0 <= x <= 1, from the series of the inverse hyperbolic tangent. */
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

SCALAR float sqrt_f32(float x)
{
    return sqrtf(x);
}

SCALAR double sqrt_f64(double x)
{
    return sqrt(x);
}

#endif
