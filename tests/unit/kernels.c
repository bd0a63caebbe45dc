/* SPDX-License-Identifier: Apache-2.0 */
/* Every variant of the host kernels against plain loops, bit for bit (any NaN equals any NaN),
 * and the loops against float64.  The loops decode by arithmetic and round by searching all
 * values of a type, so they share nothing with what they judge. */
#include "kernels/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_N 5000
#define MAX_ROWS 9
#define SLACK 64 /* before and after every result: must stay as it was */
#define CANARY 0xa5

static int num_failures;
static const char *variant;

static void fail(const char *what, epic_type type, int64_t n, int64_t at)
{
    if (num_failures++ < 20)
        fprintf(stderr, "%s %s %s: n %lld: wrong at %lld\n", variant, what,
                epic_type_name(type), (long long)n, (long long)at);
}

static uint64_t next_random(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1du >> 11;
}

static float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* --------------------------------------------------------------- types, by arithmetic ---- */

typedef struct format {
    epic_type type;
    int exponent_bits;
    int mantissa_bits;
    uint32_t infinity; /* the first code above the finite ones */
    bool saturates;
} format;

static const format formats[] = {
    {EPIC_BF16, 8, 7, 0x7f80, false},
    {EPIC_F16, 5, 10, 0x7c00, false},
    {EPIC_E4M3, 4, 3, 0x7f, true},
};

static const format *format_of(epic_type type)
{
    for (int i = 0; i < 3; i++)
        if (formats[i].type == type) return &formats[i];
    return NULL;
}

static uint32_t sign_of(const format *f)
{
    return 1u << (f->exponent_bits + f->mantissa_bits);
}

/* The value of a code without sign; for `infinity` itself what would come next. */
static double size_of_code(const format *f, uint32_t code)
{
    const int bias = (1 << (f->exponent_bits - 1)) - 1;
    const int exponent = (int)(code >> f->mantissa_bits);
    const int mantissa = (int)(code & ((1u << f->mantissa_bits) - 1));
    if (exponent == 0) return ldexp(mantissa, 1 - bias - f->mantissa_bits);
    return ldexp(mantissa + (1 << f->mantissa_bits), exponent - bias - f->mantissa_bits);
}

static double decode(const format *f, uint32_t code)
{
    const uint32_t size = code & (sign_of(f) - 1);
    double x = size_of_code(f, size);
    if (size == f->infinity && !f->saturates)
        x = INFINITY;
    else if (size >= f->infinity)
        return NAN;
    return code & sign_of(f) ? -x : x;
}

/* The code nearest to x, by bisection over all of them; a tie goes to the even code. */
static uint32_t encode(const format *f, float x)
{
    if (isnan(x)) return f->saturates ? f->infinity : f->infinity + 1;
    const double size = fabs((double)x);
    const uint32_t sign = signbit(x) ? sign_of(f) : 0;
    uint32_t low = 0, high = f->infinity;
    if (size >= size_of_code(f, high)) low = high;
    while (high - low > 1 && low != high) {
        const uint32_t middle = (low + high) / 2;
        if (size_of_code(f, middle) <= size)
            low = middle;
        else
            high = middle;
    }
    if (low != high) {
        const double below = size - size_of_code(f, low), above = size_of_code(f, high) - size;
        if (above < below || (above == below && high % 2 == 0)) low = high;
    }
    if (f->saturates && low == f->infinity) low--;
    return sign | low;
}

static double get(const void *row, epic_type type, int64_t i)
{
    const char *from = (const char *)row + i * (int64_t)epic_type_bytes(type);
    float x;
    double wide;
    uint16_t narrow;
    uint8_t byte;
    switch (type) {
    case EPIC_F32:
        memcpy(&x, from, sizeof x);
        return (double)x;
    case EPIC_F64:
        memcpy(&wide, from, sizeof wide);
        return wide;
    case EPIC_E4M3:
        memcpy(&byte, from, sizeof byte);
        return decode(format_of(type), byte);
    default:
        memcpy(&narrow, from, sizeof narrow);
        return decode(format_of(type), narrow);
    }
}

static void put(void *row, epic_type type, int64_t i, double x)
{
    char *to = (char *)row + i * (int64_t)epic_type_bytes(type);
    const float single = (float)x;
    uint16_t narrow;
    switch (type) {
    case EPIC_F32:
        memcpy(to, &single, sizeof single);
        break;
    case EPIC_F64:
        memcpy(to, &x, sizeof x);
        break;
    default:
        narrow = (uint16_t)encode(format_of(type), single);
        memcpy(to, &narrow, sizeof narrow);
    }
}

static bool same(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && !signbit(a) == !signbit(b));
}

/* -------------------------------------------------------------------- inputs, results ---- */

typedef enum kind { PLAIN, SMALL, ANY_BITS, NUM_KINDS } kind;

static const double edges[] = {0.0,     -0.0,      1.0,      -1.0,    INFINITY, -INFINITY,
                               NAN,     0x1p-149,  0x1p-126, 0x1p127, 0x1p-133, -0x1p-24,
                               65504.0, 65520.0,   448.0,    464.0,   0x1p-9,   0x1p-10,
                               3.4e38,  -0x1p-148, 0x1p-14,  0x1p-6};

static double random_value(kind kind, epic_type type)
{
    const uint64_t r = next_random();
    const double unit = (double)(int64_t)(r % 2000001 - 1000000) / 1e6;
    if (kind == PLAIN) return unit * 2.0;
    if (kind == SMALL) return r >> 40 & 3 ? ldexp(unit, type == EPIC_F16 ? -20 : -135) : -0.0;
    if ((r >> 40) % 4 == 0) return edges[(r >> 44) % (sizeof edges / sizeof edges[0])];
    return (double)float_of_bits((uint32_t)r);
}

typedef struct buffer {
    unsigned char *memory;
    char *row; /* at any address */
} buffer;

static buffer buffer_open(void)
{
    buffer b = {malloc(MAX_N * 8 + 2 * SLACK + 16), NULL};
    if (!b.memory) {
        puts("skipped: no memory");
        exit(77);
    }
    return b;
}

static void buffer_clear(buffer *b)
{
    memset(b->memory, CANARY, MAX_N * 8 + 2 * SLACK + 16);
    b->row = (char *)b->memory + SLACK + next_random() % 16;
}

/* Nothing but `bytes` bytes of the row have been written. */
static bool buffer_kept(const buffer *b, int64_t bytes)
{
    for (int64_t i = 1; i <= SLACK; i++)
        if ((unsigned char)b->row[-i] != CANARY ||
            (unsigned char)b->row[bytes + i - 1] != CANARY)
            return false;
    return true;
}

static void buffer_fill(buffer *b, epic_type type, int64_t n, kind kind)
{
    buffer_clear(b);
    for (int64_t i = 0; i < n; i++) put(b->row, type, i, random_value(kind, type));
}

static buffer sources[MAX_ROWS], out, out2;

static const epic_type row_types[] = {EPIC_F32, EPIC_BF16, EPIC_F16, EPIC_F64};

static int64_t random_n(void)
{
    static const int64_t some[] = {0, 1, 2, 7, 8, 15, 16, 31, 33, 63, 64, 65, 127, 129, 1024};
    const uint64_t r = next_random();
    if (r % 2 == 0) return some[(r >> 8) % (sizeof some / sizeof some[0])];
    return (int64_t)((r >> 8) % (r % 16 == 1 ? MAX_N : 600));
}

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
        /* Each of num_rows steps rounds a sum no larger than `sizes` by 2^-24 of it. */
        if (!(fabs(got[i] - sum) <= (num_rows + 1) * sizes * 0x1p-24)) fail(what, type, n, i);
    }
}

/* Rows to be summed, in sources. */
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

/* A partial has the rows' type or F32; only add rounds F32 rows to something narrower. */
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

/* Into one of the rows; out has the sum already. */
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

/* A term of a sum that may be absent; adds as float32 does, or as float64. */
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
    /* As the lanes of a warp would: everybody adds its neighbour at that distance. */
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
    /* A product passes 4 + 8 + 5 roundings or fewer, of sums no larger than `sizes`. */
    if (!(fabs(sum - near) <= 20 * sizes * 0x1p-24)) fail("dot (float64)", type, n, 0);
}

/* --------------------------------------------------------------------------- quantize ---- */

static float true_scale_1x128(float max)
{
    const float scale = max / 448.0f;
    return scale == 0.0f ? 1.0f : scale;
}

/* The smallest power of two that keeps max at or below 448, found by trying. */
static int true_scale_1x32(float max)
{
    if (max == 0.0f) return 127;
    int byte = 0;
    while ((double)max > ldexp(448.0, byte - 127)) byte++;
    return byte;
}

static void check_quantized_block(const char *what, const float *x, int64_t count,
                                  const char *q, double scale, bool finite, int64_t n)
{
    const format *f = format_of(EPIC_E4M3);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t truth = finite ? encode(f, (float)((double)x[i] / scale)) : 0x7f;
        if ((uint8_t)q[i] != truth) fail(what, EPIC_E4M3, n, i);
    }
}

static void check_quantize(const host_kernels *k, epic_type type, kind kind, int block)
{
    const char *what = block == 128 ? "quantize 1x128" : "quantize 1x32";
    const int64_t n = random_n();
    const int64_t num_blocks = (n + block - 1) / block;
    const float w = next_random() % 2 ? 1.0f : (float)random_value(PLAIN, EPIC_F32);
    buffer_fill(&sources[0], type, n, kind);
    buffer_clear(&out);
    buffer_clear(&out2);
    if (block == 128)
        k->quantize_1x128(out.row, out2.row, sources[0].row, w, type, n);
    else
        k->quantize_1x32(out.row, out2.row, sources[0].row, w, type, n);
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t count = n - b * block < block ? n - b * block : block;
        float x[128], max = 0.0f, got = 0.0f;
        bool finite = true;
        for (int64_t i = 0; i < count; i++) {
            x[i] = w * (float)get(sources[0].row, type, b * block + i);
            finite = finite && isfinite(x[i]);
            max = fmaxf(max, fabsf(x[i]));
        }
        double scale = 1.0;
        if (block == 128) {
            memcpy(&got, out2.row + b * 4, sizeof got);
            scale = finite ? (double)true_scale_1x128(max) : NAN;
            if (!same((double)got, scale)) fail(what, EPIC_F32, n, b);
        } else {
            const int byte = finite ? true_scale_1x32(max) : 255;
            if ((uint8_t)out2.row[b] != byte) fail(what, EPIC_E8M0, n, b);
            scale = ldexp(1.0, byte - 127);
        }
        check_quantized_block(what, x, count, out.row + b * block, scale, finite, n);
    }
    if (!buffer_kept(&out, n) || !buffer_kept(&out2, num_blocks * (block == 128 ? 4 : 1)))
        fail(what, type, n, -1);
}

/* Blocks whose largest value sits where the scale changes. */
static void check_scale_edges(const host_kernels *k)
{
    for (int exponent = -149; exponent <= 127; exponent++)
        for (int step = -2; step <= 2; step++) {
            float max = ldexpf(1.75f, exponent), x[32] = {0.0f}, scale;
            for (int i = 0; i < abs(step); i++) max = nextafterf(max, step < 0 ? 0 : INFINITY);
            uint8_t q[32], byte;
            x[7] = -max;
            x[8] = max / 3;
            k->quantize_1x32(q, &byte, x, 1.0f, EPIC_F32, 32);
            const int truth = true_scale_1x32(max);
            if (byte != truth) fail("scale 1x32", EPIC_E8M0, exponent, step);
            check_quantized_block("edge 1x32", x, 32, (char *)q, ldexp(1, truth - 127), true,
                                  0);
            k->quantize_1x128(q, &scale, x, 1.0f, EPIC_F32, 32);
            if (scale != true_scale_1x128(max)) fail("scale 1x128", EPIC_F32, exponent, step);
            check_quantized_block("edge 1x128", x, 32, (char *)q, (double)scale, true, 0);
        }
}

/* ------------------------------------------------------------------------ conversions ---- */

static void check_narrow(const host_kernels *k, const format *f, float x)
{
    uint16_t code = 0;
    k->from_float(&code, f->type, x);
    if (!same(decode(f, code), decode(f, encode(f, x))))
        fail("from_float", f->type, (int64_t)code, (int64_t)encode(f, x));
    if (isnan(x) && f->type == EPIC_E4M3 && code != 0x7f) fail("NaN", f->type, code, 0);
}

/* Every code, the middle to the next and its two neighbours. */
static void check_format(const host_kernels *k, const format *f)
{
    for (uint32_t code = 0; code < 2 * sign_of(f); code++) {
        const uint16_t both = (uint16_t)code;
        if (!same(k->to_double(&both, f->type), decode(f, code)))
            fail("to_double", f->type, 0, code);
        const uint32_t size = code & (sign_of(f) - 1);
        check_narrow(k, f, (float)decode(f, code));
        if (size >= f->infinity) continue;
        double middle = (size_of_code(f, size) + size_of_code(f, size + 1)) / 2;
        if (code != size) middle = -middle;
        check_narrow(k, f, (float)middle);
        check_narrow(k, f, nextafterf((float)middle, INFINITY));
        check_narrow(k, f, nextafterf((float)middle, -INFINITY));
    }
    for (int i = 0; i < 100000; i++) check_narrow(k, f, float_of_bits((uint32_t)next_random()));
    for (int i = 0; i < 20000; i++)
        check_narrow(k, f, (float)random_value(i % 2 ? PLAIN : SMALL, f->type));
    check_narrow(k, f, INFINITY);
    check_narrow(k, f, -INFINITY);
}

static void check_wide(const host_kernels *k)
{
    for (int i = 0; i < 20000; i++) {
        const float x = float_of_bits((uint32_t)next_random());
        float single = 0.0f;
        double wide = 0.0;
        k->from_float(&single, EPIC_F32, x);
        k->from_float(&wide, EPIC_F64, x);
        if (!same((double)single, (double)x) || !same(wide, (double)x) ||
            !same(k->to_double(&single, EPIC_F32), (double)x) ||
            !same(k->to_double(&wide, EPIC_F64), (double)x))
            fail("wide", EPIC_F32, 0, i);
    }
    for (int i = 0; i < 256; i++) {
        const uint8_t byte = (uint8_t)i;
        if (!same(k->to_double(&byte, EPIC_E8M0), i == 255 ? NAN : ldexp(1.0, i - 127)))
            fail("to_double", EPIC_E8M0, 0, i);
    }
}

/* ------------------------------------------------------------------------------- copy ---- */

static void check_copy(const host_kernels *k, size_t n)
{
    buffer_clear(&sources[0]);
    buffer_clear(&out);
    for (size_t i = 0; i < n; i++) sources[0].row[i] = (char)next_random();
    k->copy(out.row, sources[0].row, n);
    if (memcmp(out.row, sources[0].row, n) != 0 || !buffer_kept(&out, (int64_t)n))
        fail("copy", EPIC_BYTES, (int64_t)n, 0);
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
        if (type == EPIC_F64) continue;
        check_quantize(k, type, kind, 128);
        check_quantize(k, type, kind, 32);
    }
}

static void check_variant(const host_kernels *k)
{
    variant = k->name;
    check_wide(k);
    for (int i = 0; i < 3; i++) check_format(k, &formats[i]);
    check_scale_edges(k);
    for (int i = 0; i < 60; i++) check_copy(k, next_random() % (MAX_N * 8));
    for (size_t n = 0; n < 70; n++) check_copy(k, n);
    for (int i = 0; i < 60; i++)
        for (int kind = 0; kind < NUM_KINDS; kind++) check_round(k, (enum kind)kind);
}

static void check_types(void)
{
    static const size_t bytes[] = {0, 4, 2, 2, 8, 1, 1, 4, 8, 0};
    variant = "types";
    for (uint32_t type = 0; type < 10; type++)
        if (epic_type_bytes(type) != bytes[type] || !epic_type_name(type))
            fail("bytes", EPIC_BYTES, type, 0);
    if (epic_type_bytes(UINT32_MAX) != 0) fail("bytes", EPIC_BYTES, -1, 0);
}

int main(void)
{
    const host_kernels *all[4];
    const int num = host_kernels_all(all);
    for (int i = 0; i < MAX_ROWS; i++) sources[i] = buffer_open();
    out = buffer_open();
    out2 = buffer_open();
    check_types();
    for (int i = 0; i < num; i++) check_variant(all[i]);
    if (host_kernels_get() != all[num - 1]) fail("host_kernels_get", EPIC_BYTES, num, 0);
    for (int i = 0; i < MAX_ROWS; i++) free(sources[i].memory);
    free(out.memory);
    free(out2.memory);
    if (num_failures == 0)
        printf("kernels: %d variants, up to %s\n", num, all[num - 1]->name);
    else
        fprintf(stderr, "kernels: %d failures\n", num_failures);
    return num_failures != 0;
}
