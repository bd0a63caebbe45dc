/* SPDX-License-Identifier: Apache-2.0 */
/* The units of combine of few tokens: aligned rows, sums by rank.  Rows of a unit are asked for side
 * by side, up to eight, and those of a warp's first unit before the plan is known
 * to be what the last one was; sums and their order are those of combine_plain.cuh. */
#ifndef EPIC_FEW_SUM_CUH
#define EPIC_FEW_SUM_CUH

#include "cuda/combine_plain.cuh"
#include "cuda/few.cuh"

template <int V> struct SlotRows {
    static constexpr int MOST = 8 / V; /* of a token, on their way side by side */
    uint4 q[MOST][V];
    float weight; /* of this lane's slot */
};

/* Those of the slots whose lanes are in `lanes`, from lane `from` on. */
template <int V>
__device__ __forceinline__ void ask_rows(const Combine &c, SlotRows<V> &rows, uint32_t lanes,
                                         int from, int32_t slot, int32_t vector)
{
    const uint32_t at = (uint32_t)(vector + lane_id()) * 16;
#pragma unroll
    for (int r = 0; r < SlotRows<V>::MOST; r++) {
        if (!(lanes >> (from + r) & 1)) continue;
        const int32_t s = __shfl_sync(ALL_LANES, slot, from + r);
        const uint8_t *row = c.job.rows + row_offset(s, c.shape) + at;
#pragma unroll
        for (int v = 0; v < V; v++)
            rows.q[r][v] = vector + v * WARP + lane_id() < c.shape.vectors
                               ? load_once(row + v * WARP * 16, c.policy)
                               : make_uint4(0, 0, 0, 0);
    }
}

template <class ROW, int V>
__device__ __forceinline__ void add_asked(const SlotRows<V> &rows, float (&acc)[V][ROW::N],
                                          uint32_t lanes, int from)
{
#pragma unroll
    for (int r = 0; r < SlotRows<V>::MOST; r++) {
        if (!(lanes >> (from + r) & 1)) continue;
        const float w = __shfl_sync(ALL_LANES, rows.weight, from + r);
#pragma unroll
        for (int v = 0; v < V; v++) {
            float x[ROW::N];
            ROW::unpack(rows.q[r][v], x);
#pragma unroll
            for (int i = 0; i < ROW::N; i++) acc[v][i] = __fmaf_rn(w, x[i], acc[v][i]);
        }
    }
}

/* What is asked for at once of a unit, whose slots are known. */
template <int V>
__device__ __forceinline__ void ask_unit(const Combine &c, SlotRows<V> &rows, const Unit &u)
{
    const uint32_t lanes = __ballot_sync(ALL_LANES, u.slot >= 0);
    rows.weight = read_weight(c, u.slot);
    ask_rows<V>(c, rows, lanes, 0, u.slot, u.piece * V * WARP);
}

/* This rank's partial, in ascending k; false: there is none. */
template <class ROW, int V>
__device__ __forceinline__ bool sum_asked(const Combine &c, SlotRows<V> &rows, const Unit &u,
                                          uint4 (&node)[V][1])
{
    const uint32_t lanes = __ballot_sync(ALL_LANES, u.slot >= 0);
    float acc[V][ROW::N];
    if (!lanes) return false;
    clear_sum(acc);
    add_asked<ROW, V>(rows, acc, lanes, 0);
#pragma unroll 1
    for (int from = rows.MOST; lanes >> from; from += rows.MOST) {
        ask_rows<V>(c, rows, lanes, from, u.slot, u.piece * V * WARP);
        add_asked<ROW, V>(rows, acc, lanes, from);
        if (from + rows.MOST == WARP) break;
    }
    pack_sum<ROW, ROW, V>(node, acc);
    return true;
}

template <class ROW, int V>
__device__ __forceinline__ void send_sum(const Combine &c, SlotRows<V> &rows, const Unit &u)
{
    const p2p_self &self = c.job.self;
    const int rank = peer_of(c, u.role);
    const int32_t vector = u.piece * V * WARP;
    uint4 node[V][1];
    if (!sum_asked<ROW, V>(c, rows, u, node)) return;
    uint4 *staged =
        staged_in(c.now.outbox[rank], u.token, c.shape.vectors) + vector + lane_id();
#pragma unroll
    for (int v = 0; v < V; v++)
        if (vector + v * WARP + lane_id() < c.shape.vectors)
            store_relaxed(staged + v * WARP, node[v][0]);
    const int source = self.num_ranks - 2 - u.role; /* this rank, as the peer counts */
    if (u.piece == 0 && c.job.slot_floats)
        send_floats(c, rank, u.token, floats_of(self, c.now, self.heap[rank], source));
}

/* Adds the partials of all ranks in their order. */
template <class ROW, int V>
__device__ __forceinline__ bool add_by_rank(const Combine &c, const Unit &u, uint32_t touched,
                                            const uint4 (&own)[V][1], float (&total)[V][ROW::N])
{
    clear_sum(total);
#pragma unroll 1
    for (int place = 0; touched >> place; place += 4) {
        uint4 q[4][V][1];
        bool there[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            there[i] = touched >> (place + i) & 1;
            if (place + i == c.job.self.rank)
#pragma unroll
                for (int v = 0; v < V; v++) q[i][v][0] = own[v][0];
        }
        if (!take_partials<ROW, ROW, V>(c, u, place, there, q)) return false;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (there[i])
#pragma unroll
                for (int v = 0; v < V; v++) {
                    float x[ROW::N];
                    ROW::unpack(q[i][v][0], x);
#pragma unroll
                    for (int e = 0; e < ROW::N; e++) total[v][e] += x[e];
                }
        if (place + 4 == DEVICE_MAX_RANKS) break;
    }
    return true;
}

template <class ROW, int V>
__device__ __forceinline__ bool take_sum(const Combine &c, SlotRows<V> &rows, const Unit &u)
{
    const int32_t vector = u.piece * V * WARP;
    uint4 own[V][1];
    uint32_t touched = __reduce_or_sync(ALL_LANES, u.ranks >= 0 ? 1u << u.ranks : 0);
    if (!sum_asked<ROW, V>(c, rows, u, own)) touched &= ~(1u << c.job.self.rank);
    float total[V][ROW::N];
    if (!add_by_rank<ROW, V>(c, u, touched, own, total)) return false;
    uint8_t *row = c.job.out + row_offset(u.token, c.shape) + (vector + lane_id()) * 16;
#pragma unroll
    for (int v = 0; v < V; v++)
        if (vector + v * WARP + lane_id() < c.shape.vectors)
            store_once(row + v * WARP * 16,
                       touched ? ROW::pack(total[v]) : make_uint4(0, 0, 0, 0), c.policy);
    return !(u.piece == 0 && c.job.choice_floats) || take_floats(c, u.token);
}

#endif
