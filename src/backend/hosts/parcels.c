/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/hosts/parcels.h"

#include <stdlib.h>
#include <string.h>

#define OPEN 2048 /* parcels of which something is there */
/* Pieces that come after the last one of a parcel, until no more of it is expected: kernels ship rows
 * about in their order, as many at once as there are warps. */
#define STALE 512
#define SPANS 256 /* of one; what has more, once joined, goes as it is */

typedef struct span {
    uint32_t first, words;
} span;

typedef struct parcel {
    int host;
    uint32_t number; /* of those of a heap */
    uint32_t words;  /* that are there */
    int count;
    uint64_t added; /* pieces of all, with its last one */
    int next; /* of the list that it is in: free ones, waiting ones or ready ones; -1: none */
    int before;
    span spans[SPANS];
} parcel;

typedef struct list { /* oldest first */
    int first, last;
} list;

struct parcels {
    uint32_t words;      /* of a parcel */
    uint32_t per_host;   /* parcels of a heap, */
    uint32_t num_urgent; /* the first of which are urgent */
    uint64_t added;      /* pieces */
    int num_free, now;   /* the parcel that is being given; -1: none */
    int at;              /* its spans that have been given */
    list free;
    list waiting[2], ready[2]; /* [1]: urgent */
    uint16_t *place_of;        /* [num_hosts][per_host]: of a waiting one, from 1 */
    parcel open[OPEN];
};

static void append(parcels *all, list *to, int i)
{
    parcel *p = &all->open[i];
    p->next = -1;
    p->before = to->last;
    if (to->last >= 0)
        all->open[to->last].next = i;
    else
        to->first = i;
    to->last = i;
}

static void prepend(parcels *all, list *to, int i)
{
    parcel *p = &all->open[i];
    p->next = to->first;
    p->before = -1;
    if (to->first >= 0)
        all->open[to->first].before = i;
    else
        to->last = i;
    to->first = i;
}

static void detach(parcels *all, list *from, int i)
{
    const parcel *p = &all->open[i];
    if (p->before >= 0)
        all->open[p->before].next = p->next;
    else
        from->first = p->next;
    if (p->next >= 0)
        all->open[p->next].before = p->before;
    else
        from->last = p->before;
}

parcels *parcels_new(int num_hosts, uint64_t heap_words, uint64_t urgent_words,
                     uint32_t parcel_words)
{
    parcels *all = calloc(1, sizeof *all);
    if (!all) return NULL;
    all->words = parcel_words;
    all->per_host = (uint32_t)(heap_words / parcel_words + 1);
    all->num_urgent = (uint32_t)((urgent_words + parcel_words - 1) / parcel_words);
    all->free = (list){-1, -1};
    for (int i = 0; i < 2; i++) all->waiting[i] = all->ready[i] = (list){-1, -1};
    all->now = -1;
    all->num_free = OPEN;
    for (int i = 0; i < OPEN; i++) append(all, &all->free, i);
    all->place_of = calloc((size_t)num_hosts * all->per_host, sizeof *all->place_of);
    if (all->place_of) return all;
    free(all);
    return NULL;
}

void parcels_free(parcels *all)
{
    if (all) free(all->place_of);
    free(all);
}

/* The first and the last one of a piece may be shared with others. */
bool parcels_have_room(const parcels *all, uint32_t words)
{
    return all->num_free >= (int)(words / all->words) + 2;
}

static uint16_t *place_of(parcels *all, int host, uint32_t number)
{
    return &all->place_of[(size_t)host * all->per_host + number];
}

static bool is_urgent(const parcels *all, uint32_t number)
{
    return number < all->num_urgent;
}

bool parcels_is_urgent(const parcels *all, uint64_t word)
{
    return is_urgent(all, (uint32_t)(word / all->words));
}

bool parcels_are_empty(const parcels *all)
{
    return all->num_free == OPEN;
}

/* The one that was freed last, which is near. */
static int open_one(parcels *all, int host, uint32_t number)
{
    const int i = all->free.last;
    detach(all, &all->free, i);
    all->num_free--;
    all->open[i].host = host;
    all->open[i].number = number;
    all->open[i].words = 0;
    all->open[i].count = 0;
    append(all, &all->waiting[is_urgent(all, number)], i);
    *place_of(all, host, number) = (uint16_t)(i + 1);
    return i;
}

/* It waits no more: pieces that come later open another. */
static void take_out(parcels *all, int i)
{
    const parcel *p = &all->open[i];
    detach(all, &all->waiting[is_urgent(all, p->number)], i);
    *place_of(all, p->host, p->number) = 0;
}

static int by_first(const void *a, const void *b)
{
    return ((const span *)a)->first < ((const span *)b)->first ? -1 : 1;
}

/* Sorts spans, and makes one of those that touch. */
static void join_spans(parcel *p)
{
    int last = 0;
    if (p->count > 1) qsort(p->spans, (size_t)p->count, sizeof *p->spans, by_first);
    for (int i = 1; i < p->count; i++) {
        if (p->spans[last].first + p->spans[last].words == p->spans[i].first)
            p->spans[last].words += p->spans[i].words;
        else
            p->spans[++last] = p->spans[i];
    }
    p->count = last + 1;
}

static void add_span(parcel *p, uint32_t first, uint32_t words)
{
    span *last = p->count ? &p->spans[p->count - 1] : NULL;
    p->words += words;
    if (last && last->first + last->words == first)
        last->words += words;
    else
        p->spans[p->count++] = (span){first, words};
}

/* Rows that no more rows go beside must not wait for the end: who takes them takes others after. */
static void give_up_stale(parcels *all)
{
    const int i = all->waiting[0].first;
    if (i < 0 || all->added - all->open[i].added < STALE) return;
    take_out(all, i);
    append(all, &all->ready[0], i);
}

void parcels_add(parcels *all, int host, uint64_t word, uint32_t words)
{
    all->added++;
    while (words) {
        const uint32_t number = (uint32_t)(word / all->words);
        const uint32_t first = (uint32_t)(word % all->words), room = all->words - first;
        const uint32_t some = words < room ? words : room;
        const int there = *place_of(all, host, number);
        const int i = there ? there - 1 : open_one(all, host, number);
        parcel *p = &all->open[i];
        add_span(p, first, some);
        p->added = all->added;
        const bool full = p->count == SPANS;
        if (full) join_spans(p);
        if (p->words == all->words || (full && p->count > SPANS / 2)) {
            take_out(all, i);
            append(all, &all->ready[is_urgent(all, number)], i);
        }
        word += some;
        words -= some;
    }
    give_up_stale(all);
}

/* ------------------------------------------------------------------------------- giving ---- */

/* The first of a list that may go; -1: none. */
static int first_of(const parcels *all, const list *from, parcel_kind kind, parcel_may *may,
                    const void *self)
{
    int i = from->first;
    while (i >= 0 && !may(self, all->open[i].host, kind, all->open[i].count))
        i = all->open[i].next;
    return i;
}

/* The parcel to give next is `now`. */
static bool choose(parcels *all, parcel_may *may, const void *self)
{
    int i = -1;
    for (int urgent = 1; urgent >= 0 && i < 0; urgent--) {
        i = first_of(all, &all->ready[urgent], urgent ? PARCEL_URGENT : PARCEL_WHOLE, may,
                     self);
        if (i >= 0) {
            detach(all, &all->ready[urgent], i);
            break;
        }
        i = first_of(all, &all->waiting[urgent], urgent ? PARCEL_URGENT : PARCEL_PART, may,
                     self);
        if (i >= 0) take_out(all, i);
    }
    if (i < 0) return false;
    parcel *p = &all->open[i];
    if (p->words == all->words) { /* all of it, in whatever order it came */
        p->count = 1;
        p->spans[0] = (span){0, p->words};
    }
    join_spans(p);
    all->now = i;
    all->at = 0;
    return true;
}

bool parcels_next(parcels *all, parcel_may *may, const void *self, run *out)
{
    if (all->now < 0 && !choose(all, may, self)) return false;
    const parcel *p = &all->open[all->now];
    *out = (run){.host = p->host,
                 .word = (uint64_t)p->number * all->words + p->spans[all->at].first,
                 .words = p->spans[all->at].words};
    return true;
}

void parcels_pass(parcels *all)
{
    if (++all->at < all->open[all->now].count) return;
    append(all, &all->free, all->now);
    all->num_free++;
    all->now = -1;
}

void parcels_put_back(parcels *all)
{
    parcel *p = &all->open[all->now];
    for (int i = 0; i < all->at; i++) p->words -= p->spans[i].words;
    p->count -= all->at;
    memmove(p->spans, p->spans + all->at, (size_t)p->count * sizeof *p->spans);
    prepend(all, &all->ready[is_urgent(all, p->number)], all->now);
    all->now = -1;
}
