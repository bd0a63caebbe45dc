/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch with layout FLAT. A token has one row on each rank that owns one of its experts,
 * even if several of its choices go there. Each row has *extras*: for each choice of the token
 * that goes to the row's rank, the local expert and the weight. The warp that receives the
 * first piece of a row also receives the row's extras, and stores them to two arrays:
 *
 *   recv_expert   [recv_rows, top_k]  local experts of the token, then -1
 *   slot_weights  [recv_rows, top_k]  weights of these choices, then 0 */
#ifndef EPIC_DISPATCH_FLAT_CUH
#define EPIC_DISPATCH_FLAT_CUH

#include "cuda/dispatch/dispatch.cuh"

/* Loads the row word of `token`, a token of `rank`, into all lanes: the index of the token's
 * row on this rank. If the kernel makes the plan, it is possible that the word has not arrived
 * yet. */
__device__ __forceinline__ uint64_t peek_row(const DispatchMove &m, int rank, int32_t token)
{
    const p2p_self &self = m.job.plan.self;
    if (m.has_new_plan) return load_relaxed(row_word_from(self, m.op, rank, token));
    return (uint32_t)__ldg(m.plan.records + record_index(self, rank, token, m.top_k));
}

/* The plan's array `entries` has top_k elements for `token`, a token of `rank`. Sets the first
 * of these elements to `first`, and all others to -1. Called by a whole warp. */
__device__ __forceinline__ void store_entries(const DispatchMove &m, const int32_t *entries,
                                              int rank, int32_t token, int32_t first)
{
    const int64_t at = record_index(m.job.plan.self, rank, token, m.top_k);
    for (int k = lane_id(); k < m.top_k; k += WARP)
        ((int32_t *)entries)[at + k] = k ? -1 : first;
}

/* Waits until the row word of `token`, a token of `rank`, has arrived. The row word contains
 * the index of the token's row on this rank. `word`: the result of peek_row(). In lane 0,
 * `slot` becomes the index of the token's row on this rank, or -1 if it has no row. In all
 * other lanes, `slot` becomes -1. `more` becomes false, because there are no other words (see
 * read_record()). If `keep` is true, also copies the index into the plan that this kernel
 * makes. Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool read_row(const DispatchMove &m, int rank, int32_t token,
                                         bool keep, uint64_t word, int32_t &slot, bool &more)
{
    more = false;
    slot = lane_id() == 0 ? (int32_t)word : -1;
    if (!m.has_new_plan) return true;
    const p2p_self &self = m.job.plan.self;
    bool again = false;
    const bool ok = wait_warp(m.op, record_sender(self, rank), P2P_PHASE_RECORD, [&] {
        if (again) word = load_relaxed(row_word_from(self, m.op, rank, token));
        again = true;
        return __all_sync(ALL_LANES, is_stamped(m.op, word)) != 0;
    });
    const uint32_t value = (uint32_t)word;
    slot = ok && lane_id() == 0 && value != RECORD_ABSENT ? (int32_t)value : -1;
    if (ok && keep) {
        store_entries(m, m.plan.records, rank, token,
                      is_valid_row(value) ? (int32_t)value : -1);
        if (value == RECORD_ABSENT)
            store_entries(m, local_experts_of(m.plan, self), rank, token, -1);
    }
    return ok;
}

/* The local expert and the weight of one choice per lane, loaded before the token's row has
 * arrived. Lane n has the n-th choice of the token whose expert is on this rank. */
struct FlatExtras {
    uint64_t expert; /* word with the local expert, as peek_record() returns it */
    uint32_t weight; /* poison if it has not arrived yet */
};

/* Loads the extras of the choices that `token`, a token of `rank`, has on this rank, as far as
 * they have arrived. `source`: index of `rank` among this rank's sources. `chunk`: 0 for the
 * first 32 of these choices, 1 for the next 32. */
__device__ __forceinline__ FlatExtras peek_extras(const DispatchMove &m, int rank, int source,
                                                  int32_t token, int chunk)
{
    const p2p_self &self = m.job.plan.self;
    const int n = chunk * WARP + lane_id();
    FlatExtras extras = {~0ull, POISON};
    if (m.has_new_plan)
        extras.expert = peek_record(m, rank, token, chunk);
    else if (n < m.top_k)
        extras.expert = (uint32_t)__ldg(local_experts_of(m.plan, self) +
                                        record_index(self, rank, token, m.top_k) + n);
    if (rank != self.rank && m.job.weights && n < m.top_k)
        extras.weight = load_relaxed(weight_address(m, source, token, n));
    return extras;
}

/* Waits until the word with the local expert of this lane's choice has arrived. `word`: this
 * word as peek_extras() has loaded it (FlatExtras.expert). `rank`, `token`, `chunk`: as in
 * peek_extras(). `expert` becomes the local expert, or -1 if this lane has no choice. `more`
 * becomes true if a later chunk may contain choices. If the kernel makes the plan, also copies
 * the experts into the plan. Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool receive_expert(const DispatchMove &m, int rank, int32_t token,
                                               int chunk, uint64_t word, int32_t &expert,
                                               bool &more)
{
    const p2p_self &self = m.job.plan.self;
    const int n = chunk * WARP + lane_id();
    if (!m.has_new_plan) {
        expert = n < m.top_k ? (int32_t)word : -1;
        more = (chunk + 1) * WARP < m.top_k;
        return true;
    }
    const uint64_t *words = record_address(self, m.op, rank, token, m.top_k);
    if (!receive_record(m.op, words, m.top_k, chunk, rank, word, expert, more)) return false;
    int32_t *locals =
        (int32_t *)local_experts_of(m.plan, self) + record_index(self, rank, token, m.top_k);
    if (n < m.top_k) locals[n] = expert;
    for (int k = n + WARP; !more && k < m.top_k; k += WARP) locals[k] = -1;
    return true;
}

/* Waits until the weight of this lane's choice has arrived. `rank`, `source`, `token`, `chunk`:
 * as in peek_extras(). `there`: true if the lane has a choice. `word`: on entry, the weight as
 * peek_extras() has loaded it (FlatExtras.weight), or poison; on return, the weight. If `rank`
 * is a peer, stores poison over the weight in the heap for the next use. Called by a whole
 * warp. Returns false if the group has failed. */
__device__ __forceinline__ bool receive_choice_weight(const DispatchMove &m, int rank,
                                                      int source, int32_t token, int chunk,
                                                      bool there, uint32_t &word)
{
    const int n = chunk * WARP + lane_id();
    if (rank == m.job.plan.self.rank) {
        const uint64_t choice = read_choice(m, token, lane_id());
        const int k = nth_bit(choices_to(m, token, rank, choice), n);
        word = 0;
        if (there) word = __float_as_uint(__ldg(m.job.weights + (int64_t)token * m.top_k + k));
        return true;
    }
    uint32_t *from = weight_address(m, source, token, n);
    const bool ok = wait_warp(m.op, rank, P2P_PHASE_FLOAT, [&] {
        if (there && word == POISON) word = load_relaxed(from);
        return __any_sync(ALL_LANES, there && word == POISON) == 0;
    });
    if (ok && there) *from = POISON;
    return ok;
}

/* Receives the extras of `token`, a token of `rank`, and stores them as the extras of row `row`
 * of the receive buffer. `source`: as in peek_extras(). `extras`: the result of peek_extras()
 * for the first 32 choices. Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool receive_extras(const DispatchMove &m, int rank, int source,
                                               int32_t token, int32_t row, FlatExtras extras)
{
    const bool fits = (uint32_t)row < (uint32_t)m.job.recv_rows;
    bool more = true;
    for (int chunk = 0; chunk * WARP < m.top_k; chunk++) {
        const int n = chunk * WARP + lane_id();
        const int64_t at = (int64_t)row * m.top_k + n;
        int32_t expert = -1;
        if (chunk) extras = peek_extras(m, rank, source, token, chunk);
        if (more && !receive_expert(m, rank, token, chunk, extras.expert, expert, more))
            return false;
        if (m.job.weights &&
            !receive_choice_weight(m, rank, source, token, chunk, expert >= 0, extras.weight))
            return false;
        if (!fits || n >= m.top_k) continue;
        if (m.job.recv_expert) m.job.recv_expert[at] = expert;
        if (m.job.weights)
            m.job.slot_weights[at] = expert >= 0 ? __uint_as_float(extras.weight) : 0.0f;
    }
    return true;
}

/* Sets the extras of all rows from `first` on: local experts to -1, weights to 0. Each of
 * `threads` threads calls it with its own index `thread`. */
__device__ __forceinline__ void clear_extras(const DispatchMove &m, int64_t first,
                                             int64_t thread, int64_t threads)
{
    const int64_t each = m.job.top_k, end = m.job.recv_rows * each;
    zero_floats(m.job.slot_weights, first * each, end, thread, threads);
    for (int64_t i = first * each + thread; m.job.recv_expert && i < end; i += threads)
        m.job.recv_expert[i] = -1;
}

#endif
