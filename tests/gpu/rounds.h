/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds of a rank with the public calls, which tests interrupt by faults: plan and dispatch,
 * then combine. The rows are not checked. */
#ifndef EPIC_TEST_ROUNDS_H
#define EPIC_TEST_ROUNDS_H

#include <stdbool.h>

#include "copies.h"
#include "epic/epic.h"

enum { ROUND_TOKENS = 128, ROUND_TOP_K = 4, ROUND_EXPERTS = 24, ROUND_ROW = 1024 };

typedef struct rounds {
    epic_context *ctx;
    cudaStream_t stream; /* a stream that waits for no other stream */
    epic_layer layer;
    int64_t slots, plan_bytes;
    void *plan, *ids, *tokens, *recv, *out;
} rounds;

static inline bool round_memory(void **out, int64_t bytes)
{
    return cudaMalloc(out, (size_t)bytes) == cudaSuccess &&
           fill_in(*out, 0, (size_t)bytes) == cudaSuccess;
}

/* Sets up the rounds; r->ctx has been opened with this config. */
static inline bool round_seat(rounds *r, const epic_config *config)
{
    const int rank = epic_rank(r->ctx), num_ranks = epic_num_ranks(r->ctx);
    int32_t ids[ROUND_TOKENS * ROUND_TOP_K];
    r->layer = (epic_layer){.num_experts = (uint32_t)(ROUND_EXPERTS / num_ranks * num_ranks),
                            .top_k = ROUND_TOP_K,
                            .sum_order = EPIC_BY_HOSTS};
    if (epic_capacity_bound(config, &r->layer, &r->slots) != EPIC_OK ||
        epic_plan_bytes(config, &r->layer, &r->plan_bytes) != EPIC_OK)
        return false;
    for (int i = 0; i < ROUND_TOKENS * ROUND_TOP_K; i++)
        ids[i] = (i * 7 + rank) % (int)r->layer.num_experts;
    return round_memory(&r->plan, r->plan_bytes) && round_memory(&r->ids, sizeof ids) &&
           round_memory(&r->tokens, ROUND_TOKENS * ROUND_ROW) &&
           round_memory(&r->recv, r->slots * ROUND_ROW) &&
           round_memory(&r->out, ROUND_TOKENS * ROUND_ROW) &&
           copy_in(r->ids, ids, sizeof ids) == cudaSuccess &&
           cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking) == cudaSuccess &&
           cudaDeviceSynchronize() == cudaSuccess;
}

/* Runs one round. Returns EPIC_EDEVICE if CUDA has failed. */
static inline epic_result round_run(rounds *r)
{
    const epic_plan_args plan = {.call.stream = r->stream,
                                 .layer = &r->layer,
                                 .plan = r->plan,
                                 .plan_bytes = r->plan_bytes,
                                 .topk_idx = r->ids,
                                 .num_tokens = ROUND_TOKENS,
                                 .capacity = r->slots};
    const epic_dispatch_args dispatch = {.tokens = {r->tokens, ROUND_TOKENS, ROUND_ROW},
                                         .recv = {r->recv, r->slots, ROUND_ROW}};
    const epic_combine_args combine = {.call.stream = r->stream,
                                       .layer = &r->layer,
                                       .plan = r->plan,
                                       .plan_bytes = r->plan_bytes,
                                       .rows = {r->recv, r->slots, ROUND_ROW},
                                       .out = {r->out, ROUND_TOKENS, ROUND_ROW},
                                       .type = EPIC_BF16};
    epic_result result = epic_plan_dispatch(r->ctx, &plan, &dispatch);
    if (result == EPIC_OK) result = epic_combine(r->ctx, &combine);
    if (cudaStreamSynchronize(r->stream) != cudaSuccess) return EPIC_EDEVICE;
    return result == EPIC_OK ? epic_check(r->ctx) : result;
}

#endif
