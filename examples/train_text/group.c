/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of a rank that all parts of the program use. */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool complain(const char *format, ...)
{
    char line[1024];
    va_list rest;
    va_start(rest, format);
    vsnprintf(line, sizeof line, format, rest);
    va_end(rest);
    fprintf(stderr, "train_text: %s\n", line);
    return false;
}

bool works(const group *g, epic_result result, const char *what)
{
    if (result == EPIC_OK) return true;
    return complain("rank %d: %s: %s: %s", g->rank, what, epic_result_name(result),
                    epic_error(g->ctx));
}

void *memory(int64_t bytes)
{
    const size_t size = ((size_t)bytes + 64) / 64 * 64;
    void *at = aligned_alloc(64, size);
    if (!at) {
        complain("no memory for %lld bytes", (long long)bytes);
        exit(1);
    }
    return memset(at, 0, size);
}

bool sum_over_ranks(const group *g, float *data, int64_t count)
{
    if (g->cuda) return device_sum(g, data, count);
    const epic_allreduce_sum_args sum = {.data = data, .count = count, .order = EPIC_TREE};
    return works(g, epic_allreduce_sum(g->ctx, &sum), "sum");
}

bool all_equal(const group *g, uint64_t number, const char *what)
{
    enum {
        PIECES = 4
    }; /* `number` is sent in pieces of 16 bits, which float32 holds exactly */
    float *seen = memory((int64_t)g->num_ranks * PIECES * 4);
    for (int i = 0; i < PIECES; i++)
        seen[g->rank * PIECES + i] = (float)(number >> (16 * i) & 0xffff);
    bool equal = sum_over_ranks(g, seen, (int64_t)g->num_ranks * PIECES);
    for (int r = 1; equal && r < g->num_ranks; r++) {
        equal = !memcmp(seen, seen + r * PIECES, PIECES * sizeof *seen);
        if (!equal && g->rank == 0) complain("rank %d has %s than rank 0", r, what);
    }
    free(seen);
    return equal;
}

bool all_good(const group *g, bool good)
{
    float bad = !good;
    return sum_over_ranks(g, &bad, 1) && bad == 0;
}
