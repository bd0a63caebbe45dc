/* SPDX-License-Identifier: Apache-2.0 */
/* The part of bf16 that the kernels use, for the emulator. */
#ifndef EPIC_EMULATED_BF16_H
#define EPIC_EMULATED_BF16_H

#include "host/convert.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float x)
{
    return {x != x ? (uint16_t)0x7fff : bf16_of_float(x)};
}

inline float __bfloat162float(__nv_bfloat16 x)
{
    return float_of_bf16(x.bits);
}

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y)
{
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

#endif
