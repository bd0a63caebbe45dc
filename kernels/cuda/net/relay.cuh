/* SPDX-License-Identifier: Apache-2.0 */
/* Relays, of backend hosts alone: hosts of ranks_per_host(self) ranks each, host h those from h * local on.  A
 * rank's *mates* are the ranks in its place on other hosts.  Of rows alone, one goes by the net for
 * all ranks of a host: to the sender's mate there, which hands it on, or from the mate, which has
 * added what the ranks of its host have.  All else goes straight to whom it is for.
 *
 *     dispatch   row of rank (h', j) -- net --> (h, j) -- NVLink --> those of host h that want it
 *     combine    partials of host h  -- NVLink --> (h, j), their sum -- net --> (h', j)
 *
 * What ranks of a host store for each other on behalf of a rank of another host lies in their heaps,
 * in the place of that rank, or of the one on its host that is the storing rank's mate.  A stamped
 * word for each token (*wants*) says beforehand which ranks of the host want a row, or that a rank
 * has a partial. */
#ifndef EPIC_RELAY_CUH
#define EPIC_RELAY_CUH

#include "cuda/net/staging.cuh"

__device__ __forceinline__ int num_hosts(const p2p_self &self)
{
    return self.num_ranks / ranks_per_host(self);
}

/* The rank in the place of rank `like`, on the host of rank `on`. */
__device__ __forceinline__ int mate_of(const p2p_self &self, int like, int on)
{
    return on - on % ranks_per_host(self) + like % ranks_per_host(self);
}

/* Staging in a heap of rank `to`, in the place of rank `by`. */
__device__ __forceinline__ uint8_t *box_address(const p2p_self &self, const OpState &op,
                                                uint8_t *heap, int to, int by)
{
    const int64_t place = epoch_parity(op) * (self.num_ranks - 1) + source_number(self, to, by);
    return heap + self.at.staging + place * self.at.source_bytes;
}

__device__ __forceinline__ uint64_t *wants_word(const p2p_self &self, const OpState &op,
                                                uint8_t *heap, int to, int by, int32_t token)
{
    return (uint64_t *)(heap + wants_offset(self)) +
           ((int64_t)epoch_parity(op) * self.num_ranks + source_number(self, to, by)) *
               self.max_tokens +
           token;
}

/* One warp waits for such a word, which rank `from` brings. */
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

/* Ranks as bits; of other hosts one stands for all, the mate. */
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

/* One warp: tells the mates which ranks of their hosts want this rank's token. */
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

/* The ranks to which this rank's token goes that is for `peers`, as bits; mates are told with the
 * `first` piece. */
__device__ __forceinline__ uint32_t choose_routes(const p2p_self &self, const OpState &op,
                                                  int32_t token, bool first, uint32_t peers)
{
    if (!ranks_per_host(self)) return peers;
    if (first) send_wants(self, op, token, peers);
    return reduce_to_mates(self, peers);
}

/* One warp hands on a piece of a row of rank `from`, number `place` of the round, to the ranks of this
 * host that want it, as bits.  escapes(heap, source) says where what a special piece needs lies,
 * NULL: rows here have none. */
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

/* May a host add its ranks' partials?  The tree's nodes must be its own. */
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
