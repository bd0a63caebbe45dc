/* SPDX-License-Identifier: Apache-2.0 */
/* The state of the running operation, and where the words and rows of a rank lie.
 *
 * Backends p2p and hosts are two libraries that are compiled from the same sources. HOSTS is 1
 * in the library of backend hosts, where some peers are on other hosts. It is 0 in p2p, where
 * the compiler drops all code that depends on it. Every address that differs between the two is
 * chosen in this file.
 *
 *   a peer on this host      stores into this rank's heap, over NVLink
 *   a peer on another host   stores into its outbox; the net copies that into this rank's
 *                            inbox, which has the layout of the heap (net/net.cuh) */
#ifndef EPIC_ADDRESSING_CUH
#define EPIC_ADDRESSING_CUH

#include "cuda/common/cuda_kernels.h"
#include "cuda/common/ptx.cuh"

#define WARP 32
#define ALL_LANES 0xffffffffu
struct OpState { /* The running operation; one per CTA, in shared memory. */
    const p2p_self *self;
    uint8_t *heap; /* heap of this rank */
    /* when this CTA's waits expire, unless something progresses on this rank */
    mutable uint64_t deadline;
    uint32_t epoch, signature;
    int32_t tokens, capacity, rows;    /* what this rank announces */
    uint32_t last;                     /* 1 if this CTA was the last to finish */
    uint32_t overlaps;                 /* result of mark_running() */
    mutable uint32_t aborted_wait;     /* WAIT_ABORTED() of a wait that was given up; 0: none */
    uint8_t *inbox[DEVICE_MAX_RANKS];  /* staging of this rank, by the rank that writes it */
    uint8_t *outbox[DEVICE_MAX_RANKS]; /* staging that this rank writes, by its owner */
#ifdef EPIC_HOSTS
    const uint8_t *slow;      /* the net inbox, if that is host memory */
    int64_t host_inbox_bytes; /* its bytes, else 0 */
    /* staging in the net inbox, by the rank that writes it */
    uint8_t *host_box[DEVICE_MAX_RANKS];
    uint8_t relay[DEVICE_MAX_RANKS]; /* the rank that delivers the rows of each rank */
#endif
};

/* Number of this thread in its warp. */
__device__ __forceinline__ int lane_id()
{
    return threadIdx.x % WARP;
}

/* The last CTA of a grid announces and, in most operations, finishes the operation. */
__device__ __forceinline__ bool is_last_cta()
{
    return blockIdx.x == gridDim.x - 1;
}

/* Maps a rank in [0, 2 * num_ranks) to [0, num_ranks). */
__device__ __forceinline__ int wrap_rank(int rank, int num_ranks)
{
    return rank >= num_ranks ? rank - num_ranks : rank;
}

/* The epoch after `epoch`. Epochs run from 1 to 2^32 - 1 and continue with 2, so that their
 * parity alternates. Fresh memory is stamped with 0, which is no epoch. */
__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch)
{
    return epoch == 0xffffffffu ? 2 : epoch + 1;
}

/* Half of the double-buffered memory that the running epoch uses. */
__device__ __forceinline__ uint32_t epoch_parity(const OpState &op)
{
    return op.epoch & 1;
}

/* Functions with a `self` argument read that copy, which is a parameter of the kernel. A read
 * through op.self is a load from memory and takes about 500 ns. */
/* The words of this rank's heap through which its CTAs agree about the operation. */
__device__ __forceinline__ p2p_control *control_of(const p2p_self &self)
{
    return (p2p_control *)(self.heap[self.rank] + self.at.control);
}

__device__ __forceinline__ p2p_control *control_of(const OpState &op)
{
    return (p2p_control *)(op.heap + op.self->at.control);
}

/* The word {epoch, value}: readers accept it in this epoch only. */
__device__ __forceinline__ uint64_t stamp_word(const OpState &op, uint32_t value)
{
    return (uint64_t)op.epoch << 32 | value;
}

/* Was the word written in the running epoch? */
__device__ __forceinline__ bool is_stamped(const OpState &op, uint64_t word)
{
    return (uint32_t)(word >> 32) == op.epoch;
}

/* Base of the memory where rank q stores words for this rank. backend hosts: ranks of this
 * host, this one included, store into the heap; the net writes words of other hosts into the
 * inbox. Both have the same layout. */
__device__ __forceinline__ uint8_t *inbox_base(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    if (!(self.near >> q & 1)) return self.inbox;
#endif
    return self.heap[self.rank];
}

__device__ __forceinline__ uint8_t *inbox_base(const OpState &op, int q)
{
#ifdef EPIC_HOSTS
    if (!(op.self->near >> q & 1)) return op.self->inbox;
#endif
    return op.heap;
}

/* Base of the memory where rank q publishes its status (waits, broken, gone). backend hosts:
 * status words of every other rank arrive through the net, also those of ranks on this host. */
#ifdef EPIC_HOSTS
__device__ __forceinline__ uint8_t *status_base(const OpState &op, int q)
{
    return q == op.self->rank ? op.heap : op.self->inbox;
}
#else
#define status_base(op, q) op.heap
#endif

/* Difference in 8-byte words between inbox_base(q) and this rank's heap. It is 0 in all CTAs
 * but the first: that one copies what it reads into the heap (cache_counts), where the others
 * wait for it. */
__device__ __forceinline__ int64_t inbox_word_offset(const OpState &op, int q)
{
    return HOSTS && blockIdx.x == 0 ? (inbox_base(op, q) - op.heap) / 8 : 0;
}

/* Base of the memory where rank q's rows arrive. Rows that go through relays (net/relay.cuh)
 * are stored by ranks of this host, so they arrive in the heap. */
__device__ __forceinline__ uint8_t *row_inbox_base(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    const bool relayed =
        self.operation == EPIC_OP_DISPATCH || self.operation == EPIC_OP_COMBINE_BACKWARD;
    if (self.local && relayed) return self.heap[self.rank];
#endif
    return inbox_base(self, q);
}

/* The rank that a wait for rank q's rows blames if it fails. With relays it is the relay,
 * because q does not know what its relay has not forwarded. */
__device__ __forceinline__ int relay_of(const OpState &op, int q)
{
#ifdef EPIC_HOSTS
    return op.relay[q];
#else
    return q;
#endif
}

/* backend hosts: is `at` in host memory? A poll of host memory takes microseconds and takes
 * bandwidth from rows. */
__device__ __forceinline__ bool is_host_memory(const OpState &op, const void *at)
{
#ifdef EPIC_HOSTS
    return (uint64_t)((const uint8_t *)at - op.slow) < (uint64_t)op.host_inbox_bytes;
#else
    return false;
#endif
}

/* Sets the range that is_host_memory() tests. One thread. */
__device__ __forceinline__ void find_host_inbox(const p2p_self &self, OpState &op)
{
#ifdef EPIC_HOSTS
    op.slow = self.inbox;
    op.host_inbox_bytes = self.slow;
#endif
}

/* The announcement of `rank` in a heap: P2P_ANNOUNCE_WORDS stamped words. */
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

/* Is rank q on another host? */
__device__ __forceinline__ bool is_remote(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    return !(self.near >> q & 1);
#else
    return false;
#endif
}

/* Index of rank `by` in the arrays by source of rank `to`. p2p indexes by rank. backend hosts
 * indexes by distance, so that one copy in the outbox serves all peers. */
__device__ __forceinline__ int source_number(const p2p_self &self, int to, int by)
{
    return HOSTS ? wrap_rank(by + self.num_ranks - to - 1, self.num_ranks) : by;
}

/* Choices per token that arrays of a heap have room for. It is a constant in p2p. */
#ifdef EPIC_HOSTS
#define HEAP_TOP_K(self) ((self).max_top_k)
#else
#define HEAP_TOP_K(self) DEVICE_MAX_TOP_K
#endif

/* Rank q stores the records of its sources in the order of their distance from q. Returns the
 * words to add to an address that was computed with the number of this rank, to get the place of
 * this rank's records on q. */
__device__ __forceinline__ int64_t record_word_offset(const p2p_self &self, int q)
{
    return (source_number(self, q, self.rank) - self.rank) * self.max_tokens * HEAP_TOP_K(self);
}

/* Floats per token in the float arrays. backend hosts rounds up to even numbers, because the
 * net copies words of 8 bytes. */
__device__ __forceinline__ int float_stride(int top_k)
{
    return HOSTS ? (top_k + 1) & ~1 : top_k;
}

/* Ranks per host if rows go through relays (net/relay.cuh), else 0. */
__device__ __host__ __forceinline__ int ranks_per_host(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.local;
#else
    (void)self;
    return 0;
#endif
}

/* Bit mask of the ranks on this host, this rank included. */
__device__ __host__ __forceinline__ uint32_t near_ranks(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.near;
#else
    (void)self;
    return 0xffffffffu;
#endif
}

/* Memory that the net writes, with the layout of the heap; NULL in p2p. */
__device__ __forceinline__ uint8_t *net_inbox(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.inbox;
#else
    (void)self;
    return NULL;
#endif
}

/* Offset in a heap of the words *wants*: which ranks want a row (net/relay.cuh). */
__device__ __forceinline__ int64_t wants_offset(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.at.wants;
#else
    (void)self;
    return 0;
#endif
}

/* Least number of tokens that are sent before one is received; 0: any number. */
static inline int32_t net_window(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.ahead;
#else
    (void)self;
    return 0;
#endif
}

/* Number of roles whose units forward rows of other hosts: one per other host. */
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
