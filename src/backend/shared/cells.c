/* SPDX-License-Identifier: Apache-2.0 */
/* Cells: one rank's part of one exchange, and finding the peers' parts. */
#include <string.h>

#include "backend/shared/shared.h"

/* Have all peers let go of the exchange that the cell held last? */
static bool released(const epic_group *g, const shared_exchange *x)
{
    const uint64_t version = load_relaxed(&x->cell->version);
    for (int r = 0; r < g->num_ranks; r++)
        if (r != g->rank && load_ordered(&x->cell->lanes[r].done) != version) return false;
    return true;
}

bool shared_cell_is_free(epic_group *g, const shared_exchange *x)
{
    return !load_ordered(&x->claimed) && released(g, x);
}

/* Tested again after it is ours: another thread may have used the cell in between.  Who slept at
 * the door meanwhile may have missed it. */
int shared_claim(epic_group *g)
{
    for (int i = 0; i < g->layout.num_cells; i++) {
        shared_exchange *x = &g->exchanges[i];
        if (!shared_cell_is_free(g, x) || swap_ordered(&x->claimed, true)) continue;
        if (released(g, x)) return i;
        store_ordered(&x->claimed, false);
        shared_ring_door(g, g->rank);
    }
    return -1;
}

static void raise_used_cells(shared_head *head, uint32_t count)
{
    uint32_t used = load_relaxed(&head->used_cells);
    while (used < count && !compare_swap(&head->used_cells, &used, count)) continue;
}

/* The release order of tag and place shows the odd version to whoever reads the new ones. */
static void write_cell(epic_group *g, shared_exchange *x, const epic_note *note)
{
    shared_cell *cell = x->cell;
    const uint64_t version = load_relaxed(&cell->version);
    store_relaxed(&cell->version, version + 1);
    store_release(&cell->tag, x->tag);
    store_release(&cell->place, x->place);
    store_release(&cell->operation, (uint32_t)note->same[0]); /* which operation, by contract */
    store_release(&cell->finished, 0);
    store_relaxed(&cell->bell, BELL_QUIET);
    store_relaxed(&cell->wait.heartbeat_ns, 0);
    store_relaxed(&cell->wait.phase, 0);
    store_relaxed(&cell->sent_everyone, 0);
    for (int r = 0; r < g->num_ranks; r++) {
        shared_lane *lane = &cell->lanes[r];
        store_relaxed(&lane->sent, 0);
        store_relaxed(&lane->dropped, 0);
        store_relaxed(&lane->dropped_everyone, 0);
    }
    cell->note = *note;
    store_ordered(&cell->version, version + 2);
}

void shared_announce(epic_group *g, int index, uint64_t tag, uint64_t place,
                     const epic_note *note)
{
    shared_exchange *x = &g->exchanges[index];
    shared_head *head = head_of(g, g->rank);
    x->tag = tag;
    x->place = place;
    x->out_everyone = (lane_end){0};
    x->slowest = g->rank;
    memset(x->links, 0, (size_t)g->num_ranks * sizeof *x->links);
    raise_used_cells(head, (uint32_t)index + 1);
    write_cell(g, x, note);
    store_release(&head->last_cell, (uint32_t)index + 1);
    for (int r = 0; r < g->num_ranks; r++)
        if (r != g->rank && shared_match(g, x, r)) shared_ring(g, x->links[r].cell);
}

/* Other exchanges' cells may be rewritten while we look: what we read counts only if the
 * version was the same before and after.  The cell of our own exchange stays. */
static bool holds(shared_cell *cell, uint64_t tag, uint64_t place)
{
    const uint64_t version = load_ordered(&cell->version);
    if (version == 0 || version % 2) return false;
    const bool same = load_acquire(&cell->tag) == tag && load_acquire(&cell->place) == place;
    return same && load_relaxed(&cell->version) == version;
}

shared_cell *shared_find(const epic_group *g, int peer, uint64_t tag, uint64_t place, int first,
                         int *index)
{
    const int used = (int)load_ordered(&head_of(g, peer)->used_cells);
    const int count = used < g->layout.num_cells ? used : g->layout.num_cells;
    for (int i = 0; i < count; i++) {
        *index = (first + i) % count;
        shared_cell *cell = cell_of(g, peer, *index);
        if (holds(cell, tag, place)) return cell;
    }
    return NULL;
}

bool shared_match(epic_group *g, shared_exchange *x, int peer)
{
    shared_link *link = &x->links[peer];
    if (!link->cell)
        link->cell = shared_find(g, peer, x->tag, x->place, x->index, &link->index);
    return link->cell != NULL;
}

const epic_note *shared_note(epic_group *g, int index, int peer)
{
    shared_exchange *x = &g->exchanges[index];
    if (peer == g->rank) return &x->cell->note;
    return shared_match(g, x, peer) ? &x->links[peer].cell->note : NULL;
}

void shared_finish(epic_group *g, int index)
{
    shared_exchange *x = &g->exchanges[index];
    store_release(&x->cell->finished, 1);
    for (int r = 0; r < g->num_ranks; r++) {
        shared_cell *theirs = x->links[r].cell;
        if (!theirs) continue; /* ourselves, or the group is broken */
        store_ordered(&theirs->lanes[g->rank].done, load_relaxed(&theirs->version));
        shared_ring_door(g, r);
    }
    store_ordered(&x->claimed, false);
    shared_ring_door(g, g->rank);
}
