/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/hosts/parcels.h"

#include <stdlib.h>

#define OPEN 256  /* parcels of which something is there */
#define SPARE 48  /* of them, for one piece: the counts of 8240 experts lie in 33 of 2 KB */
#define SPANS 128 /* of one; what has more goes as it is */

typedef struct span {
    uint32_t first, words;
} span;

typedef struct parcel {
    int host;
    uint32_t number; /* of those of a heap */
    uint32_t words;  /* that are there */
    int count;
    int next; /* of the list that it is in: free ones, waiting ones or ready ones; -1: none */
    int before;
    span spans[SPANS];
} parcel;

typedef struct list { /* oldest first */
    int first, last;
} list;

struct parcels {
    uint32_t words;      /* of a parcel */
    uint32_t per_host;   /* parcels of a heap */
    int num_free, now;   /* the parcel that is being given; -1: none */
    int at, spans_ahead; /* its spans that have been given, and are about to be */
    list free, waiting, ready;
    uint16_t *place_of; /* [num_hosts][per_host]: of a waiting one, from 1 */
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

parcels *parcels_new(int num_hosts, uint64_t heap_words, uint32_t parcel_words)
{
    parcels *all = calloc(1, sizeof *all);
    if (!all) return NULL;
    all->words = parcel_words;
    all->per_host = (uint32_t)(heap_words / parcel_words + 1);
    all->free = all->waiting = all->ready = (list){-1, -1};
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

bool parcels_have_room(const parcels *all)
{
    return all->num_free >= SPARE;
}

static uint16_t *place_of(parcels *all, int host, uint32_t number)
{
    return &all->place_of[(size_t)host * all->per_host + number];
}

static int open_one(parcels *all, int host, uint32_t number)
{
    const int i = all->free.first;
    detach(all, &all->free, i);
    all->num_free--;
    all->open[i].host = host;
    all->open[i].number = number;
    all->open[i].words = 0;
    all->open[i].count = 0;
    append(all, &all->waiting, i);
    *place_of(all, host, number) = (uint16_t)(i + 1);
    return i;
}

/* It waits no more: pieces that come later open another. */
static void take_out(parcels *all, int i)
{
    detach(all, &all->waiting, i);
    *place_of(all, all->open[i].host, all->open[i].number) = 0;
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

void parcels_add(parcels *all, int host, uint64_t word, uint32_t words)
{
    while (words) {
        const uint32_t number = (uint32_t)(word / all->words);
        const uint32_t first = (uint32_t)(word % all->words), room = all->words - first;
        const uint32_t some = words < room ? words : room;
        const int there = *place_of(all, host, number);
        const int i = there ? there - 1 : open_one(all, host, number);
        parcel *p = &all->open[i];
        add_span(p, first, some);
        if (p->words == all->words || p->count == SPANS) {
            take_out(all, i);
            append(all, &all->ready, i);
        }
        word += some;
        words -= some;
    }
}

/* ------------------------------------------------------------------------------- giving ---- */

static int by_first(const void *a, const void *b)
{
    return ((const span *)a)->first < ((const span *)b)->first ? -1 : 1;
}

/* The parcel to give next is `now`. */
static bool choose(parcels *all, bool (*hungry)(const void *self, int host), const void *self)
{
    int i = all->ready.first;
    if (i >= 0) {
        detach(all, &all->ready, i);
    } else {
        i = all->waiting.first;
        while (i >= 0 && !hungry(self, all->open[i].host)) i = all->open[i].next;
        if (i < 0) return false;
        take_out(all, i);
    }
    parcel *p = &all->open[i];
    if (p->words == all->words) { /* all of it, in whatever order it came */
        p->count = 1;
        p->spans[0] = (span){0, p->words};
    }
    if (p->count > 1) qsort(p->spans, (size_t)p->count, sizeof *p->spans, by_first);
    all->now = i;
    all->at = 0;
    return true;
}

bool parcels_next(parcels *all, bool (*hungry)(const void *self, int host), const void *self,
                  run *out)
{
    if (all->now < 0 && !choose(all, hungry, self)) return false;
    const parcel *p = &all->open[all->now];
    const uint32_t first = p->spans[all->at].first;
    uint32_t end = first + p->spans[all->at].words;
    int i = all->at + 1;
    for (; i < p->count && p->spans[i].first == end; i++) end += p->spans[i].words;
    all->spans_ahead = i;
    *out = (run){.host = p->host,
                 .word = (uint64_t)p->number * all->words + first,
                 .words = end - first};
    return true;
}

void parcels_pass(parcels *all)
{
    all->at = all->spans_ahead;
    if (all->at < all->open[all->now].count) return;
    append(all, &all->free, all->now);
    all->num_free++;
    all->now = -1;
}
