/* SPDX-License-Identifier: Apache-2.0 */
/* combine_backward: sends the gradient of each token's output to the slots whose rows combine
 * added to this output. If the caller requests it, also computes the gradients of the slots'
 * weights.
 *
 *   d_out           [num_tokens, row_bytes]  input: gradients of the outputs of this rank
 *   rows            [num_rows, row_bytes]    input: the rows that combine added
 *   d_rows          [num_rows, row_bytes]    output: weight * d_out of the slot's token, which
 *                                            may be quantized to e4m3
 *   d_slot_weights  [num_rows]               output: dot product of d_out and the slot's row
 *
 * A unit is the work that one warp does at a time: one span (some pieces) of one row. All units
 * form one list, and the warps of all CTAs take the units one after the other
 * (common/rows.cuh). job.lag is the number of tokens that are sent before the first token is
 * received. Step i of the list has these units:
 *
 *   send     token i of this rank, to every peer that needs it
 *   receive  token i - lag of each source; this rank itself is the last source. A unit that
 *            receives a token of this rank also finishes the dot products of token
 *            i - 2 * lag of every rank.
 *
 * A piece has 1024 elements and is one block of a dot product. The warp that has computed a
 * block's product stores it to `parts`, an array in the heap of this rank. Later another warp
 * adds the products of all blocks in order.
 *
 * Memory order: each word of a row in staging, and each block in `parts`, is its own flag. It
 * is poison (the mark of a word that has not arrived) until it is stored, and the warp that
 * reads it stores poison back. Ranks cannot wait for each other in a circle, for the reason in
 * dispatch/dispatch.cu. */
#include "cuda/combine/backward_plain.cuh"
#include "cuda/combine/backward_stream.cuh"
#include "cuda/common/launch.cuh"

/* Number of threads per CTA. A CTA that quantizes has fewer threads, because each of them needs
 * more registers. */
template <class ROW> static constexpr int block_for(bool quantize)
{
    return quantize ? Dot<F32>::BLOCK : Dot<ROW>::BLOCK;
}

/* The kernel that p2p_launch_combine_backward() launches. EXACT: rows are aligned to 16 bytes
 * and consist of whole pieces. QUANTIZE: the rows of d_rows are e4m3 with scales. */
template <class ROW, bool EXACT, bool QUANTIZE>
__global__ void __launch_bounds__(block_for<ROW>(QUANTIZE), 1)
    combine_backward_kernel(const __grid_constant__ p2p_combine_backward_job job)
{
    wait_for_previous_kernel();
    constexpr int V = Dot<ROW>::V;
    typedef GradientStream<ROW, EXACT, QUANTIZE> Units;
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Stride stride;
    const RowShape shape = row_shape<V>(job.row_bytes, job.aligned);
    /* a thread of the third warp, because the first two warps begin the operation meanwhile */
    if (threadIdx.x == 2 * WARP)
        stride.set_strides(job.total_warps, num_unit_roles(job.self),
                           (shape.pieces + job.span - 1) / job.span);
    if (!read_plan_and_begin(plan, op, job.plan, job.plan_bytes, job.self, job.num_tokens,
                             job.num_rows))
        return;
    choose_padding(plan, job);
    __syncthreads();
    const device_plan_header &h = plan.header;
    const bool moves = plan.is_valid && h.result == EPIC_OK;
    BackwardMove m = {job, op, plan, stride, shape, policy_once(), 0, (int)h.top_k};
    bool ok = true;
    uint8_t *const ring = memory + threadIdx.x / WARP * Units::WARP_BYTES;
    const bool streams = moves && job.aligned && h.top_k <= WARP;
    const bool is_single = streams && start_single_round(op, plan, shape);
    if (streams)
        ok = for_each_round(m, op, (int64_t)m.shape.vectors * 16,
                            [&](int32_t end) { return run_units(Units(m, ring, end)); });
    else if (moves)
        ok = move_plain<ROW, QUANTIZE>(m, op);
    if (moves && ok) pad_all<V, QUANTIZE>(m);
    if (moves && ok && job.zero_tail)
        zero_slots<QUANTIZE>(m, h.slots_of[job.self.rank], grid_thread(), grid_threads());
    if (end_rounds(op, h, is_single, moves, ok))
        zero_slots<QUANTIZE>(m, 0, threadIdx.x, blockDim.x);
}

typedef void (*Kernel)(p2p_combine_backward_job);

/* With quantized rows one kernel handles all row sizes, so `exact` is not used. */
template <class ROW> static Kernel kernel_for(bool exact, bool quantize)
{
    if (quantize) return combine_backward_kernel<ROW, false, true>;
    return exact ? combine_backward_kernel<ROW, true, false>
                 : combine_backward_kernel<ROW, false, false>;
}

static Kernel kernel_of(uint32_t type, bool exact, bool quantize)
{
    return type == EPIC_BF16  ? kernel_for<Bf16>(exact, quantize)
           : type == EPIC_F16 ? kernel_for<F16>(exact, quantize)
                              : kernel_for<F32>(exact, quantize);
}

static int block_of(uint32_t type, bool quantize)
{
    return type == EPIC_F32 ? block_for<F32>(quantize) : block_for<Bf16>(quantize);
}

/* Returns the size of a CTA's dynamic shared memory: WARP_BYTES of GradientStream per warp. */
static int memory_bytes(uint32_t type, bool quantize)
{
    const int warp_bytes = type == EPIC_F32 ? GradientStream<F32, true, false>::WARP_BYTES
                                            : GradientStream<Bf16, true, false>::WARP_BYTES;
    return block_of(type, quantize) / WARP * warp_bytes;
}

extern "C" cudaError_t p2p_load_combine_backward(void)
{
    for (uint32_t type = EPIC_F32; type <= EPIC_F16; type++)
        for (int kind = 0; kind < 3; kind++) {
            const cudaError_t error = cudaFuncSetAttribute(
                kernel_of(type, kind == 1, kind == 2),
                cudaFuncAttributeMaxDynamicSharedMemorySize, memory_bytes(type, kind == 2));
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

extern "C" cudaError_t p2p_launch_combine_backward(const p2p_combine_backward_job *job,
                                                   int num_sms, cudaStream_t stream)
{
    const int vectors = job->type == EPIC_F32 ? 8 : 4;
    const bool exact = job->aligned && job->row_bytes % (vectors * 512) == 0;
    const bool quantize = job->quantize != 0;
    const int block = block_of(job->type, quantize), bytes = memory_bytes(job->type, quantize);
    p2p_combine_backward_job copy = *job;
    const int roles = num_unit_roles(job->self);
    deal_units_for_net(job->self, copy, num_sms, block, roles, vectors);
    /* Choose the lag: 3/4 of the number of tokens that all warps process at a time. With a much
     * shorter lag, warps would often wait for the slowest warp. The lag has a minimum, because
     * some warps are faster than others. The values are measured (docs/lab/cuda.md). */
    const int at_a_time = copy.total_warps / units_per_token(copy, roles, vectors);
    const int lag = 32 + 16 * copy.span;
    copy.lag = at_a_time * 3 / 4;
    if (copy.lag < 100) copy.lag = at_a_time < 100 ? at_a_time : 100;
    if (job->row_bytes <= 4096 && copy.lag > 128) copy.lag = 128;
    if (copy.lag < lag) copy.lag = lag;
    copy.lag = lag_for_net(job->self, copy.lag, job->num_tokens);
    return launch_kernel(kernel_of(job->type, exact, quantize), num_sms, block, bytes, stream,
                         copy);
}
