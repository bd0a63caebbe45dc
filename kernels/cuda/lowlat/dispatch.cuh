/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch for few tokens, alone or together with making the plan (WITH_PLAN, lowlat/plan.cuh).
 *
 *   tokens  [num_tokens, row_bytes] of this rank -> slots on the ranks of their experts
 *   weights [num_tokens, top_k] of this rank     -> slot_weights of those slots
 *
 * A unit of work is a piece of a row. The template parameter Rows defines pieces: PlainRows
 * (lowlat/dispatch.cu) or PackedRows (lowlat/dispatch_packed.cu). Workers first send their
 * pieces of this rank's tokens to the peers that need them. Then they receive pieces of all
 * tokens into slots, this rank's own tokens first. A token's weights and record ("words") are
 * received by one warp; words are dealt from the last worker down, pieces from the first worker
 * up.
 *
 *   worker 0   send piece 0 | receive piece 0 of own tokens | of peers' tokens
 *   worker 1   send piece 1 | receive piece 1 of own tokens | of peers' tokens
 *   ...                     | (WITH_PLAN: every CTA computes the plan in between)
 *   control    send ids, weights | announce | wait for announcements | end the operation
 *
 * No send waits for anything, and a token takes one hop. Words of rows, weights and ids are
 * each their own flag. Only the announcement needs an order: a system fence comes before it. So
 * a peer that reads the announcement also sees what earlier operations restored.
 *
 * If a rank has many tokens, some of the last CTAs only send (num_send_only_ctas_of). With
 * WITH_PLAN and more than one CTA, the last CTA never receives, because it announces. */
#ifndef EPIC_LOWLAT_DISPATCH_CUH
#define EPIC_LOWLAT_DISPATCH_CUH

#include "cuda/lowlat/dispatch_units.cuh"

/* ---------------------------------------------------------- padding and the whole plan ---- */

/* Writes zeros to the padding slots of this rank's slabs. Called by the workers. */
template <class Rows> __device__ __forceinline__ void pad_slabs(const LowlatMove &m)
{
    const p2p_plan_job &plan = m.job.plan;
    if (m.job.leave_padding) return;
    const auto write = [&](int32_t slot, int piece) { Rows::pad_slot(m, slot, piece); };
    if (!m.has_new_plan) {
        for_each_padding_piece(m.plan, m.plan.header.owned, m.shape.pieces,
                               m.receivers.worker_index(), m.receivers.num_workers(), write);
    } else if (plan.layer.alignment > 1) {
        const auto padding_in = [&](int slab) {
            const int e = plan.self.rank * plan.block + slab;
            const int32_t count = m.tables->p.load[e], *start = m.tables->p.start;
            const int32_t rows = (int32_t)round_up_rows(count, plan.layer.alignment);
            return device_padding{start[e] - start[plan.self.rank * plan.block] + count,
                                  rows - count};
        };
        for_each_padding_of(padding_in, plan.block, m.shape.pieces, m.receivers.worker_index(),
                            m.receivers.num_workers(), write);
    }
}

/* Returns the slots of this rank's choices in a plan that is read. */
__device__ __forceinline__ const int32_t *fates_of(const PlanView &plan, const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.rank_of + (at.fate - at.rank_of) / 4;
}

/* ---------------------------------------------------- with ranks that have more tokens ---- */

/* Waits for a token's record and returns this lane's slot in `slot`. `keep`: also stores the
 * record in the plan. Returns false if the group is broken. */
__device__ __forceinline__ bool receive_mixed_slot(const LowlatMove &m, int rank, int32_t token,
                                                   bool keep, int32_t &slot)
{
    bool more;
    const uint64_t word = peek_record(m, rank, token, 0);
    return read_record(m, rank, token, 0, keep, word, slot, more);
}

/* Like receive_words(), for mixed plans (lowlat/plan.cuh), whose slots come from records. */
__device__ __forceinline__ bool receive_mixed_words(const LowlatMove &m)
{
    for (int u = first_words(m); u < num_words(m); u += m.receivers.num_workers()) {
        PendingWords w;
        int32_t slot;
        load_words(m, u, w);
        if (w.token >= m.tokens_in(w.rank)) continue;
        if (!receive_mixed_slot(m, w.rank, w.token, true, slot)) return false;
        if (!m.job.weights || !__any_sync(ALL_LANES, slot >= 0)) continue;
        const int source = source_number_of(m, w.rank);
        const uint32_t weight = peek_weight(m, w.rank, source, w.token, 0, slot);
        if (!receive_weight(m, w.rank, source, w.token, 0, slot, weight)) return false;
    }
    return true;
}

/* Like receive_all(), for mixed plans (lowlat/plan.cuh), whose slots come from records. */
template <class Rows> __device__ __forceinline__ bool receive_mixed_rows(const LowlatMove &m)
{
    for (int u = m.receivers.worker_index(); u < num_units<Rows>(m);
         u += m.receivers.num_workers()) {
        PendingPiece p;
        int32_t slot;
        locate_unit<Rows>(m, u, p);
        const bool own = p.rank == m.job.plan.self.rank;
        if (p.token >= m.tokens_in(p.rank)) continue;
        if (!receive_mixed_slot(m, p.rank, p.token, false, slot)) return false;
        if (!__any_sync(ALL_LANES, slot >= 0)) continue;
        load_unit_row<Rows>(m, u, p);
        if (!own && !Rows::receive_from_peer(m, p.rank, source_number_of(m, p.rank), p.token,
                                             p.piece, p.q))
            return false;
        Rows::fill_slots_of(m, own, p.token, p.piece, slot, p.q);
    }
    return true;
}

/* Makes a mixed plan (lowlat/plan.cuh) and receives all rows. All threads of the receiving
 * CTAs. noinline, with m passed by value: a reference would force m into memory on the other
 * paths, too. */
template <class Rows>
static __device__ __noinline__ void receive_mixed(const LowlatMove m, OpState &op,
                                                  LowlatPlan &tables, uint8_t *memory)
{
    const p2p_plan_job &plan = m.job.plan;
    const volatile device_plan_header *h = header_of(m);
    if (!make_mixed_plan(tables, plan, op, memory)) return;
    bool ok = is_control_warp() || (receive_mixed_words(m) && receive_mixed_rows<Rows>(m));
    ok = ok && wait_for_plan(m);
    if (!__syncthreads_and(ok)) return;
    const bool good = h->result == EPIC_OK;
    if (!is_control_warp() && good && !m.job.leave_padding)
        for_each_padding_piece(m.plan, h->owned, m.shape.pieces, m.receivers.worker_index(),
                               m.receivers.num_workers(), [&](int32_t slot, int piece) {
                                   Rows::pad_slot(m, slot, piece);
                               });
    if (good && m.job.zero_tail)
        Rows::clear_rows(m, h->slots_of[plan.self.rank], m.receivers.thread_index(),
                         m.receivers.num_threads());
    __syncthreads();
    if (!is_last_cta_to_end(op, m.receivers.ctas)) return;
    if (!good || !check_rows(plan.self, op, h, threadIdx.x == 0))
        Rows::clear_rows(m, 0, threadIdx.x, LOWLAT_BLOCK);
}

/* Makes the plan, and decides whether rows are discarded and whether the plan is mixed. All
 * threads of the receiving CTAs. Returns false if the group is broken. */
static __device__ bool make_plan_of(LowlatMove &m, LowlatPlan &tables)
{
    const p2p_plan_job &job = m.job.plan;
    const bool heads = is_control_warp() && (int)blockIdx.x == m.receivers.first;
    if (heads) begin_header(tables, job, m.op);
    const LowlatPlanState has_new_plan = make_lowlat_plan(tables, job, m.op);
    if (has_new_plan == LOWLAT_PLAN_BROKEN) return false;
    m.most_tokens = __reduce_max_sync(ALL_LANES, tables.tokens[lane_id()]);
    m.is_mixed = has_new_plan == LOWLAT_PLAN_MIXED;
    if (m.is_mixed) return true;
    const PlanVerdict verdict = judge_plan(tables, job, true);
    m.result = verdict.result;
    m.discards = verdict.result != EPIC_OK || verdict.short_of_rows;
    if (is_control_warp()) write_lowlat_plan(tables, job, m.op, m.receivers, m.result);
    if (heads && verdict.short_of_rows)
        (void)check_rows(job.self, m.op, &tables.p.header, lane_id() == 0);
    return true;
}

/* The kernel. Rows: how pieces are moved (PlainRows lists the functions). WITH_PLAN: the kernel
 * also makes the plan.
 *
 *   1. Control warps read the state of the operation, set op and send ids. Workers load
 *      their first pieces. One worker loads and checks the header of a plan that is read.
 *   2. The first barrier of the CTA. One warp of the grid announces the operation.
 *   3. Workers send all their pieces; control warps send weights.
 *   4. WITH_PLAN: receiving CTAs make the plan.
 *   5. Workers receive words, then pieces, and zero the padding. The control warp of the
 *      last CTA ends the operation.
 *   6. If nothing may be stored, or a rank has too few rows: zero the whole receive buffer. */
template <class Rows, bool WITH_PLAN>
__global__ void __launch_bounds__(LOWLAT_BLOCK, 1)
    lowlat_dispatch_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ LowlatPlan tables;
    __shared__ Stride unused;
    __shared__ bool enough; /* false: this CTA has found a rank with too few rows */
    const p2p_self &self = job.plan.self;
    const device_plan_header &h = WITH_PLAN ? tables.p.header : plan.header;
    prefetch_params(job);
    if (self.operation == EPIC_OP_NONE) return;
    if (!HOSTS && is_announcer(WITH_PLAN)) fence_system();
    const StartState opening = read_start_state(self);
    if (HOSTS && is_announcer(WITH_PLAN)) fence_system();
    const bool reads = !WITH_PLAN && threadIdx.x / WARP == LOWLAT_WORKERS - 1;
    uint32_t header[HEADER_LANE_WORDS];
    if (reads) load_header(header, job.plan.plan, job.plan_bytes);
    const RowShape shape = Rows::shape_of(job);
    LowlatMove m = {
        {{{job, op, plan, unused, shape, policy_once(), 0, (int)job.plan.layer.top_k}}}};
    Rows::describe_rows(m);
    m.has_new_plan = WITH_PLAN;
    m.result = EPIC_OK;
    m.discards = m.is_mixed = false;
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    m.tables = &tables;
    const int ctas = (int)gridDim.x;
    m.senders = {job.num_send_only_ctas ? ctas - job.num_send_only_ctas : 0,
                 job.num_send_only_ctas ? job.num_send_only_ctas
                                        : ctas - (HOSTS && WITH_PLAN && ctas > 1)};
    m.receivers = {
        0, ctas - (job.num_send_only_ctas ? job.num_send_only_ctas : WITH_PLAN && ctas > 1)};
    const bool is_receiver = m.receivers.contains_this_cta(),
               works = is_receiver && !is_control_warp();
    IdSender ids(job.plan, m.receivers, WITH_PLAN);
    WeightSender weights(m);
    bool may = true;
    if (is_control_warp()) {
        if (!WITH_PLAN) weights.read_ahead();
        ids.make_words();
        open_lowlat(op, self, opening, job.num_tokens, job.plan.capacity, job.recv_rows);
        may = wait_outbox_ready(op, opening);
        if (WITH_PLAN && opening.broken == 0 && may) {
            ids.send_ids(op);
            announce_sizes(self, op, job.num_tokens, job.plan.capacity, job.recv_rows);
        }
        find_lowlat_boxes(op, self);
    }
    PieceSender<Rows> sender(m);
    PendingPiece first;
    PendingWords words;
    const bool begins_own =
        works && m.receivers.worker_index() < job.num_tokens * Rows::own_pieces(m);
    if (works) locate_unit<Rows>(m, m.receivers.worker_index(), first);
    if (begins_own) Rows::load_piece(m, first.token, first.piece, first.q);
    if (begins_own && !WITH_PLAN) first.word = read_record_ahead(m, self.rank, first.token);
    if (threadIdx.x == 0) enough = true;
    if (WITH_PLAN) open_tables(tables, job.plan, memory);
    if (reads) {
        view_plan(plan, header, job.plan.plan, job.plan_bytes, self, job.num_tokens);
        if (lane_id() == 0)
            op.signature = self.signature ^ ((uint32_t)plan.header.id & 0x0fffffffu);
    }
    if (WITH_PLAN && threadIdx.x == 0) {
        op.signature = self.signature;
        plan.records = (const int32_t *)(job.plan.plan + job.plan.at.records);
        plan.padding = (const device_padding *)(job.plan.plan + job.plan.at.padding);
        plan.header.alignment = job.plan.layer.alignment;
    }
    sender.find_peers();
    if (!__syncthreads_and(opening.broken == 0 && may)) {
        if (threadIdx.x == 0) report_aborted_wait(op);
        return;
    }
    if (!WITH_PLAN) announce_sizes(self, op, job.num_tokens, job.plan.capacity, job.recv_rows);
    count_started_cta(self, op);
    if (is_announcer(WITH_PLAN)) announce_start(self, op);

    const bool moves = WITH_PLAN || (plan.is_valid && plan.header.result == EPIC_OK);
    m.most_tokens = WITH_PLAN ? job.plan.max_lowlat_tokens : plan.most_tokens;
    if (is_control_warp()) {
        if (WITH_PLAN) weights.read_ahead();
        if (moves) weights.send_weights();
    } else if (moves) {
        sender.send_all();
    }
    /* this warp may still have to send a wrong value (end_header) */
    const bool reports_faults = WITH_PLAN && is_receiver && is_control_warp();
    if (!reports_faults) count_posted_warp(self);
    if (!WITH_PLAN) m.fates = fates_of(plan, self);
    bool ok = true;
    if (moves && works) {
        if (!begins_own && m.receivers.worker_index() < num_units<Rows>(m))
            load_staged<Rows>(m, first);
        if (!begins_own) load_unit_record<Rows>(m, m.receivers.worker_index(), first);
        if (first_words(m) < num_words(m)) load_words(m, first_words(m), words);
    }
    if (WITH_PLAN && is_receiver) ok = make_plan_of(m, tables);
    if (HOSTS && WITH_PLAN && is_last_cta() && !is_receiver) ok = poll_inbox(job.plan, op);
    if (ok && reports_faults) count_posted_warp(self);
    if (WITH_PLAN && m.is_mixed) {
        if (is_control_warp() && is_last_cta()) finish_lowlat(self, op, opening, WITH_PLAN);
        receive_mixed<Rows>(m, op, tables, memory);
        return end_lowlat(op);
    }
    if (ok && moves && works) {
        ok = receive_words(m, words) && receive_all<Rows>(m, first);
        if (ok && !m.discards) pad_slabs<Rows>(m);
    }
    if (is_control_warp() && !WITH_PLAN && moves) {
        const bool good = have_all_rows(self, op, h);
        if (lane_id() == 0) enough = good;
    }
    if (is_control_warp() && is_last_cta()) finish_lowlat(self, op, opening, WITH_PLAN);
    if (ok && is_receiver && (m.discards || !moves))
        Rows::clear_rows(m, 0, m.receivers.thread_index(), m.receivers.num_threads());
    else if (ok && is_receiver && job.zero_tail)
        Rows::clear_rows(m, WITH_PLAN ? needed_here(tables, job.plan) : h.slots_of[self.rank],
                         m.receivers.thread_index(), m.receivers.num_threads());
    end_lowlat(op);
    if (WITH_PLAN || enough || !is_last_cta_of_overflow(op, h)) return;
    Rows::clear_rows(m, 0, threadIdx.x, LOWLAT_BLOCK);
}

/* Returns the number of CTAs that only send. With more tokens, stores to peers delay everything
 * else that an SM does, above all the ids that follow them (docs/lab/cuda.md). */
static int32_t num_send_only_ctas_of(const p2p_dispatch_job *job, int num_sms)
{
    const int many = job->plan.is_lowlat ? num_sms * 10 / 64 : num_sms * 15 / 64;
    if (job->num_tokens > 96) return many < 16 ? many : 16;
    return job->plan.is_lowlat && job->num_tokens >= 32 ? num_sms / 8 : 0;
}

/* Launches kernels[1] if the kernel must make the plan, else kernels[0]. */
template <class Kernel>
static cudaError_t launch_lowlat(const Kernel (&kernels)[2], p2p_dispatch_job job, int num_sms,
                                 cudaStream_t stream)
{
    const bool has_new_plan = job.plan.is_lowlat;
    const int bytes = has_new_plan ? lowlat_plan_bytes(job.plan) : 0;
    job.num_send_only_ctas = num_send_only_ctas_of(&job, num_sms);
    return launch_kernel(kernels[has_new_plan], num_sms, LOWLAT_BLOCK, bytes, stream, job);
}

/* Loads two kernels, and raises their limits of dynamic shared memory. */
template <class Kernel> static cudaError_t load_lowlat(const Kernel (&kernels)[2])
{
    for (const Kernel &kernel : kernels) {
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, LOWLAT_PLAN_MAX_BYTES);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

#endif
