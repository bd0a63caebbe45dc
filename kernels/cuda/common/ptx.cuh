/* SPDX-License-Identifier: Apache-2.0 */
/* All inline assembly of the kernels, except that of the tensor cores (experts/tensor.cuh).
 *
 * "relaxed": loads and stores of single words that peers may access at the same time; they give
 * no order. "once": rows that no kernel reads again soon; they leave the L2 first, so that
 * staging stays there. "again": rows that are read again soon. */
#ifndef EPIC_PTX_CUH
#define EPIC_PTX_CUH

#include <stdint.h>

#define POISON 0xffffffffu

/* Time of the device's clock in nanoseconds. */
__device__ __forceinline__ uint64_t timer_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/* Loads memory that peers may store to at the same time. The words of a vector may differ in
 * age. */
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ uint4 load_relaxed(const uint4 *p)
{
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

/* Loads two words at a multiple of 16 bytes. Each word is read whole; they may be of different
 * age. */
__device__ __forceinline__ void load_two_words(const uint64_t *p, uint64_t &a, uint64_t &b)
{
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];"
                 : "=l"(a), "=l"(b)
                 : "l"(p)
                 : "memory");
}

/* Orders memory for all ranks: stores before it, of this thread and of earlier kernels, become
 * visible before stores after it, and loads before it read older values than loads after it. */
__device__ __forceinline__ void fence_system()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/* Loads of this thread after it see what the GPU's threads stored before the matching
 * store_release(). */
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* Stores to memory that peers may load at the same time. */
__device__ __forceinline__ void store_relaxed(uint32_t *p, uint32_t v)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint64_t *p, uint64_t v)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint4 *p, uint4 v)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* Stores a word; loads with load_acquire() that read it see what this thread stored before. */
__device__ __forceinline__ void store_release(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/* An ordinary store that the compiler does not move. */
__device__ __forceinline__ void store_in_place(uint4 *p, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

/* The cache policy of the *_once() accesses. */
__device__ __forceinline__ uint64_t policy_once()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Loads memory that no thread writes during the kernel. */
__device__ __forceinline__ uint4 load_once(const void *p, uint64_t policy)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
}

/* Like load_once(), but the line stays in the L2, because it is read again. */
__device__ __forceinline__ uint4 load_again(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ void store_once(void *p, uint4 v, uint64_t policy)
{
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(p), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void store_once(void *p, uint64_t v, uint64_t policy)
{
    asm volatile("st.global.L2::cache_hint.u64 [%0], %1, %2;" ::"l"(p), "l"(v), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void store_once(void *p, uint32_t v, uint64_t policy)
{
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(p), "r"(v), "l"(policy)
                 : "memory");
}

/* Asynchronous copies of 16 bytes (copy_word: 4) into shared memory. `to` is a shared address.
 */
__device__ __forceinline__ void copy_once(uint32_t to, const void *from, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_again(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_word(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/* Ends a group of asynchronous copies of this thread. */
__device__ __forceinline__ void end_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for this thread's groups of copies, except the last PENDING ones. */
template <int PENDING> __device__ __forceinline__ void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* The address in shared memory of a generic pointer. */
__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint4 load_shared(uint32_t p)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(uint32_t p, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t p, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory");
}

/* Bulk stores, from sm_90 on: one thread starts the copy of whole vectors from shared to global
 * memory; the copy engine of the SM performs it in the background. Threads that wrote the
 * shared memory must call fence_bulk() first. A thread waits for its own stores, in groups. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BULK_ASM(...) asm volatile(__VA_ARGS__)
#else
#define BULK_ASM(...)
#endif

/* A bulk store to rows that are not read again soon. */
__device__ __forceinline__ void bulk_once(void *to, uint32_t from, uint32_t bytes,
                                          uint64_t policy)
{
    BULK_ASM(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
            to),
        "r"(from), "r"(bytes), "l"(policy)
        : "memory");
}

/* A bulk store to staging of a peer. */
__device__ __forceinline__ void bulk_send(void *to, uint32_t from, uint32_t bytes)
{
    BULK_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
             "r"(bytes)
             : "memory");
}

/* A bulk store to this rank's own staging. */
__device__ __forceinline__ void bulk_store_local(void *to, uint32_t from, uint32_t bytes)
{
    bulk_send(to, from, bytes);
}

/* Loads rows that are read soon into the L2. */
__device__ __forceinline__ void bulk_prefetch(const void *from, uint32_t bytes)
{
    BULK_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/* Ends a group of bulk stores of this thread. */
__device__ __forceinline__ void end_bulk(void)
{
    BULK_ASM("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until all groups except the last PENDING ones have been read from shared memory. */
template <int PENDING> __device__ __forceinline__ void wait_bulk_read(void)
{
    BULK_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Waits until all groups are complete. */
__device__ __forceinline__ void wait_bulk(void)
{
    BULK_ASM("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Makes this thread's stores to shared memory visible to later bulk stores of the CTA. */
__device__ __forceinline__ void fence_bulk(void)
{
    BULK_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Keeps values in registers: the compiler does not compute them again from their inputs. */
template <int N> __device__ __forceinline__ void keep_in_registers(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i]));
}

__device__ __forceinline__ void keep_in_registers(uint32_t &x)
{
    asm volatile("" : "+r"(x));
}

/* The larger absolute value; NaN if either is NaN. */
__device__ __forceinline__ float max_size(float x, float y)
{
    float size;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(size) : "f"(fabsf(x)), "f"(fabsf(y)));
    return size;
}

/* The larger of each 16-bit half, as unsigned numbers. */
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b)
{
    return __vmaxu2(a, b);
}

#if __CUDA_ARCH__ >= 890
/* Converts four numbers to e4m3, rounded to nearest even and limited to 448; `a` is the lowest
 * byte. */
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d)
{
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (uint32_t)high << 16 | low;
}
#else
/* Converts a number to e4m3 without the instruction of sm_89; kernels/host/convert.h explains
 * how. */
__device__ __forceinline__ uint32_t e4m3_of(float x)
{
    const uint32_t bits = __float_as_uint(x), size = bits & 0x7fffffff;
    const uint32_t kept = min(size, 0x43e00000u);
    const uint32_t normal = ((kept + 0x7ffff + (kept >> 20 & 1)) >> 20) - (120u << 3);
    const uint32_t small = __float_as_uint(__uint_as_float(kept) + 0x1p14f) - 0x46800000u;
    if (size > 0x7f800000u) return 0x7f;
    return (bits >> 24 & 0x80) | (kept < 0x3c800000u ? small : normal);
}

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d)
{
    return e4m3_of(a) | e4m3_of(b) << 8 | e4m3_of(c) << 16 | e4m3_of(d) << 24;
}
#endif

/* 2^x with an error in the last one or two bits. */
__device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x with an error in the last one or two bits. */
__device__ __forceinline__ float reciprocal_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
