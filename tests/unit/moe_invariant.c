/* SPDX-License-Identifier: Apache-2.0 */
/* Tests EPIC_INVARIANT on the host: the rows of tokens (moe_selection.h), and gradients of
 * parameters, which must have the same bits for every number of ranks. moe_values.c compares
 * layers with this flag with float64. */
#include "run.h"
#include "unit/moe_selection.h"

static void run_rank(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 3);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

static void run(problem *p)
{
    const epic_config config = config_of(p);
    team_threads(run_rank, p, &config);
}

/* Gradients of parameters for the same tokens on any number of ranks. */
static void test_gradients(uint32_t seed)
{
    problem given = draw(seed);
    if (!given.layer.num_logical) {
        given.moe.flags |= EPIC_INVARIANT;
        given.layer.overflow = EPIC_OVERFLOW_ERROR;
        given.layer.expert_capacity = 0;
        problem one = spread(&given, 1, seed);
        run(&one);
        for (int ranks = 2; ranks <= LEAVES; ranks *= 2) {
            problem many = spread(&given, ranks, seed);
            many.layer.alignment = 1u << ranks % 5;
            set_capacity(&many, 3);
            run(&many);
            compare(&one, &many);
            free_results(&many);
        }
        free_results(&one);
    }
    free_given(&given);
}

/* --------------------------------------------------------------------------- replicas ---- */

/* Returns a layer of 16 experts in 8 leaves. Each leaf has two replicas of an expert. */
static problem draw_pairs(uint32_t seed)
{
    source s = source_of(seed + 7000000);
    problem p = {.name = "replicas", .num_ranks = 1, .tokens_of = {1}};
    p.layer = (epic_layer){.num_experts = 2 * LEAVES,
                           .num_logical = LEAVES,
                           .top_k = 3,
                           .alignment = 1,
                           .sum_order = EPIC_TREE,
                           .leaves = LEAVES};
    p.router =
        (epic_router){.num_experts = LEAVES, .top_k = 3, .normalize = EPIC_NORMALIZE_SUM};
    p.experts = (epic_experts){
        .num_local_experts = 2 * LEAVES, .hidden = 12, .inner = 8, .row_type = EPIC_F32};
    for (int e = 0; e < 2 * LEAVES; e++) p.logical_of[e] = e / 2;
    make_given(&p, &s);
    const array *const weights[] = {&p.given[W_GATE_UP], &p.given[W_DOWN]};
    for (int i = 0; i < 2; i++) {
        const size_t bytes = (size_t)(numbers_of(&p, i ? W_DOWN : W_GATE_UP) * 4);
        for (size_t e = 0; e < LEAVES; e++)
            memcpy((char *)weights[i]->data + (2 * e + 1) * bytes,
                   (char *)weights[i]->data + 2 * e * bytes, bytes);
    }
    make_invariant(&p);
    draw_all_tokens(&p, 40, seed);
    return p;
}

/* The replicas of an expert may be in one leaf. */
static void test_replicas(void)
{
    source s = source_of(8000000);
    problem p = draw_pairs(1);
    const int64_t totals[] = {1, 2, 7, 40};
    test_layer(&p, totals, 4, LEAVES, &s);
    free_given(&p);
}

static void run_refused(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 3);
    CHECK(part_forward(t, ctx) == EPIC_EINVAL &&
              strstr(epic_error(ctx),
                     "expert 9 is a replica of logical expert 1, which also has "
                     "a replica in another leaf: with EPIC_INVARIANT"),
          "%s", epic_error(ctx));
    t->moe.flags &= ~(uint32_t)EPIC_INVARIANT;
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    part_free(t);
}

/* Replicas of an expert in two leaves are refused, but only with EPIC_INVARIANT. */
static void test_other_leaves(void)
{
    problem p = draw_pairs(2);
    p.logical_of[9] = 1; /* like experts 2 and 3 */
    set_capacity(&p, 0);
    make_results(&p);
    const epic_config config = config_of(&p);
    team_threads(run_refused, &p, &config);
    free_results(&p);
    free_given(&p);
}

/* A layer for which OpenBLAS uses other kernels for other numbers of rows, with up to 4096
 * tokens. */
static void test_large(uint32_t type, uint32_t hidden, uint32_t inner, int64_t most)
{
    source s = source_of(hidden + type);
    problem p = {.name = "a large layer", .num_ranks = 1, .tokens_of = {1}, .has_shared = true};
    p.layer = (epic_layer){
        .num_experts = 8, .top_k = 2, .alignment = 1, .sum_order = EPIC_TREE, .leaves = 8};
    p.router = (epic_router){.num_experts = 8, .top_k = 2, .normalize = EPIC_NORMALIZE_SUM};
    p.experts = (epic_experts){
        .num_local_experts = 8, .hidden = hidden, .inner = inner, .row_type = type};
    p.shared = p.experts;
    p.shared.num_local_experts = 1;
    make_given(&p, &s);
    make_invariant(&p);
    draw_all_tokens(&p, most, type);
    const int64_t totals[] = {1, 2, 7, 8, 9, 24, 48, 100, most / 2 + 1};
    test_layer(&p, totals, 9, LEAVES, &s);
    free_given(&p);
}

int main(void)
{
    failures = share(sizeof *failures);
    for (uint32_t seed = 0; seed < (uint32_t)run_scaled(24); seed++)
        test_selections(seed, 1, LEAVES);
    for (uint32_t seed = 0; seed < (uint32_t)run_scaled(8); seed++) test_gradients(seed);
    test_replicas();
    test_other_leaves();
    test_large(EPIC_F32, 256, 512, 160);
    test_large(EPIC_BF16, 256, 192, 160);
    test_large(EPIC_F16, 64, 48, 4096);
    test_large(EPIC_F64, 40, 24, 512);
    return atomic_load(failures) ? 1 : 0;
}
