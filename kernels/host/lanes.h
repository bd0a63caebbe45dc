/* SPDX-License-Identifier: Apache-2.0 */
/* SIMD vectors of float32 for the variant (kind of processor) that is being compiled. A vector
 * has the type `lanes` and contains LANES floats. rows.c sums STRIP_LANES columns at a time.
 * This file also has functions that load and store elements of rows. In their calls, `type`
 * must be a constant: EPIC_F32, EPIC_BF16 or EPIC_F16.
 *
 * Each of the files lanes_*.h defines the same functions, for its kind of processor:
 *
 *   load_f32, load_bf16, load_f16      load LANES elements from any address, as float32
 *   store_f32, store_bf16, store_f16   round LANES floats and store them to any address
 *   store_e4m3                         converts LANES floats to e4m3 with saturation
 *                                      (convert.h), stores
 *   lanes_of                           returns a vector with the same value in each lane
 *   lanes_add, lanes_mul, lanes_div    compute one result per lane, rounded once
 *   lanes_fma(a, b, sum)               returns a * b + sum, rounded once
 *   lanes_max_size, lanes_largest_bits find largest absolute values
 *   store_past_caches                  stores a vector without the caches; not in
 *                                      lanes_generic.h */
#ifndef EPIC_HOST_LANES_ANY_H
#define EPIC_HOST_LANES_ANY_H

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes_avx2.h"
#else
#include "lanes_generic.h"
#endif

#include "kernels/kernels.h"

INLINE int64_t bytes_of(epic_type type)
{
    return type == EPIC_F64 ? 8 : type == EPIC_F32 ? 4 : 2;
}

INLINE const char *element_at(const void *row, epic_type type, int64_t at)
{
    return (const char *)row + at * bytes_of(type);
}

/* Loads LANES elements of a row, from element `at` on, and converts them to float32. */
INLINE lanes load_lanes(const void *row, epic_type type, int64_t at)
{
    const char *from = element_at(row, type, at);
    return type == EPIC_BF16  ? load_bf16(from)
           : type == EPIC_F16 ? load_f16(from)
                              : load_f32(from);
}

/* Rounds LANES elements to `type` and stores them in a row, from element `at` on. */
INLINE void store_lanes(void *row, epic_type type, int64_t at, lanes x)
{
    char *to = (char *)row + at * bytes_of(type);
    if (type == EPIC_BF16)
        store_bf16(to, x);
    else if (type == EPIC_F16)
        store_f16(to, x);
    else
        store_f32(to, x);
}

/* Loads the last `count` (< LANES) elements of a row, from element `at` on; other lanes: 0. */
INLINE lanes load_tail(const void *row, epic_type type, int64_t at, int64_t count)
{
    char whole[LANES * sizeof(float)] = {0};
    memcpy(whole, element_at(row, type, at), (size_t)(count * bytes_of(type)));
    return load_lanes(whole, type, 0);
}

/* Stores the first `count` lanes as the last elements of a row, from element `at` on. */
INLINE void store_tail(void *row, epic_type type, int64_t at, int64_t count, lanes x)
{
    char whole[LANES * sizeof(float)];
    store_lanes(whole, type, 0, x);
    memcpy((char *)row + at * bytes_of(type), whole, (size_t)(count * bytes_of(type)));
}

#endif
