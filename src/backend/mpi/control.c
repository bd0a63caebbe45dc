/* SPDX-License-Identifier: Apache-2.0 */
/* Messages on MPI tag 0.  A few receives from any source are always posted; whoever looks at MPI
 * files what came.  All messages are small, so MPI takes them at once and nobody waits for a
 * peer to look. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "backend/mpi/group.h"

#define LATELY_NS 1000000

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

/* ------------------------------------------------------------------------- failures ---- */

void control_break(epic_group *group, const epic_failure_info *failure, bool tell)
{
    if (is_broken(group)) return;
    group->failure = *failure;
    group->failure.sentence[sizeof failure->sentence - 1] = '\0';
    atomic_store_explicit(&group->broken, true, memory_order_release);
    cells_changed(group);
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

void mpi_break_group(epic_group *group, const epic_failure_info *failure)
{
    pthread_mutex_lock(group->mutex);
    control_progress(group);
    control_break(group, failure, true);
    pthread_mutex_unlock(group->mutex);
}

static bool looked_lately(epic_group *group)
{
    const int64_t looked = atomic_load_explicit(&group->looked_ns, memory_order_relaxed);
    return clock_ns() - looked < LATELY_NS;
}

/* Looks at MPI now and then, unless another thread does: a rank that never waits hears of
 * failures too.  One that comes after a while hears all that its peers said meanwhile, before it
 * joins an operation that they gave up: a look may have MPI receive what only the next one
 * finds, so two in vain end it. */
bool mpi_failure(epic_group *group, epic_failure_info *out)
{
    if (!is_broken(group) && !looked_lately(group) &&
        pthread_mutex_trylock(group->mutex) == 0) {
        while (control_progress(group) || control_progress(group)) continue;
        pthread_mutex_unlock(group->mutex);
    }
    if (!is_broken(group)) return false;
    *out = group->failure;
    return true;
}

/* ------------------------------------------------------------------------- receiving ---- */

static void file(epic_group *group, const message *text, int from)
{
    switch (text->kind) {
    case MESSAGE_NOTE:
        cells_file_note(group, text, from);
        break;
    case MESSAGE_FAILURE:
        control_break(group, &text->failure, false);
        break;
    case MESSAGE_CLOSED:
        group->peers[from].closing = true;
        break;
    case MESSAGE_ASK:
        sights_answer(group, text, from);
        break;
    case MESSAGE_ANSWER:
        sights_keep(group, text, from);
        break;
    }
}

static void mark_closed(epic_group *group)
{
    for (int r = 0; r < group->num_ranks; r++) group->peers[r].closed = group->peers[r].closing;
    cells_changed(group);
}

/* Files what has come; false: nothing.  A peer counts as closed only after a look that found
 * nothing more: what it sent before it closed is then filed, in whatever order MPI reported it. */
bool control_progress(epic_group *group)
{
    bool closing = false, any = false;
    group->looks++;
    atomic_store_explicit(&group->looked_ns, clock_ns(), memory_order_relaxed);
    for (int count = NUM_POSTED; closing || count == NUM_POSTED;) {
        int indices[NUM_POSTED];
        MPI_Status statuses[NUM_POSTED];
        const int code =
            MPI_Testsome(NUM_POSTED, group->posted_requests, &count, indices, statuses);
        if (code != MPI_SUCCESS) {
            control_refused(group, code, "MPI_Testsome");
            return false;
        }
        if (count <= 0) break; /* MPI_UNDEFINED: none is posted */
        any = true;
        for (int i = 0; i < count; i++) {
            const message *text = &group->posted[indices[i]];
            file(group, text, statuses[i].MPI_SOURCE);
            closing |= text->kind == MESSAGE_CLOSED;
            MPI_Start(&group->posted_requests[indices[i]]);
        }
    }
    if (closing) mark_closed(group);
    return any;
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
