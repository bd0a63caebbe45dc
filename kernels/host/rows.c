/* SPDX-License-Identifier: Apache-2.0 */
/* The host's arithmetic on rows. CMake compiles this file once per kind of processor; VARIANT
 * is the name of the kind. kernels/kernels.h describes each function.
 *
 * Rows are summed in strips of STRIP_LANES columns. The sums of a strip stay in registers while
 * all rows are read. A strip is read from every row before it is written, so `out` may be one
 * of the rows. */
#include "kernels/kernels.h"

#include "dot.h"
#include "lanes.h"
#include "quantize.h"
#include "variant.h"

#define STRIP (STRIP_LANES / LANES)

/* Arguments of a weighted sum of rows. weights NULL: all weights are 1. */
typedef struct sum_args {
    void *out;
    const void *const *rows;
    const float *weights;
    int num_rows;
} sum_args;

/* Calls `function` with constant types, so that the compiler makes a version for each pair. */
#define FOR_EACH_PAIR(function, type, out_type, ...)       \
    do {                                                   \
        if (type == EPIC_BF16 && out_type == EPIC_BF16)    \
            function(__VA_ARGS__, EPIC_BF16, EPIC_BF16);   \
        else if (type == EPIC_BF16)                        \
            function(__VA_ARGS__, EPIC_BF16, EPIC_F32);    \
        else if (type == EPIC_F16 && out_type == EPIC_F16) \
            function(__VA_ARGS__, EPIC_F16, EPIC_F16);     \
        else if (type == EPIC_F16)                         \
            function(__VA_ARGS__, EPIC_F16, EPIC_F32);     \
        else if (out_type == EPIC_BF16)                    \
            function(__VA_ARGS__, EPIC_F32, EPIC_BF16);    \
        else if (out_type == EPIC_F16)                     \
            function(__VA_ARGS__, EPIC_F32, EPIC_F16);     \
        else                                               \
            function(__VA_ARGS__, EPIC_F32, EPIC_F32);     \
    } while (0)

/* Sums one strip of STRIP_LANES columns, from column `at` on. */
INLINE void sum_strip(const sum_args *args, bool weighted, int64_t at, epic_type type,
                      epic_type out_type)
{
    lanes sums[STRIP];
    const void *row = args->rows[0];
    lanes w = lanes_of(weighted ? args->weights[0] : 1.0f);
    for (int i = 0; i < STRIP; i++) {
        const lanes x = load_lanes(row, type, at + i * LANES);
        sums[i] = weighted ? lanes_mul(w, x) : x;
    }
    for (int r = 1; r < args->num_rows; r++) {
        row = args->rows[r];
        w = lanes_of(weighted ? args->weights[r] : 1.0f);
        for (int i = 0; i < STRIP; i++) {
            const lanes x = load_lanes(row, type, at + i * LANES);
            sums[i] = weighted ? lanes_fma(w, x, sums[i]) : lanes_add(sums[i], x);
        }
    }
    for (int i = 0; i < STRIP; i++) store_lanes(args->out, out_type, at + i * LANES, sums[i]);
}

/* Sums `count` columns (at most LANES) from column `at` on. Used for the columns at the end of
 * a row that do not fill a strip. */
INLINE void sum_tail(const sum_args *args, bool weighted, int64_t at, int64_t count,
                     epic_type type, epic_type out_type)
{
    lanes sum = load_tail(args->rows[0], type, at, count);
    if (weighted) sum = lanes_mul(lanes_of(args->weights[0]), sum);
    for (int r = 1; r < args->num_rows; r++) {
        const lanes x = load_tail(args->rows[r], type, at, count);
        sum = weighted ? lanes_fma(lanes_of(args->weights[r]), x, sum) : lanes_add(sum, x);
    }
    store_tail(args->out, out_type, at, count, sum);
}

INLINE void sum_of(const sum_args *args, bool weighted, int64_t n, epic_type type,
                   epic_type out_type)
{
    int64_t at = 0;
    for (; at + STRIP_LANES <= n; at += STRIP_LANES)
        sum_strip(args, weighted, at, type, out_type);
    for (; at < n; at += LANES)
        sum_tail(args, weighted, at, n - at < LANES ? n - at : LANES, type, out_type);
}

static void sum_f64(const sum_args *args, int64_t n)
{
    const float *weights = args->weights;
    for (int64_t i = 0; i < n; i++) {
        double sum = load_f64(args->rows[0], i);
        if (weights) sum *= (double)weights[0];
        for (int r = 1; r < args->num_rows; r++) {
            const double x = load_f64(args->rows[r], i);
            sum = weights ? __builtin_fma((double)weights[r], x, sum) : sum + x;
        }
        memcpy((char *)args->out + i * bytes_of(EPIC_F64), &sum, sizeof sum);
    }
}

/* Implements host_kernels.partial. A plain sum has the bits of a sum with weights of 1, because
 * 1 * x is x, and fma(1, x, sum) is sum + x. */
static void sum_partial(void *out, epic_type out_type, const void *const *rows,
                        const float *weights, int num_rows, epic_type type, int64_t n)
{
    const sum_args args = {out, rows, weights, num_rows};
    if (num_rows == 0)
        memset(out, 0, (size_t)(n * bytes_of(out_type)));
    else if (type == EPIC_F64)
        sum_f64(&args, n);
    else if (weights)
        FOR_EACH_PAIR(sum_of, type, out_type, &args, true, n);
    else
        FOR_EACH_PAIR(sum_of, type, out_type, &args, false, n);
}

/* Implements host_kernels.add. */
static void sum_rows(void *out, epic_type out_type, const void *const *rows, int num_rows,
                     epic_type type, int64_t n)
{
    const sum_args args = {out, rows, NULL, num_rows};
    if (num_rows == 0 || type != EPIC_F32 || out_type == EPIC_F32)
        sum_partial(out, out_type, rows, NULL, num_rows, type, n);
    else if (out_type == EPIC_BF16)
        sum_of(&args, false, n, EPIC_F32, EPIC_BF16);
    else
        sum_of(&args, false, n, EPIC_F32, EPIC_F16);
}

/* Implements host_kernels.scale. */
static void scale_row(void *out, const void *row, float w, epic_type type, int64_t n)
{
    sum_partial(out, type, &row, &w, 1, type, n);
}

static void dot_rows(double *sum, bool first, const void *a, const void *b, epic_type type,
                     int64_t n)
{
    if (first && n == 0)
        *sum = 0.0;
    else if (type == EPIC_F64)
        dot_f64(sum, first, a, b, n);
    else if (type == EPIC_BF16)
        dot_of(sum, first, a, b, EPIC_BF16, n);
    else if (type == EPIC_F16)
        dot_of(sum, first, a, b, EPIC_F16, n);
    else
        dot_of(sum, first, a, b, EPIC_F32, n);
}

/* These functions implement the functions of host_kernels with the same names. */
static void quantize_1x128(void *q, void *scales, const void *row, float w, epic_type type,
                           int64_t n)
{
    if (type == EPIC_BF16)
        quantize_of(q, scales, row, w, EPIC_BF16, n, 128);
    else if (type == EPIC_F16)
        quantize_of(q, scales, row, w, EPIC_F16, n, 128);
    else
        quantize_of(q, scales, row, w, EPIC_F32, n, 128);
}

static void quantize_1x32(void *q, void *scales, const void *row, float w, epic_type type,
                          int64_t n)
{
    if (type == EPIC_BF16)
        quantize_of(q, scales, row, w, EPIC_BF16, n, 32);
    else if (type == EPIC_F16)
        quantize_of(q, scales, row, w, EPIC_F16, n, 32);
    else
        quantize_of(q, scales, row, w, EPIC_F32, n, 32);
}

/* Returns one element of type F32, BF16 or F16. */
INLINE double load_one(const void *from, epic_type type)
{
    float x[LANES];
    store_f32(x, load_tail(from, type, 0, 1));
    return x[0];
}

#if LANES == 1
static void copy_row(void *to, const void *from, size_t n)
{
    memcpy(to, from, n);
}

static void fence_copies(void)
{
}
#else
#define LINE 256 /* number of bytes that copy_line() copies at a time */
/* rows with fewer bytes are copied by memcpy(), because the bytes at their ends that are not
 * aligned are a large part of such a row */
#define MIN_PAST_CACHES 1024

/* Copies LINE bytes with non-temporal stores. `to` must be aligned to sizeof(lanes). */
INLINE void copy_line(char *to, const char *from)
{
    const int step = (int)sizeof(lanes);
    lanes x[LINE / sizeof(lanes)];
    for (int i = 0; i < LINE / step; i++) x[i] = load_f32(from + i * step);
    for (int i = 0; i < LINE / step; i++) store_past_caches(to + i * step, x[i]);
}

/* Implements host_kernels.copy with non-temporal stores. An ordinary store would first read the
 * destination, and a non-temporal store saves this read. Keeping the data in this core's caches
 * would not help: the destinations are results, which are larger than the caches, and staging
 * rings, which are read by a core that shares no cache with this core. */
static void copy_row(void *to, const void *from, size_t n)
{
    if (n < MIN_PAST_CACHES) {
        memcpy(to, from, n);
        return;
    }
    const size_t head = -(uintptr_t)to % sizeof(lanes);
    memcpy(to, from, head);
    size_t at = head;
    for (; at + LINE <= n; at += LINE) copy_line((char *)to + at, (const char *)from + at);
    memcpy((char *)to + at, (const char *)from + at, n - at);
}

/* Implements host_kernels.fence_copies. Called once for many rows, because it takes long. */
static void fence_copies(void)
{
    _mm_sfence();
}
#endif

/* Implements host_kernels.to_double, also for E4M3 and E8M0. Returns 0 for other types. */
static double to_double(const void *from, epic_type type)
{
    uint8_t byte;
    memcpy(&byte, from, sizeof byte);
    switch (type) {
    case EPIC_F32:
        return load_one(from, EPIC_F32);
    case EPIC_BF16:
        return load_one(from, EPIC_BF16);
    case EPIC_F16:
        return load_one(from, EPIC_F16);
    case EPIC_F64:
        return load_f64(from, 0);
    case EPIC_E4M3:
        return float_of_e4m3(byte);
    case EPIC_E8M0:
        return double_of_e8m0(byte);
    default:
        return 0.0;
    }
}

/* Implements host_kernels.from_float, also for E4M3. Does nothing for other types. */
static void from_float(void *to, epic_type type, float x)
{
    const double wide = x;
    const uint8_t byte = e4m3_of_float(x);
    switch (type) {
    case EPIC_F32:
        store_tail(to, EPIC_F32, 0, 1, lanes_of(x));
        break;
    case EPIC_BF16:
        store_tail(to, EPIC_BF16, 0, 1, lanes_of(x));
        break;
    case EPIC_F16:
        store_tail(to, EPIC_F16, 0, 1, lanes_of(x));
        break;
    case EPIC_F64:
        memcpy(to, &wide, sizeof wide);
        break;
    case EPIC_E4M3:
        memcpy(to, &byte, sizeof byte);
        break;
    default:
        break;
    }
}

void PRODUCT_OF(VARIANT)(const host_product *product); /* product.c */

const host_kernels TABLE_OF(VARIANT) = {
    .name = NAME_OF(VARIANT),
    .has_vectors = LANES > 1,
    .copy = copy_row,
    .fence_copies = fence_copies,
    .partial = sum_partial,
    .add = sum_rows,
    .scale = scale_row,
    .dot = dot_rows,
    .quantize_1x128 = quantize_1x128,
    .quantize_1x32 = quantize_1x32,
    .product = PRODUCT_OF(VARIANT),
    .to_double = to_double,
    .from_float = from_float,
};
