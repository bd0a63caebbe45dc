/* SPDX-License-Identifier: Apache-2.0 */
/* Rows from all ranks for the items of a home, which takes an item when all of its rows are
 * there.
 *
 * Every rank makes rows in ascending order of items, a lane for each home.  So the lowest item
 * that any home still waits for always finds room in the lanes of those who owe it: lanes of any
 * size make progress. */
#include <string.h>

#include "base/error.h"
#include "exchange/exchange.h"

#define BATCH_BYTES (256 * 1024)

typedef struct collecting {
    exchange *x;
    const collect *c;
    int64_t item; /* the next of ours, and its piece */
    int32_t piece;
    int64_t batch;
} collecting;

static bool produce_for(collecting *g, int home)
{
    exchange *x = g->x;
    const collect *c = g->c;
    const int64_t first = x->sent[home];
    int64_t next = first, bytes = 0;
    while (next < x->sends[home] && next - first < g->batch) {
        while (!c->gives(c->self, home, x->item_to[home])) x->item_to[home]++;
        void *entry = x->transport->room(x->group, x->cell, home, next);
        if (!entry) break;
        c->fill(c->self, home, x->item_to[home], x->piece_to[home], entry);
        const int64_t trailer = x->piece_to[home] == 0 ? c->trailer : 0;
        bytes += piece_size(&c->cut, x->piece_to[home]) + trailer;
        next++;
        if (++x->piece_to[home] == c->cut.num_pieces) {
            x->piece_to[home] = 0;
            x->item_to[home]++;
        }
    }
    if (next == first) return false;
    if (c->settle) c->settle();
    exchange_sent(x, bytes);
    x->sent[home] = next;
    x->transport->send(x->group, x->cell, home, next);
    return true;
}

static bool produce(collecting *g)
{
    bool moved = false;
    for (int i = 1; i < g->x->num_ranks; i++)
        moved |= produce_for(g, (g->x->rank + i) % g->x->num_ranks);
    return moved;
}

/* The rows of our next item, or false: not all are there.  Marks whom it waits for. */
static bool find_rows(collecting *g)
{
    exchange *x = g->x;
    bool all = true;
    for (int r = 0; r < x->num_ranks; r++) {
        x->rows[r] = NULL;
        if (r == x->rank || !g->c->awaits(g->c->self, r, g->item)) continue;
        x->rows[r] = x->transport->entry(x->group, x->cell, r, x->taken[r]);
        if (x->rows[r]) continue;
        expect(x, r);
        all = false;
    }
    return all;
}

static void give_back_rows(collecting *g, int64_t *dropped)
{
    exchange *x = g->x;
    for (int r = 0; r < x->num_ranks; r++) {
        if (r == x->rank || x->taken[r] == dropped[r]) continue;
        dropped[r] = x->taken[r];
        x->transport->drop(x->group, x->cell, r, dropped[r]);
    }
}

static bool consume(collecting *g)
{
    exchange *x = g->x;
    const collect *c = g->c;
    int64_t count = 0;
    for (; g->item < c->items[x->rank] && count < g->batch && find_rows(g); count++) {
        for (int r = 0; r < x->num_ranks; r++) x->taken[r] += x->rows[r] != NULL;
        c->take(c->self, g->item, g->piece, x->rows);
        if (++g->piece < c->cut.num_pieces) continue;
        g->piece = 0;
        g->item++;
    }
    if (count) give_back_rows(g, x->item_from);
    return count > 0;
}

static bool unfinished(collecting *g)
{
    exchange *x = g->x;
    bool open = g->item < g->c->items[x->rank];
    memset(x->waits_for, 0, sizeof x->waits_for);
    for (int r = 0; r < x->num_ranks; r++) {
        if (r == x->rank || x->sent[r] == x->sends[r]) continue;
        expect(x, r);
        open = true;
    }
    return open;
}

static void begin(collecting *g)
{
    exchange *x = g->x;
    const collect *c = g->c;
    for (int r = 0; r < x->num_ranks; r++) {
        int64_t sends = 0, receives = 0;
        if (r != x->rank) {
            for (int64_t i = 0; i < c->items[r]; i++) sends += c->gives(c->self, r, i);
            for (int64_t i = 0; i < c->items[x->rank]; i++)
                receives += c->awaits(c->self, r, i);
        }
        x->sends[r] = sends * c->cut.num_pieces;
        x->receives[r] = receives * c->cut.num_pieces;
        x->sent[r] = x->taken[r] = x->item_to[r] = x->item_from[r] = 0;
        x->piece_to[r] = 0;
    }
    const epic_flow flow = {.entry_bytes = c->cut.piece_bytes + c->trailer,
                            .sends = x->sends,
                            .receives = x->receives};
    if (x->num_ranks > 1) x->transport->shape(x->group, x->cell, &flow);
}

epic_result collect_run(exchange *x, const collect *c)
{
    collecting g = {.x = x, .c = c};
    g.batch = BATCH_BYTES / (c->cut.piece_bytes + c->trailer + 1) + 1;
    begin(&g);
    while (unfinished(&g)) {
        bool moved = produce(&g);
        moved |= consume(&g);
        if (moved)
            exchange_moved(x);
        else
            TRY(exchange_wait(x));
    }
    return EPIC_OK;
}
