/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that all dispatch kernels use. They read choices, records and weights, send a
 * piece, store it to slots, and determine the order of tokens.
 *
 *   choice       a token and one of its top_k experts
 *   record       the slots that a token has on this rank
 *   chunk        32 choices or 32 words of a record, one per lane; tokens with more than 32
 *                choices have two chunks
 *   piece        2 KB of a row
 *   unit         the work that a warp does at a time: it sends, forwards or receives some
 *                pieces of a row
 *   role         a number that shows what a unit does, and for which peer
 *   forward      to send a row that came from another host to ranks of this host
 *   poison       0xffffffff, the mark of a word that has not arrived. A word of a row that
 *                equals poison is replaced before it is sent
 *   escape word  bits that show the receiver which words of a piece the sender has replaced
 *   source       a rank from which this rank receives. Its index is counted from this rank
 *                upwards, modulo num_ranks: 0 is the next higher rank, num_ranks - 1 is this
 *                rank itself. The heap has a part for each source */
#ifndef EPIC_DISPATCH_CUH
#define EPIC_DISPATCH_CUH

#include "cuda/dispatch/moving.cuh"
#include "cuda/plan/planner.cuh"

/* Number of 16-byte vectors that each lane has of a piece. All dispatch kernels must use the
 * same V, because two ranks may run different kernels. The sender's escape words for piece i
 * must describe the same words that the receiver has in its piece i. */
static constexpr int V = 4;

/* Arguments that all functions of a dispatch kernel share. */
struct DispatchMove : RowMove<p2p_dispatch_job> {
    int32_t num_early_tokens; /* tokens [0, num_early_tokens) are sent while the plan is made */
    RankNumbers tokens_of;    /* number of tokens of each rank */
    /* The maximum of tokens_of. Until the ranks have announced their numbers of tokens, this is
     * only an upper bound of the maximum. */
    int32_t most_tokens;
    /* true: this kernel also makes the plan; false: it reads a plan */
    bool has_new_plan;
    /* only in backend `hosts`: the number of roles (kinds of units) that forward rows from
     * other hosts */
    __extension__ int32_t num_forward_roles[HOSTS];
};

/* If the unit receives, returns 1 plus the index of its source, which is the argument that
 * rank_of_role() needs. If the unit sends or forwards, returns 0 or a negative value. `walk`
 * (also in the functions below): the unit. */
__device__ __forceinline__ int source_role(const DispatchMove &m, const UnitWalk &walk)
{
    return HOSTS ? walk.role - *m.num_forward_roles : walk.role;
}

/* Returns true if the unit forwards rows that came from another host. */
__device__ __forceinline__ bool is_forward_role(const DispatchMove &m, const UnitWalk &walk)
{
    return HOSTS && walk.role > 0 && source_role(m, walk) <= 0;
}

/* Returns the target of choice k of `token`, a token of this rank. If the kernel reads a plan,
 * the target is a rank. If the kernel makes the plan, it is an expert id. If k is not below
 * top_k, returns a word in which all bits are 1. */
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

/* Returns true if a choice goes to `rank`. `word`: the result of read_choice() for this
 * choice. */
__device__ __forceinline__ bool choice_goes_to(const DispatchMove &m, uint64_t word, int rank)
{
    const p2p_plan_job &plan = m.job.plan;
    if (!m.has_new_plan) return (int32_t)word == rank;
    /* a negative id (no expert) is a large unsigned value */
    if (word >= plan.layer.num_experts) return false;
    const int expert = (int)word;
    if (plan.rank_of_expert) return __ldg(plan.rank_of_expert + expert) == rank;
    return (uint32_t)(expert - rank * plan.block) < (uint32_t)plan.block;
}

/* Returns a bit mask of the choices of `token`, a token of this rank, that go to `rank`. Bit k
 * stands for choice k. `word`: the result of read_choice() for choice lane_id(). Called by a
 * whole warp. */
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

/* Returns the bits of the weight of choice k of `token`, a token of this rank. A weight whose
 * bits equal poison (it is a NaN) becomes another NaN, because the receiver would take poison
 * for a weight that has not arrived. */
__device__ __forceinline__ uint32_t read_weight(const DispatchMove &m, int32_t token, int k)
{
    uint32_t word = 0;
    if (k < m.top_k)
        word = __float_as_uint(__ldg(m.job.weights + (int64_t)token * m.top_k + k));
    return replace_poison(word, F32::NAN_WORD);
}

/* Returns a bit mask of the peers that need `token`, a token of this rank. If with_weights is
 * true, also sends to each peer the weights of the choices that go to this peer. `word`: the
 * result of read_choice() for choice lane_id(). Called by a whole warp. */
__device__ __forceinline__ RankMask choose_peers(const DispatchMove &m, int32_t token,
                                                 bool with_weights, uint64_t word)
{
    const p2p_self &self = m.job.plan.self;
    const bool both = m.top_k > WARP;
    const uint64_t word2 = both ? read_choice(m, token, WARP + lane_id()) : ~0ull;
    const uint32_t weight = with_weights ? read_weight(m, token, lane_id()) : 0;
    const uint32_t weight2 = with_weights && both ? read_weight(m, token, WARP + lane_id()) : 0;
    RankMask peers = no_ranks();
#pragma unroll 1
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        /* If the kernel makes the plan, choices may go to a vacant seat (a rank without a
         * process), because the plan has not been checked yet. */
        if (m.has_new_plan && is_vacant(m.op, rank)) continue;
        const bool goes = choice_goes_to(m, word, rank),
                   goes2 = both && choice_goes_to(m, word2, rank);
        const uint32_t first = __ballot_sync(ALL_LANES, goes);
        const uint32_t second = __ballot_sync(ALL_LANES, goes2);
        if (!(first | second)) continue;
        add_rank(peers, rank);
        if (!with_weights) continue;
        /* index of this rank among the peer's sources */
        const int source = self.num_ranks - 1 - distance;
        uint32_t *to = floats_base(self, m.op, self.heap[rank], source) +
                       (int64_t)TOKEN_INDEX(m, token) * float_stride(m.top_k);
        if (goes) store_relaxed(to + __popc(first & lanes_below()), weight);
        if (goes2) store_relaxed(to + __popc(first) + __popc(second & lanes_below()), weight2);
        post_put_floats(m.op, rank, to, __popc(first) + __popc(second));
    }
    return peers;
}

/* Stores piece `piece` of the row of `token` to the staging of `peers` (bit mask). `q`: this
 * lane's vectors of the piece. If the piece contains poison or its stand-in, also sends escape
 * words, with which the receiver restores the poison (net/staging.cuh). If some peers are on
 * other hosts, the caller must afterwards call post_put_pieces() or post_put_when_complete().
 * Called by a whole warp. */
template <bool EXACT>
__device__ __forceinline__ void send_to_peers(const DispatchMove &m, int32_t token, int piece,
                                              RankMask peers, uint4 (&q)[V])
{
    const p2p_self &self = m.job.plan.self;
    const uint32_t mask = hide_poison<V>(q);
#pragma unroll 1
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        if (!has_rank(peers, rank)) continue;
        uint4 *staged = staged_row(m.op.outbox[rank], token - m.round_begin, m.shape.vectors);
        send_piece<V, EXACT>(staged, piece * V * WARP, m.shape.vectors, q);
        if (!mask) continue;
        const int source = self.num_ranks - 1 - distance;
        uint32_t *escape = escapes_base(self, m.op, self.heap[rank], source) +
                           ((int64_t)TOKEN_INDEX(m, token) * m.shape.pieces + piece) * WARP;
        store_relaxed(escape + lane_id(), mask);
        post_put_warp(m.op, rank, escape, WARP * 4);
    }
}

/* Loads word chunk * 32 + lane_id() of the record of `token`, a token of `rank`. If the kernel
 * makes the plan, it is possible that the word has not arrived yet. */
__device__ __forceinline__ uint64_t peek_record(const DispatchMove &m, int rank, int32_t token,
                                                int chunk)
{
    const int k = chunk * WARP + lane_id();
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

/* Waits for one chunk of the record of `token`, a token of `rank`: 32 words, one per lane.
 * `chunk`: 0 for words 0 to 31 of the record, 1 for words 32 to 63. `word`: this lane's word,
 * as peek_record() has returned it. `slot` becomes the slot that this lane's word contains, or
 * -1 if the record has no word for this lane. If the plan is invalid, `slot` becomes
 * RECORD_DISCARD. `more` becomes true if a later chunk may contain slots. If `keep` is true,
 * also copies the slots into the plan that this kernel makes. Called by a whole warp. Returns
 * false if the group has failed. */
__device__ __forceinline__ bool read_record(const DispatchMove &m, int rank, int32_t token,
                                            int chunk, bool keep, uint64_t word, int32_t &slot,
                                            bool &more)
{
    const int k = chunk * WARP + lane_id();
    if (!m.has_new_plan) {
        slot = (int32_t)word;
        more = (chunk + 1) * WARP < m.top_k && __all_sync(ALL_LANES, slot >= 0);
        return true;
    }
    const uint64_t *words = record_address(m.job.plan.self, m.op, rank, token, m.top_k);
    if (!receive_record(m.op, words, m.top_k, chunk, rank, word, slot, more)) return false;
    const int64_t at = record_index(m.job.plan.self, rank, token, m.top_k) + k;
    if (keep && k < m.top_k)
        ((int32_t *)m.plan.records)[at] = slot == (int32_t)RECORD_DISCARD ? -1 : slot;
    return true;
}

/* The plan contains a record of `token`, a token of `rank`. Writes -1 to all words of this
 * record after chunk `chunk`, because they are unused. Called by a whole warp. */
__device__ __forceinline__ void end_record(const DispatchMove &m, int rank, int32_t token,
                                           int chunk)
{
    const int64_t at = record_index(m.job.plan.self, rank, token, m.top_k);
    for (int k = (chunk + 1) * WARP + lane_id(); k < m.top_k; k += WARP)
        ((int32_t *)m.plan.records)[at + k] = -1;
}

/* A peer sends the weights of a token's choices that go to this rank. Returns the address at
 * which the n-th of these weights arrives. `source`: index of the peer among this rank's
 * sources. */
__device__ __forceinline__ uint32_t *weight_address(const DispatchMove &m, int source,
                                                    int32_t token, int n)
{
    uint8_t *heap = inbox_base(m.op, rank_of_role(m.job.plan.self, source + 1));
    return floats_base(m.job.plan.self, m.op, heap, source) +
           (int64_t)TOKEN_INDEX(m, token) * float_stride(m.top_k) + n;
}

/* Returns the weight of this lane's slot, without waiting. `rank`: the rank to which the token
 * belongs. If `rank` is this rank, loads the weight from the caller's array. If `rank` is a
 * peer, loads the weight from the heap; the result is poison if the weight has not arrived.
 * `source`: index of this peer among this rank's sources. `chunk`: 0 if the slot is among the
 * token's first 32 slots on this rank, otherwise 1. `slot`: this lane's slot. If the lane has
 * no slot, `slot` is -1, and the result is 0. Called by a whole warp. */
__device__ __forceinline__ uint32_t peek_weight(const DispatchMove &m, int rank, int source,
                                                int32_t token, int chunk, int32_t slot)
{
    const int n = chunk * WARP + lane_id();
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

/* Writes the weight of this lane's slot to slot_weights. For a peer's token, first waits for
 * the weight, and then stores poison to the heap for the next use. `word`: the result of
 * peek_weight(), which the caller has called with the same arguments. Called by a whole warp.
 * Returns false if the group has failed. */
__device__ __forceinline__ bool receive_weight(const DispatchMove &m, int rank, int source,
                                               int32_t token, int chunk, int32_t slot,
                                               uint32_t word)
{
    if (rank != m.job.plan.self.rank) {
        uint32_t *from = weight_address(m, source, token, chunk * WARP + lane_id());
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

/* Stores the piece q to the slots of all lanes, one slot after the other. `vector`: index in
 * the row of the piece's first vector. `slot`: this lane's slot, or -1 if the lane has no slot.
 * Called by one warp. */
template <bool EXACT>
__device__ __forceinline__ void fill_slots(const DispatchMove &m, int32_t vector, int32_t slot,
                                           const uint4 (&q)[V])
{
    uint32_t slots = __ballot_sync(ALL_LANES, slot >= 0 && slot < m.job.recv_rows);
    int32_t next = __shfl_sync(ALL_LANES, slot, __ffs(slots) - 1);
    while (slots) {
        const int32_t to = next;
        slots &= slots - 1;
        /* Read the next slot before the stores to this slot, because the shuffle would wait for
         * them. */
        next = __shfl_sync(ALL_LANES, slot, __ffs(slots) - 1);
        store_piece<V, EXACT>(m.job.recv + row_offset(to, m.shape), vector, m.shape, q,
                              m.policy);
    }
}

/* Reads piece `piece` of the row of `token`, a token of `rank`, into q. If `rank` is this rank,
 * reads the piece from the caller's rows. If `rank` is a peer, waits for the piece in staging,
 * reads it, and stores poison to the staging for the next use. `source`: index of this peer
 * among this rank's sources. If `copied` is true, q contains an earlier copy of the piece, in
 * which words that had not arrived are poison. Called by a whole warp. Returns false if the
 * group has failed. */
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
    uint4 *staged = staged_row(m.op.inbox[rank], token - m.round_begin, m.shape.vectors);
    if (!receive_piece<V, EXACT>(m.op, peer, staged, vector, m.shape.vectors, copied, q))
        return false;
    uint32_t *escape =
        escapes_base(m.job.plan.self, m.op, row_inbox_base(m.job.plan.self, rank), source) +
        ((int64_t)TOKEN_INDEX(m, token) * m.shape.pieces + piece) * WARP;
    if (!unhide_poison<V>(m.op, peer, q, escape)) return false;
    poison_piece<V, EXACT>(staged, vector, m.shape.vectors);
    return true;
}

/* Zeroes piece `piece` of the row of `slot`, a padding slot. If `piece` is 0, also zeroes the
 * slot's weight. Called by a whole warp. */
template <bool EXACT>
__device__ __forceinline__ void pad_piece(const DispatchMove &m, int32_t slot, int piece)
{
    if ((uint32_t)slot >= (uint32_t)m.job.recv_rows) return;
    zero_piece<V, EXACT>(m.job.recv + row_offset(slot, m.shape), piece * V * WARP, m.shape,
                         m.policy);
    if (piece == 0 && lane_id() == 0 && m.job.slot_weights) m.job.slot_weights[slot] = 0.0f;
}

/* Waits until the planner CTAs of this kernel have completed the plan. Called by a whole warp.
 * Returns false if the group has failed. */
__device__ __forceinline__ bool wait_for_plan(const DispatchMove &m)
{
    const uint32_t *planned = &control_of(m.op)->planned;
    return wait_warp(m.op, -1, P2P_PHASE_GRID, [&] {
        return __all_sync(ALL_LANES, load_acquire(planned) == m.op.epoch) != 0;
    });
}

/* Returns the plan's header in memory. It is volatile because a planner CTA may still be
 * writing it. */
__device__ __forceinline__ const volatile device_plan_header *header_of(const DispatchMove &m)
{
    return (const volatile device_plan_header *)m.job.plan.plan;
}

/* Special values of slab_bits. NOT_KNOWN: the warp has not yet decided whether it zeroes
 * padding slots (slots without a token) while it receives tokens. NOT_WITH_TOKENS: it zeroes no
 * padding slots while it receives tokens, and pad_all() zeroes all of them at the end. */
#define NOT_KNOWN (-1)
#define NOT_WITH_TOKENS (-2)

/* Decides whether warps also zero padding slots while they receive this rank's tokens.
 * slab_bits becomes log2 of the number of this rank's slabs (one slab per expert), rounded up,
 * or NOT_WITH_TOKENS. If this kernel makes the plan, waits until the plan is complete. Called
 * by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool find_padding_slabs(const DispatchMove &m, int &slab_bits)
{
    slab_bits = NOT_WITH_TOKENS;
    if (m.plan.header.alignment <= 1) return true;
    if (!pads_with_tokens(m.plan, m.stride, m.most_tokens)) return true;
    if (m.has_new_plan && !wait_for_plan(m)) return false;
    if (header_of(m)->result == EPIC_OK) slab_bits = device_slab_bits(header_of(m)->owned);
    return true;
}

/* Waits until all ranks have announced their numbers of tokens, and sets tokens_of and
 * most_tokens. Called by a whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool read_token_counts(DispatchMove &m)
{
    if (!read_announcement(m.op, P2P_ANNOUNCED_TOKENS, m.tokens_of)) return false;
    m.most_tokens = largest_number(m.tokens_of);
    return true;
}

/* Sets `tokens` to the number of tokens of each rank. Reads these numbers from the plan. If the
 * kernel makes the plan (WITH_PLAN), the numbers are not known yet, so sets all of them to
 * 0. */
template <bool WITH_PLAN>
__device__ __forceinline__ void read_plan_tokens(RankNumbers &tokens, const PlanView &plan,
                                                 const p2p_self &self)
{
    for_each_group(self, [&](int first) {
        const int q = first + lane_id();
        set_number(tokens, first,
                   !WITH_PLAN && q < self.num_ranks ? plan.header.tokens_of[q] : 0);
    });
}

/* In step `step` of the list of units, token `step` is sent. Returns how many tokens of each
 * source are received before this step. Receiving begins after max(m.num_early_tokens, job.lag)
 * tokens have been sent. Then one of every 2^catch_up steps receives two tokens, until only
 * job.lag tokens have been sent but not yet received. */
__device__ __forceinline__ int32_t received_before(const DispatchMove &m, int32_t step)
{
    const int32_t behind = max(step - max(m.num_early_tokens, m.job.lag), 0);
    return min(behind + (behind >> m.job.catch_up), max(step - m.job.lag, 0));
}

/* Returns the token that a unit moves. If the unit receives two tokens, returns the first of
 * them. */
__device__ __forceinline__ int32_t token_of(const DispatchMove &m, const UnitWalk &walk)
{
    return m.round_begin + (walk.role == 0 ? walk.step : received_before(m, walk.step));
}

/* Loads the word that a unit needs first. The function is called while the warp works on its
 * previous unit. If the unit sends a token, lane k loads choice k of the token. If the unit
 * receives a token, each lane loads its word of the token's record with peek(rank, token). */
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

/* --------------------------------------------------------------- the kernel's own plan ---- */

/* Sets `plan`, the view through which the kernel reads the plan. Without WITH_PLAN, also checks
 * the plan that the caller passed. With WITH_PLAN, sets only the fields that are already known.
 * Called by all threads of a CTA, before begin_operation(). */
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

/* If the kernel makes a plan and this CTA is a planner CTA, makes the plan. Called by all
 * threads, after begin_operation(). `memory`: dynamic shared memory, which can be used for rows
 * afterwards. Returns false if the group has failed. */
template <bool WITH_PLAN, bool FLAT>
__device__ __forceinline__ bool make_own_plan(Planner &planner, const p2p_dispatch_job &job,
                                              OpState &op, uint8_t *memory)
{
    /* FLAT is the only feature that a plan of this kernel can have. For layers with replicas or
     * dropped choices, plan_kernel makes the plan before this kernel runs. */
    constexpr int FEATURES = FLAT ? PLAN_FLAT : 0;
    if (!WITH_PLAN || (int)blockIdx.x >= job.plan.planners) return true;
    return __syncthreads_and(make_plan<FEATURES>(planner, job.plan, op, memory)) != 0;
}

#endif
