/* SPDX-License-Identifier: Apache-2.0 */
/* Tests extreme numbers, alone and in pairs, in the arguments of calls and of size queries. A
 * call must refuse them with EPIC_EINVAL before it multiplies. The build with
 * UndefinedBehaviorSanitizer detects overflows. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"

#define TOKENS 4
#define EXPERTS 2
#define WIDTH 64

static const int64_t far[] = {INT64_MIN,     INT64_MIN / 4,     -1,       INT64_MAX / 65536,
                              INT64_MAX / 4, INT64_MAX / 2 + 2, INT64_MAX};
#define NUM_FAR ((int)(sizeof far / sizeof *far))

static epic_context *ctx;
static unsigned char plan[1 << 20] __attribute__((aligned(64)));
static float tokens[TOKENS * WIDTH], slots[64 * WIDTH], out[TOKENS * WIDTH], small[1024];
static int32_t ids[TOKENS], counts[1 << 17];
static double work[1 << 14];

typedef struct extreme_call {
    const char *name;
    void *args; /* valid arguments of the call */
    size_t size;
    epic_result (*make)(const void *args);
    int64_t largest;   /* values from 0 to this one are valid if memory is large enough */
    size_t fields[12]; /* offsets of its int64_t fields; 0 ends the list */
} extreme_call;

static void check_refused(const extreme_call *c, size_t field, int64_t value, size_t other,
                          int64_t second)
{
    unsigned char args[512];
    if (value >= 0 && value <= c->largest) return;
    memcpy(args, c->args, c->size);
    memcpy(args + field, &value, sizeof value);
    memcpy(args + other, &second, sizeof second);
    const epic_result result = c->make(args);
    CHECK_SAY(result == EPIC_EINVAL, "%s, offset %zu: %lld, offset %zu: %lld: %s", c->name,
              field, (long long)value, other, (long long)second, epic_result_name(result));
}

static void check_call(const extreme_call *c)
{
    for (int f = 0; c->fields[f]; f++)
        for (int i = 0; i < NUM_FAR; i++)
            for (int g = 0; c->fields[g]; g++)
                for (int j = 0; j < NUM_FAR; j++)
                    check_refused(c, c->fields[f], far[i], c->fields[g],
                                  g == f ? far[i] : far[j]);
}

#define MAKE(name, type)                                    \
    static epic_result make_##name(const void *args)        \
    {                                                       \
        return epic_##name(ctx, (const epic_##type *)args); \
    }
MAKE(plan, plan_args)
MAKE(dispatch, dispatch_args)
MAKE(combine, combine_args)
MAKE(dispatch_backward, dispatch_backward_args)
MAKE(combine_backward, combine_backward_args)
MAKE(allreduce_sum, allreduce_sum_args)
MAKE(sum_replicas, sum_replicas_args)
MAKE(router_forward, router_args)
MAKE(balance_loss_forward, balance_loss_args)
MAKE(z_loss_forward, z_loss_args)
MAKE(bias_update, bias_update_args)
MAKE(experts_forward, experts_args)

#define ROWS(type, field)                                  \
    offsetof(type, field) + offsetof(epic_rows, num_rows), \
        offsetof(type, field) + offsetof(epic_rows, row_bytes)
#define CALL(name, type, args, ...) \
    check_call(&(extreme_call){#name, &(args), sizeof(args), make_##name, 0, {__VA_ARGS__}})

static const epic_const_rows in_rows = {tokens, TOKENS, WIDTH * 4};
static const epic_rows slot_rows = {slots, 64, WIDTH * 4};

static void check_steps(const epic_layer *layer)
{
    epic_plan_args p = {.layer = layer,
                        .plan = plan,
                        .plan_bytes = sizeof plan,
                        .topk_idx = ids,
                        .num_tokens = TOKENS,
                        .capacity = 64};
    CHECK_EQ(epic_plan(ctx, &p), EPIC_OK);
    CALL(plan, plan_args, p, offsetof(epic_plan_args, num_tokens),
         offsetof(epic_plan_args, capacity));
    epic_dispatch_args d = {
        .plan = plan, .plan_bytes = sizeof plan, .tokens = in_rows, .recv = slot_rows};
    CALL(dispatch, dispatch_args, d, ROWS(epic_dispatch_args, tokens),
         ROWS(epic_dispatch_args, recv));
    d.type = EPIC_F32;
    d.quantize = EPIC_QUANTIZE_1X128;
    CALL(dispatch, dispatch_args, d, ROWS(epic_dispatch_args, tokens),
         ROWS(epic_dispatch_args, recv), ROWS(epic_dispatch_args, recv_scales));
    d.tokens = (epic_const_rows){0}; /* rows are as wide as those of recv */
    CALL(dispatch, dispatch_args, d, ROWS(epic_dispatch_args, recv));
    epic_combine_args c = {.plan = plan,
                           .plan_bytes = sizeof plan,
                           .rows = epic_rows_as_const(slot_rows),
                           .out = {out, TOKENS, WIDTH * 4},
                           .type = EPIC_F32};
    CALL(combine, combine_args, c, ROWS(epic_combine_args, rows), ROWS(epic_combine_args, out));
    epic_dispatch_backward_args db = {.plan = plan,
                                      .plan_bytes = sizeof plan,
                                      .d_recv = epic_rows_as_const(slot_rows),
                                      .d_tokens = {out, TOKENS, WIDTH * 4},
                                      .type = EPIC_F32};
    CALL(dispatch_backward, dispatch_backward_args, db,
         ROWS(epic_dispatch_backward_args, d_recv),
         ROWS(epic_dispatch_backward_args, d_tokens));
    epic_combine_backward_args cb = {.plan = plan,
                                     .plan_bytes = sizeof plan,
                                     .d_out = in_rows,
                                     .d_rows = slot_rows,
                                     .type = EPIC_F32};
    CALL(combine_backward, combine_backward_args, cb, ROWS(epic_combine_backward_args, d_out),
         ROWS(epic_combine_backward_args, d_rows));
    epic_allreduce_sum_args s = {.data = small, .count = 8};
    check_call(&(extreme_call){"allreduce_sum",
                               &s,
                               sizeof s,
                               make_allreduce_sum,
                               INT64_MAX / 8,
                               {offsetof(epic_allreduce_sum_args, count)}});
    epic_sum_replicas_args r = {.plan = plan,
                                .plan_bytes = sizeof plan,
                                .workspace = out,
                                .data = {small, EXPERTS, 64}};
    check_call(&(extreme_call){"sum_replicas",
                               &r,
                               sizeof r,
                               make_sum_replicas,
                               INT64_MAX / 65536,
                               {ROWS(epic_sum_replicas_args, data)}});
}

static void check_router(void)
{
    const epic_router router = {.num_experts = EXPERTS, .top_k = 1};
    epic_router_args r = {.router = &router,
                          .logits = tokens,
                          .num_tokens = TOKENS,
                          .workspace = work,
                          .workspace_bytes = sizeof work,
                          .topk_idx = ids,
                          .weights = small,
                          .type = EPIC_F32};
    CALL(router_forward, router_args, r, offsetof(epic_router_args, num_tokens));
    r.token_ids = ids;
    r.table = counts;
    CALL(router_forward, router_args, r, offsetof(epic_router_args, table_rows));
    epic_balance_loss_args b = {.router = &router,
                                .logits = tokens,
                                .num_tokens = TOKENS,
                                .total_tokens = TOKENS,
                                .load = counts,
                                .coeff = 1,
                                .workspace = work,
                                .workspace_bytes = sizeof work,
                                .loss = small,
                                .type = EPIC_F32};
    CALL(balance_loss_forward, balance_loss_args, b,
         offsetof(epic_balance_loss_args, num_tokens));
    b.topk_idx = ids;
    CALL(balance_loss_forward, balance_loss_args, b,
         offsetof(epic_balance_loss_args, sequence_tokens));
    epic_z_loss_args z = {.router = &router,
                          .logits = tokens,
                          .num_tokens = TOKENS,
                          .total_tokens = TOKENS,
                          .coeff = 1,
                          .workspace = work,
                          .workspace_bytes = sizeof work,
                          .loss = small,
                          .type = EPIC_F32};
    CALL(z_loss_forward, z_loss_args, z, offsetof(epic_z_loss_args, num_tokens));
    z.total_tokens = b.total_tokens = INT64_MAX;
    CALL(balance_loss_forward, balance_loss_args, b,
         offsetof(epic_balance_loss_args, num_tokens));
    CALL(z_loss_forward, z_loss_args, z, offsetof(epic_z_loss_args, num_tokens));
    epic_bias_update_args u = {.bias = small, .load = counts, .num_experts = EXPERTS};
    CALL(bias_update, bias_update_args, u, offsetof(epic_bias_update_args, num_experts));
}

/* Queries sizes of layers that fit no machine. The result must be a number of bytes or an
 * error. */
static void check_experts(void)
{
    const uint32_t wide[] = {1, 8, 1 << 16, 1 << 24, UINT32_MAX};
    const int64_t num_slots[] = {0, 64, INT32_MAX, INT64_MAX / 4, INT64_MAX, -1};
    for (int e = 0; e < 5; e++)
        for (int h = 0; h < 5; h++)
            for (int i = 0; i < 5; i++)
                for (int n = 0; n < 6; n++) {
                    const epic_experts x = {.num_local_experts = wide[e],
                                            .hidden = wide[h],
                                            .inner = wide[i],
                                            .row_type = EPIC_F64};
                    epic_experts_memory_info info;
                    const epic_result result =
                        epic_experts_memory(NULL, NULL, &x, num_slots[n], &info);
                    const bool possible = e < 3 && h < 4 && i < 4 && n < 3;
                    CHECK_SAY(result == EPIC_EINVAL || (result == EPIC_OK && possible),
                              "%u %u %u %lld: %s", wide[e], wide[h], wide[i],
                              (long long)num_slots[n], epic_result_name(result));
                    if (result == EPIC_OK) CHECK(info.backward_bytes >= info.forward_bytes);
                    epic_experts_args a = {.experts = &x,
                                           .x = tokens,
                                           .num_slots = num_slots[n],
                                           .expert_rows = counts,
                                           .w_gate_up = slots,
                                           .w_down = work,
                                           .y = out,
                                           .workspace = small,
                                           .saved = small + 512};
                    if (num_slots[n]) CHECK_EQ(make_experts_forward(&a), EPIC_EINVAL);
                    const epic_router router = {.num_experts = EXPERTS, .top_k = 1};
                    const epic_layer layer = {.num_experts = EXPERTS, .top_k = 1};
                    const epic_moe moe = {.router = &router,
                                          .layer = &layer,
                                          .experts = &x,
                                          .shared = &x,
                                          .capacity = num_slots[n]};
                    const epic_config config = {
                        .max_tokens = INT32_MAX, .max_row_bytes = 1 << 30, .num_ranks = 1};
                    epic_moe_memory_info all;
                    (void)epic_moe_memory(NULL, &config, &moe, &all);
                }
}

static void check_sizes(const epic_layer *layer)
{
    const char *const backends[] = {NULL, "self", "threads", "shm", "mpi"};
    for (int b = 0; b < 5; b++)
        for (int i = 0; i < NUM_FAR; i++)
            for (int ranks = 1; ranks <= 1024; ranks *= 32) {
                const epic_config config = {.max_tokens = INT32_MAX,
                                            .max_row_bytes = 1 << 30,
                                            .staging_bytes = far[i],
                                            .num_ranks = (uint32_t)ranks,
                                            .backend = backends[b]};
                epic_memory_info info;
                int64_t slots;
                (void)epic_memory(&config, layer, &info);
                (void)epic_capacity_bound(&config, layer, &slots);
                epic_config bad = config;
                bad.staging_bytes = 0;
                bad.max_tokens = far[i];
                CHECK_EQ(epic_memory(&bad, layer, &info), EPIC_EINVAL);
                bad.max_tokens = 1;
                bad.max_row_bytes = far[i];
                CHECK_EQ(epic_memory(&bad, layer, &info), EPIC_EINVAL);
            }
}

/* Opens a dispatcher in a context of the caller, with rows wider than the context allows. */
static void check_step(void)
{
    epic_dispatcher *step = NULL;
    const epic_dispatcher_config config = {.max_tokens = TOKENS,
                                           .num_experts = EXPERTS,
                                           .top_k = 1,
                                           .hidden = UINT32_MAX,
                                           .type = EPIC_F64,
                                           .ctx = ctx};
    CHECK_EQ(epic_dispatcher_open(&step, &config), EPIC_EINVAL);
    CHECK_SAY(strstr(epic_error(NULL), "hidden") != NULL, "%s", epic_error(NULL));
    epic_dispatcher_close(step);
}

int main(void)
{
    check_begin();
    const epic_config config = {
        .max_tokens = TOKENS, .max_row_bytes = WIDTH * 4, .backend = "self"};
    const epic_layer layer = {.num_experts = EXPERTS, .top_k = 1};
    if (!CHECK_EQ(epic_open(&ctx, NULL, &config), EPIC_OK)) return check_end();
    check_steps(&layer);
    check_router();
    check_experts();
    check_sizes(&layer);
    check_step();
    epic_close(ctx);
    return check_end();
}
