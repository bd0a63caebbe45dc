/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that load and store elements of arrays as floats, one element or one 16-byte vector
 * at a time. The element type is a run-time value (load_number, store_number) or a template
 * argument: Bf16, F16 or F32 of rows.cuh (load_numbers, store_numbers). */
#ifndef EPIC_NUMBERS_CUH
#define EPIC_NUMBERS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/rows.cuh"

/* Returns element i of the array p as a float. `type`: EPIC_BF16, EPIC_F16 or EPIC_F32. */
__device__ __forceinline__ float load_number(const void *p, uint32_t type, int64_t i)
{
    if (type == EPIC_BF16) return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
    if (type == EPIC_F16) return __half2float(((const __half *)p)[i]);
    return ((const float *)p)[i];
}

/* Rounds x to the element type and stores it as element i of the array p. `type`: as in
 * load_number(). */
__device__ __forceinline__ void store_number(void *p, uint32_t type, int64_t i, float x)
{
    if (type == EPIC_BF16)
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(x);
    else if (type == EPIC_F16)
        ((__half *)p)[i] = __float2half_rn(x);
    else
        ((float *)p)[i] = x;
}

/* Returns the value of an e4m3 byte. The exponent and mantissa bits are moved to their
 * positions in a float32. The two types have different exponent biases, so the float32 is too
 * small by a factor of 2^120. The multiplication corrects this. */
__device__ __forceinline__ float e4m3_value(uint8_t q)
{
    const uint32_t size = q & 0x7fu;
    const float x = __uint_as_float(size << 20) * 0x1p120f;
    return size == 0x7f ? __uint_as_float(0x7fc00000u) : q & 0x80u ? -x : x;
}

/* NUMBER_TYPE<T> is the epic_type constant of an element type T: F32, Bf16 or F16
 * (rows.cuh). */
template <class T> constexpr uint32_t NUMBER_TYPE = EPIC_F32;
template <> constexpr uint32_t NUMBER_TYPE<Bf16> = EPIC_BF16;
template <> constexpr uint32_t NUMBER_TYPE<F16> = EPIC_F16;

/* Loads elements [i, i + V) of an array of type T. V must be 1 or T::N, the number of elements
 * of a 16-byte vector. If V is T::N, i must be a multiple of V. */
template <class T, int V>
__device__ __forceinline__ void load_numbers(float (&x)[V], const void *p, int64_t i)
{
    if constexpr (V == T::N)
        T::unpack_floats(((const uint4 *)p)[i / V], x);
    else
        x[0] = load_number(p, NUMBER_TYPE<T>, i);
}

/* Rounds x to type T and stores it as elements [i, i + V) of an array. V: as in
 * load_numbers(). */
template <class T, int V>
__device__ __forceinline__ void store_numbers(void *p, int64_t i, const float (&x)[V])
{
    if constexpr (V == T::N)
        ((uint4 *)p)[i / V] = T::pack_floats(x);
    else
        store_number(p, NUMBER_TYPE<T>, i, x[0]);
}

#endif
