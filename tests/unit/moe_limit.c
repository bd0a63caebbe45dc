/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_moe_args.capacity_limit. Random layers run with a limit that
 * changes between the calls. The results and gradients must have the bits of the same layer
 * whose capacity is this limit. (moe_values compares limits that differ between the ranks with
 * plain loops.) */
#include <pthread.h>

#include "unit/moe_values.h"

/* A layer, and the limit that it gets before its real one. */
typedef struct changing {
    problem p;
    int32_t first;
} changing;

/* Runs the layer twice with the same buffers. The limit changes after the first time. */
static void run_twice(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const changing *c = what;
    part *t = part_make(&c->p, rank, config, 7);
    int32_t limit = c->first;
    if (c->p.is_limited) t->forward.capacity_limit = &limit;
    for (int i = 0; i < 2; i++) {
        CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", c->p.name, epic_error(ctx));
        CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", c->p.name, epic_error(ctx));
        limit = c->p.limit_of[rank];
    }
    part_print_failure(t);
    part_free(t);
}

static void run(changing *c)
{
    const epic_config config = config_of(&c->p);
    make_results(&c->p);
    team_threads(run_twice, c, &config);
}

/* Compares a limit with a capacity of the same number of slots. */
static void test_limit(const problem *given, int32_t first, int32_t limit)
{
    changing limited = {*given, first}, plain = {*given, 0};
    limited.p.is_limited = true;
    for (int r = 0; r < given->num_ranks; r++) limited.p.limit_of[r] = limit;
    plain.p.is_limited = false;
    plain.p.moe.capacity = slots_in(&limited.p, 0);
    run(&limited);
    run(&plain);
    compare_bits(&plain.p, &limited.p, "of a layer with capacity_limit");
    CHECK(!memcmp(plain.p.demand, limited.p.demand,
                  (size_t)given->num_ranks * sizeof *given->demand),
          "%s: another demand with capacity_limit", given->name);
    free_results(&limited.p);
    free_results(&plain.p);
}

int main(void)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F64};
    failures = share(sizeof *failures);
    for (uint32_t seed = 0; seed < (uint32_t)run_scaled(60); seed++) {
        problem p = draw(seed, 1 + (int)(seed % 4), types[seed % 3]);
        const int32_t slots = (int32_t)(p.total * p.layer.top_k / p.num_ranks);
        p.planned = false;
        p.backward_flags = 0;
        drop_choices(&p);
        test_limit(&p, 1, slots);
        test_limit(&p, slots, 0);
        test_limit(&p, -3, slots / 2 + 1);
        test_limit(&p, slots, (int32_t)p.moe.capacity + 3);
        free_given(&p);
    }
    return atomic_load(failures) ? 1 : 0;
}
