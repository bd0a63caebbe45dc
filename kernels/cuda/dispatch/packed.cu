/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch, and plan with dispatch, of strings (dispatch/packed.cuh): rows with second rows, or quantized on
 * the way.
 *   tokens  [num_tokens, token_bytes]   scales  [num_tokens, scale_bytes], unless quantized
 *   recv    [recv_rows, row_bytes]      recv_scales  [recv_rows, scale_bytes]
 *
 * Units, their order and their waits are those of dispatch/dispatch.cu.  What is sent, and this rank's own
 * tokens, have pieces of the caller's rows, what comes from peers has pieces of strings. */
#include "cuda/dispatch/launcher.cuh"
#include "cuda/dispatch/packed_slots.cuh"
#include "cuda/dispatch/relay.cuh"

/* A unit's pieces, none perhaps; given: of this rank's tokens. */
struct Pieces {
    int first, count;
    bool given;

    __device__ __forceinline__ Pieces(const Strings &m, const Walk &walk)
        : given(walk.role == 0 || source_role(m, walk) == m.job.plan.self.num_ranks)
    {
        const int span = given ? m.given_span : m.job.span;
        first = walk.span * span;
        count = min(span, (given ? m.given.pieces : m.shape.pieces) - first);
    }
};

/* The pieces that a warp's units need, on their way through the ring, as in dispatch/dispatch.cu; a unit
 * without any takes the place of one. */
template <class Given> struct Feed {
    typedef Ring<V, false> RowRing;
    const Strings &m;
    RowRing ring;
    Walk walk;             /* the unit whose pieces are being copied: */
    const uint8_t *row;    /* its row, staged or the caller's, NULL: nothing to copy, */
    const uint8_t *second; /* what vectors from number `split` on are copied from, */
    int32_t split, limit;  /* up to the limit, */
    int32_t vector, left;  /* its next piece, and how many are left */
    int32_t end;           /* the token that the round ends before */

    __device__ __forceinline__ Feed(const Strings &strings, const Walk &first,
                                    int32_t round_end, const uint8_t *memory)
        : m(strings), ring(memory), walk(first), end(round_end)
    {
        open();
    }
    __device__ __forceinline__ void open()
    {
        const p2p_dispatch_job &job = m.job;
        const Pieces part(m, walk);
        const int32_t token = token_of(m, walk);
        const bool in = token < (part.given ? min(end, job.num_tokens) : end);
        vector = part.first * V * WARP;
        left = max(part.count, 1);
        split = limit = m.shape.vectors;
        if (part.given && Given::QUANTIZED) split = limit = m.given.vectors;
        row = second = NULL;
        if (!in || part.count <= 0 || hands_on(m, walk)) return;
        if (!part.given) {
            row = (const uint8_t *)staged_in(
                m.now.inbox[rank_of_role(job.plan.self, source_role(m, walk))], token - m.first,
                m.shape.vectors);
            if (is_slow(m.now, row)) row = NULL;
            return;
        }
        row = job.tokens + row_offset(token, m.given);
        if (Given::QUANTIZED) return;
        split = m.row_vectors;
        second = job.scales + (int64_t)token * job.scale_bytes - (int64_t)split * 16;
        if (!job.scales_aligned) limit = split;
    }
    __device__ __forceinline__ void copy_next()
    {
        if (row) {
#pragma unroll
            for (int v = 0; v < V; v++) {
                const int32_t at = vector + v * WARP + lane_id();
                if (at < limit)
                    copy_again(ring.memory + ring.next + v * WARP * 16,
                               (at < split ? row : second) + (int64_t)at * 16);
            }
            vector += V * WARP;
        }
        ring.filled_one();
        if (--left) return;
        walk.next(m.stride);
        open();
    }
    __device__ __forceinline__ void use(uint4 (&q)[V], int piece, const RowShape &shape)
    {
        copy_next();
        ring.use(q, piece * V * WARP, shape);
    }
    __device__ __forceinline__ void pass(int pieces)
    {
        for (; pieces > 0; pieces--) {
            copy_next();
            ring.wait();
        }
    }
    __device__ __forceinline__ void give(Joined &piece, int32_t token, int i)
    {
        use(piece.q, i, m.shape);
        piece.complete(m, token, i);
    }
    __device__ __forceinline__ void give(Made &piece, int32_t, int i)
    {
        uint4 raw[V];
        copy_next();
        ring.wait();
        __syncwarp(); /* what other lanes have copied */
#pragma unroll
        for (int v = 0; v < V; v++) {
            const int32_t at = Made::vector_of(v);
            const bool in = i * V * WARP + at < m.given.vectors;
            raw[v] = load_shared(ring.memory + ring.next + (at - lane_id()) * 16);
            if (!in) raw[v] = make_uint4(0, 0, 0, 0);
        }
        __syncwarp(); /* before others copy there again */
        piece.make_raw(m, raw);
    }
};

/* Of this rank's token, from memory. */
template <class Given, bool FAST>
__device__ __forceinline__ void load_piece(const Strings &m, int32_t token, int i, Given &piece)
{
    uint4 raw[V];
    if (!FAST) {
        piece.load(m, token, i);
        return;
    }
    Given::load_raw(m, token, i, raw);
    piece.make_raw(m, raw);
}

/* The same; `copied`: through the ring. */
template <class Given, bool FAST>
__device__ __forceinline__ void get_piece(const Strings &m, int32_t token, int i, bool copied,
                                          Feed<Given> &feed, Given &piece)
{
    if (copied)
        feed.give(piece, token, i);
    else
        load_piece<Given, FAST>(m, token, i, piece);
}

template <class Given, bool FAST>
__device__ __forceinline__ void send_unit(const Strings &m, const Walk &walk, uint64_t word,
                                          Feed<Given> &feed)
{
    const int32_t token = m.first + walk.step;
    const Pieces part(m, walk);
    uint32_t peers = 0;
    if (token < min(feed.end, m.job.num_tokens))
        peers = choose_peers(m, token, walk.span == 0 && m.job.weights, word);
#ifdef EPIC_HOSTS
    if (token < min(feed.end, m.job.num_tokens))
        peers = choose_routes(m, token, walk.span == 0, peers);
#endif
    if (!peers || part.count <= 0) {
        if (FAST) feed.pass(max(part.count, 1));
        return;
    }
#pragma unroll 1
    for (int i = part.first; i < part.first + part.count; i++) {
        Given piece;
        get_piece<Given, FAST>(m, token, i, FAST, feed, piece);
        piece.send(m, token, i, peers);
    }
}

/* The pieces of a token to its slots, of which a lane has two with more than 32 choices. */
template <class Given, bool FAST>
__device__ __forceinline__ bool move_pieces(const Strings &m, int32_t token, const Walk &walk,
                                            const int32_t (&slot)[2], bool copied,
                                            Feed<Given> &feed)
{
    const p2p_self &self = m.job.plan.self;
    const int role = source_role(m, walk), rank = rank_of_role(self, role);
    const Pieces part(m, walk);
    const bool both = m.top_k > WARP && __any_sync(ALL_LANES, slot[1] >= 0);
#pragma unroll 1
    for (int i = part.first; i < part.first + part.count; i++) {
        if (part.given) {
            Given piece;
            get_piece<Given, FAST>(m, token, i, copied, feed, piece);
            piece.fill(m, i, slot[0]);
            if (both) piece.fill(m, i, slot[1]);
            continue;
        }
        Joined piece;
        if (copied) feed.use(piece.q, i, m.shape);
        if (!take_string<Given::QUANTIZED>(m, rank, role - 1, token, i, copied, piece.q))
            return false;
        piece.fill(m, i, slot[0]);
        if (both) piece.fill(m, i, slot[1]);
    }
    if (copied && part.count <= 0) feed.pass(1);
    return true;
}

/* One token of a receiving unit; `copied`: its pieces come through the ring. */
template <class Given, bool FAST, bool FLAT>
__device__ __forceinline__ bool receive(const Strings &m, int32_t token, const Walk &walk,
                                        uint64_t word, bool copied, Feed<Given> &feed)
{
    const int role = source_role(m, walk), source = role - 1;
    const int rank = rank_of_role(m.job.plan.self, role);
    const bool besides = FLAT && walk.span == 0;
    const bool weighs = walk.span == 0 && m.job.weights && !besides;
    int32_t slot[2];
    if (!find_slots<FLAT>(m, rank, token, walk.span == 0, word, slot)) return false;
    if (!__any_sync(ALL_LANES, slot[0] >= 0)) {
        if (copied) feed.pass(max(Pieces(m, walk).count, 1));
        return true;
    }
    uint32_t weight = 0;
    Beside beside;
    if (besides) beside = peek_beside(m, rank, source, token, 0);
    if (weighs) weight = peek_weight(m, rank, source, token, 0, slot[0]);
    if (!move_pieces<Given, FAST>(m, token, walk, slot, copied, feed)) return false;
    if (besides)
        return take_beside(m, rank, source, token, __shfl_sync(ALL_LANES, slot[0], 0), beside);
    if (!weighs) return true;
    if (!receive_weight(m, rank, source, token, 0, slot[0], weight)) return false;
    if (!__any_sync(ALL_LANES, slot[1] >= 0)) return true;
    weight = peek_weight(m, rank, source, token, 1, slot[1]);
    return receive_weight(m, rank, source, token, 1, slot[1], weight);
}

#ifdef EPIC_HOSTS
/* Quantized ones have no poison.  noinline as in dispatch/dispatch.cu. */
template <class Given>
static __device__ __noinline__ bool hand_on_string(const Strings &m, int from, int32_t token,
                                                   int piece, uint32_t wants)
{
    return hand_on_piece<V, false>(m.job.plan.self, m.now, from, token - m.first, piece,
                                   m.shape.vectors, wants, [&](uint8_t *heap, int source) {
                                       return Given::QUANTIZED
                                                  ? NULL
                                                  : escapes_at(m, heap, source, token, piece);
                                   });
}
#endif

/* The CTAs that do not plan send the first tokens meanwhile; noinline as in dispatch/dispatch.cu. */
template <class Given, bool FAST> static __device__ __noinline__ void send_head(const Strings m)
{
    const int planners = m.job.plan.planners, pieces = m.given.pieces;
    const int warps = BLOCK / WARP, first = ((int)blockIdx.x - planners) * warps;
    if ((int)blockIdx.x < planners) return;
    for (int u = first + (int)threadIdx.x / WARP; u < min(m.head, m.job.num_tokens) * pieces;
         u += ((int)gridDim.x - planners) * warps) {
        const int32_t token = u / pieces, i = u % pieces;
        const uint64_t word = read_choice(m, token, lane_id());
        uint32_t peers = choose_peers(m, token, i == 0 && m.job.weights, word);
#ifdef EPIC_HOSTS
        peers = choose_routes(m, token, i == 0, peers);
#endif
        if (!peers) continue;
        Given piece;
        load_piece<Given, FAST>(m, token, i, piece);
        piece.send(m, token, i, peers);
    }
}

template <class Given, bool FAST, bool FLAT>
__device__ __forceinline__ bool receive_unit(const Strings &m, const Walk &walk, uint64_t word,
                                             int slab_bits, Feed<Given> &feed)
{
    const p2p_self &self = m.job.plan.self;
    const int rank = rank_of_role(self, source_role(m, walk));
    const int32_t begin = m.first + received_before(m, walk.step);
    const int32_t stop = min(feed.end, m.first + received_before(m, walk.step + 1));
    if (begin >= stop && FAST) feed.pass(max(Pieces(m, walk).count, 1));
    for (int32_t token = begin; token < stop; token++) {
        if (token > begin)
            word = FLAT ? peek_row(m, rank, token) : peek_record(m, rank, token, 0);
        if (!receive<Given, FAST, FLAT>(m, token, walk, word, FAST && token == begin, feed))
            return false;
        if (source_role(m, walk) == self.num_ranks && slab_bits >= 0)
            each_pad(m.plan, slab_bits, token * m.stride.spans + walk.span,
                     m.most_tokens * m.stride.spans, [&](int32_t slot) {
                         for (int i = 0; i < m.shape.pieces; i++) pad_string(m, slot, i);
                     });
    }
    return true;
}

/* One round: tokens [m.first, end) of every rank. */
template <class Given, bool FAST, bool FLAT>
__device__ __forceinline__ bool move_tokens(Strings &m, int32_t end, const uint8_t *memory)
{
    const auto peek = [&](int rank, int32_t token) {
        return FLAT ? peek_row(m, rank, token) : peek_record(m, rank, token, 0);
    };
    bool heard_tokens = !m.made;
    int slab_bits = NOT_KNOWN;
    if (m.head) send_head<Given, FAST>(m);
    Walk next(m.stride);
    next.step += m.head;
    Feed<Given> feed(m, next, end, memory);
    for (int i = 0; i < Feed<Given>::RowRing::AHEAD && FAST; i++) feed.copy_next();
    uint64_t next_word = read_ahead(m, next, peek);
    for (;;) {
        const Walk walk = next;
        const uint64_t word = next_word;
        if (m.first + received_before(m, walk.step) >= feed.end) return true;
        next.next(m.stride);
        next_word = read_ahead(m, next, peek);
        if (walk.role == 0) {
            send_unit<Given, FAST>(m, walk, word, feed);
            continue;
        }
        if (!heard_tokens) {
            if (!hear_tokens(m)) return false;
            feed.end = min(feed.end, m.most_tokens);
            heard_tokens = true;
        }
#ifdef EPIC_HOSTS
        if (hands_on(m, walk)) {
            if (!hand_on(m, walk, feed, FAST,
                         [&](int from, int32_t its_token, int piece, uint32_t wants) {
                             return hand_on_string<Given>(m, from, its_token, piece, wants);
                         }))
                return false;
            continue;
        }
#endif
        if (slab_bits == NOT_KNOWN && source_role(m, walk) == m.job.plan.self.num_ranks &&
            !find_slabs(m, slab_bits))
            return false;
        if (!receive_unit<Given, FAST, FLAT>(m, walk, word, slab_bits, feed)) return false;
    }
}

template <class Given, bool FAST, bool FLAT>
__device__ __forceinline__ bool move_rounds(Strings &m, Now &now, const uint8_t *memory)
{
    const int64_t round_tokens =
        m.job.plan.self.at.source_bytes / ((int64_t)m.shape.vectors * 16);
    const int32_t most = m.most_tokens;
    for (m.first = 0;; m.first += (int32_t)round_tokens) {
        const bool last = m.made || m.first + round_tokens >= most;
        const int32_t end = last ? most : m.first + (int32_t)round_tokens;
        const bool moved = move_tokens<Given, FAST, FLAT>(m, end, memory);
        wait_copies<0>();
        if (!moved) return false;
        if (last) return true;
        if (!next_round(now)) return false;
    }
}

/* All CTAs: the padding of the slabs, when there are few tokens. */
__device__ __forceinline__ bool pad_all(Strings &m)
{
    if (m.plan.header.alignment <= 1) return true;
    if (m.made && !hear_tokens(m)) return false;
    if (pads_beside(m.plan, m.stride, m.most_tokens)) return true;
    if (m.made && !wait_for_plan(m)) return false;
    const int warps = (int)(grid_threads() / WARP), warp = (int)(grid_thread() / WARP);
    if (header_of(m)->result == EPIC_OK)
        each_pad_piece(m.plan, header_of(m)->owned, m.shape.pieces, warp, warps,
                       [&](int32_t slot, int piece) { pad_string(m, slot, piece); });
    return true;
}

/* FAST: rows are aligned vectors, to be quantized of 16-bit elements. */
template <class Given, bool FAST, bool MADE, bool FLAT>
__global__ void __launch_bounds__(BLOCK, 1)
    dispatch_strings_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ Now now;
    __shared__ Plan plan;
    __shared__ Planner planner;
    __shared__ Stride stride;
    const p2p_self &self = job.plan.self;
    const RowShape shape = string_shape(job, FAST);
    const int spans = (shape.pieces + job.span - 1) / job.span;
    if (threadIdx.x == 0) stride.set(job.units, num_roles(self) + num_handing(self), spans);
    open_plan<MADE>(plan, job);
    if (!begin(now, self, MADE ? 0 : (uint32_t)plan.header.id, job.num_tokens,
               job.plan.capacity, job.recv_rows))
        return;
    bool ok = make_own_plan<MADE, FLAT>(planner, job, now, memory);
    Move move = {{job, now, plan, stride, shape, policy_once(), 0, (int)plan.header.top_k}};
    move.made = MADE;
#ifdef EPIC_HOSTS
    move.handing = num_handing(self);
#endif
    move.head = MADE && job.plan.planners < (int)gridDim.x ? job.head : 0;
    move.tokens_of = !MADE && lane_id() < self.num_ranks ? plan.header.tokens_of[lane_id()] : 0;
    move.most_tokens = MADE ? (int32_t)self.max_tokens : plan.most_tokens;
    Strings m = {move};
    describe_strings(m, spans);
    if (ok && (MADE || plan.header.result == EPIC_OK))
        ok = move_rounds<Given, FAST, FLAT>(
                 m, now, memory + threadIdx.x / WARP * Feed<Given>::RowRing::BYTES) &&
             pad_all(m);
    if (ok && job.zero_tail && plan.good) ok = clear_tail<FLAT>(m);
    if (finish(now) && ok) clear_all<FLAT>(m);
}

static const Kernel kernels[] = {dispatch_strings_kernel<Joined, false, false, false>,
                                 dispatch_strings_kernel<Joined, false, true, false>,
                                 dispatch_strings_kernel<Joined, true, false, false>,
                                 dispatch_strings_kernel<Joined, true, true, false>,
                                 dispatch_strings_kernel<Made, false, false, false>,
                                 dispatch_strings_kernel<Made, false, true, false>,
                                 dispatch_strings_kernel<Made, true, false, false>,
                                 dispatch_strings_kernel<Made, true, true, false>,
                                 dispatch_strings_kernel<Joined, false, false, true>,
                                 dispatch_strings_kernel<Joined, false, true, true>,
                                 dispatch_strings_kernel<Joined, true, false, true>,
                                 dispatch_strings_kernel<Joined, true, true, true>,
                                 dispatch_strings_kernel<Made, false, false, true>,
                                 dispatch_strings_kernel<Made, false, true, true>,
                                 dispatch_strings_kernel<Made, true, false, true>,
                                 dispatch_strings_kernel<Made, true, true, true>};

extern "C" cudaError_t p2p_load_dispatch_strings(void)
{
    return load_kernels(kernels, memory_bytes(planner_most_bytes()));
}

extern "C" cudaError_t p2p_launch_dispatch_strings(const p2p_dispatch_job *job, int num_sms,
                                                   cudaStream_t stream)
{
    const bool fast = job->aligned && (!job->quantize || job->type != EPIC_F32);
    const p2p_dispatch_job copy =
        dealt(*job, p2p_string_bytes(job->row_bytes, job->scale_bytes), num_sms);
    const Kernel kernel = kernels[(job->flat != 0) * 8 + (job->quantize != 0) * 4 + fast * 2 +
                                  (copy.plan.planners > 0)];
    return launch_dealt(kernel, copy, num_sms, stream);
}
