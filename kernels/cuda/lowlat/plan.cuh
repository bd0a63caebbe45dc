/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of few tokens.  Every rank tells every other one the ids of all its choices, and each CTA
 * makes the whole plan by itself in shared memory: for each expert and 32 tokens of a rank a mask of
 * those that chose it, how many there are before, and where the expert's slab begins.  So there is
 * one hop, no count travels, and whatever all ranks must decide alike they decide on the same
 * numbers.  A token that chooses an expert twice does not fit the masks: then choices are counted
 * one by one, slowly; or, where ids are promised to be distinct, it is wrong data.
 *
 * Ids travel as stamped words of two, four ids side by side.  A rank does so if it has few tokens;
 * if it hears that another one has more, which will wait for counts, it gives up its tables, counts as
 * that one does (plan/planner.cuh), and takes records.
 *
 * A CTA meets three times: when all ids are there, when each warp has counted its experts, and when
 * slabs have their places.  Nothing else is waited for, so what one warp has to do is done beside:
 * by the speakers, each CTA's another part. */
#ifndef EPIC_FEW_PLAN_CUH
#define EPIC_FEW_PLAN_CUH

#include "cuda/dispatch/dispatch.cuh"
#include "cuda/lowlat/lowlat.cuh"

#define FEW_NONE 0xffffu /* an id that chooses nobody, */
#define FEW_BAD 0xfffeu  /* that is no expert's */
#define FEW_IDS 4        /* side by side */
/* With ids, at most 8192 of at most 4096 tokens, made up to multiples of four. */
#define FEW_PLAN_MOST_BYTES \
    (P2P_FEW_MASKS * 6 + FEW_WORKERS * WARP * 8 + P2P_FEW_CHOICES * 2 * 2 + 16)

struct Verdict { /* on a plan, the same on all ranks */
    uint32_t result;
    bool short_of_rows; /* the plan is good, and some rank has fewer rows than slots */
};

struct FewPlan { /* in shared memory; the arrays in dynamic shared memory */
    Planner p;   /* load, start, capacity, bad_ranks and header as every plan has them, but that
                         slabs begin behind those of the ranks below */
    uint32_t *mask;   /* [groups][num_experts] tokens of the group that chose the expert */
    uint16_t *before; /* [groups][num_experts] choices of it in the groups before */
    uint16_t *id;     /* [num_ranks][most][fours * FEW_IDS] */
    int32_t tokens[DEVICE_MAX_RANKS];
    int32_t rows[DEVICE_MAX_RANKS]; /* that the ranks have room for */
    uint32_t bad[DEVICE_MAX_RANKS]; /* the first choice that is no expert, or NOTHING */
    int32_t upto[FEW_WORKERS];      /* rows of a warp's experts */
    int32_t slots;                  /* of all ranks */
    int32_t most, groups;           /* tokens of a rank */
    int32_t experts, top_k, fours;  /* of the layer */
    bool twice;                     /* some token chose an expert twice */
    bool many;                      /* some rank has more tokens than few */

    __device__ __forceinline__ int index(int rank, int32_t token) const
    {
        return (rank * most + token) * fours * FEW_IDS;
    }
    /* The slot of choice k on its expert's rank, whose first expert is `first`; slots are in the
     * order of rank, token and k. */
    __device__ __forceinline__ int32_t slot_of(int rank, int32_t token, int k, int e,
                                               int first) const
    {
        const int at = (rank * groups + token / WARP) * experts + e;
        const int32_t begin = p.start[e] - p.start[first];
        if (!twice) return begin + before[at] + __popc(mask[at] & ((1u << token % WARP) - 1));
        return begin + count_before(rank, token * fours * FEW_IDS + k, (uint16_t)e);
    }
    /* Choices of the expert by ranks below, and by the first `choices` of that rank. */
    __device__ __noinline__ int count_before(int rank, int choices, uint16_t expert) const
    {
        int count = 0;
        for (int q = 0; q <= rank; q++) {
            const int first = index(q, 0),
                      many = q < rank ? tokens[q] * fours * FEW_IDS : choices;
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
        const int first = job.self.rank * job.block;
        const bool here = e - (uint32_t)first < (uint32_t)job.block;
        return here ? slot_of(rank, token, k, (int)e, first) : -1;
    }
    /* Where rank q's slabs begin among all; q = num_ranks: how many slots there are. */
    __device__ __forceinline__ int32_t slots_before(const p2p_plan_job &job, int q) const
    {
        const int e = q * job.block;
        return e < experts ? p.start[e] : slots;
    }
    /* One warp writes what the plan says of a token; lane k: the slot of choice k here. */
    __device__ __forceinline__ void keep_token(const p2p_plan_job &job, int rank, int32_t token,
                                               int32_t slot, uint32_t here,
                                               uint32_t result) const
    {
        const int k = lane_id(), n = __popc(here & lanes_below());
        const bool good = result == EPIC_OK;
        int32_t *record =
            (int32_t *)(job.plan + job.at.records) + record_at(job.self, rank, token, top_k);
        if (k < top_k)
            record[slot >= 0 ? n : __popc(here) + k - n] = slot >= 0 && good ? slot : -1;
        if (rank != job.self.rank || k >= top_k) return;
        const uint32_t e = choice(rank, token, k);
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

__host__ __device__ __forceinline__ int fours_of(const epic_layer &layer)
{
    return ((int)layer.top_k + FEW_IDS - 1) / FEW_IDS;
}

static inline int few_plan_bytes(const p2p_plan_job &job)
{
    const int64_t ranks = job.self.num_ranks, experts = job.layer.num_experts;
    const int64_t masks = ranks * ((job.most_few + WARP - 1) / WARP) * experts;
    const int64_t ids = ranks * job.most_few * fours_of(job.layer) * FEW_IDS;
    const int bytes = (int)(masks * 6 + experts * 8 + ids * 2 + 16);
    const int other = job.self.max_tokens > job.most_few ? planner_bytes_of(job) : 0;
    return bytes > other ? bytes : other;
}

/* Every thread, before the CTA meets: room for the tables, empty. */
static __device__ void open_tables(FewPlan &f, const p2p_plan_job &job, uint8_t *memory)
{
    const int experts = (int)job.layer.num_experts, ranks = job.self.num_ranks;
    const int groups = (job.most_few + WARP - 1) / WARP;
    const int masks = ranks * groups * experts;
    uint32_t *mask = (uint32_t *)memory;
    if (!is_speaker())
        for (int i = (int)threadIdx.x; i < masks; i += FEW_WORKERS * WARP) mask[i] = 0;
    if (threadIdx.x < DEVICE_MAX_RANKS) {
        f.bad[threadIdx.x] = NOTHING;
        f.tokens[threadIdx.x] = 0;
    }
    if (threadIdx.x) return;
    f.mask = mask;
    f.p.load = (int32_t *)(mask + masks);
    f.p.start = f.p.load + experts;
    f.id = (uint16_t *)(((uintptr_t)(f.p.start + experts) + 7) / 8 * 8);
    f.before = f.id + ranks * job.most_few * fours_of(job.layer) * FEW_IDS;
    f.most = job.most_few;
    f.groups = groups;
    f.p.bad_ranks = 0;
    f.experts = experts;
    f.top_k = (int)job.layer.top_k;
    f.fours = fours_of(job.layer);
    f.twice = f.many = false;
}

/* A choice as it is read; nothing is worked out of it, which would wait for it. */
struct RawId {
    uint32_t low, high; /* high: of int64 ids */
};

__device__ __forceinline__ RawId raw_id(const p2p_plan_job &job, int32_t token, int k)
{
    const int64_t at = (int64_t)token * job.layer.top_k + k;
    RawId id = {0xffffffffu, 0xffffffffu};
    if (k >= (int)job.layer.top_k) return id;
    if (job.wide) {
        const uint2 both = __ldg((const uint2 *)job.topk_idx + at);
        id = {both.x, both.y};
    } else {
        id.low = __ldg((const uint32_t *)job.topk_idx + at);
    }
    return id;
}

__device__ __forceinline__ uint32_t few_id(const p2p_plan_job &job, RawId id)
{
    const int32_t sign = (int32_t)(job.wide ? id.high : id.low);
    if (sign < 0) return FEW_NONE;
    return id.low >= job.layer.num_experts || (job.wide && id.high) ? FEW_BAD : id.low;
}

__device__ __forceinline__ uint32_t two_ids(const p2p_plan_job &job, RawId low, RawId high)
{
    return few_id(job, low) | few_id(job, high) << 16;
}

/* Where a rank's words about a token are in the heap; hosts: tokens lie side by side, so that those
 * of some tokens are one piece. */
__device__ __forceinline__ uint64_t *id_words(const p2p_plan_job &job, const Now &now,
                                              uint8_t *heap, int rank, int32_t token)
{
    return (uint64_t *)(heap + job.self.at.ids) +
           (((int64_t)parity(now) * job.self.num_ranks + rank) * job.most_few +
            (HOSTS ? 0 : token)) *
               P2P_FEW_ID_WORDS +
           (HOSTS ? token * 2 * fours_of(job.layer) : 0);
}

/* A speaker tells all peers the ids of some of this rank's tokens, of several at a time: lanes are
 * (token, word).  The first ones are read, and made words of, before anything else is known. */
struct IdTeller {
    const p2p_plan_job &job;
    const int words, bits; /* of a token */
    int32_t token;         /* this lane's */
    const int32_t step;
    RawId low, high;
    uint32_t both;

    __device__ __forceinline__ IdTeller(const p2p_plan_job &plan, const Crew &crew, bool tells)
        : job(plan), words(2 * fours_of(plan.layer)), bits(bits_of(words)),
          token((((int)blockIdx.x - crew.first) << (5 - bits)) + (lane_id() >> bits)),
          step(crew.ctas << (5 - bits))
    {
        if (!tells || !is_speaker() || !crew.has_me() || word() >= words)
            token = job.num_tokens;
        read();
    }
    __device__ __forceinline__ int word() const
    {
        return lane_id() & ((1 << bits) - 1);
    }
    __device__ __forceinline__ void read()
    {
        if (token >= job.num_tokens) return;
        low = raw_id(job, token, 2 * word());
        high = raw_id(job, token, 2 * word() + 1);
    }
    __device__ __forceinline__ void make()
    {
        if (token < job.num_tokens) both = two_ids(job, low, high);
    }
#ifdef EPIC_HOSTS
    /* What was made: all lanes at once, as the first one ships for all. */
    __device__ __forceinline__ void tell(const Now &now)
    {
        const p2p_self &self = job.self;
        for (int32_t first = __shfl_sync(ALL_LANES, token, 0); first < job.num_tokens;
             first += step, token += step, read(), make()) {
            const int many = min(job.num_tokens - first, WARP >> bits);
            for (int distance = 1; distance < self.num_ranks; distance++) {
                const int q = wrap(self.rank + distance, self.num_ranks);
                uint64_t *to = id_words(job, now, self.heap[q], self.rank, first);
                if (token < job.num_tokens)
                    store_relaxed(to + (token - first) * words + word(), stamp(now, both));
                ship_together(now, q, to, (uint32_t)(many * words) * 8);
            }
        }
    }
#else
    /* What was made. */
    __device__ __forceinline__ void tell(const Now &now)
    {
        const p2p_self &self = job.self;
        while (token < job.num_tokens) {
            for (int distance = 1; distance < self.num_ranks; distance++) {
                const int q = wrap(self.rank + distance, self.num_ranks);
                store_relaxed(id_words(job, now, self.heap[q], self.rank, token) + word(),
                              stamp(now, both));
            }
            token += step;
            read();
            make();
        }
    }
#endif
};

/* One choice of the tables; true: the token has chosen that expert before. */
__device__ __forceinline__ bool note_choice(FewPlan &f, int rank, int32_t token, int k,
                                            uint32_t e)
{
    if (e == FEW_BAD) atomicMin(&f.bad[rank], (uint32_t)(token * f.top_k + k));
    if (e >= (uint32_t)f.experts) return false;
    const uint32_t bit = 1u << token % WARP;
    return (atomicOr(&f.mask[(rank * f.groups + token / WARP) * f.experts + (int)e], bit) &
            bit) != 0;
}

/* Four ids of a token. */
__device__ __forceinline__ void note_four(FewPlan &f, int rank, int32_t token, int four,
                                          const uint32_t (&ids)[2])
{
    bool twice = false;
    *(uint2 *)(f.id + f.index(rank, token) + four * FEW_IDS) = make_uint2(ids[0], ids[1]);
#pragma unroll
    for (int j = 0; j < FEW_IDS; j++)
        twice |= note_choice(f, rank, token, four * FEW_IDS + j,
                             ids[j / 2] >> (j % 2 * 16) & 0xffff);
    if (twice) f.twice = true;
}

/* The workers: all ids of all ranks, four a lane.  The last warps begin, as the first ones have rows
 * to send.  A lane's ids are all of one rank. */
static __device__ bool gather_ids(FewPlan &f, const p2p_plan_job &job, const Now &now)
{
    const p2p_self &self = job.self;
    const int fours = fours_of(job.layer), four_bits = bits_of(fours);
    const int rank_bits = bits_of(self.num_ranks);
    const int first = (FEW_WORKERS - 1 - (int)threadIdx.x / WARP) * WARP + lane_id();
    const int four = first & ((1 << four_bits) - 1);
    const int rank = first >> four_bits & ((1 << rank_bits) - 1);
    const bool own = rank == self.rank, in = four < fours && rank < self.num_ranks;
    const int32_t step = FEW_WORKERS * WARP >> (four_bits + rank_bits);
    int32_t token = first >> (four_bits + rank_bits);
    int32_t known = own ? job.num_tokens : in ? -1 : 0; /* its tokens */
    const uint64_t *said =
        announcement(self, now, self.heap[self.rank], in ? rank : 0) + P2P_SAYS_TOKENS;
    for (; !__all_sync(ALL_LANES, token >= (known < 0 ? f.most : known)); token += step) {
        uint32_t ids[2];
        bool waits = in && !own && token < (known < 0 ? f.most : known);
        const uint64_t *from =
            id_words(job, now, self.heap[self.rank], in ? rank : 0, waits ? token : 0) +
            2 * four;
        if (in && own && token < known) {
            const int k = four * FEW_IDS;
            ids[0] = two_ids(job, raw_id(job, token, k), raw_id(job, token, k + 1));
            ids[1] = two_ids(job, raw_id(job, token, k + 2), raw_id(job, token, k + 3));
        }
        int missing = -1;
        const bool ok = wait_until(now, missing, P2P_PHASE_COUNTS, [&] {
            if (waits) {
                uint64_t a, b;
                load_two(from, a, b);
                const uint64_t tokens = known < 0 ? load_relaxed(said) : 0;
                if (known < 0 && stamped(now, tokens)) known = (int32_t)(uint32_t)tokens;
                if (known > f.most) known = 0; /* it sends none */
                ids[0] = (uint32_t)a;
                ids[1] = (uint32_t)b;
                waits = known < 0 || (token < known && !(stamped(now, a) && stamped(now, b)));
            }
            missing = waits ? rank : -1;
            return __any_sync(ALL_LANES, waits) == 0;
        });
        if (!ok) return false;
        if (in && token < known) note_four(f, rank, token, four, ids);
    }
    return true;
}

/* The speaker: what else the announcements say. */
static __device__ bool gather_sizes(FewPlan &f, const p2p_self &self, const Now &now)
{
    int32_t tokens, capacity, rows;
    if (!hear_sizes(self, now, tokens, capacity, rows)) return false;
    const int q = lane_id();
    f.p.header.tokens_of[q] = tokens;
    f.p.capacity[q] = capacity;
    f.rows[q] = rows;
    f.tokens[q] = tokens;
    if (tokens > f.most) f.many = true;
    return true;
}

/* Every thread: choices of each expert, then where the slabs begin.  Two barriers. */
static __device__ void sum_up(FewPlan &f, const p2p_plan_job &job)
{
    const int experts = f.experts, ranks = job.self.num_ranks;
    const int e = (int)threadIdx.x, warp = e / WARP;
    const bool counts =
        warp * WARP < experts; /* all warps together have few instructions a time */
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

/* One warp, lane = rank: slots that the rank needs. */
__device__ __forceinline__ int32_t needed_by(const FewPlan &f, const p2p_plan_job &job, int q)
{
    return q < job.self.num_ranks ? f.slots_before(job, q + 1) - f.slots_before(job, q) : 0;
}

/* Any thread: slots on this rank. */
__device__ __forceinline__ int32_t needed_here(const FewPlan &f, const p2p_plan_job &job)
{
    return f.slots_before(job, job.self.rank + 1) - f.slots_before(job, job.self.rank);
}

/* One warp.  `moves`: rows come too. */
static __device__ Verdict judge(const FewPlan &f, const p2p_plan_job &job, bool moves)
{
    const int q = lane_id();
    const bool is_rank = q < job.self.num_ranks;
    const int32_t needed = needed_by(f, job, q);
    const bool over = is_rank && f.p.capacity[q] && needed > f.p.capacity[q];
    const bool bad = is_rank && f.bad[q] != NOTHING;
    const bool few = is_rank && moves && needed > f.rows[q];
    if (!__any_sync(ALL_LANES, over || bad || few)) return {EPIC_OK, false};
    const bool any_bad = __any_sync(ALL_LANES, bad) != 0;
    const bool any_over = __any_sync(ALL_LANES, over) != 0;
    return {(uint32_t)(any_bad    ? EPIC_EINVAL
                       : any_over ? EPIC_EOVERFLOW
                                  : EPIC_OK),
            !any_bad && !any_over};
}

/* Every thread, of a layer whose ids are distinct: finds the first choice of each rank that is not,
 * which no order of the threads may decide. */
static __device__ __noinline__ void find_duplicates(FewPlan &f, int ranks)
{
    const int each = f.fours * FEW_IDS;
    for (int rank = 0; rank < ranks; rank++)
        for (int i = (int)threadIdx.x; i < f.tokens[rank] * each; i += FEW_BLOCK) {
            const uint16_t *id = f.id + f.index(rank, 0);
            for (int j = i - i % each; j < i; j++)
                if (id[j] == id[i] && id[i] < f.experts)
                    atomicMin(&f.bad[rank], (uint32_t)(i / each * f.top_k + i % each));
        }
}

#ifdef EPIC_HOSTS
/* What ranks of other hosts say comes to the inbox.  That may be host memory, where the polls of many
 * warps are served one after the other; so *porters* alone poll it, and bring what has come to the same
 * places of the heap, where all others wait for it.
 *
 * One warp: announcements. */
static __device__ bool port_announcements(const p2p_self &self, const Now &now)
{
    const int q = lane_id() < self.num_ranks ? lane_id() : self.rank;
    const uint64_t *from = announcement(self, now, self.inbox, q);
    uint64_t *to = announcement(self, now, now.heap, q), said[P2P_ANNOUNCE_WORDS];
    bool waits = is_far(self, q);
    return wait_until(now, -1, P2P_PHASE_ARRIVE, [&] {
        if (waits) {
            load_two(from, said[0], said[1]);
            load_two(from + 2, said[2], said[3]);
            waits = !(stamped(now, said[0]) && stamped(now, said[1]) && stamped(now, said[2]) &&
                      stamped(now, said[3]));
            for (int i = 0; i < P2P_ANNOUNCE_WORDS && !waits; i++)
                store_relaxed(to + i, said[i]);
        }
        return __any_sync(ALL_LANES, waits) == 0;
    });
}

/* Warp `part` of `parts`: ids, two words a lane.  How many come the announcement says. */
static __device__ bool port_ids(const p2p_plan_job &job, const Now &now, int part, int parts)
{
    const p2p_self &self = job.self;
    const int words = 2 * fours_of(job.layer), most = job.most_few * words;
    const int peers = self.num_ranks - 1, groups = (most + 2 * WARP - 1) / (2 * WARP);
    for (int u = part; u < peers * groups; u += parts) {
        const int q = wrap(self.rank + 1 + u % peers, self.num_ranks);
        const int at = u / peers * 2 * WARP + 2 * lane_id();
        const uint64_t *from = id_words(job, now, self.inbox, q, 0) + at;
        const uint64_t *said = announcement(self, now, now.heap, q) + P2P_SAYS_TOKENS;
        uint64_t *to = id_words(job, now, now.heap, q, 0) + at;
        bool waits = is_far(self, q) && at < most;
        int missing = -1;
        const bool ok = wait_until(now, missing, P2P_PHASE_COUNTS, [&] {
            if (waits) {
                uint64_t a, b;
                load_two(from, a, b);
                const uint64_t tokens = load_relaxed(said);
                const bool come = stamped(now, a) && stamped(now, b);
                const bool beyond =
                    stamped(now, tokens) && at >= (int32_t)(uint32_t)tokens * words;
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

/* Every warp of the last CTA, which takes nothing; or the speaker of the only one. */
static __device__ bool port(const p2p_plan_job &job, const Now &now)
{
    const bool alone = gridDim.x == 1;
    if (!is_speaker()) return alone || port_ids(job, now, (int)threadIdx.x / WARP, FEW_WORKERS);
    return port_announcements(job.self, now) && (!alone || port_ids(job, now, 0, 1));
}
#else
static __device__ bool port(const p2p_plan_job &, const Now &)
{
    return true;
}
#endif

enum FewPlanning { FEW_BROKEN, FEW_MADE, FEW_MANY /* some rank has more tokens */ };

/* Every thread. */
static __device__ FewPlanning make_few(FewPlan &f, const p2p_plan_job &job, const Now &now)
{
    bool ok = !HOSTS || gridDim.x > 1 || port(job, now);
    ok = ok && (is_speaker() ? gather_sizes(f, job.self, now) : gather_ids(f, job, now));
    if (!__syncthreads_and(ok)) return FEW_BROKEN;
    if (f.many) return FEW_MANY;
    if (f.twice && job.layer.flags & EPIC_DISTINCT) find_duplicates(f, job.self.num_ranks);
    sum_up(f, job);
    return FEW_MADE;
}

/* Every thread of every CTA that plans: together with ranks that have more tokens.  false: the group
 * is broken. */
static __device__ __noinline__ bool make_with_many(FewPlan &f, const p2p_plan_job &job,
                                                   const Now &now, uint8_t *memory)
{
    const bool ok = (int)blockIdx.x >= job.planners || make_plan<0>(f.p, job, now, memory);
    return __syncthreads_and(ok) != 0;
}

/* One speaker, while the ids are on their way: what the plan says whatever they are. */
static __device__ void begin_header(FewPlan &f, const p2p_plan_job &job, const Now &now)
{
    if (lane_id() == 0) {
        f.p.capacity[job.self.rank] = job.capacity;
        fill_header(f.p, job, now);
        f.p.header.num_local = f.p.header.owned = job.block;
    }
    __syncwarp();
}

/* The same one: the rest of the header, and what is told of wrong data. */
static __device__ void end_header(FewPlan &f, const p2p_plan_job &job, const Now &now,
                                  uint32_t result)
{
    const int q = lane_id();
    const int32_t needed = needed_by(f, job, q);
    f.p.header.slots_of[q] = f.p.demand[q] = needed;
    f.p.needed[q] = needed;
    if (q == 0) f.p.header.result = result;
    const uint32_t bad =
        __ballot_sync(ALL_LANES, q < job.self.num_ranks && f.bad[q] != NOTHING);
    if (q == 0) f.p.bad_ranks = bad;
    __syncwarp();
    tell_plan(f.p, job, lane_id(), WARP);
    if (lane_id() || result == EPIC_OK) return;
    if (f.bad[job.self.rank] != NOTHING)
        tell_wrong(job, now, P2P_FAULT_EXPERT, f.bad[job.self.rank]);
    if (result == EPIC_EINVAL)
        notify_fault(f.p, job, now);
    else
        notify_overflow(f.p, job, now);
}

/* One speaker: what the plan and the caller are told of the experts here. */
static __device__ void write_slabs(const FewPlan &f, const p2p_plan_job &job, uint32_t result)
{
    const bool good = result == EPIC_OK;
    int32_t *slab_begin = (int32_t *)(job.plan + job.at.slab_begin);
    device_padding *padding = (device_padding *)(job.plan + job.at.padding);
    const int slabs = 1 << device_slab_bits(job.block), first = job.self.rank * job.block;
    for (int l = lane_id(); l < slabs; l += WARP) {
        const int e = first + min(l, job.block - 1);
        const int32_t count = l < job.block ? f.p.load[e] : 0;
        const int32_t rows = (int32_t)aligned_rows(count, job.layer.alignment);
        const int32_t begin = f.p.start[e] - f.p.start[first];
        padding[l] = {rows == count ? 0 : begin + count, rows - count};
        if (l >= job.block) continue;
        slab_begin[l] = begin;
        if (job.expert_tokens && good) job.expert_tokens[l] = count;
        if (job.expert_rows && good) job.expert_rows[l] = rows;
    }
}

/* The speakers of the first two CTAs of the crew that made the plan, or of its only one. */
static __device__ void write_few(FewPlan &f, const p2p_plan_job &job, const Now &now,
                                 const Crew &crew, uint32_t result)
{
    const int part = (int)blockIdx.x - crew.first;
    if (part == 0) end_header(f, job, now, result);
    if (part == (crew.ctas > 1)) write_slabs(f, job, result);
}

#endif
