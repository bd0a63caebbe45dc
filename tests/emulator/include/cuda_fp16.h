/* SPDX-License-Identifier: Apache-2.0 */
/* The part of fp16 that the kernels use, for the emulator. */
#ifndef EPIC_EMULATED_FP16_H
#define EPIC_EMULATED_FP16_H

#include "host/convert.h"

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

inline __half __float2half_rn(float x)
{
    return {x != x ? (uint16_t)0x7fff : f16_of_float(x)};
}

inline float __half2float(__half x)
{
    return float_of_f16(x.bits);
}

inline float2 __half22float2(__half2 x)
{
    return {__half2float(x.x), __half2float(x.y)};
}

inline __half2 __floats2half2_rn(float x, float y)
{
    return {__float2half_rn(x), __float2half_rn(y)};
}

#endif
