/* SPDX-License-Identifier: Apache-2.0 */
/* The host's arithmetic on rows: plain loops that define the bits of every sum in EPIC.
 *
 * A row is n elements of an epic_type.  Everything is computed in float32, EPIC_F64 rows in
 * float64; rounding is to nearest even, once, where a comment says "rounded"; subnormals and -0
 * are kept.  Rows need no alignment beyond their element's.  Sources and results do not overlap
 * unless a comment allows it. */
#ifndef EPIC_KERNELS_H
#define EPIC_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

#define HOST_DOT_BLOCK 1024 /* elements of a block of the dot product */

typedef struct host_kernels {
    const char *name; /* "generic", "avx2", "avx512": for epic-info */

    /* Copies n bytes; past the caches when that pays. */
    void (*copy)(void *to, const void *from, size_t n);
    void (*fence_copies)(void); /* after the last copy, before others are told */

    /* out = sum of weights[i] * rows[i], i ascending, by fused multiply-add from the first
     * product (itself rounded to float32), rounded to out_type.  weights NULL: all 1.
     * num_rows 0: +0.  out_type is type or EPIC_F32 (EPIC_F64 with EPIC_F64). */
    void (*partial)(void *out, epic_type out_type, const void *const *rows,
                    const float *weights, int num_rows, epic_type type, int64_t n);

    /* out = ((rows[0] + rows[1]) + rows[2]) + ..., in float32, rounded to out_type at the end.
     * One row: that row, rounded.  num_rows 0: +0.  out may be one of the rows. */
    void (*add)(void *out, epic_type out_type, const void *const *rows, int num_rows,
                epic_type type, int64_t n);

    /* out = w * row, the product rounded to float32, then to type. */
    void (*scale)(void *out, const void *row, float w, epic_type type, int64_t n);

    /* The dot product of epic_combine_backward.  *sum holds the sum of the blocks before, and is
     * replaced by the sum after; first: there are none before.  n is a multiple of
     * HOST_DOT_BLOCK except for the last piece of a row.  In float64 for EPIC_F64. */
    void (*dot)(double *sum, bool first, const void *a, const void *b, epic_type type,
                int64_t n);

    /* Quantizes x = w * row (product rounded to float32): n e4m3 bytes, and ceil(n/128) float32
     * or ceil(n/32) e8m0 scales.  scales needs no alignment. */
    void (*quantize_1x128)(void *q, void *scales, const void *row, float w, epic_type type,
                           int64_t n);
    void (*quantize_1x32)(void *q, void *scales, const void *row, float w, epic_type type,
                          int64_t n);

    /* One element, for tests and slow paths. */
    double (*to_double)(const void *element, epic_type type);
    void (*from_float)(void *element, epic_type type, float x);
} host_kernels;

/* The best for this processor; chosen once, thread-safe, never NULL. */
const host_kernels *host_kernels_get(void);

/* Every variant this build has and this processor runs, ascending; returns how many.  The
 * results of all of them have the same bits. */
int host_kernels_all(const host_kernels *out[4]);

/* Bytes of an element; 0 for EPIC_BYTES and unknown types. */
size_t epic_type_bytes(uint32_t type);

#endif
