/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that backend p2p refuses numbers beyond its limits with an error that contains the
 * limit: ranks at open, and experts in a plan. Only memory limits the number of tokens.
 *
 *   emulated_bounds */
#include <stdio.h>
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

int main(void)
{
    const epic_bootstrap bootstrap = {.num_ranks = DEVICE_MAX_RANKS + 1};
    const epic_config config = {.max_tokens = 1, .max_row_bytes = 16};
    const epic_join join = {.bootstrap = &bootstrap, .config = &config};
    epic_group *group;
    expect_refusal(epic_backend_p2p.join(&group, &join), "at most 32");
    const team t = {.num_ranks = 1,
                    .num_gpus = 1,
                    .max_tokens = 1 << 17, /* more than fit into shared memory */
                    .max_row_bytes = 16,
                    .timeout_ms = 1000,
                    .work = run_rank};
    if (team_run(&t)) bad = true;
    printf("emulated_bounds: %s\n", bad ? "WRONG" : "good");
    return bad;
}
