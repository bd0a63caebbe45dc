/* SPDX-License-Identifier: Apache-2.0 */
/* combine_backward: gradients of sums to every slot, and of the slots' weights.
 *   d_out   [num_tokens, row_bytes]  travels like the rows of dispatch: one warp moves a piece
 *   d_rows  [num_rows, row_bytes]    = weight * d_out of the slot's token
 *   rows    [num_rows, row_bytes]    d_slot_weights = <d_out, rows>, if wanted
 *
 * The list of units is dispatch's (dispatch.cu).  A piece is one block of the dot product, 1024
 * elements; its result waits in this rank's own `parts` memory, poison until it is there, and
 * step i also adds the blocks of token i - 2 lag in ascending order. */
#include "cuda/staging.cuh"

#define BLOCK 512

struct Move {
    const p2p_combine_backward_job &job;
    const Now &now;
    const Plan &plan;
    const Stride &stride;
    RowShape shape;
    uint64_t policy;
    int32_t first; /* token of the round */
    int32_t top_k;
};

/* ------------------------------------------------------------------ the dot product ---- */

/* Sums of one block: lane l of a 16-bit type holds accumulators 8 l .. 8 l + 7; of float32, 4 l ..
 * 4 l + 3 and 128 more than those. */
template <class ROW> struct Dot;

template <class ROW> struct Dot16 {
    static constexpr int V = 4;
    float acc[8];

    __device__ __forceinline__ void add(int, const float *x, const float *y)
    {
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i] = __fmaf_rn(x[i], y[i], acc[i]);
    }
    __device__ __forceinline__ float sum() const
    {
        const float a = acc[0] + acc[4], b = acc[1] + acc[5];
        const float c = acc[2] + acc[6], d = acc[3] + acc[7];
        float s = (a + c) + (b + d);
#pragma unroll
        for (int distance = 16; distance; distance /= 2)
            s += __shfl_xor_sync(ALL_LANES, s, distance);
        return s;
    }
};

template <> struct Dot<Bf16> : Dot16<Bf16> {
};
template <> struct Dot<F16> : Dot16<F16> {
};

template <> struct Dot<F32> {
    static constexpr int V = 8;
    float acc[8]; /* 0-3 of even vectors, 4-7 of odd ones */

    __device__ __forceinline__ void add(int v, const float *x, const float *y)
    {
        float *a = acc + v % 2 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = __fmaf_rn(x[i], y[i], a[i]);
    }
    static __device__ __forceinline__ float group(const float *a)
    {
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = a[i] + __shfl_xor_sync(ALL_LANES, a[i], 1);
        return (s[0] + s[2]) + (s[1] + s[3]);
    }
    __device__ __forceinline__ float sum() const
    {
        float s = group(acc) + group(acc + 4);
#pragma unroll
        for (int distance = 16; distance > 1; distance /= 2)
            s += __shfl_xor_sync(ALL_LANES, s, distance);
        return s;
    }
};

/* Where the blocks of entry n of a token of `rank` wait. */
__device__ __forceinline__ uint32_t *part_of(const Move &m, int rank, int32_t token, int n)
{
    const p2p_seat &seat = m.job.seat;
    return (uint32_t *)(m.now.heap + seat.at.parts) + rank * seat.at.part_words +
           ((int64_t)token * m.top_k + n) * m.shape.pieces;
}

/* Lane n of a half: the slot of entry n here, as the plan has it. */
__device__ __forceinline__ int32_t read_slot(const Move &m, int rank, int32_t token, int n)
{
    int32_t slot = -1;
    if (token >= m.first && token < m.plan.header.tokens_of[rank] && n < m.top_k)
        slot = __ldg(m.plan.records +
                     ((int64_t)rank * m.job.seat.max_tokens + token) * m.top_k + n);
    return slot;
}

/* The same, never outside the rows. */
__device__ __forceinline__ int32_t within(const Move &m, int32_t slot)
{
    return slot < m.job.num_rows ? slot : -1;
}

__device__ __forceinline__ float read_weight(const Move &m, int32_t slot)
{
    float weight = 1.0f;
    if (slot >= 0 && m.job.slot_weights) weight = __ldg(m.job.slot_weights + slot);
    return weight;
}

/* Lane k: the rank of choice k of this rank's token, -1: none. */
__device__ __forceinline__ int32_t read_rank(const Move &m, int32_t token, int k)
{
    int32_t rank = -1;
    if (token < m.job.num_tokens && k < m.top_k)
        rank = __ldg(m.plan.rank_of + (int64_t)token * m.top_k + k);
    return rank;
}

/* -------------------------------------------------------------------------- units ---- */

template <class ROW, int V, bool EXACT>
__device__ __forceinline__ void load_own(const Move &m, int32_t token, int32_t vector,
                                         uint4 (&x)[V])
{
    const uint8_t *row = m.job.d_out + token * m.shape.row_bytes;
#pragma unroll
    for (int v = 0; v < V; v++)
        x[v] =
            load_row_again<EXACT>(row, vector + v * WARP + lane_id(), m.shape, ROW::MINUS_ZERO);
}

template <class ROW, int V, bool EXACT>
__device__ __forceinline__ void send(const Move &m, int32_t token, int piece, int distance,
                                     int32_t choice)
{
    const p2p_seat &seat = m.job.seat;
    const int rank = wrap(seat.rank + distance, seat.num_ranks);
    const int source = seat.num_ranks - 1 - distance; /* this rank, as the peer counts */
    const int32_t vector = piece * V * WARP;
    uint4 x[V];
    load_own<ROW, V, EXACT>(m, token, vector, x);
    bool goes = choice == rank;
    if (m.top_k > WARP) goes |= read_rank(m, token, WARP + lane_id()) == rank;
    if (!__any_sync(ALL_LANES, goes)) return;
#pragma unroll
    for (int v = 0; v < V; v++)
        x[v] = make_uint4(other_nan(x[v].x, ROW::NAN_WORD), other_nan(x[v].y, ROW::NAN_WORD),
                          other_nan(x[v].z, ROW::NAN_WORD), other_nan(x[v].w, ROW::NAN_WORD));
    uint4 *staged = (uint4 *)staging_of(m.job.seat, m.now, seat.heap[rank], source) +
                    (int64_t)(token - m.first) * m.shape.vectors;
    send_piece<V, EXACT>(staged, vector, m.shape.vectors, x);
}

/* The piece of d_out: the caller's, or staged. */
template <class ROW, int V, bool EXACT>
__device__ __forceinline__ bool take(const Move &m, int32_t token, int32_t vector, int source,
                                     int rank, uint4 (&x)[V])
{
    if (rank == m.job.seat.rank) {
        load_own<ROW, V, EXACT>(m, token, vector, x);
        return true;
    }
    uint4 *staged = (uint4 *)staging_of(m.job.seat, m.now, m.now.heap, source) +
                    (int64_t)(token - m.first) * m.shape.vectors;
    if (!take_piece<V, EXACT>(m.now, rank, staged, vector, m.shape.vectors, x)) return false;
    restore_piece<V, EXACT>(staged, vector, m.shape.vectors);
    const uint32_t fill = ROW::MINUS_ZERO;
#pragma unroll
    for (int v = 0; v < V; v++)
        if (!EXACT && vector + v * WARP + lane_id() >= m.shape.vectors)
            x[v] = make_uint4(fill, fill, fill, fill);
    return true;
}

/* One slot: the scaled row, and the block's dot product. */
template <class ROW, int V, bool EXACT>
__device__ __forceinline__ float scale_and_dot(const Move &m, const uint4 (&x)[V],
                                               const uint4 (&y)[V], int32_t slot, float weight,
                                               int32_t vector)
{
    Dot<ROW> dot;
#pragma unroll
    for (int i = 0; i < 8; i++) dot.acc[i] = -0.0f;
    uint8_t *row = m.job.d_rows + slot * m.shape.row_bytes;
#pragma unroll
    for (int v = 0; v < V; v++) {
        float a[ROW::N], b[ROW::N];
        ROW::unpack(x[v], a);
        ROW::unpack(y[v], b);
        dot.add(v, a, b);
#pragma unroll
        for (int i = 0; i < ROW::N; i++) a[i] = __fmul_rn(weight, a[i]);
        store_row<EXACT>(row, vector + v * WARP + lane_id(), m.shape, ROW::pack(a), m.policy);
    }
    return m.job.d_slot_weights ? dot.sum() : 0.0f;
}

template <class ROW, int V, bool EXACT>
__device__ __forceinline__ bool receive(const Move &m, int32_t token, int piece, int source,
                                        int32_t slot)
{
    constexpr int AHEAD = 1; /* rows in flight */
    const p2p_seat &seat = m.job.seat;
    const int rank = wrap(seat.rank + 1 + source, seat.num_ranks);
    const int32_t vector = piece * V * WARP;
    uint4 x[V];
    bool have_x = false;
    for (int half = 0; half * WARP < m.top_k; half++) {
        const int n = half * WARP + lane_id();
        if (half) slot = within(m, read_slot(m, rank, token, n));
        const float weight = read_weight(m, slot);
        uint32_t lanes = __ballot_sync(ALL_LANES, slot >= 0);
        if (!lanes) break;
        float mine = 0.0f;
        while (lanes) {
            uint4 y[AHEAD][V];
            int from[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                from[i] = __ffs(lanes) - 1;
                lanes &= lanes - 1;
                const int64_t s = __shfl_sync(ALL_LANES, slot, max(from[i], 0));
#pragma unroll
                for (int v = 0; v < V; v++)
                    y[i][v] =
                        m.job.d_slot_weights && from[i] >= 0
                            ? load_row<EXACT>(m.job.rows + s * m.shape.row_bytes,
                                              vector + v * WARP + lane_id(), m.shape, m.policy)
                            : make_uint4(0, 0, 0, 0);
            }
            if (!have_x && !take<ROW, V, EXACT>(m, token, vector, source, rank, x))
                return false;
            have_x = true;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (from[i] < 0) continue;
                const int32_t s = __shfl_sync(ALL_LANES, slot, from[i]);
                const float w = __shfl_sync(ALL_LANES, weight, from[i]);
                const float dot = scale_and_dot<ROW, V, EXACT>(m, x, y[i], s, w, vector);
                if (lane_id() == from[i]) mine = dot;
            }
        }
        if (m.job.d_slot_weights && slot >= 0)
            store_relaxed(part_of(m, rank, token, n) + piece,
                          other_nan(__float_as_uint(mine), F32::NAN_WORD));
    }
    return true;
}

/* Adds the blocks of a token's dot products, all sources side by side. */
__device__ __forceinline__ bool add_parts(const Move &m, int32_t token)
{
    const int entries = m.job.seat.num_ranks * m.top_k;
    for (int begin = 0; begin < entries; begin += WARP) {
        const int i = begin + lane_id();
        const int rank = i / m.top_k, n = i % m.top_k;
        const int32_t slot = i < entries ? within(m, read_slot(m, rank, token, n)) : -1;
        if (!__any_sync(ALL_LANES, slot >= 0)) continue;
        uint32_t *part = part_of(m, slot >= 0 ? rank : 0, token, slot >= 0 ? n : 0);
        float sum = 0.0f;
        for (int piece = 0; piece < m.shape.pieces; piece += 8) {
            uint32_t words[8];
            const bool ok = wait_until(m.now, -1, P2P_PHASE_GRID, [&] {
                bool missing = false;
#pragma unroll
                for (int p = 0; p < 8; p++)
                    words[p] = slot >= 0 && piece + p < m.shape.pieces
                                   ? load_relaxed(part + piece + p)
                                   : 0;
#pragma unroll
                for (int p = 0; p < 8; p++) missing |= words[p] == POISON;
                return __any_sync(ALL_LANES, missing) == 0;
            });
            if (!ok) return false;
#pragma unroll
            for (int p = 0; p < 8; p++) {
                if (piece + p >= m.shape.pieces || slot < 0) continue;
                const float x = __uint_as_float(words[p]);
                sum = piece + p ? sum + x : x;
                part[piece + p] = POISON;
            }
        }
        if (slot >= 0) m.job.d_slot_weights[slot] = sum;
    }
    return true;
}

template <int V, bool EXACT>
__device__ __forceinline__ void pad_slots(const Move &m, int32_t token, int piece)
{
    const uint4 zero = make_uint4(0, 0, 0, 0);
    each_pad(m.plan, m.plan.header.owned, token, m.plan.most_tokens, [&](int32_t slot) {
        if (slot >= m.job.num_rows) return;
        uint8_t *row = m.job.d_rows + slot * m.shape.row_bytes;
#pragma unroll
        for (int v = 0; v < V; v++)
            store_row<EXACT>(row, piece * V * WARP + v * WARP + lane_id(), m.shape, zero,
                             m.policy);
        if (piece == 0 && lane_id() == 0 && m.job.d_slot_weights)
            m.job.d_slot_weights[slot] = 0.0f;
    });
}

__device__ __forceinline__ bool is_send(const Walk &walk, int peers)
{
    return walk.role < 2 * peers && walk.role % 2 == 0;
}

/* What a unit needs first: ranks of choices, or slots. */
__device__ __forceinline__ int32_t read_ahead(const Move &m, const Walk &walk, int peers)
{
    if (is_send(walk, peers)) return read_rank(m, m.first + walk.step, lane_id());
    const int rank = wrap(m.job.seat.rank + 1 + walk.role / 2, m.job.seat.num_ranks);
    return read_slot(m, rank, m.first + walk.step - m.job.lag, lane_id());
}

/* One round: tokens [m.first, end) of every rank. */
template <class ROW, int V, bool EXACT>
__device__ __forceinline__ bool move_tokens(const Move &m, int32_t end)
{
    const int peers = m.job.seat.num_ranks - 1;
    Walk ahead(m.stride);
    int32_t next_word = read_ahead(m, ahead, peers);
    for (;;) {
        const Walk walk = ahead;
        const int32_t word = next_word;
        const int32_t sent = m.first + walk.step, token = sent - m.job.lag;
        const int32_t added = token - m.job.lag;
        if (added >= end) return true;
        ahead.next(m.stride);
        next_word = read_ahead(m, ahead, peers);
        if (is_send(walk, peers)) {
            if (sent < min(end, m.job.num_tokens))
                send<ROW, V, EXACT>(m, sent, walk.piece, walk.role / 2 + 1, word);
            continue;
        }
        const int source = walk.role / 2;
        if (token >= m.first && token < end) {
            if (!receive<ROW, V, EXACT>(m, token, walk.piece, source, within(m, word)))
                return false;
            if (source == peers) pad_slots<V, EXACT>(m, token, walk.piece);
        }
        if (source == peers && added >= m.first && m.job.d_slot_weights &&
            added % m.shape.pieces == walk.piece && !add_parts(m, added))
            return false;
    }
}

template <class ROW, int V, bool EXACT>
__device__ __forceinline__ bool move_rounds(Move &m, Now &now)
{
    const int64_t round_tokens = m.job.seat.at.source_bytes / ((int64_t)m.shape.vectors * 16);
    const int32_t most = m.plan.most_tokens;
    for (m.first = 0;; m.first += (int32_t)round_tokens) {
        const bool last = m.first + round_tokens >= most;
        const int32_t end = last ? most : m.first + (int32_t)round_tokens;
        if (!move_tokens<ROW, V, EXACT>(m, end)) return false;
        if (last) return true;
        if (!next_round(now)) return false;
    }
}

/* Rows past the last slab, or all of them. */
static __device__ void clear(const Move &m, int64_t first, int64_t thread, int64_t threads)
{
    if (first >= m.job.num_rows) return;
    zero_rows(m.job.d_rows, m.shape.row_bytes, first, m.job.num_rows, thread, threads);
    zero_floats(m.job.d_slot_weights, first, m.job.num_rows, thread, threads);
}

template <class ROW, bool EXACT>
__global__ void __launch_bounds__(BLOCK, 1)
    combine_backward_kernel(const __grid_constant__ p2p_combine_backward_job job)
{
    constexpr int V = Dot<ROW>::V;
    __shared__ Now now;
    __shared__ Plan plan;
    __shared__ Stride stride;
    const RowShape shape = row_shape<V>(job.row_bytes, job.aligned);
    if (threadIdx.x == 0) stride.set(2 * job.seat.num_ranks - 1, shape.pieces);
    read_plan(plan, job.plan, job.plan_bytes, job.seat);
    const device_plan_header &h = plan.header;
    if (!begin(now, job.seat, (uint32_t)h.id, job.num_tokens, 0, job.num_rows)) return;
    const bool moves =
        plan.good && h.result == EPIC_OK && h.tokens_of[job.seat.rank] == job.num_tokens;
    Move m = {job, now, plan, stride, shape, policy_once(), 0, (int)h.top_k};
    bool ok = true;
    if (moves) ok = move_rounds<ROW, V, EXACT>(m, now);
    if (moves && ok && job.zero_tail)
        clear(m, h.slots_of[job.seat.rank], grid_thread(), grid_threads());
    if (finish(now) && ok && !moves) clear(m, 0, threadIdx.x, BLOCK);
}

typedef void (*Kernel)(p2p_combine_backward_job);

static Kernel kernel_of(uint32_t type, bool exact)
{
    if (type == EPIC_BF16)
        return exact ? combine_backward_kernel<Bf16, true>
                     : combine_backward_kernel<Bf16, false>;
    if (type == EPIC_F16)
        return exact ? combine_backward_kernel<F16, true> : combine_backward_kernel<F16, false>;
    return exact ? combine_backward_kernel<F32, true> : combine_backward_kernel<F32, false>;
}

extern "C" cudaError_t p2p_load_combine_backward(void)
{
    for (uint32_t type = EPIC_F32; type <= EPIC_F16; type++)
        for (int exact = 0; exact < 2; exact++) {
            cudaFuncAttributes attributes;
            const cudaError_t error =
                cudaFuncGetAttributes(&attributes, (const void *)kernel_of(type, exact));
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

extern "C" cudaError_t p2p_launch_combine_backward(const p2p_combine_backward_job *job,
                                                   int num_sms, cudaStream_t stream)
{
    const int vectors = job->type == EPIC_F32 ? 8 : 4;
    const bool exact = job->aligned && job->row_bytes % (vectors * 512) == 0;
    const int roles = 2 * job->seat.num_ranks - 1;
    num_sms = even_deal(num_sms, BLOCK / WARP, roles, job->row_bytes, vectors);
    kernel_of(job->type, exact)<<<num_sms, BLOCK, 0, stream>>>(*job);
    return cudaGetLastError();
}
