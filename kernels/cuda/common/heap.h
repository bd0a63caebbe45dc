/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's heap: the one piece of device memory that its peers write into.
 *
 * Everything is double buffered by the parity of the epoch where "[2]" says so.  "Poison" memory
 * holds 0xffffffff in every word that nobody has written: a word is its own flag, and who reads
 * it writes the poison back.  "Stamped" memory holds 64-bit words {epoch, value}: a word counts
 * once its epoch is the reader's.  docs/internals/cuda.md says who writes what when. */
#ifndef EPIC_HEAP_H
#define EPIC_HEAP_H

#include <stdint.h>

#include "rules/device_layout.h"

#define P2P_MAX_PLANNERS 16
#define P2P_MAX_SEARCHES 40 /* counts of rows that decide what is dropped */
/* Of a rank, at most, where latency is all: lowlat/lowlat.cuh; as measured, docs/lab/cuda.md. */
#ifdef EPIC_HOSTS
#define P2P_LOWLAT_TOKENS 128
#else
#define P2P_LOWLAT_TOKENS 512
#endif
#define P2P_LOWLAT_QUANTIZED_TOKENS 192 /* the same, of rows that dispatch quantizes; */
#define P2P_LOWLAT_COMBINE_TOKENS 96    /* and for combine, above which the stream is faster */
#define P2P_LOWLAT_CHOICES 8192         /* of all ranks, */
#define P2P_LOWLAT_MASKS 8192           /* experts times groups of 32 tokens, */
#define P2P_LOWLAT_EXPERTS 512          /* and experts that a CTA plans */
#define P2P_LOWLAT_ID_WORDS 16          /* of a token */
/* More would not fit the shared memory of a CTA that plans. */
#define P2P_REPLICATED_EXPERTS 2048

typedef struct p2p_heap {
    int64_t announce; /* stamped [2][MAX_RANKS][P2P_ANNOUNCE_WORDS] */
    int64_t broken;   /* one word: why the group is broken, 0: whole */
    int64_t gone;     /* [MAX_RANKS]: P2P_GONE of a rank that has closed, 0: here */
    /* Stamped [MAX_RANKS]: bit mask of awaited ranks, written late in the deadline. */
    int64_t waits;
    int64_t why;     /* char [512]: the sentence of the peer that aborted */
    int64_t control; /* p2p_control: this rank alone */
    int64_t faults;  /* stamped [2][MAX_RANKS][P2P_FAULT_WORDS]: the first of each rank */
    int64_t first;   /* stamped [MAX_PLANNERS]: first bad choice of a CTA; this rank alone */
    int64_t counts;  /* stamped [2][num_ranks][MAX_TALLIES]: choices of each rank */
    /* Stamped [2][num_ranks][MAX_SEARCHES][MAX_RANKS]: FLAT: rows that are kept. */
    int64_t searches;
    int64_t chosen;  /* stamped [2][num_ranks][REPLICATED_EXPERTS]: choices of logical experts,
                        where experts are to be known before anything is counted */
    int64_t tallies; /* stamped [MAX_PLANNERS][MAX_TALLIES]: this rank alone */
    int64_t scratch; /* [max_row_bytes]: a row without meaning, this rank alone */
    int64_t records; /* stamped [2][num_ranks][max_tokens * max_top_k]: slots here; FLAT: local
                        experts */
    int64_t rows;    /* stamped [2][num_ranks][max_tokens]: FLAT: the token's row here */
#ifdef EPIC_HOSTS
    int64_t wants; /* stamped [2][num_ranks][max_tokens]: net/relay.cuh */
    int64_t sent;  /* uint32 [num_ranks][max_tokens]: pieces of a token stored, here alone */
#endif
    /* Stamped [2][num_ranks][p2p_lowlat_tokens(max_tokens)][FEW_ID_WORDS]: two ids each. */
    int64_t ids;
    int64_t floats;  /* poison [2][num_ranks - 1][max_tokens * max_top_k] */
    int64_t escapes; /* zero [2][num_ranks - 1][escape_words] */
    int64_t parts;   /* poison [num_ranks][max_tokens * max_top_k * blocks]: this rank alone */
    int64_t staging; /* poison [2][num_ranks - 1][source_bytes] */
    int64_t bytes;
    int64_t source_bytes; /* staging of one source rank and parity */
    int64_t escape_words; /* of one source rank and parity */
    int64_t part_words;   /* of one source rank */
} p2p_heap;

enum { /* words of an announcement */
       P2P_ANNOUNCED_SIGNATURE = 0,
       P2P_ANNOUNCED_TOKENS = 1,
       P2P_ANNOUNCED_CAPACITY = 2,
       P2P_ANNOUNCED_ROWS = 3,
       P2P_ANNOUNCE_WORDS = 4
};

enum { /* words of a fault in a plan's data: a p2p_fault, and what it is about */
       P2P_FAULT_KIND = 0,
       P2P_FAULT_INDEX = 1, /* of the choice, or the expert */
       P2P_FAULT_LOW = 2,   /* of the value there */
       P2P_FAULT_HIGH = 3,
       P2P_FAULT_WORDS = 4
};

/* A rank that closed after its operation number `epoch`. */
#define P2P_GONE(epoch) (1ull << 63 | (epoch))

typedef struct p2p_control {
    uint32_t epoch;   /* operations that this rank has finished */
    uint32_t done;    /* CTAs that have finished the running round */
    uint32_t round;   /* the epoch that CTAs may work in */
    uint32_t planned; /* epoch whose plan is complete */
    uint32_t claim;   /* 1: the status is written or being written */
    uint32_t ended;   /* CTAs that have finished, where that is counted num_send_only_ctas */
    uint32_t running; /* 1: an operation has begun and not ended */
    uint64_t progress_ns;    /* when a wait of this rank last began, ns of its device's clock */
    uint32_t dead_polled_at; /* when one here last read the host's `dead`, units of 1024 ns */
    uint32_t dead;           /* what it was then */
    uint64_t
        due; /* the host must beat after this time, ns, before a deadline may end; 0: none */
    uint64_t overdue;       /* it has done so: deadlines up to this time have passed */
    uint32_t due_beat;      /* the host's count of beats at `due` */
    uint32_t host_stops;    /* the host's count of stops that deadlines have been put off for */
    uint32_t num_postponed; /* times since something moved */
    uint32_t awake_polled_at; /* when one here last read the host's `awake`, units of 1024 ns */
    uint64_t posted;          /* hosts: entries that have a place in the ring, */
    uint64_t room;            /* those before this one fit it, */
    uint64_t epochs;          /* and epochs that have ended */
#ifdef EPIC_HOSTS /* what warps would else ask host memory for, each for itself: net/net.cuh */
    uint64_t broken;                  /* not 0: the group is, and why */
    uint64_t freed;                   /* what the host's word was when it was last asked, */
    uint32_t freed_polled_at;         /* units of 1024 ns */
    uint32_t announcements_polled_at; /* the same of announcements, */
    uint32_t failure_polled_at;       /* of what ends an operation, */
    uint32_t room_polled_at;          /* and of room in the ring */
    uint64_t received_vectors
        [DEVICE_MAX_RANKS]; /* stamped: vectors that have come of a rank's, about */
    uint64_t announcements[2][P2P_ANNOUNCE_WORDS][DEVICE_MAX_RANKS]; /* stamped */
#endif
} p2p_control;

#define P2P_CONTROL_BYTES ((int64_t)(sizeof(p2p_control) + 127) / 128 * 128)

/* Tokens of a rank that are few, of a group's ranks that have up to max_tokens. */
static inline int64_t p2p_lowlat_tokens(int64_t max_tokens)
{
    return max_tokens < P2P_LOWLAT_TOKENS ? max_tokens : P2P_LOWLAT_TOKENS;
}

/* What travels fits one source's staging for at least one token of twice the widest row. */
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

static inline p2p_heap p2p_heap_of(int64_t num_ranks, int64_t max_tokens, int64_t max_row_bytes,
                                   int64_t staging_bytes, int64_t max_top_k)
{
    p2p_heap h;
    const int64_t peers = num_ranks - 1;
    const int64_t choices = max_tokens * max_top_k;
    h.source_bytes = p2p_source_bytes(num_ranks, max_tokens, max_row_bytes, staging_bytes);
    /* one piece more than of a row: a string has its second row, and counts from its round */
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
    h.staging = h.parts; /* which lie num_send_only_ctas, on the GPU */
#else
    h.staging = h.parts + device_round_up(num_ranks * h.part_words * 4, 512);
#endif
    h.bytes = h.staging + 2 * peers * h.source_bytes;
    return h;
}

/* Poison memory is everything from here to the end; what comes before starts as zeros. */
static inline int64_t p2p_heap_poison(const p2p_heap *h)
{
    return h->floats;
}

#endif
