/* SPDX-License-Identifier: Apache-2.0 */
/* One collective operation of a host context: notes meet, rows flow, the cell goes back.
 *
 * Every operation is exchange_open, one or more flows, exchange_close; of two operations that one
 * call makes, the second may go on in the exchange of the first.  Rows flow in two ways:
 *   scatter   each source offers items in order; every rank takes those that it wants (dispatch,
 *             the ids of a plan).  Sources do not wait for one another.
 *   collect   each rank makes rows for the items of every home; the home takes an item when the
 *             rows of all ranks that have part in it are there (combine).
 * A row larger than a lane's entry goes in pieces. */
#ifndef EPIC_EXCHANGE_H
#define EPIC_EXCHANGE_H

#include "base/deadline.h"
#include "context/context.h"
#include "exchange/op_header.h"

#define RANK_WORDS (EPIC_MAX_RANKS / 64)
#define PIECE_UNIT 8192 /* 1024 float64 elements: every piece but the last is a multiple */
#define PIECE_MAX (4 * PIECE_UNIT)
#define TRAILER_MAX 256 /* one float for each k */
#define TREE_LEVELS 18  /* 65536 leaves and one */

/* What this rank knows of a lane that it writes (reach.h). */
typedef struct ring_cost {
    int32_t line_ps;      /* to write a line, smoothed */
    uint32_t rows;        /* that went there */
    _Atomic bool settled; /* written so that a row before it must be, and never read */
} ring_cost;

typedef struct exchange {
    epic_context *ctx;
    const epic_transport *transport;
    epic_group *group;
    int op_slot;
    int rank, num_ranks;
    uint32_t operation;
    uint64_t tag, sequence;
    uint64_t
        header_sequence; /* the place at which the notes met: peers know the exchange by it */
    deadline deadline;   /* of the running wait */
    uint64_t record;
    uint64_t rounding; /* the caller's, put back at the end */
    uint32_t phase;
    bool is_peer_gone; /* seen gone at the last look, nothing has moved since */
    uint64_t last_check_ns;
    uint64_t waits_for[RANK_WORDS];

    /* [num_ranks] each */
    const epic_op_header **headers;
    int64_t *items;               /* what each source or home has */
    int64_t *sends, *receives;    /* entries of the flow */
    int64_t *num_sent, *num_read; /* entries done */
    int64_t *next_item_to;        /* the next item for each peer, in a lane of its own */
    int32_t *next_piece_to;
    int64_t *next_item_from; /* the next item from each peer, likewise */
    ring_cost *ring_costs;   /* of the lane to each; kept from operation to operation */
    const void **rows;
    double *sums;          /* [num_ranks, 64]: dot products that are not finished */
    unsigned char *row;    /* [row_scratch]: one quantized row */
    unsigned char *pieces; /* [TREE_LEVELS + 1, PIECE_MAX]: partials */
} exchange;

/* All exchanges of a context, one for each cell; EPIC_ENOMEM.  NULL is allowed for close. */
epic_result exchange_open_all(epic_context *ctx);
void exchange_close_all(epic_context *ctx);
int64_t exchange_bytes(const epic_config *config); /* host memory of one */

/* Publishes the note and returns once every rank's is here and they match.  On an error there is
 * nothing to close.  After a class (b) error in the notes, *out is open and the result says so:
 * the caller clears its outputs and closes. */
epic_result exchange_open(exchange **out, epic_context *ctx, uint32_t operation,
                          const epic_call *call, const epic_op_header *note, uint64_t bytes);

/* Ends the operation, which was good, and begins the tag's next one in its exchange, without a
 * bootstrap: the notes have told all that it needs, so every rank goes on or none. */
void exchange_reuse(exchange *x, uint32_t operation, uint64_t bytes);

/* Ends the operation with `result`, which it returns. */
epic_result exchange_close(exchange *x, epic_result result);

/* Nothing can move: sleeps until something may.  Class (c) errors break the group. */
epic_result exchange_wait(exchange *x);

/* Something has moved: the wait for the next thing begins now. */
void exchange_report_progress(exchange *x);

/* Counts bytes that lanes were given, for tests; once for many rows, as it waits for all stores. */
static inline void exchange_count_bytes(exchange *x, int64_t bytes)
{
    atomic_fetch_add_explicit(&x->ctx->bytes_sent, (uint64_t)bytes, memory_order_relaxed);
}

static inline void exchange_mark_awaited(exchange *x, int rank)
{
    x->waits_for[rank / 64] |= 1ull << (rank % 64);
}

static inline int64_t exchange_local_field(const exchange *x, int rank, int field)
{
    return x->headers[rank]->local[field];
}

/* How rows are cut: pieces of piece_bytes, the last one shorter. */
typedef struct row_split {
    int64_t row_bytes;
    int64_t piece_bytes;
    int32_t num_pieces; /* at least 1, also for a row of no bytes */
} row_split;

/* The largest pieces that fit a lane beside `trailer` bytes. */
row_split exchange_split_rows(const exchange *x, bool everyone, int64_t row_bytes,
                              int64_t trailer);

static inline int64_t piece_offset(const row_split *c, int32_t piece)
{
    return piece * c->piece_bytes;
}

static inline int64_t piece_size(const row_split *c, int32_t piece)
{
    const int64_t left = c->row_bytes - piece_offset(c, piece);
    return left < c->piece_bytes ? left : c->piece_bytes;
}

typedef struct scatter {
    void *self;
    const int64_t *items; /* [num_ranks] of each source */
    row_split split;
    bool (*is_sent)(void *self, int peer, int64_t item); /* of mine */
    bool (*is_received)(void *self, int from, int64_t item);
    void (*fill_entry)(void *self, int64_t item, int32_t piece, void *entry);
    void (*flush_stores)(void); /* before others read what was filled; NULL: nothing to do */
    void (*read_entry)(void *self, int from, int64_t item, int32_t piece, const void *entry);
    void (*read_own_item)(void *self, int64_t item);
} scatter;

epic_result scatter_run(exchange *x, const scatter *s);

typedef struct collect {
    void *self;
    const int64_t *items; /* [num_ranks] of each home */
    row_split split;
    int64_t trailer;
    bool (*is_sent)(void *self, int home, int64_t item); /* have I part in the home's item? */
    bool (*is_received)(void *self, int from, int64_t item); /* has `from` part in mine? */
    void (*fill_entry)(void *self, int home, int64_t item, int32_t piece, void *entry);
    void (*flush_stores)(void); /* before others read what was filled; NULL: nothing to do */
    /* rows[r] is NULL where rank r has no part; the own place is not set */
    void (*read_rows)(void *self, int64_t item, int32_t piece, const void **rows);
} collect;

epic_result collect_run(exchange *x, const collect *c);

#endif
