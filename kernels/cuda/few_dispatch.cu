/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch of few tokens, and plan with dispatch of few tokens (few.cuh).
 *   tokens  [num_tokens, row_bytes]   aligned vectors; one warp moves a piece, V * 16 bytes a lane
 *   recv    [recv_rows, row_bytes]    every slot of the plan, padding as zeros
 *
 * Every warp sends its pieces of this rank's tokens to the peers that need them, then takes its
 * pieces of all tokens, this rank's own first, to their slots.  With MADE the plan is made too:
 * few_plan.cuh.
 *
 *     warp 0   send piece 0 | take piece 0 of own tokens | take piece 0 of peers' tokens
 *     warp 1   send piece 1 | take piece 1 of own tokens | take piece 1 of peers' tokens
 *     ...                   | (the plan is made in between, by every CTA for itself)
 *
 * Nothing that is sent waits for anything; one hop is all that a token takes. */
#include "cuda/few_plan.cuh"
#include "cuda/launch.cuh"

struct Few : Move {
    const FewPlan *tables; /* of the plan that is made */
    const int32_t *fates;  /* of the plan that is read: slots of this rank's choices */
    bool discards;         /* rows are taken, and stored nowhere */
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
    uint64_t word;   /* this lane's slot, if the plan is read */
    int32_t choice;  /* the slot of this lane's choice of an own token, or -1; */
    uint32_t weight; /* its weight, or that of the lane's slot, perhaps poison; piece 0 */
    uint4 q[V];
};

/* ------------------------------------------------------------------------------- sending ---- */

template <bool EXACT> struct Sender {
    const Few &m;
    int unit, end;
    uint64_t word;
    uint4 q[V];

    __device__ __forceinline__ explicit Sender(const Few &few)
        : m(few), unit(few.senders.worker()), end(m.job.num_tokens * m.shape.pieces)
    {
        if (is_speaker() || !few.senders.has_me()) unit = end;
        load_row();
        guess_choice();
    }
    __device__ __forceinline__ int32_t token() const
    {
        return unit / m.shape.pieces;
    }
    __device__ __forceinline__ void load_row()
    {
        if (unit < end)
            load_piece_again<V, EXACT>(m.job.tokens + row_offset(token(), m.shape),
                                       unit % m.shape.pieces * V * WARP, m.shape, q);
    }
    /* The choices of the first token, before the plan is known to have that layout; of no use
     * if it has not. */
    __device__ __forceinline__ void guess_choice()
    {
        const p2p_dispatch_job &job = m.job;
        word = ~0ull;
        if (unit >= end) return;
        if (m.made)
            word = read_choice(m, token(), lane_id());
        else if (lane_id() < job.top_k)
            word = (uint32_t)__ldg((const int32_t *)(job.plan.plan + job.likely_rank_of) +
                                   (int64_t)token() * job.top_k + lane_id());
    }
    __device__ __forceinline__ void send_all(bool guessed)
    {
        if (!guessed && unit < end) word = read_choice(m, token(), lane_id());
        while (unit < end) {
            const int32_t now = token(), piece = unit % m.shape.pieces;
            const uint64_t its_word = word;
            uint4 its[V];
#pragma unroll
            for (int v = 0; v < V; v++) its[v] = q[v];
            unit += m.senders.workers();
            load_row();
            if (unit < end) word = read_choice(m, token(), lane_id());
            const uint32_t peers = choose_peers(m, now, piece == 0 && m.job.weights, its_word);
            if (peers) send<EXACT>(m, now, piece, peers, its);
        }
    }
};

/* ----------------------------------------------------------------------------- receiving ---- */

/* Unit number u of those that receive: this rank's own tokens, then the peers' side by side. */
__device__ __forceinline__ void place_unit(const Few &m, int u, Piece &p)
{
    const p2p_self &self = m.job.plan.self;
    const int own = m.job.num_tokens * m.shape.pieces, peers = self.num_ranks - 1;
    p.rank = self.rank;
    p.piece = u % m.shape.pieces;
    p.token = u / m.shape.pieces;
    if (u < own) return;
    const int row = (u - own) / m.shape.pieces;
    p.token = row / peers;
    p.rank = wrap(self.rank + 1 + row % peers, self.num_ranks);
}

__device__ __forceinline__ int num_units(const Few &m)
{
    return (m.job.num_tokens + m.most_tokens * (m.job.plan.self.num_ranks - 1)) *
           m.shape.pieces;
}

__device__ __forceinline__ int source_of(const Few &m, int rank)
{
    const p2p_self &self = m.job.plan.self;
    return wrap(rank + self.num_ranks - self.rank - 1, self.num_ranks);
}

/* What goes with the first piece of a token. */
__device__ __forceinline__ void ask_weights(const Few &m, Piece &p)
{
    const int k = lane_id();
    p.choice = -1;
    p.weight = POISON;
    if (k >= m.top_k || !m.job.weights) return;
    if (p.rank != m.job.plan.self.rank) {
        p.weight = load_relaxed(weight_from(m, source_of(m, p.rank), p.token, k));
        return;
    }
    const int64_t at = (int64_t)p.token * m.top_k + k;
    p.weight = __float_as_uint(__ldg(m.job.weights + at));
    if (!m.made && __ldg(m.plan.rank_of + at) == p.rank) p.choice = __ldg(m.fates + at);
}

/* Asks for the row of a unit of `own` tokens, or else of a peer's, which may not have come yet. */
template <bool EXACT>
__device__ __forceinline__ void ask_row(const Few &m, int u, Piece &p, bool own)
{
    const bool is_own = u < m.job.num_tokens * m.shape.pieces;
    if (own != is_own || (!own && u >= num_units(m))) return;
    place_unit(m, u, p);
    const int32_t vector = p.piece * V * WARP, begin = vector + lane_id();
    if (own) {
        load_piece_again<V, EXACT>(m.job.tokens + row_offset(p.token, m.shape), vector, m.shape,
                                   p.q);
        return;
    }
    const uint4 *staged = staged_in(m.now.inbox[p.rank], p.token, m.shape.vectors) + begin;
#pragma unroll
    for (int v = 0; v < V; v++)
        p.q[v] = EXACT || begin + v * WARP < m.shape.vectors ? load_relaxed(staged + v * WARP)
                                                             : make_uint4(0, 0, 0, 0);
}

/* And for what says where it goes. */
__device__ __forceinline__ void ask_words(const Few &m, int u, Piece &p)
{
    if (u >= num_units(m)) return;
    if (!m.made) p.word = peek_record(m, p.rank, p.token, 0);
    if (p.piece == 0) ask_weights(m, p);
}

__device__ __forceinline__ void store_weight(const Few &m, int32_t slot, uint32_t word)
{
    if (slot >= 0 && slot < m.job.recv_rows && !m.discards)
        m.job.slot_weights[slot] = __uint_as_float(word);
}

/* The weights of a token's slots here; this lane's is the n-th of them. */
__device__ __forceinline__ bool take_weights(const Few &m, const Piece &p, int32_t slot, int n)
{
    if (p.rank == m.job.plan.self.rank) {
        store_weight(m, m.made ? slot : p.choice, p.weight);
        return true;
    }
    uint32_t *from = weight_from(m, source_of(m, p.rank), p.token, n);
    uint32_t word = __shfl_sync(ALL_LANES, p.weight, n);
    bool again = false;
    const bool ok = wait_until(m.now, p.rank, P2P_PHASE_FLOAT, [&] {
        if (again && slot >= 0) word = load_relaxed(from);
        again = true;
        return __any_sync(ALL_LANES, slot >= 0 && word == POISON) == 0;
    });
    if (!ok) return false;
    if (slot >= 0) *from = POISON;
    store_weight(m, slot, word);
    return true;
}

/* This lane's slot of the token, or -1; n: which one of the token's it is here. */
__device__ __forceinline__ int32_t find_slot(const Few &m, const Piece &p, int &n)
{
    n = lane_id();
    if (!m.made) return (int32_t)p.word;
    const int32_t slot = m.tables->slot_here(m.job.plan, p.rank, p.token, lane_id());
    const uint32_t here = __ballot_sync(ALL_LANES, slot >= 0);
    n = __popc(here & lanes_below());
    if (p.piece == 0) m.tables->keep_token(m.job.plan, p.rank, p.token, slot, here);
    return slot;
}

template <bool EXACT> __device__ __forceinline__ bool receive(const Few &m, Piece &p)
{
    const p2p_self &self = m.job.plan.self;
    int n;
    if (p.token >= m.tokens_in(p.rank)) return true;
    const int32_t slot = find_slot(m, p, n);
    if (!__any_sync(ALL_LANES, slot >= 0)) return true;
    if (p.rank != self.rank &&
        !take<EXACT>(m, p.rank, source_of(m, p.rank), p.token, p.piece, true, p.q))
        return false;
    if (!m.discards) fill_slots<EXACT>(m, p.piece * V * WARP, slot, p.q);
    return p.piece || !m.job.weights || take_weights(m, p, slot, n);
}

template <bool EXACT> __device__ __forceinline__ bool receive_all(const Few &m, Piece &first)
{
    Piece now = first, next;
    for (int u = m.takers.worker(); u < num_units(m); u += m.takers.workers()) {
        ask_row<EXACT>(m, u + m.takers.workers(), next, true);
        ask_row<EXACT>(m, u + m.takers.workers(), next, false);
        ask_words(m, u + m.takers.workers(), next);
        if (!receive<EXACT>(m, now)) return false;
        now = next;
    }
    return true;
}

/* ------------------------------------------------------------------------------- the rest ---- */

/* The workers: zeros in the padding, as the plan or its tables say. */
template <bool EXACT> __device__ __forceinline__ void pad_few(const Few &m)
{
    const p2p_plan_job &plan = m.job.plan;
    const auto write = [&](int32_t slot, int piece) { pad_piece<EXACT>(m, slot, piece); };
    if (!m.made) {
        each_pad_piece(m.plan, m.plan.header.owned, m.shape.pieces, m.takers.worker(),
                       m.takers.workers(), write);
    } else if (plan.layer.alignment > 1) {
        const auto padding_in = [&](int slab) {
            const int e = plan.self.rank * plan.block + slab;
            const int32_t count = m.tables->p.load[e];
            const int32_t rows = (int32_t)aligned_rows(count, plan.layer.alignment);
            return device_padding{m.tables->p.start[e] + count, rows - count};
        };
        each_pad_of(padding_in, plan.block, m.shape.pieces, m.takers.worker(),
                    m.takers.workers(), write);
    }
}

/* Zeros in rows [first, ...) by all who take. */
__device__ __forceinline__ void clear_from(const Few &m, int64_t first)
{
    const int64_t end = m.job.recv_rows;
    if (first >= end) return;
    zero_rows(m.job.recv, m.shape.row_bytes, first, end, m.takers.thread(), m.takers.threads());
    zero_floats(m.job.slot_weights, first, end, m.takers.thread(), m.takers.threads());
}

__device__ __forceinline__ const int32_t *fates_of(const Plan &plan, const p2p_self &self)
{
    const device_plan_header &h = plan.header;
    const device_plan_layout at =
        device_plan_layout_of(self.num_ranks, self.max_tokens, h.num_experts, h.top_k);
    return plan.rank_of + (at.fate - at.rank_of) / 4;
}

/* One warp: has every rank rows for its slots? */
__device__ __forceinline__ bool rows_enough(const device_plan_header &h, int32_t rows,
                                            int num_ranks)
{
    return __all_sync(ALL_LANES, lane_id() >= num_ranks || h.slots_of[lane_id()] <= rows) != 0;
}

template <bool EXACT, bool MADE>
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
    if (self.operation == EPIC_OP_NONE) return;
    const bool whole = is_whole(self), last = blockIdx.x == gridDim.x - 1;
    const RowShape shape = row_shape<V>(job.row_bytes, EXACT || job.aligned);
    Few m = {{{job, now, plan, unused, shape, policy_once(), 0, (int)job.plan.layer.top_k}}};
    m.made = MADE;
    m.tables = &tables;
    const int ctas = (int)gridDim.x;
    const int apart = job.apart;
    m.senders = {0, apart ? apart : ctas};
    m.takers = {apart, ctas - apart};
    const bool takes = m.takers.has_me();
    Sender<EXACT> sender(m);
    Piece first;
    if (takes && !is_speaker()) ask_row<EXACT>(m, m.takers.worker(), first, true);
    if (threadIdx.x == 0) enough = true;
    if (is_speaker()) open_few(now, self, job.num_tokens, job.plan.capacity, job.recv_rows);
    if (MADE)
        open_tables(tables, job.plan, (uint8_t *)dynamic_shared());
    else
        read_plan(plan, job.plan.plan, job.plan_bytes, self, job.num_tokens);
    if (!MADE && is_speaker() && lane_id() == 0)
        now.signature ^= (uint32_t)plan.header.id & 0x0fffffffu;
    if (!__syncthreads_and(whole)) {
        if (threadIdx.x == 0) tell_end(now);
        return;
    }
    count_begun(now);

    const bool moves = MADE || (plan.good && plan.header.result == EPIC_OK);
    if (!MADE) m.top_k = (int)plan.header.top_k;
    m.most_tokens = MADE ? (int32_t)self.max_tokens : plan.most_tokens;
    if (is_speaker()) {
        if (MADE) tell_ids(job.plan, now);
        if (last) announce(now);
    } else if (moves) {
        sender.send_all(MADE || (job.likely_experts == (int32_t)plan.header.num_experts &&
                                 job.top_k == m.top_k));
    }
    bool ok = true;
    if (!MADE) m.fates = fates_of(plan, self);
    if (moves && takes && !is_speaker()) {
        ask_row<EXACT>(m, m.takers.worker(), first, false);
        ask_words(m, m.takers.worker(), first);
    }
    if (MADE && takes) ok = make_few(tables, job.plan, now);
    if (MADE && takes && ok) {
        const int32_t rows = lane_id() < self.num_ranks ? tables.rows[lane_id()] : 0;
        const bool short_of_rows =
            tables.result == EPIC_OK && !rows_enough(h, rows, self.num_ranks);
        m.discards = tables.result != EPIC_OK || short_of_rows;
        if (is_speaker() && (int)blockIdx.x == apart) write_few(tables, job.plan, now);
        if ((int)blockIdx.x == apart && short_of_rows) (void)rows_suffice(self, now, &h);
    }
    if (ok && moves && takes && !is_speaker()) {
        ok = receive_all<EXACT>(m, first);
        if (ok && !m.discards) pad_few<EXACT>(m);
    }
    if (is_speaker() && !MADE && moves) {
        const bool good = hear_rows(now, h);
        if (lane_id() == 0) enough = good;
    }
    if (is_speaker() && last) finish_few(now);
    if (ok && takes && (m.discards || !moves))
        clear_from(m, 0);
    else if (ok && takes && job.zero_tail)
        clear_from(m, h.slots_of[self.rank]);
    end_few(now);
    if (MADE || enough || !is_last_of_short(now, h)) return;
    zero_rows(job.recv, job.row_bytes, 0, job.recv_rows, threadIdx.x, FEW_BLOCK);
    zero_floats(job.slot_weights, 0, job.recv_rows, threadIdx.x, FEW_BLOCK);
}

/* CTAs that only send: with more tokens, stores to peers hold up what else an SM does, first of all
 * the ids behind them; measured, docs/cuda.md. */
static int32_t apart_of(const p2p_dispatch_job *job, int num_sms)
{
    const int many = num_sms * 3 / 16 < 16 ? num_sms * 3 / 16 : 16;
    if (job->num_tokens > 96) return many;
    return job->plan.few && job->num_tokens >= 32 ? num_sms / 8 : 0;
}

typedef void (*Kernel)(p2p_dispatch_job);

static const Kernel kernels[] = {
    few_dispatch_kernel<false, false>, few_dispatch_kernel<false, true>,
    few_dispatch_kernel<true, false>, few_dispatch_kernel<true, true>};

extern "C" cudaError_t p2p_load_few_dispatch(void)
{
    for (Kernel kernel : kernels) {
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_PLAN_MOST_BYTES);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

extern "C" cudaError_t p2p_launch_few_dispatch(const p2p_dispatch_job *job, int num_sms,
                                               cudaStream_t stream)
{
    const bool exact = job->aligned && job->row_bytes % (V * 512) == 0, made = job->plan.few;
    const int bytes = made ? few_plan_bytes(job->plan.self.num_ranks, job->plan.self.max_tokens,
                                            &job->plan.layer)
                           : 0;
    p2p_dispatch_job copy = *job;
    copy.apart = apart_of(job, num_sms);
    return enqueue(kernels[exact * 2 + made], num_sms, FEW_BLOCK, bytes, stream, copy);
}

/* plan alone: as above, and nothing moves. */
__global__ void __launch_bounds__(FEW_BLOCK, 1)
    few_plan_kernel(const __grid_constant__ p2p_plan_job job)
{
    __shared__ Now now;
    __shared__ FewPlan tables;
    const p2p_self &self = job.self;
    if (self.operation == EPIC_OP_NONE) return;
    const bool whole = is_whole(self), last = blockIdx.x == gridDim.x - 1;
    if (is_speaker()) open_few(now, self, job.num_tokens, job.capacity, 0);
    open_tables(tables, job, (uint8_t *)dynamic_shared());
    if (!__syncthreads_and(whole)) {
        if (threadIdx.x == 0) tell_end(now);
        return;
    }
    count_begun(now);
    if (is_speaker()) tell_ids(job, now);
    if (is_speaker() && last) announce(now);
    if (make_few(tables, job, now)) {
        if (is_speaker() && blockIdx.x == 0) write_few(tables, job, now);
        const int ranks = self.num_ranks;
        const Crew all = {0, (int)gridDim.x};
        for (int u = all.worker(); u < ranks * tables.max_tokens && !is_speaker();
             u += all.workers()) {
            const int rank = u % ranks, token = u / ranks;
            if (token >= tables.p.header.tokens_of[rank]) continue;
            const int32_t slot = tables.slot_here(job, rank, token, lane_id());
            tables.keep_token(job, rank, token, slot, __ballot_sync(ALL_LANES, slot >= 0));
        }
    }
    if (is_speaker() && last) finish_few(now);
    end_few(now);
}

extern "C" cudaError_t p2p_load_few_plan(void)
{
    return cudaFuncSetAttribute(few_plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                FEW_PLAN_MOST_BYTES);
}

extern "C" cudaError_t p2p_launch_few_plan(const p2p_plan_job *job, int num_sms,
                                           cudaStream_t stream)
{
    const int bytes = few_plan_bytes(job->self.num_ranks, job->self.max_tokens, &job->layer);
    return enqueue(few_plan_kernel, num_sms, FEW_BLOCK, bytes, stream, *job);
}
