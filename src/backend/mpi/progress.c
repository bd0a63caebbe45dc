/* SPDX-License-Identifier: Apache-2.0 */
/* Polls MPI, and passes the messages that have arrived to other files: control messages to
 * control.c, op_slots.c and peer_status.c, and messages with rows to staging.c. */
#include "backend/mpi/group.h"

static void dispatch_message(epic_group *group, const control_message *message, int from)
{
    switch (message->kind) {
    case MESSAGE_HEADER:
        op_slots_add_header(group, message, from);
        break;
    case MESSAGE_FAILURE:
        control_break(group, &message->failure, false);
        break;
    case MESSAGE_CLOSED:
        group->peers[from].is_closing = true;
        break;
    case MESSAGE_STATUS_REQUEST:
        peer_status_reply(group, message, from);
        break;
    case MESSAGE_STATUS_REPLY:
        peer_status_store(group, message, from);
        break;
    }
}

static void mark_closed(epic_group *group)
{
    for (int r = 0; r < group->num_ranks; r++)
        group->peers[r].closed = group->peers[r].is_closing;
    control_notify_all(group);
}

/* Handles all control messages that have arrived. Returns whether any message had arrived.
 *
 * MPI may report a peer's messages in another order than they were sent. So after a close
 * message this function polls until no more messages arrive, and only then marks the peer as
 * closed. At this point it has handled all messages that the peer sent before the close
 * message. */
bool progress_control(epic_group *group)
{
    bool any_closing = false, any = false;
    group->num_looks++;
    atomic_store_explicit(&group->polled_ns, clock_ns(), memory_order_relaxed);
    for (int count = NUM_RECEIVE_BUFFERS; any_closing || count == NUM_RECEIVE_BUFFERS;) {
        int indices[NUM_RECEIVE_BUFFERS];
        MPI_Status statuses[NUM_RECEIVE_BUFFERS];
        const int code = MPI_Testsome(NUM_RECEIVE_BUFFERS, group->receive_requests, &count,
                                      indices, statuses);
        if (code != MPI_SUCCESS) {
            control_fail(group, code, "MPI_Testsome");
            return false;
        }
        /* MPI sets count to MPI_UNDEFINED (negative) if no receive is posted */
        if (count <= 0) break;
        any = true;
        for (int i = 0; i < count; i++) {
            const control_message *message = &group->receive_buffers[indices[i]];
            dispatch_message(group, message, statuses[i].MPI_SOURCE);
            any_closing |= message->kind == MESSAGE_CLOSED;
            MPI_Start(&group->receive_requests[indices[i]]);
        }
    }
    if (any_closing) mark_closed(group);
    return any;
}

/* Implements epic_transport.break_group. Polls first, because a failure that a peer has already
 * sent takes precedence over the failure that this rank reports. */
void progress_break_group(epic_group *group, const epic_failure_info *failure)
{
    pthread_mutex_lock(group->mutex);
    progress_control(group);
    control_break(group, failure, true);
    pthread_mutex_unlock(group->mutex);
}

/* Polls the sends and receives of an op slot. To end a wait, increments num_events for each
 * message with rows that has arrived and, if the op slot waits for room, for each finished
 * send. */
static void poll_slot(epic_group *group, op_slot *slot)
{
    int count;
    group->num_looks++;
    const int code = MPI_Testsome(group->num_ranks * NUM_REQUESTS, slot->requests, &count,
                                  group->indices, MPI_STATUSES_IGNORE);
    if (code != MPI_SUCCESS) {
        control_fail(group, code, "MPI_Testsome");
        return;
    }
    /* MPI sets count to a negative value if no request is active */
    for (int i = 0; i < count; i++) {
        const int which = group->indices[i] % NUM_REQUESTS;
        if (which >= REQUEST_RECEIVE || (which >= REQUEST_SEND && slot->waits_for_room))
            slot->num_events++;
        if (which >= REQUEST_RECEIVE)
            staging_receive_done(group, slot, group->indices[i] / NUM_REQUESTS);
    }
}

static bool is_idle(const epic_group *group, const op_slot *slot)
{
    for (int q = 0; q < group->num_ranks * NUM_REQUESTS; q++)
        if (slot->requests[q] != MPI_REQUEST_NULL) return false;
    return true;
}

static void free_if_idle(epic_group *group, op_slot *slot)
{
    poll_slot(group, slot);
    if (!is_idle(group, slot)) return;
    slot->state = SLOT_FREE;
    group->num_draining--;
}

/* Frees the draining op slots whose requests are complete. */
void progress_drain(epic_group *group)
{
    for (int i = 0; group->num_draining && i < group->num_slots; i++)
        if (group->slots[i].state == SLOT_DRAINING) free_if_idle(group, &group->slots[i]);
}

/* Polls MPI for the messages for which the op slot waits: rows if a flow has begun, and op
 * headers if not. Does not poll for both, because an MPI call that finds no message yields the
 * core, which is slow if there are more ranks than cores. */
void progress_slot(epic_group *group, op_slot *slot)
{
    if (slot->per_segment)
        poll_slot(group, slot);
    else
        progress_control(group);
}

/* Called when room(), entry() or op_header() finds nothing. Polls MPI at every num_ranks-th
 * such call, so that MPI makes progress even if the caller never waits. */
void progress_after_miss(epic_group *group, op_slot *slot)
{
    if (++slot->num_misses < group->num_ranks) return;
    slot->num_misses = 0;
    pthread_mutex_lock(group->mutex);
    if (!is_broken(group)) progress_slot(group, slot);
    pthread_mutex_unlock(group->mutex);
}
