/* SPDX-License-Identifier: Apache-2.0 */
/* An exchange carries out one collective operation of a host context: the ranks exchange op
 * headers, then rows. It may carry out a second operation with the same op headers.
 *
 * Every operation calls exchange_open, runs one or more flows, and calls exchange_close. If one
 * public call consists of two operations, the second may continue in the exchange of the first
 * (exchange_reuse). A flow moves the rows of *items*. An item is usually one token, numbered on
 * its own rank. There are two kinds of flows:
 *
 * scatter: each source rank sends its own items in ascending order, and each rank reads the
 * items that it needs. Sources do not wait for one another. Dispatch uses it for rows, and a
 * plan uses it for expert ids.
 *
 * collect: the items belong to their home rank. Other ranks compute a row for an item and send
 * it to the home. When the rows of all contributing ranks have arrived, the home handles the
 * item. Combine uses it: the home sums the rows of a token.
 *
 * Entries travel through rings (backend/transport.h): one ring from each rank to each peer, or
 * one from each rank to EVERYONE, whose entries all peers read. A row that is larger than an
 * entry of a ring is split into pieces. */
#ifndef EPIC_EXCHANGE_H
#define EPIC_EXCHANGE_H

#include "base/deadline.h"
#include "context/context.h"
#include "exchange/op_header.h"

#define RANK_WORDS (EPIC_MAX_RANKS / 64)
/* Every piece of a row, except the last one, has a multiple of this many bytes: the size of
 * 1024 float64 elements. A dot product is computed in blocks of 1024 elements. */
#define PIECE_UNIT 8192
#define PIECE_MAX (4 * PIECE_UNIT)
/* largest size in bytes of a trailer: the weights that follow a row in its ring entry, one
 * float for each of the token's choices */
#define TRAILER_MAX 256
#define TREE_LEVELS 18 /* a binary tree with 65536 leaves has 17 levels; one more is spare */

/* The measured cost of writing one ring. ring_copy.h explains how it is used. */
typedef struct ring_cost {
    int32_t line_ps; /* picoseconds to write one cache line, a moving average */
    uint32_t rows;   /* rows written so far */
    /* write_row_timed() does an atomic exchange on this field, to wait for all earlier stores.
     * The value is never used. */
    _Atomic bool settled;
} ring_cost;

/* An output of a peer that lies in a window. */
typedef struct window_target {
    unsigned char *base; /* address in this process; NULL: this rank must not store there */
    int64_t bytes;       /* bytes from `base` to the end of the peer's window */
} window_target;

/* The state of one operation in one op slot. One thread at a time uses it. */
typedef struct exchange {
    epic_context *ctx;
    const epic_transport *transport;
    epic_group *group;
    int op_slot;
    int rank, num_ranks;
    uint32_t operation;
    uint64_t tag, sequence;
    /* Sequence number of the operation whose op headers were sent. After exchange_reuse(),
     * `sequence` is higher than this. */
    uint64_t header_sequence;
    deadline deadline; /* deadline of the current wait */
    uint64_t record;   /* this operation's record in the flight recorder */
    uint64_t rounding; /* rounding mode of the caller, which exchange_close() restores */
    uint32_t phase;    /* how far the exchange is; peers can read it */
    /* true: the last check found a peer gone, and no entry has moved since */
    bool is_peer_gone;
    uint64_t last_check_ns;         /* time of the last check whether peers are alive */
    uint64_t waits_for[RANK_WORDS]; /* one bit for each rank that this rank waits for */

    /* The arrays from `headers` to `rows` have one element for each rank. */
    const epic_op_header **headers;
    /* number of items of each source (scatter) or home (collect) */
    int64_t *items;
    int64_t *sends, *receives; /* entries to and from each rank in this flow */
    /* number of these entries that were sent to and read from each rank so far */
    int64_t *num_sent, *num_read;
    int64_t *next_item_to;   /* next item to send to each peer */
    int32_t *next_piece_to;  /* next piece of that item */
    int64_t *next_item_from; /* next item to read from each peer */
    ring_cost *ring_costs;   /* cost of the ring to each peer; kept between operations */
    const void **rows;       /* the `rows` argument of collect.read_rows */
    window_target *targets;  /* [num_ranks, NUM_WINDOW_OUTPUTS]; exchange/windows.h */
    bool has_targets;        /* true: this flow stores into windows */
    /* Bytes of the last entry that fill_entry() did not write into the ring, because it stored
     * them into windows, or no peer needs them. The flow sets it to 0 before each entry. */
    int64_t left_out_bytes;
    /* [num_ranks, 64] unfinished dot products of combine_backward: one for each k of the token
     * whose pieces arrive from a rank */
    double *sums;
    unsigned char *row;    /* one quantized row, max_row_bytes + 64 bytes */
    unsigned char *pieces; /* [TREE_LEVELS + 1, PIECE_MAX] scratch rows for partials */
} exchange;

/* exchange_open_all() allocates one exchange for each op slot of a context. It returns
 * EPIC_ENOMEM if memory is short. exchange_close_all() frees the exchanges, also after such a
 * failure. */
epic_result exchange_open_all(epic_context *ctx);
void exchange_close_all(epic_context *ctx);
int64_t exchange_bytes(const epic_config *config); /* returns the host memory of one exchange */

/* Begins an operation: publishes the op header, waits for the headers of all ranks, and
 * compares them.
 *
 * On an error *out is NULL and there is nothing to close, with one exception. If a rank's
 * header reports an error in that rank's data, this returns that error, and *out is open. The
 * caller then clears its outputs and calls exchange_close(). epic-info shows `bytes` as the
 * size of the operation. */
epic_result exchange_open(exchange **out, epic_context *ctx, uint32_t operation,
                          const epic_call *call, const epic_op_header *header, uint64_t bytes);

/* Ends a successful operation and begins the next operation of its tag in the same exchange,
 * without new op headers. The headers of the first operation must contain everything that the
 * second one needs, so that all ranks take the same decisions. */
void exchange_reuse(exchange *x, uint32_t operation, uint64_t bytes);

/* Ends the operation and its exchange, and returns `result`. The caller must not use x
 * afterwards. */
epic_result exchange_close(exchange *x, epic_result result);

/* Sleeps until entries may have arrived or rings may have room. A flow calls it when it can
 * neither send nor read an entry. If an awaited peer is gone or the deadline has passed, the
 * group fails: all calls of all ranks then return this error. */
epic_result exchange_wait(exchange *x);

/* Restarts the deadline of the wait. A flow calls it after it has moved entries, so that only a
 * wait without any progress ends in EPIC_ETIMEOUT. */
void exchange_report_progress(exchange *x);

/* Adds `bytes` to the number of bytes that this rank has written into rings. Tests read that
 * number. Call it once for many rows, because the atomic addition waits for all earlier
 * stores. */
static inline void exchange_count_bytes(exchange *x, int64_t bytes)
{
    atomic_fetch_add_explicit(&x->ctx->bytes_sent, (uint64_t)bytes, memory_order_relaxed);
}

/* Adds a rank to waits_for, the ranks that this rank waits for. During a wait, peers can read
 * waits_for to find the rank that delays everyone. */
static inline void exchange_mark_awaited(exchange *x, int rank)
{
    x->waits_for[rank / 64] |= 1ull << (rank % 64);
}

/* Returns element `field` of a rank's epic_op_header.local. */
static inline int64_t exchange_local_field(const exchange *x, int rank, int field)
{
    return x->headers[rank]->local[field];
}

/* How a row is split: into num_pieces pieces of piece_bytes bytes. The last piece may be
 * shorter. */
typedef struct row_split {
    int64_t row_bytes;
    int64_t piece_bytes;
    int32_t num_pieces; /* at least 1, even for a row without bytes */
} row_split;

/* Splits rows of row_bytes bytes into the largest pieces that fit, with `trailer` more bytes,
 * into one ring entry. If `everyone` is true and the transport has a ring to EVERYONE, the
 * entries of that ring limit the size. Otherwise the entries of a ring to one peer do. */
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

/* The callbacks of a scatter flow. Their first argument is `self`. Sender and receiver must
 * agree: is_sent(peer, item) on this rank equals is_received(this rank, item) on the peer. */
typedef struct scatter {
    void *self;
    const int64_t *items; /* [num_ranks] items of each source */
    row_split split;

    /* Returns whether `peer` needs item `item` of this rank. */
    bool (*is_sent)(void *self, int peer, int64_t item);

    /* Returns whether this rank needs item `item` of rank `from`. */
    bool (*is_received)(void *self, int from, int64_t item);

    /* Writes one piece of an item into an entry of a ring. */
    void (*fill_entry)(void *self, int64_t item, int32_t piece, void *entry);

    /* Called after entries are filled and before they are sent. Makes stores past the caches
     * visible to the peers. NULL: fill_entry() uses only normal stores. */
    void (*flush_stores)(void);

    /* Reads one piece of an item of rank `from`. */
    void (*read_entry)(void *self, int from, int64_t item, int32_t piece, const void *entry);

    /* Handles an item that this rank sends to itself, without a ring. */
    void (*read_own_item)(void *self, int64_t item);
} scatter;

/* Runs one scatter flow: sends this rank's entries, reads those of its peers, and waits when
 * neither is possible. Returns EPIC_OK, or the failure of the group. */
epic_result scatter_run(exchange *x, const scatter *s);

/* The callbacks of a collect flow. Their first argument is `self`. As in a scatter flow,
 * is_sent(home, item) on this rank equals is_received(this rank, item) on the home. */
typedef struct collect {
    void *self;
    const int64_t *items; /* [num_ranks] items of each home */
    row_split split;
    int64_t trailer; /* bytes that follow the first piece of a row in its entry */

    /* Returns whether this rank sends a row for item `item` of rank `home`. */
    bool (*is_sent)(void *self, int home, int64_t item);

    /* Returns whether rank `from` sends a row for item `item` of this rank. */
    bool (*is_received)(void *self, int from, int64_t item);

    /* Writes one piece of this rank's row for an item of rank `home` into an entry of a
     * ring. */
    void (*fill_entry)(void *self, int home, int64_t item, int32_t piece, void *entry);

    /* Called after entries are filled and before they are sent. Makes stores past the caches
     * visible to the peers. NULL: fill_entry() uses only normal stores. */
    void (*flush_stores)(void);

    /* Handles one piece of an item of this rank, when the entries of all contributing ranks
     * have arrived. rows[r] is the entry of rank r, or NULL if rank r does not contribute or is
     * this rank. */
    void (*read_rows)(void *self, int64_t item, int32_t piece, const void **rows);
} collect;

/* Runs one collect flow: sends rows to the homes, handles this rank's items, and waits when
 * neither is possible. Returns EPIC_OK, or the failure of the group. */
epic_result collect_run(exchange *x, const collect *c);

#endif
