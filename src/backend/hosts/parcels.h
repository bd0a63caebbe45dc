/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels have shipped, in fewer and larger puts.  A heap is cut into *parcels*, of the size that
 * the net likes best.  Pieces of one are kept until all of it is there, or no more of it is expected,
 * or the net has nothing to do: then those that lie one after the other go in one put.  What lies at
 * the beginning of a heap is no row but what all else waits for, and overtakes rows. */
#ifndef EPIC_HOSTS_PARCELS_H
#define EPIC_HOSTS_PARCELS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct parcels parcels;

typedef struct run { /* what a put takes */
    int host;
    uint64_t word;
    uint32_t words;
} run;

typedef enum parcel_kind {
    PARCEL_URGENT, /* at the beginning of a heap, all of it or a part */
    PARCEL_WHOLE,  /* a complete one, or as much of it as there will be */
    PARCEL_PART
} parcel_kind;

/* May a parcel of this kind, in so many puts, go to the host now? */
typedef bool parcel_may(const void *self, int host, parcel_kind kind, int puts);

/* Of heaps of so many words, the first `urgent_words` of them urgent.  NULL: no memory. */
parcels *parcels_new(int num_hosts, uint64_t heap_words, uint64_t urgent_words,
                     uint32_t parcel_words);
void parcels_free(parcels *all); /* NULL is allowed */

/* Is there room for a piece of so many words more?  Where all has been given there is room for 4 MB. */
bool parcels_have_room(const parcels *all, uint32_t words);

/* Has all been given? */
bool parcels_are_empty(const parcels *all);

bool parcels_is_urgent(const parcels *all, uint64_t word);

/* A piece more.  No word is in two of them. */
void parcels_add(parcels *all, int host, uint64_t word, uint32_t words);

/* What should go now, of what may: what is urgent, then complete parcels, then the oldest of the
 * others.  False: nothing. */
bool parcels_next(parcels *all, parcel_may *may, const void *self, run *out);

/* That one has been given. */
void parcels_pass(parcels *all);

/* That one could not be given: it is the first again of those that may go. */
void parcels_put_back(parcels *all);

#endif
