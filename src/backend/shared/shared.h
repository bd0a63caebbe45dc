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
typedef struct lane_end {
    int64_t base;  /* entries of earlier flows */
    int64_t next;  /* base of the next flow */
    int64_t known; /* how far the other side was when we last looked */
    char *ring;    /* for the flow's kind of lane */
} lane_end;

/* One peer as one exchange of this rank sees it. */
typedef struct shared_link {
    shared_cell *cell; /* the peer's, for the same exchange; NULL: not found yet */
    int index;         /* its number */
    lane_end out;
    lane_end in;
    lane_end in_everyone;
    int64_t sent; /* of this flow */
} shared_link;

/* One cell of this rank: what need not be shared. */
typedef struct shared_exchange {
    _Atomic bool claimed;
    shared_cell *cell;
    int index;
    uint64_t tag;
    uint64_t place;
    bool everyone; /* the flow */
    int64_t entry_bytes;
    int64_t stride;
    int64_t depth;
    lane_end out_everyone;
    int64_t sent_everyone; /* of this flow */
    int slowest;           /* the peer that kept the lane to everyone full last time */
    shared_link *links;    /* [num_ranks] */
} shared_exchange;

struct epic_group {
    char *segment;
    shared_header *header;
    shared_layout layout;
    int rank;
    int num_ranks;
    bool across;           /* processes: futexes are shared ones */
    int64_t slice_ns;      /* longest sleep between two signs of life */
    _Atomic int own_cores; /* of every rank: 0 unknown, else 1 + whether */
    patience patience;
    _Atomic uint64_t bytes_sent;
    shared_exchange *exchanges; /* [num_cells] */
    shared_link *links;         /* [num_cells, num_ranks] */

    /* Has the peer's process ended?  NULL: nobody dies alone. */
    bool (*is_dead)(epic_group *group, int peer);
    void *own; /* the backend's */
};

extern const epic_transport shared_transport;

/* A group on `segment`; all but the segment is allocated here. */
epic_result shared_open(epic_group **out, const epic_join *join, const shared_layout *layout,
                        char *segment, bool across);
/* Marks a fresh segment as this group's, before any peer sees it. */
void shared_found(char *segment, const shared_layout *layout, uint64_t group_id);
/* Is it the segment of this group? */
bool shared_is_ours(const char *segment, const shared_layout *layout, uint64_t group_id);
/* Tells the peers that this rank has left. */
void shared_say_goodbye(epic_group *group);
void shared_free(epic_group *group);
void shared_memory(const epic_config *config, epic_memory_info *out);

/* Between the files of the engine. */
bool shared_match(epic_group *group, shared_exchange *x, int peer);
shared_cell *shared_find(const epic_group *group, int peer, uint64_t tag, uint64_t place,
                         int first, int *index);
bool shared_is_gone(epic_group *group, int peer);
bool shared_cell_is_free(epic_group *group, const shared_exchange *x);
void shared_ring(const epic_group *group, shared_cell *cell);
void shared_ring_door(const epic_group *group, int rank);
void shared_ring_all(const epic_group *group);

int shared_claim(epic_group *group);
void shared_announce(epic_group *group, int cell, uint64_t tag, uint64_t place,
                     const epic_note *note);
const epic_note *shared_note(epic_group *group, int cell, int peer);
void shared_finish(epic_group *group, int cell);
int64_t shared_lane_bytes(const epic_group *group, bool everyone);
void shared_shape(epic_group *group, int cell, const epic_flow *flow);
void *shared_room(epic_group *group, int cell, int to, int64_t index);
void shared_send(epic_group *group, int cell, int to, int64_t upto);
const void *shared_entry(epic_group *group, int cell, int from, int64_t index);
void shared_drop(epic_group *group, int cell, int from, int64_t upto);
void shared_sleep(epic_group *group, int cell, uint32_t phase, const uint64_t *waits_for,
                  uint32_t ms);
void shared_look(epic_group *group, int peer, uint64_t tag, uint64_t place, epic_sight *out);
void shared_break(epic_group *group, const epic_failure_info *failure);
bool shared_failure(epic_group *group, epic_failure_info *out);

static inline shared_head *head_of(const epic_group *group, int rank)
{
    const shared_layout *l = &group->layout;
    return (shared_head *)(group->segment + l->segment_bytes -
                           (l->num_ranks - rank) * l->block_bytes);
}

static inline shared_cell *cell_of(const epic_group *group, int rank, int cell)
{
    const shared_layout *l = &group->layout;
    return (shared_cell *)((char *)head_of(group, rank) + l->cells_at + cell * l->cell_bytes);
}

static inline char *everyone_lane(const epic_group *group, int rank, int cell)
{
    const shared_layout *l = &group->layout;
    return (char *)head_of(group, rank) + l->staging_at + cell * l->staging_bytes;
}

static inline char *private_lane(const epic_group *group, int rank, int cell, int to)
{
    const shared_layout *l = &group->layout;
    const int place = to < rank ? to : to - 1;
    return everyone_lane(group, rank, cell) + l->everyone_bytes + place * l->private_bytes;
}

#endif
