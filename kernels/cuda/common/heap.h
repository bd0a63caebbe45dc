/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's heap: the device memory that its peers write into. A kernel of rank p stores into
 * the heap of rank q directly (NVLink), and rank q's kernel polls its own heap.
 *
 * Arrays marked [2] have two halves: one for even, one for odd epochs. Three kinds of memory:
 *
 *   stamped  64-bit words {epoch, value}. A reader accepts only words of the running epoch.
 *   poison   0xffffffff in every 32-bit word that has not been written. The reader polls until
 *            it finds another value, and then writes poison back.
 *   zero     0 until written. The reader writes 0 back.
 *
 * docs/internals/cuda.md has a table of which rank writes and reads each word, and when. */
#ifndef EPIC_HEAP_H
#define EPIC_HEAP_H

#include <stdint.h>

#include "rules/device_layout.h"

#define P2P_MAX_PLANNERS 16
/* largest number of trial limits: a FLAT plan that drops rows finds its limit by bisection */
#define P2P_MAX_SEARCHES 40
/* Largest number of tokens per rank that uses the low-latency kernels (lowlat/lowlat.cuh).
 * Measured: docs/lab/cuda.md. */
#ifdef EPIC_HOSTS
#define P2P_LOWLAT_TOKENS 128
#else
#define P2P_LOWLAT_TOKENS 512
#endif
#define P2P_LOWLAT_QUANTIZED_TOKENS 192 /* like P2P_LOWLAT_TOKENS, if dispatch quantizes */
#define P2P_LOWLAT_COMBINE_TOKENS 96    /* like P2P_LOWLAT_TOKENS, for combine */
/* Largest plan that low-latency kernels make (lowlat/plan.cuh). */
#define P2P_LOWLAT_CHOICES 8192 /* choices of all ranks */
#define P2P_LOWLAT_MASKS 8192   /* experts times groups of 32 tokens, over all ranks */
#define P2P_LOWLAT_EXPERTS 512  /* experts */
#define P2P_LOWLAT_ID_WORDS 16  /* 64-bit words of expert ids per token; two ids per word */
/* Largest number of experts of a layer with replicas. With more experts, the tables would not
 * fit the shared memory of a CTA. */
#define P2P_REPLICATED_EXPERTS 2048

/* The layout of a heap: the offset of each array, then sizes. The comment of an array gives its
 * kind of memory (see above) and its shape. */
typedef struct p2p_heap {
    int64_t announce; /* stamped [2][MAX_RANKS][P2P_ANNOUNCE_WORDS] */
    int64_t broken;   /* one word: P2P_BROKEN() of a failed group, else 0 */
    int64_t gone;     /* [MAX_RANKS]: P2P_GONE() of each rank that has closed, else 0 */
    /* stamped [MAX_RANKS]: for each rank, a bit mask of the ranks that it waits for; written
     * late in its time limit */
    int64_t waits;
    int64_t why;     /* char [512]: error text of the peer that aborted */
    int64_t control; /* p2p_control, for this rank only */
    /* stamped [2][MAX_RANKS][P2P_FAULT_WORDS]: first wrong value in each rank's data */
    int64_t faults;
    /* stamped [MAX_PLANNERS]: first wrong choice that each planning CTA found; used by this
     * rank only */
    int64_t first;
    /* stamped [2][num_ranks][MAX_TALLIES]: number of choices of each rank by expert */
    int64_t counts;
    /* stamped [2][num_ranks][MAX_SEARCHES][MAX_RANKS]: rows that each rank keeps under each
     * trial limit; FLAT plans only */
    int64_t searches;
    /* stamped [2][num_ranks][REPLICATED_EXPERTS]: number of choices of each rank by logical
     * expert; only for layers whose planner must choose replicas before it counts */
    int64_t chosen;
    /* stamped [MAX_PLANNERS][MAX_TALLIES]: number of choices that each planning CTA counted;
     * used by this rank only */
    int64_t tallies;
    /* [max_row_bytes]: kernels read it as row 0 if the caller has no rows; this rank only */
    int64_t scratch;
    /* stamped [2][num_ranks][max_tokens * max_top_k]: slots on this rank of each rank's tokens;
     * FLAT: their local experts */
    int64_t records;
    /* stamped [2][num_ranks][max_tokens]: row on this rank of each rank's token; FLAT only */
    int64_t rows;
#ifdef EPIC_HOSTS
    /* stamped [2][num_ranks][max_tokens]: the words *wants* (net/relay.cuh) */
    int64_t wants;
    /* uint32 [num_ranks][max_tokens]: number of pieces of a token's row that warps have stored
     * to the outbox; this rank only */
    int64_t sent;
#endif
    /* stamped [2][num_ranks][p2p_lowlat_tokens(max_tokens)][LOWLAT_ID_WORDS]: expert ids, two
     * per word */
    int64_t ids;
    /* poison [2][num_ranks - 1][max_tokens * max_top_k]: weights or their gradients */
    int64_t floats;
    int64_t escapes; /* zero [2][num_ranks - 1][escape_words]: net/staging.cuh */
    /* poison [num_ranks][max_tokens * max_top_k * blocks]: blocks of dot products
     * (combine/backward.cu); this rank only */
    int64_t parts;
    int64_t staging;      /* poison [2][num_ranks - 1][source_bytes]: rows, net/staging.cuh */
    int64_t bytes;        /* size of the whole heap */
    int64_t source_bytes; /* bytes of staging per source rank and half */
    int64_t escape_words; /* escape words per source rank and half */
    int64_t part_words;   /* words of `parts` per source rank */
} p2p_heap;

enum { /* words of an announcement */
       P2P_ANNOUNCED_SIGNATURE = 0,
       P2P_ANNOUNCED_TOKENS = 1,
       P2P_ANNOUNCED_CAPACITY = 2,
       P2P_ANNOUNCED_ROWS = 3,
       P2P_ANNOUNCE_WORDS = 4
};

enum { /* words that report a wrong value in the data of a plan */
       P2P_FAULT_KIND = 0,
       P2P_FAULT_INDEX = 1, /* index of the choice or the expert */
       P2P_FAULT_LOW = 2,   /* the wrong value, low 32 bits */
       P2P_FAULT_HIGH = 3,  /* the wrong value, high 32 bits */
       P2P_FAULT_WORDS = 4
};

/* The word `gone` of a rank that closed after operation number `epoch`. */
#define P2P_GONE(epoch) (1ull << 63 | (epoch))

/* Control memory of a rank, through which the CTAs of its kernels agree. Only its own kernels
 * read and write it. */
typedef struct p2p_control {
    uint32_t epoch; /* epoch of the last finished operation */
    uint32_t done;  /* number of CTAs that have finished the running operation or round */
    /* set by the last CTA: the epoch of the next round, which waiting CTAs may begin */
    uint32_t round;
    uint32_t planned;        /* epoch in which a plan was last completed */
    uint32_t claim;          /* 1: a thread of this rank reports the failure in p2p_status */
    uint32_t ended;          /* low-latency kernels: number of CTAs that have finished */
    uint32_t running;        /* 1 while an operation runs */
    uint64_t progress_ns;    /* device time in ns when a wait of this rank last ended well */
    uint32_t dead_polled_at; /* time of the last read of p2p_status.dead, in units of 1024 ns */
    /* copy of p2p_status.dead from that time: bit mask of dead ranks */
    uint32_t dead;
    /* Device time in ns at which a wait found that its deadline had passed. The next beat of
     * the host (P2P_AWAKE) confirms it. 0: no deadline waits for this. */
    uint64_t due;
    /* deadlines before this device time have passed, because the host has run since */
    uint64_t overdue;
    uint32_t due_beat;   /* number of beats of the host when `due` was set */
    uint32_t host_stops; /* number of stops of the process that have already moved a deadline */
    uint32_t num_postponed; /* number of times the deadline moved since the last progress */
    /* time of the last read of p2p_status.awake, in units of 1024 ns */
    uint32_t awake_polled_at;
    /* backend hosts: number of entries that threads have appended to the ring */
    uint64_t posted;
    uint64_t room;   /* the ring has free space for entries with numbers below this one */
    uint64_t epochs; /* number of epochs whose end has been posted */
/* Copies of words in host memory and in the net inbox, where polls are slow. One warp reads the
 * originals; all warps read the copies. */
#ifdef EPIC_HOSTS
    uint64_t broken; /* P2P_BROKEN() of a failed group, else 0 */
    uint64_t freed;  /* number of epochs whose puts the net has read */
    /* When this rank last read each of these from the memory where its owner writes it (not
     * from a copy): `freed`, the announcements, failures, the free space of the ring. Unit:
     * 1024 ns. */
    uint32_t freed_polled_at;
    uint32_t announcements_polled_at;
    uint32_t failure_polled_at;
    uint32_t room_polled_at;
    /* stamped, per source rank: index in staging, roughly, of the last vector that has arrived
     */
    uint64_t received_vectors[DEVICE_MAX_RANKS];
    uint64_t announcements[2][P2P_ANNOUNCE_WORDS][DEVICE_MAX_RANKS]; /* stamped */
#endif
} p2p_control;

#define P2P_CONTROL_BYTES ((int64_t)(sizeof(p2p_control) + 127) / 128 * 128)

/* Returns the number of tokens per rank whose expert ids (the array `ids`) fit the heap. */
static inline int64_t p2p_lowlat_tokens(int64_t max_tokens)
{
    return max_tokens < P2P_LOWLAT_TOKENS ? max_tokens : P2P_LOWLAT_TOKENS;
}

/* Returns the bytes of staging per source rank and half: max_tokens rows, or less if
 * staging_bytes limits the size of the whole staging. It is at least two rows, so that a packed
 * row (a row and its scales) fits. */
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

/* Returns the offset of every array and the size of a heap. It depends on the arguments only,
 * so all ranks get the same layout. */
static inline p2p_heap p2p_heap_of(int64_t num_ranks, int64_t max_tokens, int64_t max_row_bytes,
                                   int64_t staging_bytes, int64_t max_top_k)
{
    p2p_heap h;
    const int64_t peers = num_ranks - 1;
    const int64_t choices = max_tokens * max_top_k;
    h.source_bytes = p2p_source_bytes(num_ranks, max_tokens, max_row_bytes, staging_bytes);
    /* A packed row (a row and its scales) may have more pieces than a row of max_row_bytes. But
     * its escape words are indexed by the token's number in the round, and a round has fewer
     * rows if rows are longer. So space for one more piece per token suffices. */
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
    h.staging = h.parts; /* `parts` is a separate allocation on the GPU */
#else
    h.staging = h.parts + device_round_up(num_ranks * h.part_words * 4, 512);
#endif
    h.bytes = h.staging + 2 * peers * h.source_bytes;
    return h;
}

/* Returns the offset where poison memory begins; it reaches to the end of the heap. The memory
 * before it is initially zero. */
static inline int64_t p2p_heap_poison(const p2p_heap *h)
{
    return h->floats;
}

#endif
