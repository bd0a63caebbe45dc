/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the tests of the host kernels. Their loops decode numbers by arithmetic and
 * round by searching all values of a type, so they share no code with the kernels. */
#ifndef EPIC_TEST_KERNELS_H
#define EPIC_TEST_KERNELS_H

#include "kernels/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_N 5000
#define MAX_ROWS 9
#define SLACK 64 /* bytes before and after every result that must stay unchanged */
#define CANARY 0xa5

static int num_failures;
static const char *variant;

static inline void fail(const char *what, epic_type type, int64_t n, int64_t at)
{
    if (num_failures++ < 20)
        fprintf(stderr, "%s %s %s: n %lld: wrong at %lld\n", variant, what,
                epic_type_name(type), (long long)n, (long long)at);
}

static inline uint64_t next_random(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1du >> 11;
}

static inline float float_of_bits(uint32_t bits)
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
    uint32_t infinity; /* the first code after the finite ones */
    bool saturates;
} format;

static const format formats[] = {
    {EPIC_BF16, 8, 7, 0x7f80, false},
    {EPIC_F16, 5, 10, 0x7c00, false},
    {EPIC_E4M3, 4, 3, 0x7f, true},
};

static inline const format *format_of(epic_type type)
{
    for (int i = 0; i < 3; i++)
        if (formats[i].type == type) return &formats[i];
    return NULL;
}

static inline uint32_t sign_of(const format *f)
{
    return 1u << (f->exponent_bits + f->mantissa_bits);
}

/* Returns the value of a code without sign. For `infinity` it is the value that would follow
 * the largest finite one. */
static inline double size_of_code(const format *f, uint32_t code)
{
    const int bias = (1 << (f->exponent_bits - 1)) - 1;
    const int exponent = (int)(code >> f->mantissa_bits);
    const int mantissa = (int)(code & ((1u << f->mantissa_bits) - 1));
    if (exponent == 0) return ldexp(mantissa, 1 - bias - f->mantissa_bits);
    return ldexp(mantissa + (1 << f->mantissa_bits), exponent - bias - f->mantissa_bits);
}

static inline double decode(const format *f, uint32_t code)
{
    const uint32_t size = code & (sign_of(f) - 1);
    double x = size_of_code(f, size);
    if (size == f->infinity && !f->saturates)
        x = INFINITY;
    else if (size >= f->infinity)
        return NAN;
    return code & sign_of(f) ? -x : x;
}

/* Returns the code nearest to x, by bisection over all codes. A tie goes to the even code. */
static inline uint32_t encode(const format *f, float x)
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

static inline double get(const void *row, epic_type type, int64_t i)
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

static inline void put(void *row, epic_type type, int64_t i, double x)
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

static inline bool same(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && !signbit(a) == !signbit(b));
}

/* -------------------------------------------------------------------- inputs, results ---- */

typedef enum kind { PLAIN, SMALL, ANY_BITS, NUM_KINDS } kind;

static const double edges[] = {0.0,     -0.0,      1.0,      -1.0,    INFINITY, -INFINITY,
                               NAN,     0x1p-149,  0x1p-126, 0x1p127, 0x1p-133, -0x1p-24,
                               65504.0, 65520.0,   448.0,    464.0,   0x1p-9,   0x1p-10,
                               3.4e38,  -0x1p-148, 0x1p-14,  0x1p-6};

static inline double random_value(kind kind, epic_type type)
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
    char *row; /* a row at any address */
} buffer;

static inline buffer buffer_open(void)
{
    buffer b = {malloc(MAX_N * 8 + 2 * SLACK + 16), NULL};
    if (!b.memory) {
        puts("skipped: no memory");
        exit(77);
    }
    return b;
}

static inline void buffer_clear(buffer *b)
{
    memset(b->memory, CANARY, MAX_N * 8 + 2 * SLACK + 16);
    b->row = (char *)b->memory + SLACK + next_random() % 16;
}

/* Checks that only `bytes` bytes of the row were written. */
static inline bool buffer_kept(const buffer *b, int64_t bytes)
{
    for (int64_t i = 1; i <= SLACK; i++)
        if ((unsigned char)b->row[-i] != CANARY ||
            (unsigned char)b->row[bytes + i - 1] != CANARY)
            return false;
    return true;
}

static inline void buffer_fill(buffer *b, epic_type type, int64_t n, kind kind)
{
    buffer_clear(b);
    for (int64_t i = 0; i < n; i++) put(b->row, type, i, random_value(kind, type));
}

static buffer sources[MAX_ROWS], out, out2;

static const epic_type row_types[] = {EPIC_F32, EPIC_BF16, EPIC_F16, EPIC_F64};

static inline int64_t random_n(void)
{
    static const int64_t some[] = {0, 1, 2, 7, 8, 15, 16, 31, 33, 63, 64, 65, 127, 129, 1024};
    const uint64_t r = next_random();
    if (r % 2 == 0) return some[(r >> 8) % (sizeof some / sizeof some[0])];
    return (int64_t)((r >> 8) % (r % 16 == 1 ? MAX_N : 600));
}

/* Runs check on every variant. Returns the program's exit status. */
static inline int kernels_check(void (*check)(const host_kernels *))
{
    const host_kernels *all[4];
    const int num = host_kernels_all(all);
    for (int i = 0; i < MAX_ROWS; i++) sources[i] = buffer_open();
    out = buffer_open();
    out2 = buffer_open();
    for (int i = 0; i < num; i++) {
        variant = all[i]->name;
        check(all[i]);
    }
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

#endif
