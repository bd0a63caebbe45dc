/* SPDX-License-Identifier: Apache-2.0 */
/* One step of a Mixture-of-Experts layer: tokens to experts and home again.
 *
 *     build/examples/step                                                    one rank
 *     RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=2900 build/examples/step &
 *     RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=2900 build/examples/step
 */
#include <stdio.h>
#include <stdlib.h>

#include "epic/epic.h"

enum { TOKENS = 4, TOP_K = 2, EXPERTS = 8, HIDDEN = 16 };

static int failed(const epic_context *ctx, const char *what)
{
    fprintf(stderr, "%s: %s\n", what, epic_error(ctx));
    return 1;
}

static int step(epic_context *ctx)
{
    const epic_layer layer = {.num_experts = EXPERTS, .top_k = TOP_K, .alignment = 4};
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = HIDDEN * sizeof(float),
                                .num_ranks = (uint32_t)epic_num_ranks(ctx)};
    const int64_t slots = epic_capacity_bound(&config, sizeof config, &layer, sizeof layer);
    const size_t plan_bytes = epic_plan_bytes(&config, sizeof config, &layer, sizeof layer);
    void *plan = aligned_alloc(64, (plan_bytes + 63) / 64 * 64);
    float *received = calloc((size_t)slots * HIDDEN, sizeof *received);
    float *slot_weights = calloc((size_t)slots, sizeof *slot_weights);
    float tokens[TOKENS][HIDDEN], weights[TOKENS][TOP_K], out[TOKENS][HIDDEN];
    int32_t chosen[TOKENS][TOP_K]; /* what a router would say */
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++) tokens[t][h] = (float)(t + 1);
        for (int k = 0; k < TOP_K; k++) {
            chosen[t][k] = (t + 3 * k + epic_rank(ctx)) % EXPERTS;
            weights[t][k] = k ? 0.25f : 0.75f;
        }
    }
    const epic_rows slot_rows = {received, slots, HIDDEN * sizeof(float)};
    const epic_plan_args where = {.layer = &layer,
                                  .layer_size = sizeof layer,
                                  .plan = plan,
                                  .plan_bytes = plan_bytes,
                                  .topk_idx = chosen,
                                  .num_tokens = TOKENS,
                                  .capacity = slots};
    if (epic_plan(ctx, &where, sizeof where)) return failed(ctx, "plan");

    const epic_dispatch_args there = {.plan = plan,
                                      .plan_bytes = plan_bytes,
                                      .tokens = {tokens, TOKENS, sizeof *tokens},
                                      .recv = slot_rows,
                                      .weights = *weights,
                                      .recv_weight = slot_weights};
    if (epic_dispatch(ctx, &there, sizeof there)) return failed(ctx, "dispatch");

    for (int64_t i = 0; i < slots * HIDDEN; i++) received[i] *= 2; /* the experts */

    const epic_combine_args home = {.plan = plan,
                                    .plan_bytes = plan_bytes,
                                    .rows = slot_rows,
                                    .out = {out, TOKENS, sizeof *out},
                                    .slot_weights = slot_weights,
                                    .type = EPIC_F32};
    if (epic_combine(ctx, &home, sizeof home)) return failed(ctx, "combine");

    for (int t = 0; t < TOKENS; t++)
        printf("rank %d: token %d went out as %g and came home as %g\n", epic_rank(ctx), t,
               tokens[t][0], out[t][0]);
    free(plan);
    free(received);
    free(slot_weights);
    return 0;
}

int main(void)
{
    epic_meet meet;
    epic_context *ctx;
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = HIDDEN * sizeof(float)};
    if (epic_meet_env(&meet)) return failed(NULL, "meeting");
    int status = 1;
    if (epic_open(&ctx, &meet, &config, sizeof config))
        failed(ctx, "open");
    else
        status = step(ctx);
    epic_close(ctx);
    epic_meet_close(&meet);
    return status;
}
