/* SPDX-License-Identifier: Apache-2.0 */
/* Compares sums and dot products of every variant of the host kernels with plain loops, bit
 * for bit (any NaN equals any NaN), and these loops with float64. */
#include "unit/kernels.h"

/* -------------------------------------------------------------------------------- sums ---- */

static double true_partial(const void *const *rows, const float *weights, int num_rows,
                           epic_type type, int64_t i)
{
    if (num_rows == 0) return 0.0;
    if (type == EPIC_F64) {
        double sum = (double)weights[0] * get(rows[0], type, i);
        for (int r = 1; r < num_rows; r++)
            sum = fma((double)weights[r], get(rows[r], type, i), sum);
        return sum;
    }
    float sum = weights[0] * (float)get(rows[0], type, i);
    for (int r = 1; r < num_rows; r++)
        sum = fmaf(weights[r], (float)get(rows[r], type, i), sum);
    return (double)sum;
}

static double true_sum(const void *const *rows, int num_rows, epic_type type, int64_t i)
{
    if (num_rows == 0) return 0.0;
    if (type == EPIC_F64) {
        double sum = get(rows[0], type, i);
        for (int r = 1; r < num_rows; r++) sum += get(rows[r], type, i);
        return sum;
    }
    float sum = (float)get(rows[0], type, i);
    for (int r = 1; r < num_rows; r++) sum += (float)get(rows[r], type, i);
    return (double)sum;
}

static double rounded(double x, epic_type type)
{
    const format *f = format_of(type);
    return f ? decode(f, encode(f, (float)x)) : x;
}

static void check_near(const char *what, const void *const *rows, const float *weights,
                       int num_rows, epic_type type, int64_t n, const double *got)
{
    for (int64_t i = 0; i < n; i++) {
        double sum = 0.0, sizes = 0.0;
        for (int r = 0; r < num_rows; r++) {
            const double x = (weights ? (double)weights[r] : 1.0) * get(rows[r], type, i);
            sum += x;
            sizes += fabs(x);
        }
        /* Each of num_rows steps rounds a sum no larger than `sizes` by at most 2^-24 of it. */
        if (!(fabs(got[i] - sum) <= (num_rows + 1) * sizes * 0x1p-24)) fail(what, type, n, i);
    }
}

/* Rows to sum. */
typedef struct sum_case {
    const host_kernels *k;
    const void *rows[MAX_ROWS];
    float weights[MAX_ROWS];
    int num_rows;
    epic_type type;
    epic_type out_type;
    int64_t n;
} sum_case;

static sum_case sum_case_open(const host_kernels *k, epic_type type, epic_type out_type,
                              kind kind)
{
    sum_case c = {.k = k, .type = type, .out_type = out_type, .n = random_n()};
    c.num_rows = (int)(next_random() % (MAX_ROWS + 1));
    for (int r = 0; r < c.num_rows; r++) {
        buffer_fill(&sources[r], type, c.n, kind);
        c.rows[r] = sources[r].row;
        c.weights[r] = (float)random_value(kind == ANY_BITS ? ANY_BITS : PLAIN, EPIC_F32);
    }
    return c;
}

/* Partials have the rows' type or F32. Only add() rounds F32 rows to a narrower type. */
static bool has_partial(const sum_case *c)
{
    return c->type != EPIC_F32 || c->out_type == EPIC_F32;
}

static void check_partial(const sum_case *c, bool tolerance)
{
    static double got[MAX_N];
    buffer_clear(&out);
    c->k->partial(out.row, c->out_type, c->rows, c->weights, c->num_rows, c->type, c->n);
    for (int64_t i = 0; i < c->n; i++) {
        const double truth = true_partial(c->rows, c->weights, c->num_rows, c->type, i);
        got[i] = get(out.row, c->out_type, i);
        if (!same(got[i], rounded(truth, c->out_type))) fail("partial", c->type, c->n, i);
    }
    if (!buffer_kept(&out, c->n * (int64_t)epic_type_bytes(c->out_type)))
        fail("partial (outside)", c->type, c->n, -1);
    if (tolerance)
        check_near("partial (float64)", c->rows, c->weights, c->num_rows, c->type, c->n, got);
}

static void check_add(const sum_case *c, bool tolerance)
{
    static double got[MAX_N];
    buffer_clear(&out);
    buffer_clear(&out2);
    c->k->add(out.row, c->out_type, c->rows, c->num_rows, c->type, c->n);
    if (has_partial(c))
        c->k->partial(out2.row, c->out_type, c->rows, NULL, c->num_rows, c->type, c->n);
    for (int64_t i = 0; i < c->n; i++) {
        const double truth = rounded(true_sum(c->rows, c->num_rows, c->type, i), c->out_type);
        got[i] = get(out.row, c->out_type, i);
        if (!same(got[i], truth)) fail("add", c->type, c->n, i);
        if (has_partial(c) && !same(get(out2.row, c->out_type, i), truth))
            fail("partial of 1", c->type, c->n, i);
    }
    if (!buffer_kept(&out, c->n * (int64_t)epic_type_bytes(c->out_type)))
        fail("add (outside)", c->type, c->n, -1);
    if (tolerance) check_near("add (float64)", c->rows, NULL, c->num_rows, c->type, c->n, got);
}

/* Checks add() with `out` as one of the rows. */
static void check_add_in_place(const sum_case *c)
{
    if (c->type != c->out_type || c->num_rows == 0) return;
    char *into = sources[next_random() % (unsigned)c->num_rows].row;
    c->k->add(into, c->type, c->rows, c->num_rows, c->type, c->n);
    for (int64_t i = 0; i < c->n; i++)
        if (!same(get(out.row, c->type, i), get(into, c->type, i)))
            fail("add in place", c->type, c->n, i);
}

static void check_sums(const host_kernels *k, epic_type type, epic_type out_type, kind kind)
{
    const sum_case c = sum_case_open(k, type, out_type, kind);
    const bool tolerance = kind == PLAIN && out_type == EPIC_F32;
    if (has_partial(&c)) check_partial(&c, tolerance);
    check_add(&c, tolerance);
    check_add_in_place(&c);
}

static void check_scale(const host_kernels *k, epic_type type, kind kind)
{
    const int64_t n = random_n();
    const float w = (float)random_value(kind == ANY_BITS ? ANY_BITS : PLAIN, EPIC_F32);
    buffer_fill(&sources[0], type, n, kind);
    buffer_clear(&out);
    k->scale(out.row, sources[0].row, w, type, n);
    for (int64_t i = 0; i < n; i++) {
        const double x = get(sources[0].row, type, i);
        const double truth = type == EPIC_F64 ? (double)w * x : (double)(w * (float)x);
        if (!same(get(out.row, type, i), rounded(truth, type))) fail("scale", type, n, i);
    }
    if (!buffer_kept(&out, n * (int64_t)epic_type_bytes(type)))
        fail("scale (outside)", type, n, -1);
}

/* -------------------------------------------------------------------------------- dot ---- */

/* A term of a sum, which may be absent, in float32 or float64 arithmetic. */
typedef struct term {
    bool there;
    double x;
} term;

static term plus(term a, term b, bool wide)
{
    if (!a.there) return b;
    if (!b.there) return a;
    return (term){true, wide ? a.x + b.x : (double)((float)a.x + (float)b.x)};
}

static term true_block(const void *a, const void *b, epic_type type, int64_t at, int64_t n)
{
    const bool wide = type == EPIC_F64;
    term t[256];
    for (int64_t i = 0; i < 256; i++) {
        t[i] = (term){false, 0.0};
        for (int64_t j = at + i; j < at + 1024 && j < n; j += 256) {
            const double x = get(a, type, j), y = get(b, type, j);
            if (!t[i].there)
                t[i].x = wide ? x * y : (double)((float)x * (float)y);
            else
                t[i].x =
                    wide ? fma(x, y, t[i].x) : (double)fmaf((float)x, (float)y, (float)t[i].x);
            t[i].there = true;
        }
    }
    /* Adds like the lanes of a warp: each lane adds the value of the lane at that distance. */
    for (int distance = 4; distance > 0; distance /= 2)
        for (int i = 0; i < 256; i++)
            if ((i & distance) == 0) t[i] = plus(t[i], t[i + distance], wide);
    for (int distance = 16; distance > 0; distance /= 2)
        for (int g = 0; g < 32; g++)
            if ((g & distance) == 0) t[8 * g] = plus(t[8 * g], t[8 * (g + distance)], wide);
    return t[0];
}

static double true_dot(const void *a, const void *b, epic_type type, int64_t n)
{
    term sum = {false, 0.0};
    for (int64_t at = 0; at < n; at += 1024)
        sum = plus(sum, true_block(a, b, type, at, n), type == EPIC_F64);
    return sum.there ? sum.x : 0.0;
}

static void check_dot(const host_kernels *k, epic_type type, kind kind)
{
    const int64_t n = next_random() % 2 ? random_n() : (int64_t)(next_random() % MAX_N);
    const int64_t step = (int64_t)(1 + next_random() % 3) * HOST_DOT_BLOCK;
    buffer_fill(&sources[0], type, n, kind);
    buffer_fill(&sources[1], type, n, kind);
    const char *a = sources[0].row, *b = sources[1].row;
    double sum = 123.0, pieces = 123.0, near = 0.0, sizes = 0.0;
    k->dot(&sum, true, a, b, type, n);
    const double truth = true_dot(a, b, type, n);
    if (!same(sum, truth)) fail("dot", type, n, 0);

    const int64_t bytes = (int64_t)epic_type_bytes(type);
    for (int64_t at = 0; at == 0 || at < n; at += step)
        k->dot(&pieces, at == 0, a + at * bytes, b + at * bytes, type,
               n - at < step ? n - at : step);
    if (!same(pieces, truth)) fail("dot in pieces", type, n, 0);
    k->dot(&pieces, false, a, b, type, 0);
    if (!same(pieces, truth)) fail("dot of nothing more", type, n, 0);

    if (kind != PLAIN) return;
    for (int64_t i = 0; i < n; i++) {
        near += get(a, type, i) * get(b, type, i);
        sizes += fabs(get(a, type, i) * get(b, type, i));
    }
    /* A product passes at most 4 + 8 + 5 roundings of sums no larger than `sizes`. */
    if (!(fabs(sum - near) <= 20 * sizes * 0x1p-24)) fail("dot (float64)", type, n, 0);
}

/* -------------------------------------------------------------------------------- all ---- */

static void check_round(const host_kernels *k, kind kind)
{
    for (int t = 0; t < 4; t++) {
        const epic_type type = row_types[t];
        check_sums(k, type, type, kind);
        if (type != EPIC_F64) check_sums(k, type, EPIC_F32, kind);
        if (type != EPIC_F64) check_sums(k, EPIC_F32, type, kind);
        check_scale(k, type, kind);
        check_dot(k, type, kind);
    }
}

static void check_variant(const host_kernels *k)
{
    for (int i = 0; i < 60; i++)
        for (int kind = 0; kind < NUM_KINDS; kind++) check_round(k, (enum kind)kind);
}

int main(void)
{
    return kernels_check(check_variant);
}
