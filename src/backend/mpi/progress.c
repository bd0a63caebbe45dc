/* SPDX-License-Identifier: Apache-2.0 */
/* Every look at MPI.  This file polls and dispatches what has come to files that only handle
 * it: control messages to control.c, cells.c and sights.c, rows to lanes.c. */
#include "backend/mpi/group.h"

/* ------------------------------------------------------------------ control messages ---- */

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
    control_changed(group);
}

/* Files what has come; false: nothing.  A peer counts as closed only after a look that found
 * nothing more: what it sent before it closed is then filed, in whatever order MPI reported it. */
bool progress_control(epic_group *group)
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

void progress_break(epic_group *group, const epic_failure_info *failure)
{
    pthread_mutex_lock(group->mutex);
    progress_control(group);
    control_break(group, failure, true);
    pthread_mutex_unlock(group->mutex);
}

/* ------------------------------------------------------------------------------ rows ---- */

/* Asks MPI what became of the cell's sends and receives. */
static void advance(epic_group *group, cell *c)
{
    int count;
    group->looks++;
    const int code = MPI_Testsome(group->num_ranks * NUM_REQUESTS, c->requests, &count,
                                  group->indices, MPI_STATUSES_IGNORE);
    if (code != MPI_SUCCESS) {
        control_refused(group, code, "MPI_Testsome");
        return;
    }
    for (int i = 0; i < count; i++) { /* MPI_UNDEFINED is negative */
        const int which = group->indices[i] % NUM_REQUESTS;
        if (which >= REQUEST_RECEIVE || (which >= REQUEST_SEND && c->awaits_room)) c->events++;
        if (which >= REQUEST_RECEIVE) lanes_arrived(group, c, group->indices[i] / NUM_REQUESTS);
    }
}

static bool is_idle(const epic_group *group, const cell *c)
{
    for (int q = 0; q < group->num_ranks * NUM_REQUESTS; q++)
        if (c->requests[q] != MPI_REQUEST_NULL) return false;
    return true;
}

static void try_free(epic_group *group, cell *c)
{
    advance(group, c);
    if (!is_idle(group, c)) return;
    c->state = CELL_FREE;
    group->num_draining--;
}

void progress_drain(epic_group *group)
{
    for (int i = 0; group->num_draining && i < group->num_cells; i++)
        if (group->cells[i].state == CELL_DRAINING) try_free(group, &group->cells[i]);
}

/* ------------------------------------------------------------------------- of a cell ---- */

/* What the cell waits for: rows once the flow has a shape, notes before.  Where ranks outnumber
 * cores, a call of MPI that finds nothing gives the core away: no call looks for what does not
 * matter yet. */
void progress_cell(epic_group *group, cell *c)
{
    if (c->per_segment)
        advance(group, c);
    else
        progress_control(group);
}

/* A caller that only asks and never waits gets there too. */
void progress_asked(epic_group *group, cell *c)
{
    if (++c->questions < group->num_ranks) return;
    c->questions = 0;
    pthread_mutex_lock(group->mutex);
    if (!is_broken(group)) progress_cell(group, c);
    pthread_mutex_unlock(group->mutex);
}
