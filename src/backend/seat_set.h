/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of seats (rank numbers of a group), as masks with one bit per seat. */
#ifndef EPIC_SEAT_SET_H
#define EPIC_SEAT_SET_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"

#define SEAT_SET_MAX EPIC_MAX_RANKS
#define SEAT_SET_WORDS (SEAT_SET_MAX / 64)

typedef struct seat_set {
    uint64_t words[SEAT_SET_WORDS];
} seat_set;

static inline bool seat_set_has(const seat_set *s, int seat)
{
    return s->words[seat / 64] >> (seat % 64) & 1;
}

static inline void seat_set_add(seat_set *s, int seat)
{
    s->words[seat / 64] |= UINT64_C(1) << (seat % 64);
}

/* Returns a set with only one seat. */
static inline seat_set seat_set_of(int seat)
{
    seat_set s = {0};
    seat_set_add(&s, seat);
    return s;
}

static inline void seat_set_unite(seat_set *s, const seat_set *other)
{
    for (int w = 0; w < SEAT_SET_WORDS; w++) s->words[w] |= other->words[w];
}

static inline void seat_set_subtract(seat_set *s, const seat_set *other)
{
    for (int w = 0; w < SEAT_SET_WORDS; w++) s->words[w] &= ~other->words[w];
}

static inline void seat_set_add_all(seat_set *s, int num_seats)
{
    for (int seat = 0; seat < num_seats; seat++) seat_set_add(s, seat);
}

static inline int seat_set_count(const seat_set *s)
{
    int count = 0;
    for (int w = 0; w < SEAT_SET_WORDS; w++) count += __builtin_popcountll(s->words[w]);
    return count;
}

/* Returns the number of seats in the set that are below `seat`. */
static inline int seat_set_count_below(const seat_set *s, int seat)
{
    int count = __builtin_popcountll(s->words[seat / 64] & ((UINT64_C(1) << seat % 64) - 1));
    for (int w = 0; w < seat / 64; w++) count += __builtin_popcountll(s->words[w]);
    return count;
}

static inline bool seat_set_contains(const seat_set *whole, const seat_set *part)
{
    for (int w = 0; w < SEAT_SET_WORDS; w++)
        if (part->words[w] & ~whole->words[w]) return false;
    return true;
}

static inline bool seat_set_equal(const seat_set *a, const seat_set *b)
{
    return seat_set_contains(a, b) && seat_set_contains(b, a);
}

#endif
