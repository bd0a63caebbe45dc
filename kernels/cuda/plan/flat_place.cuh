/* SPDX-License-Identifier: Apache-2.0 */
/* The last step of making a plan with layout FLAT, in which a token has one row on each rank
 * that owns any of its experts. This file computes these rows for the tokens of this rank. A
 * *choice* is a token and one of its top_k experts.
 *
 * The rows of a rank are in the order (source rank, token). So the index of a token's row on
 * rank q is the sum of three counts of earlier rows on rank q:
 *
 *   p.rows_before_cta[q]   rows of tokens of lower ranks, and of lower CTAs of this rank
 *   the warp's tally of q  rows of tokens of lower warps of this CTA
 *   warp_row               rows of earlier tokens of this warp; count_rows() has returned it
 *                          for the token's first choice on rank q
 *
 * For each of its tokens, the warp then sends two things to every rank: a row word with the
 * index of the row, and a record with the token's local experts on that rank. The words contain
 * the epoch, so the receiver sees from each word itself whether it has arrived. */
#ifndef EPIC_FLAT_PLACE_CUH
#define EPIC_FLAT_PLACE_CUH

#include "cuda/plan/flat_drop.cuh"
#include "cuda/plan/record_lists.cuh"

/* Returns where a choice goes. `choice`: its index, or -1. `id`: its planned_id(), or -1.
 * in_fate and in_rank_of: the elements of this choice in the plan's arrays `fate` and
 * `rank_of`, which still contain counts at this time (table in plan/counts.cuh). If the layer
 * drops no choices, in_fate is the choice's warp_row. Otherwise in_fate is its warp_position,
 * and in_rank_of is its warp_row. */
template <int FEATURES>
__device__ __forceinline__ FlatChoice flat_choice_of(const Planner &p, const p2p_plan_job &job,
                                                     const OpState &op, int64_t choice,
                                                     int64_t id, int k, int32_t in_fate,
                                                     int32_t in_rank_of)
{
    int32_t warp_row = in_fate;
    const int32_t *tally = p.tally + threadIdx.x / WARP * tallies_of<FEATURES>(job) +
                           choice_tallies<FEATURES>(job);
    FlatChoice s = {choice, -1, 0, -1, EPIC_FATE_NONE};
    const bool absent = is_absent_choice<FEATURES>(p, job, op, id);
    if (absent) s.fate = EPIC_FATE_ABSENT;
    if (absent || id < 0 || id >= job.layer.num_experts) return s;
    if (FEATURES & PLAN_DROPS_OR_REPLICAS && layer_drops(job)) {
        s.fate = fate_of_choice(p, job, (int)id, k, in_fate);
        if (s.fate < 0) return s;
        warp_row = in_rank_of;
    }
    s.owner = p.owner[id];
    s.local = p.local_expert[id];
    if (warp_row >= 0) s.row = p.rows_before_cta[s.owner] + tally[s.owner] + warp_row;
    return s;
}

/* Sends the row words and records of the tokens in this warp's lanes to every rank, as
 * send_records() does. If SENDS_RECORDS() is false, only sets c[0].row and c[1].row. `token`:
 * this lane's token; valid only if `in` is true. The lanes of a token share its choices: c[0]
 * is this lane's choice. If tokens have more than 32 choices, c[1] is the lane's second choice.
 * On return, c[0].row and c[1].row are the rows of these choices. `bad`: true if the plan is
 * invalid. In this case, sends RECORD_DISCARD instead of the index of a row, so that receivers
 * discard the rows. Called by one warp. */
__device__ __forceinline__ void send_row_words(const OpState &op, const p2p_plan_job &job,
                                               const TokenLanes &lanes, int32_t token, bool in,
                                               bool bad, FlatChoice (&c)[2])
{
    const p2p_self &self = job.self;
    const uint32_t above = ~lanes_below() << 1;
    const bool is_first_lane = in && lanes.has_choice && lanes.k == 0;
    const int64_t record =
        self.at.records / 8 +
        ((int64_t)epoch_parity(op) * self.num_ranks + self.rank) * p2p_index_choices(&self.at) +
        (int64_t)RECORD_INDEX(op, token) * job.layer.top_k;
    if (relays_words(self)) list_flat_choices(op, lanes, token, bad, c);
    for (int i = 1; i <= num_record_peers(self); i++) {
        const int q = record_peer(self, i);
        if (is_vacant(op, q)) continue;
        uint64_t *to = (uint64_t *)self.heap[q] + record + record_word_offset(self, q);
        const uint32_t first_chunk =
            __ballot_sync(ALL_LANES, c[0].owner == q) & lanes.token_lanes;
        const uint32_t second_chunk =
            lanes.num_chunks == 2 ? __ballot_sync(ALL_LANES, c[1].owner == q) : 0;
        const int32_t row = __shfl_sync(ALL_LANES, first_chunk ? c[0].row : c[1].row,
                                        first_chunk    ? __ffs(first_chunk) - 1
                                        : second_chunk ? __ffs(second_chunk) - 1
                                                       : 0);
        if (c[0].owner == q) {
            const bool last = !(first_chunk & above) && !second_chunk;
            c[0].row = row;
            if (SENDS_RECORDS(op))
                store_relaxed(to + __popc(first_chunk & lanes_below()),
                              stamp_word(op, (uint32_t)c[0].local | (last ? RECORD_LAST : 0)));
        }
        if (c[1].owner == q) {
            const bool last = !(second_chunk & above);
            c[1].row = row;
            if (SENDS_RECORDS(op))
                store_relaxed(to + __popc(first_chunk) + __popc(second_chunk & lanes_below()),
                              stamp_word(op, (uint32_t)c[1].local | (last ? RECORD_LAST : 0)));
        }
        if (!SENDS_RECORDS(op)) continue;
        const bool none = !first_chunk && !second_chunk;
        if (is_first_lane && none)
            store_relaxed(to, stamp_word(op, RECORD_ABSENT | RECORD_LAST));
        if (is_first_lane)
            store_relaxed(row_word_address(self, op, self.heap[q],
                                           source_number(self, q, self.rank), token),
                          stamp_word(op, none  ? RECORD_ABSENT
                                         : bad ? RECORD_DISCARD
                                               : (uint32_t)row));
        fill_records(op, lanes, q, to, in, __popc(first_chunk) + __popc(second_chunk));
    }
}

/* Layout FLAT: for each choice of this warp's tokens, stores its rank and its fate in the plan.
 * The fate is the index of the token's row on that rank, or the reason why the choice has no
 * row. Also sends row words and records to all ranks. */
template <int FEATURES>
static __device__ void place_rows(Planner &p, const p2p_plan_job &job, const OpState &op)
{
    const device_plan_layout layout = device_plan_layout_of(
        job.self.num_ranks, job.self.max_tokens, job.layer.num_experts, job.layer.top_k);
    int32_t *fate = (int32_t *)(job.plan + layout.fate);
    int32_t *rank_of = (int32_t *)(job.plan + layout.rank_of);
    const TokenLanes lanes(job.layer.top_k);
    const TokenRange range = range_of_warp(p, job);
    const int top_k = job.layer.top_k;
    const bool bad = p.header.result != EPIC_OK;
    const int32_t lost =
        p.header.result == EPIC_EOVERFLOW ? EPIC_FATE_RANK_FULL : EPIC_FATE_NONE;
    for (int t = range.begin; t < range.end; t += 2 * lanes.tokens_at_once) {
        int64_t choice[4], id[4];
        int32_t in_fate[4], in_rank_of[4];
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
            in_fate[i] = in ? fate[choice[i]] : -1;
            in_rank_of[i] = FEATURES & PLAN_DROPS_OR_REPLICAS && in && layer_drops(job)
                                ? rank_of[choice[i]]
                                : -1;
        }
#pragma unroll
        for (int g = 0; g < 2; g++) {
            const int token = t + g * lanes.tokens_at_once + lanes.token;
            FlatChoice c[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = g * 2 + h;
                c[h] = flat_choice_of<FEATURES>(p, job, op, choice[i], id[i],
                                                lanes.k + h * WARP, in_fate[i], in_rank_of[i]);
            }
            send_row_words(op, job, lanes, token, token < range.end, bad, c);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (c[h].choice < 0) continue;
                const bool none = c[h].owner < 0;
                fate[c[h].choice] = none ? c[h].fate : bad ? lost : c[h].row;
                rank_of[c[h].choice] = bad ? -1 : c[h].owner;
            }
        }
    }
}

#endif
