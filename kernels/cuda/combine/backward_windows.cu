/* SPDX-License-Identifier: Apache-2.0 */
/* combine_backward for calls that only move rows: without weights, without gradients of
 * weights, and without quantization. In addition, d_rows of this rank must lie in a window
 * (memory into which peers store directly), and every token must have at most one slot on each
 * rank (top-1 or layout FLAT). If d_rows of all ranks lie in windows, each rank stores the rows
 * of d_out directly into their slots (net/windows.cuh). Otherwise rows go through staging, like
 * in backward.cu.
 *
 *   remote CTAs   the last CTAs of the grid. They store rows to peers
 *   local CTAs    the other CTAs. They copy rows to slots of this rank, and write padding
 *
 * If there is only one CTA, it is both a remote CTA and a local CTA. The kernel moves only rows
 * that are aligned to 16 bytes. net/windows.cuh lists which stores a rank must see before which
 * loads. */
#include "cuda/combine/backward_plain.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/dispatch/list_rows.cuh"

/* Copies the rows of d_out of this rank's tokens. A team is all remote CTAs or all local CTAs.
 * The remote team copies rows to peers, the local team to slots of this rank. Multiplies them
 * by 1, so that NaNs get the same bits as in backward.cu. Called by all threads of the CTAs of
 * a team. */
template <class ROW>
static __device__ __noinline__ void copy_gradients(const BackwardMove &m, const WindowState &w,
                                                   RowList<Dot<ROW>::BLOCK> &list,
                                                   const CopyTeam team)
{
    const p2p_self &self = m.job.self;
    const device_plan_layout at = device_plan_layout_of(self.num_ranks, self.max_tokens,
                                                        m.plan.header.num_experts, m.top_k);
    const int32_t *slot_of = (const int32_t *)(m.job.plan + at.fate);
    copy_items(
        w, team, list, m.job.num_tokens, Dot<ROW>::BLOCK / m.top_k, m.job.d_out, m.job.d_rows,
        m.shape, m.policy,
        [&](int64_t begin, int64_t end) {
            list_rows(m, self, w, list, slot_of, m.job.num_rows, team.is_remote, (int32_t)begin,
                      (int32_t)end, [](int32_t, int, int, int) {});
        },
        [](const ListedRow &, uint4(&q)[PART_V]) {
#pragma unroll
            for (int v = 0; v < PART_V; v++) {
                float x[ROW::N];
                ROW::unpack_floats(q[v], x);
                q[v] = scale_vector<ROW>(1.0f, x);
            }
        });
}

/* Moves all rows of a direct combine_backward. Called by all threads of all CTAs. */
template <class ROW>
__device__ __forceinline__ void move_directly(const BackwardMove &m, const WindowState &w,
                                              RowList<Dot<ROW>::BLOCK> &list)
{
    constexpr int V = Dot<ROW>::V;
    const int local =
        copy_as_teams(m.job.self, m.op, m.job.num_remote_ctas,
                      [&](const CopyTeam &team) { copy_gradients<ROW>(m, w, list, team); });
    if (!local) return;
    for_each_padding_piece(
        m.plan, m.plan.header.owned, m.shape.pieces,
        (int)threadIdx.x / WARP * local + (int)blockIdx.x, Dot<ROW>::BLOCK / WARP * local,
        [&](int32_t slot, int piece) { pad_piece<V, false, false>(m, slot, piece); });
}

template <class ROW>
__global__ void __launch_bounds__(Dot<ROW>::BLOCK, 1)
    combine_backward_windows_kernel(const __grid_constant__ p2p_combine_backward_job job)
{
    wait_for_previous_kernel();
    constexpr int V = Dot<ROW>::V;
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Stride stride;
    __shared__ WindowState windows;
    __shared__ RowList<Dot<ROW>::BLOCK> list;
    const p2p_self &self = job.self;
    const RowShape shape = row_shape<V>(job.row_bytes, true);
    if (threadIdx.x == 0) {
        windows.is_direct = 0;
        stride.set_strides(job.total_warps, num_roles(self),
                           (shape.pieces + job.span - 1) / job.span);
    }
    /* While the first warp reads the plan, the second warp permits all peers to store into this
     * rank's window. */
    if (is_last_cta() && threadIdx.x / WARP == 1)
        permit_stores(self, job.d_rows_place, job.num_rows, 0);
    read_plan(plan, job.plan, job.plan_bytes, self, job.num_tokens);
    choose_padding(plan, job);
    const device_plan_header &h = plan.header;
    if (!begin_operation(op, self, (uint32_t)h.id, job.num_tokens, 0, job.num_rows)) return;
    const bool moves = plan.is_valid && h.result == EPIC_OK;
    BackwardMove m = {job, op, plan, stride, shape, policy_once(), 0, (int)h.top_k};
    bool ok = true;
    if (moves) {
        if (threadIdx.x < WARP)
            ok = read_permits(self, op, windows, job.windows, job.row_bytes, true);
        ok = __syncthreads_and(ok) != 0;
        if (ok && windows.is_direct)
            move_directly<ROW>(m, windows, list);
        else if (ok)
            ok = move_plain<ROW, false>(m, op);
        if (ok && !windows.is_direct) pad_all<V, false>(m);
    }
    if (moves && ok && job.zero_tail)
        zero_slots<false>(m, h.slots_of[self.rank], grid_thread(), grid_threads());
    if (ok && windows.is_direct && blockIdx.x == 0 && threadIdx.x < WARP) wait_stores(self, op);
    if (!finish_operation(op)) return;
    if (threadIdx.x == 0) reset_window_counters(self, op);
    if (ok && !(moves && check_rows(self, op, &h, threadIdx.x == 0)))
        zero_slots<false>(m, 0, threadIdx.x, blockDim.x);
}

typedef void (*Kernel)(p2p_combine_backward_job);

extern "C" cudaError_t p2p_launch_backward_windows(const p2p_combine_backward_job *job,
                                                   int num_sms, cudaStream_t stream)
{
    const bool is_f32 = job->type == EPIC_F32;
    const int block = is_f32 ? Dot<F32>::BLOCK : Dot<Bf16>::BLOCK;
    const Kernel kernel = job->type == EPIC_BF16  ? combine_backward_windows_kernel<Bf16>
                          : job->type == EPIC_F16 ? combine_backward_windows_kernel<F16>
                                                  : combine_backward_windows_kernel<F32>;
    p2p_combine_backward_job copy = *job;
    copy.num_remote_ctas = count_remote_ctas(num_sms);
    deal_units(copy, num_sms, block, num_roles(job->self), is_f32 ? Dot<F32>::V : Dot<Bf16>::V);
    /* The lag is above 0. So each rank sends its row of token t before it waits for rows of
     * token t from other ranks. */
    copy.lag = 32 + 16 * copy.span;
    return launch_kernel(kernel, num_sms, block, 0, stream, copy);
}
