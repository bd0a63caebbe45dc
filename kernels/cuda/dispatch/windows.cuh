/* SPDX-License-Identifier: Apache-2.0 */
/* How dispatch stores rows into windows of peers. A window is memory of a rank into which its
 * peers store rows directly, without staging.
 *
 * This file has the functions that only windows.cu needs. stream.cuh has those that dispatch.cu
 * needs, too. A row of source rank s goes directly to its slot on rank d if all of these
 * conditions hold:
 *
 *   - both ranks run a kernel of windows.cu, and `recv` of d lies in a window
 *   - the token has exactly one slot on d. In layout FLAT this is always so
 *   - the kernel of s has the plan before it sends the token. If it also makes the plan, its
 *     first tokens go through staging (job.num_early_tokens)
 *   - the plan is valid
 *
 * All other rows go through staging. s counts the choices of the token whose experts are on d,
 * and d counts the slots of the token. The two numbers are equal, so both ranks come to the
 * same decision. Weights and local experts go through the heap in any case.
 *
 * The memory order is shown below. n is the epoch. In the kernel of d, "announce" is the first
 * warp of the last CTA, and "end" is the first warp of CTA 0. In the kernel of s, "open" is the
 * first warp of each CTA.
 *
 *   d, announce   stores {n, early} (job.num_early_tokens) and the place of `recv`, executes a
 *                 system fence, then stores the signature of epoch n. Earlier kernels of d have
 *                 ended
 *   s, open       polls the signature, executes a system fence, reads the place and `early`.
 *                 A barrier of the CTA follows. So all stores of s come after everything that
 *                 d did with its window before this call
 *   s, all warps  store rows into the window of d, in any order
 *   s, end of     after a barrier of the CTA and a system fence, one thread increments
 *   each CTA      num_stored. The thread that counts the last CTA executes another system fence
 *                 and stores {n, 1} to the word `stored` of d
 *   d, end        polls the words `stored` of its sources, and executes a system fence. Fences
 *                 are cumulative: d, and later kernels on its stream, see all rows
 *
 * The word `stored` has two halves, for even and odd epochs, like all words that peers write. If
 * an operation has several rounds, it stores the word in the epoch of the last one.
 *
 * A rank that runs another kernel does not store {n, early}. A peer that has read its signature
 * finds the stamp of an older epoch, and sends and expects all rows through staging.
 *
 * Ranks cannot wait for each other in a circle. Every kernel announces before it waits. A CTA
 * counts itself in num_stored when it has sent and received all its rows. For this it needs no
 * word `stored`. */
#ifndef EPIC_DISPATCH_WINDOWS_CUH
#define EPIC_DISPATCH_WINDOWS_CUH

#include "cuda/dispatch/stream.cuh"

/* Places and sizes of the windows of all ranks. Each CTA has a copy in shared memory. */
struct WindowState {
    /* for each rank, the address of its `recv`, as this rank has mapped it */
    uint8_t *recv[DEVICE_MAX_RANKS];
    /* for each rank, how many rows of that buffer this rank may store to */
    int32_t rows[DEVICE_MAX_RANKS];
    /* for each rank, how many of its first tokens always go through staging */
    int32_t num_early_tokens[DEVICE_MAX_RANKS];
    /* Bit masks of ranks. targets: the ranks whose `recv` lies in a window. sources: the ranks
     * that store into the `recv` of this rank. Neither mask contains this rank, or a rank that
     * does not run a kernel of windows.cu. */
    uint32_t targets, sources;
    /* the ranks into whose windows this rank stores (bit mask): `targets`, or 0 if the plan is
     * invalid */
    uint32_t stores;
    uint32_t is_open; /* 1 after open_windows() */
};

/* Like DispatchMove, for kernels that store into windows. */
struct WindowMove : DispatchMove {
    WindowState &windows;
    /* [num_tokens, top_k]: slot of each choice of this rank's tokens */
    const int32_t *slot_of;
    bool flat; /* the plan is FLAT */
};

/* Returns the part of a heap for windows. `heap`: base address of the heap. */
__device__ __forceinline__ p2p_window_area *window_area(const p2p_self &self, uint8_t *heap)
{
    return (p2p_window_area *)(heap + p2p_window_area_at(&self.at));
}

/* Stores to all ranks where the output of this rank lies, and how many tokens it sends through
 * staging in any case. Called by the warp that later announces the operation, before
 * begin_operation(). The fence of announce_operation() orders these words before the
 * signature. */
__device__ __forceinline__ void announce_windows(const p2p_self &self, int32_t num_early_tokens,
                                                 uint64_t place)
{
    if (lane_id() >= self.num_ranks || self.operation == EPIC_OP_NONE || read_broken(self))
        return;
    const uint32_t epoch = epoch_after(load_relaxed(&control_of(self)->epoch));
    p2p_window_words *to =
        &window_area(self, self.heap[lane_id()])->announced[epoch & 1][self.rank];
    store_relaxed(&to->places[0], place);
    store_relaxed(&to->begun, (uint64_t)epoch << 32 | (uint32_t)num_early_tokens);
}

/* Waits until all planner CTAs of this rank have made their parts of the plan. Called by a whole
 * warp. Returns false if the group of ranks has failed. */
__device__ __forceinline__ bool wait_planners(const WindowMove &m)
{
    const uint32_t *planned = &window_area(m.job.plan.self, m.op.heap)->num_planned;
    return wait_for_plan(m) && wait_warp(m.op, -1, P2P_PHASE_GRID, [&] {
               return __all_sync(ALL_LANES,
                                 load_acquire(planned) == (uint32_t)m.job.plan.planners) != 0;
           });
}

/* Sets the WindowState of this CTA. Lane q reads the words that rank q has announced about its
 * window, and sets the elements of rank q. Called by one warp, after the announcements of all
 * ranks have arrived. */
__device__ __forceinline__ void read_windows(const WindowMove &m)
{
    const p2p_self &self = m.job.plan.self;
    WindowState &w = m.windows;
    const int q = lane_id();
    const bool is_peer = q < self.num_ranks && q != self.rank;
    uint64_t begun = 0, place = 0;
    if (is_peer) {
        const p2p_window_words *words =
            &window_area(self, m.op.heap)->announced[epoch_parity(m.op)][q];
        begun = load_relaxed(&words->begun);
        place = load_relaxed(&words->places[0]);
    }
    const bool stores = is_peer && is_stamped(m.op, begun);
    if (stores && place) {
        const uint64_t number = (place >> P2P_WINDOW_PLACE_BITS) - 1;
        const int64_t offset = (int64_t)(place & ((1ull << P2P_WINDOW_PLACE_BITS) - 1));
        const uint64_t *entry =
            (const uint64_t *)(m.job.windows + number % P2P_MAX_WINDOWS * DEVICE_MAX_RANKS + q);
        uint8_t *const at = (uint8_t *)load_relaxed(entry);
        const int64_t bytes = at ? (int64_t)load_relaxed(entry + 1) : 0;
        const uint64_t announced =
            load_relaxed(announcement_words(self, m.op, m.op.heap, q) + P2P_ANNOUNCED_ROWS);
        /* The place may be damaged, so check it: this rank must never write outside of the
         * window. */
        const bool fits =
            number < P2P_MAX_WINDOWS && offset <= bytes && ((uintptr_t)at + offset) % 16 == 0;
        const int64_t rows = fits ? (bytes - offset) / m.shape.row_bytes : 0;
        w.recv[q] = at + offset;
        w.rows[q] = (int32_t)min(rows, (int64_t)(int32_t)(uint32_t)announced);
    }
    w.num_early_tokens[q] = (int32_t)(uint32_t)begun;
    const uint32_t sources = __ballot_sync(ALL_LANES, stores),
                   targets = __ballot_sync(ALL_LANES, stores && place);
    if (q != 0) return;
    w.sources = m.job.recv_place ? sources : 0;
    w.targets = targets;
    w.stores = header_of(m)->result == EPIC_OK ? targets : 0;
    w.is_open = 1;
}

/* Waits until the plan exists and all ranks have announced this operation. Then reads where
 * their windows are. Does nothing in later rounds. Called by all threads of a CTA. Returns false
 * if the group of ranks has failed. */
__device__ __forceinline__ bool open_windows(const WindowMove &m)
{
    bool ok = true;
    if (m.round_begin) return true;
    if (threadIdx.x < WARP) {
        ok = (!m.has_new_plan || wait_planners(m)) && wait_announcements(m.op);
        if (ok) read_windows(m);
    }
    return __syncthreads_and(ok) != 0;
}

/* Counts this CTA among those that have stored their rows. The last CTA reports to all targets
 * that this rank has stored all its rows. CTA 0 waits until all sources have reported the same
 * to this rank. Called by all threads of all CTAs. If a wait is given up, finish_operation() reports
 * it. */
static __device__ void close_windows(const WindowMove &m)
{
    const p2p_self &self = m.job.plan.self;
    const WindowState &w = m.windows;
    p2p_window_area *area = window_area(self, m.op.heap);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(&area->num_stored, 1u) == gridDim.x - 1) {
            area->num_stored = area->num_planned = 0;
            __threadfence_system();
            for (uint32_t left = w.targets; left; left &= left - 1) {
                const int q = __ffs(left) - 1;
                store_relaxed(
                    &window_area(self, self.heap[q])->stored[epoch_parity(m.op)][self.rank],
                    stamp_word(m.op, 1));
            }
        }
    }
    if (blockIdx.x != 0 || threadIdx.x >= WARP) return;
    __syncwarp();
    const int q = lane_id();
    const bool waits = w.sources >> q & 1;
    const uint64_t *stored = &area->stored[epoch_parity(m.op)][q];
    (void)wait_warp(m.op, waits ? q : -1, P2P_PHASE_ROW, [&] {
        return __all_sync(ALL_LANES, !waits || is_stamped(m.op, load_relaxed(stored))) != 0;
    });
    fence_system();
}

/* Returns the rank and the slot of choice k of this rank's token, from the plan: the rank in
 * the low 32 bits, the slot in the high ones. All bits are 1 if there is no choice k. */
__device__ __forceinline__ uint64_t read_placed_choice(const WindowMove &m, int32_t token,
                                                       int k)
{
    const int64_t at = (int64_t)token * m.top_k + k;
    if (k >= m.top_k) return ~0ull;
    /* This kernel may have written the plan, so the loads must not use the read-only cache. */
    return (uint64_t)(uint32_t)__ldcg(m.slot_of + at) << 32 |
           (uint32_t)__ldcg(m.plan.rank_of + at);
}

/* Like read_ahead() of dispatch.cuh. But if the unit sends, returns read_placed_choice(). */
template <class Peek>
__device__ __forceinline__ uint64_t read_ahead(const WindowMove &m, const UnitWalk &walk,
                                               Peek peek)
{
    const int32_t token = token_of(m, walk);
    if (walk.role != 0) return read_ahead((const DispatchMove &)m, walk, peek);
    return token < m.job.num_tokens && m.windows.stores
               ? read_placed_choice(m, token, lane_id())
           : token < m.job.num_tokens ? read_choice(m, token, lane_id())
                                      : ~0ull;
}

/* The peers to which a unit sends pieces of a token, and how. */
struct SendTargets {
    /* Bit masks of peers. staged: the row goes to them through staging. direct: the row is
     * stored into their windows. */
    uint32_t staged, direct;
    int32_t slot; /* in lane q, if q is in `direct`: the token's slot on rank q */
};

/* Like choose_peers(), but also decides which peers get the row directly. `word`: this lane's
 * choice, from read_placed_choice(). Called by a whole warp. */
__device__ __forceinline__ SendTargets choose_targets(const WindowMove &m, int32_t token,
                                                      bool with_weights, uint64_t word)
{
    const p2p_self &self = m.job.plan.self;
    const bool both = m.top_k > WARP;
    const uint64_t word2 = both ? read_placed_choice(m, token, WARP + lane_id()) : ~0ull;
    const uint32_t weight = with_weights ? read_weight(m, token, lane_id()) : 0;
    const uint32_t weight2 = with_weights && both ? read_weight(m, token, WARP + lane_id()) : 0;
    SendTargets to = {0, 0, -1};
#pragma unroll 1
    for (int distance = 1; distance < self.num_ranks; distance++) {
        const int rank = wrap_rank(self.rank + distance, self.num_ranks);
        const bool goes = (int32_t)word == rank, goes2 = both && (int32_t)word2 == rank;
        const uint32_t first = __ballot_sync(ALL_LANES, goes);
        const uint32_t second = __ballot_sync(ALL_LANES, goes2);
        if (!(first | second)) continue;
        const bool is_single = m.flat || __popc(first) + __popc(second) == 1;
        if (is_single && (m.windows.stores >> rank & 1)) {
            const int32_t slot = __shfl_sync(ALL_LANES, (int32_t)((first ? word : word2) >> 32),
                                             __ffs(first ? first : second) - 1);
            if (lane_id() == rank) to.slot = slot;
            to.direct |= 1u << rank;
        } else {
            to.staged |= 1u << rank;
        }
        if (!with_weights) continue;
        const int source = self.num_ranks - 1 - distance;
        uint32_t *floats = floats_base(self, m.op, self.heap[rank], source) +
                           (int64_t)token * float_stride(m.top_k);
        if (goes) store_relaxed(floats + __popc(first & lanes_below()), weight);
        if (goes2)
            store_relaxed(floats + __popc(first) + __popc(second & lanes_below()), weight2);
    }
    return to;
}

/* Stores a piece of a row to the slots of all ranks in `to.direct`. A slot beyond the rows of
 * the rank's buffer is left out; the rank then reports that its buffer is too small. Called by a
 * whole warp. */
template <bool EXACT>
__device__ __forceinline__ void store_to_windows(const WindowMove &m, const SendTargets &to,
                                                 int piece, const uint4 (&q)[V])
{
#pragma unroll 1
    for (uint32_t left = to.direct; left; left &= left - 1) {
        const int rank = __ffs(left) - 1;
        const int32_t slot = __shfl_sync(ALL_LANES, to.slot, rank);
        if ((uint32_t)slot >= (uint32_t)m.windows.rows[rank]) continue;
        send_piece<V, EXACT>((uint4 *)(m.windows.recv[rank] + row_offset(slot, m.shape)),
                             piece * V * WARP, m.shape.vectors, q);
    }
}

/* Like send_unit() of stream.cuh, but stores the pieces into windows (memory of peers, without
 * staging) where that is possible. */
template <bool EXACT>
__device__ __forceinline__ void send_unit(const WindowMove &m, const UnitWalk &walk,
                                          uint64_t word, PieceFeed<EXACT, WindowMove> &feed)
{
    const int32_t token = m.round_begin + walk.step;
    const int count = pieces_of(m, walk);
    const bool with_weights = walk.span == 0 && m.job.weights;
    SendTargets to = {0, 0, -1};
    if (token < min(feed.round_end, m.job.num_tokens)) {
        if (m.windows.stores)
            to = choose_targets(m, token, with_weights, word);
        else
            to.staged = choose_peers(m, token, with_weights, word);
    }
    if (!(to.staged | to.direct)) {
        feed.skip_pieces(count);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const int piece = first_piece(m, walk) + i;
        uint4 q[V];
        feed.read_piece(q, piece * V * WARP);
        store_to_windows<EXACT>(m, to, piece, q);
        if (to.staged) send_to_peers<EXACT>(m, token, piece, to.staged, q);
    }
}

/* Does for windows.cu what stream.cuh describes: returns true if the row of a token of `rank` is
 * stored into a window of this rank. Called by a whole warp. */
__device__ __forceinline__ bool is_stored_directly(const WindowMove &m, int rank, int32_t token,
                                                   int32_t slot, bool more)
{
    if (!(m.windows.sources >> rank & 1) || token < m.windows.num_early_tokens[rank] || more)
        return false;
    const bool is_slot = slot >= 0 && slot != (int32_t)RECORD_DISCARD;
    return __popc(__ballot_sync(ALL_LANES, is_slot)) == 1;
}

/* Does for windows.cu what stream.cuh describes: returns true if it is known without the token's
 * record that its row does not arrive in staging. That is so if a token can have only one slot
 * on a rank. */
__device__ __forceinline__ bool expects_no_row(const WindowMove &m, int rank, int32_t token)
{
    return (m.windows.sources >> rank & 1) && token >= m.windows.num_early_tokens[rank] &&
           (m.flat || m.top_k == 1);
}

#endif
