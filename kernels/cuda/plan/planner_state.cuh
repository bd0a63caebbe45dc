/* SPDX-License-Identifier: Apache-2.0 */
/* State of the planner (struct Planner), and which warp plans which tokens.
 *
 * The first `planners` CTAs of a kernel make the plan. CTA c has the c-th part of this rank's
 * tokens, and its warp w has the w-th part of those. A warp handles several tokens side by
 * side, one lane per choice:
 *
 *   num_tallies, tallies_of     how many counters a warp has: by expert, by k, by rank
 *   planner_warps               how many warps of a CTA count
 *   planner_bytes               how much shared memory their counters need
 *   TokenLanes                  which lane has which token and choice
 *   split_tokens, TokenRange    which warp has which tokens
 *   begin_planner               sets up the arrays, zero counts, and the owner of every expert
 *
 * Planning is compiled for each KIND of layer, so that rare features cost other layers
 * nothing. */
#ifndef EPIC_PLANNER_STATE_CUH
#define EPIC_PLANNER_STATE_CUH

#include "cuda/plan/view.cuh"

/* Value of an index that does not exist. */
#define NO_INDEX 0xffffffffu
#define RANKS_AT_ONCE 8
#define PLAN_MOST_WARPS 16 /* largest number of warps of a CTA that count */
/* largest number of warps that count, times the number of counters */
#define PLAN_TALLY_WORDS 16384

enum { /* bits of the template argument KIND */
       /* the layout is EPIC_FLAT */
       PLAN_FLAT = 1,
       PLAN_RARE = 2 /* the layer has replicas or may drop choices */
};

/* State of the planner, in shared memory. Pointers are to arrays in dynamic shared memory, set
 * by begin_planner(). A tally is a counter of the choices of one expert; num_tallies() lists
 * the counters. */
struct Planner {
    device_plan_header header;
    /* [num_tallies] choices on lower ranks and in lower CTAs of this rank */
    int32_t *low;
    int32_t *load; /* [num_tallies] choices on all ranks */
    /* FLAT: like low and load, but of the rows for each rank, [num_ranks] */
    int32_t *row_low, *row_load;
    /* [num_experts] first slot on the expert's rank; FLAT: the local expert number */
    int32_t *start;
    int32_t *tally; /* [warps][num_tallies] choices in lower warps of this CTA */
    uint8_t *owner; /* [num_tallies] rank that owns the expert */
    uint8_t *rare;  /* further arrays for layers with PLAN_RARE */
    /* largest number of choices that each expert of a rank may keep, so that the rank's slots
     * suffice */
    int32_t common[DEVICE_MAX_RANKS];
    /* slots that all choices together would need on each rank */
    int32_t demand[DEVICE_MAX_RANKS];
    /* slots of each rank; 0: no bound */
    int32_t capacity[DEVICE_MAX_RANKS];
    /* FLAT: bounds of the search for `common`: fits suffices, fails does not */
    int32_t fits[DEVICE_MAX_RANKS], fails[DEVICE_MAX_RANKS];
    /* slots that each rank needs after expert_capacity has dropped choices */
    int64_t needed[DEVICE_MAX_RANKS];
    /* Index of this CTA's first wrong choice, or NO_INDEX. A choice is wrong if its id is too
     * large. With EPIC_DISTINCT it is also wrong if its token has chosen the same id before. */
    uint32_t bad_choice;
    uint32_t bad_owner;    /* lowest expert with an invalid rank; NO_INDEX: none */
    int32_t *base, *taken; /* EPIC_BY_K only: described in plan/keep_by_k.cuh */
    int32_t *chosen;       /* replicas only: described in plan/replicas.cuh */
    /* replicas only: described in plan/replicas.cuh */
    uint16_t *logical, *nth, *first, *replica;
    uint32_t table; /* replicas only: hash of logical_of_expert */
    /* Lowest expert whose entry of logical_of_expert is invalid. If all entries are valid:
     * num_experts + the lowest logical expert without replicas. NO_INDEX: neither exists. */
    uint32_t bad_replica;
    uint32_t bad_ranks; /* bits of the ranks whose choices or tables are wrong */
    /* warps of a CTA that count; tokens of a CTA; tokens of a warp */
    int32_t warps, tokens_of_cta, tokens_of_warp;
};

/* Returns the number of counters for choices: one per expert, or with EPIC_BY_K one per expert
 * and k. */
__host__ __device__ inline int num_choice_tallies(const p2p_plan_job &job)
{
    return (int)(job.layer.num_experts * (job.by_k ? job.layer.top_k : 1));
}

/* Returns the number of all counters. FLAT has one more counter per rank, after those of
 * choices. It counts rows as if each rank were an expert that a token chooses at most once. */
__host__ __device__ inline int num_tallies(const p2p_plan_job &job, bool flat)
{
    return num_choice_tallies(job) + (flat ? job.self.num_ranks : 0);
}

/* Like num_choice_tallies(), with KIND known to the compiler. */
template <int KIND> __device__ __forceinline__ int choice_tallies(const p2p_plan_job &job)
{
    return KIND & PLAN_RARE ? num_choice_tallies(job) : (int)job.layer.num_experts;
}

/* Like num_tallies(), with KIND known to the compiler. */
template <int KIND> __device__ __forceinline__ int tallies_of(const p2p_plan_job &job)
{
    return choice_tallies<KIND>(job) + (KIND & PLAN_FLAT ? job.self.num_ranks : 0);
}

/* Returns how many warps of a CTA count, so that their counters fit in shared memory. */
__host__ __device__ inline int planner_warps(int tallies)
{
    const int most = PLAN_TALLY_WORDS / tallies;
    return most < 3 ? 1
           : most > PLAN_MOST_WARPS
               ? PLAN_MOST_WARPS
               : most; /* never 2, whose counters would need too much memory */
}

/* Returns the dynamic shared memory, in bytes, of a planner with this many counters. */
__host__ __device__ inline int planner_bytes(int tallies)
{
    return tallies * 4 * (3 + planner_warps(tallies)) + (tallies + 15) / 16 * 16;
}

/* Returns the largest planner_bytes() for any number of counters. The function is not
 * monotonic. */
static inline int planner_most_bytes(void)
{
    int most = 0;
    for (int tallies = 1; tallies <= DEVICE_MAX_TALLIES; tallies++)
        if (planner_bytes(tallies) > most) most = planner_bytes(tallies);
    return most;
}

/* Returns the dynamic shared memory, in bytes, of the planner for this job, without the further
 * arrays of layers with PLAN_RARE. */
static inline int planner_bytes_of(const p2p_plan_job &job)
{
    return planner_bytes(num_tallies(job, job.layer.layout == EPIC_FLAT));
}

/* How a warp handles choices: several tokens side by side, one lane per choice. A token with
 * more than 32 choices takes two steps ("halves"). */
struct TokenLanes {
    int tokens, halves; /* number of tokens side by side; 1 or 2 halves per token */
    int token, k;       /* this lane's token (0 is the first of the group) and choice */
    /* true: this lane has a choice */
    bool on;
    uint32_t mates; /* bits of the lanes with the same token */

    /* Assigns the lanes, for tokens with top_k choices. */
    __device__ explicit TokenLanes(int top_k)
    {
        const int lane = lane_id();
        /* approximate, but the quotients below are exact for numbers this small */
        const float part = reciprocal_approx((float)top_k);
        tokens = top_k <= WARP ? (int)((WARP + 0.5f) * part) : 1;
        halves = top_k <= WARP ? 1 : 2;
        token = top_k <= WARP ? (int)(((float)lane + 0.5f) * part) : 0;
        k = lane - token * top_k;
        on = token < tokens;
        mates = top_k >= WARP ? ALL_LANES : ((1u << top_k) - 1) << (token * top_k % WARP);
    }
};

/* backend hosts: completes records for rank q, after send_records() has stored `count` words of
 * each. Lanes that have no word store RECORD_ABSENT. Then all words of a CTA's records are
 * valid, and post_put_plan() sends them in one put. Records of two halves are not filled up:
 * each is sent here, by its own put. Called by one warp. */
__device__ __forceinline__ void fill_records(const OpState &op, const TokenLanes &lanes, int q,
                                             uint64_t *record, bool in, int count)
{
    if (!HOSTS) return;
    const bool mine = in && lanes.on;
    if (lanes.halves > 1) return post_put_records(op, q, record, mine && lanes.k == 0, count);
    if (mine && lanes.k >= max(count, 1))
        store_relaxed(record + lanes.k, stamp_word(op, RECORD_ABSENT));
}

/* Returns the number of valid ids that the caller may pass: logical experts, or experts. */
__device__ __forceinline__ int num_ids(const p2p_plan_job &job)
{
    return (int)(job.layer.num_logical ? job.layer.num_logical : job.layer.num_experts);
}

/* Returns the id of choice number i of this rank, as the caller passed it. */
__device__ __forceinline__ int64_t read_id(const p2p_plan_job &job, int64_t i)
{
    return job.has_int64_ids ? __ldg((const long long *)job.topk_idx + i)
                             : __ldg((const int32_t *)job.topk_idx + i);
}

struct TokenRange { /* the tokens that a warp counts and places */
    int32_t begin, end;
};

/* Splits this rank's tokens among planner CTAs and their warps. Called by one thread. */
__device__ __forceinline__ void split_tokens(Planner &p, const p2p_plan_job &job, int warps)
{
    p.tokens_of_cta = (job.num_tokens + job.planners - 1) / job.planners;
    p.tokens_of_warp = (p.tokens_of_cta + warps - 1) / warps;
}

/* Returns the tokens of this warp; none for warps that do not count. */
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

/* Sets up the planner: arrays in `memory` (planner_bytes_of()), zero counts, and the owner of
 * every expert. All threads. */
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

#endif
