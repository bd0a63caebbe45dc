/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend promises.  A backend is a way to reach peers; its files export one symbol, the
 * struct epic_backend.  table.c lists all of them.  docs/internals/backends.md shows how to add
 * one. */
#ifndef EPIC_BACKEND_H
#define EPIC_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"
#include "rules/layer_tokens.h"

#define EPIC_MAX_RANKS 1024 /* host backends */
#define EPIC_MAX_CELLS 64   /* operations of one rank at once */

/* One rank's view of the group; each backend has its own. */
typedef struct epic_group epic_group;

/* What a rank tells the others before a backend is chosen. */
typedef struct epic_peer {
    uint64_t host[2];    /* same value: same host and same boot */
    uint64_t process[2]; /* same value: same process */
    int64_t pid;
    int64_t uid;
    int64_t network_ns; /* inode: same value, same abstract socket names */
    uint64_t
        library; /* same value and process: ranks share this copy of the library, and so its
                           tables; random, as an address would tell where the library lies */
} epic_peer;

/* What join is given; borrowed for the call. */
typedef struct epic_join {
    const epic_bootstrap *bootstrap; /* gather, rank, num_ranks; checked */
    const epic_config *config;       /* every default filled in, equal on all ranks */
    const epic_peer *peers;          /* [num_ranks] */
    uint64_t group_id;               /* random, equal on all ranks */
} epic_join;

/* ------------------------------------------------------------------------- transports ----
 *
 * Host backends bring a transport; every operation is written once, on it (src/exchange).
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
                         exchange/note.h */
    int64_t own[12];  /* this rank's */
    unsigned char bytes[NOTE_BYTES]; /* this rank's data, where so little is all of it: then no
                                        row has to flow */
    uint32_t options[60]; /* of the layer that the operation is a part of, exchange/options.h;
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

/* ---------------------------------------------------------------------------- backends ---- */

/* The arguments of the four loss calls, in one. */
typedef struct epic_loss {
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    /* On devices: it counts the tokens of all ranks; NULL: total_tokens does. */
    const void *plan;
    int64_t sequence_tokens; /* z-loss: 0 */
    const int32_t *load;
    const int32_t *topk_idx;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;          /* forward */
    const float *d_loss; /* backward */
    void *d_logits;      /* backward */
    uint32_t type;
    uint32_t loss_type;
    uint32_t grad_type;
    uint32_t flags;
    epic_stream stream;
} epic_loss;

/* The dense part of a layer on a device: logits = x w_gate + b_gate, and back. */
typedef struct epic_gate {
    epic_stream stream;
    const void *x; /* [tokens, hidden] of row_type */
    int64_t tokens, hidden, columns;
    int64_t block;                /* tokens of a block of the layer */
    const float *w_gate, *b_gate; /* b_gate NULL: none */
    float *logits;                /* forward: out; backward: the gradient that comes in */
    void *workspace;              /* gate_bytes */
    void *d_x;                    /* backward: added to; NULL: not wanted, as the two below */
    const void *also;             /* added to d_x, too; NULL: none */
    float *d_w_gate, *d_b_gate;
    uint32_t row_type;
    uint32_t accumulate; /* 1: to d_w_gate and d_b_gate */
    uint32_t in_pieces;  /* 1: of BF16 rows also small products are.  For tests */
    uint32_t pad;
} epic_gate;

/* The step calls of device backends: arguments arrive checked, as core's own functions of the
 * same names take them.  NULL: EPIC_ENOTSUP. */
typedef struct epic_steps {
    epic_result (*plan)(epic_group *, const epic_plan_args *);
    epic_result (*dispatch)(epic_group *, const epic_dispatch_args *);
    epic_result (*plan_dispatch)(epic_group *, const epic_plan_args *,
                                 const epic_dispatch_args *);
    epic_result (*combine)(epic_group *, const epic_combine_args *);
    epic_result (*dispatch_backward)(epic_group *, const epic_dispatch_backward_args *);
    epic_result (*combine_backward)(epic_group *, const epic_combine_backward_args *);
    epic_result (*sum)(epic_group *, const epic_allreduce_sum_args *);
    epic_result (*sum_replicas)(epic_group *, const epic_sum_replicas_args *);
    /* Router and losses: args->router has its defaults filled in; factor is what the sum over
     * tokens (backward: also d_loss) is multiplied by. */
    epic_result (*router_forward)(epic_group *, const epic_router_args *);
    epic_result (*router_backward)(epic_group *, const epic_router_backward_args *);
    epic_result (*balance_loss_forward)(epic_group *, const epic_loss *, double factor);
    epic_result (*balance_loss_backward)(epic_group *, const epic_loss *, double factor);
    epic_result (*z_loss_forward)(epic_group *, const epic_loss *, double factor);
    epic_result (*z_loss_backward)(epic_group *, const epic_loss *, double factor);
    epic_result (*bias_update)(epic_group *, const epic_bias_update_args *);
    /* args->experts has its defaults filled in, grad_type too. */
    epic_result (*experts_forward)(epic_group *, const epic_experts_args *);
    epic_result (*experts_backward)(epic_group *, const epic_experts_backward_args *);
    /* What the layer does beside the calls above.  Experts without expert_rows there: all slots are
     * one expert's. */
    epic_result (*gate)(epic_group *, const epic_gate *);
    epic_result (*gate_backward)(epic_group *, const epic_gate *);
    /* Zero-experts and the shared expert's gate: choices without zero-experts; what it is
     * multiplied by; d_shared_weights, in place, and the gradient [hidden] of w_shared_gate (NULL:
     * not wanted; workspace: experts_tiles_bytes); d_weights of zero-experts; rows added up. */
    epic_result (*sent_choices)(epic_group *, epic_stream, const layer_tokens *, int32_t *to);
    epic_result (*shared_gate)(epic_group *, epic_stream, const layer_tokens *);
    epic_result (*shared_gate_backward)(epic_group *, epic_stream, const layer_tokens *,
                                        float *gradient, bool accumulate, void *workspace);
    epic_result (*zero_weights)(epic_group *, epic_stream, const layer_tokens *);
    epic_result (*finish)(epic_group *, epic_stream, const layer_tokens *, const layer_rows *);
    /* Notices if the plan has more experts on a rank than the layer has room for, or, with
     * EPIC_TREE, unequal numbers of tokens. */
    epic_result (*fits)(epic_group *, const epic_plan_args *, uint32_t num_local);
    /* to += from (replace: =; from NULL: zeros), numbers of a type; sums of [2, n] in trees; the few
     * numbers of losses, as grouped.h has them */
    epic_result (*add)(epic_group *, epic_stream, void *to, const void *from, int64_t count,
                       uint32_t type, bool replace);
    epic_result (*trees)(epic_group *, epic_stream, float *values, int64_t n);
    epic_result (*give_losses)(epic_group *, epic_stream, const float *losses,
                               const epic_moe_args *);
    epic_result (*take_losses)(epic_group *, epic_stream, float *d_losses,
                               const epic_moe_backward_args *);
    epic_result (*check)(epic_group *, epic_failure_info *out); /* what broke the group */
    epic_result (*notice)(epic_group *); /* the oldest class (b) error not yet returned */
    uint32_t (*max_sms)(const epic_group *);
    void (*abort)(epic_group *, uint64_t tag, const char *why);
} epic_steps;

typedef struct epic_backend {
    const char *name; /* what epic_config.backend says */

    /* Can these ranks reach one another this way?  Local, quick, leaves no trace.  `why` (256
     * bytes) gets the reason when not. */
    bool (*can_join)(const epic_peer *peers, int num_ranks, const epic_config *config,
                     char *why);

    /* Collective.  On failure leaves nothing behind, and *out untouched; the sentence goes to
     * epic_fail.  After it the core tells all ranks how each fared. */
    epic_result (*join)(epic_group **out, const epic_join *join);

    /* Local.  Safe when a peer is already gone. */
    void (*leave)(epic_group *group);

    /* In a forked child: gives back what the child has of its parent's group, which goes on;
     * nothing that the parent or a peer can see may change.  NULL: the child keeps it. */
    void (*forget)(epic_group *group);

    /* What join will take, from a config with every default filled in. */
    void (*memory)(const epic_config *config, epic_memory_info *out);

    /* Copies bytes to the host if `from` is memory of this backend's devices, else false; *good:
     * they came.  Synchronizes.  NULL: it has no memory of its own. */
    bool (*fetch)(void *to, const void *from, size_t bytes, bool *good);

    /* Memory of the group's device, 64-byte aligned, and back; at open and close of a step only.
     * allocate: NULL if there is none left.  Both NULL: host memory. */
    void *(*allocate)(epic_group *group, size_t bytes);
    void (*release)(epic_group *group, void *memory);

    /* What this machine has for it, in a line of at most `size` bytes.  NULL: nothing to say. */
    void (*describe)(char *to, size_t size);

    /* How a group's peers on other hosts are really reached, as describe.  NULL: nothing to say. */
    void (*say)(const epic_group *group, char *to, size_t size);

    const epic_transport *transport; /* host backends */
    const epic_steps *steps;         /* device backends */

    /* A backend in a library of its own has its own epic_fail: this thread's last sentence of
     * it.  NULL: the core's. */
    const char *(*sentence)(void);

    /* A bootstrap of the ranks that `native`, what config.native points to, knows: epic_bootstrap_mpi.
     * NULL: it knows none. */
    epic_result (*bootstrap)(epic_bootstrap *out, const void *native, uint32_t timeout_ms);
} epic_backend;

/* Every backend of this build, in the order in which they are tried; NULL ends the list. */
extern const epic_backend *const epic_backends[];

#endif
