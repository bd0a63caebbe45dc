/* SPDX-License-Identifier: Apache-2.0 */
/* Two functions: one launches a kernel, the other returns the address of a kernel's dynamic
 * shared memory. The emulator, in which tests run kernels on the CPU, replaces this file
 * (tests/emulator/include). */
#ifndef EPIC_LAUNCH_CUH
#define EPIC_LAUNCH_CUH

#include <cuda_runtime_api.h>
#include <stdint.h>

/* Enqueues a kernel with `ctas` CTAs of `threads` threads, and `shared_bytes` bytes of dynamic
 * shared memory per CTA. */
template <class Kernel, class... Arguments>
static cudaError_t launch_kernel(Kernel kernel, int ctas, int threads, int shared_bytes,
                                 cudaStream_t stream, const Arguments &...arguments)
{
    kernel<<<(unsigned)ctas, (unsigned)threads, (size_t)shared_bytes, stream>>>(arguments...);
    return cudaGetLastError();
}

/* Returns the address of the CTA's dynamic shared memory, aligned to 128 bytes. */
__device__ __forceinline__ void *dynamic_shared()
{
    extern __shared__ __align__(128) uint8_t dynamic_memory[];
    return dynamic_memory;
}

#endif
