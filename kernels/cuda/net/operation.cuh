/* SPDX-License-Identifier: Apache-2.0 */
/* How an operation, and each of its rounds, begins and ends on the device.
 *
 * Every operation and every round has a number, the epoch. The epoch is counted in device
 * memory, so a CUDA graph that is replayed continues the count. These are the steps of epoch n
 * on one rank:
 *
 *   begin     All CTAs read the epoch and set op.epoch = n.
 *   announce  The first warp of the last CTA stores the sizes, executes a system fence, and
 *             then stores {n, signature} to every rank. A peer that sees the signature also
 *             sees the poison and the zeros that the operation of epoch n - 1 has stored back
 *             (heap.h).
 *   work      Every data word is its own flag, so ranks need no other synchronization.
 *   finish    One warp waits for {n, signature} of every rank. The warp then executes a system
 *             fence if the last part of the operation reads what peers have announced. The CTA
 *             that finishes last stores the epoch. If combine or combine_backward has one
 *             round, CTA 0 stores the epoch and waits for no other CTA (combine/slots.cuh).
 *
 * Many arrays have two halves, for even and odd epochs. Two halves are enough: a rank ends
 * epoch n only after all peers have announced n, and a peer announces n only after it has ended
 * n - 1. So when this rank is in epoch n + 1, no rank still uses the half of epoch n - 1, and
 * this rank may write to that half again. */
#ifndef EPIC_OPERATION_CUH
#define EPIC_OPERATION_CUH

#include "cuda/net/relay_words.cuh"

/* Marks in control memory that an operation of this rank is running. Returns 1 if another
 * operation was already running, which means that the caller has started two operations on
 * streams that are not ordered. Called by one thread of each CTA before it reads the epoch.
 * Only CTA 0 sets and checks the mark. If all CTAs did so, their results could differ, because
 * the other operation may end before a late CTA starts. */
__device__ __forceinline__ uint32_t mark_running(const p2p_self &self)
{
    return blockIdx.x == 0 ? atomicOr(&control_of(self)->running, 1u) : 0;
}

/* If mark_running() has found another running operation of this rank, makes the group fail.
 * Called by one thread of each CTA. */
__device__ __forceinline__ void report_overlap(const OpState &op)
{
    const p2p_self &self = *op.self;
    if (op.overlaps)
        report_failure(op,
                       P2P_BROKEN(EPIC_EMISMATCH, self.operation, self.rank, P2P_PHASE_OVERLAP,
                                  pack_ranks(rank_bit(self.rank))),
                       0);
}

/* Stores the epoch of the finished operation. Called by one thread, after all CTAs have read
 * the previous epoch. */
__device__ __forceinline__ void complete_operation(p2p_control *control, const OpState &op)
{
    control->done = 0;
    store_relaxed(&control->epoch, op.epoch);
    /* This must be the last store, because an operation that reads 0 must also see the new
     * epoch. */
    store_relaxed(&control->running, 0u);
}

__device__ __forceinline__ void store_announced_sizes(const OpState &op, uint64_t *to)
{
    store_relaxed(to + P2P_ANNOUNCED_TOKENS, stamp_word(op, (uint32_t)op.tokens));
    store_relaxed(to + P2P_ANNOUNCED_CAPACITY, stamp_word(op, (uint32_t)op.capacity));
    store_relaxed(to + P2P_ANNOUNCED_ROWS, stamp_word(op, (uint32_t)op.rows));
}

/* Announces to every rank, including this rank, that this rank has begun the operation. If
 * relays_words() is true, ranks of other hosts receive the announcement through relays. Called
 * by one warp; each lane writes to one rank at a time. */
static __device__ void announce_operation(const p2p_self &self, const OpState &op)
{
    for_each_group(self, [&](int first) {
        const int q = first + lane_id();
        if (!is_member(self, op, q)) return;
        if (relays_words(self) && is_remote(self, q)) return;
        uint64_t *to = announcement_words(self, op, self.heap[q], self.rank);
        store_announced_sizes(op, to);
        /* Without this fence, a peer could read the signature before it can see the poison and
         * the zeros that earlier operations of this rank have stored. */
        __threadfence_system();
        store_relaxed(to + P2P_ANNOUNCED_SIGNATURE, stamp_word(op, op.signature));
        post_put(op, q, to, P2P_ANNOUNCE_WORDS * 8);
    });
}

/* Only in backend `hosts`: sets two elements of op.net for rank q. host_box[q] becomes the
 * address in the net inbox at which rows of rank q arrive; its offset in the inbox is `offset`.
 * relay[q] becomes the rank that stores these rows into this rank's memory: q itself or a
 * relay. */
__device__ __forceinline__ void find_net_boxes(const p2p_self &self, OpState &op, int q,
                                               int64_t offset)
{
    op.net->host_box[q] = net_inbox(self) + offset;
    op.net->relay[q] = (uint8_t)q;
    if (row_inbox_base(self, q) == inbox_base(self, q)) return;
    /* with relays: the rank of this host that forwards the rows of rank q to this rank */
    const int relay = self.rank - self.rank % ranks_per_host(self) + q % ranks_per_host(self);
    if (relay != self.rank) op.net->relay[q] = (uint8_t)relay;
}

/* Sets two addresses for rank q in this epoch: op.inbox[q], where rows of rank q arrive in this
 * rank's staging, and op.outbox[q], where this rank stores rows for rank q. */
__device__ __forceinline__ void find_boxes(const p2p_self &self, OpState &op, int q)
{
    const int peers = self.num_ranks - 1, first = epoch_parity(op) * peers;
    const int source_index = wrap_rank(q + self.num_ranks - self.rank - 1, self.num_ranks);
    const int own_index = wrap_rank(self.rank + self.num_ranks - q - 1, self.num_ranks);
    op.inbox[q] = row_inbox_base(self, q) + self.at.staging +
                  (first + source_index) * self.at.source_bytes;
    op.outbox[q] = self.heap[q] + self.at.staging + (first + own_index) * self.at.source_bytes;
    if (HOSTS)
        find_net_boxes(self, op, q,
                       self.at.staging + (first + source_index) * self.at.source_bytes);
}

/* Returns two words that describe the members of the group: the number of the generation (low
 * half) and the bit mask of the vacant seats (high half). */
__device__ __forceinline__ uint64_t read_members(const p2p_self &self)
{
    return WITH_VACANT_SEATS ? load_relaxed((const uint64_t *)&group_words(self)->generation)
                             : 0;
}

/* Stores `members`, the result of read_members(), in op. Returns false if `broken`, the result
 * of read_broken(), shows that the group has failed in this generation. Called by one
 * thread. */
__device__ __forceinline__ bool set_members(OpState &op, uint64_t members, uint64_t broken)
{
    op.generation = (uint32_t)members;
    op.vacant = (uint32_t)(members >> 32);
    return !is_broken_in(broken, op.generation);
}

/* Only in backend `hosts`: returns the word `broken` in the net inbox. */
__device__ __forceinline__ uint64_t read_net_broken(const p2p_self &self)
{
    return load_relaxed((const uint64_t *)(net_inbox(self) + self.at.broken));
}

/* Sets all fields of `op` except the signature. Called by one warp. `tokens`, `capacity`,
 * `rows`: the sizes to announce (OpState). Returns false if the group has failed. */
__device__ __forceinline__ bool open_operation(OpState &op, const p2p_self &self,
                                               int32_t tokens, int32_t capacity, int32_t rows)
{
    bool is_intact = true;
    if (lane_id() == 0) {
        uint64_t broken = read_broken(self);
        const uint64_t members = read_members(self);
        const uint32_t overlaps = mark_running(self);
        const uint32_t ended = load_relaxed(&control_of(self)->epoch);
        /* only one thread of the grid reads the net inbox, because reads of host memory are
         * slow */
        if (HOSTS && !broken && blockIdx.x == 0) broken = read_net_broken(self);
        op.tokens = tokens;
        op.capacity = capacity;
        op.rows = rows;
        op.self = &self;
        op.heap = self.heap[self.rank];
        op.overlaps = overlaps;
        op.epoch = epoch_after(ended);
        op.deadline = timer_ns() + self.timeout_ns;
        op.last = op.aborted_wait = 0;
        if (MANY_RANKS) *op.record_begin = 0;
        is_intact = set_members(op, members, broken);
        find_host_inbox(self, op);
    }
    __syncwarp();
    for (int q = lane_id(); q < self.num_ranks; q += WARP) find_boxes(self, op, q);
    return is_intact;
}

/* Returns the signature of this operation: the host's part, self.signature, combined with
 * `mark`, a value that must be equal on all ranks, such as the id of a plan. */
__device__ __forceinline__ uint32_t signature_with(const p2p_self &self, uint32_t mark)
{
    return self.signature ^ (mark & 0x0fffffffu);
}

/* The second part of the begin of an operation, after open_operation(): announces the
 * operation. Called by all threads of all CTAs. is_intact: in threads that have called
 * open_operation() its result, in all others true. Returns false if the group has failed. */
__device__ __forceinline__ bool start_operation(OpState &op, const p2p_self &self,
                                                bool is_intact)
{
    if (!__syncthreads_and(is_intact)) {
        if (threadIdx.x == 0) report_aborted_wait(op);
        return false;
    }
    if (HOSTS && !wait_outbox(op)) return false;
    /* The first warp of the last CTA announces the operation, because no other warp waits for
     * this warp, and its CTA does not take part in making a plan. */
    if (is_last_cta() && threadIdx.x < WARP) announce_operation(self, op);
    if (threadIdx.x == 0) {
        count_operation(self);
        report_overlap(op);
    }
    if (relays_words(self) && is_last_cta() && threadIdx.x < WARP) relay_announcements(op);
    return true;
}

/* Begins an operation: sets all fields of `op`. The last CTA also announces the operation to
 * all ranks. Called by all threads of all CTAs. `mark`: as in signature_with(). `tokens`,
 * `capacity`, `rows`: the sizes to announce (OpState). Returns false if the group has failed,
 * or if this launch only loads the kernel (EPIC_OP_NONE). */
static __device__ bool begin_operation(OpState &op, const p2p_self &self, uint32_t mark,
                                       int32_t tokens, int32_t capacity, int32_t rows)
{
    if (self.operation == EPIC_OP_NONE) return false;
    if (threadIdx.x == 0) op.signature = signature_with(self, mark);
    return start_operation(
        op, self, threadIdx.x >= WARP || open_operation(op, self, tokens, capacity, rows));
}

/* Like wait_announcements_unfenced() below, but only for the ranks `first` to first + 31. */
__device__ __forceinline__ bool
wait_group_announcements(const p2p_self &self, const OpState &op, int first, bool are_copied)
{
    const bool is_rank = is_member(self, op, first + lane_id());
    const int q = is_rank ? first + lane_id() : self.rank;
    const uint64_t *from =
        announcement_words(self, op, are_copied ? op.heap : word_base(self, q), q);
    return wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        uint64_t announced = load_relaxed(from + P2P_ANNOUNCED_SIGNATURE);
        /* The word is from this epoch or from an older epoch. The next epoch that uses this
         * half of the array is two epochs later, and no peer can be so far ahead. */
        INVARIANT(announced == 0 || (int32_t)((uint32_t)(announced >> 32) - op.epoch) <= 0);
        if (HOSTS && is_rank && !is_announcement_complete(op, from)) announced = 0;
        return __all_sync(ALL_LANES, !is_rank || announced == stamp_word(op, op.signature)) !=
               0;
    });
}

/* Waits until every rank has announced this operation. Fails if a rank has announced another
 * operation (a different signature, see find_failure()). This function executes no fence, so
 * later stores of this kernel may become visible before the announcements have been read.
 * `are_copied`: true if a low-latency kernel has copied the announcements to this rank's heap,
 * so that they can be read there. Called by one warp; each lane reads one announcement at a
 * time. Returns false if the group has failed. */
__device__ __forceinline__ bool
wait_announcements_unfenced(const p2p_self &self, const OpState &op, bool are_copied = false)
{
    for (int first = 0; MANY_RANKS && first + WARP < self.num_ranks; first += WARP)
        if (!wait_group_announcements(self, op, first, are_copied)) return false;
    return wait_group_announcements(
        self, op, MANY_RANKS ? (self.num_ranks - 1) / WARP * WARP : 0, are_copied);
}

/* Like wait_announcements_unfenced(), but then executes a system fence, so that later loads and
 * stores happen after the announcements have been read. One fence costs less than acquire loads
 * in the polls. */
__device__ __forceinline__ bool wait_announcements(const p2p_self &self, const OpState &op)
{
    const bool ok = wait_announcements_unfenced(self, op);
    fence_system();
    return ok;
}

/* The overload for kernels that do not keep `self` in registers. */
static __device__ bool wait_announcements(const OpState &op)
{
    return wait_announcements(*op.self, op);
}

/* Waits for word `which` (P2P_ANNOUNCED_*) of the announcements of the ranks `first` to first +
 * 31. `value` becomes the value of the word of rank first + lane_id(), or 0 if there is no such
 * rank. Called by one warp. Returns false if the group has failed. */
__device__ __forceinline__ bool read_group_announcement(const p2p_self &self, const OpState &op,
                                                        int first, int which, int32_t &value)
{
    const bool is_rank = is_member(self, op, first + lane_id());
    const int q = is_rank ? first + lane_id() : self.rank;
    const uint64_t *from = announcement_words(self, op, word_base(self, q), q) + which;
    uint64_t announced = 0;
    const bool ok = wait_warp(op, -1, P2P_PHASE_ARRIVE, [&] {
        announced = HOSTS && !relays_words(self) ? read_announcement_cached(op, from, which, q)
                                                 : load_relaxed(from);
        return __all_sync(ALL_LANES, !is_rank || is_stamped(op, announced)) != 0;
    });
    value = is_rank ? (int32_t)(uint32_t)announced : 0;
    return ok;
}

/* Waits for word `which` (P2P_ANNOUNCED_*) of the announcements of all ranks, and stores their
 * values in `values`. Called by one warp. Returns false if the group has failed. */
__device__ __forceinline__ bool read_announcement(const p2p_self &self, const OpState &op,
                                                  int which, RankNumbers &values)
{
    bool ok = true;
    for_each_group(self, [&](int first) {
        int32_t value = 0;
        ok = (!MANY_RANKS || ok) && read_group_announcement(self, op, first, which, value);
        set_number(values, first, value);
    });
    return ok;
}

/* The overload for kernels that do not keep `self` in registers. */
static __device__ bool read_announcement(const OpState &op, int which, RankNumbers &values)
{
    return read_announcement(*op.self, op, which, values);
}

/* Ends an operation. CTA `waiting_cta` waits until all ranks have announced the operation.
 * Returns true only in the CTA that finishes last. This CTA may then do final work, such as
 * reporting errors. `read`: true if the final work reads what peers have announced. In this
 * case a fence follows the wait. Called by all threads of all CTAs. */
__device__ __forceinline__ bool finish_operation(const p2p_self &self, OpState &op,
                                                 int waiting_cta, bool read)
{
    if ((int)blockIdx.x == waiting_cta && threadIdx.x / WARP == 1) refresh_freed(op);
    if ((int)blockIdx.x == waiting_cta && threadIdx.x < WARP)
        (void)(read ? wait_announcements(self, op) : wait_announcements_unfenced(self, op));
    __syncthreads();
    if (threadIdx.x == 0) {
        p2p_control *control = control_of(self);
        if (op.aborted_wait) report_aborted_wait(op);
        __threadfence();
        op.last = atomicAdd(&control->done, 1u) == gridDim.x - 1;
        if (op.last) {
            if (HOSTS) post_epoch_end(op);
            complete_operation(control, op);
        }
    }
    __syncthreads();
    return op.last != 0;
}

/* Ends the operation of most kernels. CTA 0 waits for all announcements, and the CTA that
 * finishes last may read them. */
static __device__ bool finish_operation(OpState &op)
{
    return finish_operation(*op.self, op, 0, true);
}

/* Begins the next round: advances the epoch, announces the new epoch, and stores it in
 * control->round. The other CTAs of this rank wait until control->round has this value. Called
 * by one warp. */
static __device__ void begin_round(OpState &op)
{
    if (threadIdx.x == 0) op.epoch = epoch_after(op.epoch);
    __syncwarp();
    announce_operation(*op.self, op);
    __syncwarp();
    if (threadIdx.x == 0) {
        __threadfence();
        store_release(&control_of(op)->round, op.epoch);
    }
    if (relays_words(*op.self)) relay_announcements(op);
}

/* Ends a round and begins the next one. If the rows of an operation do not all fit into the
 * staging, the operation has several rounds, each with its own epoch. Called by all threads of
 * all CTAs. The CTA that calls it last does the work, and the other CTAs wait for it. Returns
 * false if the group has failed. */
static __device__ bool next_round(OpState &op)
{
    __syncthreads();
    p2p_control *control = control_of(op);
    bool ok = true;
    if (threadIdx.x == 0) {
        __threadfence();
        op.last = atomicAdd(&control->done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (op.last && threadIdx.x < WARP) {
        ok = wait_announcements(op);
        if (threadIdx.x == 0) control->done = 0;
        if (HOSTS && ok) ok = end_round_puts(op);
        if (ok) begin_round(op);
    } else if (!op.last && threadIdx.x == 0) {
        const uint32_t next = epoch_after(op.epoch);
        ok = wait_thread(op, -1, P2P_PHASE_GRID,
                         [&] { return load_acquire(&control->round) == next; });
        if (ok) op.epoch = next;
    }
    if (threadIdx.x == 0)
        for (int q = 0; q < op.self->num_ranks; q++) find_boxes(*op.self, op, q);
    return __syncthreads_and(ok);
}

#endif
