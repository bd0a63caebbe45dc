/* SPDX-License-Identifier: Apache-2.0 */
/* Packs, sends and receives packed rows. A packed row is a row and its scales (for example, the
 * scales of an fp8 row), sent together as one sequence of 16-byte vectors. So scales need no
 * separate unit of work and no separate message.
 *
 *   row_vectors vectors  vectors of scales
 *   [ row            | ] [ scales    | ]     the last vector of each is filled up with zeros
 *   [ piece 0   ][ piece 1   ][ 2      ]     pieces of V * 32 vectors, across the boundary
 *
 * A rank sends one of two types of pieces:
 *
 *   JoinedPiece     is copied from two arrays of the caller, tokens and scales
 *   QuantizedPiece  is quantized from the caller's tokens when it is sent; it has 1024
 *                   elements, which make 8 words of scales
 *
 * Staging memory is poison (the mark of a word that has not arrived) until a row arrives. So a
 * word of a row that equals poison is sent as another word (its stand-in, net/staging.cuh), and
 * the receiver restores it. */
#ifndef EPIC_PACKED_CUH
#define EPIC_PACKED_CUH

#include "cuda/common/quantize.cuh"
#include "cuda/dispatch/dispatch.cuh"

/* A word of four e8m0 scales that are all NaN equals poison. It is sent as E8M0_STAND_IN, a
 * word that quantization never produces. */
#define E8M0_NANS POISON
#define E8M0_STAND_IN 0xfefefefeu

/* A quantized piece of 1024 elements. Each lane has two runs of 16 adjacent elements. */
typedef Quantized<2, 16> Sixteens;

/* Arguments that all functions for packed rows share. The base class has `shape`, which
 * describes packed rows. But shape.row_bytes and shape.aligned describe rows of the receive
 * buffer, without scales. */
struct PackedMove : DispatchMove {
    /* Shape of the caller's rows. own_shape.pieces is the number of pieces into which such a
     * row is packed. */
    RowShape own_shape;
    /* A packed row begins with row_vectors vectors that contain the elements of the row. The
     * vectors after them contain the scales. */
    int32_t row_vectors;
    int32_t own_span; /* number of pieces per span, for units that move the caller's rows */
};

/* Sets row_vectors, own_shape and own_span of m. `spans`: number of spans per row. */
__device__ __forceinline__ void describe_packed(PackedMove &m, int32_t spans)
{
    const p2p_dispatch_job &job = m.job;
    m.row_vectors = (int32_t)((job.row_bytes + 15) / 16);
    m.own_shape = m.shape;
    if (job.quantize) {
        m.own_shape.row_bytes = job.token_bytes;
        m.own_shape.vectors = (int32_t)((job.token_bytes + 15) / 16);
        m.own_shape.pieces = (int32_t)((job.row_bytes + Sixteens::BYTES - 1) / Sixteens::BYTES);
    }
    m.own_span = (m.own_shape.pieces + spans - 1) / spans;
}

/* Returns the shape of packed rows. `aligned`: true if rows of recv are aligned to 16 bytes. */
__device__ __forceinline__ RowShape packed_shape(const p2p_dispatch_job &job, bool aligned)
{
    RowShape s = row_shape<V>(job.row_bytes, aligned);
    s.vectors += (int32_t)((job.scale_bytes + 15) / 16);
    s.pieces = (s.vectors + V * WARP - 1) / (V * WARP);
    return s;
}

/* ----------------------------------------------------------------------- bytes of rows ---- */

/* Returns vector i (16 bytes) of a row or of its scales. The address may be unaligned, and the
 * row may end inside the vector; bytes after its end are 0. If rows are aligned to 4 bytes,
 * loads 4-byte words. */
static __device__ __noinline__ uint4 load_part(const uint8_t *row, int32_t i, int64_t row_bytes)
{
    const int64_t at = (int64_t)i * 16;
    if (((uintptr_t)row | (uint64_t)row_bytes) % 4) return load_bytes(row, at, row_bytes, 0);
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; w++)
        words[w] = at + w * 4 < row_bytes ? __ldg((const uint32_t *)(row + at) + w) : 0;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Stores vector i (16 bytes) of a row or of its scales to an address that may be unaligned.
 * Stores no bytes after the end of the row. */
static __device__ __noinline__ void store_part(uint8_t *row, int32_t i, int64_t row_bytes,
                                               uint4 q)
{
    const int64_t at = (int64_t)i * 16;
    if (((uintptr_t)row | (uint64_t)row_bytes) % 4) {
        store_bytes(row, at, row_bytes, q);
        return;
    }
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int w = 0; w < 4; w++)
        if (at + w * 4 < row_bytes) ((uint32_t *)(row + at))[w] = words[w];
}

/* q is the vector with index `at` of a packed row. Stores it to a slot: to the slot's row, or
 * to the slot's scales. */
__device__ __forceinline__ void store_vector(const PackedMove &m, int32_t slot, int32_t at,
                                             uint4 q)
{
    const p2p_dispatch_job &job = m.job;
    uint8_t *const row = job.recv + row_offset(slot, m.shape);
    uint8_t *const scales = job.recv_scales + (int64_t)slot * job.scale_bytes;
    if (at >= m.shape.vectors) return;
    const bool in_row = at < m.row_vectors;
    uint8_t *const to = in_row ? row : scales;
    const int32_t i = in_row ? at : at - m.row_vectors;
    if (in_row ? m.shape.aligned : job.scales_aligned != 0)
        store_once(to + (int64_t)i * 16, q, m.policy);
    else
        store_part(to, i, in_row ? job.row_bytes : job.scale_bytes, q);
}

/* Stores a piece of a packed row to a slot. A piece without scales takes a faster path. Called
 * by a whole warp. */
__device__ __forceinline__ void store_packed(const PackedMove &m, int32_t slot, int piece,
                                             const uint4 (&q)[V])
{
    const int32_t vector = piece * V * WARP;
    if (m.shape.aligned && vector + V * WARP <= m.row_vectors) {
        store_piece<V, true>(m.job.recv + row_offset(slot, m.shape), vector, m.shape, q,
                             m.policy);
        return;
    }
#pragma unroll
    for (int v = 0; v < V; v++) store_vector(m, slot, vector + v * WARP + lane_id(), q[v]);
}

/* Zeroes a piece of the row and scales of a padding slot. With piece 0, also zeroes the slot's
 * weight. Called by a whole warp. */
__device__ __forceinline__ void pad_packed(const PackedMove &m, int32_t slot, int piece)
{
    uint4 zeros[V];
    if ((uint32_t)slot >= (uint32_t)m.job.recv_rows) return;
#pragma unroll
    for (int v = 0; v < V; v++) zeros[v] = make_uint4(0, 0, 0, 0);
    store_packed(m, slot, piece, zeros);
    if (piece == 0 && lane_id() == 0 && m.job.slot_weights) m.job.slot_weights[slot] = 0.0f;
}

/* Zeroes the rows and scales of all slots from `first` on. Each of `threads` threads calls it
 * with its own index `thread`. */
static __device__ void zero_packed(const p2p_dispatch_job &job, int64_t first, int64_t thread,
                                   int64_t threads)
{
    const int64_t end = job.recv_rows;
    if (first >= end) return;
    zero_rows(job.recv, job.row_bytes, first, end, thread, threads);
    zero_rows(job.recv_scales, job.scale_bytes, first, end, thread, threads);
}

/* Returns a bit mask of the lanes that pass a `slot` inside the receive buffer. */
__device__ __forceinline__ uint32_t slots_here(const PackedMove &m, int32_t slot)
{
    return __ballot_sync(ALL_LANES, slot >= 0 && slot < m.job.recv_rows);
}

/* Calls write(slot) for the slots of all lanes, one after the other. All lanes take part in
 * each call. `slot`: this lane's slot, or -1. Called by a whole warp. */
template <class Write>
__device__ __forceinline__ void for_each_slot(const PackedMove &m, int32_t slot, Write write)
{
    uint32_t slots = slots_here(m, slot);
    int32_t next = __shfl_sync(ALL_LANES, slot, __ffs(slots) - 1);
    while (slots) {
        const int32_t to = next;
        slots &= slots - 1;
        /* Read the next slot before the stores to this slot, because the shuffle would wait for
         * them. */
        next = __shfl_sync(ALL_LANES, slot, __ffs(slots) - 1);
        write(to);
    }
}

/* ----------------------------------------------------------------------------- staging ---- */

/* Escape words show which words of a piece the sender has replaced. Returns the address in
 * `heap` at which the escape words for piece `piece` of the packed row of `token` arrive.
 * `source`: index of the sender among the sources of the heap's owner
 * (dispatch/dispatch.cuh). */
__device__ __forceinline__ uint32_t *escapes_at(const PackedMove &m, uint8_t *heap, int source,
                                                int32_t token, int piece)
{
    return escapes_base(m.job.plan.self, m.op, heap, source) +
           ((int64_t)(token - m.round_begin) * m.shape.pieces + piece) * WARP;
}

/* Restores the words that the sender has replaced: changes E8M0_STAND_IN in the scales of a
 * piece back to E8M0_NANS. `vector`: index of the piece's first vector in the packed row. */
__device__ __forceinline__ void restore_nans(const PackedMove &m, int32_t vector, uint4 (&q)[V])
{
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (vector + v * WARP + lane_id() < m.row_vectors) continue;
        q[v].x = q[v].x == E8M0_STAND_IN ? E8M0_NANS : q[v].x;
        q[v].y = q[v].y == E8M0_STAND_IN ? E8M0_NANS : q[v].y;
        q[v].z = q[v].z == E8M0_STAND_IN ? E8M0_NANS : q[v].z;
        q[v].w = q[v].w == E8M0_STAND_IN ? E8M0_NANS : q[v].w;
    }
}

/* Waits for piece `piece` of the packed row of `token`, a token of the peer `rank`, in staging.
 * Reads the piece into q, restores the words that the sender has replaced, and stores poison to
 * the staging. `source`: index of `rank` among this rank's sources. If `copied` is true, q
 * contains an earlier copy of the piece, in which words that had not arrived are poison. Called
 * by a whole warp. Returns false if the group has failed. */
template <bool QUANTIZED>
__device__ __forceinline__ bool receive_packed_piece(const PackedMove &m, int rank, int source,
                                                     int32_t token, int piece, bool copied,
                                                     uint4 (&q)[V])
{
    const int32_t vector = piece * V * WARP;
    const int peer = relay_of(m.op, rank);
    uint4 *staged = staged_row(m.op.inbox[rank], token - m.round_begin, m.shape.vectors);
    if (!receive_piece<V, false>(m.op, peer, staged, vector, m.shape.vectors, copied, q))
        return false;
    uint8_t *heap = row_inbox_base(m.job.plan.self, m.op, rank);
    uint32_t *escapes = escapes_at(m, heap, source, token, piece);
    if (!QUANTIZED && !unhide_poison<V>(m.op, peer, q, escapes)) return false;
    poison_piece<V, false>(staged, vector, m.shape.vectors);
    if (QUANTIZED && m.job.quantize == EPIC_QUANTIZE_1X32) restore_nans(m, vector, q);
    return true;
}

/* Calls write(rank, distance, row) for each rank in `peers` (bit mask). `row`: address of the
 * token's packed row in the staging of this rank. `distance`: rank minus this rank, modulo
 * num_ranks. */
template <class Write>
__device__ __forceinline__ void for_each_peer(const PackedMove &m, int32_t token,
                                              RankMask peers, Write write)
{
    const p2p_self &self = m.job.plan.self;
#pragma unroll 1
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        if (has_rank(peers, rank))
            write(rank, distance,
                  staged_row(m.op.outbox[rank], token - m.round_begin, m.shape.vectors));
    }
}

/* Only in backend `hosts`: counts the pieces of a token's row that warps have stored for `rank`
 * at `staged`. The call after the last of the `pieces` pieces posts the put of the whole row.
 * Called by a whole warp after it has stored a piece. */
__device__ __forceinline__ void post_put_packed(const PackedMove &m, int rank, int32_t token,
                                                int pieces, const uint4 *staged)
{
    post_put_when_complete(m.job.plan.self, m.op, rank, TOKEN_INDEX(m, token), pieces, staged,
                           (uint32_t)m.shape.vectors * 16);
}

/* --------------------------------------------------------- packed rows from two arrays ---- */

/* A piece of a packed row of this rank, copied from the caller's arrays `tokens` and
 * `scales`. */
struct JoinedPiece {
    uint4 q[V];
    static constexpr bool QUANTIZED = false;

    /* Loads this lane's vectors of a piece from the caller's arrays, which may be unaligned. */
    static __device__ __forceinline__ void load_raw(const PackedMove &m, int32_t token,
                                                    int piece, uint4 (&raw)[V])
    {
#pragma unroll
        for (int v = 0; v < V; v++)
            raw[v] = vector_of(m, token, first_vector(piece) + v * WARP);
    }
    /* Like load_raw(), but loads into q. */
    __device__ __forceinline__ void load_piece(const PackedMove &m, int32_t token, int piece)
    {
        load_raw(m, token, piece, q);
    }
    /* Makes the piece from vectors that load_raw() has loaded before. */
    __device__ __forceinline__ void make_piece(const PackedMove &m, int32_t, int,
                                               const uint4 (&raw)[V])
    {
        make_raw(m, raw);
    }
    __device__ __forceinline__ void make_raw(const PackedMove &, const uint4 (&raw)[V])
    {
#pragma unroll
        for (int v = 0; v < V; v++) q[v] = raw[v];
    }
    /* Returns the index in the packed row of this lane's first vector of a piece. */
    static __device__ __forceinline__ int32_t first_vector(int piece)
    {
        return piece * V * WARP + lane_id();
    }
    /* Returns vector `at` of a token's packed row: 16 bytes of the row or of the scales. */
    static __device__ __forceinline__ uint4 vector_of(const PackedMove &m, int32_t token,
                                                      int32_t at)
    {
        const p2p_dispatch_job &job = m.job;
        const uint8_t *row = job.tokens + row_offset(token, m.shape);
        const uint8_t *scales = job.scales + (int64_t)token * job.scale_bytes;
        if (at >= m.shape.vectors) return make_uint4(0, 0, 0, 0);
        const bool in_row = at < m.row_vectors;
        const int32_t i = in_row ? at : at - m.row_vectors;
        if (in_row ? m.shape.aligned : job.scales_aligned != 0)
            return load_again((in_row ? row : scales) + (int64_t)i * 16);
        return load_part(in_row ? row : scales, i, in_row ? job.row_bytes : job.scale_bytes);
    }
    /* Completes a piece that was read from the ring buffer in shared memory. The ring copies
     * only aligned vectors, so if the scales are unaligned, loads the scales from memory. */
    __device__ __forceinline__ void complete_scales(const PackedMove &m, int32_t token,
                                                    int piece)
    {
        if (m.job.scales_aligned || (piece + 1) * V * WARP <= m.row_vectors) return;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (first_vector(piece) + v * WARP >= m.row_vectors)
                q[v] = vector_of(m, token, first_vector(piece) + v * WARP);
    }
    /* Stores the piece to the staging of `peers` (bit mask). If the piece contains poison or
     * its stand-in, also sends escape words, with which the receiver restores the poison
     * (net/staging.cuh). Called by a whole warp. */
    __device__ __forceinline__ void send_to_peers(const PackedMove &m, int32_t token, int piece,
                                                  RankMask peers)
    {
        const p2p_self &self = m.job.plan.self;
        const uint32_t mask = hide_poison<V>(q);
        for_each_peer(m, token, peers, [&](int rank, int distance, uint4 *staged) {
            send_piece<V, false>(staged, piece * V * WARP, m.shape.vectors, q);
            post_put_packed(m, rank, token, m.shape.pieces, staged);
            if (!mask) return;
            uint32_t *escape =
                escapes_at(m, self.heap[rank], self.num_ranks - 1 - distance, token, piece);
            store_relaxed(escape + lane_id(), mask);
            post_put_warp(m.op, rank, escape, WARP * 4);
        });
    }
    /* Stores the piece to the slots of all lanes. `slot`: this lane's slot, or -1. Called by a
     * whole warp. */
    __device__ __forceinline__ void fill_slots_of(const PackedMove &m, int piece,
                                                  int32_t slot) const
    {
        for_each_slot(m, slot, [&](int32_t to) { store_packed(m, to, piece, q); });
    }
};

/* --------------------------------------------------------------- quantized packed rows ---- */

/* Loads 16 elements of type `type`, from element `first` on, and converts them to floats.
 * `row`: a row of `count` elements, which may be unaligned. Elements after its end are 0. */
static __device__ __noinline__ void load_elements(const uint8_t *row, int64_t first,
                                                  int64_t count, uint32_t type, float *x)
{
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        float of = 0.0f;
        if (first + i < count && type == EPIC_F32)
            of = __ldg((const float *)row + first + i);
        else if (first + i < count) {
            const uint32_t half = __ldg((const unsigned short *)row + first + i);
            float pair[8];
            if (type == EPIC_BF16)
                Bf16::unpack_floats(make_uint4(half, 0, 0, 0), pair);
            else
                F16::unpack_floats(make_uint4(half, 0, 0, 0), pair);
            of = pair[0];
        }
        x[i] = of;
    }
}

/* A piece that is quantized before it is sent. Each lane has two runs of 16 adjacent
 * elements. */
struct QuantizedPiece {
    Sixteens e;
    static constexpr bool QUANTIZED = true;

    /* Returns the index in the piece of this lane's vector v. Vectors 0 and 1 are the lane's
     * first run of 16 elements, and vectors 2 and 3 are its second run. */
    static __device__ __forceinline__ int32_t vector_of(int v)
    {
        return (v / 2 * WARP + lane_id()) * 2 + v % 2;
    }
    /* Loads this lane's vectors of a piece of the caller's row, if rows are aligned. Requires
     * elements of 16 bits. Rows that are not aligned are loaded by make_piece(). */
    static __device__ __forceinline__ void load_raw(const PackedMove &m, int32_t token,
                                                    int piece, uint4 (&raw)[V])
    {
        const uint8_t *const row = m.job.tokens + row_offset(token, m.own_shape);
        if (!m.shape.aligned) return;
#pragma unroll
        for (int v = 0; v < V; v++)
            raw[v] = load_row_again(row, piece * V * WARP + vector_of(v), m.own_shape, 0);
    }
    /* Quantizes the vectors `raw` that load_raw() has loaded. If rows are not aligned,
     * load_raw() has loaded nothing, so this function also loads the piece. */
    __device__ __forceinline__ void make_piece(const PackedMove &m, int32_t token, int piece,
                                               const uint4 (&raw)[V])
    {
        if (m.shape.aligned)
            make_raw(m, raw);
        else
            load_piece(m, token, piece);
    }
    /* Converts the 16 elements of two adjacent vectors to floats. */
    static __device__ __forceinline__ void unpack_floats(const PackedMove &m, uint4 low,
                                                         uint4 high, float (&x)[16])
    {
        if (m.job.type == EPIC_BF16) {
            Bf16::unpack_floats(low, x);
            Bf16::unpack_floats(high, x + 8);
        } else {
            F16::unpack_floats(low, x);
            F16::unpack_floats(high, x + 8);
        }
    }
    /* Quantizes this lane's vectors of 16-bit elements: a run of 16 elements in vectors 0 and
     * 1, and a second run in vectors 2 and 3 (vector_of()). Converts and quantizes the first
     * run before the second, because floats for both runs would need too many registers. */
    __device__ __forceinline__ void make_raw(const PackedMove &m, const uint4 (&raw)[V])
    {
        const uint32_t how = m.job.quantize;
        uint32_t own[2];
#pragma unroll
        for (int v = 0; v < 2; v++)
            own[v] = m.job.type == EPIC_BF16 ? largest_size<Bf16>(raw[2 * v], raw[2 * v + 1])
                                             : largest_size<F16>(raw[2 * v], raw[2 * v + 1]);
        const BlockScale mine = scale_of<2>(join_lanes<2, 16>(own, how), 1.0f, how);
        e.scales = mine.word;
#pragma unroll
        for (int v = 0; v < 2; v++) {
            float x[16];
            unpack_floats(m, raw[2 * v], raw[2 * v + 1], x);
            quantize_vector<true, 2, 16>(e, v, x, mine, how);
        }
    }
    /* Loads a piece of the caller's row, which need not be aligned, and quantizes it. */
    __device__ __forceinline__ void load_piece(const PackedMove &m, int32_t token, int piece)
    {
        const uint8_t *row = m.job.tokens + row_offset(token, m.own_shape);
        float x[2][16];
        for (int v = 0; v < 2; v++)
            load_elements(row, row_at(piece, v), m.job.row_bytes, m.job.type, x[v]);
        e = quantize_piece<2, 16>(x, m.job.quantize);
    }
    /* Returns the offset in bytes of this lane's run v in the quantized row (one byte per
     * element). */
    static __device__ __forceinline__ int64_t row_at(int piece, int v)
    {
        return (int64_t)piece * Sixteens::BYTES + (v * WARP + lane_id()) * 16;
    }
    /* Returns the offset in bytes, from the start of the row's scales, of this lane's word of
     * scales. */
    static __device__ __forceinline__ int64_t scales_at(int piece)
    {
        return ((int64_t)piece * Sixteens::WORDS + Sixteens::word_index()) * 4;
    }
    /* Returns the 16 quantized elements of run v. */
    __device__ __forceinline__ uint4 vector_of_run(int v) const
    {
        return make_uint4(e.q[v][0], e.q[v][1], e.q[v][2], e.q[v][3]);
    }
    /* Stores the piece to the staging of `peers` (bit mask). Replaces scales that equal poison
     * by E8M0_STAND_IN. Called by a whole warp. */
    __device__ __forceinline__ void send_to_peers(const PackedMove &m, int32_t token, int piece,
                                                  RankMask peers) const
    {
        const int64_t row_end = (int64_t)m.row_vectors * 16;
        const int64_t end = (int64_t)m.shape.vectors * 16;
        const bool odd = m.job.quantize == EPIC_QUANTIZE_1X32 && e.scales == E8M0_NANS;
        const uint32_t scales = odd ? E8M0_STAND_IN : e.scales;
        for_each_peer(m, token, peers, [&](int rank, int, uint4 *staged) {
            uint8_t *const to = (uint8_t *)staged;
#pragma unroll
            for (int v = 0; v < 2; v++)
                if (row_at(piece, v) < row_end)
                    store_relaxed((uint4 *)(to + row_at(piece, v)), vector_of_run(v));
            if (Sixteens::has_word() && row_end + scales_at(piece) < end)
                store_relaxed((uint32_t *)(to + row_end + scales_at(piece)), scales);
            post_put_packed(m, rank, token, m.own_shape.pieces, staged);
        });
    }
    /* Stores the piece and its scales to the slots of all lanes. `slot`: this lane's slot, or
     * -1. Called by a whole warp. */
    __device__ __forceinline__ void fill_slots_of(const PackedMove &m, int piece,
                                                  int32_t slot) const
    {
        const p2p_dispatch_job &job = m.job;
        const QuantizedRows rows = {job.recv,        job.recv_scales, job.row_bytes,
                                    job.scale_bytes, m.shape.aligned, job.scales_in_words != 0};
        for_each_slot(
            m, slot, [&](int32_t to) { store_quantized<2, 16>(rows, to, piece, e, m.policy); });
    }
};

#endif
