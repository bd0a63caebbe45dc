/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's view of a group whose ranks are processes of one MPI job. In this folder, a slot is
 * an op slot: the state of one exchange in flight (backend/transport.h). A control message
 * carries no rows, for example an op header (the arguments of an operation, which the ranks
 * compare) or a failure. To poll MPI is to call MPI_Test or MPI_Testsome. The files of this
 * folder, in the order of their layers:
 *
 * - runtime.c: starts MPI; its lock and its errors
 * - tables.c: allocates the memory of a group
 * - liveness.c: finds peers whose process ended without a close message
 * - control.c: sends control messages (MPI tag 0); the failure of the group
 * - op_slots.c: claims op slots and stores the headers of peers
 * - peer_status.c: exchanges the status of waiting ranks, to find culprits
 * - staging.c: sends and receives rows, on MPI tag 1 + the receiver's op slot
 * - progress.c: polls MPI and passes the messages that arrived to the files above
 * - wait.c: waits for a change
 * - drain.c: a thread that polls MPI until finished slots are sent
 * - lifecycle.c: starts and ends MPI; keeps the groups that this rank has left
 * - create.c: creates a communicator within a deadline
 * - bootstrap.c: creates a bootstrap from a communicator
 * - join.c: joins and leaves a group
 * - mpi.c: the table of transport functions
 *
 * A file calls only functions of files above it in this list.
 *
 * Locking: one mutex guards the group and all MPI calls on its communicator. No thread holds
 * the mutex while it sleeps. The thread that uses a slot accesses the slot's rings, their
 * staging_ring and the peers' headers that have arrived without the mutex. */
#ifndef EPIC_MPI_GROUP_H
#define EPIC_MPI_GROUP_H

#include <mpi.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "backend/transport.h"
#include "base/clock.h"
#include "base/cores.h"

#define RANK_WORDS (EPIC_MAX_RANKS / 64)
#define CONTROL_TAG 0
#define FIRST_ROW_TAG 1
/* minimum size in bytes of half a ring, and maximum size of an entry */
#define MIN_SEGMENT 8704
/* number of receive requests for control messages; they are always posted */
#define NUM_RECEIVE_BUFFERS 16
#define NUM_SEND_BUFFERS 64 /* maximum number of status requests and replies in flight */

enum message_kind {
    MESSAGE_HEADER = 1,
    MESSAGE_FAILURE,
    MESSAGE_CLOSED,
    MESSAGE_STATUS_REQUEST, /* requests the receiver's status in the exchange (tag, sequence) */
    MESSAGE_STATUS_REPLY    /* answers MESSAGE_STATUS_REQUEST */
};

/* The status that a rank sends to a peer that waits for this rank. */
typedef struct status_report {
    uint32_t is_waiting;
    uint32_t phase;
    /* the operation that the rank announced last, with this tag and sequence number */
    uint32_t operation;
    uint32_t is_inside;
    uint64_t tag;
    uint64_t sequence;
    uint64_t waits_for[RANK_WORDS];
} status_report;

/* A control message, sent on MPI tag 0. Contains only the members that its kind needs. */
typedef struct control_message {
    uint32_t kind;
    /* In MESSAGE_HEADER: index of an op slot of the sender. In MESSAGE_STATUS_*: index of an op
     * slot of the rank that sent the request. */
    int32_t slot_index;
    uint64_t tag;
    uint64_t sequence;
    union {
        epic_op_header header;
        epic_failure_info failure;
        status_report status_report;
    };
} control_message;

/* A control message in flight; MPI reads it until the request completes. */
typedef struct send_buffer {
    control_message message;
    MPI_Request request;
} send_buffer;

/* An op header of a peer that arrived before this rank began the exchange. */
typedef struct early_header {
    bool is_used;
    int32_t slot_index;
    uint64_t tag, sequence;
    epic_op_header header;
} early_header;

/* The last known state of one peer. */
typedef struct peer {
    /* true: the peer's close message has arrived, but earlier messages may still arrive */
    bool is_closing;
    bool closed;
    uint32_t num_early;
    /* [max_early]: op headers of the peer for exchanges that this rank has not begun yet */
    early_header *early;
    /* operation in the peer's last op header; 0: no op header has arrived */
    uint32_t operation;
    uint64_t tag, sequence;
    bool dead; /* the peer's process has exited */
} peer;

/* The last status report of one peer, for the exchange of one op slot of this rank. */
typedef struct peer_status {
    bool is_pending; /* true: a request was sent, and its reply has not arrived yet */
    int64_t requested_ns;
    int64_t replied_ns; /* time of the last reply; 0: no reply has arrived */
    status_report status_report;
} peer_status;

/* The state of one op slot's ring to or from one peer. A *flow* is one array of entries that
 * moves through the ring. A *segment* is the part of a flow that one MPI message carries. The
 * ring has two halves, and each half holds one segment at a time. Segments are numbered through
 * all flows of the ring: segment n uses half n % 2. */
typedef struct staging_ring {
    int64_t num_entries; /* number of entries in this flow */
    /* number of entries of this flow that this rank has sent (as writer) or has read and
     * dropped (as reader) */
    int64_t moved;
    uint64_t first; /* index of this flow's first segment, counted over all flows of the ring */
    /* number of segments that were passed to MPI so far, in all flows together */
    uint64_t num_started;
    /* distance in bytes from the beginning of a half to this flow's first entry; used only by
     * the writer (staging.c) */
    int64_t offset;
} staging_ring;

enum { REQUEST_HEADER, REQUEST_SEND, REQUEST_RECEIVE = REQUEST_SEND + 2, NUM_REQUESTS = 5 };

/* The states of an op slot, in the order in which a slot passes through them. SLOT_OPEN: this
 * rank has announced the exchange. SLOT_DRAINING: this rank has finished the exchange, but MPI
 * still reads from the slot's rings. */
enum op_slot_state { SLOT_FREE, SLOT_CLAIMED, SLOT_OPEN, SLOT_DRAINING };

/* The state that wait() keeps between its calls. Each op slot has one, and the group one more
 * (epic_group.wait) for threads that wait for any free op slot. */
typedef struct wait_state {
    bool is_waiting;
    uint32_t phase;
    int64_t last_ns; /* time at which wait() last returned */
    /* time at which wait() last found a change of the op slot, or at which the exchange
     * began */
    int64_t unchanged_since_ns;
    /* time at which this rank last requested the status of its peers for this op slot */
    int64_t requested_ns;
    uint64_t waits_for[RANK_WORDS];
} wait_state;

/* One op slot of this rank. Tag and sequence number identify it in messages of peers. */
typedef struct op_slot {
    enum op_slot_state state;
    int index;
    uint64_t tag, sequence;
    control_message announcement;
    /* num_events: number of changes of this slot so far that can end a call of wait().
     * num_seen_events: value of num_events when wait() last found a change. */
    unsigned num_events, num_seen_events;
    /* number of calls of room(), entry() or op_header() that found nothing since the last poll
     * of MPI */
    int num_misses;
    unsigned num_looks;  /* number of polls of MPI by wait() during the current wait for rows */
    bool waits_for_room; /* true: the thread waits until a ring has room for another entry */
    wait_state wait;
    int64_t num_flows; /* number of flows in all exchanges of this op slot so far */
    /* Sizes for the current flow. entry_bytes: size of an entry in bytes. stride: distance in
     * bytes between two entries in the ring. per_segment: number of entries in a segment; 0
     * before the first flow of the exchange. */
    int64_t entry_bytes, stride, per_segment;

    /* [num_ranks] each: the op header of each peer, and whether it has arrived */
    epic_op_header *headers;
    atomic_bool *has_header;
    int32_t *peer_slots;
    staging_ring *send_rings, *receive_rings;
    peer_status *statuses;
    MPI_Request *requests; /* [num_ranks, NUM_REQUESTS]: requests for each peer */
} op_slot;

/* The data of one rank about the group: its op slots, the state of its peers, its messages. */
struct epic_group {
    int rank, num_ranks, num_slots;
    MPI_Comm comm;
    pthread_mutex_t
        *mutex; /* own_mutex, or runtime_mutex() if MPI allows only one thread at a time */
    pthread_mutex_t own_mutex;
    int64_t timeout_ns;
    bool has_core_per_rank; /* true: this host has at least one core for each of its ranks */

    op_slot *slots; /* [num_slots]: the op slots of this rank */
    peer *peers;    /* [num_ranks]: the state of each peer */
    /* [num_ranks]: pidfds of ranks on this host; -1 for the other ranks */
    struct pollfd *pidfds;
    int64_t liveness_checked_ns; /* time at which the pidfds were last polled */
    send_buffer *send_buffers;
    control_message *receive_buffers; /* [NUM_RECEIVE_BUFFERS]: control messages arrive here */
    MPI_Request receive_requests[NUM_RECEIVE_BUFFERS];
    uint32_t max_early;
    /* tag and sequence number of the operation that this rank announced last */
    uint64_t last_tag, last_sequence;
    uint32_t last_operation;
    wait_state wait; /* the wait of the threads that wait for a free op slot */
    /* [num_ranks * NUM_REQUESTS]: output of MPI_Testsome: the indices of finished requests */
    int *indices;

    atomic_bool broken;
    epic_failure_info failure;  /* written once, before `broken` */
    send_buffer failure_buffer; /* the message that sends the failure to all ranks */
    /* [2, num_ranks]: requests of the failure message, then of the close message */
    MPI_Request *broadcast_requests;
    control_message close_message;

    pthread_t drain_thread;
    pthread_cond_t drain_wake_up;
    bool drain_runs, drain_sleeps, leaving;
    int num_draining;
    uint64_t num_looks;        /* number of polls of MPI by all threads together */
    _Atomic int64_t polled_ns; /* time (clock_ns()) of the last poll for control messages */

    unsigned char *rings;
    int64_t ring_bytes;
    _Atomic uint64_t bytes_sent;

    void *memory; /* one mapping, which contains first the tables and then the rings */
    size_t table_bytes, memory_bytes;
    epic_group *next; /* the next group in the list of groups that this rank has left */
};

/* Returns an MPI request of the op slot for a peer. `which` is REQUEST_HEADER, or REQUEST_SEND
 * + half, or REQUEST_RECEIVE + half, where half is the half of the ring. */
static inline MPI_Request *request_of(op_slot *slot, int peer, int which)
{
    return &slot->requests[peer * NUM_REQUESTS + which];
}

/* Returns whether the group has failed. Any thread may call it without the mutex. */
static inline bool is_broken(epic_group *group)
{
    return atomic_load_explicit(&group->broken, memory_order_acquire);
}

static inline bool has_rank(const uint64_t *ranks, int rank)
{
    return ranks[rank / 64] >> (rank % 64) & 1;
}

/* Functions of runtime.c. The functions from here on are described where they are defined,
 * except the short ones. A function that returns epic_result also sets the error text of the
 * thread (epic_fail()). */
void runtime_nap(int64_t ns);
epic_result runtime_start(bool *ours);
/* makes an error text from an MPI error code; returns EPIC_EDEVICE */
epic_result runtime_fail(int code, const char *what);
bool runtime_is_up(void);
pthread_mutex_t *runtime_mutex(void); /* NULL: several threads may call MPI at once */

/* tables.c: the memory of a group */
epic_result tables_make(epic_group **out, const epic_config *config, int rank, int num_ranks);
void tables_free(epic_group *group);
void tables_release_rings(epic_group *group, bool in_use);
epic_result mpi_memory(const epic_config *config, epic_memory_info *out);

/* liveness.c: finds dead processes on this host. The caller holds the mutex. */
void liveness_watch(epic_group *group, const epic_peer *peers);
void liveness_check(epic_group *group, int64_t now);
bool liveness_is_gone(const epic_group *group, int peer);
void liveness_unwatch(epic_group *group);

/* control.c: sends and receives control messages. The caller holds the mutex. */
epic_result control_start(epic_group *group);
void control_stop(epic_group *group);
void control_close(epic_group *group); /* sends the close message to all peers */
bool control_is_sent(epic_group *group);
void control_send(epic_group *group, const control_message *message, int to,
                  MPI_Request *request);
void control_notify_all(epic_group *group);
void control_break(epic_group *group, const epic_failure_info *failure, bool should_broadcast);
void control_fail(epic_group *group, int code, const char *what);

/* op_slots.c: begins and ends exchanges. The caller holds the mutex, except for
 * mpi_announce(). */
op_slot *op_slots_find(epic_group *group, uint64_t tag, uint64_t sequence);
op_slot *op_slots_find_free(epic_group *group);
void op_slots_add_header(epic_group *group, const control_message *message, int from);
void mpi_announce(epic_group *group, int index, uint64_t tag, uint64_t sequence,
                  const epic_op_header *header);

/* peer_status.c: requests from peers which ranks they wait for. The caller holds the mutex. */
void peer_status_request(epic_group *group, op_slot *slot, int64_t now);
void peer_status_reply(epic_group *group, const control_message *question, int from);
void peer_status_store(epic_group *group, const control_message *reply, int from);
void peer_status_read(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                      epic_peer_status *out);

/* staging.c: the rings, and the MPI messages that fill them */
int64_t mpi_ring_bytes(const epic_group *group, bool everyone);
/* called when a segment has arrived; the caller holds the mutex */
void staging_receive_done(epic_group *group, op_slot *slot, int from);
void *staging_room(epic_group *group, op_slot *slot, int to, int64_t entry);
const void *staging_entry(epic_group *group, op_slot *slot, int from, int64_t entry);
void mpi_shape(epic_group *group, int index, const epic_flow *flow);
void mpi_send(epic_group *group, int index, int to, int64_t upto);
void mpi_drop(epic_group *group, int index, int from, int64_t upto);
uint64_t mpi_bytes_sent(const epic_group *group);

/* progress.c: polls MPI. The caller holds the mutex, except for the last two functions. */
bool progress_control(epic_group *group);
void progress_drain(epic_group *group);
void progress_slot(epic_group *group, op_slot *slot);
void progress_after_miss(epic_group *group, op_slot *slot);
void progress_break_group(epic_group *group, const epic_failure_info *failure);

/* wait.c: lets a thread wait while MPI makes progress */
void mpi_wait(epic_group *group, int index, uint32_t phase, const uint64_t *waits_for,
              uint32_t ms);

/* drain.c: keeps finished op slots until MPI has sent their messages */
epic_result drain_start(epic_group *group);
void drain_stop(epic_group *group);
void mpi_finish(epic_group *group, int op_slot);

/* lifecycle.c: starts and ends MPI in this process */
epic_result lifecycle_start(void);
void lifecycle_add_open(void);
void lifecycle_mark_broken(void);
void lifecycle_retire(epic_group *group);

/* create.c: makes the communicator of the group. Sets group->comm, except on an error. */
epic_result create_comm(epic_group *group, MPI_Comm parent, MPI_Group ranks, int tag);

/* bootstrap.c */
bool bootstrap_can_use(MPI_Comm comm, const char *name, char *why, size_t size);
epic_result mpi_bootstrap(epic_bootstrap *out, const void *native, uint32_t timeout_ms);

/* join.c */
bool mpi_can_join(const epic_peer *peers, int num_ranks, const epic_config *config, char *why);
epic_result mpi_join(epic_group **out, const epic_join *join);
void mpi_leave(epic_group *group);

#endif
