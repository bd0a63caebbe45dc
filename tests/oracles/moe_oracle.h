/* SPDX-License-Identifier: Apache-2.0 */
/* Expected results of the layer: plain float64 loops over tokens, written from the header.
 * Ranks matter only for capacities. The choices and the drops are computed once. With these
 * fixed the layer is smooth, so that central differences give its gradients. */
#ifndef MOE_ORACLE_H
#define MOE_ORACLE_H

#include "unit/moe_layer.h"

typedef struct oracle {
    const problem *p;
    double *given[NUM_GIVEN]; /* NULL: not given */
    double *d_out, *out;
    int32_t *chosen; /* [total, top_k] */
    int32_t *expert; /* [total, top_k]: expert of the choice; -1: none, or a zero-expert */
    bool *alive;
    int32_t *load;         /* [num_experts] */
    int32_t *logical_load; /* [num_logical] */
    int64_t *demand;       /* [num_ranks] */
    bool rounds_weights;   /* weights are rounded to float32, as they are sent */
    double *scratch;       /* memory for intermediate rows */
} oracle;

/* ------------------------------------------------------------------------------ router ---- */

static void oracle_logits(const oracle *o, int64_t t, double *z)
{
    const int64_t n = columns_of(o->p), hidden = o->p->experts.hidden;
    for (int64_t e = 0; e < n; e++) {
        z[e] = o->given[B_GATE] ? o->given[B_GATE][e] : 0;
        for (int64_t h = 0; h < hidden; h++)
            z[e] += o->given[X][t * hidden + h] * o->given[W_GATE][h * n + e];
    }
}

static double logsumexp(const double *z, int64_t n)
{
    double most = z[0], sum = 0;
    for (int64_t e = 1; e < n; e++) most = fmax(most, z[e]);
    for (int64_t e = 0; e < n; e++) sum += exp(z[e] - most);
    return most + log(sum);
}

static void oracle_scores(uint32_t score, const double *z, int64_t n, double *s)
{
    const double total = logsumexp(z, n);
    for (int64_t e = 0; e < n; e++)
        s[e] = score == EPIC_SCORE_SOFTMAX        ? exp(z[e] - total)
               : score == EPIC_SCORE_SIGMOID      ? 1 / (1 + exp(-z[e]))
               : score == EPIC_SCORE_SQRTSOFTPLUS ? sqrt(log1p(exp(z[e])))
                                                  : z[e];
}

/* Returns the largest value that is not taken yet; of equal values the first one. */
static int64_t take_best(const double *v, bool *taken, int64_t n)
{
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || v[i] > v[best])) best = i;
    taken[best] = true;
    return best;
}

static double group_score(const epic_router *r, const double *v, int64_t n)
{
    const uint32_t quotient = r->topk_groups ? r->top_k / r->topk_groups : 1;
    const uint32_t m = r->group_score == EPIC_GROUP_MAX ? 1
                       : r->group_best                  ? r->group_best
                                                        : quotient;
    bool taken[96] = {false};
    double sum = 0;
    for (uint32_t i = 0; i < m; i++) sum += v[take_best(v, taken, n)];
    return sum;
}

/* Sets the values of the groups that are not kept, as the router does. */
static void oracle_groups(const epic_router *r, double *v, int64_t n)
{
    const int64_t each = n / r->num_groups;
    double score[96];
    bool kept[96] = {false};
    for (uint32_t g = 0; g < r->num_groups; g++) score[g] = group_score(r, v + g * each, each);
    for (uint32_t i = 0; i < r->topk_groups; i++) take_best(score, kept, r->num_groups);
    for (int64_t e = 0; e < n; e++)
        if (!kept[e / each]) v[e] = r->group_others == EPIC_OTHERS_ZERO ? 0 : -INFINITY;
}

static void oracle_choose(oracle *o, int64_t t)
{
    const problem *p = o->p;
    const int64_t n = columns_of(p);
    const uint32_t k = p->layer.top_k;
    double z[96], v[96];
    bool taken[96] = {false};
    int32_t *chosen = o->chosen + t * k;
    oracle_logits(o, t, z);
    oracle_scores(p->router.score, z, n, v);
    for (int64_t e = 0; e < n && p->bias_given; e++) v[e] += p->bias[e];
    if (p->router.num_groups) oracle_groups(&p->router, v, n);
    for (uint32_t i = 0; i < k; i++)
        chosen[i] = p->topk_idx_in ? p->topk_idx_in[t * k + i]
                    : p->table     ? p->table[p->token_ids[t] * (int64_t)k + i]
                                   : (int32_t)take_best(v, taken, n);
}

/* Computes the weights of a token's choices. */
static void oracle_weigh(const oracle *o, int64_t t, double *w)
{
    const epic_router *r = &o->p->router;
    const int32_t *chosen = o->chosen + t * r->top_k;
    double z[96], s[96], sum = 0, softened = 0;
    if (o->given[TOPK_WEIGHTS]) {
        memcpy(w, o->given[TOPK_WEIGHTS] + t * r->top_k, r->top_k * sizeof *w);
        return;
    }
    oracle_logits(o, t, z);
    oracle_scores(r->score, z, columns_of(o->p), s);
    for (uint32_t i = 0; i < r->top_k; i++) softened += chosen[i] < 0 ? 0 : exp(z[chosen[i]]);
    for (uint32_t i = 0; i < r->top_k; i++) {
        const int32_t e = chosen[i];
        w[i] = e < 0                                          ? 0
               : r->weight_rule == EPIC_WEIGHT_OF_SCORE       ? s[e]
               : r->weight_rule == EPIC_WEIGHT_SOFTMAX_CHOSEN ? exp(z[e]) / softened
                                                              : 1 / (1 + exp(-z[e]));
        sum += w[i];
    }
    const double divisor = r->normalize == EPIC_NORMALIZE_SUM       ? sum + r->eps
                           : r->normalize == EPIC_NORMALIZE_CLAMPED ? fmax(sum, r->norm_min)
                                                                    : 1;
    for (uint32_t i = 0; i < r->top_k; i++) {
        w[i] = divisor != 0 ? w[i] / divisor * (r->scale != 0 ? r->scale : 1) : 0;
        const int32_t e = chosen[i];
        if (o->given[SCALE_OF_EXPERT] && e >= 0) w[i] *= o->given[SCALE_OF_EXPERT][e];
        if (o->rounds_weights) w[i] = (float)w[i];
    }
}

/* -------------------------------------------------------------------------------- plan ---- */

static int64_t slots_of(const oracle *o, int rank, int64_t most, const int64_t *limit)
{
    const int64_t align = o->p->layer.alignment ? o->p->layer.alignment : 1;
    int64_t slots = 0;
    for (uint32_t e = 0; e < o->p->layer.num_experts; e++)
        if (owner_of(o->p, e) == rank)
            slots += ((limit[e] < most ? limit[e] : most) + align - 1) / align * align;
    return slots;
}

static uint32_t logical_of(const problem *p, uint32_t expert)
{
    return p->layer.num_logical ? (uint32_t)p->logical_of[expert] : expert;
}

/* Returns how many experts are copies of `logical`, or how many of them come before expert
 * `upto`. */
static int64_t replicas(const problem *p, uint32_t logical, uint32_t upto)
{
    int64_t count = 0;
    for (uint32_t e = 0; e < upto; e++) count += logical_of(p, e) == logical;
    return count;
}

/* Assigns the choices: the replicas of a logical expert get them in turn. */
static void oracle_replicas(oracle *o)
{
    const problem *p = o->p;
    int64_t before[64] = {0};
    for (int64_t i = 0; i < p->total * p->layer.top_k; i++) {
        const int32_t c = o->chosen[i];
        o->expert[i] = -1;
        if (c < 0 || c >= (int32_t)p->router.num_experts) continue;
        const int64_t n = before[c]++ % replicas(p, (uint32_t)c, p->layer.num_experts);
        for (uint32_t e = 0; e < p->layer.num_experts; e++)
            if (logical_of(p, e) == (uint32_t)c && replicas(p, (uint32_t)c, e) == n)
                o->expert[i] = (int32_t)e;
        if (p->layer.num_logical) o->logical_load[c]++;
    }
}

/* Returns how many choices expert_capacity lets an expert keep: its share of the first choices
 * of its logical expert. */
static int64_t expert_limit(const problem *p, uint32_t e)
{
    const int64_t all = replicas(p, logical_of(p, e), p->layer.num_experts);
    int64_t limit = 0;
    for (int64_t n = 0; n < p->layer.expert_capacity; n++)
        limit += n % all == replicas(p, logical_of(p, e), e);
    return limit;
}

/* Returns how many slots a rank has: the capacity, or the rank's limit if that is smaller. */
static int64_t slots_in(const problem *p, int rank)
{
    const int64_t limit = p->limit_of[rank] > 0 ? p->limit_of[rank] : 1;
    return p->is_limited && limit < p->moe.capacity ? limit : p->moe.capacity;
}

/* Computes which choices are kept: the first ones of an expert, up to the limits of the expert
 * and of its rank. */
static void oracle_plan(oracle *o)
{
    const problem *p = o->p;
    const int64_t choices = p->total * p->layer.top_k;
    int64_t limit[64] = {0}, used[64] = {0};
    oracle_replicas(o);
    for (int64_t i = 0; i < choices; i++)
        if (o->expert[i] >= 0) limit[o->expert[i]]++;
    for (uint32_t e = 0; e < p->layer.num_experts; e++) o->load[e] = (int32_t)limit[e];
    for (int r = 0; r < p->num_ranks; r++) o->demand[r] = slots_of(o, r, INT32_MAX, limit);
    for (uint32_t e = 0; e < p->layer.num_experts && p->layer.expert_capacity; e++)
        if (limit[e] > expert_limit(p, e)) limit[e] = expert_limit(p, e);
    for (int r = 0; r < p->num_ranks && p->layer.overflow == EPIC_OVERFLOW_DROP; r++) {
        int64_t most = p->total * p->layer.top_k;
        while (slots_of(o, r, most, limit) > slots_in(p, r)) most--;
        for (uint32_t e = 0; e < p->layer.num_experts; e++)
            if (owner_of(p, e) == r && limit[e] > most) limit[e] = most;
    }
    for (int64_t i = 0; i < choices; i++) {
        const int32_t e = o->expert[i];
        o->alive[i] =
            o->chosen[i] >= (int32_t)p->router.num_experts || (e >= 0 && used[e]++ < limit[e]);
    }
}

/* ----------------------------------------------------------------------------- experts ---- */

static double activate(const epic_experts *ex, double x)
{
    const bool silu = ex->activation == EPIC_CLAMPED_SILU;
    const double limit = ex->limit != 0 ? ex->limit : silu ? 10 : 7;
    const double alpha = silu ? 1 : ex->alpha != 0 ? ex->alpha : 1.702f;
    switch (ex->activation) {
    case EPIC_SILU:
        return x / (1 + exp(-x));
    case EPIC_GELU:
        return x * 0.5 * erfc(-x / sqrt(2));
    case EPIC_GELU_TANH:
        return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case EPIC_RELU2:
        return x > 0 ? x * x : 0;
    default:
        x = fmin(x, limit);
        return x / (1 + exp(-alpha * x));
    }
}

static double up_of(const epic_experts *ex, double u)
{
    const bool silu = ex->activation == EPIC_CLAMPED_SILU;
    const double limit = ex->limit != 0 ? ex->limit : silu ? 10 : 7;
    if (ex->activation != EPIC_CLAMPED_SWIGLU && !silu) return u;
    return fmax(fmin(u, limit), -limit) + (silu ? 0 : 1);
}

/* Absolute values of gate and up, while they are collected. */
static struct {
    double at[1 << 16];
    int num;
    bool on;
} seen;

static void collect(const double *pre, int64_t n)
{
    for (int64_t i = 0; i < n && seen.num < (int)(sizeof seen.at / sizeof *seen.at); i++)
        seen.at[seen.num++] = fabs(pre[i]);
}

/* Computes y += w * MLP(v * x). */
static void oracle_expert(const epic_experts *ex, const double *up, const double *down,
                          const double *b_up, const double *b_down, const double *x, double v,
                          double w, double *y, double *scratch)
{
    const int64_t hidden = ex->hidden, inner = ex->inner, width = width_of(ex);
    double *pre = scratch, *act = scratch + width;
    for (int64_t i = 0; i < width; i++) pre[i] = b_up ? b_up[i] : 0;
    for (int64_t h = 0; h < hidden; h++)
        for (int64_t i = 0; i < width; i++) pre[i] += v * x[h] * up[h * width + i];
    if (seen.on) collect(pre, width);
    for (int64_t i = 0; i < inner; i++) {
        act[i] = activate(ex, pre[ex->interleaved ? 2 * i : i]);
        if (!ex->ungated) act[i] *= up_of(ex, pre[ex->interleaved ? 2 * i + 1 : inner + i]);
    }
    for (int64_t h = 0; h < hidden; h++) y[h] += w * (b_down ? b_down[h] : 0);
    for (int64_t i = 0; i < inner; i++)
        for (int64_t h = 0; h < hidden; h++) y[h] += w * act[i] * down[i * hidden + h];
}

static const double *at(const oracle *o, int which, int64_t expert)
{
    return o->given[which] ? o->given[which] + expert * numbers_of(o->p, which) : NULL;
}

/* Returns the factor of a token's shared expert. */
static double oracle_shared(const oracle *o, int64_t t)
{
    const int64_t hidden = o->p->experts.hidden;
    double z = 0;
    if (!o->given[W_SHARED_GATE]) return 1;
    for (int64_t h = 0; h < hidden; h++)
        z += o->given[X][t * hidden + h] * o->given[W_SHARED_GATE][h];
    return 1 / (1 + exp(-z));
}

static void oracle_token(const oracle *o, int64_t t)
{
    const problem *p = o->p;
    const int64_t hidden = p->experts.hidden;
    const double *x = o->given[X] + t * hidden;
    double *y = o->out + t * hidden, w[64];
    memset(y, 0, (size_t)hidden * sizeof *y);
    oracle_weigh(o, t, w);
    for (uint32_t k = 0; k < p->layer.top_k; k++) {
        const int32_t e = o->expert[t * p->layer.top_k + k];
        if (!o->alive[t * p->layer.top_k + k]) continue;
        const bool early = p->experts.weighting == EPIC_WEIGHT_INPUT;
        if (e >= 0)
            oracle_expert(&p->experts, at(o, W_GATE_UP, e), at(o, W_DOWN, e),
                          at(o, B_GATE_UP, e), at(o, B_DOWN, e), x, early ? w[k] : 1,
                          early ? 1 : w[k], y, o->scratch);
        else
            for (int64_t h = 0; h < hidden; h++) y[h] += w[k] * x[h];
    }
    if (p->has_shared)
        oracle_expert(&p->shared, o->given[SHARED_GATE_UP], o->given[SHARED_DOWN],
                      o->given[SHARED_B_GATE_UP], o->given[SHARED_B_DOWN], x, 1,
                      oracle_shared(o, t), y, o->scratch);
}

/* ------------------------------------------------------------------------------ losses ---- */

/* Counts the choices of an expert among tokens [first, first + count). */
static double counted(const oracle *o, int64_t first, int64_t count, int32_t expert)
{
    double n = 0;
    for (int64_t i = first * o->p->layer.top_k; i < (first + count) * o->p->layer.top_k; i++)
        n += o->chosen[i] == expert;
    return n;
}

static void probabilities(const oracle *o, int64_t t, double *P)
{
    const uint32_t score = o->p->router.score;
    const int64_t n = columns_of(o->p);
    double z[96], sum = 0;
    oracle_logits(o, t, z);
    oracle_scores(score == EPIC_SCORE_LOGITS ? EPIC_SCORE_SOFTMAX : score, z, n, P);
    for (int64_t e = 0; e < n; e++) sum += P[e];
    for (int64_t e = 0; e < n; e++) P[e] /= sum;
}

typedef struct oracle_losses {
    double balance, z;
} oracle_losses;

static oracle_losses oracle_loss(const oracle *o)
{
    const problem *p = o->p;
    const double T = (double)p->total, E = p->router.num_experts;
    const int64_t length = p->moe.sequence_tokens ? p->moe.sequence_tokens : p->total;
    double balance = 0, z_sum = 0, load[64], P[96], z[96];
    for (int64_t t = 0; t < p->total; t++) {
        for (int32_t e = 0; e < (int32_t)E && t % length == 0; e++)
            load[e] = counted(o, t, length, e);
        probabilities(o, t, P);
        for (int32_t e = 0; e < (int32_t)E; e++) balance += P[e] * load[e];
        oracle_logits(o, t, z);
        z_sum += pow(logsumexp(z, columns_of(p)), 2);
    }
    if (p->total == 0) return (oracle_losses){0};
    return (oracle_losses){p->moe.balance_coeff * E / (p->layer.top_k * T * (double)length) *
                               balance,
                           p->moe.z_coeff / T * z_sum};
}

/* ------------------------------------------------------------------------------- whole ---- */

static void oracle_run(const oracle *o)
{
    for (int64_t t = 0; t < o->p->total; t++) oracle_token(o, t);
}

static double objective(const oracle *o)
{
    const problem *p = o->p;
    const int64_t n = p->total * p->experts.hidden;
    const oracle_losses loss = oracle_loss(o);
    double sum = (loss.balance + loss.z) * (p->d_loss_given ? p->d_loss : 1);
    if (p->d_parts_given) sum += loss.balance * p->d_balance_loss + loss.z * p->d_z_loss;
    oracle_run(o);
    for (int64_t i = 0; i < n; i++) sum += o->out[i] * o->d_out[i];
    return sum;
}

/* Returns the gradient with respect to one number. */
static double difference(const oracle *o, int which, int64_t i, double step)
{
    double *x = &o->given[which][i];
    const double before = *x;
    *x = before + step;
    const double above = objective(o);
    *x = before - step;
    const double under = objective(o);
    *x = before;
    return (above - under) / (2 * step);
}

static double *wide_copy(const array *a)
{
    double *copy = malloc((size_t)a->n * sizeof *copy);
    for (int64_t i = 0; i < a->n; i++) copy[i] = get(a, i);
    return copy;
}

static oracle oracle_make(const problem *p)
{
    const size_t choices = (size_t)p->total * p->layer.top_k;
    oracle o = {.p = p, .d_out = wide_copy(&p->d_out)};
    for (int i = 0; i < NUM_GIVEN; i++)
        if (p->given[i].n || i == X) o.given[i] = wide_copy(&p->given[i]);
    o.out = calloc((size_t)p->total * p->experts.hidden + 1, sizeof *o.out);
    o.chosen = calloc(choices + 1, sizeof *o.chosen);
    o.expert = calloc(choices + 1, sizeof *o.expert);
    o.logical_load = calloc(p->layer.num_logical + 1, sizeof *o.logical_load);
    o.alive = calloc(choices + 1, sizeof *o.alive);
    o.load = calloc(p->layer.num_experts, sizeof *o.load);
    o.demand = calloc((size_t)p->num_ranks, sizeof *o.demand);
    o.scratch = calloc(4 * (size_t)(p->experts.inner + p->shared.inner), sizeof *o.scratch);
    for (int64_t t = 0; t < p->total; t++) oracle_choose(&o, t);
    oracle_plan(&o);
    return o;
}

static void oracle_free(oracle *o)
{
    for (int i = 0; i < NUM_GIVEN; i++) free(o->given[i]);
    free(o->d_out);
    free(o->out);
    free(o->chosen);
    free(o->expert);
    free(o->logical_load);
    free(o->alive);
    free(o->load);
    free(o->demand);
    free(o->scratch);
}

#endif
