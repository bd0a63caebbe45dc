/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes: rows flow through bounded rings.
 *
 * The writer stores `sent` after the bytes of the entries, the reader loads it before them; the
 * reader stores `dropped` after its last look at an entry, the writer loads it before it writes
 * there again. */
#include "backend/shared/shared.h"
#include "rules/invariant.h"

int64_t shared_lane_bytes(const epic_group *g, bool everyone)
{
    return everyone ? g->layout.everyone_bytes : g->layout.private_bytes;
}

static void next_flow(lane_end *end, int64_t entries, char *ring)
{
    end->base = end->next;
    end->next += entries;
    end->ring = ring;
}

static void shape_everyone(epic_group *g, shared_exchange *x, const epic_flow *flow)
{
    int64_t sends = 0;
    for (int r = 0; r < g->num_ranks; r++) {
        if (r == g->rank) continue;
        shared_link *link = &x->links[r];
        sends = flow->sends[r]; /* all equal */
        next_flow(&link->in_everyone, flow->receives[r], everyone_lane(g, r, link->index));
    }
    next_flow(&x->out_everyone, sends, everyone_lane(g, g->rank, x->index));
}

static void shape_private(epic_group *g, shared_exchange *x, const epic_flow *flow)
{
    for (int r = 0; r < g->num_ranks; r++) {
        if (r == g->rank) continue;
        shared_link *link = &x->links[r];
        next_flow(&link->in, flow->receives[r], private_lane(g, r, link->index, g->rank));
        next_flow(&link->out, flow->sends[r], private_lane(g, g->rank, x->index, r));
        link->sent = 0;
    }
}

void shared_shape(epic_group *g, int index, const epic_flow *flow)
{
    shared_exchange *x = &g->exchanges[index];
    x->everyone = flow->everyone;
    x->entry_bytes = flow->entry_bytes;
    x->stride = flow->entry_bytes > 0 ? (flow->entry_bytes + 63) / 64 * 64 : 64;
    x->depth = shared_lane_bytes(g, flow->everyone) / x->stride;
    x->sent_everyone = 0;
    if (flow->everyone)
        shape_everyone(g, x, flow);
    else
        shape_private(g, x, flow);
}

/* The first entry of a flow waits until the flow before has left the ring: its entries may have
 * had another size. */
static bool has_room(const shared_exchange *x, const lane_end *end, int64_t index)
{
    return end->known >= end->base && end->base + index - end->known < x->depth;
}

/* How far the slowest peer is.  As long as one peer is known to keep the lane full, the others
 * need not be asked. */
static int64_t least_dropped(epic_group *g, shared_exchange *x, int64_t index)
{
    lane_end slow = x->out_everyone;
    if (x->slowest != g->rank) {
        slow.known = load_ordered(&x->cell->lanes[x->slowest].dropped_everyone);
        if (!has_room(x, &slow, index)) return slow.known;
    }
    int64_t least = INT64_MAX;
    for (int r = 0; r < g->num_ranks; r++) {
        if (r == g->rank) continue;
        const int64_t dropped = load_ordered(&x->cell->lanes[r].dropped_everyone);
        if (dropped >= least) continue;
        least = dropped;
        x->slowest = r;
    }
    return least;
}

void *shared_room(epic_group *g, int index, int to, int64_t entry)
{
    shared_exchange *x = &g->exchanges[index];
    lane_end *end = to == EVERYONE ? &x->out_everyone : &x->links[to].out;
    if (!has_room(x, end, entry)) {
        end->known = to == EVERYONE ? least_dropped(g, x, entry)
                                    : load_ordered(&x->cell->lanes[to].dropped);
        if (!has_room(x, end, entry)) return NULL;
    }
    return end->ring + entry % x->depth * x->stride;
}

static void count_bytes(epic_group *g, const shared_exchange *x, int64_t *sent, int64_t upto)
{
    add_relaxed(&g->bytes_sent, (uint64_t)((upto - *sent) * x->entry_bytes));
    *sent = upto;
}

static void send_everyone(epic_group *g, shared_exchange *x, int64_t upto)
{
    if (upto <= x->sent_everyone) return;
    INVARIANT(x->out_everyone.base + upto <= x->out_everyone.known + x->depth);
    INVARIANT(x->out_everyone.base + upto <= x->out_everyone.next);
    count_bytes(g, x, &x->sent_everyone, upto);
    store_ordered(&x->cell->sent_everyone, x->out_everyone.base + upto);
    for (int r = 0; r < g->num_ranks; r++)
        if (r != g->rank) shared_ring(g, x->links[r].cell);
}

void shared_send(epic_group *g, int index, int to, int64_t upto)
{
    shared_exchange *x = &g->exchanges[index];
    if (to == EVERYONE) {
        send_everyone(g, x, upto);
        return;
    }
    shared_link *link = &x->links[to];
    if (upto <= link->sent) return;
    INVARIANT(link->out.base + upto <= link->out.known + x->depth);
    INVARIANT(link->out.base + upto <= link->out.next);
    count_bytes(g, x, &link->sent, upto);
    store_ordered(&x->cell->lanes[to].sent, link->out.base + upto);
    shared_ring(g, link->cell);
}

const void *shared_entry(epic_group *g, int index, int from, int64_t entry)
{
    shared_exchange *x = &g->exchanges[index];
    shared_link *link = &x->links[from];
    lane_end *end = x->everyone ? &link->in_everyone : &link->in;
    if (end->base + entry >= end->known) {
        end->known = x->everyone ? load_ordered(&link->cell->sent_everyone)
                                 : load_ordered(&link->cell->lanes[g->rank].sent);
        if (end->base + entry >= end->known) return NULL;
    }
    return end->ring + entry % x->depth * x->stride;
}

void shared_drop(epic_group *g, int index, int from, int64_t upto)
{
    shared_exchange *x = &g->exchanges[index];
    shared_link *link = &x->links[from];
    shared_lane *lane = &link->cell->lanes[g->rank];
    const lane_end *end = x->everyone ? &link->in_everyone : &link->in;
    INVARIANT(end->base + upto <= end->next); /* also past what has come, which nobody wants */
    if (x->everyone)
        store_ordered(&lane->dropped_everyone, end->base + upto);
    else
        store_ordered(&lane->dropped, end->base + upto);
    shared_ring(g, link->cell);
}
