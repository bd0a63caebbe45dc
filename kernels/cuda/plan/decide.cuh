/* SPDX-License-Identifier: Apache-2.0 */
/* Decides a plan from the counts of all ranks: which choices are kept, where the slab of each
 * expert begins, and whether the plan is valid. plan/planner.cuh calls the functions of this
 * file after the counts have arrived. A *choice* is a token and one of its top_k experts. A
 * slab is the range of slots of one expert.
 *
 *   decide_plan          computes loads, kept choices and slabs
 *   wait_faults          waits until all ranks with wrong data have sent a description of it
 *   report_...           store the error of an invalid plan for the host
 *   write_plan_outputs   stores the header, the tables and the caller's outputs */
#ifndef EPIC_PLAN_DECIDE_CUH
#define EPIC_PLAN_DECIDE_CUH

#include "cuda/plan/flat_place.cuh"
#include "cuda/plan/resolve.cuh"

/* The expert ids [begin, begin + count). */
struct ExpertRange {
    int begin, count;
};

/* Returns a range of expert ids that contains all experts of `rank`. If the caller passed
 * rank_of_expert, this is the range of all ids. Otherwise it is the rank's block of experts:
 * each rank has job.block consecutive experts. */
__device__ __forceinline__ ExpertRange experts_of_rank(const p2p_plan_job &job, int rank)
{
    return job.rank_of_expert ? ExpertRange{0, (int)job.layer.num_experts}
                              : ExpertRange{rank * job.block, job.block};
}

/* Returns the number of slots in the slab of an expert with `count` choices: `count`, rounded
 * up to a multiple of `alignment`. */
__device__ __forceinline__ uint64_t round_up_rows(int32_t count, uint32_t alignment)
{
    const bool power = (alignment & (alignment - 1)) == 0;
    const uint32_t past =
        power ? (uint32_t)count & (alignment - 1) : (uint32_t)count % alignment;
    return (uint64_t)(uint32_t)count + (past ? alignment - past : 0);
}

/* Upper bound of replica_bytes() + by_k_bytes(), the size in bytes of the dynamic shared memory
 * that only layers with PLAN_DROPS_OR_REPLICAS need. */
#define PLAN_DROPS_OR_REPLICAS_BYTES \
    (P2P_REPLICATED_EXPERTS * 12 + 16 + ((MANY_RANKS ? 44 : 48) << 10))

/* Returns the size in bytes of the dynamic shared memory for make_plan(). */
static inline int planner_bytes_with(const p2p_plan_job &job)
{
    return planner_bytes_of(job) + replica_bytes(&job.layer) + by_k_bytes(&job);
}

/* Returns the number of choices that an expert keeps. If the layer cannot drop choices, this is
 * the number of all choices of the expert. */
template <int FEATURES>
__device__ __forceinline__ int32_t num_kept_of(const Planner &p, const p2p_plan_job &job,
                                               int expert)
{
    return FEATURES & PLAN_DROPS_OR_REPLICAS ? num_kept(p, job, expert) : p.load[expert];
}

/* Returns the number of slots that `rank` needs if each of its experts keeps at most `most`
 * choices. If `capped` is true, each expert also keeps at most expert_capacity choices. Called
 * by one warp. */
template <int FEATURES>
static __device__ int64_t count_slots(Planner &p, const p2p_plan_job &job, int rank,
                                      int32_t most, bool capped)
{
    const ExpertRange range = experts_of_rank(job, rank);
    uint64_t sum = 0;
    for (int i = lane_id(); i < range.count; i += WARP) {
        const int e = range.begin + i;
        if (p.owner[e] != rank) continue;
        int32_t count = p.load[e];
        if (FEATURES & PLAN_DROPS_OR_REPLICAS)
            count = min(count, capped ? min(most, expert_quota(p, job, e)) : most);
        sum += round_up_rows(count, job.layer.alignment);
    }
    /* __reduce_add_sync() adds only 32-bit words. So the 64-bit sums are added in parts of 20
     * bits: the sum of 32 such parts cannot overflow. */
    const uint32_t low_bits = (1u << 20) - 1;
    uint64_t total = __reduce_add_sync(ALL_LANES, (uint32_t)sum & low_bits);
    total += (uint64_t)__reduce_add_sync(ALL_LANES, (uint32_t)(sum >> 20) & low_bits) << 20;
    total += (uint64_t)__reduce_add_sync(ALL_LANES, (uint32_t)(sum >> 40) & low_bits) << 40;
    return (int64_t)total;
}

/* Returns the keep limit of `rank`. This is the largest number L for which `capacity` slots
 * suffice if each expert of the rank keeps at most L choices. Called by one warp. */
static __device__ int32_t find_keep_limit(Planner &p, const p2p_plan_job &job, int rank,
                                          int64_t capacity)
{
    int32_t fits = 0, fails = 0x7fffffff;
    while (fails - fits > 1) {
        const int32_t middle = fits + (fails - fits) / 2;
        if (count_slots<PLAN_DROPS_OR_REPLICAS>(p, job, rank, middle, true) <= capacity)
            fits = middle;
        else
            fails = middle;
    }
    return fits;
}

/* Returns the plan's table `logical`: for each expert, its logical expert. Only plans of layers
 * with replicas (copies of a logical expert) have this table. */
__device__ __forceinline__ int32_t *logical_table(const p2p_plan_job &job)
{
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    return (int32_t *)(job.plan + device_logical(&at, job.layer.layout));
}

/* Returns the plan's table `expert_of`: for each local expert of this rank, its id among all
 * experts. Only plans of layers with replicas have this table. In memory it follows the table
 * `logical`. */
__device__ __forceinline__ int32_t *expert_table(const p2p_plan_job &job)
{
    return logical_table(job) + device_round_up(job.layer.num_experts * 4ll, 128) / 4;
}

/* Writes the numbers of rows and tokens of a local expert to the caller's outputs. */
static __device__ __forceinline__ void write_expert_counts(const p2p_plan_job &job, int local,
                                                           int32_t rows, int32_t tokens)
{
    if (job.expert_rows) job.expert_rows[local] = rows;
    if (job.expert_tokens) job.expert_tokens[local] = tokens;
    if (job.expert_rows_i64) job.expert_rows_i64[local] = rows;
    if (job.expert_tokens_i64) job.expert_tokens_i64[local] = tokens;
}

/* Sets p.slab_start for each expert of `rank`. With layout FLAT, which has no slabs, sets
 * p.local_expert instead. For this rank's own experts, CTA 0 also writes the plan's tables
 * slab_begin and padding, and the caller's counts (write_expert_counts()). Returns the number
 * of slots that the rank needs. Called by one warp. */
template <int FEATURES>
static __device__ int64_t place_slabs(Planner &p, const p2p_plan_job &job, int rank)
{
    constexpr bool FLAT = FEATURES & PLAN_FLAT;
    const ExpertRange range = experts_of_rank(job, rank);
    const int lane = lane_id();
    const bool write = rank == job.self.rank && blockIdx.x == 0;
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    int32_t *slab_begin = (int32_t *)(job.plan + at.slab_begin);
    device_padding *padding = (device_padding *)(job.plan + at.padding);
    int64_t slots = 0;
    int32_t owned = 0;
    for (int i = 0; i < range.count; i += WARP) {
        const int e = range.begin + i + lane;
        const bool mine = i + lane < range.count && p.owner[e] == rank;
        const int32_t count = mine ? num_kept_of<FEATURES>(p, job, e) : 0;
        const int32_t rows = (int32_t)round_up_rows(count, job.layer.alignment);
        int32_t rows_upto = rows;
        for (int d = 1; d < WARP; d *= 2) {
            const int32_t r = __shfl_up_sync(ALL_LANES, rows_upto, d);
            if (lane >= d) rows_upto += r;
        }
        const uint32_t owners = __ballot_sync(ALL_LANES, mine);
        if (mine && FLAT) p.local_expert[e] = owned + __popc(owners & lanes_below());
        if (mine && !FLAT) p.slab_start[e] = (int32_t)slots + rows_upto - rows;
        if (mine && write) {
            const int local = owned + __popc(owners & lanes_below());
            slab_begin[local] = FLAT ? 0 : p.slab_start[e];
            padding[local] = {p.slab_start[e] + count, rows - count};
            write_expert_counts(job, local, rows, count);
            if (FEATURES & PLAN_DROPS_OR_REPLICAS && job.layer.num_logical)
                expert_table(job)[local] = e;
        }
        slots += __shfl_sync(ALL_LANES, rows_upto, WARP - 1);
        owned += __popc(owners);
    }
    const int end = write ? 1 << device_slab_bits(owned) : 0;
    for (int i = owned + lane; i < end; i += WARP) padding[i] = {0, 0};
    if (FLAT) slots = p.needed_rows[rank];
    if (lane == 0) {
        p.header.slots_of[rank] = (int32_t)min(slots, (int64_t)0x7fffffff);
        if (rank == job.self.rank) p.header.owned = owned;
        atomicMax(&p.header.num_local, owned);
    }
    return slots;
}

/* Only with WITH_VACANT_SEATS: sets rank_at and first_expert if the caller passed
 * rank_of_expert and the sum order is EPIC_TREE. The experts form as many equal blocks as there
 * are members. The owner of block i gets position i. Vacant seats get the last positions, where
 * combine adds no partial sum. */
static __device__ __noinline__ void place_members(Planner &p, const p2p_plan_job &job,
                                                  const OpState &op)
{
    device_plan_header &h = p.header;
    const p2p_self &self = job.self;
    const int members = num_members(self, op), block = (int)job.layer.num_experts / members;
    if (job.layer.sum_order != EPIC_TREE || !job.rank_of_expert) return;
    for (int i = 0; i < members; i++) {
        h.rank_at[i] = p.owner[block * i];
        if (p.owner[block * i] == self.rank) h.first_expert = block * i;
    }
    int position = members;
    for (int q = 0; q < self.num_ranks; q++)
        if (is_vacant(op, q)) h.rank_at[position++] = (uint8_t)q;
}

/* Sets the fields of the plan's header that do not depend on the counts. Called by one thread,
 * before the counts have arrived. */
static __device__ void fill_header(Planner &p, const p2p_plan_job &job, const OpState &op)
{
    device_plan_header &h = p.header;
    const p2p_self &self = job.self;
    const epic_layer &layer = job.layer;
    h.magic = DEVICE_PLAN_MAGIC;
    h.id = (plan_group_id(self, op.generation) ^ op.epoch) * 0x9e3779b97f4a7c15ull | 1;
    h.group_id = plan_group_id(self, op.generation);
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, layer.num_experts, layer.top_k);
    const bool flat = layer.layout == EPIC_FLAT;
    h.bytes = device_plan_end(&at, layer.layout, layer.num_logical);
    h.num_logical = layer.num_logical;
    h.max_tokens = self.max_tokens;
    h.rank = self.rank;
    h.num_ranks = self.num_ranks;
    h.num_experts = layer.num_experts;
    h.top_k = layer.top_k;
    h.alignment = layer.alignment;
    h.overflow = layer.overflow;
    h.expert_capacity = layer.expert_capacity;
    h.sum_order = layer.sum_order;
    h.layer_leaves = layer.leaves ? layer.leaves : 1;
    h.leaves = flat ? (uint32_t)num_members(self, op) : h.layer_leaves;
    h.partial_type = layer.partial_type;
    h.layout = layer.layout;
    h.layer_hash = self.layer_hashes[0];
    h.capacity = read_capacity(job);
    h.first_expert = layer.sum_order == EPIC_TREE ? job.block * self.rank : 0;
    for (int q = 0; q < DEVICE_MAX_RANKS; q++)
        h.rank_at[q] = (uint8_t)(q < self.num_ranks ? q : 0);
    /* The low-latency planner, which has no p.owner, also calls this function. But
     * rank_of_expert is NULL in its calls, so it does not read p.owner. */
    if (WITH_VACANT_SEATS)
        place_members(p, job, op);
    else if (layer.sum_order == EPIC_TREE && job.rank_of_expert)
        for (int q = 0; q < self.num_ranks; q++) {
            const int first = job.block * q;
            h.rank_at[q] = p.owner[first];
            if (p.owner[first] == self.rank) h.first_expert = first;
        }
}

/* Returns true if no rank can need more than 2^31 - 1 slots, whatever experts the tokens
 * choose. In this case, place_slabs() can add slots in 32-bit integers without overflow, and
 * decide_plan() need not call count_slots() first. */
__device__ __forceinline__ bool slots_fit_int32(const p2p_plan_job &job)
{
    const int64_t choices = (int64_t)job.self.num_ranks * job.self.max_tokens * job.layer.top_k;
    return choices + (int64_t)job.layer.num_experts * job.layer.alignment <= 0x7fffffff;
}

/* Waits until all ranks have announced their numbers of tokens and their capacities. In CTA 0,
 * also fills in the header. Called by all warps of the CTA, but only the last three work: the
 * last warp waits for the numbers of tokens, the second to last warp waits for the capacities,
 * and the third to last warp fills in the header. Returns false if the group has failed. */
static __device__ bool prepare_header(Planner &p, const p2p_plan_job &job, const OpState &op)
{
    const int after = (int)(blockDim.x / WARP) - 1 - (int)(threadIdx.x / WARP);
    if (after == 2 && blockIdx.x == 0 && lane_id() == 0) fill_header(p, job, op);
    if (after > 1) return true;
    bool ok = true;
    for_each_group(job.self, [&](int first) {
        int32_t announced = 0;
        ok = (!MANY_RANKS || ok) &&
             read_group_announcement(job.self, op, first,
                                     after ? P2P_ANNOUNCED_CAPACITY : P2P_ANNOUNCED_TOKENS,
                                     announced);
        if (ok) (after ? p.capacity : p.header.tokens_of)[first + lane_id()] = announced;
    });
    return ok;
}

/* Decides how many choices each expert keeps, where the slabs are, and the plan's result
 * (header.result). All planner CTAs of all ranks have the same counts, so all of them get the
 * same result. Called by all threads. Returns false if the group has failed. */
template <int FEATURES>
static __device__ bool decide_plan(Planner &p, const p2p_plan_job &job, const OpState &op)
{
    constexpr bool FLAT = FEATURES & PLAN_FLAT,
                   DROPS_OR_REPLICAS = FEATURES & PLAN_DROPS_OR_REPLICAS;
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, ranks = job.self.num_ranks;
    device_plan_header &h = p.header;
    bool ok = true;
    /* wrong data takes precedence over an overflow of slots */
    if (threadIdx.x == 0 && has_any(p.bad_ranks)) h.result = EPIC_EINVAL;
    if (FLAT && DROPS_OR_REPLICAS && layer_drops(job)) {
        for (int d = threadIdx.x; d < ranks; d += blockDim.x) p.demand[d] = p.needed_rows[d];
        __syncthreads();
        ok = ok && find_flat_keep_limits(p, job, op);
        for (int d = warp; d < ranks && ok; d += warps)
            if (!is_vacant(op, d)) place_slabs<FEATURES>(p, job, d);
        return __syncthreads_and(ok) != 0;
    }
    const bool simple = FEATURES == 0 && slots_fit_int32(job);
    for (int d = warp; d < ranks; d += warps) {
        if (is_vacant(op, d)) { /* experts on a vacant seat keep no choices */
            if (lane_id() == 0) p.demand[d] = 0;
            if (lane_id() == 0) p.needed_slots[d] = 0;
            continue;
        }
        const bool caps = DROPS_OR_REPLICAS && layer_drops(job) && job.layer.expert_capacity;
        int64_t demand;
        if (simple)
            demand = place_slabs<FEATURES>(p, job, d);
        else
            demand =
                FLAT ? p.needed_rows[d] : count_slots<FEATURES>(p, job, d, 0x7fffffff, false);
        const int64_t need = caps ? count_slots<FEATURES>(p, job, d, 0x7fffffff, true) : demand;
        const int32_t capacity = p.capacity[d];
        if (lane_id() == 0) {
            p.demand[d] = (int32_t)min(demand, (int64_t)0x7fffffff);
            p.needed_slots[d] = need;
        }
        if (need > (capacity ? capacity : 0x7fffffff)) {
            if (DROPS_OR_REPLICAS && layer_drops(job) && capacity) {
                const int32_t limit = find_keep_limit(p, job, d, capacity);
                if (lane_id() == 0) p.keep_limit[d] = limit;
            } else if (lane_id() == 0) {
                atomicCAS(&h.result, (uint32_t)EPIC_OK, (uint32_t)EPIC_EOVERFLOW);
            }
        }
        __syncwarp();
        if (!simple) place_slabs<FEATURES>(p, job, d);
    }
    __syncthreads();
    return ok;
}

/* Only in backend `hosts`: waits for the fault words of each rank with wrong data. If this rank
 * did not wait, a fault word that arrives late could overwrite a word of a later operation.
 * Called by one thread of CTA 0. Returns false if the group has failed. */
static __device__ __noinline__ bool wait_faults(const Planner &p, const p2p_self &self,
                                                const OpState &op)
{
    for (int q = 0; q < self.num_ranks; q++) {
        const uint64_t *from = fault_words(self, op, inbox_base(op, q), q);
        for (int i = 0; i < P2P_FAULT_WORDS && has_rank(p.bad_ranks, q); i++)
            if (!wait_thread(op, q, P2P_PHASE_COUNTS,
                             [&] { return is_stamped(op, load_relaxed(from + i)); }))
                return false;
    }
    return true;
}

/* Reports wrong data to the host process. The error names the lowest rank that has wrong data,
 * and the first wrong value of this rank. The rank has sent this value to all ranks, so all
 * ranks report the same error. Called by one thread of CTA 0. */
static __device__ __noinline__ void report_fault(const Planner &p, const p2p_plan_job &job,
                                                 const OpState &op)
{
    const int rank = first_rank(p.bad_ranks);
    const uint64_t *from = fault_words(job.self, op, inbox_base(op, rank), rank);
    uint64_t words[P2P_FAULT_WORDS];
    const bool ok = wait_thread(op, rank, P2P_PHASE_COUNTS, [&] {
        bool all = true;
        for (int i = 0; i < P2P_FAULT_WORDS; i++) {
            words[i] = load_relaxed(from + i);
            all &= is_stamped(op, words[i]);
        }
        return all;
    });
    if (!ok || (HOSTS && !wait_faults(p, job.self, op))) return;
    const uint32_t kind = (uint32_t)words[P2P_FAULT_KIND];
    const int64_t index = (uint32_t)words[P2P_FAULT_INDEX], k = job.layer.top_k;
    const int64_t value =
        (int64_t)(words[P2P_FAULT_HIGH] << 32 | (uint32_t)words[P2P_FAULT_LOW]);
    p2p_notice notice = {EPIC_EINVAL, op.epoch, kind, rank, {index, value, 0, 0}};
    if (kind == P2P_FAULT_REPLICA) notice.about[2] = num_ids(job);
    if (kind == P2P_FAULT_EXPERT || kind == P2P_FAULT_DUPLICATE || kind == P2P_FAULT_LOGICAL)
        notice = {
            EPIC_EINVAL, op.epoch, kind, rank, {index / k, index % k, value, num_ids(job)}};
    report_data_error(job.self, notice);
}

/* Reports an overflow to the host process. The error names the lowest rank whose capacity is
 * less than the number of slots that it needs. Called by one thread of CTA 0. */
static __device__ __noinline__ void report_overflow(const Planner &p, const p2p_plan_job &job,
                                                    const OpState &op)
{
    for (int q = 0; q < job.self.num_ranks; q++) {
        const int32_t capacity = p.capacity[q] ? p.capacity[q] : 0x7fffffff;
        if (p.needed_slots[q] <= capacity) continue;
        report_data_error(job.self, {EPIC_EOVERFLOW,
                                     op.epoch,
                                     P2P_FAULT_CAPACITY,
                                     q,
                                     {capacity, p.needed_slots[q], 0, 0}});
        return;
    }
}

/* Writes the plan's header, its table `logical` (logical_table()), and the caller's outputs
 * (demand, load, expert_rows, ...). Called by `threads` threads, each with its own index
 * `thread`. */
static __device__ void write_plan_outputs(const Planner &p, const p2p_plan_job &job, int thread,
                                          int threads)
{
    const device_plan_header &h = p.header;
    if (thread < WARP) {
        uint32_t words[HEADER_LANE_WORDS];
#pragma unroll
        for (int n = 0; n < HEADER_LANE_WORDS; n++)
            words[n] = n * WARP + lane_id() < (int)(sizeof h / 4)
                           ? ((const uint32_t *)&h)[n * WARP + lane_id()]
                           : 0;
        const uint32_t sum = header_checksum(words);
#pragma unroll
        for (int n = 0; n < HEADER_LANE_WORDS; n++) {
            const int i = n * WARP + lane_id();
            if (i == (int)offsetof(device_plan_header, sum) / 4) words[n] = sum;
            if (i < (int)(sizeof h / 4)) ((uint32_t *)job.plan)[i] = words[n];
        }
    }
    if (thread == 0 && job.demand) *job.demand = p.demand[job.self.rank];
    for (int e = thread; e < (int)job.layer.num_experts && job.load; e += threads)
        job.load[e] = p.load[e];
    for (int l = thread; l < (int)job.layer.num_logical && job.logical_load; l += threads)
        job.logical_load[l] = p.logical_load[l];
    for (int e = thread; e < (int)job.layer.num_experts && job.layer.num_logical; e += threads)
        logical_table(job)[e] = p.logical_of[e] == NO_LOGICAL ? EPIC_ABSENT : p.logical_of[e];
    for (int l = thread; l < h.num_local; l += threads) {
        const bool none = h.result != EPIC_OK || l >= h.owned;
        if (none) write_expert_counts(job, l, 0, 0);
    }
}

#endif
