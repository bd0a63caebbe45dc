/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels store rows into windows of peers. A window is memory of a rank into which its
 * peers store rows directly, without staging (docs/internals/windows.md). The *permit* of a
 * rank is a message that allows its peers to store rows into its window.
 *
 * An operation is *direct* if all ranks run a kernel with windows. In a direct operation, all
 * rows are stored directly into windows. In any other operation, all rows go through staging.
 * All ranks agree whether an operation is direct, because each rank sends its permit either to
 * all other ranks or to none.
 *
 * The memory order is shown below. n is the epoch. Rank s stores rows into the window of rank
 * d.
 *
 *   d, permit     One warp executes a system fence. So earlier kernels of d no longer read the
 *                 window. Then it sends the permit of d to all peers: words with the stamp n.
 *   s, open       The first warp of each CTA polls the words and executes a system fence.
 *                 Then a barrier of the CTA follows. So all stores of s come after everything
 *                 that d did with its window before this call.
 *   s             The remote CTAs store rows into the window of d, in any order.
 *   s, end of     After a barrier of the CTA and a system fence, one thread increments
 *   each CTA      num_stored. The thread that counts the last remote CTA executes another
 *                 system fence and stores {n, 1} to the word `stored` of d.
 *   d, end        One warp polls the words `stored` of all peers, and executes a system fence.
 *                 Fences are cumulative, so d, and later kernels on its stream, see all rows.
 *
 * A rank that runs a kernel without windows sends no permit. A peer detects this as follows: it
 * reads the signature of the rank, executes a system fence, and then finds that the permit
 * still has the stamp of an older epoch.
 *
 * Ranks cannot wait for each other in a circle: every kernel sends its permit and its signature
 * before it waits, and remote CTAs (those that store rows to peers) wait only for permits and,
 * if the kernel makes the plan, for the plan. */
#ifndef EPIC_NET_WINDOWS_CUH
#define EPIC_NET_WINDOWS_CUH

#include "cuda/common/rows.cuh"
#include "cuda/net/operation.cuh"

/* The contents of the peers' permits. Each CTA has a copy in shared memory. */
struct WindowState {
    /* for each rank: the address, in this rank's address space, of its output in its window */
    uint8_t *output[DEVICE_MAX_RANKS];
    /* for each rank, the number of rows of its output that this rank may store */
    int32_t rows[DEVICE_MAX_RANKS];
    /* for each rank, the number of its tokens that always go through staging */
    int32_t num_early_tokens[DEVICE_MAX_RANKS];
    uint32_t is_direct; /* 1: the operation is direct */
};

/* Returns the part of a heap for windows. `heap`: base address of the heap. */
__device__ __forceinline__ p2p_window_area *window_area(const p2p_self &self, uint8_t *heap)
{
    return (p2p_window_area *)(heap + p2p_window_area_at(&self.at));
}

/* -------------------------------------------------------------------------- permission ---- */

/* Permits all peers to store into the output of this rank. Sends them the place of the output
 * (window and offset), its number of rows, and the number of tokens that this rank always sends
 * through staging. Called by one warp of the grid before begin_operation(), so that the fence
 * of announce_operation() orders these words before the signature. */
__device__ __forceinline__ void permit_stores(const p2p_self &self, uint64_t place,
                                              int32_t rows, int32_t num_early_tokens)
{
    const uint64_t broken = read_broken(self);
    const uint32_t ended = load_relaxed(&control_of(self)->epoch);
    if (lane_id() >= self.num_ranks || self.operation == EPIC_OP_NONE || broken) return;
    const uint32_t epoch = epoch_after(ended);
    const uint64_t stamp = (uint64_t)epoch << 32;
    p2p_window_words *to =
        &window_area(self, self.heap[lane_id()])->announced[epoch & 1][self.rank];
    fence_system();
    store_relaxed(&to->place[0], stamp | (uint32_t)place);
    store_relaxed(&to->place[1], stamp | (uint32_t)(place >> 32));
    store_relaxed(&to->rows, stamp | (uint32_t)rows);
    store_relaxed(&to->call, stamp | self.signature);
    store_relaxed(&to->begun, stamp | (uint32_t)num_early_tokens);
}

struct Permit { /* The permit of a peer (p2p_window_words in heap.h). */
    uint64_t place;
    uint32_t rows, num_early_tokens;
    /* true: all words have arrived, and belong to the call that this rank executes */
    bool is_valid;
};

/* Loads the permit of rank q. Does not wait for it. */
__device__ __forceinline__ Permit peek_permit(const p2p_self &self, const OpState &op, int q)
{
    const p2p_window_words *from = &window_area(self, op.heap)->announced[epoch_parity(op)][q];
    const uint64_t begun = load_relaxed(&from->begun), call = load_relaxed(&from->call),
                   rows = load_relaxed(&from->rows), low = load_relaxed(&from->place[0]),
                   high = load_relaxed(&from->place[1]);
    const bool is_valid = is_stamped(op, begun) && is_stamped(op, rows) &&
                          is_stamped(op, low) && is_stamped(op, high) &&
                          call == stamp_word(op, self.signature);
    return {high << 32 | (uint32_t)low, (uint32_t)rows, (uint32_t)begun, is_valid};
}

/* Lane q waits until it has the permit of rank q, or until it is clear that q sends no permit.
 * A rank sends its permit before its signature. So if the signature of q has arrived without a
 * permit, q runs a kernel without windows. Called by a whole warp. Returns false if the group
 * has failed. */
__device__ __forceinline__ bool wait_permits(const p2p_self &self, const OpState &op,
                                             Permit &permit)
{
    const int q = lane_id();
    const bool is_peer = q < self.num_ranks && q != self.rank;
    permit = {0, 0, 0, false};
    const uint64_t *signature =
        announcement_words(self, op, op.heap, is_peer ? q : 0) + P2P_ANNOUNCED_SIGNATURE;
    const bool ok = wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        bool is_known = !is_peer;
        if (is_peer) {
            const uint64_t announced = load_relaxed(signature);
            permit = peek_permit(self, op, q);
            is_known = permit.is_valid;
            if (!is_known && announced == stamp_word(op, op.signature)) {
                fence_system();
                permit = peek_permit(self, op, q);
                is_known = true;
            }
        }
        return __all_sync(ALL_LANES, is_known) != 0;
    });
    fence_system();
    return ok;
}

/* Waits for the permits of all peers, and sets all fields of w from them. `table`: the windows
 * of all ranks (p2p_dispatch_job.windows). can_be_direct: false if the plan is invalid. Called
 * by one warp. Returns false if the group has failed. */
__device__ __forceinline__ bool read_permits(const p2p_self &self, const OpState &op,
                                             WindowState &w, const p2p_mapped_window *table,
                                             int64_t row_bytes, bool can_be_direct)
{
    Permit permit;
    const int q = lane_id();
    const bool is_peer = q < self.num_ranks && q != self.rank;
    if (!wait_permits(self, op, permit)) return false;
    if (permit.is_valid) {
        const uint64_t number = (permit.place >> P2P_WINDOW_PLACE_BITS) - 1;
        const int64_t offset = (int64_t)(permit.place & ((1ull << P2P_WINDOW_PLACE_BITS) - 1));
        uint64_t at, bytes;
        load_two_words(
            (const uint64_t *)(table + number % P2P_MAX_WINDOWS * DEVICE_MAX_RANKS + q), at,
            bytes);
        /* A damaged value of `place` must not make this rank write outside of the window. */
        const bool fits = number < P2P_MAX_WINDOWS && at && offset <= (int64_t)bytes &&
                          (at + (uint64_t)offset) % 16 == 0;
        const int64_t rows = fits ? ((int64_t)bytes - offset) / row_bytes : 0;
        w.output[q] = (uint8_t *)at + offset;
        w.rows[q] = (int32_t)min(rows, (int64_t)(int32_t)permit.rows);
    }
    w.num_early_tokens[q] = (int32_t)permit.num_early_tokens;
    const bool all = __all_sync(ALL_LANES, permit.is_valid || !is_peer) != 0;
    if (q == 0) w.is_direct = all && can_be_direct;
    return true;
}

/* -------------------------------------------------------------------------- completion ---- */

/* Called by all threads of a remote CTA (one that stores rows to peers) after it has stored its
 * rows. The last of the `ctas` remote CTAs to call it reports to all peers that this rank has
 * stored all its rows. */
__device__ __forceinline__ void count_stores(const p2p_self &self, const OpState &op, int ctas)
{
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence_system();
    if (atomicAdd(&window_area(self, op.heap)->num_stored, 1u) != (uint32_t)ctas - 1) return;
    __threadfence_system();
    for (int q = 0; q < self.num_ranks; q++)
        if (q != self.rank)
            store_relaxed(&window_area(self, self.heap[q])->stored[epoch_parity(op)][self.rank],
                          stamp_word(op, 1));
}

/* Waits until all peers have stored their rows into the window of this rank. If the wait is
 * aborted, finish_operation() reports it. Called by one warp of the grid. */
static __device__ void wait_stores(const p2p_self &self, const OpState &op)
{
    const int q = lane_id();
    const bool waits = q < self.num_ranks && q != self.rank;
    const uint64_t *stored = &window_area(self, op.heap)->stored[epoch_parity(op)][q];
    (void)wait_warp(op, waits ? q : -1, P2P_PHASE_ROW, [&] {
        return __all_sync(ALL_LANES, !waits || is_stamped(op, load_relaxed(stored))) != 0;
    });
    fence_system();
}

/* Sets the counters of this rank to 0 for its next operation. Called by one thread of the CTA
 * that finishes last. */
__device__ __forceinline__ void reset_window_counters(const p2p_self &self, const OpState &op)
{
    p2p_window_area *area = window_area(self, op.heap);
    area->num_planned = area->num_stored = 0;
}

/* ----------------------------------------------------------------------- copying rows ---- */

#define PART_V 7 /* number of 16-byte vectors of a row that a lane copies at a time */
/* Maximum number of CTAs that store rows to peers. The value is measured (docs/lab/cuda.md). */
#define MOST_REMOTE_CTAS 24

/* Returns the number of remote CTAs of a grid: CTAs that store rows to peers and do nothing
 * else. They do nothing else because stores to peers, over NVLink, delay all other work of a
 * CTA. */
static inline int count_remote_ctas(int num_sms)
{
    const int remote = (num_sms * 3 + 7) / 8;
    return remote < MOST_REMOTE_CTAS ? remote : MOST_REMOTE_CTAS;
}

struct CopyTeam {   /* CTAs that together copy some rows. */
    bool is_remote; /* true: the CTAs copy rows to peers; false: to outputs of this rank */
    int cta, ctas;  /* index of this CTA in the team, and number of CTAs of the team */
};

struct ListedRow { /* A row to copy: from row `from` of this rank to row `to` of rank `rank`. */
    int32_t from, to, rank;
};

/* The rows that a CTA must copy, in shared memory. The list has at most THREADS rows, where
 * THREADS is the number of threads of the CTA. */
template <int THREADS> struct RowList {
    int32_t ranks[THREADS]; /* memory for the functions that make lists */
    ListedRow rows[THREADS];
    uint32_t count;
};

/* Copies the rows of items 0 to `items` - 1. (An item is a token or another unit of the
 * caller.) Calls make(begin, end), which lists the rows of the items [begin, end), and then
 * copies the rows of this list. Repeats these two steps until the team has processed all items.
 * A list has the rows of at most `most` items. All CTAs of a team get about equally many items.
 * make() is called by all threads of a CTA, and must end with a barrier.
 *
 *   from   rows to copy
 *   own    output of this rank, if the team is not remote
 *   change(row, q)  changes the vectors of a part of a row before they are stored */
template <int THREADS, class Make, class Change>
__device__ __forceinline__ void
copy_items(const WindowState &w, const CopyTeam &team, const RowList<THREADS> &list,
           int64_t items, int32_t most, const uint8_t *from, uint8_t *own,
           const RowShape &shape, uint64_t policy, Make make, Change change)
{
    const int64_t lists = (items + (int64_t)team.ctas * most - 1) / ((int64_t)team.ctas * most);
    const int64_t all = lists * team.ctas, share = all ? (items + all - 1) / all : 0;
    const int32_t vectors = shape.vectors, part_vectors = PART_V * WARP;
    const int parts = (vectors + part_vectors - 1) / part_vectors;
    for (int64_t item = team.cta * share; item < items; item += team.ctas * share) {
        make(item, min(item + share, items));
        const int units = (int)list.count * parts;
#pragma unroll 1
        for (int unit = (int)threadIdx.x / WARP; unit < units; unit += THREADS / WARP) {
            const ListedRow row = list.rows[unit / parts];
            const int32_t begin = unit % parts * part_vectors;
            const int32_t left = vectors - begin - lane_id();
            const uint8_t *source = from + row_offset(row.from, shape) + lane_offset(begin);
            uint8_t *to = (team.is_remote ? w.output[row.rank] : own) +
                          row_offset(row.to, shape) + lane_offset(begin);
            uint4 q[PART_V];
#pragma unroll
            for (int v = 0; v < PART_V; v++)
                if (v * WARP < left) q[v] = load_again(source + v * WARP * 16);
            change(row, q);
#pragma unroll
            for (int v = 0; v < PART_V; v++) {
                if (v * WARP >= left) continue;
                if (team.is_remote)
                    store_relaxed((uint4 *)(to + v * WARP * 16), q[v]);
                else
                    store_once(to + v * WARP * 16, q[v], policy);
            }
        }
        __syncthreads();
    }
}

/* Divides the CTAs of the grid into two teams. The last `remote` CTAs are the remote team: they
 * store rows to peers, and report when they have stored all of them. The other CTAs are the
 * local team. Calls copy(team) for each team to which this CTA belongs, for the remote team
 * first. If the grid has only one CTA, it belongs to both teams. Returns the number of local
 * CTAs, or 0 if this CTA is not local. Called by all threads of all CTAs. */
template <class Copy>
__device__ __forceinline__ int copy_as_teams(const p2p_self &self, const OpState &op,
                                             int remote, Copy copy)
{
    const int ctas = (int)gridDim.x, cta = (int)blockIdx.x;
    const int local = max(ctas - remote, 1), first_remote = ctas - remote;
    if (cta >= first_remote) {
        copy(CopyTeam{true, cta - first_remote, remote});
        count_stores(self, op, remote);
    }
    if (cta >= local) return 0;
    copy(CopyTeam{false, cta, local});
    return local;
}

#endif
