/* SPDX-License-Identifier: Apache-2.0 */
/* Messages on MPI tag 0.  A few receives from any source are always posted; whoever looks at MPI
 * files what came.  All messages are small, so MPI takes them at once and nobody waits for a
 * peer to look. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "backend/mpi/group.h"

static int text_bytes(uint32_t kind)
{
    const size_t head = offsetof(message, note);
    switch (kind) {
    case MESSAGE_NOTE:
        return (int)(head + sizeof(epic_note));
    case MESSAGE_FAILURE:
        return (int)(head + sizeof(epic_failure_info));
    case MESSAGE_ANSWER:
        return (int)(head + sizeof(answer));
    default:
        return (int)head;
    }
}

void control_isend(epic_group *group, const message *text, int to, MPI_Request *request)
{
    const int code = MPI_Isend(text, text_bytes(text->kind), MPI_BYTE, to, CONTROL_TAG,
                               group->comm, request);
    if (code != MPI_SUCCESS) control_refused(group, code, "MPI_Isend");
}

static void tell_all(epic_group *group, const message *text, MPI_Request *requests)
{
    for (int r = 0; r < group->num_ranks; r++)
        if (r != group->rank) control_isend(group, text, r, &requests[r]);
}

void control_changed(epic_group *group)
{
    for (int i = 0; i < group->num_cells; i++) group->cells[i].events++;
}

/* ------------------------------------------------------------------------- failures ---- */

void control_break(epic_group *group, const epic_failure_info *failure, bool tell)
{
    if (is_broken(group)) return;
    group->failure = *failure;
    group->failure.sentence[sizeof failure->sentence - 1] = '\0';
    atomic_store_explicit(&group->broken, true, memory_order_release);
    control_changed(group);
    if (!tell) return;
    group->farewell.text = (message){.kind = MESSAGE_FAILURE, .failure = group->failure};
    tell_all(group, &group->farewell.text, group->broadcasts);
}

void control_refused(epic_group *group, int code, const char *what)
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
    for (int i = 0; i < NUM_POSTED; i++) {
        int code = MPI_Recv_init(&group->posted[i], sizeof(message), MPI_BYTE, MPI_ANY_SOURCE,
                                 CONTROL_TAG, group->comm, &group->posted_requests[i]);
        if (code == MPI_SUCCESS) code = MPI_Start(&group->posted_requests[i]);
        if (code != MPI_SUCCESS) return runtime_sentence(code, "posting a receive");
    }
    return EPIC_OK;
}

void control_stop(epic_group *group)
{
    for (int i = 0; i < NUM_POSTED; i++) {
        if (group->posted_requests[i] == MPI_REQUEST_NULL) continue;
        MPI_Cancel(&group->posted_requests[i]);
        MPI_Wait(&group->posted_requests[i], MPI_STATUS_IGNORE);
        MPI_Request_free(&group->posted_requests[i]);
    }
}

/* --------------------------------------------------------------------------- leaving ---- */

void control_close(epic_group *group)
{
    group->closing = (message){.kind = MESSAGE_CLOSED};
    tell_all(group, &group->closing, group->broadcasts + group->num_ranks);
}

bool control_sent(epic_group *group)
{
    int sent = 1;
    const int code =
        MPI_Testall(2 * group->num_ranks, group->broadcasts, &sent, MPI_STATUSES_IGNORE);
    for (int i = 0; code == MPI_SUCCESS && sent && i < NUM_LETTERS; i++)
        if (MPI_Test(&group->letters[i].request, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            break;
    return code != MPI_SUCCESS || sent;
}
