/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix products of a layer's gate on a device. They have few columns and long sums.
 * This file defines how sums are split so that the whole GPU works, the memory of the
 * partial sums, and the memory that tensor cores need for large products
 * (experts/grouped_pieces.cu). The core, which returns the size, and the backend share it. */
#ifndef EPIC_GATE_LAYOUT_H
#define EPIC_GATE_LAYOUT_H

#include <stdbool.h>

#include "rules/experts_layout.h"

#define GATE_UNITS 512  /* wanted number of units of work: a few for each SM */
#define GATE_LEAST 128  /* length of a sum that is not split further */
#define GATE_COLUMNS 64 /* columns of a tile */
#define GATE_PIECES 3   /* number of bf16 values that represent a float32 */
#define GATE_PAIRS 6    /* products of the pieces of two float32 that are computed */
#define GATE_LARGE \
    (INT64_C(1) << 29) /* number of multiplications from which tensor cores are faster */

static inline int64_t gate_ceil(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Returns the number of slices into which the sums of a product [lines, columns] over
 * `depth` are split. */
static inline int32_t gate_slices(int64_t lines, int64_t columns, int64_t depth)
{
    const int64_t tiles =
        gate_ceil(lines, EXPERTS_TILE_ROWS) * gate_ceil(columns, GATE_COLUMNS);
    const int64_t wanted = tiles ? gate_ceil(GATE_UNITS, tiles) : 1;
    const int64_t most = gate_ceil(depth, GATE_LEAST);
    return (int32_t)(wanted < most ? wanted : most > 1 ? most : 1);
}

/* Returns the bytes of the partial sums. In the forward pass the split depends on the tokens
 * of a block, which are equal for every number of ranks where bits must be equal. The
 * backward pass also works block by block. */
static inline int64_t gate_parts_bytes(int64_t tokens, int64_t block, int64_t hidden,
                                       int64_t columns, bool backward)
{
    const int64_t lines = backward ? hidden : tokens;
    const int64_t slices =
        backward ? gate_slices(hidden, columns, block) : gate_slices(block, columns, hidden);
    return slices > 1 ? slices * lines * columns * (int64_t)sizeof(float) : 0;
}

/* Returns whether tensor cores compute a product [lines, columns] over `depth`. The plain
 * kernel has whole tiles; tensor cores take equally long for any number of columns up to 85. */
static inline bool gate_is_large(int64_t lines, int64_t columns, int64_t depth)
{
    return gate_ceil(lines, EXPERTS_TILE_ROWS) * EXPERTS_TILE_ROWS *
               gate_ceil(columns, GATE_COLUMNS) * GATE_COLUMNS * depth >=
           GATE_LARGE;
}

/* Offsets in bytes behind the list of tiles: the pieces of the float32 factor, bf16 [depth,
 * GATE_PIECES, columns], and the sums with each piece, float32 [lines, GATE_PIECES,
 * columns]. */
typedef struct gate_pieces {
    int64_t pieces, sums, end;
} gate_pieces;

static inline gate_pieces gate_pieces_of(int64_t tokens, int64_t lines, int64_t columns,
                                         int64_t depth)
{
    gate_pieces at;
    at.pieces = experts_round_up(experts_tiles_bytes(tokens));
    at.sums = experts_round_up(at.pieces + depth * GATE_PIECES * columns * 2);
    at.end = experts_round_up(at.sums + lines * GATE_PIECES * columns * 4);
    return at;
}

/* Offsets for the gradient of x, whose factors are both float32: bf16 [tokens, GATE_PAIRS,
 * columns] and [hidden, GATE_PAIRS, columns]. Its sums are rows, so they need no memory
 * here. */
typedef struct gate_pairs {
    int64_t d_logits, weights, end;
} gate_pairs;

static inline gate_pairs gate_pairs_of(int64_t tokens, int64_t hidden, int64_t columns)
{
    gate_pairs at;
    at.d_logits = experts_round_up(experts_tiles_bytes(tokens));
    at.weights = experts_round_up(at.d_logits + tokens * GATE_PAIRS * columns * 2);
    at.end = experts_round_up(at.weights + hidden * GATE_PAIRS * columns * 2);
    return at;
}

/* Returns the bytes of the workspace: the list of tiles, then the partial sums or the
 * pieces. Those of the forward pass are for all tokens. */
static inline int64_t gate_bytes(int64_t tokens, int64_t block, int64_t hidden, int64_t columns,
                                 bool backward)
{
    const int64_t parts = gate_parts_bytes(tokens, block, hidden, columns, backward);
    const int64_t cut = experts_tiles_bytes(tokens) + parts;
    const int64_t end = backward ? gate_pieces_of(tokens, hidden, columns, block).end
                                 : gate_pieces_of(tokens, tokens, columns, hidden).end;
    const int64_t pairs = backward ? gate_pairs_of(tokens, hidden, columns).end : 0;
    const int64_t pieces = end > pairs ? end : pairs;
    return gate_is_large(block, columns, hidden) && pieces > cut ? pieces : cut;
}

#endif
