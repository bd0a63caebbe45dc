/* SPDX-License-Identifier: Apache-2.0 */
/* Two kernels for few tokens: dispatch of plain rows (rows without scales), and a kernel that
 * only makes a plan.
 *
 *   tokens  [num_tokens, row_bytes]   rows, which need not be aligned; a piece has V * 16 bytes
 *                                     per lane
 *   recv    [recv_rows, row_bytes]    one row for each slot of the plan
 *
 * The file lowlat/dispatch.cuh has the kernel of dispatch, and PlainRows below defines how this
 * kernel moves plain rows. lowlat_plan_kernel makes a plan in the same way as the kernel of
 * dispatch, but moves no rows. A CTA of lowlat_plan_kernel has one control warp, its last warp.
 * The other warps are workers:
 *
 *   control warps   send the expert ids, announce the operation, write the plan's header and
 *                   slabs, end the operation
 *   workers         receive the ids, compute the plan's tables, write the records
 *
 * lowlat/lowlat.cuh explains the memory order. */
#include "cuda/lowlat/dispatch.cuh"
#include "cuda/plan/store_records.cuh"

/* Only in backend `hosts`: sends a token's row to each rank in the bit mask `peers` that is on
 * another host, with one put (a copy by the net) per rank. Different warps may store the pieces
 * of the row to the outbox. A warp calls this function after each piece. Only the call after
 * the last missing piece posts the puts. */
__device__ __forceinline__ void post_put_rows(const LowlatMove &m, int32_t token,
                                              uint32_t peers)
{
    const p2p_self &self = m.job.plan.self;
    for (peers &= ~near_ranks(self); peers; peers &= peers - 1) {
        const int q = __ffs(peers) - 1;
        post_put_when_complete(self, m.op, q, token, m.shape.pieces,
                               staged_row(m.op.outbox[q], token, m.shape.vectors),
                               (uint32_t)m.shape.vectors * 16);
    }
}

/* The functions with which lowlat_dispatch_kernel() moves plain rows. WHOLE: rows are aligned,
 * and a row consists of whole pieces. PackedRows (lowlat/dispatch_packed.cu) has the same
 * functions for packed rows:
 *   shape_of            returns the shape of the rows that are sent
 *   describe_rows       sets the members of m that only packed rows need (PackedMove)
 *   own_pieces          returns the number of pieces of the row of a token of this rank
 *   load_piece          loads a piece of a token of this rank
 *   send_to_peers       stores the piece to the staging of each rank in `peers`
 *   receive_from_peer   waits for a piece of a peer's token; the caller has already loaded the
 *                       piece into q, where words that had not arrived are poison
 *   fill_slots_of       stores a piece to the token's slots (each lane passes one slot, or -1)
 *   pad_slot            writes zeros to a piece of a padding slot
 *   clear_rows          zeroes the rows and weights of all slots from `first` on; each of
 *                       `threads` threads calls it with its own index `thread` */
template <bool WHOLE> struct PlainRows {
    static constexpr bool EXACT = WHOLE;

    static __device__ __forceinline__ RowShape shape_of(const p2p_dispatch_job &job)
    {
        return row_shape<V>(job.row_bytes, EXACT || job.aligned);
    }
    static __device__ __forceinline__ void describe_rows(LowlatMove &)
    {
    }
    static __device__ __forceinline__ int own_pieces(const LowlatMove &m)
    {
        return m.shape.pieces;
    }
    static __device__ __forceinline__ void load_piece(const LowlatMove &m, int32_t token,
                                                      int piece, uint4 (&q)[V])
    {
        load_piece_again<V, EXACT>(m.job.tokens + row_offset(token, m.shape), piece * V * WARP,
                                   m.shape, q);
    }
    static __device__ __forceinline__ void
    send_to_peers(const LowlatMove &m, int32_t token, int piece, uint32_t peers, uint4 (&q)[V])
    {
        ::send_to_peers<EXACT>(m, token, piece, peers, q);
        post_put_rows(m, token, peers);
    }
    static __device__ __forceinline__ bool receive_from_peer(const LowlatMove &m, int rank,
                                                             int source, int32_t token,
                                                             int piece, uint4 (&q)[V])
    {
        return ::receive_row_piece<EXACT>(m, rank, source, token, piece, true, q);
    }
    static __device__ __forceinline__ void fill_slots_of(const LowlatMove &m, bool, int32_t,
                                                         int piece, int32_t slot,
                                                         const uint4 (&q)[V])
    {
        fill_slots<EXACT>(m, piece * V * WARP, slot, q);
    }
    static __device__ __forceinline__ void pad_slot(const LowlatMove &m, int32_t slot,
                                                    int piece)
    {
        pad_piece<EXACT>(m, slot, piece);
    }
    static __device__ __forceinline__ void clear_rows(const LowlatMove &m, int64_t first,
                                                      int64_t thread, int64_t threads)
    {
        const int64_t end = m.job.recv_rows;
        if (first >= end) return;
        zero_rows(m.job.recv, m.shape.row_bytes, first, end, thread, threads);
        zero_floats(m.job.slot_weights, first, end, thread, threads);
    }
};

typedef void (*Kernel)(p2p_dispatch_job);

static const Kernel ragged[] = {lowlat_dispatch_kernel<PlainRows<false>, false>,
                                lowlat_dispatch_kernel<PlainRows<false>, true>};
static const Kernel whole[] = {lowlat_dispatch_kernel<PlainRows<true>, false>,
                               lowlat_dispatch_kernel<PlainRows<true>, true>};

extern "C" cudaError_t p2p_load_lowlat_dispatch(void)
{
    const cudaError_t error = load_lowlat(ragged);
    return error == cudaSuccess ? load_lowlat(whole) : error;
}

extern "C" cudaError_t p2p_launch_lowlat_dispatch(const p2p_dispatch_job *job, int num_sms,
                                                  cudaStream_t stream)
{
    const bool exact = job->aligned && job->row_bytes % (V * 512) == 0;
    return launch_lowlat(exact ? whole : ragged, *job, num_sms, stream);
}

/* Copies the plan from the tables to the caller's memory. Control warps copy the header and the
 * tables of slabs (a slab is the slots of one expert). Workers copy the records (lists of a
 * token's slots). Called by all warps of the CTAs that made the plan. */
static __device__ void store_lowlat_plan(LowlatPlan &tables, const p2p_plan_job &job,
                                         const OpState &op, const CtaRange &planning_ctas)
{
    const uint32_t result = check_plan(tables, job, op, false).result;
    const int ranks = job.self.num_ranks;
    if (is_control_warp()) return write_lowlat_plan(tables, job, op, planning_ctas, result);
    for (int u = planning_ctas.worker_index(); u < ranks * tables.max_tokens;
         u += planning_ctas.num_workers()) {
        const int rank = u % ranks, token = u / ranks;
        if (token >= tables.tokens[rank]) continue;
        const int32_t slot = tables.slot_here(job, rank, token, lane_id());
        tables.store_token(job, rank, token, slot, __ballot_sync(ALL_LANES, slot >= 0), result);
    }
}

/* Only for mixed plans (lowlat/plan.cuh): receives the record (list of slots) of each token
 * that has slots on this rank, and copies the record to the plan. Called by all warps of the
 * CTAs that made the plan. */
static __device__ __noinline__ void store_mixed_records(const LowlatPlan &tables,
                                                        const p2p_plan_job &job,
                                                        const OpState &op,
                                                        const CtaRange &planning_ctas)
{
    int32_t *records = (int32_t *)(job.plan + job.at.records);
    if (is_control_warp()) return;
    for_each_token_group(job, tables.tokens[lane_id()], planning_ctas.worker_index(),
                         planning_ctas.num_workers(), 0, INT32_MAX,
                         [&](int source, int32_t first, int32_t tokens) {
                             return store_records(op, job, records, source, first, tokens);
                         });
}

/* The kernel of the operation "plan" for few tokens. Each planning CTA computes the whole plan.
 * If the grid has several CTAs, all CTAs except the last are planning CTAs. The last CTA
 * announces and ends the operation and, in backend `hosts`, polls the net inbox. */
__global__ void __launch_bounds__(LOWLAT_BLOCK, 1)
    lowlat_plan_kernel(const __grid_constant__ p2p_plan_job job)
{
    __shared__ OpState op;
    __shared__ LowlatPlan tables;
    const p2p_self &self = job.self;
    const CtaRange planning_ctas = {0, (int)gridDim.x - (gridDim.x > 1)};
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    prefetch_params(job);
    wait_for_previous_kernel();
    if (self.operation == EPIC_OP_NONE) return;
    if (!HOSTS && is_announcer(true)) fence_system();
    const StartState start = read_start_state(self);
    if (HOSTS && is_announcer(true)) fence_system();
    IdSender ids(job, planning_ctas, true);
    bool may_send = true;
    if (is_control_warp()) {
        ids.make_words();
        const int32_t capacity = read_capacity(job);
        const bool is_intact = open_lowlat(op, self, start, job.num_tokens, capacity, 0);
        may_send = wait_outbox_ready(op, start) && is_intact;
        if (may_send) {
            ids.send_ids(op);
            announce_sizes(self, op, job.num_tokens, capacity, 0);
        }
        find_lowlat_boxes(op, self);
    }
    if (threadIdx.x == 0) op.signature = self.signature;
    open_tables(tables, job, memory);
    if (!__syncthreads_and(may_send)) {
        if (threadIdx.x == 0) report_aborted_wait(op);
        return;
    }
    count_started_cta(self, op);
    if (is_announcer(true)) announce_start(self, op);
    if (is_control_warp()) {
        if (blockIdx.x == 0) begin_header(tables, job, op);
    }
    const LowlatPlanState state = planning_ctas.contains_this_cta()
                                      ? make_lowlat_plan(tables, job, op)
                                      : LOWLAT_PLAN_BROKEN;
    if (state == LOWLAT_PLAN_MADE) store_lowlat_plan(tables, job, op, planning_ctas);
    if (state == LOWLAT_PLAN_MADE || !planning_ctas.contains_this_cta())
        count_posted_warp(self);
    if (HOSTS && !planning_ctas.contains_this_cta()) (void)poll_inbox(job, op);
    if (state == LOWLAT_PLAN_MIXED && make_mixed_plan(tables, job, op, memory))
        store_mixed_records(tables, job, op, planning_ctas);
    if (is_control_warp() && is_last_cta()) finish_lowlat(self, op, start, true);
    end_lowlat(op);
}

extern "C" cudaError_t p2p_load_lowlat_plan(void)
{
    return cudaFuncSetAttribute(lowlat_plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                LOWLAT_PLAN_MAX_BYTES);
}

extern "C" cudaError_t p2p_launch_lowlat_plan(const p2p_plan_job *job, int num_sms,
                                              cudaStream_t stream)
{
    return launch_kernel(lowlat_plan_kernel, num_sms, LOWLAT_BLOCK, lowlat_plan_bytes(*job),
                         stream, *job);
}
