/* SPDX-License-Identifier: Apache-2.0 */
/* SIMD vectors of float32 for processors with AVX2, FMA and F16C: eight lanes. */
#ifndef EPIC_HOST_LANES_H
#define EPIC_HOST_LANES_H

#include <immintrin.h>

#include "convert.h"

#define LANES 8
#define STRIP_LANES 32

typedef __m256 lanes;

INLINE lanes load_f32(const void *from)
{
    return _mm256_loadu_ps(from);
}

INLINE lanes load_bf16(const void *from)
{
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

INLINE lanes load_f16(const void *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(from));
}

INLINE void store_f32(void *to, lanes x)
{
    _mm256_storeu_ps(to, x);
}

INLINE void store_bf16(void *to, lanes x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i narrow = _mm256_blendv_epi8(rounded, quiet, is_nan);
    _mm_storeu_si128(to, _mm_packus_epi32(_mm256_castsi256_si128(narrow),
                                          _mm256_extracti128_si256(narrow, 1)));
}

INLINE void store_f16(void *to, lanes x)
{
    _mm_storeu_si128(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

/* A non-temporal store, which bypasses the caches. `to` is aligned to sizeof(lanes). */
INLINE void store_past_caches(void *to, lanes x)
{
    _mm256_stream_ps(to, x);
}

INLINE void store_e4m3(void *to, lanes x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    const __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i most = _mm256_castps_si256(_mm256_set1_ps(E4M3_MAX));
    const __m256i clamped = _mm256_min_epi32(size, most);

    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(clamped, 20), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32((1 << 19) - 1 - (120 << 23)));
    const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(clamped, half), 20);

    const __m256 shift = _mm256_set1_ps(0x1p14f);
    const __m256i shifted =
        _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(clamped), shift));
    const __m256i small = _mm256_sub_epi32(shifted, _mm256_castps_si256(shift));

    const __m256i least = _mm256_castps_si256(_mm256_set1_ps(0x1p-6f));
    __m256i code = _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(least, clamped));
    const __m256i is_nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32((int)INFINITY_BITS));
    code = _mm256_blendv_epi8(_mm256_or_si256(code, sign), _mm256_set1_epi32(E4M3_NAN), is_nan);
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(to, _mm_packus_epi16(words, words));
}

/* Returns the larger of |a| and |b| in each lane, compared by their bits. A NaN counts as
 * larger than any number. */
INLINE lanes lanes_max_size(lanes a, lanes b)
{
    const __m256i sizes = _mm256_set1_epi32(0x7fffffff);
    return _mm256_castsi256_ps(
        _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a), sizes),
                         _mm256_and_si256(_mm256_castps_si256(b), sizes)));
}

/* Returns the bits of the largest element of `a`. No element may have its sign bit set. A NaN
 * counts as larger than any number. */
INLINE uint32_t lanes_largest_bits(lanes a)
{
    const __m256i bits = _mm256_castps_si256(a);
    __m128i max =
        _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    max = _mm_max_epi32(max, _mm_shuffle_epi32(max, 0x4e));
    max = _mm_max_epi32(max, _mm_shuffle_epi32(max, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(max);
}

INLINE lanes lanes_div(lanes a, lanes b)
{
    return _mm256_div_ps(a, b);
}

INLINE lanes lanes_of(float x)
{
    return _mm256_set1_ps(x);
}

INLINE lanes lanes_add(lanes a, lanes b)
{
    return _mm256_add_ps(a, b);
}

INLINE lanes lanes_mul(lanes a, lanes b)
{
    return _mm256_mul_ps(a, b);
}

INLINE lanes lanes_fma(lanes a, lanes b, lanes sum)
{
    return _mm256_fmadd_ps(a, b, sum);
}

#endif
