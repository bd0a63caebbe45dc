/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's view of a group whose ranks are processes of one MPI job, and what the files of this
 * folder are to each other:
 *
 *   runtime.c    MPI itself
 *   tables.c     all memory of a group
 *   liveness.c    peers whose process has ended without a word
 *   control.c    messages on MPI tag 0: sending them, the group's failure
 *   op_slots.c   the life of a cell, and its notes
 *   peer_status.c where peers are: questions and answers between waiting ranks
 *   staging.c    rows, on MPI tag 1 + the receiver's cell
 *   progress.c   every look at MPI; dispatches what has come to the files above
 *   wait.c       waiting
 *   drain.c      a thread that keeps MPI moving for rows whose sender went on to other things
 *   lifecycle.c  from MPI's start to its end; groups that were left
 *   create.c     a communicator, within a deadline
 *   bootstrap.c  from a communicator to a bootstrap
 *   join.c       from a bootstrap to a communicator; leaving
 *   mpi.c        the contract, signed
 *
 * No file calls a function of a file below it in this list (tests/includes.py).
 *
 * One mutex guards the group and all MPI calls on its communicator; nobody holds it while
 * waiting.  Only lanes are reached without it, by the thread that uses the cell. */
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
#define MIN_SEGMENT 8704 /* bytes; the largest entry that the exchanges must be able to put */
#define NUM_RECEIVE_BUFFERS 16 /* receives waiting for messages */
#define NUM_SEND_BUFFERS 64    /* questions and answers on their way */

enum message_kind {
    MESSAGE_NOTE = 1,
    MESSAGE_FAILURE,
    MESSAGE_CLOSED,
    MESSAGE_STATUS_REQUEST, /* where are you, seen from (tag, place)? */
    MESSAGE_STATUS_REPLY    /* to that */
};

typedef struct status_report {
    uint32_t waiting;
    uint32_t phase;
    uint32_t operation; /* the last that was announced, with its tag and place */
    uint32_t inside;
    uint64_t tag;
    uint64_t sequence;
    uint64_t waits_for[RANK_WORDS];
} status_report;

typedef struct control_message {
    uint32_t kind;
    int32_t op_slot; /* NOTE: the sender's; ASK: the asker's, which the answer brings back */
    uint64_t tag;
    uint64_t sequence;
    union {
        epic_note note;
        epic_failure_info failure;
        status_report status_report;
    };
} control_message;

typedef struct send_buffer {
    control_message message;
    MPI_Request request;
} send_buffer;

/* A peer's note whose exchange this rank has not begun. */
typedef struct early_note {
    bool is_used;
    int32_t op_slot;
    uint64_t tag, sequence;
    epic_note note;
} early_note;

typedef struct peer {
    bool close_message; /* its last message is here; perhaps not yet those before it */
    bool closed;
    uint32_t num_early;
    early_note *early;  /* [max_early] */
    uint32_t operation; /* of its last note, 0: none yet */
    uint64_t tag, sequence;
    bool dead; /* its process has ended */
} peer;

/* What a peer last said, to the exchange of one cell. */
typedef struct peer_status {
    bool is_pending; /* and not answered yet */
    int64_t requested_ns;
    int64_t replied_ns; /* 0: never */
    status_report status_report;
} peer_status;

/* One direction between this rank and a peer, in one cell.  Segments are numbered over the whole
 * exchange, and number n lives in half n % 2 of the lane. */
typedef struct staging_ring {
    int64_t num_entries;  /* of the flow */
    int64_t moved;        /* entries of the flow that were sent, or dropped */
    uint64_t first;       /* the flow's first segment */
    uint64_t num_started; /* segments that MPI was told of */
    int64_t offset;       /* sends: where the flow begins in its segments */
} staging_ring;

enum { REQUEST_NOTE, REQUEST_SEND, REQUEST_RECEIVE = REQUEST_SEND + 2, NUM_REQUESTS = 5 };

enum op_slot_state { SLOT_FREE, SLOT_CLAIMED, SLOT_OPEN, SLOT_DRAINING };

/* How far a thread is in wait(). */
typedef struct wait_state {
    bool now;
    uint32_t phase;
    int64_t last_ns;            /* when it was last inside */
    int64_t unchanged_since_ns; /* since when nothing has changed */
    int64_t requested_ns;       /* when it last thought of asking peers where they are */
    uint64_t waits_for[RANK_WORDS];
} wait_state;

typedef struct op_slot {
    enum op_slot_state state;
    int index;
    uint64_t tag, sequence;
    control_message announcement;
    unsigned num_events,
        num_seen_events; /* changes that this cell asked for; those before the last wait */
    int num_misses;      /* answered with "not yet" since MPI was last looked at */
    unsigned num_looks;  /* in waits */
    bool waits_for_room; /* a lane was full */
    wait_state wait;
    int64_t num_flows;                        /* in all its exchanges */
    int64_t entry_bytes, stride, per_segment; /* of the flow */

    /* [num_ranks] each */
    epic_note *notes;
    atomic_bool *has_note;
    int32_t *peer_slots;
    staging_ring *send_rings, *receive_rings;
    peer_status *statuses;
    MPI_Request *requests; /* [num_ranks, NUM_REQUESTS] */
} op_slot;

struct epic_group {
    int rank, num_ranks, num_slots;
    MPI_Comm comm;
    pthread_mutex_t
        *mutex; /* own_mutex, or the process's where MPI takes one thread at a time */
    pthread_mutex_t own_mutex;
    int64_t timeout_ns;
    bool own_cores; /* every rank of this host could have one */

    op_slot *slots;              /* [num_cells] */
    peer *peers;                 /* [num_ranks] */
    struct pollfd *pidfds;       /* [num_ranks] pidfds of those on this host, else -1 */
    int64_t liveness_checked_ns; /* when they were last looked at */
    send_buffer *send_buffers;
    control_message *receive_buffers; /* [NUM_POSTED] */
    MPI_Request receive_requests[NUM_RECEIVE_BUFFERS];
    uint32_t max_early;
    uint64_t last_tag, last_sequence; /* of what this rank last announced */
    uint32_t last_operation;
    wait_state wait; /* for a free cell */
    int *indices;    /* [num_ranks * NUM_REQUESTS], room for MPI_Testsome */

    atomic_bool broken;
    epic_failure_info failure;       /* written once, before broken */
    send_buffer failure_buffer;      /* the failure, then the closing, for everybody */
    MPI_Request *broadcast_requests; /* [2, num_ranks]: of the failure, of the closing */
    control_message close_message;

    pthread_t drain_thread;
    pthread_cond_t drain_wake_up;
    bool drain_runs, drain_sleeps, leaving;
    int num_draining;
    uint64_t num_looks;        /* of any thread at MPI */
    _Atomic int64_t polled_ns; /* when notes and failures were last looked for */

    unsigned char *rings;
    int64_t ring_bytes;
    _Atomic uint64_t bytes_sent;

    void *memory; /* tables and lanes, one mapping */
    size_t table_bytes, memory_bytes;
    epic_group *next; /* of those that were left */
};

static inline MPI_Request *request_of(op_slot *slot, int peer, int which)
{
    return &slot->requests[peer * NUM_REQUESTS + which];
}

static inline bool is_broken(epic_group *group)
{
    return atomic_load_explicit(&group->broken, memory_order_acquire);
}

static inline bool has_rank(const uint64_t *ranks, int rank)
{
    return ranks[rank / 64] >> (rank % 64) & 1;
}

/* runtime.c.  Those with a result leave a sentence when MPI cannot be used. */
void runtime_nap(int64_t ns);
epic_result runtime_start(bool *ours); /* MPI is up, and threads may call it; *ours: by us */
epic_result runtime_fail(int code, const char *what); /* EPIC_EDEVICE */
bool runtime_is_up(void);
pthread_mutex_t *runtime_mutex(void); /* NULL: any threads may call MPI at once */

/* tables.c */
epic_result tables_check(const epic_config *config, int num_ranks);
epic_result tables_make(epic_group **out, const epic_config *config, int rank, int num_ranks);
void tables_free(epic_group *group);
void tables_release_rings(epic_group *group, bool in_use);
void mpi_memory(const epic_config *config, epic_memory_info *out);

/* liveness.c.  The mutex is held. */
void liveness_watch(epic_group *group, const epic_peer *peers);
void liveness_check(epic_group *group, int64_t now); /* now and then; else it does nothing */
bool liveness_is_gone(const epic_group *group, int peer); /* closed, or dead */
void liveness_unwatch(epic_group *group);

/* control.c.  The mutex is held. */
epic_result control_start(epic_group *group);
void control_stop(epic_group *group);
void control_close(epic_group *group); /* tells the peers that this rank leaves */
bool control_is_sent(epic_group *group);
void control_send(epic_group *group, const control_message *message, int to,
                  MPI_Request *request);
void control_notify_all(epic_group *group); /* wakes every waiting thread of this rank */
void control_break(epic_group *group, const epic_failure_info *failure, bool should_broadcast);
void control_fail(epic_group *group, int code, const char *what);

/* op_slots.c.  The mutex is held, but for mpi_announce. */
op_slot *op_slots_find(epic_group *group, uint64_t tag, uint64_t sequence);
op_slot *op_slots_find_free(epic_group *group);
void op_slots_add_note(epic_group *group, const control_message *message, int from);
void mpi_announce(epic_group *group, int op_slot, uint64_t tag, uint64_t sequence,
                  const epic_note *note);

/* peer_status.c.  The mutex is held. */
void peer_status_request(epic_group *group, op_slot *slot, int64_t now);
void peer_status_reply(epic_group *group, const control_message *question, int from);
void peer_status_store(epic_group *group, const control_message *reply, int from);
void peer_status_read(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                      epic_sight *out);

/* staging.c */
int64_t mpi_ring_bytes(const epic_group *group, bool everyone);
void staging_receive_done(epic_group *group, op_slot *slot,
                          int from); /* a segment; the mutex is held */
void *staging_room(epic_group *group, op_slot *slot, int to, int64_t entry);
const void *staging_entry(epic_group *group, op_slot *slot, int from, int64_t entry);
void mpi_shape(epic_group *group, int op_slot, const epic_flow *flow);
void mpi_send(epic_group *group, int op_slot, int to, int64_t upto);
void mpi_drop(epic_group *group, int op_slot, int from, int64_t upto);
uint64_t mpi_bytes_sent(const epic_group *group);

/* progress.c.  The mutex is held, but for the last two. */
bool progress_control(epic_group *group);             /* notes, failures, questions */
void progress_drain(epic_group *group);               /* cells that are finished */
void progress_cell(epic_group *group, op_slot *slot); /* what the cell waits for */
void progress_after_miss(epic_group *group,
                         op_slot *slot); /* a question had the answer "not yet" */
void progress_break_group(epic_group *group, const epic_failure_info *failure);

/* wait.c */
void mpi_wait(epic_group *group, int op_slot, uint32_t phase, const uint64_t *waits_for,
              uint32_t ms);

/* drain.c */
epic_result drain_start(epic_group *group);
void drain_stop(epic_group *group);
void mpi_finish(epic_group *group, int op_slot);

/* lifecycle.c */
epic_result lifecycle_start(void); /* MPI is up, as for runtime_start */
void lifecycle_add_open(void);
void lifecycle_mark_broken(void);         /* MPI cannot end any more */
void lifecycle_retire(epic_group *group); /* takes a group that was left */

/* create.c.  Sets group->comm, unless it fails. */
epic_result create_comm(epic_group *group, MPI_Comm parent, MPI_Group ranks, int tag);

/* bootstrap.c */
bool bootstrap_can_use(MPI_Comm comm, const char *name, char *why, size_t size);
epic_result mpi_bootstrap(epic_bootstrap *out, const void *native, uint32_t timeout_ms);

/* join.c */
bool mpi_can_join(const epic_peer *peers, int num_ranks, const epic_config *config, char *why);
epic_result mpi_join(epic_group **out, const epic_join *join);
void mpi_leave(epic_group *group);

#endif
