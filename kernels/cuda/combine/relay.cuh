/* SPDX-License-Identifier: Apache-2.0 */
/* combine between hosts of several ranks; backend hosts only. The partials that the ranks of a
 * host have of another host's token are added there, as one node of the tree, by the mate of
 * the token's rank (net/relay.cuh).
 *
 *   rank that is not the mate   stores *wants* (has it a partial?) and its partial to the mate
 *   mate                        waits for both of every rank of its host, adds in tree order,
 *                               posts the put of the sum to the token's rank
 *
 * In the list of expert units the mates of a token come last. They wait for other units of that
 * token, which wait for nothing, so no wait is circular. */
#ifndef EPIC_COMBINE_RELAY_CUH
#define EPIC_COMBINE_RELAY_CUH

/* Address in staging of this lane's vector of a unit's node. */
template <int P>
__device__ __forceinline__ uint4 *node_address(const CombineState &c, const Unit &u,
                                               uint8_t *box)
{
    return staged_row(box, u.token - c.first, c.shape.vectors * P) +
           (u.piece * WARP + lane_id()) * P;
}

/* Stores a node to staging. */
template <int P>
__device__ __forceinline__ void store_node(const CombineState &c, const Unit &u, uint8_t *box,
                                           const uint4 (&node)[P])
{
    uint4 *to = node_address<P>(c, u, box);
#pragma unroll
    for (int p = 0; p < P; p++)
        if (u.piece * WARP + lane_id() < c.shape.vectors) store_relaxed(to + p, node[p]);
}

/* Waits for the node that `rank` stores. */
template <int P>
__device__ __forceinline__ bool receive_node(const CombineState &c, const Unit &u, uint8_t *box,
                                             int rank, uint4 (&node)[P])
{
    uint4 *from = node_address<P>(c, u, box);
    const bool in = u.piece * WARP + lane_id() < c.shape.vectors;
    const bool ok = wait_warp(c.op, rank, P2P_PHASE_ROW, [&] {
        bool missing = false;
#pragma unroll
        for (int p = 0; p < P; p++) {
            node[p] = in ? load_relaxed(from + p) : make_uint4(0, 0, 0, 0);
            missing |= has_poison(node[p]);
        }
        return __any_sync(ALL_LANES, missing) == 0;
    });
#pragma unroll
    for (int p = 0; p < P; p++)
        if (ok && in) store_in_place(from + p, poison_vector());
    return ok;
}

/* Sends this rank's part, if it has one, to the mate. On ranks that are not the mate. */
template <int P>
__device__ __forceinline__ void send_node(const CombineState &c, const Unit &u, int rank,
                                          bool some, const uint4 (&node)[P])
{
    const p2p_self &self = c.job.self;
    const int to = mate_of(self, rank, self.rank), by = mate_of(self, self.rank, rank);
    uint8_t *heap = self.heap[to];
    if (u.piece == 0 && lane_id() == 0)
        store_relaxed(wants_word(self, c.op, heap, to, by, u.token), stamp_word(c.op, some));
    if (some) store_node<P>(c, u, box_address(self, c.op, heap, to, by), node);
}

/* Adds the parts of the host's ranks in the order of the tree. On the mate. `some`: there is at
 * least one part. */
template <class ROW, class PART>
__device__ __forceinline__ bool
add_partials_of_host(const CombineState &c, const Unit &u, int rank, bool &some,
                     uint4 (&node)[PartialSum<ROW, PART>::VECTORS])
{
    constexpr int P = PartialSum<ROW, PART>::VECTORS;
    const p2p_self &self = c.job.self;
    LeafStack<ROW, PART> stack = {c.stack, 0, 0};
    for (int place = 0; place < self.num_ranks; place++) {
        const int from = c.plan.header.rank_at[place];
        if (from / ranks_per_host(self) != self.rank / ranks_per_host(self)) continue;
        if (from == self.rank) {
            if (some) stack.push_node(node, (uint32_t)place);
            continue;
        }
        const int by = mate_of(self, from, rank);
        uint32_t has;
        uint4 its[P];
        if (!wait_wants(c.op, wants_word(self, c.op, c.op.heap, self.rank, by, u.token), from,
                        has))
            return false;
        if (!has) continue;
        if (!receive_node<P>(c, u, box_address(self, c.op, c.op.heap, self.rank, by), from,
                             its))
            return false;
        stack.push_node(its, (uint32_t)place);
    }
    some = stack.pop_result(node);
    return true;
}

/* An expert unit of a token of another host's rank, with this rank's part. */
template <class ROW, class PART>
__device__ __forceinline__ bool relay_unit(const CombineState &c, const Unit &u, int rank,
                                           bool some,
                                           uint4 (&node)[PartialSum<ROW, PART>::VECTORS])
{
    constexpr int P = PartialSum<ROW, PART>::VECTORS;
    const p2p_self &self = c.job.self;
    if (u.token >= c.plan.header.tokens_of[rank]) return true;
    if (mate_of(self, rank, self.rank) != self.rank) {
        send_node<P>(c, u, rank, some, node);
        return true;
    }
    if (!add_partials_of_host<ROW, PART>(c, u, rank, some, node)) return false;
    if (!some) return true;
    store_node<P>(c, u, c.op.outbox[rank], node);
    const uint4 *staged = staged_row(c.op.outbox[rank], u.token - c.first, c.shape.vectors * P);
    post_put_when_complete(self, c.op, rank, u.token, c.shape.pieces, staged,
                           (uint32_t)(c.shape.vectors * P) * 16);
    return true;
}

#endif
