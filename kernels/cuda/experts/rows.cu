/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that run between the two GEMMs of the experts (p2p_activation_job in
 * experts/grouped.h).
 *
 *   activation_kernel            gate_up -> activations
 *   quantized_activation_kernel  gate_up -> activations in e4m3, with scales
 *   quantize_kernel              rows -> e4m3, with scales
 *   activation_backward_kernel   gradient of activations -> d_gate_up, d_slot_weights
 *   scale_kernel                 rows * weight, or rows + weight * bias
 *
 * A warp processes one row at a time. The kernels neither read nor write rows without a token.
 * Exception: for such a row, the element of d_slot_weights becomes zero. Memory bandwidth
 * should limit the speed of the kernels. So there is a separate instance for each usual
 * activation function, which needs no branch per element. */
#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/common/quantize.cuh"
#include "cuda/experts/activation.cuh"
#include "cuda/experts/grouped.h"

#define THREADS 256
#define WARPS (THREADS / 32)
#define CTAS_OF_SM 8

/* Returns the sum of x over the lanes of the warp, on every lane. */
static __device__ float add_lanes(float x)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* A slot, its local expert, and how its weight is used. */
struct Slot {
    int64_t slot, expert;
    /* One of the two factors is the slot's weight, and the other one is 1. The result of the
     * first GEMM is multiplied by `input`, and the activation is multiplied by `early`. */
    float input, early;
};

/* Divides the slots among the warps of the grid. For each of its slots, a warp calls f(slot,
 * expert) if the slot holds a token, or padding(slot) if it is a padding slot. All lanes call
 * f() or padding(). */
template <class F, class P>
static __device__ __forceinline__ void each_slot(const p2p_slabs &s, F f, P padding)
{
    const int64_t rows = (int64_t)*s.num_tiles * EXPERTS_TILE_ROWS;
    const int64_t warps = (int64_t)gridDim.x * WARPS;
    int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    for (; i < rows; i += warps) {
        const slab_tile tile = s.tiles[i / EXPERTS_TILE_ROWS];
        const int r = (int)(i % EXPERTS_TILE_ROWS);
        if (r < tile.tokens)
            f((int64_t)tile.row + r, (int64_t)tile.expert);
        else if (r < tile.rows)
            padding((int64_t)tile.row + r);
    }
}

static __device__ __forceinline__ Slot slot_of(const p2p_activation_job &job, int64_t slot,
                                               int64_t expert)
{
    const float w = job.slot_weights ? job.slot_weights[slot] : 1;
    const bool input = job.experts.weighting == EPIC_WEIGHT_INPUT;
    return {slot, expert, input ? w : 1, input ? 1 : w};
}

/* The gate and up values of V adjacent columns. */
template <int V> struct Pair {
    float gate[V], up[V];
};

/* Loads the gate and up columns [i, i + V) from row `slot` of `from`. A row contains all gate
 * columns and then all up columns. With job.experts.interleaved, gate and up columns alternate.
 * For ungated experts, a row has only one kind of column, and the function returns these
 * columns as `gate`. */
template <class T, int V, int ACTIVATION>
static __device__ __forceinline__ Pair<V> load_pair(const p2p_activation_job &job,
                                                    const void *from, int64_t slot, int64_t i)
{
    Pair<V> p;
    const int64_t inner = job.experts.inner;
    if (ACTIVATION == ANY_ACTIVATION && job.experts.ungated) {
        load_numbers<T, V>(p.gate, from, slot * inner + i);
#pragma unroll
        for (int v = 0; v < V; v++) p.up[v] = 0;
        return p;
    }
    const int64_t row = slot * 2 * inner;
    if (!job.experts.interleaved) {
        load_numbers<T, V>(p.gate, from, row + i);
        load_numbers<T, V>(p.up, from, row + inner + i);
        return p;
    }
    float low[V], high[V];
    load_numbers<T, V>(low, from, row + 2 * i);
    load_numbers<T, V>(high, from, row + 2 * i + V);
#pragma unroll
    for (int v = 0; v < V; v++) {
        p.gate[v] = 2 * v < V ? low[2 * v % V] : high[2 * v % V];
        p.up[v] = 2 * v + 1 < V ? low[(2 * v + 1) % V] : high[(2 * v + 1) % V];
    }
    return p;
}

template <class T, int V>
static __device__ __forceinline__ void store_pair(const p2p_activation_job &job, int64_t slot,
                                                  int64_t i, const Pair<V> &p)
{
    const int64_t inner = job.experts.inner, row = slot * 2 * inner;
    if (job.experts.ungated) {
        store_numbers<T, V>(job.d_gate_up, slot * inner + i, p.gate);
    } else if (!job.experts.interleaved) {
        store_numbers<T, V>(job.d_gate_up, row + i, p.gate);
        store_numbers<T, V>(job.d_gate_up, row + inner + i, p.up);
    } else {
        float both[2 * V], half[V];
#pragma unroll
        for (int v = 0; v < V; v++) {
            both[2 * v] = p.gate[v];
            both[2 * v + 1] = p.up[v];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int v = 0; v < V; v++) half[v] = both[h * V + v];
            store_numbers<T, V>(job.d_gate_up, row + 2 * i + h * V, half);
        }
    }
}

template <class T, int V, int ACTIVATION>
static __device__ __forceinline__ void add_bias(const p2p_activation_job &job, const Slot &s,
                                                int64_t i, Pair<V> &p)
{
    const epic_experts &ex = job.experts;
    const bool ungated = ACTIVATION == ANY_ACTIVATION && ex.ungated;
    const int64_t step = ex.interleaved ? 2 : 1, second = ex.interleaved ? 1 : ex.inner;
    const int64_t bias = s.expert * (ungated ? 1 : 2) * ex.inner;
    if (V > 1 && ex.weight_type == NUMBER_TYPE<T> && (uintptr_t)job.bias % 16 == 0) {
        const Pair<V> more = load_pair<T, V, ACTIVATION>(job, job.bias, s.expert, i);
#pragma unroll
        for (int v = 0; v < V; v++) {
            p.gate[v] += more.gate[v];
            p.up[v] += more.up[v];
        }
        return;
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        p.gate[v] += load_number(job.bias, ex.weight_type, bias + (i + v) * step);
        if (!ungated)
            p.up[v] += load_number(job.bias, ex.weight_type, bias + second + (i + v) * step);
    }
}

/* Returns the arguments of the activation function: the raw gate and up values (load_pair()),
 * multiplied by the input weight, plus the bias. */
template <class T, int V, int ACTIVATION>
static __device__ __forceinline__ Pair<V> apply_weight_and_bias(const p2p_activation_job &job,
                                                                const Slot &s, int64_t i,
                                                                const Pair<V> &raw)
{
    Pair<V> p;
#pragma unroll
    for (int v = 0; v < V; v++) {
        p.gate[v] = raw.gate[v] * s.input;
        p.up[v] = raw.up[v] * s.input;
    }
    if (job.bias) add_bias<T, V, ACTIVATION>(job, s, i, p);
    return p;
}

/* Computes the activations of all slots. Each warp has only few loads in flight, because the
 * compiler moves no load before a store that may write the same memory. So the launch bounds
 * require several CTAs on each SM: while the warps of one CTA wait for loads, those of the
 * others run. */
template <class T, int V, int ACTIVATION>
static __global__ void __launch_bounds__(THREADS, ACTIVATION == ANY_ACTIVATION ? 1 : 4)
    activation_kernel(const __grid_constant__ p2p_activation_job job)
{
    wait_for_previous_kernel();
    const int64_t inner = job.experts.inner;
    const int lane = threadIdx.x % 32;
    each_slot(
        job.slabs,
        [&](int64_t slot, int64_t expert) {
            const Slot s = slot_of(job, slot, expert);
#pragma unroll 1
            for (int64_t i = lane * V; i < inner; i += 32 * V) {
                const Pair<V> raw = load_pair<T, V, ACTIVATION>(job, job.gate_up, slot, i);
                const Pair<V> p = apply_weight_and_bias<T, V, ACTIVATION>(job, s, i, raw);
                float out[V];
#pragma unroll
                for (int v = 0; v < V; v++)
                    out[v] = compute_activation<ACTIVATION>(p.gate[v], job.experts).value *
                             compute_up_factor<ACTIVATION>(p.up[v], job.experts).value *
                             s.early;
                store_numbers<T, V>(job.activations, slot * inner + i, out);
            }
        },
        [](int64_t) {});
}

/* A block of 128 elements belongs to LANES adjacent lanes. Each of these lanes passes N
 * elements in x. Returns, in all these lanes, the maximum absolute value of the block, as the
 * bits of a float. */
template <int N, int LANES>
static __device__ __forceinline__ uint32_t largest_of_block(const float (&x)[N])
{
    uint32_t bits = largest_size<N>(x);
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, distance));
    return bits;
}

/* Quantizes 32 * N elements of a row of n columns, from column `base` on, and stores them to
 * the rows `to` and `scales`. Each lane passes N of these elements in x. If V is above 1, the
 * elements of a lane are in adjacent columns, otherwise in columns that are 32 apart. Called by
 * a whole warp. */
template <int V, int N>
static __device__ __forceinline__ void store_quantized(float (&x)[N], uint8_t *to,
                                                       float *scales, int64_t base, int64_t n)
{
    constexpr int LANES = QUANTIZE_BLOCK / N;
    const int lane = threadIdx.x % 32;
    const float scale = scale_1x128(largest_of_block<N, LANES>(x));
    const int64_t block = base / 128 + lane / LANES;
    if (lane % LANES == 0 && block < (n + 127) / 128) scales[block] = scale;
    divide_block<false, N>(x, scale);
#pragma unroll
    for (int q = 0; q < N / 4; q++) {
        const float *f = x + 4 * q;
        const uint32_t four = pack_e4m3(f[0], f[1], f[2], f[3]);
        const int64_t i = base + lane * V + 4 * q;
        if (V > 1 && i < n) *(uint32_t *)(to + i) = four;
#pragma unroll
        for (int part = 0; part < N / V && V == 1; part++)
            if (i + part * 32 < n) to[i + part * 32] = (uint8_t)(four >> 8 * part);
    }
}

/* Computes activations and stores them in e4m3, with one scale for each block of 128 elements.
 * A lane processes one vector of V adjacent elements at a time. Exception: if V is 1, it
 * processes four elements at a time, which are 32 columns apart. */
template <class T, int V, int ACTIVATION>
static __global__ void __launch_bounds__(THREADS)
    quantized_activation_kernel(const __grid_constant__ p2p_activation_job job)
{
    wait_for_previous_kernel();
    constexpr int N = V > 1 ? V : 4, PARTS = N / V;
    const int64_t inner = job.experts.inner, blocks = (inner + 127) / 128;
    const int lane = threadIdx.x % 32;
    uint8_t *const to = (uint8_t *)job.activations;
    each_slot(
        job.slabs,
        [&](int64_t slot, int64_t expert) {
            const Slot s = slot_of(job, slot, expert);
#pragma unroll 1
            for (int64_t base = 0; base < inner; base += 32 * N) {
                float x[N] = {};
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const int64_t i = base + part * 32 + lane * V;
                    if (i >= inner) continue;
                    const Pair<V> raw = load_pair<T, V, ACTIVATION>(job, job.gate_up, slot, i);
                    const Pair<V> p = apply_weight_and_bias<T, V, ACTIVATION>(job, s, i, raw);
#pragma unroll
                    for (int v = 0; v < V; v++)
                        x[part * V + v] =
                            compute_activation<ACTIVATION>(p.gate[v], job.experts).value *
                            compute_up_factor<ACTIVATION>(p.up[v], job.experts).value * s.early;
                }
                store_quantized<V>(x, to + slot * inner, job.scales + slot * blocks, base,
                                   inner);
            }
        },
        [](int64_t) {});
}

template <class T, int V>
static __global__ void __launch_bounds__(THREADS)
    quantize_kernel(const __grid_constant__ p2p_quantize_job job)
{
    wait_for_previous_kernel();
    constexpr int N = V > 1 ? V : 4, PARTS = N / V;
    const int64_t n = job.n, blocks = (n + 127) / 128;
    const int lane = threadIdx.x % 32;
    each_slot(
        job.slabs,
        [&](int64_t slot, int64_t) {
            for (int64_t base = 0; base < n; base += 32 * N) {
                float x[N] = {};
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const int64_t i = base + part * 32 + lane * V;
                    float some[V];
                    if (i >= n) continue;
                    load_numbers<T, V>(some, job.rows, slot * n + i);
#pragma unroll
                    for (int v = 0; v < V; v++) x[part * V + v] = some[v];
                }
                store_quantized<V>(x, job.to + slot * n, job.scales + slot * blocks, base, n);
            }
        },
        [](int64_t) {});
}

/* Computes the activations and d_gate_up of one slot. Returns this lane's part of the gradient
 * of the slot's weight. */
template <class T, int V, int ACTIVATION>
static __device__ __forceinline__ float backward_row(const p2p_activation_job &job,
                                                     const Slot &s)
{
    const epic_experts &ex = job.experts;
    const int64_t inner = ex.inner;
    const bool input = ex.weighting == EPIC_WEIGHT_INPUT;
    const float scale = job.weigh_d ? s.input : 1;
    float dot = 0;
#pragma unroll 1
    for (int64_t i = threadIdx.x % 32 * V; i < inner; i += 32 * V) {
        const Pair<V> raw = load_pair<T, V, ACTIVATION>(job, job.gate_up, s.slot, i);
        const Pair<V> p = apply_weight_and_bias<T, V, ACTIVATION>(job, s, i, raw);
        float d[V], out[V];
        Pair<V> d_pair;
        load_numbers<T, V>(d, job.activations, s.slot * inner + i);
#pragma unroll
        for (int v = 0; v < V; v++) {
            const Activated gate = compute_activation<ACTIVATION>(p.gate[v], ex);
            const Activated up = compute_up_factor<ACTIVATION>(p.up[v], ex);
            const float d_gate = d[v] * s.early * up.value * gate.slope;
            const float d_up = d[v] * s.early * gate.value * up.slope;
            out[v] = gate.value * up.value * s.early;
            dot +=
                input ? d_gate * raw.gate[v] + d_up * raw.up[v] : d[v] * gate.value * up.value;
            d_pair.gate[v] = d_gate * scale;
            d_pair.up[v] = d_up * scale;
        }
        store_numbers<T, V>(job.activations, s.slot * inner + i, out);
        store_pair<T, V>(job, s.slot, i, d_pair);
    }
    return dot;
}

/* Returns this lane's part of dot(d_y, b_down) for one slot. With EPIC_WEIGHT_EARLY, the layer
 * multiplies b_down by the slot's weight. So this dot product is one term of the gradient of
 * the slot's weight. */
template <class T, int V>
static __device__ float down_bias_dot(const p2p_activation_job &job, const Slot &s)
{
    const int64_t hidden = job.experts.hidden;
    float dot = 0;
    const uintptr_t both = (uintptr_t)job.d_y | (uintptr_t)job.b_down;
    if (V > 1 && hidden % V == 0 && both % 16 == 0 &&
        job.experts.weight_type == NUMBER_TYPE<T>) {
#pragma unroll 2
        for (int64_t i = threadIdx.x % 32 * V; i < hidden; i += 32 * V) {
            float x[V], y[V];
            load_numbers<T, V>(x, job.d_y, s.slot * hidden + i);
            load_numbers<T, V>(y, job.b_down, s.expert * hidden + i);
#pragma unroll
            for (int v = 0; v < V; v++) dot += x[v] * y[v];
        }
        return dot;
    }
    for (int64_t i = threadIdx.x % 32; i < hidden; i += 32)
        dot += load_number(job.d_y, job.experts.row_type, s.slot * hidden + i) *
               load_number(job.b_down, job.experts.weight_type, s.expert * hidden + i);
    return dot;
}

/* Computes the activations and d_gate_up of all slots and, if the caller requests it,
 * d_slot_weights. */
template <class T, int V, int ACTIVATION>
static __global__ void __launch_bounds__(THREADS, ACTIVATION == ANY_ACTIVATION ? 1 : 3)
    activation_backward_kernel(const __grid_constant__ p2p_activation_job job)
{
    wait_for_previous_kernel();
    const int lane = threadIdx.x % 32;
    each_slot(
        job.slabs,
        [&](int64_t slot, int64_t expert) {
            const Slot s = slot_of(job, slot, expert);
            float dot = backward_row<T, V, ACTIVATION>(job, s);
            if (!job.d_slot_weights) return;
            if (job.b_down) dot += down_bias_dot<T, V>(job, s);
            dot = add_lanes(dot);
            if (lane == 0) job.d_slot_weights[slot] = dot;
        },
        [&](int64_t slot) {
            if (job.d_slot_weights && lane == 0) job.d_slot_weights[slot] = 0;
        });
}

/* ------------------------------------------------------------------------------- scale ---- */

static __global__ void __launch_bounds__(THREADS)
    scale_kernel(const __grid_constant__ p2p_scale_job job)
{
    wait_for_previous_kernel();
    const int lane = threadIdx.x % 32;
    each_slot(
        job.slabs,
        [&](int64_t slot, int64_t expert) {
            const float w = job.weights ? job.weights[slot] : 1;
            for (int64_t i = lane; i < job.n; i += 32) {
                const float x = load_number(job.rows, job.row_type, slot * job.n + i);
                const float y = job.bias ? x + w * load_number(job.bias, job.weight_type,
                                                               expert * job.n + i)
                                         : x * w;
                store_number(job.rows, job.row_type, slot * job.n + i, y);
            }
        },
        [](int64_t) {});
}

/* -------------------------------------------------------------------------- launching ---- */

/* Returns the number of CTAs to launch: one warp for each slot that may hold a token, but at
 * most CTAS_OF_SM CTAs per SM. */
static int ctas_of(const p2p_slabs *slabs, int sms)
{
    const int64_t rows = (int64_t)slabs->most_tiles * EXPERTS_TILE_ROWS;
    const int64_t wanted = (rows + WARPS - 1) / WARPS, most = (int64_t)sms * CTAS_OF_SM;
    return (int)(wanted < most ? wanted : most);
}

template <class T, int V, int ACTIVATION>
static cudaError_t launch_kind(const p2p_activation_job *job, bool backward,
                               cudaStream_t stream)
{
    const auto kernel = backward      ? activation_backward_kernel<T, V, ACTIVATION>
                        : job->scales ? quantized_activation_kernel<T, V, ACTIVATION>
                                      : activation_kernel<T, V, ACTIVATION>;
    return launch_kernel(kernel, ctas_of(&job->slabs, job->sms), THREADS, 0, stream, *job);
}

/* Launches the kernel instance for the job. Aligned rows are processed as vectors, other rows
 * element by element. float32 rows use ANY_ACTIVATION, because its functions have full
 * precision. */
template <class T>
static cudaError_t launch_typed(const p2p_activation_job *job, bool backward,
                                cudaStream_t stream)
{
    const epic_experts &ex = job->experts;
    const bool clamped =
        ex.activation == EPIC_CLAMPED_SWIGLU || ex.activation == EPIC_CLAMPED_SILU;
    if (!job->aligned) return launch_kind<T, 1, ANY_ACTIVATION>(job, backward, stream);
    if constexpr (T::N == 8) {
        if (!ex.ungated && ex.activation == EPIC_SILU)
            return launch_kind<T, 8, GATED_SILU>(job, backward, stream);
        if (!ex.ungated && clamped)
            return launch_kind<T, 8, GATED_CLAMPED>(job, backward, stream);
    }
    return launch_kind<T, T::N, ANY_ACTIVATION>(job, backward, stream);
}

static cudaError_t launch_any(const p2p_activation_job *job, bool backward, cudaStream_t stream)
{
    const uint32_t type = job->experts.row_type;
    if (type == EPIC_BF16) return launch_typed<Bf16>(job, backward, stream);
    if (type == EPIC_F16) return launch_typed<F16>(job, backward, stream);
    return launch_typed<F32>(job, backward, stream);
}

extern "C" cudaError_t p2p_launch_activation(const p2p_activation_job *job, cudaStream_t stream)
{
    return launch_any(job, false, stream);
}

extern "C" cudaError_t p2p_launch_activation_backward(const p2p_activation_job *job,
                                                      cudaStream_t stream)
{
    return launch_any(job, true, stream);
}

template <class T>
static cudaError_t launch_rows(const p2p_quantize_job *job, cudaStream_t stream)
{
    const bool whole = job->n % T::N == 0 && (uintptr_t)job->rows % 16 == 0;
    return launch_kernel(whole ? quantize_kernel<T, T::N> : quantize_kernel<T, 1>,
                         ctas_of(&job->slabs, job->sms), THREADS, 0, stream, *job);
}

extern "C" cudaError_t p2p_launch_quantize(const p2p_quantize_job *job, cudaStream_t stream)
{
    if (job->row_type == EPIC_BF16) return launch_rows<Bf16>(job, stream);
    if (job->row_type == EPIC_F16) return launch_rows<F16>(job, stream);
    return launch_rows<F32>(job, stream);
}

extern "C" cudaError_t p2p_launch_scale(const p2p_scale_job *job, cudaStream_t stream)
{
    return launch_kernel(scale_kernel, ctas_of(&job->slabs, job->sms), THREADS, 0, stream,
                         *job);
}

template <class T, int V, int ACTIVATION> static cudaError_t load_activation_kernels()
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, activation_kernel<T, V, ACTIVATION>);
    if (error == cudaSuccess)
        error =
            cudaFuncGetAttributes(&attributes, quantized_activation_kernel<T, V, ACTIVATION>);
    return error == cudaSuccess ? cudaFuncGetAttributes(
                                      &attributes, activation_backward_kernel<T, V, ACTIVATION>)
                                : error;
}

template <class T> static cudaError_t load_typed()
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, quantize_kernel<T, T::N>);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, quantize_kernel<T, 1>);
    if (error == cudaSuccess) error = load_activation_kernels<T, T::N, ANY_ACTIVATION>();
    if (error == cudaSuccess) error = load_activation_kernels<T, 1, ANY_ACTIVATION>();
    if constexpr (T::N == 8) {
        if (error == cudaSuccess) error = load_activation_kernels<T, 8, GATED_SILU>();
        if (error == cudaSuccess) error = load_activation_kernels<T, 8, GATED_CLAMPED>();
    }
    return error;
}

extern "C" cudaError_t p2p_load_activation(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = load_typed<Bf16>();
    if (error == cudaSuccess) error = load_typed<F16>();
    if (error == cudaSuccess) error = load_typed<F32>();
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, scale_kernel);
    return error;
}
