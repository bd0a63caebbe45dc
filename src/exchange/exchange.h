/* SPDX-License-Identifier: Apache-2.0 */
/* One collective operation of a host context: the ranks exchange op headers, then rows.
 *
 * Every operation calls exchange_open, runs one or more flows, and calls exchange_close. If one
 * call makes two operations, the second may continue in the exchange of the first
 * (exchange_reuse). There are two kinds of flows:
 *
 * scatter: each source sends items in ascending order, and each rank reads the items that it
 * needs. Sources do not wait for one another. The ids of a plan and dispatch use it.
 *
 * collect: each rank makes one row for items of each home. The home handles an item when the
 * rows of all ranks that contribute have arrived. Combine uses it.
 *
 * A row that is larger than an entry of a lane is split into pieces. */
#ifndef EPIC_EXCHANGE_H
#define EPIC_EXCHANGE_H

#include "base/deadline.h"
#include "context/context.h"
#include "exchange/op_header.h"

#define RANK_WORDS (EPIC_MAX_RANKS / 64)
/* The size of every piece except the last is a multiple of this: 1024 float64 elements. */
#define PIECE_UNIT 8192
#define PIECE_MAX (4 * PIECE_UNIT)
#define TRAILER_MAX 256 /* bytes behind a row: one float for each k */
#define TREE_LEVELS 18  /* levels of a tree with 65536 leaves, and one */

/* The measured cost of writing one lane. ring_copy.h explains how it is used. */
typedef struct ring_cost {
    int32_t line_ps; /* picoseconds to write one cache line, a moving average */
    uint32_t rows;   /* rows written so far */
    /* An atomic exchange on it waits for all earlier stores; its value is never read. */
    _Atomic bool settled;
} ring_cost;

typedef struct exchange {
    epic_context *ctx;
    const epic_transport *transport;
    epic_group *group;
    int op_slot;
    int rank, num_ranks;
    uint32_t operation;
    uint64_t tag, sequence;
    uint64_t header_sequence; /* sequence number with which the op headers were announced */
    deadline deadline;        /* of the current wait */
    uint64_t record;
    uint64_t rounding; /* rounding mode of the caller, restored at the end */
    uint32_t phase;
    bool is_peer_gone; /* a peer was gone at the last check, and nothing has moved since */
    uint64_t last_check_ns;
    uint64_t waits_for[RANK_WORDS];

    /* The arrays below have one element for each rank. */
    const epic_op_header **headers;
    int64_t *items;               /* items of each source or home */
    int64_t *sends, *receives;    /* entries of the current flow */
    int64_t *num_sent, *num_read; /* entries that are done */
    int64_t *next_item_to;        /* next item to send on the lane to each peer */
    int32_t *next_piece_to;
    int64_t *next_item_from; /* next item to read from each peer */
    ring_cost *ring_costs;   /* of the lane to each peer; they outlive an operation */
    const void **rows;
    double *sums;          /* [num_ranks, 64] dot products in progress */
    unsigned char *row;    /* one quantized row, max_row_bytes + 64 bytes */
    unsigned char *pieces; /* [TREE_LEVELS + 1, PIECE_MAX] scratch rows for partials */
} exchange;

/* Allocates the exchanges of a context, one for each op slot. Returns EPIC_ENOMEM if memory
 * is short. exchange_close_all frees them and accepts a context without any. */
epic_result exchange_open_all(epic_context *ctx);
void exchange_close_all(epic_context *ctx);
int64_t exchange_bytes(const epic_config *config); /* host memory of one exchange */

/* Publishes the op header, waits for those of all ranks and compares them. On an error *out
 * is NULL and there is nothing to close, with one exception: if a header reports an error of
 * the data, this returns that error and *out is open. The caller then clears its outputs and
 * calls exchange_close. `bytes` is the size that epic-info shows. */
epic_result exchange_open(exchange **out, epic_context *ctx, uint32_t operation,
                          const epic_call *call, const epic_op_header *note, uint64_t bytes);

/* Ends a successful operation and begins the tag's next one in the same exchange, without
 * new op headers. The headers of the first one must contain all that the second one needs,
 * so that all ranks decide alike. */
void exchange_reuse(exchange *x, uint32_t operation, uint64_t bytes);

/* Ends the operation and returns `result`. The exchange must not be used afterwards. */
epic_result exchange_close(exchange *x, epic_result result);

/* Sleeps until something may move; called when nothing can. Returns an error and breaks the
 * group if a peer is gone or the deadline has passed. */
epic_result exchange_wait(exchange *x);

/* Restarts the deadline, because something has moved. */
void exchange_report_progress(exchange *x);

/* Adds to the bytes that this rank has written into lanes, which tests read. Call it once
 * for many rows, because the atomic addition waits for all earlier stores. */
static inline void exchange_count_bytes(exchange *x, int64_t bytes)
{
    atomic_fetch_add_explicit(&x->ctx->bytes_sent, (uint64_t)bytes, memory_order_relaxed);
}

/* Adds a rank to those that this rank waits for, which peers see. */
static inline void exchange_mark_awaited(exchange *x, int rank)
{
    x->waits_for[rank / 64] |= 1ull << (rank % 64);
}

/* Returns one local element of a rank's op header. */
static inline int64_t exchange_local_field(const exchange *x, int rank, int field)
{
    return x->headers[rank]->local[field];
}

/* How a row is split: into pieces of piece_bytes, of which the last may be shorter. */
typedef struct row_split {
    int64_t row_bytes;
    int64_t piece_bytes;
    int32_t num_pieces; /* at least 1, even for a row without bytes */
} row_split;

/* Returns the split into the largest pieces that fit into a lane together with `trailer`
 * bytes. */
row_split exchange_split_rows(const exchange *x, bool everyone, int64_t row_bytes,
                              int64_t trailer);

/* Returns where a piece begins in its row, and below the bytes that it has. */
static inline int64_t piece_offset(const row_split *c, int32_t piece)
{
    return piece * c->piece_bytes;
}

static inline int64_t piece_size(const row_split *c, int32_t piece)
{
    const int64_t left = c->row_bytes - piece_offset(c, piece);
    return left < c->piece_bytes ? left : c->piece_bytes;
}

/* The callbacks of a scatter flow.  `self` is their first argument. */
typedef struct scatter {
    void *self;
    const int64_t *items; /* [num_ranks] items of each source */
    row_split split;

    /* Does this peer read this item of this rank? */
    bool (*is_sent)(void *self, int peer, int64_t item);

    /* Does this rank read this item of rank `from`? */
    bool (*is_received)(void *self, int from, int64_t item);

    /* Writes one piece of an item into a lane's entry. */
    void (*fill_entry)(void *self, int64_t item, int32_t piece, void *entry);

    /* Makes filled entries visible to peers before they are sent.  May be NULL. */
    void (*flush_stores)(void);

    /* Reads one piece of an item of rank `from`. */
    void (*read_entry)(void *self, int from, int64_t item, int32_t piece, const void *entry);

    /* Handles an item that this rank sends to itself; it takes no lane. */
    void (*read_own_item)(void *self, int64_t item);
} scatter;

/* Runs one scatter flow.  Returns a failure of the group. */
epic_result scatter_run(exchange *x, const scatter *s);

/* The callbacks of a collect flow.  `self` is their first argument. */
typedef struct collect {
    void *self;
    const int64_t *items; /* [num_ranks] items of each home */
    row_split split;
    int64_t trailer; /* bytes behind the first piece of a row */

    /* Does this rank contribute to this item of rank `home`? */
    bool (*is_sent)(void *self, int home, int64_t item);

    /* Does rank `from` contribute to this item of this rank? */
    bool (*is_received)(void *self, int from, int64_t item);

    /* Writes one piece of this rank's row for an item of rank `home` into a lane's entry. */
    void (*fill_entry)(void *self, int home, int64_t item, int32_t piece, void *entry);

    /* Makes filled entries visible to peers before they are sent.  May be NULL. */
    void (*flush_stores)(void);

    /* Handles one piece of an item of this rank.  rows[r] is NULL if rank r does not contribute;
     * the element of this rank is not set. */
    void (*read_rows)(void *self, int64_t item, int32_t piece, const void **rows);
} collect;

/* Runs one collect flow.  Returns a failure of the group. */
epic_result collect_run(exchange *x, const collect *c);

#endif
