/* SPDX-License-Identifier: Apache-2.0 */
/* Access to numbers of arrays whose type is known at run time only, one at a time or as
 * vectors. */
#ifndef EPIC_NUMBERS_CUH
#define EPIC_NUMBERS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/rows.cuh"

/* Loads element i of an array of a type that is known only at run time. */
__device__ __forceinline__ float load_number(const void *p, uint32_t type, int64_t i)
{
    if (type == EPIC_BF16) return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
    if (type == EPIC_F16) return __half2float(((const __half *)p)[i]);
    return ((const float *)p)[i];
}

/* Rounds x to the type and stores it as element i. */
__device__ __forceinline__ void store_number(void *p, uint32_t type, int64_t i, float x)
{
    if (type == EPIC_BF16)
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(x);
    else if (type == EPIC_F16)
        ((__half *)p)[i] = __float2half_rn(x);
    else
        ((float *)p)[i] = x;
}

/* The value of an e4m3 byte: its bits, moved to those of a float32, have an exponent that is
 * 120 too small. */
__device__ __forceinline__ float e4m3_value(uint8_t q)
{
    const uint32_t size = q & 0x7fu;
    const float x = __uint_as_float(size << 20) * 0x1p120f;
    return size == 0x7f ? __uint_as_float(0x7fc00000u) : q & 0x80u ? -x : x;
}

template <class T> constexpr uint32_t NUMBER_TYPE = EPIC_F32;
template <> constexpr uint32_t NUMBER_TYPE<Bf16> = EPIC_BF16;
template <> constexpr uint32_t NUMBER_TYPE<F16> = EPIC_F16;

/* Loads V numbers from index i on: one vector of 16 bytes, or one number. */
template <class T, int V>
__device__ __forceinline__ void load_numbers(float (&x)[V], const void *p, int64_t i)
{
    if constexpr (V == T::N)
        T::unpack_floats(((const uint4 *)p)[i / V], x);
    else
        x[0] = load_number(p, NUMBER_TYPE<T>, i);
}

template <class T, int V>
__device__ __forceinline__ void store_numbers(void *p, int64_t i, const float (&x)[V])
{
    if constexpr (V == T::N)
        ((uint4 *)p)[i / V] = T::pack_floats(x);
    else
        store_number(p, NUMBER_TYPE<T>, i, x[0]);
}

#endif
