/* SPDX-License-Identifier: Apache-2.0 */
/* Tests errors about several ranks or experts, which must name all of them: ranks that are
 * late, different orders of a sum, and replicas of many logical experts. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "run.h"

#define RANKS 4
#define LOGICAL 150 /* several words of a bit set */
#define EXPERTS (2 * LOGICAL)

static epic_context *opened(const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = 4, .max_row_bytes = 64, .max_in_flight = 2};
    epic_context *ctx = NULL;
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(ctx));
    return ctx;
}

/* Ranks 2 and 3 do not call. All waiting ranks get the same error, which names both. */
static void two_are_late(const epic_bootstrap *bootstrap, void *self)
{
    float number = 1;
    epic_failure_info info;
    epic_context *ctx = opened(bootstrap);
    const epic_allreduce_sum_args sum = {.call.timeout_ms = 300, .data = &number, .count = 1};
    (void)self;
    if (bootstrap->rank >= 2) run_nap_us(1500000);
    CHECK_EQ(epic_allreduce_sum(ctx, &sum), EPIC_ETIMEOUT);
    CHECK_SAY(strstr(epic_error(ctx), "for ranks 2 and 3") != NULL, "%s", epic_error(ctx));
    CHECK_EQ(epic_failure(ctx, &info), EPIC_OK);
    CHECK_EQ(info.num_culprits, 2);
    CHECK_EQ(info.culprits[0], 2);
    CHECK_EQ(info.culprits[1], 3);
    epic_close(ctx);
}

/* Different orders give different bits, so ranks with different orders must get an error. */
static void other_order(const epic_bootstrap *bootstrap, void *self)
{
    float number = 1;
    epic_context *ctx = opened(bootstrap);
    const epic_allreduce_sum_args sum = {
        .data = &number, .count = 1, .order = bootstrap->rank == 1 ? EPIC_TREE : EPIC_BY_RANK};
    (void)self;
    CHECK_EQ(epic_allreduce_sum(ctx, &sum), EPIC_EMISMATCH);
    CHECK_SAY(strstr(epic_error(ctx), "sum_order") != NULL, "%s", epic_error(ctx));
    epic_close(ctx);
}

/* Replicas e and e + LOGICAL are copies of one logical expert, on both ranks of a group of two.
 */
static void many_logical(const epic_bootstrap *bootstrap, void *self)
{
    int32_t logical_of[EXPERTS];
    const epic_layer layer = {.num_experts = EXPERTS, .num_logical = LOGICAL, .top_k = 1};
    const epic_config config = {.max_tokens = 4, .max_row_bytes = 64, .num_ranks = 2};
    int64_t bytes;
    CHECK(epic_plan_bytes(&config, &layer, &bytes) == EPIC_OK);
    void *plan = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    int32_t rows[LOGICAL], tokens[LOGICAL];
    float data[LOGICAL], scratch;
    epic_context *ctx = opened(bootstrap);
    (void)self;
    for (int e = 0; e < EXPERTS; e++) logical_of[e] = e % LOGICAL;
    const epic_plan_args args = {.layer = &layer,
                                 .plan = plan,
                                 .plan_bytes = bytes,
                                 .logical_of_expert = logical_of,
                                 .capacity = 16,
                                 .expert_rows = rows,
                                 .expert_tokens = tokens};
    CHECK_SAY(epic_plan(ctx, &args) == EPIC_OK, "%s", epic_error(ctx));
    for (int l = 0; l < LOGICAL; l++) data[l] = (float)(1000 * bootstrap->rank + l);
    const epic_sum_replicas_args sum = {.plan = plan,
                                        .plan_bytes = bytes,
                                        .data = {data, LOGICAL, sizeof *data},
                                        .workspace = &scratch};
    CHECK_SAY(epic_sum_replicas(ctx, &sum) == EPIC_OK, "%s", epic_error(ctx));
    for (int l = 0; l < LOGICAL; l++)
        CHECK_SAY(data[l] == (float)(1000 + 2 * l), "logical expert %d has %g", l,
                  (double)data[l]);
    epic_close(ctx);
    free(plan);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    run_threads(RANKS, two_are_late, NULL);
    run_threads(2, other_order, NULL);
    run_threads(2, many_logical, NULL);
    return check_end();
}
