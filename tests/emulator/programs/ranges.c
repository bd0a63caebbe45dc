/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that each call that launches kernels is an NVTX range with its name, which ends when
 * the call returns, also with an error. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copies.h"
#include "emulator.h"
#include "team.h"

enum { TOKENS = 8, ROW = 64 };

static int expect_ranges(const char *wanted)
{
    int open;
    const char *names = emulator_ranges(&open);
    if (!open && !strcmp(names, wanted)) return 0;
    fprintf(stderr, "ranges \"%s\", %d of them open, not \"%s\"\n", names, open, wanted);
    return 1;
}

static int run_rank(team_rank *me)
{
    float *values;
    int bad = expect_ranges("");
    CHECK_CUDA(cudaMalloc((void **)&values, TOKENS * sizeof *values));
    CHECK_CUDA(fill_in(values, 0, TOKENS * sizeof *values));
    const epic_allreduce_sum_args sum = {
        .call.stream = me->stream, .data = values, .count = TOKENS};
    bad |= p2p_ops.allreduce_sum(me->group, &sum) != EPIC_OK;
    bad |= expect_ranges("epic_allreduce_sum ");
    const epic_layer layer = {.num_experts = 1, .top_k = 1};
    const epic_plan_args plan = {
        .call.stream = me->stream, .layer = &layer, .plan = values, .plan_bytes = 1};
    bad |= p2p_ops.plan(me->group, &plan) == EPIC_OK;
    bad |= expect_ranges("epic_allreduce_sum epic_plan ");
    const epic_combine_args combine = {.call.stream = me->stream, .layer = &layer, .type = 99};
    bad |= p2p_ops.combine(me->group, &combine) == EPIC_OK;
    bad |= expect_ranges("epic_allreduce_sum epic_plan epic_combine ");
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    return bad;
}

int main(void)
{
    const team t = {.num_ranks = 1,
                    .num_gpus = 1,
                    .max_tokens = TOKENS,
                    .max_row_bytes = ROW,
                    .timeout_ms = 30000,
                    .max_sms = 4,
                    .work = run_rank};
    return team_run(&t) != 0;
}
