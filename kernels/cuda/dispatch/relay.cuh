/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch between hosts of several ranks; backend hosts only. A row crosses the net once per
 * host, to the sender's mate there, which forwards it (net/relay.cuh).
 *
 * A step of the list sends, then forwards, then receives. A unit that forwards token t waits
 * for a send of an earlier step. A unit that receives it waits for a unit that forwards it, in
 * an earlier step or earlier in the same step. So no wait is circular. */
#ifndef EPIC_DISPATCH_RELAY_CUH
#define EPIC_DISPATCH_RELAY_CUH

#include "cuda/dispatch/dispatch.cuh"
#include "cuda/net/relay.cuh"

/* The ranks to which this rank sends its token that `peers` want, as bits. */
__device__ __forceinline__ uint32_t choose_routes(const DispatchMove &m, int32_t token,
                                                  bool first, uint32_t peers)
{
    return choose_routes(m.job.plan.self, m.op, token, first, peers);
}

/* Forwards the tokens of a step, one or two, of a mate. hand(from, token, piece, wants)
 * forwards a piece. `copied`: its pieces have unused places in the ring. */
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
