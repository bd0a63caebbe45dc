/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks exchange the rows that they need while they find keep limits
 * (plan/flat_drop.cuh), in libraries for many ranks. With few ranks, each rank sends all its
 * numbers of rows to all ranks. With R ranks this would take R x R words in each heap. So here
 * each rank adds the numbers that concern itself:
 *
 *   rows   each rank q sends to each rank d the number of rows that the tokens of q need on d
 *   sum    each rank d adds these numbers, and sends the sum to all ranks
 *   lower  only at the end: each rank d sends to each rank q the number of rows that the tokens
 *          of lower ranks than q need on d
 *
 * In the backend `hosts` each repetition of the bisection has its own words. In p2p all
 * repetitions use the same words, with `lower` as one more repetition that uses the words of
 * `rows`. Each word contains the number of its repetition. No rank overwrites a word that has
 * not been read, because rows and sums alternate: rank q sends the rows of repetition n + 1 to
 * rank d only after it has received the sum of repetition n from d, and d sends this sum only
 * after it has read the rows of repetition n. And d sends the sum of repetition n + 1 only
 * after it has received rows from all ranks, which each rank sends only after it has read all
 * sums of repetition n.
 *
 * With relays for words (net/relay_words.cuh), rows and `lower` for rank d of another host go
 * through the relays of both hosts, in one put per pair of hosts. */
#ifndef EPIC_OWNER_EXCHANGE_CUH
#define EPIC_OWNER_EXCHANGE_CUH

#include "cuda/plan/counts.cuh"

/* Number of bits of the value in a word. The higher bits contain the number of the repetition,
 * modulo 8. The largest value is the sum of the rows of 2^8 ranks with 2^20 tokens. */
#define OWNER_VALUE_BITS 29

__device__ __forceinline__ uint64_t owner_word(const OpState &op, int search, int32_t value)
{
    return stamp_word(op, (uint32_t)search << OWNER_VALUE_BITS | (uint32_t)value);
}

__device__ __forceinline__ bool is_owner_word(const OpState &op, uint64_t word, int search)
{
    return is_stamped(op, word) && (uint32_t)word >> OWNER_VALUE_BITS == ((uint32_t)search & 7);
}

__device__ __forceinline__ int32_t value_of_word(uint64_t word)
{
    return (int32_t)((uint32_t)word & ((1u << OWNER_VALUE_BITS) - 1));
}

/* Returns the address in `heap` of the words of repetition `search` in the array `searches`:
 *
 *   rows [num_ranks]   index source_number() of the sender; also used for `lower`
 *   sums [num_ranks]   index: the rank that has added the rows
 *   words in relays    relayed_word(); backend `hosts` only */
__device__ __forceinline__ uint64_t *owner_words(const p2p_self &self, const OpState &op,
                                                 uint8_t *heap, int search)
{
    return (uint64_t *)(heap + self.at.searches) +
           (epoch_parity(op) * P2P_SEARCHES + search % P2P_SEARCHES) *
               p2p_search_words(self.num_ranks);
}

/* Returns the address in `heap` of the word that rank `by` sends to rank `to`, on its way
 * through the relays. Between two hosts these words are adjacent. A word has the same place
 * in the outbox of the first relay as in the inbox of the second. So the place depends on the
 * distance from host to host. A relay exchanges words with every L-th host, where L is the
 * number of ranks per host. So distance / L differs for all its hosts above its own, and for
 * all its hosts below. Requires relays for words. */
__device__ __forceinline__ uint64_t *relayed_word(const p2p_self &self, const OpState &op,
                                                  uint8_t *heap, int search, int by, int to)
{
    const int local = ranks_per_host(self), hosts = num_hosts(self);
    const int a = by / local, b = to / local;
    const int place =
        a < b ? (b - a - 1) / local : (hosts + b - a - 1) / local + (hosts + local - 1) / local;
    return owner_words(self, op, heap, search) + 2 * self.num_ranks +
           (place * local + by % local) * local + to % local;
}

/* Sends `value` to rank d, or to the relay on its way. Called by one thread. */
__device__ __forceinline__ void send_owner_word(const OpState &op, int search, int d,
                                                int32_t value)
{
    const p2p_self &self = *op.self;
    const uint64_t word = owner_word(op, search, value);
    if (relays_words(self) && is_remote(self, d)) {
        uint8_t *relay = self.heap[word_relay(self, self.rank, d)];
        store_relaxed(relayed_word(self, op, relay, search, self.rank, d), word);
        return;
    }
    uint64_t *to =
        owner_words(self, op, self.heap[d], search) + source_number(self, d, self.rank);
    store_relaxed(to, word);
    post_put(op, d, to, 8);
}

/* Waits for a word. `sender`: the rank from which it comes. Called by one thread. Returns false
 * if the group has failed. */
__device__ __forceinline__ bool
wait_owner_word(const OpState &op, int sender, const uint64_t *from, int search, uint64_t &word)
{
    return wait_thread(op, sender, P2P_PHASE_COUNTS, [&] {
        word = load_relaxed(from);
        return is_owner_word(op, word, search);
    });
}

/* Calls handle(host, i, j) for each served host (net/relay_words.cuh) and all i, j below
 * ranks_per_host(), until it returns false. Called by all threads of the CTA, which share the
 * work. Returns false if a call has returned false. */
template <class Handle>
__device__ __forceinline__ bool for_each_served_pair(const p2p_self &self, Handle handle)
{
    const ServedHosts served = served_hosts(self);
    const int local = ranks_per_host(self);
    bool ok = true;
    for (int i = threadIdx.x; i < served.count * local * local && ok; i += blockDim.x) {
        const int host = served_host(self, served, i / (local * local));
        if (host >= 0) ok = handle(host, i / local % local, i % local);
    }
    return ok;
}

/* Forwards the words of this host to other hosts, and those of other hosts to the ranks of this
 * host. Called by all threads of the CTA, after this rank has sent its own words. Returns false
 * if a thread has found that the group has failed. */
static __device__ bool relay_owner_words(const OpState &op, int search)
{
    const p2p_self &self = *op.self;
    const int local = ranks_per_host(self), first = first_near_rank(self);
    const ServedHosts served = served_hosts(self);
    bool ok = for_each_served_pair(self, [&](int host, int i, int j) {
        const int by = first + i, to = host * local + j;
        uint64_t word = 0;
        if (!wait_owner_word(op, by, relayed_word(self, op, op.heap, search, by, to), search,
                             word))
            return false;
        store_relaxed(relayed_word(self, op, outbox_base(self), search, by, to), word);
        return true;
    });
    ok = __syncthreads_and(ok) != 0;
    if (!ok) return false;
    for (int i = threadIdx.x; i < served.count; i += blockDim.x) {
        const int host = served_host(self, served, i);
        if (host >= 0)
            post_put_words(
                op, mate_of(self, self.rank, host * local),
                relayed_word(self, op, outbox_base(self), search, first, host * local),
                local * local);
    }
    return for_each_served_pair(self, [&](int host, int i, int j) {
        const int by = host * local + i, to = first + j;
        uint64_t word = 0;
        if (!wait_owner_word(op, mate_of(self, self.rank, by),
                             relayed_word(self, op, net_inbox(self), search, by, to), search,
                             word))
            return false;
        store_relaxed(
            owner_words(self, op, self.heap[to], search) + source_number(self, to, by), word);
        return true;
    });
}

/* Thread d sends `value` to rank d. `received` becomes the value that rank d has sent to this
 * rank. Called by all threads of the CTA. Returns false if this thread has found that the group
 * has failed. */
static __device__ bool exchange_owner_words(const OpState &op, int search, int32_t value,
                                            int32_t &received)
{
    const p2p_self &self = *op.self;
    const int d = threadIdx.x;
    uint64_t word = 0;
    if (d < self.num_ranks) send_owner_word(op, search, d, value);
    bool ok = !relays_words(self) || relay_owner_words(op, search);
    if (ok && d < self.num_ranks)
        ok = wait_owner_word(op, word_sender(self, d),
                             owner_words(self, op, word_base(op, d), search) +
                                 source_number(self, self.rank, d),
                             search, word);
    received = value_of_word(word);
    return ok;
}

/* Sends `sum` to all ranks. In thread d, `received` becomes the sum of rank d. Called by all
 * threads of the CTA. Returns false if this thread has found that the group has failed. */
static __device__ bool share_owner_sum(const OpState &op, int search, int32_t sum,
                                       int32_t &received)
{
    const p2p_self &self = *op.self;
    const int d = threadIdx.x;
    const int64_t sums = self.num_ranks;
    uint64_t word = 0;
    bool ok = true;
    if (d < self.num_ranks && !(relays_words(self) && is_remote(self, d))) {
        uint64_t *to = owner_words(self, op, self.heap[d], search) + sums + self.rank;
        store_relaxed(to, owner_word(op, search, sum));
        post_put(op, d, to, 8);
    }
    if (relays_words(self)) {
        const int64_t offset =
            owner_words(self, op, op.heap, search) + sums - (const uint64_t *)op.heap;
        ok = relay_words(op, {offset, 1, 1}, true,
                         [&](uint64_t w) { return is_owner_word(op, w, search); });
    }
    if (ok && d < self.num_ranks)
        ok = wait_owner_word(op, word_sender(self, d),
                             owner_words(self, op, word_base(op, d), search) + sums + d, search,
                             word);
    received = value_of_word(word);
    return ok;
}

/* Exchanges the numbers of rows of one repetition. `rows`: in thread d, the number of rows that
 * this rank's tokens need on rank d. Sets p.needed_rows[d], the number of rows that all tokens
 * need on rank d, and prepares p.rows_before_cta for exchange_lower_rows(). Called by all
 * threads of the CTA. Returns false if the group has failed. */
static __device__ __noinline__ bool exchange_needed_rows(Planner &p, const OpState &op,
                                                         int search, int32_t rows)
{
    const int d = threadIdx.x, ranks = op.self->num_ranks;
    int32_t lower = 0, sum = 0, received = 0;
    bool ok = exchange_owner_words(op, search, rows, received);
    if (d < ranks) p.needed_rows[d] = received;
    if (!__syncthreads_and(ok)) return false;
    for (int q = 0; q < ranks; q++) {
        if (q < d) lower += p.needed_rows[q];
        sum += p.needed_rows[q];
    }
    __syncthreads();
    ok = share_owner_sum(op, search, sum, received);
    if (d < ranks) {
        p.needed_rows[d] = received;
        p.rows_before_cta[d] = lower;
    }
    return __syncthreads_and(ok) != 0;
}

/* Ends the exchanges: sets p.rows_before_cta[d], the number of rows that the tokens of lower
 * ranks need on rank d. `search`: number of the next repetition. Called by all threads of the
 * CTA. Returns false if the group has failed. */
static __device__ __noinline__ bool exchange_lower_rows(Planner &p, const OpState &op,
                                                        int search)
{
    const int d = threadIdx.x, ranks = op.self->num_ranks;
    int32_t received = 0;
    const bool ok =
        exchange_owner_words(op, search, d < ranks ? p.rows_before_cta[d] : 0, received);
    if (d < ranks) p.rows_before_cta[d] = received;
    return __syncthreads_and(ok) != 0;
}

#endif
