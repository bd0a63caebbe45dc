/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the scores of a token and their gradients. row_template.h includes this file.
 * router.score selects the score of logit z: softmax(z), sigmoid(z), sqrt(log(1 + e^z)) or z
 * itself. */

#include "rules/scalar_template.h"

/* A row is summed in blocks of this many elements (not CUDA blocks), each with SUM_LANES
 * partial sums. */
#define SUM_BLOCK 1024
/* Number of partial sums of a block of elements. It is the number of lanes of a warp, so that
 * host and CUDA kernels add in the same order and get the same bits. */
#define SUM_LANES 32

/* Converts n elements of `type` to REAL. If REAL is double, `type` is EPIC_F64. */
static void load_row(REAL *out, const void *in, uint32_t type, int64_t n)
{
    if (sizeof *out == sizeof(double))
        memcpy(out, in, (size_t)n * sizeof *out);
    else
        convert_to_float((float *)(void *)out, in, type, n);
}

static void store_row(void *out, uint32_t type, const REAL *in, int64_t n)
{
    float *narrow = out;
    if (type == EPIC_F64)
        memcpy(out, in, (size_t)n * sizeof *in);
    else if (type == EPIC_F32)
        for (int64_t i = 0; i < n; i++) narrow[i] = (float)in[i];
    else
        convert_from_float(out, type, (const float *)(const void *)in, n);
}

/* Returns the sum of at most SUM_BLOCK elements, added in the order of a warp of a GPU. Partial
 * sum i of 32 adds the elements i, i + 32 and so on. Then partial sum i + distance is added to
 * partial sum i, for the distances 16, 8, 4, 2 and 1. */
static REAL sum_block(const REAL *v, int64_t n)
{
    REAL lanes[SUM_LANES] = {0};
    int64_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int lane = 0; lane < SUM_LANES; lane++) lanes[lane] += v[i + lane];
    for (int lane = 0; i < n; i++, lane++) lanes[lane] += v[i];
    for (int distance = SUM_LANES / 2; distance > 0; distance /= 2)
        for (int lane = 0; lane < distance; lane++) lanes[lane] += lanes[lane + distance];
    return lanes[0];
}

/* Returns the sum of n elements: the sums of blocks of SUM_BLOCK elements, added in order. */
static REAL sum_row(const REAL *v, int64_t n)
{
    REAL total = 0;
    for (int64_t i = 0; i < n; i += SUM_BLOCK)
        total += sum_block(v + i, n - i < SUM_BLOCK ? n - i : SUM_BLOCK);
    return total;
}

static REAL largest_of(const REAL *v, int64_t n)
{
    REAL largest = v[0];
    for (int64_t i = 1; i < n; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}

/* Computes p = softmax(z). Returns the divisor of p: the sum of e^(z - largest z). */
static REAL make_softmax(REAL *p, const REAL *z, int64_t n)
{
    const REAL largest = largest_of(z, n);
    for (int64_t i = 0; i < n; i++) p[i] = exp_of_difference(z[i], largest);
    const REAL sum = sum_row(p, n);
    for (int64_t i = 0; i < n; i++) p[i] /= sum;
    return sum;
}

static void make_scores(REAL *s, const REAL *z, uint32_t score, int64_t n)
{
    switch (score) {
    case EPIC_SCORE_SOFTMAX:
        make_softmax(s, z, n);
        break;
    case EPIC_SCORE_SIGMOID:
        for (int64_t i = 0; i < n; i++) s[i] = score_sigmoid(z[i]);
        break;
    case EPIC_SCORE_SQRTSOFTPLUS:
        for (int64_t i = 0; i < n; i++) s[i] = score_sqrtsoftplus(z[i]);
        break;
    default:
        memcpy(s, z, (size_t)n * sizeof *s);
    }
}

/* Replaces d, the gradient of p = softmax(z), by the gradient of z: d_i = p_i * (d_i - sum_j
 * p_j d_j). `products` is scratch memory for n elements. */
static void softmax_backward(REAL *d, const REAL *p, REAL *products, int64_t n)
{
    for (int64_t i = 0; i < n; i++) products[i] = p[i] * d[i];
    const REAL mean = sum_row(products, n);
    for (int64_t i = 0; i < n; i++) d[i] = p[i] * (d[i] - mean);
}

/* Replaces job->spare, the gradient of the scores, by the gradient of the logits. */
static void score_backward(const router_job *job)
{
    const REAL *z = job->logits;
    const REAL *s = job->scores;
    REAL *d = job->spare;
    if (job->router.score == EPIC_SCORE_SOFTMAX)
        softmax_backward(d, s, job->values, job->num_columns);
    else
        for (int64_t i = 0; i < job->num_columns; i++)
            if (d[i] != 0) d[i] *= score_slope(s[i], z[i], job->router.score);
}

/* Writes job->spare, the gradient of the logits, to d_logits. With EPIC_ACCUMULATE, adds it to
 * d_logits instead. */
static void store_d_logits(const router_job *job, void *d_logits)
{
    const int64_t n = job->num_columns;
    const float *narrow = d_logits;
    REAL *d = job->spare;
    REAL *before = job->values;
    if (job->accumulate) {
        if (sizeof *d == sizeof(double) && job->grad_type == EPIC_F32)
            for (int64_t i = 0; i < n; i++) before[i] = narrow[i];
        else
            load_row(before, d_logits, job->grad_type, n);
        for (int64_t i = 0; i < n; i++) d[i] += before[i];
    }
    store_row(d_logits, job->grad_type, d, n);
}
