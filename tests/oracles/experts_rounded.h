/* SPDX-License-Identifier: Apache-2.0 */
/* Expected results of the experts' MLP and its gradients: plain loops in float64 that round to
 * the type `held` where the CUDA kernels store numbers in memory, or nowhere (EPIC_F64). */
#ifndef EPIC_TEST_EXPERTS_ROUNDED_H
#define EPIC_TEST_EXPERTS_ROUNDED_H

#include <math.h>

#include "numbers.h"

typedef struct oracle { /* arguments, all in float64 */
    epic_experts ex;    /* limit and alpha have their default values filled in */
    uint32_t held;
    /* operands of products with weights are stored as e4m3, with a scale per 128 numbers */
    bool scaled;
    /* d_b_gate_up is requested: EPIC_WEIGHT_INPUT then rounds once more */
    bool biased_gradient;
    int64_t slots;
    const int32_t *rows, *tokens;
    const double *x, *x_back; /* x as forward and as backward use it */
    const double *weights, *w_gate_up, *w_down, *b_gate_up, *b_down, *d_y; /* inputs */
    /* outputs, which must be 0 before */
    double *y, *d_x, *d_w_gate_up, *d_w_down, *d_b_gate_up, *d_b_down, *d_weights;
} oracle;

static double sigmoid_f64(double x)
{
    return 1 / (1 + exp(-x));
}

typedef struct activated {
    double value, slope;
} activated;

static activated swish_f64(double x, double alpha)
{
    const double s = sigmoid_f64(alpha * x);
    return (activated){x * s, s + alpha * x * s * (1 - s)};
}

static activated activate_f64(double x, const epic_experts *ex)
{
    const double c = sqrt(2 / 3.14159265358979323846);
    switch (ex->activation) {
    case EPIC_SILU:
        return swish_f64(x, 1);
    case EPIC_GELU:
        return (activated){x * (1 + erf(x * sqrt(0.5))) / 2,
                           (1 + erf(x * sqrt(0.5))) / 2 + x * c / 2 * exp(-x * x / 2)};
    case EPIC_GELU_TANH: {
        const double t = tanh(c * (x + 0.044715 * x * x * x));
        return (activated){x / 2 * (1 + t),
                           (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)};
    }
    case EPIC_RELU2:
        return (activated){x > 0 ? x * x : 0, x > 0 ? 2 * x : 0};
    default: {
        activated a = swish_f64(x > ex->limit ? ex->limit : x, ex->alpha);
        if (x > ex->limit) a.slope = 0;
        return a;
    }
    }
}

static activated up_f64(double u, const epic_experts *ex)
{
    const double limit = ex->limit, plus = ex->activation == EPIC_CLAMPED_SWIGLU;
    if (ex->ungated) return (activated){1, 0};
    if (ex->activation < EPIC_CLAMPED_SWIGLU) return (activated){u, 1};
    if (u > limit) return (activated){limit + plus, 0};
    return u < -limit ? (activated){plus - limit, 0} : (activated){u + plus, 1};
}

typedef struct oracle_row { /* values of one slot */
    double *saved, *act, *d_act, *d_gate_up;
    double *factor; /* d_y or d_gate_up as the operand of a product with weights */
    double *held;   /* activations as backward uses them */
} oracle_row;

static int64_t gate_of(const epic_experts *ex, int64_t i)
{
    return ex->interleaved ? 2 * i : i;
}

static int64_t up_of(const epic_experts *ex, int64_t i)
{
    return ex->interleaved ? 2 * i + 1 : ex->inner + i;
}

/* Computes out [n] = row [k] W, or W^T with W [n, k], and rounds it. */
static void multiply_row(const oracle *o, double *out, const double *row, const double *w,
                         int64_t k, int64_t n, bool turned)
{
    for (int64_t j = 0; j < n; j++) out[j] = 0;
    for (int64_t i = 0; i < k && !turned; i++)
        for (int64_t j = 0; j < n; j++) out[j] += row[i] * w[i * n + j];
    for (int64_t j = 0; j < n && turned; j++)
        for (int64_t i = 0; i < k; i++) out[j] += row[i] * w[j * k + i];
    for (int64_t j = 0; j < n; j++) out[j] = round_to_type(out[j], o->held);
}

/* Rounds to e4m3 with a scale per 128 numbers. */
static void quantize_f64(double *x, int64_t n)
{
    for (int64_t first = 0; first < n; first += 128) {
        const int64_t end = first + 128 < n ? first + 128 : n;
        double most = 0;
        for (int64_t i = first; i < end; i++) most = fmax(most, fabs(x[i]));
        const double scale = most > 0 ? (float)(most / E4M3_MAX) : 1;
        for (int64_t i = first; i < end; i++)
            x[i] = round_to_type(x[i] / scale, EPIC_E4M3) * scale;
    }
}

static void forward_slot(const oracle *o, int64_t e, int64_t slot, const oracle_row *r)
{
    const epic_experts *ex = &o->ex;
    const int64_t hidden = ex->hidden, inner = ex->inner, width = inner * (ex->ungated ? 1 : 2);
    const double w = o->weights ? o->weights[slot] : 1;
    const double early = ex->weighting == EPIC_WEIGHT_EARLY ? w : 1;
    const double input = ex->weighting == EPIC_WEIGHT_INPUT ? w : 1;
    multiply_row(o, r->saved, o->x + slot * hidden, o->w_gate_up + e * hidden * width, hidden,
                 width, false);
    for (int64_t i = 0; i < inner; i++) {
        const double *b = o->b_gate_up ? o->b_gate_up + e * width : NULL;
        const int64_t g = gate_of(ex, i), u = up_of(ex, i);
        const double gate = input * r->saved[g] + (b ? b[g] : 0);
        const double up = ex->ungated ? 0 : input * r->saved[u] + (b ? b[u] : 0);
        r->act[i] = activate_f64(gate, ex).value * up_f64(up, ex).value * early;
        r->held[i] = round_to_type(r->act[i], o->held);
        if (!o->scaled) r->act[i] = r->held[i];
    }
    if (o->scaled && o->held != EPIC_F64) quantize_f64(r->act, inner);
    for (int64_t j = 0; j < hidden; j++) {
        double sum = o->b_down ? early * o->b_down[e * hidden + j] : 0;
        for (int64_t i = 0; i < inner; i++)
            sum += r->act[i] * o->w_down[(e * inner + i) * hidden + j];
        o->y[slot * hidden + j] = sum;
    }
}

/* Computes the gradient of the first product's row from that of the activations. Returns the
 * gradient of the weight. */
static double activation_backward(const oracle *o, int64_t e, int64_t slot, const oracle_row *r)
{
    const epic_experts *ex = &o->ex;
    const int64_t inner = ex->inner, width = inner * (ex->ungated ? 1 : 2);
    const double w = o->weights ? o->weights[slot] : 1;
    const double early = ex->weighting == EPIC_WEIGHT_EARLY ? w : 1;
    const double input = ex->weighting == EPIC_WEIGHT_INPUT ? w : 1;
    const double scale = o->biased_gradient ? 1 : input;
    double dot = 0;
    for (int64_t i = 0; i < inner; i++) {
        const double *b = o->b_gate_up ? o->b_gate_up + e * width : NULL;
        const int64_t g = gate_of(ex, i), u = up_of(ex, i);
        const double up_saved = ex->ungated ? 0 : r->saved[u];
        const activated gate = activate_f64(input * r->saved[g] + (b ? b[g] : 0), ex);
        const activated up = up_f64(ex->ungated ? 0 : input * up_saved + (b ? b[u] : 0), ex);
        const double d_gate = r->d_act[i] * early * up.value * gate.slope;
        const double d_up = r->d_act[i] * early * gate.value * up.slope;
        dot += ex->weighting == EPIC_WEIGHT_INPUT ? d_gate * r->saved[g] + d_up * up_saved
                                                  : r->d_act[i] * gate.value * up.value;
        r->d_gate_up[g] = round_to_type(d_gate * scale, o->held);
        if (!ex->ungated) r->d_gate_up[u] = round_to_type(d_up * scale, o->held);
    }
    for (int64_t j = 0; j < ex->hidden && ex->weighting == EPIC_WEIGHT_EARLY && o->b_down; j++)
        dot += o->d_y[slot * ex->hidden + j] * o->b_down[e * ex->hidden + j];
    return dot;
}

static void add_outer(double *to, const double *a, int64_t m, const double *b, int64_t n)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) to[i * n + j] += a[i] * b[j];
}

static const double *factor_of(const oracle *o, const oracle_row *r, const double *row,
                               int64_t n)
{
    if (!o->scaled || o->held == EPIC_F64) return row;
    memcpy(r->factor, row, (size_t)n * sizeof *row);
    quantize_f64(r->factor, n);
    return r->factor;
}

static void backward_slot(const oracle *o, int64_t e, int64_t slot, const oracle_row *r)
{
    const epic_experts *ex = &o->ex;
    const int64_t hidden = ex->hidden, inner = ex->inner, width = inner * (ex->ungated ? 1 : 2);
    const double *d_y = o->d_y + slot * hidden, *x = o->x_back + slot * hidden;
    const double w = o->weights ? o->weights[slot] : 1;
    const bool input = ex->weighting == EPIC_WEIGHT_INPUT;
    multiply_row(o, r->d_act, factor_of(o, r, d_y, hidden), o->w_down + e * inner * hidden,
                 hidden, inner, true);
    o->d_weights[slot] = activation_backward(o, e, slot, r);
    for (int64_t j = 0; j < hidden; j++)
        o->d_b_down[e * hidden + j] += (ex->weighting == EPIC_WEIGHT_EARLY ? w : 1) * d_y[j];
    for (int64_t j = 0; j < width; j++) o->d_b_gate_up[e * width + j] += r->d_gate_up[j];
    for (int64_t j = 0; j < width && input && o->biased_gradient; j++)
        r->d_gate_up[j] = round_to_type(r->d_gate_up[j] * w, o->held);
    add_outer(o->d_w_down + e * inner * hidden, r->held, inner, d_y, hidden);
    add_outer(o->d_w_gate_up + e * hidden * width, x, hidden, r->d_gate_up, width);
    const double *d_gate_up = factor_of(o, r, r->d_gate_up, width);
    for (int64_t h = 0; h < hidden; h++) {
        double sum = 0;
        for (int64_t j = 0; j < width; j++)
            sum += d_gate_up[j] * o->w_gate_up[(e * hidden + h) * width + j];
        o->d_x[slot * hidden + h] = sum;
    }
}

static void oracle_run(const oracle *o)
{
    const int64_t inner = o->ex.inner, width = inner * (o->ex.ungated ? 1 : 2);
    const int64_t widest = width > o->ex.hidden ? width : o->ex.hidden;
    double *memory = calloc((size_t)(2 * width + 3 * inner + widest), sizeof *memory);
    const oracle_row r = {.saved = memory,
                          .act = memory + width,
                          .d_act = memory + width + inner,
                          .d_gate_up = memory + width + 2 * inner,
                          .held = memory + 2 * width + 2 * inner,
                          .factor = memory + 2 * width + 3 * inner};
    int64_t first = 0;
    must_succeed(memory != NULL, "memory");
    for (uint32_t e = 0; e < o->ex.num_local_experts; e++) {
        for (int64_t slot = first; slot < first + o->tokens[e]; slot++) {
            forward_slot(o, e, slot, &r);
            backward_slot(o, e, slot, &r);
        }
        first += o->rows[e];
    }
    free(memory);
}

#endif
