/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch of few tokens (lowlat/dispatch.cuh), of plain rows; and plan alone.
 *   tokens  [num_tokens, row_bytes]   aligned vectors; a piece has V * 16 bytes a lane
 *   recv    [recv_rows, row_bytes]    every slot of the plan, padding as zeros */
#include "cuda/lowlat/dispatch.cuh"
#include "cuda/plan/keep.cuh"

/* hosts: one warp has stored a piece of a token for those peers; the one with the last piece ships all. */
__device__ __forceinline__ void ship_rows(const Few &m, int32_t token, uint32_t peers)
{
#ifdef EPIC_HOSTS
    const p2p_self &self = m.job.plan.self;
    for (peers &= ~self.near; peers; peers &= peers - 1) {
        const int q = __ffs(peers) - 1;
        ship_when_whole(self, m.now, q, token, m.shape.pieces,
                        staged_in(m.now.outbox[q], token, m.shape.vectors),
                        (uint32_t)m.shape.vectors * 16);
    }
#endif
}

template <bool WHOLE> struct PlainRows {
    static constexpr bool EXACT = WHOLE;

    static __device__ __forceinline__ RowShape shape_of(const p2p_dispatch_job &job)
    {
        return row_shape<V>(job.row_bytes, EXACT || job.aligned);
    }
    static __device__ __forceinline__ void describe(Few &)
    {
    }
    static __device__ __forceinline__ int own_pieces(const Few &m)
    {
        return m.shape.pieces;
    }
    static __device__ __forceinline__ void load(const Few &m, int32_t token, int piece,
                                                uint4 (&q)[V])
    {
        load_piece_again<V, EXACT>(m.job.tokens + row_offset(token, m.shape), piece * V * WARP,
                                   m.shape, q);
    }
    static __device__ __forceinline__ void send(const Few &m, int32_t token, int piece,
                                                uint32_t peers, uint4 (&q)[V])
    {
        ::send<EXACT>(m, token, piece, peers, q);
        ship_rows(m, token, peers);
    }
    static __device__ __forceinline__ bool take(const Few &m, int rank, int source,
                                                int32_t token, int piece, uint4 (&q)[V])
    {
        return ::take<EXACT>(m, rank, source, token, piece, true, q);
    }
    static __device__ __forceinline__ void fill(const Few &m, bool, int32_t, int piece,
                                                int32_t slot, const uint4 (&q)[V])
    {
        fill_slots<EXACT>(m, piece * V * WARP, slot, q);
    }
    static __device__ __forceinline__ void pad(const Few &m, int32_t slot, int piece)
    {
        pad_piece<EXACT>(m, slot, piece);
    }
    /* Zeros in rows [first, ...). */
    static __device__ __forceinline__ void clear(const Few &m, int64_t first, int64_t thread,
                                                 int64_t threads)
    {
        const int64_t end = m.job.recv_rows;
        if (first >= end) return;
        zero_rows(m.job.recv, m.shape.row_bytes, first, end, thread, threads);
        zero_floats(m.job.slot_weights, first, end, thread, threads);
    }
};

typedef void (*Kernel)(p2p_dispatch_job);

static const Kernel ragged[] = {few_dispatch_kernel<PlainRows<false>, false>,
                                few_dispatch_kernel<PlainRows<false>, true>};
static const Kernel whole[] = {few_dispatch_kernel<PlainRows<true>, false>,
                               few_dispatch_kernel<PlainRows<true>, true>};

extern "C" cudaError_t p2p_load_few_dispatch(void)
{
    const cudaError_t error = load_few(ragged);
    return error == cudaSuccess ? load_few(whole) : error;
}

extern "C" cudaError_t p2p_launch_few_dispatch(const p2p_dispatch_job *job, int num_sms,
                                               cudaStream_t stream)
{
    const bool exact = job->aligned && job->row_bytes % (V * 512) == 0;
    return launch_few(exact ? whole : ragged, *job, num_sms, stream);
}

/* All warps of a crew that has made the plan: it is written. */
static __device__ void keep_few(FewPlan &tables, const p2p_plan_job &job, const Now &now,
                                const Crew &crew)
{
    const uint32_t result = judge(tables, job, false).result;
    const int ranks = job.self.num_ranks;
    if (is_speaker()) return write_few(tables, job, now, crew, result);
    for (int u = crew.worker(); u < ranks * tables.most; u += crew.workers()) {
        const int rank = u % ranks, token = u / ranks;
        if (token >= tables.tokens[rank]) continue;
        const int32_t slot = tables.slot_here(job, rank, token, lane_id());
        tables.keep_token(job, rank, token, slot, __ballot_sync(ALL_LANES, slot >= 0), result);
    }
}

/* The same with ranks that have more tokens: records come. */
static __device__ __noinline__ void
keep_with_many(const FewPlan &tables, const p2p_plan_job &job, const Now &now, const Crew &crew)
{
    int32_t *records = (int32_t *)(job.plan + job.at.records);
    if (is_speaker()) return;
    each_group(job, tables.tokens[lane_id()], crew.worker(), crew.workers(),
               [&](int source, int32_t first, int32_t tokens) {
                   return keep_records(now, job, records, source, first, tokens);
               });
}

/* plan alone: as with dispatch, and nothing moves. */
__global__ void __launch_bounds__(FEW_BLOCK, 1)
    few_plan_kernel(const __grid_constant__ p2p_plan_job job)
{
    __shared__ Now now;
    __shared__ FewPlan tables;
    const p2p_self &self = job.self;
    const Crew all = {0, (int)gridDim.x - (gridDim.x > 1)};
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    touch(job);
    if (self.operation == EPIC_OP_NONE) return;
    if (!HOSTS && is_announcer(true)) fence_system();
    const Opening opening = read_opening(self);
    if (HOSTS && is_announcer(true)) fence_system();
    IdTeller ids(job, all, true);
    bool may = true;
    if (is_speaker()) {
        ids.make();
        open_few(now, self, opening, job.num_tokens, job.capacity, 0);
        may = may_ship(now, opening);
        if (opening.broken == 0 && may) {
            ids.tell(now);
            announce_sizes(self, now, job.num_tokens, job.capacity, 0);
        }
        find_few_boxes(now, self);
    }
    if (threadIdx.x == 0) now.signature = self.signature;
    open_tables(tables, job, memory);
    if (!__syncthreads_and(opening.broken == 0 && may)) {
        if (threadIdx.x == 0) tell_end(now);
        return;
    }
    count_begun(self, now);
    if (is_announcer(true)) announce_begun(self, now);
    if (is_speaker()) {
        if (blockIdx.x == 0) begin_header(tables, job, now);
    }
    const FewPlanning made = all.has_me() ? make_few(tables, job, now) : FEW_BROKEN;
    if (made == FEW_MADE) keep_few(tables, job, now, all);
    if (made == FEW_MADE || !all.has_me()) count_shipped(self);
    if (HOSTS && !all.has_me()) (void)port(job, now);
    if (made == FEW_MANY && make_with_many(tables, job, now, memory))
        keep_with_many(tables, job, now, all);
    if (is_speaker() && is_last_cta()) finish_few(self, now, opening, true);
    end_few(now);
}

extern "C" cudaError_t p2p_load_few_plan(void)
{
    return cudaFuncSetAttribute(few_plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                FEW_PLAN_MOST_BYTES);
}

extern "C" cudaError_t p2p_launch_few_plan(const p2p_plan_job *job, int num_sms,
                                           cudaStream_t stream)
{
    return enqueue(few_plan_kernel, num_sms, FEW_BLOCK, few_plan_bytes(*job), stream, *job);
}
