/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch for few tokens, alone or together with making the plan (WITH_PLAN, lowlat/plan.cuh).
 *
 *   tokens  [num_tokens, row_bytes] of this rank -> slots of the ranks of their experts
 *   weights [num_tokens, top_k] of this rank     -> slot_weights of those slots
 *
 * A unit of work is a piece of a row. The template parameter Rows defines pieces: PlainRows
 * (lowlat/dispatch.cu) or PackedRows (lowlat/dispatch_packed.cu). Workers first send their
 * pieces of this rank's tokens to the peers that need them. Then they receive pieces of all
 * tokens into slots, this rank's own tokens first. A token's weights and record ("words") are
 * received by one warp; words are dealt from the last worker down, pieces from the first worker
 * up.
 *
 *   worker 0   send piece 0 | receive piece 0 of own tokens | of peers' tokens
 *   worker 1   send piece 1 | receive piece 1 of own tokens | of peers' tokens
 *   ...                     | (WITH_PLAN: every CTA computes the plan in between)
 *   control    send ids, weights | announce | wait for announcements | end the operation
 *
 * No send waits for anything, and a token takes one hop. Words of rows, weights and ids are
 * each their own flag. Only the announcement needs an order: a system fence comes before it. So
 * a peer that reads the announcement also sees what earlier operations restored.
 *
 * The last CTAs may only send. With WITH_PLAN and more than one CTA, the last CTA never
 * receives, because it announces. */
#ifndef EPIC_LOWLAT_DISPATCH_CUH
#define EPIC_LOWLAT_DISPATCH_CUH

#define LOW_LATENCY 1 /* must come before the first header: common/wait.cuh */

#include "cuda/common/launch.cuh"
#include "cuda/dispatch/packed.cuh"
#include "cuda/lowlat/plan.cuh"

/* Arguments of the units of a low-latency dispatch. The plan is either read from memory, or
 * made by this kernel (has_new_plan). */
struct LowlatMove : PackedMove {
    const LowlatPlan *tables; /* new plan: its tables */
    uint32_t result;          /* new plan: an epic_result, the result of the plan */
    const int32_t *fates;     /* plan that is read: slots of this rank's choices */
    /* true: rows are received but not stored, because the plan is invalid or a rank has too few
     * rows */
    bool discards;
    /* true: another rank has more tokens, so slots come from records instead of tables
     * (lowlat/plan.cuh) */
    bool is_mixed;
    /* CTAs that send, and CTAs that receive; both may be the same */
    CtaRange senders, receivers;

    /* Returns the number of tokens of a rank. */
    __device__ __forceinline__ int32_t tokens_in(int rank) const
    {
        return has_new_plan ? tables->tokens[rank] : plan.header.tokens_of[rank];
    }
};

/* A piece that is being received. Parts of it are loaded ahead. */
struct PendingPiece {
    int32_t token, piece;
    int rank;
    uint64_t word; /* plan that is read: this lane's slot */
    uint4 q[V];
};

/* The words (weights, record) of a token that are being received. */
struct PendingWords {
    int32_t token;
    int rank;
    uint64_t word;  /* plan that is read: this lane's slot */
    int32_t choice; /* own token, plan that is read: slot of this lane's choice, else -1 */
    /* own token: weight of this lane's choice. Peer's token: weight of this lane's slot, or
     * poison if it has not arrived. */
    uint32_t weight;
};

/* Loads this lane's choice of a token, before the plan's header has been checked. The result
 * must not be used if the plan turns out to be invalid. */
__device__ __forceinline__ uint64_t read_choice_ahead(const LowlatMove &m, int32_t token, int k)
{
    const p2p_dispatch_job &job = m.job;
    if (m.has_new_plan) return read_choice(m, token, k);
    if (k >= job.top_k) return ~0ull;
    const int32_t *rank_of = (const int32_t *)(job.plan.plan + job.plan.at.rank_of);
    return (uint32_t)__ldg(rank_of + (int64_t)token * job.top_k + k);
}

/* ----------------------------------------------------------------------------- sending ---- */

/* Sends a worker's pieces of this rank's tokens. A unit is a piece: number token * pieces +
 * piece. Everything about the first piece is loaded and computed before the CTA's first
 * barrier, because after it every instruction delays the operation. */
template <class Rows> struct PieceSender {
    const LowlatMove &m;
    int unit, end;
    int32_t token, piece;
    uint64_t word;
    uint32_t peers;
    uint4 q[V];

    /* Loads the first piece of this worker. */
    __device__ __forceinline__ explicit PieceSender(const LowlatMove &move)
        : m(move), unit(move.senders.worker_index()),
          end(m.job.num_tokens * Rows::own_pieces(move))
    {
        if (is_control_warp() || !move.senders.contains_this_cta()) unit = end;
        if (unit >= end) return;
        load_row();
        word = read_choice_ahead(m, token, lane_id());
    }
    /* Loads the piece of unit number `unit`. */
    __device__ __forceinline__ void load_row()
    {
        token = unit / Rows::own_pieces(m);
        piece = unit - token * Rows::own_pieces(m);
        Rows::load_piece(m, token, piece, q);
    }
    /* Finds the peers that need the first piece. Called before the first barrier of the CTA. */
    __device__ __forceinline__ void find_peers()
    {
        if (unit >= end) return;
        const p2p_self &self = m.job.plan.self;
        peers = 0;
#pragma unroll 1
        for (int q = 0; q < self.num_ranks; q++)
            if (q != self.rank && __any_sync(ALL_LANES, choice_goes_to(m, word, q)))
                peers |= 1u << q;
    }
    /* Sends all pieces of this worker. Each is sent after the next one has been loaded. */
    __device__ __forceinline__ void send_all()
    {
        if (unit >= end) return;
        for (;;) {
            const int32_t its_token = token, its_piece = piece;
            uint4 its[V];
#pragma unroll
            for (int v = 0; v < V; v++) its[v] = q[v];
            unit += m.senders.num_workers();
            if (unit < end) {
                load_row();
                word = read_choice(m, token, lane_id());
            }
            if (peers) Rows::send_to_peers(m, its_token, its_piece, peers, its);
            if (unit >= end) return;
            peers = choose_peers(m, token, false, word);
        }
    }
};

/* Sends the weights of this rank's tokens. Each control warp sends some tokens, several at a
 * time; a lane has one choice of one token. The weights of the first tokens are loaded when the
 * kernel starts. */
struct WeightSender {
    const LowlatMove &m;
    int32_t top_k, bits, first;
    uint64_t word;
    uint32_t weight;

    /* Makes a sender without tokens, until read_ahead() is called. */
    __device__ __forceinline__ explicit WeightSender(const LowlatMove &move)
        : m(move), first(move.job.num_tokens)
    {
    }
    /* Loads the weights of the first tokens. Only control warps of receiving CTAs do so. */
    __device__ __forceinline__ void read_ahead()
    {
        if (is_control_warp() && m.receivers.contains_this_cta() && m.job.weights)
            begin_tokens(m.top_k);
        if (has_choice()) word = read_choice_ahead(m, lane_token(), lane_choice());
        read_weight();
    }
    /* Selects this warp's first tokens. choices: number of choices per token. */
    __device__ __forceinline__ void begin_tokens(int32_t choices)
    {
        top_k = choices;
        bits = bits_of(choices);
        first = (int32_t)((int)blockIdx.x - m.receivers.first) << (5 - bits);
    }
    /* Returns the token of this lane. */
    __device__ __forceinline__ int32_t lane_token() const
    {
        return first + (lane_id() >> bits);
    }
    /* Returns the number of this lane's choice among those of its token. */
    __device__ __forceinline__ int lane_choice() const
    {
        return lane_id() & ((1 << bits) - 1);
    }
    /* Returns whether this lane has a choice of an existing token. */
    __device__ __forceinline__ bool has_choice() const
    {
        return first < m.job.num_tokens && lane_token() < m.job.num_tokens &&
               lane_choice() < top_k;
    }
    /* Loads the weight of this lane's choice. */
    __device__ __forceinline__ void read_weight()
    {
        if (!has_choice()) return;
        const float *weights = m.job.weights + (int64_t)lane_token() * top_k;
        weight = __float_as_uint(__ldg(weights + lane_choice()));
    }
    /* Sends the weights of the current tokens to all peers. A peer gets only the weights of its
     * own choices, one after the other. */
    __device__ __forceinline__ void send_current() const
    {
        const p2p_self &self = m.job.plan.self;
        const uint32_t mates = ALL_LANES >> (WARP - (1 << bits)) << (lane_id() >> bits << bits);
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int rank = wrap_rank(self.rank + distance, self.num_ranks);
            const bool goes = has_choice() && choice_goes_to(m, word, rank);
            const uint32_t those = __ballot_sync(ALL_LANES, goes) & mates;
            /* backend hosts: all lanes stay together, because post_put_weights() has a barrier
             * of the warp */
            if (!HOSTS && !goes) continue;
            /* number of this rank among the peer's sources */
            const int source = self.num_ranks - 1 - distance;
            uint32_t *floats = floats_base(self, m.op, self.heap[rank], source) +
                               (int64_t)lane_token() * float_stride(top_k);
            if (goes)
                store_relaxed(floats + __popc(those & lanes_below()),
                              replace_poison(weight, F32::NAN_WORD));
            post_put_weights(rank, floats, __popc(those));
        }
    }
    /* backend hosts: posts the put of a token's weights for one rank. All lanes of the warp. */
    __device__ __forceinline__ void post_put_weights(int rank, uint32_t *floats,
                                                     int count) const
    {
        if (!HOSTS) return;
        const bool speaks = count && lane_choice() == 0;
        if (speaks && count % 2) store_relaxed(floats + count, POISON);
        __syncwarp();
        if (speaks) post_put(m.op, rank, floats, (uint32_t)(count + 1) / 2 * 8);
    }
    /* Sends all weights of this warp. Called when the plan is known to be valid. */
    __device__ __forceinline__ void send_weights()
    {
        if (!m.job.weights || !m.receivers.contains_this_cta()) return;
        while (first < m.job.num_tokens) {
            send_current();
            first += m.receivers.ctas << (5 - bits);
            if (has_choice()) word = read_choice(m, lane_token(), lane_choice());
            read_weight();
        }
    }
};

/* --------------------------------------------------------------------------- receiving ---- */

/* Sets rank, token and piece of receiving unit number u. This rank's own tokens come first.
 * Then come the peers' tokens: token 0 of all peers, token 1 of all peers, and so on. */
template <class Rows>
__device__ __forceinline__ void locate_unit(const LowlatMove &m, int u, PendingPiece &p)
{
    const p2p_self &self = m.job.plan.self;
    const int own = m.job.num_tokens * Rows::own_pieces(m), peers = self.num_ranks - 1;
    p.rank = self.rank;
    p.piece = u % Rows::own_pieces(m);
    p.token = u / Rows::own_pieces(m);
    if (u < own || peers == 0) return;
    const int row = (u - own) / m.shape.pieces;
    p.piece = (u - own) % m.shape.pieces;
    p.token = row / peers;
    p.rank = wrap_rank(self.rank + 1 + row % peers, self.num_ranks);
}

/* Returns the number of receiving units. */
template <class Rows> __device__ __forceinline__ int num_units(const LowlatMove &m)
{
    const int peers = m.job.plan.self.num_ranks - 1;
    return m.job.num_tokens * Rows::own_pieces(m) + m.most_tokens * peers * m.shape.pieces;
}

/* Returns the number of `rank` among the sources of this rank. */
__device__ __forceinline__ int source_number_of(const LowlatMove &m, int rank)
{
    const p2p_self &self = m.job.plan.self;
    return wrap_rank(rank + self.num_ranks - self.rank - 1, self.num_ranks);
}

/* Loads this lane's word of a token's record, before the plan's header has been checked. The
 * result must not be used if the plan turns out to be invalid. */
__device__ __forceinline__ uint64_t read_record_ahead(const LowlatMove &m, int rank,
                                                      int32_t token)
{
    const p2p_dispatch_job &job = m.job;
    if (lane_id() >= job.top_k || token >= job.plan.self.max_tokens) return ~0ull;
    const int32_t *records = (const int32_t *)(job.plan.plan + job.plan.at.records);
    return (uint32_t)__ldg(records + record_index(job.plan.self, rank, token, job.top_k) +
                           lane_id());
}

/* Loads a piece of a peer's token from staging, whether it has arrived or not. Tokens past this
 * rank's own number of tokens are not loaded ahead, because peers mostly have equally many. */
template <class Rows>
__device__ __forceinline__ void load_staged(const LowlatMove &m, PendingPiece &p)
{
    const int32_t vector = p.piece * V * WARP, begin = vector + lane_id();
    const uint4 *staged = staged_row(m.op.inbox[p.rank], p.token, m.shape.vectors) + begin;
    if (is_host_memory(m.op, staged)) return;
#pragma unroll
    for (int v = 0; v < V; v++) {
        p.q[v] = make_uint4(0, 0, 0, 0);
        if (!Rows::EXACT && begin + v * WARP >= m.shape.vectors) continue;
        p.q[v] = p.token < m.job.num_tokens ? load_relaxed(staged + v * WARP) : poison_vector();
    }
}

/* Loads the piece of receiving unit u, if the unit exists. */
template <class Rows>
__device__ __forceinline__ void load_unit_row(const LowlatMove &m, int u, PendingPiece &p)
{
    if (u >= num_units<Rows>(m)) return;
    locate_unit<Rows>(m, u, p);
    if (u < m.job.num_tokens * Rows::own_pieces(m))
        Rows::load_piece(m, p.token, p.piece, p.q);
    else
        load_staged<Rows>(m, p);
}

/* Loads the record of receiving unit u, if the plan is read. */
template <class Rows>
__device__ __forceinline__ void load_unit_record(const LowlatMove &m, int u, PendingPiece &p)
{
    if (!m.has_new_plan && u < num_units<Rows>(m)) p.word = peek_record(m, p.rank, p.token, 0);
}

/* Loads the words of token number u. This rank's tokens come first, then those of the peers. */
__device__ __forceinline__ void load_words(const LowlatMove &m, int u, PendingWords &w)
{
    const p2p_self &self = m.job.plan.self;
    const int k = lane_id(), peers = self.num_ranks - 1, row = u - m.job.num_tokens;
    w.token = row < 0 ? u : row / peers;
    w.rank = row < 0 ? self.rank : wrap_rank(self.rank + 1 + row % peers, self.num_ranks);
    w.choice = -1;
    w.weight = POISON;
    if (!m.has_new_plan) w.word = peek_record(m, w.rank, w.token, 0);
    if (k >= m.top_k || !m.job.weights) return;
    if (row >= 0) {
        w.weight = load_relaxed(weight_address(m, source_number_of(m, w.rank), w.token, k));
        return;
    }
    const int64_t at = (int64_t)w.token * m.top_k + k;
    w.weight = __float_as_uint(__ldg(m.job.weights + at));
    if (!m.has_new_plan && __ldg(m.plan.rank_of + at) == w.rank) w.choice = __ldg(m.fates + at);
}

/* Stores a weight to a slot of slot_weights, unless rows are discarded. */
__device__ __forceinline__ void store_weight(const LowlatMove &m, int32_t slot, uint32_t word)
{
    if (slot >= 0 && slot < m.job.recv_rows && !m.discards)
        m.job.slot_weights[slot] = __uint_as_float(word);
}

/* Receives the weights of a token and stores them to its slots on this rank. This lane's slot
 * is the n-th of the token. Writes poison back. Returns false if the group is broken. */
__device__ __forceinline__ bool receive_weights(const LowlatMove &m, const PendingWords &w,
                                                int32_t slot, int n)
{
    if (w.rank == m.job.plan.self.rank) {
        store_weight(m, m.has_new_plan ? slot : w.choice, w.weight);
        return true;
    }
    uint32_t *from = weight_address(m, source_number_of(m, w.rank), w.token, n);
    uint32_t word = __shfl_sync(ALL_LANES, w.weight, n);
    bool again = false;
    const bool ok = wait_warp(m.op, w.rank, P2P_PHASE_FLOAT, [&] {
        if (again && slot >= 0) word = load_relaxed(from);
        again = true;
        return __any_sync(ALL_LANES, slot >= 0 && word == POISON) == 0;
    });
    if (!ok) return false;
    if (slot >= 0) *from = POISON;
    store_weight(m, slot, word);
    return true;
}

/* Returns this lane's slot of the token on this rank, or -1. */
__device__ __forceinline__ int32_t find_slot(const LowlatMove &m, int rank, int32_t token,
                                             uint64_t word)
{
    return m.has_new_plan ? m.tables->slot_here(m.job.plan, rank, token, lane_id())
                          : (int32_t)word;
}

/* Receives a piece and stores it to its slots. Returns false if the group is broken. */
template <class Rows>
__device__ __forceinline__ bool receive_pending(const LowlatMove &m, PendingPiece &p)
{
    const p2p_self &self = m.job.plan.self;
    if (p.token >= m.tokens_in(p.rank)) return true;
    const int32_t slot = find_slot(m, p.rank, p.token, p.word);
    if (!__any_sync(ALL_LANES, slot >= 0)) return true;
    if (p.rank != self.rank &&
        !Rows::receive_from_peer(m, p.rank, source_number_of(m, p.rank), p.token, p.piece, p.q))
        return false;
    if (!m.discards) Rows::fill_slots_of(m, p.rank == self.rank, p.token, p.piece, slot, p.q);
    return true;
}

/* Receives all pieces of this worker. Each is loaded while the one before is received; `first`
 * has been loaded by the caller. Returns false if the group is broken. */
template <class Rows>
__device__ __forceinline__ bool receive_all(const LowlatMove &m, PendingPiece &first)
{
    PendingPiece current = first, next;
    for (int u = m.receivers.worker_index(); u < num_units<Rows>(m);
         u += m.receivers.num_workers()) {
        load_unit_row<Rows>(m, u + m.receivers.num_workers(), next);
        load_unit_record<Rows>(m, u + m.receivers.num_workers(), next);
        if (!receive_pending<Rows>(m, current)) return false;
        current = next;
    }
    return true;
}

/* Returns the number of the first token whose words this worker receives. Counts from the last
 * worker down, because the first workers have more pieces. */
__device__ __forceinline__ int first_words(const LowlatMove &m)
{
    return m.receivers.num_workers() - 1 - m.receivers.worker_index();
}

/* Returns the number of tokens whose words are received, over all ranks. */
__device__ __forceinline__ int num_words(const LowlatMove &m)
{
    return m.job.num_tokens + m.most_tokens * (m.job.plan.self.num_ranks - 1);
}

/* Receives the words of this worker's tokens: stores weights and, with a new plan, records. w:
 * the words of the first token, loaded ahead. Returns false if the group is broken. */
__device__ __forceinline__ bool receive_words(const LowlatMove &m, PendingWords &w)
{
    for (int u = first_words(m); u < num_words(m); u += m.receivers.num_workers()) {
        if (u != first_words(m)) load_words(m, u, w);
        if (w.token >= m.tokens_in(w.rank)) continue;
        const int32_t slot = find_slot(m, w.rank, w.token, w.word);
        const uint32_t here = __ballot_sync(ALL_LANES, slot >= 0);
        const int n = m.has_new_plan ? __popc(here & lanes_below()) : lane_id();
        if (m.has_new_plan)
            m.tables->store_token(m.job.plan, w.rank, w.token, slot, here, m.result);
        if (here && m.job.weights && !receive_weights(m, w, slot, n)) return false;
    }
    return true;
}

/* ---------------------------------------------------------- padding and the whole plan ---- */

/* Writes zeros to the padding slots of this rank's slabs. Called by the workers. */
template <class Rows> __device__ __forceinline__ void pad_slabs(const LowlatMove &m)
{
    const p2p_plan_job &plan = m.job.plan;
    if (m.job.leave_padding) return;
    const auto write = [&](int32_t slot, int piece) { Rows::pad_slot(m, slot, piece); };
    if (!m.has_new_plan) {
        for_each_padding_piece(m.plan, m.plan.header.owned, m.shape.pieces,
                               m.receivers.worker_index(), m.receivers.num_workers(), write);
    } else if (plan.layer.alignment > 1) {
        const auto padding_in = [&](int slab) {
            const int e = plan.self.rank * plan.block + slab;
            const int32_t count = m.tables->p.load[e], *start = m.tables->p.start;
            const int32_t rows = (int32_t)round_up_rows(count, plan.layer.alignment);
            return device_padding{start[e] - start[plan.self.rank * plan.block] + count,
                                  rows - count};
        };
        for_each_padding_of(padding_in, plan.block, m.shape.pieces, m.receivers.worker_index(),
                            m.receivers.num_workers(), write);
    }
}

/* Returns the slots of this rank's choices in a plan that is read. */
__device__ __forceinline__ const int32_t *fates_of(const PlanView &plan, const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.rank_of + (at.fate - at.rank_of) / 4;
}

/* ---------------------------------------------------- with ranks that have more tokens ---- */

/* Waits for a token's record and returns this lane's slot in `slot`. `keep`: also stores the
 * record in the plan. Returns false if the group is broken. */
__device__ __forceinline__ bool receive_mixed_slot(const LowlatMove &m, int rank, int32_t token,
                                                   bool keep, int32_t &slot)
{
    bool more;
    const uint64_t word = peek_record(m, rank, token, 0);
    return read_record(m, rank, token, 0, keep, word, slot, more);
}

/* Like receive_words(), for mixed plans, whose slots come from records. */
__device__ __forceinline__ bool receive_mixed_words(const LowlatMove &m)
{
    for (int u = first_words(m); u < num_words(m); u += m.receivers.num_workers()) {
        PendingWords w;
        int32_t slot;
        load_words(m, u, w);
        if (w.token >= m.tokens_in(w.rank)) continue;
        if (!receive_mixed_slot(m, w.rank, w.token, true, slot)) return false;
        if (!m.job.weights || !__any_sync(ALL_LANES, slot >= 0)) continue;
        const int source = source_number_of(m, w.rank);
        const uint32_t weight = peek_weight(m, w.rank, source, w.token, 0, slot);
        if (!receive_weight(m, w.rank, source, w.token, 0, slot, weight)) return false;
    }
    return true;
}

/* Like receive_all(), for mixed plans, whose slots come from records. */
template <class Rows> __device__ __forceinline__ bool receive_mixed_rows(const LowlatMove &m)
{
    for (int u = m.receivers.worker_index(); u < num_units<Rows>(m);
         u += m.receivers.num_workers()) {
        PendingPiece p;
        int32_t slot;
        locate_unit<Rows>(m, u, p);
        const bool own = p.rank == m.job.plan.self.rank;
        if (p.token >= m.tokens_in(p.rank)) continue;
        if (!receive_mixed_slot(m, p.rank, p.token, false, slot)) return false;
        if (!__any_sync(ALL_LANES, slot >= 0)) continue;
        load_unit_row<Rows>(m, u, p);
        if (!own && !Rows::receive_from_peer(m, p.rank, source_number_of(m, p.rank), p.token,
                                             p.piece, p.q))
            return false;
        Rows::fill_slots_of(m, own, p.token, p.piece, slot, p.q);
    }
    return true;
}

/* Makes a mixed plan and receives all rows. All threads of the receiving CTAs. noinline, with m
 * passed by value: a reference would force m into memory on the other paths, too. */
template <class Rows>
static __device__ __noinline__ void receive_mixed(const LowlatMove m, OpState &op,
                                                  LowlatPlan &tables, uint8_t *memory)
{
    const p2p_plan_job &plan = m.job.plan;
    const volatile device_plan_header *h = header_of(m);
    if (!make_mixed_plan(tables, plan, op, memory)) return;
    bool ok = is_control_warp() || (receive_mixed_words(m) && receive_mixed_rows<Rows>(m));
    ok = ok && wait_for_plan(m);
    if (!__syncthreads_and(ok)) return;
    const bool good = h->result == EPIC_OK;
    if (!is_control_warp() && good && !m.job.leave_padding)
        for_each_padding_piece(m.plan, h->owned, m.shape.pieces, m.receivers.worker_index(),
                               m.receivers.num_workers(), [&](int32_t slot, int piece) {
                                   Rows::pad_slot(m, slot, piece);
                               });
    if (good && m.job.zero_tail)
        Rows::clear_rows(m, h->slots_of[plan.self.rank], m.receivers.thread_index(),
                         m.receivers.num_threads());
    __syncthreads();
    if (!is_last_cta_to_end(op, m.receivers.ctas)) return;
    if (!good || !check_rows(plan.self, op, h, threadIdx.x == 0))
        Rows::clear_rows(m, 0, threadIdx.x, LOWLAT_BLOCK);
}

/* Makes the plan, and decides whether rows are discarded and whether the plan is mixed. All
 * threads of the receiving CTAs. Returns false if the group is broken. */
static __device__ bool make_plan_of(LowlatMove &m, LowlatPlan &tables)
{
    const p2p_plan_job &job = m.job.plan;
    const bool heads = is_control_warp() && (int)blockIdx.x == m.receivers.first;
    if (heads) begin_header(tables, job, m.op);
    const LowlatPlanState has_new_plan = make_lowlat_plan(tables, job, m.op);
    if (has_new_plan == LOWLAT_PLAN_BROKEN) return false;
    m.most_tokens = __reduce_max_sync(ALL_LANES, tables.tokens[lane_id()]);
    m.is_mixed = has_new_plan == LOWLAT_PLAN_MIXED;
    if (m.is_mixed) return true;
    const PlanVerdict verdict = judge_plan(tables, job, true);
    m.result = verdict.result;
    m.discards = verdict.result != EPIC_OK || verdict.short_of_rows;
    if (is_control_warp()) write_lowlat_plan(tables, job, m.op, m.receivers, m.result);
    if (heads && verdict.short_of_rows)
        (void)check_rows(job.self, m.op, &tables.p.header, lane_id() == 0);
    return true;
}

/* The kernel. Rows: how pieces are moved (PlainRows lists the functions). WITH_PLAN: the kernel
 * also makes the plan.
 *
 *   1. Control warps read the state of the operation, set op and send ids. Workers load
 *      their first pieces. One worker loads and checks the header of a plan that is read.
 *   2. The first barrier of the CTA. One warp of the grid announces the operation.
 *   3. Workers send all their pieces; control warps send weights.
 *   4. WITH_PLAN: receiving CTAs make the plan.
 *   5. Workers receive words, then pieces, and zero the padding. The control warp of the
 *      last CTA ends the operation.
 *   6. If nothing may be stored, or a rank has too few rows: zero the whole receive buffer. */
template <class Rows, bool WITH_PLAN>
__global__ void __launch_bounds__(LOWLAT_BLOCK, 1)
    lowlat_dispatch_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    __shared__ OpState op;
    __shared__ PlanView plan;
    __shared__ LowlatPlan tables;
    __shared__ Stride unused;
    __shared__ bool enough; /* false: this CTA has found a rank with too few rows */
    const p2p_self &self = job.plan.self;
    const device_plan_header &h = WITH_PLAN ? tables.p.header : plan.header;
    prefetch_params(job);
    if (self.operation == EPIC_OP_NONE) return;
    if (!HOSTS && is_announcer(WITH_PLAN)) fence_system();
    const StartState opening = read_start_state(self);
    if (HOSTS && is_announcer(WITH_PLAN)) fence_system();
    const bool reads = !WITH_PLAN && threadIdx.x / WARP == LOWLAT_WORKERS - 1;
    uint32_t header[HEADER_LANE_WORDS];
    if (reads) load_header(header, job.plan.plan, job.plan_bytes);
    const RowShape shape = Rows::shape_of(job);
    LowlatMove m = {
        {{{job, op, plan, unused, shape, policy_once(), 0, (int)job.plan.layer.top_k}}}};
    Rows::describe_rows(m);
    m.has_new_plan = WITH_PLAN;
    m.result = EPIC_OK;
    m.discards = m.is_mixed = false;
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    m.tables = &tables;
    const int ctas = (int)gridDim.x;
    m.senders = {job.num_send_only_ctas ? ctas - job.num_send_only_ctas : 0,
                 job.num_send_only_ctas ? job.num_send_only_ctas
                                        : ctas - (HOSTS && WITH_PLAN && ctas > 1)};
    m.receivers = {
        0, ctas - (job.num_send_only_ctas ? job.num_send_only_ctas : WITH_PLAN && ctas > 1)};
    const bool is_receiver = m.receivers.contains_this_cta(),
               works = is_receiver && !is_control_warp();
    IdSender ids(job.plan, m.receivers, WITH_PLAN);
    WeightSender weights(m);
    bool may = true;
    if (is_control_warp()) {
        if (!WITH_PLAN) weights.read_ahead();
        ids.make_words();
        open_lowlat(op, self, opening, job.num_tokens, job.plan.capacity, job.recv_rows);
        may = wait_outbox_ready(op, opening);
        if (WITH_PLAN && opening.broken == 0 && may) {
            ids.send_ids(op);
            announce_sizes(self, op, job.num_tokens, job.plan.capacity, job.recv_rows);
        }
        find_lowlat_boxes(op, self);
    }
    PieceSender<Rows> sender(m);
    PendingPiece first;
    PendingWords words;
    const bool begins_own =
        works && m.receivers.worker_index() < job.num_tokens * Rows::own_pieces(m);
    if (works) locate_unit<Rows>(m, m.receivers.worker_index(), first);
    if (begins_own) Rows::load_piece(m, first.token, first.piece, first.q);
    if (begins_own && !WITH_PLAN) first.word = read_record_ahead(m, self.rank, first.token);
    if (threadIdx.x == 0) enough = true;
    if (WITH_PLAN) open_tables(tables, job.plan, memory);
    if (reads) {
        view_plan(plan, header, job.plan.plan, job.plan_bytes, self, job.num_tokens);
        if (lane_id() == 0)
            op.signature = self.signature ^ ((uint32_t)plan.header.id & 0x0fffffffu);
    }
    if (WITH_PLAN && threadIdx.x == 0) {
        op.signature = self.signature;
        plan.records = (const int32_t *)(job.plan.plan + job.plan.at.records);
        plan.padding = (const device_padding *)(job.plan.plan + job.plan.at.padding);
        plan.header.alignment = job.plan.layer.alignment;
    }
    sender.find_peers();
    if (!__syncthreads_and(opening.broken == 0 && may)) {
        if (threadIdx.x == 0) report_aborted_wait(op);
        return;
    }
    if (!WITH_PLAN) announce_sizes(self, op, job.num_tokens, job.plan.capacity, job.recv_rows);
    count_started_cta(self, op);
    if (is_announcer(WITH_PLAN)) announce_start(self, op);

    const bool moves = WITH_PLAN || (plan.is_valid && plan.header.result == EPIC_OK);
    m.most_tokens = WITH_PLAN ? job.plan.max_lowlat_tokens : plan.most_tokens;
    if (is_control_warp()) {
        if (WITH_PLAN) weights.read_ahead();
        if (moves) weights.send_weights();
    } else if (moves) {
        sender.send_all();
    }
    /* this warp may still have to send a wrong value (end_header) */
    const bool reports_faults = WITH_PLAN && is_receiver && is_control_warp();
    if (!reports_faults) count_posted_warp(self);
    if (!WITH_PLAN) m.fates = fates_of(plan, self);
    bool ok = true;
    if (moves && works) {
        if (!begins_own && m.receivers.worker_index() < num_units<Rows>(m))
            load_staged<Rows>(m, first);
        if (!begins_own) load_unit_record<Rows>(m, m.receivers.worker_index(), first);
        if (first_words(m) < num_words(m)) load_words(m, first_words(m), words);
    }
    if (WITH_PLAN && is_receiver) ok = make_plan_of(m, tables);
    if (HOSTS && WITH_PLAN && is_last_cta() && !is_receiver) ok = poll_inbox(job.plan, op);
    if (ok && reports_faults) count_posted_warp(self);
    if (WITH_PLAN && m.is_mixed) {
        if (is_control_warp() && is_last_cta()) finish_lowlat(self, op, opening, WITH_PLAN);
        receive_mixed<Rows>(m, op, tables, memory);
        return end_lowlat(op);
    }
    if (ok && moves && works) {
        ok = receive_words(m, words) && receive_all<Rows>(m, first);
        if (ok && !m.discards) pad_slabs<Rows>(m);
    }
    if (is_control_warp() && !WITH_PLAN && moves) {
        const bool good = have_all_rows(self, op, h);
        if (lane_id() == 0) enough = good;
    }
    if (is_control_warp() && is_last_cta()) finish_lowlat(self, op, opening, WITH_PLAN);
    if (ok && is_receiver && (m.discards || !moves))
        Rows::clear_rows(m, 0, m.receivers.thread_index(), m.receivers.num_threads());
    else if (ok && is_receiver && job.zero_tail)
        Rows::clear_rows(m, WITH_PLAN ? needed_here(tables, job.plan) : h.slots_of[self.rank],
                         m.receivers.thread_index(), m.receivers.num_threads());
    end_lowlat(op);
    if (WITH_PLAN || enough || !is_last_cta_of_overflow(op, h)) return;
    Rows::clear_rows(m, 0, threadIdx.x, LOWLAT_BLOCK);
}

/* Returns the number of CTAs that only send. With more tokens, stores to peers delay everything
 * else that an SM does, above all the ids that follow them (docs/lab/cuda.md). */
static int32_t num_send_only_ctas_of(const p2p_dispatch_job *job, int num_sms)
{
    const int many = job->plan.is_lowlat ? num_sms * 10 / 64 : num_sms * 15 / 64;
    if (job->num_tokens > 96) return many < 16 ? many : 16;
    return job->plan.is_lowlat && job->num_tokens >= 32 ? num_sms / 8 : 0;
}

/* Launches kernels[1] if the kernel must make the plan, else kernels[0]. */
template <class Kernel>
static cudaError_t launch_lowlat(const Kernel (&kernels)[2], p2p_dispatch_job job, int num_sms,
                                 cudaStream_t stream)
{
    const bool has_new_plan = job.plan.is_lowlat;
    const int bytes = has_new_plan ? lowlat_plan_bytes(job.plan) : 0;
    job.num_send_only_ctas = num_send_only_ctas_of(&job, num_sms);
    return launch_kernel(kernels[has_new_plan], num_sms, LOWLAT_BLOCK, bytes, stream, job);
}

/* Loads two kernels, and raises their limits of dynamic shared memory. */
template <class Kernel> static cudaError_t load_lowlat(const Kernel (&kernels)[2])
{
    for (const Kernel &kernel : kernels) {
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, LOWLAT_PLAN_MAX_BYTES);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

#endif
