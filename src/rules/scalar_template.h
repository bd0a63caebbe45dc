/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the score of one logit and the derivative of the score. The results have the same
 * bits on the host and on CUDA devices. Include this file after scalar.h, with two macros
 * defined: REAL is float or double, and OF(name) is name_f32 or name_f64. */

/* Below this logit, sqrt(log(1 + e^z)) equals e^(z/2) except for the last bit. */
#define SMALL_LOGIT (sizeof(REAL) == sizeof(float) ? -17 : -37)

/* Returns e^(a - b) for a <= b, without the rounding error of a - b (TwoSum, Knuth). */
SCALAR REAL exp_of_difference(REAL a, REAL b)
{
    const REAL d = a - b;
    const REAL back = d - a;
    const REAL low = (a - (d - back)) - (b + back);
    return OF(exp)(d, low);
}

/* Returns the sigmoid of z. Uses e^-|z|, which cannot overflow. */
SCALAR REAL score_sigmoid(REAL z)
{
    const REAL e = OF(exp)(z > 0 ? -z : z, 0);
    return OF(part_of)(z > 0 ? 1 : e, 1 + e);
}

/* Returns sqrt(log(1 + e^z)). Uses log(1 + e^z) = max(z, 0) + log(1 + e^-|z|). */
SCALAR REAL score_sqrtsoftplus(REAL z)
{
    if (z < SMALL_LOGIT) return OF(exp)(z / 2, 0);
    const REAL e = OF(exp)(z > 0 ? -z : z, 0);
    return OF(sqrt)((z > 0 ? z : 0) + OF(log1p)(e));
}

/* Returns ds/dz for the score s of logit z: sigmoid, sqrt(log(1 + e^z)), or z itself. s is the
 * result of forward. It is not used if the score is z itself. */
SCALAR REAL score_slope(REAL s, REAL z, uint32_t score)
{
    if (score == EPIC_SCORE_SIGMOID) return s * score_sigmoid(-z);
    if (score == EPIC_SCORE_LOGITS) return 1;
    return z < SMALL_LOGIT ? s / 2 : score_sigmoid(z) / (2 * s);
}
