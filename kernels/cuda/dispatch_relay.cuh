/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch between hosts of several ranks, backend hosts alone: a row goes by the wire once for each
 * host, to the sender's mate there, which hands it on.
 *
 * A step of the list sends, then hands on, then receives: what hands on token t waits for a send of an
 * earlier step, what receives it for a step that hands it on, or an earlier place of the same. */
#ifndef EPIC_DISPATCH_RELAY_CUH
#define EPIC_DISPATCH_RELAY_CUH

#include "cuda/dispatch.cuh"
#include "cuda/relay.cuh"

#ifdef EPIC_HOSTS

/* Tells the mates which ranks of their hosts want this rank's token. */
__device__ __forceinline__ void tell_wants(const Move &m, int32_t token, uint32_t peers)
{
    const p2p_self &self = m.job.plan.self;
    const int first = lane_id() * self.local;
    if (lane_id() >= num_hosts(self) || first == self.rank - self.rank % self.local) return;
    const int mate = mate_of(self, self.rank, first);
    uint64_t *to = wants_word(self, m.now, self.heap[mate], mate, self.rank, token);
    store_relaxed(to, stamp(m.now, peers >> first & ((1u << self.local) - 1)));
    ship(m.now, mate, to, 8);
}

/* Hands on a piece of rank `from` to those of this host that want it, as bits. */
template <bool EXACT>
static __device__ __noinline__ bool hand_on_piece(const Move &m, int from, int32_t token,
                                                  int piece, uint32_t wants)
{
    const p2p_self &self = m.job.plan.self;
    const int32_t vector = piece * V * WARP, vectors = m.shape.vectors;
    const int64_t escape = ((int64_t)token * m.shape.pieces + piece) * WARP;
    const int first = self.rank - self.rank % self.local;
    uint4 *staged =
        staged_in(box_in(self, m.now, self.inbox, self.rank, from), token - m.first, vectors);
    uint4 q[V];
    if (!take_piece<V, EXACT>(m.now, from, staged, vector, vectors, false, q)) return false;
    if (!unhide_poison<V>(
            m.now, from, q,
            escapes_of(self, m.now, self.inbox, source_of(self, self.rank, from)) + escape))
        return false;
    restore_piece<V, EXACT>(staged, vector, vectors);
    const uint32_t mask = hide_poison<V>(q);
    for (; wants; wants &= wants - 1) {
        const int to = first + __ffs(wants) - 1;
        uint8_t *heap = self.heap[to];
        send_piece<V, EXACT>(
            staged_in(box_in(self, m.now, heap, to, from), token - m.first, vectors), vector,
            vectors, q);
        if (mask)
            store_relaxed(escapes_of(self, m.now, heap, source_of(self, to, from)) + escape +
                              lane_id(),
                          mask);
    }
    return true;
}

/* One unit: the tokens of a step, one or two, of a mate. */
template <bool EXACT, class Feed>
__device__ __forceinline__ bool hand_on(const Move &m, const Walk &walk, Feed &feed)
{
    const p2p_self &self = m.job.plan.self;
    const int from = wrap(self.rank + walk.role * self.local, self.num_ranks);
    const int first = first_piece(m, walk), count = pieces_of(m, walk);
    const int32_t begin = m.first + received_before(m, walk.step);
    const int32_t many = __shfl_sync(ALL_LANES, m.tokens_of, from);
    const int32_t stop = min(min(feed.end, many), m.first + received_before(m, walk.step + 1));
    if (m.shape.aligned) feed.pass(count);
    for (int32_t token = begin; token < stop; token++) {
        uint32_t wants;
        if (!take_wants(m.now, wants_word(self, m.now, self.inbox, self.rank, from, token),
                        from, wants))
            return false;
        for (int i = 0; i < count && wants; i++)
            if (!hand_on_piece<EXACT>(m, from, token, first + i, wants)) return false;
    }
    return true;
}

/* The ranks to which this rank's token goes that is for `peers`, as bits; mates are told with the
 * `first` piece. */
__device__ __forceinline__ uint32_t choose_routes(const Move &m, int32_t token, bool first,
                                                  uint32_t peers)
{
    const p2p_self &self = m.job.plan.self;
    if (!self.local) return peers;
    if (first) tell_wants(m, token, peers);
    return by_mates(self, peers);
}

#endif
#endif
