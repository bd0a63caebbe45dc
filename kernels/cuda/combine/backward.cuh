/* SPDX-License-Identifier: Apache-2.0 */
/* Code that both variants of combine_backward (backward_stream.cuh and backward_plain.cuh) use.
 * d_out is the gradient of combine's output: one row per token. The gradient of a slot's weight
 * is the dot product of the token's row of d_out and the slot's row in `rows`. A warp computes
 * this product for one block of 1024 elements (one piece) and stores the result in `parts`, an
 * array in the heap of this rank. Later another warp adds the results of all blocks.
 *
 * A *choice* is a token and one of its top_k experts. "The n-th choice on this rank" is the
 * n-th (from 0, in ascending order of k) of those choices of a token whose experts are on this
 * rank. */
#ifndef EPIC_COMBINE_BACKWARD_CUH
#define EPIC_COMBINE_BACKWARD_CUH

#include "cuda/combine/dot.cuh"
#include "cuda/combine/slots.cuh"
#include "cuda/common/quantize.cuh"
#include "cuda/dispatch/moving.cuh"

typedef RowMove<p2p_combine_backward_job> BackwardMove;

/* In `parts`, each dot product has one word per block. Returns the address of the first of
 * these words, for the n-th choice that a token of `rank` has on this rank. */
__device__ __forceinline__ uint32_t *dot_part_of(const BackwardMove &m, int rank, int32_t token,
                                                 int n)
{
    const p2p_self &self = m.job.self;
    return (uint32_t *)(m.op.heap + self.at.parts) + rank * self.at.part_words +
           ((int64_t)TOKEN_INDEX(m, token) * m.top_k + n) * m.shape.pieces;
}

/* Returns the n-th slot that a token of `rank` has on this rank. Returns -1 if there is no such
 * slot, or if the token belongs to an earlier round. */
__device__ __forceinline__ int32_t read_slot(const BackwardMove &m, int rank, int32_t token,
                                             int n)
{
    int32_t slot = -1;
    if (token >= m.round_begin && token < m.plan.header.tokens_of[rank] && n < m.top_k)
        slot = __ldg(m.plan.records + record_index(m.job.self, rank, token, m.top_k) + n);
    return slot;
}

/* Returns the rank to which choice k of this rank's token goes, or -1 if it goes to no rank. */
__device__ __forceinline__ int32_t read_rank(const BackwardMove &m, int32_t token, int k)
{
    int32_t rank = -1;
    if (token < m.job.num_tokens && k < m.top_k)
        rank = __ldg(m.plan.rank_of + (int64_t)token * m.top_k + k);
    return rank;
}

/* Loads this lane's vectors of one piece of d_out for a token of this rank. `vector`: index in
 * the row of the piece's first vector. */
template <class ROW, int V>
__device__ __forceinline__ void load_own(const BackwardMove &m, int32_t token, int32_t vector,
                                         uint4 (&x)[V])
{
    load_piece_again<V, false>(m.job.d_out + row_offset(token, m.shape), vector, m.shape, x,
                               ROW::MINUS_ZERO);
}

/* Returns a bit mask of the peers to which choices of a token go. `choice`: the rank to which
 * this lane's choice goes, or -1. Called by a whole warp. */
__device__ __forceinline__ RankMask peers_of(const BackwardMove &m, int32_t choice)
{
    RankMask touched = ranks_of_lanes(choice);
    remove_rank(touched, m.job.self.rank);
    return touched;
}

/* Stores a piece of d_out to the staging of each peer in `peers` (bit mask). For a peer on
 * another host, stores it to the outbox; the caller must then call post_put_pieces(). Called by
 * a whole warp. */
template <class ROW, int V, bool EXACT>
__device__ __forceinline__ void send_to_peers(const BackwardMove &m, int32_t token,
                                              int32_t vector, RankMask peers, uint4 (&x)[V])
{
    const p2p_self &self = m.job.self;
#pragma unroll
    for (int v = 0; v < V; v++) x[v] = replace_poisons(x[v], ROW::NAN_WORD);
#pragma unroll 1
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        if (!has_rank(peers, rank)) continue;
        send_piece<V, EXACT>(
            staged_row(m.op.outbox[rank], token - m.round_begin, m.shape.vectors), vector,
            m.shape.vectors, x);
    }
}

/* Sets the vectors after the end of the row to -0, because adding -0 does not change a dot
 * product. `vector`: index in the row of the piece's first vector. */
template <class ROW, int V, bool EXACT>
__device__ __forceinline__ void fill_end(const BackwardMove &m, int32_t vector, uint4 (&x)[V])
{
    const uint32_t fill = ROW::MINUS_ZERO;
#pragma unroll
    for (int v = 0; v < V; v++)
        if (!EXACT && vector + v * WARP + lane_id() >= m.shape.vectors)
            x[v] = make_uint4(fill, fill, fill, fill);
}

/* Reads this lane's vectors of a piece of d_out for a token of `rank`. If the token is this
 * rank's, reads them from the caller's array. If the token is a peer's, waits until the piece
 * has arrived in staging, and stores poison there for the next use. Called by a whole warp.
 * Returns false if the group has failed. */
template <class ROW, int V>
__device__ __forceinline__ bool receive_d_out(const BackwardMove &m, int32_t token,
                                              int32_t vector, int rank, uint4 (&x)[V])
{
    if (rank == m.job.self.rank) {
        load_own<ROW, V>(m, token, vector, x);
        return true;
    }
    uint4 *staged = staged_row(m.op.inbox[rank], token - m.round_begin, m.shape.vectors);
    if (!receive_piece<V, false>(m.op, relay_of(m.op, rank), staged, vector, m.shape.vectors,
                                 false, x))
        return false;
    poison_piece<V, false>(staged, vector, m.shape.vectors);
    fill_end<ROW, V, false>(m, vector, x);
    return true;
}

/* Finishes the dot products (gradients of weights) for token `token` of every rank. A dot
 * product has one part for each block of 1024 elements. The warp that received the block has
 * stored this part in `parts`. For each slot of these tokens, one lane waits for the parts,
 * adds them in ascending order, and stores the sum to d_slot_weights. Then it overwrites the
 * parts with poison for the next use. Called by a whole warp. Returns false if the group has
 * failed. */
__device__ __forceinline__ bool add_dot_parts(const BackwardMove &m, int32_t token)
{
    const int entries = m.job.self.num_ranks * m.top_k;
    for (int begin = 0; begin < entries; begin += WARP) {
        const int i = begin + lane_id();
        int rank = 0, n = i;
        /* Compute rank = i / top_k by subtraction, because a division would wait for earlier
         * stores. */
        for (; n >= m.top_k; n -= m.top_k) rank++;
        const int32_t slot = i < entries ? clamp_slot(m, read_slot(m, rank, token, n)) : -1;
        if (!__any_sync(ALL_LANES, slot >= 0)) continue;
        uint32_t *part = dot_part_of(m, slot >= 0 ? rank : 0, token, slot >= 0 ? n : 0);
        float sum = 0.0f;
        for (int piece = 0; piece < m.shape.pieces; piece += 8) {
            /* Poll only the last of eight words (blocks). When it has arrived, read all eight.
             * To poll all eight would take memory bandwidth that the rows need. */
            const int last = min(piece + 8, m.shape.pieces) - 1;
            uint32_t words[8], word = slot >= 0 ? POISON : 0;
            bool ok = wait_warp(m.op, -1, P2P_PHASE_GRID, [&] {
                if (word == POISON) word = load_relaxed(part + last);
                return __any_sync(ALL_LANES, word == POISON) == 0;
            });
            ok = ok && wait_warp(m.op, -1, P2P_PHASE_GRID, [&] {
                     bool missing = false;
#pragma unroll
                     for (int p = 0; p < 8; p++)
                         words[p] = slot >= 0 && piece + p < m.shape.pieces
                                        ? load_relaxed(part + piece + p)
                                        : 0;
#pragma unroll
                     for (int p = 0; p < 8; p++) missing |= words[p] == POISON;
                     return __any_sync(ALL_LANES, missing) == 0;
                 });
            if (!ok) return false;
#pragma unroll
            for (int p = 0; p < 8; p++) {
                if (piece + p >= m.shape.pieces || slot < 0) continue;
                const float x = __uint_as_float(words[p]);
                sum = piece + p ? sum + x : x;
                part[piece + p] = POISON;
            }
        }
        if (slot >= 0) m.job.d_slot_weights[slot] = sum;
    }
    return true;
}

__device__ __forceinline__ QuantizedRows quantized_rows(const p2p_combine_backward_job &job)
{
    return {job.d_rows,      job.d_rows_scales,        job.quantized_bytes,
            job.scale_bytes, job.quantized_whole != 0, job.scales_in_words != 0};
}

/* Quantizes weight * x, and stores it as piece `number` of the row of a slot. Each lane
 * computes the scale of one block of elements. `largest`: the maximum absolute value of x in
 * this lane's block, as the bits of a float (find_largest()). Called by a whole warp. */
template <class ROW, int V>
__device__ __forceinline__ void
store_scaled_quantized(const BackwardMove &m, int32_t slot, int number, float weight,
                       const float (&x)[V][ROW::N], uint32_t largest)
{
    const uint32_t how = m.job.quantize;
    const BlockScale mine = scale_of<V>(largest, weight, how);
    Quantized<V, ROW::N> piece;
    piece.scales = mine.word;
#pragma unroll
    for (int v = 0; v < V; v++) {
        float y[ROW::N];
#pragma unroll
        for (int i = 0; i < ROW::N; i++) y[i] = __fmul_rn(weight, x[v][i]);
        quantize_vector<false, V, ROW::N>(piece, v, y, mine, how);
    }
    store_quantized<V, ROW::N>(quantized_rows(m.job), slot, number, piece, m.policy);
}

/* For all slots from `first` on, zeroes the row of d_rows, the scales of this row, and the
 * element of d_slot_weights. Each of `threads` threads calls it with its own index `thread`. */
template <bool QUANTIZE>
static __device__ void zero_slots(const BackwardMove &m, int64_t first, int64_t thread,
                                  int64_t threads)
{
    const p2p_combine_backward_job &job = m.job;
    const int64_t row_bytes = QUANTIZE ? job.quantized_bytes : m.shape.row_bytes;
    if (first >= job.num_rows) return;
    zero_rows(job.d_rows, row_bytes, first, job.num_rows, thread, threads);
    if (QUANTIZE)
        zero_rows(job.d_rows_scales, job.scale_bytes, first, job.num_rows, thread, threads);
    zero_floats(job.d_slot_weights, first, job.num_rows, thread, threads);
}

/* Zeroes one piece of a padding slot in d_rows. For piece 0, also zeroes the slot's element of
 * d_slot_weights. Called by a whole warp. */
template <int V, bool EXACT, bool QUANTIZE>
__device__ __forceinline__ void pad_piece(const BackwardMove &m, int32_t slot, int piece)
{
    if ((uint32_t)slot >= (uint32_t)m.job.num_rows) return;
    if (QUANTIZE)
        store_quantized<V, 32 / V>(quantized_rows(m.job), slot, piece, {}, m.policy);
    else
        zero_piece<V, EXACT>(m.job.d_rows + row_offset(slot, m.shape), piece * V * WARP,
                             m.shape, m.policy);
    if (piece == 0 && lane_id() == 0 && m.job.d_slot_weights) m.job.d_slot_weights[slot] = 0.0f;
}

/* Zeroes all padding slots, unless do_extra_work() has already zeroed them
 * (pads_with_tokens()). Called by all CTAs. */
template <int V, bool QUANTIZE> __device__ __forceinline__ void pad_all(const BackwardMove &m)
{
    const int warps = (int)(grid_threads() / WARP), warp = (int)(grid_thread() / WARP);
    if (!pads_with_tokens(m.plan, m.stride, m.plan.most_tokens))
        for_each_padding_piece(
            m.plan, m.plan.header.owned, m.shape.pieces, warp, warps,
            [&](int32_t slot, int piece) { pad_piece<V, false, QUANTIZE>(m, slot, piece); });
}

/* Called after a unit has received span `span` of `token`, a token of this rank. Does the extra
 * work of this unit. Every such unit zeroes some padding slots. One unit of each token also
 * finishes the dot products of token `token` - lag of every rank. `end`: the round ends before
 * this token. Returns false if the group has failed. */
template <int V, bool EXACT, bool QUANTIZE>
__device__ __forceinline__ bool do_extra_work(const BackwardMove &m, int span, int32_t token,
                                              int32_t end)
{
    const int32_t finished_token = token - m.job.lag;
    const int spans = m.stride.spans;
    /* Several units receive spans of a token, but only one of them finishes the dot products. A
     * hash of the token selects the span of this unit, so that all warps get an equal share of
     * this work. */
    const int finishing_span =
        (int)__umulhi((uint32_t)finished_token * 0x9e3779b9u, (uint32_t)spans);
    if (token >= m.round_begin && token < end &&
        pads_with_tokens(m.plan, m.stride, m.plan.most_tokens))
        for_each_padding_slot(m.plan, m.plan.slab_bits, token * spans + span,
                              m.plan.most_tokens * spans, [&](int32_t slot) {
                                  for (int i = 0; i < m.shape.pieces; i++)
                                      pad_piece<V, EXACT, QUANTIZE>(m, slot, i);
                              });
    return finished_token < m.round_begin || !m.job.d_slot_weights || span != finishing_span ||
           add_dot_parts(m, finished_token);
}

/* Returns the role of a unit, which selects its work. 0: send a token of this rank. n > 0:
 * receive a token of the rank that is n above this rank (rank_of_role()). -n (only with
 * relays): forward rows from another host to ranks of this host. The index of the other host is
 * (this host's index + n) modulo the number of hosts. */
__device__ __forceinline__ int role_of(const BackwardMove &m, const UnitWalk &walk)
{
    if (!HOSTS) return walk.role;
    const int handing = num_forward_roles(m.job.self);
    return walk.role > handing ? walk.role - handing : -walk.role;
}

__device__ __forceinline__ bool is_forward_role(int role)
{
    return HOSTS && role < 0;
}

/* Finds the units that have work, for a WorkWalk. `end`: the round ends before this token. */
struct BackwardWork {
    const BackwardMove &m;
    int32_t end;

    static __device__ __forceinline__ int first_role(int group)
    {
        return first_role_of_group(group);
    }
    /* Units that receive a peer's token have work if the token has a slot on this rank. Units
     * that receive this rank's tokens always have work, because they also zero padding slots
     * and finish dot products. */
    __device__ __forceinline__ uint32_t operator()(const UnitWalk &walk, int group) const
    {
        const p2p_self &self = m.job.self;
        const int32_t token = m.round_begin + walk.step - m.job.lag;
        const int forwards = num_forward_roles(self);
        const int role = first_role(group) + lane_id(), source = role - forwards;
        if (group == 0 || token - m.job.lag >= end) return 1;
        bool has_work = source == self.num_ranks;
        if (role <= forwards) has_work = token >= m.round_begin && token < end;
        if (source > 0 && source < self.num_ranks)
            has_work = token < end && read_slot(m, rank_of_role(self, source), token, 0) >= 0;
        return __ballot_sync(ALL_LANES, has_work);
    }
};

/* Loads the word of the plan that a unit needs first. The function is called while the warp
 * works on the preceding unit. If the unit sends a token, lane k loads the rank to which choice
 * k goes. If the unit receives a token, lane n loads the token's n-th slot on this rank. */
__device__ __forceinline__ int32_t read_ahead(const BackwardMove &m, const UnitWalk &walk)
{
    const int32_t sent = m.round_begin + walk.step;
    const int role = role_of(m, walk);
    if (is_forward_role(role)) return -1;
    return role == 0
               ? read_rank(m, sent, lane_id())
               : read_slot(m, rank_of_role(m.job.self, role), sent - m.job.lag, lane_id());
}

/* Returns a bit mask of the ranks to which this rank itself sends its token `sent`. `peers`:
 * bit mask of all ranks that need the token. Without relays (always in backend p2p), the result
 * is `peers`. With relays, the result contains the peers on this host and, for each other host
 * that needs the token, this rank's mate there. The mate forwards the token to the ranks of its
 * host (net/relay.cuh). `end`: the round ends before this token. */
__device__ __forceinline__ RankMask choose_routes(const BackwardMove &m, const UnitWalk &walk,
                                                  int32_t sent, int32_t end, RankMask peers)
{
    if (!HOSTS) return peers;
    if (sent >= min(end, m.job.num_tokens)) return no_ranks();
    return choose_routes(m.job.self, m.op, TOKEN_INDEX(m, sent), walk.span == 0, peers);
}

/* With relays: forwards the pieces [first, first + count) of a token's row to those ranks of
 * this host that need them. The row comes from this rank's mate on another host. `hosts`: the
 * distance n to the other host that role_of() describes. Called by a whole warp. Returns false
 * if the group has failed. */
template <int V>
static __device__ __noinline__ bool
forward_unit(const BackwardMove &m, int hosts, int32_t token, int32_t end, int first, int count)
{
    const p2p_self &self = m.job.self;
    const int from = wrap_rank(self.rank + hosts * ranks_per_host(self), self.num_ranks);
    uint32_t wants;
    if (token < m.round_begin || token >= min(end, m.plan.header.tokens_of[from])) return true;
    if (!wait_wants(
            m.op,
            wants_word(self, m.op, net_inbox(self), self.rank, from, TOKEN_INDEX(m, token)),
            from, wants))
        return false;
    for (int piece = first; piece < first + count && wants; piece++)
        if (!forward_piece<V, false>(self, m.op, from, token - m.round_begin, piece,
                                     m.shape.vectors, wants,
                                     [](uint8_t *, int) { return (uint32_t *)NULL; }))
            return false;
    return true;
}

#endif
