/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels have shipped, in fewer and larger puts.  A heap is cut into *parcels*, of the size that
 * the wire likes best.  Pieces of one are kept until all of it is there, or the wire has nothing to do:
 * then those that lie one after the other go in one put. */
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

/* Of heaps of so many words.  NULL: no memory. */
parcels *parcels_new(int num_hosts, uint64_t heap_words, uint32_t parcel_words);
void parcels_free(parcels *all); /* NULL is allowed */

/* Is there room for one more piece? */
bool parcels_have_room(const parcels *all);

/* A piece more.  No word is in two of them. */
void parcels_add(parcels *all, int host, uint64_t word, uint32_t words);

/* What should go now: of parcels that are complete, or of the oldest one if `hungry` says that the
 * wire to its host has nothing to do.  False: nothing. */
bool parcels_next(parcels *all, bool (*hungry)(const void *self, int host), const void *self,
                  run *out);

/* That one has been given. */
void parcels_pass(parcels *all);

#endif
