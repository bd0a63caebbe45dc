/* SPDX-License-Identifier: Apache-2.0 */
/* Rows.  A lane is two segments; one is filled (or read) while MPI moves the other.  Both sides
 * know how many entries a flow has, so which entries a segment holds needs no words: all that
 * fit, and the flow's last segment the rest.  A segment leaves when it is full, or last.  The
 * receiver posts a segment only when it has room, and large sends wait for that: no credits.
 *
 * A flow that fills a small part of a segment begins further on in it each time.  The cache of who
 * read the last one still has its lines, and to write such a line is to take it from there; what
 * was read some flows ago has left that cache.
 *
 * A peer's cell is not used again before the peer has received all that it expects in it, so the
 * cell's number as MPI tag is enough to tell exchanges apart; flows follow by MPI's own order. */
#include "backend/mpi/group.h"

#define ROUND_BYTES (256 * 1024) /* of all lanes of a cell: ranks may share a cache */

/* There is no lane to everyone; what goes to all of them goes through the lane to each. */
int64_t mpi_lane_bytes(const epic_group *group, bool everyone)
{
    (void)everyone;
    return group->lane_bytes;
}

static unsigned char *segment_of(epic_group *group, const cell *c, int peer, bool receives,
                                 uint64_t number)
{
    const int64_t other = peer - (peer > group->rank);
    const int64_t at = ((int64_t)c->index * (group->num_ranks - 1) + other) * 2 + receives;
    return group->lanes + at * group->lane_bytes +
           (int64_t)(number % 2) * (group->lane_bytes / 2);
}

static unsigned char *sent_segment(epic_group *group, const cell *c, int to, uint64_t number)
{
    return segment_of(group, c, to, false, number) + c->sends[to].shift;
}

/* Where in its segment a flow begins. */
static int64_t choose_shift(const epic_group *group, const cell *c, const lane *l)
{
    const int64_t bytes = l->num_entries * c->stride, half = group->lane_bytes / 2;
    const int64_t part = ROUND_BYTES / (group->num_ranks - 1);
    const int64_t round = part < half ? part : half;
    return bytes && bytes <= round ? c->num_flows % (round / bytes) * bytes : 0;
}

static uint64_t num_segments(const cell *c, int64_t entries)
{
    return (uint64_t)((entries + c->per_segment - 1) / c->per_segment);
}

static int bytes_of(const cell *c, const lane *l, uint64_t number)
{
    const int64_t begin = (int64_t)(number - l->first) * c->per_segment;
    const int64_t left = l->num_entries - begin;
    const int64_t count = left < c->per_segment ? left : c->per_segment;
    return (int)((count - 1) * c->stride + c->entry_bytes);
}

/* Posts segments whose half of the lane has been dropped. */
static void post(epic_group *group, cell *c, int from)
{
    lane *l = &c->receives[from];
    const uint64_t end = l->first + num_segments(c, l->num_entries);
    const uint64_t dropped = l->first + (uint64_t)(l->moved / c->per_segment);
    while (l->started < end && l->started < dropped + 2) {
        const uint64_t number = l->started;
        MPI_Request *request = request_of(c, from, REQUEST_RECEIVE + (int)(number % 2));
        if (*request != MPI_REQUEST_NULL) return;
        const int code =
            MPI_Irecv(segment_of(group, c, from, true, number), bytes_of(c, l, number),
                      MPI_BYTE, from, FIRST_LANE_TAG + c->index, group->comm, request);
        if (code != MPI_SUCCESS) {
            control_refused(group, code, "MPI_Irecv");
            return;
        }
        l->started++;
    }
}

void lanes_arrived(epic_group *group, cell *c, int from)
{
    if (c->per_segment && !is_broken(group)) post(group, c, from);
}

static void begin_flow(lane *l, int64_t num_entries)
{
    l->num_entries = num_entries;
    l->moved = 0;
    l->first = l->started;
}

void mpi_shape(epic_group *group, int index, const epic_flow *flow)
{
    cell *c = &group->cells[index];
    pthread_mutex_lock(group->mutex);
    c->entry_bytes = flow->entry_bytes;
    c->stride = (flow->entry_bytes + 63) / 64 * 64;
    c->per_segment = group->lane_bytes / 2 / c->stride;
    for (int r = 0; r < group->num_ranks && !is_broken(group); r++) {
        if (r == group->rank) continue;
        begin_flow(&c->sends[r], flow->sends[r]);
        begin_flow(&c->receives[r], flow->receives[r]);
        c->sends[r].shift = choose_shift(group, c, &c->sends[r]);
        post(group, c, r);
    }
    c->num_flows++;
    pthread_mutex_unlock(group->mutex);
}

void *lanes_room(epic_group *group, cell *c, int to, int64_t entry)
{
    const lane *l = &c->sends[to];
    const uint64_t number = l->first + (uint64_t)(entry / c->per_segment);
    if (number >= l->started + 2 ||
        *request_of(c, to, REQUEST_SEND + (int)(number % 2)) != MPI_REQUEST_NULL) {
        c->awaits_room = true;
        return NULL;
    }
    return sent_segment(group, c, to, number) + entry % c->per_segment * c->stride;
}

static void start_sends(epic_group *group, cell *c, int to, uint64_t end)
{
    lane *l = &c->sends[to];
    pthread_mutex_lock(group->mutex);
    for (; l->started < end && !is_broken(group); l->started++) {
        const uint64_t number = l->started;
        const int code =
            MPI_Isend(sent_segment(group, c, to, number), bytes_of(c, l, number), MPI_BYTE, to,
                      FIRST_LANE_TAG + c->peer_cells[to], group->comm,
                      request_of(c, to, REQUEST_SEND + (int)(number % 2)));
        if (code != MPI_SUCCESS) control_refused(group, code, "MPI_Isend");
    }
    pthread_mutex_unlock(group->mutex);
}

void mpi_send(epic_group *group, int index, int to, int64_t upto)
{
    cell *c = &group->cells[index];
    lane *l = &c->sends[to];
    atomic_fetch_add_explicit(&group->bytes_sent,
                              (uint64_t)((upto - l->moved) * c->entry_bytes),
                              memory_order_relaxed);
    l->moved = upto;
    const uint64_t end =
        l->first +
        (upto == l->num_entries ? num_segments(c, upto) : (uint64_t)(upto / c->per_segment));
    if (l->started < end) start_sends(group, c, to, end);
}

static bool is_here(cell *c, int from, uint64_t number)
{
    return number < c->receives[from].started &&
           *request_of(c, from, REQUEST_RECEIVE + (int)(number % 2)) == MPI_REQUEST_NULL;
}

const void *lanes_entry(epic_group *group, cell *c, int from, int64_t entry)
{
    const lane *l = &c->receives[from];
    const uint64_t number = l->first + (uint64_t)(entry / c->per_segment);
    if (!is_here(c, from, number)) return NULL;
    return segment_of(group, c, from, true, number) + entry % c->per_segment * c->stride;
}

void mpi_drop(epic_group *group, int index, int from, int64_t upto)
{
    cell *c = &group->cells[index];
    lane *l = &c->receives[from];
    const int64_t before = l->moved / c->per_segment;
    l->moved = upto;
    if (upto / c->per_segment == before || is_broken(group)) return;
    pthread_mutex_lock(group->mutex);
    post(group, c, from);
    pthread_mutex_unlock(group->mutex);
}

uint64_t mpi_bytes_sent(const epic_group *group)
{
    return atomic_load_explicit(&group->bytes_sent, memory_order_relaxed);
}
