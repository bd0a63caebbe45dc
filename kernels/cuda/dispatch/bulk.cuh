/* SPDX-License-Identifier: Apache-2.0 */
/* Moves whole packed rows (a row and its scales, dispatch/packed.cuh) through shared memory. A
 * warp has 2 to 4 *buffers* in shared memory, each for one packed row. All lanes of the warp
 * copy a row to a buffer, or quantize it and store the result there. Then one lane starts bulk
 * stores (cp.async.bulk): the copy engine of the SM copies the buffer to its destinations.
 *
 *   tokens, staging -> copies of all lanes -\
 *   tokens -> registers, quantized ----------+-> buffer -> bulk stores -> peers, slots
 *
 * So a row with many slots costs a warp about as many instructions as a row with one slot. A
 * warp waits for bulk stores only when it needs their buffer again. Shared memory also contains
 * constant vectors: zeros, for padding slots, and poison (the mark of a word that has not
 * arrived), for staging.
 *
 *   shared memory of a CTA:  [ zeros ][ poison ][ buffers of warp 0 ][ of warp 1 ] ... */
#ifndef EPIC_BULK_CUH
#define EPIC_BULK_CUH

#include "cuda/dispatch/packed_slots.cuh"

#define BULK_MEMORY (216 << 10) /* dynamic shared memory per CTA, in bytes */
#define CONSTANT_BYTES 2048     /* size in bytes of each of two arrays: zeros, and poison */

/* The buffers of a warp in shared memory, each for one packed row. The warp uses its buffers
 * round-robin. */
struct BulkBuffers {
    /* first_address: shared-memory address of the warp's first buffer. buffer_bytes: size in
     * bytes of a buffer. */
    uint32_t first_address, buffer_bytes;
    uint32_t zeros, poison; /* shared-memory addresses of the constant vectors */
    /* num_buffers: number of buffers. current: index of the buffer with the row of the current
     * unit. */
    int num_buffers, current;

    /* memory: dynamic shared memory of the CTA. warp: index of this warp in the CTA. */
    __device__ __forceinline__ BulkBuffers(const PackedMove &m, const void *memory, int warp)
    {
        zeros = shared_address(memory);
        poison = zeros + CONSTANT_BYTES;
        buffer_bytes =
            (uint32_t)(m.shape.vectors + 7) / 8 * 128; /* rounded up to whole cache lines */
        num_buffers = m.job.num_buffers;
        first_address = poison + CONSTANT_BYTES + (uint32_t)(warp * num_buffers) * buffer_bytes;
        current = 0;
    }
    /* Returns the index of the buffer for the row of the next unit. */
    __device__ __forceinline__ int next_buffer() const
    {
        return current + 1 == num_buffers ? 0 : current + 1;
    }
    /* Returns the shared-memory address of a buffer. */
    __device__ __forceinline__ uint32_t buffer_address(int buffer) const
    {
        return first_address + (uint32_t)buffer * buffer_bytes;
    }
    /* Waits until bulk stores have read the next buffer, so that the warp may write to this
     * buffer again. The bulk stores of the last num_buffers - 2 units may still be running,
     * because they read other buffers. Requires that the caller calls end_bulk() exactly once
     * per unit: end_bulk() closes a group of bulk stores, and wait_bulk_read() counts such
     * groups. Called by a whole warp. */
    __device__ __forceinline__ void wait_free() const
    {
        if (lane_id() == 0) {
            if (num_buffers == 2)
                wait_bulk_read<0>();
            else if (num_buffers == 3)
                wait_bulk_read<1>();
            else
                wait_bulk_read<2>();
        }
        __syncwarp();
    }
};

/* Fills the first array of constants with zeros, and the second one with poison. Called by all
 * threads of a CTA. */
static __device__ void fill_constants(const void *memory)
{
    const uint32_t zeros = shared_address(memory);
    for (uint32_t at = threadIdx.x * 16; at < 2 * CONSTANT_BYTES; at += blockDim.x * 16)
        store_shared(zeros + at,
                     at < CONSTANT_BYTES ? make_uint4(0, 0, 0, 0) : poison_vector());
    fence_bulk();
    __syncthreads();
}

/* Makes the warp's stores to its buffers visible to bulk stores that it starts later. Called by
 * a whole warp. */
__device__ __forceinline__ void fence_buffers(void)
{
    fence_bulk();
    __syncwarp();
}

/* -------------------------------------------------------------- packed rows in buffers ---- */

/* Starts to copy the row and the scales of `token`, a token of this rank, to `buffer`. In all
 * functions below, `buffer` is the shared-memory address of a buffer. Called by a whole
 * warp. */
__device__ __forceinline__ void copy_own(const PackedMove &m, int32_t token, uint32_t buffer)
{
    const p2p_dispatch_job &job = m.job;
    const uint8_t *const row = job.tokens + row_offset(token, m.shape);
    /* The scales follow row_vectors vectors of the row. `second` is the address of the scales
     * minus 16 * row_vectors, so that vector v of the packed row, if it contains scales, is at
     * second + 16 * v. */
    const uint8_t *const second =
        job.scales + (int64_t)token * job.scale_bytes - (int64_t)m.row_vectors * 16;
    for (int32_t v = lane_id(); v < m.shape.vectors; v += WARP)
        copy_again(buffer + v * 16, (v < m.row_vectors ? row : second) + (int64_t)v * 16);
}

/* Prefetches the row of `token`, a token of this rank, into the L2 cache. The warp will
 * quantize this row next. */
__device__ __forceinline__ void prefetch_own(const PackedMove &m, int32_t token)
{
    if (lane_id() == 0)
        bulk_prefetch(m.job.tokens + row_offset(token, m.own_shape),
                      (uint32_t)m.own_shape.row_bytes);
}

/* Starts to copy the packed row of `token`, a token of the peer `rank`, from staging to a
 * buffer. Words that have not arrived are poison in the buffer. */
__device__ __forceinline__ void copy_staged(const PackedMove &m, int rank, int32_t token,
                                            uint32_t buffer)
{
    const uint4 *staged = staged_row(m.op.inbox[rank], token - m.round_begin, m.shape.vectors);
    for (int32_t v = lane_id(); v < m.shape.vectors; v += WARP)
        copy_again(buffer + v * 16, staged + v);
}

/* Quantizes the row of `token`, a token of this rank, into a buffer. Returns true in a lane
 * that has stored a word of scales that equals poison. This word must be replaced before the
 * row is sent, because the receiver would take poison for a word that has not arrived. Called
 * by a whole warp. */
__device__ __forceinline__ bool quantize_row(const PackedMove &m, int32_t token,
                                             uint32_t buffer)
{
    const uint32_t row_end = (uint32_t)m.row_vectors * 16;
    const uint32_t end = (uint32_t)m.shape.vectors * 16;
    bool special = false;
    /* Load two pieces ahead, because the load of a piece takes longer than its quantization. */
    uint4 next[V], after[V];
    QuantizedPiece::load_raw(m, token, 0, next);
    QuantizedPiece::load_raw(m, token, 1, after);
#pragma unroll 1
    for (int i = 0; i < m.own_shape.pieces; i++) {
        uint4 raw[V];
        QuantizedPiece piece;
#pragma unroll
        for (int v = 0; v < V; v++) raw[v] = next[v], next[v] = after[v];
        QuantizedPiece::load_raw(m, token, i + 2, after);
        piece.make_raw(m, raw);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const uint32_t at = (uint32_t)QuantizedPiece::row_at(i, v);
            if (at < row_end) store_shared(buffer + at, piece.vector_of_run(v));
        }
        const uint32_t word = row_end + (uint32_t)QuantizedPiece::scales_at(i);
        if (!Sixteens::has_word() || word >= end) continue;
        store_shared(buffer + word, piece.e.scales);
        special |= piece.e.scales == E8M0_NANS;
    }
    return special;
}

/* Calls change(q) with this lane's vectors of a piece of a row in a buffer, and stores the
 * changed vectors back to the buffer. Called by a whole warp. */
template <class Change>
__device__ __forceinline__ void change_piece(const PackedMove &m, uint32_t buffer, int piece,
                                             Change change)
{
    const int32_t vector = piece * V * WARP + lane_id();
    uint4 q[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        q[v] = make_uint4(0, 0, 0, 0);
        if (vector + v * WARP < m.shape.vectors)
            q[v] = load_shared(buffer + (vector + v * WARP) * 16);
    }
    change(q);
#pragma unroll
    for (int v = 0; v < V; v++)
        if (vector + v * WARP < m.shape.vectors)
            store_shared(buffer + (vector + v * WARP) * 16, q[v]);
}

struct ScanResult { /* The result of scan_packed() for this lane's vectors. */
    bool missing, special;
};

/* Checks a packed row in a buffer, before the row is sent or after it was received.
 *
 * - missing: a word is poison. In a received row, this word has not arrived. - special: a word
 * equals poison or its stand-in, the word that a sender sends in place of poison. A row to send
 * must then be sent by send_special(). In a received row, the stand-in may replace poison, so
 * restore_special_words() must be called. In a quantized row (QUANTIZED), only a word of scales
 * that equals E8M0_STAND_IN is special. In other rows, the comparison ignores sign bits. */
template <bool QUANTIZED>
__device__ __forceinline__ ScanResult scan_packed(const PackedMove &m, uint32_t buffer)
{
    ScanResult found = {false, false};
#pragma unroll 4
    for (int32_t v = lane_id(); v < m.shape.vectors; v += WARP) {
        const uint4 q = load_shared(buffer + v * 16);
        found.missing |= has_poison(q);
        if (!QUANTIZED)
            found.special |= needs_escape(q);
        else if (v >= m.row_vectors)
            found.special |= q.x == E8M0_STAND_IN || q.y == E8M0_STAND_IN ||
                             q.z == E8M0_STAND_IN || q.w == E8M0_STAND_IN;
    }
    return found;
}

/* The buffer contains a copy of the packed row of `token`, a token of the peer `rank`. Some
 * words had not arrived when the row was copied. Waits for these words in staging, and stores
 * them to the buffer. Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool wait_packed(const PackedMove &m, int rank, int32_t token,
                                            uint32_t buffer)
{
    const uint4 *staged = staged_row(m.op.inbox[rank], token - m.round_begin, m.shape.vectors);
    bool ok = true;
#pragma unroll 1
    for (int i = 0; i < m.shape.pieces && ok; i++)
        change_piece(m, buffer, i, [&](uint4(&q)[V]) {
            ok = receive_piece<V, false>(m.op, relay_of(m.op, rank), staged, i * V * WARP,
                                         m.shape.vectors, true, q);
        });
    return ok;
}

/* The buffer contains a packed row that has arrived from the peer `rank`. Restores the words of
 * this row that equaled poison, so that the sender had to replace them. `source`: index of the
 * peer among this rank's sources. Called by a whole warp. Returns false if the group has
 * failed. */
template <bool QUANTIZED>
__device__ __forceinline__ bool restore_special_words(const PackedMove &m, int rank, int source,
                                                      int32_t token, uint32_t buffer)
{
    bool ok = true;
#pragma unroll 1
    for (int i = 0; i < m.shape.pieces; i++)
        change_piece(m, buffer, i, [&](uint4(&q)[V]) {
            if (QUANTIZED)
                restore_nans(m, i * V * WARP, q);
            else
                ok &= unhide_poison<V>(m.op, relay_of(m.op, rank), q,
                                       escapes_at(m, m.op.heap, source, token, i));
        });
    return ok;
}

/* ------------------------------------------------------------------------- bulk stores ---- */

/* Calls store(address, size) one or more times, so that the calls together cover the `bytes`
 * bytes from address `to` on. Each call covers at most CONSTANT_BYTES bytes, because an array
 * of constants has this size. Called by one lane. */
template <class Store>
__device__ __forceinline__ void store_constant(uint8_t *to, int64_t bytes, Store store)
{
    for (int64_t at = 0; at < bytes; at += CONSTANT_BYTES)
        store(to + at, (uint32_t)min(bytes - at, (int64_t)CONSTANT_BYTES));
}

/* Sends the packed row in `buffer` to the staging of `peers` (bit mask) by bulk stores. Called
 * by a whole warp; one lane starts the stores. */
__device__ __forceinline__ void bulk_to_peers(const PackedMove &m, int32_t token,
                                              uint32_t peers, uint32_t buffer)
{
    if (lane_id()) return;
    for_each_peer(m, token, peers, [&](int, int, uint4 *staged) {
        bulk_send(staged, buffer, (uint32_t)m.shape.vectors * 16);
    });
}

/* Returns true if the lanes store the scales of a row to the slots by ordinary stores. Returns
 * false if bulk stores do this. With few bytes of scales per row, ordinary stores are faster,
 * because a short bulk store takes as long as a bulk store of a kilobyte. */
__device__ __forceinline__ bool scales_by_lanes(const PackedMove &m)
{
    return m.job.scale_bytes <= WARP * 16;
}

/* Stores scales to a slot. q: this lane's 16 bytes of the scales of a row. */
__device__ __forceinline__ void store_scales(const PackedMove &m, int32_t slot, uint4 q)
{
    const int64_t at = (int64_t)slot * m.job.scale_bytes + lane_id() * 16;
    if (lane_id() * 16 < m.job.scale_bytes) store_once(m.job.recv_scales + at, q, m.policy);
}

/* Stores the packed row in `buffer` to the slots of all lanes: the row to job.recv, and the
 * scales to job.recv_scales. `slot`: this lane's slot, or -1. Called by a whole warp. */
__device__ __forceinline__ void bulk_to_slots(const PackedMove &m, int32_t slot,
                                              uint32_t buffer)
{
    const p2p_dispatch_job &job = m.job;
    const uint32_t row_bytes = (uint32_t)job.row_bytes;
    const bool by_lanes = scales_by_lanes(m);
    uint4 q = make_uint4(0, 0, 0, 0);
    if (by_lanes && lane_id() * 16 < job.scale_bytes)
        q = load_shared(buffer + row_bytes + lane_id() * 16);
    for_each_slot(m, slot, [&](int32_t to) {
        if (by_lanes) store_scales(m, to, q);
        if (lane_id()) return;
        bulk_once(job.recv + row_offset(to, m.shape), buffer, row_bytes, m.policy);
        if (!by_lanes)
            bulk_once(job.recv_scales + (int64_t)to * job.scale_bytes, buffer + row_bytes,
                      (uint32_t)job.scale_bytes, m.policy);
    });
}

/* Stores zeros to the row, scales and weight of a padding slot. Called by a whole warp. */
__device__ __forceinline__ void bulk_padding(const PackedMove &m, int32_t slot,
                                             const BulkBuffers &buffers)
{
    const p2p_dispatch_job &job = m.job;
    const auto store = [&](uint8_t *to, uint32_t bytes) {
        bulk_once(to, buffers.zeros, bytes, m.policy);
    };
    if ((uint32_t)slot >= (uint32_t)job.recv_rows) return;
    if (scales_by_lanes(m)) store_scales(m, slot, make_uint4(0, 0, 0, 0));
    if (lane_id()) return;
    store_constant(job.recv + row_offset(slot, m.shape), job.row_bytes, store);
    if (!scales_by_lanes(m))
        store_constant(job.recv_scales + (int64_t)slot * job.scale_bytes, job.scale_bytes,
                       store);
    if (job.slot_weights) job.slot_weights[slot] = 0.0f;
}

/* Overwrites the row of `token`, a token of the peer `rank`, in staging with poison, so that
 * the staging can be used again. Requires that the row has been received. Called by a whole
 * warp. */
__device__ __forceinline__ void bulk_restore(const PackedMove &m, int rank, int32_t token,
                                             const BulkBuffers &buffers)
{
    if (lane_id()) return;
    uint8_t *staged =
        (uint8_t *)staged_row(m.op.inbox[rank], token - m.round_begin, m.shape.vectors);
    store_constant(staged, (int64_t)m.shape.vectors * 16, [&](uint8_t *to, uint32_t bytes) {
        bulk_store_local(to, buffers.poison, bytes);
    });
}

/* Sends a packed row with special words. A word that equals poison is sent as another word, the
 * stand-in, because the receiver would take poison for a word that has not arrived. In a row
 * that was not quantized, a word that equals the stand-in is also special. First waits until
 * earlier bulk stores have read the buffer. Then replaces poison in the buffer, and sends the
 * row. If the row was not quantized, also sends escape words, with which the receiver finds the
 * stand-ins that replace poison. Called by a whole warp. */
template <bool QUANTIZED>
__device__ __forceinline__ void send_special(const PackedMove &m, int32_t token, uint32_t peers,
                                             uint32_t buffer)
{
    const p2p_self &self = m.job.plan.self;
    if (lane_id() == 0) {
        end_bulk();
        wait_bulk_read<0>();
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < m.shape.pieces; i++) {
        uint32_t mask = 0;
        change_piece(m, buffer, i, [&](uint4(&q)[V]) {
            if (!QUANTIZED) mask = hide_poison<V>(q);
#pragma unroll
            for (int v = 0; v < V && QUANTIZED; v++) {
                q[v].x = q[v].x == E8M0_NANS ? E8M0_STAND_IN : q[v].x;
                q[v].y = q[v].y == E8M0_NANS ? E8M0_STAND_IN : q[v].y;
                q[v].z = q[v].z == E8M0_NANS ? E8M0_STAND_IN : q[v].z;
                q[v].w = q[v].w == E8M0_NANS ? E8M0_STAND_IN : q[v].w;
            }
        });
        if (!mask) continue;
        for_each_peer(m, token, peers, [&](int rank, int distance, uint4 *) {
            uint32_t *escape =
                escapes_at(m, self.heap[rank], self.num_ranks - 1 - distance, token, i);
            store_relaxed(escape + lane_id(), mask);
        });
    }
    fence_buffers();
    bulk_to_peers(m, token, peers, buffer);
}

#endif
