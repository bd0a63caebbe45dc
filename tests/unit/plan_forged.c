/* SPDX-License-Identifier: Apache-2.0 */
/* Tests damaged plans with correct checksums, so that only the range checks protect memory.
 * Buffers are exactly as large as the valid plan needs, so that a sanitizer detects every
 * access outside of them. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "check.h"
#include "context/context.h"
#include "plan/plan.h"
#include "run.h"

#define TOKENS 12
#define ELEMENTS 33

static void check_result(epic_result result, epic_result right)
{
    CHECK_SAY(result == right, "%s, not %s: %s", epic_result_name(result),
              epic_result_name(right), epic_error(NULL));
}

typedef struct forged {
    epic_context *ctx;
    epic_layer layer;
    unsigned char *plan; /* memory of exactly the plan's size */
    size_t bytes;
    int64_t num_slots;
} forged;

static void seal(forged *f)
{
    plan_header *h = (plan_header *)f->plan;
    h->body_sum = hash_bytes(f->plan + h->tokens_of, (size_t)(h->bytes - h->tokens_of));
    h->header_sum = 0;
    h->header_sum = hash_bytes(h, sizeof *h);
}

static bool is_good(const forged *f)
{
    plan_view view;
    return plan_check(&view, f->plan, f->bytes, 0, 0, 0) == PLAN_OK;
}

static void make_plan(forged *f, run_random *random)
{
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = 512, .num_ranks = 1};
    const uint32_t logical = f->layer.num_logical;
    int32_t ids[TOKENS * MAX_TOP_K], logical_of[16];
    for (uint32_t i = 0; i < TOKENS * f->layer.top_k; i++)
        ids[i] = (int32_t)run_between(random, -1, (int64_t)layer_num_ids(&f->layer) - 1);
    for (uint32_t e = 0; logical && e < f->layer.num_experts; e++)
        logical_of[e] = (int32_t)(e % logical);
    int64_t room;
    CHECK(epic_plan_bytes(&config, &f->layer, &room) == EPIC_OK);
    unsigned char *plan = malloc((size_t)room);
    const epic_plan_args args = {.layer = &f->layer,
                                 .plan = plan,
                                 .plan_bytes = room,
                                 .topk_idx = ids,
                                 .num_tokens = TOKENS,
                                 .logical_of_expert = logical ? logical_of : NULL};
    check_result(epic_plan(f->ctx, &args), EPIC_OK);
    const plan_header *h = (const plan_header *)plan;
    f->bytes = (size_t)h->bytes;
    f->num_slots = h->num_slots;
    f->plan = malloc(f->bytes);
    memcpy(f->plan, plan, f->bytes);
    free(plan);
}

/* Runs every operation that reads a plan, with any result. */
static void use_plan(const forged *f)
{
    const int64_t wide = ELEMENTS * 4, slots = f->num_slots;
    const bool flat = f->layer.layout == EPIC_FLAT;
    const size_t weights = (size_t)(flat ? slots * f->layer.top_k : slots);
    epic_rows home = {calloc(TOKENS, (size_t)wide), TOKENS, wide};
    epic_rows away = {calloc((size_t)slots + 1, (size_t)wide), slots, wide};
    epic_rows more = {calloc((size_t)slots + 1, (size_t)wide), slots, wide};
    float *by_choice = calloc(TOKENS * f->layer.top_k, sizeof(float));
    float *by_slot = calloc(weights + 1, sizeof(float));
    float *by_slot_too = calloc(weights + 1, sizeof(float));
    const epic_dispatch_args dispatch = {.layer = &f->layer,
                                         .plan = f->plan,
                                         .plan_bytes = f->bytes,
                                         .tokens = epic_rows_as_const(home),
                                         .recv = away,
                                         .weights = by_choice,
                                         .slot_weights = by_slot,
                                         .flags = EPIC_ZERO_TAIL};
    const epic_combine_args combine = {.layer = &f->layer,
                                       .plan = f->plan,
                                       .plan_bytes = f->bytes,
                                       .rows = epic_rows_as_const(away),
                                       .out = home,
                                       .slot_weights = flat ? NULL : by_slot,
                                       .type = EPIC_F32};
    const epic_dispatch_backward_args back = {.layer = &f->layer,
                                              .plan = f->plan,
                                              .plan_bytes = f->bytes,
                                              .d_recv = epic_rows_as_const(away),
                                              .d_tokens = home,
                                              .d_slot_weights = by_slot,
                                              .d_weights = by_choice,
                                              .type = EPIC_F32};
    epic_combine_backward_args apart = {.layer = &f->layer,
                                        .plan = f->plan,
                                        .plan_bytes = f->bytes,
                                        .d_out = epic_rows_as_const(home),
                                        .d_rows = away,
                                        .type = EPIC_F32,
                                        .flags = EPIC_ZERO_TAIL};
    if (!flat) {
        apart.rows = epic_rows_as_const(more);
        apart.slot_weights = by_slot;
        apart.d_slot_weights = by_slot_too;
    }
    epic_rows by_expert = {calloc(f->layer.num_experts, (size_t)wide), f->layer.num_experts,
                           wide};
    const epic_sum_replicas_args sum = {.plan = f->plan,
                                        .plan_bytes = f->bytes,
                                        .data = by_expert,
                                        .workspace = calloc(1, (size_t)wide)};
    epic_sum_replicas(f->ctx, &sum);
    epic_dispatch(f->ctx, &dispatch);
    epic_combine(f->ctx, &combine);
    epic_dispatch_backward(f->ctx, &back);
    epic_combine_backward(f->ctx, &apart);
    check_result(epic_check(f->ctx), EPIC_OK);
    free(home.data), free(away.data), free(more.data);
    free(by_choice), free(by_slot), free(by_slot_too);
    free(by_expert.data), free(sum.workspace);
}

static int32_t forged_value(run_random *random)
{
    static const int32_t values[] = {0, 1, -1, 2, -4, 7, 64, -1000000, INT32_MIN, INT32_MAX};
    return run_chance(random, 50) ? values[run_below(random, 10)]
                                  : (int32_t)run_between(random, -3, 40);
}

/* Changes offsets in the header, which begin and end every array. top_k and layout stay,
 * because the caller's arrays fit them. */
static void forge(forged *f, run_random *random)
{
    plan_header *h = (plan_header *)f->plan;
    const int64_t arrays[][2] = {
        {h->tokens_of, h->num_ranks},
        {h->base_of, h->num_ranks + 1},
        {h->expert_of, h->num_local},
        {h->logical_of, h->layer.num_logical ? h->layer.num_experts : 0},
        {h->slab_begin, h->num_local + 1},
        {h->slab_count, h->num_local},
        {h->position_of, h->num_ranks},
        {h->fate, h->num_tokens * h->layer.top_k},
        {h->slot_or_expert, h->total_tokens * h->layer.top_k}};
    for (int64_t n = run_between(random, 1, 3); n > 0; n--) {
        const int64_t *array = arrays[run_below(random, 9)];
        if (!array[1]) continue;
        int32_t *at = (int32_t *)(f->plan + array[0]);
        at[run_below(random, array[1])] = forged_value(random);
    }
    if (run_chance(random, 10)) h->num_slots = forged_value(random);
    if (run_chance(random, 5)) h->num_local = forged_value(random);
    if (run_chance(random, 5)) h->num_tokens = forged_value(random);
    if (h->bytes == (int64_t)f->bytes) seal(f);
}

static void random_damage(epic_context *ctx)
{
    long used = 0;
    const int count = (int)run_scaled(6000);
    for (int i = 0; i < count; i++) {
        run_random random = {check_seed = run_mix(run_seed(), (uint64_t)i)};
        const bool tree = run_chance(&random, 50);
        const uint32_t experts = 1u << run_below(&random, 5);
        forged f = {.ctx = ctx,
                    .layer = {.num_experts = experts,
                              .num_logical = (uint32_t)run_below(&random, experts + 1),
                              .top_k = (uint32_t)run_between(&random, 1, 5),
                              .alignment = run_chance(&random, 50) ? 4 : 1,
                              .layout = (uint32_t)run_below(&random, 2),
                              .sum_order = tree ? EPIC_TREE : EPIC_BY_RANK,
                              .leaves = tree ? experts : 0}};
        make_plan(&f, &random);
        forge(&f, &random);
        used += is_good(&f);
        use_plan(&f);
        free(f.plan);
    }
    CHECK_SAY(used > count / 20, "only %ld of %d forged plans passed the checks", used, count);
}

/* Sets slab_begin so that its differences wrap around an int32 to the expected values. */
static void slabs_that_wrap(epic_context *ctx)
{
    run_random random = {check_seed = 1};
    forged f = {.ctx = ctx, .layer = {.num_experts = 8, .top_k = 2}};
    make_plan(&f, &random);
    CHECK(is_good(&f));
    const plan_header *h = (const plan_header *)f.plan;
    int32_t *slab_begin = (int32_t *)(f.plan + h->slab_begin);
    slab_begin[1] = INT32_MAX;
    slab_begin[2] = -1000000;
    seal(&f);
    CHECK(!is_good(&f));
    use_plan(&f);
    free(f.plan);
}

/* A plan with a larger top_k than max_top_k of the context, from another context. */
static void too_many_choices(epic_context *other)
{
    run_random random = {check_seed = 2};
    forged f = {.ctx = other, .layer = {.num_experts = 8, .top_k = 5}};
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = 512, .max_top_k = 4};
    make_plan(&f, &random);
    check_result(epic_open(&f.ctx, NULL, &config), EPIC_OK);
    ((plan_header *)f.plan)->group_id = f.ctx->group_id;
    seal(&f);
    CHECK(is_good(&f));
    use_plan(&f);
    static unsigned char tokens[TOKENS * 16], recv[TOKENS * 5 * 16];
    const epic_dispatch_args args = {.layer = &f.layer,
                                     .plan = f.plan,
                                     .plan_bytes = f.bytes,
                                     .tokens = {tokens, TOKENS, 16},
                                     .recv = {recv, TOKENS * 5, 16}};
    check_result(epic_dispatch(f.ctx, &args), EPIC_EINVAL);
    CHECK_SAY(strstr(epic_error(f.ctx), "an entry is out of range"), "%s", epic_error(f.ctx));
    epic_close(f.ctx);
    free(f.plan);
}

/* max_top_k limits the memory of each of the max_in_flight operations. */
static void memory_by_top_k(void)
{
    epic_memory_info info[2];
    for (int i = 0; i < 2; i++) {
        const epic_config config = {.max_tokens = TOKENS,
                                    .max_row_bytes = 512,
                                    .num_ranks = 10,
                                    .max_in_flight = 3,
                                    .max_top_k = i ? 8 : 0,
                                    .backend = "shm"};
        check_result(epic_memory(&config, NULL, &info[i]), EPIC_OK);
    }
    CHECK_EQ(info[0].host_bytes - info[1].host_bytes, 3 * 10 * (64 - 8) * 8);
}

int main(void)
{
    check_begin();
    epic_context *ctx;
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = 512};
    check_result(epic_open(&ctx, NULL, &config), EPIC_OK);
    slabs_that_wrap(ctx);
    random_damage(ctx);
    too_many_choices(ctx);
    memory_by_top_k();
    epic_close(ctx);
    return check_end();
}
