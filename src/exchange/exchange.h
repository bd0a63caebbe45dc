/* SPDX-License-Identifier: Apache-2.0 */
/* An exchange is the object with which a rank carries out one collective operation of a host
 * context. All ranks send op headers to each other, then rows. A second operation may follow in
 * the same exchange, without new op headers (exchange_reuse).
 *
 * An operation calls exchange_open, runs one or more flows, and calls exchange_close. A flow
 * moves the rows of *items*. An item is usually one token, numbered on its own rank. There are
 * two kinds of flows:
 *
 * - scatter: each source rank sends its own items in ascending order, and each rank reads the
 *   items that it needs. Sources do not wait for one another. Dispatch uses this flow for rows,
 *   and a plan uses it for expert ids.
 * - collect: each item has a home rank. Other ranks compute a row for the item and send it to
 *   the home. The home handles the item when the rows of all contributing ranks have arrived.
 *   Combine uses this flow: the home sums the rows of a token.
 *
 * Rows are sent as entries of rings (backend/transport.h): one ring from each rank to each
 * peer, or one ring from each rank to EVERYONE. A row that is larger than an entry is split
 * into pieces. */
#ifndef EPIC_EXCHANGE_H
#define EPIC_EXCHANGE_H

#include "base/deadline.h"
#include "context/context.h"
#include "exchange/op_header.h"

#define RANK_WORDS (EPIC_MAX_RANKS / 64)
/* The size of a piece is a multiple of PIECE_UNIT bytes, at most PIECE_MAX. The last piece of a
 * row may be shorter. PIECE_UNIT is the size of 1024 float64 elements, because dot products are
 * computed in blocks of 1024 elements. */
#define PIECE_UNIT 8192
#define PIECE_MAX (4 * PIECE_UNIT)
/* Maximum size of a trailer in bytes. A trailer follows a row in its ring entry, and has one
 * float for each choice of a token. */
#define TRAILER_MAX 256
#define TREE_LEVELS 18 /* a binary tree with 65536 leaves has 17 levels; one more is spare */

/* The measured time of writing into one ring (ring_copy.h). */
typedef struct ring_write_time {
    int32_t line_ps; /* average time of writing one cache line, in picoseconds */
    uint32_t rows;   /* number of rows written so far */
    /* Never read. write_row_timed() writes it with an atomic exchange, which returns only after
     * all earlier stores are done. */
    _Atomic bool settled;
} ring_write_time;

/* An output of a peer. The output is in a window, so this rank may store rows into it
 * directly. */
typedef struct window_target {
    /* address in this process; NULL: this rank must not store into the output */
    unsigned char *base;
    int64_t bytes; /* number of bytes from `base` to the end of the peer's window */
} window_target;

/* State of the operation in one op slot of this rank. Used by one thread at a time. */
typedef struct exchange {
    epic_context *ctx;
    const epic_transport *transport;
    epic_group *group;
    int op_slot;
    int rank, num_ranks;
    uint32_t operation;
    uint64_t tag, sequence;
    /* sequence number in the op headers; `sequence` is higher after exchange_reuse() */
    uint64_t header_sequence;
    deadline deadline;
    /* index of this operation's record in the flight recorder (base/recorder.h) */
    uint64_t record;
    uint64_t rounding; /* rounding mode of the caller, which exchange_close() restores */
    uint32_t phase;    /* the phase (PHASE_* in exchange.c), which peers can read */
    /* true: the last check found a peer gone, and no entry was sent or read since then */
    bool is_peer_gone;
    uint64_t last_check_ns;         /* time of the last check whether peers are alive */
    uint64_t waits_for[RANK_WORDS]; /* bit mask of the ranks for which this rank waits */

    /* The arrays from `headers` to `rows` have one element for each rank. The header of a
     * vacant seat (a rank that has left the group) is all zero. */
    const epic_op_header **headers;
    /* [r]: number of items of rank r (in a collect flow: of items whose home is rank r) */
    int64_t *items;
    /* number of entries that this rank sends to and receives from each rank in this flow */
    int64_t *sends, *receives;
    /* number of entries that were sent to and read from each rank so far */
    int64_t *num_sent, *num_read;
    int64_t *next_item_to; /* index of the next item to send to each peer */
    /* index of the next piece of item next_item_to[r] for each peer r */
    int32_t *next_piece_to;
    int64_t *next_item_from; /* index of the next item to read from each peer */
    ring_write_time
        /* [num_ranks]: times of writing into the ring to each peer; kept between operations */
        *ring_write_times;
    const void **rows;      /* the `rows` argument of collect.read_rows */
    window_target *targets; /* [num_ranks, NUM_WINDOW_OUTPUTS] outputs in windows (windows.h) */
    bool has_targets;       /* true: in this flow, rows are stored into windows of peers */
    /* Number of bytes that the last call of fill_entry() did not write into the ring, because
     * it stored the bytes into windows of peers, or because no peer needs them. The flow sets
     * this to 0 before each call. */
    int64_t left_out_bytes;
    /* [num_ranks, max_top_k] Partial dot products of combine_backward. Row r is for the token
     * of rank r whose pieces are arriving. Element k is the dot product of the token's gradient
     * row and the expert's output for choice k. */
    double *sums;
    unsigned char *row;          /* one quantized row, max_row_bytes + 64 bytes */
    unsigned char *scratch_rows; /* [TREE_LEVELS + 1, PIECE_MAX] rows for partial sums */
} exchange;

/* Allocate and free one exchange for each op slot of a context. If exchange_open_all() returns
 * EPIC_ENOMEM, the caller must call exchange_close_all() too. */
epic_result exchange_open_all(epic_context *ctx);
void exchange_close_all(epic_context *ctx);
int64_t exchange_bytes(const epic_config *config);

/* Begins an operation: sends this rank's op header to all ranks, waits for their headers, and
 * compares all headers. `bytes` is the size of the operation that the flight recorder stores
 * and epic-info prints.
 *
 * After an error *out is NULL, with one exception: if the header of a rank reports an error in
 * that rank's data, exchange_open() returns this error on all ranks, and *out is open. The
 * caller must then clear its outputs and call exchange_close(). */
epic_result exchange_open(exchange **out, epic_context *ctx, uint32_t operation,
                          const epic_call *call, const epic_op_header *header, uint64_t bytes);

/* Ends the operation of x and begins the next operation with the same tag in x, without new op
 * headers. Requires that the ended operation has succeeded. The op headers of the first
 * operation must contain everything on which the ranks must agree in the second operation. */
void exchange_reuse(exchange *x, uint32_t operation, uint64_t bytes);

/* Ends the operation. The caller must not use x afterwards. Returns `result`. */
epic_result exchange_close(exchange *x, epic_result result);

/* Sleeps until entries may have arrived or rings may have room. If a peer for which this rank
 * waits is gone, or if the deadline has passed, the group fails: this call and all later calls
 * of all ranks return the error. */
epic_result exchange_wait(exchange *x);

/* Restarts the timeout of the next wait. A flow calls it after it has sent or read entries, so
 * that only a wait without any progress ends in EPIC_ETIMEOUT. */
void exchange_report_progress(exchange *x);

/* Adds `bytes` to the number of bytes that this rank has written into rings. Tests read this
 * number. Call this function once for many rows, because its atomic addition waits for all
 * earlier stores. */
static inline void exchange_count_bytes(exchange *x, int64_t bytes)
{
    atomic_fetch_add_explicit(&x->ctx->bytes_sent, (uint64_t)bytes, memory_order_relaxed);
}

/* Returns true for a member of the group other than this rank. */
static inline bool exchange_is_peer(const exchange *x, int rank)
{
    return rank != x->rank && context_has_member(x->ctx, rank);
}

/* Adds a rank to waits_for. Peers read waits_for to find the rank that delays all others. */
static inline void exchange_mark_awaited(exchange *x, int rank)
{
    x->waits_for[rank / 64] |= 1ull << (rank % 64);
}

static inline int64_t exchange_local_field(const exchange *x, int rank, int field)
{
    return x->headers[rank]->local[field];
}

/* How a row is split: into num_pieces pieces. Each piece has piece_bytes bytes, except that the
 * last piece may be shorter. */
typedef struct row_split {
    int64_t row_bytes;
    int64_t piece_bytes;
    int32_t num_pieces; /* at least 1, even for a row without bytes */
} row_split;

/* Splits rows of row_bytes bytes into pieces. A piece is as large as possible, but fits into
 * one ring entry together with `trailer` more bytes. `everyone` is true if the rows go through
 * the ring to EVERYONE (if the transport has this ring), and false if they go through the rings
 * to single peers. */
row_split exchange_split_rows(const exchange *x, bool everyone, int64_t row_bytes,
                              int64_t trailer);

/* Return the offset of a piece in its row, and the size of a piece, both in bytes. */
static inline int64_t piece_offset(const row_split *c, int32_t piece)
{
    return piece * c->piece_bytes;
}

static inline int64_t piece_size(const row_split *c, int32_t piece)
{
    const int64_t left = c->row_bytes - piece_offset(c, piece);
    return left < c->piece_bytes ? left : c->piece_bytes;
}

/* The callbacks of a scatter flow. Each callback gets `self` as its first argument. Sender and
 * receiver must agree: is_sent(peer, item) on this rank equals is_received(this rank, item) on
 * the peer. The result for a vacant seat has no effect. */
typedef struct scatter {
    void *self;
    const int64_t *items; /* [num_ranks]: number of items of each source */
    row_split split;

    /* Returns true if `peer` needs item `item` of this rank. */
    bool (*is_sent)(void *self, int peer, int64_t item);

    /* Returns true if this rank needs item `item` of rank `from`. */
    bool (*is_received)(void *self, int from, int64_t item);

    /* Writes one piece of an item into an entry of a ring. */
    void (*fill_entry)(void *self, int64_t item, int32_t piece, void *entry);

    /* Called after entries are filled and before they are sent. Makes non-temporal stores
     * visible to the peers. NULL: fill_entry() uses only normal stores. */
    void (*flush_stores)(void);

    /* Reads one piece of an item of rank `from`. */
    void (*read_entry)(void *self, int from, int64_t item, int32_t piece, const void *entry);

    /* Handles an item of this rank that this rank itself needs. Such an item is not sent
     * through a ring. */
    void (*read_own_item)(void *self, int64_t item);
} scatter;

/* Runs one scatter flow: sends this rank's entries and reads the entries of its peers. Waits
 * while it can neither send nor read. Returns EPIC_OK, or the failure of the group. */
epic_result scatter_run(exchange *x, const scatter *s);

/* The callbacks of a collect flow. Each callback gets `self` as its first argument. The home of
 * an item is the rank that owns the item and receives the rows for it. Sender and receiver must
 * agree: on rank r, is_sent(h, item) must equal the result of is_received(r, item) on rank
 * h. */
typedef struct collect {
    void *self;
    const int64_t *items; /* [r]: number of items whose home is rank r */
    row_split split;
    /* size in bytes of the trailer after the first piece of a row; 0: rows have no trailer */
    int64_t trailer;

    /* Returns true if this rank sends a row for item `item` of rank `home`. */
    bool (*is_sent)(void *self, int home, int64_t item);

    /* Returns true if rank `from` sends a row for item `item` of this rank. */
    bool (*is_received)(void *self, int from, int64_t item);

    /* Writes one piece of this rank's row for an item of rank `home` into a ring entry. */
    void (*fill_entry)(void *self, int home, int64_t item, int32_t piece, void *entry);

    /* Called after entries are filled and before they are sent. Makes non-temporal stores
     * visible to the peers. NULL: fill_entry() uses only normal stores. */
    void (*flush_stores)(void);

    /* Handles one piece of an item of this rank. Called when the entries of all contributing
     * ranks for this piece have arrived. rows[r] is the entry of rank r, or NULL for this rank
     * and for ranks that do not contribute. */
    void (*read_rows)(void *self, int64_t item, int32_t piece, const void **rows);
} collect;

/* Runs one collect flow: sends rows to the homes and handles this rank's items. Waits while it
 * can neither send a row nor handle an item. Returns EPIC_OK, or the failure of the group. */
epic_result collect_run(exchange *x, const collect *c);

#endif
