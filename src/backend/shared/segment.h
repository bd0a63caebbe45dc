/* SPDX-License-Identifier: Apache-2.0 */
/* The segment is the memory that the ranks of a group share. This file describes its layout. A
 * slot is an op slot: the memory of one rank, its owner, for one exchange. A reader of a ring
 * *drops* an entry to return its memory to the writer (backend/transport.h).
 *
 *   segment: header, then blocks [max_in_flight][num_ranks], then the staging of all ranks
 *   block:   rank state (used only in the first block of a rank), one slot; page-aligned
 *   staging: for each slot, the broadcast ring, then one ring to each peer in rank order;
 *            page-aligned
 *
 * The order makes a new segment cheap for many ranks. The staging takes most of the addresses,
 * and small operations use none of it, so a process needs few page tables for the blocks. A rank
 * reads the first blocks of all its peers, which are next to each other. So one page fault can
 * map several of them.
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

/* Two values of failure_state. While a rank writes the failure, the value is this rank + 1. */
#define GROUP_HEALTHY 0u
#define GROUP_BROKEN UINT32_MAX

/* An op slot's futex shows whether its owner is awake (IDLE), about to sleep (ARMED) or asleep
 * (ASLEEP). wait.c describes the protocol. */
enum slot_futex_state { SLOT_FUTEX_IDLE, SLOT_FUTEX_ARMED, SLOT_FUTEX_ASLEEP };

/* Written by a rank that waits. After its own deadline, a peer reads it to find the
 * culprits. */
typedef struct shared_wait {
    /* clock_ns() when the rank last showed that it waits; 0: never */
    _Alignas(64) _Atomic int64_t heartbeat_ns;
    _Atomic uint32_t phase;
    _Atomic uint64_t waits_for[RANK_WORDS];
} shared_wait;

/* Counters in an op slot for one peer. The peer writes the first three, and the slot's owner
 * writes `sent`. Entries are counted over all flows of the exchange. */
typedef struct shared_peer_counters {
    /* how many entries of the owner's broadcast ring the peer has dropped */
    _Alignas(64) _Atomic int64_t broadcast_dropped;
    /* how many entries of the owner's ring to this peer the peer has dropped */
    _Atomic int64_t dropped;
    /* the `version` of the owner's op slot for the exchange that the peer has finished last */
    _Atomic uint64_t done;
    /* how many entries the owner has sent through its ring to the peer */
    _Alignas(64) _Atomic int64_t sent;
} shared_peer_counters;

/* The op slot of one rank for one exchange. Only its owner writes it, except `futex` and the
 * first three members of shared_peer_counters. */
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

/* The state of one rank, which all ranks of the group can read. */
typedef struct shared_rank_state {
    _Alignas(64) _Atomic uint32_t closed; /* 1: the rank has closed its context */
    _Atomic uint32_t ended; /* 1: a peer has found that the rank's process has exited */
    /* peers need not search the op slots from this index on, because they were never used */
    _Atomic uint32_t num_used_slots;
    _Atomic uint32_t last_slot; /* index of the op slot announced last, plus one; 0: none */
    /* how many operations of this rank are storing into windows of peers now */
    _Atomic uint32_t num_storing;
    _Atomic uint64_t cores[CORE_WORDS]; /* a core_set: the cores on which the rank may run */
    /* Threads sleep on this counter while no op slot is free. It is incremented when an op slot
     * may have become free. */
    _Alignas(64) _Atomic uint32_t free_slot_futex;
    _Atomic uint32_t num_sleepers; /* how many threads sleep until an op slot is free */
    shared_wait wait;              /* state of these threads' wait */
} shared_rank_state;

/* The beginning of the segment. */
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
    int64_t blocks_at;     /* offset of the blocks */
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
