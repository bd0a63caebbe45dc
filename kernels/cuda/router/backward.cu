/* SPDX-License-Identifier: Apache-2.0 */
/* Router backward: computes the gradient of the logits from the gradient of the weights. A
 * *choice* is a token and one of its top_k experts.
 *
 *   in   d_weights          [num_tokens, top_k]
 *   out  d_logits           [num_tokens, columns]    router_backward_kernel, one warp per token
 *   out  d_scale_of_expert  [columns]                router_scale_kernel, one CTA per expert
 *
 * The kernels compute the weights again from the logits. If the weights come from a softmax
 * over all experts (needs_full_softmax()), the kernels use all logits of a token, otherwise
 * only the logits of the chosen experts. Lane L handles choices L and L + 32 of a token, at
 * index j = 0 and 1 (struct Chosen). */
#include "cuda/common/launch.cuh"
#include "cuda/router/router.cuh"

#define MOST_WARPS 4

/* The weight of a choice is its part divided by the token's divisor (struct Shares). Computes
 * the parts and the divisor of a token in the same way as forward. s [columns]: the softmax
 * over all columns, or NULL. If s is NULL, the function loads the logits of the chosen experts
 * into z. */
__device__ __forceinline__ Shares<2> recompute_shares(const p2p_router_backward_job &job,
                                                      const Chosen<2> &c, const float *s,
                                                      float (&z)[2], int64_t token)
{
    const epic_router &r = job.rows.router;
    float x[2] = {0, 0};
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (!c.has_expert(j)) continue;
        if (s) {
            x[j] = s[padded_index(c.id[j])];
            continue;
        }
        z[j] = load_number(job.rows.logits, job.rows.type, token * job.rows.columns + c.id[j]);
        x[j] = r.weight_rule == EPIC_WEIGHT_OF_SCORE ? score_of(z[j], r.score) : z[j];
    }
    return compute_shares(job.rows, c, x);
}

/* On entry, g is the gradient of a token's weights. Replaces g by the gradient of the parts
 * (struct Shares). `scale`: the router's factor for all weights. share_backward() in src/router
 * explains the formula. */
__device__ __forceinline__ void share_backward(const Shares<2> &s, const Chosen<2> &c,
                                               float scale, float (&g)[2])
{
    float products[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        g[j] = s.divisor != 0 ? g[j] * scale / s.divisor : 0;
        products[j] = g[j] * (s.is_divisor_variable ? s.parts[j] / s.divisor : 0);
    }
    const float mean = add_in_order(c, products);
#pragma unroll
    for (int j = 0; j < 2; j++)
        if (s.divisor != 0) g[j] -= mean;
}

/* Adds the gradient of the scores or logits of the chosen experts to d [columns], a row in
 * shared memory. g: gradient of the parts (struct Shares). z: logits of the chosen experts.
 * Adds one choice after the other, because two choices of a token may have the same expert. If
 * two lanes added to the same element of d at the same time, one addition would be lost. */
__device__ __forceinline__ void parts_backward(const epic_router &r, const Shares<2> &s,
                                               const Chosen<2> &c, const float (&z)[2],
                                               float (&g)[2], float *d)
{
    const float products[2] = {s.parts[0] * g[0], s.parts[1] * g[1]};
    if (r.weight_rule == EPIC_WEIGHT_SOFTMAX_CHOSEN) {
        const float mean = add_in_order(c, products);
        g[0] = s.parts[0] * (g[0] - mean);
        g[1] = s.parts[1] * (g[1] - mean);
    } else if (r.weight_rule == EPIC_WEIGHT_SIGMOID_CHOSEN) {
        g[0] = g[0] * (s.parts[0] * score_sigmoid(-z[0]));
        g[1] = g[1] * (s.parts[1] * score_sigmoid(-z[1]));
    }
    for (int i = 0; i < c.k; i++) {
        if (lane_id() == i && c.id[0] >= 0) d[padded_index(c.id[0])] += g[0];
        if (lane_id() + WARP == i && c.id[1] >= 0) d[padded_index(c.id[1])] += g[1];
        __syncwarp();
    }
}

/* Writes the gradient of all logits of a token. d [columns]: the gradient of the scores or, if
 * the weights are computed from logits, the gradient of these logits. s [columns]: the softmax
 * over all columns, or NULL. */
template <int V>
__device__ __forceinline__ void write_gradient(const p2p_router_backward_job &job,
                                               const float *s, const float *d, int64_t token)
{
    const p2p_router_rows &rows = job.rows;
    const uint32_t score = rows.router.score;
    const bool of_score = rows.router.weight_rule == EPIC_WEIGHT_OF_SCORE;
    float mean = 0;
    if (s)
        mean = add_columns<V, float>(
            rows.columns, [&](int i) { return s[padded_index(i)] * d[padded_index(i)]; });
    write_logit_gradient<V>(
        job.d_logits, job.grad_type, job.accumulate, token, rows.columns, [&](int i) {
            float x = d[padded_index(i)];
            if (s) return s[padded_index(i)] * (x - mean);
            if (!of_score || x == 0 || score == EPIC_SCORE_LOGITS) return x;
            const float z = load_number(rows.logits, rows.type, token * rows.columns + i);
            return x * score_slope(score_of(z, score), z, score);
        });
}

__device__ __forceinline__ Chosen<2> read_choices(const p2p_router_backward_job &job,
                                                  int64_t token)
{
    Chosen<2> c = {(int)job.rows.router.top_k, {-1, -1}};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (c.has_choice(j)) c.id[j] = job.topk_idx[token * c.k + j * WARP + lane_id()];
        if (c.id[j] >= job.rows.columns) c.id[j] = -1;
    }
    return c;
}

/* Returns true if the weights come from a softmax over all experts. */
__host__ __device__ __forceinline__ bool needs_full_softmax(const epic_router &r)
{
    return r.weight_rule == EPIC_WEIGHT_OF_SCORE && r.score == EPIC_SCORE_SOFTMAX;
}

/* Computes the gradients of the logits. One warp processes one token. d: the warp's row of
 * gradients in shared memory. s: the warp's row with the softmax of the logits in shared
 * memory, or NULL if it is not needed. */
template <int V>
__global__ void __launch_bounds__(MOST_WARPS *WARP)
    router_backward_kernel(const __grid_constant__ p2p_router_backward_job job)
{
    wait_for_previous_kernel();
    float *const memory = (float *)dynamic_shared();
    const epic_router &r = job.rows.router;
    const int columns = job.rows.columns, words = row_words_of<V>(columns);
    const int64_t token = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (token >= job.rows.num_tokens) return;
    float *d = memory + threadIdx.x / WARP * 2 * words, *s = NULL;

    if (needs_full_softmax(r)) {
        s = d + words;
        load_row<V>(s, job.rows, token);
        compute_softmax<V>(s, s, columns);
    }
    each_column<V>(0, columns, [&](int i) { d[padded_index(i)] = 0; });
    const Chosen<2> c = read_choices(job, token);
    float g[2] = {0, 0}, z[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (c.has_choice(j)) g[j] = job.d_weights[token * c.k + j * WARP + lane_id()];
        if (c.has_expert(j) && job.scale_of_expert) g[j] *= job.scale_of_expert[c.id[j]];
    }
    const Shares<2> shares = recompute_shares(job, c, s, z, token);
    share_backward(shares, c, job.rows.scale, g);
    parts_backward(r, shares, c, z, g, d);
    write_gradient<V>(job, s, d, token);
}

/* -------------------------------------------------------------- the scale by expert ---- */

/* maximum number of warps of a CTA; the warps divide the tokens among themselves */
#define SCALE_WARPS 8

/* Returns, on all lanes, the term that one choice adds to the gradient of its expert's scale.
 * The term is the gradient of the choice's weight, multiplied by the weight before the
 * multiplication by the expert's scale. `place`: index of the choice (token * top_k + k). `s`:
 * this warp's row in shared memory. */
__device__ __forceinline__ double scale_part(const p2p_router_backward_job &job, float *s,
                                             int64_t place)
{
    const int k = (int)job.rows.router.top_k, choice = (int)(place % k);
    const int64_t token = place / k;
    float z[2];
    /* Wait until all lanes have read the row of the previous token, because the next lines
     * overwrite this row. */
    __syncwarp();
    if (needs_full_softmax(job.rows.router)) {
        load_row<0>(s, job.rows, token);
        compute_softmax<0>(s, s, job.rows.columns);
    } else {
        s = NULL;
    }
    const Shares<2> shares = recompute_shares(job, read_choices(job, token), s, z, token);
    const float part = __shfl_sync(ALL_LANES, choice < WARP ? shares.parts[0] : shares.parts[1],
                                   choice % WARP);
    if (shares.divisor == 0) return 0;
    const float weight = part / shares.divisor * job.rows.scale;
    return (double)job.d_weights[place] * (double)weight;
}

/* Computes the gradients of the experts' scales. A CTA processes one expert, and each of its
 * warps processes a part of the tokens. A warp searches its tokens for choices of this expert,
 * and computes only the weights of these choices. Thread 0 adds the sums of the warps in a
 * fixed order, so that the result always has the same bits. */
__global__ void __launch_bounds__(SCALE_WARPS *WARP)
    router_scale_kernel(const __grid_constant__ p2p_router_backward_job job)
{
    wait_for_previous_kernel();
    __shared__ double sums[SCALE_WARPS];
    const int k = (int)job.rows.router.top_k, expert = (int)blockIdx.x;
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    float *const s = (float *)dynamic_shared() + warp * row_words(job.rows.columns);
    const int64_t tokens = job.rows.num_tokens;
    const int64_t end = tokens * (warp + 1) / warps * k;
    double sum = 0;
    for (int64_t i = tokens * warp / warps * k; i < end; i += WARP) {
        const int64_t mine = i + lane_id();
        const bool its = mine < end && job.topk_idx[mine] == expert;
        for (uint32_t left = __ballot_sync(ALL_LANES, its); left; left &= left - 1) {
            const int64_t place = i + __ffs(left) - 1;
            sum += scale_part(job, s, place);
        }
    }
    if (lane_id() == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    float *const out = job.d_scale_of_expert + expert;
    double all = 0;
    for (int w = 0; w < warps; w++) all += sums[w];
    *out = (float)((job.accumulate ? (double)*out : 0) + all);
}

/* -------------------------------------------------------------------- launching ---- */

static cudaError_t launch_scale(const p2p_router_backward_job *job, cudaStream_t stream)
{
    const int words = row_words(job->rows.columns), warps = router_warps(words, SCALE_WARPS);
    const int bytes = needs_full_softmax(job->rows.router) ? warps * words * 4 : 0;
    return launch_kernel(router_scale_kernel, job->rows.columns, warps * WARP, bytes, stream,
                         *job);
}

template <int V>
static cudaError_t launch_width(const p2p_router_backward_job *job, cudaStream_t stream)
{
    const int words = 2 * row_words_of<V>(job->rows.columns);
    const int warps = router_warps(words, MOST_WARPS);
    const int64_t ctas = (job->rows.num_tokens + warps - 1) / warps;
    return launch_kernel(router_backward_kernel<V>, (int)ctas, warps * WARP, warps * words * 4,
                         stream, *job);
}

extern "C" cudaError_t p2p_launch_router_backward(const p2p_router_backward_job *job,
                                                  cudaStream_t stream)
{
    if (job->d_scale_of_expert) {
        const cudaError_t error = launch_scale(job, stream);
        if (error != cudaSuccess) return error;
    }
    if (job->rows.num_tokens == 0) return cudaSuccess;
    return job->rows.columns <= 8 * WARP ? launch_width<8>(job, stream)
                                         : launch_width<0>(job, stream);
}

template <int V> static cudaError_t load_width()
{
    return cudaFuncSetAttribute(router_backward_kernel<V>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
}

extern "C" cudaError_t p2p_load_router_backward(void)
{
    cudaError_t error = load_width<8>();
    if (error == cudaSuccess) error = load_width<0>();
    return error == cudaSuccess
               ? cudaFuncSetAttribute(router_scale_kernel,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES)
               : error;
}
