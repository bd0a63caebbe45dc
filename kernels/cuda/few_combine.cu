/* SPDX-License-Identifier: Apache-2.0 */
/* combine and dispatch_backward of few tokens (few.cuh): the units of combine_plain.cuh in another
 * order.  A warp first sends its partials for the peers' tokens, of all of them, then adds those of
 * this rank's tokens: nothing that is sent waits for anything. */
#include "cuda/combine_plain.cuh"
#include "cuda/few.cuh"
#include "cuda/launch.cuh"

static constexpr int FEW_V = 2; /* vectors a lane and piece */

struct Units { /* of a warp: the peers' tokens, then this rank's */
    const Combine &c;
    int peers, ours, end;

    __device__ __forceinline__ explicit Units(const Combine &combine)
        : c(combine), peers(c.plan.most_tokens * (c.job.seat.num_ranks - 1) * c.shape.pieces)
    {
        end = peers + c.job.num_tokens * c.shape.pieces;
    }
    __device__ __forceinline__ bool sends(int u) const
    {
        return u < peers;
    }
    __device__ __forceinline__ Unit place(int u) const
    {
        const int senders = c.job.seat.num_ranks - 1, n = sends(u) ? u : u - peers;
        const int row = n / c.shape.pieces;
        return {sends(u) ? row / senders : row, sends(u) ? row % senders : 0,
                n % c.shape.pieces, -1, -1};
    }
    __device__ __forceinline__ Unit read(int u) const
    {
        if (u >= end) return {};
        Unit unit = place(u);
        unit.slot =
            read_slot(c, sends(u) ? peer_of(c, unit.role) : c.job.seat.rank, unit.token, 0);
        if (!sends(u)) unit.ranks = rank_of(c, unit.token, 0);
        return unit;
    }
};

template <class ROW> __device__ __forceinline__ bool combine_few(const Combine &c)
{
    const Units units(c);
    int u = few_worker();
    Unit next = units.read(u);
    for (; u < units.end; u += few_workers()) {
        Unit now = next;
        next = units.read(u + few_workers());
        now.slot = within(c, now.slot);
        if (units.sends(u))
            expert_unit<ROW, ROW, FEW_V, false>(c, now);
        else if (!source_unit<ROW, ROW, FEW_V, false>(c, now))
            return false;
    }
    return true;
}

/* All threads: zeros, when nothing was moved. */
static __device__ void clear(const Combine &c, int64_t thread, int64_t threads)
{
    zero_rows(c.job.out, c.job.row_bytes, 0, c.job.num_tokens, thread, threads);
    if (c.plan.good)
        zero_floats(c.job.choice_floats, 0, (int64_t)c.job.num_tokens * c.top_k, thread,
                    threads);
}

template <class ROW>
__global__ void __launch_bounds__(FEW_BLOCK, 1)
    few_combine_kernel(const __grid_constant__ p2p_combine_job job)
{
    __shared__ Now now;
    __shared__ Plan plan;
    __shared__ Stride unused;
    __shared__ bool enough; /* rows everywhere, as far as is known */
    const p2p_seat &seat = job.seat;
    if (seat.operation == EPIC_OP_NONE) return;
    const bool whole = is_whole(seat), last = blockIdx.x == gridDim.x - 1;
    if (is_speaker()) open_few(now, seat, job.num_tokens, 0, job.num_rows);
    read_plan(plan, job.plan, job.plan_bytes, seat, job.num_tokens);
    const device_plan_header &h = plan.header;
    if (is_speaker() && lane_id() == 0) now.signature ^= (uint32_t)h.id & 0x0fffffffu;
    if (!__syncthreads_and(whole)) {
        if (threadIdx.x == 0) tell_end(now);
        return;
    }
    count_begun(now);

    const bool moves = plan.good && h.result == EPIC_OK;
    const Combine c = {job,
                       now,
                       plan,
                       unused,
                       unused,
                       NULL,
                       row_shape<FEW_V>(job.row_bytes, job.aligned),
                       policy_once(),
                       0,
                       (int)h.top_k};
    bool ok = true;
    if (is_speaker()) {
        if (last) announce(now);
        const bool good = !moves || hear_rows(now, h);
        if (lane_id() == 0) enough = good;
        if (last) finish_few(now);
    } else if (moves) {
        ok = combine_few<ROW>(c);
    }
    if (!moves) clear(c, grid_thread(), grid_threads());
    end_few(now);
    if (!enough && is_last_of_short(now, h)) clear(c, threadIdx.x, FEW_BLOCK);
}

typedef void (*Kernel)(p2p_combine_job);

static Kernel kernel_of(uint32_t type)
{
    if (type == EPIC_BF16) return few_combine_kernel<Bf16>;
    return type == EPIC_F16 ? few_combine_kernel<F16> : few_combine_kernel<F32>;
}

extern "C" cudaError_t p2p_load_few_combine(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;
    for (uint32_t type = EPIC_F32; type <= EPIC_F16 && error == cudaSuccess; type++)
        error = cudaFuncGetAttributes(&attributes, (const void *)kernel_of(type));
    return error;
}

extern "C" cudaError_t p2p_launch_few_combine(const p2p_combine_job *job, int num_sms,
                                              cudaStream_t stream)
{
    return enqueue(kernel_of(job->type), num_sms, FEW_BLOCK, 0, stream, *job);
}
