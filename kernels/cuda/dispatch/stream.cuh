/* SPDX-License-Identifier: Apache-2.0 */
/* Moves rows without scales through staging, for dispatch.cu and windows.cu. dispatch.cu
 * explains the units. The template argument Move is DispatchMove in dispatch.cu and WindowMove
 * in windows.cu. windows.cu has its own send_early(). */
#ifndef EPIC_DISPATCH_STREAM_CUH
#define EPIC_DISPATCH_STREAM_CUH

#include "cuda/dispatch/find_work.cuh"
#include "cuda/dispatch/launcher.cuh"
#include "cuda/dispatch/relay.cuh"

/* Copies the pieces of a warp's units into the warp's ring buffer in shared memory, some pieces
 * before the warp uses them. The warp then reads the pieces from the ring in the same order.
 * EXACT: rows consist of whole pieces. */
template <bool EXACT> struct PieceFeed {
    typedef PieceRing<V, EXACT> Pieces;
    const DispatchMove &m;
    Pieces ring;
    DispatchWork work;
    WorkWalk walk; /* the unit whose pieces are copied now */
    /* address of this lane's first vector of the next piece to copy; NULL: the pieces of the
     * unit are not copied */
    const uint8_t *from;
    int32_t vector;      /* index in the row of the first vector of the next piece to copy */
    int32_t pieces_left; /* number of pieces of the unit that have not been copied */
    int32_t round_end;   /* the first token after the running round */

    __device__ __forceinline__ PieceFeed(const DispatchMove &move, const WorkWalk &first,
                                         int32_t end, const uint8_t *memory)
        : m(move), ring(memory), work{m, end, false, false}, walk(first), round_end(end)
    {
        open_unit();
    }
    /* Prepares to copy the pieces of the unit at `walk`. The pieces are not copied if they are
     * in host memory, or if this rank only forwards them. Each of these pieces still uses a
     * buffer of the ring, which stays empty, so that the buffers keep the order of the
     * pieces. */
    __device__ __forceinline__ void open_unit()
    {
        const p2p_self &self = m.job.plan.self;
        const int32_t token = token_of(m, walk);
        const int role = source_role(m, walk);
        const bool staged = role > 0 && role < self.num_ranks;
        const uint8_t *row = m.job.tokens + row_offset(token, m.shape);
        if (staged)
            row = (const uint8_t *)staged_row(m.op.inbox[rank_of_role(self, role)],
                                              token - m.round_begin, m.shape.vectors);
        vector = first_piece(m, walk) * V * WARP;
        pieces_left = pieces_of(m, walk);
        from = token < (staged ? round_end : min(round_end, m.job.num_tokens))
                   ? row + lane_offset(vector)
                   : NULL;
        if (is_forward_role(m, walk) || (staged && is_host_memory(m.op, row))) from = NULL;
    }
    /* Starts to copy one more piece. After the last piece of a unit, moves to the next unit. */
    __device__ __forceinline__ void copy_next()
    {
        if (from) {
            ring.copy_piece(from, vector, m.shape, false, m.policy);
            from += Pieces::PIECE_BYTES;
            vector += V * WARP;
        }
        ring.commit_piece();
        if (--pieces_left) return;
        walk.next_unit(m.stride, work);
        open_unit();
    }
    /* Starts to copy one more piece. Then waits for the oldest piece of the ring and reads it
     * into q. its_vector: index of the first vector of the oldest piece in its row. */
    __device__ __forceinline__ void read_piece(uint4 (&q)[V], int32_t its_vector)
    {
        copy_next();
        ring.read_piece(q, its_vector, m.shape);
    }
    /* Discards the next `pieces` pieces of the ring, because their unit does not need them. */
    __device__ __forceinline__ void skip_pieces(int pieces)
    {
        for (; pieces; pieces--) {
            copy_next();
            ring.wait_next();
        }
    }
};

/* Processes a unit that sends pieces of one of this rank's tokens to every peer that needs it.
 * `word`: in lane k, choice k of the token (read_ahead()). */
template <bool EXACT>
__device__ __forceinline__ void send_unit(const DispatchMove &m, const UnitWalk &walk,
                                          uint64_t word, PieceFeed<EXACT> &feed)
{
    const int32_t token = m.round_begin + walk.step;
    const bool copied = m.shape.aligned;
    const int count = pieces_of(m, walk);
    RankMask peers = no_ranks();
    if (token < min(feed.round_end, m.job.num_tokens))
        peers = choose_peers(m, token, walk.span == 0 && m.job.weights, word);
    if (token < min(feed.round_end, m.job.num_tokens))
        peers = choose_routes(m, token, walk.span == 0, peers);
    if (!has_any(peers)) {
        if (copied) feed.skip_pieces(count);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const int piece = first_piece(m, walk) + i;
        uint4 q[V];
        if (copied)
            feed.read_piece(q, piece * V * WARP);
        else
            load_piece_again<V, EXACT>(m.job.tokens + row_offset(token, m.shape),
                                       piece * V * WARP, m.shape, q);
        send_to_peers<EXACT>(m, token, piece, peers, q);
    }
    post_put_pieces<V>(m.job.plan.self, m, token - m.round_begin, first_piece(m, walk), count,
                       peers);
}

/* Only for tokens with more than 32 choices. q is a piece of the row of `token`, a token of
 * `rank`. Stores q to all slots of the token on this rank except the first 32. If `piece` is 0,
 * also receives the weights of these slots. `source`: index of `rank` among this rank's
 * sources. Returns false if the group has failed. */
template <bool EXACT>
__device__ __forceinline__ bool fill_more_slots(const DispatchMove &m, int rank, int source,
                                                int32_t token, int piece, const uint4 (&q)[V])
{
    bool more = true;
    for (int chunk = 1; more; chunk++) {
        int32_t slot;
        const uint64_t word = peek_record(m, rank, token, chunk);
        if (!read_record(m, rank, token, chunk, piece == 0, word, slot, more)) return false;
        fill_slots<EXACT>(m, piece * V * WARP, slot, q);
        if (piece || !m.job.weights) continue;
        const uint32_t weight = peek_weight(m, rank, source, token, chunk, slot);
        if (!receive_weight(m, rank, source, token, chunk, slot, weight)) return false;
    }
    return true;
}

/* The unit `walk` moves some pieces of the row of `token`. Receives these pieces, and stores
 * them to the token's slots on this rank. `word`: this lane's word of the token's record, from
 * peek_record() or, if FLAT, peek_row(). `copied`: true if the pieces are in the ring of
 * `feed`. Returns false if the group has failed. */
template <bool EXACT, bool FLAT>
__device__ __forceinline__ bool receive_token(const DispatchMove &m, int32_t token,
                                              const UnitWalk &walk, uint64_t word, bool copied,
                                              PieceFeed<EXACT> &feed)
{
    const p2p_self &self = m.job.plan.self;
    const int role = source_role(m, walk), source = role - 1, rank = rank_of_role(self, role);
    const int first = first_piece(m, walk), count = pieces_of(m, walk);
    int32_t slot = -1;
    bool more = false;
    if (token < number_of_rank(m.tokens_of, rank)) {
        if (FLAT ? !read_row(m, rank, token, first == 0, word, slot, more)
                 : !read_record(m, rank, token, 0, first == 0, word, slot, more))
            return false;
        if (!FLAT && m.has_new_plan && first == 0 && !more) end_record(m, rank, token, 0);
    }
    if (!__any_sync(ALL_LANES, slot >= 0)) {
        if (copied) feed.skip_pieces(count);
        return true;
    }
    const bool with_extras = FLAT && first == 0;
    const bool with_weights = first == 0 && m.job.weights && !with_extras;
    uint32_t weight = 0;
    FlatExtras extras;
    if (with_extras) extras = peek_extras(m, rank, source, token, 0);
    if (with_weights) weight = peek_weight(m, rank, source, token, 0, slot);
#pragma unroll 1
    for (int piece = first; piece < first + count; piece++) {
        uint4 q[V];
        if (copied) feed.read_piece(q, piece * V * WARP);
        if (!receive_row_piece<EXACT>(m, rank, source, token, piece, copied, q)) return false;
        fill_slots<EXACT>(m, piece * V * WARP, slot, q);
        if (more && !fill_more_slots<EXACT>(m, rank, source, token, piece, q)) return false;
    }
    if (with_extras)
        return receive_extras(m, rank, source, token, __shfl_sync(ALL_LANES, slot, 0), extras);
    return !with_weights || receive_weight(m, rank, source, token, 0, slot, weight);
}

/* Forwards a piece of a row from rank `from` of another host to the ranks of this host in
 * `wants` (bit mask). The function is not inlined, because the main loop would otherwise spill
 * registers. Returns false if the group has failed. */
template <bool EXACT>
static __device__ __noinline__ bool forward_rows(const DispatchMove &m, int from, int32_t token,
                                                 int piece, uint32_t wants)
{
    return forward_piece<V, EXACT>(
        m.job.plan.self, m.op, from, token - m.round_begin, piece, m.shape.vectors, wants,
        [&](uint8_t *heap, int source) {
            return escapes_base(m.job.plan.self, m.op, heap, source) +
                   ((int64_t)TOKEN_INDEX(m, token) * m.shape.pieces + piece) * WARP;
        });
}

/* Sends the first m.num_early_tokens tokens of this rank while the planner CTAs make the plan.
 * Only the other CTAs send. The function is not inlined, because the main loop would otherwise
 * spill registers. */
template <bool EXACT>
static __device__ __noinline__ void send_early_tokens(const DispatchMove m)
{
    const int planners = m.job.plan.planners;
    const int warps = BLOCK / WARP, first = ((int)blockIdx.x - planners) * warps;
    const int units = min(m.num_early_tokens, m.job.num_tokens) * m.shape.pieces;
    if ((int)blockIdx.x < planners) return;
    for (int u = first + (int)threadIdx.x / WARP; u < units;
         u += ((int)gridDim.x - planners) * warps) {
        const int32_t token = u / m.shape.pieces, piece = u % m.shape.pieces;
        const uint64_t word = read_choice(m, token, lane_id());
        uint4 q[V];
        load_piece_again<V, EXACT>(m.job.tokens + row_offset(token, m.shape), piece * V * WARP,
                                   m.shape, q);
        const RankMask peers = choose_peers(m, token, piece == 0 && m.job.weights, word);
        if (has_any(peers)) send_to_peers<EXACT>(m, token, piece, peers, q);
    }
}

/* Like send_early_tokens(), but for backend `hosts`. A warp sends a whole span (several pieces
 * of a row) with one put, because each put has a fixed cost. */
template <bool EXACT> static __device__ __noinline__ void send_early_spans(const DispatchMove m)
{
    const int planners = m.job.plan.planners, spans = m.stride.spans;
    const int warps = BLOCK / WARP, first = ((int)blockIdx.x - planners) * warps;
    const int units = min(m.num_early_tokens, m.job.num_tokens) * spans;
    if ((int)blockIdx.x < planners) return;
    for (int u = first + (int)threadIdx.x / WARP; u < units;
         u += ((int)gridDim.x - planners) * warps) {
        const int32_t token = u / spans;
        const int begin = u % spans * m.job.span;
        const int count = min(m.job.span, m.shape.pieces - begin);
        const uint64_t word = read_choice(m, token, lane_id());
        RankMask peers = choose_peers(m, token, begin == 0 && m.job.weights, word);
        peers = choose_routes(m, token, begin == 0, peers);
        if (!has_any(peers)) continue;
        for (int piece = begin; piece < begin + count; piece++) {
            uint4 q[V];
            load_piece_again<V, EXACT>(m.job.tokens + row_offset(token, m.shape),
                                       piece * V * WARP, m.shape, q);
            send_to_peers<EXACT>(m, token, piece, peers, q);
        }
        post_put_pieces<V>(m.job.plan.self, m, token - m.round_begin, begin, count, peers);
    }
}

/* Sends the early tokens before the first unit of a round. The kernel of windows.cu sends the
 * early tokens at another time, so it has its own version of this function that does
 * nothing. */
template <bool EXACT> __device__ __forceinline__ void send_early(const DispatchMove &m)
{
    if (m.num_early_tokens && HOSTS)
        send_early_spans<EXACT>(m);
    else if (m.num_early_tokens)
        send_early_tokens<EXACT>(m);
}

/* Receives the pieces of one token of the unit's source, or of two tokens if receiving catches
 * up with sending (received_before()). `word`: this lane's word of the record of the first
 * token (read_ahead()). If the source is this rank itself, also zeroes some padding slots.
 * slab_bits: log2 of the number of slabs (one per local expert), rounded up; negative: do not
 * zero padding slots. Returns false if the group has failed. */
template <bool EXACT, bool FLAT>
__device__ __forceinline__ bool receive_unit(const DispatchMove &m, const UnitWalk &walk,
                                             uint64_t word, int slab_bits,
                                             PieceFeed<EXACT> &feed)
{
    const p2p_self &self = m.job.plan.self;
    const int rank = rank_of_role(self, source_role(m, walk));
    const int32_t begin = m.round_begin + received_before(m, walk.step);
    const int32_t stop = min(feed.round_end, m.round_begin + received_before(m, walk.step + 1));
    const bool copied = m.shape.aligned;
    if (begin >= stop && copied) feed.skip_pieces(pieces_of(m, walk));
    for (int32_t token = begin; token < stop; token++) {
        if (token > begin)
            word = FLAT ? peek_row(m, rank, token) : peek_record(m, rank, token, 0);
        if (!receive_token<EXACT, FLAT>(m, token, walk, word, copied && token == begin, feed))
            return false;
        if (source_role(m, walk) == self.num_ranks && slab_bits >= 0)
            for_each_padding_slot(m.plan, slab_bits, token * m.stride.spans + walk.span,
                                  m.most_tokens * m.stride.spans, [&](int32_t slot) {
                                      for (int i = 0; i < m.shape.pieces; i++)
                                          pad_piece<EXACT>(m, slot, i);
                                  });
    }
    return true;
}

/* Moves the rows of one round: tokens [m.round_begin, end) of every rank. `memory`: this warp's
 * ring. Returns false if the group has failed. */
template <bool EXACT, bool FLAT, class Move>
__device__ __forceinline__ bool move_tokens(Move &m, int32_t end, const uint8_t *memory)
{
    const auto peek = [&](int rank, int32_t token) {
        return FLAT ? peek_row(m, rank, token) : peek_record(m, rank, token, 0);
    };
    bool has_token_counts = !m.has_new_plan;
    int slab_bits = NOT_KNOWN;
    send_early<EXACT>(m);
    if (MANY_RANKS && !begin_finding(m, has_token_counts, end)) return false;
    WorkWalk next(m.stride);
    next.step += m.num_early_tokens;
    DispatchWork work = {m, end, true, false};
    next.begin_walk(m.stride, work);
    PieceFeed<EXACT> feed(m, next, end, memory);
    for (int i = 0; i < PieceFeed<EXACT>::Pieces::AHEAD && m.shape.aligned; i++)
        feed.copy_next();
    uint64_t next_word = read_ahead(m, next, peek);
    for (;;) {
        const WorkWalk walk = next;
        if (MANY_RANKS && work.failed) return false;
        const uint64_t word = next_word;
        if (m.round_begin + received_before(m, walk.step) >= feed.round_end) return true;
        next.next_unit(m.stride, work);
        next_word = read_ahead(m, next, peek);
        if (walk.role == 0) {
            send_unit<EXACT>(m, walk, word, feed);
            continue;
        }
        if (!has_token_counts) {
            if (!read_token_counts(m)) return false;
            feed.round_end = min(feed.round_end, m.most_tokens);
            has_token_counts = true;
        }
        if (is_forward_role(m, walk)) {
            if (!forward_unit(m, walk, feed, m.shape.aligned,
                              [&](int from, int32_t token, int piece, uint32_t wants) {
                                  return forward_rows<EXACT>(m, from, token, piece, wants);
                              }))
                return false;
            continue;
        }
        if (slab_bits == NOT_KNOWN && source_role(m, walk) == m.job.plan.self.num_ranks &&
            !find_padding_slabs(m, slab_bits))
            return false;
        if (!receive_unit<EXACT, FLAT>(m, walk, word, slab_bits, feed)) return false;
    }
}

/* Zeroes all padding slots, unless the units of this rank's tokens have already zeroed them
 * (pads_with_tokens()). Called by all CTAs. Returns false if the group has failed. */
template <bool EXACT> __device__ __forceinline__ bool pad_all(DispatchMove &m)
{
    if (m.plan.header.alignment <= 1) return true;
    if (m.has_new_plan && !read_token_counts(m)) return false;
    if (pads_with_tokens(m.plan, m.stride, m.most_tokens)) return true;
    if (m.has_new_plan && !wait_for_plan(m)) return false;
    const int warps = (int)(grid_threads() / WARP), warp = (int)(grid_thread() / WARP);
    if (header_of(m)->result == EPIC_OK)
        for_each_padding_piece(
            m.plan, header_of(m)->owned, m.shape.pieces, warp, warps,
            [&](int32_t slot, int piece) { pad_piece<EXACT>(m, slot, piece); });
    return true;
}

/* Zeroes all outputs if the plan is invalid, or if a receive buffer has too few rows. Called by
 * the CTA that finishes last. */
template <bool FLAT> __device__ __forceinline__ void clear_outputs(const DispatchMove &m)
{
    if (m.plan.is_valid && header_of(m)->result == EPIC_OK &&
        check_rows(m.job.plan.self, m.op, header_of(m), threadIdx.x == 0))
        return;
    zero_rows(m.job.recv, m.shape.row_bytes, 0, m.job.recv_rows, threadIdx.x, BLOCK);
    if (FLAT)
        clear_extras(m, 0, threadIdx.x, BLOCK);
    else
        zero_floats(m.job.slot_weights, 0, m.job.recv_rows, threadIdx.x, BLOCK);
}

/* Zeroes the tail of the receive buffer: the rows after the slots of the last local expert. The
 * caller tests whether job.zero_tail is set. Called by all CTAs. Returns false if the group has
 * failed. */
template <bool FLAT> __device__ __forceinline__ bool clear_tail(const DispatchMove &m)
{
    if (m.has_new_plan && !wait_for_plan(m)) return false;
    const int64_t first = header_of(m)->slots_of[m.job.plan.self.rank], end = m.job.recv_rows;
    if (first >= end) return true;
    zero_rows(m.job.recv, m.shape.row_bytes, first, end, grid_thread(), grid_threads());
    if (FLAT)
        clear_extras(m, first, grid_thread(), grid_threads());
    else
        zero_floats(m.job.slot_weights, first, end, grid_thread(), grid_threads());
    return true;
}

/* Moves all rounds. Each round moves as many tokens of each rank as fit in the staging. If the
 * kernel makes the plan, there is only one round. Returns false if the group has failed. */
template <bool EXACT, bool FLAT, class Move>
__device__ __forceinline__ bool move_rounds(Move &m, OpState &op, const uint8_t *memory)
{
    const int64_t round_tokens =
        P2P_ROUND_TOKENS(m.job.plan.self.at, (int64_t)m.shape.vectors * 16);
    const int32_t most = m.most_tokens;
    for (m.round_begin = 0;; m.round_begin += (int32_t)round_tokens) {
        const bool last = m.has_new_plan || m.round_begin + round_tokens >= most;
        const int32_t end = last ? most : m.round_begin + (int32_t)round_tokens;
        const bool moved = move_tokens<EXACT, FLAT>(m, end, memory);
        wait_copies<0>();
        if (!moved) return false;
        if (last) return true;
        if (!next_round(op)) return false;
    }
}

/* Values of ROWS. ROWS_ANY: rows begin at any address. ROWS_ALIGNED: rows are aligned to 16
 * bytes. ROWS_WHOLE: rows are aligned and consist of whole pieces (2 KB). */
enum { ROWS_ANY, ROWS_ALIGNED, ROWS_WHOLE };

#endif
