/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a plan. Every rank counts its own choices (plan/counts.cuh), and the ranks exchange the
 * counts. Then each rank computes the slots of its own tokens' choices, and sends these slots
 * in records to all ranks.
 *
 *   ids -> choices per expert -> counts, to all ranks -> loads, kept choices, slabs
 *                                                                           |
 *          to all ranks <- records (slot of each choice) <- slots of own choices
 *
 * A *choice* is a token and one of its top_k experts. A record is what a rank sends to another
 * rank about one of its tokens: the token's slots on that other rank. If the token has no slot
 * there, the record is RECORD_ABSENT. A slab is the range of slots of one expert. A stamped
 * word contains the epoch (the number of the operation), and is valid only in this epoch.
 *
 * Kernels call make_plan(), with all threads of the first job.planners CTAs (the planner CTAs):
 *
 *   writer          stores                              reader that waits
 *   planner CTAs    records, stamped, in the heaps of   warps that receive or copy the
 *                   all ranks                           tokens there
 *   planner CTA 0   header, tables and the caller's     other CTAs of this rank, if the kernel
 *                   outputs; then control.planned       also moves rows (release, acquire)
 *
 * All ranks compute with the same counts, so they compute the same plan without further
 * communication. Records for other hosts may go in lists (plan/record_lists.cuh). */
#ifndef EPIC_PLANNER_CUH
#define EPIC_PLANNER_CUH

#include "cuda/plan/decide.cuh"

/* Returns the slot that choice k of a token gets on the rank of its expert. If the choice gets
 * no slot, returns the reason (EPIC_FATE_*). `id`: planned_id() of the choice. e becomes the
 * expert of the choice; for a logical expert this is the replica that gets the choice.
 * `warp_position`: number of earlier choices with this id in this warp. Requires a
 * valid plan. All lanes must call it; a lane that has no choice passes id = -1. */
template <int FEATURES>
__device__ __forceinline__ int32_t slot_of_choice(const Planner &p, const p2p_plan_job &job,
                                                  int64_t id, int k, int32_t warp_position,
                                                  int &e)
{
    const int tallies = tallies_of<FEATURES>(job);
    e = (int)id;
    if (!(FEATURES & PLAN_DROPS_OR_REPLICAS)) {
        if (e < 0) return EPIC_FATE_NONE;
        return p.slab_start[e] + p.before_cta[e] + p.tally[threadIdx.x / WARP * tallies + e] +
               warp_position;
    }
    /* The keep position decides whether the expert keeps the choice. The slot position decides
     * which slot the choice gets. They differ only with EPIC_BY_K (plan/keep_by_k.cuh). */
    int32_t keep_position = e < 0 ? 0 : keep_position_of(p, job, tallies, e, k, warp_position);
    if (e >= 0 && job.layer.num_logical && !job.resolves)
        e = choose_replica(p, e, keep_position);
    const bool keeps = e >= 0 && keep_position < num_kept(p, job, e),
               full = e >= 0 && keep_position >= expert_quota(p, job, e);
    int32_t slot_position = keep_position;
    if (job.by_k)
        slot_position = count_group(
            p.kept_before + threadIdx.x / WARP * (int)job.layer.num_experts, keeps ? e : -1);
    return keeps   ? p.slab_start[e] + slot_position
           : e < 0 ? EPIC_FATE_NONE
           : full  ? EPIC_FATE_EXPERT_FULL
                   : EPIC_FATE_RANK_FULL;
}

/* Stores the rank of a choice in rank_of[choice], and its slot (or the reason why there is
 * none) in fate[choice]. Both arrays are in the plan. Returns the rank to which the slot must
 * be sent, and the slot. `id`: planned_id() of the choice. `warp_position`: as in
 * slot_of_choice(). All lanes must call it; a lane that has no choice passes choice = -1. */
template <int FEATURES>
__device__ __forceinline__ PlacedChoice place_choice(const Planner &p, const p2p_plan_job &job,
                                                     const OpState &op, int64_t choice,
                                                     int64_t id, int k, int32_t warp_position,
                                                     int32_t *fate, int32_t *rank_of)
{
    const bool absent = is_absent_choice<FEATURES>(p, job, op, id);
    const bool valid = choice >= 0 && id >= 0 && id < num_planned_ids<FEATURES>(job) && !absent;
    const bool bad = p.header.result != EPIC_OK;
    int32_t slot_or_fate = EPIC_FATE_NONE, owner = -1;
    if (!bad) {
        int e;
        slot_or_fate = slot_of_choice<FEATURES>(p, job, valid ? id : -1, k, warp_position, e);
        if (slot_or_fate >= 0) owner = p.owner[e];
    } else if (valid && p.header.result == EPIC_EOVERFLOW) {
        slot_or_fate = EPIC_FATE_RANK_FULL;
    }
    if (absent) slot_or_fate = EPIC_FATE_ABSENT;
    if (choice < 0) return {-1, 0};
    fate[choice] = slot_or_fate;
    rank_of[choice] = owner;
    if (bad && valid) return {p.owner[(int)id], RECORD_DISCARD};
    return {owner, (uint32_t)slot_or_fate};
}

/* Sends the records of the tokens in this warp's lanes to every rank or, with lists
 * (plan/record_lists.cuh), adds those for other hosts to the lists. The record for a rank
 * contains the token's slots on that rank in ascending order of k, one stamped word per slot,
 * or RECORD_ABSENT. `token`: this lane's token; valid only if `in` is true. The lanes of a
 * token share its choices: c[0] is this lane's choice. If tokens have more than 32 choices,
 * c[1] is the lane's second choice. Called by one warp. */
__device__ __forceinline__ void send_records(const OpState &op, const p2p_plan_job &job,
                                             const TokenLanes &lanes, int32_t token, bool in,
                                             const PlacedChoice (&c)[2])
{
    const p2p_self &self = job.self;
    const int top_k = job.layer.top_k;
    const uint32_t vacant = vacant_seats(op);
    const int64_t base =
        self.at.records / 8 +
        ((int64_t)epoch_parity(op) * self.num_ranks + self.rank) * p2p_index_choices(&self.at) +
        (int64_t)RECORD_INDEX(op, token) * top_k;
    if (relays_words(self)) list_choices(op, lanes, token, c);
    for (int i = 1; i <= num_record_peers(self); i++) {
        const int q = record_peer(self, i);
        if (vacant >> q & 1) continue;
        uint64_t *to = (uint64_t *)self.heap[q] + base + record_word_offset(self, q);
        const uint32_t first_chunk =
            __ballot_sync(ALL_LANES, c[0].rank == q) & lanes.token_lanes;
        const uint32_t second_chunk =
            lanes.num_chunks == 2 ? __ballot_sync(ALL_LANES, c[1].rank == q) : 0;
        const uint32_t above = ~lanes_below() << 1;
        if (c[0].rank == q) {
            const bool last = !(first_chunk & above) && !second_chunk;
            store_relaxed(to + __popc(first_chunk & lanes_below()),
                          stamp_word(op, c[0].slot | (last ? RECORD_LAST : 0)));
        }
        if (c[1].rank == q) {
            const bool last = !(second_chunk & above);
            store_relaxed(to + __popc(first_chunk) + __popc(second_chunk & lanes_below()),
                          stamp_word(op, c[1].slot | (last ? RECORD_LAST : 0)));
        }
        if (in && lanes.has_choice && lanes.k == 0 && !first_chunk && !second_chunk)
            store_relaxed(to, stamp_word(op, RECORD_ABSENT | RECORD_LAST));
        fill_records(op, lanes, q, to, in, __popc(first_chunk) + __popc(second_chunk));
    }
}

/* Like place_choices() (below), for a warp that has kept all its choices in registers
 * (`counted`). */
template <int FEATURES>
static __device__ void place_counted(Planner &p, const p2p_plan_job &job, const OpState &op,
                                     const TokenLanes &lanes, const TokenRange &range,
                                     const CountedChoices &counted, int32_t *fate,
                                     int32_t *rank_of)
{
#pragma unroll
    for (int i = 0; i < COUNTED_BATCHES; i++) {
        const int token = range.begin + i * lanes.tokens_at_once + lanes.token;
        const bool in = lanes.has_choice && token < range.end;
        const int64_t choice = in ? (int64_t)token * job.layer.top_k + lanes.k : -1;
        if (range.begin + i * lanes.tokens_at_once >= range.end) break;
        const PlacedChoice c[2] = {
            place_choice<FEATURES>(p, job, op, choice, in ? counted.id[i] : -1, lanes.k,
                                   counted.warp_position[i], fate, rank_of),
            {-1, 0}};
        if (SENDS_RECORDS(op)) send_records(op, job, lanes, token, token < range.end, c);
    }
}

/* Computes the slots of this warp's choices, stores them in the plan, and sends them to the
 * ranks of the experts. On entry, the warp_position of each choice (plan/counts.cuh) is in
 * `counted` if FEATURES is 0 and choices_fit_registers() is true. Otherwise it is in the plan's
 * array `fate`. */
template <int FEATURES>
static __device__ void place_choices(Planner &p, const p2p_plan_job &job, const OpState &op,
                                     const TokenLanes &lanes, const TokenRange &range,
                                     const CountedChoices &counted)
{
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    int32_t *fate = (int32_t *)(job.plan + at.fate);
    /* `fate` contains the warp positions until slots replace them */
    const int32_t *warp_positions = fate;
    int32_t *rank_of = (int32_t *)(job.plan + at.rank_of);
    const int top_k = job.layer.top_k;
    if (FEATURES == 0 && choices_fit_registers(range, lanes))
        return place_counted<FEATURES>(p, job, op, lanes, range, counted, fate, rank_of);
    for (int t = range.begin; t < range.end; t += 2 * lanes.tokens_at_once) {
        int64_t choice[4], id[4];
        int32_t warp_position[4];
#pragma unroll
        /* i / 2: index of the group of tokens. i % 2: chunk, 0 for a token's first 32 choices,
         * 1 for its other choices. */
        for (int i = 0; i < 4; i++) {
            const int token = t + i / 2 * lanes.tokens_at_once + lanes.token;
            const int k = lanes.k + i % 2 * WARP;
            const bool in =
                lanes.has_choice && token < range.end && k < top_k && i % 2 < lanes.num_chunks;
            choice[i] = in ? (int64_t)token * top_k + k : -1;
            id[i] = in ? planned_id<FEATURES>(job, choice[i]) : -1;
            warp_position[i] = in ? warp_positions[choice[i]] : 0;
        }
#pragma unroll
        for (int g = 0; g < 2; g++) {
            PlacedChoice c[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = g * 2 + h;
                c[h] = {-1, 0};
                if (h < lanes.num_chunks)
                    c[h] =
                        place_choice<FEATURES>(p, job, op, choice[i], id[i], lanes.k + h * WARP,
                                               warp_position[i], fate, rank_of);
            }
            const int token = t + g * lanes.tokens_at_once + lanes.token;
            if (SENDS_RECORDS(op)) send_records(op, job, lanes, token, token < range.end, c);
        }
    }
}

/* Only in backend `hosts`: posts the puts (copies over the net) that send the records of the
 * tokens [begin, begin + tokens) to other hosts. In groups with lists (plan/record_lists.cuh),
 * the last planner CTA that calls it posts those of all tokens. With layout FLAT (`flat`), also
 * sends the row words (plan/flat.cuh). There is one large put per rank and array, because this
 * is faster than one put per token. Called by all threads of the CTA that has stored the
 * records; thread q posts the puts for rank q. */
__device__ __forceinline__ void post_put_tokens(const p2p_plan_job &job, const OpState &op,
                                                bool flat, int begin, int tokens)
{
    const p2p_self &self = job.self;
    const int q = (int)threadIdx.x, top_k = (int)job.layer.top_k;
    if (relays_words(self)) return post_lists(job, op, flat);
    __syncthreads();
    if (q >= self.num_ranks || tokens <= 0) return;
    const int64_t source =
        (int64_t)epoch_parity(op) * self.num_ranks + source_number(self, q, self.rank);
    const uint64_t *records = (const uint64_t *)(self.heap[q] + self.at.records) +
                              source * p2p_index_choices(&self.at) +
                              (int64_t)RECORD_INDEX(op, begin) * top_k;
    if (top_k <= WARP) post_put_words(op, q, records, (int64_t)tokens * top_k);
    if (flat)
        post_put_words(
            op, q,
            row_word_address(self, op, self.heap[q], source_number(self, q, self.rank), begin),
            tokens);
}

/* Calls post_put_tokens() for all tokens of this planner CTA. */
static __device__ __noinline__ void post_put_plan(const Planner &p, const p2p_plan_job &job,
                                                  const OpState &op, bool flat)
{
    const int begin = (int)blockIdx.x * p.tokens_per_cta;
    post_put_tokens(job, op, flat, begin, min(job.num_tokens - begin, p.tokens_per_cta));
}

/* Makes the plan, together with the other planner CTAs of all ranks. Called by all threads of
 * the first job.planners CTAs. `memory`: planner_bytes_with() bytes of shared memory. Returns
 * false if the group has failed. */
template <int FEATURES>
static __device__ bool make_plan(Planner &p, const p2p_plan_job &job, const OpState &op,
                                 uint8_t *memory)
{
    constexpr bool FLAT = FEATURES & PLAN_FLAT,
                   DROPS_OR_REPLICAS = FEATURES & PLAN_DROPS_OR_REPLICAS;
    const device_plan_layout at = device_plan_layout_of(job.self.num_ranks, job.self.max_tokens,
                                                        job.layer.num_experts, job.layer.top_k);
    const bool replicated = DROPS_OR_REPLICAS && job.layer.num_logical;
    begin_planner<FEATURES>(p, job, op, memory);
    __syncthreads();
    if (replicated) read_replicas(p, job, op);
    if (replicated && job.resolves && !resolve_replicas(p, job, op)) return false;
    const TokenLanes lanes(job.layer.top_k);
    const TokenRange range = range_of_warp(p, job);
    CountedChoices counted;
    count_choices<FEATURES>(p, job, lanes, range, (int32_t *)(job.plan + at.fate), counted);
    __syncthreads();
    publish_tallies<FEATURES>(p, job, op);
    bool ok = prepare_header(p, job, op);
    ok = exchange_counts<FEATURES>(p, job, op) && ok;
    if (replicated && ok && threadIdx.x == 0) ok = compare_tables(p, job, op);
    ok = __syncthreads_and(ok);
    if (replicated && ok && !job.resolves) split_among_replicas(p, job);
    if (DROPS_OR_REPLICAS && ok && job.by_k) prepare_by_k(p, job);
    ok = ok && decide_plan<FEATURES>(p, job, op);
    if (!ok) return false;
    if (DROPS_OR_REPLICAS && !FLAT && job.by_k)
        count_kept_before(p, job, [&](int expert) { return num_kept(p, job, expert); });
    if (FLAT)
        place_rows<FEATURES>(p, job, op);
    else
        place_choices<FEATURES>(p, job, op, lanes, range, counted);
    if (HOSTS && SENDS_RECORDS(op)) post_put_plan(p, job, op, FLAT);
    if (blockIdx.x == 0) {
        write_plan_outputs(p, job, (int)threadIdx.x, (int)blockDim.x);
        __syncthreads();
        if (threadIdx.x == 0) {
            if (p.header.result == EPIC_EINVAL) report_fault(p, job, op);
            if (p.header.result == EPIC_EOVERFLOW) report_overflow(p, job, op);
            if (job.self.operation != EPIC_OP_PLAN) {
                __threadfence();
                store_release(&control_of(op)->planned, op.epoch);
            }
        }
    }
    return !SENDS_RECORDS(op) || expand_lists<FLAT>(p, job, op);
}

#endif
