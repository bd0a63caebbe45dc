/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch with relays (backend hosts, several ranks per host). A row crosses the net once for
 * each other host. The sender sends it to its *mate* on that host, the rank that has the same
 * index there as the sender has on its own host. The mate forwards the row to the ranks of its
 * host that need it (net/relay.cuh).
 *
 * The units of step i have these roles, in this order. Forwarding and receiving stay `lag`
 * tokens behind sending.
 *
 *   send     token i: to ranks of this host, and to mates on other hosts
 *   forward  token i - lag of each mate: net inbox -> staging of ranks of this host
 *   receive  token i - lag of each source
 *
 * No two ranks wait for each other in a circle. A forward waits for a send of an earlier step.
 * A receive waits for a forward of an earlier step, or of the same step but earlier in the
 * list. */
#ifndef EPIC_DISPATCH_RELAY_CUH
#define EPIC_DISPATCH_RELAY_CUH

#include "cuda/dispatch/dispatch.cuh"
#include "cuda/net/relay.cuh"

/* Returns a bit mask of the ranks to which this rank itself sends its token. These are `peers`,
 * but with the ranks of each other host replaced by this rank's mate there. `first`: the unit
 * has the token's first piece, so it also sends each mate the word *wants*, a bit mask of the
 * ranks of the mate's host that need the row (bit i: the i-th rank of that host). */
__device__ __forceinline__ uint32_t choose_routes(const DispatchMove &m, int32_t token,
                                                  bool first, uint32_t peers)
{
    return choose_routes(m.job.plan.self, m.op, token, first, peers);
}

/* Forwards the pieces of a unit: one or two tokens that come from one mate. hand(from, token,
 * piece, wants) forwards one piece to the ranks of this host in `wants`. `copied`: true if
 * `feed` has one buffer in its ring for each piece of every unit. Forwarding does not use the
 * ring, so this function skips the buffers of the unit's pieces. Returns false if the group of
 * ranks has failed. */
template <class PieceFeed, class Hand>
__device__ __forceinline__ bool forward_unit(const DispatchMove &m, const UnitWalk &walk,
                                             PieceFeed &feed, bool copied, Hand hand)
{
    const p2p_self &self = m.job.plan.self;
    const int from = wrap_rank(self.rank + walk.role * ranks_per_host(self), self.num_ranks);
    const int first = first_piece(m, walk), count = pieces_of(m, walk);
    const int32_t begin = m.round_begin + received_before(m, walk.step);
    const int32_t many = __shfl_sync(ALL_LANES, m.tokens_of, from);
    const int32_t stop =
        min(min(feed.round_end, many), m.round_begin + received_before(m, walk.step + 1));
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
