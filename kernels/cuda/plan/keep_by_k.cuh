/* SPDX-License-Identifier: Apache-2.0 */
/* EPIC_BY_K: an expert that cannot keep all its choices first keeps the choices with k = 0,
 * then the choices with k = 1, and so on. (A *choice* is a token and one of its top_k experts;
 * k is the index of this expert among the top_k experts.) The slots of the kept choices are
 * still in the order of tokens. So each choice has two positions:
 *
 *   keep position   index of the choice among all choices of its expert, in the order (k, rank,
 *                   token). The expert keeps the choices with the lowest keep positions
 *   slot position   index of the choice among the kept choices of its expert, in the order
 *                   (rank, token, k). It decides the slot
 *
 * To find keep positions, the ranks count the choices of each k separately. Tally (counter) k *
 * num_experts + e counts the choices of expert e with this k. The keep position of a choice is
 * lower_k_count plus the position of the choice among the expert's choices with the same k. Two
 * arrays are needed:
 *
 *   lower_k_count   [top_k][num_experts]      choices of the expert with lower k, on all ranks
 *   kept_before     [num_warps][num_experts]  slot position of the next kept choice that the
 *                                             warp handles */
#ifndef EPIC_KEEP_BY_K_CUH
#define EPIC_KEEP_BY_K_CUH

#include "cuda/plan/replicas.cuh"

/* Returns the size in bytes of the shared memory that only EPIC_BY_K needs. This memory
 * contains the load of each expert, summed over k, and kept_before. It follows the tables for
 * replicas. */
static inline int by_k_bytes(const p2p_plan_job *job)
{
    const int warps = planner_warps(num_tallies(*job, job->layer.layout == EPIC_FLAT));
    return job->by_k ? (int)job->layer.num_experts * 4 * (1 + warps) : 0;
}

/* Sets p.load to an array with the load of each expert (its number of choices, summed over k),
 * and sets p.lower_k_count. On entry, p.load has a count for each pair of k and expert.
 * lower_k_count then reuses the memory of these counts. Called by all threads of the CTA, after
 * exchange_counts(). */
static __device__ void prepare_by_k(Planner &p, const p2p_plan_job &job)
{
    const int experts = job.layer.num_experts;
    int32_t *const total = (int32_t *)(p.extra_memory + replica_bytes(&job.layer));
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
        p.lower_k_count = p.load;
        p.load = total;
        p.kept_before = total + experts;
    }
    __syncthreads();
}

/* Returns the keep position of choice k of a token. Without EPIC_BY_K, this is the index of the
 * choice among all choices of its expert, in the order (rank, token, k). `warp_position`:
 * number of choices that the warp had counted in the same tally before. `tallies`: number of
 * tallies per warp. */
__device__ __forceinline__ int32_t keep_position_of(const Planner &p, const p2p_plan_job &job,
                                                    int tallies, int expert, int k,
                                                    int32_t warp_position)
{
    const int i = job.by_k ? k * (int)job.layer.num_experts + expert : expert;
    const int32_t nth =
        p.before_cta[i] + p.tally[threadIdx.x / WARP * tallies + i] + warp_position;
    return job.by_k ? p.lower_k_count[i] + nth : nth;
}

/* Sets p.kept_before. For each warp and expert, it is the number of choices that the expert
 * keeps and that belong to tokens before the warp's first token. Computes this number for each
 * k, and adds the results. keep(expert) returns how many choices the expert keeps in all.
 * Called by all threads of the CTA. */
template <class Keep>
static __device__ void count_kept_before(Planner &p, const p2p_plan_job &job, Keep keep)
{
    const int experts = job.layer.num_experts, choices = num_choice_tallies(job);
    for (int i = threadIdx.x; i < p.num_warps * experts; i += blockDim.x) {
        const int warp = i / experts, e = i % experts;
        const int32_t num_kept = keep(e);
        int32_t sum = 0;
        for (int j = e; j < choices; j += experts) {
            const int32_t before = p.before_cta[j] + p.tally[warp * choices + j];
            sum += max(0, min(before, num_kept - p.lower_k_count[j]));
        }
        p.kept_before[i] = sum;
    }
    __syncthreads();
}

#endif
