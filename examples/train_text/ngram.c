/* SPDX-License-Identifier: Apache-2.0 */
/* The n-gram: one hash table of contexts of all lengths, alone and with the byte that
 * follows them. */
#include "ngram.h"

#include <math.h>
#include <stdlib.h>

#include "group.h"
#include "random.h"

/* A context, or a context with the byte after it. In the second case `kinds` stays 0. */
struct ngram_entry {
    uint64_t key; /* 0: the entry is free */
    uint32_t times, kinds;
};

enum { FIRST_ENTRIES = 1 << 12, MOST_ENTRIES = 1 << 23 /* 128 MiB */ };

static uint64_t longer(uint64_t key, unsigned char byte)
{
    return random_mix(key * 0x9e3779b97f4a7c15u + byte + 1);
}

/* Returns the entry of a key, or the free entry where it belongs. */
static ngram_entry *find(const ngram *g, uint64_t key)
{
    uint64_t i = key & (g->num_entries - 1);
    while (g->entries[i].key && g->entries[i].key != key) i = (i + 1) & (g->num_entries - 1);
    return &g->entries[i];
}

static void grow(ngram *g)
{
    const ngram old = *g;
    g->num_entries = old.num_entries ? old.num_entries * 2 : FIRST_ENTRIES;
    g->entries = memory((int64_t)(g->num_entries * sizeof *g->entries));
    for (uint64_t i = 0; i < old.num_entries; i++)
        if (old.entries[i].key) *find(g, old.entries[i].key) = old.entries[i];
    free(old.entries);
}

/* Increments the count of a key. Returns the count before that. */
static uint32_t count(ngram *g, uint64_t key, uint32_t new_kinds)
{
    ngram_entry *e = find(g, key);
    g->num_used += e->key == 0;
    e->key = key;
    e->kinds += new_kinds;
    return e->times++;
}

static void count_all(ngram *g, const unsigned char *at)
{
    uint64_t context = 1;
    for (int length = 0; length < NGRAM_ORDER; length++) {
        if (length) context = longer(context, at[-length]);
        const bool is_new = count(g, longer(~context, *at), 0) == 0;
        count(g, context, is_new);
    }
}

void ngram_open(ngram *g, const text *t)
{
    *g = (ngram){0};
    for (int64_t n = 0; n < t->num_training; n++) {
        if ((g->num_used + 2 * NGRAM_ORDER) * 4 > g->num_entries * 3) {
            if (g->num_entries == MOST_ENTRIES) return;
            grow(g);
        }
        count_all(g, text_training(t, n));
        g->num_trained++;
    }
}

void ngram_close(ngram *g)
{
    free(g->entries);
    *g = (ngram){0};
}

double ngram_bits(const ngram *g, const unsigned char *at)
{
    double p = 1.0 / 256;
    uint64_t context = 1;
    for (int length = 0; length < NGRAM_ORDER; length++) {
        if (length) context = longer(context, at[-length]);
        const ngram_entry *h = find(g, context), *hc = find(g, longer(~context, *at));
        if (h->times) p = (hc->times + h->kinds * p) / ((double)h->times + h->kinds);
    }
    return -log2(p);
}
