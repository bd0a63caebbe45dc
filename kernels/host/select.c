/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the variant of the host kernels for this processor; returns sizes of element
 * types. */
#include "kernels/kernels.h"

#include <stdatomic.h>

#ifdef EPIC_X86
#include <cpuid.h>
#endif

extern const host_kernels host_kernels_generic;

#ifdef EPIC_X86
extern const host_kernels host_kernels_avx2;
extern const host_kernels host_kernels_avx512;

/* Returns true if the processor has AVX2, FMA and F16C. __builtin_cpu_supports() also checks
 * that the system saves the registers. F16C is read from CPUID, because some compilers do not
 * accept "f16c" as an argument of __builtin_cpu_supports(). */
static bool runs_avx2(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0 &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* Returns true if the processor has the parts of AVX-512 that lanes_avx512.h uses. */
static bool runs_avx512(void)
{
    return runs_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}
#endif

int host_kernels_all(const host_kernels *out[4])
{
    int num = 0;
    out[num++] = &host_kernels_generic;
#ifdef EPIC_X86
    __builtin_cpu_init();
    if (runs_avx2()) out[num++] = &host_kernels_avx2;
    if (runs_avx512()) out[num++] = &host_kernels_avx512;
#endif
    return num;
}

/* Returns the kernels for this processor. Needs no lock: threads that call it at the same time
 * store the same pointer. */
const host_kernels *host_kernels_get(void)
{
    static _Atomic(const host_kernels *) chosen;
    const host_kernels *kernels = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!kernels) {
        const host_kernels *all[4];
        kernels = all[host_kernels_all(all) - 1];
        atomic_store_explicit(&chosen, kernels, memory_order_relaxed);
    }
    return kernels;
}

size_t epic_type_bytes(uint32_t type)
{
    static const size_t bytes[] = {
        [EPIC_BYTES] = 0, [EPIC_F32] = 4,  [EPIC_BF16] = 2, [EPIC_F16] = 2, [EPIC_F64] = 8,
        [EPIC_E4M3] = 1,  [EPIC_E8M0] = 1, [EPIC_I32] = 4,  [EPIC_I64] = 8};
    return type < sizeof bytes / sizeof *bytes ? bytes[type] : 0;
}
