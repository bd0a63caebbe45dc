/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the replica of each choice before the planner counts choices. The caller's ids are ids
 * of logical experts, each of which has one or more copies (replicas). A *choice* is a token
 * and one of its top_k ids.
 *
 * Only layers with layout FLAT or with EPIC_BY_K need this. For these layers the planner must
 * know the replica while it counts. FLAT also counts the rows on each rank, and the replica
 * decides to which rank a choice goes. EPIC_BY_K counts the choices of each k separately. For
 * other layers, the planner computes the replica after counting (plan/replicas.cuh). One CTA
 * per rank works in three steps:
 *
 *   1. counts this rank's choices of each logical expert
 *   2. sends the counts to all ranks (`logical_counts`, stamped words) and waits for the counts
 *      of all ranks
 *   3. writes the expert (replica) of each choice to the array resolved_experts(), where the
 *      planner reads it instead of the caller's id. If a choice has no expert, writes the fate
 *      EPIC_FATE_NONE or EPIC_FATE_ABSENT
 *
 * Between steps 1 and 3, resolved_experts() contains for each choice the number of choices of
 * the same logical expert that its warp had counted before.
 *
 * Only one CTA per rank does this, because the replica of a choice depends on the order of all
 * choices of the rank. */
#ifndef EPIC_RESOLVE_CUH
#define EPIC_RESOLVE_CUH

#include "cuda/plan/replicas.cuh"

/* Returns the address in `heap` at which `rank` stores its counts of choices. It stores one
 * word per logical expert: how many of the rank's choices go to this expert. */
__device__ __forceinline__ uint64_t *chosen_words(const p2p_self &self, const OpState &op,
                                                  uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + self.at.logical_counts) +
           ((int64_t)epoch_parity(op) * self.num_ranks + rank) * P2P_REPLICATED_EXPERTS;
}

/* Sends `own`, the number of this rank's choices of one logical expert, to all ranks, and waits
 * for the numbers of all ranks. Sets p.before_cta[logical] to the sum over the lower ranks, and
 * p.logical_load[logical] to the sum over all ranks. Called by one thread. Returns false if the
 * group has failed. */
static __device__ bool exchange_chosen(Planner &p, const p2p_self &self, const OpState &op,
                                       int logical, uint32_t own)
{
    uint32_t low = 0, all = 0;
    for (int i = 1; i <= self.num_ranks; i++) {
        const int q = wrap_rank(self.rank + i, self.num_ranks);
        if (is_vacant(op, q)) continue;
        uint64_t *to = chosen_words(self, op, self.heap[q], self.rank) + logical;
        store_relaxed(to, stamp_word(op, own));
        post_put(op, q, to, 8);
    }
    for (int q = 0; q < self.num_ranks; q++) {
        if (is_vacant(op, q)) continue;
        const uint64_t *from = chosen_words(self, op, inbox_base(op, q), q) + logical;
        uint64_t word = 0;
        if (!wait_thread(op, q, P2P_PHASE_COUNTS, [&] {
                word = load_relaxed(from);
                return is_stamped(op, word);
            }))
            return false;
        if (q < self.rank) low += (uint32_t)word;
        all += (uint32_t)word;
    }
    p.before_cta[logical] = (int32_t)low;
    p.logical_load[logical] = (int32_t)all;
    return true;
}

/* Stores `own`, the number of this rank's choices of one logical expert, in the heaps of the
 * ranks of this host, for relay_chosen(). Called by one thread. */
__device__ __forceinline__ void publish_chosen(const p2p_self &self, const OpState &op,
                                               int logical, uint32_t own)
{
    const int first = first_near_rank(self);
    for (int q = first; q < first + ranks_per_host(self); q++)
        store_relaxed(chosen_words(self, op, self.heap[q], self.rank) + logical,
                      stamp_word(op, own));
}

/* Like exchange_chosen() for all logical experts, after publish_chosen(), in groups that use
 * relays for words. Called by all threads of the CTA. Returns false if the group has failed. */
static __device__ __noinline__ bool relay_chosen(Planner &p, const p2p_self &self,
                                                 const OpState &op, int logicals)
{
    const auto has_arrived = [&](uint64_t word) { return is_stamped(op, word); };
    const int64_t offset = chosen_words(self, op, op.heap, 0) - (const uint64_t *)op.heap;
    bool ok = relay_words(op, {offset, P2P_REPLICATED_EXPERTS, logicals}, true, has_arrived);
    for (int l = threadIdx.x; l < logicals && ok; l += blockDim.x) {
        uint32_t low = 0, all = 0;
        for (int q = 0; q < self.num_ranks && ok; q++) {
            const uint64_t *from = chosen_words(self, op, op.heap, q) + l;
            uint64_t word = 0;
            ok = wait_thread(op, word_sender(self, q), P2P_PHASE_COUNTS, [&] {
                word = load_relaxed(from);
                return has_arrived(word);
            });
            if (q < self.rank) low += (uint32_t)word;
            all += (uint32_t)word;
        }
        p.before_cta[l] = (int32_t)low;
        p.logical_load[l] = (int32_t)all;
    }
    return ok;
}

/* Executes the three steps at the top of this file. Called by all threads of the CTA, after
 * read_replicas(). Returns false if the group has failed. */
static __device__ __noinline__ bool resolve_replicas(Planner &p, const p2p_plan_job &job,
                                                     const OpState &op)
{
    const TokenLanes lanes(job.layer.top_k);
    const int logicals = (int)job.layer.num_logical, warp = threadIdx.x / WARP;
    const bool distinct = (job.layer.flags & EPIC_DISTINCT) != 0;
    int32_t *const expert_of = resolved_experts(job), *const tally = p.tally + warp * logicals;
    const auto read = [&](int64_t choice) { return read_id(job, choice); };
    for_each_choice(job, lanes, range_of_warp(p, job), read,
                    [&](int64_t choice, int64_t id, int, int32_t first_id, int) {
                        const int32_t logical = check_id(p, choice, id, logicals);
                        uint32_t same_id;
                        const int32_t warp_position = count_group(tally, logical, same_id);
                        if (distinct && is_repeated_choice(lanes, logical, same_id, first_id))
                            atomicMin(&p.bad_choice, (uint32_t)choice);
                        if (choice >= 0) expert_of[choice] = warp_position;
                        return logical;
                    });
    __syncthreads();
    bool ok = true;
    for (int l = threadIdx.x; l < logicals && ok; l += blockDim.x) {
        uint32_t sum = 0;
        for (int w = 0; w < p.num_warps; w++) {
            const uint32_t count = (uint32_t)p.tally[w * logicals + l];
            p.tally[w * logicals + l] = (int32_t)sum;
            sum += count;
        }
        if (relays_words(job.self))
            publish_chosen(job.self, op, l, sum);
        else
            ok = exchange_chosen(p, job.self, op, l, sum);
    }
    if (relays_words(job.self)) ok = relay_chosen(p, job.self, op, logicals);
    ok = __syncthreads_and(ok) != 0;
    if (!ok) return false;
    for_each_choice(job, lanes, range_of_warp(p, job), read,
                    [&](int64_t choice, int64_t id, int, int32_t, int) {
                        const bool valid = choice >= 0 && id >= 0 && id < logicals;
                        const bool there = valid && num_replicas_of(p, (int)id) > 0;
                        int32_t nth =
                            there ? p.before_cta[id] + tally[id] + expert_of[choice] : 0;
                        if (choice >= 0)
                            expert_of[choice] = there   ? choose_replica(p, (int)id, nth)
                                                : valid ? EPIC_FATE_ABSENT
                                                        : EPIC_FATE_NONE;
                        return -1;
                    });
    __syncthreads();
    for (int i = threadIdx.x; i < p.num_warps * logicals; i += blockDim.x) p.tally[i] = 0;
    __syncthreads();
    return true;
}

#endif
