/* SPDX-License-Identifier: Apache-2.0 */
/* What goes to other hosts.  The library of backend hosts is compiled with EPIC_HOSTS; in p2p's
 * nothing of this is left.
 *
 * A peer's heap cannot be written there: `heap[q]` is this rank's own *outbox*, laid out as a heap.
 * Kernels store into it as into a peer's, then ship() what they have stored: an entry in a ring in
 * host memory.  One thread of the rank (src/backend/hosts/ring.c) gives it to the net, and the
 * words come to the same places of the peer's heap, in any order.  So what all peers are told alike
 * lies in the outbox once, and what they are told apart is numbered by distance (place_of).
 *
 * Two things are asked of kernels that p2p does not need:
 *   - Whatever is shipped in an epoch is taken in that epoch, by waiting for it: a word that nobody
 *     waits for might land two epochs later, over the one that is there then.
 *   - Words of 8 bytes are shipped, whole: so a token's floats begin at even places.
 * An outbox of this parity may be written once the net has read all of it (`freed`). */
#ifndef EPIC_NET_CUH
#define EPIC_NET_CUH

#include "cuda/common/wait.cuh"

/* Is rank q on another host? */
__device__ __forceinline__ bool is_far(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    return !(self.near >> q & 1);
#else
    return false;
#endif
}

/* In arrays of a heap by source: what rank `to` is told by rank `by`. */
__device__ __forceinline__ int place_of(const p2p_self &self, int to, int by)
{
    return HOSTS ? wrap(by + self.num_ranks - to - 1, self.num_ranks) : by;
}

/* Choices of a token that arrays of a heap have room for; of p2p still a constant, so that its
 * kernels are what they were. */
#ifdef EPIC_HOSTS
#define MOST_TOP_K(self) ((self).max_top_k)
#else
#define MOST_TOP_K(self) DEVICE_MAX_TOP_K
#endif

/* From the words of records by rank to those by distance. */
__device__ __forceinline__ int64_t records_apart(const p2p_self &self, int q)
{
    return (place_of(self, q, self.rank) - self.rank) * self.max_tokens * MOST_TOP_K(self);
}

/* A token's floats begin at a multiple of this many. */
__device__ __forceinline__ int float_stride(int top_k)
{
    return HOSTS ? (top_k + 1) & ~1 : top_k;
}

#ifdef EPIC_HOSTS

/* A net takes a while: what is received must be far enough behind what is sent for it to be full,
 * and for the thread to find rows that lie one after the other. */
static inline int32_t far_lag(const p2p_self &self, int32_t lag, int32_t num_tokens)
{
    const int32_t ahead = self.ahead < num_tokens ? self.ahead : num_tokens;
    return lag > ahead ? lag : ahead;
}

/* One thread: is there room in the ring for entry number `place`? */
__device__ __forceinline__ bool has_room(const Now &now, uint64_t place)
{
    p2p_control *control = control_of(now);
    if (place < load_relaxed(&control->room)) return true;
    if (!may_ask(&control->room_asked, 1)) return false;
    const uint64_t room = load_relaxed(&now.self->ring.words->taken) + P2P_RING_ENTRIES;
    store_relaxed(&control->room, room); /* an older one is as true */
    return place < room;
}

/* One thread: an entry takes its place.  When the group is broken, what does not fit is lost: nobody
 * will look at it.  `room`: as it was a while ago. */
__device__ __forceinline__ void take_place(const Now &now, uint64_t entry, uint64_t *entries,
                                           uint64_t room)
{
    const uint64_t place = atomicAdd((unsigned long long *)&control_of(now)->posted, 1ull);
    if (place >= room &&
        !wait_alone(now, -1, P2P_PHASE_GRID, [&] { return has_room(now, place); }))
        return;
    store_relaxed(entries + place % P2P_RING_ENTRIES, entry | P2P_ENTRY_LAP(place));
}

/* One thread: what it has stored, or seen stored, is there for whoever reads the entry.  What can be
 * read before the fence is, as it takes no time beside it. */
static __device__ __noinline__ void post(const Now &now, uint64_t entry)
{
    uint64_t *entries = now.self->ring.entries;
    const uint64_t room = load_relaxed(&control_of(now)->room);
    __threadfence_system();
    take_place(now, entry, entries, room);
}

/* One thread: `bytes` that are stored for rank q go.  Nothing to do for ranks of this host. */
__device__ __forceinline__ void ship(const Now &now, int q, const void *from, uint32_t bytes)
{
    const p2p_self &self = *now.self;
    if (!is_far(self, q)) return;
    const uint64_t word = (uint64_t)((const uint8_t *)from - self.heap[q]) / 8;
    post(now, P2P_ENTRY(q, word, bytes / 8));
}

/* One thread: the same of any number of words. */
__device__ __forceinline__ void ship_many(const Now &now, int q, const uint64_t *from,
                                          int64_t words)
{
    for (int64_t at = 0; at < words; at += P2P_ENTRY_MOST_WORDS)
        ship(now, q, from + at, (uint32_t)min(words - at, (int64_t)P2P_ENTRY_MOST_WORDS) * 8);
}

/* One warp: what its lanes have stored. */
__device__ __forceinline__ void ship_together(const Now &now, int q, const void *from,
                                              uint32_t bytes)
{
    __syncwarp();
    if (lane_id() == 0) ship(now, q, from, bytes);
}

/* One warp has stored one of the pieces of what goes to rank q for that token; who stores the last one
 * ships the whole. */
__device__ __forceinline__ void ship_when_whole(const p2p_self &self, const Now &now, int q,
                                                int32_t token, int pieces, const void *whole,
                                                uint32_t bytes)
{
    if (!is_far(self, q)) return;
    __syncwarp();
    if (lane_id() != 0) return;
    uint32_t *sent = (uint32_t *)(now.heap + self.at.sent) + q * self.max_tokens + token;
    __threadfence(); /* the system's is for who ships: it has seen this */
    if (atomicAdd(sent, 1u) + 1 != (uint32_t)pieces) return;
    store_relaxed(sent, 0u);
    ship(now, q, whole, bytes);
}

/* One warp: a token's floats, `count` of them; poison stands in for the half of a word that is not
 * there. */
__device__ __forceinline__ void ship_floats(const Now &now, int q, uint32_t *floats, int count)
{
    if (count == 0 || !is_far(*now.self, q)) return;
    if (count % 2 && lane_id() == 0) store_relaxed(floats + count, POISON);
    ship_together(now, q, floats, (uint32_t)(count + 1) / 2 * 8);
}

/* One warp: the records of some tokens, by the lane of each that `speaks` for it; one word at
 * least. */
__device__ __forceinline__ void ship_record(const Now &now, int q, const uint64_t *record,
                                            bool speaks, int words)
{
    __syncwarp();
    if (speaks) ship(now, q, record, (uint32_t)max(words, 1) * 8);
}

/* One thread: nobody ships anything more in this epoch, all entries of which have their places. */
static __device__ __noinline__ void end_shipping(const Now &now)
{
    p2p_control *control = control_of(now);
    uint64_t *entries = now.self->ring.entries;
    const uint64_t room = load_relaxed(&control->room), epochs = load_relaxed(&control->epochs);
    take_place(now, P2P_ENTRY(0, P2P_EPOCH_ENDS, 0), entries, room);
    store_relaxed(&control->epochs, epochs + 1);
}

/* One thread: may the outbox of the next epoch's parity be written? */
__device__ __forceinline__ bool outbox_is_free(const Now &now)
{
    p2p_control *control = control_of(now);
    const uint64_t epochs = load_relaxed(&control->epochs);
    const uint64_t *freed = &now.self->ring.words->freed;
    return wait_alone(now, -1, P2P_PHASE_GRID, [&] {
        if (load_relaxed(&control->freed) + 1 >= epochs) return true;
        if (may_ask(&control->freed_asked, 1))
            store_relaxed(&control->freed, load_relaxed(freed));
        return load_relaxed(&control->freed) + 1 >= epochs;
    });
}

/* One warp, late in an operation: so that the next one need not ask. */
__device__ __forceinline__ void look_freed(const Now &now)
{
    if (lane_id() == 0)
        store_relaxed(&control_of(now)->freed, load_relaxed(&now.self->ring.words->freed));
}

static __device__ void tell_end(const Now &now);

/* Every thread of a CTA, before it stores anything for a peer.  false: the group is broken. */
static __device__ __noinline__ bool begin_shipping(const Now &now)
{
    const bool ok = __syncthreads_and(threadIdx.x || outbox_is_free(now)) != 0;
    if (!ok && threadIdx.x == 0) tell_end(now);
    return ok;
}

/* One warp of the grid, between two rounds. */
static __device__ bool turn_over(const Now &now)
{
    bool ok = true;
    if (lane_id() == 0) {
        end_shipping(now);
        ok = outbox_is_free(now);
    }
    return __all_sync(ALL_LANES, ok) != 0;
}

/* One warp, lane = rank: a word of its announcement, as far as one here has read it. */
__device__ __forceinline__ uint64_t hear_for_all(const Now &now, const uint64_t *from,
                                                 int which, int rank)
{
    p2p_control *control = control_of(now);
    uint64_t *copy = &control->heard[parity(now)][which][rank];
    uint64_t said = load_relaxed(copy);
    const bool missing = __any_sync(ALL_LANES, !stamped(now, said)) != 0;
    bool ask = false;
    if (missing && lane_id() == 0) ask = may_ask(&control->heard_asked, 1);
    if (!__any_sync(ALL_LANES, ask)) return said;
    if (!stamped(now, said)) said = load_relaxed(from);
    if (stamped(now, said)) store_relaxed(copy, said);
    return said;
}

/* Has all of an announcement come?  Some operations look at its first word alone. */
__device__ __forceinline__ bool is_whole(const Now &now, const uint64_t *announcement)
{
    bool whole = true;
#pragma unroll
    for (int i = 0; i < P2P_ANNOUNCE_WORDS; i++)
        whole &= stamped(now, load_relaxed(announcement + i));
    return whole;
}

#else

__device__ __forceinline__ void ship(const Now &, int, const void *, uint32_t)
{
}

__device__ __forceinline__ void ship_together(const Now &, int, const void *, uint32_t)
{
}

__device__ __forceinline__ void ship_when_whole(const p2p_self &, const Now &, int, int32_t,
                                                int, const void *, uint32_t)
{
}

__device__ __forceinline__ void ship_floats(const Now &, int, uint32_t *, int)
{
}

__device__ __forceinline__ void ship_record(const Now &, int, const uint64_t *, bool, int)
{
}

__device__ __forceinline__ void end_shipping(const Now &)
{
}

__device__ __forceinline__ void look_freed(const Now &)
{
}

__device__ __forceinline__ bool begin_shipping(const Now &)
{
    return true;
}

__device__ __forceinline__ bool turn_over(const Now &)
{
    return true;
}

__device__ __forceinline__ bool is_whole(const Now &, const uint64_t *)
{
    return true;
}

__device__ __forceinline__ uint64_t hear_for_all(const Now &, const uint64_t *, int, int)
{
    return 0;
}

#endif
#endif
