/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a host backend: how the ranks of an operation find each other and exchange rows.
 *
 * A host backend implements this table of functions.  All collective operations are written once,
 * on top of it, in src/exchange and src/host_ops.
 *
 * An *exchange* is one collective operation.  Each rank keeps it in one of its *op slots*, 0 to
 * max_in_flight - 1.  Ranks may use different op slots for the same exchange.  They find each other
 * by (tag, sequence), where sequence counts the operations of the tag from 0.  An operation may also
 * continue in the exchange of the one before it; then no op slot has its sequence number.
 *
 * Every rank first announces an *op header*.  Then rows flow through *lanes*.  A lane is a ring of
 * entries in staging memory, from one rank to one peer, or to EVERYONE if `shares` is set: then
 * each entry is written once and every peer reads it.  The entries of a lane have one size and are
 * numbered from 0 in each *flow*.  The flows of an exchange follow one another, and every rank
 * starts the same flows in the same order.
 *
 * Threads: one thread at a time uses an op slot; different threads may use different op slots at the
 * same time.  Only wait() blocks.  No function allocates memory or calls back into the core. */
#ifndef EPIC_TRANSPORT_H
#define EPIC_TRANSPORT_H

#include "backend/backend.h"

/* The value of `to` that selects the lane to all peers. */
#define EVERYONE (-1)

/* Bytes of data that fit into an op header. */
#define OP_PAYLOAD_BYTES 256

/* The first message of an operation from every rank to every other.  exchange/op_header.h names
 * the elements of both arrays. */
typedef struct epic_op_header {
    int64_t common[24]; /* must be equal on all ranks; [0] is the epic_operation */
    int64_t local[12];  /* values of this rank */
    /* Data of this rank if all of it fits; then no rows have to flow. */
    unsigned char bytes[OP_PAYLOAD_BYTES];
    /* Options of the layer (exchange/layer_options.h).  They are read only if the hashes of the
     * options in `common` differ, to name the option that differs. */
    uint32_t options[60];
} epic_op_header;

/* The shape of one flow.  Both arrays must stay valid until the flow ends. */
typedef struct epic_flow {
    int64_t entry_bytes;  /* at most half of lane_bytes; equal on all ranks */
    bool everyone;        /* use the lane to EVERYONE, not one lane to each peer */
    const int64_t *sends; /* [num_ranks] entries to each peer; all equal if everyone is set */
    const int64_t *receives; /* [num_ranks] entries from each peer */
} epic_flow;

/* The last known status of a peer, from which the core finds the ranks that keep others waiting. */
typedef struct epic_peer_status {
    bool came;      /* the peer has announced (tag, sequence) or a later one of the tag */
    bool gone;      /* its process ended, or it closed its context */
    bool closed;    /* it closed its context */
    bool waiting;   /* it is inside wait(), and its heartbeat is recent */
    uint32_t phase; /* the phase that it passed to wait() in (tag, sequence) */
    uint64_t
        waits_for[EPIC_MAX_RANKS / 64]; /* if waiting: one bit for each rank it waits for */
    uint32_t operation;                 /* the last one that it announced; 0: none yet */
    uint64_t tag;                       /* of that operation */
    uint64_t sequence;                  /* of that operation */
    bool inside;                        /* that operation has not finished on the peer */
} epic_peer_status;

typedef struct epic_transport {
    /* An entry of the lane to EVERYONE is written once and read by all peers. */
    bool shares;

    /* Returns the bytes of the lane to EVERYONE or of a lane to one peer: a multiple of 64, equal
     * on all ranks.  An entry has at most half as many bytes. */
    int64_t (*lane_bytes)(const epic_group *group, bool everyone);

    /* Claims a free op slot.  Returns -1 if all are in use or still read by slow peers; then call
     * wait() with op_slot -1. */
    int (*claim)(epic_group *group);

    /* Publishes the op header of this rank for (tag, sequence) in a claimed op slot. */
    void (*announce)(epic_group *group, int op_slot, uint64_t tag, uint64_t sequence,
                     const epic_op_header *header);

    /* Returns the peer's op header for the exchange of this op slot, or NULL if it has not
     * arrived.  The header stays valid until finish(). */
    const epic_op_header *(*note)(epic_group *group, int op_slot, int peer);

    /* Starts the next flow of the exchange.  The caller has seen the op headers of all ranks. */
    void (*shape)(epic_group *group, int op_slot, const epic_flow *flow);

    /* Returns memory for entry `index` of the lane, 64-byte aligned, or NULL if the ring is full.
     * Indices ascend.  A second call for an entry that was not sent returns the same memory. */
    void *(*room)(epic_group *group, int op_slot, int to, int64_t index);

    /* Publishes all entries below `upto` to the peer, or to all peers. */
    void (*send)(epic_group *group, int op_slot, int to, int64_t upto);

    /* Returns entry `index` of a peer, or NULL if it has not arrived.  The entry stays valid until
     * drop(). */
    const void *(*entry)(epic_group *group, int op_slot, int from, int64_t index);

    /* Releases all entries below `upto` of a peer, including entries that it has not sent yet. */
    void (*drop)(epic_group *group, int op_slot, int from, int64_t upto);

    /* Ends the exchange on this rank and returns the op slot.  This rank has sent all its entries
     * and dropped all that it receives, or the group has failed.  The op slot becomes free when the
     * peers no longer read it. */
    void (*finish)(epic_group *group, int op_slot);

    /* Sleeps until a result of the calls above may have changed for this op slot (-1: until an op
     * slot may be free), until the group fails, or for about `ms` milliseconds.  It may return
     * early.  A change between the last call and this one always ends the sleep.  Meanwhile peers
     * see `phase` and `waits_for`, one bit for each rank that this rank waits for. */
    void (*wait)(epic_group *group, int op_slot, uint32_t phase, const uint64_t *waits_for,
                 uint32_t ms);

    /* Writes the last known status of a peer, as seen from the exchange (tag, sequence). */
    void (*look)(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                 epic_peer_status *out);

    /* Marks the group as failed and wakes the peers in wait().  Only the first failure of the
     * group is kept. */
    void (*break_group)(epic_group *group, const epic_failure_info *failure);

    /* Returns true and writes *out if the group has failed. */
    bool (*failure)(epic_group *group, epic_failure_info *out);

    /* Returns the bytes of headers and entries that this rank has sent.  Tests use it. */
    uint64_t (*bytes_sent)(const epic_group *group);
} epic_transport;

#endif
