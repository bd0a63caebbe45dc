/* SPDX-License-Identifier: Apache-2.0 */
/* Puts to other hosts, for the library of backend hosts; in p2p all functions are empty.
 *
 * A kernel cannot write the heap of a peer on another host. For such a peer, heap[q] is this
 * rank's own *outbox*, laid out as a heap. A kernel stores into the outbox and calls
 * post_put(), which appends an entry to a ring in host memory. The rank's proxy thread
 * (src/backend/hosts/proxy.c) passes it to the net, which copies the words to the same offsets
 * of the peer's inbox, in any order.
 *
 *   kernel warp       stores words into the outbox (relaxed), __syncwarp
 *   one lane          __threadfence_system, then stores the entry: a reader of
 *                     the entry sees the words
 *   proxy thread      polls the entry, starts the put
 *   peer's warp       polls its inbox: every word is its own flag
 *
 * Words that are equal for all peers are in the outbox once. Words that differ are indexed by
 * distance (source_number).
 *
 * Kernels of backend hosts follow two rules that p2p does not need. (1) Every word that arrives
 * in an epoch is waited for in that epoch; an unread word could arrive two epochs later and
 * overwrite a newer one. (2) The net copies whole words of 8 bytes, so the floats of a token
 * begin at even indices.
 *
 * The outbox of one parity may be written again when the net has read all of it (`freed`). */
#ifndef EPIC_NET_CUH
#define EPIC_NET_CUH

#include "cuda/common/wait.cuh"

/* A lag that suits a net: receiving stays far enough behind sending for the net to be busy, and
 * for the proxy to find rows that lie next to each other. */
static inline int32_t lag_for_net(const p2p_self &self, int32_t lag, int32_t num_tokens)
{
    const int32_t window = net_window(self);
    const int32_t ahead = window < num_tokens ? window : num_tokens;
    return lag > ahead ? lag : ahead;
}

#ifdef EPIC_HOSTS

/* Does the ring have room for entry number `place`? One thread. */
__device__ __forceinline__ bool ring_has_room(const OpState &op, uint64_t place)
{
    p2p_control *control = control_of(op);
    if (place < load_relaxed(&control->room)) return true;
    if (!poll_permit(&control->room_polled_at, 1)) return false;
    const uint64_t room = load_relaxed(&op.self->ring.words->taken) + P2P_RING_ENTRIES;
    store_relaxed(&control->room, room); /* an older value is also correct */
    return place < room;
}

/* Takes the next place of the ring for an entry and stores it. One thread. `room`: an earlier
 * value of the ring's room. In a broken group an entry that has no room is dropped. */
__device__ __forceinline__ void write_entry(const OpState &op, uint64_t entry,
                                            uint64_t *entries, uint64_t room)
{
    const uint64_t place = atomicAdd((unsigned long long *)&control_of(op)->posted, 1ull);
    if (place >= room &&
        !wait_thread(op, -1, P2P_PHASE_GRID, [&] { return ring_has_room(op, place); }))
        return;
    store_relaxed(entries + place % P2P_RING_ENTRIES, entry | P2P_ENTRY_LAP(place));
}

/* Posts an entry. One thread. The system fence orders all stores that this thread made or has
 * seen before the entry. Words that do not depend on the fence are loaded before it. */
static __device__ __noinline__ void post_entry(const OpState &op, uint64_t entry)
{
    uint64_t *entries = op.self->ring.entries;
    const uint64_t room = load_relaxed(&control_of(op)->room);
    __threadfence_system();
    write_entry(op, entry, entries, room);
}

/* Posts the put of `bytes` that were stored for rank q at `from`. One thread. Does nothing if q
 * is on this host. */
__device__ __forceinline__ void post_put(const OpState &op, int q, const void *from,
                                         uint32_t bytes)
{
    const p2p_self &self = *op.self;
    if (!is_remote(self, q)) return;
    const uint64_t word = (uint64_t)((const uint8_t *)from - self.heap[q]) / 8;
    post_entry(op, P2P_ENTRY(q, word, bytes / 8));
}

/* Posts the put of what the lanes of a warp have stored. The whole warp. */
__device__ __forceinline__ void post_put_warp(const OpState &op, int q, const void *from,
                                              uint32_t bytes)
{
    __syncwarp();
    if (lane_id() == 0) post_put(op, q, from, bytes);
}

/* One warp has stored one of the `pieces` of a token's row for rank q. The warp that stores the
 * last one posts the put of the whole row. */
__device__ __forceinline__ void post_put_when_complete(const p2p_self &self, const OpState &op,
                                                       int q, int32_t token, int pieces,
                                                       const void *whole, uint32_t bytes)
{
    if (!is_remote(self, q)) return;
    __syncwarp();
    if (lane_id() != 0) return;
    uint32_t *sent = (uint32_t *)(op.heap + self.at.sent) + q * self.max_tokens + token;
    /* orders this lane before the count; the lane that posts has the system fence */
    __threadfence();
    if (atomicAdd(sent, 1u) + 1 != (uint32_t)pieces) return;
    store_relaxed(sent, 0u);
    post_put(op, q, whole, bytes);
}

/* Posts the put of a token's `count` floats. One warp. If count is odd, poison fills the last
 * word. */
__device__ __forceinline__ void post_put_floats(const OpState &op, int q, uint32_t *floats,
                                                int count)
{
    if (count == 0 || !is_remote(*op.self, q)) return;
    if (count % 2 && lane_id() == 0) store_relaxed(floats + count, POISON);
    post_put_warp(op, q, floats, (uint32_t)(count + 1) / 2 * 8);
}

/* Posts the put of records, `words` words of each lane with `speaks`, at least one word. One
 * warp. */
__device__ __forceinline__ void post_put_records(const OpState &op, int q,
                                                 const uint64_t *record, bool speaks, int words)
{
    __syncwarp();
    if (speaks) post_put(op, q, record, (uint32_t)max(words, 1) * 8);
}

/* Posts the end of the epoch: no thread posts anything in it after this. One thread. */
static __device__ __noinline__ void post_epoch_end(const OpState &op)
{
    p2p_control *control = control_of(op);
    uint64_t *entries = op.self->ring.entries;
    const uint64_t room = load_relaxed(&control->room), epochs = load_relaxed(&control->epochs);
    write_entry(op, P2P_ENTRY(0, P2P_EPOCH_ENDS, 0), entries, room);
    store_relaxed(&control->epochs, epochs + 1);
}

/* Waits until the outbox of the next epoch's parity may be written. One thread. */
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

/* Reads `freed` late in an operation, so that the next one need not wait for host memory. One
 * warp. */
__device__ __forceinline__ void refresh_freed(const OpState &op)
{
    if (lane_id() == 0)
        store_relaxed(&control_of(op)->freed, load_relaxed(&op.self->ring.words->freed));
}

static __device__ void report_aborted_wait(const OpState &op);

/* Waits for the outbox before a CTA stores anything for a peer. All threads. false: the group
 * is broken. */
static __device__ __noinline__ bool wait_outbox(const OpState &op)
{
    const bool ok = __syncthreads_and(threadIdx.x || wait_outbox_free(op)) != 0;
    if (!ok && threadIdx.x == 0) report_aborted_wait(op);
    return ok;
}

/* Ends the puts of a round and waits for the outbox of the next one. One warp of the grid. */
static __device__ bool end_round_puts(const OpState &op)
{
    bool ok = true;
    if (lane_id() == 0) {
        post_epoch_end(op);
        ok = wait_outbox_free(op);
    }
    return __all_sync(ALL_LANES, ok) != 0;
}

/* A word of the announcement of rank `lane`, as one thread of this rank last read it. One warp.
 */
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

/* Have all words of an announcement arrived? Some operations wait for its first word only. */
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

/* Backend p2p has no puts: peers see every store. There, all of these do nothing. */
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

/* Like post_put(), for any number of words. One thread. */
__device__ __forceinline__ void post_put_words(const OpState &op, int q, const uint64_t *from,
                                               int64_t words)
{
    for (int64_t at = 0; at < words; at += P2P_ENTRY_MOST_WORDS)
        post_put(op, q, from + at,
                 (uint32_t)min(words - at, (int64_t)P2P_ENTRY_MOST_WORDS) * 8);
}

#endif
