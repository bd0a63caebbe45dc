/* SPDX-License-Identifier: Apache-2.0 */
/* The transport (backend/transport.h) of ranks that share memory, for the backends threads and
 * shm. These backends allocate the shared memory, the segment (segment.h). Here a slot is an op
 * slot: memory that one rank, the slot's owner, uses for one exchange (the communication of one
 * operation). Each slot has one *broadcast ring*, which all peers read, and one *peer ring* for
 * each peer. A ring is a circular buffer for entries (rows), and a *flow* is a sequence of
 * entries of one size. A reader *drops* an entry that it does not need any more, so that the
 * writer may reuse its memory.
 *
 * Finding peers: announce() writes this rank's slot. Then announce() searches the peers' slots
 * for the same tag and sequence number, and wakes the owners of the slots that it finds. The
 * rank that announces last finds the slots of all peers. Each use of a slot has a version
 * number. A peer that has finished the exchange stores this number in the owner's slot
 * (shared_peer_counters.done). The owner reuses the slot after every peer has stored the
 * number.
 *
 * Rings: `sent` and `dropped` count the entries of all flows of an exchange. A new flow begins
 * at the start of the ring's memory, after the readers have dropped all entries of the previous
 * flow.
 *
 * Sleeping: each slot has a futex, a word on which its owner sleeps. wait.c describes the
 * protocol. */
#ifndef EPIC_SHARED_H
#define EPIC_SHARED_H

#include "backend/shared/segment.h"
#include "base/patience.h"

/* The position of this rank in a ring that it writes or reads. The counts of entries include
 * all flows of the exchange. */
typedef struct ring_end {
    int64_t base; /* how many entries all flows before the current flow had */
    /* how many entries all flows up to the current flow have; this becomes `base` when the next
     * flow begins */
    int64_t next;
    /* The last value that this rank has loaded of the other side's counter. If this rank is the
     * writer, the counter is the reader's `dropped`; if it is the reader, the writer's
     * `sent`. */
    int64_t seen_count;
    char *ring;
} ring_end;

/* The state that this rank keeps about one peer during one exchange. */
typedef struct peer_link {
    /* the peer's op slot for this exchange; NULL until this rank has found it */
    shared_op_slot *slot;
    int index;
    ring_end out;
    ring_end in;
    ring_end broadcast_in;
    int64_t sent; /* how many entries of this flow were sent to the peer */
} peer_link;

/* This rank's private state for one of its op slots. One thread at a time uses it, except that
 * any thread may test `claimed`. */
typedef struct shared_exchange {
    _Atomic bool claimed;
    shared_op_slot *slot;
    int index;
    uint64_t tag;
    uint64_t sequence;
    bool everyone; /* true: this flow uses the broadcast rings; false: the peer rings */
    int64_t entry_bytes;
    int64_t stride; /* distance in bytes between two entries of a ring */
    int64_t depth;  /* number of entries that fit into a ring */
    ring_end broadcast_out;
    /* how many entries of this flow were sent through the broadcast ring */
    int64_t broadcast_sent;
    int slowest_peer; /* the peer that last kept the broadcast ring full */
    peer_link *links; /* [num_ranks]: one peer_link for each peer */
} shared_exchange;

/* One rank's own view of the group, in its private memory. */
struct epic_group {
    char *segment;
    shared_segment_header *header;
    shared_layout layout;
    int rank;
    int num_ranks;
    /* seats (rank numbers) whose ranks are members; the other ranks have left the group */
    seat_set members;
    bool is_shared_by_processes; /* true: futexes work between processes */
    int64_t slice_ns;            /* longest sleep between two heartbeats */
    int64_t timeout_ns;
    /* 2: this host has at least one core for each rank; 1: it has fewer; 0: not computed yet */
    _Atomic int core_per_rank;
    patience patience;
    _Atomic uint64_t bytes_sent;
    shared_exchange *exchanges; /* [num_slots]: the state of each op slot */
    peer_link *links;           /* [num_slots, num_ranks]: memory of shared_exchange.links */

    /* Returns whether the peer is gone although the segment does not show it: its process has
     * exited or, if the ranks are threads of one process, it has closed its context in another
     * generation. */
    bool (*is_dead)(epic_group *group, int peer);
    void *backend_data; /* state of the backend threads or shm */
};

/* Initializer of an epic_transport. The transports of the backends threads and shm differ only
 * in the three arguments: the functions for windows, and those that change the members of the
 * group. */
#define SHARED_TRANSPORT(windows_of_backend, regroup_of_backend, set_members_of_backend)      \
    {                                                                                         \
        .windows = (windows_of_backend), .regroup = (regroup_of_backend), .shares = true,     \
        .ring_bytes = shared_ring_bytes, .claim = shared_claim, .announce = shared_announce,  \
        .op_header = shared_op_header, .shape = shared_shape, .room = shared_room,            \
        .send = shared_send, .entry = shared_entry, .drop = shared_drop,                      \
        .finish = shared_finish, .wait = shared_wait_for_change, .look = shared_look_at_peer, \
        .any_gone = shared_any_gone, .break_group = shared_break_group,                       \
        .failure = shared_failure, .set_members = (set_members_of_backend),                   \
        .bytes_sent = shared_bytes_sent                                                       \
    }

/* Creates this rank's epic_group. `segment` is the shared memory. The backend, and not the
 * group, unmaps it. is_shared_by_processes: true if the ranks are processes, so that futexes
 * must work between processes. Errors: EPIC_ENOMEM. */
epic_result shared_group_new(epic_group **out, const epic_join *join,
                             const shared_layout *layout, char *segment,
                             bool is_shared_by_processes);
/* Writes the header of a new segment (shared memory of the group). Requires that no peer has
 * mapped the segment yet. */
void shared_segment_init(char *segment, const shared_layout *layout, uint64_t group_id);
/* Returns whether the header of the segment was written for this group and layout. */
bool shared_segment_is_of(const char *segment, const shared_layout *layout, uint64_t group_id);
/* Enters the next generation: replaces the segment by `segment`, which has the same layout, and
 * sets the members. Requires that no operation of this rank is in flight. */
void shared_group_enter(epic_group *group, char *segment, const seat_set *members);
/* Marks this rank as closed and wakes all peers. */
void shared_group_close(epic_group *group);
/* Frees the group that shared_group_new() allocated. The segment stays mapped. */
void shared_group_free(epic_group *group);
/* Implements epic_backend.memory: writes to *out how much memory one rank of a group with this
 * config uses. Returns EPIC_EINVAL if config->staging_bytes is too small. */
epic_result shared_memory_info(const epic_config *config, epic_memory_info *out);

/* Each of these functions is described where it is defined. shared_wake_*() are in wake.c. */
bool shared_match_peer(epic_group *group, shared_exchange *x, int peer);
shared_op_slot *shared_find_slot(const epic_group *group, int peer, uint64_t tag,
                                 uint64_t sequence, int first, int *index);
bool shared_is_gone(epic_group *group, int peer);
bool shared_is_known_gone(const epic_group *group, int peer);
void shared_report_end(epic_group *group, int peer);
bool shared_slot_is_free(epic_group *group, const shared_exchange *x);
void shared_wake_slot(const epic_group *group, shared_op_slot *slot);
void shared_wake_free_slot(const epic_group *group, int rank);
void shared_wake_all(const epic_group *group);

/* The next functions implement epic_transport. backend/transport.h has their contracts. */
int shared_claim(epic_group *group);
void shared_announce(epic_group *group, int slot, uint64_t tag, uint64_t sequence,
                     const epic_op_header *header);
const epic_op_header *shared_op_header(epic_group *group, int slot, int peer);
void shared_finish(epic_group *group, int slot);
int64_t shared_ring_bytes(const epic_group *group, bool everyone);
void shared_shape(epic_group *group, int slot, const epic_flow *flow);
void *shared_room(epic_group *group, int slot, int to, int64_t index);
void shared_send(epic_group *group, int slot, int to, int64_t upto);
const void *shared_entry(epic_group *group, int slot, int from, int64_t index);
void shared_drop(epic_group *group, int slot, int from, int64_t upto);
void shared_wait_for_change(epic_group *group, int slot, uint32_t phase,
                            const uint64_t *waits_for, uint32_t ms);
void shared_look_at_peer(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                         epic_peer_status *out);
bool shared_any_gone(const epic_group *group);
void shared_break_group(epic_group *group, const epic_failure_info *failure);
bool shared_failure(epic_group *group, epic_failure_info *out);
void shared_set_members(epic_group *group, const seat_set *members);
uint64_t shared_bytes_sent(const epic_group *group);

/* The backends threads and shm use these functions (windows.c) in their
 * epic_window_transport. */
void shared_begin_stores(epic_group *group);
void shared_end_stores(epic_group *group);
bool shared_may_store(epic_group *group, int peer);
bool shared_close_windows(epic_group *group);

static inline shared_rank_state *shared_rank_state_of(const epic_group *group, int rank)
{
    const shared_layout *l = &group->layout;
    return (shared_rank_state *)(group->segment + l->blocks_at + rank * l->block_bytes);
}

static inline shared_op_slot *shared_op_slot_of(const epic_group *group, int rank, int slot)
{
    const shared_layout *l = &group->layout;
    const int64_t block = (int64_t)slot * l->num_ranks + rank;
    return (shared_op_slot *)(group->segment + l->blocks_at + block * l->block_bytes +
                              l->slot_at);
}

/* Returns the broadcast ring of a rank's op slot. All peers of the rank read this ring. */
static inline char *shared_broadcast_ring(const epic_group *group, int rank, int slot)
{
    const shared_layout *l = &group->layout;
    return group->segment + l->rings_at + rank * l->rings_bytes + slot * l->staging_bytes;
}

/* Returns the peer ring that only rank `to` reads, of op slot `slot` of rank `rank`. */
static inline char *shared_peer_ring(const epic_group *group, int rank, int slot, int to)
{
    const shared_layout *l = &group->layout;
    const int sequence = to < rank ? to : to - 1;
    return shared_broadcast_ring(group, rank, slot) + l->broadcast_ring_bytes +
           sequence * l->peer_ring_bytes;
}

#endif
