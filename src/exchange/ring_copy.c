/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the time of writing rows into a ring, and chooses how to copy them (ring_copy.h). */
#include "exchange/ring_copy.h"

#include <stdatomic.h>
#include <string.h>

#define LINE 64
#define MIN_TIMED_BYTES 1024 /* shorter rows are not timed, because their times vary too much */
/* one of this many rows is timed, because timing slows down the copy of a row */
#define TIMED_EVERY 64
/* If writing one cache line takes longer than this on average, rows are written with
 * non-temporal stores. The limit is above the time for two cores that share a cache, and below
 * the time for two cores that do not. */
#define STREAM_ABOVE_PS 11000
/* measured times are limited to this, because a longer time includes a preemption */
#define MAX_LINE_PS 30000

ring_path ring_choose_path(exchange *x, int ring, int64_t bytes)
{
    ring_write_time *measured = &x->ring_write_times[ring];
    if (bytes < MIN_TIMED_BYTES) return RING_CACHED;
    if (measured->rows++ % TIMED_EVERY == 0) return RING_TIMED;
    return measured->line_ps > STREAM_ABOVE_PS ? RING_STREAMED : RING_CACHED;
}

void ring_record_time(ring_write_time *measured, uint64_t ns, size_t bytes)
{
    const uint64_t ps = ns * 1000 / (bytes / LINE);
    const int32_t seen = ps < MAX_LINE_PS ? (int32_t)ps : MAX_LINE_PS;
    measured->line_ps += (seen - measured->line_ps) / 8;
}

/* Loads the source row into this core's cache before the measurement, so that the measured time
 * contains only the writing of the ring. */
static void read_into_cache(const volatile char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE) (void)from[at];
}

static void write_row_timed(ring_write_time *measured, void *entry, const void *from,
                            size_t bytes)
{
    read_into_cache(from, bytes);
    const uint64_t begin = now_ns();
    memcpy(entry, from, bytes);
    /* this atomic operation returns only after all stores of the memcpy are done */
    atomic_exchange(&measured->settled, true);
    ring_record_time(measured, now_ns() - begin, bytes);
}

void ring_write_row(exchange *x, int ring, ring_path path, void *entry, const void *from,
                    size_t bytes, copy_function *copy_past_caches)
{
    if (path == RING_TIMED)
        write_row_timed(&x->ring_write_times[ring], entry, from, bytes);
    else if (path == RING_STREAMED)
        copy_past_caches(entry, from, bytes);
    else
        memcpy(entry, from, bytes);
}
