/* SPDX-License-Identifier: Apache-2.0 */
/* The slower variant of combine, for all cases that stream.cuh does not support:
 *
 *   unaligned rows
 *   more than 32 choices per token
 *   more than P2P_STREAM_LEAVES leaves of the sum tree on a rank (backend `hosts`: more
 *   than one)
 *   tree order over more than 8 ranks
 *   float32 partial sums of 16-bit rows
 *   relays (combine/relay.cuh)
 *   tree order in the libraries for many ranks (MANY_RANKS, rules/device_layout.h)
 *
 * combine.cu describes the units of work and their order. In this file, a piece has one vector
 * (16 bytes) per lane.
 *
 * Names used here:
 *
 *   acc         sum of rows in float32
 *   node        a partial sum in the sum tree, packed into vectors
 *   touched     bit mask of the ranks to which choices of a token go
 *   vector      the first vector of a piece, as an index in the row
 *   floats      one float per choice, which dispatch_backward returns to the token's rank: the
 *               gradients of the choices' weights
 *   sum order   the order of ranks in which partial sums are added: rank_at[p] is the rank at
 *               position p
 *   leaf        a block of num_experts / leaves adjacent experts; a rank may have several
 *               leaves */
#ifndef EPIC_COMBINE_PLAIN_CUH
#define EPIC_COMBINE_PLAIN_CUH

#include "cuda/combine/leaf_stack.cuh"

/* Like read_slot(), but returns 0 instead of a slot after the last row of the caller's buffer
 * (clamp_slot()). */
__device__ __forceinline__ int32_t clamped_slot_of(const CombineState &c, int rank,
                                                   int32_t token, int chunk)
{
    return clamp_slot(c, read_slot(c, rank, token, chunk));
}

/* ---------------------------------------------------------------------------- partials ---- */

/* Adds weight * row to acc for COUNT rows. Each lane adds its vectors of the piece that begins
 * at `vector`. The rows are in the slots of the COUNT lowest lanes in the bit mask `lanes`.
 * Removes these lanes from the mask. `slot`, `weight`: this lane's slot, and the weight of this
 * slot. Loads all rows before it adds them, so that the loads overlap. Called by a whole
 * warp. */
template <class ROW, int V, int COUNT>
__device__ __forceinline__ void add_rows(const CombineState &c, float (&acc)[V][ROW::N],
                                         uint32_t &lanes, int32_t slot, float weight,
                                         int32_t vector)
{
    uint4 q[COUNT][V];
    int from[COUNT];
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        from[r] = __ffs(lanes) - 1;
        lanes &= lanes - 1;
        const int64_t row_slot = __shfl_sync(ALL_LANES, slot, from[r]);
        const uint8_t *row = c.job.rows + row_slot * c.shape.row_bytes;
#pragma unroll
        for (int v = 0; v < V; v++)
            q[r][v] = load_row(row, vector + v * WARP + lane_id(), c.shape, c.policy);
    }
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        const float w = __shfl_sync(ALL_LANES, weight, from[r]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            float x[ROW::N];
            ROW::unpack_floats(q[r][v], x);
#pragma unroll
            for (int i = 0; i < ROW::N; i++) acc[v][i] = __fmaf_rn(w, x[i], acc[v][i]);
        }
    }
}

/* Calls add_rows() for the slots of all lanes in the bit mask `lanes`, in ascending order of
 * lanes. */
template <class ROW, int V>
__device__ __forceinline__ void add_lanes(const CombineState &c, float (&acc)[V][ROW::N],
                                          uint32_t lanes, int32_t slot, float weight,
                                          int32_t vector)
{
    constexpr int MOST = 4; /* maximum number of rows whose loads overlap */
#pragma unroll 1
    while (__popc(lanes) >= MOST) add_rows<ROW, V, MOST>(c, acc, lanes, slot, weight, vector);
    const int left = __popc(lanes);
    if (MOST > 3 && left == 3)
        add_rows<ROW, V, 3>(c, acc, lanes, slot, weight, vector);
    else if (MOST > 2 && left == 2)
        add_rows<ROW, V, 2>(c, acc, lanes, slot, weight, vector);
    else if (left == 1)
        add_rows<ROW, V, 1>(c, acc, lanes, slot, weight, vector);
}

/* Rounds the float32 sums `acc` of a piece to type PART and packs them into `node`. */
template <class ROW, class PART, int V>
__device__ __forceinline__ void pack_sum(uint4 (&node)[V][PartialSum<ROW, PART>::VECTORS],
                                         const float (&acc)[V][ROW::N])
{
#pragma unroll
    for (int v = 0; v < V; v++) PartialSum<ROW, PART>::pack_floats(node[v], acc[v]);
}

/* Sets `node` to this rank's partial sum for a token of `rank`, for the piece that begins at
 * `vector`. The partial sum is the sum of weight * row over the token's slots on this rank, in
 * ascending order of k. `slot`: in lane n, the token's n-th slot on this rank, or -1. The
 * function reads slots after the first 32 from the plan. Returns false if the token has no slot
 * on this rank. Called by a whole warp. */
template <class ROW, class PART, int V>
__device__ __forceinline__ bool
sum_local_rows(const CombineState &c, uint4 (&node)[V][PartialSum<ROW, PART>::VECTORS],
               int rank, int32_t token, int32_t slot, int32_t vector)
{
    float acc[V][ROW::N];
    float weight = read_slot_weight(c, slot);
    uint32_t lanes = __ballot_sync(ALL_LANES, slot >= 0);
    if (!lanes) return false;
    clear_sums(acc);
    for (int chunk = 1;; chunk++) {
        add_lanes<ROW, V>(c, acc, lanes, slot, weight, vector);
        if (chunk * WARP >= c.top_k) break;
        slot = clamped_slot_of(c, rank, token, chunk);
        weight = read_slot_weight(c, slot);
        lanes = __ballot_sync(ALL_LANES, slot >= 0);
    }
    pack_sum<ROW, PART, V>(node, acc);
    return true;
}

/* ---------------------------------------------------------------- leaves within a rank ---- */

/* A leaf of the sum tree is a block of experts. Returns the index of the leaf to which the
 * slot's expert belongs. The first leaf of this rank has index 0. */
__device__ __forceinline__ int leaf_of(const CombineState &c, int32_t slot)
{
    const device_plan_header &h = c.plan.header;
    /* Binary search for the local expert whose rows contain the slot: the last expert whose
     * first slot (slab_begin) is not after it. */
    int low = 0, high = h.owned;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (__ldg(c.plan.slab_begin + middle) <= slot)
            low = middle;
        else
            high = middle;
    }
    const int block = h.num_experts / h.leaves;
    return (h.first_expert + low) / block - h.first_expert / block;
}

/* Does the work of sum_local_rows() for a rank with several leaves of the sum tree: adds the
 * rows of each leaf, and then adds the sums of the leaves in the order of the tree. A piece has
 * one vector per lane. */
template <class ROW, class PART>
__device__ __forceinline__ bool sum_leaves(const CombineState &c,
                                           uint4 (&node)[1][PartialSum<ROW, PART>::VECTORS],
                                           int rank, int32_t token, int32_t vector)
{
    LeafStack<ROW, PART> stack = {c.stack, {}, 0};
    int32_t slot[2], leaf[2];
    float weight[2];
#pragma unroll
    for (int chunk = 0; chunk < 2; chunk++) {
        slot[chunk] = chunk * WARP < c.top_k ? clamped_slot_of(c, rank, token, chunk) : -1;
        weight[chunk] = read_slot_weight(c, slot[chunk]);
        leaf[chunk] = slot[chunk] >= 0 ? leaf_of(c, slot[chunk]) : 0x7fffffff;
    }
    for (;;) {
        const uint32_t next = __reduce_min_sync(ALL_LANES, (uint32_t)min(leaf[0], leaf[1]));
        if (next == 0x7fffffff) break;
        float acc[1][ROW::N];
        clear_sums(acc);
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++) {
            const bool in = leaf[chunk] == (int32_t)next;
            add_lanes<ROW, 1>(c, acc, __ballot_sync(ALL_LANES, in), slot[chunk], weight[chunk],
                              vector);
            if (in) leaf[chunk] = 0x7fffffff;
        }
        uint4 partial[PartialSum<ROW, PART>::VECTORS];
        PartialSum<ROW, PART>::pack_floats(partial, acc[0]);
        stack.push_node(partial, next);
    }
    return stack.pop_result(node[0]);
}

/* ------------------------------------------------------------------ floats that return ---- */

/* Only in dispatch_backward: sends the floats (gradients of weights) of `token`, a token of
 * `rank`, to `rank`. slot_floats has one float for each slot that `token` has on the calling
 * rank. `to`: the array in the heap of `rank` for floats from the calling rank. Called by a
 * whole warp. */
__device__ __forceinline__ void send_floats(const CombineState &c, int rank, int32_t token,
                                            uint32_t *to)
{
    for (int chunk = 0; chunk * WARP < c.top_k; chunk++) {
        const int32_t slot = clamped_slot_of(c, rank, token, chunk);
        if (slot < 0) continue;
        const uint32_t word = __float_as_uint(c.job.slot_floats[slot]);
        store_relaxed(to + (int64_t)TOKEN_INDEX(c, token) * float_stride(c.top_k) +
                          chunk * WARP + lane_id(),
                      replace_poison(word, F32::NAN_WORD));
    }
    if (!HOSTS) return;
    int count = 0;
    for (int chunk = 0; chunk * WARP < c.top_k; chunk++)
        count += __popc(__ballot_sync(ALL_LANES, read_slot(c, rank, token, chunk) >= 0));
    post_put_floats(c.op, rank, to + (int64_t)TOKEN_INDEX(c, token) * float_stride(c.top_k),
                    count);
}

/* Only in dispatch_backward: waits for the floats (one gradient of a weight per choice) of
 * `token`, a token of this rank, and stores them to choice_floats. Lane k handles choice k.
 * Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool receive_floats(const CombineState &c, int32_t token)
{
    const p2p_self &self = c.job.self;
    const device_plan_layout at = device_plan_layout_of(self.num_ranks, self.max_tokens,
                                                        c.plan.header.num_experts, c.top_k);
    const int32_t *fate = (const int32_t *)(c.job.plan + at.fate);
    int32_t last = -1; /* rank to which this lane's choice of the previous chunk goes */
    for (int chunk = 0; chunk * WARP < c.top_k; chunk++) {
        const int32_t rank = rank_of_choice(c, token, chunk);
        const int64_t choice = (int64_t)token * c.top_k + chunk * WARP + lane_id();
        int n = __popc(__match_any_sync(ALL_LANES, rank) & lanes_below());
        for (int q = 0; chunk && q < self.num_ranks; q++) {
            const int before = __popc(__ballot_sync(ALL_LANES, last == q));
            if (rank == q) n += before;
        }
        last = rank;
        uint32_t word = 0, *from = NULL;
        if (rank >= 0 && rank != self.rank)
            from =
                floats_base(c.job.self, c.op, inbox_base(c.op, rank),
                            wrap_rank(rank + self.num_ranks - self.rank - 1, self.num_ranks)) +
                (int64_t)TOKEN_INDEX(c, token) * float_stride(c.top_k) + n;
        if (rank == self.rank && fate[choice] < c.job.num_rows)
            word = __float_as_uint(c.job.slot_floats[fate[choice]]);
        int missing = -1;
        const bool ok = wait_warp(c.op, missing, P2P_PHASE_FLOAT, [&] {
            if (from) word = load_relaxed(from);
            missing = from && word == POISON ? rank : -1;
            return __all_sync(ALL_LANES, missing < 0) != 0;
        });
        if (!ok) return false;
        if (from) *from = POISON;
        if (chunk * WARP + lane_id() < c.top_k)
            c.job.choice_floats[choice] = __uint_as_float(word);
    }
    return true;
}

/* ------------------------------------------------------------------------------- units ---- */

/* The work of a warp on one piece of a token's row. The warp loads `slot` and `ranks` of its
 * next unit early, because a load takes long. */
struct Unit {
    int32_t token;
    int role, piece; /* role: in an expert unit it selects the peer (peer_of_role()), else 0 */
    int32_t slot;    /* in lane n: the n-th slot that the token has on this rank, or -1 */
    /* in lane k: the rank to which choice k goes; valid only if the token is this rank's */
    int32_t ranks;
};

/* Sets `node` to one piece of this rank's partial sum: the piece that unit `u` works on.
 * `rank`: the rank to which the unit's token belongs. Returns false if the token has no slot on
 * this rank. */
template <class ROW, class PART, int V, bool LEAVES>
__device__ __forceinline__ bool sum_unit(const CombineState &c, const Unit &u, int rank,
                                         uint4 (&node)[V][PartialSum<ROW, PART>::VECTORS])
{
    const int32_t vector = u.piece * V * WARP;
    if constexpr (LEAVES)
        return sum_leaves<ROW, PART>(c, node, rank, u.token, vector);
    else
        return sum_local_rows<ROW, PART, V>(c, node, rank, u.token, u.slot, vector);
}

#include "cuda/combine/relay.cuh"

/* Processes an expert unit: stores this rank's partial sum for one piece of a peer's token to
 * the peer's staging. Called by a whole warp. Returns false if the group has failed. */
template <class ROW, class PART, int V, bool LEAVES>
__device__ __forceinline__ bool do_expert_unit(const CombineState &c, const Unit &u)
{
    constexpr int P = PartialSum<ROW, PART>::VECTORS;
    const int rank = peer_of_role(c, u.role);
    const int32_t vector = u.piece * V * WARP;
    uint4 node[V][P];
    const bool has_partial = sum_unit<ROW, PART, V, LEAVES>(c, u, rank, node);
    const p2p_self &self = c.job.self;
    if (HOSTS && has_partial && u.piece == 0 && c.job.slot_floats)
        send_floats(
            c, rank, u.token,
            floats_base(self, c.op, self.heap[rank], source_number(self, rank, self.rank)));
    if constexpr (V == 1)
        if (adds_by_host(c) && is_remote(self, rank))
            return relay_unit<ROW, PART>(c, u, rank, has_partial, node[0]);
    if (!has_partial) return true;
    /* Index of this rank among the peer's sources. Among the sources of rank s, rank r has
     * index (r - s - 1) modulo num_ranks. In backend p2p, u.role is the peer's index among this
     * rank's sources. The sum of u.role and `source` is always num_ranks - 2. */
    const int source = c.job.self.num_ranks - 2 - u.role;
    uint8_t *heap = c.job.self.heap[rank];
    uint4 *staged =
        staged_row(c.op.outbox[rank], u.token - c.round_begin, c.shape.vectors * P) +
        vector * P;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int p = 0; p < P; p++)
            if (vector + v * WARP + lane_id() < c.shape.vectors)
                store_relaxed(staged + v * WARP * P + lane_id() * P + p, node[v][p]);
    post_put_when_complete(c.job.self, c.op, rank, TOKEN_INDEX(c, u.token), c.shape.pieces,
                           staged - vector * P, (uint32_t)(c.shape.vectors * P) * 16);
    if (!HOSTS && u.piece == 0 && c.job.slot_floats)
        send_floats(c, rank, u.token, floats_base(c.job.self, c.op, heap, source));
    return true;
}

/* Receives the partial sums of the ranks at positions `position` to position + 3 of the sum
 * order. If has_node[i] is true, the rank at position + i sends a partial sum, and the function
 * reads it into q[i]. If this rank is one of these four ranks, the caller has already stored
 * this rank's partial sum in q. After reading, stores poison to the staging for the next use.
 * Called by a whole warp. Returns false if the group has failed. */
template <class ROW, class PART, int V>
__device__ __forceinline__ bool
receive_partials(const CombineState &c, const Unit &u, int position, bool (&has_node)[4],
                 uint4 (&q)[4][V][PartialSum<ROW, PART>::VECTORS])
{
    constexpr int P = PartialSum<ROW, PART>::VECTORS;
    const p2p_self &self = c.job.self;
    const int32_t vector = u.piece * V * WARP;
    int peer[4], late = -1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int rank =
            position + i < self.num_ranks ? c.plan.header.rank_at[position + i] : -1;
        peer[i] = -1;
        if (!has_node[i] || rank == self.rank) continue;
        peer[i] = rank;
    }
    auto staged_partial = [&](int i, int v, int p) {
        return staged_row(c.op.inbox[peer[i]], u.token - c.round_begin, c.shape.vectors * P) +
               (vector + v * WARP + lane_id()) * P + p;
    };
    const int32_t last = min(vector + V * WARP, c.shape.vectors) * P - 1;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (peer[i] >= 0 && !wait_piece(c.op, peer[i],
                                        staged_row(c.op.inbox[peer[i]], u.token - c.round_begin,
                                                   c.shape.vectors * P) +
                                            last))
            return false;
    const bool ok = wait_warp(c.op, late, P2P_PHASE_ROW, [&] {
        late = -1;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (peer[i] >= 0)
#pragma unroll
                for (int v = 0; v < V; v++)
#pragma unroll
                    for (int p = 0; p < P; p++)
                        q[i][v][p] = vector + v * WARP + lane_id() < c.shape.vectors
                                         ? load_relaxed(staged_partial(i, v, p))
                                         : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (peer[i] >= 0)
#pragma unroll
                for (int v = 0; v < V; v++)
#pragma unroll
                    for (int p = 0; p < P; p++)
                        if (has_poison(q[i][v][p])) late = peer[i];
        return __all_sync(ALL_LANES, late < 0) != 0;
    });
    if (!ok) return false;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (peer[i] >= 0)
#pragma unroll
            for (int v = 0; v < V; v++)
#pragma unroll
                for (int p = 0; p < P; p++)
                    if (vector + v * WARP + lane_id() < c.shape.vectors)
                        store_in_place(staged_partial(i, v, p), poison_vector());
    return true;
}

/* Adds `b` to `a`. If `a` is empty, copies `b` to it. has_a, has_b: whether `a` and `b` contain
 * a partial sum. */
template <class ROW, class PART, int V>
__device__ __forceinline__ void
add_node(uint4 (&a)[V][PartialSum<ROW, PART>::VECTORS], bool &has_a,
         const uint4 (&b)[V][PartialSum<ROW, PART>::VECTORS], bool has_b)
{
    if (!has_b) return;
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (has_a)
            PartialSum<ROW, PART>::add_partials(a[v], b[v]);
        else
#pragma unroll
            for (int p = 0; p < PartialSum<ROW, PART>::VECTORS; p++) a[v][p] = b[v][p];
    }
    has_a = true;
}

/* Sets `total` to the sum of the partial sums of all ranks in `touched`, in the order of the
 * plan: in ascending order of ranks, or in a binary tree. own: the partial sum of this rank.
 * Called by a whole warp. Returns false if the group has failed. */
template <class ROW, class PART, int V>
__device__ __forceinline__ bool
add_ranks(const CombineState &c, const Unit &u, RankMask touched,
          const uint4 (&own)[V][PartialSum<ROW, PART>::VECTORS], float (&total)[V][ROW::N])
{
    constexpr int P = PartialSum<ROW, PART>::VECTORS;
    const p2p_self &self = c.job.self;
    const bool tree = c.plan.header.sum_order == EPIC_TREE;
    const bool deep = V == 1 && tree && self.num_ranks > 8;
    LeafStack<ROW, PART> stack = {c.stack, {}, 0};
    bool has_partial = false;
    clear_sums(total);
#pragma unroll 1
    for (int position = 0; position < self.num_ranks; position += 4) {
        uint4 q[4][V][P];
        bool has_node[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int rank =
                position + i < self.num_ranks ? c.plan.header.rank_at[position + i] : -1;
            has_node[i] = rank >= 0 && has_rank(touched, rank);
            if (rank == self.rank)
#pragma unroll
                for (int v = 0; v < V; v++)
#pragma unroll
                    for (int p = 0; p < P; p++) q[i][v][p] = own[v][p];
        }
        if (MANY_RANKS && !has_node[0] && !has_node[1] && !has_node[2] && !has_node[3])
            continue;
        if (!receive_partials<ROW, PART, V>(c, u, position, has_node, q)) return false;
        if (deep) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (has_node[i]) stack.push_node(q[i][0], (uint32_t)(position + i));
            continue;
        }
        if (tree) {
            add_node<ROW, PART, V>(q[0], has_node[0], q[1], has_node[1]);
            add_node<ROW, PART, V>(q[2], has_node[2], q[3], has_node[3]);
            add_node<ROW, PART, V>(q[0], has_node[0], q[2], has_node[2]);
            if (has_node[0] && has_partial) {
#pragma unroll
                for (int v = 0; v < V; v++) {
                    uint4 node[P];
                    PartialSum<ROW, PART>::pack_floats(node, total[v]);
                    PartialSum<ROW, PART>::add_partials(node, q[0][v]);
                    PartialSum<ROW, PART>::unpack_floats(node, total[v]);
                }
            } else if (has_node[0]) {
#pragma unroll
                for (int v = 0; v < V; v++)
                    PartialSum<ROW, PART>::unpack_floats(q[0][v], total[v]);
            }
            has_partial = has_partial || has_node[0];
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (has_node[i])
#pragma unroll
                for (int v = 0; v < V; v++) {
                    float x[ROW::N];
                    PartialSum<ROW, PART>::unpack_floats(q[i][v], x);
#pragma unroll
                    for (int n = 0; n < ROW::N; n++) total[v][n] += x[n];
                }
    }
    uint4 node[P];
    if (deep && stack.pop_result(node)) PartialSum<ROW, PART>::unpack_floats(node, total[0]);
    return true;
}

/* Processes a source unit: for one piece of a token of this rank, stores the sum of this rank's
 * rows and the peers' partial sums to `out`. Called by a whole warp. Returns false if the group
 * has failed. */
template <class ROW, class PART, int V, bool LEAVES>
__device__ __forceinline__ bool do_source_unit(const CombineState &c, const Unit &u)
{
    const p2p_self &self = c.job.self;
    const int32_t vector = u.piece * V * WARP;
    uint4 own[V][PartialSum<ROW, PART>::VECTORS];
    const bool has_partial = sum_unit<ROW, PART, V, LEAVES>(c, u, self.rank, own);
    RankMask touched = ranks_of_lanes(u.ranks);
    for (int chunk = 1; chunk * WARP < c.top_k; chunk++) {
        const int32_t rank = rank_of_choice(c, u.token, chunk);
        add_ranks_of(touched, ranks_of_lanes(rank));
    }
    if (!has_partial) remove_rank(touched, self.rank);
    if (adds_by_host(c)) touched = reduce_to_mates(self, touched);
    float total[V][ROW::N];
    if (!add_ranks<ROW, PART, V>(c, u, touched, own, total)) return false;
    uint8_t *row = c.job.out + u.token * c.shape.row_bytes;
#pragma unroll
    for (int v = 0; v < V; v++)
        store_row(row, vector + v * WARP + lane_id(), c.shape,
                  has_any(touched) ? ROW::pack_floats(total[v]) : make_uint4(0, 0, 0, 0),
                  c.policy);
    return !(u.piece == 0 && c.job.choice_floats) || receive_floats(c, u.token);
}

/* Processes one round: tokens [c.round_begin, end) of every rank. Called by a whole warp.
 * Returns false if the group has failed. */
template <class ROW, class PART, int V, bool LEAVES>
__device__ __forceinline__ bool combine_tokens(const CombineState &c, int32_t end)
{
    const p2p_self &self = c.job.self;
    const int peers = self.num_ranks - 1;
    /* the next unit to load from the list of expert units, and from the list of source units */
    const int32_t expert_end = peers ? end : c.round_begin;
    ExpertWork work = {c, expert_end};
    WorkWalk expert_walk(c.expert);
    UnitWalk source_walk(c.source);
    expert_walk.begin_walk(c.expert, work);
    const int32_t source_end = min(end, c.job.num_tokens);
    auto load_expert_slot = [&] {
        const int32_t token = c.round_begin + expert_walk.step;
        return token < expert_end ? read_slot(c, peer_of_role(c, expert_walk.role), token, 0)
                                  : -1;
    };
    auto load_source_slot = [&] {
        const int32_t token = c.round_begin + source_walk.step;
        return token < source_end ? read_slot(c, self.rank, token, 0) : -1;
    };
    int32_t next_expert_slot = load_expert_slot(), next_source_slot = load_source_slot();
    int32_t next_source_rank = rank_of_choice(c, c.round_begin + source_walk.step, 0);
    Unit expert, source; /* the units to process next, already loaded */
    auto load_next_expert = [&] {
        expert = {c.round_begin + expert_walk.step, expert_walk.role, expert_walk.span,
                  clamp_slot(c, next_expert_slot), -1};
        expert_walk.next_unit(c.expert, work);
        next_expert_slot = load_expert_slot();
    };
    auto load_next_source = [&] {
        source = {c.round_begin + source_walk.step, 0, source_walk.span,
                  clamp_slot(c, next_source_slot), next_source_rank};
        source_walk.next_unit(c.source);
        next_source_slot = load_source_slot();
        next_source_rank = rank_of_choice(c, c.round_begin + source_walk.step, 0);
    };
    load_next_expert();
    load_next_source();
#pragma unroll 1
    while (expert.token < expert_end || source.token < source_end) {
        if (expert.token < expert_end &&
            (source.token >= source_end || expert.token < source.token + c.job.lag)) {
            const Unit unit = expert;
            load_next_expert();
            if (!do_expert_unit<ROW, PART, V, LEAVES>(c, unit)) return false;
        } else {
            const Unit unit = source;
            load_next_source();
            if (!do_source_unit<ROW, PART, V, LEAVES>(c, unit)) return false;
        }
    }
    return true;
}

/* Runs all rounds. PART: type of partial sums. LEAVES: this rank may have several leaves of the
 * sum tree. The function is not inlined, because the main loop of stream.cuh, in the same
 * kernel, would otherwise spill registers. Returns false if the group has failed. */
template <class ROW, class PART, bool LEAVES>
static __device__ __noinline__ bool combine_plain(CombineState c, OpState &op)
{
    const int part_bytes = c.shape.vectors * 16 * PartialSum<ROW, PART>::VECTORS;
    return for_each_round(c, op, part_bytes, [&](int32_t end) {
        return combine_tokens<ROW, PART, 1, LEAVES>(c, end);
    });
}

#endif
