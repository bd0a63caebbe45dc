/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch between hosts of several ranks, backend hosts alone: a row goes by the net once for each
 * host, to the sender's mate there, which hands it on.
 *
 * A step of the list sends, then hands on, then receives: what hands on token t waits for a send of an
 * earlier step, what receives it for a step that hands it on, or an earlier place of the same. */
#ifndef EPIC_DISPATCH_RELAY_CUH
#define EPIC_DISPATCH_RELAY_CUH

#include "cuda/dispatch/dispatch.cuh"
#include "cuda/net/relay.cuh"

/* The ranks that this rank's token goes to, of those that want it. */
__device__ __forceinline__ uint32_t choose_routes(const DispatchMove &m, int32_t token,
                                                  bool first, uint32_t peers)
{
    return choose_routes(m.job.plan.self, m.op, token, first, peers);
}

/* One unit: the tokens of a step, one or two, of a mate.  hand(from, token, piece, wants) hands a piece
 * on; `copied`: its pieces have places in the ring, without use. */
template <class PieceFeed, class Hand>
__device__ __forceinline__ bool forward_unit(const DispatchMove &m, const UnitWalk &walk,
                                             PieceFeed &feed, bool copied, Hand hand)
{
    const p2p_self &self = m.job.plan.self;
    const int from = wrap_rank(self.rank + walk.role * ranks_per_host(self), self.num_ranks);
    const int first = first_piece(m, walk), count = pieces_of(m, walk);
    const int32_t begin = m.first + received_before(m, walk.step);
    const int32_t many = __shfl_sync(ALL_LANES, m.tokens_of, from);
    const int32_t stop = min(min(feed.end, many), m.first + received_before(m, walk.step + 1));
    if (copied) feed.skip_pieces(count);
    for (int32_t token = begin; token < stop; token++) {
        uint32_t wants;
        if (!wait_wants(m.op, wants_word(self, m.op, net_inbox(self), self.rank, from, token),
                        from, wants))
            return false;
        for (int i = 0; i < count && wants; i++)
            if (!hand(from, token, first + i, wants)) return false;
    }
    return true;
}

#endif
