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

/* The largest sizes of a piece's blocks, as bits: those of floats without sign are ordered as the floats
 * are, NaNs last.  All that lanes ask of each other is asked here, once for a piece. */
template <int V, int N> struct Largest {
    static constexpr int KEPT = V > 4 ? 1 : V; /* more would not fit registers */
    uint32_t
        own[KEPT]; /* of the block that this lane's vector v lies in; if only one is kept, that
                            of vector lane % V */
    uint32_t of_word[4]; /* 1x32: of the blocks whose scales this lane stores as a word */

    __device__ __forceinline__ uint32_t of(int v) const
    {
        if constexpr (KEPT == V) return own[v];
        return __shfl_sync(ALL_LANES, own[0], lane_id() / V * V + v);
    }
};

/* Of N elements. */
template <int N> __device__ __forceinline__ uint32_t size_of(const float (&x)[N])
{
    float size = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) size = max_size(size, x[i]);
    return __float_as_uint(size);
}

/* From the lanes' own sizes. */
template <int V, int N>
__device__ __forceinline__ Largest<V, N> join_lanes(uint32_t (&own)[V], uint32_t how)
{
    static_assert(V * N == 32, "V lanes have a block of 32");
    Largest<V, N> most = {};
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
    const int place = lane_id() % V; /* of its vectors, the one whose word it may store */
    uint32_t mine = own[0];
#pragma unroll
    for (int v = 1; v < V; v++) mine = place == v ? own[v] : mine;
#pragma unroll
    for (int v = 0; v < most.KEPT; v++) most.own[v] = most.KEPT == V ? own[v] : mine;
#pragma unroll
    for (int b = 0; b < 4 && how == EPIC_QUANTIZE_1X32; b++)
        most.of_word[b] =
            __shfl_sync(ALL_LANES, mine, lane_id() / (4 * V) * (4 * V) + b * V + place);
    return most;
}

template <int V, int N>
__device__ __forceinline__ Largest<V, N> find_largest(const float (&x)[V][N], uint32_t how)
{
    uint32_t own[V];
#pragma unroll
    for (int v = 0; v < V; v++) own[v] = size_of<N>(x[v]);
    return join_lanes<V, N>(own, how);
}

/* The size of weight * x: rounding keeps the order of sizes. */
__device__ __forceinline__ uint32_t weighted(uint32_t bits, float weight)
{
    return __float_as_uint(__fmul_rn(weight, __uint_as_float(bits))) & 0x7fffffffu;
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

/* N elements of a block of 128 whose largest size has these bits; returns its word of scales.  A block
 * of small ones is made larger before it is divided, and its scale too. */
template <int N> __device__ __forceinline__ uint32_t divide_1x128(float (&x)[N], uint32_t bits)
{
    const float scale = scale_1x128(bits);
    float s = scale;
    if (bits && bits < SMALL_WORD) {
        s = __fmul_rn(s, LARGER);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = __fmul_rn(x[i], LARGER);
    }
    const float minus_r = -__frcp_rn(s);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = quotient(x[i], s, minus_r);
    return __float_as_uint(scale);
}

/* The same of a block of 32, whose scale is a byte. */
template <int N> __device__ __forceinline__ void divide_1x32(float (&x)[N], uint32_t bits)
{
    const float inverse = __uint_as_float((254 - scale_1x32(bits)) << 23);
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = __fmul_rn(x[i], bits >= INFINITY_WORD ? __uint_as_float(NAN_SCALE) : inverse);
}

/* Vector v of a piece, multiplied by the weight already; x is lost. */
template <int V, int N>
__device__ __forceinline__ void quantize_vector(Quantized<V, N> &piece, int v, float (&x)[N],
                                                const Largest<V, N> &most, float weight,
                                                uint32_t how)
{
    const uint32_t bits = weighted(most.of(v), weight);
    if (how == EPIC_QUANTIZE_1X128) {
        const uint32_t word = divide_1x128<N>(x, bits);
        if (lane_id() % Quantized<V, N>::LANES == v) piece.scales = word;
    } else {
        divide_1x32<N>(x, bits);
    }
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const uint32_t q = pack_e4m3(x[i], x[i + 1], x[i + 2], x[i + 3]);
        piece.q[v][i / 4] = bits >= INFINITY_WORD ? NAN_E4M3 : q;
    }
}

/* Before the vectors of a piece: its scales, of blocks of 32. */
template <int V, int N>
__device__ __forceinline__ void begin_piece(Quantized<V, N> &piece, const Largest<V, N> &most,
                                            float weight, uint32_t how)
{
    piece.scales = 0;
    if (how == EPIC_QUANTIZE_1X128) return;
#pragma unroll
    for (int b = 0; b < 4; b++)
        piece.scales |= scale_1x32(weighted(most.of_word[b], weight)) << b * 8;
}

template <int V, int N>
__device__ __forceinline__ Quantized<V, N> quantize(float (&x)[V][N], uint32_t how)
{
    Quantized<V, N> piece;
    const Largest<V, N> most = find_largest<V, N>(x, how);
    begin_piece<V, N>(piece, most, 1.0f, how);
#pragma unroll
    for (int v = 0; v < V; v++) quantize_vector<V, N>(piece, v, x[v], most, 1.0f, how);
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
    else if constexpr (N == 16)
        store_once(row, make_uint4(q[0], q[1], q[2], q[3]), policy);
    else if constexpr (N == 8)
        store_once(row, (uint64_t)q[1] << 32 | q[0], policy);
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
