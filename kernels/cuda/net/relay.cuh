/* SPDX-License-Identifier: Apache-2.0 */
/* Relays between hosts of several ranks; backend hosts only. A row crosses the net once per
 * host, not once per rank.
 *
 * Host h has the ranks from h * local on, where local is ranks_per_host(). The *mates* of a
 * rank are the ranks with the same place on the other hosts. A row goes to the sender's mate on
 * a host, which forwards it there. Partial sums go to the mate of the token's rank, which adds
 * those of its host and sends the sum. Everything except rows goes directly to its destination.
 *
 *   dispatch   row of rank (h', j) -- net --> (h, j) -- NVLink --> ranks of h that want it
 *   combine    partials of host h  -- NVLink --> (h, j), their sum -- net --> (h', j)
 *
 * Rows that ranks of a host store for each other on behalf of a rank of another host goes to
 * the staging of that rank, or of the storing rank's mate on that rank's host. A stamped word
 * per token (*wants*) shows in advance which ranks of the host want the row, or that a rank has
 * a partial. */
#ifndef EPIC_RELAY_CUH
#define EPIC_RELAY_CUH

#include "cuda/net/staging.cuh"

/* Number of hosts in the group. */
__device__ __forceinline__ int num_hosts(const p2p_self &self)
{
    return self.num_ranks / ranks_per_host(self);
}

/* The rank on the host of rank `on` with the place of rank `like`. */
__device__ __forceinline__ int mate_of(const p2p_self &self, int like, int on)
{
    return on - on % ranks_per_host(self) + like % ranks_per_host(self);
}

/* Staging in a heap of rank `to` for rows of rank `by`. */
__device__ __forceinline__ uint8_t *box_address(const p2p_self &self, const OpState &op,
                                                uint8_t *heap, int to, int by)
{
    const int64_t place = epoch_parity(op) * (self.num_ranks - 1) + source_number(self, to, by);
    return heap + self.at.staging + place * self.at.source_bytes;
}

/* The word *wants* in a heap of rank `to` for a token of rank `by`. */
__device__ __forceinline__ uint64_t *wants_word(const p2p_self &self, const OpState &op,
                                                uint8_t *heap, int to, int by, int32_t token)
{
    return (uint64_t *)(heap + wants_offset(self)) +
           ((int64_t)epoch_parity(op) * self.num_ranks + source_number(self, to, by)) *
               self.max_tokens +
           token;
}

/* Waits for the word *wants* that rank `from` stores. One warp. */
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

/* Replaces the ranks of each other host by the mate there. Ranks are bits. */
__device__ __forceinline__ uint32_t reduce_to_mates(const p2p_self &self, uint32_t ranks)
{
    uint32_t mates = 0;
    for (int first = 0; first < self.num_ranks; first += ranks_per_host(self)) {
        const uint32_t some = ranks & ((1u << ranks_per_host(self)) - 1) << first;
        if (!some) continue;
        mates |= first == self.rank - self.rank % ranks_per_host(self)
                     ? some
                     : 1u << mate_of(self, self.rank, first);
    }
    return mates;
}

/* Sends to each mate which ranks of its host want this rank's token. One warp. */
__device__ __forceinline__ void send_wants(const p2p_self &self, const OpState &op,
                                           int32_t token, uint32_t peers)
{
    const int first = lane_id() * ranks_per_host(self);
    if (lane_id() >= num_hosts(self) || first == self.rank - self.rank % ranks_per_host(self))
        return;
    const int mate = mate_of(self, self.rank, first);
    uint64_t *to = wants_word(self, op, self.heap[mate], mate, self.rank, token);
    store_relaxed(to, stamp_word(op, peers >> first & ((1u << ranks_per_host(self)) - 1)));
    post_put(op, mate, to, 8);
}

/* The ranks to which this rank sends its token that `peers` want, as bits. `first`: the mates
 * are also sent *wants*, with the first piece. */
__device__ __forceinline__ uint32_t choose_routes(const p2p_self &self, const OpState &op,
                                                  int32_t token, bool first, uint32_t peers)
{
    if (!ranks_per_host(self)) return peers;
    if (first) send_wants(self, op, token, peers);
    return reduce_to_mates(self, peers);
}

/* Forwards a piece of row number `place` of the round of rank `from` to the ranks of this host
 * in `wants`. One warp. escapes(heap, source) returns the escape words of the piece; NULL: rows
 * here have none. */
template <int V, bool EXACT, class Escapes>
__device__ __forceinline__ bool forward_piece(const p2p_self &self, const OpState &op, int from,
                                              int32_t place, int piece, int32_t vectors,
                                              uint32_t wants, Escapes escapes)
{
    const int32_t vector = piece * V * WARP;
    const int first = self.rank - self.rank % ranks_per_host(self);
    uint4 *staged =
        staged_row(box_address(self, op, net_inbox(self), self.rank, from), place, vectors);
    uint4 q[V];
    if (!receive_piece<V, EXACT>(op, from, staged, vector, vectors, false, q)) return false;
    uint32_t *escape = escapes(net_inbox(self), source_number(self, self.rank, from));
    if (escape && !unhide_poison<V>(op, from, q, escape)) return false;
    poison_piece<V, EXACT>(staged, vector, vectors);
    const uint32_t mask = escape ? hide_poison<V>(q) : 0;
    for (; wants; wants &= wants - 1) {
        const int to = first + __ffs(wants) - 1;
        uint8_t *heap = self.heap[to];
        send_piece<V, EXACT>(staged_row(box_address(self, op, heap, to, from), place, vectors),
                             vector, vectors, q);
        if (mask) store_relaxed(escapes(heap, source_number(self, to, from)) + lane_id(), mask);
    }
    return true;
}

/* May a host add the partials of its ranks? Only if they form nodes of the tree. */
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
