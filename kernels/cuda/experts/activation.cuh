/* SPDX-License-Identifier: Apache-2.0 */
/* The activation of one number and its slope, for experts/rows.cu.  The formulas are those of
 * src/experts/activation_template.h.  Each function returns both results; the compiler removes
 * the slope where a caller does not use it. */
#ifndef EPIC_ACTIVATION_CUH
#define EPIC_ACTIVATION_CUH

#include "cuda/common/ptx.cuh"
#include "epic/epic.h"

#define SQRT_HALF 0.70710678118654752440f
#define SQRT_2_OVER_PI 0.79788456080286535588f
#define INV_SQRT_2_PI 0.39894228040143267794f
#define TANH_CUBIC 0.044715f
#define LOG2_E 1.44269504088896340736f

/* An activation of x, and its derivative by x. */
struct Activated {
    float value, slope;
};

/* Returns the sigmoid of x, without overflow for large |x|. */
__device__ __forceinline__ float sigmoid_of(float x)
{
    const float e = expf(x > 0 ? -x : x);
    return (x > 0 ? 1 : e) / (1 + e);
}

/* Computes x s(a x), where s is the sigmoid, and its slope s(a x) (1 + a x (1 - s(a x))). */
__device__ __forceinline__ Activated compute_swish(float x, float alpha)
{
    const float s = sigmoid_of(alpha * x);
    return {x * s, s * (1 + alpha * x * sigmoid_of(-alpha * x))};
}

/* Computes GELU with erf. */
__device__ __forceinline__ Activated compute_gelu(float x)
{
    const float below = 0.5f * (1 + erff(x * SQRT_HALF));
    return {x * below, below + x * INV_SQRT_2_PI * expf(-x * x / 2)};
}

/* Computes the tanh approximation of GELU. */
__device__ __forceinline__ Activated compute_gelu_tanh(float x)
{
    const float t = tanhf(SQRT_2_OVER_PI * (x + TANH_CUBIC * x * x * x));
    const float inner_slope = SQRT_2_OVER_PI * (1 + 3 * TANH_CUBIC * x * x);
    return {x / 2 * (1 + t), (1 + t) / 2 + x / 2 * (1 - t * t) * inner_slope};
}

/* Computes compute_swish() for rows of 16 bits.  The result is a few units in the last place of
 * float32 off, and needs no branch and no division. */
__device__ __forceinline__ Activated compute_swish_approx(float x, float alpha)
{
    const float y = alpha * x, s = reciprocal_approx(1 + exp2_approx(y * -LOG2_E));
    return {x * s, s * (1 + y * (1 - s))};
}

/* Computes the activation that the experts are configured with, of a gate value x. */
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
    default: /* EPIC_CLAMPED_SWIGLU, EPIC_CLAMPED_SILU: flat above the limit */
        const Activated a = compute_swish(above ? ex.limit : x, ex.alpha);
        return {a.value, above ? 0 : a.slope};
    }
}

/* Computes the factor of the activation from an up value u: u, clamped and shifted by 1 for
 * some activations, or 1 for experts without a gate. */
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

/* Template argument of kernels: any activation, chosen at run time, or one of the two that most
 * models use, for rows of 16 bits. */
enum { ANY_ACTIVATION, GATED_SILU, GATED_CLAMPED };

/* Like the functions above, with the activation known to the compiler. */
template <int KIND>
__device__ __forceinline__ Activated compute_activation(float x, const epic_experts &ex)
{
    const bool above = KIND == GATED_CLAMPED && x > ex.limit;
    if (KIND == ANY_ACTIVATION) return compute_activation(x, ex);
    const Activated a =
        compute_swish_approx(above ? ex.limit : x, KIND == GATED_SILU ? 1 : ex.alpha);
    return {a.value, above ? 0 : a.slope};
}

template <int KIND>
__device__ __forceinline__ Activated compute_up_factor(float u, const epic_experts &ex)
{
    return KIND == GATED_SILU ? Activated{u, 1} : compute_up_factor(u, ex);
}

#endif
