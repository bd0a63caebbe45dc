/* SPDX-License-Identifier: Apache-2.0 */
/* Where the words and rows of a rank lie, and everything in which the library of backend hosts
 * differs from that of p2p in reading an address.
 *
 * Both libraries are compiled from the same sources.  HOSTS is 1 in that of backend hosts, where
 * some peers are on other hosts; it is 0 in that of p2p, where the compiler drops what follows
 * from it. */
#ifndef EPIC_ADDRESSING_CUH
#define EPIC_ADDRESSING_CUH

#include "cuda/common/cuda_kernels.h"
#include "cuda/common/ptx.cuh"

#define WARP 32
#define ALL_LANES 0xffffffffu
struct OpState { /* the running operation, in shared memory */
    const p2p_self *self;
    uint8_t *heap;             /* this rank's */
    mutable uint64_t deadline; /* of this CTA's waits, unless something moves on this rank */
    uint32_t epoch, signature;
    int32_t tokens, capacity, rows;    /* what this rank announces */
    uint32_t last;                     /* this CTA is the last to finish */
    uint32_t overlaps;                 /* as mark_running says */
    mutable uint32_t aborted_wait;     /* WAIT_ABORTED of a wait that was given up, 0: none */
    uint8_t *inbox[DEVICE_MAX_RANKS];  /* staging of this rank that another writes */
    uint8_t *outbox[DEVICE_MAX_RANKS]; /* staging of another that this rank writes */
#ifdef EPIC_HOSTS
    const uint8_t *slow;                 /* host memory where peers' words come, if they do, */
    int64_t host_inbox_bytes;            /* so much, */
    uint8_t *host_box[DEVICE_MAX_RANKS]; /* and where there another's staging is */
    uint8_t relay[DEVICE_MAX_RANKS];     /* who brings another's rows */
#endif
};

__device__ __forceinline__ int lane_id()
{
    return threadIdx.x % WARP;
}

__device__ __forceinline__ bool is_last_cta()
{
    return blockIdx.x == gridDim.x - 1;
}

/* A rank counted past the last one. */
__device__ __forceinline__ int wrap_rank(int rank, int num_ranks)
{
    return rank >= num_ranks ? rank - num_ranks : rank;
}

/* Epochs are 1 to 2^32 - 1 and then from 2 again, so that parities alternate; 0 is none: memory
 * that nobody has written yet is stamped with it. */
__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch)
{
    return epoch == 0xffffffffu ? 2 : epoch + 1;
}

__device__ __forceinline__ uint32_t epoch_parity(const OpState &op)
{
    return op.epoch & 1;
}

/* What follows reads the self that it is given: through op.self each word is a load, some 500 ns. */
__device__ __forceinline__ p2p_control *control_of(const p2p_self &self)
{
    return (p2p_control *)(self.heap[self.rank] + self.at.control);
}

__device__ __forceinline__ p2p_control *control_of(const OpState &op)
{
    return (p2p_control *)(op.heap + op.self->at.control);
}

__device__ __forceinline__ uint64_t stamp_word(const OpState &op, uint32_t value)
{
    return (uint64_t)op.epoch << 32 | value;
}

__device__ __forceinline__ bool is_stamped(const OpState &op, uint64_t word)
{
    return (uint32_t)(word >> 32) == op.epoch;
}

/* Where rank q stores what it tells this one.  hosts: ranks of this host store into the heap, this
 * one too; the net writes the inbox, which is laid out alike. */
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

/* Where rank q says what is no data but is so op (waits, broken, gone).  hosts: that goes by the
 * net to every rank. */
#ifdef EPIC_HOSTS
__device__ __forceinline__ uint8_t *status_base(const OpState &op, int q)
{
    return q == op.self->rank ? op.heap : op.self->inbox;
}
#else
#define status_base(op, q) op.heap
#endif

/* The same in words of 8 bytes from this rank's heap, of what the first CTA keeps there for the others:
 * cache_counts. */
__device__ __forceinline__ int64_t inbox_word_offset(const OpState &op, int q)
{
    return HOSTS && blockIdx.x == 0 ? (inbox_base(op, q) - op.heap) / 8 : 0;
}

/* The same of rows: what comes by relays (net/relay.cuh), neighbours store. */
__device__ __forceinline__ uint8_t *row_inbox_base(const p2p_self &self, int q)
{
#ifdef EPIC_HOSTS
    const bool relayed =
        self.operation == EPIC_OP_DISPATCH || self.operation == EPIC_OP_COMBINE_BACKWARD;
    if (self.local && relayed) return self.heap[self.rank];
#endif
    return inbox_base(self, q);
}

/* For whom a wait for rank q's rows is: of what a relay has and does not hand on, q knows nothing. */
__device__ __forceinline__ int relay_of(const OpState &op, int q)
{
#ifdef EPIC_HOSTS
    return op.relay[q];
#else
    return q;
#endif
}

/* hosts: is that host memory?  Each of its polls takes microseconds, and bandwidth from rows. */
__device__ __forceinline__ bool is_host_memory(const OpState &op, const void *at)
{
#ifdef EPIC_HOSTS
    return (uint64_t)((const uint8_t *)at - op.slow) < (uint64_t)op.host_inbox_bytes;
#else
    return false;
#endif
}

/* One thread. */
__device__ __forceinline__ void find_host_inbox(const p2p_self &self, OpState &op)
{
#ifdef EPIC_HOSTS
    op.slow = self.inbox;
    op.host_inbox_bytes = self.slow;
#endif
}

/* What `rank` said to the rank that owns the heap. */
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

/* In arrays of a heap by source: what rank `to` is told by rank `by`. */
__device__ __forceinline__ int source_number(const p2p_self &self, int to, int by)
{
    return HOSTS ? wrap_rank(by + self.num_ranks - to - 1, self.num_ranks) : by;
}

/* Choices of a token that arrays of a heap have room for; of p2p still a constant, so that its
 * kernels are what they were. */
#ifdef EPIC_HOSTS
#define HEAP_TOP_K(self) ((self).max_top_k)
#else
#define HEAP_TOP_K(self) DEVICE_MAX_TOP_K
#endif

/* From the words of records by rank to those by distance. */
__device__ __forceinline__ int64_t record_word_offset(const p2p_self &self, int q)
{
    return (source_number(self, q, self.rank) - self.rank) * self.max_tokens * HEAP_TOP_K(self);
}

/* A token's floats begin at a multiple of this many. */
__device__ __forceinline__ int float_stride(int top_k)
{
    return HOSTS ? (top_k + 1) & ~1 : top_k;
}

/* Ranks of each host if rows go through relays (net/relay.cuh), else 0. */
__device__ __host__ __forceinline__ int ranks_per_host(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.local;
#else
    (void)self;
    return 0;
#endif
}

/* The ranks of this host as bits. */
__device__ __host__ __forceinline__ uint32_t near_ranks(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.near;
#else
    (void)self;
    return 0xffffffffu;
#endif
}

/* Memory that the net writes, laid out as the heap; NULL in p2p. */
__device__ __forceinline__ uint8_t *net_inbox(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.inbox;
#else
    (void)self;
    return NULL;
#endif
}

/* Offset of the words that say which ranks want a row (net/relay.cuh). */
__device__ __forceinline__ int64_t wants_offset(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.at.wants;
#else
    (void)self;
    return 0;
#endif
}

/* Tokens that are sent, at least, before one is received; 0: any number. */
static inline int32_t net_window(const p2p_self &self)
{
#ifdef EPIC_HOSTS
    return self.ahead;
#else
    (void)self;
    return 0;
#endif
}

/* Roles of units that forward rows of other hosts: one for each host but this one. */
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
