/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch, and plan with dispatch: rows of tokens to the slots of their experts.
 *   tokens  [num_tokens, row_bytes]   one warp moves a piece of a row, V * 16 bytes a lane
 *   recv    [recv_rows, row_bytes]    every slot of the plan, padding as zeros
 *
 * A row goes once to each peer that owns one of its experts, into the peer's staging, and from
 * there to all of its slots.  One list of units is dealt to all warps in turn; step i of it is
 *   send token i to every peer that needs it,
 *   receive token i - lag of each source; this rank's own tokens count as a source.
 * What a receive waits for was sent `lag` steps earlier in every rank's list: no wait is
 * circular.  Sending needs the token's own choices only: while some CTAs make the plan, the
 * others send the first `head` tokens, and receiving catches up on that later.
 *
 * Pieces are copied into a ring in shared memory ahead of their use.  A staged one may be copied
 * before it has come: then poison is found, and it is polled in place. */
#include "cuda/launch.cuh"
#include "cuda/planner.cuh"
#include "cuda/staging.cuh"

#define BLOCK 512
static constexpr int V = 4; /* the same on all ranks, which cut rows alike */

struct Move { /* what every unit of the running round needs */
    const p2p_dispatch_job &job;
    const Now &now;
    const Plan &plan;
    const Stride &stride;
    RowShape shape;
    uint64_t policy;
    int32_t first;     /* token of the round */
    int32_t head;      /* tokens that are sent while the plan is made */
    int32_t tokens_of; /* of the rank that this lane's number says */
    int32_t most_tokens;
    int32_t top_k;
    bool made; /* the plan is made beside the rows */
};

/* What decides where choice k of this rank's token goes: its rank, or while the plan is being
 * made its expert. */
__device__ __forceinline__ uint64_t read_choice(const Move &m, int32_t token, int k)
{
    const p2p_plan_job &plan = m.job.plan;
    const int64_t at = (int64_t)token * m.top_k + k;
    uint64_t word = ~0ull;
    if (k >= m.top_k)
        ;
    else if (!m.made)
        word = (uint32_t)__ldg(m.plan.rank_of + at);
    else if (plan.wide)
        word = (uint64_t)__ldg((const long long *)plan.topk_idx + at);
    else
        word = (uint32_t)__ldg((const int32_t *)plan.topk_idx + at);
    return word;
}

__device__ __forceinline__ bool goes_to(const Move &m, uint64_t word, int rank)
{
    const p2p_plan_job &plan = m.job.plan;
    if (!m.made) return (int32_t)word == rank;
    const int experts = plan.layer.num_experts, block = experts / plan.seat.num_ranks;
    if (word >= (uint64_t)experts) return false; /* negative ids are large */
    const int expert = (int)word;
    if (plan.rank_of_expert) return __ldg(plan.rank_of_expert + expert) == rank;
    return (uint32_t)(expert - rank * block) < (uint32_t)block;
}

/* Bit k: choice k of this rank's token goes to `rank`; the first 32 were read ahead. */
__device__ __forceinline__ uint64_t choices_to(const Move &m, int32_t token, int rank,
                                               uint64_t word)
{
    uint64_t chosen = __ballot_sync(ALL_LANES, goes_to(m, word, rank));
    if (m.top_k > WARP) {
        word = read_choice(m, token, WARP + lane_id());
        chosen |= (uint64_t)__ballot_sync(ALL_LANES, goes_to(m, word, rank)) << WARP;
    }
    return chosen;
}

/* The weight of choice k of this rank's token. */
__device__ __forceinline__ uint32_t read_weight(const Move &m, int32_t token, int k)
{
    uint32_t word = 0;
    if (k < m.top_k)
        word = __float_as_uint(__ldg(m.job.weights + (int64_t)token * m.top_k + k));
    return other_nan(word, F32::NAN_WORD);
}

/* Sends a piece, and with the first one the weights, to every peer that needs it. */
template <bool EXACT>
__device__ __forceinline__ void send(const Move &m, int32_t token, int piece, uint64_t word,
                                     uint4 (&q)[V])
{
    const p2p_seat &seat = m.job.plan.seat;
    const bool weighs = piece == 0 && m.job.weights, both = m.top_k > WARP;
    const uint64_t word2 = both ? read_choice(m, token, WARP + lane_id()) : ~0ull;
    const uint32_t weight = weighs ? read_weight(m, token, lane_id()) : 0;
    const uint32_t weight2 = weighs && both ? read_weight(m, token, WARP + lane_id()) : 0;
    const uint32_t mask = hide_poison<V>(q);
#pragma unroll 1
    for (int distance = 1; distance < seat.num_ranks; distance++) {
        const int rank = wrap(seat.rank + distance, seat.num_ranks);
        const int source = seat.num_ranks - 1 - distance; /* this rank, as the peer counts */
        const bool goes = goes_to(m, word, rank), goes2 = both && goes_to(m, word2, rank);
        const uint32_t first = __ballot_sync(ALL_LANES, goes);
        const uint32_t second = __ballot_sync(ALL_LANES, goes2);
        if (!(first | second)) continue;
        uint8_t *heap = seat.heap[rank];
        uint4 *staged = staged_in(m.now.outbox[rank], token - m.first, m.shape.vectors);
        send_piece<V, EXACT>(staged, piece * V * WARP, m.shape.vectors, q);
        if (mask)
            store_relaxed(escapes_of(seat, m.now, heap, source) +
                              ((int64_t)token * m.shape.pieces + piece) * WARP + lane_id(),
                          mask);
        if (!weighs) continue;
        uint32_t *to = floats_of(seat, m.now, heap, source) + (int64_t)token * m.top_k;
        if (goes) store_relaxed(to + __popc(first & lanes_below()), weight);
        if (goes2) store_relaxed(to + __popc(first) + __popc(second & lanes_below()), weight2);
    }
}

/* This lane's word of a half of a record, as it is now. */
__device__ __forceinline__ uint64_t peek_record(const Move &m, int rank, int32_t token,
                                                int half)
{
    const int k = half * WARP + lane_id();
    uint64_t word = ~0ull;
    if (k >= m.top_k)
        word = m.made ? 0 : ~0ull;
    else if (m.made)
        word = load_relaxed(record_words(m.job.plan.seat, m.now, rank, token, m.top_k) + k);
    else
        word = (uint32_t)__ldg(m.plan.records +
                               record_at(m.job.plan.seat, rank, token, m.top_k) + k);
    return word;
}

/* A half of a record: this lane's slot, or -1.  `more`: another half follows. */
__device__ __forceinline__ bool read_record(const Move &m, int rank, int32_t token, int half,
                                            bool keep, uint64_t word, int32_t &slot, bool &more)
{
    const int k = half * WARP + lane_id();
    if (!m.made) {
        slot = (int32_t)word;
        more = (half + 1) * WARP < m.top_k && __all_sync(ALL_LANES, slot >= 0);
        return true;
    }
    const uint64_t *words = record_words(m.job.plan.seat, m.now, rank, token, m.top_k);
    if (!take_record(m.now, words, m.top_k, half, rank, word, slot, more)) return false;
    const int64_t at = record_at(m.job.plan.seat, rank, token, m.top_k) + k;
    if (keep && k < m.top_k)
        ((int32_t *)m.plan.records)[at] = slot == (int32_t)RECORD_DISCARD ? -1 : slot;
    return true;
}

/* After the last half that has words, the rest of a long record is -1 in the plan. */
__device__ __forceinline__ void end_record(const Move &m, int rank, int32_t token, int half)
{
    const int64_t at = record_at(m.job.plan.seat, rank, token, m.top_k);
    for (int k = (half + 1) * WARP + lane_id(); k < m.top_k; k += WARP)
        ((int32_t *)m.plan.records)[at + k] = -1;
}

__device__ __forceinline__ uint32_t *weight_from(const Move &m, int source, int32_t token,
                                                 int n)
{
    return floats_of(m.job.plan.seat, m.now, m.now.heap, source) + (int64_t)token * m.top_k + n;
}

/* The weight of this lane's slot, read before the row is there; perhaps still poison. */
__device__ __forceinline__ uint32_t peek_weight(const Move &m, int rank, int source,
                                                int32_t token, int half, int32_t slot)
{
    const int n = half * WARP + lane_id();
    uint32_t word = 0;
    if (rank == m.job.plan.seat.rank) {
        const uint64_t choice = read_choice(m, token, lane_id());
        const int k = nth_bit(choices_to(m, token, rank, choice), n);
        if (slot >= 0)
            word = __float_as_uint(__ldg(m.job.weights + (int64_t)token * m.top_k + k));
    } else if (slot >= 0) {
        word = load_relaxed(weight_from(m, source, token, n));
    }
    return word;
}

__device__ __forceinline__ bool receive_weight(const Move &m, int rank, int source,
                                               int32_t token, int half, int32_t slot,
                                               uint32_t word)
{
    if (rank != m.job.plan.seat.rank) {
        uint32_t *from = weight_from(m, source, token, half * WARP + lane_id());
        bool again = false;
        const bool ok = wait_until(m.now, rank, P2P_PHASE_FLOAT, [&] {
            if (again && slot >= 0) word = load_relaxed(from);
            again = true;
            return __any_sync(ALL_LANES, slot >= 0 && word == POISON) == 0;
        });
        if (!ok) return false;
        if (slot >= 0) *from = POISON;
    }
    if (slot >= 0 && slot < m.job.recv_rows) m.job.recv_weight[slot] = __uint_as_float(word);
    return true;
}

template <bool EXACT>
__device__ __forceinline__ void fill_slots(const Move &m, int32_t vector, int32_t slot,
                                           const uint4 (&q)[V])
{
    uint32_t slots = __ballot_sync(ALL_LANES, slot >= 0 && slot < m.job.recv_rows);
    for (; slots; slots &= slots - 1) {
        const int32_t to = __shfl_sync(ALL_LANES, slot, __ffs(slots) - 1);
        store_piece<V, EXACT>(m.job.recv + row_offset(to, m.shape), vector, m.shape, q,
                              m.policy);
    }
}

/* `copied`: q is what the ring had. */
template <bool EXACT>
__device__ __forceinline__ bool receive(const Move &m, int32_t token, int piece, int source,
                                        uint64_t word, bool copied, uint4 (&q)[V])
{
    const p2p_seat &seat = m.job.plan.seat;
    const int rank = wrap(seat.rank + 1 + source, seat.num_ranks);
    if (token >= __shfl_sync(ALL_LANES, m.tokens_of, rank)) return true;
    int32_t slot;
    bool more = false;
    if (!read_record(m, rank, token, 0, piece == 0, word, slot, more)) return false;
    if (m.made && piece == 0 && !more) end_record(m, rank, token, 0);
    if (!__any_sync(ALL_LANES, slot >= 0)) return true;

    const int32_t vector = piece * V * WARP;
    const bool weighs = piece == 0 && m.job.weights;
    uint32_t weight = 0;
    if (rank == seat.rank) {
        if (!copied)
            load_piece_again<V, EXACT>(m.job.tokens + row_offset(token, m.shape), vector,
                                       m.shape, q);
        if (weighs) weight = peek_weight(m, rank, source, token, 0, slot);
    } else {
        if (weighs) weight = peek_weight(m, rank, source, token, 0, slot);
        uint4 *staged = staged_in(m.now.inbox[rank], token - m.first, m.shape.vectors);
        if (!take_piece<V, EXACT>(m.now, rank, staged, vector, m.shape.vectors, copied, q))
            return false;
        uint32_t *escape = escapes_of(m.job.plan.seat, m.now, m.now.heap, source) +
                           ((int64_t)token * m.shape.pieces + piece) * WARP;
        if (!unhide_poison<V>(m.now, rank, q, escape)) return false;
        restore_piece<V, EXACT>(staged, vector, m.shape.vectors);
    }
    for (int half = 0;; half++) {
        fill_slots<EXACT>(m, vector, slot, q);
        if (weighs && !receive_weight(m, rank, source, token, half, slot, weight)) return false;
        if (!more) return true;
        word = peek_record(m, rank, token, half + 1);
        if (!read_record(m, rank, token, half + 1, piece == 0, word, slot, more)) return false;
        if (weighs) weight = peek_weight(m, rank, source, token, half + 1, slot);
    }
}

template <bool EXACT>
__device__ __forceinline__ void pad_slots(const Move &m, int32_t token, int piece, int owned)
{
    each_pad(m.plan, owned, token, m.most_tokens, [&](int32_t slot) {
        if (slot >= m.job.recv_rows) return;
        zero_piece<V, EXACT>(m.job.recv + row_offset(slot, m.shape), piece * V * WARP, m.shape,
                             m.policy);
        if (piece == 0 && lane_id() == 0 && m.job.recv_weight) m.job.recv_weight[slot] = 0.0f;
    });
}

/* The plan that is made beside the rows is complete, its tables can be read. */
__device__ __forceinline__ bool wait_for_plan(const Move &m)
{
    const uint32_t *planned = &control_of(m.now)->planned;
    return wait_until(m.now, -1, P2P_PHASE_GRID, [&] {
        return __all_sync(ALL_LANES, load_acquire(planned) == m.now.epoch) != 0;
    });
}

__device__ __forceinline__ const volatile device_plan_header *header_of(const Move &m)
{
    return (const volatile device_plan_header *)m.job.plan.plan;
}

/* Tokens that are received before step i: `head` behind at first, `lag` in the end. */
__device__ __forceinline__ int32_t received_before(const Move &m, int32_t step)
{
    const int32_t behind = max(step - max(m.head, m.job.lag), 0);
    return min(behind + behind / 16, max(step - m.job.lag, 0));
}

/* Role 0 sends, role 1 + n receives from source n. */
__host__ __device__ __forceinline__ int num_roles(const p2p_seat &seat)
{
    return seat.num_ranks + 1;
}

/* The token of a unit, the first one if it receives several. */
__device__ __forceinline__ int32_t token_of(const Move &m, const Walk &walk)
{
    return m.first + (walk.role == 0 ? walk.step : received_before(m, walk.step));
}

/* What a unit needs first, read while the one before it is at work. */
__device__ __forceinline__ uint64_t read_ahead(const Move &m, const Walk &walk)
{
    const p2p_seat &seat = m.job.plan.seat;
    const int32_t token = token_of(m, walk);
    if (walk.role == 0)
        return token < m.job.num_tokens ? read_choice(m, token, lane_id()) : ~0ull;
    const int rank = wrap(seat.rank + walk.role, seat.num_ranks);
    return token < seat.max_tokens ? peek_record(m, rank, token, 0) : ~0ull;
}

/* Copies the piece of a unit of the round into the ring. */
template <bool EXACT>
__device__ __forceinline__ void copy_ahead(const Move &m, const Walk &walk, int32_t end,
                                           Ring<V, EXACT> &ring)
{
    const p2p_seat &seat = m.job.plan.seat;
    const int32_t token = token_of(m, walk);
    const bool staged = walk.role > 0 && walk.role < seat.num_ranks;
    const uint8_t *row = m.job.tokens + row_offset(token, m.shape);
    if (staged)
        row =
            (const uint8_t *)staged_in(m.now.inbox[wrap(seat.rank + walk.role, seat.num_ranks)],
                                       token - m.first, m.shape.vectors);
    if (token < (staged ? end : min(end, m.job.num_tokens)))
        ring.copy(row + lane_offset(walk.piece * V * WARP), walk.piece * V * WARP, m.shape,
                  false, m.policy);
    ring.filled_one();
}

/* The CTAs that do not plan send the first tokens meanwhile; with registers of its own. */
template <bool EXACT> static __device__ __noinline__ void send_head(const Move m)
{
    const int planners = m.job.plan.planners;
    const int warps = BLOCK / WARP, first = ((int)blockIdx.x - planners) * warps;
    const int units = min(m.head, m.job.num_tokens) * m.shape.pieces;
    if ((int)blockIdx.x < planners) return;
    for (int u = first + (int)threadIdx.x / WARP; u < units;
         u += ((int)gridDim.x - planners) * warps) {
        const int32_t token = u / m.shape.pieces, piece = u % m.shape.pieces;
        const uint64_t word = read_choice(m, token, lane_id());
        uint4 q[V];
        load_piece_again<V, EXACT>(m.job.tokens + row_offset(token, m.shape), piece * V * WARP,
                                   m.shape, q);
        send<EXACT>(m, token, piece, word, q);
    }
}

/* One receiving unit: the tokens of a step, one or two, of one source. */
template <bool EXACT>
__device__ __forceinline__ bool receive_step(const Move &m, const Walk &walk, int32_t end,
                                             uint64_t word, int owned, bool copied,
                                             uint4 (&q)[V])
{
    const int source = walk.role - 1, peers = m.job.plan.seat.num_ranks - 1;
    const int rank = wrap(m.job.plan.seat.rank + walk.role, peers + 1);
    const int32_t begin = m.first + received_before(m, walk.step);
    const int32_t stop = min(end, m.first + received_before(m, walk.step + 1));
    for (int32_t token = begin; token < stop; token++) {
        if (token > begin) word = peek_record(m, rank, token, 0);
        if (!receive<EXACT>(m, token, walk.piece, source, word, copied && token == begin, q))
            return false;
        if (source == peers && owned >= 0) pad_slots<EXACT>(m, token, walk.piece, owned);
    }
    return true;
}

/* One round: tokens [m.first, end) of every rank. */
template <bool EXACT>
__device__ __forceinline__ bool move_tokens(Move &m, int32_t end, const uint8_t *memory)
{
    const int peers = m.job.plan.seat.num_ranks - 1;
    const bool copied = m.shape.aligned;
    const int32_t round_end = end;
    bool heard_tokens = !m.made, tables = !m.made;
    int owned = m.made ? 0 : m.plan.header.owned;
    if (m.head) send_head<EXACT>(m);
    Ring<V, EXACT> ring(memory);
    Walk next(m.stride);
    next.step += m.head;
    Walk ahead = next;
    for (int i = 0; i < ring.AHEAD && copied; i++, ahead.next(m.stride))
        copy_ahead<EXACT>(m, ahead, round_end, ring);
    uint64_t next_word = read_ahead(m, next);
    for (;;) {
        const Walk walk = next;
        const uint64_t word = next_word;
        const int32_t sent = m.first + walk.step;
        if (m.first + received_before(m, walk.step) >= end) break;
        next.next(m.stride);
        next_word = read_ahead(m, next);
        uint4 q[V];
        if (copied) {
            copy_ahead<EXACT>(m, ahead, round_end, ring);
            ahead.next(m.stride);
            ring.use(q, walk.piece * V * WARP, m.shape);
        }
        if (walk.role == 0) {
            if (sent >= min(end, m.job.num_tokens)) continue;
            if (!copied)
                load_piece_again<V, EXACT>(m.job.tokens + row_offset(sent, m.shape),
                                           walk.piece * V * WARP, m.shape, q);
            send<EXACT>(m, sent, walk.piece, word, q);
            continue;
        }
        if (!heard_tokens) {
            if (!heard(m.now, P2P_SAYS_TOKENS, m.tokens_of)) return false;
            m.most_tokens = __reduce_max_sync(ALL_LANES, (uint32_t)m.tokens_of);
            end = min(end, m.most_tokens);
            heard_tokens = true;
        }
        if (!tables && walk.role == peers + 1) {
            if (!wait_for_plan(m)) return false;
            owned = header_of(m)->result == EPIC_OK ? header_of(m)->owned : -1;
            tables = true;
        }
        if (!receive_step<EXACT>(m, walk, end, word, owned, copied, q)) return false;
    }
    return true;
}

/* The last CTA: zeros everywhere, when nothing was moved. */
__device__ __forceinline__ void clear(const Move &m)
{
    if (m.plan.good && header_of(m)->result == EPIC_OK &&
        rows_suffice(m.job.plan.seat, m.now, header_of(m)))
        return;
    zero_rows(m.job.recv, m.shape.row_bytes, 0, m.job.recv_rows, threadIdx.x, BLOCK);
    zero_floats(m.job.recv_weight, 0, m.job.recv_rows, threadIdx.x, BLOCK);
}

/* All CTAs: zeros past the last slab. */
__device__ __forceinline__ bool clear_tail(const Move &m)
{
    if (m.made && !wait_for_plan(m)) return false;
    const int64_t first = header_of(m)->slots_of[m.job.plan.seat.rank], end = m.job.recv_rows;
    if (first >= end) return true;
    zero_rows(m.job.recv, m.shape.row_bytes, first, end, grid_thread(), grid_threads());
    zero_floats(m.job.recv_weight, first, end, grid_thread(), grid_threads());
    return true;
}

template <bool EXACT>
__device__ __forceinline__ bool move_rounds(Move &m, Now &now, const uint8_t *memory)
{
    const int64_t round_tokens =
        m.job.plan.seat.at.source_bytes / ((int64_t)m.shape.vectors * 16);
    const int32_t most = m.most_tokens;
    for (m.first = 0;; m.first += (int32_t)round_tokens) {
        const bool last = m.made || m.first + round_tokens >= most;
        const int32_t end = last ? most : m.first + (int32_t)round_tokens;
        const bool moved = move_tokens<EXACT>(m, end, memory);
        wait_copies<0>();
        if (!moved) return false;
        if (last) return true;
        if (!next_round(now)) return false;
    }
}

template <bool EXACT>
__global__ void __launch_bounds__(BLOCK, 1)
    dispatch_kernel(const __grid_constant__ p2p_dispatch_job job)
{
    uint8_t *const memory = (uint8_t *)dynamic_shared();
    __shared__ Now now;
    __shared__ Plan plan;
    __shared__ Planner planner;
    __shared__ Stride stride;
    const p2p_seat &seat = job.plan.seat;
    const bool made = job.plan.planners > 0;
    const RowShape shape = row_shape<V>(job.row_bytes, job.aligned);
    if (threadIdx.x == 0) stride.set(num_roles(seat), shape.pieces);
    if (made) {
        if (threadIdx.x == 0) {
            plan.header.num_experts = job.plan.layer.num_experts;
            plan.header.top_k = job.plan.layer.top_k;
            plan.header.alignment = job.plan.layer.alignment;
            plan.good = 1;
            point_into(plan, job.plan.plan, seat);
        }
    } else {
        read_plan(plan, job.plan.plan, job.plan_bytes, seat, job.num_tokens);
    }
    if (!begin(now, seat, made ? 0 : (uint32_t)plan.header.id, job.num_tokens,
               job.plan.capacity, job.recv_rows))
        return;
    bool ok = true;
    if ((int)blockIdx.x < job.plan.planners) {
        ok = make_plan(planner, job.plan, now, memory);
        ok = __syncthreads_and(ok); /* the memory becomes the rings' */
    }

    Move m = {job, now, plan, stride, shape, policy_once()};
    m.made = made;
    m.head = made && job.plan.planners < (int)gridDim.x ? job.head : 0;
    m.top_k = plan.header.top_k;
    m.tokens_of = !made && lane_id() < seat.num_ranks ? plan.header.tokens_of[lane_id()] : 0;
    m.most_tokens = made ? (int32_t)seat.max_tokens : plan.most_tokens;
    if (ok && (made || plan.header.result == EPIC_OK))
        ok = move_rounds<EXACT>(m, now, memory + threadIdx.x / WARP * Ring<V, EXACT>::BYTES);
    if (ok && job.zero_tail && plan.good) ok = clear_tail(m);
    if (finish(now) && ok) clear(m);
}

typedef void (*Kernel)(p2p_dispatch_job);

static const Kernel kernels[] = {dispatch_kernel<false>, dispatch_kernel<true>};

static int memory_bytes(int planning)
{
    const int rings = BLOCK / WARP * Ring<V, true>::BYTES;
    return planning > rings ? planning : rings;
}

extern "C" cudaError_t p2p_load_dispatch(void)
{
    for (Kernel kernel : kernels) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 memory_bytes(planner_bytes(DEVICE_MAX_EXPERTS)));
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

extern "C" cudaError_t p2p_launch_dispatch(const p2p_dispatch_job *job, int num_sms,
                                           cudaStream_t stream)
{
    const bool exact = job->aligned && job->row_bytes % (V * 512) == 0;
    const int roles = num_roles(job->plan.seat);
    num_sms = even_deal(num_sms, BLOCK / WARP, roles, job->row_bytes, V);
    p2p_dispatch_job copy = *job;
    if (copy.plan.planners > num_sms) copy.plan.planners = num_sms;
    const int planning = copy.plan.planners ? planner_bytes(job->plan.layer.num_experts) : 0;
    return enqueue(kernels[exact], num_sms, BLOCK, memory_bytes(planning), stream, copy);
}
