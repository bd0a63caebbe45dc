/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses replicas while a plan is made. Some experts are copies (replicas) of the same logical
 * expert, and the caller's ids are ids of logical experts. A *choice* is a token and one of its
 * top_k ids. If a logical expert has r replicas, its n-th choice (from 0), in the order of all
 * ranks' tokens, goes to replica n % r.
 *
 * So the ranks count the choices of each logical expert. From n, the planner computes the
 * replica of a choice (n % r), and the index of the choice among the choices of that replica (n
 * / r). From the load (number of choices) of the logical expert, it computes the load of each
 * replica.
 *
 * Tables of the planner, in shared memory:
 *
 *   logical_of      [num_experts]      logical expert of each expert, or NO_LOGICAL
 *   replica_index   [num_experts]      index of the expert among its logical expert's replicas
 *   first_replica   [num_logical + 1]  where a logical expert's replicas begin in `replicas`
 *   replicas        [num_experts]      experts, ordered by logical expert
 *   logical_load    [num_logical]      choices of each logical expert, on all ranks
 *
 * An expert is a replica of no logical expert if its entry in the caller's table is EPIC_ABSENT
 * or if the expert is on a vacant seat (a rank that has left the group). Such an expert gets no
 * choices. A logical expert without a replica is *absent*. With EPIC_DROP_ABSENT, the choices
 * of an absent expert are dropped. Without this flag, an absent expert is an error in the data.
 *
 * With layout FLAT and with EPIC_BY_K, the planner must know the replica of each choice before
 * it counts choices. For these layers, plan/resolve.cuh finds the replicas. */
#ifndef EPIC_REPLICAS_CUH
#define EPIC_REPLICAS_CUH

#include "cuda/plan/counts.cuh"

/* value of logical_of for an expert that is a replica of no logical expert */
#define NO_LOGICAL 0xffffu

/* Returns the size in bytes of the planner's tables for replicas (see the top of this file). In
 * shared memory, these tables follow the arrays that every planner has. */
__host__ __device__ inline int replica_bytes(const epic_layer *layer)
{
    return layer->num_logical ? (int)layer->num_experts * 12 + 16 : 0;
}

__device__ __forceinline__ int num_replicas_of(const Planner &p, int logical)
{
    return p.first_replica[logical + 1] - p.first_replica[logical];
}

/* Sets p.first_replica to the exclusive prefix sums of the numbers of replicas. It reads these
 * numbers from p.logical_load, which contains them until choices are counted. Called by one
 * warp. */
static __device__ void sum_replica_counts(Planner &p, int num_logical)
{
    int before = 0;
    for (int i = 0; i < num_logical; i += WARP) {
        const int l = i + lane_id(), count = l < num_logical ? p.logical_load[l] : 0;
        int upto = count;
        for (int d = 1; d < WARP; d *= 2) {
            const int lower = __shfl_up_sync(ALL_LANES, upto, d);
            if (lane_id() >= d) upto += lower;
        }
        if (l < num_logical) p.first_replica[l] = (uint16_t)(before + upto - count);
        before += __shfl_sync(ALL_LANES, upto, WARP - 1);
    }
    if (lane_id() == 0) p.first_replica[num_logical] = (uint16_t)before;
}

/* Reads and checks the caller's table logical_of_expert, and fills in the planner's tables for
 * replicas (see the top of this file). Until choices are counted, logical_load contains the
 * number of replicas of each logical expert.
 *
 * p.bad_replica becomes the index of the first invalid entry of the caller's table. The planner
 * uses 0 in place of invalid entries. If all entries are valid and EPIC_DROP_ABSENT is not set,
 * p.bad_replica becomes num_experts plus the first absent logical expert. Called by all threads
 * of the CTA, after begin_planner(). */
static __device__ void read_replicas(Planner &p, const p2p_plan_job &job, const OpState &op)
{
    const int experts = job.layer.num_experts, num_logical = job.layer.num_logical;
    const bool drops_absent = (job.layer.flags & EPIC_DROP_ABSENT) != 0;
    if (threadIdx.x == 0) {
        p.logical_load = (int32_t *)p.extra_memory;
        p.logical_of = (uint16_t *)(p.logical_load + experts);
        p.replica_index = p.logical_of + experts;
        p.replicas = p.replica_index + experts;
        p.first_replica = p.replicas + experts;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int logical = job.logical_of_expert[e];
        if (logical < EPIC_ABSENT || logical >= num_logical) {
            logical = 0;
            atomicMin(&p.bad_replica, (uint32_t)e);
        }
        p.logical_of[e] = is_vacant(op, p.owner[e]) ? NO_LOGICAL : (uint16_t)logical;
        p.logical_load[e] = 0;
        atomicAdd(&p.table_hash, ((uint32_t)e * 0x9e3779b1u ^ (uint32_t)logical) * 0x85ebca6bu);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int before = 0;
        for (int f = 0; f < e; f++) before += p.logical_of[f] == p.logical_of[e];
        p.replica_index[e] = (uint16_t)before;
        if (p.logical_of[e] != NO_LOGICAL) atomicAdd(&p.logical_load[p.logical_of[e]], 1);
    }
    __syncthreads();
    if (threadIdx.x < WARP) sum_replica_counts(p, num_logical);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x)
        if (p.logical_of[e] != NO_LOGICAL)
            p.replicas[p.first_replica[p.logical_of[e]] + p.replica_index[e]] = (uint16_t)e;
    for (int l = threadIdx.x; l < num_logical && !drops_absent; l += blockDim.x)
        if (num_replicas_of(p, l) == 0) atomicMin(&p.bad_replica, (uint32_t)(experts + l));
    __syncthreads();
}

/* Returns the hash of logical_of_expert that compare_tables() sends, or 0 if the table is
 * invalid. */
__device__ __forceinline__ uint32_t table_hash_word(const Planner &p)
{
    return p.bad_replica == NO_INDEX ? p.table_hash | 1 : 0;
}

/* Checks that all ranks have the same table logical_of_expert. If not, makes the group fail.
 * CTA 0 sends a hash of the table to all ranks, in words that follow the counts in the heap.
 * Each planner CTA compares the hashes of all ranks with its own hash. Called by one thread of
 * each planner CTA. Returns false if the group has failed. */
static __device__ bool compare_tables(const Planner &p, const p2p_plan_job &job,
                                      const OpState &op)
{
    const p2p_self &self = job.self;
    const uint32_t own = table_hash_word(p);
    const int64_t counts = self.at.counts / 8 +
                           (int64_t)epoch_parity(op) * self.num_ranks * DEVICE_MAX_TALLIES +
                           num_tallies(job, true);
    for (int q = 0; q < self.num_ranks && blockIdx.x == 0; q++) {
        if (is_vacant(op, q) || (relays_words(self) && is_remote(self, q))) continue;
        uint64_t *to = (uint64_t *)self.heap[q] + counts + self.rank * DEVICE_MAX_TALLIES;
        store_relaxed(to, stamp_word(op, own));
        post_put(op, q, to, 8);
    }
    if (relays_words(self) && blockIdx.x == 0 &&
        !relay_words_alone(op, {counts, DEVICE_MAX_TALLIES, 1}))
        return false;
    for (int q = 0; q < self.num_ranks; q++) {
        if (is_vacant(op, q)) continue;
        const uint64_t *from =
            (const uint64_t *)word_base(op, q) + counts + q * DEVICE_MAX_TALLIES;
        uint64_t word = 0;
        if (!wait_thread(op, word_sender(self, q), P2P_PHASE_COUNTS, [&] {
                word = load_relaxed(from);
                return is_stamped(op, word);
            }))
            return false;
        if (own && (uint32_t)word && (uint32_t)word != own) {
            report_table_mismatch(op, q);
            return false;
        }
    }
    return true;
}

/* On entry, p.load contains the number of choices of each logical expert. On return, p.load
 * contains the number of choices of each expert (replica). Called by all threads of the CTA,
 * after exchange_counts(). */
static __device__ void split_among_replicas(Planner &p, const p2p_plan_job &job)
{
    const int experts = job.layer.num_experts, num_logical = job.layer.num_logical;
    for (int l = threadIdx.x; l < num_logical; l += blockDim.x) p.logical_load[l] = p.load[l];
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        const int l = p.logical_of[e], replicas = l == NO_LOGICAL ? 0 : num_replicas_of(p, l);
        p.load[e] =
            replicas ? (p.logical_load[l] + replicas - 1 - p.replica_index[e]) / replicas : 0;
    }
    __syncthreads();
}

/* Returns whether a choice is dropped because its expert is absent. Without EPIC_DROP_ABSENT,
 * an absent expert is an error in the data, and its choices are not dropped. `id`:
 * planned_id() of the choice, which may be invalid. */
template <int FEATURES>
__device__ __forceinline__ bool is_absent_choice(const Planner &p, const p2p_plan_job &job,
                                                 const OpState &op, int64_t id)
{
    if (!(FEATURES & PLAN_DROPS_OR_REPLICAS)) return false;
    if (!job.layer.num_logical)
        return vacant_seats(op) && id >= 0 && id < job.layer.num_experts &&
               is_vacant(op, p.owner[id]);
    if (!(job.layer.flags & EPIC_DROP_ABSENT)) return false;
    if (job.resolves) return id == EPIC_FATE_ABSENT;
    return id >= 0 && id < job.layer.num_logical && num_replicas_of(p, (int)id) == 0;
}

/* Returns the maximum number of choices that an expert may keep according to expert_capacity,
 * or 2^31 - 1 if there is no limit. The replicas of a logical expert share its
 * expert_capacity. */
__device__ __forceinline__ int32_t expert_quota(const Planner &p, const p2p_plan_job &job,
                                                int expert)
{
    const uint32_t limit = job.layer.expert_capacity;
    if (job.layer.overflow != EPIC_OVERFLOW_DROP || limit == 0 || limit > 0x7fffffff)
        return 0x7fffffff;
    if (!job.layer.num_logical || p.logical_of[expert] == NO_LOGICAL) return (int32_t)limit;
    const uint32_t replicas = (uint32_t)num_replicas_of(p, p.logical_of[expert]);
    return (int32_t)((limit + replicas - 1 - p.replica_index[expert]) / replicas);
}

/* Returns the replica that gets a choice of a logical expert. On entry, nth is the index (from
 * 0) of the choice among the choices of the logical expert on all ranks. On return, nth is the
 * index of the choice among the choices of the returned replica. Requires that the logical
 * expert has a replica. */
__device__ __forceinline__ int choose_replica(const Planner &p, int logical, int32_t &nth)
{
    const int replicas = num_replicas_of(p, logical), index = nth % replicas;
    nth /= replicas;
    return p.replicas[p.first_replica[logical] + index];
}

#endif
