/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of the units of dispatch: choices and records, weights, sending a piece, filling slots
 * with it, and the order of tokens. */
#ifndef EPIC_DISPATCH_CUH
#define EPIC_DISPATCH_CUH

#include "cuda/dispatch/moving.cuh"
#include "cuda/plan/planner.cuh"

/* part of the protocol between ranks: the layout of staging depends on it */
static constexpr int V = 4;

struct DispatchMove : RowMove<p2p_dispatch_job> {
    int32_t head;      /* tokens that are sent while the plan is made */
    int32_t tokens_of; /* lane q: number of tokens of rank q */
    int32_t most_tokens;
    bool has_new_plan; /* this kernel also makes the plan */
#ifdef EPIC_HOSTS
    int32_t num_forward_roles; /* number of roles that forward rows */
#endif
};

/* The source that a unit receives from, as in rank_of_role(). 0 or less: the unit sends or
 * forwards. */
__device__ __forceinline__ int source_role(const DispatchMove &m, const UnitWalk &walk)
{
#ifdef EPIC_HOSTS
    return walk.role - m.num_forward_roles;
#else
    return walk.role;
#endif
}

/* Does the unit forward rows from another host? */
__device__ __forceinline__ bool is_forward_role(const DispatchMove &m, const UnitWalk &walk)
{
    return HOSTS && walk.role > 0 && source_role(m, walk) <= 0;
}

/* The rank of choice k of this rank's token; while the plan is being made, its expert. Either
 * decides the destination. */
__device__ __forceinline__ uint64_t read_choice(const DispatchMove &m, int32_t token, int k)
{
    const p2p_plan_job &plan = m.job.plan;
    const int64_t at = (int64_t)token * m.top_k + k;
    uint64_t word = ~0ull;
    if (k >= m.top_k)
        ;
    else if (!m.has_new_plan)
        word = (uint32_t)__ldg(m.plan.rank_of + at);
    else if (plan.has_int64_ids)
        word = (uint64_t)__ldg((const long long *)plan.topk_idx + at);
    else
        word = (uint32_t)__ldg((const int32_t *)plan.topk_idx + at);
    return word;
}

/* Does the choice, as read_choice() returned it, go to `rank`? */
__device__ __forceinline__ bool choice_goes_to(const DispatchMove &m, uint64_t word, int rank)
{
    const p2p_plan_job &plan = m.job.plan;
    if (!m.has_new_plan) return (int32_t)word == rank;
    if (word >= plan.layer.num_experts) return false; /* negative ids become large */
    const int expert = (int)word;
    if (plan.rank_of_expert) return __ldg(plan.rank_of_expert + expert) == rank;
    return (uint32_t)(expert - rank * plan.block) < (uint32_t)plan.block;
}

/* The choices of this rank's token that go to `rank`, as bits. `word`: this lane's choice,
 * loaded ahead. */
__device__ __forceinline__ uint64_t choices_to(const DispatchMove &m, int32_t token, int rank,
                                               uint64_t word)
{
    uint64_t chosen = __ballot_sync(ALL_LANES, choice_goes_to(m, word, rank));
    if (m.top_k > WARP) {
        word = read_choice(m, token, WARP + lane_id());
        chosen |= (uint64_t)__ballot_sync(ALL_LANES, choice_goes_to(m, word, rank)) << WARP;
    }
    return chosen;
}

/* The weight of choice k of this rank's token. */
__device__ __forceinline__ uint32_t read_weight(const DispatchMove &m, int32_t token, int k)
{
    uint32_t word = 0;
    if (k < m.top_k)
        word = __float_as_uint(__ldg(m.job.weights + (int64_t)token * m.top_k + k));
    return replace_poison(word, F32::NAN_WORD);
}

/* The peers that need this rank's token, as bits. with_weights: sends them the weights of its
 * choices there. */
__device__ __forceinline__ uint32_t choose_peers(const DispatchMove &m, int32_t token,
                                                 bool with_weights, uint64_t word)
{
    const p2p_self &self = m.job.plan.self;
    const bool both = m.top_k > WARP;
    const uint64_t word2 = both ? read_choice(m, token, WARP + lane_id()) : ~0ull;
    const uint32_t weight = with_weights ? read_weight(m, token, lane_id()) : 0;
    const uint32_t weight2 = with_weights && both ? read_weight(m, token, WARP + lane_id()) : 0;
    uint32_t peers = 0;
#pragma unroll 1
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        const bool goes = choice_goes_to(m, word, rank),
                   goes2 = both && choice_goes_to(m, word2, rank);
        const uint32_t first = __ballot_sync(ALL_LANES, goes);
        const uint32_t second = __ballot_sync(ALL_LANES, goes2);
        if (!(first | second)) continue;
        peers |= 1u << rank;
        if (!with_weights) continue;
        const int source = self.num_ranks - 1 - distance; /* this rank, as the peer counts */
        uint32_t *to = floats_base(self, m.op, self.heap[rank], source) +
                       (int64_t)token * float_stride(m.top_k);
        if (goes) store_relaxed(to + __popc(first & lanes_below()), weight);
        if (goes2) store_relaxed(to + __popc(first) + __popc(second & lanes_below()), weight2);
        post_put_floats(m.op, rank, to, __popc(first) + __popc(second));
    }
    return peers;
}

/* Sends a piece to `peers` (bits). Peers on other hosts get it by post_put_pieces(). */
template <bool EXACT>
__device__ __forceinline__ void send_to_peers(const DispatchMove &m, int32_t token, int piece,
                                              uint32_t peers, uint4 (&q)[V])
{
    const p2p_self &self = m.job.plan.self;
    const uint32_t mask = hide_poison<V>(q);
#pragma unroll 1
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        if (!(peers >> rank & 1)) continue;
        uint4 *staged = staged_row(m.op.outbox[rank], token - m.first, m.shape.vectors);
        send_piece<V, EXACT>(staged, piece * V * WARP, m.shape.vectors, q);
        if (!mask) continue;
        const int source = self.num_ranks - 1 - distance;
        uint32_t *escape = escapes_base(self, m.op, self.heap[rank], source) +
                           ((int64_t)token * m.shape.pieces + piece) * WARP;
        store_relaxed(escape + lane_id(), mask);
        post_put_warp(m.op, rank, escape, WARP * 4);
    }
}

/* This lane's word of a half of a record, whether it has arrived or not. */
__device__ __forceinline__ uint64_t peek_record(const DispatchMove &m, int rank, int32_t token,
                                                int half)
{
    const int k = half * WARP + lane_id();
    uint64_t word = ~0ull;
    if (k >= m.top_k)
        word = m.has_new_plan ? 0 : ~0ull;
    else if (m.has_new_plan)
        word = load_relaxed(record_address(m.job.plan.self, m.op, rank, token, m.top_k) + k);
    else
        word = (uint32_t)__ldg(m.plan.records +
                               record_index(m.job.plan.self, rank, token, m.top_k) + k);
    return word;
}

/* Waits for a half of a record and returns this lane's slot, or -1. `more`: another half
 * follows. `keep`: copies it into the new plan. */
__device__ __forceinline__ bool read_record(const DispatchMove &m, int rank, int32_t token,
                                            int half, bool keep, uint64_t word, int32_t &slot,
                                            bool &more)
{
    const int k = half * WARP + lane_id();
    if (!m.has_new_plan) {
        slot = (int32_t)word;
        more = (half + 1) * WARP < m.top_k && __all_sync(ALL_LANES, slot >= 0);
        return true;
    }
    const uint64_t *words = record_address(m.job.plan.self, m.op, rank, token, m.top_k);
    if (!receive_record(m.op, words, m.top_k, half, rank, word, slot, more)) return false;
    const int64_t at = record_index(m.job.plan.self, rank, token, m.top_k) + k;
    if (keep && k < m.top_k)
        ((int32_t *)m.plan.records)[at] = slot == (int32_t)RECORD_DISCARD ? -1 : slot;
    return true;
}

/* Fills the rest of a long record in the plan with -1, after the last half that has words. */
__device__ __forceinline__ void end_record(const DispatchMove &m, int rank, int32_t token,
                                           int half)
{
    const int64_t at = record_index(m.job.plan.self, rank, token, m.top_k);
    for (int k = (half + 1) * WARP + lane_id(); k < m.top_k; k += WARP)
        ((int32_t *)m.plan.records)[at + k] = -1;
}

/* The address at which `source` stores the weight of the n-th choice of its token on this rank.
 */
__device__ __forceinline__ uint32_t *weight_address(const DispatchMove &m, int source,
                                                    int32_t token, int n)
{
    uint8_t *heap = inbox_base(m.op, rank_of_role(m.job.plan.self, source + 1));
    return floats_base(m.job.plan.self, m.op, heap, source) +
           (int64_t)token * float_stride(m.top_k) + n;
}

/* The weight of this lane's slot, loaded before the row has arrived; perhaps still poison. */
__device__ __forceinline__ uint32_t peek_weight(const DispatchMove &m, int rank, int source,
                                                int32_t token, int half, int32_t slot)
{
    const int n = half * WARP + lane_id();
    uint32_t word = 0;
    if (rank == m.job.plan.self.rank) {
        const uint64_t choice = read_choice(m, token, lane_id());
        const int k = nth_bit(choices_to(m, token, rank, choice), n);
        if (slot >= 0)
            word = __float_as_uint(__ldg(m.job.weights + (int64_t)token * m.top_k + k));
    } else if (slot >= 0) {
        word = load_relaxed(weight_address(m, source, token, n));
    }
    return word;
}

/* Waits for the weight of this lane's slot, if it was poison, and stores it. */
__device__ __forceinline__ bool receive_weight(const DispatchMove &m, int rank, int source,
                                               int32_t token, int half, int32_t slot,
                                               uint32_t word)
{
    if (rank != m.job.plan.self.rank) {
        uint32_t *from = weight_address(m, source, token, half * WARP + lane_id());
        bool again = false;
        const bool ok = wait_warp(m.op, rank, P2P_PHASE_FLOAT, [&] {
            if (again && slot >= 0) word = load_relaxed(from);
            again = true;
            return __any_sync(ALL_LANES, slot >= 0 && word == POISON) == 0;
        });
        if (!ok) return false;
        if (slot >= 0) *from = POISON;
    }
    if (slot >= 0 && slot < m.job.recv_rows) m.job.slot_weights[slot] = __uint_as_float(word);
    return true;
}

/* Stores a piece to the slots of the lanes; slot -1: none. */
template <bool EXACT>
__device__ __forceinline__ void fill_slots(const DispatchMove &m, int32_t vector, int32_t slot,
                                           const uint4 (&q)[V])
{
    uint32_t slots = __ballot_sync(ALL_LANES, slot >= 0 && slot < m.job.recv_rows);
    int32_t next = __shfl_sync(ALL_LANES, slot, __ffs(slots) - 1);
    while (slots) {
        const int32_t to = next;
        slots &= slots - 1;
        /* before the stores, which it would wait for */
        next = __shfl_sync(ALL_LANES, slot, __ffs(slots) - 1);
        store_piece<V, EXACT>(m.job.recv + row_offset(to, m.shape), vector, m.shape, q,
                              m.policy);
    }
}

/* Waits for a piece of a row and reads it. `copied`: q has what the ring contained. */
template <bool EXACT>
__device__ __forceinline__ bool receive_row_piece(const DispatchMove &m, int rank, int source,
                                                  int32_t token, int piece, bool copied,
                                                  uint4 (&q)[V])
{
    const int32_t vector = piece * V * WARP;
    if (rank == m.job.plan.self.rank) {
        if (!copied)
            load_piece_again<V, EXACT>(m.job.tokens + row_offset(token, m.shape), vector,
                                       m.shape, q);
        return true;
    }
    const int peer = relay_of(m.op, rank);
    uint4 *staged = staged_row(m.op.inbox[rank], token - m.first, m.shape.vectors);
    if (!receive_piece<V, EXACT>(m.op, peer, staged, vector, m.shape.vectors, copied, q))
        return false;
    uint32_t *escape =
        escapes_base(m.job.plan.self, m.op, row_inbox_base(m.job.plan.self, rank), source) +
        ((int64_t)token * m.shape.pieces + piece) * WARP;
    if (!unhide_poison<V>(m.op, peer, q, escape)) return false;
    poison_piece<V, EXACT>(staged, vector, m.shape.vectors);
    return true;
}

/* Writes zeros to a piece of a slot. */
template <bool EXACT>
__device__ __forceinline__ void pad_piece(const DispatchMove &m, int32_t slot, int piece)
{
    if ((uint32_t)slot >= (uint32_t)m.job.recv_rows) return;
    zero_piece<V, EXACT>(m.job.recv + row_offset(slot, m.shape), piece * V * WARP, m.shape,
                         m.policy);
    if (piece == 0 && lane_id() == 0 && m.job.slot_weights) m.job.slot_weights[slot] = 0.0f;
}

/* Waits until the plan that this kernel makes is complete, so that its tables can be read. */
__device__ __forceinline__ bool wait_for_plan(const DispatchMove &m)
{
    const uint32_t *planned = &control_of(m.op)->planned;
    return wait_warp(m.op, -1, P2P_PHASE_GRID, [&] {
        return __all_sync(ALL_LANES, load_acquire(planned) == m.op.epoch) != 0;
    });
}

/* The header of the plan in memory; volatile, because this kernel may be writing it. */
__device__ __forceinline__ const volatile device_plan_header *header_of(const DispatchMove &m)
{
    return (const volatile device_plan_header *)m.job.plan.plan;
}

#define NOT_KNOWN (-1)
#define NOT_WITH_TOKENS (-2)

/* Finds the slabs that are padded along with tokens, once the plan is known. */
__device__ __forceinline__ bool find_padding_slabs(const DispatchMove &m, int &slab_bits)
{
    slab_bits = NOT_WITH_TOKENS;
    if (m.plan.header.alignment <= 1) return true;
    if (!pads_with_tokens(m.plan, m.stride, m.most_tokens)) return true;
    if (m.has_new_plan && !wait_for_plan(m)) return false;
    if (header_of(m)->result == EPIC_OK) slab_bits = device_slab_bits(header_of(m)->owned);
    return true;
}

/* Waits for the token counts of all ranks. */
__device__ __forceinline__ bool read_token_counts(DispatchMove &m)
{
    if (!read_announcement(m.op, P2P_ANNOUNCED_TOKENS, m.tokens_of)) return false;
    m.most_tokens = __reduce_max_sync(ALL_LANES, (uint32_t)m.tokens_of);
    return true;
}

/* Tokens that are received before step i. At first this is `head` behind sending, in the end
 * `lag`; one of 2^catch_up steps receives two tokens. */
__device__ __forceinline__ int32_t received_before(const DispatchMove &m, int32_t step)
{
    const int32_t behind = max(step - max(m.head, m.job.lag), 0);
    return min(behind + (behind >> m.job.catch_up), max(step - m.job.lag, 0));
}

/* The token of a unit; the first one if it receives several. */
__device__ __forceinline__ int32_t token_of(const DispatchMove &m, const UnitWalk &walk)
{
    return m.first + (walk.role == 0 ? walk.step : received_before(m, walk.step));
}

/* Loads what a unit needs first, while the unit before it is being moved. peek(rank, token)
 * loads the record. */
template <class Peek>
__device__ __forceinline__ uint64_t read_ahead(const DispatchMove &m, const UnitWalk &walk,
                                               Peek peek)
{
    const p2p_self &self = m.job.plan.self;
    const int32_t token = token_of(m, walk);
    if (walk.role == 0)
        return token < m.job.num_tokens ? read_choice(m, token, lane_id()) : ~0ull;
    if (is_forward_role(m, walk)) return ~0ull;
    const int rank = rank_of_role(self, source_role(m, walk));
    return token < self.max_tokens ? peek(rank, token) : ~0ull;
}

/* ---------------------------------------------------------------- the plan of a kernel ---- */

/* Reads the plan, or sets what is known of the plan that this kernel makes. All threads, before
 * begin_operation(). */
template <bool WITH_PLAN>
__device__ __forceinline__ void open_plan(PlanView &plan, const p2p_dispatch_job &job)
{
    const p2p_self &self = job.plan.self;
    if (!WITH_PLAN) {
        read_plan(plan, job.plan.plan, job.plan_bytes, self, job.num_tokens);
    } else if (threadIdx.x == 0) {
        plan.header.num_experts = job.plan.layer.num_experts;
        plan.header.top_k = job.plan.layer.top_k;
        plan.header.alignment = job.plan.layer.alignment;
        plan.is_valid = 1;
        set_plan_pointers(plan, job.plan.plan, self);
    }
    choose_padding(plan, job);
}

/* Makes the plan if this CTA is one of those that do. All threads, after begin_operation().
 * Afterwards `memory` may be used for rows. false: the group is broken. */
template <bool WITH_PLAN, bool FLAT>
__device__ __forceinline__ bool make_own_plan(Planner &planner, const p2p_dispatch_job &job,
                                              OpState &op, uint8_t *memory)
{
    constexpr int KIND = FLAT ? PLAN_FLAT : 0; /* nothing rare is planned with dispatch */
    if (!WITH_PLAN || (int)blockIdx.x >= job.plan.planners) return true;
    return __syncthreads_and(make_plan<KIND>(planner, job.plan, op, memory)) != 0;
}

#endif
