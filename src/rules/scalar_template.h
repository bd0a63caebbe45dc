/* SPDX-License-Identifier: Apache-2.0 */
/* The scores of one logit and their slopes, with the same bits on host and CUDA.  Include it
 * after scalar.h, with REAL and OF(name) defined. */

/* Below this, sqrt(log(1 + e^z)) is e^(z/2), to the last bit but one. */
#define SMALL_LOGIT (sizeof(REAL) == sizeof(float) ? -17 : -37)

/* Returns e^(a - b) for a <= b, without the error of rounding the difference. */
SCALAR REAL exp_of_difference(REAL a, REAL b)
{
    const REAL d = a - b;
    const REAL back = d - a;
    const REAL low = (a - (d - back)) - (b + back);
    return OF(exp)(d, low);
}

SCALAR REAL score_sigmoid(REAL z)
{
    const REAL e = OF(exp)(z > 0 ? -z : z, 0);
    return OF(part_of)(z > 0 ? 1 : e, 1 + e);
}

SCALAR REAL score_sqrtsoftplus(REAL z)
{
    if (z < SMALL_LOGIT) return OF(exp)(z / 2, 0);
    const REAL e = OF(exp)(z > 0 ? -z : z, 0);
    return OF(sqrt)((z > 0 ? z : 0) + OF(log1p)(e));
}

/* Returns ds/dz for the scores that depend on their own logit alone. */
SCALAR REAL score_slope(REAL s, REAL z, uint32_t score)
{
    if (score == EPIC_SCORE_SIGMOID) return s * score_sigmoid(-z);
    if (score == EPIC_SCORE_LOGITS) return 1;
    return z < SMALL_LOGIT ? s / 2 : score_sigmoid(z) / (2 * s);
}
