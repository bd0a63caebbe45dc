/* SPDX-License-Identifier: Apache-2.0 */
/* What goes to other hosts.  The library of backend hosts is compiled with EPIC_HOSTS; in p2p's
 * nothing of this is left.
 *
 * A peer's heap cannot be written there: `heap[q]` is this rank's own *outbox*, laid out as a heap.
 * Kernels store into it as into a peer's, then post_put() what they have stored: an entry in a ring in
 * host memory.  One thread of the rank (src/backend/hosts/proxy.c) gives it to the net, and the
 * words come to the same places of the peer's heap, in any order.  So what all peers are told alike
 * lies in the outbox once, and what they are told num_send_only_ctas is numbered by distance (source_number).
 *
 * Two things are asked of kernels that p2p does not need:
 *   - Whatever is shipped in an epoch is taken in that epoch, by waiting for it: a word that nobody
 *     waits for might land two epochs later, over the one that is there then.
 *   - Words of 8 bytes are shipped, whole: so a token's floats begin at even places.
 * An outbox of this parity may be written once the net has read all of it (`freed`). */
#ifndef EPIC_NET_CUH
#define EPIC_NET_CUH

#include "cuda/common/wait.cuh"

/* A net takes a while: what is received must be far enough behind what is sent for it to be full,
 * and for the thread to find rows that lie one after the other. */
static inline int32_t lag_for_net(const p2p_self &self, int32_t lag, int32_t num_tokens)
{
    const int32_t window = net_window(self);
    const int32_t ahead = window < num_tokens ? window : num_tokens;
    return lag > ahead ? lag : ahead;
}

#ifdef EPIC_HOSTS

/* One thread: is there room in the ring for entry number `place`? */
__device__ __forceinline__ bool ring_has_room(const OpState &op, uint64_t place)
{
    p2p_control *control = control_of(op);
    if (place < load_relaxed(&control->room)) return true;
    if (!poll_permit(&control->room_polled_at, 1)) return false;
    const uint64_t room = load_relaxed(&op.self->ring.words->taken) + P2P_RING_ENTRIES;
    store_relaxed(&control->room, room); /* an older one is as true */
    return place < room;
}

/* One thread: an entry takes its place.  When the group is broken, what does not fit is lost: nobody
 * will look at it.  `room`: as it was a while ago. */
__device__ __forceinline__ void write_entry(const OpState &op, uint64_t entry,
                                            uint64_t *entries, uint64_t room)
{
    const uint64_t place = atomicAdd((unsigned long long *)&control_of(op)->posted, 1ull);
    if (place >= room &&
        !wait_thread(op, -1, P2P_PHASE_GRID, [&] { return ring_has_room(op, place); }))
        return;
    store_relaxed(entries + place % P2P_RING_ENTRIES, entry | P2P_ENTRY_LAP(place));
}

/* One thread: what it has stored, or seen stored, is there for whoever reads the entry.  What can be
 * read before the fence is, as it takes no time beside it. */
static __device__ __noinline__ void post_entry(const OpState &op, uint64_t entry)
{
    uint64_t *entries = op.self->ring.entries;
    const uint64_t room = load_relaxed(&control_of(op)->room);
    __threadfence_system();
    write_entry(op, entry, entries, room);
}

/* One thread: `bytes` that are stored for rank q go.  Nothing to do for ranks of this host. */
__device__ __forceinline__ void post_put(const OpState &op, int q, const void *from,
                                         uint32_t bytes)
{
    const p2p_self &self = *op.self;
    if (!is_remote(self, q)) return;
    const uint64_t word = (uint64_t)((const uint8_t *)from - self.heap[q]) / 8;
    post_entry(op, P2P_ENTRY(q, word, bytes / 8));
}

/* One warp: what its lanes have stored. */
__device__ __forceinline__ void post_put_warp(const OpState &op, int q, const void *from,
                                              uint32_t bytes)
{
    __syncwarp();
    if (lane_id() == 0) post_put(op, q, from, bytes);
}

/* One warp has stored one of the pieces of what goes to rank q for that token; who stores the last one
 * ships the whole. */
__device__ __forceinline__ void post_put_when_complete(const p2p_self &self, const OpState &op,
                                                       int q, int32_t token, int pieces,
                                                       const void *whole, uint32_t bytes)
{
    if (!is_remote(self, q)) return;
    __syncwarp();
    if (lane_id() != 0) return;
    uint32_t *sent = (uint32_t *)(op.heap + self.at.sent) + q * self.max_tokens + token;
    __threadfence(); /* the system's is for who ships: it has seen this */
    if (atomicAdd(sent, 1u) + 1 != (uint32_t)pieces) return;
    store_relaxed(sent, 0u);
    post_put(op, q, whole, bytes);
}

/* One warp: a token's floats, `count` of them; poison stands in for the half of a word that is not
 * there. */
__device__ __forceinline__ void post_put_floats(const OpState &op, int q, uint32_t *floats,
                                                int count)
{
    if (count == 0 || !is_remote(*op.self, q)) return;
    if (count % 2 && lane_id() == 0) store_relaxed(floats + count, POISON);
    post_put_warp(op, q, floats, (uint32_t)(count + 1) / 2 * 8);
}

/* One warp: the records of some tokens, by the lane of each that `speaks` for it; one word at
 * least. */
__device__ __forceinline__ void post_put_records(const OpState &op, int q,
                                                 const uint64_t *record, bool speaks, int words)
{
    __syncwarp();
    if (speaks) post_put(op, q, record, (uint32_t)max(words, 1) * 8);
}

/* One thread: nobody ships anything more in this epoch, all entries of which have their places. */
static __device__ __noinline__ void post_epoch_end(const OpState &op)
{
    p2p_control *control = control_of(op);
    uint64_t *entries = op.self->ring.entries;
    const uint64_t room = load_relaxed(&control->room), epochs = load_relaxed(&control->epochs);
    write_entry(op, P2P_ENTRY(0, P2P_EPOCH_ENDS, 0), entries, room);
    store_relaxed(&control->epochs, epochs + 1);
}

/* One thread: may the outbox of the next epoch's parity be written? */
__device__ __forceinline__ bool wait_outbox_free(const OpState &op)
{
    p2p_control *control = control_of(op);
    const uint64_t epochs = load_relaxed(&control->epochs);
    const uint64_t *freed = &op.self->ring.words->freed;
    return wait_thread(op, -1, P2P_PHASE_GRID, [&] {
        if (load_relaxed(&control->freed) + 1 >= epochs) return true;
        if (poll_permit(&control->freed_polled_at, 1))
            store_relaxed(&control->freed, load_relaxed(freed));
        return load_relaxed(&control->freed) + 1 >= epochs;
    });
}

/* One warp, late in an operation: so that the next one need not ask. */
__device__ __forceinline__ void refresh_freed(const OpState &op)
{
    if (lane_id() == 0)
        store_relaxed(&control_of(op)->freed, load_relaxed(&op.self->ring.words->freed));
}

static __device__ void report_aborted_wait(const OpState &op);

/* Every thread of a CTA, before it stores anything for a peer.  false: the group is broken. */
static __device__ __noinline__ bool wait_outbox(const OpState &op)
{
    const bool ok = __syncthreads_and(threadIdx.x || wait_outbox_free(op)) != 0;
    if (!ok && threadIdx.x == 0) report_aborted_wait(op);
    return ok;
}

/* One warp of the grid, between two rounds. */
static __device__ bool end_round_puts(const OpState &op)
{
    bool ok = true;
    if (lane_id() == 0) {
        post_epoch_end(op);
        ok = wait_outbox_free(op);
    }
    return __all_sync(ALL_LANES, ok) != 0;
}

/* One warp, lane = rank: a word of its announcement, as far as one here has read it. */
__device__ __forceinline__ uint64_t read_announcement_cached(const OpState &op,
                                                             const uint64_t *from, int which,
                                                             int rank)
{
    p2p_control *control = control_of(op);
    uint64_t *copy = &control->announcements[epoch_parity(op)][which][rank];
    uint64_t said = load_relaxed(copy);
    const bool missing = __any_sync(ALL_LANES, !is_stamped(op, said)) != 0;
    bool ask = false;
    if (missing && lane_id() == 0) ask = poll_permit(&control->announcements_polled_at, 1);
    if (!__any_sync(ALL_LANES, ask)) return said;
    if (!is_stamped(op, said)) said = load_relaxed(from);
    if (is_stamped(op, said)) store_relaxed(copy, said);
    return said;
}

/* Has all of an announcement come?  Some operations look at its first word alone. */
__device__ __forceinline__ bool is_announcement_complete(const OpState &op,
                                                         const uint64_t *announcement)
{
    bool whole = true;
#pragma unroll
    for (int i = 0; i < P2P_ANNOUNCE_WORDS; i++)
        whole &= is_stamped(op, load_relaxed(announcement + i));
    return whole;
}

#else

__device__ __forceinline__ void post_put(const OpState &, int, const void *, uint32_t)
{
}

__device__ __forceinline__ void post_put_warp(const OpState &, int, const void *, uint32_t)
{
}

__device__ __forceinline__ void post_put_when_complete(const p2p_self &, const OpState &, int,
                                                       int32_t, int, const void *, uint32_t)
{
}

__device__ __forceinline__ void post_put_floats(const OpState &, int, uint32_t *, int)
{
}

__device__ __forceinline__ void post_put_records(const OpState &, int, const uint64_t *, bool,
                                                 int)
{
}

__device__ __forceinline__ void post_epoch_end(const OpState &)
{
}

__device__ __forceinline__ void refresh_freed(const OpState &)
{
}

__device__ __forceinline__ bool wait_outbox(const OpState &)
{
    return true;
}

__device__ __forceinline__ bool end_round_puts(const OpState &)
{
    return true;
}

__device__ __forceinline__ bool is_announcement_complete(const OpState &, const uint64_t *)
{
    return true;
}

__device__ __forceinline__ uint64_t read_announcement_cached(const OpState &, const uint64_t *,
                                                             int, int)
{
    return 0;
}

#endif

/* One thread: the same of any number of words. */
__device__ __forceinline__ void post_put_words(const OpState &op, int q, const uint64_t *from,
                                               int64_t words)
{
    for (int64_t at = 0; at < words; at += P2P_ENTRY_MOST_WORDS)
        post_put(op, q, from + at,
                 (uint32_t)min(words - at, (int64_t)P2P_ENTRY_MOST_WORDS) * 8);
}

#endif
