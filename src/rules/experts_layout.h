/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the layout of the experts' workspace on a device. Host code needs the workspace's
 * size, and the CUDA backends need its offsets.
 *
 * `width` is the number of columns of an expert's first GEMM: 2 * inner, or inner if the layer
 * is ungated. "E4M3 weights" are EPIC_E4M3 elements with scales. If a layer has them, the rows
 * are quantized too, with one scale for each block of 128 elements of a row. */
#ifndef EPIC_EXPERTS_LAYOUT_H
#define EPIC_EXPERTS_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

#define EXPERTS_TILE_ROWS 128 /* maximum number of rows in a tile */

/* Up to EXPERTS_TILE_ROWS consecutive rows of one slab, starting at `row`. The first `tokens`
 * of the `rows` rows contain a token, and the others are padding. */
typedef struct slab_tile {
    int32_t row, expert, tokens, rows;
} slab_tile;

/* The rows of a slab (the slots of one expert), starting at `row`. The first `tokens` rows
 * contain a token. */
typedef struct slab_range {
    int32_t row, tokens;
} slab_range;

/* The members before `bytes` are byte offsets of arrays, which the comments describe. */
typedef struct experts_layout {
    int64_t num_tiles; /* one int32: number of tiles */
    int64_t tiles;     /* slab_tile [most_tiles]: list of all tiles */
    int64_t slabs;     /* slab_range [num_local_experts]: list of all slabs */
    /* [num_slots, inner]; E4M3 in forward with E4M3 weights, row_type in all other cases */
    int64_t activations;
    /* E4M3 weights: float32 [num_slots, blocks of a row], the scales of the quantized rows */
    int64_t scales;
    /* E4M3 weights, backward only: first d_y in E4M3, later overwritten by d_gate_up in E4M3 */
    int64_t quantized;
    int64_t d_gate_up;   /* backward: [num_slots, width] of row_type */
    int64_t bytes;       /* size of the workspace in bytes */
    int64_t saved_bytes; /* size in bytes of `saved`: [num_slots, width] of row_type */
    int32_t most_tiles;  /* upper bound of *num_tiles */
} experts_layout;

static inline int64_t experts_round_up(int64_t bytes)
{
    return (bytes + 127) / 128 * 128;
}

/* Lays out the lists of tiles and slabs. Each slab has at most one tile that is not full, so
 * there are at most num_slots / EXPERTS_TILE_ROWS + num_experts tiles. */
static inline void experts_lay_tiles(experts_layout *l, int64_t num_experts, int64_t num_slots)
{
    const int64_t tiles = num_slots / EXPERTS_TILE_ROWS + num_experts;
    l->most_tiles = (int32_t)tiles;
    l->num_tiles = 0;
    l->tiles = 128;
    l->slabs = experts_round_up(l->tiles + tiles * (int64_t)sizeof(slab_tile));
    l->activations = experts_round_up(l->slabs + num_experts * (int64_t)sizeof(slab_range));
}

static inline int64_t experts_blocks(int64_t numbers)
{
    return (numbers + 127) / 128;
}

static inline experts_layout experts_layout_of(const epic_experts *ex, int64_t num_slots,
                                               bool backward)
{
    experts_layout l;
    const int64_t element = ex->row_type == EPIC_F32 ? 4 : 2;
    const int64_t width = (int64_t)ex->inner * (ex->ungated ? 1 : 2);
    const bool scaled = ex->weight_type == EPIC_E4M3;
    const int64_t widest =
        width > ex->hidden ? width : ex->hidden; /* longest row that backward quantizes */
    const int64_t columns = backward ? widest : ex->inner;
    experts_lay_tiles(&l, ex->num_local_experts, num_slots);
    l.scales = experts_round_up(l.activations +
                                num_slots * ex->inner * (scaled && !backward ? 1 : element));
    l.quantized = l.scales;
    if (scaled)
        l.quantized = experts_round_up(l.scales + num_slots * experts_blocks(columns) * 4);
    l.d_gate_up = l.quantized;
    if (scaled && backward) l.d_gate_up = experts_round_up(l.quantized + num_slots * columns);
    l.bytes =
        backward ? experts_round_up(l.d_gate_up + num_slots * width * element) : l.d_gate_up;
    l.saved_bytes = experts_round_up(num_slots * width * element);
    return l;
}

/* Returns the size in bytes of the list of tiles if all rows belong to one expert. */
static inline int64_t experts_tiles_bytes(int64_t num_rows)
{
    experts_layout l;
    experts_lay_tiles(&l, 1, num_rows);
    return l.activations;
}

#endif
