/* SPDX-License-Identifier: Apache-2.0 */
/* Checks on the device that a plan fits its layer: no rank owns more than job.num_local
 * experts. The host cannot check this, because rank_of_expert is in device memory.
 *
 *   plan                        in, out: the header; on failure, result and checksum change
 *   expert_rows, expert_tokens  out [num_local]: zeros on failure, else unchanged
 *
 * Only thread 0 works. All ranks get the same result, because h.num_local in the header of the
 * plan is the maximum number of experts of any rank. After a failure, later operations with
 * this plan move no rows, and epic_check() returns the error.
 *
 * The kernels that make and read the plan run on the same stream, so no fence is needed. */
#include "cuda/common/launch.cuh"
#include "cuda/common/wait.cuh"
#include "cuda/experts/dense_tokens.h"

/* Returns true if the plan does not fit the layer. In this case, sets `notice` to the fault and
 * to the values that its error text contains. `h`: header of the plan. */
static __device__ bool find_fault(const p2p_fits_job &job, const device_plan_header &h,
                                  p2p_notice &notice)
{
    if (h.num_local <= job.num_local) return false;
    notice.fault = P2P_FAULT_TOO_MANY_LOCAL;
    notice.about[0] = job.num_local;
    notice.about[1] = h.num_local;
    return true;
}

static __global__ void fits_kernel(const __grid_constant__ p2p_fits_job job)
{
    wait_for_previous_kernel();
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
