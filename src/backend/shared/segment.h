/* SPDX-License-Identifier: Apache-2.0 */
/* The segment is the memory that the ranks of a group share. This file describes the layout of
 * the segment. A slot is an op slot: memory that one rank, the slot's owner, uses for one
 * exchange (the communication of one operation). A ring is a circular buffer for entries
 * (rows). When the reader of a ring does not need an entry any more, it *drops* the entry, so
 * that the writer may reuse its memory (backend/transport.h).
 *
 *   segment  the header, blocks [max_in_flight][num_ranks], then the staging of all ranks
 *   block    the rank state (used only in the first block of a rank) and one slot;
 *            page-aligned
 *   staging  for each slot: the broadcast ring (read by all peers), then one ring to each peer
 *            in rank order; page-aligned
 *
 * Blocks come first and are contiguous, because this makes a new segment cheap for many ranks.
 * Small operations use only blocks. If each block were next to its large staging, the blocks
 * would be far apart, and a process would need many page tables to map them. A rank reads the
 * first block of each peer. These blocks are next to each other, so one page fault can map
 * several of them.
 *
 * The segment contains no addresses, because each rank may map it elsewhere. Its memory is
 * initially zero, and the system allocates a page only when a rank uses it. Words that
 * different ranks write are on different cache lines. */
#ifndef EPIC_SHARED_SEGMENT_H
#define EPIC_SHARED_SEGMENT_H

#include "backend/shared/atomics.h"
#include "backend/transport.h"
#include "base/cores.h"

#define RANK_WORDS (EPIC_MAX_RANKS / 64)
#define SEGMENT_MAGIC 0x31474553434950ull /* "PICSEG1" in memory */

/* Values of failure_state. While rank r writes the failure, the value is r + 1. */
#define GROUP_HEALTHY 0u
#define GROUP_BROKEN UINT32_MAX

/* An op slot's futex shows whether its owner is awake (IDLE), about to sleep (ARMED) or asleep
 * (ASLEEP). wait.c describes the protocol. */
enum slot_futex_state { SLOT_FUTEX_IDLE, SLOT_FUTEX_ARMED, SLOT_FUTEX_ASLEEP };

/* A rank that waits writes here what it waits for. A peer whose deadline has passed reads it,
 * to find the ranks that caused the delay. */
typedef struct shared_wait {
    /* clock_ns() when the rank last showed that it waits; 0: never */
    _Alignas(64) _Atomic int64_t heartbeat_ns;
    _Atomic uint32_t phase;
    _Atomic uint64_t waits_for[RANK_WORDS];
} shared_wait;

/* The part of an op slot that belongs to one peer. The peer writes broadcast_dropped, dropped
 * and done. The slot's owner writes `sent`. The counts of entries include all flows of the
 * exchange (a flow is a sequence of entries of one size). */
typedef struct shared_peer_counters {
    /* how many entries the peer has dropped of the owner's broadcast ring */
    _Alignas(64) _Atomic int64_t broadcast_dropped;
    /* how many entries the peer has dropped of the owner's ring to the peer */
    _Atomic int64_t dropped;
    /* the last exchange that the peer has finished, given as the value that `version` of the
     * owner's op slot had during this exchange */
    _Atomic uint64_t done;
    /* how many entries the owner has sent through its ring to the peer */
    _Alignas(64) _Atomic int64_t sent;
} shared_peer_counters;

/* The op slot of one rank for one exchange. Only the slot's owner writes it, with two
 * exceptions: peers write `futex` and some of the counters in `peers`. */
typedef struct shared_op_slot {
    /* even: the members from `tag` to `op_header` are complete; odd: the owner is writing
     * them */
    _Alignas(64) _Atomic uint64_t version;
    _Atomic uint64_t tag;
    _Atomic uint64_t sequence;
    _Atomic uint32_t operation;
    _Atomic uint32_t finished;
    _Alignas(64) _Atomic uint32_t futex; /* an enum slot_futex_state */
    shared_wait wait;
    _Alignas(64) _Atomic int64_t broadcast_sent;
    _Alignas(64) epic_op_header op_header;
    shared_peer_counters peers[]; /* [num_ranks]: the counters for each peer */
} shared_op_slot;

/* The state of one rank. All ranks of the group can read it. */
typedef struct shared_rank_state {
    _Alignas(64) _Atomic uint32_t closed; /* 1: the rank has closed its context */
    _Atomic uint32_t ended; /* 1: a peer has found that the rank's process has exited */
    /* op slots with this index or a higher one were never used, so peers do not search them */
    _Atomic uint32_t num_used_slots;
    /* index of the op slot that the rank announced last, plus one; 0: the rank has announced no
     * slot */
    _Atomic uint32_t last_slot;
    /* how many operations of this rank are storing into windows of peers now */
    _Atomic uint32_t num_storing;
    _Atomic uint64_t cores[CORE_WORDS]; /* a core_set: the cores on which the rank may run */
    /* Threads of the rank sleep on this futex while no op slot of the rank is free. A peer
     * increments it when an op slot may have become free. */
    _Alignas(64) _Atomic uint32_t free_slot_futex;
    _Atomic uint32_t num_sleepers; /* how many threads sleep until an op slot is free */
    shared_wait wait;              /* what these threads wait for */
} shared_rank_state;

typedef struct shared_segment_header {
    uint64_t magic;
    uint64_t group_id;
    uint64_t segment_bytes;
    uint32_t num_ranks;
    _Alignas(64) _Atomic uint32_t failure_state;
    _Atomic uint32_t any_gone; /* 1: a rank has closed its context, or its process has exited */
    epic_failure_info failure;
} shared_segment_header;

/* Sizes and offsets of the segment in bytes, computed from the configuration. */
typedef struct shared_layout {
    int num_ranks;
    int num_slots;
    int64_t broadcast_ring_bytes; /* size of the broadcast ring of one op slot */
    int64_t peer_ring_bytes;
    int64_t staging_bytes; /* size of all rings of one op slot together */
    int64_t blocks_at;
    int64_t block_bytes;
    int64_t slot_at;     /* offset of the op slot in a block */
    int64_t rings_at;    /* offset of the staging of all ranks */
    int64_t rings_bytes; /* size of the staging of a rank */
    int64_t segment_bytes;
} shared_layout;

/* Computes the layout of a group with this config. Every rank computes the same layout. Returns
 * EPIC_EINVAL if staging_bytes is too small; the error text contains the minimum. */
epic_result shared_layout_of(const epic_config *config, shared_layout *out);

#endif
