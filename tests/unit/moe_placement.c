/* SPDX-License-Identifier: Apache-2.0 */
/* Tests a short training in which experts move between ranks after each step. One run keeps the
 * first placement, the other makes a new placement from each step's load. Results may differ
 * only by rounding, and with EPIC_TREE not at all. The training is a few steps of gradient
 * descent of one layer towards random rows. */
#include <pthread.h>

#include "unit/moe_layer.h"

#define RANKS 4
#define STEPS 12
#define RATE 0.5

typedef struct training {
    problem p;
    array target;
    bool moves;
    pthread_barrier_t *barrier;
    double loss[STEPS][RANKS];
    int num_moved; /* number of experts that have moved */
} training;

/* -------------------------------------------------------------------------- placement ---- */

/* Places the busiest expert first, each on the rank with the smallest load. */
static void balance(problem *p)
{
    int64_t work[RANKS] = {0};
    bool placed[64] = {false};
    for (uint32_t n = 0; n < p->layer.num_experts; n++) {
        uint32_t busiest = 0;
        while (placed[busiest]) busiest++;
        for (uint32_t e = 0; e < p->layer.num_experts; e++)
            if (!placed[e] && p->load[e] > p->load[busiest]) busiest = e;
        int idlest = 0;
        for (int r = 1; r < RANKS; r++)
            if (work[r] < work[idlest]) idlest = r;
        placed[busiest] = true;
        p->rank_of_expert[busiest] = idlest;
        work[idlest] += p->load[busiest];
    }
}

/* EPIC_TREE: moves whole blocks of experts. */
static void turn(problem *p)
{
    for (uint32_t e = 0; e < p->layer.num_experts; e++)
        p->rank_of_expert[e] = (p->rank_of_expert[e] * 3 + 1) % RANKS;
}

static void place(training *t)
{
    problem *p = &t->p;
    int32_t before[64];
    memcpy(before, p->rank_of_expert, sizeof before);
    if (p->layer.sum_order == EPIC_TREE)
        turn(p);
    else
        balance(p);
    for (uint32_t e = 0; e < p->layer.num_experts; e++)
        t->num_moved += before[e] != p->rank_of_expert[e];
}

/* --------------------------------------------------------------------------- training ---- */

/* Returns half the mean square of out - target, and stores its gradient in d_out. */
static double measure(const training *t, part *part)
{
    const int64_t n = part->tokens * t->p.experts.hidden;
    const float *out = part->out;
    float *d_out = part->d_out;
    double loss = 0;
    for (int64_t i = 0; i < n; i++) {
        const double off = out[i] - get(&t->target, part->first * t->p.experts.hidden + i);
        d_out[i] = (float)(off / (double)t->p.total);
        loss += off * off / 2 / (double)t->p.total;
    }
    return loss;
}

/* Updates the parameters of one rank's experts, or of the parameters that all ranks have. */
static void descend(problem *p, const part *part, bool dense)
{
    for (int i = 0; i < X; i++) {
        const int64_t each = numbers_of(p, i);
        if (is_dense(i) != dense || !each) continue;
        for (uint32_t e = 0; e < (dense ? 1 : part->num_mine); e++)
            for (int64_t k = 0; k < each; k++) {
                const int64_t at = (dense ? 0 : part->mine[e]) * each + k;
                put(&p->given[i], at, get(&p->given[i], at) - RATE * get(&p->gradient[i], at));
            }
    }
}

static void train(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    training *t = what;
    for (int step = 0; step < STEPS; step++) {
        part *part = part_make(&t->p, rank, config, 0);
        pthread_barrier_wait(t->barrier);
        CHECK(part_forward(part, ctx) == EPIC_OK, "%s", epic_error(ctx));
        t->loss[step][rank] = measure(t, part);
        CHECK(part_backward(part, ctx) == EPIC_OK, "%s", epic_error(ctx));
        part_print_failure(part);
        descend(&t->p, part, false);
        if (rank == 0) descend(&t->p, part, true);
        pthread_barrier_wait(t->barrier);
        if (rank == 0 && t->moves) place(t);
        pthread_barrier_wait(t->barrier);
        part_free(part);
    }
}

static void run(training *t, uint32_t order, bool moves)
{
    source s = source_of(5);
    pthread_barrier_t barrier;
    *t = (training){.moves = moves, .barrier = &barrier};
    problem *p = &t->p;
    *p = (problem){.name = "training", .num_ranks = RANKS, .placed = true, .biased = true};
    p->layer = (epic_layer){.num_experts = 8, .top_k = 2, .alignment = 4, .sum_order = order};
    p->router = (epic_router){.num_experts = 8, .top_k = 2, .normalize = EPIC_NORMALIZE_SUM};
    p->experts =
        (epic_experts){.row_type = EPIC_F32, .num_local_experts = 1, .hidden = 12, .inner = 20};
    p->shared =
        (epic_experts){.row_type = EPIC_F32, .num_local_experts = 1, .hidden = 12, .inner = 6};
    p->has_shared = true;
    p->moe = (epic_moe){.balance_coeff = 0.01, .flags = EPIC_SUM_DENSE};
    for (int r = 0; r < RANKS; r++) p->tokens_of[r] = order == EPIC_TREE ? 12 : 9 + 2 * r;
    for (uint32_t e = 0; e < 8; e++) p->rank_of_expert[e] = (int32_t)e / 2;
    make_given(p, &s);
    p->moe.capacity = p->total * 2 + 8 * 3;
    t->target = make_array(EPIC_F32, p->total * 12);
    fill_random(&t->target, &s, 1);
    make_results(p);
    pthread_barrier_init(&barrier, NULL, RANKS);
    const epic_config config = config_of(p);
    team_threads(train, t, &config);
    pthread_barrier_destroy(&barrier);
    free_results(p);
    free_given(p);
    free_array(&t->target);
}

static double loss_at(const training *t, int step)
{
    double sum = 0;
    for (int r = 0; r < RANKS; r++) sum += t->loss[step][r];
    return sum;
}

static void test_moving(uint32_t order)
{
    training fixed, moving;
    run(&fixed, order, false);
    run(&moving, order, true);
    for (int step = 0; step < STEPS; step++) {
        const double a = loss_at(&fixed, step), b = loss_at(&moving, step);
        CHECK(order == EPIC_TREE ? a == b : fabs(a - b) <= 1e-5 * a,
              "order %u, step %d: %.9g fixed, %.9g moving", order, step, a, b);
    }
    CHECK(loss_at(&fixed, STEPS - 1) < 0.8 * loss_at(&fixed, 0), "the loss went from %g to %g",
          loss_at(&fixed, 0), loss_at(&fixed, STEPS - 1));
    CHECK(moving.num_moved > STEPS, "only %d experts moved", moving.num_moved);
    CHECK(fixed.num_moved == 0, "%d experts moved", fixed.num_moved);
}

int main(void)
{
    failures = share(sizeof *failures);
    test_moving(EPIC_BY_RANK);
    test_moving(EPIC_TREE);
    return atomic_load(failures) ? 1 : 0;
}
