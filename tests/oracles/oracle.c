/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle's loops over rows. Like those of the plan (oracle_plan.c) they include nothing
 * of the library except epic.h, so both cannot have the same mistake. */
#include "oracles/oracle.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------- elements ---- */

int64_t oracle_type_bytes(uint32_t type)
{
    switch (type) {
    case EPIC_F32:
        return 4;
    case EPIC_BF16:
    case EPIC_F16:
        return 2;
    case EPIC_F64:
        return 8;
    default:
        return 1;
    }
}

static double decode_f16(uint16_t bits)
{
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, -24);
    return sign * ldexp(1024 + mantissa, exponent - 25);
}

/* Rounds by arithmetic to a multiple of the unit in the last place, ties to even. */
static uint16_t encode_f16(double x)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x)) return 0x7e00;
    const double size = fabs(x);
    int exponent = 0;
    /* size = m * 2^exponent with m in [0.5, 1) */
    if (size > 0 && !isinf(x)) frexp(size, &exponent);
    const int unit = exponent - 11 > -24 ? exponent - 11 : -24;
    const double units = isinf(x) ? INFINITY : rint(ldexp(size, -unit));
    if (ldexp(units, unit) > 65504) return sign | 0x7c00;
    if (units < 1024) return sign | (uint16_t)units; /* the unit is 2^-24 */
    if (units == 2048) return sign | (uint16_t)((unit + 26) << 10);
    return sign | (uint16_t)(((unit + 25) << 10) + (int)units - 1024);
}

static uint16_t encode_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) return 0x7fc0;
    const uint32_t below = bits & 0xffff, odd = bits >> 16 & 1;
    return (uint16_t)((bits >> 16) + (below > 0x8000 || (below == 0x8000 && odd)));
}

double oracle_get(const void *row, uint32_t type, int64_t i)
{
    const unsigned char *at = (const unsigned char *)row + i * oracle_type_bytes(type);
    double wide;
    float single;
    uint16_t half;
    uint32_t bits;
    switch (type) {
    case EPIC_F64:
        memcpy(&wide, at, 8);
        return wide;
    case EPIC_F32:
        memcpy(&single, at, 4);
        return single;
    case EPIC_BF16:
        memcpy(&half, at, 2);
        bits = (uint32_t)half << 16;
        memcpy(&single, &bits, 4);
        return single;
    default:
        memcpy(&half, at, 2);
        return decode_f16(half);
    }
}

void oracle_put(void *row, uint32_t type, int64_t i, double x)
{
    unsigned char *at = (unsigned char *)row + i * oracle_type_bytes(type);
    const float single = (float)x;
    const uint16_t half = type == EPIC_BF16  ? encode_bf16(single)
                          : type == EPIC_F16 ? encode_f16(x)
                                             : 0;
    if (type == EPIC_F64)
        memcpy(at, &x, 8);
    else if (type == EPIC_F32)
        memcpy(at, &single, 4);
    else
        memcpy(at, &half, 2);
}

double oracle_round(uint32_t type, double x)
{
    unsigned char element[8];
    if (type == EPIC_F64) return x;
    if (type == EPIC_F32) return (float)x;
    oracle_put(element, type, 0, x);
    return oracle_get(element, type, 0);
}

bool oracle_same(const void *a, const void *b, uint32_t type, int64_t n)
{
    const size_t bytes = (size_t)(n * oracle_type_bytes(type));
    if (bytes == 0 || memcmp(a, b, bytes) == 0) return true;
    for (int64_t i = 0; i < n; i++) {
        const double x = oracle_get(a, type, i), y = oracle_get(b, type, i);
        if (isnan(x) && isnan(y)) continue;
        if (x != y || signbit(x) != signbit(y)) return false;
    }
    return true;
}

/* ----------------------------------------------------------------------------- sums ---- */

/* Numbers are stored as double and hold float32 values, unless the rows are float64. */
static double product(double a, double b, bool wide)
{
    return wide ? a * b : (double)((float)a * (float)b);
}

static double add(double a, double b, bool wide)
{
    return wide ? a + b : (double)((float)a + (float)b);
}

static double product_add(double a, double b, double c, bool wide)
{
    return wide ? fma(a, b, c) : (double)fmaf((float)a, (float)b, (float)c);
}

typedef struct part { /* a row of a token's sum */
    int rank;
    int64_t leaf;
    double weight;
    double *row; /* [n] */
} part;

typedef struct summing {
    uint32_t type, partial_type;
    bool wide;
    int64_t n;
    int num_parts;
    part parts[64];
} summing;

static void round_all(const summing *s, uint32_t type, double *row)
{
    for (int64_t i = 0; i < s->n; i++) row[i] = oracle_round(type, row[i]);
}

/* Computes the partial sum of the parts whose leaf (or rank) is `at`; returns false if there
 * are none. */
static bool partial(const summing *s, bool by_leaf, int64_t at, double *out)
{
    bool any = false;
    for (int p = 0; p < s->num_parts; p++) {
        const part *q = &s->parts[p];
        if ((by_leaf ? q->leaf : q->rank) != at) continue;
        for (int64_t i = 0; i < s->n; i++)
            out[i] = any ? product_add(q->weight, q->row[i], out[i], s->wide)
                         : product(q->weight, q->row[i], s->wide);
        any = true;
    }
    if (any) round_all(s, s->partial_type, out);
    return any;
}

static bool tree_has(const summing *s, int64_t first, int64_t count)
{
    for (int p = 0; p < s->num_parts; p++)
        if (s->parts[p].leaf >= first && s->parts[p].leaf < first + count) return true;
    return false;
}

static bool tree(const summing *s, int64_t first, int64_t count, double *out)
{
    if (!tree_has(s, first, count)) return false;
    if (count == 1) return partial(s, true, first, out);
    double *other = oracle_zeroed(s->n, sizeof *other);
    const bool low = tree(s, first, count / 2, out);
    const bool high = tree(s, first + count / 2, count / 2, low ? other : out);
    for (int64_t i = 0; low && high && i < s->n; i++)
        out[i] = oracle_round(s->partial_type, add(out[i], other[i], s->wide));
    free(other);
    return true;
}

static bool by_rank(const summing *s, int num_ranks, double *out)
{
    double *next = oracle_zeroed(s->n, sizeof *next);
    bool any = false;
    for (int r = 0; r < num_ranks; r++) {
        if (!partial(s, false, r, any ? next : out)) continue;
        for (int64_t i = 0; any && i < s->n; i++) out[i] = add(out[i], next[i], s->wide);
        any = true;
    }
    free(next);
    return any;
}

/* FLAT: the first leaf of a rank stands for all leaves of this rank, because they are in one
 * row. */
static int64_t leaf_of(const oracle_plan *p, int64_t expert)
{
    const int64_t leaves = oracle_is_flat(p) ? p->in.num_ranks : p->leaves;
    return expert / ((int64_t)p->in.layer.num_experts / leaves);
}

static void find_parts(const oracle_plan *p, int64_t token, oracle_fetch *fetch, void *self,
                       summing *s)
{
    const int64_t top_k = p->in.layer.top_k;
    unsigned char *row = oracle_zeroed(s->n, 8);
    for (int64_t c = token * top_k; c < (token + 1) * top_k; c++) {
        if (p->fate[c] < 0) continue;
        part *q = &s->parts[s->num_parts];
        q->rank = p->in.rank_of[p->in.ids[c]];
        bool seen = false; /* FLAT: one row for all choices of a rank */
        for (int i = 0; i < s->num_parts; i++) seen |= s->parts[i].rank == q->rank;
        if (oracle_is_flat(p) && seen) continue;
        q->leaf = p->in.layer.sum_order == EPIC_TREE ? leaf_of(p, p->in.ids[c]) : 0;
        float weight = 1;
        fetch(self, q->rank, oracle_is_flat(p) ? token : c, row, &weight);
        q->weight = weight;
        q->row = oracle_zeroed(s->n, sizeof *q->row);
        for (int64_t i = 0; i < s->n; i++) q->row[i] = oracle_get(row, s->type, i);
        s->num_parts++;
    }
    free(row);
}

/* Returns half a unit in the last place of 1. */
static double half_unit(uint32_t type)
{
    return type == EPIC_F64    ? 0x1p-53
           : type == EPIC_F32  ? 0x1p-24
           : type == EPIC_BF16 ? 0x1p-9
                               : 0x1p-11;
}

/* Computes the float64 sum and its error bound. Every term is rounded once for each
 * operation that adds it and once for each level of the tree, in sums no larger than the sum
 * of the absolute values. Near 0 the rounding error is half of the smallest number. */
static void store_truth(const summing *s, double *truth, double *bound)
{
    const double unit = half_unit(s->type), fine = half_unit(s->wide ? EPIC_F64 : EPIC_F32);
    for (int64_t i = 0; i < s->n; i++) {
        double sum = 0, size = 0;
        for (int p = 0; p < s->num_parts; p++) {
            sum += s->parts[p].weight * s->parts[p].row[i];
            size += fabs(s->parts[p].weight * s->parts[p].row[i]);
        }
        truth[i] = sum;
        bound[i] = size * (20 * unit + 2 * s->num_parts * fine) * 1.1 +
                   (s->type == EPIC_F16 ? 20 * 0x1p-25 : 80 * 0x1p-133);
    }
}

void oracle_combine(const oracle_plan *p, int64_t token, uint32_t type, int64_t n,
                    oracle_fetch *fetch, void *self, void *out, double *truth, double *bound)
{
    summing s = {.type = type, .wide = type == EPIC_F64, .n = n};
    s.partial_type = p->in.layer.partial_type == EPIC_F32 && !s.wide ? EPIC_F32 : type;
    find_parts(p, token, fetch, self, &s);
    double *sum = oracle_zeroed(n, sizeof *sum);
    const int64_t leaves = oracle_is_flat(p) ? p->in.num_ranks : p->leaves;
    if (p->in.layer.sum_order == EPIC_TREE)
        tree(&s, 0, leaves, sum);
    else
        by_rank(&s, p->in.num_ranks, sum);
    for (int64_t i = 0; i < n; i++) oracle_put(out, type, i, sum[i]);
    if (truth) store_truth(&s, truth, bound);
    for (int i = 0; i < s.num_parts; i++) free(s.parts[i].row);
    free(sum);
}

void oracle_scale(const void *row, float w, uint32_t type, int64_t n, void *out)
{
    for (int64_t i = 0; i < n; i++)
        oracle_put(out, type, i, product(w, oracle_get(row, type, i), type == EPIC_F64));
}

/* ------------------------------------------------------------------------------- dot ---- */

typedef struct term { /* a term of a sum, which may be absent */
    bool there;
    double x;
} term;

static term plus(term a, term b, bool wide)
{
    if (!a.there || !b.there) return a.there ? a : b;
    return (term){true, add(a.x, b.x, wide)};
}

static term dot_block(const void *a, const void *b, uint32_t type, int64_t at, int64_t n)
{
    const bool wide = type == EPIC_F64;
    term sums[256] = {{false, 0}};
    for (int64_t i = at; i < n && i < at + 1024; i++) {
        const double x = oracle_get(a, type, i), y = oracle_get(b, type, i);
        term *sum = &sums[(i - at) % 256];
        sum->x = sum->there ? product_add(x, y, sum->x, wide) : product(x, y, wide);
        sum->there = true;
    }
    for (int distance = 4; distance >= 1; distance /= 2)
        for (int i = 0; i < 256; i++)
            if (i % 8 < distance) sums[i] = plus(sums[i], sums[i + distance], wide);
    for (int distance = 16; distance >= 1; distance /= 2)
        for (int group = 0; group < distance; group++)
            sums[group * 8] = plus(sums[group * 8], sums[(group + distance) * 8], wide);
    return sums[0];
}

float oracle_dot(const void *a, const void *b, uint32_t type, int64_t n)
{
    term sum = {false, 0};
    for (int64_t at = 0; at < n; at += 1024)
        sum = plus(sum, dot_block(a, b, type, at, n), type == EPIC_F64);
    return (float)sum.x;
}

/* -------------------------------------------------------------------------- quantize ---- */

static double decode_e4m3(int code)
{
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    return exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
}

/* Returns the nearest of all codes, whose values ascend. A tie goes to the even code. */
static uint8_t encode_e4m3(double x)
{
    const double size = fabs(x);
    int low = 0, high = 0x7e;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        *(decode_e4m3(middle) <= size ? &low : &high) = middle;
    }
    const double below = size - decode_e4m3(low), above = decode_e4m3(high) - size;
    const bool up = above < below || (above == below && high % 2 == 0);
    return (uint8_t)((up ? high : low) | (signbit(x) ? 0x80 : 0));
}

int64_t oracle_scale_bytes(uint32_t how, int64_t n)
{
    return how == EPIC_QUANTIZE_1X128 ? (n + 127) / 128 * 4 : (n + 31) / 32;
}

static void quantize_block(uint32_t how, const float *x, int64_t count, uint8_t *q, void *scale)
{
    float most = 0;
    bool finite = true;
    for (int64_t i = 0; i < count; i++) {
        finite &= isfinite(x[i]) != 0;
        if (fabsf(x[i]) > most) most = fabsf(x[i]);
    }
    if (how == EPIC_QUANTIZE_1X128) {
        float s = most / 448.0f;
        if (s == 0) s = 1;
        if (!finite) s = NAN;
        memcpy(scale, &s, sizeof s);
        for (int64_t i = 0; i < count; i++)
            q[i] = finite ? encode_e4m3((float)(x[i] / s)) : 0x7f;
        return;
    }
    int s = -127;
    while (most > ldexp(448, s)) s++;
    if (most == 0) s = 0;
    *(uint8_t *)scale = finite ? (uint8_t)(s + 127) : 255;
    for (int64_t i = 0; i < count; i++) q[i] = finite ? encode_e4m3(ldexp(x[i], -s)) : 0x7f;
}

void oracle_quantize(uint32_t how, const void *row, float w, uint32_t type, int64_t n,
                     uint8_t *q, void *scales)
{
    const int64_t block = how == EPIC_QUANTIZE_1X128 ? 128 : 32;
    const int64_t scale_bytes = how == EPIC_QUANTIZE_1X128 ? 4 : 1;
    for (int64_t at = 0; at < n; at += block) {
        const int64_t count = n - at < block ? n - at : block;
        float x[128];
        for (int64_t i = 0; i < count; i++)
            x[i] = (float)product(w, oracle_get(row, type, at + i), false);
        quantize_block(how, x, count, q + at,
                       (unsigned char *)scales + at / block * scale_bytes);
    }
}
