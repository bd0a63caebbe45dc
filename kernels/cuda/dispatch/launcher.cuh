/* SPDX-License-Identifier: Apache-2.0 */
/* Host functions that load and launch the kernels of dispatch. dispatch.cu and packed.cu use
 * all of them. bulk.cu uses only load_kernels(). */
#ifndef EPIC_DISPATCH_LAUNCHER_CUH
#define EPIC_DISPATCH_LAUNCHER_CUH

#include "cuda/common/launch.cuh"
#include "cuda/dispatch/dispatch.cuh"

#define BLOCK 512

typedef void (*Kernel)(p2p_dispatch_job);

/* Returns the size of a CTA's dynamic shared memory. First the planner uses `planning` bytes of
 * this memory. After that, each warp uses a part of the memory as a ring buffer for pieces of
 * rows. */
static inline int memory_bytes(int planning)
{
    const int rings = BLOCK / WARP * PieceRing<V, true>::BYTES;
    return planning > rings ? planning : rings;
}

/* Loads the kernels, and permits each of them to use up to most_bytes bytes of dynamic shared
 * memory. */
template <int COUNT>
static cudaError_t load_kernels(const Kernel (&kernels)[COUNT], int most_bytes)
{
    for (Kernel kernel : kernels) {
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

/* Returns a copy of the job in which lag, span, total_warps, num_early_tokens and catch_up are
 * set. These fields determine how units are divided among warps, and how many tokens are sent
 * before the first token is received. `bytes`: number of bytes that are sent per token. */
static inline p2p_dispatch_job deal_dispatch(const p2p_dispatch_job &job, int64_t bytes,
                                             int num_sms)
{
    p2p_dispatch_job copy = job;
    copy.row_bytes = bytes;
    if (job.flat && copy.top_k > job.plan.self.num_ranks) copy.top_k = job.plan.self.num_ranks;
    const int roles = num_unit_roles(job.plan.self);
    deal_units_for_net(job.plan.self, copy, num_sms, BLOCK, roles, V);
    const int spans = units_per_token(copy, 1, V);
    copy.row_bytes = job.row_bytes;
    copy.top_k = job.top_k;
    if (!job.plan.planners && copy.lag > 2 * (16 + 8 * copy.span))
        /* If the kernel reads a plan, half of the lag suffices, because a warp need not wait
         * for records. With a shorter lag, fewer rows are left to receive after the last row
         * has been sent. */
        copy.lag /= 2;
    copy.lag = lag_for_net(job.plan.self, copy.lag, job.num_tokens);
    /* Choose how fast receiving catches up with sending (measured: docs/lab/cuda.md). If a row
     * has several spans, send fewer early tokens (tokens that are sent while the plan is made).
     * The number of early tokens, copy.num_early_tokens, is 0 or at least copy.lag. */
    const bool sooner = num_sms > 56 && num_sms < 96 && !job.flat;
    copy.catch_up = spans > 1 ? 4 : sooner ? 1 : 2;
    if (copy.catch_up == 4 && copy.num_early_tokens > job.num_tokens / 20)
        copy.num_early_tokens = job.num_tokens / 20;
    if (copy.num_early_tokens && copy.num_early_tokens < copy.lag)
        copy.num_early_tokens = copy.lag;
    if (copy.plan.planners > num_sms) copy.plan.planners = num_sms;
    return copy;
}

static inline cudaError_t launch_dispatch(Kernel kernel, const p2p_dispatch_job &job,
                                          int num_sms, cudaStream_t stream)
{
    const int planning = job.plan.planners ? planner_bytes_of(job.plan) : 0;
    return launch_kernel(kernel, num_sms, BLOCK, memory_bytes(planning), stream, job);
}

#endif
