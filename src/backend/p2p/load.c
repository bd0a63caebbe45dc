/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the kernels when a context opens.
 *
 * At the first launch of a kernel, CUDA loads its code and may allocate local memory on the
 * device. Loading and allocating may wait until the device is idle. The device is not idle
 * while a kernel of a peer waits for a kernel of this rank, so a first launch during an
 * operation could deadlock. Therefore this file launches each kernel once, with the operation
 * EPIC_OP_NONE, for which kernels return at once. */
#include "backend/p2p/p2p.h"
#include "base/error.h"
#include "cuda/experts/dense_tokens.h"
#include "cuda/experts/grouped.h"
#include "cuda/router/router.h"

/* Loads the code of the low-latency kernels. The libraries for many ranks do not have them. */
static epic_result load_lowlat(void)
{
#if !MANY_RANKS
    TRY(p2p_cuda(p2p_load_lowlat_plan(), "loading the low-latency plan kernel"));
    TRY(p2p_cuda(p2p_load_lowlat_dispatch(), "loading the low-latency dispatch kernels"));
    TRY(p2p_cuda(p2p_load_lowlat_dispatch_packed(),
                 "loading the low-latency dispatch kernels for packed rows"));
    TRY(p2p_cuda(p2p_load_lowlat_combine(), "loading the low-latency combine kernels"));
#endif
    return EPIC_OK;
}

/* Loads the code of every kernel, and sets the kernel's limit of dynamic shared memory. */
static epic_result load_code(void)
{
    TRY(p2p_cuda(p2p_load_plan(), "loading the plan kernel"));
    TRY(p2p_cuda(p2p_load_dispatch(), "loading the dispatch kernels"));
    TRY(p2p_cuda(p2p_load_dispatch_packed(), "loading the dispatch kernels for packed rows"));
    if (WITH_WINDOWS)
        TRY(p2p_cuda(p2p_load_dispatch_bulk(),
                     "loading the dispatch kernels with bulk stores"));
    if (WITH_WINDOWS)
        TRY(p2p_cuda(p2p_load_dispatch_windows(),
                     "loading the dispatch kernels that store into windows"));
    TRY(p2p_cuda(p2p_load_combine(), "loading the combine kernels"));
    if (WITH_WINDOWS)
        TRY(p2p_cuda(p2p_load_combine_windows(),
                     "loading the combine kernels that store into windows"));
    TRY(p2p_cuda(p2p_load_combine_backward(), "loading the combine_backward kernels"));
    if (!MANY_RANKS) TRY(load_lowlat());
    TRY(p2p_cuda(p2p_load_flat_floats(), "loading the kernel for floats of FLAT plans"));
    TRY(p2p_cuda(p2p_load_router(), "loading the router kernels"));
    TRY(p2p_cuda(p2p_load_router_backward(), "loading the router's backward kernels"));
    TRY(p2p_cuda(p2p_load_loss(), "loading the loss kernels"));
    TRY(p2p_cuda(p2p_load_slabs(), "loading the slabs kernel"));
    TRY(p2p_cuda(p2p_load_activation(), "loading the activation kernels"));
    TRY(p2p_cuda(p2p_load_bias(), "loading the bias kernel"));
    TRY(p2p_cuda(p2p_load_dense(), "loading the kernels of a layer's dense part"));
    TRY(p2p_cuda(p2p_load_components(), "loading the kernels of the gate's components"));
    TRY(p2p_cuda(p2p_load_gate_blocks(), "loading the kernels of the gate's blocks"));
    TRY(p2p_cuda(p2p_load_dense_tokens(), "loading the kernels of a layer's tokens"));
    TRY(p2p_cuda(p2p_load_fits(), "loading the kernel that checks a layer's plan"));
    TRY(p2p_cuda(p2p_load_plain_gemm(), "loading the plain products"));
    TRY(p2p_cuda(p2p_load_few_rows(), "loading the product of few rows"));
    TRY(p2p_cuda(p2p_load_hopper_gemm(), "loading the products of sm_90a"));
    TRY(p2p_cuda(p2p_load_sum_replicas(), "loading the kernel that sums replicas"));
    return p2p_cuda(p2p_load_sum(), "loading the sum kernel");
}

/* Row sizes in bytes. The launch functions choose kernels by the row size, and these sizes
 * together load every kernel. */
static const int64_t row_bytes[] = {16, 2048, 3584, 4096};

/* Launches combine with one leaf and with several leaves of the sum tree (blocks of experts)
 * per rank, and the low-latency combine with EPIC_BY_RANK and with EPIC_TREE. */
static cudaError_t launch_sums(p2p_combine_job job, cudaStream_t stream)
{
    cudaError_t error = p2p_launch_combine(&job, 1, stream);
    if (!MANY_RANKS && error == cudaSuccess) error = p2p_launch_lowlat_combine(&job, 1, stream);
    job.tree = 1;
    job.leaves = 2;
    if (WITH_WINDOWS && error == cudaSuccess) error = p2p_launch_combine(&job, 1, stream);
    if (!MANY_RANKS && error == cudaSuccess) error = p2p_launch_lowlat_combine(&job, 1, stream);
    return error;
}

typedef cudaError_t launcher(const p2p_dispatch_job *job, int num_sms, cudaStream_t stream);

/* Launches four dispatches: for EPIC_FLAT and for EPIC_EXPERT_MAJOR, each with an existing plan
 * and with a new plan. */
static cudaError_t launch_layouts(const p2p_dispatch_job *like, launcher *launch,
                                  cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    for (int kind = 0; kind < 4 && error == cudaSuccess; kind++) {
        p2p_dispatch_job job = *like;
        job.flat = kind & 1;
        if (kind & 2) job.plan.layer.num_experts = job.plan.planners = 1;
        job.plan.layer.layout = kind & 1 ? EPIC_FLAT : EPIC_EXPERT_MAJOR;
        error = launch(&job, 1, stream);
    }
    return error;
}

/* Launches the kernels for rows of `bytes` bytes: dispatch with an existing and with a new
 * plan, and combine and combine_backward for each type. */
static cudaError_t launch_rows(const p2p_self *self, int64_t bytes, int aligned,
                               cudaStream_t stream)
{
    const p2p_dispatch_job dispatch = {
        .plan.self = *self, .row_bytes = bytes, .aligned = aligned};
    p2p_dispatch_job planning = dispatch, flat = dispatch;
    planning.plan.layer.num_experts = planning.plan.planners = flat.flat = 1;
    p2p_dispatch_job planning_flat = planning;
    planning_flat.flat = 1;
    planning_flat.plan.layer.layout = EPIC_FLAT;
    cudaError_t error = p2p_launch_dispatch(&dispatch, 1, stream);
    if (error == cudaSuccess) error = p2p_launch_dispatch(&planning, 1, stream);
    if (error == cudaSuccess) error = p2p_launch_dispatch(&flat, 1, stream);
    if (error == cudaSuccess) error = p2p_launch_dispatch(&planning_flat, 1, stream);
    if (WITH_WINDOWS && aligned && error == cudaSuccess)
        error = launch_layouts(&dispatch, p2p_launch_dispatch_windows, stream);
    if (!MANY_RANKS && error == cudaSuccess)
        error = p2p_launch_lowlat_dispatch(&dispatch, 1, stream);
    planning.plan.is_lowlat = 1;
    if (!MANY_RANKS && error == cudaSuccess)
        error = p2p_launch_lowlat_dispatch(&planning, 1, stream);
    for (uint32_t type = EPIC_F32; type <= EPIC_F16 && error == cudaSuccess; type++) {
        const p2p_combine_backward_job backward = {
            .self = *self, .row_bytes = bytes, .aligned = aligned, .type = type};
        const p2p_combine_job combine = {
            .self = *self, .row_bytes = bytes, .aligned = aligned, .type = type};
        p2p_combine_backward_job quantized = backward;
        quantized.quantize = EPIC_QUANTIZE_1X128;
        error = p2p_launch_combine_backward(&backward, 1, stream);
        if (error == cudaSuccess) error = p2p_launch_combine_backward(&quantized, 1, stream);
        if (WITH_WINDOWS && aligned && error == cudaSuccess)
            error = p2p_launch_backward_windows(&backward, 1, stream);
        if (error == cudaSuccess) error = launch_sums(combine, stream);
        if (WITH_WINDOWS && aligned && error == cudaSuccess)
            error = p2p_launch_combine_windows(&combine, 1, stream);
    }
    return error;
}

/* Launches the kernels for packed rows (rows with scales), once for scales that the caller
 * passes, and once for scales that the kernel computes (quantize). Each case is launched with
 * an existing plan and with a new plan. */
static cudaError_t launch_packed(const p2p_self *self, int aligned, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    for (uint32_t quantize = 0; quantize < 2 && error == cudaSuccess; quantize++) {
        p2p_dispatch_job job = {.plan.self = *self,
                                .row_bytes = 128,
                                .token_bytes = 256,
                                .scale_bytes = 4,
                                .aligned = aligned,
                                .type = EPIC_BF16,
                                .quantize = quantize};
        if (!MANY_RANKS) error = p2p_launch_lowlat_dispatch_packed(&job, 1, stream);
        if (error == cudaSuccess)
            error = launch_layouts(&job, p2p_launch_dispatch_packed, stream);
        if (WITH_WINDOWS && error == cudaSuccess)
            error = launch_layouts(&job, p2p_launch_dispatch_bulk, stream);
        job.plan.layer.num_experts = job.plan.planners = job.plan.is_lowlat = 1;
        if (!MANY_RANKS && error == cudaSuccess)
            error = p2p_launch_lowlat_dispatch_packed(&job, 1, stream);
    }
    return error;
}

/* Launches each kernel once and waits until all have returned. */
static cudaError_t launch_all(const p2p_self *self, cudaStream_t stream)
{
    const p2p_plan_job plan = {.self = *self, .layer.num_experts = 1, .layer.top_k = 1};
    const p2p_sum_job sum = {.self = *self};
    const p2p_combine_job floats = {.self = *self};
    const p2p_sum_replicas_job replicas = {.self = *self};
    cudaError_t error = p2p_launch_sum_replicas(&replicas, 1, stream);
    for (int kind = 0; kind < 4 && error == cudaSuccess; kind++) {
        p2p_plan_job one = plan;
        one.layer.layout = kind & 1 ? EPIC_FLAT : EPIC_EXPERT_MAJOR;
        one.layer.overflow = kind & 2 ? EPIC_OVERFLOW_DROP : EPIC_OVERFLOW_ERROR;
        error = p2p_launch_plan(&one, 1, stream);
    }
    if (error == cudaSuccess) error = p2p_launch_flat_floats(&floats, 1, stream);
    if (!MANY_RANKS && error == cudaSuccess) error = p2p_launch_lowlat_plan(&plan, 1, stream);
    if (error == cudaSuccess) error = p2p_launch_sum(&sum, 1, stream);
    for (int aligned = 0; aligned < 2 && error == cudaSuccess; aligned++)
        error = launch_packed(self, aligned, stream);
    for (size_t i = 0; i < sizeof row_bytes / sizeof *row_bytes; i++)
        for (int aligned = 0; aligned < 2 && error == cudaSuccess; aligned++)
            error = launch_rows(self, row_bytes[i], aligned, stream);
    return error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
}

epic_result p2p_load(epic_group *g)
{
    p2p_self self = g->self;
    /* The shared memory of some kernels grows with max_tokens. With the max_tokens of the
     * group, the shared memory could exceed the limit of this launch. */
    self.max_tokens = 1;
    TRY(load_code());
    return p2p_cuda(launch_all(&self, g->side), "loading the kernels");
}
