/* SPDX-License-Identifier: Apache-2.0 */
/* Tests put batches: pieces of random sizes in random order, as kernels post them. Every word
 * is put exactly once, and no other word is put. A batch that is complete before the net
 * requests more is sent as one put. */
#include "backend/hosts/put_batch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"

enum { HOSTS_HERE = 3, WORDS = 40000, PARCEL = 1024, MOST = 700, PIECES = 4000 };

static unsigned char shipped[HOSTS_HERE][WORDS], given[HOSTS_HERE][WORDS];
static run_random dice;
static int percent; /* how often the net is idle, in percent */
static bool is_full;

static void fail_test(const char *what, const put_range *r)
{
    fprintf(stderr, "hosts_put_batch: %s: host %d, words %llu and %u more\n", what, r->host,
            (unsigned long long)r->word, r->words);
    exit(1);
}

static bool may_go(const void *self, int host, put_batch_kind kind, int puts)
{
    (void)self, (void)host, (void)puts;
    return kind == BATCH_COMPLETE ? !is_full : run_chance(&dice, percent);
}

static void take_puts(put_batcher *all)
{
    put_range r;
    while (put_batcher_next(all, may_go, NULL, &r)) {
        if (run_chance(&dice, 10)) { /* the net had no space */
            put_batcher_put_back(all);
            continue;
        }
        if (r.words == 0 || r.word / PARCEL != (r.word + r.words - 1) / PARCEL)
            fail_test("over the edge of a batch", &r);
        for (uint64_t i = r.word; i < r.word + r.words; i++) {
            if (!shipped[r.host][i]) fail_test("not shipped", &r);
            if (given[r.host][i]++) fail_test("given twice", &r);
        }
        put_batcher_mark_posted(all);
    }
}

/* Draws a free range of one host's words, or an empty one. */
static put_range draw_piece(void)
{
    put_range r = {.host = (int)run_below(&dice, HOSTS_HERE),
                   .word = (uint64_t)run_below(&dice, WORDS)};
    const uint32_t most = (uint32_t)run_between(&dice, 1, MOST);
    while (r.words < most && r.word + r.words < WORDS && !shipped[r.host][r.word + r.words])
        r.words++;
    return r;
}

static void test_random(void)
{
    put_batcher *all = put_batcher_new(HOSTS_HERE, WORDS, 5 * PARCEL, PARCEL);
    memset(shipped, 0, sizeof shipped);
    memset(given, 0, sizeof given);
    for (int i = 0; i < PIECES; i++) {
        const put_range r = draw_piece();
        while (!put_batcher_has_room(all, r.words)) {
            const int before = percent;
            percent = 100;
            take_puts(all);
            percent = before;
        }
        if (r.words) put_batcher_add(all, r.host, r.word, r.words);
        memset(&shipped[r.host][r.word], 1, r.words);
        take_puts(all);
    }
    percent = 100;
    take_puts(all);
    if (!put_batcher_is_empty(all)) fail_test("something is left", &(put_range){0});
    if (memcmp(shipped, given, sizeof given)) fail_test("not all was given", &(put_range){0});
    put_batcher_free(all);
}

/* The pieces of a row in any order become one put while the net is busy. */
static void test_whole(uint32_t words)
{
    put_batcher *all = put_batcher_new(1, 4 * words, 0, words);
    const uint32_t count = 16, piece = words / count;
    put_range r;
    percent = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (put_batcher_next(all, may_go, NULL, &r)) fail_test("before all is there", &r);
        put_batcher_add(all, 0, 3 * words + i * 5 % count * piece, piece);
    }
    if (!put_batcher_next(all, may_go, NULL, &r) || r.word != 3 * words || r.words != words)
        fail_test("not whole", &r);
    put_batcher_mark_posted(all);
    if (put_batcher_next(all, may_go, NULL, &r)) fail_test("once more", &r);
    put_batcher_free(all);
}

/* A row with a missing piece is put, to a busy net, after many others have arrived; not long
 * before. */
static void test_stale(void)
{
    enum { ROW = 64, ROWS = 1024 };
    put_batcher *all = put_batcher_new(1, ROWS * ROW, 0, PARCEL);
    uint64_t seen = 0;
    put_range r;
    percent = 0;
    for (uint64_t row = 1; row < ROWS; row++) { /* the first row lacks its first piece */
        put_batcher_add(all, 0, row * ROW, ROW);
        while (put_batcher_next(all, may_go, NULL, &r)) {
            if (r.word / PARCEL == 0 && seen++) fail_test("twice", &r);
            if (r.word / PARCEL == 0 && (r.word != ROW || r.words != PARCEL - ROW))
                fail_test("not all that there is of it", &r);
            if (r.word / PARCEL == 0 && row < 256) fail_test("while more of it may come", &r);
            put_batcher_mark_posted(all);
        }
    }
    if (!seen) fail_test("waits for a row that does not come", &(put_range){0});
    put_batcher_free(all);
}

/* Rows that came first are overtaken, and wait while the net is full. */
static void test_urgent(void)
{
    put_batcher *all = put_batcher_new(1, 8 * PARCEL, PARCEL, PARCEL);
    put_range r;
    percent = 100;
    is_full = true;
    put_batcher_add(all, 0, 3 * PARCEL, PARCEL);
    if (put_batcher_next(all, may_go, NULL, &r)) fail_test("the net is full", &r);
    put_batcher_add(all, 0, 40, 8);
    if (!put_batcher_next(all, may_go, NULL, &r) || r.word != 40 || r.words != 8)
        fail_test("an urgent put waits for a row", &r);
    put_batcher_mark_posted(all);
    is_full = false;
    put_batcher_add(all, 0, 48, 8);
    for (int i = 0; i < 2; i++) {
        if (!put_batcher_next(all, may_go, NULL, &r) || r.word != (i ? 3 * PARCEL : 48))
            fail_test("not what is urgent first", &r);
        put_batcher_mark_posted(all);
    }
    put_batcher_free(all);
}

/* The longest piece that a ring entry can describe, in rows of 2 KB, as often as there is room.
 */
static void test_long(void)
{
    enum { SMALL = (2 << 10) / 8, LONG = 0x3ffff, COUNT = 9 };
    put_batcher *all = put_batcher_new(1, (uint64_t)COUNT * LONG, 0, SMALL);
    uint64_t added = 0, words = 0;
    put_range r;
    percent = 100;
    for (int i = 0; i < COUNT; i++) {
        while (!put_batcher_has_room(all, LONG)) {
            if (!put_batcher_next(all, may_go, NULL, &r))
                fail_test("no room for one", &(put_range){0});
            words += r.words;
            put_batcher_mark_posted(all);
        }
        put_batcher_add(all, 0, added, LONG);
        added += LONG;
    }
    while (put_batcher_next(all, may_go, NULL, &r)) {
        words += r.words;
        put_batcher_mark_posted(all);
    }
    if (words != added || !put_batcher_is_empty(all)) fail_test("not all was given", &r);
    put_batcher_free(all);
}

int main(void)
{
    dice.state = 7;
    test_long();
    test_urgent();
    test_stale();
    test_whole(PARCEL);
    test_whole((512 << 10) / 8); /* the largest put of net.h */
    for (int i = 0; i < 20; i++) {
        percent = i * 5;
        test_random();
    }
    printf("hosts_put_batch: good\n");
    return 0;
}
