/* SPDX-License-Identifier: Apache-2.0 */
/* All assembly.  "relaxed": single words that peers may read and write at the same time; "once":
 * rows that nobody will read again soon, first to leave the L2 so that staging stays there. */
#ifndef EPIC_PTX_CUH
#define EPIC_PTX_CUH

#include <stdint.h>

#define POISON 0xffffffffu

__device__ __forceinline__ uint64_t timer_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

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

/* Two words side by side, at a multiple of 16 bytes; each is whole. */
__device__ __forceinline__ void load_two_words(const uint64_t *p, uint64_t &a, uint64_t &b)
{
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];"
                 : "=l"(a), "=l"(b)
                 : "l"(p)
                 : "memory");
}

/* What was stored before, here or by the kernels before, is seen before what is stored after; what
 * was read before is older than what is read after. */
__device__ __forceinline__ void fence_system()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

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

__device__ __forceinline__ void store_release(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/* An ordinary store that the compiler leaves in its place. */
__device__ __forceinline__ void store_in_place(uint4 *p, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint64_t policy_once()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* For memory that nobody writes during the kernel. */
__device__ __forceinline__ uint4 load_once(const void *p, uint64_t policy)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
}

/* The same, staying in the L2: somebody will read it again. */
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

/* Copies into shared memory that go on in the background; `to` is a shared address. */
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

__device__ __forceinline__ void end_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for all but the last `PENDING` groups of copies. */
template <int PENDING> __device__ __forceinline__ void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

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

/* Bulk stores, of sm_90: one thread gives the SM's copy engine bytes of shared memory, whole vectors,
 * to bring to global memory in the background.  What threads wrote there needs a fence of theirs
 * (fence_bulk) before.  A thread waits for its own stores, in groups. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BULK_ASM(...) asm volatile(__VA_ARGS__)
#else
#define BULK_ASM(...) /* never launched there */
#endif

/* To rows that nobody will read again soon. */
__device__ __forceinline__ void bulk_once(void *to, uint32_t from, uint32_t bytes,
                                          uint64_t policy)
{
    BULK_ASM(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
            to),
        "r"(from), "r"(bytes), "l"(policy)
        : "memory");
}

/* To staging of a peer. */
__device__ __forceinline__ void bulk_send(void *to, uint32_t from, uint32_t bytes)
{
    BULK_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
             "r"(bytes)
             : "memory");
}

/* To this rank's own staging. */
__device__ __forceinline__ void bulk_store_local(void *to, uint32_t from, uint32_t bytes)
{
    bulk_send(to, from, bytes);
}

/* Rows that will be read soon come to the L2. */
__device__ __forceinline__ void bulk_prefetch(const void *from, uint32_t bytes)
{
    BULK_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void end_bulk(void)
{
    BULK_ASM("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until all but the last `PENDING` groups have been read from shared memory. */
template <int PENDING> __device__ __forceinline__ void wait_bulk_read(void)
{
    BULK_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Until all groups are done. */
__device__ __forceinline__ void wait_bulk(void)
{
    BULK_ASM("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void fence_bulk(void)
{
    BULK_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Numbers that are to stay in registers, not to be made again from what they were made of. */
template <int N> __device__ __forceinline__ void keep_in_registers(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i]));
}

__device__ __forceinline__ void keep_in_registers(uint32_t &x)
{
    asm volatile("" : "+r"(x));
}

/* The larger of the sizes; a NaN if one of them is. */
__device__ __forceinline__ float max_size(float x, float y)
{
    float size;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(size) : "f"(fabsf(x)), "f"(fabsf(y)));
    return size;
}

/* The larger of each half, as numbers without sign. */
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b)
{
    return __vmaxu2(a, b);
}

#if __CUDA_ARCH__ >= 890
/* Four numbers as e4m3, to nearest even, 448 for what is larger; a first. */
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d)
{
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (uint32_t)high << 16 | low;
}
#else
/* Of a number; kernels/host/convert.h tells why. */
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

/* 2^x, but for the last bit or two. */
__device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x, but for the last bit or two. */
__device__ __forceinline__ float reciprocal_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
