/* SPDX-License-Identifier: Apache-2.0 */
/* Activations and their derivatives. pass_template.h includes this file. The functions read n
 * elements that are `step` elements apart. If experts.interleaved is set, elements of the gate
 * and of the up projection alternate in a row, so `step` is 2. If not, `step` is 1.
 *
 * - SiLU: x s(x), with s the sigmoid.
 * - GELU: x Phi(x), with Phi the normal distribution function. Its tanh form is x/2 (1 +
 *   tanh(sqrt(2/pi) (x + 0.044715 x^3))). Source: arXiv 1606.08415.
 * - ReLU^2: max(x, 0)^2. Source: arXiv 2109.08668.
 * - Clamped SwiGLU (gpt-oss): x s(alpha x) (up + 1). Before that, x is limited to at most
 *   experts.limit, and `up` is limited to the range from -experts.limit to experts.limit.
 * - Clamped SiLU: x s(x) up, with x and `up` limited as for clamped SwiGLU. */

#define SQRT_HALF ((REAL)0.70710678118654752440)
#define SQRT_2_OVER_PI ((REAL)0.79788456080286535588)
#define INV_SQRT_2_PI ((REAL)0.39894228040143267794)
#define TANH_CUBIC ((REAL)0.044715)

/* Returns the sigmoid of x. Uses e^-|x|, which cannot overflow. */
static inline REAL sigmoid_of(REAL x)
{
    const REAL e = OF(exp)(x > 0 ? -x : x, 0);
    return (x > 0 ? 1 : e) / (1 + e);
}

static inline REAL normal_cdf(REAL x)
{
    return sizeof x == sizeof(float) ? (REAL)(0.5f * (1 + erff((float)x * (float)SQRT_HALF)))
                                     : (REAL)(0.5 * (1 + erf(x * SQRT_HALF)));
}

static inline REAL gelu_tanh(REAL x)
{
    const REAL inner = SQRT_2_OVER_PI * (x + TANH_CUBIC * x * x * x);
    return sizeof x == sizeof(float) ? (REAL)tanhf((float)inner) : (REAL)tanh(inner);
}

/* Sets out[i] to the activation of in[i * step], an element of the gate. The caller multiplies
 * out[i] by up_factor(). */
static void apply_activation(REAL *out, const REAL *in, int64_t n, int step,
                             const epic_experts *ex)
{
    const REAL limit = (REAL)ex->limit;
    const REAL alpha = (REAL)ex->alpha;
    switch (ex->activation) {
    case EPIC_SILU:
        for (int64_t i = 0; i < n; i++) out[i] = in[i * step] * sigmoid_of(in[i * step]);
        break;
    case EPIC_GELU:
        for (int64_t i = 0; i < n; i++) out[i] = in[i * step] * normal_cdf(in[i * step]);
        break;
    case EPIC_GELU_TANH:
        for (int64_t i = 0; i < n; i++)
            out[i] = in[i * step] / 2 * (1 + gelu_tanh(in[i * step]));
        break;
    case EPIC_RELU2:
        for (int64_t i = 0; i < n; i++) {
            const REAL x = in[i * step] < 0 ? 0 : in[i * step];
            out[i] = x * x;
        }
        break;
    default: /* EPIC_CLAMPED_SWIGLU, EPIC_CLAMPED_SILU */
        for (int64_t i = 0; i < n; i++) {
            const REAL x = in[i * step] > limit ? limit : in[i * step];
            out[i] = x * sigmoid_of(alpha * x);
        }
    }
}

/* Returns the derivative of x s(alpha x), with s the sigmoid and `ax` = alpha x. */
static inline REAL swish_slope(REAL ax)
{
    return sigmoid_of(ax) * (1 + ax * sigmoid_of(-ax));
}

static inline REAL gelu_tanh_slope(REAL x)
{
    const REAL t = gelu_tanh(x);
    const REAL inner_slope = SQRT_2_OVER_PI * (1 + 3 * TANH_CUBIC * x * x);
    return (1 + t) / 2 + x / 2 * (1 - t * t) * inner_slope;
}

/* Sets out[i] to the derivative of the activation at in[i * step]. With a clamped activation,
 * the derivative is 0 where the input exceeds experts.limit. */
static void make_slopes(REAL *out, const REAL *in, int64_t n, int step, const epic_experts *ex)
{
    const REAL limit = (REAL)ex->limit;
    const REAL alpha = (REAL)ex->alpha;
    switch (ex->activation) {
    case EPIC_SILU:
        for (int64_t i = 0; i < n; i++) out[i] = swish_slope(in[i * step]);
        break;
    case EPIC_GELU:
        for (int64_t i = 0; i < n; i++) {
            const REAL x = in[i * step];
            out[i] = normal_cdf(x) + x * INV_SQRT_2_PI * OF(exp)(-x * x / 2, 0);
        }
        break;
    case EPIC_GELU_TANH:
        for (int64_t i = 0; i < n; i++) out[i] = gelu_tanh_slope(in[i * step]);
        break;
    case EPIC_RELU2:
        for (int64_t i = 0; i < n; i++) out[i] = in[i * step] < 0 ? 0 : 2 * in[i * step];
        break;
    default: /* EPIC_CLAMPED_SWIGLU, EPIC_CLAMPED_SILU */
        for (int64_t i = 0; i < n; i++)
            out[i] = in[i * step] > limit ? 0 : swish_slope(alpha * in[i * step]);
    }
}

/* Returns the factor by which the activation of a gate element is multiplied. u is the element
 * of the up projection that belongs to the gate element. */
static inline REAL up_factor(REAL u, const epic_experts *ex)
{
    const REAL limit = (REAL)ex->limit;
    if (!experts_is_clamped(ex)) return u;
    const REAL clamped = u > limit ? limit : u < -limit ? -limit : u;
    return ex->activation == EPIC_CLAMPED_SWIGLU ? clamped + 1 : clamped;
}

/* Returns the derivative of up_factor(): 0 if u is outside of the limits, and 1 if not. */
static inline REAL up_slope(REAL u, const epic_experts *ex)
{
    const REAL limit = (REAL)ex->limit;
    return experts_is_clamped(ex) && (u > limit || u < -limit) ? 0 : 1;
}
