/* SPDX-License-Identifier: Apache-2.0 */
/* SIMD vectors of float32 for processors with AVX-512 (F, BW, VL, DQ): sixteen lanes. The
 * functions do not use the processor's instruction for conversion to bfloat16, because that
 * instruction flushes subnormals to zero. */
#ifndef EPIC_HOST_LANES_H
#define EPIC_HOST_LANES_H

#include <immintrin.h>

#include "convert.h"

#define LANES 16
#define STRIP_LANES 64

typedef __m512 lanes;

INLINE lanes load_f32(const void *from)
{
    return _mm512_loadu_ps(from);
}

INLINE lanes load_bf16(const void *from)
{
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE lanes load_f16(const void *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(from));
}

INLINE void store_f32(void *to, lanes x)
{
    _mm512_storeu_ps(to, x);
}

INLINE void store_bf16(void *to, lanes x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_set1_epi32(0x40);
    const __m512i narrow = _mm512_mask_or_epi32(rounded, is_nan, high, quiet);
    _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(narrow));
}

INLINE void store_f16(void *to, lanes x)
{
    _mm256_storeu_si256(to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

/* A non-temporal store, which bypasses the caches. `to` is aligned to sizeof(lanes). */
INLINE void store_past_caches(void *to, lanes x)
{
    _mm512_stream_ps(to, x);
}

INLINE void store_e4m3(void *to, lanes x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i most = _mm512_castps_si512(_mm512_set1_ps(E4M3_MAX));
    const __m512i clamped = _mm512_min_epi32(size, most);

    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(clamped, 20), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32((1 << 19) - 1 - (120 << 23)));
    const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(clamped, half), 20);

    const __m512 shift = _mm512_set1_ps(0x1p14f);
    const __m512i shifted =
        _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(clamped), shift));

    const __m512i least = _mm512_castps_si512(_mm512_set1_ps(0x1p-6f));
    const __mmask16 is_small = _mm512_cmplt_epi32_mask(clamped, least);
    __m512i code = _mm512_mask_sub_epi32(normal, is_small, shifted, _mm512_castps_si512(shift));
    const __m512i infinity = _mm512_set1_epi32((int)INFINITY_BITS);
    const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(size, infinity);
    code = _mm512_mask_set1_epi32(_mm512_or_si512(code, sign), is_nan, E4M3_NAN);
    _mm_storeu_si128(to, _mm512_cvtepi32_epi8(code));
}

/* Returns the larger of |a| and |b| in each lane, compared by their bits. A NaN counts as
 * larger than any number. */
INLINE lanes lanes_max_size(lanes a, lanes b)
{
    const __m512i sizes = _mm512_set1_epi32(0x7fffffff);
    return _mm512_castsi512_ps(
        _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), sizes),
                         _mm512_and_si512(_mm512_castps_si512(b), sizes)));
}

/* Returns the bits of the largest element of `a`. No element may have its sign bit set. A NaN
 * counts as larger than any number. */
INLINE uint32_t lanes_largest_bits(lanes a)
{
    return (uint32_t)_mm512_reduce_max_epi32(_mm512_castps_si512(a));
}

INLINE lanes lanes_div(lanes a, lanes b)
{
    return _mm512_div_ps(a, b);
}

INLINE lanes lanes_of(float x)
{
    return _mm512_set1_ps(x);
}

INLINE lanes lanes_add(lanes a, lanes b)
{
    return _mm512_add_ps(a, b);
}

INLINE lanes lanes_mul(lanes a, lanes b)
{
    return _mm512_mul_ps(a, b);
}

INLINE lanes lanes_fma(lanes a, lanes b, lanes sum)
{
    return _mm512_fmadd_ps(a, b, sum);
}

#endif
