/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch of few tokens (lowlat/dispatch.cuh), of strings: rows with second rows, or quantized on the
 * way, at any address. */
#include "cuda/lowlat/dispatch.cuh"

template <class Given> struct StringRows {
    static constexpr bool EXACT = false;

    static __device__ __forceinline__ RowShape shape_of(const p2p_dispatch_job &job)
    {
        return string_shape(job, job.aligned);
    }
    static __device__ __forceinline__ void describe(Few &m)
    {
        describe_strings(m, 1);
    }
    static __device__ __forceinline__ int own_pieces(const Few &m)
    {
        return m.given.pieces;
    }
    static __device__ __forceinline__ void load(const Few &m, int32_t token, int piece,
                                                uint4 (&q)[V])
    {
        Given::load_raw(m, token, piece, q);
    }
    static __device__ __forceinline__ void send(const Few &m, int32_t token, int piece,
                                                uint32_t peers, const uint4 (&q)[V])
    {
        Given given;
        given.make(m, token, piece, q);
        given.send(m, token, piece, peers);
    }
    static __device__ __forceinline__ bool take(const Few &m, int rank, int source,
                                                int32_t token, int piece, uint4 (&q)[V])
    {
        return take_string<Given::QUANTIZED>(m, rank, source, token, piece, true, q);
    }
    static __device__ __forceinline__ void fill(const Few &m, bool own, int32_t token,
                                                int piece, int32_t slot, const uint4 (&q)[V])
    {
        if (!own) {
            each_slot(m, slot, [&](int32_t to) { store_string(m, to, piece, q); });
            return;
        }
        Given given;
        given.make(m, token, piece, q);
        given.fill(m, piece, slot);
    }
    static __device__ __forceinline__ void pad(const Few &m, int32_t slot, int piece)
    {
        pad_string(m, slot, piece);
    }
    static __device__ __forceinline__ void clear(const Few &m, int64_t first, int64_t thread,
                                                 int64_t threads)
    {
        zero_strings(m.job, first, thread, threads);
        zero_floats(m.job.slot_weights, first, m.job.recv_rows, thread, threads);
    }
};

typedef void (*Kernel)(p2p_dispatch_job);

static const Kernel joined[] = {few_dispatch_kernel<StringRows<Joined>, false>,
                                few_dispatch_kernel<StringRows<Joined>, true>};
static const Kernel quantized[] = {few_dispatch_kernel<StringRows<Made>, false>,
                                   few_dispatch_kernel<StringRows<Made>, true>};

extern "C" cudaError_t p2p_load_few_strings(void)
{
    const cudaError_t error = load_few(joined);
    return error == cudaSuccess ? load_few(quantized) : error;
}

extern "C" cudaError_t p2p_launch_few_strings(const p2p_dispatch_job *job, int num_sms,
                                              cudaStream_t stream)
{
    p2p_dispatch_job copy = *job;
    copy.aligned = job->aligned && (!job->quantize || job->type != EPIC_F32);
    return launch_few(job->quantize ? quantized : joined, copy, num_sms, stream);
}
