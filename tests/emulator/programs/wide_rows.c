/* SPDX-License-Identifier: Apache-2.0 */
/* Sends one row of more than 32,768 pieces (64 MiB) from each of two ranks to the other rank: with
 * dispatch, and back with combine_backward. Each piece of 2 KB has its own values, so a piece at
 * a wrong place is found. The memory of an emulated GPU is memory of the host.
 *
 *   emulated_wide_rows */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "team.h"

enum { PIECE = 2048, ROW_BYTES = (1 << 26) + 2 * PIECE, VALUES = ROW_BYTES / 2 };

/* Returns value i of the row of `rank`, as bits of a bf16 number. */
static uint16_t value_of(int rank, int64_t i)
{
    const int64_t piece = i * 2 / PIECE;
    return (uint16_t)(0x3f80 + (rank * 64 + piece % 61) % 127 + piece / 61 % 2 * 128);
}

/* Reports how many values of `row` are not those of `rank`. */
static bool has_row_of(int rank, const uint16_t *row, const char *operation)
{
    int64_t wrong = 0;
    for (int64_t i = 0; i < VALUES; i++) wrong += row[i] != value_of(rank, i);
    if (wrong)
        printf("%s: %lld values of rank %d's row are wrong\n", operation, (long long)wrong,
               rank);
    return !wrong;
}

static bool finish(team_rank *me, epic_result result)
{
    epic_failure_info failure;
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    if (result == EPIC_OK && p2p_ops.poll_failure(me->group, &failure) == EPIC_OK) return true;
    printf("rank %d: %s\n", me->rank, result ? epic_error(NULL) : failure.sentence);
    return false;
}

static int run_rank(team_rank *me)
{
    const epic_layer layer = {.num_experts = 2, .top_k = 1, .alignment = 1, .leaves = 2};
    const int64_t bytes = device_layer_bytes(2, 1, &layer);
    const epic_call call = {.stream = me->stream};
    const int other = 1 - me->rank;
    void *plan;
    int32_t *ids;
    uint16_t *sent, *received;
    CHECK_CUDA(cudaMalloc(&plan, (size_t)bytes));
    CHECK_CUDA(cudaMalloc((void **)&ids, sizeof *ids));
    CHECK_CUDA(cudaMalloc((void **)&sent, ROW_BYTES));
    CHECK_CUDA(cudaMalloc((void **)&received, ROW_BYTES));
    *ids = other; /* each rank has one expert */
    for (int64_t i = 0; i < VALUES; i++) sent[i] = value_of(me->rank, i);
    memset(received, 0, ROW_BYTES);
    const epic_plan_args of = {.call = call,
                               .layer = &layer,
                               .plan = plan,
                               .plan_bytes = bytes,
                               .topk_idx = ids,
                               .num_tokens = 1};
    const epic_dispatch_args rows = {.call = call,
                                     .layer = &layer,
                                     .plan = plan,
                                     .plan_bytes = bytes,
                                     .tokens = {sent, 1, ROW_BYTES},
                                     .recv = {received, 1, ROW_BYTES},
                                     .type = EPIC_BF16};
    const epic_combine_backward_args back = {.call = call,
                                             .layer = &layer,
                                             .plan = plan,
                                             .plan_bytes = bytes,
                                             .d_out = {sent, 1, ROW_BYTES},
                                             .d_rows = {received, 1, ROW_BYTES},
                                             .type = EPIC_BF16};
    team_barrier(me);
    bool good = finish(me, p2p_ops.plan(me->group, &of)) &&
                finish(me, p2p_ops.dispatch(me->group, &rows)) &&
                has_row_of(other, received, "dispatch");
    memset(received, 0, ROW_BYTES);
    good = finish(me, p2p_ops.combine_backward(me->group, &back)) &&
           has_row_of(other, received, "combine_backward") && good;
    team_barrier(me);
    CHECK_CUDA(cudaFree(plan));
    CHECK_CUDA(cudaFree(ids));
    CHECK_CUDA(cudaFree(sent));
    CHECK_CUDA(cudaFree(received));
    return !good;
}

int main(void)
{
    const team t = {.num_ranks = 2,
                    .num_gpus = 1,
                    .max_tokens = 1,
                    .max_row_bytes = ROW_BYTES,
                    .timeout_ms = TEAM_LONG_MS,
                    .work = run_rank};
    const bool bad = team_run(&t) != 0;
    printf("emulated_wide_rows: %s\n", bad ? "WRONG" : "good");
    return bad;
}
