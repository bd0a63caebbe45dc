/* SPDX-License-Identifier: Apache-2.0 */
/* Plans, and plans with dispatch, one after the other, over a wire that is late (chaos.h).  Tokens
 * have one of eight choices on the other host: most words of a record say nothing, and a word that
 * is late is mostly one of them.  All the same each is waited for: else it lands over a record of
 * the plan after the next. */
#include <stdio.h>
#include <stdlib.h>

#include "copies.h"
#include "team.h"

enum {
    RANKS = 2,
    TOKENS = 40,
    TOP_K = 8,
    PLANS = 10,
    ROW = 16,
    IDS = TOKENS * TOP_K,
    SLOTS = 2 * IDS
};

static int work(team_rank *me)
{
    const epic_layer layer = {.num_experts = RANKS * TOP_K, .top_k = TOP_K};
    const int64_t plan_bytes = device_layer_bytes(RANKS, TOKENS, &layer);
    int32_t ids[IDS];
    void *made, *wanted, *tokens, *slots;
    for (int i = 0; i < IDS; i++) {
        const int there = i % TOP_K == 0 ? 1 - me->rank : me->rank;
        ids[i] = there * TOP_K + i % TOP_K;
    }
    CHECK_CUDA(cudaMalloc(&made, (size_t)plan_bytes));
    CHECK_CUDA(cudaMalloc(&wanted, sizeof ids));
    CHECK_CUDA(cudaMalloc(&tokens, TOKENS * ROW));
    CHECK_CUDA(cudaMalloc(&slots, SLOTS * ROW));
    CHECK_CUDA(fill_in(tokens, 1, TOKENS * ROW));
    CHECK_CUDA(copy_in(wanted, ids, sizeof ids));
    const epic_plan_args plan = {.call = {.stream = me->stream, .timeout_ms = 60000},
                                 .layer = &layer,
                                 .plan = made,
                                 .plan_bytes = plan_bytes,
                                 .topk_idx = wanted,
                                 .num_tokens = TOKENS,
                                 .capacity = SLOTS};
    const epic_dispatch_args dispatch = {.tokens = {tokens, TOKENS, ROW},
                                         .recv = {slots, SLOTS, ROW}};
    for (int i = 0; i < 2 * PLANS; i++) {
        const epic_result result = i < PLANS
                                       ? p2p_steps.plan(me->group, &plan)
                                       : p2p_steps.plan_dispatch(me->group, &plan, &dispatch);
        if (result != EPIC_OK) team_stop();
    }
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    epic_failure_info f;
    if (p2p_steps.check(me->group, &f) != EPIC_OK) {
        fprintf(stderr, "%s\n", f.sentence);
        team_stop();
    }
    CHECK_CUDA(cudaFree(made));
    CHECK_CUDA(cudaFree(wanted));
    CHECK_CUDA(cudaFree(tokens));
    CHECK_CUDA(cudaFree(slots));
    return 0;
}

int main(void)
{
    const team t = {.num_ranks = RANKS,
                    .num_gpus = 1,
                    .max_tokens = TOKENS,
                    .max_row_bytes = 512,
                    .timeout_ms = 60000,
                    .work = work};
    setenv("EPIC_CHAOS_LATE", "1", 1);
    if (team_run(&t) != 0) return 1;
    printf("hosts_records: good\n");
    return 0;
}
