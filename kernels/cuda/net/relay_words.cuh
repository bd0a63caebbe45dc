/* SPDX-License-Identifier: Apache-2.0 */
/* Relays for words that every rank sends to all ranks: announcements and counts. Only the
 * backend `hosts` with many ranks uses them, in groups whose rows use relays (net/relay.cuh).
 * Without relays, each rank would post one put for every rank of every other host.
 *
 * Host h has the ranks h * L to h * L + L - 1, where L is ranks_per_host(). Hosts a and b
 * exchange words only through their ranks with index (a + b) % L (word_relay()). So each rank
 * exchanges words with about num_hosts / L other hosts:
 *
 *   rank of host a      stores its words in the heaps of all ranks of host a, and in no other
 *   relay of host a     polls the words of its host in its heap, copies them to its outbox, and
 *                       posts a put to the relay of host b. The fence of post_put() orders the
 *                       words before the put
 *   relay of host b     polls its net inbox, and stores the words in the heaps of all ranks of
 *                       host b, at the place at which the rank of host a would store them
 *   rank of host b      polls its own heap, as for the words of ranks of its host
 *
 * All words are stamped, so a relay sees which of them belong to this epoch. A relay waits for
 * every word that it must forward (rule 1 of net/net.cuh).
 *
 * No rank waits in a circle: a rank stores its own words before it relays others, relays to
 * other hosts wait only for ranks of their host, and relays from other hosts wait only for
 * these relays. */
#ifndef EPIC_RELAY_WORDS_CUH
#define EPIC_RELAY_WORDS_CUH

#include "cuda/net/net.cuh"

/* Returns the number of hosts of the group. Requires a group with relays. */
__device__ __forceinline__ int num_hosts(const p2p_self &self)
{
    return self.num_ranks / ranks_per_host(self);
}

/* Returns the mate of rank `like` on the host of rank `on` (the rank there that has the index
 * of `like` in its host). */
__device__ __forceinline__ int mate_of(const p2p_self &self, int like, int on)
{
    return on - on % ranks_per_host(self) + like % ranks_per_host(self);
}

/* Returns the lowest rank on this rank's host. Requires a group with relays. */
__device__ __forceinline__ int first_near_rank(const p2p_self &self)
{
    return self.rank - self.rank % ranks_per_host(self);
}

/* The hosts with which this rank exchanges words. Host number i of them is first + i * step.
 * is_served() returns whether it exists and is not this rank's host. */
struct ServedHosts {
    int first, step, count;
};

__device__ __forceinline__ ServedHosts served_hosts(const p2p_self &self)
{
    const int local = ranks_per_host(self), own = self.rank / local;
    const int first = (self.rank + local - own % local) % local;
    return {first, local,
            first < num_hosts(self) ? (num_hosts(self) - 1 - first) / local + 1 : 0};
}

/* Returns host number i of this rank's served hosts, or -1 if this is the rank's own host. */
__device__ __forceinline__ int served_host(const p2p_self &self, const ServedHosts &served,
                                           int i)
{
    const int host = served.first + i * served.step;
    return host == self.rank / ranks_per_host(self) ? -1 : host;
}

/* Returns the rank from which this rank itself receives the words of rank q: q if it is on this
 * host, or the relay of this host or, if this rank is that relay, the relay of the other
 * host. */
__device__ __forceinline__ int word_sender(const p2p_self &self, int q)
{
    if (!relays_words(self) || !is_remote(self, q)) return q;
    const int relay = word_relay(self, self.rank, q);
    return relay == self.rank ? word_relay(self, q, self.rank) : relay;
}

/* Returns the rank from which this rank receives the records of rank q: q if it is on this
 * host, otherwise the mate of q, which expands the lists of q (plan/record_lists.cuh). If this
 * rank is that mate, or if there are no lists, returns q. */
__device__ __forceinline__ int record_sender(const p2p_self &self, int q)
{
    if (!relays_words(self) || !is_remote(self, q)) return q;
    const int mate = mate_of(self, q, self.rank);
    return mate == self.rank ? q : mate;
}

/* Returns the number of ranks to which this rank sends records directly: all ranks or, with
 * lists (plan/record_lists.cuh), those of this host. */
__device__ __forceinline__ int num_record_peers(const p2p_self &self)
{
    return relays_words(self) ? ranks_per_host(self) : self.num_ranks;
}

/* Returns the i-th of these ranks, for i from 1 to num_record_peers(). The last one is this
 * rank. */
__device__ __forceinline__ int record_peer(const p2p_self &self, int i)
{
    if (relays_words(self))
        return mate_of(self, self.rank % ranks_per_host(self) + i, self.rank);
    return wrap_rank(self.rank + i, self.num_ranks);
}

/* Returns the address of this rank's outbox. Requires a group with relays. */
__device__ __forceinline__ uint8_t *outbox_base(const p2p_self &self)
{
    return self.heap[wrap_rank(self.rank + ranks_per_host(self), self.num_ranks)];
}

/* ----------------------------------------------------------------------- announcements ---- */

/* Copies the announcement of rank q of this host to the outbox, and posts it to the relays of
 * all served hosts. Called by one thread, which has read all words of the announcement. */
__device__ __forceinline__ void send_announcement_on(const p2p_self &self, const OpState &op,
                                                     const ServedHosts &served, int q)
{
    const uint64_t *from = announcement_words(self, op, self.heap[self.rank], q);
    uint64_t *to = announcement_words(self, op, outbox_base(self), q);
    for (int i = 0; i < P2P_ANNOUNCE_WORDS; i++) store_relaxed(to + i, load_relaxed(from + i));
    for (int i = 0; i < served.count; i++) {
        const int host = served_host(self, served, i);
        if (host >= 0)
            post_put(op, mate_of(self, self.rank, host * ranks_per_host(self)), to,
                     P2P_ANNOUNCE_WORDS * 8);
    }
}

/* Stores the announcement of rank q of another host, which is in the net inbox, in the heaps of
 * all ranks of this host. Called by one thread, which has read all its words. */
__device__ __forceinline__ void distribute_announcement(const p2p_self &self, const OpState &op,
                                                        int q)
{
    const int first = first_near_rank(self);
    const uint64_t *from = announcement_words(self, op, net_inbox(self), q);
    uint64_t words[P2P_ANNOUNCE_WORDS];
    for (int i = 0; i < P2P_ANNOUNCE_WORDS; i++) words[i] = load_relaxed(from + i);
    for (int p = first; p < first + ranks_per_host(self); p++)
        for (int i = P2P_ANNOUNCED_SIGNATURE + 1; i < P2P_ANNOUNCE_WORDS; i++)
            store_relaxed(announcement_words(self, op, self.heap[p], q) + i, words[i]);
    /* The announcing rank executed a fence before it stored the signature. This fence passes
     * that order on: a rank that sees the signature also sees what the fence covered. */
    __threadfence_system();
    for (int p = first; p < first + ranks_per_host(self); p++)
        store_relaxed(announcement_words(self, op, self.heap[p], q) + P2P_ANNOUNCED_SIGNATURE,
                      words[P2P_ANNOUNCED_SIGNATURE]);
}

/* Relays the announcements of this epoch, in both directions. Forwards each announcement as
 * soon as it has arrived, so that an absent rank does not hide the announcements of others.
 * Called by the warp that has announced the operation. If the group fails, the wait is
 * recorded in op.aborted_wait. */
static __device__ __noinline__ void relay_announcements(const OpState &op)
{
    const p2p_self &self = *op.self;
    const ServedHosts served = served_hosts(self);
    const int local = ranks_per_host(self), near = first_near_rank(self) + lane_id();
    const int num_sources = served.count * local;
    /* Bit i: this lane must still distribute the announcement number i * 32 + lane_id() of the
     * served hosts. A group of 256 ranks has at most 4 * 32 of them. */
    uint32_t awaited = 0;
    for (int i = 0; i * WARP + lane_id() < num_sources; i++)
        if (served_host(self, served, (i * WARP + lane_id()) / local) >= 0) awaited |= 1u << i;
    bool sends = lane_id() < local && served.count > 0;
    wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        const uint8_t *heap = self.heap[self.rank];
        if (sends &&
            is_announcement_complete(op, announcement_words(self, op, (uint8_t *)heap, near))) {
            send_announcement_on(self, op, served, near);
            sends = false;
        }
        for (uint32_t rest = awaited; rest; rest &= rest - 1) {
            const int i = __ffs(rest) - 1, source = i * WARP + lane_id();
            const int q = served_host(self, served, source / local) * local + source % local;
            if (!is_announcement_complete(op, announcement_words(self, op, net_inbox(self), q)))
                continue;
            distribute_announcement(self, op, q);
            awaited &= ~(1u << i);
        }
        return __all_sync(ALL_LANES, !sends && !awaited) != 0;
    });
}

/* ----------------------------------------------------------------------------- counts ---- */

/* Words that every rank sends to all ranks. They are in an array of the heap that has one part
 * per rank, at the same place in all heaps. */
struct SharedWords {
    int64_t offset; /* offset in a heap of the part of rank 0, in 8-byte words */
    int64_t stride; /* number of words from one part to the next */
    int words;      /* number of words that a rank sends */
};

/* Returns the address in `heap` of word i of rank q. */
__device__ __forceinline__ uint64_t *shared_word(const SharedWords &w, uint8_t *heap, int q,
                                                 int i)
{
    return (uint64_t *)heap + w.offset + q * w.stride + i;
}

/* First step of a relay: waits for the words of all ranks of this host, and copies them to the
 * outbox. Called by `threads` threads, each with its own index `thread`. has_arrived(word)
 * returns whether a word is valid. Returns false if the group has failed. */
template <class HasArrived>
__device__ __forceinline__ bool collect_words(const OpState &op, const SharedWords &w,
                                              int thread, int threads, HasArrived has_arrived)
{
    const p2p_self &self = *op.self;
    const int total = served_hosts(self).count ? ranks_per_host(self) * w.words : 0;
    bool ok = true;
    for (int i = thread; i < total && ok; i += threads) {
        const int q = first_near_rank(self) + i / w.words;
        const uint64_t *from = shared_word(w, op.heap, q, i % w.words);
        uint64_t word = 0;
        ok = wait_thread(op, q, P2P_PHASE_COUNTS, [&] {
            word = load_relaxed(from);
            return has_arrived(word);
        });
        if (ok) store_relaxed(shared_word(w, outbox_base(self), q, i % w.words), word);
    }
    return ok;
}

/* Second step: posts the words in the outbox to the relays of the served hosts. Called by the
 * threads of the first step, after a barrier. */
__device__ __forceinline__ void post_words(const OpState &op, const SharedWords &w, int thread,
                                           int threads)
{
    const p2p_self &self = *op.self;
    const ServedHosts served = served_hosts(self);
    const int local = ranks_per_host(self);
    for (int i = thread; i < served.count * local; i += threads) {
        const int host = served_host(self, served, i / local);
        const int q = first_near_rank(self) + i % local;
        if (host >= 0)
            post_put_words(op, mate_of(self, self.rank, host * local),
                           shared_word(w, outbox_base(self), q, 0), w.words);
    }
}

/* Third step: waits for the words of all ranks of the served hosts, and stores them in the
 * heaps of all ranks of this host. Called by the threads of the second step. Returns false if
 * the group has failed. */
template <class HasArrived>
__device__ __forceinline__ bool distribute_words(const OpState &op, const SharedWords &w,
                                                 int thread, int threads,
                                                 HasArrived has_arrived)
{
    const p2p_self &self = *op.self;
    const ServedHosts served = served_hosts(self);
    const int local = ranks_per_host(self), first = first_near_rank(self);
    bool ok = true;
    for (int i = thread; i < served.count * local * w.words && ok; i += threads) {
        const int source = i / w.words, at = i % w.words;
        const int host = served_host(self, served, source / local);
        if (host < 0) continue;
        const int q = host * local + source % local;
        const uint64_t *from = shared_word(w, net_inbox(self), q, at);
        uint64_t word = 0;
        ok = wait_thread(op, mate_of(self, self.rank, q), P2P_PHASE_COUNTS, [&] {
            word = load_relaxed(from);
            return has_arrived(word);
        });
        for (int p = first; p < first + local && ok; p++)
            store_relaxed(shared_word(w, self.heap[p], q, at), word);
    }
    return ok;
}

/* Relays the words of this host to other hosts, and those of other hosts to the ranks of this
 * host. Each rank has stored its own words in the heaps of its host, and later polls the words
 * of all ranks in its heap (word_base()). Called by all threads of one CTA. `ok`: false if this
 * thread has found a failure. Returns false if a thread has found that the group has failed. */
template <class HasArrived>
__device__ __forceinline__ bool relay_words(const OpState &op, const SharedWords &w, bool ok,
                                            HasArrived has_arrived)
{
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x;
    ok = ok && collect_words(op, w, thread, threads, has_arrived);
    ok = __syncthreads_and(ok) != 0;
    if (!ok) return false;
    post_words(op, w, thread, threads);
    return distribute_words(op, w, thread, threads, has_arrived);
}

/* Like relay_words(), but called by one thread. */
__device__ __forceinline__ bool relay_words_alone(const OpState &op, const SharedWords &w)
{
    const auto has_arrived = [&](uint64_t word) { return is_stamped(op, word); };
    if (!collect_words(op, w, 0, 1, has_arrived)) return false;
    post_words(op, w, 0, 1);
    return distribute_words(op, w, 0, 1, has_arrived);
}

#endif
