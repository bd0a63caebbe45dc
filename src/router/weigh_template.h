/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the weights of a token's chosen experts, and their gradients. row_template.h
 * includes this file.
 *
 * If the id of choice i is expert e, the weight of the choice is parts[i] / divisor * scale *
 * scale_of_expert[e].
 *
 * - parts[i] depends on the weight rule: it is the score of e, the sigmoid of the logit of e,
 *   the element of e in the softmax over the logits of the chosen experts, or the probability
 *   of e in SparseMixer.
 * - The divisor depends on the normalization: it is the sum of the parts plus eps
 *   (EPIC_NORMALIZE_SUM), the larger of the sum and norm_min (EPIC_NORMALIZE_CLAMPED), or 1 (no
 *   normalization).
 *
 * If the id of a choice is negative, the choice has no expert, and its weight is 0. */

#define MAX_CHOSEN 64 /* maximum value of top_k */

/* The values from which the weights of one token are computed (formula above). */
typedef struct shares {
    REAL parts[MAX_CHOSEN]; /* 0 for a choice without an expert */
    REAL divisor;           /* if it is 0, every weight is 0 */
    /* true: the divisor depends on `parts`, so backward must also differentiate the divisor */
    bool is_divisor_variable;
} shares;

/* Computes p [k], the softmax over the logits of the chosen experts. p is 0 for a choice
 * without an expert. */
static void softmax_chosen(REAL *p, const REAL *z, const int32_t *topk_idx, int k)
{
    int best = -1;
    for (int i = 0; i < k; i++) {
        p[i] = 0;
        if (topk_idx[i] >= 0 && (best < 0 || z[topk_idx[i]] > z[topk_idx[best]])) best = i;
    }
    if (best < 0) return;
    for (int i = 0; i < k; i++)
        if (topk_idx[i] >= 0) p[i] = exp_of_difference(z[topk_idx[i]], z[topk_idx[best]]);
    const REAL sum = sum_row(p, k);
    for (int i = 0; i < k; i++) p[i] /= sum;
}

/* Computes p [num_columns], the softmax for choice i in EPIC_WEIGHT_SPARSEMIXER (arXiv
 * 2310.00811). The part of choice i is the element of p for its expert. The softmax leaves out
 * two sets of columns, whose p is 0:
 *
 * - The columns of earlier choices.
 * - Columns whose logit z is far below `largest`, the largest logit of the remaining columns:
 *   those with (largest - z) / max(|z|, largest) > 2 * jitter.
 *
 * The formula is from Phi-3.5-MoE. EPIC also uses it if the largest logit is below 0. */
static void masked_softmax(const router_job *job, const int32_t *topk_idx, int i, REAL *p)
{
    const REAL *z = job->logits;
    const REAL far = (REAL)(2 * job->router.jitter);
    const int64_t n = job->num_columns;
    memcpy(p, z, (size_t)n * sizeof *p);
    for (int c = 0; c < i; c++)
        if (topk_idx[c] >= 0) p[topk_idx[c]] = -(REAL)INFINITY;
    const REAL largest = largest_of(p, n);
    for (int64_t j = 0; j < n; j++) {
        const REAL size = z[j] < 0 ? -z[j] : z[j];
        const bool left = p[j] > -(REAL)INFINITY;
        const bool out = (largest - z[j]) / (size > largest ? size : largest) > far;
        p[j] = left && !out ? exp_of_difference(z[j], largest) : 0;
    }
    const REAL sum = sum_row(p, n);
    for (int64_t j = 0; j < n && sum != 0; j++) p[j] /= sum;
}

static void sparsemixer_parts(const router_job *job, const int32_t *topk_idx, REAL *parts)
{
    REAL *p = job->values;
    for (int i = 0; i < (int)job->router.top_k; i++) {
        parts[i] = 0;
        if (topk_idx[i] < 0) continue;
        masked_softmax(job, topk_idx, i, p);
        parts[i] = p[topk_idx[i]];
    }
}

/* Adds the gradient of the logits to job->spare for EPIC_WEIGHT_SPARSEMIXER. g is the gradient
 * of the parts. Each part depends on the logits through its softmax. The set of columns that
 * the softmax leaves out is treated as constant. */
static void sparsemixer_backward(const router_job *job, const REAL *parts,
                                 const int32_t *topk_idx, const REAL *g)
{
    REAL *p = job->values;
    REAL *d = job->spare;
    for (int i = 0; i < (int)job->router.top_k; i++) {
        if (topk_idx[i] < 0) continue;
        masked_softmax(job, topk_idx, i, p);
        const REAL size = parts[i] * g[i];
        for (int64_t j = 0; j < job->num_columns; j++)
            d[j] += size * ((j == topk_idx[i]) - p[j]);
    }
}

static void make_parts(const router_job *job, const int32_t *topk_idx, REAL *parts)
{
    if (job->router.weight_rule == EPIC_WEIGHT_SPARSEMIXER) {
        sparsemixer_parts(job, topk_idx, parts);
        return;
    }
    const REAL *z = job->logits;
    const REAL *s = job->scores;
    const int k = (int)job->router.top_k;
    if (job->router.weight_rule == EPIC_WEIGHT_SOFTMAX_CHOSEN) {
        softmax_chosen(parts, z, topk_idx, k);
        return;
    }
    const bool scores = job->router.weight_rule == EPIC_WEIGHT_OF_SCORE;
    for (int i = 0; i < k; i++) {
        const int32_t e = topk_idx[i];
        parts[i] = e < 0 ? 0 : scores ? s[e] : score_sigmoid(z[e]);
    }
}

static shares make_shares(const router_job *job, const int32_t *topk_idx)
{
    const epic_router *r = &job->router;
    shares shares = {.divisor = 1};
    make_parts(job, topk_idx, shares.parts);
    if (r->normalize == EPIC_NORMALIZE_NONE) return shares;

    REAL sum = 0;
    for (uint32_t i = 0; i < r->top_k; i++) sum += shares.parts[i];
    if (r->normalize == EPIC_NORMALIZE_SUM) {
        shares.divisor = sum + (REAL)r->eps;
        shares.is_divisor_variable = true;
    } else {
        shares.is_divisor_variable = !(sum < (REAL)r->norm_min);
        shares.divisor = shares.is_divisor_variable ? sum : (REAL)r->norm_min;
    }
    return shares;
}

/* Returns scale_of_expert of expert e. Returns 1 if the router has no scale_of_expert or if e
 * is negative. */
static REAL scale_of(const router_job *job, int32_t e)
{
    const float *narrow = job->scale_of_expert;
    const double *wide = job->scale_of_expert;
    if (job->scale_of_expert == NULL || e < 0) return 1;
    return job->weights_type == EPIC_F64 ? (REAL)wide[e] : (REAL)narrow[e];
}

static void weigh_choices(const router_job *job, const int32_t *topk_idx, void *weights)
{
    shares shares = make_shares(job, topk_idx);
    for (uint32_t i = 0; i < job->router.top_k; i++)
        shares.parts[i] = shares.divisor != 0
                              ? shares.parts[i] / shares.divisor * (REAL)job->router.scale *
                                    scale_of(job, topk_idx[i])
                              : 0;
    store_row(weights, job->weights_type, shares.parts, job->router.top_k);
}

/* Adds the gradient of scale_of_expert to job->scale_sums. Then multiplies g, the gradient of
 * the weights, by scale_of_expert, so that g becomes the gradient of parts[i] / divisor *
 * scale. */
static void scale_backward(const router_job *job, const shares *shares, const int32_t *topk_idx,
                           REAL *g)
{
    for (uint32_t i = 0; i < job->router.top_k; i++) {
        const int32_t e = topk_idx[i];
        if (e < 0 || shares->divisor == 0) continue;
        const REAL weight = shares->parts[i] / shares->divisor * (REAL)job->router.scale;
        job->scale_sums[e] += (double)g[i] * (double)weight;
        g[i] *= scale_of(job, e);
    }
}

/* Replaces g, the gradient of the weights, by the gradient of the parts. Forward computes
 * weight_i = part_i * scale / divisor. If the divisor is the sum of the parts, the gradient of
 * part_i is (g_i - sum_j g_j part_j / divisor) * scale / divisor. */
static void share_backward(const shares *shares, REAL *g, int k, REAL scale)
{
    REAL mean = 0;
    for (int i = 0; i < k; i++) {
        g[i] = shares->divisor != 0 ? g[i] * scale / shares->divisor : 0;
        mean += g[i] * (shares->is_divisor_variable ? shares->parts[i] / shares->divisor : 0);
    }
    if (shares->divisor != 0)
        for (int i = 0; i < k; i++) g[i] -= mean;
}

/* Adds the gradient of the scores (EPIC_WEIGHT_OF_SCORE) or of the logits (other weight rules)
 * to job->spare. g is the gradient of the parts. */
static void parts_backward(const router_job *job, const REAL *parts, const int32_t *topk_idx,
                           const REAL *g)
{
    const REAL *z = job->logits;
    REAL *d = job->spare;
    const int k = (int)job->router.top_k;
    REAL mean = 0;
    if (job->router.weight_rule == EPIC_WEIGHT_SPARSEMIXER) {
        sparsemixer_backward(job, parts, topk_idx, g);
        return;
    }
    for (int i = 0; i < k; i++) mean += parts[i] * g[i];
    for (int i = 0; i < k; i++) {
        const int32_t e = topk_idx[i];
        if (e < 0) continue;
        if (job->router.weight_rule == EPIC_WEIGHT_OF_SCORE)
            d[e] += g[i];
        else if (job->router.weight_rule == EPIC_WEIGHT_SOFTMAX_CHOSEN)
            d[e] += parts[i] * (g[i] - mean);
        else
            d[e] += g[i] * (parts[i] * score_sigmoid(-z[e]));
    }
}

static void weigh_backward(const router_job *job, const int32_t *topk_idx,
                           const void *d_weights)
{
    const int k = (int)job->router.top_k;
    const float *narrow = d_weights;
    const double *wide = d_weights;
    REAL g[MAX_CHOSEN];
    for (int i = 0; i < k; i++)
        g[i] = job->weights_type == EPIC_F64 ? (REAL)wide[i] : (REAL)narrow[i];

    const shares shares = make_shares(job, topk_idx);
    if (job->scale_of_expert != NULL) scale_backward(job, &shares, topk_idx, g);
    share_backward(&shares, g, k, (REAL)job->router.scale);
    memset(job->spare, 0, (size_t)job->num_columns * sizeof(REAL));
    parts_backward(job, shares.parts, topk_idx, g);
    if (job->router.weight_rule == EPIC_WEIGHT_OF_SCORE) score_backward(job);
}
