/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays in the dynamic shared memory of a CTA. */
#ifndef EPIC_SHARED_ARRAY_CUH
#define EPIC_SHARED_ARRAY_CUH

#include "cuda/common/launch.cuh"

/* The address of an array in dynamic shared memory, for members of a struct that is also in
 * shared memory. Code uses it like a pointer, but it stores an offset. If it stored a pointer,
 * the compiler would not know that the pointer points to shared memory. The compiler would then
 * generate generic loads, stores and atomic operations, which are slower. */
template <class T> struct SharedArray {
    int32_t offset; /* in bytes, from the start of the dynamic shared memory */

    __device__ __forceinline__ operator T *() const
    {
        return (T *)((uint8_t *)dynamic_shared() + offset);
    }
    /* `array`: an array in the dynamic shared memory of this CTA */
    __device__ __forceinline__ void operator=(T *array)
    {
        offset = (int32_t)((uint8_t *)array - (uint8_t *)dynamic_shared());
    }
};

#endif
