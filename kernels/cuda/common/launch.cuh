/* SPDX-License-Identifier: Apache-2.0 */
/* Launching a kernel, and what a kernel needs from its launch: the address of its dynamic shared
 * memory, and the wait for the previous kernel. The emulator, in which tests run kernels on the
 * CPU, replaces this file (tests/emulator/include). */
#ifndef EPIC_LAUNCH_CUH
#define EPIC_LAUNCH_CUH

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Returns whether kernels of the current device can start while the previous kernel of their
 * stream ends. The device must have compute capability 9.0 (Hopper) or later. The build does
 * not define EPIC_EARLY_START if it makes code for older devices that a Hopper device could run
 * too, because in such code wait_for_previous_kernel() does nothing. The environment variable
 * EPIC_EARLY_START=0 switches early starts off. */
inline bool can_start_early()
{
#ifdef EPIC_EARLY_START
    static const char *const text = getenv("EPIC_EARLY_START");
    static const bool is_off = text && !strcmp(text, "0");
    static thread_local int known_device = -1, major = 0;
    int device = -1;
    if (is_off || cudaGetDevice(&device) != cudaSuccess) return false;
    if (device != known_device &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
            cudaSuccess)
        known_device = device;
    return device == known_device && major >= 9;
#else
    return false;
#endif
}

/* Returns the launch attribute with which a kernel starts when all CTAs of the previous kernel
 * of the stream have exited, before that kernel's stores are visible. So the kernel must call
 * wait_for_previous_kernel(). CUDA calls this programmatic dependent launch. */
inline cudaLaunchAttribute early_start()
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
}

/* Enqueues a kernel. If this fails, resets CUDA's last error, because the caller reports the
 * returned error. */
template <class Kernel, class... Arguments>
static cudaError_t launch_configured(const cudaLaunchConfig_t &how, Kernel kernel,
                                     const Arguments &...arguments)
{
    const cudaError_t error = cudaLaunchKernelEx(&how, kernel, arguments...);
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error;
}

/* Enqueues a kernel with `ctas` CTAs of `threads` threads, and `shared_bytes` bytes of dynamic
 * shared memory per CTA. The kernel may start early (early_start()). */
template <class Kernel, class... Arguments>
static cudaError_t launch_kernel(Kernel kernel, int ctas, int threads, int shared_bytes,
                                 cudaStream_t stream, const Arguments &...arguments)
{
    cudaLaunchAttribute early = early_start();
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3((unsigned)ctas);
    how.blockDim = dim3((unsigned)threads);
    how.dynamicSmemBytes = (size_t)shared_bytes;
    how.stream = stream;
    how.attrs = &early;
    how.numAttrs = can_start_early() ? 1 : 0;
    return launch_configured(how, kernel, arguments...);
}

/* Waits until the previous kernel of the stream has ended and its stores are visible. Every
 * kernel calls this function before it accesses any memory except its parameters. */
__device__ __forceinline__ void wait_for_previous_kernel()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Returns the address of the CTA's dynamic shared memory, aligned to 128 bytes. */
__device__ __forceinline__ void *dynamic_shared()
{
    extern __shared__ __align__(128) uint8_t dynamic_memory[];
    return dynamic_memory;
}

#endif
