/* SPDX-License-Identifier: Apache-2.0 */
/* Implements dispatch with relays, for backend `hosts` with several ranks per host. A row
 * crosses the net once for every other host that needs it. The sender sends the row to its
 * *mate* on that host: if the sender is the i-th rank of its own host, the mate is the i-th
 * rank of the other host. The mate forwards the row to the ranks of its host that need it
 * (net/relay.cuh).
 *
 * All units form a list, which is divided into steps. Step i has these units, in this order.
 * `lag` is the number of tokens that are sent before the first token is forwarded and received.
 *
 *   send     token i: to ranks of this host, and to mates on other hosts
 *   forward  token i - lag of each mate: from the net inbox to the staging of ranks of this
 *            host
 *   receive  token i - lag of each source
 *
 * Ranks cannot wait for each other in a circle: a unit waits only for a row that another rank
 * sends or forwards in a unit that is earlier in its list. */
#ifndef EPIC_DISPATCH_RELAY_CUH
#define EPIC_DISPATCH_RELAY_CUH

#include "cuda/dispatch/dispatch.cuh"
#include "cuda/net/relay.cuh"

/* Returns a bit mask of the ranks to which this rank itself sends a token. `peers`: bit mask of
 * all ranks that need the token. Without relays, the result is `peers`. With relays, it
 * contains the peers on this rank's own host and, for each other host that needs the token,
 * this rank's mate there. If the unit has the token's first piece (`first`), also sends the
 * word *wants* to the mate on every other host. *wants* is a bit mask of the ranks of the
 * mate's host that need the row. */
__device__ __forceinline__ RankMask choose_routes(const DispatchMove &m, int32_t token,
                                                  bool first, RankMask peers)
{
    return choose_routes(m.job.plan.self, m.op, TOKEN_INDEX(m, token), first, peers);
}

/* Processes a unit that forwards pieces of one or two tokens that a mate on another host has
 * sent. For each piece, calls hand(from, token, piece, wants), which forwards the piece to the
 * ranks of this host in `wants`. `copied`: true if the ring of `feed` has a buffer for each
 * piece; forwarding does not use these buffers, so the function discards them. Returns false if
 * the group has failed. */
template <class PieceFeed, class Hand>
__device__ __forceinline__ bool forward_unit(const DispatchMove &m, const UnitWalk &walk,
                                             PieceFeed &feed, bool copied, Hand hand)
{
    const p2p_self &self = m.job.plan.self;
    const int from = wrap_rank(self.rank + walk.role * ranks_per_host(self), self.num_ranks);
    const int first = first_piece(m, walk), count = pieces_of(m, walk);
    const int32_t begin = m.round_begin + received_before(m, walk.step);
    const int32_t many = number_of_rank(m.tokens_of, from);
    const int32_t stop =
        min(min(feed.round_end, many), m.round_begin + received_before(m, walk.step + 1));
    if (copied) feed.skip_pieces(count);
    for (int32_t token = begin; token < stop; token++) {
        uint32_t wants;
        if (!wait_wants(
                m.op,
                wants_word(self, m.op, net_inbox(self), self.rank, from, TOKEN_INDEX(m, token)),
                from, wants))
            return false;
        for (int i = 0; i < count && wants; i++)
            if (!hand(from, token, first + i, wants)) return false;
    }
    return true;
}

#endif
