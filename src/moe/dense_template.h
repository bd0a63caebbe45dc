/* SPDX-License-Identifier: Apache-2.0 */
/* Host arithmetic on one block of tokens for the gate, the zero-experts and the gate of the
 * shared expert (dense_ops in moe.h). dense_f32.c and dense_f64.c include this file and define:
 * REAL (float or double), GEMM and GEMM_INVARIANT (the GEMM functions), and OPS (the name of
 * the table of functions).
 *
 * Rows of other types are first converted to REAL: GATE_TILE columns of all rows at a time for
 * the GEMMs of the gate, and one row at a time for everything else. */
#include <math.h>
#include <string.h>

#include "experts/blas.h"
#include "moe/moe.h"
#include "rules/convert.h"

/* Converts n elements of `type` to REAL. If `type` is EPIC_F64, REAL is double and the elements
 * are only copied. */
static void load_reals(REAL *out, const void *in, uint32_t type, int64_t n)
{
    if (type == EPIC_F64)
        memcpy(out, in, (size_t)n * sizeof *out);
    else
        convert_to_float((float *)(void *)out, in, type, n);
}

static void store_reals(void *out, uint32_t type, const REAL *in, int64_t n)
{
    if (type == EPIC_F64)
        memcpy(out, in, (size_t)n * sizeof *in);
    else
        convert_from_float(out, type, (const float *)(const void *)in, n);
}

static uint32_t row_type(const token_block *b)
{
    return b->job->experts.row_type;
}

static const void *row_at(const token_block *b, const epic_const_rows *rows, int64_t token)
{
    return (const char *)rows->data + token * b->job->row_bytes;
}

static void *out_row_at(const token_block *b, const epic_rows *rows, int64_t token)
{
    return (char *)rows->data + token * b->job->row_bytes;
}

/* Returns the columns [first, first + count) of x as REAL. Sets *stride to the distance in
 * elements from one row to the next. Rows of another type are converted into work.tile. */
static const REAL *columns_of(const token_block *b, int64_t first, int64_t count,
                              int64_t *stride)
{
    const moe_job *j = b->job;
    const int64_t element = j->row_bytes / j->hidden;
    if (row_type(b) == j->real_type) {
        *stride = j->hidden;
        return (const REAL *)b->x.data + first;
    }
    REAL *tile = j->work.tile;
    *stride = count;
    for (int64_t t = 0; t < b->tokens; t++)
        load_reals(tile + t * count, (const char *)row_at(b, &b->x, t) + first * element,
                   row_type(b), count);
    return tile;
}

static void multiply_matrices(const moe_job *j, const gemm *g)
{
    if (j->is_invariant)
        GEMM_INVARIANT(g, j->work.product);
    else
        GEMM(g);
}

static int64_t smaller_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Computes the GEMM x W_gate as a sum of GEMMs, each of GATE_TILE columns of x and the matching
 * rows of W_gate. */
static void gate_forward(const token_block *b, void *logits)
{
    const moe_job *j = b->job;
    const REAL *bias = j->weights.b_gate;
    REAL *out = logits;
    for (int64_t first = 0; first < j->hidden; first += GATE_TILE) {
        gemm g = {.m = b->tokens,
                  .n = j->columns,
                  .k = smaller_of(GATE_TILE, j->hidden - first),
                  .b = (const REAL *)j->weights.w_gate + first * j->columns,
                  .ldb = j->columns,
                  .c = out,
                  .ldc = j->columns,
                  .add = first > 0};
        g.a = columns_of(b, first, g.k, &g.lda);
        multiply_matrices(j, &g);
    }
    for (int64_t t = 0; bias && t < b->tokens; t++)
        for (int64_t e = 0; e < j->columns; e++) out[t * j->columns + e] += bias[e];
}

/* Returns true if choice `choice` of the block is a zero-expert, whose id is num_experts or
 * higher. */
static bool is_zero_expert(const token_block *b, int64_t choice)
{
    return b->topk_idx[choice] >= (int32_t)b->job->router.num_experts;
}

static void add_zero_experts(const token_block *b, int64_t token, const REAL *row, REAL *acc)
{
    const moe_job *j = b->job;
    for (int64_t i = token * j->top_k; i < (token + 1) * j->top_k; i++) {
        if (!is_zero_expert(b, i)) continue;
        const REAL w = ((const REAL *)b->weights)[i];
        for (int64_t h = 0; h < j->hidden; h++) acc[h] += w * row[h];
    }
}

static void add_local_experts(const token_block *b, const epic_rows *out, const void *shared_y)
{
    const moe_job *j = b->job;
    if (!shared_y && !j->router.zero_experts) return;
    REAL *acc = j->work.rows, *row = acc + j->hidden;
    for (int64_t t = 0; t < b->tokens; t++) {
        load_reals(acc, out_row_at(b, out, t), row_type(b), j->hidden);
        load_reals(row, row_at(b, &b->x, t), row_type(b), j->hidden);
        add_zero_experts(b, t, row, acc);
        if (shared_y) {
            load_reals(row, (const char *)shared_y + t * j->row_bytes, row_type(b), j->hidden);
            for (int64_t h = 0; h < j->hidden; h++) acc[h] += row[h];
        }
        store_reals(out_row_at(b, out, t), row_type(b), acc, j->hidden);
    }
}

/* Computes the sigmoid of z = dot(row, w_shared_gate) for each token. Sums z in float64, and
 * uses e^-|z|, which cannot overflow. */
static void shared_gate_forward(const token_block *b, void *weights)
{
    const moe_job *j = b->job;
    const REAL *gate = j->weights.w_shared_gate;
    REAL *row = j->work.rows;
    for (int64_t t = 0; t < b->tokens; t++) {
        double z = 0;
        load_reals(row, row_at(b, &b->x, t), row_type(b), j->hidden);
        for (int64_t h = 0; h < j->hidden; h++) z += (double)row[h] * gate[h];
        const double e = exp(-fabs(z));
        ((REAL *)weights)[t] = (REAL)((z > 0 ? 1 : e) / (1 + e));
    }
}

/* Returns the gradient of z, the argument of the sigmoid s: d_weight * s * (1 - s). */
static REAL shared_gate_slope(const moe_job *j, int64_t token)
{
    const REAL s = ((const REAL *)j->work.shared_weights)[token];
    return ((const REAL *)j->work.d_shared_weights)[token] * s * (1 - s);
}

static void shared_gate_gradient(const token_block *b, REAL *gradient)
{
    const moe_job *j = b->job;
    REAL *row = j->work.rows;
    for (int64_t t = 0; t < b->tokens; t++) {
        const REAL d = shared_gate_slope(j, t);
        load_reals(row, row_at(b, &b->x, t), row_type(b), j->hidden);
        for (int64_t h = 0; h < j->hidden; h++) gradient[h] += d * row[h];
    }
}

/* Computes the gradients of the weights of zero-experts. A zero-expert returns x times its
 * weight, so the gradient of the weight is dot(x, d_out). */
static void zero_expert_d_weights(const token_block *b, const epic_const_rows *d_out,
                                  void *d_weights)
{
    const moe_job *j = b->job;
    if (!j->router.zero_experts) return;
    REAL *row = j->work.rows, *grad = row + j->hidden;
    for (int64_t t = 0; t < b->tokens; t++) {
        load_reals(row, row_at(b, &b->x, t), row_type(b), j->hidden);
        load_reals(grad, row_at(b, d_out, t), row_type(b), j->hidden);
        REAL dot = 0;
        for (int64_t h = 0; h < j->hidden; h++) dot += row[h] * grad[h];
        for (int64_t i = t * j->top_k; i < (t + 1) * j->top_k; i++)
            if (is_zero_expert(b, i)) ((REAL *)d_weights)[i] = dot;
    }
}

/* Writes d_W_gate = x^T d_logits, and d_b_gate = the sum of d_logits over the tokens, to their
 * offsets (dense_grad_offsets) in `dense_grads`. */
static void gate_gradient(const token_block *b, const REAL *d_logits, REAL *dense_grads)
{
    const moe_job *j = b->job;
    const dense_grad_offsets parts = moe_dense_grad_offsets(j);
    for (int64_t first = 0; first < j->hidden; first += GATE_TILE) {
        gemm g = {.m = smaller_of(GATE_TILE, j->hidden - first),
                  .n = j->columns,
                  .k = b->tokens,
                  .transpose_a = true,
                  .b = d_logits,
                  .ldb = j->columns,
                  .c = dense_grads + parts.w_gate + first * j->columns,
                  .ldc = j->columns};
        g.a = columns_of(b, first, g.m, &g.lda);
        multiply_matrices(j, &g);
    }
    REAL *bias = dense_grads + parts.b_gate;
    for (int64_t t = 0; t < b->tokens; t++)
        for (int64_t e = 0; e < j->columns; e++) bias[e] += d_logits[t * j->columns + e];
}

/* Computes the term d_logits W_gate^T of d_x for all rows in one GEMM, and then adds the other
 * terms of d_x row by row. */
static void gate_backward(const token_block *b, const void *d_logits,
                          const epic_const_rows *d_out, const void *d_shared,
                          const epic_rows *d_x, void *dense_grads)
{
    const moe_job *j = b->job;
    REAL *acc = j->work.rows, *row = acc + j->block * j->hidden;
    const REAL *shared_gate = j->weights.w_shared_gate;
    gate_gradient(b, d_logits, dense_grads);
    if (shared_gate)
        shared_gate_gradient(b, (REAL *)dense_grads + moe_dense_grad_offsets(j).w_shared_gate);
    if (!d_x) return;
    const gemm back = {.m = b->tokens,
                       .n = j->hidden,
                       .k = j->columns,
                       .a = d_logits,
                       .lda = j->columns,
                       .b = j->weights.w_gate,
                       .ldb = j->columns,
                       .transpose_b = true,
                       .c = acc,
                       .ldc = j->hidden};
    multiply_matrices(j, &back);
    for (int64_t t = 0; t < b->tokens; t++) {
        REAL *sum = acc + t * j->hidden;
        load_reals(row, out_row_at(b, d_x, t), row_type(b), j->hidden);
        for (int64_t h = 0; h < j->hidden; h++) sum[h] += row[h];
        if (j->router.zero_experts) {
            load_reals(row, row_at(b, d_out, t), row_type(b), j->hidden);
            add_zero_experts(b, t, row, sum);
        }
        if (d_shared) {
            load_reals(row, (const char *)d_shared + t * j->row_bytes, row_type(b), j->hidden);
            for (int64_t h = 0; h < j->hidden; h++) sum[h] += row[h];
        }
        const REAL d = shared_gate ? shared_gate_slope(j, t) : 0;
        for (int64_t h = 0; shared_gate && h < j->hidden; h++) sum[h] += d * shared_gate[h];
        store_reals(out_row_at(b, d_x, t), row_type(b), sum, j->hidden);
    }
}

static void add_reals(void *to, const void *from, int64_t n)
{
    REAL *a = to;
    const REAL *b = from;
    for (int64_t i = 0; i < n; i++) a[i] += b[i];
}

static REAL sum_range(const REAL *values, int64_t n)
{
    if (n == 1) return values[0];
    return sum_range(values, n / 2) + sum_range(values + n / 2, n - n / 2);
}

static double sum_in_tree(const void *values, int64_t n)
{
    return sum_range(values, n);
}

const dense_ops OPS = {
    gate_forward,  add_local_experts, shared_gate_forward, zero_expert_d_weights,
    gate_backward, add_reals,         sum_in_tree};
