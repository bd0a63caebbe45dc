/* SPDX-License-Identifier: Apache-2.0 */
/* Tests structs that are passed with their size: shorter, equal, and longer with and without a
 * zero tail. Every call must refuse sizes that no release had, first of all the sizeof of a
 * pointer. */
#include "base/sized.h"

#include <stdio.h>
#include <string.h>

#include "check.h"

/* ---------------------------------------------------------------------------- the rule ---- */

typedef struct ours {
    uint32_t a, b, c, d, e, f;
} ours;

static const sized_type thing = {"epic_thing", sizeof(ours), 12};

static void check_read(size_t size, unsigned char tail, bool taken)
{
    unsigned char theirs[64] = {0}, got[sizeof(ours)];
    memset(theirs, 0x11, sizeof got);
    if (size > sizeof got && size <= sizeof theirs) theirs[size - 1] = tail;
    memset(got, 0xee, sizeof got);
    const epic_result result = sized_read(got, &thing, theirs, size, "args");
    CHECK_SAY(result == (taken ? EPIC_OK : EPIC_EINVAL), "size %zu, tail %d: %s: %s", size,
              tail, epic_result_name(result), epic_error(NULL));
    for (size_t i = 0; i < sizeof got; i++)
        CHECK_EQ(got[i], !taken ? 0xee : i < size ? 0x11 : 0);
    if (!taken) CHECK(strstr(epic_error(NULL), "args") != NULL);
}

static void check_rule(void)
{
    for (size_t size = 0; size <= 64; size++) check_read(size, 0, size >= thing.first);
    for (size_t size = sizeof(ours) + 1; size <= 64; size++) check_read(size, 1, false);
    check_read(65537, 0, false);
    check_read(SIZE_MAX, 0, false);
    ours got;
    CHECK(sized_read(&got, &thing, NULL, sizeof got, "args") == EPIC_EINVAL);
    CHECK(sized_place(NULL, &thing, sizeof got, "out") == EPIC_EINVAL);
}

/* A result fills the caller's struct, also a longer one, and nothing after it. */
static void check_answer(void)
{
    const ours answer = {1, 2, 3, 4, 5, 6};
    for (size_t size = thing.first; size <= 60; size++) {
        unsigned char out[64];
        memset(out, 0xee, sizeof out);
        CHECK(sized_place(out, &thing, size, "out") == EPIC_OK);
        sized_write(out, &answer, &thing, size);
        const size_t same = size < sizeof answer ? size : sizeof answer;
        CHECK(memcmp(out, &answer, same) == 0);
        for (size_t i = same; i < sizeof out; i++) CHECK_EQ(out[i], i < size ? 0 : 0xee);
    }
}

/* No struct has become smaller, and none is so small that a pointer's size could be valid. */
static void check_table(void)
{
    for (int i = 0; i < NUM_SIZED; i++) {
        const sized_type *t = &sized_types[i];
        CHECK_SAY(t->first <= t->bytes && t->first > sizeof(void *), "%s", t->name);
    }
}

/* ------------------------------------------------------------------------- every call ---- */

static epic_config config = {.max_tokens = 4, .max_row_bytes = 64, .num_ranks = 1};
static epic_layer layer = {.num_experts = 4, .top_k = 1};
static epic_router router = {.num_experts = 4, .top_k = 1};
static epic_experts experts = {
    .num_local_experts = 4, .hidden = 8, .inner = 8, .row_type = EPIC_F32};
static epic_moe_weights weights;
static epic_moe_gradients gradients;
_Alignas(64) static unsigned char untouched[8192];

static void check_refused(bool refused, const char *call, const char *name, const char *type,
                          size_t size)
{
    const char *said = epic_error(NULL);
    CHECK_SAY(refused, "%s takes size %zu", call, size);
    CHECK_SAY(strstr(said, name) && strstr(said, type), "%s, size %zu: no %s, %s in: %s", call,
              size, name, type, said);
    CHECK_SAY(!strstr(said, "pointer?") == (size != sizeof(void *)), "%s, size %zu: %s", call,
              size, said);
    for (size_t i = 0; i < sizeof untouched; i++)
        if (!CHECK_SAY(untouched[i] == 0xee, "%s, size %zu: wrote byte %zu", call, size, i))
            return;
}

/* Checks that `call`, which passes `size` for a struct of this type, refuses every invalid
 * size. */
#define REFUSES(type, name, call)                                                   \
    do {                                                                            \
        const size_t wrong[] = {                                                    \
            sizeof(void *), 0,       1, sized_types[SIZED_##type].first - 1, 65537, \
            SIZE_MAX - 7,   SIZE_MAX};                                              \
        for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {                 \
            const size_t size = wrong[i];                                           \
            check_refused(call, #call, name, #type, size);                          \
        }                                                                           \
    } while (0)
#define BAD == EPIC_EINVAL

static void check_open(void)
{
    epic_context *ctx;
    epic_bootstrap bootstrap;
    const epic_tcp tcp = {.num_ranks = 1};
    REFUSES(epic_tcp, "epic_tcp", epic_bootstrap_tcp_v1(&bootstrap, &tcp, size) BAD);
    const size_t wrong[] = {sizeof(void *), sized_types[SIZED_epic_config].first - 1, SIZE_MAX};
    for (int i = 0; i < 3; i++) {
        check_refused(epic_open_v1(&ctx, NULL, &config, wrong[i]) BAD, "epic_open", "config",
                      "epic_config", wrong[i]);
        epic_close(ctx);
    }
}

static void check_queries(epic_context *ctx)
{
    const size_t c = sizeof config, l = sizeof layer;
    void *out = untouched;
    epic_memory_info memory;
    int64_t bytes;
    REFUSES(epic_config, "config", epic_plan_bytes_v1(&config, size, &layer, l, &bytes) BAD);
    REFUSES(epic_layer, "layer", epic_plan_bytes_v1(&config, c, &layer, size, &bytes) BAD);
    REFUSES(epic_config, "config",
            epic_capacity_bound_v1(&config, size, &layer, l, &bytes) BAD);
    REFUSES(epic_layer, "layer", epic_capacity_bound_v1(&config, c, &layer, size, &bytes) BAD);
    REFUSES(epic_config, "config", epic_memory_v1(&config, size, &layer, l, out, 32) BAD);
    REFUSES(epic_layer, "layer",
            epic_memory_v1(&config, c, &layer, size, &memory, sizeof memory) BAD);
    REFUSES(epic_memory_info, "out", epic_memory_v1(&config, c, &layer, l, out, size) BAD);
    REFUSES(epic_failure_info, "out", epic_failure_v1(ctx, out, size) BAD);
    REFUSES(epic_wait_info, "out", epic_waits_v1(ctx, EPIC_OP_NONE, out, 1, size) BAD);
    REFUSES(epic_members_info, "out", epic_members_v1(ctx, out, size) BAD);
    const epic_regroup_args regroup = {0};
    REFUSES(epic_regroup_args, "args",
            epic_regroup_v1(ctx, &regroup, size, out, sizeof(epic_members_info)) BAD);
    REFUSES(epic_members_info, "out",
            epic_regroup_v1(ctx, &regroup, sizeof regroup, out, size) BAD);
    REFUSES(epic_layer, "layer", epic_layer_sizes_v1(ctx, &layer, size, out, 64) BAD);
    REFUSES(epic_layer_info, "out", epic_layer_sizes_v1(ctx, &layer, l, out, size) BAD);
    REFUSES(epic_plan_info, "out", epic_plan_read_v1(untouched, 4096, out, size) BAD);
    REFUSES(epic_router, "router", epic_router_workspace_v1(&router, size, &bytes) BAD);
    REFUSES(epic_experts, "experts",
            epic_experts_memory_v1(NULL, NULL, 0, &experts, size, 4, out, 24) BAD);
    REFUSES(epic_experts_memory_info, "out",
            epic_experts_memory_v1(NULL, NULL, 0, &experts, sizeof experts, 4, out, size) BAD);
}

static void check_steps(epic_context *ctx)
{
    epic_plan_args p = {.layer = &layer};
    const epic_dispatch_args d = {0};
    const epic_combine_args c = {0};
    const epic_dispatch_backward_args db = {0};
    const epic_combine_backward_args cb = {0};
    const epic_allreduce_sum_args s = {0};
    const epic_sum_replicas_args sr = {0};
    REFUSES(epic_plan_args, "args", epic_plan_v1(ctx, &p, size) BAD);
    REFUSES(epic_dispatch_args, "args", epic_dispatch_v1(ctx, &d, size) BAD);
    REFUSES(epic_combine_args, "args", epic_combine_v1(ctx, &c, size) BAD);
    REFUSES(epic_dispatch_backward_args, "args", epic_dispatch_backward_v1(ctx, &db, size) BAD);
    REFUSES(epic_combine_backward_args, "args", epic_combine_backward_v1(ctx, &cb, size) BAD);
    REFUSES(epic_allreduce_sum_args, "args", epic_allreduce_sum_v1(ctx, &s, size) BAD);
    REFUSES(epic_sum_replicas_args, "args", epic_sum_replicas_v1(ctx, &sr, size) BAD);
}

/* The second struct of a call is checked only if the first one is valid. */
static void check_pair(epic_context *ctx)
{
    _Alignas(64) static unsigned char plan[65536];
    const int32_t ids[1] = {0};
    const epic_plan_args p = {.layer = &layer,
                              .plan = plan,
                              .plan_bytes = sizeof plan,
                              .topk_idx = ids,
                              .num_tokens = 1,
                              .capacity = 4};
    const epic_dispatch_args d = {0};
    REFUSES(epic_plan_args, "args", epic_plan_dispatch_v1(ctx, &p, size, &d, sizeof d) BAD);
    REFUSES(epic_dispatch_args, "dispatch",
            epic_plan_dispatch_v1(ctx, &p, sizeof p, &d, size) BAD);
}

static void check_simple(epic_context *ctx)
{
    epic_dispatcher *step;
    void *out = untouched;
    const epic_dispatcher_config how = {.max_tokens = 1,
                                        .num_experts = layer.num_experts,
                                        .top_k = layer.top_k,
                                        .hidden = 1,
                                        .type = EPIC_F32,
                                        .ctx = ctx};
    REFUSES(epic_dispatcher_config, "config", epic_dispatcher_open_v1(&step, &how, size) BAD);
    if (!CHECK(epic_dispatcher_open(&step, &how) == EPIC_OK)) return;
    REFUSES(epic_slots, "out",
            epic_dispatcher_dispatch_v1(step, NULL, NULL, NULL, 0, out, size) BAD);
    epic_dispatcher_close(step);
}

static void check_local(void)
{
    epic_router_args r = {.router = &router};
    epic_router_backward_args rb = {.router = &router};
    const epic_balance_loss_args balance = {.router = &router};
    const epic_balance_loss_backward_args balance_backward = {.router = &router};
    const epic_z_loss_args z = {.router = &router};
    const epic_z_loss_backward_args z_backward = {.router = &router};
    const epic_bias_update_args bias = {.num_experts = 1};
    epic_experts_args e = {.experts = &experts};
    epic_experts_backward_args eb = {.experts = &experts};
    REFUSES(epic_router_args, "args", epic_router_forward_v1(NULL, &r, size) BAD);
    REFUSES(epic_router_backward_args, "args", epic_router_backward_v1(NULL, &rb, size) BAD);
    REFUSES(epic_balance_loss_args, "args",
            epic_balance_loss_forward_v1(NULL, &balance, size) BAD);
    REFUSES(epic_balance_loss_backward_args, "args",
            epic_balance_loss_backward_v1(NULL, &balance_backward, size) BAD);
    REFUSES(epic_z_loss_args, "args", epic_z_loss_forward_v1(NULL, &z, size) BAD);
    REFUSES(epic_z_loss_backward_args, "args",
            epic_z_loss_backward_v1(NULL, &z_backward, size) BAD);
    REFUSES(epic_bias_update_args, "args", epic_bias_update_v1(NULL, &bias, size) BAD);
    REFUSES(epic_experts_args, "args", epic_experts_forward_v1(NULL, &e, size) BAD);
    REFUSES(epic_experts_backward_args, "args", epic_experts_backward_v1(NULL, &eb, size) BAD);
}

static void check_moe(epic_context *ctx)
{
    const epic_moe right = {.layer = &layer,
                            .router = &router,
                            .experts = &experts,
                            .shared = &experts,
                            .capacity = 4};
    epic_moe moe = right;
    const size_t c = sizeof config, m = sizeof moe;
    void *out = untouched;
    REFUSES(epic_moe, "moe", epic_moe_memory_v1(NULL, &config, c, &moe, size, out, 24) BAD);
    REFUSES(epic_moe_memory_info, "out",
            epic_moe_memory_v1(NULL, &config, c, &moe, m, out, size) BAD);

    int64_t slots = 0;
    epic_moe_args a = {.moe = &moe, .weights = &weights};
    epic_moe_backward_args b = {.moe = &moe, .weights = &weights};
    REFUSES(epic_moe_args, "args", epic_moe_forward_v1(ctx, &a, size) BAD);
    REFUSES(epic_moe_args, "args", epic_moe_plan_v1(ctx, &a, size, &slots) BAD);
    REFUSES(epic_moe_backward_args, "args", epic_moe_backward_v1(ctx, &b, size) BAD);
    b.gradients = &gradients;
}

int main(void)
{
    check_begin();
    memset(untouched, 0xee, sizeof untouched);
    check_rule();
    check_answer();
    check_table();
    check_open();
    epic_context *ctx = NULL;
    CHECK(epic_open(&ctx, NULL, &config) == EPIC_OK);
    check_queries(ctx);
    check_steps(ctx);
    check_pair(ctx);
    check_simple(ctx);
    check_local();
    check_moe(ctx);
    epic_close(ctx);
    return check_end();
}
