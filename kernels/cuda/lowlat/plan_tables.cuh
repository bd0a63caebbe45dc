/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of a plan for few tokens, in shared memory. lowlat/plan.cuh fills them in, in each
 * CTA.
 *
 *   id       ids of all choices of all ranks
 *   mask     for each expert and group of 32 tokens of a rank: bits of the tokens that chose it
 *   before   number of choices of the expert in earlier groups
 *   start    first slot of the expert's slab
 *
 * The slot of a choice is start + before + the number of lower bits in the mask. A mask has one
 * bit per token, so it cannot express that a token chooses an expert twice. If a token does so,
 * all slots are counted choice by choice, which is slow. */
#ifndef EPIC_LOWLAT_PLAN_TABLES_CUH
#define EPIC_LOWLAT_PLAN_TABLES_CUH

#include "cuda/dispatch/dispatch.cuh"
#include "cuda/lowlat/lowlat.cuh"

#define LOWLAT_NO_ID 0xffffu      /* id of a choice without an expert */
#define LOWLAT_INVALID_ID 0xfffeu /* id of a choice that is out of range */
#define LOWLAT_LANE_IDS 4         /* ids that a lane handles at a time */
/* Largest dynamic shared memory of the tables. There are at most 8192 ids, of at most 4096
 * tokens; each token's ids are rounded up to a multiple of four. */
#define LOWLAT_PLAN_MAX_BYTES \
    (P2P_LOWLAT_MASKS * 6 + LOWLAT_WORKERS * WARP * 8 + P2P_LOWLAT_CHOICES * 2 * 2 + 16)

struct PlanVerdict { /* the result of a plan, equal on all ranks */
    uint32_t result;
    bool short_of_rows; /* true: the plan is valid, but a rank has fewer rows than slots */
};

/* The tables of the plan, in shared memory. Pointers are to arrays in dynamic shared memory. */
struct LowlatPlan {
    /* Members of Planner that are used: load, start, capacity, bad_ranks, header. Here `start`
     * counts slots over all ranks: the first slot of rank 1 follows the last one of rank 0. */
    Planner p;
    /* [groups of all ranks][num_experts] bits of the tokens of a group that chose the expert */
    uint32_t *mask;
    /* [groups of all ranks][num_experts] choices of the expert in earlier groups */
    uint16_t *before;
    uint16_t *id; /* [num_ranks][most][fours * LOWLAT_LANE_IDS] ids of all choices */
    /* number of tokens of each rank */
    int32_t tokens[DEVICE_MAX_RANKS];
    int32_t rows[DEVICE_MAX_RANKS]; /* number of rows of each rank's receive buffer */
    /* first choice of each rank with an invalid id, or NO_INDEX */
    uint32_t bad[DEVICE_MAX_RANKS];
    int32_t upto[LOWLAT_WORKERS]; /* sum of the rows of all experts that warps 0 to w count */
    int32_t slots;                /* slots of all ranks */
    /* largest number of tokens of a rank; number of groups of 32 tokens per rank */
    int32_t most, groups;
    /* experts and top_k of the layer; fours: lanes per token, of four ids each */
    int32_t experts, top_k, fours;
    bool twice;          /* true: some token chose an expert twice */
    bool has_large_rank; /* true: some rank has more than `most` tokens */

    /* Returns the index in `id` of a token's first id. */
    __device__ __forceinline__ int first_id_index(int rank, int32_t token) const
    {
        return (rank * most + token) * fours * LOWLAT_LANE_IDS;
    }
    /* Returns the slot of choice k of a token on its expert's rank. Slots are in the order of
     * rank, token and k. e: the expert; first: the first expert of e's rank. */
    __device__ __forceinline__ int32_t slot_of(int rank, int32_t token, int k, int e,
                                               int first) const
    {
        const int at = (rank * groups + token / WARP) * experts + e;
        const int32_t begin = p.start[e] - p.start[first];
        if (!twice) return begin + before[at] + __popc(mask[at] & ((1u << token % WARP) - 1));
        return begin + count_before(rank, token * fours * LOWLAT_LANE_IDS + k, (uint16_t)e);
    }
    /* Returns the number of choices of the expert on lower ranks, plus those among the first
     * `choices` ids of `rank`. Slow: for tokens that chose an expert twice. */
    __device__ __noinline__ int count_before(int rank, int choices, uint16_t expert) const
    {
        int count = 0;
        for (int q = 0; q <= rank; q++) {
            const int first = first_id_index(q, 0),
                      many = q < rank ? tokens[q] * fours * LOWLAT_LANE_IDS : choices;
            for (int i = 0; i < many; i++) count += id[first + i] == expert;
        }
        return count;
    }
    /* Returns the expert of choice k of a token, as its rank has sent it. LOWLAT_NO_ID past the
     * last choice. */
    __device__ __forceinline__ uint32_t choice_of(int rank, int32_t token, int k) const
    {
        return k < top_k ? id[first_id_index(rank, token) + k] : LOWLAT_NO_ID;
    }
    /* Returns the slot of choice k of a token if its expert is on this rank, else -1. */
    __device__ __forceinline__ int32_t slot_here(const p2p_plan_job &job, int rank,
                                                 int32_t token, int k) const
    {
        const uint32_t e = choice_of(rank, token, k);
        const int first = job.self.rank * job.block;
        const bool here = e - (uint32_t)first < (uint32_t)job.block;
        return here ? slot_of(rank, token, k, (int)e, first) : -1;
    }
    /* Returns the number of slots of all ranks below q; for q = num_ranks, of all ranks. */
    __device__ __forceinline__ int32_t slots_before(const p2p_plan_job &job, int q) const
    {
        const int e = q * job.block;
        return e < experts ? p.start[e] : slots;
    }
    /* Writes a token's record to the plan; for a token of this rank, also fates and ranks.
     * Called by one warp. `slot`: lane k has what slot_here() returned for choice k. `here`:
     * bits of the lanes with a slot. `result`: of the plan. */
    __device__ __forceinline__ void store_token(const p2p_plan_job &job, int rank,
                                                int32_t token, int32_t slot, uint32_t here,
                                                uint32_t result) const
    {
        const int k = lane_id(), n = __popc(here & lanes_below());
        const bool good = result == EPIC_OK;
        int32_t *record =
            (int32_t *)(job.plan + job.at.records) + record_index(job.self, rank, token, top_k);
        if (k < top_k)
            record[slot >= 0 ? n : __popc(here) + k - n] = slot >= 0 && good ? slot : -1;
        if (rank != job.self.rank || k >= top_k) return;
        const uint32_t e = choice_of(rank, token, k);
        const bool valid = e < (uint32_t)experts;
        const int owner = valid ? (int)(e / (uint32_t)job.block) : -1;
        int32_t fate = EPIC_FATE_NONE;
        if (valid && good) fate = slot_of(rank, token, k, (int)e, owner * job.block);
        if (valid && result == EPIC_EOVERFLOW) fate = EPIC_FATE_RANK_FULL;
        const int64_t choice_at = (int64_t)token * top_k + k;
        ((int32_t *)(job.plan + job.at.fate))[choice_at] = fate;
        ((int32_t *)(job.plan + job.at.rank_of))[choice_at] = good ? owner : -1;
    }
};

/* Returns the number of lanes per token, each with LOWLAT_LANE_IDS ids. */
__host__ __device__ __forceinline__ int fours_of(const epic_layer &layer)
{
    return ((int)layer.top_k + LOWLAT_LANE_IDS - 1) / LOWLAT_LANE_IDS;
}

/* Returns the dynamic shared memory, in bytes, of this planner. It also suffices for
 * plan/planner.cuh if the plan may be mixed. */
static inline int lowlat_plan_bytes(const p2p_plan_job &job)
{
    const int64_t ranks = job.self.num_ranks, experts = job.layer.num_experts;
    const int64_t masks = ranks * ((job.max_lowlat_tokens + WARP - 1) / WARP) * experts;
    const int64_t ids = ranks * job.max_lowlat_tokens * fours_of(job.layer) * LOWLAT_LANE_IDS;
    const int bytes = (int)(masks * 6 + experts * 8 + ids * 2 + 16);
    const int other = job.self.max_tokens > job.max_lowlat_tokens ? planner_bytes_of(job) : 0;
    return bytes > other ? bytes : other;
}

/* Sets up empty tables in `memory` (lowlat_plan_bytes()). All threads, before the first
 * barrier. */
static __device__ void open_tables(LowlatPlan &f, const p2p_plan_job &job, uint8_t *memory)
{
    const int experts = (int)job.layer.num_experts, ranks = job.self.num_ranks;
    const int groups = (job.max_lowlat_tokens + WARP - 1) / WARP;
    const int masks = ranks * groups * experts;
    uint32_t *mask = (uint32_t *)memory;
    if (!is_control_warp())
        for (int i = (int)threadIdx.x; i < masks; i += LOWLAT_WORKERS * WARP) mask[i] = 0;
    if (threadIdx.x < DEVICE_MAX_RANKS) {
        f.bad[threadIdx.x] = NO_INDEX;
        f.tokens[threadIdx.x] = 0;
    }
    if (threadIdx.x) return;
    f.mask = mask;
    f.p.load = (int32_t *)(mask + masks);
    f.p.start = f.p.load + experts;
    f.id = (uint16_t *)(((uintptr_t)(f.p.start + experts) + 7) / 8 * 8);
    f.before = f.id + ranks * job.max_lowlat_tokens * fours_of(job.layer) * LOWLAT_LANE_IDS;
    f.most = job.max_lowlat_tokens;
    f.groups = groups;
    f.p.bad_ranks = 0;
    f.experts = experts;
    f.top_k = (int)job.layer.top_k;
    f.fours = fours_of(job.layer);
    f.twice = f.has_large_rank = false;
}

#endif
