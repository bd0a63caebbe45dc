/* SPDX-License-Identifier: Apache-2.0 */
/* combine_backward: gradients of sums to every slot, and of the slots' weights.
 *   d_out   [num_tokens, row_bytes]  travels like the rows of dispatch: one warp moves a piece
 *   d_rows  [num_rows, row_bytes]    = weight * d_out of the slot's token
 *   rows    [num_rows, row_bytes]    d_slot_weights = <d_out, rows>, if wanted
 *
 * One list of units is dealt to all warps in turn, as in dispatch.cu; step i of it is
 *   send token i to every peer that needs it,
 *   receive token i - lag of each source; this rank's own tokens count as a source,
 * and beside the own ones, add the blocks of the dot products of token i - 2 lag.  A piece is one
 * such block, 1024 elements; its result waits in this rank's own `parts` memory, poison until it
 * is there. */
#include "cuda/launch.cuh"
#include "cuda/slots.cuh"
#include "cuda/staging.cuh"

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
    static constexpr int V = 4, BLOCK = 512;
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
    static constexpr int V = 8, BLOCK = 384; /* for 168 registers each */
    float acc[8];                            /* 0-3 of even vectors, 4-7 of odd ones */

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
        slot = __ldg(m.plan.records + record_at(m.job.seat, rank, token, m.top_k) + n);
    return slot;
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

template <class ROW, int V>
__device__ __forceinline__ void load_own(const Move &m, int32_t token, int32_t vector,
                                         uint4 (&x)[V])
{
    load_piece_again<V, false>(m.job.d_out + row_offset(token, m.shape), vector, m.shape, x,
                               ROW::MINUS_ZERO);
}

/* Lanes' choices of this rank's token: a bit for each peer that needs its row. */
__device__ __forceinline__ uint32_t peers_of(const Move &m, int32_t choice)
{
    const uint32_t touched = __reduce_or_sync(ALL_LANES, choice >= 0 ? 1u << choice : 0);
    return touched & ~(1u << m.job.seat.rank);
}

/* Sends a piece to the peers whose bits are set. */
template <class ROW, int V, bool EXACT>
__device__ __forceinline__ void send(const Move &m, int32_t token, int32_t vector,
                                     uint32_t peers, uint4 (&x)[V])
{
    const p2p_seat &seat = m.job.seat;
#pragma unroll
    for (int v = 0; v < V; v++) x[v] = other_nans(x[v], ROW::NAN_WORD);
#pragma unroll 1
    for (int distance = 1; distance < seat.num_ranks; distance++) {
        const int rank = wrap(seat.rank + distance, seat.num_ranks);
        if (!(peers >> rank & 1)) continue;
        send_piece<V, EXACT>(staged_in(m.now.outbox[rank], token - m.first, m.shape.vectors),
                             vector, m.shape.vectors, x);
    }
}

/* Past the end of a row: what adds nothing to a dot product. */
template <class ROW, int V, bool EXACT>
__device__ __forceinline__ void fill_end(const Move &m, int32_t vector, uint4 (&x)[V])
{
    const uint32_t fill = ROW::MINUS_ZERO;
#pragma unroll
    for (int v = 0; v < V; v++)
        if (!EXACT && vector + v * WARP + lane_id() >= m.shape.vectors)
            x[v] = make_uint4(fill, fill, fill, fill);
}

/* The piece of d_out: the caller's, or staged. */
template <class ROW, int V>
__device__ __forceinline__ bool take(const Move &m, int32_t token, int32_t vector, int rank,
                                     uint4 (&x)[V])
{
    if (rank == m.job.seat.rank) {
        load_own<ROW, V>(m, token, vector, x);
        return true;
    }
    uint4 *staged = staged_in(m.now.inbox[rank], token - m.first, m.shape.vectors);
    if (!take_piece<V, false>(m.now, rank, staged, vector, m.shape.vectors, false, x))
        return false;
    restore_piece<V, false>(staged, vector, m.shape.vectors);
    fill_end<ROW, V, false>(m, vector, x);
    return true;
}

/* The block's dot product. */
template <class ROW, int V>
__device__ __forceinline__ float dot_of(const float (&x)[V][ROW::N], const uint4 (&y)[V])
{
    Dot<ROW> dot;
#pragma unroll
    for (int i = 0; i < 8; i++) dot.acc[i] = -0.0f;
#pragma unroll
    for (int v = 0; v < V; v++) {
        float b[ROW::N];
        ROW::unpack(y[v], b);
        dot.add(v, x[v], b);
    }
    return dot.sum();
}

template <class ROW>
__device__ __forceinline__ uint4 scale(float weight, const float (&x)[ROW::N])
{
    float a[ROW::N];
#pragma unroll
    for (int i = 0; i < ROW::N; i++) a[i] = __fmul_rn(weight, x[i]);
    return ROW::pack(a);
}

template <class ROW, int V>
__device__ __forceinline__ bool receive(const Move &m, int32_t token, int piece, int source,
                                        int32_t slot)
{
    constexpr int AHEAD = 1; /* rows in flight */
    const p2p_seat &seat = m.job.seat;
    const int rank = wrap(seat.rank + 1 + source, seat.num_ranks);
    const int32_t vector = piece * V * WARP;
    uint4 q[V];
    float x[V][ROW::N];
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
                    y[i][v] = m.job.d_slot_weights && from[i] >= 0
                                  ? load_row(m.job.rows + s * m.shape.row_bytes,
                                             vector + v * WARP + lane_id(), m.shape, m.policy)
                                  : make_uint4(0, 0, 0, 0);
            }
            if (!have_x) {
                if (!take<ROW, V>(m, token, vector, rank, q)) return false;
#pragma unroll
                for (int v = 0; v < V; v++) ROW::unpack(q[v], x[v]);
            }
            have_x = true;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (from[i] < 0) continue;
                const int32_t s = __shfl_sync(ALL_LANES, slot, from[i]);
                const float w = __shfl_sync(ALL_LANES, weight, from[i]);
                uint4 scaled[V];
#pragma unroll
                for (int v = 0; v < V; v++) scaled[v] = scale<ROW>(w, x[v]);
                store_piece<V, false>(m.job.d_rows + row_offset(s, m.shape), vector, m.shape,
                                      scaled, m.policy);
                if (!m.job.d_slot_weights) continue;
                const float dot = dot_of<ROW, V>(x, y[i]);
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
    each_pad(m.plan, m.plan.header.owned, token, m.plan.most_tokens, [&](int32_t slot) {
        if (slot >= m.job.num_rows) return;
        zero_piece<V, EXACT>(m.job.d_rows + row_offset(slot, m.shape), piece * V * WARP,
                             m.shape, m.policy);
        if (piece == 0 && lane_id() == 0 && m.job.d_slot_weights)
            m.job.d_slot_weights[slot] = 0.0f;
    });
}

/* Role 0 sends, role 1 + n receives from source n. */
__host__ __device__ __forceinline__ int num_roles(const p2p_seat &seat)
{
    return seat.num_ranks + 1;
}

__device__ __forceinline__ int rank_of_role(const p2p_seat &seat, int role)
{
    return wrap(seat.rank + role, seat.num_ranks);
}

/* What a unit needs first: ranks of choices, or slots. */
__device__ __forceinline__ int32_t read_ahead(const Move &m, const Walk &walk)
{
    const int32_t sent = m.first + walk.step;
    return walk.role == 0
               ? read_rank(m, sent, lane_id())
               : read_slot(m, rank_of_role(m.job.seat, walk.role), sent - m.job.lag, lane_id());
}

/* --------------------------------------------------------------------- the stream ---- */

/* Rows of aligned vectors: all units of a warp become one stream of pieces, of d_out and of the
 * rows, that are copied into a ring in shared memory ahead of their use.  A staged piece may be
 * copied before it has come: then poison is found, and it is polled in place. */

struct __align__(8) Slot
{
    int32_t number;
    float weight;
};

struct Entry {      /* a unit under way */
    int32_t token;  /* that is sent, or received */
    int32_t vector; /* first of the piece */
    uint32_t work;  /* slots here; sending: bits of the ranks; 0: nothing to do */
    int16_t role, piece;
    Slot slots[WARP]; /* lane n: the n-th here */
};

template <class ROW, bool EXACT> struct Stream {
    static constexpr int V = Dot<ROW>::V;
    typedef Ring<V, EXACT> Pieces;
    static constexpr int AHEAD = Pieces::AHEAD, ENTRIES = AHEAD + 1;
    static constexpr int WARP_BYTES = Pieces::BYTES + ENTRIES * (int)sizeof(Entry);

    const Move &m;
    Entry *entries;
    Pieces ring;
    Walk walk;                                /* the next unit, */
    int32_t next_word;                        /* and what it needs first */
    int32_t end;                              /* of the round's tokens */
    const Slot *slot;                         /* of the unit whose pieces are being copied, */
    const uint8_t *rows;                      /* this lane's part of the piece of row 0, */
    int32_t vector;                           /* its first, */
    int slots = 0;                            /* and what is left of it */
    uint32_t begun = 0, copied = 0, used = 0; /* units */

    __device__ __forceinline__ Stream(const Move &move, uint8_t *memory, int32_t round_end)
        : m(move), entries((Entry *)(memory + Pieces::BYTES)), ring(memory), walk(m.stride),
          end(round_end)
    {
        next_word = read_ahead(m, walk);
    }

    /* ---- copying ---- */

    /* The next unit of the list, if there is one. */
    __device__ __forceinline__ void begin_unit()
    {
        const int32_t sent = m.first + walk.step, received = sent - m.job.lag;
        if (received - m.job.lag >= end) return;
        Entry &entry = entries[begun++ % ENTRIES]; /* lanes meet before it is written: some may
                                                      still read the unit that was there */
        uint32_t work;
        if (walk.role == 0) {
            work = peers_of(m, sent < end ? next_word : -1);
        } else {
            const bool in = received >= m.first && received < end;
            const int32_t its_slot = in ? within(m, next_word) : -1;
            work = (uint32_t)__popc(__ballot_sync(ALL_LANES, its_slot >= 0));
            Slot &to = entry.slots[lane_id()];
            if (its_slot >= 0) {
                to.number = its_slot;
                if (m.job.slot_weights)
                    copy_word(shared_address(&to.weight), m.job.slot_weights + its_slot);
                else
                    to.weight = 1.0f;
            }
        }
        if (lane_id() == 0) {
            entry.token = walk.role == 0 ? sent : received;
            entry.vector = walk.piece * V * WARP;
            entry.work = work;
            entry.role = (int16_t)walk.role;
            entry.piece = (int16_t)walk.piece;
        }
        walk.next(m.stride);
        next_word = read_ahead(m, walk);
    }
    __device__ __forceinline__ bool is_staged(const Entry &u) const
    {
        return u.role > 0 && u.role < m.job.seat.num_ranks;
    }
    __device__ __forceinline__ uint4 *staged(const Entry &u) const
    {
        return staged_in(m.now.inbox[rank_of_role(m.job.seat, u.role)], u.token - m.first,
                         m.shape.vectors);
    }
    /* One piece more; a unit of none takes a place too. */
    __device__ __forceinline__ void copy_next()
    {
        if (slots) {
            slots--;
            ring.copy(rows + row_offset((slot++)->number, m.shape), vector, m.shape, true,
                      m.policy);
        } else if (copied != begun) {
            const Entry &entry = entries[copied++ % ENTRIES];
            const uint8_t *from = is_staged(entry)
                                      ? (const uint8_t *)staged(entry)
                                      : m.job.d_out + row_offset(entry.token, m.shape);
            vector = entry.vector;
            rows = m.job.rows + lane_offset(vector);
            slot = entry.slots;
            if (entry.work)
                ring.copy(from + lane_offset(vector), vector, m.shape, false, m.policy);
            if (entry.role && m.job.d_slot_weights) slots = (int)entry.work;
        }
        ring.filled_one();
    }

    /* ---- using ---- */

    __device__ __forceinline__ void use(const Entry &u, uint4 (&q)[V], uint32_t fill)
    {
        copy_next();
        ring.use(q, u.vector, m.shape, fill);
    }
    /* q is what the ring had. */
    __device__ __forceinline__ bool wait_for(const Entry &u, uint4 (&q)[V])
    {
        uint4 *from = staged(u);
        const int rank = rank_of_role(m.job.seat, u.role);
        if (!take_piece<V, EXACT>(m.now, rank, from, u.vector, m.shape.vectors, true, q))
            return false;
        restore_piece<V, EXACT>(from, u.vector, m.shape.vectors);
        fill_end<ROW, V, EXACT>(m, u.vector, q);
        return true;
    }
    __device__ __forceinline__ void store_scaled(uint8_t *to, const Entry &u, float weight,
                                                 const float (&x)[V][ROW::N])
    {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (EXACT || u.vector + v * WARP + lane_id() < m.shape.vectors)
                store_once(to + v * WARP * 16, scale<ROW>(weight, x[v]), m.policy);
    }
    __device__ __forceinline__ void fill_slots(const Entry &u, const uint4 (&q)[V])
    {
        const bool dots = m.job.d_slot_weights != NULL;
        uint8_t *const d_rows = m.job.d_rows + lane_offset(u.vector);
        const int count = (int)u.work;
        float mine = 0.0f, x[V][ROW::N];
#pragma unroll
        for (int v = 0; v < V; v++) {
            ROW::unpack(q[v], x[v]);
            keep(x[v]);
        }
        __syncwarp(); /* weights that other lanes have copied */
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            uint4 y[V];
            if (dots) use(u, y, 0);
            const Slot slot = u.slots[i];
            store_scaled(d_rows + row_offset(slot.number, m.shape), u, slot.weight, x);
            if (!dots) continue;
            const float dot = dot_of<ROW, V>(x, y);
            if (lane_id() == i) mine = dot;
        }
        if (dots && lane_id() < count)
            store_relaxed(part_of(m, rank_of_role(m.job.seat, u.role), u.token, lane_id()) +
                              u.piece,
                          other_nan(__float_as_uint(mine), F32::NAN_WORD));
    }
    /* What goes along with the receiving of this rank's own tokens. */
    __device__ __forceinline__ bool do_beside(const Entry &u)
    {
        const int32_t added = u.token - m.job.lag;
        if (u.token >= m.first && u.token < end) pad_slots<V, EXACT>(m, u.token, u.piece);
        return added < m.first || !m.job.d_slot_weights || added % m.shape.pieces != u.piece ||
               add_parts(m, added);
    }
    __device__ __forceinline__ bool use_unit()
    {
        begin_unit();
        __syncwarp();
        const Entry &u = entries[used++ % ENTRIES];
        uint4 q[V];
        use(u, q, ROW::MINUS_ZERO);
        if (u.role == 0) {
            if (u.work) send<ROW, V, EXACT>(m, u.token, u.vector, u.work, q);
            return true;
        }
        if (u.work) {
            if (is_staged(u) && !wait_for(u, q)) return false;
            fill_slots(u, q);
        }
        return is_staged(u) || do_beside(u);
    }
};

/* One round: tokens [m.first, end) of every rank. */
template <class ROW, int V>
__device__ __forceinline__ bool move_tokens(const Move &m, int32_t end)
{
    const int peers = m.job.seat.num_ranks - 1;
    for (Walk walk(m.stride);; walk.next(m.stride)) {
        const int32_t sent = m.first + walk.step, token = sent - m.job.lag;
        const int32_t added = token - m.job.lag;
        if (added >= end) return true;
        const int32_t word = read_ahead(m, walk);
        if (walk.role == 0) {
            uint32_t to = peers_of(m, word);
            if (m.top_k > WARP) to |= peers_of(m, read_rank(m, sent, WARP + lane_id()));
            if (!to || sent >= end) continue;
            uint4 x[V];
            load_own<ROW, V>(m, sent, walk.piece * V * WARP, x);
            send<ROW, V, false>(m, sent, walk.piece * V * WARP, to, x);
            continue;
        }
        const int source = walk.role - 1;
        if (token >= m.first && token < end) {
            if (!receive<ROW, V>(m, token, walk.piece, source, within(m, word))) return false;
            if (source == peers) pad_slots<V, false>(m, token, walk.piece);
        }
        if (source == peers && added >= m.first && m.job.d_slot_weights &&
            added % m.shape.pieces == walk.piece && !add_parts(m, added))
            return false;
    }
}

/* What is rarer has registers of its own. */
template <class ROW> static __device__ __noinline__ bool move_rarely(Move m, Now &now)
{
    return each_round(m, now, (int64_t)m.shape.vectors * 16,
                      [&](int32_t end) { return move_tokens<ROW, Dot<ROW>::V>(m, end); });
}

/* Rows past the last slab, or all of them. */
static __device__ void clear(const Move &m, int64_t first, int64_t thread, int64_t threads)
{
    if (first >= m.job.num_rows) return;
    zero_rows(m.job.d_rows, m.shape.row_bytes, first, m.job.num_rows, thread, threads);
    zero_floats(m.job.d_slot_weights, first, m.job.num_rows, thread, threads);
}

template <class ROW, bool EXACT>
__global__ void __launch_bounds__(Dot<ROW>::BLOCK, 1)
    combine_backward_kernel(const __grid_constant__ p2p_combine_backward_job job)
{
    constexpr int V = Dot<ROW>::V;
    typedef Stream<ROW, EXACT> Units;
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ Now now;
    __shared__ Plan plan;
    __shared__ Stride stride;
    const RowShape shape = row_shape<V>(job.row_bytes, job.aligned);
    if (threadIdx.x == 0) stride.set(num_roles(job.seat), shape.pieces);
    read_plan(plan, job.plan, job.plan_bytes, job.seat, job.num_tokens);
    const device_plan_header &h = plan.header;
    if (!begin(now, job.seat, (uint32_t)h.id, job.num_tokens, 0, job.num_rows)) return;
    const bool moves = plan.good && h.result == EPIC_OK;
    Move m = {job, now, plan, stride, shape, policy_once(), 0, (int)h.top_k};
    bool ok = true;
    uint8_t *const ring = memory + threadIdx.x / WARP * Units::WARP_BYTES;
    if (moves && job.aligned && h.top_k <= WARP)
        ok = each_round(m, now, (int64_t)m.shape.vectors * 16,
                        [&](int32_t end) { return run_units(Units(m, ring, end)); });
    else if (moves)
        ok = move_rarely<ROW>(m, now);
    if (moves && ok && job.zero_tail)
        clear(m, h.slots_of[job.seat.rank], grid_thread(), grid_threads());
    if (finish(now) && ok && !(moves && rows_suffice(job.seat, now, &h)))
        clear(m, 0, threadIdx.x, blockDim.x);
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

static int block_of(uint32_t type)
{
    return type == EPIC_F32 ? Dot<F32>::BLOCK : Dot<Bf16>::BLOCK;
}

static int memory_bytes(uint32_t type)
{
    return block_of(type) / WARP *
           (type == EPIC_F32 ? Stream<F32, true>::WARP_BYTES : Stream<Bf16, true>::WARP_BYTES);
}

extern "C" cudaError_t p2p_load_combine_backward(void)
{
    for (uint32_t type = EPIC_F32; type <= EPIC_F16; type++)
        for (int exact = 0; exact < 2; exact++) {
            const cudaError_t error = cudaFuncSetAttribute(
                kernel_of(type, exact), cudaFuncAttributeMaxDynamicSharedMemorySize,
                memory_bytes(type));
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

extern "C" cudaError_t p2p_launch_combine_backward(const p2p_combine_backward_job *job,
                                                   int num_sms, cudaStream_t stream)
{
    const int vectors = job->type == EPIC_F32 ? 8 : 4;
    const bool exact = job->aligned && job->row_bytes % (vectors * 512) == 0;
    const int block = block_of(job->type), bytes = memory_bytes(job->type);
    num_sms = even_deal(num_sms, block / WARP, num_roles(job->seat), job->row_bytes, vectors);
    return enqueue(kernel_of(job->type, exact), num_sms, block, bytes, stream, *job);
}
