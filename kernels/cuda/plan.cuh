/* SPDX-License-Identifier: Apache-2.0 */
/* Making and reading plans on the device.
 *
 * Every rank counts its own choices, the ranks exchange counts, and each computes the slots of
 * its own choices.  What a peer needs to know about a token, its slots there, is sent as a
 * record: up to top_k stamped words, ascending k, the last one marked.
 *
 * The first `planners` CTAs plan; CTA c takes the c-th part of the tokens, its warp w the w-th
 * part of that.  A choice's place among those of its expert is then
 *
 *   choices of lower ranks + of lower CTAs + of lower warps + of this warp before it,
 *
 * and nothing depends on the order in which anything happens. */
#ifndef EPIC_PLAN_CUH
#define EPIC_PLAN_CUH

#include "cuda/wait.cuh"

#define RECORD_LAST 0x80000000u
#define RECORD_ABSENT 0x7fffffffu  /* no choice of this token goes to this rank */
#define RECORD_DISCARD 0x7ffffffeu /* one does, but the plan is bad: nowhere to put its row */

#define NOTHING 0xffffffffu

#define PLAN_TALLY_WORDS 16384 /* warps that count, times experts, at most */

/* ------------------------------------------------------------------------- reading ---- */

struct Plan { /* a plan that is read, in shared memory */
    device_plan_header header;
    const int32_t *slab_begin, *slab_count, *rank_of, *records;
    int32_t most_tokens; /* of any rank */
    uint32_t good;       /* the bytes are a plan of this seat */
};

/* Where the record of a rank's token begins among the plan's. */
__device__ __forceinline__ int64_t record_at(const p2p_seat &seat, int rank, int32_t token,
                                             int top_k)
{
    return ((int64_t)rank * seat.max_tokens + token) * top_k;
}

static __device__ uint32_t header_sum(const device_plan_header &header)
{
    const uint32_t *words = (const uint32_t *)&header;
    const int n = offsetof(device_plan_header, sum) / 4;
    uint32_t sum = 0;
    for (int i = lane_id(); i < n; i += WARP) sum += device_header_share(words[i], (uint32_t)i);
    for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    return sum;
}

static __device__ bool header_fits(const device_plan_header &h, const p2p_seat &seat,
                                   int64_t plan_bytes)
{
    if (h.magic != DEVICE_PLAN_MAGIC || h.group_id != seat.group_id || h.bytes > plan_bytes)
        return false;
    if (h.rank != seat.rank || h.num_ranks != seat.num_ranks) return false;
    if (h.max_tokens != seat.max_tokens || h.top_k < 1 || h.top_k > DEVICE_MAX_TOP_K)
        return false;
    if (h.num_experts < 1 || h.num_experts > DEVICE_MAX_EXPERTS || h.alignment < 1)
        return false;
    if (h.owned < 0 || h.owned > (int32_t)h.num_experts || h.leaves < 1) return false;
    for (int q = 0; q < seat.num_ranks; q++)
        if (h.tokens_of[q] < 0 || h.tokens_of[q] > seat.max_tokens || h.rank_at[q] < 0 ||
            h.rank_at[q] >= seat.num_ranks)
            return false;
    return true;
}

static __device__ void point_into(Plan &view, const uint8_t *plan, const p2p_seat &seat)
{
    const device_plan_header &h = view.header;
    const device_plan_layout at =
        device_plan_layout_of(seat.num_ranks, seat.max_tokens, h.num_experts, h.top_k);
    view.slab_begin = (const int32_t *)(plan + at.slab_begin);
    view.slab_count = (const int32_t *)(plan + at.slab_count);
    view.rank_of = (const int32_t *)(plan + at.rank_of);
    view.records = (const int32_t *)(plan + at.records);
    view.most_tokens = 0;
    for (int q = 0; q < seat.num_ranks; q++)
        view.most_tokens = max(view.most_tokens, h.tokens_of[q]);
}

/* One thread: what is wrong with the plan, which is `whole` if its bytes are a plan's. */
static __device__ __noinline__ void
notify_plan(const p2p_seat &seat, const device_plan_header &h, bool whole, int32_t num_tokens)
{
    if (seat.operation == EPIC_OP_NONE) return;
    const p2p_control *control = (const p2p_control *)(seat.heap[seat.rank] + seat.at.control);
    notify(seat, {EPIC_EINVAL,
                  load_relaxed(&control->epoch) + 1,
                  (uint32_t)(whole ? P2P_FAULT_TOKENS : P2P_FAULT_PLAN),
                  seat.rank,
                  {num_tokens, h.tokens_of[seat.rank], seat.operation, 0}});
}

/* Every thread of a CTA.  A plan that is none, or of another number of tokens, is not good, and
 * has the id 0. */
static __device__ void read_plan(Plan &view, const uint8_t *plan, int64_t plan_bytes,
                                 const p2p_seat &seat, int32_t num_tokens)
{
    const int words = sizeof(device_plan_header) / 4;
    if (threadIdx.x < WARP) {
        const bool room = plan_bytes >= (int64_t)sizeof(device_plan_header);
        for (int i = threadIdx.x; i < words; i += WARP)
            ((uint32_t *)&view.header)[i] = room ? ((const uint32_t *)plan)[i] : 0;
        __syncwarp();
        const uint32_t sum = header_sum(view.header);
        if (threadIdx.x == 0) {
            const bool whole =
                sum == view.header.sum && header_fits(view.header, seat, plan_bytes);
            view.good = whole && view.header.tokens_of[seat.rank] == num_tokens;
            if (!view.good) {
                if (blockIdx.x == 0) notify_plan(seat, view.header, whole, num_tokens);
                view.header.id = 0;
                view.header.result = EPIC_EINVAL;
            }
            point_into(view, plan, seat);
        }
    }
    __syncthreads();
}

/* A whole CTA, when all have announced: has every rank rows for all slots that the plan, a good
 * one, gives it?  Tells of the first that has not. */
static __device__ __noinline__ bool rows_suffice(const p2p_seat &seat, const Now &now,
                                                 const volatile device_plan_header *h)
{
    for (int q = 0; q < seat.num_ranks; q++) {
        const int32_t needed = h->slots_of[q];
        const int32_t rows =
            (int32_t)(uint32_t)load_relaxed(announcement(now, now.heap, q) + P2P_SAYS_ROWS);
        if (needed <= rows) continue;
        if (threadIdx.x == 0)
            notify(seat, {EPIC_EOVERFLOW,
                          now.epoch,
                          P2P_FAULT_ROWS,
                          q,
                          {rows, needed, seat.operation, 0}});
        return false;
    }
    return true;
}

/* -------------------------------------------------------------------------- making ---- */

struct Planner { /* in shared memory; the arrays in dynamic shared memory */
    device_plan_header header;
    int32_t *low;   /* [num_experts] choices that come before this CTA's */
    int32_t *load;  /* [num_experts] choices over the group */
    int32_t *start; /* [num_experts] first slot on its rank */
    int32_t *tally; /* [warps][num_experts] choices that come before the warp's, in this CTA */
    uint8_t *owner; /* [num_experts] rank */
    int32_t common[DEVICE_MAX_RANKS]; /* choices that each expert of a rank may keep */
    int32_t demand[DEVICE_MAX_RANKS];
    int64_t needed[DEVICE_MAX_RANKS]; /* slots, once expert_capacity has dropped */
    uint32_t bad_choice;              /* the first of this CTA whose id is none, or NOTHING */
    uint32_t bad_owner;               /* the first expert that lives nowhere, or NOTHING */
    uint32_t bad_ranks;               /* a bit for each rank whose data is wrong */
    int32_t warps;
};

__host__ __device__ inline int planner_warps(int num_experts)
{
    const int most = PLAN_TALLY_WORDS / num_experts;
    return most < 1 ? 1 : most > 16 ? 16 : most;
}

__host__ __device__ inline int planner_bytes(int num_experts)
{
    return num_experts * 4 * (3 + planner_warps(num_experts)) + (num_experts + 15) / 16 * 16;
}

/* Tokens side by side in a warp, one lane for each choice; a token with more than 32 choices
 * takes two halves, one after the other. */
struct Lanes {
    int tokens, halves; /* at a time; of a token */
    int token, k;       /* of this lane */
    bool on;
    uint32_t mates; /* lanes of the same token */

    __device__ explicit Lanes(int top_k)
    {
        const int lane = lane_id();
        tokens = top_k <= WARP ? WARP / top_k : 1;
        halves = (top_k + WARP - 1) / WARP;
        token = top_k <= WARP ? lane / top_k : 0;
        k = top_k <= WARP ? lane % top_k : lane;
        on = token < tokens;
        mates = top_k >= WARP ? ALL_LANES : ((1u << top_k) - 1) << (token * top_k % WARP);
    }
};

__device__ __forceinline__ uint32_t lanes_below()
{
    return (1u << lane_id()) - 1;
}

__device__ __forceinline__ int64_t choice_id(const p2p_plan_job &job, int64_t i)
{
    return job.wide ? __ldg((const long long *)job.topk_idx + i)
                    : __ldg((const int32_t *)job.topk_idx + i);
}

struct Part { /* the tokens of a warp */
    int32_t begin, end;
};

__device__ __forceinline__ Part part_of_warp(const Planner &p, const p2p_plan_job &job)
{
    const int per_cta = (job.num_tokens + job.planners - 1) / job.planners;
    const int per_warp = (per_cta + p.warps - 1) / p.warps;
    const int warp = threadIdx.x / WARP;
    const int cta_end = min(job.num_tokens, (int)(blockIdx.x + 1) * per_cta);
    Part part;
    part.begin = (int)blockIdx.x * per_cta + warp * per_warp;
    part.end = min(cta_end, part.begin + per_warp);
    if (warp >= p.warps) part.begin = part.end = 0;
    return part;
}

static __device__ void planner_begin(Planner &p, const p2p_plan_job &job, uint8_t *memory)
{
    const int experts = job.layer.num_experts, ranks = job.seat.num_ranks;
    if (threadIdx.x == 0) {
        p.warps = min((int)blockDim.x / WARP, planner_warps(experts));
        p.low = (int32_t *)memory;
        p.load = p.low + experts;
        p.start = p.load + experts;
        p.tally = p.start + experts;
        p.owner = (uint8_t *)(p.tally + p.warps * experts);
        p.bad_choice = p.bad_owner = NOTHING;
        p.bad_ranks = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.warps * experts; i += blockDim.x) p.tally[i] = 0;
    const int block = experts / ranks;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int owner = job.rank_of_expert ? job.rank_of_expert[e] : e / block;
        if (owner < 0 || owner >= ranks) {
            owner = 0;
            atomicMin(&p.bad_owner, (uint32_t)e);
        }
        p.owner[e] = (uint8_t)owner;
    }
    __syncthreads();
    if (job.layer.sum_order == EPIC_TREE)
        for (int e = threadIdx.x; e < experts; e += blockDim.x)
            if (p.owner[e] != p.owner[e / block * block]) atomicMin(&p.bad_owner, (uint32_t)e);
}

/* One group of lanes' choices: returns how many of the same expert this warp had before. */
__device__ __forceinline__ int32_t count_group(int32_t *tally, int32_t expert)
{
    const uint32_t same = __match_any_sync(ALL_LANES, expert);
    const int before = __popc(same & lanes_below());
    const int32_t base = expert >= 0 ? tally[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) tally[expert] = base + __popc(same);
    __syncwarp();
    return base + before;
}

/* Counts the choices of this warp; a choice's place in it waits in `fate`. */
static __device__ void count_choices(Planner &p, const p2p_plan_job &job, int32_t *fate)
{
    const Lanes lanes(job.layer.top_k);
    const Part part = part_of_warp(p, job);
    const int top_k = job.layer.top_k, experts = job.layer.num_experts;
    int32_t *tally = p.tally + threadIdx.x / WARP * experts;
    const int groups =
        max(0, part.end - part.begin + lanes.tokens - 1) / lanes.tokens * lanes.halves;
    auto place_of = [&](int group)
        -> int64_t { /* of this lane's choice, or -1 */
                     const int half = lanes.halves == 2 ? group & 1 : 0;
                     const int token =
                         part.begin + group / lanes.halves * lanes.tokens + lanes.token;
                     const int k = lanes.k + half * WARP;
                     return group < groups && lanes.on && token < part.end && k < top_k
                                ? (int64_t)token * top_k + k
                                : -1;
    };
    for (int g = 0; g < groups; g += 4) {
        int64_t at[4], id[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            at[i] = place_of(g + i);
            id[i] = at[i] >= 0 ? choice_id(job, at[i]) : -1;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (id[i] >= experts) atomicMin(&p.bad_choice, (uint32_t)at[i]);
            const int32_t expert = id[i] < 0 || id[i] >= experts ? -1 : (int32_t)id[i];
            const int32_t place = count_group(tally, expert);
            if (at[i] >= 0) fate[at[i]] = place;
        }
    }
}

/* What a rank says about an expert: its choices, where it lives (if the table can be used), and
 * whether something is wrong with this rank's data. */
#define COUNT_BITS 27 /* at most 2^20 tokens of 64 choices */
#define COUNT_OF(word) ((uint32_t)(word) & ((1u << COUNT_BITS) - 1))
#define OWNER_OF(word) ((uint32_t)(word) >> COUNT_BITS & 15)
#define NO_OWNER 15u

__device__ __forceinline__ uint32_t owner_said(const Planner &p, int expert)
{
    return p.bad_owner == NOTHING ? p.owner[expert] : NO_OWNER;
}

/* The table of rank q is not this rank's: the group is broken. */
static __device__ __noinline__ void report_table(const Now &now, int q)
{
    const p2p_seat &seat = *now.seat;
    report(now,
           P2P_BROKEN(EPIC_EMISMATCH, seat.operation, seat.rank, P2P_PHASE_TABLE, 1u << q,
                      now.epoch),
           now.signature);
}

/* Makes the warps' tallies exclusive sums and publishes the CTA's counts to the others. */
static __device__ void publish_tallies(Planner &p, const p2p_plan_job &job, const Now &now)
{
    const int experts = job.layer.num_experts;
    uint64_t *tallies = (uint64_t *)(now.heap + job.seat.at.tallies);
    const bool bad = p.bad_choice != NOTHING || p.bad_owner != NOTHING;
    if (threadIdx.x == 0)
        store_relaxed((uint64_t *)(now.heap + job.seat.at.first) + blockIdx.x,
                      stamp(now, p.bad_choice));
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int32_t sum = 0;
        for (int w = 0; w < p.warps; w++) {
            const int32_t count = p.tally[w * experts + e];
            p.tally[w * experts + e] = sum;
            sum += count;
        }
        const uint32_t mark = e == 0 && bad ? RECORD_LAST : 0;
        store_relaxed(tallies + blockIdx.x * DEVICE_MAX_EXPERTS + e,
                      stamp(now, (uint32_t)sum | mark));
    }
}

__device__ __forceinline__ uint64_t *fault_words(const p2p_seat &seat, const Now &now,
                                                 uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + seat.at.faults) +
           (parity(now) * DEVICE_MAX_RANKS + rank) * P2P_FAULT_WORDS;
}

/* One thread of CTA 0: tells all ranks what is wrong with this rank's data. */
static __device__ __noinline__ bool tell_fault(const Planner &p, const p2p_plan_job &job,
                                               const Now &now)
{
    const p2p_seat &seat = job.seat;
    const uint64_t *first = (const uint64_t *)(now.heap + seat.at.first);
    const bool placed = p.bad_owner == NOTHING;
    uint32_t index = p.bad_owner;
    for (int c = 0; c < job.planners && placed; c++) {
        uint64_t word = 0;
        if (!wait_alone(now, -1, P2P_PHASE_GRID, [&] {
                word = load_relaxed(first + c);
                return stamped(now, word);
            }))
            return false;
        index = min(index, (uint32_t)word);
    }
    const int64_t value = placed ? choice_id(job, index) : job.rank_of_expert[index];
    for (int q = 0; q < seat.num_ranks; q++) {
        uint64_t *to = fault_words(seat, now, seat.heap[q], seat.rank);
        store_relaxed(to + P2P_FAULT_KIND,
                      stamp(now, placed ? P2P_FAULT_EXPERT : P2P_FAULT_PLACEMENT));
        store_relaxed(to + P2P_FAULT_INDEX, stamp(now, index));
        store_relaxed(to + P2P_FAULT_LOW, stamp(now, (uint32_t)value));
        store_relaxed(to + P2P_FAULT_HIGH, stamp(now, (uint32_t)((uint64_t)value >> 32)));
    }
    return true;
}

/* Sums the CTAs' counts, tells them to the peers, and sums the ranks' counts. */
static __device__ bool exchange_counts(Planner &p, const p2p_plan_job &job, const Now &now)
{
    const p2p_seat &seat = job.seat;
    const int experts = job.layer.num_experts, ranks = seat.num_ranks;
    const uint64_t *tallies = (const uint64_t *)(now.heap + seat.at.tallies);
    const int64_t counts =
        seat.at.counts / 8 + (int64_t)parity(now) * ranks * DEVICE_MAX_EXPERTS;
    bool ok = true;
    for (int e = threadIdx.x; e < experts && ok; e += blockDim.x) {
        uint64_t words[P2P_MAX_PLANNERS];
        ok = wait_alone(now, -1, P2P_PHASE_GRID, [&] {
            bool all = true;
#pragma unroll
            for (int c = 0; c < P2P_MAX_PLANNERS; c++)
                words[c] = c < job.planners ? load_relaxed(tallies + c * DEVICE_MAX_EXPERTS + e)
                                            : stamp(now, 0);
#pragma unroll
            for (int c = 0; c < P2P_MAX_PLANNERS; c++) all &= stamped(now, words[c]);
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
        if (blockIdx.x == 0 && ok && bad) ok = tell_fault(p, job, now);
        if (blockIdx.x == 0 && ok)
            for (int i = 1; i <= ranks; i++) {
                const int q = (seat.rank + i) % ranks;
                store_relaxed((uint64_t *)seat.heap[q] + counts +
                                  seat.rank * DEVICE_MAX_EXPERTS + e,
                              stamp(now, sum | owner_said(p, e) << COUNT_BITS | bad));
            }
        p.low[e] = (int32_t)low;
    }
    for (int e = threadIdx.x; e < experts && ok; e += blockDim.x) {
        const uint64_t *from = (const uint64_t *)now.heap + counts + e;
        uint64_t words[DEVICE_MAX_RANKS];
        ok = wait_alone(now, -1, P2P_PHASE_COUNTS, [&] {
            bool all = true;
#pragma unroll
            for (int q = 0; q < DEVICE_MAX_RANKS; q++)
                words[q] =
                    q < ranks ? load_relaxed(from + q * DEVICE_MAX_EXPERTS) : stamp(now, 0);
#pragma unroll
            for (int q = 0; q < DEVICE_MAX_RANKS; q++) all &= stamped(now, words[q]);
            return all;
        });
        uint32_t load = 0, low = 0, bad = 0, others = 0;
        const uint32_t own = owner_said(p, e);
#pragma unroll
        for (int q = 0; q < DEVICE_MAX_RANKS; q++) {
            const uint32_t count = COUNT_OF(words[q]), owner = OWNER_OF(words[q]);
            bad |= ((uint32_t)words[q] & RECORD_LAST) ? 1u << q : 0;
            if (q < ranks && owner != own && owner != NO_OWNER) others |= 1u << q;
            if (q < seat.rank) low += count;
            load += count;
        }
        if (ok && others && own != NO_OWNER) {
            report_table(now, __ffs(others) - 1);
            ok = false;
        }
        if (bad) p.bad_ranks = bad; /* the first expert's thread alone sees it */
        p.load[e] = (int32_t)load;
        p.low[e] += (int32_t)low;
    }
    return ok;
}

__device__ __forceinline__ int32_t kept(const Planner &p, const p2p_plan_job &job, int expert)
{
    int32_t most = p.common[p.owner[expert]];
    const uint32_t limit = job.layer.expert_capacity;
    if (job.layer.overflow == EPIC_OVERFLOW_DROP && limit && limit < (uint32_t)most)
        most = (int32_t)limit;
    return min(p.load[expert], most);
}

struct Span { /* experts among which those of a rank are found */
    int begin, count;
};

__device__ __forceinline__ Span span_of(const p2p_plan_job &job, int rank)
{
    const int experts = job.layer.num_experts, block = experts / job.seat.num_ranks;
    return job.rank_of_expert ? Span{0, experts} : Span{rank * block, block};
}

/* One warp: slots of a rank when each of its experts keeps at most `most` (and, with `capped`,
 * what expert_capacity allows). */
static __device__ int64_t slots_of(Planner &p, const p2p_plan_job &job, int rank, int32_t most,
                                   bool capped)
{
    const Span span = span_of(job, rank);
    const int64_t alignment = job.layer.alignment;
    const uint32_t limit = job.layer.expert_capacity;
    if (capped && limit && job.layer.overflow == EPIC_OVERFLOW_DROP && limit < (uint32_t)most)
        most = (int32_t)limit;
    int64_t sum = 0;
    for (int i = lane_id(); i < span.count; i += WARP) {
        const int e = span.begin + i;
        if (p.owner[e] == rank) sum += device_round_up(min(p.load[e], most), alignment);
    }
    for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    return sum;
}

/* One warp: the largest common limit for which the rank's capacity suffices. */
static __device__ int32_t common_limit(Planner &p, const p2p_plan_job &job, int rank,
                                       int64_t capacity)
{
    int32_t fits = 0, fails = 0x7fffffff;
    while (fails - fits > 1) {
        const int32_t middle = fits + (fails - fits) / 2;
        if (slots_of(p, job, rank, middle, true) <= capacity)
            fits = middle;
        else
            fails = middle;
    }
    return fits;
}

/* One warp: where each slab of a rank begins; for this rank, CTA 0 writes the plan's tables. */
static __device__ void place_slabs(Planner &p, const p2p_plan_job &job, int rank)
{
    const Span span = span_of(job, rank);
    const int lane = lane_id();
    const bool write = rank == job.seat.rank && blockIdx.x == 0;
    const device_plan_layout at = device_plan_layout_of(job.seat.num_ranks, job.seat.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    int32_t *slab_begin = (int32_t *)(job.plan + at.slab_begin);
    int32_t *slab_count = (int32_t *)(job.plan + at.slab_count);
    int64_t slots = 0;
    int32_t owned = 0;
    for (int i = 0; i < span.count; i += WARP) {
        const int e = span.begin + i + lane;
        const bool mine = i + lane < span.count && p.owner[e] == rank;
        const int32_t count = mine ? kept(p, job, e) : 0;
        const int32_t rows = (int32_t)device_round_up(count, job.layer.alignment);
        int32_t rows_upto = rows;
        for (int d = 1; d < WARP; d *= 2) {
            const int32_t r = __shfl_up_sync(ALL_LANES, rows_upto, d);
            if (lane >= d) rows_upto += r;
        }
        const uint32_t owners = __ballot_sync(ALL_LANES, mine);
        if (mine) p.start[e] = (int32_t)slots + rows_upto - rows;
        if (mine && write) {
            const int local = owned + __popc(owners & lanes_below());
            slab_begin[local] = p.start[e];
            slab_count[local] = count;
            if (job.expert_tokens) job.expert_tokens[local] = count;
            if (job.expert_rows) job.expert_rows[local] = rows;
        }
        slots += __shfl_sync(ALL_LANES, rows_upto, WARP - 1);
        owned += __popc(owners);
    }
    if (lane == 0) {
        p.header.slots_of[rank] = (int32_t)min(slots, (int64_t)0x7fffffff);
        if (rank == job.seat.rank) p.header.owned = owned;
        atomicMax(&p.header.num_local, owned);
    }
}

/* Whole CTA: limits, slabs, and whether the plan is good; the same on all CTAs and ranks. */
static __device__ bool decide(Planner &p, const p2p_plan_job &job, const Now &now)
{
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, ranks = job.seat.num_ranks;
    device_plan_header &h = p.header;
    bool ok = true;
    if (warp == 0) {
        int32_t tokens = 0, capacity = 0;
        ok = heard(now, P2P_SAYS_TOKENS, tokens) && heard(now, P2P_SAYS_CAPACITY, capacity);
        if (lane_id() < DEVICE_MAX_RANKS) {
            h.tokens_of[lane_id()] = tokens;
            h.capacity_of[lane_id()] = capacity;
            h.slots_of[lane_id()] = 0;
            p.common[lane_id()] = 0x7fffffff;
        }
        if (lane_id() == 0) {
            h.result = p.bad_ranks ? EPIC_EINVAL : EPIC_OK;
            h.num_local = 0;
        }
    }
    ok = __syncthreads_and(ok);
    for (int d = warp; d < ranks; d += warps) {
        const int64_t demand = slots_of(p, job, d, 0x7fffffff, false);
        const int64_t need = slots_of(p, job, d, 0x7fffffff, true);
        const int32_t capacity = h.capacity_of[d];
        if (lane_id() == 0) {
            p.demand[d] = (int32_t)min(demand, (int64_t)0x7fffffff);
            p.needed[d] = need;
        }
        if (need > (capacity ? capacity : 0x7fffffff)) {
            if (job.layer.overflow == EPIC_OVERFLOW_DROP && capacity) {
                const int32_t limit = common_limit(p, job, d, capacity);
                if (lane_id() == 0) p.common[d] = limit;
            } else if (lane_id() == 0) {
                atomicCAS(&h.result, (uint32_t)EPIC_OK, (uint32_t)EPIC_EOVERFLOW);
            }
        }
        __syncwarp();
        place_slabs(p, job, d);
    }
    __syncthreads();
    return ok;
}

/* One thread of CTA 0: what the lowest rank with wrong data has said of it. */
static __device__ __noinline__ void notify_fault(const Planner &p, const p2p_plan_job &job,
                                                 const Now &now)
{
    const int rank = __ffs(p.bad_ranks) - 1;
    const uint64_t *from = fault_words(job.seat, now, now.heap, rank);
    uint64_t words[P2P_FAULT_WORDS];
    const bool ok = wait_alone(now, rank, P2P_PHASE_COUNTS, [&] {
        bool all = true;
        for (int i = 0; i < P2P_FAULT_WORDS; i++) {
            words[i] = load_relaxed(from + i);
            all &= stamped(now, words[i]);
        }
        return all;
    });
    if (!ok) return;
    const uint32_t kind = (uint32_t)words[P2P_FAULT_KIND];
    const int64_t index = (uint32_t)words[P2P_FAULT_INDEX], k = job.layer.top_k;
    const int64_t value =
        (int64_t)(words[P2P_FAULT_HIGH] << 32 | (uint32_t)words[P2P_FAULT_LOW]);
    p2p_notice said = {EPIC_EINVAL, now.epoch, kind, rank, {index, value, 0, 0}};
    if (kind == P2P_FAULT_EXPERT)
        said = {EPIC_EINVAL,
                now.epoch,
                kind,
                rank,
                {index / k, index % k, value, job.layer.num_experts}};
    notify(job.seat, said);
}

/* One thread of CTA 0: the same for the lowest rank that has too few slots. */
static __device__ __noinline__ void notify_overflow(const Planner &p, const p2p_plan_job &job,
                                                    const Now &now)
{
    const device_plan_header &h = p.header;
    for (int q = 0; q < job.seat.num_ranks; q++) {
        const int32_t capacity = h.capacity_of[q] ? h.capacity_of[q] : 0x7fffffff;
        if (p.needed[q] <= capacity) continue;
        notify(
            job.seat,
            {EPIC_EOVERFLOW, now.epoch, P2P_FAULT_CAPACITY, q, {capacity, p.needed[q], 0, 0}});
        return;
    }
}

/* CTA 0: header and outputs. */
static __device__ void write_header(Planner &p, const p2p_plan_job &job, const Now &now)
{
    device_plan_header &h = p.header;
    const p2p_seat &seat = job.seat;
    const epic_layer &layer = job.layer;
    if (threadIdx.x == 0) {
        h.magic = DEVICE_PLAN_MAGIC;
        h.id = (seat.group_id ^ now.epoch) * 0x9e3779b97f4a7c15ull | 1;
        h.group_id = seat.group_id;
        h.bytes = device_plan_layout_of(seat.num_ranks, seat.max_tokens, layer.num_experts,
                                        layer.top_k)
                      .bytes;
        h.max_tokens = seat.max_tokens;
        h.rank = seat.rank;
        h.num_ranks = seat.num_ranks;
        h.num_experts = layer.num_experts;
        h.top_k = layer.top_k;
        h.alignment = layer.alignment;
        h.overflow = layer.overflow;
        h.expert_capacity = layer.expert_capacity;
        h.sum_order = layer.sum_order;
        h.leaves = layer.leaves ? layer.leaves : 1;
        h.partial_type = layer.partial_type;
        h.pad = h.pad2 = 0;
        h.first_expert = 0;
        for (int q = 0; q < DEVICE_MAX_RANKS; q++) h.rank_at[q] = q < seat.num_ranks ? q : 0;
        if (layer.sum_order == EPIC_TREE)
            for (int q = 0; q < seat.num_ranks; q++) {
                const int first = layer.num_experts / seat.num_ranks * q;
                h.rank_at[q] = p.owner[first];
                if (p.owner[first] == seat.rank) h.first_expert = first;
            }
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        const uint32_t sum = header_sum(h);
        if (threadIdx.x == 0) h.sum = sum;
        __syncwarp();
        for (int i = threadIdx.x; i < (int)sizeof h / 4; i += WARP)
            ((uint32_t *)job.plan)[i] = ((const uint32_t *)&h)[i];
    }
    if (threadIdx.x == 0 && job.demand) *job.demand = p.demand[seat.rank];
    for (int e = threadIdx.x; e < (int)layer.num_experts && job.load; e += blockDim.x)
        job.load[e] = p.load[e];
    for (int l = threadIdx.x; l < h.num_local; l += blockDim.x) {
        const bool none = h.result != EPIC_OK || l >= h.owned;
        if (none && job.expert_rows) job.expert_rows[l] = 0;
        if (none && job.expert_tokens) job.expert_tokens[l] = 0;
    }
}

struct Placed {   /* one choice */
    int32_t rank; /* that gets a word about it, -1: none */
    uint32_t slot;
};

__device__ __forceinline__ Placed place_choice(const Planner &p, const p2p_plan_job &job,
                                               int64_t at, int64_t id, int32_t place,
                                               int32_t *fate, int32_t *rank_of)
{
    const int experts = job.layer.num_experts;
    const bool valid = id >= 0 && id < experts;
    const bool bad = p.header.result != EPIC_OK;
    int32_t where = EPIC_FATE_NONE, owner = -1;
    if (valid && p.header.result == EPIC_EOVERFLOW) where = EPIC_FATE_RANK_FULL;
    if (valid && !bad) {
        const int e = (int)id;
        const int32_t nth = p.low[e] + p.tally[threadIdx.x / WARP * experts + e] + place;
        const uint32_t limit = job.layer.expert_capacity;
        const bool full =
            job.layer.overflow == EPIC_OVERFLOW_DROP && limit && (uint32_t)nth >= limit;
        owner = nth < kept(p, job, e) ? p.owner[e] : -1;
        where = owner >= 0 ? p.start[e] + nth
                : full     ? EPIC_FATE_EXPERT_FULL
                           : EPIC_FATE_RANK_FULL;
    }
    fate[at] = where;
    rank_of[at] = owner;
    if (bad && valid) return {p.owner[(int)id], RECORD_DISCARD};
    return {owner, (uint32_t)where};
}

/* Sends the records of the lanes' tokens; c[h] is the choice of half h. */
__device__ __forceinline__ void send_records(const Now &now, const p2p_plan_job &job,
                                             const Lanes &lanes, int32_t token, bool in,
                                             const Placed (&c)[2])
{
    const p2p_seat &seat = job.seat;
    const int top_k = job.layer.top_k;
    const int64_t base = seat.at.records / 8 +
                         ((int64_t)parity(now) * seat.num_ranks + seat.rank) * seat.max_tokens *
                             DEVICE_MAX_TOP_K +
                         (int64_t)token * top_k;
    for (int i = 1; i <= seat.num_ranks; i++) {
        const int q = (seat.rank + i) % seat.num_ranks;
        uint64_t *to = (uint64_t *)seat.heap[q] + base;
        const uint32_t first = __ballot_sync(ALL_LANES, c[0].rank == q) & lanes.mates;
        const uint32_t second =
            lanes.halves == 2 ? __ballot_sync(ALL_LANES, c[1].rank == q) : 0;
        const uint32_t above = ~lanes_below() << 1;
        if (c[0].rank == q) {
            const bool last = !(first & above) && !second;
            store_relaxed(to + __popc(first & lanes_below()),
                          stamp(now, c[0].slot | (last ? RECORD_LAST : 0)));
        }
        if (c[1].rank == q) {
            const bool last = !(second & above);
            store_relaxed(to + __popc(first) + __popc(second & lanes_below()),
                          stamp(now, c[1].slot | (last ? RECORD_LAST : 0)));
        }
        if (in && lanes.on && lanes.k == 0 && !first && !second)
            store_relaxed(to, stamp(now, RECORD_ABSENT | RECORD_LAST));
    }
}

static __device__ void place_choices(Planner &p, const p2p_plan_job &job, const Now &now)
{
    const device_plan_layout at = device_plan_layout_of(job.seat.num_ranks, job.seat.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    int32_t *fate = (int32_t *)(job.plan + at.fate);
    int32_t *rank_of = (int32_t *)(job.plan + at.rank_of);
    const Lanes lanes(job.layer.top_k);
    const Part part = part_of_warp(p, job);
    const int top_k = job.layer.top_k;
    for (int t = part.begin; t < part.end; t += 2 * lanes.tokens) {
        int64_t where[4], id[4];
        int32_t place[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { /* two groups of tokens, two halves each */
            const int token = t + i / 2 * lanes.tokens + lanes.token;
            const int k = lanes.k + i % 2 * WARP;
            const bool in = lanes.on && token < part.end && k < top_k && i % 2 < lanes.halves;
            where[i] = in ? (int64_t)token * top_k + k : -1;
            id[i] = in ? choice_id(job, where[i]) : -1;
            place[i] = in ? fate[where[i]] : 0;
        }
#pragma unroll
        for (int g = 0; g < 2; g++) {
            Placed c[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = g * 2 + h;
                c[h] = {-1, 0};
                if (where[i] >= 0)
                    c[h] = place_choice(p, job, where[i], id[i], place[i], fate, rank_of);
            }
            const int token = t + g * lanes.tokens + lanes.token;
            send_records(now, job, lanes, token, token < part.end, c);
        }
    }
}

/* Every thread of the first `planners` CTAs.  false: the group is broken. */
static __device__ bool make_plan(Planner &p, const p2p_plan_job &job, const Now &now,
                                 uint8_t *memory)
{
    const device_plan_layout at = device_plan_layout_of(job.seat.num_ranks, job.seat.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    planner_begin(p, job, memory);
    __syncthreads();
    count_choices(p, job, (int32_t *)(job.plan + at.fate));
    __syncthreads();
    publish_tallies(p, job, now);
    bool ok = exchange_counts(p, job, now);
    ok = __syncthreads_and(ok);
    ok = ok && decide(p, job, now);
    if (!ok) return false;
    if (blockIdx.x == 0) {
        write_header(p, job, now);
        __syncthreads();
        if (threadIdx.x == 0) {
            if (p.header.result == EPIC_EINVAL) notify_fault(p, job, now);
            if (p.header.result == EPIC_EOVERFLOW) notify_overflow(p, job, now);
            __threadfence();
            store_release(&control_of(now)->planned, now.epoch);
        }
    }
    place_choices(p, job, now);
    return true;
}

/* ------------------------------------------------------------------- taking records ---- */

/* The record that `source` sent about its token, from the heap; strided by top_k.  (Hot paths
 * read the seat from the launch's parameters, never through now.seat.) */
__device__ __forceinline__ const uint64_t *record_words(const p2p_seat &seat, const Now &now,
                                                        int source, int64_t token, int top_k)
{
    return (const uint64_t *)(now.heap + seat.at.records) +
           ((int64_t)parity(now) * seat.num_ranks + source) * seat.max_tokens *
               DEVICE_MAX_TOP_K +
           token * top_k;
}

/* One warp takes the words [half * 32, ...) of a record as they come: this lane's slot, or -1;
 * RECORD_DISCARD stays itself.  `word` was read ahead; `more`: the record goes on. */
__device__ __forceinline__ bool take_record(const Now &now, const uint64_t *words, int top_k,
                                            int half, int source, uint64_t word, int32_t &slot,
                                            bool &more)
{
    const int lane = lane_id(), count = min(WARP, top_k - half * WARP);
    uint32_t lasts = 0;
    bool again = false;
    const bool ok = wait_until(now, source, P2P_PHASE_RECORD, [&] {
        if (again) word = lane < count ? load_relaxed(words + half * WARP + lane) : 0;
        again = true;
        const bool come = lane < count && stamped(now, word);
        const uint32_t there = __ballot_sync(ALL_LANES, come);
        lasts = __ballot_sync(ALL_LANES, come && ((uint32_t)word & RECORD_LAST));
        const uint32_t need = lasts           ? (2u << (__ffs(lasts) - 1)) - 1
                              : count == WARP ? ALL_LANES
                                              : (1u << count) - 1;
        return (there & need) == need && (lasts || (half + 1) * WARP < top_k);
    });
    const int last = lasts ? __ffs(lasts) - 1 : WARP;
    const uint32_t value = (uint32_t)word & ~RECORD_LAST;
    slot = ok && lane <= last && lane < count && value != RECORD_ABSENT ? (int32_t)value : -1;
    more = !lasts;
    return ok;
}

#endif
