/* SPDX-License-Identifier: Apache-2.0 */
/* EPIC_BY_K: an expert keeps all choices with k = 0 before those with k = 1, and so on.
 *
 * The ranks count the choices of each k separately, as if there were one expert per k:
 *
 *   tally        k * num_experts + expert
 *   base         [tallies of choices]  choices of the expert with lower k, of all ranks
 *   taken        [warps][num_experts]  kept choices before the next one of the warp, in the
 *                                      order of slots, which is that of tokens
 *
 * The position of a choice among those of its k, plus all of lower k, decides whether it is
 * kept. Its slot follows from the kept choices before it; each warp knows their number for
 * every k. */
#ifndef EPIC_KEEP_BY_K_CUH
#define EPIC_KEEP_BY_K_CUH

#include "cuda/plan/replicas.cuh"

/* Dynamic shared memory after that of replicas. */
static inline int by_k_bytes(const p2p_plan_job *job)
{
    const int warps = planner_warps(num_tallies(*job, job->layer.layout == EPIC_FLAT));
    return job->by_k ? (int)job->layer.num_experts * 4 * (1 + warps) : 0;
}

/* Replaces `load` by all choices of each expert, and sets `base`. All threads, when counts have
 * arrived. */
static __device__ void prepare_by_k(Planner &p, const p2p_plan_job &job)
{
    const int experts = job.layer.num_experts;
    int32_t *const total = (int32_t *)(p.rare + replica_bytes(&job.layer));
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int32_t before = 0;
        for (int i = e; i < num_choice_tallies(job); i += experts) {
            const int32_t count = p.load[i];
            p.load[i] = before;
            before += count;
        }
        total[e] = before;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        p.base = p.load;
        p.load = total;
        p.taken = total + experts;
    }
    __syncthreads();
}

/* Position of a choice in the order in which its expert keeps choices. `place`: position in the
 * warp. */
__device__ __forceinline__ int32_t keep_order_of(const Planner &p, const p2p_plan_job &job,
                                                 int tallies, int expert, int k, int32_t place)
{
    const int i = job.by_k ? k * (int)job.layer.num_experts + expert : expert;
    const int32_t nth = p.low[i] + p.tally[threadIdx.x / WARP * tallies + i] + place;
    return job.by_k ? p.base[i] + nth : nth;
}

/* Sets `taken`. keep(expert) returns how many choices an expert keeps. All threads. */
template <class Keep>
static __device__ void count_kept_before(Planner &p, const p2p_plan_job &job, Keep keep)
{
    const int experts = job.layer.num_experts, choices = num_choice_tallies(job);
    for (int i = threadIdx.x; i < p.warps * experts; i += blockDim.x) {
        const int warp = i / experts, e = i % experts;
        const int32_t most = keep(e);
        int32_t taken = 0;
        for (int j = e; j < choices; j += experts) {
            const int32_t before = p.low[j] + p.tally[warp * choices + j];
            taken += max(0, min(before, most - p.base[j]));
        }
        p.taken[i] = taken;
    }
    __syncthreads();
}

#endif
