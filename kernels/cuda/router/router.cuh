/* SPDX-License-Identifier: Apache-2.0 */
/* Functions for a warp that processes the logits of one token, for the kernels of this folder.
 * A *choice* is a token and one of its top_k experts.
 *
 *   column i       logit i of the token; it belongs to lane i % 32, and is stored in shared
 *                  memory at padded_index(i)
 *   template V     number of columns per lane, as a constant; 0: any number of columns
 *   template J     number of choices per lane: 1 if top_k is at most 32, otherwise 2
 *
 * The results have the same bits as the results of the CPU code (src/router): both use the same
 * scalar functions, add in the same order, and are compiled without fused multiply-add. */
#ifndef EPIC_ROUTER_CUH
#define EPIC_ROUTER_CUH

#ifndef EPIC_NO_FMAD
#error "router kernels need nvcc -fmad=false -DEPIC_NO_FMAD: else their bits are not the host's"
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/ptx.cuh"
#include "cuda/router/router.h"
#include "rules/rule.h"
#include "rules/scalar.h"

#define REAL float
#define OF(name) name##_f32
#include "rules/scalar_template.h"
#undef REAL
#undef OF

#define WARP 32
#define ALL_LANES 0xffffffffu
#define SUM_BLOCK 1024
/* maximum shared memory of a CTA in bytes; every GPU since sm_80 has at least this much */
#define SHARED_BYTES (96 << 10)

__device__ __forceinline__ int lane_id()
{
    return threadIdx.x % WARP;
}

/* Returns the index of column i in shared memory. A word of padding follows every 32 words. The
 * padding avoids bank conflicts if each lane reads 8 consecutive words. */
__host__ __device__ __forceinline__ int padded_index(int i)
{
    return i + (i >> 5);
}

/* Returns the number of words that a row needs in shared memory. The number of columns is
 * rounded up to a multiple of 32, and each 32 columns need 33 words. */
__host__ __device__ __forceinline__ int row_words(int columns)
{
    return (columns + WARP - 1) / WARP * (WARP + 1);
}

/* Returns the number of words that a row needs in shared memory: for 32 * V columns or, if V is
 * 0, for `columns` columns. */
template <int V> __host__ __device__ __forceinline__ int row_words_of(int columns)
{
    return V > 0 ? V * (WARP + 1) : row_words(columns);
}

/* Calls f(i) for each of this lane's columns i in [first, end), in ascending order. first must
 * be a multiple of 32. */
template <int V, class F> __device__ __forceinline__ void each_column(int first, int end, F f)
{
    if (V > 0) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            const int i = first + v * WARP + lane_id();
            if (i < end) f(i);
        }
    } else {
#pragma unroll 4
        for (int i = first + lane_id(); i < end; i += WARP) f(i);
    }
}

/* Calls f(i) for each of this lane's columns i below `end`. If V is not 0, also calls f for the
 * columns from `end` to 32 * V - 1, because this saves a comparison per column. Shared memory
 * has words for these columns too. */
template <int V, class F> __device__ __forceinline__ void each_place(int end, F f)
{
    if (V > 0) {
#pragma unroll
        for (int v = 0; v < V; v++) f(v * WARP + lane_id());
    } else {
        each_column<0>(0, end, f);
    }
}

/* Returns the sum of x over the lanes of the warp, on every lane. Adds lanes at distance 16,
 * then 8, 4, 2 and 1, as the CPU code does. */
template <class T> __device__ __forceinline__ T add_lanes(T x)
{
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

/* Returns the sum of f(i) over all columns, on every lane. Adds in the order of the CPU code:
 * one block of SUM_BLOCK columns after the other. In each block, each lane first adds its own
 * columns. Then the sums of all lanes are added. */
template <int V, class T, class F> __device__ __forceinline__ T add_columns(int columns, F f)
{
    T total = 0;
    for (int first = 0; first < columns; first += SUM_BLOCK) {
        T sum = 0;
        each_column<V>(first, min(columns, first + SUM_BLOCK), [&](int i) { sum += f(i); });
        total += add_lanes(sum);
        if (V > 0) break; /* the row has at most 32 * V columns, which are a single block */
    }
    return total;
}

/* ------------------------------------------------------------------------- elements ---- */

__device__ __forceinline__ float load_element(const float *p)
{
    return *p;
}

__device__ __forceinline__ float load_element(const __nv_bfloat16 *p)
{
    return __bfloat162float(*p);
}

__device__ __forceinline__ float load_element(const __half *p)
{
    return __half2float(*p);
}

/* Returns element i of an array whose type (F32, BF16 or F16) is known at run time. */
__device__ __forceinline__ float load_number(const void *p, uint32_t type, int64_t i)
{
    if (type == EPIC_BF16) return load_element((const __nv_bfloat16 *)p + i);
    if (type == EPIC_F16) return load_element((const __half *)p + i);
    return load_element((const float *)p + i);
}

/* Stores x to element i of an array. `type`: as in load_number(). */
__device__ __forceinline__ void store_number(void *p, uint32_t type, int64_t i, float x)
{
    if (type == EPIC_BF16)
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(x);
    else if (type == EPIC_F16)
        ((__half *)p)[i] = __float2half_rn(x);
    else
        ((float *)p)[i] = x;
}

/* Loads a row of elements of type T, converts them to float32, and stores them in z in shared
 * memory. */
template <int V, class T>
__device__ __forceinline__ void load_typed(float *z, const T *row, int columns)
{
    each_column<V>(0, columns, [&](int i) { z[padded_index(i)] = load_element(row + i); });
}

/* Loads the logits of a token, converts them to float32, and stores them in z [columns] in
 * shared memory. */
template <int V>
__device__ __forceinline__ void load_row(float *z, const p2p_router_rows &rows, int64_t token)
{
    const int64_t first = token * rows.columns;
    if (rows.type == EPIC_BF16)
        load_typed<V>(z, (const __nv_bfloat16 *)rows.logits + first, rows.columns);
    else if (rows.type == EPIC_F16)
        load_typed<V>(z, (const __half *)rows.logits + first, rows.columns);
    else
        load_typed<V>(z, (const float *)rows.logits + first, rows.columns);
}

/* Writes the gradients d(i) of all logits of a token to d_logits. If `accumulate` is set, adds
 * the gradients to the old values instead. */
template <int V, class F>
__device__ __forceinline__ void write_logit_gradient(void *d_logits, uint32_t type,
                                                     int accumulate, int64_t token, int columns,
                                                     F d)
{
    const int64_t first = token * columns;
    each_column<V>(0, columns, [&](int i) {
        float x = d(i);
        if (accumulate) x += load_number(d_logits, type, first + i);
        store_number(d_logits, type, first + i, x);
    });
}

/* --------------------------------------------------------------------------- scores ---- */

/* Returns the maximum of the values `mine` of all lanes, and ignores NaNs. Exception, as in the
 * CPU code: if `first` is NaN, returns NaN. `first`: the first value of the row. */
__device__ __forceinline__ float largest_of(float mine, float first)
{
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        mine = fmaxf(mine, __shfl_xor_sync(ALL_LANES, mine, distance));
    return first != first ? first : mine;
}

/* The largest logit of a softmax, and the sum of exp(logit - largest). */
struct Softmax {
    float largest, sum;
};

/* Writes the softmax of row z to p. z and p are in shared memory and may be the same array. */
template <int V>
__device__ __forceinline__ Softmax compute_softmax(float *p, const float *z, int columns)
{
    Softmax s = {-INFINITY, 0};
    const float first = __shfl_sync(ALL_LANES, lane_id() == 0 ? z[0] : 0, 0);
    each_column<V>(0, columns,
                   [&](int i) { s.largest = fmaxf(s.largest, z[padded_index(i)]); });
    s.largest = largest_of(s.largest, first);
    each_place<V>(columns, [&](int i) {
        p[padded_index(i)] = exp_of_difference(z[padded_index(i)], s.largest);
    });
    s.sum = add_columns<V, float>(columns, [&](int i) { return p[padded_index(i)]; });
    each_place<V>(columns, [&](int i) { p[padded_index(i)] /= s.sum; });
    return s;
}

/* Returns the score of one logit z. `score`: an EPIC_SCORE_* value, but not EPIC_SCORE_SOFTMAX,
 * because a softmax depends on all logits. */
__device__ __forceinline__ float score_of(float z, uint32_t score)
{
    if (score == EPIC_SCORE_SIGMOID) return score_sigmoid(z);
    return score == EPIC_SCORE_SQRTSOFTPLUS ? score_sqrtsoftplus(z) : z;
}

/* Writes the scores of row z to s. z and s are in shared memory and may be the same array. */
template <int V>
__device__ __forceinline__ void make_scores(float *s, const float *z, uint32_t score,
                                            int columns)
{
    if (score == EPIC_SCORE_SOFTMAX)
        compute_softmax<V>(s, z, columns);
    else if (score == EPIC_SCORE_SIGMOID)
        each_place<V>(columns,
                      [&](int i) { s[padded_index(i)] = score_sigmoid(z[padded_index(i)]); });
    else if (score == EPIC_SCORE_SQRTSOFTPLUS)
        each_place<V>(columns, [&](int i) {
            s[padded_index(i)] = score_sqrtsoftplus(z[padded_index(i)]);
        });
    else
        each_column<V>(0, columns, [&](int i) { s[padded_index(i)] = z[padded_index(i)]; });
}

/* -------------------------------------------------------------------------- weights ---- */

/* The k chosen experts of a token. Lane L has choice L, at index j = 0. If J is 2, it also has
 * choice L + 32, at index j = 1. */
template <int J> struct Chosen {
    int k;
    int id[J]; /* expert id of choice lane + 32 * j; negative: no expert */

    __device__ __forceinline__ bool has_choice(int j) const
    {
        return lane_id() + j * WARP < k;
    }
    __device__ __forceinline__ bool has_expert(int j) const
    {
        return has_choice(j) && id[j] >= 0;
    }
};

/* Returns the sum of x over the token's choices (struct Chosen), on every lane. Adds in
 * ascending order of k, as the CPU code does. */
template <int J>
__device__ __forceinline__ float add_in_order(const Chosen<J> &c, const float (&x)[J])
{
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < min(c.k, WARP); i++) sum += __shfl_sync(ALL_LANES, x[0], i);
    for (int i = WARP; J > 1 && i < c.k; i++) sum += __shfl_sync(ALL_LANES, x[J - 1], i - WARP);
    return sum;
}

/* On entry, p has the logits of the chosen experts. Replaces them by their softmax. A choice
 * without an expert gets 0. */
template <int J>
__device__ __forceinline__ void softmax_chosen(const Chosen<J> &c, float (&p)[J])
{
    const uint32_t low = __ballot_sync(ALL_LANES, c.has_expert(0));
    const uint32_t high = __ballot_sync(ALL_LANES, J > 1 && c.has_expert(J - 1));
    const float first =
        __shfl_sync(ALL_LANES, low ? p[0] : p[J - 1], __ffs(low ? low : high | 1) - 1);
    float largest = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < J; j++)
        if (c.has_expert(j)) largest = fmaxf(largest, p[j]);
    largest = largest_of(largest, first);
#pragma unroll
    for (int j = 0; j < J; j++) {
        p[j] = c.has_expert(j) ? exp_of_difference(p[j], largest) : 0;
        if (c.has_choice(j)) sum += p[j];
    }
    sum = add_lanes(sum);
#pragma unroll
    for (int j = 0; j < J; j++)
        if (low | high) p[j] /= sum;
}

/* The values from which the weights of a token's choices are computed: weight = part / divisor
 * * scales of the router. In each lane, parts[j] is the part of choice lane + 32 * j.
 * is_divisor_variable: true if the divisor depends on the parts. In this case backward also
 * needs the gradient of the divisor. */
template <int J> struct Shares {
    float parts[J];
    float divisor;
    bool is_divisor_variable;
};

/* Computes the parts and the divisor of a token, as the router's weight_rule and normalize
 * require. x has one value per choice: the expert's score or its logit, depending on
 * weight_rule. */
template <int J>
__device__ __forceinline__ Shares<J> compute_shares(const p2p_router_rows &rows,
                                                    const Chosen<J> &c, const float (&x)[J])
{
    const epic_router &r = rows.router;
    Shares<J> s = {{0}, 1, false};
#pragma unroll
    for (int j = 0; j < J; j++)
        if (c.has_expert(j))
            s.parts[j] =
                r.weight_rule == EPIC_WEIGHT_SIGMOID_CHOSEN ? score_sigmoid(x[j]) : x[j];
    if (r.weight_rule == EPIC_WEIGHT_SOFTMAX_CHOSEN) softmax_chosen(c, s.parts);
    if (r.normalize == EPIC_NORMALIZE_NONE) return s;

    const float sum = add_in_order(c, s.parts);
    if (r.normalize == EPIC_NORMALIZE_SUM) {
        s.divisor = sum + rows.eps;
        s.is_divisor_variable = true;
    } else {
        s.is_divisor_variable = !(sum < rows.norm_min);
        s.divisor = s.is_divisor_variable ? sum : rows.norm_min;
    }
    return s;
}

/* ------------------------------------------------------------------------ launching ---- */

/* Returns the number of warps of a CTA: as many as shared memory permits, but at least 1 and at
 * most `most`. `words`: number of words of shared memory that each warp needs. */
static inline int router_warps(int words, int most)
{
    const int fit = SHARED_BYTES / (words * 4);
    return fit < 1 ? 1 : fit < most ? fit : most;
}

#endif
