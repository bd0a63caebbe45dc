/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a cell: free, claimed, open (announced), draining (finished, while MPI still reads
 * from its lanes), free. */
#include "backend/mpi/group.h"

/* ---------------------------------------------------------------------------- notes ---- */

cell *cells_find(epic_group *group, uint64_t tag, uint64_t place)
{
    for (int i = 0; i < group->num_cells; i++) {
        cell *c = &group->cells[i];
        if (c->state == CELL_OPEN && c->tag == tag && c->place == place) return c;
    }
    return NULL;
}

static void put_note(cell *c, int from, int peer_cell, const epic_note *note)
{
    c->notes[from] = *note;
    c->peer_cells[from] = peer_cell;
    atomic_store_explicit(&c->came[from], true, memory_order_release);
    c->events++;
}

static void keep_early(epic_group *group, const message *text, int from)
{
    peer *p = &group->peers[from];
    for (uint32_t i = 0; i < group->max_early; i++) {
        early_note *e = &p->early[i];
        if (e->full) continue;
        *e = (early_note){true, text->cell, text->tag, text->place, text->note};
        p->num_early++;
        return;
    }
    epic_failure_info failure = {.result = EPIC_EMISMATCH,
                                 .rank = group->rank,
                                 .tag = text->tag,
                                 .sequence = text->place,
                                 .num_culprits = 1,
                                 .culprits = {from},
                                 .sentence = "a rank began more operations at once than "
                                             "max_in_flight; open a new group"};
    control_break(group, &failure, true);
}

void cells_file_note(epic_group *group, const message *text, int from)
{
    peer *p = &group->peers[from];
    p->operation = (uint32_t)text->note.same[0]; /* as exchange/op_header.h begins */
    p->tag = text->tag;
    p->place = text->place;
    cell *c = cells_find(group, text->tag, text->place);
    if (c)
        put_note(c, from, text->cell, &text->note);
    else
        keep_early(group, text, from);
}

static void fetch_early(epic_group *group, cell *c, int from)
{
    peer *p = &group->peers[from];
    for (uint32_t i = 0; p->num_early && i < group->max_early; i++) {
        early_note *e = &p->early[i];
        if (!e->full || e->tag != c->tag || e->place != c->place) continue;
        put_note(c, from, e->cell, &e->note);
        e->full = false;
        p->num_early--;
        return;
    }
}

/* ------------------------------------------------------------------- claim to finish ---- */

cell *cells_find_free(epic_group *group)
{
    for (int i = 0; i < group->num_cells; i++)
        if (group->cells[i].state == CELL_FREE) return &group->cells[i];
    return NULL;
}

static void clear(epic_group *group, cell *c)
{
    for (int r = 0; r < group->num_ranks; r++) {
        atomic_store_explicit(&c->came[r], false, memory_order_relaxed);
        c->sends[r] = (lane){.started = (uint64_t)c->num_flows}; /* halves take turns, too */
        c->receives[r] = (lane){0};
        c->sights[r].asked = false;
        c->sights[r].answered_ns = 0;
    }
    c->per_segment = 0;
    c->questions = 0;
    c->awaits_room = false;
    c->waiting = (waiting){.quiet_ns = clock_ns()};
}

void mpi_announce(epic_group *group, int index, uint64_t tag, uint64_t place,
                  const epic_note *note)
{
    cell *c = &group->cells[index];
    clear(group, c);
    pthread_mutex_lock(group->mutex);
    c->tag = group->last_tag = tag;
    c->place = group->last_place = place;
    group->last_operation = (uint32_t)note->same[0];
    c->announcement = (message){
        .kind = MESSAGE_NOTE, .cell = index, .tag = tag, .place = place, .note = *note};
    c->state = CELL_OPEN;
    for (int r = 0; r < group->num_ranks && !is_broken(group); r++) {
        if (r == group->rank) continue;
        fetch_early(group, c, r);
        control_isend(group, &c->announcement, r, request_of(c, r, REQUEST_NOTE));
    }
    pthread_mutex_unlock(group->mutex);
}
