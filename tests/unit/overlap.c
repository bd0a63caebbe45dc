/* SPDX-License-Identifier: Apache-2.0 */
/* Tests flags of one call passed to another call, arrays that overlap, and misaligned arrays.
 * Every call must refuse them with both names, and write nothing. */
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "losses.h"
#include "run.h"
#include "step.h"

static void refused(epic_result result, const char *call, const char *name, const char *other)
{
    const char *said = epic_error(NULL);
    CHECK_SAY(result == EPIC_EINVAL && strstr(said, name) && strstr(said, other),
              "%s, %s and %s: %s: %s", call, name, other, epic_result_name(result), said);
}

/* --------------------------------------------------------------------------- the steps ---- */

/* Makes `change` in a copy of `args`, and checks that `call` refuses it. */
#define WITH(call, args, change, name, other)          \
    do {                                               \
        call##_args a = args;                          \
        change;                                        \
        refused(call(s->ctx, &a), #call, name, other); \
    } while (0)

static const uint32_t all_flags[] = {EPIC_ZERO_TAIL, EPIC_ACCUMULATE,    EPIC_SUM_DENSE,
                                     EPIC_DISTINCT,  EPIC_LEAVE_PADDING, 1u << 31};

static void try_flags(step *s)
{
    for (size_t i = 0; i < sizeof all_flags / sizeof *all_flags; i++) {
        const uint32_t f = all_flags[i];
        /* the flags that concern slots */
        const bool slots = f == EPIC_ZERO_TAIL || f == EPIC_LEAVE_PADDING;
        WITH(epic_plan, step_plan(s, 1), a.flags = f, "flags", "");
        WITH(epic_combine, step_combine(s, 1), a.flags = f, "flags", "");
        WITH(epic_dispatch_backward, step_dispatch_backward(s, 1), a.flags = f, "flags", "");
        WITH(epic_allreduce_sum, step_sum(s, 1), a.flags = f, "flags", "");
        if (slots) continue;
        WITH(epic_dispatch, step_dispatch(s, 1), a.flags = f, "flags", "");
        WITH(epic_combine_backward, step_combine_backward(s, 1), a.flags = f, "flags", "");
    }
}

static void try_steps(step *s)
{
    const size_t row = (size_t)s->hidden;
    WITH(epic_plan, step_plan(s, 1), a.topk_idx = s->expert_rows, "topk_idx", "expert_rows");
    WITH(epic_plan, step_plan(s, 1), a.load = a.expert_tokens, "load", "expert_tokens");
    WITH(epic_plan, step_plan(s, 1), a.demand = s->load + 1, "demand", "load");
    WITH(epic_plan, step_plan(s, 1), a.expert_rows_i64 = (void *)s->recv;
         a.expert_tokens_i64 = (void *)s->recv, "expert_rows_i64", "expert_tokens_i64");
    WITH(epic_plan, step_plan(s, 1), a.topk_idx = (void *)(s->plan + 64), "plan", "topk_idx");

    WITH(epic_dispatch, step_dispatch(s, 1), a.recv.data = s->x, "recv.data", "tokens.data");
    WITH(epic_dispatch, step_dispatch(s, 1), a.tokens.data = s->recv + row, "recv.data",
         "tokens.data");
    WITH(epic_dispatch, step_dispatch(s, 1), a.slot_weights = s->weights + 1, "slot_weights",
         "weights");
    WITH(epic_dispatch, step_dispatch(s, 1), a.slot_weights = s->recv, "slot_weights",
         "recv.data");
    WITH(epic_dispatch, step_dispatch(s, 1), a.recv.data = s->plan, "recv.data", "plan");

    WITH(epic_combine, step_combine(s, 1), a.out.data = s->recv, "out.data", "rows.data");
    WITH(epic_combine, step_combine(s, 1), a.out.data = s->recv + row, "out.data", "rows.data");
    WITH(epic_combine, step_combine(s, 1), a.out.data = s->slot_weights, "out.data",
         "slot_weights");
    WITH(epic_dispatch_backward, step_dispatch_backward(s, 1),
         a.d_tokens.data = s->d_rows + row, "d_tokens.data", "d_recv.data");
    WITH(epic_dispatch_backward, step_dispatch_backward(s, 1), a.d_weights = s->d_slot_weights,
         "d_weights", "d_slot_weights");
    WITH(epic_combine_backward, step_combine_backward(s, 1), a.d_rows.data = s->recv,
         "d_rows.data", "rows.data");
    WITH(epic_combine_backward, step_combine_backward(s, 1), a.d_out.data = s->d_rows + 3 * row,
         "d_rows.data", "d_out.data");
    WITH(epic_combine_backward, step_combine_backward(s, 1), a.d_slot_weights = s->slot_weights,
         "d_slot_weights", "slot_weights");
}

/* Empty arrays may have any address. Two of them may have the same one. */
static void try_empty(step *s)
{
    step none;
    step_open(&none, s->ctx, 0, s->hidden);
    epic_plan_args p = step_plan(&none, 1);
    CHECK_SAY(epic_plan(s->ctx, &p) == EPIC_OK, "%s", epic_error(NULL));
    epic_dispatch_args d = step_dispatch(&none, 1);
    d.tokens.data = d.recv.data;
    d.weights = d.slot_weights;
    CHECK_SAY(epic_dispatch(s->ctx, &d) == EPIC_OK, "%s", epic_error(NULL));
    step_close(&none);
}

/* Rank 0 makes wrong calls. Then all ranks make correct calls, which must succeed. */
static void ranks(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 20000};
    epic_context *ctx;
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    step s;
    step_open(&s, ctx, 6, 32);
    CHECK(step_all(&s, 1));
    if (bootstrap->rank == 0) try_flags(&s);
    if (bootstrap->rank == 0) try_steps(&s);
    CHECK(step_all(&s, 1));
    try_empty(&s);
    step_close(&s);
    epic_close(ctx);
}

/* ------------------------------------------------------------- router, losses, experts ---- */

#define T 4 /* tokens */
#define E 8

static _Alignas(64) unsigned char memory[16][65536];

/* Sets `field` to an address, checks that the call is refused with both words, and resets it.
 */
#define FIELD(call, args, field, address, name, other)  \
    do {                                                \
        const void *right = args.field;                 \
        args.field = (void *)(address);                 \
        refused(call(NULL, &args), #call, name, other); \
        args.field = (void *)(uintptr_t)right;          \
    } while (0)
#define FLAG(call, args, allowed)                                       \
    for (size_t i = 0; i < sizeof all_flags / sizeof *all_flags; i++) { \
        if (all_flags[i] & (allowed)) continue;                         \
        args.flags = all_flags[i];                                      \
        refused(call(NULL, &args), #call, "flags", "");                 \
        args.flags = 0;                                                 \
    }

static const epic_router router = {.num_experts = E, .top_k = 2};

static void try_router(void)
{
    int32_t *table = (int32_t *)memory[5];
    epic_router_args a = {.type = EPIC_F32,
                          .router = &router,
                          .logits = memory[0],
                          .num_tokens = T,
                          .bias = (float *)memory[1],
                          .token_ids = memory[4],
                          .table = table,
                          .table_rows = T,
                          .workspace = memory[2],
                          .workspace_bytes = sizeof memory[2],
                          .topk_idx = (int32_t *)memory[3],
                          .weights = memory[6],
                          .scores = memory[7]};
    CHECK(epic_router_forward(NULL, &a) == EPIC_OK);
    FIELD(epic_router_forward, a, logits, memory[0] + 2, "logits", "multiple of 4");
    FIELD(epic_router_forward, a, bias, memory[1] + 1, "bias", "multiple of 4");
    FIELD(epic_router_forward, a, token_ids, memory[4] + 2, "token_ids", "multiple of 4");
    FIELD(epic_router_forward, a, table, memory[5] + 2, "table", "multiple of 4");
    FIELD(epic_router_forward, a, topk_idx, memory[3] + 2, "topk_idx", "multiple of 4");
    FIELD(epic_router_forward, a, weights, memory[6] + 3, "weights", "multiple of 4");
    FIELD(epic_router_forward, a, scores, memory[7] + 2, "scores", "multiple of 4");
    FIELD(epic_router_forward, a, weights, memory[3] + 4, "weights", "topk_idx");
    FIELD(epic_router_forward, a, scores, memory[0], "scores", "logits");
    FIELD(epic_router_forward, a, topk_idx, memory[2] + 64, "topk_idx", "workspace");
    FIELD(epic_router_forward, a, topk_idx, memory[4], "topk_idx", "token_ids");
    FLAG(epic_router_forward, a, 0)

    epic_router_backward_args b = {.type = EPIC_F32,
                                   .router = &router,
                                   .logits = memory[0],
                                   .num_tokens = T,
                                   .topk_idx = (int32_t *)memory[3],
                                   .d_weights = memory[6],
                                   .workspace = memory[2],
                                   .workspace_bytes = sizeof memory[2],
                                   .d_logits = memory[7]};
    CHECK(epic_router_backward(NULL, &b) == EPIC_OK);
    FIELD(epic_router_backward, b, d_weights, memory[6] + 2, "d_weights", "multiple of 4");
    FIELD(epic_router_backward, b, d_logits, memory[7] + 2, "d_logits", "multiple of 4");
    FIELD(epic_router_backward, b, d_logits, memory[0], "d_logits", "logits");
    FIELD(epic_router_backward, b, d_logits, memory[6], "d_logits", "d_weights");
    FLAG(epic_router_backward, b, EPIC_ACCUMULATE)
}

static void try_losses(void)
{
    loss_args a = {.type = EPIC_F32,
                   .router = &router,
                   .logits = memory[0],
                   .num_tokens = T,
                   .total_tokens = T,
                   .load = (int32_t *)memory[1],
                   .d_loss = (float *)memory[5],
                   .workspace = memory[2],
                   .workspace_bytes = sizeof memory[2],
                   .loss = memory[3],
                   .d_logits = memory[4]};
    CHECK(balance_loss_forward(NULL, &a) == EPIC_OK);
    CHECK(z_loss_backward(NULL, &a) == EPIC_OK);
    FIELD(balance_loss_forward, a, logits, memory[0] + 2, "logits", "multiple of 4");
    FIELD(balance_loss_forward, a, load, memory[1] + 2, "load", "multiple of 4");
    FIELD(z_loss_forward, a, loss, memory[3] + 2, "loss", "multiple of 4");
    FIELD(z_loss_backward, a, d_loss, memory[5] + 2, "d_loss", "multiple of 4");
    FIELD(z_loss_forward, a, loss, memory[0] + 4, "loss", "logits");
    FIELD(balance_loss_backward, a, d_logits, memory[1], "d_logits", "load");
    FIELD(z_loss_backward, a, d_logits, memory[0] + 64, "d_logits", "logits");
    FLAG(balance_loss_backward, a, EPIC_ACCUMULATE)
    FLAG(z_loss_backward, a, EPIC_ACCUMULATE)
    epic_bias_update_args u = {
        .bias = (float *)memory[0], .load = (int32_t *)memory[1], .num_experts = E};
    FIELD(epic_bias_update, u, bias, memory[0] + 2, "bias", "multiple of 4");
    FIELD(epic_bias_update, u, load, memory[1] + 1, "load", "multiple of 4");
    FIELD(epic_bias_update, u, load, memory[0] + 8, "bias", "load");
    FLAG(epic_bias_update, u, 0)
}

static void try_experts(void)
{
    static const epic_experts ex = {.row_type = EPIC_F32,
                                    .num_local_experts = 2,
                                    .hidden = 4,
                                    .inner = 3,
                                    .weighting = EPIC_WEIGHT_EARLY};
    static const int32_t counts[2] = {2, 2};
    epic_experts_args a = {.experts = &ex,
                           .x = memory[0],
                           .num_slots = T,
                           .expert_rows = counts,
                           .slot_weights = (float *)memory[1],
                           .w_gate_up = memory[2],
                           .w_down = memory[3],
                           .b_down = memory[4],
                           .saved = memory[5],
                           .saved_bytes = sizeof memory[5],
                           .workspace = memory[6],
                           .workspace_bytes = sizeof memory[6],
                           .y = memory[7]};
    CHECK_SAY(epic_experts_forward(NULL, &a) == EPIC_OK, "%s", epic_error(NULL));
    FIELD(epic_experts_forward, a, x, memory[0] + 2, "x is", "multiple of 4");
    FIELD(epic_experts_forward, a, expert_rows, memory[8] + 2, "expert_rows", "multiple of 4");
    FIELD(epic_experts_forward, a, expert_tokens, memory[8] + 2, "expert_tokens",
          "multiple of 4");
    FIELD(epic_experts_forward, a, slot_weights, memory[1] + 2, "slot_weights",
          "multiple of 4");
    FIELD(epic_experts_forward, a, w_gate_up, memory[2] + 2, "w_gate_up", "multiple of 4");
    FIELD(epic_experts_forward, a, b_down, memory[4] + 1, "b_down", "multiple of 4");
    FIELD(epic_experts_forward, a, y, memory[7] + 2, "y is", "multiple of 4");
    FIELD(epic_experts_forward, a, y, memory[0] + 16, "y at", "x at");
    FIELD(epic_experts_forward, a, saved, memory[6], "saved", "workspace");
    FIELD(epic_experts_forward, a, y, memory[3] + 4, "y at", "w_down");
    FLAG(epic_experts_forward, a, EPIC_LEAVE_PADDING)

    epic_experts_backward_args b = {.experts = &ex,
                                    .x = a.x,
                                    .num_slots = T,
                                    .expert_rows = counts,
                                    .slot_weights = a.slot_weights,
                                    .w_gate_up = a.w_gate_up,
                                    .w_down = a.w_down,
                                    .b_down = a.b_down,
                                    .saved = a.saved,
                                    .saved_bytes = a.saved_bytes,
                                    .workspace = a.workspace,
                                    .workspace_bytes = a.workspace_bytes,
                                    .d_y = memory[8],
                                    .d_x = memory[9],
                                    .d_w_gate_up = memory[10],
                                    .d_w_down = memory[11],
                                    .d_b_down = memory[12],
                                    .d_slot_weights = (float *)memory[13]};
    CHECK_SAY(epic_experts_backward(NULL, &b) == EPIC_OK, "%s", epic_error(NULL));
    FIELD(epic_experts_backward, b, d_y, memory[8] + 2, "d_y", "multiple of 4");
    FIELD(epic_experts_backward, b, d_w_down, memory[11] + 2, "d_w_down", "multiple of 4");
    FIELD(epic_experts_backward, b, d_x, memory[0], "d_x", "x at");
    FIELD(epic_experts_backward, b, d_w_gate_up, memory[2], "d_w_gate_up", "w_gate_up");
    FIELD(epic_experts_backward, b, d_w_down, memory[10] + 32, "d_w_down", "d_w_gate_up");
    FLAG(epic_experts_backward, b, EPIC_ACCUMULATE | EPIC_LEAVE_PADDING)
}

int main(void)
{
    check_begin();
    run_alarm(60);
    run_threads(1, ranks, NULL);
    run_threads(2, ranks, NULL);
    try_router();
    try_losses();
    try_experts();
    return check_end();
}
