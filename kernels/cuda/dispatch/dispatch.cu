/* SPDX-License-Identifier: Apache-2.0 */
/* Implements dispatch of rows without scales: moves rows of tokens to the slots of their
 * experts. The kernel reads a plan, or makes the plan first.
 *
 *   tokens  [num_tokens, row_bytes]   input: rows of this rank's tokens
 *   recv    [recv_rows, row_bytes]    output: one slot per choice of an expert of this rank,
 *                                     and padding slots, which become zeros
 *
 * A row is sent once to each peer that owns one of its experts. The sender stores the row to
 * the peer's staging. The peer copies it from staging to all slots that the row has on the
 * peer. Staging contains poison (0xffffffff) in all words that have not arrived.
 *
 *   planner CTAs       first make the plan, then move units like the other CTAs
 *   other CTAs         first send the first `num_early_tokens` tokens, while the plan is made
 *   all warps          then move units. If there are W warps, each warp gets every W-th unit of
 *                      a list (common/rows.cuh)
 *
 * A unit is the work that a warp does at a time: it sends or receives a span (some pieces of 2
 * KB) of one row. The units form a list, which is divided into steps. job.lag is the number of
 * tokens that are sent before the first token is received. Step i has these units:
 *
 *   send     token i, to every peer that needs it. To send a token, a warp needs only the
 *            token's choices (its top_k experts), not the plan
 *   receive  token i - lag of each source. The last source is this rank itself, whose tokens
 *            are read from `tokens`
 *
 *     a unit that sends token i             a unit that receives token t of source q
 *
 *     tokens[i] -> ring -> registers        staging[q] -> ring -> registers, then poison again
 *                            |                                      |
 *        staging of peer a <-+                    recv[slot of k] <-+
 *        staging of peer b <-+                   recv[slot of k'] <-+
 *
 * Memory order: every 4-byte word of a row is its own flag (net/staging.cuh), so stores need no
 * order. A receiving warp first reads the token's slots, from the plan or from the record that
 * the token's rank sends. Then it polls the row.
 *
 * Ranks cannot wait for each other in a circle. A warp waits for token t only after it has sent
 * its share of all tokens up to t. Let t be the lowest token for which any warp of any rank
 * waits. A warp that has not yet sent its share of token t waits for nothing, so it sends this
 * share, and the wait ends. This argument holds even if ranks have different lags. If this
 * kernel makes the plan, a rank first sends `num_early_tokens` tokens without receiving any,
 * and later receives faster than it sends.
 *
 * A warp copies pieces into a ring buffer in shared memory some units before it uses them. So a
 * piece in staging may be copied before it has arrived. In this case the copy contains poison,
 * and the warp polls the piece in staging. */
#include "cuda/dispatch/stream.cuh"

/* There is one instance of this kernel for each value of ROWS (stream.cuh), WITH_PLAN (the
 * kernel makes the plan) and FLAT (the layout). A single kernel for all values would need more
 * registers than a thread can have. */
template <int ROWS, bool WITH_PLAN, bool FLAT>
__global__ void __launch_bounds__(BLOCK, 1)
    dispatch_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    wait_for_previous_kernel();
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Planner planner;
    __shared__ Stride stride;
    const p2p_self &self = job.plan.self;
    constexpr bool has_new_plan = WITH_PLAN, EXACT = ROWS == ROWS_WHOLE;
    const RowShape shape = row_shape<V>(job.row_bytes, ROWS != ROWS_ANY);
    if (threadIdx.x == 0)
        stride.set_strides(job.total_warps, num_unit_roles(self),
                           (shape.pieces + job.span - 1) / job.span);
    open_plan<WITH_PLAN>(plan, job);
    if (!begin_operation(op, self, has_new_plan ? 0 : (uint32_t)plan.header.id, job.num_tokens,
                         WITH_PLAN ? read_capacity(job.plan) : 0, job.recv_rows))
        return;
    bool ok = make_own_plan<WITH_PLAN, FLAT>(planner, job, op, memory);
    DispatchMove m = {{job, op, plan, stride, shape, policy_once(), 0, (int)plan.header.top_k}};
    m.has_new_plan = has_new_plan;
    if (HOSTS) *m.num_forward_roles = num_forward_roles(self);
    m.num_early_tokens =
        has_new_plan && job.plan.planners < (int)gridDim.x ? job.num_early_tokens : 0;
    read_plan_tokens<WITH_PLAN>(m.tokens_of, plan, self);
    m.most_tokens = has_new_plan ? (int32_t)self.max_tokens : plan.most_tokens;
    if (ok && (has_new_plan || plan.header.result == EPIC_OK))
        ok = move_rounds<EXACT, FLAT>(
                 m, op, memory + threadIdx.x / WARP * PieceRing<V, EXACT>::BYTES) &&
             pad_all<EXACT>(m);
    if (ok && job.zero_tail && plan.is_valid) ok = clear_tail<FLAT>(m);
    if (finish_operation(op) && ok) clear_outputs<FLAT>(m);
}

static const Kernel kernels[] = {
    dispatch_kernel<ROWS_ANY, false, false>,     dispatch_kernel<ROWS_ANY, true, false>,
    dispatch_kernel<ROWS_ALIGNED, false, false>, dispatch_kernel<ROWS_ALIGNED, true, false>,
    dispatch_kernel<ROWS_WHOLE, false, false>,   dispatch_kernel<ROWS_WHOLE, true, false>,
    dispatch_kernel<ROWS_ANY, false, true>,      dispatch_kernel<ROWS_ANY, true, true>,
    dispatch_kernel<ROWS_ALIGNED, false, true>,  dispatch_kernel<ROWS_ALIGNED, true, true>,
    dispatch_kernel<ROWS_WHOLE, false, true>,    dispatch_kernel<ROWS_WHOLE, true, true>};

extern "C" cudaError_t p2p_load_dispatch(void)
{
    return load_kernels(kernels, memory_bytes(planner_most_bytes()));
}

extern "C" cudaError_t p2p_launch_dispatch(const p2p_dispatch_job *job, int num_sms,
                                           cudaStream_t stream)
{
    const int rows = !job->aligned                ? ROWS_ANY
                     : job->row_bytes % (V * 512) ? ROWS_ALIGNED
                                                  : ROWS_WHOLE;
    const p2p_dispatch_job copy = deal_dispatch(*job, job->row_bytes, num_sms);
    const Kernel kernel = kernels[(job->flat != 0) * 6 + rows * 2 + (copy.plan.planners > 0)];
    return launch_dispatch(kernel, copy, num_sms, stream);
}
