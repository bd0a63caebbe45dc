/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch for few tokens (lowlat/dispatch.cuh) with packed rows. A packed row is a row and its
 * scales as one sequence of 16-byte vectors (dispatch/packed.cuh). Either the caller passes the
 * scales, or the kernel computes them when it quantizes the row.
 *
 *   tokens  [num_tokens, token_bytes], scales [num_tokens, scale_bytes]; may be unaligned
 *   recv    [recv_rows, row_bytes], recv_scales [recv_rows, scale_bytes]
 *
 * lowlat/dispatch.cuh explains the work of each warp, and lowlat/lowlat.cuh the memory
 * order. */
#include "cuda/lowlat/dispatch.cuh"

/* Moves packed rows for lowlat_dispatch_kernel(). The comment of PlainRows (lowlat/dispatch.cu)
 * explains each function. The template argument OwnPiece packs the rows of this rank's tokens:
 * JoinedPiece copies rows and scales, and QuantizedPiece quantizes rows. */
template <class OwnPiece> struct PackedRows {
    static constexpr bool EXACT = false;

    static __device__ __forceinline__ RowShape shape_of(const p2p_dispatch_job &job)
    {
        return packed_shape(job, job.aligned);
    }
    static __device__ __forceinline__ void describe_rows(LowlatMove &m)
    {
        describe_packed(m, 1);
    }
    static __device__ __forceinline__ int own_pieces(const LowlatMove &m)
    {
        return m.own_shape.pieces;
    }
    static __device__ __forceinline__ void load_piece(const LowlatMove &m, int32_t token,
                                                      int piece, uint4 (&q)[V])
    {
        OwnPiece::load_raw(m, token, piece, q);
    }
    static __device__ __forceinline__ void send_to_peers(const LowlatMove &m, int32_t token,
                                                         int piece, uint32_t peers,
                                                         const uint4 (&q)[V])
    {
        OwnPiece own_piece;
        own_piece.make_piece(m, token, piece, q);
        own_piece.send_to_peers(m, token, piece, peers);
    }
    static __device__ __forceinline__ bool receive_from_peer(const LowlatMove &m, int rank,
                                                             int source, int32_t token,
                                                             int piece, uint4 (&q)[V])
    {
        return receive_packed_piece<OwnPiece::QUANTIZED>(m, rank, source, token, piece, true,
                                                         q);
    }
    static __device__ __forceinline__ void fill_slots_of(const LowlatMove &m, bool own,
                                                         int32_t token, int piece, int32_t slot,
                                                         const uint4 (&q)[V])
    {
        /* a piece from a peer is already packed; a piece of this rank must be packed first */
        if (!own) {
            for_each_slot(m, slot, [&](int32_t to) { store_packed(m, to, piece, q); });
            return;
        }
        OwnPiece own_piece;
        own_piece.make_piece(m, token, piece, q);
        own_piece.fill_slots_of(m, piece, slot);
    }
    static __device__ __forceinline__ void pad_slot(const LowlatMove &m, int32_t slot,
                                                    int piece)
    {
        pad_packed(m, slot, piece);
    }
    static __device__ __forceinline__ void clear_rows(const LowlatMove &m, int64_t first,
                                                      int64_t thread, int64_t threads)
    {
        zero_packed(m.job, first, thread, threads);
        zero_floats(m.job.slot_weights, first, m.job.recv_rows, thread, threads);
    }
};

typedef void (*Kernel)(p2p_dispatch_job);

static const Kernel joined[] = {lowlat_dispatch_kernel<PackedRows<JoinedPiece>, false>,
                                lowlat_dispatch_kernel<PackedRows<JoinedPiece>, true>};
static const Kernel quantized[] = {lowlat_dispatch_kernel<PackedRows<QuantizedPiece>, false>,
                                   lowlat_dispatch_kernel<PackedRows<QuantizedPiece>, true>};

extern "C" cudaError_t p2p_load_lowlat_dispatch_packed(void)
{
    const cudaError_t error = load_lowlat(joined);
    return error == cudaSuccess ? load_lowlat(quantized) : error;
}

extern "C" cudaError_t p2p_launch_lowlat_dispatch_packed(const p2p_dispatch_job *job,
                                                         int num_sms, cudaStream_t stream)
{
    p2p_dispatch_job copy = *job;
    copy.aligned = job->aligned && (!job->quantize || job->type != EPIC_F32);
    return launch_lowlat(job->quantize ? quantized : joined, copy, num_sms, stream);
}
