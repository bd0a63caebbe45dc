/* SPDX-License-Identifier: Apache-2.0 */
/* Relays, for backend `hosts` with several ranks per host. With relays, a row crosses the net
 * once per destination host, not once per destination rank. In combine, partial sums take the
 * opposite path.
 *
 * Host h has ranks h * L to h * L + L - 1, where L is ranks_per_host(). The *mate* of a rank on
 * another host is the rank there that has the same index in its host.
 *
 *   dispatch   rank j of host h' --net--> its mate, rank j of host h
 *              --NVLink--> ranks of host h that need the row
 *   combine    ranks of host h --NVLink--> rank j of host h, which adds their partial sums
 *              --net--> rank j of host h'
 *
 * Weights go directly to their destination, and so do records of groups of up to 32 ranks.
 * Announcements and counts of larger groups use the relays of net/relay_words.cuh, and their
 * records those of plan/record_lists.cuh.
 *
 * The staging of a receiver has one part per source rank. When a relay forwards a row, it
 * stores the row in the part of the rank that has the token, as if that rank itself had stored
 * the row. When a rank sends a partial sum to a relay, it stores the sum in the part of its own
 * mate on the destination host.
 *
 * For each token a rank also sends a stamped word (a word that contains the epoch), *wants*, to
 * the relay. The relay waits for this word before it waits for the row. In dispatch, the value
 * of *wants* is a bit mask of the ranks of the destination host that need the row. In combine,
 * it is 1 if the rank has a partial sum for the token, otherwise 0. */
#ifndef EPIC_RELAY_CUH
#define EPIC_RELAY_CUH

#include "cuda/net/staging.cuh"

/* Returns the address at which rows of rank `by` arrive in the memory of rank `to`. `heap`:
 * address of the heap or net inbox of rank `to`. */
__device__ __forceinline__ uint8_t *box_address(const p2p_self &self, const OpState &op,
                                                uint8_t *heap, int to, int by)
{
    const int64_t index = epoch_parity(op) * (self.num_ranks - 1) + source_number(self, to, by);
    return heap + self.at.staging + index * self.at.source_bytes;
}

/* Returns the address of the word *wants* that rank `by` sends to rank `to` for a token.
 * `heap`: address of the heap or net inbox of rank `to`. `index`: TOKEN_INDEX() of the
 * token. */
__device__ __forceinline__ uint64_t *wants_word(const p2p_self &self, const OpState &op,
                                                uint8_t *heap, int to, int by, int32_t index)
{
    return (uint64_t *)(heap + wants_offset(self)) +
           ((int64_t)epoch_parity(op) * self.num_ranks + source_number(self, to, by)) *
               p2p_index_tokens(&self.at, self.max_tokens) +
           index;
}

/* Waits for the word *wants* of rank `from`, which arrives at address `at`. `wants` becomes the
 * value of the word. Called by one warp. Returns false if the group has failed. */
__device__ __forceinline__ bool wait_wants(const OpState &op, const uint64_t *at, int from,
                                           uint32_t &wants)
{
    uint64_t word = 0;
    const bool ok = wait_warp(op, from, P2P_PHASE_ROW, [&] {
        word = load_relaxed(at);
        return __all_sync(ALL_LANES, is_stamped(op, word)) != 0;
    });
    wants = (uint32_t)word;
    return ok;
}

/* Returns a bit mask of the ranks to which this rank itself sends a row. `ranks`: bit mask of
 * all ranks that need the row. The result contains all ranks of `ranks` on this host. For each
 * other host that has a rank of `ranks`, it contains this rank's mate there (the rank with the
 * same index in its host). */
__device__ __forceinline__ RankMask reduce_to_mates(const p2p_self &self, RankMask ranks)
{
    RankMask mates = no_ranks();
    for (int first = 0; first < self.num_ranks; first += ranks_per_host(self)) {
        const RankMask some = only_ranks(ranks, first, ranks_per_host(self));
        if (!has_any(some)) continue;
        add_ranks_of(mates, first == self.rank - self.rank % ranks_per_host(self)
                                ? some
                                : rank_bit(mate_of(self, self.rank, first)));
    }
    return mates;
}

/* Sends the word *wants* for one token of this rank to this rank's mate on every other host
 * (the rank there with the same index in its host). The word marks the ranks of that host that
 * need the token. `index`: TOKEN_INDEX() of the token. `peers`: bit mask of all ranks that need
 * the token. Called by one warp; each lane sends to one host at a time. */
__device__ __forceinline__ void send_wants(const p2p_self &self, const OpState &op,
                                           int32_t index, const RankMask &peers)
{
    for (int host = lane_id(); host < (MANY_RANKS ? num_hosts(self) : WARP); host += WARP) {
        const int first = host * ranks_per_host(self);
        if (host >= num_hosts(self) || first == self.rank - self.rank % ranks_per_host(self))
            continue;
        const int mate = mate_of(self, self.rank, first);
        uint64_t *to = wants_word(self, op, self.heap[mate], mate, self.rank, index);
        store_relaxed(to, stamp_word(op, part_of_ranks(peers, first, ranks_per_host(self))));
        post_put(op, mate, to, 8);
    }
}

/* Returns a bit mask of the ranks to which this rank itself sends a token. `peers`: bit mask of
 * all ranks that need the token. With relays, this rank's mate on another host receives the
 * token for all peers on that host. `index`: TOKEN_INDEX() of the token. `first`: true if the
 * call is for the token's first piece. In this case, also sends the words *wants* to the mates
 * (send_wants()). */
__device__ __forceinline__ RankMask choose_routes(const p2p_self &self, const OpState &op,
                                                  int32_t index, bool first, RankMask peers)
{
    if (!ranks_per_host(self)) return peers;
    if (first) send_wants(self, op, index, peers);
    return reduce_to_mates(self, peers);
}

/* Forwards a piece of a row to ranks of this host: stores it in the staging of the ranks in
 * `wants`. Bit i of `wants` stands for the i-th rank of this host. Rank `from` of another host
 * has put the piece into this rank's inbox. `index`: index of the token in the round.
 * `vectors`: number of 16-byte vectors per row. escapes(heap, source) returns the address in a
 * heap of the escape words of the piece (staging.cuh), or NULL if the piece has none. Called by
 * one warp. Returns false if the group has failed. */
template <int V, bool EXACT, class Escapes>
__device__ __forceinline__ bool forward_piece(const p2p_self &self, const OpState &op, int from,
                                              int32_t index, int piece, int32_t vectors,
                                              uint32_t wants, Escapes escapes)
{
    const int32_t vector = piece * V * WARP;
    const int first = self.rank - self.rank % ranks_per_host(self);
    uint4 *staged =
        staged_row(box_address(self, op, net_inbox(self), self.rank, from), index, vectors);
    uint4 q[V];
    if (!receive_piece<V, EXACT>(op, from, staged, vector, vectors, false, q)) return false;
    uint32_t *escape = escapes(net_inbox(self), source_number(self, self.rank, from));
    if (escape && !unhide_poison<V>(op, from, q, escape)) return false;
    poison_piece<V, EXACT>(staged, vector, vectors);
    const uint32_t mask = escape ? hide_poison<V>(q) : 0;
    for (; wants; wants &= wants - 1) {
        const int to = first + __ffs(wants) - 1;
        uint8_t *heap = self.heap[to];
        send_piece<V, EXACT>(staged_row(box_address(self, op, heap, to, from), index, vectors),
                             vector, vectors, q);
        if (mask) store_relaxed(escapes(heap, source_number(self, to, from)) + lane_id(), mask);
    }
    return true;
}

/* Returns true if a relay may add the partial sums of the ranks of its host before it sends the
 * result. It may do so if the layer's sum order is a tree in which the ranks of each host form
 * one subtree. The sum then has the same bits as without relays. */
__device__ __forceinline__ bool can_add_by_host(const p2p_self &self,
                                                const device_plan_header &h)
{
    if (!ranks_per_host(self) || h.sum_order != EPIC_TREE) return false;
    for (int p = 0; p < self.num_ranks; p++)
        if (h.rank_at[p] / ranks_per_host(self) !=
            h.rank_at[p - p % ranks_per_host(self)] / ranks_per_host(self))
            return false;
    return true;
}

#endif
