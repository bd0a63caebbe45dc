/* SPDX-License-Identifier: Apache-2.0 */
/* The scatter flow. Every rank is a source: it sends its items to all ranks that need them,
 * without waiting for other sources. If the transport has a ring to EVERYONE, the source writes
 * each item once into that ring. If not, it writes the item into the ring of each peer that
 * needs it.
 *
 * A rank repeats these steps until all entries are sent and read. It sends entries while the
 * rings have room, and reads entries that have arrived. If it could neither send nor read, it
 * handles some of its own items. If no own items are left, it waits. */
#include <string.h>

#include "base/error.h"
#include "exchange/exchange.h"

/* maximum number of bytes to send or read through one ring before the flow continues with the
 * next ring */
#define BATCH_BYTES (256 * 1024)

typedef struct scatter_state {
    exchange *x;
    const scatter *s;
    int64_t entry_bytes;
    bool shared;      /* true: use the ring to EVERYONE; false: one ring to each peer */
    int64_t own_next; /* index of this rank's item that is passed to read_own_item() next */
    int64_t batch;    /* number of entries that fit in BATCH_BYTES */
} scatter_state;

static bool is_wanted_by_any(const scatter_state *g, int64_t item)
{
    for (int r = 0; r < g->x->num_ranks; r++)
        if (r != g->x->rank && g->s->is_sent(g->s->self, r, item)) return true;
    return false;
}

/* Fills one entry with a piece of an item. Returns the number of bytes written into it. */
static int64_t scatter_fill_entry(scatter_state *g, int64_t item, int32_t piece, void *entry)
{
    g->x->left_out_bytes = 0;
    g->s->fill_entry(g->s->self, item, piece, entry);
    return piece_size(&g->s->split, piece) - g->x->left_out_bytes;
}

/* Sends up to one batch of entries through the ring to EVERYONE. Returns true if it sent any
 * entry. Every item has an entry in this ring, even if no peer needs the item, so that a piece
 * always has the index item * num_pieces + piece. */
static bool scatter_send_to_all(scatter_state *g)
{
    exchange *x = g->x;
    const int32_t pieces = g->s->split.num_pieces;
    const int64_t total = g->s->items[x->rank] * pieces, first = x->num_sent[x->rank];
    const int64_t stop = total - first > g->batch ? first + g->batch : total;
    int64_t next = first, bytes = 0;
    for (; next < stop; next++) {
        void *entry = x->transport->room(x->group, x->op_slot, EVERYONE, next);
        if (!entry) break;
        if (is_wanted_by_any(g, next / pieces))
            bytes += scatter_fill_entry(g, next / pieces, (int32_t)(next % pieces), entry);
    }
    if (next == first) return false;
    if (g->s->flush_stores) g->s->flush_stores();
    exchange_count_bytes(x, bytes);
    x->num_sent[x->rank] = next;
    x->transport->send(x->group, x->op_slot, EVERYONE, next);
    return true;
}

/* Sends up to one batch of entries to one peer. Returns true if it sent any entry. */
static bool scatter_send_to(scatter_state *g, int peer)
{
    exchange *x = g->x;
    const int64_t first = x->num_sent[peer];
    int64_t next = first, bytes = 0;
    while (next < x->sends[peer] && next - first < g->batch) {
        if (!g->s->is_sent(g->s->self, peer, x->next_item_to[peer])) {
            x->next_item_to[peer]++;
            continue;
        }
        void *entry = x->transport->room(x->group, x->op_slot, peer, next);
        if (!entry) break;
        bytes += scatter_fill_entry(g, x->next_item_to[peer], x->next_piece_to[peer], entry);
        next++;
        if (++x->next_piece_to[peer] == g->s->split.num_pieces) {
            x->next_piece_to[peer] = 0;
            x->next_item_to[peer]++;
        }
    }
    if (next == first) return false;
    if (g->s->flush_stores) g->s->flush_stores();
    exchange_count_bytes(x, bytes);
    x->num_sent[peer] = next;
    x->transport->send(x->group, x->op_slot, peer, next);
    return true;
}

static bool scatter_send(scatter_state *g)
{
    if (g->shared) return scatter_send_to_all(g);
    bool moved = false;
    for (int i = 1; i < g->x->num_ranks; i++)
        moved |= scatter_send_to(g, (g->x->rank + i) % g->x->num_ranks);
    return moved;
}

/* Reads up to one batch of entries from a peer's ring to EVERYONE, and skips items that this
 * rank does not need. Returns true if it read or skipped an entry. */
static bool scatter_receive_broadcast(scatter_state *g, int from)
{
    exchange *x = g->x;
    const int32_t pieces = g->s->split.num_pieces;
    const int64_t first = x->num_read[from], total = x->receives[from];
    int64_t next = first;
    while (next < total && next - first < g->batch) {
        if (!g->s->is_received(g->s->self, from, next / pieces)) {
            next = (next / pieces + 1) * pieces;
            continue;
        }
        const void *entry = x->transport->entry(x->group, x->op_slot, from, next);
        if (!entry) break;
        g->s->read_entry(g->s->self, from, next / pieces, (int32_t)(next % pieces), entry);
        next++;
    }
    if (next == first) return false;
    x->num_read[from] = next;
    x->transport->drop(x->group, x->op_slot, from, next);
    return true;
}

/* Reads up to one batch of entries from the ring of a peer. Returns true if it read any
 * entry. */
static bool scatter_receive_from(scatter_state *g, int from)
{
    exchange *x = g->x;
    int64_t *item = &x->next_item_from[from];
    const int32_t pieces = g->s->split.num_pieces;
    const int64_t first = x->num_read[from];
    int64_t next = first;
    while (next < x->receives[from] && next - first < g->batch) {
        while (!g->s->is_received(g->s->self, from, *item)) ++*item;
        const void *entry = x->transport->entry(x->group, x->op_slot, from, next);
        if (!entry) break;
        g->s->read_entry(g->s->self, from, *item, (int32_t)(next % pieces), entry);
        if (++next % pieces == 0) ++*item;
    }
    if (next == first) return false;
    x->num_read[from] = next;
    x->transport->drop(x->group, x->op_slot, from, next);
    return true;
}

static bool scatter_receive(scatter_state *g)
{
    exchange *x = g->x;
    bool moved = false;
    for (int i = 1; i < x->num_ranks; i++) {
        const int from = (x->rank + i) % x->num_ranks;
        moved |= g->shared ? scatter_receive_broadcast(g, from) : scatter_receive_from(g, from);
    }
    return moved;
}

/* Handles up to one batch of this rank's own items: passes the items that this rank needs to
 * read_own_item(). Returns false if no own item was left to handle. */
static bool scatter_read_own(scatter_state *g)
{
    const int64_t first = g->own_next, total = g->s->items[g->x->rank];
    const int64_t batch = g->batch / g->s->split.num_pieces + 1;
    for (; g->own_next < total && g->own_next - first < batch; g->own_next++)
        if (g->s->is_received(g->s->self, g->x->rank, g->own_next))
            g->s->read_own_item(g->s->self, g->own_next);
    return g->own_next > first;
}

/* Returns true if this rank still has entries to send, entries to read or own items to handle.
 * Sets x->waits_for to the peers to which entries must still be sent or from which entries must
 * still be read. If an entry must still be written into the ring to EVERYONE, these are all
 * peers. */
static bool scatter_is_unfinished(scatter_state *g)
{
    exchange *x = g->x;
    memset(x->waits_for, 0, sizeof x->waits_for);
    bool open = false;
    for (int r = 0; r < x->num_ranks; r++) {
        if (!exchange_is_peer(x, r)) continue;
        const bool owes = x->num_read[r] < x->receives[r];
        const bool full =
            g->shared ? x->num_sent[x->rank] < x->sends[x->rank] : x->num_sent[r] < x->sends[r];
        if (!owes && !full) continue;
        exchange_mark_awaited(x, r);
        open = true;
    }
    return open || g->own_next < g->s->items[x->rank];
}

/* Computes the number of entries to and from each rank, and resets the counters of the flow. */
static void scatter_count_entries(scatter_state *g)
{
    exchange *x = g->x;
    const int64_t pieces = g->s->split.num_pieces;
    for (int r = 0; r < x->num_ranks; r++) {
        int64_t sends = 0, receives = 0;
        if (g->shared) {
            sends = g->s->items[x->rank];
            receives = g->s->items[r];
        } else if (exchange_is_peer(x, r)) {
            for (int64_t i = 0; i < g->s->items[x->rank]; i++)
                sends += g->s->is_sent(g->s->self, r, i);
            for (int64_t i = 0; i < g->s->items[r]; i++)
                receives += g->s->is_received(g->s->self, r, i);
        }
        x->sends[r] = sends * pieces;
        x->receives[r] = receives * pieces;
        x->num_sent[r] = x->num_read[r] = x->next_item_to[r] = x->next_item_from[r] = 0;
        x->next_piece_to[r] = 0;
    }
}

static void scatter_begin_flow(scatter_state *g)
{
    exchange *x = g->x;
    scatter_count_entries(g);
    const epic_flow flow = {.entry_bytes = g->entry_bytes,
                            .everyone = g->shared,
                            .sends = x->sends,
                            .receives = x->receives};
    if (x->num_ranks > 1) x->transport->shape(x->group, x->op_slot, &flow);
}

epic_result scatter_run(exchange *x, const scatter *s)
{
    const int64_t bytes = s->split.piece_bytes > 0 ? s->split.piece_bytes : 1;
    scatter_state g = {.x = x, .s = s, .entry_bytes = bytes};
    g.shared = x->transport->shares && x->num_ranks > 1;
    g.batch = BATCH_BYTES / bytes + 1;
    scatter_begin_flow(&g);
    while (scatter_is_unfinished(&g)) {
        bool moved = x->num_ranks > 1 && scatter_send(&g);
        moved |= x->num_ranks > 1 && scatter_receive(&g);
        if (!moved) moved = scatter_read_own(&g);
        if (moved)
            exchange_report_progress(x);
        else
            TRY(exchange_wait(x));
    }
    return EPIC_OK;
}
