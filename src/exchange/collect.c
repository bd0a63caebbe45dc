/* SPDX-License-Identifier: Apache-2.0 */
/* The collect flow. Each item, usually a token, has one home rank. Other ranks compute a row
 * for the item and send it to the home rank. The home rank handles the item when the rows of
 * all contributing ranks have arrived.
 *
 * Every rank sends its rows to a home in ascending order of items, through its ring (ring
 * buffer) to that home, and the home handles its items in this order. So the row that a home
 * needs next is always the oldest entry of the ring. A ring can never be full of rows that the
 * home cannot use yet, so the flow makes progress with rings of any size. */
#include <string.h>

#include "base/error.h"
#include "exchange/exchange.h"

/* maximum number of bytes to send to one home rank before the flow sends to the next home
 * rank */
#define BATCH_BYTES (256 * 1024)

typedef struct collect_state {
    exchange *x;
    const collect *c;
    int64_t item;  /* index of this rank's item to handle next */
    int32_t piece; /* index of the piece (a part of a row) of `item` to handle next */
    int64_t batch; /* number of entries that fit in BATCH_BYTES */
} collect_state;

/* Sends up to one batch of entries to one home rank. Returns true if it sent any entry. */
static bool collect_send_to(collect_state *g, int home)
{
    exchange *x = g->x;
    const collect *c = g->c;
    const int64_t first = x->num_sent[home];
    int64_t next = first, bytes = 0;
    while (next < x->sends[home] && next - first < g->batch) {
        while (!c->is_sent(c->self, home, x->next_item_to[home])) x->next_item_to[home]++;
        void *entry = x->transport->room(x->group, x->op_slot, home, next);
        if (!entry) break;
        x->left_out_bytes = 0;
        c->fill_entry(c->self, home, x->next_item_to[home], x->next_piece_to[home], entry);
        const int64_t trailer = x->next_piece_to[home] == 0 ? c->trailer : 0;
        bytes += piece_size(&c->split, x->next_piece_to[home]) + trailer - x->left_out_bytes;
        next++;
        if (++x->next_piece_to[home] == c->split.num_pieces) {
            x->next_piece_to[home] = 0;
            x->next_item_to[home]++;
        }
    }
    if (next == first) return false;
    if (c->flush_stores) c->flush_stores();
    exchange_count_bytes(x, bytes);
    x->num_sent[home] = next;
    x->transport->send(x->group, x->op_slot, home, next);
    return true;
}

static bool collect_send(collect_state *g)
{
    bool moved = false;
    for (int i = 1; i < g->x->num_ranks; i++)
        moved |= collect_send_to(g, (g->x->rank + i) % g->x->num_ranks);
    return moved;
}

/* Sets x->rows[r] to the entry of each contributing rank r for the next piece. Returns true if
 * all these entries have arrived. If not, adds to x->waits_for each rank whose entry is
 * missing. */
static bool collect_find_rows(collect_state *g)
{
    exchange *x = g->x;
    bool all = true;
    for (int r = 0; r < x->num_ranks; r++) {
        x->rows[r] = NULL;
        if (r == x->rank || !g->c->is_received(g->c->self, r, g->item)) continue;
        x->rows[r] = x->transport->entry(x->group, x->op_slot, r, x->num_read[r]);
        if (x->rows[r]) continue;
        exchange_mark_awaited(x, r);
        all = false;
    }
    return all;
}

/* Releases all entries that were read, so that their senders can reuse the memory. dropped[r]
 * is the number of entries from rank r that were released so far. */
static void collect_release_rows(collect_state *g, int64_t *dropped)
{
    exchange *x = g->x;
    for (int r = 0; r < x->num_ranks; r++) {
        if (r == x->rank || x->num_read[r] == dropped[r]) continue;
        dropped[r] = x->num_read[r];
        x->transport->drop(x->group, x->op_slot, r, dropped[r]);
    }
}

/* Handles this rank's items in ascending order, until a batch is done or a row of the next item
 * has not arrived. Returns true if it handled any piece. */
static bool collect_receive(collect_state *g)
{
    exchange *x = g->x;
    const collect *c = g->c;
    int64_t count = 0;
    for (; g->item < c->items[x->rank] && count < g->batch && collect_find_rows(g); count++) {
        for (int r = 0; r < x->num_ranks; r++) x->num_read[r] += x->rows[r] != NULL;
        c->read_rows(c->self, g->item, g->piece, x->rows);
        if (++g->piece < c->split.num_pieces) continue;
        g->piece = 0;
        g->item++;
    }
    if (count) collect_release_rows(g, x->next_item_from);
    return count > 0;
}

/* Returns true if this rank still has entries to send or items to handle. Sets x->waits_for to
 * the ranks to which this rank still must send entries. */
static bool collect_is_unfinished(collect_state *g)
{
    exchange *x = g->x;
    bool open = g->item < g->c->items[x->rank];
    memset(x->waits_for, 0, sizeof x->waits_for);
    for (int r = 0; r < x->num_ranks; r++) {
        if (r == x->rank || x->num_sent[r] == x->sends[r]) continue;
        exchange_mark_awaited(x, r);
        open = true;
    }
    return open;
}

/* Computes the number of entries to and from each rank, and begins the flow. */
static void collect_begin_flow(collect_state *g)
{
    exchange *x = g->x;
    const collect *c = g->c;
    for (int r = 0; r < x->num_ranks; r++) {
        int64_t sends = 0, receives = 0;
        if (r != x->rank) {
            for (int64_t i = 0; i < c->items[r]; i++) sends += c->is_sent(c->self, r, i);
            for (int64_t i = 0; i < c->items[x->rank]; i++)
                receives += c->is_received(c->self, r, i);
        }
        x->sends[r] = sends * c->split.num_pieces;
        x->receives[r] = receives * c->split.num_pieces;
        x->num_sent[r] = x->num_read[r] = x->next_item_to[r] = x->next_item_from[r] = 0;
        x->next_piece_to[r] = 0;
    }
    const epic_flow flow = {.entry_bytes = c->split.piece_bytes + c->trailer,
                            .sends = x->sends,
                            .receives = x->receives};
    if (x->num_ranks > 1) x->transport->shape(x->group, x->op_slot, &flow);
}

epic_result collect_run(exchange *x, const collect *c)
{
    collect_state g = {.x = x, .c = c};
    g.batch = BATCH_BYTES / (c->split.piece_bytes + c->trailer + 1) + 1;
    collect_begin_flow(&g);
    while (collect_is_unfinished(&g)) {
        bool moved = collect_send(&g);
        moved |= collect_receive(&g);
        if (moved)
            exchange_report_progress(x);
        else
            TRY(exchange_wait(x));
    }
    return EPIC_OK;
}
