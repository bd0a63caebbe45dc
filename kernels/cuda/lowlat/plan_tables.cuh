/* SPDX-License-Identifier: Apache-2.0 */
/* The tables from which a plan for few tokens is computed. Each CTA has its own copy in shared
 * memory, which lowlat/plan.cuh fills in. A *choice* is a token and one of its top_k experts. A
 * *slab* is the sequence of slots of one expert. A *token block* is 32 consecutive tokens of
 * one rank.
 *
 *   ids               expert ids of all choices of all ranks
 *   mask              for each token block and expert: one bit per token of the block, which is
 *                     1 if the token chose the expert
 *   earlier_choices   for each token block and expert: the number of choices of this expert in
 *                     earlier blocks of the same rank and in all blocks of lower ranks
 *   group_slab_start  for each expert: the first slot of its slab. Slots are numbered over all
 *                     ranks: the first slot of rank 1 follows the last slot of rank 0
 *
 * The slot of a choice, numbered over all ranks, is the sum of three values: group_slab_start,
 * earlier_choices, and the number of 1 bits of the mask below the token's bit. A mask has one
 * bit per token, so it cannot express that a token chooses an expert twice. If any token does
 * so, the slots are computed by comparing all ids one by one, which is slow. */
#ifndef EPIC_LOWLAT_PLAN_TABLES_CUH
#define EPIC_LOWLAT_PLAN_TABLES_CUH

#include "cuda/common/shared_array.cuh"
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/lowlat/lowlat.cuh"

/* encoded id of a choice without an expert (the caller's id is negative) */
#define LOWLAT_NO_ID 0xffffu
#define LOWLAT_INVALID_ID 0xfffeu /* encoded id of a choice whose id is too large */
/* Upper bound of the result of lowlat_plan_bytes(). A mask and its element of earlier_choices
 * take 6 bytes, and an id takes 2 bytes. */
#define LOWLAT_PLAN_MAX_BYTES \
    (P2P_LOWLAT_MASKS * 6 + P2P_LOWLAT_EXPERTS * 8 + P2P_LOWLAT_IDS * 2 + 16)

/* The result of check_plan(). */
struct PlanCheck {
    uint32_t result; /* an epic_result */
    /* the plan is valid, but a receive buffer has too few rows for it */
    bool short_of_rows;
};

/* The tables of a plan (see above). The struct is in static shared memory. Its arrays are in
 * dynamic shared memory. */
struct LowlatPlan {
    /* The state of the general planner. Here only these members are used: `load`, `capacity`,
     * `demand`, needed_slots, bad_ranks and `header`. */
    Planner p;
    /* Both [num_experts]. load: the number of choices of each expert; p.load points to the same
     * array. group_slab_start: see the top of this file. */
    SharedArray<int32_t> load, group_slab_start;
    /* mask, earlier_choices: [token blocks of all ranks][num_experts] */
    SharedArray<uint32_t> mask;
    SharedArray<uint16_t> earlier_choices;
    /* encoded expert ids of all choices: [num_ranks][max_tokens][id_lanes *
     * P2P_LOWLAT_LANE_IDS] */
    SharedArray<uint16_t> ids;
    /* number of tokens of each rank */
    int32_t tokens[DEVICE_MAX_RANKS];
    int32_t recv_rows[DEVICE_MAX_RANKS]; /* number of rows of each rank's receive buffer */
    /* For each rank, the lowest index (token * top_k + k) of a wrong choice, or NO_INDEX. A
     * choice is wrong if its id is invalid or, with EPIC_DISTINCT, if the token has already
     * chosen the expert. */
    uint32_t bad_choice[DEVICE_MAX_RANKS];
    /* Temporary values of compute_slabs(). Element i is the number of slots that the experts
     * 32 * i to 32 * i + 31 need. */
    int32_t chunk_slots[P2P_LOWLAT_EXPERTS / WARP];
    int32_t total_slots; /* number of slots of all ranks together */
    /* max_tokens: the tables have space for this many tokens per rank. num_groups: number of
     * token blocks of a rank with max_tokens tokens. */
    int32_t max_tokens, num_groups;
    /* num_experts, top_k: as in the layer. id_lanes: the number of lanes that handle the ids of
     * one token; each lane handles P2P_LOWLAT_LANE_IDS ids. */
    int32_t num_experts, top_k, id_lanes;
    /* true: a token chose an expert twice, so slots cannot be computed from the masks */
    bool has_repeats;
    /* true: a rank has more than max_tokens tokens, so the tables cannot be used */
    bool has_large_rank;

    /* Returns the index in `ids` of the first id of `token`, a token of `rank`. */
    __device__ __forceinline__ int first_id_index(int rank, int32_t token) const
    {
        return (rank * max_tokens + token) * id_lanes * P2P_LOWLAT_LANE_IDS;
    }
    /* Returns the slot of choice k of `token`, a token of `rank`. `e`: the choice's expert.
     * `first`: the first expert of the rank that owns e. Slot 0 is the first slot on that rank.
     * The slots of an expert are in the order of rank, token and k. */
    __device__ __forceinline__ int32_t slot_of(int rank, int32_t token, int k, int e,
                                               int first) const
    {
        const int index = (rank * num_groups + token / WARP) * num_experts + e;
        const int32_t begin = group_slab_start[e] - group_slab_start[first];
        if (!has_repeats)
            return begin + earlier_choices[index] +
                   __popc(mask[index] & ((1u << token % WARP) - 1));
        return begin +
               count_before(rank, token * id_lanes * P2P_LOWLAT_LANE_IDS + k, (uint16_t)e);
    }
    /* Returns how often `expert` occurs among all choices of the ranks below `rank` and the
     * first `choices` choices of `rank`. It compares all ids, which is slow, so it is called
     * only if a token chose an expert twice. */
    __device__ __noinline__ int count_before(int rank, int choices, uint16_t expert) const
    {
        int count = 0;
        for (int q = 0; q <= rank; q++) {
            const int first = first_id_index(q, 0),
                      many = q < rank ? tokens[q] * id_lanes * P2P_LOWLAT_LANE_IDS : choices;
            for (int i = 0; i < many; i++) count += ids[first + i] == expert;
        }
        return count;
    }
    /* Returns the encoded id of choice k of `token`, a token of `rank`, or LOWLAT_NO_ID if k >=
     * top_k. */
    __device__ __forceinline__ uint32_t choice_of(int rank, int32_t token, int k) const
    {
        return k < top_k ? ids[first_id_index(rank, token) + k] : LOWLAT_NO_ID;
    }
    /* Returns the slot of choice k of `token`, a token of `rank`, if the slot is on the calling
     * rank, otherwise -1. */
    __device__ __forceinline__ int32_t slot_here(const p2p_plan_job &job, int rank,
                                                 int32_t token, int k) const
    {
        const uint32_t e = choice_of(rank, token, k);
        const int first = job.self.rank * job.block;
        const bool here = e - (uint32_t)first < (uint32_t)job.block;
        return here ? slot_of(rank, token, k, (int)e, first) : -1;
    }
    /* Returns the number of slots of all ranks below rank q. */
    __device__ __forceinline__ int32_t slots_before(const p2p_plan_job &job, int q) const
    {
        const int e = q * job.block;
        return e < num_experts ? group_slab_start[e] : total_slots;
    }
    /* Writes the record of `token`, a token of `rank`, to the plan. The record lists the slots
     * that the token has on the calling rank. If the token is a token of the calling rank, also
     * writes two values for each choice: the rank of its expert, and its fate (its slot, or the
     * reason why it has no slot). `slot`: in lane k, the result of slot_here() for choice k.
     * `here`: bit mask of the lanes that have a slot. `result`: an epic_result; if `result` is
     * an error, no slot is written. Called by one warp. */
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
        const bool valid = e < (uint32_t)num_experts;
        const int owner = valid ? (int)(e / (uint32_t)job.block) : -1;
        int32_t fate = EPIC_FATE_NONE;
        if (valid && good) fate = slot_of(rank, token, k, (int)e, owner * job.block);
        if (valid && result == EPIC_EOVERFLOW) fate = EPIC_FATE_RANK_FULL;
        const int64_t choice_at = (int64_t)token * top_k + k;
        ((int32_t *)(job.plan + job.at.fate))[choice_at] = fate;
        ((int32_t *)(job.plan + job.at.rank_of))[choice_at] = good ? owner : -1;
    }
};

/* Returns the number of lanes that handle the ids of one token. Each lane handles
 * P2P_LOWLAT_LANE_IDS ids. */
__host__ __device__ __forceinline__ int id_lanes_of(const epic_layer &layer)
{
    return ((int)layer.top_k + P2P_LOWLAT_LANE_IDS - 1) / P2P_LOWLAT_LANE_IDS;
}

/* Returns the size in bytes of the dynamic shared memory for the tables. If a rank can have too
 * many tokens for the tables, the general planner (plan/planner.cuh) may use the memory
 * instead. In this case, returns the larger of the two sizes. */
static inline int lowlat_plan_bytes(const p2p_plan_job &job)
{
    const int64_t ranks = job.self.num_ranks, experts = job.layer.num_experts;
    const int64_t masks = ranks * ((job.max_lowlat_tokens + WARP - 1) / WARP) * experts;
    const int64_t ids =
        ranks * job.max_lowlat_tokens * id_lanes_of(job.layer) * P2P_LOWLAT_LANE_IDS;
    const int bytes = (int)(masks * 6 + experts * 8 + ids * 2 + 16);
    const int other = job.self.max_tokens > job.max_lowlat_tokens ? planner_bytes_of(job) : 0;
    return bytes > other ? bytes : other;
}

/* Sets up empty tables in lowlat_plan_bytes() bytes of dynamic shared memory. Called by all
 * threads of the CTA, before its first barrier. */
static __device__ void open_tables(LowlatPlan &tables, const p2p_plan_job &job, uint8_t *memory)
{
    const int experts = (int)job.layer.num_experts, ranks = job.self.num_ranks;
    const int groups = (job.max_lowlat_tokens + WARP - 1) / WARP;
    const int masks = ranks * groups * experts;
    uint32_t *mask = (uint32_t *)memory;
    /* this may also clear the first elements of tables.p.load, which have no values yet */
    if (!is_control_warp())
        for (int i = (int)threadIdx.x; i < (masks + 3) / 4; i += LOWLAT_WORKERS * WARP)
            ((uint4 *)memory)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < DEVICE_MAX_RANKS) {
        tables.bad_choice[threadIdx.x] = NO_INDEX;
        tables.tokens[threadIdx.x] = 0;
    }
    if (threadIdx.x) return;
    tables.mask = mask;
    tables.load = (int32_t *)(mask + masks);
    tables.p.load = tables.load;
    tables.group_slab_start = tables.load + experts;
    tables.ids = (uint16_t *)(((uintptr_t)(tables.group_slab_start + experts) + 7) / 8 * 8);
    tables.earlier_choices = tables.ids + ranks * job.max_lowlat_tokens *
                                              id_lanes_of(job.layer) * P2P_LOWLAT_LANE_IDS;
    tables.max_tokens = job.max_lowlat_tokens;
    tables.num_groups = groups;
    tables.p.bad_ranks = 0;
    tables.num_experts = experts;
    tables.top_k = (int)job.layer.top_k;
    tables.id_lanes = id_lanes_of(job.layer);
    tables.has_repeats = tables.has_large_rank = false;
}

#endif
