/* SPDX-License-Identifier: Apache-2.0 */
/* Sends control messages (messages without rows, on MPI tag 0) and stores the failure of the
 * group. NUM_RECEIVE_BUFFERS receive requests for messages from any rank are always posted, and
 * progress.c polls them. Control messages are small, so MPI completes a send at once, even if
 * the peer does not poll MPI. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "backend/mpi/group.h"

static int control_message_bytes(uint32_t kind)
{
    const size_t head = offsetof(control_message, header);
    switch (kind) {
    case MESSAGE_HEADER:
        return (int)(head + sizeof(epic_op_header));
    case MESSAGE_FAILURE:
        return (int)(head + sizeof(epic_failure_info));
    case MESSAGE_STATUS_REPLY:
        return (int)(head + sizeof(status_report));
    default:
        return (int)head;
    }
}

/* Sends a control message without waiting. The caller must not change or free *message before
 * *request is complete. */
void control_send(epic_group *group, const control_message *message, int to,
                  MPI_Request *request)
{
    const int code = MPI_Isend(message, control_message_bytes(message->kind), MPI_BYTE, to,
                               CONTROL_TAG, group->comm, request);
    if (code != MPI_SUCCESS) control_fail(group, code, "MPI_Isend");
}

static void broadcast_message(epic_group *group, const control_message *message,
                              MPI_Request *requests)
{
    for (int r = 0; r < group->num_ranks; r++)
        if (r != group->rank) control_send(group, message, r, &requests[r]);
}

/* Ends the waits of all threads of this rank: increments num_events of every op slot. wait()
 * returns when it finds that num_events has changed. */
void control_notify_all(epic_group *group)
{
    for (int i = 0; i < group->num_slots; i++) group->slots[i].num_events++;
}

/* Stores the group's first failure, and ends all waits of this rank. If should_broadcast is
 * set, also sends the failure to all ranks. `broken` is stored last, with release order,
 * because threads that see it set read the failure without the mutex. */
void control_break(epic_group *group, const epic_failure_info *failure, bool should_broadcast)
{
    if (is_broken(group)) return;
    group->failure = *failure;
    group->failure.sentence[sizeof failure->sentence - 1] = '\0';
    atomic_store_explicit(&group->broken, true, memory_order_release);
    control_notify_all(group);
    if (!should_broadcast) return;
    group->failure_buffer.message =
        (control_message){.kind = MESSAGE_FAILURE, .failure = group->failure};
    broadcast_message(group, &group->failure_buffer.message, group->broadcast_requests);
}

/* Breaks the group because the MPI call `what` returned the error `code`. */
void control_fail(epic_group *group, int code, const char *what)
{
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, reason, &length);
    epic_failure_info failure = {.result = EPIC_EDEVICE, .rank = group->rank};
    snprintf(failure.sentence, sizeof failure.sentence,
             "rank %d: %s was refused: %.300s; close this context and open a new group",
             group->rank, what, reason);
    control_break(group, &failure, true);
}

epic_result control_start(epic_group *group)
{
    for (int i = 0; i < NUM_RECEIVE_BUFFERS; i++) {
        int code = MPI_Recv_init(&group->receive_buffers[i], sizeof(control_message), MPI_BYTE,
                                 MPI_ANY_SOURCE, CONTROL_TAG, group->comm,
                                 &group->receive_requests[i]);
        if (code == MPI_SUCCESS) code = MPI_Start(&group->receive_requests[i]);
        if (code != MPI_SUCCESS) return runtime_fail(code, "posting a receive");
    }
    return EPIC_OK;
}

void control_stop(epic_group *group)
{
    for (int i = 0; i < NUM_RECEIVE_BUFFERS; i++) {
        if (group->receive_requests[i] == MPI_REQUEST_NULL) continue;
        MPI_Cancel(&group->receive_requests[i]);
        MPI_Wait(&group->receive_requests[i], MPI_STATUS_IGNORE);
        MPI_Request_free(&group->receive_requests[i]);
    }
}

void control_close(epic_group *group)
{
    group->close_message = (control_message){.kind = MESSAGE_CLOSED};
    broadcast_message(group, &group->close_message,
                      group->broadcast_requests + group->num_ranks);
}

/* Returns whether all control messages of this rank have been sent. Also returns true if MPI
 * fails, because in this case the messages will never be sent and waiting is useless. */
bool control_is_sent(epic_group *group)
{
    int sent = 1;
    const int code = MPI_Testall(2 * group->num_ranks, group->broadcast_requests, &sent,
                                 MPI_STATUSES_IGNORE);
    for (int i = 0; code == MPI_SUCCESS && sent && i < NUM_SEND_BUFFERS; i++)
        if (MPI_Test(&group->send_buffers[i].request, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            break;
    return code != MPI_SUCCESS || sent;
}
