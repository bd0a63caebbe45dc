/* SPDX-License-Identifier: Apache-2.0 */
/* The slower variant of combine_backward, for rows that are not aligned to 16 bytes and for
 * top_k above 32. backward.cu describes the units of work and their order. A warp loads each
 * piece when it needs it, and not ahead of time as in backward_stream.cuh. */
#ifndef EPIC_COMBINE_BACKWARD_PLAIN_CUH
#define EPIC_COMBINE_BACKWARD_PLAIN_CUH

#include "cuda/combine/backward.cuh"

/* Receives one piece of a token's row of d_out. For each slot that the token has on this rank,
 * stores the same piece of the slot's row of d_rows, and computes one block of the slot's dot
 * product. `source`: the token belongs to the rank that is source + 1 above this rank, modulo
 * num_ranks. `slot`: this lane's slot, or -1. Called by a whole warp. Returns false if the
 * group has failed. */
template <class ROW, int V, bool QUANTIZE>
__device__ __forceinline__ bool receive_token(const BackwardMove &m, int32_t token, int piece,
                                              int source, int32_t slot)
{
    const p2p_self &self = m.job.self;
    const int rank = wrap_rank(self.rank + 1 + source, self.num_ranks);
    const int32_t vector = piece * V * WARP;
    float x[V][ROW::N];
    uint32_t largest = 0;
    bool have_x = false;
    for (int chunk = 0; chunk * WARP < m.top_k; chunk++) {
        const int n = chunk * WARP + lane_id();
        if (chunk) slot = clamp_slot(m, read_slot(m, rank, token, n));
        const float weight = read_slot_weight(m, slot);
        uint32_t lanes = __ballot_sync(ALL_LANES, slot >= 0);
        if (!lanes) break;
        if (!have_x) {
            uint4 q[V];
            if (!receive_d_out<ROW, V>(m, token, vector, rank, q)) return false;
#pragma unroll
            for (int v = 0; v < V; v++) ROW::unpack_floats(q[v], x[v]);
            if (QUANTIZE) largest = find_largest<V, ROW::N>(x, m.job.quantize);
        }
        have_x = true;
        float mine = 0.0f;
        for (; lanes; lanes &= lanes - 1) {
            const int from = __ffs(lanes) - 1;
            const int32_t s = __shfl_sync(ALL_LANES, slot, from);
            const float w = __shfl_sync(ALL_LANES, weight, from);
            uint4 y[V];
            if (QUANTIZE) {
                store_scaled_quantized<ROW, V>(m, s, piece, w, x, largest);
            } else {
#pragma unroll
                for (int v = 0; v < V; v++) y[v] = scale_vector<ROW>(w, x[v]);
                store_piece<V, false>(m.job.d_rows + row_offset(s, m.shape), vector, m.shape, y,
                                      m.policy);
            }
            if (!m.job.d_slot_weights) continue;
#pragma unroll
            for (int v = 0; v < V; v++)
                y[v] = load_row(m.job.rows + row_offset(s, m.shape),
                                vector + v * WARP + lane_id(), m.shape, m.policy);
            const float dot = add_lanes<ROW>(dot_of<ROW, V>(x, y));
            if (lane_id() == from) mine = dot;
        }
        if (m.job.d_slot_weights && slot >= 0)
            store_relaxed(dot_part_of(m, rank, token, n) + piece,
                          replace_poison(__float_as_uint(mine), F32::NAN_WORD));
    }
    return true;
}

/* Processes one round: tokens [m.round_begin, end) of every rank. Called by a whole warp.
 * Returns false if the group has failed. */
template <class ROW, int V, bool QUANTIZE>
__device__ __forceinline__ bool move_tokens(const BackwardMove &m, int32_t end)
{
    const int peers = m.job.self.num_ranks - 1;
    BackwardWork work = {m, end};
    WorkWalk walk(m.stride);
    for (walk.begin_walk(m.stride, work);; walk.next_unit(m.stride, work)) {
        const int32_t sent = m.round_begin + walk.step, token = sent - m.job.lag;
        if (token - m.job.lag >= end) return true;
        const int first = first_piece(m, walk), count = pieces_of(m, walk);
        const int32_t word = read_ahead(m, walk);
        const int role = role_of(m, walk);
        if (role == 0) {
            RankMask to = peers_of(m, word);
            if (m.top_k > WARP)
                add_ranks_of(to, peers_of(m, read_rank(m, sent, WARP + lane_id())));
            to = choose_routes(m, walk, sent, end, to);
            for (int piece = first; piece < first + count && has_any(to) && sent < end;
                 piece++) {
                uint4 x[V];
                load_own<ROW, V>(m, sent, piece * V * WARP, x);
                send_to_peers<ROW, V, false>(m, sent, piece * V * WARP, to, x);
            }
            if (sent < end)
                post_put_pieces<V>(m.job.self, m, sent - m.round_begin, first, count, to);
            continue;
        }
        if (is_forward_role(role)) {
            if (!forward_unit<V>(m, -role, token, end, first, count)) return false;
            continue;
        }
        const int source = role - 1;
        for (int piece = first; piece < first + count && token >= m.round_begin && token < end;
             piece++)
            if (!receive_token<ROW, V, QUANTIZE>(m, token, piece, source, clamp_slot(m, word)))
                return false;
        if (source == peers && !do_extra_work<V, false, QUANTIZE>(m, walk.span, token, end))
            return false;
    }
}

/* Runs all rounds. The function is not inlined, because the main loop of backward_stream.cuh,
 * in the same kernel, would otherwise spill registers. Returns false if the group has
 * failed. */
template <class ROW, bool QUANTIZE>
static __device__ __noinline__ bool move_plain(BackwardMove m, OpState &op)
{
    return for_each_round(m, op, (int64_t)m.shape.vectors * 16, [&](int32_t end) {
        return move_tokens<ROW, Dot<ROW>::V, QUANTIZE>(m, end);
    });
}

#endif
