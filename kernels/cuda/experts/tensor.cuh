/* SPDX-License-Identifier: Apache-2.0 */
/* Hopper's PTX instructions for experts/grouped_hopper.cuh: mbarriers, TMA copies and
 * wgmma, only on sm_90a. Addresses of shared memory have 32 bits. A "box" is the part of a
 * matrix that one TMA copy moves.
 *
 *   barrier_*          mbarrier in shared memory: counts arrivals and bytes of TMA copies
 *   load_box*          global -> shared memory; a barrier counts the copied bytes
 *   store_box, add_box shared -> global memory; then commit_boxes(), then wait_boxes*() to wait
 *   issue_wgmma        asynchronous product of two matrices in shared memory: fence_wgmma(),
 *                      issue_wgmma(), commit_wgmma(), then wait_wgmma() */
#ifndef EPIC_TENSOR_CUH
#define EPIC_TENSOR_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* -------------------------------------------------------------------------- barriers ---- */

/* Initializes a barrier whose phases complete after `arrivals` arrivals. */
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* Arrives at the barrier. The current phase of the barrier then completes only after TMA copies
 * have also written `bytes` bytes. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

/* Phases of a barrier have parity 0 and 1, alternately. Waits until the phase with parity
 * `parity` has completed. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives at the barrier that has the same address in the shared memory of CTA `cta` of the
 * cluster. No memory order is needed, because the arrival only reports that wgmma has read
 * shared memory. A .release.cluster would be slow. */
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int cta)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(barrier),
                 "r"(cta)
                 : "memory");
}

/* Makes initialized barriers visible to the other CTAs of the cluster and to TMA copies. */
__device__ __forceinline__ void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Waits until all threads of the cluster have called it. */
__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.aligned;\n"
                 "barrier.cluster.wait.aligned;" ::
                     : "memory");
}

__device__ __forceinline__ int cluster_rank()
{
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Waits until `threads` threads of the CTA have called this function with the same barrier
 * id. */
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* These functions change the number of registers of a thread to N. Called by all threads of the
 * warpgroup. */
template <int N> __device__ __forceinline__ void grow_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void shrink_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ----------------------------------------------------------------------------- copies ---- */

/* Starts the TMA copy of the box at (x, y) or (x, y, z) of a matrix in global memory to
 * shared memory. The barrier counts the bytes that arrive. */
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* Starts the TMA copy of a box to the same shared-memory address in both CTAs of the cluster.
 * In each CTA, the barrier at the same offset counts the bytes. */
__device__ __forceinline__ void load_box_multicast(uint32_t to, const CUtensorMap *map,
                                                   uint32_t barrier, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"((uint16_t)3)
                 : "memory");
}

/* These functions start the TMA copy of a box from shared memory to a matrix in global memory.
 * store_box() overwrites the matrix there; add_box() adds the box to it. */
__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t from, int x, int y,
                                          int z)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], "
                 "[%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void add_box(const CUtensorMap *map, uint32_t from, int x, int y,
                                        int z)
{
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* Puts all box stores that this thread has started since its last call into one group. */
__device__ __forceinline__ void commit_boxes()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until this thread's box stores have read their data from shared memory, except the
 * stores of the newest PENDING groups. Then the thread may overwrite this shared memory. */
template <int PENDING> __device__ __forceinline__ void wait_boxes_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Waits until all box stores of this thread have completed. */
__device__ __forceinline__ void wait_boxes()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Makes this thread's earlier stores to shared memory visible to TMA copies and wgmma. */
__device__ __forceinline__ void fence_async_proxy()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---------------------------------------------------------------------- shared memory ---- */

/* These functions store four words, or two float32 values, to an address of shared memory. */
__device__ __forceinline__ void write_shared(uint32_t to, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void write_shared(uint32_t to, float x, float y)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

/* Stores four 8 x 8 matrices of 16-bit elements to shared memory (stmatrix). Lane L passes the
 * address of row L % 8 of matrix L / 8. It also passes two elements of each of the four
 * matrices, in a, b, c and d. Called by a whole warp. */
__device__ __forceinline__ void write_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

/* ------------------------------------------------------------------------ wgmma ---- */

/* Returns the wgmma descriptor of a matrix in shared memory with 128-byte swizzle. `leading`
 * and `stride` are PTX's leading and stride dimension byte offsets, in units of 16 bytes. */
__device__ __forceinline__ uint64_t describe_factor(uint32_t address, int leading, int stride)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)leading << 16 |
           (uint64_t)stride << 32 | 1ull << 62;
}

/* fence_wgmma() orders earlier accesses to registers before the next wgmma. commit_wgmma() puts
 * all wgmma since its last call into one group. wait_wgmma() waits until all groups except the
 * newest PENDING groups are complete. */
__device__ __forceinline__ void fence_wgmma()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_wgmma()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ __forceinline__ void wait_wgmma()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Operands of inline assembly for the accumulators of wgmma: 8, 64 or 128 registers, from d[i]
 * on. */
#define SUMS_8(d, i)                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
        "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_64(d, i)                                                                        \
    SUMS_8(d, i), SUMS_8(d, i + 8), SUMS_8(d, i + 16), SUMS_8(d, i + 24), SUMS_8(d, i + 32), \
        SUMS_8(d, i + 40), SUMS_8(d, i + 48), SUMS_8(d, i + 56)
#define SUMS_128(d) SUMS_64(d, 0), SUMS_64(d, 64)

/* One wgmma: d [64, 256] += a [64, 16] * b [16, 256]. If `add` is 0: d = a * b. TRANSPOSE_A is
 * 1 if the summed dimension is not contiguous in matrix a. TRANSPOSE_B is 1 if it is not
 * contiguous in matrix b. */
#define WGMMA_256(type)                                                                        \
    asm volatile(                                                                              \
        "{\n"                                                                                  \
        ".reg .pred p;\n"                                                                      \
        "setp.ne.b32 p, %130, 0;\n"                                                            \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {"                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "               \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "     \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "     \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "     \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "     \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
        "%110, %111, "                                                                         \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
        "%126, %127}, "                                                                        \
        "%128, %129, p, 1, 1, %131, %132;\n"                                                   \
        "}"                                                                                    \
        : SUMS_128(d)                                                                          \
        : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))

template <int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void issue_wgmma(float (&d)[128], uint64_t a, uint64_t b, int add,
                                            __nv_bfloat16)
{
    WGMMA_256("bf16");
}

template <int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void issue_wgmma(float (&d)[128], uint64_t a, uint64_t b, int add,
                                            __half)
{
    WGMMA_256("f16");
}

/* One wgmma of e4m3: d [64, 128] += a [64, 32] * b [32, 128]. If `add` is 0: d = a * b. The
 * summed dimension must be contiguous in both matrices. */
__device__ __forceinline__ void issue_wgmma(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1;\n"
        "}"
        : SUMS_64(d, 0)
        : "l"(a), "l"(b), "r"(add));
}

#endif
