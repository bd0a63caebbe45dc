/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a cell: free, claimed, open (announced), draining (finished, while MPI still reads
 * from its lanes), free.  And waiting: looks at MPI, yields at first and then naps, because
 * ranks may outnumber cores. */
#include <sched.h>
#include <string.h>
#include <time.h>

#include "backend/mpi/group.h"

#define SPIN_NS 50000 /* so long a rank keeps its core if each has one */
#define YIELD_NS \
    1000000 /* so long without naps: the shortest takes three times what is asked */
#define SHORTEST_NAP_NS 20000
#define LONGEST_NAP_NS 200000
#define PATIENCE_NS 1000000 /* with peers that are gone */
#define LOOKS_AT_NOTES 8    /* the first of so many, by who waits for rows */

void nap_ns(int64_t ns)
{
    const struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    nanosleep(&t, NULL);
}

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
    p->operation = (uint32_t)text->note.same[0]; /* as exchange/note.h begins */
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

static bool has_come(const cell *c, int from)
{
    return atomic_load_explicit(&c->came[from], memory_order_acquire);
}

const epic_note *mpi_note(epic_group *group, int index, int from)
{
    cell *c = &group->cells[index];
    if (!has_come(c, from)) cells_asked(group, c);
    return has_come(c, from) ? &c->notes[from] : NULL;
}

/* ------------------------------------------------------------------------ moving MPI ---- */

void cells_changed(epic_group *group)
{
    for (int i = 0; i < group->num_cells; i++) group->cells[i].events++;
}

/* Asks MPI what became of the cell's sends and receives. */
void cells_advance(epic_group *group, cell *c)
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

/* What the cell waits for: rows once the flow has a shape, notes before.  Where ranks outnumber
 * cores, a call of MPI that finds nothing gives the core away: no call looks for what does not
 * matter yet. */
static void look_for(epic_group *group, cell *c)
{
    if (c->per_segment)
        cells_advance(group, c);
    else
        control_progress(group);
}

/* A caller that only asks and never waits gets there too. */
void cells_asked(epic_group *group, cell *c)
{
    if (++c->questions < group->num_ranks) return;
    c->questions = 0;
    pthread_mutex_lock(group->mutex);
    if (!is_broken(group)) look_for(group, c);
    pthread_mutex_unlock(group->mutex);
}

static bool is_idle(const epic_group *group, const cell *c)
{
    for (int q = 0; q < group->num_ranks * NUM_REQUESTS; q++)
        if (c->requests[q] != MPI_REQUEST_NULL) return false;
    return true;
}

static void try_free(epic_group *group, cell *c)
{
    cells_advance(group, c);
    if (!is_idle(group, c)) return;
    c->state = CELL_FREE;
    group->num_draining--;
}

void cells_drain(epic_group *group)
{
    for (int i = 0; group->num_draining && i < group->num_cells; i++)
        if (group->cells[i].state == CELL_DRAINING) try_free(group, &group->cells[i]);
}

/* ------------------------------------------------------------------- claim to finish ---- */

static cell *find_free(epic_group *group)
{
    for (int i = 0; i < group->num_cells; i++)
        if (group->cells[i].state == CELL_FREE) return &group->cells[i];
    return NULL;
}

int mpi_claim(epic_group *group)
{
    pthread_mutex_lock(group->mutex);
    if (!is_broken(group)) cells_drain(group); /* caches know the memory of the last one */
    cell *c = find_free(group);
    if (c) c->state = CELL_CLAIMED;
    pthread_mutex_unlock(group->mutex);
    return c ? c->index : -1;
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

void mpi_finish(epic_group *group, int index)
{
    cell *c = &group->cells[index];
    pthread_mutex_lock(group->mutex);
    c->state = CELL_DRAINING;
    group->num_draining++;
    drain_wake(group);
    pthread_mutex_unlock(group->mutex);
}

/* --------------------------------------------------------------------------- waiting ---- */

static void begin_wait(waiting *w, uint32_t phase, const uint64_t *waits_for)
{
    w->now = true;
    w->phase = phase;
    if (waits_for)
        memcpy(w->waits_for, waits_for, sizeof w->waits_for);
    else
        memset(w->waits_for, 0, sizeof w->waits_for);
}

static void end_wait(waiting *w)
{
    w->now = false;
    w->last_ns = clock_ns();
}

/* A wait for a peer that is gone is soon over: the caller judges whether it still owes us. */
static bool awaits_the_gone(epic_group *group, const waiting *w, int64_t now)
{
    lives_look(group, now);
    for (int r = 0; r < group->num_ranks; r++)
        if (has_rank(w->waits_for, r) && lives_is_gone(group, r)) return true;
    return false;
}

/* Has anything changed for the cell since its last wait?  (c NULL: is a cell free?)  Who waits
 * for rows looks at notes and failures now and then. */
static bool look_around(epic_group *group, cell *c)
{
    if (is_broken(group)) return true;
    if (!c) {
        control_progress(group);
        cells_drain(group);
        return find_free(group) != NULL;
    }
    if (c->events == c->seen) look_for(group, c);
    if (c->events != c->seen) return true;
    if (c->per_segment && ++c->looks % LOOKS_AT_NOTES == 0) control_progress(group);
    sights_ask(group, c, clock_ns());
    return c->events != c->seen;
}

/* A look may have MPI receive what only the next one finds: so that one comes first. */
static void rest(const epic_group *group, int looks, int64_t waited, int64_t left)
{
    if (waited < YIELD_NS) {
        const bool keeps = waited < SPIN_NS && group->own_cores;
        if (!keeps && looks % 2 == 0) sched_yield();
        return;
    }
    int64_t ns = waited / 8;
    if (ns < SHORTEST_NAP_NS) ns = SHORTEST_NAP_NS;
    if (ns > LONGEST_NAP_NS) ns = LONGEST_NAP_NS;
    nap_ns(ns < left ? ns : left);
}

static void wait_until(epic_group *group, cell *c, waiting *w, int64_t start, int64_t end)
{
    for (int looks = 1; !look_around(group, c); looks++) {
        pthread_mutex_unlock(group->mutex);
        const int64_t now = clock_ns();
        if (now < end) rest(group, looks, now - start, end - now);
        pthread_mutex_lock(group->mutex);
        w->now = true; /* threads that wait for a free cell share it */
        if (now >= end || (now - start >= PATIENCE_NS && awaits_the_gone(group, w, now)))
            return;
    }
    if (!c) return;
    c->seen = c->events;
    c->waiting.quiet_ns = clock_ns();
}

void mpi_wait(epic_group *group, int index, uint32_t phase, const uint64_t *waits_for,
              uint32_t ms)
{
    cell *c = index < 0 ? NULL : &group->cells[index];
    waiting *w = c ? &c->waiting : &group->waiting;
    const int64_t start = clock_ns();
    pthread_mutex_lock(group->mutex);
    begin_wait(w, phase, waits_for);
    wait_until(group, c, w, start, start + 1000000ll * ms);
    end_wait(w);
    pthread_mutex_unlock(group->mutex);
}
