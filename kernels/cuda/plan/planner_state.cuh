/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's state (struct Planner), and which warp and lane handles which choice.
 *
 * A *choice* is a token and one of its top_k experts. A tally is a counter of a warp. Tally e
 * counts the choices of expert e. With EPIC_BY_K, tally k * num_experts + e counts the choices
 * of expert e with this k. With layout FLAT, one more tally follows for each rank of the group.
 * It counts the rows that the tokens need on that rank. The planner CTAs are the first
 * job.planners CTAs of a kernel. They make the plan together.
 *
 * This rank's tokens are divided among the planner CTAs, and the tokens of a CTA are divided
 * among its warps. A warp handles several tokens at a time, one choice per lane:
 *
 *   num_tallies, tallies_of     number of tallies of a warp
 *   planner_warps               number of warps of a CTA that count
 *   planner_bytes               size in bytes of the shared memory for the arrays of Planner
 *   TokenLanes                  which token and choice each lane handles
 *   split_tokens, TokenRange    which tokens each warp handles
 *   begin_planner               sets up the arrays, zeroes the tallies, finds experts' ranks
 *
 * The planner is compiled separately for each value of FEATURES (PLAN_FLAT,
 * PLAN_DROPS_OR_REPLICAS). So layers without replicas and without dropping do not execute the
 * code for these features. */
#ifndef EPIC_PLANNER_STATE_CUH
#define EPIC_PLANNER_STATE_CUH

#include "cuda/plan/view.cuh"

/* value of bad_choice, bad_owner and bad_replica if nothing is wrong */
#define NO_INDEX 0xffffffffu
/* number of ranks whose counts a thread loads together, so that the loads overlap */
#define RANKS_AT_ONCE 8
#define PLAN_MOST_WARPS 16 /* maximum number of warps per CTA that count choices */
/* maximum number of tallies (4-byte counters) that all warps of a CTA have together */
#define PLAN_TALLY_WORDS 16384

enum { /* Bits of the template argument FEATURES: features that the layer uses. */
       /* the layer's layout is EPIC_FLAT */
       PLAN_FLAT = 1,
       PLAN_DROPS_OR_REPLICAS = 2 /* the layer has replicas or drops choices */
};

#ifndef LISTED_TOKENS
/* Number of tokens that a CTA handles at a time while it expands a list of records
 * (plan/record_lists.cuh). The tests use a smaller number. */
#define LISTED_TOKENS 4096
#endif

/* Memory in which a CTA notes which tokens are in a list of records. */
struct ListedTokens {
    uint32_t size;                     /* number of entries of the list */
    uint32_t bits[LISTED_TOKENS / 32]; /* bit i: token i of the tokens at hand is in it */
};

/* The planner's state, in the shared memory of each planner CTA. Its pointers refer to arrays
 * in dynamic shared memory. */
struct Planner {
    device_plan_header header;
    /* [num_tallies]: for each tally, the count for all tokens before the tokens of this CTA.
     * These earlier tokens are on lower ranks, or belong to lower CTAs of this rank. Before
     * choices are counted, resolve_replicas() keeps other counts in this memory. */
    int32_t *before_cta;
    /* [num_tallies]: for each tally, the sum over all warps of all ranks. With EPIC_BY_K,
     * prepare_by_k() later sets the pointer to another array, [num_experts]: the number of
     * choices of each expert, summed over k. */
    int32_t *load;
    /* Only with FLAT: the last num_ranks elements of before_cta and of load. rows_before_cta:
     * for each rank, the number of rows that earlier tokens (those of lower ranks and lower
     * CTAs) have there. needed_rows: for each rank, the number of rows that all tokens need
     * there. */
    int32_t *rows_before_cta, *needed_rows;
    union { /* [num_experts]: the type of planner and the layout decide which member is used */
        /* EXPERT_MAJOR: first slot of the expert on its rank */
        int32_t *slab_start;
        /* FLAT, which has no slabs: index of the expert among the experts of its rank */
        int32_t *local_expert;
    };
    /* [num_warps][num_tallies]: the tallies of each warp. publish_tallies() replaces them by
     * their exclusive prefix sums over the warps of this CTA. */
    int32_t *tally;
    /* [num_tallies]: if the tally counts choices of an expert, the rank that owns this expert;
     * if the tally counts rows, the rank that has these rows */
    uint8_t *owner;
    /* memory after these arrays; only layers with PLAN_DROPS_OR_REPLICAS use it */
    uint8_t *extra_memory;
    /* for each rank, the maximum number of choices that each of its experts may keep; 2^31 - 1:
     * no limit */
    int32_t keep_limit[DEVICE_MAX_RANKS];
    /* for each rank, the number of slots that it would need if no choice were dropped */
    int32_t demand[DEVICE_MAX_RANKS];
    /* for each rank, the number of slots that it may use in its receive buffer; 0: no limit */
    int32_t capacity[DEVICE_MAX_RANKS];
    /* Only FLAT layers that drop choices: bounds of the bisection for keep_limit. With a keep
     * limit of limit_fits[q], the rows of rank q fit into its capacity. With a keep limit of
     * limit_fails[q], they do not fit. */
    int32_t limit_fits[DEVICE_MAX_RANKS], limit_fails[DEVICE_MAX_RANKS];
    /* for each rank, the number of slots that it needs after expert_capacity has dropped
     * choices */
    int64_t needed_slots[DEVICE_MAX_RANKS];
    /* Lowest index (token * top_k + k) of the wrong choices that this CTA has found, or
     * NO_INDEX. A choice is wrong if its id is too large or, with EPIC_DISTINCT, if an earlier
     * choice of the same token has the same id. */
    uint32_t bad_choice;
    /* Lowest expert whose entry in rank_of_expert is invalid, or NO_INDEX. A vacant seat (a
     * rank that has left the group) is invalid, unless the layer has replicas or drops the
     * choices of absent experts. check_tree_blocks() describes the rule with EPIC_TREE. */
    uint32_t bad_owner;
    /* arrays that only EPIC_BY_K uses: see plan/keep_by_k.cuh */
    int32_t *lower_k_count, *kept_before;
    /* arrays of layers with replicas: see plan/replicas.cuh */
    int32_t *logical_load;
    uint16_t *logical_of, *replica_index, *first_replica, *replicas;
    /* layers with replicas: hash of the caller's table logical_of_expert */
    uint32_t table_hash;
    /* Only layers with replicas: the lowest expert with an invalid entry in logical_of_expert.
     * If all entries are valid: num_experts plus the lowest logical expert without a replica.
     * If nothing is wrong: NO_INDEX. */
    uint32_t bad_replica;
    /* memory for expanding lists of records (plan/record_lists.cuh) */
    __extension__ ListedTokens listed[WITH_LISTS];
    RankMask bad_ranks; /* the ranks whose choices or tables are wrong */
    /* num_warps: number of warps of a CTA that count choices. tokens_per_cta: number of this
     * rank's tokens that a planner CTA handles. tokens_per_warp: number of tokens that one of
     * these warps handles. */
    int32_t num_warps, tokens_per_cta, tokens_per_warp;
};

/* Returns how many tallies of choices a warp has: one per expert or, with EPIC_BY_K, one per
 * pair of expert and k. */
__host__ __device__ inline int num_choice_tallies(const p2p_plan_job &job)
{
    return (int)(job.layer.num_experts * (job.by_k ? job.layer.top_k : 1));
}

/* Returns how many tallies a warp has in all. `flat`: true with layout FLAT, which adds one
 * tally per rank. */
__host__ __device__ inline int num_tallies(const p2p_plan_job &job, bool flat)
{
    return num_choice_tallies(job) + (flat ? job.self.num_ranks : 0);
}

/* Returns num_choice_tallies(job). Reads job.by_k only with PLAN_DROPS_OR_REPLICAS, because
 * other layers do not use EPIC_BY_K. */
template <int FEATURES> __device__ __forceinline__ int choice_tallies(const p2p_plan_job &job)
{
    return FEATURES & PLAN_DROPS_OR_REPLICAS ? num_choice_tallies(job)
                                             : (int)job.layer.num_experts;
}

/* Returns num_tallies(job, flat), where FEATURES decides at compile time whether the layout is
 * FLAT. */
template <int FEATURES> __device__ __forceinline__ int tallies_of(const p2p_plan_job &job)
{
    return choice_tallies<FEATURES>(job) + (FEATURES & PLAN_FLAT ? job.self.num_ranks : 0);
}

/* Returns how many warps of a CTA count choices if each warp has `tallies` tallies. With many
 * tallies, fewer warps count, because the tallies of all warps must fit in shared memory. */
__host__ __device__ inline int planner_warps(int tallies)
{
    const int most = PLAN_TALLY_WORDS / tallies;
    return most < 3 ? 1
           : most > PLAN_MOST_WARPS
               ? PLAN_MOST_WARPS
               /* The result is never 2. If each of two warps had the maximum number of tallies,
                * the arrays of Planner would need too much shared memory. */
               : most;
}

/* Returns the size in bytes of the arrays of Planner if each warp has `tallies` tallies. */
__host__ __device__ inline int planner_bytes(int tallies)
{
    return tallies * 4 * (3 + planner_warps(tallies)) + (tallies + 15) / 16 * 16;
}

/* Returns the largest value of planner_bytes() for any layer. The host lets the kernels use
 * this much dynamic shared memory. The function tries every number of tallies, because
 * planner_bytes() may be smaller with more tallies: fewer warps then count. */
static inline int planner_most_bytes(void)
{
    int most = 0;
    for (int tallies = 1; tallies <= DEVICE_MAX_TALLIES; tallies++)
        if (planner_bytes(tallies) > most) most = planner_bytes(tallies);
    return most;
}

/* Returns the size in bytes of the dynamic shared memory for this job, without the arrays that
 * only layers with PLAN_DROPS_OR_REPLICAS have. */
static inline int planner_bytes_of(const p2p_plan_job &job)
{
    return planner_bytes(num_tallies(job, job.layer.layout == EPIC_FLAT));
}

/* Assigns choices to the lanes of a warp. A warp handles a group of tokens at a time, with one
 * choice per lane. For example, with top_k = 8 it handles four tokens, and lane 11 has choice 3
 * of token 1. With more than 32 choices, the warp handles one token at a time, in two *chunks*:
 * choices 0 to 31 (chunk 0), then choices 32 and up (chunk 1). */
struct TokenLanes {
    /* tokens_at_once: number of tokens that the warp handles at a time (a *group*).
     * num_chunks: 1, or 2 if tokens have more than 32 choices. */
    int tokens_at_once, num_chunks;
    /* token: index of this lane's token in its group. k: the lane has choice k of this token in
     * chunk 0, and choice k + 32 in chunk 1. */
    int token, k;
    /* false: this lane has no choice, because it is one of the last 32 % top_k lanes */
    bool has_choice;
    /* bit mask of the lanes that handle choices of the same token as this lane */
    uint32_t token_lanes;

    __device__ explicit TokenLanes(int top_k)
    {
        const int lane = lane_id();
        /* reciprocal_approx() is not exact. The quotients below are still exact after
         * truncation, because all values are at most 32. */
        const float inverse = reciprocal_approx((float)top_k);
        tokens_at_once = top_k <= WARP ? (int)((WARP + 0.5f) * inverse) : 1;
        num_chunks = top_k <= WARP ? 1 : 2;
        token = top_k <= WARP ? (int)(((float)lane + 0.5f) * inverse) : 0;
        k = lane - token * top_k;
        has_choice = token < tokens_at_once;
        token_lanes = top_k >= WARP ? ALL_LANES : ((1u << top_k) - 1) << (token * top_k % WARP);
    }
};

/* Only in backend `hosts`, without lists (plan/record_lists.cuh): completes the records that
 * this warp has just stored for rank q, so that they can be sent. A record contains the slots of
 * one token on rank q. `count`: number of words in the record of this lane's token.
 *
 * If tokens have at most 32 choices, post_put_plan() later sends the records of the whole CTA
 * with one put (copy over the net). This put sends all top_k words of each record, and the
 * receiver waits for all of them. So fill_records() sets the words after the first `count` to
 * RECORD_ABSENT. If tokens have more than 32 choices, fill_records() instead posts one put per
 * record, with `count` words.
 *
 * `record`: address of the record of this lane's token; valid only if `in` is true. Called by
 * one warp. */
__device__ __forceinline__ void fill_records(const OpState &op, const TokenLanes &lanes, int q,
                                             uint64_t *record, bool in, int count)
{
    if (!HOSTS || relays_words(*op.self)) return;
    const bool mine = in && lanes.has_choice;
    if (lanes.num_chunks > 1)
        return post_put_records(op, q, record, mine && lanes.k == 0, count);
    if (mine && lanes.k >= max(count, 1))
        store_relaxed(record + lanes.k, stamp_word(op, RECORD_ABSENT));
}

/* The valid ids in the caller's topk_idx are 0 to n - 1. Returns n: the number of logical
 * experts if the layer has replicas, otherwise the number of experts. */
__device__ __forceinline__ int num_ids(const p2p_plan_job &job)
{
    return (int)(job.layer.num_logical ? job.layer.num_logical : job.layer.num_experts);
}

/* Returns the expert id of choice i = token * top_k + k from the caller's topk_idx. */
__device__ __forceinline__ int64_t read_id(const p2p_plan_job &job, int64_t i)
{
    return job.has_int64_ids ? __ldg((const long long *)job.topk_idx + i)
                             : __ldg((const int32_t *)job.topk_idx + i);
}

struct TokenRange { /* The tokens [begin, end) of this rank whose choices a warp handles. */
    int32_t begin, end;
};

/* Sets p.tokens_per_cta and p.tokens_per_warp: how many tokens each planner CTA, and each of
 * its counting warps, handles. `warps`: number of counting warps. Called by one thread. */
__device__ __forceinline__ void split_tokens(Planner &p, const p2p_plan_job &job, int warps)
{
    p.tokens_per_cta = (job.num_tokens + job.planners - 1) / job.planners;
    p.tokens_per_warp = (p.tokens_per_cta + warps - 1) / warps;
}

/* Returns the tokens that this warp handles. The range is empty if the warp does not count
 * choices. */
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

/* Returns whether the leaves of the sum tree can be divided equally among the members of the
 * group. Only useful with EPIC_TREE and WITH_VACANT_SEATS. The host checks the leaves, too, but
 * ranks may have left the group after it captured this call in a CUDA graph. */
__device__ __forceinline__ bool has_leaves_of_members(const p2p_plan_job &job,
                                                      const OpState &op)
{
    const int leaves = (int)job.layer.leaves, members = num_members(job.self, op);
    return leaves % members == 0 && leaves / members <= P2P_MOST_LEAVES;
}

/* Only with EPIC_TREE: the experts form as many equal blocks as there are members, and each
 * member must own one block. Sets p.bad_owner to the lowest expert for which this is wrong. If
 * the leaves cannot be divided among the members, sets it to 0. Does nothing if rank_of_expert
 * has values that are not ranks. Called by all threads of the CTA when p.owner is complete. */
static __device__ __noinline__ void check_tree_blocks(Planner &p, const p2p_plan_job &job,
                                                      const OpState &op)
{
    const int experts = job.layer.num_experts, block = experts / num_members(job.self, op);
    if (!__syncthreads_and(p.bad_owner == NO_INDEX)) return;
    if (WITH_VACANT_SEATS && threadIdx.x == 0 && !has_leaves_of_members(job, op))
        p.bad_owner = 0;
    for (int e = threadIdx.x; e < experts && block; e += blockDim.x) {
        const int first = e - e % block, owner = p.owner[e];
        bool is_wrong = is_vacant(op, owner) || owner != p.owner[first];
        for (int f = 0; f < first && e == first; f += block) is_wrong |= owner == p.owner[f];
        if (is_wrong) atomicMin(&p.bad_owner, (uint32_t)e);
    }
}

/* Sets up the planner: sets its pointers to arrays in `memory` (planner_bytes_of() bytes of
 * shared memory), zeroes the tallies, and stores in p.owner which rank owns each expert. Called
 * by all threads of the CTA. */
template <int FEATURES>
static __device__ void begin_planner(Planner &p, const p2p_plan_job &job, const OpState &op,
                                     uint8_t *memory)
{
    const int experts = job.layer.num_experts, ranks = job.self.num_ranks;
    const int choices = choice_tallies<FEATURES>(job), tallies = tallies_of<FEATURES>(job);
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
        p.extra_memory = p.owner + (tallies + 15) / 16 * 16;
        p.bad_choice = p.bad_owner = p.bad_replica = NO_INDEX;
        p.table_hash = 0;
        p.bad_ranks = no_ranks();
        p.header.result = EPIC_OK;
        p.header.num_local = 0;
    }
    if (threadIdx.x < DEVICE_MAX_RANKS) {
        p.header.slots_of[threadIdx.x] = 0;
        p.keep_limit[threadIdx.x] = 0x7fffffff;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.num_warps * tallies; i += blockDim.x) p.tally[i] = 0;
    for (int q = threadIdx.x; FEATURES & PLAN_FLAT && q < ranks; q += blockDim.x)
        p.owner[choices + q] = (uint8_t)q;
    const int block = experts / ranks;
    /* with EPIC_TREE, check_tree_blocks() finds experts on vacant seats */
    const bool is_tree = job.layer.sum_order == EPIC_TREE;
    const bool may_be_vacant =
        is_tree || job.layer.num_logical || job.layer.flags & EPIC_DROP_ABSENT;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int owner = job.rank_of_expert ? job.rank_of_expert[e] : e / block;
        const bool is_rank = owner >= 0 && owner < ranks;
        if (!is_rank) owner = 0;
        if (!is_rank || (!may_be_vacant && is_vacant(op, owner)))
            atomicMin(&p.bad_owner, (uint32_t)e);
        for (int i = e; i < choices; i += experts) p.owner[i] = (uint8_t)owner;
    }
    __syncthreads();
    if (is_tree) check_tree_blocks(p, job, op);
}

#endif
