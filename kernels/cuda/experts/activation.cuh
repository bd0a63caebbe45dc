/* SPDX-License-Identifier: Apache-2.0 */
/* Activation functions of the experts: the value and the derivative for one number. The kernels
 * of experts/rows.cu call them. src/experts/activation_template.h has the same formulas for
 * CPUs.
 *
 *   gated expert     activation = act(gate) * up_factor(up)
 *   ungated expert   activation = act(gate), the up factor is 1
 *
 * Each function returns both the value and the derivative. If a caller uses only the value, the
 * compiler removes the computation of the derivative. */
#ifndef EPIC_ACTIVATION_CUH
#define EPIC_ACTIVATION_CUH

#include "cuda/common/ptx.cuh"
#include "epic/epic.h"

#define SQRT_HALF 0.70710678118654752440f
#define SQRT_2_OVER_PI 0.79788456080286535588f
#define INV_SQRT_2_PI 0.39894228040143267794f
#define TANH_CUBIC 0.044715f
#define LOG2_E 1.44269504088896340736f

/* The value of an activation function at one number x, and its derivative (slope) at x. */
struct Activated {
    float value, slope;
};

/* Returns the sigmoid 1 / (1 + exp(-x)). Computes it from exp(-|x|), which cannot overflow. */
__device__ __forceinline__ float sigmoid_of(float x)
{
    const float e = expf(x > 0 ? -x : x);
    return (x > 0 ? 1 : e) / (1 + e);
}

/* Returns swish(x) = x * s(y) and its derivative s(y) * (1 + y * (1 - s(y))), where y = alpha *
 * x and s is the sigmoid. */
__device__ __forceinline__ Activated compute_swish(float x, float alpha)
{
    const float s = sigmoid_of(alpha * x);
    return {x * s, s * (1 + alpha * x * sigmoid_of(-alpha * x))};
}

/* Returns GELU(x), computed with erf, and its derivative. */
__device__ __forceinline__ Activated compute_gelu(float x)
{
    const float below = 0.5f * (1 + erff(x * SQRT_HALF));
    return {x * below, below + x * INV_SQRT_2_PI * expf(-x * x / 2)};
}

/* Returns the tanh approximation of GELU(x), and its derivative. */
__device__ __forceinline__ Activated compute_gelu_tanh(float x)
{
    const float t = tanhf(SQRT_2_OVER_PI * (x + TANH_CUBIC * x * x * x));
    const float inner_slope = SQRT_2_OVER_PI * (1 + 3 * TANH_CUBIC * x * x);
    return {x / 2 * (1 + t), (1 + t) / 2 + x / 2 * (1 - t * t) * inner_slope};
}

/* A faster compute_swish() for rows of 16-bit numbers, with the approximate exp2 and reciprocal
 * instructions, without a branch or a division. The error is a few units in the last place of
 * float32. */
__device__ __forceinline__ Activated compute_swish_approx(float x, float alpha)
{
    const float y = alpha * x, s = reciprocal_approx(1 + exp2_approx(y * -LOG2_E));
    return {x * s, s * (1 + y * (1 - s))};
}

/* Returns the value and slope, at the gate value x, of the activation function that `ex`
 * selects. */
__device__ __forceinline__ Activated compute_activation(float x, const epic_experts &ex)
{
    const bool above = x > ex.limit;
    switch (ex.activation) {
    case EPIC_SILU:
        return compute_swish(x, 1);
    case EPIC_GELU:
        return compute_gelu(x);
    case EPIC_GELU_TANH:
        return compute_gelu_tanh(x);
    case EPIC_RELU2:
        return {x < 0 ? 0 : x * x, x < 0 ? 0 : 2 * x};
    /* EPIC_CLAMPED_SWIGLU and EPIC_CLAMPED_SILU: if x is above ex.limit, the value is that at
     * ex.limit and the slope is 0 */
    default:
        const Activated a = compute_swish(above ? ex.limit : x, ex.alpha);
        return {a.value, above ? 0 : a.slope};
    }
}

/* Returns the factor, and its derivative, by which a gated expert multiplies the activation of
 * the gate. It depends on the up value u: EPIC_CLAMPED_SWIGLU clamps u and adds 1,
 * EPIC_CLAMPED_SILU only clamps u, and otherwise the factor is u. Without a gate it is 1. */
__device__ __forceinline__ Activated compute_up_factor(float u, const epic_experts &ex)
{
    const bool clamped =
        ex.activation == EPIC_CLAMPED_SWIGLU || ex.activation == EPIC_CLAMPED_SILU;
    if (ex.ungated) return {1, 0};
    if (!clamped) return {u, 1};
    const float value = u > ex.limit ? ex.limit : u < -ex.limit ? -ex.limit : u;
    return {ex.activation == EPIC_CLAMPED_SWIGLU ? value + 1 : value,
            u > ex.limit || u < -ex.limit ? 0.0f : 1.0f};
}

/* Values of the template argument ACTIVATION. ANY_ACTIVATION selects the activation function by
 * job.experts. The others are faster, for rows of 16-bit numbers and gated experts: with
 * EPIC_SILU (GATED_SILU), or EPIC_CLAMPED_SWIGLU and EPIC_CLAMPED_SILU (GATED_CLAMPED). */
enum { ANY_ACTIVATION, GATED_SILU, GATED_CLAMPED };

/* Variants of compute_activation() and compute_up_factor() that select the activation at
 * compile time, by ACTIVATION. */
template <int ACTIVATION>
__device__ __forceinline__ Activated compute_activation(float x, const epic_experts &ex)
{
    const bool above = ACTIVATION == GATED_CLAMPED && x > ex.limit;
    if (ACTIVATION == ANY_ACTIVATION) return compute_activation(x, ex);
    const Activated a =
        compute_swish_approx(above ? ex.limit : x, ACTIVATION == GATED_SILU ? 1 : ex.alpha);
    return {a.value, above ? 0 : a.slope};
}

template <int ACTIVATION>
__device__ __forceinline__ Activated compute_up_factor(float u, const epic_experts &ex)
{
    return ACTIVATION == GATED_SILU ? Activated{u, 1} : compute_up_factor(u, ex);
}

#endif
