/* SPDX-License-Identifier: Apache-2.0 */
/* The products of a layer's gate on a device, few columns with long sums: how sums are cut so
 * that a whole GPU has work, what their parts take, and what tensor cores want of the larger
 * ones (experts/grouped_pieces.cu).  The same for the core, which tells the size, and for the
 * backend. */
#ifndef EPIC_GATE_LAYOUT_H
#define EPIC_GATE_LAYOUT_H

#include <stdbool.h>

#include "rules/experts_layout.h"

#define GATE_UNITS 512  /* of work, at least: a few for each SM */
#define GATE_LEAST 128  /* steps of a sum that are not cut */
#define GATE_COLUMNS 64 /* of a tile */
#define GATE_PIECES 3   /* bf16 numbers that a float32 is */
#define GATE_PAIRS 6    /* products of the pieces of two float32 that count */
#define GATE_LARGE \
    (INT64_C(1) << 29) /* multiplications, from which on tensor cores are faster */

static inline int64_t gate_ceil(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Into how many slices the sums of [lines, columns] over `depth` are cut. */
static inline int32_t gate_slices(int64_t lines, int64_t columns, int64_t depth)
{
    const int64_t tiles =
        gate_ceil(lines, EXPERTS_TILE_ROWS) * gate_ceil(columns, GATE_COLUMNS);
    const int64_t wanted = tiles ? gate_ceil(GATE_UNITS, tiles) : 1;
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

/* Is a product of [lines, columns] over `depth` one for tensor cores?  The plain one's tiles
 * are whole; theirs take as long for any number of columns up to 85. */
static inline bool gate_is_large(int64_t lines, int64_t columns, int64_t depth)
{
    return gate_ceil(lines, EXPERTS_TILE_ROWS) * EXPERTS_TILE_ROWS *
               gate_ceil(columns, GATE_COLUMNS) * GATE_COLUMNS * depth >=
           GATE_LARGE;
}

/* The pieces of the float32 factor, bf16 [depth, GATE_PIECES, columns], and the sums with each,
 * float32 [lines, GATE_PIECES, columns]: places behind the list of tiles, in bytes. */
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

/* The same for the gradient of x, both of whose factors are float32: bf16 [tokens, GATE_PAIRS,
 * columns] and [hidden, GATE_PAIRS, columns].  Its sums have no place: they are rows. */
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

/* Of the workspace: the list of tiles, then the parts or the pieces; forward's of all
 * tokens. */
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
