/* SPDX-License-Identifier: Apache-2.0 */
/* combine, and the gradient of dispatch: rows home, summed.
 *   rows  [num_rows, row_bytes]    one warp sums a piece of a token's rows here, V * 16 bytes a
 *   out   [num_tokens, row_bytes]  lane, and sends the partial to the token's rank
 *
 * Every warp does two kinds of units, each kind in token order:
 *   expert  the partial of one token of one peer, into the peer's staging
 *   source  this rank's own partial of one of its tokens, plus the peers' as they come
 * A source unit of token t comes once the warp's expert units of all tokens below t + lag are
 * done: the least token that anybody waits for has been sent by every warp, so no wait is
 * circular.  A partial is the result of arithmetic and never poison: it is its own flag. */
#include "cuda/staging.cuh"

#define BLOCK 384 /* few enough for 168 registers each */
#define WARPS (BLOCK / WARP)
#define LEAF_LEVELS 8 /* of a rank's subtree, at most */

/* Partials of ROW rows that travel and are added as PART. */
template <class ROW, class PART> struct Node {
    static constexpr int VECTORS = ROW::N / PART::N; /* of PART for one of ROW */

    static __device__ __forceinline__ void unpack(const uint4 *q, float *x)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) PART::unpack(q[i], x + i * PART::N);
    }
    static __device__ __forceinline__ void pack(uint4 *q, const float *x)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) q[i] = PART::pack(x + i * PART::N);
    }
    /* a = a + b, rounded to PART. */
    static __device__ __forceinline__ void add(uint4 *a, const uint4 *b)
    {
        float x[ROW::N], y[ROW::N];
        unpack(a, x);
        unpack(b, y);
#pragma unroll
        for (int i = 0; i < ROW::N; i++) x[i] += y[i];
        pack(a, x);
    }
};

struct Combine { /* what every unit of the running round needs */
    const p2p_combine_job &job;
    const Now &now;
    const Plan &plan;
    const Stride &expert, &source; /* of the two kinds of units */
    uint4 *stack;                  /* this warp's, for leaves */
    RowShape shape;
    uint64_t policy;
    int32_t first; /* token of the round */
    int32_t top_k;
};

/* Lane n: the n-th slot here of a rank's token, -1 past the last; as the plan has it. */
__device__ __forceinline__ int32_t read_slot(const Combine &c, int rank, int32_t token,
                                             int half)
{
    const int n = half * WARP + lane_id();
    int32_t slot = -1;
    if (token < c.plan.header.tokens_of[rank] && n < c.top_k)
        slot = __ldg(c.plan.records +
                     ((int64_t)rank * c.job.seat.max_tokens + token) * c.top_k + n);
    return slot;
}

/* The same, never outside the rows. */
__device__ __forceinline__ int32_t within(const Combine &c, int32_t slot)
{
    return slot < c.job.num_rows ? slot : -1;
}

__device__ __forceinline__ int32_t slot_of(const Combine &c, int rank, int32_t token, int half)
{
    return within(c, read_slot(c, rank, token, half));
}

__device__ __forceinline__ float weight_of(const Combine &c, int32_t slot)
{
    float weight = 1.0f;
    if (slot >= 0 && c.job.slot_weights) weight = __ldg(c.job.slot_weights + slot);
    return weight;
}

/* Lane k: the rank of choice k of this rank's token, -1: none. */
__device__ __forceinline__ int32_t rank_of(const Combine &c, int32_t token, int half)
{
    const int k = half * WARP + lane_id();
    int32_t rank = -1;
    if (token < c.job.num_tokens && k < c.top_k)
        rank = __ldg(c.plan.rank_of + (int64_t)token * c.top_k + k);
    return rank;
}

/* ------------------------------------------------------------------------- partials ---- */

/* Adds COUNT rows, those of the lowest lanes in `lanes`, to acc; all loads before any use. */
template <class ROW, int V, int COUNT>
__device__ __forceinline__ void add_rows(const Combine &c, float (&acc)[V][ROW::N],
                                         uint32_t &lanes, int32_t slot, float weight,
                                         int32_t vector)
{
    uint4 q[COUNT][V];
    int from[COUNT];
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        from[r] = __ffs(lanes) - 1;
        lanes &= lanes - 1;
        const int64_t s = __shfl_sync(ALL_LANES, slot, from[r]);
        const uint8_t *row = c.job.rows + s * c.shape.row_bytes;
#pragma unroll
        for (int v = 0; v < V; v++)
            q[r][v] = load_row(row, vector + v * WARP + lane_id(), c.shape, c.policy);
    }
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        const float w = __shfl_sync(ALL_LANES, weight, from[r]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            float x[ROW::N];
            ROW::unpack(q[r][v], x);
#pragma unroll
            for (int i = 0; i < ROW::N; i++) acc[v][i] = __fmaf_rn(w, x[i], acc[v][i]);
        }
    }
}

/* Adding to -0 keeps the first product as it is. */
template <int V, int N> __device__ __forceinline__ void clear_sum(float (&acc)[V][N])
{
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < N; i++) acc[v][i] = -0.0f;
}

template <class ROW, int V>
__device__ __forceinline__ void add_lanes(const Combine &c, float (&acc)[V][ROW::N],
                                          uint32_t lanes, int32_t slot, float weight,
                                          int32_t vector)
{
    constexpr int MOST = 4; /* rows in flight */
#pragma unroll 1
    while (__popc(lanes) >= MOST) add_rows<ROW, V, MOST>(c, acc, lanes, slot, weight, vector);
    const int left = __popc(lanes);
    if (MOST > 3 && left == 3)
        add_rows<ROW, V, 3>(c, acc, lanes, slot, weight, vector);
    else if (MOST > 2 && left == 2)
        add_rows<ROW, V, 2>(c, acc, lanes, slot, weight, vector);
    else if (left == 1)
        add_rows<ROW, V, 1>(c, acc, lanes, slot, weight, vector);
}

template <class ROW, class PART, int V>
__device__ __forceinline__ void pack_sum(uint4 (&node)[V][Node<ROW, PART>::VECTORS],
                                         const float (&acc)[V][ROW::N])
{
#pragma unroll
    for (int v = 0; v < V; v++) Node<ROW, PART>::pack(node[v], acc[v]);
}

/* The partial of all choices of a token here, in ascending k; false: there is none. */
template <class ROW, class PART, int V>
__device__ __forceinline__ bool sum_here(const Combine &c,
                                         uint4 (&node)[V][Node<ROW, PART>::VECTORS], int rank,
                                         int32_t token, int32_t slot, int32_t vector)
{
    float acc[V][ROW::N];
    float weight = weight_of(c, slot);
    uint32_t lanes = __ballot_sync(ALL_LANES, slot >= 0);
    if (!lanes) return false;
    clear_sum(acc);
    for (int half = 1;; half++) {
        add_lanes<ROW, V>(c, acc, lanes, slot, weight, vector);
        if (half * WARP >= c.top_k) break;
        slot = slot_of(c, rank, token, half);
        weight = weight_of(c, slot);
        lanes = __ballot_sync(ALL_LANES, slot >= 0);
    }
    pack_sum<ROW, PART, V>(node, acc);
    return true;
}

/* ------------------------------------------------------------- leaves of one rank ---- */

__device__ __forceinline__ int leaf_of(const Combine &c, int32_t slot)
{
    const device_plan_header &h = c.plan.header;
    int low = 0, high = h.owned; /* the last slab that begins at or before the slot */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (__ldg(c.plan.slab_begin + middle) <= slot)
            low = middle;
        else
            high = middle;
    }
    const int block = h.num_experts / h.leaves;
    return (h.first_expert + low) / block - h.first_expert / block;
}

/* Level of the lowest common ancestor. */
__device__ __forceinline__ int level(uint32_t a, uint32_t b)
{
    return 32 - __clz(a ^ b);
}

/* Binary tree over the leaves that have a choice: a stack of nodes that wait for their right
 * siblings, in shared memory; `leaf_at` holds a leaf of each, a byte for each level. */
template <class ROW, class PART> struct LeafStack {
    static constexpr int P = Node<ROW, PART>::VECTORS;
    uint4 *memory;
    uint64_t leaf_at;
    int depth;

    __device__ __forceinline__ uint4 *at(int i, int p) const
    {
        return memory + (i * P + p) * WARP + lane_id();
    }
    __device__ __forceinline__ uint32_t leaf(int i) const
    {
        return (uint32_t)(leaf_at >> (8 * i)) & 255;
    }
    __device__ __forceinline__ void merge_top()
    {
        uint4 a[P], b[P];
#pragma unroll
        for (int p = 0; p < P; p++) {
            a[p] = *at(depth - 2, p);
            b[p] = *at(depth - 1, p);
        }
        Node<ROW, PART>::add(a, b);
        depth--;
#pragma unroll
        for (int p = 0; p < P; p++) *at(depth - 1, p) = a[p];
    }
    __device__ __forceinline__ void push(const uint4 *node, uint32_t new_leaf)
    {
        while (depth >= 2 &&
               level(leaf(depth - 2), leaf(depth - 1)) < level(leaf(depth - 1), new_leaf))
            merge_top();
#pragma unroll
        for (int p = 0; p < P; p++) *at(depth, p) = node[p];
        leaf_at = (leaf_at & ~(255ull << (8 * depth))) | (uint64_t)new_leaf << (8 * depth);
        depth++;
    }
    __device__ __forceinline__ bool result(uint4 *node)
    {
        while (depth >= 2) merge_top();
#pragma unroll
        for (int p = 0; p < P && depth; p++) node[p] = *at(0, p);
        return depth != 0;
    }
};

/* The subtree of a token here, one vector a lane. */
template <class ROW, class PART>
__device__ __forceinline__ bool sum_leaves(const Combine &c,
                                           uint4 (&node)[1][Node<ROW, PART>::VECTORS], int rank,
                                           int32_t token, int32_t vector)
{
    LeafStack<ROW, PART> stack = {c.stack, 0, 0};
    int32_t slot[2], leaf[2];
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        slot[half] = half * WARP < c.top_k ? slot_of(c, rank, token, half) : -1;
        weight[half] = weight_of(c, slot[half]);
        leaf[half] = slot[half] >= 0 ? leaf_of(c, slot[half]) : 0x7fffffff;
    }
    for (;;) {
        const uint32_t next = __reduce_min_sync(ALL_LANES, (uint32_t)min(leaf[0], leaf[1]));
        if (next == 0x7fffffff) break;
        float acc[1][ROW::N];
        clear_sum(acc);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool in = leaf[half] == (int32_t)next;
            add_lanes<ROW, 1>(c, acc, __ballot_sync(ALL_LANES, in), slot[half], weight[half],
                              vector);
            if (in) leaf[half] = 0x7fffffff;
        }
        uint4 partial[Node<ROW, PART>::VECTORS];
        Node<ROW, PART>::pack(partial, acc[0]);
        stack.push(partial, next);
    }
    return stack.result(node[0]);
}

/* ---------------------------------------------------------------------- floats home ---- */

/* Expert side: one float for each choice here. */
__device__ __forceinline__ void send_floats(const Combine &c, int rank, int32_t token,
                                            uint32_t *to)
{
    for (int half = 0; half * WARP < c.top_k; half++) {
        const int32_t slot = slot_of(c, rank, token, half);
        if (slot < 0) continue;
        const uint32_t word = __float_as_uint(c.job.slot_floats[slot]);
        store_relaxed(to + (int64_t)token * c.top_k + half * WARP + lane_id(),
                      other_nan(word, F32::NAN_WORD));
    }
}

/* Source side: lane k waits for its choice's float. */
__device__ __forceinline__ bool take_floats(const Combine &c, int32_t token)
{
    const p2p_seat &seat = c.job.seat;
    const device_plan_layout at = device_plan_layout_of(seat.num_ranks, seat.max_tokens,
                                                        c.plan.header.num_experts, c.top_k);
    const int32_t *fate = (const int32_t *)(c.job.plan + at.fate);
    int before[DEVICE_MAX_RANKS] = {0}; /* choices of a rank in the halves before */
    for (int half = 0; half * WARP < c.top_k; half++) {
        const int32_t rank = rank_of(c, token, half);
        const int64_t choice = (int64_t)token * c.top_k + half * WARP + lane_id();
        uint32_t *from = NULL;
#pragma unroll
        for (int q = 0; q < DEVICE_MAX_RANKS; q++) {
            const uint32_t mates = __ballot_sync(ALL_LANES, rank == q);
            if (rank == q && q != seat.rank)
                from = floats_of(c.job.seat, c.now, c.now.heap,
                                 (q - seat.rank - 1 + seat.num_ranks) % seat.num_ranks) +
                       (int64_t)token * c.top_k + before[q] + __popc(mates & lanes_below());
            before[q] += __popc(mates);
        }
        uint32_t word = 0;
        if (rank == seat.rank && fate[choice] < c.job.num_rows)
            word = __float_as_uint(c.job.slot_floats[fate[choice]]);
        const bool ok = wait_until(c.now, -1, P2P_PHASE_FLOAT, [&] {
            if (from) word = load_relaxed(from);
            return __any_sync(ALL_LANES, from && word == POISON) == 0;
        });
        if (!ok) return false;
        if (from) *from = POISON;
        if (half * WARP + lane_id() < c.top_k)
            c.job.choice_floats[choice] = __uint_as_float(word);
    }
    return true;
}

/* ---------------------------------------------------------------------------- units ---- */

struct Unit { /* with what was read ahead for it */
    int32_t token;
    int role, piece;
    int32_t slot;  /* lane n: the n-th here */
    int32_t ranks; /* source side, lane k: rank of choice k */
};

__device__ __forceinline__ int peer_of(const Combine &c, int role)
{
    return wrap(c.job.seat.rank + 1 + role, c.job.seat.num_ranks);
}

template <class ROW, class PART, int V, bool LEAVES>
__device__ __forceinline__ void expert_unit(const Combine &c, const Unit &u)
{
    constexpr int P = Node<ROW, PART>::VECTORS;
    const int rank = peer_of(c, u.role);
    const int32_t vector = u.piece * V * WARP;
    uint4 node[V][P];
    bool some;
    if constexpr (LEAVES)
        some = sum_leaves<ROW, PART>(c, node, rank, u.token, vector);
    else
        some = sum_here<ROW, PART, V>(c, node, rank, u.token, u.slot, vector);
    if (!some) return;
    const int source = c.job.seat.num_ranks - 2 - u.role; /* this rank, as the peer counts */
    uint8_t *heap = c.job.seat.heap[rank];
    uint4 *staged = (uint4 *)staging_of(c.job.seat, c.now, heap, source) +
                    (int64_t)(u.token - c.first) * c.shape.vectors * P + vector * P;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int p = 0; p < P; p++)
            if (vector + v * WARP + lane_id() < c.shape.vectors)
                store_relaxed(staged + v * WARP * P + lane_id() * P + p, node[v][p]);
    if (u.piece == 0 && c.job.slot_floats)
        send_floats(c, rank, u.token, floats_of(c.job.seat, c.now, heap, source));
}

/* Waits for the partials of up to four ranks; those of this rank are in `own`. */
template <class ROW, class PART, int V>
__device__ __forceinline__ bool take_partials(const Combine &c, const Unit &u, int place,
                                              bool (&there)[4],
                                              uint4 (&q)[4][V][Node<ROW, PART>::VECTORS])
{
    constexpr int P = Node<ROW, PART>::VECTORS;
    const p2p_seat &seat = c.job.seat;
    const int32_t vector = u.piece * V * WARP;
    uint8_t *const base = staging_of(c.job.seat, c.now, c.now.heap, 0) +
                          ((int64_t)(u.token - c.first) * c.shape.vectors + vector) * P * 16 +
                          lane_id() * P * 16;
    int source[4], first_peer = -1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int rank = place + i < seat.num_ranks ? c.plan.header.rank_at[place + i] : -1;
        source[i] = -1;
        if (!there[i] || rank == seat.rank) continue;
        source[i] = rank - seat.rank - 1 + (rank < seat.rank ? seat.num_ranks : 0);
        if (first_peer < 0) first_peer = rank;
    }
    auto staged = [&](int i, int v, int p) {
        return (uint4 *)(base + source[i] * seat.at.source_bytes) + v * WARP * P + p;
    };
    const bool ok = wait_until(c.now, first_peer, P2P_PHASE_ROW, [&] {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (source[i] >= 0)
#pragma unroll
                for (int v = 0; v < V; v++)
#pragma unroll
                    for (int p = 0; p < P; p++)
                        q[i][v][p] = vector + v * WARP + lane_id() < c.shape.vectors
                                         ? load_relaxed(staged(i, v, p))
                                         : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (source[i] >= 0)
#pragma unroll
                for (int v = 0; v < V; v++)
#pragma unroll
                    for (int p = 0; p < P; p++) missing |= has_poison(q[i][v][p]);
        return __any_sync(ALL_LANES, missing) == 0;
    });
    if (!ok) return false;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (source[i] >= 0)
#pragma unroll
            for (int v = 0; v < V; v++)
#pragma unroll
                for (int p = 0; p < P; p++)
                    if (vector + v * WARP + lane_id() < c.shape.vectors)
                        store_here(staged(i, v, p), poisoned());
    return true;
}

template <class ROW, class PART, int V>
__device__ __forceinline__ void add_node(uint4 (&a)[V][Node<ROW, PART>::VECTORS], bool &there_a,
                                         const uint4 (&b)[V][Node<ROW, PART>::VECTORS],
                                         bool there_b)
{
    if (!there_b) return;
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (there_a)
            Node<ROW, PART>::add(a[v], b[v]);
        else
#pragma unroll
            for (int p = 0; p < Node<ROW, PART>::VECTORS; p++) a[v][p] = b[v][p];
    }
    there_a = true;
}

/* Adds the partials of all ranks, in the order of the plan. */
template <class ROW, class PART, int V>
__device__ __forceinline__ bool add_ranks(const Combine &c, const Unit &u, uint32_t touched,
                                          const uint4 (&own)[V][Node<ROW, PART>::VECTORS],
                                          float (&total)[V][ROW::N])
{
    constexpr int P = Node<ROW, PART>::VECTORS;
    const p2p_seat &seat = c.job.seat;
    const bool tree = c.plan.header.sum_order == EPIC_TREE;
    bool some = false;
    clear_sum(total);
#pragma unroll 1
    for (int place = 0; place < seat.num_ranks; place += 4) {
        uint4 q[4][V][P];
        bool there[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int rank = place + i < seat.num_ranks ? c.plan.header.rank_at[place + i] : -1;
            there[i] = rank >= 0 && (touched >> rank & 1);
            if (rank == seat.rank)
#pragma unroll
                for (int v = 0; v < V; v++)
#pragma unroll
                    for (int p = 0; p < P; p++) q[i][v][p] = own[v][p];
        }
        if (!take_partials<ROW, PART, V>(c, u, place, there, q)) return false;
        if (tree) {
            add_node<ROW, PART, V>(q[0], there[0], q[1], there[1]);
            add_node<ROW, PART, V>(q[2], there[2], q[3], there[3]);
            add_node<ROW, PART, V>(q[0], there[0], q[2], there[2]);
            if (there[0] && some) {
#pragma unroll
                for (int v = 0; v < V; v++) {
                    uint4 node[P];
                    Node<ROW, PART>::pack(node, total[v]);
                    Node<ROW, PART>::add(node, q[0][v]);
                    Node<ROW, PART>::unpack(node, total[v]);
                }
            } else if (there[0]) {
#pragma unroll
                for (int v = 0; v < V; v++) Node<ROW, PART>::unpack(q[0][v], total[v]);
            }
            some = some || there[0];
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (there[i])
#pragma unroll
                for (int v = 0; v < V; v++) {
                    float x[ROW::N];
                    Node<ROW, PART>::unpack(q[i][v], x);
#pragma unroll
                    for (int e = 0; e < ROW::N; e++) total[v][e] += x[e];
                }
    }
    return true;
}

template <class ROW, class PART, int V, bool LEAVES>
__device__ __forceinline__ bool source_unit(const Combine &c, const Unit &u)
{
    const p2p_seat &seat = c.job.seat;
    const int32_t vector = u.piece * V * WARP;
    uint4 own[V][Node<ROW, PART>::VECTORS];
    bool some;
    if constexpr (LEAVES)
        some = sum_leaves<ROW, PART>(c, own, seat.rank, u.token, vector);
    else
        some = sum_here<ROW, PART, V>(c, own, seat.rank, u.token, u.slot, vector);
    uint32_t touched = __reduce_or_sync(ALL_LANES, u.ranks >= 0 ? 1u << u.ranks : 0);
    for (int half = 1; half * WARP < c.top_k; half++) {
        const int32_t rank = rank_of(c, u.token, half);
        touched |= __reduce_or_sync(ALL_LANES, rank >= 0 ? 1u << rank : 0);
    }
    if (!some) touched &= ~(1u << seat.rank);
    float total[V][ROW::N];
    if (!add_ranks<ROW, PART, V>(c, u, touched, own, total)) return false;
    uint8_t *row = c.job.out + u.token * c.shape.row_bytes;
#pragma unroll
    for (int v = 0; v < V; v++)
        store_row(row, vector + v * WARP + lane_id(), c.shape,
                  touched ? ROW::pack(total[v]) : make_uint4(0, 0, 0, 0), c.policy);
    return !(u.piece == 0 && c.job.choice_floats) || take_floats(c, u.token);
}

/* --------------------------------------------------------------------- the stream ---- */

/* Rows of aligned vectors, one partial for each rank: all units of a warp become one stream of
 * pieces, rows here and partials of peers, that are copied into a ring in shared memory ahead of
 * their use.  A partial may be copied before it has come: then poison is found, and the piece is
 * polled in place. */

#define STREAM_V 4

struct Entry { /* a unit under way */
    int32_t token;
    int32_t vector;        /* first of the piece */
    uint32_t slots;        /* lanes with a row here */
    int16_t role;          /* of an expert unit, -1: a source unit */
    uint16_t places;       /* bit p: the rank at place p sends a partial */
    int32_t slot[WARP];    /* lane n: the n-th here */
    uint32_t floats[WARP]; /* of the slots: weights, or what goes home */
    int32_t ranks[WARP];   /* source unit, lane k: of choice k */
};

template <class ROW, bool EXACT, bool TREE> struct Stream {
    typedef Ring<STREAM_V, EXACT> Pieces;
    static constexpr int V = STREAM_V, AHEAD = Pieces::AHEAD, ENTRIES = AHEAD + 1;
    static constexpr int WARP_BYTES = Pieces::BYTES + ENTRIES * (int)sizeof(Entry);

    const Combine &c;
    Entry *entries;
    Pieces ring;
    Walk e, s;                       /* the next units, */
    int32_t slot_e, slot_s, ranks_s; /* and what they need first */
    int32_t end_e, end_s;
    int32_t place_rank;                       /* lane p: the peer at place p, or -1 */
    int32_t slot, token, vector;              /* of the unit whose pieces are being copied, */
    uint32_t slots = 0, places = 0;           /* and what is left of it */
    uint32_t begun = 0, copied = 0, used = 0; /* units */

    __device__ __forceinline__ Stream(const Combine &combine, uint8_t *memory, int32_t end)
        : c(combine), entries((Entry *)(memory + Pieces::BYTES)), ring(memory), e(c.expert),
          s(c.source)
    {
        const p2p_seat &seat = c.job.seat;
        end_e = seat.num_ranks > 1 ? end : c.first;
        end_s = min(end, c.job.num_tokens);
        place_rank = lane_id() < seat.num_ranks ? c.plan.header.rank_at[lane_id()] : -1;
        if (place_rank == seat.rank) place_rank = -1;
        read_expert();
        read_source();
    }

    /* ---- copying ---- */

    __device__ __forceinline__ void read_expert()
    {
        const int32_t t = c.first + e.step;
        slot_e = t < end_e ? read_slot(c, peer_of(c, e.role), t, 0) : -1;
    }
    __device__ __forceinline__ void read_source()
    {
        const int32_t t = c.first + s.step;
        slot_s = t < end_s ? read_slot(c, c.job.seat.rank, t, 0) : -1;
        ranks_s = rank_of(c, t, 0);
    }
    __device__ __forceinline__ void put(Entry &entry, int32_t of_token, int role, int piece,
                                        int32_t its_slot, uint32_t its_places)
    {
        const float *from = c.job.slot_weights ? c.job.slot_weights : c.job.slot_floats;
        const uint32_t its_slots = __ballot_sync(ALL_LANES, its_slot >= 0);
        uint32_t *to = entry.floats + lane_id();
        entry.slot[lane_id()] = its_slot;
        if (from && its_slot >= 0)
            copy_word(shared_address(to), from + its_slot);
        else
            *to = 0;
        if (lane_id() == 0) {
            entry.token = of_token;
            entry.vector = piece * V * WARP;
            entry.slots = its_slots;
            entry.role = (int16_t)role;
            entry.places = (uint16_t)its_places;
        }
        begun++;
    }
    /* The next unit of the list, if there is one. */
    __device__ __forceinline__ void begin_unit()
    {
        const int32_t token_e = c.first + e.step, token_s = c.first + s.step;
        const bool any_e = token_e < end_e, any_s = token_s < end_s;
        Entry &entry = entries[begun % ENTRIES];
        if (any_e && (!any_s || token_e < token_s + c.job.lag)) {
            put(entry, token_e, e.role, e.piece, within(c, slot_e), 0);
            e.next(c.expert);
            read_expert();
        } else if (any_s) {
            const uint32_t touched =
                __reduce_or_sync(ALL_LANES, ranks_s >= 0 ? 1u << ranks_s : 0);
            entry.ranks[lane_id()] = ranks_s;
            put(entry, token_s, -1, s.piece, within(c, slot_s),
                __ballot_sync(ALL_LANES, place_rank >= 0 && (touched >> place_rank & 1)));
            s.next(c.source);
            read_source();
        }
    }
    __device__ __forceinline__ uint8_t *staged(int32_t of_token, int place)
    {
        const p2p_seat &seat = c.job.seat;
        const int rank = __shfl_sync(ALL_LANES, place_rank, place);
        const int source = rank - seat.rank - 1 + (rank < seat.rank ? seat.num_ranks : 0);
        return staging_of(seat, c.now, c.now.heap, source) +
               (int64_t)(of_token - c.first) * c.shape.vectors * 16;
    }
    /* One piece more; a unit of none takes a place too. */
    __device__ __forceinline__ void copy_next()
    {
        if (!(slots | places) && copied != begun) {
            const Entry &entry = entries[copied++ % ENTRIES];
            token = entry.token;
            vector = entry.vector;
            slots = entry.slots;
            places = entry.places;
            slot = entry.slot[lane_id()];
        }
        if (slots) {
            const int32_t from = __shfl_sync(ALL_LANES, slot, __ffs(slots) - 1);
            slots &= slots - 1;
            ring.copy(c.job.rows + row_offset(from, c.shape), vector, c.shape, true, c.policy);
        } else if (places) {
            const int place = __ffs(places) - 1;
            places &= places - 1;
            ring.copy(staged(token, place), vector, c.shape, false, c.policy);
        }
        ring.filled_one();
    }

    /* ---- using ---- */

    __device__ __forceinline__ bool in_row(const Entry &u, int v) const
    {
        return EXACT || u.vector + v * WARP + lane_id() < c.shape.vectors;
    }
    __device__ __forceinline__ void use(const Entry &u, uint4 (&q)[V])
    {
        copy_next();
        ring.use(q, u.vector, c.shape);
    }
    __device__ __forceinline__ void add_rows_here(const Entry &u, uint4 (&sum)[V])
    {
        uint32_t left = u.slots;
        float acc[V][ROW::N];
        uint4 q[V];
        clear_sum(acc);
#pragma unroll 1
        do {
            use(u, q);
            if (!left) break;
            const uint32_t word = __shfl_sync(ALL_LANES, u.floats[lane_id()], __ffs(left) - 1);
            const float weight = c.job.slot_weights ? __uint_as_float(word) : 1.0f;
            left &= left - 1;
#pragma unroll
            for (int v = 0; v < V; v++) {
                float x[ROW::N];
                ROW::unpack(q[v], x);
#pragma unroll
                for (int i = 0; i < ROW::N; i++) acc[v][i] = __fmaf_rn(weight, x[i], acc[v][i]);
            }
        } while (left);
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = ROW::pack(acc[v]);
    }
    __device__ __forceinline__ void send_partial(const Entry &u, const uint4 (&node)[V])
    {
        const p2p_seat &seat = c.job.seat;
        const int rank = peer_of(c, u.role), source = seat.num_ranks - 2 - u.role;
        uint8_t *heap = seat.heap[rank];
        uint4 *to = (uint4 *)staging_of(seat, c.now, heap, source) +
                    (int64_t)(u.token - c.first) * c.shape.vectors + u.vector + lane_id();
        if (u.slots)
#pragma unroll
            for (int v = 0; v < V; v++)
                if (in_row(u, v)) store_relaxed(to + v * WARP, node[v]);
        if (u.vector == 0 && c.job.slot_floats && (u.slots >> lane_id() & 1))
            store_relaxed(floats_of(seat, c.now, heap, source) + (int64_t)u.token * c.top_k +
                              lane_id(),
                          other_nan(u.floats[lane_id()], F32::NAN_WORD));
    }
    __device__ __forceinline__ bool take_partial(const Entry &u, int place, uint4 (&q)[V])
    {
        uint4 *from = (uint4 *)staged(u.token, place);
        const int rank = __shfl_sync(ALL_LANES, place_rank, place);
        use(u, q);
        if (!take_piece<V, EXACT>(c.now, rank, from, u.vector, c.shape.vectors, true, q))
            return false;
        restore_piece<V, EXACT>(from, u.vector, c.shape.vectors);
        return true;
    }
    /* Adds the partials in the order of the ranks. */
    __device__ __forceinline__ bool add_by_rank(const Entry &u, const uint4 (&own)[V],
                                                uint4 (&out)[V])
    {
        float total[V][ROW::N];
        const uint32_t rank_bit = 1u << c.job.seat.rank;
        uint32_t left = u.places | (u.slots ? rank_bit : 0);
        const float zero = left ? -0.0f : 0.0f;
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int i = 0; i < ROW::N; i++) total[v][i] = zero;
#pragma unroll 1
        for (; left; left &= left - 1) {
            uint4 q[V];
            if ((left & -left) == rank_bit) {
#pragma unroll
                for (int v = 0; v < V; v++) q[v] = own[v];
            } else if (!take_partial(u, __ffs(left) - 1, q)) {
                return false;
            }
#pragma unroll
            for (int v = 0; v < V; v++) {
                float x[ROW::N];
                ROW::unpack(q[v], x);
#pragma unroll
                for (int i = 0; i < ROW::N; i++) total[v][i] += x[i];
            }
        }
#pragma unroll
        for (int v = 0; v < V; v++) out[v] = ROW::pack(total[v]);
        return true;
    }
    static __device__ __forceinline__ void add_to(uint4 (&a)[V], bool &there_a,
                                                  const uint4 (&b)[V], bool &there_b)
    {
#pragma unroll
        for (int v = 0; v < V && there_b; v++) {
            if (there_a)
                Node<ROW, ROW>::add(&a[v], &b[v]);
            else
                a[v] = b[v];
        }
        there_a |= there_b;
        there_b = false;
    }
    /* Adds them in a binary tree over the places.  Of eight, the node of the first four waits in
     * the row itself. */
    __device__ __forceinline__ bool add_tree(const Entry &u, const uint4 (&own)[V],
                                             uint4 (&out)[V])
    {
        const p2p_seat &seat = c.job.seat;
        const int last = seat.num_ranks - 1;
        uint4 *row = (uint4 *)(c.job.out + u.token * c.shape.row_bytes) + u.vector + lane_id();
        uint4 q[V], pair[V];
        bool in_q, in_pair = false, in_out = false, waits = false;
#pragma unroll 1
        for (int place = 0; place <= last; place++) {
            in_q = u.places >> place & 1;
            if (in_q && !take_partial(u, place, q)) return false;
            if (u.slots && c.plan.header.rank_at[place] == seat.rank) {
                in_q = true;
#pragma unroll
                for (int v = 0; v < V; v++) q[v] = own[v];
            }
            add_to(pair, in_pair, q, in_q);
            if (place % 2 || place == last) add_to(out, in_out, pair, in_pair);
            if (place % 4 != 3 || place == last || !in_out) continue;
            waits = true;
            in_out = false;
#pragma unroll
            for (int v = 0; v < V; v++)
                if (in_row(u, v)) store_here(row + v * WARP, out[v]);
        }
        if (waits) {
#pragma unroll
            for (int v = 0; v < V; v++) {
                q[v] = in_row(u, v) ? load_relaxed(row + v * WARP) : make_uint4(0, 0, 0, 0);
                if (in_out) Node<ROW, ROW>::add(&q[v], &out[v]);
                out[v] = q[v];
            }
        } else if (!in_out) {
#pragma unroll
            for (int v = 0; v < V; v++) out[v] = make_uint4(0, 0, 0, 0);
        }
        return true;
    }
    /* Lane k waits for its choice's float. */
    __device__ __forceinline__ bool take_floats(const Entry &u)
    {
        const p2p_seat &seat = c.job.seat;
        const int32_t rank = u.ranks[lane_id()];
        const int n = __popc(__match_any_sync(ALL_LANES, rank) & lanes_below());
        const uint32_t own = __shfl_sync(ALL_LANES, u.floats[lane_id()], n);
        uint32_t word = rank == seat.rank ? own : 0, *from = NULL;
        if (rank >= 0 && rank != seat.rank)
            from = floats_of(seat, c.now, c.now.heap,
                             rank - seat.rank - 1 + (rank < seat.rank ? seat.num_ranks : 0)) +
                   (int64_t)u.token * c.top_k + n;
        const bool ok = wait_until(c.now, -1, P2P_PHASE_FLOAT, [&] {
            if (from) word = load_relaxed(from);
            return __any_sync(ALL_LANES, from && word == POISON) == 0;
        });
        if (!ok) return false;
        if (from) *from = POISON;
        if (lane_id() < c.top_k)
            c.job.choice_floats[(int64_t)u.token * c.top_k + lane_id()] = __uint_as_float(word);
        return true;
    }
    __device__ __forceinline__ bool finish_token(const Entry &u, const uint4 (&own)[V])
    {
        uint4 out[V];
        if (!(TREE ? add_tree(u, own, out) : add_by_rank(u, own, out))) return false;
        uint8_t *row = c.job.out + row_offset(u.token, c.shape) + (u.vector + lane_id()) * 16;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (in_row(u, v)) store_once(row + v * WARP * 16, out[v], c.policy);
        return u.vector || !c.job.choice_floats || take_floats(u);
    }
    __device__ __forceinline__ bool use_unit()
    {
        begin_unit();
        __syncwarp();
        const Entry &u = entries[used++ % ENTRIES];
        uint4 own[V];
        if (u.slots || !u.places) add_rows_here(u, own);
        if (u.role < 0) return finish_token(u, own);
        send_partial(u, own);
        return true;
    }
    __device__ __forceinline__ bool run()
    {
        bool ok = true;
#pragma unroll 1
        for (int i = 0; i < AHEAD; i++) begin_unit();
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < AHEAD; i++) copy_next();
#pragma unroll 1
        while (ok && used != begun) ok = use_unit();
        wait_copies<0>();
        return ok;
    }
};

/* One round: tokens [c.first, end) of every rank. */
template <class ROW, class PART, int V, bool LEAVES>
__device__ __forceinline__ bool combine_tokens(const Combine &c, int32_t end)
{
    const p2p_seat &seat = c.job.seat;
    const int peers = seat.num_ranks - 1;
    Walk ahead_e(c.expert), ahead_s(c.source); /* of the units after e and s */
    const int32_t expert_end = peers ? end : c.first;
    const int32_t source_end = min(end, c.job.num_tokens);
    auto expert_slot = [&] {
        const int32_t token = c.first + ahead_e.step;
        return token < expert_end ? read_slot(c, peer_of(c, ahead_e.role), token, 0) : -1;
    };
    auto source_slot = [&] {
        const int32_t token = c.first + ahead_s.step;
        return token < source_end ? read_slot(c, seat.rank, token, 0) : -1;
    };
    int32_t slot_e = expert_slot(), slot_s = source_slot();
    int32_t ranks_s = rank_of(c, c.first + ahead_s.step, 0);
    Unit e, s;
    auto next_expert = [&] {
        e = {c.first + ahead_e.step, ahead_e.role, ahead_e.piece, within(c, slot_e), -1};
        ahead_e.next(c.expert);
        slot_e = expert_slot();
    };
    auto next_source = [&] {
        s = {c.first + ahead_s.step, 0, ahead_s.piece, within(c, slot_s), ranks_s};
        ahead_s.next(c.source);
        slot_s = source_slot();
        ranks_s = rank_of(c, c.first + ahead_s.step, 0);
    };
    next_expert();
    next_source();
#pragma unroll 1
    while (e.token < expert_end || s.token < source_end) {
        if (e.token < expert_end && (s.token >= source_end || e.token < s.token + c.job.lag)) {
            const Unit now = e;
            next_expert();
            expert_unit<ROW, PART, V, LEAVES>(c, now);
        } else {
            const Unit now = s;
            next_source();
            if (!source_unit<ROW, PART, V, LEAVES>(c, now)) return false;
        }
    }
    return true;
}

/* All rounds: round(end) does the tokens [c.first, end) of every rank. */
template <class Round>
__device__ __forceinline__ bool combine_rounds(Combine &c, Now &now, int part_bytes,
                                               Round round)
{
    const int64_t round_tokens = c.job.seat.at.source_bytes / part_bytes;
    const int32_t most = c.plan.most_tokens;
    for (c.first = 0;; c.first += (int32_t)round_tokens) {
        const bool last = c.first + round_tokens >= most;
        const int32_t end = last ? most : c.first + (int32_t)round_tokens;
        if (!round(end)) return false;
        if (last) return true;
        if (!next_round(now)) return false;
    }
}

/* What is rarer has registers of its own. */
template <class ROW, class PART, bool LEAVES>
static __device__ __noinline__ bool combine_rarely(Combine c, Now &now)
{
    const int part_bytes = c.shape.vectors * 16 * Node<ROW, PART>::VECTORS;
    return combine_rounds(c, now, part_bytes, [&](int32_t end) {
        return combine_tokens<ROW, PART, 1, LEAVES>(c, end);
    });
}

template <class ROW, bool EXACT, bool TREE>
__device__ __forceinline__ bool combine_stream(Combine &c, Now &now, uint8_t *memory)
{
    typedef Stream<ROW, EXACT, TREE> Units;
    return combine_rounds(c, now, c.shape.vectors * 16, [&](int32_t end) {
        return Units(c, memory + threadIdx.x / WARP * Units::WARP_BYTES, end).run();
    });
}

/* The last CTA: zeros, when nothing was moved. */
static __device__ void clear(const Combine &c)
{
    zero_rows(c.job.out, c.job.row_bytes, 0, c.job.num_tokens, threadIdx.x, BLOCK);
    if (c.plan.good)
        zero_floats(c.job.choice_floats, 0, (int64_t)c.job.num_tokens * c.top_k, threadIdx.x,
                    BLOCK);
}

template <class ROW, bool EXACT>
__global__ void __launch_bounds__(BLOCK, 1)
    combine_kernel(const __grid_constant__ p2p_combine_job job)
{
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ Now now;
    __shared__ Plan plan;
    __shared__ Stride expert, source;
    read_plan(plan, job.plan, job.plan_bytes, job.seat);
    const device_plan_header &h = plan.header;
    const bool moves =
        plan.good && h.result == EPIC_OK && h.tokens_of[job.seat.rank] == job.num_tokens;
    const bool tree = h.sum_order == EPIC_TREE;
    const bool leaves = tree && (int)h.leaves > job.seat.num_ranks;
    const bool wide = ROW::N == 8 && h.partial_type == EPIC_F32;
    const bool streams = !leaves && !wide && job.aligned && h.top_k <= WARP;
    const RowShape shape = streams ? row_shape<STREAM_V>(job.row_bytes, job.aligned)
                                   : row_shape<1>(job.row_bytes, job.aligned);
    if (threadIdx.x == 0) {
        expert.set(max(job.seat.num_ranks - 1, 1), shape.pieces);
        source.set(1, shape.pieces);
    }
    if (!begin(now, job.seat, (uint32_t)h.id, job.num_tokens, 0, job.num_rows)) return;
    uint4 *stack = (uint4 *)memory + threadIdx.x / WARP * LEAF_LEVELS * (wide ? 2 : 1) * WARP;
    Combine c = {job, now, plan, expert, source, stack, shape, policy_once(), 0, (int)h.top_k};
    bool ok = true;
    if (moves && streams && !tree)
        ok = combine_stream<ROW, EXACT, false>(c, now, memory);
    else if (moves && streams)
        ok = combine_stream<ROW, EXACT, true>(c, now, memory);
    else if (moves && wide && leaves)
        ok = combine_rarely<ROW, F32, true>(c, now);
    else if (moves && wide)
        ok = combine_rarely<ROW, F32, false>(c, now);
    else if (moves && leaves)
        ok = combine_rarely<ROW, ROW, true>(c, now);
    else if (moves)
        ok = combine_rarely<ROW, ROW, false>(c, now);
    if (finish(now) && ok && !moves) clear(c);
}

typedef void (*Kernel)(p2p_combine_job);

static Kernel kernel_of(uint32_t type, bool exact)
{
    if (type == EPIC_BF16)
        return exact ? combine_kernel<Bf16, true> : combine_kernel<Bf16, false>;
    if (type == EPIC_F16) return exact ? combine_kernel<F16, true> : combine_kernel<F16, false>;
    return exact ? combine_kernel<F32, true> : combine_kernel<F32, false>;
}

static int memory_bytes(void)
{
    const int stacks = LEAF_LEVELS * 2 * WARP * 16,
              stream = Stream<F32, true, true>::WARP_BYTES;
    return WARPS * (stacks > stream ? stacks : stream);
}

extern "C" cudaError_t p2p_load_combine(void)
{
    for (uint32_t type = EPIC_F32; type <= EPIC_F16; type++)
        for (int exact = 0; exact < 2; exact++) {
            const cudaError_t error = cudaFuncSetAttribute(
                kernel_of(type, exact), cudaFuncAttributeMaxDynamicSharedMemorySize,
                memory_bytes());
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

extern "C" cudaError_t p2p_launch_combine(const p2p_combine_job *job, int num_sms,
                                          cudaStream_t stream)
{
    const bool exact = job->aligned && job->row_bytes % (STREAM_V * 512) == 0;
    kernel_of(job->type, exact)<<<num_sms, BLOCK, memory_bytes(), stream>>>(*job);
    return cudaGetLastError();
}
