/* SPDX-License-Identifier: Apache-2.0 */
/* Launching kernels on the emulator; replaces kernels/cuda/common/launch.cuh. */
#ifndef EPIC_LAUNCH_CUH
#define EPIC_LAUNCH_CUH

#include <cuda_device.h>

template <class Kernel, class... Arguments> struct EmulatedCall {
    Kernel kernel;
    std::tuple<Arguments...> arguments;

    static void run_kernel(const void *self)
    {
        const EmulatedCall *call = (const EmulatedCall *)self;
        std::apply(call->kernel, call->arguments);
    }
};

template <class Kernel, class... Arguments>
static cudaError_t launch_kernel(Kernel kernel, int ctas, int threads, int shared_bytes,
                                 cudaStream_t stream, const Arguments &...arguments)
{
    typedef EmulatedCall<Kernel, Arguments...> Call;
    const Call call = {kernel, std::make_tuple(arguments...)};
    return emulator_enqueue((const void *)kernel, Call::run_kernel, &call, sizeof call, ctas,
                            threads, shared_bytes, stream);
}

/* Does nothing: a kernel of the emulator starts after the previous kernel of its stream. */
inline void wait_for_previous_kernel()
{
}

inline void *dynamic_shared()
{
    return emulator_here->shared;
}

#endif
