/* SPDX-License-Identifier: Apache-2.0 */
/* Dot products of rows, bit-identical to the dot products of the CPU code. A row is divided
 * into blocks of 1024 elements (one piece), and a warp computes one block. It adds the products
 * into eight accumulators per lane, then adds the accumulators of each lane, and then adds the
 * sums of the lanes. */
#ifndef EPIC_DOT_CUH
#define EPIC_DOT_CUH

#include "cuda/common/rows.cuh"

/* The eight accumulators of one lane for one block of 1024 elements. The CPU code has 256
 * accumulators per block. So that the GPU adds in the same order, lane L of the warp has the
 * eight accumulators with these indices:
 *
 *   16-bit elements   8 * L to 8 * L + 7
 *   float32 elements  4 * L to 4 * L + 3, and 128 + 4 * L to 128 + 4 * L + 3
 *
 * Members:
 *
 *   V            number of 16-byte vectors per lane and block
 *   BLOCK        number of threads per CTA of combine_backward
 *   lane_sum()   adds the accumulators of a lane; with float32, of two adjacent lanes
 *   add_lanes()  adds the results of lane_sum() over the lanes: first the results of lanes at
 *                distance 16, then 8, and so on down to LAST
 *   LAST         1; with float32 it is 2, because lane_sum() has already added the lanes at
 *                distance 1 */
template <class ROW> struct Dot;

template <class ROW> struct Dot16 {
    static constexpr int V = 4, BLOCK = 512, LAST = 1;
    float acc[8];

    __device__ __forceinline__ void add_products(int, const float *x, const float *y)
    {
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i] = __fmaf_rn(x[i], y[i], acc[i]);
    }
    __device__ __forceinline__ float lane_sum() const
    {
        const float a = acc[0] + acc[4], b = acc[1] + acc[5];
        const float c = acc[2] + acc[6], d = acc[3] + acc[7];
        return (a + c) + (b + d);
    }
};

template <> struct Dot<Bf16> : Dot16<Bf16> {
};
template <> struct Dot<F16> : Dot16<F16> {
};

template <> struct Dot<F32> {
    /* with 384 threads per CTA, each thread can have 168 registers */
    static constexpr int V = 8, BLOCK = 384, LAST = 2;
    float acc[8]; /* acc[0..3]: sums of the even vectors; acc[4..7]: sums of the odd vectors */

    /* Adds the products x[i] * y[i] of vector v of the block to the first four accumulators if
     * v is even, otherwise to the last four. */
    __device__ __forceinline__ void add_products(int v, const float *x, const float *y)
    {
        float *a = acc + v % 2 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = __fmaf_rn(x[i], y[i], a[i]);
    }
    /* Returns the sum of the accumulators a[0..3] of this lane and of the adjacent lane. */
    static __device__ __forceinline__ float sum_group(const float *a)
    {
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = a[i] + __shfl_xor_sync(ALL_LANES, a[i], 1);
        return (s[0] + s[2]) + (s[1] + s[3]);
    }
    __device__ __forceinline__ float lane_sum() const
    {
        return sum_group(acc) + sum_group(acc + 4);
    }
};

/* Returns the dot product of a block: the sum of the values `s` of all lanes. `s`: this lane's
 * result of lane_sum(). Called by a whole warp. */
template <class ROW> __device__ __forceinline__ float add_lanes(float s)
{
#pragma unroll
    for (int distance = WARP / 2; distance >= Dot<ROW>::LAST; distance /= 2)
        s += __shfl_xor_sync(ALL_LANES, s, distance);
    return s;
}

__device__ __forceinline__ float4 add_float4(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Like add_lanes() above, but one lane computes the sum alone. `lanes`: array in shared memory
 * with the result of lane_sum() of each lane. */
template <class ROW> __device__ __forceinline__ float add_lanes(const float4 *lanes)
{
    const float4 a = add_float4(add_float4(lanes[0], lanes[4]), add_float4(lanes[2], lanes[6]));
    const float4 b = add_float4(add_float4(lanes[1], lanes[5]), add_float4(lanes[3], lanes[7]));
    const float4 s = add_float4(a, b);
    return Dot<ROW>::LAST == 1 ? (s.x + s.z) + (s.y + s.w) : s.x + s.z;
}

/* x and y are this lane's elements of two rows, in one block of 1024 elements. Returns this
 * lane's part of the block's dot product (lane_sum()). add_lanes() adds the parts of all
 * lanes. */
template <class ROW, int V>
__device__ __forceinline__ float dot_of(const float (&x)[V][ROW::N], const uint4 (&y)[V])
{
    Dot<ROW> dot;
#pragma unroll
    for (int i = 0; i < 8; i++) dot.acc[i] = -0.0f;
#pragma unroll
    for (int v = 0; v < V; v++) {
        float b[ROW::N];
        ROW::unpack_floats(y[v], b);
        dot.add_products(v, x[v], b);
    }
    return dot.lane_sum();
}

/* Returns the 16-byte vector weight * x, rounded to type ROW. */
template <class ROW>
__device__ __forceinline__ uint4 scale_vector(float weight, const float (&x)[ROW::N])
{
    float a[ROW::N];
#pragma unroll
    for (int i = 0; i < ROW::N; i++) a[i] = __fmul_rn(weight, x[i]);
    return ROW::pack_floats(a);
}

#endif
