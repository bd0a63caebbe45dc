/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a host backend: functions through which ranks find each other and exchange
 * rows.
 *
 * Each host backend implements this table. The operations in src/exchange and src/host_ops use
 * no other functions of a backend, so each operation is written once for all host backends.
 *
 * An *exchange* is the communication of one public call, usually one operation. (tag, sequence)
 * identifies an operation: sequence is the running number of the operation within the tag, from
 * 0. A call that makes a plan and dispatches with it makes two operations in one exchange.
 * Ranks announce only the first operation, and its (tag, sequence) identifies the exchange.
 *
 * Each rank keeps the state of an exchange in one of its *op slots*, numbered 0 to
 * max_in_flight - 1. Ranks may use different op slots for one exchange, because they find each
 * other's slot by (tag, sequence).
 *
 * Every rank first announces an *op header*. After that the ranks send rows through *rings*. A
 * ring is a ring buffer in staging memory, from one rank to one peer. Its elements are
 * *entries*, each with a row or a part of a row. If epic_transport.shares is set, each rank
 * also has one ring to all its peers (EVERYONE): the rank writes each entry once, and every
 * peer reads it. A *flow* is a sequence of entries of one size, numbered from 0. All ranks run
 * the flows of an exchange in the same order.
 *
 * Threads: only one thread at a time may use an op slot. Different threads may use different op
 * slots at the same time. Only wait() and the functions for windows block. No function
 * allocates memory, or calls a function of src/exchange or src/host_ops. */
#ifndef EPIC_TRANSPORT_H
#define EPIC_TRANSPORT_H

#include "backend/backend.h"
#include "backend/regroup.h"
#include "backend/seat_set.h"

/* value of the argument `to` of room() and send(): the ring that all peers read */
#define EVERYONE (-1)

/* maximum size in bytes of the array `bytes` in an op header */
#define OP_PAYLOAD_BYTES 256

/* The first message that every rank sends to every other rank in an operation.
 * exchange/op_header.h names the elements of `common` and `local`. */
typedef struct epic_op_header {
    /* values that must be equal on all ranks; common[0] is the epic_operation */
    int64_t common[24];
    int64_t local[14]; /* values that may differ between ranks */
    /* Data of some operations, for example the expert ids of a plan or the addends of an
     * all-reduce. If the data is small enough on every rank, it is sent in this array instead
     * of a flow. */
    unsigned char bytes[OP_PAYLOAD_BYTES];
    /* Options of the layer (exchange/layer_options.h). Hashes of the options are in `common`.
     * Peers read the options only if the hashes differ, to report the option that differs. */
    uint32_t options[60];
} epic_op_header;

/* The shape of one flow. `sends` and `receives` must stay valid until the flow ends. */
typedef struct epic_flow {
    /* size of an entry, at most half of ring_bytes(); equal on all ranks */
    int64_t entry_bytes;
    bool everyone; /* true: use the ring to EVERYONE; false: one ring to each peer */
    /* [num_ranks]: number of entries to send to each peer; all equal if `everyone` is set */
    const int64_t *sends;
    const int64_t *receives; /* [num_ranks]: number of entries to receive from each peer */
} epic_flow;

/* The last known status of a peer. When a wait has passed its deadline, src/exchange compares
 * the status of all peers to find the culprits. */
typedef struct epic_peer_status {
    /* true: the peer has announced the exchange (tag, sequence) or a later exchange of the same
     * tag */
    bool has_announced;
    bool is_gone;    /* the peer's process has exited, or the peer has closed its context */
    bool has_closed; /* the peer has closed its context */
    bool is_waiting; /* a recent report of the peer shows that it is inside wait() */
    /* the phase that the peer last passed to wait() in the exchange (tag, sequence) */
    uint32_t phase;
    /* if is_waiting: bit mask of the ranks for which the peer waits */
    uint64_t waits_for[EPIC_MAX_RANKS / 64];
    uint32_t operation; /* the operation that the peer announced last; 0: none */
    uint64_t tag;
    uint64_t sequence; /* tag and sequence number of `operation` */
    bool is_inside;    /* true: the peer has not finished `operation` */
} epic_peer_status;

/* Size in bytes of a window's handle: the data that peers need to map the window. Its format
 * depends on the backend. */
#define WINDOW_HANDLE_BYTES 16

/* This rank's memory in a window, as the caller passed it. */
typedef struct epic_window_memory {
    void *data;    /* NULL: the backend allocates the memory */
    int64_t bytes; /* size of the memory; above 0 */
    int fd;        /* descriptor of the file that is mapped at `data`; -1: none */
    int64_t fd_offset;
} epic_window_memory;

/* The part of a transport for windows: memory of a rank into which its peers store rows
 * directly (docs/internals/windows.md). */
typedef struct epic_window_transport {
    /* Makes this rank's memory available to all peers, and writes the window's handle to
     * `handle`. If memory->data is NULL, allocates the memory, which the caller releases with
     * munmap(). src/exchange announces the op header only after offer() has returned. If
     * offer() fails on any rank, the public call fails on all ranks: with EPIC_ENOMEM, or with
     * EPIC_ENOTSUP for every other error. */
    epic_result (*offer)(epic_group *group, epic_window_memory *memory, unsigned char *handle);

    /* Maps the window of `bytes` bytes that `peer` has offered in the same call, and sets *at
     * to the address of the mapping. `handle` and `bytes` come from the peer's op header. */
    epic_result (*map)(epic_group *group, int peer, const unsigned char *handle, int64_t bytes,
                       void **at);

    /* Releases the mapping at address `at`, which map() has returned. */
    void (*unmap)(epic_group *group, void *at, int64_t bytes);

    /* An operation calls begin_stores() before its first store into windows of peers, and
     * end_stores() after the last one. */
    void (*begin_stores)(epic_group *group);
    void (*end_stores)(epic_group *group);

    /* Returns false if a peer has closed its context, so that this rank must not store into the
     * peer's windows. The caller must have called begin_stores(). */
    bool (*may_store)(epic_group *group, int peer);

    /* Marks this rank as closed, and waits until no living peer stores into its windows.
     * Returns false if the wait reaches the deadline of the context. */
    bool (*close)(epic_group *group);
} epic_window_transport;

typedef struct epic_transport {
    /* The functions for windows; NULL: ranks cannot store into memory of other ranks. */
    const epic_window_transport *windows;

    /* The functions that make the next generation; NULL: the members never change. */
    const epic_regroup_transport *regroup;

    bool shares; /* true: the backend has a ring to EVERYONE */

    /* Returns the size in bytes of the ring to EVERYONE, or of a ring to one peer. The size is
     * a multiple of 64 and equal on all ranks. An entry has at most half of this size. */
    int64_t (*ring_bytes)(const epic_group *group, bool everyone);

    /* Claims a free op slot and returns its index. An op slot is not free while this rank uses
     * the slot or while a slow peer still reads the slot. Returns -1 if no op slot is free. In
     * this case the caller calls wait() with op_slot -1. */
    int (*claim)(epic_group *group);

    /* Publishes this rank's op header for (tag, sequence) in a claimed op slot, and wakes peers
     * that wait for it. */
    void (*announce)(epic_group *group, int op_slot, uint64_t tag, uint64_t sequence,
                     const epic_op_header *header);

    /* Returns the peer's op header for the exchange of this op slot, or NULL if the header has
     * not arrived. The header stays valid until finish(). */
    const epic_op_header *(*op_header)(epic_group *group, int op_slot, int peer);

    /* Starts the next flow of the exchange. Requires that op_header() has returned the op
     * headers of all ranks. */
    void (*shape)(epic_group *group, int op_slot, const epic_flow *flow);

    /* Returns the memory, 64-byte aligned, for entry `index` of the current flow to the peer
     * `to` (or EVERYONE), or NULL while the ring is full. The caller writes entries in
     * ascending order. Until an entry is sent, room() returns the same memory for it. */
    void *(*room)(epic_group *group, int op_slot, int to, int64_t index);

    /* Sends all entries of the current flow with an index below `upto` to the peer `to` (or
     * EVERYONE). */
    void (*send)(epic_group *group, int op_slot, int to, int64_t upto);

    /* Returns entry `index` of the current flow from the peer `from`, or NULL if the entry has
     * not arrived. The entry stays valid until drop(). */
    const void *(*entry)(epic_group *group, int op_slot, int from, int64_t index);

    /* Releases the entries with an index below `upto` of the current flow from the peer `from`,
     * so that the peer can reuse the memory of these entries. Entries that this rank does not
     * need may be released before they arrive. */
    void (*drop)(epic_group *group, int op_slot, int from, int64_t upto);

    /* Ends the exchange on this rank and releases its op slot. The slot becomes free when no
     * peer reads it any more. Unless the group has failed, this rank must have sent and dropped
     * all entries of its flows. */
    void (*finish)(epic_group *group, int op_slot);

    /* Sleeps until one of the functions above may return another result for this op slot, until
     * the group fails, or for about `ms` milliseconds (0: no sleep). With op_slot -1, sleeps
     * until an op slot may be free. wait() may return early. It misses no change: if something
     * has changed since the caller's last call of a function above for this op slot, wait()
     * returns at once.
     *
     * While a rank is in wait(), its peers can read `phase` and `waits_for` with look(). The
     * caller chooses the value of `phase`. `waits_for` [EPIC_MAX_RANKS / 64] is a bit mask of
     * the ranks for which this rank waits. */
    void (*wait)(epic_group *group, int op_slot, uint32_t phase, const uint64_t *waits_for,
                 uint32_t ms);

    /* Writes the last known status of a peer to *out: its phase in the exchange (tag,
     * sequence), and the operation that it announced last. */
    void (*look)(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                 epic_peer_status *out);

    /* Returns true if any peer is known to be gone. Must be fast: src/exchange calls it before
     * each sleep and, if it returns true, calls look() for each awaited peer. When its result
     * changes, wait() returns. NULL: src/exchange calls look() from time to time. */
    bool (*any_gone)(const epic_group *group);

    /* Number of milliseconds in which data of a peer may still arrive after look() has reported
     * that the peer is gone. 0: all data of the peer has arrived before look() reports this. */
    uint32_t settle_ms;

    /* Marks the group as failed and wakes the peers in wait(). Only the first failure of the
     * group is kept. */
    void (*break_group)(epic_group *group, const epic_failure_info *failure);

    /* If the group has failed, writes the failure to *out and returns true. If not, returns
     * false. */
    bool (*failure)(epic_group *group, epic_failure_info *out);

    /* Sets the seats of the group that have a member. Called on all members, before the first
     * operation. The other seats are vacant from then on: their ranks have left the group, and
     * no function above waits for them. op_header(), room(), send(), entry() and drop() are not
     * called for a vacant seat, and a flow through peer rings has 0 entries for it. NULL: the
     * backend does not support vacant seats. */
    void (*set_members)(epic_group *group, const seat_set *members);

    /* Returns the number of bytes of headers and entries that this rank has sent. For tests. */
    uint64_t (*bytes_sent)(const epic_group *group);
} epic_transport;

#endif
