/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's heap: the device memory that its peers write into.
 *
 * Arrays marked [2] are double-buffered by the parity of the epoch. "Poison" memory holds
 * 0xffffffff in every word that has not been written: a word is its own flag, and its reader
 * writes the poison back. "Stamped" memory holds 64-bit words {epoch, value}: a word is valid
 * if its epoch is that of the reader. docs/internals/cuda.md has the table of who writes which
 * word when. */
#ifndef EPIC_HEAP_H
#define EPIC_HEAP_H

#include <stdint.h>

#include "rules/device_layout.h"

#define P2P_MAX_PLANNERS 16
#define P2P_MAX_SEARCHES 40 /* exchanges of row counts while limits for dropping are sought */
/* Most tokens per rank that use the low-latency kernels (lowlat/lowlat.cuh); measured,
 * docs/lab/cuda.md. */
#ifdef EPIC_HOSTS
#define P2P_LOWLAT_TOKENS 128
#else
#define P2P_LOWLAT_TOKENS 512
#endif
#define P2P_LOWLAT_QUANTIZED_TOKENS 192 /* the same if dispatch quantizes rows */
#define P2P_LOWLAT_COMBINE_TOKENS 96 /* the same for combine; above it the stream is faster */
#define P2P_LOWLAT_CHOICES 8192      /* choices of all ranks, */
#define P2P_LOWLAT_MASKS 8192        /* experts times groups of 32 tokens, */
#define P2P_LOWLAT_EXPERTS 512       /* and experts, at most, that a low-latency CTA plans */
#define P2P_LOWLAT_ID_WORDS 16       /* words of ids per token */
/* Most experts of a layer with replicas: more do not fit the shared memory of a CTA that plans.
 */
#define P2P_REPLICATED_EXPERTS 2048

typedef struct p2p_heap {
    int64_t announce; /* stamped [2][MAX_RANKS][P2P_ANNOUNCE_WORDS] */
    int64_t broken;   /* one word: P2P_BROKEN of a failed group, else 0 */
    int64_t gone;     /* [MAX_RANKS]: P2P_GONE of a rank that has closed, else 0 */
    /* Stamped [MAX_RANKS]: bits of the ranks that a rank waits for, late in its time limit. */
    int64_t waits;
    int64_t why;     /* char [512]: error text of the peer that aborted */
    int64_t control; /* p2p_control, for this rank only */
    /* stamped [2][MAX_RANKS][P2P_FAULT_WORDS]: first wrong value of each rank */
    int64_t faults;
    int64_t first;  /* stamped [MAX_PLANNERS]: first wrong choice of each CTA; this rank only */
    int64_t counts; /* stamped [2][num_ranks][MAX_TALLIES]: choices of each rank */
    /* Stamped [2][num_ranks][MAX_SEARCHES][MAX_RANKS]: rows that are kept; FLAT only. */
    int64_t searches;
    /* stamped [2][num_ranks][REPLICATED_EXPERTS]: choices of logical experts, if experts must
     * be known before anything is counted */
    int64_t chosen;
    /* stamped [MAX_PLANNERS][MAX_TALLIES]: choices of each CTA; this rank only */
    int64_t tallies;
    int64_t scratch; /* [max_row_bytes]: stands in for missing rows; this rank only */
    /* stamped [2][num_ranks][max_tokens * max_top_k]: slots here; FLAT: local experts */
    int64_t records;
    int64_t rows; /* stamped [2][num_ranks][max_tokens]: a token's row here; FLAT only */
#ifdef EPIC_HOSTS
    int64_t wants; /* stamped [2][num_ranks][max_tokens]: net/relay.cuh */
    int64_t sent; /* uint32 [num_ranks][max_tokens]: stored pieces of a token; this rank only */
#endif
    /* Stamped [2][num_ranks][p2p_lowlat_tokens(max_tokens)][LOWLAT_ID_WORDS]: two ids per word.
     */
    int64_t ids;
    int64_t floats;  /* poison [2][num_ranks - 1][max_tokens * max_top_k] */
    int64_t escapes; /* zero [2][num_ranks - 1][escape_words] */
    int64_t parts;   /* poison [num_ranks][max_tokens * max_top_k * blocks]; this rank only */
    int64_t staging; /* poison [2][num_ranks - 1][source_bytes] */
    int64_t bytes;
    int64_t source_bytes; /* staging per source rank and parity */
    int64_t escape_words; /* per source rank and parity */
    int64_t part_words;   /* per source rank */
} p2p_heap;

enum { /* words of an announcement */
       P2P_ANNOUNCED_SIGNATURE = 0,
       P2P_ANNOUNCED_TOKENS = 1,
       P2P_ANNOUNCED_CAPACITY = 2,
       P2P_ANNOUNCED_ROWS = 3,
       P2P_ANNOUNCE_WORDS = 4
};

enum { /* words about a wrong value in the data of a plan */
       P2P_FAULT_KIND = 0,
       P2P_FAULT_INDEX = 1, /* of the choice or the expert */
       P2P_FAULT_LOW = 2,   /* of the wrong value */
       P2P_FAULT_HIGH = 3,
       P2P_FAULT_WORDS = 4
};

/* The word of a rank that closed after its operation number `epoch`. */
#define P2P_GONE(epoch) (1ull << 63 | (epoch))

/* Control memory of a rank: only its own kernels read and write it. */
typedef struct p2p_control {
    uint32_t epoch;       /* operations that this rank has finished */
    uint32_t done;        /* CTAs that have finished the running round */
    uint32_t round;       /* the epoch in which CTAs may work */
    uint32_t planned;     /* epoch whose plan is complete */
    uint32_t claim;       /* 1: the status is or will be written */
    uint32_t ended;       /* CTAs that have finished, where `done` counts something else */
    uint32_t running;     /* 1: an operation has begun and not ended */
    uint64_t progress_ns; /* device time, ns, of the last progress: a wait of this rank ended */
    uint32_t dead_polled_at; /* when `dead` was last read from the host, in units of 1024 ns */
    uint32_t dead;           /* ranks that were dead then, as bits */
    uint64_t
        due; /* time, ns, after which the host must beat before a deadline may end; 0: none */
    uint64_t overdue;    /* deadlines up to this time have passed: the host has beaten since */
    uint32_t due_beat;   /* the host's count of beats at `due` */
    uint32_t host_stops; /* the host's count of stops for which deadlines were postponed */
    uint32_t num_postponed;   /* postponements since the last progress */
    uint32_t awake_polled_at; /* when the host's `awake` was last read, in units of 1024 ns */
    uint64_t posted;          /* backend hosts: entries of the ring that have a place, */
    uint64_t room;            /* number of the first entry that has no room yet, */
    uint64_t epochs;          /* and epochs that have ended */
/* Copies of host memory and of the net inbox, so that one warp reads for all. */
#ifdef EPIC_HOSTS
    uint64_t broken;          /* P2P_BROKEN of a failed group, else 0 */
    uint64_t freed;           /* epochs of which the net has read all sources */
    uint32_t freed_polled_at; /* when each was last read, in units of 1024 ns */
    uint32_t announcements_polled_at;
    uint32_t failure_polled_at;
    uint32_t room_polled_at;
    uint64_t received_vectors
        [DEVICE_MAX_RANKS]; /* stamped: vectors that have arrived from each rank, about */
    uint64_t announcements[2][P2P_ANNOUNCE_WORDS][DEVICE_MAX_RANKS]; /* stamped */
#endif
} p2p_control;

#define P2P_CONTROL_BYTES ((int64_t)(sizeof(p2p_control) + 127) / 128 * 128)

/* Tokens per rank that low-latency kernels may have, in a group of up to max_tokens. */
static inline int64_t p2p_lowlat_tokens(int64_t max_tokens)
{
    return max_tokens < P2P_LOWLAT_TOKENS ? max_tokens : P2P_LOWLAT_TOKENS;
}

/* Bytes of staging per source and parity: max_tokens rows, or less if staging_bytes is smaller.
 * It always has room for two rows of the widest kind, so that packed rows fit, too. */
static inline int64_t p2p_source_bytes(int64_t num_ranks, int64_t max_tokens,
                                       int64_t max_row_bytes, int64_t staging_bytes)
{
    const int64_t row = device_round_up(max_row_bytes, 16);
    int64_t bytes = max_tokens * row;
    if (staging_bytes > 0 && num_ranks > 1 && staging_bytes / (2 * (num_ranks - 1)) < bytes)
        bytes = staging_bytes / (2 * (num_ranks - 1));
    if (bytes < 2 * row) bytes = 2 * row;
    return device_round_up(bytes, 512);
}

/* Lays out a heap: the offset of every array, and all bytes. The same on every rank. */
static inline p2p_heap p2p_heap_of(int64_t num_ranks, int64_t max_tokens, int64_t max_row_bytes,
                                   int64_t staging_bytes, int64_t max_top_k)
{
    p2p_heap h;
    const int64_t peers = num_ranks - 1;
    const int64_t choices = max_tokens * max_top_k;
    h.source_bytes = p2p_source_bytes(num_ranks, max_tokens, max_row_bytes, staging_bytes);
    /* one piece more than rows have: packed rows have a second row, and count from their round
     */
    h.escape_words = (max_tokens + 1) * ((max_row_bytes + 2047) / 2048 + 1) * 32;
    h.part_words = choices * ((max_row_bytes + 2047) / 2048);
    h.announce = 0;
    h.broken = h.announce + 2 * DEVICE_MAX_RANKS * P2P_ANNOUNCE_WORDS * 8;
    h.gone = h.broken + 128;
    h.waits = h.gone + DEVICE_MAX_RANKS * 8;
    h.why = h.waits + DEVICE_MAX_RANKS * 8;
    h.control = h.why + 512;
    h.faults = h.control + P2P_CONTROL_BYTES;
    h.first = h.faults + 2 * DEVICE_MAX_RANKS * P2P_FAULT_WORDS * 8;
    h.counts = h.first + P2P_MAX_PLANNERS * 8;
    h.searches = h.counts + 2 * num_ranks * DEVICE_MAX_TALLIES * 8;
    h.chosen = h.searches + 2 * num_ranks * P2P_MAX_SEARCHES * DEVICE_MAX_RANKS * 8;
    h.tallies = h.chosen + 2 * num_ranks * P2P_REPLICATED_EXPERTS * 8;
    h.scratch = device_round_up(h.tallies + P2P_MAX_PLANNERS * DEVICE_MAX_TALLIES * 8, 512);
    h.records = h.scratch + device_round_up(max_row_bytes, 512);
    h.rows = h.records + device_round_up(2 * num_ranks * choices * 8, 512);
    h.ids = h.rows + device_round_up(2 * num_ranks * max_tokens * 8, 512);
    h.escapes = h.ids + device_round_up(2 * num_ranks * p2p_lowlat_tokens(max_tokens) *
                                            P2P_LOWLAT_ID_WORDS * 8,
                                        512);
#ifdef EPIC_HOSTS
    h.wants = h.escapes;
    h.sent = h.wants + device_round_up(2 * num_ranks * max_tokens * 8, 512);
    h.escapes = h.sent + device_round_up(num_ranks * max_tokens * 4, 512);
#endif
    h.floats = h.escapes + device_round_up(2 * peers * h.escape_words * 4, 512);
    h.parts = h.floats + device_round_up(2 * peers * choices * 4, 512);
#ifdef EPIC_HOSTS
    h.staging = h.parts; /* `parts` are allocated separately, on the GPU */
#else
    h.staging = h.parts + device_round_up(num_ranks * h.part_words * 4, 512);
#endif
    h.bytes = h.staging + 2 * peers * h.source_bytes;
    return h;
}

/* Offset of the poison memory, which extends to the end; memory before it starts as zeros. */
static inline int64_t p2p_heap_poison(const p2p_heap *h)
{
    return h->floats;
}

#endif
