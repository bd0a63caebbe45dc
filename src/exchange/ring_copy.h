/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses how to copy a row into a ring: through the caches or past them (non-temporal stores).
 *
 * A cache line of a ring is in the cache of the peer that read it last, and a normal store must
 * first fetch the line from that cache. If writer and reader share a cache, the fetch costs
 * almost nothing, and the reader finds the row in the cache. If they share no cache, the fetch
 * costs more than writing past the caches and reading from memory.
 *
 * The costs change at run time, because the scheduler moves ranks and a hypervisor moves
 * virtual cores. Therefore one row in 64 is written through the caches and timed. A moving
 * average of these times decides how the next rows are copied. */
#ifndef EPIC_RING_COPY_H
#define EPIC_RING_COPY_H

#include "exchange/exchange.h"

/* How a row is copied: through the caches, past the caches, or through the caches with a
 * measurement of the time. */
typedef enum ring_path { RING_CACHED, RING_STREAMED, RING_TIMED } ring_path;
typedef void copy_function(void *to, const void *from, size_t n);

/* Returns how to copy the next row of `bytes` bytes into a ring. `ring` is the rank that reads
 * the ring, or this rank itself for the ring to EVERYONE. */
ring_path ring_choose_path(exchange *x, int ring, int64_t bytes);

/* Copies a row as ring_choose_path() chose. Uses copy_past_caches() for RING_STREAMED. */
void ring_write_row(exchange *x, int ring, ring_path path, void *entry, const void *from,
                    size_t bytes, copy_function *copy_past_caches);

/* Updates the moving average: writing `bytes` bytes took `ns` nanoseconds. */
void ring_record_time(ring_write_time *measured, uint64_t ns, size_t bytes);

#endif
