/* SPDX-License-Identifier: Apache-2.0 */
/* The weights of the chosen and their gradient.  Included by row_template.h. */

#define MOST_CHOSEN 64

/* The weights of a token before the scale are parts[k] / divisor. */
typedef struct shares {
    REAL parts[MOST_CHOSEN]; /* 0 where there is no expert */
    REAL divisor;            /* 0: every weight is 0 */
    bool moves;              /* the divisor changes with the parts */
} shares;

/* Softmax over the chosen logits. */
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
    const REAL sum = add_up(p, k);
    for (int i = 0; i < k; i++) p[i] /= sum;
}

static void make_parts(const router_job *job, const int32_t *topk_idx, REAL *parts)
{
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
        parts[i] = e < 0 ? 0 : scores ? s[e] : sigmoid(z[e]);
    }
}

static shares share(const router_job *job, const int32_t *topk_idx)
{
    const epic_router *r = &job->router;
    shares shares = {.divisor = 1};
    make_parts(job, topk_idx, shares.parts);
    if (r->normalize == EPIC_NORMALIZE_NONE) return shares;

    REAL sum = 0;
    for (uint32_t i = 0; i < r->top_k; i++) sum += shares.parts[i];
    if (r->normalize == EPIC_NORMALIZE_SUM) {
        shares.divisor = sum + (REAL)r->eps;
        shares.moves = true;
    } else {
        shares.moves = !(sum < (REAL)r->norm_min);
        shares.divisor = shares.moves ? sum : (REAL)r->norm_min;
    }
    return shares;
}

static void weigh(const router_job *job, const int32_t *topk_idx, void *weights)
{
    shares shares = share(job, topk_idx);
    for (uint32_t i = 0; i < job->router.top_k; i++)
        shares.parts[i] = shares.divisor != 0
                              ? shares.parts[i] / shares.divisor * (REAL)job->router.scale
                              : 0;
    store(weights, job->weights_type, shares.parts, job->router.top_k);
}

/* From the gradient of the weights to that of the parts, in place. */
static void share_backward(const shares *shares, REAL *g, int k, REAL scale)
{
    REAL mean = 0;
    for (int i = 0; i < k; i++) {
        g[i] = shares->divisor != 0 ? g[i] * scale / shares->divisor : 0;
        mean += g[i] * (shares->moves ? shares->parts[i] / shares->divisor : 0);
    }
    if (shares->divisor != 0)
        for (int i = 0; i < k; i++) g[i] -= mean;
}

/* Adds the gradient of the parts, in g, to that of what they are made of, in spare: the scores,
 * or, where there are none, the logits. */
static void parts_backward(const router_job *job, const REAL *parts, const int32_t *topk_idx,
                           const REAL *g)
{
    const REAL *z = job->logits;
    REAL *d = job->spare;
    const int k = (int)job->router.top_k;
    REAL mean = 0;
    for (int i = 0; i < k; i++) mean += parts[i] * g[i];
    for (int i = 0; i < k; i++) {
        const int32_t e = topk_idx[i];
        if (e < 0) continue;
        if (job->router.weight_rule == EPIC_WEIGHT_OF_SCORE)
            d[e] += g[i];
        else if (job->router.weight_rule == EPIC_WEIGHT_SOFTMAX_CHOSEN)
            d[e] += parts[i] * (g[i] - mean);
        else
            d[e] += g[i] * (parts[i] * sigmoid(-z[e]));
    }
}

/* Leaves the gradient of the logits in spare. */
static void weigh_backward(const router_job *job, const int32_t *topk_idx,
                           const void *d_weights)
{
    const int k = (int)job->router.top_k;
    const float *narrow = d_weights;
    const double *wide = d_weights;
    REAL g[MOST_CHOSEN];
    for (int i = 0; i < k; i++)
        g[i] = job->weights_type == EPIC_F64 ? (REAL)wide[i] : (REAL)narrow[i];

    const shares shares = share(job, topk_idx);
    share_backward(&shares, g, k, (REAL)job->router.scale);
    memset(job->spare, 0, (size_t)job->num_columns * sizeof(REAL));
    parts_backward(job, shares.parts, topk_idx, g);
    if (job->router.weight_rule == EPIC_WEIGHT_OF_SCORE) score_backward(job);
}
