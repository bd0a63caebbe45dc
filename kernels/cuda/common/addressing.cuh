/* SPDX-License-Identifier: Apache-2.0 */
/* OpState, which is the state of the running operation. Also functions that return the
 * addresses at which ranks exchange words and rows.
 *
 * In the backend `hosts`, some ranks are on other hosts (hosts.h). Every address that differs
 * between the backends `p2p` and `hosts` is chosen in this file, except the addresses of expert
 * ids in the array `ids` (lowlat/plan.cuh). A word or row takes one of two paths:
 *
 *   a peer on this host      stores into this rank's heap, over NVLink
 *   a peer on another host   stores into its own outbox; the net copies the words into this
 *                            rank's inbox, which has the layout of the heap (net/net.cuh)
 *
 * The *epoch* is the number of the running operation, or of its running round. A *stamped* word
 * contains the epoch in which it was written. So a reader can distinguish words of this epoch
 * from older words. */
#ifndef EPIC_ADDRESSING_CUH
#define EPIC_ADDRESSING_CUH

#include "cuda/common/ptx.cuh"
#include "cuda/common/ranks.cuh"

/* The part of OpState for the backend `hosts`. A relay is a rank that forwards rows to other
 * ranks of its host (net/relay.cuh). */
struct OpStateNet {
    /* the net inbox: memory of this rank into which the net copies words from other hosts */
    const uint8_t *host_inbox;
    /* size in bytes of the net inbox if it is in host memory, otherwise 0 (is_host_memory()) */
    int64_t host_inbox_bytes;
    /* host_box[q]: address in the net inbox at which the rows of rank q arrive */
    uint8_t *host_box[DEVICE_MAX_RANKS];
    /* relay[q]: the rank that stores the rows of rank q into this rank's memory. This is q
     * itself or, with relays, a rank of this host. */
    uint8_t relay[DEVICE_MAX_RANKS];
};

struct OpState { /* State of the running operation. Each CTA has a copy in shared memory. */
    const p2p_self *self;
    uint8_t *heap;
    /* Device time in ns at which the waits of this CTA fail. A wait that succeeds moves it to a
     * later time. */
    mutable uint64_t deadline;
    uint32_t epoch, signature;
    /* The sizes that this rank announces. tokens: its number of tokens. capacity: number of
     * slots that it may use; 0: no limit. rows: number of rows of its receive buffer; 0: the
     * operation has no receive buffer. */
    int32_t tokens, capacity, rows;
    uint32_t last; /* 1 if this CTA has finished after all other CTAs of the grid */
    /* 1: an earlier operation of this rank still ran when this one began, which is an error */
    uint32_t overlaps;
    /* the wait that a thread of this CTA has aborted (WAIT_ABORTED() in wait.cuh), or 0 */
    mutable uint32_t aborted_wait;
    /* inbox[q]: address in this rank's staging (net/staging.cuh) at which the rows of rank q
     * arrive */
    uint8_t *inbox[DEVICE_MAX_RANKS];
    /* outbox[q]: address at which this rank stores rows for rank q. The address is in the
     * staging of rank q. If rank q is on another host, the address is in the outbox of this
     * rank, from which the net sends the rows. */
    uint8_t *outbox[DEVICE_MAX_RANKS];
    /* the generation and the vacant seats of the group (p2p_group_words) */
    uint32_t generation, vacant;
    /* Libraries for many ranks only: the first token of the running round of records
     * (plan/record_rounds.cuh), -1 before the first such round, or 0 if there are no such
     * rounds. */
    __extension__ int32_t record_begin[MANY_RANKS];
    __extension__ OpStateNet net[HOSTS]; /* backend `hosts` only (hosts.h) */
};

/* Index of a token in the arrays `records` and `flat_rows` */
#define RECORD_INDEX(op, token) (MANY_RANKS ? (token) - *(op).record_begin : (token))

/* Returns true in the last CTA of the grid, which announces the operation and, in low-latency
 * kernels, also ends it. */
__device__ __forceinline__ bool is_last_cta()
{
    return blockIdx.x == gridDim.x - 1;
}

/* Returns rank % num_ranks, for `rank` in [0, 2 * num_ranks), without a division. */
__device__ __forceinline__ int wrap_rank(int rank, int num_ranks)
{
    return rank >= num_ranks ? rank - num_ranks : rank;
}

/* Returns the epoch after `epoch`. Epochs run from 1 to 2^32 - 1 and continue with 2, so that
 * odd and even epochs always alternate. No epoch is 0, because fresh memory contains zeros. */
__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch)
{
    return epoch == 0xffffffffu ? 2 : epoch + 1;
}

/* Returns the index of the half of an array that the running epoch uses: 0 if the epoch is
 * even, 1 if it is odd. Only arrays whose shape in heap.h begins with [2] have halves. */
__device__ __forceinline__ uint32_t epoch_parity(const OpState &op)
{
    return op.epoch & 1;
}

/* Some functions below have one version with the argument `self`, and one that reads op.self.
 * The version with `self` is faster, because `self` is a parameter of the kernel and therefore
 * in constant memory. */

__device__ __forceinline__ p2p_control *control_of(const p2p_self &self)
{
    return (p2p_control *)(self.heap[self.rank] + self.at.control);
}

__device__ __forceinline__ p2p_control *control_of(const OpState &op)
{
    return (p2p_control *)(op.heap + op.self->at.control);
}

/* Returns the stamped word {epoch, value}: the epoch in the high 32 bits, the value in the low
 * 32 bits. */
__device__ __forceinline__ uint64_t stamp_word(const OpState &op, uint32_t value)
{
    return (uint64_t)op.epoch << 32 | value;
}

/* Returns true if a stamped word was written in the running epoch. */
__device__ __forceinline__ bool is_stamped(const OpState &op, uint64_t word)
{
    return (uint32_t)(word >> 32) == op.epoch;
}

/* The ranks on this rank's host, including this rank, form a bit mask. Returns word w of this
 * bit mask (32 bits). */
__device__ __host__ __forceinline__ uint32_t near_ranks(const p2p_self &self, int w = 0)
{
    return HOSTS ? self.net->host_ranks[w] : 0xffffffffu;
}

/* Returns true if rank q is on another host. */
__device__ __forceinline__ bool is_remote(const p2p_self &self, int q)
{
    return HOSTS &&
           !(near_ranks(self, MANY_RANKS ? q / 32 : 0) >> (MANY_RANKS ? q % 32 : q) & 1);
}

static inline bool has_remote_ranks(const p2p_self &self)
{
    int num_near = 0;
    for (int q = 0; q < self.num_ranks; q++) num_near += near_ranks(self, q / 32) >> q % 32 & 1;
    return num_near < self.num_ranks;
}

/* Removes the ranks on this rank's host from `mask`. */
__device__ __forceinline__ void remove_near_ranks(RankMask &mask, const p2p_self &self)
{
#if MANY_RANKS
    for (int w = 0; w < DEVICE_RANK_WORDS; w++) mask.words[w] &= ~near_ranks(self, w);
#else
    mask &= ~near_ranks(self);
#endif
}

/* Returns the address of this rank's words about the failure and the members of the group. */
__device__ __forceinline__ p2p_group_words *group_words(const p2p_self &self)
{
    return (p2p_group_words *)(self.heap[self.rank] + self.at.broken);
}

/* Returns the word `broken`, the failure of the group. In backend `hosts`, reads a copy in
 * control memory, because the net writes the word itself to the net inbox, where reads may be
 * slow. */
__device__ __forceinline__ uint64_t read_broken(const p2p_self &self)
{
    return load_relaxed(HOSTS ? &control_of(self)->net->broken : &group_words(self)->broken);
}

/* Returns the bit mask of the vacant seats. A seat is a rank number below num_ranks. It is
 * vacant if no process has this rank number at present. So a vacant seat announces nothing, has
 * no tokens and receives nothing. Its heap may be unmapped, so kernels must not access it. */
__device__ __forceinline__ uint32_t vacant_seats(const OpState &op)
{
    return WITH_VACANT_SEATS ? op.vacant : 0;
}

__device__ __forceinline__ bool is_vacant(const OpState &op, int q)
{
    return WITH_VACANT_SEATS && (vacant_seats(op) >> q & 1);
}

/* Returns the number of seats that are not vacant. */
__device__ __forceinline__ int num_members(const p2p_self &self, const OpState &op)
{
    return self.num_ranks - __popc(vacant_seats(op));
}

/* Returns true if q is below num_ranks and seat q is not vacant. */
__device__ __forceinline__ bool is_member(const p2p_self &self, const OpState &op, int q)
{
    return q < self.num_ranks && !is_vacant(op, q);
}

/* Returns the address of the net inbox, which has the layout of a heap. Returns NULL in
 * `p2p`. */
__device__ __forceinline__ uint8_t *net_inbox(const p2p_self &self)
{
    return HOSTS ? self.net->inbox : NULL;
}

/* Returns the memory in which words from rank q arrive: this rank's heap if q is on this host,
 * otherwise the net inbox. The heap and the net inbox have the same layout. */
__device__ __forceinline__ uint8_t *inbox_base(const p2p_self &self, int q)
{
    return is_remote(self, q) ? net_inbox(self) : self.heap[self.rank];
}

__device__ __forceinline__ uint8_t *inbox_base(const OpState &op, int q)
{
    return is_remote(*op.self, q) ? net_inbox(*op.self) : op.heap;
}

/* Returns the memory in which the status words of rank q (waits, broken, gone) arrive. In the
 * backend `hosts` this is the net inbox even if q is on this host, because the net also
 * delivers the status words of ranks on this host. */
__device__ __forceinline__ uint8_t *status_base(const OpState &op, int q)
{
    return HOSTS && q != op.self->rank ? net_inbox(*op.self) : op.heap;
}

/* Returns the number of ranks per host if rows go through relays (net/relay.cuh), otherwise
 * 0. */
__device__ __host__ __forceinline__ int ranks_per_host(const p2p_self &self)
{
    return HOSTS ? self.net->ranks_per_host : 0;
}

/* Returns true if announcements and counts go through relays (net/relay_words.cuh), and records
 * for other hosts are sent in lists (plan/record_lists.cuh). */
__device__ __forceinline__ bool relays_words(const p2p_self &self)
{
    return HOSTS && MANY_RANKS && ranks_per_host(self);
}

/* Words between two hosts go through one rank of each host (net/relay_words.cuh). `on` is a
 * rank of the first host, and `with` is a rank of the second host. Returns the rank of the
 * first host. Requires that relays_words() is true. */
__device__ __forceinline__ int word_relay(const p2p_self &self, int on, int with)
{
    const int local = ranks_per_host(self), host = on / local;
    return host * local + (host + with / local) % local;
}

/* Returns the memory in which announcements, counts and records of rank q arrive. If they go
 * through relays, this is always this rank's heap. */
__device__ __forceinline__ uint8_t *word_base(const p2p_self &self, int q)
{
    return relays_words(self) ? self.heap[self.rank] : inbox_base(self, q);
}

__device__ __forceinline__ uint8_t *word_base(const OpState &op, int q)
{
    return relays_words(*op.self) ? op.heap : inbox_base(op, q);
}

/* The calling CTA polls the counts of rank q in this rank's heap or in the net inbox. Returns
 * the distance in 8-byte words from the heap to that memory. Most CTAs poll the heap, so the
 * distance is 0. If counts use no relays, CTA 0 of the backend `hosts` polls the net inbox for
 * ranks on other hosts, and copies their words to the heap (cache_counts()). */
__device__ __forceinline__ int64_t inbox_word_offset(const OpState &op, int q)
{
    return HOSTS && blockIdx.x == 0 ? (word_base(op, q) - op.heap) / 8 : 0;
}

/* Returns the memory in which the rows of rank q arrive. With relays (net/relay.cuh), dispatch
 * and combine_backward always use this rank's heap, because ranks of this host forward the rows
 * of other hosts. */
__device__ __forceinline__ uint8_t *row_inbox_base(const p2p_self &self, int q)
{
    const bool relayed =
        self.operation == EPIC_OP_DISPATCH || self.operation == EPIC_OP_COMBINE_BACKWARD;
    if (ranks_per_host(self) && relayed) return self.heap[self.rank];
    return inbox_base(self, q);
}

/* This version is for callers that have `op`: in `p2p`, it reads the address from `op`, which
 * is in shared memory. */
__device__ __forceinline__ uint8_t *row_inbox_base(const p2p_self &self, const OpState &op,
                                                   int q)
{
    return HOSTS ? row_inbox_base(self, q) : op.heap;
}

/* Returns the rank to report as the culprit if a wait for rows of rank q fails: q, or the relay
 * that forwards the rows of q. */
__device__ __forceinline__ int relay_of(const OpState &op, int q)
{
    return HOSTS ? op.net->relay[q] : q;
}

/* Returns true if `at` is in a net inbox in host memory. Callers poll such an address rarely,
 * because each poll takes microseconds and slows down the transfer of rows. */
__device__ __forceinline__ bool is_host_memory(const OpState &op, const void *at)
{
    if (!HOSTS) return false;
    const uint64_t offset = (uint64_t)((const uint8_t *)at - op.net->host_inbox);
    return offset < (uint64_t)op.net->host_inbox_bytes;
}

/* Sets the fields of `op` that is_host_memory() needs. Called by one thread of a CTA. */
__device__ __forceinline__ void find_host_inbox(const p2p_self &self, OpState &op)
{
    if (!HOSTS) return;
    op.net->host_inbox = net_inbox(self);
    op.net->host_inbox_bytes = self.net->host_inbox_bytes;
}

/* Returns the address in `heap` of the announcement of `rank`. */
__device__ __forceinline__ uint64_t *announcement_words(const p2p_self &self, const OpState &op,
                                                        uint8_t *heap, int rank)
{
    return (uint64_t *)(heap + self.at.announce) +
           (epoch_parity(op) * DEVICE_MAX_RANKS + rank) * P2P_ANNOUNCE_WORDS;
}

__device__ __forceinline__ uint64_t *announcement_words(const OpState &op, uint8_t *heap,
                                                        int rank)
{
    return announcement_words(*op.self, op, heap, rank);
}

/* Arrays in a heap have one part for each rank that writes. Returns the index of the part that
 * rank `by` writes in the heap of rank `to`. In `p2p`, the index is `by`. In the backend
 * `hosts`, a word has the same offset in the outbox of `by` as at its destination, and `by` has
 * one outbox for all destinations. So that words for different destinations do not overwrite
 * each other, each destination has a different index, (by - to - 1) modulo num_ranks. */
__device__ __forceinline__ int source_number(const p2p_self &self, int to, int by)
{
    return HOSTS ? wrap_rank(by + self.num_ranks - to - 1, self.num_ranks) : by;
}

/* This rank writes part source_number() of the array `records` in the heap of rank q. Returns
 * the distance in 8-byte words from part self.rank of the array to this part. The distance is 0
 * in `p2p`. So callers compute the address of part self.rank only once, and add the distance
 * for each q. */
__device__ __forceinline__ int64_t record_word_offset(const p2p_self &self, int q)
{
    return (source_number(self, q, self.rank) - self.rank) * p2p_index_choices(&self.at);
}

/* Returns the number of floats that the array `floats` has for each token. This is top_k in
 * `p2p`. In the backend `hosts`, top_k is rounded up to an even number, because the net copies
 * words of 8 bytes. */
__device__ __forceinline__ int float_stride(int top_k)
{
    return HOSTS ? (top_k + 1) & ~1 : top_k;
}

/* Returns the offset in a heap of the array `wants` (net/relay.cuh), or 0 in `p2p`. */
__device__ __forceinline__ int64_t wants_offset(const p2p_self &self)
{
    return HOSTS ? self.at.net->wants : 0;
}

/* Returns the minimum number of tokens that this rank sends before it waits for a token
 * (EPIC_NET_WINDOW), or 0 if there is no minimum. */
static inline int32_t net_window(const p2p_self &self)
{
    return HOSTS ? self.net->window_tokens : 0;
}

/* Returns the number of roles (kinds of work, common/rows.cuh) in which warps forward rows from
 * other hosts. With relays, there is one such role for every other host. Without relays, there
 * is no such role. */
__host__ __device__ __forceinline__ int num_forward_roles(const p2p_self &self)
{
    return ranks_per_host(self) ? self.num_ranks / ranks_per_host(self) - 1 : 0;
}

#endif
