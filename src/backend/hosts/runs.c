/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/hosts/runs.h"

#include <stdlib.h>

#define WORD_BITS 33 /* of an entry of the ring */

void runs_add(runs *all, int host, uint64_t word, uint32_t words)
{
    all->pieces[all->count].place = (uint64_t)host << WORD_BITS | word;
    all->pieces[all->count++].words = words;
    all->sorted = false;
}

static int by_place(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

bool runs_next(runs *all, run *out)
{
    if (all->next == all->count) {
        all->next = all->count = 0;
        return false;
    }
    if (!all->sorted && all->count > 1) /* nothing of it has been given */
        qsort(all->pieces, (size_t)all->count, sizeof *all->pieces, by_place);
    all->sorted = true;
    const uint64_t first = all->pieces[all->next].place;
    uint64_t words = all->pieces[all->next].words;
    int i = all->next + 1;
    for (; i < all->count && all->pieces[i].place == first + words &&
           words + all->pieces[i].words <= RUNS_WORDS;
         i++)
        words += all->pieces[i].words;
    *out = (run){.host = (int)(first >> WORD_BITS),
                 .word = first & ((1ull << WORD_BITS) - 1),
                 .words = (uint32_t)words,
                 .pieces = i - all->next};
    return true;
}

void runs_pass(runs *all, const run *given)
{
    all->next += given->pieces;
}
