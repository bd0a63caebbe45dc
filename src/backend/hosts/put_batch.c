/* SPDX-License-Identifier: Apache-2.0 */
/* Joins pieces into puts. put_batch.h explains pieces, blocks and batches. A batch is in one of
 * three lists: the list `free`, a list `waiting` (for more pieces) or a list `ready` (to be
 * posted). Urgent batches and batches of rows have separate waiting and ready lists. Only the
 * batch that is being posted (put_batcher.current) is in no list. A *span* is a range of
 * adjacent words, and a batch is an array of spans. */
#include "backend/hosts/put_batch.h"

#include <stdlib.h>
#include <string.h>

#define MAX_OPEN 2048 /* number of batches, including the free ones */
/* A batch is stale if the batcher has received this many other pieces since the batch received
 * its last piece. Kernels post rows nearly in order. While a slow warp prepares its piece, the
 * other warps post about one piece each, which is fewer than STALE_AFTER. So a stale batch
 * probably gets no more pieces. */
#define STALE_AFTER 512
#define MAX_SPANS 256

/* A range of adjacent words within a block, from one or more pieces. */
typedef struct span {
    uint32_t first, words;
} span;

/* The pieces of one block for one host that are not posted yet. choose_batch() sorts the spans
 * before they are posted. */
typedef struct put_batch {
    int host;
    uint32_t block;
    uint32_t words;
    int num_spans;
    uint64_t added; /* value of put_batcher.added when the batch got its last piece */
    int next;       /* index of the next batch in its list; -1: last */
    int before;     /* index of the previous batch in its list; -1: first */
    span spans[MAX_SPANS];
} put_batch;

typedef struct list { /* a linked list of batches, the oldest first */
    int first, last;
} list;

struct put_batcher {
    uint32_t block_words;
    uint32_t blocks_per_heap;
    uint32_t num_urgent_blocks; /* blocks with an index below this are urgent */
    uint64_t added;
    int num_free, current; /* current: the batch that is being posted, or -1 */
    int next_span;         /* index of the next span of `current` to post */
    list free;
    /* lists of batches; index 0: batches of rows, 1: urgent batches */
    list waiting[2], ready[2];
    /* [num_hosts, blocks_per_heap]: index of the block's waiting batch plus one; 0: the block
     * has no waiting batch */
    uint16_t *open_of;
    put_batch open[MAX_OPEN];
};

static void list_append(put_batcher *all, list *to, int i)
{
    put_batch *p = &all->open[i];
    p->next = -1;
    p->before = to->last;
    if (to->last >= 0)
        all->open[to->last].next = i;
    else
        to->first = i;
    to->last = i;
}

static void list_prepend(put_batcher *all, list *to, int i)
{
    put_batch *p = &all->open[i];
    p->next = to->first;
    p->before = -1;
    if (to->first >= 0)
        all->open[to->first].before = i;
    else
        to->last = i;
    to->first = i;
}

static void list_remove(put_batcher *all, list *from, int i)
{
    const put_batch *p = &all->open[i];
    if (p->before >= 0)
        all->open[p->before].next = p->next;
    else
        from->first = p->next;
    if (p->next >= 0)
        all->open[p->next].before = p->before;
    else
        from->last = p->before;
}

put_batcher *put_batcher_new(int num_hosts, uint64_t heap_words, uint64_t urgent_words,
                             uint32_t batch_words)
{
    put_batcher *all = calloc(1, sizeof *all);
    if (!all) return NULL;
    all->block_words = batch_words;
    all->blocks_per_heap = (uint32_t)(heap_words / batch_words + 1);
    all->num_urgent_blocks = (uint32_t)((urgent_words + batch_words - 1) / batch_words);
    all->free = (list){-1, -1};
    for (int i = 0; i < 2; i++) all->waiting[i] = all->ready[i] = (list){-1, -1};
    all->current = -1;
    all->num_free = MAX_OPEN;
    for (int i = 0; i < MAX_OPEN; i++) list_append(all, &all->free, i);
    all->open_of = calloc((size_t)num_hosts * all->blocks_per_heap, sizeof *all->open_of);
    if (all->open_of) return all;
    free(all);
    return NULL;
}

void put_batcher_free(put_batcher *all)
{
    if (all) free(all->open_of);
    free(all);
}

/* A piece needs a batch for each block that it touches: the blocks that it fills completely,
 * and at most one partly filled block at each of its two ends. */
bool put_batcher_has_room(const put_batcher *all, uint32_t words)
{
    return all->num_free >= (int)(words / all->block_words) + 2;
}

static uint16_t *open_batch_of(put_batcher *all, int host, uint32_t block)
{
    return &all->open_of[(size_t)host * all->blocks_per_heap + block];
}

static bool is_urgent(const put_batcher *all, uint32_t block)
{
    return block < all->num_urgent_blocks;
}

bool put_batcher_is_urgent(const put_batcher *all, uint64_t word)
{
    return is_urgent(all, (uint32_t)(word / all->block_words));
}

bool put_batcher_is_empty(const put_batcher *all)
{
    return all->num_free == MAX_OPEN;
}

/* Removes a batch from the free list, prepares it for a block and a host, appends it to the
 * waiting list, and returns its index. Chooses the batch that was freed last, because its
 * memory is probably still in the cache. */
static int open_batch(put_batcher *all, int host, uint32_t block)
{
    const int i = all->free.last;
    list_remove(all, &all->free, i);
    all->num_free--;
    all->open[i].host = host;
    all->open[i].block = block;
    all->open[i].words = 0;
    all->open[i].num_spans = 0;
    list_append(all, &all->waiting[is_urgent(all, block)], i);
    *open_batch_of(all, host, block) = (uint16_t)(i + 1);
    return i;
}

/* Removes a batch from its waiting list, so that later pieces of the block go to a new
 * batch. */
static void stop_waiting(put_batcher *all, int i)
{
    const put_batch *p = &all->open[i];
    list_remove(all, &all->waiting[is_urgent(all, p->block)], i);
    *open_batch_of(all, p->host, p->block) = 0;
}

static int compare_spans(const void *a, const void *b)
{
    return ((const span *)a)->first < ((const span *)b)->first ? -1 : 1;
}

static void join_spans(put_batch *p)
{
    int last = 0;
    if (p->num_spans > 1)
        qsort(p->spans, (size_t)p->num_spans, sizeof *p->spans, compare_spans);
    for (int i = 1; i < p->num_spans; i++) {
        if (p->spans[last].first + p->spans[last].words == p->spans[i].first)
            p->spans[last].words += p->spans[i].words;
        else
            p->spans[++last] = p->spans[i];
    }
    p->num_spans = last + 1;
}

/* Adds a range of words to a batch. Extends the last span if the range follows it. */
static void add_span(put_batch *p, uint32_t first, uint32_t words)
{
    span *last = p->num_spans ? &p->spans[p->num_spans - 1] : NULL;
    p->words += words;
    if (last && last->first + last->words == first)
        last->words += words;
    else
        p->spans[p->num_spans++] = (span){first, words};
}

/* Moves the oldest waiting batch of rows to the ready list if it is stale. Without this, the
 * batch could wait until the end of the operation, while its receiver already waits. */
static void release_stale(put_batcher *all)
{
    const int i = all->waiting[0].first;
    if (i < 0 || all->added - all->open[i].added < STALE_AFTER) return;
    stop_waiting(all, i);
    list_append(all, &all->ready[0], i);
}

void put_batcher_add(put_batcher *all, int host, uint64_t word, uint32_t words)
{
    all->added++;
    while (words) {
        const uint32_t block = (uint32_t)(word / all->block_words);
        const uint32_t first = (uint32_t)(word % all->block_words),
                       room = all->block_words - first;
        const uint32_t some = words < room ? words : room;
        const int there = *open_batch_of(all, host, block);
        const int i = there ? there - 1 : open_batch(all, host, block);
        put_batch *p = &all->open[i];
        add_span(p, first, some);
        p->added = all->added;
        const bool full = p->num_spans == MAX_SPANS;
        if (full) join_spans(p);
        if (p->words == all->block_words || (full && p->num_spans > MAX_SPANS / 2)) {
            stop_waiting(all, i);
            list_append(all, &all->ready[is_urgent(all, block)], i);
        }
        word += some;
        words -= some;
    }
    release_stale(all);
}

static int first_allowed(const put_batcher *all, const list *from, put_batch_kind kind,
                         put_batch_may_go *may, const void *self)
{
    int i = from->first;
    while (i >= 0 && !may(self, all->open[i].host, kind, all->open[i].num_spans))
        i = all->open[i].next;
    return i;
}

/* Chooses the next batch to post and stores its index in all->current. Prefers ready urgent
 * batches, then waiting urgent batches, then ready batches of rows, then waiting batches of
 * rows. Returns false if may() allows no batch. */
static bool choose_batch(put_batcher *all, put_batch_may_go *may, const void *self)
{
    int i = -1;
    for (int urgent = 1; urgent >= 0 && i < 0; urgent--) {
        i = first_allowed(all, &all->ready[urgent], urgent ? BATCH_URGENT : BATCH_COMPLETE, may,
                          self);
        if (i >= 0) {
            list_remove(all, &all->ready[urgent], i);
            break;
        }
        i = first_allowed(all, &all->waiting[urgent], urgent ? BATCH_URGENT : BATCH_PARTIAL,
                          may, self);
        if (i >= 0) stop_waiting(all, i);
    }
    if (i < 0) return false;
    put_batch *p = &all->open[i];
    /* the batch has all words of its block: send them as one span */
    if (p->words == all->block_words) {
        p->num_spans = 1;
        p->spans[0] = (span){0, p->words};
    }
    join_spans(p);
    all->current = i;
    all->next_span = 0;
    return true;
}

bool put_batcher_next(put_batcher *all, put_batch_may_go *may, const void *self, put_range *out)
{
    if (all->current < 0 && !choose_batch(all, may, self)) return false;
    const put_batch *p = &all->open[all->current];
    *out = (put_range){.host = p->host,
                       .word = (uint64_t)p->block * all->block_words +
                               p->spans[all->next_span].first,
                       .words = p->spans[all->next_span].words};
    return true;
}

void put_batcher_mark_posted(put_batcher *all)
{
    if (++all->next_span < all->open[all->current].num_spans) return;
    list_append(all, &all->free, all->current);
    all->num_free++;
    all->current = -1;
}

void put_batcher_put_back(put_batcher *all)
{
    put_batch *p = &all->open[all->current];
    for (int i = 0; i < all->next_span; i++) p->words -= p->spans[i].words;
    p->num_spans -= all->next_span;
    memmove(p->spans, p->spans + all->next_span, (size_t)p->num_spans * sizeof *p->spans);
    list_prepend(all, &all->ready[is_urgent(all, p->block)], all->current);
    all->current = -1;
}
