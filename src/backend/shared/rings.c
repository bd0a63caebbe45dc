/* SPDX-License-Identifier: Apache-2.0 */
/* Rings in the segment (shared memory). Through a ring, a rank (the writer) sends rows to one
 * peer or to all peers (the readers). shared.h explains broadcast rings and peer rings.
 *
 * Memory order: the writer stores `sent` after the bytes of the entries, and the reader loads
 * `sent` before it reads them. The reader stores `dropped` after it has read an entry, and the
 * writer loads `dropped` before it overwrites the entry. Both counters are sequentially
 * consistent, because the sleep and wake protocol of wait.c needs this. */
#include "backend/shared/shared.h"
#include "rules/invariant.h"

int64_t shared_ring_bytes(const epic_group *g, bool everyone)
{
    return everyone ? g->layout.broadcast_ring_bytes : g->layout.peer_ring_bytes;
}

/* Begins the next flow (a sequence of `entries` entries) in a ring that this rank writes or
 * reads. */
static void next_flow(ring_end *end, int64_t entries, char *ring)
{
    end->base = end->next;
    end->next += entries;
    end->ring = ring;
}

/* Begins a flow through the broadcast rings, from which all peers read the same entries. */
static void shape_broadcast(epic_group *g, shared_exchange *x, const epic_flow *flow)
{
    int64_t sends = 0;
    for (int r = 0; r < g->num_ranks; r++) {
        if (r == g->rank) continue;
        peer_link *link = &x->links[r];
        sends = flow->sends[r]; /* all peers receive the same number of entries */
        next_flow(&link->broadcast_in, flow->receives[r],
                  shared_broadcast_ring(g, r, link->index));
    }
    next_flow(&x->broadcast_out, sends, shared_broadcast_ring(g, g->rank, x->index));
}

static void shape_peer_rings(epic_group *g, shared_exchange *x, const epic_flow *flow)
{
    for (int r = 0; r < g->num_ranks; r++) {
        if (r == g->rank) continue;
        peer_link *link = &x->links[r];
        next_flow(&link->in, flow->receives[r], shared_peer_ring(g, r, link->index, g->rank));
        next_flow(&link->out, flow->sends[r], shared_peer_ring(g, g->rank, x->index, r));
        link->sent = 0;
    }
}

/* Implements epic_transport.shape. In each flow, entry 0 is at the beginning of the ring's
 * memory, so entry i is at (i % depth) * stride. */
void shared_shape(epic_group *g, int index, const epic_flow *flow)
{
    shared_exchange *x = &g->exchanges[index];
    x->everyone = flow->everyone;
    x->entry_bytes = flow->entry_bytes;
    x->stride = flow->entry_bytes > 0 ? (flow->entry_bytes + 63) / 64 * 64 : 64;
    x->depth = shared_ring_bytes(g, flow->everyone) / x->stride;
    x->broadcast_sent = 0;
    if (flow->everyone)
        shape_broadcast(g, x, flow);
    else
        shape_peer_rings(g, x, flow);
}

/* Returns whether the ring has room for entry `index` of this flow. Assumes that the reader has
 * dropped end->seen_count entries. Flows may have entries of different sizes, so the first
 * entry of a flow waits until the reader has dropped all entries of the previous flow. */
static bool has_room(const shared_exchange *x, const ring_end *end, int64_t index)
{
    return end->seen_count >= end->base && end->base + index - end->seen_count < x->depth;
}

/* Returns the number of entries of the broadcast ring that all peers have dropped: the minimum
 * of their counters. First loads the counter that was the minimum last time. If this counter
 * leaves no room for entry `index`, returns it and does not load the other counters. */
static int64_t least_dropped(epic_group *g, shared_exchange *x, int64_t index)
{
    ring_end slow = x->broadcast_out;
    if (x->slowest_peer != g->rank) {
        slow.seen_count = load_ordered(&x->slot->peers[x->slowest_peer].broadcast_dropped);
        if (!has_room(x, &slow, index)) return slow.seen_count;
    }
    int64_t least = INT64_MAX;
    for (int r = 0; r < g->num_ranks; r++) {
        if (r == g->rank) continue;
        const int64_t dropped = load_ordered(&x->slot->peers[r].broadcast_dropped);
        if (dropped >= least) continue;
        least = dropped;
        x->slowest_peer = r;
    }
    return least;
}

/* Implements epic_transport.room. A load of a reader's counter may fetch a cache line from
 * another core, so this function loads the counters only if their last known values leave no
 * room. */
void *shared_room(epic_group *g, int index, int to, int64_t entry)
{
    shared_exchange *x = &g->exchanges[index];
    ring_end *end = to == EVERYONE ? &x->broadcast_out : &x->links[to].out;
    if (!has_room(x, end, entry)) {
        end->seen_count = to == EVERYONE ? least_dropped(g, x, entry)
                                         : load_ordered(&x->slot->peers[to].dropped);
        if (!has_room(x, end, entry)) return NULL;
    }
    return end->ring + entry % x->depth * x->stride;
}

static void count_bytes(epic_group *g, const shared_exchange *x, int64_t *sent, int64_t upto)
{
    add_relaxed(&g->bytes_sent, (uint64_t)((upto - *sent) * x->entry_bytes));
    *sent = upto;
}

/* Publishes the entries of the broadcast ring below `upto` and wakes all peers. Skips vacant
 * seats, whose links have no slot. */
static void send_broadcast(epic_group *g, shared_exchange *x, int64_t upto)
{
    if (upto <= x->broadcast_sent) return;
    /* seen_count is INT64_MAX if all other ranks have left the group */
    INVARIANT(x->broadcast_out.base + upto - x->depth <= x->broadcast_out.seen_count);
    INVARIANT(x->broadcast_out.base + upto <= x->broadcast_out.next);
    count_bytes(g, x, &x->broadcast_sent, upto);
    store_ordered(&x->slot->broadcast_sent, x->broadcast_out.base + upto);
    for (int r = 0; r < g->num_ranks; r++)
        if (r != g->rank && x->links[r].slot) shared_wake_slot(g, x->links[r].slot);
}

/* Implements epic_transport.send: stores the number of sent entries, then wakes the readers. */
void shared_send(epic_group *g, int index, int to, int64_t upto)
{
    shared_exchange *x = &g->exchanges[index];
    if (to == EVERYONE) {
        send_broadcast(g, x, upto);
        return;
    }
    peer_link *link = &x->links[to];
    if (upto <= link->sent) return;
    INVARIANT(link->out.base + upto - x->depth <= link->out.seen_count);
    INVARIANT(link->out.base + upto <= link->out.next);
    count_bytes(g, x, &link->sent, upto);
    store_ordered(&x->slot->peers[to].sent, link->out.base + upto);
    shared_wake_slot(g, link->slot);
}

/* Implements epic_transport.entry. A load of the peer's counter may fetch a cache line from
 * another core, so this function loads the counter only if its last known value does not
 * include the entry. */
const void *shared_entry(epic_group *g, int index, int from, int64_t entry)
{
    shared_exchange *x = &g->exchanges[index];
    peer_link *link = &x->links[from];
    ring_end *end = x->everyone ? &link->broadcast_in : &link->in;
    if (end->base + entry >= end->seen_count) {
        end->seen_count = x->everyone ? load_ordered(&link->slot->broadcast_sent)
                                      : load_ordered(&link->slot->peers[g->rank].sent);
        if (end->base + entry >= end->seen_count) return NULL;
    }
    return end->ring + entry % x->depth * x->stride;
}

/* Implements epic_transport.drop: stores the new number of entries that this rank no longer
 * needs, then wakes the peer, which may wait for space. */
void shared_drop(epic_group *g, int index, int from, int64_t upto)
{
    shared_exchange *x = &g->exchanges[index];
    peer_link *link = &x->links[from];
    shared_peer_counters *counters = &link->slot->peers[g->rank];
    const ring_end *end = x->everyone ? &link->broadcast_in : &link->in;
    /* `upto` is not compared with `sent`, because a reader may drop entries before they are
     * sent */
    INVARIANT(end->base + upto <= end->next);
    if (x->everyone)
        store_ordered(&counters->broadcast_dropped, end->base + upto);
    else
        store_ordered(&counters->dropped, end->base + upto);
    shared_wake_slot(g, link->slot);
}
