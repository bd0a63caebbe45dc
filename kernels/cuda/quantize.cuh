/* SPDX-License-Identifier: Apache-2.0 */
/* Elements to e4m3 with a scale for each block, as kernels/host/quantize.h defines it, with its
 * bits.
 *
 * A warp quantizes a piece: V vectors of N elements a lane, element i of vector v of lane l being
 * number (v * 32 + l) * N + i of the piece; past the end of the row they are zeros.  Scales are
 * made in words, one for each 128 elements: a float32, or four bytes of e8m0. */
#ifndef EPIC_QUANTIZE_CUH
#define EPIC_QUANTIZE_CUH

#include "cuda/rows.cuh"

#define QUANTIZE_BLOCK 128
#define INFINITY_WORD 0x7f800000u
#define NAN_SCALE 0x7fc00000u
#define NAN_E4M3 0x7f7f7f7fu /* four of them */
#define E4M3_LARGEST 448.0f
#define SMALL_WORD 0x17800000u /* 2^-80: from here on no remainder of quotient() is subnormal */
#define LARGER 0x1p64f

template <int V, int N> struct Quantized {
    static constexpr int LANES = QUANTIZE_BLOCK / N; /* that share a word of scales */
    static constexpr int WORDS = V * WARP / LANES;   /* of scales of a piece */
    static constexpr int BYTES = V * WARP * N;       /* of e4m3 of a piece */
    uint32_t q[V][N / 4];                            /* this lane's elements */
    uint32_t scales;                                 /* word number word() of the piece */

    static __device__ __forceinline__ bool has_word()
    {
        return lane_id() % LANES < V;
    }
    static __device__ __forceinline__ int word()
    {
        return lane_id() % LANES * (WARP / LANES) + lane_id() / LANES;
    }
};

/* The largest size of N elements and of the `lanes` lanes side by side, as bits: those of floats
 * without sign are ordered as the floats are, NaNs last. */
template <int N> __device__ __forceinline__ uint32_t largest(const float *x, int lanes)
{
    float size = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) size = max_size(size, x[i]);
    uint32_t bits = __float_as_uint(size);
    for (int d = lanes / 2; d; d /= 2) bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, d));
    return bits;
}

/* x / s, rounded as a division, where nothing is small; minus_r = -1 / s.  The remainder's sign
 * is such that -0 stays -0. */
__device__ __forceinline__ float quotient(float x, float s, float minus_r)
{
    float q = __fmul_rn(x, -minus_r);
    q = __fmaf_rn(__fmaf_rn(q, s, -x), minus_r, q);
    return __fmaf_rn(__fmaf_rn(q, s, -x), minus_r, q);
}

/* Of a block whose largest size has these bits. */
__device__ __forceinline__ float scale_1x128(uint32_t bits)
{
    const float s = __fdiv_rn(__uint_as_float(bits), E4M3_LARGEST);
    if (bits >= INFINITY_WORD) return __uint_as_float(NAN_SCALE);
    return s == 0.0f ? 1.0f : s;
}

/* 448 is 1.75 * 2^8: the exponent of the largest less 8, one more if its mantissa is above 1.75. */
__device__ __forceinline__ uint32_t scale_1x32(uint32_t largest_bits)
{
    if (largest_bits >= INFINITY_WORD) return 255;
    if (largest_bits == 0) return 127;
    const int scale = (int)(largest_bits >> 23) - 8 + ((largest_bits & 0x7fffff) > 0x600000);
    return (uint32_t)max(scale, 0);
}

/* N elements of a block of 128; returns its word of scales.  A block of small ones is made larger
 * before it is divided, and its scale too. */
template <int N> __device__ __forceinline__ uint32_t divide_1x128(float (&x)[N])
{
    const uint32_t bits = largest<N>(x, QUANTIZE_BLOCK / N);
    const bool small = bits && bits < SMALL_WORD;
    const float scale = scale_1x128(bits);
    float s = scale;
    if (__any_sync(ALL_LANES, small)) {
        const float factor = small ? LARGER : 1.0f;
        s = __fmul_rn(s, factor);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = __fmul_rn(x[i], factor);
    }
    const float minus_r = -__frcp_rn(s);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = quotient(x[i], s, minus_r);
    return __float_as_uint(scale);
}

/* The same of blocks of 32, whose scales lie side by side in a word. */
template <int N> __device__ __forceinline__ uint32_t divide_1x32(float (&x)[N])
{
    constexpr int LANES = 32 / N;
    const uint32_t scale = scale_1x32(largest<N>(x, LANES));
    const float inverse = __uint_as_float((254 - scale) << 23);
    uint32_t word = scale << lane_id() / LANES % 4 * 8;
    for (int d = LANES; d < 4 * LANES; d *= 2) word |= __shfl_xor_sync(ALL_LANES, word, d);
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = __fmul_rn(x[i], scale == 255 ? __uint_as_float(NAN_SCALE) : inverse);
    return word;
}

/* Is this lane's block, of which this is the word of scales, without a number? */
__device__ __forceinline__ bool is_nan_scale(uint32_t word, bool wide, int lanes)
{
    return wide ? (word & 0x7fffffff) > INFINITY_WORD
                : (word >> lane_id() / (lanes / 4) % 4 * 8 & 255) == 255;
}

/* Vector v of a piece; x is lost. */
template <int V, int N>
__device__ __forceinline__ void quantize_vector(Quantized<V, N> &piece, int v, float (&x)[N],
                                                uint32_t how)
{
    constexpr int LANES = Quantized<V, N>::LANES;
    const bool wide = how == EPIC_QUANTIZE_1X128;
    const uint32_t word = wide ? divide_1x128<N>(x) : divide_1x32<N>(x);
    const bool none = is_nan_scale(word, wide, LANES);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const uint32_t q = pack_e4m3(x[i], x[i + 1], x[i + 2], x[i + 3]);
        piece.q[v][i / 4] = none ? NAN_E4M3 : q;
    }
    if (lane_id() % LANES == v) piece.scales = word;
}

template <int V, int N>
__device__ __forceinline__ Quantized<V, N> quantize(float (&x)[V][N], uint32_t how)
{
    Quantized<V, N> piece;
    piece.scales = 0;
#pragma unroll
    for (int v = 0; v < V; v++) quantize_vector<V, N>(piece, v, x[v], how);
    return piece;
}

/* `count` bytes of a word, the lowest first, if there are that many. */
static __device__ __noinline__ void store_some(uint8_t *to, uint32_t word, int64_t count)
{
    for (int i = 0; i < 4 && i < count; i++) to[i] = (uint8_t)(word >> i * 8);
}

struct
    QuantizedRows { /* where quantized rows go: N bytes, and words, are stored at once or not */
    uint8_t *rows, *scales;
    int64_t row_bytes, scale_bytes;
    bool whole, words;
};

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
    else if (N == 8)
        store_once(row, (uint64_t)q[N / 4 - 1] << 32 | q[0], policy);
    else
        store_once(row, q[0], policy);
}

/* A piece, of a row's pieces the one with this number. */
template <int V, int N>
__device__ __forceinline__ void store_quantized(const QuantizedRows &to, int32_t slot,
                                                int number, const Quantized<V, N> &piece,
                                                uint64_t policy)
{
    typedef Quantized<V, N> Piece;
    const int32_t word = number * Piece::WORDS + Piece::word();
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
