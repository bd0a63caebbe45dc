/* SPDX-License-Identifier: Apache-2.0 */
/* Shared parts of the router's tests: its rules as plain float64 loops, models that need
 * different combinations of its options, and random problems. */
#ifndef ROUTER_ORACLE_H
#define ROUTER_ORACLE_H

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"
#include "rules/convert.h"

#define MOST_K 64
#define STEP 1e-5 /* step of central differences, whose error is about STEP^2 */

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

static inline double uniform(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}

static inline double between(double low, double high)
{
    return low + (high - low) * uniform();
}

/* ------------------------------------------------------------------------------ oracle ---- */

static inline double plain_sigmoid(double z)
{
    return z > 0 ? 1 / (1 + exp(-z)) : exp(z) / (1 + exp(z));
}

static inline void plain_softmax(const double *z, int n, double *p)
{
    double top = z[0], sum = 0;
    for (int i = 1; i < n; i++) top = fmax(top, z[i]);
    for (int i = 0; i < n; i++) sum += p[i] = exp(z[i] - top);
    for (int i = 0; i < n; i++) p[i] /= sum;
}

static inline void plain_scores(const epic_router *r, const double *z, int n, double *s)
{
    if (r->score == EPIC_SCORE_SOFTMAX) plain_softmax(z, n, s);
    for (int i = 0; i < n; i++) {
        if (r->score == EPIC_SCORE_SIGMOID) s[i] = plain_sigmoid(z[i]);
        if (r->score == EPIC_SCORE_SQRTSOFTPLUS)
            s[i] = sqrt(z[i] > 30 ? z[i] : log1p(exp(z[i])));
        if (r->score == EPIC_SCORE_LOGITS) s[i] = z[i];
    }
}

/* Picks the k largest values, one after the other. Sets *near if two values are so close,
 * without being equal, that float32 may order them differently. */
static inline void plain_best(const double *v, int n, int k, int32_t *out, bool *near)
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

static inline void plain_groups(const epic_router *r, double *v, int n, bool *near)
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

/* Chooses the experts. `steep`: the scores underflow, so choose by the logits, which have the
 * same order, unless something is added to the scores. */
static inline void plain_choose(const epic_router *r, const double *z, const float *bias, int n,
                                bool steep, int32_t *idx, bool *near)
{
    double *v = calloc((size_t)n, sizeof *v);
    const bool added = bias || (r->num_groups > 0 && r->group_score == EPIC_GROUP_SUM);
    plain_scores(r, z, n, v);
    for (int i = 0; i < n; i++) v[i] = (steep && !added ? z[i] : v[i]) + (bias ? bias[i] : 0);
    if (r->num_groups > 0) plain_groups(r, v, n, near);
    plain_best(v, n, (int)r->top_k, idx, near);
    if (!added) *near = false; /* then float32 orders them like float64 */
    free(v);
}

/* Computes the sparsemixer of Phi-3.5-MoE without its noise. The weight of the i-th chosen
 * expert is its part of a softmax over the remaining experts that are near the largest one. */
static inline double plain_near(const epic_router *r, const double *z, int n,
                                const int32_t *idx, int i)
{
    double top = -INFINITY, sum = 0, mine = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int e = 0; e < n; e++) {
            bool gone = false;
            for (int c = 0; c < i; c++) gone |= idx[c] == e;
            if (gone) continue;
            if (pass == 0) top = fmax(top, z[e]);
            if (pass == 0 || (top - z[e]) / fmax(fabs(z[e]), top) > 2 * r->jitter) continue;
            sum += exp(z[e] - top);
            if (e == idx[i]) mine = exp(z[e] - top);
        }
    return idx[i] < 0 ? 0 : mine / sum;
}

/* Computes the weights. scale: factors by expert, or NULL. */
static inline void plain_weights(const epic_router *r, const double *z, int n,
                                 const int32_t *idx, const double *scale, double *w)
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
        if (r->weight_rule == EPIC_WEIGHT_SPARSEMIXER) w[i] = plain_near(r, z, n, idx, i);
        sum += w[i];
    }
    for (int i = 0; i < k; i++) {
        if (r->normalize == EPIC_NORMALIZE_SUM) w[i] /= sum + r->eps;
        if (r->normalize == EPIC_NORMALIZE_CLAMPED) w[i] /= fmax(sum, r->norm_min);
        w[i] *= r->scale == 0 ? 1 : r->scale;
        if (scale && idx[i] >= 0) w[i] *= scale[idx[i]];
    }
    free(s);
}

/* ------------------------------------------------------------------------------ models ---- */

typedef struct model {
    const char *name;
    epic_router router;
    double bias; /* biases lie between -bias and bias */
    bool table;
    bool scaled; /* factors by expert are used */
} model;

#define SOFTMAX .score = EPIC_SCORE_SOFTMAX
#define SIGMOID .score = EPIC_SCORE_SIGMOID
#define SQRTSOFTPLUS .score = EPIC_SCORE_SQRTSOFTPLUS
#define LOGITS .score = EPIC_SCORE_LOGITS
#define SPARSEMIXER .weight_rule = EPIC_WEIGHT_SPARSEMIXER
#define BY_SUM .normalize = EPIC_NORMALIZE_SUM
#define DEEPSEEK .num_groups = 8, .topk_groups = 4, .group_score = EPIC_GROUP_SUM

static const model models[] = {
    {"Mixtral", {.num_experts = 8, .top_k = 2, SOFTMAX, BY_SUM}, 0, false, false},
    {"Qwen3-MoE", {.num_experts = 128, .top_k = 8, SOFTMAX, BY_SUM}, 0, false, false},
    {"Qwen3-MoE, not normalized", {.num_experts = 128, .top_k = 8, SOFTMAX}, 0, false, false},
    {"OLMoE", {.num_experts = 64, .top_k = 8, SOFTMAX}, 0, false, false},
    {"gpt-oss",
     {.num_experts = 32, .top_k = 4, LOGITS, .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN},
     0,
     false,
     false},
    {"DeepSeek-V2",
     {.num_experts = 160, .top_k = 6, SOFTMAX, .num_groups = 8, .topk_groups = 3, .scale = 16},
     0,
     false,
     false},
    {"DeepSeek-V3",
     {.num_experts = 256, .top_k = 8, SIGMOID, DEEPSEEK, .group_best = 2, BY_SUM, .scale = 2.5},
     0.3,
     false,
     false},
    {"DeepSeek-V3, transformers 5",
     {.num_experts = 256,
      .top_k = 8,
      SIGMOID,
      DEEPSEEK,
      .group_best = 2,
      BY_SUM,
      .eps = 1e-20,
      .group_others = EPIC_OTHERS_OUT,
      .scale = 2.5},
     1.2,
     false,
     false},
    {"DeepSeek-V3, transformers 4",
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
     false,
     false},
    {"Megatron, softmax first",
     {.num_experts = 64, .top_k = 8, SOFTMAX, DEEPSEEK, BY_SUM, .eps = 1e-20, .scale = 1.5},
     0,
     false,
     false},
    {"Megatron, softmax last",
     {.num_experts = 64, .top_k = 6, SOFTMAX, .weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN},
     0,
     false,
     false},
    {"Megatron, sigmoid",
     {.num_experts = 64, .top_k = 8, SIGMOID, DEEPSEEK, BY_SUM, .eps = 1e-20},
     0.1,
     false,
     false},
    {"Megatron, one expert", {.num_experts = 64, .top_k = 1, SIGMOID}, 0.1, false, false},
    {"DeepSeek-V4",
     {.num_experts = 96, .top_k = 6, SQRTSOFTPLUS, BY_SUM, .eps = 1e-20, .scale = 1.5},
     0.2,
     false,
     false},
    {"DeepSeek-V4, first layers",
     {.num_experts = 96, .top_k = 6, SQRTSOFTPLUS, BY_SUM, .eps = 1e-20, .scale = 1.5},
     0,
     true,
     false},
    {"Llama-4",
     {.num_experts = 16, .top_k = 1, LOGITS, .weight_rule = EPIC_WEIGHT_SIGMOID_CHOSEN},
     0,
     false,
     false},
    {"ERNIE-4.5",
     {.num_experts = 64,
      .top_k = 6,
      SOFTMAX,
      .normalize = EPIC_NORMALIZE_CLAMPED,
      .norm_min = 0.45},
     0.02,
     false,
     false},
    {"Gemma 4", {.num_experts = 128, .top_k = 8, SOFTMAX, BY_SUM}, 0, false, true},
    {"Phi-3.5-MoE",
     {.num_experts = 16, .top_k = 2, LOGITS, SPARSEMIXER, .jitter = 0.01},
     0,
     false,
     false},
    {"sparsemixer, four choices, scaled",
     {.num_experts = 24, .top_k = 4, SOFTMAX, SPARSEMIXER, .jitter = 0.3, .scale = 1.5},
     0,
     false,
     true},
    {"zero-experts",
     {.num_experts = 24, .zero_experts = 9, .top_k = 5, SOFTMAX, .scale = 6},
     0.01,
     false,
     false},
    {"all experts", {.num_experts = 7, .top_k = 7, SIGMOID, BY_SUM}, 0.1, false, false},
    {"one expert", {.num_experts = 1, .top_k = 1, SOFTMAX}, 0, false, false},
    {"odd and wide", {.num_experts = 1601, .top_k = 64, SOFTMAX, BY_SUM}, 0, false, false},
};
#define NUM_MODELS ((int)(sizeof models / sizeof *models))

typedef enum pattern { RANDOM, WIDE, TIES, EXTREME } pattern;
static const char *const patterns[] = {"random", "wide", "ties", "extreme"};

static inline double draw(pattern pattern)
{
    static const double far[] = {-1e4, 1e4, -9990, 9990, -200, 80, -80, -18, 0, 1};
    if (pattern == RANDOM) return between(-6, 6);
    if (pattern == WIDE) return between(-40, 40);
    if (pattern == TIES) return floor(between(0, 4)) / 2;
    return far[(int)between(0, 10)];
}

/* ------------------------------------------------------------------------------- cases ---- */

typedef struct problem {
    const model *model;
    int n, k, tokens;
    uint32_t type;
    double *z;    /* [tokens, n], the exact values of the logits */
    void *logits; /* the same values in the logits' type */
    float bias[2048];
    int32_t *table; /* [50, k] */
    int64_t *ids;
    double *scale;  /* [n] factors by expert, the exact values of scale_of */
    void *scale_of; /* the same values in the weights' type */
    int32_t *idx;
    void *weights, *scores;
    void *workspace;
    int64_t workspace_bytes;
} problem;

static inline uint32_t weights_type(const problem *p)
{
    return p->type == EPIC_F64 ? EPIC_F64 : EPIC_F32;
}

static inline double number(const void *array, uint32_t type, int64_t i)
{
    float x;
    if (type == EPIC_F64) return ((const double *)array)[i];
    convert_to_float(&x, (const char *)array + i * convert_bytes(type), type, 1);
    return x;
}

static inline void put(void *array, uint32_t type, int64_t i, double x)
{
    const float narrow = (float)x;
    if (type == EPIC_F64)
        ((double *)array)[i] = x;
    else
        convert_from_float((char *)array + i * convert_bytes(type), type, &narrow, 1);
}

static inline void make_problem(problem *p, const model *m, int tokens, uint32_t type,
                                pattern pattern)
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
    p->scale = malloc((size_t)p->n * sizeof *p->scale);
    p->scale_of = malloc((size_t)p->n * 8);
    CHECK(epic_router_workspace(&m->router, &p->workspace_bytes) == EPIC_OK, "%s: %s", m->name,
          epic_error(NULL));
    p->workspace = malloc(p->workspace_bytes);
    for (size_t i = 0; i < all; i++) {
        put(p->logits, type, (int64_t)i, draw(pattern));
        p->z[i] = number(p->logits, type, (int64_t)i);
    }
    for (int i = 0; i < p->n; i++)
        p->bias[i] = (float)(pattern == TIES ? m->bias : between(-m->bias, m->bias));
    for (int i = 0; i < p->n; i++) {
        put(p->scale_of, weights_type(p), i, between(-0.5, 2));
        p->scale[i] = number(p->scale_of, weights_type(p), i);
    }
    for (int i = 0; i < 50 * p->k; i++) p->table[i] = (int32_t)between(0, p->n);
    if (p->k > 1) p->table[1] = -1;
    for (int t = 0; t < tokens; t++) p->ids[t] = t % 50;
}

static inline void free_problem(problem *p)
{
    free(p->z);
    free(p->logits);
    free(p->idx);
    free(p->weights);
    free(p->scores);
    free(p->table);
    free(p->ids);
    free(p->scale);
    free(p->scale_of);
    free(p->workspace);
}

static inline epic_router_args forward_args(problem *p)
{
    const model *m = p->model;
    return (epic_router_args){
        .router = &m->router,
        .logits = p->logits,
        .num_tokens = p->tokens,
        .bias = m->bias > 0 ? p->bias : NULL,
        .scale_of_expert = m->scaled ? p->scale_of : NULL,
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
}

static inline void run_forward(problem *p)
{
    const epic_router_args args = forward_args(p);
    CHECK(epic_router_forward(NULL, &args) == EPIC_OK, "%s: %s", p->model->name,
          epic_error(NULL));
}

/* Compares with a tolerance. Float32 has no numbers below 1e-45, and few digits below 1e-38. */
static inline bool same(double got, double want, double tolerance)
{
    return fabs(got - want) <= tolerance * fabs(want) + 1e-37 || (got != got && want != want);
}

/* Returns |a - b| / |b| as vectors, or |a - b| if b is only the error of differences. */
static inline double distance(const void *a, uint32_t type, const double *b, int64_t n)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = number(a, type, i) - b[i];
        difference += d * d;
        size += b[i] * b[i];
    }
    return sqrt(difference) / (size > 1e-16 ? sqrt(size) : 1);
}

#endif
