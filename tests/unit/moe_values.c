/* SPDX-License-Identifier: Apache-2.0 */
/* The whole layer against plain float64 loops, its gradients against central differences of those
 * loops: random layers of every kind, 1 to 4 ranks.
 *
 * Tolerances, of the largest error to the largest number of an array:
 *   F64 rows    1e-12; gradients 1e-6: central differences with a step of 1e-5 are off by 1e-10
 *               of the second derivatives, and by 1e-11 of the values themselves
 *   F32         1e-4
 *   BF16, F16   rows are rounded, to 2^-9 and 2^-12, in up to five places one after the other
 *               (expert, partial, sum over ranks, layer, and the same on the way back), and
 *               differences of weights' gradients magnify that: 16 such roundings */
#include <pthread.h>

#include "unit/moe_oracle.h"

#define SAMPLES 40 /* numbers of an array whose gradient is compared */

static double tolerance(const problem *p)
{
    switch (row_type(p)) {
    case EPIC_F64:
        return 1e-12;
    case EPIC_F32:
        return 1e-4;
    case EPIC_BF16:
        return 16 * 0x1p-9;
    default:
        return 16 * 0x1p-12;
    }
}

/* --------------------------------------------------------------------- random layers ---- */

typedef struct kind { /* a row of the table of routers */
    const char *name;
    epic_router router;
    bool bias, table;
} kind;

static const kind kinds[] = {
    {"mixtral", {.normalize = EPIC_NORMALIZE_SUM}, false, false},
    {"olmoe", {.score = EPIC_SCORE_SOFTMAX}, false, false},
    {"gpt-oss", {.score = EPIC_SCORE_LOGITS, .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN}, 0, 0},
    {"deepseek-v2", {.num_groups = 2, .topk_groups = 1, .scale = 1.5}, false, false},
    {"deepseek-v3",
     {.score = EPIC_SCORE_SIGMOID,
      .num_groups = 2,
      .topk_groups = 1,
      .group_score = EPIC_GROUP_SUM,
      .group_best = 2,
      .normalize = EPIC_NORMALIZE_SUM,
      .scale = 2.5},
     true,
     false},
    {"deepseek-v3 of others 0",
     {.score = EPIC_SCORE_SIGMOID,
      .num_groups = 2,
      .topk_groups = 1,
      .group_score = EPIC_GROUP_SUM,
      .group_best = 2,
      .group_others = EPIC_OTHERS_ZERO,
      .normalize = EPIC_NORMALIZE_SUM,
      .eps = 1e-20,
      .scale = 2.5},
     true,
     false},
    {"megatron",
     {.score = EPIC_SCORE_SQRTSOFTPLUS, .normalize = EPIC_NORMALIZE_SUM, .eps = 1e-20},
     true,
     false},
    {"deepseek-v4 table",
     {.score = EPIC_SCORE_SQRTSOFTPLUS, .normalize = EPIC_NORMALIZE_SUM, .eps = 1e-20},
     false,
     true},
    {"llama-4", {.score = EPIC_SCORE_LOGITS, .weight_rule = EPIC_WEIGHT_SIGMOID_CHOSEN}, 0, 0},
    {"ernie", {.normalize = EPIC_NORMALIZE_CLAMPED, .norm_min = 0.3}, true, false},
};

#define NUM_KINDS (sizeof kinds / sizeof *kinds)

static void draw_table(problem *p, source *s)
{
    p->table_rows = 5;
    p->wide_ids = below(s, 2);
    p->table = malloc((size_t)p->table_rows * p->layer.top_k * sizeof(int32_t));
    p->token_ids = malloc((size_t)p->total * sizeof(int32_t));
    for (int64_t i = 0; i < p->table_rows * (int64_t)p->layer.top_k; i++)
        p->table[i] = (int32_t)below(s, (uint32_t)columns_of(p) + 1) - 1; /* some choose none */
    for (int64_t t = 0; t < p->total; t++)
        p->token_ids[t] = (int32_t)below(s, (uint32_t)p->table_rows);
}

static void draw_router(problem *p, source *s, const kind *k)
{
    const uint32_t zero = below(s, 3) ? 0 : 2;
    p->router = k->router;
    p->router.num_experts = p->layer.num_experts;
    p->router.zero_experts = zero;
    p->router.top_k = p->layer.top_k = 1 + below(s, 3);
    p->gate_biased = below(s, 2);
    p->bias_given = k->bias;
    for (int i = 0; i < 96; i++) p->bias[i] = (float)between(s, -0.5, 0.5);
}

static void draw_experts(problem *p, source *s, uint32_t seed, uint32_t type)
{
    p->experts = (epic_experts){.num_local_experts = 1,
                                .hidden = 2 + below(s, 9),
                                .inner = 1 + below(s, 7),
                                .activation = seed / 6 % 6,
                                .weighting = seed / 36 % 3,
                                .row_type = type,
                                .limit = 0.6f};
    if (p->experts.activation < EPIC_CLAMPED_SWIGLU) p->experts.ungated = below(s, 3) == 0;
    if (!p->experts.ungated) p->experts.interleaved = below(s, 2);
    if (type != EPIC_F64) p->experts.weight_type = below(s, 4);
    p->has_shared = below(s, 2);
    p->shared_gated = below(s, 2);
    p->shared = p->experts;
    p->shared.inner = 1 + below(s, 6);
    p->shared.weighting = EPIC_WEIGHT_LATE;
    if (!p->has_shared) p->shared = (epic_experts){0};
    p->biased = below(s, 2);
}

/* Every fourth layer has replicas, of weights of their own: their gradients are then told apart.
 * They are drawn from a source of their own. */
static void draw_replicas(problem *p, uint32_t seed)
{
    source s = source_of(seed + 1000000);
    epic_layer *l = &p->layer;
    if (below(&s, 4)) return;
    l->num_logical = l->num_experts;
    l->num_experts += l->sum_order == EPIC_TREE ? 4 * (1 + below(&s, 2)) : 1 + below(&s, 9);
    for (uint32_t e = 0; e < l->num_experts; e++)
        p->logical_of[e] =
            (int32_t)(e < l->num_logical ? e : below(&s, 1 + below(&s, l->num_logical)));
    for (uint32_t e = l->num_experts - 1; e > 0; e--) {
        const uint32_t other = below(&s, e + 1);
        const int32_t held = p->logical_of[e];
        p->logical_of[e] = p->logical_of[other];
        p->logical_of[other] = held;
    }
}

/* Blocks of experts anywhere with EPIC_TREE, else every expert anywhere. */
static void draw_placement(problem *p, source *s)
{
    const uint32_t ranks = (uint32_t)p->num_ranks, experts = p->layer.num_experts;
    const uint32_t turn = below(s, ranks);
    p->placed = experts % ranks || below(s, 2);
    for (uint32_t e = 0; e < experts; e++)
        p->rank_of_expert[e] = p->layer.sum_order == EPIC_TREE
                                   ? (int32_t)((e / (experts / ranks) + turn) % ranks)
                                   : (int32_t)below(s, ranks);
}

static void draw_tokens(problem *p, source *s)
{
    const int64_t length = p->moe.sequence_tokens ? p->moe.sequence_tokens : 1;
    const bool tree = p->layer.sum_order == EPIC_TREE;
    const int64_t unit = length * (tree ? p->layer.leaves / (uint32_t)p->num_ranks : 1);
    const bool none = below(s, 12) == 0;
    const int64_t equal = 1 + below(s, 12 / (uint32_t)unit + 1);
    for (int r = 0; r < p->num_ranks; r++)
        p->tokens_of[r] = tree   ? equal * unit
                          : none ? 0
                                 : (int64_t)below(s, 14 / (uint32_t)length) * length;
}

/* Room for everything, or with EPIC_OVERFLOW_DROP sometimes for less. */
static void draw_capacity(problem *p, source *s)
{
    const int64_t choices = p->total * p->layer.top_k, align = p->layer.alignment;
    p->moe.capacity = choices + p->layer.num_experts * (align ? align - 1 : 0) + 1;
    p->planned = !below(s, 4);
    if (!below(s, 3)) {
        p->layer.overflow = EPIC_OVERFLOW_DROP;
        p->layer.expert_capacity = below(s, 2) ? 1 + below(s, 6) : 0;
        if (below(s, 2) && !p->planned)
            p->moe.capacity = 1 + below(s, (uint32_t)(choices / p->num_ranks + align));
    }
}

/* The first columns of W_gate pull tokens, the last ones push them off: full and empty slabs. */
static void skew(problem *p)
{
    const int64_t columns = columns_of(p), hidden = p->experts.hidden;
    for (int64_t t = 0; t < p->total; t++) put(&p->given[X], t * hidden, 1);
    put(&p->given[W_GATE], 0, 4);
    for (int64_t e = columns / 2; e < columns; e++) put(&p->given[W_GATE], e, -6);
}

static problem draw(uint32_t seed, int num_ranks, uint32_t type)
{
    static const uint32_t alignments[] = {1, 16, 128, 0, 3};
    source s = source_of(seed);
    problem p = {.num_ranks = num_ranks};
    const kind *k = &kinds[seed % NUM_KINDS];
    const bool tree = num_ranks != 3 && below(&s, 2);
    p.layer = (epic_layer){.num_experts = tree ? 8 : 6 + 2 * below(&s, 4),
                           .alignment = alignments[below(&s, 5)],
                           .sum_order = tree ? EPIC_TREE : EPIC_BY_RANK,
                           .leaves = tree ? 4 : 0,
                           .partial_type = below(&s, 2) ? EPIC_F32 : 0};
    if (type == EPIC_F64) p.layer.partial_type = 0;
    draw_router(&p, &s, k);
    draw_replicas(&p, seed);
    p.scaled = seed / 2 % 3 == 0;
    draw_experts(&p, &s, seed, type);
    draw_placement(&p, &s);
    if (below(&s, 2)) p.moe.balance_coeff = between(&s, 0.1, 2);
    if (below(&s, 2)) p.moe.z_coeff = between(&s, 0.1, 2);
    p.moe.sequence_tokens = below(&s, 3) ? 0 : 2;
    p.d_loss_given = below(&s, 2);
    p.narrow_losses = type == EPIC_F64 && !below(&s, 4);
    p.d_loss = (float)between(&s, 0.5, 2);
    p.d_parts_given = below(&s, 2);
    p.d_balance_loss = (float)between(&s, -2, 2);
    p.d_z_loss = (float)between(&s, -2, 2);
    if (type != EPIC_F64 && below(&s, 2)) p.moe.flags = EPIC_SUM_DENSE;
    if (!below(&s, 3)) p.backward_flags = EPIC_ACCUMULATE;
    draw_tokens(&p, &s);
    make_given(&p, &s);
    draw_capacity(&p, &s);
    if (!below(&s, 3)) skew(&p);
    if (k->table) draw_table(&p, &s);
    snprintf(
        p.name, sizeof p.name,
        "seed %u, %s, %d ranks, %u experts, %u logical, %lld tokens, %s rows, weighting %u",
        seed, k->name, num_ranks, p.layer.num_experts, p.layer.num_logical, (long long)p.total,
        convert_name(type), p.experts.weighting);
    return p;
}

/* -------------------------------------------------------------------------- comparing ---- */

static void run_once(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 7);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_tell(t);
    part_free(t);
}

static double worst; /* error over tolerance so far */

static void compare_within(const problem *p, const char *what, double error, double size,
                           double allowed)
{
    const double relative = error / (size > 1e-30 ? size : 1);
    CHECK(relative <= allowed, "%s: %s is off by %g of %g", p->name, what, error, size);
    worst = fmax(worst, relative / allowed);
}

static void compare(const problem *p, const char *what, double error, double size)
{
    compare_within(p, what, error, size, tolerance(p));
}

static void compare_loss(const problem *p, int which, const char *name, double want)
{
    const double allowed = p->narrow_losses ? 1e-6 : tolerance(p);
    compare_within(p, name, fabs(loss_of(p, which) - want), fabs(want), allowed);
}

static void compare_forward(const problem *p, const oracle *o)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < p->total * p->experts.hidden; i++) {
        const double off = fabs(get(&p->out, i) - o->out[i]);
        error = off <= error ? error : off; /* a NaN stays */
        size = fmax(size, fabs(o->out[i]));
    }
    compare(p, "out", error, size);
    const oracle_losses loss = oracle_loss(o);
    compare_loss(p, LOSS, "loss", loss.balance + loss.z);
    compare_loss(p, BALANCE_LOSS, "balance_loss", loss.balance);
    compare_loss(p, Z_LOSS, "z_loss", loss.z);
    for (int r = 0; r < p->num_ranks; r++) {
        CHECK(!memcmp(p->load + r * (int64_t)p->layer.num_experts, o->load,
                      p->layer.num_experts * sizeof *o->load),
              "%s: load of rank %d", p->name, r);
        CHECK(!memcmp(p->logical_load + r * (int64_t)p->layer.num_logical, o->logical_load,
                      p->layer.num_logical * sizeof *o->logical_load),
              "%s: logical load of rank %d", p->name, r);
        CHECK(p->demand[r] == o->demand[r], "%s: demand of rank %d is %d, not %lld", p->name, r,
              p->demand[r], (long long)o->demand[r]);
    }
}

static void compare_gradient(const problem *p, const oracle *o, int which, source *s)
{
    const bool wide = row_type(p) == EPIC_F64;
    const double nearest = wide ? 512 : 4096;
    const double step = wide ? 1e-5 : 1e-4, allowed = wide ? 1e-6 : tolerance(p);
    const int64_t n = numbers_in_all(p, which);
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double g = gradient_of(p, which, i);
        CHECK(isfinite(g), "%s: gradient of %s[%lld] is %g", p->name, given_names[which],
              (long long)i, g);
        size = fmax(size, fabs(g));
    }
    for (int64_t k = 0; k < (n < SAMPLES ? n : SAMPLES); k++) {
        const int64_t i = n < SAMPLES ? k : (int64_t)below(s, (uint32_t)n);
        const double got = gradient_of(p, which, i), want = difference(o, which, i, step);
        double off = fabs(got - want);
        /* Was it a step over the kink of an activation? */
        for (int k = 0; k < 2 && off > allowed * size; k++)
            off = fmin(off, fabs(got - difference(o, which, i, step / (k ? nearest : 64))));
        error = fmax(error, off);
        size = fmax(size, fabs(want));
    }
    /* Differences are off by 1e-11, and what is added to BEFORE in float32 by 6e-8. */
    const bool added = p->backward_flags & EPIC_ACCUMULATE && real_type(p) == EPIC_F32;
    const double least = wide || added ? 1e-2 : 1e-4;
    compare_within(p, given_names[which], error, fmax(size, least), allowed);
}

/* Ranks that sum the dense part must all have the same. */
static void compare_ranks(const problem *p)
{
    for (int i = 0; i < X && p->moe.flags & EPIC_SUM_DENSE; i++)
        for (int r = 1; is_dense(i) && r < p->num_ranks; r++) {
            const size_t bytes = (size_t)(numbers_of(p, i) * convert_bytes(real_type(p)));
            CHECK(!memcmp(p->gradient[i].data, (char *)p->gradient[i].data + (size_t)r * bytes,
                          bytes),
                  "%s: gradient of %s differs on rank %d", p->name, given_names[i], r);
        }
}

static void check_values(const problem *p, uint32_t seed)
{
    source s = source_of(seed);
    oracle o = oracle_make(p);
    o.rounds_weights = row_type(p) != EPIC_F64;
    oracle_run(&o);
    compare_forward(p, &o);
    o.rounds_weights = false;
    for (int i = 0; i < NUM_GIVEN; i++) compare_gradient(p, &o, i, &s);
    compare_ranks(p);
    oracle_free(&o);
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

/* ----------------------------------------------------------------- late is as good as early ---- */

static void compare_results(const problem *a, const problem *b)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < a->out.n; i++) {
        error = fmax(error, fabs(get(&a->out, i) - get(&b->out, i)));
        size = fmax(size, fabs(get(&a->out, i)));
    }
    compare(a, "out, late and early,", error, size);
    for (int which = 0; which < NUM_GIVEN; which++) {
        error = size = 0;
        for (int64_t i = 0; i < numbers_in_all(a, which); i++) {
            error = fmax(error, fabs(gradient_of(a, which, i) - gradient_of(b, which, i)));
            size = fmax(size, fabs(gradient_of(a, which, i)));
        }
        compare(a, given_names[which], error, size);
    }
}

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

/* --------------------------------------------------------------------- layers side by side ---- */

#define SIDE 3

/* Forward through all layers, backward from the last to the first: each has its own tag, sizes
 * and saved memory, and what one leaves in another's workspace must not matter. */
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
        part_tell(t[i]);
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

/* Gradients that nobody wants change nothing of the one that is. */
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

/* ------------------------------------------------------------------- float64 throughout ---- */

static void run_forward(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 7);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_tell(t);
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

/* The layer's gradients against differences of the layer: a float32 anywhere, be it of a weight or
 * of a loss, is 6e-8, and after the division by the step 6e-2. */
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

/* ------------------------------------------------------------------------------ not wanted ---- */

/* d_x that nobody wants, or only one rank, changes no bit of the gradients. */
static void run_without_d_x(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    part *t = part_make(p, rank, config, 7);
    if (rank == 0) t->backward.d_x.data = NULL;
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    part_tell(t);
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

int main(void)
{
    failures = share(sizeof *failures);
    test_random(cases(400));
    for (int biased = 0; biased < 2; biased++) {
        test_late_early(biased, EPIC_F64);
        test_late_early(biased, EPIC_F32);
    }
    test_side_by_side();
    for (uint32_t seed = 0; seed < 10; seed++) test_differences(seed);
    test_no_gradients();
    for (uint32_t seed = 0; seed < 20; seed++)
        test_no_d_x(seed, seed % 2 ? EPIC_BF16 : EPIC_F32);
    printf("%s; the largest error is %.2g of what is allowed\n", epic_blas_name(), worst);
    return atomic_load(failures) ? 1 : 0;
}
