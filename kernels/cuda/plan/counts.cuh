/* SPDX-License-Identifier: Apache-2.0 */
/* Counts choices: the first half of making a plan. plan/planner.cuh has the second half.
 *
 * Each warp counts the choices of its tokens (plan/planner_state.cuh). A choice needs its
 * position among all choices of its expert, on all ranks. That is the sum of four counts, each
 * of earlier choices of that expert:
 *
 *   on lower ranks + in lower CTAs of this rank + in lower warps + earlier ones in this warp
 *
 * So no position depends on the order in which ranks, CTAs or warps run.
 *
 *   writer          stores                                       reader that waits
 *   each warp       its counts, in shared memory                 its CTA, at a barrier
 *   planner CTA     `tallies`: counts of the CTA, in this        all planner CTAs of this
 *                   rank's heap                                  rank
 *   planner CTA 0   `counts`: counts of the rank, in every       all planner CTAs of all
 *                   rank's heap                                  ranks
 *
 * `tallies` and `counts` consist of stamped words. Each word is its own flag, so no fence is
 * needed. */
#ifndef EPIC_COUNTS_CUH
#define EPIC_COUNTS_CUH

#include "cuda/plan/planner_state.cuh"

/* Counts one choice per lane in `tally`, the counters of this warp. Returns how many choices of
 * the lane's expert the warp counted before this one. Sets `same_id` to the bit mask of the lanes
 * that have this expert. Called by all lanes; a lane without a choice passes expert -1. */
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

/* count_group() without the result `same_id`. */
__device__ __forceinline__ int32_t count_group(int32_t *tally, int32_t expert)
{
    uint32_t same_id;
    return count_group(tally, expert, same_id);
}

/* Only for layout FLAT: counts the rows that this warp's tokens need on each rank. A token has
 * one row on a rank, however many choices it has there. `owner` is the rank of this lane's
 * choice, or -1. Returns how many rows on that rank the warp counted before, or -1 if an
 * earlier choice of the token has counted the row already. `seen`: bit mask of the ranks to
 * which the first half of the token's choices goes. */
__device__ __forceinline__ int32_t count_rows(int32_t *tally, const TokenLanes &lanes,
                                              int32_t owner, int half, uint32_t &seen)
{
    const uint32_t same_owner = __match_any_sync(ALL_LANES, owner) & lanes.token_lanes;
    if (half == 0) seen = 0;
    const bool counts = owner >= 0 && !(same_owner & lanes_below()) && !(seen >> owner & 1);
    const int32_t warp_row = count_group(tally, counts ? owner : -1);
    if (lanes.num_halves == 2)
        seen |= __reduce_or_sync(ALL_LANES, owner >= 0 ? 1u << owner : 0);
    return counts ? warp_row : -1;
}

/* Returns whether an earlier choice of the same token has the same id. `same_id`: bit mask of the
 * lanes with this id. `first_id`: in the second half of a token's choices, the id of this lane's
 * choice in the first half. */
__device__ __forceinline__ bool is_repeated_choice(const TokenLanes &lanes, int32_t id,
                                                   uint32_t same_id, int32_t first_id)
{
    bool found = (same_id & lanes.token_lanes & lanes_below()) != 0;
#pragma unroll 1
    for (int lane = 0; lanes.num_halves == 2 && lane < WARP; lane++)
        found |= __shfl_sync(ALL_LANES, first_id, lane) == id;
    return id >= 0 && found;
}

/* For how many groups of tokens (TokenLanes) a lane keeps its choices in registers, from the
 * counting until it computes their slots. */
#define COUNTED_GROUPS 4

/* For each of the warp's first groups of tokens: the id of this lane's choice, and the result
 * of count_group() for it. */
struct CountedChoices {
    int32_t id[COUNTED_GROUPS], warp_position[COUNTED_GROUPS];
};

/* Returns whether CountedChoices can hold all choices of the warp. */
__device__ __forceinline__ bool has_counted_all(const TokenRange &range,
                                                const TokenLanes &lanes)
{
    return lanes.num_halves == 1 &&
           range.end - range.begin <= COUNTED_GROUPS * lanes.group_tokens;
}

/* Visits the choices of this warp's tokens in order, one choice per lane at a time. What the
 * lanes visit at a time is a group. The ids of four groups are loaded together.
 *
 *   read(choice)                returns the id of choice number `choice` of this rank
 *   use(choice, id, k, first_id, i)  handles a choice; all lanes call it, with choice = id = -1 for no
 *                             choice. i is the group's number among the four. In the second
 *                             half of a token, `first_id` is what use() returned in the first
 *                             half; otherwise it is -1. */
template <class Read, class Use>
__device__ __forceinline__ void for_each_choice(const p2p_plan_job &job,
                                                const TokenLanes &lanes,
                                                const TokenRange &range, Read read, Use use)
{
    const int top_k = job.layer.top_k, half = lanes.num_halves - 1;
    auto k_of = [&](int group) { return lanes.k + (group & half) * WARP; };
    auto choice_of_lane = [&](int group) -> int64_t {
        const int token = range.begin + (group >> half) * lanes.group_tokens + lanes.token;
        const int k = k_of(group);
        const bool in = lanes.has_choice && token < range.end && k < top_k;
        return in ? (int64_t)token * top_k + k : -1;
    };
    for (int g = 0; range.begin + (g >> half) * lanes.group_tokens < range.end; g += 4) {
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
            first_id = lanes.num_halves == 2 && i % 2 == 0 ? used : -1;
        }
    }
}

/* Checks the id of choice number `choice`. If the id is too large, records the choice in
 * p.bad_choice, unless an earlier choice is recorded there. Returns the id, or -1 if the choice
 * has no valid id. */
__device__ __forceinline__ int32_t check_id(Planner &p, int64_t choice, int64_t id, int ids)
{
    if (id >= ids) atomicMin(&p.bad_choice, (uint32_t)choice);
    return id < 0 || id >= ids ? -1 : (int32_t)id;
}

/* Returns the array in which resolve_replicas() stores the experts of this rank's choices. To
 * save memory, it is in the plan, where this rank's own records will be stored later. */
__device__ __forceinline__ int32_t *resolved_experts(const p2p_plan_job &job)
{
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    return (int32_t *)(job.plan + at.records) +
           record_index(job.self, job.self.rank, 0, (int)job.layer.top_k);
}

/* Returns the id under which choice number `choice` is counted: its expert, or a logical expert if
 * its choices are split among the replicas after counting. */
template <int KIND>
__device__ __forceinline__ int64_t planned_id(const p2p_plan_job &job, int64_t choice)
{
    if (KIND & PLAN_RARE && job.resolves) return resolved_experts(job)[choice];
    return read_id(job, choice);
}

/* Returns the number of valid ids that planned_id() can return: 0 to this number - 1. */
template <int KIND> __device__ __forceinline__ int num_planned_ids(const p2p_plan_job &job)
{
    return (int)(KIND & PLAN_RARE && !job.resolves ? (uint32_t)num_ids(job)
                                                   : job.layer.num_experts);
}

/* Counts the choices of this warp and checks their ids. For each choice, it stores the result
 * of count_group() in `fate`, until the slot is known. For layout FLAT without dropping, it
 * stores the result of count_rows() instead. */
template <int KIND>
static __device__ void count_choices(Planner &p, const p2p_plan_job &job,
                                     const TokenLanes &lanes, const TokenRange &range,
                                     int32_t *fate, CountedChoices &counted)
{
    constexpr bool FLAT = KIND & PLAN_FLAT, RARE = KIND & PLAN_RARE;
    const int experts = job.layer.num_experts, ids = num_planned_ids<KIND>(job);
    int32_t *tally = p.tally + threadIdx.x / WARP * tallies_of<KIND>(job);
    const bool by_k = RARE && job.by_k;
    const bool distinct = (job.layer.flags & EPIC_DISTINCT) != 0 && !(RARE && job.resolves);
    const bool all = KIND == 0 && has_counted_all(range, lanes);
    uint32_t seen = 0;
    const auto read = [&](int64_t choice) { return planned_id<KIND>(job, choice); };
    for_each_choice(job, lanes, range, read,
                    [&](int64_t choice, int64_t id, int k, int32_t first_id, int i) {
                        const int32_t expert = check_id(p, choice, id, ids);
                        uint32_t same_id;
                        int32_t warp_position = count_group(
                            tally, by_k && expert >= 0 ? k * experts + expert : expert,
                            same_id);
                        if (distinct) {
                            if (by_k) same_id = __match_any_sync(ALL_LANES, expert);
                            if (is_repeated_choice(lanes, expert, same_id, first_id))
                                atomicMin(&p.bad_choice, (uint32_t)choice);
                        }
                        if (FLAT) {
                            const int32_t warp_row =
                                count_rows(tally + choice_tallies<KIND>(job), lanes,
                                           expert < 0 ? -1 : p.owner[expert], k >= WARP, seen);
                            if (!RARE || job.layer.overflow == EPIC_OVERFLOW_ERROR)
                                warp_position = warp_row;
                        }
                        counted.id[i] = expert;
                        counted.warp_position[i] = warp_position;
                        if (choice >= 0 && !all) fate[choice] = warp_position;
                        return expert;
                    });
}

/* Layout of a word of `counts`: the sending rank's number of choices of an expert, and the rank
 * that owns this expert. RECORD_LAST in the word of expert 0 reports that the sending rank's
 * data is wrong. RECORD_LAST in all words reports that its table rank_of_expert is invalid. */
#define COUNT_BITS P2P_COUNT_BITS
#define COUNT_OF(word) ((uint32_t)(word) & ((1u << COUNT_BITS) - 1))
#define OWNER_OF(word) ((uint32_t)(word) >> COUNT_BITS & 31)

/* Returns a word of `counts` with the expert's rank and the count 0. The caller adds the
 * count. */
__device__ __forceinline__ uint32_t owner_word(const Planner &p, int expert)
{
    return p.bad_owner == NO_INDEX ? (uint32_t)p.owner[expert] << COUNT_BITS : RECORD_LAST;
}

/* Breaks the group, because the table of experts of rank q differs from that of this rank. */
static __device__ __noinline__ void report_table_mismatch(const OpState &op, int q)
{
    const p2p_self &self = *op.self;
    report_failure(
        op, P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, P2P_PHASE_TABLE, 1u << q),
        op.signature);
}

/* Publishes the counts of this CTA to the other planner CTAs of this rank. In p.tally, it
 * replaces each warp's count by the sum of the counts of lower warps. Called by all threads of
 * the CTA. */
template <int KIND>
static __device__ void publish_tallies(Planner &p, const p2p_plan_job &job, const OpState &op)
{
    const int experts = tallies_of<KIND>(job);
    uint64_t *tallies = (uint64_t *)(op.heap + job.self.at.tallies);
    const bool bad = p.bad_choice != NO_INDEX || p.bad_owner != NO_INDEX ||
                     (KIND & PLAN_RARE && p.bad_replica != NO_INDEX);
    if (threadIdx.x == 0)
        store_relaxed((uint64_t *)(op.heap + job.self.at.first) + blockIdx.x,
                      stamp_word(op, p.bad_choice));
    const int warps = p.num_warps;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        /* all loads come before the first store, so that they overlap */
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

/* Returns the address, in `heap`, of the words that describe the first wrong value of
 * `rank`. */
__device__ __forceinline__ uint64_t *fault_words(const p2p_self &self, const OpState &op,
                                                 uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + self.at.faults) +
           (epoch_parity(op) * DEVICE_MAX_RANKS + rank) * P2P_FAULT_WORDS;
}

/* Returns the wrong value that the caller passed at `index` of the ids or of a table; `kind` (a
 * p2p_fault) selects the array. Changes `kind` to the exact fault, and `index` to match it.
 * Called by one thread. */
__device__ __forceinline__ int64_t read_wrong_value(const p2p_plan_job &job, uint32_t &kind,
                                                    uint32_t &index)
{
    const uint32_t experts = job.layer.num_experts;
    if (kind == P2P_FAULT_PLACEMENT) return job.rank_of_expert[index];
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

/* Reports to all ranks a wrong value that this rank's caller passed: its kind, its index and
 * the value. Called by one thread. */
static __device__ __noinline__ void
publish_wrong_value(const p2p_plan_job &job, const OpState &op, uint32_t kind, uint32_t index)
{
    const p2p_self &self = job.self;
    const int64_t value = read_wrong_value(job, kind, index);
    for (int q = 0; q < self.num_ranks; q++) {
        uint64_t *to = fault_words(self, op, self.heap[q], self.rank);
        store_relaxed(to + P2P_FAULT_KIND, stamp_word(op, kind));
        store_relaxed(to + P2P_FAULT_INDEX, stamp_word(op, index));
        store_relaxed(to + P2P_FAULT_LOW, stamp_word(op, (uint32_t)value));
        store_relaxed(to + P2P_FAULT_HIGH, stamp_word(op, (uint32_t)((uint64_t)value >> 32)));
        post_put(op, q, to, P2P_FAULT_WORDS * 8);
    }
}

/* Each planner CTA has published its first wrong value. Finds the first one of the rank, and
 * reports it to all ranks. Called by one thread of CTA 0. Returns false if the group is
 * broken. */
static __device__ __noinline__ bool publish_fault(const Planner &p, const p2p_plan_job &job,
                                                  const OpState &op)
{
    const uint64_t *first = (const uint64_t *)(op.heap + job.self.at.first);
    const bool placed = p.bad_owner == NO_INDEX, known = placed && p.bad_replica == NO_INDEX;
    uint32_t index = placed ? p.bad_replica : p.bad_owner;
    for (int c = 0; c < job.planners && known; c++) {
        uint64_t word = 0;
        if (!wait_thread(op, -1, P2P_PHASE_GRID, [&] {
                word = load_relaxed(first + c);
                return is_stamped(op, word);
            }))
            return false;
        index = min(index, (uint32_t)word);
    }
    publish_wrong_value(job, op,
                        known    ? P2P_FAULT_EXPERT
                        : placed ? P2P_FAULT_REPLICA
                                 : P2P_FAULT_PLACEMENT,
                        index);
    return true;
}

/* backend hosts: copies the counts of ranks on other hosts from the net inbox to the heap. Only
 * CTA 0 does this; the other CTAs wait for the words in the heap. */
__device__ __forceinline__ void cache_counts(const OpState &op, uint64_t *counts, int first,
                                             const uint64_t (&words)[RANKS_AT_ONCE])
{
#pragma unroll
    for (int i = 0; i < RANKS_AT_ONCE; i++)
        if (blockIdx.x == 0 && first + i < op.self->num_ranks && is_remote(*op.self, first + i))
            store_relaxed(counts + (first + i) * DEVICE_MAX_TALLIES, words[i]);
}

/* Waits until all planner CTAs of this rank have published their value of counter e. Sets
 * words[c] to that of CTA c; words without a CTA have the count 0. Returns false if the group
 * is broken. */
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

/* Does steps 1 and 2 of exchange_counts() for counter e. `counts` is the offset of this
 * operation's counts in a heap, in 8-byte words. */
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
            store_relaxed((uint64_t *)self.heap[q] + counts + self.rank * DEVICE_MAX_TALLIES +
                              e,
                          stamp_word(op, sum | owner_word(p, e) | bad));
        }
    p.before_cta[e] = (int32_t)low;
    return ok;
}

/* backend hosts: CTA 0 posts the puts that send all counts of this rank, after all its threads
 * have stored theirs. Called by all threads. Returns false if a thread has found that the group
 * is broken. */
__device__ __forceinline__ bool post_put_counts(const p2p_self &self, const OpState &op,
                                                int64_t counts, int experts, bool ok)
{
    if (!HOSTS || blockIdx.x != 0) return ok;
    ok = __syncthreads_and(ok) != 0;
    if (ok && (int)threadIdx.x < self.num_ranks)
        post_put(op, threadIdx.x,
                 (uint64_t *)self.heap[threadIdx.x] + counts + self.rank * DEVICE_MAX_TALLIES,
                 (uint32_t)experts * 8);
    return ok;
}

/* Waits until RANKS_AT_ONCE ranks, from rank `first` on, have published their value of one
 * counter. `from` is where rank 0 stores its value in this rank's heap. Sets words[i] to the
 * value of rank first + i; words past the last rank have the count 0. Returns false if the
 * group is broken. */
__device__ __forceinline__ bool wait_rank_counts(const OpState &op, const uint64_t *from,
                                                 int first, uint64_t (&words)[RANKS_AT_ONCE])
{
    const int ranks = op.self->num_ranks;
    int missing = -1; /* a rank whose word has not arrived; -1: all words have arrived */
    return wait_thread(op, missing, P2P_PHASE_COUNTS, [&] {
        missing = -1;
#pragma unroll
        for (int i = 0; i < RANKS_AT_ONCE; i++)
            words[i] = first + i < ranks
                           ? load_relaxed(from + (first + i) * DEVICE_MAX_TALLIES +
                                          inbox_word_offset(op, first + i))
                           : stamp_word(op, 0);
#pragma unroll
        for (int i = 0; i < RANKS_AT_ONCE; i++)
            if (!is_stamped(op, words[i])) missing = first + i;
        return missing < 0;
    });
}

/* Does step 3 of exchange_counts() for counter e. `counts` is the offset of this operation's
 * counts in a heap, in 8-byte words. */
__device__ __forceinline__ bool add_rank_counts(Planner &p, const p2p_self &self,
                                                const OpState &op, int64_t counts, int e)
{
    const uint64_t *from = (const uint64_t *)op.heap + counts + e;
    uint32_t load = 0, low = 0, bad = 0, others = 0; /* bad, others: one bit per rank */
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
            bad |= wrong ? 1u << q : 0;
            if (q < self.num_ranks && owner != p.owner[e] && !wrong) others |= 1u << q;
            if (q < self.rank) low += count;
            load += count;
        }
    }
    if (ok && others && p.bad_owner == NO_INDEX) {
        report_table_mismatch(op, __ffs(others) - 1);
        ok = false;
    }
    if (bad && e == 0) p.bad_ranks = bad;
    p.load[e] = (int32_t)load;
    p.before_cta[e] += (int32_t)low;
    return ok;
}

/* Exchanges the counts with all ranks. Called by all threads of the planner CTAs. A thread
 * handles one counter at a time:
 *
 *   1. waits for the counts of all planner CTAs of this rank and adds them
 *   2. CTA 0 stores the sums to every rank
 *   3. waits for the sums of all ranks, checks that all ranks have the same owner for the
 *      expert, and sets p.before_cta and p.load
 *
 * Returns false if the group is broken. If this function were inlined, its registers would make
 * the compiler spill registers in the loop that moves rows. */
template <int KIND>
static __device__ __noinline__ bool exchange_counts(Planner &p, const p2p_plan_job &job,
                                                    const OpState &op)
{
    const p2p_self &self = job.self;
    const int experts = tallies_of<KIND>(job);
    const int64_t counts =
        self.at.counts / 8 + (int64_t)epoch_parity(op) * self.num_ranks * DEVICE_MAX_TALLIES;
    bool ok = true;
    for (int e = threadIdx.x; e < experts && ok; e += blockDim.x)
        ok = publish_count(p, job, op, counts, e);
    ok = post_put_counts(self, op, counts, experts, ok);
    for (int e = threadIdx.x; e < experts && ok; e += blockDim.x)
        ok = add_rank_counts(p, self, op, counts, e);
    return ok;
}

#endif
