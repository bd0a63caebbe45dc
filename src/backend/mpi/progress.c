/* SPDX-License-Identifier: Apache-2.0 */
/* Every look at MPI.  This file polls and dispatches what has come to files that only handle
 * it: control messages to control.c, cells.c and sights.c, rows to lanes.c. */
#include "backend/mpi/group.h"

/* ------------------------------------------------------------------ control messages ---- */

static void dispatch_message(epic_group *group, const control_message *message, int from)
{
    switch (message->kind) {
    case MESSAGE_NOTE:
        op_slots_add_note(group, message, from);
        break;
    case MESSAGE_FAILURE:
        control_break(group, &message->failure, false);
        break;
    case MESSAGE_CLOSED:
        group->peers[from].close_message = true;
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
        group->peers[r].closed = group->peers[r].close_message;
    control_notify_all(group);
}

/* Files what has come; false: nothing.  A peer counts as closed only after a look that found
 * nothing more: what it sent before it closed is then filed, in whatever order MPI reported it. */
bool progress_control(epic_group *group)
{
    bool close_message = false, any = false;
    group->num_looks++;
    atomic_store_explicit(&group->polled_ns, clock_ns(), memory_order_relaxed);
    for (int count = NUM_RECEIVE_BUFFERS; close_message || count == NUM_RECEIVE_BUFFERS;) {
        int indices[NUM_RECEIVE_BUFFERS];
        MPI_Status statuses[NUM_RECEIVE_BUFFERS];
        const int code = MPI_Testsome(NUM_RECEIVE_BUFFERS, group->receive_requests, &count,
                                      indices, statuses);
        if (code != MPI_SUCCESS) {
            control_fail(group, code, "MPI_Testsome");
            return false;
        }
        if (count <= 0) break; /* MPI_UNDEFINED: none is posted */
        any = true;
        for (int i = 0; i < count; i++) {
            const control_message *message = &group->receive_buffers[indices[i]];
            dispatch_message(group, message, statuses[i].MPI_SOURCE);
            close_message |= message->kind == MESSAGE_CLOSED;
            MPI_Start(&group->receive_requests[indices[i]]);
        }
    }
    if (close_message) mark_closed(group);
    return any;
}

void progress_break_group(epic_group *group, const epic_failure_info *failure)
{
    pthread_mutex_lock(group->mutex);
    progress_control(group);
    control_break(group, failure, true);
    pthread_mutex_unlock(group->mutex);
}

/* ------------------------------------------------------------------------------ rows ---- */

/* Asks MPI what became of the cell's sends and receives. */
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
    for (int i = 0; i < count; i++) { /* MPI_UNDEFINED is negative */
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

void progress_drain(epic_group *group)
{
    for (int i = 0; group->num_draining && i < group->num_slots; i++)
        if (group->slots[i].state == SLOT_DRAINING) free_if_idle(group, &group->slots[i]);
}

/* ------------------------------------------------------------------------- of a cell ---- */

/* What the cell waits for: rows once the flow has a shape, notes before.  Where ranks outnumber
 * cores, a call of MPI that finds nothing gives the core away: no call looks for what does not
 * matter yet. */
void progress_cell(epic_group *group, op_slot *slot)
{
    if (slot->per_segment)
        poll_slot(group, slot);
    else
        progress_control(group);
}

/* A caller that only asks and never waits gets there too. */
void progress_after_miss(epic_group *group, op_slot *slot)
{
    if (++slot->num_misses < group->num_ranks) return;
    slot->num_misses = 0;
    pthread_mutex_lock(group->mutex);
    if (!is_broken(group)) progress_cell(group, slot);
    pthread_mutex_unlock(group->mutex);
}
