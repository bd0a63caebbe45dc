/* SPDX-License-Identifier: Apache-2.0 */
/* Activation functions of the experts, and their derivatives. CPUs use the same formulas
 * (src/experts/activation_template.h).
 *
 *   gated expert     activation = act(gate) * up_factor(up)
 *   ungated expert   activation = act(gate), the up factor is 1
 *
 * If a caller uses only the value, the compiler removes the computation of the derivative. */
#ifndef EPIC_ACTIVATION_CUH
#define EPIC_ACTIVATION_CUH

#include "cuda/common/ptx.cuh"
#include "epic/epic.h"

#define SQRT_HALF 0.70710678118654752440f
#define SQRT_2_OVER_PI 0.79788456080286535588f
#define INV_SQRT_2_PI 0.39894228040143267794f
#define TANH_CUBIC 0.044715f
#define LOG2_E 1.44269504088896340736f

/* The value of an activation function at x, and its derivative (slope) at x. */
struct Activated {
    float value, slope;
};

/* Returns the sigmoid of x. Computes exp(-|x|) instead of exp(-x), because exp(-|x|) cannot
 * overflow. */
__device__ __forceinline__ float sigmoid_of(float x)
{
    const float e = expf(x > 0 ? -x : x);
    return (x > 0 ? 1 : e) / (1 + e);
}

/* Returns swish(x) = x * s(y) and the derivative of swish, s(y) * (1 + y * (1 - s(y))). Here y
 * is alpha * x, and s is the sigmoid function. */
__device__ __forceinline__ Activated compute_swish(float x, float alpha)
{
    const float s = sigmoid_of(alpha * x);
    return {x * s, s * (1 + alpha * x * sigmoid_of(-alpha * x))};
}

__device__ __forceinline__ Activated compute_gelu(float x)
{
    const float below = 0.5f * (1 + erff(x * SQRT_HALF));
    return {x * below, below + x * INV_SQRT_2_PI * expf(-x * x / 2)};
}

__device__ __forceinline__ Activated compute_gelu_tanh(float x)
{
    const float t = tanhf(SQRT_2_OVER_PI * (x + TANH_CUBIC * x * x * x));
    const float inner_slope = SQRT_2_OVER_PI * (1 + 3 * TANH_CUBIC * x * x);
    return {x / 2 * (1 + t), (1 + t) / 2 + x / 2 * (1 - t * t) * inner_slope};
}

/* Like compute_swish(), but with approximate instructions, for rows of 16-bit elements. The
 * error is a few units in the last place of float32. */
__device__ __forceinline__ Activated compute_swish_approx(float x, float alpha)
{
    const float y = alpha * x, s = reciprocal_approx(1 + exp2_approx(y * -LOG2_E));
    return {x * s, s * (1 + y * (1 - s))};
}

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
    /* EPIC_CLAMPED_SWIGLU and EPIC_CLAMPED_SILU. If x is above ex.limit, the value is
     * swish(ex.limit), and the slope is 0. */
    default:
        const Activated a = compute_swish(above ? ex.limit : x, ex.alpha);
        return {a.value, above ? 0 : a.slope};
    }
}

/* Returns the up factor, by which a gated expert multiplies act(gate), and the derivative of
 * the up factor. u: the up value. The up factor is usually u. With EPIC_CLAMPED_SILU it is the
 * clamped u. With EPIC_CLAMPED_SWIGLU it is the clamped u plus 1. For an ungated expert it is
 * 1. */
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

/* Values of the template argument ACTIVATION. With ANY_ACTIVATION, the kernel reads job.experts
 * at run time. The other values are faster, but only for gated experts with rows of 16-bit
 * elements: GATED_SILU is for EPIC_SILU, and GATED_CLAMPED is for EPIC_CLAMPED_SWIGLU and
 * EPIC_CLAMPED_SILU. */
enum { ANY_ACTIVATION, GATED_SILU, GATED_CLAMPED };

/* Like compute_activation() above, but the activation function is known at compile time. */
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
