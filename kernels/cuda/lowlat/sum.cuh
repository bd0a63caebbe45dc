/* SPDX-License-Identifier: Apache-2.0 */
/* The units of work of combine for few tokens, for aligned rows whose partial sums are added in
 * the order of ranks. A partial sum is the sum of weight * row over a token's slots on one
 * rank. A unit of work is one piece of a token's row. A piece has one 16-byte vector per lane
 * (512 bytes in all). There are two types of units:
 *
 *   send_sum      for a token of a peer: adds the token's rows on this rank, and stores this
 *                 partial sum to the peer's staging (the memory into which peers store rows)
 *   receive_sum   for a token of this rank: adds the token's rows on this rank, polls the
 *                 peers' partial sums, adds all partial sums in the order of ranks, and stores
 *                 the result to out
 *
 * The results are bit-identical to those of combine/plain.cuh. Template argument EXACT: a row
 * consists of whole pieces, so every lane's vector is inside the row. */
#ifndef EPIC_LOWLAT_SUM_CUH
#define EPIC_LOWLAT_SUM_CUH

#include "cuda/combine/plain.cuh"
#include "cuda/lowlat/lowlat.cuh"

/* maximum number of rows of a token that a warp loads together, so that the loads overlap */
#define LOWLAT_LOADED_ROWS 8

/* Rows that the warp has loaded and will add. */
struct SlotRows {
    /* this lane's 16-byte vector of each row */
    uint4 q[LOWLAT_LOADED_ROWS];
    float weight; /* lane n has the weight of row n of the token */
};

/* Returns the index of this lane's vector among the vectors of the row. */
__device__ __forceinline__ int32_t vector_of(const Unit &u)
{
    return u.piece * WARP + lane_id();
}

/* Returns whether this lane's vector is inside the row; the last piece may be shorter. */
template <bool EXACT>
__device__ __forceinline__ bool in_row(const CombineState &c, const Unit &u)
{
    return EXACT || vector_of(u) < c.shape.vectors;
}

/* Loads up to LOWLAT_LOADED_ROWS rows of the unit's token, from row `from` on. `count`: number
 * of rows that the token has on this rank. In lane n, u.slot is the slot of row n. Each lane
 * loads its own vector of each row. */
template <bool EXACT>
__device__ __forceinline__ void load_slot_rows(const CombineState &c, SlotRows &rows,
                                               const Unit &u, int count, int from)
{
    const uint8_t *first = c.job.rows + vector_of(u) * 16;
#pragma unroll
    for (int r = 0; r < LOWLAT_LOADED_ROWS; r++) {
        if (from + r >= count) continue;
        const int32_t s = __shfl_sync(ALL_LANES, u.slot, from + r);
        rows.q[r] = in_row<EXACT>(c, u) ? load_once(first + row_offset(s, c.shape), c.policy)
                                        : make_uint4(0, 0, 0, 0);
    }
}

/* Adds weight * row to acc for each loaded row. `from`: index of the first loaded row. `count`:
 * number of rows that the token has on this rank, loaded or not. */
template <class ROW>
__device__ __forceinline__ void add_loaded(const SlotRows &rows, float (&acc)[1][ROW::N],
                                           int count, int from)
{
#pragma unroll
    for (int r = 0; r < LOWLAT_LOADED_ROWS; r++) {
        if (from + r >= count) continue;
        const float w = __shfl_sync(ALL_LANES, rows.weight, from + r);
        float x[ROW::N];
        ROW::unpack_floats(rows.q[r], x);
#pragma unroll
        for (int i = 0; i < ROW::N; i++) acc[0][i] = __fmaf_rn(w, x[i], acc[0][i]);
    }
}

/* Returns whether the slots of the unit's token are in the lowest lanes, as in every valid
 * plan. In an invalid plan they might be anywhere. */
__device__ __forceinline__ bool has_slots_in_low_lanes(const Unit &u)
{
    const uint32_t lanes = __ballot_sync(ALL_LANES, u.slot >= 0);
    return (lanes & (lanes + 1)) == 0;
}

__device__ __forceinline__ int num_slots_of(const Unit &u)
{
    return __popc(__ballot_sync(ALL_LANES, u.slot >= 0));
}

/* Loads the weights of all rows of the unit's token on this rank, and its first
 * LOWLAT_LOADED_ROWS rows. */
template <bool EXACT>
__device__ __forceinline__ void load_unit_rows(const CombineState &c, SlotRows &rows,
                                               const Unit &u)
{
    rows.weight = read_slot_weight(c, u.slot);
    load_slot_rows<EXACT>(c, rows, u, num_slots_of(u), 0);
}

/* Returns this rank's partial sum for the unit: the sum of weight * row over the `count` slots
 * of the unit's token, in ascending order of k. The caller has loaded the first
 * LOWLAT_LOADED_ROWS rows. */
template <class ROW, bool EXACT>
__device__ __forceinline__ uint4 sum_loaded(const CombineState &c, SlotRows &rows,
                                            const Unit &u, int count)
{
    float acc[1][ROW::N];
    clear_sums(acc);
    add_loaded<ROW>(rows, acc, count, 0);
#pragma unroll 1
    for (int from = LOWLAT_LOADED_ROWS; from < count; from += LOWLAT_LOADED_ROWS) {
        load_slot_rows<EXACT>(c, rows, u, count, from);
        add_loaded<ROW>(rows, acc, count, from);
    }
    return ROW::pack_floats(acc[0]);
}

/* Stores this rank's partial sum for unit u, one piece of a peer's token, to the peer's
 * staging. In dispatch_backward (with slot_floats), the call for the token's first piece also
 * sends the gradients of the slots' weights. The caller has loaded `rows`. */
template <class ROW, bool EXACT>
__device__ __forceinline__ void send_sum(const CombineState &c, SlotRows &rows, const Unit &u)
{
    const p2p_self &self = c.job.self;
    const int rank = peer_of_role(c, u.role), count = num_slots_of(u);
    if (!count) return;
    const uint4 node = sum_loaded<ROW, EXACT>(c, rows, u, count);
    if (in_row<EXACT>(c, u))
        store_relaxed(staged_row(c.op.outbox[rank], u.token, c.shape.vectors) + vector_of(u),
                      node);
    /* index of this rank among the peer's sources (lowlat/dispatch_units.cuh) */
    const int source = self.num_ranks - 2 - u.role;
    if (u.piece == 0 && c.job.slot_floats)
        send_floats(c, rank, u.token, floats_base(self, c.op, self.heap[rank], source));
}

template <class ROW> __device__ __forceinline__ void add_to(float (&total)[ROW::N], uint4 q)
{
    float x[ROW::N];
    ROW::unpack_floats(q, x);
#pragma unroll
    for (int e = 0; e < ROW::N; e++) total[e] += x[e];
}

/* Adds the partial sums of all ranks in the bit mask `ranks` to total, in the order of ranks.
 * `own`: this rank's partial sum. Polls AT_ONCE partial sums of peers together. When these
 * partial sums have arrived, stores poison (the mark of a word that has not arrived) in their
 * place in staging. Returns false if the group has failed. */
template <class ROW, bool EXACT, int AT_ONCE>
__device__ __forceinline__ bool add_by_rank(const CombineState &c, const Unit &u,
                                            uint32_t ranks, uint4 own, float (&total)[ROW::N])
{
    const bool in = in_row<EXACT>(c, u);
    while (ranks) {
        uint4 q[AT_ONCE], *from[AT_ONCE];
        int rank[AT_ONCE], late = -1;
        bool is_peer[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            rank[i] = __ffs(ranks) - 1;
            ranks &= ranks - 1;
            is_peer[i] = rank[i] >= 0 && rank[i] != c.job.self.rank;
            if (is_peer[i])
                from[i] =
                    staged_row(c.op.inbox[rank[i]], u.token, c.shape.vectors) + vector_of(u);
            q[i] = own;
        }
        const bool ok = wait_warp(c.op, late, P2P_PHASE_ROW, [&] {
            late = -1;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (is_peer[i] && in) q[i] = load_relaxed(from[i]);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (is_peer[i] && in && has_poison(q[i])) late = rank[i];
            return __all_sync(ALL_LANES, late < 0) != 0;
        });
        if (!ok) return false;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (is_peer[i] && in) store_in_place(from[i], poison_vector());
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (rank[i] >= 0) add_to<ROW>(total, q[i]);
    }
    return true;
}

/* Adds the partial sums of all ranks for unit u, one piece of a token of this rank, and stores
 * the sum to the output. In dispatch_backward (with choice_floats), the call for the token's
 * first piece also receives the gradients of the choices' weights. The caller has loaded
 * `rows`. Returns false if the group has failed. */
template <class ROW, bool EXACT, int AT_ONCE>
__device__ __forceinline__ bool receive_sum(const CombineState &c, SlotRows &rows,
                                            const Unit &u)
{
    const int count = num_slots_of(u);
    uint4 own = make_uint4(0, 0, 0, 0);
    uint32_t ranks = __reduce_or_sync(ALL_LANES, u.ranks >= 0 ? 1u << u.ranks : 0);
    float total[1][ROW::N];
    clear_sums(total);
    if (count)
        own = sum_loaded<ROW, EXACT>(c, rows, u, count);
    else
        ranks &= ~(1u << c.job.self.rank);
    if (!add_by_rank<ROW, EXACT, AT_ONCE>(c, u, ranks, own, total[0])) return false;
    if (in_row<EXACT>(c, u))
        store_once(c.job.out + row_offset(u.token, c.shape) + vector_of(u) * 16,
                   ranks ? ROW::pack_floats(total[0]) : make_uint4(0, 0, 0, 0), c.policy);
    return !(u.piece == 0 && c.job.choice_floats) || receive_floats(c, u.token);
}

#endif
