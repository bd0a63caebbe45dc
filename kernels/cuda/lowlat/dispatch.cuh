/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch for few tokens. With the template argument WITH_PLAN, the kernel also makes the plan
 * (lowlat/plan.cuh). "Last CTA" is the CTA with the highest blockIdx.
 *
 *   tokens  [num_tokens, row_bytes] of this rank -> slots on the ranks of their experts
 *   weights [num_tokens, top_k] of this rank     -> slot_weights of those slots
 *
 * A CTA has one control warp, its last warp. The other warps are workers. A unit of work is one
 * piece of a token's row. The template argument Rows defines how pieces are moved: PlainRows
 * (lowlat/dispatch.cu) or PackedRows (lowlat/dispatch_packed.cu).
 *
 * Workers first send the pieces of this rank's tokens to the peers that need them. Then they
 * receive pieces and store them to slots: first the pieces of this rank's own tokens, then the
 * pieces of the peers' tokens. In addition, one worker per token receives the token's "words":
 * its weights and its record (list of slots). To balance the work, the first pieces go to the
 * first workers, and the first words go to the last workers.
 *
 *   worker 0   send piece 0 | receive piece 0 of own tokens | of peers' tokens
 *   worker 1   send piece 1 | receive piece 1 of own tokens | of peers' tokens
 *   ...                     | (WITH_PLAN: every CTA computes the plan in between)
 *   control    send ids, weights | announce the operation | wait for announcements | end it
 *
 * A warp sends everything before it waits for anything, and each row goes directly to its
 * destination, so ranks cannot wait for each other in a circle. lowlat/lowlat.cuh explains the
 * memory order.
 *
 * The planner of lowlat/plan.cuh supports only few tokens per rank. If another rank has more
 * tokens, this kernel makes a *mixed plan*: it uses the general planner (plan/planner.cuh)
 * instead.
 *
 * If this rank has many tokens, some CTAs at the end of the grid only send rows
 * (num_send_only_ctas_of()). With WITH_PLAN and more than one CTA, the last CTA does not
 * receive, because it announces the operation. */
#ifndef EPIC_LOWLAT_DISPATCH_CUH
#define EPIC_LOWLAT_DISPATCH_CUH

#include "cuda/lowlat/dispatch_units.cuh"

/* ---------------------------------------------------------- padding and the whole plan ---- */

/* Zeroes this rank's padding: the slots without a token at the end of each slab (the slots of
 * one expert). Does nothing if the caller does not need zeros there. Called by all workers of
 * receiving CTAs. */
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
            const int32_t count = m.tables->load[e], *start = m.tables->group_slab_start;
            const int32_t rows = (int32_t)round_up_rows(count, plan.layer.alignment);
            return device_padding{start[e] - start[plan.self.rank * plan.block] + count,
                                  rows - count};
        };
        for_each_padding_of(padding_in, plan.block, m.shape.pieces, m.receivers.worker_index(),
                            m.receivers.num_workers(), write);
    }
}

/* Returns the table `fate` of a plan in memory. It has an element for each choice of this
 * rank's tokens: the choice's slot, or a negative EPIC_FATE_* if the choice has no slot. */
__device__ __forceinline__ const int32_t *fates_of(const PlanView &plan, const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.rank_of + (at.fate - at.rank_of) / 4;
}

/* ------------------------------------------------------------------------- mixed plans ---- */

/* Only for mixed plans: waits for the record (list of slots) of `token`, a token of `rank`.
 * `slot` becomes this lane's slot, or -1 if the record has no slot for this lane. If `keep` is
 * true, also stores the record in the plan. Returns false if the group has failed. */
__device__ __forceinline__ bool receive_mixed_slot(const LowlatMove &m, int rank, int32_t token,
                                                   bool keep, int32_t &slot)
{
    bool more;
    const uint64_t word = peek_record(m, rank, token, 0);
    return read_record(m, rank, token, 0, keep, word, slot, more);
}

/* Only for mixed plans: receives the weights and records of the tokens that this worker
 * handles. Returns false if the group has failed. */
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

/* Only for mixed plans: receives the pieces of rows that this worker handles, and stores the
 * pieces to the receive buffer. Returns false if the group has failed. */
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

/* Makes a mixed plan with the general planner, then receives all rows and weights. `memory`:
 * dynamic shared memory that the planner may use. Called by all threads of the receiving CTAs.
 * The function is not inlined, and m is passed by value. If m were passed by reference, the
 * compiler would keep m in memory on all paths of the kernel. */
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

/* Computes the plan in the tables of this CTA. Sets m.is_mixed if another rank has too many
 * tokens for the tables; the caller must then make a mixed plan. Sets m.discards if the plan
 * has an error or a receive buffer has too few rows; received rows must then not be stored.
 * Called by all threads of the receiving CTAs. Returns false if the group has failed. */
static __device__ bool make_plan_of(LowlatMove &m, LowlatPlan &tables)
{
    const p2p_plan_job &job = m.job.plan;
    const bool writes_header = is_control_warp() && (int)blockIdx.x == m.receivers.first;
    if (writes_header) begin_header(tables, job, m.op);
    const LowlatPlanState state = make_lowlat_plan(tables, job, m.op);
    if (state == LOWLAT_PLAN_BROKEN) return false;
    m.most_tokens = __reduce_max_sync(ALL_LANES, tables.tokens[lane_id()]);
    m.is_mixed = state == LOWLAT_PLAN_MIXED;
    if (m.is_mixed) return true;
    const PlanCheck verdict = check_plan(tables, job, m.op, true);
    m.result = verdict.result;
    m.discards = verdict.result != EPIC_OK || verdict.short_of_rows;
    if (is_control_warp()) write_lowlat_plan(tables, job, m.op, m.receivers, m.result);
    if (writes_header && verdict.short_of_rows)
        (void)check_rows(job.self, m.op, &tables.p.header, lane_id() == 0);
    return true;
}

/* ----------------------------------------------------------- the kernel and its phases ---- */

/* static shared memory of a CTA; the arrays of `tables` are in dynamic shared memory */
struct LowlatShared {
    OpState op;
    /* Without WITH_PLAN: the plan that the kernel reads. With WITH_PLAN, only its members
     * `records`, `padding` and `header.alignment` are set. */
    PlanView plan;
    LowlatPlan tables; /* with WITH_PLAN: the plan that the kernel makes */
    Stride unused;     /* required by the base class RowMove, but never read by these kernels */
    /* true if every rank's receive buffer has enough rows for the plan's slots on that rank */
    bool has_all_rows;
};

/* The words that a warp loads first. Control warps load `start`, the state of the group.
 * Without WITH_PLAN, the last worker of each CTA loads `header`, the plan's header. */
template <bool WITH_PLAN> struct Opening {
    StartState start;
    LoadedHeader header;

    __device__ __forceinline__ explicit Opening(const p2p_dispatch_job &job)
    {
        if (!HOSTS && is_announcer(WITH_PLAN)) fence_system();
        start = read_start_state(job.plan.self);
        if (HOSTS && is_announcer(WITH_PLAN)) fence_system();
        if (reads_header()) load_header(header, job.plan.plan, job.plan_bytes, job.plan.self);
    }
    /* Returns whether this warp loads and checks the plan's header. */
    static __device__ __forceinline__ bool reads_header()
    {
        return !WITH_PLAN && threadIdx.x / WARP == LOWLAT_WORKERS - 1;
    }
};

/* The first piece and the first words (weights and record) that a worker receives. The worker
 * loads them early, so that its first wait is short. */
struct FirstUnits {
    PendingPiece piece;
    PendingWords words;
    bool is_own; /* true: the piece belongs to a token of this rank */
};

__device__ __forceinline__ bool is_receiving_worker(const LowlatMove &m)
{
    return m.receivers.contains_this_cta() && !is_control_warp();
}

/* Returns whether this warp may still send data after phase 2 (see lowlat_dispatch_kernel()
 * below). With WITH_PLAN, this is true for the control warps of receiving CTAs, because they
 * call end_header(), which can report an invalid expert id to all ranks. These warps call
 * count_posted_warp() after phase 3, because a warp must call it after its last put. All other
 * warps call count_posted_warp() at the end of phase 2. */
template <bool WITH_PLAN>
__device__ __forceinline__ bool reports_data_errors(const LowlatMove &m)
{
    return WITH_PLAN && m.receivers.contains_this_cta() && is_control_warp();
}

/* Returns the arguments that all functions of the kernel share. */
template <class Rows, bool WITH_PLAN>
__device__ __forceinline__ LowlatMove describe_move(const p2p_dispatch_job &job,
                                                    LowlatShared &s)
{
    const RowShape shape = Rows::shape_of(job);
    const int top_k = (int)job.plan.layer.top_k;
    LowlatMove m = {{{{job, s.op, s.plan, s.unused, shape, policy_once(), 0, top_k}}}};
    Rows::describe_rows(m);
    m.has_new_plan = WITH_PLAN;
    m.result = EPIC_OK;
    m.discards = m.is_mixed = false;
    m.tables = &s.tables;
    const int ctas = (int)gridDim.x, send_only = job.num_send_only_ctas;
    const int announcers = WITH_PLAN && ctas > 1;
    m.senders = {send_only ? ctas - send_only : 0,
                 send_only ? send_only : ctas - (HOSTS ? announcers : 0)};
    m.receivers = {0, ctas - (send_only ? send_only : announcers)};
    return m;
}

/* Phase 1 of a control warp: initializes op, the state of the operation. With WITH_PLAN, also
 * sends the warp's share of the expert ids, and this rank's sizes (tokens, capacity, rows).
 * Returns false if this rank must not send because the group has failed, for example because
 * the net has not read the outbox in time. */
template <bool WITH_PLAN>
__device__ __forceinline__ bool open_operation(const LowlatMove &m, LowlatShared &s,
                                               const StartState &start, IdSender &ids,
                                               WeightSender &weights)
{
    const p2p_dispatch_job &job = m.job;
    if (!WITH_PLAN) weights.read_ahead();
    ids.make_words();
    const int32_t capacity = WITH_PLAN ? read_capacity(job.plan) : 0;
    const bool is_intact =
        open_lowlat(s.op, job.plan.self, start, job.num_tokens, capacity, job.recv_rows);
    const bool may_send = wait_outbox_ready(s.op, start) && is_intact;
    if (WITH_PLAN && may_send) {
        ids.send_ids(s.op);
        announce_sizes(job.plan.self, s.op, job.num_tokens, capacity, job.recv_rows);
    }
    find_lowlat_boxes(s.op, job.plan.self);
    return may_send;
}

/* Phase 1 of a worker: sets first.piece to the first piece that the worker receives. If the
 * piece belongs to a token of this rank, also loads the piece from the caller's memory. */
template <class Rows, bool WITH_PLAN>
__device__ __forceinline__ void load_own_piece(const LowlatMove &m, FirstUnits &first)
{
    const int unit = m.receivers.worker_index();
    first.is_own = is_receiving_worker(m) && unit < m.job.num_tokens * Rows::own_pieces(m);
    if (is_receiving_worker(m)) locate_unit<Rows>(m, unit, first.piece);
    if (!first.is_own) return;
    Rows::load_piece(m, first.piece.token, first.piece.piece, first.piece.q);
    if (!WITH_PLAN)
        first.piece.record_word = read_record_ahead(m, m.job.plan.self.rank, first.piece.token);
}

/* Phase 1: with WITH_PLAN, sets up empty tables for the new plan; otherwise checks the header
 * of the plan that the kernel reads. Also sets the operation's signature, which is a part of
 * the announcement. */
template <bool WITH_PLAN>
__device__ __forceinline__ void open_plan(const LowlatMove &m, LowlatShared &s,
                                          const Opening<WITH_PLAN> &opening)
{
    const p2p_dispatch_job &job = m.job;
    const p2p_self &self = job.plan.self;
    if (WITH_PLAN) open_tables(s.tables, job.plan, (uint8_t *)dynamic_shared());
    if (opening.reads_header()) {
        view_plan(s.plan, opening.header, job.plan.plan, job.plan_bytes, self, job.num_tokens);
        if (lane_id() == 0)
            s.op.signature = self.signature ^ ((uint32_t)s.plan.header.id & 0x0fffffffu);
    }
    if (!WITH_PLAN || threadIdx.x != 0) return;
    s.op.signature = self.signature;
    s.plan.records = (const int32_t *)(job.plan.plan + job.plan.at.records);
    s.plan.padding = (const device_padding *)(job.plan.plan + job.plan.at.padding);
    s.plan.header.alignment = job.plan.layer.alignment;
}

/* End of phase 1: after a barrier of the CTA, one warp of the last CTA (is_announcer())
 * announces the operation to all ranks. Returns false if may_send is false in any thread of the
 * CTA; the CTA must then exit. */
template <bool WITH_PLAN>
__device__ __forceinline__ bool announce_operation(const LowlatMove &m, LowlatShared &s,
                                                   bool may_send)
{
    const p2p_dispatch_job &job = m.job;
    const p2p_self &self = job.plan.self;
    if (!__syncthreads_and(may_send)) {
        if (threadIdx.x == 0) report_aborted_wait(s.op);
        return false;
    }
    if (!WITH_PLAN) announce_sizes(self, s.op, job.num_tokens, 0, job.recv_rows);
    count_started_cta(self, s.op);
    if (is_announcer(WITH_PLAN)) announce_start(self, s.op);
    return true;
}

/* Phase 2: workers send this rank's rows, and control warps send its weights. This phase waits
 * for no other rank. `is_valid`: false if the kernel reads a plan and this plan is invalid. In
 * this case nothing is sent. */
template <class Rows, bool WITH_PLAN>
__device__ __forceinline__ void send_rows(const LowlatMove &m, WeightSender &weights,
                                          PieceSender<Rows> &sender, bool is_valid)
{
    if (is_control_warp()) {
        if (WITH_PLAN) weights.read_ahead();
        if (is_valid) weights.send_weights();
    } else if (is_valid) {
        sender.send_all();
    }
    if (!reports_data_errors<WITH_PLAN>(m)) count_posted_warp(m.job.plan.self);
}

/* End of phase 2: starts to load the first words (weights and record) and the first piece that
 * the worker receives. If phase 1 has already loaded this piece, loads only the words. */
template <class Rows>
__device__ __forceinline__ void load_first_units(const LowlatMove &m, FirstUnits &first)
{
    const int unit = m.receivers.worker_index();
    if (!is_receiving_worker(m)) return;
    if (!first.is_own && unit < num_units<Rows>(m)) load_staged<Rows>(m, first.piece);
    if (!first.is_own) load_unit_record<Rows>(m, unit, first.piece);
    if (first_words(m) < num_words(m)) load_words(m, first_words(m), first.words);
}

/* Phase 3, only with WITH_PLAN: every receiving CTA makes the whole plan in shared memory. In
 * backend `hosts`, the last CTA makes no plan, but polls the net inbox for the other CTAs.
 * Returns false if the group has failed. */
__device__ __forceinline__ bool make_new_plan(LowlatMove &m, LowlatShared &s)
{
    bool ok = true;
    if (m.receivers.contains_this_cta()) ok = make_plan_of(m, s.tables);
    if (HOSTS && is_last_cta() && !m.receivers.contains_this_cta())
        ok = poll_inbox(m.job.plan, s.op);
    if (ok && reports_data_errors<true>(m)) count_posted_warp(m.job.plan.self);
    return ok;
}

/* Phase 4: receives rows and weights into the caller's buffers, zeroes the padding, and ends
 * the operation. `is_valid`: as in send_rows(). `ok`: false if the group has already failed. */
template <class Rows, bool WITH_PLAN>
__device__ __forceinline__ void receive_rows(const LowlatMove &m, LowlatShared &s,
                                             const StartState &start, FirstUnits &first,
                                             bool is_valid, bool ok)
{
    const p2p_dispatch_job &job = m.job;
    const p2p_self &self = job.plan.self;
    const device_plan_header &h = WITH_PLAN ? s.tables.p.header : s.plan.header;
    if (ok && is_valid && is_receiving_worker(m)) {
        ok = receive_words(m, first.words) && receive_all<Rows>(m, first.piece);
        if (ok && !m.discards) pad_slabs<Rows>(m);
    }
    if (is_control_warp() && !WITH_PLAN && is_valid) {
        const bool has_all = have_all_rows(self, s.op, h);
        if (lane_id() == 0) s.has_all_rows = has_all;
    }
    if (is_control_warp() && is_last_cta()) finish_lowlat(self, s.op, start, WITH_PLAN);
    const bool clears = ok && m.receivers.contains_this_cta();
    if (clears && (m.discards || !is_valid))
        Rows::clear_rows(m, 0, m.receivers.thread_index(), m.receivers.num_threads());
    else if (clears && job.zero_tail)
        Rows::clear_rows(m, WITH_PLAN ? needed_here(s.tables, job.plan) : h.slots_of[self.rank],
                         m.receivers.thread_index(), m.receivers.num_threads());
    end_lowlat(s.op);
    if (WITH_PLAN || s.has_all_rows || !is_last_cta_of_overflow(s.op, h)) return;
    Rows::clear_rows(m, 0, threadIdx.x, LOWLAT_BLOCK);
}

/* Phase 4 with a mixed plan: the control warp of the last CTA ends the operation. The receiving
 * CTAs make the plan with the general planner and receive all rows. */
template <class Rows>
__device__ __forceinline__ void receive_mixed_and_end(const LowlatMove &m, LowlatShared &s,
                                                      const StartState &start)
{
    if (is_control_warp() && is_last_cta()) finish_lowlat(m.job.plan.self, s.op, start, true);
    receive_mixed<Rows>(m, s.op, s.tables, (uint8_t *)dynamic_shared());
    end_lowlat(s.op);
}

/* The kernel. The template argument Rows defines how pieces are moved (PlainRows lists its
 * functions). With WITH_PLAN the kernel also makes the plan; without it, the kernel reads a
 * plan.
 *
 *   1. Announce. Control warps set op (the state of the operation) and send ids. Workers load
 *      their first pieces. Without WITH_PLAN, one worker checks the plan's header. After the
 *      first barrier of the CTA, one warp of the grid announces the operation.
 *   2. Send. Workers send all their pieces. Control warps send weights.
 *   3. Plan. With WITH_PLAN, receiving CTAs make the plan.
 *   4. Receive. Workers receive words (weights and records), then pieces, and zero the padding.
 *      The control warp of the last CTA ends the operation. If the plan has an error, or the
 *      receive buffer of a rank has too few rows, the CTAs zero the whole receive buffer. */
template <class Rows, bool WITH_PLAN>
__global__ void __launch_bounds__(LOWLAT_BLOCK, 1)
    lowlat_dispatch_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    __shared__ LowlatShared s;
    prefetch_params(job);
    wait_for_previous_kernel();
    if (job.plan.self.operation == EPIC_OP_NONE) return;
    const Opening<WITH_PLAN> opening(job);
    LowlatMove m = describe_move<Rows, WITH_PLAN>(job, s);
    IdSender ids(job.plan, m.receivers, WITH_PLAN);
    WeightSender weights(m);
    bool may_send = true, ok = true;
    if (is_control_warp())
        may_send = open_operation<WITH_PLAN>(m, s, opening.start, ids, weights);
    PieceSender<Rows> sender(m);
    FirstUnits first;
    load_own_piece<Rows, WITH_PLAN>(m, first);
    if (threadIdx.x == 0) s.has_all_rows = true;
    open_plan(m, s, opening);
    sender.find_peers();
    if (!announce_operation<WITH_PLAN>(m, s, may_send)) return;

    const bool is_valid = WITH_PLAN || (s.plan.is_valid && s.plan.header.result == EPIC_OK);
    m.most_tokens = WITH_PLAN ? job.plan.max_lowlat_tokens : s.plan.most_tokens;
    send_rows<Rows, WITH_PLAN>(m, weights, sender, is_valid);
    if (!WITH_PLAN) m.fates = fates_of(s.plan, job.plan.self);
    if (is_valid) load_first_units<Rows>(m, first);
    if (WITH_PLAN) ok = make_new_plan(m, s);
    if (WITH_PLAN && m.is_mixed) return receive_mixed_and_end<Rows>(m, s, opening.start);
    receive_rows<Rows, WITH_PLAN>(m, s, opening.start, first, is_valid, ok);
}

/* Returns the number of CTAs that only send. If a rank has many tokens, separate CTAs send and
 * receive, because stores to peers delay all other memory accesses of the same SM. A receiver
 * stores a row in up to top_k slots, so senders have more of the work if top_k is small compared
 * with the number of peers. If the kernel makes a plan, the receivers have that work, too. */
static int32_t num_send_only_ctas_of(const p2p_dispatch_job *job, int num_sms)
{
    const p2p_plan_job &plan = job->plan;
    const int top_k = plan.layer.top_k;
    const bool sends_much = 4 * min(top_k, plan.self.num_ranks - 1) >= top_k;
    const int many = num_sms * (!plan.is_lowlat ? 15 : sends_much ? 14 : 10) / 64;
    if (job->num_tokens > 96) return many < 16 ? many : 16;
    return plan.is_lowlat && job->num_tokens >= 32 ? num_sms / 8 : 0;
}

/* Launches kernels[1], which makes a plan and moves rows, or kernels[0], which moves rows with
 * an existing plan. */
template <class Kernel>
static cudaError_t launch_lowlat(const Kernel (&kernels)[2], p2p_dispatch_job job, int num_sms,
                                 cudaStream_t stream)
{
    const bool has_new_plan = job.plan.is_lowlat;
    const int bytes = has_new_plan ? lowlat_plan_bytes(job.plan) : 0;
    job.num_send_only_ctas = num_send_only_ctas_of(&job, num_sms);
    return launch_kernel(kernels[has_new_plan], num_sms, LOWLAT_BLOCK, bytes, stream, job);
}

/* Loads both kernels, and sets the maximum of their dynamic shared memory to the size that the
 * largest plan needs. */
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
