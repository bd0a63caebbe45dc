/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch of few tokens, and plan with dispatch of few tokens (lowlat/lowlat.cuh); one warp moves a piece.
 * What a piece is, and what is done with it, the Rows tell: PlainRows (lowlat/dispatch.cu) or
 * StringRows (lowlat/dispatch_packed.cu).
 *
 * Every warp sends its pieces of this rank's tokens to the peers that need them, then takes its
 * pieces of all tokens, this rank's own first, to their slots.  Weights, and what is written of each
 * token, are a warp's for itself, from the last one down; the speakers send weights.  With MADE the
 * plan is made too: lowlat/plan.cuh.
 *
 *     warp 0   send piece 0 | take piece 0 of own tokens | take piece 0 of peers' tokens
 *     warp 1   send piece 1 | take piece 1 of own tokens | take piece 1 of peers' tokens
 *     ...                   | (the plan is made in between, by every CTA for itself)
 *
 * Nothing that is sent waits for anything; one hop is all that a token takes.  Some CTAs, the last
 * ones, may only send; with MADE the last one, which announces, never takes if there is another. */
#ifndef EPIC_FEW_DISPATCH_CUH
#define EPIC_FEW_DISPATCH_CUH

#define EAGER 1 /* before the first header: common/wait.cuh */

#include "cuda/common/launch.cuh"
#include "cuda/dispatch/packed.cuh"
#include "cuda/lowlat/plan.cuh"

struct Few : Strings {
    const FewPlan *tables; /* of the plan that is made, */
    uint32_t result;       /* and whether it is good */
    const int32_t *fates;  /* of the plan that is read: slots of this rank's choices */
    bool discards;         /* rows are taken, and stored nowhere */
    bool with_many;        /* records tell slots of the plan that is made, not tables */
    Crew senders, takers;  /* the same CTAs, or some of them send and the others take */

    __device__ __forceinline__ int32_t tokens_in(int rank) const
    {
        return made ? tables->tokens[rank] : plan.header.tokens_of[rank];
    }
};

/* A piece on its way: what its unit needs first. */
struct Piece {
    int32_t token, piece;
    int rank;
    uint64_t word; /* this lane's slot, if the plan is read */
    uint4 q[V];
};

/* What goes beside the pieces of a token. */
struct Words {
    int32_t token;
    int rank;
    uint64_t word;   /* as a piece's */
    int32_t choice;  /* the slot of this lane's choice of an own token, or -1; */
    uint32_t weight; /* its weight, or that of the lane's slot, perhaps poison */
};

/* This lane's choice of a token, read before the plan's header has been checked: not to be used if the
 * plan turns out to be bad. */
__device__ __forceinline__ uint64_t read_choice_ahead(const Few &m, int32_t token, int k)
{
    const p2p_dispatch_job &job = m.job;
    if (m.made) return read_choice(m, token, k);
    if (k >= job.top_k) return ~0ull;
    const int32_t *rank_of = (const int32_t *)(job.plan.plan + job.plan.at.rank_of);
    return (uint32_t)__ldg(rank_of + (int64_t)token * job.top_k + k);
}

/* ------------------------------------------------------------------------------- sending ---- */

/* A warp's pieces of this rank's tokens.  What can be known of the first one before the CTA has met
 * is: each instruction behind that is 2 to 3 ns of a warp that is alone. */
template <class Rows> struct Sender {
    const Few &m;
    int unit, end;
    int32_t token, piece;
    uint64_t word;
    uint32_t peers;
    uint4 q[V];

    __device__ __forceinline__ explicit Sender(const Few &few)
        : m(few), unit(few.senders.worker()), end(m.job.num_tokens * Rows::own_pieces(few))
    {
        if (is_speaker() || !few.senders.has_me()) unit = end;
        if (unit >= end) return;
        load_row();
        word = read_choice_ahead(m, token, lane_id());
    }
    __device__ __forceinline__ void load_row()
    {
        token = unit / Rows::own_pieces(m);
        piece = unit - token * Rows::own_pieces(m);
        Rows::load(m, token, piece, q);
    }
    /* Before the CTA meets: finds the peers that need the first one. */
    __device__ __forceinline__ void decide()
    {
        if (unit >= end) return;
        const p2p_self &self = m.job.plan.self;
        peers = 0;
#pragma unroll 1
        for (int q = 0; q < self.num_ranks; q++)
            if (q != self.rank && __any_sync(ALL_LANES, goes_to(m, word, q))) peers |= 1u << q;
    }
    __device__ __forceinline__ void send_all()
    {
        if (unit >= end) return;
        for (;;) {
            const int32_t its_token = token, its_piece = piece;
            uint4 its[V];
#pragma unroll
            for (int v = 0; v < V; v++) its[v] = q[v];
            unit += m.senders.workers();
            if (unit < end) {
                load_row();
                word = read_choice(m, token, lane_id());
            }
            if (peers) Rows::send(m, its_token, its_piece, peers, its);
            if (unit >= end) return;
            peers = choose_peers(m, token, false, word);
        }
    }
};

/* A speaker sends the weights of some tokens, of several at a time: lanes are (token, choice).  The
 * first ones are read before anything else is known. */
struct WeightTeller {
    const Few &m;
    int32_t top_k, bits, first;
    uint64_t word;
    uint32_t weight;

    __device__ __forceinline__ explicit WeightTeller(const Few &few)
        : m(few), first(few.job.num_tokens)
    {
    }
    __device__ __forceinline__ void read_ahead()
    {
        if (is_speaker() && m.takers.has_me() && m.job.weights) begin(m.top_k);
        if (in()) word = read_choice_ahead(m, token(), choice());
        read_weight();
    }
    __device__ __forceinline__ void begin(int32_t choices)
    {
        top_k = choices;
        bits = bits_of(choices);
        first = (int32_t)((int)blockIdx.x - m.takers.first) << (5 - bits);
    }
    __device__ __forceinline__ int32_t token() const
    {
        return first + (lane_id() >> bits);
    }
    __device__ __forceinline__ int choice() const
    {
        return lane_id() & ((1 << bits) - 1);
    }
    __device__ __forceinline__ bool in() const
    {
        return first < m.job.num_tokens && token() < m.job.num_tokens && choice() < top_k;
    }
    __device__ __forceinline__ void read_weight()
    {
        if (!in()) return;
        const float *weights = m.job.weights + (int64_t)token() * top_k;
        weight = __float_as_uint(__ldg(weights + choice()));
    }
    __device__ __forceinline__ void tell_peers() const
    {
        const p2p_self &self = m.job.plan.self;
        const uint32_t mates = ALL_LANES >> (WARP - (1 << bits)) << (lane_id() >> bits << bits);
        for (int distance = 1; distance < self.num_ranks; distance++) {
            const int rank = wrap(self.rank + distance, self.num_ranks);
            const bool goes = in() && goes_to(m, word, rank);
            const uint32_t those = __ballot_sync(ALL_LANES, goes) & mates;
            if (!HOSTS && !goes) continue; /* who ships waits for all lanes */
            const int source =
                self.num_ranks - 1 - distance; /* this rank, as the peer counts */
            uint32_t *floats = floats_of(self, m.now, self.heap[rank], source) +
                               (int64_t)token() * float_stride(top_k);
            if (goes)
                store_relaxed(floats + __popc(those & lanes_below()),
                              other_nan(weight, F32::NAN_WORD));
            ship_weights(rank, floats, __popc(those));
        }
    }
    /* hosts: a token's weights go at once. */
    __device__ __forceinline__ void ship_weights(int rank, uint32_t *floats, int count) const
    {
        if (!HOSTS) return;
        const bool speaks = count && choice() == 0;
        if (speaks && count % 2) store_relaxed(floats + count, POISON);
        __syncwarp();
        if (speaks) ship(m.now, rank, floats, (uint32_t)(count + 1) / 2 * 8);
    }
    /* Once the plan is known to be good. */
    __device__ __forceinline__ void tell()
    {
        if (!m.job.weights || !m.takers.has_me()) return;
        while (first < m.job.num_tokens) {
            tell_peers();
            first += m.takers.ctas << (5 - bits);
            if (in()) word = read_choice(m, token(), choice());
            read_weight();
        }
    }
};

/* ----------------------------------------------------------------------------- receiving ---- */

/* Unit number u of those that receive: this rank's own tokens, then the peers' side by side. */
template <class Rows> __device__ __forceinline__ void place_unit(const Few &m, int u, Piece &p)
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
    p.rank = wrap(self.rank + 1 + row % peers, self.num_ranks);
}

template <class Rows> __device__ __forceinline__ int num_units(const Few &m)
{
    const int peers = m.job.plan.self.num_ranks - 1;
    return m.job.num_tokens * Rows::own_pieces(m) + m.most_tokens * peers * m.shape.pieces;
}

__device__ __forceinline__ int source_of(const Few &m, int rank)
{
    const p2p_self &self = m.job.plan.self;
    return wrap(rank + self.num_ranks - self.rank - 1, self.num_ranks);
}

/* The record's word of a piece, read as read_choice_ahead does. */
__device__ __forceinline__ uint64_t read_record_ahead(const Few &m, int rank, int32_t token)
{
    const p2p_dispatch_job &job = m.job;
    if (lane_id() >= job.top_k || token >= job.plan.self.max_tokens) return ~0ull;
    const int32_t *records = (const int32_t *)(job.plan.plan + job.plan.at.records);
    return (uint32_t)__ldg(records + record_at(job.plan.self, rank, token, job.top_k) +
                           lane_id());
}

/* Asks for the row of a peer's token, which may not have come yet; not past this rank's number of
 * tokens, as others mostly have as many. */
template <class Rows> __device__ __forceinline__ void ask_staged(const Few &m, Piece &p)
{
    const int32_t vector = p.piece * V * WARP, begin = vector + lane_id();
    const uint4 *staged = staged_in(m.now.inbox[p.rank], p.token, m.shape.vectors) + begin;
    if (is_slow(m.now, staged)) return;
#pragma unroll
    for (int v = 0; v < V; v++) {
        p.q[v] = make_uint4(0, 0, 0, 0);
        if (!Rows::EXACT && begin + v * WARP >= m.shape.vectors) continue;
        p.q[v] = p.token < m.job.num_tokens ? load_relaxed(staged + v * WARP) : poisoned();
    }
}

/* Asks for the row of a unit. */
template <class Rows> __device__ __forceinline__ void ask_row(const Few &m, int u, Piece &p)
{
    if (u >= num_units<Rows>(m)) return;
    place_unit<Rows>(m, u, p);
    if (u < m.job.num_tokens * Rows::own_pieces(m))
        Rows::load(m, p.token, p.piece, p.q);
    else
        ask_staged<Rows>(m, p);
}

/* And for what says where it goes. */
template <class Rows> __device__ __forceinline__ void ask_record(const Few &m, int u, Piece &p)
{
    if (!m.made && u < num_units<Rows>(m)) p.word = peek_record(m, p.rank, p.token, 0);
}

/* The words of token number u of all, this rank's first. */
__device__ __forceinline__ void ask_words(const Few &m, int u, Words &w)
{
    const p2p_self &self = m.job.plan.self;
    const int k = lane_id(), peers = self.num_ranks - 1, row = u - m.job.num_tokens;
    w.token = row < 0 ? u : row / peers;
    w.rank = row < 0 ? self.rank : wrap(self.rank + 1 + row % peers, self.num_ranks);
    w.choice = -1;
    w.weight = POISON;
    if (!m.made) w.word = peek_record(m, w.rank, w.token, 0);
    if (k >= m.top_k || !m.job.weights) return;
    if (row >= 0) {
        w.weight = load_relaxed(weight_from(m, source_of(m, w.rank), w.token, k));
        return;
    }
    const int64_t at = (int64_t)w.token * m.top_k + k;
    w.weight = __float_as_uint(__ldg(m.job.weights + at));
    if (!m.made && __ldg(m.plan.rank_of + at) == w.rank) w.choice = __ldg(m.fates + at);
}

__device__ __forceinline__ void store_weight(const Few &m, int32_t slot, uint32_t word)
{
    if (slot >= 0 && slot < m.job.recv_rows && !m.discards)
        m.job.slot_weights[slot] = __uint_as_float(word);
}

/* The weights of a token's slots here; this lane's is the n-th of them. */
__device__ __forceinline__ bool take_weights(const Few &m, const Words &w, int32_t slot, int n)
{
    if (w.rank == m.job.plan.self.rank) {
        store_weight(m, m.made ? slot : w.choice, w.weight);
        return true;
    }
    uint32_t *from = weight_from(m, source_of(m, w.rank), w.token, n);
    uint32_t word = __shfl_sync(ALL_LANES, w.weight, n);
    bool again = false;
    const bool ok = wait_until(m.now, w.rank, P2P_PHASE_FLOAT, [&] {
        if (again && slot >= 0) word = load_relaxed(from);
        again = true;
        return __any_sync(ALL_LANES, slot >= 0 && word == POISON) == 0;
    });
    if (!ok) return false;
    if (slot >= 0) *from = POISON;
    store_weight(m, slot, word);
    return true;
}

/* This lane's slot of the token, or -1. */
__device__ __forceinline__ int32_t find_slot(const Few &m, int rank, int32_t token,
                                             uint64_t word)
{
    return m.made ? m.tables->slot_here(m.job.plan, rank, token, lane_id()) : (int32_t)word;
}

template <class Rows> __device__ __forceinline__ bool receive(const Few &m, Piece &p)
{
    const p2p_self &self = m.job.plan.self;
    if (p.token >= m.tokens_in(p.rank)) return true;
    const int32_t slot = find_slot(m, p.rank, p.token, p.word);
    if (!__any_sync(ALL_LANES, slot >= 0)) return true;
    if (p.rank != self.rank &&
        !Rows::take(m, p.rank, source_of(m, p.rank), p.token, p.piece, p.q))
        return false;
    if (!m.discards) Rows::fill(m, p.rank == self.rank, p.token, p.piece, slot, p.q);
    return true;
}

template <class Rows> __device__ __forceinline__ bool receive_all(const Few &m, Piece &first)
{
    Piece now = first, next;
    for (int u = m.takers.worker(); u < num_units<Rows>(m); u += m.takers.workers()) {
        ask_row<Rows>(m, u + m.takers.workers(), next);
        ask_record<Rows>(m, u + m.takers.workers(), next);
        if (!receive<Rows>(m, now)) return false;
        now = next;
    }
    return true;
}

/* Number of the first token whose words are this warp's. */
__device__ __forceinline__ int first_words(const Few &m)
{
    return m.takers.workers() - 1 - m.takers.worker();
}

__device__ __forceinline__ int num_words(const Few &m)
{
    return m.job.num_tokens + m.most_tokens * (m.job.plan.self.num_ranks - 1);
}

__device__ __forceinline__ bool receive_words(const Few &m, Words &w)
{
    for (int u = first_words(m); u < num_words(m); u += m.takers.workers()) {
        if (u != first_words(m)) ask_words(m, u, w);
        if (w.token >= m.tokens_in(w.rank)) continue;
        const int32_t slot = find_slot(m, w.rank, w.token, w.word);
        const uint32_t here = __ballot_sync(ALL_LANES, slot >= 0);
        const int n = m.made ? __popc(here & lanes_below()) : lane_id();
        if (m.made) m.tables->keep_token(m.job.plan, w.rank, w.token, slot, here, m.result);
        if (here && m.job.weights && !take_weights(m, w, slot, n)) return false;
    }
    return true;
}

/* ------------------------------------------------------------------------------- the rest ---- */

/* The workers: zeros in the padding, as the plan or its tables say. */
template <class Rows> __device__ __forceinline__ void pad_few(const Few &m)
{
    const p2p_plan_job &plan = m.job.plan;
    if (m.job.leave_padding) return;
    const auto write = [&](int32_t slot, int piece) { Rows::pad(m, slot, piece); };
    if (!m.made) {
        each_pad_piece(m.plan, m.plan.header.owned, m.shape.pieces, m.takers.worker(),
                       m.takers.workers(), write);
    } else if (plan.layer.alignment > 1) {
        const auto padding_in = [&](int slab) {
            const int e = plan.self.rank * plan.block + slab;
            const int32_t count = m.tables->p.load[e], *start = m.tables->p.start;
            const int32_t rows = (int32_t)aligned_rows(count, plan.layer.alignment);
            return device_padding{start[e] - start[plan.self.rank * plan.block] + count,
                                  rows - count};
        };
        each_pad_of(padding_in, plan.block, m.shape.pieces, m.takers.worker(),
                    m.takers.workers(), write);
    }
}

__device__ __forceinline__ const int32_t *fates_of(const Plan &plan, const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.rank_of + (at.fate - at.rank_of) / 4;
}

/* ------------------------------------------------------------- with ranks that have more ---- */

/* This lane's slot, from the record that comes; `keep`: it becomes the plan's. */
__device__ __forceinline__ bool slot_with_many(const Few &m, int rank, int32_t token, bool keep,
                                               int32_t &slot)
{
    bool more;
    const uint64_t word = peek_record(m, rank, token, 0);
    return read_record(m, rank, token, 0, keep, word, slot, more);
}

__device__ __forceinline__ bool words_with_many(const Few &m)
{
    for (int u = first_words(m); u < num_words(m); u += m.takers.workers()) {
        Words w;
        int32_t slot;
        ask_words(m, u, w);
        if (w.token >= m.tokens_in(w.rank)) continue;
        if (!slot_with_many(m, w.rank, w.token, true, slot)) return false;
        if (!m.job.weights || !__any_sync(ALL_LANES, slot >= 0)) continue;
        const int source = source_of(m, w.rank);
        const uint32_t weight = peek_weight(m, w.rank, source, w.token, 0, slot);
        if (!receive_weight(m, w.rank, source, w.token, 0, slot, weight)) return false;
    }
    return true;
}

template <class Rows> __device__ __forceinline__ bool rows_with_many(const Few &m)
{
    for (int u = m.takers.worker(); u < num_units<Rows>(m); u += m.takers.workers()) {
        Piece p;
        int32_t slot;
        place_unit<Rows>(m, u, p);
        const bool own = p.rank == m.job.plan.self.rank;
        if (p.token >= m.tokens_in(p.rank)) continue;
        if (!slot_with_many(m, p.rank, p.token, false, slot)) return false;
        if (!__any_sync(ALL_LANES, slot >= 0)) continue;
        ask_row<Rows>(m, u, p);
        if (!own && !Rows::take(m, p.rank, source_of(m, p.rank), p.token, p.piece, p.q))
            return false;
        Rows::fill(m, own, p.token, p.piece, slot, p.q);
    }
    return true;
}

/* Every thread of the takers: the plan, rows, and in the end what the plan's tables say, which one CTA has
 * written.  noinline, and by value: an address would keep what others have in registers in memory. */
template <class Rows>
static __device__ __noinline__ void take_with_many(const Few m, Now &now, FewPlan &tables,
                                                   uint8_t *memory)
{
    const p2p_plan_job &plan = m.job.plan;
    const volatile device_plan_header *h = header_of(m);
    if (!make_with_many(tables, plan, now, memory)) return;
    bool ok = is_speaker() || (words_with_many(m) && rows_with_many<Rows>(m));
    ok = ok && wait_for_plan(m);
    if (!__syncthreads_and(ok)) return;
    const bool good = h->result == EPIC_OK;
    if (!is_speaker() && good && !m.job.leave_padding)
        each_pad_piece(m.plan, h->owned, m.shape.pieces, m.takers.worker(), m.takers.workers(),
                       [&](int32_t slot, int piece) { Rows::pad(m, slot, piece); });
    if (good && m.job.zero_tail)
        Rows::clear(m, h->slots_of[plan.self.rank], m.takers.thread(), m.takers.threads());
    __syncthreads();
    if (!is_last_to_end(now, m.takers.ctas)) return;
    if (!good || !rows_suffice(plan.self, now, h, threadIdx.x == 0))
        Rows::clear(m, 0, threadIdx.x, FEW_BLOCK);
}

/* Every thread: the plan is made, and with it what there is to do. */
static __device__ bool make_plan_of(Few &m, FewPlan &tables)
{
    const p2p_plan_job &job = m.job.plan;
    const bool heads = is_speaker() && (int)blockIdx.x == m.takers.first;
    if (heads) begin_header(tables, job, m.now);
    const FewPlanning made = make_few(tables, job, m.now);
    if (made == FEW_BROKEN) return false;
    m.most_tokens = __reduce_max_sync(ALL_LANES, tables.tokens[lane_id()]);
    m.with_many = made == FEW_MANY;
    if (m.with_many) return true;
    const Verdict verdict = judge(tables, job, true);
    m.result = verdict.result;
    m.discards = verdict.result != EPIC_OK || verdict.short_of_rows;
    if (is_speaker()) write_few(tables, job, m.now, m.takers, m.result);
    if (heads && verdict.short_of_rows)
        (void)rows_suffice(job.self, m.now, &tables.p.header, lane_id() == 0);
    return true;
}

template <class Rows, bool MADE>
__global__ void __launch_bounds__(FEW_BLOCK, 1)
    few_dispatch_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    __shared__ Now now;
    __shared__ Plan plan;
    __shared__ FewPlan tables;
    __shared__ Stride unused;
    __shared__ bool enough; /* rows everywhere, as far as is known */
    const p2p_self &self = job.plan.self;
    const device_plan_header &h = MADE ? tables.p.header : plan.header;
    touch(job);
    if (self.operation == EPIC_OP_NONE) return;
    if (!HOSTS && is_announcer(MADE)) fence_system();
    const Opening opening = read_opening(self);
    if (HOSTS && is_announcer(MADE)) fence_system();
    const bool reads = !MADE && threadIdx.x / WARP == FEW_WORKERS - 1;
    uint32_t header[HEADER_LANE_WORDS];
    if (reads) load_header(header, job.plan.plan, job.plan_bytes);
    const RowShape shape = Rows::shape_of(job);
    Few m = {{{{job, now, plan, unused, shape, policy_once(), 0, (int)job.plan.layer.top_k}}}};
    Rows::describe(m);
    m.made = MADE;
    m.result = EPIC_OK;
    m.discards = m.with_many = false;
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    m.tables = &tables;
    const int ctas = (int)gridDim.x;
    m.senders = {job.apart ? ctas - job.apart : 0,
                 job.apart ? job.apart : ctas - (HOSTS && MADE && ctas > 1)};
    m.takers = {0, ctas - (job.apart ? job.apart : MADE && ctas > 1)};
    const bool takes = m.takers.has_me(), works = takes && !is_speaker();
    IdTeller ids(job.plan, m.takers, MADE);
    WeightTeller weights(m);
    bool may = true;
    if (is_speaker()) {
        if (!MADE) weights.read_ahead();
        ids.make();
        open_few(now, self, opening, job.num_tokens, job.plan.capacity, job.recv_rows);
        may = may_ship(now, opening);
        if (MADE && opening.broken == 0 && may) {
            ids.tell(now);
            announce_sizes(self, now, job.num_tokens, job.plan.capacity, job.recv_rows);
        }
        find_few_boxes(now, self);
    }
    Sender<Rows> sender(m);
    Piece first;
    Words words;
    const bool begins_own = works && m.takers.worker() < job.num_tokens * Rows::own_pieces(m);
    if (works) place_unit<Rows>(m, m.takers.worker(), first);
    if (begins_own) Rows::load(m, first.token, first.piece, first.q);
    if (begins_own && !MADE) first.word = read_record_ahead(m, self.rank, first.token);
    if (threadIdx.x == 0) enough = true;
    if (MADE) open_tables(tables, job.plan, memory);
    if (reads) {
        view_plan(plan, header, job.plan.plan, job.plan_bytes, self, job.num_tokens);
        if (lane_id() == 0)
            now.signature = self.signature ^ ((uint32_t)plan.header.id & 0x0fffffffu);
    }
    if (MADE && threadIdx.x == 0) {
        now.signature = self.signature;
        plan.records = (const int32_t *)(job.plan.plan + job.plan.at.records);
        plan.padding = (const device_padding *)(job.plan.plan + job.plan.at.padding);
        plan.header.alignment = job.plan.layer.alignment;
    }
    sender.decide();
    if (!__syncthreads_and(opening.broken == 0 && may)) {
        if (threadIdx.x == 0) tell_end(now);
        return;
    }
    if (!MADE) announce_sizes(self, now, job.num_tokens, job.plan.capacity, job.recv_rows);
    count_begun(self, now);
    if (is_announcer(MADE)) announce_begun(self, now);

    const bool moves = MADE || (plan.good && plan.header.result == EPIC_OK);
    m.most_tokens = MADE ? job.plan.most_few : plan.most_tokens;
    if (is_speaker()) {
        if (MADE) weights.read_ahead();
        if (moves) weights.tell();
    } else if (moves) {
        sender.send_all();
    }
    const bool tells_more = MADE && takes && is_speaker(); /* of wrong data */
    if (!tells_more) count_shipped(self);
    if (!MADE) m.fates = fates_of(plan, self);
    bool ok = true;
    if (moves && works) {
        if (!begins_own && m.takers.worker() < num_units<Rows>(m)) ask_staged<Rows>(m, first);
        if (!begins_own) ask_record<Rows>(m, m.takers.worker(), first);
        if (first_words(m) < num_words(m)) ask_words(m, first_words(m), words);
    }
    if (MADE && takes) ok = make_plan_of(m, tables);
    if (HOSTS && MADE && is_last_cta() && !takes) ok = port(job.plan, now);
    if (ok && tells_more) count_shipped(self);
    if (MADE && m.with_many) {
        if (is_speaker() && is_last_cta()) finish_few(self, now, opening, MADE);
        take_with_many<Rows>(m, now, tables, memory);
        return end_few(now);
    }
    if (ok && moves && works) {
        ok = receive_words(m, words) && receive_all<Rows>(m, first);
        if (ok && !m.discards) pad_few<Rows>(m);
    }
    if (is_speaker() && !MADE && moves) {
        const bool good = hear_rows(self, now, h);
        if (lane_id() == 0) enough = good;
    }
    if (is_speaker() && is_last_cta()) finish_few(self, now, opening, MADE);
    if (ok && takes && (m.discards || !moves))
        Rows::clear(m, 0, m.takers.thread(), m.takers.threads());
    else if (ok && takes && job.zero_tail)
        Rows::clear(m, MADE ? needed_here(tables, job.plan) : h.slots_of[self.rank],
                    m.takers.thread(), m.takers.threads());
    end_few(now);
    if (MADE || enough || !is_last_of_short(now, h)) return;
    Rows::clear(m, 0, threadIdx.x, FEW_BLOCK);
}

/* CTAs that only send: with more tokens, stores to peers hold up what else an SM does, first of all
 * the ids behind them; measured, docs/lab/cuda.md. */
static int32_t apart_of(const p2p_dispatch_job *job, int num_sms)
{
    const int many = job->plan.few ? num_sms * 10 / 64 : num_sms * 15 / 64;
    if (job->num_tokens > 96) return many < 16 ? many : 16;
    return job->plan.few && job->num_tokens >= 32 ? num_sms / 8 : 0;
}

/* Of these kernels, the second ones with the plan. */
template <class Kernel>
static cudaError_t launch_few(const Kernel (&kernels)[2], p2p_dispatch_job job, int num_sms,
                              cudaStream_t stream)
{
    const bool made = job.plan.few;
    const int bytes = made ? few_plan_bytes(job.plan) : 0;
    job.apart = apart_of(&job, num_sms);
    return enqueue(kernels[made], num_sms, FEW_BLOCK, bytes, stream, job);
}

template <class Kernel> static cudaError_t load_few(const Kernel (&kernels)[2])
{
    for (const Kernel &kernel : kernels) {
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_PLAN_MOST_BYTES);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

#endif
