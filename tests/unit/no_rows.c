/* SPDX-License-Identifier: Apache-2.0 */
/* Tests ranks without tokens or slots, which pass {NULL, 0, 0} in place of their rows. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

enum { TOKENS = 3, HIDDEN = 5, RANKS = 3, ROW = HIDDEN * 4 };

/* Rank 0 sends all rows to the expert of rank 1. Rank 2 has neither tokens nor slots, but its
 * receive buffer defines how wide rows are. */
typedef struct part {
    float tokens[TOKENS][HIDDEN], slots[TOKENS][HIDDEN], out[TOKENS][HIDDEN];
    int32_t ids[TOKENS];
    float weights[TOKENS], slot_weights[TOKENS];
} part;

static const epic_rows none = {NULL, 0, 0};

static void run(epic_context *ctx, part *p, void *plan, int64_t plan_bytes)
{
    const int rank = epic_rank(ctx);
    const epic_layer layer = {.num_experts = RANKS, .top_k = 1};
    const epic_rows tokens = rank == 0 ? (epic_rows){p->tokens, TOKENS, ROW} : none;
    const epic_rows out = rank == 0 ? (epic_rows){p->out, TOKENS, ROW} : none;
    const epic_rows slots = rank == 0 ? none : (epic_rows){p->slots, TOKENS, ROW};
    const epic_plan_args where = {.layer = &layer,
                                  .plan = plan,
                                  .plan_bytes = plan_bytes,
                                  .topk_idx = rank == 0 ? p->ids : NULL,
                                  .num_tokens = rank == 0 ? TOKENS : 0};
    const epic_dispatch_args dispatch = {.layer = &layer,
                                         .plan = plan,
                                         .plan_bytes = plan_bytes,
                                         .tokens = epic_rows_as_const(tokens),
                                         .recv = slots,
                                         .weights = p->weights,
                                         .slot_weights = p->slot_weights};
    const epic_combine_args combine = {.layer = &layer,
                                       .plan = plan,
                                       .plan_bytes = plan_bytes,
                                       .rows = epic_rows_as_const(slots),
                                       .out = out,
                                       .type = EPIC_F32};
    const epic_combine_backward_args back = {.layer = &layer,
                                             .plan = plan,
                                             .plan_bytes = plan_bytes,
                                             .d_out = epic_rows_as_const(out),
                                             .rows = epic_rows_as_const(slots),
                                             .d_rows = slots,
                                             .type = EPIC_F32};
    const epic_dispatch_backward_args home = {.layer = &layer,
                                              .plan = plan,
                                              .plan_bytes = plan_bytes,
                                              .d_recv = epic_rows_as_const(slots),
                                              .d_tokens = out,
                                              .type = EPIC_F32};
    CHECK_SAY(epic_plan(ctx, &where) == EPIC_OK, "%s", epic_error(ctx));
    CHECK_SAY(epic_dispatch(ctx, &dispatch) == EPIC_OK, "%s", epic_error(ctx));
    if (rank == 1) CHECK(p->slots[1][2] == 10 && p->slot_weights[2] == 3);
    CHECK_SAY(epic_combine(ctx, &combine) == EPIC_OK, "%s", epic_error(ctx));
    if (rank == 0) CHECK(!memcmp(p->tokens, p->out, sizeof p->out));
    epic_combine_backward_args alone = back;
    alone.rows = epic_rows_as_const(none); /* not needed without d_slot_weights */
    CHECK_SAY(epic_combine_backward(ctx, &alone) == EPIC_OK, "%s", epic_error(ctx));
    CHECK_SAY(epic_dispatch_backward(ctx, &home) == EPIC_OK, "%s", epic_error(ctx));
    if (rank == 0) CHECK(!memcmp(p->tokens, p->out, sizeof p->out));
    epic_dispatch_args nothing = dispatch;
    nothing.tokens = epic_rows_as_const(none);
    nothing.recv = none;
    /* no argument defines how wide rows are */
    CHECK(epic_dispatch(ctx, &nothing) == EPIC_EINVAL);
    CHECK_SAY(strstr(epic_error(ctx), "row_bytes is 0"), "%s", epic_error(ctx));
}

static void work(const epic_bootstrap *bootstrap, void *self)
{
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = ROW};
    const epic_layer layer = {.num_experts = RANKS, .top_k = 1};
    epic_context *ctx;
    epic_layer_info info;
    part p;
    (void)self;
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    CHECK(epic_layer_sizes(ctx, &layer, &info) == EPIC_OK);
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++) p.tokens[t][h] = (float)(t * 8 + h);
        p.ids[t] = 1;
        p.weights[t] = (float)(t + 1);
    }
    void *plan = aligned_alloc(64, ((size_t)info.plan_bytes + 63) / 64 * 64);
    run(ctx, &p, plan, info.plan_bytes);
    free(plan);
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(50);
    run_threads(RANKS, work, NULL);
    run_processes(RANKS, work, NULL, 40);
    return check_end();
}
