/* SPDX-License-Identifier: Apache-2.0 */
/* GEMMs with plain loops, for machines without OpenBLAS. The inner loops run along contiguous
 * memory, so that compilers can vectorize them. plain_f32.c and plain_f64.c include this file,
 * with REAL defined as float or double. */
#include <string.h>

#include "experts/blas.h"

static void add_row(REAL *out, REAL x, const REAL *row, int64_t n)
{
    for (int64_t j = 0; j < n; j++) out[j] += x * row[j];
}

#define DOT_LANES 16 /* number of independent partial sums in a dot product */

/* Returns the dot product of two rows of n elements. The DOT_LANES partial sums are
 * independent, so compilers can vectorize them without changing the order of additions. */
static REAL dot_rows(const REAL *a, const REAL *b, int64_t n)
{
    REAL lanes[DOT_LANES] = {0};
    REAL sum = 0;
    int64_t i = 0;
    for (; i + DOT_LANES <= n; i += DOT_LANES)
        for (int lane = 0; lane < DOT_LANES; lane++) lanes[lane] += a[i + lane] * b[i + lane];
    for (; i < n; i++) sum += a[i] * b[i];
    for (int lane = 0; lane < DOT_LANES; lane++) sum += lanes[lane];
    return sum;
}

void OF(gemm_plain)(const gemm *g)
{
    const REAL *a = g->a;
    const REAL *b = g->b;
    for (int64_t i = 0; i < g->m; i++) {
        REAL *c = (REAL *)g->c + i * g->ldc;
        if (!g->add) memset(c, 0, (size_t)g->n * sizeof *c);
        if (g->transpose_b)
            for (int64_t j = 0; j < g->n; j++)
                c[j] += dot_rows(a + i * g->lda, b + j * g->ldb, g->k);
        else
            for (int64_t l = 0; l < g->k; l++)
                add_row(c, g->transpose_a ? a[l * g->lda + i] : a[i * g->lda + l],
                        b + l * g->ldb, g->n);
    }
}
