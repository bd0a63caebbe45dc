/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of the work of dispatch for few tokens. The kernel that calls them is in
 * lowlat/dispatch.cuh.
 *
 *   PieceSender     workers        send pieces of this rank's tokens to the peers' staging
 *   WeightSender    control warps  send the weights of this rank's tokens
 *   receive_all     workers        receive pieces from staging, store them to slots
 *   receive_words   workers        receive weights and, with a new plan, store records
 *
 * A piece is 2 KB of a token's row. A CTA has one control warp, its last warp. The other warps
 * are workers. A worker loads its next piece before it waits for the current piece. A *choice*
 * is a token and one of its top_k experts.
 *
 * The *sources* of a rank are the other ranks: source n of rank r is rank r + 1 + n, modulo
 * num_ranks. In the heap of a rank, the array for weights has one part for each source.
 *
 * Staging is the part of a rank's heap into which peers store rows. Each word of a piece or
 * weight is poison (the mark of a word that has not arrived) until its sender has stored it.
 * The receiving warp polls the word until it is not poison, and then stores poison back. So
 * each word is its own flag, and no memory order is needed. */
#ifndef EPIC_LOWLAT_DISPATCH_UNITS_CUH
#define EPIC_LOWLAT_DISPATCH_UNITS_CUH

/* Makes waits poll longer before they sleep, for lower latency. Must be defined before the
 * first #include, because wait.cuh reads it. */
#define LOW_LATENCY 1

#include "cuda/common/launch.cuh"
#include "cuda/dispatch/packed.cuh"
#include "cuda/lowlat/plan.cuh"

/* Arguments that all functions of this kernel share. has_new_plan (in a base class) is true if
 * the kernel itself makes the plan. In this case the kernel finds slots in tables in shared
 * memory. If has_new_plan is false, the kernel reads a plan in device memory. */
struct LowlatMove : PackedMove {
    const LowlatPlan *tables; /* with has_new_plan: the tables of the plan, in shared memory */
    /* with has_new_plan: the plan's epic_result */
    uint32_t result;
    /* without has_new_plan: for each choice of this rank's tokens, its slot or a negative
     * EPIC_FATE_* */
    const int32_t *fates;
    /* true: received rows must not be stored, because the plan has an error or a rank's receive
     * buffer has too few rows */
    bool discards;
    /* true: the plan is mixed (lowlat/plan.cuh), so slots come from the records that ranks
     * send */
    bool is_mixed;
    /* The CTAs that send rows, and the CTAs that receive rows. A CTA may be in both ranges. */
    CtaRange senders, receivers;

    /* Returns how many tokens `rank` has. */
    __device__ __forceinline__ int32_t tokens_in(int rank) const
    {
        return has_new_plan ? tables->tokens[rank] : plan.header.tokens_of[rank];
    }
};

/* A piece that a warp is receiving: piece `piece` of the row of `token`, a token of `rank`. The
 * warp first loads all vectors of the piece. Later it waits for those words that had not
 * arrived when it loaded them. */
struct PendingPiece {
    int32_t token, piece;
    int rank;
    /* this lane's word of the token's record (a slot or -1); used only without has_new_plan */
    uint64_t record_word;
    /* this lane's V vectors of the piece; words that have not arrived are poison */
    uint4 q[V];
};

/* The *words* of a token that a warp is receiving: the weights and the record of `token`, a
 * token of `rank`. A record lists the slots that the token has on the calling rank. */
struct PendingWords {
    int32_t token;
    int rank;
    /* this lane's word of the token's record (a slot or -1); used only without has_new_plan */
    uint64_t record_word;
    /* The slot of choice lane_id(). Set only if the kernel reads a plan, the token is a token
     * of the calling rank, and the choice's expert is on the calling rank. Otherwise -1. */
    int32_t own_slot;
    /* For a token of this rank: the weight of this lane's choice. For a token of a peer: lane n
     * has the weight of the token's n-th slot on this rank, or poison if the weight has not
     * arrived. */
    uint32_t weight;
};

/* Returns a value that choice_goes_to() needs to find the rank of the expert of choice k of
 * `token`, a token of this rank. With has_new_plan, the value is the expert id from the caller.
 * Without it, the value is the rank from the plan's table rank_of. The function is called
 * before the plan's header has been checked. If the plan then turns out to be invalid, the
 * caller must not use the value. */
__device__ __forceinline__ uint64_t read_choice_ahead(const LowlatMove &m, int32_t token, int k)
{
    const p2p_dispatch_job &job = m.job;
    if (m.has_new_plan) return read_choice(m, token, k);
    if (k >= job.top_k) return ~0ull;
    const int32_t *rank_of = (const int32_t *)(job.plan.plan + job.plan.at.rank_of);
    return (uint32_t)__ldg(rank_of + (int64_t)token * job.top_k + k);
}

/* ----------------------------------------------------------------------------- sending ---- */

/* Sends one worker's share of the pieces of this rank's tokens. A unit of work is one piece.
 * Piece `piece` of token `token` is the unit with the index token * own_pieces + piece. Before
 * the first barrier of the CTA, while the control warp initializes the operation, the sender
 * only loads its first piece and finds the peers that need this piece. */
template <class Rows> struct PieceSender {
    const LowlatMove &m;
    /* unit: index of the unit whose piece is in q. end: number of units of all workers. If unit
     * >= end, this worker has no piece left to send. */
    int unit, end;
    int32_t token, piece;
    /* for choice lane_id() of the token: the result of read_choice_ahead() */
    uint64_t word;
    /* bit mask of the peers that need the loaded piece */
    uint32_t peers;
    uint4 q[V];

    /* Starts to load this worker's first piece. Each lane also loads one choice of the piece's
     * token, from which find_peers() computes which peers need the piece. */
    __device__ __forceinline__ explicit PieceSender(const LowlatMove &move)
        : m(move), unit(move.senders.worker_index()),
          end(m.job.num_tokens * Rows::own_pieces(move))
    {
        if (is_control_warp() || !move.senders.contains_this_cta()) unit = end;
        if (unit >= end) return;
        load_row();
        word = read_choice_ahead(m, token, lane_id());
    }
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
    /* Sends all pieces of this worker. Loads the next piece while it sends the current one. */
    __device__ __forceinline__ void send_all()
    {
        if (unit >= end) return;
        peers &= ~vacant_seats(m.op); /* not known when find_peers() ran */
        for (;;) {
            const int32_t sent_token = token, sent_piece = piece;
            uint4 sent[V];
#pragma unroll
            for (int v = 0; v < V; v++) sent[v] = q[v];
            unit += m.senders.num_workers();
            if (unit < end) {
                load_row();
                word = read_choice(m, token, lane_id());
            }
            if (peers) Rows::send_to_peers(m, sent_token, sent_piece, peers, sent);
            if (unit >= end) return;
            peers = choose_peers(m, token, false, word);
        }
    }
};

/* Sends the weights of this rank's tokens. Each control warp of the receiving CTAs handles some
 * of the tokens, several at a time, with one choice per lane. read_ahead() loads the first
 * weights. send_weights() sends all weights. */
struct WeightSender {
    const LowlatMove &m;
    /* top_k: number of choices per token. choice_bits: log2 of the number of lanes per token.
     * first_token: the first of the tokens that the warp handles now. */
    int32_t top_k, choice_bits, first_token;
    uint64_t word; /* for this lane's choice: the result of read_choice_ahead() */
    /* weight of this lane's choice */
    uint32_t weight;

    /* Creates a sender that has no tokens yet (first_token is past the last token). */
    __device__ __forceinline__ explicit WeightSender(const LowlatMove &move)
        : m(move), first_token(move.job.num_tokens)
    {
    }
    /* Called by control warps. If the CTA receives rows and the call has weights, selects the
     * first tokens of this warp, and loads `word` and `weight` for this lane's choice. */
    __device__ __forceinline__ void read_ahead()
    {
        if (is_control_warp() && m.receivers.contains_this_cta() && m.job.weights)
            begin_tokens(m.top_k);
        if (has_choice()) word = read_choice_ahead(m, lane_token(), lane_choice());
        read_weight();
    }
    /* Selects the first tokens whose weights this warp sends. `choices`: number of choices per
     * token. */
    __device__ __forceinline__ void begin_tokens(int32_t choices)
    {
        top_k = choices;
        choice_bits = bits_of(choices);
        first_token = (int32_t)((int)blockIdx.x - m.receivers.first) << (5 - choice_bits);
    }
    __device__ __forceinline__ int32_t lane_token() const
    {
        return first_token + (lane_id() >> choice_bits);
    }
    __device__ __forceinline__ int lane_choice() const
    {
        return lane_id() & ((1 << choice_bits) - 1);
    }
    __device__ __forceinline__ bool has_choice() const
    {
        return first_token < m.job.num_tokens && lane_token() < m.job.num_tokens &&
               lane_choice() < top_k;
    }
    __device__ __forceinline__ void read_weight()
    {
        if (!has_choice()) return;
        const float *weights = m.job.weights + (int64_t)lane_token() * top_k;
        weight = __float_as_uint(__ldg(weights + lane_choice()));
    }
    /* Sends the weights of the tokens that the warp handles now. Each peer gets only the
     * weights of the choices whose experts are on this peer, in ascending order of k and
     * without gaps. */
    __device__ __forceinline__ void send_current() const
    {
        const p2p_self &self = m.job.plan.self;
        const uint32_t token_lanes =
            ALL_LANES >> (WARP - (1 << choice_bits))
                             << (lane_id() >> choice_bits << choice_bits);
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int rank = wrap_rank(self.rank + distance, self.num_ranks);
            const bool goes =
                has_choice() && choice_goes_to(m, word, rank) && !is_vacant(m.op, rank);
            const uint32_t sent_choices = __ballot_sync(ALL_LANES, goes) & token_lanes;
            /* in backend `hosts`, all lanes must reach the barrier in post_put_weights() */
            if (!HOSTS && !goes) continue;
            /* index of this rank among the peer's sources (see the top of this file) */
            const int source = self.num_ranks - 1 - distance;
            uint32_t *floats = floats_base(self, m.op, self.heap[rank], source) +
                               (int64_t)lane_token() * float_stride(top_k);
            if (goes)
                store_relaxed(floats + __popc(sent_choices & lanes_below()),
                              replace_poison(weight, F32::NAN_WORD));
            post_put_weights(rank, floats, __popc(sent_choices));
        }
    }
    /* Only in backend `hosts`: sends the weights of each token to `rank`, with one put (a copy
     * by the net) per token. `floats`: address of these weights in the outbox. `count`: number
     * of weights that go to `rank`. If `count` is odd, poison is appended, because a put copies
     * words of 8 bytes. Called by all lanes of the warp. The lane of a token's first choice
     * posts the put. */
    __device__ __forceinline__ void post_put_weights(int rank, uint32_t *floats,
                                                     int count) const
    {
        if (!HOSTS) return;
        const bool speaks = count && lane_choice() == 0;
        if (speaks && count % 2) store_relaxed(floats + count, POISON);
        __syncwarp();
        if (speaks) post_put(m.op, rank, floats, (uint32_t)(count + 1) / 2 * 8);
    }
    /* Sends the weights of all tokens that this warp handles. Requires a valid plan. */
    __device__ __forceinline__ void send_weights()
    {
        if (!m.job.weights || !m.receivers.contains_this_cta()) return;
        while (first_token < m.job.num_tokens) {
            send_current();
            first_token += m.receivers.ctas << (5 - choice_bits);
            if (has_choice()) word = read_choice(m, lane_token(), lane_choice());
            read_weight();
        }
    }
};

/* --------------------------------------------------------------------------- receiving ---- */

/* Sets p.rank, p.token and p.piece for received unit u. A received unit is one piece that this
 * rank receives. The units have this order: all pieces of this rank's tokens, then all pieces
 * of token 0 of each peer, then all pieces of token 1 of each peer, and so on. */
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

/* Returns the number of received units. There is a unit for each piece of all tokens of all
 * ranks, because it is not yet known which tokens have slots on this rank. */
template <class Rows> __device__ __forceinline__ int num_units(const LowlatMove &m)
{
    const int peers = m.job.plan.self.num_ranks - 1;
    return m.job.num_tokens * Rows::own_pieces(m) + m.most_tokens * peers * m.shape.pieces;
}

/* Returns the index of `rank` among this rank's sources (see the top of this file). */
__device__ __forceinline__ int source_number_of(const LowlatMove &m, int rank)
{
    const p2p_self &self = m.job.plan.self;
    return wrap_rank(rank + self.num_ranks - self.rank - 1, self.num_ranks);
}

/* Returns this lane's word of the record of `token`, a token of `rank`, from the plan in memory
 * (a record lists the slots that the token has on the calling rank). The function is called
 * before the plan's header has been checked. If the plan then turns out to be invalid, the
 * caller must not use the value. */
__device__ __forceinline__ uint64_t read_record_ahead(const LowlatMove &m, int rank,
                                                      int32_t token)
{
    const p2p_dispatch_job &job = m.job;
    if (lane_id() >= job.top_k || token >= job.plan.self.max_tokens) return ~0ull;
    const int32_t *records = (const int32_t *)(job.plan.plan + job.plan.at.records);
    return (uint32_t)__ldg(records + record_index(job.plan.self, rank, token, job.top_k) +
                           lane_id());
}

/* Loads a piece of a peer's token from staging; words that have not arrived are poison.
 * Exception: if this rank itself has no token with this index, all vectors become poison
 * without a load. Ranks usually have equally many tokens, so the peer probably has no such
 * token, and a load would only cost time. */
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

/* Sets p to received unit u, and loads its piece: from the caller's rows if the token is a
 * token of this rank, otherwise from staging. Does nothing if there is no unit u. */
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

/* Loads this lane's word of the record of the token of received unit u, which `p` describes.
 * Does nothing if there is no unit u or if has_new_plan is true. */
template <class Rows>
__device__ __forceinline__ void load_unit_record(const LowlatMove &m, int u, PendingPiece &p)
{
    if (!m.has_new_plan && u < num_units<Rows>(m))
        p.record_word = peek_record(m, p.rank, p.token, 0);
}

/* Loads this lane's words (weight and record word) of one token into `w`. u is the index of the
 * token in this order: all tokens of this rank, then token 0 of each peer, then token 1 of each
 * peer, and so on. */
__device__ __forceinline__ void load_words(const LowlatMove &m, int u, PendingWords &w)
{
    const p2p_self &self = m.job.plan.self;
    const int k = lane_id(), peers = self.num_ranks - 1, row = u - m.job.num_tokens;
    w.token = row < 0 ? u : row / peers;
    w.rank = row < 0 ? self.rank : wrap_rank(self.rank + 1 + row % peers, self.num_ranks);
    w.own_slot = -1;
    w.weight = POISON;
    if (!m.has_new_plan) w.record_word = peek_record(m, w.rank, w.token, 0);
    if (k >= m.top_k || !m.job.weights) return;
    if (row >= 0) {
        w.weight = load_relaxed(weight_address(m, source_number_of(m, w.rank), w.token, k));
        return;
    }
    const int64_t at = (int64_t)w.token * m.top_k + k;
    w.weight = __float_as_uint(__ldg(m.job.weights + at));
    if (!m.has_new_plan && __ldg(m.plan.rank_of + at) == w.rank)
        w.own_slot = __ldg(m.fates + at);
}

/* Stores `word`, a weight, to slot_weights[slot]. Does nothing if `slot` is negative or if
 * m.discards is true. */
__device__ __forceinline__ void store_weight(const LowlatMove &m, int32_t slot, uint32_t word)
{
    if (slot >= 0 && slot < m.job.recv_rows && !m.discards)
        m.job.slot_weights[slot] = __uint_as_float(word);
}

/* Waits for the weights of the token of `w`, and stores each weight to slot_weights at the
 * index of its slot. If the token is a peer's, then overwrites the received weights with
 * poison. `slot`: one of the token's slots on this rank, or -1 if this lane has no slot. `n`:
 * index of this lane's weight among the weights that the peer has sent for the token. Returns
 * false if the group has failed. */
__device__ __forceinline__ bool receive_weights(const LowlatMove &m, const PendingWords &w,
                                                int32_t slot, int n)
{
    if (w.rank == m.job.plan.self.rank) {
        store_weight(m, m.has_new_plan ? slot : w.own_slot, w.weight);
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

/* Returns the slot that this lane handles for `token`, a token of `rank`, or -1 if this lane
 * has no slot. With has_new_plan, lane k looks up choice k in the tables. Without has_new_plan,
 * the slot is `word`, which the caller has loaded from the token's record. */
__device__ __forceinline__ int32_t find_slot(const LowlatMove &m, int rank, int32_t token,
                                             uint64_t word)
{
    return m.has_new_plan ? m.tables->slot_here(m.job.plan, rank, token, lane_id())
                          : (int32_t)word;
}

/* If the token of `p` has a slot on this rank, waits for the piece and stores the piece to all
 * slots of the token on this rank. Returns false if the group has failed. */
template <class Rows>
__device__ __forceinline__ bool receive_pending(const LowlatMove &m, PendingPiece &p)
{
    const p2p_self &self = m.job.plan.self;
    if (p.token >= m.tokens_in(p.rank)) return true;
    const int32_t slot = find_slot(m, p.rank, p.token, p.record_word);
    if (!__any_sync(ALL_LANES, slot >= 0)) return true;
    if (p.rank != self.rank &&
        !Rows::receive_from_peer(m, p.rank, source_number_of(m, p.rank), p.token, p.piece, p.q))
        return false;
    if (!m.discards) Rows::fill_slots_of(m, p.rank == self.rank, p.token, p.piece, slot, p.q);
    return true;
}

/* Receives all pieces of this worker. The caller has loaded the first piece. While the worker
 * waits for one piece, it loads the next one. Returns false if the group has failed. */
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

/* Returns the index (in the order of load_words()) of the first token whose words (weights and
 * record) this worker receives. The last worker gets token 0 of this order, because the first
 * workers have more pieces to receive. */
__device__ __forceinline__ int first_words(const LowlatMove &m)
{
    return m.receivers.num_workers() - 1 - m.receivers.worker_index();
}

/* Returns an upper bound of the number of tokens of all ranks: this rank's tokens, and
 * most_tokens tokens of each peer. */
__device__ __forceinline__ int num_words(const LowlatMove &m)
{
    return m.job.num_tokens + m.most_tokens * (m.job.plan.self.num_ranks - 1);
}

/* Receives the words of the tokens that this worker handles: stores their weights and, with
 * has_new_plan, their records. The caller has loaded the words of the first token into `w`.
 * Returns false if the group has failed. */
__device__ __forceinline__ bool receive_words(const LowlatMove &m, PendingWords &w)
{
    for (int u = first_words(m); u < num_words(m); u += m.receivers.num_workers()) {
        if (u != first_words(m)) load_words(m, u, w);
        if (w.token >= m.tokens_in(w.rank)) continue;
        const int32_t slot = find_slot(m, w.rank, w.token, w.record_word);
        const uint32_t here = __ballot_sync(ALL_LANES, slot >= 0);
        const int n = m.has_new_plan ? __popc(here & lanes_below()) : lane_id();
        if (m.has_new_plan)
            m.tables->store_token(m.job.plan, w.rank, w.token, slot, here, m.result);
        if (here && m.job.weights && !receive_weights(m, w, slot, n)) return false;
    }
    return true;
}

#endif
