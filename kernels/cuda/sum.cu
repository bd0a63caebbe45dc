/* SPDX-License-Identifier: Apache-2.0 */
/* sum: float32 arrays added over the ranks, in place, the same bits on every rank.
 *   data  [count]   one warp sends and later adds the same pieces, 16 bytes a lane
 *
 * Every rank sends its array to every peer's staging (poison, docs/cuda.md); a warp sends all of
 * its pieces before it waits for any. */
#include "cuda/launch.cuh"
#include "cuda/staging.cuh"

#define BLOCK 512
#define FEW_RANKS 8 /* whose arrays fit a thread's registers side by side */
#define LEVELS 6    /* of a tree of all ranks, the root too */

/* Element i of the array, or of a staged one: count may end within a vector. */
__device__ __forceinline__ uint4 load_floats(const float *data, int64_t i, int64_t count)
{
    uint32_t w[4];
#pragma unroll
    for (int e = 0; e < 4; e++) w[e] = i + e < count ? __float_as_uint(data[i + e]) : 0;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void store_floats(float *data, int64_t i, int64_t count,
                                             const float *x)
{
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (i + e < count) data[i + e] = x[e];
}

__device__ __forceinline__ void send_floats(const Now &now, const p2p_sum_job &job, int64_t i,
                                            uint4 q)
{
    const p2p_self &self = job.self;
    q = other_nans(q, F32::NAN_WORD);
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap(self.rank + distance, self.num_ranks);
        store_relaxed((uint4 *)(now.outbox[rank] + i * 4), q);
    }
}

/* The arrays' elements by rank, from wherever they are. */
__device__ __forceinline__ bool take_floats(const Now &now, const p2p_sum_job &job, int64_t i,
                                            bool in, uint4 (&q)[FEW_RANKS])
{
    const p2p_self &self = job.self;
    auto staged = [&](int rank) { return (uint4 *)(now.inbox[rank] + i * 4); };
    int missing = -1;
    const bool ok = wait_until(now, missing, P2P_PHASE_ROW, [&] {
        missing = -1;
#pragma unroll
        for (int r = 0; r < FEW_RANKS; r++) {
            q[r] = make_uint4(0, 0, 0, 0);
            if (in && r < self.num_ranks)
                q[r] = r == self.rank ? load_floats(job.data, i, job.count)
                                      : load_relaxed(staged(r));
        }
#pragma unroll
        for (int r = 0; r < FEW_RANKS; r++)
            if (r != self.rank && has_poison(q[r])) missing = r;
        return __all_sync(ALL_LANES, missing < 0) != 0;
    });
    for (int r = 0; r < self.num_ranks && ok && in; r++)
        if (r != self.rank) store_here(staged(r), poisoned());
    return ok;
}

/* One rank's elements. */
__device__ __forceinline__ bool take_rank(const Now &now, const p2p_sum_job &job, int rank,
                                          int64_t i, bool in, float (&x)[4])
{
    const bool own = rank == job.self.rank;
    uint4 q = make_uint4(0, 0, 0, 0), *staged = (uint4 *)(now.inbox[rank] + i * 4);
    if (own && in) q = load_floats(job.data, i, job.count);
    const bool ok = own || wait_until(now, rank, P2P_PHASE_ROW, [&] {
                        if (in) q = load_relaxed(staged);
                        return __any_sync(ALL_LANES, has_poison(q)) == 0;
                    });
    if (ok && in && !own) store_here(staged, poisoned());
    F32::unpack(q, x);
    return ok;
}

__device__ __forceinline__ void add_left(const float (&left)[4], float (&x)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = left[e] + x[e];
}

/* The sum of many ranks, one after the other; as a tree, with what waits for its right half. */
static __device__ bool add_many(const Now &now, const p2p_sum_job &job, int64_t i, bool in,
                                float (&x)[4])
{
    const int ranks = job.self.num_ranks;
    const bool tree = job.order == EPIC_TREE;
    float left[LEVELS][4];
#pragma unroll 1
    for (int r = 0; r < ranks; r++) {
        if (!take_rank(now, job, r, i, in, x)) return false;
        if (!tree && r) add_left(left[0], x);
        bool rises = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!rises) continue;
            rises = tree && (r >> level & 1);
            if (rises) add_left(left[level], x);
#pragma unroll
            for (int e = 0; e < 4 && !rises; e++) left[level][e] = x[e];
        }
    }
    bool some = false;
#pragma unroll
    for (int level = 0; level < LEVELS && tree; level++) {
        if (!(ranks >> level & 1)) continue;
        if (some) add_left(left[level], x);
#pragma unroll
        for (int e = 0; e < 4 && !some; e++) x[e] = left[level][e];
        some = true;
    }
    return true;
}

template <bool MANY>
__global__ void __launch_bounds__(BLOCK, 1) sum_kernel(const __grid_constant__ p2p_sum_job job)
{
    __shared__ Now now;
    const p2p_self &self = job.self;
    if (!begin(now, self, 0, 0, 0, 0)) return;
    const int64_t vectors = (job.count + 3) / 4, stride = grid_threads();
    for (int64_t v = grid_thread(); v < vectors; v += stride)
        send_floats(now, job, v * 4, load_floats(job.data, v * 4, job.count));
    bool ok = true;
    const int64_t first = grid_thread() - lane_id();
    for (int64_t v = first; ok && v < vectors; v += stride) {
        const int64_t i = (v + lane_id()) * 4;
        const bool in = v + lane_id() < vectors;
        if constexpr (MANY) {
            float x[4];
            ok = add_many(now, job, i, in, x);
            if (ok && in) store_floats(job.data, i, job.count, x);
            continue;
        }
        uint4 q[FEW_RANKS];
        ok = take_floats(now, job, i, in, q);
        if (!ok) break;
        float x[FEW_RANKS][4];
#pragma unroll
        for (int r = 0; r < FEW_RANKS; r++) F32::unpack(q[r], x[r]);
        if (job.order == EPIC_TREE) {
#pragma unroll
            for (int d = 1; d < FEW_RANKS; d *= 2)
#pragma unroll
                for (int r = 0; r < FEW_RANKS; r += 2 * d)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (r + d < self.num_ranks) x[r][e] += x[r + d][e];
        } else {
#pragma unroll
            for (int r = 1; r < FEW_RANKS; r++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (r < self.num_ranks) x[0][e] += x[r][e];
        }
        if (in) store_floats(job.data, i, job.count, x[0]);
    }
    finish(now);
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
    const auto kernel = job->self.num_ranks > FEW_RANKS ? sum_kernel<true> : sum_kernel<false>;
    return enqueue(kernel, num_sms, BLOCK, 0, stream, *job);
}
