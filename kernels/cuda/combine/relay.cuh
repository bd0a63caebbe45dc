/* SPDX-License-Identifier: Apache-2.0 */
/* combine with relays (backend hosts, several ranks per host): each host sends one sum for a
 * token of another host, not one partial sum per rank. The mate of the token's rank
 * (net/relay.cuh) adds the partial sums of its host, which are a subtree of the sum tree.
 *
 *   other ranks of the host  store *wants* (1: there is a partial sum), and the partial sum if
 *                            there is one, to the mate's heap
 *   mate                     waits for *wants* and then the partial sum of each rank of its
 *                            host, adds them in tree order, puts the sum to the token's rank
 *
 * No wait is circular: only the mate waits, and its units for such tokens come last in the
 * step's list of expert units. They wait for units of the same token on other ranks, which wait
 * for nothing. */
#ifndef EPIC_COMBINE_RELAY_CUH
#define EPIC_COMBINE_RELAY_CUH

/* Returns where in the staging `box` this lane's vectors of a node are. A node is a partial sum
 * in the sum tree; each unit has one. */
template <int P>
__device__ __forceinline__ uint4 *node_address(const CombineState &c, const Unit &u,
                                               uint8_t *box)
{
    return staged_row(box, u.token - c.first, c.shape.vectors * P) +
           (u.piece * WARP + lane_id()) * P;
}

/* Stores this lane's vectors of a unit's node to the staging `box`. */
template <int P>
__device__ __forceinline__ void store_node(const CombineState &c, const Unit &u, uint8_t *box,
                                           const uint4 (&node)[P])
{
    uint4 *to = node_address<P>(c, u, box);
#pragma unroll
    for (int p = 0; p < P; p++)
        if (u.piece * WARP + lane_id() < c.shape.vectors) store_relaxed(to + p, node[p]);
}

/* Waits for the node that `rank` stores to the staging `box`, and stores poison back. Called by
 * a whole warp. Returns false if the group is broken. */
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

/* Sends this rank's partial sum, if it has one (`some`), to the mate of `rank` on this host.
 * The unit of piece 0 also sends `some` in the word *wants*. Called by ranks that are not the
 * mate. */
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

/* Adds the partial sums of this host's ranks in the order of the tree. On entry `node` is this
 * rank's partial sum, if `some` is true. On return `node` is the sum of the host, if `some` is
 * true. Called by the mate. Returns false if the group is broken. */
template <class ROW, class PART>
__device__ __forceinline__ bool
add_partials_of_host(const CombineState &c, const Unit &u, int rank, bool &some,
                     uint4 (&node)[PartialSum<ROW, PART>::VECTORS])
{
    constexpr int P = PartialSum<ROW, PART>::VECTORS;
    const p2p_self &self = c.job.self;
    LeafStack<ROW, PART> stack = {c.stack, 0, 0};
    for (int position = 0; position < self.num_ranks; position++) {
        const int from = c.plan.header.rank_at[position];
        if (from / ranks_per_host(self) != self.rank / ranks_per_host(self)) continue;
        if (from == self.rank) {
            if (some) stack.push_node(node, (uint32_t)position);
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
        stack.push_node(its, (uint32_t)position);
    }
    some = stack.pop_result(node);
    return true;
}

/* Finishes an expert unit whose token belongs to `rank`, which is on another host. The mate of
 * `rank` adds the partial sums of this host and puts the sum; other ranks send theirs to the
 * mate. `node` is this rank's partial sum, if `some` is true. Called by a whole warp. Returns
 * false if the group is broken. */
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
