/* SPDX-License-Identifier: Apache-2.0 */
/* The dot product of epic_combine_backward, added in a defined order. A block of 1024 products
 * is summed in 256 accumulators: accumulator i takes elements i, i + 256, i + 512 and i + 768.
 * Accumulators 8 g to 8 g + 7 form group g. The 8 accumulators of each group are added in a
 * binary tree. Then the sums of the 32 groups are added in another tree. A tree with n inputs
 * adds input i + distance to input i, for the distances n / 2, n / 4 and so on to 1.
 *
 * In the last, short block of a row some accumulators have no elements. The missing elements
 * are replaced by pairs whose product is -0, which never changes a sum: x + -0 is x for every
 * x. */
#ifndef EPIC_HOST_DOT_H
#define EPIC_HOST_DOT_H

#include <stdatomic.h>

#include "lanes.h"

#define ACCUMULATORS 256
#define GROUP 8 /* accumulators per group */
#define NUM_GROUPS (ACCUMULATORS / GROUP)

/* Defines a function that adds the 256 accumulators of a block in the order above, and returns
 * the sum. The function overwrites the accumulators. */
#define DEFINE_ADD_ACCUMULATORS(name, real)                                         \
    static inline real name(real *sums)                                             \
    {                                                                               \
        real groups[NUM_GROUPS];                                                    \
        for (int g = 0; g < NUM_GROUPS; g++) {                                      \
            real *group = sums + g * GROUP;                                         \
            for (int distance = GROUP / 2; distance > 0; distance /= 2)             \
                for (int i = 0; i < distance; i++) group[i] += group[i + distance]; \
            groups[g] = group[0];                                                   \
        }                                                                           \
        for (int distance = NUM_GROUPS / 2; distance > 0; distance /= 2)            \
            for (int g = 0; g < distance; g++) groups[g] += groups[g + distance];   \
        return groups[0];                                                           \
    }

DEFINE_ADD_ACCUMULATORS(add_accumulators_f64, double)

#if LANES == 1
DEFINE_ADD_ACCUMULATORS(add_accumulators, float)
#else
/* Adds the accumulators of eight groups at once, at distances 4, 2 and 1. Returns the sums of
 * groups 0, 2, 4, 6, 1, 3, 5, 7, in this order. */
INLINE __m256 add_groups(const float *sums)
{
    __m256 four[4], two[2];
    for (int i = 0; i < 4; i++) {
        const __m256 a = _mm256_loadu_ps(sums + 2 * i * GROUP);
        const __m256 b = _mm256_loadu_ps(sums + (2 * i + 1) * GROUP);
        four[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20),
                                _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 2; i++)
        two[i] = _mm256_add_ps(_mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0x44),
                               _mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88),
                         _mm256_shuffle_ps(two[0], two[1], 0xdd));
}

INLINE float add_accumulators(const float *sums)
{
    __m256 by_8[4];
    for (int i = 0; i < 4; i++) by_8[i] = add_groups(sums + i * 8 * GROUP);
    /* The five steps add the sums of 32 groups at distances 16, 8, 4, 2 and 1. add_groups()
     * returns eight groups in the order 0, 2, 4, 6, 1, 3, 5, 7. So the elements that a step
     * adds are 2 apart in the third step (groups 0 and 4), 1 apart in the fourth step (groups 0
     * and 2), and 4 apart in the last step (groups 0 and 1). */
    const __m256 eight =
        _mm256_add_ps(_mm256_add_ps(by_8[0], by_8[2]), _mm256_add_ps(by_8[1], by_8[3]));
    const __m256 four = _mm256_add_ps(eight, _mm256_permute_ps(eight, 0x4e));
    const __m256 two = _mm256_add_ps(four, _mm256_permute_ps(four, 0xb1));
    return _mm_cvtss_f32(
        _mm_add_ss(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
}
#endif

/* Returns the dot product of a full block (1024 elements) of rows `a` and `b`, from element
 * `at` on. Reads rows from front to back, for hardware prefetchers. The fence, which is no
 * instruction, keeps the compiler from reading the four quarters of the block at the same time,
 * which is much slower for rows that are not in a cache. */
INLINE float dot_block(const void *a, const void *b, epic_type type, int64_t at)
{
    float sums[ACCUMULATORS];
    for (int i = 0; i < ACCUMULATORS; i += LANES)
        store_f32(sums + i,
                  lanes_mul(load_lanes(a, type, at + i), load_lanes(b, type, at + i)));
    for (int j = ACCUMULATORS; j < HOST_DOT_BLOCK; j += ACCUMULATORS) {
        atomic_signal_fence(memory_order_seq_cst);
        for (int i = 0; i < ACCUMULATORS; i += LANES) {
            const lanes x = load_lanes(a, type, at + j + i),
                        y = load_lanes(b, type, at + j + i);
            store_f32(sums + i, lanes_fma(x, y, load_f32(sums + i)));
        }
    }
    return add_accumulators(sums);
}

/* Stores `count` elements of a row, from element `at` on, as float32 at the start of `block`,
 * and `absent` in the rest of the block. */
INLINE void fill_block(float *block, const void *row, epic_type type, int64_t at, int64_t count,
                       float absent)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_f32(block + i, load_lanes(row, type, at + i));
    if (i < count) store_f32(block + i, load_tail(row, type, at + i, count - i));
    for (i = count; i < HOST_DOT_BLOCK; i++) block[i] = absent;
}

/* Like dot_block(), for the last block of a row, if it has only `count` elements (fewer than
 * 1024). */
INLINE float dot_short_block(const void *a, const void *b, epic_type type, int64_t at,
                             int64_t count)
{
    float whole_a[HOST_DOT_BLOCK], whole_b[HOST_DOT_BLOCK];
    fill_block(whole_a, a, type, at, count, -0.0f);
    fill_block(whole_b, b, type, at, count, 1.0f);
    return dot_block(whole_a, whole_b, EPIC_F32, 0);
}

/* Adds the dot products of all blocks of rows `a` and `b` (n elements each) to *sum, in order.
 * `first`: true if *sum has no value yet. */
INLINE void dot_of(double *sum, bool first, const void *a, const void *b, epic_type type,
                   int64_t n)
{
    float total = first ? -0.0f : (float)*sum;
    int64_t at = 0;
    for (; at + HOST_DOT_BLOCK <= n; at += HOST_DOT_BLOCK) total += dot_block(a, b, type, at);
    if (at < n) total += dot_short_block(a, b, type, at, n - at);
    *sum = total;
}

static inline double load_f64(const void *row, int64_t at)
{
    double x;
    memcpy(&x, element_at(row, EPIC_F64, at), sizeof x);
    return x;
}

/* Like dot_block(), for a block of `count` float64 elements, at most 1024. */
static inline double dot_block_f64(const void *a, const void *b, int64_t at, int64_t count)
{
    double sums[ACCUMULATORS];
    for (int64_t i = 0; i < ACCUMULATORS; i++) {
        sums[i] = i < count ? load_f64(a, at + i) * load_f64(b, at + i) : -0.0;
        for (int64_t j = i + ACCUMULATORS; j < count; j += ACCUMULATORS)
            sums[i] = __builtin_fma(load_f64(a, at + j), load_f64(b, at + j), sums[i]);
    }
    return add_accumulators_f64(sums);
}

/* Like dot_of(), for float64 rows. */
static void dot_f64(double *sum, bool first, const void *a, const void *b, int64_t n)
{
    double total = first ? -0.0 : *sum;
    for (int64_t at = 0; at < n; at += HOST_DOT_BLOCK) {
        const int64_t left = n - at;
        total += dot_block_f64(a, b, at, left < HOST_DOT_BLOCK ? left : HOST_DOT_BLOCK);
    }
    *sum = total;
}

#endif
