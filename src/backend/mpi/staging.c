/* SPDX-License-Identifier: Apache-2.0 */
/* Sends and receives rows through rings. A ring has two halves, and each half holds one
 * *segment* at a time: the entries that one MPI message carries. MPI moves one half while this
 * rank fills or reads the other half.
 *
 * Both ranks know the number of entries in a flow (one array of entries), so no message
 * describes a segment. A segment holds as many entries as fit into half of the ring, and the
 * last segment of a flow holds the rest. The writer sends a segment when all its entries are
 * written. The reader posts a receive only when a half of its ring is free. MPI delays large
 * sends until the receive is posted, so the reader need not report free halves to the writer.
 *
 * If a flow fills only a small part of half a ring, the writer places it at another offset than
 * the previous flow. At the previous offset, the cache lines are still in the reader's cache,
 * so writing to them would be slow.
 *
 * The MPI tag of rows is FIRST_ROW_TAG plus the index of the reader's op slot. A rank reuses a
 * slot only after it has received all rows that it expects there. So the MPI tag identifies the
 * exchange, and MPI keeps the order of messages with equal tags. */
#include "backend/mpi/group.h"

/* Small flows change their offset (choose_offset()), but in all rings of an op slot together
 * they use at most this many bytes. These bytes fit into a cache that several ranks share. */
#define ROUND_BYTES (256 * 1024)

/* Implements epic_transport.ring_bytes. Backend mpi has no ring to EVERYONE. */
int64_t mpi_ring_bytes(const epic_group *group, bool everyone)
{
    (void)everyone;
    return group->ring_bytes;
}

static unsigned char *segment_of(epic_group *group, const op_slot *slot, int peer,
                                 bool receive_rings, uint64_t number)
{
    const int64_t other = peer - (peer > group->rank);
    const int64_t at =
        ((int64_t)slot->index * (group->num_ranks - 1) + other) * 2 + receive_rings;
    return group->rings + at * group->ring_bytes +
           (int64_t)(number % 2) * (group->ring_bytes / 2);
}

static unsigned char *sent_segment(epic_group *group, const op_slot *slot, int to,
                                   uint64_t number)
{
    return segment_of(group, slot, to, false, number) + slot->send_rings[to].offset;
}

/* Returns staging_ring.offset for a flow: the distance in bytes from the beginning of half a
 * ring to the flow's first entry. A small flow begins where the previous flow ended. It begins
 * at 0 if the rest of the half, or the rest of this ring's share of ROUND_BYTES, is too small.
 * A large flow always begins at 0. */
static int64_t choose_offset(const epic_group *group, const op_slot *slot,
                             const staging_ring *ring)
{
    const int64_t bytes = ring->num_entries * slot->stride, half = group->ring_bytes / 2;
    const int64_t part = ROUND_BYTES / (group->num_ranks - 1);
    const int64_t round = part < half ? part : half;
    return bytes && bytes <= round ? slot->num_flows % (round / bytes) * bytes : 0;
}

static uint64_t num_segments(const op_slot *slot, int64_t entries)
{
    return (uint64_t)((entries + slot->per_segment - 1) / slot->per_segment);
}

static int segment_bytes(const op_slot *slot, const staging_ring *ring, uint64_t number)
{
    const int64_t begin = (int64_t)(number - ring->first) * slot->per_segment;
    const int64_t left = ring->num_entries - begin;
    const int64_t count = left < slot->per_segment ? left : slot->per_segment;
    return (int)((count - 1) * slot->stride + slot->entry_bytes);
}

/* Posts receives for the next segments of the flow, one for each free half of the ring. */
static void post_receives(epic_group *group, op_slot *slot, int from)
{
    staging_ring *ring = &slot->receive_rings[from];
    const uint64_t end = ring->first + num_segments(slot, ring->num_entries);
    const uint64_t dropped = ring->first + (uint64_t)(ring->moved / slot->per_segment);
    while (ring->num_started < end && ring->num_started < dropped + 2) {
        const uint64_t number = ring->num_started;
        MPI_Request *request = request_of(slot, from, REQUEST_RECEIVE + (int)(number % 2));
        if (*request != MPI_REQUEST_NULL) return;
        const int code = MPI_Irecv(segment_of(group, slot, from, true, number),
                                   segment_bytes(slot, ring, number), MPI_BYTE, from,
                                   FIRST_ROW_TAG + slot->index, group->comm, request);
        if (code != MPI_SUCCESS) {
            control_fail(group, code, "MPI_Irecv");
            return;
        }
        ring->num_started++;
    }
}

/* Called when a segment from a peer has arrived. Posts the receive for the next segment, if a
 * half of the ring is free. */
void staging_receive_done(epic_group *group, op_slot *slot, int from)
{
    if (slot->per_segment && !is_broken(group)) post_receives(group, slot, from);
}

static void begin_flow(staging_ring *ring, int64_t num_entries)
{
    ring->num_entries = num_entries;
    ring->moved = 0;
    ring->first = ring->num_started;
}

/* Implements epic_transport.shape: sets the number of entries per segment, and posts receives
 * for the first segments of each peer. */
void mpi_shape(epic_group *group, int index, const epic_flow *flow)
{
    op_slot *slot = &group->slots[index];
    pthread_mutex_lock(group->mutex);
    slot->entry_bytes = flow->entry_bytes;
    slot->stride = (flow->entry_bytes + 63) / 64 * 64;
    slot->per_segment = group->ring_bytes / 2 / slot->stride;
    for (int r = 0; r < group->num_ranks && !is_broken(group); r++) {
        if (r == group->rank) continue;
        begin_flow(&slot->send_rings[r], flow->sends[r]);
        begin_flow(&slot->receive_rings[r], flow->receives[r]);
        slot->send_rings[r].offset = choose_offset(group, slot, &slot->send_rings[r]);
        post_receives(group, slot, r);
    }
    slot->num_flows++;
    pthread_mutex_unlock(group->mutex);
}

/* Implements epic_transport.room. Returns NULL while both halves of the ring are in use. */
void *staging_room(epic_group *group, op_slot *slot, int to, int64_t entry)
{
    const staging_ring *ring = &slot->send_rings[to];
    const uint64_t number = ring->first + (uint64_t)(entry / slot->per_segment);
    if (number >= ring->num_started + 2 ||
        *request_of(slot, to, REQUEST_SEND + (int)(number % 2)) != MPI_REQUEST_NULL) {
        slot->waits_for_room = true;
        return NULL;
    }
    return sent_segment(group, slot, to, number) + entry % slot->per_segment * slot->stride;
}

/* Sends each unsent segment with a number below `end`, as one MPI message each. */
static void start_sends(epic_group *group, op_slot *slot, int to, uint64_t end)
{
    staging_ring *ring = &slot->send_rings[to];
    pthread_mutex_lock(group->mutex);
    for (; ring->num_started < end && !is_broken(group); ring->num_started++) {
        const uint64_t number = ring->num_started;
        const int code =
            MPI_Isend(sent_segment(group, slot, to, number), segment_bytes(slot, ring, number),
                      MPI_BYTE, to, FIRST_ROW_TAG + slot->peer_slots[to], group->comm,
                      request_of(slot, to, REQUEST_SEND + (int)(number % 2)));
        if (code != MPI_SUCCESS) control_fail(group, code, "MPI_Isend");
    }
    pthread_mutex_unlock(group->mutex);
}

/* Implements epic_transport.send: updates the number of written entries, and sends each
 * complete segment. */
void mpi_send(epic_group *group, int index, int to, int64_t upto)
{
    op_slot *slot = &group->slots[index];
    staging_ring *ring = &slot->send_rings[to];
    atomic_fetch_add_explicit(&group->bytes_sent,
                              (uint64_t)((upto - ring->moved) * slot->entry_bytes),
                              memory_order_relaxed);
    ring->moved = upto;
    const uint64_t end =
        ring->first + (upto == ring->num_entries ? num_segments(slot, upto)
                                                 : (uint64_t)(upto / slot->per_segment));
    if (ring->num_started < end) start_sends(group, slot, to, end);
}

static bool has_arrived(op_slot *slot, int from, uint64_t number)
{
    return number < slot->receive_rings[from].num_started &&
           *request_of(slot, from, REQUEST_RECEIVE + (int)(number % 2)) == MPI_REQUEST_NULL;
}

/* Implements epic_transport.entry. Returns NULL if the entry's segment has not arrived. */
const void *staging_entry(epic_group *group, op_slot *slot, int from, int64_t entry)
{
    const staging_ring *ring = &slot->receive_rings[from];
    const uint64_t number = ring->first + (uint64_t)(entry / slot->per_segment);
    if (!has_arrived(slot, from, number)) return NULL;
    return segment_of(group, slot, from, true, number) +
           entry % slot->per_segment * slot->stride;
}

/* Implements epic_transport.drop: updates the number of dropped entries, and posts a receive
 * for each half of the ring that became free. */
void mpi_drop(epic_group *group, int index, int from, int64_t upto)
{
    op_slot *slot = &group->slots[index];
    staging_ring *ring = &slot->receive_rings[from];
    const int64_t before = ring->moved / slot->per_segment;
    ring->moved = upto;
    if (upto / slot->per_segment == before || is_broken(group)) return;
    pthread_mutex_lock(group->mutex);
    post_receives(group, slot, from);
    pthread_mutex_unlock(group->mutex);
}

uint64_t mpi_bytes_sent(const epic_group *group)
{
    return atomic_load_explicit(&group->bytes_sent, memory_order_relaxed);
}
