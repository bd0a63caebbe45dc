/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels send data to ranks on other hosts (backend `hosts`). In backend p2p all ranks are
 * on one host, so the functions that post puts or wait for the net do nothing there.
 *
 * A kernel cannot store into the heap of a rank on another host. For such a rank q, heap[q]
 * points to this rank's own *outbox*, which has the layout of a heap. The kernel stores its
 * words there and calls post_put(), which appends an entry to a ring in host memory. The proxy
 * thread (src/backend/hosts/proxy.c) reads the entry and starts a *put*: the net copies the
 * words to the same offsets of rank q's *inbox*. The words of different puts may arrive in any
 * order.
 *
 *   kernel warp       stores words into the outbox (relaxed), then __syncwarp
 *   one lane          __threadfence_system, then stores the ring entry. So a thread that reads
 *                     the entry also sees the words
 *   proxy thread      polls the ring, reads the entry, starts the put
 *   peer's warp       polls its inbox: every word is its own flag
 *
 * A rank has one outbox for all ranks on other hosts. A word that every rank gets, such as an
 * announcement, is stored once and sent by several puts. An array whose contents depend on the
 * destination has one part per destination, with index source_number().
 *
 * Kernels of backend `hosts` follow two rules that p2p does not need:
 *
 *   1. In each epoch (operation or round) they wait for every word that peers put in that
 *      epoch. Otherwise a word could arrive two epochs later and overwrite a newer word.
 *   2. Each token's array of floats begins at an even index, because the net copies whole words
 *      of 8 bytes. With an odd index, a put could overwrite a float of another token.
 *
 * The arrays in the outbox have two halves, for even and odd epochs. The net reads the words of
 * a put from the outbox some time after the kernel has posted the put. So before a kernel
 * writes to a half, the net must have read the words of all puts of two epochs ago, which used
 * the same half. The counter `freed` is the number of epochs whose words the net has read
 * completely. */
#ifndef EPIC_NET_CUH
#define EPIC_NET_CUH

#include "cuda/common/wait.cuh"

/* Returns the lag of a kernel: the number of tokens that it must send before it receives the
 * first token. This is the larger of two numbers: `lag` (the lag that suffices without a net)
 * and the net's window (EPIC_NET_WINDOW, at most num_tokens). With a large lag, the net always
 * has data to send, and the proxy thread can send adjacent rows in one put. */
static inline int32_t lag_for_net(const p2p_self &self, int32_t lag, int32_t num_tokens)
{
    const int32_t window = net_window(self);
    const int32_t ahead = window < num_tokens ? window : num_tokens;
    return lag > ahead ? lag : ahead;
}

/* Returns true if the ring has space for entry `index`. It has space if the proxy thread has
 * read the older entry at the same position. Called by one thread. */
__device__ __forceinline__ bool ring_has_room(const OpState &op, uint64_t index)
{
    p2p_net_control *control = control_of(op)->net;
    if (index < load_relaxed(&control->ring_room)) return true;
    if (!poll_permit(&control->room_polled_at, 1)) return false;
    const uint64_t room = load_relaxed(&op.self->net->ring.words->taken) + P2P_RING_ENTRIES;
    /* Several threads may store here. If an older value overwrites a newer one, the only effect
     * is one more read of `taken`. */
    store_relaxed(&control->ring_room, room);
    return index < room;
}

/* Appends an entry to the ring at `entries`. If the ring is full, waits for space. If the group
 * fails during this wait, appends nothing. `room`: an earlier value of control->ring_room. All
 * entries with an index below `room` have space. Called by one thread. */
__device__ __forceinline__ void write_entry(const OpState &op, uint64_t entry,
                                            uint64_t *entries, uint64_t room)
{
    const uint64_t index =
        atomicAdd((unsigned long long *)&control_of(op)->net->posted_entries, 1ull);
    if (index >= room &&
        !wait_thread(op, -1, P2P_PHASE_GRID, [&] { return ring_has_room(op, index); }))
        return;
    store_relaxed(entries + index % P2P_RING_ENTRIES, entry | P2P_ENTRY_LAP(index));
}

/* Executes a system fence, and then appends an entry to the ring. Because of the fence, a
 * thread that reads the entry sees all stores that this thread has made or observed. ring_room
 * is loaded before the fence, so that the load overlaps with the fence. Called by one
 * thread. */
static __device__ __noinline__ void post_entry(const OpState &op, uint64_t entry)
{
    uint64_t *entries = op.self->net->ring.entries;
    const uint64_t room = load_relaxed(&control_of(op)->net->ring_room);
    __threadfence_system();
    write_entry(op, entry, entries, room);
}

/* Sends `bytes` bytes (a multiple of 8) at address `from` to rank q. If q is on another host,
 * heap[q] is this rank's outbox, `from` is in this outbox, and the net copies the bytes to the
 * same offset in the inbox of q. If q is on this host, heap[q] is the heap of q itself, so the
 * bytes are already there, and the function does nothing. The words must fit into one entry of
 * the ring (P2P_ENTRY_WORDS_BITS). Called by one thread. */
__device__ __forceinline__ void post_put(const OpState &op, int q, const void *from,
                                         uint32_t bytes)
{
    const p2p_self &self = *op.self;
    if (!is_remote(self, q)) return;
    const uint64_t word = (uint64_t)((const uint8_t *)from - self.heap[q]) / 8;
    INVARIANT(bytes / 8 < 1u << P2P_ENTRY_WORDS_BITS);
    post_entry(op, P2P_ENTRY(q, word, bytes / 8));
}

/* Like post_put(), for any number of words. Appends as many entries as needed. Called by one
 * thread. */
__device__ __forceinline__ void post_put_words(const OpState &op, int q, const uint64_t *from,
                                               int64_t words)
{
    for (int64_t at = 0; at < words; at += P2P_ENTRY_MOST_WORDS)
        post_put(op, q, from + at,
                 (uint32_t)min(words - at, (int64_t)P2P_ENTRY_MOST_WORDS) * 8);
}

/* Like post_put(), for rows. With MANY_RANKS, an entry describes less than 64 KB, so a row may
 * need several entries. With few ranks it describes less than 2 MB, and one entry must suffice,
 * because the loop would need registers of the kernels that send rows. Called by one thread. */
__device__ __forceinline__ void post_put_row(const OpState &op, int q, const void *from,
                                             uint32_t bytes)
{
    if (MANY_RANKS)
        post_put_words(op, q, (const uint64_t *)from, bytes / 8);
    else
        post_put(op, q, from, bytes);
}

/* Like post_put_row(), for bytes that several lanes of a warp have stored. Called by the whole
 * warp. */
__device__ __forceinline__ void post_put_warp(const OpState &op, int q, const void *from,
                                              uint32_t bytes)
{
    if (!HOSTS) return;
    __syncwarp();
    if (lane_id() == 0) post_put_row(op, q, from, bytes);
}

/* Called by each warp that has stored a piece of a token's row for rank q. `index`:
 * TOKEN_INDEX() of the token. Only the call for the last missing piece posts puts. They send the
 * whole row: `bytes` bytes at address `whole`. `pieces`: number of pieces of the row. Called by
 * a whole warp. */
__device__ __forceinline__ void post_put_when_complete(const p2p_self &self, const OpState &op,
                                                       int q, int32_t index, int pieces,
                                                       const void *whole, uint32_t bytes)
{
    if (!is_remote(self, q)) return;
    __syncwarp();
    if (lane_id() != 0) return;
    uint32_t *stored = (uint32_t *)(op.heap + self.at.net->stored_pieces) +
                       q * p2p_index_tokens(&self.at, self.max_tokens) + index;
    /* This fence makes the warp's stores visible before the warp counts its piece. So the
     * system fence in post_put() of the last warp covers the stores of all warps. */
    __threadfence();
    if (atomicAdd(stored, 1u) + 1 != (uint32_t)pieces) return;
    store_relaxed(stored, 0u);
    post_put_row(op, q, whole, bytes);
}

/* Sends `count` floats at address `floats` to rank q. The warp has stored them before. They are
 * weights of one token, or gradients of these weights. If count is odd, poison (the mark of a
 * word that has not arrived) is appended, because the net copies words of 8 bytes. Called by a
 * whole warp. */
__device__ __forceinline__ void post_put_floats(const OpState &op, int q, uint32_t *floats,
                                                int count)
{
    if (count == 0 || !is_remote(*op.self, q)) return;
    if (count % 2 && lane_id() == 0) store_relaxed(floats + count, POISON);
    post_put_warp(op, q, floats, (uint32_t)(count + 1) / 2 * 8);
}

/* Sends records (stamped words with the slots of a token, plan/view.cuh) to rank q. Each lane
 * for which has_record is true sends the first `words` words (at least one) of its record.
 * Called by a whole warp. */
__device__ __forceinline__ void
post_put_records(const OpState &op, int q, const uint64_t *record, bool has_record, int words)
{
    if (!HOSTS) return;
    __syncwarp();
    if (has_record) post_put(op, q, record, (uint32_t)max(words, 1) * 8);
}

/* Appends an end marker to the ring: an entry by which the proxy thread sees that the epoch has
 * no more puts. After this call, no thread may post puts of this epoch. Called by one thread of
 * the rank. */
static __device__ __noinline__ void post_epoch_end(const OpState &op)
{
    p2p_net_control *control = control_of(op)->net;
    uint64_t *entries = op.self->net->ring.entries;
    const uint64_t room = load_relaxed(&control->ring_room),
                   epochs = load_relaxed(&control->ended_epochs);
    write_entry(op, P2P_ENTRY(0, P2P_EPOCH_ENDS, 0), entries, room);
    store_relaxed(&control->ended_epochs, epochs + 1);
}

/* Waits until the next epoch (n) may write to its half of the outbox. Epoch n - 2 has used the
 * same half, so the net must first have read all data of epoch n - 2. Called by one thread.
 * Returns false if the group has failed. */
__device__ __forceinline__ bool wait_outbox_free(const OpState &op)
{
    p2p_net_control *control = control_of(op)->net;
    const uint64_t epochs = load_relaxed(&control->ended_epochs);
    const uint64_t *freed = &op.self->net->ring.words->freed;
    return wait_thread(op, -1, P2P_PHASE_GRID, [&] {
        if (load_relaxed(&control->freed) + 1 >= epochs) return true;
        if (poll_permit(&control->freed_polled_at, 1))
            store_relaxed(&control->freed, load_relaxed(freed));
        return load_relaxed(&control->freed) + 1 >= epochs;
    });
}

/* Copies the counter `freed` from host memory to control memory, where reads are fast. Kernels
 * call this function near the end of an operation, so that the next operation finds a recent
 * value. Called by one warp. */
__device__ __forceinline__ void refresh_freed(const OpState &op)
{
    if (HOSTS && lane_id() == 0)
        store_relaxed(&control_of(op)->net->freed,
                      load_relaxed(&op.self->net->ring.words->freed));
}

static __device__ void report_aborted_wait(const OpState &op);

/* Calls wait_outbox_free() for a whole CTA. Called by all threads of the CTA before they store
 * anything for a peer. Returns false if the group has failed. */
static __device__ __noinline__ bool wait_outbox(const OpState &op)
{
    const bool ok = __syncthreads_and(threadIdx.x || wait_outbox_free(op)) != 0;
    if (!ok && threadIdx.x == 0) report_aborted_wait(op);
    return ok;
}

/* Ends the puts of a round: posts the end marker for the proxy thread, and waits until the next
 * round may write to the outbox. Called by one warp of the grid. Returns false if the group has
 * failed. */
static __device__ bool end_round_puts(const OpState &op)
{
    bool ok = true;
    if (lane_id() == 0) {
        post_epoch_end(op);
        ok = wait_outbox_free(op);
    }
    return __all_sync(ALL_LANES, ok) != 0;
}

/* Returns word `which` (P2P_ANNOUNCED_*) of the announcement of `rank`. Does not wait: if the
 * result has the stamp of an older epoch, the word has not arrived. Polls of an inbox in host
 * memory are slow, so all warps read a copy in control memory. If the copy is old, a warp for
 * which poll_permit() returns true reads the word in the inbox, at `from`, and updates the
 * copy. Called by a whole warp, with a different rank in each lane. */
__device__ __forceinline__ uint64_t read_announcement_cached(const OpState &op,
                                                             const uint64_t *from, int which,
                                                             int rank)
{
    p2p_net_control *control = control_of(op)->net;
    uint64_t *copy = &control->announcements[epoch_parity(op)][which][rank];
    uint64_t word = load_relaxed(copy);
    const bool missing = __any_sync(ALL_LANES, !is_stamped(op, word)) != 0;
    bool ask = false;
    if (missing && lane_id() == 0) ask = poll_permit(&control->announcements_polled_at, 1);
    if (!__any_sync(ALL_LANES, ask)) return word;
    if (!is_stamped(op, word)) word = load_relaxed(from);
    if (is_stamped(op, word)) store_relaxed(copy, word);
    return word;
}

/* Returns true if all words of an announcement have arrived. A kernel must wait for all words
 * even if it uses only the first one (rule 1 at the top of this file). */
__device__ __forceinline__ bool is_announcement_complete(const OpState &op,
                                                         const uint64_t *announcement)
{
    bool whole = true;
#pragma unroll
    for (int i = 0; i < P2P_ANNOUNCE_WORDS; i++)
        whole &= is_stamped(op, load_relaxed(announcement + i));
    return whole;
}

#endif
