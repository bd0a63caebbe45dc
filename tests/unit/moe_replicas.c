/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a layer with replicas is equal to the layer without them. It has the same outputs,
 * losses and gradients, also if expert_capacity drops choices. After epic_sum_replicas every
 * replica has the gradient of its logical expert.
 * Tolerances as in moe_values.c: a token has the same row in another slab. */
#include "unit/moe_layer.h"

static problem draw(uint32_t seed, int num_ranks, uint32_t type)
{
    source s = source_of(seed);
    const uint32_t experts = 3 + below(&s, 6);
    problem p = {.num_ranks = num_ranks, .placed = true, .biased = seed % 2};
    p.layer = (epic_layer){.num_experts = experts, .top_k = 1 + below(&s, 3), .alignment = 4};
    p.router = (epic_router){
        .num_experts = experts, .top_k = p.layer.top_k, .normalize = EPIC_NORMALIZE_SUM};
    p.router.zero_experts = below(&s, 2);
    p.experts = (epic_experts){.num_local_experts = 1,
                               .hidden = 5,
                               .inner = 7,
                               .row_type = type,
                               .weighting = seed % 3};
    p.moe = (epic_moe){.balance_coeff = 0.5, .z_coeff = 0.1};
    if (seed % 3 == 0) p.layer.overflow = EPIC_OVERFLOW_DROP;
    if (seed % 3 == 0) p.layer.expert_capacity = 3 + below(&s, 5);
    for (int r = 0; r < num_ranks; r++) p.tokens_of[r] = below(&s, 9);
    for (uint32_t e = 0; e < experts; e++) p.rank_of_expert[e] = (int32_t)below(&s, num_ranks);
    make_given(&p, &s);
    p.moe.capacity = p.total * p.layer.top_k + 64 * 3 + 1;
    snprintf(p.name, sizeof p.name, "seed %u, %d ranks, %s rows", seed, num_ranks,
             convert_name(type));
    return p;
}

/* Returns the layer with 1 + l % 4 replicas of logical expert l on any ranks. Their weights
 * are copies. */
static problem replicate(const problem *one, uint32_t seed)
{
    source s = source_of(seed + 500);
    problem p = *one;
    p.layer.num_logical = one->layer.num_experts;
    p.layer.num_experts = 0;
    for (uint32_t n = 0; n < 4; n++)
        for (uint32_t l = n; l < p.layer.num_logical; l++)
            if (l % 4 >= n) p.logical_of[p.layer.num_experts++] = (int32_t)l;
    for (uint32_t e = 0; e < p.layer.num_experts; e++)
        p.rank_of_expert[e] = (int32_t)below(&s, (uint32_t)p.num_ranks);
    for (int i = W_GATE_UP; i <= B_DOWN; i++) {
        const size_t bytes = (size_t)(numbers_of(&p, i) * convert_bytes(one->given[i].type));
        p.given[i] = make_array(one->given[i].type, numbers_in_all(&p, i));
        for (uint32_t e = 0; e < p.layer.num_experts; e++)
            memcpy((char *)p.given[i].data + e * bytes,
                   (const char *)one->given[i].data + (size_t)p.logical_of[e] * bytes, bytes);
    }
    return p;
}

static void run_once(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 0);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    if (p->layer.num_logical && real_type(p) == EPIC_F32)
        CHECK(part_sum_replicas(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

static void run(problem *p)
{
    const epic_config config = config_of(p);
    make_results(p);
    team_threads(run_once, p, &config);
}

/* Returns element i of expert e's gradient, summed over replicas. */
static double summed(const problem *p, int which, uint32_t expert, int64_t i)
{
    const int64_t each = numbers_of(p, which);
    double sum = 0;
    if (real_type(p) == EPIC_F32) return gradient_of(p, which, expert * each + i);
    for (uint32_t e = 0; e < p->layer.num_experts; e++)
        if (p->logical_of[e] == p->logical_of[expert])
            sum += gradient_of(p, which, e * each + i);
    return sum;
}

static void compare(const problem *p, const char *what, double got, double want)
{
    const double allowed = row_type(p) == EPIC_F64 ? 1e-12 : 1e-5;
    CHECK(fabs(got - want) <= allowed * (1 + fabs(want)), "%s: %s is %.9g, not %.9g", p->name,
          what, got, want);
}

static void compare_gradient(const problem *one, const problem *many, int which)
{
    const int64_t each = numbers_of(one, which);
    if (!is_per_expert(which)) {
        for (int64_t i = 0; i < numbers_in_all(one, which); i++)
            compare(many, given_names[which], gradient_of(many, which, i),
                    gradient_of(one, which, i));
        return;
    }
    for (uint32_t e = 0; e < many->layer.num_experts; e++)
        for (int64_t i = 0; i < each; i++)
            compare(many, given_names[which], summed(many, which, e, i),
                    gradient_of(one, which, many->logical_of[e] * each + i));
}

static void test(uint32_t seed, int num_ranks, uint32_t type)
{
    problem one = draw(seed, num_ranks, type), many = replicate(&one, seed);
    run(&one);
    run(&many);
    for (int64_t i = 0; i < one.out.n; i++)
        compare(&many, "out", get(&many.out, i), get(&one.out, i));
    for (int which = 0; which < NUM_LOSSES; which++)
        compare(&many, "a loss", loss_of(&many, which), loss_of(&one, which));
    CHECK(!memcmp(many.logical_load, one.load, one.layer.num_experts * sizeof *one.load),
          "%s: load", many.name);
    for (int which = 0; which < NUM_GIVEN; which++) compare_gradient(&one, &many, which);
    free_results(&one);
    free_results(&many);
    for (int i = W_GATE_UP; i <= B_DOWN; i++) free_array(&many.given[i]);
    free_given(&one);
}

int main(void)
{
    failures = share(sizeof *failures);
    for (uint32_t seed = 0; seed < (uint32_t)run_scaled(60); seed++)
        test(seed, 1 + (int)(seed % 4), seed % 2 ? EPIC_F32 : EPIC_F64);
    return atomic_load(failures) ? 1 : 0;
}
