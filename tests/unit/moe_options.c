/* SPDX-License-Identifier: Apache-2.0 */
/* Tests ranks whose layers have different options. The first call of a pass returns an error
 * on both ranks that names the option and its two values. Options that may differ cause no
 * error. */
#include <pthread.h>

#include "moe/moe.h"
#include "unit/moe_layer.h"

#define RANKS 2
#define TOKENS 4

typedef void change(problem *p);

/* The call that must report the difference. */
typedef enum when { FORWARD, PLAN, PLANNED, BACKWARD, PLAIN_PLAN, PLAIN_PLAN_DISPATCH } when;
static const char *const when_names[] = {"forward",  "plan",      "planned forward",
                                         "backward", "epic_plan", "epic_plan_dispatch"};

typedef struct differing {
    problem p[RANKS]; /* the layer as each rank describes it */
    when when;
    epic_result result[RANKS];
    char said[RANKS][512];
} differing;

/* ---------------------------------------------------------------------- the two layers ---- */

static void usual(problem *p)
{
    *p = (problem){.num_ranks = RANKS, .biased = true, .gate_biased = true, .has_shared = true};
    for (int r = 0; r < RANKS; r++) p->tokens_of[r] = TOKENS;
    p->layer = (epic_layer){.num_experts = 4, .top_k = 2, .sum_order = EPIC_TREE, .leaves = 2};
    p->router = (epic_router){.num_experts = 4,
                              .top_k = 2,
                              .normalize = EPIC_NORMALIZE_SUM,
                              .eps = 1e-20,
                              .scale = 2};
    p->experts =
        (epic_experts){.row_type = EPIC_F32, .num_local_experts = 2, .hidden = 4, .inner = 4};
    p->shared = p->experts;
    p->shared.num_local_experts = 1;
    p->moe = (epic_moe){.balance_coeff = 0.01, .z_coeff = 0.001, .capacity = 16};
}

static void prepare(problem *p, change *how)
{
    source s = source_of(5);
    usual(p);
    if (how) how(p);
    make_given(p, &s);
    make_results(p);
}

/* ------------------------------------------------------------------------- the calls ---- */

static epic_result plain_plan(const part *t, epic_context *ctx, bool dispatches)
{
    int64_t bytes;
    CHECK(epic_plan_bytes(&t->config, t->moe.layer, &bytes) == EPIC_OK, "%s", epic_error(NULL));
    void *plan = poisoned_lines(bytes), *recv = poisoned((size_t)(16 * 16));
    int32_t ids[TOKENS * 2] = {0, 1, 2, 3, 1, 2, 3, 0}, counts[4], more[4];
    const epic_plan_args args = {.layer = t->moe.layer,
                                 .plan = plan,
                                 .plan_bytes = bytes,
                                 .topk_idx = ids,
                                 .num_tokens = TOKENS,
                                 .capacity = 16,
                                 .expert_rows = counts,
                                 .expert_tokens = more,
                                 .moe = &t->moe};
    const epic_dispatch_args dispatch = {.tokens = {t->given[X], TOKENS, 16},
                                         .recv = {recv, 16, 16}};
    const epic_result result =
        dispatches ? epic_plan_dispatch(ctx, &args, &dispatch) : epic_plan(ctx, &args);
    free(plan);
    free(recv);
    return result;
}

/* Runs the passes. The first has equal options if a later call is to report the difference. */
static void work(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    differing *d = what;
    part *equal = part_make(&d->p[0], rank, config, 1);
    part *own = part_make(&d->p[rank], rank, config, 1);
    epic_result result = EPIC_OK;
    if (d->when == FORWARD) result = part_forward(own, ctx);
    if (d->when == PLAN) result = part_plan(own, ctx);
    if (d->when == PLANNED) {
        CHECK(part_plan(equal, ctx) == EPIC_OK, "%s", epic_error(ctx));
        equal->moe.router = own->moe.router;
        equal->moe.balance_coeff = own->moe.balance_coeff;
        result = epic_moe_forward(ctx, &equal->forward);
    }
    if (d->when == BACKWARD) {
        CHECK(part_forward(equal, ctx) == EPIC_OK, "%s", epic_error(ctx));
        equal->moe.router = own->moe.router;
        equal->moe.balance_coeff = own->moe.balance_coeff;
        result = part_backward(equal, ctx);
    }
    if (d->when == PLAIN_PLAN) result = plain_plan(own, ctx, false);
    if (d->when == PLAIN_PLAN_DISPATCH) result = plain_plan(own, ctx, true);
    d->result[rank] = result;
    snprintf(d->said[rank], sizeof d->said[rank], "%s", result ? epic_error(ctx) : "");
    if (result == EPIC_OK && d->when == FORWARD)
        CHECK(part_backward(own, ctx) == EPIC_OK, "%s", epic_error(ctx));
    part_free(equal);
    part_free(own);
}

/* If words is NULL, all calls must succeed. */
static void test(change *how, when at, const char *words)
{
    static differing d;
    memset(&d, 0, sizeof d);
    prepare(&d.p[0], NULL);
    prepare(&d.p[1], how);
    d.when = at;
    const epic_config config = config_of(&d.p[0]);
    team_threads(work, &d, &config);
    for (int r = 0; r < RANKS; r++)
        CHECK(words ? d.result[r] == EPIC_EMISMATCH && strstr(d.said[r], words) != NULL
                    : d.result[r] == EPIC_OK,
              "%s, rank %d: %s, \"%s\" has no \"%s\"", when_names[at], r,
              epic_result_name(d.result[r]), d.said[r], words ? words : "");
    for (int r = 0; r < RANKS; r++) {
        free_results(&d.p[r]);
        free_given(&d.p[r]);
    }
}

/* ----------------------------------------------------------------- what rank 1 changes ---- */

#define CHANGE(name, ...)        \
    static void name(problem *p) \
    {                            \
        __VA_ARGS__;             \
    }
CHANGE(score, p->router.score = EPIC_SCORE_SIGMOID)
CHANGE(groups, p->router.num_groups = 2; p->router.topk_groups = 1)
CHANGE(rule, p->router.weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN)
CHANGE(normalize, p->router.normalize = EPIC_NORMALIZE_NONE)
CHANGE(eps, p->router.eps = 1e-6)
CHANGE(scale, p->router.scale = 2.0000000000000004)
CHANGE(inner, p->experts.inner = 8)
CHANGE(activation, p->experts.activation = EPIC_GELU_TANH)
CHANGE(ungated, p->experts.ungated = 1)
CHANGE(interleaved, p->experts.interleaved = 1)
CHANGE(weighting, p->experts.weighting = EPIC_WEIGHT_INPUT)
CHANGE(weights, p->experts.weight_type = EPIC_BF16)
CHANGE(no_shared, p->has_shared = false)
CHANGE(shared_inner, p->shared.inner = 12)
CHANGE(shared_activation, p->shared.activation = EPIC_RELU2; p->shared.ungated = 0)
CHANGE(shared_gate, p->shared_gated = true)
CHANGE(balance, p->moe.balance_coeff = 0.02)
CHANGE(z, p->moe.z_coeff = 0)
CHANGE(sequence, p->moe.sequence_tokens = 2)
CHANGE(sum_dense, p->moe.flags = EPIC_SUM_DENSE)
CHANGE(again, p->moe.flags = EPIC_DISPATCH_AGAIN)
CHANGE(by_caller, p->moe.flags = EPIC_LOSS_BY_CALLER)
CHANGE(invariant, p->moe.flags = EPIC_INVARIANT)
CHANGE(no_gate_bias, p->gate_biased = false)
CHANGE(no_bias, p->biased = false)
CHANGE(choice_bias, p->bias_given = true)
CHANGE(expert_scale, p->scaled = true)

static const struct {
    change *how;
    const char *words;
} differences[] = {
    {score, "router.score is softmax on rank 0 and sigmoid on rank 1"},
    {groups, "router.num_groups is 0 on rank 0 and 2 on rank 1"},
    {rule, "router.weight_rule is of_score on rank 0 and softmax_chosen on rank 1"},
    {normalize, "router.normalize is sum on rank 0 and none on rank 1"},
    {eps, "router.eps is 9.9999999999999995e-21 on rank 0 and 9.9999999999999995e-07 on"},
    {scale, "router.scale is 2 on rank 0 and 2.0000000000000004 on rank 1"},
    {inner, "experts.inner is 4 on rank 0 and 8 on rank 1"},
    {activation, "experts.activation is silu on rank 0 and gelu_tanh on rank 1"},
    {ungated, "experts.ungated is 0 on rank 0 and 1 on rank 1"},
    {interleaved, "experts.interleaved is 0 on rank 0 and 1 on rank 1"},
    {weighting, "experts.weighting is late on rank 0 and input on rank 1"},
    {weights, "experts.weight_type is float32 on rank 0 and bfloat16 on rank 1"},
    {no_shared, "shared is 1 on rank 0 and 0 on rank 1"},
    {shared_inner, "shared.inner is 4 on rank 0 and 12 on rank 1"},
    {shared_activation, "shared.activation is silu on rank 0 and relu2 on rank 1"},
    {balance, "balance_coeff is 0.01 on rank 0 and 0.02 on rank 1"},
    {z, "z_coeff is 0.001 on rank 0 and 0 on rank 1"},
    {sequence, "sequence_tokens is 0 on rank 0 and 2 on rank 1"},
    {sum_dense, "EPIC_SUM_DENSE is 0 on rank 0 and 1 on rank 1"},
    {again, "EPIC_DISPATCH_AGAIN is 0 on rank 0 and 1 on rank 1"},
    {by_caller, "EPIC_LOSS_BY_CALLER is 0 on rank 0 and 1 on rank 1"},
    {invariant, "invariant is 0 on rank 0 and 1 on rank 1"}};

/* These weights exist only for calls of the whole layer. */
static const struct {
    change *how;
    const char *words;
} of_weights[] = {{no_gate_bias, "b_gate is given on rank 0 and not given on rank 1"},
                  {no_bias, "b_gate_up is given on rank 0 and not given on rank 1"},
                  {choice_bias, "bias is not given on rank 0 and given on rank 1"},
                  {expert_scale, "scale_of_expert is not given on rank 0 and given on rank 1"},
                  {shared_gate, "w_shared_gate is not given on rank 0 and given on rank 1"}};

/* Options that may differ between ranks, and different descriptions of the same layer. */
CHANGE(other_capacity, p->moe.capacity = 32)
CHANGE(recompute, p->moe.flags = EPIC_RECOMPUTE)
CHANGE(same_type, p->experts.weight_type = EPIC_F32)
CHANGE(other_limit, p->experts.limit = 3) /* SiLU has no limit */
CHANGE(other_tokens, p->tokens_of[1] = TOKENS)
static change *const allowed[] = {other_capacity, recompute, same_type, other_limit,
                                  other_tokens};

/* ---------------------------------------------------------------- EPIC_CHECK_WEIGHTS ---- */

static int damaged_weight; /* the weight of rank 1 to change; NUM_GIVEN: none */

static void other_numbers(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    differing *d = what;
    part *t = part_make(&d->p[0], rank, config, 1);
    if (rank == 1 && damaged_weight < NUM_GIVEN)
        ((unsigned char *)t->given[damaged_weight])[5] ^= 1;
    d->result[rank] = part_forward(t, ctx);
    snprintf(d->said[rank], sizeof d->said[rank], "%s", d->result[rank] ? epic_error(ctx) : "");
    part_free(t);
}

/* value: that of EPIC_CHECK_WEIGHTS; NULL: unset. */
static void test_weights(int which, const char *value)
{
    const bool checked = value && strcmp(value, "1") == 0;
    static differing d;
    memset(&d, 0, sizeof d);
    usual(&d.p[0]);
    source s = source_of(6);
    d.p[0].shared_gated = d.p[0].scaled = true;
    make_given(&d.p[0], &s);
    make_results(&d.p[0]);
    damaged_weight = which;
    if (value) setenv("EPIC_CHECK_WEIGHTS", value, 1);
    const epic_config config = config_of(&d.p[0]);
    team_threads(other_numbers, &d, &config);
    unsetenv("EPIC_CHECK_WEIGHTS");
    const bool noticed = checked && which < NUM_GIVEN && is_dense(which);
    const char *name = which < NUM_GIVEN ? given_names[which] : "nothing";
    char words[64];
    snprintf(words, sizeof words, ": %s is of checksum ", name);
    for (int r = 0; r < RANKS; r++)
        CHECK(noticed ? d.result[r] == EPIC_EMISMATCH && strstr(d.said[r], words) != NULL
                      : d.result[r] == EPIC_OK,
              "%s, EPIC_CHECK_WEIGHTS %s, rank %d: %s, \"%s\"", name, value ? value : "unset",
              r, epic_result_name(d.result[r]), d.said[r]);
    free_results(&d.p[0]);
    free_given(&d.p[0]);
}

int main(void)
{
    static const when calls[] = {FORWARD, PLAN, PLAIN_PLAN, PLAIN_PLAN_DISPATCH};
    failures = share(sizeof *failures);
    for (size_t i = 0; i < sizeof differences / sizeof *differences; i++)
        for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
            test(differences[i].how, calls[c], differences[i].words);
    for (size_t i = 0; i < sizeof of_weights / sizeof *of_weights; i++) {
        test(of_weights[i].how, FORWARD, of_weights[i].words);
        test(of_weights[i].how, PLAN, of_weights[i].words);
    }
    test(score, BACKWARD, "router.score is softmax on rank 0 and sigmoid on rank 1");
    test(balance, BACKWARD, "balance_coeff is 0.01 on rank 0 and 0.02 on rank 1");
    test(score, PLANNED, "router.score is softmax on rank 0 and sigmoid on rank 1");
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++)
        test(allowed[i], FORWARD, NULL);
    unsetenv("EPIC_CHECK_WEIGHTS");
    for (int which = 0; which < X; which++) test_weights(which, "1");
    test_weights(NUM_GIVEN, "1");
    test_weights(W_GATE, "0");
    test_weights(W_GATE, "");
    test_weights(W_GATE, NULL);
    return atomic_load(failures) ? 1 : 0;
}
