/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for two parts of a layer that each rank computes for its own tokens without dispatch:
 * the gate of the shared expert, and the zero-experts, whose output is their input.
 * experts/dense_tokens.h describes the kernels, src/rules/layer_tokens.h the arrays.
 *
 *   sent_kernel           ids for dispatch                       one thread per choice
 *   shared_gate_kernel    weight of the shared expert            one warp per token
 *   shared_slope_kernel   gradient through the sigmoid           one thread per token
 *   zero_weights_kernel   gradient of the zero-experts' weights  one warp per token
 *   finish_kernel         sum of the parts of an output row      one warp per token */
#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/experts/dense_tokens.h"

#define THREADS 256
#define WARPS (THREADS / 32)

/* Returns the sum of x over the lanes of the warp, on every lane. */
template <class T> static __device__ __forceinline__ T add_lanes(T x)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

static __device__ __forceinline__ int64_t first_token()
{
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
}

/* Returns the distance between two consecutive tokens of this warp, which is the number of
 * warps in the grid. */
static __device__ __forceinline__ int64_t token_step()
{
    return (int64_t)gridDim.x * WARPS;
}

/* Returns true if the expert of a choice (a token and one of its top_k experts) is a
 * zero-expert: its id is from num_experts to num_columns - 1. The plan reports larger ids as
 * errors. */
static __device__ __forceinline__ bool is_zero_expert(const layer_tokens &t, int64_t choice)
{
    return t.topk_idx[choice] >= t.num_experts && t.topk_idx[choice] < t.num_columns;
}

/* Some choices of a token may be zero-experts. Returns the sum of the weights of these choices,
 * on every lane. */
static __device__ __forceinline__ float zero_weight(const layer_tokens &t, int64_t token)
{
    float w = 0;
    if (!t.topk_idx) return 0;
    for (int64_t k = lane_id(); k < t.top_k; k += 32)
        if (is_zero_expert(t, token * t.top_k + k)) w += t.weights[token * t.top_k + k];
    return add_lanes(w);
}

static __global__ void __launch_bounds__(THREADS)
    sent_kernel(const __grid_constant__ layer_tokens t, int32_t *choices)
{
    wait_for_previous_kernel();
    const int64_t all = t.num_tokens * t.top_k, step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < all; i += step)
        choices[i] = is_zero_expert(t, i) ? -1 : t.topk_idx[i];
}

/* Computes the weight of the shared expert. Adds the products in float64, as the CPU code
 * does. */
static __global__ void __launch_bounds__(THREADS)
    shared_gate_kernel(const __grid_constant__ layer_tokens t)
{
    wait_for_previous_kernel();
    for (int64_t token = first_token(); token < t.num_tokens; token += token_step()) {
        double z = 0;
        for (int64_t i = lane_id(); i < t.hidden; i += 32)
            z +=
                (double)load_number(t.x, t.row_type, token * t.hidden + i) * t.w_shared_gate[i];
        z = add_lanes(z);
        const double e = exp(z > 0 ? -z : z);
        if (lane_id() == 0) t.shared_weights[token] = (float)((z > 0 ? 1 : e) / (1 + e));
    }
}

/* On entry, d_shared_weights is the gradient of s, the result of the sigmoid. Multiplies this
 * gradient by the sigmoid's slope s * (1 - s). */
static __global__ void __launch_bounds__(THREADS)
    shared_slope_kernel(const __grid_constant__ layer_tokens t)
{
    wait_for_previous_kernel();
    const int64_t step = (int64_t)gridDim.x * THREADS;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (; i < t.num_tokens; i += step) {
        const float s = t.shared_weights[i];
        t.d_shared_weights[i] = t.d_shared_weights[i] * s * (1 - s);
    }
}

/* The output of a zero-expert is weight * x, so the gradient of the weight is dot(d_out, x).
 * One warp per token computes it. */
static __global__ void __launch_bounds__(THREADS)
    zero_weights_kernel(const __grid_constant__ layer_tokens t)
{
    wait_for_previous_kernel();
    for (int64_t token = first_token(); token < t.num_tokens; token += token_step()) {
        bool some = false;
        for (int64_t k = lane_id(); k < t.top_k; k += 32)
            some |= is_zero_expert(t, token * t.top_k + k);
        if (!__any_sync(ALL_LANES, some)) continue;
        float dot = 0;
        for (int64_t i = token * t.hidden + lane_id(); i < (token + 1) * t.hidden; i += 32)
            dot += load_number(t.x, t.row_type, i) * load_number(t.d_out, t.row_type, i);
        dot = add_lanes(dot);
        for (int64_t k = lane_id(); k < t.top_k; k += 32)
            if (is_zero_expert(t, token * t.top_k + k)) t.d_weights[token * t.top_k + k] = dot;
    }
}

/* Multiplies the V elements of `rows` from index `at` on by `factor`, and adds them to
 * `sum`. */
template <class T, int V>
static __device__ __forceinline__ void add_rows(float (&sum)[V], const void *rows, int64_t at,
                                                float factor)
{
    float x[V];
    load_numbers<T, V>(x, rows, at);
#pragma unroll
    for (int v = 0; v < V; v++) sum[v] += x[v] * factor;
}

/* Adds the parts of each token's output row, and stores the sum to rows.to. In backward, adds
 * the parts of each token's gradient row d_x instead. zero_weight is the sum of the weights
 * with which the token uses zero-experts.
 *   forward   out = rows.a (from combine) + zero_weight * x + rows.b (from the shared expert)
 *   backward  d_x = rows.a + zero_weight * d_out + rows.b + d_shared_weights * w_shared_gate */
template <class T, int V>
static __global__ void __launch_bounds__(THREADS)
    finish_kernel(const __grid_constant__ layer_tokens t,
                  const __grid_constant__ layer_rows rows)
{
    wait_for_previous_kernel();
    /* the row that a zero-expert multiplies by its weight: x or, in backward, d_out */
    const void *const through = t.d_out ? t.d_out : t.x;
    for (int64_t token = first_token(); token < t.num_tokens; token += token_step()) {
        const float w = zero_weight(t, token);
        const bool gated = t.w_shared_gate && t.d_out;
        const float slope = gated ? t.d_shared_weights[token] : 0;
        for (int64_t i = lane_id() * V; i < t.hidden; i += 32 * V) {
            const int64_t at = token * t.hidden + i;
            float sum[V] = {};
            if (rows.a) add_rows<T, V>(sum, rows.a, at, 1);
            if (w != 0) add_rows<T, V>(sum, through, at, w);
            if (rows.b) add_rows<T, V>(sum, rows.b, at, 1);
#pragma unroll
            for (int v = 0; v < V; v++)
                if (gated) sum[v] += slope * t.w_shared_gate[i + v];
            store_numbers<T, V>(rows.to, at, sum);
        }
    }
}

/* -------------------------------------------------------------------------- launching ---- */

/* Returns the number of CTAs to launch for `units` tokens or choices. Each CTA processes `each`
 * tokens or choices at a time. */
static int ctas_of(int64_t units, int each, int sms)
{
    const int64_t ctas = (units + each - 1) / each, most = 8 * (int64_t)sms;
    return (int)(ctas < most ? ctas : most);
}

extern "C" cudaError_t p2p_launch_sent(const layer_tokens *t, int32_t *choices, int sms,
                                       cudaStream_t stream)
{
    if (t->num_tokens == 0) return cudaSuccess;
    return launch_kernel(sent_kernel, ctas_of(t->num_tokens * t->top_k, THREADS, sms), THREADS,
                         0, stream, *t, choices);
}

extern "C" cudaError_t p2p_launch_shared_gate(const layer_tokens *t, int sms,
                                              cudaStream_t stream)
{
    if (t->num_tokens == 0) return cudaSuccess;
    return launch_kernel(shared_gate_kernel, ctas_of(t->num_tokens, WARPS, sms), THREADS, 0,
                         stream, *t);
}

extern "C" cudaError_t p2p_launch_shared_slope(const layer_tokens *t, int sms,
                                               cudaStream_t stream)
{
    if (t->num_tokens == 0) return cudaSuccess;
    return launch_kernel(shared_slope_kernel, ctas_of(t->num_tokens, THREADS, sms), THREADS, 0,
                         stream, *t);
}

extern "C" cudaError_t p2p_launch_zero_weights(const layer_tokens *t, int sms,
                                               cudaStream_t stream)
{
    if (t->num_tokens == 0) return cudaSuccess;
    return launch_kernel(zero_weights_kernel, ctas_of(t->num_tokens, WARPS, sms), THREADS, 0,
                         stream, *t);
}

static bool is_16_byte_aligned(const void *rows)
{
    return (uintptr_t)rows % 16 == 0;
}

template <class T>
static cudaError_t launch_finish(const layer_tokens *t, const layer_rows *rows, int sms,
                                 cudaStream_t stream)
{
    const int ctas = ctas_of(t->num_tokens, WARPS, sms);
    const bool whole = t->hidden % T::N == 0 && is_16_byte_aligned(rows->to) &&
                       is_16_byte_aligned(rows->a) && is_16_byte_aligned(rows->b) &&
                       is_16_byte_aligned(t->x) && is_16_byte_aligned(t->d_out);
    return whole ? launch_kernel(finish_kernel<T, T::N>, ctas, THREADS, 0, stream, *t, *rows)
                 : launch_kernel(finish_kernel<T, 1>, ctas, THREADS, 0, stream, *t, *rows);
}

extern "C" cudaError_t p2p_launch_finish(const layer_tokens *t, const layer_rows *rows, int sms,
                                         cudaStream_t stream)
{
    if (t->num_tokens == 0) return cudaSuccess;
    if (t->row_type == EPIC_BF16) return launch_finish<Bf16>(t, rows, sms, stream);
    if (t->row_type == EPIC_F16) return launch_finish<F16>(t, rows, sms, stream);
    return launch_finish<F32>(t, rows, sms, stream);
}

template <class T> static cudaError_t load_finish()
{
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, finish_kernel<T, T::N>);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, finish_kernel<T, 1>)
                                : error;
}

extern "C" cudaError_t p2p_load_dense_tokens(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = load_finish<Bf16>();
    if (error == cudaSuccess) error = load_finish<F16>();
    if (error == cudaSuccess) error = load_finish<F32>();
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, sent_kernel);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, shared_gate_kernel);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, shared_slope_kernel);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, zero_weights_kernel)
                                : error;
}
