/* SPDX-License-Identifier: Apache-2.0 */
/* The router and its losses against plain float64 loops, for every model that is known to need
 * another combination of steps; gradients against central differences of those loops. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"
#include "losses.h"
#include "rules/convert.h"

#define MOST_K 64
#define STEP 1e-5 /* of central differences: their error is about STEP^2 */

static int failures;

#define CHECK(condition, ...)                                      \
    do {                                                           \
        if (!(condition) && failures++ < 20) {                     \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            printf("\n");                                          \
        }                                                          \
    } while (0)

static uint64_t state = 0x9e3779b97f4a7c15u;

static double uniform(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}

static double between(double low, double high)
{
    return low + (high - low) * uniform();
}

/* ------------------------------------------------------------------------------- oracle ---- */

static double plain_sigmoid(double z)
{
    return z > 0 ? 1 / (1 + exp(-z)) : exp(z) / (1 + exp(z));
}

static void plain_softmax(const double *z, int n, double *p)
{
    double top = z[0], sum = 0;
    for (int i = 1; i < n; i++) top = fmax(top, z[i]);
    for (int i = 0; i < n; i++) sum += p[i] = exp(z[i] - top);
    for (int i = 0; i < n; i++) p[i] /= sum;
}

static void plain_scores(const epic_router *r, const double *z, int n, double *s)
{
    if (r->score == EPIC_SCORE_SOFTMAX) plain_softmax(z, n, s);
    for (int i = 0; i < n; i++) {
        if (r->score == EPIC_SCORE_SIGMOID) s[i] = plain_sigmoid(z[i]);
        if (r->score == EPIC_SCORE_SQRTSOFTPLUS)
            s[i] = sqrt(z[i] > 30 ? z[i] : log1p(exp(z[i])));
        if (r->score == EPIC_SCORE_LOGITS) s[i] = z[i];
    }
}

/* Picks the k largest, one after the other.  *near: two of them are so near, without being
 * equal, that float32 may see it otherwise. */
static void plain_best(const double *v, int n, int k, int32_t *out, bool *near)
{
    bool *taken = calloc((size_t)n, 1);
    double last = INFINITY;
    for (int j = 0; j <= k && j < n; j++) {
        int best = -1;
        for (int i = 0; i < n; i++)
            if (!taken[i] && (best < 0 || v[i] > v[best])) best = i;
        const double gap = last - v[best];
        if (gap > 0 && gap < 1e-6 * (1 + fabs(last))) *near = true;
        last = v[best];
        taken[best] = true;
        if (j < k) out[j] = best;
    }
    free(taken);
}

static void plain_groups(const epic_router *r, double *v, int n, bool *near)
{
    const int groups = (int)r->num_groups, each = n / groups;
    const int best = r->group_best ? (int)r->group_best : (int)(r->top_k / r->topk_groups);
    const int m = r->group_score == EPIC_GROUP_MAX ? 1 : best;
    double *score = calloc((size_t)groups, sizeof *score);
    int32_t *order = calloc((size_t)n, sizeof *order);
    bool *kept = calloc((size_t)groups, 1);
    bool ignored = false;
    for (int g = 0; g < groups; g++) {
        plain_best(v + g * each, each, m, order, &ignored);
        for (int i = 0; i < m; i++) score[g] += v[g * each + order[i]];
    }
    plain_best(score, groups, (int)r->topk_groups, order, near);
    for (uint32_t i = 0; i < r->topk_groups; i++) kept[order[i]] = true;
    for (int i = 0; i < n; i++)
        if (!kept[i / each]) v[i] = r->group_others == EPIC_OTHERS_ZERO ? 0 : -INFINITY;
    free(score);
    free(order);
    free(kept);
}

/* `steep`: the scores underflow, so choose on the logits, which rise with them, unless something
 * is added to scores. */
static void plain_choose(const epic_router *r, const double *z, const float *bias, int n,
                         bool steep, int32_t *idx, bool *near)
{
    double *v = calloc((size_t)n, sizeof *v);
    const bool added = bias || (r->num_groups > 0 && r->group_score == EPIC_GROUP_SUM);
    plain_scores(r, z, n, v);
    for (int i = 0; i < n; i++) v[i] = (steep && !added ? z[i] : v[i]) + (bias ? bias[i] : 0);
    if (r->num_groups > 0) plain_groups(r, v, n, near);
    plain_best(v, n, (int)r->top_k, idx, near);
    if (!added) *near = false; /* then float32 compares what float64 does */
    free(v);
}

static void plain_weights(const epic_router *r, const double *z, int n, const int32_t *idx,
                          double *w)
{
    const int k = (int)r->top_k;
    double chosen[MOST_K] = {0}, sum = 0;
    double *s = calloc((size_t)n, sizeof *s);
    plain_scores(r, z, n, s);
    for (int i = 0; i < k; i++) chosen[i] = idx[i] < 0 ? -INFINITY : z[idx[i]];
    if (r->weight_rule == EPIC_WEIGHT_SOFTMAX_CHOSEN) plain_softmax(chosen, k, w);
    for (int i = 0; i < k; i++) {
        if (r->weight_rule == EPIC_WEIGHT_OF_SCORE) w[i] = idx[i] < 0 ? 0 : s[idx[i]];
        if (r->weight_rule == EPIC_WEIGHT_SIGMOID_CHOSEN) w[i] = plain_sigmoid(chosen[i]);
        sum += w[i];
    }
    for (int i = 0; i < k; i++) {
        if (r->normalize == EPIC_NORMALIZE_SUM) w[i] /= sum + r->eps;
        if (r->normalize == EPIC_NORMALIZE_CLAMPED) w[i] /= fmax(sum, r->norm_min);
        w[i] *= r->scale == 0 ? 1 : r->scale;
    }
    free(s);
}

/* ------------------------------------------------------------------------------- models ---- */

typedef struct model {
    const char *name;
    epic_router router;
    double bias; /* biases lie between -bias and bias */
    bool table;
} model;

#define SOFTMAX .score = EPIC_SCORE_SOFTMAX
#define SIGMOID .score = EPIC_SCORE_SIGMOID
#define SQRTSOFTPLUS .score = EPIC_SCORE_SQRTSOFTPLUS
#define LOGITS .score = EPIC_SCORE_LOGITS
#define BY_SUM .normalize = EPIC_NORMALIZE_SUM
#define DEEPSEEK .num_groups = 8, .topk_groups = 4, .group_score = EPIC_GROUP_SUM

static const model models[] = {
    {"Mixtral", {.num_experts = 8, .top_k = 2, SOFTMAX, BY_SUM}, 0, false},
    {"Qwen3-MoE", {.num_experts = 128, .top_k = 8, SOFTMAX, BY_SUM}, 0, false},
    {"Qwen3-MoE, not normalized", {.num_experts = 128, .top_k = 8, SOFTMAX}, 0, false},
    {"OLMoE", {.num_experts = 64, .top_k = 8, SOFTMAX}, 0, false},
    {"gpt-oss",
     {.num_experts = 32, .top_k = 4, LOGITS, .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN},
     0,
     false},
    {"DeepSeek-V2",
     {.num_experts = 160, .top_k = 6, SOFTMAX, .num_groups = 8, .topk_groups = 3, .scale = 16},
     0,
     false},
    {"DeepSeek-V3",
     {.num_experts = 256, .top_k = 8, SIGMOID, DEEPSEEK, .group_best = 2, BY_SUM, .scale = 2.5},
     0.3,
     false},
    {"DeepSeek-V3 (Hugging Face)",
     {.num_experts = 256,
      .top_k = 8,
      SIGMOID,
      DEEPSEEK,
      .group_best = 2,
      BY_SUM,
      .eps = 1e-20,
      .group_others = EPIC_OTHERS_ZERO,
      .scale = 2.5},
     1.2,
     false},
    {"Megatron, softmax first",
     {.num_experts = 64, .top_k = 8, SOFTMAX, DEEPSEEK, BY_SUM, .eps = 1e-20, .scale = 1.5},
     0,
     false},
    {"Megatron, softmax last",
     {.num_experts = 64, .top_k = 6, SOFTMAX, .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN},
     0,
     false},
    {"Megatron, sigmoid",
     {.num_experts = 64, .top_k = 8, SIGMOID, DEEPSEEK, BY_SUM, .eps = 1e-20},
     0.1,
     false},
    {"Megatron, one expert", {.num_experts = 64, .top_k = 1, SIGMOID}, 0.1, false},
    {"DeepSeek-V4",
     {.num_experts = 96, .top_k = 6, SQRTSOFTPLUS, BY_SUM, .eps = 1e-20, .scale = 1.5},
     0.2,
     false},
    {"DeepSeek-V4, first layers",
     {.num_experts = 96, .top_k = 6, SQRTSOFTPLUS, BY_SUM, .eps = 1e-20, .scale = 1.5},
     0,
     true},
    {"Llama-4",
     {.num_experts = 16, .top_k = 1, LOGITS, .weight_rule = EPIC_WEIGHT_SIGMOID_CHOSEN},
     0,
     false},
    {"ERNIE-4.5",
     {.num_experts = 64,
      .top_k = 6,
      SOFTMAX,
      .normalize = EPIC_NORMALIZE_CLAMPED,
      .norm_min = 0.45},
     0.02,
     false},
    {"zero-experts",
     {.num_experts = 24, .zero_experts = 9, .top_k = 5, SOFTMAX, .scale = 6},
     0.01,
     false},
    {"all experts", {.num_experts = 7, .top_k = 7, SIGMOID, BY_SUM}, 0.1, false},
    {"one expert", {.num_experts = 1, .top_k = 1, SOFTMAX}, 0, false},
    {"odd and wide", {.num_experts = 1601, .top_k = 64, SOFTMAX, BY_SUM}, 0, false},
};
#define NUM_MODELS ((int)(sizeof models / sizeof *models))

typedef enum pattern { RANDOM, WIDE, TIES, EXTREME } pattern;
static const char *const patterns[] = {"random", "wide", "ties", "extreme"};

static double draw(pattern pattern)
{
    static const double far[] = {-1e4, 1e4, -9990, 9990, -200, 80, -80, -18, 0, 1};
    if (pattern == RANDOM) return between(-6, 6);
    if (pattern == WIDE) return between(-40, 40);
    if (pattern == TIES) return floor(between(0, 4)) / 2;
    return far[(int)between(0, 10)];
}

/* -------------------------------------------------------------------------------- cases ---- */

typedef struct problem {
    const model *model;
    int n, k, tokens;
    uint32_t type;
    double *z;    /* [tokens, n], exactly what the logits are */
    void *logits; /* the same, of type */
    float bias[2048];
    int32_t *table; /* [50, k] */
    int64_t *ids;
    int32_t *idx;
    void *weights, *scores;
    void *workspace;
    size_t workspace_bytes;
} problem;

static uint32_t weights_type(const problem *p)
{
    return p->type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
}

static double number(const void *array, uint32_t type, int64_t i)
{
    float x;
    if (type == EPIC_F64) return ((const double *)array)[i];
    convert_to_float(&x, (const char *)array + i * convert_bytes(type), type, 1);
    return x;
}

static void put(void *array, uint32_t type, int64_t i, double x)
{
    const float narrow = (float)x;
    if (type == EPIC_F64)
        ((double *)array)[i] = x;
    else
        convert_from_float((char *)array + i * convert_bytes(type), type, &narrow, 1);
}

static void make_problem(problem *p, const model *m, int tokens, uint32_t type, pattern pattern)
{
    *p = (problem){.model = m, .tokens = tokens, .type = type};
    p->n = (int)(m->router.num_experts + m->router.zero_experts);
    p->k = (int)m->router.top_k;
    const size_t all = (size_t)tokens * (size_t)p->n;
    const size_t chosen = (size_t)tokens * (size_t)p->k;
    p->z = malloc(all * sizeof *p->z);
    p->logits = malloc(all * 8);
    p->idx = malloc(chosen * sizeof *p->idx);
    p->weights = malloc(chosen * 8);
    p->scores = malloc(all * 8);
    p->table = malloc(50 * (size_t)p->k * sizeof *p->table);
    p->ids = malloc((size_t)tokens * sizeof *p->ids);
    p->workspace_bytes = epic_router_workspace(&m->router);
    CHECK(p->workspace_bytes > 0, "%s: %s", m->name, epic_error(NULL));
    p->workspace = malloc(p->workspace_bytes);
    for (size_t i = 0; i < all; i++) {
        put(p->logits, type, (int64_t)i, draw(pattern));
        p->z[i] = number(p->logits, type, (int64_t)i);
    }
    for (int i = 0; i < p->n; i++)
        p->bias[i] = (float)(pattern == TIES ? m->bias : between(-m->bias, m->bias));
    for (int i = 0; i < 50 * p->k; i++) p->table[i] = (int32_t)between(0, p->n);
    if (p->k > 1) p->table[1] = -1;
    for (int t = 0; t < tokens; t++) p->ids[t] = t % 50;
}

static void free_problem(problem *p)
{
    free(p->z);
    free(p->logits);
    free(p->idx);
    free(p->weights);
    free(p->scores);
    free(p->table);
    free(p->ids);
    free(p->workspace);
}

static void run_forward(problem *p)
{
    const model *m = p->model;
    const epic_router_args args = {
        .router = &m->router,
        .logits = p->logits,
        .num_tokens = p->tokens,
        .bias = m->bias > 0 ? p->bias : NULL,
        .token_ids = m->table ? p->ids : NULL,
        .table = m->table ? p->table : NULL,
        .table_rows = 50,
        .workspace = p->workspace,
        .workspace_bytes = p->workspace_bytes,
        .topk_idx = p->idx,
        .weights = p->weights,
        .scores = p->scores,
        .type = p->type,
        .weights_type = weights_type(p),
        .token_id_type = EPIC_I64,
    };
    CHECK(epic_router_forward(NULL, &args) == EPIC_OK, "%s: %s", m->name, epic_error(NULL));
}

/* Float32 has no numbers below 1e-45, and few digits below 1e-38. */
static bool same(double got, double want, double tolerance)
{
    return fabs(got - want) <= tolerance * fabs(want) + 1e-37 || (got != got && want != want);
}

static void check_numbers(const problem *p, int t, const char *pattern)
{
    const model *m = p->model;
    const double tolerance = p->type == EPIC_F64 ? 1e-12 : 1e-6;
    const double *z = p->z + t * p->n;
    const int32_t *idx = p->idx + t * p->k;
    double w[MOST_K], sum = 0, *s = malloc((size_t)p->n * sizeof *s);
    plain_weights(&m->router, z, p->n, idx, w);
    plain_scores(&m->router, z, p->n, s);
    for (int i = 0; i < p->k; i++) sum += idx[i] < 0 ? 0 : s[idx[i]];
    for (int i = 0; i < p->k; i++) {
        const double got = number(p->weights, weights_type(p), t * p->k + i);
        /* Scores below what float32 can tell from nothing, or all of them there. */
        const bool tiny = idx[i] >= 0 && s[idx[i]] < 1e-37;
        if (m->router.weight_rule == EPIC_WEIGHT_OF_SCORE && (tiny || sum < 1e-30)) w[i] = got;
        CHECK(same(got, w[i], tolerance) && got == got,
              "%s, %s, type %u, token %d, k %d: %.9g is not %.9g", m->name, pattern, p->type, t,
              i, got, w[i]);
    }
    for (int i = 0; i < p->n; i++) {
        const double got = number(p->scores, weights_type(p), t * p->n + i);
        CHECK(same(got, s[i], tolerance),
              "%s, %s, type %u, token %d: score %d %.9g is not %.9g", m->name, pattern, p->type,
              t, i, got, s[i]);
    }
    free(s);
}

/* Returns how many tokens were too near to tell. */
static int check_forward(problem *p, pattern pattern)
{
    const model *m = p->model;
    int unsure = 0;
    run_forward(p);
    for (int t = 0; t < p->tokens; t++) {
        int32_t want[MOST_K];
        bool near = false;
        if (m->table)
            memcpy(want, p->table + p->ids[t] * p->k, (size_t)p->k * sizeof *want);
        else
            plain_choose(&m->router, p->z + t * p->n, m->bias > 0 ? p->bias : NULL, p->n,
                         pattern == EXTREME, want, &near);
        unsure += near;
        CHECK(near || memcmp(want, p->idx + t * p->k, (size_t)p->k * sizeof *want) == 0,
              "%s, %s, type %u, token %d: first chosen %d, not %d", m->name, patterns[pattern],
              p->type, t, p->idx[t * p->k], want[0]);
        check_numbers(p, t, patterns[pattern]);
    }
    return unsure;
}

static void test_forward(void)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F16, EPIC_F64};
    for (int m = 0; m < NUM_MODELS; m++)
        for (int type = 0; type < 4; type++)
            for (pattern pattern = RANDOM; pattern <= EXTREME; pattern++) {
                problem p;
                const int tokens = models[m].router.num_experts > 1000 ? 5 : 60;
                make_problem(&p, &models[m], tokens, types[type], pattern);
                const int unsure = check_forward(&p, pattern);
                CHECK(pattern != RANDOM || unsure <= 3, "%s: %d of %d tokens were too near",
                      models[m].name, unsure, tokens);
                free_problem(&p);
            }
}

/* ---------------------------------------------------------------------------- gradients ---- */

/* |a - b| / |b|, as vectors; |a - b| if b is nothing but the error of differences. */
static double distance(const void *a, uint32_t type, const double *b, int64_t n)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = number(a, type, i) - b[i];
        difference += d * d;
        size += b[i] * b[i];
    }
    return sqrt(difference) / (size > 1e-16 ? sqrt(size) : 1);
}

static double weighted_sum(const problem *p, const double *z, const int32_t *idx,
                           const double *cotangent)
{
    double w[MOST_K], sum = 0;
    plain_weights(&p->model->router, z, p->n, idx, w);
    for (int i = 0; i < p->k; i++) sum += cotangent[i] * w[i];
    return sum;
}

static void differences(const problem *p, const double *cotangents, double *out)
{
    double *z = malloc((size_t)p->n * sizeof *z);
    for (int t = 0; t < p->tokens; t++) {
        const int32_t *idx = p->idx + t * p->k;
        const double *c = cotangents + t * p->k;
        memcpy(z, p->z + t * p->n, (size_t)p->n * sizeof *z);
        for (int i = 0; i < p->n; i++) {
            const double here = z[i];
            z[i] = here + STEP;
            const double above = weighted_sum(p, z, idx, c);
            z[i] = here - STEP;
            const double below = weighted_sum(p, z, idx, c);
            z[i] = here;
            out[t * p->n + i] = (above - below) / (2 * STEP);
        }
    }
    free(z);
}

static void check_backward(problem *p, uint32_t grad_type, double tolerance)
{
    const model *m = p->model;
    const int64_t all = (int64_t)p->tokens * p->n, chosen = (int64_t)p->tokens * p->k;
    double *c = malloc((size_t)chosen * sizeof *c), *want = malloc((size_t)all * sizeof *want);
    void *d_weights = malloc((size_t)chosen * 8), *d_logits = malloc((size_t)all * 8);
    run_forward(p);
    for (int64_t i = 0; i < chosen; i++) {
        put(d_weights, weights_type(p), i, between(-1, 1));
        c[i] = number(d_weights, weights_type(p), i);
    }
    differences(p, c, want);
    epic_router_backward_args args = {
        .router = &m->router,
        .logits = p->logits,
        .num_tokens = p->tokens,
        .topk_idx = p->idx,
        .d_weights = d_weights,
        .workspace = p->workspace,
        .workspace_bytes = p->workspace_bytes,
        .d_logits = d_logits,
        .type = p->type,
        .weights_type = weights_type(p),
        .grad_type = grad_type,
    };
    CHECK(epic_router_backward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    const uint32_t type = grad_type ? grad_type : p->type;
    const double d = distance(d_logits, type, want, all);
    CHECK(d <= tolerance, "%s, type %u: gradient off by %g", m->name, p->type, d);

    args.flags = EPIC_ACCUMULATE;
    CHECK(epic_router_backward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    for (int64_t i = 0; i < all; i++) want[i] *= 2;
    const double twice = distance(d_logits, type, want, all);
    CHECK(twice <= tolerance, "%s, type %u: accumulated gradient off by %g", m->name, p->type,
          twice);
    free(c);
    free(want);
    free(d_weights);
    free(d_logits);
}

static void test_backward(void)
{
    for (int m = 0; m < NUM_MODELS; m++) {
        static const struct {
            uint32_t type, grad_type;
            double tolerance;
        } cases[] = {{EPIC_F64, 0, 1e-6},  {EPIC_F64, EPIC_F32, 1e-6},
                     {EPIC_F32, 0, 1e-4},  {EPIC_BF16, EPIC_F32, 1e-4},
                     {EPIC_BF16, 0, 1e-2}, {EPIC_F16, 0, 2e-3}};
        for (int i = 0; i < 6; i++) {
            problem p;
            const int tokens = models[m].router.num_experts > 100 ? 2 : 7;
            if (models[m].router.num_experts > 1000 && i > 0) continue;
            make_problem(&p, &models[m], tokens, cases[i].type, RANDOM);
            check_backward(&p, cases[i].grad_type, cases[i].tolerance);
            free_problem(&p);
        }
    }
}

/* Far logits: weights and gradients stay finite. */
static void test_far_gradients(void)
{
    for (int m = 0; m < NUM_MODELS; m++) {
        problem p;
        make_problem(&p, &models[m], 20, EPIC_F32, EXTREME);
        run_forward(&p);
        const int64_t all = (int64_t)p.tokens * p.n;
        float *d_weights = malloc((size_t)(p.tokens * p.k) * sizeof *d_weights);
        float *d_logits = malloc((size_t)all * sizeof *d_logits);
        for (int i = 0; i < p.tokens * p.k; i++) d_weights[i] = (float)between(-1, 1);
        const epic_router_backward_args args = {.type = EPIC_F32,
                                                .router = &models[m].router,
                                                .logits = p.logits,
                                                .num_tokens = p.tokens,
                                                .topk_idx = p.idx,
                                                .d_weights = d_weights,
                                                .workspace = p.workspace,
                                                .workspace_bytes = p.workspace_bytes,
                                                .d_logits = d_logits};
        CHECK(epic_router_backward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
        for (int64_t i = 0; i < all; i++)
            CHECK(isfinite(d_logits[i]), "%s: gradient %lld is %g", models[m].name,
                  (long long)i, d_logits[i]);
        free(d_weights);
        free(d_logits);
        free_problem(&p);
    }
}

/* ------------------------------------------------------------------------------- losses ---- */

typedef struct loss_case {
    bool z;       /* else balance */
    int sequence; /* tokens of a sequence, or 0 */
    const int32_t *load;
    double coeff;
    int total_tokens;
} loss_case;

static void plain_probabilities(const epic_router *r, const double *z, int n, double *p)
{
    double sum = 0;
    if (r->score == EPIC_SCORE_SOFTMAX || r->score == EPIC_SCORE_LOGITS) {
        plain_softmax(z, n, p);
        return;
    }
    plain_scores(r, z, n, p);
    for (int i = 0; i < n; i++) sum += p[i];
    for (int i = 0; i < n; i++) p[i] /= sum;
}

/* Of `tokens` tokens from the first on: E coeff / (k T^2) sum_e (sum_t P) n_e. */
static double plain_balance(const problem *p, const double *z, int tokens, const int32_t *load,
                            double coeff, double T)
{
    const epic_router *r = &p->model->router;
    double sum = 0, *row = malloc((size_t)p->n * sizeof *row);
    for (int t = 0; t < tokens; t++) {
        plain_probabilities(r, z + t * p->n, p->n, row);
        for (uint32_t e = 0; e < r->num_experts; e++) sum += row[e] * load[e];
    }
    free(row);
    return r->num_experts * coeff / (r->top_k * T * T) * sum;
}

static double plain_sequences(const problem *p, const double *z, const loss_case *l)
{
    const int num_sequences = l->total_tokens / l->sequence;
    double sum = 0;
    int32_t *load = malloc((size_t)p->n * sizeof *load);
    for (int first = 0; first < p->tokens; first += l->sequence) {
        memset(load, 0, (size_t)p->n * sizeof *load);
        for (int i = first * p->k; i < (first + l->sequence) * p->k; i++)
            if (p->idx[i] >= 0) load[p->idx[i]]++;
        sum += plain_balance(p, z + first * p->n, l->sequence, load, l->coeff, l->sequence);
    }
    free(load);
    return sum / num_sequences;
}

static double plain_loss(const problem *p, const double *z, const loss_case *l)
{
    double sum = 0;
    if (!l->z && l->sequence) return plain_sequences(p, z, l);
    if (!l->z) return plain_balance(p, z, p->tokens, l->load, l->coeff, l->total_tokens);
    for (int t = 0; t < p->tokens; t++) {
        double inner = 0;
        for (int i = 0; i < p->n; i++) inner += exp(z[t * p->n + i]);
        sum += log(inner) * log(inner);
    }
    return l->coeff / l->total_tokens * sum;
}

static loss_args args_of(const problem *p, const loss_case *l)
{
    return (loss_args){
        .router = &p->model->router,
        .logits = p->logits,
        .num_tokens = p->tokens,
        .total_tokens = l->total_tokens,
        .load = l->load,
        .topk_idx = p->idx,
        .sequence_tokens = l->sequence,
        .coeff = l->coeff,
        .workspace = p->workspace,
        .workspace_bytes = p->workspace_bytes,
        .type = p->type,
        .loss_type = EPIC_F64,
    };
}

static void check_loss(problem *p, const loss_case *l)
{
    const bool exact = p->type == EPIC_F64;
    const int64_t all = (int64_t)p->tokens * p->n;
    const float d_loss = 0.75f;
    double loss = 0, *want = malloc((size_t)all * sizeof *want);
    void *d_logits = malloc((size_t)all * 8);
    loss_args args = args_of(p, l);
    args.loss = &loss;
    CHECK((l->z ? z_loss_forward : balance_loss_forward)(NULL, &args) == EPIC_OK, "%s",
          epic_error(NULL));
    CHECK(same(loss, plain_loss(p, p->z, l), exact ? 1e-12 : 1e-6), "%s: loss %.9g is not %.9g",
          p->model->name, loss, plain_loss(p, p->z, l));

    for (int64_t i = 0; i < all; i++) {
        const double here = p->z[i];
        p->z[i] = here + STEP;
        const double above = plain_loss(p, p->z, l);
        p->z[i] = here - STEP;
        const double below = plain_loss(p, p->z, l);
        p->z[i] = here;
        want[i] = d_loss * (above - below) / (2 * STEP);
    }
    args.d_logits = d_logits;
    args.d_loss = &d_loss;
    CHECK((l->z ? z_loss_backward : balance_loss_backward)(NULL, &args) == EPIC_OK, "%s",
          epic_error(NULL));
    const double d = distance(d_logits, p->type, want, all);
    CHECK(d <= (exact ? 1e-6 : 1e-4), "%s, %s loss, sequence %d, type %u: gradient off by %g",
          p->model->name, l->z ? "z" : "balance", l->sequence, p->type, d);
    free(want);
    free(d_logits);
}

static void test_losses(void)
{
    for (int m = 0; m < NUM_MODELS; m++)
        for (int type = 0; type < 2; type++) {
            problem p;
            int32_t load[256];
            if (models[m].router.num_experts > 130) continue;
            make_problem(&p, &models[m], 6, type ? EPIC_F64 : EPIC_F32, RANDOM);
            run_forward(&p);
            for (int e = 0; e < 256; e++) load[e] = (int32_t)between(0, 9);
            check_loss(&p, &(loss_case){.load = load, .coeff = 0.01, .total_tokens = 10});
            check_loss(&p, &(loss_case){.sequence = 3, .coeff = 0.5, .total_tokens = 12});
            check_loss(&p, &(loss_case){.z = true, .coeff = 0.001, .total_tokens = 9});
            free_problem(&p);
        }
}

/* The parts of two ranks, one without tokens of a third, add up to the whole. */
static void test_losses_add_up(void)
{
    problem p;
    int32_t load[8];
    double whole = 0, sum = 0;
    make_problem(&p, &models[0], 12, EPIC_F32, RANDOM);
    run_forward(&p);
    for (int e = 0; e < 8; e++) load[e] = e;
    const loss_case cases[] = {{.load = load, .coeff = 1, .total_tokens = 12},
                               {.sequence = 4, .coeff = 1, .total_tokens = 12},
                               {.z = true, .coeff = 1, .total_tokens = 12}};
    for (int c = 0; c < 3; c++) {
        loss_call *loss = cases[c].z ? z_loss_forward : balance_loss_forward;
        loss_args args = args_of(&p, &cases[c]);
        args.loss = &whole;
        CHECK(loss(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
        sum = 0;
        for (int rank = 0; rank < 3; rank++) {
            static const int first[] = {0, 4, 12, 12};
            double part = -1;
            args.loss = &part;
            args.num_tokens = first[rank + 1] - first[rank];
            args.logits = (float *)p.logits + first[rank] * p.n;
            args.topk_idx = p.idx + first[rank] * p.k;
            CHECK(loss(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
            sum += part;
        }
        CHECK(same(sum, whole, 1e-12), "case %d: %.15g is not %.15g", c, sum, whole);
    }
    float narrow = 0;
    loss_args args = args_of(&p, &cases[2]);
    args.loss_type = 0;
    args.loss = &narrow;
    CHECK(z_loss_forward(NULL, &args) == EPIC_OK && narrow == (float)whole, "%g", narrow);
    free_problem(&p);
}

static void test_bias_update(void)
{
    float bias[5] = {0, 1, -1, 0.5f, 2};
    const int32_t load[5] = {4, 6, 5, 0, 10};
    const float want[5] = {0.25f, 0.75f, -1, 0.75f, 1.75f};
    epic_bias_update_args args = {.bias = bias, .load = load, .num_experts = 5, .rate = 0.25f};
    CHECK(epic_bias_update(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    for (int e = 0; e < 5; e++) CHECK(bias[e] == want[e], "bias %d is %g", e, bias[e]);
    args.num_experts = 0;
    CHECK(epic_bias_update(NULL, &args) == EPIC_EINVAL, "no experts");
    args = (epic_bias_update_args){.load = load, .num_experts = 5};
    CHECK(epic_bias_update(NULL, &args) == EPIC_EINVAL, "bias NULL");
}

/* ------------------------------------------------------------------------------ refusals ---- */

static void refuse_router(epic_router r, const char *word)
{
    CHECK(epic_router_workspace(&r) == 0, "accepted: %s", word);
    CHECK(strstr(epic_error(NULL), word) != NULL, "\"%s\" does not name %s", epic_error(NULL),
          word);
}

static void test_wrong_routers(void)
{
    const epic_router good = {.num_experts = 16, .top_k = 4};
    epic_router r = good;
#define REFUSE(field, value, word) \
    do {                           \
        r = good;                  \
        r.field = value;           \
        refuse_router(r, word);    \
    } while (0)
    REFUSE(num_experts, 0, "num_experts");
    REFUSE(num_experts, 65537, "65536");
    REFUSE(zero_experts, 0xffffffffu, "zero_experts");
    REFUSE(top_k, 0, "top_k");
    REFUSE(top_k, 17, "top_k");
    REFUSE(score, 4, "score");
    REFUSE(weight_rule, 3, "weight_rule");
    REFUSE(normalize, 3, "normalize");
    REFUSE(normalize, EPIC_NORMALIZE_CLAMPED, "norm_min");
    REFUSE(eps, -1, "eps");
    REFUSE(scale, NAN, "scale");
    REFUSE(flags, 1, "flags");
    REFUSE(num_groups, 3, "num_groups");
    REFUSE(num_groups, 4, "topk_groups");
    r = (epic_router){.num_experts = 16, .top_k = 4, .num_groups = 8, .topk_groups = 1};
    refuse_router(r, "keep more groups");
    r.topk_groups = 8;
    r.group_score = EPIC_GROUP_SUM;
    refuse_router(r, "group_best");
    CHECK(epic_router_workspace(NULL) == 0, "NULL accepted");
}

static void refuse_forward(epic_router_args args, const char *word)
{
    CHECK(epic_router_forward(NULL, &args) == EPIC_EINVAL, "accepted: %s", word);
    CHECK(strstr(epic_error(NULL), word) != NULL, "\"%s\" does not name %s", epic_error(NULL),
          word);
}

static void test_wrong_arguments(void)
{
    const epic_router router = {.num_experts = 4, .top_k = 2};
    _Alignas(16) static char workspace[32768];
    float logits[8] = {0}, gradient[8], weights[4];
    int32_t idx[4], ids[2] = {0, 7}, table[4] = {0, 1, 2, 9};
    const epic_router_args good = {.type = EPIC_F32,
                                   .router = &router,
                                   .logits = logits,
                                   .num_tokens = 2,
                                   .workspace = workspace,
                                   .workspace_bytes = sizeof workspace,
                                   .topk_idx = idx,
                                   .weights = weights};
    epic_router_args a = good;
#define REFUSE_CALL(field, value, word) \
    do {                                \
        a = good;                       \
        a.field = value;                \
        refuse_forward(a, word);        \
    } while (0)
    CHECK(epic_router_forward(NULL, &good) == EPIC_OK, "%s", epic_error(NULL));
    REFUSE_CALL(router, NULL, "epic_router");
    REFUSE_CALL(logits, NULL, "logits");
    REFUSE_CALL(num_tokens, -1, "num_tokens");
    REFUSE_CALL(workspace_bytes, 8, "epic_router_workspace");
    REFUSE_CALL(workspace, workspace + 4, "16 divides");
    REFUSE_CALL(topk_idx, NULL, "topk_idx");
    REFUSE_CALL(weights, NULL, "weights");
    REFUSE_CALL(type, EPIC_E4M3, "type");
    REFUSE_CALL(weights_type, EPIC_F64, "weights_type");
    REFUSE_CALL(flags, 4, "flags");
    REFUSE_CALL(table, table, "token_ids");
    a = good;
    a.table = table;
    a.token_ids = ids;
    a.table_rows = 2;
    refuse_forward(a, "token 1 is 7");
    ids[1] = 1;
    refuse_forward(a, "is 9");
    a.token_id_type = EPIC_F32;
    refuse_forward(a, "token_id_type");

    epic_router_backward_args b = {.type = EPIC_F32,
                                   .router = &router,
                                   .logits = logits,
                                   .num_tokens = 2,
                                   .topk_idx = table,
                                   .d_weights = weights,
                                   .workspace = workspace,
                                   .workspace_bytes = sizeof workspace,
                                   .d_logits = gradient};
    CHECK(epic_router_backward(NULL, &b) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "token 1, k 1, is 9"),
          "%s", epic_error(NULL));
    b.grad_type = EPIC_BF16;
    CHECK(epic_router_backward(NULL, &b) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "grad_type"),
          "%s", epic_error(NULL));

    float loss;
    loss_args l = {.type = EPIC_F32,
                   .router = &router,
                   .logits = logits,
                   .num_tokens = 2,
                   .total_tokens = 1,
                   .workspace = workspace,
                   .workspace_bytes = sizeof workspace,
                   .loss = &loss};
    CHECK(z_loss_forward(NULL, &l) == EPIC_EINVAL && strstr(epic_error(NULL), "total_tokens"),
          "%s", epic_error(NULL));
    l.total_tokens = 2;
    CHECK(balance_loss_forward(NULL, &l) == EPIC_EINVAL && strstr(epic_error(NULL), "load"),
          "%s", epic_error(NULL));
    l.sequence_tokens = 3;
    CHECK(balance_loss_forward(NULL, &l) == EPIC_EINVAL &&
              strstr(epic_error(NULL), "sequence_tokens"),
          "%s", epic_error(NULL));
    l.loss = NULL;
    CHECK(z_loss_forward(NULL, &l) == EPIC_EINVAL, "loss NULL accepted");
    CHECK(z_loss_backward(NULL, &l) == EPIC_EINVAL && strstr(epic_error(NULL), "d_logits"),
          "%s", epic_error(NULL));
}

/* A NaN among the logits is chosen last and harms nobody's memory. */
static void test_not_a_number(void)
{
    const epic_router router = {.num_experts = 4, .top_k = 3, .score = EPIC_SCORE_SIGMOID};
    _Alignas(16) static char workspace[32768];
    const float logits[8] = {NAN, 1, 2, 3, NAN, NAN, NAN, -INFINITY};
    const int32_t want[6] = {3, 2, 1, 3, 0, 1};
    float weights[6];
    int32_t idx[6];
    const epic_router_args args = {.type = EPIC_F32,
                                   .router = &router,
                                   .logits = logits,
                                   .num_tokens = 2,
                                   .workspace = workspace,
                                   .workspace_bytes = sizeof workspace,
                                   .topk_idx = idx,
                                   .weights = weights};
    CHECK(epic_router_forward(NULL, &args) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(memcmp(idx, want, sizeof want) == 0, "%d %d %d, %d %d %d", idx[0], idx[1], idx[2],
          idx[3], idx[4], idx[5]);
    CHECK(weights[3] == 0, "sigmoid(-inf) is %g", weights[3]);
}

int main(void)
{
    test_forward();
    test_backward();
    test_far_gradients();
    test_losses();
    test_losses_add_up();
    test_bias_update();
    test_wrong_routers();
    test_wrong_arguments();
    test_not_a_number();
    if (failures) printf("%d checks failed\n", failures);
    return failures ? 1 : 0;
}
