/* SPDX-License-Identifier: Apache-2.0 */
/* combine with relays, for backend `hosts` with several ranks per host. Without relays every
 * rank sends its own partial sum over the network. With relays, one rank of each host adds the
 * partial sums of its host, and sends only this sum over the network.
 *
 * The rank that adds is called the *mate* of the token's home rank (net/relay.cuh). If the home
 * rank is the i-th rank of its host, the mate is the i-th rank of this host. The ranks of a
 * host are a subtree of the sum tree, so adding their partial sums first does not change the
 * result. A *node* is a partial sum in this tree.
 *
 *   other ranks of the host  store the word *wants* to the mate's heap: 1 if the rank has a
 *                            partial sum for the token, otherwise 0. If it is 1, they also
 *                            store the partial sum.
 *   mate                     waits for *wants* of each rank of its host. If *wants* is 1, also
 *                            waits for the partial sum. Adds the partial sums in tree order,
 *                            and puts the sum to the token's home rank.
 *
 * Ranks cannot wait for each other in a circle. In the units that send partial sums (expert
 * units, combine.cu), only the mate waits, and only for partial sums that other ranks send
 * without waiting. Among the units of one token index, those in which a rank is the mate come
 * last. So each rank sends its other partial sums of this token index before it waits. */
#ifndef EPIC_COMBINE_RELAY_CUH
#define EPIC_COMBINE_RELAY_CUH

/* Returns the address in `box` of this lane's first vector of a partial sum. `box`: the staging
 * for rows from one rank to another. `u`: the unit, which selects the token and the piece. */
template <int P>
__device__ __forceinline__ uint4 *node_address(const CombineState &c, const Unit &u,
                                               uint8_t *box)
{
    return staged_row(box, u.token - c.round_begin, c.shape.vectors * P) +
           (u.piece * WARP + lane_id()) * P;
}

/* Stores `node`, this lane's vectors of one piece of a partial sum, to the staging `box`. */
template <int P>
__device__ __forceinline__ void store_node(const CombineState &c, const Unit &u, uint8_t *box,
                                           const uint4 (&node)[P])
{
    uint4 *to = node_address<P>(c, u, box);
#pragma unroll
    for (int p = 0; p < P; p++)
        if (u.piece * WARP + lane_id() < c.shape.vectors) store_relaxed(to + p, node[p]);
}

/* Waits until `rank` has stored one piece of its partial sum to the staging `box`, reads it
 * into `node`, and stores poison to the staging for the next use. Called by a whole warp.
 * Returns false if the group has failed. */
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

/* Sends this rank's partial sum (`node`) for a token of `rank` to the mate of `rank` on this
 * host. The unit of piece 0 also sends has_partial as the word *wants*, which shows the mate
 * whether a partial sum follows. Called on ranks that are not the mate. */
template <int P>
__device__ __forceinline__ void send_node(const CombineState &c, const Unit &u, int rank,
                                          bool has_partial, const uint4 (&node)[P])
{
    const p2p_self &self = c.job.self;
    const int to = mate_of(self, rank, self.rank), box_owner = mate_of(self, self.rank, rank);
    uint8_t *heap = self.heap[to];
    if (u.piece == 0 && lane_id() == 0)
        store_relaxed(wants_word(self, c.op, heap, to, box_owner, TOKEN_INDEX(c, u.token)),
                      stamp_word(c.op, has_partial));
    if (has_partial) store_node<P>(c, u, box_address(self, c.op, heap, to, box_owner), node);
}

/* Returns the position in the sum order at which the ranks of this host begin. Requires
 * can_add_by_host(). Called by a whole warp. */
__device__ __forceinline__ int first_position_of_host(const CombineState &c)
{
    const p2p_self &self = c.job.self;
    const int local = ranks_per_host(self);
    for (int first = 0; first < self.num_ranks; first += WARP * local) {
        const int position = first + lane_id() * local;
        const uint32_t own = __ballot_sync(
            ALL_LANES, position < self.num_ranks &&
                           c.plan.header.rank_at[position] / local == self.rank / local);
        if (own) return first + (__ffs(own) - 1) * local;
    }
    return 0;
}

/* Waits for the words *wants* of a token of `rank` that the other ranks of this host send. Lane
 * n waits for rank `from`, unless this is the lane's own rank. Sets `wants` to a bit mask of the
 * lanes whose rank has a partial sum for the token. Called by a whole warp. Returns false if the
 * group has failed. */
__device__ __forceinline__ bool wait_wants_of_host(const CombineState &c, const Unit &u,
                                                   int rank, int from, uint32_t &wants)
{
    const p2p_self &self = c.job.self;
    const bool waits = from != self.rank;
    const uint64_t *at =
        wants_word(self, c.op, c.op.heap, self.rank, mate_of(self, waits ? from : rank, rank),
                   TOKEN_INDEX(c, u.token));
    uint64_t word = 0;
    int late = -1;
    const bool ok = wait_warp(c.op, late, P2P_PHASE_ROW, [&] {
        if (waits) word = load_relaxed(at);
        const bool has_arrived = !waits || is_stamped(c.op, word);
        late = has_arrived ? -1 : from;
        return __all_sync(ALL_LANES, has_arrived) != 0;
    });
    wants = __ballot_sync(ALL_LANES, waits && (uint32_t)word);
    return ok;
}

/* Called if this rank is the mate of the token's home rank, `rank`. Adds the partial sums of
 * all ranks of this host in the order of the sum tree. On entry, has_partial is true if this
 * rank has a partial sum, which is in `node`. On return, has_partial is true if any rank of the
 * host has a partial sum, and `node` is the sum of these partial sums. Returns false if the
 * group has failed. */
template <class ROW, class PART>
__device__ __forceinline__ bool
add_partials_of_host(const CombineState &c, const Unit &u, int rank, bool &has_partial,
                     uint4 (&node)[PartialSum<ROW, PART>::VECTORS])
{
    constexpr int P = PartialSum<ROW, PART>::VECTORS;
    const p2p_self &self = c.job.self;
    LeafStack<ROW, PART> stack = {c.stack, {}, 0};
    const int first = first_position_of_host(c), local = ranks_per_host(self);
    const int its_rank =
        lane_id() < local ? c.plan.header.rank_at[first + lane_id()] : self.rank;
    uint32_t wants;
    if (!wait_wants_of_host(c, u, rank, its_rank, wants)) return false;
    for (int i = 0; i < local; i++) {
        const int from = __shfl_sync(ALL_LANES, its_rank, i);
        if (from == self.rank && has_partial) stack.push_node(node, (uint32_t)(first + i));
        if (!(wants >> i & 1)) continue;
        uint4 received[P];
        uint8_t *box = box_address(self, c.op, c.op.heap, self.rank, mate_of(self, from, rank));
        if (!receive_node<P>(c, u, box, from, received)) return false;
        stack.push_node(received, (uint32_t)(first + i));
    }
    has_partial = stack.pop_result(node);
    return true;
}

/* Sends this rank's partial sum for a token of `rank`, which is on another host. The mate of
 * `rank` on this host (net/relay.cuh) adds the partial sums of this host, and sends the sum to
 * `rank` with one put. If this rank is not the mate, it sends its partial sum to the mate.
 * `node` is valid only if `has_partial` is true. Called by a whole warp. Returns false if the
 * group has failed. */
template <class ROW, class PART>
__device__ __forceinline__ bool relay_unit(const CombineState &c, const Unit &u, int rank,
                                           bool has_partial,
                                           uint4 (&node)[PartialSum<ROW, PART>::VECTORS])
{
    constexpr int P = PartialSum<ROW, PART>::VECTORS;
    const p2p_self &self = c.job.self;
    if (u.token >= c.plan.header.tokens_of[rank]) return true;
    if (mate_of(self, rank, self.rank) != self.rank) {
        send_node<P>(c, u, rank, has_partial, node);
        return true;
    }
    if (!add_partials_of_host<ROW, PART>(c, u, rank, has_partial, node)) return false;
    if (!has_partial) return true;
    store_node<P>(c, u, c.op.outbox[rank], node);
    const uint4 *staged =
        staged_row(c.op.outbox[rank], u.token - c.round_begin, c.shape.vectors * P);
    post_put_when_complete(self, c.op, rank, TOKEN_INDEX(c, u.token), c.shape.pieces, staged,
                           (uint32_t)(c.shape.vectors * P) * 16);
    return true;
}

#endif
