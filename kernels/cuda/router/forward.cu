/* SPDX-License-Identifier: Apache-2.0 */
/* Router forward: chooses top_k experts for each token and computes their weights.
 *
 *   in   logits    [num_tokens, columns]
 *   out  topk_idx  [num_tokens, top_k]
 *   out  weights   [num_tokens, top_k]
 *   out  scores    [num_tokens, columns], if the caller wants them
 *
 * One warp processes one token, whose logits, scores and keys are in shared memory. Experts are
 * compared by keys (choose.cuh). A *choice* is a token and one of its top_k experts. The weight
 * of a choice is its part divided by the divisor of the token (struct Shares):
 *
 *   logits -> scores -> keys -> choices (choose.cuh) -> parts, divisor -> weights */
#include "cuda/common/launch.cuh"
#include "cuda/router/choose.cuh"

#define MOST_WARPS 4

/* Returns the expert ids in row token_ids[token] of the caller's table. An id that is too large
 * becomes -1. If the table does not have this row, all ids become -1. */
template <int J>
__device__ __forceinline__ Chosen<J> read_table_row(const p2p_router_job &job, int64_t token)
{
    Chosen<J> c = {(int)job.rows.router.top_k, {-1}};
    const int64_t id = job.has_int64_ids ? ((const int64_t *)job.token_ids)[token]
                                         : ((const int32_t *)job.token_ids)[token];
    const bool has_row = id >= 0 && id < job.table_rows;
#pragma unroll
    for (int j = 0; j < J; j++) {
        c.id[j] = -1;
        if (has_row && c.has_choice(j)) c.id[j] = job.table[id * c.k + j * WARP + lane_id()];
        if (c.id[j] >= job.rows.columns) c.id[j] = -1;
    }
    return c;
}

/* Returns the expert ids that the caller has chosen for a token. An id that is too large
 * becomes -1. */
template <int J>
__device__ __forceinline__ Chosen<J> read_forced_row(const p2p_router_job &job, int64_t token)
{
    Chosen<J> c = {(int)job.rows.router.top_k, {-1}};
#pragma unroll
    for (int j = 0; j < J; j++) {
        c.id[j] = -1;
        if (c.has_choice(j)) c.id[j] = job.topk_idx_in[token * c.k + j * WARP + lane_id()];
        if (c.id[j] >= job.rows.columns) c.id[j] = -1;
    }
    return c;
}

/* The router's bias for the columns of this lane, or zeros. The bias is loaded before the
 * logits, so that the loads of bias and logits overlap. */
template <int V> struct Bias {
    float x[V > 0 ? V : 1];

    __device__ __forceinline__ explicit Bias(const p2p_router_job &job)
    {
#pragma unroll
        for (int v = 0; v < V; v++) x[v] = read_bias(job, v * WARP + lane_id());
    }
    /* Returns the bias of one column. Returns 0 if there is no bias or no such column. */
    static __device__ __forceinline__ float read_bias(const p2p_router_job &job, int column)
    {
        return job.bias && column < job.rows.columns ? __ldg(job.bias + column) : 0.0f;
    }
};

/* Computes the key (choose.cuh) of each column i. The selection value is values[i] plus the
 * bias of the column. */
template <int V>
__device__ __forceinline__ void make_keys(const p2p_router_job &job, uint32_t *keys,
                                          const float *values, const Bias<V> &bias)
{
    if (V > 0) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            const int index = padded_index(v * WARP + lane_id());
            keys[index] = key_of(values[index] + bias.x[v]);
        }
    } else {
        each_column<0>(0, job.rows.columns, [&](int i) {
            keys[padded_index(i)] =
                key_of(values[padded_index(i)] + Bias<0>::read_bias(job, i));
        });
    }
    __syncwarp();
}

/* Computes the weights of a token's choices, and writes ids and weights to the outputs. `from`
 * [columns]: the token's scores or its logits, depending on the router's weight_rule. */
template <int J>
__device__ __forceinline__ void write_weights(const p2p_router_job &job, const Chosen<J> &c,
                                              const float *from, int64_t token)
{
    float x[J] = {0};
    __syncwarp();
#pragma unroll
    for (int j = 0; j < J; j++)
        if (c.has_expert(j)) x[j] = from[padded_index(c.id[j])];
    const Shares<J> s = compute_shares(job.rows, c, x);
#pragma unroll
    for (int j = 0; j < J; j++) {
        if (!c.has_choice(j)) continue;
        const int64_t index = token * c.k + j * WARP + lane_id();
        /* An invalid id of the caller is copied unchanged, so that the plan reports the
         * error. */
        job.topk_idx[index] = job.topk_idx_in ? job.topk_idx_in[index] : c.id[j];
        float weight = s.divisor != 0 ? s.parts[j] / s.divisor * job.rows.scale : 0;
        if (job.scale_of_expert && c.id[j] >= 0 && s.divisor != 0)
            weight *= job.scale_of_expert[c.id[j]];
        job.weights[index] = weight;
    }
}

/* Processes one token per warp. V: upper bound of the number of columns per lane; 0: no
 * bound. */
template <int V>
__global__ void __launch_bounds__(MOST_WARPS *WARP)
    router_kernel(const __grid_constant__ p2p_router_job job,
                  const __grid_constant__ IdOwnership deal)
{
    wait_for_previous_kernel();
    float *const memory = (float *)dynamic_shared();
    const epic_router &r = job.rows.router;
    const int columns = job.rows.columns, words = row_words_of<V>(columns);
    /* J: number of choices per lane. J is 2 only if V is 0, because with more than 32 choices
     * p2p_launch_router() launches the instance with V = 0. */
    constexpr int J = V > 0 ? 1 : 2;
    const int64_t token = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int group_words = r.num_groups > WARP ? row_words((int)r.num_groups) : 0;
    if (token >= job.rows.num_tokens) return;
    float *z = memory + (threadIdx.x / WARP) * (3 * words + group_words), *s = z + words;
    uint32_t *keys = (uint32_t *)(s + words), *group_keys = keys + words;

    const bool choosing = job.token_ids == NULL && job.topk_idx_in == NULL,
               of_score = r.weight_rule == EPIC_WEIGHT_OF_SCORE;
    const Bias<V> bias(job);
    load_row<V>(z, job.rows, token);
    if (of_score || job.scores || (choosing && !job.on_logits))
        make_scores<V>(s, z, r.score, columns);
    if (job.scores)
        each_column<V>(0, columns,
                       [&](int i) { job.scores[token * columns + i] = s[padded_index(i)]; });
    if (choosing) make_keys<V>(job, keys, job.on_logits ? z : s, bias);
    const Chosen<J> c = choosing
                            ? choose_experts<V, J>(r, deal, keys, group_keys, job.on_logits)
                        : job.topk_idx_in ? read_forced_row<J>(job, token)
                                          : read_table_row<J>(job, token);
    write_weights(job, c, of_score ? s : z, token);
}

template <int V>
static cudaError_t launch_width(const p2p_router_job *job, const IdOwnership &deal,
                                cudaStream_t stream)
{
    const int columns = job->rows.columns, groups = (int)job->rows.router.num_groups;
    const int words = 3 * row_words_of<V>(columns) + (groups > WARP ? row_words(groups) : 0);
    const int warps = router_warps(words, MOST_WARPS);
    const int64_t ctas = (job->rows.num_tokens + warps - 1) / warps;
    return launch_kernel(router_kernel<V>, (int)ctas, warps * WARP, warps * words * 4, stream,
                         *job, deal);
}

/* Launches the instance with the smallest V (4, 8 or 16) that is at least the number of columns
 * per lane and at least the number of ids per lane. Launches the instance for any router (V =
 * 0) in three cases: 16 is too small, there are more than 32 groups of experts, or top_k is
 * above 32. */
extern "C" cudaError_t p2p_launch_router(const p2p_router_job *job, cudaStream_t stream)
{
    const IdOwnership d = id_ownership(job->rows.router, job->rows.columns);
    const bool any = d.groups_per_lane > 1 || job->rows.router.top_k > WARP;
    const int most = any ? 1 << 30 : max(d.ids_per_lane, (job->rows.columns + 31) / 32);
    if (job->rows.num_tokens == 0) return cudaSuccess;
    if (most <= 4) return launch_width<4>(job, d, stream);
    if (most <= 8) return launch_width<8>(job, d, stream);
    if (most <= 16) return launch_width<16>(job, d, stream);
    return launch_width<0>(job, d, stream);
}

template <int V> static cudaError_t load_width()
{
    return cudaFuncSetAttribute(router_kernel<V>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                SHARED_BYTES);
}

extern "C" cudaError_t p2p_load_router(void)
{
    cudaError_t error = load_width<4>();
    if (error == cudaSuccess) error = load_width<8>();
    if (error == cudaSuccess) error = load_width<16>();
    if (error == cudaSuccess) error = load_width<0>();
    return error;
}
