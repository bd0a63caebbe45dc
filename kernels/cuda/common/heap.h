/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of a heap, the device memory of a rank into which its peers write. A kernel of
 * rank p stores into the heap of rank q directly (NVLink), and rank q's kernel polls its own
 * heap.
 *
 * An epoch is the number of an operation or round. There are three kinds of arrays in which
 * ranks exchange words:
 *
 *   stamped  64-bit words {epoch, value}. A reader accepts only words of the running epoch.
 *   poison   32-bit words that are 0xffffffff until a rank writes them. The reader polls until
 *            it finds another value, and then writes 0xffffffff back.
 *   zero     32-bit words that are 0 until a rank writes them. The reader writes 0 back.
 *
 * Arrays whose shape begins with [2] have one half for even epochs and one half for odd epochs.
 * The index in a dimension [num_ranks] or [MAX_RANKS] is the rank that writes the part. A
 * dimension [num_ranks - 1] is similar, but has no part for the rank that owns the heap. Peers
 * write most arrays; if only the owner writes an array, its comment says so. A *choice* is a
 * token and one of its top_k experts.
 *
 * The backend `hosts` has a second memory with this layout, the net inbox, in which words from
 * ranks on other hosts arrive (net/net.cuh). docs/internals/cuda.md has a table of which rank
 * writes and reads each word, and when. */
#ifndef EPIC_HEAP_H
#define EPIC_HEAP_H

#include <stdint.h>

#include "cuda/common/hosts.h"
#include "rules/device_layout.h"

/* 1: groups with relays send records to other hosts in lists (plan/record_lists.cuh) */
#define WITH_LISTS (HOSTS && MANY_RANKS)
#define WITH_WINDOWS (!HOSTS && !MANY_RANKS) /* 1: contexts can have windows */
/* 1: seats of a group can become vacant (docs/internals/members.md). Only the build of
 * libepic_cuda_regroup.so defines EPIC_GPU_REGROUP. */
#ifdef EPIC_GPU_REGROUP
#define WITH_VACANT_SEATS (!HOSTS && !MANY_RANKS)
#else
#define WITH_VACANT_SEATS 0
#endif

/* Maximum number of planner CTAs, which together make a rank's plan. */
#define P2P_MAX_PLANNERS 16
/* The bisection of plan/flat_drop.cuh exchanges words in each repetition. A heap has this many
 * sets of words. In p2p two sets are used in turn, or with many ranks one set. In the backend
 * `hosts` each repetition has its own set, because a word in the outbox must not change until
 * its put (the copy by the net) is done, and a rank can check this only between operations. A
 * bisection has at most 40 repetitions. */
#define P2P_SEARCHES (HOSTS ? 40 : MANY_RANKS ? 1 : 2)
/* maximum number of ranks per host if relays are used (net/relay.cuh), because a relay has one
 * bit per rank of its host in a 32-bit word */
#define P2P_MAX_RELAYS 31
/* A rank uses the low-latency kernels (lowlat/lowlat.cuh) only if it has at most this many
 * tokens. The value is measured (docs/lab/cuda.md). */
#define P2P_LOWLAT_TOKENS (HOSTS ? 128 : 1024)
/* This maximum is used in place of P2P_LOWLAT_TOKENS for kernels that only make a plan. It is
 * also used for calls of dispatch for which more tokens were not measured
 * (p2p/operations.c). */
#define P2P_LOWLAT_OTHER_TOKENS 512
/* calls of dispatch that quantize rows use this maximum in place of P2P_LOWLAT_TOKENS */
#define P2P_LOWLAT_QUANTIZED_TOKENS 192
/* Combine uses its low-latency kernel for up to P2P_LOWLAT_COMBINE_TOKENS tokens. It uses the
 * kernel for more tokens if each SM then has at most P2P_LOWLAT_COMBINE_UNITS units of work
 * (p2p/combine.c). A unit is P2P_LOWLAT_UNIT_BYTES bytes of the row of a token of any rank. The
 * values were measured (docs/lab/cuda.md). */
#define P2P_LOWLAT_COMBINE_TOKENS 96
#define P2P_LOWLAT_COMBINE_UNITS 112
#define P2P_LOWLAT_UNIT_BYTES 512
/* The next values limit the plans that low-latency kernels can make (lowlat/plan.cuh). There
 * are limits because these kernels keep the plan in shared memory. */
/* A lane handles this many expert ids of one token at a time. The number of ids of a token is
 * rounded up to a multiple of this. */
#define P2P_LOWLAT_LANE_IDS 4
/* P2P_LOWLAT_IDS: maximum number of expert ids of all ranks together, if the number of ids of
 * each token is rounded up (P2P_LOWLAT_LANE_IDS). P2P_LOWLAT_MASKS: maximum number of bit masks
 * of all ranks together. Each mask marks which of 32 tokens chose an expert. */
#define P2P_LOWLAT_IDS 32768
#define P2P_LOWLAT_MASKS 16384
/* A kernel that only makes a plan has these limits in place of P2P_LOWLAT_IDS and
 * P2P_LOWLAT_MASKS. They are lower, because the general planner is faster with larger tables
 * (docs/lab/cuda.md). */
#define P2P_LOWLAT_ALONE_IDS 8192
#define P2P_LOWLAT_ALONE_MASKS 8192
/* Maximum number of experts of the layer. It must be at most 32 x 32, because compute_slabs()
 * divides the experts into chunks of 32, and a warp adds up the slots of at most 32 chunks. */
#define P2P_LOWLAT_EXPERTS 1024
/* number of 64-bit words of expert ids per token; a word has two ids */
#define P2P_LOWLAT_ID_WORDS 16
/* An entry of a list (plan/record_lists.cuh) contains the index of a token in its round. The
 * number of its bits limits the tokens of a round. */
#define P2P_LIST_TOKEN_BITS 21
/* maximum number of experts with replicas: the tables must fit into a CTA's shared memory */
#define P2P_REPLICATED_EXPERTS 2048

/* Offsets of the arrays of a heap that only the backend `hosts` has. */
typedef struct p2p_net_arrays {
    /* For each token of each rank: a bit mask of the ranks of this host that need its row. The
     * relay that forwards the row reads the mask (net/relay.cuh). Stamped words
     * [2][num_ranks][p2p_index_tokens()]. */
    int64_t wants;
    /* For each destination rank and token: the number of pieces of the row that warps have
     * stored to the outbox. Only this rank writes it: uint32
     * [num_ranks][p2p_index_tokens()]. */
    int64_t stored_pieces;
} p2p_net_arrays;

/* Sizes of a heap in libraries for many ranks. There, an operation moves its rows in rounds of
 * limited size (p2p_round_tokens()), and the arrays with words for rows have space for the rows
 * of one round. */
typedef struct p2p_round_sizes {
    int64_t tokens; /* maximum number of tokens per rank of a round */
    int64_t top_k;  /* maximum top_k, rounded up to an even number */
} p2p_round_sizes;

/* The layout of a heap: first the offset of each array in bytes, then sizes. Each comment
 * describes an array. It ends with the kind of the array's words (see the top of this file) and
 * the array's shape. */
typedef struct p2p_heap {
    /* The words that each rank announces when it begins an operation: its signature and sizes.
     * Stamped words [2][MAX_RANKS][P2P_ANNOUNCE_WORDS]. */
    int64_t announce;
    /* A struct p2p_group_words: the failure of the group and the members of this
     * generation. */
    int64_t broken;
    /* For each rank: P2P_GONE() if it has closed its context, P2P_RELEASED, or 0. 64-bit words
     * [MAX_RANKS]. */
    int64_t gone;
    /* For each rank: the ranks for which it waits, in the format of p2p_status.culprits. A rank
     * writes its word only in the last quarter of its time limit. Stamped words [MAX_RANKS]. */
    int64_t waits;
    /* The error text that a peer passed to epic_abort(). char [512]. */
    int64_t abort_text;
    /* A struct p2p_control. Only this rank writes it. */
    int64_t control;
    /* For each rank with invalid input: its first invalid value. Stamped words
     * [2][MAX_RANKS][P2P_FAULT_WORDS]. */
    int64_t faults;
    /* For each planner CTA of this rank, the index of the first invalid choice (wrong expert
     * id) that the CTA has found. Only this rank writes it: stamped words [MAX_PLANNERS]. */
    int64_t first_faults;
    /* For each rank: how many choices of its tokens go to each expert. In FLAT layers, also how
     * many rows its tokens need on each rank. With replicas, a hash of logical_of_expert comes
     * last. Stamped words [2][num_ranks][MAX_TALLIES]. */
    int64_t counts;
    /* Only for a FLAT plan that drops choices and finds keep limits by bisection
     * (plan/flat_drop.cuh). With few ranks: for each source rank and each of the last SEARCHES
     * repetitions of the bisection, the number of rows that the source's tokens need on each
     * rank. Stamped words [2][num_ranks][SEARCHES][MAX_RANKS]. With many ranks: stamped words
     * [2][SEARCHES][p2p_search_words()] (plan/owner_exchange.cuh). */
    int64_t searches;
    /* Only if plan/resolve.cuh chooses the replicas. For each rank: how many choices of its
     * tokens go to each logical expert. Stamped words [2][num_ranks][REPLICATED_EXPERTS]. */
    int64_t logical_counts;
    /* For each planner CTA of this rank: how many choices of each expert the CTA has counted.
     * Only this rank writes it: stamped words [MAX_PLANNERS][MAX_TALLIES]. In backend p2p, a
     * struct p2p_window_area follows the array. */
    int64_t tallies;
    /* A row that kernels read in place of row 0 if the caller's buffer has no rows. Only this
     * rank writes it: uint8 [max_row_bytes]. */
    int64_t scratch;
    /* The records: for each token of each rank, its slots on this rank (FLAT: its local
     * experts). Stamped words [2][num_ranks][p2p_index_choices()]. If records are sent in lists
     * (plan/record_lists.cuh), outbox and inbox have the lists here:
     * [2][num_ranks][p2p_record_words()]. */
    int64_t records;
    /* FLAT only: for each token of each rank, the index of its row on this rank. Stamped words
     * [2][num_ranks][p2p_index_tokens()]. With lists, outbox and inbox have lists here, too:
     * [2][num_ranks][p2p_flat_row_words()]. */
    int64_t flat_rows;
    __extension__ p2p_net_arrays net[HOSTS]; /* backend `hosts` only (hosts.h) */
    /* For low-latency plans: the expert ids of each token of each rank, two ids per word.
     * Stamped words [2][num_ranks][p2p_lowlat_tokens(max_tokens)][LOWLAT_ID_WORDS]. */
    int64_t ids;
    /* The weights of choices, or their gradients. Poison words
     * [2][num_ranks - 1][p2p_index_choices()]. */
    int64_t floats;
    /* Escape words (net/staging.cuh). Their bits mark the words of a row that the sender has
     * replaced because they equaled poison. Zero words [2][num_ranks - 1][escape_words]. */
    int64_t escapes;
    /* Parts of the gradients of weights (combine/backward.cu). A part is the dot product of
     * 1024 elements of a slot's row with the same elements of the gradient of its token's
     * output. Only this rank writes it: poison words [num_ranks][part_words]. */
    int64_t parts;
    /* Rows that arrive (net/staging.cuh). Poison words [2][num_ranks - 1][source_bytes]. */
    int64_t staging;
    int64_t bytes; /* size of the heap in bytes */
    /* At least max_tokens * max_top_k. With few ranks, `records`, `floats` and `parts` have
     * space for this many choices per rank. */
    int64_t choices;
    int64_t source_bytes; /* number of bytes of `staging` per source rank and half */
    int64_t escape_words; /* number of words of `escapes` per source rank and half */
    int64_t part_words;   /* number of 32-bit words of `parts` per rank */
    __extension__ p2p_round_sizes round[MANY_RANKS]; /* libraries for many ranks only */
} p2p_heap;

/* The failure and the members of the group. Kernels load these words when they begin. */
typedef struct p2p_group_words {
    /* The failure of the group (P2P_BROKEN()), or 0. Any rank may write it. Readers ignore it
     * if it contains the number of an older generation. (A generation is a period without a
     * change of members.) */
    uint64_t broken;
    /* The next two words are written by the host of this rank, only while no kernel of this
     * rank runs. generation: number of the current generation, modulo 2^32. vacant: bit mask of
     * the vacant seats, whose ranks have left the group; only in libraries with
     * WITH_VACANT_SEATS. */
    uint32_t generation, vacant;
} p2p_group_words;

enum { /* indices of the words of an announcement */
       P2P_ANNOUNCED_SIGNATURE = 0,
       P2P_ANNOUNCED_TOKENS = 1,
       P2P_ANNOUNCED_CAPACITY = 2,
       P2P_ANNOUNCED_ROWS = 3,
       P2P_ANNOUNCE_WORDS = 4
};

enum { /* indices of the words that describe a wrong value in a planner's input */
       P2P_FAULT_KIND = 0,
       P2P_FAULT_INDEX = 1, /* index of the wrong choice or expert */
       P2P_FAULT_LOW = 2,   /* the wrong value, low 32 bits */
       P2P_FAULT_HIGH = 3,  /* the wrong value, high 32 bits */
       P2P_FAULT_WORDS = 4
};

/* A rank stores this in its word `gone` when it has closed its context after the operation
 * `epoch`. */
#define P2P_GONE(epoch) (1ull << 63 | (epoch))
/* A rank stores this in its word `gone` when its group continues without the owner of this
 * heap. After that, the rank does not access the heap any more. */
#define P2P_RELEASED (1ull << 63 | 1ull << 62)

/* The lists of records that the planner CTAs of a rank are making (plan/record_lists.cuh). Zero
 * between two operations, and between two rounds. */
typedef struct p2p_list_control {
    /* number of entries of the list of each kind for each host */
    uint32_t sizes[2][DEVICE_MAX_RANKS];
    uint32_t done; /* number of planner CTAs that have added all their entries */
} p2p_list_control;

/* The control memory for the backend `hosts`. "The ring" is p2p_ring: host memory through which
 * kernels request puts from the proxy thread. */
typedef struct p2p_net_control {
    /* number of entries that kernels have appended to the ring since open */
    uint64_t posted_entries;
    /* Entries with an index below this value have space in the ring. A kernel may append such
     * an entry without reading how many entries the proxy thread has taken. */
    uint64_t ring_room;
    /* number of operations for which an end marker has been appended to the ring */
    uint64_t ended_epochs;
    /* The fields from here on are copies of words that are in host memory or in the net inbox,
     * where polls are slow. One warp at a time reads the original, and all other warps read the
     * copy. */
    uint64_t broken;
    /* number of operations for which the net has read all data from the outbox; the half of the
     * outbox that these operations used may be overwritten */
    uint64_t freed;
    /* times, in units of 1024 ns, at which this rank last read the original words */
    uint32_t freed_polled_at;
    uint32_t announcements_polled_at;
    uint32_t failure_polled_at;
    uint32_t room_polled_at;
    /* For each source rank: about how far its rows have arrived in its part of the staging. The
     * value is the index, in this part, of the last 16-byte vector that was seen to arrive.
     * Stamped words. */
    uint64_t received_vectors[DEVICE_MAX_RANKS];
    /* announcements of all ranks (stamped words); the first index is the parity of the epoch */
    uint64_t announcements[2][P2P_ANNOUNCE_WORDS][DEVICE_MAX_RANKS];
    __extension__ p2p_list_control lists[MANY_RANKS]; /* libraries for many ranks only */
} p2p_net_control;

#define P2P_OPERATIONS 9

/* The time for which the operations of one kind have waited for one rank, in units of 1024
 * ns. */
typedef struct p2p_wait_time {
    uint64_t wait;
    uint64_t alone; /* the part of `wait` in which this was the only awaited rank */
} p2p_wait_time;

/* The times for which the operations of this rank have waited for each rank. Waiting threads
 * add to the times (common/wait.cuh), and the host may copy them at any time (epic_waits). */
typedef struct p2p_waits {
    uint64_t num_operations[P2P_OPERATIONS]; /* operations of each kind that have begun */
    p2p_wait_time times[P2P_OPERATIONS][DEVICE_MAX_RANKS];
    /* For each rank q: waits for rank q have been added to `times` up to this device time. The
     * value is the low 32 bits of a time in units of 1024 ns. */
    uint32_t counted_at[DEVICE_MAX_RANKS];
    /* The ranks of the last two waits that were counted, and their epoch. Bits 0 to 7: the rank
     * of the last wait. Bits 8 to 15: the rank of the wait before it in the same epoch; if
     * there is none, the rank of the last wait again. Bits 16 to 31: the low bits of the
     * epoch. */
    uint32_t latest;
} p2p_waits;

/* Control memory of a rank, through which the CTAs of its kernels coordinate. Only this rank's
 * own kernels read and write it. */
typedef struct p2p_control {
    uint32_t epoch; /* epoch of the last finished operation */
    /* The number of CTAs that have finished the running operation or round. There are two
     * exceptions. Low-latency kernels count the CTAs that have started (p2p) or the warps that
     * have posted all their puts (hosts). Operations that call start_single_round()
     * (combine/slots.cuh) and have one round count the CTAs that have started. The number is 0
     * when the operation ends. */
    uint32_t done;
    /* Epoch of the next round. The CTA that finishes a round last sets this field, and the
     * other CTAs wait until it is set. */
    uint32_t round;
    uint32_t planned; /* the last epoch in which a plan was completed */
    /* 1 if a thread of this rank has begun to report a failure in p2p_status. Only this thread
     * reports, so that all fields of p2p_status describe the same failure. */
    uint32_t claim;
    /* Only in low-latency kernels and in end_single_round(): the number of CTAs that have
     * stored their last result. The last of these CTAs sets the number to 0. */
    uint32_t ended;
    /* 1 while an operation of this rank is running */
    uint32_t running;
    /* device time in ns at which a wait of this rank last succeeded */
    uint64_t progress_ns;
    /* time at which this rank last read p2p_status.dead, in units of 1024 ns */
    uint32_t dead_polled_at;
    /* copy of p2p_status.dead (a bit mask of dead ranks), read at dead_polled_at */
    uint32_t dead[DEVICE_RANK_WORDS];
    /* Device time in ns at which a wait found that its deadline had passed, or 0. The wait does
     * not fail at once, because the process may be suspended, for example by SIGSTOP. It fails
     * only after the next beat, which shows that the process runs (P2P_AWAKE). */
    uint64_t due;
    /* A wait fails if its deadline is before this device time, in ns. It is the latest time for
     * which later beats (P2P_AWAKE) have shown that the process ran. */
    uint64_t overdue;
    uint32_t due_beat; /* the number of beats in p2p_status.awake when `due` was set */
    /* The number of stops that this rank has seen. A stop is a period in which the process was
     * suspended; p2p_status.awake counts them. After a new stop, the rank restarts its time
     * limit. */
    uint32_t host_stops;
    /* how many times in a row the time limit was restarted, without a successful wait in
     * between */
    uint32_t num_postponed;
    /* time at which this rank last read p2p_status.awake, in units of 1024 ns */
    uint32_t awake_polled_at;
    p2p_waits waits;
    __extension__ p2p_net_control net[HOSTS]; /* backend `hosts` only (hosts.h) */
} p2p_control;

#define P2P_CONTROL_BYTES ((int64_t)(sizeof(p2p_control) + 127) / 128 * 128)

/* The part of a heap for windows. A window is memory of a rank into which its peers store rows
 * directly (docs/internals/windows.md). In the heap, this part follows the array `tallies`. It
 * is initially zero. The first index [2] of its arrays is the parity of the epoch, or of the
 * sequence number of an exchange. The index [DEVICE_MAX_RANKS] is the rank that writes. */
#define P2P_MAX_WINDOWS 256 /* maximum number of windows of a context */
/* number of bits of the offset in a place (p2p_window_words.place) */
#define P2P_WINDOW_PLACE_BITS 48

/* The permit of a rank: these words allow a peer to store rows into the rank's window. A kernel
 * with windows sends these words to each peer when it begins. Each word has its own stamp, so
 * the sender needs no fence between the words. */
typedef struct p2p_window_words {
    /* Number of this rank's tokens that always go through staging, because they are sent before
     * the plan exists. If the stamp of this word is older than the operation, the rank runs a
     * kernel that moves all rows through staging. */
    uint64_t begun;
    uint64_t call; /* p2p_self.signature: a hash of the arguments that must be equal */
    uint64_t rows; /* number of rows of the output */
    /* The place of the output of the call: its low 32 bits, then its high 32 bits. A place is
     * (1 + index of a window) << P2P_WINDOW_PLACE_BITS, plus the offset in the window in
     * bytes. */
    uint64_t place[2];
    uint64_t reserved[3];
} p2p_window_words;

/* The message that a rank sends to all ranks when a window is added
 * (src/backend/p2p/windows.c). */
typedef struct p2p_window_message {
    int64_t bytes;       /* size of the window */
    int64_t offset;      /* offset of the window in the memory that other processes map */
    uint64_t at;         /* address of the window in the rank's process */
    uint8_t handle[64];  /* cudaIpcMemHandle_t of the allocation, if num_chunks is 0 */
    uint32_t num_chunks; /* number of chunks of the memory (src/backend/p2p/chunks.h) */
    char socket[8];      /* name of the rank's socket for chunks; empty: it has none */
    uint32_t result;     /* EPIC_OK or the error that the rank has found (epic_result) */
    char sentence[400];  /* error text, if `result` is an error */
    uint64_t sequence;   /* sequence number of the exchange; written after all other fields */
} p2p_window_message;

typedef struct p2p_window_area {
    /* num_planned: number of planner CTAs that have made their part of the plan. num_stored:
     * number of CTAs that have stored all their rows into windows. The CTA that finishes last
     * sets both to 0. Only this rank's kernels write them. */
    uint32_t num_planned, num_stored;
    uint64_t reserved[15];
    p2p_window_words announced[2][DEVICE_MAX_RANKS];
    /* stored[][q] becomes the stamped word {epoch, 1} when rank q has stored all its rows of
     * the epoch into windows of this rank. */
    uint64_t stored[2][DEVICE_MAX_RANKS];
    p2p_window_message messages[2][DEVICE_MAX_RANKS];
} p2p_window_area;

/* A window of one rank. This rank has mapped the memory of the window at address `at` of its
 * own process. */
typedef struct p2p_mapped_window {
    uint8_t *at; /* NULL: not mapped */
    int64_t bytes;
} p2p_mapped_window;

/* Returns the offset of p2p_window_area in a heap, for contexts that can have windows. */
DEVICE_LAYOUT_BOTH static inline int64_t p2p_window_area_at(const p2p_heap *h)
{
    return device_round_up(h->tallies + P2P_MAX_PLANNERS * DEVICE_MAX_TALLIES * 8, 128);
}

/* Returns the number of words of `searches` per half and set. */
DEVICE_LAYOUT_BOTH static inline int64_t p2p_search_words(int64_t num_ranks)
{
    if (!MANY_RANKS) return num_ranks * DEVICE_MAX_RANKS;
    return 2 * num_ranks + (HOSTS ? 2 * (num_ranks + P2P_MAX_RELAYS * P2P_MAX_RELAYS) : 0);
}

/* Returns the number of tokens per rank for which the array `ids` of a heap has space. It is 0
 * in libraries for many ranks, which have no low-latency kernels. */
static inline int64_t p2p_lowlat_tokens(int64_t max_tokens)
{
    if (MANY_RANKS) return 0;
    return max_tokens < P2P_LOWLAT_TOKENS ? max_tokens : P2P_LOWLAT_TOKENS;
}

/* Returns the number of tokens per rank for which the arrays that are indexed by tokens of a
 * round have space. With few ranks the index is the token itself. With many ranks it counts
 * from the first token of the round. */
DEVICE_LAYOUT_BOTH static inline int64_t p2p_index_tokens(const p2p_heap *h, int64_t max_tokens)
{
    return MANY_RANKS ? h->round->tokens : max_tokens;
}

/* Like p2p_index_tokens(), for arrays with a word for each choice. */
DEVICE_LAYOUT_BOTH static inline int64_t p2p_index_choices(const p2p_heap *h)
{
    return MANY_RANKS ? h->round->tokens * h->round->top_k : h->choices;
}

/* Return the number of words per rank and half of the arrays `records` and `flat_rows`. A list
 * for a host has the space of all ranks of the host, which are at least two. It has a word with
 * its size, and two words for each choice, or for each token and rank. */
DEVICE_LAYOUT_BOTH static inline int64_t p2p_record_words(const p2p_heap *h)
{
    return p2p_index_choices(h) + WITH_LISTS;
}

DEVICE_LAYOUT_BOTH static inline int64_t p2p_flat_row_words(const p2p_heap *h,
                                                            int64_t max_tokens)
{
    const int64_t tokens = p2p_index_tokens(h, max_tokens);
    return WITH_LISTS ? 2 * tokens + 1 : tokens;
}

/* Number of tokens of each rank that a round moves. `at`: the p2p_heap. row_bytes: number of
 * bytes of staging per token. All ranks get the same result. A macro, so that the kernels for
 * few ranks keep their machine code. */
#define P2P_ROUND_TOKENS(at, row_bytes)                         \
    (MANY_RANKS ? p2p_round_tokens(&(at), (int64_t)(row_bytes)) \
                : (at).source_bytes / (int64_t)(row_bytes))

DEVICE_LAYOUT_BOTH static inline int64_t p2p_round_tokens(const p2p_heap *h, int64_t row_bytes)
{
    const int64_t tokens = h->source_bytes / row_bytes;
    return h->round->tokens < tokens ? h->round->tokens : tokens;
}

/* The staging has one part per source rank and half (even or odd epochs). Returns the size of
 * one part in bytes. If staging_bytes is 0, a part has space for max_tokens rows. Otherwise
 * staging_bytes limits the size of the whole staging. There is always space for two rows of
 * max_row_bytes, because a packed row (a row and its scales) may be longer than
 * max_row_bytes. */
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

/* Sets the sizes of the arrays with words for rows. max_top_k: even. */
static inline void p2p_size_rows(p2p_heap *h, int64_t max_tokens, int64_t max_row_bytes,
                                 int64_t max_top_k)
{
    const int64_t pieces = (max_row_bytes + 2047) / 2048;
    /* Each piece (2 KB) of a token's row has 32 escape words. There is space for one piece more
     * per token than a row of max_row_bytes has, because packed rows (a row and its scales) may
     * be longer. If rows are longer still, a round has fewer tokens, so the space suffices. */
    h->escape_words = (max_tokens + 1) * (pieces + 1) * 32;
    h->part_words = h->choices * pieces;
    if (!MANY_RANKS) return;
    /* With many ranks, a round has at most T = S / 2048 tokens, where S is source_bytes. If
     * max_row_bytes is below 2048, it takes the place of 2048, so that the longest rows can
     * always use the whole staging. Without this limit, the words for a round of very short
     * rows would need more memory than the rows. The rows of a round have at most S / 2048 + T
     * pieces. */
    const int64_t row = device_round_up(max_row_bytes, 16);
    const int64_t most = h->source_bytes / (row < 2048 ? row : 2048);
    h->round->tokens = most < max_tokens ? most : max_tokens;
    if (WITH_LISTS && h->round->tokens > 1 << P2P_LIST_TOKEN_BITS)
        h->round->tokens = 1 << P2P_LIST_TOKEN_BITS;
    h->round->top_k = max_top_k;
    const int64_t round_pieces = h->source_bytes / 2048 + h->round->tokens + 1;
    if (round_pieces * 32 < h->escape_words) h->escape_words = round_pieces * 32;
    if (round_pieces * max_top_k < h->part_words) h->part_words = round_pieces * max_top_k;
}

/* Returns the layout of a heap. It depends only on the arguments, so it is equal on all
 * ranks. */
static inline p2p_heap p2p_heap_of(int64_t num_ranks, int64_t max_tokens, int64_t max_row_bytes,
                                   int64_t staging_bytes, int64_t max_top_k)
{
    p2p_heap h;
    const int64_t peers = num_ranks - 1;
    /* max_top_k is rounded up to an even number, because in the backend `hosts` a token has an
     * even number of floats (float_stride()). */
    h.choices = device_round_up(max_tokens * device_round_up(max_top_k, 2), 64);
    h.source_bytes = p2p_source_bytes(num_ranks, max_tokens, max_row_bytes, staging_bytes);
    p2p_size_rows(&h, max_tokens, max_row_bytes, device_round_up(max_top_k, 2));
    h.announce = 0;
    h.broken = h.announce + 2 * DEVICE_MAX_RANKS * P2P_ANNOUNCE_WORDS * 8;
    h.gone = h.broken + 128;
    h.waits = h.gone + DEVICE_MAX_RANKS * 8;
    h.abort_text = h.waits + DEVICE_MAX_RANKS * 8;
    h.control = h.abort_text + 512;
    h.faults = h.control + P2P_CONTROL_BYTES;
    h.first_faults = h.faults + 2 * DEVICE_MAX_RANKS * P2P_FAULT_WORDS * 8;
    h.counts = h.first_faults + P2P_MAX_PLANNERS * 8;
    h.searches = h.counts + 2 * num_ranks * DEVICE_MAX_TALLIES * 8;
    h.logical_counts = h.searches + 2 * P2P_SEARCHES * p2p_search_words(num_ranks) * 8;
    h.tallies = h.logical_counts + 2 * num_ranks * P2P_REPLICATED_EXPERTS * 8;
    h.scratch = device_round_up(
        p2p_window_area_at(&h) + (WITH_WINDOWS ? (int64_t)sizeof(p2p_window_area) : 0), 512);
    h.records = h.scratch + device_round_up(max_row_bytes, 512);
    h.flat_rows = h.records + device_round_up(2 * num_ranks * p2p_record_words(&h) * 8, 512);
    h.ids = h.flat_rows +
            device_round_up(2 * num_ranks * p2p_flat_row_words(&h, max_tokens) * 8, 512);
    h.escapes = h.ids + device_round_up(2 * num_ranks * p2p_lowlat_tokens(max_tokens) *
                                            P2P_LOWLAT_ID_WORDS * 8,
                                        512);
    if (HOSTS) {
        const int64_t tokens = p2p_index_tokens(&h, max_tokens);
        h.net->wants = h.escapes;
        h.net->stored_pieces = h.net->wants + device_round_up(2 * num_ranks * tokens * 8, 512);
        h.escapes = h.net->stored_pieces + device_round_up(num_ranks * tokens * 4, 512);
    }
    h.floats = h.escapes + device_round_up(2 * peers * h.escape_words * 4, 512);
    h.parts = h.floats + device_round_up(2 * peers * p2p_index_choices(&h) * 4, 512);
    /* in the backend `hosts`, the array `parts` is a separate allocation on the GPU */
    h.staging = h.parts + (HOSTS ? 0 : device_round_up(num_ranks * h.part_words * 4, 512));
    h.bytes = h.staging + 2 * peers * h.source_bytes;
    return h;
}

/* Returns the offset of the first byte that is poison in a new heap. A new heap consists of
 * zeros up to this offset, followed by poison (0xffffffff). */
static inline int64_t p2p_heap_poison(const p2p_heap *h)
{
    return h->floats;
}

#endif
