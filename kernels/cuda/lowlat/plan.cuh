/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the plan for few tokens. A *choice* is a token and one of its top_k experts. Every rank
 * sends the expert ids of all its choices to every other rank. Then each CTA computes the whole
 * plan by itself, in shared memory (lowlat/plan_tables.cuh). All CTAs of all ranks use the same
 * ids, so they all compute the same plan.
 *
 *   writer                  stores                               reader that waits
 *   control warps           ids of this rank's tokens, to        workers of every CTA
 *                           every rank (stamped words)           (gather_ids)
 *   control warp, last CTA  sizes (stamped words)                control warps (gather_sizes)
 *
 * A CTA has one control warp, its last warp. The other warps are workers. A stamped word
 * contains the epoch (the number of the operation), and a reader accepts it only in this epoch.
 * So each word is its own flag, and no fence is needed.
 *
 * The ranks wait for each other only once: for the ids. The general planner (plan/planner.cuh)
 * must wait twice: first for counts, then for slots.
 *
 * A rank uses this planner if it has at most max_lowlat_tokens tokens. A rank with more tokens
 * uses plan/planner.cuh, which waits for counts from all ranks. So if there is such a rank, the
 * ranks with few tokens discard their tables, and also make the plan with plan/planner.cuh. On
 * these ranks the plan is called *mixed*.
 *
 * A CTA has three barriers for the plan: after all ids have arrived, after the warps of the CTA
 * have counted the choices of each expert, and after the warps have computed the first slot of
 * each slab (the slots of one expert). Some work needs only one warp per grid: the control warp
 * of one CTA writes the header, and the control warp of another CTA writes the tables of
 * slabs. */
#ifndef EPIC_LOWLAT_PLAN_CUH
#define EPIC_LOWLAT_PLAN_CUH

#include "cuda/lowlat/plan_tables.cuh"

/* One expert id as loaded from the caller's array, not yet encoded. The load may still be in
 * flight, because nothing uses its result before encode_id(). */
struct RawId {
    uint32_t low, high; /* high: upper half of an int64 id; unused for an int32 id */
};

/* Loads the expert id of choice k of `token`, a token of this rank. Returns -1 if k >=
 * top_k. */
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

/* Returns an expert id encoded in 16 bits: the id itself, LOWLAT_NO_ID if it is negative, or
 * LOWLAT_INVALID_ID if it is too large. */
__device__ __forceinline__ uint32_t encode_id(const p2p_plan_job &job, RawId id)
{
    const int32_t sign = (int32_t)(job.has_int64_ids ? id.high : id.low);
    if (sign < 0) return LOWLAT_NO_ID;
    return id.low >= job.layer.num_experts || (job.has_int64_ids && id.high) ? LOWLAT_INVALID_ID
                                                                             : id.low;
}

__device__ __forceinline__ uint32_t pack_ids(const p2p_plan_job &job, RawId low, RawId high)
{
    return encode_id(job, low) | encode_id(job, high) << 16;
}

/* Returns the address in `heap` of the words with the ids of `token`, a token of `rank`. In
 * backend `hosts`, there is no gap between the words of consecutive tokens, so that one put (a
 * copy by the net) sends the ids of several tokens. */
__device__ __forceinline__ uint64_t *id_words(const p2p_plan_job &job, const OpState &op,
                                              uint8_t *heap, int rank, int32_t token)
{
    return (uint64_t *)(heap + job.self.at.ids) +
           (((int64_t)epoch_parity(op) * job.self.num_ranks + rank) * job.max_lowlat_tokens +
            (HOSTS ? 0 : token)) *
               P2P_LOWLAT_ID_WORDS +
           (HOSTS ? token * 2 * id_lanes_of(job.layer) : 0);
}

/* Sends the expert ids of this rank's tokens to all ranks. They include this rank, because its
 * CTAs read these ids faster as stamped words than from the caller's array. Each control warp
 * handles some tokens, several at a time. Each lane sends one word, which contains two ids. The
 * constructor starts to load the first ids when the kernel starts. make_words() encodes the ids
 * that the lane has loaded. send_ids() sends all ids; it must be called after op has been
 * initialized. */
struct IdSender {
    const p2p_plan_job &job;
    /* token_words: number of words per token. word_bits: number of bits that an index below
     * token_words needs. */
    const int token_words, word_bits;
    /* token: the next word that this lane sends has ids of this token. token_step: after a
     * word, the lane adds this to `token`. */
    int32_t token;
    const int32_t token_step;
    RawId low, high; /* the two ids of this lane's word, before they are encoded */
    /* the word that this lane sends: two encoded ids */
    uint32_t id_pair;

    /* Starts to load the first ids. planning_ctas: the CTAs whose control warps send ids.
     * `sends`: false if the kernel makes no plan and therefore sends no ids. */
    __device__ __forceinline__ IdSender(const p2p_plan_job &plan, const CtaRange &planning_ctas,
                                        bool sends)
        : job(plan), token_words(2 * id_lanes_of(plan.layer)), word_bits(bits_of(token_words)),
          token((((int)blockIdx.x - planning_ctas.first) << (5 - word_bits)) +
                (lane_id() >> word_bits)),
          token_step(planning_ctas.ctas << (5 - word_bits))
    {
        if (!sends || !is_control_warp() || !planning_ctas.contains_this_cta() ||
            word_of_lane() >= token_words)
            token = job.num_tokens;
        read_ids();
    }
    __device__ __forceinline__ int word_of_lane() const
    {
        return lane_id() & ((1 << word_bits) - 1);
    }
    __device__ __forceinline__ void read_ids()
    {
        if (token >= job.num_tokens) return;
        low = raw_id(job, token, 2 * word_of_lane());
        high = raw_id(job, token, 2 * word_of_lane() + 1);
    }
    __device__ __forceinline__ void make_words()
    {
        if (token < job.num_tokens) id_pair = pack_ids(job, low, high);
    }
    /* Only in backend `hosts`: sends the ids of this warp's tokens to all ranks. Ranks on other
     * hosts get them by puts (copies by the net). All lanes run the same number of iterations,
     * because one put sends the words of all lanes. */
    __device__ __forceinline__ void put_ids(const OpState &op)
    {
        const p2p_self &self = job.self;
        for (int32_t first = __shfl_sync(ALL_LANES, token, 0); first < job.num_tokens;
             first += token_step, token += token_step, read_ids(), make_words()) {
            const int many = min(job.num_tokens - first, WARP >> word_bits);
            for (int distance = 0; distance < self.num_ranks; distance++) {
                const int q = wrap_rank(self.rank + distance, self.num_ranks);
                uint64_t *to = id_words(job, op, self.heap[q], self.rank, first);
                if (token < job.num_tokens)
                    store_relaxed(to + (token - first) * token_words + word_of_lane(),
                                  stamp_word(op, id_pair));
                post_put_warp(op, q, to, (uint32_t)(many * token_words) * 8);
            }
        }
    }
    /* Sends the ids of all tokens of this warp to all ranks. */
    __device__ __forceinline__ void send_ids(const OpState &op)
    {
        if (HOSTS) return put_ids(op);
        const p2p_self &self = job.self;
        while (token < job.num_tokens) {
            for (int distance = 0; distance < self.num_ranks; distance++) {
                const int q = wrap_rank(self.rank + distance, self.num_ranks);
                if (is_vacant(op, q)) continue;
                store_relaxed(id_words(job, op, self.heap[q], self.rank, token) +
                                  word_of_lane(),
                              stamp_word(op, id_pair));
            }
            token += token_step;
            read_ids();
            make_words();
        }
    }
};

/* Adds the choices of one rank to the tables. Each thread has its own ChoiceMarker. It copies
 * values of the tables into registers, because the compiler would otherwise load them from
 * shared memory again after each store. */
struct ChoiceMarker {
    LowlatPlan &tables;
    const int rank; /* the rank whose choices are added */
    const uint32_t num_experts;
    const int ids_per_token; /* number of elements of `ids` per token, at least top_k */
    /* the parts of LowlatPlan::mask and LowlatPlan::ids that belong to this rank */
    uint32_t *const mask;
    uint16_t *const ids;
    bool has_repeats; /* true: this thread has found a token that chose an expert twice */

    __device__ __forceinline__ ChoiceMarker(LowlatPlan &plan, int of_rank)
        : tables(plan), rank(of_rank), num_experts((uint32_t)plan.num_experts),
          ids_per_token(plan.id_lanes * P2P_LOWLAT_LANE_IDS),
          mask(plan.mask + of_rank * plan.num_groups * plan.num_experts),
          ids(plan.ids + plan.first_id_index(of_rank, 0)), has_repeats(false)
    {
    }
    /* Marks in the mask of expert e (plan_tables.cuh) that `token` has chosen this expert in
     * choice k. `e`: the encoded expert id. LOWLAT_NO_ID marks nothing. If e is
     * LOWLAT_INVALID_ID, the choice is wrong, and bad_choice[rank] becomes the lower of its
     * old value and the choice's index. */
    __device__ __forceinline__ void mark_choice(int32_t token, int k, uint32_t e)
    {
        const uint32_t bit = 1u << token % WARP;
        if (e < num_experts)
            has_repeats |=
                (atomicOr(mask + (uint32_t)(token / WARP) * num_experts + e, bit) & bit) != 0;
        else if (e == LOWLAT_INVALID_ID)
            atomicMin(&tables.bad_choice[rank], (uint32_t)(token * tables.top_k + k));
    }
    /* Sets tables.has_repeats if this thread has found a token that chose an expert twice.
     * Called after the thread's last choice. */
    __device__ __forceinline__ void note_repeats() const
    {
        if (has_repeats) tables.has_repeats = true;
    }
};

/* Returns the index of this thread among the workers of its CTA. The last warps have the first
 * indices, because the first warps may still be sending rows. */
__device__ __forceinline__ int gatherer_index()
{
    return (LOWLAT_WORKERS - 1 - (int)threadIdx.x / WARP) * WARP + lane_id();
}

/* Waits for the expert ids of all ranks, and adds their choices to the tables. Each lane
 * handles tokens of one rank, and P2P_LOWLAT_LANE_IDS (4) choices of a token at a time. Called
 * by the workers of the CTA. Returns false if the group has failed. */
static __device__ bool gather_ids(LowlatPlan &tables, const p2p_plan_job &job,
                                  const OpState &op)
{
    const p2p_self &self = job.self;
    const int ranks = self.num_ranks;
    const int id_lane_bits = bits_of(tables.id_lanes), rank_bits = bits_of(ranks);
    const int id_lane = gatherer_index() & ((1 << id_lane_bits) - 1);
    const int distance = gatherer_index() >> id_lane_bits & ((1 << rank_bits) - 1);
    const int rank = wrap_rank(self.rank + min(distance, ranks - 1), ranks);
    const int32_t step = LOWLAT_WORKERS * WARP >> (id_lane_bits + rank_bits);
    const int first = id_lane * P2P_LOWLAT_LANE_IDS; /* index of the lane's first choice */
    int32_t token = gatherer_index() >> (id_lane_bits + rank_bits);
    /* the lanes that are left over must not handle a token that others handle, too */
    const bool is_used = token < step && id_lane < tables.id_lanes && distance < ranks &&
                         is_member(self, op, rank);
    ChoiceMarker marker(tables, rank);
    /* number of tokens of `rank`; -1 until its announcement has arrived */
    int32_t num_tokens = !is_used ? 0 : rank == self.rank ? job.num_tokens : -1;
    const uint64_t *announced =
        announcement_words(self, op, self.heap[self.rank], rank) + P2P_ANNOUNCED_TOKENS;
    for (; __any_sync(ALL_LANES, token < (num_tokens < 0 ? tables.max_tokens : num_tokens));
         token += step) {
        uint32_t ids[2];
        bool waits = token < (num_tokens < 0 ? tables.max_tokens : num_tokens);
        const uint64_t *from =
            id_words(job, op, self.heap[self.rank], rank, waits ? token : 0) + 2 * id_lane;
        int missing = -1;
        const bool ok = wait_warp(op, missing, P2P_PHASE_COUNTS, [&] {
            if (waits) {
                uint64_t a, b;
                load_two_words(from, a, b);
                const uint64_t tokens = num_tokens < 0 ? load_relaxed(announced) : 0;
                if (num_tokens < 0 && is_stamped(op, tokens))
                    num_tokens = (int32_t)(uint32_t)tokens;
                /* a rank with more tokens uses the general planner and sends no ids */
                if (num_tokens > tables.max_tokens) num_tokens = 0;
                ids[0] = (uint32_t)a;
                ids[1] = (uint32_t)b;
                waits = num_tokens < 0 ||
                        (token < num_tokens && !(is_stamped(op, a) && is_stamped(op, b)));
            }
            missing = waits && rank != self.rank ? rank : -1;
            return __any_sync(ALL_LANES, waits) == 0;
        });
        if (!ok) return false;
        if (token >= num_tokens) continue;
        *(uint2 *)(marker.ids + token * marker.ids_per_token + first) =
            make_uint2(ids[0], ids[1]);
#pragma unroll
        for (int j = 0; j < P2P_LOWLAT_LANE_IDS; j++)
            marker.mark_choice(token, first + j, ids[j / 2] >> (j % 2 * 16) & 0xffff);
    }
    marker.note_repeats();
    return true;
}

/* Waits for the sizes (tokens, capacity, rows) of all ranks, and stores them in the tables.
 * Called by the control warp. Returns false if the group has failed. */
static __device__ bool gather_sizes(LowlatPlan &tables, const p2p_self &self, const OpState &op)
{
    int32_t tokens, capacity, rows;
    if (!wait_sizes(self, op, tokens, capacity, rows)) return false;
    const int q = lane_id();
    tables.p.header.tokens_of[q] = tokens;
    tables.p.capacity[q] = capacity;
    tables.recv_rows[q] = rows;
    tables.tokens[q] = tokens;
    if (tokens > tables.max_tokens) tables.has_large_rank = true;
    return true;
}

#define MASKS_AT_ONCE 8 /* number of masks that a lane loads before it uses any */

/* Counts the choices of expert e in all token blocks, and fills in earlier_choices. Returns the
 * number of slots that the expert needs. */
__device__ __forceinline__ int32_t count_choices(LowlatPlan &tables, const p2p_plan_job &job,
                                                 int e)
{
    const int experts = tables.num_experts, ranks = job.self.num_ranks;
    int32_t count = 0;
    for (int q = 0; q < ranks; q++) {
        const int groups = (tables.tokens[q] + WARP - 1) / WARP;
        const int begin = q * tables.num_groups * experts + e;
        const uint32_t *mask = tables.mask + begin;
        uint16_t *earlier = tables.earlier_choices + begin;
        for (int first = 0; first < groups; first += MASKS_AT_ONCE) {
            int32_t choices[MASKS_AT_ONCE];
#pragma unroll
            for (int g = 0; g < MASKS_AT_ONCE; g++)
                choices[g] = first + g < groups ? __popc(mask[(first + g) * experts]) : 0;
#pragma unroll
            for (int g = 0; g < MASKS_AT_ONCE; g++) {
                if (first + g < groups) earlier[(first + g) * experts] = (uint16_t)count;
                count += choices[g];
            }
        }
    }
    if (tables.has_repeats) count = tables.count_before(ranks, 0, (uint16_t)e);
    tables.load[e] = count;
    return (int32_t)round_up_rows(count, job.layer.alignment);
}

/* Counts the choices of each expert, then computes the first slot of each expert's slab. A warp
 * handles chunks of 32 experts, each lane one expert of a chunk. Called by all threads of the
 * CTA when all ids have arrived; contains two barriers. */
static __device__ void compute_slabs(LowlatPlan &tables, const p2p_plan_job &job)
{
    const int experts = tables.num_experts, chunks = (experts + WARP - 1) / WARP;
    const int first = (int)threadIdx.x / WARP, step = LOWLAT_BLOCK / WARP;
    for (int chunk = first; chunk < chunks; chunk += step) {
        const int e = chunk * WARP + lane_id();
        const int32_t rows = e < experts ? count_choices(tables, job, e) : 0;
        int32_t upto = rows;
        for (int d = 1; d < WARP; d *= 2) {
            const int32_t r = __shfl_up_sync(ALL_LANES, upto, d);
            if (lane_id() >= d) upto += r;
        }
        if (e < experts) tables.group_slab_start[e] = upto - rows;
        if (lane_id() == WARP - 1) tables.chunk_slots[chunk] = upto;
    }
    __syncthreads();
    for (int chunk = first; chunk < chunks; chunk += step) {
        const int e = chunk * WARP + lane_id();
        const int32_t slots = lane_id() < chunks ? tables.chunk_slots[lane_id()] : 0;
        const int32_t before =
            (int32_t)__reduce_add_sync(ALL_LANES, lane_id() < chunk ? (uint32_t)slots : 0);
        if (e < experts) tables.group_slab_start[e] += before;
        if (chunk == chunks - 1 && lane_id() == chunk) tables.total_slots = before + slots;
    }
    __syncthreads();
}

/* Returns the number of slots that rank q needs in its receive buffer, or 0 if there is no rank
 * q. */
__device__ __forceinline__ int32_t needed_by(const LowlatPlan &tables, const p2p_plan_job &job,
                                             int q)
{
    return q < job.self.num_ranks
               ? tables.slots_before(job, q + 1) - tables.slots_before(job, q)
               : 0;
}

/* Returns the number of slots that this rank needs in its receive buffer. */
__device__ __forceinline__ int32_t needed_here(const LowlatPlan &tables,
                                               const p2p_plan_job &job)
{
    return tables.slots_before(job, job.self.rank + 1) -
           tables.slots_before(job, job.self.rank);
}

/* Checks the plan. It has an error if an expert id is invalid, if a seat (rank number) is
 * vacant, because this seat would have experts, or if a rank needs more slots than its
 * capacity. `moves`: true if the operation also moves rows. In this case, short_of_rows becomes
 * true if a valid plan needs more slots on a rank than the rank's receive buffer has rows. The
 * result is equal on all ranks. Called by one warp. */
static __device__ PlanCheck check_plan(const LowlatPlan &tables, const p2p_plan_job &job,
                                       const OpState &op, bool moves)
{
    const int q = lane_id();
    if (vacant_seats(op)) return {EPIC_EINVAL, false};
    const bool is_rank = q < job.self.num_ranks;
    const int32_t needed = needed_by(tables, job, q);
    const bool over = is_rank && tables.p.capacity[q] && needed > tables.p.capacity[q];
    const bool bad = is_rank && tables.bad_choice[q] != NO_INDEX;
    const bool few = is_rank && moves && needed > tables.recv_rows[q];
    if (!__any_sync(ALL_LANES, over || bad || few)) return {EPIC_OK, false};
    const bool any_bad = __any_sync(ALL_LANES, bad) != 0;
    const bool any_over = __any_sync(ALL_LANES, over) != 0;
    return {(uint32_t)(any_bad    ? EPIC_EINVAL
                       : any_over ? EPIC_EOVERFLOW
                                  : EPIC_OK),
            !any_bad && !any_over};
}

/* Finds duplicates. A choice is a duplicate if an earlier choice of its token has the same
 * expert. With EPIC_DISTINCT, a duplicate is an error. For each rank, bad_choice[rank] becomes
 * the lowest index of a duplicate or invalid choice. This index is computed by atomicMin, so it
 * does not depend on the order of threads. Called by all threads of the CTA. */
static __device__ __noinline__ void find_duplicates(LowlatPlan &tables, int ranks)
{
    const int each = tables.id_lanes * P2P_LOWLAT_LANE_IDS;
    for (int rank = 0; rank < ranks; rank++)
        for (int i = (int)threadIdx.x; i < tables.tokens[rank] * each; i += LOWLAT_BLOCK) {
            const uint16_t *id = tables.ids + tables.first_id_index(rank, 0);
            for (int j = i - i % each; j < i; j++)
                if (id[j] == id[i] && id[i] < tables.num_experts)
                    atomicMin(&tables.bad_choice[rank],
                              (uint32_t)(i / each * tables.top_k + i % each));
        }
}

/* Copies the announcements of ranks on other hosts from the net inbox to the heap. Called by
 * one warp. Returns false if the group has failed.
 *
 * The net inbox may be in host memory, where polls of many warps are slow, because they are
 * served one after the other. So only a few warps, the *inbox pollers*, poll the net inbox.
 * They copy the words that have arrived to the same offsets of the heap. All other warps poll
 * the heap. */
static __device__ bool copy_announcements(const p2p_self &self, const OpState &op)
{
    const int q = lane_id() < self.num_ranks ? lane_id() : self.rank;
    const uint64_t *from = announcement_words(self, op, net_inbox(self), q);
    uint64_t *to = announcement_words(self, op, op.heap, q), announced[P2P_ANNOUNCE_WORDS];
    bool waits = is_remote(self, q);
    return wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        if (waits) {
            load_two_words(from, announced[0], announced[1]);
            load_two_words(from + 2, announced[2], announced[3]);
            waits = !(is_stamped(op, announced[0]) && is_stamped(op, announced[1]) &&
                      is_stamped(op, announced[2]) && is_stamped(op, announced[3]));
            for (int i = 0; i < P2P_ANNOUNCE_WORDS && !waits; i++)
                store_relaxed(to + i, announced[i]);
        }
        return __any_sync(ALL_LANES, waits) == 0;
    });
}

/* Copies the expert ids of ranks on other hosts from the net inbox to the heap, as they arrive.
 * Each lane waits for two words at a time and copies them. If the rank has announced so few
 * tokens that it does not send these words, the lane stops waiting. `warps`: number of warps
 * that share the work. `warp`: index of the calling warp among these warps. Returns false if
 * the group has failed. */
static __device__ bool copy_ids(const p2p_plan_job &job, const OpState &op, int warp, int warps)
{
    const p2p_self &self = job.self;
    const int token_words = 2 * id_lanes_of(job.layer),
              most = job.max_lowlat_tokens * token_words;
    const int peers = self.num_ranks - 1, groups = (most + 2 * WARP - 1) / (2 * WARP);
    for (int u = warp; u < peers * groups; u += warps) {
        const int q = wrap_rank(self.rank + 1 + u % peers, self.num_ranks);
        const int index = u / peers * 2 * WARP + 2 * lane_id();
        const uint64_t *from = id_words(job, op, net_inbox(self), q, 0) + index;
        const uint64_t *announced =
            announcement_words(self, op, op.heap, q) + P2P_ANNOUNCED_TOKENS;
        uint64_t *to = id_words(job, op, op.heap, q, 0) + index;
        bool waits = is_remote(self, q) && index < most;
        int missing = -1;
        const bool ok = wait_warp(op, missing, P2P_PHASE_COUNTS, [&] {
            if (waits) {
                uint64_t a, b;
                load_two_words(from, a, b);
                const uint64_t tokens = load_relaxed(announced);
                const bool has_arrived = is_stamped(op, a) && is_stamped(op, b);
                const bool is_past_end =
                    is_stamped(op, tokens) && index >= (int32_t)(uint32_t)tokens * token_words;
                if (has_arrived) store_relaxed(to, a);
                if (has_arrived) store_relaxed(to + 1, b);
                waits = !has_arrived && !is_past_end;
            }
            missing = waits ? q : -1;
            return __any_sync(ALL_LANES, waits) == 0;
        });
        if (!ok) return false;
    }
    return true;
}

/* Only in backend `hosts`: copies the announcements and ids of ranks on other hosts from the
 * net inbox to the heap. Called by all threads of the last CTA, which receives no rows. If the
 * grid has only one CTA, only the control warp polls, because the workers have rows to move.
 * Returns false if the group has failed. */
static __device__ bool poll_inbox(const p2p_plan_job &job, const OpState &op)
{
    if (!HOSTS) return true;
    const bool alone = gridDim.x == 1;
    if (!is_control_warp())
        return alone || copy_ids(job, op, (int)threadIdx.x / WARP, LOWLAT_WORKERS);
    return copy_announcements(job.self, op) && (!alone || copy_ids(job, op, 0, 1));
}

/* The result of make_lowlat_plan(). */
enum LowlatPlanState {
    LOWLAT_PLAN_BROKEN, /* the group has failed */
    LOWLAT_PLAN_MADE,   /* the tables contain the plan */
    /* a rank has too many tokens for the tables: the caller must call make_mixed_plan() */
    LOWLAT_PLAN_MIXED
};

/* Waits for the ids and sizes of all ranks, then computes the tables of this CTA. Called by all
 * threads of the CTA. */
static __device__ LowlatPlanState make_lowlat_plan(LowlatPlan &tables, const p2p_plan_job &job,
                                                   const OpState &op)
{
    bool ok = !HOSTS || gridDim.x > 1 || poll_inbox(job, op);
    ok = ok &&
         (is_control_warp() ? gather_sizes(tables, job.self, op) : gather_ids(tables, job, op));
    if (!__syncthreads_and(ok)) return LOWLAT_PLAN_BROKEN;
    if (tables.has_large_rank) return LOWLAT_PLAN_MIXED;
    if (tables.has_repeats && job.layer.flags & EPIC_DISTINCT)
        find_duplicates(tables, job.self.num_ranks);
    compute_slabs(tables, job);
    return LOWLAT_PLAN_MADE;
}

/* Makes a mixed plan with the general planner, because another rank has more tokens than the
 * tables can hold. The first job.planners CTAs run make_plan() in `memory`, the dynamic shared
 * memory. Called by all threads of every CTA that has called make_lowlat_plan(). Returns false
 * if the group has failed. */
static __device__ __noinline__ bool make_mixed_plan(LowlatPlan &tables, const p2p_plan_job &job,
                                                    const OpState &op, uint8_t *memory)
{
    const bool ok = (int)blockIdx.x >= job.planners || make_plan<0>(tables.p, job, op, memory);
    return __syncthreads_and(ok) != 0;
}

/* Fills in those fields of the plan's header that do not depend on the ids. Called by one
 * control warp of the grid, before the ids have arrived. */
static __device__ void begin_header(LowlatPlan &tables, const p2p_plan_job &job,
                                    const OpState &op)
{
    if (lane_id() == 0) {
        tables.p.capacity[job.self.rank] = read_capacity(job);
        fill_header(tables.p, job, op);
        tables.p.header.num_local = tables.p.header.owned = job.block;
    }
    __syncwarp();
}

/* Reports to the host that the plan is invalid because a seat (rank number) is vacant. Each
 * seat, also a vacant one, has job.block experts. The error is that of the general planner. It
 * names the lowest member, because a vacant seat has no process that could be at fault. With
 * EPIC_TREE, the first wrong expert is the first expert of seat 0 if this seat is vacant. If it
 * is not, seat 0 has too few experts for a block, and the next seat has the wrong expert.
 * Called by one thread. */
static __device__ __noinline__ void report_vacant(const p2p_plan_job &job, const OpState &op)
{
    const bool is_tree = job.layer.sum_order == EPIC_TREE;
    const int vacant = __ffs(vacant_seats(op)) - 1, member = __ffs(~vacant_seats(op)) - 1;
    const int seat = is_tree ? min(vacant, 1) : vacant;
    p2p_notice notice = {EPIC_EINVAL,
                         op.epoch,
                         (uint32_t)(is_tree ? P2P_FAULT_PLACEMENT : P2P_FAULT_VACANT),
                         member,
                         {seat * job.block, seat, 0, 0}};
    if (is_tree && !has_leaves_of_members(job, op))
        notice = {EPIC_EINVAL,
                  op.epoch,
                  P2P_FAULT_MEMBERS,
                  member,
                  {job.layer.leaves, num_members(job.self, op), 0, 0}};
    report_data_error(job.self, notice);
}

/* Fills in the fields of the header that begin_header() has not set. Then writes the header and
 * the caller's outputs, and reports invalid ids and overflows. Called by the same control warp
 * as begin_header(), after the ids have arrived. */
static __device__ void end_header(LowlatPlan &tables, const p2p_plan_job &job,
                                  const OpState &op, uint32_t result)
{
    const int q = lane_id();
    const int32_t needed = needed_by(tables, job, q);
    tables.p.header.slots_of[q] = tables.p.demand[q] = needed;
    tables.p.needed_slots[q] = needed;
    if (q == 0) tables.p.header.result = result;
    const uint32_t bad =
        __ballot_sync(ALL_LANES, q < job.self.num_ranks && tables.bad_choice[q] != NO_INDEX);
    if (q == 0) tables.p.bad_ranks = bad;
    __syncwarp();
    write_plan_outputs(tables.p, job, lane_id(), WARP);
    if (lane_id() || result == EPIC_OK) return;
    if (vacant_seats(op)) return report_vacant(job, op);
    if (tables.bad_choice[job.self.rank] != NO_INDEX)
        publish_wrong_value(job, op, P2P_FAULT_EXPERT, tables.bad_choice[job.self.rank]);
    if (result == EPIC_EINVAL)
        report_fault(tables.p, job, op);
    else
        report_overflow(tables.p, job, op);
}

/* For each local expert, writes the first slot and the padding of the expert's slab (its slots)
 * to the plan. Also writes the expert's number of tokens and number of rows to the caller's
 * arrays. Called by one control warp of the grid. */
static __device__ void write_slabs(const LowlatPlan &tables, const p2p_plan_job &job,
                                   uint32_t result)
{
    const bool good = result == EPIC_OK;
    int32_t *slab_begin = (int32_t *)(job.plan + job.at.slab_begin);
    device_padding *padding = (device_padding *)(job.plan + job.at.padding);
    const int slabs = 1 << device_slab_bits(job.block), first = job.self.rank * job.block;
    for (int l = lane_id(); l < slabs; l += WARP) {
        const int e = first + min(l, job.block - 1);
        const int32_t count = l < job.block ? tables.load[e] : 0;
        const int32_t rows = (int32_t)round_up_rows(count, job.layer.alignment);
        const int32_t begin = tables.group_slab_start[e] - tables.group_slab_start[first];
        padding[l] = {rows == count ? 0 : begin + count, rows - count};
        if (l >= job.block) continue;
        slab_begin[l] = begin;
        if (good) write_expert_counts(job, l, rows, count);
    }
}

/* Writes the header and the tables of slabs of the plan. Called by all control warps of the
 * planning CTAs. The control warp of the first CTA writes the header. The control warp of the
 * second CTA writes the tables. If there is only one CTA, its control warp writes the header
 * and the tables. */
static __device__ void write_lowlat_plan(LowlatPlan &tables, const p2p_plan_job &job,
                                         const OpState &op, const CtaRange &planning_ctas,
                                         uint32_t result)
{
    const int cta = (int)blockIdx.x - planning_ctas.first;
    if (cta == 0) end_header(tables, job, op, result);
    if (cta == (planning_ctas.ctas > 1)) write_slabs(tables, job, result);
}

#endif
