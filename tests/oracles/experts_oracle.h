/* SPDX-License-Identifier: Apache-2.0 */
/* Expected results of the experts: plain float64 loops over tokens, and gradients by central
 * differences. */
#ifndef EXPERTS_ORACLE_H
#define EXPERTS_ORACLE_H

#include "unit/experts_problem.h"

static inline double limit_of(const epic_experts *ex)
{
    return ex->limit != 0 ? ex->limit : ex->activation == EPIC_CLAMPED_SILU ? 10 : 7;
}

static inline double act(const epic_experts *ex, double x)
{
    switch (ex->activation) {
    case EPIC_SILU:
        return x / (1 + exp(-x));
    case EPIC_GELU:
        return x * erfc(-x / sqrt(2)) / 2;
    case EPIC_GELU_TANH:
        return x / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * pow(x, 3))));
    case EPIC_RELU2:
        return x > 0 ? x * x : 0;
    default:
        x = fmin(x, limit_of(ex));
        return x / (1 + exp(-(ex->activation == EPIC_CLAMPED_SILU ? 1
                              : ex->alpha                         ? (double)ex->alpha
                                                                  : 1.702f) *
                            x));
    }
}

static inline double factor(const epic_experts *ex, double up)
{
    const double limit = limit_of(ex), clamped = fmax(-limit, fmin(up, limit));
    if (ex->activation == EPIC_CLAMPED_SWIGLU) return clamped + 1;
    return ex->activation == EPIC_CLAMPED_SILU ? clamped : up;
}

static inline double first_product(const problem *p, int e, int64_t slot, int64_t column)
{
    const double w =
        p->experts.weighting == EPIC_WEIGHT_INPUT ? p->slot_weights.truth[slot] : 1;
    double sum = p->biased ? p->b_gate_up.truth[e * p->width + column] : 0;
    for (int64_t i = 0; i < p->hidden; i++)
        sum += w * p->x.truth[slot * p->hidden + i] *
               p->w_gate_up.truth[(e * p->hidden + i) * p->width + column];
    return sum;
}

/* Computes one token of expert e: y [hidden]. */
static inline void plain_token(const problem *p, int e, int64_t slot, double *y)
{
    const epic_experts *ex = &p->experts;
    const double w = ex->weighting == EPIC_WEIGHT_EARLY ? p->slot_weights.truth[slot] : 1;
    for (int64_t j = 0; j < p->hidden; j++)
        y[j] = p->biased ? w * p->b_down.truth[e * p->hidden + j] : 0;
    for (int64_t i = 0; i < p->inner; i++) {
        const int64_t gate = ex->interleaved ? 2 * i : i;
        const int64_t up = ex->interleaved ? 2 * i + 1 : p->inner + i;
        double h = act(ex, first_product(p, e, slot, gate));
        if (!ex->ungated) h *= factor(ex, first_product(p, e, slot, up));
        for (int64_t j = 0; j < p->hidden; j++)
            y[j] += w * h * p->w_down.truth[(e * p->inner + i) * p->hidden + j];
    }
}

/* Computes all slots: 0 in padding, and 77 (the initial value) in the tail. Returns the loss
 * <d_y, y>. */
static inline double plain(const problem *p, double *y)
{
    double loss = 0, *row = malloc((size_t)p->hidden * sizeof *row);
    int64_t slot = 0;
    for (uint32_t e = 0; e < p->experts.num_local_experts; e++)
        for (int r = 0; r < p->rows[e]; r++, slot++) {
            memset(row, 0, (size_t)p->hidden * sizeof *row);
            if (r < p->tokens[e]) plain_token(p, (int)e, slot, row);
            for (int64_t j = 0; j < p->hidden; j++) {
                if (y != NULL) y[slot * p->hidden + j] = row[j];
                loss += row[j] * p->d_y.truth[slot * p->hidden + j];
            }
        }
    for (int64_t i = slot * p->hidden; y != NULL && i < p->y.n; i++) y[i] = 77;
    free(row);
    return loss;
}

/* Checks the gradient of the loss with respect to in[i] by differences. For arrays of slots
 * `each` is the number of elements per slot, else 0. */
static inline void check_gradient(const problem *p, const char *name, const array *in,
                                  const array *got, int64_t each, double step, double tolerance)
{
    double *want = malloc((size_t)in->n * sizeof *want);
    for (int64_t i = 0; i < in->n; i++) {
        const double here = in->truth[i];
        if (each && i >= p->occupied * each) {
            want[i] = 77;
            continue;
        }
        in->truth[i] = here + step;
        const double above = plain(p, NULL);
        in->truth[i] = here - step;
        const double below = plain(p, NULL);
        in->truth[i] = here;
        want[i] = (above - below) / (2 * step);
    }
    array inside = *got;
    if (each) inside.n = p->occupied * each;
    const double d = distance(&inside, want);
    const epic_experts *ex = &p->experts;
    CHECK(d <= tolerance,
          "%s off by %g: activation %u, ungated %u, interleaved %u, weighting %u, biased %d, "
          "rows %u, weights %u",
          name, d, ex->activation, ex->ungated, ex->interleaved, ex->weighting, p->biased,
          ex->row_type, ex->weight_type);
    for (int64_t i = inside.n; i < in->n; i++)
        CHECK(number(got->data, got->type, i) == 77, "%s: the tail was written", name);
    free(want);
}

static inline void check_reservedding(const problem *p, const char *name, const array *a,
                                      int64_t each)
{
    int64_t slot = 0;
    for (uint32_t e = 0; e < p->experts.num_local_experts; e++, slot += p->rows[e - 1])
        for (int64_t i = (slot + p->tokens[e]) * each; i < (slot + p->rows[e]) * each; i++)
            CHECK(number(a->data, a->type, i) == 0, "%s: padding is not 0", name);
}

typedef struct tolerances {
    double y, d_x, d_weights;
} tolerances;

static inline void check_forward(const problem *p, double tolerance)
{
    double *want = malloc((size_t)p->y.n * sizeof *want);
    plain(p, want);
    array inside = p->y;
    inside.n = p->occupied * p->hidden;
    const double d = distance(&inside, want);
    CHECK(d <= tolerance, "y off by %g: activation %u, rows %u, weights %u", d,
          p->experts.activation, p->experts.row_type, p->experts.weight_type);
    for (int64_t i = inside.n; i < p->y.n; i++)
        CHECK(number(p->y.data, p->y.type, i) == 77, "y: the tail was written");
    check_reservedding(p, "y", &p->y, p->hidden);
    free(want);
}

static inline void check_all(problem *p, tolerances t)
{
    run(p);
    check_forward(p, t.y);
    check_gradient(p, "d_x", &p->x, &p->d_x, p->hidden, STEP, t.d_x);
    check_gradient(p, "d_w_gate_up", &p->w_gate_up, &p->d_w_gate_up, 0, STEP, t.d_weights);
    check_gradient(p, "d_w_down", &p->w_down, &p->d_w_down, 0, STEP, t.d_weights);
    check_reservedding(p, "d_x", &p->d_x, p->hidden);
    if (p->biased) {
        check_gradient(p, "d_b_gate_up", &p->b_gate_up, &p->d_b_gate_up, 0, STEP, t.d_weights);
        check_gradient(p, "d_b_down", &p->b_down, &p->d_b_down, 0, STEP, t.d_weights);
    }
    if (p->experts.weighting == EPIC_WEIGHT_LATE) return;
    check_gradient(p, "d_slot_weights", &p->slot_weights, &p->d_slot_weights, 1, SLOT_STEP,
                   t.d_weights);
    check_reservedding(p, "d_slot_weights", &p->d_slot_weights, 1);
}

#endif
