/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of few tokens. Every rank sends the ids of all its choices to every rank, and each
 * CTA makes the whole plan by itself in shared memory:
 *
 *   masks    for each expert and 32 tokens of a rank: which of them chose the expert
 *   before   choices of the expert in earlier groups of tokens
 *   start    where the slab of the expert begins
 *
 * So a plan takes one hop, no counts travel, and all ranks decide on equal numbers. A token
 * that chooses an expert twice does not fit the masks; then choices are counted one by one,
 * slowly. Where ids are promised to be distinct, it is an error in the data.
 *
 * Ids travel as stamped words of two ids; a lane handles four. A rank uses this planner if it
 * has few tokens. If another rank has more, that rank waits for counts; then this rank drops
 * its tables, counts like that one (plan/planner.cuh), and receives records ("mixed" below).
 *
 * A CTA has three barriers: when all ids have arrived, when each warp has counted its experts,
 * and when slabs are placed. Work for one warp is done by control warps meanwhile, a different
 * part in each CTA. */
#ifndef EPIC_LOWLAT_PLAN_CUH
#define EPIC_LOWLAT_PLAN_CUH

#include "cuda/dispatch/dispatch.cuh"
#include "cuda/lowlat/lowlat.cuh"

#define LOWLAT_NO_ID 0xffffu      /* the id of a choice without expert */
#define LOWLAT_INVALID_ID 0xfffeu /* the id of a choice that is out of range */
#define LOWLAT_LANE_IDS 4         /* ids per lane */
/* Largest tables. With ids: at most 8192, of at most 4096 tokens, rounded up to multiples of
 * four. */
#define LOWLAT_PLAN_MAX_BYTES \
    (P2P_LOWLAT_MASKS * 6 + LOWLAT_WORKERS * WARP * 8 + P2P_LOWLAT_CHOICES * 2 * 2 + 16)

struct PlanVerdict { /* the result of a plan, equal on all ranks */
    uint32_t result;
    bool short_of_rows; /* the plan is valid, but a rank has fewer rows than slots */
};

/* tables of the plan, in shared memory; the arrays in dynamic shared memory */
struct LowlatPlan {
    /* load, start, capacity, bad_ranks and header as in every plan, except that start counts
     * the slots of all ranks */
    Planner p;
    uint32_t *mask;   /* [groups][num_experts] tokens of the group that chose the expert */
    uint16_t *before; /* [groups][num_experts] choices of the expert in earlier groups */
    uint16_t *id;     /* [num_ranks][most][fours * LOWLAT_LANE_IDS] */
    int32_t tokens[DEVICE_MAX_RANKS];
    int32_t rows[DEVICE_MAX_RANKS]; /* rows that the ranks have room for */
    uint32_t bad[DEVICE_MAX_RANKS]; /* first choice with an invalid id, or NO_INDEX */
    int32_t upto[LOWLAT_WORKERS];   /* rows of the experts of warps 0 to w, running sum */
    int32_t slots;                  /* of all ranks */
    int32_t most,
        groups; /* largest number of tokens of a rank; number of groups that they make */
    int32_t experts, top_k, fours; /* of the layer; fours: lanes per token */
    bool twice;                    /* some token chose an expert twice */
    bool has_large_rank;           /* some rank has more tokens than this planner takes */

    /* Index of a token's first id. */
    __device__ __forceinline__ int first_id_index(int rank, int32_t token) const
    {
        return (rank * most + token) * fours * LOWLAT_LANE_IDS;
    }
    /* The slot of choice k on its expert's rank, whose first expert is `first`. Slots are in
     * the order of rank, token and k. */
    __device__ __forceinline__ int32_t slot_of(int rank, int32_t token, int k, int e,
                                               int first) const
    {
        const int at = (rank * groups + token / WARP) * experts + e;
        const int32_t begin = p.start[e] - p.start[first];
        if (!twice) return begin + before[at] + __popc(mask[at] & ((1u << token % WARP) - 1));
        return begin + count_before(rank, token * fours * LOWLAT_LANE_IDS + k, (uint16_t)e);
    }
    /* Choices of the expert on lower ranks, and among the first `choices` of `rank`. */
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
    /* The expert of the token's choice k as the rank has sent it, or LOWLAT_NO_ID. */
    __device__ __forceinline__ uint32_t choice_of(int rank, int32_t token, int k) const
    {
        return k < top_k ? id[first_id_index(rank, token) + k] : LOWLAT_NO_ID;
    }
    /* The slot of the token's choice k if its expert is here, else -1. */
    __device__ __forceinline__ int32_t slot_here(const p2p_plan_job &job, int rank,
                                                 int32_t token, int k) const
    {
        const uint32_t e = choice_of(rank, token, k);
        const int first = job.self.rank * job.block;
        const bool here = e - (uint32_t)first < (uint32_t)job.block;
        return here ? slot_of(rank, token, k, (int)e, first) : -1;
    }
    /* Slots of all ranks below q; all slots for q = num_ranks. */
    __device__ __forceinline__ int32_t slots_before(const p2p_plan_job &job, int q) const
    {
        const int e = q * job.block;
        return e < experts ? p.start[e] : slots;
    }
    /* Writes the words of the plan about a token. One warp; lane k has the slot of choice k
     * here. */
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

/* Lanes per token. */
__host__ __device__ __forceinline__ int fours_of(const epic_layer &layer)
{
    return ((int)layer.top_k + LOWLAT_LANE_IDS - 1) / LOWLAT_LANE_IDS;
}

/* Dynamic shared memory of the planner, enough for the other planner, too. */
static inline int lowlat_plan_bytes(const p2p_plan_job &job)
{
    const int64_t ranks = job.self.num_ranks, experts = job.layer.num_experts;
    const int64_t masks = ranks * ((job.max_lowlat_tokens + WARP - 1) / WARP) * experts;
    const int64_t ids = ranks * job.max_lowlat_tokens * fours_of(job.layer) * LOWLAT_LANE_IDS;
    const int bytes = (int)(masks * 6 + experts * 8 + ids * 2 + 16);
    const int other = job.self.max_tokens > job.max_lowlat_tokens ? planner_bytes_of(job) : 0;
    return bytes > other ? bytes : other;
}

/* Sets up empty tables. All threads, before the first barrier. */
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

/* An id as it is loaded. Nothing is computed from it yet, which would wait for the load. */
struct RawId {
    uint32_t low, high; /* high: of int64 ids */
};

/* Loads the id of choice k; -1 past the last choice. */
__device__ __forceinline__ RawId raw_id(const p2p_plan_job &job, int32_t token, int k)
{
    const int64_t at = (int64_t)token * job.layer.top_k + k;
    RawId id = {0xffffffffu, 0xffffffffu};
    if (k >= (int)job.layer.top_k) return id;
    if (job.has_int64_ids) {
        const uint2 both = __ldg((const uint2 *)job.topk_idx + at);
        id = {both.x, both.y};
    } else {
        id.low = __ldg((const uint32_t *)job.topk_idx + at);
    }
    return id;
}

/* A 16-bit id, or LOWLAT_NO_ID, or LOWLAT_INVALID_ID. */
__device__ __forceinline__ uint32_t encode_id(const p2p_plan_job &job, RawId id)
{
    const int32_t sign = (int32_t)(job.has_int64_ids ? id.high : id.low);
    if (sign < 0) return LOWLAT_NO_ID;
    return id.low >= job.layer.num_experts || (job.has_int64_ids && id.high) ? LOWLAT_INVALID_ID
                                                                             : id.low;
}

/* A word with two encoded ids. */
__device__ __forceinline__ uint32_t two_ids(const p2p_plan_job &job, RawId low, RawId high)
{
    return encode_id(job, low) | encode_id(job, high) << 16;
}

/* The words in a heap with the ids of a rank's token. backend hosts: those of consecutive
 * tokens are adjacent, so that one put copies several. */
__device__ __forceinline__ uint64_t *id_words(const p2p_plan_job &job, const OpState &op,
                                              uint8_t *heap, int rank, int32_t token)
{
    return (uint64_t *)(heap + job.self.at.ids) +
           (((int64_t)epoch_parity(op) * job.self.num_ranks + rank) * job.max_lowlat_tokens +
            (HOSTS ? 0 : token)) *
               P2P_LOWLAT_ID_WORDS +
           (HOSTS ? token * 2 * fours_of(job.layer) : 0);
}

/* A control warp sends the ids of some of this rank's tokens to all peers, several tokens at a
 * time; a lane has one word of one token. The first words are made before anything else is
 * known. */
struct IdSender {
    const p2p_plan_job &job;
    const int words, bits; /* words per token, and their bits */
    int32_t token;         /* token of this lane */
    const int32_t step;
    RawId low, high;
    uint32_t both;

    /* Loads the first ids. sends: false in kernels that have no ids to send. */
    __device__ __forceinline__ IdSender(const p2p_plan_job &plan, const CtaRange &planning_ctas,
                                        bool sends)
        : job(plan), words(2 * fours_of(plan.layer)), bits(bits_of(words)),
          token((((int)blockIdx.x - planning_ctas.first) << (5 - bits)) + (lane_id() >> bits)),
          step(planning_ctas.ctas << (5 - bits))
    {
        if (!sends || !is_control_warp() || !planning_ctas.contains_this_cta() ||
            word_of_lane() >= words)
            token = job.num_tokens;
        read_ids();
    }
    /* The number of this lane's word of its token. */
    __device__ __forceinline__ int word_of_lane() const
    {
        return lane_id() & ((1 << bits) - 1);
    }
    /* Loads the ids of this lane's word. */
    __device__ __forceinline__ void read_ids()
    {
        if (token >= job.num_tokens) return;
        low = raw_id(job, token, 2 * word_of_lane());
        high = raw_id(job, token, 2 * word_of_lane() + 1);
    }
    /* Makes this lane's word from the loaded ids. */
    __device__ __forceinline__ void make_words()
    {
        if (token < job.num_tokens) both = two_ids(job, low, high);
    }
#ifdef EPIC_HOSTS
    /* Sends all words. All lanes work together, because the first lane posts the put. */
    __device__ __forceinline__ void send_ids(const OpState &op)
    {
        const p2p_self &self = job.self;
        for (int32_t first = __shfl_sync(ALL_LANES, token, 0); first < job.num_tokens;
             first += step, token += step, read_ids(), make_words()) {
            const int many = min(job.num_tokens - first, WARP >> bits);
            for (int distance = 1; distance < self.num_ranks; distance++) {
                const int q = wrap_rank(self.rank + distance, self.num_ranks);
                uint64_t *to = id_words(job, op, self.heap[q], self.rank, first);
                if (token < job.num_tokens)
                    store_relaxed(to + (token - first) * words + word_of_lane(),
                                  stamp_word(op, both));
                post_put_warp(op, q, to, (uint32_t)(many * words) * 8);
            }
        }
    }
#else
    /* Sends all words. */
    __device__ __forceinline__ void send_ids(const OpState &op)
    {
        const p2p_self &self = job.self;
        while (token < job.num_tokens) {
            for (int distance = 1; distance < self.num_ranks; distance++) {
                const int q = wrap_rank(self.rank + distance, self.num_ranks);
                store_relaxed(id_words(job, op, self.heap[q], self.rank, token) +
                                  word_of_lane(),
                              stamp_word(op, both));
            }
            token += step;
            read_ids();
            make_words();
        }
    }
#endif
};

/* Marks a choice in the tables. Returns true if the token has chosen the expert before. */
__device__ __forceinline__ bool mark_choice(LowlatPlan &f, int rank, int32_t token, int k,
                                            uint32_t e)
{
    if (e == LOWLAT_INVALID_ID) atomicMin(&f.bad[rank], (uint32_t)(token * f.top_k + k));
    if (e >= (uint32_t)f.experts) return false;
    const uint32_t bit = 1u << token % WARP;
    return (atomicOr(&f.mask[(rank * f.groups + token / WARP) * f.experts + (int)e], bit) &
            bit) != 0;
}

/* Marks four choices of a token. */
__device__ __forceinline__ void mark_four_choices(LowlatPlan &f, int rank, int32_t token,
                                                  int four, const uint32_t (&ids)[2])
{
    bool twice = false;
    *(uint2 *)(f.id + f.first_id_index(rank, token) + four * LOWLAT_LANE_IDS) =
        make_uint2(ids[0], ids[1]);
#pragma unroll
    for (int j = 0; j < LOWLAT_LANE_IDS; j++)
        twice |= mark_choice(f, rank, token, four * LOWLAT_LANE_IDS + j,
                             ids[j / 2] >> (j % 2 * 16) & 0xffff);
    if (twice) f.twice = true;
}

/* Waits for the ids of all ranks and marks them, four per lane. Workers; the last warps begin,
 * because the first ones have rows to send. The ids of a lane are all of one rank. */
static __device__ bool gather_ids(LowlatPlan &f, const p2p_plan_job &job, const OpState &op)
{
    const p2p_self &self = job.self;
    const int fours = fours_of(job.layer), four_bits = bits_of(fours);
    const int rank_bits = bits_of(self.num_ranks);
    const int first = (LOWLAT_WORKERS - 1 - (int)threadIdx.x / WARP) * WARP + lane_id();
    const int four = first & ((1 << four_bits) - 1);
    const int rank = first >> four_bits & ((1 << rank_bits) - 1);
    const bool own = rank == self.rank, in = four < fours && rank < self.num_ranks;
    const int32_t step = LOWLAT_WORKERS * WARP >> (four_bits + rank_bits);
    int32_t token = first >> (four_bits + rank_bits);
    /* number of tokens of the rank; -1: not known */
    int32_t known = own ? job.num_tokens : in ? -1 : 0;
    const uint64_t *said = announcement_words(self, op, self.heap[self.rank], in ? rank : 0) +
                           P2P_ANNOUNCED_TOKENS;
    for (; !__all_sync(ALL_LANES, token >= (known < 0 ? f.most : known)); token += step) {
        uint32_t ids[2];
        bool waits = in && !own && token < (known < 0 ? f.most : known);
        const uint64_t *from =
            id_words(job, op, self.heap[self.rank], in ? rank : 0, waits ? token : 0) +
            2 * four;
        if (in && own && token < known) {
            const int k = four * LOWLAT_LANE_IDS;
            ids[0] = two_ids(job, raw_id(job, token, k), raw_id(job, token, k + 1));
            ids[1] = two_ids(job, raw_id(job, token, k + 2), raw_id(job, token, k + 3));
        }
        int missing = -1;
        const bool ok = wait_warp(op, missing, P2P_PHASE_COUNTS, [&] {
            if (waits) {
                uint64_t a, b;
                load_two_words(from, a, b);
                const uint64_t tokens = known < 0 ? load_relaxed(said) : 0;
                if (known < 0 && is_stamped(op, tokens)) known = (int32_t)(uint32_t)tokens;
                if (known > f.most) known = 0; /* that rank sends no ids */
                ids[0] = (uint32_t)a;
                ids[1] = (uint32_t)b;
                waits =
                    known < 0 || (token < known && !(is_stamped(op, a) && is_stamped(op, b)));
            }
            missing = waits ? rank : -1;
            return __any_sync(ALL_LANES, waits) == 0;
        });
        if (!ok) return false;
        if (in && token < known) mark_four_choices(f, rank, token, four, ids);
    }
    return true;
}

/* Waits for the other words of the announcements. The control warp. */
static __device__ bool gather_sizes(LowlatPlan &f, const p2p_self &self, const OpState &op)
{
    int32_t tokens, capacity, rows;
    if (!wait_sizes(self, op, tokens, capacity, rows)) return false;
    const int q = lane_id();
    f.p.header.tokens_of[q] = tokens;
    f.p.capacity[q] = capacity;
    f.rows[q] = rows;
    f.tokens[q] = tokens;
    if (tokens > f.most) f.has_large_rank = true;
    return true;
}

/* Counts the choices of each expert, then places the slabs. All threads; two barriers. */
static __device__ void compute_slabs(LowlatPlan &f, const p2p_plan_job &job)
{
    const int experts = f.experts, ranks = job.self.num_ranks;
    const int e = (int)threadIdx.x, warp = e / WARP;
    const bool counts = warp * WARP < experts; /* fewer warps run faster */
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
        rows = upto = (int32_t)round_up_rows(run, job.layer.alignment);
    }
    for (int d = 1; d < WARP && counts; d *= 2) {
        const int32_t r = __shfl_up_sync(ALL_LANES, upto, d);
        if (lane_id() >= d) upto += r;
    }
    if (counts && lane_id() == WARP - 1) f.upto[warp] = upto;
    __syncthreads();
    if (counts) {
        upto +=
            __reduce_add_sync(ALL_LANES, lane_id() < warp ? (uint32_t)f.upto[lane_id()] : 0);
        if (e < experts) f.p.start[e] = upto - rows;
        if (e == experts - 1) f.slots = upto;
    }
    __syncthreads();
}

/* Slots that rank q needs; lane = rank. One warp. */
__device__ __forceinline__ int32_t needed_by(const LowlatPlan &f, const p2p_plan_job &job,
                                             int q)
{
    return q < job.self.num_ranks ? f.slots_before(job, q + 1) - f.slots_before(job, q) : 0;
}

/* Slots that this rank needs. Any thread. */
__device__ __forceinline__ int32_t needed_here(const LowlatPlan &f, const p2p_plan_job &job)
{
    return f.slots_before(job, job.self.rank + 1) - f.slots_before(job, job.self.rank);
}

/* The result of the plan. One warp. `moves`: rows are moved, too. */
static __device__ PlanVerdict judge_plan(const LowlatPlan &f, const p2p_plan_job &job,
                                         bool moves)
{
    const int q = lane_id();
    const bool is_rank = q < job.self.num_ranks;
    const int32_t needed = needed_by(f, job, q);
    const bool over = is_rank && f.p.capacity[q] && needed > f.p.capacity[q];
    const bool bad = is_rank && f.bad[q] != NO_INDEX;
    const bool few = is_rank && moves && needed > f.rows[q];
    if (!__any_sync(ALL_LANES, over || bad || few)) return {EPIC_OK, false};
    const bool any_bad = __any_sync(ALL_LANES, bad) != 0;
    const bool any_over = __any_sync(ALL_LANES, over) != 0;
    return {(uint32_t)(any_bad    ? EPIC_EINVAL
                       : any_over ? EPIC_EOVERFLOW
                                  : EPIC_OK),
            !any_bad && !any_over};
}

/* Finds the first repeated id of each rank, whatever the order of threads, for a layer with
 * distinct ids. All threads. */
static __device__ __noinline__ void find_duplicates(LowlatPlan &f, int ranks)
{
    const int each = f.fours * LOWLAT_LANE_IDS;
    for (int rank = 0; rank < ranks; rank++)
        for (int i = (int)threadIdx.x; i < f.tokens[rank] * each; i += LOWLAT_BLOCK) {
            const uint16_t *id = f.id + f.first_id_index(rank, 0);
            for (int j = i - i % each; j < i; j++)
                if (id[j] == id[i] && id[i] < f.experts)
                    atomicMin(&f.bad[rank], (uint32_t)(i / each * f.top_k + i % each));
        }
}

#ifdef EPIC_HOSTS
/* backend hosts: words of other hosts arrive in the net inbox. That may be host memory, where
 * the polls of many warps are served one after the other. So only *inbox pollers* poll it; they
 * copy what has arrived to the same places of the heap, where all other warps wait for it.
 *
 * Copies the announcements. One warp. */
static __device__ bool copy_announcements(const p2p_self &self, const OpState &op)
{
    const int q = lane_id() < self.num_ranks ? lane_id() : self.rank;
    const uint64_t *from = announcement_words(self, op, self.inbox, q);
    uint64_t *to = announcement_words(self, op, op.heap, q), said[P2P_ANNOUNCE_WORDS];
    bool waits = is_remote(self, q);
    return wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        if (waits) {
            load_two_words(from, said[0], said[1]);
            load_two_words(from + 2, said[2], said[3]);
            waits = !(is_stamped(op, said[0]) && is_stamped(op, said[1]) &&
                      is_stamped(op, said[2]) && is_stamped(op, said[3]));
            for (int i = 0; i < P2P_ANNOUNCE_WORDS && !waits; i++)
                store_relaxed(to + i, said[i]);
        }
        return __any_sync(ALL_LANES, waits) == 0;
    });
}

/* Copies ids, two words per lane. Warp `part` of `parts`. The announcement has the number
 * of tokens. */
static __device__ bool copy_ids(const p2p_plan_job &job, const OpState &op, int part, int parts)
{
    const p2p_self &self = job.self;
    const int words = 2 * fours_of(job.layer), most = job.max_lowlat_tokens * words;
    const int peers = self.num_ranks - 1, groups = (most + 2 * WARP - 1) / (2 * WARP);
    for (int u = part; u < peers * groups; u += parts) {
        const int q = wrap_rank(self.rank + 1 + u % peers, self.num_ranks);
        const int at = u / peers * 2 * WARP + 2 * lane_id();
        const uint64_t *from = id_words(job, op, self.inbox, q, 0) + at;
        const uint64_t *said = announcement_words(self, op, op.heap, q) + P2P_ANNOUNCED_TOKENS;
        uint64_t *to = id_words(job, op, op.heap, q, 0) + at;
        bool waits = is_remote(self, q) && at < most;
        int missing = -1;
        const bool ok = wait_warp(op, missing, P2P_PHASE_COUNTS, [&] {
            if (waits) {
                uint64_t a, b;
                load_two_words(from, a, b);
                const uint64_t tokens = load_relaxed(said);
                const bool come = is_stamped(op, a) && is_stamped(op, b);
                const bool beyond =
                    is_stamped(op, tokens) && at >= (int32_t)(uint32_t)tokens * words;
                if (come) store_relaxed(to, a);
                if (come) store_relaxed(to + 1, b);
                waits = !come && !beyond;
            }
            missing = waits ? q : -1;
            return __any_sync(ALL_LANES, waits) == 0;
        });
        if (!ok) return false;
    }
    return true;
}

/* Polls the inbox. Every warp of the last CTA, which receives nothing; or the control warp of
 * the only CTA. */
static __device__ bool poll_inbox(const p2p_plan_job &job, const OpState &op)
{
    const bool alone = gridDim.x == 1;
    if (!is_control_warp())
        return alone || copy_ids(job, op, (int)threadIdx.x / WARP, LOWLAT_WORKERS);
    return copy_announcements(job.self, op) && (!alone || copy_ids(job, op, 0, 1));
}
#else
/* Peers store to the heap itself, so there is nothing to copy. */
static __device__ bool poll_inbox(const p2p_plan_job &, const OpState &)
{
    return true;
}
#endif

enum LowlatPlanState {
    LOWLAT_PLAN_BROKEN,
    LOWLAT_PLAN_MADE,
    LOWLAT_PLAN_MIXED /* some rank has more tokens */
};

/* Makes the plan in the tables. All threads. */
static __device__ LowlatPlanState make_lowlat_plan(LowlatPlan &f, const p2p_plan_job &job,
                                                   const OpState &op)
{
    bool ok = !HOSTS || gridDim.x > 1 || poll_inbox(job, op);
    ok = ok && (is_control_warp() ? gather_sizes(f, job.self, op) : gather_ids(f, job, op));
    if (!__syncthreads_and(ok)) return LOWLAT_PLAN_BROKEN;
    if (f.has_large_rank) return LOWLAT_PLAN_MIXED;
    if (f.twice && job.layer.flags & EPIC_DISTINCT) find_duplicates(f, job.self.num_ranks);
    compute_slabs(f, job);
    return LOWLAT_PLAN_MADE;
}

/* Makes the plan together with ranks that have more tokens. All threads of every CTA that
 * plans. false: the group is broken. */
static __device__ __noinline__ bool make_mixed_plan(LowlatPlan &f, const p2p_plan_job &job,
                                                    const OpState &op, uint8_t *memory)
{
    const bool ok = (int)blockIdx.x >= job.planners || make_plan<0>(f.p, job, op, memory);
    return __syncthreads_and(ok) != 0;
}

/* Fills in the header fields that do not depend on the ids, while ids are under way. One
 * control warp. */
static __device__ void begin_header(LowlatPlan &f, const p2p_plan_job &job, const OpState &op)
{
    if (lane_id() == 0) {
        f.p.capacity[job.self.rank] = job.capacity;
        fill_header(f.p, job, op);
        f.p.header.num_local = f.p.header.owned = job.block;
    }
    __syncwarp();
}

/* Fills in the rest of the header, writes it, and reports wrong data. The same control warp. */
static __device__ void end_header(LowlatPlan &f, const p2p_plan_job &job, const OpState &op,
                                  uint32_t result)
{
    const int q = lane_id();
    const int32_t needed = needed_by(f, job, q);
    f.p.header.slots_of[q] = f.p.demand[q] = needed;
    f.p.needed[q] = needed;
    if (q == 0) f.p.header.result = result;
    const uint32_t bad =
        __ballot_sync(ALL_LANES, q < job.self.num_ranks && f.bad[q] != NO_INDEX);
    if (q == 0) f.p.bad_ranks = bad;
    __syncwarp();
    write_plan_outputs(f.p, job, lane_id(), WARP);
    if (lane_id() || result == EPIC_OK) return;
    if (f.bad[job.self.rank] != NO_INDEX)
        publish_wrong_value(job, op, P2P_FAULT_EXPERT, f.bad[job.self.rank]);
    if (result == EPIC_EINVAL)
        report_fault(f.p, job, op);
    else
        report_overflow(f.p, job, op);
}

/* Writes the plan's tables of local experts and the caller's counts. One control warp. */
static __device__ void write_slabs(const LowlatPlan &f, const p2p_plan_job &job,
                                   uint32_t result)
{
    const bool good = result == EPIC_OK;
    int32_t *slab_begin = (int32_t *)(job.plan + job.at.slab_begin);
    device_padding *padding = (device_padding *)(job.plan + job.at.padding);
    const int slabs = 1 << device_slab_bits(job.block), first = job.self.rank * job.block;
    for (int l = lane_id(); l < slabs; l += WARP) {
        const int e = first + min(l, job.block - 1);
        const int32_t count = l < job.block ? f.p.load[e] : 0;
        const int32_t rows = (int32_t)round_up_rows(count, job.layer.alignment);
        const int32_t begin = f.p.start[e] - f.p.start[first];
        padding[l] = {rows == count ? 0 : begin + count, rows - count};
        if (l >= job.block) continue;
        slab_begin[l] = begin;
        if (job.expert_tokens && good) job.expert_tokens[l] = count;
        if (job.expert_rows && good) job.expert_rows[l] = rows;
    }
}

/* Writes the header and the slabs: the control warps of the first two CTAs that made the plan,
 * or of the only one. */
static __device__ void write_lowlat_plan(LowlatPlan &f, const p2p_plan_job &job,
                                         const OpState &op, const CtaRange &planning_ctas,
                                         uint32_t result)
{
    const int part = (int)blockIdx.x - planning_ctas.first;
    if (part == 0) end_header(f, job, op, result);
    if (part == (planning_ctas.ctas > 1)) write_slabs(f, job, result);
}

#endif
