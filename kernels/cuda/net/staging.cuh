/* SPDX-License-Identifier: Apache-2.0 */
/* Staging: the memory of a rank in which rows from peers arrive. All kernels that move rows use
 * it.
 *
 *   staging [2 halves, by epoch] [source] [token of the round] [row]
 *
 *   sender     a warp stores a piece of a row (V vectors of 16 bytes per lane) to the
 *              receiver's staging, with relaxed stores in any order
 *   receiver   a warp polls the piece until none of its words is poison, uses the piece, and
 *              stores poison back, before its rank announces the next epoch
 *
 * The sources are the other ranks. Source 0 is the next higher rank, source 1 the rank after
 * it, and so on (modulo num_ranks). Every 4-byte word is its own flag: it is poison
 * (0xffffffff) until the word that the sender stores arrives. So no fence is needed between the
 * words of a row.
 *
 * The caller's rows may contain the word 0xffffffff, too. The sender replaces such a word by
 * 0x7fff7fff, the *stand-in*. (Both words are NaN in every float type.) Each lane of the
 * sending warp then also sends an *escape word*: a mask with one bit for each word that it has
 * replaced. If a receiver finds the stand-in in a piece (with any sign bits), it waits for the
 * escape words of the piece, and restores the replaced words. */
#ifndef EPIC_STAGING_CUH
#define EPIC_STAGING_CUH

#include "cuda/common/rows.cuh"
#include "cuda/net/operation.cuh"

/* the stand-in: the word that replaces poison in rows that are sent */
#define POISON_STAND_IN 0x7fff7fffu
/* bit that is 1 in every escape word: a word of 0 means that the escape word has not arrived */
#define ESCAPE_SENT 0x80000000u

/* Returns the address of a token's row in staging. `box`: op.inbox[] or op.outbox[] of a rank.
 * `token`: index of the token in the round. `vectors`: number of 16-byte vectors per row. */
__device__ __forceinline__ uint4 *staged_row(uint8_t *box, int32_t token, int32_t vectors)
{
    return (uint4 *)(box + (uint64_t)(uint32_t)token * ((uint32_t)vectors * 16u));
}

/* Returns the index of a token in an array with words for rows (heap.h). With few ranks it is
 * the token itself. With many ranks it counts from the first token of the round, so that the
 * array needs space only for the tokens of one round. */
#define TOKEN_INDEX(m, token) (MANY_RANKS ? (token) - (m).round_begin : (token))

/* Returns the address, in the receiver's heap at `heap`, of the escape words of one sender.
 * `source`: index of the sender among the receiver's sources. */
__device__ __forceinline__ uint32_t *escapes_base(const p2p_self &self, const OpState &op,
                                                  uint8_t *heap, int source)
{
    return (uint32_t *)(heap + self.at.escapes) +
           ((int64_t)epoch_parity(op) * (self.num_ranks - 1) + source) * self.at.escape_words;
}

/* Returns the address, in the heap at `heap`, of the floats (weights or their gradients) of one
 * sender. `source`: index of the sender among the sources of the heap's owner. */
__device__ __forceinline__ uint32_t *floats_base(const p2p_self &self, const OpState &op,
                                                 uint8_t *heap, int source)
{
    return (uint32_t *)(heap + self.at.floats) +
           ((int64_t)epoch_parity(op) * (self.num_ranks - 1) + source) *
               p2p_index_choices(&self.at);
}

/* Returns true if a word of the vector is poison or the stand-in. Sender and receiver both use
 * this function to decide whether a piece has escape words. It ignores sign bits, so that one
 * comparison tests for both words. So it also returns true for a few other NaNs. This does no
 * harm: the escape words have a 0 bit for such a NaN, so the receiver keeps it unchanged. */
__device__ __forceinline__ bool needs_escape(uint4 q)
{
    const uint32_t signs = 0x80008000u;
    return max(max(q.x | signs, q.y | signs), max(q.z | signs, q.w | signs)) == POISON;
}

/* If a word is poison, replaces it by the stand-in, and sets bit `bit` of the mask. */
__device__ __forceinline__ void hide_word(uint32_t &word, uint32_t &mask, int bit)
{
    if (word == POISON) word = POISON_STAND_IN, mask |= 1u << bit;
}

/* Reverses hide_word(). */
__device__ __forceinline__ void unhide_word(uint32_t &word, uint32_t mask, int bit)
{
    if (mask >> bit & 1) word = POISON;
}

/* In a piece, replaces each word that equals poison by the stand-in, because the receiver would
 * take poison for a word that has not arrived. Returns this lane's escape word, which must be
 * sent with the piece, or 0 if the piece needs no escape words. Called by a whole warp. */
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

/* Restores the words of a received piece that hide_poison() has replaced. If the piece has
 * escape words, first waits for them, and then sets them to 0 for the next use. `escape`:
 * address at which the escape words arrive. `peer`: the rank that sends the piece. Called by a
 * whole warp. Returns false if the group has failed. */
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

/* Returns true if a word of the piece has not arrived. Called by a whole warp. */
template <int V> __device__ __forceinline__ bool has_missing(const uint4 (&q)[V])
{
    bool missing = false;
#pragma unroll
    for (int v = 0; v < V; v++) missing |= has_poison(q[v]);
    return __any_sync(ALL_LANES, missing) != 0;
}

#ifndef POLL_WINDOW_BYTES
/* Many warps may wait for pieces of one rank in host memory, where polls are slow. A warp polls
 * at every spin (pass of its wait loop) only if its piece is likely to arrive next: if it is at
 * most this many bytes after the farthest piece of this rank that has arrived. */
#define POLL_WINDOW_BYTES (512 << 10)
#endif
/* A warp whose piece is not likely to arrive next polls only once in this many spins (passes of
 * its wait loop). */
#ifndef SPINS_PER_FAR_POLL /* the emulator of the tests polls rarely, and then looks in every spin */
#define SPINS_PER_FAR_POLL 32u
#endif
/* if all rows of one rank together have at most this many bytes, all warps poll at every
 * spin */
#define MAX_POLLED_BYTES (POLL_WINDOW_BYTES / 8)

/* Returns true if a piece from `peer` is likely to arrive next. This is so if it is at most
 * POLL_WINDOW_BYTES after the farthest piece from `peer` that has arrived. `last`: address of
 * the piece's last vector. Called by a whole warp. */
__device__ __forceinline__ bool may_arrive_next(const OpState &op, int peer, const uint4 *last)
{
    const uint64_t received = load_relaxed(&control_of(op)->net->received_vectors[peer]);
    const uint32_t index = (uint32_t)(last - (const uint4 *)op.net->host_box[peer]);
    return index <=
           (is_stamped(op, received) ? (uint32_t)received : 0) + POLL_WINDOW_BYTES / 16;
}

/* Records in control memory how far rows of rank `peer` have arrived. `last`: address of the
 * last vector of a piece that has arrived. A warp may overwrite a newer value of another warp;
 * the next arrival corrects the value. */
__device__ __forceinline__ void record_arrival(const OpState &op, int peer, const uint4 *last)
{
    uint64_t *seen = &control_of(op)->net->received_vectors[peer];
    const uint32_t index = (uint32_t)(last - (const uint4 *)op.net->host_box[peer]);
    const uint64_t received = load_relaxed(seen);
    if (lane_id() == 0 && (!is_stamped(op, received) || (uint32_t)received < index))
        store_relaxed(seen, stamp_word(op, index));
}

/* Waits for a piece that arrives in host memory, where polls are slow. Polls only the piece's
 * last vector, at address `last`, because it usually arrives after all others. The caller must
 * still check the other vectors. A thousand warps may wait at the same time, so a warp polls at
 * every spin only if may_arrive_next() is true. Otherwise it polls once in SPINS_PER_FAR_POLL
 * spins. Called by a whole warp. Returns false if the group has failed. */
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

/* Returns true if rows are so few that all waiting warps may poll host memory at every spin
 * (MAX_POLLED_BYTES). Only low-latency kernels may do so. */
__device__ __forceinline__ bool can_poll_all(const OpState &op, int32_t vectors)
{
    return LOW_LATENCY && op.tokens * vectors * 16 <= MAX_POLLED_BYTES;
}

/* If a piece arrives in host memory, waits for its last vector, at address `last`. If the piece
 * arrives in device memory, returns true at once, because the caller polls the piece itself.
 * Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool wait_piece(const OpState &op, int peer, const uint4 *last)
{
    return !is_host_memory(op, last) || wait_host_piece(op, peer, last);
}

/* Waits until a piece of a row has arrived in staging, and reads it into q. Called by a whole
 * warp. Returns false if the group has failed.
 *
 *   peer            the rank that stores the row
 *   staged          address of the row in staging
 *   first, vectors  the row has `vectors` vectors; the piece has the vectors from `first` to
 *                   first + V * 32 - 1
 *   copied          true if q contains an earlier copy of the piece, from the warp's ring in
 *                   shared memory. In this copy, words that had not arrived are poison. The
 *                   piece in staging is polled only if q contains such words
 *
 * While nothing has arrived, each lane polls only its first vector, because polls take memory
 * bandwidth that rows need. */
template <int V, bool EXACT>
__device__ __forceinline__ bool receive_piece(const OpState &op, int peer, const uint4 *staged,
                                              int32_t first, int32_t vectors, bool copied,
                                              uint4 (&q)[V])
{
    const int32_t begin = first + lane_id();
    if (is_host_memory(op, staged)) {
        const uint4 *last = staged + min(first + V * WARP, vectors) - 1;
        if (!can_poll_all(op, vectors) && !wait_host_piece(op, peer, last)) return false;
        /* q contains no copy, because rows that arrive in host memory do not go through the
         * warp's ring in shared memory. */
        copied = false;
    }
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

/* Stores poison (the mark of a word that has not arrived) to a piece in staging. The arguments
 * are as in receive_piece(). Called after the piece has been read, because a receiver polls
 * this memory again two epochs later. */
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

/* Stores a piece of a row to a peer's staging. The row has `vectors` vectors; the piece has
 * vectors [first, first + V * 32) of them. Requires that no word of q is poison
 * (hide_poison()). */
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

/* Returns the index of the n-th set bit of `bits` (n counts from 0), or 0 if there is no such
 * bit. Different lanes may pass different n. */
__device__ __forceinline__ int nth_bit(uint64_t bits, int n)
{
    int index = 0;
    for (int i = 0; bits; i++, bits &= bits - 1)
        if (i == n) index = __ffsll((long long)bits) - 1;
    return index;
}

/* Zeroes the rows [first, end). Each of `threads` threads calls it with its own index
 * `thread`. */
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

/* Like zero_rows(), for the elements [first, end) of x. Does nothing if x is NULL. */
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
