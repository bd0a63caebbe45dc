/* SPDX-License-Identifier: Apache-2.0 */
/* An exchange is one collective operation of a host context: the ranks exchange op headers,
 * then rows.
 *
 * Every operation calls exchange_open, runs one or more flows, and calls exchange_close. If one
 * public call consists of two operations, the second may continue in the exchange of the first
 * (exchange_reuse). There are two kinds of flows:
 *
 * scatter: each source rank sends its items in ascending order, and each rank reads the items
 * that it needs. Sources do not wait for one another. The expert ids of a plan, and dispatch,
 * use it.
 *
 * collect: each rank computes a row for some items of each home. The home handles an item when
 * the rows of all contributing ranks have arrived. Combine uses it.
 *
 * A row that is larger than an entry of a ring is split into pieces. */
#ifndef EPIC_EXCHANGE_H
#define EPIC_EXCHANGE_H

#include "base/deadline.h"
#include "context/context.h"
#include "exchange/op_header.h"

#define RANK_WORDS (EPIC_MAX_RANKS / 64)
/* The size of every piece, except the last one of a row, is a multiple of this: 1024 float64
 * elements. */
#define PIECE_UNIT 8192
#define PIECE_MAX (4 * PIECE_UNIT)
#define TRAILER_MAX 256 /* largest trailer, the bytes after a row: one float for each k */
#define TREE_LEVELS 18  /* levels of a tree with 65536 leaves, plus one */

/* The measured cost of writing one ring. ring_copy.h explains how it is used. */
typedef struct ring_cost {
    int32_t line_ps; /* picoseconds to write one cache line, a moving average */
    uint32_t rows;   /* rows written so far */
    /* write_row_timed() exchanges it atomically, to wait for all earlier stores. Its value is
     * never read. */
    _Atomic bool settled;
} ring_cost;

/* The state of one operation in one op slot. One thread at a time uses it. */
typedef struct exchange {
    epic_context *ctx;
    const epic_transport *transport;
    epic_group *group;
    int op_slot;
    int rank, num_ranks;
    uint32_t operation;
    uint64_t tag, sequence;
    uint64_t header_sequence; /* sequence number with which the op headers were announced */
    deadline deadline;        /* deadline of the current wait */
    uint64_t record;          /* its record in the flight recorder */
    uint64_t rounding;        /* rounding mode of the caller, which exchange_close() restores */
    uint32_t phase;
    bool is_peer_gone; /* the last check found a peer gone; no progress since */
    uint64_t last_check_ns;
    uint64_t waits_for[RANK_WORDS];

    /* The arrays below have one element for each rank. */
    const epic_op_header **headers;
    int64_t *items;               /* items of each source or home */
    int64_t *sends, *receives;    /* entries of the current flow */
    int64_t *num_sent, *num_read; /* entries sent to and read from each rank */
    int64_t *next_item_to;        /* next item to send to each peer */
    int32_t *next_piece_to;
    int64_t *next_item_from; /* next item to read from each peer */
    ring_cost *ring_costs;   /* cost of the ring to each peer; kept between operations */
    const void **rows;
    double *sums;          /* [num_ranks, 64] dot products in progress */
    unsigned char *row;    /* one quantized row, max_row_bytes + 64 bytes */
    unsigned char *pieces; /* [TREE_LEVELS + 1, PIECE_MAX] scratch rows for partials */
} exchange;

/* exchange_open_all() allocates the exchanges of a context, one for each op slot, and returns
 * EPIC_ENOMEM if memory is short. exchange_close_all() frees them, also after a failure. */
epic_result exchange_open_all(epic_context *ctx);
void exchange_close_all(epic_context *ctx);
int64_t exchange_bytes(const epic_config *config); /* returns the host memory of one exchange */

/* Begins an operation: publishes the op header, waits for the headers of all ranks, and
 * compares them.
 *
 * On an error *out is NULL and there is nothing to close, with one exception. If a header
 * reports an error of the data, this returns that error, and *out is open. The caller then
 * clears its outputs and calls exchange_close(). `bytes` is the size that epic-info shows. */
epic_result exchange_open(exchange **out, epic_context *ctx, uint32_t operation,
                          const epic_call *call, const epic_op_header *header, uint64_t bytes);

/* Ends a successful operation and begins the next operation of its tag in the same exchange,
 * without new op headers. The headers of the first operation must contain everything that the
 * second one needs, so that all ranks take the same decisions. */
void exchange_reuse(exchange *x, uint32_t operation, uint64_t bytes);

/* Ends the operation and its exchange, and returns `result`. The caller must not use x
 * afterwards. */
epic_result exchange_close(exchange *x, epic_result result);

/* Sleeps until entries may have arrived or rings may have room. A flow calls it when it cannot
 * move any entry. Returns an error and breaks the group if a peer is gone or the deadline has
 * passed. */
epic_result exchange_wait(exchange *x);

/* Restarts the deadline. A flow calls it after it has moved entries. */
void exchange_report_progress(exchange *x);

/* Adds to the count of bytes that this rank has written into rings, which tests read. Call it
 * once for many rows, because the atomic addition waits for all earlier stores. */
static inline void exchange_count_bytes(exchange *x, int64_t bytes)
{
    atomic_fetch_add_explicit(&x->ctx->bytes_sent, (uint64_t)bytes, memory_order_relaxed);
}

/* Marks a rank as awaited: this rank waits for it. wait() publishes the awaited ranks to the
 * peers. */
static inline void exchange_mark_awaited(exchange *x, int rank)
{
    x->waits_for[rank / 64] |= 1ull << (rank % 64);
}

/* Returns element `field` of a rank's epic_op_header.local. */
static inline int64_t exchange_local_field(const exchange *x, int rank, int field)
{
    return x->headers[rank]->local[field];
}

/* The split of a row into pieces of piece_bytes, of which the last one may be shorter. */
typedef struct row_split {
    int64_t row_bytes;
    int64_t piece_bytes;
    int32_t num_pieces; /* at least 1, even for a row without bytes */
} row_split;

/* Returns the split of a row into pieces. A piece is as large as possible, so that it fits into
 * a ring entry together with `trailer` bytes. everyone: for the ring to EVERYONE, if there is
 * one. */
row_split exchange_split_rows(const exchange *x, bool everyone, int64_t row_bytes,
                              int64_t trailer);

/* piece_offset() returns where a piece begins in its row, piece_size() how many bytes it
 * has. */
static inline int64_t piece_offset(const row_split *c, int32_t piece)
{
    return piece * c->piece_bytes;
}

static inline int64_t piece_size(const row_split *c, int32_t piece)
{
    const int64_t left = c->row_bytes - piece_offset(c, piece);
    return left < c->piece_bytes ? left : c->piece_bytes;
}

/* The callbacks of a scatter flow. `self` is their first argument. All ranks must agree:
 * is_sent(peer, item) here equals is_received(this rank, item) on the peer. */
typedef struct scatter {
    void *self;
    const int64_t *items; /* [num_ranks] items of each source */
    row_split split;

    /* Returns whether this peer reads this item of this rank. */
    bool (*is_sent)(void *self, int peer, int64_t item);

    /* Returns whether this rank reads this item of rank `from`. */
    bool (*is_received)(void *self, int from, int64_t item);

    /* Writes one piece of an item into an entry of a ring. */
    void (*fill_entry)(void *self, int64_t item, int32_t piece, void *entry);

    /* Makes filled entries visible to peers before they are sent.  May be NULL. */
    void (*flush_stores)(void);

    /* Reads one piece of an item of rank `from`. */
    void (*read_entry)(void *self, int from, int64_t item, int32_t piece, const void *entry);

    /* Handles an item that this rank sends to itself, without a ring. */
    void (*read_own_item)(void *self, int64_t item);
} scatter;

/* Runs one scatter flow: sends, reads and waits until all entries are moved. Returns EPIC_OK or
 * the failure of the group. */
epic_result scatter_run(exchange *x, const scatter *s);

/* The callbacks of a collect flow. `self` is their first argument. */
typedef struct collect {
    void *self;
    const int64_t *items; /* [num_ranks] items of each home */
    row_split split;
    int64_t trailer; /* bytes that follow the first piece of a row in its entry */

    /* Returns whether this rank contributes to this item of rank `home`. */
    bool (*is_sent)(void *self, int home, int64_t item);

    /* Returns whether rank `from` contributes to this item of this rank. */
    bool (*is_received)(void *self, int from, int64_t item);

    /* Writes one piece of this rank's row for an item of rank `home` into an entry of a
     * ring. */
    void (*fill_entry)(void *self, int home, int64_t item, int32_t piece, void *entry);

    /* Makes filled entries visible to peers before they are sent.  May be NULL. */
    void (*flush_stores)(void);

    /* Handles one piece of an item of this rank. rows[r] is the entry of rank r, or NULL if
     * rank r does not contribute. rows[this rank] is not set. */
    void (*read_rows)(void *self, int64_t item, int32_t piece, const void **rows);
} collect;

/* Runs one collect flow: sends, reads and waits until all entries are moved. Returns EPIC_OK or
 * the failure of the group. */
epic_result collect_run(exchange *x, const collect *c);

#endif
