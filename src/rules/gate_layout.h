/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the layout of the workspace for the GEMMs of a layer's gate on a device. Host code
 * needs the workspace's size, and the CUDA backends need its offsets. The gate computes
 * logits = x w_gate, with one column for each expert and zero-expert.
 *
 * These GEMMs have few columns and long sums. Small GEMMs use split-K: they divide each sum
 * into slices, so that there is work for the whole GPU. They need memory for the partial sums
 * of the slices. Large GEMMs use tensor cores (experts/grouped_components.cu). They represent
 * each float32 value as the sum of three bf16 values, its *components*. They need memory for
 * the components.
 *
 * A block (not a CUDA block) is a part of this rank's tokens, over which the layer sums
 * gradients separately (moe/moe.h). In the functions below, `tokens` is the number of this
 * rank's tokens, and `block` is the maximum number of tokens of a block. Backward computes up
 * to GATE_BLOCKS blocks in one call. */
#ifndef EPIC_GATE_LAYOUT_H
#define EPIC_GATE_LAYOUT_H

#include <stdbool.h>

#include "rules/experts_layout.h"

#define GATE_UNITS 512    /* desired number of CTAs of a GEMM: enough for a few CTAs per SM */
#define GATE_LEAST 128    /* sums of at most this many terms are not split */
#define GATE_COLUMNS 64   /* number of columns of a tile */
#define GATE_SLICES 8     /* maximum number of split-K slices with EPIC_INVARIANT */
#define GATE_STEP 64      /* number of terms that tensor cores add in a step */
#define GATE_BLOCKS 8     /* maximum number of blocks of one call; a power of two */
#define GATE_COMPONENTS 3 /* number of bf16 values whose sum represents a float32 */
/* number of GEMMs of two components that replace one GEMM of two float32 factors */
#define GATE_PAIRS 6
#define GATE_LARGE \
    (INT64_C(1) << 29) /* number of multiplications from which tensor cores are faster */

static inline int64_t gate_ceil(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Returns the number of split-K slices of a GEMM [lines, columns] whose sums have `depth`
 * terms. */
static inline int32_t gate_slices(int64_t lines, int64_t columns, int64_t depth)
{
    const int64_t tiles =
        gate_ceil(lines, EXPERTS_TILE_ROWS) * gate_ceil(columns, GATE_COLUMNS);
    const int64_t wanted = tiles ? gate_ceil(GATE_UNITS, tiles) : 1;
    const int64_t most = gate_ceil(depth, GATE_LEAST);
    return (int32_t)(wanted < most ? wanted : most > 1 ? most : 1);
}

/* Returns the number of split-K slices with EPIC_INVARIANT, which must not depend on the number
 * of tokens. There are at most GATE_SLICES slices, because every slice needs memory for partial
 * sums. */
static inline int32_t gate_fixed_slices(int64_t depth)
{
    const int64_t most = gate_ceil(depth, GATE_LEAST);
    return (int32_t)(most < GATE_SLICES ? most : GATE_SLICES);
}

/* Returns the number of terms of a slice on tensor cores, a multiple of GATE_STEP. The last
 * slice may be shorter. `depth` is the number of terms of the whole sum. */
static inline int64_t gate_slice_terms(int64_t depth, int64_t slices)
{
    return gate_ceil(gate_ceil(depth, slices), GATE_STEP) * GATE_STEP;
}

/* Returns the number of split-K slices of the forward GEMM on tensor cores with EPIC_INVARIANT.
 * The result depends neither on the number of tokens nor on the number of ranks or SMs.
 *
 * More slices use more SMs: without slices, a GEMM of few tokens would run on few SMs. But the
 * partial sums of every slice must be written and read. So there are at most GATE_SLICES
 * slices, and the partial sums of a token have at most as many bytes as the token's row of
 * bf16. */
static inline int32_t gate_component_slices(int64_t hidden, int64_t columns)
{
    const int64_t fit = hidden * 2 / (GATE_COMPONENTS * columns * (int64_t)sizeof(float));
    const int64_t most = fit < 1 ? 1 : fit < GATE_SLICES ? fit : GATE_SLICES;
    return (int32_t)gate_ceil(hidden, gate_slice_terms(hidden, most));
}

/* Returns the size in bytes of the partial sums of split-K, or 0 if sums are not divided into
 * slices.
 *
 * In forward the number of slices depends on `block` and not on `tokens`. With EPIC_TREE,
 * `block` is equal for every number of ranks, so the sums have the same bits. With
 * EPIC_INVARIANT the number of slices depends only on `hidden`. Backward computes one block at
 * a time. */
static inline int64_t gate_parts_bytes(int64_t tokens, int64_t block, int64_t hidden,
                                       int64_t columns, bool backward, bool is_invariant)
{
    const int64_t lines = backward ? hidden : tokens;
    const int64_t slices = backward       ? gate_slices(hidden, columns, block)
                           : is_invariant ? gate_fixed_slices(hidden)
                                          : gate_slices(block, columns, hidden);
    return slices > 1 ? slices * lines * columns * (int64_t)sizeof(float) : 0;
}

/* Returns true if tensor cores compute a GEMM [lines, columns] with sums of `depth` terms. They
 * do if the GEMM, with its size rounded up to whole tiles, has at least GATE_LARGE
 * multiplications. */
static inline bool gate_is_large(int64_t lines, int64_t columns, int64_t depth)
{
    return gate_ceil(lines, EXPERTS_TILE_ROWS) * EXPERTS_TILE_ROWS *
               gate_ceil(columns, GATE_COLUMNS) * GATE_COLUMNS * depth >=
           GATE_LARGE;
}

/* Tensor cores multiply bf16 elements. If one factor is float32, each of its elements is split
 * into three components, which are multiplied separately. The members are offsets in bytes of
 * arrays that follow the list of tiles. `components` is bf16 [depth, GATE_COMPONENTS, columns].
 * `sums` is float32 [slices, lines, GATE_COMPONENTS, columns], the results for each component.
 * `end` is the end of the arrays. */
typedef struct gate_components {
    int64_t components, sums, end;
} gate_components;

/* Returns the offsets for a GEMM [lines, columns] whose sums of `depth` terms are divided into
 * `slices` slices (1: the sums are not divided). The list of tiles is for `tokens` rows. */
static inline gate_components gate_components_of(int64_t tokens, int64_t lines, int64_t columns,
                                                 int64_t depth, int32_t slices)
{
    gate_components at;
    at.components = experts_round_up(experts_tiles_bytes(tokens));
    at.sums = experts_round_up(at.components + depth * GATE_COMPONENTS * columns * 2);
    at.end = experts_round_up(at.sums + slices * lines * GATE_COMPONENTS * columns * 4);
    return at;
}

/* Offsets in bytes for the gradient of x on tensor cores. Both factors of this GEMM, the
 * gradient of the logits and the gate's weights, are float32. `d_logits` is bf16 [tokens,
 * GATE_PAIRS, columns], the components of the gradient of the logits. `weights` is bf16
 * [hidden, GATE_PAIRS, columns], the components of the weights. */
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

/* The range of blocks for which one call of gate_backward computes gradients: blocks first to
 * first + count - 1. Block b of a rank begins at token b * units / total * unit, with integer
 * division. The gradients of w_gate and b_gate are computed for each block, and then added in a
 * binary tree. */
typedef struct gate_blocks {
    int64_t first, count; /* count: a power of two, at most GATE_BLOCKS */
    /* total: number of blocks of the rank. unit: each block begins at a multiple of this many
     * tokens. units: number of the rank's tokens, divided by unit. */
    int64_t total, units, unit;
} gate_blocks;

/* Offsets in bytes of arrays for the gradient of w_gate of several blocks. The arrays follow
 * the list of tiles. "With components" means: if tensor cores compute the gradient. */
typedef struct gate_leaves {
    int64_t slabs;      /* slab_range [blocks]: the tokens of each block */
    int64_t cuts;       /* slab_range [blocks, slices]: the tokens of each slice of a block */
    int64_t bias;       /* float32 [blocks, columns]: gradient of b_gate of each block */
    int64_t components; /* with components: the components of d_logits, bf16 [tokens,
                         * GATE_COMPONENTS, columns] */
    /* float32 [blocks, slices, hidden, columns] or, with components, [blocks, hidden,
     * GATE_COMPONENTS, columns]: sums over the tokens of each slice or block */
    int64_t sums;
    int64_t end;
    int32_t slices; /* number of slices of a block's tokens; 1 with components */
} gate_leaves;

static inline gate_leaves gate_leaves_of(int64_t tokens, int64_t block, int64_t blocks,
                                         int64_t hidden, int64_t columns, bool has_components)
{
    const int64_t range = (int64_t)sizeof(slab_range),
                  places = has_components ? GATE_COMPONENTS : 1;
    gate_leaves at;
    at.slices = has_components ? 1 : gate_slices(hidden, columns, block);
    at.slabs = experts_round_up(experts_tiles_bytes(tokens));
    at.cuts = experts_round_up(at.slabs + blocks * range);
    at.bias = experts_round_up(at.cuts + blocks * at.slices * range);
    at.components = experts_round_up(at.bias + blocks * columns * 4);
    at.sums =
        experts_round_up(at.components + (has_components ? tokens * places * columns * 2 : 0));
    at.end = experts_round_up(at.sums + blocks * at.slices * hidden * places * columns * 4);
    return at;
}

/* The sizes of a call of the gate. tokens: number of tokens. block: maximum number of tokens in
 * a block. blocks: number of blocks. deciding: epic_gate_args.deciding_tokens
 * (backend/ops.h). */
typedef struct gate_tokens {
    int64_t tokens, block, blocks, deciding;
} gate_tokens;

static inline int64_t gate_larger_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Returns the size in bytes of the workspace in forward: the list of tiles, and after it the
 * larger of the partial sums and the components. */
static inline int64_t gate_forward_bytes(const gate_tokens *t, int64_t hidden, int64_t columns,
                                         bool is_invariant)
{
    const bool splits = is_invariant || gate_is_large(t->deciding, columns, hidden);
    const int64_t cut =
        experts_tiles_bytes(t->tokens) +
        gate_parts_bytes(t->tokens, t->block, hidden, columns, false, is_invariant);
    const int32_t slices = is_invariant ? gate_component_slices(hidden, columns) : 1;
    const int64_t components =
        gate_components_of(t->tokens, t->tokens, columns, hidden, slices).end;
    return splits ? gate_larger_of(cut, components) : cut;
}

/* Returns the size in bytes of the workspace in backward. The gradients of w_gate and of x are
 * computed one after the other, in the same memory. */
static inline int64_t gate_backward_bytes(const gate_tokens *t, int64_t hidden, int64_t columns,
                                          bool is_invariant)
{
    const bool splits_rows = is_invariant || gate_is_large(t->deciding, columns, hidden);
    const bool splits_weight = gate_is_large(hidden, columns, t->deciding);
    int64_t bytes = experts_tiles_bytes(t->tokens), components;
    if (t->blocks > 1) {
        bytes = gate_leaves_of(t->tokens, t->block, t->blocks, hidden, columns, false).end;
        components = gate_leaves_of(t->tokens, t->block, t->blocks, hidden, columns, true).end;
    } else {
        bytes += gate_parts_bytes(t->tokens, t->block, hidden, columns, true, is_invariant);
        components = gate_components_of(t->tokens, hidden, columns, t->block, 1).end;
    }
    if (splits_weight) bytes = gate_larger_of(bytes, components);
    if (splits_rows)
        bytes = gate_larger_of(bytes, gate_pairs_of(t->tokens, hidden, columns).end);
    return bytes;
}

#endif
