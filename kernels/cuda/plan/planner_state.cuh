/* SPDX-License-Identifier: Apache-2.0 */
/* The state of the planner (struct Planner), and the assignment of tokens to warps and lanes.
 *
 * The first `planners` CTAs of a kernel make the plan. This rank's tokens are cut into one part
 * per CTA, and the part of a CTA into one part per warp. A warp handles several tokens at a
 * time, one lane per choice:
 *
 *   num_tallies, tallies_of     how many counters a warp has: per expert (and k), per rank
 *   planner_warps               how many warps of a CTA count
 *   planner_bytes               how much shared memory their counters need
 *   TokenLanes                  which lane has which token and choice
 *   split_tokens, TokenRange    which warp has which tokens
 *   begin_planner               sets up the arrays, zero counts, and the owner of every expert
 *
 * The planner is compiled separately for each KIND of layer, so that layers without rare
 * features are not slower because of them. */
#ifndef EPIC_PLANNER_STATE_CUH
#define EPIC_PLANNER_STATE_CUH

#include "cuda/plan/view.cuh"

/* An index that means "none". */
#define NO_INDEX 0xffffffffu
#define RANKS_AT_ONCE 8
#define PLAN_MOST_WARPS 16 /* largest number of warps of a CTA that count */
/* upper bound of the number of counters of all warps of a CTA */
#define PLAN_TALLY_WORDS 16384

enum { /* bits of the template argument KIND, which describes the layer */
       /* the layout is EPIC_FLAT */
       PLAN_FLAT = 1,
       PLAN_RARE = 2 /* the layer has replicas or drops choices */
};

/* State of the planner, in shared memory. begin_planner() sets the pointers, which are to
 * arrays in dynamic shared memory. A tally is a counter, mostly of the choices of one expert;
 * num_choice_tallies() and num_tallies() list the counters. */
struct Planner {
    device_plan_header header;
    /* [num_tallies]: number of choices on lower ranks and in lower CTAs of this rank */
    int32_t *before_cta;
    int32_t *load; /* [num_tallies]: number of choices on all ranks */
    /* FLAT: [num_ranks], like low and load, but count the rows that are needed on each rank */
    int32_t *rows_before_cta, *needed_rows;
    /* [num_experts]: first slot of the expert's slab; FLAT: number of the expert on its rank */
    int32_t *slab_start;
    /* [warps][num_tallies]: first the number of choices in the warp itself; after
     * publish_tallies(), in all lower warps of this CTA */
    int32_t *tally;
    uint8_t *owner;       /* [num_tallies]: rank that owns the expert */
    uint8_t *rare_memory; /* more arrays, only for layers with PLAN_RARE */
    /* for each rank: how many choices each of its experts keeps at most, so that its slots
     * suffice */
    int32_t keep_limit[DEVICE_MAX_RANKS];
    /* for each rank: slots that it would need if no choice were dropped */
    int32_t demand[DEVICE_MAX_RANKS];
    /* for each rank: slots that it has; 0: no bound */
    int32_t capacity[DEVICE_MAX_RANKS];
    /* FLAT: bounds in the search for `keep_limit`. A limit of `fits` is known to fit, one of
     * `fails` is known to need too many rows. */
    int32_t limit_fits[DEVICE_MAX_RANKS], limit_fails[DEVICE_MAX_RANKS];
    /* for each rank: slots that it needs after expert_capacity has dropped choices */
    int64_t needed_slots[DEVICE_MAX_RANKS];
    /* Index of this CTA's first wrong choice, or NO_INDEX. A choice is wrong if its id is too
     * large. With EPIC_DISTINCT, it is also wrong if an earlier choice of its token has the
     * same id. */
    uint32_t bad_choice;
    uint32_t bad_owner; /* lowest expert with an invalid owner; NO_INDEX: none */
    int32_t *lower_k_count, *kept_before; /* EPIC_BY_K only: described in plan/keep_by_k.cuh */
    int32_t *logical_load;                /* replicas only: described in plan/replicas.cuh */
    /* replicas only: described in plan/replicas.cuh */
    uint16_t *logical_of, *replica_index, *first_replica, *replicas;
    uint32_t table_hash; /* replicas only: hash of logical_of_expert */
    /* Only for replicas: the lowest expert e for which logical_of_expert[e] is invalid. If
     * there is none: num_experts + the lowest logical expert without replicas, or NO_INDEX. */
    uint32_t bad_replica;
    uint32_t bad_ranks; /* bit mask of the ranks whose choices or tables are wrong */
    /* warps: warps of a CTA that count; the others: number of tokens per CTA and per warp */
    int32_t num_warps, tokens_per_cta, tokens_per_warp;
};

/* Returns the number of counters for choices: one per expert, or with EPIC_BY_K one per expert
 * and k. */
__host__ __device__ inline int num_choice_tallies(const p2p_plan_job &job)
{
    return (int)(job.layer.num_experts * (job.by_k ? job.layer.top_k : 1));
}

/* Returns the number of all counters. Layout FLAT has one more counter per rank, after those of
 * the choices. These count rows as if each rank were an expert that a token chooses at most
 * once. */
__host__ __device__ inline int num_tallies(const p2p_plan_job &job, bool flat)
{
    return num_choice_tallies(job) + (flat ? job.self.num_ranks : 0);
}

/* num_choice_tallies() for code in which KIND is a template argument. */
template <int KIND> __device__ __forceinline__ int choice_tallies(const p2p_plan_job &job)
{
    return KIND & PLAN_RARE ? num_choice_tallies(job) : (int)job.layer.num_experts;
}

/* num_tallies() for code in which KIND is a template argument. */
template <int KIND> __device__ __forceinline__ int tallies_of(const p2p_plan_job &job)
{
    return choice_tallies<KIND>(job) + (KIND & PLAN_FLAT ? job.self.num_ranks : 0);
}

/* Returns how many warps of a CTA count, if each has `tallies` counters. It is limited so that
 * the counters fit in shared memory. */
__host__ __device__ inline int planner_warps(int tallies)
{
    const int most = PLAN_TALLY_WORDS / tallies;
    return most < 3 ? 1
           : most > PLAN_MOST_WARPS
               ? PLAN_MOST_WARPS
               /* never 2, because the counters of two warps would need too much memory */
               : most;
}

/* Returns the dynamic shared memory, in bytes, of a planner whose warps have `tallies` counters
 * each. */
__host__ __device__ inline int planner_bytes(int tallies)
{
    return tallies * 4 * (3 + planner_warps(tallies)) + (tallies + 15) / 16 * 16;
}

/* Returns the largest planner_bytes() for any number of counters. It tries all numbers, because
 * planner_bytes() is not monotonic. */
static inline int planner_most_bytes(void)
{
    int most = 0;
    for (int tallies = 1; tallies <= DEVICE_MAX_TALLIES; tallies++)
        if (planner_bytes(tallies) > most) most = planner_bytes(tallies);
    return most;
}

/* Returns the dynamic shared memory, in bytes, of the planner for this job, without the arrays
 * that only layers with PLAN_RARE have. */
static inline int planner_bytes_of(const p2p_plan_job &job)
{
    return planner_bytes(num_tallies(job, job.layer.layout == EPIC_FLAT));
}

/* Which choice each lane of a warp handles. The warp handles a group of several tokens at a
 * time, one lane per choice. For a token with more than 32 choices, it does this twice: once
 * for each "half" of the token's choices. */
struct TokenLanes {
    int group_tokens,
        num_halves; /* group_tokens: number of tokens in a group; num_halves: 1 or 2 per token */
    int token, k;   /* this lane's token in the group, and its choice in the half */
    /* true: this lane handles a choice */
    bool has_choice;
    uint32_t token_lanes; /* bit mask of the lanes with the same token */

    /* Assigns choices to the lanes, for tokens with top_k choices. */
    __device__ explicit TokenLanes(int top_k)
    {
        const int lane = lane_id();
        /* This reciprocal is approximate, but for such small numbers the quotients below are
         * exact. */
        const float inverse = reciprocal_approx((float)top_k);
        group_tokens = top_k <= WARP ? (int)((WARP + 0.5f) * inverse) : 1;
        num_halves = top_k <= WARP ? 1 : 2;
        token = top_k <= WARP ? (int)(((float)lane + 0.5f) * inverse) : 0;
        k = lane - token * top_k;
        has_choice = token < group_tokens;
        token_lanes = top_k >= WARP ? ALL_LANES : ((1u << top_k) - 1) << (token * top_k % WARP);
    }
};

/* backend hosts: makes the records of this group of tokens for rank q ready to be sent, after
 * `count` words of each record have been stored. The aim is that post_put_plan() can send all
 * records of a CTA in one put. For this, every word must be valid, so the lanes without a word
 * store RECORD_ABSENT. With two halves per token, this function sends each record in its own
 * put instead. Called by one warp. */
__device__ __forceinline__ void fill_records(const OpState &op, const TokenLanes &lanes, int q,
                                             uint64_t *record, bool in, int count)
{
    if (!HOSTS) return;
    const bool mine = in && lanes.has_choice;
    if (lanes.num_halves > 1)
        return post_put_records(op, q, record, mine && lanes.k == 0, count);
    if (mine && lanes.k >= max(count, 1))
        store_relaxed(record + lanes.k, stamp_word(op, RECORD_ABSENT));
}

/* Returns the number of ids that the caller can choose from: logical experts if the layer has
 * them, else experts. */
__device__ __forceinline__ int num_ids(const p2p_plan_job &job)
{
    return (int)(job.layer.num_logical ? job.layer.num_logical : job.layer.num_experts);
}

/* Returns the id that the caller passed for choice number i of this rank. */
__device__ __forceinline__ int64_t read_id(const p2p_plan_job &job, int64_t i)
{
    return job.has_int64_ids ? __ldg((const long long *)job.topk_idx + i)
                             : __ldg((const int32_t *)job.topk_idx + i);
}

struct TokenRange { /* the tokens whose choices a warp handles */
    int32_t begin, end;
};

/* Sets how many tokens each planner CTA and each of its warps handles. Called by one thread. */
__device__ __forceinline__ void split_tokens(Planner &p, const p2p_plan_job &job, int warps)
{
    p.tokens_per_cta = (job.num_tokens + job.planners - 1) / job.planners;
    p.tokens_per_warp = (p.tokens_per_cta + warps - 1) / warps;
}

/* Returns the range of tokens of this warp. It is empty for warps that do not count. */
__device__ __forceinline__ TokenRange range_of_warp(const Planner &p, const p2p_plan_job &job)
{
    const int warp = threadIdx.x / WARP;
    const int cta_end = min(job.num_tokens, (int)(blockIdx.x + 1) * p.tokens_per_cta);
    TokenRange range;
    range.begin = (int)blockIdx.x * p.tokens_per_cta + warp * p.tokens_per_warp;
    range.end = min(cta_end, range.begin + p.tokens_per_warp);
    if (warp >= p.num_warps) range.begin = range.end = 0;
    return range;
}

/* Sets up the planner: the pointers to arrays in `memory`, all counters as 0, and the owner of
 * every expert. `memory` has at least planner_bytes_of() bytes. Called by all threads of the
 * CTA. */
template <int KIND>
static __device__ void begin_planner(Planner &p, const p2p_plan_job &job, uint8_t *memory)
{
    const int experts = job.layer.num_experts, ranks = job.self.num_ranks;
    const int choices = choice_tallies<KIND>(job), tallies = tallies_of<KIND>(job);
    const int warps = min((int)blockDim.x / WARP, planner_warps(tallies));
    if (threadIdx.x == 2 * WARP) split_tokens(p, job, warps);
    if (threadIdx.x == 0) {
        p.num_warps = warps;
        p.before_cta = (int32_t *)memory;
        p.load = p.before_cta + tallies;
        p.rows_before_cta = p.before_cta + choices;
        p.needed_rows = p.load + choices;
        p.slab_start = p.load + tallies;
        p.tally = p.slab_start + tallies;
        p.owner = (uint8_t *)(p.tally + p.num_warps * tallies);
        p.rare_memory = p.owner + (tallies + 15) / 16 * 16;
        p.bad_choice = p.bad_owner = p.bad_replica = NO_INDEX;
        p.table_hash = 0;
        p.bad_ranks = 0;
        p.header.result = EPIC_OK;
        p.header.num_local = 0;
    }
    if (threadIdx.x < DEVICE_MAX_RANKS) {
        p.header.slots_of[threadIdx.x] = 0;
        p.keep_limit[threadIdx.x] = 0x7fffffff;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.num_warps * tallies; i += blockDim.x) p.tally[i] = 0;
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

#endif
