/* SPDX-License-Identifier: Apache-2.0 */
/* The part of CUDA's C++ that the kernels use, for the emulator. Included before each of their
 * sources. */
#ifndef EPIC_EMULATED_DEVICE_H
#define EPIC_EMULATED_DEVICE_H

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "emulator.h"

#define __CUDACC__ 1
#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(n) alignas(n)
/* Without this, the compiler would use one function of each name for all files. */
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

/* ----------------------------------------------------------------------- who and where ---- */

struct emulated_number {
    unsigned x;
};
#define threadIdx (emulated_number{emulator_here->thread})
#define blockIdx (emulated_number{emulator_here->cta})
#define blockDim (emulated_number{emulator_here->threads})
#define gridDim (emulated_number{emulator_here->ctas})

/* ----------------------------------------------------------------------------- vectors ---- */

struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct uint2 {
    uint32_t x, y;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return (uint2){x, y};
}

struct float4 {
    float x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return (float4){x, y, z, w};
}

/* ------------------------------------------------------------------------------- warps ---- */

template <class T> inline uint64_t emulated_bits(T value)
{
    static_assert(sizeof(T) <= 8, "");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> inline T emulated_value(uint64_t bits)
{
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned emulated_lane()
{
    return emulator_here->thread % EMULATOR_WARP;
}

inline void emulated_mask(unsigned lanes)
{
    if (lanes != 0xffffffffu) emulator_die("a warp's function is called for lanes %08x", lanes);
}

template <class T> inline T emulated_from(unsigned lanes, T value, unsigned lane)
{
    emulated_mask(lanes);
    return emulated_value<T>(
        emulator_warp_sync(EMULATOR_SHUFFLE, emulated_bits(value))[lane % 32]);
}

template <class T> inline T __shfl_sync(unsigned lanes, T value, int lane)
{
    return emulated_from(lanes, value, (unsigned)lane);
}

template <class T> inline T __shfl_xor_sync(unsigned lanes, T value, int mask)
{
    return emulated_from(lanes, value, emulated_lane() ^ (unsigned)mask);
}

template <class T> inline T __shfl_up_sync(unsigned lanes, T value, unsigned delta)
{
    const unsigned lane = emulated_lane();
    return emulated_from(lanes, value, lane < delta ? lane : lane - delta);
}

inline unsigned __ballot_sync(unsigned lanes, int vote)
{
    unsigned votes = 0;
    emulated_mask(lanes);
    const uint64_t *all = emulator_warp_sync(EMULATOR_VOTE, vote != 0);
    for (unsigned i = 0; i < EMULATOR_WARP; i++) votes |= (unsigned)all[i] << i;
    return votes;
}

inline int __any_sync(unsigned lanes, int vote)
{
    return __ballot_sync(lanes, vote) != 0;
}

inline int __all_sync(unsigned lanes, int vote)
{
    return __ballot_sync(lanes, vote) == 0xffffffffu;
}

template <class T> inline unsigned __match_any_sync(unsigned lanes, T value)
{
    unsigned same = 0;
    emulated_mask(lanes);
    const uint64_t bits = emulated_bits(value), *all = emulator_warp_sync(EMULATOR_MATCH, bits);
    for (unsigned i = 0; i < EMULATOR_WARP; i++) same |= (unsigned)(all[i] == bits) << i;
    return same;
}

template <class T, class F> inline T emulated_reduce(unsigned lanes, T value, F join)
{
    emulated_mask(lanes);
    const uint64_t *all = emulator_warp_sync(EMULATOR_REDUCE, emulated_bits(value));
    for (unsigned i = 0; i < EMULATOR_WARP; i++) value = join(value, emulated_value<T>(all[i]));
    return value;
}

inline unsigned __reduce_or_sync(unsigned lanes, unsigned value)
{
    return emulated_reduce(lanes, value, [](unsigned a, unsigned b) { return a | b; });
}

inline unsigned __reduce_add_sync(unsigned lanes, unsigned value)
{
    unsigned sum = 0;
    emulated_mask(lanes);
    const uint64_t *all = emulator_warp_sync(EMULATOR_REDUCE, emulated_bits(value));
    for (unsigned i = 0; i < EMULATOR_WARP; i++) sum += (unsigned)all[i];
    return sum;
}

template <class T> inline T __reduce_max_sync(unsigned lanes, T value)
{
    return emulated_reduce(lanes, value, [](T a, T b) { return std::max(a, b); });
}

template <class T> inline T __reduce_min_sync(unsigned lanes, T value)
{
    return emulated_reduce(lanes, value, [](T a, T b) { return std::min(a, b); });
}

inline void __syncwarp()
{
    (void)emulator_warp_sync(EMULATOR_SYNC, 0);
}

inline void __syncthreads()
{
    (void)emulator_sync(1);
}

inline int __syncthreads_and(int good)
{
    return emulator_sync(good != 0);
}

inline void __nanosleep(unsigned)
{
    emulator_nap();
}

/* ------------------------------------------------------------------------------ memory ---- */

inline void __threadfence()
{
    emulator_fence(0);
}

inline void __threadfence_system()
{
    emulator_fence(1);
}

template <class T> inline T __ldg(const T *p)
{
    return *p;
}

template <class T> inline T __ldcg(const T *p)
{
    return *(const volatile T *)p;
}

template <class T> inline T atomicCAS(T *p, T expected, T value)
{
    __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

template <class T, class F> inline T emulated_update(T *p, F change)
{
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &old, change(old), false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return old;
}

template <class T> inline T atomicAdd(T *p, std::common_type_t<T> value)
{
    return emulated_update(p, [=](T old) { return (T)(old + value); });
}

template <class T> inline T atomicOr(T *p, std::common_type_t<T> value)
{
    return emulated_update(p, [=](T old) { return (T)(old | value); });
}

template <class T> inline T atomicMin(T *p, std::common_type_t<T> value)
{
    return emulated_update(p, [=](T old) { return std::min(old, value); });
}

template <class T> inline T atomicMax(T *p, std::common_type_t<T> value)
{
    return emulated_update(p, [=](T old) { return std::max(old, value); });
}

/* ----------------------------------------------------------------------------- numbers ---- */

template <class A, class B> inline std::common_type_t<A, B> max(A a, B b)
{
    typedef std::common_type_t<A, B> T;
    return std::max((T)a, (T)b);
}

template <class A, class B> inline std::common_type_t<A, B> min(A a, B b)
{
    typedef std::common_type_t<A, B> T;
    return std::min((T)a, (T)b);
}

inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}

inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

inline int __ffsll(long long x)
{
    return __builtin_ffsll(x);
}

inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}

inline unsigned __umulhi(unsigned x, unsigned y)
{
    return (unsigned)((unsigned long long)x * y >> 32);
}

inline float __uint_as_float(unsigned x)
{
    return emulated_value<float>(x);
}

/* Results of arithmetic are always the same NaN, as on a GPU. */
inline float emulated_nan(float x)
{
    return x != x ? __uint_as_float(0x7fffffffu) : x;
}

inline unsigned __float_as_uint(float x)
{
    return (unsigned)emulated_bits(x);
}

inline float __fmaf_rn(float a, float b, float c)
{
    return emulated_nan(std::fma(a, b, c));
}

inline float __fmul_rn(float a, float b)
{
    return emulated_nan(a * b);
}

inline float __fdiv_rn(float a, float b)
{
    return emulated_nan(a / b);
}

inline float __frcp_rn(float x)
{
    return emulated_nan(1 / x);
}

#endif
