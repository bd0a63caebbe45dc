/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the contribution of one token to the losses, and the gradient of this contribution.
 * row_template.h includes this file.
 *
 * Balance loss: the contribution is the sum over experts e of P_e * load_e. P_e is the
 * probability of expert e, and load_e is the number of choices of e. If router.score is softmax
 * or logits, P is the softmax of the logits. For other scores P_e is the score of e divided by
 * the sum of all scores. The derivative of the contribution with respect to P_e is load_e. The
 * gradient of the logits follows from this derivative by the chain rule.
 *
 * Z-loss: the contribution is logsumexp(z)^2, where z are the logits. Its gradient is 2 *
 * logsumexp(z) * softmax(z).
 *
 * Sums over experts and over tokens are computed in float64. losses.c has the sources of the
 * formulas. */

/* Writes the probabilities P to job->scores. Returns 1 for a softmax. For other scores, returns
 * the sum of the scores. P is the scores divided by this sum or, if the sum is 0, the scores
 * themselves. */
static REAL make_probabilities(const router_job *job, const void *logits)
{
    const uint32_t score = job->router.score;
    const int64_t n = job->num_columns;
    REAL *p = job->scores;
    load_row(job->logits, logits, job->type, n);
    if (score == EPIC_SCORE_SOFTMAX || score == EPIC_SCORE_LOGITS) {
        make_softmax(p, job->logits, n);
        return 1;
    }
    make_scores(p, job->logits, score, n);
    const REAL sum = sum_row(p, n);
    for (int64_t i = 0; sum != 0 && i < n; i++) p[i] /= sum;
    return sum;
}

/* Returns the sum of P_e * load_e over the experts e. Adds in the same order as sum_row(). */
static double dot_load(const router_job *job, const int32_t *load)
{
    const REAL *p = job->scores;
    const int64_t n = job->router.num_experts;
    double total = 0;
    for (int64_t first = 0; first < n; first += SUM_BLOCK) {
        const int64_t end = first + SUM_BLOCK < n ? first + SUM_BLOCK : n;
        double lanes[SUM_LANES] = {0};
        for (int64_t i = first; i < end; i++) lanes[i % SUM_LANES] += (double)p[i] * load[i];
        for (int distance = SUM_LANES / 2; distance > 0; distance /= 2)
            for (int lane = 0; lane < distance; lane++) lanes[lane] += lanes[lane + distance];
        total += lanes[0];
    }
    return total;
}

static double sum_balance(const router_job *job, const void *logits, const int32_t *load)
{
    make_probabilities(job, logits);
    return dot_load(job, load);
}

/* Computes dz, the gradient of factor * (sum of P_e * load_e) with respect to the logits z. m
 * is the sum of P_j * load_j. The formula of dz depends on the score:
 *
 * - softmax: dz_i = factor * P_i (load_i - m).
 * - other scores s: dz_i = factor * (load_i - m) / (sum of s) * ds_i/dz_i.
 *
 * Zero-experts have load 0. */
static void balance_backward(const router_job *job, const void *logits, const int32_t *load,
                             double factor, void *d_logits)
{
    const uint32_t score = job->router.score;
    const int64_t n = job->num_columns;
    const REAL *z = job->logits;
    const REAL *p = job->scores;
    REAL *d = job->spare;
    const REAL divisor = make_probabilities(job, logits);
    const double mean = dot_load(job, load);
    for (int64_t i = 0; i < n; i++) {
        const double own = i < job->router.num_experts ? load[i] : 0;
        d[i] = (REAL)(factor * (own - mean));
        if (score == EPIC_SCORE_SOFTMAX || score == EPIC_SCORE_LOGITS)
            d[i] *= p[i];
        else
            d[i] = divisor == 0 ? 0 : d[i] / divisor * score_slope(p[i] * divisor, z[i], score);
    }
    store_d_logits(job, d_logits);
}

/* Returns log(sum of e^z), computed without overflow. Writes softmax(z) to job->scores. */
static double compute_logsumexp(const router_job *job, const void *logits)
{
    load_row(job->logits, logits, job->type, job->num_columns);
    const REAL sum = make_softmax(job->scores, job->logits, job->num_columns);
    return (double)largest_of(job->logits, job->num_columns) + log((double)sum);
}

static double square_logsumexp(const router_job *job, const void *logits)
{
    const double l = compute_logsumexp(job, logits);
    return l * l;
}

/* Computes d_logits, the gradient of factor * L^2 with L = logsumexp(z): 2 * factor * L *
 * softmax(z). */
static void z_backward(const router_job *job, const void *logits, double factor, void *d_logits)
{
    const REAL *p = job->scores;
    REAL *d = job->spare;
    const double l = compute_logsumexp(job, logits);
    for (int64_t i = 0; i < job->num_columns; i++) d[i] = (REAL)(2 * factor * l) * p[i];
    store_d_logits(job, d_logits);
}
