/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses how to copy a row into a ring: through the caches or past them.
 *
 * A cache line of a ring is in the cache of the peer that read it last. A writer that writes
 * through the caches must fetch the line from that cache. Between cores that share a cache the
 * fetch costs almost nothing, and the reader then finds the row in the shared cache. Between
 * other cores the fetch costs more than writing past the caches and reading from memory.
 *
 * The costs change at run time: the scheduler moves ranks, and a hypervisor moves virtual
 * cores. So one row in 64 is written through the caches and timed. A moving average of these
 * times decides how the next rows are copied. */
#ifndef EPIC_RING_COPY_H
#define EPIC_RING_COPY_H

#include "exchange/exchange.h"

/* The three ways to copy a row into a ring: through the caches, past the caches, or through the
 * caches with the time measured. */
typedef enum ring_path { RING_CACHED, RING_STREAMED, RING_TIMED } ring_path;
typedef void copy_function(void *to, const void *from, size_t n);

/* Returns how to copy the next row of `bytes` bytes into a ring. `ring` is the rank that reads
 * the ring, or this rank's own number for the ring to EVERYONE. */
ring_path ring_choose_path(exchange *x, int ring, int64_t bytes);

/* Copies a row in the way that ring_choose_path() returned. For RING_STREAMED it calls
 * copy_past_caches. */
void ring_write_row(exchange *x, int ring, ring_path path, void *entry, const void *from,
                    size_t bytes, copy_function *copy_past_caches);

/* Updates the moving average of a ring's cost per cache line. Writing one row of `bytes` bytes
 * took `ns` nanoseconds. */
void ring_record_time(ring_cost *cost, uint64_t ns, size_t bytes);

#endif
