/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of the workspace of the experts on a device. The core, which returns its size,
 * the backend, which divides it, and the kernels share this file. */
#ifndef EPIC_EXPERTS_LAYOUT_H
#define EPIC_EXPERTS_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

#define EXPERTS_TILE_ROWS 128

/* Up to EXPERTS_TILE_ROWS rows of one slab. The first `tokens` rows carry a token; the
 * others are padding. */
typedef struct slab_tile {
    int32_t row, expert, tokens, rows;
} slab_tile;

typedef struct slab_place {
    int32_t row, tokens;
} slab_place;

/* Offsets in bytes from the beginning of the workspace. */
typedef struct experts_layout {
    int64_t num_tiles;   /* int32 [1] */
    int64_t tiles;       /* slab_tile [most_tiles] */
    int64_t slabs;       /* slab_place [num_local_experts] */
    int64_t activations; /* [num_slots, inner] of row_type; forward of E4M3 weights: e4m3 */
    int64_t scales;      /* E4M3 weights: float32 [num_slots, blocks of inner]; backward: of the
                            rows below */
    int64_t quantized; /* backward of E4M3 weights: d_y, then d_gate_up, [num_slots, columns] */
    int64_t d_gate_up; /* backward: [num_slots, width] of row_type */
    int64_t bytes;
    int64_t saved_bytes; /* bytes of `saved`: [num_slots, width] of row_type */
    int32_t most_tiles;
} experts_layout;

static inline int64_t experts_round_up(int64_t bytes)
{
    return (bytes + 127) / 128 * 128;
}

/* Lays out the first part, the list of tiles. Every slab has at most one partial tile. */
static inline void experts_lay_tiles(experts_layout *l, int64_t num_experts, int64_t num_slots)
{
    const int64_t tiles = num_slots / EXPERTS_TILE_ROWS + num_experts;
    l->most_tiles = (int32_t)tiles;
    l->num_tiles = 0;
    l->tiles = 128;
    l->slabs = experts_round_up(l->tiles + tiles * (int64_t)sizeof(slab_tile));
    l->activations = experts_round_up(l->slabs + num_experts * (int64_t)sizeof(slab_place));
}

/* Returns the number of blocks of 128 elements; each block has one scale. */
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
        width > ex->hidden ? width : ex->hidden; /* columns of the rows that are quantized */
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

/* Returns the bytes of the list of tiles if one expert has all rows. */
static inline int64_t experts_tiles_bytes(int64_t num_rows)
{
    experts_layout l;
    experts_lay_tiles(&l, 1, num_rows);
    return l.activations;
}

#endif
