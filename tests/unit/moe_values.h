/* SPDX-License-Identifier: Apache-2.0 */
/* Random layers of every kind. Compares their results with plain float64 loops, and their
 * gradients with central differences of these loops.
 * Tolerances are relative to the largest number of an array:
 *   F64 rows    1e-12; gradients 1e-6: central differences with a step of 1e-5 are off by 1e-10
 *               of the second derivatives, and by 1e-11 of the values themselves
 *   F32         1e-4
 *   BF16, F16   rows are rounded, to 2^-9 and 2^-12, in up to five places one after the other
 *               (expert, partial, sum over ranks, layer, and the same in backward). Differences
 *               for gradients of weights magnify this: 16 such roundings */
#ifndef MOE_VALUES_H
#define MOE_VALUES_H

#include "oracles/moe_oracle.h"

/* Draw only layers that CUDA contexts support. */
static bool for_devices;

#define SAMPLES 40 /* number of elements per array whose gradient is compared */

static inline double tolerance(const problem *p)
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

typedef struct kind { /* A row of the table of routers. */
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

static inline void draw_table(problem *p, source *s)
{
    p->table_rows = 5;
    p->wide_ids = below(s, 2);
    p->table = malloc((size_t)p->table_rows * p->layer.top_k * sizeof(int32_t));
    p->token_ids = malloc((size_t)p->total * sizeof(int32_t));
    for (int64_t i = 0; i < p->table_rows * (int64_t)p->layer.top_k; i++)
        p->table[i] = (int32_t)below(s, (uint32_t)columns_of(p) + 1) - 1; /* -1: no expert */
    for (int64_t t = 0; t < p->total; t++)
        p->token_ids[t] = (int32_t)below(s, (uint32_t)p->table_rows);
}

static inline void draw_router(problem *p, source *s, const kind *k)
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

static inline void draw_experts(problem *p, source *s, uint32_t seed, uint32_t type)
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

/* Gives every fourth layer replicas with weights of their own, so that their gradients can
 * be distinguished. Draws from a random source of its own. */
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

/* Draws a placement: whole blocks of experts with EPIC_TREE, else single experts. */
static inline void draw_placement(problem *p, source *s)
{
    const uint32_t ranks = (uint32_t)p->num_ranks, experts = p->layer.num_experts;
    const uint32_t turn = below(s, ranks);
    p->placed = experts % ranks || below(s, 2);
    for (uint32_t e = 0; e < experts; e++)
        p->rank_of_expert[e] = p->layer.sum_order == EPIC_TREE
                                   ? (int32_t)((e / (experts / ranks) + turn) % ranks)
                                   : (int32_t)below(s, ranks);
}

/* Forces the ids of every fourth layer without a table, half of them with weights. Draws from a
 * random source of its own. */
static inline void choose_forced(problem *p, uint32_t seed, bool *is_forced)
{
    source s = source_of(seed + 2000000);
    *is_forced = below(&s, 4) == 0;
    p->has_forced_weights = *is_forced && below(&s, 2);
}

/* Draws forced ids: any expert or zero-expert, also twice for a token, or no expert. */
static inline void draw_forced(problem *p, uint32_t seed)
{
    source s = source_of(seed + 3000000);
    const int64_t choices = p->total * p->layer.top_k;
    p->topk_idx_in = malloc((size_t)choices * sizeof(int32_t) + 1);
    for (int64_t i = 0; i < choices; i++)
        p->topk_idx_in[i] = (int32_t)below(&s, (uint32_t)columns_of(p) + 1) - 1;
}

static inline void draw_tokens(problem *p, source *s)
{
    const int64_t length = p->moe.sequence_tokens ? p->moe.sequence_tokens : 1;
    const bool none = below(s, 12) == 0;
    for (int r = 0; r < p->num_ranks; r++)
        p->tokens_of[r] = none ? 0 : (int64_t)below(s, 14 / (uint32_t)length) * length;
}

/* Draws a capacity: enough for everything, or with EPIC_OVERFLOW_DROP sometimes less. */
static inline void draw_capacity(problem *p, source *s)
{
    const int64_t choices = p->total * p->layer.top_k, align = p->layer.alignment;
    p->moe.capacity = choices + p->layer.num_experts * (align ? align - 1 : 0) + 1;
    p->planned = !below(s, 4) && !for_devices;
    if (!below(s, 3)) {
        p->layer.overflow = EPIC_OVERFLOW_DROP;
        p->layer.expert_capacity = below(s, 2) ? 1 + below(s, 6) : 0;
        if (below(s, 2) && !p->planned)
            p->moe.capacity = 1 + below(s, (uint32_t)(choices / p->num_ranks + align));
    }
}

/* Makes a layer drop the choices that do not fit. */
static inline void drop_choices(problem *p)
{
    p->layer.overflow = EPIC_OVERFLOW_DROP;
    p->moe.flags &= ~(uint32_t)EPIC_INVARIANT; /* such layers must not drop choices */
}

/* Gives half of the layers that may drop choices a capacity_limit on each rank: 0 or less,
 * about the number of slots that the rank needs, or more than the capacity. */
static inline void draw_limits(problem *p, uint32_t seed)
{
    source s = source_of(seed + 7000000);
    const int64_t slots = p->total * p->layer.top_k / p->num_ranks + p->layer.alignment;
    if (p->layer.overflow != EPIC_OVERFLOW_DROP || below(&s, 2)) return;
    p->is_limited = true;
    for (int r = 0; r < p->num_ranks; r++) {
        const int64_t limits[] = {-(int64_t)below(&s, 3), 1 + below(&s, (uint32_t)slots + 1),
                                  1 + below(&s, (uint32_t)slots + 1), p->moe.capacity + 5};
        p->limit_of[r] = (int32_t)limits[below(&s, 4)];
    }
}

/* Gives every second layer that supports it the flag EPIC_INVARIANT. Random replicas of an
 * expert may be in several leaves, which this flag does not allow. */
static inline void choose_invariant(problem *p, uint32_t seed)
{
    source s = source_of(seed + 4000000);
    const bool supported = p->layer.sum_order == EPIC_TREE &&
                           p->layer.overflow == EPIC_OVERFLOW_ERROR && !p->layer.num_logical;
    if (supported && below(&s, 2)) p->moe.flags |= EPIC_INVARIANT;
}

/* Makes the first columns of W_gate attract tokens and the last ones repel them, for full
 * and empty slabs. */
static inline void skew(problem *p)
{
    const int64_t columns = columns_of(p), hidden = p->experts.hidden;
    for (int64_t t = 0; t < p->total; t++) put(&p->given[X], t * hidden, 1);
    put(&p->given[W_GATE], 0, 4);
    for (int64_t e = columns / 2; e < columns; e++) put(&p->given[W_GATE], e, -6);
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* CUDA contexts round gate and up to 16 bits. If rounding moved a value over the limit, it
 * would get the slope of the other side. So the limit is placed in the widest gap between 0.4
 * and 0.8. */
static inline void place_limit(problem *p)
{
    oracle o = oracle_make(p);
    seen.num = 0;
    seen.on = true;
    oracle_run(&o);
    seen.on = false;
    qsort(seen.at, (size_t)seen.num, sizeof *seen.at, by_size);
    double room = 0, before = 0.4;
    for (int i = 0; i <= seen.num; i++) {
        const double next = i < seen.num && seen.at[i] < 0.8 ? seen.at[i] : 0.8;
        if (next > 0.4 && next - before > room) {
            room = next - before;
            p->experts.limit = (float)(before + room / 2);
        }
        if (next > 0.4) before = next;
        if (next == 0.8) break;
    }
    if (p->has_shared) p->shared.limit = p->experts.limit;
    oracle_free(&o);
}

static inline problem draw(uint32_t seed, int num_ranks, uint32_t type)
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
    if (below(&s, 2)) p.moe.flags = EPIC_SUM_DENSE;
    if (!below(&s, 3)) p.backward_flags = EPIC_ACCUMULATE;
    draw_tokens(&p, &s);
    bool is_forced = false;
    if (!k->table) choose_forced(&p, seed, &is_forced);
    make_given(&p, &s);
    if (is_forced) draw_forced(&p, seed);
    draw_capacity(&p, &s);
    draw_limits(&p, seed);
    choose_invariant(&p, seed);
    if (!below(&s, 3)) skew(&p);
    if (k->table) draw_table(&p, &s);
    if (for_devices && p.experts.activation >= EPIC_CLAMPED_SWIGLU) place_limit(&p);
    snprintf(
        p.name, sizeof p.name,
        "seed %u, %s, %d ranks, %u experts, %u logical, %lld tokens, %s rows, weighting %u",
        seed, k->name, num_ranks, p.layer.num_experts, p.layer.num_logical, (long long)p.total,
        convert_name(type), p.experts.weighting);
    return p;
}

/* -------------------------------------------------------------------------- comparing ---- */

static double worst; /* largest error divided by its tolerance so far */

static inline void compare_within(const problem *p, const char *what, double error, double size,
                                  double allowed)
{
    const double relative = error / (size > 1e-30 ? size : 1);
    CHECK(relative <= allowed, "%s: %s is off by %g of %g", p->name, what, error, size);
    worst = fmax(worst, relative / allowed);
}

static inline void compare(const problem *p, const char *what, double error, double size)
{
    compare_within(p, what, error, size, tolerance(p));
}

static inline void compare_loss(const problem *p, int which, const char *name, double want)
{
    const double allowed = p->narrow_losses ? 1e-6 : tolerance(p);
    compare_within(p, name, fabs(loss_of(p, which) - want), fabs(want), allowed);
}

/* Compares the ids that the layer returned, and their weights. */
static inline void compare_choices(const problem *p, const oracle *o)
{
    const int64_t k = p->layer.top_k;
    double error = 0, size = 0, want[64];
    for (int64_t t = 0; t < p->total; t++) {
        oracle_weigh(o, t, want);
        for (int64_t i = 0; i < k; i++) {
            const double off = fabs(get(&p->topk_weights, t * k + i) - want[i]);
            error = off <= error ? error : off; /* a NaN stays */
            size = fmax(size, fabs(want[i]));
        }
    }
    CHECK(!memcmp(p->topk_idx, o->chosen, (size_t)(p->total * k) * sizeof *o->chosen),
          "%s: topk_idx_out", p->name);
    compare_within(p, "topk_weights_out", error, size, row_type(p) == EPIC_F64 ? 1e-12 : 1e-4);
}

static inline void compare_forward(const problem *p, const oracle *o)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < p->total * p->experts.hidden; i++) {
        const double off = fabs(get(&p->out, i) - o->out[i]);
        error = off <= error ? error : off; /* keep a NaN */
        size = fmax(size, fabs(o->out[i]));
    }
    compare(p, "out", error, size);
    const oracle_losses loss = oracle_loss(o);
    compare_loss(p, LOSS, "loss", loss.balance + loss.z);
    compare_loss(p, BALANCE_LOSS, "balance_loss", loss.balance);
    compare_loss(p, Z_LOSS, "z_loss", loss.z);
    compare_choices(p, o);
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

/* Returns the size of gradients to which errors of smaller gradients are compared. Float32
 * gradients that are added to BEFORE are off by 6e-8, also if they are small.  The gradient of
 * a scale is a sum of products with rows, which have 16 bits. If the capacity keeps few short
 * rows, this sum may be much smaller than its terms, so an error is compared to the size of the
 * terms. */
static inline double least_size(const problem *p, int which)
{
    const bool added = p->backward_flags & EPIC_ACCUMULATE && real_type(p) == EPIC_F32;
    const bool has_16_bits = row_type(p) == EPIC_BF16 || row_type(p) == EPIC_F16;
    const bool cancels = which == SCALE_OF_EXPERT && has_16_bits;
    return cancels ? 5e-2 : added ? 1e-2 : 1e-4;
}

static inline void compare_gradient(const problem *p, const oracle *o, int which, source *s)
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
        /* Did the difference step over the kink of an activation? */
        for (int k = 0; k < 2 && off > allowed * size; k++)
            off = fmin(off, fabs(got - difference(o, which, i, step / (k ? nearest : 64))));
        error = fmax(error, off);
        size = fmax(size, fabs(want));
    }
    const double least = wide ? 1e-2 : least_size(p, which); /* differences are off by 1e-11 */
    compare_within(p, given_names[which], error, fmax(size, least), allowed);
}

/* Checks that all ranks have the same dense gradients if they sum them. */
static inline void compare_ranks(const problem *p)
{
    for (int i = 0; i < X && p->moe.flags & EPIC_SUM_DENSE; i++)
        for (int r = 1; is_dense(i) && r < p->num_ranks; r++) {
            const size_t bytes = (size_t)(numbers_of(p, i) * convert_bytes(real_type(p)));
            CHECK(!memcmp(p->gradient[i].data, (char *)p->gradient[i].data + (size_t)r * bytes,
                          bytes),
                  "%s: gradient of %s differs on rank %d", p->name, given_names[i], r);
        }
}

static inline void check_values(const problem *p, uint32_t seed)
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

static inline void compare_results(const problem *a, const problem *b)
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
        compare(a, given_names[which], error, fmax(size, least_size(a, which)));
    }
}

#endif
