/* SPDX-License-Identifier: Apache-2.0 */
/* One step of a Mixture-of-Experts layer: sends tokens to their experts and sums what returns.
 *
 *     build/examples/step                                                    one rank
 *     RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 build/examples/step &
 *     RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 build/examples/step
 */
#include <stdio.h>

#include "epic/epic.h"

enum { TOKENS = 4, TOP_K = 2, EXPERTS = 8, HIDDEN = 16 };

/* The experts of this rank: expert e multiplies its rows by e + 1. results is the same memory
 * as rows. So an expert that needs a whole row for each of its results must copy it first. */
static void run_experts(const epic_slots *slots)
{
    const float *row = slots->rows;
    float *result = slots->results;
    for (int e = 0; e < slots->num_local_experts; e++)
        for (int i = 0; i < slots->expert_rows[e] * HIDDEN; i++)
            *result++ = *row++ * (float)(slots->first_expert + e + 1);
}

static int failed(epic_dispatcher *dispatcher)
{
    fprintf(stderr, "%s\n", epic_error(NULL));
    epic_dispatcher_close(dispatcher);
    return 1;
}

int main(void)
{
    float tokens[TOKENS][HIDDEN], weights[TOKENS][TOP_K], out[TOKENS][HIDDEN];
    int32_t chosen[TOKENS][TOP_K]; /* the experts of each token, as a router chooses them */
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++) tokens[t][h] = (float)(t + 1);
        for (int k = 0; k < TOP_K; k++) {
            chosen[t][k] = (t + 3 * k) % EXPERTS;
            weights[t][k] = k ? 0.25f : 0.75f;
        }
    }
    epic_dispatcher *dispatcher;
    epic_slots slots;
    const epic_dispatcher_config config = {.max_tokens = TOKENS,
                                           .num_experts = EXPERTS,
                                           .top_k = TOP_K,
                                           .hidden = HIDDEN,
                                           .type = EPIC_F32};
    if (epic_dispatcher_open(&dispatcher, &config)) return failed(NULL);
    if (epic_dispatcher_dispatch(dispatcher, tokens, *chosen, *weights, TOKENS, &slots))
        return failed(dispatcher);
    run_experts(&slots);
    if (epic_dispatcher_combine(dispatcher, out)) return failed(dispatcher);
    for (int t = 0; t < TOKENS; t++)
        printf("token %d left as %g and returned as %g\n", t, tokens[t][0], out[t][0]);
    epic_dispatcher_close(dispatcher);
    return 0;
}
