/* SPDX-License-Identifier: Apache-2.0 */
/* Implements dispatch of rows without scales, if the receive buffer of this rank lies in a
 * window (memory into which peers can store). If the receive buffers of all ranks lie in
 * windows, rows are stored directly into their slots (windows.cuh). Otherwise all rows go
 * through staging, like in dispatch.cu.
 *
 *   tokens  [num_tokens, row_bytes]   input: rows of this rank's tokens
 *   recv    [recv_rows, row_bytes]    output, in a window of this rank: rows by slot
 *
 *   warp 1 of the last CTA  sends the permit of this rank to all peers: a message that allows
 *                           them to store rows into its window
 *   planner CTAs            make the plan, then increment num_planned
 *   other CTAs              send the first `num_early_tokens` tokens through staging meanwhile
 *   all CTAs                wait for the plan and for the permits of all peers. If all permits
 *                           have arrived, remote CTAs store rows to peers and local CTAs do the
 *                           rest (windows.cuh). Otherwise all CTAs move all rows through
 *                           staging
 *   warp 0 of CTA 0         after a direct dispatch, waits until all peers have stored rows
 *   CTA that finishes last  sets the counters to 0; after an error, clears the outputs
 *
 * Memory order. For each kind of data: what the writer does after it has stored the data, and
 * what a reader does before it loads the data:
 *
 *   data                          writer, afterwards            reader, before
 *   permit                        fence, store the signature    poll the permit, fence
 *   arrays of the plan            barrier, fence, increment     load-acquire num_planned,
 *                                 num_planned                   barrier
 *   rows in a window of a peer    barrier, fence, increment     poll `stored`, fence
 *                                 num_stored; fence, store
 *                                 `stored` to the peer
 *   weights, records, early rows  nothing                       poll each word itself
 *
 * net/windows.cuh explains the lines about permits and rows.
 *
 * The kernel moves only rows that are aligned to 16 bytes, of layers with one choice per token
 * (top-1) or with layout FLAT. */
#include "cuda/dispatch/windows.cuh"

/* Moves all rows through staging. Called by all threads of all CTAs. The function is not
 * inlined, because the kernel would otherwise spill registers. Returns false if the group has
 * failed. */
template <bool EXACT, bool FLAT>
static __device__ __noinline__ bool move_staged(WindowMove m, OpState &op,
                                                const uint8_t *memory)
{
    const uint8_t *ring = memory + threadIdx.x / WARP * PieceRing<V, EXACT>::BYTES;
    return move_rounds<EXACT, FLAT>(m, op, ring) && pad_all<EXACT>(m);
}

/* There is one instance of this kernel for each value of ROWS except ROWS_ANY, of WITH_PLAN
 * (the kernel makes the plan) and of FLAT (the layout). */
template <int ROWS, bool WITH_PLAN, bool FLAT>
__global__ void __launch_bounds__(BLOCK, 1)
    dispatch_windows_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    wait_for_previous_kernel();
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Planner planner;
    __shared__ Stride stride;
    __shared__ WindowState windows;
    const p2p_self &self = job.plan.self;
    constexpr bool EXACT = ROWS == ROWS_WHOLE;
    const RowShape shape = row_shape<V>(job.row_bytes, true);
    const int32_t num_early_tokens =
        WITH_PLAN && job.plan.planners < (int)gridDim.x ? job.num_early_tokens : 0;
    if (threadIdx.x == 0) {
        stride.set_strides(job.total_warps, num_roles(self),
                           (shape.pieces + job.span - 1) / job.span);
        windows.is_direct = 0;
    }
    /* The second warp sends the permit of this rank while the first warp reads the plan. */
    if (is_last_cta() && threadIdx.x / WARP == 1)
        permit_stores(self, job.recv_place, job.recv_rows, num_early_tokens);
    open_plan<WITH_PLAN>(plan, job);
    if (!begin_operation(op, self, WITH_PLAN ? 0 : (uint32_t)plan.header.id, job.num_tokens,
                         WITH_PLAN ? read_capacity(job.plan) : 0, job.recv_rows))
        return;
    bool ok = make_own_plan<WITH_PLAN, FLAT>(planner, job, op, memory);
    if (WITH_PLAN && (int)blockIdx.x < job.plan.planners && threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&window_area(self, op.heap)->num_planned, 1u);
    }
    WindowMove m = {{{job, op, plan, stride, shape, policy_once(), 0, (int)plan.header.top_k}},
                    windows,
                    (const int32_t *)(job.plan.plan + job.plan.at.fate)};
    m.has_new_plan = WITH_PLAN;
    m.num_early_tokens = num_early_tokens;
    m.tokens_of =
        !WITH_PLAN && lane_id() < self.num_ranks ? plan.header.tokens_of[lane_id()] : 0;
    m.most_tokens = WITH_PLAN ? (int32_t)self.max_tokens : plan.most_tokens;
    if (ok && (WITH_PLAN || plan.header.result == EPIC_OK)) {
        if (num_early_tokens) send_early_tokens<EXACT>(m);
        ok = open_windows(m);
        if (ok && windows.is_direct)
            ok = move_directly<EXACT, FLAT>(m, memory);
        else if (ok)
            ok = move_staged<EXACT, FLAT>(m, op, memory);
    }
    if (ok && job.zero_tail && plan.is_valid) ok = clear_tail<FLAT>(m);
    if (ok && windows.is_direct && blockIdx.x == 0 && threadIdx.x < WARP) wait_stores(self, op);
    if (!finish_operation(op)) return;
    if (threadIdx.x == 0) reset_window_counters(self, op);
    if (ok) clear_outputs<FLAT>(m);
}

static const Kernel kernels[] = {dispatch_windows_kernel<ROWS_ALIGNED, false, false>,
                                 dispatch_windows_kernel<ROWS_ALIGNED, true, false>,
                                 dispatch_windows_kernel<ROWS_WHOLE, false, false>,
                                 dispatch_windows_kernel<ROWS_WHOLE, true, false>,
                                 dispatch_windows_kernel<ROWS_ALIGNED, false, true>,
                                 dispatch_windows_kernel<ROWS_ALIGNED, true, true>,
                                 dispatch_windows_kernel<ROWS_WHOLE, false, true>,
                                 dispatch_windows_kernel<ROWS_WHOLE, true, true>};

extern "C" cudaError_t p2p_load_dispatch_windows(void)
{
    return load_kernels(kernels, memory_bytes(planner_most_bytes()));
}

extern "C" cudaError_t p2p_launch_dispatch_windows(const p2p_dispatch_job *job, int num_sms,
                                                   cudaStream_t stream)
{
    const bool whole = job->row_bytes % (V * 512) == 0;
    p2p_dispatch_job copy = deal_dispatch(*job, job->row_bytes, num_sms);
    copy.num_remote_ctas = count_remote_ctas(num_sms);
    const Kernel kernel = kernels[(job->flat != 0) * 4 + whole * 2 + (copy.plan.planners > 0)];
    return launch_dispatch(kernel, copy, num_sms, stream);
}
