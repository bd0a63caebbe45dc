/* SPDX-License-Identifier: Apache-2.0 */
/* Staging: the memory of a rank in which rows arrive from peers. Shared by all kernels that
 * move rows.
 *
 *   staging [2 halves, by epoch] [source] [token of the round] [row]
 *
 *   sender     a warp stores a piece of a row (V vectors of 16 bytes per lane) to the
 *              receiver's staging, with relaxed stores in any order
 *   receiver   a warp polls the piece until none of its words is poison, uses the piece,
 *              and stores poison back before its rank announces the next epoch
 *
 * Sources are the other ranks, numbered from the next higher rank upwards (and around to 0).
 * Every 4-byte word is its own flag: it is poison (0xffffffff) until the sender's word arrives.
 * No fence is needed between the words of a row.
 *
 * Rows of bytes may contain 0xffffffff. Such a word is sent as 0x7fff7fff instead, the stand-in
 * (both are NaN in every float type). Each lane then also sends an *escape* word, a mask with
 * one bit per replaced word. A receiver that finds a word with 0x7fff in both halves, signs
 * ignored, waits for the escape words of the piece and restores the replaced words. */
#ifndef EPIC_STAGING_CUH
#define EPIC_STAGING_CUH

#include "cuda/common/rows.cuh"
#include "cuda/net/operation.cuh"

#define POISON_STAND_IN 0x7fff7fffu
#define ESCAPE_SENT 0x80000000u

/* Returns the row of a token in a staging buffer. `box`: op.inbox[] or op.outbox[] of a rank.
 * `token`: index of the token in the round. `vectors`: 16-byte vectors per row. */
__device__ __forceinline__ uint4 *staged_row(uint8_t *box, int32_t token, int32_t vectors)
{
    return (uint4 *)(box + (uint64_t)(uint32_t)token * ((uint32_t)vectors * 16u));
}

/* Returns where in a heap `source` (0: the next higher rank) stores its escape words. `heap`:
 * base address of that heap. */
__device__ __forceinline__ uint32_t *escapes_base(const p2p_self &self, const OpState &op,
                                                  uint8_t *heap, int source)
{
    return (uint32_t *)(heap + self.at.escapes) +
           ((int64_t)epoch_parity(op) * (self.num_ranks - 1) + source) * self.at.escape_words;
}

/* Returns where in a heap `source` (0: the next higher rank) stores its floats (weights or
 * their gradients). `heap`: base address of that heap. */
__device__ __forceinline__ uint32_t *floats_base(const p2p_self &self, const OpState &op,
                                                 uint8_t *heap, int source)
{
    return (uint32_t *)(heap + self.at.floats) +
           ((int64_t)epoch_parity(op) * (self.num_ranks - 1) + source) * self.max_tokens *
               HEAP_TOP_K(self);
}

/* Returns true if a word of the vector is poison or the stand-in, signs ignored. Other NaNs
 * with the same bits as the stand-in also match, which is harmless: their escape bits are 0. */
__device__ __forceinline__ bool needs_escape(uint4 q)
{
    const uint32_t signs = 0x80008000u;
    return max(max(q.x | signs, q.y | signs), max(q.z | signs, q.w | signs)) == POISON;
}

/* If the word is poison, replaces it by the stand-in and sets bit `bit` of the mask. */
__device__ __forceinline__ void hide_word(uint32_t &word, uint32_t &mask, int bit)
{
    if (word == POISON) word = POISON_STAND_IN, mask |= 1u << bit;
}

/* Sets the word back to poison if bit `bit` of the mask shows that hide_word() has replaced it.
 */
__device__ __forceinline__ void unhide_word(uint32_t &word, uint32_t mask, int bit)
{
    if (mask >> bit & 1) word = POISON;
}

/* Replaces the poison words of a piece before it is sent. Returns this lane's escape word to
 * send, or 0 if the piece needs none. Called by a whole warp. */
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

/* Restores the poison words of a received piece. If it needs escape words, waits for them first
 * and sets them back to 0. `escape`: their address. Called by a whole warp. Returns false if
 * the group is broken. */
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

/* Returns true if a word of the piece is still poison, so it has not fully arrived. Called by a
 * whole warp. */
template <int V> __device__ __forceinline__ bool has_missing(const uint4 (&q)[V])
{
    bool missing = false;
#pragma unroll
    for (int v = 0; v < V; v++) missing |= has_poison(q[v]);
    return __any_sync(ALL_LANES, missing) != 0;
}

#ifdef EPIC_HOSTS
#ifndef POLL_WINDOW_BYTES
/* a piece at most this many bytes after the one that arrived last is polled at every spin */
#define POLL_WINDOW_BYTES (512 << 10)
#endif
#define SPINS_PER_FAR_POLL 32u /* pieces further away are polled once in this many spins */
/* if all rows of a rank have at most this many bytes, all waiting warps poll at every spin */
#define MAX_POLLED_BYTES (POLL_WINDOW_BYTES / 8)

/* Returns true if the piece that ends with vector `last` may be the next one of `peer` to
 * arrive. That is, it is at most POLL_WINDOW_BYTES after the piece that arrived last. Called by
 * a whole warp. */
__device__ __forceinline__ bool may_arrive_next(const OpState &op, int peer, const uint4 *last)
{
    const uint64_t received = load_relaxed(&control_of(op)->received_vectors[peer]);
    const uint32_t index = (uint32_t)(last - (const uint4 *)op.host_box[peer]);
    return index <=
           (is_stamped(op, received) ? (uint32_t)received : 0) + POLL_WINDOW_BYTES / 16;
}

/* Remembers that the piece that ends with vector `last` has arrived. Two warps may overwrite
 * each other's value; the next arrival corrects it. */
__device__ __forceinline__ void record_arrival(const OpState &op, int peer, const uint4 *last)
{
    uint64_t *seen = &control_of(op)->received_vectors[peer];
    const uint32_t index = (uint32_t)(last - (const uint4 *)op.host_box[peer]);
    const uint64_t received = load_relaxed(seen);
    if (lane_id() == 0 && (!is_stamped(op, received) || (uint32_t)received < index))
        store_relaxed(seen, stamp_word(op, index));
}

/* Waits for a piece in host memory, but polls only its last vector: when this one has arrived,
 * most of the piece has. A thousand warps may wait, and polls of host memory are slow. So only
 * a warp whose piece may arrive next polls at every spin; the other warps poll rarely. Called
 * by a whole warp. Returns false if the group is broken. */
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

/* Returns true if all rows of this rank are so few bytes that every waiting warp may poll at
 * every spin. Only low-latency kernels do this. */
__device__ __forceinline__ bool can_poll_all(const OpState &op, int32_t vectors)
{
    return LOW_LATENCY && op.tokens * vectors * 16 <= MAX_POLLED_BYTES;
}

/* Waits for the vector `last` of a piece if it is in host memory; else returns true at once,
 * and the caller polls. Called by a whole warp. Returns false if the group is broken. */
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

/* Waits for a piece of a staged row and reads it to q: vectors [first, first + V * 32), without
 * those past the end of the row, which has `vectors` vectors. `copied`: q already has what the
 * ring had copied from staging. While no vector has arrived, each lane polls only its first
 * one, because polls take bandwidth from rows. Called by a whole warp. Returns false if the
 * group is broken. */
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
        copied = false; /* the ring does not copy host memory */
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

/* Stores poison back to a staged piece that has been read, so that the epoch after the next can
 * use it. */
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

/* Stores a piece to a peer's staging: vectors [first, first + V * 32), at most to the end of
 * the row of `vectors`. No word of q may be poison (see hide_poison()). */
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

/* Returns the position of the n-th set bit, counted from 0, or 0 if there are fewer bits. n may
 * differ between lanes. */
__device__ __forceinline__ int nth_bit(uint64_t bits, int n)
{
    int index = 0;
    for (int i = 0; bits; i++, bits &= bits - 1)
        if (i == n) index = __ffsll((long long)bits) - 1;
    return index;
}

/* Writes zeros to rows [first, end). Each of `threads` threads calls it with its own number
 * `thread` and writes its share. */
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

/* Writes zeros to elements [first, end), divided like zero_rows(). Does nothing if x is NULL.
 */
static __device__ void zero_floats(float *x, int64_t first, int64_t end, int64_t thread,
                                   int64_t threads)
{
    for (int64_t i = first + thread; x && i < end; i += threads) x[i] = 0.0f;
}

__device__ __forceinline__ int64_t grid_thread()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ int64_t grid_threads()
{
    return (int64_t)gridDim.x * blockDim.x;
}

#endif
