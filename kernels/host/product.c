/* SPDX-License-Identifier: Apache-2.0 */
/* Products of float32 matrices, and of bfloat16 matrices with few rows. The bits of an element
 * depend only on its row of A and its column of B. Libraries such as OpenBLAS do not promise
 * this, because they may choose another kernel if the number of rows is different. C [m, n] is
 * op(A) [m, k] times op(B) [k, n] (host_product in kernels.h).
 *
 * The order of additions: an element of C is a sum over l from 0 to k - 1. This sum is divided
 * into chunks of HOST_PRODUCT_DEPTH terms. The sum of a chunk starts at +0 and adds its
 * products by fused multiply-adds, by ascending l. The sums of the chunks are added in
 * ascending order to the sum of the first chunk, or to C if `add` is set. Zeros that extend
 * rows of A and columns of B do not change the bits, except that a -0 from an underflow may
 * become +0. Every variant of this file, every block size and every processor computes the same
 * bits.
 *
 * A bfloat16 number is converted to float32, without rounding, before it is multiplied.
 *
 * The loops follow Goto's algorithm, in the caller's memory:
 *   for each chunk of the sum
 *     for each block of BLOCK_ROWS rows      packed in `left`, in the L2 cache
 *       for each group of panels of columns  packed in `right`, a panel in the L1 cache
 *         for each panel, for each tile        a tile of sums in registers */
#include "lanes.h"
#include "variant.h"

#if LANES == 16
#define TILE_ROWS 12
#define VECTORS 2
#define STEPS 8
#define FEW_VECTORS 3
#elif LANES == 8
#define TILE_ROWS 6
#define VECTORS 2
#define STEPS 4
#define FEW_VECTORS 2
#else
#define TILE_ROWS 4
#define VECTORS 8
#define STEPS 4
#define FEW_VECTORS 2
#endif
#define PANEL (VECTORS * LANES)
/* columns of B that are packed (copied to contiguous memory) at a time: several panels, because
 * copying longer parts of a row of B is faster */
#define GROUP_COLUMNS 64
#define BLOCK_ROWS 384 /* a multiple of every TILE_ROWS */
/* Products with at most HOST_FEW_ROWS rows read B in place. They read STEPS rows of B at the
 * same time, and keep FEW_VECTORS vectors of each of these rows in registers. The sums, at most
 * FEW_SUMS floats, stay in the first-level cache. */
#define FEW_SUMS (32 * HOST_PRODUCT_DEPTH)

/* Part of a product: rows [first_row, first_row + rows) of op(A), and one chunk of the sum: the
 * terms l = `first` to first + depth - 1. */
typedef struct part {
    const host_product *p;
    int64_t first_row, rows, first, depth;
    bool adds; /* true: add to C; false: overwrite C */
} part;

INLINE const float *left_at(const host_product *p, int64_t row, int64_t l)
{
    return (const float *)p->a + (p->transpose_a ? l * p->lda + row : row * p->lda + l);
}

/* Copies the rows of a part of op(A) to out, as tiles [depth, TILE_ROWS]. Fills the last tile
 * up with zeros. */
static void pack_left(const part *t, float *out)
{
    for (int64_t tile = 0; tile < t->rows; tile += TILE_ROWS, out += TILE_ROWS * t->depth) {
        const int64_t rows = t->rows - tile < TILE_ROWS ? t->rows - tile : TILE_ROWS;
        if (rows < TILE_ROWS) memset(out, 0, (size_t)(TILE_ROWS * t->depth) * sizeof *out);
        if (t->p->transpose_a) {
            const float *from = left_at(t->p, t->first_row + tile, t->first);
            for (int64_t l = 0; l < t->depth; l++, from += t->p->lda)
                if (rows == TILE_ROWS)
                    memcpy(out + l * TILE_ROWS, from, TILE_ROWS * sizeof *out);
                else
                    memcpy(out + l * TILE_ROWS, from, (size_t)rows * sizeof *out);
            continue;
        }
        for (int64_t i = 0; i < rows; i++) {
            const float *from = left_at(t->p, t->first_row + tile + i, t->first);
            for (int64_t l = 0; l < t->depth; l++) out[l * TILE_ROWS + i] = from[l];
        }
    }
}

/* Transposes a square of LANES x LANES floats. Adjacent rows are from_row floats apart in
 * `from`, and to_row floats apart in `to`. */
INLINE void transpose_square(float *to, int64_t to_row, const float *from, int64_t from_row)
{
#if LANES >= 8
    for (int part = 0; part < LANES / 8 * (LANES / 8); part++) {
        const int down = part / (LANES / 8) * 8, across = part % (LANES / 8) * 8;
        __m256 r[8], s[8];
        for (int i = 0; i < 8; i++)
            r[i] = _mm256_loadu_ps(from + (down + i) * from_row + across);
        for (int i = 0; i < 4; i++) {
            s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        /* r[i]: columns i % 4 and i % 4 + 4, of rows 0 to 3 if i < 4, otherwise of rows 4 to
         * 7 */
        for (int i = 0; i < 8; i++) {
            const __m256 a = s[i / 4 * 4 + i % 4 / 2], b = s[i / 4 * 4 + i % 4 / 2 + 2];
            r[i] = i % 2 ? _mm256_shuffle_ps(a, b, 0xee) : _mm256_shuffle_ps(a, b, 0x44);
        }
        for (int i = 0; i < 4; i++) {
            float *out = to + (across + i) * to_row + down;
            _mm256_storeu_ps(out, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
            _mm256_storeu_ps(out + 4 * to_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
        }
    }
#else
    (void)to_row, (void)from_row;
    *to = *from;
#endif
}

/* Copies columns [column, column + count) of a chunk of op(B), at most GROUP_COLUMNS, to out,
 * as panels [depth, PANEL]. Fills the last panel up with zeros. */
static void pack_right(const part *t, int64_t column, int64_t count, float *out)
{
    const host_product *p = t->p;
    const int64_t whole = count / PANEL * PANEL, step = PANEL * t->depth;
    if (whole < count) memset(out + whole * t->depth, 0, (size_t)step * sizeof *out);
    if (!p->transpose_b) {
        const float *from = (const float *)p->b + t->first * p->ldb + column;
        for (int64_t l = 0; l < t->depth; l++, from += p->ldb, out += PANEL) {
            /* memcpy() is faster with a constant size */
            for (int64_t j = 0; j < whole; j += PANEL)
                memcpy(out + j * t->depth, from + j, PANEL * sizeof *out);
            memcpy(out + whole * t->depth, from + whole, (size_t)(count - whole) * sizeof *out);
        }
        return;
    }
    for (int64_t j = 0; j < count; j += LANES) {
        const float *from = (const float *)p->b + (column + j) * p->ldb + t->first;
        float *to = out + j / PANEL * step + j % PANEL;
        const int64_t columns = count - j < LANES ? count - j : LANES;
        int64_t l = 0;
        for (; columns == LANES && l + LANES <= t->depth; l += LANES)
            transpose_square(to + l * PANEL, PANEL, from + l, p->ldb);
        for (; l < t->depth; l++)
            for (int64_t i = 0; i < columns; i++) to[l * PANEL + i] = from[i * p->ldb + l];
    }
}

/* Computes a tile of C, at `c`: the product of the packed tile `a` [depth, TILE_ROWS] of op(A)
 * and the packed panel `b` [depth, PANEL] of op(B). Stores the first `stored` rows and `count`
 * columns. ldc is the distance in floats between two rows of `c`. `adds`: see struct part. */
INLINE void multiply_tile(const float *a, const float *b, int64_t depth, float *c, int64_t ldc,
                          int64_t stored, int64_t count, bool adds)
{
    enum { rows = TILE_ROWS, vectors = VECTORS };
    lanes sum[TILE_ROWS][VECTORS];
    /* The tile of C is often not in the caches. Start to load it before the loops. */
    for (int i = 0; i < rows && i < stored; i++)
        for (int v = 0; v < vectors && v * LANES < count; v++)
            __builtin_prefetch(c + i * ldc + v * LANES, 1);
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] = lanes_of(0);
    for (int64_t l = 0; l < depth; l++, a += TILE_ROWS, b += PANEL) {
        lanes right[VECTORS];
        for (int v = 0; v < vectors; v++) right[v] = load_f32(b + v * LANES);
        for (int i = 0; i < rows; i++) {
            const lanes left = lanes_of(a[i]);
            for (int v = 0; v < vectors; v++) sum[i][v] = lanes_fma(left, right[v], sum[i][v]);
        }
    }
    for (int i = 0; i < rows && i < stored; i++, c += ldc)
        for (int v = 0; v < vectors && v * LANES < count; v++) {
            float *to = c + v * LANES;
            const int64_t left = count - v * LANES;
            if (left >= LANES)
                store_f32(to, adds ? lanes_add(load_f32(to), sum[i][v]) : sum[i][v]);
            else
                store_tail(to, EPIC_F32, 0, left,
                           adds ? lanes_add(load_tail(to, EPIC_F32, 0, left), sum[i][v])
                                : sum[i][v]);
        }
}

/* Multiplies the rows of a part, packed in `left`, by one packed panel `right`, which contains
 * the `count` columns of op(B) from `column` on. */
static void multiply_panel(const part *t, const float *left, const float *right, int64_t column,
                           int64_t count)
{
    const host_product *p = t->p;
    for (int64_t tile = 0; tile < t->rows; tile += TILE_ROWS, left += TILE_ROWS * t->depth) {
        float *c = p->c + (t->first_row + tile) * p->ldc + column;
        const int64_t rows = t->rows - tile;
        multiply_tile(left, right, t->depth, c, p->ldc, rows, count, t->adds);
    }
}

/* Multiplies the rows of a part, packed in `left`, by a group of packed panels at `right`. The
 * group contains the `count` columns of op(B) from `column` on. */
static void multiply_group(const part *t, const float *left, const float *right, int64_t column,
                           int64_t count)
{
    for (int64_t j = 0; j < count; j += PANEL)
        multiply_panel(t, left, right + j * t->depth, column + j,
                       count - j < PANEL ? count - j : PANEL);
}

/* ------------------------------------------------------------------------ few rows ---- */

/* Copies the elements of op(A) that belong to the chunk of `t` to out [m, depth] as float32. */
static void copy_few_left(const part *t, float *out)
{
    const host_product *p = t->p;
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t l = 0; l < t->depth; l++) {
            const int64_t at =
                p->transpose_a ? (t->first + l) * p->lda + i : i * p->lda + t->first + l;
            out[i * t->depth + l] = p->a_type == EPIC_BF16
                                        ? float_of_bf16(((const uint16_t *)p->a)[at])
                                        : ((const float *)p->a)[at];
        }
}

/* Adds the terms a[i][s] * right[s], for s from 0 to steps - 1, to the first `vectors` vectors
 * of each row i of `sums`. `a`: elements of the copied rows of op(A), t->depth floats apart.
 * a[i][s] is the element of row i that belongs to row s of B. right[s]: vectors of row s of B.
 * sums_row: distance in floats between two rows of `sums`. */
INLINE void add_products(const part *t, float *sums, int64_t sums_row, const float *a,
                         lanes right[STEPS][FEW_VECTORS], int steps, int vectors)
{
    for (int64_t i = 0; i < t->rows; i++, sums += sums_row, a += t->depth) {
        lanes sum[FEW_VECTORS];
        for (int v = 0; v < vectors; v++) sum[v] = load_f32(sums + v * LANES);
        for (int s = 0; s < steps; s++) {
            const lanes left = lanes_of(a[s]);
            for (int v = 0; v < vectors; v++) sum[v] = lanes_fma(left, right[s][v], sum[v]);
        }
        for (int v = 0; v < vectors; v++) store_f32(sums + v * LANES, sum[v]);
    }
}

/* Adds the terms of STEPS rows of B to the first `count` columns of the sums. `a`, sums_row: as
 * in add_products(). `b`: the first of the rows of B. `count`: a multiple of FEW_VECTORS *
 * LANES. `type`: the type of B. */
INLINE void add_few_rows(const part *t, float *sums, int64_t sums_row, const float *a,
                         const char *b, int64_t count, epic_type type)
{
    const int64_t row_bytes = t->p->ldb * bytes_of(type);
    for (int64_t j = 0; j < count; j += FEW_VECTORS * LANES) {
        lanes right[STEPS][FEW_VECTORS];
        for (int s = 0; s < STEPS; s++) {
            /* load the same columns of a row of B that the next call adds */
            __builtin_prefetch(b + (s + STEPS) * row_bytes + j * bytes_of(type));
            for (int v = 0; v < FEW_VECTORS; v++)
                right[s][v] = load_lanes(b + s * row_bytes, type, j + v * LANES);
        }
        add_products(t, sums + j, sums_row, a, right, STEPS, FEW_VECTORS);
    }
}

/* Adds the terms of one row of B, at `b`, to the first `count` columns of the sums. The other
 * arguments are as in add_few_rows(). */
INLINE void add_one_row(const part *t, float *sums, int64_t sums_row, const float *a,
                        const char *b, int64_t count, epic_type type)
{
    for (int64_t j = 0; j < count; j += LANES) {
        lanes right[STEPS][FEW_VECTORS];
        right[0][0] =
            count - j < LANES ? load_tail(b, type, j, count - j) : load_lanes(b, type, j);
        add_products(t, sums + j, sums_row, a, right, 1, 1);
    }
}

/* Computes the sums of one chunk for `count` columns of C, from `column` on, and adds them to C
 * (or stores them, see part.adds). `left`: the copied rows of op(A). `sums`: memory for [rows,
 * sums_row] floats. `type`: the type of B. */
INLINE void multiply_few_columns(const part *t, const float *left, float *sums,
                                 int64_t sums_row, int64_t column, int64_t count,
                                 epic_type type)
{
    const host_product *p = t->p;
    const char *b = element_at(p->b, type, t->first * p->ldb + column);
    const int64_t row_bytes = p->ldb * bytes_of(type);
    const int64_t wide = count / (FEW_VECTORS * LANES) * (FEW_VECTORS * LANES);
    const int64_t steps = t->depth / STEPS * STEPS;
    memset(sums, 0, (size_t)(t->rows * sums_row) * sizeof *sums);
    for (int64_t l = 0; l < steps; l += STEPS)
        add_few_rows(t, sums, sums_row, left + l, b + l * row_bytes, wide, type);
    /* Add what the loop above left out: the columns after the first `wide` ones, and the last
     * rows of B. */
    for (int64_t l = 0; l < t->depth; l++) {
        const int64_t done = l < steps ? wide : 0;
        add_one_row(t, sums + done, sums_row, left + l,
                    b + l * row_bytes + done * bytes_of(type), count - done, type);
    }
    for (int64_t i = 0; i < t->rows; i++, sums += sums_row) {
        float *c = p->c + i * p->ldc + column;
        for (int64_t j = 0; j < count; j++) c[j] = t->adds ? c[j] + sums[j] : sums[j];
    }
}

/* Multiplies two matrices. Requires that A has at most HOST_FEW_ROWS rows. `type`: type of
 * B. */
INLINE void multiply_few(const host_product *p, epic_type type)
{
    float *const left = p->memory, *const sums = left + HOST_FEW_ROWS * HOST_PRODUCT_DEPTH;
    const int64_t sums_row = FEW_SUMS / p->m / (FEW_VECTORS * LANES) * (FEW_VECTORS * LANES);
    for (int64_t first = 0; first < p->k; first += HOST_PRODUCT_DEPTH) {
        part t = {.p = p, .rows = p->m, .first = first, .adds = p->add || first > 0};
        t.depth = p->k - first < HOST_PRODUCT_DEPTH ? p->k - first : HOST_PRODUCT_DEPTH;
        copy_few_left(&t, left);
        for (int64_t column = 0; column < p->n; column += sums_row) {
            const int64_t rest = p->n - column;
            multiply_few_columns(&t, left, sums, sums_row, column,
                                 rest < sums_row ? rest : sums_row, type);
        }
    }
}

/* Implements host_kernels.product. */
void PRODUCT_OF(VARIANT)(const host_product *p)
{
    float *const left = p->memory, *const right = left + BLOCK_ROWS * HOST_PRODUCT_DEPTH;
    _Static_assert((BLOCK_ROWS + GROUP_COLUMNS) * HOST_PRODUCT_DEPTH == HOST_PRODUCT_MEMORY,
                   "HOST_PRODUCT_MEMORY must fit the blocks");
    _Static_assert(HOST_FEW_ROWS * HOST_PRODUCT_DEPTH + FEW_SUMS == HOST_FEW_MEMORY,
                   "HOST_FEW_MEMORY must fit the rows and the sums");
    if (p->m <= HOST_FEW_ROWS && !p->transpose_b) {
        if (p->b_type == EPIC_BF16)
            multiply_few(p, EPIC_BF16);
        else
            multiply_few(p, EPIC_F32);
        return;
    }
    for (int64_t first = 0; first < p->k; first += HOST_PRODUCT_DEPTH) {
        part t = {.p = p, .first = first, .adds = p->add || first > 0};
        t.depth = p->k - first < HOST_PRODUCT_DEPTH ? p->k - first : HOST_PRODUCT_DEPTH;
        for (int64_t row = 0; row < p->m; row += BLOCK_ROWS) {
            t.first_row = row;
            t.rows = p->m - row < BLOCK_ROWS ? p->m - row : BLOCK_ROWS;
            pack_left(&t, left);
            for (int64_t column = 0; column < p->n; column += GROUP_COLUMNS) {
                const int64_t rest = p->n - column;
                const int64_t count = rest < GROUP_COLUMNS ? rest : GROUP_COLUMNS;
                pack_right(&t, column, count, right);
                multiply_group(&t, left, right, column, count);
            }
        }
    }
}
