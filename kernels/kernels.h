/* SPDX-License-Identifier: Apache-2.0 */
/* The host's arithmetic on rows: plain loops that define the bits of every sum in EPIC. CUDA
 * kernels compute the same bits.
 *
 * A row is n elements of an epic_type. EPIC_F64 rows are computed in float64, all others in
 * float32. "Rounded" means rounded to nearest even, once. Subnormals and -0 are kept. Rows need
 * the alignment of their elements only. Sources and results must not overlap unless a comment
 * allows it. Any thread may call these functions. */
#ifndef EPIC_KERNELS_H
#define EPIC_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "epic/epic.h"

#define HOST_DOT_BLOCK 1024 /* number of elements in a block of the dot product */

#define HOST_PRODUCT_DEPTH 256 /* number of terms in a chunk of a sum in host_kernels.product */
/* number of floats of memory that host_kernels.product needs: 448 KB */
#define HOST_PRODUCT_MEMORY ((384 + 64) * HOST_PRODUCT_DEPTH)
/* With at most this many rows of A, and B not transposed, the product reads B in place. Other
 * products first copy B to contiguous memory, which takes longer than few rows save. */
#define HOST_FEW_ROWS 16
/* number of floats of memory that a product with at most HOST_FEW_ROWS rows needs: 48 KB */
#define HOST_FEW_MEMORY ((HOST_FEW_ROWS + 32) * HOST_PRODUCT_DEPTH)

/* A product of matrices: C [m, n] = op(A) op(B), or C += op(A) op(B) if `add` is set. op(A) is
 * [m, k], and op(B) is [k, n]. A is stored as [m, k] or, if transpose_a is set, as [k, m]. B is
 * stored as [k, n] or, if transpose_b is set, as [n, k]. lda, ldb and ldc are the distances, in
 * elements, from one stored row to the next.
 *
 * C has float32 elements. A and B have elements of a_type and b_type: EPIC_F32, or also
 * EPIC_BF16 if m is at most HOST_FEW_ROWS and no matrix is transposed. `memory` has
 * HOST_PRODUCT_MEMORY floats, which the product overwrites. HOST_FEW_MEMORY floats suffice if m
 * is at most HOST_FEW_ROWS. */
typedef struct host_product {
    int64_t m, n, k;
    const void *a;
    int64_t lda;
    const void *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    epic_type a_type, b_type;
    bool transpose_a, transpose_b, add;
    float *memory;
} host_product;

/* One variant of the row functions, compiled for one kind of processor. */
typedef struct host_kernels {
    const char *name; /* "generic", "avx2" or "avx512"; printed by epic-info */
    bool has_vectors; /* true: the loops use SIMD instructions; false: "generic" */

    /* Copies n bytes. Writes long rows with non-temporal stores, which bypass the caches and
     * need fence_copies(). */
    void (*copy)(void *to, const void *from, size_t n);
    /* Makes all earlier copies of this thread visible before its later stores. Call it after
     * the last copy(), before another thread or process is notified. */
    void (*fence_copies)(void);

    /* Computes out = sum of weights[i] * rows[i], for i ascending. The first product is rounded
     * to float32; the others are added by fused multiply-adds. The sum is rounded to out_type,
     * which is `type` or EPIC_F32 (EPIC_F64 with EPIC_F64). If weights is NULL, all weights are
     * 1. If num_rows is 0, out is +0. */
    void (*partial)(void *out, epic_type out_type, const void *const *rows,
                    const float *weights, int num_rows, epic_type type, int64_t n);

    /* Computes out = ((rows[0] + rows[1]) + rows[2]) + ..., in float32, rounded to out_type at
     * the end. With one row, out is that row, rounded; with none, +0. out may be one of the
     * rows. */
    void (*add)(void *out, epic_type out_type, const void *const *rows, int num_rows,
                epic_type type, int64_t n);

    /* Computes out = w * row, rounded to float32, then to `type`. */
    void (*scale)(void *out, const void *row, float w, epic_type type, int64_t n);

    /* Adds n more products to *sum, a dot product of epic_combine_backward. `first`: the first
     * call for the row, in which *sum is not read. n must be a multiple of HOST_DOT_BLOCK,
     * except in the last call for a row. EPIC_F64 rows are added in float64. */
    void (*dot)(double *sum, bool first, const void *a, const void *b, epic_type type,
                int64_t n);

    /* Multiply each element of the row by w, round to float32, and quantize the products. Store
     * n e4m3 bytes to q, and one scale per block to `scales`: ceil(n / 128) float32 or ceil(n /
     * 32) e8m0. The addresses may have any alignment. */
    void (*quantize_1x128)(void *q, void *scales, const void *row, float w, epic_type type,
                           int64_t n);
    void (*quantize_1x32)(void *q, void *scales, const void *row, float w, epic_type type,
                          int64_t n);

    /* Multiplies matrices. The bits of an element of C depend only on its row of op(A) and its
     * column of op(B), not on m and n. host/product.c defines the order of additions. */
    void (*product)(const host_product *product);

    /* Convert one element from or to `type`. For tests and slow paths. */
    double (*to_double)(const void *element, epic_type type);
    void (*from_float)(void *element, epic_type type, float x);
} host_kernels;

/* Returns the fastest variant for this processor, never NULL. Any thread may call it. */
const host_kernels *host_kernels_get(void);

/* Stores all variants that this build has and this processor supports to `out`, the slowest
 * first. Returns how many there are. All of them compute the same bits. */
int host_kernels_all(const host_kernels *out[4]);

/* Returns the size in bytes of an element; 0 for EPIC_BYTES and unknown types. */
size_t epic_type_bytes(uint32_t type);

#endif
