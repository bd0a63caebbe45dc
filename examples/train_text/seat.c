/* SPDX-License-Identifier: Apache-2.0 */
/* What every part of the program does with its rank. */
#include "seat.h"

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

bool works(const seat *s, epic_result result, const char *what)
{
    if (result == EPIC_OK) return true;
    return complain("rank %d: %s: %s: %s", s->rank, what, epic_result_name(result),
                    epic_error(s->ctx));
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

bool sum_over_ranks(const seat *s, float *data, int64_t count)
{
    const epic_sum_args sum = {.data = data, .count = count, .order = EPIC_TREE};
    return works(s, epic_sum(s->ctx, &sum), "sum");
}

bool all_equal(const seat *s, uint64_t number, const char *what)
{
    enum { PIECES = 4 }; /* of 16 bits: exact in float32 */
    float *seen = memory((int64_t)s->num_ranks * PIECES * 4);
    for (int i = 0; i < PIECES; i++)
        seen[s->rank * PIECES + i] = (float)(number >> (16 * i) & 0xffff);
    bool equal = sum_over_ranks(s, seen, (int64_t)s->num_ranks * PIECES);
    for (int r = 1; equal && r < s->num_ranks; r++) {
        equal = !memcmp(seen, seen + r * PIECES, PIECES * sizeof *seen);
        if (!equal && s->rank == 0) complain("rank %d has %s than rank 0", r, what);
    }
    free(seen);
    return equal;
}

bool all_good(const seat *s, bool good)
{
    float bad = !good;
    return sum_over_ranks(s, &bad, 1) && bad == 0;
}
