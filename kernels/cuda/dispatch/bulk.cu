/* SPDX-License-Identifier: Apache-2.0 */
/* Implements dispatch of packed rows. A packed row is a row and its scales as one sequence of
 * 16-byte vectors (dispatch/packed.cuh). This kernel moves each packed row as a whole, by bulk
 * stores (dispatch/bulk.cuh). It reads a plan, or makes the plan first. Rows are aligned to 16
 * bytes. The kernel may quantize rows before it sends them.
 *
 *   tokens  [num_tokens, token_bytes]   scales       [num_tokens, scale_bytes] (*)
 *   recv    [recv_rows, row_bytes]      recv_scales  [recv_rows, scale_bytes]
 * (*) not used if the kernel quantizes rows: it computes the scales itself
 *
 *   planner CTAs             first make the plan, then move units like the other CTAs
 *   job.warps warps per CTA  move units; a unit is one packed row of one token
 *   other warps              idle
 *
 * All units form one list, and the list is divided into steps. Step i has the units below.
 * job.lag is the number of tokens that are sent before the first token of a peer is received.
 *
 *   own unit    sends this rank's token i to every peer that needs it, and stores it to its
 *               slots on this rank. So the row is read, or quantized, once.
 *   peer unit   receives token i - lag of a peer: stores it from staging to its slots on this
 *               rank, then stores poison (the mark of a word that has not arrived) to staging
 *
 * Memory order: every word of a staged row is its own flag (net/staging.cuh). In shared memory,
 * the lanes that write a buffer call fence_bulk() before the copy engine reads the buffer. A
 * warp writes a buffer again only after wait_bulk_read().
 *
 * Ranks cannot wait for each other in a circle: a receiving warp waits only for a row that its
 * peer sends in an earlier step (`lag` steps before), and each CTA processes its units in
 * order. While the planner CTAs make the plan, each warp of the other CTAs sends its first
 * token. Then it waits for the record of that token, which contains the token's slots on this
 * rank.
 *
 * While a warp moves the row of a unit, the row of its next unit is already being copied to
 * another buffer. */
#include "cuda/dispatch/bulk.cuh"
#include "cuda/dispatch/launcher.cuh"

/* A unit of work: the packed row of one token, which one warp sends or receives. */
struct Unit {
    /* step: the unit belongs to the step of the list with this index. role: 0 if the unit's
     * token is a token of this rank; n if it is a token of the rank that is n above this rank,
     * modulo num_ranks (rank_of_role()). */
    int step, role;
    /* In lane k: choice k of the token (one of its top_k experts), and word k of the token's
     * record (its slots on this rank). take_unit() loads both before the warp moves the row. */
    uint64_t choice_word, record_word;

    __device__ __forceinline__ bool is_own() const
    {
        return role == 0;
    }
};

/* Returns the token whose row the unit moves. */
__device__ __forceinline__ int32_t token_of(const PackedMove &m, const Unit &unit)
{
    return m.round_begin + unit.step - (unit.is_own() ? 0 : m.job.lag);
}

/* Returns true if the unit's token exists in the running round, which ends before token `end`.
 * Units that receive have no token in the first `lag` steps of a round. Units that send have no
 * token in the last `lag` steps. */
__device__ __forceinline__ bool has_token(const PackedMove &m, const Unit &unit, int32_t end)
{
    const int32_t token = token_of(m, unit);
    return token >= m.round_begin && token < (unit.is_own() ? min(end, m.job.num_tokens) : end);
}

/* Returns the next unit for this warp, and loads the words that the unit needs first. Some
 * units take longer than others. So the warps of a CTA do not have fixed units, but take them
 * one by one with a common counter, *num_taken. The list is divided into sections of gridDim.x
 * units, and each CTA gets one unit of each section. A CTA's position in the section changes
 * from section to section. With a fixed position, all units of a CTA could be for the same
 * peer. Called by a whole warp. */
template <bool FLAT>
__device__ __forceinline__ Unit take_unit(const PackedMove &m, int *num_taken, int32_t end)
{
    const int ctas = (int)gridDim.x, ranks = m.job.plan.self.num_ranks;
    int taken = 0;
    if (lane_id() == 0) taken = atomicAdd(num_taken, 1);
    taken = __shfl_sync(ALL_LANES, taken, 0);
    const int number = taken * ctas + (int)((blockIdx.x + (unsigned)taken) % (unsigned)ctas);
    Unit unit = {number / ranks, number % ranks, ~0ull, ~0ull};
    if (!has_token(m, unit, end)) return unit;
    const int32_t token = token_of(m, unit);
    const int rank = rank_of_role(m.job.plan.self, unit.role);
    if (unit.is_own()) unit.choice_word = read_choice(m, token, lane_id());
    unit.record_word = FLAT ? peek_row(m, rank, token) : peek_record(m, rank, token, 0);
    return unit;
}

/* `record` is the word of a token's record that take_unit() has loaded. Returns true if this
 * word already shows that the token has no row on this rank. */
template <bool FLAT>
__device__ __forceinline__ bool is_absent(const PackedMove &m, uint64_t record)
{
    if (!m.has_new_plan) return !__any_sync(ALL_LANES, (int32_t)record >= 0);
    const bool absent =
        is_stamped(m.op, record) && ((uint32_t)record & ~RECORD_LAST) == RECORD_ABSENT;
    return __any_sync(ALL_LANES, absent);
}

/* Starts to copy the row of the unit to `buffer` in shared memory. If the row will be
 * quantized, only prefetches it into the L2 cache. Called by a whole warp. */
template <class OwnPiece, bool FLAT>
__device__ __forceinline__ void begin_copy(const PackedMove &m, const Unit &unit, int32_t end,
                                           uint32_t buffer)
{
    if (has_token(m, unit, end)) {
        const int32_t token = token_of(m, unit);
        if (unit.is_own() && OwnPiece::QUANTIZED)
            prefetch_own(m, token);
        else if (unit.is_own())
            copy_own(m, token, buffer);
        else if (!is_absent<FLAT>(m, unit.record_word))
            copy_staged(m, rank_of_role(m.job.plan.self, unit.role), token, buffer);
    }
    end_copies();
}

/* Receives the weights of the slots of `token`, a token of `rank` or, with layout FLAT, the
 * extras of the token's row (local experts and weights). `source`: index of `rank` among this
 * rank's sources. `weight` and `extras`: the results of peek_weight() and peek_extras(). If a
 * value in them had not arrived yet, waits for it. Called by a whole warp. Returns false if the
 * group has failed. */
template <bool FLAT>
__device__ __forceinline__ bool receive_weights(const PackedMove &m, int rank, int source,
                                                int32_t token, const int32_t (&slot)[2],
                                                const FlatExtras &extras, uint32_t weight)
{
    if (FLAT)
        return receive_extras(m, rank, source, token, __shfl_sync(ALL_LANES, slot[0], 0),
                              extras);
    if (!m.job.weights) return true;
    if (!receive_weight(m, rank, source, token, 0, slot[0], weight)) return false;
    if (!__any_sync(ALL_LANES, slot[1] >= 0)) return true;
    weight = peek_weight(m, rank, source, token, 1, slot[1]);
    return receive_weight(m, rank, source, token, 1, slot[1], weight);
}

/* Stores the packed row in `buffer` to all slots of its token on this rank. `slot`: this lane's
 * slots (find_slots()). Requires that the caller has called fence_buffers() before, so that the
 * bulk stores read what the lanes have written to the buffer. */
__device__ __forceinline__ void fill_all_slots(const PackedMove &m, const int32_t (&slot)[2],
                                               uint32_t buffer)
{
    bulk_to_slots(m, slot[0], buffer);
    if (m.top_k > WARP) bulk_to_slots(m, slot[1], buffer);
}

/* Prepares the packed row of this rank's token in `buffer`: quantizes the caller's row into the
 * buffer, or checks the row that was copied to the buffer. Returns true if the row has special
 * words. In this case send_special() must send the row, because it replaces these words. Called
 * by a whole warp. */
template <class OwnPiece>
__device__ __forceinline__ bool prepare_packed(const PackedMove &m, int32_t token,
                                               uint32_t buffer)
{
    bool special;
    if (OwnPiece::QUANTIZED) {
        special = quantize_row(m, token, buffer);
        fence_buffers();
    } else {
        special = scan_packed<false>(m, buffer).special;
    }
    return __any_sync(ALL_LANES, special) != 0;
}

/* Sends the packed row of `token`, a token of this rank, to the peers that need it. Then waits
 * for the token's record, which contains its slots on this rank, and stores the row to these
 * slots. `unit`: the unit of this token. Called by a whole warp. Returns false if the group has
 * failed. */
template <class OwnPiece, bool FLAT>
__device__ __forceinline__ bool send_own_packed(const PackedMove &m, int32_t token,
                                                const Unit &unit, uint32_t buffer)
{
    const int rank = m.job.plan.self.rank;
    constexpr bool with_extras = FLAT;
    int32_t slot[2];
    uint32_t weight = 0;
    FlatExtras extras;
    const uint32_t peers = choose_peers(m, token, m.job.weights != NULL, unit.choice_word);
    const bool special = peers && prepare_packed<OwnPiece>(m, token, buffer);
    if (!special) bulk_to_peers(m, token, peers, buffer);
    if (!find_slots<FLAT>(m, rank, token, true, unit.record_word, slot)) return false;
    const bool here = __any_sync(ALL_LANES, slot[0] >= 0) != 0;
    if (here && !peers) prepare_packed<OwnPiece>(m, token, buffer);
    if (here && with_extras) extras = peek_extras(m, rank, 0, token, 0);
    if (here && !with_extras && m.job.weights)
        weight = peek_weight(m, rank, 0, token, 0, slot[0]);
    if (here) fill_all_slots(m, slot, buffer);
    if (special) send_special<OwnPiece::QUANTIZED>(m, token, peers, buffer);
    return !here || receive_weights<FLAT>(m, rank, 0, token, slot, extras, weight);
}

/* Receives the packed row of `token`, a token of a peer: waits for the row in staging, and
 * stores it to the token's slots on this rank. Then stores poison over the row in staging, so
 * that the staging can be used again. `unit`: the unit of this token. Called by a whole warp.
 * Returns false if the group has failed. */
template <class OwnPiece, bool FLAT>
__device__ __forceinline__ bool receive_packed(const PackedMove &m, int32_t token,
                                               const Unit &unit, const BulkBuffers &buffers)
{
    const uint32_t buffer = buffers.buffer_address(buffers.current);
    const int source = unit.role - 1;
    const int rank = rank_of_role(m.job.plan.self, unit.role);
    int32_t slot[2];
    uint32_t weight = 0;
    FlatExtras extras;
    if (!find_slots<FLAT>(m, rank, token, true, unit.record_word, slot)) return false;
    if (!__any_sync(ALL_LANES, slot[0] >= 0)) return true;
    if (FLAT)
        extras = peek_extras(m, rank, source, token, 0);
    else if (m.job.weights)
        weight = peek_weight(m, rank, source, token, 0, slot[0]);
    ScanResult found = scan_packed<OwnPiece::QUANTIZED>(m, buffer);
    if (__any_sync(ALL_LANES, found.missing)) {
        if (!wait_packed(m, rank, token, buffer)) return false;
        found = scan_packed<OwnPiece::QUANTIZED>(m, buffer);
        fence_buffers();
    }
    if (__any_sync(ALL_LANES, found.special)) {
        if (!restore_special_words<OwnPiece::QUANTIZED>(m, rank, source, token, buffer))
            return false;
        fence_buffers();
    }
    fill_all_slots(m, slot, buffer);
    bulk_restore(m, rank, token, buffers);
    return receive_weights<FLAT>(m, rank, source, token, slot, extras, weight);
}

struct RoundProgress { /* The state of a warp in the running round. */
    int32_t end;       /* the first token after the running round */
    bool has_counts;   /* true: the number of tokens of each rank is known */
    /* If it is at least 0, this warp also zeroes padding slots. slab_bits is then log2 of the
     * number of slabs (one per local expert), rounded up. Negative: NOT_KNOWN or
     * NOT_WITH_TOKENS (dispatch.cuh). */
    int slab_bits;
};

/* At the first call, waits until each rank has announced its number of tokens. A warp calls
 * this function before it moves the first token of a peer. Returns false if the group has
 * failed. */
__device__ __forceinline__ bool read_counts_once(PackedMove &m, RoundProgress &p)
{
    if (!p.has_counts && !read_token_counts(m)) return false;
    p.has_counts = true;
    p.end = min(p.end, m.most_tokens);
    return true;
}

/* Zeroes some of the padding slots. Called after each unit of `token`, a token of this rank, so
 * that padding needs no separate pass. Called by a whole warp. Returns false if the group has
 * failed. */
__device__ __forceinline__ bool pad_with_token(PackedMove &m, int32_t token, RoundProgress &p,
                                               const BulkBuffers &buffers)
{
    if (!read_counts_once(m, p)) return false;
    if (p.slab_bits == NOT_KNOWN && !find_padding_slabs(m, p.slab_bits)) return false;
    if (p.slab_bits >= 0 && token < p.end)
        for_each_padding_slot(m.plan, p.slab_bits, token, m.most_tokens,
                              [&](int32_t slot) { bulk_padding(m, slot, buffers); });
    return true;
}

/* Sends or receives the row of a unit. Requires that begin_copy() has started to copy the row
 * to the current buffer. Returns false if the group has failed. */
template <class OwnPiece, bool FLAT>
__device__ __forceinline__ bool move_unit(PackedMove &m, const Unit &unit, RoundProgress &p,
                                          const BulkBuffers &buffers)
{
    const int32_t token = token_of(m, unit);
    if (unit.is_own()) {
        if (has_token(m, unit, p.end) &&
            !send_own_packed<OwnPiece, FLAT>(m, token, unit,
                                             buffers.buffer_address(buffers.current)))
            return false;
        return pad_with_token(m, token, p, buffers);
    }
    if (token < m.round_begin) return true;
    if (!read_counts_once(m, p)) return false;
    return token >= p.end || receive_packed<OwnPiece, FLAT>(m, token, unit, buffers);
}

/* Moves the rows of one round: tokens [m.round_begin, end) of every rank. *num_taken: see
 * take_unit(). Returns false if the group has failed. */
template <class OwnPiece, bool FLAT>
__device__ __forceinline__ bool move_tokens(PackedMove &m, int32_t end, BulkBuffers &buffers,
                                            int *num_taken)
{
    RoundProgress p = {end, !m.has_new_plan, NOT_KNOWN};
    bool ok = true;
    if ((int)threadIdx.x / WARP >= m.job.warps) return true;
    Unit unit = take_unit<FLAT>(m, num_taken, p.end);
    begin_copy<OwnPiece, FLAT>(m, unit, p.end, buffers.buffer_address(buffers.current));
    while (ok && m.round_begin + unit.step - m.job.lag < p.end) {
        const Unit next = take_unit<FLAT>(m, num_taken, p.end);
        buffers.wait_free();
        begin_copy<OwnPiece, FLAT>(m, next, p.end,
                                   buffers.buffer_address(buffers.next_buffer()));
        wait_copies<1>();
        fence_buffers();
        ok = move_unit<OwnPiece, FLAT>(m, unit, p, buffers);
        if (lane_id() == 0) end_bulk();
        buffers.current = buffers.next_buffer();
        unit = next;
    }
    return ok;
}

/* Moves the rows in rounds. Each round moves as many tokens of each rank as fit in the staging.
 * If the kernel makes the plan, there is only one round. *num_taken: counter in shared memory
 * for take_unit(). Returns false if the group has failed. */
template <class OwnPiece, bool FLAT>
__device__ __forceinline__ bool move_rounds(PackedMove &m, OpState &op, const uint8_t *memory,
                                            int *num_taken)
{
    BulkBuffers buffers(m, memory, (int)threadIdx.x / WARP);
    const int64_t round_tokens =
        P2P_ROUND_TOKENS(m.job.plan.self.at, (int64_t)m.shape.vectors * 16);
    const int32_t most = m.most_tokens;
    for (m.round_begin = 0;; m.round_begin += (int32_t)round_tokens) {
        const bool last = m.has_new_plan || m.round_begin + round_tokens >= most;
        const int32_t end = last ? most : m.round_begin + (int32_t)round_tokens;
        const bool moved = move_tokens<OwnPiece, FLAT>(m, end, buffers, num_taken);
        wait_copies<0>();
        wait_bulk();
        fence_buffers();
        if (!moved) return false;
        if (last) return true;
        if (!next_round(op)) return false;
        if (threadIdx.x == 0) *num_taken = 0;
        __syncthreads();
    }
}

/* Zeroes all padding slots, unless the units of this rank's tokens have already zeroed them
 * (pads_with_tokens()). Called by all CTAs. Returns false if the group has failed. */
__device__ __forceinline__ bool pad_all(PackedMove &m, const uint8_t *memory)
{
    const BulkBuffers buffers(m, memory, 0);
    if (m.plan.header.alignment <= 1) return true;
    if (m.has_new_plan && !read_token_counts(m)) return false;
    if (pads_with_tokens(m.plan, m.stride, m.most_tokens)) return true;
    if (m.has_new_plan && !wait_for_plan(m)) return false;
    const int warps = (int)(grid_threads() / WARP), warp = (int)(grid_thread() / WARP);
    if (header_of(m)->result == EPIC_OK)
        for_each_padding_piece(m.plan, header_of(m)->owned, 1, warp, warps,
                               [&](int32_t slot, int) { bulk_padding(m, slot, buffers); });
    end_bulk();
    wait_bulk();
    return true;
}

/* The template argument OwnPiece packs the rows of this rank: JoinedPiece copies rows and
 * scales, and QuantizedPiece quantizes rows. WITH_PLAN: the kernel also makes the plan. */
template <class OwnPiece, bool WITH_PLAN, bool FLAT>
__global__ void __launch_bounds__(BLOCK, 1)
    dispatch_bulk_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    wait_for_previous_kernel();
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Planner planner;
    __shared__ Stride stride;
    __shared__ int num_taken;
    const p2p_self &self = job.plan.self;
    const RowShape shape = packed_shape(job, true);
    if (threadIdx.x == 0) stride.set_strides(job.total_warps, self.num_ranks, 1);
    if (threadIdx.x == 0) num_taken = 0;
    open_plan<WITH_PLAN>(plan, job);
    if (!begin_operation(op, self, WITH_PLAN ? 0 : (uint32_t)plan.header.id, job.num_tokens,
                         WITH_PLAN ? read_capacity(job.plan) : 0, job.recv_rows))
        return;
    bool ok = make_own_plan<WITH_PLAN, FLAT>(planner, job, op, memory);
    fill_constants(memory);
    DispatchMove move = {
        {job, op, plan, stride, shape, policy_once(), 0, (int)plan.header.top_k}};
    move.has_new_plan = WITH_PLAN;
    /* Lane q has the number of tokens of rank q. Until read_counts_once() is called, only the
     * number of tokens of this rank is used, so it is stored in all lanes. */
    move.tokens_of = job.num_tokens;
    if (!WITH_PLAN)
        move.tokens_of = lane_id() < self.num_ranks ? plan.header.tokens_of[lane_id()] : 0;
    move.most_tokens = WITH_PLAN ? (int32_t)self.max_tokens : plan.most_tokens;
    PackedMove m = {move};
    describe_packed(m, 1);
    if (ok && (WITH_PLAN || plan.header.result == EPIC_OK))
        ok = move_rounds<OwnPiece, FLAT>(m, op, memory, &num_taken) && pad_all(m, memory);
    if (ok && job.zero_tail && plan.is_valid) ok = clear_tail<FLAT>(m);
    if (finish_operation(op) && ok) clear_all<FLAT>(m);
}

static const Kernel kernels[] = {dispatch_bulk_kernel<JoinedPiece, false, false>,
                                 dispatch_bulk_kernel<JoinedPiece, true, false>,
                                 dispatch_bulk_kernel<QuantizedPiece, false, false>,
                                 dispatch_bulk_kernel<QuantizedPiece, true, false>,
                                 dispatch_bulk_kernel<JoinedPiece, false, true>,
                                 dispatch_bulk_kernel<JoinedPiece, true, true>,
                                 dispatch_bulk_kernel<QuantizedPiece, false, true>,
                                 dispatch_bulk_kernel<QuantizedPiece, true, true>};

extern "C" cudaError_t p2p_load_dispatch_bulk(void)
{
    const int planning = planner_most_bytes();
    return load_kernels(kernels, planning > BULK_MEMORY ? planning : BULK_MEMORY);
}

/* Returns how many buffers (one packed row each) fit in the shared memory of a CTA. */
static int64_t count_buffers(const p2p_dispatch_job &job)
{
    const int64_t bytes = p2p_packed_bytes(job.row_bytes, job.scale_bytes);
    return (BULK_MEMORY - 2 * CONSTANT_BYTES) / ((bytes + 127) / 128 * 128);
}

extern "C" int p2p_can_dispatch_bulk(const p2p_dispatch_job *job)
{
    return job->bulk && job->aligned && job->scale_bytes && job->scales_aligned &&
           job->scale_bytes % 16 == 0 && count_buffers(*job) >= 8 &&
           (!job->quantize || job->type != EPIC_F32);
}

/* Sets the number of warps per CTA that move rows, the number of buffers of each of these warps
 * (two to four), and the lag: the number of tokens that are sent before the first token of a
 * peer is received. A kernel that quantizes gets more warps, and usually a longer lag. The
 * values are measured (docs/lab/cuda.md). */
static void deal_packed(p2p_dispatch_job &job, int num_sms)
{
    const int buffers = (int)count_buffers(job), tokens = job.num_tokens;
    const int wanted = (job.plan.planners ? 924 : 800) / num_sms, least = job.quantize ? 10 : 7;
    int warps = wanted > least ? wanted : least;
    if (warps > buffers / 2) warps = buffers / 2;
    if (warps > BLOCK / WARP) warps = BLOCK / WARP;
    job.warps = warps;
    job.num_buffers = buffers / warps < 4 ? buffers / warps : 4;
    job.total_warps = num_sms * warps;
    const int at_a_time = job.total_warps / job.plan.self.num_ranks;
    job.lag = job.plan.planners ? at_a_time : at_a_time / 2;
    if (job.quantize) job.lag = 2 * at_a_time < tokens / 4 ? 2 * at_a_time : tokens / 4;
    if (job.lag < 16) job.lag = 16;
}

extern "C" cudaError_t p2p_launch_dispatch_bulk(const p2p_dispatch_job *job, int num_sms,
                                                cudaStream_t stream)
{
    p2p_dispatch_job copy = *job;
    deal_packed(copy, num_sms);
    if (copy.plan.planners > num_sms) copy.plan.planners = num_sms;
    const int planning = copy.plan.planners ? planner_bytes_of(copy.plan) : 0;
    const Kernel kernel =
        kernels[(job->flat != 0) * 4 + (job->quantize != 0) * 2 + (copy.plan.planners > 0)];
    return launch_kernel(kernel, num_sms, BLOCK,
                         planning > BULK_MEMORY ? planning : BULK_MEMORY, stream, copy);
}
