/* SPDX-License-Identifier: Apache-2.0 */
/* The dense part of the model, in simple kernels. Each sum has one fixed order, for every
 * number of ranks. */
#include "device_kernels.h"

#include <cuda_bf16.h>

#include "cuda/common/launch.cuh"

#define THREADS 256
#define LANES 32
#define ALL 0xffffffffu

template <class T> static __device__ T add_lanes(T x)
{
    for (int d = LANES / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL, x, d);
    return x;
}

static __device__ int64_t first_thread()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ int64_t all_threads()
{
    return (int64_t)gridDim.x * blockDim.x;
}

static __device__ float wide(const void *rows, int64_t i)
{
    return __bfloat162float(((const __nv_bfloat16 *)rows)[i]);
}

static int ctas(const device_shape *s, int64_t units, int each)
{
    const int64_t wanted = (units + each - 1) / each, most = 8 * (int64_t)s->sms;
    return (int)(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

/* ------------------------------------------------------------------------- embedding ---- */

static __global__ void embed_kernel(const unsigned char *bytes, int places, const float *table,
                                    float *x, int64_t tokens, int64_t hidden)
{
    for (int64_t i = first_thread(); i < tokens * hidden; i += all_threads()) {
        const unsigned char *before = bytes + i / hidden * (places + 1);
        float sum = 0;
        for (int64_t c = 0; c < places; c++)
            sum += table[(c * DEVICE_BYTES + before[c]) * hidden + i % hidden];
        x[i] = sum;
    }
}

/* Computes the gradient of the table. Each warp computes one row at a time. It adds the
 * gradients of all tokens that have read this row, one token after the other. */
static __global__ void embed_backward_kernel(const unsigned char *bytes, int places,
                                             const float *d_x, float *d_table, int64_t tokens,
                                             int64_t hidden)
{
    const int64_t rows = (int64_t)places * DEVICE_BYTES, lane = threadIdx.x % LANES;
    for (int64_t r = first_thread() / LANES; r < rows; r += all_threads() / LANES)
        for (int64_t i = lane; i < hidden; i += LANES) {
            float sum = 0;
            for (int64_t t = 0; t < tokens; t++)
                if (bytes[t * (places + 1) + r / DEVICE_BYTES] == r % DEVICE_BYTES)
                    sum += d_x[t * hidden + i];
            d_table[r * hidden + i] = sum;
        }
}

/* ------------------------------------------------------------------------------ norm ---- */

/* Computes norm(x). Each warp computes one token at a time. */
static __global__ void norm_kernel(device_norm n, int64_t tokens, int64_t hidden)
{
    const int64_t lane = threadIdx.x % LANES;
    int64_t t = first_thread() / LANES;
    for (; t < tokens; t += all_threads() / LANES) {
        const float *x = n.x + t * hidden;
        float sum = 0;
        for (int64_t i = lane; i < hidden; i += LANES) sum += x[i] * x[i];
        const float inverse = 1 / sqrtf(add_lanes(sum) / (float)hidden + 1e-6f);
        if (lane == 0) n.inverse[t] = inverse;
        for (int64_t i = lane; i < hidden; i += LANES) {
            const float h = n.gain[i] * (x[i] * inverse);
            if (n.h) n.h[t * hidden + i] = h;
            if (n.narrow_h)
                ((__nv_bfloat16 *)n.narrow_h)[t * hidden + i] = __float2bfloat16_rn(h);
        }
    }
}

static __device__ float d_h_of(const device_norm &n, int64_t i)
{
    return n.h ? n.h[i] : wide(n.narrow_h, i);
}

static __global__ void norm_backward_kernel(device_norm n, int64_t tokens, int64_t hidden)
{
    const int64_t lane = threadIdx.x % LANES;
    int64_t t = first_thread() / LANES;
    for (; t < tokens; t += all_threads() / LANES) {
        const float *x = n.x + t * hidden, inverse = n.inverse[t];
        float along = 0;
        for (int64_t i = lane; i < hidden; i += LANES)
            along += d_h_of(n, t * hidden + i) * n.gain[i] * (x[i] * inverse);
        along = add_lanes(along) / (float)hidden;
        for (int64_t i = lane; i < hidden; i += LANES)
            n.d_x[t * hidden + i] +=
                inverse * (d_h_of(n, t * hidden + i) * n.gain[i] - along * (x[i] * inverse));
    }
}

/* Computes the gradient of the gain. Each warp computes one element at a time, which is a sum
 * over all tokens. */
static __global__ void gain_kernel(device_norm n, int64_t tokens, int64_t hidden)
{
    const int64_t lane = threadIdx.x % LANES;
    int64_t i = first_thread() / LANES;
    for (; i < hidden; i += all_threads() / LANES) {
        float sum = 0;
        for (int64_t t = lane; t < tokens; t += LANES)
            sum += d_h_of(n, t * hidden + i) * (n.x[t * hidden + i] * n.inverse[t]);
        sum = add_lanes(sum);
        if (lane == 0) n.d_gain[i] = sum;
    }
}

/* ------------------------------------------------------------ rows, products, the loss ---- */

static __global__ void add_kernel(float *to, const float *x, const void *narrow, int64_t count)
{
    for (int64_t i = first_thread(); i < count; i += all_threads())
        to[i] = x[i] + wide(narrow, i);
}

static __global__ void narrow_kernel(void *narrow, const float *x, int64_t count)
{
    for (int64_t i = first_thread(); i < count; i += all_threads())
        ((__nv_bfloat16 *)narrow)[i] = __float2bfloat16_rn(x[i]);
}

static __global__ void multiply_kernel(device_gemm g)
{
    for (int64_t at = first_thread(); at < g.m * g.n; at += all_threads()) {
        const int64_t i = at / g.n, j = at % g.n;
        float sum = 0;
        for (int64_t l = 0; l < g.k; l++)
            sum += (g.transpose_a ? g.a[l * g.m + i] : g.a[i * g.k + l]) *
                   (g.transpose_b ? g.b[j * g.k + l] : g.b[l * g.n + j]);
        g.c[at] = sum;
    }
}

/* Computes the loss of each token, and replaces its logits by their gradient. Each warp
 * computes one token at a time. */
static __global__ void judge_kernel(float *logits, const unsigned char *bytes, int places,
                                    float scale, float *token_loss, int64_t tokens)
{
    const int lane = threadIdx.x % LANES;
    int64_t t = first_thread() / LANES;
    for (; t < tokens; t += all_threads() / LANES) {
        float *z = logits + t * DEVICE_BYTES, most = -INFINITY, sum = 0;
        const int target = bytes[t * (places + 1) + places];
        for (int i = lane; i < DEVICE_BYTES; i += LANES) most = fmaxf(most, z[i]);
        for (int d = LANES / 2; d > 0; d /= 2)
            most = fmaxf(most, __shfl_xor_sync(ALL, most, d));
        const float of_target = z[target] - most;
        __syncwarp();
        for (int i = lane; i < DEVICE_BYTES; i += LANES) {
            z[i] = expf(z[i] - most);
            sum += z[i];
        }
        sum = add_lanes(sum);
        for (int i = lane; i < DEVICE_BYTES; i += LANES)
            z[i] = scale * (z[i] / sum - (i == target ? 1 : 0));
        if (lane == 0) token_loss[t] = logf(sum) - of_target;
    }
}

/* Adds the losses of all tokens. The grid is one warp. */
static __global__ void loss_kernel(const float *token_loss, float scale, float *loss,
                                   int64_t tokens)
{
    double sum = 0;
    for (int64_t t = threadIdx.x; t < tokens; t += LANES) sum += token_loss[t];
    sum = add_lanes(sum);
    if (threadIdx.x == 0) *loss = (float)(sum * scale);
}

static __global__ void move_kernel(device_adam a)
{
    for (int64_t i = first_thread(); i < a.count; i += all_threads()) {
        const float g = a.gradient[i];
        a.first[i] = a.beta1 * a.first[i] + (1 - a.beta1) * g;
        a.second[i] = a.beta2 * a.second[i] + (1 - a.beta2) * (g * g);
        a.value[i] = a.keep * a.value[i] -
                     a.rate * a.first[i] / (sqrtf(a.second[i] * a.unbias2) + a.epsilon);
        ((__nv_bfloat16 *)a.narrow)[i] = __float2bfloat16_rn(a.value[i]);
    }
}

/* -------------------------------------------------------------------------- launching ---- */

extern "C" cudaError_t device_embed(const device_shape *s, const unsigned char *bytes,
                                    int places, const float *table, float *x)
{
    return launch_kernel(embed_kernel, ctas(s, s->tokens * s->hidden, THREADS), THREADS, 0,
                         s->stream, bytes, places, table, x, s->tokens, s->hidden);
}

extern "C" cudaError_t device_embed_backward(const device_shape *s, const unsigned char *bytes,
                                             int places, const float *d_x, float *d_table)
{
    const int64_t rows = (int64_t)places * DEVICE_BYTES;
    return launch_kernel(embed_backward_kernel, ctas(s, rows * LANES, THREADS), THREADS, 0,
                         s->stream, bytes, places, d_x, d_table, s->tokens, s->hidden);
}

extern "C" cudaError_t device_norm_rows(const device_shape *s, const device_norm *n)
{
    return launch_kernel(norm_kernel, ctas(s, s->tokens * LANES, THREADS), THREADS, 0,
                         s->stream, *n, s->tokens, s->hidden);
}

extern "C" cudaError_t device_norm_backward(const device_shape *s, const device_norm *n)
{
    const cudaError_t error = launch_kernel(gain_kernel, ctas(s, s->hidden * LANES, THREADS),
                                            THREADS, 0, s->stream, *n, s->tokens, s->hidden);
    if (error != cudaSuccess) return error;
    return launch_kernel(norm_backward_kernel, ctas(s, s->tokens * LANES, THREADS), THREADS, 0,
                         s->stream, *n, s->tokens, s->hidden);
}

extern "C" cudaError_t device_add(const device_shape *s, float *to, const float *x,
                                  const void *narrow)
{
    const int64_t count = s->tokens * s->hidden;
    return launch_kernel(add_kernel, ctas(s, count, THREADS), THREADS, 0, s->stream, to, x,
                         narrow, count);
}

extern "C" cudaError_t device_narrow(const device_shape *s, void *narrow, const float *x,
                                     int64_t count)
{
    return launch_kernel(narrow_kernel, ctas(s, count, THREADS), THREADS, 0, s->stream, narrow,
                         x, count);
}

extern "C" cudaError_t device_multiply(const device_shape *s, const device_gemm *g)
{
    return launch_kernel(multiply_kernel, ctas(s, g->m * g->n, THREADS), THREADS, 0, s->stream,
                         *g);
}

extern "C" cudaError_t device_judge(const device_shape *s, float *logits,
                                    const unsigned char *bytes, int places, float scale,
                                    float *token_loss, float *loss)
{
    const cudaError_t error =
        launch_kernel(judge_kernel, ctas(s, s->tokens * LANES, THREADS), THREADS, 0, s->stream,
                      logits, bytes, places, scale, token_loss, s->tokens);
    if (error != cudaSuccess) return error;
    return launch_kernel(loss_kernel, 1, LANES, 0, s->stream, (const float *)token_loss, scale,
                         loss, s->tokens);
}

extern "C" cudaError_t device_move(const device_shape *s, const device_adam *a)
{
    return launch_kernel(move_kernel, ctas(s, a->count, THREADS), THREADS, 0, s->stream, *a);
}
