/* SPDX-License-Identifier: Apache-2.0 */
/* The products of a layer's gate on a device, few columns with long sums: how sums are cut so that a
 * whole GPU has work, and what their parts take.  The same for the core, which tells the size, and
 * for the backend. */
#ifndef EPIC_GATE_LAYOUT_H
#define EPIC_GATE_LAYOUT_H

#include "rules/experts_layout.h"

#define GATE_PIECES 512 /* of work, at least: a few for each SM */
#define GATE_LEAST 128  /* steps of a sum that are not cut */
#define GATE_COLUMNS 64 /* of a tile */

static inline int64_t gate_ceil(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Into how many slices the sums of [lines, columns] over `depth` are cut. */
static inline int32_t gate_slices(int64_t lines, int64_t columns, int64_t depth)
{
    const int64_t tiles =
        gate_ceil(lines, EXPERTS_TILE_ROWS) * gate_ceil(columns, GATE_COLUMNS);
    const int64_t wanted = tiles ? gate_ceil(GATE_PIECES, tiles) : 1;
    const int64_t most = gate_ceil(depth, GATE_LEAST);
    return (int32_t)(wanted < most ? wanted : most > 1 ? most : 1);
}

/* Of forward the cut follows from the tokens of a block, which are the same for every number of
 * ranks where bits have to be, and of backward too, which goes block by block. */
static inline int64_t gate_parts_bytes(int64_t tokens, int64_t block, int64_t hidden,
                                       int64_t columns, bool backward)
{
    const int64_t lines = backward ? hidden : tokens;
    const int64_t slices =
        backward ? gate_slices(hidden, columns, block) : gate_slices(block, columns, hidden);
    return slices > 1 ? slices * lines * columns * (int64_t)sizeof(float) : 0;
}

/* Of the workspace: the list of tiles, then the parts. */
static inline int64_t gate_bytes(int64_t tokens, int64_t block, int64_t hidden, int64_t columns,
                                 bool backward)
{
    return experts_tiles_bytes(tokens) +
           gate_parts_bytes(tokens, block, hidden, columns, backward);
}

#endif
