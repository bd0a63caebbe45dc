/* SPDX-License-Identifier: Apache-2.0 */
/* Choices that are kept by k: of an expert's, all with k 0 come before those with k 1.
 *
 * So the ranks count the choices of each k num_send_only_ctas, as if there were an expert for each k:
 *
 *   tally        k * num_experts + expert
 *   base         [tallies of choices]   choices of the expert with lower k, over the group
 *   taken        [warps][num_experts]   those that are kept before the warp's next one, in the order
 *                                       of slots, which is that of the tokens
 *
 * A choice's place among those of its k, behind all of lower k, says whether it is kept; its slot
 * follows from those that are kept before it, of which each warp knows the number for every k. */
#ifndef EPIC_KEEP_BY_K_CUH
#define EPIC_KEEP_BY_K_CUH

#include "cuda/plan/replicas.cuh"

/* Of the planner's dynamic shared memory, behind what replicas need. */
static inline int by_k_bytes(const p2p_plan_job *job)
{
    const int warps = planner_warps(num_tallies(*job, job->layer.layout == EPIC_FLAT));
    return job->by_k ? (int)job->layer.num_experts * 4 * (1 + warps) : 0;
}

/* Every thread, when the ranks' counts are there: `load` becomes all choices of each expert. */
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

/* The place of a choice in the order in which its expert keeps them; `place`: in its warp. */
__device__ __forceinline__ int32_t keep_order_of(const Planner &p, const p2p_plan_job &job,
                                                 int tallies, int expert, int k, int32_t place)
{
    const int i = job.by_k ? k * (int)job.layer.num_experts + expert : expert;
    const int32_t nth = p.low[i] + p.tally[threadIdx.x / WARP * tallies + i] + place;
    return job.by_k ? p.base[i] + nth : nth;
}

/* Every thread, when it is known how many choices each expert keeps: keep(expert). */
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
