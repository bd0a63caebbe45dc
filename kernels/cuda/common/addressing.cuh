/* SPDX-License-Identifier: Apache-2.0 */
/* OpState, the state of the running operation, and the addresses of a rank's words and rows.
 *
 * Backends p2p and hosts are two libraries, compiled from the same sources. In hosts, where
 * some ranks are on other hosts, HOSTS is 1. In p2p it is 0, and the compiler drops all code
 * that depends on it. Every address that differs between the two is chosen in this file:
 *
 *   a peer on this host      stores into this rank's heap, over NVLink
 *   a peer on another host   stores into its own outbox; the net copies the words into this
 *                            rank's inbox, which has the layout of the heap (net/net.cuh) */
#ifndef EPIC_ADDRESSING_CUH
#define EPIC_ADDRESSING_CUH

#include "cuda/common/cuda_kernels.h"
#include "cuda/common/ptx.cuh"

#define WARP 32
#define ALL_LANES 0xffffffffu
struct OpState { /* The running operation. Each CTA has one, in shared memory. */
    const p2p_self *self;
    uint8_t *heap; /* this rank's heap */
    /* Device time in ns when this CTA's waits expire. Progress of any wait of this rank moves
     * it. */
    mutable uint64_t deadline;
    uint32_t epoch, signature;
    int32_t tokens, capacity, rows; /* the sizes that this rank announces */
    uint32_t last;                  /* 1 if this CTA was the last to finish */
    uint32_t overlaps;              /* result of mark_running() */
    /* WAIT_ABORTED() of a wait of this CTA that was given up; 0: none */
    mutable uint32_t aborted_wait;
    uint8_t *inbox[DEVICE_MAX_RANKS];  /* inbox[q]: this rank's staging for rows of rank q */
    uint8_t *outbox[DEVICE_MAX_RANKS]; /* outbox[q]: where to store rows for rank q */
#ifdef EPIC_HOSTS
    const uint8_t *host_inbox; /* start of the net inbox (is_host_memory()) */
    int64_t host_inbox_bytes;  /* bytes of the net inbox if it is in host memory, else 0 */
    /* host_box[q]: this rank's staging for rows of rank q in the net inbox */
    uint8_t *host_box[DEVICE_MAX_RANKS];
    /* relay[q]: the rank that delivers rank q's rows to this rank: q or a relay */
    uint8_t relay[DEVICE_MAX_RANKS];
#endif
};

__device__ __forceinline__ int lane_id()
{
    return threadIdx.x % WARP;
}

/* Returns true in the last CTA of the grid. It announces the operation; in low-latency kernels
 * it also ends it. */
__device__ __forceinline__ bool is_last_cta()
{
    return blockIdx.x == gridDim.x - 1;
}

/* Maps a number in [0, 2 * num_ranks) to a rank, modulo num_ranks. */
__device__ __forceinline__ int wrap_rank(int rank, int num_ranks)
{
    return rank >= num_ranks ? rank - num_ranks : rank;
}

/* Returns the epoch after `epoch`. Epochs run from 1 to 2^32 - 1 and continue with 2, so that
 * odd and even ones alternate. 0 is no epoch: it is the stamp of fresh memory. */
__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch)
{
    return epoch == 0xffffffffu ? 2 : epoch + 1;
}

/* Returns which half (0 or 1) of memory marked [2] in heap.h the running epoch uses. */
__device__ __forceinline__ uint32_t epoch_parity(const OpState &op)
{
    return op.epoch & 1;
}

/* Many functions below have one version with a `self` argument and one without. `self` is a
 * parameter of the kernel, which lies in constant memory. The versions without it read op.self,
 * a slow load from memory. */

/* Returns this rank's control memory, through which the CTAs of its kernels agree. */
__device__ __forceinline__ p2p_control *control_of(const p2p_self &self)
{
    return (p2p_control *)(self.heap[self.rank] + self.at.control);
}

__device__ __forceinline__ p2p_control *control_of(const OpState &op)
{
    return (p2p_control *)(op.heap + op.self->at.control);
}

/* Returns the stamped word {epoch, value}, which readers accept in this epoch only. */
__device__ __forceinline__ uint64_t stamp_word(const OpState &op, uint32_t value)
{
    return (uint64_t)op.epoch << 32 | value;
}

/* Returns true if the word was written in the running epoch. */
__device__ __forceinline__ bool is_stamped(const OpState &op, uint64_t word)
{
    return (uint32_t)(word >> 32) == op.epoch;
}

/* Returns the base address of the memory where rank q stores words for this rank: this rank's
 * heap, or the net inbox if q is on another host. Both have the same layout. */
__device__ __forceinline__ uint8_t *inbox_base(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    if (!(self.host_ranks >> q & 1)) return self.inbox;
#endif
    return self.heap[self.rank];
}

__device__ __forceinline__ uint8_t *inbox_base(const OpState &op, int q)
{
#ifdef EPIC_HOSTS
    if (!(op.self->host_ranks >> q & 1)) return op.self->inbox;
#endif
    return op.heap;
}

/* Returns the base address of the memory where rank q publishes its status words (waits,
 * broken, gone). In backend hosts status words always travel through the net, also within a
 * host. */
#ifdef EPIC_HOSTS
__device__ __forceinline__ uint8_t *status_base(const OpState &op, int q)
{
    return q == op.self->rank ? op.heap : op.self->inbox;
}
#else
#define status_base(op, q) op.heap
#endif

/* Returns the offset, in 8-byte words, from this rank's heap to the memory where rank q's words
 * arrive. Only CTA 0 reads the net inbox; it copies the words to the heap (cache_counts), where
 * the other CTAs wait for them. So the offset is 0 in other CTAs. */
__device__ __forceinline__ int64_t inbox_word_offset(const OpState &op, int q)
{
    return HOSTS && blockIdx.x == 0 ? (inbox_base(op, q) - op.heap) / 8 : 0;
}

/* Returns the base address of the memory where rank q's rows arrive. With relays
 * (net/relay.cuh) a rank of this host stores them, so they arrive in the heap. */
__device__ __forceinline__ uint8_t *row_inbox_base(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    const bool relayed =
        self.operation == EPIC_OP_DISPATCH || self.operation == EPIC_OP_COMBINE_BACKWARD;
    if (self.local && relayed) return self.heap[self.rank];
#endif
    return inbox_base(self, q);
}

/* Returns the rank to report as the culprit if a wait for rank q's rows fails: q, or the relay
 * that forwards rows of q to this rank. */
__device__ __forceinline__ int relay_of(const OpState &op, int q)
{
#ifdef EPIC_HOSTS
    return op.relay[q];
#else
    return q;
#endif
}

/* Returns true if `at` is in host memory (backend hosts only). A poll of host memory takes
 * microseconds and slows down the transfer of rows. */
__device__ __forceinline__ bool is_host_memory(const OpState &op, const void *at)
{
#ifdef EPIC_HOSTS
    return (uint64_t)((const uint8_t *)at - op.host_inbox) < (uint64_t)op.host_inbox_bytes;
#else
    return false;
#endif
}

/* Sets the address range that is_host_memory() tests. Called by one thread. */
__device__ __forceinline__ void find_host_inbox(const p2p_self &self, OpState &op)
{
#ifdef EPIC_HOSTS
    op.host_inbox = self.inbox;
    op.host_inbox_bytes = self.host_inbox_bytes;
#endif
}

/* Returns the announcement of `rank` in a heap: P2P_ANNOUNCE_WORDS stamped words. `heap`: base
 * address of that heap. */
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

/* Returns true if rank q is on another host. */
__device__ __forceinline__ bool is_remote(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    return !(self.host_ranks >> q & 1);
#else
    return false;
#endif
}

/* Returns the index of rank `by` in the arrays of rank `to` that have one part per source. In
 * p2p it is `by`. In backend hosts it is the distance from `to` to `by` minus 1, so that the
 * shared outbox has a part of its own for each destination. */
__device__ __forceinline__ int source_number(const p2p_self &self, int to, int by)
{
    return HOSTS ? wrap_rank(by + self.num_ranks - to - 1, self.num_ranks) : by;
}

/* Largest number of choices per token for which the arrays of a heap have space. A constant in
 * p2p. */
#ifdef EPIC_HOSTS
#define HEAP_TOP_K(self) ((self).max_top_k)
#else
#define HEAP_TOP_K(self) DEVICE_MAX_TOP_K
#endif

/* In the records of rank q, the part of this rank has index source_number(). A caller that has
 * computed an address with index self.rank adds the offset that this function returns, in
 * 8-byte words. */
__device__ __forceinline__ int64_t record_word_offset(const p2p_self &self, int q)
{
    return (source_number(self, q, self.rank) - self.rank) * self.max_tokens * HEAP_TOP_K(self);
}

/* Returns the number of floats per token in the array `floats` of a heap. backend hosts rounds
 * up to an even number, because the net copies words of 8 bytes. */
__device__ __forceinline__ int float_stride(int top_k)
{
    return HOSTS ? (top_k + 1) & ~1 : top_k;
}

/* Returns the number of ranks per host if rows go through relays (net/relay.cuh), else 0. */
__device__ __host__ __forceinline__ int ranks_per_host(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.local;
#else
    (void)self;
    return 0;
#endif
}

/* Returns a bit mask of the ranks on this host, this rank included. */
__device__ __host__ __forceinline__ uint32_t near_ranks(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.host_ranks;
#else
    (void)self;
    return 0xffffffffu;
#endif
}

/* Returns the net inbox, which has the layout of a heap; NULL in p2p. */
__device__ __forceinline__ uint8_t *net_inbox(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.inbox;
#else
    (void)self;
    return NULL;
#endif
}

/* Returns the offset in a heap of the words *wants* (net/relay.cuh). */
__device__ __forceinline__ int64_t wants_offset(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.at.wants;
#else
    (void)self;
    return 0;
#endif
}

/* Returns how many tokens this rank sends, at least, before it waits for a token
 * (EPIC_NET_WINDOW); 0: no minimum. */
static inline int32_t net_window(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.ahead;
#else
    (void)self;
    return 0;
#endif
}

/* Returns the number of roles (kinds of units, common/rows.cuh) that forward rows of other
 * hosts: one per other host with relays, else 0. */
__host__ __device__ __forceinline__ int num_forward_roles(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.local ? self.num_ranks / self.local - 1 : 0;
#else
    (void)self;
    return 0;
#endif
}

#endif
