/* SPDX-License-Identifier: Apache-2.0 */
/* Times rows and chooses how to copy the next ones (ring_copy.h). */
#include "exchange/ring_copy.h"

#include <stdatomic.h>
#include <string.h>

#define LINE 64
#define LEAST_BYTES 1024 /* the time of a shorter row is mostly noise */
#define TIMED_EVERY 64 /* rows; timing one in 16 costs 5 % of a combine between distant cores */
#define FAR_PS \
    11000 /* limit for one line; measured: up to 8,000 in a shared cache, else 27,000 */
#define MOST_PS 30000 /* a longer time means that the thread lost its core */

ring_path ring_choose_path(exchange *x, int lane, int64_t bytes)
{
    ring_cost *reach = &x->ring_costs[lane];
    if (bytes < LEAST_BYTES) return RING_CACHED;
    if (reach->rows++ % TIMED_EVERY == 0) return RING_TIMED;
    return reach->line_ps > FAR_PS ? RING_STREAMED : RING_CACHED;
}

void ring_record_time(ring_cost *reach, uint64_t ns, size_t bytes)
{
    const uint64_t ps = ns * 1000 / (bytes / LINE);
    const int32_t seen = ps < MOST_PS ? (int32_t)ps : MOST_PS;
    reach->line_ps += (seen - reach->line_ps) / 8;
}

/* Reads the row into this core's cache, so that the timer measures only the lane. */
static void read_into_cache(const volatile char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE) (void)from[at];
}

static void write_row_timed(ring_cost *reach, void *entry, const void *from, size_t bytes)
{
    read_into_cache(from, bytes);
    const uint64_t begin = now_ns();
    memcpy(entry, from, bytes);
    atomic_exchange(&reach->settled, true); /* waits until this core owns all written lines */
    ring_record_time(reach, now_ns() - begin, bytes);
}

void ring_write_row(exchange *x, int lane, ring_path way, void *entry, const void *from,
                    size_t bytes, copy_function *past)
{
    if (way == RING_TIMED)
        write_row_timed(&x->ring_costs[lane], entry, from, bytes);
    else if (way == RING_STREAMED)
        past(entry, from, bytes);
    else
        memcpy(entry, from, bytes);
}
