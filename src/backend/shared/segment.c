/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of the shared segment. */
#include "backend/shared/segment.h"

#include "base/error.h"

#define PAGE 4096
#define FULL_LANE (1024 * 1024) /* the lane to everyone; the others together as much */
#define GOOD_LANE (132 * 1024)  /* two entries of 64 KiB and their trailers */
#define LEAST_LANE (2 * 8704)   /* two entries of 1024 float64 elements and a trailer */

static int64_t round_up(int64_t bytes, int64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static int64_t at_least(int64_t bytes, int64_t least)
{
    return bytes < least ? least : bytes;
}

/* For full speed; a lane longer than a whole step is of no use. */
static void split_full(const epic_config *config, shared_layout *l)
{
    const int64_t peers = at_least(l->num_ranks - 1, 1);
    const int64_t entry = config->max_row_bytes + 320; /* and its trailer */
    int64_t step = FULL_LANE;
    if (config->max_tokens < FULL_LANE / entry + 1) step = config->max_tokens * entry;
    if (step > FULL_LANE) step = FULL_LANE;
    l->everyone_bytes = round_up(at_least(step, GOOD_LANE), 64);
    l->private_bytes = at_least(l->everyone_bytes / peers / 64 * 64, GOOD_LANE);
}

/* Half of a cell's staging is the lane to everyone, unless the others would fall too short. */
static void split(shared_layout *l, int64_t bytes)
{
    const int64_t peers = at_least(l->num_ranks - 1, 1);
    l->private_bytes = at_least(bytes / 2 / peers / 64 * 64, LEAST_LANE);
    l->everyone_bytes = (bytes - l->private_bytes * peers) / 64 * 64;
}

static epic_result choose_lanes(const epic_config *config, shared_layout *l)
{
    const int64_t peers = at_least(l->num_ranks - 1, 1);
    split_full(config, l);
    const int64_t full = l->everyone_bytes + l->private_bytes * peers;
    const int64_t given = config->staging_bytes / l->num_cells;
    if (config->staging_bytes == 0 || given >= full) return EPIC_OK;
    const int64_t least = LEAST_LANE * (1 + peers);
    if (given < least)
        return epic_fail(EPIC_EINVAL,
                         "config.staging_bytes: %lld is too little for %d ranks and "
                         "max_in_flight %d; give %lld or more, or 0, or lower max_in_flight",
                         (long long)config->staging_bytes, l->num_ranks, l->num_cells,
                         (long long)(least * l->num_cells));
    split(l, given);
    return EPIC_OK;
}

epic_result shared_layout_of(const epic_config *config, shared_layout *out)
{
    shared_layout l = {.num_ranks = (int)config->num_ranks,
                       .num_cells = (int)config->max_in_flight};
    TRY(choose_lanes(config, &l));
    const int64_t n = l.num_ranks;
    l.cell_bytes = (int64_t)(sizeof(shared_cell) + (size_t)n * sizeof(shared_lane));
    l.staging_bytes = n > 1 ? l.everyone_bytes + (n - 1) * l.private_bytes : 0;
    l.cells_at = sizeof(shared_head);
    l.staging_at = round_up(l.cells_at + l.num_cells * l.cell_bytes, PAGE);
    l.block_bytes = round_up(l.staging_at + l.num_cells * l.staging_bytes, PAGE);
    l.segment_bytes = round_up(sizeof(shared_header), PAGE) + n * l.block_bytes;
    *out = l;
    return EPIC_OK;
}
