/* SPDX-License-Identifier: Apache-2.0 */
/* Implements direct dispatch, in which ranks store rows into windows of their peers, without
 * staging (net/windows.cuh). In a direct dispatch every token has at most one slot on each
 * rank, because the layer has one choice per token (top-1) or its layout is FLAT.
 *
 *   remote CTAs   the last CTAs of the grid. They store rows and weights to peers
 *   local CTAs    the other CTAs. They copy rows to slots of this rank, write padding, receive
 *                 the data that is not a row (weights, local experts and, for a new plan,
 *                 records), and receive the rows of early tokens from staging
 *
 *   if there is only one CTA, it is both a remote CTA and a local CTA
 *
 * Early tokens are the tokens that were sent through staging while the plan was made
 * (job.num_early_tokens). */
#ifndef EPIC_DISPATCH_WINDOWS_CUH
#define EPIC_DISPATCH_WINDOWS_CUH

#include "cuda/dispatch/list_rows.cuh"
#include "cuda/dispatch/stream.cuh"

/* Arguments that all functions of direct dispatch share. */
struct WindowMove : DispatchMove {
    WindowState &windows;
    /* [num_tokens, top_k]: slot of each choice of this rank's tokens */
    const int32_t *slot_of;
};

/* Replaces send_early() of stream.cuh. Does nothing, because the kernel has already called
 * send_early_tokens(). */
template <bool EXACT> __device__ __forceinline__ void send_early(const WindowMove &)
{
}

/* Waits until all planner CTAs of this rank have made their parts of the plan. Called by a
 * whole warp. Returns false if the group has failed. */
__device__ __forceinline__ bool wait_planners(const WindowMove &m)
{
    const uint32_t *planned = &window_area(m.job.plan.self, m.op.heap)->num_planned;
    return wait_for_plan(m) && wait_warp(m.op, -1, P2P_PHASE_GRID, [&] {
               return __all_sync(ALL_LANES,
                                 load_acquire(planned) == (uint32_t)m.job.plan.planners) != 0;
           });
}

/* Waits until the plan exists and all peers have sent their permits. Called by all threads of a
 * CTA. Returns false if the group has failed. */
__device__ __forceinline__ bool open_windows(const WindowMove &m)
{
    bool ok = true;
    if (threadIdx.x < WARP)
        ok = (!m.has_new_plan || wait_planners(m)) &&
             read_permits(m.job.plan.self, m.op, m.windows, m.job.windows, m.shape.row_bytes,
                          header_of(m)->result == EPIC_OK);
    return __syncthreads_and(ok) != 0;
}

/* -------------------------------------------------------------------------------- rows ---- */

/* Sends the weight of choice k of `token`, a token of this rank, to the peer `rank`. `n`: index
 * of this choice among the token's choices that go to this peer. */
__device__ __forceinline__ void send_weight(const WindowMove &m, int32_t token, int k, int rank,
                                            int n)
{
    const p2p_self &self = m.job.plan.self;
    const int source = wrap_rank(self.rank + self.num_ranks - rank - 1, self.num_ranks);
    uint32_t *to = floats_base(self, m.op, self.heap[rank], source) +
                   (int64_t)token * float_stride(m.top_k);
    store_relaxed(to + n, read_weight(m, token, k));
}

/* Copies the rows of this rank's tokens. A team is all remote CTAs or all local CTAs. The
 * remote team copies rows to peers, the local team to slots of this rank. Early tokens are not
 * sent to peers, because they have already been sent. Called by all threads of the CTAs of a
 * team. */
static __device__ __noinline__ void copy_tokens(const WindowMove &m, RowList<BLOCK> &list,
                                                const CopyTeam team)
{
    const int32_t first = team.is_remote ? min(m.num_early_tokens, m.job.num_tokens) : 0;
    const auto send = [&](int32_t token, int k, int rank, int n) {
        if (team.is_remote && m.job.weights) send_weight(m, token, k, rank, n);
    };
    copy_items(
        m.windows, team, list, m.job.num_tokens - first, BLOCK / m.top_k, m.job.tokens,
        m.job.recv, m.shape, m.policy,
        [&](int64_t begin, int64_t end) {
            list_rows(m, m.job.plan.self, m.windows, list, m.slot_of, m.job.recv_rows,
                      team.is_remote, first + (int32_t)begin, first + (int32_t)end, send);
        },
        [](const ListedRow &, uint4(&)[PART_V]) {});
}

/* ---------------------------------------------------------------------------- the rest ---- */

/* `token` is a token of rank rank_of_role(role). Receives the data that comes with the row of
 * this token: the record, the weights and, with FLAT, the local experts. If the token was sent
 * early, also receives its row from staging. Called by one warp. Returns false if the group has
 * failed. */
template <bool EXACT, bool FLAT>
__device__ __forceinline__ bool receive_one(const WindowMove &m, int role, int32_t token)
{
    const p2p_self &self = m.job.plan.self;
    const int source = role - 1, rank = rank_of_role(self, role);
    const uint64_t word = FLAT ? peek_row(m, rank, token) : peek_record(m, rank, token, 0);
    int32_t slot;
    bool more;
    if (!(FLAT ? read_row(m, rank, token, true, word, slot, more)
               : read_record(m, rank, token, 0, true, word, slot, more)))
        return false;
    if (!FLAT && m.has_new_plan && !more) end_record(m, rank, token, 0);
    if (!__any_sync(ALL_LANES, slot >= 0)) return true;
    const bool with_weights = !FLAT && m.job.weights;
    const bool is_staged = rank != self.rank && token < m.windows.num_early_tokens[rank];
    FlatExtras extras;
    uint32_t weight = 0;
    if (FLAT) extras = peek_extras(m, rank, source, token, 0);
    if (with_weights) weight = peek_weight(m, rank, source, token, 0, slot);
#pragma unroll 1
    for (int piece = 0; piece < m.shape.pieces && is_staged; piece++) {
        uint4 q[V];
        if (!receive_row_piece<EXACT>(m, rank, source, token, piece, false, q)) return false;
        fill_slots<EXACT>(m, piece * V * WARP, slot, q);
    }
    if (FLAT)
        return receive_extras(m, rank, source, token, __shfl_sync(ALL_LANES, slot, 0), extras);
    return !with_weights || receive_weight(m, rank, source, token, 0, slot, weight);
}

/* Only for layers with one choice per token. Each lane passes its own `token`, a token of
 * `rank`. `exists`: false if rank `rank` has no token with this index. `slot` becomes the
 * token's slot on this rank, or -1 if the token has no slot on this rank. If the kernel makes
 * the plan, waits for the token's record, and copies it into the plan. Called by a whole warp.
 * Returns false if the group has failed. */
__device__ __forceinline__ bool read_single(const WindowMove &m, int rank, int32_t token,
                                            bool exists, int32_t &slot)
{
    const p2p_self &self = m.job.plan.self;
    const int64_t at = record_index(self, rank, token, 1);
    slot = -1;
    if (!m.has_new_plan) {
        if (exists) slot = __ldg(m.plan.records + at);
        return true;
    }
    const uint64_t *from = record_address(self, m.op, rank, exists ? token : 0, 1);
    uint64_t word = 0;
    const bool ok = wait_warp(m.op, rank, P2P_PHASE_RECORD, [&] {
        if (exists) word = load_relaxed(from);
        return __all_sync(ALL_LANES, !exists || is_stamped(m.op, word)) != 0;
    });
    const uint32_t value = (uint32_t)word & ~RECORD_LAST;
    if (ok && exists && value < RECORD_DISCARD) slot = (int32_t)value;
    if (ok && exists) ((int32_t *)m.plan.records)[at] = slot;
    return ok;
}

/* Each lane handles one token of rank rank_of_role(role): lane n handles token first + n.
 * Receives the data that comes with the rows of these tokens (record and weights). Requires
 * that the tokens have one choice each, and were not sent early. Called by a whole warp.
 * Returns false if the group has failed. */
__device__ __forceinline__ bool receive_singles(const WindowMove &m, int role, int32_t first)
{
    const int rank = rank_of_role(m.job.plan.self, role);
    const int32_t token = first + lane_id();
    const bool exists = token < __shfl_sync(ALL_LANES, m.tokens_of, rank);
    int32_t slot;
    if (!read_single(m, rank, token, exists, slot)) return false;
    if (!m.job.weights) return true;
    uint32_t weight = 0;
    if (rank == m.job.plan.self.rank) {
        if (slot >= 0) weight = __float_as_uint(__ldg(m.job.weights + token));
    } else {
        uint32_t *from = weight_address(m, role - 1, slot >= 0 ? token : 0, 0);
        const bool ok = wait_warp(m.op, rank, P2P_PHASE_FLOAT, [&] {
            if (slot >= 0) weight = load_relaxed(from);
            return __any_sync(ALL_LANES, slot >= 0 && weight == POISON) == 0;
        });
        if (!ok) return false;
        if (slot >= 0) *from = POISON;
    }
    if (slot >= 0 && slot < m.job.recv_rows) m.job.slot_weights[slot] = __uint_as_float(weight);
    return true;
}

/* Writes padding. Then receives the data that comes with rows, and the rows of early tokens.
 * `warp`: index of this warp among the `warps` warps of all local CTAs. Returns false if the
 * group has failed. */
template <bool EXACT, bool FLAT>
static __device__ __noinline__ bool receive_rest(WindowMove &m, int warp, int warps)
{
    const p2p_self &self = m.job.plan.self;
    if (m.has_new_plan && !read_token_counts(m)) return false;
    for_each_padding_piece(m.plan, header_of(m)->owned, m.shape.pieces, warp, warps,
                           [&](int32_t slot, int piece) { pad_piece<EXACT>(m, slot, piece); });
    if (!m.has_new_plan && !m.job.weights && !FLAT) return true;
    for (int role = 1; role <= self.num_ranks; role++) {
        const int rank = rank_of_role(self, role);
        const int32_t tokens = __shfl_sync(ALL_LANES, m.tokens_of, rank);
        const int32_t early = min(m.windows.num_early_tokens[rank], tokens);
        for (int32_t token = warp; token < (FLAT ? tokens : early); token += warps)
            if (!receive_one<EXACT, FLAT>(m, role, token)) return false;
        for (int32_t first = early + (warps - 1 - warp) * WARP; !FLAT && first < tokens;
             first += warps * WARP)
            if (!receive_singles(m, role, first)) return false;
    }
    return true;
}

/* Moves all rows of a direct dispatch. `memory`: dynamic shared memory. Called by all threads
 * of all CTAs. Returns false if the group has failed. */
template <bool EXACT, bool FLAT>
__device__ __forceinline__ bool move_directly(WindowMove &m, uint8_t *memory)
{
    RowList<BLOCK> &list = *(RowList<BLOCK> *)memory;
    const int local = copy_as_teams(m.job.plan.self, m.op, m.job.num_remote_ctas,
                                    [&](const CopyTeam &team) { copy_tokens(m, list, team); });
    return !local ||
           receive_rest<EXACT, FLAT>(m, (int)threadIdx.x / WARP * local + (int)blockIdx.x,
                                     BLOCK / WARP * local);
}

#endif
