/* SPDX-License-Identifier: Apache-2.0 */
/* Checks on the device that a plan fits its layer: no rank owns more than job.num_local
 * experts. The host cannot check this when it enqueues the call, because it depends on
 * rank_of_expert in device memory.
 *
 * All ranks get the same result, because the plan's header has the largest number of experts
 * that a rank owns (num_local). If the plan does not fit, the kernel marks it as failed and
 * sets the number of rows of each local expert to 0. Later operations with this plan then move
 * no rows, and epic_check() returns the error. One thread does the work, in memory of this rank
 * only. */
#include "cuda/common/launch.cuh"
#include "cuda/common/wait.cuh"
#include "cuda/experts/dense_tokens.h"

/* Returns true if the plan does not fit the layer, with the fault and the numbers for its error
 * sentence in `notice`. `h`: header of the plan. */
static __device__ bool find_fault(const p2p_fits_job &job, const device_plan_header &h,
                                  p2p_notice &notice)
{
    if (h.num_local <= job.num_local) return false;
    notice.fault = P2P_FAULT_TOO_MANY_LOCAL;
    notice.about[0] = job.num_local;
    notice.about[1] = h.num_local;
    return true;
}

/* The kernel. If the plan does not fit the layer, sets the result in its header to an error,
 * computes the header's checksum again, and reports the fault to the host. */
static __global__ void fits_kernel(const __grid_constant__ p2p_fits_job job)
{
    const p2p_self &self = job.self;
    device_plan_header *h = (device_plan_header *)job.plan;
    const p2p_control *control = (const p2p_control *)(self.heap[self.rank] + self.at.control);
    p2p_notice notice = {EPIC_EINVAL, control->epoch, 0, self.rank, {0, 0, 0, 0}};
    if (threadIdx.x != 0) return;
    if (h->magic != DEVICE_PLAN_MAGIC || h->group_id != self.group_id) return;
    if (h->result != EPIC_OK || !find_fault(job, *h, notice)) return;
    h->result = EPIC_EINVAL;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < offsetof(device_plan_header, sum) / 4; i++)
        sum += device_header_share(((const uint32_t *)h)[i], i);
    h->sum = sum;
    for (int l = 0; l < job.num_local; l++) job.expert_rows[l] = job.expert_tokens[l] = 0;
    report_data_error(self, notice);
}

extern "C" cudaError_t p2p_launch_fits(const p2p_fits_job *job, cudaStream_t stream)
{
    return launch_kernel(fits_kernel, 1, 32, 0, stream, *job);
}

extern "C" cudaError_t p2p_load_fits(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, fits_kernel);
}
