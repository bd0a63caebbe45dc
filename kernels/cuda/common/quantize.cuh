/* SPDX-License-Identifier: Apache-2.0 */
/* Quantizes rows to e4m3 with one scale per block of elements. The results have the same bits
 * as those of kernels/host/quantize.h.
 *
 *   EPIC_QUANTIZE_1X128  blocks of 128 elements, scale float32: 1 word per 128 elements
 *   EPIC_QUANTIZE_1X32   blocks of 32 elements, scale e8m0 (a power of two, one byte): 4 bytes,
 *                        also 1 word, per 128 elements
 *
 * A warp quantizes one piece of a row at a time: V vectors of N elements per lane. Element i of
 * vector v of lane L is element (v * 32 + L) * N + i of the piece. Elements after the end of
 * the row are zeros. The value of a parameter named `how` is one of the two constants above. */
#ifndef EPIC_QUANTIZE_CUH
#define EPIC_QUANTIZE_CUH

#include "cuda/common/rows.cuh"

#define QUANTIZE_BLOCK 128
#define INFINITY_WORD 0x7f800000u
#define NAN_SCALE 0x7fc00000u
#define E4M3_LARGEST 448.0f
/* If the scale is between these limits, all intermediate results of divide_rounded() are normal
 * numbers, so the division is exact. */
#define SMALL_SCALE 0x1p-90f
#define LARGE_SCALE 0x1p100f

/* The part of a quantized piece of a row that one lane has: some elements, and one word of
 * scales. A word of scales contains the scales of 128 elements. */
template <int V, int N> struct Quantized {
    /* Number of adjacent lanes that share one word of scales: for each v, the vectors v of
     * these lanes together contain 128 elements. */
    static constexpr int LANES = QUANTIZE_BLOCK / N;
    /* number of words of scales per piece */
    static constexpr int WORDS = V * WARP / LANES;
    static constexpr int BYTES = V * WARP * N;
    /* this lane's e4m3 elements, four per word */
    uint32_t q[V][N / 4];
    /* the piece's word of scales with index word_index() */
    uint32_t scales;

    /* Returns true if this lane has a word of scales to store (not all lanes have one). */
    static __device__ __forceinline__ bool has_word()
    {
        return lane_id() % LANES < V;
    }
    /* Returns the index of this lane's word of scales among those of the piece. */
    static __device__ __forceinline__ int word_index()
    {
        return lane_id() % LANES * (WARP / LANES) + lane_id() / LANES;
    }
};

/* Returns the largest absolute value of N elements, as the bits of a float32. Compared as
 * integers, these bits have the order of nonnegative floats, with NaNs as the largest
 * values. */
template <int N> __device__ __forceinline__ uint32_t largest_size(const float (&x)[N])
{
    float size = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) size = max_size(size, x[i]);
    return __float_as_uint(size);
}

/* Returns the largest absolute value of 16 elements of type ROW (Bf16 or F16), as the bits of a
 * float32. `low`, `high`: two vectors of elements. */
template <class ROW> __device__ __forceinline__ uint32_t largest_size(uint4 low, uint4 high)
{
    const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max_halves(most, w[i] & 0x7fff7fffu);
    float pair[8];
    ROW::unpack_floats(make_uint4(max(most & 0xffff, most >> 16), 0, 0, 0), pair);
    return __float_as_uint(pair[0]);
}

/* Each lane has V vectors, and a block of elements consists of vector v of several adjacent
 * lanes. Returns the largest absolute value of one block, as bits of a float32. Each lane gets
 * the value of the block that contains its vector lane_id() % V. On entry, own[v] is the
 * largest absolute value in this lane's vector v. Called by a whole warp. */
template <int V, int N>
__device__ __forceinline__ uint32_t join_lanes(uint32_t (&own)[V], uint32_t how)
{
    static_assert(V * N == 32, "V lanes have a block of 32");
    const auto widen = [&](int distance) {
#pragma unroll
        for (int v = 0; v < V; v++)
            own[v] = max(own[v], __shfl_xor_sync(ALL_LANES, own[v], distance));
    };
#pragma unroll
    for (int distance = 1; distance < V; distance *= 2) widen(distance);
    if (how == EPIC_QUANTIZE_1X128) {
        widen(V);
        widen(2 * V);
    }
    uint32_t mine = own[0];
#pragma unroll
    for (int v = 1; v < V; v++) mine = lane_id() % V == v ? own[v] : mine;
    return mine;
}

/* Returns the result of join_lanes() for the elements x of this lane's vectors. */
template <int V, int N>
__device__ __forceinline__ uint32_t find_largest(const float (&x)[V][N], uint32_t how)
{
    uint32_t own[V];
#pragma unroll
    for (int v = 0; v < V; v++) own[v] = largest_size<N>(x[v]);
    return join_lanes<V, N>(own, how);
}

/* ------------------------------------------------------------------------------ scales ---- */

/* Returns the scale of a block of 128 elements. `bits`: the largest absolute value in the
 * block, as bits of a float32. */
__device__ __forceinline__ float scale_1x128(uint32_t bits)
{
    const float s = __fdiv_rn(__uint_as_float(bits), E4M3_LARGEST);
    if (bits >= INFINITY_WORD) return __uint_as_float(NAN_SCALE);
    return s == 0.0f ? 1.0f : s;
}

/* Returns the scale of a block of 32 elements as an exponent byte (e8m0). `bits`: the largest
 * absolute value in the block, as bits of a float32. The largest e4m3 value is 448 = 1.75 *
 * 2^8. So the exponent of the scale is the exponent of `bits` minus 8. If the mantissa of
 * `bits` is above 1.75, the exponent of the scale is greater by 1. */
__device__ __forceinline__ uint32_t scale_1x32(uint32_t bits)
{
    if (bits >= INFINITY_WORD) return 255;
    if (bits == 0) return 127;
    return (uint32_t)max((int)(bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000), 0);
}

/* The scale of one block of elements, in the two forms that kernels need. */
struct BlockScale {
    /* the word of scales to store: this block's scale and, with EPIC_QUANTIZE_1X32, the scales
     * of three other blocks */
    uint32_t word;
    /* With EPIC_QUANTIZE_1X128: the scale, by which elements are divided. With
     * EPIC_QUANTIZE_1X32: 1 / scale, by which elements are multiplied. NaN if the scale is
     * NaN. */
    float number;
};

/* Returns the scale of this lane's block (find_largest()). The caller will multiply the block's
 * elements by `weight` and then quantize them. `largest`: the largest absolute value before
 * this multiplication, as bits of a float32. It is enough to multiply `largest` by the weight,
 * because multiplication and rounding keep the order of absolute values. */
template <int V>
__device__ __forceinline__ BlockScale scale_of(uint32_t largest, float weight, uint32_t how)
{
    const uint32_t bits =
        __float_as_uint(__fmul_rn(weight, __uint_as_float(largest))) & 0x7fffffffu;
    if (how == EPIC_QUANTIZE_1X128) {
        const float scale = scale_1x128(bits);
        return {__float_as_uint(scale), scale};
    }
    const uint32_t scale = scale_1x32(bits);
    uint32_t word = scale << lane_id() / V % 4 * 8;
    word |= __shfl_xor_sync(ALL_LANES, word, V);
    word |= __shfl_xor_sync(ALL_LANES, word, 2 * V);
    return {word, __uint_as_float(scale == 255 ? NAN_SCALE : (254 - scale) << 23)};
}

/* ---------------------------------------------------------------------------- division ---- */

/* A divisor s, prepared for fast divisions. high + low is 1 / s with a relative error of 2^-44.
 * low is above 0, so that the quotient -0 / s is -0. */
struct Divisor {
    float s, high, low, minus_r; /* minus_r: -1 / s, rounded */
};

__device__ __forceinline__ Divisor divisor_of(float s)
{
    const float high = __fmul_rn(reciprocal_approx(s), 1 - 0x1p-21f);
    const float e = __fmaf_rn(-high, s, 1.0f); /* 1 / s = high * (1 + e + e^2 + ...) */
    const float low = __fmul_rn(__fmaf_rn(e, e, e), high);
    return {s, high, low, -(high + low)};
}

/* Returns x / d.s. The result has the bits of a correctly rounded division if no intermediate
 * result is subnormal. SHORT: x, and the value from which s was computed, have at most 11
 * significant bits. Then the quotient is never within a relative distance of 2^-44 from the
 * middle between two e4m3 values. So the final correction of the quotient cannot change the
 * e4m3 value, and is left out. */
template <bool SHORT> __device__ __forceinline__ float divide_rounded(float x, const Divisor &d)
{
    const float q = __fmaf_rn(x, d.high, __fmul_rn(x, d.low));
    return SHORT ? q : __fmaf_rn(__fmaf_rn(q, d.s, -x), d.minus_r, q);
}

/* Divides N elements of a block of 128 by the block's scale, in place. divide_rounded() is
 * exact only for normal numbers. So if the scale is very small or very large, the elements and
 * the scale are first multiplied by a power of two that moves the scale towards 1. */
template <bool SHORT, int N>
__device__ __forceinline__ void divide_block(float (&x)[N], float scale)
{
    float s = scale;
    if (!(s > SMALL_SCALE && s < LARGE_SCALE)) {
        const float nearer = s < 1 ? 0x1p64f : 0x1p-64f;
        s = __fmul_rn(s, nearer);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = __fmul_rn(x[i], nearer);
    }
    const Divisor d = divisor_of(s);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = divide_rounded<SHORT>(x[i], d);
}

/* Quantizes vector v of a piece into piece.q[v]. x: the vector's elements, already multiplied
 * by the weight; they are overwritten. `mine`: the scale that this lane has computed. Another
 * lane may have computed the scale of vector v, so the scale is read by a shuffle. A NaN scale
 * makes all elements NaN. Called by a whole warp. */
template <bool SHORT, int V, int N>
__device__ __forceinline__ void quantize_vector(Quantized<V, N> &piece, int v, float (&x)[N],
                                                const BlockScale &mine, uint32_t how)
{
    const float number = __shfl_sync(ALL_LANES, mine.number, lane_id() / V * V + v);
    if (how == EPIC_QUANTIZE_1X128) {
        divide_block<SHORT>(x, number);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = __fmul_rn(x[i], number);
    }
#pragma unroll
    for (int i = 0; i < N; i += 4)
        piece.q[v][i / 4] = pack_e4m3(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

/* Quantizes a piece of a row. Returns this lane's elements and scales. Overwrites x. Called by
 * a whole warp. */
template <int V, int N>
__device__ __forceinline__ Quantized<V, N> quantize_piece(float (&x)[V][N], uint32_t how)
{
    Quantized<V, N> piece;
    const BlockScale mine = scale_of<V>(find_largest<V, N>(x, how), 1.0f, how);
    piece.scales = mine.word;
#pragma unroll
    for (int v = 0; v < V; v++) quantize_vector<false, V, N>(piece, v, x[v], mine, how);
    return piece;
}

/* ----------------------------------------------------------------------------- storing ---- */

/* Stores the lowest `count` bytes of a word (at most four) to an address of any alignment. */
static __device__ __noinline__ void store_some(uint8_t *to, uint32_t word, int64_t count)
{
    for (int i = 0; i < 4 && i < count; i++) to[i] = (uint8_t)(word >> i * 8);
}

/* The arrays to which kernels store quantized rows: the caller's rows, and their scales. */
struct QuantizedRows {
    uint8_t *rows, *scales;
    int64_t row_bytes, scale_bytes;
    /* whole: rows are aligned, so that a lane can store the N bytes of a vector at once. words:
     * the scales of every row are aligned to 4 bytes, so that lanes can store them as words. */
    bool whole, words;
};

/* Stores this lane's N quantized elements q to the row of a slot, from byte `at` of the row on.
 * Does not store elements after the end of the row. */
template <int V, int N>
__device__ __forceinline__ void store_vector(const QuantizedRows &to, int32_t slot, int32_t at,
                                             const uint32_t (&q)[N / 4], uint64_t policy)
{
    uint8_t *const row = to.rows + (int64_t)slot * to.row_bytes + at;
    if (at >= to.row_bytes) return;
    if (!to.whole)
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            store_some(row + i * 4, q[i], to.row_bytes - at - i * 4);
    else if constexpr (N == 16)
        store_once(row, make_uint4(q[0], q[1], q[2], q[3]), policy);
    else if constexpr (N == 8)
        store_once(row, (uint64_t)q[1] << 32 | q[0], policy);
    else
        store_once(row, q[0], policy);
}

/* Stores a piece of the row of a slot, and the scales of the piece. `number`: index of the
 * piece. Called by a whole warp. */
template <int V, int N>
__device__ __forceinline__ void store_quantized(const QuantizedRows &to, int32_t slot,
                                                int number, const Quantized<V, N> &piece,
                                                uint64_t policy)
{
    typedef Quantized<V, N> Piece;
    const int32_t word = number * Piece::WORDS + Piece::word_index();
    uint8_t *const scales = to.scales + (int64_t)slot * to.scale_bytes + word * 4;
    const int64_t left = to.scale_bytes - word * 4;
#pragma unroll
    for (int v = 0; v < V; v++)
        store_vector<V, N>(to, slot, number * Piece::BYTES + (v * WARP + lane_id()) * N,
                           piece.q[v], policy);
    if (!Piece::has_word() || left <= 0) return;
    if (to.words)
        store_once(scales, piece.scales, policy);
    else
        store_some(scales, piece.scales, left);
}

#endif
