/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of few tokens.  Every rank tells every other one the ids of all its choices, and each CTA
 * makes the whole plan by itself in shared memory: for each expert and 32 tokens of a rank a mask of
 * those that chose it, how many there are before, and where the expert's slab begins.  So there is
 * one hop, no count travels, and whatever all ranks must decide alike they decide on the same
 * numbers.  A token that chooses an expert twice does not fit the masks: then choices are counted
 * one by one, slowly; or, where ids are promised to be distinct, it is wrong data.
 *
 * Ids travel as stamped words of two, where records do otherwise (heap.h). */
#ifndef EPIC_FEW_PLAN_CUH
#define EPIC_FEW_PLAN_CUH

#include "cuda/dispatch.cuh"
#include "cuda/few.cuh"

#define FEW_NONE 0xffffu /* an id that chooses nobody, */
#define FEW_BAD 0xfffeu  /* that is no expert's */
#define FEW_PLAN_MOST_BYTES \
    (P2P_FEW_MASKS * 6 + FEW_WORKERS * WARP * 8 + P2P_FEW_CHOICES * 2 + 16)

struct FewPlan {      /* in shared memory; the arrays in dynamic shared memory */
    Planner p;        /* load, start and header as every plan has them */
    uint32_t *mask;   /* [groups][num_experts] tokens of the group that chose the expert */
    uint16_t *before; /* [groups][num_experts] choices of it in the groups before */
    uint16_t *id;     /* [num_ranks][max_tokens][top_k] */
    int32_t tokens[DEVICE_MAX_RANKS];
    int32_t heard[FEW_WORKERS]
                 [DEVICE_MAX_RANKS]; /* the same, as a warp knows it; -1: not yet */
    int32_t rows[DEVICE_MAX_RANKS];  /* that the ranks have room for */
    uint32_t bad[DEVICE_MAX_RANKS];  /* the first choice that is no expert, or NOTHING */
    int32_t upto[FEW_WORKERS];       /* rows of a warp's experts */
    int32_t max_tokens, groups;      /* of a rank */
    int32_t experts, top_k;          /* of the layer */
    uint32_t result;                 /* of the plan */
    bool twice;                      /* some token chose an expert twice */

    __device__ __forceinline__ int index(int rank, int32_t token) const
    {
        return (rank * max_tokens + token) * top_k;
    }
    /* The slot of choice k on its expert's rank; slots are in the order of rank, token and k. */
    __device__ __forceinline__ int32_t slot_of(int rank, int32_t token, int k, int e) const
    {
        const int at = (rank * groups + token / WARP) * experts + e;
        if (!twice)
            return p.start[e] + before[at] + __popc(mask[at] & ((1u << token % WARP) - 1));
        return p.start[e] + count_before(rank, token * top_k + k, (uint16_t)e);
    }
    /* Choices of the expert by ranks below, and by the first `choices` of that rank. */
    __device__ __noinline__ int count_before(int rank, int choices, uint16_t expert) const
    {
        int count = 0;
        for (int q = 0; q <= rank; q++) {
            const int first = index(q, 0), many = q < rank ? tokens[q] * top_k : choices;
            for (int i = 0; i < many; i++) count += id[first + i] == expert;
        }
        return count;
    }
    __device__ __forceinline__ uint32_t choice(int rank, int32_t token, int k) const
    {
        return k < top_k ? id[index(rank, token) + k] : FEW_NONE;
    }
    /* The slot of the token's choice k if that is here, or -1. */
    __device__ __forceinline__ int32_t slot_here(const p2p_plan_job &job, int rank,
                                                 int32_t token, int k) const
    {
        const uint32_t e = choice(rank, token, k);
        const bool here = e - (uint32_t)(job.self.rank * job.block) < (uint32_t)job.block;
        return here ? slot_of(rank, token, k, (int)e) : -1;
    }
    /* One warp writes what the plan says of a token; lane k: the slot of choice k here. */
    __device__ __forceinline__ void keep_token(const p2p_plan_job &job, int rank, int32_t token,
                                               int32_t slot, uint32_t here) const
    {
        const int k = lane_id(), n = __popc(here & lanes_below());
        const bool good = result == EPIC_OK;
        const device_plan_layout at =
            device_plan_layout_of(job.self.num_ranks, job.self.max_tokens, experts, top_k);
        int32_t *record =
            (int32_t *)(job.plan + at.records) + record_at(job.self, rank, token, top_k);
        if (k < top_k)
            record[slot >= 0 ? n : __popc(here) + k - n] = slot >= 0 && good ? slot : -1;
        if (rank != job.self.rank || k >= top_k) return;
        const uint32_t e = choice(rank, token, k);
        const bool valid = e < (uint32_t)experts;
        int32_t fate = EPIC_FATE_NONE;
        if (valid && good) fate = slot_of(rank, token, k, (int)e);
        if (valid && result == EPIC_EOVERFLOW) fate = EPIC_FATE_RANK_FULL;
        const int64_t choice_at = (int64_t)token * top_k + k;
        ((int32_t *)(job.plan + at.fate))[choice_at] = fate;
        ((int32_t *)(job.plan + at.rank_of))[choice_at] =
            valid && good ? (int32_t)(e / (uint32_t)job.block) : -1;
    }
};

static inline int few_plan_bytes(int64_t ranks, int64_t max_tokens, const epic_layer *layer)
{
    const int64_t masks = ranks * ((max_tokens + WARP - 1) / WARP) * layer->num_experts;
    const int64_t ids = ranks * max_tokens * layer->top_k;
    return (int)(masks * 6 + layer->num_experts * 8 + ids * 2 + 16);
}

/* Every thread, before the CTA meets: room for the tables, empty. */
static __device__ void open_tables(FewPlan &f, const p2p_plan_job &job, uint8_t *memory)
{
    const int experts = (int)job.layer.num_experts, ranks = job.self.num_ranks;
    const int groups = ((int)job.self.max_tokens + WARP - 1) / WARP;
    uint32_t *mask = (uint32_t *)memory;
    for (int i = (int)threadIdx.x; i < ranks * groups * experts; i += FEW_BLOCK) mask[i] = 0;
    if (threadIdx.x < DEVICE_MAX_RANKS) f.bad[threadIdx.x] = NOTHING;
    if (threadIdx.x) return;
    f.mask = mask;
    f.p.load = (int32_t *)(mask + ranks * groups * experts);
    f.p.start = f.p.load + experts;
    f.before = (uint16_t *)(f.p.start + experts);
    f.id = f.before + ranks * groups * experts;
    f.max_tokens = (int32_t)job.self.max_tokens;
    f.groups = groups;
    f.p.bad_ranks = 0;
    f.experts = experts;
    f.top_k = (int)job.layer.top_k;
}

__device__ __forceinline__ uint32_t few_id(const p2p_plan_job &job, int32_t token, int k)
{
    if (k >= (int)job.layer.top_k) return FEW_NONE;
    const int64_t id = choice_id(job, (int64_t)token * job.layer.top_k + k);
    return id < 0 ? FEW_NONE : id >= job.layer.num_experts ? FEW_BAD : (uint32_t)id;
}

/* Where a rank's words about a token are in the heap. */
__device__ __forceinline__ uint64_t *id_words(const p2p_self &self, const Now &now,
                                              uint8_t *heap, int rank, int32_t token, int top_k)
{
    return (uint64_t *)(heap + self.at.records) +
           ((int64_t)parity(now) * self.num_ranks + rank) * self.max_tokens * DEVICE_MAX_TOP_K +
           (int64_t)token * top_k;
}

/* The speakers tell all peers the ids of this rank's tokens, each those of some. */
static __device__ void tell_ids(const p2p_plan_job &job, const Now &now)
{
    const p2p_self &self = job.self;
    const int top_k = (int)job.layer.top_k, words = (top_k + 1) / 2;
    for (int32_t t = (int32_t)blockIdx.x; t < job.num_tokens; t += (int32_t)gridDim.x) {
        if (lane_id() >= words) continue;
        const uint32_t low = few_id(job, t, 2 * lane_id());
        const uint32_t high = few_id(job, t, 2 * lane_id() + 1);
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int q = wrap(self.rank + distance, self.num_ranks);
            store_relaxed(id_words(self, now, self.heap[q], self.rank, t, top_k) + lane_id(),
                          stamp(now, low | high << 16));
        }
    }
}

/* One warp, lanes side by side: two ids of a token of `rank`, as they come; nobody's past its
 * tokens. */
__device__ __forceinline__ bool take_ids(int32_t *heard, const p2p_plan_job &job,
                                         const Now &now, bool in, int rank, int32_t token,
                                         int word, uint32_t &ids)
{
    const p2p_self &self = job.self;
    const int top_k = (int)job.layer.top_k;
    ids = FEW_NONE | FEW_NONE << 16;
    if (in && rank == self.rank) {
        if (token < job.num_tokens)
            ids = few_id(job, token, 2 * word) | few_id(job, token, 2 * word + 1) << 16;
        in = false;
    }
    int32_t known = in ? heard[rank] : 0;
    const bool news = known < 0;
    bool waits = in && (news || token < known);
    const uint64_t *from =
        id_words(self, now, now.heap, in ? rank : self.rank, in ? token : 0, top_k) + word;
    const uint64_t *said = announcement(now, now.heap, in ? rank : self.rank);
    int missing = -1;
    const bool ok = wait_until(now, missing, P2P_PHASE_COUNTS, [&] {
        if (waits) {
            const uint64_t it = load_relaxed(from);
            const uint64_t tokens = load_relaxed(said + P2P_SAYS_TOKENS);
            if (stamped(now, tokens)) {
                known = (int32_t)(uint32_t)tokens;
                if (token < known && stamped(now, it)) ids = (uint32_t)it;
                waits = token < known && !stamped(now, it);
            }
        }
        missing = waits ? rank : -1;
        return __any_sync(ALL_LANES, waits) == 0;
    });
    __syncwarp();
    if (news && known >= 0) heard[rank] = known;
    __syncwarp();
    return ok;
}

/* One choice of the tables; true: the token has chosen that expert before. */
__device__ __forceinline__ bool note_choice(FewPlan &f, int rank, int32_t token, int k,
                                            uint32_t e)
{
    if (k >= f.top_k) return false;
    f.id[f.index(rank, token) + k] = (uint16_t)e;
    if (e == FEW_BAD) atomicMin(&f.bad[rank], (uint32_t)(token * f.top_k + k));
    if (e >= (uint32_t)f.experts) return false;
    const uint32_t bit = 1u << token % WARP;
    return (atomicOr(&f.mask[(rank * f.groups + token / WARP) * f.experts + (int)e], bit) &
            bit) != 0;
}

/* One warp: does it know that no rank has more tokens than that? */
__device__ __forceinline__ bool all_told(const int32_t *heard, int ranks, int32_t token)
{
    const int q = lane_id();
    const int32_t tokens = q < ranks ? heard[q] : 0;
    return __all_sync(ALL_LANES, tokens >= 0 && tokens <= token) != 0;
}

/* The workers: all ids of all ranks.  The last warps begin, as the first ones have rows to send. */
static __device__ bool gather_ids(FewPlan &f, const p2p_plan_job &job, const Now &now,
                                  bool &twice)
{
    const int ranks = job.self.num_ranks, words = ((int)job.layer.top_k + 1) / 2;
    const int all = f.max_tokens * ranks * words;
    const int warp = FEW_WORKERS - 1 - (int)threadIdx.x / WARP;
    int32_t *heard = f.heard[warp];
    if (lane_id() < ranks) heard[lane_id()] = lane_id() == job.self.rank ? job.num_tokens : -1;
    __syncwarp();
    for (int first = warp * WARP; first < all; first += FEW_WORKERS * WARP) {
        const int i = first + lane_id(), word = i % words;
        const int rank = i / words % ranks, token = i / (words * ranks);
        uint32_t ids;
        if (!take_ids(heard, job, now, i < all, rank, token, word, ids)) return false;
        if (i < all) twice |= note_choice(f, rank, token, 2 * word, ids & 0xffff);
        if (i < all) twice |= note_choice(f, rank, token, 2 * word + 1, ids >> 16);
        if (all_told(heard, ranks, (first + FEW_WORKERS * WARP) / (words * ranks))) break;
    }
    return true;
}

/* The speaker: what else the announcements say. */
static __device__ bool hear_sizes(FewPlan &f, const Now &now, int num_ranks)
{
    int32_t tokens, capacity, rows;
    if (!heard(now, P2P_SAYS_TOKENS, tokens) || !heard(now, P2P_SAYS_CAPACITY, capacity) ||
        !heard(now, P2P_SAYS_ROWS, rows))
        return false;
    if (lane_id() < DEVICE_MAX_RANKS) {
        f.p.header.tokens_of[lane_id()] = tokens;
        f.p.capacity[lane_id()] = capacity;
        f.p.header.slots_of[lane_id()] = 0;
        f.rows[lane_id()] = rows;
    }
    if (lane_id() < num_ranks) f.tokens[lane_id()] = tokens;
    return true;
}

/* Every thread: choices of each expert, then where the slabs begin.  Two meetings. */
static __device__ void sum_up(FewPlan &f, const p2p_plan_job &job)
{
    const int experts = (int)job.layer.num_experts, ranks = job.self.num_ranks;
    const int e = (int)threadIdx.x, warp = e / WARP;
    int32_t rows = 0, upto = 0;
    if (e < experts) {
        int32_t run = 0;
        for (int q = 0; q < ranks; q++) {
            const int at = q * f.groups * experts + e, groups = (f.tokens[q] + WARP - 1) / WARP;
#pragma unroll 4
            for (int g = 0; g < groups; g++) {
                f.before[at + g * experts] = (uint16_t)run;
                run += __popc(f.mask[at + g * experts]);
            }
        }
        if (f.twice) run = f.count_before(ranks, 0, (uint16_t)e);
        f.p.load[e] = run;
        rows = upto = (int32_t)aligned_rows(run, job.layer.alignment);
    }
    for (int d = 1; d < WARP; d *= 2) {
        const int32_t r = __shfl_up_sync(ALL_LANES, upto, d);
        if (lane_id() >= d) upto += r;
    }
    if (lane_id() == WARP - 1 && warp < FEW_WORKERS) f.upto[warp] = upto;
    __syncthreads();
    if (e < experts) {
        int32_t start = upto - rows;
        for (int w = 0; w < warp; w++) start += f.upto[w];
        f.p.start[e] = start;
    }
    __syncthreads();
}

/* Where rank q's slabs begin among all; q = num_ranks: how many slots there are. */
__device__ __forceinline__ int32_t slots_before(const FewPlan &f, const p2p_plan_job &job,
                                                int q)
{
    const int e = q * job.block, experts = (int)job.layer.num_experts;
    if (e < experts) return f.p.start[e];
    return f.p.start[experts - 1] +
           (int32_t)aligned_rows(f.p.load[experts - 1], job.layer.alignment);
}

/* Every thread: slabs begin at 0 on every rank, and the plan's result.  Two meetings. */
static __device__ void settle(FewPlan &f, const p2p_plan_job &job)
{
    const int experts = (int)job.layer.num_experts, ranks = job.self.num_ranks;
    const int e = (int)threadIdx.x;
    device_plan_header &h = f.p.header;
    const int32_t base = e < experts ? slots_before(f, job, e / job.block) : 0;
    if (is_speaker()) {
        const int q = lane_id();
        int32_t needed = 0;
        bool over = false, bad = false;
        if (q < ranks) {
            needed = slots_before(f, job, q + 1) - slots_before(f, job, q);
            over = needed > (f.p.capacity[q] ? f.p.capacity[q] : 0x7fffffff);
            bad = f.bad[q] != NOTHING;
            h.slots_of[q] = f.p.demand[q] = needed;
            f.p.needed[q] = needed;
        }
        const uint32_t bad_ranks = __ballot_sync(ALL_LANES, bad);
        const bool overflow = __any_sync(ALL_LANES, over) != 0;
        if (q == 0) {
            f.p.bad_ranks = bad_ranks;
            h.result = bad_ranks ? EPIC_EINVAL : overflow ? EPIC_EOVERFLOW : EPIC_OK;
            f.result = h.result;
            h.num_local = h.owned = job.block;
        }
    }
    __syncthreads();
    if (e < experts) f.p.start[e] -= base;
    __syncthreads();
}

/* Every thread, of a layer whose ids are distinct: finds the first choice of each rank that is not,
 * which no order of the threads may decide. */
static __device__ __noinline__ void find_duplicates(FewPlan &f, int ranks)
{
    for (int rank = 0; rank < ranks; rank++)
        for (int i = (int)threadIdx.x; i < f.tokens[rank] * f.top_k; i += FEW_BLOCK) {
            const uint16_t *id = f.id + f.index(rank, 0);
            for (int j = i - i % f.top_k; j < i; j++)
                if (id[j] == id[i] && id[i] < f.experts) atomicMin(&f.bad[rank], (uint32_t)i);
        }
}

/* Every thread.  false: the group is broken. */
static __device__ bool make_few(FewPlan &f, const p2p_plan_job &job, const Now &now)
{
    bool ok, twice = false;
    if (is_speaker())
        ok = hear_sizes(f, now, job.self.num_ranks);
    else
        ok = gather_ids(f, job, now, twice);
    ok = __syncthreads_and(ok) != 0;
    const bool once = __syncthreads_and(!twice) != 0;
    if (threadIdx.x == 0) f.twice = !once;
    if (!ok) return false;
    __syncthreads();
    if (!once && job.layer.flags & EPIC_DISTINCT) find_duplicates(f, job.self.num_ranks);
    sum_up(f, job);
    settle(f, job);
    return true;
}

/* The speaker of the first CTA: what the plan and the caller are told of the experts; and of wrong
 * data. */
static __device__ void write_few(FewPlan &f, const p2p_plan_job &job, const Now &now)
{
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    const bool good = f.result == EPIC_OK;
    int32_t *slab_begin = (int32_t *)(job.plan + at.slab_begin);
    device_padding *padding = (device_padding *)(job.plan + at.padding);
    const int slabs = 1 << device_slab_bits(job.block);
    for (int l = lane_id(); l < slabs; l += WARP) {
        const int e = job.self.rank * job.block + min(l, job.block - 1);
        const int32_t count = l < job.block ? f.p.load[e] : 0;
        const int32_t rows = (int32_t)aligned_rows(count, job.layer.alignment);
        padding[l] = {rows == count ? 0 : f.p.start[e] + count, rows - count};
        if (l >= job.block) continue;
        slab_begin[l] = f.p.start[e];
        if (job.expert_tokens && good) job.expert_tokens[l] = count;
        if (job.expert_rows && good) job.expert_rows[l] = rows;
    }
    if (lane_id() == 0) fill_header(f.p, job, now);
    __syncwarp();
    tell_plan(f.p, job, lane_id(), WARP);
    if (lane_id()) return;
    if (f.bad[job.self.rank] != NOTHING)
        tell_wrong(job, now, P2P_FAULT_EXPERT, f.bad[job.self.rank]);
    if (f.result == EPIC_EINVAL) notify_fault(f.p, job, now);
    if (f.result == EPIC_EOVERFLOW) notify_overflow(f.p, job, now);
}

#endif
