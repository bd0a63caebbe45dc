/* SPDX-License-Identifier: Apache-2.0 */
/* combine, and dispatch_backward (the gradient of dispatch): the experts' rows return to the
 * home ranks of their tokens and are summed there.
 *
 *   rows  [num_rows, row_bytes]    input: rows by slot
 *   out   [num_tokens, row_bytes]  output: a weighted sum for each of this rank's tokens
 *
 * dispatch_backward also returns one float per choice (a token and one of its top_k experts) to
 * the token's rank: the gradient of the weight of the choice. The comments of this folder call
 * these floats the *floats* of a token.
 *
 * All warps of all CTAs do the same kind of work. A unit is the work that one warp does on one
 * piece (2 KB, in plain.cuh 512 bytes) of one token's row. There are two lists of units, each
 * in ascending order of tokens. Each warp processes a share of each list:
 *
 *   expert unit  for a token of a peer: adds the token's rows on this rank, and stores this
 *                partial sum to the peer's staging
 *   source unit  for a token of this rank: adds the token's rows on this rank, then the peers'
 *                partial sums as they arrive, and stores the sum to out
 *
 * Memory order: a word of staging that has not arrived contains poison, a bit pattern that
 * arithmetic never returns. The receiver polls each word of a partial sum until the word is not
 * poison. So no other flag is needed, and the sender may store the words in any order.
 *
 * Ranks cannot wait for each other in a circle. Only source units wait for other ranks. A warp
 * begins the source units of token t only after its own expert units of all tokens below t +
 * lag (lag > 0). Let t be the lowest token for which any warp of any rank waits. A warp that
 * has not yet reached the source units of token t waits for nothing, so it reaches these units.
 * Before it begins them, it has sent its partial sums for token t. So the wait ends.
 *
 * combine/stream.cuh handles the common cases: aligned rows, and at most P2P_STREAM_LEAVES
 * leaves of the sum tree on each rank. Libraries for many ranks (MANY_RANKS,
 * rules/device_layout.h) use it only for sums by rank. combine/plain.cuh handles the other cases, which its first comment
 * lists. */
#include "cuda/combine/plain.cuh"
#include "cuda/combine/stream.cuh"
#include "cuda/common/launch.cuh"

#define BLOCK 384 /* threads per CTA; with this number, each thread can have 168 registers */
#define WARPS (BLOCK / WARP)
/* index of the thread that sets the strides while two other warps begin the operation */
#define SETTER (2 * WARP)

/* Zeroes all outputs. The CTA that finishes last calls it if the plan is invalid, or if the
 * array `rows` of a rank has too few rows. */
static __device__ void clear_outputs(const CombineState &c)
{
    zero_rows(c.job.out, c.job.row_bytes, 0, c.job.num_tokens, threadIdx.x, BLOCK);
    zero_floats(c.job.choice_floats, 0, (int64_t)c.job.num_tokens * c.job.top_k, threadIdx.x,
                BLOCK);
}

/* Sets the strides of the two lists of units. `pieces`: number of pieces of a row. Called by
 * one thread. */
static __device__ void set_strides(const p2p_combine_job &job, Stride &expert, Stride &source,
                                   int pieces)
{
    expert.set_strides(gridDim.x * WARPS, num_role_groups(max(job.self.num_ranks - 1, 1)),
                       pieces);
    source.set_strides(gridDim.x * WARPS, 1, pieces);
}

/* The kernel that p2p_launch_combine() launches if it does not need combine_leaves_kernel().
 * EXACT: rows are aligned to 16 bytes and consist of whole pieces. */
template <class ROW, bool EXACT>
__global__ void __launch_bounds__(BLOCK, 1)
    combine_kernel(const __grid_constant__ p2p_combine_job job)
{
    wait_for_previous_kernel();
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Stride expert, source;
    RowShape shape = row_shape<STREAM_V>(job.row_bytes, job.aligned);
    if (threadIdx.x == SETTER) set_strides(job, expert, source, shape.pieces);
    if (!read_plan_and_begin(plan, op, job.plan, job.plan_bytes, job.self, job.num_tokens,
                             job.num_rows))
        return;
    const device_plan_header &h = plan.header;
    const bool moves = plan.is_valid && h.result == EPIC_OK;
    const bool tree = h.sum_order == EPIC_TREE;
    const bool leaves = tree && (int)h.leaves > num_members(job.self, op);
    const bool has_f32_partials = ROW::N == 8 && h.partial_type == EPIC_F32;
    const bool deep = tree && job.self.num_ranks > 8;
    const bool adds_by_host = moves && can_add_by_host(job.self, h);
    const bool streams = !(MANY_RANKS && tree) && !adds_by_host && !leaves &&
                         !has_f32_partials && !deep && job.aligned && h.top_k <= WARP;
    if (!streams) {
        shape = row_shape<1>(job.row_bytes, job.aligned);
        if (threadIdx.x == SETTER) set_strides(job, expert, source, shape.pieces);
        __syncthreads();
    }
    const bool is_single = moves && streams && start_single_round(op, plan, shape);
    uint4 *stack =
        (uint4 *)memory + threadIdx.x / WARP * LEAF_LEVELS * (has_f32_partials ? 2 : 1) * WARP;
    CombineState c = {job,   op,    plan,          expert, source,
                      stack, shape, policy_once(), 0,      (int)h.top_k};
    if (HOSTS) *c.adds_by_host = adds_by_host;
    bool ok = true;
    if (moves && streams && !tree)
        ok = combine_stream<ROW, EXACT, false, false>(c, op, memory, NULL);
    else if (!MANY_RANKS && moves && streams)
        ok = combine_stream<ROW, EXACT, true, false>(c, op, memory, NULL);
    else if (moves && has_f32_partials && leaves)
        ok = combine_plain<ROW, F32, true>(c, op);
    else if (moves && has_f32_partials)
        ok = combine_plain<ROW, F32, false>(c, op);
    else if (moves && leaves)
        ok = combine_plain<ROW, ROW, true>(c, op);
    else if (moves)
        ok = combine_plain<ROW, ROW, false>(c, op);
    if (end_rounds(op, h, is_single, moves, ok)) clear_outputs(c);
}

/* Stores the first slot of each leaf (block of experts) of this rank in `to`. Called by all
 * threads of a CTA. A barrier must follow before the slots are read. */
__device__ __forceinline__ void find_leaf_slots(LeafSlots &to, const PlanView &plan, int leaves)
{
    const int i = (int)threadIdx.x;
    if (i < P2P_STREAM_LEAVES)
        to.begin[i] =
            i < leaves ? __ldg(plan.slab_begin + plan.header.owned / leaves * i) : INT32_MAX;
}

/* The kernel for rows that combine/stream.cuh supports, if each rank has several leaves of the
 * sum tree. A leaf is a block of experts whose rows are added first. This is a separate kernel,
 * because combine_kernel() has no registers left for the nodes of a tree. If ranks have left
 * the group after the launch was captured in a CUDA graph, each member has more than job.leaves
 * leaves. If these are too many for combine/stream.cuh, the kernel runs combine/plain.cuh. */
template <class ROW, bool EXACT>
__global__ void __launch_bounds__(BLOCK, 1)
    combine_leaves_kernel(const __grid_constant__ p2p_combine_job job)
{
    wait_for_previous_kernel();
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Stride expert, source;
    __shared__ LeafSlots leaf_slots;
    RowShape shape = row_shape<STREAM_V>(job.row_bytes, true);
    if (threadIdx.x == SETTER) set_strides(job, expert, source, shape.pieces);
    if (!read_plan_and_begin(plan, op, job.plan, job.plan_bytes, job.self, job.num_tokens,
                             job.num_rows))
        return;
    const device_plan_header &h = plan.header;
    const bool moves = plan.is_valid && h.result == EPIC_OK;
    int leaves = 0; /* number of leaves of this rank; only with WITH_VACANT_SEATS */
    bool streams = true;
    uint4 *stack = NULL;
    if constexpr (WITH_VACANT_SEATS) {
        leaves = (int)h.leaves / num_members(job.self, op);
        streams = leaves <= P2P_STREAM_LEAVES;
        constexpr int STACK_VECTORS = LEAF_LEVELS * WARP;
        static_assert(STACK_VECTORS * 16 <= CombineStream<ROW, EXACT, true, true>::WARP_BYTES,
                      "a LeafStack fits into the shared memory of a warp");
        stack = (uint4 *)memory + threadIdx.x / WARP * STACK_VECTORS;
        if (!streams) shape = row_shape<1>(job.row_bytes, true);
        if (!streams && threadIdx.x == SETTER) set_strides(job, expert, source, shape.pieces);
    }
    const bool is_single = moves && streams && start_single_round(op, plan, shape);
    if (moves && streams)
        find_leaf_slots(leaf_slots, plan, WITH_VACANT_SEATS ? leaves : job.leaves);
    __syncthreads();
    CombineState c = {job,   op,    plan,          expert, source,
                      stack, shape, policy_once(), 0,      (int)h.top_k};
    bool ok = true;
    if (moves && streams)
        ok = combine_stream<ROW, EXACT, true, true>(c, op, memory, &leaf_slots);
    if constexpr (WITH_VACANT_SEATS)
        if (moves && !streams) ok = combine_plain<ROW, ROW, true>(c, op);
    if (end_rounds(op, h, is_single, moves, ok)) clear_outputs(c);
}

typedef void (*Kernel)(p2p_combine_job);

/* `exact`: EXACT of combine_kernel(). `leaves`: selects combine_leaves_kernel(). */
template <class ROW> static Kernel kernel_for(bool exact, bool leaves)
{
    if constexpr (!HOSTS)
        if (leaves)
            return exact ? combine_leaves_kernel<ROW, true> : combine_leaves_kernel<ROW, false>;
    return exact ? combine_kernel<ROW, true> : combine_kernel<ROW, false>;
}

static Kernel kernel_of(uint32_t type, bool exact, bool leaves)
{
    if (type == EPIC_BF16) return kernel_for<Bf16>(exact, leaves);
    return type == EPIC_F16 ? kernel_for<F16>(exact, leaves) : kernel_for<F32>(exact, leaves);
}

/* Returns the size in bytes of a CTA's dynamic shared memory. A CTA runs the code of stream.cuh
 * (which needs a ring buffer per warp) or of plain.cuh (which needs a LeafStack per warp), so
 * this is the larger of the two sizes. `leaves`: the size is for combine_leaves_kernel(). */
static int memory_bytes(bool leaves)
{
    const int stacks = LEAF_LEVELS * 2 * WARP * 16,
              stream = CombineStream<F32, true, true, false>::WARP_BYTES;
    if (leaves) return WARPS * CombineStream<F32, true, true, true>::WARP_BYTES;
    return WARPS * (stacks > stream ? stacks : stream);
}

extern "C" cudaError_t p2p_load_combine(void)
{
    for (uint32_t type = EPIC_F32; type <= EPIC_F16; type++)
        for (int kind = 0; kind < (HOSTS ? 2 : 4); kind++) {
            const bool exact = kind % 2, leaves = kind / 2;
            const cudaError_t error = cudaFuncSetAttribute(
                kernel_of(type, exact, leaves), cudaFuncAttributeMaxDynamicSharedMemorySize,
                memory_bytes(leaves));
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

/* Returns the lag: the number of tokens for which a warp sends partial sums before it adds the
 * partial sums of the first token. With a lag that is long enough, the peers' partial sums have
 * arrived when the warp reads them. The lag is 5/4 of the number of tokens for which all warps
 * together send partial sums at a time.
 *
 * Returns job.lag instead if job.lag is longer than this lag, or if this lag is above 192. Also
 * returns job.lag if a longer lag does not help, because every warp always gets the same piece
 * of a row, or because the plan is FLAT and a warp's piece moves by less than half a row from
 * one unit to the next. The values are measured (docs/lab/cuda.md). */
static int lag_of(const p2p_combine_job &job, int num_sms)
{
    const int pieces = (int)((job.row_bytes + STREAM_V * 512 - 1) / (STREAM_V * 512));
    const int peers = num_role_groups(job.self.num_ranks - 1), warps = num_sms * WARPS;
    if (peers < 1 || pieces < 1 || warps % pieces == 0) return job.lag;
    if (job.flat && warps % pieces * 2 < pieces) return job.lag;
    const int lag = warps / (pieces * peers) * 5 / 4;
    return lag > job.lag && lag <= 192 ? lag : job.lag;
}

extern "C" cudaError_t p2p_launch_combine(const p2p_combine_job *job, int num_sms,
                                          cudaStream_t stream)
{
    const bool exact = job->aligned && job->row_bytes % (STREAM_V * 512) == 0;
    const bool leaves = job->aligned && job->leaves;
    p2p_combine_job copy = *job;
    copy.lag = lag_of(copy, num_sms);
    copy.lag = lag_for_net(job->self, copy.lag, job->num_tokens);
    return launch_kernel(kernel_of(job->type, exact, leaves), num_sms, BLOCK,
                         memory_bytes(leaves), stream, copy);
}
