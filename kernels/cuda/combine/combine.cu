/* SPDX-License-Identifier: Apache-2.0 */
/* combine, and the gradient of dispatch: rows return to the ranks of their tokens and are
 * summed there.
 *
 *   rows  [num_rows, row_bytes]    a warp sums a piece of a token's rows here
 *   out   [num_tokens, row_bytes]  and sends the partial sum to the token's rank
 *
 * Every warp does two kinds of units, each kind in token order:
 *
 *   expert  the partial of one token of one peer, into the peer's staging
 *   source  this rank's own partial of one of its tokens, plus the peers' as they arrive
 *
 * A warp begins a source unit of token t after its expert units of all tokens below t + lag. So
 * the lowest token that any rank waits for has been sent by every warp, and no wait is
 * circular. A partial is a result of arithmetic and so never poison: each of its words is its
 * own flag.
 *
 * Rows of aligned vectors use combine/stream.cuh, rarer cases use combine/plain.cuh. */
#include "cuda/combine/plain.cuh"
#include "cuda/combine/stream.cuh"
#include "cuda/common/launch.cuh"

#define BLOCK 384 /* threads; 168 registers each */
#define WARPS (BLOCK / WARP)

/* Writes zeros if nothing was moved. The last CTA. */
static __device__ void clear_outputs(const CombineState &c)
{
    zero_rows(c.job.out, c.job.row_bytes, 0, c.job.num_tokens, threadIdx.x, BLOCK);
    zero_floats(c.job.choice_floats, 0, (int64_t)c.job.num_tokens * c.job.top_k, threadIdx.x,
                BLOCK);
}

/* EXACT: the rows are aligned and have whole pieces. */
template <class ROW, bool EXACT>
__global__ void __launch_bounds__(BLOCK, 1)
    combine_kernel(const __grid_constant__ p2p_combine_job job)
{
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Stride expert, source;
    read_plan(plan, job.plan, job.plan_bytes, job.self, job.num_tokens);
    const device_plan_header &h = plan.header;
    const bool moves = plan.is_valid && h.result == EPIC_OK;
    const bool tree = h.sum_order == EPIC_TREE;
    const bool leaves = tree && (int)h.leaves > job.self.num_ranks;
    const bool has_f32_partials = ROW::N == 8 && h.partial_type == EPIC_F32;
    const bool deep = tree && job.self.num_ranks > 8;
    const bool adds_by_host = moves && can_add_by_host(job.self, h);
    const bool streams = !adds_by_host && !leaves && !has_f32_partials && !deep &&
                         job.aligned && h.top_k <= WARP;
    const RowShape shape = streams ? row_shape<STREAM_V>(job.row_bytes, job.aligned)
                                   : row_shape<1>(job.row_bytes, job.aligned);
    if (threadIdx.x == 0) {
        expert.set_strides(gridDim.x * WARPS, max(job.self.num_ranks - 1, 1), shape.pieces);
        source.set_strides(gridDim.x * WARPS, 1, shape.pieces);
    }
    if (!begin_operation(op, job.self, (uint32_t)h.id, job.num_tokens, 0, job.num_rows)) return;
    uint4 *stack =
        (uint4 *)memory + threadIdx.x / WARP * LEAF_LEVELS * (has_f32_partials ? 2 : 1) * WARP;
    CombineState c = {job,   op,    plan,          expert, source,
                      stack, shape, policy_once(), 0,      (int)h.top_k};
#ifdef EPIC_HOSTS
    c.adds_by_host = adds_by_host;
#endif
    bool ok = true;
    if (moves && streams && !tree)
        ok = combine_stream<ROW, EXACT, false>(c, op, memory);
    else if (moves && streams)
        ok = combine_stream<ROW, EXACT, true>(c, op, memory);
    else if (moves && has_f32_partials && leaves)
        ok = combine_plain<ROW, F32, true>(c, op);
    else if (moves && has_f32_partials)
        ok = combine_plain<ROW, F32, false>(c, op);
    else if (moves && leaves)
        ok = combine_plain<ROW, ROW, true>(c, op);
    else if (moves)
        ok = combine_plain<ROW, ROW, false>(c, op);
    if (finish_operation(op) && ok &&
        !(moves && check_rows(job.self, op, &h, threadIdx.x == 0)))
        clear_outputs(c);
}

typedef void (*Kernel)(p2p_combine_job);

/* The kernel for a type of rows. */
static Kernel kernel_of(uint32_t type, bool exact)
{
    if (type == EPIC_BF16)
        return exact ? combine_kernel<Bf16, true> : combine_kernel<Bf16, false>;
    if (type == EPIC_F16) return exact ? combine_kernel<F16, true> : combine_kernel<F16, false>;
    return exact ? combine_kernel<F32, true> : combine_kernel<F32, false>;
}

/* Dynamic shared memory of a CTA: the larger of the stream's rings and the stacks of leaves. */
static int memory_bytes(void)
{
    const int stacks = LEAF_LEVELS * 2 * WARP * 16,
              stream = CombineStream<F32, true, true>::WARP_BYTES;
    return WARPS * (stacks > stream ? stacks : stream);
}

extern "C" cudaError_t p2p_load_combine(void)
{
    for (uint32_t type = EPIC_F32; type <= EPIC_F16; type++)
        for (int exact = 0; exact < 2; exact++) {
            const cudaError_t error = cudaFuncSetAttribute(
                kernel_of(type, exact), cudaFuncAttributeMaxDynamicSharedMemorySize,
                memory_bytes());
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

/* Tokens by which adding stays behind sending: a quarter more than all warps send at a time, so
 * that partials have arrived when they are needed. It gains nothing where each warp has the
 * same piece of every row, and rows of FLAT plans lose where its next piece is only a little
 * further on; there the job's lag stays. docs/lab/cuda.md. */
static int lag_of(const p2p_combine_job &job, int num_sms)
{
    const int pieces = (int)((job.row_bytes + STREAM_V * 512 - 1) / (STREAM_V * 512));
    const int peers = job.self.num_ranks - 1, warps = num_sms * WARPS;
    if (peers < 1 || pieces < 1 || warps % pieces == 0) return job.lag;
    if (job.flat && warps % pieces * 2 < pieces) return job.lag;
    const int lag = warps / (pieces * peers) * 5 / 4;
    return lag > job.lag && lag <= 192 ? lag : job.lag;
}

extern "C" cudaError_t p2p_launch_combine(const p2p_combine_job *job, int num_sms,
                                          cudaStream_t stream)
{
    const bool exact = job->aligned && job->row_bytes % (STREAM_V * 512) == 0;
    p2p_combine_job copy = *job;
    copy.lag = lag_of(copy, num_sms);
    copy.lag = lag_for_net(job->self, copy.lag, job->num_tokens);
    return launch_kernel(kernel_of(job->type, exact), num_sms, BLOCK, memory_bytes(), stream,
                         copy);
}
