/* SPDX-License-Identifier: Apache-2.0 */
/* Counts choices: the first part of making a plan. plan/planner.cuh has the second part. A
 * *choice* is a token and one of its top_k experts.
 *
 * The slot of a choice depends on its position among all choices of the same expert, in the
 * order rank, token, k. A position is the sum of four counts of earlier choices of that expert:
 *
 *   on lower ranks + in lower CTAs of this rank + in lower warps + earlier ones in this warp
 *
 * So no position depends on which rank, CTA or warp runs first. The last of the four counts is
 * called warp_position.
 *
 * With layout FLAT, a token has one row on each rank that owns one of its experts, and the
 * planner counts these rows, too. Then each choice also has a count called warp_row. Let q be
 * the rank that owns the choice's expert: warp_row is the number of rows on rank q that the
 * warp had counted before this choice. If an earlier choice of the same token goes to the same
 * rank, warp_row is -1.
 *
 * The counts of a choice are temporarily stored in the plan's arrays `fate` and `rank_of`.
 * Later, when the slot of the choice is known, its fate and rank replace the counts:
 *
 *   layer                     fate[choice]     rank_of[choice]
 *   EXPERT_MAJOR              warp_position    not used yet
 *   FLAT, drops no choices    warp_row         not used yet
 *   FLAT, drops choices       warp_position    warp_row (count_kept_rows() sets it)
 *
 * A tally is a counter of a warp: it counts the choices of one expert or, with FLAT, the rows
 * of one rank. plan/planner_state.cuh explains which tally has which index. The planner CTAs
 * are the CTAs that make the plan.
 *
 *   writer          stores                                       reader that waits
 *   each warp       its tallies, in shared memory                its CTA, at a barrier
 *   planner CTA     `tallies`: tallies of the CTA, in this       all planner CTAs of this
 *                   rank's heap                                  rank
 *   planner CTA 0   `counts`: counts of the rank, in every       all planner CTAs of all
 *                   rank's heap                                  ranks
 *
 * `tallies` and `counts` consist of stamped words. A stamped word contains the epoch (the
 * number of the operation), and is valid only in this epoch. So each word is its own flag, and
 * no fence is needed. */
#ifndef EPIC_COUNTS_CUH
#define EPIC_COUNTS_CUH

#include "cuda/plan/planner_state.cuh"

/* Counts one choice per lane: adds 1 to tally[expert]. `tally`: this warp's counters. `expert`:
 * the expert of this lane's choice, or -1 if the lane has no choice. Returns warp_position: the
 * number of choices of the same expert that the warp had counted before, in lower lanes or in
 * earlier calls. same_id becomes the bit mask of the lanes with the same expert. All lanes must
 * call it. */
__device__ __forceinline__ int32_t count_group(int32_t *tally, int32_t expert,
                                               uint32_t &same_id)
{
    same_id = __match_any_sync(ALL_LANES, expert);
    const int before = __popc(same_id & lanes_below());
    const int32_t base = expert >= 0 ? tally[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) tally[expert] = base + __popc(same_id);
    __syncwarp();
    return base + before;
}

__device__ __forceinline__ int32_t count_group(int32_t *tally, int32_t expert)
{
    uint32_t same_id;
    return count_group(tally, expert, same_id);
}

/* Layout FLAT: counts the rows that the tokens of this warp's lanes need on each rank. A token
 * needs one row on each rank that owns one of its experts. `owner`: the rank that owns the
 * expert of this lane's choice; -1: the lane has no choice. If this lane's choice is the first
 * choice of its token that goes to rank `owner`, returns warp_row (see the top of this file),
 * otherwise -1. `tally`: this warp's counters of rows, one per rank. A token with more than 32
 * choices needs two calls: `chunk` is 0 in the first call (choices 0 to 31) and 1 in the
 * second. In `seen`, the first call passes the ranks of the token's choices to the second
 * call. */
__device__ __forceinline__ int32_t count_rows(int32_t *tally, const TokenLanes &lanes,
                                              int32_t owner, int chunk, RankMask &seen)
{
    const uint32_t same_owner = __match_any_sync(ALL_LANES, owner) & lanes.token_lanes;
    if (chunk == 0) seen = no_ranks();
    const bool counts = owner >= 0 && !(same_owner & lanes_below()) && !has_rank(seen, owner);
    const int32_t warp_row = count_group(tally, counts ? owner : -1);
    if (lanes.num_chunks == 2) add_ranks_of(seen, ranks_of_lanes(owner));
    return counts ? warp_row : -1;
}

/* Returns true if an earlier choice of the same token has the same id as this lane's choice.
 * `id`: the id of this lane's choice; -1: the lane has none. `same_id`: bit mask of the lanes
 * that pass the same id in this call. A token with more than 32 choices needs two calls.
 * `first_id`: in the second call, the id that this lane passed in the first call; in all other
 * calls -1. All lanes must call it. */
__device__ __forceinline__ bool is_repeated_choice(const TokenLanes &lanes, int32_t id,
                                                   uint32_t same_id, int32_t first_id)
{
    bool found = (same_id & lanes.token_lanes & lanes_below()) != 0;
#pragma unroll 1
    for (int lane = 0; lanes.num_chunks == 2 && lane < WARP; lane++)
        found |= __shfl_sync(ALL_LANES, first_id, lane) == id;
    return id >= 0 && found;
}

/* A warp handles its tokens in groups of 32 / top_k tokens (TokenLanes). If a warp has at most
 * this many groups, each lane keeps its choices in registers. So the lane need not load its
 * choices again to compute their slots. */
#define COUNTED_BATCHES 4

/* The choices that this lane has counted. Element i is the lane's choice in the warp's i-th
 * group of tokens. Used only if choices_fit_registers() is true. */
struct CountedChoices {
    int32_t id[COUNTED_BATCHES], warp_position[COUNTED_BATCHES];
};

__device__ __forceinline__ bool choices_fit_registers(const TokenRange &range,
                                                      const TokenLanes &lanes)
{
    return lanes.num_chunks == 1 &&
           range.end - range.begin <= COUNTED_BATCHES * lanes.tokens_at_once;
}

/* Calls use() for all choices of this warp's tokens in order. In each call, each lane has one
 * choice.
 *
 *   read(choice)  returns the expert id of a choice of this rank
 *   use(choice, id, k, first_id, i)  handles one choice per lane; called by all lanes
 *     choice      index of this lane's choice (token * top_k + k); -1: the lane has none
 *     id          expert id of the choice, or -1 if the lane has no choice
 *     k           position of the choice among the top_k choices of its token
 *     first_id    A token with more than 32 choices takes two calls of use(): the first for
 *                 choices 0 to 31, the second for the other choices. In the second call,
 *                 first_id is the value that use() returned in the first call. In all other
 *                 calls it is -1
 *     i           0 to 3: the ids for four calls of use() are loaded together, so that the
 *                 loads overlap; i is the position of this call among these four calls */
template <class Read, class Use>
__device__ __forceinline__ void for_each_choice(const p2p_plan_job &job,
                                                const TokenLanes &lanes,
                                                const TokenRange &range, Read read, Use use)
{
    const int top_k = job.layer.top_k, chunk = lanes.num_chunks - 1;
    auto k_of = [&](int group) { return lanes.k + (group & chunk) * WARP; };
    auto choice_of_lane = [&](int group) -> int64_t {
        const int token = range.begin + (group >> chunk) * lanes.tokens_at_once + lanes.token;
        const int k = k_of(group);
        const bool in = lanes.has_choice && token < range.end && k < top_k;
        return in ? (int64_t)token * top_k + k : -1;
    };
    for (int g = 0; range.begin + (g >> chunk) * lanes.tokens_at_once < range.end; g += 4) {
        int64_t choice[4], id[4];
        int32_t first_id = -1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            choice[i] = choice_of_lane(g + i);
            id[i] = choice[i] >= 0 ? read(choice[i]) : -1;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t used = use(choice[i], id[i], k_of(g + i), first_id, i);
            first_id = lanes.num_chunks == 2 && i % 2 == 0 ? used : -1;
        }
    }
}

/* Checks the id of a choice. The ids 0 to `ids` - 1 are valid. Returns `id` if it is valid,
 * otherwise -1. A negative id means that the choice has no expert. If the id is too large, the
 * choice is wrong: p.bad_choice becomes `choice` if this is lower than the old value. */
__device__ __forceinline__ int32_t check_id(Planner &p, int64_t choice, int64_t id, int ids)
{
    if (id >= ids) atomicMin(&p.bad_choice, (uint32_t)choice);
    return id < 0 || id >= ids ? -1 : (int32_t)id;
}

/* Returns the array in which resolve_replicas() stores the expert (replica) of each of this
 * rank's choices. The array temporarily uses the part of the plan that later contains the
 * records of this rank's own tokens. */
__device__ __forceinline__ int32_t *resolved_experts(const p2p_plan_job &job)
{
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    return (int32_t *)(job.plan + at.records) +
           record_index(job.self, job.self.rank, 0, (int)job.layer.top_k);
}

/* Returns the id by which the planner counts a choice, or a negative value if the choice has no
 * expert. If job.resolves is set, resolve_replicas() has already chosen a replica (a copy of a
 * logical expert), and planned_id() returns the id of this replica. Otherwise it returns the id
 * in the caller's array. If the layer has replicas, the caller's ids are ids of logical
 * experts. */
template <int FEATURES>
__device__ __forceinline__ int64_t planned_id(const p2p_plan_job &job, int64_t choice)
{
    if (FEATURES & PLAN_DROPS_OR_REPLICAS && job.resolves) return resolved_experts(job)[choice];
    return read_id(job, choice);
}

/* Returns the number of different values that planned_id() can have for valid choices. */
template <int FEATURES> __device__ __forceinline__ int num_planned_ids(const p2p_plan_job &job)
{
    return (int)(FEATURES & PLAN_DROPS_OR_REPLICAS && !job.resolves ? (uint32_t)num_ids(job)
                                                                    : job.layer.num_experts);
}

/* Counts the choices of this warp's tokens, and checks their ids. Stores the warp_position or
 * warp_row of each choice in `counts`, which is the plan's array `fate` (table at the top of
 * this file). But if FEATURES is 0 and choices_fit_registers() is true, stores these values
 * only in `counted`, in registers. */
template <int FEATURES>
static __device__ void count_choices(Planner &p, const p2p_plan_job &job,
                                     const TokenLanes &lanes, const TokenRange &range,
                                     int32_t *counts, CountedChoices &counted)
{
    constexpr bool FLAT = FEATURES & PLAN_FLAT,
                   DROPS_OR_REPLICAS = FEATURES & PLAN_DROPS_OR_REPLICAS;
    const int experts = job.layer.num_experts, ids = num_planned_ids<FEATURES>(job);
    int32_t *tally = p.tally + threadIdx.x / WARP * tallies_of<FEATURES>(job);
    const bool by_k = DROPS_OR_REPLICAS && job.by_k;
    const bool distinct =
        (job.layer.flags & EPIC_DISTINCT) != 0 && !(DROPS_OR_REPLICAS && job.resolves);
    const bool in_registers = FEATURES == 0 && choices_fit_registers(range, lanes);
    RankMask seen = no_ranks();
    const auto read = [&](int64_t choice) { return planned_id<FEATURES>(job, choice); };
    for_each_choice(job, lanes, range, read,
                    [&](int64_t choice, int64_t id, int k, int32_t first_id, int i) {
                        const int32_t expert = check_id(p, choice, id, ids);
                        uint32_t same_id;
                        int32_t count = count_group(
                            tally, by_k && expert >= 0 ? k * experts + expert : expert,
                            same_id);
                        if (distinct) {
                            if (by_k) same_id = __match_any_sync(ALL_LANES, expert);
                            if (is_repeated_choice(lanes, expert, same_id, first_id))
                                atomicMin(&p.bad_choice, (uint32_t)choice);
                        }
                        if (FLAT) {
                            const int32_t warp_row =
                                count_rows(tally + choice_tallies<FEATURES>(job), lanes,
                                           expert < 0 ? -1 : p.owner[expert], k >= WARP, seen);
                            if (!DROPS_OR_REPLICAS || job.layer.overflow == EPIC_OVERFLOW_ERROR)
                                count = warp_row;
                        }
                        counted.id[i] = expert;
                        counted.warp_position[i] = count;
                        if (choice >= 0 && !in_registers) counts[choice] = count;
                        return expert;
                    });
}

/* Macros for the words of the array `counts`, which a rank sends to all ranks, one word per
 * tally. Bits 0 to COUNT_BITS - 1: the tally, summed over all warps of the sender. Higher bits:
 * the rank that owns the tally's expert according to the sender's rank_of_expert. The receiver
 * compares this rank with its own table. RECORD_LAST in the word of tally 0 means that the
 * sender's data is wrong. RECORD_LAST in all words means that the sender's rank_of_expert is
 * invalid. */
#define COUNT_BITS P2P_COUNT_BITS
#define COUNT_OF(word) ((uint32_t)(word) & ((1u << COUNT_BITS) - 1))
#define OWNER_OF(word) ((uint32_t)(word) >> COUNT_BITS & (DEVICE_MAX_RANKS - 1))

/* Returns the higher bits of the word for tally i, without the count. They are the tally's
 * owner (a rank) or, if this rank's rank_of_expert is invalid, RECORD_LAST. */
__device__ __forceinline__ uint32_t owner_word(const Planner &p, int i)
{
    return p.bad_owner == NO_INDEX ? (uint32_t)p.owner[i] << COUNT_BITS : RECORD_LAST;
}

/* Makes the group fail with EPIC_EMISMATCH, because the table rank_of_expert or
 * logical_of_expert of rank q differs from this rank's table. */
static __device__ __noinline__ void report_table_mismatch(const OpState &op, int q)
{
    const p2p_self &self = *op.self;
    report_failure(op,
                   P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, P2P_PHASE_TABLE,
                              pack_ranks(rank_bit(q))),
                   op.signature);
}

/* For each tally, adds the counts of the warps of this CTA, and publishes the sum to the other
 * planner CTAs of this rank. In p.tally, replaces each warp's tally by the sum over all lower
 * warps (the exclusive prefix sum). Called by all threads of the CTA. */
template <int FEATURES>
static __device__ void publish_tallies(Planner &p, const p2p_plan_job &job, const OpState &op)
{
    const int experts = tallies_of<FEATURES>(job);
    uint64_t *tallies = (uint64_t *)(op.heap + job.self.at.tallies);
    const bool bad = p.bad_choice != NO_INDEX || p.bad_owner != NO_INDEX ||
                     (FEATURES & PLAN_DROPS_OR_REPLICAS && p.bad_replica != NO_INDEX);
    if (threadIdx.x == 0)
        store_relaxed((uint64_t *)(op.heap + job.self.at.first_faults) + blockIdx.x,
                      stamp_word(op, p.bad_choice));
    const int warps = p.num_warps;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        /* do all loads first, so that they overlap */
        int32_t counts[PLAN_MOST_WARPS], sum = 0;
#pragma unroll
        for (int w = 0; w < PLAN_MOST_WARPS; w++)
            counts[w] = w < warps ? p.tally[w * experts + e] : 0;
#pragma unroll
        for (int w = 0; w < PLAN_MOST_WARPS; w++) {
            if (w < warps) p.tally[w * experts + e] = sum;
            sum += counts[w];
        }
        const uint32_t mark = e == 0 && bad ? RECORD_LAST : 0;
        store_relaxed(tallies + blockIdx.x * DEVICE_MAX_TALLIES + e,
                      stamp_word(op, (uint32_t)sum | mark));
    }
}

/* Returns the address in `heap` of the fault words that `rank` sends. These words describe the
 * first wrong value in the arrays that the caller passed on that rank. */
__device__ __forceinline__ uint64_t *fault_words(const p2p_self &self, const OpState &op,
                                                 uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + self.at.faults) +
           (epoch_parity(op) * DEVICE_MAX_RANKS + rank) * P2P_FAULT_WORDS;
}

/* Returns the rank that owns an expert, according to the caller's table. Without a table, each
 * rank owns job.block consecutive experts. */
__device__ __forceinline__ int32_t read_owner(const p2p_plan_job &job, uint32_t expert)
{
    return job.rank_of_expert ? job.rank_of_expert[expert] : (int32_t)expert / job.block;
}

/* Returns the wrong value at `index` of an array of the caller. `kind` (a p2p_fault) selects
 * the array: P2P_FAULT_PLACEMENT selects rank_of_expert, P2P_FAULT_REPLICA logical_of_expert,
 * and P2P_FAULT_EXPERT topk_idx. On return, `kind` is the exact fault, for example
 * P2P_FAULT_DUPLICATE. If the fault is that a logical expert has no replica, `index` becomes
 * the id of this logical expert. If the fault is P2P_FAULT_MEMBERS, `index` becomes the number
 * of leaves, and the function returns the number of members. Called by one thread. */
__device__ __forceinline__ int64_t read_wrong_value(const p2p_plan_job &job, const OpState &op,
                                                    uint32_t &kind, uint32_t &index)
{
    const uint32_t experts = job.layer.num_experts;
    if (kind == P2P_FAULT_PLACEMENT) {
        const int32_t owner = read_owner(job, index);
        const bool is_rank = owner >= 0 && owner < job.self.num_ranks;
        const bool is_tree = job.layer.sum_order == EPIC_TREE;
        if (WITH_VACANT_SEATS && is_rank && is_tree && !has_leaves_of_members(job, op)) {
            kind = P2P_FAULT_MEMBERS;
            index = job.layer.leaves;
            return num_members(job.self, op);
        }
        if (is_rank && !is_tree && is_vacant(op, owner)) kind = P2P_FAULT_VACANT;
        return owner;
    }
    if (kind == P2P_FAULT_REPLICA && index < experts) return job.logical_of_expert[index];
    if (kind == P2P_FAULT_REPLICA) {
        kind = P2P_FAULT_NO_REPLICA;
        index -= experts;
        return 0;
    }
    const int64_t id = read_id(job, index);
    if (id < num_ids(job)) kind = P2P_FAULT_DUPLICATE;
    if (kind == P2P_FAULT_EXPERT && job.layer.num_logical) kind = P2P_FAULT_LOGICAL;
    return id;
}

/* Sends a description of a wrong value in this rank's data to all ranks, so that every rank
 * reports the same error. The description has three parts: `kind` (kind of the fault), `index`
 * of the value, and the value. Called by one thread. */
static __device__ __noinline__ void
publish_wrong_value(const p2p_plan_job &job, const OpState &op, uint32_t kind, uint32_t index)
{
    const p2p_self &self = job.self;
    const int64_t value = read_wrong_value(job, op, kind, index);
    for (int q = 0; q < self.num_ranks; q++) {
        if (is_vacant(op, q)) continue;
        uint64_t *to = fault_words(self, op, self.heap[q], self.rank);
        store_relaxed(to + P2P_FAULT_KIND, stamp_word(op, kind));
        store_relaxed(to + P2P_FAULT_INDEX, stamp_word(op, index));
        store_relaxed(to + P2P_FAULT_LOW, stamp_word(op, (uint32_t)value));
        store_relaxed(to + P2P_FAULT_HIGH, stamp_word(op, (uint32_t)((uint64_t)value >> 32)));
        post_put(op, q, to, P2P_FAULT_WORDS * 8);
    }
}

/* Finds the first wrong value in this rank's data, and sends it to all ranks. If a table
 * (rank_of_expert or logical_of_expert) is invalid, the first wrong value is an entry of this
 * table. Otherwise it is the lowest wrong choice that any planner CTA has found. Called by one
 * thread of CTA 0. Returns false if the group has failed. */
static __device__ __noinline__ bool publish_fault(const Planner &p, const p2p_plan_job &job,
                                                  const OpState &op)
{
    const uint64_t *first = (const uint64_t *)(op.heap + job.self.at.first_faults);
    const bool owners_valid = p.bad_owner == NO_INDEX;
    const bool tables_valid = owners_valid && p.bad_replica == NO_INDEX;
    uint32_t index = owners_valid ? p.bad_replica : p.bad_owner;
    for (int c = 0; c < job.planners && tables_valid; c++) {
        uint64_t word = 0;
        if (!wait_thread(op, -1, P2P_PHASE_GRID, [&] {
                word = load_relaxed(first + c);
                return is_stamped(op, word);
            }))
            return false;
        index = min(index, (uint32_t)word);
    }
    publish_wrong_value(job, op,
                        tables_valid   ? P2P_FAULT_EXPERT
                        : owners_valid ? P2P_FAULT_REPLICA
                                       : P2P_FAULT_PLACEMENT,
                        index);
    return true;
}

/* Only in backend `hosts`: ranks on other hosts send their counts to the net inbox, and CTA 0
 * copies these counts to the heap. The other CTAs wait for the counts in the heap, because
 * polls of the net inbox may be slow. `counts`: address of the count of rank 0 in the heap.
 * `words`: the counts of the ranks from `first` on, which this thread has read. */
__device__ __forceinline__ void cache_counts(const OpState &op, uint64_t *counts, int first,
                                             const uint64_t (&words)[RANKS_AT_ONCE])
{
#pragma unroll
    for (int i = 0; i < RANKS_AT_ONCE; i++)
        if (blockIdx.x == 0 && first + i < op.self->num_ranks && !relays_words(*op.self) &&
            is_remote(*op.self, first + i))
            store_relaxed(counts + (first + i) * DEVICE_MAX_TALLIES, words[i]);
}

/* Waits until all planner CTAs of this rank have published tally e. words[c] becomes the word
 * of planner CTA c, or a word with count 0 if there is no planner CTA c. Returns false if the
 * group has failed. */
__device__ __forceinline__ bool wait_planner_counts(const p2p_plan_job &job, const OpState &op,
                                                    int e, uint64_t (&words)[P2P_MAX_PLANNERS])
{
    const uint64_t *tallies = (const uint64_t *)(op.heap + job.self.at.tallies);
    return wait_thread(op, -1, P2P_PHASE_GRID, [&] {
        bool all = true;
#pragma unroll
        for (int c = 0; c < P2P_MAX_PLANNERS; c++)
            words[c] = c < job.planners ? load_relaxed(tallies + c * DEVICE_MAX_TALLIES + e)
                                        : stamp_word(op, 0);
#pragma unroll
        for (int c = 0; c < P2P_MAX_PLANNERS; c++) all &= is_stamped(op, words[c]);
        return all;
    });
}

/* Executes steps 1 and 2 of exchange_counts() (below) for tally e: adds the tallies of all
 * planner CTAs of this rank, and sets p.before_cta[e] to the sum over the lower CTAs. CTA 0
 * also stores the total in the heap or outbox of every rank or, with relays for words, of every
 * rank of this host. `counts`: offset of the array `counts` in a heap, in
 * 8-byte words. Returns false if the group has failed. */
__device__ __forceinline__ bool publish_count(Planner &p, const p2p_plan_job &job,
                                              const OpState &op, int64_t counts, int e)
{
    const p2p_self &self = job.self;
    uint64_t words[P2P_MAX_PLANNERS];
    bool ok = wait_planner_counts(job, op, e, words);
    uint32_t low = 0, sum = 0, bad = 0;
#pragma unroll
    for (int c = 0; c < P2P_MAX_PLANNERS; c++) {
        const uint32_t count = (uint32_t)words[c] & ~RECORD_LAST;
        bad |= (uint32_t)words[c] & RECORD_LAST;
        if (c < (int)blockIdx.x) low += count;
        sum += count;
    }
    if (blockIdx.x == 0 && ok && bad) ok = publish_fault(p, job, op);
    if (blockIdx.x == 0 && ok)
        for (int i = 1; i <= self.num_ranks; i++) {
            const int q = wrap_rank(self.rank + i, self.num_ranks);
            if (is_vacant(op, q) || (relays_words(self) && is_remote(self, q))) continue;
            store_relaxed((uint64_t *)self.heap[q] + counts + self.rank * DEVICE_MAX_TALLIES +
                              e,
                          stamp_word(op, sum | owner_word(p, e) | bad));
        }
    p.before_cta[e] = (int32_t)low;
    return ok;
}

/* Only in backend `hosts`: CTA 0 posts the puts (copies over the net) that send this rank's
 * counts to other hosts. Before that, the CTA executes a barrier, so that all its threads have
 * stored their counts. `counts`: as in publish_count(). `tallies`: number of tallies. `ok`:
 * false if this thread has found a failure. Called by all threads. Returns false if a thread of
 * CTA 0 has found that the group has failed. */
__device__ __forceinline__ bool post_put_counts(const p2p_self &self, const OpState &op,
                                                int64_t counts, int tallies, bool ok)
{
    if (!HOSTS || blockIdx.x != 0) return ok;
    ok = __syncthreads_and(ok) != 0;
    if (ok && (int)threadIdx.x < self.num_ranks)
        post_put_words(op, threadIdx.x,
                       (uint64_t *)self.heap[threadIdx.x] + counts +
                           self.rank * DEVICE_MAX_TALLIES,
                       tallies);
    return ok;
}

/* Waits until RANKS_AT_ONCE ranks, from rank `first` on, have sent their count of one tally.
 * `from`: address of the count of rank 0 in this rank's heap. words[i] becomes the word of rank
 * first + i, or a word with count 0 if there is no rank first + i. Returns false if the group
 * has failed. */
__device__ __forceinline__ bool wait_rank_counts(const OpState &op, const uint64_t *from,
                                                 int first, uint64_t (&words)[RANKS_AT_ONCE])
{
    const int ranks = op.self->num_ranks;
    /* a rank whose count has not arrived, or -1; named in the error if the wait fails */
    int missing = -1;
    return wait_thread(op, missing, P2P_PHASE_COUNTS, [&] {
        missing = -1;
#pragma unroll
        for (int i = 0; i < RANKS_AT_ONCE; i++)
            words[i] = first + i < ranks && !is_vacant(op, first + i)
                           ? load_relaxed(from + (first + i) * DEVICE_MAX_TALLIES +
                                          inbox_word_offset(op, first + i))
                           : stamp_word(op, 0);
#pragma unroll
        for (int i = 0; i < RANKS_AT_ONCE; i++)
            if (!is_stamped(op, words[i])) missing = word_sender(*op.self, first + i);
        return missing < 0;
    });
}

/* Executes step 3 of exchange_counts() (below) for tally e: sets p.load[e] to the sum of the
 * counts of all ranks, and adds the counts of lower ranks to p.before_cta[e]. `counts`: as in
 * publish_count(). Returns false if the group has failed. */
__device__ __forceinline__ bool add_rank_counts(Planner &p, const p2p_self &self,
                                                const OpState &op, int64_t counts, int e)
{
    const uint64_t *from = (const uint64_t *)op.heap + counts + e;
    /* load: sum of the counts of all ranks. low: sum of the counts of lower ranks. */
    uint32_t load = 0, low = 0;
    /* bad: ranks whose own data is wrong. others: ranks whose rank_of_expert differs from this
     * rank's table. */
    RankMask bad = no_ranks(), others = no_ranks();
    bool ok = true;
#pragma unroll 1
    for (int first = 0; first < self.num_ranks && ok; first += RANKS_AT_ONCE) {
        uint64_t words[RANKS_AT_ONCE];
        ok = wait_rank_counts(op, from, first, words);
        cache_counts(op, (uint64_t *)from, first, words);
#pragma unroll
        for (int i = 0; i < RANKS_AT_ONCE; i++) {
            const int q = first + i;
            const uint32_t count = COUNT_OF(words[i]), owner = OWNER_OF(words[i]);
            const bool wrong = ((uint32_t)words[i] & RECORD_LAST) != 0;
            if (wrong) add_rank(bad, q);
            if (is_member(self, op, q) && owner != p.owner[e] && !wrong) add_rank(others, q);
            if (q < self.rank) low += count;
            load += count;
        }
    }
    if (ok && has_any(others) && p.bad_owner == NO_INDEX) {
        report_table_mismatch(op, first_rank(others));
        ok = false;
    }
    if (has_any(bad) && e == 0) p.bad_ranks = bad;
    p.load[e] = (int32_t)load;
    p.before_cta[e] += (int32_t)low;
    return ok;
}

/* Exchanges the tallies (counters of choices and rows) with all ranks. Called by all threads of
 * the planner CTAs. A thread handles one tally at a time:
 *
 *   1. waits for the tallies of all planner CTAs of this rank and adds them
 *   2. in CTA 0: stores the sum in the heap of every rank. In the backend `hosts` there follow
 *      the puts to other hosts or, with relays for words, the work of a relay
 *   3. waits for the sums of all ranks, checks that the tally has the same owner on all ranks,
 *      and sets p.before_cta and p.load
 *
 * Returns false if the group has failed. The function is not inlined, because it uses many
 * registers: if it were inlined into a kernel that also moves rows, the loop that moves rows
 * would spill registers to memory. */
template <int FEATURES>
static __device__ __noinline__ bool exchange_counts(Planner &p, const p2p_plan_job &job,
                                                    const OpState &op)
{
    const p2p_self &self = job.self;
    const int tallies = tallies_of<FEATURES>(job);
    const int64_t counts =
        self.at.counts / 8 + (int64_t)epoch_parity(op) * self.num_ranks * DEVICE_MAX_TALLIES;
    bool ok = true;
    for (int i = threadIdx.x; i < tallies && ok; i += blockDim.x)
        ok = publish_count(p, job, op, counts, i);
    if (!relays_words(self))
        ok = post_put_counts(self, op, counts, tallies, ok);
    else if (blockIdx.x == 0)
        ok = relay_words(op, {counts, DEVICE_MAX_TALLIES, tallies}, ok,
                         [&](uint64_t word) { return is_stamped(op, word); });
    for (int i = threadIdx.x; i < tallies && ok; i += blockDim.x)
        ok = add_rank_counts(p, self, op, counts, i);
    return ok;
}

#endif
