/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a host backend: how operations of several ranks meet and exchange bytes. */
#ifndef EPIC_TRANSPORT_H
#define EPIC_TRANSPORT_H

#include "backend/backend.h"

/* Host backends bring a transport; every operation is written once, on it (src/exchange).
 *
 * An *exchange* is one collective operation.  On each rank it holds one *cell* (0 to
 * max_in_flight - 1, chosen by that rank: peers may hold other cells for the same exchange).
 * Ranks find each other's cells by (tag, place): the place-th operation of that tag.  An operation
 * may also go on in the exchange of the one before it: then no cell has its place.
 *
 * First every rank announces a *note*, then rows flow through *lanes*: a lane goes from one rank
 * to one peer, or to EVERYONE (only if `shares`: an entry put once is read by every peer).  A
 * lane carries *entries* of one size, numbered from 0 in each *flow*; flows of an exchange follow
 * one another and every rank shapes the same flows in the same order.  Lanes are bounded: room()
 * gives memory for an entry or NULL, entry() an entry that has arrived or NULL.  Nothing here
 * blocks except wait().
 *
 * A cell is used by one thread at a time; different cells by different threads at once.  No
 * function calls back into core.  Nothing but join allocates. */

#define EVERYONE (-1)

#define NOTE_BYTES 256

typedef struct epic_note {
    int64_t same[24]; /* must be equal on all ranks; [0] is the epic_operation; the rest in
                         exchange/op_header.h */
    int64_t own[12];  /* this rank's */
    unsigned char bytes[NOTE_BYTES]; /* this rank's data, where so little is all of it: then no
                                        row has to flow */
    uint32_t
        options[60]; /* of the layer that the operation is a part of, exchange/layer_options.h;
                             read only where the hashes in `same` differ */
} epic_note;

typedef struct epic_flow {
    int64_t entry_bytes;     /* <= lane_bytes of the lanes used; equal on all ranks */
    bool everyone;           /* through the lane to EVERYONE; else one lane to each peer */
    const int64_t *sends;    /* [num_ranks] entries for each peer; everyone: all equal; the
                                   own place is not read.  Both live until the flow ends */
    const int64_t *receives; /* [num_ranks] entries from each peer: its sends to us */
} epic_flow;

/* Where a peer was last seen, as far as the transport knows. */
typedef struct epic_sight {
    bool came;      /* announced a note for (tag, place), or went past it */
    bool gone;      /* its process died, or it closed its context */
    bool closed;    /* gone, by epic_close */
    bool waiting;   /* itself waiting, and awake: seen so within the last moments */
    uint32_t phase; /* in (tag, place), what it last passed to wait() */
    uint64_t waits_for[EPIC_MAX_RANKS / 64]; /* if waiting: a bit for each rank it waits for */
    uint32_t operation;                      /* the last one that it announced, 0: none yet */
    uint64_t tag;
    uint64_t place;
    bool inside; /* it has not finished that one */
} epic_sight;

typedef struct epic_transport {
    bool shares;

    /* Bytes of a ring: the lane to EVERYONE, or a lane to one peer.  The same on all ranks.  An
     * entry may be as large as half of it.  Multiples of 64. */
    int64_t (*lane_bytes)(const epic_group *group, bool everyone);

    /* A free cell, or -1: all are in use or still read by slow peers (wait with cell -1). */
    int (*claim)(epic_group *group);

    /* Publishes note as this rank's part of (tag, place), in the claimed cell. */
    void (*announce)(epic_group *group, int cell, uint64_t tag, uint64_t place,
                     const epic_note *note);

    /* The peer's note for the exchange of this cell, or NULL: not there yet.  Valid until
     * finish. */
    const epic_note *(*note)(epic_group *group, int cell, int peer);

    /* Begins the next flow of the exchange.  All notes have been seen. */
    void (*shape)(epic_group *group, int cell, const epic_flow *flow);

    /* Memory for entry `index` of the lane, or NULL: no room yet.  64-byte aligned.  Indices
     * come in ascending order; asking for one again before it is sent gives the same memory. */
    void *(*room)(epic_group *group, int cell, int to, int64_t index);

    /* Entries below `upto` are written: let the peer (or everyone) read them. */
    void (*send)(epic_group *group, int cell, int to, int64_t upto);

    /* Entry `index` from a peer, or NULL: not there yet.  Valid until it is dropped. */
    const void *(*entry)(epic_group *group, int cell, int from, int64_t index);

    /* Entries below `upto` from this peer are not needed any more, also those not sent yet. */
    void (*drop)(epic_group *group, int cell, int from, int64_t upto);

    /* This rank has sent all of its entries and dropped all that it receives (or the group is
     * broken): the cell goes back, once the peers let it. */
    void (*finish)(epic_group *group, int cell);

    /* Sleeps until something that this cell asked for may have changed (a note, room, an entry,
     * a failure; cell -1: a free cell), or about `ms` milliseconds.  May return early.  A change
     * between the last question and this call is not lost.  `phase` and `waits_for` (a bit for
     * each rank) are what peers see of us meanwhile. */
    void (*wait)(epic_group *group, int cell, uint32_t phase, const uint64_t *waits_for,
                 uint32_t ms);

    void (*look)(epic_group *group, int peer, uint64_t tag, uint64_t place, epic_sight *out);

    /* The first failure that any rank reported is the group's; peers in wait() wake up. */
    void (*break_group)(epic_group *group, const epic_failure_info *failure);
    bool (*failure)(epic_group *group, epic_failure_info *out); /* false: whole */

    /* Bytes put into lanes so far, by this rank; for tests. */
    uint64_t (*bytes_sent)(const epic_group *group);
} epic_transport;

#endif
