/* SPDX-License-Identifier: Apache-2.0 */
/* Implements dispatch of packed rows (a row and its scales, dispatch/packed.cuh). The kernel
 * moves rows piece by piece. The caller passes the scales, or the kernel computes the scales
 * when it quantizes the rows. The kernel reads a plan, or makes the plan first.
 *
 *   tokens  [num_tokens, token_bytes]   scales       [num_tokens, scale_bytes] (*)
 *   recv    [recv_rows, row_bytes]      recv_scales  [recv_rows, scale_bytes]
 *   (*) not used if the kernel quantizes rows: it computes the scales itself
 *
 * dispatch/dispatch.cu describes the work of CTAs and warps, the list of units and the waits.
 * Units that send, and units that receive this rank's own tokens, move pieces of the caller's
 * rows. Units that receive from peers move pieces of packed rows. Memory order: each word of a
 * packed row is its own flag. */
#include "cuda/dispatch/find_work.cuh"
#include "cuda/dispatch/launcher.cuh"
#include "cuda/dispatch/packed_slots.cuh"
#include "cuda/dispatch/relay.cuh"

/* The pieces that a unit moves: `count` pieces from piece `first` on. If `count` is 0 or less,
 * the unit moves no pieces. is_own: true if the unit moves pieces of the caller's rows, false
 * if it moves pieces of packed rows. If the kernel quantizes, a caller's row and its packed row
 * have different numbers of pieces. */
struct Pieces {
    int first, count;
    bool is_own;

    __device__ __forceinline__ Pieces(const PackedMove &m, const UnitWalk &walk)
        : is_own(walk.role == 0 || source_role(m, walk) == m.job.plan.self.num_ranks)
    {
        const int span = is_own ? m.own_span : m.job.span;
        first = walk.span * span;
        count = min(span, (is_own ? m.own_shape.pieces : m.shape.pieces) - first);
    }
};

/* Copies the pieces of a warp's units into the warp's ring buffer in shared memory, some pieces
 * before the warp uses them. The warp then reads the pieces from the ring in the same order. A
 * unit without pieces uses one buffer of the ring, which stays empty. */
template <class OwnPiece> struct PieceFeed {
    typedef PieceRing<V, false> RowPieces;
    const PackedMove &m;
    RowPieces ring;
    DispatchWork work;
    WorkWalk walk; /* the unit whose pieces are copied now */
    /* the row that this unit moves, in staging or in the caller's memory; NULL: the pieces of
     * the unit are not copied */
    const uint8_t *row;
    /* In a packed row, the first row_end vectors are the row, and the others are the scales.
     * Vector v >= row_end of the packed row is at scales + 16 * v. So this address is that of
     * the scales of the unit's token minus 16 * row_end. */
    const uint8_t *scales;
    /* row_end: the first vector that comes from `scales`, not from `row`. copy_end: the first
     * vector that is not copied. */
    int32_t row_end, copy_end;
    /* vector: index of the first vector of the next piece to copy. pieces_left: number of
     * pieces of the unit that have not been copied. */
    int32_t vector, pieces_left;
    /* the first token after the running round */
    int32_t round_end;

    __device__ __forceinline__ PieceFeed(const PackedMove &move, const WorkWalk &first,
                                         int32_t end, const uint8_t *memory)
        : m(move), ring(memory), work{m, end, false, false}, walk(first), round_end(end)
    {
        open_unit();
    }
    /* Prepares to copy the pieces of the unit at `walk`. The pieces are not copied if they are
     * in host memory, or if this rank only forwards them. */
    __device__ __forceinline__ void open_unit()
    {
        const p2p_dispatch_job &job = m.job;
        const Pieces pieces(m, walk);
        const int32_t token = token_of(m, walk);
        const bool in = token < (pieces.is_own ? min(round_end, job.num_tokens) : round_end);
        vector = pieces.first * V * WARP;
        pieces_left = max(pieces.count, 1);
        row_end = copy_end = m.shape.vectors;
        if (pieces.is_own && OwnPiece::QUANTIZED) row_end = copy_end = m.own_shape.vectors;
        row = scales = NULL;
        if (!in || pieces.count <= 0 || is_forward_role(m, walk)) return;
        if (!pieces.is_own) {
            row = (const uint8_t *)staged_row(
                m.op.inbox[rank_of_role(job.plan.self, source_role(m, walk))],
                token - m.round_begin, m.shape.vectors);
            if (is_host_memory(m.op, row)) row = NULL;
            return;
        }
        row = job.tokens + row_offset(token, m.own_shape);
        if (OwnPiece::QUANTIZED) return;
        row_end = m.row_vectors;
        scales = job.scales + (int64_t)token * job.scale_bytes - (int64_t)row_end * 16;
        if (!job.scales_aligned) copy_end = row_end;
    }
    /* Starts to copy one more piece. After the last piece of a unit, moves to the next unit. */
    __device__ __forceinline__ void copy_next()
    {
        if (row) {
#pragma unroll
            for (int v = 0; v < V; v++) {
                const int32_t at = vector + v * WARP + lane_id();
                if (at < copy_end)
                    copy_again(ring.memory + ring.next + v * WARP * 16,
                               (at < row_end ? row : scales) + (int64_t)at * 16);
            }
            vector += V * WARP;
        }
        ring.commit_piece();
        if (--pieces_left) return;
        walk.next_unit(m.stride, work);
        open_unit();
    }
    /* Starts to copy one more piece. Then waits for the oldest piece of the ring and reads it
     * into q. `piece`: index of the oldest piece in its row. `shape`: the shape of this row. */
    __device__ __forceinline__ void read_piece(uint4 (&q)[V], int piece, const RowShape &shape)
    {
        copy_next();
        ring.read_piece(q, piece * V * WARP, shape);
    }
    /* Discards the next `pieces` pieces of the ring, because their unit does not need them. */
    __device__ __forceinline__ void skip_pieces(int pieces)
    {
        for (; pieces > 0; pieces--) {
            copy_next();
            ring.wait_next();
        }
    }
    /* Reads piece i of `token`, a token of this rank, from the ring. Unaligned scales are read
     * from memory, because the ring copies only aligned vectors. */
    __device__ __forceinline__ void read_own_piece(JoinedPiece &piece, int32_t token, int i)
    {
        read_piece(piece.q, i, m.shape);
        piece.complete_scales(m, token, i);
    }
    /* Reads the elements of piece i of this rank's token from the ring, and quantizes them. */
    __device__ __forceinline__ void read_own_piece(QuantizedPiece &piece, int32_t, int i)
    {
        uint4 raw[V];
        copy_next();
        ring.wait_next();
        __syncwarp(); /* this lane reads vectors that other lanes have copied */
#pragma unroll
        for (int v = 0; v < V; v++) {
            const int32_t at = QuantizedPiece::vector_of(v);
            const bool in = i * V * WARP + at < m.own_shape.vectors;
            raw[v] = load_shared(ring.memory + ring.next + (at - lane_id()) * 16);
            if (!in) raw[v] = make_uint4(0, 0, 0, 0);
        }
        __syncwarp(); /* all lanes must have read before any lane copies to this buffer again */
        piece.make_raw(m, raw);
    }
};

/* Loads piece i of `token`, a token of this rank, directly from memory, not through the ring
 * buffer. */
template <class OwnPiece, bool FAST>
__device__ __forceinline__ void load_own_piece(const PackedMove &m, int32_t token, int i,
                                               OwnPiece &piece)
{
    uint4 raw[V];
    if (!FAST) {
        piece.load_piece(m, token, i);
        return;
    }
    OwnPiece::load_raw(m, token, i, raw);
    piece.make_raw(m, raw);
}

/* Sets `piece` to piece i of `token`, a token of this rank. `copied`: true if the piece is in
 * the ring of `feed`. */
template <class OwnPiece, bool FAST>
__device__ __forceinline__ void get_piece(const PackedMove &m, int32_t token, int i,
                                          bool copied, PieceFeed<OwnPiece> &feed,
                                          OwnPiece &piece)
{
    if (copied)
        feed.read_own_piece(piece, token, i);
    else
        load_own_piece<OwnPiece, FAST>(m, token, i, piece);
}

/* Processes a unit that sends pieces of one of this rank's tokens to every peer that needs it.
 * `word`: in lane k, choice k of the token (read_ahead()). */
template <class OwnPiece, bool FAST>
__device__ __forceinline__ void send_unit(const PackedMove &m, const UnitWalk &walk,
                                          uint64_t word, PieceFeed<OwnPiece> &feed)
{
    const int32_t token = m.round_begin + walk.step;
    const Pieces pieces(m, walk);
    RankMask peers = no_ranks();
    if (token < min(feed.round_end, m.job.num_tokens))
        peers = choose_peers(m, token, walk.span == 0 && m.job.weights, word);
    if (token < min(feed.round_end, m.job.num_tokens))
        peers = choose_routes(m, token, walk.span == 0, peers);
    if (!has_any(peers) || pieces.count <= 0) {
        if (FAST) feed.skip_pieces(max(pieces.count, 1));
        return;
    }
#pragma unroll 1
    for (int i = pieces.first; i < pieces.first + pieces.count; i++) {
        OwnPiece piece;
        get_piece<OwnPiece, FAST>(m, token, i, FAST, feed, piece);
        piece.send_to_peers(m, token, i, peers);
    }
}

/* The unit `walk` moves some pieces of the row of `token`. Receives these pieces, and stores
 * them to the token's slots on this rank. In lane n, slot[0] is slot n of the token, and
 * slot[1] is slot 32 + n (-1: there is no such slot). `copied`: true if the pieces are in the
 * ring of `feed`. Returns false if the group has failed. */
template <class OwnPiece, bool FAST>
__device__ __forceinline__ bool move_pieces(const PackedMove &m, int32_t token,
                                            const UnitWalk &walk, const int32_t (&slot)[2],
                                            bool copied, PieceFeed<OwnPiece> &feed)
{
    const p2p_self &self = m.job.plan.self;
    const int role = source_role(m, walk), rank = rank_of_role(self, role);
    const Pieces pieces(m, walk);
    const bool both = m.top_k > WARP && __any_sync(ALL_LANES, slot[1] >= 0);
#pragma unroll 1
    for (int i = pieces.first; i < pieces.first + pieces.count; i++) {
        if (pieces.is_own) {
            OwnPiece piece;
            get_piece<OwnPiece, FAST>(m, token, i, copied, feed, piece);
            piece.fill_slots_of(m, i, slot[0]);
            if (both) piece.fill_slots_of(m, i, slot[1]);
            continue;
        }
        JoinedPiece piece;
        if (copied) feed.read_piece(piece.q, i, m.shape);
        if (!receive_packed_piece<OwnPiece::QUANTIZED>(m, rank, role - 1, token, i, copied,
                                                       piece.q))
            return false;
        piece.fill_slots_of(m, i, slot[0]);
        if (both) piece.fill_slots_of(m, i, slot[1]);
    }
    if (copied && pieces.count <= 0) feed.skip_pieces(1);
    return true;
}

/* Does the work of a receiving unit for one of its tokens: finds the token's slots, receives
 * the unit's pieces of the row, and stores them to the slots. The unit with the first span of
 * the row also receives the weights. `word`: this lane's word of the token's record, from
 * peek_record() or, if FLAT, peek_row(). `copied`: true if the pieces are in the ring. Returns
 * false if the group has failed. */
template <class OwnPiece, bool FAST, bool FLAT>
__device__ __forceinline__ bool receive_token(const PackedMove &m, int32_t token,
                                              const UnitWalk &walk, uint64_t word, bool copied,
                                              PieceFeed<OwnPiece> &feed)
{
    const int role = source_role(m, walk), source = role - 1;
    const int rank = rank_of_role(m.job.plan.self, role);
    const bool with_extras = FLAT && walk.span == 0;
    const bool with_weights = walk.span == 0 && m.job.weights && !with_extras;
    int32_t slot[2];
    if (!find_slots<FLAT>(m, rank, token, walk.span == 0, word, slot)) return false;
    if (!__any_sync(ALL_LANES, slot[0] >= 0)) {
        if (copied) feed.skip_pieces(max(Pieces(m, walk).count, 1));
        return true;
    }
    uint32_t weight = 0;
    FlatExtras extras;
    if (with_extras) extras = peek_extras(m, rank, source, token, 0);
    if (with_weights) weight = peek_weight(m, rank, source, token, 0, slot[0]);
    if (!move_pieces<OwnPiece, FAST>(m, token, walk, slot, copied, feed)) return false;
    if (with_extras)
        return receive_extras(m, rank, source, token, __shfl_sync(ALL_LANES, slot[0], 0),
                              extras);
    if (!with_weights) return true;
    if (!receive_weight(m, rank, source, token, 0, slot[0], weight)) return false;
    if (!__any_sync(ALL_LANES, slot[1] >= 0)) return true;
    weight = peek_weight(m, rank, source, token, 1, slot[1]);
    return receive_weight(m, rank, source, token, 1, slot[1], weight);
}

/* Forwards a piece of a row from rank `from` of another host to the ranks of this host in
 * `wants` (bit mask). Quantized pieces contain no poison, so they have no escape words. The
 * function is not inlined, because the main loop would otherwise spill registers. Returns false
 * if the group has failed. */
template <class OwnPiece>
static __device__ __noinline__ bool forward_packed(const PackedMove &m, int from, int32_t token,
                                                   int piece, uint32_t wants)
{
    return forward_piece<V, false>(m.job.plan.self, m.op, from, token - m.round_begin, piece,
                                   m.shape.vectors, wants, [&](uint8_t *heap, int source) {
                                       return OwnPiece::QUANTIZED
                                                  ? NULL
                                                  : escapes_at(m, heap, source, token, piece);
                                   });
}

/* Sends the first m.num_early_tokens tokens of this rank while the planner CTAs make the plan.
 * Only the other CTAs send. The function is not inlined, because the main loop would otherwise
 * spill registers. */
template <class OwnPiece, bool FAST>
static __device__ __noinline__ void send_early_tokens(const PackedMove m)
{
    const int planners = m.job.plan.planners, pieces = m.own_shape.pieces;
    const int warps = BLOCK / WARP, first = ((int)blockIdx.x - planners) * warps;
    if ((int)blockIdx.x < planners) return;
    for (int u = first + (int)threadIdx.x / WARP;
         u < min(m.num_early_tokens, m.job.num_tokens) * pieces;
         u += ((int)gridDim.x - planners) * warps) {
        const int32_t token = u / pieces, i = u % pieces;
        const uint64_t word = read_choice(m, token, lane_id());
        RankMask peers = choose_peers(m, token, i == 0 && m.job.weights, word);
        peers = choose_routes(m, token, i == 0, peers);
        if (!has_any(peers)) continue;
        OwnPiece piece;
        load_own_piece<OwnPiece, FAST>(m, token, i, piece);
        piece.send_to_peers(m, token, i, peers);
    }
}

/* Receives the pieces of one token of the unit's source, or of two tokens if receiving catches
 * up with sending (received_before()). `word`: this lane's word of the record of the first
 * token (read_ahead()). If the source is this rank itself, also zeroes some padding slots.
 * slab_bits: log2 of the number of slabs (one per local expert), rounded up; negative: do not
 * zero padding slots. Returns false if the group has failed. */
template <class OwnPiece, bool FAST, bool FLAT>
__device__ __forceinline__ bool receive_unit(const PackedMove &m, const UnitWalk &walk,
                                             uint64_t word, int slab_bits,
                                             PieceFeed<OwnPiece> &feed)
{
    const p2p_self &self = m.job.plan.self;
    const int rank = rank_of_role(self, source_role(m, walk));
    const int32_t begin = m.round_begin + received_before(m, walk.step);
    const int32_t stop = min(feed.round_end, m.round_begin + received_before(m, walk.step + 1));
    if (begin >= stop && FAST) feed.skip_pieces(max(Pieces(m, walk).count, 1));
    for (int32_t token = begin; token < stop; token++) {
        if (token > begin)
            word = FLAT ? peek_row(m, rank, token) : peek_record(m, rank, token, 0);
        if (!receive_token<OwnPiece, FAST, FLAT>(m, token, walk, word, FAST && token == begin,
                                                 feed))
            return false;
        if (source_role(m, walk) == self.num_ranks && slab_bits >= 0)
            for_each_padding_slot(m.plan, slab_bits, token * m.stride.spans + walk.span,
                                  m.most_tokens * m.stride.spans, [&](int32_t slot) {
                                      for (int i = 0; i < m.shape.pieces; i++)
                                          pad_packed(m, slot, i);
                                  });
    }
    return true;
}

/* Moves the rows of one round: tokens [m.round_begin, end) of every rank. `memory`: this warp's
 * ring. Returns false if the group has failed. */
template <class OwnPiece, bool FAST, bool FLAT>
__device__ __forceinline__ bool move_tokens(PackedMove &m, int32_t end, const uint8_t *memory)
{
    const auto peek = [&](int rank, int32_t token) {
        return FLAT ? peek_row(m, rank, token) : peek_record(m, rank, token, 0);
    };
    bool has_token_counts = !m.has_new_plan;
    int slab_bits = NOT_KNOWN;
    if (m.num_early_tokens) send_early_tokens<OwnPiece, FAST>(m);
    if (MANY_RANKS && !begin_finding(m, has_token_counts, end)) return false;
    WorkWalk next(m.stride);
    next.step += m.num_early_tokens;
    DispatchWork work = {m, end, true, false};
    next.begin_walk(m.stride, work);
    PieceFeed<OwnPiece> feed(m, next, end, memory);
    for (int i = 0; i < PieceFeed<OwnPiece>::RowPieces::AHEAD && FAST; i++) feed.copy_next();
    uint64_t next_word = read_ahead(m, next, peek);
    for (;;) {
        const WorkWalk walk = next;
        if (MANY_RANKS && work.failed) return false;
        const uint64_t word = next_word;
        if (m.round_begin + received_before(m, walk.step) >= feed.round_end) return true;
        next.next_unit(m.stride, work);
        next_word = read_ahead(m, next, peek);
        if (walk.role == 0) {
            send_unit<OwnPiece, FAST>(m, walk, word, feed);
            continue;
        }
        if (!has_token_counts) {
            if (!read_token_counts(m)) return false;
            feed.round_end = min(feed.round_end, m.most_tokens);
            has_token_counts = true;
        }
        if (is_forward_role(m, walk)) {
            if (!forward_unit(m, walk, feed, FAST,
                              [&](int from, int32_t its_token, int piece, uint32_t wants) {
                                  return forward_packed<OwnPiece>(m, from, its_token, piece,
                                                                  wants);
                              }))
                return false;
            continue;
        }
        if (slab_bits == NOT_KNOWN && source_role(m, walk) == m.job.plan.self.num_ranks &&
            !find_padding_slabs(m, slab_bits))
            return false;
        if (!receive_unit<OwnPiece, FAST, FLAT>(m, walk, word, slab_bits, feed)) return false;
    }
}

/* Moves all rounds. Each round moves as many tokens of each rank as fit in the staging. If the
 * kernel makes the plan, there is only one round. Returns false if the group has failed. */
template <class OwnPiece, bool FAST, bool FLAT>
__device__ __forceinline__ bool move_rounds(PackedMove &m, OpState &op, const uint8_t *memory)
{
    const int64_t round_tokens =
        P2P_ROUND_TOKENS(m.job.plan.self.at, (int64_t)m.shape.vectors * 16);
    const int32_t most = m.most_tokens;
    for (m.round_begin = 0;; m.round_begin += (int32_t)round_tokens) {
        const bool last = m.has_new_plan || m.round_begin + round_tokens >= most;
        const int32_t end = last ? most : m.round_begin + (int32_t)round_tokens;
        const bool moved = move_tokens<OwnPiece, FAST, FLAT>(m, end, memory);
        wait_copies<0>();
        if (!moved) return false;
        if (last) return true;
        if (!next_round(op)) return false;
    }
}

/* Zeroes all padding slots, unless the units of this rank's tokens have already zeroed them
 * (pads_with_tokens()). Called by all CTAs. Returns false if the group has failed. */
__device__ __forceinline__ bool pad_all(PackedMove &m)
{
    if (m.plan.header.alignment <= 1) return true;
    if (m.has_new_plan && !read_token_counts(m)) return false;
    if (pads_with_tokens(m.plan, m.stride, m.most_tokens)) return true;
    if (m.has_new_plan && !wait_for_plan(m)) return false;
    const int warps = (int)(grid_threads() / WARP), warp = (int)(grid_thread() / WARP);
    if (header_of(m)->result == EPIC_OK)
        for_each_padding_piece(m.plan, header_of(m)->owned, m.shape.pieces, warp, warps,
                               [&](int32_t slot, int piece) { pad_packed(m, slot, piece); });
    return true;
}

/* Template arguments:
 *
 *   OwnPiece   packs the rows of this rank: JoinedPiece copies rows and scales, and
 *              QuantizedPiece quantizes rows
 *   FAST       rows are aligned to 16 bytes and, if the kernel quantizes them, have elements of
 *              16 bits. Only then does PieceFeed copy pieces ahead, into a ring buffer in
 *              shared memory.
 *   WITH_PLAN  the kernel also makes the plan
 *   FLAT       the layout of the receive buffer is EPIC_FLAT */
template <class OwnPiece, bool FAST, bool WITH_PLAN, bool FLAT>
__global__ void __launch_bounds__(BLOCK, 1)
    dispatch_packed_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    wait_for_previous_kernel();
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ Planner planner;
    __shared__ Stride stride;
    const p2p_self &self = job.plan.self;
    const RowShape shape = packed_shape(job, FAST);
    const int spans = (shape.pieces + job.span - 1) / job.span;
    if (threadIdx.x == 0) stride.set_strides(job.total_warps, num_unit_roles(self), spans);
    open_plan<WITH_PLAN>(plan, job);
    if (!begin_operation(op, self, WITH_PLAN ? 0 : (uint32_t)plan.header.id, job.num_tokens,
                         WITH_PLAN ? read_capacity(job.plan) : 0, job.recv_rows))
        return;
    bool ok = make_own_plan<WITH_PLAN, FLAT>(planner, job, op, memory);
    DispatchMove move = {
        {job, op, plan, stride, shape, policy_once(), 0, (int)plan.header.top_k}};
    move.has_new_plan = WITH_PLAN;
    if (HOSTS) *move.num_forward_roles = num_forward_roles(self);
    move.num_early_tokens =
        WITH_PLAN && job.plan.planners < (int)gridDim.x ? job.num_early_tokens : 0;
    read_plan_tokens<WITH_PLAN>(move.tokens_of, plan, self);
    move.most_tokens = WITH_PLAN ? (int32_t)self.max_tokens : plan.most_tokens;
    PackedMove m = {move};
    describe_packed(m, spans);
    if (ok && (WITH_PLAN || plan.header.result == EPIC_OK))
        ok = move_rounds<OwnPiece, FAST, FLAT>(
                 m, op, memory + threadIdx.x / WARP * PieceFeed<OwnPiece>::RowPieces::BYTES) &&
             pad_all(m);
    if (ok && job.zero_tail && plan.is_valid) ok = clear_tail<FLAT>(m);
    if (finish_operation(op) && ok) clear_all<FLAT>(m);
}

static const Kernel kernels[] = {dispatch_packed_kernel<JoinedPiece, false, false, false>,
                                 dispatch_packed_kernel<JoinedPiece, false, true, false>,
                                 dispatch_packed_kernel<JoinedPiece, true, false, false>,
                                 dispatch_packed_kernel<JoinedPiece, true, true, false>,
                                 dispatch_packed_kernel<QuantizedPiece, false, false, false>,
                                 dispatch_packed_kernel<QuantizedPiece, false, true, false>,
                                 dispatch_packed_kernel<QuantizedPiece, true, false, false>,
                                 dispatch_packed_kernel<QuantizedPiece, true, true, false>,
                                 dispatch_packed_kernel<JoinedPiece, false, false, true>,
                                 dispatch_packed_kernel<JoinedPiece, false, true, true>,
                                 dispatch_packed_kernel<JoinedPiece, true, false, true>,
                                 dispatch_packed_kernel<JoinedPiece, true, true, true>,
                                 dispatch_packed_kernel<QuantizedPiece, false, false, true>,
                                 dispatch_packed_kernel<QuantizedPiece, false, true, true>,
                                 dispatch_packed_kernel<QuantizedPiece, true, false, true>,
                                 dispatch_packed_kernel<QuantizedPiece, true, true, true>};

extern "C" cudaError_t p2p_load_dispatch_packed(void)
{
    return load_kernels(kernels, memory_bytes(planner_most_bytes()));
}

extern "C" cudaError_t p2p_launch_dispatch_packed(const p2p_dispatch_job *job, int num_sms,
                                                  cudaStream_t stream)
{
    const bool fast = job->aligned && (!job->quantize || job->type != EPIC_F32);
    const p2p_dispatch_job copy =
        deal_dispatch(*job, p2p_packed_bytes(job->row_bytes, job->scale_bytes), num_sms);
    const Kernel kernel = kernels[(job->flat != 0) * 8 + (job->quantize != 0) * 4 + fast * 2 +
                                  (copy.plan.planners > 0)];
    return launch_dispatch(kernel, copy, num_sms, stream);
}
