/* SPDX-License-Identifier: Apache-2.0 */
/* combine and dispatch_backward of layers with one choice per token (top-1), if the output of
 * this rank lies in a window (memory into which peers can store). If the outputs of all ranks
 * lie in windows, the rank that has a token's row stores the result directly into the output of
 * the token's home rank (net/windows.cuh). Otherwise the partial sums go through staging, like
 * in combine.cu.
 *
 *   remote CTAs   the last CTAs of the grid. They multiply rows by their weights and store the
 *                 products to peers. In dispatch_backward they also send the gradients of the
 *                 weights
 *   local CTAs    the other CTAs. They multiply the rows of this rank's tokens by their weights
 *                 and store the products to the output, write zeros for tokens without a slot,
 *                 and receive the gradients of the weights
 *
 * If there is only one CTA, it is both a remote CTA and a local CTA. The kernel moves only rows
 * that are aligned to 16 bytes. net/windows.cuh lists which stores a rank must see before which
 * loads. */
#include "cuda/combine/plain.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/net/windows.cuh"

#define BLOCK 384

/* Multiplies vectors of a row by the row's weight and rounds them to type ROW. The result is
 * the partial sum of this row alone. */
template <class ROW, int COUNT>
__device__ __forceinline__ void weigh_row(uint4 (&q)[COUNT], float weight)
{
#pragma unroll
    for (int v = 0; v < COUNT; v++) {
        float x[ROW::N];
        ROW::unpack_floats(q[v], x);
#pragma unroll
        for (int i = 0; i < ROW::N; i++) x[i] = __fmaf_rn(weight, x[i], -0.0f);
        q[v] = ROW::pack_floats(x);
    }
}

/* `token`, a token of `rank`, has only one choice. Returns the slot of this choice if it is on
 * this rank, otherwise -1. */
__device__ __forceinline__ int32_t slot_of(const CombineState &c, int rank, int32_t token)
{
    if (token >= c.plan.header.tokens_of[rank]) return -1;
    return clamp_slot(c, __ldg(c.plan.records + record_index(c.job.self, rank, token, 1)));
}

/* Lists the rows of the tokens with the items (running indices) [begin, end). For remote CTAs,
 * item p * most_tokens + t is token t of the p-th peer. For local CTAs, item t is token t of
 * this rank. Remote CTAs also send the gradients of the weights. Called by all threads of a
 * CTA; each thread handles one item. */
__device__ __forceinline__ void list_rows(const CombineState &c, const WindowState &w,
                                          RowList<BLOCK> &list, bool is_remote, int64_t begin,
                                          int64_t end)
{
    const p2p_self &self = c.job.self;
    const int64_t item = begin + threadIdx.x;
    const int32_t most = is_remote ? c.plan.most_tokens : c.job.num_tokens;
    const int distance = is_remote ? (int)(item / most) + 1 : 0;
    const int rank = wrap_rank(self.rank + distance, self.num_ranks);
    const int32_t token = (int32_t)(item % most);
    const int32_t slot = item < end ? slot_of(c, rank, token) : -1;
    if (threadIdx.x == 0) list.count = 0;
    __syncthreads();
    if (slot >= 0 && is_remote && c.job.slot_floats) {
        const uint32_t word = __float_as_uint(__ldg(c.job.slot_floats + slot));
        store_relaxed(floats_base(self, c.op, self.heap[rank], self.num_ranks - 1 - distance) +
                          (int64_t)token * float_stride(1),
                      replace_poison(word, F32::NAN_WORD));
    }
    if (slot >= 0 && (!is_remote || token < w.rows[rank]))
        list.rows[atomicAdd(&list.count, 1u)] = {slot, token, rank};
    __syncthreads();
}

/* Stores the results of all tokens that a team handles. A team is all remote CTAs, which store
 * results to peers, or all local CTAs, which store results to this rank's output. Called by all
 * threads of the team's CTAs. */
template <class ROW>
static __device__ __noinline__ void copy_results(const CombineState &c, const WindowState &w,
                                                 RowList<BLOCK> &list, const CopyTeam team)
{
    const int64_t items = team.is_remote
                              ? (int64_t)(c.job.self.num_ranks - 1) * c.plan.most_tokens
                              : c.job.num_tokens;
    copy_items(
        w, team, list, items, BLOCK, c.job.rows, c.job.out, c.shape, c.policy,
        [&](int64_t begin, int64_t end) { list_rows(c, w, list, team.is_remote, begin, end); },
        [&](const ListedRow &row, uint4(&q)[PART_V]) {
            weigh_row<ROW>(q, read_slot_weight(c, row.from));
        });
}

/* Zeroes the outputs of those tokens of this rank that have no slot on any rank. `warp`: index
 * of this warp among `warps` warps. */
__device__ __forceinline__ void zero_dropped(const CombineState &c, int warp, int warps)
{
    for (int32_t first = warp * WARP; first < c.job.num_tokens; first += warps * WARP) {
        const int32_t token = first + lane_id();
        const bool exists = token < c.job.num_tokens;
        const int rank = exists ? __ldg(c.plan.rank_of + token) : 0;
        for (uint32_t left = __ballot_sync(ALL_LANES, rank < 0); left; left &= left - 1)
            for (int32_t v = lane_id(); v < c.shape.vectors; v += WARP)
                store_row(c.job.out + row_offset(first + __ffs(left) - 1, c.shape), v, c.shape,
                          make_uint4(0, 0, 0, 0), c.policy);
    }
}

/* Only in dispatch_backward: receives the gradients of the weights of 32 tokens of this rank,
 * from `first` on, one token per lane. Called by a whole warp. Returns false if the group has
 * failed. */
__device__ __forceinline__ bool receive_gradients(const CombineState &c, int32_t first)
{
    const p2p_self &self = c.job.self;
    const int32_t token = first + lane_id();
    const bool exists = token < c.job.num_tokens;
    const int rank = exists ? __ldg(c.plan.rank_of + token) : -1;
    uint32_t word = 0, *from = NULL;
    int missing = -1;
    if (rank == self.rank)
        word = __float_as_uint(__ldg(c.job.slot_floats + slot_of(c, rank, token)));
    else if (rank >= 0)
        from = floats_base(self, c.op, c.op.heap,
                           wrap_rank(rank + self.num_ranks - self.rank - 1, self.num_ranks)) +
               (int64_t)token * float_stride(1);
    const bool ok = wait_warp(c.op, missing, P2P_PHASE_FLOAT, [&] {
        if (from) word = load_relaxed(from);
        missing = from && word == POISON ? rank : -1;
        return __all_sync(ALL_LANES, missing < 0) != 0;
    });
    if (!ok) return false;
    if (from) *from = POISON;
    if (exists) c.job.choice_floats[token] = __uint_as_float(word);
    return true;
}

/* Moves all rows of a direct combine. Called by all threads of all CTAs. Returns false if the
 * group has failed. */
template <class ROW>
__device__ __forceinline__ bool combine_directly(const CombineState &c, const WindowState &w,
                                                 uint8_t *memory)
{
    RowList<BLOCK> &list = *(RowList<BLOCK> *)memory;
    const int local =
        copy_as_teams(c.job.self, c.op, c.job.num_remote_ctas,
                      [&](const CopyTeam &team) { copy_results<ROW>(c, w, list, team); });
    if (!local) return true;
    const int warp = (int)threadIdx.x / WARP * local + (int)blockIdx.x;
    const int warps = BLOCK / WARP * local;
    zero_dropped(c, warp, warps);
    if (!c.job.choice_floats) return true;
    for (int32_t first = warp * WARP; first < c.job.num_tokens; first += warps * WARP)
        if (!receive_gradients(c, first)) return false;
    return true;
}

static __device__ void clear_outputs(const CombineState &c)
{
    zero_rows(c.job.out, c.job.row_bytes, 0, c.job.num_tokens, threadIdx.x, BLOCK);
    zero_floats(c.job.choice_floats, 0, c.job.num_tokens, threadIdx.x, BLOCK);
}

template <class ROW>
__global__ void __launch_bounds__(BLOCK, 1)
    combine_windows_kernel(const __grid_constant__ p2p_combine_job job)
{
    wait_for_previous_kernel();
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Stride expert, source;
    __shared__ WindowState windows;
    const p2p_self &self = job.self;
    /* While the first warp reads the plan, the second warp permits all peers to store into this
     * rank's window. */
    if (is_last_cta() && threadIdx.x / WARP == 1)
        permit_stores(self, job.out_place, job.num_tokens, 0);
    read_plan(plan, job.plan, job.plan_bytes, self, job.num_tokens);
    const device_plan_header &h = plan.header;
    const bool moves = plan.is_valid && h.result == EPIC_OK;
    const bool has_f32_partials = ROW::N == 8 && h.partial_type == EPIC_F32;
    const RowShape shape = row_shape<1>(job.row_bytes, true);
    if (threadIdx.x == 0) {
        windows.is_direct = 0;
        expert.set_strides(gridDim.x * (BLOCK / WARP), max(self.num_ranks - 1, 1),
                           shape.pieces);
        source.set_strides(gridDim.x * (BLOCK / WARP), 1, shape.pieces);
    }
    if (!begin_operation(op, self, (uint32_t)h.id, job.num_tokens, 0, job.num_rows)) return;
    uint4 *stack = (uint4 *)memory + threadIdx.x / WARP * LEAF_LEVELS * 2 * WARP;
    CombineState c = {job,   op,    plan,          expert, source,
                      stack, shape, policy_once(), 0,      (int)h.top_k};
    bool ok = true;
    if (moves) {
        if (threadIdx.x < WARP)
            ok = read_permits(self, op, windows, job.windows, job.row_bytes, h.top_k == 1);
        ok = __syncthreads_and(ok) != 0;
        if (ok && windows.is_direct)
            ok = combine_directly<ROW>(c, windows, memory);
        else if (ok && has_f32_partials)
            ok = combine_plain<ROW, F32, false>(c, op);
        else if (ok)
            ok = combine_plain<ROW, ROW, false>(c, op);
    }
    if (ok && windows.is_direct && blockIdx.x == 0 && threadIdx.x < WARP) wait_stores(self, op);
    if (!finish_operation(op)) return;
    if (threadIdx.x == 0) reset_window_counters(self, op);
    if (ok && !(moves && check_rows(self, op, &h, threadIdx.x == 0))) clear_outputs(c);
}

typedef void (*Kernel)(p2p_combine_job);

static Kernel kernel_of(uint32_t type)
{
    return type == EPIC_BF16  ? combine_windows_kernel<Bf16>
           : type == EPIC_F16 ? combine_windows_kernel<F16>
                              : combine_windows_kernel<F32>;
}

/* Returns the size in bytes of a CTA's dynamic shared memory: the larger of the list of rows
 * and the stacks of partial sums of plain.cuh. */
static int memory_bytes(void)
{
    const int stacks = BLOCK / WARP * LEAF_LEVELS * 2 * WARP * 16;
    const int list = (int)sizeof(RowList<BLOCK>);
    return list > stacks ? list : stacks;
}

extern "C" cudaError_t p2p_load_combine_windows(void)
{
    for (uint32_t type = EPIC_F32; type <= EPIC_F16; type++) {
        const cudaError_t error = cudaFuncSetAttribute(
            kernel_of(type), cudaFuncAttributeMaxDynamicSharedMemorySize, memory_bytes());
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

extern "C" cudaError_t p2p_launch_combine_windows(const p2p_combine_job *job, int num_sms,
                                                  cudaStream_t stream)
{
    p2p_combine_job copy = *job;
    copy.num_remote_ctas = count_remote_ctas(num_sms);
    return launch_kernel(kernel_of(job->type), num_sms, BLOCK, memory_bytes(), stream, copy);
}
