/* SPDX-License-Identifier: Apache-2.0 */
/* The units of combine for few tokens, for aligned rows and sums by rank. A unit is a piece of
 * one vector per lane of a token's row:
 *
 *   send_sum      token of a peer: sums the token's rows on this rank, and stores the sum (the
 *                 partial) to the peer's staging
 *   receive_sum   token of this rank: sums the token's rows on this rank, polls the peers'
 *                 partials, adds all in the order of ranks, stores the result to the output
 *
 * The rows of a unit are loaded together, up to eight. Those of a worker's first unit are
 * loaded before the plan's header has been checked. Results have the bits of combine/plain.cuh.
 * EXACT: every lane of every piece is inside the row. */
#ifndef EPIC_LOWLAT_SUM_CUH
#define EPIC_LOWLAT_SUM_CUH

#include "cuda/combine/plain.cuh"
#include "cuda/lowlat/lowlat.cuh"

#define LOWLAT_LOADED_ROWS 8 /* number of rows of a token that are loaded together */

/* Vectors of the rows of a unit, for its first LOWLAT_LOADED_ROWS slots. */
struct SlotRows {
    uint4 q[LOWLAT_LOADED_ROWS];
    float weight; /* weight of this lane's slot */
};

/* Returns the number, in the row, of this lane's vector of the unit's piece. */
__device__ __forceinline__ int32_t vector_of(const Unit &u)
{
    return u.piece * WARP + lane_id();
}

/* Returns whether this lane's vector is inside the row. */
template <bool EXACT>
__device__ __forceinline__ bool in_row(const CombineState &c, const Unit &u)
{
    return EXACT || vector_of(u) < c.shape.vectors;
}

/* Loads the unit's vectors of the rows of slots [from, from + LOWLAT_LOADED_ROWS), out of
 * `count` slots. */
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

/* acc += weight * row, for the loaded rows. The first loaded row is that of slot number
 * `from`. */
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

/* Returns whether the unit's slots are in the lowest lanes, as in every valid record. Before
 * the plan's header has been checked, a record may contain anything. */
__device__ __forceinline__ bool has_slots_in_low_lanes(const Unit &u)
{
    const uint32_t lanes = __ballot_sync(ALL_LANES, u.slot >= 0);
    return (lanes & (lanes + 1)) == 0;
}

/* Returns the number of slots that the unit's token has on this rank. */
__device__ __forceinline__ int num_slots_of(const Unit &u)
{
    return __popc(__ballot_sync(ALL_LANES, u.slot >= 0));
}

/* Loads the weights and the first rows of a unit whose slots are known. */
template <bool EXACT>
__device__ __forceinline__ void load_unit_rows(const CombineState &c, SlotRows &rows,
                                               const Unit &u)
{
    rows.weight = read_slot_weight(c, u.slot);
    load_slot_rows<EXACT>(c, rows, u, num_slots_of(u), 0);
}

/* Returns this rank's partial: the sum of weight * row over `count` slots, in ascending k. */
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

/* Computes the partial of a piece of a peer's token and stores it to the peer's staging. The
 * caller has loaded `rows`. */
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
    /* number of this rank among the peer's sources */
    const int source = self.num_ranks - 2 - u.role;
    if (u.piece == 0 && c.job.slot_floats)
        send_floats(c, rank, u.token, floats_base(self, c.op, self.heap[rank], source));
}

/* Adds the numbers of vector q to total. */
template <class ROW> __device__ __forceinline__ void add_to(float (&total)[ROW::N], uint4 q)
{
    float x[ROW::N];
    ROW::unpack_floats(q, x);
#pragma unroll
    for (int e = 0; e < ROW::N; e++) total[e] += x[e];
}

/* Adds the partials of the ranks in `touched` to total, in the order of ranks. Waits for SIDE
 * partials at a time, and stores poison back. `own`: this rank's partial. Returns false if the
 * group is broken. */
template <class ROW, bool EXACT, int SIDE>
__device__ __forceinline__ bool add_by_rank(const CombineState &c, const Unit &u,
                                            uint32_t touched, uint4 own, float (&total)[ROW::N])
{
    const bool in = in_row<EXACT>(c, u);
    while (touched) {
        uint4 q[SIDE], *from[SIDE];
        int rank[SIDE], late = -1;
        bool comes[SIDE];
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
            rank[i] = __ffs(touched) - 1;
            touched &= touched - 1;
            comes[i] = rank[i] >= 0 && rank[i] != c.job.self.rank;
            if (comes[i])
                from[i] =
                    staged_row(c.op.inbox[rank[i]], u.token, c.shape.vectors) + vector_of(u);
            q[i] = own;
        }
        const bool ok = wait_warp(c.op, late, P2P_PHASE_ROW, [&] {
            late = -1;
#pragma unroll
            for (int i = 0; i < SIDE; i++)
                if (comes[i] && in) q[i] = load_relaxed(from[i]);
#pragma unroll
            for (int i = 0; i < SIDE; i++)
                if (comes[i] && in && has_poison(q[i])) late = rank[i];
            return __all_sync(ALL_LANES, late < 0) != 0;
        });
        if (!ok) return false;
#pragma unroll
        for (int i = 0; i < SIDE; i++)
            if (comes[i] && in) store_in_place(from[i], poison_vector());
#pragma unroll
        for (int i = 0; i < SIDE; i++)
            if (rank[i] >= 0) add_to<ROW>(total, q[i]);
    }
    return true;
}

/* Sums a piece of a token of this rank over all ranks and stores it to the output. The caller
 * has loaded `rows`. Returns false if the group is broken. */
template <class ROW, bool EXACT, int SIDE>
__device__ __forceinline__ bool receive_sum(const CombineState &c, SlotRows &rows,
                                            const Unit &u)
{
    const int count = num_slots_of(u);
    uint4 own = make_uint4(0, 0, 0, 0);
    uint32_t touched = __reduce_or_sync(ALL_LANES, u.ranks >= 0 ? 1u << u.ranks : 0);
    float total[1][ROW::N];
    clear_sums(total);
    if (count)
        own = sum_loaded<ROW, EXACT>(c, rows, u, count);
    else
        touched &= ~(1u << c.job.self.rank);
    if (!add_by_rank<ROW, EXACT, SIDE>(c, u, touched, own, total[0])) return false;
    if (in_row<EXACT>(c, u))
        store_once(c.job.out + row_offset(u.token, c.shape) + vector_of(u) * 16,
                   touched ? ROW::pack_floats(total[0]) : make_uint4(0, 0, 0, 0), c.policy);
    return !(u.piece == 0 && c.job.choice_floats) || receive_floats(c, u.token);
}

#endif
