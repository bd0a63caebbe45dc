/* SPDX-License-Identifier: Apache-2.0 */
/* Rows on their way: staging, which is shared by all kernels that move rows.
 *
 * Staging [source][token of the round] holds poison until a peer writes it. Sources are
 * numbered from the next rank upwards; this rank itself has none.
 *
 *   sender     one warp stores a piece, 16 bytes per lane and store, each word its own flag
 *   receiver   one warp polls the piece until no word is poison, uses it, and stores poison
 *              back before its rank announces the next epoch
 *
 * Rows of bytes may contain poison themselves. A word ffffffff is sent as 7fff7fff (both are
 * NaNs in every float type), and each lane sends an *escape* word with a bit for each word it
 * replaced. The receiver waits for the escapes if a piece contains a word with 7fff in both
 * halves. */
#ifndef EPIC_STAGING_CUH
#define EPIC_STAGING_CUH

#include "cuda/common/rows.cuh"
#include "cuda/net/operation.cuh"

#define POISON_STAND_IN 0x7fff7fffu
#define ESCAPE_SENT 0x80000000u

/* The staged row of a token of the round, with `vectors` vectors per row. */
__device__ __forceinline__ uint4 *staged_row(uint8_t *box, int32_t token, int32_t vectors)
{
    return (uint4 *)(box + (uint64_t)(uint32_t)token * ((uint32_t)vectors * 16u));
}

/* Escape words from `source` (0: the next rank upwards) in a heap. */
__device__ __forceinline__ uint32_t *escapes_base(const p2p_self &self, const OpState &op,
                                                  uint8_t *heap, int source)
{
    return (uint32_t *)(heap + self.at.escapes) +
           ((int64_t)epoch_parity(op) * (self.num_ranks - 1) + source) * self.at.escape_words;
}

/* Floats (weights and their gradients) from `source` in a heap. */
__device__ __forceinline__ uint32_t *floats_base(const p2p_self &self, const OpState &op,
                                                 uint8_t *heap, int source)
{
    return (uint32_t *)(heap + self.at.floats) +
           ((int64_t)epoch_parity(op) * (self.num_ranks - 1) + source) * self.max_tokens *
               HEAP_TOP_K(self);
}

/* Does the vector contain a word that could be poison or its stand-in? */
__device__ __forceinline__ bool needs_escape(uint4 q)
{
    const uint32_t signs = 0x80008000u;
    return max(max(q.x | signs, q.y | signs), max(q.z | signs, q.w | signs)) == POISON;
}

/* Replaces the word by its stand-in if it is poison, and sets its bit of the mask. */
__device__ __forceinline__ void hide_word(uint32_t &word, uint32_t &mask, int bit)
{
    if (word == POISON) word = POISON_STAND_IN, mask |= 1u << bit;
}

/* Undoes hide_word(). */
__device__ __forceinline__ void unhide_word(uint32_t &word, uint32_t mask, int bit)
{
    if (mask >> bit & 1) word = POISON;
}

/* Replaces poison words of a piece before it is sent. One warp. Returns this lane's escape
 * word, 0 if the piece needs none. */
template <int V> __device__ __forceinline__ uint32_t hide_poison(uint4 (&q)[V])
{
    bool special = false;
#pragma unroll
    for (int v = 0; v < V; v++) special |= needs_escape(q[v]);
    if (!__any_sync(ALL_LANES, special)) return 0;
    uint32_t mask = ESCAPE_SENT;
#pragma unroll
    for (int v = 0; v < V; v++) {
        hide_word(q[v].x, mask, v * 4);
        hide_word(q[v].y, mask, v * 4 + 1);
        hide_word(q[v].z, mask, v * 4 + 2);
        hide_word(q[v].w, mask, v * 4 + 3);
    }
    return mask;
}

/* Restores the poison words of a received piece from its escape words. One warp. */
template <int V>
__device__ __forceinline__ bool unhide_poison(const OpState &op, int peer, uint4 (&q)[V],
                                              uint32_t *escape)
{
    bool special = false;
#pragma unroll
    for (int v = 0; v < V; v++) special |= needs_escape(q[v]);
    if (!__any_sync(ALL_LANES, special)) return true;
    uint32_t mask = 0;
    const bool ok = wait_warp(op, peer, P2P_PHASE_ROW, [&] {
        mask = load_relaxed(escape + lane_id());
        return __all_sync(ALL_LANES, mask) != 0;
    });
    escape[lane_id()] = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
        unhide_word(q[v].x, mask, v * 4);
        unhide_word(q[v].y, mask, v * 4 + 1);
        unhide_word(q[v].z, mask, v * 4 + 2);
        unhide_word(q[v].w, mask, v * 4 + 3);
    }
    return ok;
}

/* Does any lane's vector contain poison, so that it has not arrived? One warp. */
template <int V> __device__ __forceinline__ bool has_missing(const uint4 (&q)[V])
{
    bool missing = false;
#pragma unroll
    for (int v = 0; v < V; v++) missing |= has_poison(q[v]);
    return __any_sync(ALL_LANES, missing) != 0;
}

#ifdef EPIC_HOSTS
#ifndef POLL_WINDOW_BYTES
#define POLL_WINDOW_BYTES \
    (512 << 10) /* bytes behind the last arrived piece that may arrive next */
#endif
#define SPINS_PER_FAR_POLL 32u /* all other waits poll once in so many spins */
#define MAX_POLLED_WORDS \
    (POLL_WINDOW_BYTES / 8) /* words of a rank's rows up to which all waits poll every spin */

/* May the piece with last vector `last` be the next to arrive? One warp. */
__device__ __forceinline__ bool may_arrive_next(const OpState &op, int peer, const uint4 *last)
{
    const uint64_t said = load_relaxed(&control_of(op)->received_vectors[peer]);
    const uint32_t place = (uint32_t)(last - (const uint4 *)op.host_box[peer]);
    return place <= (is_stamped(op, said) ? (uint32_t)said : 0) + POLL_WINDOW_BYTES / 16;
}

/* Records that the piece has arrived. A lost update is harmless: the next arrival corrects it.
 */
__device__ __forceinline__ void record_arrival(const OpState &op, int peer, const uint4 *last)
{
    uint64_t *seen = &control_of(op)->received_vectors[peer];
    const uint32_t place = (uint32_t)(last - (const uint4 *)op.host_box[peer]);
    const uint64_t said = load_relaxed(seen);
    if (lane_id() == 0 && (!is_stamped(op, said) || (uint32_t)said < place))
        store_relaxed(seen, stamp_word(op, place));
}

/* Waits for the last vector of a piece in host memory; the rest has mostly arrived by then. One
 * warp. A thousand warps wait for pieces that arrive one after the other, so only those that
 * may be next poll every spin, one vector each. */
static __device__ __noinline__ bool wait_host_piece(const OpState &op, int peer,
                                                    const uint4 *last)
{
    uint32_t spins = 0;
    const bool ok = wait_warp(op, peer, P2P_PHASE_ROW, [&] {
        uint4 q = poison_vector();
        const bool looks = ++spins % SPINS_PER_FAR_POLL == 0 || may_arrive_next(op, peer, last);
        if (!__any_sync(ALL_LANES, looks)) return false;
        if (lane_id() == 0) q = load_relaxed(last);
        return __any_sync(ALL_LANES, !has_poison(q)) != 0;
    });
    if (ok) record_arrival(op, peer, last);
    return ok;
}

/* So few rows that all waits may poll every spin. */
__device__ __forceinline__ bool can_poll_all(const OpState &op, int32_t vectors)
{
    return LOW_LATENCY && op.tokens * vectors * 16 <= MAX_POLLED_WORDS;
}

/* Waits before the piece with last vector `last` is read. One warp. */
__device__ __forceinline__ bool wait_piece(const OpState &op, int peer, const uint4 *last)
{
    return !is_host_memory(op, last) || wait_host_piece(op, peer, last);
}
#else
__device__ __forceinline__ bool wait_piece(const OpState &, int, const uint4 *)
{
    return true;
}
#endif

/* Waits for a piece, vectors [first, ...) of a staged row of `vectors`, and reads it. One warp.
 * `copied`: q holds what was there earlier. Until the piece begins to arrive only its first
 * vectors are polled, because polling takes bandwidth from rows. */
template <int V, bool EXACT>
__device__ __forceinline__ bool receive_piece(const OpState &op, int peer, const uint4 *staged,
                                              int32_t first, int32_t vectors, bool copied,
                                              uint4 (&q)[V])
{
    const int32_t begin = first + lane_id();
#ifdef EPIC_HOSTS
    if (is_host_memory(op, staged)) {
        const uint4 *last = staged + min(first + V * WARP, vectors) - 1;
        if (!can_poll_all(op, vectors) && !wait_host_piece(op, peer, last)) return false;
        copied = false; /* host memory was not copied */
    }
#endif
    staged += begin;
    auto read = [&] {
#pragma unroll
        for (int v = 0; v < V; v++)
            q[v] = EXACT || begin + v * WARP < vectors ? load_relaxed(staged + v * WARP)
                                                       : make_uint4(0, 0, 0, 0);
    };
    if (!copied) read();
    if (!has_missing(q)) return true;
    const bool begun = LOW_LATENCY || wait_warp(op, peer, P2P_PHASE_ROW, [&] {
                           if (has_poison(q[0])) q[0] = load_relaxed(staged);
                           return __any_sync(ALL_LANES, has_poison(q[0])) == 0;
                       });
    return begun && wait_warp(op, peer, P2P_PHASE_ROW, [&] {
               read();
               return !has_missing(q);
           });
}

/* Stores poison back to a staged piece that has been read, for the epoch after next. */
template <int V, bool EXACT>
__device__ __forceinline__ void poison_piece(uint4 *staged, int32_t first, int32_t vectors)
{
    const int32_t begin = first + lane_id();
    staged += begin;
#pragma unroll
    for (int v = 0; v < V; v++)
        if (EXACT || begin + v * WARP < vectors)
            store_in_place(staged + v * WARP, poison_vector());
}

/* Stores a piece, vectors [first, ...) of a row of `vectors`, to a peer's staging. The row must
 * contain no poison. */
template <int V, bool EXACT>
__device__ __forceinline__ void send_piece(uint4 *staged, int32_t first, int32_t vectors,
                                           const uint4 (&q)[V])
{
    const int32_t begin = first + lane_id();
    staged += begin;
#pragma unroll
    for (int v = 0; v < V; v++)
        if (EXACT || begin + v * WARP < vectors) store_relaxed(staged + v * WARP, q[v]);
}

/* Position of the n-th set bit, or 0 if there are fewer; n may differ between lanes. */
__device__ __forceinline__ int nth_bit(uint64_t bits, int n)
{
    int place = 0;
    for (int i = 0; bits; i++, bits &= bits - 1)
        if (i == n) place = __ffsll((long long)bits) - 1;
    return place;
}

/* Writes zeros to rows [first, end) with threads numbered `thread` of `threads`. */
static __device__ void zero_rows(uint8_t *rows, int64_t row_bytes, int64_t first, int64_t end,
                                 int64_t thread, int64_t threads)
{
    uint8_t *from = rows + first * row_bytes;
    const int64_t bytes = (end - first) * row_bytes;
    const bool aligned = (uintptr_t)from % 16 == 0;
    const int64_t vectors = aligned ? bytes / 16 : 0;
    for (int64_t i = thread; i < vectors; i += threads)
        ((uint4 *)from)[i] = make_uint4(0, 0, 0, 0);
    for (int64_t i = vectors * 16 + thread; i < bytes; i += threads) from[i] = 0;
}

/* Writes zeros to elements [first, end) with threads numbered `thread` of `threads`. x may be
 * NULL. */
static __device__ void zero_floats(float *x, int64_t first, int64_t end, int64_t thread,
                                   int64_t threads)
{
    for (int64_t i = first + thread; x && i < end; i += threads) x[i] = 0.0f;
}

/* Number of this thread in the grid. */
__device__ __forceinline__ int64_t grid_thread()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

/* Number of threads of the grid. */
__device__ __forceinline__ int64_t grid_threads()
{
    return (int64_t)gridDim.x * blockDim.x;
}

#endif
