/* SPDX-License-Identifier: Apache-2.0 */
/* Tests plans, and plans with dispatch, one after another over a slow net (chaos.h). Each token
 * has only one of eight choices on the other host, so most words of a record are empty, and a
 * late word is usually an empty one. Ranks must still wait for every word. Otherwise a late
 * word overwrites a record of the plan after the next one.
 *
 *   hosts_records [lowlat]   few tokens, whose ids are sent instead of records, over a net that
 *                         delays the last word of each put: no rank may use a put before all
 *                         of it has arrived */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copies.h"
#include "team.h"

enum { RANKS = 2, TOP_K = 8, ROW = 16, FEW = 40, MANY = 160, MOST_IDS = MANY * TOP_K };

static int num_tokens = MANY, plans = 10;

static int run_rank(team_rank *me)
{
    const int num_ids = num_tokens * TOP_K, num_slots = 2 * num_ids;
    const size_t id_bytes = (size_t)num_ids * 4, bytes = (size_t)num_tokens * ROW;
    const epic_layer layer = {.num_experts = RANKS * TOP_K, .top_k = TOP_K};
    const int64_t plan_bytes = device_layer_bytes(RANKS, num_tokens, &layer);
    int32_t ids[MOST_IDS];
    void *made, *wanted, *tokens, *slots;
    for (int i = 0; i < num_ids; i++) {
        const int there = i % TOP_K == 0 ? 1 - me->rank : me->rank;
        ids[i] = there * TOP_K + i % TOP_K;
    }
    CHECK_CUDA(cudaMalloc(&made, (size_t)plan_bytes));
    CHECK_CUDA(cudaMalloc(&wanted, id_bytes));
    CHECK_CUDA(cudaMalloc(&tokens, bytes));
    CHECK_CUDA(cudaMalloc(&slots, (size_t)num_slots * ROW));
    CHECK_CUDA(fill_in(tokens, 1, bytes));
    CHECK_CUDA(copy_in(wanted, ids, id_bytes));
    const epic_plan_args plan = {.call = {.stream = me->stream, .timeout_ms = 60000},
                                 .layer = &layer,
                                 .plan = made,
                                 .plan_bytes = plan_bytes,
                                 .topk_idx = wanted,
                                 .num_tokens = num_tokens,
                                 .capacity = num_slots};
    const epic_dispatch_args dispatch = {.tokens = {tokens, num_tokens, ROW},
                                         .recv = {slots, num_slots, ROW}};
    for (int i = 0; i < 2 * plans; i++) {
        const epic_result result = i < plans
                                       ? p2p_ops.plan(me->group, &plan)
                                       : p2p_ops.plan_dispatch(me->group, &plan, &dispatch);
        if (result != EPIC_OK) team_stop();
    }
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    epic_failure_info f;
    if (p2p_ops.poll_failure(me->group, &f) != EPIC_OK) {
        fprintf(stderr, "%s\n", f.sentence);
        team_stop();
    }
    CHECK_CUDA(cudaFree(made));
    CHECK_CUDA(cudaFree(wanted));
    CHECK_CUDA(cudaFree(tokens));
    CHECK_CUDA(cudaFree(slots));
    return 0;
}

int main(int argc, char **argv)
{
    const bool few = argc > 1 && !strcmp(argv[1], "lowlat");
    if (few) {
        num_tokens = FEW;
        plans = 2;
    }
    const team t = {.num_ranks = RANKS,
                    .num_gpus = 1,
                    .max_tokens = num_tokens,
                    .max_row_bytes = 512,
                    .timeout_ms = 60000,
                    .work = run_rank};
    setenv(few ? "EPIC_CHAOS_LAST" : "EPIC_CHAOS_LATE", "1", 1);
    if (team_run(&t) != 0) return 1;
    printf("hosts_records: good\n");
    return 0;
}
