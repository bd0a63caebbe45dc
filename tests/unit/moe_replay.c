/* SPDX-License-Identifier: Apache-2.0 */
/* Tests recording and replaying the routing of the layer.
 *
 * A run on one rank returns its ids. Runs on 1 to 8 ranks that force these ids have the same
 * bits, although their routers would choose other experts. Invalid forced ids are reported on
 * every rank. (moe_values compares forced ids and weights with plain loops.) */
#include <pthread.h>

#include "unit/moe_bits.h"

static void run_once(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 3);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    if (!p->placed)
        CHECK(part_sum_replicas(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

static void run(problem *p)
{
    const epic_config config = config_of(p);
    team_threads(run_once, p, &config);
}

/* Forces the ids that `recorded` used, with another bias, so that the router would choose other
 * experts. The bias has no influence on the weights. */
static void force_ids(problem *p, const problem *recorded)
{
    const size_t bytes = (size_t)recorded->topk_weights.n * sizeof(int32_t);
    p->topk_idx_in = malloc(bytes);
    memcpy(p->topk_idx_in, recorded->topk_idx, bytes);
    p->bias_given = true;
    for (int i = 0; i < 96; i++) p->bias[i] = (float)(i % 3 * 10);
}

/* Forces also the weights that `recorded` used. */
static void force_weights(problem *p, const problem *recorded)
{
    p->has_forced_weights = true;
    free_array(&p->given[TOPK_WEIGHTS]);
    p->given[TOPK_WEIGHTS] = make_array(EPIC_F32, recorded->topk_weights.n);
    memcpy(p->given[TOPK_WEIGHTS].data, recorded->topk_weights.data,
           array_bytes(&recorded->topk_weights));
}

static void compare_choices(const problem *recorded, const problem *replayed)
{
    if (!is_even(replayed)) return;
    same(replayed, "topk_idx_out", recorded->topk_idx, replayed->topk_idx,
         (size_t)recorded->topk_weights.n * sizeof(int32_t));
    same(replayed, "topk_weights_out", recorded->topk_weights.data, replayed->topk_weights.data,
         array_bytes(&recorded->topk_weights));
}

static void test_replay(uint32_t seed)
{
    problem given = draw(seed), one = spread(&given, 1, seed), forced = given;
    run(&one);
    force_ids(&forced, &one);
    for (int ranks = 1; ranks <= LEAVES; ranks *= 2) {
        problem many = spread(&forced, ranks, seed);
        run(&many);
        compare(&one, &many);
        compare_choices(&one, &many);
        free_results(&many);
    }
    force_weights(&forced, &one);
    problem first = spread(&forced, 1, seed);
    run(&first);
    same(&first, "out", one.out.data, first.out.data, array_bytes(&one.out));
    for (int i = W_GATE_UP; i <= B_DOWN; i++)
        same(&first, given_names[i], one.gradient[i].data, first.gradient[i].data,
             array_bytes(&one.gradient[i]));
    for (int ranks = 2; ranks <= LEAVES; ranks *= 2) {
        problem many = spread(&forced, ranks, seed);
        run(&many);
        compare(&first, &many);
        compare_choices(&one, &many);
        free_results(&many);
    }
    free_results(&first);
    free_results(&one);
    free_array(&forced.given[TOPK_WEIGHTS]);
    free(forced.topk_idx_in);
    free_given(&given);
}

/* --------------------------------------------------- one rank forces, another does not ---- */

static void run_mixed(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 3);
    if (rank == 1) t->forward.topk_idx_in = NULL;
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

static void test_mixed(uint32_t seed)
{
    problem given = draw(seed), all = spread(&given, 2, seed);
    all.placed = true;
    run(&all);
    problem some = all;
    make_results(&some);
    some.topk_idx_in = all.topk_idx;
    const epic_config config = config_of(&some);
    team_threads(run_mixed, &some, &config);
    compare_bits(&all, &some, "of a layer in which one rank forces ids");
    free_results(&some);
    free_results(&all);
    free_given(&given);
}

/* ------------------------------------------------------------------------- invalid ids ---- */

#define TOKENS 6

static void run_invalid(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    static const char *const words =
        "topk_idx_in: rank 1, token 2, k 1 has expert 6: must be below num_experts + "
        "zero_experts 6, or negative for no expert";
    const problem *p = what;
    part *t = part_make(p, rank, config, 3);
    int32_t ids[2 * TOKENS] = {0};
    ids[5] = 6;
    if (rank == 1) t->forward.topk_idx_in = ids;
    CHECK(part_forward(t, ctx) == EPIC_EINVAL && strstr(epic_error(ctx), words), "%s",
          epic_error(ctx));
    const int32_t *used = t->topk_idx;
    for (int i = 0; i < 2 * TOKENS; i++)
        CHECK((used[i] == -1) == (rank == 1), "rank %d returned the id %d", rank, used[i]);
    CHECK(part_backward(t, ctx) == EPIC_EINVAL, "%s", epic_error(ctx));
    ids[5] = 5; /* a zero-expert */
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(rank == 0 || !memcmp(ids, used, sizeof ids), "other ids on rank %d", rank);
    part_free(t);
}

static void test_invalid(bool is_planned)
{
    source s = source_of(4);
    problem p = {.name = "invalid ids", .num_ranks = 2, .tokens_of = {TOKENS, TOKENS}};
    p.layer = (epic_layer){.num_experts = 4, .top_k = 2};
    p.router = (epic_router){.num_experts = 4, .zero_experts = 2, .top_k = 2};
    p.experts =
        (epic_experts){.row_type = EPIC_F32, .num_local_experts = 1, .hidden = 5, .inner = 3};
    p.moe.capacity = 4 * TOKENS;
    p.planned = is_planned;
    make_given(&p, &s);
    make_results(&p);
    const epic_config config = config_of(&p);
    team_threads(run_invalid, &p, &config);
    free_results(&p);
    free_given(&p);
}

int main(void)
{
    failures = share(sizeof *failures);
    for (uint32_t seed = 0; seed < (uint32_t)run_scaled(16); seed++) test_replay(seed);
    for (uint32_t seed = 0; seed < 4; seed++) test_mixed(seed);
    for (int is_planned = 0; is_planned < 2; is_planned++) test_invalid(is_planned);
    return atomic_load(failures) ? 1 : 0;
}
