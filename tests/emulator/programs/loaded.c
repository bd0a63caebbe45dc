/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that open launches every kernel of the exchange. The first launch of a kernel may wait
 * until the GPU is idle. But the GPU never becomes idle while a kernel of a peer on this GPU
 * waits for this rank's kernel.
 *
 *   emulated_loaded */
#include <stdio.h>
#include <stdlib.h>

#include "emulator.h"
#include "team.h"

static const int64_t row_bytes[] = {24, 1040, 2048, 3584, 4096, 14336};
static const uint32_t types[] = {EPIC_BF16, EPIC_F16, EPIC_F32};
static int before;
static bool late;

/* Checks that the number of kernels is the same as before. */
static void check_launch(cudaError_t error, const char *what)
{
    if (error == cudaSuccess && emulator_kernels() == before) return;
    fprintf(stderr, "%s: error %d, %d kernels for the first time\n", what, (int)error,
            emulator_kernels() - before);
    before = emulator_kernels();
    late = true;
}

static void try_plans(const p2p_self *self, cudaStream_t stream)
{
    for (int kind = 0; kind < 8; kind++) {
        const p2p_plan_job job = {
            .self = *self,
            .layer = {.num_experts = 1,
                      .top_k = 1,
                      .layout = kind & 1 ? EPIC_FLAT : EPIC_EXPERT_MAJOR,
                      .overflow = kind & 2 ? EPIC_OVERFLOW_DROP : EPIC_OVERFLOW_ERROR,
                      .num_logical = kind & 4 ? 1 : 0}};
        check_launch(p2p_launch_plan(&job, 1, stream), "plan");
        check_launch(p2p_launch_lowlat_plan(&job, 1, stream), "plan of few tokens");
    }
}

static void try_strings(p2p_dispatch_job job, uint32_t type, cudaStream_t stream)
{
    job.type = type;
    job.scale_bytes = 32;
    job.token_bytes = 2 * job.row_bytes;
    job.bulk = job.scales_aligned = 1;
    for (uint32_t quantize = 0; quantize <= EPIC_QUANTIZE_1X32; quantize++) {
        job.quantize = quantize;
        job.plan.is_lowlat = 0;
        check_launch(p2p_launch_dispatch_packed(&job, 1, stream), "dispatch of strings");
        if (p2p_can_dispatch_bulk(&job))
            check_launch(p2p_launch_dispatch_bulk(&job, 1, stream), "dispatch in bulk");
        for (job.plan.is_lowlat = 0; job.plan.is_lowlat < 2; job.plan.is_lowlat++)
            check_launch(p2p_launch_lowlat_dispatch_packed(&job, 1, stream),
                         "dispatch of a few strings");
    }
}

static void try_dispatch(const p2p_self *self, int64_t bytes, int kind, cudaStream_t stream)
{
    p2p_dispatch_job job = {.plan.self = *self, .row_bytes = bytes};
    job.aligned = kind & 1 && bytes % 16 == 0;
    job.flat = kind >> 1 & 1;
    job.plan.layer.layout = job.flat ? EPIC_FLAT : EPIC_EXPERT_MAJOR;
    job.plan.planners = kind >> 2 & 1;
    job.plan.layer.num_experts = 1;
    check_launch(p2p_launch_dispatch(&job, 1, stream), "dispatch");
    for (job.plan.is_lowlat = 0; job.plan.is_lowlat < 2; job.plan.is_lowlat++)
        check_launch(p2p_launch_lowlat_dispatch(&job, 1, stream), "dispatch of few tokens");
    for (int i = 0; i < 3 && bytes <= 4096; i++) try_strings(job, types[i], stream);
}

static void try_sums(const p2p_self *self, int64_t bytes, int kind, cudaStream_t stream)
{
    for (int i = 0; i < 3; i++) {
        const int aligned = kind & 1 && bytes % 16 == 0;
        const p2p_combine_job combine = {.self = *self,
                                         .row_bytes = bytes,
                                         .aligned = aligned,
                                         .type = types[i],
                                         .tree = kind >> 1 & 1,
                                         .flat = kind >> 2 & 1};
        check_launch(p2p_launch_combine(&combine, 1, stream), "combine");
        check_launch(p2p_launch_lowlat_combine(&combine, 1, stream), "combine of few tokens");
        check_launch(p2p_launch_flat_floats(&combine, 1, stream), "floats");
        p2p_combine_backward_job backward = {
            .self = *self, .row_bytes = bytes, .aligned = aligned, .type = types[i]};
        for (; backward.quantize <= EPIC_QUANTIZE_1X32; backward.quantize++)
            check_launch(p2p_launch_combine_backward(&backward, 1, stream), "combine_backward");
    }
}

static int run_rank(team_rank *me)
{
    p2p_self self = me->group->self;
    const p2p_sum_job sum = {.self = self};
    const p2p_sum_replicas_job replicas = {.self = self};
    team_barrier(me);
    if (me->rank) return 0;
    self.max_tokens = 1;
    self.operation = EPIC_OP_NONE;
    before = emulator_kernels();
    try_plans(&self, me->stream);
    for (int kind = 0; kind < 8; kind++)
        for (size_t i = 0; i < sizeof row_bytes / sizeof *row_bytes; i++) {
            try_dispatch(&self, row_bytes[i], kind, me->stream);
            try_sums(&self, row_bytes[i], kind, me->stream);
        }
    check_launch(p2p_launch_sum(&sum, 1, me->stream), "sum");
    check_launch(p2p_launch_sum_replicas(&replicas, 1, me->stream), "sum of replicas");
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    return late;
}

int main(void)
{
    /* numbers of ranks for which EPIC uses different kernels */
    static const int num_ranks[] = {9, 2};
    int bad = 0;
    for (int i = 0; i < 2; i++) {
        const team t = {.num_ranks = num_ranks[i],
                        .num_gpus = 1,
                        .max_tokens = 16,
                        .max_row_bytes = 14336,
                        .timeout_ms = TEAM_LONG_MS,
                        .work = run_rank};
        bad |= team_run(&t) != 0;
    }
    printf("emulated_loaded: %s\n", bad ? "WRONG" : "good");
    return bad;
}
