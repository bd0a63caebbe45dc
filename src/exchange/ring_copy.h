/* SPDX-License-Identifier: Apache-2.0 */
/* How far the readers of a lane are from who writes it.
 *
 * A line of a lane lies in the cache of who read it last, and to write it takes it from there.
 * Between cores that share a cache that costs next to nothing, and what is written through the
 * caches is read from them.  Between others it costs more than to write past the caches and to
 * read from memory.  Which it is changes while a program runs: the scheduler moves ranks, and
 * the host the cores of a virtual machine.  So one row of many is written through the caches
 * with a clock in hand, and the rows after it go as it says. */
#ifndef EPIC_RING_COPY_H
#define EPIC_RING_COPY_H

#include "exchange/exchange.h"

typedef enum ring_path { RING_CACHED, RING_STREAMED, RING_TIMED } ring_path;
typedef void copy_function(void *to, const void *from, size_t n);

/* How the next row of `bytes` goes into a lane: through the caches, past them, or through them
 * and timed.  lane: the rank that reads it; our own number is the lane to everyone. */
ring_path ring_choose_path(exchange *x, int lane, int64_t bytes);

/* Copies the row in that way; past: what copies past the caches. */
void ring_write_row(exchange *x, int lane, ring_path way, void *entry, const void *from,
                    size_t bytes, copy_function *past);

/* What a timed row of `bytes` tells. */
void ring_record_time(ring_cost *reach, uint64_t ns, size_t bytes);

#endif
