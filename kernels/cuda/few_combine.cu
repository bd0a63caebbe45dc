/* SPDX-License-Identifier: Apache-2.0 */
/* combine and dispatch_backward of few tokens (few.cuh): the units of combine_plain.cuh in another
 * order.  A warp first sends its partials for the peers' tokens, of all of them, then adds those of
 * this rank's tokens: nothing that is sent waits for anything. */
#include "cuda/combine_plain.cuh"
#include "cuda/few.cuh"
#include "cuda/launch.cuh"

static constexpr int FEW_V = 2; /* vectors a lane and piece */

/* What a warp does: units of the peers' tokens, then of this rank's.  The first warps begin with
 * those, the last ones with these. */
struct Units {
    const Combine &c;
    const Crew crew;

    __device__ __forceinline__ explicit Units(const Combine &combine)
        : c(combine), crew{0, (int)gridDim.x}
    {
    }
    __device__ __forceinline__ Unit place(int u, bool own) const
    {
        const int senders = c.job.self.num_ranks - 1, row = u / c.shape.pieces;
        if (own) return {row, 0, u % c.shape.pieces, -1, -1};
        return {row / senders, row % senders, u % c.shape.pieces, -1, -1};
    }
    __device__ __forceinline__ int first(bool own) const
    {
        return own ? crew.workers() - 1 - crew.worker() : crew.worker();
    }
    __device__ __forceinline__ Unit read(int u, bool own, int end) const
    {
        if (u >= end) return {};
        Unit unit = place(u, own);
        unit.slot = read_slot(c, own ? c.job.self.rank : peer_of(c, unit.role), unit.token, 0);
        if (own) unit.ranks = rank_of(c, unit.token, 0);
        return unit;
    }
    /* The first unit, from where its plan's arrays are if they are like the last plan's. */
    __device__ __forceinline__ Unit guess(bool own) const
    {
        const p2p_combine_job &job = c.job;
        if (!job.likely_experts || (!own && job.self.num_ranks == 1)) return {};
        Unit unit = place(first(own), own);
        const int rank = own ? job.self.rank : peer_of(c, unit.role);
        if (unit.token >= job.self.max_tokens || lane_id() >= job.top_k) return unit;
        unit.slot = __ldg((const int32_t *)(job.plan + job.likely_records) +
                          record_at(job.self, rank, unit.token, job.top_k) + lane_id());
        if (own)
            unit.ranks = __ldg((const int32_t *)(job.plan + job.likely_rank_of) +
                               (int64_t)unit.token * job.top_k + lane_id());
        return unit;
    }
    __device__ __forceinline__ bool guessed() const
    {
        const device_plan_header &h = c.plan.header;
        return c.job.likely_experts == (int32_t)h.num_experts && c.job.top_k == (int)h.top_k;
    }
    /* All of a kind. */
    template <class Do>
    __device__ __forceinline__ bool each(bool own, Unit guess, Do work) const
    {
        const int end = own ? c.job.num_tokens * c.shape.pieces
                            : c.plan.most_tokens * (c.job.self.num_ranks - 1) * c.shape.pieces;
        int u = first(own);
        Unit next = guessed() ? guess : read(u, own, end);
        for (; u < end; u += crew.workers()) {
            Unit now = next;
            next = read(u + crew.workers(), own, end);
            const int rank = own ? c.job.self.rank : peer_of(c, now.role);
            if (now.token >= c.plan.header.tokens_of[rank]) continue;
            now.slot = within(c, now.slot);
            if (!work(now)) return false;
        }
        return true;
    }
};

template <class ROW>
__device__ __forceinline__ bool combine_few(const Units &units, Unit sent, Unit own)
{
    const Combine &c = units.c;
    return units.each(false, sent, [&](const Unit &u) {
        expert_unit<ROW, ROW, FEW_V, false>(c, u);
        return true;
    }) && units.each(true, own, [&](const Unit &u) {
        return source_unit<ROW, ROW, FEW_V, false>(c, u);
    });
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
    const p2p_self &self = job.self;
    if (self.operation == EPIC_OP_NONE) return;
    const bool whole = is_whole(self), last = blockIdx.x == gridDim.x - 1;
    Combine c = {job,
                 now,
                 plan,
                 unused,
                 unused,
                 NULL,
                 row_shape<FEW_V>(job.row_bytes, job.aligned),
                 policy_once(),
                 0,
                 0};
    const Units units(c);
    Unit sent = {}, own = {};
    if (is_speaker()) {
        open_few(now, self, job.num_tokens, 0, job.num_rows);
    } else {
        sent = units.guess(false);
        own = units.guess(true);
    }
    read_plan(plan, job.plan, job.plan_bytes, self, job.num_tokens);
    const device_plan_header &h = plan.header;
    if (is_speaker() && lane_id() == 0) now.signature ^= (uint32_t)h.id & 0x0fffffffu;
    if (!__syncthreads_and(whole)) {
        if (threadIdx.x == 0) tell_end(now);
        return;
    }
    count_begun(now);

    const bool moves = plan.good && h.result == EPIC_OK;
    c.top_k = (int)h.top_k;
    bool ok = true;
    if (is_speaker()) {
        if (last) announce(now);
        const bool good = !moves || hear_rows(now, h);
        if (lane_id() == 0) enough = good;
        if (last) finish_few(now);
    } else if (moves) {
        ok = combine_few<ROW>(units, sent, own);
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
