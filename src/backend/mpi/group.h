/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's view of a group whose ranks are processes of one MPI job, and what the files of this
 * folder are to each other:
 *
 *   runtime.c    MPI itself
 *   tables.c     all memory of a group
 *   lives.c      peers whose process has ended without a word
 *   control.c    messages on MPI tag 0: sending them, the group's failure
 *   cells.c      the life of a cell, and its notes
 *   sights.c     where peers are: questions and answers between waiting ranks
 *   lanes.c      rows, on MPI tag 1 + the receiver's cell
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
#define FIRST_LANE_TAG 1
#define LEAST_SEGMENT 8704 /* bytes; the largest entry that the exchanges must be able to put */
#define NUM_POSTED 16      /* receives waiting for messages */
#define NUM_LETTERS 64     /* questions and answers on their way */

enum message_kind {
    MESSAGE_NOTE = 1,
    MESSAGE_FAILURE,
    MESSAGE_CLOSED,
    MESSAGE_ASK,   /* where are you, seen from (tag, place)? */
    MESSAGE_ANSWER /* to that */
};

typedef struct answer {
    uint32_t waiting;
    uint32_t phase;
    uint32_t operation; /* the last that was announced, with its tag and place */
    uint32_t inside;
    uint64_t tag;
    uint64_t place;
    uint64_t waits_for[RANK_WORDS];
} answer;

typedef struct message {
    uint32_t kind;
    int32_t cell; /* NOTE: the sender's; ASK: the asker's, which the answer brings back */
    uint64_t tag;
    uint64_t place;
    union {
        epic_note note;
        epic_failure_info failure;
        answer answer;
    };
} message;

typedef struct letter {
    message text;
    MPI_Request request;
} letter;

/* A peer's note whose exchange this rank has not begun. */
typedef struct early_note {
    bool full;
    int32_t cell;
    uint64_t tag, place;
    epic_note note;
} early_note;

typedef struct peer {
    bool closing; /* its last message is here; perhaps not yet those before it */
    bool closed;
    uint32_t num_early;
    early_note *early;  /* [max_early] */
    uint32_t operation; /* of its last note, 0: none yet */
    uint64_t tag, place;
    bool dead; /* its process has ended */
} peer;

/* What a peer last said, to the exchange of one cell. */
typedef struct sight {
    bool asked; /* and not answered yet */
    int64_t asked_ns;
    int64_t answered_ns; /* 0: never */
    answer answer;
} sight;

/* One direction between this rank and a peer, in one cell.  Segments are numbered over the whole
 * exchange, and number n lives in half n % 2 of the lane. */
typedef struct lane {
    int64_t num_entries; /* of the flow */
    int64_t moved;       /* entries of the flow that were sent, or dropped */
    uint64_t first;      /* the flow's first segment */
    uint64_t started;    /* segments that MPI was told of */
    int64_t shift;       /* sends: where the flow begins in its segments */
} lane;

enum { REQUEST_NOTE, REQUEST_SEND, REQUEST_RECEIVE = REQUEST_SEND + 2, NUM_REQUESTS = 5 };

enum cell_state { CELL_FREE, CELL_CLAIMED, CELL_OPEN, CELL_DRAINING };

/* How far a thread is in wait(). */
typedef struct waiting {
    bool now;
    uint32_t phase;
    int64_t last_ns;  /* when it was last inside */
    int64_t quiet_ns; /* since when nothing has changed */
    int64_t asked_ns; /* when it last thought of asking peers where they are */
    uint64_t waits_for[RANK_WORDS];
} waiting;

typedef struct cell {
    enum cell_state state;
    int index;
    uint64_t tag, place;
    message announcement;
    unsigned events, seen; /* changes that this cell asked for; those before the last wait */
    int questions;         /* answered with "not yet" since MPI was last looked at */
    unsigned looks;        /* in waits */
    bool awaits_room;      /* a lane was full */
    waiting waiting;
    int64_t num_flows;                        /* in all its exchanges */
    int64_t entry_bytes, stride, per_segment; /* of the flow */

    /* [num_ranks] each */
    epic_note *notes;
    atomic_bool *came;
    int32_t *peer_cells;
    lane *sends, *receives;
    sight *sights;
    MPI_Request *requests; /* [num_ranks, NUM_REQUESTS] */
} cell;

struct epic_group {
    int rank, num_ranks, num_cells;
    MPI_Comm comm;
    pthread_mutex_t
        *mutex; /* own_mutex, or the process's where MPI takes one thread at a time */
    pthread_mutex_t own_mutex;
    int64_t timeout_ns;
    bool own_cores; /* every rank of this host could have one */

    cell *cells;           /* [num_cells] */
    peer *peers;           /* [num_ranks] */
    struct pollfd *lives;  /* [num_ranks] pidfds of those on this host, else -1 */
    int64_t lives_seen_ns; /* when they were last looked at */
    letter *letters;
    message *posted; /* [NUM_POSTED] */
    MPI_Request posted_requests[NUM_POSTED];
    uint32_t max_early;
    uint64_t last_tag, last_place; /* of what this rank last announced */
    uint32_t last_operation;
    waiting waiting; /* for a free cell */
    int *indices;    /* [num_ranks * NUM_REQUESTS], room for MPI_Testsome */

    atomic_bool broken;
    epic_failure_info failure; /* written once, before broken */
    letter farewell;           /* the failure, then the closing, for everybody */
    MPI_Request *broadcasts;   /* [2, num_ranks]: of the failure, of the closing */
    message closing;

    pthread_t drainer;
    pthread_cond_t wake_drainer;
    bool drainer_runs, drainer_sleeps, leaving;
    int num_draining;
    uint64_t looks;            /* of any thread at MPI */
    _Atomic int64_t looked_ns; /* when notes and failures were last looked for */

    unsigned char *lanes;
    int64_t lane_bytes;
    _Atomic uint64_t bytes_sent;

    void *memory; /* tables and lanes, one mapping */
    size_t table_bytes, memory_bytes;
    epic_group *next; /* of those that were left */
};

static inline MPI_Request *request_of(cell *c, int peer, int which)
{
    return &c->requests[peer * NUM_REQUESTS + which];
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
void nap_ns(int64_t ns);
epic_result runtime_start(bool *ours); /* MPI is up, and threads may call it; *ours: by us */
epic_result runtime_sentence(int code, const char *what); /* EPIC_EDEVICE */
bool runtime_is_up(void);
pthread_mutex_t *runtime_mutex(void); /* NULL: any threads may call MPI at once */

/* tables.c */
epic_result tables_check(const epic_config *config, int num_ranks);
epic_result tables_make(epic_group **out, const epic_config *config, int rank, int num_ranks);
void tables_free(epic_group *group);
void tables_drop_lanes(epic_group *group, bool in_use);
void mpi_memory(const epic_config *config, epic_memory_info *out);

/* lives.c.  The mutex is held. */
void lives_watch(epic_group *group, const epic_peer *peers);
void lives_look(epic_group *group, int64_t now);       /* now and then; else it does nothing */
bool lives_is_gone(const epic_group *group, int peer); /* closed, or dead */
void lives_unwatch(epic_group *group);

/* control.c.  The mutex is held. */
epic_result control_start(epic_group *group);
void control_stop(epic_group *group);
void control_close(epic_group *group); /* tells the peers that this rank leaves */
bool control_sent(epic_group *group);
void control_isend(epic_group *group, const message *text, int to, MPI_Request *request);
void control_changed(epic_group *group); /* wakes every waiting thread of this rank */
void control_break(epic_group *group, const epic_failure_info *failure, bool tell);
void control_refused(epic_group *group, int code, const char *what);

/* cells.c.  The mutex is held, but for mpi_announce. */
cell *cells_find(epic_group *group, uint64_t tag, uint64_t place);
cell *cells_find_free(epic_group *group);
void cells_file_note(epic_group *group, const message *text, int from);
void mpi_announce(epic_group *group, int cell, uint64_t tag, uint64_t place,
                  const epic_note *note);

/* sights.c.  The mutex is held. */
void sights_ask(epic_group *group, cell *c, int64_t now);
void sights_answer(epic_group *group, const message *question, int from);
void sights_keep(epic_group *group, const message *reply, int from);
void sights_look(epic_group *group, int peer, uint64_t tag, uint64_t place, epic_sight *out);

/* lanes.c */
int64_t mpi_lane_bytes(const epic_group *group, bool everyone);
void lanes_arrived(epic_group *group, cell *c, int from); /* a segment; the mutex is held */
void *lanes_room(epic_group *group, cell *c, int to, int64_t entry);
const void *lanes_entry(epic_group *group, cell *c, int from, int64_t entry);
void mpi_shape(epic_group *group, int cell, const epic_flow *flow);
void mpi_send(epic_group *group, int cell, int to, int64_t upto);
void mpi_drop(epic_group *group, int cell, int from, int64_t upto);
uint64_t mpi_bytes_sent(const epic_group *group);

/* progress.c.  The mutex is held, but for the last two. */
bool progress_control(epic_group *group);        /* notes, failures, questions */
void progress_drain(epic_group *group);          /* cells that are finished */
void progress_cell(epic_group *group, cell *c);  /* what the cell waits for */
void progress_asked(epic_group *group, cell *c); /* a question had the answer "not yet" */
void progress_break(epic_group *group, const epic_failure_info *failure);

/* wait.c */
void mpi_wait(epic_group *group, int cell, uint32_t phase, const uint64_t *waits_for,
              uint32_t ms);

/* drain.c */
epic_result drain_start(epic_group *group);
void drain_stop(epic_group *group);
void mpi_finish(epic_group *group, int cell);

/* lifecycle.c */
epic_result lifecycle_start(void); /* MPI is up, as for runtime_start */
void lifecycle_opened(void);
void lifecycle_broke(void);               /* MPI cannot end any more */
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
