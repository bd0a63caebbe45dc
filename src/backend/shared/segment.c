/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the sizes of the segment, the memory that the ranks share, from the
 * configuration. */
#include "backend/shared/segment.h"

#include "base/error.h"

#define PAGE 4096
/* maximum size of a broadcast ring (a ring that all peers read) */
#define FULL_RING (1024 * 1024)
/* minimum ring size for full speed: two rows of 64 KiB with trailers (bytes after the row) */
#define GOOD_RING (132 * 1024)
#define MIN_RING (2 * 8704) /* two entries of 1024 float64 elements with trailers */

static int64_t round_up(int64_t bytes, int64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static int64_t at_least(int64_t bytes, int64_t least)
{
    return bytes < least ? least : bytes;
}

/* Sets the ring sizes for full speed. A ring that holds all rows of an operation is large
 * enough, so sizes are limited to that. */
static void size_full_rings(const epic_config *config, shared_layout *l)
{
    const int64_t peers = at_least(l->num_ranks - 1, 1);
    /* size of an entry: a row and its trailer (floats that follow the row) */
    const int64_t entry = config->max_row_bytes + 320;
    int64_t step = FULL_RING;
    if (config->max_tokens < FULL_RING / entry + 1) step = config->max_tokens * entry;
    if (step > FULL_RING) step = FULL_RING;
    l->broadcast_ring_bytes = round_up(at_least(step, GOOD_RING), 64);
    l->peer_ring_bytes = at_least(l->broadcast_ring_bytes / peers / 64 * 64, GOOD_RING);
}

/* Divides the staging memory of an op slot, which has `bytes` bytes, into rings. The broadcast
 * ring gets half of the memory, or less if a peer ring would otherwise be smaller than
 * MIN_RING. */
static void split_staging(shared_layout *l, int64_t bytes)
{
    const int64_t peers = at_least(l->num_ranks - 1, 1);
    l->peer_ring_bytes = at_least(bytes / 2 / peers / 64 * 64, MIN_RING);
    l->broadcast_ring_bytes = (bytes - l->peer_ring_bytes * peers) / 64 * 64;
}

/* Chooses ring sizes for full speed. If these need more than config.staging_bytes, chooses
 * smaller sizes. Returns EPIC_EINVAL if even the smallest rings do not fit. */
static epic_result choose_ring_sizes(const epic_config *config, shared_layout *l)
{
    const int64_t peers = at_least(l->num_ranks - 1, 1);
    size_full_rings(config, l);
    const int64_t least = MIN_RING * (1 + peers);
    if (config->staging_bytes == EPIC_LEAST_STAGING) {
        split_staging(l, least);
        return EPIC_OK;
    }
    const int64_t full = l->broadcast_ring_bytes + l->peer_ring_bytes * peers;
    const int64_t given = config->staging_bytes / l->num_slots;
    if (config->staging_bytes == 0 || given >= full) return EPIC_OK;
    if (given < least)
        return epic_fail(
            EPIC_EINVAL,
            "config.staging_bytes is %lld: must be 0, or at least %lld for %d ranks and "
            "max_in_flight %d; raise it or lower max_in_flight",
            (long long)config->staging_bytes, (long long)(least * l->num_slots), l->num_ranks,
            l->num_slots);
    split_staging(l, given);
    return EPIC_OK;
}

epic_result shared_layout_of(const epic_config *config, shared_layout *out)
{
    shared_layout l = {.num_ranks = (int)config->num_ranks,
                       .num_slots = (int)config->max_in_flight};
    TRY(choose_ring_sizes(config, &l));
    const int64_t n = l.num_ranks;
    const size_t slot_bytes = sizeof(shared_op_slot) + (size_t)n * sizeof(shared_peer_counters);
    l.staging_bytes = n > 1 ? l.broadcast_ring_bytes + (n - 1) * l.peer_ring_bytes : 0;
    l.slot_at = sizeof(shared_rank_state);
    l.blocks_at = round_up(sizeof(shared_segment_header), PAGE);
    l.block_bytes = round_up(l.slot_at + (int64_t)slot_bytes, PAGE);
    l.rings_at = l.blocks_at + l.num_slots * n * l.block_bytes;
    l.rings_bytes = round_up(l.num_slots * l.staging_bytes, PAGE);
    l.segment_bytes = l.rings_at + n * l.rings_bytes;
    *out = l;
    return EPIC_OK;
}
