/* SPDX-License-Identifier: Apache-2.0 */
/* Counting choices: the first half of making a plan.
 *
 * The first `planners` CTAs make the plan. CTA c has the c-th part of the tokens, its warp w
 * the w-th part of that. The position of a choice among all choices of its expert is
 *
 *   choices of lower ranks + of lower CTAs + of lower warps + earlier ones of this warp,
 *
 * so no position depends on the order in which anything happens.
 *
 *   who                    stores                            who waits for it
 *   warp                   its counts, in shared memory      its CTA, at a barrier
 *   planner CTA            counts of the CTA (`tallies`,     all planner CTAs of this rank
 *                          stamped, this rank)
 *   planner CTA 0          counts of the rank (`counts`,     all planner CTAs of all ranks
 *                          stamped, to every rank)
 *
 * Planning is compiled for each KIND of layer, so that rare features cost the others nothing.
 */
#ifndef EPIC_COUNTS_CUH
#define EPIC_COUNTS_CUH

#include "cuda/plan/view.cuh"

/* "None" among the indices of the planner. */
#define NO_INDEX 0xffffffffu
#define RANKS_AT_ONCE 8
#define PLAN_MOST_WARPS 16     /* warps of a CTA that count, at most */
#define PLAN_TALLY_WORDS 16384 /* warps that count, times experts, at most */

enum { /* bits of KIND */
       PLAN_FLAT = 1,
       PLAN_RARE = 2 /* the layer has replicas or may drop choices */
};

/* State of planning, in shared memory; the arrays are in dynamic shared memory. */
struct Planner {
    device_plan_header header;
    int32_t *low;                /* [num_tallies] choices before those of this CTA */
    int32_t *load;               /* [num_tallies] choices of all ranks */
    int32_t *row_low, *row_load; /* FLAT: the same of rows, [num_ranks], after choices */
    int32_t *start; /* [num_experts] first slot on its rank; FLAT: its number there */
    int32_t *tally; /* [warps][num_tallies] choices in this CTA before those of the warp */
    uint8_t *owner; /* [num_tallies] rank of the expert */
    uint8_t *rare;  /* arrays of rare layers only */
    int32_t common[DEVICE_MAX_RANKS]; /* most choices that an expert of each rank keeps */
    int32_t demand[DEVICE_MAX_RANKS];
    int32_t capacity[DEVICE_MAX_RANKS];
    int32_t fits[DEVICE_MAX_RANKS],
        fails[DEVICE_MAX_RANKS]; /* FLAT: bounds of the limit that is searched */
    /* slots that are needed after expert_capacity has dropped */
    int64_t needed[DEVICE_MAX_RANKS];
    /* index of this CTA's first choice with an invalid id, or with an id that its token repeats
     * where ids are distinct; NO_INDEX: none */
    uint32_t bad_choice;
    uint32_t bad_owner;    /* lowest expert with an invalid rank; NO_INDEX: none */
    int32_t *base, *taken; /* EPIC_BY_K only: plan/keep_by_k.cuh */
    int32_t *chosen;       /* replicas only: plan/replicas.cuh */
    uint16_t *logical, *nth, *first, *replica;
    uint32_t table; /* hash of the table of replicas */
    /* lowest expert whose entry is invalid, or num_experts + the lowest logical expert without
     * replicas; NO_INDEX: none */
    uint32_t bad_replica;
    uint32_t bad_ranks; /* ranks with wrong data, as bits */
    int32_t warps, tokens_of_cta, tokens_of_warp;
};

/* Number of counters for choices: one per expert, or with EPIC_BY_K one per expert and k. */
__host__ __device__ inline int num_choice_tallies(const p2p_plan_job &job)
{
    return (int)(job.layer.num_experts * (job.by_k ? job.layer.top_k : 1));
}

/* Number of all counters. FLAT has one more per rank, after those of choices: rows are counted
 * as if a rank were an expert that each token chooses at most once. */
__host__ __device__ inline int num_tallies(const p2p_plan_job &job, bool flat)
{
    return num_choice_tallies(job) + (flat ? job.self.num_ranks : 0);
}

/* Like num_choice_tallies(), with the KIND known to the compiler. */
template <int KIND> __device__ __forceinline__ int choice_tallies(const p2p_plan_job &job)
{
    return KIND & PLAN_RARE ? num_choice_tallies(job) : (int)job.layer.num_experts;
}

/* The tallies of a planner: those of choices and, FLAT, those of each rank's rows. */
template <int KIND> __device__ __forceinline__ int tallies_of(const p2p_plan_job &job)
{
    return choice_tallies<KIND>(job) + (KIND & PLAN_FLAT ? job.self.num_ranks : 0);
}

/* Warps of a CTA that count so many tallies, as many as fit the memory. */
__host__ __device__ inline int planner_warps(int tallies)
{
    const int most = PLAN_TALLY_WORDS / tallies;
    return most < 3                 ? 1
           : most > PLAN_MOST_WARPS ? PLAN_MOST_WARPS
                                    : most; /* two would need too much memory */
}

/* Dynamic shared memory of the planner for so many tallies. */
__host__ __device__ inline int planner_bytes(int tallies)
{
    return tallies * 4 * (3 + planner_warps(tallies)) + (tallies + 15) / 16 * 16;
}

/* The largest planner_bytes() of any number of tallies; it is not monotonic. */
static inline int planner_most_bytes(void)
{
    int most = 0;
    for (int tallies = 1; tallies <= DEVICE_MAX_TALLIES; tallies++)
        if (planner_bytes(tallies) > most) most = planner_bytes(tallies);
    return most;
}

/* Dynamic shared memory of the planner of this job. */
static inline int planner_bytes_of(const p2p_plan_job &job)
{
    return planner_bytes(num_tallies(job, job.layer.layout == EPIC_FLAT));
}

/* The tokens that a warp handles side by side, one lane per choice. A token with more than 32
 * choices takes two halves, one after the other. */
struct TokenLanes {
    int tokens, halves; /* tokens at a time; halves of a token */
    int token, k;       /* token and choice of this lane */
    bool on;
    uint32_t mates; /* lanes of the same token */

    /* Deals the choices of a token to lanes. */
    __device__ explicit TokenLanes(int top_k)
    {
        const int lane = lane_id();
        const float part = reciprocal_approx((float)top_k); /* exact for numbers this small */
        tokens = top_k <= WARP ? (int)((WARP + 0.5f) * part) : 1;
        halves = top_k <= WARP ? 1 : 2;
        token = top_k <= WARP ? (int)(((float)lane + 0.5f) * part) : 0;
        k = lane - token * top_k;
        on = token < tokens;
        mates = top_k >= WARP ? ALL_LANES : ((1u << top_k) - 1) << (token * top_k % WARP);
    }
};

/* backend hosts: completes the records for rank q of the warp's tokens, which have `count`
 * words. Records of up to 32 choices are filled up, so that those of a CTA lie next to each
 * other and post_put_plan() posts one put. Longer records are posted here. One warp. */
__device__ __forceinline__ void fill_records(const OpState &op, const TokenLanes &lanes, int q,
                                             uint64_t *record, bool in, int count)
{
    if (!HOSTS) return;
    const bool mine = in && lanes.on;
    if (lanes.halves > 1) return post_put_records(op, q, record, mine && lanes.k == 0, count);
    if (mine && lanes.k >= max(count, 1))
        store_relaxed(record + lanes.k, stamp_word(op, RECORD_ABSENT));
}

/* Upper bound of the ids that the caller passes. */
__device__ __forceinline__ int num_ids(const p2p_plan_job &job)
{
    return (int)(job.layer.num_logical ? job.layer.num_logical : job.layer.num_experts);
}

/* The id of choice number i of this rank, as the caller passes it. */
__device__ __forceinline__ int64_t read_id(const p2p_plan_job &job, int64_t i)
{
    return job.has_int64_ids ? __ldg((const long long *)job.topk_idx + i)
                             : __ldg((const int32_t *)job.topk_idx + i);
}

struct TokenRange { /* the tokens of a warp */
    int32_t begin, end;
};

/* Splits this rank's tokens among planner CTAs and their warps. One thread. */
__device__ __forceinline__ void split_tokens(Planner &p, const p2p_plan_job &job, int warps)
{
    p.tokens_of_cta = (job.num_tokens + job.planners - 1) / job.planners;
    p.tokens_of_warp = (p.tokens_of_cta + warps - 1) / warps;
}

/* The tokens of this warp. */
__device__ __forceinline__ TokenRange range_of_warp(const Planner &p, const p2p_plan_job &job)
{
    const int warp = threadIdx.x / WARP;
    const int cta_end = min(job.num_tokens, (int)(blockIdx.x + 1) * p.tokens_of_cta);
    TokenRange part;
    part.begin = (int)blockIdx.x * p.tokens_of_cta + warp * p.tokens_of_warp;
    part.end = min(cta_end, part.begin + p.tokens_of_warp);
    if (warp >= p.warps) part.begin = part.end = 0;
    return part;
}

/* Sets up the planner: arrays, zero counts, and the owner of every expert. All threads. */
template <int KIND>
static __device__ void begin_planner(Planner &p, const p2p_plan_job &job, uint8_t *memory)
{
    const int experts = job.layer.num_experts, ranks = job.self.num_ranks;
    const int choices = choice_tallies<KIND>(job), tallies = tallies_of<KIND>(job);
    const int warps = min((int)blockDim.x / WARP, planner_warps(tallies));
    if (threadIdx.x == 2 * WARP) split_tokens(p, job, warps);
    if (threadIdx.x == 0) {
        p.warps = warps;
        p.low = (int32_t *)memory;
        p.load = p.low + tallies;
        p.row_low = p.low + choices;
        p.row_load = p.load + choices;
        p.start = p.load + tallies;
        p.tally = p.start + tallies;
        p.owner = (uint8_t *)(p.tally + p.warps * tallies);
        p.rare = p.owner + (tallies + 15) / 16 * 16;
        p.bad_choice = p.bad_owner = p.bad_replica = NO_INDEX;
        p.table = 0;
        p.bad_ranks = 0;
        p.header.result = EPIC_OK;
        p.header.num_local = 0;
    }
    if (threadIdx.x < DEVICE_MAX_RANKS) {
        p.header.slots_of[threadIdx.x] = 0;
        p.common[threadIdx.x] = 0x7fffffff;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.warps * tallies; i += blockDim.x) p.tally[i] = 0;
    for (int q = threadIdx.x; KIND & PLAN_FLAT && q < ranks; q += blockDim.x)
        p.owner[choices + q] = (uint8_t)q;
    const int block = experts / ranks;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int owner = job.rank_of_expert ? job.rank_of_expert[e] : e / block;
        if (owner < 0 || owner >= ranks) {
            owner = 0;
            atomicMin(&p.bad_owner, (uint32_t)e);
        }
        for (int i = e; i < choices; i += experts) p.owner[i] = (uint8_t)owner;
    }
    __syncthreads();
    if (job.layer.sum_order == EPIC_TREE)
        for (int e = threadIdx.x; e < experts; e += blockDim.x)
            if (p.owner[e] != p.owner[e / block * block]) atomicMin(&p.bad_owner, (uint32_t)e);
}

/* Counts one choice per lane. Returns how many choices of the same expert this warp counted
 * before. `same`: the lanes with that expert. All lanes; expert -1: no choice. */
__device__ __forceinline__ int32_t count_group(int32_t *tally, int32_t expert, uint32_t &same)
{
    same = __match_any_sync(ALL_LANES, expert);
    const int before = __popc(same & lanes_below());
    const int32_t base = expert >= 0 ? tally[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) tally[expert] = base + __popc(same);
    __syncwarp();
    return base + before;
}

/* Like count_group() with `same`, for callers that do not need the lanes. */
__device__ __forceinline__ int32_t count_group(int32_t *tally, int32_t expert)
{
    uint32_t same;
    return count_group(tally, expert, same);
}

/* FLAT: counts the rows on the choices' ranks. Returns -1 if the token's row there was counted
 * with an earlier choice. `seen`: ranks of the token's first half. */
__device__ __forceinline__ int32_t count_rows(int32_t *tally, const TokenLanes &lanes,
                                              int32_t owner, int half, uint32_t &seen)
{
    const uint32_t mates = __match_any_sync(ALL_LANES, owner) & lanes.mates;
    if (half == 0) seen = 0;
    const bool counts = owner >= 0 && !(mates & lanes_below()) && !(seen >> owner & 1);
    const int32_t place = count_group(tally, counts ? owner : -1);
    if (lanes.halves == 2) seen |= __reduce_or_sync(ALL_LANES, owner >= 0 ? 1u << owner : 0);
    return counts ? place : -1;
}

/* Has an earlier choice of the token the same id? `same`: the lanes with this id. `first`: in
 * the second half of a token, the id of this lane's choice in the first half. */
__device__ __forceinline__ bool is_repeated_choice(const TokenLanes &lanes, int32_t id,
                                                   uint32_t same, int32_t first)
{
    bool found = (same & lanes.mates & lanes_below()) != 0;
#pragma unroll 1
    for (int lane = 0; lanes.halves == 2 && lane < WARP; lane++)
        found |= __shfl_sync(ALL_LANES, first, lane) == id;
    return id >= 0 && found;
}

/* groups of choices that a lane keeps in registers between counting and placing */
#define COUNTED_GROUPS 4

struct CountedChoices {
    int32_t id[COUNTED_GROUPS], place[COUNTED_GROUPS];
};

/* Do the kept groups contain all choices of the warp? */
__device__ __forceinline__ bool has_counted_all(const TokenRange &part, const TokenLanes &lanes)
{
    return lanes.halves == 1 && part.end - part.begin <= COUNTED_GROUPS * lanes.tokens;
}

/* Visits the choices of this warp in order, one per lane, with the ids of four groups loaded
 * ahead. read(at) returns the id of choice number `at`. use(at, id, k, first, i) is called by
 * all lanes (-1: no choice) and returns what is_repeated_choice() takes as `first`; i is the
 * number of the group among the four. */
template <class Read, class Use>
__device__ __forceinline__ void for_each_choice(const p2p_plan_job &job,
                                                const TokenLanes &lanes, const TokenRange &part,
                                                Read read, Use use)
{
    const int top_k = job.layer.top_k, half = lanes.halves - 1;
    auto k_of = [&](int group) { return lanes.k + (group & half) * WARP; };
    auto source_number = [&](int group) -> int64_t {
        const int token = part.begin + (group >> half) * lanes.tokens + lanes.token;
        const int k = k_of(group);
        const bool in = lanes.on && token < part.end && k < top_k;
        return in ? (int64_t)token * top_k + k : -1;
    };
    for (int g = 0; part.begin + (g >> half) * lanes.tokens < part.end; g += 4) {
        int64_t at[4], id[4];
        int32_t first = -1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            at[i] = source_number(g + i);
            id[i] = at[i] >= 0 ? read(at[i]) : -1;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t used = use(at[i], id[i], k_of(g + i), first, i);
            first = lanes.halves == 2 && i % 2 == 0 ? used : -1;
        }
    }
}

/* Checks an id of the caller. Returns -1 if the choice has no expert. */
__device__ __forceinline__ int32_t check_id(Planner &p, int64_t at, int64_t id, int ids)
{
    if (id >= ids) atomicMin(&p.bad_choice, (uint32_t)at);
    return id < 0 || id >= ids ? -1 : (int32_t)id;
}

/* The experts of this rank's logical choices. They are kept in the place of its own records,
 * which the plan gets later. */
__device__ __forceinline__ int32_t *resolved_experts(const p2p_plan_job &job)
{
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    return (int32_t *)(job.plan + at.records) +
           record_index(job.self, job.self.rank, 0, (int)job.layer.top_k);
}

/* The id that is counted for choice `at`: an expert, or a logical expert that is split later.
 */
template <int KIND>
__device__ __forceinline__ int64_t planned_id(const p2p_plan_job &job, int64_t at)
{
    if (KIND & PLAN_RARE && job.resolves) return resolved_experts(job)[at];
    return read_id(job, at);
}

/* Upper bound of those ids. */
template <int KIND> __device__ __forceinline__ int num_planned_ids(const p2p_plan_job &job)
{
    return (int)(KIND & PLAN_RARE && !job.resolves ? (uint32_t)num_ids(job)
                                                   : job.layer.num_experts);
}

/* Counts the choices of this warp. The position of a choice in the warp is kept in `fate`; FLAT
 * keeps that of its row, unless the layer drops choices. */
template <int KIND>
static __device__ void count_choices(Planner &p, const p2p_plan_job &job,
                                     const TokenLanes &lanes, const TokenRange &part,
                                     int32_t *fate, CountedChoices &counted)
{
    constexpr bool FLAT = KIND & PLAN_FLAT, RARE = KIND & PLAN_RARE;
    const int experts = job.layer.num_experts, ids = num_planned_ids<KIND>(job);
    int32_t *tally = p.tally + threadIdx.x / WARP * tallies_of<KIND>(job);
    const bool by_k = RARE && job.by_k;
    const bool distinct = (job.layer.flags & EPIC_DISTINCT) != 0 && !(RARE && job.resolves);
    const bool all = KIND == 0 && has_counted_all(part, lanes);
    uint32_t seen = 0;
    const auto read = [&](int64_t at) { return planned_id<KIND>(job, at); };
    for_each_choice(
        job, lanes, part, read, [&](int64_t at, int64_t id, int k, int32_t first, int i) {
            const int32_t expert = check_id(p, at, id, ids);
            uint32_t same;
            int32_t place =
                count_group(tally, by_k && expert >= 0 ? k * experts + expert : expert, same);
            if (distinct) {
                if (by_k) same = __match_any_sync(ALL_LANES, expert);
                if (is_repeated_choice(lanes, expert, same, first))
                    atomicMin(&p.bad_choice, (uint32_t)at);
            }
            if (FLAT) {
                const int32_t row =
                    count_rows(tally + choice_tallies<KIND>(job), lanes,
                               expert < 0 ? -1 : p.owner[expert], k >= WARP, seen);
                if (!RARE || job.layer.overflow == EPIC_OVERFLOW_ERROR) place = row;
            }
            counted.id[i] = expert;
            counted.place[i] = place;
            if (at >= 0 && !all) fate[at] = place;
            return expert;
        });
}

/* A word of `counts`: choices of an expert and its rank. RECORD_LAST in the word of expert 0
 * means that this rank's data is wrong; in all words, that its table of ranks is invalid. */
#define COUNT_BITS P2P_COUNT_BITS
#define COUNT_OF(word) ((uint32_t)(word) & ((1u << COUNT_BITS) - 1))
#define OWNER_OF(word) ((uint32_t)(word) >> COUNT_BITS & 31)

/* The word of an expert's rank, to which its count is added. */
__device__ __forceinline__ uint32_t owner_word(const Planner &p, int expert)
{
    return p.bad_owner == NO_INDEX ? (uint32_t)p.owner[expert] << COUNT_BITS : RECORD_LAST;
}

/* Breaks the group: rank q has another table of experts than this rank. */
static __device__ __noinline__ void report_table_mismatch(const OpState &op, int q)
{
    const p2p_self &self = *op.self;
    report_failure(
        op, P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, P2P_PHASE_TABLE, 1u << q),
        op.signature);
}

/* Turns the warps' counts into exclusive sums and publishes the counts of this CTA to the
 * others. */
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
    const int warps = p.warps;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int32_t counts[PLAN_MOST_WARPS], sum = 0; /* all loads come before any store */
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

/* The words in a heap about the first wrong value of `rank`. */
__device__ __forceinline__ uint64_t *fault_words(const p2p_self &self, const OpState &op,
                                                 uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + self.at.faults) +
           (epoch_parity(op) * DEVICE_MAX_RANKS + rank) * P2P_FAULT_WORDS;
}

/* The wrong value at `index` of the ids or of a table; `kind` becomes a p2p_fault. One thread.
 */
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

/* Sends to all ranks which of this rank's choices or experts is wrong. One thread. */
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

/* Finds the first wrong value of this rank and sends it to all ranks. One thread of CTA 0. */
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

/* backend hosts: the first CTA copies the counts of remote ranks from the inbox to the heap,
 * where the other CTAs wait for them. */
__device__ __forceinline__ void cache_counts(const OpState &op, uint64_t *counts, int first,
                                             const uint64_t (&words)[RANKS_AT_ONCE])
{
#pragma unroll
    for (int i = 0; i < RANKS_AT_ONCE; i++)
        if (blockIdx.x == 0 && first + i < op.self->num_ranks && is_remote(*op.self, first + i))
            store_relaxed(counts + (first + i) * DEVICE_MAX_TALLIES, words[i]);
}

/* Adds up the counts of the CTAs, sends this rank's sums to all ranks, waits for theirs and
 * adds those up. noinline keeps its registers out of the loop that moves rows, which would
 * spill. */
template <int KIND>
static __device__ __noinline__ bool exchange_counts(Planner &p, const p2p_plan_job &job,
                                                    const OpState &op)
{
    const p2p_self &self = job.self;
    const int experts = tallies_of<KIND>(job), ranks = self.num_ranks;
    const uint64_t *tallies = (const uint64_t *)(op.heap + self.at.tallies);
    const int64_t counts =
        self.at.counts / 8 + (int64_t)epoch_parity(op) * ranks * DEVICE_MAX_TALLIES;
    bool ok = true;
    for (int e = threadIdx.x; e < experts && ok; e += blockDim.x) {
        uint64_t words[P2P_MAX_PLANNERS];
        ok = wait_thread(op, -1, P2P_PHASE_GRID, [&] {
            bool all = true;
#pragma unroll
            for (int c = 0; c < P2P_MAX_PLANNERS; c++)
                words[c] = c < job.planners ? load_relaxed(tallies + c * DEVICE_MAX_TALLIES + e)
                                            : stamp_word(op, 0);
#pragma unroll
            for (int c = 0; c < P2P_MAX_PLANNERS; c++) all &= is_stamped(op, words[c]);
            return all;
        });
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
            for (int i = 1; i <= ranks; i++) {
                const int q = wrap_rank(self.rank + i, ranks);
                store_relaxed((uint64_t *)self.heap[q] + counts +
                                  self.rank * DEVICE_MAX_TALLIES + e,
                              stamp_word(op, sum | owner_word(p, e) | bad));
            }
        p.low[e] = (int32_t)low;
    }
    if (HOSTS && blockIdx.x == 0) {
        ok = __syncthreads_and(ok) != 0;
        if (ok && (int)threadIdx.x < ranks)
            post_put(op, threadIdx.x,
                     (uint64_t *)self.heap[threadIdx.x] + counts +
                         self.rank * DEVICE_MAX_TALLIES,
                     (uint32_t)experts * 8);
    }
    for (int e = threadIdx.x; e < experts && ok; e += blockDim.x) {
        const uint64_t *from = (const uint64_t *)op.heap + counts + e;
        uint32_t load = 0, low = 0, bad = 0, others = 0;
#pragma unroll 1
        for (int first = 0; first < ranks && ok; first += RANKS_AT_ONCE) {
            uint64_t words[RANKS_AT_ONCE];
            int missing = -1;
            ok = wait_thread(op, missing, P2P_PHASE_COUNTS, [&] {
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
            cache_counts(op, (uint64_t *)from, first, words);
#pragma unroll
            for (int i = 0; i < RANKS_AT_ONCE; i++) {
                const int q = first + i;
                const uint32_t count = COUNT_OF(words[i]), owner = OWNER_OF(words[i]);
                const bool wrong = ((uint32_t)words[i] & RECORD_LAST) != 0;
                bad |= wrong ? 1u << q : 0;
                if (q < ranks && owner != p.owner[e] && !wrong) others |= 1u << q;
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
        p.low[e] += (int32_t)low;
    }
    return ok;
}

#endif
