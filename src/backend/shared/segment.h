/* SPDX-License-Identifier: Apache-2.0 */
/* What lies in the memory that the ranks of a group share.
 *
 *   segment:  header, then one block for each rank, page-aligned
 *   block:    head, cells [max_in_flight], staging [max_in_flight]
 *   staging:  of one cell: the lane to everyone, then the lanes to each peer in rank order
 *
 * No addresses are kept in it: every rank may see it somewhere else.  It starts as zeros, and
 * pages that nobody has touched take no memory.  Words that different ranks write lie on
 * different cache lines. */
#ifndef EPIC_SHARED_SEGMENT_H
#define EPIC_SHARED_SEGMENT_H

#include "backend/shared/atomics.h"
#include "backend/transport.h"
#include "base/cores.h"

#define RANK_WORDS (EPIC_MAX_RANKS / 64)
#define SEGMENT_MAGIC 0x31474553434950ull /* "PICSEG1" */

/* failure_state, else: the rank that is writing the failure, plus one */
#define GROUP_HEALTHY 0u
#define GROUP_BROKEN UINT32_MAX

enum slot_futex_state { SLOT_FUTEX_IDLE, SLOT_FUTEX_ARMED, SLOT_FUTEX_ASLEEP };

/* A sleeping rank as its peers see it. */
typedef struct shared_wait {
    _Alignas(64) _Atomic int64_t heartbeat_ns; /* 0: has not waited */
    _Atomic uint32_t phase;
    _Atomic uint64_t waits_for[RANK_WORDS];
} shared_wait;

/* Between the owner of a cell and one peer. */
typedef struct shared_peer_counters {
    _Alignas(64) _Atomic int64_t broadcast_dropped; /* written by the peer: entries, over all */
    _Atomic int64_t dropped;                        /*   flows of the exchange */
    _Atomic uint64_t done;             /* the cell's version that the peer needs no more */
    _Alignas(64) _Atomic int64_t sent; /* written by the owner: entries, over all flows */
} shared_peer_counters;

/* What one rank shows of one exchange.  Nobody but the owner writes, except bell and the peers'
 * half of the lanes. */
typedef struct shared_op_slot {
    /* Even: the fields up to note belong to one exchange; odd: they are being written. */
    _Alignas(64) _Atomic uint64_t version;
    _Atomic uint64_t tag;
    _Atomic uint64_t sequence;
    _Atomic uint32_t operation;
    _Atomic uint32_t finished;
    _Alignas(64) _Atomic uint32_t futex; /* an enum slot_futex_state */
    shared_wait wait;
    _Alignas(64) _Atomic int64_t broadcast_sent;
    _Alignas(64) epic_note note;
    shared_peer_counters peers[]; /* [num_ranks] */
} shared_op_slot;

/* One rank. */
typedef struct shared_rank_state {
    _Alignas(64) _Atomic uint32_t closed;
    _Atomic uint32_t num_used_slots;               /* cells from here on have never been used */
    _Atomic uint32_t last_slot;                    /* cell of the last announcement, plus one */
    _Atomic uint64_t cores[CORE_WORDS];            /* a core_set: where it may run */
    _Alignas(64) _Atomic uint32_t free_slot_futex; /* rung when a cell may have come free */
    _Atomic uint32_t num_sleepers;                 /* threads at the door */
    shared_wait wait;                              /* of those threads */
} shared_rank_state;

typedef struct shared_header {
    uint64_t magic;
    uint64_t group_id;
    uint64_t segment_bytes;
    uint32_t num_ranks;
    _Alignas(64) _Atomic uint32_t failure_state;
    epic_failure_info failure;
} shared_header;

/* Where things are; follows from the configuration alone. */
typedef struct shared_layout {
    int num_ranks;
    int num_slots;
    int64_t broadcast_ring_bytes; /* lanes */
    int64_t peer_ring_bytes;
    int64_t slot_bytes;
    int64_t staging_bytes; /* of one cell */
    int64_t slots_at;      /* in a block */
    int64_t staging_at;
    int64_t block_bytes;
    int64_t segment_bytes;
} shared_layout;

/* EPIC_EINVAL: staging_bytes is too little; the sentence names the least. */
epic_result shared_layout_of(const epic_config *config, shared_layout *out);

#endif
