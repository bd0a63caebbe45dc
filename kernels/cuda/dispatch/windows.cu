/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch of rows without scales, in contexts that have windows. Like dispatch.cu, but rows
 * are stored into the windows of peers where that is possible. windows.cuh describes which rows
 * these are, and why every row is seen.
 *
 *   planner CTAs    make the plan, then count themselves in num_planned
 *   other CTAs      send the first `num_early_tokens` tokens through staging meanwhile
 *   all CTAs        wait for the plan and for the announcements of all ranks, then move units
 *
 *     a unit that sends token i             a unit that receives token t of source q
 *
 *     tokens[i] -> ring -> registers        if the row is stored directly: nothing. Otherwise
 *                            |              like in dispatch.cu
 *     recv[slot] of peer a <-+
 *     staging of peer b    <-+
 *
 * The kernel moves only rows that are aligned to 16 bytes. */
#include "cuda/dispatch/windows.cuh"

/* The kernel. There is one instance for each value of ROWS except ROWS_ANY, with and without
 * making the plan (WITH_PLAN), and for each layout of the receive buffer (FLAT). */
template <int ROWS, bool WITH_PLAN, bool FLAT>
__global__ void __launch_bounds__(BLOCK, 1)
    dispatch_windows_kernel(const __grid_constant__ p2p_dispatch_job job)
{
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
        windows.targets = windows.sources = windows.stores = windows.is_open = 0;
    }
    open_plan<WITH_PLAN>(plan, job);
    if (is_last_cta() && threadIdx.x < WARP)
        announce_windows(self, num_early_tokens, job.recv_place);
    if (!begin_operation(op, self, WITH_PLAN ? 0 : (uint32_t)plan.header.id, job.num_tokens,
                         WITH_PLAN ? read_capacity(job.plan) : 0, job.recv_rows))
        return;
    bool ok = make_own_plan<WITH_PLAN, FLAT>(planner, job, op, memory);
    if (WITH_PLAN && (int)blockIdx.x < job.plan.planners && threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&window_area(self, op.heap)->num_planned, 1u);
    }
    const int32_t *slot_of = (const int32_t *)(job.plan.plan + job.plan.at.fate);
    WindowMove m = {{{job, op, plan, stride, shape, policy_once(), 0, (int)plan.header.top_k}},
                    windows,
                    slot_of,
                    job.plan.layer.layout == EPIC_FLAT};
    m.has_new_plan = WITH_PLAN;
    m.num_early_tokens = num_early_tokens;
    m.tokens_of =
        !WITH_PLAN && lane_id() < self.num_ranks ? plan.header.tokens_of[lane_id()] : 0;
    m.most_tokens = WITH_PLAN ? (int32_t)self.max_tokens : plan.most_tokens;
    if (ok && (WITH_PLAN || plan.header.result == EPIC_OK))
        ok = move_rounds<EXACT, FLAT>(
                 m, op, memory + threadIdx.x / WARP * PieceRing<V, EXACT>::BYTES) &&
             pad_all<EXACT>(m);
    if (ok && job.zero_tail && plan.is_valid) ok = clear_tail<FLAT>(m);
    if (ok && windows.is_open) close_windows(m);
    if (finish_operation(op) && ok) clear_outputs<FLAT>(m);
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
    const p2p_dispatch_job copy = deal_dispatch(*job, job->row_bytes, num_sms);
    const Kernel kernel = kernels[(job->flat != 0) * 4 + whole * 2 + (copy.plan.planners > 0)];
    return launch_dispatch(kernel, copy, num_sms, stream);
}
