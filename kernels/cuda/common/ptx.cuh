/* SPDX-License-Identifier: Apache-2.0 */
/* All inline assembly of the kernels, except that of the tensor cores (experts/tensor.cuh).
 * Names of loads and stores end in:
 *
 *   *_relaxed  for single words that peers may access at the same time. Relaxed loads and
 *              stores do not order other accesses.
 *   *_once     for rows that no kernel reads again soon. They leave the L2 cache first, so that
 *              staging stays in it.
 *   *_again    for rows that are read again soon */
#ifndef EPIC_PTX_CUH
#define EPIC_PTX_CUH

#include <stdint.h>

/* the mark of a word that has not arrived (heap.h) */
#define POISON 0xffffffffu

__device__ __forceinline__ uint64_t timer_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/* Called at the start of each poll in a wait. Does nothing on GPUs. The emulator of the tests
 * replaces it: there a sleeping thread continues when one of the words has changed that it has
 * loaded since this call. */
__device__ __forceinline__ void begin_poll()
{
}

/* The load_relaxed() functions load memory to which peers may store at the same time. Each
 * 32-bit or 64-bit word is loaded as a whole. But some words of a vector may be old while other
 * words are new. */
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* Does the same as load_relaxed(). Used for a word that no thread waits for: in the emulator, a
 * change of this word does not wake a sleeping thread (begin_poll()). */
__device__ __forceinline__ uint32_t load_unawaited(const uint32_t *p)
{
    return load_relaxed(p);
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

/* Loads two words from p, which is aligned to 16 bytes. Each word is loaded as a whole, but one
 * may be old while the other is new. */
__device__ __forceinline__ void load_two_words(const uint64_t *p, uint64_t &a, uint64_t &b)
{
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];"
                 : "=l"(a), "=l"(b)
                 : "l"(p)
                 : "memory");
}

/* A fence between this rank and all other ranks (acq_rel.sys). A rank that sees a store of this
 * thread after the fence also sees all stores before the fence, of this thread and of earlier
 * kernels. Loads after the fence do not read older values than loads before the fence. */
__device__ __forceinline__ void fence_system()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/* Loads a word in this GPU's memory with acquire order. If this load reads the value that
 * another thread stored with store_release(), later loads of this thread see everything that
 * the other thread stored before its store_release(). */
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

/* Stores a word to this GPU's memory with release order, see load_acquire(). */
__device__ __forceinline__ void store_release(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/* Stores a vector with an ordinary store, which is weaker than a relaxed store. The compiler
 * neither moves nor removes it. */
__device__ __forceinline__ void store_in_place(uint4 *p, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

/* Returns the L2 cache policy (evict first) that callers pass to the *_once() functions. */
__device__ __forceinline__ uint64_t policy_once()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Loads 16 bytes that no thread writes during the kernel and no kernel reads again soon. */
__device__ __forceinline__ uint4 load_once(const void *p, uint64_t policy)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
}

/* Loads 16 bytes that no thread writes during the kernel and that are read again soon. */
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

/* These functions start an asynchronous copy (cp.async) from global to shared memory.
 * copy_word() copies 4 bytes, the other functions copy 16 bytes. `to`: shared-memory
 * address. */
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

/* Closes a group of asynchronous copies (cp.async). The group contains all copies that this
 * thread has started since it last called end_copies(). */
__device__ __forceinline__ void end_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for this thread's asynchronous copies, except the copies of its last PENDING groups. */
template <int PENDING> __device__ __forceinline__ void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* load_shared() loads 16 bytes from shared memory. store_shared() stores 16 or 4 bytes. p:
 * shared-memory address, which must be aligned to this number of bytes. */
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

/* Bulk stores (cp.async.bulk), from sm_90 on. One thread starts a copy of a multiple of 16
 * bytes from shared to global memory. The copy engine of the SM then performs the copy in the
 * background.
 *
 *   1. threads that wrote the shared memory call fence_bulk(), then synchronize
 *   2. one thread starts bulk stores, then ends the group with end_bulk()
 *   3. the same thread waits: with wait_bulk_read() before the shared memory is written again,
 *      or with wait_bulk() until all stores are complete */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BULK_ASM(...) asm volatile(__VA_ARGS__)
#else
#define BULK_ASM(...)
#endif

/* Starts a bulk store to global memory that is not read again soon. */
__device__ __forceinline__ void bulk_once(void *to, uint32_t from, uint32_t bytes,
                                          uint64_t policy)
{
    BULK_ASM(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
            to),
        "r"(from), "r"(bytes), "l"(policy)
        : "memory");
}

/* Starts a bulk store to the staging of a peer. */
__device__ __forceinline__ void bulk_send(void *to, uint32_t from, uint32_t bytes)
{
    BULK_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
             "r"(bytes)
             : "memory");
}

/* Starts a bulk store to this rank's own staging. This is a separate function because the
 * emulator of the tests replaces it. */
__device__ __forceinline__ void bulk_store_local(void *to, uint32_t from, uint32_t bytes)
{
    bulk_send(to, from, bytes);
}

/* Starts to load bytes into the L2 cache, so that later reads of them are fast. */
__device__ __forceinline__ void bulk_prefetch(const void *from, uint32_t bytes)
{
    BULK_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/* Ends a group of bulk stores of this thread. wait_bulk_read() counts these groups. */
__device__ __forceinline__ void end_bulk(void)
{
    BULK_ASM("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until this thread's bulk stores have read their data from shared memory, which may then
 * be overwritten. Does not wait for the stores of the last PENDING groups. */
template <int PENDING> __device__ __forceinline__ void wait_bulk_read(void)
{
    BULK_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Waits until all bulk stores of this thread are complete. */
__device__ __forceinline__ void wait_bulk(void)
{
    BULK_ASM("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Makes this thread's stores to shared memory visible to bulk stores that the CTA starts
 * later. */
__device__ __forceinline__ void fence_bulk(void)
{
    BULK_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Keeps values in registers. Without this call, the compiler might compute the values again at
 * each use. */
template <int N> __device__ __forceinline__ void keep_in_registers(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i]));
}

__device__ __forceinline__ void keep_in_registers(uint32_t &x)
{
    asm volatile("" : "+r"(x));
}

/* Returns the larger of |x| and |y|; NaN if x or y is NaN. */
__device__ __forceinline__ float max_size(float x, float y)
{
    float size;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(size) : "f"(fabsf(x)), "f"(fabsf(y)));
    return size;
}

/* Compares the low 16 bits of a and b, and separately the high 16 bits, as unsigned integers.
 * Each half of the result is the larger of the two halves. */
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b)
{
    return __vmaxu2(a, b);
}

#if __CUDA_ARCH__ >= 890
/* Converts four floats to e4m3, rounded to nearest even and limited to 448. `a` becomes the
 * lowest byte of the result. */
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d)
{
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (uint32_t)high << 16 | low;
}
#else
/* Converts a float to e4m3 on GPUs before sm_89, which have no instruction for it. The result
 * is bit-identical to the result of the instruction. kernels/host/convert.h explains the
 * method. */
__device__ __forceinline__ uint32_t e4m3_of(float x)
{
    const uint32_t bits = __float_as_uint(x), size = bits & 0x7fffffff;
    const uint32_t clamped = min(size, 0x43e00000u);
    const uint32_t normal = ((clamped + 0x7ffff + (clamped >> 20 & 1)) >> 20) - (120u << 3);
    const uint32_t small = __float_as_uint(__uint_as_float(clamped) + 0x1p14f) - 0x46800000u;
    if (size > 0x7f800000u) return 0x7f;
    return (bits >> 24 & 0x80) | (clamped < 0x3c800000u ? small : normal);
}

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d)
{
    return e4m3_of(a) | e4m3_of(b) << 8 | e4m3_of(c) << 16 | e4m3_of(d) << 24;
}
#endif

/* Returns 2^x (ex2.approx). The error is in the last one or two bits. */
__device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns 1 / x (rcp.approx). The error is in the last one or two bits. */
__device__ __forceinline__ float reciprocal_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
