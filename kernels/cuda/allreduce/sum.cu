/* SPDX-License-Identifier: Apache-2.0 */
/* allreduce_sum: adds the float32 arrays of all ranks in place. Every rank gets the same bits.
 *
 *   data  [count] float32, input and output
 *
 *   1. send     store each vector (four floats) of data to the staging of every peer
 *   2. receive  poll this rank's staging for the same vector of every peer
 *   3. add      add the vectors of all ranks in rank or tree order, store the sum to data
 *
 * All warps of all CTAs do this work: if the grid has N threads, thread t handles vectors t, t
 * + N, ... Every word in staging is its own flag: the word is poison (0xffffffff) until the
 * peer's store arrives. So the stores need no order. A warp sends all its vectors before it
 * polls for the first vector of a peer. So ranks cannot wait for each other in a circle. */
#include "cuda/allreduce/sum.cuh"
#include "cuda/common/launch.cuh"

#define BLOCK 512

/* Returns the arguments with which add_ranks() adds vector v. They include the four floats of
 * this rank's own array. */
__device__ __forceinline__ RankSum make_rank_sum(const OpState &op, const p2p_sum_job &job,
                                                 int64_t v)
{
    const bool in = v * 4 < job.count;
    return {op,        job.self,
            job.order, v * 4,
            in,        in ? load_floats(job.data, v * 4, job.count) : make_uint4(0, 0, 0, 0)};
}

/* The kernel of allreduce_sum. MANY: true if the group has more than MAX_UNROLLED_RANKS ranks,
 * so that each thread loops over the ranks. */
template <bool MANY>
__global__ void __launch_bounds__(BLOCK, 1) sum_kernel(const __grid_constant__ p2p_sum_job job)
{
    wait_for_previous_kernel();
    __shared__ OpState op;
    const p2p_self &self = job.self;
    if (!begin_operation(op, self, 0, 0, 0, 0)) return;
    const int64_t vectors = (job.count + 3) / 4, stride = grid_threads();
    for (int64_t v = grid_thread(); v < vectors; v += stride)
        make_rank_sum(op, job, v).send_floats();
    post_put_vectors(op, vectors);
    bool ok = true;
    const int64_t first = grid_thread() - lane_id();
    for (int64_t v = first; ok && v < vectors; v += stride) {
        const RankSum s = make_rank_sum(op, job, v + lane_id());
        float x[4];
        ok = add_ranks<MANY>(s, x);
        if (ok && s.in) store_floats(job.data, s.at, job.count, x);
    }
    finish_operation(op);
}

extern "C" cudaError_t p2p_load_sum(void)
{
    cudaFuncAttributes attributes;
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, (const void *)sum_kernel<false>);
    if (error != cudaSuccess) return error;
    return cudaFuncGetAttributes(&attributes, (const void *)sum_kernel<true>);
}

extern "C" cudaError_t p2p_launch_sum(const p2p_sum_job *job, int num_sms, cudaStream_t stream)
{
    const auto kernel =
        job->self.num_ranks > MAX_UNROLLED_RANKS ? sum_kernel<true> : sum_kernel<false>;
    return launch_kernel(kernel, num_sms, BLOCK, 0, stream, *job);
}
