/* SPDX-License-Identifier: Apache-2.0 */
/* Tests plans whose bytes are damaged in ten thousand ways. All ranks must return the same
 * error or a result. There must be no invalid memory access (AddressSanitizer checks this), no
 * endless wait and no broken group. Then tests damaged plans with correct checksums, which only
 * the range checks can detect. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "check.h"
#include "epic/epic.h"
#include "plan/plan.h"
#include "run.h"
#include "step.h"

#define HIDDEN 24
#define NUM_OPERATIONS 4
#define DAMAGES 4500 /* number of damaged plans on one rank, and on two */
#define RESEALED 1500

static const uint32_t operations[NUM_OPERATIONS] = {
    EPIC_OP_DISPATCH, EPIC_OP_COMBINE, EPIC_OP_COMBINE_BACKWARD, EPIC_OP_DISPATCH_BACKWARD};

/* Memory that the ranks of a test share. */
typedef struct arena {
    pthread_barrier_t barrier;
    epic_result results[RUN_MAX_RANKS];
    char said[RUN_MAX_RANKS][512];
    int num_errors, num_good;
} arena;

/* The used part of the plan, and valid plans that do not fit the call. */
typedef struct damaged {
    step s;
    unsigned char *good, *other_layer, *other_group;
    size_t bytes; /* size of the plan buffer */
    int64_t used; /* bytes of the buffer that the plan uses */
    /* deadline of the groups that use a damaged plan; 0: that of the test group */
    uint32_t timeout_ms;
    /* random numbers of this rank, and those that are equal on all ranks */
    run_random random, common;
} damaged;

/* --------------------------------------------------------------------------- damaging ---- */

static void flip_bits(damaged *d, unsigned char *plan)
{
    const int64_t count = run_between(&d->random, 1, 3);
    for (int64_t i = 0; i < count; i++)
        plan[run_below(&d->random, d->used)] ^= (unsigned char)(1 << run_below(&d->random, 8));
}

static void random_words(damaged *d, unsigned char *plan)
{
    static const int64_t likely[] = {0, -1, 1, 255, INT32_MAX, INT32_MIN, INT64_MAX, 1 << 20};
    const bool in_header = run_chance(&d->random, 50);
    const int64_t limit = in_header ? (int64_t)sizeof(plan_header) : d->used;
    const int64_t count = run_between(&d->random, 1, 4);
    for (int64_t i = 0; i < count; i++) {
        const int64_t size = run_chance(&d->random, 50) ? 4 : 8;
        const int64_t value = run_chance(&d->random, 60) ? likely[run_below(&d->random, 8)]
                                                         : (int64_t)run_next(&d->random);
        memcpy(plan + run_below(&d->random, limit / size) * size, &value, (size_t)size);
    }
}

static void garble(damaged *d, unsigned char *plan)
{
    const int64_t begin = run_below(&d->random, d->used);
    const int64_t end = run_between(&d->random, begin, d->used);
    for (int64_t i = begin; i < end; i++) plan[i] = (unsigned char)run_next(&d->random);
}

/* Damages the plan. Returns the size in bytes to pass to the call. */
static size_t damage(damaged *d, unsigned char *plan)
{
    memcpy(plan, d->good, d->bytes);
    switch (run_below(&d->random, 8)) {
    case 0:
        return (size_t)run_below(&d->random, d->used); /* a plan that is cut short */
    case 1:
        memset(plan, run_chance(&d->random, 50) ? 0 : 0xff, d->bytes);
        return d->bytes;
    case 2:
        garble(d, plan);
        return d->bytes;
    case 3:
        memcpy(plan, run_chance(&d->random, 50) ? d->other_layer : d->other_group, d->bytes);
        return d->bytes;
    case 4:
    case 5:
        random_words(d, plan);
        return d->bytes;
    default:
        flip_bits(d, plan);
        return d->bytes;
    }
}

/* Makes the checksums of a damaged plan correct again. */
static void reseal(unsigned char *plan, size_t bytes)
{
    plan_header *h = (plan_header *)(void *)plan;
    if (h->tokens_of >= 0 && h->bytes > h->tokens_of && (uint64_t)h->bytes <= bytes)
        h->body_sum = hash_bytes(plan + h->tokens_of, (size_t)(h->bytes - h->tokens_of));
    h->header_sum = 0;
    h->header_sum = hash_bytes(h, sizeof *h);
}

/* ---------------------------------------------------------------------------- using it ---- */

/* Copies the plan into memory that ends where the plan ends, so that a sanitizer detects reads
 * past its end. */
static epic_result use(damaged *d, uint32_t operation, const unsigned char *plan, size_t bytes)
{
    unsigned char *copy = aligned_alloc(16, (bytes + 15) / 16 * 16 + 16);
    memcpy(copy, plan, bytes);
    unsigned char *const kept = d->s.plan;
    const size_t kept_bytes = d->s.plan_bytes;
    const epic_call call = {.tag = 3, .timeout_ms = d->timeout_ms};
    epic_plan_info info;
    d->s.plan = copy;
    d->s.plan_bytes = bytes;
    if (epic_plan_read(copy, bytes, &info) == EPIC_OK) {
        const int32_t *fate = (const int32_t *)(const void *)(copy + info.fate_offset);
        volatile int32_t seen = 0;
        for (int64_t i = 0; i < info.num_tokens * STEP_TOP_K; i++) seen += fate[i] & 1;
        (void)seen;
    }
    const epic_result result = step_call(&d->s, operation, &call, STEP_SAME);
    d->s.plan = kept;
    d->s.plan_bytes = kept_bytes;
    free(copy);
    return result;
}

/* Returns whether the bytes are a valid plan of another layer or group. If only one rank has
 * such a plan, the ranks have different plans, which breaks the group. Or a row has another
 * shape, which the host detects. Neither is damage. */
static bool is_good_plan(const unsigned char *plan, size_t bytes)
{
    epic_plan_info info;
    return epic_plan_read(plan, bytes, &info) == EPIC_OK;
}

static void damaged_open(damaged *d, epic_context *ctx, epic_context *other, uint64_t seed)
{
    step_open(&d->s, ctx, 7 + epic_rank(ctx), HIDDEN);
    d->random.state = seed;
    d->bytes = d->s.plan_bytes;
    d->good = aligned_alloc(64, (d->bytes + 63) / 64 * 64);
    d->other_layer = calloc(1, d->bytes);
    d->other_group = calloc(1, d->bytes);
    CHECK(step_all(&d->s, 1));
    memcpy(d->good, d->s.plan, d->bytes);
    d->used = ((const plan_header *)(const void *)d->good)->bytes;
    step s;
    step_open(&s, other, 7 + epic_rank(ctx), HIDDEN);
    CHECK(step_all(&s, 1));
    memcpy(d->other_group, s.plan, d->bytes);
    step_close(&s);
    /* a plan of another group, which is damaged below */
    memcpy(d->other_layer, d->other_group, d->bytes);
    ((plan_header *)(void *)d->other_layer)->layer.top_k = 1;
}

static void damaged_close(damaged *d)
{
    step_close(&d->s);
    free(d->good);
    free(d->other_layer);
    free(d->other_group);
}

/* ------------------------------------------------------------------- one and two ranks ---- */

static bool is_class_b(epic_result result)
{
    return result == EPIC_OK || result == EPIC_EINVAL || result == EPIC_EOVERFLOW;
}

/* The victim passes a damaged plan, the other ranks the correct one. All must get the same
 * result. */
static void check_damage(damaged *d, arena *a, int victim, uint32_t operation)
{
    unsigned char *plan = calloc(1, d->bytes);
    size_t bytes = d->bytes;
    memcpy(plan, d->good, d->bytes);
    if (d->s.rank == victim) {
        do bytes = damage(d, plan);
        while (bytes > 0 && memcmp(plan, d->good, bytes) && is_good_plan(plan, bytes) &&
               memcmp(plan, d->other_group, bytes));
    }
    const epic_result result = use(d, operation, plan, bytes);
    a->results[d->s.rank] = result;
    snprintf(a->said[d->s.rank], sizeof a->said[0], "%s", result ? epic_error(d->s.ctx) : "");
    CHECK_SAY(is_class_b(result), "%s: %s", epic_result_name(result), epic_error(d->s.ctx));
    pthread_barrier_wait(&a->barrier);
    CHECK_EQ(a->results[d->s.rank], a->results[0]);
    CHECK_SAY(!strcmp(a->said[d->s.rank], a->said[0]),
              "the error of rank 0: %s; of rank %d: %s", a->said[0], d->s.rank,
              a->said[d->s.rank]);
    if (d->s.rank == 0) {
        a->num_errors += result != EPIC_OK;
        a->num_good += result == EPIC_OK;
    }
    pthread_barrier_wait(&a->barrier);
    free(plan);
}

static void run_damages(const epic_bootstrap *bootstrap, void *self)
{
    arena *a = self;
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 10000,
                                .max_in_flight = 2};
    epic_context *ctx, *other;
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    if (!CHECK(epic_open(&other, bootstrap, &config) == EPIC_OK)) return;
    damaged d;
    damaged_open(&d, ctx, other, run_mix(run_seed(), (uint64_t)bootstrap->rank));
    run_random common = {run_mix(run_seed(), 50)};
    for (int i = 0; i < DAMAGES && epic_check(ctx) == EPIC_OK; i++) {
        check_seed = (uint64_t)i;
        const int victim = (int)run_below(&common, bootstrap->num_ranks);
        check_damage(&d, a, victim, operations[run_below(&common, NUM_OPERATIONS)]);
        if (i % 500 == 0) CHECK(step_all(&d.s, 1) && memcpy(d.s.plan, d.good, d.bytes));
    }
    CHECK(epic_check(ctx) == EPIC_OK);
    CHECK(step_works(ctx, 9));
    damaged_close(&d);
    epic_close(other);
    epic_close(ctx);
}

/* ---------------------------------------------------------------- checksums put right ---- */

/* Makes a valid plan of one of several kinds of layers. */
static bool plan_kind(damaged *d, int kind)
{
    const epic_call call = {.tag = 2};
    d->s.layer.layout = kind == 2 ? EPIC_FLAT : EPIC_EXPERT_MAJOR;
    d->s.layer.sum_order = kind == 1 ? EPIC_TREE : EPIC_BY_RANK;
    d->s.layer.leaves = kind == 1 ? 8 : 0;
    if (!CHECK(step_call(&d->s, EPIC_OP_PLAN, &call, STEP_SAME) == EPIC_OK)) return false;
    memcpy(d->good, d->s.plan, d->bytes);
    d->used = ((const plan_header *)(const void *)d->good)->bytes;
    return true;
}

static void change_arrays(damaged *d, unsigned char *plan)
{
    const int64_t begin = ((const plan_header *)(const void *)plan)->tokens_of;
    const int64_t count = run_between(&d->random, 1, 4);
    for (int64_t i = 0; i < count; i++) {
        const int32_t value = (int32_t)run_between(&d->random, -3, 20);
        const int64_t at = begin + run_below(&d->random, (d->used - begin) / 4) * 4;
        memcpy(plan + (run_chance(&d->random, 30) ? begin + at % 700 / 4 * 4 : at), &value, 4);
    }
    const plan_header *h = (const plan_header *)(const void *)plan;
    const int32_t place = (int32_t)run_below(&d->random, h->num_ranks);
    if (run_chance(&d->random, 25)) /* two ranks with the same position in the tree */
        memcpy(plan + h->position_of + 4 * run_below(&d->random, h->num_ranks), &place, 4);
}

static epic_result use_resealed(damaged *d, bool spoiled)
{
    unsigned char *plan = calloc(1, d->bytes + 1024);
    memcpy(plan, d->good, d->bytes);
    const int64_t how = run_below(&d->random, 3);
    if (spoiled && how == 0) random_words(d, plan);
    if (spoiled && how == 1) flip_bits(d, plan);
    if (spoiled && how == 2) change_arrays(d, plan);
    reseal(plan, d->bytes);
    const epic_result result =
        use(d, operations[run_below(&d->common, NUM_OPERATIONS)], plan, d->bytes);
    free(plan);
    return result;
}

/* Runs operations with damaged plans whose checksums are correct. Rows may be wrong. On one
 * rank no call may wait. */
static void run_resealed(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 10000,
                                .max_in_flight = 2};
    epic_context *ctx;
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    damaged d;
    damaged_open(&d, ctx, ctx, run_mix(run_seed(), 60));
    int good = 0;
    for (int i = 0; i < RESEALED && epic_check(ctx) == EPIC_OK; i++) {
        check_seed = (uint64_t)i;
        if (i % 50 == 0 && !plan_kind(&d, i / 50 % 3)) break;
        const epic_result result = use_resealed(&d, true);
        CHECK_SAY(is_class_b(result), "%s", epic_error(ctx));
        good += result == EPIC_OK;
    }
    printf("%d resealed plans: %d could be used\n", RESEALED, good);
    CHECK(step_works(ctx, 9));
    damaged_close(&d);
    epic_close(ctx);
}

/* Does the same on two ranks. There a call may wait until the deadline. Then the test opens
 * another group. */
static void run_resealed_group(const epic_bootstrap *bootstrap, void *self)
{
    const int number = *(const int *)self;
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = 10000,
                                .max_in_flight = 2};
    epic_context *ctx;
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    damaged d;
    damaged_open(&d, ctx, ctx,
                 run_mix(run_seed(), (uint64_t)(70 + 2 * number + bootstrap->rank)));
    d.common.state = run_mix(run_seed(), (uint64_t)(1000 + number));
    d.timeout_ms = 150;
    if (plan_kind(&d, number % 3))
        for (int i = 0; i < 40 && epic_check(ctx) == EPIC_OK; i++) {
            check_seed = (uint64_t)(number * 100 + i);
            use_resealed(&d, bootstrap->rank == i % 2);
        }
    damaged_close(&d);
    epic_close(ctx);
}

int main(void)
{
    check_begin();
    run_alarm(220);
    for (int ranks = 1; ranks <= 2; ranks++) {
        arena a = {.num_errors = 0};
        pthread_barrier_init(&a.barrier, NULL, (unsigned)ranks);
        run_threads(ranks, run_damages, &a);
        pthread_barrier_destroy(&a.barrier);
        printf("%d ranks: %d damaged plans refused, %d used\n", ranks, a.num_errors,
               a.num_good);
    }
    run_threads(1, run_resealed, NULL);
    for (int number = 0; number < 60; number++) run_threads(2, run_resealed_group, &number);
    return check_end();
}
