/* SPDX-License-Identifier: Apache-2.0 */
/* The transport of ranks that share memory, whoever brought the memory: threads and shm.
 *
 * Matching.  announce() writes the owner's cell, then looks for the peers' cells of the same
 * (tag, place) and rings those that it finds; who announces second finds the first.  A cell is
 * used again only after every peer has marked its version as done, so a peer that has found the
 * cell of its own exchange may read it until it finishes.
 *
 * Lanes.  `sent` and `dropped` count the entries of all flows of the exchange.  A flow starts at
 * the beginning of the ring, after the lane has been drained of the flow before.
 *
 * Sleeping.  Each cell has a bell.  Its owner arms it, asks again, and only then sleeps on it;
 * peers that change something load it and ring only if it is armed. */
#ifndef EPIC_SHARED_H
#define EPIC_SHARED_H

#include "backend/shared/segment.h"
#include "base/patience.h"

/* One direction of one lane as this rank sees it, counted over all flows. */
typedef struct ring_end {
    int64_t base;       /* entries of earlier flows */
    int64_t next;       /* base of the next flow */
    int64_t seen_count; /* how far the other side was when we last looked */
    char *ring;         /* for the flow's kind of lane */
} ring_end;

/* One peer as one exchange of this rank sees it. */
typedef struct peer_link {
    shared_op_slot *slot; /* the peer's, for the same exchange; NULL: not found yet */
    int index;            /* its number */
    ring_end out;
    ring_end in;
    ring_end broadcast_in;
    int64_t sent; /* of this flow */
} peer_link;

/* One cell of this rank: what need not be shared. */
typedef struct shared_exchange {
    _Atomic bool claimed;
    shared_op_slot *slot;
    int index;
    uint64_t tag;
    uint64_t sequence;
    bool everyone; /* the flow */
    int64_t entry_bytes;
    int64_t stride;
    int64_t depth;
    ring_end broadcast_out;
    int64_t broadcast_sent; /* of this flow */
    int slowest_peer;       /* the peer that kept the lane to everyone full last time */
    peer_link *links;       /* [num_ranks] */
} shared_exchange;

struct epic_group {
    char *segment;
    shared_header *header;
    shared_layout layout;
    int rank;
    int num_ranks;
    bool is_shared_by_processes; /* processes: futexes are shared ones */
    int64_t slice_ns;            /* longest sleep between two signs of life */
    _Atomic int own_cores;       /* of every rank: 0 unknown, else 1 + whether */
    patience patience;
    _Atomic uint64_t bytes_sent;
    shared_exchange *exchanges; /* [num_cells] */
    peer_link *links;           /* [num_cells, num_ranks] */

    /* Has the peer's process ended?  NULL: nobody dies alone. */
    bool (*is_dead)(epic_group *group, int peer);
    void *backend_data; /* the backend's */
};

extern const epic_transport shared_transport;

/* A group on `segment`; all but the segment is allocated here. */
epic_result shared_group_new(epic_group **out, const epic_join *join,
                             const shared_layout *layout, char *segment,
                             bool is_shared_by_processes);
/* Marks a fresh segment as this group's, before any peer sees it. */
void shared_segment_init(char *segment, const shared_layout *layout, uint64_t group_id);
/* Is it the segment of this group? */
bool shared_segment_is_of(const char *segment, const shared_layout *layout, uint64_t group_id);
/* Tells the peers that this rank has left. */
void shared_group_close(epic_group *group);
void shared_group_free(epic_group *group);
void shared_memory_info(const epic_config *config, epic_memory_info *out);

/* Between the files of the engine. */
bool shared_match_peer(epic_group *group, shared_exchange *x, int peer);
shared_op_slot *shared_find_slot(const epic_group *group, int peer, uint64_t tag,
                                 uint64_t sequence, int first, int *index);
bool shared_is_gone(epic_group *group, int peer);
bool shared_slot_is_free(epic_group *group, const shared_exchange *x);
void shared_wake_slot(const epic_group *group, shared_op_slot *slot);
void shared_wake_free_slot(const epic_group *group, int rank);
void shared_wake_all(const epic_group *group);

int shared_claim(epic_group *group);
void shared_announce(epic_group *group, int slot, uint64_t tag, uint64_t sequence,
                     const epic_note *note);
const epic_note *shared_note(epic_group *group, int slot, int peer);
void shared_finish(epic_group *group, int slot);
int64_t shared_lane_bytes(const epic_group *group, bool everyone);
void shared_shape(epic_group *group, int slot, const epic_flow *flow);
void *shared_room(epic_group *group, int slot, int to, int64_t index);
void shared_send(epic_group *group, int slot, int to, int64_t upto);
const void *shared_entry(epic_group *group, int slot, int from, int64_t index);
void shared_drop(epic_group *group, int slot, int from, int64_t upto);
void shared_wait_for_change(epic_group *group, int slot, uint32_t phase,
                            const uint64_t *waits_for, uint32_t ms);
void shared_look_at_peer(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                         epic_sight *out);
void shared_break_group(epic_group *group, const epic_failure_info *failure);
bool shared_failure(epic_group *group, epic_failure_info *out);

static inline shared_rank_state *shared_rank_state_of(const epic_group *group, int rank)
{
    const shared_layout *l = &group->layout;
    return (shared_rank_state *)(group->segment + l->segment_bytes -
                                 (l->num_ranks - rank) * l->block_bytes);
}

static inline shared_op_slot *shared_op_slot_of(const epic_group *group, int rank, int slot)
{
    const shared_layout *l = &group->layout;
    return (shared_op_slot *)((char *)shared_rank_state_of(group, rank) + l->slots_at +
                              slot * l->slot_bytes);
}

static inline char *shared_broadcast_ring(const epic_group *group, int rank, int slot)
{
    const shared_layout *l = &group->layout;
    return (char *)shared_rank_state_of(group, rank) + l->staging_at + slot * l->staging_bytes;
}

static inline char *shared_peer_ring(const epic_group *group, int rank, int slot, int to)
{
    const shared_layout *l = &group->layout;
    const int sequence = to < rank ? to : to - 1;
    return shared_broadcast_ring(group, rank, slot) + l->broadcast_ring_bytes +
           sequence * l->peer_ring_bytes;
}

#endif
