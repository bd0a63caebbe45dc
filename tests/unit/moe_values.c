/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the whole layer with plain float64 loops, and its gradients with central
 * differences of those loops: random layers of every kind on 1 to 4 ranks. */
#include <pthread.h>

#include "unit/moe_values.h"

static void run_once(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 7);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

static void test_random(uint32_t count)
{
    static const uint32_t types[] = {EPIC_F64,  EPIC_F32, EPIC_F64,
                                     EPIC_BF16, EPIC_F32, EPIC_F16};
    for (uint32_t seed = 0; seed < count; seed++) {
        problem p = draw(seed, 1 + (int)(seed / 2 % 4), types[seed % 6]);
        const epic_config config = config_of(&p);
        make_results(&p);
        team_threads(run_once, &p, &config);
        check_values(&p, seed);
        free_results(&p);
        free_given(&p);
    }
}

/* ------------------------------------------------------------ late is as good as early ---- */

static void test_late_early(bool biased, uint32_t type)
{
    problem p[2];
    for (int early = 0; early < 2; early++) {
        p[early] = draw(41, 2, type);
        p[early].experts.weighting = early ? EPIC_WEIGHT_EARLY : EPIC_WEIGHT_LATE;
        for (int i = B_GATE_UP; i <= B_DOWN; i++) free_array(&p[early].given[i]);
        p[early].biased = biased;
        for (int i = B_GATE_UP; i <= B_DOWN; i++) {
            source s = source_of(i);
            p[early].given[i] =
                make_array(type_given(&p[early], i), numbers_in_all(&p[early], i));
            fill_random(&p[early].given[i], &s, 0.5);
        }
        for (int i = SHARED_B_GATE_UP; i <= SHARED_B_DOWN; i++) free_array(&p[early].given[i]);
        for (int i = SHARED_B_GATE_UP; i <= SHARED_B_DOWN; i++)
            p[early].given[i] =
                make_array(type_given(&p[early], i), numbers_in_all(&p[early], i));
        const epic_config config = config_of(&p[early]);
        make_results(&p[early]);
        team_threads(run_once, &p[early], &config);
    }
    compare_results(&p[0], &p[1]);
    for (int early = 0; early < 2; early++) {
        free_results(&p[early]);
        free_given(&p[early]);
    }
}

/* ----------------------------------------------------------------- layers side by side ---- */

#define SIDE 3

/* Runs forward through all layers, then backward from the last to the first. Each layer has its
 * own tag, sizes and saved memory, and none may read what another layer left in the workspace.
 */
static void run_side_by_side(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t[SIDE];
    for (int i = 0; i < SIDE; i++) t[i] = part_make(&p[i], rank, config, (uint64_t)i);
    for (int i = 0; i < SIDE; i++)
        CHECK(part_forward(t[i], ctx) == EPIC_OK, "%s: %s", p[i].name, epic_error(ctx));
    for (int i = SIDE - 1; i >= 0; i--)
        CHECK(part_backward(t[i], ctx) == EPIC_OK, "%s: %s", p[i].name, epic_error(ctx));
    for (int i = 0; i < SIDE; i++) {
        part_print_failure(t[i]);
        part_free(t[i]);
    }
}

static void test_side_by_side(void)
{
    problem p[SIDE] = {draw(101, 2, EPIC_F64), draw(103, 2, EPIC_F32), draw(106, 2, EPIC_F64)};
    epic_config config = config_of(&p[0]);
    for (int i = 0; i < SIDE; i++) {
        const epic_config own = config_of(&p[i]);
        if (own.max_tokens > config.max_tokens) config.max_tokens = own.max_tokens;
        if (own.max_row_bytes > config.max_row_bytes) config.max_row_bytes = own.max_row_bytes;
        make_results(&p[i]);
    }
    team_threads(run_side_by_side, p, &config);
    for (uint32_t i = 0; i < SIDE; i++) {
        check_values(&p[i], i);
        free_results(&p[i]);
        free_given(&p[i]);
    }
}

/* Checks that a gradient does not change if others are not computed. */
static void test_no_gradients(void)
{
    problem p = draw(12, 2, EPIC_F64);
    const epic_config config = config_of(&p);
    make_results(&p);
    p.wants_no_gradient = true;
    team_threads(run_once, &p, &config);
    oracle o = oracle_make(&p);
    source s = source_of(1);
    compare_gradient(&p, &o, X, &s);
    oracle_free(&o);
    free_results(&p);
    free_given(&p);
}

/* ------------------------------------------------------------------ float64 throughout ---- */

static void run_forward(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 7);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

static double measured(problem *p)
{
    const epic_config config = config_of(p);
    double sum = 0;
    team_threads(run_forward, p, &config);
    for (int64_t i = 0; i < p->out.n; i++) sum += get(&p->out, i) * get(&p->d_out, i);
    return sum + loss_of(p, LOSS) * (p->d_loss_given ? p->d_loss : 1) +
           (p->d_parts_given ? loss_of(p, BALANCE_LOSS) * p->d_balance_loss +
                                   loss_of(p, Z_LOSS) * p->d_z_loss
                             : 0);
}

/* Compares the layer's float64 gradients with differences of the layer. A float32 anywhere
 * in it would give an error of 6e-8, which the division by the step turns into 6e-2. */
static void test_differences(uint32_t seed)
{
    const double step = 1e-6;
    problem p = draw(seed, 2, EPIC_F64);
    source s = source_of(seed);
    const epic_config config = config_of(&p);
    p.narrow_losses = false;
    p.backward_flags = 0;
    make_results(&p);
    team_threads(run_once, &p, &config);
    problem changed = p;
    make_results(&changed);
    for (int which = 0; which < NUM_GIVEN; which++) {
        double size = 0;
        for (int64_t i = 0; i < numbers_in_all(&p, which); i++)
            size = fmax(size, fabs(gradient_of(&p, which, i)));
        for (int k = 0; k < 3 && p.given[which].n; k++) {
            const int64_t i = (int64_t)below(&s, (uint32_t)p.given[which].n);
            const double before = get(&p.given[which], i);
            put(&p.given[which], i, before + step);
            const double above = measured(&changed);
            put(&p.given[which], i, before - step);
            const double under = measured(&changed);
            put(&p.given[which], i, before);
            const double off = fabs((above - under) / (2 * step) - gradient_of(&p, which, i));
            compare_within(&p, given_names[which], off, fmax(size, 1e-2), 1e-6);
        }
    }
    free_results(&changed);
    free_results(&p);
    free_given(&p);
}

/* -------------------------------------------------------------------------- not wanted ---- */

/* Checks that the gradients have the same bits if no rank or only one rank computes d_x. */
static void run_without_d_x(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 7);
    if (rank == 0) t->backward.d_x.data = NULL;
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_print_failure(t);
    part_free(t);
}

static void test_no_d_x(uint32_t seed, uint32_t type)
{
    problem p[3] = {draw(seed, 2, type), draw(seed, 2, type), draw(seed, 2, type)};
    p[1].wants_no_d_x = true;
    for (int i = 0; i < 3; i++) {
        const epic_config config = config_of(&p[i]);
        make_results(&p[i]);
        team_threads(i == 2 ? run_without_d_x : run_once, &p[i], &config);
        for (int which = 0; which < X; which++)
            CHECK(!memcmp(p[0].gradient[which].data, p[i].gradient[which].data,
                          array_bytes(&p[0].gradient[which])),
                  "%s: gradient of %s without d_x", p[i].name, given_names[which]);
    }
    for (int i = 0; i < 3; i++) {
        free_results(&p[i]);
        free_given(&p[i]);
    }
}

/* ----------------------------------------------------------------------- less is saved ---- */

/* Checks that parts that are recomputed instead of saved have the same bits. */
static void test_less_saved(uint32_t seed, uint32_t type)
{
    problem whole = draw(seed, 1 + (int)(seed % 4), type);
    const epic_config config = config_of(&whole);
    make_results(&whole);
    team_threads(run_once, &whole, &config);
    if (!whole.planned) check_saved_bytes(&whole, &config);
    for (uint32_t i = 1; i <= 3; i++) {
        problem less = whole;
        less.moe.flags |= i * EPIC_RECOMPUTE; /* first one flag, then the other, then both */
        make_results(&less);
        team_threads(run_once, &less, &config);
        compare_bits(&whole, &less, i == 1 ? "recomputed" : "with rows dispatched again");
        free_results(&less);
    }
    free_results(&whole);
    free_given(&whole);
}

int main(void)
{
    const bool all =
        !run_is_sanitized() || run_scale() >= 1; /* else a few cases of each kind */
    failures = share(sizeof *failures);
    test_random((uint32_t)run_scaled(400));
    for (int biased = 0; biased < 2; biased++) {
        test_late_early(biased, EPIC_F64);
        test_late_early(biased, EPIC_F32);
    }
    test_side_by_side();
    for (uint32_t seed = 0; seed < (all ? 10u : 4u); seed++) test_differences(seed);
    test_no_gradients();
    for (uint32_t seed = 0; seed < (all ? 20u : 6u); seed++)
        test_no_d_x(seed, seed % 2 ? EPIC_BF16 : EPIC_F32);
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F64, EPIC_F16};
    for (uint32_t seed = 0; seed < (all ? 24u : 8u); seed++)
        test_less_saved(seed, types[seed % 4]);
    printf("%s; the largest error is %.2g of what is allowed\n", epic_blas_name(), worst);
    return atomic_load(failures) ? 1 : 0;
}
