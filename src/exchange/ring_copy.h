/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses how to copy a row into a lane: through the caches or past them.
 *
 * The rank that read a cache line of a lane last has it in its cache, and a writer must
 * fetch it from there. Between cores that share a cache this costs almost nothing, and the
 * reader then finds the row in that cache. Between other cores it costs more than to write
 * past the caches and to read from memory. The costs change at run time: the scheduler moves
 * ranks, and a hypervisor moves virtual cores. So one row in 64 is written through the
 * caches and timed, and the moving average decides about the rows after it. */
#ifndef EPIC_RING_COPY_H
#define EPIC_RING_COPY_H

#include "exchange/exchange.h"

typedef enum ring_path { RING_CACHED, RING_STREAMED, RING_TIMED } ring_path;
typedef void copy_function(void *to, const void *from, size_t n);

/* Returns how the next row of `bytes` goes into a lane: through the caches, past them, or
 * through them with a timer. `lane` is the rank that reads it; this rank's own number is the
 * lane to all peers. */
ring_path ring_choose_path(exchange *x, int lane, int64_t bytes);

/* Copies the row in the chosen way. `past` is the function that copies past the caches. */
void ring_write_row(exchange *x, int lane, ring_path way, void *entry, const void *from,
                    size_t bytes, copy_function *past);

/* Updates the cost of a lane with the time of one row of `bytes`. */
void ring_record_time(ring_cost *reach, uint64_t ns, size_t bytes);

#endif
