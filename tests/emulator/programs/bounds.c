/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that backend p2p refuses numbers beyond its limits with an error that contains the
 * limit: ranks at open, and experts in a plan. Only memory limits the number of tokens. Also
 * tests the low-latency plan that needs the most shared memory.
 *
 *   emulated_bounds */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "team.h"

static bool bad;

static void expect_refusal(epic_result result, const char *number)
{
    if (result == EPIC_ENOTSUP && strstr(epic_error(NULL), number)) return;
    fprintf(stderr, "%d, not refused with %s: %s\n", result, number, epic_error(NULL));
    bad = true;
}

static epic_result make_plan(team_rank *me, uint32_t num_experts)
{
    static int32_t ids[64];
    static uint8_t bytes[64];
    const epic_layer layer = {.num_experts = num_experts, .top_k = 1};
    const epic_plan_args args = {.call.stream = me->stream,
                                 .layer = &layer,
                                 .plan = bytes,
                                 .plan_bytes = sizeof bytes,
                                 .topk_idx = ids};
    return p2p_ops.plan(me->group, &args);
}

static int run_rank(team_rank *me)
{
    expect_refusal(make_plan(me, DEVICE_MAX_EXPERTS + 1), "at most 8192");
    /* with one expert fewer only the plan's memory is too small */
    if (make_plan(me, DEVICE_MAX_EXPERTS) != EPIC_EINVAL) bad = true;
    return 0;
}

/* Makes the low-latency plan with the largest tables, in a kernel that also sends rows: one
 * choice per token, the most tokens of all ranks together, and the most experts for this number
 * of tokens. */
enum {
    MOST_RANKS = 16,
    ROW_BYTES = 16,
    NUM_SLOTS = P2P_LOWLAT_IDS / P2P_LOWLAT_LANE_IDS,
    MOST_TOKENS = P2P_LOWLAT_IDS / P2P_LOWLAT_LANE_IDS / MOST_RANKS,
    MOST_EXPERTS = P2P_LOWLAT_MASKS / (MOST_RANKS * MOST_TOKENS / 32)
};

static int make_largest_plan(team_rank *me)
{
    const epic_layer layer = {.num_experts = MOST_EXPERTS, .top_k = 1};
    const int64_t bytes = device_layer_bytes(MOST_RANKS, MOST_TOKENS, &layer);
    void *ids, *plan, *tokens, *recv;
    if (!p2p_can_plan_lowlat(MOST_RANKS, MOST_TOKENS, &layer, 0)) return 1;
    CHECK_CUDA(cudaMalloc(&ids, MOST_TOKENS * sizeof(int32_t)));
    CHECK_CUDA(cudaMalloc(&plan, (size_t)bytes));
    CHECK_CUDA(cudaMalloc(&tokens, MOST_TOKENS * ROW_BYTES));
    CHECK_CUDA(cudaMalloc(&recv, NUM_SLOTS * ROW_BYTES));
    CHECK_CUDA(cudaMemset(tokens, 0, MOST_TOKENS * ROW_BYTES));
    CHECK_CUDA(cudaMemset(ids, 0, MOST_TOKENS * sizeof(int32_t)));
    const epic_plan_args args = {.call.stream = me->stream,
                                 .layer = &layer,
                                 .plan = plan,
                                 .plan_bytes = bytes,
                                 .topk_idx = ids,
                                 .num_tokens = MOST_TOKENS,
                                 .capacity = NUM_SLOTS};
    const epic_dispatch_args rows = {.tokens = {tokens, MOST_TOKENS, ROW_BYTES},
                                     .recv = {recv, NUM_SLOTS, ROW_BYTES},
                                     .type = EPIC_BF16};
    const epic_result result = p2p_ops.plan_dispatch(me->group, &args, &rows);
    if (result != EPIC_OK) {
        fprintf(stderr, "rank %d: the largest low-latency plan fails: %s\n", me->rank,
                epic_error(NULL));
        team_stop();
    }
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    epic_failure_info failure;
    const bool failed = p2p_ops.poll_failure(me->group, &failure) != EPIC_OK ||
                        p2p_ops.next_data_error(me->group) != EPIC_OK;
    team_barrier(me);
    CHECK_CUDA(cudaFree(tokens));
    CHECK_CUDA(cudaFree(recv));
    CHECK_CUDA(cudaFree(ids));
    CHECK_CUDA(cudaFree(plan));
    return failed;
}

int main(void)
{
    const epic_config config = {
        .max_tokens = 1, .max_row_bytes = 16, .num_ranks = DEVICE_MAX_RANKS + 1};
    epic_memory_info memory = {0};
    expect_refusal(epic_backend_p2p.memory(&config, &memory), "at most 32");
    const team t = {.num_ranks = 1,
                    .num_gpus = 1,
                    .max_tokens = 1 << 17, /* more than fit into shared memory */
                    .max_row_bytes = 16,
                    .timeout_ms = 1000,
                    .work = run_rank};
    if (team_run(&t)) bad = true;
    const team many = {.num_ranks = MOST_RANKS,
                       .num_gpus = 1,
                       .max_tokens = MOST_TOKENS,
                       .max_row_bytes = ROW_BYTES,
                       .timeout_ms = TEAM_LONG_MS,
                       .work = make_largest_plan};
    if (team_run(&many)) bad = true;
    printf("emulated_bounds: %s\n", bad ? "WRONG" : "good");
    return bad;
}
